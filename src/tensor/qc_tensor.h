/* Logical tensors: what readers hand out and writers take, whatever the file format.
 *
 * A matrix is [rows, cols] = [out, in], row major; a tensor of another rank is seen as rows = product of all
 * but the last dimension, cols = the last one (a vector is one row). A tensor is dense (dtype says how) or
 * lies on a quantization grid (dtype QC_DT_GRID): integer codes, and per row and group of input columns a
 * scale and, unless the grid is symmetric, a zero point or a minimum:
 *     affine   value = scale * (code - zero), zero an integer; 2^(bits - 1) if symmetric
 *     minimum  value = scale * code + min
 *     super    the same with scale = d * sub_scale and min = -(dmin * sub_min), small integers that share one
 *              d and dmin in each super-block; symmetric: value = scale * (code - 2^(bits - 1)) */
#ifndef QC_TENSOR_H
#define QC_TENSOR_H

#include "qc_dtype.h"
#include "qc_err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QC_MAX_DIMS 4

typedef enum {
    QC_GRID_NONE = 0,   /* dense */
    QC_GRID_AFFINE = 1, /* scale * (code - zero) */
    QC_GRID_MIN = 2,    /* scale * code + min */
    QC_GRID_SUPER = 3   /* scales (and minima) of groups are integers times those of a super-block */
} qc_grid_kind;

typedef struct qc_grid {
    qc_grid_kind kind;
    int bits;             /* 2 .. 8; codes are unsigned, 0 .. 2^bits - 1 */
    bool symmetric;       /* every zero point is 2^(bits - 1) and none is stored, nor is a minimum */
    int64_t group_elems;  /* consecutive input columns that share a scale; = cols for one scale per row */
    qc_dtype scale_dtype; /* QC_DT_F16, QC_DT_BF16 or QC_DT_F32: scales (minima, d, dmin) are exact in it */
    int64_t super_elems;  /* QC_GRID_SUPER: columns of a super-block, a multiple of the group; else 0 */
    int sub_bits; /* QC_GRID_SUPER: of sub-scales and sub-minima; those of a symmetric grid are signed */
} qc_grid;

/* Is the last word of a grid's values a minimum that is added, instead of a zero point? */
static inline bool qc_grid_has_min(const qc_grid *grid)
{
    return grid->kind == QC_GRID_MIN || (grid->kind == QC_GRID_SUPER && !grid->symmetric);
}

/* Plain description; strings belong to whoever made it. */
typedef struct qc_tensor_info {
    const char *name;
    qc_dtype dtype;
    int n_dims; /* 0 .. QC_MAX_DIMS */
    int64_t shape[QC_MAX_DIMS];
    qc_grid grid;
    int act_bits; /* its inputs are quantized while running (backend's quantize_acts); 0 = they are not */
    int64_t act_group; /* columns of the inputs that share a scale; 0 = one scale per token */
    uint64_t n_bytes;  /* bytes that the tensor takes in its file, scales and padding included */
} qc_tensor_info;

int64_t qc_tensor_n_elems(const qc_tensor_info *info); /* 1 for rank 0 */
int64_t qc_tensor_rows(const qc_tensor_info *info);    /* 0 if a dimension is 0 */
int64_t qc_tensor_cols(const qc_tensor_info *info);    /* 1 for rank 0 */

/* Number of groups per row, ceil(cols / group_elems); 0 for a dense tensor. */
int64_t qc_tensor_n_groups(const qc_tensor_info *info);

/* Some rows of a tensor on a grid, unpacked. The arrays belong to the caller. scales and mins of a grid of
 * super-blocks are the products (exact in float32); what is stored stands in the last three. */
typedef struct qc_code_rows {
    int64_t n_rows;
    uint8_t *codes; /* [n_rows, cols] */
    float *scales;  /* [n_rows, n_groups], exact in the grid's scale_dtype; may be negative */
    uint8_t *zeros; /* [n_rows, n_groups]; NULL if the grid is symmetric or has minima */
    float *mins;    /* [n_rows, n_groups]: what is added to scale * code; NULL if the grid has no minima */
    /* QC_GRID_SUPER, else NULL: */
    float *supers; /* [n_rows, n_supers, 2] d and dmin (0 if symmetric) */
    int16_t *subs; /* [n_rows, n_groups, 2] sub-scale and sub-minimum (0 if symmetric) */
} qc_code_rows;

/* Arrays of a grid's rows (those that it has, the others NULL), uninitialised; release with
 * qc_code_rows_free. */
int qc_code_rows_alloc(const qc_grid *grid, int64_t n_rows, int64_t cols, qc_code_rows *ret,
                       qc_err *err) QC_WARN_UNUSED;
/* NULL members are fine. */
void qc_code_rows_free(qc_code_rows *rows);

/* A view without the arrays that the grid does not have, of rows that have all of them. */
qc_code_rows qc_code_rows_for(const qc_code_rows *all, const qc_grid *grid);

/* *dst row `to` = *src row `from`, both of the grid. */
void qc_code_rows_copy(qc_code_rows *dst, int64_t to, const qc_code_rows *src, int64_t from,
                       const qc_grid *grid, int64_t cols);

/* The rows from `row` on, as a view (of 0 rows so far). */
qc_code_rows qc_code_rows_from(const qc_code_rows *rows, const qc_grid *grid, int64_t cols, int64_t row);

/* scales and mins of n_rows of a grid of super-blocks from supers and subs. */
void qc_code_rows_multiply(qc_code_rows *rows, const qc_grid *grid, int64_t cols);

/* dst[n_rows, cols] = values of the rows. `group_elems` may leave a shorter last group. */
void qc_code_rows_decode(const qc_code_rows *rows, const qc_grid *grid, int64_t cols, float *dst);

/* "[2048, 1024]"; cut to cap_bytes. */
void qc_shape_text(const int64_t *shape, int n_dims, char *ret, size_t cap_bytes);

/* Index of the first NaN or infinity among n_elems values, -1 if all are finite. */
int64_t qc_first_nonfinite(const float *x, int64_t n_elems);

/* Largest |x| of n_elems values, 0 of none; infinity or a NaN if there is any. */
float qc_largest_abs(const float *x, int64_t n_elems);

/* Dense elements to float32 (F32, F16, BF16, F64, I8, U8, I16, U16, I32, BOOL). QC_E_UNSUPPORTED for others.
 * src need not be aligned. */
int qc_dense_to_f32(qc_dtype dtype, const void *src, int64_t n_elems, float *dst, qc_err *err) QC_WARN_UNUSED;

/* float32 to F32, F16, BF16 or F64, rounded to nearest. QC_E_UNSUPPORTED for others. dst need not be aligned.
 */
int qc_dense_from_f32(qc_dtype dtype, const float *src, int64_t n_elems, void *dst,
                      qc_err *err) QC_WARN_UNUSED;

#endif
