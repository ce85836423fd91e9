/* Choice of channel scales against brute force in float64 (scripts/gen_fold_vectors.py, which describes the
 * file), exactness of folds, and the cases where nothing may be scaled. */
#include "fold.h"
#include "qc_alloc.h"
#include "qc_fp.h"
#include "qc_rng.h"
#include "qc_test.h"

#include <math.h>

enum { MAX_COLS = 64, MAX_ROWS = 64, MAX_TOKENS = 64 };

/* Codes near a half may fall on the other side in float32, and sums differ in their last digits. */
#define TOL_LOSS  1e-3
#define TOL_SCALE 1e-5

typedef struct problem {
    char name[32], method[16], rule[8], gain_dtype[8];
    int cols, share, n_matrices, n_rows, n_tokens, bits, group, act_bits, act_group;
    float x[MAX_TOKENS * MAX_COLS], w[QC_FOLD_MATRICES][MAX_ROWS * MAX_COLS], gain[MAX_COLS];
    float h[MAX_COLS * MAX_COLS], sum_abs[MAX_COLS], max_abs[MAX_COLS];
    int32_t scale_of[MAX_COLS];
    qc_quant_spec spec;
} problem;

static qc_backend *open_cpu(void)
{
    qc_backend *be = NULL;
    qc_err err = {0};
    ck_assert_msg(qc_backend_cpu_new(NULL, QC_COMPUTE_F32, &be, &err) == QC_OK, "%s", err.msg);
    return be;
}

typedef struct fetch_ctx {
    const float *w;
    int64_t cols;
} fetch_ctx;

static int fetch(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    const fetch_ctx *c = ctx;
    (void)err;
    memcpy(dst, c->w + row0 * c->cols, (size_t)(n_rows * c->cols) * sizeof *dst);
    return QC_OK;
}

static void take_statistics(problem *p)
{
    for (int t = 0; t < p->n_tokens; t++)
        for (int i = 0; i < p->cols; i++) {
            float a = p->x[t * p->cols + i];
            p->sum_abs[i] += fabsf(a);
            p->max_abs[i] = fmaxf(p->max_abs[i], fabsf(a));
            for (int j = 0; j < p->cols; j++)
                p->h[i * p->cols + j] += a * p->x[t * p->cols + j];
        }
    for (int j = 0; j < p->cols; j++)
        p->scale_of[j] = j % (p->cols / p->share);
}

static int solve(qc_backend *be, const problem *p, const qc_fold_options *options, float *scales, float *gain,
                 qc_fold_result *ret, qc_err *err)
{
    fetch_ctx ctx[QC_FOLD_MATRICES];
    qc_fold_site site = {.n_matrices = p->n_matrices,
                         .n_cols = p->cols,
                         .n_scales = p->cols / p->share,
                         .scale_of = p->share > 1 ? p->scale_of : NULL,
                         .h = p->h,
                         .n_tokens = p->n_tokens,
                         .sum_abs = p->sum_abs,
                         .max_abs = p->max_abs,
                         .sample = p->x,
                         .n_sample = p->n_tokens,
                         .act_bits = p->act_bits,
                         .act_group = p->act_group,
                         .gain = p->gain_dtype[0] == '-' ? NULL : p->gain,
                         .gain_dtype = qc_dtype_from_name(p->gain_dtype)};
    for (int m = 0; m < p->n_matrices; m++) {
        ctx[m] = (fetch_ctx){p->w[m], p->cols};
        site.matrices[m] = (qc_fold_matrix){fetch, &ctx[m], p->n_rows, &p->spec};
    }
    return qc_fold_choose(be, &site, options, scales, gain, ret, err);
}

/* ---- brute force ---- */

static void read_floats(FILE *f, float *dst, int n)
{
    for (int i = 0; i < n; i++) {
        unsigned u;
        ck_assert_int_eq(fscanf(f, "%8x", &u), 1);
        dst[i] = qc_f32_from_bits(u);
    }
}

static bool read_problem(FILE *f, problem *p)
{
    memset(p, 0, sizeof *p);
    if (fscanf(f, " problem %31s %15s %d %d %d %d %d %d %7s %d %d %d %7s", p->name, p->method, &p->cols,
               &p->share, &p->n_matrices, &p->n_rows, &p->n_tokens, &p->bits, p->rule, &p->group,
               &p->act_bits, &p->act_group, p->gain_dtype) != 13)
        return false;
    ck_assert(p->cols <= MAX_COLS && p->n_rows <= MAX_ROWS && p->n_tokens <= MAX_TOKENS);
    read_floats(f, p->x, p->n_tokens * p->cols);
    for (int m = 0; m < p->n_matrices; m++)
        read_floats(f, p->w[m], p->n_rows * p->cols);
    if (p->gain_dtype[0] != '-')
        read_floats(f, p->gain, p->cols);
    p->spec = (qc_quant_spec){.grid = {.kind = QC_GRID_AFFINE,
                                       .bits = p->bits,
                                       .symmetric = strcmp(p->rule, "asym") != 0,
                                       .group_elems = p->group,
                                       .scale_dtype = QC_DT_F32},
                              .sym_rule = QC_SYM_FULL_RANGE};
    take_statistics(p);
    return true;
}

static void check_problem(FILE *f, qc_backend *be, const problem *p)
{
    char kind[16], number[16], want[64];
    double identity, loss, scale;
    float scales[MAX_COLS], gain[MAX_COLS];
    qc_fold_result r;
    qc_err err = {0};
    ck_assert_int_eq(fscanf(f, " choice %15s %15s identity %lf loss %lf", kind, number, &identity, &loss), 4);
    snprintf(want, sizeof want, "%s %s", kind, number);
    qc_fold_options options =
        qc_fold_defaults(strcmp(p->method, "awq") == 0 ? QC_FOLD_AWQ : QC_FOLD_SMOOTHQUANT);
    options.refine = false;
    ck_assert_msg(solve(be, p, &options, scales, gain, &r, &err) == QC_OK, "%s", err.msg);
    ck_assert_msg(strcmp(r.choice, want) == 0, "%s: %s, expected %s", p->name, r.choice, want);
    ck_assert_msg(
        fabs(r.loss_identity - identity) <= TOL_LOSS * identity && fabs(r.loss - loss) <= TOL_LOSS * loss,
        "%s: losses %g and %g, expected %g and %g", p->name, r.loss_identity, r.loss, identity, loss);
    for (int c = 0; c < p->cols / p->share; c++) {
        ck_assert_int_eq(fscanf(f, "%lf", &scale), 1);
        ck_assert_msg(fabs((double)scales[c] - scale) <= TOL_SCALE * scale, "%s: scale %d is %g, expected %g",
                      p->name, c, (double)scales[c], scale);
        if (p->gain_dtype[0] != '-')
            ck_assert_double_le(fabs((double)gain[c] * scale - (double)p->gain[c]),
                                TOL_SCALE * (double)p->gain[c]);
    }
}

START_TEST(brute_force)
{
    FILE *f = fopen(test_data("quant/fold.txt"), "r");
    qc_backend *be = open_cpu();
    static problem p;
    int n = 0;
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(fscanf(f, "#%*[^\n]"), 0);
    for (; read_problem(f, &p); n++)
        check_problem(f, be, &p);
    ck_assert_int_eq(n, 6);
    fclose(f);
    qc_backend_close(be);
}
END_TEST

/* ---- identity ---- */

/* Channels of about the same size and 4-bit weights: a problem that scales can not help much. */
static void random_problem(problem *p, uint64_t seed, int n_rows)
{
    qc_rng rng;
    qc_rng_seed(&rng, seed);
    memset(p, 0, sizeof *p);
    p->cols = 32;
    p->share = p->n_matrices = 1;
    p->n_rows = n_rows;
    p->n_tokens = 64;
    p->gain_dtype[0] = '-';
    p->spec = (qc_quant_spec){.grid = {.kind = QC_GRID_AFFINE,
                                       .bits = 4,
                                       .symmetric = true,
                                       .group_elems = 32,
                                       .scale_dtype = QC_DT_F16}};
    for (int i = 0; i < p->n_tokens * p->cols; i++)
        p->x[i] = (float)qc_rng_normal(&rng);
    for (int i = 0; i < n_rows * p->cols; i++)
        p->w[0][i] = (float)qc_rng_normal(&rng);
    take_statistics(p);
}

static void expect_identity(const qc_fold_result *r, const float *scales, int n)
{
    ck_assert_str_eq(r->choice, QC_FOLD_IDENTITY);
    for (int c = 0; c < n; c++)
        ck_assert(scales[c] == 1);
    ck_assert(r->loss == r->loss_identity);
}

/* Weights that lie on the grid already: any scale makes them worse. */
START_TEST(identity_is_a_candidate)
{
    static problem p;
    qc_backend *be = open_cpu();
    qc_fold_options options = qc_fold_defaults(QC_FOLD_AWQ);
    qc_fold_result r;
    qc_err err = {0};
    float scales[MAX_COLS];
    random_problem(&p, 1, 16);
    for (int i = 0; i < p.n_rows * p.cols; i++)
        p.w[0][i] = i % p.cols == 0 ? -8 : rintf(fmaxf(fminf(p.w[0][i] * 3, 7), -7));
    ck_assert_msg(solve(be, &p, &options, scales, NULL, &r, &err) == QC_OK, "%s", err.msg);
    expect_identity(&r, scales, p.cols);
    ck_assert(r.loss == 0);
    ck_assert(!r.refused);
    /* no data at all: nothing to tell candidates apart by */
    memset(p.x, 0, sizeof p.x);
    memset(p.h, 0, sizeof p.h);
    memset(p.sum_abs, 0, sizeof p.sum_abs);
    memset(p.max_abs, 0, sizeof p.max_abs);
    ck_assert_msg(solve(be, &p, &options, scales, NULL, &r, &err) == QC_OK, "%s", err.msg);
    expect_identity(&r, scales, p.cols);
    qc_backend_close(be);
}
END_TEST

/* A probe that does not stand for the matrix: its one row asks for scales that hurt all others, which lie on
 * the grid. */
START_TEST(worse_on_all_rows_is_refused)
{
    static problem p;
    qc_backend *be = open_cpu();
    qc_fold_options options = qc_fold_defaults(QC_FOLD_AWQ);
    qc_fold_result r;
    qc_err err = {0};
    float scales[MAX_COLS];
    random_problem(&p, 2, 40);
    for (int i = p.cols; i < p.n_rows * p.cols; i++)
        p.w[0][i] = i % p.cols == 0 ? -8 : rintf(fmaxf(fminf(p.w[0][i] * 3, 7), -7));
    options.probe_rows = 1;
    ck_assert_msg(solve(be, &p, &options, scales, NULL, &r, &err) == QC_OK, "%s", err.msg);
    expect_identity(&r, scales, p.cols);
    ck_assert(r.refused);
    qc_backend_close(be);
}
END_TEST

/* Never worse than identity, whatever the method of rounding, and channels without activity keep scale 1. */
START_TEST(never_worse)
{
    static problem p;
    qc_backend *be = open_cpu();
    qc_gptq_options gptq = qc_gptq_defaults();
    for (int i = 0; i < 8; i++) {
        qc_fold_options options = qc_fold_defaults(i % 2 ? QC_FOLD_AWQ : QC_FOLD_SMOOTHQUANT);
        qc_fold_result r;
        qc_err err = {0};
        float scales[MAX_COLS];
        random_problem(&p, 10 + (uint64_t)i, 48);
        for (int t = 0; t < p.n_tokens; t++) {
            p.x[t * p.cols + 3] *= 20;
            p.x[t * p.cols + 7] = 0;
        }
        memset(p.h, 0, sizeof p.h);
        memset(p.sum_abs, 0, sizeof p.sum_abs);
        memset(p.max_abs, 0, sizeof p.max_abs);
        take_statistics(&p);
        p.spec.search = QC_SEARCH_MSE;
        p.act_bits = i < 4 ? 8 : 0;
        options.gptq = i % 4 < 2 ? NULL : &gptq;
        options.probe_rows = 8;
        ck_assert_msg(solve(be, &p, &options, scales, NULL, &r, &err) == QC_OK, "%s", err.msg);
        ck_assert_double_le(r.loss, r.loss_identity);
        ck_assert(scales[7] == 1);
        for (int c = 0; c < p.cols; c++)
            ck_assert(isfinite(scales[c]) && scales[c] > 0);
    }
    qc_backend_close(be);
}
END_TEST

START_TEST(bad_statistics)
{
    static problem p;
    qc_backend *be = open_cpu();
    qc_fold_options options = qc_fold_defaults(QC_FOLD_AWQ);
    qc_fold_result r;
    qc_err err = {0};
    float scales[MAX_COLS];
    random_problem(&p, 3, 16);
    p.h[5] = NAN;
    ck_assert_int_eq(solve(be, &p, &options, scales, NULL, &r, &err), QC_E_INPUT);
    random_problem(&p, 3, 16);
    p.w[0][77] = INFINITY;
    ck_assert_int_eq(solve(be, &p, &options, scales, NULL, &r, &err), QC_E_INPUT);
    qc_backend_close(be);
}
END_TEST

/* ---- exactness ---- */

static float stored(qc_dtype dtype, float x)
{
    return dtype == QC_DT_F16    ? qc_f16_to_f32(qc_f32_to_f16(x))
           : dtype == QC_DT_BF16 ? qc_bf16_to_f32(qc_f32_to_bf16(x))
                                 : x;
}

/* The new gain is a value of the type, and gain = scale * new gain to one rounding. */
START_TEST(folds_are_exact)
{
    static const qc_dtype dtypes[] = {QC_DT_F32, QC_DT_F16, QC_DT_BF16};
    enum { N = 1000 };
    qc_rng rng;
    qc_rng_seed(&rng, 4);
    for (int d = 0; d < 3; d++)
        for (int one = 0; one < 2; one++) {
            float gain[N], scales[N], wanted[N], now[N];
            for (int i = 0; i < N; i++) {
                gain[i] = stored(dtypes[d], (float)qc_rng_normal(&rng));
                wanted[i] = scales[i] = expf((float)qc_rng_normal(&rng));
            }
            /* next to gain -1 a norm of the kind 1 + w has no digits left for a quotient */
            ck_assert_int_le(qc_fold_exact(gain, (float)one, dtypes[d], N, scales, now), one ? N / 25 : 0);
            for (int i = 0; i < N; i++) {
                double before = (double)gain[i] + one, after = (double)now[i] + one;
                ck_assert(now[i] == stored(dtypes[d], now[i]));
                ck_assert_double_le(fabs((double)scales[i] * after - before), 0x1p-22 * fabs(before));
                ck_assert(scales[i] == 1 || fabs((double)(scales[i] / wanted[i]) - 1) <= 1.0 / 16);
            }
        }
}
END_TEST

/* N-12: a norm stored as w with the factor 1 + w. */
START_TEST(n12_one_plus_w)
{
    float w[] = {0, -0.5f, 0.3f, -1}, s[] = {2, 2, 2, 2}, now[4];
    ck_assert_int_eq(qc_fold_exact(w, 1, QC_DT_F32, 4, s, now), 0);
    for (int i = 0; i < 4; i++) {
        ck_assert_float_eq_tol(now[i], i == 3 ? -1 : (1 + w[i]) / 2 - 1, 1e-7f);
        ck_assert_float_eq_tol((1 + now[i]) * s[i], 1 + w[i], 1e-6f);
    }
}
END_TEST

/* N-8: what would leave the type is not scaled, and counted. */
START_TEST(n8_range)
{
    float gain[] = {3e4f, 1, 1e-7f, 0, 1}, s[] = {1e-4f, 1e-9f, 1e3f, 5, 2}, now[5];
    ck_assert_int_eq(qc_fold_exact(gain, 0, QC_DT_F16, 5, s, now), 3);
    for (int i = 0; i < 3; i++) {
        ck_assert(s[i] == 1);
        ck_assert(now[i] == gain[i]);
    }
    ck_assert(now[3] == 0 && s[3] == 5);
    ck_assert(now[4] == 0.5f && s[4] == 2);
}
END_TEST

/* N-8: a channel 1e9 times the others: scales stay in their range, the result finite. */
START_TEST(n8_extreme_channel)
{
    static problem p;
    qc_backend *be = open_cpu();
    qc_fold_options options = qc_fold_defaults(QC_FOLD_AWQ);
    qc_fold_result r;
    qc_err err = {0};
    float scales[MAX_COLS], gain[MAX_COLS];
    random_problem(&p, 5, 16);
    for (int t = 0; t < p.n_tokens; t++)
        p.x[t * p.cols + 2] *= 1e9f;
    for (int i = 0; i < p.n_rows; i++)
        p.w[0][i * p.cols + 2] = 3e4f;
    memset(p.h, 0, sizeof p.h);
    memset(p.sum_abs, 0, sizeof p.sum_abs);
    memset(p.max_abs, 0, sizeof p.max_abs);
    take_statistics(&p);
    for (int c = 0; c < p.cols; c++)
        p.gain[c] = c == 2 ? 6e4f : 1e-3f;
    snprintf(p.gain_dtype, sizeof p.gain_dtype, "F16");
    ck_assert_msg(solve(be, &p, &options, scales, gain, &r, &err) == QC_OK, "%s", err.msg);
    ck_assert_double_le(r.loss, r.loss_identity);
    for (int c = 0; c < p.cols; c++) {
        ck_assert(isfinite(gain[c]) && fabsf(gain[c]) <= 65504);
        ck_assert(scales[c] > 0.9e-4f && scales[c] < 1.1e4f);
    }
    qc_backend_close(be);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"brute_force", brute_force},
        {"identity", identity_is_a_candidate},
        {"refused", worse_on_all_rows_is_refused},
        {"never_worse", never_worse},
        {"bad_statistics", bad_statistics},
        {"exact", folds_are_exact},
        {"n12", n12_one_plus_w},
        {"n8_range", n8_range},
        {"n8_extreme", n8_extreme_channel},
        {NULL, NULL},
    };
    return run_tests("fold", cases);
}
