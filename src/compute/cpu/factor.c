/* factor and factor_solve: A = R R^T with R upper triangular, by blocks from the last columns to the first.
 *
 * With J a block of columns and I all columns before it,
 *     R_JJ R_JJ^T = A_JJ,   R_JJ Y = A_JI  (Y = R_IJ^T, row j of Y = what row j of the array keeps),
 *     A_II -= Y^T Y,
 * so that the bulk is the tiles of gram. The blocks on the diagonal are factored in double. */
#include "cpu.h"
#include "qc_alloc.h"
#include "qc_math.h"

#include <math.h>
#include <string.h>

/* BLOCK = tokens of a gram block. SOLVE_ROWS right-hand sides are solved at a time. */
enum { BLOCK = QC_GRAM_TOKENS, SOLVE_ROWS = 512 };

/* One triangular block T[n, n], unit diagonal scaled out: `minus` holds -T off the diagonal, inv 1 / T_kk. */
typedef struct triangle {
    int64_t n;
    const float *minus; /* [n, BLOCK] */
    const float *inv;   /* [n] or NULL: 1 */
} triangle;

static void scale_row(const qc_kern *kern, const triangle *t, float *x, int64_t k)
{
    if (t->inv)
        kern->scale(x + k * kern->nr, x + k * kern->nr, t->inv[k], kern->nr);
}

/* x[n, nr] <- T^-1 x, T upper triangular: from the last row to the first, mr rows at a time. */
static void solve_upper(const qc_kern *kern, const triangle *t, float *x)
{
    int64_t nr = kern->nr;
    for (int64_t end = t->n; end > 0;) {
        int64_t start = (end - 1) / kern->mr * kern->mr;
        if (end < t->n)
            kern->gemm(x + start * nr, nr, t->minus + start * BLOCK + end, BLOCK, x + end * nr, end - start,
                       nr, t->n - end, true);
        for (int64_t k = end - 1; k >= start; k--) {
            for (int64_t i = k + 1; i < end; i++)
                kern->add(x + k * nr, x + i * nr, t->minus[k * BLOCK + i], nr);
            scale_row(kern, t, x, k);
        }
        end = start;
    }
}

/* The same with T lower triangular: from the first row to the last. */
static void solve_lower(const qc_kern *kern, const triangle *t, float *x)
{
    int64_t nr = kern->nr;
    for (int64_t start = 0; start < t->n; start += kern->mr) {
        int64_t end = qc_min_i64(start + kern->mr, t->n);
        if (start > 0)
            kern->gemm(x + start * nr, nr, t->minus + start * BLOCK, BLOCK, x, end - start, nr, start, true);
        for (int64_t k = start; k < end; k++) {
            for (int64_t i = start; i < k; i++)
                kern->add(x + k * nr, x + i * nr, t->minus[k * BLOCK + i], nr);
            scale_row(kern, t, x, k);
        }
    }
}

typedef struct factor_job {
    qc_cpu_backend *cb;
    float *a;
    int64_t n, j0;  /* columns j0 .. j0 + upper.n - 1 are eliminated */
    triangle upper; /* R_JJ */
    float *minus, *inv;
    double *square; /* [BLOCK, BLOCK] */
    qc_gram_block block;
} factor_job;

/* R_JJ from the block on the diagonal, its rows and columns read backwards: a lower Cholesky factor. Returns
 * the first bad column, or -1. */
static int64_t factor_diagonal(factor_job *job, double *pivots)
{
    int64_t n = job->upper.n, lda = job->n, last = n - 1;
    float *a = job->a + job->j0 * (lda + 1);
    double *s = job->square;
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c <= r; c++)
            s[r * n + c] = (double)a[(last - c) * lda + last - r];
    int64_t n_good = qc_blas_cholesky(s, n);
    for (int64_t k = last; k >= 0; k--) {
        const double *column = s + last - k; /* R_ik = column[(last - i) n] */
        double r = column[(last - k) * n];
        pivots[job->j0 + k] = r * r;
        if (last - k >= n_good || !(r > 0) || !isfinite(r * r))
            return job->j0 + k;
        job->inv[k] = (float)(1 / r);
        for (int64_t i = 0; i < k; i++) {
            a[k * lda + i] = (float)(column[(last - i) * n] / r);
            job->minus[i * BLOCK + k] = (float)-column[(last - i) * n];
        }
    }
    return -1;
}

/* Y for one panel of columns; the array gets the feedback coefficients, the gram block Y and -Y^T. */
static void panel_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const factor_job *job = ctx;
    const qc_kern *kern = &job->cb->kern;
    int64_t nr = kern->nr, i0 = task * nr, n = job->upper.n;
    float *a = job->a + job->j0 * job->n + i0, *y = job->block.panels + i0 * n;
    int64_t cols = qc_min_i64(nr, job->j0 - i0);
    qc_cpu_gram_panel(kern, y, a, job->n, cols, n);
    solve_upper(kern, &job->upper, y);
    kern->unpack(job->block.rows + i0 * QC_GRAM_LD, QC_GRAM_LD, y, cols, n, -1);
    for (int64_t k = 0; k < n; k++)
        kern->scale(a + k * job->n, y + k * nr, job->inv[k], cols);
}

static int64_t factor_blocks(factor_job *job, double *pivots)
{
    int64_t nr = job->cb->kern.nr;
    for (int64_t end = job->n; end > 0; end = job->j0) {
        job->j0 = (end - 1) / BLOCK * BLOCK;
        job->upper.n = job->block.n_tokens = end - job->j0;
        int64_t bad = factor_diagonal(job, pivots);
        if (bad >= 0)
            return bad;
        qc_pool_run(job->cb->pool, qc_ceil_div(job->j0, nr), panel_task, job);
        qc_cpu_gram_tiles(job->cb, job->a, job->n, job->j0, job->j0, &job->block, 1, true);
    }
    return -1;
}

int qc_cpu_factor(qc_backend *be, float *a, int64_t n, double *pivots, int64_t *ret_bad, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    int64_t elems = qc_cpu_gram_elems(&cb->kern, n);
    float *scratch = qc_cpu_scratch(cb, 2 * elems + BLOCK * BLOCK + BLOCK, err);
    if (!scratch)
        return QC_E_RESOURCE;
    factor_job job = {.cb = cb, .a = a, .n = n};
    job.square = qc_alloc(BLOCK * BLOCK, sizeof *job.square);
    if (!job.square)
        return qc_fail_nomem(err, "block of a factorisation", BLOCK * BLOCK * sizeof *job.square);
    job.block = (qc_gram_block){.rows = scratch, .panels = scratch + elems};
    job.minus = scratch + 2 * elems;
    job.inv = job.minus + BLOCK * BLOCK;
    job.upper = (triangle){.minus = job.minus, .inv = job.inv};
    *ret_bad = factor_blocks(&job, pivots);
    qc_free(job.square);
    return QC_OK;
}

/* x A = b with A = M^T D M, M unit lower triangular as the array holds it. Transposed, X and B are panels
 * [n, nr]: first M^T Z = B from the last row to the first, then Z <- D^-1 Z, then M X = Z downwards. */
typedef struct solve_job {
    const qc_kern *kern;
    const float *m;
    int64_t n, j0; /* block of rows in work */
    const double *pivots;
    float *b;
    int64_t n_rows;
    triangle diagonal;
    float *minus;  /* the triangle's, [BLOCK, BLOCK] */
    float *column; /* -(rows behind the block, columns of the block), transposed: [BLOCK, ld_column] */
    int64_t ld_column;
    float *panels;  /* [panels, n, nr] */
    float *product; /* [threads, BLOCK, nr] */
} solve_job;

static void solve_load_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const solve_job *job = ctx;
    int64_t nr = job->kern->nr;
    job->kern->pack(job->panels + task * job->n * nr, job->b + task * nr * job->n, job->n,
                    qc_min_i64(nr, job->n_rows - task * nr), job->n);
}

static void solve_store_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const solve_job *job = ctx;
    int64_t nr = job->kern->nr;
    job->kern->unpack(job->b + task * nr * job->n, job->n, job->panels + task * job->n * nr,
                      qc_min_i64(nr, job->n_rows - task * nr), job->n, 1);
}

static void solve_back_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const solve_job *job = ctx;
    int64_t nr = job->kern->nr, n = job->diagonal.n, end = job->j0 + n;
    float *x = job->panels + (task * job->n + job->j0) * nr;
    for (int64_t k = end; k < job->n; k += BLOCK)
        job->kern->gemm(x, nr, job->column + k - end, job->ld_column, x + (k - job->j0) * nr, n, nr,
                        qc_min_i64(BLOCK, job->n - k), true);
    solve_upper(job->kern, &job->diagonal, x);
}

static void solve_forth_task(void *ctx, int64_t task, int thread)
{
    const solve_job *job = ctx;
    int64_t nr = job->kern->nr, n = job->diagonal.n;
    float *x = job->panels + task * job->n * nr, *y = x + job->j0 * nr;
    float *product = job->product + (int64_t)thread * BLOCK * nr;
    for (int64_t k = 0; k < n; k++)
        job->kern->scale(y + k * nr, y + k * nr, (float)(1 / job->pivots[job->j0 + k]), nr);
    for (int64_t k = 0; k < job->j0; k += BLOCK)
        job->kern->gemm(product, nr, job->m + job->j0 * job->n + k, job->n, x + k * nr, n, nr, BLOCK, k > 0);
    if (job->j0 > 0)
        job->kern->add(y, product, -1, n * nr);
    solve_lower(job->kern, &job->diagonal, y);
}

static void solve_set_block(solve_job *job, int64_t j0, bool transposed)
{
    int64_t n = qc_min_i64(BLOCK, job->n - j0);
    job->j0 = j0;
    job->diagonal.n = n;
    for (int64_t k = 0; k < n; k++)
        for (int64_t i = 0; i < k; i++)
            job->minus[transposed ? i * BLOCK + k : k * BLOCK + i] = -job->m[(j0 + k) * job->n + j0 + i];
}

static void solve_column_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const solve_job *job = ctx;
    int64_t end = job->j0 + job->diagonal.n, r0 = end + task * BLOCK, r1 = qc_min_i64(job->n, r0 + BLOCK);
    for (int64_t k = 0; k < job->diagonal.n; k++)
        for (int64_t r = r0; r < r1; r++)
            job->column[k * job->ld_column + r - end] = -job->m[r * job->n + job->j0 + k];
}

static void solve_rows(solve_job *job, qc_pool *pool)
{
    int64_t n_panels = qc_ceil_div(job->n_rows, job->kern->nr);
    qc_pool_run(pool, n_panels, solve_load_task, job);
    for (int64_t j0 = (job->n - 1) / BLOCK * BLOCK; j0 >= 0; j0 -= BLOCK) {
        solve_set_block(job, j0, true);
        qc_pool_run(pool, qc_ceil_div(job->n - j0 - job->diagonal.n, BLOCK), solve_column_task, job);
        qc_pool_run(pool, n_panels, solve_back_task, job);
    }
    for (int64_t j0 = 0; j0 < job->n; j0 += BLOCK) {
        solve_set_block(job, j0, false);
        qc_pool_run(pool, n_panels, solve_forth_task, job);
    }
    qc_pool_run(pool, n_panels, solve_store_task, job);
}

int qc_cpu_factor_solve(qc_backend *be, const float *factor, const double *pivots, float *b, int64_t n_rows,
                        int64_t n, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    int64_t nr = cb->kern.nr, ld = n + QC_GRAM_LD - QC_GRAM_TOKENS;
    int64_t panels = qc_round_up(qc_min_i64(n_rows, SOLVE_ROWS), nr) * n;
    int64_t products = qc_pool_size(cb->pool) * BLOCK * nr;
    if (n == 0)
        return QC_OK;
    float *scratch = qc_cpu_scratch(cb, panels + products + BLOCK * ld + BLOCK * BLOCK, err);
    if (!scratch)
        return QC_E_RESOURCE;
    solve_job job = {.kern = &cb->kern, .m = factor, .n = n, .pivots = pivots, .ld_column = ld};
    job.panels = scratch;
    job.product = job.panels + panels;
    job.column = job.product + products;
    job.minus = job.column + BLOCK * ld;
    job.diagonal.minus = job.minus;
    for (int64_t r = 0; r < n_rows; r += SOLVE_ROWS) {
        job.b = b + r * n;
        job.n_rows = qc_min_i64(SOLVE_ROWS, n_rows - r);
        solve_rows(&job, cb->pool);
    }
    return QC_OK;
}
