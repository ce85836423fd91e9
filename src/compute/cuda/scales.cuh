/* Scales as they are stored: the same bits as qc_quant_store_scales of kern_quant.c. */
#ifndef QC_CUDA_SCALES_CUH
#define QC_CUDA_SCALES_CUH

#include "kernel.cuh"

/* Ids of qc_dtype. */
#define QC_CUDA_F16  2
#define QC_CUDA_BF16 3

QC_DEVICE float qc_scale_floor(int dtype)
{
    return dtype == QC_CUDA_F16 ? 0x1p-24f : FLT_MIN;
}

QC_DEVICE float qc_scale_ceiling(int dtype, int bits)
{
    return dtype == QC_CUDA_F16 ? 65504.0f : ldexpf(1, 127 - bits);
}

/* Rounded to nearest even, never 0 and never so large that a decoded value could overflow. */
QC_DEVICE float qc_stored_scale(float s, int dtype, int bits)
{
    union {
        float f;
        uint32_t u;
    } v = {fabsf(s)};
    float a = v.f, small = (a + 0.5f) - 0.5f;
    int drop = dtype == QC_CUDA_F16 ? 13 : dtype == QC_CUDA_BF16 ? 16 : 0; /* mantissa bits that go */
    if (drop)
        v.u = (v.u + (1u << (drop - 1)) - 1 + ((v.u >> drop) & 1)) & ~((1u << drop) - 1);
    float least = qc_scale_floor(dtype), most = qc_scale_ceiling(dtype, bits);
    float r = dtype == QC_CUDA_F16 && a < 0x1p-14f ? small : v.f;
    r = r < least ? least : r;
    r = r > most ? most : r;
    return copysignf(r, s);
}

#endif
