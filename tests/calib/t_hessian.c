/* Sums over tokens against float64; the same bits however tokens are cut into calls and blocks into shards.
 */
#include "hessian.h"
#include "qc_alloc.h"
#include "qc_rng.h"
#include "qc_test.h"
#include "tol.h"

#include <math.h>

enum { N = 37, B = QC_HESSIAN_BLOCK };

typedef struct fixture {
    qc_pool *pool;
    qc_backend *be;
    float *x; /* [n_tokens, LDX] */
    int64_t n_tokens;
} fixture;
enum { LDX = N + 3 };

static void setup(fixture *f, int threads, int64_t n_tokens)
{
    qc_err err = {0};
    qc_rng rng;
    qc_rng_seed(&rng, 7);
    ck_assert_int_eq(qc_pool_new(threads, &f->pool, &err), QC_OK);
    ck_assert_int_eq(qc_backend_cpu_new(f->pool, QC_COMPUTE_F32, &f->be, &err), QC_OK);
    f->n_tokens = n_tokens;
    f->x = qc_alloc((size_t)(n_tokens * LDX), sizeof *f->x);
    for (int64_t i = 0; i < n_tokens * LDX;
         i++) /* columns of very different size, correlated with column 0 */
        f->x[i] = (float)((qc_rng_normal(&rng) + (i % LDX ? f->x[i - i % LDX] : 0)) *
                          pow(1.3, (double)(i % LDX) - 20));
}

static void teardown(fixture *f)
{
    qc_free(f->x);
    qc_backend_close(f->be);
    qc_pool_free(f->pool);
}

static void add(const fixture *f, qc_hessian *hs, int64_t first, int64_t end, int64_t step)
{
    qc_err err = {0};
    for (int64_t t = first; t < end; t += step)
        ck_assert_int_eq(qc_hessian_add(hs, f->x + t * LDX, LDX, step < end - t ? step : end - t, &err),
                         QC_OK);
}

/* H and sum |x| of tokens first .. end - 1 in calls of `step`; copies. */
static void sums(const fixture *f, int64_t end, int64_t step, float *ret_h, float *ret_abs, float *ret_max)
{
    qc_err err = {0};
    qc_hessian hs;
    const float *h, *sum_abs;
    ck_assert_int_eq(qc_hessian_init(&hs, f->be, N, 0, &err), QC_OK);
    add(f, &hs, 0, end, step);
    ck_assert_int_eq(hs.n_tokens, end);
    ck_assert_int_eq(qc_hessian_finish(&hs, &h, &sum_abs, &err), QC_OK);
    ck_assert_int_eq(hs.n_tokens, end);
    memcpy(ret_h, h, N * N * sizeof *h);
    memcpy(ret_abs, sum_abs, N * sizeof *h);
    memcpy(ret_max, hs.max_abs, N * sizeof *h);
    qc_hessian_clear(&hs);
}

START_TEST(against_float64)
{
    static const int64_t counts[] = {1, 5, B - 1, B, B + 1, 3 * B, 5 * B + 100};
    fixture f;
    setup(&f, 2, 5 * B + 100);
    for (size_t k = 0; k < sizeof counts / sizeof counts[0]; k++) {
        float h[N * N], sum_abs[N], max_abs[N];
        sums(&f, counts[k], 512, h, sum_abs, max_abs);
        for (int i = 0; i < N; i++) {
            double want_abs = 0, want_max = 0;
            for (int j = 0; j < N; j++) {
                double want = 0, scale = 0;
                for (int64_t t = 0; t < counts[k]; t++) {
                    double p = (double)f.x[t * LDX + i] * (double)f.x[t * LDX + j];
                    want += p;
                    scale += fabs(p);
                }
                ck_assert_double_le(fabs((double)h[i * N + j] - want), TOL_DOT(B) * scale);
                ck_assert(h[i * N + j] == h[j * N + i]);
            }
            for (int64_t t = 0; t < counts[k]; t++) {
                want_abs += fabs((double)f.x[t * LDX + i]);
                want_max = fmax(want_max, fabs((double)f.x[t * LDX + i]));
            }
            ck_assert_double_le(fabs((double)sum_abs[i] - want_abs), TOL_DOT(B) * want_abs);
            ck_assert((double)max_abs[i] == want_max);
        }
    }
    teardown(&f);
}
END_TEST

START_TEST(cuts_make_no_difference)
{
    static const int64_t steps[] = {512, 1024, 2048, 8192, 3 * 512};
    float h[2][N * N], sum_abs[2][N], max_abs[2][N];
    for (int threads = 1; threads <= 3; threads += 2) {
        fixture f;
        setup(&f, threads, 4 * B + 5);
        if (threads == 1)
            sums(&f, f.n_tokens, 512, h[0], sum_abs[0], max_abs[0]);
        for (size_t k = 0; k < sizeof steps / sizeof steps[0]; k++) {
            sums(&f, f.n_tokens, steps[k], h[1], sum_abs[1], max_abs[1]);
            ck_assert_mem_eq(h[0], h[1], sizeof h[0]);
            if (steps[k] == 512)
                ck_assert_mem_eq(sum_abs[0], sum_abs[1], sizeof sum_abs[0]);
            ck_assert_mem_eq(max_abs[0], max_abs[1], sizeof max_abs[0]);
        }
        teardown(&f);
    }
}
END_TEST

/* Move the parts of a shard behind those of hs. */
static void append_all(qc_hessian *hs, qc_hessian *shard)
{
    qc_err err = {0};
    ck_assert_int_eq(qc_hessian_close(shard, &err), QC_OK);
    int n = shard->n_parts;
    shard->n_parts = 0; /* their buffers go over */
    for (int i = 0; i < n; i++)
        ck_assert_msg(qc_hessian_append(hs, &shard->parts[i], &err) == QC_OK, "%s", err.msg);
}

START_TEST(shards)
{
    enum { BLOCKS = 11 };
    fixture f;
    setup(&f, 2, BLOCKS * B - 700);
    float h[N * N], sum_abs[N], max_abs[N];
    sums(&f, f.n_tokens, 512, h, sum_abs, max_abs);
    for (int n_shards = 1; n_shards <= BLOCKS; n_shards += 2) {
        qc_err err = {0};
        qc_hessian all, shard;
        const float *merged, *merged_abs;
        ck_assert_int_eq(qc_hessian_init(&all, f.be, N, 0, &err), QC_OK);
        for (int s = 0; s < n_shards; s++) {
            int64_t first = s * BLOCKS / n_shards, end = (s + 1) * BLOCKS / n_shards;
            ck_assert_int_eq(qc_hessian_init(&shard, f.be, N, first, &err), QC_OK);
            add(&f, &shard, first * B, end * B < f.n_tokens ? end * B : f.n_tokens, 512);
            ck_assert_int_le(shard.n_parts, 2 * 4);
            append_all(&all, &shard);
            qc_hessian_clear(&shard);
        }
        ck_assert_int_eq(all.n_tokens, f.n_tokens);
        ck_assert_int_eq(qc_hessian_finish(&all, &merged, &merged_abs, &err), QC_OK);
        ck_assert_mem_eq(merged, h, sizeof h);
        ck_assert_mem_eq(merged_abs, sum_abs, sizeof sum_abs);
        qc_hessian_clear(&all);
    }
    teardown(&f);
}
END_TEST

/* Tokens of an expert in blocks first .. end - 1 of a corpus that has these in each, taken one after the
 * other from the fixture's. */
static const int64_t routed[] = {5, 0, B, 0, 0, 1, 700, 0, 3, 0, 2};
enum { N_ROUTED = sizeof routed / sizeof routed[0] };

static void add_routed(const fixture *f, qc_hessian *hs, int first, int end)
{
    qc_err err = {0};
    int64_t at = 0;
    for (int b = 0; b < end; at += routed[b++])
        if (b >= first) {
            add(f, hs, at, at + routed[b], 512);
            ck_assert_msg(qc_hessian_end_block(hs, &err) == QC_OK, "%s", err.msg);
        }
}

START_TEST(some_tokens_of_each_block)
{
    const int64_t total = 5 + B + 1 + 700 + 3 + 2;
    fixture f;
    qc_err err = {0};
    qc_hessian all, shard;
    const float *h, *sum_abs;
    float first[N * N];
    setup(&f, 2, total);
    for (int cut = 0; cut <= N_ROUTED; cut++) {
        ck_assert_int_eq(qc_hessian_init_routed(&all, f.be, N, 0, &err), QC_OK);
        for (int s = 0; s < 2; s++) {
            ck_assert_int_eq(qc_hessian_init_routed(&shard, f.be, N, s ? cut : 0, &err), QC_OK);
            add_routed(&f, &shard, s ? cut : 0, s ? N_ROUTED : cut);
            append_all(&all, &shard);
            qc_hessian_clear(&shard);
        }
        ck_assert_int_eq(all.n_tokens, total);
        ck_assert_int_eq(all.next_block, N_ROUTED);
        ck_assert_int_eq(qc_hessian_finish(&all, &h, &sum_abs, &err), QC_OK);
        if (cut == 0)
            memcpy(first, h, sizeof first);
        ck_assert_mem_eq(h, first, sizeof first);
        for (int i = 0; i < N * N; i++) {
            double want = 0, scale = 0;
            for (int64_t t = 0; t < total && cut == 0; t++) {
                double p = (double)f.x[t * LDX + i / N] * (double)f.x[t * LDX + i % N];
                want += p;
                scale += fabs(p);
            }
            if (cut == 0)
                ck_assert_double_le(fabs((double)h[i] - want), TOL_DOT(B) * scale);
        }
        qc_hessian_clear(&all);
    }
    teardown(&f);
}
END_TEST

START_TEST(parts_that_do_not_follow)
{
    static const struct {
        qc_hessian_part part;
        const char *fragment;
    } bad[] = {{{.level = 0, .index = 3, .n_tokens = B}, "block 2 should follow"},
               {{.level = 1, .index = 0, .n_tokens = 2 * B}, "block 2 should follow"},
               {{.level = 0, .index = 2, .n_tokens = B + 1}, "impossible"},
               {{.level = 0, .index = 2, .n_tokens = 0}, "impossible"},
               {{.level = 31, .index = 0, .n_tokens = B}, "impossible"},
               {{.level = 0, .index = -1, .n_tokens = B}, "impossible"}};
    fixture f;
    setup(&f, 1, 3 * B);
    qc_err err = {0};
    qc_hessian hs;
    ck_assert_int_eq(qc_hessian_init(&hs, f.be, N, 0, &err), QC_OK);
    add(&f, &hs, 0, 2 * B, B);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        qc_hessian_part part = bad[i].part;
        part.h = f.be->alloc(f.be, N * (N + 1) / 2, &err);
        part.sum_abs = f.be->alloc(f.be, N, &err);
        ck_assert_int_eq(qc_hessian_append(&hs, &part, &err), QC_E_INPUT);
        ck_assert_msg(strstr(err.msg, bad[i].fragment), "%s", err.msg);
    }
    add(&f, &hs, 2 * B, 2 * B + 9, B); /* a block that is not full */
    ck_assert_int_eq(qc_hessian_close(&hs, &err), QC_OK);
    qc_hessian_part part = {.index = 3, .n_tokens = B, .h = f.be->alloc(f.be, N * (N + 1) / 2, &err)};
    ck_assert_int_eq(qc_hessian_append(&hs, &part, &err), QC_E_INPUT);
    ck_assert(strstr(err.msg, "block 2, which is not full"));
    ck_assert_int_eq(hs.n_tokens, 2 * B + 9);
    qc_hessian_clear(&hs);
    teardown(&f);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"against_float64", against_float64},  {"cuts", cuts_make_no_difference},   {"shards", shards},
        {"routed", some_tokens_of_each_block}, {"parts", parts_that_do_not_follow}, {NULL, NULL}};
    return run_tests("hessian", cases);
}
