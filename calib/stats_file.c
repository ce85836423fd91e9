#include "stats_internal.h"

#include "family.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_json.h"
#include "qc_math.h"
#include "qc_sha256.h"
#include "qc_tensor.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <zlib.h>

int qc_stats_model_sha256_of(const char (*digests)[65], int64_t n, char ret_hex[65], qc_err *err)
{
    qc_sha256 *state = qc_sha256_new();
    if (!state)
        return qc_fail_nomem(err, "hash of the model", 256);
    for (int64_t i = 0; i < n; i++)
        qc_sha256_update(state, digests[i], 64);
    qc_sha256_final(state, ret_hex);
    return QC_OK;
}

int qc_stats_model_sha256(const qc_source *src, char ret_hex[65], qc_err *err)
{
    char(*digests)[65] = qc_calloc((size_t)src->n_files + 1, sizeof *digests);
    if (!digests)
        return qc_fail_nomem(err, "hash of the model", (unsigned long long)src->n_files * sizeof *digests);
    int rc = QC_OK;
    for (int64_t i = 0; i < src->n_files && rc == QC_OK; i++)
        rc = qc_sha256_file(src->files[i], digests[i], err);
    if (rc == QC_OK)
        rc = qc_stats_model_sha256_of((const char(*)[65])digests, src->n_files, ret_hex, err);
    qc_free(digests);
    return rc;
}

/* Layers, experts and widths. */
static void describe_shape(const qc_model_config *config, qc_stats_info *info)
{
    info->n_layers = config->n_layers;
    info->n_experts = config->n_experts;
    for (int layer = 0; layer < (int)config->n_layers; layer++)
        info->sparse[layer] = qc_stage_present(config, layer, QC_STAGE_EXPERT_DOWN);
    for (int s = 0; s < (config->n_experts ? QC_N_STAGES : QC_N_DENSE_STAGES); s++)
        info->widths[s] = qc_stage_width(config, (qc_stage)s);
}

int qc_stats_describe(const qc_model *model, const qc_corpus *corpus, const char *path, qc_compute compute,
                      qc_stats_info *ret, qc_err *err)
{
    qc_stats_info info = {.n_layers = model->config.n_layers,
                          .corpus_windows = corpus->n_windows,
                          .length = corpus->length,
                          .n_windows = corpus->n_windows};
    if (info.n_layers > QC_STATS_MAX_LAYERS || model->config.n_experts > QC_STATS_MAX_EXPERTS)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: statistics of %lld layers with %lld experts, at most %d and %d", model->src->path,
                       (long long)info.n_layers, (long long)model->config.n_experts, QC_STATS_MAX_LAYERS,
                       QC_STATS_MAX_EXPERTS);
    describe_shape(&model->config, &info);
    snprintf(info.family, sizeof info.family, "%s", model->config.family->model_type);
    qc_one_line(info.text, sizeof info.text, qc_path_base(path));
    memcpy(info.ids_sha256, corpus->ids_sha256, sizeof info.ids_sha256);
    snprintf(info.compute, sizeof info.compute, "%s", compute == QC_COMPUTE_BF16 ? "bf16" : "f32");
    QC_TRY(qc_stats_model_sha256(model->src, info.model_sha256, err));
    *ret = info;
    return QC_OK;
}

/* ---- order of the inputs ---- */

static int64_t places_of_layer(const qc_stats_info *info, int64_t layer)
{
    return qc_stats_n_shared(info, layer) + (info->sparse[layer] ? 2 * info->n_experts : 0);
}

int64_t qc_stats_n_places(const qc_stats_info *info)
{
    int64_t n = 0;
    for (int64_t layer = 0; layer < info->n_layers; layer++)
        n += places_of_layer(info, layer);
    return n;
}

qc_stats_place qc_stats_place_at(const qc_stats_info *info, int64_t k)
{
    qc_stats_place place = {0};
    for (; k >= places_of_layer(info, place.layer); place.layer++)
        k -= places_of_layer(info, place.layer);
    int64_t of_experts = k - qc_stats_n_shared(info, place.layer);
    if (of_experts < 0) {
        place.stage = (qc_stage)k;
        return place;
    }
    place.stage = of_experts % 2 ? QC_STAGE_EXPERT_DOWN : QC_STAGE_EXPERT_GATE_UP;
    place.expert = of_experts / 2;
    return place;
}

/* The place's number, -1 if the layer has no such stage. */
static int64_t number_of(const qc_stats_info *info, qc_stats_place place)
{
    int64_t before = 0;
    int n_shared = qc_stats_n_shared(info, place.layer);
    bool of_expert = place.stage >= QC_N_DENSE_STAGES;
    if (of_expert ? !info->sparse[place.layer] || place.expert >= info->n_experts
                  : (int)place.stage >= n_shared)
        return -1;
    for (int64_t layer = 0; layer < place.layer; layer++)
        before += places_of_layer(info, layer);
    return before + (of_expert ? n_shared + 2 * place.expert + (place.stage == QC_STAGE_EXPERT_DOWN)
                               : (int)place.stage);
}

int64_t qc_stats_part_bytes(int64_t n)
{
    return QC_STATS_PART_HEAD + 4 * n + 2 * n * (n + 1);
}

/* ---- description as json ---- */

static cJSON *info_json(const qc_stats_info *info)
{
    qc_json_watch();
    cJSON *doc = cJSON_CreateObject(), *model = cJSON_AddObjectToObject(doc, "model"),
          *corpus = cJSON_AddObjectToObject(doc, "corpus"), *shard = cJSON_AddObjectToObject(doc, "shard"),
          *widths;
    cJSON_AddStringToObject(model, "family", info->family);
    cJSON_AddStringToObject(model, "sha256", info->model_sha256);
    cJSON_AddNumberToObject(model, "layers", (double)info->n_layers);
    widths = cJSON_AddObjectToObject(model, "widths");
    for (int s = 0; s < QC_N_STAGES; s++)
        if (info->widths[s])
            cJSON_AddNumberToObject(widths, qc_stage_name((qc_stage)s), (double)info->widths[s]);
    if (info->n_experts) {
        cJSON_AddNumberToObject(model, "experts", (double)info->n_experts);
        cJSON *list = cJSON_AddArrayToObject(model, "expert_layers");
        for (int64_t layer = 0; layer < info->n_layers; layer++)
            if (info->sparse[layer])
                qc_json_add_item(list, cJSON_CreateNumber((double)layer));
    }
    cJSON_AddStringToObject(corpus, "text", info->text);
    cJSON_AddStringToObject(corpus, "ids_sha256", info->ids_sha256);
    cJSON_AddNumberToObject(corpus, "windows", (double)info->corpus_windows);
    cJSON_AddNumberToObject(corpus, "length", (double)info->length);
    cJSON_AddNumberToObject(shard, "first_window", (double)info->first_window);
    cJSON_AddNumberToObject(shard, "windows", (double)info->n_windows);
    cJSON_AddStringToObject(doc, "compute", info->compute);
    return qc_json_watched(doc);
}

static bool get_text(const cJSON *object, const char *key, char *ret, size_t cap_bytes)
{
    const cJSON *item = qc_json_get(object, key);
    if (!cJSON_IsString(item) || strlen(item->valuestring) >= cap_bytes)
        return false;
    qc_one_line(ret, cap_bytes, item->valuestring); /* these are printed */
    return true;
}

static bool get_word(const cJSON *object, const char *key, const char *word, char *ret, size_t cap_bytes)
{
    const cJSON *item = qc_json_get(object, key);
    if (!cJSON_IsString(item) || strcmp(item->valuestring, word) != 0)
        return false;
    snprintf(ret, cap_bytes, "%s", word);
    return true;
}

static bool get_int(const cJSON *object, const char *key, int64_t min, int64_t max, int64_t *ret)
{
    return qc_json_int(qc_json_get(object, key), ret) && *ret >= min && *ret <= max;
}

static bool read_experts(const cJSON *model, qc_stats_info *info)
{
    const cJSON *layers = qc_json_get(model, "expert_layers"), *item;
    if (!qc_json_get(model, "experts"))
        return !layers;
    if (!get_int(model, "experts", 1, QC_STATS_MAX_EXPERTS, &info->n_experts) || !cJSON_IsArray(layers))
        return false;
    cJSON_ArrayForEach(item, layers)
    {
        int64_t layer;
        if (!qc_json_int(item, &layer) || layer < 0 || layer >= info->n_layers)
            return false;
        info->sparse[layer] = true;
    }
    return true;
}

static bool read_shape(const cJSON *model, qc_stats_info *info)
{
    const cJSON *widths = qc_json_get(model, "widths");
    if (!get_int(model, "layers", 1, QC_STATS_MAX_LAYERS, &info->n_layers) || !read_experts(model, info))
        return false;
    for (int s = 0; s < (info->n_experts ? QC_N_STAGES : QC_N_DENSE_STAGES); s++)
        if (!get_int(widths, qc_stage_name((qc_stage)s), 1, 1 << 20, &info->widths[s]))
            return false;
    return true;
}

/* The limits keep all sizes that are computed from them far from overflow. */
static bool read_info(const cJSON *doc, qc_stats_info *info)
{
    const cJSON *model = qc_json_get(doc, "model"), *corpus = qc_json_get(doc, "corpus"),
                *shard = qc_json_get(doc, "shard");
    return read_shape(model, info) && get_text(model, "family", info->family, sizeof info->family) &&
           get_text(model, "sha256", info->model_sha256, sizeof info->model_sha256) &&
           get_text(corpus, "text", info->text, sizeof info->text) &&
           get_text(corpus, "ids_sha256", info->ids_sha256, sizeof info->ids_sha256) &&
           get_int(corpus, "windows", 1, 1 << 30, &info->corpus_windows) &&
           get_int(corpus, "length", 1, 1 << 24, &info->length) &&
           get_int(shard, "first_window", 0, info->corpus_windows - 1, &info->first_window) &&
           get_int(shard, "windows", 1, info->corpus_windows - info->first_window, &info->n_windows) &&
           (get_word(doc, "compute", "f32", info->compute, sizeof info->compute) ||
            get_word(doc, "compute", "bf16", info->compute, sizeof info->compute));
}

/* ---- opening ---- */

static int damaged(const char *path, const char *what, qc_err *err)
{
    return qc_fail(err, QC_E_INPUT, "%s: damaged statistics file: %s", path, what);
}

static uint32_t crc(const void *data, size_t n_bytes)
{
    return (uint32_t)crc32_z(0, data, n_bytes);
}

static int read_head(qc_stats_file *f, uint64_t *ret_records, qc_err *err)
{
    const uint8_t *d = f->map.data;
    if (f->map.n_bytes < QC_STATS_HEAD || memcmp(d, QC_STATS_MAGIC, 8) != 0)
        return qc_fail(err, QC_E_INPUT, "%s: no statistics file (%zu bytes; made by qcalib make)", f->path,
                       f->map.n_bytes);
    if (qc_get_le(d + 28, 4) != crc(d, 28))
        return damaged(f->path, "checksum of the header", err);
    if (qc_get_le(d + 8, 4) != QC_STATS_VERSION)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: statistics of version %llu, this program reads version %d",
                       f->path, (unsigned long long)qc_get_le(d + 8, 4), QC_STATS_VERSION);
    uint64_t n_json = qc_get_le(d + 16, 8);
    if (n_json > 65536 || n_json > f->map.n_bytes - QC_STATS_HEAD)
        return damaged(f->path, "cut in its description", err);
    if (qc_get_le(d + 24, 4) != crc(d + QC_STATS_HEAD, n_json))
        return damaged(f->path, "checksum of its description", err);
    cJSON *doc;
    QC_TRY(qc_json_parse((const char *)d + QC_STATS_HEAD, n_json, f->path, true, &doc, err));
    bool ok = read_info(doc, &f->info);
    cJSON_Delete(doc);
    if (!ok)
        return damaged(f->path, "its description is not complete", err);
    *ret_records = QC_STATS_HEAD + n_json;
    return QC_OK;
}

static int read_records(qc_stats_file *f, uint64_t at, qc_err *err)
{
    int64_t n = qc_stats_n_places(&f->info);
    if ((uint64_t)n > f->map.n_bytes / QC_STATS_RECORD_HEAD)
        return damaged(f->path, "it is cut", err);
    f->records = qc_calloc((size_t)n, sizeof *f->records);
    if (!f->records)
        return qc_fail_nomem(err, f->path, (unsigned long long)n * sizeof *f->records);
    for (int64_t k = 0; k < n; k++) {
        qc_stats_record *r = &f->records[k];
        if (f->map.n_bytes - at < QC_STATS_RECORD_HEAD)
            return damaged(f->path, "it is cut", err);
        const uint8_t *d = f->map.data + at;
        qc_stats_place place = qc_stats_place_at(&f->info, k);
        int64_t width = f->info.widths[place.stage], fixed = QC_STATS_FIXED + 4 * width;
        *r = (qc_stats_record){.offset = at + QC_STATS_RECORD_HEAD,
                               .raw_bytes = qc_get_le(d + 8, 8),
                               .zip_bytes = qc_get_le(d + 16, 8),
                               .crc = (uint32_t)qc_get_le(d + 24, 4)};
        if (qc_get_le(d + 28, 4) != crc(d, 28))
            return damaged(f->path, "checksum of a record's head", err);
        if (qc_get_le(d, 4) != (uint64_t)place.layer || qc_get_le(d + 4, 2) != (uint64_t)place.stage ||
            qc_get_le(d + 6, 2) != (uint64_t)place.expert)
            return damaged(f->path, "records are not in order", err);
        uint64_t part = (uint64_t)qc_stats_part_bytes(width), parts = (r->raw_bytes - (uint64_t)fixed) / part;
        if (r->raw_bytes < (uint64_t)fixed || parts < 1 || parts > QC_STATS_MAX_PARTS ||
            r->raw_bytes != (uint64_t)fixed + parts * part)
            return damaged(f->path, "the size of a record does not fit the width", err);
        if (r->zip_bytes > f->map.n_bytes - r->offset)
            return damaged(f->path, "it is cut", err);
        r->n_parts = (int)parts;
        at = r->offset + r->zip_bytes;
    }
    return at == f->map.n_bytes ? QC_OK : damaged(f->path, "something stands behind its end", err);
}

int qc_stats_open(const char *path, qc_stats_file **ret, qc_err *err)
{
    qc_stats_file *f = qc_calloc(1, sizeof *f);
    if (!f)
        return qc_fail_nomem(err, path, sizeof *f);
    uint64_t records = 0;
    f->path = qc_strdup(path);
    int rc = f->path ? qc_file_map(path, &f->map, err) : qc_fail_nomem(err, path, strlen(path));
    if (rc == QC_OK)
        rc = read_head(f, &records, err);
    if (rc == QC_OK)
        rc = read_records(f, records, err);
    if (rc < 0)
        qc_stats_close(f);
    else
        *ret = f;
    return rc;
}

void qc_stats_close(qc_stats_file *file)
{
    if (!file)
        return;
    qc_file_unmap(&file->map);
    qc_free(file->records);
    qc_free(file->path);
    qc_free(file);
}

const qc_stats_info *qc_stats_of(const qc_stats_file *file)
{
    return &file->info;
}

int qc_stats_check_model(const qc_stats_file *file, const qc_model *model, const char *model_sha256,
                         qc_err *err)
{
    const qc_stats_info *i = &file->info;
    qc_stats_info own = {0};
    if (i->n_layers != model->config.n_layers)
        return qc_fail(err, QC_E_INPUT, "%s: statistics of %lld layers, the model %s has %lld", file->path,
                       (long long)i->n_layers, model->src->path, (long long)model->config.n_layers);
    describe_shape(&model->config, &own);
    if (i->n_experts != own.n_experts || memcmp(i->sparse, own.sparse, sizeof own.sparse) != 0)
        return qc_fail(err, QC_E_INPUT,
                       "%s: statistics of %lld experts, the model %s has %lld, or in other layers",
                       file->path, (long long)i->n_experts, model->src->path, (long long)own.n_experts);
    for (int s = 0; s < QC_N_STAGES; s++) {
        int64_t width = own.widths[s];
        if (i->widths[s] != width)
            return qc_fail(err, QC_E_INPUT, "%s: inputs of %s are %lld wide, in the model %s %lld",
                           file->path, qc_stage_name((qc_stage)s), (long long)i->widths[s], model->src->path,
                           (long long)width);
    }
    if (model_sha256 && strcmp(model_sha256, i->model_sha256) != 0)
        return qc_fail(err, QC_E_INPUT, "%s: statistics of another model of the same shape than %s (SHA-256)",
                       file->path, model->src->path);
    if (i->n_windows != i->corpus_windows)
        return qc_fail(err, QC_E_INPUT,
                       "%s holds %lld of %lld windows: merge all shards first (qcalib merge)", file->path,
                       (long long)i->n_windows, (long long)i->corpus_windows);
    return QC_OK;
}

/* ---- a stage's sums ---- */

/* Bytes of float32 are stored by significance (all lowest bytes, ..., all highest): exponents are alike and
 * deflate well. */
static void unshuffle(const uint8_t *planes, size_t n_words, uint8_t *words)
{
    for (size_t b = 0; b < 4; b++)
        for (size_t i = 0; i < n_words; i++)
            words[4 * i + b] = planes[b * n_words + i];
}

static void shuffle(const uint8_t *words, size_t n_words, uint8_t *planes)
{
    for (size_t b = 0; b < 4; b++)
        for (size_t i = 0; i < n_words; i++)
            planes[b * n_words + i] = words[4 * i + b];
}

static int inflate_record(const qc_stats_file *f, const qc_stats_record *r, uint8_t **ret, qc_err *err)
{
    const uint8_t *zip = f->map.data + r->offset;
    uint8_t *raw = qc_alloc(r->raw_bytes, 1), *planes = qc_alloc(r->raw_bytes, 1);
    uLongf n = r->raw_bytes;
    int rc = QC_OK;
    if (!raw || !planes)
        rc = qc_fail_nomem(err, f->path, 2 * r->raw_bytes);
    else if (crc(zip, r->zip_bytes) != r->crc || uncompress(planes, &n, zip, r->zip_bytes) != Z_OK ||
             n != r->raw_bytes)
        rc = damaged(f->path, "checksum of a record", err);
    else
        unshuffle(planes, r->raw_bytes / 4, raw);
    qc_free(planes);
    if (rc < 0)
        qc_free(raw);
    else
        *ret = raw;
    qc_mapped_release(&f->map, r->offset, r->zip_bytes);
    return rc;
}

/* A backend copy of n floats that must be finite. */
static float *floats(const qc_stats_file *f, qc_backend *be, const uint8_t *p, int64_t n, qc_err *err)
{
    const float *values = (const float *)(const void *)p;
    if (qc_first_nonfinite(values, n) >= 0) {
        damaged(f->path, "a value that is not finite", err);
        return NULL;
    }
    float *copy = be->alloc(be, n, err);
    if (copy && be->upload(be, copy, values, n, err) < 0) {
        be->free(be, copy);
        return NULL;
    }
    return copy;
}

static int append_part(const qc_stats_file *f, const uint8_t *p, qc_hessian *hs, qc_err *err)
{
    qc_hessian_part part = {.level = (int)qc_get_le(p, 4),
                            .index = (int64_t)qc_get_le(p + 4, 4),
                            .n_tokens = (int64_t)qc_get_le(p + 8, 8)};
    part.sum_abs = floats(f, hs->be, p + QC_STATS_PART_HEAD, hs->n, err);
    if (!part.sum_abs)
        return err->code;
    part.h = floats(f, hs->be, p + QC_STATS_PART_HEAD + 4 * hs->n, hs->n * (hs->n + 1) / 2, err);
    if (!part.h) {
        hs->be->free(hs->be, part.sum_abs);
        return err->code;
    }
    if (qc_hessian_append(hs, &part, err) < 0)
        return qc_err_prefix(err, "%s", f->path);
    return QC_OK;
}

static int append_maxima(const qc_stats_file *f, const uint8_t *p, qc_hessian *hs, qc_err *err)
{
    qc_backend *be = hs->be;
    float *max_abs = floats(f, be, p, hs->n, err), *unused = max_abs ? be->alloc(be, hs->n, err) : NULL;
    int rc = unused ? be->upload(be, unused, (const float *)(const void *)p, hs->n, err) : err->code;
    if (rc == QC_OK)
        rc = be->column_stats(be, unused, hs->max_abs, max_abs, hs->n, 1, hs->n, err);
    be->free(be, max_abs);
    be->free(be, unused);
    return rc;
}

int qc_stats_init(const qc_stats_info *info, qc_stats_place place, qc_backend *be, qc_hessian *hs,
                  qc_err *err)
{
    int64_t n = info->widths[place.stage], block = qc_stats_first_block(info);
    return place.stage < QC_N_DENSE_STAGES ? qc_hessian_init(hs, be, n, block, err)
                                           : qc_hessian_init_routed(hs, be, n, block, err);
}

int qc_stats_append(const qc_stats_file *file, qc_stats_place place, qc_hessian *hs, qc_err *err)
{
    qc_err local;
    err = err ? err : &local;
    int64_t number = number_of(&file->info, place);
    if (number < 0 || hs->n != file->info.widths[place.stage])
        return qc_fail(err, QC_E_INPUT, "%s: no inputs of layer %d, %s with a width of %lld", file->path,
                       place.layer, qc_stage_name(place.stage), (long long)hs->n);
    const qc_stats_record *r = &file->records[number];
    uint8_t *raw;
    QC_TRY(inflate_record(file, r, &raw, err));
    int rc = QC_OK;
    int64_t n_before = hs->n_tokens, n_tokens = (int64_t)qc_get_le(raw + 8, 8);
    if (qc_get_le(raw, 4) != (uint64_t)hs->n || qc_get_le(raw + 4, 4) != (uint64_t)r->n_parts)
        rc = damaged(file->path, "a record's width or number of parts", err);
    if (rc == QC_OK)
        rc = append_maxima(file, raw + QC_STATS_FIXED, hs, err);
    for (int i = 0; i < r->n_parts && rc == QC_OK; i++)
        rc = append_part(file, raw + QC_STATS_FIXED + 4 * hs->n + i * qc_stats_part_bytes(hs->n), hs, err);
    if (rc == QC_OK && hs->n_tokens - n_before != n_tokens)
        rc = damaged(file->path, "a record's number of tokens", err);
    qc_free(raw);
    return rc;
}

void qc_stats_weights_of_sums(const float *sum_sq, int64_t n, double n_tokens, float *weights)
{
    double total = 0;
    for (int64_t i = 0; i < n && n_tokens > 0; i++)
        total += (double)sum_sq[i] / n_tokens;
    double least = 1e-6 * total / (double)n;
    for (int64_t i = 0; i < n; i++)
        weights[i] = total > 0 ? (float)fmax((double)sum_sq[i] / n_tokens, least) : 1;
}

static int summarise(qc_hessian *hs, float *sum_sq, float *sum_abs, float *max_abs, int64_t *ret_tokens,
                     qc_err *err)
{
    qc_backend *be = hs->be;
    int64_t n = hs->n;
    const float *h, *abs_sums;
    QC_TRY(qc_hessian_finish(hs, &h, &abs_sums, err));
    for (int64_t i = 0; i < n && sum_sq; i++)
        QC_TRY(be->download(be, sum_sq + i, h + i * n + i, 1, err));
    if (sum_abs)
        QC_TRY(be->download(be, sum_abs, abs_sums, n, err));
    if (max_abs)
        QC_TRY(be->download(be, max_abs, hs->max_abs, n, err));
    *ret_tokens = hs->n_tokens;
    return QC_OK;
}

int qc_stats_summary(const qc_stats_file *file, qc_backend *be, qc_stats_place place, float *sum_sq,
                     float *sum_abs, float *max_abs, int64_t *ret_tokens, qc_err *err)
{
    qc_hessian hs;
    QC_TRY(qc_stats_init(&file->info, place, be, &hs, err));
    int rc = qc_stats_append(file, place, &hs, err);
    if (rc == QC_OK)
        rc = summarise(&hs, sum_sq, sum_abs, max_abs, ret_tokens, err);
    qc_hessian_clear(&hs);
    return rc;
}

int qc_stats_column_weights(const qc_stats_file *file, qc_backend *be, qc_stats_place place, float *weights,
                            qc_err *err)
{
    int64_t n_tokens = 0;
    QC_TRY(qc_stats_summary(file, be, place, weights, NULL, NULL, &n_tokens, err));
    qc_stats_weights_of_sums(weights, file->info.widths[place.stage], (double)n_tokens, weights);
    return QC_OK;
}

/* ---- writing ---- */

int qc_stats_create(const char *path, bool force, const qc_stats_info *info, qc_stats_writer **ret,
                    qc_err *err)
{
    cJSON *doc = info_json(info);
    char *text = doc ? qc_json_print(doc) : NULL;
    cJSON_Delete(doc);
    qc_stats_writer *w = qc_calloc(1, sizeof *w);
    int rc = text && w ? qc_outfile_open(path, force, &w->out, err) : qc_fail_nomem(err, path, 1024);
    if (rc == QC_OK) {
        uint8_t head[QC_STATS_HEAD] = {0};
        memcpy(head, QC_STATS_MAGIC, 8);
        qc_put_le(head + 8, QC_STATS_VERSION, 4);
        qc_put_le(head + 16, strlen(text), 8);
        qc_put_le(head + 24, crc(text, strlen(text)), 4);
        qc_put_le(head + 28, crc(head, 28), 4);
        w->info = *info;
        if ((rc = qc_outfile_write(w->out, head, sizeof head, err)) == QC_OK)
            rc = qc_outfile_write(w->out, text, strlen(text), err);
    }
    qc_free(text);
    if (rc < 0)
        qc_stats_discard(w);
    else
        *ret = w;
    return rc;
}

/* Payload of a record in host memory, words in order. */
static int gather(const qc_hessian *hs, uint8_t *raw, qc_err *err)
{
    qc_backend *be = hs->be;
    qc_put_le(raw, (uint64_t)hs->n, 4);
    qc_put_le(raw + 4, (uint64_t)hs->n_parts, 4);
    qc_put_le(raw + 8, (uint64_t)hs->n_tokens, 8);
    uint8_t *p = raw + QC_STATS_FIXED;
    QC_TRY(be->download(be, (float *)(void *)p, hs->max_abs, hs->n, err));
    p += 4 * hs->n;
    for (int i = 0; i < hs->n_parts; i++) {
        const qc_hessian_part *part = &hs->parts[i];
        qc_put_le(p, (uint64_t)part->level, 4);
        qc_put_le(p + 4, (uint64_t)part->index, 4);
        qc_put_le(p + 8, (uint64_t)part->n_tokens, 8);
        QC_TRY(be->download(be, (float *)(void *)(p + QC_STATS_PART_HEAD), part->sum_abs, hs->n, err));
        QC_TRY(be->download(be, (float *)(void *)(p + QC_STATS_PART_HEAD + 4 * hs->n), part->h,
                            hs->n * (hs->n + 1) / 2, err));
        p += qc_stats_part_bytes(hs->n);
    }
    return QC_OK;
}

static int write_record(qc_stats_writer *w, const uint8_t *zip, size_t zip_bytes, uint64_t raw_bytes,
                        qc_err *err)
{
    uint8_t head[QC_STATS_RECORD_HEAD];
    qc_stats_place place = qc_stats_place_at(&w->info, w->next);
    qc_put_le(head, (uint64_t)place.layer, 4);
    qc_put_le(head + 4, (uint64_t)place.stage, 2);
    qc_put_le(head + 6, (uint64_t)place.expert, 2);
    qc_put_le(head + 8, raw_bytes, 8);
    qc_put_le(head + 16, zip_bytes, 8);
    qc_put_le(head + 24, crc(zip, zip_bytes), 4);
    qc_put_le(head + 28, crc(head, 28), 4);
    QC_TRY(qc_outfile_write(w->out, head, sizeof head, err));
    QC_TRY(qc_outfile_write(w->out, zip, zip_bytes, err));
    w->next++;
    return QC_OK;
}

int qc_stats_put(qc_stats_writer *writer, qc_hessian *hs, qc_err *err)
{
    assert(hs->n == writer->info.widths[qc_stats_place_at(&writer->info, writer->next).stage]);
    QC_TRY(qc_hessian_close(hs, err));
    size_t n = QC_STATS_FIXED + 4 * (size_t)hs->n + (size_t)hs->n_parts * (size_t)qc_stats_part_bytes(hs->n);
    uLongf n_zip = compressBound(n);
    uint8_t *raw = qc_alloc(n, 1), *planes = qc_alloc(n, 1), *zip = NULL;
    int rc = raw && planes ? gather(hs, raw, err) : qc_fail_nomem(err, "statistics", 2ull * n);
    if (rc == QC_OK)
        shuffle(raw, n / 4, planes);
    qc_free(raw);
    if (rc == QC_OK && (!(zip = qc_alloc(n_zip, 1)) || compress2(zip, &n_zip, planes, n, 1) != Z_OK))
        rc = qc_fail_nomem(err, "statistics", n_zip);
    qc_free(planes);
    if (rc == QC_OK)
        rc = write_record(writer, zip, n_zip, n, err);
    qc_free(zip);
    return rc;
}

int qc_stats_commit(qc_stats_writer *writer, qc_err *err)
{
    int rc = qc_outfile_commit(writer->out, NULL, err);
    qc_free(writer);
    return rc;
}

void qc_stats_discard(qc_stats_writer *writer)
{
    if (!writer)
        return;
    qc_outfile_discard(writer->out);
    qc_free(writer);
}
