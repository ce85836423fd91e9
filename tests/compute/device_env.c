#include "device_env.h"

#include "qc_test.h"

#include <stdint.h>

typedef struct wrapper {
    qc_backend be; /* first */
    qc_backend *device;
} wrapper;

enum { MAX_OPERANDS = 8, MAX_SKEW = 16 };

/* Operands of one call on the device. */
typedef struct operands {
    qc_backend *device;
    int n, rc;
    struct {
        float *buffer, *address, *host;
        int64_t n_elems;
        bool written;
    } of[MAX_OPERANDS];
    qc_err *err;
} operands;

static qc_backend *device_of(qc_backend *be)
{
    return ((wrapper *)be)->device;
}

/* Elements of rows of n_cols with a stride. */
static int64_t span(int64_t n_rows, int64_t ld, int64_t n_cols)
{
    return n_rows > 0 && n_cols > 0 ? (n_rows - 1) * ld + n_cols : 0;
}

/* The device address of n_elems that stand at `host` (NULL stays NULL). An operand that is given twice is
 * one. */
static float *take(operands *o, const float *host, int64_t n_elems, bool written)
{
    int64_t skew = (int64_t)((uintptr_t)host / sizeof(float) % MAX_SKEW);
    if (!host || o->rc < 0)
        return NULL;
    for (int i = 0; i < o->n; i++)
        if (o->of[i].host == host && o->of[i].n_elems == n_elems) {
            o->of[i].written |= written;
            return o->of[i].address;
        }
    float *buffer = o->device->alloc(o->device, skew + n_elems, o->err);
    if (!buffer) {
        o->rc = QC_E_RESOURCE;
        return NULL;
    }
    o->of[o->n].buffer = buffer;
    o->of[o->n].address = buffer + skew;
    o->of[o->n].host = (float *)(uintptr_t)host;
    o->of[o->n].n_elems = n_elems;
    o->of[o->n].written = written;
    o->rc = o->device->upload(o->device, buffer + skew, host, n_elems, o->err);
    return o->of[o->n++].address;
}

/* Results come back and everything is freed; `rc` is that of the operation. */
static int give(operands *o, int rc)
{
    for (int i = 0; i < o->n; i++) {
        if (rc == QC_OK && o->of[i].written)
            rc = o->device->download(o->device, o->of[i].host, o->of[i].address, o->of[i].n_elems, o->err);
        o->device->free(o->device, o->of[i].buffer);
    }
    return rc;
}

#define OPERANDS(be, err)                                                                                    \
    {                                                                                                        \
        .device = device_of(be), .err = err                                                                  \
    }
/* The operation, if its operands could be sent. */
#define CALL(o, op, ...) give(&(o), (o).rc < 0 ? (o).rc : (o).device->op((o).device, __VA_ARGS__))

static float *wrap_alloc(qc_backend *be, int64_t n_elems, qc_err *err)
{
    (void)be;
    (void)err;
    return malloc((size_t)n_elems * sizeof(float) + 1);
}

static void wrap_free(qc_backend *be, float *buffer)
{
    (void)be;
    free(buffer);
}

static int wrap_weight_load(qc_backend *be, int64_t n_out, int64_t n_in, qc_fetch_rows_fn fetch, void *ctx,
                            qc_weight **ret, qc_err *err)
{
    return device_of(be)->weight_load(device_of(be), n_out, n_in, fetch, ctx, ret, err);
}

static void wrap_weight_free(qc_backend *be, qc_weight *w)
{
    device_of(be)->weight_free(device_of(be), w);
}

/* The first words of every backend's qc_weight. */
typedef struct weight_sizes {
    int64_t n_out, n_in;
} weight_sizes;

static int wrap_linear(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx, const qc_weight *w,
                       const float *bias, int64_t n_tokens, bool accumulate, qc_err *err)
{
    operands o = OPERANDS(be, err);
    weight_sizes n;
    memcpy(&n, w, sizeof n);
    float *dx = take(&o, x, span(n_tokens, ldx, n.n_in), false), *db = take(&o, bias, n.n_out, false);
    float *dy = take(&o, y, span(n_tokens, ldy, n.n_out), true);
    return CALL(o, linear, dy, ldy, dx, ldx, w, db, n_tokens, accumulate, err);
}

static int wrap_rms_norm(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx,
                         const float *gain, float gain_offset, int64_t n_rows, int64_t dim, float eps,
                         qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *dx = take(&o, x, span(n_rows, ldx, dim), false), *dg = take(&o, gain, dim, false);
    float *dy = take(&o, y, span(n_rows, ldy, dim), true);
    return CALL(o, rms_norm, dy, ldy, dx, ldx, dg, gain_offset, n_rows, dim, eps, err);
}

static int wrap_rope(qc_backend *be, float *x, int64_t ldx, const float *cos_t, const float *sin_t,
                     int64_t n_tokens, int64_t n_heads, int64_t head_dim, int64_t rotary_dim, qc_err *err)
{
    operands o = OPERANDS(be, err);
    int64_t n_table = n_tokens * (rotary_dim / 2);
    float *dx = take(&o, x, span(n_tokens, ldx, n_heads * head_dim), true);
    float *dc = take(&o, cos_t, n_table, false), *ds = take(&o, sin_t, n_table, false);
    return CALL(o, rope, dx, ldx, dc, ds, n_tokens, n_heads, head_dim, rotary_dim, err);
}

static int wrap_attention(qc_backend *be, float *out, const float *q, const float *k, const float *v,
                          const qc_attention_shape *s, qc_err *err)
{
    operands o = OPERANDS(be, err);
    int64_t nq = s->n_tokens * s->n_heads * s->head_dim, nk = s->n_tokens * s->n_kv_heads * s->head_dim;
    float *dq = take(&o, q, nq, false), *dk = take(&o, k, nk, false), *dv = take(&o, v, nk, false);
    float *dout = take(&o, out, nq, true);
    return CALL(o, attention, dout, dq, dk, dv, s, err);
}

static int wrap_gated_act(qc_backend *be, float *y, const float *gate, const float *up, int64_t n_elems,
                          qc_activation act, qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *dg = take(&o, gate, n_elems, false), *du = take(&o, up, n_elems, false);
    float *dy = take(&o, y, n_elems, true);
    return CALL(o, gated_act, dy, dg, du, n_elems, act, err);
}

static int wrap_add(qc_backend *be, float *y, const float *x, float alpha, int64_t n_elems, qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *dx = take(&o, x, n_elems, false), *dy = take(&o, y, n_elems, true);
    return CALL(o, add, dy, dx, alpha, n_elems, err);
}

static int wrap_scale(qc_backend *be, float *y, const float *x, float alpha, int64_t n_elems, qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *dx = take(&o, x, n_elems, false), *dy = take(&o, y, n_elems, true);
    return CALL(o, scale, dy, dx, alpha, n_elems, err);
}

static int wrap_score(qc_backend *be, qc_score *scores, const float *logits_a, const float *logits_b,
                      int64_t ld, const int32_t *targets, int64_t n_tokens, int64_t vocab0, int64_t n_vocab,
                      float softcap, qc_err *err)
{
    operands o = OPERANDS(be, err);
    int64_t n = span(n_tokens, ld, n_vocab);
    float *da = take(&o, logits_a, n, false), *db = take(&o, logits_b, n, false);
    return CALL(o, score, scores, da, db, ld, targets, n_tokens, vocab0, n_vocab, softcap, err);
}

static int wrap_quantize_rows(qc_backend *be, const float *w, int64_t n_rows, int64_t n_cols,
                              const qc_quant_spec *spec, const float *col_weight, qc_code_rows *rows,
                              qc_quant_stats *stats, qc_err *err)
{
    return device_of(be)->quantize_rows(device_of(be), w, n_rows, n_cols, spec, col_weight, rows, stats, err);
}

static int wrap_gram(qc_backend *be, float *h, const float *a, int64_t lda, const float *b, int64_t ldb,
                     int64_t n_tokens, int64_t n_rows, int64_t n_cols, float alpha, qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *da = take(&o, a, span(n_tokens, lda, n_rows), false);
    float *db = take(&o, b, span(n_tokens, ldb, n_cols), false), *dh = take(&o, h, n_rows * n_cols, true);
    return CALL(o, gram, dh, da, lda, db, ldb, n_tokens, n_rows, n_cols, alpha, err);
}

static int wrap_mirror(qc_backend *be, float *h, int64_t n, qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *dh = take(&o, h, n * n, true);
    return CALL(o, mirror, dh, n, err);
}

static int wrap_column_stats(qc_backend *be, float *sum_abs, float *max_abs, const float *x, int64_t ldx,
                             int64_t n_tokens, int64_t n_dims, qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *dx = take(&o, x, span(n_tokens, ldx, n_dims), false);
    float *ds = take(&o, sum_abs, n_dims, true), *dm = take(&o, max_abs, n_dims, true);
    return CALL(o, column_stats, ds, dm, dx, ldx, n_tokens, n_dims, err);
}

static int wrap_quantize_acts(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx,
                              int64_t n_tokens, int64_t n_dims, int bits, int64_t group_elems, qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *dx = take(&o, x, span(n_tokens, ldx, n_dims), false);
    float *dy = take(&o, y, span(n_tokens, ldy, n_dims), true);
    return CALL(o, quantize_acts, dy, ldy, dx, ldx, n_tokens, n_dims, bits, group_elems, err);
}

static int wrap_factor(qc_backend *be, float *a, int64_t n, double *pivots, int64_t *ret_bad, qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *da = take(&o, a, n * n, true);
    return CALL(o, factor, da, n, pivots, ret_bad, err);
}

static int wrap_factor_solve(qc_backend *be, const float *factor, const double *pivots, float *b,
                             int64_t n_rows, int64_t n, qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *df = take(&o, factor, n * n, false), *db = take(&o, b, n_rows * n, true);
    return CALL(o, factor_solve, df, pivots, db, n_rows, n, err);
}

static qc_round_rows take_rows(operands *o, const qc_round_rows *rows)
{
    qc_round_rows d = *rows;
    d.target = take(o, rows->target, rows->n_rows * rows->n_cols, false);
    d.error = take(o, rows->error, rows->n_rows * rows->n_cols, true);
    return d;
}

static int wrap_round_forward(qc_backend *be, const float *factor, const qc_grid *grid,
                              const qc_round_rows *rows, qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *df = take(&o, factor, rows->n_cols * rows->n_cols, false);
    qc_round_rows d = take_rows(&o, rows);
    return CALL(o, round_forward, df, grid, &d, err);
}

static int wrap_descend(qc_backend *be, const float *h, const float *inv, const qc_grid *grid,
                        const qc_round_rows *rows, int64_t n_sweeps, bool refit, qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *dh = take(&o, h, rows->n_cols * rows->n_cols, false), *di = take(&o, inv, rows->n_cols, false);
    qc_round_rows d = take_rows(&o, rows);
    return CALL(o, descend, dh, di, grid, &d, n_sweeps, refit, err);
}

static void wrap_host_tasks(qc_backend *be, int64_t n_tasks, qc_task_fn fn, void *ctx)
{
    wrapper *w = (wrapper *)be;
    w->device->host_tasks(w->device, n_tasks, fn, ctx);
}

static int wrap_hessian_error(qc_backend *be, const float *h, const float *e, int64_t n_rows, int64_t n,
                              double *ret, qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *dh = take(&o, h, n * n, false), *de = take(&o, e, n_rows * n, false);
    return CALL(o, hessian_error, dh, de, n_rows, n, ret, err);
}

static int wrap_route(qc_backend *be, int32_t *ids, float *weights, const float *logits, int64_t ld,
                      int64_t n_tokens, int64_t n_experts, int64_t n_chosen, bool renormalise, qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *dl = take(&o, logits, span(n_tokens, ld, n_experts), false);
    return CALL(o, route, ids, weights, dl, ld, n_tokens, n_experts, n_chosen, renormalise, err);
}

/* Rows up to the last one that is listed. */
static int64_t listed(const int32_t *rows, int64_t n_rows)
{
    int64_t n = 0;
    for (int64_t i = 0; i < n_rows; i++)
        n = rows[i] >= n ? rows[i] + 1 : n;
    return n;
}

static int wrap_gather_rows(qc_backend *be, float *y, const float *x, const int32_t *rows, int64_t n_rows,
                            int64_t dim, qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *dy = take(&o, y, n_rows * dim, true), *dx = take(&o, x, listed(rows, n_rows) * dim, false);
    return CALL(o, gather_rows, dy, dx, rows, n_rows, dim, err);
}

static int wrap_add_rows(qc_backend *be, float *y, const float *x, const int32_t *rows, const float *alpha,
                         int64_t n_rows, int64_t dim, qc_err *err)
{
    operands o = OPERANDS(be, err);
    float *dy = take(&o, y, listed(rows, n_rows) * dim, true), *dx = take(&o, x, n_rows * dim, false);
    return CALL(o, add_rows, dy, dx, rows, alpha, n_rows, dim, err);
}

static void wrap_close(qc_backend *be)
{
    qc_backend_close(device_of(be));
    free(be);
}

qc_backend *device_env_new(qc_pool *pool, qc_compute compute)
{
    const char *device = getenv("QC_TEST_DEVICE");
    bool emulated = strcmp(device, "emulated") == 0;
    qc_err err;
    wrapper *w = calloc(1, sizeof *w);
    if (!w || (!emulated && strcmp(device, "cuda") != 0))
        abort();
    if (emulated && !getenv("QC_CUDA_EMULATOR"))
        TEST_SKIP("no emulator: this build has no C++ compiler");
    if (qc_backend_cuda_new(pool, compute, 0, emulated ? getenv("QC_CUDA_EMULATOR") : NULL, &w->device,
                            &err) < 0)
        TEST_SKIP(err.msg);
    w->be = (qc_backend){
        .name = w->device->name,
        .compute = compute,
        .n_threads = qc_pool_size(pool),
        .host_memory = true,
        .alloc = wrap_alloc,
        .free = wrap_free,
        .weight_load = wrap_weight_load,
        .weight_free = wrap_weight_free,
        .linear = wrap_linear,
        .rms_norm = wrap_rms_norm,
        .rope = wrap_rope,
        .attention = wrap_attention,
        .gated_act = wrap_gated_act,
        .route = wrap_route,
        .gather_rows = wrap_gather_rows,
        .add_rows = wrap_add_rows,
        .add = wrap_add,
        .scale = wrap_scale,
        .score = wrap_score,
        .quantize_rows = wrap_quantize_rows,
        .host_tasks = wrap_host_tasks,
        .gram = wrap_gram,
        .mirror = wrap_mirror,
        .column_stats = wrap_column_stats,
        .quantize_acts = wrap_quantize_acts,
        .factor = wrap_factor,
        .factor_solve = wrap_factor_solve,
        .round_forward = wrap_round_forward,
        .descend = wrap_descend,
        .hessian_error = wrap_hessian_error,
        .close = wrap_close,
    };
    return &w->be;
}
