/* Emulation of bf16 products for instruction sets without them: the halves of each word are two float32
 * values, products of bf16 values are exact in float32, and sums are multiply-adds. Included behind
 * kern_simd.h, whose vectors it uses. */
#ifndef QC_KERN_BF16_SIMD_H
#define QC_KERN_BF16_SIMD_H

#include "kern_bf16.h"
#include "kern_simd.h"
#include "qc_fp.h"

/* Sums of BR rows x one strip of columns stay in registers. */
enum { BV = QC_BF16_ROWS / VL, BR = VL == 16 ? 8 : 4 };

typedef uint32_t vu __attribute__((vector_size(VL * 4)));

INLINE vu load_words(const uint32_t *p)
{
    vu u;
    memcpy(&u, p, sizeof u);
    return u;
}

/* The even inputs of a word are its low halves. */
INLINE vf low_half(vu words)
{
    return (vf)(words << 16);
}
INLINE vf high_half(vu words)
{
    return (vf)(words & 0xffff0000u);
}

INLINE void emulated_rows(float sums[BR][QC_BF16_ROWS], const uint16_t *a, const uint16_t *b, int64_t n_tiles)
{
    vf sum[BR][BV];
    for (int i = 0; i < BR; i++)
        for (int v = 0; v < BV; v++)
            sum[i][v] = v_set1(0);
    for (int64_t t = 0; t < n_tiles; t++, a += QC_BF16_TILE, b += QC_BF16_TILE)
        for (int p = 0; p < QC_BF16_INPUTS / 2; p++) {
            vf even[BV], odd[BV];
#pragma GCC unroll 4
            for (int v = 0; v < BV; v++) {
                vu words = load_words((const uint32_t *)(const void *)b + p * QC_BF16_ROWS + v * VL);
                even[v] = low_half(words);
                odd[v] = high_half(words);
            }
#pragma GCC unroll 8
            for (int i = 0; i < BR; i++) {
                uint32_t word;
                memcpy(&word, a + i * QC_BF16_INPUTS + 2 * p, sizeof word);
                vu words = (vu){0} + word;
#pragma GCC unroll 4
                for (int v = 0; v < BV; v++) {
                    sum[i][v] = v_fma(low_half(words), even[v], sum[i][v]);
                    sum[i][v] = v_fma(high_half(words), odd[v], sum[i][v]);
                }
            }
        }
    for (int i = 0; i < BR; i++)
        for (int v = 0; v < BV; v++)
            v_store(&sums[i][v * VL], sum[i][v]);
}

static void product_emulated(float *c, int64_t ldc, const uint16_t *a, int64_t a_strip, const uint16_t *b,
                             int64_t b_strip, int64_t m, int64_t n, int64_t n_tiles, bool accumulate)
{
    float sums[BR][QC_BF16_ROWS];
    for (int64_t j = 0; j < n; j += QC_BF16_ROWS, b += b_strip)
        for (int64_t i = 0; i < m; i += BR) {
            int64_t cols = n - j < QC_BF16_ROWS ? n - j : QC_BF16_ROWS, rows = m - i < BR ? m - i : BR;
            emulated_rows(sums, a + i / QC_BF16_ROWS * a_strip + i % QC_BF16_ROWS * QC_BF16_INPUTS, b,
                          n_tiles);
            for (int64_t r = 0; r < rows; r++) {
                float *to = c + (i + r) * ldc + j;
                for (int64_t x = 0; x < cols; x++)
                    to[x] = accumulate ? to[x] + sums[r][x] : sums[r][x];
            }
        }
}

/* Whole tiles only: the compiler makes vector code of the loops over a row. */
static void pack_rows_emulated(uint16_t *dst, const float *src, int64_t lds, int64_t n, int64_t k,
                               bool column_tiles)
{
    uint32_t words[QC_BF16_ROWS][QC_BF16_INPUTS / 2];
    for (int64_t p0 = 0; p0 < k; p0 += QC_BF16_INPUTS, dst += QC_BF16_TILE) {
        int64_t n_inputs = k - p0 < QC_BF16_INPUTS ? k - p0 : QC_BF16_INPUTS;
        for (int64_t i = 0; i < QC_BF16_ROWS; i++) {
            float row[QC_BF16_INPUTS] = {0};
            if (i < n)
                memcpy(row, src + i * lds + p0, (size_t)n_inputs * sizeof *row);
            for (int w = 0; w < QC_BF16_INPUTS / 2; w++)
                words[i][w] = qc_f32_to_bf16(row[2 * w]) | (uint32_t)qc_f32_to_bf16(row[2 * w + 1]) << 16;
        }
        if (!column_tiles) {
            memcpy(dst, words, sizeof words);
            continue;
        }
        for (int w = 0; w < QC_BF16_INPUTS / 2; w++)
            for (int i = 0; i < QC_BF16_ROWS; i++)
                memcpy(dst + (w * QC_BF16_ROWS + i) * 2, &words[i][w], sizeof words[i][w]);
    }
}

static float softmax_emulated(uint16_t *weights, float *s, int64_t lo, int64_t hi, int64_t n,
                              qc_softmax_state *state)
{
    float shrink = softmax_simd(s, lo, hi, n, state);
    for (int64_t t = 0; t < n; t += QC_BF16_INPUTS, s += QC_BF16_INPUTS, weights += QC_BF16_TILE)
        for (int i = 0; i < QC_BF16_INPUTS; i++)
            weights[i] = qc_f32_to_bf16(s[i]);
    return shrink;
}

static void kern_bf16_slots(qc_kern_bf16 *kern, const char *name)
{
    kern->name = name;
    kern->pack_rows = pack_rows_emulated;
    kern->product = product_emulated;
    kern->softmax = softmax_emulated;
}

#endif
