/* Conversions between float32 and the 16-bit float types. Round to nearest, ties to even; NaN stays NaN
 * (quiet), overflow becomes infinity, subnormals are kept. Header-only, so that kernels of any ISA can inline
 * them. */
#ifndef QC_FP_H
#define QC_FP_H

#include <stdint.h>
#include <string.h>

/* The largest finite float16. */
#define QC_F16_MAX 65504.0f

static inline uint32_t qc_f32_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float qc_f32_from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float qc_bf16_to_f32(uint16_t h)
{
    return qc_f32_from_bits((uint32_t)h << 16);
}

static inline uint16_t qc_f32_to_bf16(float x)
{
    uint32_t u = qc_f32_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

/* Masks instead of branches, so that loops over it become vector code. */
static inline float qc_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, a = (uint32_t)(h & 0x7fff) << 13;
    uint32_t tiny = qc_f32_bits((float)(int32_t)(h & 0x3ff) * 0x1p-24f); /* value of a zero or subnormal */
    uint32_t is_tiny = 0u - (uint32_t)((h & 0x7c00) == 0),
             is_special = 0u - (uint32_t)((h & 0x7c00) == 0x7c00);
    uint32_t u = (a + (112u << 23)) | (0x7f800000u & is_special);
    return qc_f32_from_bits(sign | (u & ~is_tiny) | (tiny & is_tiny));
}

static inline uint16_t qc_f32_to_f16(float x)
{
    uint32_t u = qc_f32_bits(x), a = u & 0x7fffffffu;
    uint16_t sign = (uint16_t)((u >> 16) & 0x8000);
    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00 | ((a >> 13) & 0x3ff));
    if (a >= 0x477ff000u) /* 65520: rounds beyond the largest finite value 65504 */
        return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000u) { /* below 2^-14: let float32 addition round at 2^-24 */
        float y = qc_f32_from_bits(a) + 0.5f;
        return (uint16_t)(sign | (qc_f32_bits(y) - 0x3f000000u));
    }
    a += 0xfffu + ((a >> 13) & 1);
    return (uint16_t)(sign | ((a - 0x38000000u) >> 13));
}

#endif
