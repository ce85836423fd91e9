/* round_forward and descend: what happens among the columns of one tile; products with the columns outside
 * are cuBLAS's. Rounding without fused multiply-add, as every instruction set of the CPU does it. */
#include "scales.cuh"

#define PER_LANE (QC_CUDA_TILE / 32)

/* code - zero of one column; old: what it has, where codes exist. */
QC_DEVICE float round_one(float t, float scale, float zero, float qmax, bool has_old, float old)
{
    float lo = -zero, hi = qmax - zero, p = rintf(t / scale);
    p = p > lo ? p : lo;
    p = p < hi ? p : hi;
    return has_old && fabsf(t - scale * old) <= fabsf(t - scale * p) ? old : p;
}

QC_DEVICE float zero_at(const qc_cuda_round_args &a, int64_t i)
{
    return a.zeros ? (float)(uint8_t)qc_view(a.zeros)[i] : (a.qmax + 1) / 2;
}

/* Lane l of a warp holds the columns l, l + 32, ... of its row: sums in registers, so that a column's change
 * reaches all others by one shuffle. */
template <class S> QC_DEVICE void round_row(const qc_cuda_round_args &a, S c, int64_t row)
{
    bool sweep = a.inv != NULL;
    int lane = threadIdx.x % 32;
    float sum[PER_LANE], target[PER_LANE], error[PER_LANE], old[PER_LANE], scale[PER_LANE], zero[PER_LANE],
        inv[PER_LANE], was[PER_LANE];
    auto targets = qc_view(a.target) + (row * a.n + a.j0);
    auto errors = qc_view(a.error) + (row * a.n + a.j0);
    auto codes = qc_view(a.codes) + (row * a.n + a.j0);
    auto sums = qc_view(a.sum) + row * a.ld_sum;
    QC_UNROLL
    for (int q = 0; q < PER_LANE; q++) {
        int i = lane + 32 * q;
        sum[q] = target[q] = error[q] = was[q] = zero[q] = old[q] = inv[q] = 0;
        scale[q] = 1;
        if (i >= a.m)
            continue;
        int64_t g = row * a.n_groups + qc_view(a.group_of)[a.j0 + i];
        scale[q] = qc_view(a.scales)[g];
        zero[q] = zero_at(a, g);
        sum[q] = sums[i];
        target[q] = targets[i];
        if (sweep) {
            was[q] = errors[i];
            old[q] = (float)codes[i] - zero[q];
            inv[q] = qc_view(a.inv)[a.j0 + i];
        }
    }
    QC_UNROLL
    for (int q = 0; q < PER_LANE; q++)
        for (int l = 0; l < 32 && l + 32 * q < a.m; l++) {
            int j = l + 32 * q;
            float change = 0;
            if (lane == l) {
                float t =
                    target[q] + (sweep ? inv[q] * (sum[q] - c[j * QC_CUDA_TILE_LD + j] * was[q]) : sum[q]);
                float p = round_one(t, scale[q], zero[q], a.qmax, sweep, old[q]);
                error[q] = target[q] - scale[q] * p;
                old[q] = p;
                change = error[q] - was[q];
            }
            change = __shfl_sync(QC_FULL_WARP, change, l);
            QC_UNROLL
            for (int k = 0; k < PER_LANE; k++)
                if (lane + 32 * k > j && lane + 32 * k < a.m)
                    sum[k] = qc_mul_add(c[(lane + 32 * k) * QC_CUDA_TILE_LD + j], change, sum[k]);
        }
    QC_UNROLL
    for (int q = 0; q < PER_LANE; q++) {
        int i = lane + 32 * q;
        if (i >= a.m)
            continue;
        errors[i] = error[q];
        codes[i] = (uint8_t)(old[q] + zero[q]);
        if (sweep)
            qc_view(a.change)[row * a.m + i] = error[q] - was[q];
    }
}

QC_KERNEL(round_tile, round, QC_CUDA_THREADS)
{
    auto tile = qc_shared<float>();
    auto c = qc_view(a.c) + a.j0 * (a.n + 1);
    int m = (int)a.m;
    for (int i = threadIdx.x; i < m * m; i += blockDim.x)
        if (i % m <= i / m)
            tile[i / m * QC_CUDA_TILE_LD + i % m] = c[i / m * a.n + i % m];
    __syncthreads();
    int64_t n_warps = blockDim.x / 32;
    for (int64_t row = blockIdx.x * n_warps + threadIdx.x / 32; row < a.n_rows; row += gridDim.x * n_warps)
        round_row(a, tile, row);
}

QC_DEVICE float zero_of_group(const qc_cuda_fit_args &a, int64_t row)
{
    return a.zeros ? (float)qc_view(a.zeros)[row * a.n_groups + a.index] : (float)(1 << (a.bits - 1));
}

QC_KERNEL(fit_steps, fit, QC_CUDA_THREADS)
{
    int64_t at = qc_global_thread(), row = at / a.m, i = at % a.m;
    if (row < a.n_rows)
        qc_view(a.steps)[at] = (float)qc_view(a.codes)[row * a.n + a.at + i] - zero_of_group(a, row);
}

/* The scale that is best for the codes of a group, if it lowers the error; else the present one. */
QC_DEVICE float best_scale(const qc_cuda_fit_args &a, float scale, double num, double den)
{
    if (!(den > 0))
        return scale;
    float fitted = qc_stored_scale((float)((double)scale + num / den), a.scale_dtype, a.bits);
    double d = (double)fitted - (double)scale;
    return -2 * d * num + d * d * den < 0 ? fitted : scale;
}

QC_KERNEL(fit_scale, fit, QC_CUDA_THREADS)
{
    int64_t row = qc_global_thread() / 32;
    int lane = threadIdx.x % 32;
    if (row >= a.n_rows)
        return;
    auto steps = qc_view(a.steps) + row * a.m;
    auto fit = qc_view(a.fit) + row * a.m;
    auto sum = qc_view(a.sum) + row * a.ld_sum;
    auto target = qc_view(a.target) + (row * a.n + a.at);
    auto error = qc_view(a.error) + (row * a.n + a.at);
    auto scales = qc_view(a.scales) + (row * a.n_groups + a.index);
    double num = 0, den = 0;
    for (int64_t i = lane; i < a.m; i += 32) {
        double p = (double)steps[i];
        num += p * (double)sum[i];
        den += p * (double)fit[i];
    }
    float scale = scales[0], fitted = best_scale(a, scale, qc_warp_sum(num), qc_warp_sum(den));
    for (int64_t i = lane; i < a.m; i += 32) {
        float was = error[i], is = fitted != scale ? target[i] - fitted * steps[i] : was;
        error[i] = is;
        steps[i] = is - was;
    }
    if (lane == 0)
        scales[0] = fitted;
}

QC_KERNEL(row_dot, dot, QC_CUDA_THREADS)
{
    auto part = qc_shared<double>();
    auto x = qc_view(a.x) + blockIdx.x * a.n;
    auto y = qc_view(a.y) + blockIdx.x * a.n;
    double sum = 0;
    for (int64_t i = threadIdx.x; i < a.n; i += blockDim.x)
        sum += (double)x[i] * (double)y[i];
    sum = qc_block_sum(sum, part);
    if (threadIdx.x == 0)
        qc_view(a.ret)[blockIdx.x] = sum;
}
