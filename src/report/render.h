/* Reports for people and for CI systems. All take checked documents (report_doc.h); whatever comes from them
 * is escaped for where it stands. */
#ifndef QC_RENDER_H
#define QC_RENDER_H

#include "qc_buf.h"
#include "qc_err.h"
#include "qc_json.h"

typedef enum {
    QC_RENDER_TEXT,     /* the summary that a run prints */
    QC_RENDER_MARKDOWN, /* fits a comment of a pull request: at most some 20 kB, whatever the report holds */
    QC_RENDER_HTML,     /* one page that needs nothing else, plots included */
    QC_RENDER_JUNIT     /* each output a suite, each gate a test case */
} qc_render_format;

/* Append the rendering of n_docs >= 1 reports, in their order. */
int qc_render(const cJSON *const *docs, int n_docs, qc_render_format format, qc_buf *ret,
              qc_err *err) QC_WARN_UNUSED;

/* An evaluation alone as some indented lines of text; the comparison only if there was a reference. */
int qc_render_evaluation(const cJSON *evaluation, qc_buf *ret, qc_err *err) QC_WARN_UNUSED;

#endif
