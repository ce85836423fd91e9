/* Sequential decision of gates: after some windows, look whether the mean over windows is on one side of the
 * limit for sure; if not, score more (docs/methods/decide.md). */
#ifndef QC_EVAL_DECIDE_H
#define QC_EVAL_DECIDE_H

#include "eval.h"

enum { QC_DECIDE_LEAST_WINDOWS = 8, QC_DECIDE_MAX_LOOKS = 64 };

/* Error that each side of a decision may make over all looks: to pass what is at the limit, to fail it. */
#define QC_DECIDE_ALPHA 0.05

/* Can a gate of this name be decided window by window? ("ppl_ratio", "delta_nll", "kld_mean", "top1") */
bool qc_decide_can(const char *gate);

/* Decide gates of which qc_decide_can is true (names static, n_gates >= 1), with at most n_windows.
 * QC_E_USAGE: fewer windows than QC_DECIDE_LEAST_WINDOWS. Free with qc_decider_free. */
int qc_decider_new(const char *const *gates, const double *limits, int n_gates, int64_t n_windows,
                   qc_decider **ret, qc_err *err) QC_WARN_UNUSED;
/* NULL is fine. */
void qc_decider_free(qc_decider *decider);

/* Windows that have to be scored for the next look; call before each. */
int64_t qc_decider_next(const qc_decider *decider);

/* Look at all windows so far (as many as qc_decider_next said; scores as in qc_summarize, paired). True:
 * nothing more is needed, as all gates are decided, one failed, or all windows were used. */
bool qc_decider_look(qc_decider *decider, const qc_token_score *scores, const qc_windows *windows);

/* What the last look said, one per gate: *ret_n of them, owned (qc_free). */
int qc_decider_outcome(const qc_decider *decider, qc_decision **ret, int *ret_n, qc_err *err) QC_WARN_UNUSED;

/* Boundaries of the standardised statistic of a one-sided test at looks with the given shares of all
 * information (ascending, the last 1): alpha is spent by alpha ln(1 + (e - 1) share) (Lan & DeMets 1983, the
 * form that is like Pocock's). For tests; n <= QC_DECIDE_MAX_LOOKS. */
void qc_decide_boundaries(const double *shares, int n, double alpha, double *ret);

#endif
