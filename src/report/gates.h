/* Gates: named limits on what a run measured. A gate whose value was not measured (NaN) never passes. */
#ifndef QC_GATES_H
#define QC_GATES_H

#include "qc_err.h"
#include "qc_result.h"

#include <stdbool.h>

/* What gates look at. evaluation may be NULL. */
typedef struct qc_measured {
    const qc_evaluation *evaluation;
    double fallbacks;      /* counted fallback events */
    double size_bytes;     /* of the artifact */
    double seconds;        /* wall time of the run so far */
    double peak_rss_bytes; /* of the process */
    double account_error;  /* qc_account_error */
} qc_measured;

/* QC_E_USAGE: no gate of this name (the known ones are listed), or a limit that is not finite or, for top1,
 * not in 0 .. 1. */
int qc_gate_check(const char *name, double limit, qc_err *err) QC_WARN_UNUSED;

/* Is the gate's value there only where the artifact is read back and measured? */
bool qc_gate_needs_verification(const char *name);

/* Compare. The name must have passed qc_gate_check; top1 is a least value, all others are largest values. */
qc_gate qc_gate_judge(const char *name, double limit, const qc_measured *measured);

#endif
