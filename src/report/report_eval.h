/* The part `evaluation` of a report. */
#ifndef QC_REPORT_EVAL_H
#define QC_REPORT_EVAL_H

#include "qc_buf.h"
#include "qc_json.h"
#include "qc_result.h"

/* An evaluation as a document. Numbers that were not measured are null. Gaps from failed allocations are
 * found by qc_json_watched. */
cJSON *qc_report_eval_json(const qc_evaluation *e);

#endif
