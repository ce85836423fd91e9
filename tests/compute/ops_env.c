#include "ops_env.h"

#include "qc_cpu.h"

const char *const masks[N_MASKS] = {"", "avx512", "all"};
const int pool_sizes[N_POOLS] = {1, 2, 7};
qc_pool *pools[N_POOLS];
qc_backend *backends[N_MASKS][N_POOLS];
qc_rng rng;
qc_err err;

void ops_setup(void)
{
    const char *text = getenv("QC_TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 0) : 20260711;
    printf("seed %llu\n", (unsigned long long)seed);
    qc_rng_seed(&rng, seed);
    for (int p = 0; p < N_POOLS; p++)
        ck_assert_msg(qc_pool_new(pool_sizes[p], &pools[p], &err) == QC_OK, "%s", err.msg);
    for (int m = 0; m < N_MASKS; m++) {
        ck_assert_int_eq(qc_cpu_set_mask(masks[m], &err), QC_OK);
        for (int p = 0; p < N_POOLS; p++)
            ck_assert_msg(qc_backend_cpu_new(pools[p], QC_COMPUTE_F32, &backends[m][p], &err) == QC_OK, "%s",
                          err.msg);
    }
}

void ops_teardown(void)
{
    for (int m = 0; m < N_MASKS; m++)
        for (int p = 0; p < N_POOLS; p++)
            qc_backend_close(backends[m][p]);
    for (int p = 0; p < N_POOLS; p++)
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
