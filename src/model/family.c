#include "family.h"

#include <string.h>

/* Names shared by the families that follow Llama's layout. */
static const char *const llama_names[QC_N_SLOTS] = {
    [QC_SLOT_EMBEDDING] = "model.embed_tokens.weight",
    [QC_SLOT_FINAL_NORM] = "model.norm.weight",
    [QC_SLOT_HEAD] = "lm_head.weight",
    [QC_SLOT_ATTN_NORM] = "input_layernorm.weight",
    [QC_SLOT_Q] = "self_attn.q_proj.weight",
    [QC_SLOT_K] = "self_attn.k_proj.weight",
    [QC_SLOT_V] = "self_attn.v_proj.weight",
    [QC_SLOT_O] = "self_attn.o_proj.weight",
    [QC_SLOT_Q_BIAS] = "self_attn.q_proj.bias",
    [QC_SLOT_K_BIAS] = "self_attn.k_proj.bias",
    [QC_SLOT_V_BIAS] = "self_attn.v_proj.bias",
    [QC_SLOT_O_BIAS] = "self_attn.o_proj.bias",
    [QC_SLOT_Q_NORM] = "self_attn.q_norm.weight",
    [QC_SLOT_K_NORM] = "self_attn.k_norm.weight",
    [QC_SLOT_MLP_NORM] = "post_attention_layernorm.weight",
    [QC_SLOT_GATE] = "mlp.gate_proj.weight",
    [QC_SLOT_UP] = "mlp.up_proj.weight",
    [QC_SLOT_DOWN] = "mlp.down_proj.weight",
    [QC_SLOT_GATE_BIAS] = "mlp.gate_proj.bias",
    [QC_SLOT_UP_BIAS] = "mlp.up_proj.bias",
    [QC_SLOT_DOWN_BIAS] = "mlp.down_proj.bias",
};

static const qc_family families[] = {
    {
        .model_type = "llama",
        .class_name = "LlamaForCausalLM",
        .defaults = {.vocab = 32000,
                     .hidden = 4096,
                     .n_layers = 32,
                     .n_heads = 32,
                     .ffn = 11008,
                     .max_positions = 2048,
                     .rope_theta = 1e4,
                     .rms_eps = 1e-6},
        .qkv_bias = QC_BIAS_BY_KEY,
        .o_bias = QC_BIAS_BY_KEY,
        .mlp_bias = QC_BIAS_BY_KEY,
        .layer_prefix = "model.layers.",
        .names = llama_names,
    },
    {
        .model_type = "mistral",
        .class_name = "MistralForCausalLM",
        .defaults = {.vocab = 32000,
                     .hidden = 4096,
                     .n_layers = 32,
                     .n_heads = 32,
                     .n_kv_heads = 8,
                     .ffn = 14336,
                     .max_positions = 131072,
                     .sliding_window = 4096,
                     .rope_theta = 1e4,
                     .rms_eps = 1e-6},
        .window = QC_WINDOW_EVERY_LAYER,
        .layer_prefix = "model.layers.",
        .names = llama_names,
    },
    {
        .model_type = "qwen2",
        .class_name = "Qwen2ForCausalLM",
        .defaults = {.vocab = 151936,
                     .hidden = 4096,
                     .n_layers = 32,
                     .n_heads = 32,
                     .n_kv_heads = 32,
                     .ffn = 22016,
                     .max_positions = 32768,
                     .sliding_window = 4096,
                     .max_window_layers = 28,
                     .rope_theta = 1e4,
                     .rms_eps = 1e-6},
        .qkv_bias = QC_BIAS_ALWAYS,
        .window = QC_WINDOW_UPPER_LAYERS,
        .layer_prefix = "model.layers.",
        .names = llama_names,
    },
    {
        .model_type = "qwen3",
        .class_name = "Qwen3ForCausalLM",
        .defaults = {.vocab = 151936,
                     .hidden = 4096,
                     .n_layers = 32,
                     .n_heads = 32,
                     .n_kv_heads = 32,
                     .head_dim = 128,
                     .ffn = 22016,
                     .max_positions = 32768,
                     .sliding_window = 4096,
                     .max_window_layers = 28,
                     .rope_theta = 1e4,
                     .rms_eps = 1e-6},
        .qkv_bias = QC_BIAS_BY_KEY,
        .o_bias = QC_BIAS_BY_KEY,
        .qk_norm = true,
        .window = QC_WINDOW_UPPER_LAYERS,
        .layer_prefix = "model.layers.",
        .names = llama_names,
    },
};

#define N_FAMILIES ((int)(sizeof families / sizeof families[0]))

const qc_family *qc_family_at(int i)
{
    return i >= 0 && i < N_FAMILIES ? &families[i] : NULL;
}

const qc_family *qc_family_find(const char *model_type)
{
    for (int i = 0; i < N_FAMILIES; i++)
        if (strcmp(families[i].model_type, model_type) == 0)
            return &families[i];
    return NULL;
}

static const qc_slot_info slots[QC_N_SLOTS] = {
    [QC_SLOT_EMBEDDING] = {QC_ROLE_EMBEDDING, QC_DIM_VOCAB, QC_DIM_HIDDEN},
    [QC_SLOT_FINAL_NORM] = {QC_ROLE_NORM, QC_DIM_NONE, QC_DIM_HIDDEN},
    [QC_SLOT_HEAD] = {QC_ROLE_HEAD, QC_DIM_VOCAB, QC_DIM_HIDDEN},
    [QC_SLOT_ATTN_NORM] = {QC_ROLE_NORM, QC_DIM_NONE, QC_DIM_HIDDEN},
    [QC_SLOT_Q] = {QC_ROLE_LINEAR, QC_DIM_Q, QC_DIM_HIDDEN},
    [QC_SLOT_K] = {QC_ROLE_LINEAR, QC_DIM_KV, QC_DIM_HIDDEN},
    [QC_SLOT_V] = {QC_ROLE_LINEAR, QC_DIM_KV, QC_DIM_HIDDEN},
    [QC_SLOT_O] = {QC_ROLE_LINEAR, QC_DIM_HIDDEN, QC_DIM_Q},
    [QC_SLOT_Q_BIAS] = {QC_ROLE_BIAS, QC_DIM_NONE, QC_DIM_Q},
    [QC_SLOT_K_BIAS] = {QC_ROLE_BIAS, QC_DIM_NONE, QC_DIM_KV},
    [QC_SLOT_V_BIAS] = {QC_ROLE_BIAS, QC_DIM_NONE, QC_DIM_KV},
    [QC_SLOT_O_BIAS] = {QC_ROLE_BIAS, QC_DIM_NONE, QC_DIM_HIDDEN},
    [QC_SLOT_Q_NORM] = {QC_ROLE_NORM, QC_DIM_NONE, QC_DIM_HEAD},
    [QC_SLOT_K_NORM] = {QC_ROLE_NORM, QC_DIM_NONE, QC_DIM_HEAD},
    [QC_SLOT_MLP_NORM] = {QC_ROLE_NORM, QC_DIM_NONE, QC_DIM_HIDDEN},
    [QC_SLOT_GATE] = {QC_ROLE_LINEAR, QC_DIM_FFN, QC_DIM_HIDDEN},
    [QC_SLOT_UP] = {QC_ROLE_LINEAR, QC_DIM_FFN, QC_DIM_HIDDEN},
    [QC_SLOT_DOWN] = {QC_ROLE_LINEAR, QC_DIM_HIDDEN, QC_DIM_FFN},
    [QC_SLOT_GATE_BIAS] = {QC_ROLE_BIAS, QC_DIM_NONE, QC_DIM_FFN},
    [QC_SLOT_UP_BIAS] = {QC_ROLE_BIAS, QC_DIM_NONE, QC_DIM_FFN},
    [QC_SLOT_DOWN_BIAS] = {QC_ROLE_BIAS, QC_DIM_NONE, QC_DIM_HIDDEN},
};

const qc_slot_info *qc_slot_of(qc_slot slot)
{
    return &slots[slot];
}

bool qc_slot_present(const qc_model_config *config, qc_slot slot)
{
    if (!config->family->names[slot])
        return false;
    switch (slot) {
    case QC_SLOT_HEAD:
        return !config->tied;
    case QC_SLOT_Q_BIAS:
    case QC_SLOT_K_BIAS:
    case QC_SLOT_V_BIAS:
        return config->qkv_bias;
    case QC_SLOT_O_BIAS:
        return config->o_bias;
    case QC_SLOT_Q_NORM:
    case QC_SLOT_K_NORM:
        return config->qk_norm;
    case QC_SLOT_GATE_BIAS:
    case QC_SLOT_UP_BIAS:
    case QC_SLOT_DOWN_BIAS:
        return config->mlp_bias;
    default:
        return true;
    }
}

int64_t qc_dim_elems(const qc_model_config *config, qc_dim dim)
{
    switch (dim) {
    case QC_DIM_VOCAB:
        return config->vocab;
    case QC_DIM_HIDDEN:
        return config->hidden;
    case QC_DIM_Q:
        return config->n_heads * config->head_dim;
    case QC_DIM_KV:
        return config->n_kv_heads * config->head_dim;
    case QC_DIM_HEAD:
        return config->head_dim;
    case QC_DIM_FFN:
        return config->ffn;
    default:
        return 0;
    }
}
