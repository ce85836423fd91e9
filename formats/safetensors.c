#include "safetensors.h"

#include "qc_alloc.h"
#include "qc_json.h"
#include "qc_map.h"

#include <stdlib.h>
#include <string.h>

/* The header is read by a scanner of its own and not into a JSON tree: a header may be 100 MB long and a tree
 * takes ten times that; offsets must be exact integers, not doubles; and the only shapes of JSON that occur
 * are fixed. */

#define MAX_INTEGER (UINT64_C(1) << 53) /* beyond it JSON numbers are not portable */

/* Names in messages: long ones are cut so that the reason behind them stays readable. */
#define NAME "\"%.200s\""

typedef struct scanner {
    const char *begin, *p, *end; /* header text */
    const char *file;            /* for messages */
    char *strings;               /* where the next decoded string goes; room for all of them */
    qc_err *err;
} scanner;

static int bad_header(const scanner *s, const char *what)
{
    return qc_fail(s->err, QC_E_INPUT, "%s: header, byte %zu: %s", s->file, (size_t)(s->p - s->begin), what);
}

static void skip_blanks(scanner *s)
{
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\t' || *s->p == '\n' || *s->p == '\r'))
        s->p++;
}

/* Step over c if it is the next character that is not blank. */
static bool accept(scanner *s, char c)
{
    skip_blanks(s);
    if (s->p == s->end || *s->p != c)
        return false;
    s->p++;
    return true;
}

static int expect(scanner *s, char c)
{
    char what[] = "'?' expected";
    what[1] = c;
    return accept(s, c) ? QC_OK : bad_header(s, what);
}

static int hex4(scanner *s, unsigned *ret)
{
    unsigned v = 0;
    for (int i = 0; i < 4; i++, s->p++) {
        char c = s->p < s->end ? *s->p : 0;
        int digit = c >= '0' && c <= '9'                 ? c - '0'
                    : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                         : -1;
        if (digit < 0)
            return bad_header(s, "four hexadecimal digits expected after \\u");
        v = v * 16 + (unsigned)digit;
    }
    *ret = v;
    return QC_OK;
}

/* The code point of \uXXXX or of a surrogate pair; s->p is behind the first 'u'. */
static int scan_unicode_escape(scanner *s, unsigned *ret)
{
    unsigned hi = 0, lo = 0;
    QC_TRY(hex4(s, &hi));
    if (hi >= 0xD800 && hi < 0xDC00) {
        if (s->end - s->p < 2 || s->p[0] != '\\' || s->p[1] != 'u')
            return bad_header(s, "unpaired surrogate");
        s->p += 2;
        QC_TRY(hex4(s, &lo));
        if (lo < 0xDC00 || lo > 0xDFFF)
            return bad_header(s, "unpaired surrogate");
        hi = 0x10000 + ((hi - 0xD800) << 10) + (lo - 0xDC00);
    } else if (hi >= 0xDC00 && hi <= 0xDFFF) {
        return bad_header(s, "unpaired surrogate");
    }
    if (hi == 0)
        return bad_header(s, "NUL character in a string");
    *ret = hi;
    return QC_OK;
}

static char *put_utf8(char *out, unsigned c)
{
    int n_more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    static const unsigned char lead[4] = {0, 0xC0, 0xE0, 0xF0};
    *out++ = (char)(lead[n_more] | (c >> (6 * n_more)));
    while (n_more-- > 0)
        *out++ = (char)(0x80 | ((c >> (6 * n_more)) & 0x3F));
    return out;
}

static int scan_escape(scanner *s, char **out)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    char c = s->p < s->end ? *s->p : 0;
    const char *hit = c ? strchr(from, c) : NULL;
    unsigned code_point = 0;
    if (!hit && c != 'u')
        return bad_header(s, "unknown escape in a string");
    s->p++;
    if (hit) {
        *(*out)++ = to[hit - from];
        return QC_OK;
    }
    QC_TRY(scan_unicode_escape(s, &code_point));
    *out = put_utf8(*out, code_point);
    return QC_OK;
}

/* *ret is the decoded string, NUL-terminated. It is never longer than its text with quotes, so that strings
 * of a header fit where s->strings points to. */
static int scan_string(scanner *s, const char **ret)
{
    char *out = s->strings;
    QC_TRY(expect(s, '"'));
    for (;;) {
        if (s->p == s->end)
            return bad_header(s, "string without end");
        unsigned char c = (unsigned char)*s->p;
        if (c < 0x20)
            return bad_header(s, "control character in a string");
        s->p++;
        if (c == '"')
            break;
        if (c == '\\')
            QC_TRY(scan_escape(s, &out));
        else
            *out++ = (char)c;
    }
    *out++ = 0;
    *ret = s->strings;
    s->strings = out;
    return QC_OK;
}

static int scan_integer(scanner *s, uint64_t *ret)
{
    static const char what[] = "an integer from 0 to 2^53 expected";
    uint64_t v = 0;
    skip_blanks(s);
    const char *first = s->p;
    for (; s->p < s->end && *s->p >= '0' && *s->p <= '9'; s->p++) {
        v = v * 10 + (uint64_t)(*s->p - '0');
        if (v > MAX_INTEGER)
            return bad_header(s, what);
    }
    char next = s->p < s->end ? *s->p : 0;
    if (s->p == first || (*first == '0' && s->p - first > 1) || next == '.' || next == 'e' || next == 'E')
        return bad_header(s, what);
    *ret = v;
    return QC_OK;
}

/* At most max integers; *ret_n counts all that are there, also those that had no room. */
static int scan_integers(scanner *s, int max, uint64_t *ret, int64_t *ret_n)
{
    int64_t n = 0;
    QC_TRY(expect(s, '['));
    if (!accept(s, ']')) {
        do {
            uint64_t v = 0;
            QC_TRY(scan_integer(s, &v));
            if (n < max)
                ret[n] = v;
            n++;
        } while (accept(s, ','));
        QC_TRY(expect(s, ']'));
    }
    *ret_n = n;
    return QC_OK;
}

/* "__metadata__": null or an object of strings. The values mean nothing to us. */
static int scan_metadata(scanner *s)
{
    skip_blanks(s);
    if (s->end - s->p >= 4 && memcmp(s->p, "null", 4) == 0) {
        s->p += 4;
        return QC_OK;
    }
    QC_TRY(expect(s, '{'));
    if (accept(s, '}'))
        return QC_OK;
    qc_map *seen = qc_map_new(16);
    int rc = seen ? QC_OK : qc_fail_nomem(s->err, s->file, sizeof seen);
    while (rc == QC_OK) {
        const char *key, *value;
        if ((rc = scan_string(s, &key)) < 0 || (rc = expect(s, ':')) < 0)
            break;
        int added = qc_map_add(seen, key, strlen(key), 0);
        if (added < 0)
            rc = qc_fail_nomem(s->err, s->file, strlen(key));
        else if (added == 0)
            rc = qc_fail(s->err, QC_E_INPUT, "%s: __metadata__: duplicate name " NAME, s->file, key);
        else if (skip_blanks(s), s->p == s->end || *s->p != '"')
            rc =
                qc_fail(s->err, QC_E_INPUT, "%s: __metadata__: value of " NAME " is no string", s->file, key);
        else
            rc = scan_string(s, &value);
        if (rc == QC_OK && !accept(s, ',')) {
            rc = expect(s, '}');
            break;
        }
    }
    qc_map_free(seen);
    return rc;
}

typedef struct raw_tensor {
    const char *dtype;
    int64_t n_dims, n_offsets; /* -1 until seen */
    uint64_t shape[QC_MAX_DIMS];
    uint64_t offsets[2];
} raw_tensor;

static int scan_tensor_member(scanner *s, const char *tensor, raw_tensor *raw)
{
    const char *key;
    QC_TRY(scan_string(s, &key));
    QC_TRY(expect(s, ':'));
    bool again = false;
    if (strcmp(key, "dtype") == 0) {
        again = raw->dtype != NULL;
        QC_TRY(scan_string(s, &raw->dtype));
    } else if (strcmp(key, "shape") == 0) {
        again = raw->n_dims >= 0;
        QC_TRY(scan_integers(s, QC_MAX_DIMS, raw->shape, &raw->n_dims));
    } else if (strcmp(key, "data_offsets") == 0) {
        again = raw->n_offsets >= 0;
        QC_TRY(scan_integers(s, 2, raw->offsets, &raw->n_offsets));
    } else {
        return qc_fail(s->err, QC_E_INPUT, "%s: tensor " NAME ": unknown member " NAME, s->file, tensor, key);
    }
    if (again)
        return qc_fail(s->err, QC_E_INPUT, "%s: tensor " NAME ": duplicate member " NAME, s->file, tensor,
                       key);
    return QC_OK;
}

/* Number of bytes of a shape; -1 if it overflows or is no whole number of bytes. Dimensions of 0 do not hide
 * an overflow of the others, so that any product of some dimensions is safe later. */
static int64_t shape_bytes(const qc_tensor_info *info)
{
    int64_t n_bits = qc_dtype_bits(info->dtype);
    bool zero = false;
    for (int i = 0; i < info->n_dims; i++) {
        zero = zero || info->shape[i] == 0;
        if (info->shape[i] != 0 && __builtin_mul_overflow(n_bits, info->shape[i], &n_bits))
            return -1;
    }
    return zero ? 0 : n_bits % 8 ? -1 : n_bits / 8;
}

/* Check one entry by itself; *ret gets offsets from the beginning of the data. */
static int check_tensor(const scanner *s, const char *name, const raw_tensor *raw, qc_st_tensor *ret)
{
    qc_err *err = s->err;
    if (!raw->dtype || raw->n_dims < 0 || raw->n_offsets < 0)
        return qc_fail(err, QC_E_INPUT, "%s: tensor " NAME " has no %s", s->file, name,
                       !raw->dtype       ? "dtype"
                       : raw->n_dims < 0 ? "shape"
                                         : "data_offsets");
    qc_tensor_info info = {.name = name, .dtype = qc_dtype_from_name(raw->dtype)};
    if (info.dtype == QC_DT_INVALID)
        return qc_fail(err, QC_E_INPUT, "%s: tensor " NAME ": unknown dtype " NAME, s->file, name,
                       raw->dtype);
    if (raw->n_dims > QC_MAX_DIMS)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: tensor " NAME " has %lld dimensions, at most %d are supported", s->file, name,
                       (long long)raw->n_dims, QC_MAX_DIMS);
    info.n_dims = (int)raw->n_dims;
    for (int i = 0; i < info.n_dims; i++)
        info.shape[i] = (int64_t)raw->shape[i];
    uint64_t begin = raw->offsets[0], end = raw->offsets[1];
    if (raw->n_offsets != 2 || begin > end)
        return qc_fail(err, QC_E_INPUT, "%s: tensor " NAME ": data_offsets are not [begin, end]", s->file,
                       name);
    int64_t n_bytes = shape_bytes(&info);
    if (n_bytes < 0)
        return qc_fail(err, QC_E_INPUT,
                       "%s: tensor " NAME ": its shape in %s overflows or is no whole number of bytes",
                       s->file, name, raw->dtype);
    if ((uint64_t)n_bytes != end - begin)
        return qc_fail(err, QC_E_INPUT,
                       "%s: tensor " NAME ": shape and dtype %s take %lld bytes, data_offsets span %llu",
                       s->file, name, raw->dtype, (long long)n_bytes, (unsigned long long)(end - begin));
    info.n_bytes = (uint64_t)n_bytes;
    *ret = (qc_st_tensor){.info = info, .offset = begin};
    return QC_OK;
}

static int scan_tensor(scanner *s, const char *name, qc_st_tensor *ret)
{
    raw_tensor raw = {.n_dims = -1, .n_offsets = -1};
    QC_TRY(expect(s, '{'));
    if (!accept(s, '}')) {
        do {
            QC_TRY(scan_tensor_member(s, name, &raw));
        } while (accept(s, ','));
        QC_TRY(expect(s, '}'));
    }
    return check_tensor(s, name, &raw, ret);
}

static int append_tensor(qc_st_file *file, int64_t *cap, const qc_st_tensor *tensor, const scanner *s)
{
    if (file->n_tensors == *cap) {
        int64_t grown = *cap ? 2 * *cap : 64;
        size_t unit = sizeof *file->tensors;
        void *p = qc_realloc(file->tensors, (size_t)*cap * unit, (size_t)grown * unit);
        if (!p)
            return qc_fail_nomem(s->err, s->file, (size_t)grown * unit);
        file->tensors = p;
        *cap = grown;
    }
    file->tensors[file->n_tensors++] = *tensor;
    return QC_OK;
}

static int scan_member(scanner *s, qc_st_file *file, int64_t *cap, qc_map *seen)
{
    const char *name;
    QC_TRY(scan_string(s, &name));
    QC_TRY(expect(s, ':'));
    int added = qc_map_add(seen, name, strlen(name), 0);
    if (added < 0)
        return qc_fail_nomem(s->err, s->file, strlen(name));
    if (added == 0)
        return qc_fail(s->err, QC_E_INPUT, "%s: duplicate name " NAME, s->file, name);
    if (strcmp(name, "__metadata__") == 0)
        return scan_metadata(s);
    qc_st_tensor tensor;
    QC_TRY(scan_tensor(s, name, &tensor));
    return append_tensor(file, cap, &tensor, s);
}

static int scan_header(scanner *s, qc_st_file *file)
{
    int64_t cap = 0;
    QC_TRY(expect(s, '{'));
    if (!accept(s, '}')) {
        qc_map *seen = qc_map_new(64);
        int rc = seen ? QC_OK : qc_fail_nomem(s->err, s->file, sizeof seen);
        do {
            if (rc == QC_OK)
                rc = scan_member(s, file, &cap, seen);
        } while (rc == QC_OK && accept(s, ','));
        qc_map_free(seen);
        QC_TRY(rc);
        QC_TRY(expect(s, '}'));
    }
    skip_blanks(s);
    if (s->p < s->end)
        return bad_header(s, *s->p ? "text behind the end of the header"
                                   : "padded with NUL bytes, not with spaces");
    return QC_OK;
}

static int by_offset(const void *a, const void *b)
{
    const qc_st_tensor *x = a, *y = b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    if (x->info.n_bytes != y->info.n_bytes)
        return x->info.n_bytes < y->info.n_bytes ? -1 : 1;
    return strcmp(x->info.name, y->info.name);
}

/* The tensors must tile the data exactly. Offsets become absolute. */
static int check_layout(qc_st_file *file, uint64_t data_offset, uint64_t n_data_bytes, const char *name,
                        qc_err *err)
{
    uint64_t end = 0;
    if (file->n_tensors > 1)
        qsort(file->tensors, (size_t)file->n_tensors, sizeof *file->tensors, by_offset);
    for (int64_t i = 0; i < file->n_tensors; i++) {
        qc_st_tensor *t = &file->tensors[i];
        if (t->offset < end)
            return qc_fail(err, QC_E_INPUT, "%s: tensors " NAME " and " NAME " overlap", name,
                           t[-1].info.name, t->info.name);
        if (t->offset > end)
            return qc_fail(err, QC_E_INPUT, "%s: hole of %llu bytes before tensor " NAME, name,
                           (unsigned long long)(t->offset - end), t->info.name);
        end += t->info.n_bytes;
        t->offset += data_offset;
    }
    if (end > n_data_bytes)
        return qc_fail(err, QC_E_INPUT, "%s: file is truncated: %llu bytes expected, %llu found", name,
                       (unsigned long long)(data_offset + end),
                       (unsigned long long)(data_offset + n_data_bytes));
    if (end < n_data_bytes)
        return qc_fail(err, QC_E_INPUT, "%s: %llu bytes behind the last tensor", name,
                       (unsigned long long)(n_data_bytes - end));
    return QC_OK;
}

/* Length of the header after the checks that need no look at its text. */
static int header_bytes(const uint8_t *data, size_t n_bytes, const char *name, uint64_t *ret, qc_err *err)
{
    uint64_t n = 0;
    if (n_bytes < 8)
        return qc_fail(err, QC_E_INPUT,
                       "%s: %zu bytes are no safetensors file, 8 for the header length expected", name,
                       n_bytes);
    for (int i = 7; i >= 0; i--)
        n = n << 8 | data[i];
    if (n > QC_ST_MAX_HEADER_BYTES)
        return qc_fail(err, QC_E_INPUT, "%s: header length %llu is over the limit of %u (file has %zu bytes)",
                       name, (unsigned long long)n, QC_ST_MAX_HEADER_BYTES, n_bytes);
    if (n > n_bytes - 8)
        return qc_fail(err, QC_E_INPUT, "%s: header of %llu bytes does not fit into the file of %zu bytes",
                       name, (unsigned long long)n, n_bytes);
    if (n == 0 || data[8] != '{')
        return qc_fail(err, QC_E_INPUT, "%s: header does not begin with '{'", name);
    *ret = n;
    return QC_OK;
}

int qc_st_parse(const void *data, size_t n_bytes, const char *name, qc_st_file *ret, qc_err *err)
{
    uint64_t n_header = 0;
    size_t bad;
    QC_TRY(header_bytes(data, n_bytes, name, &n_header, err));
    const char *text = (const char *)data + 8;
    if (!qc_utf8_valid(text, n_header, &bad))
        return qc_fail(err, QC_E_INPUT, "%s: header, byte %zu: invalid UTF-8", name, bad);
    qc_st_file file = {.names = qc_alloc(n_header, 1)};
    if (!file.names)
        return qc_fail_nomem(err, name, n_header);
    scanner s = {
        .begin = text, .p = text, .end = text + n_header, .file = name, .strings = file.names, .err = err};
    int rc = scan_header(&s, &file);
    if (rc == QC_OK)
        rc = check_layout(&file, 8 + n_header, n_bytes - 8 - n_header, name, err);
    if (rc == QC_OK)
        *ret = file;
    else
        qc_st_close(&file);
    return rc;
}

int qc_st_open(const char *path, qc_st_file *ret, qc_err *err)
{
    qc_mapped map = {0};
    qc_st_file file = {0};
    QC_TRY(qc_file_map(path, &map, err));
    int rc = qc_st_parse(map.data, map.n_bytes, path, &file, err);
    if (rc < 0) {
        qc_file_unmap(&map);
        return rc;
    }
    uint64_t n_header = file.n_tensors ? file.tensors[0].offset : map.n_bytes;
    qc_mapped_release(&map, 0, n_header); /* not needed again */
    file.map = map;
    *ret = file;
    return QC_OK;
}

void qc_st_close(qc_st_file *file)
{
    qc_file_unmap(&file->map);
    qc_free(file->tensors);
    qc_free(file->names);
    *file = (qc_st_file){0};
}
