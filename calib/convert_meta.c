#include "convert.h"
#include "family.h"

#include <stdio.h>
#include <string.h>

static int put_u64(qc_writer *w, const char *key, uint64_t value, qc_err *err)
{
    return w->add_meta(w, &(qc_meta){.key = key, .type = QC_META_U64, .u64 = value}, err);
}

static int put_f64(qc_writer *w, const char *key, double value, qc_err *err)
{
    return w->add_meta(w, &(qc_meta){.key = key, .type = QC_META_F64, .f64 = value}, err);
}

static int put_string(qc_writer *w, const char *key, const char *text, qc_err *err)
{
    return w->add_meta(w, &(qc_meta){.key = key, .type = QC_META_STRING, .string = text}, err);
}

static int put_f64_array(qc_writer *w, const char *key, const double *values, uint32_t n_elems, qc_err *err)
{
    qc_meta meta = {.key = key, .type = QC_META_F64_ARRAY, .f64_array = values, .n_elems = n_elems};
    return w->add_meta(w, &meta, err);
}

static int put_array(qc_writer *w, const char *key, const uint64_t *values, uint32_t n_elems, qc_err *err)
{
    qc_meta meta = {.key = key, .type = QC_META_U64_ARRAY, .array = values, .n_elems = n_elems};
    return w->add_meta(w, &meta, err);
}

typedef struct number {
    const char *key;
    double value;
} number;

static int put_sizes(const qc_model_config *c, qc_writer *w, qc_err *err)
{
    const number sizes[] = {
        {"model.hidden", (double)c->hidden},
        {"model.layers", (double)c->n_layers},
        {"model.heads", (double)c->n_heads},
        {"model.kv_heads", (double)c->n_kv_heads},
        {"model.head_dim", (double)c->head_dim},
        {"model.ffn", (double)c->ffn},
        {"model.vocab", (double)c->vocab},
        {"model.max_positions", (double)c->max_positions},
        {"model.tied", c->tied},
        {"model.qk_norm", (double)c->qk_norm},
        {"model.qkv_bias", c->qkv_bias},
        {"model.o_bias", c->o_bias},
        {"model.mlp_bias", c->mlp_bias},
        {"model.sliding_window", (double)c->sliding_window},
        {"model.rotary_dim", (double)c->rotary_dim},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        QC_TRY(put_u64(w, sizes[i].key, (uint64_t)sizes[i].value, err));
    return QC_OK;
}

/* prefix: "rope" or "rope_local" */
static int put_rope(const qc_rope_config *r, const char *prefix, int64_t rotary_dim, qc_writer *w,
                    qc_err *err)
{
    char key[64];
    const number numbers[] = {
        {"theta", r->theta},
        {"partial_rotary_factor", r->partial_rotary_factor},
        {"factor", r->factor},
        {"low_freq_factor", r->low_freq_factor},
        {"high_freq_factor", r->high_freq_factor},
        {"beta_fast", r->beta_fast},
        {"beta_slow", r->beta_slow},
        {"attention_factor", r->attention_factor},
    };
    snprintf(key, sizeof key, "%s.kind", prefix);
    QC_TRY(put_string(w, key, qc_rope_kind_name(r->kind), err));
    /* the plain kind has no parameters beyond the first two */
    size_t n = r->kind == QC_ROPE_DEFAULT ? 2 : sizeof numbers / sizeof numbers[0];
    for (size_t i = 0; i < n; i++) {
        snprintf(key, sizeof key, "%s.%s", prefix, numbers[i].key);
        QC_TRY(put_f64(w, key, numbers[i].value, err));
    }
    if (r->kind == QC_ROPE_DEFAULT)
        return QC_OK;
    snprintf(key, sizeof key, "%s.original_max_positions", prefix);
    QC_TRY(put_u64(w, key, (uint64_t)r->original_max_positions, err));
    if (r->kind == QC_ROPE_LONGROPE) {
        snprintf(key, sizeof key, "%s.short_factors", prefix);
        QC_TRY(put_f64_array(w, key, r->short_factors, (uint32_t)(rotary_dim / 2), err));
        snprintf(key, sizeof key, "%s.long_factors", prefix);
        QC_TRY(put_f64_array(w, key, r->long_factors, (uint32_t)(rotary_dim / 2), err));
    }
    snprintf(key, sizeof key, "%s.truncate", prefix);
    return r->kind == QC_ROPE_YARN ? put_u64(w, key, r->truncate, err) : QC_OK;
}

static int put_flags(const char *key, const bool *flags, int64_t n, qc_writer *w, qc_err *err)
{
    uint64_t values[512];
    if (n > (int64_t)(sizeof values / sizeof values[0]))
        return qc_fail(err, QC_E_UNSUPPORTED, "config.json: %lld layers, at most 512 are supported",
                       (long long)n);
    for (int64_t i = 0; i < n; i++)
        values[i] = flags[i];
    return put_array(w, key, values, (uint32_t)n, err);
}

static int put_scales(const qc_model_config *c, qc_writer *w, qc_err *err)
{
    const number scales[] = {
        {"model.rms_eps", (double)c->rms_eps},
        {"model.norm_offset", (double)c->norm_offset},
        {"model.attention_scale", (double)c->attention_scale},
        {"model.embedding_scale", (double)c->embedding_scale},
        {"model.residual_scale", (double)c->residual_scale},
        {"model.logit_scale", (double)c->logit_scale},
        {"model.attention_softcap", (double)c->attention_softcap},
        {"model.final_softcap", (double)c->final_softcap},
    };
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++)
        QC_TRY(put_f64(w, scales[i].key, scales[i].value, err));
    return QC_OK;
}

int qc_convert_metadata(const qc_model_config *c, qc_writer *w, qc_err *err)
{
    QC_TRY(put_string(w, "model.family", c->family->model_type, err));
    QC_TRY(put_sizes(c, w, err));
    QC_TRY(put_string(w, "model.activation", c->act == QC_ACT_SILU ? "silu" : "gelu_tanh", err));
    QC_TRY(put_scales(c, w, err));
    if (c->sliding_window)
        QC_TRY(put_flags("model.layer_slides", c->layer_slides, c->n_layers, w, err));
    if (memchr(c->layer_rotates, false, (size_t)c->n_layers))
        QC_TRY(put_flags("model.layer_rotates", c->layer_rotates, c->n_layers, w, err));
    QC_TRY(put_rope(&c->rope, "rope", c->rotary_dim, w, err));
    if (c->has_local_rope)
        QC_TRY(put_rope(&c->local_rope, "rope_local", c->rotary_dim, w, err));
    if (c->bos >= 0)
        QC_TRY(put_u64(w, "model.bos", (uint64_t)c->bos, err));
    uint64_t eos[8];
    for (int i = 0; i < c->n_eos; i++)
        eos[i] = (uint64_t)c->eos[i];
    return c->n_eos ? put_array(w, "model.eos", eos, (uint32_t)c->n_eos, err) : QC_OK;
}
