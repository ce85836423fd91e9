/* Keys of the model's architecture in a GGUF file. Whatever llama.cpp would compute otherwise is refused. */
#include "gguf_write.h"

#include "qc_alloc.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static int refuse(const char *arch, const char *what, qc_err *err)
{
    return qc_fail(err, QC_E_UNSUPPORTED, "GGUF: %s: llama.cpp's architecture %s does not do that", what,
                   arch);
}

/* What the three architectures have in common, and where they differ. */
static int check_model(const qc_metas *m, const qc_gguf_arch *arch, qc_err *err)
{
    bool qwen2 = strcmp(arch->name, "qwen2") == 0, qwen3 = strcmp(arch->name, "qwen3") == 0;
    double scale = 1 / sqrt((double)qc_metas_int(m, "model.head_dim", 1));
    const char *what = qc_metas_beyond_plain(m);
    if (what)
        return refuse(arch->name, what, err);
    if (fabs(qc_metas_number(m, "model.attention_scale", scale) - scale) > 1e-6 * scale)
        return refuse(arch->name, "another attention scale", err);
    if (qc_metas_int(m, "model.qk_norm", 0) != (qwen3 ? 1 : 0))
        return refuse(arch->name, "this norm of queries and keys", err);
    if ((qwen3 && qc_metas_int(m, "model.qkv_bias", 0)) ||
        ((qwen2 || qwen3) && (qc_metas_int(m, "model.o_bias", 0) || qc_metas_int(m, "model.mlp_bias", 0))))
        return refuse(arch->name, "biases of these matrices", err);
    return QC_OK;
}

/* ---- rotary embedding ---- */

/* Divisors of Llama 3's frequencies, which llama.cpp reads from a tensor. */
static int llama3_freqs(const qc_metas *m, double theta, qc_gguf_model *model, qc_err *err)
{
    double factor = qc_metas_number(m, "rope.factor", 1), low = qc_metas_number(m, "rope.low_freq_factor", 1),
           high = qc_metas_number(m, "rope.high_freq_factor", 4);
    double original = (double)qc_metas_int(m, "rope.original_max_positions", 1);
    model->n_rope_freqs = model->head_dim / 2;
    model->rope_freqs = qc_alloc((size_t)model->n_rope_freqs, sizeof *model->rope_freqs);
    if (!model->rope_freqs)
        return qc_fail_nomem(err, "rotary frequencies", (unsigned long long)model->n_rope_freqs * 4);
    for (int64_t i = 0; i < model->n_rope_freqs; i++) {
        double wavelength = 2 * M_PI * pow(theta, 2.0 * (double)i / (double)model->head_dim);
        model->rope_freqs[i] = (float)qc_gguf_llama3_divisor(wavelength, factor, low, high, original);
    }
    return QC_OK;
}

static int put_key(qc_gguf_head *head, const char *arch, const char *name, int64_t value, qc_err *err)
{
    char key[128];
    snprintf(key, sizeof key, "%s.%s", arch, name);
    return qc_gguf_put_int(head, key, QC_GGUF_U32, value, err);
}

static int put_number(qc_gguf_head *head, const char *arch, const char *name, double value, qc_err *err)
{
    char key[128];
    snprintf(key, sizeof key, "%s.%s", arch, name);
    return qc_gguf_put_f32(head, key, (float)value, err);
}

static int put_rope(qc_gguf_head *head, const qc_metas *m, qc_gguf_model *model, qc_err *err)
{
    const char *arch = model->arch->name, *kind = qc_metas_string(m, "rope.kind");
    double theta = qc_metas_number(m, "rope.theta", 10000), factor = qc_metas_number(m, "rope.factor", 1);
    char key[128];
    QC_TRY(put_number(head, arch, "rope.freq_base", theta, err));
    QC_TRY(put_key(head, arch, "rope.dimension_count", model->head_dim, err));
    if (strcmp(kind, "default") == 0)
        return QC_OK;
    if (strcmp(kind, "llama3") == 0)
        return llama3_freqs(m, theta, model, err);
    bool yarn = strcmp(kind, "yarn") == 0;
    if (!yarn && strcmp(kind, "linear") != 0)
        return refuse(arch, "this rope scaling (only linear, yarn and llama3 are written)", err);
    if (yarn && (qc_metas_number(m, "rope.beta_fast", 32) != 32 ||
                 qc_metas_number(m, "rope.beta_slow", 1) != 1 || !qc_metas_int(m, "rope.truncate", 1) ||
                 fabs(qc_metas_number(m, "rope.attention_factor", 1) - (0.1 * log(factor) + 1)) > 1e-6))
        return refuse(arch, "yarn with other than the default beta_fast, beta_slow and attention_factor",
                      err);
    snprintf(key, sizeof key, "%s.rope.scaling.type", arch);
    QC_TRY(qc_gguf_put_text(head, key, kind, err));
    QC_TRY(put_number(head, arch, "rope.scaling.factor", factor, err));
    if (!yarn)
        return QC_OK;
    return put_key(head, arch, "rope.scaling.original_context_length",
                   qc_metas_int(m, "rope.original_max_positions", 1), err);
}

int qc_gguf_put_model(qc_gguf_head *head, const qc_metas *m, qc_gguf_model *ret, qc_err *err)
{
    static const char *const counts[][2] = {
        {"embedding_length", "model.hidden"},          {"block_count", "model.layers"},
        {"feed_forward_length", "model.ffn"},          {"attention.head_count", "model.heads"},
        {"attention.head_count_kv", "model.kv_heads"}, {"attention.key_length", "model.head_dim"},
        {"attention.value_length", "model.head_dim"},  {"vocab_size", "model.vocab"}};
    const char *family = qc_metas_string(m, "model.family");
    ret->arch = qc_gguf_arch_of(family);
    if (!ret->arch)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "GGUF: the family %s is not written; expected llama, mistral, qwen2 or qwen3", family);
    QC_TRY(check_model(m, ret->arch, err));
    ret->head_dim = qc_metas_int(m, "model.head_dim", 0);
    ret->vocab = qc_metas_int(m, "model.vocab", 0);
    const char *arch = ret->arch->name;
    /* llama.cpp attends to everything: up to the length of a sliding window that is the same */
    int64_t window = qc_metas_int(m, "model.sliding_window", 0),
            context = qc_metas_int(m, "model.max_positions", 0);
    QC_TRY(put_key(head, arch, "context_length", window > 0 && window < context ? window : context, err));
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        QC_TRY(put_key(head, arch, counts[i][0], qc_metas_int(m, counts[i][1], 0), err));
    QC_TRY(put_number(head, arch, "attention.layer_norm_rms_epsilon", qc_metas_number(m, "model.rms_eps", 0),
                      err));
    return put_rope(head, m, ret, err);
}
