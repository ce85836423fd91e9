/* Speed of the GPTQ solve with its defaults: bench_gptq [threads [mask]]. Gflop/s count the products that
 * docs/methods/gptq.md names, 7.5 rows n^2 multiply-adds a matrix; the sum tells whether two builds give the
 * same codes. */
#include "gptq.h"
#include "qc_alloc.h"
#include "qc_cpu.h"
#include "qc_rng.h"
#include "qc_time.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { TOKENS = 512, GROUP = 128, REPEATS = 3 };

static void check(int rc, const qc_err *err)
{
    if (rc == QC_OK)
        return;
    fprintf(stderr, "bench_gptq: %s\n", err->msg);
    exit(1);
}

static void *array(int64_t n, size_t elem_bytes)
{
    void *p = qc_calloc((size_t)n, elem_bytes);
    if (!p)
        exit(5);
    return p;
}

/* Tokens whose columns differ in size and depend on each other. */
static void fill_tokens(qc_rng *rng, float *x, int64_t n)
{
    for (int64_t t = 0; t < TOKENS; t++)
        for (int64_t j = 0; j < n; j++) {
            float size = j % 7 == 3 ? 4 : 1, before = j ? x[t * n + j - 1] : 0;
            x[t * n + j] = size * (float)qc_rng_normal(rng) + 0.25f * before;
        }
}

/* FNV-1a */
static uint32_t sum_of(const uint8_t *codes, int64_t n)
{
    uint32_t sum = 2166136261u;
    for (int64_t i = 0; i < n; i++)
        sum = (sum ^ codes[i]) * 16777619u;
    return sum;
}

static double processor_seconds(void)
{
    return (double)clock() / CLOCKS_PER_SEC;
}

static void run_shape(qc_backend *be, int64_t n_rows, int64_t n, bool symmetric)
{
    qc_err err;
    qc_rng rng;
    qc_rng_seed(&rng, 1);
    float *x = array(TOKENS * n, sizeof *x), *h = array(n * n, sizeof *h), *w = array(n_rows * n, sizeof *w);
    fill_tokens(&rng, x, n);
    for (int64_t i = 0; i < n_rows * n; i++)
        w[i] = 0.02f * (float)qc_rng_normal(&rng);
    check(be->gram(be, h, x, n, NULL, 0, TOKENS, n, n, 1, &err), &err);
    check(be->mirror(be, h, n, &err), &err);
    qc_quant_spec spec = {.grid = {.kind = QC_GRID_AFFINE,
                                   .bits = 4,
                                   .symmetric = symmetric,
                                   .group_elems = GROUP,
                                   .scale_dtype = QC_DT_F16},
                          .search = QC_SEARCH_MSE};
    qc_code_rows rows;
    qc_gptq_options options = qc_gptq_defaults();
    qc_gptq_input *in;
    qc_gptq_input_info info;
    check(qc_code_rows_alloc(&spec.grid, n_rows, n, &rows, &err), &err);
    check(qc_gptq_input_new(be, h, n, &options, &in, &info, &err), &err);
    double best = 1e9, processor = 1e9;
    for (int i = 0; i < REPEATS; i++) {
        qc_quant_stats stats = {0};
        qc_gptq_result result;
        double start = qc_now_seconds(), before = processor_seconds();
        check(qc_gptq_matrix(in, w, n_rows, &spec, &rows, &stats, &result, &err), &err);
        double wall = qc_now_seconds() - start, used = processor_seconds() - before;
        best = wall < best ? wall : best;
        processor = used < processor ? used : processor;
    }
    double flop = 15 * (double)n_rows * (double)n * (double)n;
    printf("%5lld x %-5lld %-4s %8.1f ms, %6.1f Gflop/s; processor %8.1f ms, %6.1f Gflop/s; codes %08x\n",
           (long long)n_rows, (long long)n, symmetric ? "sym" : "asym", best * 1e3, flop / best * 1e-9,
           processor * 1e3, flop / processor * 1e-9, sum_of(rows.codes, n_rows * n));
    qc_gptq_input_free(in);
    qc_code_rows_free(&rows);
    qc_free(x);
    qc_free(h);
    qc_free(w);
}

int main(int argc, char **argv)
{
    static const int64_t shapes[][2] = {{576, 576}, {1536, 576}, {576, 1536}, {2048, 1024}, {1024, 3072}};
    int threads = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 2;
    qc_err err;
    qc_pool *pool;
    qc_backend *be;
    check(qc_cpu_set_mask(argc > 2 ? argv[2] : "", &err), &err);
    check(qc_pool_new(threads, &pool, &err), &err);
    check(qc_backend_cpu_new(pool, QC_COMPUTE_F32, &be, &err), &err);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int symmetric = 0; symmetric < 2; symmetric++)
            run_shape(be, shapes[i][0], shapes[i][1], symmetric);
    qc_backend_close(be);
    qc_pool_free(pool);
    return 0;
}
