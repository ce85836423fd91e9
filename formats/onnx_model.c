#include "onnx_write.h"

#include <math.h>
#include <string.h>

static int refuse(const char *family, const char *what, qc_err *err)
{
    return qc_fail(err, QC_E_UNSUPPORTED, "ONNX: %s of %s: the graph does not compute that", what, family);
}

/* What the four families never have and others do. */
static int check_neutral(const qc_metas *m, const char *family, qc_err *err)
{
    const char *what = qc_metas_beyond_plain(m);
    if (what)
        return refuse(family, what, err);
    if (qc_metas_int(m, "model.qk_norm", 0) > 1)
        return refuse(family, "a norm of all queries or keys together", err);
    return QC_OK;
}

/* Angles that depend on the position alone: a table of cosines and sines holds them. */
static int read_rope(const qc_metas *m, const char *family, qc_rope_config *ret, qc_err *err)
{
    static const qc_rope_kind kinds[] = {QC_ROPE_DEFAULT, QC_ROPE_LINEAR, QC_ROPE_YARN, QC_ROPE_LLAMA3};
    const char *name = qc_metas_string(m, "rope.kind");
    size_t i = 0, n = sizeof kinds / sizeof kinds[0];
    while (i < n && strcmp(name, qc_rope_kind_name(kinds[i])) != 0)
        i++;
    if (i == n)
        return refuse(family, "rotary angles that depend on the length of the text", err);
    *ret = (qc_rope_config){
        .kind = kinds[i],
        .theta = qc_metas_number(m, "rope.theta", 10000),
        .partial_rotary_factor = qc_metas_number(m, "rope.partial_rotary_factor", 1),
        .factor = qc_metas_number(m, "rope.factor", 1),
        .original_max_positions = qc_metas_int(m, "rope.original_max_positions", 0),
        .low_freq_factor = qc_metas_number(m, "rope.low_freq_factor", 1),
        .high_freq_factor = qc_metas_number(m, "rope.high_freq_factor", 4),
        .beta_fast = qc_metas_number(m, "rope.beta_fast", 32),
        .beta_slow = qc_metas_number(m, "rope.beta_slow", 1),
        .attention_factor = qc_metas_number(m, "rope.attention_factor", 1),
        .truncate = qc_metas_int(m, "rope.truncate", 1),
    };
    return QC_OK;
}

int qc_onnx_model_read(const qc_metas *m, qc_onnx_model *ret, qc_err *err)
{
    static const char *const families[] = {"llama", "mistral", "qwen2", "qwen3"};
    const char *family = qc_metas_string(m, "model.family");
    size_t i = 0, n = sizeof families / sizeof families[0];
    while (i < n && strcmp(family, families[i]) != 0)
        i++;
    if (i == n)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "ONNX: the family %s is not written; expected llama, mistral, qwen2 or qwen3", family);
    QC_TRY(check_neutral(m, family, err));
    const qc_meta *slides = qc_metas_find(m, "model.layer_slides");
    *ret = (qc_onnx_model){
        .family = families[i],
        .hidden = qc_metas_int(m, "model.hidden", 0),
        .n_layers = qc_metas_int(m, "model.layers", 0),
        .n_heads = qc_metas_int(m, "model.heads", 0),
        .n_kv_heads = qc_metas_int(m, "model.kv_heads", 0),
        .head_dim = qc_metas_int(m, "model.head_dim", 0),
        .vocab = qc_metas_int(m, "model.vocab", 0),
        .n_positions = qc_metas_int(m, "model.max_positions", 0),
        .window = slides ? qc_metas_int(m, "model.sliding_window", 0) : 0,
        .slides = slides ? slides->array : NULL,
        .qk_norm = qc_metas_int(m, "model.qk_norm", 0),
        .eps = qc_metas_number(m, "model.rms_eps", 0),
    };
    ret->attention_scale = qc_metas_number(m, "model.attention_scale", 1 / sqrt((double)ret->head_dim));
    return read_rope(m, family, &ret->rope, err);
}
