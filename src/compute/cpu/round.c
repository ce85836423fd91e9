/* round_sweep, refit_scales, hessian_error: rows of a matrix against an [n, n] matrix of coefficients. Panels
 * of nr rows are kept transposed, [column, nr], so that `gemm` computes nr rows at once for a block of
 * columns, and a task takes a few panels so that coefficients read once serve them all. What a row gets does
 * not depend on the rows beside it. */
#include "cpu.h"
#include "kern_quant.h"
#include "qc_alloc.h"
#include "qc_math.h"

#include <string.h>

/* BLOCK columns between two products with everything outside; products take DEPTH coefficients of a row at a
 * time: a panel of that depth takes 32 KiB. A task has at most MAX_PANELS panels, fewer where that would
 * leave less than MIN_TASKS tasks. COPY_LD, CACHE_PERIOD: see tile_block of linear.c. */
enum { BLOCK = 128, DEPTH = 256, MAX_PANELS = 4, MIN_TASKS = 8, COPY_LD = DEPTH + 16, CACHE_PERIOD = 1024 };

typedef struct round_job {
    const qc_kern *kern;
    const float *c; /* [n, n] */
    int64_t n_rows, n, n_groups, panels_per_task;
    int n_kept; /* how many of error, target and steps a thread keeps */
    float *scratch;
    int64_t thread_elems;
    /* round_sweep, refit_scales */
    const float *inv;
    bool forward;
    const qc_grid *grid;
    const qc_round_rows *rows;
    const int32_t *group_of;
    /* hessian_error */
    const float *e;
    double *ret;
} round_job;

/* The rows of one task in the memory of its thread. */
typedef struct panel_set {
    int64_t row0, n_rows, n_panels;
    float *error, *target;      /* [panels, n, nr] */
    float *steps;               /* code - zero: [panels, n, nr] */
    float *scales, *zeros;      /* [panels, n_groups, nr] */
    float *sum, *other, *codes; /* [panels, BLOCK, nr] */
    float *copy;                /* [BLOCK, COPY_LD] */
} panel_set;

static int64_t thread_elems(const round_job *job)
{
    int64_t nr = job->kern->nr, p = job->panels_per_task;
    return job->n_kept * p * job->n * nr + 2 * p * job->n_groups * nr + 3 * p * BLOCK * nr + BLOCK * COPY_LD;
}

static panel_set panels_of(const round_job *job, int64_t task, int thread)
{
    int64_t nr = job->kern->nr, p = job->panels_per_task, whole = p * job->n * nr, row0 = task * p * nr;
    panel_set s = {.row0 = row0, .n_rows = qc_min_i64(p * nr, job->n_rows - row0)};
    s.n_panels = qc_ceil_div(s.n_rows, nr);
    s.error = job->scratch + thread * job->thread_elems;
    s.target = s.error + whole;
    s.steps = s.target + whole;
    s.scales = s.error + job->n_kept * whole;
    s.zeros = s.scales + p * job->n_groups * nr;
    s.sum = s.zeros + p * job->n_groups * nr;
    s.other = s.sum + p * BLOCK * nr;
    s.codes = s.other + p * BLOCK * nr;
    s.copy = s.codes + p * BLOCK * nr;
    return s;
}

static int64_t rows_in(const round_job *job, const panel_set *s, int64_t p)
{
    return qc_min_i64(job->kern->nr, s->n_rows - p * job->kern->nr);
}

/* [n_rows, n] of the caller to the task's panels, and back. */
static void load_panels(const round_job *job, const panel_set *s, float *dst, const float *src)
{
    int64_t nr = job->kern->nr;
    for (int64_t p = 0; p < s->n_panels; p++)
        job->kern->pack(dst + p * job->n * nr, src + (s->row0 + p * nr) * job->n, job->n, rows_in(job, s, p),
                        job->n);
}

static void store_panels(const round_job *job, const panel_set *s, float *dst, const float *src)
{
    int64_t nr = job->kern->nr;
    for (int64_t p = 0; p < s->n_panels; p++)
        job->kern->unpack(dst + (s->row0 + p * nr) * job->n, job->n, src + p * job->n * nr,
                          rows_in(job, s, p), job->n, 1);
}

/* Lanes without a row get scale 1 and zero 0. */
static void load_grids(const round_job *job, const panel_set *s)
{
    int64_t nr = job->kern->nr, n_groups = job->n_groups;
    float middle = (float)(1 << (job->grid->bits - 1));
    for (int64_t i = 0; i < s->n_panels * nr; i++) {
        float *scales = s->scales + i / nr * n_groups * nr + i % nr;
        float *zeros = s->zeros + i / nr * n_groups * nr + i % nr;
        const float *from = job->rows->scales + (s->row0 + i) * n_groups;
        const uint8_t *z = job->rows->zeros ? job->rows->zeros + (s->row0 + i) * n_groups : NULL;
        for (int64_t g = 0; g < n_groups; g++) {
            scales[g * nr] = i < s->n_rows ? from[g] : 1;
            zeros[g * nr] = i >= s->n_rows ? 0 : z ? (float)z[g] : middle;
        }
    }
}

/* sum[panels, BLOCK, nr] = c[row0 .. row0 + m - 1, k0 .. k1 - 1] x[panels, k0 .. k1 - 1, nr] */
static void product(const round_job *job, const panel_set *s, float *sum, const float *x, int64_t row0,
                    int64_t m, int64_t k0, int64_t k1)
{
    int64_t nr = job->kern->nr;
    if (k0 >= k1)
        memset(sum, 0, (size_t)(s->n_panels * BLOCK * nr) * sizeof *sum);
    for (int64_t k = k0; k < k1; k += DEPTH) {
        int64_t depth = qc_min_i64(DEPTH, k1 - k), ldc = job->n;
        const float *c = job->c + row0 * job->n + k;
        if (ldc % CACHE_PERIOD == 0) {
            for (int64_t i = 0; i < m; i++)
                memcpy(s->copy + i * COPY_LD, c + i * ldc, (size_t)depth * sizeof *c);
            c = s->copy;
            ldc = COPY_LD;
        }
        for (int64_t p = 0; p < s->n_panels; p++)
            job->kern->gemm(sum + p * BLOCK * nr, nr, c, ldc, x + (p * job->n + k) * nr, m, nr, depth,
                            k > k0);
    }
}

/* Codes of the columns j0 .. j0 + m - 1, m <= BLOCK, from the caller's rows to panels [BLOCK, nr] of floats
 * that are `step` apart; and back. */
static void load_codes(const round_job *job, const panel_set *s, float *to, int64_t step, int64_t j0,
                       int64_t m)
{
    int64_t nr = job->kern->nr;
    for (int64_t p = 0; p < s->n_panels; p++) {
        const uint8_t *from = job->rows->codes + (s->row0 + p * nr) * job->n + j0;
        for (int64_t r = 0; r < rows_in(job, s, p); r++)
            for (int64_t j = 0; j < m; j++)
                s->copy[r * BLOCK + j] = (float)from[r * job->n + j];
        job->kern->pack(to + p * step, s->copy, BLOCK, rows_in(job, s, p), m);
    }
}

static void store_codes(const round_job *job, const panel_set *s, int64_t j0, int64_t m)
{
    int64_t nr = job->kern->nr;
    for (int64_t p = 0; p < s->n_panels; p++) {
        uint8_t *to = job->rows->codes + (s->row0 + p * nr) * job->n + j0;
        job->kern->unpack(s->copy, BLOCK, s->codes + p * BLOCK * nr, rows_in(job, s, p), m, 1);
        for (int64_t r = 0; r < rows_in(job, s, p); r++)
            for (int64_t j = 0; j < m; j++)
                to[r * job->n + j] = (uint8_t)s->copy[r * BLOCK + j];
    }
}

/* Columns j0 .. j0 + m - 1, mr at a time; s->sum holds what the columns outside give. */
static void sweep_block(const round_job *job, const panel_set *s, int64_t j0, int64_t m)
{
    const qc_kern *kern = job->kern;
    int64_t nr = kern->nr, block = BLOCK * nr, whole = job->n * nr;
    /* what later columns of the block have not seen yet; forward: the errors before count as 0 */
    float *change = job->forward ? s->error + j0 * nr : s->other;
    int64_t change_step = job->forward ? whole : block;
    for (int64_t i = 0; i < m; i += kern->mr) {
        int64_t n_cols = qc_min_i64(kern->mr, m - i);
        const float *c = job->c + (j0 + i) * job->n + j0;
        for (int64_t p = 0; p < s->n_panels && i > 0; p++)
            kern->gemm(s->sum + p * block + i * nr, nr, c, job->n, change + p * change_step, n_cols, nr, i,
                       true);
        qc_round_part part = {.n_cols = n_cols,
                              .n_panels = s->n_panels,
                              .c = c + i,
                              .ldc = job->n,
                              .inv = job->inv ? job->inv + j0 + i : NULL,
                              .qmax = (float)((1 << job->grid->bits) - 1),
                              .scales = s->scales,
                              .zeros = s->zeros,
                              .grid_step = job->n_groups * nr,
                              .group_of = job->group_of + j0 + i,
                              .target = s->target + (j0 + i) * nr,
                              .error = s->error + (j0 + i) * nr,
                              .row_step = whole,
                              .sum = s->sum + i * nr,
                              .codes = s->codes + i * nr,
                              .change = job->forward ? NULL : change + i * nr,
                              .block_step = block};
        kern->round_part(&part);
    }
}

static void sweep_task(void *ctx, int64_t task, int thread)
{
    const round_job *job = ctx;
    panel_set s = panels_of(job, task, thread);
    load_panels(job, &s, s.target, job->rows->target);
    if (!job->forward)
        load_panels(job, &s, s.error, job->rows->error);
    load_grids(job, &s);
    for (int64_t j0 = 0; j0 < job->n; j0 += BLOCK) {
        int64_t m = qc_min_i64(BLOCK, job->n - j0);
        product(job, &s, s.sum, s.error, j0, m, 0, job->forward ? j0 : job->n);
        if (!job->forward)
            load_codes(job, &s, s.codes, BLOCK * job->kern->nr, j0, m);
        sweep_block(job, &s, j0, m);
        store_codes(job, &s, j0, m);
    }
    store_panels(job, &s, job->rows->error, s.error);
}

/* Cuts the rows into tasks, gets the memory and runs them. */
static int run_tasks(qc_cpu_backend *cb, round_job *job, qc_task_fn fn, qc_err *err)
{
    job->kern = &cb->kern;
    int64_t n_panels = qc_ceil_div(job->n_rows, job->kern->nr);
    job->panels_per_task = qc_min_i64(MAX_PANELS, qc_max_i64(1, n_panels / MIN_TASKS));
    job->thread_elems = qc_round_up(thread_elems(job), 16);
    job->scratch = qc_cpu_scratch(cb, qc_pool_size(cb->pool) * job->thread_elems, err);
    if (!job->scratch)
        return QC_E_RESOURCE;
    qc_pool_run(cb->pool, qc_ceil_div(n_panels, job->panels_per_task), fn, job);
    return QC_OK;
}

int qc_cpu_round_sweep(qc_backend *be, const float *c, const float *inv, bool forward, const qc_grid *grid,
                       const qc_round_rows *rows, qc_err *err)
{
    int64_t n = rows->n_cols;
    round_job job = {.c = c, .n_rows = rows->n_rows, .n = n, .n_kept = 2};
    job.n_groups = qc_ceil_div(n, grid->group_elems);
    job.inv = inv;
    job.forward = forward;
    job.grid = grid;
    job.rows = rows;
    job.group_of = rows->group_of;
    int32_t *own = NULL;
    if (!job.group_of) {
        own = qc_alloc((size_t)n, sizeof *own);
        if (!own)
            return qc_fail_nomem(err, "groups of columns", (size_t)n * sizeof *own);
        for (int64_t j = 0; j < n; j++)
            own[j] = (int32_t)(j / grid->group_elems);
        job.group_of = own;
    }
    int rc = run_tasks((qc_cpu_backend *)be, &job, sweep_task, err);
    qc_free(own);
    return rc;
}

/* ---- refit_scales ---- */

static void load_steps(const round_job *job, const panel_set *s)
{
    int64_t nr = job->kern->nr, n = job->n, group = job->grid->group_elems;
    for (int64_t j = 0; j < n; j += BLOCK)
        load_codes(job, s, s->steps + j * nr, n * nr, j, qc_min_i64(BLOCK, n - j));
    for (int64_t p = 0; p < s->n_panels; p++)
        for (int64_t j = 0; j < n; j++)
            job->kern->add(s->steps + (p * n + j) * nr, s->zeros + (p * job->n_groups + j / group) * nr, -1,
                           nr);
}

/* num[panels, nr] += p h e, den += p h p for rows i0 .. i0 + m - 1 of h in the group j0 .. j1 - 1. */
static void fit_rows(const round_job *job, const panel_set *s, int64_t i0, int64_t m, int64_t j0, int64_t j1,
                     double *num, double *den)
{
    int64_t nr = job->kern->nr;
    product(job, s, s->sum, s->error, i0, m, 0, job->n);
    product(job, s, s->other, s->steps, i0, m, j0, j1);
    for (int64_t p = 0; p < s->n_panels; p++)
        for (int64_t i = 0; i < m; i++)
            for (int64_t r = 0; r < nr; r++) {
                double step = (double)s->steps[(p * job->n + i0 + i) * nr + r];
                num[p * nr + r] += step * (double)s->sum[(p * BLOCK + i) * nr + r];
                den[p * nr + r] += step * (double)s->other[(p * BLOCK + i) * nr + r];
            }
}

/* Takes the scale that is best for the codes of one group of one row where it lowers the error. */
static void fit_scale(const round_job *job, const panel_set *s, int64_t p, int64_t r, int64_t j0, int64_t j1,
                      double num, double den)
{
    int64_t nr = job->kern->nr, at = p * job->n * nr + r;
    float *scale = s->scales + (p * job->n_groups + j0 / job->grid->group_elems) * nr + r;
    if (!(den > 0))
        return;
    float fitted = (float)((double)*scale + num / den);
    qc_quant_store_scales(&fitted, 1, job->grid->scale_dtype, job->grid->bits);
    double d = (double)fitted - (double)*scale;
    if (!(-2 * d * num + d * d * den < 0))
        return;
    *scale = fitted;
    for (int64_t j = j0; j < j1; j++)
        s->error[at + j * nr] = s->target[at + j * nr] - fitted * s->steps[at + j * nr];
}

static void refit_task(void *ctx, int64_t task, int thread)
{
    const round_job *job = ctx;
    int64_t nr = job->kern->nr, group = job->grid->group_elems;
    panel_set s = panels_of(job, task, thread);
    load_panels(job, &s, s.target, job->rows->target);
    load_panels(job, &s, s.error, job->rows->error);
    load_grids(job, &s);
    load_steps(job, &s);
    for (int64_t j0 = 0; j0 < job->n; j0 += group) {
        int64_t j1 = qc_min_i64(job->n, j0 + group);
        double num[MAX_PANELS * QC_KERN_MAX_NR] = {0}, den[MAX_PANELS * QC_KERN_MAX_NR] = {0};
        for (int64_t i = j0; i < j1; i += BLOCK)
            fit_rows(job, &s, i, qc_min_i64(BLOCK, j1 - i), j0, j1, num, den);
        for (int64_t i = 0; i < s.n_rows; i++) {
            fit_scale(job, &s, i / nr, i % nr, j0, j1, num[i], den[i]);
            job->rows->scales[(s.row0 + i) * job->n_groups + j0 / group] =
                s.scales[(i / nr * job->n_groups + j0 / group) * nr + i % nr];
        }
    }
    store_panels(job, &s, job->rows->error, s.error);
}

int qc_cpu_refit_scales(qc_backend *be, const float *h, const qc_grid *grid, const qc_round_rows *rows,
                        qc_err *err)
{
    round_job job = {.c = h, .n_rows = rows->n_rows, .n = rows->n_cols, .n_kept = 3};
    job.n_groups = qc_ceil_div(job.n, grid->group_elems);
    job.grid = grid;
    job.rows = rows;
    return run_tasks((qc_cpu_backend *)be, &job, refit_task, err);
}

/* ---- hessian_error ---- */

static void error_task(void *ctx, int64_t task, int thread)
{
    const round_job *job = ctx;
    int64_t nr = job->kern->nr;
    panel_set s = panels_of(job, task, thread);
    double total[MAX_PANELS * QC_KERN_MAX_NR] = {0};
    load_panels(job, &s, s.error, job->e);
    for (int64_t j0 = 0; j0 < job->n; j0 += BLOCK) {
        int64_t m = qc_min_i64(BLOCK, job->n - j0);
        product(job, &s, s.sum, s.error, j0, m, 0, job->n);
        for (int64_t p = 0; p < s.n_panels; p++)
            for (int64_t j = 0; j < m; j++)
                for (int64_t r = 0; r < nr; r++)
                    total[p * nr + r] += (double)s.error[(p * job->n + j0 + j) * nr + r] *
                                         (double)s.sum[(p * BLOCK + j) * nr + r];
    }
    memcpy(job->ret + s.row0, total, (size_t)s.n_rows * sizeof *total);
}

int qc_cpu_hessian_error(qc_backend *be, const float *h, const float *e, int64_t n_rows, int64_t n,
                         double *ret, qc_err *err)
{
    round_job job = {.c = h, .n_rows = n_rows, .n = n, .n_kept = 1, .e = e, .ret = ret};
    return run_tasks((qc_cpu_backend *)be, &job, error_task, err);
}
