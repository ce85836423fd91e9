/* Packed files as a source: a thin layer over libqpk. */
#include "qpk.h"

#include "qc_alloc.h"
#include "runtime/qpk.h"
#include "runtime/qpk_format.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

_Static_assert((int)QPK_F32 == (int)QC_DT_F32 && (int)QPK_F16 == (int)QC_DT_F16 &&
                   (int)QPK_BF16 == (int)QC_DT_BF16 && (int)QPK_U64 == (int)QC_DT_U64 &&
                   (int)QPK_F8_E5M2FNUZ == (int)QC_DT_F8_E5M2FNUZ && (int)QPK_GRID == (int)QC_DT_GRID,
               "element types are stored by their ids");
_Static_assert((int)QPK_E_USAGE == (int)QC_E_USAGE && (int)QPK_E_INPUT == (int)QC_E_INPUT &&
                   (int)QPK_E_UNSUPPORTED == (int)QC_E_UNSUPPORTED &&
                   (int)QPK_E_RESOURCE == (int)QC_E_RESOURCE,
               "codes of libqpk are ours");
_Static_assert(QPK_TILE_ROWS == QC_QPK_TILE_ROWS && QPK_MAX_DIMS == QC_MAX_DIMS, "limits of libqpk are ours");

typedef struct qpk_source {
    qc_source base;
    qpk_file *file;
    qc_tensor_info *infos; /* [n_tensors]; names lie in the file */
    char *path;
} qpk_source;

static const qpk_source *self_of(const qc_source *src)
{
    return (const qpk_source *)src;
}

/* Put the message that libqpk wrote into err. */
static int fail_with(qc_err *err, int code, const char *text)
{
    return qc_fail(err, code, "%s", text);
}

static const qc_tensor_info *source_info(const qc_source *src, int64_t tensor)
{
    return &self_of(src)->infos[tensor];
}

static int64_t source_find(const qc_source *src, const char *name)
{
    return qpk_find(self_of(src)->file, name);
}

static int source_read_rows(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows, float *dst,
                            qc_err *err)
{
    char text[QC_ERR_MSG_BYTES];
    int rc = qpk_dequantize_rows(self_of(src)->file, tensor, row0, n_rows, dst, text, sizeof text);
    return rc < 0 ? fail_with(err, rc, text) : QC_OK;
}

static int source_read_codes(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows,
                             qc_code_rows *rows, qc_err *err)
{
    char text[QC_ERR_MSG_BYTES];
    int rc = qpk_unpack_rows(self_of(src)->file, tensor, row0, n_rows, rows->codes, rows->scales, rows->zeros,
                             text, sizeof text);
    if (rc < 0)
        return fail_with(err, rc, text);
    rows->n_rows = n_rows;
    return QC_OK;
}

static const void *source_raw(const qc_source *src, int64_t tensor)
{
    const qpk_source *self = self_of(src);
    return self->infos[tensor].dtype == QC_DT_GRID ? NULL : qpk_tensor_data(self->file, tensor);
}

static void source_release(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows)
{
    qpk_release(self_of(src)->file, tensor, row0, n_rows);
}

static int source_side_file(const qc_source *src, const char *name, char **ret, size_t *ret_bytes,
                            qc_err *err)
{
    const qpk_source *self = self_of(src);
    int64_t index = qpk_file_find(self->file, name);
    if (index < 0) {
        *ret = NULL;
        *ret_bytes = 0;
        return QC_OK;
    }
    size_t n_bytes = qpk_file_at(self->file, index)->raw_bytes;
    char text[QC_ERR_MSG_BYTES], *copy = qc_alloc(n_bytes + 1, 1);
    if (!copy)
        return qc_fail_nomem(err, name, n_bytes);
    int rc = qpk_file_read(self->file, index, copy, text, sizeof text);
    if (rc < 0) {
        qc_free(copy);
        return fail_with(err, rc, text);
    }
    copy[n_bytes] = 0;
    *ret = copy;
    *ret_bytes = n_bytes;
    return QC_OK;
}

static void source_close(qc_source *src)
{
    qpk_source *self = (qpk_source *)src;
    qpk_close(self->file);
    qc_free(self->infos);
    qc_free(self->path);
    qc_free(self);
}

static qc_tensor_info info_of(const qpk_tensor *t)
{
    qc_tensor_info info = {
        .name = t->name, .dtype = (qc_dtype)t->dtype, .n_dims = t->n_dims, .n_bytes = t->n_bytes};
    memcpy(info.shape, t->shape, sizeof info.shape);
    info.act_bits = t->act_bits;
    info.act_group = t->act_group;
    if (t->dtype == QPK_GRID)
        info.grid = (qc_grid){.kind = QC_GRID_AFFINE,
                              .bits = t->bits,
                              .symmetric = t->symmetric,
                              .group_elems = t->group_elems,
                              .scale_dtype = (qc_dtype)t->scale_dtype};
    return info;
}

int qc_qpk_open(const char *path, qc_source **ret, qc_err *err)
{
    char text[QC_ERR_MSG_BYTES];
    qpk_source *self = qc_calloc(1, sizeof *self);
    if (!self)
        return qc_fail_nomem(err, path, sizeof *self);
    self->base = (qc_source){.format = "qpk",
                             .info = source_info,
                             .find = source_find,
                             .read_rows = source_read_rows,
                             .read_codes = source_read_codes,
                             .raw = source_raw,
                             .release = source_release,
                             .side_file = source_side_file,
                             .check = qc_qpk_check,
                             .close = source_close};
    int rc = qpk_open(path, &self->file, text, sizeof text);
    if (rc < 0) {
        rc = fail_with(err, rc, text);
        goto fail;
    }
    self->base.n_tensors = qpk_n_tensors(self->file);
    self->infos = qc_calloc((size_t)self->base.n_tensors, sizeof *self->infos);
    self->path = qc_strdup(path);
    if (!self->infos || !self->path) {
        rc = qc_fail_nomem(err, path, (size_t)self->base.n_tensors * sizeof *self->infos);
        goto fail;
    }
    self->base.path = self->path;
    self->base.files = &self->path;
    self->base.n_files = 1;
    for (int64_t i = 0; i < self->base.n_tensors; i++)
        self->infos[i] = info_of(qpk_tensor_at(self->file, i));
    *ret = &self->base;
    return QC_OK;
fail:
    source_close(&self->base);
    return rc;
}

bool qc_qpk_probe(const char *path)
{
    char magic[8];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return false;
    bool hit = pread(fd, magic, sizeof magic, 0) == (ssize_t)sizeof magic &&
               memcmp(magic, QPK_MAGIC, sizeof magic) == 0;
    close(fd);
    return hit;
}

int qc_qpk_check(const qc_source *src, qc_err *err)
{
    char text[QC_ERR_MSG_BYTES];
    int rc = qpk_check(self_of(src)->file, text, sizeof text);
    return rc < 0 ? fail_with(err, rc, text) : QC_OK;
}

const struct qpk_file *qc_qpk_file(const qc_source *src)
{
    return self_of(src)->file;
}
