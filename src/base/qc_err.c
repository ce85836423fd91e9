#include "qc_err.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Copy src to dst[cap], control bytes as \xNN, cut at a whole character. */
static void copy_one_line(char *dst, size_t cap_bytes, const char *src)
{
    size_t n = 0;
    for (; *src; src++) {
        unsigned char c = (unsigned char)*src;
        if (c < 0x20 || c == 0x7f) {
            if (n + 5 > cap_bytes)
                break;
            n += (size_t)snprintf(dst + n, cap_bytes - n, "\\x%02x", c);
        } else {
            if (n + 2 > cap_bytes)
                break;
            dst[n++] = (char)c;
        }
    }
    while (*src && n > 0 && ((unsigned char)dst[n - 1] & 0xC0) == 0x80)
        n--; /* cut: drop the tail of a split UTF-8 character */
    if (*src && n > 0 && (unsigned char)dst[n - 1] >= 0xC0)
        n--;
    dst[n] = 0;
}

int qc_fail(qc_err *err, int code, const char *fmt, ...)
{
    if (err) {
        char raw[QC_ERR_MSG_BYTES];
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(raw, sizeof raw, fmt, ap);
        va_end(ap);
        copy_one_line(err->msg, sizeof err->msg, raw);
        err->code = code;
    }
    return code;
}

int qc_err_prefix(qc_err *err, const char *fmt, ...)
{
    if (!err)
        return QC_E_INPUT;
    char prefix[QC_ERR_MSG_BYTES / 2], raw[2 * QC_ERR_MSG_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(prefix, sizeof prefix, fmt, ap);
    va_end(ap);
    snprintf(raw, sizeof raw, "%s: %s", prefix, err->msg);
    copy_one_line(err->msg, sizeof err->msg, raw);
    return err->code;
}

int qc_fail_nomem(qc_err *err, const char *what, unsigned long long n_bytes)
{
    return qc_fail(err, QC_E_RESOURCE, "out of memory: %llu bytes for %s", n_bytes, what);
}

int qc_exit_code(int code)
{
    switch (code) {
    case QC_OK:
        return 0;
    case QC_E_USAGE:
        return 2;
    case QC_E_INPUT:
        return 3;
    case QC_E_UNSUPPORTED:
        return 4;
    case QC_E_INTERRUPTED:
        return 130;
    default:
        return 5;
    }
}
