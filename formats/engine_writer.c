/* The writer of folders that engines load: safetensors with packed matrices, config.json that describes them,
 * the side files of the source, a model card. Packed matrices are put together one at a time in memory (an
 * engine's layout runs along the other axis than our rows), all else goes straight to its place. */
#include "engine_format.h"
#include "model_card.h"

#include "qc_alloc.h"
#include "qc_json.h"

#include <string.h>

/* A side file, or a text made here. */
typedef struct side_file {
    char *name, *data; /* owned */
    size_t n_bytes;
} side_file;

enum { MAX_FILES = 32 };

/* A declared tensor: how it is stored. */
typedef struct stored {
    char *name;
    const qc_packing *packing; /* NULL: values */
    qc_dtype value_dtype;      /* of values */
    int64_t first;             /* number of its first part, or of itself, in the set */
} stored;

typedef struct engine_writer {
    qc_writer base; /* first: a qc_writer pointer is one to this struct */
    const qc_engine_format *engine;
    char *path, *type; /* owned; type may be NULL */
    char *tool;        /* "qconvert:1.0"; NULL without a manifest */
    bool count, force, tied;
    cJSON *config, *manifest;
    qc_metas metas;
    side_file files[MAX_FILES];
    int n_files;
    qc_schemes schemes;
    qc_tensor_info *declared; /* names owned by `stored` */
    qc_tensor_use *uses;
    stored *stored;
    int64_t n_tensors, cap_tensors, at; /* `at`: tensor being written */
    qc_part_set *set;
    int64_t n_parts_announced;
    uint64_t shard_bytes;
    qc_outfolder *folder;
    bool in_tensor, finished;
    int64_t rows_done;
    qc_part parts[QC_MAX_PARTS];
    void *data[QC_MAX_PARTS]; /* of the packed matrix being written */
    int n_parts;
    float *values; /* a block of decoded rows */
    void *halves;
    size_t values_elems;
} engine_writer;

static engine_writer *self_of(qc_writer *w)
{
    return (engine_writer *)w;
}

/* ---- life ---- */

static void free_parts(engine_writer *self)
{
    for (int i = 0; i < QC_MAX_PARTS; i++) {
        qc_free(self->data[i]);
        self->data[i] = NULL;
    }
}

static void self_free(engine_writer *self)
{
    for (int i = 0; i < self->n_files; i++) {
        qc_free(self->files[i].name);
        qc_free(self->files[i].data);
    }
    for (int64_t i = 0; i < self->n_tensors; i++)
        qc_free(self->stored[i].name);
    free_parts(self);
    qc_schemes_clear(&self->schemes);
    qc_metas_clear(&self->metas);
    qc_part_set_free(self->set);
    cJSON_Delete(self->config);
    cJSON_Delete(self->manifest);
    qc_free(self->declared);
    qc_free(self->uses);
    qc_free(self->stored);
    qc_free(self->values);
    qc_free(self->halves);
    qc_free(self->path);
    qc_free(self->type);
    qc_free(self->tool);
    qc_free(self);
}

static void discard(qc_writer *w)
{
    engine_writer *self = self_of(w);
    qc_part_set_free(self->set); /* its files lie in the folder */
    self->set = NULL;
    qc_outfolder_discard(self->folder);
    self_free(self);
}

/* ---- metadata and side files ---- */

/* Engines read config.json; what it says of tied tables may have been found wrong. */
static int add_meta(qc_writer *w, const qc_meta *meta, qc_err *err)
{
    if (strcmp(meta->key, "model.tied") == 0)
        self_of(w)->tied = meta->u64;
    return qc_metas_add(&self_of(w)->metas, meta, err);
}

/* Takes data. */
static int keep_file(engine_writer *self, const char *name, char *data, size_t n_bytes, qc_err *err)
{
    char *copy = qc_strdup(name);
    if (!data || !copy || self->n_files == MAX_FILES) {
        qc_free(data);
        qc_free(copy);
        return qc_fail_nomem(err, name, n_bytes);
    }
    self->files[self->n_files++] = (side_file){copy, data, n_bytes};
    return QC_OK;
}

static int read_manifest(engine_writer *self, const void *data, size_t n_bytes, qc_err *err)
{
    QC_TRY(qc_json_parse(data, n_bytes, "manifest.json", true, &self->manifest, err));
    const cJSON *tool = qc_json_get(self->manifest, "tool");
    const char *name = cJSON_GetStringValue(qc_json_get(tool, "name")),
               *version = cJSON_GetStringValue(qc_json_get(tool, "version"));
    self->tool = qc_asprintf("%s:%s", name ? name : "?", version ? version : "?");
    self->schemes.tool = self->tool;
    return self->tool ? QC_OK : qc_fail_nomem(err, "manifest.json", n_bytes);
}

static int add_file(qc_writer *w, const char *name, const void *data, size_t n_bytes, qc_err *err)
{
    engine_writer *self = self_of(w);
    if (strcmp(name, "config.json") == 0) {
        QC_TRY(qc_json_parse(data, n_bytes, name, true, &self->config, err));
        return qc_json_keep_floats(self->config, data, n_bytes, err);
    }
    if (strcmp(name, "manifest.json") == 0)
        QC_TRY(read_manifest(self, data, n_bytes, err));
    char *copy = qc_alloc(n_bytes + 1, 1);
    if (copy)
        memcpy(copy, data, n_bytes);
    return keep_file(self, name, copy, n_bytes, err);
}

/* ---- declarations ---- */

static int grow(engine_writer *self, qc_err *err)
{
    if (self->n_tensors < self->cap_tensors)
        return QC_OK;
    size_t old = (size_t)self->cap_tensors, cap = old ? 2 * old : 256;
    void *d = qc_realloc(self->declared, old * sizeof *self->declared, cap * sizeof *self->declared);
    self->declared = d ? d : self->declared;
    void *u = qc_realloc(self->uses, old * sizeof *self->uses, cap * sizeof *self->uses);
    self->uses = u ? u : self->uses;
    void *s = qc_realloc(self->stored, old * sizeof *self->stored, cap * sizeof *self->stored);
    self->stored = s ? s : self->stored;
    if (!d || !u || !s)
        return qc_fail_nomem(err, self->path, cap * sizeof *self->declared);
    self->cap_tensors = (int64_t)cap;
    return QC_OK;
}

static int declare(qc_writer *w, const qc_tensor_use *use, const qc_tensor_info *info, qc_err *err)
{
    engine_writer *self = self_of(w);
    QC_TRY(grow(self, err));
    int64_t i = self->n_tensors;
    self->declared[i] = *info;
    self->uses[i] = *use;
    self->stored[i] = (stored){.name = qc_strdup(info->name)};
    if (!self->stored[i].name)
        return qc_fail_nomem(err, info->name, strlen(info->name));
    self->declared[i].name = self->stored[i].name;
    self->n_tensors++;
    bool matrix = use->kind == QC_KIND_LINEAR || (self->engine->packs_tables && use->kind != QC_KIND_VECTOR);
    return matrix ? qc_schemes_add(&self->schemes, info, err) : QC_OK;
}

/* A tied head has no tensor of its own in these folders: config.json says that it is tied. */
static int add_alias(qc_writer *w, const char *name, const char *target, qc_err *err)
{
    (void)w;
    (void)name;
    (void)target;
    (void)err;
    return QC_OK;
}

/* Announce a tensor's parts, or its values. */
static int announce(engine_writer *self, int64_t i, qc_err *err)
{
    const qc_tensor_info *info = &self->declared[i];
    stored *s = &self->stored[i];
    s->first = self->n_parts_announced;
    s->value_dtype = info->dtype;
    if (info->dtype == QC_DT_GRID) {
        s->packing = self->engine->packing(&self->schemes, info);
        s->value_dtype =
            self->type || self->uses[i].source != QC_DT_F16 ? qc_hf_value_dtype(self->type) : QC_DT_F16;
    }
    if (!s->packing) {
        self->n_parts_announced++;
        return self->set->add(self->set, info->name, s->value_dtype, info->n_dims, info->shape, err);
    }
    qc_part parts[QC_MAX_PARTS];
    int n = s->packing->parts(info, parts), stem = (int)(strlen(info->name) - strlen("weight"));
    self->n_parts_announced += n;
    for (int p = 0; p < n; p++) {
        char *name = qc_asprintf("%.*s%s", stem, info->name, parts[p].suffix);
        int rc = name ? self->set->add(self->set, name, parts[p].dtype, parts[p].n_dims, parts[p].shape, err)
                      : qc_fail_nomem(err, info->name, strlen(info->name));
        qc_free(name);
        QC_TRY(rc);
    }
    return QC_OK;
}

static void set_bool(cJSON *object, const char *key, bool value)
{
    cJSON *item = cJSON_CreateBool(value);
    if (cJSON_HasObjectItem(object, key))
        cJSON_ReplaceItemInObjectCaseSensitive(object, key, item);
    else if (!cJSON_AddItemToObject(object, key, item))
        cJSON_Delete(item);
}

/* The type that engines compute in, where the values were put in another than the source's. */
static void set_value_type(engine_writer *self)
{
    static const struct {
        const char *type, *name;
    } names[] = {{"bf16", "bfloat16"}, {"f16", "float16"}, {"f32", "float32"}};
    for (size_t i = 0; self->engine == &qc_engine_hf && self->type && i < sizeof names / sizeof names[0]; i++)
        if (strcmp(self->type, names[i].type) == 0) {
            const char *key = cJSON_HasObjectItem(self->config, "dtype") ? "dtype" : "torch_dtype";
            cJSON_DeleteItemFromObjectCaseSensitive(self->config, key);
            cJSON_AddStringToObject(self->config, key, names[i].name);
        }
}

/* config.json, and the other file with the description, as texts. */
static int make_config(engine_writer *self, qc_err *err)
{
    cJSON *quantization = NULL;
    qc_json_watch();
    QC_TRY(self->engine->config(&self->schemes, &quantization, err));
    char *other = quantization && self->engine->config_file ? qc_json_print(quantization) : NULL;
    const bool need_other = quantization && self->engine->config_file;
    if (self->config) {
        set_bool(self->config, "tie_word_embeddings", self->tied);
        set_value_type(self);
    }
    cJSON *config = self->config ? self->config : cJSON_CreateObject();
    self->config = NULL;
    if (quantization && !cJSON_AddItemToObject(config, "quantization_config", quantization))
        cJSON_Delete(quantization);
    config = qc_json_watched(config);
    char *text = config ? qc_json_print(config) : NULL;
    cJSON_Delete(config);
    if (!text || (need_other && !other)) {
        qc_free(text);
        qc_free(other);
        return qc_fail_nomem(err, "config.json", 65536);
    }
    int rc = keep_file(self, "config.json", text, strlen(text), err);
    if (rc == QC_OK && other)
        return keep_file(self, self->engine->config_file, other, strlen(other), err);
    qc_free(other);
    return rc;
}

static int make_card(engine_writer *self, qc_err *err)
{
    qc_buf text = {0};
    int rc =
        qc_model_card(qc_path_base(self->path), self->engine, &self->schemes, self->manifest, &text, err);
    if (rc == QC_OK)
        return keep_file(self, "README.md", text.data, text.n_bytes, err);
    qc_buf_clear(&text);
    return rc;
}

static qc_engine_contents contents_of(const engine_writer *self)
{
    return (qc_engine_contents){.metas = &self->metas,
                                .tensors = self->declared,
                                .n_tensors = self->n_tensors,
                                .tied = self->tied,
                                .set = self->set,
                                .n_parts = self->n_parts_announced};
}

/* The format's own files. */
static int make_files(engine_writer *self, qc_err *err)
{
    qc_engine_contents contents = contents_of(self);
    for (int i = 0;; i++) {
        const char *name;
        qc_buf text = {0};
        int rc = self->engine->file(&contents, i, &name, &text, err);
        if (rc < 0 || !name) {
            qc_buf_clear(&text);
            return rc;
        }
        QC_TRY(keep_file(self, name, text.data, text.n_bytes, err));
    }
}

static int start_folder(engine_writer *self, qc_err *err)
{
    QC_TRY(qc_outfolder_open(self->path, self->force, &self->folder, err));
    return self->set->open(self->set, self->folder, err);
}

static int size(qc_writer *w, uint64_t *ret_bytes, qc_err *err)
{
    engine_writer *self = self_of(w);
    uint64_t n_bytes;
    qc_schemes_sort(&self->schemes);
    for (int64_t i = 0; i < self->n_tensors; i++)
        QC_TRY(announce(self, i, err));
    qc_engine_contents contents = contents_of(self);
    if (self->engine->own_tensors)
        QC_TRY(self->engine->own_tensors(&contents, false, err));
    QC_TRY(self->set->layout(self->set, &n_bytes, err));
    QC_TRY(make_config(self, err));
    QC_TRY(make_card(self, err));
    if (self->engine->file)
        QC_TRY(make_files(self, err));
    for (int i = 0; i < self->n_files; i++)
        n_bytes += self->files[i].n_bytes;
    *ret_bytes = n_bytes;
    return self->count ? QC_OK : start_folder(self, err);
}

/* ---- tensors ---- */

static int out_of_order(const engine_writer *self, const char *what, qc_err *err)
{
    return qc_fail(err, QC_E_USAGE, "%s: %s: out of order", self->path, what);
}

static int begin_tensor(qc_writer *w, const qc_tensor_info *info, qc_err *err)
{
    engine_writer *self = self_of(w);
    if (!self->folder || self->in_tensor || self->at == self->n_tensors ||
        strcmp(info->name, self->stored[self->at].name) != 0 || info->dtype != self->declared[self->at].dtype)
        return out_of_order(self, info->name, err);
    const stored *s = &self->stored[self->at];
    self->n_parts = s->packing ? s->packing->parts(&self->declared[self->at], self->parts) : 0;
    for (int p = 0; p < self->n_parts && !s->packing->by_rows; p++)
        if (!(self->data[p] = qc_calloc(qc_part_bytes(&self->parts[p]), 1)))
            return qc_fail_nomem(err, info->name, qc_part_bytes(&self->parts[p]));
    self->in_tensor = true;
    self->rows_done = 0;
    return QC_OK;
}

static int check_rows(const engine_writer *self, int64_t n_rows, bool grid, qc_err *err)
{
    if (!self->in_tensor || grid != (self->declared[self->at].dtype == QC_DT_GRID) ||
        self->rows_done + n_rows > qc_tensor_rows(&self->declared[self->at]))
        return out_of_order(self, "rows", err);
    return QC_OK;
}

/* Values of whole rows in the stored type. */
static int put_values(engine_writer *self, const void *data, int64_t n_rows, qc_err *err)
{
    const stored *s = &self->stored[self->at];
    uint64_t row_bytes =
        (uint64_t)qc_tensor_cols(&self->declared[self->at]) * (uint64_t)qc_dtype_bits(s->value_dtype) / 8;
    QC_TRY(self->set->write(self->set, s->first, (uint64_t)self->rows_done * row_bytes, data,
                            (size_t)n_rows * row_bytes, err));
    self->rows_done += n_rows;
    return QC_OK;
}

static int put_dense(qc_writer *w, const void *data, int64_t n_rows, qc_err *err)
{
    QC_TRY(check_rows(self_of(w), n_rows, false, err));
    return put_values(self_of(w), data, n_rows, err);
}

/* Codes as the values that they stand for. */
static int put_decoded(engine_writer *self, const qc_code_rows *rows, qc_err *err)
{
    const qc_tensor_info *info = &self->declared[self->at];
    size_t n = (size_t)(rows->n_rows * qc_tensor_cols(info));
    if (n > self->values_elems) {
        qc_free(self->values);
        qc_free(self->halves);
        self->values = qc_alloc(n, sizeof *self->values);
        self->halves = qc_alloc(n, sizeof *self->values);
        self->values_elems = self->values && self->halves ? n : 0;
        if (!self->values_elems)
            return qc_fail_nomem(err, info->name, n * 2 * sizeof *self->values);
    }
    qc_code_rows_decode(rows, &info->grid, qc_tensor_cols(info), self->values);
    QC_TRY(
        qc_dense_from_f32(self->stored[self->at].value_dtype, self->values, (int64_t)n, self->halves, err));
    return put_values(self, self->halves, rows->n_rows, err);
}

/* Rows of a layout that can be packed piece by piece. */
static int put_packed_rows(engine_writer *self, const qc_code_rows *rows, qc_err *err)
{
    const stored *s = &self->stored[self->at];
    qc_tensor_info some = self->declared[self->at];
    some.shape[0] = rows->n_rows;
    int n = s->packing->parts(&some, self->parts), rc = QC_OK;
    for (int p = 0; p < n && rc == QC_OK; p++)
        if (!(self->data[p] = qc_calloc(qc_part_bytes(&self->parts[p]), 1)))
            rc = qc_fail_nomem(err, some.name, qc_part_bytes(&self->parts[p]));
    if (rc == QC_OK)
        rc = s->packing->pack(&some, 0, rows, self->data, err);
    for (int p = 0; p < n && rc == QC_OK; p++) {
        uint64_t n_bytes = qc_part_bytes(&self->parts[p]), row_bytes = n_bytes / (uint64_t)rows->n_rows;
        rc = self->set->write(self->set, s->first + p, (uint64_t)self->rows_done * row_bytes, self->data[p],
                              n_bytes, err);
    }
    free_parts(self);
    self->rows_done += rows->n_rows;
    return rc;
}

static int put_codes(qc_writer *w, const qc_code_rows *rows, qc_err *err)
{
    engine_writer *self = self_of(w);
    QC_TRY(check_rows(self, rows->n_rows, true, err));
    if (!self->n_parts)
        return put_decoded(self, rows, err);
    if (self->stored[self->at].packing->by_rows)
        return rows->n_rows ? put_packed_rows(self, rows, err) : QC_OK;
    QC_TRY(self->stored[self->at].packing->pack(&self->declared[self->at], self->rows_done, rows, self->data,
                                                err));
    self->rows_done += rows->n_rows;
    return QC_OK;
}

static int end_tensor(qc_writer *w, qc_err *err)
{
    engine_writer *self = self_of(w);
    if (!self->in_tensor || self->rows_done != qc_tensor_rows(&self->declared[self->at]))
        return out_of_order(self, "end of a tensor", err);
    for (int p = 0; p < self->n_parts && self->data[p]; p++)
        QC_TRY(self->set->write(self->set, self->stored[self->at].first + p, 0, self->data[p],
                                qc_part_bytes(&self->parts[p]), err));
    free_parts(self);
    self->in_tensor = false;
    self->at++;
    return QC_OK;
}

/* ---- end ---- */

static int finish(qc_writer *w, const char **ret_temp_path, qc_err *err)
{
    engine_writer *self = self_of(w);
    if (!self->folder || self->in_tensor || self->at != self->n_tensors)
        return out_of_order(self, "finish", err);
    qc_engine_contents contents = contents_of(self);
    if (self->engine->own_tensors)
        QC_TRY(self->engine->own_tensors(&contents, true, err));
    QC_TRY(self->set->finish(self->set, self->folder, err));
    for (int i = 0; i < self->n_files; i++)
        QC_TRY(qc_outfolder_write(self->folder, self->files[i].name, self->files[i].data,
                                  self->files[i].n_bytes, err));
    self->finished = true;
    *ret_temp_path = qc_outfolder_temp_path(self->folder);
    return QC_OK;
}

static int publish(qc_writer *w, const char *other_path, qc_err *err)
{
    engine_writer *self = self_of(w);
    if (!self->finished) {
        int rc = out_of_order(self, "publish", err);
        discard(w);
        return rc;
    }
    int rc = qc_outfolder_commit(self->folder, other_path, err);
    self_free(self);
    return rc;
}

int qc_engine_writer_create(const qc_writer_format *format, const qc_engine_format *engine,
                            const qc_writer_options *options, qc_writer **ret, qc_err *err)
{
    engine_writer *self = qc_calloc(1, sizeof *self);
    if (!self)
        return qc_fail_nomem(err, options->path, sizeof *self);
    self->base = (qc_writer){format,    add_meta,  add_file,   declare, add_alias, size,   begin_tensor,
                             put_dense, put_codes, end_tensor, finish,  publish,   discard};
    self->engine = engine;
    self->count = options->count;
    self->force = options->force;
    self->shard_bytes = options->shard_bytes;
    self->path = qc_strdup(options->path);
    self->type = options->type ? qc_strdup(options->type) : NULL;
    self->schemes.type = self->type;
    int rc = self->path && (self->type || !options->type)
                 ? engine->new_set(self->shard_bytes, &self->set, err)
                 : qc_fail_nomem(err, options->path, strlen(options->path));
    if (rc < 0)
        self_free(self);
    else
        *ret = &self->base;
    return rc;
}
