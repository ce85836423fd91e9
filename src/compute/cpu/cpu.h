/* Inside of the CPU backend: its state and the operations that have a file of their own. One operation runs
 * at a time (the pool is not reentrant), so they share one scratch buffer. */
#ifndef QC_CPU_BACKEND_H
#define QC_CPU_BACKEND_H

#include "kern.h"
#include "kern_bf16.h"

typedef struct qc_cpu_backend {
    qc_backend be; /* first: the operations get a pointer to it */
    qc_pool *pool; /* borrowed, may be NULL */
    qc_kern kern;
    qc_kern_bf16 bf16; /* with compute BF16 */
    float *scratch;    /* grows, never shrinks */
    int64_t scratch_elems;
} qc_cpu_backend;

struct qc_weight {
    int64_t n_out, n_in;
    /* With kern.use_blas the plain matrix [n_out, n_in]; else for each block of inputs (block_in long, the
     * last one shorter) panels of kern.nr outputs, each [block, nr], the last one filled up with zeros. */
    int64_t block_in;
    float *data;
    /* Instead of data with compute BF16: strips of column tiles (kern_bf16.h), 16 outputs each. */
    uint16_t *tiles;
};

/* At least n_elems floats, valid until the next operation; content undefined. NULL with a message. */
float *qc_cpu_scratch(qc_cpu_backend *cb, int64_t n_elems, qc_err *err);

int qc_cpu_weight_load(qc_backend *be, int64_t n_out, int64_t n_in, qc_fetch_rows_fn fetch, void *ctx,
                       qc_weight **ret, qc_err *err);
void qc_cpu_weight_free(qc_backend *be, qc_weight *w);
/* y[m, n] (stride ldy) = bias[n], or += with accumulate: what a tile of `linear` starts from. */
void qc_cpu_put_bias(const qc_kern *kern, float *y, int64_t ldy, const float *bias, int64_t m, int64_t n,
                     bool accumulate);
int qc_cpu_linear(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx, const qc_weight *w,
                  const float *bias, int64_t n_tokens, bool accumulate, qc_err *err);
int qc_cpu_attention(qc_backend *be, float *out, const float *q, const float *k, const float *v,
                     const qc_attention_shape *shape, qc_err *err);
/* QC_E_UNSUPPORTED unless the shape makes sense. */
int qc_cpu_check_attention(const qc_attention_shape *shape, qc_err *err);
int qc_cpu_score(qc_backend *be, qc_score *scores, const float *logits_a, const float *logits_b, int64_t ld,
                 const int32_t *targets, int64_t n_tokens, int64_t vocab0, int64_t n_vocab, float softcap,
                 qc_err *err);

int qc_cpu_route(qc_backend *be, int32_t *ids, float *weights, const float *logits, int64_t ld,
                 int64_t n_tokens, int64_t n_experts, int64_t n_chosen, bool renormalise, qc_err *err);
int qc_cpu_gather_rows(qc_backend *be, float *y, const float *x, const int32_t *rows, int64_t n_rows,
                       int64_t dim, qc_err *err);
int qc_cpu_add_rows(qc_backend *be, float *y, const float *x, const int32_t *rows, const float *alpha,
                    int64_t n_rows, int64_t dim, qc_err *err);

int qc_cpu_linear_bf16(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx, const qc_weight *w,
                       const float *bias, int64_t n_tokens, bool accumulate, qc_err *err);

int qc_cpu_attention_bf16(qc_backend *be, float *out, const float *q, const float *k, const float *v,
                          const qc_attention_shape *shape, qc_err *err);
int qc_cpu_gram_bf16(qc_backend *be, float *h, const float *a, int64_t lda, const float *b, int64_t ldb,
                     int64_t n_tokens, int64_t n_rows, int64_t n_cols, float alpha, qc_err *err);

/* Elements of a strip of tiles over k inputs. */
static inline int64_t qc_bf16_strip(int64_t k)
{
    return (k + QC_BF16_INPUTS - 1) / QC_BF16_INPUTS * QC_BF16_TILE;
}

int qc_cpu_gram(qc_backend *be, float *h, const float *a, int64_t lda, const float *b, int64_t ldb,
                int64_t n_tokens, int64_t n_rows, int64_t n_cols, float alpha, qc_err *err);
int qc_cpu_mirror(qc_backend *be, float *h, int64_t n, qc_err *err);
int qc_cpu_column_stats(qc_backend *be, float *sum_abs, float *max_abs, const float *x, int64_t ldx,
                        int64_t n_tokens, int64_t n_dims, qc_err *err);
int qc_cpu_quantize_acts(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx, int64_t n_tokens,
                         int64_t n_dims, int bits, int64_t group_elems, qc_err *err);
int qc_cpu_factor(qc_backend *be, float *a, int64_t n, double *pivots, int64_t *ret_bad, qc_err *err);
int qc_cpu_factor_solve(qc_backend *be, const float *factor, const double *pivots, float *b, int64_t n_rows,
                        int64_t n, qc_err *err);
int qc_cpu_round_forward(qc_backend *be, const float *factor, const qc_grid *grid, const qc_round_rows *rows,
                         qc_err *err);
int qc_cpu_descend(qc_backend *be, const float *h, const float *inv, const qc_grid *grid,
                   const qc_round_rows *rows, int64_t n_sweeps, bool refit, qc_err *err);
int qc_cpu_hessian_error(qc_backend *be, const float *h, const float *e, int64_t n_rows, int64_t n,
                         double *ret, qc_err *err);

/* A block of at most QC_GRAM_TOKENS tokens of two matrices [tokens, n], laid out for `gemm`: the first as
 * rows[n, QC_GRAM_LD] (a column of it is a row here), the second as panels of nr columns, each [n_tokens,
 * nr], one behind the other. QC_GRAM_LD keeps rows out of step with the sets of the first level cache. */
enum { QC_GRAM_TOKENS = 256, QC_GRAM_LD = QC_GRAM_TOKENS + 16 };
typedef struct qc_gram_block {
    float *rows, *panels;
    int64_t n_tokens;
} qc_gram_block;

/* Floats that `rows`, and `panels`, of a block need. */
int64_t qc_cpu_gram_elems(const qc_kern *kern, int64_t n_dims);
/* Panel dst[k, nr] from n <= nr columns of a[k, lda], the rest zeros. */
void qc_cpu_gram_panel(const qc_kern *kern, float *dst, const float *a, int64_t lda, int64_t n, int64_t k);
/* h[n_rows, n_cols] += sum over the blocks, in their order, of rows x panels; lower: the lower triangle only.
 */
void qc_cpu_gram_tiles(qc_cpu_backend *cb, float *h, int64_t ldh, int64_t n_rows, int64_t n_cols,
                       const qc_gram_block *blocks, int64_t n_blocks, bool lower);

/* y[m, n] = x[m, k] w[n, k]^T, or += with accumulate, by the BLAS library on the calling thread. The only
 * file that knows it is blas.c. */
void qc_blas_single_thread(void);
void qc_blas_gemm(float *y, int64_t ldy, const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t m,
                  int64_t n, int64_t k, bool accumulate);
/* Lower Cholesky factor of a[n, n] in place, the lower triangle given. Returns how many pivots from the first
 * on are good: n if all are. NaN may count as good. */
int64_t qc_blas_cholesky(double *a, int64_t n);

#endif
