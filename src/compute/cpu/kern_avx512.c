/* AVX-512 (F, BW, DQ, VL): 16 lanes; a tile of 12 x 32 sums takes 24 of the 32 registers. */
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

/* Pairs, then fours, then the 128-bit quarters. */
static inline void v_transpose(vf r[16])
{
    vf t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int h = 0; h < 2; h++) {
            __m512d a = _mm512_castps_pd(t[i + h]), b = _mm512_castps_pd(t[i + 2 + h]);
            r[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    for (int i = 0; i < 4; i++) {
        vf lo = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), hi = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        vf lo2 = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88),
           hi2 = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
        t[i] = _mm512_shuffle_f32x4(lo, lo2, 0x88);
        t[i + 8] = _mm512_shuffle_f32x4(lo, lo2, 0xdd);
        t[i + 4] = _mm512_shuffle_f32x4(hi, hi2, 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(hi, hi2, 0xdd);
    }
    for (int i = 0; i < 16; i++)
        r[i] = t[i];
}

#include "kern_simd.h"

void qc_kern_init_avx512(qc_kern *kern)
{
    kern_slots(kern, "avx512");
}
