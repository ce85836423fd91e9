#include "hf_view.h"

#include "qc_alloc.h"
#include "qc_fp.h"
#include "qc_json.h"
#include "qc_map.h"
#include "qc_math.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define MAX_EXPERTS 65536
#define SCALE_END   "_scale_inv"

typedef struct view_tensor {
    qc_tensor_info info;
    char *name;    /* info.name, if it is not one of the inner source; owned */
    int64_t inner; /* number there */
    int64_t row0;  /* first row in it, all dimensions but the last taken together */
    float *scales; /* [block rows, block columns] of FP8, owned; NULL: the elements are the values */
} view_tensor;

typedef struct hf_view {
    qc_source base; /* first: a qc_source pointer is one to this struct */
    qc_source *inner;
    view_tensor *tensors; /* [base.n_tensors] */
    int64_t cap;
    qc_map *by_name;
    cJSON *config;    /* of FP8: config.json without quantization_config; NULL: as in the folder */
    int64_t block[2]; /* rows and columns that share a scale; 0: no FP8 is described */
} hf_view;

static const hf_view *self(const qc_source *src)
{
    return (const hf_view *)src;
}

static const qc_tensor_info *view_info(const qc_source *src, int64_t tensor)
{
    return &self(src)->tensors[tensor].info;
}

static int64_t view_find(const qc_source *src, const char *name)
{
    return qc_map_get(self(src)->by_name, name, strlen(name), -1);
}

/* Sign, 4 bits of exponent (bias 7), 3 of fraction; no infinity, all ones is NaN. */
static float from_f8(uint8_t code)
{
    uint32_t a = code & 0x7f;
    float x = a == 0x7f ? NAN : qc_f32_from_bits(a << 20) * 0x1p120f;
    return code & 0x80 ? -x : x;
}

static void decode_f8(const hf_view *v, const view_tensor *t, int64_t row0, int64_t n_rows, float *dst)
{
    int64_t cols = t->info.shape[1], n_blocks = qc_ceil_div(cols, v->block[1]);
    const uint8_t *codes = (const uint8_t *)v->inner->raw(v->inner, t->inner) + row0 * cols;
    for (int64_t r = 0; r < n_rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            float scale = t->scales[(row0 + r) / v->block[0] * n_blocks + c / v->block[1]];
            dst[r * cols + c] = qc_bf16_to_f32(qc_f32_to_bf16(from_f8(codes[r * cols + c]) * scale));
        }
}

static int view_read_rows(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows, float *dst,
                          qc_err *err)
{
    const view_tensor *t = &self(src)->tensors[tensor];
    assert(row0 >= 0 && n_rows >= 0 && row0 + n_rows <= qc_tensor_rows(&t->info));
    if (!t->scales)
        return self(src)->inner->read_rows(self(src)->inner, t->inner, t->row0 + row0, n_rows, dst, err);
    decode_f8(self(src), t, row0, n_rows, dst);
    return QC_OK;
}

static const void *view_raw(const qc_source *src, int64_t tensor)
{
    const view_tensor *t = &self(src)->tensors[tensor];
    const char *data = t->scales ? NULL : self(src)->inner->raw(self(src)->inner, t->inner);
    int64_t row_bits = qc_tensor_cols(&t->info) * qc_dtype_bits(t->info.dtype);
    return data ? data + t->row0 * row_bits / 8 : NULL;
}

static void view_release(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows)
{
    const view_tensor *t = &self(src)->tensors[tensor];
    self(src)->inner->release(self(src)->inner, t->inner, t->row0 + row0, n_rows);
}

static int view_side_file(const qc_source *src, const char *name, char **ret, size_t *ret_bytes, qc_err *err)
{
    const hf_view *v = self(src);
    if (!v->config || strcmp(name, "config.json") != 0)
        return v->inner->side_file(v->inner, name, ret, ret_bytes, err);
    char *text = cJSON_Print(v->config);
    *ret = text ? qc_strdup(text) : NULL;
    cJSON_free(text);
    if (!*ret)
        return qc_fail_nomem(err, name, 4096);
    *ret_bytes = strlen(*ret);
    return QC_OK;
}

static void view_close(qc_source *src)
{
    hf_view *v = (hf_view *)src;
    for (int64_t i = 0; i < v->base.n_tensors; i++) {
        qc_free(v->tensors[i].name);
        qc_free(v->tensors[i].scales);
    }
    qc_map_free(v->by_name);
    cJSON_Delete(v->config);
    qc_free(v->tensors);
    qc_source_close(v->inner);
    qc_free(v);
}

/* ---- opening ---- */

static bool ends_with(const char *s, const char *suffix)
{
    size_t n = strlen(s), m = strlen(suffix);
    return n >= m && strcmp(s + n - m, suffix) == 0;
}

/* Takes *t, also on failure. */
static int add_tensor(hf_view *v, view_tensor *t, qc_err *err)
{
    int added = QC_E_RESOURCE;
    if (v->base.n_tensors == v->cap) {
        size_t cap = v->cap ? 2 * (size_t)v->cap : 256;
        void *p = qc_realloc(v->tensors, (size_t)v->cap * sizeof *t, cap * sizeof *t);
        v->tensors = p ? p : v->tensors;
        v->cap = p ? (int64_t)cap : v->cap;
    }
    if (v->base.n_tensors < v->cap)
        added = qc_map_add(v->by_name, t->info.name, strlen(t->info.name), v->base.n_tensors);
    if (added == 1) {
        v->tensors[v->base.n_tensors++] = *t;
        return QC_OK;
    }
    int rc = added == 0 ? qc_fail(err, QC_E_INPUT, "%s: tensor \"%.200s\" is there on its own and as a part",
                                  v->base.path, t->info.name)
                        : qc_fail_nomem(err, v->base.path, sizeof *t);
    qc_free(t->name);
    qc_free(t->scales);
    return rc;
}

/* ---- experts in one tensor ---- */

static bool is_fused(const qc_tensor_info *info)
{
    return ends_with(info->name, ".experts.gate_up_proj") || ends_with(info->name, ".experts.down_proj");
}

/* One matrix of one expert: n_rows rows from row0 on, called by what stands behind ".experts.". */
static int add_part(hf_view *v, int64_t inner, int64_t expert, const char *part, int64_t row0, int64_t n_rows,
                    qc_err *err)
{
    const qc_tensor_info *info = v->inner->info(v->inner, inner);
    const char *end = strrchr(info->name, '.');
    view_tensor t = {.info = *info, .inner = inner, .row0 = row0};
    t.name = qc_asprintf("%.*s.%lld.%s.weight", (int)(end - info->name), info->name, (long long)expert, part);
    if (!t.name)
        return qc_fail_nomem(err, v->base.path, strlen(info->name));
    t.info.name = t.name;
    t.info.n_dims = 2;
    t.info.shape[0] = n_rows;
    t.info.shape[1] = info->shape[2];
    t.info.shape[2] = 0;
    t.info.n_bytes = (uint64_t)(n_rows * info->shape[2]) * (uint64_t)qc_dtype_bits(info->dtype) / 8;
    return add_tensor(v, &t, err);
}

static int add_fused(hf_view *v, int64_t inner, qc_err *err)
{
    const qc_tensor_info *info = v->inner->info(v->inner, inner);
    bool pair = ends_with(info->name, ".experts.gate_up_proj");
    int64_t n = info->shape[0], rows = info->shape[1];
    if (info->n_dims != 3 || n < 1 || n > MAX_EXPERTS || (pair && rows % 2)) {
        char found[128];
        qc_shape_text(info->shape, info->n_dims, found, sizeof found);
        return qc_fail(err, QC_E_INPUT, "%s: tensor \"%.200s\" has shape %s, expected [experts, %s]",
                       v->base.path, info->name, found, pair ? "2 ffn, hidden" : "hidden, ffn");
    }
    if (qc_dtype_bits(info->dtype) < 16)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: tensor \"%.200s\" holds the experts of a layer as %s, expected "
                       "a type of 16 bits or more",
                       v->base.path, info->name, qc_dtype_name(info->dtype));
    for (int64_t e = 0; e < n; e++) {
        if (pair) {
            QC_TRY(add_part(v, inner, e, "gate_proj", e * rows, rows / 2, err));
            QC_TRY(add_part(v, inner, e, "up_proj", e * rows + rows / 2, rows / 2, err));
        } else {
            QC_TRY(add_part(v, inner, e, "down_proj", e * rows, rows, err));
        }
    }
    return QC_OK;
}

/* ---- FP8 with scales of blocks ---- */

static int check_scales(const hf_view *v, int64_t scale, float *values, qc_err *err)
{
    const qc_tensor_info *info = v->inner->info(v->inner, scale);
    int64_t n = qc_tensor_n_elems(info);
    QC_TRY(v->inner->read_rows(v->inner, scale, 0, qc_tensor_rows(info), values, err));
    v->inner->release(v->inner, scale, 0, qc_tensor_rows(info));
    for (int64_t i = 0; i < n; i++)
        if (!(values[i] > 0) || !isfinite(values[i]))
            return qc_fail(
                err, QC_E_INPUT,
                "%s: tensor \"%.200s\": the scale of block %lld, %lld is %g, expected a positive number",
                v->base.path, info->name, (long long)(i / info->shape[1]), (long long)(i % info->shape[1]),
                (double)values[i]);
    return QC_OK;
}

static int add_f8(hf_view *v, int64_t inner, qc_err *err)
{
    const qc_tensor_info *info = v->inner->info(v->inner, inner);
    view_tensor t = {.info = *info, .inner = inner};
    if (v->block[0] == 0)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: tensor \"%.200s\" holds F8_E4M3, but config.json does not say how it is scaled; "
                       "expected quantization_config with quant_method fp8 and weight_block_size",
                       v->base.path, info->name);
    char *name = qc_asprintf("%s" SCALE_END, info->name);
    if (!name)
        return qc_fail_nomem(err, v->base.path, strlen(info->name));
    int64_t scale = v->inner->find(v->inner, name);
    qc_free(name);
    if (scale < 0 || info->n_dims != 2)
        return qc_fail(err, QC_E_INPUT,
                       "%s: tensor \"%.200s\" holds F8_E4M3, expected a matrix with scales "
                       "called \"%.200s" SCALE_END "\"",
                       v->base.path, info->name, info->name);
    const qc_tensor_info *s = v->inner->info(v->inner, scale);
    int64_t want[2] = {qc_ceil_div(info->shape[0], v->block[0]), qc_ceil_div(info->shape[1], v->block[1])};
    bool number = s->dtype == QC_DT_F32 || s->dtype == QC_DT_BF16 || s->dtype == QC_DT_F16;
    if (!number || s->n_dims != 2 || s->shape[0] != want[0] || s->shape[1] != want[1]) {
        char found[128], expected[128];
        qc_shape_text(s->shape, s->n_dims, found, sizeof found);
        qc_shape_text(want, 2, expected, sizeof expected);
        return qc_fail(err, QC_E_INPUT,
                       "%s: tensor \"%.200s\" is %s %s, expected F32, F16 or BF16 %s: a scale "
                       "per block of %lld x %lld of its weights",
                       v->base.path, s->name, qc_dtype_name(s->dtype), found, expected,
                       (long long)v->block[0], (long long)v->block[1]);
    }
    if (!(t.scales = qc_alloc((size_t)(want[0] * want[1]), sizeof *t.scales)))
        return qc_fail_nomem(err, s->name, (unsigned long long)(want[0] * want[1]) * 4);
    int rc = check_scales(v, scale, t.scales, err);
    if (rc < 0) {
        qc_free(t.scales);
        return rc;
    }
    t.info.dtype = QC_DT_BF16;
    t.info.n_bytes += s->n_bytes;
    return add_tensor(v, &t, err);
}

/* Scales belong to their weights and are no tensors of their own. */
static int check_scale(const hf_view *v, const qc_tensor_info *info, qc_err *err)
{
    size_t n = strlen(info->name) - strlen(SCALE_END);
    char *weight = qc_strdup(info->name);
    if (!weight)
        return qc_fail_nomem(err, info->name, n);
    weight[n] = 0;
    int64_t tensor = v->inner->find(v->inner, weight);
    qc_free(weight);
    if (tensor >= 0 && v->inner->info(v->inner, tensor)->dtype == QC_DT_F8_E4M3)
        return QC_OK;
    return qc_fail(err, QC_E_INPUT, "%s: tensor \"%.200s\" is a scale, but there is no F8_E4M3 weight for it",
                   v->base.path, info->name);
}

/* quantization_config of config.json, if its method is fp8. */
static int read_config(hf_view *v, qc_err *err)
{
    char *text = NULL;
    size_t n_bytes = 0;
    cJSON *doc = NULL;
    QC_TRY(v->inner->side_file(v->inner, "config.json", &text, &n_bytes, err));
    int rc = text ? qc_json_parse(text, n_bytes, v->base.path, true, &doc, err) : QC_OK;
    qc_free(text);
    const cJSON *q = rc == QC_OK && doc ? qc_json_get(doc, "quantization_config") : NULL;
    const char *method = cJSON_GetStringValue(qc_json_get(q, "quant_method"));
    if (method && strcmp(method, "fp8") == 0) {
        const cJSON *size = qc_json_get(q, "weight_block_size"), *fmt = qc_json_get(q, "fmt");
        bool ok = cJSON_IsArray(size) && cJSON_GetArraySize(size) == 2 &&
                  (!fmt || (cJSON_IsString(fmt) && strcmp(fmt->valuestring, "e4m3") == 0));
        for (int i = 0; i < 2 && ok; i++)
            ok = qc_json_int(cJSON_GetArrayItem(size, i), &v->block[i]) && v->block[i] >= 1 &&
                 v->block[i] <= 1 << 20;
        if (!ok)
            rc = qc_fail(
                err, QC_E_UNSUPPORTED,
                "%s/config.json: quantization_config of method fp8: expected fmt e4m3 and weight_block_size "
                "[rows, columns], as [128, 128]",
                v->base.path);
        cJSON_DeleteItemFromObjectCaseSensitive(doc, "quantization_config");
        v->config = doc;
        doc = NULL;
    }
    cJSON_Delete(doc);
    return rc;
}

static int list_tensors(hf_view *v, qc_err *err)
{
    for (int64_t i = 0; i < v->inner->n_tensors; i++) {
        const qc_tensor_info *info = v->inner->info(v->inner, i);
        view_tensor plain = {.info = *info, .inner = i};
        if (ends_with(info->name, SCALE_END)) {
            QC_TRY(check_scale(v, info, err));
            continue;
        }
        QC_TRY(info->dtype == QC_DT_F8_E4M3 ? add_f8(v, i, err)
               : is_fused(info)             ? add_fused(v, i, err)
                                            : add_tensor(v, &plain, err));
    }
    return QC_OK;
}

static bool needs_view(const qc_source *src)
{
    for (int64_t i = 0; i < src->n_tensors; i++) {
        const qc_tensor_info *info = src->info(src, i);
        if (is_fused(info) || info->dtype == QC_DT_F8_E4M3 || ends_with(info->name, SCALE_END))
            return true;
    }
    return false;
}

int qc_hf_view_open(qc_source *inner, qc_source **ret, qc_err *err)
{
    if (!needs_view(inner)) {
        *ret = inner;
        return QC_OK;
    }
    hf_view *v = qc_calloc(1, sizeof *v);
    if (!v || !(v->by_name = qc_map_new((size_t)inner->n_tensors))) {
        qc_free(v);
        qc_source_close(inner);
        return qc_fail_nomem(err, "a view of a checkpoint", sizeof *v);
    }
    v->inner = inner;
    v->base = (qc_source){.format = inner->format,
                          .path = inner->path,
                          .files = inner->files,
                          .n_files = inner->n_files,
                          .info = view_info,
                          .find = view_find,
                          .read_rows = view_read_rows,
                          .raw = view_raw,
                          .release = view_release,
                          .side_file = view_side_file,
                          .close = view_close};
    int rc = read_config(v, err);
    if (rc == QC_OK)
        rc = list_tensors(v, err);
    if (rc < 0)
        view_close(&v->base);
    else
        *ret = &v->base;
    return rc;
}
