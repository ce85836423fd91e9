/* The border between the product and the hardware: a table of named operations, implemented by cpu/ and by
 * cuda/. Everything above (model, eval, quant, calib) computes only through it.
 *
 * Buffers are made by alloc and hold float32 in the backend's own address space: the host never dereferences
 * them, data cross by upload and download. (On the CPU both are copies within one memory.) All matrices are
 * row major; strides are in elements and default to dense. Operations return 0 or a QC_E_* code. An operation
 * splits its work in tiles that depend on the shapes alone and adds in a fixed order, so results do not
 * depend on the number of threads. Letters: T tokens (rows), K inputs, N outputs, H heads, D head size. */
#ifndef QC_BACKEND_H
#define QC_BACKEND_H

#include "qc_err.h"
#include "qc_quant_spec.h"
#include "qc_threads.h"
#include "score.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qc_backend qc_backend;

/* A weight matrix [N, K] prepared for `linear` (expanded, packed, uploaded: the backend's business). */
typedef struct qc_weight qc_weight;

/* Source of a matrix: write rows row0 .. row0 + n_rows - 1 as float32 to dst[n_rows, K] (host memory). May be
 * called from several threads at once, for disjoint rows. */
typedef int (*qc_fetch_rows_fn)(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err);

typedef enum { QC_ACT_SILU = 0, QC_ACT_GELU_TANH = 1 } qc_activation;

/* Arithmetic of matrix products (linear, gram, attention). BF16: both operands rounded to bfloat16 (nearest
 * even), products added in float32; by AMX or AVX512-BF16 where the processor has them, else emulated.
 * Factorisation and rounding of weights stay float32. */
typedef enum { QC_COMPUTE_F32 = 0, QC_COMPUTE_BF16 = 1 } qc_compute;

/* Rows of a matrix in work while their codes are being chosen; e = target - value of the codes. */
typedef struct qc_round_rows {
    int64_t n_rows, n_cols;
    const float *target; /* [n_rows, n_cols] what the codes shall stand for */
    float *error;        /* [n_rows, n_cols] e */
    uint8_t *codes;      /* host [n_rows, n_cols] */
    float *scales; /* host [n_rows, n_groups], exact in the grid's scale dtype, never 0, may be negative */
    const uint8_t *zeros;    /* host [n_rows, n_groups]; NULL if the grid is symmetric */
    const int32_t *group_of; /* host [n_cols] group of a column; NULL: column / group_elems */
} qc_round_rows;

typedef struct qc_attention_shape {
    int64_t n_tokens;   /* T: queries and keys are positions 0 .. T-1 of one sequence */
    int64_t n_heads;    /* query heads */
    int64_t n_kv_heads; /* divides n_heads; query head h reads kv head h / (n_heads / n_kv_heads) */
    int64_t head_dim;   /* D */
    int64_t window;     /* query i sees keys max(0, i - window + 1) .. i; 0 = all keys up to i */
    float scale;        /* scores = scale * q . k */
    float softcap;      /* scores = softcap * tanh(scores / softcap) before the softmax; 0 = none */
} qc_attention_shape;

/* Columns that `descend` takes together, whole groups: about QC_DESCENT_BLOCK, or one group if that is
 * larger. */
enum { QC_DESCENT_BLOCK = 128 };
static inline int64_t qc_descent_block(int64_t group_elems, int64_t n_cols)
{
    if (group_elems >= n_cols)
        return n_cols;
    return group_elems > QC_DESCENT_BLOCK ? group_elems : QC_DESCENT_BLOCK / group_elems * group_elems;
}

/* What computes. Numbers that a backend does not know are 0. */
typedef struct qc_device_info {
    char name[128];        /* "NVIDIA H200"; for the CPU the highest instruction set in use */
    int capability;        /* 10 * major + minor compute capability */
    int driver;            /* version of CUDA that the driver speaks: 1000 * major + 10 * minor */
    int clock_mhz;         /* nominal */
    uint64_t memory_bytes; /* of the device */
    uint64_t peak_bytes;   /* most device memory in use so far, that of cuBLAS and the context left out */
} qc_device_info;

/* What operations copy for themselves at most: tokens of both operands of `gram` (half as many with BF16),
 * tokens that `linear` packs (BF16), rows that a thread packs in weight_load, rows that one works on in
 * round_forward, descend and hessian_error. */
enum {
    QC_GRAM_COPIED_TOKENS = 1024,
    QC_LINEAR_COPIED_TOKENS = 2048,
    QC_LOAD_COPIED_ROWS = 32,
    QC_ROUND_COPIED_ROWS = 128
};

/* The same in bytes, for plans. A backend keeps what its operations took, so that the most of all counts,
 * once. */
uint64_t qc_linear_scratch_bytes(qc_compute compute, int n_threads, int64_t n_tokens, int64_t n_in);
uint64_t qc_attention_scratch_bytes(qc_compute compute, int n_threads, const qc_attention_shape *shape);
uint64_t qc_gram_scratch_bytes(qc_compute compute, int n_threads, int64_t n_tokens, int64_t n_rows,
                               int64_t n_cols);
/* Of factor, factor_solve, round_forward, descend and hessian_error. */
uint64_t qc_round_scratch_bytes(int n_threads, int64_t n_rows, int64_t n_cols, int64_t group_elems);

struct qc_backend {
    const char *name; /* "cpu", "cuda:0", "emulated:0" */
    qc_compute compute;
    int n_threads; /* of the host */

    /* Buffers are plain host memory: any host pointer serves as one, and upload and download can be left out.
     */
    bool host_memory;

    /* n_elems float32, uninitialised; NULL and a message when out of memory. */
    float *(*alloc)(qc_backend *be, int64_t n_elems, qc_err *err);
    void (*free)(qc_backend *be, float *buffer);
    int (*upload)(qc_backend *be, float *dst, const float *host, int64_t n_elems, qc_err *err);
    int (*download)(qc_backend *be, float *host, const float *src, int64_t n_elems, qc_err *err);

    /* Prepare W[N, K]. *ret is released with weight_free (NULL is fine). */
    int (*weight_load)(qc_backend *be, int64_t n_out, int64_t n_in, qc_fetch_rows_fn fetch, void *ctx,
                       qc_weight **ret, qc_err *err);
    void (*weight_free)(qc_backend *be, qc_weight *w);

    /* y[T, N] = x[T, K] W^T + bias[N] (bias may be NULL); with accumulate y += instead. Row strides ldy >= N,
     * ldx >= K. y must not overlap x. */
    int (*linear)(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx, const qc_weight *w,
                  const float *bias, int64_t n_tokens, bool accumulate, qc_err *err);

    /* y[r, :] = x[r, :] / sqrt(mean(x[r, :]^2) + eps) * (gain + gain_offset). Rows of dim elements, strides
     * ldy, ldx; y may be x. RMSNorm, Zhang & Sennrich 2019; gain_offset 1 is the Gemma form. */
    int (*rms_norm)(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx, const float *gain,
                    float gain_offset, int64_t n_rows, int64_t dim, float eps, qc_err *err);

    /* Rotate the first rotary_dim elements of each of n_heads heads in place, pairs (i, i + rotary_dim / 2):
     * x_i' = x_i cos_i - x_j sin_i, x_j' = x_j cos_i + x_i sin_i (RoFormer, half-split form).
     * x[T, ldx], head h at column h * head_dim; cos_t, sin_t [T, rotary_dim / 2]. */
    int (*rope)(qc_backend *be, float *x, int64_t ldx, const float *cos_t, const float *sin_t,
                int64_t n_tokens, int64_t n_heads, int64_t head_dim, int64_t rotary_dim, qc_err *err);

    /* out[T, H * D] = causal softmax attention of one sequence; q[T, H * D], k, v[T, H_kv * D], dense rows.
     * No T x T matrix is kept (FlashAttention's blocking); softmax in float32. out must not overlap the
     * inputs. */
    int (*attention)(qc_backend *be, float *out, const float *q, const float *k, const float *v,
                     const qc_attention_shape *shape, qc_err *err);

    /* y[i] = act(gate[i]) * up[i]; y may be gate or up. */
    int (*gated_act)(qc_backend *be, float *y, const float *gate, const float *up, int64_t n_elems,
                     qc_activation act, qc_err *err);

    /* Experts of each token: the n_chosen largest of logits[T, n_experts] (row stride ld), the first of equal
     * ones, largest first: ids[T, n_chosen] (host). weights (host, same shape) = their share of softmax over
     * all logits, or with renormalise over the chosen ones (Fedus et al. 2021, Jiang et al. 2024). */
    int (*route)(qc_backend *be, int32_t *ids, float *weights, const float *logits, int64_t ld,
                 int64_t n_tokens, int64_t n_experts, int64_t n_chosen, bool renormalise, qc_err *err);

    /* y[i, :] = x[rows[i], :], rows[n_rows] in host memory; dense rows of dim elements. */
    int (*gather_rows)(qc_backend *be, float *y, const float *x, const int32_t *rows, int64_t n_rows,
                       int64_t dim, qc_err *err);
    /* y[rows[i], :] += alpha[i] * x[i, :]; rows (all different) and alpha in host memory. */
    int (*add_rows)(qc_backend *be, float *y, const float *x, const int32_t *rows, const float *alpha,
                    int64_t n_rows, int64_t dim, qc_err *err);

    /* y[i] += alpha * x[i] */
    int (*add)(qc_backend *be, float *y, const float *x, float alpha, int64_t n_elems, qc_err *err);

    /* y[i] = alpha * x[i]; y may be x. */
    int (*scale)(qc_backend *be, float *y, const float *x, float alpha, int64_t n_elems, qc_err *err);

    /* Take n_vocab logits per token, of ids vocab0 .., into scores[T] (host memory; start from
     * qc_score_start). logits_b NULL: one model. softcap > 0: logit = softcap * tanh(logit / softcap) first.
     * targets[T] in host memory. Slices arrive in ascending order. */
    int (*score)(qc_backend *be, qc_score *scores, const float *logits_a, const float *logits_b, int64_t ld,
                 const int32_t *targets, int64_t n_tokens, int64_t vocab0, int64_t n_vocab, float softcap,
                 qc_err *err);

    /* Put W[n_rows, n_cols] (host memory) on the grid by round-to-nearest with the scale search of the spec.
     * col_weight[n_cols] >= 0 or NULL (all 1). Results go to *rows (arrays sized by the caller) and are added
     * to *stats. The caller has checked that no value is NaN or infinite. */
    int (*quantize_rows)(qc_backend *be, const float *w, int64_t n_rows, int64_t n_cols,
                         const qc_quant_spec *spec, const float *col_weight, qc_code_rows *rows,
                         qc_quant_stats *stats, qc_err *err);

    /* Tasks of the caller's on the threads that work for the backend, as qc_pool_run. */
    void (*host_tasks)(qc_backend *be, int64_t n_tasks, qc_task_fn fn, void *ctx);

    /* ---- calibration and rounding by second order statistics; h and e as in docs/methods/gptq.md ---- */

    /* b NULL: lower triangle (column <= row) of h[M, M] += alpha a[T, M]^T a[T, M]; the rest of h is left
     * alone, and N is M. With b: all of h[M, N] += alpha a[T, M]^T b[T, N]. Products are added in the order
     * of T. Row strides lda, ldb. alpha is 1 or -1. */
    int (*gram)(qc_backend *be, float *h, const float *a, int64_t lda, const float *b, int64_t ldb,
                int64_t n_tokens, int64_t n_rows, int64_t n_cols, float alpha, qc_err *err);

    /* Upper triangle of h[n, n] = mirror of the lower one. */
    int (*mirror)(qc_backend *be, float *h, int64_t n, qc_err *err);

    /* sum_abs[K] += sum_t |x[t, k]|, max_abs[K] = max(max_abs[K], max_t |x[t, k]|); a NaN makes both NaN. */
    int (*column_stats)(qc_backend *be, float *sum_abs, float *max_abs, const float *x, int64_t ldx,
                        int64_t n_tokens, int64_t n_dims, qc_err *err);

    /* x[t, :] <- nearest value of a symmetric grid of `bits` bits (2 .. 8) whose step is max |x| /
     * (2^(bits-1) - 1), per token (group_elems = 0 or >= K) or per token and group of columns; an all-zero
     * group stays 0. The fake quantization of dynamic activations: what an integer kernel would see. y may be
     * x. */
    int (*quantize_acts)(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx, int64_t n_tokens,
                         int64_t n_dims, int bits, int64_t group_elems, qc_err *err);

    /* a[n, n] (lower triangle given) = R R^T with R upper triangular: columns are eliminated from the last to
     * the first (the Cholesky factor of the matrix read backwards). On return row j holds, left of the
     * diagonal, the feedback coefficients R_ij / R_jj, i < j: the share of the error of column i that column
     * j takes over (LDLQ, Chee et al. 2023; the same recursion as GPTQ with U = R^-1). Diagonal and upper
     * triangle are undefined. pivots[n] (host) = R_jj^2. *ret_bad = index of the first pivot (from the end)
     * that is not finite and > 0, the content is then undefined; -1 if all are good. */
    int (*factor)(qc_backend *be, float *a, int64_t n, double *pivots, int64_t *ret_bad, qc_err *err);

    /* b[n_rows, n] <- b A^-1 with a factor of A, in place. */
    int (*factor_solve)(qc_backend *be, const float *factor, const double *pivots, float *b, int64_t n_rows,
                        int64_t n, qc_err *err);

    /* GPTQ, one pass over the columns in ascending order with the coefficients of `factor`. For column j:
     *     t = target_j + sum_{i < j} factor[j, i] e_i
     *     code_j = nearest to t on the grid of the row and group of j,  e_j = target_j - value
     * Neither codes nor errors are read on entry. */
    int (*round_forward)(qc_backend *be, const float *factor, const qc_grid *grid, const qc_round_rows *rows,
                         qc_err *err);

    /* Coordinate descent on e h e^T of each row from codes and errors that exist; h[n, n] full. n_sweeps
     * times over the columns, in blocks of qc_descent_block: with refit first the scale of each group of the
     * block, s_g += (p_g (h e)_g) / (p_g h_gg p_g),  p = code - zero rounded to the scale dtype and taken
     * only if e h e^T falls with the rounded scale (arXiv 2602.02126), then each code of the block in
     * ascending order, code_j = nearest to target_j + inv[j] sum_{i != j} h[j, i] e_i,  inv = 1 / diag(h), 0
     * for a column to leave and none moves unless that lowers the error. With refit a last pass over the
     * scales alone follows. group_of must be NULL. */
    int (*descend)(qc_backend *be, const float *h, const float *inv, const qc_grid *grid,
                   const qc_round_rows *rows, int64_t n_sweeps, bool refit, qc_err *err);

    /* ret[r] (host) = e_r h e_r^T for each row of e[n_rows, n]; h full. */
    int (*hessian_error)(qc_backend *be, const float *h, const float *e, int64_t n_rows, int64_t n,
                         double *ret, qc_err *err);

    void (*describe)(qc_backend *be, qc_device_info *ret);

    void (*close)(qc_backend *be);
};

/* The CPU backend on a pool (borrowed; NULL = one thread), kernels chosen by qc_cpu_flags(). */
int qc_backend_cpu_new(qc_pool *pool, qc_compute compute, qc_backend **ret, qc_err *err) QC_WARN_UNUSED;

/* CUDA device `index` of this machine; `pool` (borrowed, may be NULL) fetches weights. Driver and cuBLAS are
 * loaded now: QC_E_UNSUPPORTED with the reason where there are none, no such device, no kernels for it or
 * none in this build. emulator: path of a library to use instead of both (tests/cuda_emulation), or NULL.
 * Operations only queue work; a device that is lost shows at a later call. */
int qc_backend_cuda_new(qc_pool *pool, qc_compute compute, int index, const char *emulator, qc_backend **ret,
                        qc_err *err) QC_WARN_UNUSED;

/* Whether this build has kernels for real devices. */
bool qc_backend_cuda_built(void);

/* NULL is fine. */
static inline void qc_backend_close(qc_backend *be)
{
    if (be)
        be->close(be);
}

static inline qc_score qc_score_start(void)
{
    return (qc_score){.max_a = -3.402823466e38f, .max_b = -3.402823466e38f, .top_a = -1, .top_b = -1};
}

/* Final numbers of a position, in nats. kld = KL(a || b), both 0 for one model. */
static inline void qc_score_finish(const qc_score *s, double *ret_nll_a, double *ret_nll_b, double *ret_kld)
{
    double lse_a = (double)s->max_a + __builtin_log(s->sum_a);
    double lse_b = s->sum_b > 0 ? (double)s->max_b + __builtin_log(s->sum_b) : 0;
    *ret_nll_a = lse_a - (double)s->target_a;
    *ret_nll_b = s->sum_b > 0 ? lse_b - (double)s->target_b : 0;
    *ret_kld = s->sum_b > 0 ? s->cross / s->sum_a - lse_a + lse_b : 0;
}

#endif
