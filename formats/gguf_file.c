#include "gguf_file.h"

#include "qc_alloc.h"
#include "qc_json.h"
#include "qc_math.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { OLDEST_VERSION = 2, VERSION = 3, MAX_ALIGNMENT = 1 << 20 };
#define MAX_KEY_BYTES 65535

/* Names in messages: long ones are cut so that the reason behind them stays readable. */
#define NAME "\"%.200s\""

static const int kind_bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
#define N_KINDS ((int)(sizeof kind_bytes / sizeof kind_bytes[0]))

bool qc_gguf_text_is(qc_gguf_text text, const char *want)
{
    return text.p && text.n_bytes == strlen(want) && memcmp(text.p, want, text.n_bytes) == 0;
}

qc_gguf_text qc_gguf_next_text(const uint8_t **at)
{
    qc_gguf_text text = {(const char *)*at + 8, qc_get_le(*at, 8)};
    *at += 8 + text.n_bytes;
    return text;
}

bool qc_gguf_probe(const void *data, size_t n_bytes)
{
    return n_bytes >= 4 && memcmp(data, "GGUF", 4) == 0;
}

/* ---- parsing ---- */

/* A place in the file; once something does not fit it stays where it was. */
typedef struct cursor {
    const uint8_t *data;
    size_t n_bytes, at;
    bool bad;
} cursor;

typedef struct parser {
    qc_gguf_file *file;
    cursor c;
    uint64_t alignment;
    size_t name_bytes; /* of the tensors' names copied so far */
    qc_err *err;
} parser;

static const uint8_t *take(cursor *c, uint64_t n)
{
    if (c->bad || n > c->n_bytes - c->at) {
        c->bad = true;
        return NULL;
    }
    c->at += n;
    return c->data + c->at - n;
}

static uint64_t take_int(cursor *c, int n_bytes)
{
    const uint8_t *p = take(c, (uint64_t)n_bytes);
    return p ? qc_get_le(p, n_bytes) : 0;
}

static qc_gguf_text take_text(cursor *c)
{
    uint64_t n = take_int(c, 8);
    const uint8_t *p = take(c, n);
    return (qc_gguf_text){(const char *)p, p ? n : 0};
}

static int cut_off(const parser *ps, const char *where)
{
    return qc_fail(ps->err, QC_E_INPUT, "%s: %s reach beyond the end of the file (%zu bytes)", ps->file->path,
                   where, ps->c.n_bytes);
}

/* Step over the data of a value whose kind and count are known. */
static void skip_data(cursor *c, const qc_gguf_value *v)
{
    uint64_t n = v->n_elems;
    if (n > c->n_bytes)
        c->bad = true;
    else if (v->kind != QC_GGUF_STRING)
        take(c, n * (uint64_t)kind_bytes[v->kind]);
    else
        for (; n > 0 && !c->bad; n--)
            take_text(c);
}

static int read_value(parser *ps, qc_gguf_value *v)
{
    cursor *c = &ps->c;
    char key[208];
    v->key = take_text(c);
    uint64_t kind = take_int(c, 4);
    v->n_elems = 1;
    if (c->bad)
        return cut_off(ps, "its keys");
    snprintf(key, sizeof key, "%.*s", (int)qc_min_i64((int64_t)v->key.n_bytes, 200), v->key.p);
    if (v->key.n_bytes == 0 || v->key.n_bytes > MAX_KEY_BYTES || memchr(v->key.p, 0, v->key.n_bytes))
        return qc_fail(ps->err, QC_E_INPUT, "%s: key \"%s\" has %zu bytes or a NUL, expected 1 to %d without",
                       ps->file->path, key, v->key.n_bytes, MAX_KEY_BYTES);
    if (kind == QC_GGUF_ARRAY) {
        v->is_array = true;
        kind = take_int(c, 4);
        v->n_elems = take_int(c, 8);
    }
    if (kind == QC_GGUF_ARRAY)
        return qc_fail(ps->err, QC_E_UNSUPPORTED, "%s: key \"%s\": arrays of arrays are not read",
                       ps->file->path, key);
    if (kind >= (uint64_t)N_KINDS)
        return qc_fail(ps->err, QC_E_INPUT, "%s: key \"%s\": %llu is no type of a value, expected 0 to %d",
                       ps->file->path, key, (unsigned long long)kind, N_KINDS - 1);
    v->kind = (qc_gguf_kind)kind;
    v->data = c->data + c->at;
    skip_data(c, v);
    if (c->bad)
        return qc_fail(ps->err, QC_E_INPUT, "%s: key \"%s\": its value reaches beyond the end of the file",
                       ps->file->path, key);
    int added = qc_map_add(ps->file->value_of, v->key.p, v->key.n_bytes, v - ps->file->values);
    if (added < 0)
        return qc_fail_nomem(ps->err, ps->file->path, sizeof *v);
    return added ? QC_OK : qc_fail(ps->err, QC_E_INPUT, "%s: key \"%s\" is there twice", ps->file->path, key);
}

/* Magic, version and the two counts; a hostile count is refused before it costs memory, since a key takes at
 * least 13 bytes and a tensor 24. */
static int read_head(parser *ps)
{
    qc_gguf_file *f = ps->file;
    cursor *c = &ps->c;
    if (!qc_gguf_probe(c->data, c->n_bytes))
        return qc_fail(ps->err, QC_E_INPUT, "%s: no GGUF file: it does not begin with \"GGUF\"", f->path);
    take(c, 4);
    uint64_t version = take_int(c, 4), n_tensors = take_int(c, 8), n_values = take_int(c, 8);
    if (c->bad)
        return cut_off(ps, "version and counts");
    if (version > 0xffff)
        return qc_fail(ps->err, QC_E_UNSUPPORTED, "%s: GGUF version %llu: a big-endian file", f->path,
                       (unsigned long long)version);
    if (version < OLDEST_VERSION || version > VERSION)
        return qc_fail(ps->err, QC_E_UNSUPPORTED, "%s: GGUF version %llu is not read, expected %d or %d",
                       f->path, (unsigned long long)version, OLDEST_VERSION, VERSION);
    if (n_values > c->n_bytes / 13 || n_tensors > c->n_bytes / 24)
        return qc_fail(ps->err, QC_E_INPUT, "%s: %llu keys and %llu tensors do not fit into %zu bytes",
                       f->path, (unsigned long long)n_values, (unsigned long long)n_tensors, c->n_bytes);
    f->values = qc_calloc(n_values, sizeof *f->values);
    f->tensors = qc_calloc(n_tensors, sizeof *f->tensors);
    f->value_of = qc_map_new(n_values);
    f->tensor_of = qc_map_new(n_tensors);
    if (!f->values || !f->tensors || !f->value_of || !f->tensor_of)
        return qc_fail_nomem(ps->err, f->path, n_values * sizeof *f->values + n_tensors * sizeof *f->tensors);
    f->n_values = (int64_t)n_values;
    f->n_tensors = (int64_t)n_tensors;
    return QC_OK;
}

static int read_alignment(parser *ps)
{
    int64_t alignment;
    QC_TRY(qc_gguf_get_int(ps->file, "general.alignment", QC_GGUF_ALIGNMENT, 1, MAX_ALIGNMENT, &alignment,
                           ps->err));
    if (alignment & (alignment - 1))
        return qc_fail(ps->err, QC_E_INPUT, "%s: general.alignment is %lld, expected a power of two",
                       ps->file->path, (long long)alignment);
    ps->alignment = (uint64_t)alignment;
    return QC_OK;
}

/* Bytes of the names of as many tensors as there really are, each with a NUL. */
static size_t name_room(cursor c, int64_t n_tensors)
{
    size_t room = 1;
    for (int64_t i = 0; i < n_tensors && !c.bad; i++) {
        room += take_text(&c).n_bytes + 1;
        uint64_t n_dims = take_int(&c, 4);
        take(&c, n_dims > QC_MAX_DIMS ? UINT64_MAX : 8 * n_dims + 12);
    }
    return room;
}

static int copy_name(parser *ps, qc_gguf_text name, qc_gguf_tensor *t)
{
    qc_gguf_file *f = ps->file;
    char *to = f->names + ps->name_bytes;
    if (name.n_bytes == 0 || memchr(name.p, 0, name.n_bytes))
        return qc_fail(ps->err, QC_E_INPUT, "%s: a tensor has an empty name or one with a NUL", f->path);
    memcpy(to, name.p, name.n_bytes);
    to[name.n_bytes] = 0;
    ps->name_bytes += name.n_bytes + 1;
    t->name = to;
    int added = qc_map_add(f->tensor_of, to, name.n_bytes, t - f->tensors);
    if (added < 0)
        return qc_fail_nomem(ps->err, f->path, name.n_bytes);
    return added ? QC_OK
                 : qc_fail(ps->err, QC_E_INPUT, "%s: tensor " NAME " is there twice", f->path, t->name);
}

/* Bytes of a tensor by its type and shape. */
static int measure(const parser *ps, qc_gguf_tensor *t, uint64_t id)
{
    const char *path = ps->file->path;
    uint64_t n = 1;
    for (int d = 0; d < t->n_dims; d++)
        if (t->ne[d] < 0 || __builtin_mul_overflow(n, (uint64_t)t->ne[d], &n) || n > INT64_MAX / 64)
            return qc_fail(ps->err, QC_E_INPUT, "%s: tensor " NAME ": its shape has too many elements", path,
                           t->name);
    t->type = id <= INT32_MAX ? qc_block_find((int64_t)id) : NULL;
    if (!t->type)
        return qc_fail(ps->err, QC_E_UNSUPPORTED, "%s: tensor " NAME " is of the unknown type %llu", path,
                       t->name, (unsigned long long)id);
    if (t->type->n_elems == 0)
        return qc_fail(ps->err, QC_E_UNSUPPORTED, "%s: tensor " NAME " is of type %s, which is not read",
                       path, t->name, t->type->name);
    if (t->ne[0] % t->type->n_elems)
        return qc_fail(ps->err, QC_E_INPUT,
                       "%s: tensor " NAME ": rows of %lld values, expected a multiple of %d for %s", path,
                       t->name, (long long)t->ne[0], t->type->n_elems, t->type->name);
    t->n_bytes = n / (uint64_t)t->type->n_elems * (uint64_t)t->type->n_bytes;
    return QC_OK;
}

/* Data follow each other in the order of the list, each padded to the alignment: the only layout that readers
 * of the format accept. */
static int read_tensor(parser *ps, qc_gguf_tensor *t, uint64_t *expected)
{
    cursor *c = &ps->c;
    qc_gguf_text name = take_text(c);
    uint64_t n_dims = take_int(c, 4);
    if (c->bad)
        return cut_off(ps, "its tensors");
    QC_TRY(copy_name(ps, name, t));
    if (n_dims < 1 || n_dims > QC_MAX_DIMS)
        return qc_fail(ps->err, QC_E_INPUT, "%s: tensor " NAME " has %llu dimensions, expected 1 to %d",
                       ps->file->path, t->name, (unsigned long long)n_dims, QC_MAX_DIMS);
    t->n_dims = (int)n_dims;
    for (int d = 0; d < t->n_dims; d++)
        t->ne[d] = (int64_t)take_int(c, 8);
    uint64_t id = take_int(c, 4);
    t->offset = take_int(c, 8);
    if (c->bad)
        return cut_off(ps, "its tensors");
    QC_TRY(measure(ps, t, id));
    if (t->offset != *expected)
        return qc_fail(ps->err, QC_E_INPUT,
                       "%s: tensor " NAME " begins at byte %llu of the data, expected %llu: data must follow "
                       "each other in the order of the tensors",
                       ps->file->path, t->name, (unsigned long long)t->offset, (unsigned long long)*expected);
    *expected += (t->n_bytes + ps->alignment - 1) / ps->alignment * ps->alignment;
    return QC_OK;
}

static int place_data(parser *ps)
{
    qc_gguf_file *f = ps->file;
    uint64_t begin = (ps->c.at + ps->alignment - 1) / ps->alignment * ps->alignment;
    for (int64_t i = 0; i < f->n_tensors; i++) {
        qc_gguf_tensor *t = &f->tensors[i];
        uint64_t space = begin < f->n_bytes ? f->n_bytes - begin : 0;
        if (t->n_bytes > 0 && (t->offset > space || t->n_bytes > space - t->offset))
            return qc_fail(ps->err, QC_E_INPUT,
                           "%s: tensor " NAME " needs bytes %llu to %llu, the file has %zu: it is cut off",
                           f->path, t->name, (unsigned long long)(begin + t->offset),
                           (unsigned long long)(begin + t->offset + t->n_bytes), f->n_bytes);
        t->offset += begin;
    }
    return QC_OK;
}

static int parse(parser *ps)
{
    qc_gguf_file *f = ps->file;
    uint64_t expected = 0;
    QC_TRY(read_head(ps));
    for (int64_t i = 0; i < f->n_values; i++)
        QC_TRY(read_value(ps, &f->values[i]));
    QC_TRY(read_alignment(ps));
    size_t room = name_room(ps->c, f->n_tensors);
    f->names = qc_alloc(room, 1);
    if (!f->names)
        return qc_fail_nomem(ps->err, f->path, room);
    for (int64_t i = 0; i < f->n_tensors; i++)
        QC_TRY(read_tensor(ps, &f->tensors[i], &expected));
    return place_data(ps);
}

int qc_gguf_parse(const void *data, size_t n_bytes, const char *path, qc_gguf_file *ret, qc_err *err)
{
    qc_gguf_file file = {.path = path, .data = data, .n_bytes = n_bytes};
    parser ps = {.file = &file, .c = {.data = data, .n_bytes = n_bytes}, .err = err};
    int rc = parse(&ps);
    if (rc == QC_OK)
        *ret = file;
    else
        qc_gguf_clear(&file);
    return rc;
}

void qc_gguf_clear(qc_gguf_file *file)
{
    if (!file)
        return;
    qc_free(file->values);
    qc_free(file->tensors);
    qc_free(file->names);
    qc_map_free(file->value_of);
    qc_map_free(file->tensor_of);
    *file = (qc_gguf_file){0};
}

/* ---- values ---- */

const qc_gguf_value *qc_gguf_find(const qc_gguf_file *file, const char *key)
{
    int64_t i = qc_map_get(file->value_of, key, strlen(key), -1);
    return i < 0 ? NULL : &file->values[i];
}

const qc_gguf_tensor *qc_gguf_tensor_find(const qc_gguf_file *file, const char *name)
{
    int64_t i = qc_map_get(file->tensor_of, name, strlen(name), -1);
    return i < 0 ? NULL : &file->tensors[i];
}

static int wrong_kind(const qc_gguf_file *file, const char *key, const char *expected, qc_err *err)
{
    return qc_fail(err, QC_E_INPUT, "%s: key \"%s\" is not %s", file->path, key, expected);
}

/* Sign-extended; false if the value is no integer, or one of 64 bits without sign that is too large. */
static bool int_of(const qc_gguf_value *v, int64_t *ret)
{
    uint64_t u = v->is_array || v->kind == QC_GGUF_STRING ? 0 : qc_get_le(v->data, kind_bytes[v->kind]);
    if (v->is_array)
        return false;
    switch (v->kind) {
    case QC_GGUF_I8:
        *ret = (int8_t)u;
        return true;
    case QC_GGUF_I16:
        *ret = (int16_t)u;
        return true;
    case QC_GGUF_I32:
        *ret = (int32_t)u;
        return true;
    case QC_GGUF_U8:
    case QC_GGUF_U16:
    case QC_GGUF_U32:
    case QC_GGUF_I64:
        *ret = (int64_t)u;
        return true;
    case QC_GGUF_U64:
        *ret = (int64_t)u;
        return u <= INT64_MAX;
    default:
        return false;
    }
}

int qc_gguf_get_int(const qc_gguf_file *file, const char *key, int64_t absent, int64_t lo, int64_t hi,
                    int64_t *ret, qc_err *err)
{
    const qc_gguf_value *v = qc_gguf_find(file, key);
    int64_t x = absent;
    if (v && !int_of(v, &x))
        return wrong_kind(file, key, "an integer", err);
    if (v && (x < lo || x > hi))
        return qc_fail(err, QC_E_INPUT, "%s: key \"%s\" is %lld, expected %lld to %lld", file->path, key,
                       (long long)x, (long long)lo, (long long)hi);
    *ret = x;
    return QC_OK;
}

int qc_gguf_get_number(const qc_gguf_file *file, const char *key, double absent, double *ret, qc_err *err)
{
    const qc_gguf_value *v = qc_gguf_find(file, key);
    double x = absent;
    if (v && !v->is_array && v->kind == QC_GGUF_F32) {
        float f;
        memcpy(&f, v->data, sizeof f);
        x = (double)f;
    } else if (v && !v->is_array && v->kind == QC_GGUF_F64) {
        memcpy(&x, v->data, sizeof x);
    } else if (v) {
        return wrong_kind(file, key, "a floating point number", err);
    }
    if (v && !isfinite(x))
        return wrong_kind(file, key, "finite", err);
    *ret = x;
    return QC_OK;
}

int qc_gguf_get_bool(const qc_gguf_file *file, const char *key, bool absent, bool *ret, qc_err *err)
{
    const qc_gguf_value *v = qc_gguf_find(file, key);
    if (v && (v->is_array || v->kind != QC_GGUF_BOOL))
        return wrong_kind(file, key, "true or false", err);
    *ret = v ? *v->data != 0 : absent;
    return QC_OK;
}

int qc_gguf_get_text(const qc_gguf_file *file, const char *key, qc_gguf_text *ret, qc_err *err)
{
    const qc_gguf_value *v = qc_gguf_find(file, key);
    if (v && (v->is_array || v->kind != QC_GGUF_STRING))
        return wrong_kind(file, key, "a string", err);
    qc_gguf_text text = {NULL, 0};
    if (v) {
        const uint8_t *at = v->data;
        text = qc_gguf_next_text(&at);
        if (memchr(text.p, 0, text.n_bytes) || !qc_utf8_valid(text.p, text.n_bytes, NULL))
            return wrong_kind(file, key, "well-formed UTF-8 without NUL", err);
    }
    *ret = text;
    return QC_OK;
}

int qc_gguf_get_array(const qc_gguf_file *file, const char *key, qc_gguf_kind kind, const qc_gguf_value **ret,
                      qc_err *err)
{
    const qc_gguf_value *v = qc_gguf_find(file, key);
    if (v && (!v->is_array || v->kind != kind))
        return wrong_kind(
            file, key, kind == QC_GGUF_STRING ? "an array of strings" : "an array of the expected type", err);
    *ret = v;
    return QC_OK;
}
