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

/* Which output of b answers to each of a: the one of the same file name, of those left over the next of the
 * same format, and where both runs have one output these two. *ret is owned (qc_free): for each output of a
 * the place of b's, -1 where none answers. */
int qc_subject_match(const qc_report_pair *pair, int **ret, qc_err *err) QC_WARN_UNUSED;

/* QC_E_INPUT: the hashes say that the models differ (not looked at with other_model), or that what was scored
 * of outputs that answer to each other does: tokenizer, text, windows. */
int qc_subject_check(const qc_report_pair *pair, bool other_model, qc_err *err) QC_WARN_UNUSED;

#endif
