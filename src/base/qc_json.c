#include "qc_json.h"

#include "qc_alloc.h"
#include "qc_buf.h"
#include "qc_file.h"
#include "qc_map.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define MAX_DEPTH 200

/* cJSON reports a failed allocation like a syntax error; this tells them apart. */
static _Thread_local bool out_of_memory;

static void *tree_alloc(size_t n_bytes)
{
    void *p = qc_alloc_small(n_bytes);
    out_of_memory = out_of_memory || !p;
    return p;
}

void qc_json_watch(void)
{
    out_of_memory = false;
}

cJSON *qc_json_add_item(cJSON *list, cJSON *item)
{
    if (cJSON_AddItemToArray(list, item))
        return item;
    cJSON_Delete(item);
    return NULL;
}

void qc_json_add_number(cJSON *object, const char *key, double x)
{
    if (isfinite(x))
        cJSON_AddNumberToObject(object, key, x);
    else
        cJSON_AddNullToObject(object, key);
}

void qc_json_add_text(cJSON *object, const char *key, const char *text)
{
    if (text && *text)
        cJSON_AddStringToObject(object, key, text);
    else
        cJSON_AddNullToObject(object, key);
}

cJSON *qc_json_watched(cJSON *doc)
{
    if (!out_of_memory)
        return doc;
    cJSON_Delete(doc);
    return NULL;
}

__attribute__((constructor)) static void send_trees_through_qc_alloc(void)
{
    cJSON_Hooks hooks = {.malloc_fn = tree_alloc, .free_fn = qc_free};
    cJSON_InitHooks(&hooks);
}

bool qc_utf8_valid(const char *text, size_t n_bytes, size_t *ret_bad)
{
    const unsigned char *s = (const unsigned char *)text;
    size_t i = 0;
    while (i < n_bytes) {
        if (i + 8 <= n_bytes) {
            uint64_t w;
            memcpy(&w, s + i, 8);
            if ((w & 0x8080808080808080u) == 0) {
                i += 8;
                continue;
            }
        }
        unsigned c = s[i];
        size_t n = c < 0x80                ? 1
                   : c >= 0xC2 && c < 0xE0 ? 2
                   : c >= 0xE0 && c < 0xF0 ? 3
                   : c >= 0xF0 && c < 0xF5 ? 4
                                           : 0;
        if (n == 0 || i + n > n_bytes)
            goto bad;
        for (size_t k = 1; k < n; k++)
            if ((s[i + k] & 0xC0) != 0x80)
                goto bad;
        if ((c == 0xE0 && s[i + 1] < 0xA0) || (c == 0xED && s[i + 1] > 0x9F) ||
            (c == 0xF0 && s[i + 1] < 0x90) || (c == 0xF4 && s[i + 1] > 0x8F))
            goto bad;
        i += n;
    }
    return true;
bad:
    if (ret_bad)
        *ret_bad = i;
    return false;
}

size_t qc_utf8_char_bytes(const char *s)
{
    unsigned char c = (unsigned char)*s;
    size_t n_bytes = c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    return qc_utf8_valid(s, strnlen(s, n_bytes), NULL) && c ? n_bytes : 0;
}

/* What cJSON does not look at, on the raw text: depth (before it recurses, so that a hostile file can not use
 * up the stack), control characters in strings, and the escape of NUL, which would cut its C strings short.
 * NULL if all is well, else what is wrong at *ret_at. */
static const char *scan_text(const char *text, size_t n_bytes, size_t *ret_at)
{
    int depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < n_bytes; i++) {
        char c = text[i];
        *ret_at = i;
        if (in_string) {
            if ((unsigned char)c < 0x20)
                return "control character in a json string";
            if (c == '\\' && n_bytes - i >= 6 && memcmp(text + i, "\\u0000", 6) == 0)
                return "NUL character in a json string";
            if (c == '\\')
                i++;
            else if (c == '"')
                in_string = false;
        } else if (c == 0) {
            return "NUL byte in json text";
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            if (++depth > MAX_DEPTH)
                return "json nested too deeply";
        } else if (c == ']' || c == '}') {
            depth--;
        }
    }
    return NULL;
}

static int fail_at(const char *name, const char *text, size_t at, const char *what, qc_err *err)
{
    size_t line = 1, column = 1;
    for (const char *p = text; p < text + at; p++) {
        column = *p == '\n' ? 1 : column + 1;
        line += *p == '\n';
    }
    return qc_fail(err, QC_E_INPUT, "%s:%zu:%zu: %s", name, line, column, what);
}

static int check_unique(const cJSON *item, const char *name, qc_err *err)
{
    int rc = QC_OK;
    qc_map *seen = NULL;
    if (cJSON_IsObject(item) && item->child && item->child->next) {
        seen = qc_map_new(16);
        if (!seen)
            return qc_fail_nomem(err, "json keys", 16);
    }
    for (const cJSON *c = item->child; c && rc == QC_OK; c = c->next) {
        if (seen) {
            int added = qc_map_add(seen, c->string, strlen(c->string), 0);
            if (added == 0)
                rc = qc_fail(err, QC_E_INPUT, "%s: duplicate name \"%s\"", name, c->string);
            else if (added < 0)
                rc = qc_fail_nomem(err, "json keys", 16);
        }
        if (rc == QC_OK && c->child)
            rc = check_unique(c, name, err);
    }
    qc_map_free(seen);
    return rc;
}

int qc_json_parse(const char *text, size_t n_bytes, const char *name, bool unique_keys, cJSON **ret_doc,
                  qc_err *err)
{
    size_t bad;
    if (!qc_utf8_valid(text, n_bytes, &bad))
        return qc_fail(err, QC_E_INPUT, "%s: invalid UTF-8 at byte %zu", name, bad);
    const char *wrong = scan_text(text, n_bytes, &bad);
    if (wrong)
        return fail_at(name, text, bad, wrong, err);
    const char *end = text;
    out_of_memory = false;
    cJSON *doc = cJSON_ParseWithLengthOpts(text, n_bytes, &end, 0);
    if (!doc && out_of_memory)
        return qc_fail_nomem(err, name, n_bytes);
    const char *rest = end;
    while (doc && rest < text + n_bytes && (*rest == ' ' || *rest == '\n' || *rest == '\r' || *rest == '\t'))
        rest++;
    if (!doc || rest != text + n_bytes) {
        cJSON_Delete(doc);
        bad = rest > text + n_bytes ? n_bytes : (size_t)(rest - text);
        return fail_at(name, text, bad, n_bytes == 0 ? "empty file, json expected" : "json syntax error",
                       err);
    }
    int rc = unique_keys ? check_unique(doc, name, err) : QC_OK;
    if (rc < 0)
        cJSON_Delete(doc);
    else
        *ret_doc = doc;
    return rc;
}

/* The next number of well-formed json at or after *at, which is moved behind it. */
static size_t next_number(const char **at, const char *end, const char **ret)
{
    const char *p = *at;
    for (bool quoted = false; p < end && (quoted || !(*p == '-' || (*p >= '0' && *p <= '9'))); p++)
        if (*p == '"')
            quoted = !quoted;
        else if (quoted && *p == '\\')
            p++;
    *ret = p;
    while (p < end && (strchr("+-.eE", *p) || (*p >= '0' && *p <= '9')))
        p++;
    *at = p;
    return (size_t)(p - *ret);
}

/* The tree's numbers stand in the order of the text. A number's valuestring is how it prints. */
static int keep_floats(cJSON *item, const char **at, const char *end, qc_err *err)
{
    for (; item; item = item->next) {
        if (item->child)
            QC_TRY(keep_floats(item->child, at, end, err));
        if (!cJSON_IsNumber(item))
            continue;
        const char *number;
        size_t n = next_number(at, end, &number);
        if (strcspn(number, ".eE") >= n)
            continue;
        if (!(item->valuestring = qc_strndup(number, n)))
            return qc_fail_nomem(err, "json", n);
    }
    return QC_OK;
}

int qc_json_keep_floats(cJSON *doc, const char *text, size_t n_bytes, qc_err *err)
{
    const char *at = text;
    return keep_floats(doc, &at, text + n_bytes, err);
}

int qc_json_load(const char *path, size_t max_bytes, bool unique_keys, cJSON **ret_doc, qc_err *err)
{
    char *text;
    size_t n_bytes;
    QC_TRY(qc_file_read(path, max_bytes, &text, &n_bytes, err));
    int rc = qc_json_parse(text, n_bytes, path, unique_keys, ret_doc, err);
    qc_free(text);
    return rc;
}

const cJSON *qc_json_get(const cJSON *object, const char *key)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsNull(item) ? NULL : item;
}

bool qc_json_int(const cJSON *item, int64_t *ret)
{
    if (!cJSON_IsNumber(item) || !(fabs(item->valuedouble) < 0x1p53) ||
        item->valuedouble != floor(item->valuedouble))
        return false;
    *ret = (int64_t)item->valuedouble;
    return true;
}

static int print_item(qc_buf *buf, const cJSON *item, int depth, qc_err *err);

static int print_string(qc_buf *buf, const char *s, qc_err *err)
{
    QC_TRY(qc_buf_append(buf, "\"", 1, err));
    while (*s) {
        unsigned char c = (unsigned char)*s;
        size_t n_bytes = qc_utf8_char_bytes(s);
        if (c == '"' || c == '\\')
            QC_TRY(qc_buf_printf(buf, err, "\\%c", c));
        else if (c < 0x20)
            QC_TRY(qc_buf_printf(buf, err, "\\u%04x", c));
        else if (n_bytes == 0)
            QC_TRY(qc_buf_append(buf, "\xEF\xBF\xBD", 3, err)); /* U+FFFD */
        else
            QC_TRY(qc_buf_append(buf, s, n_bytes, err));
        s += n_bytes ? n_bytes : 1;
    }
    return qc_buf_append(buf, "\"", 1, err);
}

/* Shortest form that reads back as the same double; non-finite numbers have no json form: null. */
static int print_number(qc_buf *buf, double x, qc_err *err)
{
    char text[40];
    if (!isfinite(x))
        return qc_buf_append(buf, "null", 4, err);
    if (x == floor(x) && fabs(x) < 1e15)
        return qc_buf_printf(buf, err, "%.0f", x);
    for (int digits = 6; digits <= 17; digits++) {
        double back;
        snprintf(text, sizeof text, "%.*g", digits, x);
        if (sscanf(text, "%lf", &back) == 1 && back == x)
            break;
    }
    return qc_buf_append(buf, text, strlen(text), err);
}

static int print_children(qc_buf *buf, const cJSON *item, int depth, qc_err *err)
{
    bool object = cJSON_IsObject(item);
    QC_TRY(qc_buf_append(buf, object ? "{" : "[", 1, err));
    bool flat = !object; /* arrays of scalars stay on one line */
    for (const cJSON *c = item->child; c; c = c->next)
        flat = flat && !c->child;
    for (const cJSON *c = item->child; c; c = c->next) {
        if (!flat)
            QC_TRY(qc_buf_printf(buf, err, "\n%*s", 2 * (depth + 1), ""));
        if (object) {
            QC_TRY(print_string(buf, c->string, err));
            QC_TRY(qc_buf_append(buf, ": ", 2, err));
        }
        QC_TRY(print_item(buf, c, depth + 1, err));
        if (c->next)
            QC_TRY(qc_buf_append(buf, flat ? ", " : ",", flat ? 2 : 1, err));
    }
    if (!flat && item->child)
        QC_TRY(qc_buf_printf(buf, err, "\n%*s", 2 * depth, ""));
    return qc_buf_append(buf, object ? "}" : "]", 1, err);
}

static int print_item(qc_buf *buf, const cJSON *item, int depth, qc_err *err)
{
    if (cJSON_IsString(item))
        return print_string(buf, item->valuestring, err);
    if (cJSON_IsNumber(item) && item->valuestring)
        return qc_buf_append(buf, item->valuestring, strlen(item->valuestring), err);
    if (cJSON_IsNumber(item))
        return print_number(buf, item->valuedouble, err);
    if (cJSON_IsBool(item))
        return qc_buf_printf(buf, err, "%s", cJSON_IsTrue(item) ? "true" : "false");
    if (cJSON_IsObject(item) || cJSON_IsArray(item))
        return print_children(buf, item, depth, err);
    return qc_buf_append(buf, "null", 4, err);
}

char *qc_json_print(const cJSON *doc)
{
    qc_buf buf = {0};
    if (print_item(&buf, doc, 0, NULL) < 0 || qc_buf_append(&buf, "\n", 1, NULL) < 0) {
        qc_buf_clear(&buf);
        return NULL;
    }
    return buf.data;
}
