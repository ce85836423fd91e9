/* 16 x 16 words in registers, shared by the kernels of AVX-512. */
#ifndef QC_KERN_AVX512_TRANSPOSE_H
#define QC_KERN_AVX512_TRANSPOSE_H

#include <immintrin.h>

/* Pairs, then fours, then the 128-bit quarters. */
static inline void v_transpose(__m512 r[16])
{
    __m512 t[16];
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
        __m512 lo = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88),
               hi = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        __m512 lo2 = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88),
               hi2 = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
        t[i] = _mm512_shuffle_f32x4(lo, lo2, 0x88);
        t[i + 8] = _mm512_shuffle_f32x4(lo, lo2, 0xdd);
        t[i + 4] = _mm512_shuffle_f32x4(hi, hi2, 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(hi, hi2, 0xdd);
    }
    for (int i = 0; i < 16; i++)
        r[i] = t[i];
}

#endif
