/* Kernels of products with bfloat16 operands and float32 sums (compute: bf16). Operands are rounded (nearest
 * even, NaN stays NaN) and packed into tiles of 512 elements, 1 KiB:
 *   row tile     16 rows x 32 inputs, element [row][input]: the left operand
 *   column tile  32 inputs x 16 columns, element [input / 2][column][input % 2]: the right operand
 * Seen as 16 x 16 words of 32 bits each form is the transpose of the other. A strip is the tiles of all
 * inputs of 16 rows or columns, one after the other; rows, columns and inputs that do not exist hold zeros.
 * All instruction sets share the forms. The processor's own bf16 instructions (not the emulations) take
 * subnormal operands and sums as 0. */
#ifndef QC_KERN_BF16_H
#define QC_KERN_BF16_H

#include "kern.h"

enum {
    QC_BF16_ROWS = 16,   /* rows or columns of a tile */
    QC_BF16_INPUTS = 32, /* inputs of a tile */
    QC_BF16_TILE = 512   /* elements of a tile */
};

/* Kernels may be handed any number of rows and columns, but reuse tiles best in blocks of this many. */
#define QC_BF16_BLOCK 32

typedef struct qc_kern_bf16 {
    const char *name; /* of the instruction set that multiplies */

    /* One strip of row or column tiles from src[n, k] (stride lds), n <= 16. */
    void (*pack_rows)(uint16_t *dst, const float *src, int64_t lds, int64_t n, int64_t k, bool column_tiles);
    /* The same from src[k, n]: the matrix is stored input by input. With negate the values change sign. */
    void (*pack_inputs)(uint16_t *dst, const float *src, int64_t lds, int64_t n, int64_t k, bool column_tiles,
                        bool negate);
    /* c[m, n] = a b, or += with accumulate, over n_tiles tiles of inputs: strips of row tiles a and of column
     * tiles b, the next strip a_strip, b_strip elements further. Nothing outside c[m, n] is written. */
    void (*product)(float *c, int64_t ldc, const uint16_t *a, int64_t a_strip, const uint16_t *b,
                    int64_t b_strip, int64_t m, int64_t n, int64_t n_tiles, bool accumulate);
    /* One row of a block of attention scores s[n], n a multiple of 32: weight i = exp(s[i] - new max),
     * rounded, where lo <= i < hi (lo < hi), else 0, goes to element i % 32 of the row at `weights` in row
     * tile i / 32. *state moves on; its sum is of weights before rounding. Returns exp(old max - new max). s
     * is lost. */
    float (*softmax)(uint16_t *weights, float *s, int64_t lo, int64_t hi, int64_t n, qc_softmax_state *state);
} qc_kern_bf16;

/* Fill *kern for a processor with the features `cpu_flags`: AMX, else AVX512-BF16, else emulation. */
void qc_kern_bf16_init(qc_kern_bf16 *kern, uint32_t cpu_flags);

/* Each overwrites the slots it has. */
void qc_kern_bf16_init_ref(qc_kern_bf16 *kern);
void qc_kern_bf16_init_avx2(qc_kern_bf16 *kern);
void qc_kern_bf16_init_avx512(qc_kern_bf16 *kern);
void qc_kern_bf16_init_neon(qc_kern_bf16 *kern);
void qc_kern_bf16_init_avx512bf16(qc_kern_bf16 *kern);
void qc_kern_bf16_init_amx(qc_kern_bf16 *kern);

#endif
