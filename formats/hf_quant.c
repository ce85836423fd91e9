#include "hf_quant.h"

#include "hf_quant_internal.h"
#include "qc_alloc.h"
#include "qc_json.h"
#include "qc_log.h"
#include "qc_map.h"

#include <assert.h>
#include <string.h>

typedef struct quant_source {
    qc_source base; /* first: a qc_source pointer is one to this struct */
    qc_source *inner;
    qc_logical *tensors; /* [base.n_tensors] */
    qc_map *by_name;
} quant_source;

static const quant_source *self_of(const qc_source *src)
{
    return (const quant_source *)src;
}

static const qc_logical *logical_of(const qc_source *src, int64_t tensor)
{
    return &self_of(src)->tensors[tensor];
}

static const qc_tensor_info *quant_info(const qc_source *src, int64_t tensor)
{
    return &logical_of(src, tensor)->info;
}

static int64_t quant_find(const qc_source *src, const char *name)
{
    return qc_map_get(self_of(src)->by_name, name, strlen(name), -1);
}

/* Arrays of the parts. */
static void part_data(const qc_source *src, const qc_logical *t, const void *data[QC_MAX_PARTS])
{
    const qc_source *inner = self_of(src)->inner;
    for (int p = 0; p < QC_MAX_PARTS; p++)
        data[p] = t->parts[p] < 0 ? NULL : inner->raw(inner, t->parts[p]);
}

static int quant_read_codes(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows,
                            qc_code_rows *rows, qc_err *err)
{
    const qc_logical *t = logical_of(src, tensor);
    const void *data[QC_MAX_PARTS];
    (void)err;
    assert(t->info.dtype == QC_DT_GRID && row0 >= 0 && row0 + n_rows <= qc_tensor_rows(&t->info));
    part_data(src, t, data);
    t->packing->unpack(&t->grid_info, row0, n_rows, data, rows);
    return QC_OK;
}

/* dst = values of rows whose column c belongs to group g_idx[c]. */
static void decode_ordered(const qc_logical *t, const qc_code_rows *rows, float *dst)
{
    int64_t cols = qc_tensor_cols(&t->info), groups = qc_tensor_n_groups(&t->grid_info);
    int middle = 1 << (t->grid_info.grid.bits - 1);
    for (int64_t r = 0; r < rows->n_rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            int64_t at = r * groups + t->g_idx[c];
            int zero = rows->zeros ? rows->zeros[at] : middle;
            dst[r * cols + c] = rows->scales[at] * (float)((int)rows->codes[r * cols + c] - zero);
        }
}

static int quant_read_rows(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows, float *dst,
                           qc_err *err)
{
    const qc_logical *t = logical_of(src, tensor);
    const qc_source *inner = self_of(src)->inner;
    if (!t->packing)
        return inner->read_rows(inner, t->parts[0], row0, n_rows, dst, err);
    const void *data[QC_MAX_PARTS];
    int64_t cols = qc_tensor_cols(&t->info), groups = qc_tensor_n_groups(&t->grid_info);
    size_t n_scales = (size_t)(n_rows * groups);
    qc_code_rows rows = {.codes = qc_alloc((size_t)(n_rows * cols), 1),
                         .scales = qc_alloc(n_scales, sizeof *rows.scales),
                         .zeros = t->grid_info.grid.symmetric ? NULL : qc_alloc(n_scales, 1)};
    int rc = rows.codes && rows.scales && (rows.zeros || t->grid_info.grid.symmetric)
                 ? QC_OK
                 : qc_fail_nomem(err, t->info.name, (unsigned long long)(n_rows * cols));
    if (rc == QC_OK) {
        part_data(src, t, data);
        t->packing->unpack(&t->grid_info, row0, n_rows, data, &rows);
        if (t->g_idx)
            decode_ordered(t, &rows, dst);
        else
            qc_code_rows_decode(&rows, &t->grid_info.grid, cols, dst);
    }
    qc_free(rows.codes);
    qc_free(rows.scales);
    qc_free(rows.zeros);
    return rc;
}

static const void *quant_raw(const qc_source *src, int64_t tensor)
{
    const qc_logical *t = logical_of(src, tensor);
    const qc_source *inner = self_of(src)->inner;
    return t->packing ? NULL : inner->raw(inner, t->parts[0]);
}

/* Rows of a packed matrix lie across its parts: pages go once the last row was read. */
static void quant_release(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows)
{
    const qc_logical *t = logical_of(src, tensor);
    const qc_source *inner = self_of(src)->inner;
    if (!t->packing) {
        inner->release(inner, t->parts[0], row0, n_rows);
        return;
    }
    if (row0 + n_rows < qc_tensor_rows(&t->info))
        return;
    for (int p = 0; p < QC_MAX_PARTS; p++)
        if (t->parts[p] >= 0)
            inner->release(inner, t->parts[p], 0, qc_tensor_rows(inner->info(inner, t->parts[p])));
}

/* The config without the description of the packing: the logical tensors are not packed. */
static int strip_config(char **text, size_t *n_bytes, qc_err *err)
{
    static const char *const keys[] = {"quantization_config", "compression_config"};
    cJSON *doc;
    QC_TRY(qc_json_parse(*text, *n_bytes, "config.json", true, &doc, err));
    int rc = qc_json_keep_floats(doc, *text, *n_bytes, err);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        cJSON_DeleteItemFromObjectCaseSensitive(doc, keys[i]);
        for (cJSON *c = doc->child; c; c = c->next)
            if (cJSON_IsObject(c))
                cJSON_DeleteItemFromObjectCaseSensitive(c, keys[i]);
    }
    char *stripped = rc == QC_OK ? qc_json_print(doc) : NULL;
    cJSON_Delete(doc);
    QC_TRY(rc);
    if (!stripped)
        return qc_fail_nomem(err, "config.json", *n_bytes);
    qc_free(*text);
    *text = stripped;
    *n_bytes = strlen(stripped);
    return QC_OK;
}

static int quant_side_file(const qc_source *src, const char *name, char **ret, size_t *ret_bytes, qc_err *err)
{
    const qc_source *inner = self_of(src)->inner;
    QC_TRY(inner->side_file(inner, name, ret, ret_bytes, err));
    if (!*ret || strcmp(name, "config.json") != 0)
        return QC_OK;
    int rc = strip_config(ret, ret_bytes, err);
    if (rc < 0) {
        qc_free(*ret);
        *ret = NULL;
    }
    return rc;
}

static void free_tensors(qc_logical *tensors, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        qc_free(tensors[i].name);
        qc_free(tensors[i].g_idx);
    }
    qc_free(tensors);
}

static void quant_close(qc_source *src)
{
    quant_source *self = (quant_source *)src;
    free_tensors(self->tensors, self->base.n_tensors);
    qc_map_free(self->by_name);
    qc_source_close(self->inner);
    qc_free(self);
}

/* ---- opening ---- */

static int index_names(quant_source *self, qc_err *err)
{
    for (int64_t i = 0; i < self->base.n_tensors; i++) {
        const char *name = self->tensors[i].info.name;
        int added = qc_map_add(self->by_name, name, strlen(name), i);
        if (added < 0)
            return qc_fail_nomem(err, name, strlen(name));
        if (added == 0)
            return qc_fail(err, QC_E_INPUT, "%s: tensor \"%.200s\" is stored both packed and plain",
                           self->inner->path, name);
    }
    return QC_OK;
}

int qc_packed_source_open(qc_source *inner, qc_logical *tensors, int64_t n_tensors, const char *format,
                          const char *type, qc_source **ret, qc_err *err)
{
    quant_source *self = qc_calloc(1, sizeof *self);
    if (!self) {
        free_tensors(tensors, n_tensors);
        qc_source_close(inner);
        return qc_fail_nomem(err, "source", sizeof *self);
    }
    self->inner = inner;
    self->tensors = tensors;
    self->by_name = qc_map_new((size_t)n_tensors);
    self->base = (qc_source){.format = format,
                             .type = type,
                             .path = inner->path,
                             .files = inner->files,
                             .n_files = inner->n_files,
                             .n_tensors = n_tensors,
                             .info = quant_info,
                             .find = quant_find,
                             .read_rows = quant_read_rows,
                             .read_codes = quant_read_codes,
                             .raw = quant_raw,
                             .release = quant_release,
                             .side_file = quant_side_file,
                             .close = quant_close};
    int rc = self->by_name ? index_names(self, err)
                           : qc_fail_nomem(err, inner->path, (uint64_t)n_tensors * sizeof *tensors);
    if (rc < 0)
        quant_close(&self->base);
    else
        *ret = &self->base;
    return rc;
}

/* Tensors of a checkpoint by its layout; those in *ret are owned, on failure too. */
static int list_tensors(const qc_quant_layout *layout, qc_logical *ret, int64_t *ret_n, qc_err *err)
{
    bool packed = false;
    for (int64_t i = 0; i < layout->inner->n_tensors; i++) {
        qc_logical t;
        bool whole;
        QC_TRY(qc_quant_layout_tensor(layout, i, &t, &whole, err));
        if (whole)
            ret[(*ret_n)++] = t;
        packed = packed || t.packing;
    }
    if (!packed)
        return qc_fail(err, QC_E_INPUT,
                       "%s: config.json says that the checkpoint is %s, but no tensor of it is packed",
                       layout->inner->path, layout->format);
    return QC_OK;
}

int qc_hf_quant_open(qc_source *inner, const cJSON *config, qc_source **ret, qc_err *err)
{
    qc_quant_layout layout = {.inner = inner, .config = config};
    int64_t n = 0;
    qc_logical *tensors = qc_calloc((size_t)inner->n_tensors + 1, sizeof *tensors);
    int rc = tensors ? qc_quant_layout_init(&layout, err)
                     : qc_fail_nomem(err, inner->path, (uint64_t)inner->n_tensors * sizeof *tensors);
    if (rc == QC_OK)
        rc = list_tensors(&layout, tensors, &n, err);
    if (rc == QC_OK) {
        const char *type = strcmp(layout.format, "gptq") ? NULL : layout.v2 ? "v2" : "v1";
        return qc_packed_source_open(inner, tensors, n, layout.format, type, ret, err);
    }
    free_tensors(tensors, n);
    qc_source_close(inner);
    return rc;
}
