/* AVX512-BF16: packing by vcvtne2ps2bf16, products by vdpbf16ps, which adds the two products of a word to a
 * float32 lane. */
#include "kern_avx512_transpose.h"
#include "kern_bf16.h"

#include <immintrin.h>
#include <string.h>

/* Sums of DR rows x two strips of columns stay in registers. */
enum { DR = 8 };

static __m512 load_part(const float *p, int64_t n)
{
    if (n >= 16)
        return _mm512_loadu_ps(p);
    return _mm512_maskz_loadu_ps(n > 0 ? (__mmask16)((1u << n) - 1) : 0, p);
}

/* 32 values, those of lo first. */
static __m512i round_pair(__m512 lo, __m512 hi)
{
    return (__m512i)_mm512_cvtne2ps_pbh(hi, lo);
}

static void store_tile(uint16_t *dst, __m512i words[16], bool transpose)
{
    __m512 t[16];
    for (int i = 0; i < 16; i++)
        t[i] = _mm512_castsi512_ps(words[i]);
    if (transpose)
        v_transpose(t);
    for (int i = 0; i < 16; i++)
        _mm512_storeu_ps(dst + i * 32, t[i]);
}

static void pack_rows_bf16(uint16_t *dst, const float *src, int64_t lds, int64_t n, int64_t k,
                           bool column_tiles)
{
    for (int64_t p = 0; p < k; p += QC_BF16_INPUTS, dst += QC_BF16_TILE) {
        __m512i words[16];
        for (int64_t i = 0; i < 16; i++) {
            const float *row = src + i * lds + p;
            words[i] = i < n ? round_pair(load_part(row, k - p), load_part(row + 16, k - p - 16))
                             : _mm512_setzero_si512();
        }
        store_tile(dst, words, column_tiles);
    }
}

static void pack_inputs_bf16(uint16_t *dst, const float *src, int64_t lds, int64_t n, int64_t k,
                             bool column_tiles, bool negate)
{
    const __m512i sign = _mm512_set1_epi32(negate ? (int)0x80008000u : 0);
    const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    /* element 2 i of the result is element i, element 2 i + 1 is element 16 + i */
    const __m512i interleave =
        _mm512_or_si512(count, _mm512_slli_epi32(_mm512_add_epi32(count, _mm512_set1_epi32(16)), 16));
    for (int64_t p = 0; p < k; p += QC_BF16_INPUTS, dst += QC_BF16_TILE) {
        __m512i words[16];
        for (int64_t i = 0; i < 16; i++) {
            const float *even = src + (p + 2 * i) * lds, *odd = even + lds;
            int64_t left = k - p - 2 * i;
            __m512i pair = round_pair(load_part(even, left > 0 ? n : 0), load_part(odd, left > 1 ? n : 0));
            words[i] = _mm512_xor_si512(_mm512_permutexvar_epi16(interleave, pair), sign);
        }
        store_tile(dst, words, !column_tiles);
    }
}

static inline __attribute__((always_inline)) void dot_rows(int n_strips, __m512 sum[DR][2], const uint16_t *a,
                                                           const uint16_t *b, int64_t b_strip,
                                                           int64_t n_tiles)
{
    for (int i = 0; i < DR; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t t = 0; t < n_tiles; t++, a += QC_BF16_TILE, b += QC_BF16_TILE)
        for (int p = 0; p < 16; p++) {
            __m512i w[2] = {_mm512_loadu_si512(b + p * 32), _mm512_setzero_si512()};
            if (n_strips == 2)
                w[1] = _mm512_loadu_si512(b + b_strip + p * 32);
#pragma GCC unroll 8
            for (int i = 0; i < DR; i++) {
                int word;
                memcpy(&word, a + i * QC_BF16_INPUTS + 2 * p, sizeof word);
                __m512i x = _mm512_set1_epi32(word);
#pragma GCC unroll 2
                for (int v = 0; v < n_strips; v++)
                    sum[i][v] = _mm512_dpbf16_ps(sum[i][v], (__m512bh)x, (__m512bh)w[v]);
            }
        }
}

static void product_dot(float *c, int64_t ldc, const uint16_t *a, int64_t a_strip, const uint16_t *b,
                        int64_t b_strip, int64_t m, int64_t n, int64_t n_tiles, bool accumulate)
{
    __m512 sum[DR][2];
    for (int64_t j = 0; j < n; j += 32, b += 2 * b_strip)
        for (int64_t i = 0; i < m; i += DR) {
            const uint16_t *rows = a + i / 16 * a_strip + i % 16 * QC_BF16_INPUTS;
            if (n - j > 16)
                dot_rows(2, sum, rows, b, b_strip, n_tiles);
            else
                dot_rows(1, sum, rows, b, b_strip, n_tiles);
            for (int r = 0; r < DR && i + r < m; r++)
                for (int v = 0; v < 2 && j + 16 * v < n; v++) {
                    float *to = c + (i + r) * ldc + j + 16 * v;
                    int64_t left = n - j - 16 * v;
                    __mmask16 mask = left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1);
                    __m512 y = sum[r][v];
                    if (accumulate)
                        y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, to));
                    _mm512_mask_storeu_ps(to, mask, y);
                }
        }
}

/* 2^t within 3 u: 2^floor(t) p(t - floor(t)), p minimax of degree 5 on 0 .. 1 (own fit). NaN stays NaN; t is
 * not minus infinity. */
static inline __m512 exp2_weight(__m512 t)
{
    __m512 r = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(0.00186713f), _mm512_set1_ps(0.009017031f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.055799913f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24016444f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6931513f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1));
    return _mm512_scalef_ps(p, t);
}

/* Lanes lo <= i < hi of i = at .. at + 15. */
static inline __mmask16 lanes(int64_t at, int64_t lo, int64_t hi)
{
    const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i i = _mm512_add_epi32(count, _mm512_set1_epi32((int)at));
    return _mm512_cmpge_epi32_mask(i, _mm512_set1_epi32((int)lo)) &
           _mm512_cmplt_epi32_mask(i, _mm512_set1_epi32((int)hi));
}

/* Largest of s[lo .. hi - 1] and max. A NaN does not become it. */
static inline float row_max(const float *s, int64_t lo, int64_t hi, float max)
{
    __m512 m0 = _mm512_set1_ps(max), m1 = m0;
    int64_t i = lo;
    for (; i + 32 <= hi; i += 32) {
        m0 = _mm512_max_ps(_mm512_loadu_ps(s + i), m0);
        m1 = _mm512_max_ps(_mm512_loadu_ps(s + i + 16), m1);
    }
    for (; i < hi; i += 16) {
        __mmask16 mask = hi - i >= 16 ? 0xffff : (__mmask16)((1u << (hi - i)) - 1);
        m0 = _mm512_mask_max_ps(m0, mask, _mm512_maskz_loadu_ps(mask, s + i), m0);
    }
    return _mm512_reduce_max_ps(_mm512_max_ps(m0, m1));
}

/* exp(s - max) = 2^(s log2(e) - max log2(e)) */
static float softmax_bf16(uint16_t *weights, float *s, int64_t lo, int64_t hi, int64_t n,
                          qc_softmax_state *state)
{
    const float log2e = 1.44269504f;
    float max = row_max(s, lo, hi, state->max);
    __m512 slope = _mm512_set1_ps(log2e), at = _mm512_set1_ps(max * log2e);
    __m512 sum0 = _mm512_setzero_ps(), sum1 = sum0;
    for (int64_t i = 0; i < n; i += 32, weights += QC_BF16_TILE) {
        if (i + 32 <= lo || i >= hi) {
            _mm512_storeu_si512(weights, _mm512_setzero_si512());
            continue;
        }
        __m512 a = exp2_weight(_mm512_fmsub_ps(_mm512_loadu_ps(s + i), slope, at));
        __m512 b = exp2_weight(_mm512_fmsub_ps(_mm512_loadu_ps(s + i + 16), slope, at));
        if (i < lo || i + 32 > hi) {
            a = _mm512_maskz_mov_ps(lanes(i, lo, hi), a);
            b = _mm512_maskz_mov_ps(lanes(i + 16, lo, hi), b);
        }
        sum0 = _mm512_add_ps(sum0, a);
        sum1 = _mm512_add_ps(sum1, b);
        _mm512_storeu_si512(weights, round_pair(a, b));
    }
    float shrink = 1;
    if (max != state->max)
        shrink = _mm512_cvtss_f32(exp2_weight(_mm512_set1_ps((state->max - max) * log2e)));
    *state = (qc_softmax_state){.max = max,
                                .sum = state->sum * shrink + _mm512_reduce_add_ps(_mm512_add_ps(sum0, sum1))};
    return shrink;
}

void qc_kern_bf16_init_avx512bf16(qc_kern_bf16 *kern)
{
    *kern = (qc_kern_bf16){.name = "avx512bf16",
                           .pack_rows = pack_rows_bf16,
                           .pack_inputs = pack_inputs_bf16,
                           .product = product_dot,
                           .softmax = softmax_bf16};
}
