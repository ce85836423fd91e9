/* factor and factor_solve by blocks; the bulk is cuBLAS's. */
#include "device.h"
#include "qc_math.h"

/* Columns j0 .. j0 + m - 1 leave the matrix. */
static int factor_block(qc_cuda_backend *cb, qc_cuda_factor_args *f, qc_err *err)
{
    const float minus = -1, one = 1;
    QC_TRY(QC_CUDA_LAUNCH(cb, factor_diagonal, 1, 1, QC_CUDA_THREADS,
                          QC_CUDA_FACTOR * QC_CUDA_FACTOR * sizeof(double), f, err));
    if (f->j0 == 0)
        return QC_OK;
    QC_TRY(QC_CUDA_LAUNCH(cb, factor_panel, qc_ceil_div(f->j0, QC_CUDA_FACTOR), 1, QC_CUDA_FACTOR,
                          QC_CUDA_FACTOR * QC_CUDA_FACTOR * sizeof(float), f, err));
    return qc_cuda_check_blas(cb,
                              cb->api.cublasSsyrk_v2(cb->blas, QC_CUBLAS_UPPER, QC_CUBLAS_N, (int)f->j0,
                                                     (int)f->m, &minus, f->y, (int)f->j0, &one, f->a,
                                                     (int)f->n),
                              "cublasSsyrk", err);
}

int qc_cuda_factor(qc_backend *be, float *a, int64_t n, double *pivots, int64_t *ret_bad, qc_err *err)
{
    qc_cuda_backend *cb = (qc_cuda_backend *)be;
    int32_t bad = -1;
    *ret_bad = -1;
    if (n == 0)
        return QC_OK;
    QC_TRY(qc_cuda_check_size(n, err));
    size_t square = QC_CUDA_FACTOR * QC_CUDA_FACTOR * sizeof(float), pivot_bytes = (size_t)n * sizeof *pivots;
    float *r = qc_cuda_scratch(cb, QC_CUDA_S_FIT, square, err);
    float *y = r ? qc_cuda_scratch(cb, QC_CUDA_S_SUM, (size_t)n * QC_CUDA_FACTOR * sizeof *y, err) : NULL;
    double *device_pivots = y ? qc_cuda_scratch(cb, QC_CUDA_S_PIVOTS, pivot_bytes, err) : NULL;
    int32_t *state = device_pivots ? qc_cuda_scratch(cb, QC_CUDA_S_STATS, sizeof *state, err) : NULL;
    if (!state)
        return QC_E_RESOURCE;
    QC_TRY(qc_cuda_to_device(cb, state, &bad, sizeof bad, err));
    QC_TRY(qc_cuda_check(cb, cb->api.cuMemsetD32Async((uintptr_t)device_pivots, 0, (size_t)n * 2, cb->stream),
                         "cuMemsetD32Async", err));
    qc_cuda_factor_args f = {.a = a, .r = r, .y = y, .pivots = device_pivots, .state = state, .n = n};
    for (int64_t end = n; end > 0; end = f.j0) {
        f.j0 = (end - 1) / QC_CUDA_FACTOR * QC_CUDA_FACTOR;
        f.m = end - f.j0;
        QC_TRY(factor_block(cb, &f, err));
    }
    QC_TRY(qc_cuda_to_host(cb, pivots, device_pivots, pivot_bytes, err));
    QC_TRY(qc_cuda_to_host(cb, &bad, state, sizeof bad, err));
    *ret_bad = bad;
    return QC_OK;
}

/* x A = b with A = M^T D M, M unit lower triangular by rows: M^T Z = B, Z <- D^-1 Z, M X = Z, where B by
 * columns is what b is by rows, and the array by columns holds M^T. */
int qc_cuda_factor_solve(qc_backend *be, const float *factor, const double *pivots, float *b, int64_t n_rows,
                         int64_t n, qc_err *err)
{
    qc_cuda_backend *cb = (qc_cuda_backend *)be;
    const float one = 1;
    if (n == 0 || n_rows == 0)
        return QC_OK;
    QC_TRY(qc_cuda_check_size(n, err));
    QC_TRY(qc_cuda_check_size(n_rows, err));
    size_t n_bytes = (size_t)n * sizeof *pivots;
    double *device_pivots = qc_cuda_scratch(cb, QC_CUDA_S_PIVOTS, n_bytes, err);
    if (!device_pivots)
        return QC_E_RESOURCE;
    QC_TRY(qc_cuda_to_device(cb, device_pivots, pivots, n_bytes, err));
    QC_TRY(qc_cuda_check_blas(cb,
                              cb->api.cublasStrsm_v2(cb->blas, QC_CUBLAS_LEFT, QC_CUBLAS_UPPER, QC_CUBLAS_N,
                                                     QC_CUBLAS_UNIT, (int)n, (int)n_rows, &one, factor,
                                                     (int)n, b, (int)n),
                              "cublasStrsm", err));
    qc_cuda_divide_args args = {.b = b, .pivots = device_pivots, .n_rows = n_rows, .n = n};
    QC_TRY(QC_CUDA_LAUNCH(cb, divide_columns, qc_ceil_div(n_rows * n, QC_CUDA_THREADS), 1, QC_CUDA_THREADS, 0,
                          &args, err));
    return qc_cuda_check_blas(cb,
                              cb->api.cublasStrsm_v2(cb->blas, QC_CUBLAS_LEFT, QC_CUBLAS_UPPER, QC_CUBLAS_T,
                                                     QC_CUBLAS_UNIT, (int)n, (int)n_rows, &one, factor,
                                                     (int)n, b, (int)n),
                              "cublasStrsm", err);
}
