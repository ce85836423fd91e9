/* Logits, hidden states and NLL of every supported test model against the values of transformers in float32.
 */
#include "golden.h"
#include "open.h"
#include "qc_alloc.h"
#include "qc_test.h"
#include "tol.h"

static const char *const models[] = {"gemma2",      "gemma3_text",  "granite",    "llama",    "llama-bias",
                                     "llama3-rope", "mistral",      "olmo2",      "phi3",     "qwen2",
                                     "qwen3",       "qwen3-untied", "qwen3-yarn", "seed_oss", "smollm3",
                                     "qwen3_moe",   "mixtral"};

static qc_source *open_source(const char *folder)
{
    qc_source *src = NULL;
    qc_err err = {0};
    ck_assert_msg(qc_source_open(test_data(folder), &src, &err) == QC_OK, "%s", err.msg);
    return src;
}

static qc_st_file open_golden(const char *folder, const char *file)
{
    char path[256];
    qc_err err = {0};
    qc_st_file golden;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    ck_assert_msg(qc_st_open(test_data(path), &golden, &err) == QC_OK, "%s", err.msg);
    return golden;
}

static qc_backend *open_cpu(void)
{
    qc_backend *be = NULL;
    qc_err err = {0};
    ck_assert_msg(qc_backend_cpu_new(NULL, QC_COMPUTE_F32, &be, &err) == QC_OK, "%s", err.msg);
    return be;
}

static void check_nll(const char *folder, const run_result *r, const int32_t *ids)
{
    char path[256];
    cJSON *doc = NULL;
    snprintf(path, sizeof path, "%s/golden.json", folder);
    ck_assert_int_eq(qc_json_load(test_data(path), 1 << 24, true, &doc, NULL), QC_OK);
    const cJSON *sums = qc_json_get(doc, "nll_sum");
    for (int64_t s = 0; s < r->n_seqs; s++) {
        double want = cJSON_GetArrayItem(sums, (int)s)->valuedouble, got = run_nll(r, ids, s);
        ck_assert_msg(fabs(got - want) <= TOL_NLL_SUM, "%s: nll of sequence %d: %.6f, expected %.6f", folder,
                      (int)s, got, want);
    }
    cJSON_Delete(doc);
}

static void check_golden(const char *folder, const qc_model *model, qc_backend *be)
{
    qc_st_file golden = open_golden(folder, "golden.safetensors");
    int64_t n_ids, n_logits, n_states;
    int32_t *ids = golden_ints(&golden, "input_ids", &n_ids);
    float *logits = golden_floats(&golden, "logits", &n_logits),
          *states = golden_floats(&golden, "hidden", &n_states);
    run_result r = run_model(model, be, ids, 2, n_ids / 2, 200);
    ck_assert_int_eq(n_logits, n_ids * r.vocab);
    ck_assert_int_eq(n_states, (r.n_layers + 1) * n_ids * r.hidden);
    double d_states = max_abs_diff(r.states, states, n_states),
           d_logits = max_abs_diff(r.logits, logits, n_logits);
    ck_assert_msg(d_states <= TOL_LOGITS, "%s: hidden states differ by %g", folder, d_states);
    ck_assert_msg(d_logits <= TOL_LOGITS, "%s: logits differ by %g", folder, d_logits);
    check_nll(folder, &r, ids);
    run_free(&r);
    qc_free(ids);
    qc_free(logits);
    qc_free(states);
    qc_st_close(&golden);
}

START_TEST(tiny_models)
{
    qc_backend *be = open_cpu();
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        char folder[64];
        qc_err err = {0};
        qc_model model;
        snprintf(folder, sizeof folder, "models/tiny/%s", models[i]);
        qc_source *src = open_source(folder);
        ck_assert_msg(qc_model_open(src, &model, &err) == QC_OK, "%s", err.msg);
        check_golden(folder, &model, be);
        qc_model_close(&model);
        qc_source_close(src);
    }
    qc_backend_close(be);
}
END_TEST

START_TEST(demo_model)
{
    qc_backend *be = open_cpu();
    qc_err err = {0};
    qc_model model;
    qc_source *src = open_source("models/demo-qwen3");
    ck_assert_msg(qc_model_open(src, &model, &err) == QC_OK, "%s", err.msg);
    qc_st_file golden = open_golden("golden/demo-qwen3", "golden-logits.safetensors");
    int64_t n, n_ids, n_positions, n_nll, n_states;
    int32_t *ids = golden_ints(&golden, "input_ids", &n_ids),
            *positions = golden_ints(&golden, "positions", &n_positions);
    float *logits = golden_floats(&golden, "logits", &n), *nll = golden_floats(&golden, "token_nll", &n_nll);
    float *states = golden_floats(&golden, "hidden_first16", &n_states);
    run_result r = run_model(&model, be, ids, 1, n_ids, 1000);
    for (int64_t i = 0; i < n_positions; i++)
        ck_assert_double_le(max_abs_diff(r.logits + positions[i] * r.vocab, logits + i * r.vocab, r.vocab),
                            TOL_LOGITS);
    for (int64_t layer = 0; layer <= r.n_layers; layer++)
        ck_assert_double_le(
            max_abs_diff(r.states + layer * n_ids * r.hidden, states + layer * 16 * r.hidden, 16 * r.hidden),
            TOL_LOGITS);
    for (int64_t t = 0; t < n_nll; t++) { /* a pair of tokens is a sequence with one target */
        run_result one = {.n_tokens = 2, .vocab = r.vocab, .logits = r.logits + t * r.vocab};
        ck_assert_double_le(fabs(run_nll(&one, ids + t, 0) - (double)nll[t]), TOL_TOKEN_NLL);
    }
    run_free(&r);
    qc_free(ids);
    qc_free(positions);
    qc_free(logits);
    qc_free(nll);
    qc_free(states);
    qc_st_close(&golden);
    qc_model_close(&model);
    qc_source_close(src);
    qc_backend_close(be);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"tiny_models", tiny_models}, {"demo_model", demo_model}, {NULL, NULL}};
    return run_tests("golden", cases);
}
