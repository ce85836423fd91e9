/* Evaluation against the NLL sums of transformers (golden.json of the tiny models), and its own invariants: a
 * model against itself has KL divergence 0 to the last bit, and neither threads nor spilling change a bit. */
#include "eval.h"
#include "open.h"
#include "qc_alloc.h"
#include "qc_json.h"
#include "qc_test.h"
#include "tol.h"

#include <math.h>

static const char *const models[] = {"llama", "llama-bias", "llama3-rope",  "mistral",
                                     "qwen2", "qwen3",      "qwen3-untied", "qwen3-yarn"};

typedef struct fixture {
    qc_pool *pool;
    qc_backend *be;
    qc_source *src;
    qc_model model;
    int32_t ids[2 * 48];
    double nll_sum[2];
} fixture;

static void setup(fixture *f, const char *name, int n_threads)
{
    qc_err err = {0};
    char path[256];
    *f = (fixture){0};
    ck_assert_int_eq(qc_pool_new(n_threads, &f->pool, &err), QC_OK);
    ck_assert_int_eq(qc_backend_cpu_new(f->pool, QC_COMPUTE_F32, &f->be, &err), QC_OK);
    snprintf(path, sizeof path, "models/tiny/%s", name);
    ck_assert_msg(qc_source_open(test_data(path), &f->src, &err) == QC_OK, "%s", err.msg);
    ck_assert_msg(qc_model_open(f->src, &f->model, &err) == QC_OK, "%s", err.msg);
    cJSON *doc;
    snprintf(path, sizeof path, "models/tiny/%s/golden.json", name);
    ck_assert_msg(qc_json_load(test_data(path), 1 << 24, true, &doc, &err) == QC_OK, "%s", err.msg);
    const cJSON *ids = qc_json_get(doc, "input_ids");
    for (int s = 0; s < 2; s++) {
        f->nll_sum[s] = cJSON_GetArrayItem(qc_json_get(doc, "nll_sum"), s)->valuedouble;
        for (int i = 0; i < 48; i++)
            f->ids[s * 48 + i] = cJSON_GetArrayItem(cJSON_GetArrayItem(ids, s), i)->valueint;
    }
    cJSON_Delete(doc);
}

static void teardown(fixture *f)
{
    qc_model_close(&f->model);
    qc_source_close(f->src);
    qc_backend_close(f->be);
    qc_pool_free(f->pool);
}

START_TEST(golden_nll)
{
    for (size_t m = 0; m < sizeof models / sizeof models[0]; m++) {
        fixture f;
        setup(&f, models[m], 2);
        const int64_t lengths[2] = {48, 48};
        qc_sequences seqs = {.ids = f.ids, .lengths = lengths, .n_sequences = 2};
        qc_token_score scores[94];
        qc_err err = {0};
        ck_assert_msg(qc_eval_tokens(f.be, &f.model, NULL, &seqs, NULL, scores, &err) == QC_OK, "%s",
                      err.msg);
        for (int s = 0; s < 2; s++) {
            double sum = 0;
            for (int i = 0; i < 47; i++)
                sum += (double)scores[s * 47 + i].nll_a;
            ck_assert_msg(fabs(sum - f.nll_sum[s]) < TOL_NLL_SUM, "%s: sequence %d: %.6f, golden %.6f",
                          models[m], s, sum, f.nll_sum[s]);
        }
        teardown(&f);
    }
}
END_TEST

/* Sequences of different lengths, one of a single token: scores must be those of the same tokens alone. */
START_TEST(ragged_sequences)
{
    fixture f;
    setup(&f, "qwen3", 2);
    const int64_t lengths[4] = {1, 30, 47, 18}, whole[1] = {48};
    qc_sequences ragged = {.ids = f.ids, .lengths = lengths, .n_sequences = 4};
    qc_token_score scores[96 - 4], alone[47];
    qc_err err = {0};
    ck_assert_int_eq(qc_eval_tokens(f.be, &f.model, NULL, &ragged, NULL, scores, &err), QC_OK);
    qc_sequences one = {.ids = f.ids + 31, .lengths = whole, .n_sequences = 1};
    ck_assert_int_eq(qc_eval_tokens(f.be, &f.model, NULL, &one, NULL, alone, &err), QC_OK);
    for (int i = 0; i < 46; i++)
        ck_assert_double_eq_tol((double)scores[29 + i].nll_a, (double)alone[i].nll_a, TOL_TOKEN_NLL);
    teardown(&f);
}
END_TEST

START_TEST(self_is_zero)
{
    fixture f;
    setup(&f, "llama3-rope", 2);
    const int64_t lengths[2] = {48, 48};
    qc_sequences seqs = {.ids = f.ids, .lengths = lengths, .n_sequences = 2};
    qc_token_score scores[94];
    qc_err err = {0};
    ck_assert_int_eq(qc_eval_tokens(f.be, &f.model, &f.model, &seqs, NULL, scores, &err), QC_OK);
    for (int i = 0; i < 94; i++) {
        ck_assert(scores[i].kld == 0);
        ck_assert(scores[i].nll_a == scores[i].nll_b);
        ck_assert_int_eq(scores[i].top_a, scores[i].top_b);
    }
    teardown(&f);
}
END_TEST

static void score_pair(const char *name, int n_threads, uint64_t memory_bytes, qc_token_score *ret)
{
    fixture f, g;
    setup(&f, name, n_threads);
    setup(&g, "qwen3-untied", n_threads); /* same vocabulary, another model */
    const int64_t lengths[2] = {48, 48};
    qc_sequences seqs = {.ids = f.ids, .lengths = lengths, .n_sequences = 2};
    qc_eval_options options = {.memory_bytes = memory_bytes};
    qc_err err = {0};
    ck_assert_msg(qc_eval_tokens(f.be, &f.model, &g.model, &seqs, &options, ret, &err) == QC_OK, "%s",
                  err.msg);
    teardown(&f);
    teardown(&g);
}

START_TEST(same_bits)
{
    qc_token_score want[94], got[94];
    score_pair("qwen2", 1, 0, want);
    for (int n_threads = 2; n_threads <= 7; n_threads += 5) {
        score_pair("qwen2", n_threads, 0, got);
        ck_assert_mem_eq(want, got, sizeof want);
    }
    fixture f, g;
    uint64_t full, least;
    setup(&f, "qwen2", 1);
    setup(&g, "qwen3-untied", 1);
    qc_eval_plan_bytes(&f.model.config, &g.model.config, 48, 96, QC_COMPUTE_F32, 2, &full, &least);
    ck_assert(least < full);
    teardown(&f);
    teardown(&g);
    score_pair("qwen2", 2, least, got); /* spills */
    ck_assert_mem_eq(want, got, sizeof want);
}
END_TEST

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Figures of a pair, computed here from the token scores: perplexities, the larger of the token-wise and the
 * window-clustered standard error, 99th percentile by linear interpolation, agreement. */
START_TEST(pair_figures)
{
    enum { WINDOWS = 8, LENGTH = 12, SCORED = WINDOWS * (LENGTH - 1) };
    fixture f, g;
    setup(&f, "qwen2", 2);
    setup(&g, "qwen3-untied", 2);
    int64_t lengths[WINDOWS];
    for (int i = 0; i < WINDOWS; i++)
        lengths[i] = LENGTH;
    qc_windows w = {.ids = f.ids, .lengths = lengths, .n_windows = WINDOWS, .length = LENGTH};
    qc_sequences seqs = {.ids = f.ids, .lengths = lengths, .n_sequences = WINDOWS};
    qc_token_score s[SCORED];
    qc_evaluation e;
    qc_err err = {0};
    ck_assert_int_eq(qc_eval_tokens(f.be, &f.model, &g.model, &seqs, NULL, s, &err), QC_OK);
    ck_assert_int_eq(qc_evaluate(f.be, &f.model, &g.model, &w, NULL, &e, &err), QC_OK);
    double sum_a = 0, sum_b = 0, kld = 0, d[SCORED], sorted[SCORED], per_window[WINDOWS] = {0};
    int agree = 0;
    for (int i = 0; i < SCORED; i++) {
        sum_a += (double)s[i].nll_a;
        sum_b += (double)s[i].nll_b;
        kld += (double)s[i].kld;
        agree += s[i].top_a == s[i].top_b;
        d[i] = (double)s[i].nll_b - (double)s[i].nll_a;
        per_window[i / (LENGTH - 1)] += d[i] / (LENGTH - 1);
        sorted[i] = (double)s[i].kld;
    }
    double delta = (sum_b - sum_a) / SCORED, var = 0, var_windows = 0;
    for (int i = 0; i < SCORED; i++)
        var += (d[i] - delta) * (d[i] - delta) / (SCORED - 1);
    for (int i = 0; i < WINDOWS; i++)
        var_windows += (per_window[i] - delta) * (per_window[i] - delta) / (WINDOWS - 1);
    double se = fmax(sqrt(var / SCORED), sqrt(var_windows / WINDOWS));
    qsort(sorted, SCORED, sizeof *sorted, ascending);
    double at = 0.99 * (SCORED - 1),
           p99 = sorted[(int)at] + (at - (int)at) * (sorted[(int)at + 1] - sorted[(int)at]);
    const struct {
        const char *name;
        double got, want;
    } figures[] = {
        {"ppl", e.ppl, exp(sum_b / SCORED)},
        {"ppl_reference", e.ppl_reference, exp(sum_a / SCORED)},
        {"ppl_ratio", e.ppl_ratio, exp(delta)},
        {"delta_nll", e.delta_nll, delta},
        {"delta_nll_se", e.delta_nll_se, se},
        {"kld_mean", e.kld_mean, kld / SCORED},
        {"kld_p99", e.kld_p99, p99},
        {"kld_max", e.kld_max, sorted[SCORED - 1]},
        {"top1", e.top1, (double)agree / SCORED},
    };
    for (size_t i = 0; i < sizeof figures / sizeof figures[0]; i++)
        ck_assert_msg(fabs(figures[i].got - figures[i].want) <= TOL_SUMMARY * fabs(figures[i].want),
                      "%s: %.15g, expected %.15g", figures[i].name, figures[i].got, figures[i].want);
    ck_assert(e.kld_mean > 0 && e.delta_nll_se > 0);
    qc_evaluation_clear(&e);
    teardown(&f);
    teardown(&g);
}
END_TEST

START_TEST(refusals)
{
    fixture f;
    setup(&f, "qwen3", 1);
    const int64_t lengths[1] = {48};
    qc_sequences seqs = {.ids = f.ids, .lengths = lengths, .n_sequences = 1};
    qc_token_score scores[47];
    qc_err err = {0};
    qc_eval_options tight = {.memory_bytes = 1000};
    ck_assert_int_eq(qc_eval_tokens(f.be, &f.model, NULL, &seqs, &tight, scores, &err), QC_E_RESOURCE);
    ck_assert_ptr_nonnull(strstr(err.msg, "memory cap"));
    f.ids[5] = 512;
    ck_assert_int_eq(qc_eval_tokens(f.be, &f.model, NULL, &seqs, NULL, scores, &err), QC_E_INPUT);
    ck_assert_ptr_nonnull(strstr(err.msg, "token id 512 at position 5"));
    teardown(&f);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"golden_nll", golden_nll},
                               {"ragged", ragged_sequences},
                               {"self", self_is_zero},
                               {"same_bits", same_bits},
                               {"pair_figures", pair_figures},
                               {"refusals", refusals},
                               {NULL, NULL}};
    return run_tests("eval", cases);
}
