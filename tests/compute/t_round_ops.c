/* Rounding by second order statistics (factor_solve, round_forward, descend, hessian_error) of the CPU
 * backend against the equations of the papers in float64: GPTQ with U = chol(H^-1) (arXiv 2210.17323),
 * coordinate descent, scale refit (arXiv 2602.02126). Codes near a tie may go either way in float32, and all
 * later ones with them: so the reference follows the codes it is given and asks of each that it is a nearest
 * one. QC_TEST_SEED replays. */
#include "ops_env.h"

#include "kern_quant.h"
#include "qc_alloc.h"
#include "qc_cpu.h"
#include "tol.h"

const char *masks[MAX_MASKS] = {"", "avx512", "all"};
int n_masks = 3;
const qc_compute ops_compute = QC_COMPUTE_F32;
const uint64_t ops_seed = 20260711;

/* Largest distance from a tie, in steps, at which either code may be taken. */
#define TIE_SLACK 2e-3

typedef struct problem {
    int64_t n_rows, n, n_groups;
    qc_grid grid;
    guarded h; /* [n, n] full */
    guarded target, error, scales;
    uint8_t *codes, *zeros;
    int32_t *group_of; /* NULL: by column */
} problem;

static qc_round_rows rows_of(problem *p)
{
    return (qc_round_rows){.n_rows = p->n_rows,
                           .n_cols = p->n,
                           .target = p->target.data,
                           .error = p->error.data,
                           .codes = p->codes,
                           .scales = p->scales.data,
                           .zeros = p->grid.symmetric ? NULL : p->zeros,
                           .group_of = p->group_of};
}

static int64_t group_at(const problem *p, int64_t j)
{
    return p->group_of ? p->group_of[j] : j / p->grid.group_elems;
}

static double scale_at(const problem *p, int64_t r, int64_t j)
{
    return (double)p->scales.data[r * p->n_groups + group_at(p, j)];
}

static double zero_at(const problem *p, int64_t r, int64_t j)
{
    return p->grid.symmetric ? 1 << (p->grid.bits - 1) : p->zeros[r * p->n_groups + group_at(p, j)];
}

static double value_at(const problem *p, int64_t r, int64_t j)
{
    return scale_at(p, r, j) * (p->codes[r * p->n + j] - zero_at(p, r, j));
}

static void random_grid(problem *p)
{
    double levels = (1 << p->grid.bits) - 1;
    for (int64_t i = 0; i < p->n_rows * p->n_groups; i++) {
        double spread = 5 * (0.6 + 0.4 * qc_rng_uniform(&rng));
        p->scales.data[i] = (float)(spread / levels * (qc_rng_below(&rng, 4) == 0 ? -1 : 1));
        p->zeros[i] = (uint8_t)qc_rng_below(&rng, (uint64_t)levels + 1);
        if (qc_rng_below(&rng, 3))
            p->zeros[i] = (uint8_t)(levels / 2);
    }
    qc_quant_store_scales(p->scales.data, (int)(p->n_rows * p->n_groups), p->grid.scale_dtype, p->grid.bits);
}

static problem problem_new(int64_t n_rows, int64_t n, int bits, bool symmetric, int64_t group, bool permuted)
{
    problem p = {.n_rows = n_rows, .n = n, .n_groups = (n + group - 1) / group};
    p.grid = (qc_grid){.kind = QC_GRID_AFFINE,
                       .bits = bits,
                       .symmetric = symmetric,
                       .group_elems = group,
                       .scale_dtype = bits % 2 ? QC_DT_BF16 : QC_DT_F16};
    p.h = hessian_new(n, 0.01);
    p.target = normal_new(n_rows * n, 1, 1);
    p.error = guarded_new(n_rows * n, 0);
    p.scales = guarded_new(n_rows * p.n_groups, 3);
    p.codes = calloc((size_t)(n_rows * n), 1);
    p.zeros = calloc((size_t)(n_rows * p.n_groups), 1);
    random_grid(&p);
    if (permuted) {
        p.group_of = calloc((size_t)n, sizeof *p.group_of);
        for (int64_t j = 0; j < n; j++)
            p.group_of[j] = (int32_t)(j * 7 % n / group);
    }
    if (n_rows > 2) /* a row of zeros */
        memset(p.target.data + n, 0, (size_t)n * sizeof(float));
    return p;
}

/* Results of the same problem on another backend; the inputs stay shared. */
static problem problem_copy(const problem *p)
{
    problem c = *p;
    c.error = guarded_copy(&p->error);
    c.scales = guarded_copy(&p->scales);
    c.codes = calloc((size_t)(p->n_rows * p->n), 1);
    memcpy(c.codes, p->codes, (size_t)(p->n_rows * p->n));
    return c;
}

static void copy_free(problem *p)
{
    guarded_free(&p->error);
    guarded_free(&p->scales);
    free(p->codes);
}

static void problem_free(problem *p)
{
    copy_free(p);
    guarded_free(&p->h);
    guarded_free(&p->target);
    free(p->zeros);
    free(p->group_of);
}

static void check_same_problem(const problem *a, const problem *b, const char *what, const char *mask)
{
    ck_assert(guarded_intact(&b->error) && guarded_intact(&b->scales));
    ck_assert_msg(same_bits(a->error.data, b->error.data, a->error.n) &&
                      same_bits(a->scales.data, b->scales.data, a->scales.n) &&
                      memcmp(a->codes, b->codes, (size_t)(a->n_rows * a->n)) == 0,
                  "%s: threads change bits (mask '%s')", what, mask);
}

/* e h e^T of a row, with the errors of the codes. */
static double objective(const problem *p, int64_t r)
{
    double sum = 0;
    for (int64_t i = 0; i < p->n; i++) {
        double part = 0;
        for (int64_t j = 0; j < p->n; j++)
            part +=
                (double)p->h.data[i * p->n + j] * ((double)p->target.data[r * p->n + j] - value_at(p, r, j));
        sum += part * ((double)p->target.data[r * p->n + i] - value_at(p, r, i));
    }
    return sum;
}

/* error = target - value, to a rounding. */
static void check_errors(const problem *p, const char *what)
{
    for (int64_t r = 0; r < p->n_rows; r++)
        for (int64_t j = 0; j < p->n; j++) {
            double value = value_at(p, r, j), e = (double)p->target.data[r * p->n + j] - value;
            ck_assert_msg(
                close_to((double)p->error.data[r * p->n + j], e, 4 * TOL_U * (fabs(value) + fabs(e))),
                "%s: error [%lld, %lld] is %g, not %g", what, (long long)r, (long long)j,
                (double)p->error.data[r * p->n + j], e);
        }
}

/* The code at [r, j] is one of the nearest to t. */
static void check_nearest(const problem *p, int64_t r, int64_t j, double t, const char *what,
                          const char *mask)
{
    double s = scale_at(p, r, j), qmax = (1 << p->grid.bits) - 1;
    double exact = fmin(fmax(t / s + zero_at(p, r, j), 0), qmax);
    ck_assert_msg(fabs(p->codes[r * p->n + j] - exact) <= 0.5 + TIE_SLACK,
                  "%s of [%lld, %lld]: code [%lld, %lld] is %d for %.6f (mask '%s')", what,
                  (long long)p->n_rows, (long long)p->n, (long long)r, (long long)j, p->codes[r * p->n + j],
                  exact, mask);
}

/* ---- GPTQ ---- */

/* Lower Cholesky factor, in place; the upper triangle is not read. */
static void cholesky(double *a, int64_t n)
{
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = j; i < n; i++) {
            double sum = a[i * n + j];
            for (int64_t k = 0; k < j; k++)
                sum -= a[i * n + k] * a[j * n + k];
            a[i * n + j] = i == j ? sqrt(sum) : sum / a[j * n + j];
        }
    }
}

/* Inverse of a lower triangular matrix, transposed: ret = (L^-1)^T, row k = column k of L^-1. */
static void invert_lower(const double *l, double *ret, int64_t n)
{
    for (int64_t k = 0; k < n; k++)
        for (int64_t i = k; i < n; i++) {
            double sum = i == k;
            for (int64_t j = k; j < i; j++)
                sum -= l[i * n + j] * ret[k * n + j];
            ret[k * n + i] = sum / l[i * n + i];
        }
}

/* U[n, n] upper triangular with H^-1 = U^T U, as the paper has it: the Cholesky factor of the inverse. */
static double *gptq_u(const problem *p)
{
    int64_t n = p->n;
    double *a = calloc((size_t)(n * n), sizeof *a), *t = calloc((size_t)(n * n), sizeof *t);
    for (int64_t i = 0; i < n * n; i++)
        a[i] = (double)p->h.data[i];
    cholesky(a, n);
    invert_lower(a, t, n); /* H^-1 = L^-T L^-1 = t t^T */
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j <= i; j++) {
            double sum = 0;
            for (int64_t k = i; k < n; k++)
                sum += t[i * n + k] * t[j * n + k];
            a[i * n + j] = sum;
        }
    cholesky(a, n); /* H^-1 = L' L'^T, U = L'^T */
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = i; j < n; j++)
            t[i * n + j] = a[j * n + i];
    free(a);
    return t;
}

/* Section 3 of the paper, row by row without blocks: err = (w_j - q_j) / U_jj, w_k -= err U_jk. Returns the
 * sum of err^2 of the row. */
static double follow_gptq(const problem *p, const double *u, int64_t r, const char *mask)
{
    int64_t n = p->n;
    double *w = calloc((size_t)n, sizeof *w), sum = 0;
    for (int64_t j = 0; j < n; j++)
        w[j] = (double)p->target.data[r * n + j];
    for (int64_t j = 0; j < n; j++) {
        check_nearest(p, r, j, w[j], "GPTQ", mask);
        double e = (w[j] - value_at(p, r, j)) / u[j * n + j];
        sum += e * e;
        for (int64_t k = j; k < n; k++)
            w[k] -= e * u[j * n + k];
    }
    free(w);
    return sum;
}

static void check_hessian_error(problem *p, qc_backend *be, const double *want, double tol)
{
    double *got = calloc((size_t)p->n_rows + 1, sizeof *got);
    got[p->n_rows] = -7;
    ck_assert_int_eq(be->hessian_error(be, p->h.data, p->error.data, p->n_rows, p->n, got, &err), QC_OK);
    for (int64_t r = 0; r < p->n_rows; r++)
        ck_assert_msg(close_to(got[r], want[r], tol * want[r] + 1e-9), "e h e^T of row %lld: %.9g, not %.9g",
                      (long long)r, got[r], want[r]);
    ck_assert(got[p->n_rows] == -7);
    free(got);
}

static void gptq_mask(problem *p, const double *u, int m)
{
    int64_t n = p->n, bad;
    guarded factor = guarded_copy(&p->h);
    double *pivots = calloc((size_t)n, sizeof *pivots), *sums = calloc((size_t)p->n_rows, sizeof *sums);
    problem first = {0};
    ck_assert_int_eq(backends[m][0]->factor(backends[m][0], factor.data, n, pivots, &bad, &err), QC_OK);
    ck_assert_int_eq(bad, -1);
    for (int64_t j = 0; j < n; j++)
        ck_assert_msg(close_to(pivots[j] * u[j * n + j] * u[j * n + j], 1, 1e-4), "pivot %lld", (long long)j);
    for (int k = 0; k < n_pools; k++) {
        problem got = problem_copy(p);
        qc_round_rows rows = rows_of(&got);
        ck_assert_int_eq(backends[m][k]->round_forward(backends[m][k], factor.data, &p->grid, &rows, &err),
                         QC_OK);
        if (k == 0) {
            first = got;
            continue;
        }
        check_same_problem(&first, &got, "GPTQ", masks[m]);
        copy_free(&got);
    }
    check_errors(&first, "GPTQ");
    for (int64_t r = 0; r < p->n_rows; r++) {
        sums[r] = follow_gptq(&first, u, r, masks[m]);
        ck_assert(close_to(objective(&first, r), sums[r], 1e-4 * sums[r] + 1e-9));
    }
    for (int k = 0; k < n_pools; k++)
        check_hessian_error(&first, backends[m][k], sums, 1e-4);
    copy_free(&first);
    guarded_free(&factor);
    free(pivots);
    free(sums);
}

static void one_gptq(int64_t n_rows, int64_t n, int bits, bool symmetric, int64_t group, bool permuted)
{
    problem p = problem_new(n_rows, n, bits, symmetric, group, permuted);
    double *u = gptq_u(&p);
    for (int m = 0; m < n_masks; m++)
        gptq_mask(&p, u, m);
    free(u);
    problem_free(&p);
}

START_TEST(gptq)
{
    static const int64_t dims[] = {1, 3, 17, 129, 200}, counts[] = {1, 5, 33};
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < 3; j++)
            one_gptq(counts[j], dims[i], 2 + (i * 3 + j) % 7, (i + j) % 2,
                     j == 0 ? dims[i] : 16 + 16 * (i % 2), j == 2 && dims[i] % 7);
    one_gptq(33, 576, 4, true, 128, false);
    one_gptq(5, 300, 3, false, 300, false);
}
END_TEST

/* Plain rounding where nothing is fed back. */
static void set_nearest(problem *p)
{
    for (int64_t r = 0; r < p->n_rows; r++)
        for (int64_t j = 0; j < p->n; j++) {
            double s = scale_at(p, r, j), z = zero_at(p, r, j), qmax = (1 << p->grid.bits) - 1;
            float q = rintf(p->target.data[r * p->n + j] / (float)s) + (float)z;
            p->codes[r * p->n + j] = (uint8_t)fmin(fmax((double)q, 0), qmax);
            p->error.data[r * p->n + j] = (float)((double)p->target.data[r * p->n + j] - value_at(p, r, j));
        }
}

START_TEST(no_feedback_is_nearest)
{
    problem p = problem_new(9, 150, 4, false, 32, false), nearest = problem_copy(&p);
    guarded zeros = guarded_new(150 * 150, 0), inv = guarded_new(150, 0);
    memset(zeros.data, 0, 150 * 150 * sizeof(float));
    memset(inv.data, 0, 150 * sizeof(float));
    set_nearest(&nearest);
    for (int m = 0; m < n_masks; m++)
        for (int again = 0; again < 2; again++) {
            problem got = problem_copy(again ? &nearest : &p);
            qc_round_rows rows = rows_of(&got);
            qc_backend *be = backends[m][1];
            /* forward with an empty factor; a sweep over dead columns with a Hessian that is not empty */
            if (again)
                ck_assert_int_eq(be->descend(be, p.h.data, inv.data, &p.grid, &rows, 1, false, &err), QC_OK);
            else
                ck_assert_int_eq(be->round_forward(be, zeros.data, &p.grid, &rows, &err), QC_OK);
            ck_assert(memcmp(got.codes, nearest.codes, 9 * 150) == 0);
            check_errors(&got, "nearest");
            copy_free(&got);
        }
    guarded_free(&zeros);
    guarded_free(&inv);
    copy_free(&nearest);
    problem_free(&p);
}
END_TEST

/* What a row gets does not depend on the rows beside it, nor on how many there are. */
START_TEST(rows_are_independent)
{
    enum { ROWS = 1300, N = 150, FROM = 777, SOME = 5 };
    problem p = problem_new(ROWS, N, 4, true, 32, false), some = problem_copy(&p);
    for (int m = 0; m < n_masks; m++) {
        qc_round_rows rows = rows_of(&p), part = rows_of(&some);
        part.n_rows = SOME;
        part.target += FROM * N;
        part.scales += FROM * p.n_groups;
        qc_backend *be = backends[m][1];
        ck_assert_int_eq(be->round_forward(be, p.h.data, &p.grid, &rows, &err), QC_OK);
        ck_assert_int_eq(be->round_forward(be, p.h.data, &p.grid, &part, &err), QC_OK);
        ck_assert(same_bits(part.error, rows.error + FROM * N, SOME * N));
        ck_assert(memcmp(part.codes, rows.codes + FROM * N, SOME * N) == 0);
    }
    copy_free(&some);
    problem_free(&p);
}
END_TEST

/* ---- coordinate descent ---- */

/* One sweep: codes `before` became those of *p. */
static int64_t follow_sweep(const problem *p, const uint8_t *before, int64_t r, const char *mask)
{
    int64_t n = p->n, n_changed = 0;
    double *e = calloc((size_t)n, sizeof *e);
    for (int64_t j = 0; j < n; j++)
        e[j] = (double)p->target.data[r * n + j] - scale_at(p, r, j) * (before[r * n + j] - zero_at(p, r, j));
    for (int64_t j = 0; j < n; j++) {
        double sum = 0;
        for (int64_t i = 0; i < n; i++)
            sum += i == j ? 0 : (double)p->h.data[j * n + i] * e[i];
        check_nearest(p, r, j, (double)p->target.data[r * n + j] + sum / (double)p->h.data[j * n + j],
                      "sweep", mask);
        e[j] = (double)p->target.data[r * n + j] - value_at(p, r, j);
        n_changed += before[r * n + j] != p->codes[r * n + j];
    }
    free(e);
    return n_changed;
}

static int64_t one_sweep(problem *p, const float *inv, int m)
{
    problem before = problem_copy(p), first = {0};
    int64_t n_changed = 0;
    for (int k = 0; k < n_pools; k++) {
        problem got = problem_copy(&before);
        qc_round_rows rows = rows_of(&got);
        ck_assert_int_eq(
            backends[m][k]->descend(backends[m][k], p->h.data, inv, &p->grid, &rows, 1, false, &err), QC_OK);
        if (k == 0) {
            first = got;
            continue;
        }
        check_same_problem(&first, &got, "sweep", masks[m]);
        copy_free(&got);
    }
    check_errors(&first, "sweep");
    for (int64_t r = 0; r < p->n_rows; r++) {
        double was = objective(&before, r), now = objective(&first, r);
        ck_assert_msg(now <= was * (1 + 1e-6) + 1e-9, "a sweep raised e h e^T from %.9g to %.9g", was, now);
        n_changed += follow_sweep(&first, before.codes, r, masks[m]);
    }
    memcpy(p->codes, first.codes, (size_t)(p->n_rows * p->n));
    memcpy(p->error.data, first.error.data, (size_t)first.error.n * sizeof(float));
    copy_free(&before);
    copy_free(&first);
    return n_changed;
}

/* e h e^T falls with every code that moves, so that sweeps come to rest. */
static void check_rest(problem *p, const float *inv, qc_backend *be)
{
    qc_round_rows rows = rows_of(p);
    for (int i = 0; i < 400; i++) {
        problem before = problem_copy(p);
        ck_assert_int_eq(be->descend(be, p->h.data, inv, &p->grid, &rows, 1, false, &err), QC_OK);
        int moved = memcmp(before.codes, p->codes, (size_t)(p->n_rows * p->n));
        copy_free(&before);
        if (!moved)
            return;
    }
    ck_abort_msg("codes of [%lld, %lld] still move after 400 sweeps", (long long)p->n_rows, (long long)p->n);
}

static void one_descent(int64_t n_rows, int64_t n, int bits, bool symmetric, int64_t group)
{
    problem p = problem_new(n_rows, n, bits, symmetric, group, false);
    guarded inv = guarded_new(n, 1);
    for (int64_t j = 0; j < n; j++)
        inv.data[j] = 1 / p.h.data[j * n + j];
    for (int m = 0; m < n_masks; m++) {
        problem q = problem_copy(&p);
        set_nearest(&q);
        int64_t n_changed = one_sweep(&q, inv.data, m);
        ck_assert(n < 17 || n_changed > 0);
        one_sweep(&q, inv.data, m);
        check_rest(&q, inv.data, backends[m][1]);
        copy_free(&q);
    }
    guarded_free(&inv);
    problem_free(&p);
}

START_TEST(descent)
{
    static const int64_t dims[] = {1, 3, 17, 129, 200}, counts[] = {1, 5, 33};
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < (dims[i] > 100 ? 2 : 3); j++)
            one_descent(counts[j], dims[i], 2 + (i * 3 + j) % 7, (i + j) % 2, j == 0 ? dims[i] : 48);
}
END_TEST

/* ---- refit ---- */

/* Groups in order: those before g have the new scales, those behind the old ones. The gain of the new scale
 * may not be less than that of the exact one, rounded. */
static void follow_refit(const problem *before, const problem *after, int64_t r, const char *mask)
{
    problem p = *before;
    int64_t n = p.n, group = p.grid.group_elems;
    p.scales = guarded_copy(&before->scales);
    for (int64_t g = 0; g < p.n_groups; g++) {
        double num = 0, den = 0, was = (double)p.scales.data[r * p.n_groups + g];
        int64_t j1 = (g + 1) * group < n ? (g + 1) * group : n;
        for (int64_t i = g * group; i < j1; i++) {
            double step = p.codes[r * n + i] - zero_at(&p, r, i);
            for (int64_t j = 0; j < n; j++)
                num += step * (double)p.h.data[i * n + j] *
                       ((double)p.target.data[r * n + j] - value_at(&p, r, j));
            for (int64_t j = g * group; j < j1; j++)
                den += step * (double)p.h.data[i * n + j] * (p.codes[r * n + j] - zero_at(&p, r, j));
        }
        float best = (float)(den > 0 ? was + num / den : was);
        qc_quant_store_scales(&best, 1, p.grid.scale_dtype, p.grid.bits);
        float got = after->scales.data[r * p.n_groups + g], stored = got;
        qc_quant_store_scales(&stored, 1, p.grid.scale_dtype, p.grid.bits);
        ck_assert(same_bits(&stored, &got, 1));
        double d = (double)got - was, d_best = (double)best - was;
        double f = -2 * d * num + d * d * den, f_best = fmin(0, -2 * d_best * num + d_best * d_best * den);
        ck_assert_msg(f <= f_best + 1e-4 * fabs(f_best) + 1e-5 * was * was * den,
                      "refit: group %lld of row %lld from %g to %g, best %g (mask '%s')", (long long)g,
                      (long long)r, was, (double)got, (double)best, mask);
        p.scales.data[r * p.n_groups + g] = got;
    }
    guarded_free(&p.scales);
}

/* Nearest codes, and scales off the best value by up to a tenth. */
static problem refit_problem(int64_t n_rows, int64_t n, int bits, bool symmetric, int64_t group)
{
    problem p = problem_new(n_rows, n, bits, symmetric, group, false);
    set_nearest(&p);
    for (int64_t i = 0; i < p.scales.n; i++)
        p.scales.data[i] *= (float)(0.95 + 0.1 * qc_rng_uniform(&rng));
    qc_quant_store_scales(p.scales.data, (int)p.scales.n, p.grid.scale_dtype, bits);
    for (int64_t i = 0; i < p.error.n; i++)
        p.error.data[i] = (float)((double)p.target.data[i] - value_at(&p, i / n, i % n));
    return p;
}

static void one_refit(int64_t n_rows, int64_t n, int bits, bool symmetric, int64_t group)
{
    problem p = refit_problem(n_rows, n, bits, symmetric, group);
    for (int m = 0; m < n_masks; m++) {
        problem first = {0};
        for (int k = 0; k < n_pools; k++) {
            problem got = problem_copy(&p);
            qc_round_rows rows = rows_of(&got);
            ck_assert_int_eq(
                backends[m][k]->descend(backends[m][k], p.h.data, NULL, &p.grid, &rows, 0, true, &err),
                QC_OK);
            if (k == 0) {
                first = got;
                continue;
            }
            check_same_problem(&first, &got, "refit", masks[m]);
            copy_free(&got);
        }
        ck_assert(memcmp(p.codes, first.codes, (size_t)(n_rows * n)) == 0);
        check_errors(&first, "refit");
        for (int64_t r = 0; r < n_rows; r++) {
            double was = objective(&p, r), now = objective(&first, r);
            ck_assert_msg(now <= was * (1 + 1e-6) + 1e-9, "refit raised e h e^T from %.9g to %.9g", was, now);
            follow_refit(&p, &first, r, masks[m]);
        }
        copy_free(&first);
    }
    problem_free(&p);
}

START_TEST(refit)
{
    static const int64_t dims[] = {1, 3, 17, 129, 200}, counts[] = {1, 5, 33};
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < 3; j++)
            one_refit(counts[j], dims[i], 2 + (i * 3 + j) % 7, (i + j) % 2, j == 0 ? dims[i] : 48);
    one_refit(3, 576, 4, true, 576);
}
END_TEST

/* ---- both in turn ---- */

/* (h e)_j of a row. */
static double pull(const problem *p, int64_t r, int64_t j)
{
    double sum = 0;
    for (int64_t i = 0; i < p->n; i++)
        sum += (double)p->h.data[j * p->n + i] * ((double)p->target.data[r * p->n + i] - value_at(p, r, i));
    return sum;
}

static void refit_exactly(problem *p, int64_t r, int64_t j0, int64_t j1)
{
    double num = 0, den = 0;
    for (int64_t i = j0; i < j1; i++) {
        double step = p->codes[r * p->n + i] - zero_at(p, r, i);
        num += step * pull(p, r, i);
        for (int64_t j = j0; j < j1; j++)
            den += step * (double)p->h.data[i * p->n + j] * (p->codes[r * p->n + j] - zero_at(p, r, j));
    }
    float *scale = p->scales.data + r * p->n_groups + group_at(p, j0), best = *scale;
    if (!(den > 0))
        return;
    best += (float)(num / den);
    qc_quant_store_scales(&best, 1, p->grid.scale_dtype, p->grid.bits);
    double d = (double)best - (double)*scale;
    if (-2 * d * num + d * d * den < 0)
        *scale = best;
}

static void move_exactly(problem *p, int64_t r, int64_t j)
{
    double s = scale_at(p, r, j), zero = zero_at(p, r, j), h = (double)p->h.data[j * (p->n + 1)];
    double e = (double)p->target.data[r * p->n + j] - value_at(p, r, j);
    double t = (double)p->target.data[r * p->n + j] + (pull(p, r, j) - h * e) / h;
    double code = fmin(fmax(rint(t / s + zero), 0), (1 << p->grid.bits) - 1), old = p->codes[r * p->n + j];
    if (fabs(t - s * (code - zero)) < fabs(t - s * (old - zero)))
        p->codes[r * p->n + j] = (uint8_t)code;
}

/* The operation's definition in float64, one row. */
static void descend_exactly(problem *p, int64_t r, int n_sweeps)
{
    int64_t n = p->n, group = p->grid.group_elems, block = group > 128 ? group : 128 / group * group;
    for (int sweep = 0; sweep <= n_sweeps; sweep++)
        for (int64_t j0 = 0; j0 < n; j0 += block) {
            int64_t j1 = j0 + block < n ? j0 + block : n;
            for (int64_t g = j0; g < j1; g += group)
                refit_exactly(p, r, g, g + group < j1 ? g + group : j1);
            for (int64_t j = j0; j < j1 && sweep < n_sweeps; j++)
                move_exactly(p, r, j);
        }
}

static void one_alternation(int64_t n_rows, int64_t n, int bits, bool symmetric, int64_t group, int n_sweeps)
{
    problem p = refit_problem(n_rows, n, bits, symmetric, group), want = problem_copy(&p);
    guarded inv = guarded_new(n, 1);
    for (int64_t j = 0; j < n; j++)
        inv.data[j] = 1 / p.h.data[j * n + j];
    for (int64_t r = 0; r < n_rows; r++)
        descend_exactly(&want, r, n_sweeps);
    for (int m = 0; m < n_masks; m++) {
        problem first = {0};
        for (int k = 0; k < n_pools; k++) {
            problem got = problem_copy(&p);
            qc_round_rows rows = rows_of(&got);
            qc_backend *be = backends[m][k];
            ck_assert_int_eq(be->descend(be, p.h.data, inv.data, &p.grid, &rows, n_sweeps, true, &err),
                             QC_OK);
            if (k == 0) {
                first = got;
                continue;
            }
            check_same_problem(&first, &got, "descent", masks[m]);
            copy_free(&got);
        }
        check_errors(&first, "descent");
        int64_t n_same = 0;
        for (int64_t r = 0; r < n_rows; r++) {
            double now = objective(&first, r), best = objective(&want, r);
            ck_assert(now <= objective(&p, r) * (1 + 1e-6) + 1e-9);
            /* where a tie went the other way, another valley as deep is found */
            ck_assert_msg(now <= best * 1.15 + 1e-9, "row %lld: %.9g, not %.9g", (long long)r, now, best);
            n_same +=
                memcmp(first.codes + r * n, want.codes + r * n, (size_t)n) == 0 &&
                same_bits(first.scales.data + r * p.n_groups, want.scales.data + r * p.n_groups, p.n_groups);
        }
        ck_assert_msg(n_same * 10 >= n_rows * 8, "%lld of %lld rows of %lld columns as in float64",
                      (long long)n_same, (long long)n_rows, (long long)n);
        copy_free(&first);
    }
    copy_free(&want);
    guarded_free(&inv);
    problem_free(&p);
}

START_TEST(alternation)
{
    one_alternation(40, 200, 4, true, 32, 1);
    one_alternation(40, 200, 4, false, 48, 2);
    one_alternation(40, 130, 3, false, 64, 2);
    one_alternation(40, 150, 4, true, 150, 1);
    one_alternation(40, 290, 8, true, 140, 1);
}
END_TEST

/* ---- factor_solve, factor of what is not positive definite ---- */

static void one_solve(int64_t n_rows, int64_t n)
{
    guarded a = hessian_new(n, 0.01), b = normal_new(n_rows * n, 1, 1);
    double *pivots = calloc((size_t)n, sizeof *pivots), *size = calloc((size_t)n, sizeof *size);
    for (int m = 0; m < n_masks; m++) {
        guarded first = {0}, factor = guarded_copy(&a);
        int64_t bad;
        ck_assert_int_eq(backends[m][0]->factor(backends[m][0], factor.data, n, pivots, &bad, &err), QC_OK);
        for (int p = 0; p < n_pools; p++) {
            guarded x = guarded_copy(&b);
            ck_assert_int_eq(
                backends[m][p]->factor_solve(backends[m][p], factor.data, pivots, x.data, n_rows, n, &err),
                QC_OK);
            for (int64_t r = 0; r < n_rows && p == 0; r++) /* x A against b */
                for (int64_t j = 0; j < n; j++) {
                    double sum = 0, scale = 0;
                    for (int64_t i = 0; i < n; i++) {
                        sum += (double)x.data[r * n + i] * (double)a.data[i * n + j];
                        scale += fabs((double)x.data[r * n + i] * (double)a.data[i * n + j]);
                    }
                    ck_assert_msg(close_to(sum, (double)b.data[r * n + j], 4 * TOL_DOT(n) * scale),
                                  "solve: x A is %.9g, b %.9g", sum, (double)b.data[r * n + j]);
                }
            check_same(&first, &x, p, "factor_solve", masks[m]);
        }
        guarded_free(&first);
        guarded_free(&factor);
    }
    free(pivots);
    free(size);
    guarded_free(&a);
    guarded_free(&b);
}

START_TEST(factor_solve)
{
    static const int64_t dims[] = {1, 3, 17, 129, 200}, counts[] = {1, 5, 33};
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < 3; j++)
            one_solve(counts[j], dims[i]);
    one_solve(5, 600);
    one_solve(600, 33);
}
END_TEST

START_TEST(not_positive_definite)
{
    enum { N = 600 };
    static const int64_t where[] = {599, 598, 512, 511, 300, 40, 0};
    static const float what[] = {-1, NAN, INFINITY, 0};
    double pivots[N];
    guarded a = hessian_new(N, 0.01);
    for (int i = 0; i < 7; i++)
        for (int m = 0; m < n_masks; m++) {
            guarded got = guarded_copy(&a);
            int64_t bad = -5, j = where[i];
            got.data[j * N + j] = what[(i + m) % 4];
            ck_assert_int_eq(backends[m][1]->factor(backends[m][1], got.data, N, pivots, &bad, &err), QC_OK);
            ck_assert_msg(bad == j, "bad pivot %lld, expected %lld", (long long)bad, (long long)j);
            for (int64_t k = j + 1; k < N; k++)
                ck_assert(isfinite(pivots[k]) && pivots[k] > 0);
            guarded_free(&got);
        }
    guarded_free(&a);
}
END_TEST

/* Fail every allocation of every operation in turn: a clean message each time (leaks show under ASan). */
static int all_operations(problem *p, const float *inv)
{
    qc_err e = {0};
    qc_backend *be = NULL;
    qc_round_rows rows = rows_of(p);
    int64_t n = p->n, bad;
    guarded h = guarded_copy(&p->h), b = guarded_copy(&p->target);
    double *pivots = calloc((size_t)n, sizeof *pivots), *sums = calloc((size_t)p->n_rows, sizeof *sums);
    int rc = qc_backend_cpu_new(pools[1], QC_COMPUTE_F32, &be, &e);
    if (rc == QC_OK)
        rc = be->gram(be, h.data, b.data, n, NULL, 0, p->n_rows, n, n, 1, &e);
    if (rc == QC_OK)
        rc = be->mirror(be, h.data, n, &e);
    if (rc == QC_OK)
        rc = be->factor(be, h.data, n, pivots, &bad, &e);
    if (rc == QC_OK)
        rc = be->factor_solve(be, h.data, pivots, b.data, p->n_rows, n, &e);
    if (rc == QC_OK)
        rc = be->round_forward(be, h.data, &p->grid, &rows, &e);
    if (rc == QC_OK)
        rc = be->descend(be, p->h.data, inv, &p->grid, &rows, 1, true, &e);
    if (rc == QC_OK)
        rc = be->hessian_error(be, p->h.data, p->error.data, p->n_rows, n, sums, &e);
    qc_backend_close(be);
    guarded_free(&h);
    guarded_free(&b);
    free(pivots);
    free(sums);
    if (rc < 0)
        ck_assert(e.code == QC_E_RESOURCE && e.msg[0]);
    return rc;
}

START_TEST(alloc_failures)
{
    if (ops_on_device()) /* t_cuda does this for a device */
        return;
    problem p = problem_new(70, 40, 4, true, 16, false);
    guarded inv = guarded_new(40, 0);
    for (int64_t j = 0; j < 40; j++)
        inv.data[j] = 1 / p.h.data[j * 41];
    ck_assert_int_eq(qc_cpu_set_mask("", &err), QC_OK);
    qc_alloc_fail_at(0);
    ck_assert_int_eq(all_operations(&p, inv.data), QC_OK);
    long n = qc_alloc_fail_at(0);
    ck_assert_int_ge(n, 5);
    for (long i = 1; i <= n; i++) {
        qc_alloc_fail_at(i);
        ck_assert_int_eq(all_operations(&p, inv.data), QC_E_RESOURCE);
    }
    qc_alloc_fail_at(0);
    guarded_free(&inv);
    problem_free(&p);
}
END_TEST

/* Nothing to do is no error. */
START_TEST(empty)
{
    for (int m = 0; m < n_masks; m++) {
        qc_backend *be = backends[m][1];
        float nothing = 5;
        double sum = 5;
        int64_t bad = 5;
        qc_grid grid = {.kind = QC_GRID_AFFINE,
                        .bits = 4,
                        .symmetric = true,
                        .group_elems = 16,
                        .scale_dtype = QC_DT_F16};
        qc_round_rows rows = {.target = &nothing, .error = &nothing, .scales = &nothing};
        for (rows.n_cols = 0; rows.n_cols < 2; rows.n_cols++) { /* no rows, with and without columns */
            ck_assert_int_eq(be->round_forward(be, &nothing, &grid, &rows, &err), QC_OK);
            ck_assert_int_eq(be->descend(be, &nothing, &nothing, &grid, &rows, 1, true, &err), QC_OK);
            ck_assert_int_eq(be->hessian_error(be, &nothing, &nothing, 0, rows.n_cols, &sum, &err), QC_OK);
            ck_assert_int_eq(be->factor_solve(be, &nothing, &sum, &nothing, 0, rows.n_cols, &err), QC_OK);
        }
        ck_assert_int_eq(be->factor(be, &nothing, 0, &sum, &bad, &err), QC_OK);
        ck_assert(nothing == 5 && sum == 5 && bad == -1);
    }
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"gptq", gptq},
        {"no_feedback_is_nearest", no_feedback_is_nearest},
        {"rows_are_independent", rows_are_independent},
        {"descent", descent},
        {"refit", refit},
        {"alternation", alternation},
        {"factor_solve", factor_solve},
        {"not_positive_definite", not_positive_definite},
        {"alloc_failures", alloc_failures},
        {"empty", empty},
    };
    return ops_run("round_ops", cases, sizeof cases / sizeof cases[0]);
}
