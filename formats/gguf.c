#include "gguf.h"

#include "gguf_internal.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_math.h"

#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define TOKENIZER "tokenizer.json"
/* As for a checkpoint folder. */
#define MAX_TOKENIZER_BYTES (256u << 20)

typedef struct entry {
    const qc_gguf_tensor *tensor;
    qc_tensor_info info; /* name owned */
    int64_t pair_rows;   /* rows of a head whose order is turned back; 0: rows stand as they are */
} entry;

typedef struct gguf_source {
    qc_source base; /* first: a qc_source pointer is one to this struct */
    qc_mapped map;
    qc_gguf_file file;
    qc_gguf_shape shape;
    entry *entries; /* [base.n_tensors] */
    qc_map *by_name;
    char *files[2]; /* the file; a tokenizer beside it */
} gguf_source;

static const gguf_source *self(const qc_source *src)
{
    return (const gguf_source *)src;
}

static const entry *entry_of(const qc_source *src, int64_t tensor)
{
    return &self(src)->entries[tensor];
}

static const qc_tensor_info *source_info(const qc_source *src, int64_t tensor)
{
    return &entry_of(src, tensor)->info;
}

static int64_t source_find(const qc_source *src, const char *name)
{
    return qc_map_get(self(src)->by_name, name, strlen(name), -1);
}

/* ---- data ---- */

static int64_t stored_row(const entry *e, int64_t r)
{
    return e->pair_rows ? qc_gguf_pair_row(r, e->pair_rows) : r;
}

static uint64_t row_bytes(const entry *e)
{
    const qc_block_info *type = e->tensor->type;
    return (uint64_t)(qc_tensor_cols(&e->info) / type->n_elems) * (uint64_t)type->n_bytes;
}

static const uint8_t *row_data(const qc_source *src, const entry *e, int64_t stored)
{
    return self(src)->file.data + e->tensor->offset + (uint64_t)stored * row_bytes(e);
}

static int decode(const qc_source *src, const entry *e, int64_t stored, int64_t n_rows, float *dst,
                  qc_err *err)
{
    const qc_block_info *type = e->tensor->type;
    int64_t cols = qc_tensor_cols(&e->info);
    if (type->dtype == QC_DT_GRID) {
        qc_block_decode(type, row_data(src, e, stored), n_rows * cols / type->n_elems, dst);
        return QC_OK;
    }
    int rc = qc_dense_to_f32(type->dtype, row_data(src, e, stored), n_rows * cols, dst, err);
    return rc < 0 ? qc_err_prefix(err, "%s: tensor \"%s\"", src->path, e->info.name) : QC_OK;
}

/* A vector (a bias) whose elements are turned back. */
static int read_pairs_vector(const qc_source *src, const entry *e, float *dst, qc_err *err)
{
    int64_t n = qc_tensor_cols(&e->info);
    float *stored = qc_alloc((size_t)n, sizeof *stored);
    if (!stored)
        return qc_fail_nomem(err, e->info.name, (unsigned long long)n * sizeof *stored);
    int rc = decode(src, e, 0, 1, stored, err);
    for (int64_t i = 0; i < n && rc == QC_OK; i++)
        dst[i] = stored[stored_row(e, i)];
    qc_free(stored);
    return rc;
}

static int source_read_rows(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows, float *dst,
                            qc_err *err)
{
    const entry *e = entry_of(src, tensor);
    int64_t cols = qc_tensor_cols(&e->info);
    assert(row0 >= 0 && n_rows >= 0 && row0 + n_rows <= qc_tensor_rows(&e->info));
    if (e->pair_rows == 0)
        return decode(src, e, row0, n_rows, dst, err);
    if (e->info.n_dims == 1)
        return n_rows ? read_pairs_vector(src, e, dst, err) : QC_OK;
    for (int64_t r = 0; r < n_rows; r++)
        QC_TRY(decode(src, e, stored_row(e, row0 + r), 1, dst + r * cols, err));
    return QC_OK;
}

static int source_read_codes(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows,
                             qc_code_rows *rows, qc_err *err)
{
    const entry *e = entry_of(src, tensor);
    const qc_grid *grid = &e->info.grid;
    int64_t cols = qc_tensor_cols(&e->info);
    if (grid->kind == QC_GRID_NONE)
        return qc_fail(err, QC_E_USAGE, "%s: tensor \"%s\" is on no grid", src->path, e->info.name);
    for (int64_t r = 0; r < n_rows; r++) {
        qc_code_rows one = qc_code_rows_from(rows, grid, cols, r);
        qc_block_unpack(e->tensor->type, row_data(src, e, stored_row(e, row0 + r)), 1, cols, &one);
    }
    rows->n_rows = n_rows;
    return QC_OK;
}

static const void *source_raw(const qc_source *src, int64_t tensor)
{
    const entry *e = entry_of(src, tensor);
    return e->pair_rows || e->info.dtype == QC_DT_GRID ? NULL : row_data(src, e, 0);
}

static void source_release(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows)
{
    const entry *e = entry_of(src, tensor);
    int64_t begin = row0, end = row0 + n_rows;
    if (e->pair_rows && e->info.n_dims > 1) {
        begin = begin / e->pair_rows * e->pair_rows;
        end = qc_round_up(end, e->pair_rows);
    }
    qc_mapped_release_around(&self(src)->map, e->tensor->offset + (uint64_t)begin * row_bytes(e),
                             (uint64_t)(end - begin) * row_bytes(e));
}

/* ---- side files ---- */

static int read_beside(const gguf_source *s, char **ret, size_t *ret_bytes, qc_err *err)
{
    return s->files[1] ? qc_file_read(s->files[1], MAX_TOKENIZER_BYTES, ret, ret_bytes, err) : QC_OK;
}

static int source_side_file(const qc_source *src, const char *name, char **ret, size_t *ret_bytes,
                            qc_err *err)
{
    const gguf_source *s = self(src);
    char *text = NULL;
    *ret = NULL;
    *ret_bytes = 0;
    if (strcmp(name, "config.json") == 0)
        QC_TRY(qc_gguf_make_config(&s->file, &s->shape, &text, err));
    else if (strcmp(name, "generation_config.json") == 0)
        QC_TRY(qc_gguf_make_generation_config(&s->file, &text, err));
    else if (strcmp(name, "tokenizer_config.json") == 0)
        QC_TRY(qc_gguf_make_tokenizer_config(&s->file, &text, err));
    else if (strcmp(name, TOKENIZER) == 0 && s->base.n_files > 1)
        return read_beside(s, ret, ret_bytes, err);
    else if (strcmp(name, TOKENIZER) == 0)
        QC_TRY(qc_gguf_make_tokenizer(&s->file, &text, err));
    if (text) {
        *ret = text;
        *ret_bytes = strlen(text);
    }
    return QC_OK;
}

/* ---- opening ---- */

static void source_close(qc_source *src)
{
    gguf_source *s = (gguf_source *)src;
    for (int64_t i = 0; s->entries && i < s->base.n_tensors; i++)
        qc_free((char *)(uintptr_t)s->entries[i].info.name);
    qc_free(s->entries);
    qc_map_free(s->by_name);
    qc_gguf_clear(&s->file);
    qc_file_unmap(&s->map);
    qc_free(s->files[0]);
    qc_free(s->files[1]);
    qc_free(s);
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

/* Matrices and biases of q and k, where the architecture keeps their rows as pairs. */
static int find_pairs(const gguf_source *s, const qc_gguf_tensor *t, entry *e, qc_err *err)
{
    bool q = ends_with(t->name, ".attn_q.weight") || ends_with(t->name, ".attn_q.bias"),
         k = ends_with(t->name, ".attn_k.weight") || ends_with(t->name, ".attn_k.bias");
    if (!s->shape.arch->pairs || !(q || k))
        return QC_OK;
    int64_t n = e->info.n_dims ? e->info.shape[0] : 0, want = (q ? s->shape.n_heads : s->shape.n_kv_heads);
    if (n != want * s->shape.head_dim)
        return qc_fail(err, QC_E_INPUT, "%s: tensor \"%s\" has %lld rows, expected %lld heads of %lld",
                       s->base.path, t->name, (long long)n, (long long)want, (long long)s->shape.head_dim);
    if (e->info.n_dims == 1 && e->info.dtype == QC_DT_GRID)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: tensor \"%s\": a bias of type %s is not read",
                       s->base.path, t->name, t->type->name);
    e->pair_rows = s->shape.head_dim;
    return QC_OK;
}

static int add_tensor(gguf_source *s, const qc_gguf_tensor *t, qc_err *err)
{
    char name[256];
    entry *e = &s->entries[s->base.n_tensors];
    if (!qc_gguf_name_to_hf(t->name, name))
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: tensor \"%.200s\" is not known for architecture %s",
                       s->base.path, t->name, s->shape.arch->name);
    *e = (entry){.tensor = t};
    e->info = (qc_tensor_info){.dtype = t->type->dtype, .n_dims = t->n_dims, .n_bytes = t->n_bytes};
    while (e->info.n_dims > 1 && t->ne[e->info.n_dims - 1] == 1 && !ends_with(name, "_proj.weight"))
        e->info.n_dims--; /* a row vector is a vector */
    for (int d = 0; d < e->info.n_dims; d++)
        e->info.shape[d] = t->ne[e->info.n_dims - 1 - d];
    if (t->type->dtype == QC_DT_GRID)
        e->info.grid = t->type->grid;
    QC_TRY(find_pairs(s, t, e, err));
    if (!(e->info.name = qc_strdup(name)))
        return qc_fail_nomem(err, name, strlen(name));
    int64_t index = s->base.n_tensors++;
    int added = qc_map_add(s->by_name, e->info.name, strlen(e->info.name), index);
    if (added < 0)
        return qc_fail_nomem(err, name, strlen(name));
    return added ? QC_OK
                 : qc_fail(err, QC_E_INPUT, "%s: tensor \"%s\" is there twice", s->base.path, t->name);
}

/* A tokenizer that can not be rebuilt is looked for beside the file. */
static int find_tokenizer(gguf_source *s, qc_err *err)
{
    qc_gguf_text model;
    QC_TRY(qc_gguf_get_text(&s->file, "tokenizer.ggml.model", &model, err));
    if (qc_gguf_text_is(model, "gpt2"))
        return QC_OK;
    char *folder = qc_path_dir(s->base.path), *path = folder ? qc_path_join(folder, TOKENIZER) : NULL;
    qc_free(folder);
    if (!path)
        return qc_fail_nomem(err, s->base.path, strlen(s->base.path));
    if (qc_path_exists(path)) {
        s->files[1] = path;
        s->base.n_files = 2;
        return QC_OK;
    }
    qc_free(path);
    return QC_OK;
}

static int check_kind(const gguf_source *s, qc_err *err)
{
    qc_gguf_text type;
    int64_t n_splits;
    QC_TRY(qc_gguf_get_text(&s->file, "general.type", &type, err));
    if (type.p && !qc_gguf_text_is(type, "model"))
        return qc_fail(err, QC_E_INPUT, "%s: a GGUF file of type \"%.*s\", a model was expected",
                       s->base.path, (int)qc_min_i64((int64_t)type.n_bytes, 100), type.p);
    QC_TRY(qc_gguf_get_int(&s->file, "split.count", 1, 0, UINT16_MAX, &n_splits, err));
    if (n_splits > 1)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: one of %lld parts of a split model is not read: join them with llama-gguf-split "
                       "--merge",
                       s->base.path, (long long)n_splits);
    return QC_OK;
}

static int open_into(gguf_source *s, qc_err *err)
{
    const char *path = s->files[0];
    QC_TRY(qc_file_map(path, &s->map, err));
    QC_TRY(qc_gguf_parse(s->map.data, s->map.n_bytes, path, &s->file, err));
    QC_TRY(check_kind(s, err));
    QC_TRY(qc_gguf_read_shape(&s->file, &s->shape, err));
    s->entries = qc_calloc((size_t)s->file.n_tensors, sizeof *s->entries);
    s->by_name = qc_map_new((size_t)s->file.n_tensors);
    if (!s->entries || !s->by_name)
        return qc_fail_nomem(err, path, (unsigned long long)s->file.n_tensors * sizeof *s->entries);
    for (int64_t i = 0; i < s->file.n_tensors; i++)
        if (strcmp(s->file.tensors[i].name, QC_GGUF_ROPE_FREQS) != 0) /* part of the config */
            QC_TRY(add_tensor(s, &s->file.tensors[i], err));
    return find_tokenizer(s, err);
}

int qc_gguf_open(const char *path, qc_source **ret, qc_err *err)
{
    gguf_source *s = qc_calloc(1, sizeof *s);
    if (!s || !(s->files[0] = qc_strdup(path))) {
        qc_free(s);
        return qc_fail_nomem(err, path, sizeof *s);
    }
    s->base = (qc_source){.format = "gguf",
                          .path = s->files[0],
                          .files = s->files,
                          .n_files = 1,
                          .info = source_info,
                          .find = source_find,
                          .read_rows = source_read_rows,
                          .read_codes = source_read_codes,
                          .raw = source_raw,
                          .release = source_release,
                          .side_file = source_side_file,
                          .close = source_close};
    int rc = open_into(s, err);
    if (rc < 0)
        source_close(&s->base);
    else
        *ret = &s->base;
    return rc;
}

bool qc_gguf_probe_path(const char *path)
{
    char magic[4];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return false;
    bool hit =
        pread(fd, magic, sizeof magic, 0) == (ssize_t)sizeof magic && qc_gguf_probe(magic, sizeof magic);
    close(fd);
    return hit;
}
