/* gram, mirror, and the tiles of a product A^T B that gram and factor share. */
#include "cpu.h"
#include "qc_math.h"

#include <string.h>

/* Tokens are taken in blocks of QC_GRAM_TOKENS: a panel of 32 columns takes 32 KiB. GROUP_BLOCKS of them are
 * laid out at a time. Tiles of h: multiples of 12 and 32, large ones where enough tasks remain. */
enum {
    GROUP_BLOCKS = QC_GRAM_COPIED_TOKENS / QC_GRAM_TOKENS,
    TILE = 192,
    TILE_SMALL = 96,
    SMALL_DIMS = 1024,
    PANELS_PER_TASK = 4
};

int64_t qc_cpu_gram_elems(const qc_kern *kern, int64_t n_dims)
{
    return qc_round_up(n_dims, kern->nr) * QC_GRAM_LD;
}

void qc_cpu_gram_panel(const qc_kern *kern, float *dst, const float *a, int64_t lda, int64_t n, int64_t k)
{
    int64_t nr = kern->nr;
    for (int64_t t = 0; t < k; t++) {
        memcpy(dst + t * nr, a + t * lda, (size_t)n * sizeof *dst);
        memset(dst + t * nr + n, 0, (size_t)(nr - n) * sizeof *dst);
    }
}

typedef struct tiles_job {
    const qc_kern *kern;
    float *h;
    int64_t ldh, n_rows, n_cols;
    const qc_gram_block *blocks;
    int64_t n_blocks, tile, tiles_per_row;
    bool lower;
} tiles_job;

/* Rows i .. i + m - 1 of the columns j .. of a panel that the diagonal crosses. */
static void add_diagonal(const tiles_job *job, const qc_gram_block *b, int64_t i, int64_t j, int64_t m,
                         int64_t n)
{
    float square[QC_KERN_MAX_NR * QC_KERN_MAX_NR];
    job->kern->gemm(square, QC_KERN_MAX_NR, b->rows + i * QC_GRAM_LD, QC_GRAM_LD, b->panels + j * b->n_tokens,
                    m, n, b->n_tokens, false);
    for (int64_t r = 0; r < m; r++)
        job->kern->add(job->h + (i + r) * job->ldh + j, square + r * QC_KERN_MAX_NR, 1,
                       qc_min_i64(n, i + r - j + 1));
}

static void add_tile(const tiles_job *job, const qc_gram_block *b, int64_t i0, int64_t m, int64_t j0,
                     int64_t n)
{
    int64_t nr = job->kern->nr, i1 = i0 + m;
    for (int64_t j = j0; j < j0 + n; j += nr) {
        int64_t cols = qc_min_i64(nr, j0 + n - j), i = i0;
        if (job->lower && i < j + nr) { /* only in tiles on the diagonal, where i0 = j0 */
            i = qc_min_i64(j + nr, i1);
            add_diagonal(job, b, j, j, i - j, cols);
        }
        job->kern->gemm(job->h + i * job->ldh + j, job->ldh, b->rows + i * QC_GRAM_LD, QC_GRAM_LD,
                        b->panels + j * b->n_tokens, i1 - i, cols, b->n_tokens, true);
    }
}

static void tiles_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const tiles_job *job = ctx;
    int64_t row = task / job->tiles_per_row, col = task % job->tiles_per_row;
    if (job->lower) { /* tasks count the tiles of the triangle by rows, the longest row first */
        for (row = job->tiles_per_row - 1, col = task; col > row; row--)
            col -= row + 1;
    }
    int64_t i0 = row * job->tile, j0 = col * job->tile;
    for (int64_t b = 0; b < job->n_blocks; b++)
        add_tile(job, &job->blocks[b], i0, qc_min_i64(job->tile, job->n_rows - i0), j0,
                 qc_min_i64(job->tile, job->n_cols - j0));
}

void qc_cpu_gram_tiles(qc_cpu_backend *cb, float *h, int64_t ldh, int64_t n_rows, int64_t n_cols,
                       const qc_gram_block *blocks, int64_t n_blocks, bool lower)
{
    tiles_job job = {.kern = &cb->kern,
                     .h = h,
                     .ldh = ldh,
                     .n_rows = n_rows,
                     .n_cols = n_cols,
                     .blocks = blocks,
                     .n_blocks = n_blocks,
                     .tile = qc_min_i64(n_rows, n_cols) > SMALL_DIMS ? TILE : TILE_SMALL,
                     .lower = lower};
    int64_t n = qc_ceil_div(n_rows, job.tile);
    job.tiles_per_row = qc_ceil_div(n_cols, job.tile);
    qc_pool_run(cb->pool, lower ? n * (n + 1) / 2 : n * job.tiles_per_row, tiles_task, &job);
}

typedef struct layout_job {
    const qc_kern *kern;
    const float *a, *b;
    int64_t lda, ldb, n_rows, n_cols;
    float alpha;
    const qc_gram_block *blocks;
    int64_t n_tasks_of_block;
    float *scratch; /* [threads, QC_GRAM_TOKENS, nr]: panels of a that nothing else needs */
} layout_job;

/* Some columns of one block: those of a as rows, those of b (or a) as panels. */
static void layout_task(void *ctx, int64_t task, int thread)
{
    const layout_job *job = ctx;
    const qc_kern *kern = job->kern;
    int64_t nr = kern->nr, index = task / job->n_tasks_of_block;
    const qc_gram_block *block = &job->blocks[index];
    int64_t j0 = task % job->n_tasks_of_block * PANELS_PER_TASK * nr, t0 = index * QC_GRAM_TOKENS;
    int64_t end = j0 + PANELS_PER_TASK * nr, n_tokens = block->n_tokens;
    for (int64_t j = j0; j < qc_min_i64(job->n_rows, end);
         j += nr) { /* a panel of a on the way to its rows */
        int64_t n = qc_min_i64(nr, job->n_rows - j);
        float *panel = job->b ? job->scratch + thread * nr * QC_GRAM_TOKENS : block->panels + j * n_tokens;
        qc_cpu_gram_panel(kern, panel, job->a + t0 * job->lda + j, job->lda, n, n_tokens);
        kern->unpack(block->rows + j * QC_GRAM_LD, QC_GRAM_LD, panel, n, n_tokens, job->alpha);
    }
    for (int64_t j = j0; job->b && j < qc_min_i64(job->n_cols, end); j += nr)
        qc_cpu_gram_panel(kern, block->panels + j * n_tokens, job->b + t0 * job->ldb + j, job->ldb,
                          qc_min_i64(nr, job->n_cols - j), n_tokens);
}

int qc_cpu_gram(qc_backend *be, float *h, const float *a, int64_t lda, const float *b, int64_t ldb,
                int64_t n_tokens, int64_t n_rows, int64_t n_cols, float alpha, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    int64_t elems_rows = qc_cpu_gram_elems(&cb->kern, n_rows),
            elems = elems_rows + qc_cpu_gram_elems(&cb->kern, n_cols);
    int64_t group = qc_min_i64(GROUP_BLOCKS, qc_ceil_div(n_tokens, QC_GRAM_TOKENS));
    float *scratch =
        qc_cpu_scratch(cb, group * elems + qc_pool_size(cb->pool) * cb->kern.nr * QC_GRAM_TOKENS, err);
    if (!scratch)
        return QC_E_RESOURCE;
    qc_gram_block blocks[GROUP_BLOCKS];
    layout_job job = {.kern = &cb->kern,
                      .lda = lda,
                      .ldb = ldb,
                      .n_rows = n_rows,
                      .n_cols = n_cols,
                      .alpha = alpha,
                      .blocks = blocks,
                      .scratch = scratch + group * elems};
    job.n_tasks_of_block = qc_ceil_div(qc_max_i64(n_rows, n_cols), PANELS_PER_TASK * cb->kern.nr);
    for (int64_t t = 0; t < n_tokens;) {
        int64_t n_blocks = 0;
        job.a = a + t * lda;
        job.b = b ? b + t * ldb : NULL;
        for (; n_blocks < group && t < n_tokens; t += QC_GRAM_TOKENS, n_blocks++)
            blocks[n_blocks] = (qc_gram_block){.rows = scratch + n_blocks * elems,
                                               .panels = scratch + n_blocks * elems + elems_rows,
                                               .n_tokens = qc_min_i64(QC_GRAM_TOKENS, n_tokens - t)};
        qc_pool_run(cb->pool, n_blocks * job.n_tasks_of_block, layout_task, &job);
        qc_cpu_gram_tiles(cb, h, n_cols, n_rows, n_cols, blocks, n_blocks, !b);
    }
    return QC_OK;
}

typedef struct mirror_job {
    const qc_kern *kern;
    float *h, *scratch;
    int64_t n;
} mirror_job;

/* nr rows of the lower triangle become nr columns of the upper one. */
static void mirror_task(void *ctx, int64_t task, int thread)
{
    const mirror_job *job = ctx;
    int64_t nr = job->kern->nr, r0 = task * nr, rows = qc_min_i64(nr, job->n - r0);
    float *panel = job->scratch + (int64_t)thread * qc_round_up(job->n, nr) * nr;
    job->kern->pack(panel, job->h + r0 * job->n, job->n, rows, r0 + rows);
    for (int64_t j = 0; j < r0; j++)
        memcpy(job->h + j * job->n + r0, panel + j * nr, (size_t)rows * sizeof *panel);
    for (int64_t j = 0; j < rows; j++)
        for (int64_t i = j + 1; i < rows; i++)
            job->h[(r0 + j) * job->n + r0 + i] = panel[(r0 + j) * nr + i];
}

int qc_cpu_mirror(qc_backend *be, float *h, int64_t n, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    int64_t nr = cb->kern.nr;
    mirror_job job = {.kern = &cb->kern, .h = h, .n = n};
    job.scratch = qc_cpu_scratch(cb, qc_pool_size(cb->pool) * qc_round_up(n, nr) * nr, err);
    if (!job.scratch)
        return QC_E_RESOURCE;
    qc_pool_run(cb->pool, qc_ceil_div(n, nr), mirror_task, &job);
    return QC_OK;
}
