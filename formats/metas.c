#include "metas.h"

#include "qc_alloc.h"

#include <string.h>

static void *copy_of(const void *data, size_t n_bytes)
{
    void *copy = qc_alloc(n_bytes, 1);
    if (copy && n_bytes)
        memcpy(copy, data, n_bytes);
    return copy;
}

int qc_metas_add(qc_metas *m, const qc_meta *meta, qc_err *err)
{
    if (m->n == m->cap) {
        size_t old = (size_t)m->cap * sizeof *m->list, more = old + 32 * sizeof *m->list;
        qc_meta *list = qc_realloc(m->list, old, more);
        if (!list)
            return qc_fail_nomem(err, meta->key, more);
        m->list = list;
        m->cap += 32;
    }
    qc_meta *copy = &m->list[m->n++];
    *copy = *meta;
    copy->key = qc_strdup(meta->key);
    copy->string = meta->type == QC_META_STRING ? qc_strdup(meta->string) : NULL;
    copy->array =
        meta->type == QC_META_U64_ARRAY ? copy_of(meta->array, meta->n_elems * sizeof *meta->array) : NULL;
    copy->f64_array = meta->type == QC_META_F64_ARRAY
                          ? copy_of(meta->f64_array, meta->n_elems * sizeof *meta->f64_array)
                          : NULL;
    bool lost = !copy->key || (meta->type == QC_META_STRING && !copy->string) ||
                (meta->type == QC_META_U64_ARRAY && !copy->array) ||
                (meta->type == QC_META_F64_ARRAY && !copy->f64_array);
    return lost ? qc_fail_nomem(err, meta->key, 64) : QC_OK;
}

static void free_meta(qc_meta *m)
{
    qc_free((char *)(uintptr_t)m->key);
    qc_free((char *)(uintptr_t)m->string);
    qc_free((void *)(uintptr_t)m->array);
    qc_free((void *)(uintptr_t)m->f64_array);
}

void qc_metas_clear(qc_metas *m)
{
    for (int i = 0; i < m->n; i++)
        free_meta(&m->list[i]);
    qc_free(m->list);
    *m = (qc_metas){0};
}

const qc_meta *qc_metas_find(const qc_metas *m, const char *key)
{
    for (int i = 0; i < m->n; i++)
        if (strcmp(m->list[i].key, key) == 0)
            return &m->list[i];
    return NULL;
}

int64_t qc_metas_int(const qc_metas *metas, const char *key, int64_t absent)
{
    const qc_meta *m = qc_metas_find(metas, key);
    return m && m->type == QC_META_U64 ? (int64_t)m->u64 : absent;
}

double qc_metas_number(const qc_metas *metas, const char *key, double absent)
{
    const qc_meta *m = qc_metas_find(metas, key);
    return m && m->type == QC_META_F64 ? m->f64 : absent;
}

const char *qc_metas_string(const qc_metas *metas, const char *key)
{
    const qc_meta *m = qc_metas_find(metas, key);
    return m && m->type == QC_META_STRING ? m->string : "";
}

const char *qc_metas_beyond_plain(const qc_metas *m)
{
    static const struct {
        const char *key;
        double want;
        const char *what;
    } numbers[] = {{"model.norm_offset", 0, "norms with an offset"},
                   {"model.embedding_scale", 1, "scaled embeddings"},
                   {"model.residual_scale", 1, "scaled residuals"},
                   {"model.logit_scale", 1, "scaled logits"},
                   {"model.attention_softcap", 0, "capped attention scores"},
                   {"model.final_softcap", 0, "capped logits"}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (qc_metas_number(m, numbers[i].key, numbers[i].want) != numbers[i].want)
            return numbers[i].what;
    if (strcmp(qc_metas_string(m, "model.activation"), "silu") != 0)
        return "another activation than SiLU";
    if (qc_metas_find(m, "model.layer_rotates") || qc_metas_find(m, "rope_local.kind") ||
        qc_metas_int(m, "model.rotary_dim", 0) != qc_metas_int(m, "model.head_dim", 0))
        return "layers or parts of heads that do not rotate like the others";
    return NULL;
}
