#include "imatrix.h"

#include "family.h"
#include "qc_alloc.h"
#include "qc_buf.h"
#include "qc_file.h"
#include "qc_map.h"
#include "qc_math.h"
#include "qc_tensor.h"
#include "stats_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* GGUF, version 3: types of values, the type of float32 tensors, and how data are aligned without a key that
 * says so. */
enum { GGUF_VERSION = 3, GGUF_U32 = 4, GGUF_STRING = 8, GGUF_ARRAY = 9, GGML_F32 = 0, ALIGNMENT = 32 };

void qc_imatrix_name(int layer, qc_slot slot, char ret[64])
{
    const char *name = "";
    switch (slot) {
    case QC_SLOT_Q:
        name = "attn_q";
        break;
    case QC_SLOT_K:
        name = "attn_k";
        break;
    case QC_SLOT_V:
        name = "attn_v";
        break;
    case QC_SLOT_O:
        name = "attn_output";
        break;
    case QC_SLOT_GATE:
        name = "ffn_gate";
        break;
    case QC_SLOT_UP:
        name = "ffn_up";
        break;
    case QC_SLOT_DOWN:
        name = "ffn_down";
        break;
    case QC_SLOT_QKV:
        name = "attn_qkv";
        break;
    case QC_SLOT_GATE_UP: /* llama.cpp calls it by its second half */
        name = "ffn_up";
        break;
    default:
        break;
    }
    snprintf(ret, 64, "blk.%d.%s.weight", layer, name);
}

/* ---- writing ---- */

typedef struct entry {
    char name[64];
    const float *sums; /* [n] sum of x^2 */
    int64_t n;
    float count;
} entry;

typedef struct entries {
    entry *list;
    int64_t n, cap;
    float **sums; /* [layers * stages], owned; matrices of a stage share one */
    int64_t n_sums;
} entries;

static void entries_clear(entries *e)
{
    for (int64_t i = 0; i < e->n_sums; i++)
        qc_free(e->sums[i]);
    qc_free(e->sums);
    qc_free(e->list);
}

static int gather(const qc_stats_file *file, qc_backend *be, entries *e, qc_err *err)
{
    int64_t n_layers = file->info.n_layers;
    const qc_family *family = qc_family_find(file->info.family);
    if (!family)
        return qc_fail(err, QC_E_UNSUPPORTED, "statistics of model_type \"%s\", which is not supported",
                       file->info.family);
    e->cap = n_layers * QC_N_SLOTS;
    e->list = qc_calloc((size_t)e->cap, sizeof *e->list);
    e->sums = qc_calloc((size_t)(n_layers * QC_N_STAGES), sizeof *e->sums);
    if (!e->list || !e->sums)
        return qc_fail_nomem(err, "importance matrix", (unsigned long long)e->cap * sizeof *e->list);
    for (int64_t k = 0; k < n_layers * QC_N_STAGES; k++) {
        qc_stage stage = (qc_stage)(k % QC_N_STAGES);
        int layer = (int)(k / QC_N_STAGES);
        int64_t n = file->info.widths[stage], tokens;
        float *sums = e->sums[e->n_sums++] = qc_alloc((size_t)n, sizeof *sums);
        if (!sums)
            return qc_fail_nomem(err, "importance matrix", (unsigned long long)n * sizeof *sums);
        QC_TRY(qc_stats_summary(file, be, layer, stage, sums, NULL, NULL, &tokens, err));
        for (const qc_slot *slot = qc_stage_slots(family, stage); *slot != QC_N_SLOTS; slot++) {
            entry *x = &e->list[e->n++];
            *x = (entry){.sums = sums, .n = n, .count = (float)tokens};
            qc_imatrix_name(layer, *slot, x->name);
        }
    }
    return QC_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const entry *)a)->name, ((const entry *)b)->name);
}

static int put_int(qc_buf *buf, uint64_t value, int n_bytes, qc_err *err)
{
    uint8_t le[8];
    qc_put_le(le, value, n_bytes);
    return qc_buf_append(buf, le, (size_t)n_bytes, err);
}

static int put_text(qc_buf *buf, const char *text, qc_err *err)
{
    QC_TRY(put_int(buf, strlen(text), 8, err));
    return qc_buf_append(buf, text, strlen(text), err);
}

static int put_u32(qc_buf *buf, const char *key, uint64_t value, qc_err *err)
{
    QC_TRY(put_text(buf, key, err));
    QC_TRY(put_int(buf, GGUF_U32, 4, err));
    return put_int(buf, value, 4, err);
}

static int put_metadata(qc_buf *buf, const qc_stats_info *info, int64_t n_tensors, qc_err *err)
{
    QC_TRY(qc_buf_append(buf, "GGUF", 4, err));
    QC_TRY(put_int(buf, GGUF_VERSION, 4, err));
    QC_TRY(put_int(buf, (uint64_t)n_tensors, 8, err));
    QC_TRY(put_int(buf, 4, 8, err));
    QC_TRY(put_text(buf, "general.type", err));
    QC_TRY(put_int(buf, GGUF_STRING, 4, err));
    QC_TRY(put_text(buf, "imatrix", err));
    QC_TRY(put_text(buf, "imatrix.datasets", err));
    QC_TRY(put_int(buf, GGUF_ARRAY, 4, err));
    QC_TRY(put_int(buf, GGUF_STRING, 4, err));
    QC_TRY(put_int(buf, 1, 8, err));
    QC_TRY(put_text(buf, info->text, err));
    QC_TRY(put_u32(buf, "imatrix.chunk_count", (uint64_t)info->n_windows, err));
    return put_u32(buf, "imatrix.chunk_size", (uint64_t)info->length, err);
}

/* A tensor of n float32; *offset of its data moves on. */
static int put_tensor_info(qc_buf *buf, const char *name, const char *suffix, int64_t n, uint64_t *offset,
                           qc_err *err)
{
    char full[80];
    snprintf(full, sizeof full, "%s%s", name, suffix);
    QC_TRY(put_text(buf, full, err));
    QC_TRY(put_int(buf, 1, 4, err));
    QC_TRY(put_int(buf, (uint64_t)n, 8, err));
    QC_TRY(put_int(buf, GGML_F32, 4, err));
    QC_TRY(put_int(buf, *offset, 8, err));
    *offset += (uint64_t)qc_round_up(n * 4, ALIGNMENT);
    return QC_OK;
}

static int put_data(qc_buf *buf, const float *values, int64_t n, qc_err *err)
{
    static const char zeros[ALIGNMENT];
    size_t bytes = (size_t)n * sizeof *values;
    QC_TRY(qc_buf_append(buf, values, bytes, err));
    return qc_buf_append(buf, zeros, (size_t)qc_round_up((int64_t)bytes, ALIGNMENT) - bytes, err);
}

static int build(const entries *e, const qc_stats_info *info, qc_buf *buf, qc_err *err)
{
    static const char zeros[ALIGNMENT];
    uint64_t offset = 0;
    QC_TRY(put_metadata(buf, info, 2 * e->n, err));
    for (int64_t i = 0; i < e->n; i++) {
        QC_TRY(put_tensor_info(buf, e->list[i].name, ".in_sum2", e->list[i].n, &offset, err));
        QC_TRY(put_tensor_info(buf, e->list[i].name, ".counts", 1, &offset, err));
    }
    QC_TRY(
        qc_buf_append(buf, zeros, (size_t)qc_round_up((int64_t)buf->n_bytes, ALIGNMENT) - buf->n_bytes, err));
    for (int64_t i = 0; i < e->n; i++) {
        QC_TRY(put_data(buf, e->list[i].sums, e->list[i].n, err));
        QC_TRY(put_data(buf, &e->list[i].count, 1, err));
    }
    return QC_OK;
}

int qc_imatrix_write(const qc_stats_file *file, qc_backend *be, const char *path, bool force, qc_err *err)
{
    entries e = {0};
    qc_buf buf = {0};
    int rc = qc_outfile_check(path, force, err);
    if (rc == QC_OK)
        rc = gather(file, be, &e, err);
    if (rc == QC_OK) {
        qsort(e.list, (size_t)e.n, sizeof *e.list, by_name);
        rc = build(&e, &file->info, &buf, err);
    }
    if (rc == QC_OK)
        rc = qc_file_write(path, force, buf.data, buf.n_bytes, err);
    entries_clear(&e);
    qc_buf_clear(&buf);
    return rc;
}

/* ---- reading ---- */

/* A place in the file; once something does not fit it stays at the end. */
typedef struct cursor {
    const uint8_t *data;
    size_t n_bytes, at;
    bool bad;
} cursor;

typedef struct text {
    const char *p;
    size_t n;
} text;

typedef struct tensor {
    text name;
    uint64_t n, n_mats, offset; /* elements of a row, rows, place in the data */
    uint64_t type;
} tensor;

struct qc_imatrix {
    int64_t n_layers;
    float **weights; /* [n_layers * QC_N_SLOTS], NULL where there are none */
    int64_t *tokens; /* the same */
};

typedef struct reader {
    const char *path;
    cursor c;
    uint64_t n_tensors, alignment, data; /* data: where they start */
    bool is_imatrix;
    tensor *tensors;
    qc_map *by_name;
} reader;

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

static text take_text(cursor *c)
{
    uint64_t n = take_int(c, 8);
    const uint8_t *p = take(c, n);
    return (text){(const char *)p, p ? n : 0};
}

static bool equals(text t, const char *want)
{
    return t.p && t.n == strlen(want) && memcmp(t.p, want, t.n) == 0;
}

/* Skip a value. Arrays of arrays do not occur in these files. */
static void skip_value(cursor *c, uint64_t type)
{
    static const int sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    uint64_t n = 1;
    if (type == GGUF_ARRAY) {
        type = take_int(c, 4);
        n = take_int(c, 8);
        if (type == GGUF_ARRAY)
            c->bad = true;
    }
    if (type >= sizeof sizes / sizeof sizes[0] || n > c->n_bytes)
        c->bad = true;
    else if (type != GGUF_STRING)
        take(c, n * (uint64_t)sizes[type]);
    else
        for (; n > 0 && !c->bad; n--)
            take_text(c);
}

static int broken(const reader *r, const char *what, qc_err *err)
{
    return qc_fail(err, QC_E_INPUT, "%s: damaged importance matrix: %s", r->path, what);
}

static int read_head(reader *r, qc_err *err)
{
    cursor *c = &r->c;
    const uint8_t *magic = take(c, 4);
    if (!magic || memcmp(magic, "GGUF", 4) != 0)
        return qc_fail(
            err, QC_E_UNSUPPORTED,
            "%s: no GGUF file; importance matrices of the older .dat format are not read (llama-imatrix "
            "--in-file converts them)",
            r->path);
    uint64_t version = take_int(c, 4), n_keys;
    if (!c->bad && version != 2 && version != GGUF_VERSION)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: GGUF version %llu", r->path, (unsigned long long)version);
    r->n_tensors = take_int(c, 8);
    n_keys = take_int(c, 8);
    r->alignment = ALIGNMENT;
    for (; n_keys > 0 && !c->bad; n_keys--) {
        text key = take_text(c);
        uint64_t type = take_int(c, 4);
        if (equals(key, "general.type") && type == GGUF_STRING)
            r->is_imatrix = equals(take_text(c), "imatrix");
        else if (equals(key, "general.alignment") && type == GGUF_U32)
            r->alignment = take_int(c, 4);
        else
            skip_value(c, type);
    }
    if (c->bad || r->alignment == 0 || r->alignment % 8 != 0 || r->alignment > 65536 ||
        r->n_tensors > c->n_bytes)
        return broken(r, "its keys", err);
    if (!r->is_imatrix)
        return qc_fail(err, QC_E_INPUT, "%s: a GGUF file, but no importance matrix (general.type)", r->path);
    return QC_OK;
}

static int read_tensors(reader *r, qc_err *err)
{
    cursor *c = &r->c;
    r->tensors = qc_calloc(r->n_tensors, sizeof *r->tensors);
    r->by_name = qc_map_new(r->n_tensors);
    if (!r->tensors || !r->by_name)
        return qc_fail_nomem(err, r->path, r->n_tensors * sizeof *r->tensors);
    for (uint64_t i = 0; i < r->n_tensors && !c->bad; i++) {
        tensor *t = &r->tensors[i];
        t->name = take_text(c);
        uint64_t n_dims = take_int(c, 4);
        c->bad = c->bad || n_dims < 1 || n_dims > 4;
        t->n = take_int(c, 8);
        t->n_mats = 1;
        for (uint64_t d = 1; d < n_dims && !c->bad; d++)
            c->bad = __builtin_mul_overflow(t->n_mats, take_int(c, 8), &t->n_mats) || c->bad;
        t->type = take_int(c, 4);
        t->offset = take_int(c, 8);
        int added = c->bad ? 0 : qc_map_add(r->by_name, t->name.p, t->name.n, (int64_t)i);
        if (added < 0)
            return qc_fail_nomem(err, r->path, 64);
        c->bad = c->bad || added == 0;
    }
    if (c->bad)
        return broken(r, "its list of tensors", err);
    r->data = (c->at + r->alignment - 1) / r->alignment * r->alignment;
    return QC_OK;
}

/* The values of a tensor with n elements; *ret = NULL if the file has none of that name. */
static int find_values(const reader *r, const char *name, const char *suffix, int64_t n, const float **ret,
                       qc_err *err)
{
    char full[80];
    snprintf(full, sizeof full, "%s%s", name, suffix);
    int64_t i = qc_map_get(r->by_name, full, strlen(full), -1);
    *ret = NULL;
    if (i < 0)
        return QC_OK;
    const tensor *t = &r->tensors[i];
    if (t->n_mats != 1)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: %s holds the sums of several experts", r->path, full);
    if (t->n != (uint64_t)n)
        return qc_fail(err, QC_E_INPUT, "%s: %s has %llu values, %lld were expected", r->path, full,
                       (unsigned long long)t->n, (long long)n);
    uint64_t space = r->data < r->c.n_bytes ? r->c.n_bytes - r->data : 0;
    if (t->type != GGML_F32 || t->offset % 4 != 0 || t->offset > space || (uint64_t)n * 4 > space - t->offset)
        return broken(r, full, err);
    *ret = (const float *)(const void *)(r->c.data + r->data + t->offset);
    return QC_OK;
}

static int read_matrix(const reader *r, int layer, qc_slot slot, int64_t n, float **ret, int64_t *ret_tokens,
                       qc_err *err)
{
    char name[64];
    const float *sums, *count;
    qc_imatrix_name(layer, slot, name);
    QC_TRY(find_values(r, name, ".in_sum2", n, &sums, err));
    QC_TRY(find_values(r, name, ".counts", 1, &count, err));
    if (!sums && !count)
        return QC_OK;
    if (!sums || !count)
        return broken(r, name, err);
    for (int64_t i = 0; i < n; i++)
        if (!(sums[i] >= 0 && sums[i] <= 3.4e38f))
            return broken(r, name, err);
    if (!(*count >= 0 && *count <= 1e18f))
        return broken(r, name, err);
    if (*count == 0)
        return QC_OK;
    *ret = qc_alloc((size_t)n, sizeof **ret);
    if (!*ret)
        return qc_fail_nomem(err, r->path, (unsigned long long)n * sizeof **ret);
    qc_stats_weights_of_sums(sums, n, (double)*count, *ret);
    *ret_tokens = *count < 1 ? 1 : (int64_t)*count;
    return QC_OK;
}

static int read_all(reader *r, const qc_model *model, qc_imatrix *im, qc_err *err)
{
    int64_t n_found = 0;
    QC_TRY(read_head(r, err));
    QC_TRY(read_tensors(r, err));
    for (int layer = 0; layer < (int)im->n_layers; layer++)
        for (int s = 0; s < QC_N_STAGES; s++)
            for (const qc_slot *slot = qc_stage_slots(model->config.family, (qc_stage)s); *slot != QC_N_SLOTS;
                 slot++) {
                int at = layer * QC_N_SLOTS + (int)*slot;
                float **w = &im->weights[at];
                QC_TRY(read_matrix(r, layer, *slot, qc_stage_width(&model->config, (qc_stage)s), w,
                                   &im->tokens[at], err));
                n_found += *w != NULL;
            }
    if (n_found == 0)
        return qc_fail(err, QC_E_INPUT, "%s: holds nothing about the matrices of %s", r->path,
                       model->src->path);
    return QC_OK;
}

int qc_imatrix_open(const char *path, const qc_model *model, qc_imatrix **ret, qc_err *err)
{
    qc_mapped map = {0};
    qc_imatrix *im = qc_calloc(1, sizeof *im);
    if (!im)
        return qc_fail_nomem(err, path, sizeof *im);
    size_t n = (size_t)(model->config.n_layers * QC_N_SLOTS);
    im->weights = qc_calloc(n, sizeof *im->weights);
    im->tokens = qc_calloc(n, sizeof *im->tokens);
    if (!im->weights || !im->tokens) {
        qc_imatrix_close(im);
        return qc_fail_nomem(err, path, n * 16);
    }
    im->n_layers = model->config.n_layers;
    int rc = qc_file_map(path, &map, err);
    reader r = {.path = path, .c = {.data = map.data, .n_bytes = map.n_bytes}};
    if (rc == QC_OK)
        rc = read_all(&r, model, im, err);
    qc_free(r.tensors);
    qc_map_free(r.by_name);
    qc_file_unmap(&map);
    if (rc < 0)
        qc_imatrix_close(im);
    else
        *ret = im;
    return rc;
}

void qc_imatrix_close(qc_imatrix *im)
{
    if (!im)
        return;
    for (int64_t i = 0; i < im->n_layers * QC_N_SLOTS; i++)
        qc_free(im->weights[i]);
    qc_free(im->weights);
    qc_free(im->tokens);
    qc_free(im);
}

const float *qc_imatrix_weights(const qc_imatrix *im, int layer, qc_slot slot)
{
    return im->weights[layer * QC_N_SLOTS + (int)slot];
}

int64_t qc_imatrix_tokens(const qc_imatrix *im, int layer, qc_slot slot)
{
    return im->tokens[layer * QC_N_SLOTS + (int)slot];
}
