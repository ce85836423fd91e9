/* Growable byte string with a maximum. */
#ifndef QC_BUF_H
#define QC_BUF_H

#include "qc_err.h"

#include <stddef.h>

typedef struct qc_buf {
    char *data;     /* owned; NUL-terminated once anything was appended */
    size_t n_bytes; /* without the NUL */
    size_t cap_bytes;
    size_t max_bytes; /* refuse to grow beyond; 0 = no limit */
} qc_buf;

/* Append bytes / a formatted string. QC_E_RESOURCE when out of memory, QC_E_INPUT when over max_bytes. */
int qc_buf_append(qc_buf *buf, const void *data, size_t n_bytes, qc_err *err) QC_WARN_UNUSED;
int qc_buf_printf(qc_buf *buf, qc_err *err, const char *fmt, ...) QC_WARN_UNUSED QC_PRINTF(3, 4);

/* Free the content and reset to empty. NULL is fine. */
void qc_buf_clear(qc_buf *buf);

#endif
