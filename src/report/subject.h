/* Are two reports about the same thing? What is not, is not compared. */
#ifndef QC_SUBJECT_H
#define QC_SUBJECT_H

#include "qc_err.h"
#include "qc_json.h"

#include <stdbool.h>

/* Two checked reports with the names of their files. */
typedef struct qc_report_pair {
    const cJSON *a, *b;
    const char *a_name, *b_name;
} qc_report_pair;

/* QC_E_INPUT: the hashes say that the models differ (not looked at with other_model), or that what was scored
 * does: tokenizer, text, windows. */
int qc_subject_check(const qc_report_pair *pair, bool other_model, qc_err *err) QC_WARN_UNUSED;

#endif
