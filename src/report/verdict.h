/* The verdict of `qreport gate`: a report judged by limits and by what it has become since a baseline. */
#ifndef QC_VERDICT_H
#define QC_VERDICT_H

#include "qc_buf.h"
#include "qc_err.h"
#include "qc_json.h"
#include "render.h"
#include "subject.h"

#include <stdbool.h>

#define QC_VERDICT_SCHEMA "qconvert-verdict/1"

/* One gate. Limits are those of gates.h; what is allowed against a baseline is listed in docs/gates.md. */
typedef struct qc_gate_rule {
    const char *name;
    double limit;
    bool to_baseline;
} qc_gate_rule;

typedef struct qc_gate_rules {
    const qc_gate_rule *rules;
    int n_rules;
    double confidence;     /* one-sided, 0.5 < c < 1, of gates that compare windows */
    bool undecided_passes; /* where the windows are too few to tell */
} qc_gate_rules;

/* QC_E_USAGE: no such gate, or a limit that makes no sense. */
int qc_gate_rule_check(const qc_gate_rule *rule, qc_err *err) QC_WARN_UNUSED;

/* Judge report a of the pair, against its b (NULL: no rule may be to_baseline). Pairs must have passed
 * qc_subject_check. The document: schema, report, baseline, confidence, passed, gates with name, artifact,
 * limit, value, baseline, pass, reason. QC_E_INPUT: an output of one report has none in the other that
 * answers to it (qc_subject_match). Free with cJSON_Delete. */
int qc_verdict_make(const qc_report_pair *pair, const qc_gate_rules *rules, cJSON **ret_doc,
                    qc_err *err) QC_WARN_UNUSED;

/* As text, markdown or JUnit. */
int qc_verdict_render(const cJSON *verdict, qc_render_format format, qc_buf *ret, qc_err *err) QC_WARN_UNUSED;

#endif
