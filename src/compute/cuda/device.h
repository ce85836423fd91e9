/* Inside of the CUDA backend: its state, memory and launches. Everything is queued on one stream, in the
 * order of the calls; weights come by a second one. The host waits where it needs a result. */
#ifndef QC_CUDA_DEVICE_H
#define QC_CUDA_DEVICE_H

#include "api.h"
#include "backend.h"
#include "kernels.h"

typedef enum {
#define QC_CUDA_ID(name, module, args) QC_CUDA_K_##name,
    QC_CUDA_KERNELS(QC_CUDA_ID)
#undef QC_CUDA_ID
        QC_CUDA_N_KERNELS
} qc_cuda_kernel;

/* Files of kernels. */
#define QC_CUDA_MODULES(X) X(attention) X(factor) X(quant) X(round) X(rows) X(score)
typedef enum {
#define QC_CUDA_ID(name) QC_CUDA_M_##name,
    QC_CUDA_MODULES(QC_CUDA_ID)
#undef QC_CUDA_ID
        QC_CUDA_N_MODULES
} qc_cuda_module;

/* Device memory that an operation needs while it runs: each grows, none shrinks. */
typedef enum {
    QC_CUDA_S_CODES = 0,
    QC_CUDA_S_ZEROS,
    QC_CUDA_S_SCALES,
    QC_CUDA_S_GROUPS,
    QC_CUDA_S_SUM,
    QC_CUDA_S_CHANGE,
    QC_CUDA_S_FIT,
    QC_CUDA_S_PIVOTS,
    QC_CUDA_S_INPUT,
    QC_CUDA_S_STATS,
    QC_CUDA_N_SCRATCH
} qc_cuda_scratch_id;

typedef struct qc_cuda_block {
    void *address;
    size_t n_bytes;
} qc_cuda_block;

typedef struct qc_cuda_backend {
    qc_backend be; /* first: the operations get a pointer to it */
    qc_pool *pool; /* borrowed, may be NULL */
    char name[32];
    qc_cuda_api api;
    int device;
    qc_cu_context context;
    qc_cu_stream stream, copies;
    qc_cublas blas;
    qc_cu_module modules[QC_CUDA_N_MODULES];
    qc_cu_function functions[QC_CUDA_N_KERNELS];
    qc_cuda_block scratch[QC_CUDA_N_SCRATCH];
    /* Pinned memory through which weights go, two halves in turn; an event says when a half is free. */
    qc_cuda_block staging[2];
    qc_cu_event staged[2];
    /* Buffers in use, for the sums. */
    qc_cuda_block *blocks;
    size_t n_blocks, cap_blocks;
    uint64_t bytes_used, bytes_peak;
    qc_device_info info;
} qc_cuda_backend;

/* Records a failed call: out of memory or a device that is lost are QC_E_RESOURCE, a device that the kernels
 * were not built for QC_E_UNSUPPORTED. QC_OK for result 0. */
int qc_cuda_check(const qc_cuda_backend *cb, unsigned result, const char *call, qc_err *err);
/* The same for a status of cuBLAS. */
int qc_cuda_check_blas(const qc_cuda_backend *cb, unsigned status, const char *call, qc_err *err);

/* Device memory of n_bytes (at least one element is taken), for the stream that will fill it. */
int qc_cuda_alloc(qc_cuda_backend *cb, size_t n_bytes, qc_cu_stream stream, void **ret, qc_err *err);
/* NULL is fine; the memory is free once the stream's work so far is done. */
void qc_cuda_free(qc_cuda_backend *cb, void *address);
/* n_bytes of one of the scratch buffers, content undefined. NULL with a message. */
void *qc_cuda_scratch(qc_cuda_backend *cb, qc_cuda_scratch_id id, size_t n_bytes, qc_err *err);
int qc_cuda_to_device(qc_cuda_backend *cb, void *dst, const void *host, size_t n_bytes, qc_err *err);
/* Waits for the stream. */
int qc_cuda_to_host(qc_cuda_backend *cb, void *host, const void *src, size_t n_bytes, qc_err *err);

/* The one way to launch: args is the kernel's struct of kernels.h. Nothing is done for an empty grid. */
int qc_cuda_launch(qc_cuda_backend *cb, qc_cuda_kernel kernel, int64_t grid_x, int64_t grid_y, int threads,
                   int64_t shared_bytes, const void *args, qc_err *err);
#define QC_CUDA_LAUNCH(cb, kernel, grid_x, grid_y, threads, shared_bytes, args, err)                         \
    qc_cuda_launch(cb, QC_CUDA_K_##kernel, grid_x, grid_y, threads, shared_bytes, args, err)

/* QC_E_UNSUPPORTED unless n fits the 32-bit sizes of cuBLAS. */
int qc_cuda_check_size(int64_t n, qc_err *err);

/* c[m, n] = alpha a b^T + beta c, row major: a[m, k] and b[n, k] with strides lda, ldb; with a_by_k and
 * b_by_k they are [k, m] and [k, n]. float32. */
int qc_cuda_gemm(qc_cuda_backend *cb, float *c, int64_t ldc, const float *a, int64_t lda, bool a_by_k,
                 const float *b, int64_t ldb, bool b_by_k, int64_t m, int64_t n, int64_t k, float alpha,
                 float beta, qc_err *err);

/* The operations of backend.h that have a file of their own. */
int qc_cuda_weight_load(qc_backend *be, int64_t n_out, int64_t n_in, qc_fetch_rows_fn fetch, void *ctx,
                        qc_weight **ret, qc_err *err);
void qc_cuda_weight_free(qc_backend *be, qc_weight *w);
int qc_cuda_linear(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx, const qc_weight *w,
                   const float *bias, int64_t n_tokens, bool accumulate, qc_err *err);
int qc_cuda_gram(qc_backend *be, float *h, const float *a, int64_t lda, const float *b, int64_t ldb,
                 int64_t n_tokens, int64_t n_rows, int64_t n_cols, float alpha, qc_err *err);
int qc_cuda_factor(qc_backend *be, float *a, int64_t n, double *pivots, int64_t *ret_bad, qc_err *err);
int qc_cuda_factor_solve(qc_backend *be, const float *factor, const double *pivots, float *b, int64_t n_rows,
                         int64_t n, qc_err *err);
int qc_cuda_round_forward(qc_backend *be, const float *factor, const qc_grid *grid, const qc_round_rows *rows,
                          qc_err *err);
int qc_cuda_descend(qc_backend *be, const float *h, const float *inv, const qc_grid *grid,
                    const qc_round_rows *rows, int64_t n_sweeps, bool refit, qc_err *err);
int qc_cuda_hessian_error(qc_backend *be, const float *h, const float *e, int64_t n_rows, int64_t n,
                          double *ret, qc_err *err);
int qc_cuda_quantize_rows(qc_backend *be, const float *w, int64_t n_rows, int64_t n_cols,
                          const qc_quant_spec *spec, const float *col_weight, qc_code_rows *rows,
                          qc_quant_stats *stats, qc_err *err);

/* Fills the rest of the table. */
void qc_cuda_set_row_operations(qc_backend *be);

#endif
