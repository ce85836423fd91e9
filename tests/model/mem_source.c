#include "mem_source.h"

#include "open.h"
#include "qc_alloc.h"
#include "qc_json.h"
#include "qc_rng.h"
#include "qc_test.h"

#include <math.h>

static const qc_tensor_info *mem_info(const qc_source *src, int64_t tensor)
{
    return &((const mem_source *)src)->tensors[tensor].info;
}

static int64_t mem_find(const qc_source *src, const char *name)
{
    for (int64_t i = 0; i < src->n_tensors; i++)
        if (strcmp(mem_info(src, i)->name, name) == 0)
            return i;
    return -1;
}

static int mem_read_rows(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows, float *dst,
                         qc_err *err)
{
    const mem_tensor *t = &((const mem_source *)src)->tensors[tensor];
    int64_t cols = qc_tensor_cols(&t->info);
    if (row0 < 0 || n_rows < 0 || row0 + n_rows > qc_tensor_rows(&t->info))
        return qc_fail(err, QC_E_USAGE, "rows outside of %s", t->info.name);
    memcpy(dst, t->values + row0 * cols, (size_t)(n_rows * cols) * sizeof *dst);
    return QC_OK;
}

static const void *mem_raw(const qc_source *src, int64_t tensor)
{
    (void)src;
    (void)tensor;
    return NULL;
}

static void mem_release(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows)
{
    const qc_tensor_info *info = mem_info(src, tensor);
    ck_assert(row0 >= 0 && row0 + n_rows <= qc_tensor_rows(info));
}

static int file_index(const mem_source *m, const char *name)
{
    for (int i = 0; i < MEM_FILES; i++)
        if (m->file_names[i] && strcmp(m->file_names[i], name) == 0)
            return i;
    return -1;
}

static int mem_side_file(const qc_source *src, const char *name, char **ret, size_t *ret_bytes, qc_err *err)
{
    const mem_source *m = (const mem_source *)src;
    int i = file_index(m, name);
    *ret = NULL;
    if (i < 0)
        return QC_OK;
    *ret = qc_strdup(m->file_texts[i]);
    *ret_bytes = strlen(m->file_texts[i]);
    return *ret ? QC_OK : qc_fail_nomem(err, name, *ret_bytes);
}

static void close_source(qc_source *src)
{
    mem_close((mem_source *)src);
}

mem_source *mem_new(void)
{
    mem_source *m = qc_calloc(1, sizeof *m);
    ck_assert_ptr_nonnull(m);
    m->base = (qc_source){
        .format = "mem",
        .path = "MEM",
        .info = mem_info,
        .find = mem_find,
        .read_rows = mem_read_rows,
        .raw = mem_raw,
        .release = mem_release,
        .side_file = mem_side_file,
        .close = close_source,
    };
    return m;
}

void mem_close(mem_source *m)
{
    for (int64_t i = 0; i < m->base.n_tensors; i++) {
        qc_free((char *)m->tensors[i].info.name);
        qc_free(m->tensors[i].values);
    }
    for (int i = 0; i < MEM_FILES; i++) {
        qc_free(m->file_names[i]);
        qc_free(m->file_texts[i]);
    }
    qc_free(m);
}

float *mem_add(mem_source *m, const char *name, int64_t rows, int64_t cols)
{
    ck_assert_int_lt(m->base.n_tensors, MEM_TENSORS);
    mem_tensor *t = &m->tensors[m->base.n_tensors++];
    t->info = (qc_tensor_info){.name = qc_strdup(name), .dtype = QC_DT_F32, .n_dims = rows ? 2 : 1};
    t->info.shape[0] = rows ? rows : cols;
    t->info.shape[1] = rows ? cols : 0;
    t->values = qc_calloc((size_t)(rows ? rows * cols : cols), sizeof *t->values);
    ck_assert(t->info.name && t->values);
    return t->values;
}

mem_source *mem_copy(const qc_source *src)
{
    static const char *const names[] = {"config.json", "generation_config.json", "tokenizer_config.json"};
    mem_source *m = mem_new();
    for (int64_t i = 0; i < src->n_tensors; i++) {
        const qc_tensor_info *info = src->info(src, i);
        ck_assert_int_le(info->n_dims, 2);
        float *x = mem_add(m, info->name, info->n_dims == 2 ? info->shape[0] : 0, qc_tensor_cols(info));
        ck_assert_int_eq(src->read_rows(src, i, 0, qc_tensor_rows(info), x, NULL), QC_OK);
    }
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char *text = NULL;
        size_t n_bytes = 0;
        ck_assert_int_eq(src->side_file(src, names[i], &text, &n_bytes, NULL), QC_OK);
        if (text)
            mem_set_file(m, names[i], text);
        qc_free(text);
    }
    return m;
}

mem_source *mem_tiny(const char *name)
{
    char folder[128];
    qc_source *src = NULL;
    qc_err err = {0};
    snprintf(folder, sizeof folder, "models/tiny/%s", name);
    ck_assert_msg(qc_source_open(test_data(folder), &src, &err) == QC_OK, "%s", err.msg);
    mem_source *m = mem_copy(src);
    qc_source_close(src);
    return m;
}

mem_tensor *mem_tensor_of(mem_source *m, const char *name)
{
    int64_t i = mem_find(&m->base, name);
    ck_assert_msg(i >= 0, "no tensor %s", name);
    return &m->tensors[i];
}

static void remove_at(mem_source *m, int64_t i)
{
    qc_free((char *)m->tensors[i].info.name);
    qc_free(m->tensors[i].values);
    m->base.n_tensors--;
    memmove(&m->tensors[i], &m->tensors[i + 1], (size_t)(m->base.n_tensors - i) * sizeof m->tensors[0]);
}

void mem_remove(mem_source *m, const char *name)
{
    remove_at(m, mem_tensor_of(m, name) - m->tensors);
}

static bool name_ends(const mem_tensor *t, const char *ending)
{
    size_t n = strlen(t->info.name), k = strlen(ending);
    return n >= k && strcmp(t->info.name + n - k, ending) == 0;
}

void mem_remove_all(mem_source *m, const char *ending)
{
    for (int64_t i = m->base.n_tensors - 1; i >= 0; i--)
        if (name_ends(&m->tensors[i], ending))
            remove_at(m, i);
}

void mem_scale_all(mem_source *m, const char *ending, float factor, float offset)
{
    for (int64_t i = 0; i < m->base.n_tensors; i++)
        for (int64_t k = 0; name_ends(&m->tensors[i], ending) && k < qc_tensor_n_elems(&m->tensors[i].info);
             k++)
            m->tensors[i].values[k] = m->tensors[i].values[k] * factor + offset;
}

void mem_set_file(mem_source *m, const char *name, const char *text)
{
    int i = file_index(m, name);
    if (i >= 0) {
        qc_free(m->file_names[i]);
        qc_free(m->file_texts[i]);
        m->file_names[i] = m->file_texts[i] = NULL;
    }
    if (!text)
        return;
    for (i = 0; m->file_names[i]; i++)
        ck_assert_int_lt(i, MEM_FILES - 1);
    m->file_names[i] = qc_strdup(name);
    m->file_texts[i] = qc_strdup(text);
}

void mem_patch_file(mem_source *m, const char *name, const char *patch)
{
    int i = file_index(m, name);
    ck_assert_int_ge(i, 0);
    cJSON *doc = cJSON_Parse(m->file_texts[i]), *changes = cJSON_Parse(patch);
    ck_assert_msg(doc && changes, "bad json: %s", patch);
    while (changes->child) {
        cJSON *item = cJSON_DetachItemViaPointer(changes, changes->child);
        cJSON_DeleteItemFromObjectCaseSensitive(doc, item->string);
        if (cJSON_IsString(item) && strcmp(item->valuestring, "ABSENT") == 0)
            cJSON_Delete(item);
        else
            cJSON_AddItemToObject(doc, item->string, item);
    }
    char *text = qc_json_print(doc);
    mem_set_file(m, name, text);
    qc_free(text);
    cJSON_Delete(doc);
    cJSON_Delete(changes);
}

void mem_patch(mem_source *m, const char *patch)
{
    mem_patch_file(m, "config.json", patch);
}

static void add_random(mem_source *m, qc_rng *rng, const char *prefix, const char *name, int rows, int cols)
{
    char full[160];
    snprintf(full, sizeof full, "%s%s.weight", prefix, name);
    float *x = mem_add(m, full, rows, cols);
    for (int64_t i = 0; i < (int64_t)(rows ? rows : 1) * cols;
         i++) /* norms lie about 1, matrices keep the scale */
        x[i] = (float)(rows ? qc_rng_normal(rng) / sqrt(cols) : 1 + 0.2 * qc_rng_normal(rng));
}

mem_source *mem_random(const mem_shape *s, uint64_t seed)
{
    mem_source *m = mem_new();
    qc_rng rng;
    char text[1024], prefix[64];
    int q = s->n_heads * s->head_dim, kv = s->n_kv_heads * s->head_dim;
    qc_rng_seed(&rng, seed);
    add_random(m, &rng, "model.", "embed_tokens", s->vocab, s->hidden);
    for (int i = 0; i < s->n_layers; i++) {
        snprintf(prefix, sizeof prefix, "model.layers.%d.", i);
        add_random(m, &rng, prefix, "input_layernorm", 0, s->hidden);
        add_random(m, &rng, prefix, "self_attn.q_proj", q, s->hidden);
        add_random(m, &rng, prefix, "self_attn.k_proj", kv, s->hidden);
        add_random(m, &rng, prefix, "self_attn.v_proj", kv, s->hidden);
        add_random(m, &rng, prefix, "self_attn.o_proj", s->hidden, q);
        if (s->qk_norm) {
            add_random(m, &rng, prefix, "self_attn.q_norm", 0, s->head_dim);
            add_random(m, &rng, prefix, "self_attn.k_norm", 0, s->head_dim);
        }
        add_random(m, &rng, prefix, "post_attention_layernorm", 0, s->hidden);
        add_random(m, &rng, prefix, "mlp.gate_proj", s->ffn, s->hidden);
        add_random(m, &rng, prefix, "mlp.up_proj", s->ffn, s->hidden);
        add_random(m, &rng, prefix, "mlp.down_proj", s->hidden, s->ffn);
    }
    add_random(m, &rng, "model.", "norm", 0, s->hidden);
    add_random(m, &rng, "", "lm_head", s->vocab, s->hidden);
    snprintf(text, sizeof text,
             "{\"architectures\": [\"%s\"], \"model_type\": \"%s\", \"hidden_size\": %d, "
             "\"num_hidden_layers\": %d, "
             "\"num_attention_heads\": %d, \"num_key_value_heads\": %d, \"head_dim\": %d, "
             "\"intermediate_size\": %d, "
             "\"vocab_size\": %d, \"max_position_embeddings\": 4096, \"rms_norm_eps\": 1e-6, \"rope_theta\": "
             "10000, "
             "\"sliding_window\": null, \"tie_word_embeddings\": false}",
             s->class_name, s->family, s->hidden, s->n_layers, s->n_heads, s->n_kv_heads, s->head_dim, s->ffn,
             s->vocab);
    mem_set_file(m, "config.json", text);
    return m;
}
