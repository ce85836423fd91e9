/* From the verify and run parts of a recipe to what src/eval takes: shared by qconvert and qeval. */
#ifndef QC_CLI_MEASURE_H
#define QC_CLI_MEASURE_H

#include "decide.h"
#include "eval.h"
#include "gates.h"
#include "recipe.h"

/* What a process takes before it does anything, which counts against run.memory: code, libraries and tables,
 * and what each thread works in. */
uint64_t qc_program_bytes(const qc_recipe *recipe);

/* Memory cap, scratch folder and the progress line. run.memory is 0 or more than qc_program_bytes. */
qc_eval_options qc_measure_options(const qc_recipe *recipe);

/* Refuse a cap that the program alone exceeds; `name` is how the user calls it. */
int qc_measure_check_cap(const qc_recipe *recipe, const char *name, qc_err *err) QC_WARN_UNUSED;

/* What decides the gates of `verify` window by window, with at most n_windows (qc_decider_free). QC_E_USAGE:
 * none of them can be. */
int qc_measure_decider(const qc_recipe *recipe, int64_t n_windows, qc_decider **ret,
                       qc_err *err) QC_WARN_UNUSED;

/* Judge the gates of `verify` into ret[n_gates]; a sequential decision counts for the gates that it was
 * about.
 */
void qc_measure_judge(const qc_recipe *recipe, const qc_measured *measured, qc_gate *ret);

/* Measure a model against itself on the first windows: with another number of threads than `pool`'s, and with
 * the other arithmetic. */
int qc_measure_noise(const qc_recipe *recipe, const qc_pool *pool, qc_backend *be, const qc_model *model,
                     const qc_windows *windows, qc_noise_floor *ret, qc_err *err) QC_WARN_UNUSED;

/* verify.text, or the bundled text without one; owned. */
int qc_measure_text(const qc_recipe *recipe, char **ret, qc_err *err) QC_WARN_UNUSED;

/* How the text of `verify` is cut for models of at most max_positions. QC_E_USAGE: a longer window was asked
 * for. */
int qc_measure_rule(const qc_recipe *recipe, int64_t max_positions, qc_cut_rule *ret,
                    qc_err *err) QC_WARN_UNUSED;

#endif
