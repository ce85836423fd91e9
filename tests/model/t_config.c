/* config.json: defaults, contradictions, fields that matter, end ids; cases C-1, C-5 to C-8, S-10, T-12. */
#include "config_change.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_json.h"

START_TEST(other_families_are_refused_by_name)
{
    static const char *const names[] = {"gpt_oss", "qwen2_moe", "deepseek_v3"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char quoted[160], patch[64];
        mem_source *m = mem_tiny("llama");
        qc_model model;
        qc_err err = {0};
        snprintf(quoted, sizeof quoted,
                 "model_type \"%s\" is not supported; expected one of llama, mistral, qwen2, qwen3",
                 names[i]);
        snprintf(patch, sizeof patch, "{\"model_type\": \"%s\"}", names[i]);
        mem_patch(m, patch);
        ck_assert_int_eq(qc_model_open(&m->base, &model, &err), QC_E_UNSUPPORTED);
        ck_assert_msg(strstr(err.msg, quoted) != NULL, "%s", err.msg);
        mem_close(m);
    }
    CHECK({"llama", "{\"model_type\": \"ABSENT\"}", QC_E_INPUT, "model_type"},
          {"llama", "{\"architectures\": [\"LlamaForSequenceClassification\"]}", QC_E_UNSUPPORTED,
           "LlamaForSequenceClassification"},
          {"llama", "{\"architectures\": []}", QC_OK, NULL},
          {"llama", "{\"architectures\": \"ABSENT\"}", QC_OK, NULL},
          {"llama", "{\"hidden_act\": \"relu2\"}", QC_E_UNSUPPORTED, "relu2"});
}
END_TEST

START_TEST(fields)
{
    /* what published configs of these families carry besides the settings */
    CHECK({"llama",
           "{\"_name_or_path\": \"x\", \"is_llama_config\": true, \"rope_interleaved\": false, "
           "\"transformers.js_config\": "
           "{\"kv_cache_dtype\": {\"q4f16\": \"float16\"}}, \"pad_token_id\": 2, \"dtype\": \"bfloat16\"}",
           QC_OK, NULL},
          {"llama",
           "{\"unsloth_version\": \"2024.9\", \"_attn_implementation_autoset\": true, \"tokenizer_class\": "
           "\"T\", "
           "\"temperature\": 0.6, \"max_sequence_length\": 2048, \"id2label\": {\"0\": \"A\"}}",
           QC_OK, NULL},
          {"qwen2", "{\"use_mrope\": false}", QC_OK, NULL}, {"llama", "{\"unheard_of\": null}", QC_OK, NULL},
          {"llama", "{\"pruned_heads\": {}, \"chunk_size_feed_forward\": 0, \"is_encoder_decoder\": false}",
           QC_OK, NULL},
          {"llama", "{\"residual_multiplier\": 1.0}", QC_OK, NULL});
    CHECK({"llama", "{\"unheard_of\": 3}", QC_E_UNSUPPORTED, "MEM/config.json: field \"unheard_of\""},
          {"llama", "{\"unheard_of\": false}", QC_E_UNSUPPORTED, "unheard_of"},
          {"llama", "{\"rope_interleaved\": true}", QC_E_UNSUPPORTED, "rope_interleaved"},
          {"qwen2", "{\"use_mrope\": true}", QC_E_UNSUPPORTED, "use_mrope"},
          {"llama", "{\"residual_multiplier\": 0.22}", QC_E_UNSUPPORTED, "residual_multiplier"},
          {"llama", "{\"num_experts\": 8}", QC_E_UNSUPPORTED, "num_experts"},
          {"llama", "{\"pruned_heads\": {\"0\": [1]}}", QC_E_UNSUPPORTED, "pruned_heads"},
          {"llama", "{\"attn_logit_softcapping\": 50.0}", QC_E_UNSUPPORTED, "attn_logit_softcapping"},
          {"llama", "{\"partial_rotary_factor\": 0.5}", QC_E_UNSUPPORTED, "partial_rotary_factor"},
          {"llama", "{\"auto_map\": {\"AutoModelForCausalLM\": \"m.X\"}}", QC_E_UNSUPPORTED, "auto_map"},
          {"llama", "{\"quantization_config\": {\"quant_method\": \"gptq\"}}", QC_E_UNSUPPORTED,
           "quantization_config"});
    CHECK({"llama", "{\"hidden_size\": \"128\"}", QC_E_INPUT, "hidden_size"},
          {"llama", "{\"hidden_size\": 128.5}", QC_E_INPUT, "hidden_size"},
          {"llama", "{\"num_hidden_layers\": 0}", QC_E_INPUT, "num_hidden_layers"},
          {"llama", "{\"num_hidden_layers\": 1e18}", QC_E_INPUT, "num_hidden_layers"},
          {"llama", "{\"intermediate_size\": -1}", QC_E_INPUT, "intermediate_size"},
          {"llama", "{\"rms_norm_eps\": \"1e-5\"}", QC_E_INPUT, "rms_norm_eps"},
          {"llama", "{\"rms_norm_eps\": -1}", QC_E_INPUT, "rms_norm_eps"},
          {"llama", "{\"attention_bias\": 1}", QC_E_INPUT, "attention_bias"},
          {"llama", "{\"num_hidden_layers\": \"ABSENT\"}", QC_OK,
           "num_hidden_layers is absent, class default 32"});
}
END_TEST

/* Each row of the table of docs/families.md: refused by name, but for the value that switches it off. */
START_TEST(refused_fields)
{
    char path[4096], line[512], key[64], neutral[64], patch[256];
    int n = 0;
    snprintf(path, sizeof path, "%s/docs/families.md", getenv("QC_SOURCE_ROOT"));
    FILE *f = fopen(path, "r");
    ck_assert_ptr_nonnull(f);
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "| `%63[a-z_A-Z]` | %63s |", key, neutral) != 2)
            continue;
        snprintf(patch, sizeof patch, "{\"%s\": 7}", key);
        check_changes(&(change){"llama", patch, QC_E_UNSUPPORTED, key}, 1);
        snprintf(patch, sizeof patch, "{\"%s\": %s}", key, neutral);
        check_changes(&(change){"llama", patch, QC_OK, NULL}, 1);
        n++;
    }
    fclose(f);
    ck_assert_int_gt(n, 30);
}
END_TEST

/* A family reads its own fields; in others, which would compute something else, they are refused. */
START_TEST(fields_of_families)
{
    CHECK({"gemma2", "{\"sliding_window_pattern\": 2}", QC_E_UNSUPPORTED, "sliding_window_pattern"},
          {"gemma2", "{\"rope_local_base_freq\": 1e4}", QC_E_UNSUPPORTED, "rope_local_base_freq"},
          {"gemma2", "{\"attn_logit_softcapping\": \"ABSENT\"}", QC_OK, "attn_logit_softcapping is absent"},
          {"gemma2", "{\"query_pre_attn_scalar\": 0}", QC_E_INPUT, "query_pre_attn_scalar"},
          {"gemma2", "{\"final_logit_softcapping\": -30}", QC_E_INPUT, "final_logit_softcapping"},
          {"gemma2", "{\"hidden_activation\": \"relu\"}", QC_E_UNSUPPORTED, "hidden_activation \"relu\""},
          {"gemma2", "{\"hidden_act\": \"relu\"}", QC_OK, NULL}, /* its class does not look at it */
          {"gemma3_text", "{\"use_bidirectional_attention\": true}", QC_E_UNSUPPORTED, "bidirectional"},
          {"gemma3_text", "{\"sliding_window_pattern\": 0}", QC_E_INPUT, "sliding_window_pattern"},
          {"gemma3_text", "{\"rope_local_base_freq\": \"ABSENT\"}", QC_OK, "rope_local_base_freq is absent"},
          {"gemma3_text",
           "{\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 1e6}, \"sliding_attention\": "
           "{\"rope_theta\": 2e4}}}",
           QC_E_INPUT, "rope_local_base_freq is 10000 at the top level but 20000"},
          {"gemma3_text", "{\"rope_parameters\": {\"rope_theta\": 1e6}}", QC_E_UNSUPPORTED, "layer type"},
          {"olmo2", "{\"clip_qkv\": 8}", QC_E_UNSUPPORTED, "clip_qkv"},
          {"olmo2", "{\"sliding_window\": 16}", QC_E_UNSUPPORTED, "sliding window"});
    CHECK(
        {"granite", "{\"residual_multiplier\": 0}", QC_E_INPUT, "residual_multiplier"},
        {"granite", "{\"logits_scaling\": \"x\"}", QC_E_INPUT, "logits_scaling"},
        {"granite", "{\"attention_multiplier\": \"ABSENT\"}", QC_OK,
         "attention_multiplier is absent, class default 1"},
        {"smollm3", "{\"no_rope_layers\": [1, 0]}", QC_E_INPUT, "no_rope_layers"},
        {"smollm3", "{\"no_rope_layers\": [1, 0, 2]}", QC_E_INPUT, "entry 2 of \"no_rope_layers\""},
        {"smollm3", "{\"no_rope_layer_interval\": 0}", QC_E_INPUT, "no_rope_layer_interval"},
        {"phi3", "{\"lm_head_bias\": true}", QC_E_UNSUPPORTED, "lm_head_bias"},
        {"phi3", "{\"lm_head_bias\": false, \"full_attn_mod\": 1, \"interpolate_factor\": 1}", QC_OK, NULL},
        {"phi3", "{\"auto_map\": {\"AutoConfig\": \"configuration_phi3.Phi3Config\"}}", QC_OK, NULL},
        {"phi3", "{\"partial_rotary_factor\": 0.3}", QC_OK, NULL}, /* 4 of 16 */
        {"phi3", "{\"partial_rotary_factor\": 0.2}", QC_E_INPUT, "partial_rotary_factor 0.2 of head_dim 16"},
        {"phi3", "{\"partial_rotary_factor\": 1.5}", QC_E_UNSUPPORTED, "partial_rotary_factor 1.5"});
    CHECK({"phi3",
           "{\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1], \"long_factor\": [1]}}",
           QC_E_INPUT, "\"short_factor\" is not a list of 8 numbers"},
          {"phi3",
           "{\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1, 1, 1, 1, 1, 1, 1, 0], "
           "\"long_factor\": [1, 1, 1, 1, 1, 1, 1, 1]}}",
           QC_E_INPUT, "entry 7 of \"short_factor\""},
          {"phi3",
           "{\"original_max_position_embeddings\": 1, \"rope_scaling\": {\"type\": \"longrope\", "
           "\"short_factor\": "
           "[1, 1, 1, 1, 1, 1, 1, 1], \"long_factor\": [1, 1, 1, 1, 1, 1, 1, 1]}}",
           QC_E_INPUT, "original length of 1"});
}
END_TEST

START_TEST(broken_documents)
{
    static const char *const texts[] = {"",
                                        "[]",
                                        "{",
                                        "{\"model_type\": \"llama\", \"model_type\": \"llama\"}",
                                        "{} x",
                                        "{\"model_type\": 3}",
                                        "{\"text_config\": 1, \"model_type\": \"llama\"}",
                                        "null"};
    for (size_t i = 0; i <= sizeof texts / sizeof texts[0]; i++) {
        mem_source *m = mem_tiny("llama");
        qc_model_config config;
        qc_err err = {0};
        mem_set_file(m, "config.json", i ? texts[i - 1] : NULL);
        ck_assert_msg(qc_model_config_load(&m->base, &config, &err) == QC_E_INPUT, "%zu", i);
        ck_assert_ptr_nonnull(strstr(err.msg, "config.json"));
        mem_close(m);
    }
}
END_TEST

START_TEST(c1_head_dim)
{
    CHECK({"llama", "{\"head_dim\": null}", QC_OK, NULL},
          {"llama", "{\"head_dim\": 0}", QC_E_INPUT, "head_dim"},
          {"llama", "{\"head_dim\": 7}", QC_E_INPUT, "head_dim"},
          {"qwen3", "{\"head_dim\": \"ABSENT\"}", QC_OK, "head_dim is absent, class default 128"},
          {"llama", "{\"hidden_size\": 130}", QC_E_INPUT, "head_dim is not given"});
    qc_model_config a = load("llama", "{}"), b = load("qwen3", "{\"head_dim\": \"ABSENT\"}"),
                    c = load("qwen3", "{\"head_dim\": null}");
    ck_assert_int_eq(a.head_dim, 32);
    ck_assert_int_eq(b.head_dim, 128);
    ck_assert_int_eq(c.head_dim, 32); /* 128 / 4 */
    qc_model_config_clear(&a);
    qc_model_config_clear(&b);
    qc_model_config_clear(&c);
}
END_TEST

START_TEST(c5_kv_heads)
{
    CHECK({"llama", "{\"num_key_value_heads\": \"ABSENT\"}", QC_OK, "num_key_value_heads is absent"},
          {"llama", "{\"num_key_value_heads\": null}", QC_OK, "num_key_value_heads is null"},
          {"llama", "{\"num_key_value_heads\": 3}", QC_E_INPUT,
           "num_key_value_heads is 3, expected a divisor of num_attention_heads 4"},
          {"llama", "{\"num_key_value_heads\": 0}", QC_E_INPUT, "num_key_value_heads"});
    static const struct {
        const char *model, *patch;
        int64_t n;
    } cases[] = {
        {"llama", "{\"num_key_value_heads\": \"ABSENT\"}", 4},
        {"llama", "{\"num_key_value_heads\": null}", 4},
        {"mistral", "{\"num_key_value_heads\": \"ABSENT\"}", 4}, /* the class's 8 does not divide 4 heads */
        {"mistral", "{\"num_key_value_heads\": \"ABSENT\", \"num_attention_heads\": 32}", 8}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qc_model_config c = load(cases[i].model, cases[i].patch);
        ck_assert_int_eq(c.n_kv_heads, cases[i].n);
        qc_model_config_clear(&c);
    }
}
END_TEST

static void check_eos(const char *config, const char *generation, const char *tokenizer, const int *eos,
                      int n_eos, const char *expected)
{
    mem_source *m = mem_tiny("llama");
    qc_model_config c;
    qc_err err = {0};
    mem_patch(m, config);
    mem_set_file(m, "generation_config.json", generation);
    mem_set_file(m, "tokenizer_config.json", tokenizer);
    ck_assert_msg(qc_model_config_load(&m->base, &c, &err) == QC_OK, "%s", err.msg);
    ck_assert_int_eq(c.n_eos, n_eos);
    for (int i = 0; i < 8; i++)
        ck_assert_int_eq(c.eos[i], i < n_eos ? eos[i] : -1);
    ck_assert_msg(!expected || (c.notes && strstr(c.notes, expected)), "notes: %s",
                  c.notes ? c.notes : "none");
    ck_assert(expected || !c.notes);
    qc_model_config_clear(&c);
    mem_close(m);
}

START_TEST(c6_end_ids)
{
    qc_log_set_level(QC_LOG_QUIET);
    static const int both[] = {7, 9, 11}, swapped[] = {9, 7};
    const char *tokenizer = "{\"eos_token\": {\"content\": \"<end>\"}, \"added_tokens_decoder\": {\"11\": "
                            "{\"content\": \"<end>\"}}}";
    check_eos("{\"eos_token_id\": 7, \"bos_token_id\": null}", "{\"eos_token_id\": [7, 9]}", NULL, both, 2,
              "all 2 end ids are kept, 7 first");
    check_eos("{\"eos_token_id\": 7}", "{\"eos_token_id\": [7, 9]}", tokenizer, both, 3,
              "eos_token has id 11");
    check_eos("{\"eos_token_id\": 7}", "{\"eos_token_id\": 9}", NULL, swapped, 2, "9 first");
    check_eos("{\"eos_token_id\": [7, 9]}", NULL, NULL, both, 2, NULL);
    check_eos("{\"eos_token_id\": [7, 9]}", "{\"eos_token_id\": null}", "{\"eos_token\": null}", both, 2,
              NULL);
    check_eos("{\"eos_token_id\": -1}", "{}", NULL, NULL, 0, NULL);
    qc_model_config c = load("llama", "{\"bos_token_id\": null}");
    ck_assert_int_eq(c.bos, -1);
    qc_model_config_clear(&c);
    CHECK({"llama", "{\"eos_token_id\": 512}", QC_E_INPUT,
           "\"eos_token_id\" is 512, expected less than the vocabulary's 512"},
          {"llama", "{\"eos_token_id\": 4294967295}", QC_E_INPUT, "4294967295"},
          {"llama", "{\"bos_token_id\": -1}", QC_OK, NULL},
          {"llama", "{\"eos_token_id\": \"x\"}", QC_E_INPUT, "eos_token_id"},
          {"llama", "{\"eos_token_id\": [1,2,3,4,5,6,7,8,9]}", QC_E_UNSUPPORTED, "more than 8"});
}
END_TEST

START_TEST(c7_vocab_size)
{
    CHECK(
        {"llama", "{\"vocab_size\": -1}", QC_OK, "vocab_size is -1 but the embedding has 512 rows"},
        {"llama", "{\"vocab_size\": 0}", QC_OK, "512 rows"},
        {"llama", "{\"vocab_size\": 300}", QC_OK, "vocab_size is 300"},
        {"llama", "{\"vocab_size\": \"ABSENT\"}", QC_OK, "vocab_size is absent, the embedding has 512 rows"});
    qc_model_config c = load("llama", "{\"vocab_size\": 300}");
    ck_assert_int_eq(c.vocab, 512);
    qc_model_config_clear(&c);
}
END_TEST

START_TEST(c8_text_config)
{
    CHECK({"llama", "{\"model_type\": \"paligemma\", \"text_config\": {\"model_type\": \"llama\"}}",
           QC_E_UNSUPPORTED, "\"paligemma\""},
          {"llama", "{\"text_config\": {\"model_type\": \"mamba\"}}", QC_E_UNSUPPORTED, "mamba"},
          {"llama", "{\"text_config\": {\"model_type\": \"llama\"}, \"vision_config\": {}}", QC_E_UNSUPPORTED,
           "vision_config"},
          {"llama", "{\"text_config\": {\"model_type\": \"llama\", \"quantization_config\": {}}}",
           QC_E_UNSUPPORTED, "quantization_config"},
          {"llama", "{\"text_config\": {\"model_type\": \"llama\", \"unheard_of\": 1}}", QC_E_UNSUPPORTED,
           "unheard_of"});
}
END_TEST

static void check_slides(const char *model, const char *patch, int window, const char *layers)
{
    qc_model_config c = load(model, patch);
    ck_assert_int_eq(c.sliding_window, window);
    for (int64_t i = 0; i < c.n_layers; i++)
        ck_assert_msg(c.layer_slides[i] == (layers[i] == 's'), "%s %s: layer %d", model, patch, (int)i);
    qc_model_config_clear(&c);
}

START_TEST(sliding_windows)
{
#define LAYERS(a, b, c) "\"layer_types\": [\"" a "_attention\", \"" b "_attention\", \"" c "_attention\"]"
    check_slides("mistral", "{}", 16, "sss");
    check_slides("mistral", "{\"sliding_window\": null}", 0, "fff");
    check_slides("mistral", "{\"sliding_window\": \"ABSENT\"}", 4096, "sss");
    check_slides("mistral", "{" LAYERS("sliding", "sliding", "sliding") "}", 16, "sss");
    check_slides("qwen2", "{}", 0, "fff");
    check_slides("qwen2", "{\"use_sliding_window\": true}", 8, "ffs");
    check_slides("qwen2", "{\"use_sliding_window\": true, " LAYERS("sliding", "full", "sliding") "}", 8,
                 "sfs");
    check_slides("qwen2", "{\"use_sliding_window\": true, \"sliding_window\": null}", 0, "fff");
    check_slides(
        "llama-bias",
        "{\"sliding_window\": null, \"use_sliding_window\": false, " LAYERS("full", "full", "full") "}", 0,
        "fff");
    CHECK({"qwen2", "{" LAYERS("full", "full", "sliding") "}", QC_E_INPUT, "layer 2 slides"},
          {"mistral", "{" LAYERS("full", "sliding", "sliding") "}", QC_E_INPUT, "layer 0 does not slide"},
          {"mistral", "{\"use_sliding_window\": false}", QC_E_UNSUPPORTED, "use_sliding_window"},
          {"mistral", "{\"sliding_window\": 0}", QC_E_INPUT, "sliding_window"},
          {"llama", "{\"sliding_window\": 16}", QC_E_UNSUPPORTED, "sliding window"},
          {"qwen2", "{\"layer_types\": [\"full_attention\"]}", QC_E_INPUT, "list of 3"},
          {"qwen2", "{" LAYERS("full", "chunked", "full") "}", QC_E_UNSUPPORTED, "chunked_attention"});
}
END_TEST

/* One member of the config takes an odd value: whatever comes out, it is a code of ours with one line, or a
 * config that holds together. A failure prints the patch. */
START_TEST(odd_values)
{
    static const char *const values[] = {"null",
                                         "true",
                                         "false",
                                         "0",
                                         "1",
                                         "-1",
                                         "2",
                                         "3.5",
                                         "1e308",
                                         "1e18",
                                         "-1e18",
                                         "65536",
                                         "\"\"",
                                         "\"llama\"",
                                         "[]",
                                         "{}",
                                         "[null]",
                                         "[1e9]",
                                         "{\"rope_type\": \"yarn\", \"factor\": 1e300}",
                                         "{\"a\": {\"b\": []}}",
                                         "\"ABSENT\""};
    static const char *const models[] = {"llama3-rope", "mistral", "qwen2",   "qwen3-yarn", "gemma2",
                                         "gemma3_text", "phi3",    "granite", "smollm3",    "seed_oss"};
    qc_log_set_level(QC_LOG_QUIET);
    for (size_t k = 0; k < sizeof models / sizeof models[0]; k++) {
        mem_source *base = mem_tiny(models[k]), *m = mem_copy(&base->base);
        char *text = NULL;
        size_t n_bytes;
        ck_assert_int_eq(base->base.side_file(&base->base, "config.json", &text, &n_bytes, NULL), QC_OK);
        cJSON *doc = cJSON_Parse(text);
        for (const cJSON *item = doc->child; item; item = item->next)
            for (size_t v = 0; v < sizeof values / sizeof values[0]; v++) {
                char patch[256];
                qc_model model;
                qc_err err = {0};
                snprintf(patch, sizeof patch, "{\"%s\": %s}", item->string, values[v]);
                mem_set_file(m, "config.json", text);
                mem_patch(m, patch);
                int rc = qc_model_open(&m->base, &model, &err);
                ck_assert_msg(rc == QC_OK || ((rc == QC_E_INPUT || rc == QC_E_UNSUPPORTED) && err.msg[0]),
                              "%s: %d", patch, rc);
                if (rc < 0)
                    continue;
                const qc_model_config *c = &model.config;
                ck_assert_msg(c->n_heads % c->n_kv_heads == 0 && c->head_dim % 2 == 0 &&
                                  isfinite(c->rope.attention_factor) && c->rope.theta > 0 &&
                                  c->rms_eps >= 0 && c->rotary_dim >= 2 && c->rotary_dim <= c->head_dim &&
                                  isnormal(c->attention_scale) && isnormal(c->embedding_scale) &&
                                  isnormal(c->residual_scale) && isnormal(c->logit_scale),
                              "%s", patch);
                qc_model_close(&model);
            }
        cJSON_Delete(doc);
        qc_free(text);
        mem_close(m);
        mem_close(base);
    }
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"families", other_families_are_refused_by_name},
        {"fields", fields},
        {"refused_fields", refused_fields},
        {"fields_of_families", fields_of_families},
        {"broken", broken_documents},
        {"c1_head_dim", c1_head_dim},
        {"c5_kv_heads", c5_kv_heads},
        {"c6_end_ids", c6_end_ids},
        {"c7_vocab_size", c7_vocab_size},
        {"c8_text_config", c8_text_config},
        {"sliding_windows", sliding_windows},
        {"odd_values", odd_values},
        {NULL, NULL},
    };
    return run_tests("config", cases);
}
