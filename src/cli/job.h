/* One release job: plan, convert, read back, verify, gate, publish, report. */
#ifndef QC_CLI_JOB_H
#define QC_CLI_JOB_H

#include "qc_err.h"
#include "recipe.h"

#include <stdbool.h>

typedef struct qc_job_options {
    bool force;       /* replace existing outputs, after verification */
    bool resume;      /* continue the journals of a run that did not end */
    bool keep_failed; /* an artifact whose gate failed keeps its own name */
    bool dry_run;     /* print the plan, write nothing */
    bool json;        /* plan (dry run) or report on stdout as json instead of text */
    bool quiet;       /* no summary on stdout */
} qc_job_options;

/* Run the job of a recipe (model and at least one emit entry set). Returns the exit code of a job that ran to
 * its end (0; 1 a gate failed; 6 more fallbacks than allowed) or a QC_E_* code. */
int qc_job_run(const qc_recipe *recipe, const qc_job_options *options, qc_err *err) QC_WARN_UNUSED;

#endif
