#include "ops_env.h"

#include "device_env.h"

#include "qc_cpu.h"

int n_pools = MAX_POOLS;
const int pool_sizes[MAX_POOLS] = {1, 2, 7};
qc_pool *pools[MAX_POOLS];
qc_backend *backends[MAX_MASKS][MAX_POOLS];
qc_rng rng;
qc_err err;

bool ops_on_device(void)
{
    return getenv("QC_TEST_DEVICE") != NULL;
}

void ops_setup(void)
{
    const char *text = getenv("QC_TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 0) : ops_seed;
    printf("seed %llu\n", (unsigned long long)seed);
    qc_rng_seed(&rng, seed);
    for (int p = 0; p < n_pools; p++)
        ck_assert_msg(qc_pool_new(pool_sizes[p], &pools[p], &err) == QC_OK, "%s", err.msg);
    for (int m = 0; m < n_masks && ops_on_device(); m++)
        for (int p = 0; p < n_pools; p++)
            backends[m][p] = device_env_new(pools[p], ops_compute);
    for (int m = 0; m < n_masks && !ops_on_device(); m++) {
        ck_assert_int_eq(qc_cpu_set_mask(masks[m], &err), QC_OK);
        for (int p = 0; p < n_pools; p++)
            ck_assert_msg(qc_backend_cpu_new(pools[p], ops_compute, &backends[m][p], &err) == QC_OK, "%s",
                          err.msg);
    }
}

void ops_teardown(void)
{
    for (int m = 0; m < n_masks; m++)
        for (int p = 0; p < n_pools; p++)
            qc_backend_close(backends[m][p]);
    for (int p = 0; p < n_pools; p++)
        qc_pool_free(pools[p]);
}

guarded normal_new(int64_t n, int skew, double scale)
{
    guarded g = guarded_new(n, skew);
    guarded_normal(&g, &rng, scale);
    return g;
}

int close_to(double got, double want, double tol)
{
    if (isnan(want) || isinf(want))
        return (isnan(want) && isnan(got)) || got == want;
    return fabs(got - want) <= tol;
}

int same_bits(const void *a, const void *b, int64_t n_floats)
{
    return memcmp(a, b, (size_t)n_floats * sizeof(float)) == 0;
}

void check_same(guarded *first, guarded *got, int p, const char *what, const char *mask)
{
    ck_assert_msg(guarded_intact(got), "%s: wrote outside its output (mask '%s')", what, mask);
    if (p == 0) {
        *first = *got;
        return;
    }
    ck_assert_msg(same_bits(first->data, got->data, got->n),
                  "%s: %d threads give other bits than one (mask '%s')", what, pool_sizes[p], mask);
    guarded_free(got);
}

static void check_result(const op_call *c, const guarded *got, const expected *e, const char *mask)
{
    ck_assert_msg(guarded_intact(got), "%s: wrote outside its output (mask '%s')", c->what, mask);
    for (int64_t i = 0; i < got->n; i++) {
        int64_t row = i / c->ld, col = i % c->ld, at = row * c->cols + col;
        double x = (double)got->data[i];
        if (col >= c->cols || e->scale[at] < 0)
            ck_assert_msg(memcmp(&got->data[i], &c->out.data[i], 4) == 0,
                          "%s: wrote [%lld, %lld] of [%lld, %lld] (mask '%s')", c->what, (long long)row,
                          (long long)col, (long long)c->rows, (long long)c->cols, mask);
        else
            ck_assert_msg(close_to(x, e->value[at], e->scale[at]),
                          "%s: [%lld, %lld] of [%lld, %lld] is %.9g, expected %.9g +- %.2g (mask '%s')",
                          c->what, (long long)row, (long long)col, (long long)c->rows, (long long)c->cols, x,
                          e->value[at], e->scale[at], mask);
    }
}

void check_op(const op_call *c, const expected *e)
{
    for (int m = 0; m < n_masks; m++) {
        guarded first = {0};
        for (int p = 0; p < n_pools; p++) {
            guarded got = guarded_copy(&c->out);
            c->run(c, backends[m][p], got.data);
            if (p == 0)
                check_result(c, &got, e, masks[m]);
            check_same(&first, &got, p, c->what, masks[m]);
        }
        guarded_free(&first);
    }
}

int ops_fetch_rows(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *e)
{
    (void)e;
    const linear_args *a = ctx;
    if (row0 < 0 || row0 + n_rows > a->n_out)
        return QC_E_INPUT;
    memcpy(dst, a->w + row0 * a->n_in, (size_t)(n_rows * a->n_in) * sizeof *dst);
    return QC_OK;
}

void run_linear(const op_call *c, qc_backend *be, float *out)
{
    const linear_args *a = c->args;
    qc_weight *w = NULL;
    ck_assert_int_eq(be->weight_load(be, a->n_out, a->n_in, ops_fetch_rows, (void *)a, &w, &err), QC_OK);
    ck_assert_int_eq(be->linear(be, out, c->ld, a->x, a->ldx, w, a->bias, a->n_tokens, a->accumulate, &err),
                     QC_OK);
    be->weight_free(be, w);
}

guarded hessian_new(int64_t n, double damp)
{
    guarded h = guarded_new(n * n, 0);
    double *sum = calloc((size_t)(n * n), sizeof *sum), *x = calloc((size_t)n, sizeof *x);
    for (int64_t r = 0; r < n + 3; r++) {
        double common = qc_rng_normal(&rng);
        for (int64_t i = 0; i < n; i++)
            x[i] = qc_rng_normal(&rng) + 0.8 * common + (i > 0 ? 0.5 * x[i - 1] : 0);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j <= i; j++)
                sum[i * n + j] += x[i] * x[j];
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j <= i; j++)
            h.data[i * n + j] = h.data[j * n + i] =
                (float)(sum[i * n + j] + (i == j ? damp * (double)n * 2.5 : 0));
    free(sum);
    free(x);
    return h;
}

int ops_run(const char *name, const test_case *cases, size_t n_cases)
{
    if (ops_on_device()) {
        qc_backend_close(device_env_new(NULL, ops_compute)); /* skips the program if there is none */
        masks[0] = getenv("QC_TEST_DEVICE");
        n_masks = 1;
        n_pools = 2;
    }
    Suite *s = suite_create(name);
    for (size_t i = 0; i < n_cases; i++) {
        TCase *tc = tcase_create(cases[i].name);
        tcase_set_timeout(tc, 120);
        tcase_add_checked_fixture(tc, ops_setup, ops_teardown);
        tcase_add_test(tc, cases[i].fn);
        suite_add_tcase(s, tc);
    }
    SRunner *sr = srunner_create(s);
    srunner_run_all(sr, CK_ENV);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed ? 1 : 0;
}
