/* column_stats, quantize_acts: one pass over activations. */
#include "cpu.h"
#include "qc_math.h"

#include <math.h>

/* Columns per task of column_stats: a row's part is a few cache lines. Rows per task of quantize_acts. */
enum { TASK_COLUMNS = 128, TASK_ROWS = 16 };

typedef struct stats_job {
    const qc_kern *kern;
    float *sum_abs, *max_abs;
    const float *x;
    int64_t ldx, n_tokens, n_dims;
} stats_job;

static void stats_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const stats_job *job = ctx;
    int64_t k = task * TASK_COLUMNS, end = qc_min_i64(k + TASK_COLUMNS, job->n_dims);
    job->kern->column_stats(job->sum_abs + k, job->max_abs + k, job->x + k, job->ldx, job->n_tokens, end - k);
    for (; k < end; k++)
        if (isnan(job->sum_abs[k]))
            job->max_abs[k] = job->sum_abs[k];
}

int qc_cpu_column_stats(qc_backend *be, float *sum_abs, float *max_abs, const float *x, int64_t ldx,
                        int64_t n_tokens, int64_t n_dims, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    (void)err;
    stats_job job = {&cb->kern, sum_abs, max_abs, x, ldx, n_tokens, n_dims};
    qc_pool_run(cb->pool, qc_ceil_div(n_dims, TASK_COLUMNS), stats_task, &job);
    return QC_OK;
}

typedef struct acts_job {
    const qc_kern *kern;
    float *y;
    const float *x;
    int64_t ldy, ldx, n_tokens, n_dims, group;
    float qmax;
} acts_job;

static void acts_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const acts_job *job = ctx;
    int64_t end = qc_min_i64((task + 1) * TASK_ROWS, job->n_tokens);
    for (int64_t t = task * TASK_ROWS; t < end; t++)
        for (int64_t k = 0; k < job->n_dims; k += job->group)
            job->kern->quantize_act(job->y + t * job->ldy + k, job->x + t * job->ldx + k,
                                    qc_min_i64(job->group, job->n_dims - k), job->qmax);
}

int qc_cpu_quantize_acts(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx, int64_t n_tokens,
                         int64_t n_dims, int bits, int64_t group_elems, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    if (bits < 2 || bits > 8 || group_elems < 0)
        return qc_fail(err, QC_E_UNSUPPORTED, "activations of %d bits in groups of %lld", bits,
                       (long long)group_elems);
    acts_job job = {.kern = &cb->kern,
                    .y = y,
                    .x = x,
                    .ldy = ldy,
                    .ldx = ldx,
                    .n_tokens = n_tokens,
                    .n_dims = n_dims,
                    .group = group_elems > 0 ? group_elems : n_dims,
                    .qmax = (float)((1 << (bits - 1)) - 1)};
    qc_pool_run(cb->pool, qc_ceil_div(n_tokens, TASK_ROWS), acts_task, &job);
    return QC_OK;
}
