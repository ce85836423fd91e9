/* Speed of the operations at the shapes of real models: one table, every instruction set, OpenBLAS beside
 * ours. Usage: bench_ops [pattern [threads]]. Each line is the best of a few interleaved rounds, in processor
 * time of all threads, so that other work on the machine counts little; rates are per core. */
#include "backend.h"
#include "qc_cpu.h"
#include "qc_rng.h"

#include <cblas.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROUNDS = 7, TOKENS = 2048 };

enum { N_SIDES = 4 };
static const struct {
    const char *name, *mask;
    qc_compute compute;
} sides[N_SIDES] = {{"best", "", QC_COMPUTE_F32},
                    {"-avx512", "avx512", QC_COMPUTE_F32},
                    {"bf16", "", QC_COMPUTE_BF16},
                    {"bf16 -amx", "amx", QC_COMPUTE_BF16}};
static qc_backend *backends[N_SIDES];
static int n_backends, n_threads = 1;
static qc_pool *pool;
static const char *pattern = "";

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static float *random_floats(int64_t n)
{
    qc_rng rng;
    qc_rng_seed(&rng, 1);
    float *p = backends[0]->alloc(backends[0], n, NULL);
    if (!p)
        exit(5);
    for (int64_t i = 0; i < n; i++)
        p[i] = (float)(qc_rng_uniform(&rng) - 0.5);
    return p;
}

/* A measured call; be NULL: the comparison (OpenBLAS). */
typedef struct bench {
    const char *op, *shape, *unit;
    double work; /* in 1e9 of the unit per call */
    void (*run)(qc_backend *be, void *args);
    void *args;
    int with_blas;
} bench;

static void report(const bench *b)
{
    double best[N_SIDES + 1];
    int n = n_backends + b->with_blas;
    if (!strstr(b->op, pattern))
        return;
    for (int i = 0; i < n; i++)
        best[i] = INFINITY;
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < n; i++) {
            double t0 = now();
            b->run(i < n_backends ? backends[i] : NULL, b->args);
            best[i] = fmin(best[i], now() - t0);
        }
    for (int i = 0; i < n; i++)
        printf("%-10s %-22s %-9s %9.3f ms %8.1f %s\n", b->op, b->shape,
               i < n_backends ? sides[i].name : "openblas", best[i] * 1e3, b->work / best[i], b->unit);
    fflush(stdout);
}

/* ---- linear ---- */

typedef struct linear_args {
    int64_t n, k;
    const float *x, *w;
    float *y;
    qc_weight *prepared[N_SIDES];
} linear_args;

static int fetch(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    (void)err;
    const linear_args *a = ctx;
    memcpy(dst, a->w + row0 * a->k, (size_t)(n_rows * a->k) * sizeof *dst);
    return QC_OK;
}

static void run_linear(qc_backend *be, void *args)
{
    linear_args *a = args;
    if (!be) {
        openblas_set_num_threads(n_threads);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, TOKENS, (blasint)a->n, (blasint)a->k, 1, a->x,
                    (blasint)a->k, a->w, (blasint)a->k, 0, a->y, (blasint)a->n);
        openblas_set_num_threads(1);
        return;
    }
    for (int i = 0; i < n_backends; i++)
        if (backends[i] == be)
            be->linear(be, a->y, a->n, a->x, a->k, a->prepared[i], NULL, TOKENS, false, NULL);
}

static void run_load(qc_backend *be, void *args)
{
    linear_args *a = args;
    qc_weight *w = NULL;
    if (be->weight_load(be, a->n, a->k, fetch, a, &w, NULL) == QC_OK)
        be->weight_free(be, w);
}

static void bench_linear(int64_t k, int64_t n)
{
    char shape[64];
    snprintf(shape, sizeof shape, "%dx%lldx%lld", TOKENS, (long long)k, (long long)n);
    linear_args a = {.n = n,
                     .k = k,
                     .x = random_floats(TOKENS * k),
                     .w = random_floats(n * k),
                     .y = random_floats(TOKENS * n)};
    for (int i = 0; i < n_backends; i++)
        if (backends[i]->weight_load(backends[i], n, k, fetch, &a, &a.prepared[i], NULL) != QC_OK)
            exit(5);
    report(&(bench){"linear", shape, "GFLOP/s", 2e-9 * TOKENS * (double)n * (double)k, run_linear, &a, 1});
    report(&(bench){"load", shape, "GB/s", 4e-9 * (double)n * (double)k, run_load, &a, 0});
    for (int i = 0; i < n_backends; i++)
        backends[i]->weight_free(backends[i], a.prepared[i]);
    backends[0]->free(backends[0], (float *)a.x);
    backends[0]->free(backends[0], (float *)a.w);
    backends[0]->free(backends[0], a.y);
}

/* ---- the others ---- */

typedef struct op_args {
    float *a, *b, *c, *out;
    qc_attention_shape shape;
    qc_score *scores;
    int32_t *targets;
    int64_t n;
} op_args;

static void run_attention(qc_backend *be, void *args)
{
    op_args *a = args;
    be->attention(be, a->out, a->a, a->b, a->c, &a->shape, NULL);
}

static void run_silu(qc_backend *be, void *args)
{
    op_args *a = args;
    be->gated_act(be, a->out, a->a, a->b, a->n, QC_ACT_SILU, NULL);
}

static void run_add(qc_backend *be, void *args)
{
    op_args *a = args;
    be->add(be, a->out, a->a, 1, a->n, NULL);
}

static void run_norm(qc_backend *be, void *args)
{
    op_args *a = args;
    be->rms_norm(be, a->out, 576, a->a, 576, a->b, 0, TOKENS, 576, 1e-5f, NULL);
}

static void run_rope(qc_backend *be, void *args)
{
    op_args *a = args;
    be->rope(be, a->a, 576, a->b, a->c, TOKENS, 9, 64, 64, NULL);
}

static void run_score(qc_backend *be, void *args)
{
    op_args *a = args;
    for (int64_t t = 0; t < TOKENS; t++)
        a->scores[t] = qc_score_start();
    be->score(be, a->scores, a->a, a->c, a->n, a->targets, TOKENS, 0, a->n, 0, NULL);
}

static void bench_others(void)
{
    int64_t n = (int64_t)TOKENS * 4096;
    op_args a = {
        .a = random_floats(n), .b = random_floats(n), .c = random_floats(n), .out = random_floats(n), .n = n};
    a.scores = malloc(TOKENS * sizeof *a.scores);
    a.targets = calloc(TOKENS, sizeof *a.targets);
    static const qc_attention_shape shapes[] = {{TOKENS, 9, 3, 64, 0, 0.125f, 0},
                                                {TOKENS, 16, 8, 128, 0, 0.088f, 0},
                                                {TOKENS, 9, 3, 64, 256, 0.125f, 0}};
    for (int i = 0; i < 3; i++) {
        char shape[64];
        a.shape = shapes[i];
        snprintf(shape, sizeof shape, "T%d H%lld/%lld D%lld w%lld", TOKENS, (long long)a.shape.n_heads,
                 (long long)a.shape.n_kv_heads, (long long)a.shape.head_dim, (long long)a.shape.window);
        double pairs = a.shape.window ? (double)TOKENS * (double)a.shape.window : 0.5 * TOKENS * TOKENS;
        report(&(bench){"attention", shape, "GFLOP/s",
                        4e-9 * pairs * (double)(a.shape.n_heads * a.shape.head_dim), run_attention, &a, 0});
    }
    a.n = 4096;
    report(&(bench){"score2", "2048x4096", "GB/s", 8e-9 * TOKENS * 4096, run_score, &a, 0});
    float *c = a.c;
    a.c = NULL;
    report(&(bench){"score1", "2048x4096", "GB/s", 4e-9 * TOKENS * 4096, run_score, &a, 0});
    a.c = c;
    a.n = (int64_t)TOKENS * 1536;
    report(&(bench){"silu", "2048x1536", "GB/s", 12e-9 * (double)a.n, run_silu, &a, 0});
    a.n = (int64_t)TOKENS * 576;
    report(&(bench){"add", "2048x576", "GB/s", 12e-9 * (double)a.n, run_add, &a, 0});
    report(&(bench){"rms_norm", "2048x576", "GB/s", 8e-9 * (double)a.n, run_norm, &a, 0});
    report(&(bench){"rope", "2048x9x64", "GB/s", 8e-9 * (double)a.n, run_rope, &a, 0});
    backends[0]->free(backends[0], a.a);
    backends[0]->free(backends[0], a.b);
    backends[0]->free(backends[0], a.c);
    backends[0]->free(backends[0], a.out);
    free(a.scores);
    free(a.targets);
}

/* ---- calibration and rounding: n inputs, `rows` outputs or tokens ---- */

enum { ROWS = 768, GROUP = 128 };

typedef struct hessian_args {
    int64_t n, tokens;
    float *a, *h, *work; /* [tokens, n], [n, n] well conditioned and full, [n, n] */
    float *inv;          /* [n] 1 / diagonal */
    double *pivots, *ret;
    qc_grid grid;
    qc_round_rows rows;
} hessian_args;

static void run_gram(qc_backend *be, void *args)
{
    hessian_args *a = args;
    be->gram(be, a->work, a->a, a->n, NULL, 0, a->tokens, a->n, a->n, 1, NULL);
}

static void run_gram_full(qc_backend *be, void *args)
{
    hessian_args *a = args;
    be->gram(be, a->work, a->a, a->n, a->a, a->n, a->tokens, a->n, a->n, 1, NULL);
}

static void run_stats(qc_backend *be, void *args)
{
    hessian_args *a = args;
    be->column_stats(be, a->work, a->work + a->n, a->a, a->n, a->tokens, a->n, NULL);
}

static void run_acts(qc_backend *be, void *args)
{
    hessian_args *a = args;
    be->quantize_acts(be, a->a, a->n, a->a, a->n, a->tokens, a->n, 8, 0, NULL);
}

static void run_factor(qc_backend *be, void *args)
{
    hessian_args *a = args;
    int64_t bad;
    memcpy(a->work, a->h, (size_t)(a->n * a->n) * sizeof(float));
    be->factor(be, a->work, a->n, a->pivots, &bad, NULL);
}

static void run_mirror(qc_backend *be, void *args)
{
    hessian_args *a = args;
    be->mirror(be, a->work, a->n, NULL);
}

static void run_solve(qc_backend *be, void *args)
{
    hessian_args *a = args;
    be->factor_solve(be, a->h, a->pivots, a->rows.error, ROWS, a->n, NULL);
}

static void run_forward(qc_backend *be, void *args)
{
    hessian_args *a = args;
    be->round_forward(be, a->h, &a->grid, &a->rows, NULL);
}

static void run_descent(qc_backend *be, void *args)
{
    hessian_args *a = args;
    be->descend(be, a->h, a->inv, &a->grid, &a->rows, 2, true, NULL);
}

static void run_refit(qc_backend *be, void *args)
{
    hessian_args *a = args;
    be->descend(be, a->h, a->inv, &a->grid, &a->rows, 0, true, NULL);
}

static void run_hessian_error(qc_backend *be, void *args)
{
    hessian_args *a = args;
    be->hessian_error(be, a->h, a->rows.error, ROWS, a->n, a->ret, NULL);
}

static void hessian_args_new(hessian_args *a, int64_t n)
{
    int64_t n_groups = n / GROUP + 1;
    *a = (hessian_args){.n = n, .tokens = TOKENS, .a = random_floats(TOKENS * n), .h = random_floats(n * n)};
    a->work = random_floats(n * n);
    a->inv = random_floats(n);
    a->pivots = calloc((size_t)n, sizeof(double));
    a->ret = calloc(ROWS, sizeof(double));
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < i; j++)
            a->h[j * n + i] = a->h[i * n + j] *= 1e-2f;
        a->h[i * n + i] = 1;
        a->inv[i] = 0.5f;
        a->pivots[i] = 1;
    }
    a->grid = (qc_grid){
        .kind = QC_GRID_AFFINE, .bits = 4, .symmetric = true, .group_elems = GROUP, .scale_dtype = QC_DT_F16};
    a->rows = (qc_round_rows){.n_rows = ROWS, .n_cols = n, .target = random_floats(ROWS * n)};
    a->rows.error = random_floats(ROWS * n);
    a->rows.codes = calloc((size_t)(ROWS * n), 1);
    a->rows.scales = random_floats(ROWS * n_groups);
    for (int64_t i = 0; i < ROWS * n_groups; i++)
        a->rows.scales[i] = 0.0625f;
}

static void hessian_args_free(hessian_args *a)
{
    float *all[] = {a->a,          a->h,          a->work, a->inv, (float *)(uintptr_t)a->rows.target,
                    a->rows.error, a->rows.scales};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        backends[0]->free(backends[0], all[i]);
    free(a->pivots);
    free(a->ret);
    free(a->rows.codes);
}

static void bench_hessian(int64_t n)
{
    hessian_args a;
    char shape[64];
    double square = 1e-9 * (double)n * (double)n, values = 1e-9 * TOKENS * (double)n;
    hessian_args_new(&a, n);
    for (a.tokens = TOKENS; a.tokens >= 512; a.tokens /= 4) {
        snprintf(shape, sizeof shape, "T%lld K%lld", (long long)a.tokens, (long long)n);
        report(&(bench){"gram", shape, "GFLOP/s", (double)a.tokens * square, run_gram, &a, 0});
        report(&(bench){"gram2", shape, "GFLOP/s", 2 * (double)a.tokens * square, run_gram_full, &a, 0});
    }
    a.tokens = TOKENS;
    snprintf(shape, sizeof shape, "n%lld rows %d", (long long)n, ROWS);
    report(&(bench){"stats", shape, "GB/s", 4 * values, run_stats, &a, 0});
    report(&(bench){"acts", shape, "GB/s", 8 * values, run_acts, &a, 0});
    report(&(bench){"factor", shape, "GFLOP/s", (double)n * square / 3, run_factor, &a, 0});
    report(&(bench){"mirror", shape, "GB/s", 4 * square, run_mirror, &a, 0});
    report(&(bench){"solve", shape, "GFLOP/s", 2 * ROWS * square, run_solve, &a, 0});
    report(&(bench){"forward", shape, "GFLOP/s", ROWS * square, run_forward, &a, 0});
    report(&(bench){"descent", shape, "GFLOP/s", 6 * ROWS * square, run_descent, &a, 0});
    report(&(bench){"refit", shape, "GFLOP/s", 2 * ROWS * square, run_refit, &a, 0});
    report(&(bench){"herror", shape, "GFLOP/s", ROWS * square, run_hessian_error, &a, 0});
    hessian_args_free(&a);
}

int main(int argc, char **argv)
{
    static const int64_t shapes[][2] = {{576, 192},   {576, 576},   {576, 1536},  {1536, 576}, {576, 4096},
                                        {1024, 1024}, {1024, 3072}, {3072, 1024}, {1024, 4096}};
    qc_err err;
    if (argc > 1)
        pattern = argv[1];
    if (argc > 2)
        n_threads = atoi(argv[2]);
    if (qc_pool_new(n_threads, &pool, &err) != QC_OK)
        return 5;
    for (int i = 0; i < N_SIDES; i++, n_backends++)
        if (qc_cpu_set_mask(sides[i].mask, &err) != QC_OK ||
            qc_backend_cpu_new(pool, sides[i].compute, &backends[i], &err) != QC_OK)
            return 5;
    printf("%d threads, rates per core; best = ", n_threads);
    if (qc_cpu_set_mask("", &err) == QC_OK)
        printf("%s\n", qc_cpu_describe());
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        bench_linear(shapes[i][0], shapes[i][1]);
    bench_others();
    static const int64_t dims[] = {576, 1024, 1536, 2048, 3072};
    for (int i = 0; i < 5; i++)
        bench_hessian(dims[i]);
    for (int i = 0; i < n_backends; i++)
        qc_backend_close(backends[i]);
    qc_pool_free(pool);
    return 0;
}
