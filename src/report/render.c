#include "render.h"

#include "report_internal.h"

int qc_render(const cJSON *const *docs, int n_docs, qc_render_format format, qc_buf *ret, qc_err *err)
{
    qc_out out = {.buf = ret, .err = err};
    if (format == QC_RENDER_JUNIT)
        qc_put_junit(&out, docs, n_docs);
    else if (format == QC_RENDER_HTML)
        qc_put_html(&out, docs, n_docs);
    for (int i = 0; i < n_docs && (format == QC_RENDER_TEXT || format == QC_RENDER_MARKDOWN); i++) {
        if (i > 0)
            qc_put(&out, "\n");
        if (format == QC_RENDER_TEXT)
            qc_put_text(&out, docs[i]);
        else
            qc_put_markdown_report(&out, docs[i]);
    }
    return out.rc;
}
