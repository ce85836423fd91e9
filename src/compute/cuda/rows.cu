/* Operations that go element by element or row by row; all are bound by memory. */
#include "kernel.cuh"

QC_KERNEL(rms_norm, norm, QC_CUDA_THREADS)
{
    auto part = qc_shared<float>();
    auto x = qc_view(a.x) + blockIdx.x * a.ldx;
    auto y = qc_view(a.y) + blockIdx.x * a.ldy;
    auto gain = qc_view(a.gain);
    float sum = 0;
    for (int64_t i = threadIdx.x; i < a.dim; i += blockDim.x)
        sum = qc_mul_add(x[i], x[i], sum);
    sum = qc_block_sum(sum, part);
    float r = 1 / sqrtf(sum / (float)a.dim + a.eps);
    for (int64_t i = threadIdx.x; i < a.dim; i += blockDim.x)
        y[i] = x[i] * r * (gain[i] + a.gain_offset);
}

QC_KERNEL(rope, rope, QC_CUDA_THREADS)
{
    int64_t at = qc_global_thread(), i = at % a.half, head = at / a.half % a.n_heads,
            t = at / a.half / a.n_heads;
    if (t >= a.n_tokens)
        return;
    auto x = qc_view(a.x) + t * a.ldx + head * a.head_dim;
    float c = qc_view(a.cos_t)[t * a.half + i], s = qc_view(a.sin_t)[t * a.half + i];
    float u = x[i], v = x[i + a.half];
    x[i] = u * c - v * s;
    x[i + a.half] = v * c + u * s;
}

/* The element-wise formulas, four elements per thread. */
template <class F> QC_DEVICE void each_four(const qc_cuda_pair_args &a, bool has_b, F f)
{
    int64_t i = 4 * qc_global_thread();
    auto y = qc_view(a.y);
    auto x = qc_view(a.a);
    auto b = qc_view(has_b ? a.b : a.a);
    if (a.vector && i + 4 <= a.n) {
        float4 u = qc_load4(x + i), v = qc_load4(b + i), r;
        r.x = f(u.x, v.x);
        r.y = f(u.y, v.y);
        r.z = f(u.z, v.z);
        r.w = f(u.w, v.w);
        qc_store4(y + i, r);
        return;
    }
    for (int64_t end = i + 4 < a.n ? i + 4 : a.n; i < end; i++)
        y[i] = f(x[i], b[i]);
}

/* 0.5 g (1 + tanh(u)) = g / (1 + exp(-2u)), without its cancellation for negative u. */
QC_KERNEL(gated_act, pair, QC_CUDA_THREADS)
{
    bool gelu = a.gelu;
    each_four(a, true, [gelu](float g, float up) {
        float z = gelu ? 2 * 0.79788456080286535588f * (g + 0.044715f * g * g * g) : g;
        return g / (1 + expf(-z)) * up;
    });
}

QC_KERNEL(add, pair, QC_CUDA_THREADS)
{
    float alpha = a.alpha;
    qc_cuda_pair_args own = a;
    own.b = a.y;
    each_four(own, true, [alpha](float x, float y) { return y + alpha * x; });
}

QC_KERNEL(scale, pair, QC_CUDA_THREADS)
{
    float alpha = a.alpha;
    each_four(a, false, [alpha](float x, float) { return alpha * x; });
}

QC_KERNEL(put_bias, bias, QC_CUDA_THREADS)
{
    int64_t at = qc_global_thread(), t = at / a.n_out, i = at % a.n_out;
    if (t >= a.n_tokens)
        return;
    auto y = qc_view(a.y) + t * a.ldy;
    float b = a.bias ? (float)qc_view(a.bias)[i] : 0;
    y[i] = a.accumulate ? y[i] + b : b;
}

QC_KERNEL(to_bf16, to_bf16, QC_CUDA_THREADS)
{
    int64_t at = qc_global_thread(), r = at / a.n_cols, i = at % a.n_cols;
    if (r < a.n_rows)
        qc_view(a.y)[at] = (uint16_t)qc_bf16_bits(qc_view(a.x)[r * a.ldx + i]);
}

QC_KERNEL(add_lower, lower, QC_CUDA_THREADS)
{
    int64_t at = qc_global_thread(), i = at / a.n, j = at % a.n;
    if (i < a.n && j <= i)
        qc_view(a.h)[i * a.ldh + j] += qc_view(a.x)[at];
}

QC_KERNEL(gather_rows, listed, QC_CUDA_THREADS)
{
    int64_t at = qc_global_thread(), i = at / a.dim;
    if (i < a.n_rows)
        qc_view(a.y)[at] = qc_view(a.x)[qc_view(a.rows)[i] * a.dim + at % a.dim];
}

QC_KERNEL(add_rows, listed, QC_CUDA_THREADS)
{
    int64_t at = qc_global_thread(), i = at / a.dim;
    if (i < a.n_rows)
        qc_view(a.y)[qc_view(a.rows)[i] * a.dim + at % a.dim] += qc_view(a.alpha)[i] * qc_view(a.x)[at];
}

/* A tile below the diagonal is written above it, through shared memory so that both sides go by rows. */
QC_KERNEL(mirror, mirror, QC_CUDA_THREADS)
{
    if (blockIdx.x > blockIdx.y)
        return;
    auto tile = qc_shared<float>();
    auto h = qc_view(a.h);
    int64_t r0 = 32 * (int64_t)blockIdx.y, c0 = 32 * (int64_t)blockIdx.x;
    int lane = threadIdx.x % 32, step = blockDim.x / 32;
    for (int i = threadIdx.x / 32; i < 32; i += step)
        if (r0 + i < a.n && c0 + lane < a.n)
            tile[i * 33 + lane] = h[(r0 + i) * a.n + c0 + lane];
    __syncthreads();
    for (int i = threadIdx.x / 32; i < 32; i += step) {
        int64_t r = c0 + i, c = r0 + lane;
        if (r < a.n && c < a.n && r < c)
            h[r * a.n + c] = tile[lane * 33 + i];
    }
}

QC_KERNEL(column_stats, stats, 32 * QC_CUDA_STATS_ROWS)
{
    auto sums = qc_shared<float>();
    auto maxima = sums + 32 * QC_CUDA_STATS_ROWS;
    auto x = qc_view(a.x);
    int lane = threadIdx.x % 32, slice = threadIdx.x / 32;
    int64_t k = 32 * (int64_t)blockIdx.x + lane;
    float sum = 0, max = 0;
    for (int64_t t = slice; t < a.n_tokens && k < a.n_dims; t += QC_CUDA_STATS_ROWS) {
        float v = fabsf(x[t * a.ldx + k]);
        sum += v;
        max = v > max ? v : max;
    }
    sums[threadIdx.x] = sum;
    maxima[threadIdx.x] = max;
    __syncthreads();
    if (slice > 0 || k >= a.n_dims)
        return;
    for (int i = 1; i < QC_CUDA_STATS_ROWS; i++) {
        sum += sums[32 * i + lane];
        float m = maxima[32 * i + lane];
        max = m > max ? m : max;
    }
    auto sum_abs = qc_view(a.sum_abs);
    auto max_abs = qc_view(a.max_abs);
    sum += sum_abs[k];
    float before = max_abs[k];
    sum_abs[k] = sum;
    max_abs[k] = sum != sum ? sum : max > before ? max : before;
}

QC_KERNEL(quantize_acts, acts, QC_CUDA_THREADS)
{
    int lane = threadIdx.x % 32;
    int64_t at = qc_global_thread() / 32, t = at / a.n_groups, k = at % a.n_groups * a.group;
    if (t >= a.n_tokens)
        return;
    int64_t n = a.n_dims - k < a.group ? a.n_dims - k : a.group;
    auto x = qc_view(a.x) + t * a.ldx + k;
    auto y = qc_view(a.y) + t * a.ldy + k;
    float max = 0;
    for (int64_t i = lane; i < n; i += 32) {
        float v = fabsf(x[i]);
        max = v > max ? v : max;
    }
    float step = qc_warp_max(max) / a.qmax;
    for (int64_t i = lane; i < n; i += 32) {
        float q = step > 0 ? rintf(x[i] / step) : x[i] * 0;
        q = q > a.qmax ? a.qmax : q < -a.qmax ? -a.qmax : q;
        y[i] = q * step;
    }
}
