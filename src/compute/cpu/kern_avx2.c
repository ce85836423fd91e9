/* AVX2 with FMA: 8 lanes; a tile of 6 x 16 sums takes 12 of the 16 registers. */
#include <immintrin.h>

#define VL  8
#define MR  6
#define NRV 2
typedef __m256 vf;

static inline vf v_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
static inline void v_store(float *p, vf a)
{
    _mm256_storeu_ps(p, a);
}
static inline __m256i first_lanes(int n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vf v_loadn(const float *p, int n)
{
    return _mm256_maskload_ps(p, first_lanes(n));
}
static inline void v_storen(float *p, int n, vf a)
{
    _mm256_maskstore_ps(p, first_lanes(n), a);
}
static inline vf v_set1(float x)
{
    return _mm256_set1_ps(x);
}
static inline vf v_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}
static inline vf v_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}
static inline vf v_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}
static inline vf v_round(vf a)
{
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline vf power_of_two(__m256i n)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
/* In two steps, as 2^n itself may lie outside the normal numbers. */
static inline vf v_ldexp(vf p, vf n)
{
    __m256i i = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(i, 1);
    return _mm256_mul_ps(_mm256_mul_ps(p, power_of_two(half)), power_of_two(_mm256_sub_epi32(i, half)));
}
static inline float v_hsum(vf a)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float v_hmax(vf a)
{
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

static inline void v_transpose(vf r[8])
{
    vf t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int h = 0; h < 2; h++) {
            r[i + 2 * h] = _mm256_shuffle_ps(t[i + h], t[i + 2 + h], 0x44);
            r[i + 2 * h + 1] = _mm256_shuffle_ps(t[i + h], t[i + 2 + h], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        vf lo = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20),
           hi = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
        r[i] = lo;
        r[i + 4] = hi;
    }
}

#include "kern_bf16_simd.h"
#include "kern_simd.h"

void qc_kern_init_avx2(qc_kern *kern)
{
    kern_slots(kern, "avx2");
}

void qc_kern_bf16_init_avx2(qc_kern_bf16 *kern)
{
    kern_bf16_slots(kern, "avx2");
}
