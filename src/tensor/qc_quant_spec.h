/* How the weights of one matrix are put on an affine grid: options shared by quant/ and the backends. */
#ifndef QC_QUANT_SPEC_H
#define QC_QUANT_SPEC_H

#include "qc_tensor.h"

/* Conventions of the symmetric grid (docs/methods/rtn.md); codes are unsigned with zero 2^(bits - 1) in all
 * three. */
typedef enum {
    QC_SYM_FULL_RANGE = 0, /* s = m / -2^(b-1), m the signed value of largest magnitude; s may be negative */
    QC_SYM_HALF_STEP = 1,  /* s = max|w| / ((2^b - 1) / 2) */
    QC_SYM_NARROW = 2      /* s = max|w| / (2^(b-1) - 1) */
} qc_sym_rule;

/* Criterion of the scale search, over candidates s = p * s_minmax, p from 1 downwards; p = 1 is always one,
 * so a search is never worse than min-max under its own criterion. */
typedef enum {
    QC_SEARCH_MINMAX = 0, /* no search */
    QC_SEARCH_MSE = 1,    /* sum_j h_j e_j^2 with column weights h (all 1 when none are given) */
    QC_SEARCH_GGML = 2    /* no search; grids of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 as ggml's reference rounds */
} qc_search;

typedef struct qc_quant_spec {
    qc_grid grid;         /* bits, symmetric, group, scale dtype */
    qc_sym_rule sym_rule; /* for symmetric grids */
    qc_search search;
} qc_quant_spec;

/* Sums over the rows of one call, added in row order. */
typedef struct qc_quant_stats {
    double sq_error;       /* sum of h_j (w - w')^2, against the decoded values of the stored scales */
    double sq_weight;      /* sum of h_j w^2 */
    int64_t n_clipped;     /* values outside the range of their group's grid by more than half a step */
    int64_t n_zero_groups; /* groups of zeros only */
    int64_t n_small_scale; /* groups whose scale is subnormal or was floored in the stored dtype */
    int64_t n_large_scale; /* groups whose scale was cut to the largest that can be stored and decoded */
} qc_quant_stats;

#endif
