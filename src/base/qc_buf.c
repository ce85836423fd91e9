#include "qc_buf.h"

#include "qc_alloc.h"
#include "qc_math.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static int reserve(qc_buf *buf, size_t n_more_bytes, qc_err *err)
{
    size_t need, cap;
    if (!qc_add_size(buf->n_bytes, n_more_bytes, &need) || !qc_add_size(need, 1, &cap))
        return qc_fail_nomem(err, "text buffer", n_more_bytes);
    if (buf->max_bytes && need > buf->max_bytes)
        return qc_fail(err, QC_E_INPUT, "text grows beyond the limit of %zu bytes", buf->max_bytes);
    if (cap <= buf->cap_bytes)
        return QC_OK;
    if (cap < buf->cap_bytes * 2)
        cap = buf->cap_bytes * 2;
    if (cap < 64)
        cap = 64;
    char *p = qc_realloc(buf->data, buf->n_bytes, cap);
    if (!p)
        return qc_fail_nomem(err, "text buffer", cap);
    buf->data = p;
    buf->cap_bytes = cap;
    return QC_OK;
}

int qc_buf_append(qc_buf *buf, const void *data, size_t n_bytes, qc_err *err)
{
    QC_TRY(reserve(buf, n_bytes, err));
    if (n_bytes)
        memcpy(buf->data + buf->n_bytes, data, n_bytes);
    buf->n_bytes += n_bytes;
    buf->data[buf->n_bytes] = 0;
    return QC_OK;
}

int qc_buf_printf(qc_buf *buf, qc_err *err, const char *fmt, ...)
{
    va_list ap, ap2;
    va_start(ap, fmt);
    va_copy(ap2, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    int rc = n < 0 ? qc_fail(err, QC_E_INPUT, "unprintable text") : reserve(buf, (size_t)n, err);
    if (rc == QC_OK) {
        vsnprintf(buf->data + buf->n_bytes, (size_t)n + 1, fmt, ap2);
        buf->n_bytes += (size_t)n;
    }
    va_end(ap2);
    return rc;
}

void qc_buf_clear(qc_buf *buf)
{
    if (!buf)
        return;
    qc_free(buf->data);
    buf->data = NULL;
    buf->n_bytes = buf->cap_bytes = 0;
}
