/* Stored references: divergences against the exact ones of the walk, the reference against itself, every cut
 * and many flipped bytes of a file, files of other texts and models. */
#include "open.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_rng.h"
#include "qc_test.h"
#include "reference_internal.h"

#include <math.h>
#include <unistd.h>

typedef struct fixture {
    qc_pool *pool;
    qc_backend *be;
    qc_source *src, *other_src;
    qc_model model, other;
    qc_windows w;
    char path[64];
} fixture;

static qc_err err;

static void must(int rc)
{
    ck_assert_msg(rc == QC_OK, "%s", err.msg);
}

static void open_model(const char *path, qc_source **src, qc_model *model)
{
    must(qc_source_open(path, src, &err));
    must(qc_model_open(*src, model, &err));
}

static const qc_reference_origin origin = {
    .model = "m",
    .text = "t",
    .compute = "f32",
    .model_sha256 = "00000000000000000000000000000000000000000000000000000000000000aa",
    .tokenizer_sha256 = "00000000000000000000000000000000000000000000000000000000000000bb",
    .text_sha256 = "00000000000000000000000000000000000000000000000000000000000000cc"};

static void save(fixture *f)
{
    qc_evaluation e;
    qc_eval_options options = {0};
    must(qc_reference_create(f->path, true, &origin, &f->w, f->model.config.vocab, &options.storing, &err));
    must(qc_evaluate(f->be, NULL, &f->model, &f->w, &options, &e, &err));
    must(qc_reference_commit(options.storing, &err));
    qc_evaluation_clear(&e);
}

static void setup(fixture *f, qc_protocol protocol, int n_threads)
{
    *f = (fixture){.path = "/tmp/qc-reference-XXXXXX"};
    qc_cut_rule rule = {.protocol = protocol, .length = 96, .n_windows = 5};
    close(mkstemp(f->path));
    must(qc_pool_new(n_threads, &f->pool, &err));
    must(qc_backend_cpu_new(f->pool, QC_COMPUTE_F32, &f->be, &err));
    open_model(test_data("models/demo-qwen3"), &f->src, &f->model);
    must(qc_windows_of_model(f->src, test_data("text/austen-heldout.txt"), &rule, 0, &f->w, &err));
    save(f);
}

static void teardown(fixture *f)
{
    qc_model_close(&f->model);
    qc_source_close(f->src);
    qc_backend_close(f->be);
    qc_pool_free(f->pool);
    qc_windows_clear(&f->w);
    unlink(f->path);
}

START_TEST(itself_is_zero)
{
    for (int protocol = QC_PROTOCOL_GPTQ; protocol <= QC_PROTOCOL_FULL; protocol++) {
        fixture f;
        qc_reference *ref;
        qc_evaluation e, live;
        setup(&f, (qc_protocol)protocol, protocol + 1);
        must(qc_reference_open(f.path, &ref, &err));
        must(qc_reference_fits(ref, &f.w, f.model.config.vocab, "", &err));
        qc_eval_options options = {.stored = ref};
        must(qc_evaluate(f.be, NULL, &f.model, &f.w, &options, &e, &err));
        must(qc_evaluate(f.be, NULL, &f.model, &f.w, NULL, &live, &err));
        ck_assert(e.kld_mean == 0 && e.kld.at[0] == 0 && e.kld_max == 0 && e.kld.se == 0);
        ck_assert(e.delta_nll == 0 && e.delta_nll_se == 0 && e.delta_p_rms == 0 && e.top1 == 1);
        ck_assert(e.ppl == live.ppl && e.ppl_reference == live.ppl);
        ck_assert_int_eq(e.tokens_scored, live.tokens_scored);
        qc_evaluation_clear(&e);
        qc_evaluation_clear(&live);
        qc_reference_close(ref);
        teardown(&f);
    }
}
END_TEST

/* Bits of the file do not depend on threads. */
START_TEST(same_bytes)
{
    fixture a, b;
    char *x, *y;
    size_t n, m;
    setup(&a, QC_PROTOCOL_GPTQ, 1);
    setup(&b, QC_PROTOCOL_GPTQ, 3);
    must(qc_file_read(a.path, 1 << 24, &x, &n, &err));
    must(qc_file_read(b.path, 1 << 24, &y, &m, &err));
    ck_assert(n == m && memcmp(x, y, n) == 0);
    qc_free(x);
    qc_free(y);
    teardown(&a);
    teardown(&b);
}
END_TEST

/* Synthetic distributions with a long tail: the estimate against the sum over the whole vocabulary. Logits of
 * the model differ by noise of sd 0.3 (about what 4 bits do), on average over positions within 1 %. */
START_TEST(estimate)
{
    enum { VOCAB = 30000, POSITIONS = 300 };
    static float logits[VOCAB], other[VOCAB];
    qc_rng rng;
    qc_kept kept;
    qc_keeper *keeper;
    qc_comparer comparer;
    double exact = 0, stored = 0, tail = 0;
    qc_rng_seed(&rng, 7);
    for (int p = 0; p < POSITIONS; p++) {
        double sum_a = 0, sum_b = 0, kld = 0;
        for (int i = 0; i < VOCAB; i++) {
            logits[i] = (float)(2.5 * qc_rng_normal(&rng));
            other[i] = logits[i] + (float)(0.3 * qc_rng_normal(&rng));
            sum_a += exp((double)logits[i]);
            sum_b += exp((double)other[i]);
        }
        for (int i = 0; i < VOCAB; i++)
            kld += exp((double)logits[i]) / sum_a *
                   ((double)logits[i] - log(sum_a) - (double)other[i] + log(sum_b));
        must(qc_kept_alloc(1, QC_REFERENCE_KEEP, QC_REFERENCE_DRAWN, &kept, &err));
        must(qc_keeper_new(&kept, VOCAB, 0, p, &keeper, &err));
        must(qc_comparer_init(&kept, 0, &comparer, &err));
        qc_logit_tap keep = qc_keeper_tap(keeper), compare = qc_comparer_tap(&comparer);
        qc_token_score score = {0};
        for (int v = 0; v < VOCAB; v += 2048) {
            int n = VOCAB - v < 2048 ? VOCAB - v : 2048;
            must(keep.slice(keep.ctx, 0, 1, v, n, logits + v, n, &err));
        }
        must(keep.finish(keep.ctx, 0, log(sum_a), &score, &err));
        for (int v = 0; v < VOCAB; v += 1000)
            must(compare.slice(compare.ctx, 0, 1, v, 1000, other + v, 1000, &err));
        must(compare.finish(compare.ctx, 0, log(sum_b), &score, &err));
        exact += kld;
        stored += (double)score.kld;
        tail += qc_tail_mass(kept.levels, kept.keep);
        qc_comparer_clear(&comparer);
        qc_keeper_free(keeper);
        qc_kept_clear(&kept);
    }
    printf("exact %.6f, from the file %.6f (%+.2f %%), mean tail %.3f\n", exact / POSITIONS,
           stored / POSITIONS, 100 * (stored / exact - 1), tail / POSITIONS);
    fflush(stdout);
    ck_assert(tail / POSITIONS > 0.3); /* much of it is in the tail */
    ck_assert_double_eq_tol(stored / exact, 1, 0.01);
}
END_TEST

/* What is kept are the largest, whatever the order they come in; ties go to the smaller id. */
START_TEST(selection)
{
    enum { VOCAB = 5000, KEEP = 8 };
    static float logits[VOCAB];
    qc_kept kept;
    qc_keeper *keeper;
    qc_rng rng;
    qc_rng_seed(&rng, 3);
    for (int order = 0; order < 4; order++) {
        for (int i = 0; i < VOCAB; i++)
            logits[i] = order == 0   ? (float)i / 500
                        : order == 1 ? (float)-i / 500
                        : order == 2 ? (float)(i / 10 % 7)
                                     : (float)qc_rng_normal(&rng);
        must(qc_kept_alloc(1, KEEP, 4, &kept, &err));
        must(qc_keeper_new(&kept, VOCAB, 0, 0, &keeper, &err));
        qc_logit_tap tap = qc_keeper_tap(keeper);
        qc_token_score score = {0};
        double sum = 0;
        for (int i = 0; i < VOCAB; i++)
            sum += exp((double)logits[i]);
        for (int v = 0; v < VOCAB; v += 500)
            must(tap.slice(tap.ctx, 0, 1, v, 500, logits + v, 500, &err));
        must(tap.finish(tap.ctx, 0, log(sum), &score, &err));
        for (int k = 0; k < KEEP; k++) {
            int32_t id = kept.ids[k], better = 0;
            ck_assert(k == 0 || id > kept.ids[k - 1]);
            for (int32_t i = 0; i < VOCAB; i++)
                better += logits[i] > logits[id] || (logits[i] == logits[id] && i < id);
            ck_assert_int_lt(better, KEEP);
            ck_assert_double_eq_tol(kept.levels[k] * QC_LEVEL_STEP, log(sum) - (double)logits[id],
                                    QC_LEVEL_STEP);
        }
        for (int k = KEEP; k < KEEP + 4; k++)
            for (int i = 0; i < KEEP; i++)
                ck_assert_int_ne(kept.ids[k], kept.ids[i]);
        qc_keeper_free(keeper);
        qc_kept_clear(&kept);
    }
}
END_TEST

static int read_all(const fixture *f, const char *path)
{
    qc_reference *ref;
    qc_kept kept = {0};
    int rc = qc_reference_open(path, &ref, &err);
    if (rc < 0)
        return rc;
    rc = qc_reference_fits(ref, &f->w, f->model.config.vocab, "", &err);
    if (rc == QC_OK)
        rc = qc_reference_get(ref, &f->w, 0, f->w.n_windows, &kept, &err);
    qc_kept_clear(&kept);
    qc_reference_close(ref);
    return rc;
}

START_TEST(cut_and_flipped)
{
    fixture f;
    char *whole, path[] = "/tmp/qc-reference-XXXXXX";
    size_t n;
    setup(&f, QC_PROTOCOL_GPTQ, 1);
    must(read_all(&f, f.path));
    must(qc_file_read(f.path, 1 << 24, &whole, &n, &err));
    close(mkstemp(path));
    for (size_t cut = 0; cut < n; cut += cut < 2000 ? 13 : 4999) {
        must(qc_file_write(path, true, whole, cut, &err));
        ck_assert_int_eq(read_all(&f, path), QC_E_INPUT);
        ck_assert_msg(strstr(err.msg, path) != NULL, "%s", err.msg);
    }
    for (size_t at = 0; at < n; at += at < 2000 ? 7 : 2999) {
        whole[at] ^= 0x20;
        must(qc_file_write(path, true, whole, n, &err));
        int rc = read_all(&f, path);
        ck_assert_msg(rc == QC_E_INPUT || rc == QC_E_UNSUPPORTED, "byte %zu: %d", at, rc);
        whole[at] ^= 0x20;
    }
    must(qc_file_write(path, true, whole, n, &err));
    must(read_all(&f, path));
    FILE *file = fopen(path, "ab");
    ck_assert(file && fputc(0, file) == 0);
    fclose(file);
    ck_assert_int_eq(read_all(&f, path), QC_E_INPUT);
    qc_free(whole);
    unlink(path);
    teardown(&f);
}
END_TEST

START_TEST(others)
{
    fixture f;
    qc_reference *ref;
    qc_windows w;
    qc_cut_rule rule;
    setup(&f, QC_PROTOCOL_GPTQ, 1);
    must(qc_reference_open(f.path, &ref, &err));
    ck_assert_int_eq(qc_reference_fits(ref, &f.w, f.model.config.vocab + 1, "", &err), QC_E_INPUT);
    ck_assert_ptr_nonnull(strstr(err.msg, "vocabulary"));
    qc_reference_rule(ref, &rule);
    ck_assert(rule.length == 96 && rule.n_windows == 5 && rule.stride == 0 &&
              rule.protocol == QC_PROTOCOL_GPTQ);
    must(qc_windows_of_model(f.src, test_data("text/austen-calib.txt"), &rule, 0, &w, &err));
    ck_assert_int_eq(qc_reference_fits(ref, &w, f.model.config.vocab, origin.tokenizer_sha256, &err),
                     QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "another text") && !strstr(err.msg, "tokenizer"), "%s", err.msg);
    ck_assert_int_eq(qc_reference_fits(ref, &w, f.model.config.vocab, origin.text_sha256, &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "another text or tokenizer") != NULL, "%s", err.msg);
    ck_assert_str_eq(qc_reference_origin_of(ref)->model_sha256, origin.model_sha256);
    qc_windows_clear(&w);
    qc_reference_close(ref);
    ck_assert(qc_reference_is(f.path) && !qc_reference_is("/") && !qc_reference_is("/nonexistent"));
    qc_reference_writer *writer;
    ck_assert_int_eq(qc_reference_create(f.path, false, &origin, &f.w, 2048, &writer, &err), QC_E_USAGE);
    must(qc_reference_create(f.path, true, &origin, &f.w, 2048, &writer, &err));
    ck_assert_int_eq(qc_reference_commit(writer, &err),
                     QC_E_USAGE); /* nothing was scored: the old file stays */
    must(read_all(&f, f.path));
    teardown(&f);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"itself_is_zero", itself_is_zero},
                               {"same_bytes", same_bytes},
                               {"estimate", estimate},
                               {"selection", selection},
                               {"cut_and_flipped", cut_and_flipped},
                               {"others", others},
                               {NULL, NULL}};
    return run_tests("reference", cases);
}
