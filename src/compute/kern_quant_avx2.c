/* Loops of kern_quant.h with AVX2: a vector of 16 is a pair of 8. */
#include <immintrin.h>
#include <stdint.h>

typedef struct vf {
    __m256 a, b; /* elements 0 .. 7, 8 .. 15 */
} vf;

static inline vf vf_load(const float *p)
{
    return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}

static inline vf vf_load_n(const float *p, int64_t n)
{
    float t[16] = {0};
    for (int64_t i = 0; i < n; i++)
        t[i] = p[i];
    return vf_load(t);
}

static inline vf vf_set1(float f)
{
    return (vf){_mm256_set1_ps(f), _mm256_set1_ps(f)};
}

static inline vf vf_zero(void)
{
    return (vf){_mm256_setzero_ps(), _mm256_setzero_ps()};
}

#define PAIRWISE(name, op)                                                                                   \
    static inline vf name(vf x, vf y)                                                                        \
    {                                                                                                        \
        return (vf){op(x.a, y.a), op(x.b, y.b)};                                                             \
    }
PAIRWISE(vf_add, _mm256_add_ps)
PAIRWISE(vf_sub, _mm256_sub_ps)
PAIRWISE(vf_mul, _mm256_mul_ps)
PAIRWISE(vf_div, _mm256_div_ps)
PAIRWISE(vf_min, _mm256_min_ps)
PAIRWISE(vf_max, _mm256_max_ps)

static inline vf vf_round(vf v)
{
    return (vf){_mm256_round_ps(v.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                _mm256_round_ps(v.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

/* Fold 8 lanes with an operation: i with i + 4, + 2, + 1. */
#define FOLD8(op, v)                                                                                         \
    __m128 q = op(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));                                   \
    q = op(q, _mm_movehl_ps(q, q));                                                                          \
    return _mm_cvtss_f32(op(q, _mm_shuffle_ps(q, q, 1)))

static inline float vf_fold(vf v)
{
    __m256 o = _mm256_add_ps(v.a, v.b);
    FOLD8(_mm_add_ps, o);
}

static inline float vf_fold_min(vf v)
{
    __m256 o = _mm256_min_ps(v.a, v.b);
    FOLD8(_mm_min_ps, o);
}

static inline float vf_fold_max(vf v)
{
    __m256 o = _mm256_max_ps(v.a, v.b);
    FOLD8(_mm_max_ps, o);
}

static inline int count_outside8(__m256 v, __m256 lo, __m256 hi)
{
    __m256 m = _mm256_or_ps(_mm256_cmp_ps(v, lo, _CMP_LT_OQ), _mm256_cmp_ps(v, hi, _CMP_GT_OQ));
    return __builtin_popcount((unsigned)_mm256_movemask_ps(m));
}

static inline int vf_count_outside(vf v, vf lo, vf hi)
{
    return count_outside8(v.a, lo.a, hi.a) + count_outside8(v.b, lo.b, hi.b);
}

static inline void vf_store_u8(uint8_t *p, vf v)
{
    /* the pack works within 128-bit halves: 0-3, 8-11, 4-7, 12-15 */
    __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b));
    w = _mm256_permute4x64_epi64(w, 0xd8);
    _mm_storeu_si128((__m128i *)p,
                     _mm_packus_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}

static inline void add_squares4(double *sum, __m128 v, __m128 h, int weighted)
{
    __m256d d = _mm256_cvtps_pd(v), sq = _mm256_mul_pd(d, d);
    sq = weighted ? _mm256_mul_pd(sq, _mm256_cvtps_pd(h)) : sq;
    _mm256_storeu_pd(sum, _mm256_add_pd(_mm256_loadu_pd(sum), sq));
}

static inline void vf_add_squares(double *sum, vf v, const vf *h)
{
    vf w = h ? *h : vf_zero();
    add_squares4(sum, _mm256_castps256_ps128(v.a), _mm256_castps256_ps128(w.a), h != 0);
    add_squares4(sum + 4, _mm256_extractf128_ps(v.a, 1), _mm256_extractf128_ps(w.a, 1), h != 0);
    add_squares4(sum + 8, _mm256_castps256_ps128(v.b), _mm256_castps256_ps128(w.b), h != 0);
    add_squares4(sum + 12, _mm256_extractf128_ps(v.b, 1), _mm256_extractf128_ps(w.b, 1), h != 0);
}

#include "kern_quant_simd.h"

void qc_kern_init_quant_avx2(qc_kern *kern)
{
    kern->quantize_row = quantize_row;
}
