/* GPTQ: rounding by second order statistics (docs/methods/gptq.md). One preparation serves all matrices that
 * share an input; each matrix is then solved on its own. */
#ifndef QC_GPTQ_H
#define QC_GPTQ_H

#include "backend.h"
#include "qc_quant_spec.h"

/* Order in which columns are rounded. Groups of columns and their scales stay where they are in all of them.
 */
typedef enum {
    QC_ORDER_NATURAL = 0, /* as stored */
    QC_ORDER_STATIC,      /* diag(H) descending ("act-order, static groups") */
    QC_ORDER_MIN_PIVOT    /* smallest Schur complement last (arXiv 2507.18553) */
} qc_gptq_order;

typedef struct qc_gptq_options {
    qc_gptq_order order;
    double damp; /* added to the diagonal, as a fraction of its mean; >= 0 */
    bool refit;  /* fit the scales again after the codes; a second pass with these scales; then each sweep */
    int64_t sweeps; /* of refit (if set) and coordinate descent after the passes */
} qc_gptq_options;

/* What measured best (docs/methods/gptq.md). */
qc_gptq_options qc_gptq_defaults(void);

/* What preparing an input led to. */
typedef struct qc_gptq_input_info {
    double damp;      /* used; more than asked for if the factorisation failed at first */
    int n_raises;     /* how often it was raised */
    int64_t n_dead;   /* columns that were 0 in all tokens */
    bool failed;      /* no damping helped: matrices are rounded to nearest */
    double mean_diag; /* of H, dead columns left out */
} qc_gptq_input_info;

typedef struct qc_gptq_input qc_gptq_input;

/* Prepare h[n, n] (backend memory, full, sum or mean of x x^T: its scale does not matter; borrowed until
 * qc_gptq_input_free). options NULL: nothing is factorised, matrices are rounded to nearest with diag(H) as
 * column weights (and are no fallback: info->failed stays false). QC_E_INPUT: a NaN or infinity in h, or a
 * negative diagonal. */
int qc_gptq_input_new(qc_backend *be, const float *h, int64_t n, const qc_gptq_options *options,
                      qc_gptq_input **ret, qc_gptq_input_info *ret_info, qc_err *err) QC_WARN_UNUSED;
void qc_gptq_input_free(qc_gptq_input *input);

/* h[n, n] (backend memory, full) <- (1 - share) h + share diag(h): the correlations of a sample of text
 * shrink, the energies of the columns stay. What GPTQ lets one column pay for another is only as true as
 * these correlations are on other text (a shrinkage estimator after Ledoit & Wolf 2004; docs/methods/gptq.md
 * has what it is worth). share 0 .. 1.
 */
int qc_gptq_shrink(qc_backend *be, float *h, int64_t n, double share, qc_err *err) QC_WARN_UNUSED;

/* Corrected target (docs/methods/gptq.md): w[n_rows, n] += alpha (w D + R) (H + damping)^-1, in place, host
 * memory. d[n, n] (backend) = sum of (x - x') x'^T, x the input in the 16-bit model and x' the one that H was
 * taken from (Qronos). r[n_rows, n] (backend) = sum of (y - y') x'^T, y and y' what the 16-bit model has
 * after the product and what this one would have there with w. Either may be NULL. d, r and H must be scaled
 * alike. Does nothing where the input could not be prepared. */
int qc_gptq_correct_target(qc_gptq_input *input, const float *d, const float *r, double alpha, float *w,
                           int64_t n_rows, qc_err *err) QC_WARN_UNUSED;

/* Errors of one matrix, all as sum over its rows of e H e^T with the undamped H. */
typedef struct qc_gptq_result {
    double error;       /* of the codes that were returned */
    double error_rtn;   /* of RTN with the same grid and the same search */
    double error_solve; /* after the first GPTQ pass alone; = error_rtn if the input could not be prepared */
    int64_t n_rtn_rows; /* rows where RTN was better than GPTQ, so that it was what the polish began with */
    bool all_rtn;       /* the input could not be prepared */
} qc_gptq_result;

/* Put w[n_rows, n] (host, finite) on the grid of the spec; the scale search weights columns by their pivots
 * (RTN's by diag(H)). Dead columns get the code nearest to 0. Fills *rows (arrays sized by the caller, all
 * rows at once) and adds to *stats (against w; weighted by diag(H)). No row is worse than RTN's. */
int qc_gptq_matrix(qc_gptq_input *input, const float *w, int64_t n_rows, const qc_quant_spec *spec,
                   qc_code_rows *rows, qc_quant_stats *stats, qc_gptq_result *ret,
                   qc_err *err) QC_WARN_UNUSED;

/* Bytes for plans: what qc_gptq_input_new keeps beside h, and what qc_gptq_matrix and qc_gptq_norm work with
 * beside their arguments and the backend's scratch. */
uint64_t qc_gptq_input_bytes(int64_t n);
uint64_t qc_gptq_matrix_bytes(int64_t n, int64_t n_rows);
/* Of qc_gptq_correct_target; with_d: d is given. */
uint64_t qc_gptq_correct_bytes(int64_t n, int64_t n_rows, bool with_d);

/* *ret += sum over the rows of w[n_rows, n] (host) of w H w^T, what the errors of a matrix compare with. */
int qc_gptq_norm(const qc_gptq_input *input, const float *w, int64_t n_rows, double *ret,
                 qc_err *err) QC_WARN_UNUSED;

#endif
