/* Packed files behind the table of writer.h: a thin layer over qpk_write.c. */
#include "qc_alloc.h"
#include "qpk.h"

#include <string.h>

_Static_assert(QC_QPK_TILE_ROWS == QC_WRITER_ROWS, "rows come in whole tiles");

typedef struct alias {
    char *name, *target; /* owned */
    struct alias *next;
} alias;

typedef struct qpk_writer {
    qc_writer base; /* first: a qc_writer pointer is one to this struct */
    qc_qpk_writer *file;
    bool count;
    alias *aliases; /* they can follow only once their targets are written */
    uint64_t n_bytes;
} qpk_writer;

static qpk_writer *self_of(qc_writer *w)
{
    return (qpk_writer *)w;
}

static void self_free(qpk_writer *self)
{
    for (alias *a = self->aliases, *next; a; a = next) {
        next = a->next;
        qc_free(a->name);
        qc_free(a->target);
        qc_free(a);
    }
    qc_free(self);
}

static int add_meta(qc_writer *w, const qc_meta *meta, qc_err *err)
{
    qc_qpk_writer *file = self_of(w)->file;
    switch (meta->type) {
    case QC_META_U64:
        return qc_qpk_add_meta_u64(file, meta->key, meta->u64, err);
    case QC_META_F64:
        return qc_qpk_add_meta_f64(file, meta->key, meta->f64, err);
    case QC_META_STRING:
        return qc_qpk_add_meta_string(file, meta->key, meta->string, err);
    case QC_META_F64_ARRAY:
        return qc_qpk_add_meta_f64_array(file, meta->key, meta->f64_array, meta->n_elems, err);
    default:
        return qc_qpk_add_meta_u64_array(file, meta->key, meta->array, meta->n_elems, err);
    }
}

static int add_file(qc_writer *w, const char *name, const void *data, size_t n_bytes, qc_err *err)
{
    return qc_qpk_add_file(self_of(w)->file, name, data, n_bytes, err);
}

/* The format holds every grid that we round to, and all dense types that checkpoints have. */
static int hold(const char *type, const qc_tensor_use *use, qc_tensor_info *info, const char **ret_why,
                qc_err *err)
{
    (void)type;
    (void)use;
    (void)ret_why;
    if (info->dtype == QC_DT_GRID && info->grid.kind != QC_GRID_AFFINE)
        return qc_fail(err, QC_E_UNSUPPORTED, "tensor %s: packed files hold affine grids only", info->name);
    return QC_OK;
}

static uint64_t tensor_bytes(const char *type, const qc_tensor_info *info)
{
    (void)type;
    return qc_qpk_tensor_bytes(info);
}

static int declare(qc_writer *w, const qc_tensor_use *use, const qc_tensor_info *info, qc_err *err)
{
    qpk_writer *self = self_of(w);
    (void)use;
    self->n_bytes += qc_qpk_tensor_bytes(info);
    return self->count ? qc_qpk_count_tensor(self->file, info, err) : QC_OK;
}

static int add_alias(qc_writer *w, const char *name, const char *target, qc_err *err)
{
    alias *a = qc_calloc(1, sizeof *a);
    if (!a)
        return qc_fail_nomem(err, name, sizeof *a);
    *a = (alias){qc_strdup(name), qc_strdup(target), self_of(w)->aliases};
    self_of(w)->aliases = a;
    return a->name && a->target ? QC_OK : qc_fail_nomem(err, name, strlen(name));
}

static int put_aliases(qpk_writer *self, qc_err *err)
{
    for (const alias *a = self->aliases; a; a = a->next)
        QC_TRY(qc_qpk_add_alias(self->file, a->name, a->target, err));
    return QC_OK;
}

static int size(qc_writer *w, uint64_t *ret_bytes, qc_err *err)
{
    qpk_writer *self = self_of(w);
    *ret_bytes = self->n_bytes;
    if (!self->count)
        return QC_OK;
    QC_TRY(put_aliases(self, err));
    return qc_qpk_count(self->file, ret_bytes, err);
}

static int begin_tensor(qc_writer *w, const qc_tensor_info *info, qc_err *err)
{
    return qc_qpk_begin_tensor(self_of(w)->file, info, err);
}

static int put_dense(qc_writer *w, const void *data, int64_t n_rows, qc_err *err)
{
    return qc_qpk_put_dense(self_of(w)->file, data, n_rows, err);
}

static int put_codes(qc_writer *w, const qc_code_rows *rows, qc_err *err)
{
    return qc_qpk_put_codes(self_of(w)->file, rows, err);
}

static int end_tensor(qc_writer *w, qc_err *err)
{
    return qc_qpk_end_tensor(self_of(w)->file, err);
}

static int finish(qc_writer *w, const char **ret_temp_path, qc_err *err)
{
    QC_TRY(put_aliases(self_of(w), err));
    return qc_qpk_finish(self_of(w)->file, ret_temp_path, err);
}

static int publish(qc_writer *w, const char *other_path, qc_err *err)
{
    int rc = qc_qpk_publish(self_of(w)->file, other_path, err);
    self_free(self_of(w));
    return rc;
}

static void discard(qc_writer *w)
{
    qc_qpk_discard(self_of(w)->file);
    self_free(self_of(w));
}

static int create(const qc_writer_options *options, qc_writer **ret, qc_err *err)
{
    qpk_writer *self = qc_calloc(1, sizeof *self);
    if (!self)
        return qc_fail_nomem(err, options->path, sizeof *self);
    self->base = (qc_writer){&qc_qpk_writer_format,
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
    self->count = options->count;
    int rc = options->count ? qc_qpk_create_count(options->path, &self->file, err)
                            : qc_qpk_create(options->path, options->force, &self->file, err);
    if (rc < 0)
        self_free(self);
    else
        *ret = &self->base;
    return rc;
}

const qc_writer_format qc_qpk_writer_format = {
    .name = "qpk", .extension = ".qpk", .hold = hold, .tensor_bytes = tensor_bytes, .create = create};
