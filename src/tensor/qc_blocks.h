/* Blocks of ggml's tensor types: a fixed number of consecutive values of a row in a fixed number of bytes,
 * scales and codes together (docs/formats/gguf.md has the layouts). Every type lies on a qc_grid, so blocks
 * and logical tensors turn into each other without loss. */
#ifndef QC_BLOCKS_H
#define QC_BLOCKS_H

#include "qc_fp.h"
#include "qc_tensor.h"

/* Ids of tensor types in GGUF files. */
typedef enum {
    QC_BLOCK_F32 = 0,
    QC_BLOCK_F16 = 1,
    QC_BLOCK_Q4_0 = 2,
    QC_BLOCK_Q4_1 = 3,
    QC_BLOCK_Q5_0 = 6,
    QC_BLOCK_Q5_1 = 7,
    QC_BLOCK_Q8_0 = 8,
    QC_BLOCK_Q4_K = 12,
    QC_BLOCK_Q5_K = 13,
    QC_BLOCK_Q6_K = 14,
    QC_BLOCK_BF16 = 30
} qc_block_type;

#define QC_BLOCK_MAX_ELEMS  256
#define QC_BLOCK_MAX_GROUPS 16
#define QC_BLOCK_MAX_BYTES  256

typedef struct qc_block_info {
    const char *name; /* "Q4_K" */
    int id;           /* on disk: a qc_block_type, or that of a type that is only known by name */
    int n_elems;      /* values of a block; 1 for dense types, 0: the type is known by name alone */
    int n_bytes;      /* bytes of a block */
    qc_dtype dtype;   /* QC_DT_GRID for types with codes */
    qc_grid grid;     /* of such types */
} qc_block_info;

/* Row of the table of types: by id, by name (upper or lower case), by grid (group and super-block included;
 * of codes whose group is one block, so never by channel). NULL if there is none. */
const qc_block_info *qc_block_find(int64_t id);
const qc_block_info *qc_block_by_name(const char *name);
const qc_block_info *qc_block_by_grid(const qc_grid *grid);
/* Row i of the table, NULL behind its end. */
const qc_block_info *qc_block_at(int i);

/* dst[n_blocks * n_elems] = values of blocks of a type with codes, as ggml's reference computes them. */
void qc_block_decode(const qc_block_info *type, const uint8_t *src, int64_t n_blocks, float *dst);

/* Codes and scales of rows of n_cols (a multiple of the block) values; all arrays that the grid has must be
 * there. src holds n_rows rows without gaps. */
void qc_block_unpack(const qc_block_info *type, const uint8_t *src, int64_t n_rows, int64_t n_cols,
                     qc_code_rows *ret);

/* The same backwards. A group with affine codes that all stand for 0 gets the scale 0, as ggml writes it.
 * Scales must be exact in float16 and codes fit the type (checked where the grid was filled). */
void qc_block_pack(const qc_block_info *type, const qc_code_rows *rows, int64_t n_cols, uint8_t *dst);

/* Blocks of n_blocks * 32 finite values by the rounding of ggml's reference (round to nearest, scale from the
 * extremes), for Q4_0, Q4_1, Q5_0, Q5_1, Q8_0; false: the type is none of these. */
bool qc_block_encode(const qc_block_info *type, const float *src, int64_t n_blocks, uint8_t *dst);

/* d and dmin of one super-block, and the nearest sub-scales and sub-minima (never a sub-scale of 0), for the
 * scales and minima (<= 0) that its groups should have. */
static inline void qc_super_round(const qc_grid *grid, const float *scales, const float *mins, float super[2],
                                  int16_t *subs)
{
    int64_t n = grid->super_elems / grid->group_elems;
    int top = (1 << (grid->sub_bits - (grid->symmetric ? 1 : 0))) - 1, least = grid->symmetric ? -top : 1;
    float most = 0, deepest = 0;
    for (int64_t j = 0; j < n; j++) {
        float a = scales[j] < 0 ? -scales[j] : scales[j];
        most = a > most ? a : most;
        deepest = !grid->symmetric && -mins[j] > deepest ? -mins[j] : deepest;
    }
    most /= (float)top;
    deepest /= (float)top;
    super[0] = qc_f16_to_f32(qc_f32_to_f16(most < 65504.0f ? most : 65504.0f));
    super[0] = super[0] > 0 ? super[0] : 0x1p-24f;
    super[1] = qc_f16_to_f32(qc_f32_to_f16(deepest < 65504.0f ? deepest : 65504.0f));
    for (int64_t j = 0; j < n; j++) {
        float s = scales[j] / super[0], m = super[1] > 0 && !grid->symmetric ? -mins[j] / super[1] : 0;
        s = s > (float)top ? (float)top : s < (float)-top ? (float)-top : s;
        m = m > (float)top ? (float)top : m;
        int si = (int)(s + (s < 0 ? -0.5f : 0.5f)), mi = (int)(m > 0 ? m + 0.5f : 0);
        si = si < least ? least : si;
        subs[2 * j] = (int16_t)(si ? si : 1);
        subs[2 * j + 1] = (int16_t)mi;
    }
}

#endif
