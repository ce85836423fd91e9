/* Codes, scales, zeros and statistics are the same bits on every instruction set, for any number of threads
 * and however the matrix is cut into calls. */
#include "quant_run.h"

#include "qc_rng.h"

#include <math.h>

static const char *const masks[] = {"", "avx512", "all"}; /* on AArch64 the first two are NEON */
enum { N_MASKS = sizeof masks / sizeof masks[0], N_KINDS = 10 };

/* Values of one kind, with some of the shapes that break kernels: zeros, denormals, one-sided, outliers,
 * extremes. */
static void fill(qc_rng *rng, float *w, int64_t n, int kind)
{
    static const double size[N_KINDS] = {0.02, 1, 1e-9, 1e-30, 1e-42, 1e20, 3e37, 1e-6, 1, 1e-20};
    for (int64_t i = 0; i < n; i++) {
        double v = size[kind] * qc_rng_normal(rng);
        if (kind == 1 && qc_rng_below(rng, 50) == 0)
            v *= 30;
        if (kind == 7)
            v = fabs(v) + 2e-6;
        if (kind == 8)
            v = (double)qc_rng_below(rng, 3) - 1;
        w[i] = (float)v;
    }
}

static bool same(const quant_run *a, const quant_run *b)
{
    size_t n_scales = (size_t)(a->n_rows * a->n_groups);
    return memcmp(a->rows.codes, b->rows.codes, (size_t)(a->n_rows * a->n_cols)) == 0 &&
           memcmp(a->rows.scales, b->rows.scales, n_scales * sizeof(float)) == 0 &&
           (a->spec.grid.symmetric || memcmp(a->rows.zeros, b->rows.zeros, n_scales) == 0) &&
           memcmp(&a->stats, &b->stats, sizeof a->stats) == 0;
}

static qc_quant_spec random_spec(qc_rng *rng, int64_t n_cols)
{
    static const int64_t groups[] = {16, 24, 32, 64, 128, 5, 1};
    static const qc_dtype dtypes[] = {QC_DT_F16, QC_DT_BF16, QC_DT_F32};
    qc_quant_spec spec = {
        .grid = {.kind = QC_GRID_AFFINE,
                 .bits = 2 + (int)qc_rng_below(rng, 7),
                 .symmetric = qc_rng_below(rng, 2),
                 .scale_dtype = dtypes[qc_rng_below(rng, 3)]},
        .sym_rule = (qc_sym_rule)qc_rng_below(rng, 3),
        .search = qc_rng_below(rng, 3) ? QC_SEARCH_MSE : QC_SEARCH_MINMAX,
    };
    uint64_t g = qc_rng_below(rng, 8);
    spec.grid.group_elems = g == 7 ? n_cols : groups[g];
    return spec;
}

static void check_case(qc_rng *rng, int kind, int64_t n_rows, int64_t n_cols)
{
    float *w = qc_alloc((size_t)(n_rows * n_cols) + 1, sizeof *w),
          *h = qc_alloc((size_t)n_cols + 1, sizeof *h);
    ck_assert(w && h);
    fill(rng, w + 1, n_rows * n_cols, kind); /* + 1: not aligned to a vector */
    for (int64_t i = 0; i <= n_cols; i++)
        h[i] = (float)(qc_rng_below(rng, 10) ? exp(2 * qc_rng_normal(rng)) : 0);
    if (qc_rng_below(rng, 3) == 0)
        memset(w + 1, 0, (size_t)n_cols * sizeof *w);
    qc_quant_spec spec = random_spec(rng, n_cols);
    const float *weights = qc_rng_below(rng, 2) ? h + 1 : NULL;

    quant_run first = quantize(masks[0], 1, w + 1, n_rows, n_cols, &spec, weights);
    ck_assert_msg(first.rc == 0, "%s", first.err.msg);
    for (int m = 1; m < N_MASKS; m++) {
        quant_run q = quantize(masks[m], 2, w + 1, n_rows, n_cols, &spec, weights);
        ck_assert_msg(same(&first, &q),
                      "mask '%s': kind %d, %lld x %lld, %d bits, %s, rule %d, group %lld, scales %s, search "
                      "%d, weights %d",
                      masks[m], kind, (long long)n_rows, (long long)n_cols, spec.grid.bits,
                      spec.grid.symmetric ? "symmetric" : "asymmetric", (int)spec.sym_rule,
                      (long long)spec.grid.group_elems, qc_dtype_name(spec.grid.scale_dtype),
                      (int)spec.search, weights != NULL);
        quant_run_free(&q);
    }
    quant_run_free(&first);
    qc_free(w);
    qc_free(h);
}

START_TEST(instruction_sets)
{
    static const int64_t cols[] = {1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 129, 257, 576};
    qc_rng rng;
    qc_rng_seed(&rng, 20261130);
    for (int round = 0; round < 6; round++)
        for (int kind = 0; kind < N_KINDS; kind++)
            for (size_t c = 0; c < sizeof cols / sizeof cols[0]; c++)
                check_case(&rng, kind, 1 + (int64_t)qc_rng_below(&rng, 4), cols[c]);
}
END_TEST

START_TEST(threads_and_blocks)
{
    enum { ROWS = 83, COLS = 192 };
    static float w[ROWS * COLS];
    qc_rng rng;
    qc_rng_seed(&rng, 7);
    fill(&rng, w, ROWS * COLS, 1);
    qc_quant_spec spec = {
        .grid = {.kind = QC_GRID_AFFINE, .bits = 4, .group_elems = 64, .scale_dtype = QC_DT_F16},
        .search = QC_SEARCH_MSE};
    quant_run one = quantize("", 1, w, ROWS, COLS, &spec, NULL);
    for (int threads = 2; threads <= 7; threads += 5) {
        quant_run q = quantize("", threads, w, ROWS, COLS, &spec, NULL);
        ck_assert(same(&one, &q));
        quant_run_free(&q);
    }
    qc_backend *be;
    ck_assert_int_eq(qc_backend_cpu_new(NULL, QC_COMPUTE_F32, &be, NULL), 0);
    for (int64_t block = 1; block < ROWS; block += 13) {
        qc_quant_stats stats = {0};
        for (int64_t r = 0; r < ROWS; r += block) {
            int64_t n = r + block < ROWS ? block : ROWS - r;
            quant_run q = quantize_on(be, w + r * COLS, n, COLS, &spec, NULL);
            ck_assert_mem_eq(q.rows.codes, one.rows.codes + r * COLS, (size_t)(n * COLS));
            quant_run_free(&q);
            qc_code_rows rows = {.codes = guarded((size_t)(n * COLS)),
                                 .scales = guarded((size_t)n * 12),
                                 .zeros = guarded((size_t)n * 3)};
            ck_assert_int_eq(qc_rtn_rows(be, w + r * COLS, n, COLS, &spec, NULL, &rows, &stats, NULL), 0);
            qc_free(rows.codes);
            qc_free(rows.scales);
            qc_free(rows.zeros);
        }
        ck_assert_mem_eq(&stats, &one.stats, sizeof stats);
    }
    qc_backend_close(be);
    quant_run_free(&one);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"instruction sets", instruction_sets},
        {"threads and blocks", threads_and_blocks},
        {NULL, NULL},
    };
    return run_tests("same bits", cases);
}
