#include "hfdir.h"

#include "hf_layout.h"
#include "hf_prequant.h"
#include "hf_quant.h"
#include "hf_view.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_json.h"
#include "qc_log.h"
#include "qc_map.h"
#include "safetensors.h"

#include <assert.h>
#include <string.h>

typedef struct entry {
    const qc_st_tensor *tensor; /* inside its shard */
    size_t shard;
} entry;

typedef struct hf_source {
    qc_source base; /* first: a qc_source pointer is one to this struct */
    char *path;
    qc_hf_names files; /* paths: side files, index, shards */
    size_t n_shards;
    qc_st_file *shards;
    entry *entries; /* [base.n_tensors], shard by shard in the order of the data */
    qc_map *by_name;
    cJSON *quantization; /* how its matrices are packed; NULL: they are not */
} hf_source;

static const hf_source *self(const qc_source *src)
{
    return (const hf_source *)src;
}

static const qc_tensor_info *hf_info(const qc_source *src, int64_t tensor)
{
    return &self(src)->entries[tensor].tensor->info;
}

static int64_t hf_find(const qc_source *src, const char *name)
{
    return qc_map_get(self(src)->by_name, name, strlen(name), -1);
}

static const void *hf_raw(const qc_source *src, int64_t tensor)
{
    const entry *e = &self(src)->entries[tensor];
    return self(src)->shards[e->shard].map.data + e->tensor->offset;
}

static uint64_t row_bytes(const qc_tensor_info *info)
{
    return (uint64_t)qc_tensor_cols(info) * (uint64_t)qc_dtype_bits(info->dtype) / 8;
}

static int hf_read_rows(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows, float *dst,
                        qc_err *err)
{
    const qc_tensor_info *info = hf_info(src, tensor);
    assert(row0 >= 0 && n_rows >= 0 && row0 + n_rows <= qc_tensor_rows(info));
    const char *data = hf_raw(src, tensor);
    int rc = qc_dense_to_f32(info->dtype, data + (uint64_t)row0 * row_bytes(info),
                             n_rows * qc_tensor_cols(info), dst, err);
    return rc < 0 ? qc_err_prefix(err, "%s: tensor \"%.200s\"", src->path, info->name) : QC_OK;
}

static void hf_release(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows)
{
    const entry *e = &self(src)->entries[tensor];
    uint64_t bytes = row_bytes(&e->tensor->info);
    qc_mapped_release_around(&self(src)->shards[e->shard].map, e->tensor->offset + (uint64_t)row0 * bytes,
                             (uint64_t)n_rows * bytes);
}

static int hf_side_file(const qc_source *src, const char *name, char **ret, size_t *ret_bytes, qc_err *err)
{
    return qc_hf_side_file(self(src)->path, name, ret, ret_bytes, err);
}

static void hf_close(qc_source *src)
{
    hf_source *hf = (hf_source *)src;
    for (size_t i = 0; i < hf->n_shards; i++)
        qc_st_close(&hf->shards[i]);
    qc_map_free(hf->by_name);
    qc_hf_names_clear(&hf->files);
    cJSON_Delete(hf->quantization);
    qc_free(hf->shards);
    qc_free(hf->entries);
    qc_free(hf->path);
    qc_free(hf);
}

/* ---- opening ---- */

static int add_file(hf_source *hf, const char *name, bool optional, qc_err *err)
{
    char *path = qc_path_join(hf->path, name);
    if (!path)
        return qc_fail_nomem(err, hf->path, strlen(name));
    int rc = optional && !qc_path_exists(path) ? QC_OK : qc_hf_names_add(&hf->files, path, err);
    qc_free(path);
    return rc;
}

/* What a manifest hashes: the side files that may change a result, the index, the shards. */
static int list_files(hf_source *hf, const qc_hf_names *shards, qc_err *err)
{
    static const char *const side[] = {"config.json", "generation_config.json", "tokenizer.json",
                                       "tokenizer_config.json", QC_HF_INDEX};
    for (size_t i = 0; i < sizeof side / sizeof side[0]; i++)
        QC_TRY(add_file(hf, side[i], true, err));
    for (size_t i = 0; i < shards->n; i++)
        QC_TRY(add_file(hf, shards->v[i], false, err));
    hf->base.files = hf->files.v;
    hf->base.n_files = (int64_t)hf->files.n;
    return QC_OK;
}

static int open_shards(hf_source *hf, const qc_hf_names *names, qc_err *err)
{
    hf->shards = qc_calloc(names->n, sizeof *hf->shards);
    if (!hf->shards)
        return qc_fail_nomem(err, hf->path, names->n * sizeof *hf->shards);
    const char *const *paths = (const char *const *)hf->files.v + (hf->files.n - names->n);
    for (; hf->n_shards < names->n; hf->n_shards++)
        QC_TRY(qc_st_open(paths[hf->n_shards], &hf->shards[hf->n_shards], err));
    return QC_OK;
}

static int list_tensors(hf_source *hf, const qc_hf_names *names, qc_err *err)
{
    int64_t n = 0;
    for (size_t i = 0; i < hf->n_shards; i++)
        n += hf->shards[i].n_tensors;
    hf->entries = qc_alloc((size_t)n, sizeof *hf->entries);
    hf->by_name = qc_map_new((size_t)n);
    if (!hf->entries || !hf->by_name)
        return qc_fail_nomem(err, hf->path, (uint64_t)n * sizeof *hf->entries);
    for (size_t i = 0; i < hf->n_shards; i++)
        for (int64_t k = 0; k < hf->shards[i].n_tensors; k++) {
            const qc_st_tensor *t = &hf->shards[i].tensors[k];
            if (!hf->quantization)
                QC_TRY(qc_hf_prequant_tensor(hf->path, &t->info, err));
            int added = qc_map_add(hf->by_name, t->info.name, strlen(t->info.name), hf->base.n_tensors);
            if (added < 0)
                return qc_fail_nomem(err, hf->path, strlen(t->info.name));
            if (added == 0)
                return qc_fail(err, QC_E_INPUT, "%s: tensor \"%.200s\" is in %s and in %s", hf->path,
                               t->info.name, names->v[hf->entries[hf_find(&hf->base, t->info.name)].shard],
                               names->v[i]);
            hf->entries[hf->base.n_tensors++] = (entry){.tensor = t, .shard = i};
        }
    return QC_OK;
}

/* Old indexes hold total_size as a float. */
static void compare_total_size(const hf_source *hf, const cJSON *index)
{
    const cJSON *total = qc_json_get(qc_json_get(index, "metadata"), "total_size");
    uint64_t n_bytes = 0;
    for (int64_t i = 0; i < hf->base.n_tensors; i++)
        n_bytes += hf->entries[i].tensor->info.n_bytes;
    if (total && !cJSON_IsNumber(total))
        qc_log(QC_LOG_WARN, "%s: " QC_HF_INDEX ": total_size is no number", hf->path);
    else if (total && total->valuedouble != (double)n_bytes)
        qc_log(QC_LOG_WARN, "%s: " QC_HF_INDEX ": total_size is %.0f, the tensors have %llu bytes", hf->path,
               total->valuedouble, (unsigned long long)n_bytes);
}

typedef struct index_diff {
    qc_hf_names absent; /* in the index, in no shard */
    qc_hf_names moved;  /* in another shard than the index says */
    qc_hf_names extra;  /* in a shard, not in the index */
} index_diff;

static int find_differences(const hf_source *hf, const qc_hf_names *names, const cJSON *weight_map,
                            index_diff *diff, qc_err *err)
{
    qc_map *indexed = qc_map_new((size_t)hf->base.n_tensors);
    int rc = indexed ? QC_OK : qc_fail_nomem(err, hf->path, sizeof indexed);
    for (const cJSON *c = weight_map->child; c && rc == QC_OK; c = c->next) {
        int64_t i = hf_find(&hf->base, c->string);
        if (i < 0)
            rc = qc_hf_names_add(&diff->absent, c->string, err);
        else if (strcmp(names->v[hf->entries[i].shard], c->valuestring) != 0)
            rc = qc_hf_names_add(&diff->moved, c->string, err);
        if (rc == QC_OK && qc_map_add(indexed, c->string, strlen(c->string), 0) < 0)
            rc = qc_fail_nomem(err, hf->path, strlen(c->string));
    }
    for (int64_t i = 0; i < hf->base.n_tensors && rc == QC_OK; i++) {
        const char *name = hf_info(&hf->base, i)->name;
        if (qc_map_get(indexed, name, strlen(name), -1) < 0)
            rc = qc_hf_names_add(&diff->extra, name, err);
    }
    qc_map_free(indexed);
    return rc;
}

static void warn_difference(const hf_source *hf, const qc_hf_names *tensors, const char *what)
{
    char text[500];
    if (tensors->n == 0)
        return;
    qc_hf_names_text(tensors, text, sizeof text);
    qc_log(QC_LOG_WARN, "%s: " QC_HF_INDEX " and headers disagree: %zu tensors %s: %s", hf->path, tensors->n,
           what, text);
}

/* Tensors that the index promises must exist. All that exist are read, whatever the index says of them. */
static int compare_index(const hf_source *hf, const qc_hf_layout *layout, qc_err *err)
{
    index_diff diff = {0};
    int rc = find_differences(hf, &layout->shards, qc_json_get(layout->index, "weight_map"), &diff, err);
    if (rc == QC_OK && diff.absent.n > 0) {
        char text[500];
        qc_hf_names_text(&diff.absent, text, sizeof text);
        rc = qc_fail(err, QC_E_INPUT,
                     "%s: " QC_HF_INDEX " and headers disagree: %zu tensors of the index are in no shard: %s",
                     hf->path, diff.absent.n, text);
    }
    if (rc == QC_OK) {
        warn_difference(hf, &diff.moved, "are in another shard");
        warn_difference(hf, &diff.extra, "are not in the index");
        compare_total_size(hf, layout->index);
    }
    qc_hf_names_clear(&diff.absent);
    qc_hf_names_clear(&diff.moved);
    qc_hf_names_clear(&diff.extra);
    return rc;
}

static int open_into(hf_source *hf, qc_err *err)
{
    qc_hf_layout layout = {0};
    QC_TRY(qc_hf_layout_find(hf->path, &layout, err));
    int rc = qc_hf_prequant_config(hf->path, &hf->quantization, err);
    if (rc == QC_OK)
        rc = list_files(hf, &layout.shards, err);
    if (rc == QC_OK)
        rc = open_shards(hf, &layout.shards, err);
    if (rc == QC_OK)
        rc = list_tensors(hf, &layout.shards, err);
    if (rc == QC_OK && layout.index)
        rc = compare_index(hf, &layout, err);
    qc_hf_layout_clear(&layout);
    return rc;
}

int qc_hfdir_open(const char *path, qc_source **ret, qc_err *err)
{
    hf_source *hf = qc_calloc(1, sizeof *hf);
    if (!hf || !(hf->path = qc_strdup(path))) {
        qc_free(hf);
        return qc_fail_nomem(err, path, sizeof *hf);
    }
    hf->base = (qc_source){.format = "hf",
                           .path = hf->path,
                           .info = hf_info,
                           .find = hf_find,
                           .read_rows = hf_read_rows,
                           .raw = hf_raw,
                           .release = hf_release,
                           .side_file = hf_side_file,
                           .close = hf_close};
    int rc = open_into(hf, err);
    if (rc == QC_OK && hf->quantization)
        return qc_hf_quant_open(&hf->base, hf->quantization, ret, err);
    if (rc == QC_OK)
        return qc_hf_view_open(&hf->base, ret, err);
    hf_close(&hf->base);
    return rc;
}
