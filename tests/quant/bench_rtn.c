/* Speed of RTN quantization per grid, mode and instruction set: bench_rtn [threads [millions of weights]].
 * The rows start as BF16 in memory and are widened block by block, as in a conversion. */
#include "qc_alloc.h"
#include "qc_cpu.h"
#include "qc_fp.h"
#include "qc_rng.h"
#include "rtn.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { N_COLS = 1536, BLOCK_ROWS = 256 };

typedef struct bench {
    qc_backend *be;
    const uint16_t *bf16; /* [n_rows, N_COLS] */
    int64_t n_rows;
    float *w; /* [BLOCK_ROWS, N_COLS], as codes, scales and zeros below */
    uint8_t *codes, *zeros;
    float *scales;
} bench;

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void fail(const qc_err *err)
{
    fprintf(stderr, "bench_rtn: %s\n", err->msg);
    exit(1);
}

/* Seconds for one pass over all rows. */
static double one_pass(bench *b, const qc_quant_spec *spec, qc_quant_stats *stats)
{
    double t0 = now_s();
    qc_err err;
    for (int64_t r = 0; r < b->n_rows; r += BLOCK_ROWS) {
        int64_t n = b->n_rows - r < BLOCK_ROWS ? b->n_rows - r : BLOCK_ROWS;
        qc_code_rows rows = {
            .codes = b->codes, .scales = b->scales, .zeros = spec->grid.symmetric ? NULL : b->zeros};
        if (qc_dense_to_f32(QC_DT_BF16, b->bf16 + r * N_COLS, n * N_COLS, b->w, &err) < 0 ||
            qc_rtn_rows(b->be, b->w, n, N_COLS, spec, NULL, &rows, stats, &err) < 0)
            fail(&err);
    }
    return now_s() - t0;
}

static void run_modes(bench *b)
{
    static const struct {
        int bits;
        int64_t group;
    } grids[] = {{4, 32}, {4, 128}, {4, N_COLS}, {8, 128}, {8, N_COLS}};
    for (size_t i = 0; i < sizeof grids / sizeof grids[0]; i++)
        for (int mode = 0; mode < 4; mode++) {
            qc_quant_spec spec = {.grid = {.kind = QC_GRID_AFFINE,
                                           .bits = grids[i].bits,
                                           .symmetric = mode < 2,
                                           .group_elems = grids[i].group,
                                           .scale_dtype = QC_DT_F16},
                                  .search = mode & 1 ? QC_SEARCH_MSE : QC_SEARCH_MINMAX};
            qc_quant_stats stats = {0};
            double best = 1e9;
            for (int pass = 0; pass < 3; pass++) {
                stats = (qc_quant_stats){0};
                double t = one_pass(b, &spec, &stats);
                best = t < best ? t : best;
            }
            printf("%-24s INT%d group %-5lld %-4s %-7s %8.1f M weights/s  relative squared error %.4e\n",
                   qc_cpu_describe(), grids[i].bits, (long long)grids[i].group, mode < 2 ? "sym" : "asym",
                   mode & 1 ? "search" : "min-max", (double)(b->n_rows * N_COLS) / best * 1e-6,
                   stats.sq_error / stats.sq_weight);
        }
}

int main(int argc, char **argv)
{
    static const char *const masks[] = {"", "avx512", "all"};
    int threads = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 2;
    double millions = argc > 2 ? strtod(argv[2], NULL) : 4;
    bench b = {.n_rows = (int64_t)(millions * 1e6 / N_COLS) + 1};
    uint16_t *bf16 = qc_alloc((size_t)(b.n_rows * N_COLS), sizeof *bf16);
    b.w = qc_alloc(BLOCK_ROWS * N_COLS, sizeof *b.w);
    b.codes = qc_alloc(BLOCK_ROWS * N_COLS, 1);
    b.zeros = qc_alloc(BLOCK_ROWS * N_COLS, 1);
    b.scales = qc_alloc(BLOCK_ROWS * N_COLS, sizeof *b.scales);
    if (!bf16 || !b.w || !b.codes || !b.zeros || !b.scales)
        return 5;
    qc_rng rng;
    qc_rng_seed(&rng, 1);
    for (int64_t i = 0; i < b.n_rows * N_COLS; i++)
        bf16[i] = qc_f32_to_bf16(0.02f * (float)qc_rng_normal(&rng));
    b.bf16 = bf16;

    qc_err err;
    for (size_t i = 0; i < sizeof masks / sizeof masks[0]; i++) {
        qc_pool *pool = NULL;
        if (qc_cpu_set_mask(masks[i], &err) < 0 || qc_pool_new(threads, &pool, &err) < 0 ||
            qc_backend_cpu_new(pool, QC_COMPUTE_F32, &b.be, &err) < 0)
            fail(&err);
        run_modes(&b);
        qc_backend_close(b.be);
        qc_pool_free(pool);
    }
    qc_free(bf16);
    qc_free(b.w);
    qc_free(b.codes);
    qc_free(b.zeros);
    qc_free(b.scales);
    return 0;
}
