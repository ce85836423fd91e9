/* Windows of a text and the statistics over them: perplexity of the demo model window by window against
 * golden.json (transformers), the formulas of docs/report.md against sums written out here, refusals of bad
 * texts. */
#include "eval.h"
#include "open.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_json.h"
#include "qc_test.h"
#include "tol.h"

#include <math.h>
#include <unistd.h>

typedef struct fixture {
    qc_pool *pool;
    qc_backend *be;
    qc_source *src;
    qc_model model;
    qc_tokenizer *tok;
} fixture;

static void setup(fixture *f)
{
    qc_err err = {0};
    *f = (fixture){0};
    ck_assert_int_eq(qc_pool_new(0, &f->pool, &err), QC_OK);
    ck_assert_int_eq(qc_backend_cpu_new(f->pool, QC_COMPUTE_F32, &f->be, &err), QC_OK);
    ck_assert_msg(qc_source_open(test_data("models/demo-qwen3"), &f->src, &err) == QC_OK, "%s", err.msg);
    ck_assert_msg(qc_model_open(f->src, &f->model, &err) == QC_OK, "%s", err.msg);
    ck_assert_msg(qc_tokenizer_from_source(f->src, &f->tok, &err) == QC_OK, "%s", err.msg);
}

static void teardown(fixture *f)
{
    qc_tokenizer_free(f->tok);
    qc_model_close(&f->model);
    qc_source_close(f->src);
    qc_backend_close(f->be);
    qc_pool_free(f->pool);
}

START_TEST(golden_windows)
{
    enum { N = 6 };
    fixture f;
    setup(&f);
    qc_err err = {0};
    cJSON *doc;
    ck_assert_int_eq(qc_json_load(test_data("golden/demo-qwen3/golden.json"), 1 << 24, true, &doc, &err),
                     QC_OK);
    const cJSON *golden = qc_json_get(doc, "heldout");
    qc_windows all, w;
    ck_assert_int_eq(
        qc_windows_from_text(f.tok, test_data("text/austen-heldout.txt"), 512, 0, false, &all, &err), QC_OK);
    ck_assert_int_eq(all.n_text_ids, qc_json_get(golden, "tokens")->valueint);
    ck_assert_int_eq(all.n_windows, qc_json_get(golden, "windows")->valueint);
    ck_assert(!all.bos);
    qc_windows_clear(&all);

    ck_assert_int_eq(
        qc_windows_from_text(f.tok, test_data("text/austen-heldout.txt"), 512, N, false, &w, &err), QC_OK);
    ck_assert_int_eq(w.n_windows, N);
    qc_evaluation e;
    ck_assert_msg(qc_evaluate(f.be, NULL, &f.model, &w, NULL, &e, &err) == QC_OK, "%s", err.msg);
    double sum = 0;
    for (int i = 0; i < N; i++) {
        double want = cJSON_GetArrayItem(qc_json_get(golden, "window_nll"), i)->valuedouble;
        double got = e.per_window[i].nll / (double)e.per_window[i].tokens_scored;
        /* the README's bound: an independent float64 pass agrees within 1e-6 in a window's mean */
        ck_assert_msg(fabs(got - want) < TOL_WINDOW_NLL, "window %d: %.8f, golden %.8f", i, got, want);
        sum += want;
    }
    ck_assert_double_eq_tol(log(e.ppl), sum / N, TOL_WINDOW_NLL);
    ck_assert(isnan(e.kld_mean) && isnan(e.ppl_reference));
    qc_evaluation_clear(&e);
    qc_windows_clear(&w);
    cJSON_Delete(doc);
    teardown(&f);
}
END_TEST

/* The formulas over two different models are checked in t_eval.c. */
START_TEST(pair_statistics)
{
    fixture f;
    setup(&f);
    qc_err err = {0};
    qc_windows w;
    ck_assert_int_eq(
        qc_windows_from_text(f.tok, test_data("text/austen-heldout.txt"), 64, 3, false, &w, &err), QC_OK);
    qc_evaluation e;
    ck_assert_int_eq(qc_evaluate(f.be, &f.model, &f.model, &w, NULL, &e, &err), QC_OK);
    ck_assert(e.kld_mean == 0 && e.kld_max == 0 && e.kld_p99 == 0 && e.delta_nll == 0 && e.delta_nll_se == 0);
    ck_assert(e.ppl_ratio == 1 && e.top1 == 1 && e.ppl == e.ppl_reference);
    ck_assert_int_eq(e.tokens_scored, 3 * 63);
    qc_evaluation_clear(&e);
    qc_windows_clear(&w);
    teardown(&f);
}
END_TEST

static void expect_text_error(const fixture *f, const char *text, size_t n_bytes, int code,
                              const char *fragment)
{
    char path[] = "/tmp/qc-windows-XXXXXX";
    int fd = mkstemp(path);
    ck_assert(fd >= 0 && write(fd, text, n_bytes) == (ssize_t)n_bytes);
    close(fd);
    qc_windows w;
    qc_err err = {0};
    ck_assert_int_eq(qc_windows_from_text(f->tok, path, 16, 0, false, &w, &err), code);
    ck_assert_msg(strstr(err.msg, fragment) && strstr(err.msg, path), "%s", err.msg);
    unlink(path);
}

START_TEST(bad_texts)
{
    fixture f;
    setup(&f);
    expect_text_error(&f, "", 0, QC_E_INPUT, "empty");
    expect_text_error(&f, "good \xC0\x80", 7, QC_E_INPUT, "invalid UTF-8 at byte 5");
    expect_text_error(&f, "too short", 9, QC_E_INPUT, "a window has 16");
    qc_windows w;
    qc_err err = {0};
    ck_assert_int_eq(qc_windows_from_text(f.tok, "/nonexistent", 16, 0, false, &w, &err), QC_E_INPUT);
    ck_assert_int_eq(qc_windows_from_text(f.tok, test_data("text/austen-heldout.txt"), 1, 0, false, &w, &err),
                     QC_E_USAGE);
    teardown(&f);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"golden_windows", golden_windows},
                               {"pair", pair_statistics},
                               {"bad_texts", bad_texts},
                               {NULL, NULL}};
    return run_tests("windows", cases);
}
