#include "family.h"

#include <stdio.h>
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

static const char *const phi3_names[QC_N_SLOTS] = {
    [QC_SLOT_EMBEDDING] = "model.embed_tokens.weight",
    [QC_SLOT_FINAL_NORM] = "model.norm.weight",
    [QC_SLOT_HEAD] = "lm_head.weight",
    [QC_SLOT_ATTN_NORM] = "input_layernorm.weight",
    [QC_SLOT_QKV] = "self_attn.qkv_proj.weight",
    [QC_SLOT_O] = "self_attn.o_proj.weight",
    [QC_SLOT_MLP_NORM] = "post_attention_layernorm.weight",
    [QC_SLOT_GATE_UP] = "mlp.gate_up_proj.weight",
    [QC_SLOT_DOWN] = "mlp.down_proj.weight",
};

/* Four norms a layer; what Llama calls post_attention_layernorm is pre_feedforward_layernorm here. */
static const char *const gemma_names[QC_N_SLOTS] = {
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
    [QC_SLOT_POST_ATTN_NORM] = "post_attention_layernorm.weight",
    [QC_SLOT_MLP_NORM] = "pre_feedforward_layernorm.weight",
    [QC_SLOT_GATE] = "mlp.gate_proj.weight",
    [QC_SLOT_UP] = "mlp.up_proj.weight",
    [QC_SLOT_DOWN] = "mlp.down_proj.weight",
    [QC_SLOT_POST_MLP_NORM] = "post_feedforward_layernorm.weight",
};

/* No norm before attention and MLP: theirs stand behind them. */
static const char *const olmo2_names[QC_N_SLOTS] = {
    [QC_SLOT_EMBEDDING] = "model.embed_tokens.weight",
    [QC_SLOT_FINAL_NORM] = "model.norm.weight",
    [QC_SLOT_HEAD] = "lm_head.weight",
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
    [QC_SLOT_POST_ATTN_NORM] = "post_attention_layernorm.weight",
    [QC_SLOT_GATE] = "mlp.gate_proj.weight",
    [QC_SLOT_UP] = "mlp.up_proj.weight",
    [QC_SLOT_DOWN] = "mlp.down_proj.weight",
    [QC_SLOT_POST_MLP_NORM] = "post_feedforward_layernorm.weight",
};

/* auto_map: the published files name classes of their own that the library's have replaced */
static const char *const phi3_keys[] = {"original_max_position_embeddings", "partial_rotary_factor",
                                        "auto_map", NULL};
static const char *const gemma_keys[] = {"attn_logit_softcapping", "final_logit_softcapping",
                                         "hidden_activation", "query_pre_attn_scalar", NULL};
static const char *const gemma3_keys[] = {"attn_logit_softcapping",
                                          "final_logit_softcapping",
                                          "hidden_activation",
                                          "query_pre_attn_scalar",
                                          "rope_local_base_freq",
                                          "sliding_window_pattern",
                                          NULL};
static const char *const granite_keys[] = {"attention_multiplier", "embedding_multiplier", "logits_scaling",
                                           "residual_multiplier", NULL};
static const char *const smollm3_keys[] = {"no_rope_layers", "no_rope_layer_interval", NULL};

static const char *const qwen3_moe_names[QC_N_SLOTS] = {
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
    [QC_SLOT_ROUTER] = "mlp.gate.weight",
    [QC_SLOT_EXPERT_GATE] = "mlp.experts.*.gate_proj.weight",
    [QC_SLOT_EXPERT_UP] = "mlp.experts.*.up_proj.weight",
    [QC_SLOT_EXPERT_DOWN] = "mlp.experts.*.down_proj.weight",
};

static const char *const mixtral_names[QC_N_SLOTS] = {
    [QC_SLOT_EMBEDDING] = "model.embed_tokens.weight",
    [QC_SLOT_FINAL_NORM] = "model.norm.weight",
    [QC_SLOT_HEAD] = "lm_head.weight",
    [QC_SLOT_ATTN_NORM] = "input_layernorm.weight",
    [QC_SLOT_Q] = "self_attn.q_proj.weight",
    [QC_SLOT_K] = "self_attn.k_proj.weight",
    [QC_SLOT_V] = "self_attn.v_proj.weight",
    [QC_SLOT_O] = "self_attn.o_proj.weight",
    [QC_SLOT_MLP_NORM] = "post_attention_layernorm.weight",
    [QC_SLOT_ROUTER] = "block_sparse_moe.gate.weight",
    [QC_SLOT_EXPERT_GATE] = "block_sparse_moe.experts.*.w1.weight",
    [QC_SLOT_EXPERT_UP] = "block_sparse_moe.experts.*.w3.weight",
    [QC_SLOT_EXPERT_DOWN] = "block_sparse_moe.experts.*.w2.weight",
};

static const char *const qwen3_moe_keys[] = {
    "decoder_sparse_step", "mlp_only_layers",     "moe_intermediate_size", "norm_topk_prob",
    "num_experts",         "num_experts_per_tok", "num_local_experts",     NULL};
static const char *const mixtral_keys[] = {"num_experts_per_tok", "num_local_experts", NULL};

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
        .qk_norm = QC_QK_NORM_HEAD,
        .window = QC_WINDOW_UPPER_LAYERS,
        .layer_prefix = "model.layers.",
        .names = llama_names,
    },
    {
        .model_type = "phi3",
        .class_name = "Phi3ForCausalLM",
        .defaults = {.vocab = 32064,
                     .hidden = 3072,
                     .n_layers = 32,
                     .n_heads = 32,
                     .ffn = 8192,
                     .max_positions = 4096,
                     .rope_theta = 1e4,
                     .rms_eps = 1e-5},
        .window = QC_WINDOW_EVERY_LAYER,
        .keys = phi3_keys,
        .layer_prefix = "model.layers.",
        .names = phi3_names,
    },
    {
        .model_type = "gemma2",
        .class_name = "Gemma2ForCausalLM",
        .defaults = {.vocab = 256000,
                     .hidden = 2304,
                     .n_layers = 26,
                     .n_heads = 8,
                     .n_kv_heads = 4,
                     .head_dim = 256,
                     .ffn = 9216,
                     .max_positions = 8192,
                     .sliding_window = 4096,
                     .window_pattern = 2,
                     .rope_theta = 1e4,
                     .rms_eps = 1e-6,
                     .query_scalar = 256,
                     .attention_softcap = 50,
                     .final_softcap = 30,
                     .act = "gelu_pytorch_tanh",
                     .tied = true},
        .qkv_bias = QC_BIAS_BY_KEY,
        .o_bias = QC_BIAS_BY_KEY,
        .norm_offset = 1,
        .scaled_embedding = true,
        .window = QC_WINDOW_PATTERN,
        .act_key = "hidden_activation",
        .keys = gemma_keys,
        .layer_prefix = "model.layers.",
        .names = gemma_names,
    },
    {
        .model_type = "gemma3_text",
        .class_name = "Gemma3ForCausalLM",
        .defaults = {.vocab = 262208,
                     .hidden = 2304,
                     .n_layers = 26,
                     .n_heads = 8,
                     .n_kv_heads = 4,
                     .head_dim = 256,
                     .ffn = 9216,
                     .max_positions = 131072,
                     .sliding_window = 4096,
                     .window_pattern = 6,
                     .rope_theta = 1e6,
                     .rms_eps = 1e-6,
                     .local_rope_theta = 1e4,
                     .query_scalar = 256,
                     .act = "gelu_pytorch_tanh",
                     .tied = true},
        .qkv_bias = QC_BIAS_BY_KEY,
        .o_bias = QC_BIAS_BY_KEY,
        .qk_norm = QC_QK_NORM_HEAD,
        .norm_offset = 1,
        .scaled_embedding = true,
        .window = QC_WINDOW_PATTERN,
        .act_key = "hidden_activation",
        .keys = gemma3_keys,
        .layer_prefix = "model.layers.",
        .names = gemma_names,
    },
    {
        .model_type = "olmo2",
        .class_name = "Olmo2ForCausalLM",
        .defaults = {.vocab = 50304,
                     .hidden = 4096,
                     .n_layers = 32,
                     .n_heads = 32,
                     .ffn = 11008,
                     .max_positions = 2048,
                     .rope_theta = 1e4,
                     .rms_eps = 1e-5},
        .qkv_bias = QC_BIAS_BY_KEY,
        .o_bias = QC_BIAS_BY_KEY,
        .qk_norm = QC_QK_NORM_WHOLE,
        .layer_prefix = "model.layers.",
        .names = olmo2_names,
    },
    {
        .model_type = "granite",
        .class_name = "GraniteForCausalLM",
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
        .keys = granite_keys,
        .layer_prefix = "model.layers.",
        .names = llama_names,
    },
    {
        .model_type = "smollm3",
        .class_name = "SmolLM3ForCausalLM",
        .defaults = {.vocab = 128256,
                     .hidden = 2048,
                     .n_layers = 36,
                     .n_heads = 16,
                     .n_kv_heads = 4,
                     .ffn = 11008,
                     .max_positions = 32768,
                     .no_rope_interval = 4,
                     .rope_theta = 2e6,
                     .rms_eps = 1e-6,
                     .tied = true},
        .qkv_bias = QC_BIAS_BY_KEY,
        .o_bias = QC_BIAS_BY_KEY,
        .mlp_bias = QC_BIAS_BY_KEY,
        .window = QC_WINDOW_NO_ROPE,
        .keys = smollm3_keys,
        .layer_prefix = "model.layers.",
        .names = llama_names,
    },
    {
        .model_type = "qwen3_moe",
        .class_name = "Qwen3MoeForCausalLM",
        .defaults = {.vocab = 151936,
                     .hidden = 2048,
                     .n_layers = 24,
                     .n_heads = 32,
                     .n_kv_heads = 4,
                     .ffn = 6144,
                     .max_positions = 32768,
                     .sliding_window = 4096,
                     .rope_theta = 1e4,
                     .rms_eps = 1e-6},
        .qkv_bias = QC_BIAS_BY_KEY,
        .o_bias = QC_BIAS_BY_KEY,
        .qk_norm = QC_QK_NORM_HEAD,
        .window = QC_WINDOW_BY_SWITCH,
        .experts = {.count_key = "num_experts",
                    .new_count_key = "num_local_experts",
                    .ffn_key = "moe_intermediate_size",
                    .count = 128,
                    .chosen = 8,
                    .ffn = 768,
                    .some_layers = true},
        .keys = qwen3_moe_keys,
        .layer_prefix = "model.layers.",
        .names = qwen3_moe_names,
    },
    {
        .model_type = "mixtral",
        .class_name = "MixtralForCausalLM",
        .defaults = {.vocab = 32000,
                     .hidden = 4096,
                     .n_layers = 32,
                     .n_heads = 32,
                     .n_kv_heads = 8,
                     .ffn = 14336,
                     .max_positions = 131072,
                     .rope_theta = 1e6,
                     .rms_eps = 1e-5},
        .window = QC_WINDOW_EVERY_LAYER,
        .experts =
            {.count_key = "num_local_experts", .count = 8, .chosen = 2, .ffn = 14336, .renormalise = true},
        .keys = mixtral_keys,
        .layer_prefix = "model.layers.",
        .names = mixtral_names,
        .other_names = qwen3_moe_names, /* as newer files with the experts of a layer in one tensor have */
    },
};

#define N_FAMILIES ((int)(sizeof families / sizeof families[0]))

static const qc_wrapper wrappers[] = {
    {"gemma3", "Gemma3ForConditionalGeneration"},        {"idefics3", "Idefics3ForConditionalGeneration"},
    {"internvl", "InternVLForConditionalGeneration"},    {"llava", "LlavaForConditionalGeneration"},
    {"llava_next", "LlavaNextForConditionalGeneration"}, {"mistral3", "Mistral3ForConditionalGeneration"},
    {"smolvlm", "SmolVLMForConditionalGeneration"},
};

const qc_wrapper *qc_wrapper_find(const char *model_type)
{
    for (size_t i = 0; i < sizeof wrappers / sizeof wrappers[0]; i++)
        if (strcmp(wrappers[i].model_type, model_type) == 0)
            return &wrappers[i];
    return NULL;
}

const qc_name_form *qc_name_form_at(int i)
{
    static const qc_name_form forms[] = {
        {"model.", ""},
        {"language_model.model.", "language_model."},
        {"model.language_model.", ""},
        {"model.text_model.", ""},
    };
    return i >= 0 && i < (int)(sizeof forms / sizeof forms[0]) ? &forms[i] : NULL;
}

void qc_full_name(const qc_name_form *form, const char *name, char ret[QC_NAME_BYTES])
{
    size_t n = strlen(qc_name_form_at(0)->body);
    bool body = strncmp(name, qc_name_form_at(0)->body, n) == 0;
    snprintf(ret, QC_NAME_BYTES, "%s%s", body ? form->body : form->head, name + (body ? n : 0));
}

bool qc_family_reads(const qc_family *family, const char *key)
{
    for (const char *const *k = family->keys; k && *k; k++)
        if (strcmp(*k, key) == 0)
            return true;
    return false;
}

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
    [QC_SLOT_Q_NORM] = {QC_ROLE_NORM, QC_DIM_NONE, QC_DIM_Q_NORM},
    [QC_SLOT_K_NORM] = {QC_ROLE_NORM, QC_DIM_NONE, QC_DIM_K_NORM},
    [QC_SLOT_MLP_NORM] = {QC_ROLE_NORM, QC_DIM_NONE, QC_DIM_HIDDEN},
    [QC_SLOT_GATE] = {QC_ROLE_LINEAR, QC_DIM_FFN, QC_DIM_HIDDEN},
    [QC_SLOT_UP] = {QC_ROLE_LINEAR, QC_DIM_FFN, QC_DIM_HIDDEN},
    [QC_SLOT_DOWN] = {QC_ROLE_LINEAR, QC_DIM_HIDDEN, QC_DIM_FFN},
    [QC_SLOT_GATE_BIAS] = {QC_ROLE_BIAS, QC_DIM_NONE, QC_DIM_FFN},
    [QC_SLOT_UP_BIAS] = {QC_ROLE_BIAS, QC_DIM_NONE, QC_DIM_FFN},
    [QC_SLOT_DOWN_BIAS] = {QC_ROLE_BIAS, QC_DIM_NONE, QC_DIM_HIDDEN},
    [QC_SLOT_QKV] = {QC_ROLE_LINEAR, QC_DIM_QKV, QC_DIM_HIDDEN},
    [QC_SLOT_GATE_UP] = {QC_ROLE_LINEAR, QC_DIM_GATE_UP, QC_DIM_HIDDEN},
    [QC_SLOT_POST_ATTN_NORM] = {QC_ROLE_NORM, QC_DIM_NONE, QC_DIM_HIDDEN},
    [QC_SLOT_POST_MLP_NORM] = {QC_ROLE_NORM, QC_DIM_NONE, QC_DIM_HIDDEN},
    [QC_SLOT_ROUTER] = {QC_ROLE_ROUTER, QC_DIM_EXPERTS, QC_DIM_HIDDEN},
    [QC_SLOT_EXPERT_GATE] = {QC_ROLE_LINEAR, QC_DIM_EXPERT_FFN, QC_DIM_HIDDEN},
    [QC_SLOT_EXPERT_UP] = {QC_ROLE_LINEAR, QC_DIM_EXPERT_FFN, QC_DIM_HIDDEN},
    [QC_SLOT_EXPERT_DOWN] = {QC_ROLE_LINEAR, QC_DIM_HIDDEN, QC_DIM_EXPERT_FFN},
};

const qc_slot_info *qc_slot_of(qc_slot slot)
{
    return &slots[slot];
}

static const struct {
    qc_slot whole, parts[4];
} fused[] = {
    {QC_SLOT_QKV, {QC_SLOT_Q, QC_SLOT_K, QC_SLOT_V, QC_N_SLOTS}},
    {QC_SLOT_GATE_UP, {QC_SLOT_GATE, QC_SLOT_UP, QC_N_SLOTS}},
};

const qc_slot *qc_slot_parts(qc_slot slot)
{
    for (size_t i = 0; i < sizeof fused / sizeof fused[0]; i++)
        if (fused[i].whole == slot)
            return fused[i].parts;
    return NULL;
}

qc_slot qc_slot_stored(const qc_model_config *config, qc_slot part, int64_t *ret_row0)
{
    for (size_t i = 0; i < sizeof fused / sizeof fused[0]; i++) {
        const qc_slot *p = fused[i].parts;
        *ret_row0 = 0;
        if (!config->family->names[fused[i].whole])
            continue;
        for (; *p != part && *p != QC_N_SLOTS; p++)
            *ret_row0 += qc_dim_elems(config, slots[*p].rows);
        if (*p == part)
            return fused[i].whole;
    }
    *ret_row0 = 0;
    return part;
}

bool qc_slot_present(const qc_model_config *config, int layer, qc_slot slot)
{
    bool sparse = slot >= QC_SLOT_FIRST_IN_LAYER && config->layer_sparse[layer];
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
        return config->qk_norm != QC_QK_NORM_NONE;
    case QC_SLOT_GATE:
    case QC_SLOT_UP:
    case QC_SLOT_DOWN:
        return !sparse;
    case QC_SLOT_GATE_BIAS:
    case QC_SLOT_UP_BIAS:
    case QC_SLOT_DOWN_BIAS:
        return !sparse && config->mlp_bias;
    case QC_SLOT_ROUTER:
    case QC_SLOT_EXPERT_GATE:
    case QC_SLOT_EXPERT_UP:
    case QC_SLOT_EXPERT_DOWN:
        return sparse;
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
    case QC_DIM_FFN:
        return config->ffn;
    case QC_DIM_EXPERTS:
        return config->n_experts;
    case QC_DIM_EXPERT_FFN:
        return config->expert_ffn;
    case QC_DIM_Q_NORM:
        return config->qk_norm == QC_QK_NORM_WHOLE ? config->n_heads * config->head_dim : config->head_dim;
    case QC_DIM_K_NORM:
        return config->qk_norm == QC_QK_NORM_WHOLE ? config->n_kv_heads * config->head_dim : config->head_dim;
    case QC_DIM_QKV:
        return (config->n_heads + 2 * config->n_kv_heads) * config->head_dim;
    case QC_DIM_GATE_UP:
        return 2 * config->ffn;
    default:
        return 0;
    }
}
