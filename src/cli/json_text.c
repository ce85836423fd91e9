#include "json_text.h"

#include "qc_json.h"

#include <string.h>

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

/* Four hexadecimal digits at p, -1 if they are not there. */
static int hex4(const char *p, const char *end)
{
    int value = 0;
    if (end - p < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        const char *digits = "0123456789abcdefABCDEF", *d = p[i] ? strchr(digits, p[i]) : NULL;
        if (!d)
            return -1;
        int n = (int)(d - digits);
        value = value * 16 + (n < 16 ? n : n - 6);
    }
    return value;
}

static int append_utf8(unsigned c, qc_buf *ret, qc_err *err)
{
    char u[4];
    size_t n;
    if (c < 0x80) {
        u[0] = (char)c;
        n = 1;
    } else if (c < 0x800) {
        u[0] = (char)(0xC0 | (c >> 6));
        u[1] = (char)(0x80 | (c & 63));
        n = 2;
    } else if (c < 0x10000) {
        u[0] = (char)(0xE0 | (c >> 12));
        u[1] = (char)(0x80 | ((c >> 6) & 63));
        u[2] = (char)(0x80 | (c & 63));
        n = 3;
    } else {
        u[0] = (char)(0xF0 | (c >> 18));
        u[1] = (char)(0x80 | ((c >> 12) & 63));
        u[2] = (char)(0x80 | ((c >> 6) & 63));
        u[3] = (char)(0x80 | (c & 63));
        n = 4;
    }
    return qc_buf_append(ret, u, n, err);
}

/* *p is behind "\u"; moves it behind the last digit used. */
static int parse_unicode(const char **p, const char *end, qc_buf *ret, qc_err *err)
{
    int c = hex4(*p, end);
    if (c < 0)
        return qc_fail(err, QC_E_INPUT, "\\u needs four hexadecimal digits");
    *p += 4;
    if (c >= 0xD800 && c < 0xE000) {
        int low = end - *p >= 6 && (*p)[0] == '\\' && (*p)[1] == 'u' ? hex4(*p + 2, end) : -1;
        if (c >= 0xDC00 || low < 0xDC00 || low >= 0xE000)
            return qc_fail(err, QC_E_INPUT, "surrogate \\u%04x without its partner", (unsigned)c);
        c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
        *p += 6;
    }
    return append_utf8((unsigned)c, ret, err);
}

static int parse_escape(const char **p, const char *end, qc_buf *ret, qc_err *err)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    char c = *p < end ? *(*p)++ : 0;
    if (c == 'u')
        return parse_unicode(p, end, ret, err);
    const char *found = c ? strchr(from, c) : NULL;
    if (!found)
        return qc_fail(err, QC_E_INPUT, "unknown escape in a JSON string");
    return qc_buf_append(ret, &to[found - from], 1, err);
}

int qc_json_text_parse(const char *json, size_t n_bytes, qc_buf *ret, qc_err *err)
{
    const char *p = json, *end = json + n_bytes;
    size_t bad;
    if (!qc_utf8_valid(json, n_bytes, &bad))
        return qc_fail(err, QC_E_INPUT, "invalid UTF-8 at byte %zu", bad);
    while (p < end && is_blank(*p))
        p++;
    while (end > p && is_blank(end[-1]))
        end--;
    if (p == end || *p != '"')
        return qc_fail(err, QC_E_INPUT, "not a JSON string");
    for (p++; p < end && *p != '"';) {
        const char *run = p;
        while (p < end && *p != '"' && *p != '\\' && (unsigned char)*p >= 0x20)
            p++;
        QC_TRY(qc_buf_append(ret, run, (size_t)(p - run), err));
        if (p < end && (unsigned char)*p < 0x20)
            return qc_fail(err, QC_E_INPUT, "raw control character 0x%02x in a JSON string",
                           (unsigned char)*p);
        if (p < end && *p == '\\') {
            p++;
            QC_TRY(parse_escape(&p, end, ret, err));
        }
    }
    if (p == end)
        return qc_fail(err, QC_E_INPUT, "JSON string without a closing quote");
    return p + 1 == end ? QC_OK : qc_fail(err, QC_E_INPUT, "text behind the JSON string");
}

int qc_json_text_print(const char *text, size_t n_bytes, qc_buf *ret, qc_err *err)
{
    QC_TRY(qc_buf_append(ret, "\"", 1, err));
    for (const char *p = text, *end = text + n_bytes; p < end;) {
        const char *run = p;
        while (p < end && *p != '"' && *p != '\\' && (unsigned char)*p >= 0x20)
            p++;
        QC_TRY(qc_buf_append(ret, run, (size_t)(p - run), err));
        if (p < end) {
            unsigned char c = (unsigned char)*p++;
            if (c < 0x20)
                QC_TRY(qc_buf_printf(ret, err, "\\u%04x", c));
            else
                QC_TRY(qc_buf_printf(ret, err, "\\%c", c));
        }
    }
    return qc_buf_append(ret, "\"", 1, err);
}
