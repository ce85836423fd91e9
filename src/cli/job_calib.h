/* Calibration of a job: the text, its windows, the journals, the run over the layers. */
#ifndef QC_CLI_JOB_CALIB_H
#define QC_CLI_JOB_CALIB_H

#include "fold.h"
#include "gptq.h"
#include "job_state.h"

/* Does an output with these grids need statistics of a text? */
bool qc_job_calibrates(const qc_recipe *recipe, const qc_recipe_quantize *quantize);

/* Does the method round by GPTQ, and with which options? */
bool qc_job_rounds_by_gptq(const qc_recipe_quantize *quantize);
qc_gptq_options qc_job_gptq_options(const qc_recipe_quantize *quantize);
/* Share of the correction of its targets (docs/methods/gptq.md); 0: none, and no second stream. */
double qc_job_correction(const qc_recipe_quantize *quantize);

/* How channel scales are chosen (method QC_FOLD_NONE: they are not), and for which inputs. */
qc_fold_options qc_job_fold_options(const qc_recipe_quantize *quantize, bool ret_sites[QC_N_DENSE_STAGES]);

/* Does any output? After qc_job_open_calibration. */
bool qc_job_has_calibration(const job *j);

/* Check what the recipe says about calibration and cut the windows, or open the statistics; nothing if no
 * output calibrates. QC_E_USAGE: no text, or settings that contradict each other. */
int qc_job_open_calibration(job *j, qc_err *err) QC_WARN_UNUSED;

/* Compare given statistics, if any, with the digests of the model (source_sha256) and take their own. */
int qc_job_check_statistics(job *j, qc_err *err) QC_WARN_UNUSED;

/* Make o->plan (cleared) by the policy, with what the run of its lead may put scales into. */
int qc_job_make_plan(const job *j, output *o, const qc_policy *policy, qc_event_list *events,
                     qc_err *err) QC_WARN_UNUSED;

/* Give an output its place in a calibrated run (`lead` and `plan` are set); again when its plan has changed.
 */
int qc_job_plan_calibration(job *j, output *o, qc_err *err) QC_WARN_UNUSED;

/* Memory that calibrated runs need, and scratch bytes with them under the cap of the recipe; both 0 without
 * calibration. */
void qc_job_calibration_bytes(const job *j, uint64_t *ret_memory, uint64_t *ret_scratch);

/* Perplexity of the model on the text (if there is one), then all runs, each into its journal. */
int qc_job_calibrate(job *j, qc_err *err) QC_WARN_UNUSED;

/* The journal that an output is written from; NULL without calibration. */
const qc_journal *qc_job_journal(const job *j, const output *o);

/* Remove the journals of a job that ended; of one that did not, those that hold nothing. */
void qc_job_close_calibration(job *j, bool ended);

#endif
