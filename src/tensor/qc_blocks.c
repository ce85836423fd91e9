#include "qc_blocks.h"

#include "qc_fp.h"

#include <string.h>
#include <strings.h>

/* ---- table ---- */

#define AFFINE32(n_bits)                                                                                     \
    {                                                                                                        \
        .kind = QC_GRID_AFFINE, .bits = (n_bits), .symmetric = true, .group_elems = 32,                      \
        .scale_dtype = QC_DT_F16                                                                             \
    }
#define MIN32(n_bits)                                                                                        \
    {                                                                                                        \
        .kind = QC_GRID_MIN, .bits = (n_bits), .group_elems = 32, .scale_dtype = QC_DT_F16                   \
    }
#define SUPER(n_bits, is_symmetric, group, n_sub_bits)                                                       \
    {                                                                                                        \
        .kind = QC_GRID_SUPER, .bits = (n_bits), .symmetric = (is_symmetric), .group_elems = (group),        \
        .scale_dtype = QC_DT_F16, .super_elems = 256, .sub_bits = (n_sub_bits)                               \
    }

static const qc_block_info types[] = {
    {"F32", QC_BLOCK_F32, 1, 4, QC_DT_F32, {0}},
    {"F16", QC_BLOCK_F16, 1, 2, QC_DT_F16, {0}},
    {"BF16", QC_BLOCK_BF16, 1, 2, QC_DT_BF16, {0}},
    {"Q4_0", QC_BLOCK_Q4_0, 32, 18, QC_DT_GRID, AFFINE32(4)},
    {"Q4_1", QC_BLOCK_Q4_1, 32, 20, QC_DT_GRID, MIN32(4)},
    {"Q5_0", QC_BLOCK_Q5_0, 32, 22, QC_DT_GRID, AFFINE32(5)},
    {"Q5_1", QC_BLOCK_Q5_1, 32, 24, QC_DT_GRID, MIN32(5)},
    {"Q8_0", QC_BLOCK_Q8_0, 32, 34, QC_DT_GRID, AFFINE32(8)},
    {"Q4_K", QC_BLOCK_Q4_K, 256, 144, QC_DT_GRID, SUPER(4, false, 32, 6)},
    {"Q5_K", QC_BLOCK_Q5_K, 256, 176, QC_DT_GRID, SUPER(5, false, 32, 6)},
    {"Q6_K", QC_BLOCK_Q6_K, 256, 210, QC_DT_GRID, SUPER(6, true, 16, 8)},
    {"F64", 28, 1, 8, QC_DT_F64, {0}},
    {"I8", 24, 1, 1, QC_DT_I8, {0}},
    {"I16", 25, 1, 2, QC_DT_I16, {0}},
    {"I32", 26, 1, 4, QC_DT_I32, {0}},
    {"I64", 27, 1, 8, QC_DT_I64, {0}},
    /* known by name, to be refused */
    {.name = "Q8_1", .id = 9},
    {.name = "Q2_K", .id = 10},
    {.name = "Q3_K", .id = 11},
    {.name = "Q8_K", .id = 15},
    {.name = "IQ2_XXS", .id = 16},
    {.name = "IQ2_XS", .id = 17},
    {.name = "IQ3_XXS", .id = 18},
    {.name = "IQ1_S", .id = 19},
    {.name = "IQ4_NL", .id = 20},
    {.name = "IQ3_S", .id = 21},
    {.name = "IQ2_S", .id = 22},
    {.name = "IQ4_XS", .id = 23},
    {.name = "IQ1_M", .id = 29},
    {.name = "TQ1_0", .id = 34},
    {.name = "TQ2_0", .id = 35},
    {.name = "MXFP4", .id = 39},
    {.name = "NVFP4", .id = 40},
};

const qc_block_info *qc_block_at(int i)
{
    return i >= 0 && i < (int)(sizeof types / sizeof types[0]) ? &types[i] : NULL;
}

const qc_block_info *qc_block_find(int64_t id)
{
    for (int i = 0; qc_block_at(i); i++)
        if (types[i].id == id)
            return &types[i];
    return NULL;
}

const qc_block_info *qc_block_by_name(const char *name)
{
    for (int i = 0; qc_block_at(i); i++)
        if (strcasecmp(types[i].name, name) == 0)
            return &types[i];
    return NULL;
}

const qc_block_info *qc_block_by_grid(const qc_grid *grid)
{
    for (int i = 0; qc_block_at(i); i++) {
        const qc_grid *g = &types[i].grid;
        if (g->kind != QC_GRID_NONE && g->kind == grid->kind && g->bits == grid->bits &&
            g->symmetric == grid->symmetric && g->group_elems == grid->group_elems &&
            g->scale_dtype == grid->scale_dtype && g->super_elems == grid->super_elems &&
            g->sub_bits == grid->sub_bits)
            return &types[i];
    }
    return NULL;
}

/* ---- one block ---- */

/* A block taken apart: what a qc_code_rows has of it. */
typedef struct parts {
    uint8_t *codes;
    float *scales;
    float *mins;   /* NULL: none */
    float *supers; /* NULL: none */
    int16_t *subs;
} parts;

static uint32_t get16(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
}

static float get_half(const uint8_t *p)
{
    return qc_f16_to_f32((uint16_t)get16(p));
}

static void put_half(uint8_t *p, float x)
{
    uint16_t h = qc_f32_to_f16(x);
    p[0] = (uint8_t)h;
    p[1] = (uint8_t)(h >> 8);
}

/* Q4_0 .. Q8_0: float16 scale, float16 minimum (Q4_1, Q5_1), the fifth bits as a 32-bit number (Q5_0, Q5_1),
 * then codes: of 8 bits as signed bytes, else low nibbles of values 0 .. 15 beside those of 16 .. 31. */
static void unpack_32(const qc_grid *grid, const uint8_t *src, const parts *b)
{
    *b->scales = get_half(src);
    src += 2;
    if (b->mins) {
        *b->mins = get_half(src);
        src += 2;
    }
    if (grid->bits == 8) {
        for (int i = 0; i < 32; i++)
            b->codes[i] = (uint8_t)(src[i] ^ 0x80);
        return;
    }
    uint32_t high = 0;
    if (grid->bits == 5) {
        high = get16(src) | get16(src + 2) << 16;
        src += 4;
    }
    for (int i = 0; i < 16; i++) {
        b->codes[i] = (uint8_t)((src[i] & 15) | (high >> i & 1) << 4);
        b->codes[i + 16] = (uint8_t)(src[i] >> 4 | (high >> (i + 16) & 1) << 4);
    }
}

static void pack_32(const qc_grid *grid, const parts *b, uint8_t *dst)
{
    bool all_zero = !b->mins && *b->scales != 0; /* a zero keeps its sign */
    uint32_t high = 0;
    for (int i = 0; i < 32; i++) {
        all_zero = all_zero && b->codes[i] == 1 << (grid->bits - 1);
        high |= (uint32_t)(b->codes[i] >> 4 & 1) << i;
    }
    put_half(dst, all_zero ? 0 : *b->scales);
    dst += 2;
    if (b->mins) {
        put_half(dst, *b->mins);
        dst += 2;
    }
    if (grid->bits == 8) {
        for (int i = 0; i < 32; i++)
            dst[i] = (uint8_t)(b->codes[i] ^ 0x80);
        return;
    }
    if (grid->bits == 5)
        for (int i = 0; i < 4; i++)
            *dst++ = (uint8_t)(high >> 8 * i);
    for (int i = 0; i < 16; i++)
        dst[i] = (uint8_t)((b->codes[i] & 15) | b->codes[i + 16] << 4);
}

/* The 8 sub-scales and sub-minima of Q4_K and Q5_K, 6 bits each in 12 bytes: the low 6 bits of bytes 0 .. 3
 * and 4 .. 7 are those of groups 0 .. 3; bytes 8 .. 11 hold the low 4 bits of groups 4 .. 7 (minimum in the
 * high nibble), whose high 2 bits stand at the top of bytes 0 .. 7. */
static void unpack_subs(const uint8_t *s, int16_t *subs)
{
    for (int j = 0; j < 4; j++) {
        subs[2 * j] = s[j] & 63;
        subs[2 * j + 1] = s[j + 4] & 63;
        subs[2 * (j + 4)] = (int16_t)((s[j + 8] & 15) | s[j] >> 6 << 4);
        subs[2 * (j + 4) + 1] = (int16_t)(s[j + 8] >> 4 | s[j + 4] >> 6 << 4);
    }
}

static void pack_subs(const int16_t *subs, uint8_t *s)
{
    for (int j = 0; j < 4; j++) {
        int scale = subs[2 * (j + 4)], min = subs[2 * (j + 4) + 1];
        s[j] = (uint8_t)(subs[2 * j] | scale >> 4 << 6);
        s[j + 4] = (uint8_t)(subs[2 * j + 1] | min >> 4 << 6);
        s[j + 8] = (uint8_t)((scale & 15) | (min & 15) << 4);
    }
}

/* Q4_K, Q5_K: d, dmin, sub-scales, the fifth bits (Q5_K), low nibbles. Chunk c of 64 values: 32 bytes, low
 * nibbles of its first half beside those of the second; bit 2c and 2c + 1 of fifth-bit byte i belong to value
 * i of either half. */
static void unpack_k(const qc_grid *grid, const uint8_t *src, const parts *b)
{
    const uint8_t *high = grid->bits == 5 ? src + 16 : NULL, *low = src + (high ? 48 : 16);
    b->supers[0] = get_half(src);
    b->supers[1] = get_half(src + 2);
    unpack_subs(src + 4, b->subs);
    for (int j = 0; j < 8; j++) {
        b->scales[j] = b->supers[0] * (float)b->subs[2 * j];
        b->mins[j] = -(b->supers[1] * (float)b->subs[2 * j + 1]);
    }
    for (int c = 0; c < 4; c++)
        for (int i = 0; i < 32; i++) {
            int h = high ? high[i] >> 2 * c : 0;
            b->codes[64 * c + i] = (uint8_t)((low[32 * c + i] & 15) | (h & 1) << 4);
            b->codes[64 * c + 32 + i] = (uint8_t)(low[32 * c + i] >> 4 | (h & 2) << 3);
        }
}

/* Do all values of a super-block decode to 0 whatever d is? */
static bool all_zero(const parts *b, int zero, int n_groups)
{
    for (int i = 0; i < QC_BLOCK_MAX_ELEMS; i++)
        if (b->codes[i] != zero)
            return false;
    for (int j = 0; j < n_groups; j++)
        if (b->supers[1] * (float)b->subs[2 * j + 1] != 0)
            return false;
    return true;
}

static void pack_k(const qc_grid *grid, const parts *b, uint8_t *dst)
{
    uint8_t *high = grid->bits == 5 ? dst + 16 : NULL, *low = dst + (high ? 48 : 16);
    put_half(dst, all_zero(b, 0, 8) ? 0 : b->supers[0]);
    put_half(dst + 2, b->supers[1]);
    pack_subs(b->subs, dst + 4);
    if (high)
        memset(high, 0, 32);
    for (int c = 0; c < 4; c++)
        for (int i = 0; i < 32; i++) {
            uint8_t first = b->codes[64 * c + i], second = b->codes[64 * c + 32 + i];
            low[32 * c + i] = (uint8_t)((first & 15) | second << 4);
            if (high)
                high[i] |= (uint8_t)((first >> 4 | second >> 4 << 1) << 2 * c);
        }
}

/* Q6_K: low nibbles, high pairs of bits, 16 signed sub-scales, d. Half h of 128 values: 64 bytes of nibbles,
 * 32 of pairs; quarter q of the half takes nibble q / 2 of bytes 32 (q % 2) .. and pair q. */
static void unpack_6k(const uint8_t *src, const parts *b)
{
    b->supers[0] = get_half(src + 208);
    b->supers[1] = 0;
    for (int j = 0; j < 16; j++) {
        b->subs[2 * j] = (int8_t)src[192 + j];
        b->subs[2 * j + 1] = 0;
        b->scales[j] = b->supers[0] * (float)b->subs[2 * j];
    }
    for (int h = 0; h < 2; h++)
        for (int q = 0; q < 4; q++)
            for (int i = 0; i < 32; i++) {
                int low = src[64 * h + 32 * (q % 2) + i] >> 4 * (q / 2) & 15;
                int high = src[128 + 32 * h + i] >> 2 * q & 3;
                b->codes[128 * h + 32 * q + i] = (uint8_t)(low | high << 4);
            }
}

static void pack_6k(const parts *b, uint8_t *dst)
{
    memset(dst, 0, 192);
    put_half(dst + 208, all_zero(b, 32, 0) ? 0 : b->supers[0]);
    for (int j = 0; j < 16; j++)
        dst[192 + j] = (uint8_t)b->subs[2 * j];
    for (int h = 0; h < 2; h++)
        for (int q = 0; q < 4; q++)
            for (int i = 0; i < 32; i++) {
                uint8_t code = b->codes[128 * h + 32 * q + i];
                dst[64 * h + 32 * (q % 2) + i] |= (uint8_t)((code & 15) << 4 * (q / 2));
                dst[128 + 32 * h + i] |= (uint8_t)(code >> 4 << 2 * q);
            }
}

static void unpack_block(const qc_block_info *type, const uint8_t *src, const parts *b)
{
    if (type->grid.kind != QC_GRID_SUPER)
        unpack_32(&type->grid, src, b);
    else if (type->grid.symmetric)
        unpack_6k(src, b);
    else
        unpack_k(&type->grid, src, b);
}

static void pack_block(const qc_block_info *type, const parts *b, uint8_t *dst)
{
    if (type->grid.kind != QC_GRID_SUPER)
        pack_32(&type->grid, b, dst);
    else if (type->grid.symmetric)
        pack_6k(b, dst);
    else
        pack_k(&type->grid, b, dst);
}

/* ---- rows ---- */

void qc_block_decode(const qc_block_info *type, const uint8_t *src, int64_t n_blocks, float *dst)
{
    uint8_t codes[QC_BLOCK_MAX_ELEMS];
    float scales[QC_BLOCK_MAX_GROUPS], mins[QC_BLOCK_MAX_GROUPS], supers[2];
    int16_t subs[2 * QC_BLOCK_MAX_GROUPS];
    bool has_min = qc_grid_has_min(&type->grid);
    qc_code_rows rows = {.n_rows = 1, .codes = codes, .scales = scales, .mins = has_min ? mins : NULL};
    parts b = {codes, scales, rows.mins, supers, subs};
    for (int64_t i = 0; i < n_blocks; i++) {
        unpack_block(type, src + i * type->n_bytes, &b);
        qc_code_rows_decode(&rows, &type->grid, type->n_elems, dst + i * type->n_elems);
    }
}

/* Where block number i of some rows, which follow each other without gaps, has its parts. */
static parts parts_of(const qc_block_info *type, const qc_code_rows *rows, int64_t i)
{
    int64_t groups = type->n_elems / type->grid.group_elems;
    bool super = type->grid.kind == QC_GRID_SUPER;
    return (parts){.codes = rows->codes + i * type->n_elems,
                   .scales = rows->scales + i * groups,
                   .mins = qc_grid_has_min(&type->grid) ? rows->mins + i * groups : NULL,
                   .supers = super ? rows->supers + 2 * i : NULL,
                   .subs = super ? rows->subs + 2 * i * groups : NULL};
}

void qc_block_unpack(const qc_block_info *type, const uint8_t *src, int64_t n_rows, int64_t n_cols,
                     qc_code_rows *ret)
{
    ret->n_rows = n_rows;
    for (int64_t i = 0; i < n_rows * n_cols / type->n_elems; i++) {
        parts b = parts_of(type, ret, i);
        unpack_block(type, src + i * type->n_bytes, &b);
    }
}

void qc_block_pack(const qc_block_info *type, const qc_code_rows *rows, int64_t n_cols, uint8_t *dst)
{
    for (int64_t i = 0; i < rows->n_rows * n_cols / type->n_elems; i++) {
        parts b = parts_of(type, rows, i);
        pack_block(type, &b, dst + i * type->n_bytes);
    }
}

/* ---- reference rounding ---- */

/* As the reference does it: codes are made with the scale before it is rounded to float16, and by cutting off
 * the fraction. The product of a symmetric type is exact here, where C compilers may or may not fuse it. */
static void encode_32(const qc_grid *grid, const float *x, const parts *b)
{
    float lo = x[0], hi = x[0], most = 0;
    for (int i = 0; i < 32; i++) {
        float a = x[i] < 0 ? -x[i] : x[i], m = most < 0 ? -most : most;
        lo = x[i] < lo ? x[i] : lo;
        hi = x[i] > hi ? x[i] : hi;
        most = a > m ? x[i] : most;
    }
    int top = (1 << grid->bits) - 1, middle = 1 << (grid->bits - 1);
    float d = grid->bits == 8 ? (most < 0 ? -most : most) / 127
              : b->mins       ? (hi - lo) / (float)top
                              : most / (float)-middle;
    float id = d != 0 ? 1 / d : 0;
    *b->scales = d;
    if (b->mins)
        *b->mins = lo;
    for (int i = 0; i < 32; i++) {
        int q;
        if (grid->bits == 8) {
            float v = x[i] * id;
            q = (int)(v < 0 ? v - 0.5f : v + 0.5f) + 128; /* halves away from zero */
        } else if (b->mins) {
            q = (int)((x[i] - lo) * id + 0.5f);
        } else {
            q = (int)((double)x[i] * (double)id + (middle + 0.5));
        }
        b->codes[i] = (uint8_t)(q < 0 ? 0 : q > top ? top : q);
    }
}

bool qc_block_encode(const qc_block_info *type, const float *src, int64_t n_blocks, uint8_t *dst)
{
    uint8_t codes[32];
    float scale, min;
    if (type->n_elems != 32 || type->dtype != QC_DT_GRID)
        return false;
    parts b = {codes, &scale, type->grid.kind == QC_GRID_MIN ? &min : NULL, NULL, NULL};
    for (int64_t i = 0; i < n_blocks; i++) {
        encode_32(&type->grid, src + 32 * i, &b);
        pack_block(type, &b, dst + i * type->n_bytes);
    }
    return true;
}
