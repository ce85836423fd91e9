/* The border between the host side of the CUDA backend (C) and its kernels (.cu): one struct of arguments per
 * kernel, read by both compilers, and the list of kernels. Pointers are device addresses: the host passes
 * them on and never reads them, a kernel reads them through qc_view (kernel.cuh). Operations and letters as
 * in backend.h; rows are dense where no stride is given. */
#ifndef QC_CUDA_KERNELS_H
#define QC_CUDA_KERNELS_H

#include "score.h"

#include <stdint.h>

/* Most threads of a block, and columns that round_tile keeps on chip. */
#define QC_CUDA_THREADS    256
#define QC_CUDA_TILE       128
#define QC_CUDA_TILE_LD    (QC_CUDA_TILE + 1) /* odd: the elements of a column lie in different banks */
#define QC_CUDA_FACTOR     64                 /* columns that `factor` eliminates at a time */
#define QC_CUDA_STATS_ROWS 32                 /* slices of tokens of a block of column_stats */

/* kernel, module (file of src/compute/cuda), arguments */
#define QC_CUDA_KERNELS(X)                                                                                   \
    X(rms_norm, rows, norm)                                                                                  \
    X(rope, rows, rope)                                                                                      \
    X(gated_act, rows, pair)                                                                                 \
    X(add, rows, pair)                                                                                       \
    X(scale, rows, pair)                                                                                     \
    X(put_bias, rows, bias)                                                                                  \
    X(to_bf16, rows, to_bf16)                                                                                \
    X(add_lower, rows, lower)                                                                                \
    X(mirror, rows, mirror)                                                                                  \
    X(column_stats, rows, stats)                                                                             \
    X(quantize_acts, rows, acts)                                                                             \
    X(gather_rows, rows, listed)                                                                             \
    X(add_rows, rows, listed)                                                                                \
    X(attention_64, attention, attention)                                                                    \
    X(attention_128, attention, attention)                                                                   \
    X(attention_256, attention, attention)                                                                   \
    X(score, score, score)                                                                                   \
    X(quantize_rows, quant, quant)                                                                           \
    X(factor_diagonal, factor, factor)                                                                       \
    X(factor_panel, factor, factor)                                                                          \
    X(divide_columns, factor, divide)                                                                        \
    X(round_tile, round, round)                                                                              \
    X(fit_steps, round, fit)                                                                                 \
    X(fit_scale, round, fit)                                                                                 \
    X(row_dot, round, dot)

/* One block per row. */
typedef struct qc_cuda_norm_args {
    float *y;
    const float *x, *gain;
    int64_t ldy, ldx, dim;
    float gain_offset, eps;
} qc_cuda_norm_args;

/* One thread per pair of elements. */
typedef struct qc_cuda_rope_args {
    float *x;
    const float *cos_t, *sin_t;
    int64_t ldx, n_tokens, n_heads, head_dim, half;
} qc_cuda_rope_args;

/* gated_act: a = gate, b = up; add, scale: a = x, b unused. One thread per four elements; `vector`: all
 * pointers are multiples of 16 bytes. */
typedef struct qc_cuda_pair_args {
    float *y;
    const float *a, *b;
    int64_t n;
    float alpha;
    int32_t gelu, vector;
} qc_cuda_pair_args;

/* y[t, :] = bias (NULL: 0), or += with accumulate. One thread per element. */
typedef struct qc_cuda_bias_args {
    float *y;
    const float *bias;
    int64_t ldy, n_tokens, n_out;
    int32_t accumulate;
} qc_cuda_bias_args;

/* y[n_rows, n_cols] dense <- x rounded to bfloat16. One thread per element. */
typedef struct qc_cuda_to_bf16_args {
    uint16_t *y;
    const float *x;
    int64_t ldx, n_rows, n_cols;
} qc_cuda_to_bf16_args;

/* Lower triangle of h (stride ldh) += x[n, n], one thread per element. */
typedef struct qc_cuda_lower_args {
    float *h;
    const float *x;
    int64_t ldh, n;
} qc_cuda_lower_args;

/* One block of 32 x 8 threads per tile of 32 x 32; grid [tiles, tiles]. */
typedef struct qc_cuda_mirror_args {
    float *h;
    int64_t n;
} qc_cuda_mirror_args;

/* One block per 32 columns, QC_CUDA_STATS_ROWS slices of tokens of 32 threads each. */
typedef struct qc_cuda_stats_args {
    float *sum_abs, *max_abs;
    const float *x;
    int64_t ldx, n_tokens, n_dims;
} qc_cuda_stats_args;

/* One warp per group of a token. */
typedef struct qc_cuda_acts_args {
    float *y;
    const float *x;
    int64_t ldy, ldx, n_tokens, n_dims, group, n_groups;
    float qmax;
} qc_cuda_acts_args;

/* Grid [tiles of queries, heads]; attention_64: heads of at most 64 elements, and so on. Shared memory:
 * qc_cuda_attention_bytes. bf16: operands of both products are rounded. */
typedef struct qc_cuda_attention_args {
    float *out;
    const float *q, *k, *v;
    int64_t n_tokens, n_heads, n_kv_heads, head_dim, window;
    float scale, softcap;
    int32_t bf16;
} qc_cuda_attention_args;

/* Queries (and keys) of a tile for heads of at most `dim_max` elements. */
static inline int64_t qc_cuda_attention_tile(int64_t dim_max)
{
    return dim_max <= 128 ? 64 : 32;
}

/* Tiles of queries, of keys or values, and of weights; a row has one element more than it needs. */
static inline int64_t qc_cuda_attention_bytes(int64_t dim_max)
{
    int64_t t = qc_cuda_attention_tile(dim_max);
    return (2 * t * (dim_max + 1) + t * (t + 1)) * (int64_t)sizeof(float);
}

/* y[i, :] = x[rows[i], :], or y[rows[i], :] += alpha[i] x[i, :]; rows are all different. One thread per
 * element. */
typedef struct qc_cuda_listed_args {
    float *y;
    const float *x, *alpha;
    const int32_t *rows;
    int64_t n_rows, dim;
} qc_cuda_listed_args;

/* One block per token; b NULL: one model. Shared memory: a double or float of each warp, then two words of
 * each. */
#define QC_CUDA_SCORE_BYTES 256
typedef struct qc_cuda_score_args {
    qc_score *scores;
    const float *a, *b;
    const int32_t *targets;
    int64_t ld, vocab0, n_vocab;
    float softcap;
} qc_cuda_score_args;

typedef struct qc_cuda_quant_stats {
    double sq_error, sq_weight;
    int64_t n_clipped, n_zero_groups, n_small_scale, n_large_scale;
} qc_cuda_quant_stats;

/* Half a warp per row, because sums are taken in QC_QUANT_LANES = 16 parts. scale_dtype, sym_rule: ids of
 * qc_dtype and qc_sym_rule. */
typedef struct qc_cuda_quant_args {
    const float *w, *col_weight; /* col_weight NULL: all 1 */
    uint8_t *codes, *zeros;      /* zeros NULL: symmetric */
    float *scales;
    qc_cuda_quant_stats *stats; /* [n_rows] */
    int64_t n_rows, n_cols, group, n_groups;
    int32_t bits, symmetric, scale_dtype, sym_rule, search;
} qc_cuda_quant_args;

/* Columns j0 .. j0 + m - 1 (m <= QC_CUDA_FACTOR) of a[n, n]. factor_diagonal: one block; gives r[m, m] (R_JJ)
 * and pivots. factor_panel: one thread per column before j0; gives y[m, j0]. state[0]: first bad column or
 * -1. */
typedef struct qc_cuda_factor_args {
    float *a, *r, *y;
    double *pivots;
    int32_t *state;
    int64_t n, j0, m;
} qc_cuda_factor_args;

/* b[n_rows, n] /= pivots[n], one thread per element. */
typedef struct qc_cuda_divide_args {
    float *b;
    const double *pivots;
    int64_t n_rows, n;
} qc_cuda_divide_args;

/* Rounds the columns j0 .. j0 + m - 1 (m <= QC_CUDA_TILE) of all rows, one after the other; a warp takes a
 * row, a block keeps the coefficients among the columns on chip. inv and change NULL: round_forward. sum is
 * the block's part of [n_rows, ld_sum]; change is [n_rows, m]. */
typedef struct qc_cuda_round_args {
    const float *c, *inv;
    const float *target;
    float *error;
    const float *sum;
    const float *scales;
    const uint8_t *zeros; /* NULL: symmetric */
    const int32_t *group_of;
    uint8_t *codes;
    float *change;
    int64_t n_rows, n, n_groups, ld_sum, j0, m;
    float qmax;
} qc_cuda_round_args;

/* Group `index`, columns at .. at + m - 1. fit_steps: steps[n_rows, m] = code - zero, one thread per element.
 * fit_scale: a warp per row; with fit = steps h of the group and sum = h e there, the best scale, the errors
 * that follow, and steps <- change of the errors. */
typedef struct qc_cuda_fit_args {
    float *steps;
    const float *fit, *sum;
    const float *target;
    float *error, *scales;
    const uint8_t *codes, *zeros; /* zeros NULL: symmetric */
    int64_t n_rows, n, n_groups, ld_sum, at, m, index;
    int32_t bits, scale_dtype;
} qc_cuda_fit_args;

/* ret[r] = sum_j x[r, j] y[r, j], one block per row. */
typedef struct qc_cuda_dot_args {
    double *ret;
    const float *x, *y;
    int64_t n;
} qc_cuda_dot_args;

#endif
