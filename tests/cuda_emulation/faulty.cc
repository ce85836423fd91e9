/* Kernels with one fault each, to see that the emulator finds it (tests/compute/t_cuda.c). */
#include "kernel.cuh"

/* n elements of y; every kernel runs with 64 threads and 256 bytes of shared memory. */
QC_KERNEL(faulty_none, pair, 64)
{
    auto s = qc_shared<float>();
    s[threadIdx.x] = (float)threadIdx.x;
    __syncthreads();
    qc_view(a.y)[threadIdx.x] = s[63 - threadIdx.x] + __shfl_xor_sync(QC_FULL_WARP, 1.0f, 1);
}

QC_KERNEL(faulty_read, pair, 64)
{
    float v = qc_view(a.y)[threadIdx.x + 1]; /* the last thread */
    qc_view(a.y)[0] = v;
}

QC_KERNEL(faulty_write, pair, 64)
{
    qc_view(a.y)[(int64_t)threadIdx.x - 1] = 1; /* the first thread */
}

QC_KERNEL(faulty_vector, pair, 64)
{
    qc_store4(qc_view(a.y), qc_load4(qc_view(a.y) + 1));
}

QC_KERNEL(faulty_barrier, pair, 64)
{
    auto s = qc_shared<float>();
    s[threadIdx.x] = 1;
    qc_view(a.y)[threadIdx.x] = s[threadIdx.x ^ 1];
}

/* The order of the threads happens to be right; what is read is written again too early. */
QC_KERNEL(faulty_reuse, pair, 64)
{
    auto s = qc_shared<float>();
    s[threadIdx.x] = 1;
    __syncthreads();
    float v = s[threadIdx.x ^ 32];
    s[threadIdx.x] = v;
}

QC_KERNEL(faulty_unwritten, pair, 64)
{
    qc_view(a.y)[threadIdx.x] = qc_shared<float>()[threadIdx.x];
}

QC_KERNEL(faulty_shared, pair, 64)
{
    qc_shared<float>()[threadIdx.x + 1] = 1;
}

QC_KERNEL(faulty_exit, pair, 64)
{
    if (threadIdx.x < 32)
        __syncthreads();
    qc_view(a.y)[threadIdx.x] = 1;
}

QC_KERNEL(faulty_shuffle, pair, 64)
{
    float v = 1;
    if (threadIdx.x % 2)
        v = __shfl_xor_sync(QC_FULL_WARP, v, 1);
    qc_view(a.y)[threadIdx.x] = v;
}
