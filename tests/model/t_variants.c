/* Tiny models with other settings than their own, against transformers (golden/variants.json,
 * scripts/make_family_vectors.py): kinds of rope scaling, in sequences shorter and longer than the original
 * length, and rules of windows. */
#include "golden.h"
#include "mem_source.h"
#include "qc_alloc.h"
#include "qc_log.h"
#include "qc_test.h"
#include "tol.h"

/* Positions at the end of each sequence whose logits are kept. */
enum { LAST = 4 };

static cJSON *load_json(const char *path)
{
    cJSON *doc = NULL;
    qc_err err = {0};
    ck_assert_msg(qc_json_load(test_data(path), 1 << 24, true, &doc, &err) == QC_OK, "%s", err.msg);
    return doc;
}

static int32_t *golden_ids(const char *model, int64_t *ret_n)
{
    char path[128];
    qc_st_file golden;
    snprintf(path, sizeof path, "models/tiny/%s/golden.safetensors", model);
    ck_assert_int_eq(qc_st_open(test_data(path), &golden, NULL), QC_OK);
    int32_t *ids = golden_ints(&golden, "input_ids", ret_n);
    qc_st_close(&golden);
    return ids;
}

static run_result run_patched(const char *name, const cJSON *patch, const int32_t *ids, int64_t n_tokens)
{
    mem_source *m = mem_tiny(name);
    qc_backend *be = NULL;
    qc_model model;
    qc_err err = {0};
    char *text = qc_json_print(patch);
    mem_patch(m, text);
    qc_free(text);
    ck_assert_int_eq(qc_backend_cpu_new(NULL, QC_COMPUTE_F32, &be, NULL), QC_OK);
    ck_assert_msg(qc_model_open(&m->base, &model, &err) == QC_OK, "%s", err.msg);
    run_result r = run_model(&model, be, ids, 2, n_tokens, 128);
    qc_model_close(&model);
    qc_backend_close(be);
    mem_close(m);
    return r;
}

static void check_variant(const cJSON *variant, const qc_st_file *golden)
{
    const char *model = qc_json_get(variant, "model")->valuestring;
    int64_t n_ids, n_want;
    int32_t *ids = golden_ids(model, &n_ids);
    float *want = golden_floats(golden, variant->string, &n_want);
    run_result r = run_patched(model, qc_json_get(variant, "patch"), ids, n_ids / 2);
    ck_assert_int_eq(n_want, 2 * LAST * r.vocab);
    for (int64_t s = 0; s < 2; s++) {
        double d = max_abs_diff(r.logits + ((s + 1) * r.n_tokens - LAST) * r.vocab, want + s * LAST * r.vocab,
                                LAST * r.vocab),
               nll = cJSON_GetArrayItem(qc_json_get(variant, "nll_sum"), (int)s)->valuedouble;
        ck_assert_msg(d <= TOL_LOGITS, "%s: logits of sequence %d differ by %g", variant->string, (int)s, d);
        ck_assert_msg(fabs(run_nll(&r, ids, s) - nll) <= TOL_NLL_SUM,
                      "%s: nll of sequence %d: %.6f, not %.6f", variant->string, (int)s, run_nll(&r, ids, s),
                      nll);
    }
    run_free(&r);
    qc_free(want);
    qc_free(ids);
}

START_TEST(variants)
{
    cJSON *doc = load_json("golden/variants.json");
    qc_st_file golden;
    int n = 0;
    qc_log_set_level(QC_LOG_QUIET);
    ck_assert_int_eq(qc_st_open(test_data("golden/variants.safetensors"), &golden, NULL), QC_OK);
    for (const cJSON *v = doc->child; v; v = v->next, n++)
        check_variant(v, &golden);
    ck_assert_int_eq(n, golden.n_tensors);
    qc_st_close(&golden);
    cJSON_Delete(doc);
}
END_TEST

/* One workspace meets sequences on both sides of the original length: each is run with its own angles. */
START_TEST(lengths_in_turn)
{
    static const char *const patches[] = {
        "{\"max_position_embeddings\": 16, \"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 4}}",
        "{\"rope_scaling\": null}"};
    int64_t n_ids;
    int32_t *ids = golden_ids("llama", &n_ids);
    float *logits[2][2];
    for (int i = 0; i < 2; i++) {
        cJSON *patch = cJSON_Parse(patches[i]);
        for (int k = 0; k < 2; k++) {
            run_result r = run_patched("llama", patch, ids, k ? 40 : 12);
            logits[i][k] = r.logits;
            qc_free(r.states);
        }
        cJSON_Delete(patch);
    }
    ck_assert_mem_eq(logits[0][0], logits[1][0], 12 * 512 * sizeof(float));
    ck_assert_mem_ne(logits[0][1], logits[1][1], 40 * 512 * sizeof(float));

    mem_source *m = mem_tiny("llama");
    qc_model model;
    qc_backend *be = NULL;
    qc_workspace *ws = NULL;
    qc_layer *layer = NULL;
    static float x[3][40 * 128];
    static const int lengths[] = {40, 12, 40};
    mem_patch(m, patches[0]);
    ck_assert_int_eq(qc_backend_cpu_new(NULL, QC_COMPUTE_F32, &be, NULL), QC_OK);
    ck_assert_int_eq(qc_model_open(&m->base, &model, NULL), QC_OK);
    ck_assert_int_eq(qc_workspace_new(&model, be, 40, &ws, NULL), QC_OK);
    ck_assert_int_eq(qc_layer_load(&model, be, 0, &layer, NULL), QC_OK);
    for (int i = 0; i < 3; i++) {
        ck_assert_int_eq(qc_model_embed(&model, ids, lengths[i], x[i], NULL), QC_OK);
        ck_assert_int_eq(qc_layer_forward(layer, ws, x[i], lengths[i], NULL), QC_OK);
    }
    ck_assert_mem_eq(x[0], x[2], sizeof x[0]);
    ck_assert_mem_ne(x[0], x[1], 12 * 128 * sizeof(float));
    qc_layer_free(layer);
    qc_workspace_free(ws);
    qc_model_close(&model);
    qc_backend_close(be);
    mem_close(m);
    for (int i = 0; i < 4; i++)
        qc_free(logits[i / 2][i % 2]);
    qc_free(ids);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"variants", variants}, {"lengths_in_turn", lengths_in_turn}, {NULL, NULL}};
    return run_tests("variants", cases);
}
