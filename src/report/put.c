#include "qc_json.h"
#include "report_internal.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void qc_put(qc_out *out, const char *fmt, ...)
{
    char text[2048];
    va_list args;
    if (out->rc < 0)
        return;
    va_start(args, fmt);
    int n = vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (n >= 0 && (size_t)n < sizeof text)
        out->rc = qc_buf_append(out->buf, text, (size_t)n, out->err);
    else
        out->rc = qc_fail(out->err, QC_E_RESOURCE, "a line of the report is too long");
}

static void put_raw(qc_out *out, const char *text, size_t n_bytes)
{
    if (out->rc == QC_OK)
        out->rc = qc_buf_append(out->buf, text, n_bytes, out->err);
}

void qc_put_line(qc_out *out, const char *text)
{
    char line[QC_ERR_MSG_BYTES];
    qc_one_line(line, sizeof line, text);
    put_raw(out, line, strlen(line));
}

void qc_put_xml(qc_out *out, const char *text)
{
    static const char replacement[] = "\xEF\xBF\xBD";
    while (*text) {
        size_t n = qc_utf8_char_bytes(text);
        unsigned char c = (unsigned char)*text;
        const char *escape = NULL;
        if (n == 0 || (c < 0x20 && c != '\n' && c != '\t' && c != '\r') || c == 0x7F ||
            (n == 3 && memcmp(text, "\xEF\xBF", 2) == 0 && (unsigned char)text[2] >= 0xBE))
            escape = replacement;
        else if (n == 1)
            escape = c == '&'    ? "&amp;"
                     : c == '<'  ? "&lt;"
                     : c == '>'  ? "&gt;"
                     : c == '"'  ? "&quot;"
                     : c == '\'' ? "&#39;"
                                 : NULL;
        put_raw(out, escape ? escape : text, escape ? strlen(escape) : n);
        text += n ? n : 1;
    }
}

void qc_put_markdown(qc_out *out, const char *text, size_t max_bytes)
{
    char line[1024];
    qc_one_line(line, max_bytes < 64 ? 64 : max_bytes < sizeof line ? max_bytes : sizeof line, text);
    for (const char *p = line; *p; p++) {
        if (*p == '&')
            put_raw(out, "&amp;", 5);
        else if (*p == '<')
            put_raw(out, "&lt;", 4);
        else if (*p == '@')
            put_raw(out, "&#64;", 5);
        else if (*p == ':' && p[1] == '/')
            put_raw(out, "&#58;", 5);
        else if (*p == '.' && p - line >= 3 && strncmp(p - 3, "www", 3) == 0)
            put_raw(out, "&#46;", 5);
        else {
            if (strchr("\\`*_[]>|~#!", *p))
                put_raw(out, "\\", 1);
            put_raw(out, p, 1);
        }
    }
}

void qc_put_bytes(qc_out *out, double n_bytes)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB"};
    int u = 0;
    if (!isfinite(n_bytes)) {
        qc_put(out, "?");
        return;
    }
    for (; n_bytes >= 1000 && u < 4; u++)
        n_bytes /= 1000;
    qc_put(out, "%.*f %s", u == 0 ? 0 : n_bytes < 100 ? 2 : 1, n_bytes, units[u]);
}

void qc_put_figure(qc_out *out, const char *name, double value)
{
    size_t n = strlen(name), n_suffix = strlen("_bytes");
    bool bytes = n > n_suffix && strcmp(name + n - n_suffix, "_bytes") == 0;
    if (isnan(value))
        qc_put(out, "not measured");
    else
        qc_put(out, "%.*g", bytes ? 15 : 6, value);
}
