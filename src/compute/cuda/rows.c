/* Operations that are one launch: arguments, grids and what a device can not do. */
#include "device.h"
#include "qc_alloc.h"
#include "qc_math.h"
#include "route.h"

enum { WARP = 32, WARPS = QC_CUDA_THREADS / WARP };

static int64_t n_blocks(int64_t n_threads)
{
    return qc_ceil_div(n_threads, QC_CUDA_THREADS);
}

static int cuda_rms_norm(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx,
                         const float *gain, float gain_offset, int64_t n_rows, int64_t dim, float eps,
                         qc_err *err)
{
    qc_cuda_norm_args args = {.y = y,
                              .x = x,
                              .gain = gain,
                              .ldy = ldy,
                              .ldx = ldx,
                              .dim = dim,
                              .gain_offset = gain_offset,
                              .eps = eps};
    /* about four elements per thread: rows of a head are short */
    int threads = (int)(qc_min_i64(WARPS, qc_max_i64(1, qc_ceil_div(dim, 4 * WARP))) * WARP);
    return QC_CUDA_LAUNCH((qc_cuda_backend *)be, rms_norm, dim > 0 ? n_rows : 0, 1, threads,
                          WARPS * sizeof(float), &args, err);
}

static int cuda_rope(qc_backend *be, float *x, int64_t ldx, const float *cos_t, const float *sin_t,
                     int64_t n_tokens, int64_t n_heads, int64_t head_dim, int64_t rotary_dim, qc_err *err)
{
    if (rotary_dim < 0 || rotary_dim > head_dim || rotary_dim % 2)
        return qc_fail(err, QC_E_UNSUPPORTED, "rotation of %lld of %lld elements of a head",
                       (long long)rotary_dim, (long long)head_dim);
    qc_cuda_rope_args args = {.x = x,
                              .cos_t = cos_t,
                              .sin_t = sin_t,
                              .ldx = ldx,
                              .n_tokens = n_tokens,
                              .n_heads = n_heads,
                              .head_dim = head_dim,
                              .half = rotary_dim / 2};
    return QC_CUDA_LAUNCH((qc_cuda_backend *)be, rope, n_blocks(n_tokens * n_heads * args.half), 1,
                          QC_CUDA_THREADS, 0, &args, err);
}

static int cuda_attention(qc_backend *be, float *out, const float *q, const float *k, const float *v,
                          const qc_attention_shape *shape, qc_err *err)
{
    qc_cuda_backend *cb = (qc_cuda_backend *)be;
    int64_t dim = shape->head_dim, dim_max = dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
    if (shape->n_kv_heads < 1 || shape->n_heads < 1 || shape->n_heads % shape->n_kv_heads != 0 || dim < 1)
        return qc_fail(err, QC_E_UNSUPPORTED, "attention with %lld heads of %lld on %lld key heads",
                       (long long)shape->n_heads, (long long)dim, (long long)shape->n_kv_heads);
    if (dim > dim_max)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "attention with heads of %lld elements on a device, at most %lld", (long long)dim,
                       (long long)dim_max);
    qc_cuda_attention_args args = {.out = out,
                                   .q = q,
                                   .k = k,
                                   .v = v,
                                   .n_tokens = shape->n_tokens,
                                   .n_heads = shape->n_heads,
                                   .n_kv_heads = shape->n_kv_heads,
                                   .head_dim = dim,
                                   .window = shape->window,
                                   .scale = shape->scale,
                                   .softcap = shape->softcap,
                                   .bf16 = cb->be.compute == QC_COMPUTE_BF16};
    qc_cuda_kernel kernel = dim_max == 64    ? QC_CUDA_K_attention_64
                            : dim_max == 128 ? QC_CUDA_K_attention_128
                                             : QC_CUDA_K_attention_256;
    return qc_cuda_launch(cb, kernel, qc_ceil_div(shape->n_tokens, qc_cuda_attention_tile(dim_max)),
                          shape->n_heads, QC_CUDA_THREADS, qc_cuda_attention_bytes(dim_max), &args, err);
}

static bool aligned(const float *a, const float *b, const float *c)
{
    return (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) & 15) == 0;
}

static int pair_operation(qc_backend *be, qc_cuda_kernel kernel, qc_cuda_pair_args args, qc_err *err)
{
    args.vector = aligned(args.y, args.a, args.b);
    return qc_cuda_launch((qc_cuda_backend *)be, kernel, n_blocks(qc_ceil_div(args.n, 4)), 1, QC_CUDA_THREADS,
                          0, &args, err);
}

static int cuda_gated_act(qc_backend *be, float *y, const float *gate, const float *up, int64_t n_elems,
                          qc_activation act, qc_err *err)
{
    qc_cuda_pair_args args = {.y = y, .a = gate, .b = up, .n = n_elems, .gelu = act == QC_ACT_GELU_TANH};
    return pair_operation(be, QC_CUDA_K_gated_act, args, err);
}

static int cuda_add(qc_backend *be, float *y, const float *x, float alpha, int64_t n_elems, qc_err *err)
{
    return pair_operation(be, QC_CUDA_K_add,
                          (qc_cuda_pair_args){.y = y, .a = x, .n = n_elems, .alpha = alpha}, err);
}

static int cuda_scale(qc_backend *be, float *y, const float *x, float alpha, int64_t n_elems, qc_err *err)
{
    return pair_operation(be, QC_CUDA_K_scale,
                          (qc_cuda_pair_args){.y = y, .a = x, .n = n_elems, .alpha = alpha}, err);
}

static int cuda_score(qc_backend *be, qc_score *scores, const float *logits_a, const float *logits_b,
                      int64_t ld, const int32_t *targets, int64_t n_tokens, int64_t vocab0, int64_t n_vocab,
                      float softcap, qc_err *err)
{
    qc_cuda_backend *cb = (qc_cuda_backend *)be;
    size_t score_bytes = (size_t)n_tokens * sizeof *scores, target_bytes = (size_t)n_tokens * sizeof *targets;
    if (n_tokens == 0 || n_vocab == 0)
        return QC_OK;
    qc_score *device_scores = qc_cuda_scratch(cb, QC_CUDA_S_STATS, score_bytes, err);
    int32_t *device_targets = device_scores ? qc_cuda_scratch(cb, QC_CUDA_S_GROUPS, target_bytes, err) : NULL;
    if (!device_targets)
        return QC_E_RESOURCE;
    QC_TRY(qc_cuda_to_device(cb, device_scores, scores, score_bytes, err));
    QC_TRY(qc_cuda_to_device(cb, device_targets, targets, target_bytes, err));
    qc_cuda_score_args args = {.scores = device_scores,
                               .a = logits_a,
                               .b = logits_b,
                               .targets = device_targets,
                               .ld = ld,
                               .vocab0 = vocab0,
                               .n_vocab = n_vocab,
                               .softcap = softcap};
    QC_TRY(QC_CUDA_LAUNCH(cb, score, n_tokens, 1, QC_CUDA_THREADS, QC_CUDA_SCORE_BYTES, &args, err));
    return qc_cuda_to_host(cb, scores, device_scores, score_bytes, err);
}

/* A router has few logits per token: the choice is made on the host, where it is wanted. */
static int cuda_route(qc_backend *be, int32_t *ids, float *weights, const float *logits, int64_t ld,
                      int64_t n_tokens, int64_t n_experts, int64_t n_chosen, bool renormalise, qc_err *err)
{
    int64_t n = n_tokens > 0 ? (n_tokens - 1) * ld + n_experts : 0;
    if (n_chosen < 1 || n_chosen > n_experts || n_experts > INT32_MAX)
        return qc_fail(err, QC_E_UNSUPPORTED, "%lld of %lld experts", (long long)n_chosen,
                       (long long)n_experts);
    float *host = qc_alloc((size_t)n, sizeof *host);
    if (!host)
        return qc_fail_nomem(err, "the routing of tokens", (unsigned long long)n * sizeof *host);
    int rc = be->download(be, host, logits, n, err);
    for (int64_t t = 0; t < n_tokens && rc == QC_OK; t++)
        qc_route_token(ids + t * n_chosen, weights + t * n_chosen, host + t * ld, n_experts, n_chosen,
                       renormalise);
    qc_free(host);
    return rc;
}

static int listed_rows(qc_backend *be, qc_cuda_kernel kernel, qc_cuda_listed_args args, qc_err *err)
{
    qc_cuda_backend *cb = (qc_cuda_backend *)be;
    size_t n = (size_t)args.n_rows;
    if (args.n_rows == 0 || args.dim == 0)
        return QC_OK;
    int32_t *rows = qc_cuda_scratch(cb, QC_CUDA_S_GROUPS, n * sizeof *rows, err);
    if (!rows)
        return QC_E_RESOURCE;
    QC_TRY(qc_cuda_to_device(cb, rows, args.rows, n * sizeof *rows, err));
    args.rows = rows;
    if (args.alpha) {
        float *alpha = qc_cuda_scratch(cb, QC_CUDA_S_STATS, n * sizeof *alpha, err);
        if (!alpha)
            return QC_E_RESOURCE;
        QC_TRY(qc_cuda_to_device(cb, alpha, args.alpha, n * sizeof *alpha, err));
        args.alpha = alpha;
    }
    return qc_cuda_launch(cb, kernel, n_blocks(args.n_rows * args.dim), 1, QC_CUDA_THREADS, 0, &args, err);
}

static int cuda_gather_rows(qc_backend *be, float *y, const float *x, const int32_t *rows, int64_t n_rows,
                            int64_t dim, qc_err *err)
{
    qc_cuda_listed_args args = {.y = y, .x = x, .rows = rows, .n_rows = n_rows, .dim = dim};
    return listed_rows(be, QC_CUDA_K_gather_rows, args, err);
}

static int cuda_add_rows(qc_backend *be, float *y, const float *x, const int32_t *rows, const float *alpha,
                         int64_t n_rows, int64_t dim, qc_err *err)
{
    qc_cuda_listed_args args = {.y = y, .x = x, .alpha = alpha, .rows = rows, .n_rows = n_rows, .dim = dim};
    return listed_rows(be, QC_CUDA_K_add_rows, args, err);
}

static int cuda_mirror(qc_backend *be, float *h, int64_t n, qc_err *err)
{
    qc_cuda_mirror_args args = {.h = h, .n = n};
    int64_t tiles = qc_ceil_div(n, 32);
    return QC_CUDA_LAUNCH((qc_cuda_backend *)be, mirror, tiles, tiles, QC_CUDA_THREADS,
                          32 * 33 * sizeof(float), &args, err);
}

static int cuda_column_stats(qc_backend *be, float *sum_abs, float *max_abs, const float *x, int64_t ldx,
                             int64_t n_tokens, int64_t n_dims, qc_err *err)
{
    enum { THREADS = 32 * QC_CUDA_STATS_ROWS };
    qc_cuda_stats_args args = {
        .sum_abs = sum_abs, .max_abs = max_abs, .x = x, .ldx = ldx, .n_tokens = n_tokens, .n_dims = n_dims};
    return QC_CUDA_LAUNCH((qc_cuda_backend *)be, column_stats, n_tokens > 0 ? qc_ceil_div(n_dims, 32) : 0, 1,
                          THREADS, 2 * THREADS * sizeof(float), &args, err);
}

static int cuda_quantize_acts(qc_backend *be, float *y, int64_t ldy, const float *x, int64_t ldx,
                              int64_t n_tokens, int64_t n_dims, int bits, int64_t group_elems, qc_err *err)
{
    if (bits < 2 || bits > 8 || group_elems < 0)
        return qc_fail(err, QC_E_UNSUPPORTED, "activations of %d bits in groups of %lld", bits,
                       (long long)group_elems);
    if (n_tokens == 0 || n_dims == 0)
        return QC_OK;
    int64_t group = group_elems > 0 ? group_elems : n_dims;
    qc_cuda_acts_args args = {.y = y,
                              .x = x,
                              .ldy = ldy,
                              .ldx = ldx,
                              .n_tokens = n_tokens,
                              .n_dims = n_dims,
                              .group = group,
                              .n_groups = qc_ceil_div(n_dims, group),
                              .qmax = (float)((1 << (bits - 1)) - 1)};
    return QC_CUDA_LAUNCH((qc_cuda_backend *)be, quantize_acts, qc_ceil_div(n_tokens * args.n_groups, WARPS),
                          1, QC_CUDA_THREADS, 0, &args, err);
}

void qc_cuda_set_row_operations(qc_backend *be)
{
    be->rms_norm = cuda_rms_norm;
    be->rope = cuda_rope;
    be->attention = cuda_attention;
    be->gated_act = cuda_gated_act;
    be->route = cuda_route;
    be->gather_rows = cuda_gather_rows;
    be->add_rows = cuda_add_rows;
    be->add = cuda_add;
    be->scale = cuda_scale;
    be->score = cuda_score;
    be->mirror = cuda_mirror;
    be->column_stats = cuda_column_stats;
    be->quantize_acts = cuda_quantize_acts;
}
