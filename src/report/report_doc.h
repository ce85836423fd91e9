/* Reports as they lie in files: read, checked against the schema (docs/report.schema.json), looked into.
 * Whoever renders, compares or judges works on the checked document alone, the program that made it included,
 * so that a report says the same wherever it is shown. */
#ifndef QC_REPORT_DOC_H
#define QC_REPORT_DOC_H

#include "qc_buf.h"
#include "qc_err.h"
#include "qc_json.h"

#include <stdbool.h>
#include <stddef.h>

/* One output of a run: what the report says of it. evaluation is NULL where nothing was measured. */
typedef struct qc_report_part {
    const cJSON *artifact, *tensors, *evaluation, *gates;
} qc_report_part;

/* Read a report and check it. QC_E_INPUT: the file is missing, no JSON, no report, or a value is not what the
 * schema says (named by its path in the document); QC_E_UNSUPPORTED: a newer schema. Free with cJSON_Delete.
 */
int qc_report_load(const char *path, cJSON **ret_doc, qc_err *err) QC_WARN_UNUSED;

/* The check alone; `name` is for messages. */
int qc_report_check(const cJSON *doc, const char *name, qc_err *err) QC_WARN_UNUSED;

/* The schema as JSON Schema (draft 2020-12). NULL when out of memory; free with cJSON_Delete. */
cJSON *qc_report_schema(void);

/* Outputs of a checked report / the i-th of them. */
int qc_report_n_parts(const cJSON *doc);
qc_report_part qc_report_part_at(const cJSON *doc, int i);

/* Number of a member (NaN if it is absent or null) / its text ("" likewise) / sum of a number over the
 * objects of a list, absent ones left out. */
double qc_report_number(const cJSON *object, const char *key);
const char *qc_report_string(const cJSON *object, const char *key);
double qc_report_sum(const cJSON *list, const char *key);

/* Did all gates of all outputs pass? True without gates. */
bool qc_report_passed(const cJSON *doc);

/* Occurrences of a kind of event (NULL: of all fallbacks). */
double qc_report_events(const cJSON *doc, const char *kind);

#endif
