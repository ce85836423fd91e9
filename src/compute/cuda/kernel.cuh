/* What every kernel file includes: the few words in which nvcc and the emulator of tests/cuda_emulation
 * differ. A kernel is QC_KERNEL(name, arguments, most threads of a block) { ... } with its arguments in `a`;
 * pointers are read through qc_view, shared memory through qc_shared. */
#ifndef QC_CUDA_KERNEL_CUH
#define QC_CUDA_KERNEL_CUH

#include "kernels.h"

#include <float.h>
#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__

#define QC_KERNEL(name, args, threads)                                                                       \
    extern "C" __global__ void __launch_bounds__(threads, 1) qc_cuda_##name(const qc_cuda_##args##_args a)
#define QC_DEVICE __device__ __forceinline__
#define QC_UNROLL _Pragma("unroll")

template <class T> QC_DEVICE T *qc_view(T *p)
{
    return p;
}

/* The dynamic shared memory of the block. */
template <class T> QC_DEVICE T *qc_shared()
{
    extern __shared__ double2 qc_dynamic_shared[];
    return reinterpret_cast<T *>(qc_dynamic_shared);
}

/* Four elements at a multiple of 16 bytes. */
QC_DEVICE float4 qc_load4(const float *p)
{
    return *reinterpret_cast<const float4 *>(p);
}

QC_DEVICE void qc_store4(float *p, float4 v)
{
    *reinterpret_cast<float4 *>(p) = v;
}

/* Fused in one rounding, or not: where either will do. */
QC_DEVICE float qc_mul_add(float x, float y, float z)
{
    return __fmaf_rn(x, y, z);
}

#else
#include "emulation.h"
#endif

#define QC_FULL_WARP 0xffffffffu

QC_DEVICE int64_t qc_global_thread()
{
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

template <class T> QC_DEVICE T qc_warp_sum(T v)
{
    for (int i = 16; i > 0; i /= 2)
        v += __shfl_xor_sync(QC_FULL_WARP, v, i);
    return v;
}

QC_DEVICE float qc_warp_max(float v)
{
    for (int i = 16; i > 0; i /= 2) {
        float other = __shfl_xor_sync(QC_FULL_WARP, v, i);
        v = other > v ? other : v;
    }
    return v;
}

/* Sum over the block in a fixed order, for every thread. part: one element per warp. Ends with a barrier. */
template <class T, class P> QC_DEVICE T qc_block_sum(T v, P part)
{
    int warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    v = qc_warp_sum(v);
    if (threadIdx.x % 32 == 0)
        part[warp] = v;
    __syncthreads();
    T sum = part[0];
    for (int i = 1; i < n_warps; i++)
        sum += part[i];
    __syncthreads();
    return sum;
}

/* Nearest bfloat16, halves to even, as a float. NaN stays NaN. */
QC_DEVICE uint32_t qc_bf16_bits(float x)
{
    union {
        float f;
        uint32_t u;
    } v = {x};
    return (v.u & 0x7fffffffu) > 0x7f800000u ? (v.u >> 16) | 0x40u
                                             : (v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16;
}

QC_DEVICE float qc_round_bf16(float x)
{
    union {
        uint32_t u;
        float f;
    } v = {qc_bf16_bits(x) << 16};
    return v.f;
}

#endif
