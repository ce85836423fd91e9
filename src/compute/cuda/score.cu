/* score: one block per token, two passes over its logits: the largest, then the sums. */
#include "kernel.cuh"

struct largest {
    float max;
    int32_t id; /* -1: none finite so far */
};

QC_DEVICE bool is_finite(float x)
{
    return x - x == 0;
}

/* The larger one; of equal ones the first id. */
QC_DEVICE largest better(largest x, largest y)
{
    bool take = y.id >= 0 && (x.id < 0 || y.max > x.max || (y.max == x.max && y.id < x.id));
    return take ? y : x;
}

template <class P> QC_DEVICE float logit(P x, int64_t i, float softcap)
{
    return softcap > 0 ? softcap * tanhf(x[i] / softcap) : x[i];
}

/* Largest logit of a row, and how many are not finite, for every thread. */
template <class P, class F, class I>
QC_DEVICE largest block_largest(P x, const qc_cuda_score_args &a, F maxima, I ids, int *ret_bad)
{
    largest top = {-FLT_MAX, -1};
    int bad = 0, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    for (int64_t i = threadIdx.x; i < a.n_vocab; i += blockDim.x) {
        float v = logit(x, i, a.softcap);
        largest one = {v, (int32_t)(a.vocab0 + i)};
        if (is_finite(v))
            top = better(top, one);
        else
            bad++;
    }
    for (int i = 16; i > 0; i /= 2) {
        largest other;
        other.max = __shfl_xor_sync(QC_FULL_WARP, top.max, i);
        other.id = __shfl_xor_sync(QC_FULL_WARP, top.id, i);
        top = better(top, other);
    }
    bad = qc_warp_sum(bad);
    if (threadIdx.x % 32 == 0) {
        maxima[warp] = top.max;
        ids[warp] = top.id;
        ids[n_warps + warp] = bad;
    }
    __syncthreads();
    bad = 0;
    for (int i = 0; i < n_warps; i++) {
        largest other = {maxima[i], ids[i]};
        top = i > 0 ? better(top, other) : other;
        bad += ids[n_warps + i];
    }
    __syncthreads();
    *ret_bad = bad;
    return top;
}

/* What a row adds to max and top; returns by how much earlier sums shrink. */
QC_DEVICE double take_largest(largest top, float *max, int32_t *id)
{
    float old = *max;
    if (top.id >= 0 && (*id < 0 || top.max > old)) {
        *max = top.max;
        *id = top.id;
    }
    return exp((double)old - (double)*max);
}

QC_KERNEL(score, score, QC_CUDA_THREADS)
{
    auto doubles = qc_shared<double>();
    auto maxima = qc_shared<float>();
    auto ids = qc_shared<int32_t>() + 32;
    auto scores = qc_view(a.scores);
    int64_t t = blockIdx.x, target = qc_view(a.targets)[t] - a.vocab0;
    auto x = qc_view(a.a) + t * a.ld;
    bool two = a.b != NULL;
    auto y = qc_view(two ? a.b : a.a) + t * a.ld;
    int bad_a, bad_b = 0;
    qc_score s = scores[t];
    __syncthreads(); /* all have read what the first one overwrites below */
    double shrink = take_largest(block_largest(x, a, maxima, ids, &bad_a), &s.max_a, &s.top_a), shrink_b = 1;
    if (two)
        shrink_b = take_largest(block_largest(y, a, maxima, ids, &bad_b), &s.max_b, &s.top_b);
    double sum_a = 0, sum_b = 0, cross = 0;
    for (int64_t i = threadIdx.x; i < a.n_vocab; i += blockDim.x) {
        float u = logit(x, i, a.softcap), v = two ? logit(y, i, a.softcap) : 0;
        double ea = is_finite(u) ? (double)expf(u - s.max_a) : 0;
        sum_a += ea;
        if (two && is_finite(v)) {
            sum_b += (double)expf(v - s.max_b);
            if (is_finite(u))
                cross += ea * ((double)u - (double)v);
        }
    }
    sum_a = qc_block_sum(sum_a, doubles);
    if (two) {
        sum_b = qc_block_sum(sum_b, doubles);
        cross = qc_block_sum(cross, doubles);
    }
    if (threadIdx.x > 0)
        return;
    s.sum_a = s.sum_a * shrink + sum_a;
    s.cross = s.cross * shrink + cross;
    if (two)
        s.sum_b = s.sum_b * shrink_b + sum_b;
    s.n_nonfinite += bad_a + bad_b;
    if (target >= 0 && target < a.n_vocab) {
        s.target_a = logit(x, target, a.softcap);
        if (two)
            s.target_b = logit(y, target, a.softcap);
    }
    scores[t] = s;
}
