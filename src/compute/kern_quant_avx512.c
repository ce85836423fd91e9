/* Loops of kern_quant.h with AVX-512 (F, BW, DQ, VL). */
#include <immintrin.h>
#include <stdint.h>

typedef __m512 vf;

static inline vf vf_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

static inline vf vf_load_n(const float *p, int64_t n)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}

static inline vf vf_set1(float f)
{
    return _mm512_set1_ps(f);
}

static inline vf vf_zero(void)
{
    return _mm512_setzero_ps();
}

#define vf_add      _mm512_add_ps
#define vf_sub      _mm512_sub_ps
#define vf_mul      _mm512_mul_ps
#define vf_div      _mm512_div_ps
#define vf_min      _mm512_min_ps
#define vf_max      _mm512_max_ps
#define vf_round(v) _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

static inline __m256 low_half(vf v)
{
    return _mm512_castps512_ps256(v);
}

static inline __m256 high_half(vf v)
{
    return _mm512_extractf32x8_ps(v, 1);
}

/* Fold 8 lanes with an operation: i with i + 4, + 2, + 1. */
#define FOLD8(op, v)                                                                                         \
    __m128 q = op(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));                                   \
    q = op(q, _mm_movehl_ps(q, q));                                                                          \
    return _mm_cvtss_f32(op(q, _mm_shuffle_ps(q, q, 1)))

static inline float vf_fold(vf v)
{
    __m256 o = _mm256_add_ps(low_half(v), high_half(v));
    FOLD8(_mm_add_ps, o);
}

static inline float vf_fold_min(vf v)
{
    __m256 o = _mm256_min_ps(low_half(v), high_half(v));
    FOLD8(_mm_min_ps, o);
}

static inline float vf_fold_max(vf v)
{
    __m256 o = _mm256_max_ps(low_half(v), high_half(v));
    FOLD8(_mm_max_ps, o);
}

static inline int vf_count_outside(vf v, vf lo, vf hi)
{
    unsigned m = _mm512_cmp_ps_mask(v, lo, _CMP_LT_OQ) | _mm512_cmp_ps_mask(v, hi, _CMP_GT_OQ);
    return __builtin_popcount(m);
}

static inline void vf_store_u8(uint8_t *p, vf v)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}

static inline __m512d add_squares8(__m512d sum, __m256 v, __m256 h, int weighted)
{
    __m512d d = _mm512_cvtps_pd(v), sq = _mm512_mul_pd(d, d);
    return _mm512_add_pd(sum, weighted ? _mm512_mul_pd(sq, _mm512_cvtps_pd(h)) : sq);
}

static inline void vf_add_squares(double *sum, vf v, const vf *h)
{
    vf w = h ? *h : vf_zero();
    _mm512_storeu_pd(sum, add_squares8(_mm512_loadu_pd(sum), low_half(v), low_half(w), h != 0));
    _mm512_storeu_pd(sum + 8, add_squares8(_mm512_loadu_pd(sum + 8), high_half(v), high_half(w), h != 0));
}

#include "kern_quant_simd.h"

void qc_kern_init_quant_avx512(qc_kern *kern)
{
    kern->quantize_row = quantize_row;
}
