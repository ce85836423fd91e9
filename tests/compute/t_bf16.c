/* Products with bfloat16 operands (compute: bf16) on AMX, AVX512-BF16 and the emulations, as far as this
 * processor has them, against float64 on operands rounded here, bit by bit from the definition of the format.
 * The same bits for 1, 2 and 7 threads; nothing written outside the outputs. QC_TEST_SEED replays. */
#include "ops_env.h"

#include "qc_alloc.h"
#include "qc_cpu.h"
#include "qc_math.h"
#include "tol.h"

const char *masks[MAX_MASKS] = {"", "amx", "avx512bf16", "avx512", "all"};
int n_masks = 5;
const qc_compute ops_compute = QC_COMPUTE_BF16;
const uint64_t ops_seed = 20240229;

/* Nearest bfloat16 value: 8 significant bits, so a step of 2^(e - 8) where |x| is in [2^(e-1), 2^e).
 * nearbyint takes the even neighbour of a tie. */
static float nearest_bf16(float x)
{
    int e;
    if (x == 0 || !isfinite(x))
        return x;
    (void)frexp((double)x, &e);
    return (float)ldexp(nearbyint(ldexp((double)x, 8 - e)), e - 8);
}

static guarded rounded(const guarded *g)
{
    guarded r = guarded_copy(g);
    for (int64_t i = 0; i < g->n; i++)
        r.data[i] = nearest_bf16(g->data[i]);
    return r;
}

/* ---- linear ---- */

static void one_linear(int64_t t, int64_t n, int64_t k, int pad, int skew, bool bias, bool accumulate)
{
    guarded x = normal_new(t * (k + pad), skew, 1), w = normal_new(n * k, 0, 0.5), b = normal_new(n, 0, 1);
    guarded rx = rounded(&x), rw = rounded(&w);
    linear_args a = {.x = x.data,
                     .w = w.data,
                     .bias = bias ? b.data : NULL,
                     .ldx = k + pad,
                     .n_tokens = t,
                     .n_out = n,
                     .n_in = k,
                     .accumulate = accumulate};
    op_call c = {.run = run_linear, .what = "linear", .rows = t, .cols = n, .ld = n + pad, .args = &a};
    c.out = accumulate ? normal_new(t * (n + pad), skew, 1) : guarded_new(t * (n + pad), skew);
    expected e = expected_new(t * n);
    ref_linear(&e, accumulate ? c.out.data : NULL, c.ld, rx.data, a.ldx, rw.data, a.bias, t, n, k);
    for (int64_t i = 0; i < t * n; i++)
        e.scale[i] = e.scale[i] * TOL_DOT(k) + TOL_TINY;
    check_op(&c, &e);
    expected_free(&e);
    guarded *all[] = {&x, &w, &b, &rx, &rw, &c.out};
    for (int i = 0; i < 6; i++)
        guarded_free(all[i]);
}

START_TEST(linear)
{
    static const int64_t sizes[] = {0, 1, 3, 17, 31, 33, 65};
    for (int i = 0; i < 7; i++)
        for (int j = 0; j < 7; j++)
            for (int k = 0; k < 7; k++) {
                int turn = i + j + k;
                one_linear(sizes[i], sizes[j], sizes[k], turn % 3, turn % 5, turn & 1, turn & 2);
            }
    one_linear(1, 129, 576, 1, 3, true, true);
    one_linear(129, 576, 65, 0, 0, false, false);
    one_linear(65, 129, 1411, 7, 1, false, true); /* several blocks of inputs */
    one_linear(600, 310, 33, 0, 1, true, false);  /* several tasks each way */
    one_linear(2065, 17, 40, 3, 1, false, true);  /* more than one pass of tokens */
}
END_TEST

/* ---- gram ---- */

typedef struct gram_args {
    const float *a, *b;
    int64_t lda, ldb, n_tokens, n_rows, n_cols;
    float alpha;
} gram_args;

static void run_gram(const op_call *c, qc_backend *be, float *out)
{
    const gram_args *g = c->args;
    ck_assert_int_eq(
        be->gram(be, out, g->a, g->lda, g->b, g->ldb, g->n_tokens, g->n_rows, g->n_cols, g->alpha, &err),
        QC_OK);
}

static void one_gram(int64_t t, int64_t k, int pad, bool two, float alpha)
{
    int64_t n = !two ? k : t % 2 ? k + 17 * pad : qc_max_i64(k - 5 * pad, 0); /* wider or narrower */
    guarded a = normal_new(t * (k + pad), pad, 1), b = normal_new(t * (n + 2 * pad), 2, 1);
    guarded ra = rounded(&a), rb = rounded(&b);
    gram_args g = {.a = a.data,
                   .b = two ? b.data : NULL,
                   .lda = k + pad,
                   .ldb = n + 2 * pad,
                   .n_tokens = t,
                   .n_rows = k,
                   .n_cols = n,
                   .alpha = alpha};
    op_call c = {.run = run_gram,
                 .what = two ? "gram of two" : "gram",
                 .out = normal_new(k * n, pad, 3),
                 .rows = k,
                 .cols = n,
                 .ld = n,
                 .args = &g};
    expected e = expected_new(k * n);
    for (int64_t i = 0; i < k; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = (double)c.out.data[i * n + j], size = fabs(sum);
            for (int64_t p = 0; p < t; p++) {
                double x = (double)ra.data[p * g.lda + i];
                double y = two ? (double)rb.data[p * g.ldb + j] : (double)ra.data[p * g.lda + j];
                sum += (double)alpha * x * y;
                size += fabs(x * y);
            }
            e.value[i * n + j] = sum;
            e.scale[i * n + j] = two || j <= i ? size * TOL_DOT(t) + TOL_TINY : -1;
        }
    check_op(&c, &e);
    expected_free(&e);
    guarded *all[] = {&a, &b, &ra, &rb, &c.out};
    for (int i = 0; i < 5; i++)
        guarded_free(all[i]);
}

START_TEST(gram)
{
    static const int64_t sizes[] = {0, 1, 3, 17, 31, 33, 65};
    for (int i = 0; i < 7; i++)
        for (int j = 0; j < 7; j++)
            one_gram(sizes[i], sizes[j], (i + j) % 3, (i + j) & 1, i & 2 ? -1 : 1);
    one_gram(33, 300, 1, false, 1); /* several blocks of h */
    one_gram(17, 129, 0, true, -1);
    one_gram(1100, 35, 3, false, -1); /* several blocks of tokens */
    one_gram(1030, 40, 0, true, 1);
}
END_TEST

/* ---- attention ---- */

/* A weight of the softmax rounded to 8 significant bits: half a unit in the last, of at least 2^-8 of it. */
#define TOL_BF16 0x1p-8

typedef struct attention_args {
    const float *q, *k, *v;
    qc_attention_shape shape;
} attention_args;

static void run_attention(const op_call *c, qc_backend *be, float *out)
{
    const attention_args *a = c->args;
    ck_assert_int_eq(be->attention(be, out, a->q, a->k, a->v, &a->shape, &err), QC_OK);
}

/* The left operand is scale * q, a float32 product, rounded. */
static void one_attention(qc_attention_shape s, double scale_qk)
{
    int64_t nq = s.n_heads * s.head_dim, nk = s.n_kv_heads * s.head_dim;
    guarded q = normal_new(s.n_tokens * nq, 1, scale_qk), k = normal_new(s.n_tokens * nk, 2, scale_qk);
    guarded v = normal_new(s.n_tokens * nk, 3, 1), scaled = guarded_copy(&q);
    for (int64_t i = 0; i < q.n; i++)
        scaled.data[i] = s.scale * q.data[i];
    guarded rq = rounded(&scaled), rk = rounded(&k), rv = rounded(&v);
    attention_args a = {.q = q.data, .k = k.data, .v = v.data, .shape = s};
    op_call c = {.run = run_attention,
                 .what = "attention",
                 .out = guarded_new(s.n_tokens * nq, 1),
                 .rows = s.n_tokens,
                 .cols = nq,
                 .ld = nq,
                 .args = &a};
    expected e = expected_new(s.n_tokens * nq), sizes = expected_new(s.n_tokens * nq);
    s.scale = 1;
    ref_attention(&e, rq.data, rk.data, rv.data, &s);
    for (int64_t i = 0; i < rv.n; i++)
        rv.data[i] = fabsf(rv.data[i]);
    ref_attention(&sizes, rq.data, rk.data, rv.data, &s);
    for (int64_t i = 0; i < s.n_tokens * nq; i++)
        e.scale[i] += TOL_BF16 * sizes.value[i];
    check_op(&c, &e);
    expected_free(&e);
    expected_free(&sizes);
    guarded *all[] = {&q, &k, &v, &scaled, &rq, &rk, &rv, &c.out};
    for (int i = 0; i < 8; i++)
        guarded_free(all[i]);
}

START_TEST(attention)
{
    static const int64_t tokens[] = {0, 1, 3, 17, 31, 33, 129, 257};
    static const int64_t windows[] = {0, 1, 5, 64, 128, 1000};
    for (int i = 0; i < 8; i++) {
        int64_t t = tokens[i];
        one_attention((qc_attention_shape){t, 2, 1, 64, windows[i % 6], 0.125f, 0}, 1);
        one_attention((qc_attention_shape){t, 3, 3, 17, windows[(i + 1) % 6], 0.3f, 0}, 4);
        one_attention((qc_attention_shape){t, 1, 1, 1, windows[(i + 2) % 6], 1, 0}, 1);
        one_attention((qc_attention_shape){t, 2, 2, 31, windows[(i + 3) % 6], 0.2f, 30}, 3);
        one_attention((qc_attention_shape){t, 4, 2, 80, windows[(i + 4) % 6], 0.1f, 50}, 2);
    }
    one_attention((qc_attention_shape){576, 3, 1, 33, 0, 0.2f, 0}, 1);
    one_attention((qc_attention_shape){576, 2, 2, 8, 300, 0.2f, 0}, 1);
    one_attention((qc_attention_shape){200, 2, 1, 64, 0, 0.125f, 0}, 100); /* far beyond the range of exp */
    qc_attention_shape bad = {8, 3, 2, 8, 0, 1, 0};
    ck_assert_int_eq(backends[0][0]->attention(backends[0][0], NULL, NULL, NULL, NULL, &bad, &err),
                     QC_E_UNSUPPORTED);
}
END_TEST

/* A NaN in a query, key or value reaches every query that sees it; queries of earlier groups of 32 stay as
 * they are. */
START_TEST(attention_not_finite)
{
    enum { T = 300, D = 20, AT = 131 };
    qc_attention_shape s = {T, 1, 1, D, 0, 0.25f, 0};
    for (int which = 0; which < 3; which++) {
        guarded in[3] = {normal_new(T * D, 0, 1), normal_new(T * D, 0, 1), normal_new(T * D, 0, 1)};
        in[which].data[AT * D + 7] = NAN;
        attention_args a = {.q = in[0].data, .k = in[1].data, .v = in[2].data, .shape = s};
        op_call c = {.args = &a};
        for (int m = 0; m < n_masks; m++) {
            guarded out = guarded_new(T * D, 0);
            run_attention(&c, backends[m][0], out.data);
            for (int t = 0; t < T; t++) {
                bool hit = which == 0 ? t == AT : t >= AT, free_to_differ = which == 2 && t >= AT / 32 * 32;
                int got = isnan(out.data[t * D + 7]) != 0;
                ck_assert_msg(got == hit || (free_to_differ && !hit), "input %d: row %d is%s NaN (mask '%s')",
                              which, t, got ? "" : " not", masks[m]);
            }
            guarded_free(&out);
        }
        for (int i = 0; i < 3; i++)
            guarded_free(&in[i]);
    }
}
END_TEST

/* ---- values that are not finite, rounding ---- */

/* Where a NaN goes in and nowhere else; an infinity likewise. A value that rounds beyond the largest bfloat16
 * becomes infinite. */
START_TEST(linear_not_finite)
{
    enum { T = 35, N = 40, K = 70 };
    guarded x = normal_new(T * K, 0, 1), w = normal_new(N * K, 0, 1);
    const uint32_t low_nan = 0x7f800001u; /* its upper half is that of infinity */
    memcpy(&x.data[3 * K + 69], &low_nan, 4);
    x.data[17 * K] = INFINITY;
    x.data[34 * K + 5] = 3.4e38f; /* above 255.5 * 2^120 */
    memcpy(&w.data[33 * K + 2], &low_nan, 4);
    linear_args a = {.x = x.data, .w = w.data, .ldx = K, .n_tokens = T, .n_out = N, .n_in = K};
    op_call c = {.run = run_linear, .args = &a, .ld = N};
    for (int m = 0; m < n_masks; m++) {
        guarded y = guarded_new(T * N, 0);
        run_linear(&c, backends[m][0], y.data);
        for (int t = 0; t < T; t++)
            for (int n = 0; n < N; n++) {
                double got = (double)y.data[t * N + n];
                if (t == 3 || n == 33)
                    ck_assert_msg(isnan(got), "[%d, %d] is %g (mask '%s')", t, n, got, masks[m]);
                else if (t == 17 || t == 34)
                    ck_assert_msg(isinf(got), "[%d, %d] is %g (mask '%s')", t, n, got, masks[m]);
                else
                    ck_assert_msg(isfinite(got), "[%d, %d] is %g (mask '%s')", t, n, got, masks[m]);
            }
        guarded_free(&y);
    }
    guarded_free(&x);
    guarded_free(&w);
}
END_TEST

/* Every rounding case of the format: 1 x value, so that the product is the rounded value itself. Both as the
 * left operand (x) and as the right one (w). */
START_TEST(rounding)
{
    enum { N = 4096 };
    guarded v = guarded_new(N, 0), one = guarded_new(1, 0);
    one.data[0] = 1;
    for (int i = 0; i < N; i++) {
        /* exponents 2^-100 .. 2^100; the lower 16 bits often near the middle between neighbours */
        uint32_t u = (uint32_t)qc_rng_next(&rng) & 0x807fffffu;
        u |= (uint32_t)(27 + qc_rng_below(&rng, 200)) << 23;
        if (i & 1)
            u = (u & 0xffff0000u) | (0x7ffeu + (uint32_t)qc_rng_below(&rng, 4));
        memcpy(&v.data[i], &u, 4);
    }
    for (int side = 0; side < 2; side++) {
        linear_args a = {.x = side ? one.data : v.data,
                         .w = side ? v.data : one.data,
                         .ldx = 1,
                         .n_tokens = side ? 1 : N,
                         .n_out = side ? N : 1,
                         .n_in = 1};
        op_call c = {.run = run_linear,
                     .what = side ? "rounding of w" : "rounding of x",
                     .out = guarded_new(N, 0),
                     .rows = a.n_tokens,
                     .cols = a.n_out,
                     .ld = a.n_out,
                     .args = &a};
        expected e = expected_new(N);
        for (int i = 0; i < N; i++)
            e.value[i] = (double)nearest_bf16(v.data[i]);
        check_op(&c, &e);
        expected_free(&e);
        guarded_free(&c.out);
    }
    guarded_free(&v);
    guarded_free(&one);
}
END_TEST

/* Fail every allocation of a backend's life in turn: a clean message each time (leaks show under ASan). */
static int whole_life(qc_pool *pool)
{
    enum { N = 40 };
    qc_err e = {0};
    qc_backend *be = NULL;
    qc_weight *w = NULL;
    float x[N * N] = {0}, y[N * N] = {0};
    linear_args a = {.w = x, .n_out = N, .n_in = N};
    qc_attention_shape s = {N, 2, 1, N / 2, 0, 1, 0};
    int rc = qc_backend_cpu_new(pool, QC_COMPUTE_BF16, &be, &e);
    if (rc == QC_OK)
        rc = be->weight_load(be, N, N, ops_fetch_rows, &a, &w, &e);
    if (rc == QC_OK)
        rc = be->linear(be, y, N, x, N, w, NULL, N, false, &e);
    if (rc == QC_OK)
        rc = be->gram(be, y, x, N, NULL, 0, N, N, N, 1, &e);
    if (rc == QC_OK)
        rc = be->attention(be, y, x, x, x, &s, &e);
    if (be)
        be->weight_free(be, w);
    qc_backend_close(be);
    ck_assert(rc == QC_OK || (rc == e.code && e.msg[0]));
    return rc;
}

START_TEST(alloc_failures)
{
    if (ops_on_device()) /* t_cuda does this for a device */
        return;
    ck_assert_int_eq(qc_cpu_set_mask("", &err), QC_OK);
    qc_alloc_fail_at(0);
    ck_assert_int_eq(whole_life(pools[1]), QC_OK);
    long n = qc_alloc_fail_at(0);
    ck_assert_int_ge(n, 6);
    for (long i = 1; i <= n; i++) {
        qc_alloc_fail_at(i);
        ck_assert_int_eq(whole_life(pools[1]), QC_E_RESOURCE);
    }
    qc_alloc_fail_at(0);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"linear", linear},
        {"linear_not_finite", linear_not_finite},
        {"attention", attention},
        {"attention_not_finite", attention_not_finite},
        {"alloc_failures", alloc_failures},
        {"gram", gram},
        {"rounding", rounding},
    };
    return ops_run("bf16", cases, sizeof cases / sizeof cases[0]);
}
