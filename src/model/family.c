#include "family.h"

#include <stdio.h>
#include <string.h>

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

const qc_family *qc_family_find(const char *model_type)
{
    for (int i = 0; qc_family_at(i); i++)
        if (strcmp(qc_family_at(i)->model_type, model_type) == 0)
            return qc_family_at(i);
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
