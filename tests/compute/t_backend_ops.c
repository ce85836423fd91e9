/* Every operation of the CPU backend, for every instruction set this processor has, against float64 formulas
 * on hostile shapes; the same bits for 1, 2 and 7 threads; nothing written outside the outputs. QC_TEST_SEED
 * replays. */
#include "ops_env.h"

#include "qc_alloc.h"
#include "qc_cpu.h"
#include "tol.h"

const char *masks[MAX_MASKS] = {"", "avx512", "all"};
int n_masks = 3;
const qc_compute ops_compute = QC_COMPUTE_F32;
const uint64_t ops_seed = 20240229;

/* ---- linear ---- */

static void one_linear(int64_t t, int64_t n, int64_t k, int pad, int skew, bool bias, bool accumulate)
{
    guarded x = normal_new(t * (k + pad), skew, 1), w = normal_new(n * k, 0, 0.5), b = normal_new(n, 0, 1);
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
    ref_linear(&e, accumulate ? c.out.data : NULL, c.ld, a.x, a.ldx, a.w, a.bias, t, n, k);
    for (int64_t i = 0; i < t * n; i++)
        e.scale[i] = e.scale[i] * TOL_DOT(k) + TOL_TINY;
    check_op(&c, &e);
    expected_free(&e);
    guarded_free(&x);
    guarded_free(&w);
    guarded_free(&b);
    guarded_free(&c.out);
}

START_TEST(linear)
{
    static const int64_t sizes[] = {0, 1, 3, 31, 32, 127, 129};
    for (int i = 0; i < 7; i++)
        for (int j = 0; j < 7; j++)
            for (int k = 0; k < 7; k++) {
                int turn = i + j + k;
                one_linear(sizes[i], sizes[j], sizes[k], turn % 3, turn % 5, turn & 1, turn & 2);
            }
    one_linear(1, 1023, 1023, 1, 3, true, true);
    one_linear(13, 513, 1025, 0, 0, false, false);
    one_linear(97, 65, 257, 7, 1, false, true);
    one_linear(195, 577, 1024, 0, 0, true, false); /* rows 4096 bytes apart are copied */
    one_linear(600, 1030, 33, 0, 1, false, true);  /* enough tiles for large ones */
}
END_TEST

/* ---- rms_norm ---- */

typedef struct norm_args {
    const float *x, *gain;
    int64_t ldx;
    float offset, eps;
    bool in_place;
} norm_args;

static void run_norm(const op_call *c, qc_backend *be, float *out)
{
    const norm_args *a = c->args;
    ck_assert_int_eq(be->rms_norm(be, out, c->ld, a->in_place ? out : a->x, a->ldx, a->gain, a->offset,
                                  c->rows, c->cols, a->eps, &err),
                     QC_OK);
}

static void one_norm(int64_t rows, int64_t dim, int pad, int skew, float offset, double scale, bool in_place)
{
    guarded x = normal_new(rows * (dim + pad), skew, scale), gain = normal_new(dim, 0, 1);
    norm_args a = {.x = x.data,
                   .gain = gain.data,
                   .ldx = dim + pad,
                   .offset = offset,
                   .eps = 0x1p-17f,
                   .in_place = in_place};
    op_call c = {.run = run_norm, .what = "rms_norm", .rows = rows, .cols = dim, .ld = dim + pad, .args = &a};
    c.out = in_place ? guarded_copy(&x) : guarded_new(rows * (dim + pad), skew);
    expected e = expected_new(rows * dim);
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0;
        for (int64_t i = 0; i < dim; i++)
            sum += (double)x.data[r * a.ldx + i] * (double)x.data[r * a.ldx + i];
        for (int64_t i = 0; i < dim; i++) {
            double g = (double)gain.data[i] + (double)offset;
            double y = (double)x.data[r * a.ldx + i] / sqrt(sum / (double)dim + (double)a.eps) * g;
            e.value[r * dim + i] = y;
            /* the rounding of gain + offset counts by the size of its terms */
            double cancel = (fabs((double)gain.data[i]) + fabs((double)offset)) / fabs(g);
            e.scale[r * dim + i] = fabs(y) * (TOL_DOT(dim) + cancel * TOL_U) + TOL_TINY;
        }
    }
    check_op(&c, &e);
    expected_free(&e);
    guarded_free(&x);
    guarded_free(&gain);
    guarded_free(&c.out);
}

START_TEST(rms_norm)
{
    static const int64_t dims[] = {1, 3, 31, 64, 127, 129, 576, 1023};
    for (int i = 0; i < 8; i++) {
        one_norm(0, dims[i], 0, 0, 0, 1, false);
        one_norm(1, dims[i], 0, i, 0, 1, false);
        one_norm(33, dims[i], i % 4, i, 1, 1000, true);
        one_norm(67, dims[i], i % 3, 0, 0, 1e-4, false); /* eps counts */
    }
}
END_TEST

/* ---- rope ---- */

typedef struct rope_args {
    const float *cos_t, *sin_t;
    int64_t heads, dim, rotary;
} rope_args;

static void run_rope(const op_call *c, qc_backend *be, float *out)
{
    const rope_args *a = c->args;
    ck_assert_int_eq(be->rope(be, out, c->ld, a->cos_t, a->sin_t, c->rows, a->heads, a->dim, a->rotary, &err),
                     QC_OK);
}

static void one_rope(int64_t t, int64_t heads, int64_t dim, int64_t rotary, int pad)
{
    int64_t half = rotary / 2;
    guarded cos_t = guarded_new(t * half, 1), sin_t = guarded_new(t * half, 2);
    for (int64_t i = 0; i < t * half; i++) {
        double angle = 6.3 * qc_rng_uniform(&rng);
        cos_t.data[i] = (float)cos(angle);
        sin_t.data[i] = (float)sin(angle);
    }
    rope_args a = {.cos_t = cos_t.data, .sin_t = sin_t.data, .heads = heads, .dim = dim, .rotary = rotary};
    op_call c = {
        .run = run_rope, .what = "rope", .rows = t, .cols = heads * dim, .ld = heads * dim + pad, .args = &a};
    c.out = normal_new(t * c.ld, pad, 1);
    expected e = expected_new(t * c.cols);
    for (int64_t r = 0; r < t; r++)
        for (int64_t i = 0; i < c.cols; i++) {
            int64_t d = i % dim, j = d < half ? d : d - half;
            double x = (double)c.out.data[r * c.ld + i];
            e.value[r * c.cols + i] = x;
            if (d >= rotary)
                continue;
            double other = (double)c.out.data[r * c.ld + (d < half ? i + half : i - half)];
            double p = x * (double)cos_t.data[r * half + j], s = other * (double)sin_t.data[r * half + j];
            e.value[r * c.cols + i] = d < half ? p - s : p + s;
            e.scale[r * c.cols + i] = TOL_AXPY * (fabs(p) + fabs(s));
        }
    check_op(&c, &e);
    expected_free(&e);
    guarded_free(&cos_t);
    guarded_free(&sin_t);
    guarded_free(&c.out);
}

START_TEST(rope)
{
    static const int64_t tokens[] = {0, 1, 31, 33, 127};
    for (int i = 0; i < 5; i++) {
        one_rope(tokens[i], 1, 2, 2, 0);
        one_rope(tokens[i], 3, 64, 64, 5);
        one_rope(tokens[i], 2, 80, 20, 1);
        one_rope(tokens[i], 1, 127, 126, 0);
        one_rope(tokens[i], 4, 8, 0, 3);
    }
    ck_assert_int_eq(backends[0][0]->rope(backends[0][0], NULL, 8, NULL, NULL, 1, 1, 8, 10, &err),
                     QC_E_UNSUPPORTED);
    ck_assert_int_eq(backends[0][0]->rope(backends[0][0], NULL, 8, NULL, NULL, 1, 1, 8, 3, &err),
                     QC_E_UNSUPPORTED);
}
END_TEST

/* ---- attention ---- */

typedef struct attention_args {
    const float *q, *k, *v;
    qc_attention_shape shape;
} attention_args;

static void run_attention(const op_call *c, qc_backend *be, float *out)
{
    const attention_args *a = c->args;
    ck_assert_int_eq(be->attention(be, out, a->q, a->k, a->v, &a->shape, &err), QC_OK);
}

static void one_attention(qc_attention_shape s, double scale_qk)
{
    int64_t nq = s.n_heads * s.head_dim, nk = s.n_kv_heads * s.head_dim;
    guarded q = normal_new(s.n_tokens * nq, 1, scale_qk), k = normal_new(s.n_tokens * nk, 2, scale_qk);
    guarded v = normal_new(s.n_tokens * nk, 3, 1);
    attention_args a = {.q = q.data, .k = k.data, .v = v.data, .shape = s};
    op_call c = {
        .run = run_attention, .what = "attention", .rows = s.n_tokens, .cols = nq, .ld = nq, .args = &a};
    c.out = guarded_new(s.n_tokens * nq, 1);
    expected e = expected_new(s.n_tokens * nq);
    ref_attention(&e, q.data, k.data, v.data, &s);
    check_op(&c, &e);
    expected_free(&e);
    guarded_free(&q);
    guarded_free(&k);
    guarded_free(&v);
    guarded_free(&c.out);
}

START_TEST(attention)
{
    static const int64_t tokens[] = {0, 1, 3, 31, 96, 97, 127, 129, 257};
    static const int64_t windows[] = {0, 1, 5, 64, 128, 1000};
    for (int i = 0; i < 9; i++) {
        int64_t t = tokens[i];
        one_attention((qc_attention_shape){t, 2, 1, 64, windows[i % 6], 0.125f, 0}, 1);
        one_attention((qc_attention_shape){t, 3, 3, 16, windows[(i + 1) % 6], 0.25f, 0}, 8);
        one_attention((qc_attention_shape){t, 1, 1, 1, windows[(i + 2) % 6], 1, 0}, 1);
        one_attention((qc_attention_shape){t, 2, 2, 31, windows[(i + 3) % 6], 0.2f, 30}, 3);
        one_attention((qc_attention_shape){t, 4, 2, 80, windows[(i + 4) % 6], 0.1f, 50}, 2);
    }
    one_attention((qc_attention_shape){700, 3, 1, 33, 0, 0.2f, 0}, 1);
    one_attention((qc_attention_shape){700, 2, 2, 8, 300, 0.2f, 0}, 1);
    qc_attention_shape bad = {8, 3, 2, 8, 0, 1, 0};
    ck_assert_int_eq(backends[0][0]->attention(backends[0][0], NULL, NULL, NULL, NULL, &bad, &err),
                     QC_E_UNSUPPORTED);
}
END_TEST

/* Scores beyond the range of 16-bit floats and of exp: still the softmax of float64. */
START_TEST(attention_large_scores)
{
    one_attention((qc_attention_shape){200, 2, 1, 64, 0, 0.125f, 0}, 1000);
    one_attention((qc_attention_shape){200, 1, 1, 64, 17, 1, 0}, 300);
}
END_TEST

/* ---- gated_act, add ---- */

typedef struct pair_args {
    const float *a, *b;
    qc_activation act;
    float alpha;
    int in_place; /* 0 no, 1 out is a, 2 out is b */
} pair_args;

static void run_gated(const op_call *c, qc_backend *be, float *out)
{
    const pair_args *p = c->args;
    ck_assert_int_eq(be->gated_act(be, out, p->in_place == 1 ? out : p->a, p->in_place == 2 ? out : p->b,
                                   c->cols, p->act, &err),
                     QC_OK);
}

static void run_add(const op_call *c, qc_backend *be, float *out)
{
    const pair_args *p = c->args;
    ck_assert_int_eq(be->add(be, out, p->a, p->alpha, c->cols, &err), QC_OK);
}

static double gate_value(double g, qc_activation act)
{
    if (act == QC_ACT_SILU)
        return g / (1 + exp(-g));
    /* tanh form of GELU, 0.5 g (1 + tanh u) with 1 + tanh u = 2 / (1 + exp(-2u)) */
    double u = sqrt(2 / acos(-1)) * (g + 0.044715 * g * g * g);
    return g / (1 + exp(-2 * u));
}

/* Error of the argument of exp, absolute: that of GELU is a cubic with a few roundings of its own. */
static double gate_tol(double g, qc_activation act)
{
    if (act == QC_ACT_SILU)
        return TOL_EXP;
    double z = 1.6 * (fabs(g) + 0.045 * fabs(g * g * g));
    return TOL_EXP + 6 * TOL_U * (g < 0 ? z : z * exp(-z));
}

static void one_pair(int64_t n, int skew, qc_activation act, int in_place, double scale)
{
    guarded a = normal_new(n, skew, scale), b = normal_new(n, 0, 1);
    static const float special[] = {0,   -0.0f, 1e-40f, -1e-40f, 88,  -88,      -87.5f,   -104,
                                    104, 1e4f,  -1e4f,  3e38f,   NAN, INFINITY, -INFINITY};
    for (int64_t i = 0; n >= 31 && i < 15; i++)
        a.data[i] = special[i];
    pair_args p = {.a = a.data, .b = b.data, .act = act, .alpha = -0.37f, .in_place = in_place};
    op_call c = {.run = run_gated,
                 .what = act == QC_ACT_SILU ? "silu" : "gelu",
                 .rows = 1,
                 .cols = n,
                 .ld = n,
                 .args = &p};
    c.out = in_place == 1 ? guarded_copy(&a) : in_place == 2 ? guarded_copy(&b) : guarded_new(n, skew);
    expected e = expected_new(n);
    for (int64_t i = 0; i < n; i++) {
        double g = (double)a.data[i], y = gate_value(g, act) * (double)b.data[i];
        e.value[i] = fabs(y) > (double)FLT_MAX ? copysign(INFINITY, y) : y;
        /* where exp(-g) overflows the gate is 0 instead of |g| exp(g) < 104 FLT_MIN */
        e.scale[i] = fabs(y) * gate_tol(g, act) + TOL_TINY * (1 + 104 * fabs((double)b.data[i]));
    }
    check_op(&c, &e);
    guarded_free(&c.out);
    if (in_place == 0) {
        c = (op_call){.run = run_add, .what = "add", .rows = 1, .cols = n, .ld = n, .args = &p};
        c.out = guarded_copy(&b);
        for (int64_t i = 0; i < n; i++) {
            double term = (double)p.alpha * (double)a.data[i];
            e.value[i] = (double)b.data[i] + term;
            e.scale[i] = TOL_AXPY * (fabs((double)b.data[i]) + fabs(term)) + TOL_TINY;
        }
        check_op(&c, &e);
        guarded_free(&c.out);
    }
    expected_free(&e);
    guarded_free(&a);
    guarded_free(&b);
}

START_TEST(elementwise)
{
    static const int64_t sizes[] = {0, 1, 3, 31, 127, 129, 1023, 65537};
    for (int i = 0; i < 8; i++)
        for (int act = 0; act < 2; act++)
            for (int in_place = 0; in_place < 3; in_place++) {
                one_pair(sizes[i], i, act ? QC_ACT_GELU_TANH : QC_ACT_SILU, in_place, 3);
                one_pair(sizes[i], 0, act ? QC_ACT_GELU_TANH : QC_ACT_SILU, in_place, 40);
            }
}
END_TEST

/* ---- score ---- */

static void check_score(const qc_score *got, const qc_score *want, double abs_cross, double softcap,
                        const char *mask)
{
    /* a capped logit is off by TOL_EXP of the cap, which exp turns into a relative error */
    double tol = TOL_EXP * (1 + 2 * softcap), tol_logit = TOL_EXP * softcap;
    ck_assert_msg(got->n_nonfinite == want->n_nonfinite, "n_nonfinite %d, expected %d (mask '%s')",
                  got->n_nonfinite, want->n_nonfinite, mask);
    if (softcap > 0) {
        ck_assert(close_to((double)got->max_a, (double)want->max_a, tol_logit));
        ck_assert(close_to((double)got->target_a, (double)want->target_a, tol_logit));
    } else {
        ck_assert_msg(got->top_a == want->top_a && got->top_b == want->top_b,
                      "top %d %d, expected %d %d (mask '%s')", got->top_a, got->top_b, want->top_a,
                      want->top_b, mask);
        ck_assert(memcmp(&got->max_a, &want->max_a, 4 * sizeof(float)) == 0 || want->n_nonfinite);
    }
    ck_assert_msg(close_to(got->sum_a, want->sum_a, tol * want->sum_a),
                  "sum_a %.12g, expected %.12g (mask '%s')", got->sum_a, want->sum_a, mask);
    ck_assert_msg(close_to(got->sum_b, want->sum_b, tol * want->sum_b),
                  "sum_b %.12g, expected %.12g (mask '%s')", got->sum_b, want->sum_b, mask);
    ck_assert_msg(close_to(got->cross, want->cross, tol * abs_cross + 4 * tol_logit * want->sum_a + TOL_TINY),
                  "cross %.12g, expected %.12g (mask '%s')", got->cross, want->cross, mask);
}

static void spoil(guarded *a, int64_t n, int64_t ld, int64_t t)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY, NAN};
    for (int64_t r = 0; r < t; r++)
        for (int64_t i = 0; i < 4; i++)
            a->data[r * ld + (int64_t)qc_rng_below(&rng, (uint64_t)n)] = bad[i];
}

static void one_score(int64_t t, int64_t n, int64_t slice, int pad, bool two, float softcap, double scale,
                      bool nonfinite)
{
    int64_t ld = n + pad;
    guarded a = normal_new(t * ld, 1, scale), b = guarded_copy(&a);
    for (int64_t i = 0; i < t * ld; i++)
        b.data[i] += (float)(0.05 * scale * qc_rng_normal(&rng));
    if (nonfinite) {
        spoil(&a, n, ld, t);
        spoil(&b, n, ld, t);
    }
    int32_t *targets = calloc((size_t)t + 1, sizeof *targets);
    qc_score *first = calloc((size_t)t + 1, sizeof *first), *got = calloc((size_t)t + 1, sizeof *got);
    for (int64_t r = 0; r < t; r++)
        targets[r] = (int32_t)qc_rng_below(&rng, (uint64_t)n + 1) - (r % 7 == 6); /* -1 and n: never seen */
    for (int m = 0; m < n_masks; m++)
        for (int p = 0; p < n_pools; p++) {
            qc_backend *be = backends[m][p];
            for (int64_t r = 0; r < t; r++)
                got[r] = qc_score_start();
            for (int64_t v = 0; v < n; v += slice)
                ck_assert_int_eq(be->score(be, got, a.data + v, two ? b.data + v : NULL, ld, targets, t, v,
                                           v + slice < n ? slice : n - v, softcap, &err),
                                 QC_OK);
            if (p == 0)
                memcpy(first, got, (size_t)t * sizeof *got);
            ck_assert(memcmp(first, got, (size_t)t * sizeof *got) == 0);
            for (int64_t r = 0; r < t && p == 0; r++) {
                qc_score want;
                double abs_cross;
                ref_score(&want, &abs_cross, a.data + r * ld, two ? b.data + r * ld : NULL, n, targets[r],
                          (double)softcap);
                check_score(&got[r], &want, abs_cross, (double)softcap, masks[m]);
            }
        }
    free(targets);
    free(first);
    free(got);
    guarded_free(&a);
    guarded_free(&b);
}

START_TEST(score)
{
    static const int64_t vocab[] = {1, 3, 31, 127, 129, 1023, 1024, 1025, 5003};
    for (int i = 0; i < 9; i++)
        for (int two = 0; two < 2; two++) {
            one_score(1, vocab[i], vocab[i], 0, two, 0, 3, false);
            one_score(9, vocab[i], 1 + vocab[i] / 3, i, two, 0, 30, false);
            one_score(3, vocab[i], 700, 1, two, 30, 20, false);
            one_score(5, vocab[i], 700, 0, two, 0, 3, true);
        }
}
END_TEST

/* Ties: the first id wins; nothing finite: every logit is counted. */
START_TEST(score_ties_and_nothing)
{
    enum { N = 2100 };
    static float a[N], bad[N];
    for (int i = 0; i < N; i++) {
        a[i] = i % 50 == 37 ? 4.5f : -1;
        bad[i] = i % 3 == 0 ? NAN : i % 3 == 1 ? INFINITY : -INFINITY;
    }
    int32_t target = 5;
    for (int m = 0; m < n_masks; m++) {
        qc_backend *be = backends[m][0];
        qc_score s = qc_score_start();
        ck_assert_int_eq(be->score(be, &s, a, a, N, &target, 1, 0, N, 0, &err), QC_OK);
        ck_assert_int_eq(s.top_a, 37);
        ck_assert_int_eq(s.top_b, 37);
        s = qc_score_start();
        ck_assert_int_eq(be->score(be, &s, bad, bad, N, &target, 1, 0, N, 0, &err), QC_OK);
        ck_assert_int_eq(s.n_nonfinite, 2 * N);
        ck_assert_int_eq(s.top_a, -1);
        ck_assert(s.sum_a == 0 && s.sum_b == 0 && s.cross == 0);
    }
}
END_TEST

/* A model against itself: exactly zero, whatever the slices. */
START_TEST(score_self_is_zero)
{
    enum { N = 49152 };
    guarded a = normal_new(N, 0, 5);
    int32_t target = 4711;
    for (int m = 0; m < n_masks; m++)
        for (int64_t slice = 1000; slice <= N; slice += 16051) {
            qc_backend *be = backends[m][0];
            qc_score s = qc_score_start();
            for (int64_t v = 0; v < N; v += slice)
                ck_assert_int_eq(be->score(be, &s, a.data + v, a.data + v, N, &target, 1, v,
                                           v + slice < N ? slice : N - v, 0, &err),
                                 QC_OK);
            double nll_a, nll_b, kld;
            qc_score_finish(&s, &nll_a, &nll_b, &kld);
            ck_assert(kld == 0 && nll_a == nll_b && s.cross == 0 && s.sum_a == s.sum_b);
        }
    guarded_free(&a);
}
END_TEST

/* ---- weight_load ---- */

static int fetch_fails(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *e)
{
    (void)ctx;
    memset(dst, 0, (size_t)(n_rows * 7) * sizeof *dst);
    return row0 + n_rows > 100 ? qc_fail(e, QC_E_INPUT, "row %d is broken", 100) : QC_OK;
}

START_TEST(weight_load_errors)
{
    for (int m = 0; m < n_masks; m++)
        for (int p = 0; p < n_pools; p++) {
            qc_backend *be = backends[m][p];
            qc_weight *w = NULL;
            ck_assert_int_eq(be->weight_load(be, 200, 7, fetch_fails, NULL, &w, &err), QC_E_INPUT);
            ck_assert_str_eq(err.msg, "row 100 is broken");
            ck_assert_ptr_null(w);
            ck_assert_int_eq(be->weight_load(be, -1, 7, fetch_fails, NULL, &w, &err), QC_E_UNSUPPORTED);
            be->weight_free(be, NULL);
        }
}
END_TEST

/* Fail every allocation of a backend's life in turn: a clean message each time (leaks show under ASan). */
static int whole_life(qc_pool *pool)
{
    qc_err e = {0};
    qc_backend *be = NULL;
    qc_weight *w = NULL;
    guarded x = guarded_new(40 * 40, 0), y = guarded_new(40 * 40, 0), ones = guarded_new(40 * 40, 0);
    for (int i = 0; i < 1600; i++)
        x.data[i] = ones.data[i] = 1;
    linear_args a = {.w = ones.data, .n_out = 40, .n_in = 40};
    qc_attention_shape s = {40, 2, 1, 20, 0, 1, 0};
    float *buffer = NULL;
    int rc = qc_backend_cpu_new(pool, QC_COMPUTE_F32, &be, &e);
    if (rc == QC_OK && !(buffer = be->alloc(be, 10, &e)))
        rc = e.code;
    if (rc == QC_OK)
        rc = be->weight_load(be, 40, 40, ops_fetch_rows, &a, &w, &e);
    if (rc == QC_OK)
        rc = be->linear(be, y.data, 40, x.data, 40, w, NULL, 40, false, &e);
    if (rc == QC_OK)
        rc = be->attention(be, y.data, x.data, x.data, x.data, &s, &e);
    if (be) {
        be->weight_free(be, w);
        be->free(be, buffer);
    }
    qc_backend_close(be);
    guarded_free(&x);
    guarded_free(&y);
    guarded_free(&ones);
    if (rc < 0)
        ck_assert(e.code == QC_E_RESOURCE && e.msg[0]);
    return rc;
}

START_TEST(alloc_failures)
{
    if (ops_on_device()) /* t_cuda does this for a device */
        return;
    for (int m = 0; m < n_masks; m++) {
        ck_assert_int_eq(qc_cpu_set_mask(masks[m], &err), QC_OK);
        qc_alloc_fail_at(0);
        ck_assert_int_eq(whole_life(pools[1]), QC_OK);
        long n = qc_alloc_fail_at(0);
        ck_assert_int_ge(n, 5);
        for (long i = 1; i <= n; i++) {
            qc_alloc_fail_at(i);
            ck_assert_int_eq(whole_life(pools[1]), QC_E_RESOURCE);
        }
        qc_alloc_fail_at(0);
    }
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"linear", linear},
        {"rms_norm", rms_norm},
        {"rope", rope},
        {"attention", attention},
        {"attention_large_scores", attention_large_scores},
        {"elementwise", elementwise},
        {"score", score},
        {"score_ties_and_nothing", score_ties_and_nothing},
        {"score_self_is_zero", score_self_is_zero},
        {"weight_load_errors", weight_load_errors},
        {"alloc_failures", alloc_failures},
    };
    return ops_run("backend_ops", cases, sizeof cases / sizeof cases[0]);
}
