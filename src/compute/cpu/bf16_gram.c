/* gram with bfloat16 operands: h += alpha a^T b. The tokens are the inputs of the product. They are taken in
 * blocks: a block of a becomes strips of row tiles and one of b strips of column tiles (16 columns of the
 * matrix each), then tasks of BLOCK_DIMS x BLOCK_DIMS elements of h multiply. */
#include "cpu.h"
#include "qc_math.h"

enum {
    BLOCK_TOKENS = QC_GRAM_COPIED_TOKENS / 2, /* 32 columns of them take 32 KiB: the first level cache */
    BLOCK_DIMS = 128,
    PACK_STRIPS = 4 /* strips per packing task: whole pieces of 256 bytes are read */
};

typedef struct gram_job {
    const qc_kern_bf16 *kern;
    float *h;
    const float *a, *b; /* first token of this block */
    int64_t lda, ldb, n_rows, n_cols;
    bool triangle, negate;
    int64_t n_tokens; /* of this block */
    int64_t strip;
    uint16_t *left, *right; /* [strips of n_rows, strip], [strips of n_cols, strip] */
} gram_job;

static void pack_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const gram_job *j = ctx;
    for (int64_t t = 0; t < j->n_tokens; t += QC_BF16_INPUTS)
        for (int64_t s = task * PACK_STRIPS; s < (task + 1) * PACK_STRIPS; s++) {
            int64_t d = s * QC_BF16_ROWS, m = qc_min_i64(QC_BF16_ROWS, j->n_rows - d),
                    n = qc_min_i64(QC_BF16_ROWS, j->n_cols - d);
            int64_t k = qc_min_i64(QC_BF16_INPUTS, j->n_tokens - t);
            int64_t at = s * j->strip + t / QC_BF16_INPUTS * QC_BF16_TILE;
            if (m > 0)
                j->kern->pack_inputs(j->left + at, j->a + t * j->lda + d, j->lda, m, k, false, j->negate);
            if (n > 0)
                j->kern->pack_inputs(j->right + at, j->b + t * j->ldb + d, j->ldb, n, k, true, false);
        }
}

/* h[i0 .. i0 + m - 1, j0 .. j0 + n - 1] += the products */
static void add_block(const gram_job *j, float *h, int64_t ldh, int64_t i0, int64_t m, int64_t j0, int64_t n,
                      bool accumulate)
{
    if (m > 0)
        j->kern->product(h, ldh, j->left + i0 / QC_BF16_ROWS * j->strip, j->strip,
                         j->right + j0 / QC_BF16_ROWS * j->strip, j->strip, m, n, j->strip / QC_BF16_TILE,
                         accumulate);
}

/* A block on the diagonal, by columns of QC_BF16_BLOCK: the square on the diagonal goes through a copy of
 * which the triangle counts, what is below it goes straight to h. */
static void add_diagonal(const gram_job *j, int64_t i0, int64_t m)
{
    float square[QC_BF16_BLOCK * QC_BF16_BLOCK];
    for (int64_t c = i0; c < i0 + m; c += QC_BF16_BLOCK) {
        int64_t n = qc_min_i64(QC_BF16_BLOCK, i0 + m - c), below = c + n;
        add_block(j, square, QC_BF16_BLOCK, c, n, c, n, false);
        for (int64_t r = 0; r < n; r++)
            for (int64_t i = 0; i <= r; i++)
                j->h[(c + r) * j->n_cols + c + i] += square[r * QC_BF16_BLOCK + i];
        add_block(j, j->h + below * j->n_cols + c, j->n_cols, below, i0 + m - below, c, n, true);
    }
}

static void gram_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const gram_job *j = ctx;
    int64_t n_blocks = qc_ceil_div(j->n_cols, BLOCK_DIMS), row = task / n_blocks, col = task % n_blocks;
    if (j->triangle) { /* task = row (row + 1) / 2 + col */
        for (row = 0, col = task; col > row; row++)
            col -= row + 1;
    }
    int64_t i0 = row * BLOCK_DIMS, j0 = col * BLOCK_DIMS;
    int64_t m = qc_min_i64(BLOCK_DIMS, j->n_rows - i0), n = qc_min_i64(BLOCK_DIMS, j->n_cols - j0);
    if (j->triangle && row == col)
        add_diagonal(j, i0, m);
    else
        add_block(j, j->h + i0 * j->n_cols + j0, j->n_cols, i0, m, j0, n, true);
}

int qc_cpu_gram_bf16(qc_backend *be, float *h, const float *a, int64_t lda, const float *b, int64_t ldb,
                     int64_t n_tokens, int64_t n_rows, int64_t n_cols, float alpha, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    int64_t left_strips = qc_ceil_div(n_rows, QC_BF16_ROWS), right_strips = qc_ceil_div(n_cols, QC_BF16_ROWS);
    int64_t row_blocks = qc_ceil_div(n_rows, BLOCK_DIMS), col_blocks = qc_ceil_div(n_cols, BLOCK_DIMS);
    int64_t strip = qc_bf16_strip(qc_min_i64(BLOCK_TOKENS, n_tokens));
    float *scratch = qc_cpu_scratch(cb, qc_ceil_div((left_strips + right_strips) * strip, 2), err);
    if (!scratch)
        return QC_E_RESOURCE;
    gram_job j = {.kern = &cb->bf16,
                  .h = h,
                  .lda = lda,
                  .ldb = b ? ldb : lda,
                  .n_rows = n_rows,
                  .n_cols = n_cols,
                  .triangle = !b,
                  .negate = alpha < 0,
                  .left = (uint16_t *)(void *)scratch};
    j.right = j.left + left_strips * strip;
    for (int64_t t = 0; t < n_tokens; t += BLOCK_TOKENS) {
        j.n_tokens = qc_min_i64(BLOCK_TOKENS, n_tokens - t);
        j.strip = qc_bf16_strip(j.n_tokens);
        j.a = a + t * lda;
        j.b = b ? b + t * ldb : j.a;
        qc_pool_run(cb->pool, qc_ceil_div(qc_max_i64(left_strips, right_strips), PACK_STRIPS), pack_task, &j);
        qc_pool_run(cb->pool, b ? row_blocks * col_blocks : row_blocks * (row_blocks + 1) / 2, gram_task, &j);
    }
    return QC_OK;
}
