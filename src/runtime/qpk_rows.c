/* Rows of a tensor as float32 or as codes. Plain loops of fixed length over bytes and 64-bit words, which
 * compilers turn into vector code; the same results on every processor. */
#include "qpk_format.h"
#include "qpk_internal.h"

enum {
    TILE = QPK_TILE_ROWS,
    BLOCK = QPK_BLOCK_COLS,
    STEP_COLS = 4,
    STEPS = BLOCK / STEP_COLS,
    STEP_BYTES = 64
};

static inline float f32_from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Without branches: exponent and mantissa moved into place stand for value * 2^-112, exact also for
 * subnormals. */
static inline float f16_to_f32(uint16_t h)
{
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    float scaled = f32_from_bits(magnitude) * 0x1p112f;
    uint32_t u;
    memcpy(&u, &scaled, sizeof u);
    uint32_t special = magnitude | 0x7f800000u; /* infinity or NaN */
    return f32_from_bits(sign | (magnitude >= 0x0f800000u ? special : u));
}

static inline float bf16_to_f32(uint16_t h)
{
    return f32_from_bits((uint32_t)h << 16);
}

#define CONVERT(type, expr)                                                                                  \
    for (int64_t i = 0; i < n_elems; i++) {                                                                  \
        type v;                                                                                              \
        memcpy(&v, src + (size_t)i * sizeof v, sizeof v);                                                    \
        dst[i] = expr;                                                                                       \
    }                                                                                                        \
    return QPK_OK

/* Dense elements to float32; src need not be aligned. */
static int dense_to_f32(unsigned dtype, const uint8_t *src, int64_t n_elems, float *dst)
{
    switch (dtype) {
    case QPK_F32:
        memcpy(dst, src, (size_t)n_elems * sizeof *dst);
        return QPK_OK;
    case QPK_F16:
        CONVERT(uint16_t, f16_to_f32(v));
    case QPK_BF16:
        CONVERT(uint16_t, bf16_to_f32(v));
    case QPK_F64:
        CONVERT(double, (float)v);
    case QPK_I8:
        CONVERT(int8_t, (float)v);
    case QPK_U8:
    case QPK_BOOL:
        CONVERT(uint8_t, (float)v);
    case QPK_I16:
        CONVERT(int16_t, (float)v);
    case QPK_U16:
        CONVERT(uint16_t, (float)v);
    case QPK_I32:
        CONVERT(int32_t, (float)v);
    default:
        return QPK_E_UNSUPPORTED;
    }
}

/* Add bits of one plane of width w to the codes of a block: codes[STEPS][STEP_BYTES] |= plane << shift. The
 * plane has w units of 64 bytes; a unit holds 8 / w steps, the first in the lowest bits of every byte. */
static inline __attribute__((always_inline)) void unpack_plane(const uint8_t *plane, int w, int shift,
                                                               uint8_t *codes)
{
    const uint64_t mask = 0x0101010101010101u * ((1u << w) - 1u);
    int steps_per_unit = 8 / w;
    for (int step = 0; step < STEPS; step++) {
        const uint8_t *unit = plane + step / steps_per_unit * STEP_BYTES;
        int down = w * (step % steps_per_unit);
        uint8_t *out = codes + step * STEP_BYTES;
        for (int i = 0; i < STEP_BYTES; i += 8) {
            uint64_t x, y;
            memcpy(&x, unit + i, sizeof x);
            memcpy(&y, out + i, sizeof y);
            y |= ((x >> down) & mask) << shift;
            memcpy(out + i, &y, sizeof y);
        }
    }
}

/* codes[STEPS][16 rows][4 columns] of one block of 64 * bits bytes. */
static void unpack_block(const uint8_t *block, int bits, uint8_t *codes)
{
    int low = 0;
    if (bits == 8) {
        memcpy(codes, block, STEPS * STEP_BYTES);
        return;
    }
    memset(codes, 0, STEPS * STEP_BYTES);
    if (bits & 4) {
        unpack_plane(block, 4, 0, codes);
        low = 4;
    }
    if (bits & 2) {
        unpack_plane(block + low * STEP_BYTES, 2, low, codes);
        low += 2;
    }
    if (bits & 1)
        unpack_plane(block + low * STEP_BYTES, 1, low, codes);
}

/* The codes of one row of a block, 32 columns. */
static inline void block_row(const uint8_t *codes, int row, uint8_t *dst)
{
    for (int step = 0; step < STEPS; step++)
        memcpy(dst + STEP_COLS * step, codes + step * STEP_BYTES + row * STEP_COLS, STEP_COLS);
}

/* Scales and zero points of the 16 rows of one group. */
typedef struct group_params {
    int64_t group; /* -1 = none loaded */
    float scale[TILE];
    int32_t zero[TILE];
} group_params;

static void load_group(const qpk_tensor *t, const uint8_t *tile, int64_t group, group_params *ret)
{
    unsigned elem_bytes = t->scale_dtype == QPK_F32 ? 4 : 2;
    dense_to_f32(t->scale_dtype, tile + t->layout.scales_offset + (uint64_t)group * TILE * elem_bytes, TILE,
                 ret->scale);
    for (int r = 0; r < TILE; r++)
        ret->zero[r] =
            t->symmetric ? 1 << (t->bits - 1) : tile[t->layout.zeros_offset + (uint64_t)(group * TILE + r)];
    ret->group = group;
}

/* dst[n] = scale * (codes - zero); n is known at compile time where it matters. */
static inline void scale_codes(const uint8_t *codes, int n, float scale, int32_t zero, float *dst)
{
    for (int i = 0; i < n; i++)
        dst[i] = scale * (float)((int32_t)codes[i] - zero);
}

/* Columns 32 * block .. of rows r0 .. r1 - 1 of a tile, all in one group. */
static void block_to_f32(const uint8_t *codes, const group_params *g, int r0, int r1, int64_t cols, int64_t n,
                         float *dst)
{
    for (int r = r0; r < r1; r++, dst += cols) {
        uint8_t row[BLOCK];
        block_row(codes, r, row);
        if (n == BLOCK)
            scale_codes(row, BLOCK, g->scale[r], g->zero[r], dst);
        else
            scale_codes(row, (int)n, g->scale[r], g->zero[r], dst);
    }
}

/* The same where groups end inside the block: step by step. */
static void steps_to_f32(const qpk_tensor *t, const uint8_t *tile, const uint8_t *codes, group_params *g,
                         int64_t col0, int r0, int r1, int64_t n, float *dst)
{
    for (int64_t c = 0; c < n; c += STEP_COLS) {
        int64_t group = (col0 + c) / t->group_elems;
        if (group != g->group)
            load_group(t, tile, group, g);
        const uint8_t *step = codes + c / STEP_COLS * STEP_BYTES;
        float *y = dst + c;
        for (int r = r0; r < r1; r++, y += t->cols)
            if (c + STEP_COLS <= n)
                scale_codes(step + r * STEP_COLS, STEP_COLS, g->scale[r], g->zero[r], y);
            else
                scale_codes(step + r * STEP_COLS, (int)(n - c), g->scale[r], g->zero[r], y);
    }
}

/* Rows r0 .. r1 - 1 of one tile. */
static void tile_to_f32(const qpk_tensor *t, const uint8_t *tile, int r0, int r1, float *dst)
{
    group_params g = {.group = -1};
    for (int64_t b = 0; b < t->layout.n_blocks; b++) {
        int64_t c0 = b * BLOCK, n = t->cols - c0 < BLOCK ? t->cols - c0 : BLOCK;
        _Alignas(64) uint8_t codes[STEPS * STEP_BYTES];
        unpack_block(tile + (uint64_t)b * 64 * (uint64_t)t->bits, t->bits, codes);
        int64_t group = c0 / t->group_elems;
        if (group != (c0 + n - 1) / t->group_elems) {
            steps_to_f32(t, tile, codes, &g, c0, r0, r1, n, dst + c0);
            continue;
        }
        if (group != g.group)
            load_group(t, tile, group, &g);
        block_to_f32(codes, &g, r0, r1, t->cols, n, dst + c0);
    }
}

static void tile_to_codes(const qpk_tensor *t, const uint8_t *tile, int r0, int r1, uint8_t *codes,
                          float *scales, uint8_t *zeros)
{
    int64_t n_groups = t->layout.n_groups;
    for (int64_t b = 0; b < t->layout.n_blocks; b++) {
        int64_t c0 = b * BLOCK, n = t->cols - c0 < BLOCK ? t->cols - c0 : BLOCK;
        _Alignas(64) uint8_t block[STEPS * STEP_BYTES];
        unpack_block(tile + (uint64_t)b * 64 * (uint64_t)t->bits, t->bits, block);
        for (int r = r0; r < r1; r++) {
            uint8_t row[BLOCK];
            block_row(block, r, row);
            memcpy(codes + (r - r0) * t->cols + c0, row, (size_t)n);
        }
    }
    for (int64_t group = 0; group < n_groups; group++) {
        group_params g;
        load_group(t, tile, group, &g);
        for (int r = r0; r < r1; r++) {
            scales[(r - r0) * n_groups + group] = g.scale[r];
            if (!t->symmetric)
                zeros[(r - r0) * n_groups + group] = (uint8_t)g.zero[r];
        }
    }
}

static int check_rows(const qpk_file *file, int64_t tensor, int64_t row0, int64_t n_rows,
                      const qpk_tensor **ret, char *err, size_t err_bytes)
{
    const qpk_tensor *t = qpk_tensor_at(file, tensor);
    if (!t)
        return qpk_fail(err, err_bytes, QPK_E_USAGE, "%s: tensor %lld of %lld", file->path, (long long)tensor,
                        (long long)file->n_tensors);
    if (row0 < 0 || n_rows < 0 || row0 > t->rows || n_rows > t->rows - row0)
        return qpk_fail(err, err_bytes, QPK_E_USAGE, "%s: tensor '%s': rows %lld + %lld of %lld", file->path,
                        t->name, (long long)row0, (long long)n_rows, (long long)t->rows);
    *ret = t;
    return QPK_OK;
}

int qpk_dequantize_rows(const qpk_file *file, int64_t tensor, int64_t row0, int64_t n_rows, float *dst,
                        char *err, size_t err_bytes)
{
    const qpk_tensor *t;
    int rc = check_rows(file, tensor, row0, n_rows, &t, err, err_bytes);
    if (rc < 0)
        return rc;
    const uint8_t *data = file->data + t->offset;
    if (t->dtype != QPK_GRID) {
        size_t row_bytes = (size_t)t->cols * (size_t)(qpk_dtype_bits(t->dtype) / 8);
        if (dense_to_f32(t->dtype, data + (size_t)row0 * row_bytes, n_rows * t->cols, dst) < 0)
            return qpk_fail(err, err_bytes, QPK_E_UNSUPPORTED,
                            "%s: tensor '%s': %s elements can not be read as numbers", file->path, t->name,
                            qpk_dtype_name(t->dtype));
        return QPK_OK;
    }
    for (int64_t row = row0, end = row0 + n_rows; row < end;) {
        int64_t tile = row / TILE, next = (tile + 1) * TILE < end ? (tile + 1) * TILE : end;
        tile_to_f32(t, data + (uint64_t)tile * t->layout.tile_bytes, (int)(row - tile * TILE),
                    (int)(next - tile * TILE), dst + (row - row0) * t->cols);
        row = next;
    }
    return QPK_OK;
}

int qpk_unpack_rows(const qpk_file *file, int64_t tensor, int64_t row0, int64_t n_rows, uint8_t *codes,
                    float *scales, uint8_t *zeros, char *err, size_t err_bytes)
{
    const qpk_tensor *t;
    int rc = check_rows(file, tensor, row0, n_rows, &t, err, err_bytes);
    if (rc < 0)
        return rc;
    if (t->dtype != QPK_GRID)
        return qpk_fail(err, err_bytes, QPK_E_USAGE, "%s: tensor '%s' is dense, it has no codes", file->path,
                        t->name);
    const uint8_t *data = file->data + t->offset;
    int64_t n_groups = t->layout.n_groups;
    for (int64_t row = row0, end = row0 + n_rows; row < end;) {
        int64_t tile = row / TILE, next = (tile + 1) * TILE < end ? (tile + 1) * TILE : end, at = row - row0;
        tile_to_codes(t, data + (uint64_t)tile * t->layout.tile_bytes, (int)(row - tile * TILE),
                      (int)(next - tile * TILE), codes + at * t->cols, scales + at * n_groups,
                      t->symmetric ? NULL : zeros + at * n_groups);
        row = next;
    }
    return QPK_OK;
}
