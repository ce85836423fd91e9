/* linear: y = x W^T in tiles of tokens x outputs, one task each. A tile runs over the inputs in blocks, so
 * that the activations of a block stay in the second level cache and a panel of weights in the first. */
#include "cpu.h"
#include "qc_alloc.h"
#include "qc_math.h"

#include <stdatomic.h>
#include <string.h>

enum {
    TILE_TOKENS = 256, /* at most; half of it where that would leave less than MIN_TASKS tasks */
    TILE_OUT = 256,    /* about: the outputs are divided evenly */
    MIN_TASKS = 12,
    MAX_BLOCK_IN = 256, /* a panel of 32 outputs x 256 inputs takes 32 KiB */
    COPY_PAD = 16,      /* see tile_block */
    CACHE_PERIOD = 1024 /* floats (4096 bytes) after which addresses share a set of the first level cache */
};

/* Panel of outputs n0 .. and inputs k0 .. (the start of a panel, the start of a block). */
static float *panel(const qc_cpu_backend *cb, const qc_weight *w, int64_t n0, int64_t k0)
{
    return w->data + k0 * qc_round_up(w->n_out, cb->kern.nr) + n0 * qc_min_i64(w->block_in, w->n_in - k0);
}

typedef struct load_job {
    const qc_cpu_backend *cb;
    qc_weight *w;
    qc_fetch_rows_fn fetch;
    void *ctx;
    int64_t rows_per_task;
    float *scratch; /* [threads, rows_per_task, n_in] when packing */
    qc_err *errors; /* [threads]: the first failure of each thread */
    atomic_int failed;
} load_job;

static void load_task(void *ctx, int64_t task, int thread)
{
    load_job *j = ctx;
    qc_weight *w = j->w;
    int64_t row0 = task * j->rows_per_task, n = qc_min_i64(j->rows_per_task, w->n_out - row0);
    float *rows = j->scratch ? j->scratch + thread * j->rows_per_task * w->n_in : w->data + row0 * w->n_in;
    if (atomic_load(&j->failed))
        return;
    if (j->fetch(j->ctx, row0, n, rows, &j->errors[thread]) < 0) {
        if (j->errors[thread].code == QC_OK)
            qc_fail(&j->errors[thread], QC_E_INPUT, "can not read rows %lld .. of a matrix", (long long)row0);
        atomic_store(&j->failed, 1);
        return;
    }
    if (w->tiles) {
        j->cb->bf16.pack_rows(w->tiles + task * qc_bf16_strip(w->n_in), rows, w->n_in, n, w->n_in, true);
        return;
    }
    if (j->cb->kern.use_blas)
        return;
    for (int64_t k0 = 0; k0 < w->n_in; k0 += w->block_in) {
        int64_t k = qc_min_i64(w->block_in, w->n_in - k0);
        j->cb->kern.pack(panel(j->cb, w, row0, k0), rows + k0, w->n_in, n, k);
    }
}

static int load_rows(qc_cpu_backend *cb, qc_weight *w, qc_fetch_rows_fn fetch, void *ctx, qc_err *err)
{
    int n_threads = qc_pool_size(cb->pool);
    load_job j = {.cb = cb, .w = w, .fetch = fetch, .ctx = ctx, .rows_per_task = cb->kern.nr};
    if (w->tiles)
        j.rows_per_task = QC_BF16_ROWS;
    if (w->tiles || !cb->kern.use_blas) {
        j.scratch = qc_cpu_scratch(cb, n_threads * j.rows_per_task * w->n_in, err);
        if (!j.scratch)
            return QC_E_RESOURCE;
    }
    j.errors = qc_calloc((size_t)n_threads, sizeof *j.errors);
    if (!j.errors)
        return qc_fail_nomem(err, "messages of the threads", (size_t)n_threads * sizeof *j.errors);
    qc_pool_run(cb->pool, qc_ceil_div(w->n_out, j.rows_per_task), load_task, &j);
    int rc = QC_OK;
    for (int i = 0; i < n_threads && rc == QC_OK; i++)
        if (j.errors[i].code != QC_OK)
            rc = qc_fail(err, j.errors[i].code, "%s", j.errors[i].msg);
    qc_free(j.errors);
    return rc;
}

static int alloc_data(const qc_cpu_backend *cb, qc_weight *w, qc_err *err)
{
    size_t n_bytes;
    if (cb->be.compute == QC_COMPUTE_BF16) {
        n_bytes = (size_t)(qc_ceil_div(w->n_out, QC_BF16_ROWS) * qc_bf16_strip(w->n_in)) * sizeof *w->tiles;
        w->tiles = qc_alloc(1, n_bytes);
    } else {
        int64_t rows = cb->kern.use_blas ? w->n_out : qc_round_up(w->n_out, cb->kern.nr);
        n_bytes = (size_t)(rows * w->n_in) * sizeof *w->data;
        w->data = qc_alloc(1, n_bytes);
    }
    return w->tiles || w->data ? QC_OK : qc_fail_nomem(err, "weight matrix", n_bytes);
}

int qc_cpu_weight_load(qc_backend *be, int64_t n_out, int64_t n_in, qc_fetch_rows_fn fetch, void *ctx,
                       qc_weight **ret, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    if (n_out < 0 || n_in < 0 || n_out > INT32_MAX || n_in > INT32_MAX)
        return qc_fail(err, QC_E_UNSUPPORTED, "matrix of %lld x %lld elements", (long long)n_out,
                       (long long)n_in);
    qc_weight *w = qc_alloc(1, sizeof *w);
    if (!w)
        return qc_fail_nomem(err, "weight matrix", sizeof *w);
    *w = (qc_weight){.n_out = n_out, .n_in = n_in};
    w->block_in = n_in > 0 ? qc_ceil_div(n_in, qc_ceil_div(n_in, MAX_BLOCK_IN)) : 1;
    int rc = alloc_data(cb, w, err);
    if (rc == QC_OK && n_out > 0 && n_in > 0)
        rc = load_rows(cb, w, fetch, ctx, err);
    if (rc < 0) {
        qc_cpu_weight_free(be, w);
        return rc;
    }
    *ret = w;
    return QC_OK;
}

void qc_cpu_weight_free(qc_backend *be, qc_weight *w)
{
    (void)be;
    if (!w)
        return;
    qc_free(w->data);
    qc_free(w->tiles);
    qc_free(w);
}

void qc_cpu_put_bias(const qc_kern *kern, float *y, int64_t ldy, const float *bias, int64_t m, int64_t n,
                     bool accumulate)
{
    for (int64_t t = 0; t < m; t++) {
        if (accumulate)
            kern->add(y + t * ldy, bias, 1, n);
        else
            memcpy(y + t * ldy, bias, (size_t)n * sizeof *y);
    }
}

typedef struct linear_job {
    const qc_cpu_backend *cb;
    float *y;
    int64_t ldy;
    const float *x;
    int64_t ldx;
    const qc_weight *w;
    const float *bias;
    int64_t n_tokens;
    bool accumulate;
    int64_t tile_tokens, tile_out, n_token_tiles;
    float *scratch; /* [threads, TILE_TOKENS, MAX_BLOCK_IN + COPY_PAD] */
} linear_job;

/* One block of inputs k0 .. k0 + k - 1 of a tile. Rows a multiple of 4096 bytes apart would compete for one
 * set of the first level cache: they are copied out of step. */
static void tile_block(const linear_job *j, float *y, const float *x, float *copy, int64_t m, int64_t n0,
                       int64_t n, int64_t k0, int64_t k, bool accumulate)
{
    const qc_kern *kern = &j->cb->kern;
    int64_t ldx = j->ldx;
    x += k0;
    if (ldx % CACHE_PERIOD == 0) {
        for (int64_t t = 0; t < m; t++)
            memcpy(copy + t * (MAX_BLOCK_IN + COPY_PAD), x + t * ldx, (size_t)k * sizeof *copy);
        x = copy;
        ldx = MAX_BLOCK_IN + COPY_PAD;
    }
    for (int64_t i = 0; i < n; i += kern->nr)
        kern->gemm(y + i, j->ldy, x, ldx, panel(j->cb, j->w, n0 + i, k0), m, qc_min_i64(kern->nr, n - i), k,
                   accumulate);
}

static void linear_task(void *ctx, int64_t task, int thread)
{
    const linear_job *j = ctx;
    const qc_weight *w = j->w;
    /* neighbouring tasks share the weights, the larger operand */
    int64_t t0 = task % j->n_token_tiles * j->tile_tokens, n0 = task / j->n_token_tiles * j->tile_out;
    int64_t m = qc_min_i64(j->tile_tokens, j->n_tokens - t0), n = qc_min_i64(j->tile_out, w->n_out - n0);
    float *y = j->y + t0 * j->ldy + n0;
    const float *x = j->x + t0 * j->ldx;
    bool accumulate = j->accumulate || j->bias;
    if (j->bias)
        qc_cpu_put_bias(&j->cb->kern, y, j->ldy, j->bias + n0, m, n, j->accumulate);
    if (j->cb->kern.use_blas) {
        qc_blas_gemm(y, j->ldy, x, j->ldx, w->data + n0 * w->n_in, w->n_in, m, n, w->n_in, accumulate);
        return;
    }
    float *copy = j->scratch + (int64_t)thread * TILE_TOKENS * (MAX_BLOCK_IN + COPY_PAD);
    for (int64_t k0 = 0; k0 < w->n_in; k0 += w->block_in)
        tile_block(j, y, x, copy, m, n0, n, k0, qc_min_i64(w->block_in, w->n_in - k0), accumulate || k0 > 0);
}

int qc_cpu_linear(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx, const qc_weight *w,
                  const float *bias, int64_t n_tokens, bool accumulate, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    linear_job j = {.cb = cb,
                    .y = y,
                    .ldy = ldy,
                    .x = x,
                    .ldx = ldx,
                    .w = w,
                    .bias = bias,
                    .n_tokens = n_tokens,
                    .accumulate = accumulate};
    if (w->n_in == 0) /* an empty sum: y = 0, or unchanged; then the bias */
        for (int64_t t = 0; t < n_tokens && !accumulate && !bias; t++)
            memset(y + t * ldy, 0, (size_t)w->n_out * sizeof *y);
    if (!cb->kern.use_blas) {
        j.scratch = qc_cpu_scratch(cb, qc_pool_size(cb->pool) * TILE_TOKENS * (MAX_BLOCK_IN + COPY_PAD), err);
        if (!j.scratch)
            return QC_E_RESOURCE;
    }
    int64_t n_out_tiles = qc_ceil_div(w->n_out, TILE_OUT);
    j.tile_out = qc_round_up(qc_ceil_div(w->n_out, qc_max_i64(1, n_out_tiles)), cb->kern.nr);
    j.tile_tokens =
        qc_ceil_div(n_tokens, TILE_TOKENS) * n_out_tiles < MIN_TASKS ? TILE_TOKENS / 2 : TILE_TOKENS;
    j.n_token_tiles = qc_ceil_div(n_tokens, j.tile_tokens);
    if (w->n_out > 0)
        qc_pool_run(cb->pool, j.n_token_tiles * qc_ceil_div(w->n_out, j.tile_out), linear_task, &j);
    return QC_OK;
}
