/* The forward pass seen through changes: ablations with the effect that golden.json states, configs in the
 * newer spelling, shapes and lengths that the golden files do not have, thread counts. */
#include "golden.h"
#include "mem_source.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_rng.h"
#include "qc_test.h"
#include "ref_forward.h"
#include "tol.h"

static qc_backend *open_cpu(qc_pool *pool)
{
    qc_backend *be = NULL;
    qc_err err = {0};
    ck_assert_msg(qc_backend_cpu_new(pool, QC_COMPUTE_F32, &be, &err) == QC_OK, "%s", err.msg);
    return be;
}

static run_result run_source(const mem_source *m, qc_pool *pool, const int32_t *ids, int64_t n_seqs,
                             int64_t n_tokens)
{
    qc_backend *be = open_cpu(pool);
    qc_model model;
    qc_err err = {0};
    ck_assert_msg(qc_model_open(&m->base, &model, &err) == QC_OK, "%s", err.msg);
    run_result r = run_model(&model, be, ids, n_seqs, n_tokens, 128);
    qc_model_close(&model);
    qc_backend_close(be);
    return r;
}

/* ---- ablations ---- */

typedef struct ablation {
    const char *model, *name; /* folder; name in golden.json */
    const char *patch;        /* of config.json */
    const char *ending;       /* tensors to change, or NULL */
    enum { EDIT_NONE, EDIT_REMOVE, EDIT_ZERO, EDIT_ONE } edit;
} ablation;

static const ablation ablations[] = {
    {"llama", "rope_theta 500000 instead of 10000", "{\"rope_theta\": 500000}", NULL, EDIT_NONE},
    {"llama", "rms_norm_eps 1e-3 instead of 1e-5", "{\"rms_norm_eps\": 1e-3}", NULL, EDIT_NONE},
    {"llama-bias", "biases left out", "{\"attention_bias\": false, \"mlp_bias\": false}", ".bias",
     EDIT_REMOVE},
    {"llama3-rope", "no rope scaling", "{\"rope_scaling\": null}", NULL, EDIT_NONE},
    {"llama3-rope", "linear scaling by 8", "{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 8}}", NULL,
     EDIT_NONE},
    {"mistral", "no sliding window", "{\"sliding_window\": null}", NULL, EDIT_NONE},
    {"mistral", "window 17", "{\"sliding_window\": 17}", NULL, EDIT_NONE},
    {"mistral", "window 15", "{\"sliding_window\": 15}", NULL, EDIT_NONE},
    {"qwen2", "biases left out", "{}", ".bias", EDIT_ZERO},
    {"qwen2", "sliding_window obeyed although use_sliding_window is false",
     "{\"use_sliding_window\": true, \"max_window_layers\": 0}", NULL, EDIT_NONE},
    {"qwen3", "q_norm and k_norm weights taken as 1", "{}", "_norm.weight", EDIT_ONE},
    {"qwen3-untied", "q_norm and k_norm weights taken as 1", "{}", "_norm.weight", EDIT_ONE},
    {"qwen3-yarn", "no rope scaling", "{\"rope_scaling\": null}", NULL, EDIT_NONE},
    {"qwen3-yarn", "yarn without the attention factor",
     "{\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4, \"original_max_position_embeddings\": 32, "
     "\"attention_factor\": 1}}",
     NULL, EDIT_NONE},
    {"phi3", "no sliding window", "{\"sliding_window\": null}", NULL, EDIT_NONE},
    {"gemma2", "no attention softcap", "{\"attn_logit_softcapping\": null}", NULL, EDIT_NONE},
    {"gemma2", "no final softcap", "{\"final_logit_softcapping\": null}", NULL, EDIT_NONE},
    {"gemma2", "no sliding window", "{\"sliding_window\": 512}", NULL, EDIT_NONE},
    {"gemma2", "sliding and full layers swapped",
     "{\"layer_types\": [\"full_attention\", \"sliding_attention\", \"full_attention\"]}", NULL, EDIT_NONE},
    {"gemma2", "scale by head_dim instead of query_pre_attn_scalar", "{\"query_pre_attn_scalar\": 32}", NULL,
     EDIT_NONE},
    {"gemma3_text", "no sliding window", "{\"sliding_window\": 512}", NULL, EDIT_NONE},
    {"gemma3_text", "local layers use the global theta", "{\"rope_local_base_freq\": 1000000}", NULL,
     EDIT_NONE},
    {"gemma3_text", "global layer uses the local theta", "{\"rope_theta\": 10000}", NULL, EDIT_NONE},
    {"gemma3_text", "q_norm and k_norm weights taken as 0 (factor 1)", "{}", "_norm.weight", EDIT_ZERO},
    {"olmo2", "q_norm and k_norm weights taken as 1", "{}", "_norm.weight", EDIT_ONE},
    {"granite", "embedding_multiplier 1", "{\"embedding_multiplier\": 1}", NULL, EDIT_NONE},
    {"granite", "residual_multiplier 1", "{\"residual_multiplier\": 1}", NULL, EDIT_NONE},
    {"granite", "logits_scaling 1", "{\"logits_scaling\": 1}", NULL, EDIT_NONE},
    {"granite", "scale by head_dim", "{\"attention_multiplier\": 0.25}", NULL, EDIT_NONE},
    {"seed_oss", "biases left out", "{\"attention_bias\": false, \"attention_out_bias\": false}", ".bias",
     EDIT_REMOVE},
    {"seed_oss", "o bias left out", "{\"attention_out_bias\": false}", "o_proj.bias", EDIT_REMOVE},
    {"smollm3", "every layer rotates", "{\"no_rope_layers\": [1, 1, 1]}", NULL, EDIT_NONE},
    {"smollm3", "no layer rotates", "{\"no_rope_layers\": [0, 0, 0]}", NULL, EDIT_NONE},
    {"smollm3", "the layer without rope slides", "{\"use_sliding_window\": true, \"layer_types\": null}",
     NULL, EDIT_NONE},
    {"qwen3_moe", "norm_topk_prob false", "{\"norm_topk_prob\": false}", NULL, EDIT_NONE},
    {"qwen3_moe", "top 1 instead of top 2", "{\"num_experts_per_tok\": 1}", NULL, EDIT_NONE},
    {"mixtral", "top 1 instead of top 2", "{\"num_experts_per_tok\": 1}", NULL, EDIT_NONE},
};

static void edit(mem_source *m, const ablation *a)
{
    mem_patch(m, a->patch);
    if (a->edit == EDIT_REMOVE)
        mem_remove_all(m, a->ending);
    if (a->edit == EDIT_ZERO || a->edit == EDIT_ONE)
        mem_scale_all(m, a->ending, 0, a->edit == EDIT_ONE ? 1 : 0);
}

static qc_st_file open_golden(const char *model)
{
    char path[128];
    qc_err err = {0};
    qc_st_file golden;
    snprintf(path, sizeof path, "models/tiny/%s/golden.safetensors", model);
    ck_assert_msg(qc_st_open(test_data(path), &golden, &err) == QC_OK, "%s", err.msg);
    return golden;
}

static cJSON *golden_json(const char *model)
{
    char path[128];
    cJSON *doc = NULL;
    snprintf(path, sizeof path, "models/tiny/%s/golden.json", model);
    ck_assert_int_eq(qc_json_load(test_data(path), 1 << 24, true, &doc, NULL), QC_OK);
    return doc;
}

static void stated_effect(const ablation *a, double *ret_change, double *ret_nll)
{
    cJSON *doc = golden_json(a->model);
    const cJSON *effect = qc_json_get(qc_json_get(doc, "ablations"), a->name);
    ck_assert_msg(effect != NULL, "%s: no ablation \"%s\"", a->model, a->name);
    *ret_change = qc_json_get(effect, "max_abs_logit_change")->valuedouble;
    *ret_nll = qc_json_get(effect, "nll_sum_total")->valuedouble;
    cJSON_Delete(doc);
}

static void check_ablation(const ablation *a)
{
    qc_st_file golden = open_golden(a->model);
    int64_t n_ids, n;
    int32_t *ids = golden_ints(&golden, "input_ids", &n_ids);
    float *logits = golden_floats(&golden, "logits", &n);
    mem_source *m = mem_tiny(a->model);
    edit(m, a);
    run_result r = run_source(m, NULL, ids, 2, n_ids / 2);
    double change, nll, got = max_abs_diff(r.logits, logits, n),
                        got_nll = run_nll(&r, ids, 0) + run_nll(&r, ids, 1);
    stated_effect(a, &change, &nll);
    ck_assert_double_gt(got, 1000 * TOL_LOGITS);
    ck_assert_msg(fabs(got - change) <= TOL_STATED_CHANGE * change, "%s, %s: %g, expected %g", a->model,
                  a->name, got, change);
    ck_assert_msg(fabs(got_nll - nll) <= 2 * TOL_NLL_SUM, "%s, %s: nll %g, expected %g", a->model, a->name,
                  got_nll, nll);
    run_free(&r);
    mem_close(m);
    qc_free(ids);
    qc_free(logits);
    qc_st_close(&golden);
}

START_TEST(ablations_have_the_stated_effect)
{
    for (size_t i = 0; i < sizeof ablations / sizeof ablations[0]; i++)
        check_ablation(&ablations[i]);
}
END_TEST

static bool is_tried(const char *model, const char *name)
{
    for (size_t i = 0; i < sizeof ablations / sizeof ablations[0]; i++)
        if (strcmp(ablations[i].model, model) == 0 && strcmp(ablations[i].name, name) == 0)
            return true;
    return false;
}

/* All but the exact GELU, which no setting asks for; its effect, 0.0016, is 16 times what t_golden allows. */
START_TEST(all_stated_ablations_are_tried)
{
    for (size_t i = 0; i < sizeof ablations / sizeof ablations[0]; i++) {
        cJSON *doc = golden_json(ablations[i].model);
        for (const cJSON *a = qc_json_get(doc, "ablations")->child; a; a = a->next)
            ck_assert_msg(is_tried(ablations[i].model, a->string) ||
                              strcmp(a->string, "exact gelu instead of tanh") == 0,
                          "%s: \"%s\" is not tried", ablations[i].model, a->string);
        cJSON_Delete(doc);
    }
}
END_TEST

/* ---- other spellings of the same model ---- */

static void expect_same_logits(const char *model, mem_source *changed)
{
    qc_st_file golden = open_golden(model);
    int64_t n_ids;
    int32_t *ids = golden_ints(&golden, "input_ids", &n_ids);
    mem_source *m = mem_tiny(model);
    run_result a = run_source(m, NULL, ids, 2, n_ids / 2), b = run_source(changed, NULL, ids, 2, n_ids / 2);
    ck_assert_int_eq(a.vocab, b.vocab);
    ck_assert_mem_eq(a.logits, b.logits, (size_t)(n_ids * a.vocab) * sizeof(float));
    run_free(&a);
    run_free(&b);
    mem_close(m);
    mem_close(changed);
    qc_free(ids);
    qc_st_close(&golden);
}

START_TEST(newer_spelling_gives_identical_values)
{
    static const char *const names[] = {"llama3-rope", "qwen3"};
    for (int i = 0; i < 2; i++) {
        char path[128], *text = NULL;
        size_t n_bytes;
        snprintf(path, sizeof path, "models/configs-v5/%s.json", names[i]);
        ck_assert_int_eq(qc_file_read(test_data(path), 1 << 20, &text, &n_bytes, NULL), QC_OK);
        mem_source *m = mem_tiny(names[i]);
        mem_set_file(m, "config.json", text);
        qc_free(text);
        expect_same_logits(names[i], m);
    }
}
END_TEST

/* C-8: the settings of text_config count, those around it do not. */
START_TEST(c8_text_config)
{
    mem_source *m = mem_tiny("qwen3");
    char text[8192];
    char *inner = NULL;
    size_t n_bytes;
    ck_assert_int_eq(m->base.side_file(&m->base, "config.json", &inner, &n_bytes, NULL), QC_OK);
    snprintf(text, sizeof text,
             "{\"model_type\": \"qwen3\", \"hidden_size\": 999, \"rope_theta\": 5, \"text_config\": %s}",
             inner);
    qc_free(inner);
    mem_set_file(m, "config.json", text);
    expect_same_logits("qwen3", m);
}
END_TEST

/* C-3: theta at the top, theta inside. */
START_TEST(c3_theta_nested)
{
    mem_source *m = mem_tiny("qwen3");
    mem_patch(m, "{\"rope_theta\": \"ABSENT\", \"rope_scaling\": \"ABSENT\", \"rope_parameters\": "
                 "{\"rope_theta\": 1000000}}");
    expect_same_logits("qwen3", m);
    m = mem_tiny("qwen3");
    mem_patch(
        m,
        "{\"rope_theta\": \"ABSENT\", \"rope_scaling\": \"ABSENT\", \"rope_parameters\": "
        "{\"full_attention\": {\"rope_theta\": 1000000}, \"sliding_attention\": {\"rope_theta\": 1000000}}}");
    expect_same_logits("qwen3", m);
}
END_TEST

/* C-4: the formula's value given as a number is the same model. */
START_TEST(c4_attention_factor_given)
{
    mem_source *m = mem_tiny("qwen3-yarn");
    mem_patch(
        m, "{\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, \"original_max_position_embeddings\": 32, "
           "\"attention_factor\": 1.138629436111989}}");
    expect_same_logits("qwen3-yarn", m);
    m = mem_tiny("qwen3-yarn");
    mem_patch(
        m, "{\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, \"original_max_position_embeddings\": 32, "
           "\"attention_factor\": null, \"beta_fast\": 32, \"beta_slow\": 1, \"truncate\": true}}");
    expect_same_logits("qwen3-yarn", m);
}
END_TEST

/* ---- against the plain float64 pass ---- */

static void random_ids(int32_t *ids, int n, int vocab, uint64_t seed)
{
    qc_rng rng;
    qc_rng_seed(&rng, seed);
    for (int i = 0; i < n; i++)
        ids[i] = (int32_t)qc_rng_below(&rng, (uint64_t)vocab);
}

/* Returns the largest attention score. */
static double expect_reference(mem_source *m, const mem_shape *s, int window, int n_tokens)
{
    ref_params p = {s->hidden, s->n_layers, s->n_heads, s->n_kv_heads, s->head_dim, s->ffn, s->vocab, 1e-6,
                    1e4,       window,      0};
    int32_t *ids = qc_alloc((size_t)n_tokens, sizeof *ids);
    random_ids(ids, n_tokens, s->vocab, 5);
    double *want = ref_forward(m, &p, ids, n_tokens), worst = 0;
    run_result r = run_source(m, NULL, ids, 1, n_tokens);
    for (int64_t i = 0; i < (int64_t)n_tokens * s->vocab; i++) {
        ck_assert(isfinite(r.logits[i]));
        worst = fmax(worst, fabs((double)r.logits[i] - want[i]));
    }
    ck_assert_msg(worst <= TOL_LOGITS, "%s, window %d, %d tokens: logits differ by %g", s->family, window,
                  n_tokens, worst);
    run_free(&r);
    free(want);
    qc_free(ids);
    return p.max_score;
}

/* C-2: hidden 40, 4 heads of 16: the projections follow head_dim. */
START_TEST(c2_explicit_head_dim)
{
    mem_shape s = {"llama", "LlamaForCausalLM", 40, 3, 4, 2, 16, 96, 100, false};
    mem_source *m = mem_random(&s, 1);
    expect_reference(m, &s, 0, 40);
    mem_close(m);
}
END_TEST

/* Longer than a chunk of the projections and than any block of the attention; the window crosses their
 * borders. */
START_TEST(long_window)
{
    mem_shape s = {"qwen3", "Qwen3ForCausalLM", 32, 2, 2, 1, 16, 64, 64, true};
    mem_source *m = mem_random(&s, 2);
    expect_reference(m, &s, 0, 2500);
    mem_patch(m, "{\"use_sliding_window\": true, \"sliding_window\": 700, \"max_window_layers\": 0}");
    expect_reference(m, &s, 700, 2500);
    mem_close(m);
}
END_TEST

/* Lengths about the chunk of 512 tokens, and a single token. */
START_TEST(odd_lengths)
{
    static const int lengths[] = {1, 2, 511, 512, 513};
    mem_shape s = {"mistral", "MistralForCausalLM", 24, 2, 3, 1, 8, 40, 33, false};
    mem_source *m = mem_random(&s, 3);
    mem_patch(m, "{\"sliding_window\": 5}");
    for (int i = 0; i < 5; i++)
        expect_reference(m, &s, 5, lengths[i]);
    mem_close(m);
}
END_TEST

/* N-6: scores far beyond the float16 range stay finite and right. */
START_TEST(n6_large_scores)
{
    mem_shape s = {"llama", "LlamaForCausalLM", 64, 2, 4, 2, 16, 96, 100, false};
    mem_source *m = mem_random(&s, 4);
    mem_scale_all(m, "q_proj.weight", 320, 0);
    mem_scale_all(m, "k_proj.weight", 320, 0);
    ck_assert_double_gt(expect_reference(m, &s, 0, 64), 65504);
    mem_close(m);
}
END_TEST

START_TEST(same_bits_for_any_thread_count)
{
    static const int sizes[] = {1, 2, 7};
    mem_shape s = {"qwen3", "Qwen3ForCausalLM", 64, 2, 4, 2, 32, 160, 300, true};
    mem_source *m = mem_random(&s, 6);
    int32_t ids[700];
    random_ids(ids, 700, s.vocab, 7);
    run_result first = {0};
    for (int i = 0; i < 3; i++) {
        qc_pool *pool = NULL;
        ck_assert_int_eq(qc_pool_new(sizes[i], &pool, NULL), QC_OK);
        run_result r = run_source(m, pool, ids, 1, 700);
        if (i == 0) {
            first = r;
        } else {
            ck_assert_mem_eq(r.logits, first.logits, (size_t)(700 * s.vocab) * sizeof(float));
            run_free(&r);
        }
        qc_pool_free(pool);
    }
    run_free(&first);
    mem_close(m);
}
END_TEST

/* ---- quantized activations ---- */

/* y = x on the grid of docs/formats/qpk.md, section 6, in float64; returns the largest step. */
static double fake_quant(const float *x, double *y, int64_t n, int bits, int64_t group)
{
    double largest = 0, half = (1 << (bits - 1)) - 1;
    for (int64_t g = 0; g < n; g += group) {
        double max = 0, step;
        int64_t end = g + group < n ? g + group : n;
        for (int64_t i = g; i < end; i++)
            max = fabs((double)x[i]) > max ? fabs((double)x[i]) : max;
        step = max / half;
        largest = step > largest ? step : largest;
        for (int64_t i = g; i < end; i++)
            y[i] = step > 0 ? rint((double)x[i] / step) * step : 0;
    }
    return largest;
}

enum { ACT_TOKENS = 600 };

/* Input of one stage with and without quantization: on the grid, but for values within rounding of a half. */
static void expect_quantized(const qc_layer *off, qc_layer *on, qc_workspace *ws, qc_stage stage,
                             int64_t width, const float *x, int bits, int64_t group)
{
    float *a = qc_alloc(ACT_TOKENS * (size_t)width, sizeof *a),
          *b = qc_alloc(ACT_TOKENS * (size_t)width, sizeof *b);
    double *want = qc_alloc((size_t)width, sizeof *want);
    int64_t n_off = 0;
    qc_layer_set_acts(on, stage, bits, group);
    ck_assert_int_eq(qc_layer_stage_input(off, ws, stage, x, a, ACT_TOKENS, NULL), QC_OK);
    ck_assert_int_eq(qc_layer_stage_input(on, ws, stage, x, b, ACT_TOKENS, NULL), QC_OK);
    qc_layer_set_acts(on, stage, 0, 0);
    for (int64_t t = 0; t < ACT_TOKENS; t++) {
        double step = fake_quant(a + t * width, want, width, bits, group ? group : width);
        for (int64_t i = 0; i < width; i++) {
            double d = fabs((double)b[t * width + i] - want[i]);
            ck_assert_double_le(d, 1.001 * step);
            n_off += d > 1e-5 * step;
        }
    }
    ck_assert_int_le(n_off, ACT_TOKENS * width / 1000);
    ck_assert_mem_ne(a, b, ACT_TOKENS * (size_t)width * sizeof *a);
    qc_free(want);
    qc_free(a);
    qc_free(b);
}

START_TEST(activations_per_stage)
{
    mem_shape s = {"qwen3", "Qwen3ForCausalLM", 64, 1, 4, 2, 32, 160, 300, true};
    mem_source *m = mem_random(&s, 9);
    qc_backend *be = open_cpu(NULL);
    qc_model model;
    qc_layer *off, *on;
    qc_workspace *ws;
    static int32_t ids[ACT_TOKENS];
    static float x[ACT_TOKENS * 64];
    random_ids(ids, ACT_TOKENS, s.vocab, 10);
    ck_assert_int_eq(qc_model_open(&m->base, &model, NULL), QC_OK);
    ck_assert_int_eq(qc_workspace_new(&model, be, ACT_TOKENS, &ws, NULL), QC_OK);
    ck_assert_int_eq(qc_layer_load(&model, be, 0, &off, NULL), QC_OK);
    ck_assert_int_eq(qc_layer_load(&model, be, 0, &on, NULL), QC_OK);
    ck_assert_int_eq(qc_model_embed(&model, ids, ACT_TOKENS, x, NULL), QC_OK);
    for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++) {
        int64_t width = qc_stage_width(&model.config, (qc_stage)stage);
        expect_quantized(off, on, ws, (qc_stage)stage, width, x, 8, 0);
        expect_quantized(off, on, ws, (qc_stage)stage, width, x, 4, 0);
        expect_quantized(off, on, ws, (qc_stage)stage, width, x, 8, 32);
    }
    qc_layer_free(on);
    qc_layer_free(off);
    qc_workspace_free(ws);
    qc_model_close(&model);
    qc_backend_close(be);
    mem_close(m);
}
END_TEST

/* What the tensors say is obeyed: as by hand, and another result than without. Partners must agree. */
START_TEST(activations_from_tensors)
{
    static const char *const stage[] = {"q_proj.weight", "k_proj.weight", "v_proj.weight"};
    mem_source *m = mem_tiny("qwen3");
    qc_backend *be = open_cpu(NULL);
    qc_model model;
    qc_layer *by_hand, *by_file;
    qc_workspace *ws;
    qc_err err;
    char name[128];
    static float x[2][20 * 512];
    static int32_t ids[20];
    ck_assert_int_eq(qc_model_open(&m->base, &model, NULL), QC_OK);
    random_ids(ids, 20, (int)model.config.vocab, 11);
    ck_assert_int_le(model.config.hidden, 512);
    ck_assert_int_eq(qc_workspace_new(&model, be, 20, &ws, NULL), QC_OK);
    ck_assert_int_eq(qc_layer_load(&model, be, 0, &by_hand, NULL), QC_OK);
    qc_layer_set_acts(by_hand, QC_STAGE_QKV, 8, 32);
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "model.layers.0.self_attn.%s", stage[i]);
        mem_tensor_of(m, name)->info.act_bits = 8;
        ck_assert_int_eq(qc_layer_load(&model, be, 0, &by_file, &err), QC_E_UNSUPPORTED);
        mem_tensor_of(m, name)->info.act_group = 32;
    }
    ck_assert_msg(strstr(err.msg, "read the same activations but quantize them differently") != NULL, "%s",
                  err.msg);
    ck_assert_int_eq(qc_layer_load(&model, be, 0, &by_file, &err), QC_OK);
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(qc_model_embed(&model, ids, 20, x[i], NULL), QC_OK);
        ck_assert_int_eq(qc_layer_forward(i ? by_file : by_hand, ws, x[i], 20, NULL), QC_OK);
    }
    ck_assert_mem_eq(x[0], x[1], (size_t)(20 * model.config.hidden) * sizeof(float));
    qc_layer_set_acts(by_hand, QC_STAGE_QKV, 0, 0);
    ck_assert_int_eq(qc_model_embed(&model, ids, 20, x[0], NULL), QC_OK);
    ck_assert_int_eq(qc_layer_forward(by_hand, ws, x[0], 20, NULL), QC_OK);
    ck_assert_mem_ne(x[0], x[1], (size_t)(20 * model.config.hidden) * sizeof(float));
    qc_layer_free(by_hand);
    qc_layer_free(by_file);
    qc_workspace_free(ws);
    qc_model_close(&model);
    qc_backend_close(be);
    mem_close(m);
}
END_TEST

START_TEST(limits)
{
    mem_source *m = mem_tiny("llama");
    qc_backend *be = open_cpu(NULL);
    qc_model model;
    qc_err err = {0};
    qc_workspace *ws = NULL;
    qc_layer *layer = NULL;
    float x[2 * 128] = {0};
    static const int32_t bad[][2] = {{0, 512}, {-1, 0}};
    ck_assert_msg(qc_model_open(&m->base, &model, &err) == QC_OK, "%s", err.msg);
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(qc_model_embed(&model, bad[i], 2, x, &err), QC_E_INPUT);
        ck_assert_ptr_nonnull(strstr(err.msg, "0 to 511"));
    }
    ck_assert_int_eq(qc_workspace_new(&model, be, 1, &ws, &err), QC_OK);
    ck_assert_int_eq(qc_layer_load(&model, be, 0, &layer, &err), QC_OK);
    float *buffer = be->alloc(be, 256, &err);
    ck_assert_int_eq(be->upload(be, buffer, x, 256, &err), QC_OK);
    ck_assert_int_eq(qc_layer_forward(layer, ws, buffer, 2, &err), QC_E_USAGE);
    ck_assert_uint_eq(
        qc_layer_bytes(&model.config, QC_COMPUTE_F32),
        4 * (2 * 128 + 2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256)); /* norms, q o, k v, mlp */
    /* per token q and its mix, k, v, cos and sin; the width of the MLP counts for 512 tokens only */
    ck_assert_uint_eq(qc_workspace_bytes(&model.config, 4096),
                      4 * (4096 * (2 * 128 + 2 * 64 + 32) + 512 * (128 + 2 * 256)));
    be->free(be, buffer);
    qc_layer_free(layer);
    qc_workspace_free(ws);
    qc_layer_free(NULL);
    qc_workspace_free(NULL);
    qc_model_close(&model);
    qc_backend_close(be);
    mem_close(m);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"ablations", ablations_have_the_stated_effect},
        {"all_ablations", all_stated_ablations_are_tried},
        {"newer_spelling", newer_spelling_gives_identical_values},
        {"c8_text_config", c8_text_config},
        {"c3_theta_nested", c3_theta_nested},
        {"c4_attention_factor", c4_attention_factor_given},
        {"c2_explicit_head_dim", c2_explicit_head_dim},
        {"long_window", long_window},
        {"odd_lengths", odd_lengths},
        {"n6_large_scores", n6_large_scores},
        {"threads", same_bits_for_any_thread_count},
        {"activations_per_stage", activations_per_stage},
        {"activations_from_tensors", activations_from_tensors},
        {"limits", limits},
        {NULL, NULL},
    };
    return run_tests("forward", cases);
}
