/* Scalar reference of the bf16 kernels: operands rounded, sums in double, rounded once. */
#include "kern_bf16.h"
#include "qc_fp.h"

#include <math.h>

/* Element of a tile that holds row or column i and input p. */
static int64_t place(int64_t i, int64_t p, bool column_tile)
{
    return column_tile ? (p / 2 * QC_BF16_ROWS + i) * 2 + p % 2 : i * QC_BF16_INPUTS + p;
}

/* Element i, p of the matrix is src[i * step + p * input_step]. */
static void pack_strip(uint16_t *dst, const float *src, int64_t step, int64_t input_step, int64_t n,
                       int64_t k, bool column_tiles, uint16_t sign)
{
    for (int64_t p0 = 0; p0 < k; p0 += QC_BF16_INPUTS, dst += QC_BF16_TILE)
        for (int64_t i = 0; i < QC_BF16_ROWS; i++)
            for (int64_t p = 0; p < QC_BF16_INPUTS; p++) {
                bool exists = i < n && p0 + p < k;
                dst[place(i, p, column_tiles)] =
                    exists ? qc_f32_to_bf16(src[i * step + (p0 + p) * input_step]) ^ sign : 0;
            }
}

static void pack_rows_ref(uint16_t *dst, const float *src, int64_t lds, int64_t n, int64_t k,
                          bool column_tiles)
{
    pack_strip(dst, src, lds, 1, n, k, column_tiles, 0);
}

static void pack_inputs_ref(uint16_t *dst, const float *src, int64_t lds, int64_t n, int64_t k,
                            bool column_tiles, bool negate)
{
    pack_strip(dst, src, 1, lds, n, k, column_tiles, negate ? 0x8000 : 0);
}

static void product_ref(float *c, int64_t ldc, const uint16_t *a, int64_t a_strip, const uint16_t *b,
                        int64_t b_strip, int64_t m, int64_t n, int64_t n_tiles, bool accumulate)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            const uint16_t *row = a + i / QC_BF16_ROWS * a_strip, *col = b + j / QC_BF16_ROWS * b_strip;
            double sum = accumulate ? (double)c[i * ldc + j] : 0;
            for (int64_t p = 0; p < n_tiles * QC_BF16_INPUTS; p++) {
                int64_t tile = p / QC_BF16_INPUTS * QC_BF16_TILE, in_tile = p % QC_BF16_INPUTS;
                float x = qc_bf16_to_f32(row[tile + place(i % QC_BF16_ROWS, in_tile, false)]);
                float w = qc_bf16_to_f32(col[tile + place(j % QC_BF16_ROWS, in_tile, true)]);
                sum += (double)x * (double)w;
            }
            c[i * ldc + j] = (float)sum;
        }
}

static float softmax_ref(uint16_t *weights, float *s, int64_t lo, int64_t hi, int64_t n,
                         qc_softmax_state *state)
{
    float max = state->max;
    for (int64_t i = lo; i < hi; i++)
        max = s[i] > max ? s[i] : max;
    double shrink = exp((double)state->max - (double)max), sum = shrink * (double)state->sum;
    for (int64_t i = 0; i < n; i++) {
        double weight = i >= lo && i < hi ? exp((double)s[i] - (double)max) : 0;
        sum += weight;
        weights[i / QC_BF16_INPUTS * QC_BF16_TILE + i % QC_BF16_INPUTS] = qc_f32_to_bf16((float)weight);
    }
    *state = (qc_softmax_state){.max = max, .sum = (float)sum};
    return (float)shrink;
}

void qc_kern_bf16_init_ref(qc_kern_bf16 *kern)
{
    *kern = (qc_kern_bf16){.name = "scalar",
                           .pack_rows = pack_rows_ref,
                           .pack_inputs = pack_inputs_ref,
                           .product = product_ref,
                           .softmax = softmax_ref};
}
