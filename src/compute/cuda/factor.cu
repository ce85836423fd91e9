/* factor: A = R R^T with R upper triangular, by blocks of columns from the last to the first (the equations
 * stand in cpu/factor.c). The block on the diagonal in double by one block of threads, then Y = R_JJ^-1 A_JI
 * by a thread per column; the rest, A_II -= Y^T Y, is cuBLAS's. */
#include "kernel.cuh"

/* Right-looking, from the last pivot on. s[i, k], i <= k: what is left of A, then R. */
QC_KERNEL(factor_diagonal, factor, QC_CUDA_THREADS)
{
    auto s = qc_shared<double>();
    auto block = qc_view(a.a) + a.j0 * (a.n + 1);
    auto r = qc_view(a.r);
    auto state = qc_view(a.state);
    auto pivots = qc_view(a.pivots);
    int m = (int)a.m, ld = QC_CUDA_FACTOR;
    bool spoilt = state[0] >= 0;
    __syncthreads(); /* all have read what the first one may write below */
    if (spoilt)
        return;
    for (int i = threadIdx.x; i < m * m; i += blockDim.x)
        if (i % m <= i / m)
            s[i % m * ld + i / m] = (double)block[i / m * a.n + i % m];
    __syncthreads();
    for (int k = m - 1; k >= 0; k--) {
        double pivot = s[k * ld + k];
        if (!(pivot > 0 && pivot <= DBL_MAX)) {
            if (threadIdx.x == 0) {
                pivots[a.j0 + k] = pivot;
                state[0] = (int32_t)(a.j0 + k);
            }
            return;
        }
        double root = sqrt(pivot);
        __syncthreads();
        for (int i = threadIdx.x; i <= k; i += blockDim.x) {
            double v = i == k ? root : s[i * ld + k] / root;
            s[i * ld + k] = v;
            r[i * m + k] = (float)v;
            if (i < k)
                block[k * a.n + i] = (float)(v / root);
            else
                pivots[a.j0 + k] = root * root;
        }
        __syncthreads();
        for (int at = threadIdx.x; at < k * k; at += blockDim.x) {
            int i = at / k, l = at % k;
            if (i <= l)
                s[i * ld + l] -= s[i * ld + k] * s[l * ld + k];
        }
        __syncthreads();
    }
}

/* y of one column stays in shared memory, [m, threads]. */
QC_KERNEL(factor_panel, factor, QC_CUDA_FACTOR)
{
    auto y = qc_shared<float>() + threadIdx.x;
    auto r = qc_view(a.r);
    int64_t i = qc_global_thread();
    if (qc_view(a.state)[0] >= 0 || i >= a.j0)
        return;
    auto column = qc_view(a.a) + (a.j0 * a.n + i);
    auto out = qc_view(a.y) + i;
    int m = (int)a.m, ld = blockDim.x;
    for (int k = m - 1; k >= 0; k--) {
        float sum = column[k * a.n], pivot = r[k * m + k];
        for (int l = k + 1; l < m; l++)
            sum = qc_mul_add(-r[k * m + l], y[l * ld], sum);
        sum /= pivot;
        y[k * ld] = sum;
        out[k * a.j0] = sum;
        column[k * a.n] = sum / pivot;
    }
}

QC_KERNEL(divide_columns, divide, QC_CUDA_THREADS)
{
    int64_t at = qc_global_thread();
    if (at < a.n_rows * a.n)
        qc_view(a.b)[at] *= (float)(1 / qc_view(a.pivots)[at % a.n]);
}
