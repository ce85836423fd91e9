/* Round-to-nearest quantization of one row: what its instruction sets share.
 *
 * kern_quant.c walks over the groups of a row and decides; the four loops over elements come in a table, one
 * per instruction set. All of them give the same bits: element-wise operations are single IEEE operations (no
 * fused multiply-add), and every sum is taken as 16 partial sums of the elements j mod 16, in ascending
 * order, then folded l[i] + l[i + 8], + 4, + 2, + 1. */
#ifndef KERN_QUANT_H
#define KERN_QUANT_H

#include "kern.h"

#define QC_QUANT_LANES     16
#define QC_QUANT_MAX_TRIES 48 /* candidates of one call of `scan`, even */

/* Grids to try for one group: value = scale * (code - zero), inv = 1 / scale. Zeros are integers 0 .. qmax.
 */
typedef struct qc_quant_tries {
    int n; /* 1 .. QC_QUANT_MAX_TRIES */
    float scale[QC_QUANT_MAX_TRIES], inv[QC_QUANT_MAX_TRIES], zero[QC_QUANT_MAX_TRIES];
} qc_quant_tries;

/* Partial sums of the statistics of one row, in double. */
typedef struct qc_quant_sums {
    double sq_error[QC_QUANT_LANES], sq_weight[QC_QUANT_LANES];
    int64_t n_clipped;
} qc_quant_sums;

/* x[n] are the values of one group, finite; h[n] >= 0 its column weights or NULL (all 1); codes are 0 ..
 * qmax. */
typedef struct qc_quant_ops {
    /* *ret_lo = min(0, x), *ret_hi = max(0, x). */
    void (*range)(const float *x, int64_t n, float *ret_lo, float *ret_hi);
    /* ret_error[i] = sum h (x - x')^2 for try i, codes made as round(x * inv). */
    void (*scan)(const float *x, const float *h, int64_t n, float qmax, const qc_quant_tries *tries,
                 float *ret_error);
    /* With the codes of one grid and p = code - zero: *ret_dot = sum h x p, *ret_norm = sum h p^2; the scale
     * dot / norm has the least error for these codes. */
    void (*fit)(const float *x, const float *h, int64_t n, float qmax, float inv, float zero, float *ret_dot,
                float *ret_norm);
    /* codes[n] = clamp(round(x / scale) + zero), halves to even; adds to *sums. */
    void (*encode)(const float *x, const float *h, int64_t n, float qmax, float scale, float zero,
                   uint8_t *codes, qc_quant_sums *sums);
} qc_quant_ops;

/* The slot `quantize_row` of kern.h over a table of loops. */
void qc_quant_row(const qc_quant_ops *ops, const float *w, int64_t n_cols, const qc_quant_spec *spec,
                  const float *col_weight, uint8_t *codes, float *scales, uint8_t *zeros,
                  qc_quant_stats *stats);

/* One row on a grid with minima or super-blocks; the columns are a multiple of the super-block. Adds to
 * *stats. */
void qc_quant_super_row(const float *w, int64_t n_cols, const qc_quant_spec *spec, const float *col_weight,
                        const qc_code_rows *row, qc_quant_stats *stats);

/* s[n] = what is stored for these scales in `dtype` on a grid of `bits`: rounded to nearest even, never 0 and
 * never so large that a decoded value could overflow. */
void qc_quant_store_scales(float *s, int n, qc_dtype dtype, int bits);

#endif
