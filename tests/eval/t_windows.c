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

static int cut(const qc_tokenizer *tok, const char *path, int64_t length, int64_t n_windows, qc_windows *ret,
               qc_err *err)
{
    qc_cut_rule rule = {.length = length, .n_windows = n_windows};
    return qc_windows_from_text(tok, path, &rule, ret, err);
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
    ck_assert_int_eq(cut(f.tok, test_data("text/austen-heldout.txt"), 512, 0, &all, &err), QC_OK);
    ck_assert_int_eq(all.n_text_ids, qc_json_get(golden, "tokens")->valueint);
    ck_assert_int_eq(all.n_windows, qc_json_get(golden, "windows")->valueint);
    ck_assert(!all.bos);
    qc_windows_clear(&all);

    ck_assert_int_eq(cut(f.tok, test_data("text/austen-heldout.txt"), 512, N, &w, &err), QC_OK);
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
    ck_assert_int_eq(cut(f.tok, test_data("text/austen-heldout.txt"), 64, 3, &w, &err), QC_OK);
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

/* NLL of scored places, window by window, of windows that are cut here by hand. */
static double hand_nll(const fixture *f, const int32_t *ids, int64_t start, int64_t length, int64_t first)
{
    enum { MOST = 128 };
    qc_sequences seqs = {.ids = ids + start, .lengths = &length, .n_sequences = 1};
    qc_token_score s[MOST];
    qc_err err = {0};
    ck_assert(length <= MOST);
    ck_assert_int_eq(qc_eval_tokens(f->be, &f->model, NULL, &seqs, NULL, s, &err), QC_OK);
    double sum = 0;
    for (int64_t i = first; i < length; i++)
        sum += (double)s[i - 1].nll_a;
    return sum;
}

/* A text of n tokens in windows of `length`: scored ids and perplexity as summed by hand. */
static void check_protocol(const fixture *f, const int32_t *ids, int64_t n, const char *path,
                           const qc_cut_rule *rule, int64_t want_scored)
{
    qc_windows w;
    qc_evaluation e;
    qc_err err = {0};
    ck_assert_msg(qc_windows_from_text(f->tok, path, rule, &w, &err) == QC_OK, "%s", err.msg);
    ck_assert_int_eq(w.n_text_ids, n);
    ck_assert_int_eq(qc_windows_scored(&w, w.n_windows), want_scored);
    ck_assert_int_eq(qc_evaluate(f->be, NULL, &f->model, &w, NULL, &e, &err), QC_OK);
    double sum = 0;
    int64_t seen = 1;
    for (int64_t i = 0; i < w.n_windows; i++) {
        int64_t start = i * (rule->stride ? rule->stride : rule->length), first = 1,
                length = start + rule->length > n ? n - start : rule->length;
        if (rule->protocol == QC_PROTOCOL_LLAMA)
            first = rule->length / 2 + 1;
        if (rule->protocol == QC_PROTOCOL_FULL)
            first = seen - start;
        sum += hand_nll(f, ids, start, length, first);
        seen = start + length;
    }
    ck_assert_int_eq(e.tokens_scored, want_scored);
    ck_assert_double_eq_tol(e.nll_mean, sum / (double)want_scored, TOL_TOKEN_NLL);
    ck_assert_str_eq(e.protocol, qc_protocol_name(rule->protocol));
    qc_evaluation_clear(&e);
    qc_windows_clear(&w);
}

/* The first n_ids ids of the held-out text, as a file of their own. */
static int32_t *text_of_ids(const fixture *f, int64_t n_ids, char *path)
{
    char *text, *part;
    size_t n_bytes, n_part;
    int32_t *ids, *again;
    int64_t n, n_again;
    qc_err err = {0};
    ck_assert_int_eq(qc_text_read(test_data("text/austen-heldout.txt"), &text, &n_bytes, &err), QC_OK);
    ck_assert_int_eq(qc_tokenizer_encode(f->tok, text, n_bytes, NULL, &ids, &n, &err), QC_OK);
    ck_assert_int_eq(qc_tokenizer_decode(f->tok, ids, n_ids, false, &part, &n_part, &err), QC_OK);
    ck_assert_int_eq(qc_tokenizer_encode(f->tok, part, n_part, NULL, &again, &n_again, &err), QC_OK);
    ck_assert_int_eq(n_again, n_ids);
    ck_assert(part[n_part - 1] != '\n'); /* protocol llama would drop it */
    int fd = mkstemp(path);
    ck_assert(fd >= 0 && write(fd, part, n_part) == (ssize_t)n_part);
    close(fd);
    qc_free(text);
    qc_free(part);
    qc_free(ids);
    return again;
}

START_TEST(protocols)
{
    char path[] = "/tmp/qc-protocols-XXXXXX", other[] = "/tmp/qc-protocols-XXXXXX";
    fixture f;
    setup(&f);
    int32_t *ids = text_of_ids(&f, 1000, path), *few = text_of_ids(&f, 257, other);
    check_protocol(&f, ids, 1000, path, &(qc_cut_rule){.length = 128}, 7 * 127);
    check_protocol(&f, ids, 1000, path, &(qc_cut_rule){.protocol = QC_PROTOCOL_LLAMA, .length = 128}, 7 * 63);
    check_protocol(&f, ids, 1000, path,
                   &(qc_cut_rule){.protocol = QC_PROTOCOL_FULL, .length = 128, .stride = 64}, 999);
    for (int64_t stride = 1; stride < 64; stride += 31)
        check_protocol(&f, few, 257, other,
                       &(qc_cut_rule){.protocol = QC_PROTOCOL_FULL, .length = 64, .stride = stride}, 256);
    qc_free(ids);
    qc_free(few);
    unlink(path);
    unlink(other);
    teardown(&f);
}
END_TEST

/* A tokenizer that adds a BOS: in front of the text, or at each window's start; what is scored stays the same
 * ids. */
START_TEST(bos)
{
    static const char config[] = "{\"add_bos_token\": true, \"bos_token\": \"<|endoftext|>\"}";
    fixture f;
    qc_err err = {0};
    qc_windows w;
    setup(&f);
    ck_assert_msg(qc_tokenizer_apply_config(f.tok, config, strlen(config), "config", &err) == QC_OK, "%s",
                  err.msg);
    const char *text = test_data("text/austen-heldout.txt");
    qc_cut_rule rule = {.length = 32, .n_windows = 3};
    ck_assert_msg(qc_windows_from_text(f.tok, text, &rule, &w, &err) == QC_OK, "%s", err.msg);
    ck_assert(w.bos && w.ids[32] != w.ids[0]);
    int32_t id = w.ids[0], text_id[96];
    memcpy(text_id, w.ids, sizeof text_id);
    qc_windows_clear(&w);

    rule.protocol = QC_PROTOCOL_LLAMA;
    ck_assert_int_eq(qc_windows_from_text(f.tok, text, &rule, &w, &err), QC_OK);
    for (int i = 0; i < 96; i++)
        ck_assert_int_eq(w.ids[i], i % 32 ? text_id[i] : id);
    ck_assert_int_eq(w.first[2], 17);
    qc_windows_clear(&w);

    rule.protocol = QC_PROTOCOL_FULL;
    ck_assert_int_eq(qc_windows_from_text(f.tok, text, &rule, &w, &err), QC_OK);
    for (int64_t i = 0, at = 0; i < 3; i++)
        for (int64_t k = 0; k < 32; k++, at++)
            ck_assert_int_eq(w.ids[at], k ? text_id[i * 16 + k] : id);
    ck_assert(w.first[0] == 2 && w.first[1] == 16 && w.first[2] == 16);
    int64_t scored = qc_windows_scored(&w, 3);
    qc_windows_clear(&w);

    /* none although the tokenizer adds one; another id; each leaves the scored ids of the text as they are */
    rule.bos = QC_BOS_NONE;
    ck_assert_int_eq(qc_windows_from_text(f.tok, text, &rule, &w, &err), QC_OK);
    ck_assert(!w.bos && w.ids[0] == text_id[1] && w.ids[32] == text_id[17]);
    ck_assert(w.first[0] == 1 && w.first[1] == 16 && qc_windows_scored(&w, 3) == scored + 1); /* 32 at once */
    qc_windows_clear(&w);
    rule.bos = QC_BOS_ID;
    rule.bos_id = 65;
    ck_assert_int_eq(qc_windows_from_text(f.tok, text, &rule, &w, &err), QC_OK);
    for (int64_t i = 0, at = 0; i < 3; i++)
        for (int64_t k = 0; k < 32; k++, at++)
            ck_assert_int_eq(w.ids[at], k ? text_id[i * 16 + k] : 65);
    qc_windows_clear(&w);
    rule.bos_id = (int32_t)qc_tokenizer_vocab_size(f.tok);
    ck_assert_int_eq(qc_windows_from_text(f.tok, text, &rule, &w, &err), QC_E_USAGE);
    ck_assert_msg(strstr(err.msg, "the tokenizer has ids from 0 to") != NULL, "%s", err.msg);
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
    ck_assert_int_eq(cut(f->tok, path, 16, 0, &w, &err), code);
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
    ck_assert_int_eq(cut(f.tok, "/nonexistent", 16, 0, &w, &err), QC_E_INPUT);
    ck_assert_int_eq(cut(f.tok, test_data("text/austen-heldout.txt"), 1, 0, &w, &err), QC_E_USAGE);
    teardown(&f);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"golden_windows", golden_windows}, {"pair", pair_statistics},
                               {"protocols", protocols},           {"bos", bos},
                               {"bad_texts", bad_texts},           {NULL, NULL}};
    return run_tests("windows", cases);
}
