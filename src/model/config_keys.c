/* Which fields of config.json may stand there. Three lists: read by this program; without effect on the
 * values of a forward pass; with an effect we do not compute, allowed at the one value that switches it off.
 * Anything else is refused by name unless it is null, which says "not set". */
#include "config_internal.h"

#include <string.h>

static const char *const read_keys[] = {
    "architectures",
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "text_config",
    "tie_word_embeddings",
    "use_sliding_window",
    "vocab_size",
};

/* Training, bookkeeping, generation and implementation. pretraining_tp splits products without changing them.
 */
static const char *const harmless_keys[] = {
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_implementation",
    "classifier_dropout",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dropout",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "max_sequence_length",
    "min_length",
    "model_max_length",
    "name_or_path",
    "neftune_noise_alpha",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "perceiver_config",
    "pixel_shuffle_factor",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "residual_dropout",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "use_flash_attention",
    "use_flash_attn",
    "use_resampler",
    "use_sdpa",
};

/* Field, the JSON text of the value that switches it off (NULL: only null or absence), what it does. */
static const struct {
    const char *key, *neutral, *what;
} matter_keys[] = {
    {"add_cross_attention", "false", "cross attention"},
    {"alibi", "false", "position biases"},
    {"attention_chunk_size", NULL, "chunked attention"},
    {"attention_multiplier", NULL, "another attention scale"},
    {"attn_logit_softcapping", NULL, "capped attention scores"},
    {"attn_temperature_tuning", "false", "attention scores that grow with the position"},
    {"audio_config", NULL, "an audio model"},
    {"auto_map", NULL, "a model class defined by the checkpoint's own code"},
    {"chunk_size_feed_forward", "0", "chunked feed forward"},
    {"clip_qkv", NULL, "clipped projections"},
    {"cross_attention_hidden_size", NULL, "cross attention"},
    {"embedding_multiplier", "1", "scaled embeddings"},
    {"final_logit_softcapping", NULL, "capped logits"},
    {"full_attn_mod", "1", "attention that differs by layer"},
    {"interpolate_factor", "1", "stretched positions"},
    {"is_causal", "true", "attention to later tokens"},
    {"is_encoder_decoder", "false", "an encoder"},
    {"kv_lora_rank", NULL, "keys and values of low rank"},
    {"lm_head_bias", "false", "a bias of the head"},
    {"logit_scale", "1", "scaled logits"},
    {"logits_scaling", "1", "scaled logits"},
    {"n_shared_experts", "0", "experts that every token goes to"},
    {"no_rope_layer_interval", NULL, "layers without position embedding"},
    {"no_rope_layers", NULL, "layers without position embedding"},
    {"num_experts", "0", "experts"},
    {"num_kv_shared_layers", "0", "layers without keys and values of their own"},
    {"num_local_experts", "0", "experts"},
    {"num_nextn_predict_layers", "0", "prediction layers behind the decoder"},
    {"partial_rotary_factor", "1", "heads that rotate in part"},
    {"pruned_heads", "{}", "pruned attention heads"},
    {"q_lora_rank", NULL, "queries of low rank"},
    {"qk_layer_norms", "false", "another query and key norm"},
    {"qk_layernorm", "false", "another query and key norm"},
    {"quantization_config", NULL, "an already quantized checkpoint"},
    {"query_pre_attn_scalar", NULL, "another attention scale"},
    {"residual_multiplier", "1", "scaled residuals"},
    {"rope_interleaved", "false", "interleaved rotary pairs"},
    {"rope_local_base_freq", NULL, "a rotary base per layer type"},
    {"sliding_window_pattern", NULL, "a pattern of sliding layers"},
    {"tie_encoder_decoder", "false", "an encoder"},
    {"use_bidirectional_attention", "false", "attention to later tokens"},
    {"use_mrope", "false", "multi-axis rotary positions"},
    {"use_qk_norm", "false", "another query and key norm"},
    {"vision_config", NULL, "an image model"},
};

#define COUNT(a) (sizeof(a) / sizeof(a)[0])

static bool in_list(const char *const *list, size_t n, const char *key)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(list[i], key) == 0)
            return true;
    return false;
}

static bool is_neutral(const cJSON *item, const char *neutral)
{
    if (!neutral)
        return false;
    if (cJSON_IsBool(item))
        return strcmp(neutral, cJSON_IsTrue(item) ? "true" : "false") == 0;
    if (cJSON_IsNumber(item))
        return neutral[0] >= '0' && neutral[0] <= '9' && item->valuedouble == neutral[0] - '0';
    return cJSON_IsObject(item) && !item->child && strcmp(neutral, "{}") == 0;
}

/* r->wrapper's own fields are about its other parts, but for those that would change the text model, too. */
static int check_key(qc_config_reader *r, const cJSON *item, bool of_wrapper)
{
    const char *key = item->string;
    if (of_wrapper && (strcmp(key, "vision_config") == 0 || strcmp(key, "audio_config") == 0))
        return QC_OK;
    if (cJSON_IsNull(item) || key[0] == '_' || in_list(read_keys, COUNT(read_keys), key) ||
        in_list(harmless_keys, COUNT(harmless_keys), key) || qc_family_reads(r->family, key))
        return QC_OK;
    for (size_t i = 0; i < COUNT(matter_keys); i++) {
        if (strcmp(matter_keys[i].key, key) != 0)
            continue;
        if (is_neutral(item, matter_keys[i].neutral))
            return QC_OK;
        return qc_fail(r->err, QC_E_UNSUPPORTED, "%s: \"%s\" (%s) is not supported for %s; expected %s",
                       r->file, key, matter_keys[i].what, r->family->model_type,
                       matter_keys[i].neutral ? matter_keys[i].neutral : "null or no such field");
    }
    if (of_wrapper)
        return QC_OK;
    return qc_fail(r->err, QC_E_UNSUPPORTED, "%s: field \"%s\" is not known and could change the result",
                   r->file, key);
}

int qc_config_check_keys(qc_config_reader *r)
{
    for (const cJSON *item = r->json->child; item; item = item->next)
        QC_TRY(check_key(r, item, false));
    if (r->outer != r->json)
        for (const cJSON *item = r->outer->child; item; item = item->next)
            QC_TRY(check_key(r, item, r->wrapper != NULL));
    return QC_OK;
}
