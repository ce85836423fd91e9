/* What `qreport compare` tells of two reports. */
#ifndef QC_COMPARE_H
#define QC_COMPARE_H

#include "qc_buf.h"
#include "qc_err.h"
#include "qc_json.h"
#include "render.h"
#include "subject.h"

#define QC_COMPARISON_SCHEMA "qconvert-comparison/1"

/* Compare two reports that passed qc_subject_check, output by output (qc_subject_match). Figures (size,
 * evaluation, fallbacks, errors of tensors) differ if they are further apart than `tolerance` times the
 * larger; time and memory, which change from run to run, are told but never count. The document: schema, a,
 * b, confidence, same; output_a, output_b, figures, windows (mean difference b - a of NLL and KL divergence
 * with its interval, null without pairs of windows) and tensors that differ most, all of the first output and
 * the same of each further one in `others`, where output_b is null if none answers, and nothing more is told;
 * only_in_b: outputs of b that answer to none; settings that differ. NULL when out of memory; free with
 * cJSON_Delete. */
cJSON *qc_compare_make(const qc_report_pair *pair, double tolerance);

/* As text or markdown. */
int qc_compare_render(const cJSON *comparison, qc_render_format format, qc_buf *ret,
                      qc_err *err) QC_WARN_UNUSED;

#endif
