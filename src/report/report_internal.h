/* What the renderers share: text that is put together without looking at each step's error. */
#ifndef QC_REPORT_INTERNAL_H
#define QC_REPORT_INTERNAL_H

#include "qc_buf.h"
#include "qc_err.h"
#include "qc_json.h"

/* Output that remembers its first failure and ignores what comes after it. */
typedef struct qc_out {
    qc_buf *buf;
    qc_err *err;
    int rc;
} qc_out;

/* Text of the program's own. */
void qc_put(qc_out *out, const char *fmt, ...) QC_PRINTF(2, 3);

/* Text from outside as it may stand on a terminal: one line, no control characters. */
void qc_put_line(qc_out *out, const char *text);

/* Text from outside, escaped for HTML and XML (what XML can not hold becomes U+FFFD), as text and inside
 * quotes. */
void qc_put_xml(qc_out *out, const char *text);

/* Text from outside as one line of markdown that has no markup, links or mentions of its own; at most
 * max_bytes of it, cut in the middle. */
void qc_put_markdown(qc_out *out, const char *text, size_t max_bytes);

/* "123 B", "4.56 MB", powers of 1000; "?" for NaN. */
void qc_put_bytes(qc_out *out, double n_bytes);

/* Value of a gate: whole bytes in full, other figures with 6 digits; "not measured" for NaN. */
void qc_put_figure(qc_out *out, const char *name, double value);

/* One rendering each (render.h). */
void qc_put_text(qc_out *out, const cJSON *doc);
void qc_put_markdown_report(qc_out *out, const cJSON *doc);
void qc_put_junit(qc_out *out, const cJSON *const *docs, int n_docs);

/* A suite of JUnit XML: gates as a report or a verdict has them. doc is the report that its properties come
 * from, or NULL. */
typedef struct qc_junit_suite {
    const char *name;
    const cJSON *gates, *doc;
    double seconds;     /* NaN: unknown */
    const char *sha256; /* of the artifact; with doc */
} qc_junit_suite;

void qc_put_junit_suites(qc_out *out, const qc_junit_suite *suites, int n_suites);
void qc_put_html(qc_out *out, const cJSON *const *docs, int n_docs);

#endif
