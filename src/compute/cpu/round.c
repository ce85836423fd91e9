/* round_forward, descend, hessian_error: rows of a matrix against an [n, n] matrix of coefficients. Panels of
 * nr rows are kept transposed, [column, nr], so that `gemm` computes nr rows at once for a block of columns,
 * and a task takes a few panels so that coefficients read once serve them all. What a row gets does not
 * depend on the rows beside it. */
#include "cpu.h"
#include "kern_quant.h"
#include "qc_alloc.h"
#include "qc_math.h"

#include <string.h>

/* Products take STRIP rows and DEPTH columns of coefficients at a time: a panel of that depth takes 32 KiB. A
 * task has at most MAX_PANELS panels, fewer where that would leave less than MIN_TASKS tasks. COPY_LD,
 * CACHE_PERIOD: see tile_block of linear.c. */
enum {
    STRIP = 128,
    DEPTH = 256,
    MAX_PANELS = QC_ROUND_COPIED_ROWS / 32,
    MIN_TASKS = 8,
    COPY_LD = DEPTH + 16,
    CACHE_PERIOD = 1024
};

typedef struct round_job {
    const qc_kern *kern;
    const float *c; /* [n, n] */
    int64_t n_rows, n, n_groups, panels_per_task;
    int64_t block; /* columns between two products with everything outside */
    int n_kept;    /* how many of error and target a thread keeps */
    float *scratch;
    int64_t thread_elems;
    /* round_forward, descend */
    const float *inv; /* NULL: round_forward */
    const qc_grid *grid;
    const qc_round_rows *rows;
    const int32_t *group_of;
    int64_t n_sweeps;
    bool refit;
    /* hessian_error */
    const float *e;
    double *ret;
} round_job;

/* The rows of one task in the memory of its thread. */
typedef struct panel_set {
    int64_t row0, n_rows, n_panels;
    float *error, *target;      /* [panels, n, nr] */
    float *scales, *zeros;      /* [panels, n_groups, nr] */
    float *sum, *other, *codes; /* [panels, block, nr] */
    float *fit;                 /* [block, nr] */
    float *copy;                /* [STRIP, COPY_LD] */
} panel_set;

static int64_t thread_elems(const round_job *job)
{
    int64_t nr = job->kern->nr, p = job->panels_per_task;
    return job->n_kept * p * job->n * nr + 2 * p * job->n_groups * nr + (3 * p + 1) * job->block * nr +
           STRIP * COPY_LD;
}

static panel_set panels_of(const round_job *job, int64_t task, int thread)
{
    int64_t nr = job->kern->nr, p = job->panels_per_task, whole = p * job->n * nr, row0 = task * p * nr;
    panel_set s = {.row0 = row0, .n_rows = qc_min_i64(p * nr, job->n_rows - row0)};
    s.n_panels = qc_ceil_div(s.n_rows, nr);
    s.error = job->scratch + thread * job->thread_elems;
    s.target = s.error + whole;
    s.scales = s.error + job->n_kept * whole;
    s.zeros = s.scales + p * job->n_groups * nr;
    s.sum = s.zeros + p * job->n_groups * nr;
    s.other = s.sum + p * job->block * nr;
    s.codes = s.other + p * job->block * nr;
    s.fit = s.codes + p * job->block * nr;
    s.copy = s.fit + job->block * nr;
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

/* sum[panels, block, nr] = c[row0 .. row0 + m - 1, k0 .. k1 - 1] x[panels, k0 .. k1 - 1, nr] */
static void product(const round_job *job, const panel_set *s, const float *x, int64_t row0, int64_t m,
                    int64_t k0, int64_t k1)
{
    int64_t nr = job->kern->nr, block = job->block * nr;
    for (int64_t p = 0; p < s->n_panels && k0 >= k1; p++)
        memset(s->sum + p * block, 0, (size_t)(m * nr) * sizeof *s->sum);
    for (int64_t i0 = 0; i0 < m; i0 += STRIP)
        for (int64_t k = k0; k < k1; k += DEPTH) {
            int64_t depth = qc_min_i64(DEPTH, k1 - k), n_rows = qc_min_i64(STRIP, m - i0), ldc = job->n;
            const float *c = job->c + (row0 + i0) * job->n + k;
            if (ldc % CACHE_PERIOD == 0) {
                for (int64_t i = 0; i < n_rows; i++)
                    memcpy(s->copy + i * COPY_LD, c + i * ldc, (size_t)depth * sizeof *c);
                c = s->copy;
                ldc = COPY_LD;
            }
            for (int64_t p = 0; p < s->n_panels; p++)
                job->kern->gemm(s->sum + p * block + i0 * nr, nr, c, ldc, x + (p * job->n + k) * nr, n_rows,
                                nr, depth, k > k0);
        }
}

/* Codes of the columns j0 .. j0 + m - 1 of the caller's rows to the block's panels of floats, and back. */
static void load_codes(const round_job *job, const panel_set *s, int64_t j0, int64_t m)
{
    int64_t nr = job->kern->nr;
    for (int64_t p = 0; p < s->n_panels; p++)
        for (int64_t i = 0; i < m; i += STRIP) {
            int64_t n = qc_min_i64(STRIP, m - i), n_rows = rows_in(job, s, p);
            const uint8_t *from = job->rows->codes + (s->row0 + p * nr) * job->n + j0 + i;
            for (int64_t r = 0; r < n_rows; r++)
                for (int64_t j = 0; j < n; j++)
                    s->copy[r * STRIP + j] = (float)from[r * job->n + j];
            job->kern->pack(s->codes + (p * job->block + i) * nr, s->copy, STRIP, n_rows, n);
        }
}

static void store_codes(const round_job *job, const panel_set *s, int64_t j0, int64_t m)
{
    int64_t nr = job->kern->nr;
    for (int64_t p = 0; p < s->n_panels; p++)
        for (int64_t i = 0; i < m; i += STRIP) {
            int64_t n = qc_min_i64(STRIP, m - i), n_rows = rows_in(job, s, p);
            uint8_t *to = job->rows->codes + (s->row0 + p * nr) * job->n + j0 + i;
            job->kern->unpack(s->copy, STRIP, s->codes + (p * job->block + i) * nr, n_rows, n, 1);
            for (int64_t r = 0; r < n_rows; r++)
                for (int64_t j = 0; j < n; j++)
                    to[r * job->n + j] = (uint8_t)s->copy[r * STRIP + j];
        }
}

/* Columns j0 .. j0 + m - 1, mr at a time; s->sum holds what the columns outside give. */
static void sweep_block(const round_job *job, const panel_set *s, int64_t j0, int64_t m)
{
    const qc_kern *kern = job->kern;
    int64_t nr = kern->nr, block = job->block * nr, whole = job->n * nr;
    /* what later columns of the block have not seen yet; forward: the errors before count as 0 */
    float *change = job->inv ? s->other : s->error + j0 * nr;
    int64_t change_step = job->inv ? block : whole;
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
                              .change = job->inv ? change + i * nr : NULL,
                              .block_step = block};
        kern->round_part(&part);
    }
}

static void forward_task(void *ctx, int64_t task, int thread)
{
    const round_job *job = ctx;
    panel_set s = panels_of(job, task, thread);
    load_panels(job, &s, s.target, job->rows->target);
    load_grids(job, &s);
    for (int64_t j0 = 0; j0 < job->n; j0 += job->block) {
        int64_t m = qc_min_i64(job->block, job->n - j0);
        product(job, &s, s.error, j0, m, 0, j0);
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

/* Runs a job that rounds, with the groups by column where the caller has none of its own. */
static int run_rounding(qc_backend *be, round_job *job, qc_task_fn fn, qc_err *err)
{
    int32_t *own = NULL;
    job->n_rows = job->rows->n_rows;
    job->n = job->rows->n_cols;
    job->n_groups = qc_ceil_div(job->n, job->grid->group_elems);
    job->n_kept = 2;
    job->group_of = job->rows->group_of;
    if (!job->group_of) {
        own = qc_alloc((size_t)job->n, sizeof *own);
        if (!own)
            return qc_fail_nomem(err, "groups of columns", (size_t)job->n * sizeof *own);
        for (int64_t j = 0; j < job->n; j++)
            own[j] = (int32_t)(j / job->grid->group_elems);
        job->group_of = own;
    }
    int rc = run_tasks((qc_cpu_backend *)be, job, fn, err);
    qc_free(own);
    return rc;
}

int qc_cpu_round_forward(qc_backend *be, const float *factor, const qc_grid *grid, const qc_round_rows *rows,
                         qc_err *err)
{
    round_job job = {.c = factor, .grid = grid, .rows = rows, .block = QC_DESCENT_BLOCK};
    return run_rounding(be, &job, forward_task, err);
}

/* ---- descend ---- */

/* The group of columns i0 .. i0 + n - 1 of a block that begins at column j0. */
typedef struct fit_group {
    int64_t j0, i0, n, index;
} fit_group;

/* num[nr] = p h e, den = p h p of the rows of a panel; steps[n, nr] <- p. */
static void fit_sums(const round_job *job, const panel_set *s, int64_t panel, const fit_group *g,
                     float *steps, double *num, double *den)
{
    int64_t nr = job->kern->nr, at = g->j0 + g->i0;
    const float *zeros = s->zeros + (panel * job->n_groups + g->index) * nr;
    const float *codes = s->codes + (panel * job->block + g->i0) * nr;
    const float *sum = s->sum + (panel * job->block + g->i0) * nr;
    for (int64_t i = 0; i < g->n; i++)
        for (int64_t r = 0; r < nr; r++)
            steps[i * nr + r] = codes[i * nr + r] - zeros[r];
    job->kern->gemm(s->fit, nr, job->c + at * (job->n + 1), job->n, steps, g->n, nr, g->n, false);
    for (int64_t r = 0; r < nr; r++)
        num[r] = den[r] = 0;
    job->kern->add_dots(num, steps, sum, g->n, 1);
    job->kern->add_dots(den, steps, s->fit, g->n, 1);
}

/* The scale that is best for the codes of a group, if it lowers the error; else the present one. */
static float best_scale(const qc_grid *grid, float scale, double num, double den)
{
    if (!(den > 0))
        return scale;
    float fitted = (float)((double)scale + num / den);
    qc_quant_store_scales(&fitted, 1, grid->scale_dtype, grid->bits);
    double d = (double)fitted - (double)scale;
    return -2 * d * num + d * d * den < 0 ? fitted : scale;
}

/* Scales of one group, and the errors and sums of the block that follow from them. */
static void fit_scales(const round_job *job, const panel_set *s, int64_t panel, const fit_group *g, int64_t m)
{
    int64_t nr = job->kern->nr, at = g->j0 + g->i0;
    float *steps = s->other + panel * job->block * nr,
          *scales = s->scales + (panel * job->n_groups + g->index) * nr;
    float *error = s->error + (panel * job->n + at) * nr;
    const float *target = s->target + (panel * job->n + at) * nr;
    double num[QC_KERN_MAX_NR], den[QC_KERN_MAX_NR];
    float fitted[QC_KERN_MAX_NR], moves[QC_KERN_MAX_NR];
    fit_sums(job, s, panel, g, steps, num, den);
    bool any = false;
    for (int64_t r = 0; r < nr; r++) {
        fitted[r] = best_scale(job->grid, scales[r], num[r], den[r]);
        moves[r] = fitted[r] != scales[r];
        any |= moves[r] != 0;
    }
    if (!any)
        return;
    memcpy(scales, fitted, (size_t)nr * sizeof *scales);
    for (int64_t i = 0; i < g->n; i++)
        for (int64_t r = 0; r < nr; r++) {
            float was = error[i * nr + r],
                  is = moves[r] != 0 ? target[i * nr + r] - fitted[r] * steps[i * nr + r] : was;
            error[i * nr + r] = is;
            steps[i * nr + r] = is - was;
        }
    job->kern->gemm(s->sum + panel * job->block * nr, nr, job->c + g->j0 * job->n + at, job->n, steps, m, nr,
                    g->n, true);
}

static void store_scales(const round_job *job, const panel_set *s)
{
    int64_t nr = job->kern->nr, n = job->n_groups;
    for (int64_t i = 0; i < s->n_rows; i++)
        for (int64_t g = 0; g < n; g++)
            job->rows->scales[(s->row0 + i) * n + g] = s->scales[(i / nr * n + g) * nr + i % nr];
}

/* One pass over the blocks of columns: scales, codes or both of each. */
static void descend_pass(const round_job *job, const panel_set *s, bool codes)
{
    int64_t group = job->grid->group_elems;
    for (int64_t j0 = 0; j0 < job->n; j0 += job->block) {
        int64_t m = qc_min_i64(job->block, job->n - j0);
        product(job, s, s->error, j0, m, 0, job->n);
        load_codes(job, s, j0, m);
        for (int64_t i = 0; i < m && job->refit; i += group) {
            fit_group g = {.j0 = j0, .i0 = i, .n = qc_min_i64(group, m - i), .index = (j0 + i) / group};
            for (int64_t p = 0; p < s->n_panels; p++)
                fit_scales(job, s, p, &g, m);
        }
        if (codes) {
            sweep_block(job, s, j0, m);
            store_codes(job, s, j0, m);
        }
    }
}

static void descend_task(void *ctx, int64_t task, int thread)
{
    const round_job *job = ctx;
    panel_set s = panels_of(job, task, thread);
    load_panels(job, &s, s.target, job->rows->target);
    load_panels(job, &s, s.error, job->rows->error);
    load_grids(job, &s);
    for (int64_t i = 0; i < job->n_sweeps; i++)
        descend_pass(job, &s, true);
    if (job->refit) {
        descend_pass(job, &s, false);
        store_scales(job, &s);
    }
    store_panels(job, &s, job->rows->error, s.error);
}

int qc_cpu_descend(qc_backend *be, const float *h, const float *inv, const qc_grid *grid,
                   const qc_round_rows *rows, int64_t n_sweeps, bool refit, qc_err *err)
{
    round_job job = {.c = h, .inv = inv, .grid = grid, .rows = rows, .n_sweeps = n_sweeps, .refit = refit};
    job.block = qc_descent_block(grid->group_elems, rows->n_cols);
    return run_rounding(be, &job, descend_task, err);
}

/* ---- hessian_error ---- */

/* total[panels * nr] += weight * sum of the errors of the block's columns times s->sum. */
static void add_products(const round_job *job, const panel_set *s, int64_t j0, int64_t m, double weight,
                         double *total)
{
    int64_t nr = job->kern->nr;
    for (int64_t p = 0; p < s->n_panels; p++)
        job->kern->add_dots(total + p * nr, s->error + (p * job->n + j0) * nr, s->sum + p * job->block * nr,
                            m, weight);
}

/* h is symmetric: what lies below its blocks on the diagonal counts twice. */
static void error_task(void *ctx, int64_t task, int thread)
{
    const round_job *job = ctx;
    panel_set s = panels_of(job, task, thread);
    double total[MAX_PANELS * QC_KERN_MAX_NR] = {0};
    load_panels(job, &s, s.error, job->e);
    for (int64_t j0 = 0; j0 < job->n; j0 += job->block) {
        int64_t m = qc_min_i64(job->block, job->n - j0);
        product(job, &s, s.error, j0, m, j0, j0 + m);
        add_products(job, &s, j0, m, 1, total);
        if (j0 > 0) {
            product(job, &s, s.error, j0, m, 0, j0);
            add_products(job, &s, j0, m, 2, total);
        }
    }
    memcpy(job->ret + s.row0, total, (size_t)s.n_rows * sizeof *total);
}

int qc_cpu_hessian_error(qc_backend *be, const float *h, const float *e, int64_t n_rows, int64_t n,
                         double *ret, qc_err *err)
{
    round_job job = {.c = h, .n_rows = n_rows, .n = n, .n_kept = 1, .block = STRIP, .e = e, .ret = ret};
    return run_tasks((qc_cpu_backend *)be, &job, error_task, err);
}
