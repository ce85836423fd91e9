/* The calls of cuBLAS that the backend makes, by OpenBLAS on the memory of the buffers. Matrices are column
 * major. bfloat16 operands are expanded; sums are float32 as on the device. */
#include "emulation_internal.h"

#include <cblas.h>
#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace emulation;

enum { REAL_32F = 0, REAL_16BF = 14, COMPUTE_32F = 68 };

/* Elements from the first to the last of a matrix of n_cols columns. */
static size_t span(int n_rows, int n_cols, int ld)
{
    return n_cols > 0 && n_rows > 0 ? (size_t)(n_cols - 1) * (size_t)ld + (size_t)n_rows : 0;
}

/* The operand as floats: the buffer itself, or an expanded copy in *store. NULL after a fault. */
static const float *operand(const char *call, const void *address, int type, int n_rows, int n_cols, int ld,
                            std::vector<float> *store)
{
    size_t n = span(n_rows, n_cols, ld), bytes = n * (type == REAL_16BF ? 2 : 4);
    const void *p = buffer_range(call, address, bytes);
    if (!p || type == REAL_32F)
        return static_cast<const float *>(p);
    store->resize(n + 1);
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, static_cast<const char *>(p) + 2 * i, 2);
        uint32_t u = (uint32_t)h << 16;
        memcpy(&(*store)[i], &u, 4);
    }
    return store->data();
}

static int refuse()
{
    break_device(INVALID_VALUE);
    return BLAS_EXECUTION_FAILED;
}

static CBLAS_TRANSPOSE transpose(unsigned op)
{
    return op ? CblasTrans : CblasNoTrans;
}

extern "C" {

int cublasCreate_v2(void **handle)
{
    if (begin_call("cublasCreate"))
        return 3;
    openblas_set_num_threads(1);
    *handle = malloc(1);
    return 0;
}

int cublasDestroy_v2(void *handle)
{
    free(handle);
    return 0;
}

int cublasSetStream_v2(void *, void *)
{
    return begin_call("cublasSetStream") ? BLAS_EXECUTION_FAILED : 0;
}

int cublasGemmEx(void *, unsigned ta, unsigned tb, int m, int n, int k, const void *alpha, const void *a,
                 int a_type, int lda, const void *b, int b_type, int ldb, const void *beta, void *c,
                 int c_type, int ldc, unsigned compute, int)
{
    if (begin_call("cublasGemmEx"))
        return BLAS_EXECUTION_FAILED;
    std::vector<float> a_store, b_store;
    if (m < 0 || n < 0 || k < 0 || lda < (ta ? k : m) || ldb < (tb ? n : k) || ldc < m || lda < 1 ||
        ldb < 1 || ldc < 1 || a_type != b_type || c_type != REAL_32F || compute != COMPUTE_32F) {
        fprintf(stderr, "emulated device: cublasGemmEx of %d x %d x %d with strides %d, %d, %d\n", m, n, k,
                lda, ldb, ldc);
        return refuse();
    }
    if (m == 0 || n == 0)
        return 0;
    const float *x = operand("cublasGemmEx (A)", a, a_type, ta ? k : m, ta ? m : k, lda, &a_store);
    const float *y = operand("cublasGemmEx (B)", b, b_type, tb ? n : k, tb ? k : n, ldb, &b_store);
    void *z = buffer_range("cublasGemmEx (C)", c, span(m, n, ldc) * 4);
    if (!x || !y || !z)
        return refuse();
    float beta_value = *static_cast<const float *>(beta);
    cblas_sgemm(CblasColMajor, transpose(ta), transpose(tb), m, n, k, *static_cast<const float *>(alpha), x,
                lda, y, ldb, beta_value, static_cast<float *>(z), ldc);
    return 0;
}

int cublasSsyrk_v2(void *, unsigned uplo, unsigned trans, int n, int k, const float *alpha, const float *a,
                   int lda, const float *beta, float *c, int ldc)
{
    if (begin_call("cublasSsyrk"))
        return BLAS_EXECUTION_FAILED;
    std::vector<float> store;
    if (n == 0)
        return 0;
    const float *x = operand("cublasSsyrk (A)", a, REAL_32F, trans ? k : n, trans ? n : k, lda, &store);
    void *z = buffer_range("cublasSsyrk (C)", c, span(n, n, ldc) * 4);
    if (!x || !z)
        return refuse();
    cblas_ssyrk(CblasColMajor, uplo ? CblasUpper : CblasLower, transpose(trans), n, k, *alpha, x, lda, *beta,
                static_cast<float *>(z), ldc);
    return 0;
}

int cublasStrsm_v2(void *, unsigned side, unsigned uplo, unsigned trans, unsigned diag, int m, int n,
                   const float *alpha, const float *a, int lda, float *b, int ldb)
{
    if (begin_call("cublasStrsm"))
        return BLAS_EXECUTION_FAILED;
    std::vector<float> store;
    if (m == 0 || n == 0)
        return 0;
    int order = side ? n : m;
    const float *x = operand("cublasStrsm (A)", a, REAL_32F, order, order, lda, &store);
    void *z = buffer_range("cublasStrsm (B)", b, span(m, n, ldb) * 4);
    if (!x || !z)
        return refuse();
    cblas_strsm(CblasColMajor, side ? CblasRight : CblasLeft, uplo ? CblasUpper : CblasLower,
                transpose(trans), diag ? CblasUnit : CblasNonUnit, m, n, *alpha, x, lda,
                static_cast<float *>(z), ldb);
    return 0;
}

} /* extern "C" */
