/* Blocks of ggml's tensor types: a fixed number of consecutive values of a row in a fixed number of bytes,
 * scales and codes together (docs/formats/gguf.md has the layouts). Every type lies on a qc_grid, so blocks
 * and logical tensors turn into each other without loss. */
#ifndef QC_BLOCKS_H
#define QC_BLOCKS_H

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

#endif
