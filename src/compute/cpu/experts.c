/* route, gather_rows, add_rows: which experts a token goes to, and its way there and back. */
#include "cpu.h"
#include "qc_math.h"
#include "route.h"

#include <string.h>

enum { TASK_ROWS = 16 };

typedef struct route_job {
    int32_t *ids;
    float *weights;
    const float *logits;
    int64_t ld, n_tokens, n_experts, n_chosen;
    bool renormalise;
} route_job;

static void route_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const route_job *j = ctx;
    int64_t end = qc_min_i64((task + 1) * TASK_ROWS, j->n_tokens);
    for (int64_t t = task * TASK_ROWS; t < end; t++)
        qc_route_token(j->ids + t * j->n_chosen, j->weights + t * j->n_chosen, j->logits + t * j->ld,
                       j->n_experts, j->n_chosen, j->renormalise);
}

int qc_cpu_route(qc_backend *be, int32_t *ids, float *weights, const float *logits, int64_t ld,
                 int64_t n_tokens, int64_t n_experts, int64_t n_chosen, bool renormalise, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    if (n_chosen < 1 || n_chosen > n_experts || n_experts > INT32_MAX)
        return qc_fail(err, QC_E_UNSUPPORTED, "%lld of %lld experts", (long long)n_chosen,
                       (long long)n_experts);
    route_job j = {ids, weights, logits, ld, n_tokens, n_experts, n_chosen, renormalise};
    qc_pool_run(cb->pool, qc_ceil_div(n_tokens, TASK_ROWS), route_task, &j);
    return QC_OK;
}

typedef struct rows_job {
    const qc_kern *kern;
    float *y;
    const float *x, *alpha;
    const int32_t *rows;
    int64_t n_rows, dim;
} rows_job;

static void gather_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const rows_job *j = ctx;
    int64_t end = qc_min_i64((task + 1) * TASK_ROWS, j->n_rows);
    for (int64_t i = task * TASK_ROWS; i < end; i++)
        memcpy(j->y + i * j->dim, j->x + j->rows[i] * j->dim, (size_t)j->dim * sizeof *j->y);
}

int qc_cpu_gather_rows(qc_backend *be, float *y, const float *x, const int32_t *rows, int64_t n_rows,
                       int64_t dim, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    (void)err;
    rows_job j = {.y = y, .x = x, .rows = rows, .n_rows = n_rows, .dim = dim};
    qc_pool_run(cb->pool, qc_ceil_div(n_rows, TASK_ROWS), gather_task, &j);
    return QC_OK;
}

static void add_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const rows_job *j = ctx;
    int64_t end = qc_min_i64((task + 1) * TASK_ROWS, j->n_rows);
    for (int64_t i = task * TASK_ROWS; i < end; i++)
        j->kern->add(j->y + j->rows[i] * j->dim, j->x + i * j->dim, j->alpha[i], j->dim);
}

int qc_cpu_add_rows(qc_backend *be, float *y, const float *x, const int32_t *rows, const float *alpha,
                    int64_t n_rows, int64_t dim, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    (void)err;
    rows_job j = {&cb->kern, y, x, alpha, rows, n_rows, dim};
    qc_pool_run(cb->pool, qc_ceil_div(n_rows, TASK_ROWS), add_task, &j);
    return QC_OK;
}
