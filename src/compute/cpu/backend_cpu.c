/* The CPU backend: its table, memory, and the operations that go row by row. */
#include "cpu.h"
#include "kern_quant.h"
#include "qc_alloc.h"
#include "qc_cpu.h"
#include "qc_math.h"

#include <stdio.h>
#include <string.h>

/* Rows or elements per task of the operations that are bound by memory. */
enum { TASK_ROWS = 32, TASK_ELEMS = 1 << 16, TASK_QUANT_ROWS = 16 };

static float *cpu_alloc(qc_backend *be, int64_t n_elems, qc_err *err)
{
    (void)be;
    float *p = n_elems >= 0 ? qc_alloc((size_t)n_elems, sizeof *p) : NULL;
    if (!p)
        qc_fail_nomem(err, "buffer", (unsigned long long)n_elems * sizeof *p);
    return p;
}

static void cpu_free(qc_backend *be, float *buffer)
{
    (void)be;
    qc_free(buffer);
}

static int cpu_copy(qc_backend *be, float *dst, const float *src, int64_t n_elems, qc_err *err)
{
    (void)be;
    (void)err;
    memcpy(dst, src, (size_t)n_elems * sizeof *dst);
    return QC_OK;
}

float *qc_cpu_scratch(qc_cpu_backend *cb, int64_t n_elems, qc_err *err)
{
    if (n_elems > cb->scratch_elems || !cb->scratch) {
        qc_free(cb->scratch);
        cb->scratch = qc_alloc((size_t)n_elems, sizeof *cb->scratch);
        cb->scratch_elems = cb->scratch ? n_elems : 0;
    }
    if (!cb->scratch)
        qc_fail_nomem(err, "scratch", (unsigned long long)n_elems * sizeof *cb->scratch);
    return cb->scratch;
}

/* Arguments of the row-wise operations; each uses what it needs. */
typedef struct row_job {
    const qc_kern *kern;
    float *y;
    const float *x, *x2, *gain;
    int64_t ldy, ldx, n, dim, n_heads, rotary;
    float alpha, eps;
    qc_activation act;
} row_job;

static void rms_norm_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const row_job *j = ctx;
    int64_t end = qc_min_i64(j->n, (task + 1) * TASK_ROWS);
    for (int64_t r = task * TASK_ROWS; r < end; r++)
        j->kern->rms_norm(j->y + r * j->ldy, j->x + r * j->ldx, j->gain, j->alpha, j->dim, j->eps);
}

static int cpu_rms_norm(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx, const float *gain,
                        float gain_offset, int64_t n_rows, int64_t dim, float eps, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    (void)err;
    row_job j = {.kern = &cb->kern,
                 .y = y,
                 .ldy = ldy,
                 .x = x,
                 .ldx = ldx,
                 .gain = gain,
                 .alpha = gain_offset,
                 .n = n_rows,
                 .dim = dim,
                 .eps = eps};
    qc_pool_run(cb->pool, qc_ceil_div(n_rows, TASK_ROWS), rms_norm_task, &j);
    return QC_OK;
}

static void rope_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const row_job *j = ctx;
    int64_t half = j->rotary / 2, end = qc_min_i64(j->n, (task + 1) * TASK_ROWS);
    for (int64_t t = task * TASK_ROWS; t < end; t++)
        for (int64_t h = 0; h < j->n_heads; h++)
            j->kern->rope(j->y + t * j->ldy + h * j->dim, j->x + t * half, j->x2 + t * half, half);
}

static int cpu_rope(qc_backend *be, float *x, int64_t ldx, const float *cos_t, const float *sin_t,
                    int64_t n_tokens, int64_t n_heads, int64_t head_dim, int64_t rotary_dim, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    if (rotary_dim < 0 || rotary_dim > head_dim || rotary_dim % 2)
        return qc_fail(err, QC_E_UNSUPPORTED, "rotation of %lld of %lld elements of a head",
                       (long long)rotary_dim, (long long)head_dim);
    row_job j = {.kern = &cb->kern,
                 .y = x,
                 .ldy = ldx,
                 .x = cos_t,
                 .x2 = sin_t,
                 .n = n_tokens,
                 .n_heads = n_heads,
                 .dim = head_dim,
                 .rotary = rotary_dim};
    qc_pool_run(cb->pool, qc_ceil_div(n_tokens, TASK_ROWS), rope_task, &j);
    return QC_OK;
}

static void gated_act_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const row_job *j = ctx;
    int64_t i = task * TASK_ELEMS;
    j->kern->gated_act(j->y + i, j->x + i, j->x2 + i, qc_min_i64(TASK_ELEMS, j->n - i), j->act);
}

static int cpu_gated_act(qc_backend *be, float *y, const float *gate, const float *up, int64_t n_elems,
                         qc_activation act, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    (void)err;
    row_job j = {.kern = &cb->kern, .y = y, .x = gate, .x2 = up, .n = n_elems, .act = act};
    qc_pool_run(cb->pool, qc_ceil_div(n_elems, TASK_ELEMS), gated_act_task, &j);
    return QC_OK;
}

static void add_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const row_job *j = ctx;
    int64_t i = task * TASK_ELEMS;
    j->kern->add(j->y + i, j->x + i, j->alpha, qc_min_i64(TASK_ELEMS, j->n - i));
}

static int cpu_add(qc_backend *be, float *y, const float *x, float alpha, int64_t n_elems, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    (void)err;
    row_job j = {.kern = &cb->kern, .y = y, .x = x, .alpha = alpha, .n = n_elems};
    qc_pool_run(cb->pool, qc_ceil_div(n_elems, TASK_ELEMS), add_task, &j);
    return QC_OK;
}

static void scale_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const row_job *j = ctx;
    int64_t i = task * TASK_ELEMS;
    j->kern->scale(j->y + i, j->x + i, j->alpha, qc_min_i64(TASK_ELEMS, j->n - i));
}

static int cpu_scale(qc_backend *be, float *y, const float *x, float alpha, int64_t n_elems, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    (void)err;
    row_job j = {.kern = &cb->kern, .y = y, .x = x, .alpha = alpha, .n = n_elems};
    qc_pool_run(cb->pool, qc_ceil_div(n_elems, TASK_ELEMS), scale_task, &j);
    return QC_OK;
}

typedef struct quant_job {
    const qc_kern *kern;
    const float *w, *col_weight;
    int64_t n_rows, n_cols, n_groups;
    const qc_quant_spec *spec;
    const qc_code_rows *rows;
    qc_quant_stats *stats; /* one per row */
} quant_job;

static void quant_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const quant_job *j = ctx;
    int64_t end = qc_min_i64((task + 1) * TASK_QUANT_ROWS, j->n_rows);
    for (int64_t r = task * TASK_QUANT_ROWS; r < end; r++) {
        if (j->spec->grid.kind != QC_GRID_AFFINE) {
            qc_code_rows row = qc_code_rows_from(j->rows, &j->spec->grid, j->n_cols, r);
            qc_quant_super_row(j->w + r * j->n_cols, j->n_cols, j->spec, j->col_weight, &row, &j->stats[r]);
            continue;
        }
        j->kern->quantize_row(j->w + r * j->n_cols, j->n_cols, j->spec, j->col_weight,
                              j->rows->codes + r * j->n_cols, j->rows->scales + r * j->n_groups,
                              j->rows->zeros ? j->rows->zeros + r * j->n_groups : NULL, &j->stats[r]);
    }
}

static int cpu_quantize_rows(qc_backend *be, const float *w, int64_t n_rows, int64_t n_cols,
                             const qc_quant_spec *spec, const float *col_weight, qc_code_rows *rows,
                             qc_quant_stats *stats, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    int64_t n_tasks = qc_ceil_div(n_rows, TASK_QUANT_ROWS);
    quant_job j = {.kern = &cb->kern,
                   .w = w,
                   .col_weight = col_weight,
                   .n_rows = n_rows,
                   .n_cols = n_cols,
                   .n_groups = n_cols > 0 ? qc_ceil_div(n_cols, spec->grid.group_elems) : 0,
                   .spec = spec,
                   .rows = rows};
    j.stats = qc_calloc((size_t)n_rows, sizeof *j.stats);
    if (!j.stats)
        return qc_fail_nomem(err, "statistics", (unsigned long long)n_rows * sizeof *j.stats);
    qc_pool_run(cb->pool, n_tasks, quant_task, &j);
    /* row by row: the sums do not depend on how the caller cut the matrix */
    for (int64_t i = 0; i < n_rows; i++) {
        stats->sq_error += j.stats[i].sq_error;
        stats->sq_weight += j.stats[i].sq_weight;
        stats->n_clipped += j.stats[i].n_clipped;
        stats->n_zero_groups += j.stats[i].n_zero_groups;
        stats->n_small_scale += j.stats[i].n_small_scale;
        stats->n_large_scale += j.stats[i].n_large_scale;
    }
    rows->n_rows = n_rows;
    qc_free(j.stats);
    return QC_OK;
}

static void cpu_host_tasks(qc_backend *be, int64_t n_tasks, qc_task_fn fn, void *ctx)
{
    qc_pool_run(((qc_cpu_backend *)be)->pool, n_tasks, fn, ctx);
}

static void cpu_describe(qc_backend *be, qc_device_info *ret)
{
    const qc_cpu_backend *cb = (const qc_cpu_backend *)be;
    *ret = (qc_device_info){0};
    snprintf(ret->name, sizeof ret->name, "%s", cb->kern.name);
}

static void cpu_close(qc_backend *be)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    qc_free(cb->scratch);
    qc_free(cb);
}

int qc_backend_cpu_new(qc_pool *pool, qc_compute compute, qc_backend **ret, qc_err *err)
{
    qc_cpu_backend *cb = qc_calloc(1, sizeof *cb);
    if (!cb)
        return qc_fail_nomem(err, "CPU backend", sizeof *cb);
    cb->pool = pool;
    qc_kern_init(&cb->kern, qc_cpu_flags());
    qc_kern_bf16_init(&cb->bf16, qc_cpu_flags());
    qc_blas_single_thread();
    cb->be = (qc_backend){
        .name = "cpu",
        .compute = compute,
        .n_threads = qc_pool_size(pool),
        .host_memory = true,
        .alloc = cpu_alloc,
        .free = cpu_free,
        .upload = cpu_copy,
        .download = cpu_copy,
        .weight_load = qc_cpu_weight_load,
        .weight_free = qc_cpu_weight_free,
        .linear = qc_cpu_linear,
        .rms_norm = cpu_rms_norm,
        .rope = cpu_rope,
        .attention = qc_cpu_attention,
        .gated_act = cpu_gated_act,
        .route = qc_cpu_route,
        .gather_rows = qc_cpu_gather_rows,
        .add_rows = qc_cpu_add_rows,
        .add = cpu_add,
        .scale = cpu_scale,
        .score = qc_cpu_score,
        .quantize_rows = cpu_quantize_rows,
        .host_tasks = cpu_host_tasks,
        .gram = qc_cpu_gram,
        .mirror = qc_cpu_mirror,
        .column_stats = qc_cpu_column_stats,
        .quantize_acts = qc_cpu_quantize_acts,
        .factor = qc_cpu_factor,
        .factor_solve = qc_cpu_factor_solve,
        .round_forward = qc_cpu_round_forward,
        .descend = qc_cpu_descend,
        .hessian_error = qc_cpu_hessian_error,
        .describe = cpu_describe,
        .close = cpu_close,
    };
    if (compute == QC_COMPUTE_BF16) {
        cb->be.linear = qc_cpu_linear_bf16;
        cb->be.gram = qc_cpu_gram_bf16;
        cb->be.attention = qc_cpu_attention_bf16;
    }
    *ret = &cb->be;
    return QC_OK;
}
