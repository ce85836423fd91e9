#include "convert.h"
#include "family.h"

#include <string.h>

static const char *rope_name(qc_rope_kind kind)
{
    static const char *const names[] = {
        [QC_ROPE_DEFAULT] = "default", [QC_ROPE_LINEAR] = "linear", [QC_ROPE_DYNAMIC] = "dynamic",
        [QC_ROPE_YARN] = "yarn",       [QC_ROPE_LLAMA3] = "llama3", [QC_ROPE_LONGROPE] = "longrope",
    };
    return names[kind];
}

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
        {"model.qk_norm", c->qk_norm},
        {"model.qkv_bias", c->qkv_bias},
        {"model.o_bias", c->o_bias},
        {"model.mlp_bias", c->mlp_bias},
        {"model.sliding_window", (double)c->sliding_window},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        QC_TRY(put_u64(w, sizes[i].key, (uint64_t)sizes[i].value, err));
    return QC_OK;
}

static int put_rope(const qc_rope_config *r, qc_writer *w, qc_err *err)
{
    QC_TRY(put_string(w, "rope.kind", rope_name(r->kind), err));
    const number numbers[] = {
        {"rope.theta", r->theta},
        {"rope.partial_rotary_factor", r->partial_rotary_factor},
        {"rope.factor", r->factor},
        {"rope.low_freq_factor", r->low_freq_factor},
        {"rope.high_freq_factor", r->high_freq_factor},
        {"rope.beta_fast", r->beta_fast},
        {"rope.beta_slow", r->beta_slow},
        {"rope.attention_factor", r->attention_factor},
    };
    /* the plain kind has no parameters beyond the first two */
    size_t n = r->kind == QC_ROPE_DEFAULT ? 2 : sizeof numbers / sizeof numbers[0];
    for (size_t i = 0; i < n; i++)
        QC_TRY(put_f64(w, numbers[i].key, numbers[i].value, err));
    if (r->kind == QC_ROPE_DEFAULT)
        return QC_OK;
    QC_TRY(put_u64(w, "rope.original_max_positions", (uint64_t)r->original_max_positions, err));
    return r->kind == QC_ROPE_YARN ? put_u64(w, "rope.truncate", r->truncate, err) : QC_OK;
}

int qc_convert_metadata(const qc_model_config *c, qc_writer *w, qc_err *err)
{
    QC_TRY(put_string(w, "model.family", c->family->model_type, err));
    QC_TRY(put_sizes(c, w, err));
    QC_TRY(put_string(w, "model.activation", c->act == QC_ACT_SILU ? "silu" : "gelu_tanh", err));
    QC_TRY(put_f64(w, "model.rms_eps", (double)c->rms_eps, err));
    QC_TRY(put_f64(w, "model.attention_scale", (double)c->attention_scale, err));
    QC_TRY(put_f64(w, "model.embedding_scale", (double)c->embedding_scale, err));
    QC_TRY(put_f64(w, "model.attention_softcap", (double)c->attention_softcap, err));
    QC_TRY(put_f64(w, "model.final_softcap", (double)c->final_softcap, err));
    if (c->sliding_window) {
        uint64_t slides[512];
        if (c->n_layers > (int64_t)(sizeof slides / sizeof slides[0]))
            return qc_fail(err, QC_E_UNSUPPORTED, "config.json: %lld layers, at most 512 are supported",
                           (long long)c->n_layers);
        for (int64_t i = 0; i < c->n_layers; i++)
            slides[i] = c->layer_slides[i];
        QC_TRY(put_array(w, "model.layer_slides", slides, (uint32_t)c->n_layers, err));
    }
    QC_TRY(put_rope(&c->rope, w, err));
    if (c->bos >= 0)
        QC_TRY(put_u64(w, "model.bos", (uint64_t)c->bos, err));
    uint64_t eos[8];
    for (int i = 0; i < c->n_eos; i++)
        eos[i] = (uint64_t)c->eos[i];
    return c->n_eos ? put_array(w, "model.eos", eos, (uint32_t)c->n_eos, err) : QC_OK;
}
