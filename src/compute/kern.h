/* Kernels of the CPU backend: a table of function pointers, filled once by qc_kern_init (reference first,
 * then each higher instruction set the processor has overwrites its slots). A kernel only loops: it allocates
 * nothing, knows no threads and no errors; the callers in cpu/ check shapes and split the work. Pointers need
 * no alignment. */
#ifndef QC_KERN_H
#define QC_KERN_H

#include "backend.h"

/* Largest number of outputs in a panel of a packed matrix (the `nr` of any table). */
#define QC_KERN_MAX_NR 32

/* Most logits in one call of score_block: two blocks of float32 stay in the first level cache. */
#define QC_SCORE_BLOCK 1024

/* State of one row of an online softmax: largest score and sum of exp(score - max) so far. */
typedef struct qc_softmax_state {
    float max, sum;
} qc_softmax_state;

/* Some columns of n_panels panels of rows in work by round_forward or descend; all panels are [columns, nr]
 * or [groups, nr] and `..._step` floats apart. Every instruction set rounds alike: code = clamp(nearest
 * even(t / scale) + zero), value = scale * (code - zero) without fused operations; a NaN gets code 0. */
typedef struct qc_round_part {
    int64_t n_cols, n_panels;
    const float *c; /* [n_cols, n_cols], stride ldc: coefficients among these columns */
    int64_t ldc;
    const float *inv; /* [n_cols], NULL: 1 */
    float qmax;       /* largest code */

    const float *scales, *zeros;
    int64_t grid_step;
    const int32_t *group_of; /* [n_cols] */

    const float *target;
    float *error;
    int64_t row_step;

    /* sum_i c[j, i] e_i without the columns of this part (forward), or with all errors as they were before
     * this part (else; the diagonal included); overwritten. */
    float *sum;
    float *codes; /* integers */
    /* Not NULL: a sweep over codes that exist. change = new error - old error; a code stays unless another is
     * nearer to t. */
    float *change;
    int64_t block_step;
} qc_round_part;

typedef struct qc_kern {
    const char *name; /* of the highest instruction set in the table */
    bool use_blas;    /* `gemm` is too slow for `linear`: use the BLAS library there */
    int mr;           /* rows that `gemm` computes at once: tiles of a multiple of it waste nothing */
    int nr;           /* outputs per panel */

    /* c[m, n] = a[m, k] b[k, n], or += with accumulate; n <= nr, row strides lda, ldc. b is a panel [k, nr]
     * whose columns beyond n hold zeros; the panel behind it is likely the next one asked for. Products are
     * added in the order of k. */
    void (*gemm)(float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t m, int64_t n,
                 int64_t k, bool accumulate);
    /* Panel dst[k, nr] from rows src[n, k] (stride lds): dst[j, i] = src[i, j], zeros for i >= n; n <= nr. */
    void (*pack)(float *dst, const float *src, int64_t lds, int64_t n, int64_t k);

    /* The way back: rows dst[n, k] (stride ldd) from panel src[k, nr], times alpha: dst[i, j] = alpha src[j,
     * i]; n <= nr. */
    void (*unpack)(float *dst, int64_t ldd, const float *src, int64_t n, int64_t k, float alpha);

    /* total[nr] += weight * sum over j < k of a[j, nr] b[j, nr]: products in double, where they are exact
     * (weight is a power of 2), added in the order of j. */
    void (*add_dots)(double *total, const float *a, const float *b, int64_t k, double weight);

    /* One row: y = x / sqrt(mean(x^2) + eps) * (gain + gain_offset); y may be x. */
    void (*rms_norm)(float *y, const float *x, const float *gain, float gain_offset, int64_t dim, float eps);
    /* One head of one token, x[2 * half] in place: pairs (i, i + half). */
    void (*rope)(float *x, const float *cos_t, const float *sin_t, int64_t half);
    /* y = act(gate) * up; y may be gate or up. */
    void (*gated_act)(float *y, const float *gate, const float *up, int64_t n, qc_activation act);
    /* y += alpha x */
    void (*add)(float *y, const float *x, float alpha, int64_t n);
    /* y = alpha x; y may be x. */
    void (*scale)(float *y, const float *x, float alpha, int64_t n);
    /* y = cap * tanh(x / cap); y may be x. */
    void (*softcap)(float *y, const float *x, float cap, int64_t n);

    /* One row of a block of scores s[n], of which lo .. hi - 1 (lo < hi) are seen: s = exp(s - new max) there
     * and 0 elsewhere; *state moves on. Returns exp(old max - new max), by which sums over earlier blocks
     * shrink. */
    float (*softmax)(float *s, int64_t lo, int64_t hi, int64_t n, qc_softmax_state *state);

    /* Take n <= QC_SCORE_BLOCK logits of ids id0 .. into *s (target_a and target_b are the caller's
     * business); b may be NULL. A logit that is NaN or infinite is counted and left out of its sum, its pair
     * left out of `cross`. */
    void (*score_block)(qc_score *s, const float *a, const float *b, int64_t n, int32_t id0);

    /* sum_abs[n] += sum_t |x[t, :]|, the sum of a call in float32 first; max_abs[n] = max(max_abs, |x[t,
     * :]|), NaN left out. */
    void (*column_stats)(float *sum_abs, float *max_abs, const float *x, int64_t ldx, int64_t n_tokens,
                         int64_t n);
    /* One group of quantize_acts: codes -qmax .. qmax; y may be x. NaN stays NaN. */
    void (*quantize_act)(float *y, const float *x, int64_t n, float qmax);
    /* Round the columns of a part one after the other. */
    void (*round_part)(const qc_round_part *part);

    /* As the operation of backend.h, for one row: codes[n_cols], scales and (unless symmetric)
     * zeros[n_groups]. Adds to *stats. Every instruction set gives the same bits. */
    void (*quantize_row)(const float *w, int64_t n_cols, const qc_quant_spec *spec, const float *col_weight,
                         uint8_t *codes, float *scales, uint8_t *zeros, qc_quant_stats *stats);
} qc_kern;

/* Fill *kern for a processor with the features `cpu_flags` (qc_cpu_flags()). */
void qc_kern_init(qc_kern *kern, uint32_t cpu_flags);

/* Each overwrites the slots it has; those of other architectures are not built. */
void qc_kern_init_ref(qc_kern *kern);
void qc_kern_init_quant_ref(qc_kern *kern);
void qc_kern_init_avx2(qc_kern *kern);
void qc_kern_init_quant_avx2(qc_kern *kern);
void qc_kern_init_avx512(qc_kern *kern);
void qc_kern_init_quant_avx512(qc_kern *kern);
void qc_kern_init_neon(qc_kern *kern);
void qc_kern_init_quant_neon(qc_kern *kern);

/* The reference of score_block, to which the others hand blocks with NaN or infinities. */
void qc_kern_score_block_ref(qc_score *s, const float *a, const float *b, int64_t n, int32_t id0);

#endif
