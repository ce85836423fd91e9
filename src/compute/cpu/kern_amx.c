/* AMX: bf16 products by tdpbf16ps, 2 x 2 tiles of sums (32 x 32) at a time; packing is that of AVX512-BF16.
 * The instructions are written as assembly with a "memory" clobber: the intrinsics of gcc 12 hide from the
 * compiler what memory they read. Tile registers: 0 .. 3 sums, 4 5 left operand, 6 7 right operand. */
#include "kern_bf16.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

/* The operand of ldtilecfg: palette 1, eight tiles of 16 rows x 64 bytes. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} config = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::: "memory")
#define TILE_LOAD(t, p, stride_bytes)                                                                        \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((int64_t)(stride_bytes)) : "memory")
#define TILE_STORE(t, p, stride_bytes)                                                                       \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((int64_t)(stride_bytes)) : "memory")
#define TILE_PRODUCT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")

/* c[rows, cols] = or += sums[16, 16] */
static void store_part(float *c, int64_t ldc, const float *sums, int64_t rows, int64_t cols, bool accumulate)
{
    __mmask16 mask = cols >= 16 ? 0xffff : (__mmask16)((1u << cols) - 1);
    for (int64_t r = 0; r < rows && r < 16; r++) {
        __m512 y = _mm512_loadu_ps(sums + r * 16);
        if (accumulate)
            y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, c + r * ldc));
        _mm512_mask_storeu_ps(c + r * ldc, mask, y);
    }
}

#define SUM_BEGIN(t, p)                                                                                      \
    do {                                                                                                     \
        if (in_place && accumulate)                                                                          \
            TILE_LOAD(t, p, 4 * ldc);                                                                        \
        else                                                                                                 \
            TILE_ZERO(t);                                                                                    \
    } while (0)
#define SUM_END(t, p, rows, cols)                                                                            \
    do {                                                                                                     \
        if (in_place) {                                                                                      \
            TILE_STORE(t, p, 4 * ldc);                                                                       \
        } else {                                                                                             \
            TILE_STORE(t, sums, 64);                                                                         \
            store_part(p, ldc, sums, rows, cols, accumulate);                                                \
        }                                                                                                    \
    } while (0)

/* Ask for a row of 32 sums, which a block that follows will write. */
INLINE void prefetch_row(const float *row)
{
    __builtin_prefetch(row, 1);
    __builtin_prefetch(row + 16, 1);
}

/* R x C tiles (constants 1 or 2) of c, of which m x n elements exist. */
INLINE void tile_block(int R, int C, float *c, int64_t ldc, const uint16_t *a, int64_t a_strip,
                       const uint16_t *b, int64_t b_strip, int64_t m, int64_t n, int64_t n_tiles,
                       bool accumulate)
{
    float sums[256] __attribute__((aligned(64)));
    bool in_place = m >= 16 * R && n >= 16 * C;
    float *c1 = c + 16 * ldc;
    SUM_BEGIN(0, c);
    if (C > 1)
        SUM_BEGIN(1, c + 16);
    if (R > 1)
        SUM_BEGIN(2, c1);
    if (R > 1 && C > 1)
        SUM_BEGIN(3, c1 + 16);
    const float *ahead = c + 32 * ldc; /* the block below */
    for (int64_t t = 0; t < n_tiles; t++, a += QC_BF16_TILE, b += QC_BF16_TILE) {
        if (t < 16) {
            prefetch_row(ahead);
            prefetch_row(ahead + ldc);
            ahead += 2 * ldc;
        }
        TILE_LOAD(6, b, 64);
        TILE_LOAD(4, a, 64);
        TILE_PRODUCT(0, 4, 6);
        if (C > 1) {
            TILE_LOAD(7, b + b_strip, 64);
            TILE_PRODUCT(1, 4, 7);
        }
        if (R > 1) {
            TILE_LOAD(5, a + a_strip, 64);
            TILE_PRODUCT(2, 5, 6);
        }
        if (R > 1 && C > 1)
            TILE_PRODUCT(3, 5, 7);
    }
    SUM_END(0, c, m, n);
    if (C > 1)
        SUM_END(1, c + 16, m, n - 16);
    if (R > 1)
        SUM_END(2, c1, m - 16, n);
    if (R > 1 && C > 1)
        SUM_END(3, c1 + 16, m - 16, n - 16);
}

static void product_amx(float *c, int64_t ldc, const uint16_t *a, int64_t a_strip, const uint16_t *b,
                        int64_t b_strip, int64_t m, int64_t n, int64_t n_tiles, bool accumulate)
{
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
    for (int64_t j = 0; j < n; j += 32) {
        const uint16_t *right = b + j / 16 * b_strip;
        for (int64_t i = 0; i < m; i += 32) {
            const uint16_t *left = a + i / 16 * a_strip;
            float *to = c + i * ldc + j;
            if (m - i > 16 && n - j > 16)
                tile_block(2, 2, to, ldc, left, a_strip, right, b_strip, m - i, n - j, n_tiles, accumulate);
            else if (m - i > 16)
                tile_block(2, 1, to, ldc, left, a_strip, right, b_strip, m - i, n - j, n_tiles, accumulate);
            else if (n - j > 16)
                tile_block(1, 2, to, ldc, left, a_strip, right, b_strip, m - i, n - j, n_tiles, accumulate);
            else
                tile_block(1, 1, to, ldc, left, a_strip, right, b_strip, m - i, n - j, n_tiles, accumulate);
        }
    }
    __asm__ volatile("tilerelease" ::: "memory");
}

void qc_kern_bf16_init_amx(qc_kern_bf16 *kern)
{
    kern->name = "amx";
    kern->product = product_amx;
}
