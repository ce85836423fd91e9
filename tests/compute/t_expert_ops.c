/* route, gather_rows and add_rows of the CPU backend, for every instruction set, against float64 formulas;
 * the same bits for 1, 2 and 7 threads. QC_TEST_SEED replays. */
#include "ops_env.h"

#include "qc_alloc.h"
#include "tol.h"

#include <string.h>

const char *masks[MAX_MASKS] = {"", "avx512", "all"};
int n_masks = 3;
const qc_compute ops_compute = QC_COMPUTE_F32;
const uint64_t ops_seed = 20240603;

/* ---- route ---- */

/* How many of a token's logits go before logit e: larger ones, and equal ones in front of it. */
static int64_t rank_of(const float *logits, int64_t n, int64_t e)
{
    int64_t rank = 0;
    for (int64_t i = 0; i < n; i++)
        rank += logits[i] > logits[e] || (i < e && logits[i] == logits[e]);
    return rank;
}

static void check_token(const float *logits, int64_t n, const int32_t *ids, const float *weights, int64_t k,
                        bool renormalise)
{
    double all = 0, chosen = 0;
    for (int64_t e = 0; e < n; e++) {
        double p = exp((double)logits[e]);
        all += p;
        chosen += rank_of(logits, n, e) < k ? p : 0;
    }
    for (int64_t i = 0; i < k; i++) {
        double want = exp((double)logits[ids[i]]) / (renormalise ? chosen : all);
        ck_assert_int_eq(rank_of(logits, n, ids[i]), i);
        ck_assert_double_le(fabs((double)weights[i] - want), 2 * TOL_U * want + TOL_TINY);
    }
}

static void one_route(int64_t t, int64_t n, int64_t k, int pad, bool renormalise, bool ties)
{
    guarded logits = normal_new(t * (n + pad), 1, 3), first = guarded_new(t * k, 0);
    size_t n_bytes = (size_t)(t * k) * sizeof(int32_t) + 1;
    int32_t *ids = malloc(n_bytes), *first_ids = malloc(n_bytes);
    for (int64_t i = 0; ties && i < t * (n + pad); i++)
        logits.data[i] = rintf(logits.data[i] / 3);
    for (int m = 0; m < n_masks; m++)
        for (int p = 0; p < n_pools; p++) {
            guarded weights = guarded_new(t * k, 0);
            memset(ids, 0xff, n_bytes);
            ck_assert_int_eq(backends[m][p]->route(backends[m][p], ids, weights.data, logits.data, n + pad, t,
                                                   n, k, renormalise, &err),
                             QC_OK);
            if (m == 0 && p == 0) {
                for (int64_t i = 0; i < t; i++)
                    check_token(logits.data + i * (n + pad), n, ids + i * k, weights.data + i * k, k,
                                renormalise);
                memcpy(first.data, weights.data, (size_t)(t * k) * sizeof(float));
                memcpy(first_ids, ids, n_bytes);
            }
            ck_assert(same_bits(first.data, weights.data, t * k));
            ck_assert_mem_eq(first_ids, ids, n_bytes); /* nothing behind the end either */
            guarded_free(&weights);
        }
    guarded_free(&first);
    guarded_free(&logits);
    free(ids);
    free(first_ids);
}

START_TEST(route)
{
    static const int64_t counts[][2] = {{1, 1}, {2, 1}, {4, 2}, {8, 8}, {60, 4}, {128, 8}};
    for (int i = 0; i < 6; i++)
        for (int turn = 0; turn < 4; turn++)
            one_route(turn * 35, counts[i][0], counts[i][1], turn % 3, turn & 1, turn & 2);
    one_route(3, 512, 10, 0, true, false);
}
END_TEST

/* A logit that is no number is not chosen before one that is, and never makes an id of no expert. */
START_TEST(route_nonfinite)
{
    float logits[2][4] = {{1, NAN, 2, -INFINITY}, {NAN, NAN, NAN, NAN}}, weights[4];
    int32_t ids[4];
    qc_backend *be = backends[0][0];
    ck_assert_int_eq(be->route(be, ids, weights, logits[0], 4, 2, 4, 2, true, &err), QC_OK);
    ck_assert(ids[0] == 2 && ids[1] == 0);
    ck_assert_double_le(fabs((double)weights[0] - 1 / (1 + exp(-1))), TOL_U);
    ck_assert(ids[2] == 0 && ids[3] == 1);
    ck_assert(isnan(weights[2]) && isnan(weights[3]));
    ck_assert_int_eq(be->route(be, ids, weights, logits[0], 4, 1, 4, 5, true, &err), QC_E_UNSUPPORTED);
    ck_assert_int_eq(be->route(be, ids, weights, logits[0], 4, 1, 4, 0, true, &err), QC_E_UNSUPPORTED);
}
END_TEST

/* ---- gather_rows, add_rows ---- */

typedef struct rows_args {
    const float *x, *alpha;
    const int32_t *rows;
    int64_t n;
} rows_args;

static void run_gather(const op_call *c, qc_backend *be, float *out)
{
    const rows_args *a = c->args;
    ck_assert_int_eq(be->gather_rows(be, out, a->x, a->rows, a->n, c->cols, &err), QC_OK);
}

static void run_add_rows(const op_call *c, qc_backend *be, float *out)
{
    const rows_args *a = c->args;
    ck_assert_int_eq(be->add_rows(be, out, a->x, a->rows, a->alpha, a->n, c->cols, &err), QC_OK);
}

/* n of `all` rows in a random order. */
static void draw_rows(int32_t *rows, int64_t n, int64_t all)
{
    int32_t order[256];
    for (int64_t i = 0; i < all; i++)
        order[i] = (int32_t)i;
    for (int64_t i = 0; i < n; i++) {
        int64_t k = i + (int64_t)qc_rng_below(&rng, (uint64_t)(all - i));
        int32_t held = order[i];
        rows[i] = order[k];
        order[k] = held;
    }
}

static void one_gather(const rows_args *a, int64_t dim)
{
    op_call c = {.run = run_gather, .what = "gather_rows", .rows = a->n, .cols = dim, .ld = dim, .args = a};
    c.out = guarded_new(a->n * dim, 1);
    expected e = expected_new(a->n * dim);
    for (int64_t i = 0; i < a->n * dim; i++) {
        e.value[i] = (double)a->x[a->rows[i / dim] * dim + i % dim];
        e.scale[i] = 0;
    }
    check_op(&c, &e);
    expected_free(&e);
    guarded_free(&c.out);
}

static void one_add_rows(const rows_args *a, int64_t all, int64_t dim)
{
    op_call c = {.run = run_add_rows, .what = "add_rows", .rows = all, .cols = dim, .ld = dim, .args = a};
    c.out = normal_new(all * dim, 1, 1);
    expected e = expected_new(all * dim);
    for (int64_t i = 0; i < all * dim; i++)
        e.scale[i] = -1; /* rows that are not listed keep their bits */
    for (int64_t i = 0; i < a->n * dim; i++) {
        int64_t at = a->rows[i / dim] * dim + i % dim;
        double old = (double)c.out.data[at], term = (double)a->alpha[i / dim] * (double)a->x[i];
        e.value[at] = old + term;
        e.scale[at] = TOL_AXPY * (fabs(old) + fabs(term)) + TOL_TINY;
    }
    check_op(&c, &e);
    expected_free(&e);
    guarded_free(&c.out);
}

START_TEST(rows_there_and_back)
{
    static const int64_t dims[] = {1, 3, 31, 64, 129, 1024};
    static const int64_t n_rows[] = {0, 1, 17, 100, 256};
    int32_t rows[256];
    for (int i = 0; i < 6; i++)
        for (int k = 0; k < 5; k++) {
            guarded x = normal_new(256 * dims[i], 0, 1), alpha = normal_new(256, 0, 1);
            rows_args a = {x.data, alpha.data, rows, n_rows[k]};
            draw_rows(rows, n_rows[k], 256);
            one_gather(&a, dims[i]);
            one_add_rows(&a, 256, dims[i]);
            guarded_free(&x);
            guarded_free(&alpha);
        }
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"route", route},
        {"route_nonfinite", route_nonfinite},
        {"rows_there_and_back", rows_there_and_back},
    };
    return ops_run("expert_ops", cases, sizeof cases / sizeof cases[0]);
}
