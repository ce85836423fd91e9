#include "gguf_write.h"

#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_math.h"

#include <stdio.h>
#include <string.h>

#define FORMAT_NAME "gguf"

typedef struct declared {
    char *name; /* in the file, owned */
    const qc_block_info *type;
    int n_dims;
    int64_t ne[QC_MAX_DIMS]; /* the contiguous dimension first */
} declared;

typedef struct gguf_writer {
    qc_writer base; /* first: a qc_writer pointer is one to this struct */
    char *path, *type, *manifest;
    qc_outfile *out; /* NULL: count only */
    qc_metas metas;
    qc_gguf_side side;
    qc_gguf_model model;
    declared *tensors;
    int64_t n_tensors, cap_tensors;
    qc_buf start; /* head of the file, once its size was asked for */
    bool started; /* and written */
    /* the tensor at hand */
    int64_t at, rows, cols, rows_done;
    size_t row_bytes;
    uint8_t *block; /* [block_rows, row_bytes] packed rows */
    size_t block_bytes;
    int64_t pair_rows; /* rows of a head that are gathered in block to be put in their order; 0: none */
} gguf_writer;

static gguf_writer *self_of(qc_writer *w)
{
    return (gguf_writer *)w;
}

static void self_free(gguf_writer *w)
{
    qc_metas_clear(&w->metas);
    for (int64_t i = 0; i < w->n_tensors; i++)
        qc_free(w->tensors[i].name);
    qc_free(w->tensors);
    qc_free(w->side.tokenizer);
    qc_free(w->side.tokenizer_config);
    qc_free(w->side.chat_template);
    qc_free(w->model.rope_freqs);
    qc_free(w->manifest);
    qc_free(w->path);
    qc_free(w->type);
    qc_free(w->block);
    qc_buf_clear(&w->start);
    qc_free(w);
}

/* ---- what is collected ---- */

static int add_meta(qc_writer *w, const qc_meta *meta, qc_err *err)
{
    return qc_metas_add(&self_of(w)->metas, meta, err);
}

/* Side files of which something becomes metadata; the others have no place in the format. */
static int add_file(qc_writer *w, const char *name, const void *data, size_t n_bytes, qc_err *err)
{
    gguf_writer *self = self_of(w);
    const struct {
        const char *name;
        char **text;
    } files[] = {{"tokenizer.json", &self->side.tokenizer},
                 {"tokenizer_config.json", &self->side.tokenizer_config},
                 {"chat_template.jinja", &self->side.chat_template},
                 {"manifest.json", &self->manifest}};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        if (strcmp(files[i].name, name) != 0)
            continue;
        qc_free(*files[i].text);
        if (!(*files[i].text = qc_strndup(data, n_bytes)))
            return qc_fail_nomem(err, name, n_bytes);
    }
    return QC_OK;
}

static int declare(qc_writer *w, const qc_tensor_use *use, const qc_tensor_info *info, qc_err *err)
{
    gguf_writer *self = self_of(w);
    char name[64];
    (void)use;
    if (self->n_tensors == self->cap_tensors) {
        size_t old = (size_t)self->cap_tensors * sizeof *self->tensors,
               more = 2 * old + 64 * sizeof *self->tensors;
        declared *list = qc_realloc(self->tensors, old, more);
        if (!list)
            return qc_fail_nomem(err, info->name, more);
        self->tensors = list;
        self->cap_tensors = 2 * self->cap_tensors + 64;
    }
    if (!qc_gguf_name_of(info->name, name))
        return qc_fail(err, QC_E_UNSUPPORTED, "tensor %s: it has no name in GGUF files", info->name);
    if (info->act_bits)
        return qc_fail(err, QC_E_UNSUPPORTED, "tensor %s: GGUF files hold no quantized activations",
                       info->name);
    declared *d = &self->tensors[self->n_tensors];
    *d = (declared){.name = qc_strdup(name), .type = qc_gguf_block_of(info), .n_dims = info->n_dims};
    if (!d->name)
        return qc_fail_nomem(err, info->name, strlen(name));
    for (int i = 0; i < info->n_dims; i++)
        d->ne[i] = info->shape[info->n_dims - 1 - i];
    self->n_tensors++;
    return QC_OK;
}

/* A tied table has the name of the embedding: without a head of its own llama.cpp reads it for both. */
static int add_alias(qc_writer *w, const char *name, const char *target, qc_err *err)
{
    gguf_writer *self = self_of(w);
    char as_target[64], as_name[64];
    if (!qc_gguf_name_of(target, as_target) || !qc_gguf_name_of(name, as_name))
        return qc_fail(err, QC_E_UNSUPPORTED, "tensor %s: it has no name in GGUF files", target);
    for (int64_t i = 0; i < self->n_tensors && strcmp(as_target, "output.weight") == 0; i++)
        if (strcmp(self->tensors[i].name, as_target) == 0) {
            qc_free(self->tensors[i].name);
            if (!(self->tensors[i].name = qc_strdup(as_name)))
                return qc_fail_nomem(err, name, strlen(as_name));
        }
    return QC_OK;
}

/* ---- head ---- */

static int put_general(const gguf_writer *w, qc_gguf_head *head, qc_err *err)
{
    int file_type = qc_gguf_file_type(w->type);
    QC_TRY(qc_gguf_put_text(head, "general.type", "model", err));
    QC_TRY(qc_gguf_put_int(head, "general.quantization_version", QC_GGUF_U32, 2, err));
    if (file_type >= 0)
        QC_TRY(qc_gguf_put_int(head, "general.file_type", QC_GGUF_U32, file_type, err));
    return w->manifest ? qc_gguf_put_text(head, "qconvert.manifest", w->manifest, err) : QC_OK;
}

static int put_head(gguf_writer *w, qc_gguf_head *head, qc_err *err)
{
    qc_gguf_head keys = {0};
    int rc = qc_gguf_put_model(&keys, &w->metas, &w->model, err);
    if (rc == QC_OK) /* the architecture comes first, as readers that only look at the beginning expect */
        rc = qc_gguf_put_text(head, "general.architecture", w->model.arch->name, err);
    if (rc == QC_OK)
        rc = put_general(w, head, err);
    if (rc == QC_OK)
        rc = qc_buf_append(&head->keys, keys.keys.data, keys.keys.n_bytes, err);
    head->n_keys += keys.n_keys;
    qc_gguf_head_clear(&keys);
    QC_TRY(rc);
    QC_TRY(qc_gguf_put_vocab(head, &w->side, &w->metas, w->model.vocab, err));
    if (w->model.rope_freqs)
        QC_TRY(qc_gguf_put_tensor(head, QC_GGUF_ROPE_FREQS, qc_block_find(QC_BLOCK_F32), 1,
                                  &w->model.n_rope_freqs, err));
    for (int64_t i = 0; i < w->n_tensors; i++) {
        const declared *d = &w->tensors[i];
        QC_TRY(qc_gguf_put_tensor(head, d->name, d->type, d->n_dims, d->ne, err));
    }
    return qc_gguf_head_finish(head, &w->start, err);
}

static int size(qc_writer *w, uint64_t *ret_bytes, qc_err *err)
{
    gguf_writer *self = self_of(w);
    qc_gguf_head head = {0};
    int rc = put_head(self, &head, err);
    *ret_bytes = self->start.n_bytes + head.data_bytes;
    qc_gguf_head_clear(&head);
    return rc;
}

/* ---- data ---- */

static int pad(gguf_writer *w, qc_err *err)
{
    static const char zeros[QC_GGUF_ALIGNMENT];
    uint64_t at = qc_outfile_offset(w->out), rest = at % QC_GGUF_ALIGNMENT;
    return rest ? qc_outfile_write(w->out, zeros, QC_GGUF_ALIGNMENT - rest, err) : QC_OK;
}

static int start(gguf_writer *w, qc_err *err)
{
    if (w->started)
        return QC_OK;
    w->started = true;
    QC_TRY(qc_outfile_write(w->out, w->start.data, w->start.n_bytes, err));
    if (w->model.rope_freqs)
        QC_TRY(qc_outfile_write(w->out, w->model.rope_freqs,
                                (size_t)w->model.n_rope_freqs * sizeof *w->model.rope_freqs, err));
    return pad(w, err);
}

static bool has_pairs(const gguf_writer *w, const char *name)
{
    return w->model.arch->pairs && (strstr(name, ".attn_q.") || strstr(name, ".attn_k."));
}

static int begin_tensor(qc_writer *w, const qc_tensor_info *info, qc_err *err)
{
    gguf_writer *self = self_of(w);
    QC_TRY(start(self, err));
    QC_TRY(pad(self, err));
    if (self->at >= self->n_tensors)
        return qc_fail(err, QC_E_USAGE, "%s: tensor %s was not declared", self->path, info->name);
    const declared *d = &self->tensors[self->at];
    if (qc_gguf_block_of(info) != d->type)
        return qc_fail(err, QC_E_UNSUPPORTED, "tensor %s: it was declared as %s and can not change any more",
                       info->name, d->type->name);
    self->rows = qc_tensor_rows(info);
    self->cols = qc_tensor_cols(info);
    self->rows_done = 0;
    self->row_bytes = (size_t)(self->cols / d->type->n_elems) * (size_t)d->type->n_bytes;
    self->pair_rows = has_pairs(self, d->name) ? self->model.head_dim : 0;
    size_t need = (size_t)qc_max_i64(self->pair_rows, QC_WRITER_ROWS) * self->row_bytes;
    if (need > self->block_bytes) {
        qc_free(self->block);
        self->block_bytes = 0;
        if (!(self->block = qc_alloc(need, 1)))
            return qc_fail_nomem(err, info->name, need);
        self->block_bytes = need;
    }
    return QC_OK;
}

static int check_rows(const gguf_writer *w, int64_t n_rows, qc_err *err)
{
    if (w->at < w->n_tensors && n_rows >= 0 && n_rows <= w->rows - w->rows_done)
        return QC_OK;
    return qc_fail(err, QC_E_USAGE, "%s: %lld rows too many", w->path, (long long)n_rows);
}

/* Packed rows to the file, those of a head in their order there. */
static int put_rows(gguf_writer *w, const uint8_t *data, int64_t n_rows, qc_err *err)
{
    if (w->pair_rows == 0) {
        w->rows_done += n_rows;
        return n_rows ? qc_outfile_write(w->out, data, (size_t)n_rows * w->row_bytes, err) : QC_OK;
    }
    for (int64_t r = 0; r < n_rows; r++) {
        int64_t in_head = qc_gguf_pair_row(w->rows_done++ % w->pair_rows, w->pair_rows);
        memcpy(w->block + (size_t)in_head * w->row_bytes, data + (size_t)r * w->row_bytes, w->row_bytes);
        if (w->rows_done % w->pair_rows == 0)
            QC_TRY(qc_outfile_write(w->out, w->block, (size_t)w->pair_rows * w->row_bytes, err));
    }
    return QC_OK;
}

/* A bias of q or k: its elements are the rows of that matrix. */
static int put_vector(gguf_writer *w, const uint8_t *data, qc_err *err)
{
    size_t elem = w->row_bytes / (size_t)w->cols;
    for (int64_t i = 0; i < w->cols; i++)
        memcpy(w->block + (size_t)qc_gguf_pair_row(i, w->pair_rows) * elem, data + (size_t)i * elem, elem);
    w->rows_done++;
    return qc_outfile_write(w->out, w->block, w->row_bytes, err);
}

static int put_dense(qc_writer *w, const void *data, int64_t n_rows, qc_err *err)
{
    gguf_writer *self = self_of(w);
    QC_TRY(check_rows(self, n_rows, err));
    if (self->pair_rows && self->tensors[self->at].n_dims == 1)
        return n_rows ? put_vector(self, data, err) : QC_OK;
    return put_rows(self, data, n_rows, err);
}

static int put_codes(qc_writer *w, const qc_code_rows *rows, qc_err *err)
{
    gguf_writer *self = self_of(w);
    const qc_block_info *type = self->tensors[self->at].type;
    QC_TRY(check_rows(self, rows->n_rows, err));
    uint8_t *packed = qc_alloc((size_t)QC_WRITER_ROWS, self->row_bytes);
    int rc = packed ? QC_OK : qc_fail_nomem(err, self->path, QC_WRITER_ROWS * self->row_bytes);
    for (int64_t r = 0; r < rows->n_rows && rc == QC_OK; r += QC_WRITER_ROWS) {
        qc_code_rows some = qc_code_rows_from(rows, &type->grid, self->cols, r);
        some.n_rows = qc_min_i64(QC_WRITER_ROWS, rows->n_rows - r);
        qc_block_pack(type, &some, self->cols, packed);
        rc = put_rows(self, packed, some.n_rows, err);
    }
    qc_free(packed);
    return rc;
}

static int end_tensor(qc_writer *w, qc_err *err)
{
    gguf_writer *self = self_of(w);
    if (self->rows_done != self->rows)
        return qc_fail(err, QC_E_USAGE, "%s: tensor %s: %lld of %lld rows were written", self->path,
                       self->tensors[self->at].name, (long long)self->rows_done, (long long)self->rows);
    self->at++;
    return QC_OK;
}

static int finish(qc_writer *w, const char **ret_temp_path, qc_err *err)
{
    gguf_writer *self = self_of(w);
    if (self->at != self->n_tensors)
        return qc_fail(err, QC_E_USAGE, "%s: %lld of %lld tensors were written", self->path,
                       (long long)self->at, (long long)self->n_tensors);
    QC_TRY(start(self, err));
    QC_TRY(pad(self, err));
    QC_TRY(qc_outfile_sync(self->out, err));
    *ret_temp_path = qc_outfile_temp_path(self->out);
    return QC_OK;
}

static int publish(qc_writer *w, const char *other_path, qc_err *err)
{
    int rc = qc_outfile_commit(self_of(w)->out, other_path, err);
    self_free(self_of(w));
    return rc;
}

static void discard(qc_writer *w)
{
    qc_outfile_discard(self_of(w)->out);
    self_free(self_of(w));
}

static int create(const qc_writer_options *options, qc_writer **ret, qc_err *err)
{
    gguf_writer *self = qc_calloc(1, sizeof *self);
    if (!self)
        return qc_fail_nomem(err, options->path, sizeof *self);
    self->base = (qc_writer){&qc_gguf_writer_format,
                             add_meta,
                             add_file,
                             declare,
                             add_alias,
                             size,
                             begin_tensor,
                             put_dense,
                             put_codes,
                             end_tensor,
                             finish,
                             publish,
                             discard};
    self->path = qc_strdup(options->path);
    self->type = options->type ? qc_strdup(options->type) : NULL;
    int rc = self->path && (self->type || !options->type) ? QC_OK : qc_fail_nomem(err, options->path, 64);
    if (rc == QC_OK && !options->count)
        rc = qc_outfile_open(options->path, options->force, &self->out, err);
    if (rc < 0)
        self_free(self);
    else
        *ret = &self->base;
    return rc;
}

const qc_writer_format qc_gguf_writer_format = {.name = FORMAT_NAME,
                                                .extension = ".gguf",
                                                .types = QC_GGUF_TYPES,
                                                .own_grids = true,
                                                .hold = qc_gguf_hold,
                                                .tensor_bytes = qc_gguf_tensor_bytes,
                                                .create = create};
