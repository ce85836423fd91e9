/* Channel scaling of one site (docs/methods/awq.md, smoothquant.md): the inputs of some matrices are divided
 * by s, one number per channel, and the columns of the matrices multiplied by it. The division is folded into
 * whatever produces the inputs, so the 16-bit model stays as it is while its weights and activations become
 * easier to round. This file chooses s for one site by what the rounding would cost with it. */
#ifndef QC_FOLD_H
#define QC_FOLD_H

#include "backend.h"
#include "gptq.h"

typedef enum { QC_FOLD_NONE = 0, QC_FOLD_AWQ, QC_FOLD_SMOOTHQUANT } qc_fold_method;

typedef struct qc_fold_options {
    qc_fold_method method;
    int64_t n_ratios; /* AWQ: exponents i / (n_ratios - 1); at least 2 */
    double alpha;     /* SmoothQuant: exponent 0 .. 1, < 0 = each site chooses among QC_FOLD_ALPHAS */
    const qc_gptq_options *gptq; /* how the weights will be rounded; NULL = to nearest */
    bool refine;                 /* the best candidate is a start, see docs/methods/smoothquant.md */
    int64_t probe_rows;          /* of a site that candidates are compared on; the winner is checked on all */
} qc_fold_options;

#define QC_FOLD_ALPHAS 21 /* 0, 0.05 .. 1 */

/* AWQ: 20 ratios; SmoothQuant: alpha searched; 192 rows. */
qc_fold_options qc_fold_defaults(qc_fold_method method);

/* A matrix that reads the inputs; fetch gives its values as they are without the scaling of this site. */
typedef struct qc_fold_matrix {
    qc_fetch_rows_fn fetch;
    void *ctx;
    int64_t n_rows;
    const qc_quant_spec *spec;
} qc_fold_matrix;

#define QC_FOLD_MATRICES 3

typedef struct qc_fold_site {
    qc_fold_matrix matrices[QC_FOLD_MATRICES];
    int n_matrices;
    int64_t n_cols;          /* inputs */
    int64_t n_scales;        /* channels of the producer; fewer than n_cols where several inputs share one */
    const int32_t *scale_of; /* [n_cols] channel of an input; NULL: its own */
    const float *h;          /* backend [n_cols, n_cols], full, sum of x x^T */
    int64_t n_tokens;        /* in h */
    const float *sum_abs, *max_abs; /* host [n_cols], over the same tokens */
    const float *sample;            /* host [n_sample, n_cols] some inputs; used if act_bits */
    int64_t n_sample;
    int act_bits; /* inputs will be quantized while running; 0 = not */
    int64_t act_group;
    /* What the producer multiplies or adds to its channels and stores, e.g. the gain of a norm:
     * (gain + gain_offset) / s must be representable in its type. NULL: nothing is stored. */
    const float *gain; /* host [n_scales] */
    float gain_offset;
    qc_dtype gain_dtype;
} qc_fold_site;

/* Name of the choice to leave a site as it is. */
#define QC_FOLD_IDENTITY "identity"

typedef struct qc_fold_result {
    char choice[32];      /* "duo 0.55", "plain 0.30", "alpha 0.65", "alpha 0.65 +" (refined), "identity" */
    double loss;          /* mean squared output error per token of all matrices, with s */
    double loss_identity; /* without */
    int64_t n_limited;    /* channels that were left as they are because s or its quotient is out of range */
    bool refused;         /* the best candidate was worse than identity on all rows, which was taken */
} qc_fold_result;

/* Choose scales[n_scales] (host) and the producer's new gain[n_scales] (host; may be NULL if the site has
 * none). Identity is a candidate, and nothing that is worse than it is taken. */
int qc_fold_choose(qc_backend *be, const qc_fold_site *site, const qc_fold_options *options, float *scales,
                   float *gain, qc_fold_result *ret, qc_err *err) QC_WARN_UNUSED;

/* Bytes that a choice works with beside the site, for plans: n inputs, n_sample of them given if acts. */
uint64_t qc_fold_bytes(const qc_fold_options *options, int64_t n, int64_t n_sample, bool acts);

/* Make scales exact: new_gain = (gain + offset) / scales - offset rounded to dtype (F32, F16, BF16), then
 * scales = (gain + offset) / (new_gain + offset), so that the fold changes nothing but the rounding of
 * weights. Channels where gain + offset is 0, or where a value would leave the normal range of the type, keep
 * scale 1 and their gain; returns their number (those of gain 0 not counted). */
int64_t qc_fold_exact(const float *gain, float offset, qc_dtype dtype, int64_t n, float *scales,
                      float *new_gain);

#endif
