#include "gguf_names.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

static const qc_gguf_arch archs[] = {
    {"llama", "llama", "LlamaForCausalLM", true},
    {"llama", "mistral", "MistralForCausalLM", true},
    {"qwen2", "qwen2", "Qwen2ForCausalLM", false},
    {"qwen3", "qwen3", "Qwen3ForCausalLM", false},
};

const qc_gguf_arch *qc_gguf_arch_at(int i)
{
    return i >= 0 && i < (int)(sizeof archs / sizeof archs[0]) ? &archs[i] : NULL;
}

const qc_gguf_arch *qc_gguf_arch_of(const char *model_type)
{
    for (int i = 0; qc_gguf_arch_at(i); i++)
        if (strcmp(archs[i].model_type, model_type) == 0)
            return &archs[i];
    return NULL;
}

typedef struct pair {
    const char *gguf, *hf;
} pair;

/* Before ".weight" or ".bias". */
static const pair outside[] = {
    {"token_embd", "model.embed_tokens"},
    {"output_norm", "model.norm"},
    {"output", "lm_head"},
};

static const pair inside[] = {
    {"attn_norm", "input_layernorm"},    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},      {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"}, {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"}, {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},       {"attn_qkv", "self_attn.qkv_proj"},
    {"ffn_up", "mlp.gate_up_proj"}, /* llama.cpp calls it by its second half */
};

#define COUNT(a) (sizeof(a) / sizeof(a)[0])

/* "STEM.weight" or "STEM.bias" with another stem, behind a prefix. */
static bool swap_stem(const pair *pairs, size_t n, bool to_hf, const char *name, const char *prefix,
                      char *ret, size_t cap_bytes)
{
    const char *dot = strrchr(name, '.');
    if (!dot || (strcmp(dot, ".weight") != 0 && strcmp(dot, ".bias") != 0))
        return false;
    size_t stem_bytes = (size_t)(dot - name);
    for (size_t i = 0; i < n; i++) {
        const char *from = to_hf ? pairs[i].gguf : pairs[i].hf, *to = to_hf ? pairs[i].hf : pairs[i].gguf;
        if (strlen(from) == stem_bytes && memcmp(from, name, stem_bytes) == 0)
            return (size_t)snprintf(ret, cap_bytes, "%s%s%s", prefix, to, dot) < cap_bytes;
    }
    return false;
}

static bool translate(const char *name, bool to_hf, const char *layer_of, const char *layer_as, char *ret,
                      size_t cap_bytes)
{
    size_t n = strlen(layer_of), n_digits = 0;
    if (strncmp(name, layer_of, n) != 0)
        return swap_stem(outside, COUNT(outside), to_hf, name, "", ret, cap_bytes);
    while (isdigit((unsigned char)name[n + n_digits]))
        n_digits++;
    char prefix[64];
    if (n_digits == 0 || n_digits > 9 || name[n + n_digits] != '.')
        return false;
    snprintf(prefix, sizeof prefix, "%s%.*s.", layer_as, (int)n_digits, name + n);
    return swap_stem(inside, COUNT(inside), to_hf, name + n + n_digits + 1, prefix, ret, cap_bytes);
}

bool qc_gguf_name_of(const char *hf_name, char ret[64])
{
    return translate(hf_name, false, "model.layers.", "blk.", ret, 64);
}

bool qc_gguf_name_to_hf(const char *name, char ret[256])
{
    return translate(name, true, "blk.", "model.layers.", ret, 256);
}
