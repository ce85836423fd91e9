/* Operations of calibration and rounding (gram .. hessian_error) of the CPU backend, for every instruction
 * set this processor has, against float64 formulas and the equations of the papers; the same bits for 1, 2
 * and 7 threads. QC_TEST_SEED replays. */
#include "ops_env.h"

#include "qc_math.h"
#include "tol.h"

const char *masks[MAX_MASKS] = {"", "avx512", "all"};
int n_masks = 3;
const qc_compute ops_compute = QC_COMPUTE_F32;
const uint64_t ops_seed = 20260711;

/* ---- gram, mirror ---- */

static void check_gram(const guarded *got, const guarded *before, const guarded *a, int64_t lda,
                       const guarded *b, int64_t ldb, int64_t t, int64_t k, int64_t n, double alpha,
                       bool lower, const char *mask)
{
    for (int64_t i = 0; i < k; i++)
        for (int64_t j = 0; j < n; j++) {
            float x = got->data[i * n + j], was = before->data[i * n + j];
            if (lower && j > i) {
                ck_assert_msg(same_bits(&x, &was, 1), "gram touched [%lld, %lld]", (long long)i,
                              (long long)j);
                continue;
            }
            double sum = (double)was, scale = fabs((double)was);
            for (int64_t r = 0; r < t; r++) {
                double term = alpha * (double)a->data[r * lda + i] * (double)b->data[r * ldb + j];
                sum += term;
                scale += fabs(term);
            }
            ck_assert_msg(close_to((double)x, sum, TOL_DOT(t) * scale + TOL_TINY),
                          "gram of [%lld, %lld]: [%lld, %lld] is %.9g, expected %.9g (mask '%s')",
                          (long long)t, (long long)k, (long long)i, (long long)j, (double)x, sum, mask);
        }
}

static void one_gram(int64_t t, int64_t k, int pad, int skew, float alpha, bool two)
{
    int64_t n = !two ? k : t % 2 ? k + 17 * pad : qc_max_i64(k - 5 * pad, 0); /* wider or narrower */
    int64_t lda = k + pad, ldb = n + 2 * pad;
    guarded a = normal_new(t * lda, skew, 1), b = normal_new(t * ldb, 0, 1), h = normal_new(k * n, skew, 3);
    for (int m = 0; m < n_masks; m++) {
        guarded first = {0};
        for (int p = 0; p < n_pools; p++) {
            guarded got = guarded_copy(&h);
            ck_assert_int_eq(backends[m][p]->gram(backends[m][p], got.data, a.data, lda, two ? b.data : NULL,
                                                  ldb, t, k, n, alpha, &err),
                             QC_OK);
            if (p == 0)
                check_gram(&got, &h, &a, lda, two ? &b : &a, two ? ldb : lda, t, k, n, (double)alpha, !two,
                           masks[m]);
            check_same(&first, &got, p, "gram", masks[m]);
        }
        guarded_free(&first);
    }
    guarded_free(&a);
    guarded_free(&b);
    guarded_free(&h);
}

START_TEST(gram)
{
    static const int64_t dims[] = {0, 1, 3, 17, 31, 33, 97, 129, 200}, tokens[] = {0, 1, 5, 33, 129};
    for (int i = 0; i < 9; i++)
        for (int j = 0; j < 5; j++)
            one_gram(tokens[j], dims[i], (i + j) % 3, (i + j) % 5, (i + j) & 1 ? -1 : 1, (i + j / 2) & 1);
    one_gram(300, 200, 1, 1, 1, false);
    one_gram(1100, 65, 0, 0, -1, false);
    one_gram(1029, 33, 3, 1, 1, true);
    one_gram(3, 1093, 0, 1, 1, false);
    one_gram(2, 1030, 0, 0, -1, true);
}
END_TEST

START_TEST(mirror)
{
    static const int64_t dims[] = {0, 1, 3, 17, 129, 200, 577};
    for (int i = 0; i < 7; i++)
        for (int m = 0; m < n_masks; m++)
            for (int p = 0; p < n_pools; p++) {
                int64_t n = dims[i];
                guarded h = normal_new(n * n, i, 1), got = guarded_copy(&h);
                ck_assert_int_eq(backends[m][p]->mirror(backends[m][p], got.data, n, &err), QC_OK);
                ck_assert(guarded_intact(&got));
                for (int64_t r = 0; r < n; r++)
                    for (int64_t c = 0; c < n; c++)
                        ck_assert(same_bits(&got.data[r * n + c], &h.data[r > c ? r * n + c : c * n + r], 1));
                guarded_free(&h);
                guarded_free(&got);
            }
}
END_TEST

/* ---- column_stats ---- */

static void one_stats(int64_t t, int64_t k, int pad, bool bad)
{
    int64_t ldx = k + pad;
    guarded x = normal_new(t * ldx, 1, 2), sum = normal_new(k, 0, 1), max = normal_new(k, 1, 0.5);
    for (int64_t i = 0; i < k; i++) {
        sum.data[i] = fabsf(sum.data[i]);
        max.data[i] = fabsf(max.data[i]);
    }
    if (bad && t > 0) {
        x.data[(t / 2) * ldx + k / 2] = NAN;
        x.data[0] = k > 1 ? -INFINITY : NAN;
    }
    for (int m = 0; m < n_masks; m++) {
        guarded first = {0};
        for (int p = 0; p < n_pools; p++) {
            guarded s = guarded_copy(&sum), mx = guarded_copy(&max);
            ck_assert_int_eq(
                backends[m][p]->column_stats(backends[m][p], s.data, mx.data, x.data, ldx, t, k, &err),
                QC_OK);
            for (int64_t i = 0; i < k; i++) {
                double want = (double)sum.data[i], top = (double)max.data[i];
                for (int64_t r = 0; r < t; r++) {
                    double v = fabs((double)x.data[r * ldx + i]);
                    want += v;
                    top = isnan(v) || isnan(top) ? NAN : fmax(top, v);
                }
                ck_assert_msg(close_to((double)s.data[i], want, TOL_DOT(t) * want),
                              "sum of column %lld: %g %g", (long long)i, (double)s.data[i], want);
                ck_assert_msg(close_to((double)mx.data[i], top, 0), "max of column %lld: %g %g", (long long)i,
                              (double)mx.data[i], top);
            }
            ck_assert(guarded_intact(&mx));
            guarded_free(&mx);
            check_same(&first, &s, p, "column_stats", masks[m]);
        }
        guarded_free(&first);
    }
    guarded_free(&x);
    guarded_free(&sum);
    guarded_free(&max);
}

START_TEST(column_stats)
{
    static const int64_t dims[] = {0, 1, 3, 17, 64, 129, 576}, tokens[] = {0, 1, 33, 257};
    for (int i = 0; i < 7; i++)
        for (int j = 0; j < 4; j++)
            one_stats(tokens[j], dims[i], j, dims[i] > 0 && (i + j) % 2);
}
END_TEST

/* ---- quantize_acts ---- */

static void check_acts(const float *y, const float *x, int64_t n, int bits)
{
    double max = 0, qmax = (1 << (bits - 1)) - 1;
    for (int64_t i = 0; i < n; i++)
        if (fabs((double)x[i]) > max)
            max = fabs((double)x[i]);
    float step = (float)max / (float)qmax;
    for (int64_t i = 0; i < n; i++) {
        double code = step > 0 ? (double)y[i] / (double)step : 0,
               exact = (double)x[i] * qmax / fmax(max, 1e-300);
        if (isnan(x[i]) || isinf(max)) {
            ck_assert(isnan(y[i]));
            continue;
        }
        if (step < FLT_MIN) { /* too small for a grid */
            ck_assert(fabs((double)y[i]) <= 2 * max);
            continue;
        }
        ck_assert_msg(fabs(code - nearbyint(code)) < 1e-4 && fabs(code) < qmax + 0.5, "%g is no code", code);
        ck_assert_msg(fabs(code - exact) <= 0.5 + 1e-4, "code %g of %g", code, exact);
    }
}

static void one_acts(int64_t t, int64_t k, int bits, int64_t group, int pad, bool in_place)
{
    int64_t ldx = k + pad, width = group > 0 && group < k ? group : k;
    guarded x = normal_new(t * ldx, 1, 3);
    if (k > 4 && t > 2) {
        memset(x.data + ldx, 0, (size_t)k * sizeof(float));
        x.data[2] = NAN;
        for (int64_t i = 0; i < k; i++)
            x.data[2 * ldx + i] *= i % 2 ? 1e-44f : 0;
        if (t > 4)
            x.data[3 * ldx + 1] = INFINITY;
    }
    for (int m = 0; m < n_masks; m++) {
        guarded first = {0};
        for (int p = 0; p < n_pools; p++) {
            guarded y = guarded_copy(&x);
            ck_assert_int_eq(backends[m][p]->quantize_acts(backends[m][p], y.data, ldx,
                                                           in_place ? y.data : x.data, ldx, t, k, bits, group,
                                                           &err),
                             QC_OK);
            for (int64_t r = 0; r < t && p == 0; r++)
                for (int64_t i = 0; i < k; i += width)
                    check_acts(y.data + r * ldx + i, x.data + r * ldx + i, width < k - i ? width : k - i,
                               bits);
            for (int64_t r = 0; r < t && p == 0; r++)
                ck_assert(same_bits(y.data + r * ldx + k, x.data + r * ldx + k, pad));
            check_same(&first, &y, p, "quantize_acts", masks[m]);
        }
        guarded_free(&first);
    }
    guarded_free(&x);
}

START_TEST(quantize_acts)
{
    static const int64_t dims[] = {1, 3, 17, 129, 576};
    for (int i = 0; i < 5; i++)
        for (int bits = 2; bits <= 8; bits++) {
            one_acts(1 + bits * bits / 2, dims[i], bits, 0, bits % 3, bits & 1);
            one_acts(5, dims[i], bits, 16 + bits, bits % 2, true);
        }
    qc_backend *be = backends[0][0];
    float x = 1;
    ck_assert_int_eq(be->quantize_acts(be, &x, 1, &x, 1, 1, 1, 9, 0, &err), QC_E_UNSUPPORTED);
    ck_assert_int_eq(be->quantize_acts(be, &x, 1, &x, 1, 1, 1, 1, 0, &err), QC_E_UNSUPPORTED);
}
END_TEST

/* ---- factor ---- */

/* sum_j M_ji d_j M_jl over j >= max(i, l), M_jj = 1, is a again. */
static void check_factor(const float *f, const double *pivots, const guarded *a, int64_t n, const char *mask)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t l = 0; l <= i; l++) {
            double sum = 0, size = sqrt((double)a->data[i * n + i] * (double)a->data[l * n + l]);
            for (int64_t j = i; j < n; j++)
                sum += (j == i ? 1 : (double)f[j * n + i]) * (j == l ? 1 : (double)f[j * n + l]) * pivots[j];
            ck_assert_msg(close_to(sum, (double)a->data[i * n + l], TOL_DOT(n) * size),
                          "factor of %lld: [%lld, %lld] is %.9g, expected %.9g (mask '%s')", (long long)n,
                          (long long)i, (long long)l, sum, (double)a->data[i * n + l], mask);
        }
}

static void one_factor(int64_t n, double damp)
{
    guarded a = hessian_new(n, damp);
    double *pivots = calloc((size_t)n + 1, sizeof *pivots);
    for (int m = 0; m < n_masks; m++) {
        guarded first = {0};
        for (int p = 0; p < n_pools; p++) {
            guarded got = guarded_copy(&a);
            int64_t bad = 7;
            for (int64_t i = 0; i < n; i++) /* only the lower triangle is given */
                for (int64_t j = i + 1; j < n; j++)
                    got.data[i * n + j] = NAN;
            ck_assert_int_eq(backends[m][p]->factor(backends[m][p], got.data, n, pivots, &bad, &err), QC_OK);
            ck_assert_int_eq(bad, -1);
            if (p == 0)
                check_factor(got.data, pivots, &a, n, masks[m]);
            check_same(&first, &got, p, "factor", masks[m]);
        }
        guarded_free(&first);
    }
    free(pivots);
    guarded_free(&a);
}

START_TEST(factor)
{
    static const int64_t dims[] = {1, 3, 17, 129, 200, 257, 576};
    for (int i = 0; i < 7; i++)
        one_factor(dims[i], i % 2 ? 0.01 : 1e-3);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"gram", gram},
        {"mirror", mirror},
        {"column_stats", column_stats},
        {"quantize_acts", quantize_acts},
        {"factor", factor},
    };
    return ops_run("hessian_ops", cases, sizeof cases / sizeof cases[0]);
}
