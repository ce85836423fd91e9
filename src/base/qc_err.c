#include "qc_err.h"

#include "qc_file.h"
#include "qc_json.h"

#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define MAX_RAW_BYTES (4 * QC_ERR_MSG_BYTES)

/* Bytes of the printable character at s: 0 for control characters (C0, DEL, C1, line and paragraph separator)
 * and for bytes that are no UTF-8. */
static size_t printable_bytes(const char *s)
{
    const unsigned char *u = (const unsigned char *)s;
    size_t n_bytes = qc_utf8_char_bytes(s);
    if (n_bytes == 0 || u[0] < 0x20 || u[0] == 0x7f)
        return 0;
    if ((u[0] == 0xC2 && u[1] < 0xA0) || (u[0] == 0xE2 && u[1] == 0x80 && (u[2] == 0xA8 || u[2] == 0xA9)))
        return 0;
    return n_bytes;
}

/* One character of *text as it is shown, to piece[5]; advances *text. */
static size_t next_piece(const char **text, char piece[5])
{
    size_t n_bytes = printable_bytes(*text);
    if (n_bytes == 0) {
        snprintf(piece, 5, "\\x%02x", (unsigned char)**text);
        (*text)++;
        return 4;
    }
    memcpy(piece, *text, n_bytes);
    *text += n_bytes;
    return n_bytes;
}

void qc_one_line(char *dst, size_t cap_bytes, const char *text)
{
    char piece[5];
    size_t total = 0, n = 0, seen = 0;
    for (const char *p = text; *p;)
        total += next_piece(&p, piece);
    bool cut = total >= cap_bytes;
    size_t head = cut ? cap_bytes / 2 : total;             /* shown bytes before the gap end at most here */
    size_t tail = cut ? total - cap_bytes / 2 + 8 : total; /* those behind it start at least here */
    bool gap = false;
    for (const char *p = text; *p;) {
        size_t k = next_piece(&p, piece);
        if (seen + k <= head || seen >= tail) {
            memcpy(dst + n, piece, k);
            n += k;
        } else if (!gap) {
            memcpy(dst + n, "...", 3);
            n += 3;
            gap = true;
        }
        seen += k;
    }
    dst[n] = 0;
}

int qc_fail(qc_err *err, int code, const char *fmt, ...)
{
    if (err) {
        char raw[MAX_RAW_BYTES];
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(raw, sizeof raw, fmt, ap);
        va_end(ap);
        qc_one_line(err->msg, sizeof err->msg, raw);
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
    qc_one_line(err->msg, sizeof err->msg, raw);
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
        return 128 + (qc_interrupted() ? qc_interrupted() : SIGINT);
    default:
        return 5;
    }
}
