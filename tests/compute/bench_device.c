/* Speed of the operations on a device at the shapes of a real model: wall time of several calls that are
 * queued one after the other, so that launches are hidden as in a run. Usage: bench_device [HIDDEN FFN HEADS
 * KV_HEADS HEAD_DIM TOKENS [PEAK_TFLOPS PEAK_GB_PER_S]]; the device is QC_TEST_DEVICE (cuda, emulated).
 * One JSON object per line: operation, shape, ms, rate and, where peaks are given, the share of them. */
#include "backend.h"
#include "qc_rng.h"
#include "qc_time.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CALLS = 10 };

typedef struct bench {
    qc_backend *be;
    qc_err err;
    const char *compute;
    int64_t hidden, ffn, heads, kv_heads, dim, tokens;
    double peak_flops, peak_bytes; /* 0: not given */
    /* device buffers of the largest shape, and what the calls need on the host */
    float *x, *y, *z, *h, *small;
    float *host;
    qc_weight *w;
    uint8_t *codes;
    float *scales;
    double *doubles;
    qc_score *scores;
    int32_t *targets;
} bench;

static void must(int rc, const qc_err *err)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "bench_device: %s\n", err->msg);
    exit(1);
}

static float *buffer(bench *b, int64_t n)
{
    enum { CHUNK = 1 << 20 };
    float *p = b->be->alloc(b->be, n, &b->err);
    must(p ? QC_OK : QC_E_RESOURCE, &b->err);
    for (int64_t i = 0; i < n; i += CHUNK)
        must(b->be->upload(b->be, p + i, b->host, n - i < CHUNK ? n - i : CHUNK, &b->err), &b->err);
    return p;
}

static void finish(bench *b)
{
    float one;
    must(b->be->download(b->be, &one, b->x, 1, &b->err), &b->err);
}

/* flops and bytes of one call; the other one 0. */
static void report(bench *b, const char *op, const char *shape, double flops, double bytes,
                   int (*call)(bench *b))
{
    must(call(b), &b->err); /* scratch grows, kernels are loaded */
    finish(b);
    double start = qc_now_seconds();
    for (int i = 0; i < CALLS; i++)
        must(call(b), &b->err);
    finish(b);
    double seconds = (qc_now_seconds() - start) / CALLS, work = flops > 0 ? flops : bytes;
    double peak = flops > 0 ? b->peak_flops : b->peak_bytes;
    printf("{\"operation\": \"%s\", \"compute\": \"%s\", \"shape\": \"%s\", \"ms\": %.4f, \"rate\": %.1f, "
           "\"unit\": \"%s\"",
           op, b->compute, shape, seconds * 1e3, work / seconds / 1e9, flops > 0 ? "GFLOP/s" : "GB/s");
    if (peak > 0)
        printf(", \"share\": %.3f", work / seconds / peak);
    printf("}\n");
    fflush(stdout);
}

static int fetch(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    const bench *b = ctx;
    (void)row0;
    (void)err;
    for (int64_t r = 0; r < n_rows; r++)
        memcpy(dst + r * b->hidden, b->host, (size_t)b->hidden * sizeof *dst);
    return QC_OK;
}

static int run_load(bench *b)
{
    qc_weight *w = NULL;
    int rc = b->be->weight_load(b->be, b->ffn, b->hidden, fetch, b, &w, &b->err);
    b->be->weight_free(b->be, w);
    return rc;
}

static int run_linear(bench *b)
{
    return b->be->linear(b->be, b->y, b->ffn, b->x, b->hidden, b->w, NULL, b->tokens, false, &b->err);
}

static int run_gram(bench *b)
{
    return b->be->gram(b->be, b->h, b->x, b->hidden, NULL, 0, b->tokens, b->hidden, b->hidden, 1, &b->err);
}

static int run_norm(bench *b)
{
    return b->be->rms_norm(b->be, b->y, b->hidden, b->x, b->hidden, b->small, 0, b->tokens, b->hidden, 1e-6f,
                           &b->err);
}

static int run_rope(bench *b)
{
    return b->be->rope(b->be, b->y, b->heads * b->dim, b->x, b->z, b->tokens, b->heads, b->dim, b->dim,
                       &b->err);
}

static int run_attention(bench *b)
{
    qc_attention_shape s = {b->tokens, b->heads, b->kv_heads, b->dim, 0, 0.1f, 0};
    return b->be->attention(b->be, b->y, b->x, b->z, b->z, &s, &b->err);
}

static int run_gated(bench *b)
{
    return b->be->gated_act(b->be, b->y, b->x, b->z, b->tokens * b->ffn, QC_ACT_SILU, &b->err);
}

static int run_stats(bench *b)
{
    return b->be->column_stats(b->be, b->small, b->small + b->hidden, b->x, b->hidden, b->tokens, b->hidden,
                               &b->err);
}

static int run_acts(bench *b)
{
    return b->be->quantize_acts(b->be, b->y, b->hidden, b->x, b->hidden, b->tokens, b->hidden, 8, 0, &b->err);
}

static int run_score(bench *b)
{
    return b->be->score(b->be, b->scores, b->x, b->z, b->ffn, b->targets, b->tokens, 0, b->ffn, 0, &b->err);
}

/* Product and factor, because h must be made anew each time. */
static int run_factor(bench *b)
{
    int64_t bad, n = b->hidden;
    QC_TRY(b->be->scale(b->be, b->h, b->h, 0, n * n, &b->err));
    QC_TRY(b->be->gram(b->be, b->h, b->x, n, NULL, 0, b->tokens, n, n, 1, &b->err));
    QC_TRY(b->be->factor(b->be, b->h, n, b->doubles, &bad, &b->err));
    return bad < 0 ? QC_OK : qc_fail(&b->err, QC_E_INPUT, "TOKENS must be well above HIDDEN");
}

static qc_round_rows rows_of(const bench *b)
{
    return (qc_round_rows){.n_rows = b->ffn,
                           .n_cols = b->hidden,
                           .target = b->x,
                           .error = b->y,
                           .codes = b->codes,
                           .scales = b->scales};
}

static const qc_grid grid = {
    .kind = QC_GRID_AFFINE, .bits = 4, .symmetric = true, .group_elems = 128, .scale_dtype = QC_DT_F16};

static int run_forward(bench *b)
{
    qc_round_rows rows = rows_of(b);
    return b->be->round_forward(b->be, b->h, &grid, &rows, &b->err);
}

static int run_descend(bench *b)
{
    qc_round_rows rows = rows_of(b);
    return b->be->descend(b->be, b->h, b->small, &grid, &rows, 1, true, &b->err);
}

static int run_quantize(bench *b)
{
    qc_quant_spec spec = {.grid = grid, .search = QC_SEARCH_MSE};
    qc_code_rows rows = {.codes = b->codes, .scales = b->scales};
    qc_quant_stats stats = {0};
    int64_t n = (1 << 20) / b->hidden;
    return b->be->quantize_rows(b->be, b->host, n < b->ffn ? n : b->ffn, b->hidden, &spec, NULL, &rows,
                                &stats, &b->err);
}

static void prepare(bench *b)
{
    int64_t wide = b->ffn > b->heads * b->dim ? b->ffn : b->heads * b->dim;
    int64_t most = (b->tokens > b->hidden ? b->tokens : b->hidden) * wide;
    qc_rng rng;
    qc_rng_seed(&rng, 1);
    b->host = malloc((1 << 20) * sizeof *b->host);
    b->codes = calloc((size_t)(b->ffn * b->hidden), 1);
    b->scales = malloc((size_t)(b->ffn * b->hidden / 16 + b->ffn) * sizeof *b->scales);
    b->doubles = calloc((size_t)wide, sizeof *b->doubles);
    b->scores = calloc((size_t)b->tokens, sizeof *b->scores);
    b->targets = calloc((size_t)b->tokens, sizeof *b->targets);
    for (int64_t i = 0; i < 1 << 20; i++)
        b->host[i] = (float)qc_rng_normal(&rng);
    for (int64_t i = 0; i < b->ffn * b->hidden / 16 + b->ffn; i++)
        b->scales[i] = 0.25f;
    for (int64_t i = 0; i < b->tokens; i++)
        b->scores[i] = qc_score_start();
    b->x = buffer(b, most);
    b->y = buffer(b, most);
    b->z = buffer(b, most);
    b->h = buffer(b, b->hidden * b->hidden);
    b->small = buffer(b, 2 * b->hidden);
    must(b->be->weight_load(b->be, b->ffn, b->hidden, fetch, b, &b->w, &b->err), &b->err);
}

static void clear(bench *b)
{
    float *buffers[] = {b->x, b->y, b->z, b->h, b->small};
    for (int i = 0; i < 5; i++)
        b->be->free(b->be, buffers[i]);
    b->be->weight_free(b->be, b->w);
    free(b->host);
    free(b->codes);
    free(b->scales);
    free(b->doubles);
    free(b->scores);
    free(b->targets);
}

static void run_all(bench *b)
{
    char shape[96];
    double t = (double)b->tokens, n = (double)b->hidden, f = (double)b->ffn, q = (double)(b->heads * b->dim);
    snprintf(shape, sizeof shape, "T%d K%d N%d", (int)t, (int)n, (int)f);
    report(b, "linear", shape, 2 * t * n * f, 0, run_linear);
    report(b, "weight_load", shape, 0, 4 * n * f, run_load);
    report(b, "gram", shape, t * n * n, 0, run_gram);
    report(b, "rms_norm", shape, 0, 8 * t * n, run_norm);
    report(b, "rope", shape, 0, 12 * t * q, run_rope);
    report(b, "attention", shape, 2 * t * t * q, 0, run_attention);
    report(b, "gated_act", shape, 0, 12 * t * f, run_gated);
    if (strcmp(b->compute, "f32") != 0)
        return; /* the others do not depend on it */
    report(b, "column_stats", shape, 0, 4 * t * n, run_stats);
    report(b, "quantize_acts", shape, 0, 8 * t * n, run_acts);
    report(b, "score", shape, 0, 8 * t * f, run_score);
    report(b, "quantize_rows", shape, 0, 4e6, run_quantize);
    report(b, "gram+factor", shape, t * n * n + n * n * n / 3, 0, run_factor);
    report(b, "round_forward", shape, f * n * n, 0, run_forward);
    report(b, "descend", shape, 6 * f * n * n, 0, run_descend);
}

int main(int argc, char **argv)
{
    const char *device = getenv("QC_TEST_DEVICE");
    int64_t shape[6] = {1024, 3072, 16, 8, 128, 2048}; /* Qwen3-0.6B */
    double peaks[2] = {0, 0};
    for (int i = 1; i < argc && i <= 8; i++) {
        if (i <= 6)
            shape[i - 1] = strtoll(argv[i], NULL, 10);
        else
            peaks[i - 7] = strtod(argv[i], NULL);
    }
    for (int compute = 0; compute < 2; compute++) {
        bench b = {.compute = compute ? "bf16" : "f32",
                   .hidden = shape[0],
                   .ffn = shape[1],
                   .heads = shape[2],
                   .kv_heads = shape[3],
                   .dim = shape[4],
                   .tokens = shape[5],
                   .peak_flops = peaks[0] * 1e12,
                   .peak_bytes = peaks[1] * 1e9};
        const char *emulator = device && !strcmp(device, "emulated") ? getenv("QC_CUDA_EMULATOR") : NULL;
        must(qc_backend_cuda_new(NULL, (qc_compute)compute, 0, emulator, &b.be, &b.err), &b.err);
        prepare(&b);
        run_all(&b);
        clear(&b);
        qc_backend_close(b.be);
    }
    return 0;
}
