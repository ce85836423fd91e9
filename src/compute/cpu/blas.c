#include "cpu.h"

#include <cblas.h>
#include <f77blas.h>

void qc_blas_single_thread(void)
{
    openblas_set_num_threads(1);
}

void qc_blas_gemm(float *y, int64_t ldy, const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t m,
                  int64_t n, int64_t k, bool accumulate)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)m, (blasint)n, (blasint)k, 1, x,
                (blasint)ldx, w, (blasint)ldw, accumulate ? 1 : 0, y, (blasint)ldy);
}

int64_t qc_blas_cholesky(double *a, int64_t n)
{
    char upper = 'U'; /* as LAPACK sees a lower triangle in rows */
    blasint order = (blasint)n, info = 0;
    dpotrf_(&upper, &order, a, &order, &info);
    return info > 0 ? info - 1 : n;
}
