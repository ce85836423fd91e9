/* Products of bfloat16 operands (compute: bf16). The left operand is packed into tiles first, all of it at
 * once and shared by the threads; then tasks of rows x columns multiply. */
#include "cpu.h"
#include "qc_math.h"

#include <string.h>

enum {
    TILE_TOKENS = 256, /* at most; half of it where that would leave less than MIN_TASKS tasks */
    TILE_OUT = 256,    /* about: the outputs are divided evenly */
    MIN_TASKS = 12,
    BLOCK_TILES = 20, /* tiles of inputs at a time: 32 columns of 640 inputs take 40 KiB */
    PASS_TOKENS = QC_LINEAR_COPIED_TOKENS, /* packed at a time: bounds the scratch */
    PACK_STRIPS = 2                        /* strips of 16 tokens per packing task */
};

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
    int64_t strip;    /* elements of a strip of tiles */
    uint16_t *packed; /* x: strips of row tiles, 16 tokens each */
} linear_job;

static void pack_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const linear_job *j = ctx;
    for (int64_t s = task * PACK_STRIPS; s < (task + 1) * PACK_STRIPS; s++) {
        int64_t t = s * QC_BF16_ROWS, n = qc_min_i64(QC_BF16_ROWS, j->n_tokens - t);
        if (n > 0)
            j->cb->bf16.pack_rows(j->packed + s * j->strip, j->x + t * j->ldx, j->ldx, n, j->w->n_in, false);
    }
}

static void linear_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const linear_job *j = ctx;
    /* neighbouring tasks share the weights, the larger operand */
    int64_t t0 = task % j->n_token_tiles * j->tile_tokens, n0 = task / j->n_token_tiles * j->tile_out;
    int64_t m = qc_min_i64(j->tile_tokens, j->n_tokens - t0), n = qc_min_i64(j->tile_out, j->w->n_out - n0);
    float *y = j->y + t0 * j->ldy + n0;
    const uint16_t *x = j->packed + t0 / QC_BF16_ROWS * j->strip;
    const uint16_t *w = j->w->tiles + n0 / QC_BF16_ROWS * j->strip;
    if (j->bias)
        qc_cpu_put_bias(&j->cb->kern, y, j->ldy, j->bias + n0, m, n, j->accumulate);
    int64_t n_tiles = j->strip / QC_BF16_TILE, n_blocks = qc_ceil_div(n_tiles, BLOCK_TILES);
    int64_t step = qc_ceil_div(n_tiles, qc_max_i64(1, n_blocks));
    bool accumulate = j->accumulate || j->bias;
    for (int64_t k = 0; k < n_tiles; k += step, accumulate = true)
        j->cb->bf16.product(y, j->ldy, x + k * QC_BF16_TILE, j->strip, w + k * QC_BF16_TILE, j->strip, m, n,
                            qc_min_i64(step, n_tiles - k), accumulate);
}

/* At most PASS_TOKENS tokens. */
static void linear_pass(linear_job *j)
{
    qc_pool *pool = j->cb->pool;
    int64_t n_out_tiles = qc_ceil_div(j->w->n_out, TILE_OUT);
    j->tile_out = qc_round_up(qc_ceil_div(j->w->n_out, n_out_tiles), QC_BF16_BLOCK);
    n_out_tiles = qc_ceil_div(j->w->n_out, j->tile_out);
    j->tile_tokens =
        qc_ceil_div(j->n_tokens, TILE_TOKENS) * n_out_tiles < MIN_TASKS ? TILE_TOKENS / 2 : TILE_TOKENS;
    j->n_token_tiles = qc_ceil_div(j->n_tokens, j->tile_tokens);
    qc_pool_run(pool, qc_ceil_div(j->n_tokens, PACK_STRIPS * QC_BF16_ROWS), pack_task, j);
    qc_pool_run(pool, j->n_token_tiles * n_out_tiles, linear_task, j);
}

int qc_cpu_linear_bf16(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx, const qc_weight *w,
                       const float *bias, int64_t n_tokens, bool accumulate, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    if (w->n_in == 0) /* an empty sum: y = 0, or unchanged; then the bias */
        for (int64_t t = 0; t < n_tokens && !accumulate && !bias; t++)
            memset(y + t * ldy, 0, (size_t)w->n_out * sizeof *y);
    if (w->n_out == 0)
        return QC_OK;
    int64_t strip = qc_bf16_strip(w->n_in);
    int64_t n_strips = qc_ceil_div(qc_min_i64(n_tokens, PASS_TOKENS), QC_BF16_ROWS);
    float *scratch = qc_cpu_scratch(cb, n_strips * strip / 2, err);
    if (!scratch)
        return QC_E_RESOURCE;
    for (int64_t t = 0; t < n_tokens; t += PASS_TOKENS)
        linear_pass(&(linear_job){.cb = cb,
                                  .y = y + t * ldy,
                                  .ldy = ldy,
                                  .x = x + t * ldx,
                                  .ldx = ldx,
                                  .w = w,
                                  .bias = bias,
                                  .n_tokens = qc_min_i64(PASS_TOKENS, n_tokens - t),
                                  .accumulate = accumulate,
                                  .strip = strip,
                                  .packed = (uint16_t *)(void *)scratch});
    return QC_OK;
}
