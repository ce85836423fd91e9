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

#define DYNAMIC "{\"max_position_embeddings\": 16, \"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 4}}"
#define LONGROPE                                                                                             \
    "{\"original_max_position_embeddings\": 16, \"rope_scaling\": {\"type\": \"su\", "                       \
    "\"short_factor\": [1, 1, 1, 1, 1, 1, 1, 1], \"long_factor\": [1, 1, 2, 2, 3, 3, 4, 4]}}"

/* Up to the original length dynamic scaling is none. */
START_TEST(dynamic_begins_beyond_the_original_length)
{
    int64_t n_ids;
    int32_t *ids = golden_ids("llama", &n_ids);
    cJSON *patches[] = {cJSON_Parse(DYNAMIC), cJSON_Parse("{}")};
    for (int n = 15; n <= 17; n++) {
        run_result a = run_patched("llama", patches[0], ids, n), b = run_patched("llama", patches[1], ids, n);
        bool same = memcmp(a.logits, b.logits, (size_t)(n * a.vocab) * sizeof(float)) == 0;
        ck_assert_int_eq(same, n <= 16);
        run_free(&a);
        run_free(&b);
    }
    cJSON_Delete(patches[0]);
    cJSON_Delete(patches[1]);
    qc_free(ids);
}
END_TEST

/* One workspace meets sequences on both sides of the original length: each is run with its own angles. */
static void check_lengths_in_turn(const char *name, const char *patch)
{
    static const int lengths[] = {40, 12, 40};
    mem_source *m = mem_tiny(name);
    qc_model model;
    qc_backend *be = NULL;
    qc_workspace *ws = NULL;
    qc_layer *layer = NULL;
    static float x[3][40 * 128];
    int64_t n_ids;
    int32_t *ids = golden_ids(name, &n_ids);
    mem_patch(m, patch);
    ck_assert_int_eq(qc_backend_cpu_new(NULL, QC_COMPUTE_F32, &be, NULL), QC_OK);
    ck_assert_int_eq(qc_model_open(&m->base, &model, NULL), QC_OK);
    ck_assert_int_le(model.config.hidden, 128);
    ck_assert_int_eq(qc_workspace_new(&model, be, 40, &ws, NULL), QC_OK);
    ck_assert_int_eq(qc_layer_load(&model, be, 0, &layer, NULL), QC_OK);
    for (int i = 0; i < 3; i++) {
        ck_assert_int_eq(qc_model_embed(&model, ids, lengths[i], x[i], NULL), QC_OK);
        ck_assert_int_eq(qc_layer_forward(layer, ws, x[i], lengths[i], NULL), QC_OK);
    }
    ck_assert_mem_eq(x[0], x[2], (size_t)(40 * model.config.hidden) * sizeof(float));
    ck_assert_mem_ne(x[0], x[1], (size_t)(12 * model.config.hidden) * sizeof(float));
    qc_layer_free(layer);
    qc_workspace_free(ws);
    qc_model_close(&model);
    qc_backend_close(be);
    mem_close(m);
    qc_free(ids);
}

START_TEST(lengths_in_turn)
{
    check_lengths_in_turn("llama", DYNAMIC);
    check_lengths_in_turn("phi3", LONGROPE);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"variants", variants},
                               {"dynamic", dynamic_begins_beyond_the_original_length},
                               {"lengths_in_turn", lengths_in_turn},
                               {NULL, NULL}};
    return run_tests("variants", cases);
}
