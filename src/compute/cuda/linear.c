/* Weights, linear, gram: matrices that go through cuBLAS. */
#include "device.h"
#include "qc_alloc.h"
#include "qc_fp.h"
#include "qc_math.h"

#include <stdatomic.h>

/* Rows per task while weights are fetched; bytes of a half of the pinned memory (or one task's rows). */
enum { TASK_ROWS = 32, STAGING_BYTES = 32 << 20 };

struct qc_weight {
    int64_t n_out, n_in;
    void *data; /* device [n_out, n_in], float32 or bfloat16 as the backend computes */
};

/* ---- products ---- */

/* y[t, n_out] = bias (NULL: 0), or += */
static int put_bias(qc_cuda_backend *cb, float *y, int64_t ldy, const float *bias, int64_t n_tokens,
                    int64_t n_out, bool accumulate, qc_err *err)
{
    qc_cuda_bias_args args = {
        .y = y, .bias = bias, .ldy = ldy, .n_tokens = n_tokens, .n_out = n_out, .accumulate = accumulate};
    return QC_CUDA_LAUNCH(cb, put_bias, qc_ceil_div(n_tokens * n_out, QC_CUDA_THREADS), 1, QC_CUDA_THREADS, 0,
                          &args, err);
}

/* A row major matrix is the transpose of a column major one: c^T[n, m] = b a^T. */
static int gemm(qc_cuda_backend *cb, float *c, int64_t ldc, const void *a, int64_t lda, bool a_by_k,
                const void *b, int64_t ldb, bool b_by_k, unsigned type, int64_t m, int64_t n, int64_t k,
                float alpha, float beta, qc_err *err)
{
    const int64_t sizes[] = {m, n, k, lda, ldb, ldc};
    if (m == 0 || n == 0)
        return QC_OK;
    for (int i = 0; i < 6; i++)
        QC_TRY(qc_cuda_check_size(sizes[i], err));
    if (k == 0)
        return beta != 0 ? QC_OK : put_bias(cb, c, ldc, NULL, m, n, false, err);
    return qc_cuda_check_blas(
        cb,
        cb->api.cublasGemmEx(cb->blas, b_by_k ? QC_CUBLAS_N : QC_CUBLAS_T, a_by_k ? QC_CUBLAS_T : QC_CUBLAS_N,
                             (int)n, (int)m, (int)k, &alpha, b, type, (int)ldb, a, type, (int)lda, &beta, c,
                             QC_CUDA_R_32F, (int)ldc, QC_CUBLAS_COMPUTE_32F, QC_CUBLAS_GEMM_DEFAULT),
        "cublasGemmEx", err);
}

int qc_cuda_gemm(qc_cuda_backend *cb, float *c, int64_t ldc, const float *a, int64_t lda, bool a_by_k,
                 const float *b, int64_t ldb, bool b_by_k, int64_t m, int64_t n, int64_t k, float alpha,
                 float beta, qc_err *err)
{
    return gemm(cb, c, ldc, a, lda, a_by_k, b, ldb, b_by_k, QC_CUDA_R_32F, m, n, k, alpha, beta, err);
}

/* x[n_rows, n_cols] as bfloat16 in scratch, dense. NULL with a message. */
static uint16_t *to_bf16(qc_cuda_backend *cb, qc_cuda_scratch_id id, const float *x, int64_t ldx,
                         int64_t n_rows, int64_t n_cols, qc_err *err)
{
    uint16_t *y = qc_cuda_scratch(cb, id, (size_t)(n_rows * n_cols) * sizeof *y, err);
    qc_cuda_to_bf16_args args = {.y = y, .x = x, .ldx = ldx, .n_rows = n_rows, .n_cols = n_cols};
    if (y && QC_CUDA_LAUNCH(cb, to_bf16, qc_ceil_div(n_rows * n_cols, QC_CUDA_THREADS), 1, QC_CUDA_THREADS, 0,
                            &args, err) < 0)
        return NULL;
    return y;
}

/* ---- weights ---- */

typedef struct load_job {
    const qc_weight *w;
    qc_fetch_rows_fn fetch;
    void *ctx;
    int64_t row0, n_rows; /* of this half */
    void *half;           /* pinned [n_rows, n_in] */
    float *rows;          /* [threads, TASK_ROWS, n_in] with bfloat16, else NULL */
    qc_err *errors;       /* [threads]: the first failure of each thread */
    atomic_int failed;
} load_job;

static void load_task(void *ctx, int64_t task, int thread)
{
    load_job *j = ctx;
    int64_t n_in = j->w->n_in, r = task * TASK_ROWS, n = qc_min_i64(TASK_ROWS, j->n_rows - r);
    float *rows = j->rows ? j->rows + thread * TASK_ROWS * n_in : (float *)j->half + r * n_in;
    qc_err *err = &j->errors[thread];
    if (atomic_load(&j->failed))
        return;
    if (j->fetch(j->ctx, j->row0 + r, n, rows, err) < 0) {
        if (err->code == QC_OK)
            qc_fail(err, QC_E_INPUT, "can not read rows %lld .. of a matrix", (long long)(j->row0 + r));
        atomic_store(&j->failed, 1);
    } else if (j->rows) {
        uint16_t *dst = (uint16_t *)j->half + r * n_in;
        for (int64_t i = 0; i < n * n_in; i++)
            dst[i] = qc_f32_to_bf16(rows[i]);
    }
}

static int grow_staging(qc_cuda_backend *cb, int half, size_t n_bytes, qc_err *err)
{
    qc_cuda_block *s = &cb->staging[half];
    if (s->n_bytes >= n_bytes)
        return QC_OK;
    if (s->address)
        cb->api.cuMemFreeHost(s->address);
    *s = (qc_cuda_block){0};
    if (cb->api.cuMemAllocHost_v2(&s->address, n_bytes) != QC_CU_OK)
        return qc_fail_nomem(err, "pinned staging of weights", n_bytes);
    s->n_bytes = n_bytes;
    return QC_OK;
}

/* One half: wait until it is free, fetch, queue its copy. */
static int load_half(qc_cuda_backend *cb, load_job *j, int half, size_t row_bytes, qc_err *err)
{
    size_t n_bytes = (size_t)j->n_rows * row_bytes;
    QC_TRY(qc_cuda_check(cb, cb->api.cuEventSynchronize(cb->staged[half]), "cuEventSynchronize", err));
    QC_TRY(grow_staging(cb, half, n_bytes, err));
    j->half = cb->staging[half].address;
    qc_pool_run(cb->pool, qc_ceil_div(j->n_rows, TASK_ROWS), load_task, j);
    for (int i = 0; i < qc_pool_size(cb->pool); i++)
        if (j->errors[i].code != QC_OK)
            return qc_fail(err, j->errors[i].code, "%s", j->errors[i].msg);
    qc_cu_address dst = (uintptr_t)j->w->data + (size_t)j->row0 * row_bytes;
    QC_TRY(qc_cuda_check(cb, cb->api.cuMemcpyHtoDAsync_v2(dst, j->half, n_bytes, cb->copies),
                         "cuMemcpyHtoDAsync", err));
    return qc_cuda_check(cb, cb->api.cuEventRecord(cb->staged[half], cb->copies), "cuEventRecord", err);
}

static int load_rows(qc_cuda_backend *cb, const qc_weight *w, qc_fetch_rows_fn fetch, void *ctx, qc_err *err)
{
    bool bf16 = cb->be.compute == QC_COMPUTE_BF16;
    size_t row_bytes = (size_t)w->n_in * (bf16 ? sizeof(uint16_t) : sizeof(float)), n_threads;
    int64_t step = qc_max_i64(TASK_ROWS, STAGING_BYTES / (int64_t)row_bytes / TASK_ROWS * TASK_ROWS);
    load_job j = {.w = w, .fetch = fetch, .ctx = ctx};
    n_threads = (size_t)qc_pool_size(cb->pool);
    j.errors = qc_calloc(n_threads, sizeof *j.errors);
    j.rows = bf16 ? qc_alloc(n_threads * TASK_ROWS * (size_t)w->n_in, sizeof *j.rows) : NULL;
    int rc = j.errors && (j.rows || !bf16) ? QC_OK : qc_fail_nomem(err, "rows of a matrix", row_bytes);
    int half = 0;
    for (; j.row0 < w->n_out && rc == QC_OK; j.row0 += step, half = !half) {
        j.n_rows = qc_min_i64(step, w->n_out - j.row0);
        rc = load_half(cb, &j, half, row_bytes, err);
    }
    if (rc == QC_OK) /* what is computed next waits for the last half; halves are copied in order */
        rc = qc_cuda_check(cb, cb->api.cuStreamWaitEvent(cb->stream, cb->staged[!half], 0),
                           "cuStreamWaitEvent", err);
    else /* the matrix is freed next */
        cb->api.cuStreamSynchronize(cb->copies);
    qc_free(j.errors);
    qc_free(j.rows);
    return rc;
}

int qc_cuda_weight_load(qc_backend *be, int64_t n_out, int64_t n_in, qc_fetch_rows_fn fetch, void *ctx,
                        qc_weight **ret, qc_err *err)
{
    qc_cuda_backend *cb = (qc_cuda_backend *)be;
    if (n_out < 0 || n_in < 0 || n_out > INT32_MAX || n_in > INT32_MAX)
        return qc_fail(err, QC_E_UNSUPPORTED, "matrix of %lld x %lld elements", (long long)n_out,
                       (long long)n_in);
    qc_weight *w = qc_alloc(1, sizeof *w);
    if (!w)
        return qc_fail_nomem(err, "weight matrix", sizeof *w);
    *w = (qc_weight){.n_out = n_out, .n_in = n_in};
    size_t elem = cb->be.compute == QC_COMPUTE_BF16 ? sizeof(uint16_t) : sizeof(float);
    int rc = qc_cuda_alloc(cb, (size_t)(n_out * n_in) * elem, cb->copies, &w->data, err);
    if (rc == QC_OK && n_out > 0 && n_in > 0)
        rc = load_rows(cb, w, fetch, ctx, err);
    if (rc == QC_OK)
        *ret = w;
    else
        qc_cuda_weight_free(be, w);
    return rc;
}

void qc_cuda_weight_free(qc_backend *be, qc_weight *w)
{
    if (!w)
        return;
    qc_cuda_free((qc_cuda_backend *)be, w->data);
    qc_free(w);
}

int qc_cuda_linear(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx, const qc_weight *w,
                   const float *bias, int64_t n_tokens, bool accumulate, qc_err *err)
{
    qc_cuda_backend *cb = (qc_cuda_backend *)be;
    float beta = accumulate || bias ? 1 : 0;
    if (n_tokens == 0 || w->n_out == 0)
        return QC_OK;
    if (bias)
        QC_TRY(put_bias(cb, y, ldy, bias, n_tokens, w->n_out, accumulate, err));
    int64_t ldw = qc_max_i64(w->n_in, 1), ld = qc_max_i64(ldx, 1);
    if (cb->be.compute == QC_COMPUTE_F32)
        return gemm(cb, y, ldy, x, ld, false, w->data, ldw, false, QC_CUDA_R_32F, n_tokens, w->n_out, w->n_in,
                    1, beta, err);
    uint16_t *rounded = to_bf16(cb, QC_CUDA_S_INPUT, x, ldx, n_tokens, w->n_in, err);
    if (!rounded)
        return QC_E_RESOURCE;
    return gemm(cb, y, ldy, rounded, ldw, false, w->data, ldw, false, QC_CUDA_R_16BF, n_tokens, w->n_out,
                w->n_in, 1, beta, err);
}

/* ---- gram ---- */

/* Lower triangle of h += alpha a^T a in blocks of columns, so that about half of the products are made; what
 * the blocks on the diagonal give above it goes to scratch first. */
static int gram_bf16(qc_cuda_backend *cb, float *h, const uint16_t *a, int64_t n_tokens, int64_t n,
                     float alpha, qc_err *err)
{
    enum { BLOCK = 1024 };
    for (int64_t j = 0; j < n; j += BLOCK) {
        int64_t m = qc_min_i64(BLOCK, n - j), end = j + m;
        float *square = qc_cuda_scratch(cb, QC_CUDA_S_SUM, (size_t)(m * m) * sizeof *square, err);
        if (!square)
            return QC_E_RESOURCE;
        QC_TRY(gemm(cb, square, m, a + j, n, true, a + j, n, true, QC_CUDA_R_16BF, m, m, n_tokens, alpha, 0,
                    err));
        qc_cuda_lower_args args = {.h = h + j * (n + 1), .x = square, .ldh = n, .n = m};
        QC_TRY(QC_CUDA_LAUNCH(cb, add_lower, qc_ceil_div(m * m, QC_CUDA_THREADS), 1, QC_CUDA_THREADS, 0,
                              &args, err));
        QC_TRY(gemm(cb, h + end * n + j, n, a + end, n, true, a + j, n, true, QC_CUDA_R_16BF, n - end, m,
                    n_tokens, alpha, 1, err));
    }
    return QC_OK;
}

int qc_cuda_gram(qc_backend *be, float *h, const float *a, int64_t lda, const float *b, int64_t ldb,
                 int64_t n_tokens, int64_t n_rows, int64_t n_cols, float alpha, qc_err *err)
{
    qc_cuda_backend *cb = (qc_cuda_backend *)be;
    const float one = 1;
    if (n_tokens == 0 || n_rows == 0 || (b && n_cols == 0))
        return QC_OK;
    if (cb->be.compute == QC_COMPUTE_BF16) {
        uint16_t *x = to_bf16(cb, QC_CUDA_S_INPUT, a, lda, n_tokens, n_rows, err), *y = NULL;
        if (x && b)
            y = to_bf16(cb, QC_CUDA_S_CHANGE, b, ldb, n_tokens, n_cols, err);
        if (!x || (b && !y))
            return QC_E_RESOURCE;
        return b ? gemm(cb, h, n_cols, x, n_rows, true, y, n_cols, true, QC_CUDA_R_16BF, n_rows, n_cols,
                        n_tokens, alpha, 1, err)
                 : gram_bf16(cb, h, x, n_tokens, n_rows, alpha, err);
    }
    if (b)
        return qc_cuda_gemm(cb, h, n_cols, a, lda, true, b, ldb, true, n_rows, n_cols, n_tokens, alpha, 1,
                            err);
    QC_TRY(qc_cuda_check_size(lda, err));
    QC_TRY(qc_cuda_check_size(n_tokens, err));
    /* the lower triangle by rows is the upper one by columns */
    return qc_cuda_check_blas(cb,
                              cb->api.cublasSsyrk_v2(cb->blas, QC_CUBLAS_UPPER, QC_CUBLAS_N, (int)n_rows,
                                                     (int)n_tokens, &alpha, a, (int)lda, &one, h,
                                                     (int)n_rows),
                              "cublasSsyrk", err);
}
