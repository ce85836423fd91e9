/* The GPTQ solver: the textbook algorithm in double on shapes that cross every block, properties that hold by
 * theory, inputs that break naive solvers, refusals. */
#include "gptq_run.h"

#include "rtn.h"

/* ---- inputs ---- */

/* h[n, n] = X^T X / n_samples of correlated inputs with channels of different size and some outliers, exactly
 * symmetric. Free with qc_free. */
static float *make_h(qc_rng *rng, int64_t n, int64_t n_samples)
{
    float *h = test_alloc(n * n, sizeof *h);
    double *x = test_alloc(n, sizeof *x), *size = test_alloc(n, sizeof *size);
    for (int64_t j = 0; j < n; j++)
        size[j] = exp(0.7 * qc_rng_normal(rng)) * (j % 29 == 7 ? 8 : 1);
    for (int64_t t = 0; t < n_samples; t++) {
        double common[3] = {qc_rng_normal(rng), qc_rng_normal(rng), qc_rng_normal(rng)};
        for (int64_t j = 0; j < n; j++)
            x[j] = size[j] * (0.5 * qc_rng_normal(rng) + common[j % 3] + 0.3 * common[j * 7 % 3]);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j <= i; j++)
                h[i * n + j] += (float)(x[i] * x[j] / (double)n_samples);
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < i; j++)
            h[j * n + i] = h[i * n + j];
    qc_free(x);
    qc_free(size);
    return h;
}

static float *make_w(qc_rng *rng, int64_t n_rows, int64_t n)
{
    float *w = test_alloc(n_rows * n, sizeof *w);
    for (int64_t i = 0; i < n_rows * n; i++)
        w[i] = (float)(0.05 * qc_rng_normal(rng) * (qc_rng_below(rng, 20) == 0 ? 3 : 1));
    return w;
}

static float *identity(int64_t n)
{
    float *h = test_alloc(n * n, sizeof *h);
    for (int64_t j = 0; j < n; j++)
        h[j * n + j] = 1;
    return h;
}

static const qc_gptq_options plain = {.order = QC_ORDER_STATIC, .damp = 0.01};

static qc_gptq_options options_of(qc_gptq_order order, double damp, bool refit, int64_t sweeps)
{
    return (qc_gptq_options){.order = order, .damp = damp, .refit = refit, .sweeps = sweeps};
}

/* RTN of the same grid and search. */
static gptq_run rtn(const float *w, int64_t n_rows, int64_t n, const qc_quant_spec *spec, const float *weight)
{
    gptq_run g = {.n_rows = n_rows,
                  .n = n,
                  .spec = *spec,
                  .n_groups = (n + spec->grid.group_elems - 1) / spec->grid.group_elems};
    g.rows.codes = test_alloc(n_rows * n, 1);
    g.rows.scales = test_alloc(n_rows * g.n_groups, sizeof(float));
    g.rows.zeros = spec->grid.symmetric ? NULL : test_alloc(n_rows * g.n_groups, 1);
    test_backend t = test_backend_new("", 1);
    g.rc = qc_rtn_rows(t.be, w, n_rows, n, spec, weight, &g.rows, &g.stats, &g.err);
    test_backend_free(&t);
    ck_assert_int_eq(g.rc, 0);
    return g;
}

/* RTN as the solver does it: the search weights columns by diag(H). */
static gptq_run rtn_by_diag(const float *h, const float *w, int64_t n_rows, int64_t n,
                            const qc_quant_spec *spec)
{
    float *diag = test_alloc(n, sizeof *diag);
    for (int64_t j = 0; j < n; j++)
        diag[j] = h[j * n + j];
    gptq_run g = rtn(w, n_rows, n, spec, diag);
    qc_free(diag);
    return g;
}

static bool same_row(const gptq_run *a, const gptq_run *b, int64_t r)
{
    size_t n = (size_t)a->n, n_groups = (size_t)a->n_groups, at = (size_t)r;
    return memcmp(a->rows.codes + at * n, b->rows.codes + at * n, n) == 0 &&
           memcmp(a->rows.scales + at * n_groups, b->rows.scales + at * n_groups, n_groups * sizeof(float)) ==
               0;
}

static bool same_rows(const gptq_run *a, const gptq_run *b)
{
    size_t n_scales = (size_t)(a->n_rows * a->n_groups);
    return memcmp(a->rows.codes, b->rows.codes, (size_t)(a->n_rows * a->n)) == 0 &&
           memcmp(a->rows.scales, b->rows.scales, n_scales * sizeof(float)) == 0 &&
           (!a->rows.zeros || memcmp(a->rows.zeros, b->rows.zeros, n_scales) == 0);
}

/* Codes in range; scales finite, not 0 and exact as F16. */
static void check_decodable(const gptq_run *g)
{
    int qmax = (1 << g->spec.grid.bits) - 1;
    for (int64_t i = 0; i < g->n_rows * g->n; i++)
        ck_assert_int_le(g->rows.codes[i], qmax);
    for (int64_t i = 0; i < g->n_rows * g->n_groups; i++) {
        float s = g->rows.scales[i];
        ck_assert(isfinite(s) && s != 0 && qc_f16_to_f32(qc_f32_to_f16(s)) == s);
        if (g->rows.zeros)
            ck_assert_int_le(g->rows.zeros[i], qmax);
    }
}

/* ---- the textbook algorithm ---- */

/* a[n, n] (symmetric positive definite) <- its lower Cholesky factor. */
static void cholesky(double *a, int64_t n)
{
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = j; i < n; i++) {
            double s = a[i * n + j];
            for (int64_t k = 0; k < j; k++)
                s -= a[i * n + k] * a[j * n + k];
            a[i * n + j] = i == j ? sqrt(s) : s / a[j * n + j];
        }
        for (int64_t i = 0; i < j; i++)
            a[i * n + j] = 0;
    }
}

/* ret[n, n] = inverse of a lower triangular matrix. */
static void invert_lower(double *ret, const double *l, int64_t n)
{
    for (int64_t c = 0; c < n; c++)
        for (int64_t r = 0; r < n; r++) {
            double s = r == c;
            for (int64_t k = c; k < r; k++)
                s -= l[r * n + k] * ret[k * n + c];
            ret[r * n + c] = r < c ? 0 : s / l[r * n + r];
        }
}

/* Upper Cholesky factor of the inverse of the damped h, rows and columns in the given order. */
static double *factor_of_inverse(const float *h, int64_t n, const int64_t *order, double damp)
{
    double *a = test_alloc(n * n, sizeof *a), *b = test_alloc(n * n, sizeof *b), mean = 0;
    for (int64_t j = 0; j < n; j++)
        mean += (double)h[j * n + j] / (double)n;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++)
            a[i * n + j] = (double)h[order[i] * n + order[j]] + (i == j ? damp * mean : 0);
    cholesky(a, n);
    invert_lower(b, a, n); /* inverse of the damped h = b^T b */
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++) {
            double s = 0;
            for (int64_t k = i > j ? i : j; k < n; k++)
                s += b[k * n + i] * b[k * n + j];
            a[i * n + j] = s;
        }
    cholesky(a, n); /* lower: its transpose is U */
    qc_free(b);
    return a;
}

static void sort_by_diag(const float *h, int64_t n, int64_t *order)
{
    for (int64_t j = 0; j < n; j++) {
        int64_t at = j;
        for (; at > 0 && h[order[at - 1] * (n + 1)] < h[j * (n + 1)]; at--)
            order[at] = order[at - 1];
        order[at] = j;
    }
}

/* Codes of one row by the loop of the paper; w[n] is used up. Returns the smallest distance of a quotient to
 * a tie, as a share of 1 step and all that the target was moved. */
static double textbook_row(const gptq_run *g, int64_t r, const double *lower, const int64_t *order, double *w,
                           uint8_t *codes)
{
    int64_t n = g->n;
    double qmax = (1 << g->spec.grid.bits) - 1, margin = 1, moved[1024] = {0};
    ck_assert_int_le(n, 1024);
    for (int64_t k = 0; k < n; k++) {
        int64_t c = order[k], at = r * g->n_groups + c / g->spec.grid.group_elems;
        double s = (double)g->rows.scales[at], z = g->rows.zeros ? g->rows.zeros[at] : (qmax + 1) / 2;
        double q = w[c] / s + z, code = rint(q);
        if (q > -0.6 && q < qmax + 0.6)
            margin = fmin(margin, fabs(q - floor(q) - 0.5) / (1 + moved[c] / fabs(s)));
        code = code < 0 ? 0 : code > qmax ? qmax : code;
        codes[c] = (uint8_t)code;
        double err = (w[c] - s * (code - z)) / lower[k * n + k];
        for (int64_t j = k; j < n; j++) {
            w[order[j]] -= err * lower[j * n + k];
            moved[order[j]] += fabs(err * lower[j * n + k]);
        }
    }
    return margin;
}

/* Closer to a tie than this, as a share of 1 step and all steps that the target was moved, float32 may decide
 * otherwise: the coefficients have relative errors of some u times the condition (about 1000). */
static const double TIE = 1e-4;

static void check_textbook(qc_rng *rng, int64_t n, int64_t group, qc_gptq_order order_rule, bool symmetric)
{
    enum { N_ROWS = 21 };
    float *h = make_h(rng, n, 4 * n + 20), *w = make_w(rng, N_ROWS, n);
    int64_t *order = test_alloc(n, sizeof *order), n_checked = 0, n_rtn = 0;
    double *row = test_alloc(n, sizeof *row);
    uint8_t *codes = test_alloc(n, 1);
    qc_quant_spec spec = gptq_spec(4, symmetric, group, QC_SEARCH_MSE);
    qc_gptq_options o = options_of(order_rule, 0.01, false, 0);
    gptq_run g = gptq(h, n, &o, w, N_ROWS, &spec);
    ck_assert_int_eq(g.rc, 0);
    for (int64_t j = 0; j < n; j++)
        order[j] = j;
    if (order_rule == QC_ORDER_STATIC)
        sort_by_diag(h, n, order);
    double *lower = factor_of_inverse(h, n, order, 0.01);
    gptq_run base = rtn_by_diag(h, w, N_ROWS, n, &spec);
    for (int64_t r = 0; r < N_ROWS; r++) {
        if (same_row(&g, &base, r)) { /* RTN was better */
            n_rtn++;
            continue;
        }
        for (int64_t c = 0; c < n; c++)
            row[c] = (double)w[r * n + c];
        if (textbook_row(&g, r, lower, order, row, codes) < TIE)
            continue;
        n_checked++;
        ck_assert_mem_eq(g.rows.codes + r * n, codes, (size_t)n);
    }
    ck_assert_int_ge(n_checked + (n < 3 ? n_rtn : 0), N_ROWS / 3);
    ck_assert_int_ge(n_rtn, g.result.n_rtn_rows); /* both ways led to the same row where it is larger */
    gptq_run_free(&g);
    gptq_run_free(&base);
    void *all[] = {h, w, order, row, codes, lower};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        qc_free(all[i]);
}

/* Sizes around and beyond every block: a column index that is local where it should be global shows here
 * (mlx-lm). */
START_TEST(textbook)
{
    static const int64_t sizes[] = {1, 2, 15, 16, 17, 64, 127, 128, 129, 200, 257, 300};
    qc_rng rng;
    qc_rng_seed(&rng, 5);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        check_textbook(&rng, sizes[i], 32, QC_ORDER_NATURAL, i & 1);
        check_textbook(&rng, sizes[i], sizes[i], QC_ORDER_STATIC, !(i & 1));
    }
}
END_TEST

/* ---- properties ---- */

/* Errors as stated equal those of the codes that came back, row by row not above RTN's; statistics by their
 * definition; all numbers decodable. */
static void check_run(const gptq_run *g, const float *h, const float *w, const qc_quant_spec *spec)
{
    int64_t n = g->n;
    ck_assert_int_eq(g->rc, 0);
    check_decodable(g);
    double error = gptq_error(g, h, w), tol = 10 * TOL_DOT(n * n), sq_error = 0, sq_weight = 0, norm = 0;
    ck_assert_double_le(fabs(g->result.error - error), tol * error);
    gptq_run base = rtn_by_diag(h, w, g->n_rows, n, spec);
    for (int64_t r = 0; r < g->n_rows; r++) {
        ck_assert_double_le(gptq_row_error(g, h, w, r), gptq_row_error(&base, h, w, r) * (1 + tol));
        for (int64_t c = 0; c < n; c++) {
            double v = (double)w[r * n + c], e = v - gptq_value(g, r, c);
            sq_error += (double)h[c * (n + 1)] * e * e;
            sq_weight += (double)h[c * (n + 1)] * v * v;
            for (int64_t k = 0; k < n; k++)
                norm += v * (double)h[c * n + k] * (double)w[r * n + k];
        }
    }
    ck_assert_double_le(fabs(g->stats.sq_error - sq_error), sq_error * TOL_DOT(1));
    ck_assert_double_le(fabs(g->stats.sq_weight - sq_weight), sq_weight * TOL_DOT(1));
    ck_assert_double_le(fabs(g->norm - norm), norm * tol);
    ck_assert_double_le(fabs(g->result.error_rtn - gptq_error(&base, h, w)), tol * g->result.error_rtn);
    gptq_run_free(&base);
}

/* Every option on correlated inputs: errors as above; never RTN's codes; polishing never hurts. */
START_TEST(all_options)
{
    enum { N = 144, N_ROWS = 19 };
    qc_rng rng;
    qc_rng_seed(&rng, 6);
    float *h = make_h(&rng, N, 500), *w = make_w(&rng, N_ROWS, N);
    static const int64_t groups[] = {16, 40, 128, N};
    for (int k = 0; k < 96; k++) {
        qc_quant_spec spec = gptq_spec(k % 7 + 2, k & 1, groups[k % 4], (qc_search)((k >> 1) & 1));
        qc_gptq_options o = options_of((qc_gptq_order)(k % 3), k % 5 * 0.03 + 0.002, (k >> 2) & 1, k / 8 % 3);
        gptq_run g = gptq(h, N, &o, w, N_ROWS, &spec);
        check_run(&g, h, w, &spec);
        ck_assert_double_le(g.result.error, g.result.error_solve * (1 + TOL_DOT(N * N)));
        ck_assert_double_lt(g.result.error, 0.9 * g.result.error_rtn);
        gptq_run_free(&g);
    }
    qc_free(h);
    qc_free(w);
}
END_TEST

/* Nothing is coupled: the solver has nothing to add and RTN's rows come back. */
START_TEST(identity_is_rtn)
{
    enum { N = 70, N_ROWS = 9 };
    qc_rng rng;
    qc_rng_seed(&rng, 7);
    float *h = identity(N), *w = make_w(&rng, N_ROWS, N);
    for (int k = 0; k < 6; k++) {
        qc_quant_spec spec = gptq_spec(4, k & 1, 32, QC_SEARCH_MSE);
        qc_gptq_options o = options_of((qc_gptq_order)(k / 2), 0.01, false, 1);
        gptq_run g = gptq(h, N, &o, w, N_ROWS, &spec), base = rtn(w, N_ROWS, N, &spec, NULL);
        ck_assert(g.rc == 0 && same_rows(&g, &base));
        gptq_run_free(&g);
        gptq_run_free(&base);
    }
    qc_free(h);
    qc_free(w);
}
END_TEST

/* The factor that rounding uses: pivots > 0, R R^T = damped H, and the sum of the squared errors at the
 * moment of rounding, each with its pivot, is e Hd e^T (methods: Chee et al. 2023, theorem 1); where the grid
 * was wide enough, that error is at most half a step. */
START_TEST(conditional_errors)
{
    enum { N = 150, N_ROWS = 12 };
    qc_rng rng;
    qc_rng_seed(&rng, 8);
    float *h = make_h(&rng, N, 400), *w = make_w(&rng, N_ROWS, N), *a = test_alloc(N * N, sizeof *a);
    double pivots[N], damp = 0;
    for (int j = 0; j < N; j++)
        damp += 0.01 * (double)h[j * (N + 1)] / N;
    memcpy(a, h, N * N * sizeof *a);
    for (int j = 0; j < N; j++)
        a[j * (N + 1)] += (float)damp;
    test_backend t = test_backend_new("", 1);
    int64_t bad;
    qc_err err;
    ck_assert_int_eq(t.be->factor(t.be, a, N, pivots, &bad, &err), 0);
    ck_assert_int_eq(bad, -1);
    qc_quant_spec spec = gptq_spec(4, false, 32, QC_SEARCH_MINMAX);
    qc_gptq_options o = options_of(QC_ORDER_NATURAL, 0.01, false, 0);
    gptq_run g = gptq_on(t.be, h, N, &o, w, N_ROWS, &spec);
    ck_assert_int_eq(g.rc, 0);
    for (int r = 0; r < N_ROWS; r++) {
        double e[N], conditional = 0, direct = 0;
        for (int j = 0; j < N; j++)
            e[j] = (double)w[r * N + j] - gptq_value(&g, r, j);
        for (int j = 0; j < N; j++) {
            double d = e[j];
            ck_assert_double_gt(pivots[j], 0);
            for (int i = 0; i < j; i++)
                d += e[i] * (double)a[j * N + i];
            conditional += d * d * pivots[j];
            for (int i = 0; i < N; i++)
                direct += e[i] * ((double)h[i * N + j] + (i == j ? damp : 0)) * e[j];
            int code = g.rows.codes[r * N + j];
            if (code > 0 && code < 15)
                ck_assert_double_le(fabs(d),
                                    0.5 * fabs((double)g.rows.scales[r * g.n_groups + j / 32]) * (1 + TIE));
        }
        ck_assert_double_le(fabs(conditional - direct), direct * 10 * TOL_DOT(N * N));
    }
    gptq_run_free(&g);
    test_backend_free(&t);
    qc_free(h);
    qc_free(w);
    qc_free(a);
}
END_TEST

/* Trouble case N-11: groups and their scales stay with the columns they were made for, whatever the order. */
START_TEST(groups_stay)
{
    enum { N = 64, N_ROWS = 8 };
    qc_rng rng;
    qc_rng_seed(&rng, 9);
    float *h = make_h(&rng, N, 300), *w = make_w(&rng, N_ROWS, N);
    for (int g = 0; g < 4; g++) /* groups of very different size: a foreign scale would be seen */
        for (int r = 0; r < N_ROWS; r++)
            for (int c = 0; c < 16; c++)
                w[r * N + g * 16 + c] *= (float)(1 << (3 * g));
    for (int k = 0; k < 6; k++) {
        qc_quant_spec spec = gptq_spec(4, k & 1, 16, QC_SEARCH_MINMAX);
        qc_gptq_options o = options_of((qc_gptq_order)(k / 2), 0.01, false, 0);
        gptq_run g = gptq(h, N, &o, w, N_ROWS, &spec), base = rtn_by_diag(h, w, N_ROWS, N, &spec);
        check_run(&g, h, w, &spec);
        ck_assert_mem_eq(g.rows.scales, base.rows.scales, sizeof(float) * N_ROWS * 4);
        if (g.rows.zeros)
            ck_assert_mem_eq(g.rows.zeros, base.rows.zeros, N_ROWS * 4);
        ck_assert_mem_ne(g.rows.codes, base.rows.codes, N_ROWS * N);
        gptq_run_free(&g);
        gptq_run_free(&base);
    }
    qc_free(h);
    qc_free(w);
}
END_TEST

/* Scales are those of a search whose weights are the pivots 1 / U_jj^2 of the columns; their float32 rounding
 * may turn a choice between equals. */
START_TEST(search_weights)
{
    enum { N = 96, N_ROWS = 20, N_SCALES = N_ROWS * N / 16 };
    qc_rng rng;
    qc_rng_seed(&rng, 18);
    float *h = make_h(&rng, N, 400), *w = make_w(&rng, N_ROWS, N), weight[N];
    int64_t order[N] = {0};
    sort_by_diag(h, N, order);
    double *lower = factor_of_inverse(h, N, order, 0.01);
    for (int k = 0; k < N; k++)
        weight[order[k]] = (float)(1 / (lower[k * N + k] * lower[k * N + k]));
    qc_quant_spec spec = gptq_spec(4, true, 16, QC_SEARCH_MSE);
    gptq_run g = gptq(h, N, &plain, w, N_ROWS, &spec), by_pivot = rtn(w, N_ROWS, N, &spec, weight);
    gptq_run by_diag = rtn_by_diag(h, w, N_ROWS, N, &spec);
    int n_pivot = 0, n_diag = 0;
    for (int i = 0; i < N_SCALES; i++) {
        n_pivot += g.rows.scales[i] == by_pivot.rows.scales[i];
        n_diag += g.rows.scales[i] == by_diag.rows.scales[i];
    }
    ck_assert_int_ge(n_pivot, N_SCALES * 99 / 100);
    ck_assert_int_le(n_diag, N_SCALES / 2);
    gptq_run_free(&g);
    gptq_run_free(&by_pivot);
    gptq_run_free(&by_diag);
    qc_free(h);
    qc_free(w);
    qc_free(lower);
}
END_TEST

/* Two inputs in turn on one backend: nothing of the first is left in the second (cactus). Rows do not depend
 * on the rows beside them, nor on how a matrix is cut, nor on threads. */
START_TEST(independence)
{
    enum { N = 48, N_ROWS = 1040 };
    qc_rng rng;
    qc_rng_seed(&rng, 10);
    float *h[2] = {make_h(&rng, N, 200), make_h(&rng, N, 200)}, *w = make_w(&rng, N_ROWS, N);
    qc_quant_spec spec = gptq_spec(3, false, 16, QC_SEARCH_MSE);
    qc_gptq_options o = qc_gptq_defaults();
    test_backend one = test_backend_new("", 1);
    gptq_run whole[2];
    for (int k = 0; k < 2; k++)
        whole[k] = gptq_on(one.be, h[k], N, &o, w, N_ROWS, &spec);
    test_backend_free(&one);
    ck_assert(!same_rows(&whole[0], &whole[1]));
    static const int threads[] = {2, 7};
    for (int k = 0; k < 2; k++) {
        test_backend t = test_backend_new("", threads[k]);
        for (int i = 0; i < 2; i++) {
            gptq_run again = gptq_on(t.be, h[i], N, &o, w, N_ROWS, &spec);
            ck_assert(same_rows(&again, &whole[i]) && again.result.error == whole[i].result.error);
            gptq_run_free(&again);
            gptq_run part = gptq_on(t.be, h[i], N, &o, w + 1001 * N, 7, &spec);
            ck_assert_mem_eq(part.rows.codes, whole[i].rows.codes + 1001 * N, 7 * N);
            ck_assert_mem_eq(part.rows.scales, whole[i].rows.scales + 1001 * 3, 7 * 3 * sizeof(float));
            ck_assert_mem_eq(part.rows.zeros, whole[i].rows.zeros + 1001 * 3, 7 * 3);
            gptq_run_free(&part);
        }
        test_backend_free(&t);
    }
    for (int k = 0; k < 2; k++) {
        gptq_run_free(&whole[k]);
        qc_free(h[k]);
    }
    qc_free(w);
}
END_TEST

/* ---- inputs that break naive solvers ---- */

/* Trouble case N-1: 64 inputs, 5 tokens or a single one (AngelSlim), two identical channels; damping .01 and
 * 0. */
START_TEST(few_tokens)
{
    enum { N = 64, N_ROWS = 10 };
    qc_rng rng;
    qc_rng_seed(&rng, 11);
    float *w = make_w(&rng, N_ROWS, N);
    for (int k = 0; k < 12; k++) {
        int n_tokens = k & 1 ? 1 : 5;
        double damp = k & 2 ? 0 : 0.01;
        float x[5 * N], *h = test_alloc(N * N, sizeof *h);
        for (int i = 0; i < 5 * N; i++)
            x[i] = (float)qc_rng_normal(&rng);
        for (int i = 0; i < 5; i++)
            x[i * N + 20] = x[i * N + 3];
        test_backend t = test_backend_new("", 1);
        qc_err err;
        ck_assert_int_eq(t.be->gram(t.be, h, x, N, NULL, 0, n_tokens, N, N, 1, &err), 0);
        ck_assert_int_eq(t.be->mirror(t.be, h, N, &err), 0);
        for (int i = 0; i < N * N && n_tokens == 1; i++)
            ck_assert_float_eq(h[i], x[i / N] * x[i % N]);
        qc_quant_spec spec = gptq_spec(4, true, 16, QC_SEARCH_MSE);
        qc_gptq_options o = options_of((qc_gptq_order)(k / 4), damp, true, 1);
        gptq_run g = gptq_on(t.be, h, N, &o, w, N_ROWS, &spec);
        ck_assert_int_eq(g.rc, 0);
        check_decodable(&g);
        ck_assert(!g.info.failed && g.info.n_raises == (damp == 0) && g.info.damp == 0.01);
        ck_assert_double_lt(g.result.error, 0.5 * g.result.error_rtn);
        double direct = gptq_error(&g, h, w); /* nearly 0 against w H w^T: compared on that scale */
        ck_assert_double_le(fabs(direct - g.result.error), TOL_DOT(N * N) * g.norm);
        gptq_run_free(&g);
        test_backend_free(&t);
        qc_free(h);
    }
    qc_free(w);
}
END_TEST

/* A pivot that is positive by rounding alone is no pivot: its coefficients would be noise. */
START_TEST(noise_pivot)
{
    float a = 1 - 0x1p-24f, h[4] = {1, a, a, 1}, w[2] = {0.3f, -0.2f};
    qc_quant_spec spec = gptq_spec(4, true, 2, QC_SEARCH_MSE);
    qc_gptq_options o = options_of(QC_ORDER_NATURAL, 0, false, 0);
    gptq_run g = gptq(h, 2, &o, w, 1, &spec);
    ck_assert(g.rc == 0 && g.info.n_raises == 1 && g.info.damp == 0.01);
    gptq_run_free(&g);
    h[1] = h[2] = 0.999f;
    g = gptq(h, 2, &o, w, 1, &spec);
    ck_assert(g.rc == 0 && g.info.n_raises == 0 && g.info.damp == 0);
    gptq_run_free(&g);
}
END_TEST

static void check_refused(const float *h, int64_t n, const char *part)
{
    float *w = test_alloc(n, sizeof *w);
    qc_quant_spec spec = gptq_spec(4, true, 16, QC_SEARCH_MSE);
    gptq_run g = gptq(h, n, &plain, w, 1, &spec);
    ck_assert_int_eq(g.rc, QC_E_INPUT);
    ck_assert_msg(strstr(g.err.msg, part) != NULL, "%s", g.err.msg);
    qc_free(w);
}

/* Trouble case N-2: what is not a number is refused and not damped away; all zeros are rounded to nearest. */
START_TEST(not_finite)
{
    enum { N = 32 };
    qc_rng rng;
    qc_rng_seed(&rng, 12);
    float *h = make_h(&rng, N, 100), keep = h[5 * N + 9];
    h[5 * N + 9] = NAN;
    check_refused(h, N, "inputs 5 and 9 are NaN");
    h[5 * N + 9] = -INFINITY;
    check_refused(h, N, "inputs 5 and 9 are infinite");
    h[5 * N + 9] = keep;
    h[7 * N + 7] = -1;
    check_refused(h, N, "input 7 is -1");
    qc_free(h);
    float *zero = test_alloc(N * N, sizeof *zero), *w = make_w(&rng, 3, N);
    qc_quant_spec spec = gptq_spec(4, true, 16, QC_SEARCH_MSE);
    gptq_run g = gptq(zero, N, &plain, w, 3, &spec), base = rtn(w, 3, N, &spec, NULL);
    ck_assert(g.rc == 0 && g.info.failed && g.info.n_dead == N && g.result.all_rtn && same_rows(&g, &base));
    ck_assert_double_le(fabs(g.stats.sq_error - base.stats.sq_error), TOL_DOT(N) * base.stats.sq_error);
    ck_assert_int_eq(g.stats.n_clipped, base.stats.n_clipped);
    gptq_run_free(&g);
    w[40] = NAN;
    g = gptq(zero, N, &plain, w, 3, &spec);
    ck_assert(g.rc == QC_E_INPUT && strstr(g.err.msg, "row 1, column 8 is NaN"));
    gptq_run_free(&g);
    gptq_run_free(&base);
    qc_free(zero);
    qc_free(w);
}
END_TEST

/* A matrix that no damping makes positive definite ends as RTN and says so (llm-compressor, Model-Optimizer);
 * one that a little more damping mends says how much it took. */
START_TEST(not_positive_definite)
{
    enum { N = 40, N_ROWS = 6 };
    qc_rng rng;
    qc_rng_seed(&rng, 13);
    float *h = identity(N), *w = make_w(&rng, N_ROWS, N), diag[N];
    qc_quant_spec spec = gptq_spec(4, false, 20, QC_SEARCH_MSE);
    for (int j = 0; j < N; j++)
        diag[j] = 1;
    for (int order = 0; order < 3; order++) {
        qc_gptq_options o = options_of((qc_gptq_order)order, 0.01, true, 1);
        h[3] = h[3 * N] = 5; /* eigenvalues 6 and -4 */
        gptq_run g = gptq(h, N, &o, w, N_ROWS, &spec), base = rtn(w, N_ROWS, N, &spec, diag);
        ck_assert(g.rc == 0 && g.info.failed && g.result.all_rtn && same_rows(&g, &base));
        ck_assert(g.info.n_raises == 6 && g.info.damp == 0.64);
        ck_assert_double_eq(g.result.error, g.result.error_rtn);
        gptq_run_free(&g);
        gptq_run_free(&base);
        h[3] = h[3 * N] = 1.1f; /* eigenvalues 2.1 and -.1 */
        g = gptq(h, N, &o, w, N_ROWS, &spec);
        ck_assert(g.rc == 0 && !g.info.failed && g.info.n_raises == 4 && g.info.damp == 0.16);
        check_decodable(&g);
        ck_assert_double_le(g.result.error, g.result.error_rtn);
        gptq_run_free(&g);
    }
    qc_free(h);
    qc_free(w);
}
END_TEST

/* Columns that were 0 in all tokens get the code of 0 and leave the others alone. */
START_TEST(dead_columns)
{
    enum { N = 48, N_ROWS = 7 };
    qc_rng rng;
    qc_rng_seed(&rng, 14);
    float *h = make_h(&rng, N, 200), *w = make_w(&rng, N_ROWS, N), *w2 = test_alloc(N_ROWS * N, sizeof *w2);
    static const int dead[] = {0, 17, 18, 47};
    for (int k = 0; k < 4; k++)
        for (int j = 0; j < N; j++)
            h[dead[k] * N + j] = h[j * N + dead[k]] = 0;
    memcpy(w2, w, sizeof *w * N_ROWS * N);
    for (int r = 0; r < N_ROWS; r++)
        for (int k = 0; k < 4; k++)
            w2[r * N + dead[k]] = 100;
    for (int k = 0; k < 6; k++) {
        qc_quant_spec spec = gptq_spec(4, k & 1, 16, QC_SEARCH_MSE);
        qc_gptq_options o = options_of((qc_gptq_order)(k / 2), 0.01, true, 2);
        gptq_run g = gptq(h, N, &o, w, N_ROWS, &spec), other = gptq(h, N, &o, w2, N_ROWS, &spec);
        ck_assert(g.rc == 0 && g.info.n_dead == 4 && !g.info.failed);
        for (int r = 0; r < N_ROWS; r++)
            for (int d = 0; d < 4; d++)
                ck_assert_double_eq(gptq_value(&g, r, dead[d]), 0);
        ck_assert(same_rows(&g, &other));
        ck_assert_double_lt(g.result.error, 0.8 * g.result.error_rtn);
        gptq_run_free(&g);
        gptq_run_free(&other);
    }
    qc_free(h);
    qc_free(w);
    qc_free(w2);
}
END_TEST

/* Trouble cases N-4 (groups of 1e-9 and of zeros beside a normal one) and N-9 (one-sided groups). */
START_TEST(odd_groups)
{
    enum { N = 64, N_ROWS = 4 };
    qc_rng rng;
    qc_rng_seed(&rng, 15);
    float *h = make_h(&rng, N, 300), *w = make_w(&rng, N_ROWS, N);
    for (int r = 0; r < N_ROWS; r++)
        for (int c = 0; c < 16; c++) {
            w[r * N + c] = qc_bf16_to_f32(qc_f32_to_bf16(1e-9f));
            w[r * N + 16 + c] = 0;
            w[r * N + 32 + c] = (float)-22 + (float)(c % 8);
        }
    for (int k = 0; k < 12; k++) {
        qc_quant_spec spec = gptq_spec(k & 2 ? 8 : 4, k & 1, 16, (qc_search)(k / 4 % 2));
        qc_gptq_options o = options_of((qc_gptq_order)(k / 4), 0.01, true, 1);
        gptq_run g = gptq(h, N, &o, w, N_ROWS, &spec);
        check_run(&g, h, w, &spec);
        gptq_run_free(&g);
        o.refit = false; /* a scale that was made for 1e-9 can not take over errors of other groups */
        g = gptq(h, N, &o, w, N_ROWS, &spec);
        check_run(&g, h, w, &spec);
        for (int r = 0; r < N_ROWS; r++)
            for (int c = 0; c < 16; c++)
                ck_assert_double_le(fabs(gptq_value(&g, r, c)), 256 * 0x1p-24);
        gptq_run_free(&g);
    }
    static const float one_sided[] = {-22, -21, -20, -19, -18, -17, -16, -15};
    static const uint8_t codes[] = {0, 12, 23, 35, 46, 58, 70, 81};
    float *eye = identity(8);
    qc_quant_spec spec = gptq_spec(8, false, 8, QC_SEARCH_MINMAX);
    gptq_run g = gptq(eye, 8, &plain, one_sided, 1, &spec);
    ck_assert_mem_eq(g.rows.codes, codes, 8);
    ck_assert_int_eq(g.rows.zeros[0], 255);
    gptq_run_free(&g);
    qc_free(eye);
    qc_free(h);
    qc_free(w);
}
END_TEST

/* Trouble case N-10: maximum 1, scale 1/7 rounded to F16 or BF16, values beside the half steps of the stored
 * scale. */
START_TEST(nearest_for_stored_scale)
{
    enum { N = 32 };
    float *h = identity(N);
    for (int k = 0; k < 2; k++) {
        qc_quant_spec spec = gptq_spec(4, true, N, QC_SEARCH_MINMAX);
        spec.sym_rule = QC_SYM_NARROW;
        spec.grid.scale_dtype = k ? QC_DT_BF16 : QC_DT_F16;
        float s = k ? qc_bf16_to_f32(qc_f32_to_bf16(1 / 7.0f)) : qc_f16_to_f32(qc_f32_to_f16(1 / 7.0f)), w[N];
        for (int i = 0; i < N; i++) /* half steps -6.5 .. 5.5, a little to each side, and 1 */
            w[i] = i < 26 ? s * ((float)(i / 2) - 6.5f + (i & 1 ? 1e-4f : -1e-4f)) : 1;
        gptq_run g = gptq(h, N, &plain, w, 1, &spec);
        ck_assert_float_eq(g.rows.scales[0], s);
        for (int i = 0; i < 26; i++)
            ck_assert_int_eq(g.rows.codes[i], i / 2 + (i & 1) + 1);
        gptq_run_free(&g);
    }
    qc_free(h);
}
END_TEST

/* ---- corrected target ---- */

/* (w' - w) (H + damping) = alpha (w D + R), dead columns unchanged; D and R in the order of columns whatever
 * the order of rounding. */
START_TEST(corrected_target)
{
    enum { N = 60, N_ROWS = 5 };
    qc_rng rng;
    qc_rng_seed(&rng, 16);
    float *h = make_h(&rng, N, 300), *w = make_w(&rng, N_ROWS, N), *d = test_alloc(N * N, sizeof *d),
          *res = test_alloc(N_ROWS * N, sizeof *res), w2[N_ROWS * N];
    for (int j = 0; j < N; j++)
        h[21 * N + j] = h[j * N + 21] = 0;
    double mean = 0;
    for (int j = 0; j < N; j++)
        mean += (double)h[j * (N + 1)] / (N - 1);
    for (int i = 0; i < N * N; i++)
        d[i] = i % N == 21 ? 0 : (float)(0.1 * mean * qc_rng_normal(&rng));
    for (int i = 0; i < N_ROWS * N; i++)
        res[i] = i % N == 21 ? 0 : (float)(0.1 * mean * qc_rng_normal(&rng));
    for (int k = 0; k < 9; k++) { /* d, both, r */
        int order = k / 3;
        const float *r_or_none = k % 3 ? res : NULL, *d_or_none = k % 3 < 2 ? d : NULL;
        test_backend t = test_backend_new("", 1);
        qc_gptq_options o = options_of((qc_gptq_order)order, 0.05, false, 0);
        qc_gptq_input *in;
        qc_gptq_input_info info;
        qc_err err;
        ck_assert_int_eq(qc_gptq_input_new(t.be, h, N, &o, &in, &info, &err), 0);
        ck_assert_double_le(fabs(info.mean_diag - mean), mean * TOL_DOT(N));
        memcpy(w2, w, sizeof w2);
        ck_assert_int_eq(qc_gptq_correct_target(in, d_or_none, r_or_none, 0.25, w2, N_ROWS, &err), 0);
        double largest = 0, off = 0;
        for (int r = 0; r < N_ROWS; r++)
            for (int j = 0; j < N; j++) {
                double left = 0, right = r_or_none ? 0.25 * (double)res[r * N + j] : 0;
                for (int i = 0; i < N; i++) {
                    double a = (double)h[i * N + j] + (i == j ? 0.05 * mean : 0);
                    left += ((double)w2[r * N + i] - (double)w[r * N + i]) * a;
                    right += d_or_none ? 0.25 * (double)w[r * N + i] * (double)d[i * N + j] : 0;
                }
                largest = fmax(largest, fabs(right));
                off = fmax(off, fabs(left - right));
            }
        /* changes of w are rounded in float32 and multiplied by up to the largest eigenvalue, N mean */
        ck_assert_double_le(off, 2 * TOL_U * N * mean + TOL_DOT(N) * largest * N);
        ck_assert_double_gt(largest, 0.01 * mean);
        for (int r = 0; r < N_ROWS; r++)
            ck_assert_float_eq(w2[r * N + 21], w[r * N + 21]);
        qc_gptq_input_free(in);
        test_backend_free(&t);
    }
    qc_free(h);
    qc_free(w);
    qc_free(d);
    qc_free(res);
}
END_TEST

/* ---- memory ---- */

/* Each allocation fails once: a clean error, outputs of the call untouched, nothing leaks (sanitizer). */
START_TEST(out_of_memory)
{
    enum { N = 20, N_ROWS = 4 };
    qc_rng rng;
    qc_rng_seed(&rng, 17);
    float *h = make_h(&rng, N, 60), *w = make_w(&rng, N_ROWS, N);
    qc_quant_spec spec = gptq_spec(4, true, 10, QC_SEARCH_MSE);
    for (int order = 0; order < 3; order++) {
        qc_gptq_options o = options_of((qc_gptq_order)order, 0.01, true, 1);
        test_backend t = test_backend_new("", 1);
        gptq_run g = gptq_on(t.be, h, N, &o, w, N_ROWS, &spec); /* scratch of the backend is there now */
        ck_assert_int_eq(g.rc, 0);
        gptq_run_free(&g);
        uint8_t codes[N_ROWS * N];
        float scales[N_ROWS * 2];
        for (long nth = 1;; nth++) {
            qc_err err = {0};
            qc_gptq_input *in = NULL;
            qc_gptq_input_info info;
            qc_quant_stats stats = {0};
            qc_gptq_result result = {.error = -1};
            double norm = 0;
            qc_code_rows rows = {.codes = codes, .scales = scales};
            qc_alloc_fail_at(nth);
            int rc = qc_gptq_input_new(t.be, h, N, &o, &in, &info, &err);
            ck_assert((rc == 0) == (in != NULL));
            if (rc == 0)
                rc = qc_gptq_matrix(in, w, N_ROWS, &spec, &rows, &stats, &result, &err);
            if (rc == 0)
                rc = qc_gptq_norm(in, w, N_ROWS, &norm, &err);
            long n_made = qc_alloc_fail_at(0);
            qc_gptq_input_free(in);
            if (rc == 0) {
                ck_assert_int_lt(n_made, nth);
                break;
            }
            ck_assert(rc == QC_E_RESOURCE && err.msg[0] && (stats.sq_weight == 0) == (result.error == -1));
        }
        test_backend_free(&t);
    }
    qc_free(h);
    qc_free(w);
}
END_TEST

START_TEST(bad_options)
{
    static const float h[1] = {1};
    static const qc_gptq_options bad[] = {{.damp = -0.1}, {.damp = NAN}, {.damp = INFINITY}, {.sweeps = -1}};
    qc_quant_spec spec = gptq_spec(4, true, 1, QC_SEARCH_MSE);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        gptq_run g = gptq(h, 1, &bad[i], h, 1, &spec);
        ck_assert_int_eq(g.rc, QC_E_USAGE);
    }
    spec.grid.group_elems = 0;
    gptq_run g = gptq(h, 1, &plain, h, 1,
                      &(qc_quant_spec){.grid.kind = QC_GRID_AFFINE,
                                       .grid.bits = 9,
                                       .grid.group_elems = 1,
                                       .grid.scale_dtype = QC_DT_F16});
    ck_assert_int_eq(g.rc, QC_E_UNSUPPORTED);
    gptq_run_free(&g);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"textbook", textbook},
                               {"all_options", all_options},
                               {"identity_is_rtn", identity_is_rtn},
                               {"conditional_errors", conditional_errors},
                               {"groups_stay", groups_stay},
                               {"search_weights", search_weights},
                               {"independence", independence},
                               {"few_tokens", few_tokens},
                               {"noise_pivot", noise_pivot},
                               {"not_finite", not_finite},
                               {"not_positive_definite", not_positive_definite},
                               {"dead_columns", dead_columns},
                               {"odd_groups", odd_groups},
                               {"nearest_for_stored_scale", nearest_for_stored_scale},
                               {"corrected_target", corrected_target},
                               {"out_of_memory", out_of_memory},
                               {"bad_options", bad_options},
                               {NULL, NULL}};
    return run_tests("gptq", cases);
}
