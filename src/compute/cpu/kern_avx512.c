/* AVX-512 (F, BW, DQ, VL): 16 lanes; a tile of 12 x 32 sums takes 24 of the 32 registers. */
#include "kern_avx512_transpose.h"

#include <immintrin.h>

#define VL  16
#define MR  12
#define NRV 2
typedef __m512 vf;

static inline vf v_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
static inline void v_store(float *p, vf a)
{
    _mm512_storeu_ps(p, a);
}
static inline vf v_loadn(const float *p, int n)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
static inline void v_storen(float *p, int n, vf a)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a);
}
static inline vf v_set1(float x)
{
    return _mm512_set1_ps(x);
}
static inline vf v_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
static inline vf v_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}
static inline vf v_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}
static inline vf v_round(vf a)
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline vf v_ldexp(vf p, vf n)
{
    return _mm512_scalef_ps(p, n);
}
static inline float v_hsum(vf a)
{
    return _mm512_reduce_add_ps(a);
}
static inline float v_hmax(vf a)
{
    return _mm512_reduce_max_ps(a);
}

#include "kern_bf16_simd.h"
#include "kern_simd.h"

void qc_kern_init_avx512(qc_kern *kern)
{
    kern_slots(kern, "avx512");
}

void qc_kern_bf16_init_avx512(qc_kern_bf16 *kern)
{
    kern_bf16_slots(kern, "avx512");
}
