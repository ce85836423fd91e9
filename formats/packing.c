#include "packing.h"

#include "qc_fp.h"

#include <math.h>
#include <string.h>

size_t qc_part_bytes(const qc_part *part)
{
    size_t n = (size_t)qc_dtype_bits(part->dtype) / 8;
    for (int i = 0; i < part->n_dims; i++)
        n *= (size_t)part->shape[i];
    return n;
}

/* ---- shared ---- */

static int zero_of(const qc_tensor_info *info, const qc_code_rows *rows, int64_t at)
{
    return info->grid.symmetric ? 1 << (info->grid.bits - 1) : rows->zeros[at];
}

/* Codes and zero points fit their bits? */
static int check_codes(const qc_tensor_info *info, const qc_code_rows *rows, qc_err *err)
{
    int64_t n_codes = rows->n_rows * qc_tensor_cols(info), n_zeros = rows->n_rows * qc_tensor_n_groups(info);
    uint8_t any = 0;
    for (int64_t i = 0; i < n_codes; i++)
        any |= rows->codes[i];
    for (int64_t i = 0; i < n_zeros && !info->grid.symmetric; i++)
        any |= rows->zeros[i];
    if (any >> info->grid.bits)
        return qc_fail(err, QC_E_INPUT, "tensor %s: a code or zero point does not fit %d bits", info->name,
                       info->grid.bits);
    return QC_OK;
}

/* Store one scale as F16, BF16 or F32. */
static int put_scale(const qc_tensor_info *info, qc_dtype dtype, float scale, void *dst, int64_t at,
                     qc_err *err)
{
    float back = scale;
    if (dtype == QC_DT_F32) {
        ((float *)dst)[at] = scale;
    } else {
        uint16_t half = dtype == QC_DT_F16 ? qc_f32_to_f16(scale) : qc_f32_to_bf16(scale);
        back = dtype == QC_DT_F16 ? qc_f16_to_f32(half) : qc_bf16_to_f32(half);
        ((uint16_t *)dst)[at] = half;
    }
    if (isfinite(scale) && back == scale)
        return QC_OK;
    return qc_fail(err, QC_E_INPUT,
                   "tensor %s: the scale %g is not exact in %s, in which this format stores it "
                   "(quantize.weights.scale: f16)",
                   info->name, (double)scale, qc_dtype_name(dtype));
}

/* Files of others need not align their tensors. */
static uint32_t load_word(const void *src, int64_t at)
{
    uint32_t word;
    memcpy(&word, (const char *)src + at * (int64_t)sizeof word, sizeof word);
    return word;
}

static float get_scale(qc_dtype dtype, const void *src, int64_t at)
{
    uint16_t half;
    if (dtype == QC_DT_F32)
        return qc_f32_from_bits(load_word(src, at));
    memcpy(&half, (const char *)src + at * (int64_t)sizeof half, sizeof half);
    return dtype == QC_DT_F16 ? qc_f16_to_f32(half) : qc_bf16_to_f32(half);
}

/* Field number i of a word. */
static uint8_t field(uint32_t word, int i, int bits)
{
    return (uint8_t)(word >> (i * bits) & ((1u << bits) - 1));
}

/* 32 / bits codes, first in the lowest bits. */
static uint32_t pack_word(const uint8_t *codes, int bits)
{
    uint32_t word = 0;
    for (int i = 0; i < 32 / bits; i++)
        word |= (uint32_t)codes[i] << (i * bits);
    return word;
}

static void unpack_word(uint32_t word, int bits, uint8_t *codes)
{
    for (int i = 0; i < 32 / bits; i++)
        codes[i] = field(word, i, bits);
}

/* ---- GPTQ: qweight[in / f, out], qzeros[G, out / f], scales[G, out], g_idx[in] with f fields per word ----
 */

enum { GPTQ_QWEIGHT, GPTQ_QZEROS, GPTQ_SCALES, GPTQ_G_IDX };

static int gptq_parts(const qc_tensor_info *info, qc_part parts[QC_MAX_PARTS])
{
    int64_t rows = qc_tensor_rows(info), cols = qc_tensor_cols(info), groups = qc_tensor_n_groups(info),
            fields = 32 / info->grid.bits;
    parts[GPTQ_QWEIGHT] = (qc_part){"qweight", QC_DT_I32, 2, {cols / fields, rows}};
    parts[GPTQ_QZEROS] = (qc_part){"qzeros", QC_DT_I32, 2, {groups, rows / fields}};
    parts[GPTQ_SCALES] = (qc_part){"scales", QC_DT_F16, 2, {groups, rows}};
    parts[GPTQ_G_IDX] = (qc_part){"g_idx", QC_DT_I32, 1, {cols}};
    return 4;
}

/* 1 in every field of a word: v1 stores zero points less this. */
static uint32_t ones(int bits)
{
    return 0xffffffffu / ((1u << bits) - 1);
}

static int gptq_pack(const qc_tensor_info *info, int64_t row0, const qc_code_rows *rows,
                     void *const data[QC_MAX_PARTS], uint32_t less, qc_err *err)
{
    int64_t n_rows = qc_tensor_rows(info), cols = qc_tensor_cols(info), groups = qc_tensor_n_groups(info);
    int bits = info->grid.bits, fields = 32 / bits;
    uint32_t *qweight = data[GPTQ_QWEIGHT], *qzeros = data[GPTQ_QZEROS];
    int32_t *g_idx = data[GPTQ_G_IDX];
    QC_TRY(check_codes(info, rows, err));
    for (int64_t w = 0; w < cols / fields; w++)
        for (int64_t r = 0; r < rows->n_rows; r++)
            qweight[w * n_rows + row0 + r] = pack_word(rows->codes + r * cols + w * fields, bits);
    for (int64_t g = 0; g < groups; g++)
        for (int64_t r = 0; r < rows->n_rows; r++) {
            int64_t row = row0 + r;
            QC_TRY(put_scale(info, QC_DT_F16, rows->scales[r * groups + g], data[GPTQ_SCALES],
                             g * n_rows + row, err));
            uint32_t *word = &qzeros[g * (n_rows / fields) + row / fields];
            *word |= (uint32_t)zero_of(info, rows, r * groups + g) << (row % fields * bits);
            if (row % fields == fields - 1)
                *word -= less;
        }
    for (int64_t i = 0; row0 == 0 && i < cols; i++)
        g_idx[i] = (int32_t)(i / info->grid.group_elems);
    return QC_OK;
}

static int gptq_v1_pack(const qc_tensor_info *info, int64_t row0, const qc_code_rows *rows,
                        void *const data[QC_MAX_PARTS], qc_err *err)
{
    return gptq_pack(info, row0, rows, data, ones(info->grid.bits), err);
}

static int gptq_v2_pack(const qc_tensor_info *info, int64_t row0, const qc_code_rows *rows,
                        void *const data[QC_MAX_PARTS], qc_err *err)
{
    return gptq_pack(info, row0, rows, data, 0, err);
}

static void gptq_unpack(const qc_tensor_info *info, int64_t row0, int64_t n_rows,
                        const void *const data[QC_MAX_PARTS], uint32_t more, qc_code_rows *rows)
{
    int64_t all = qc_tensor_rows(info), cols = qc_tensor_cols(info), groups = qc_tensor_n_groups(info);
    int bits = info->grid.bits, fields = 32 / bits;
    const void *qweight = data[GPTQ_QWEIGHT], *qzeros = data[GPTQ_QZEROS];
    for (int64_t w = 0; w < cols / fields; w++)
        for (int64_t r = 0; r < n_rows; r++)
            unpack_word(load_word(qweight, w * all + row0 + r), bits, rows->codes + r * cols + w * fields);
    for (int64_t g = 0; g < groups; g++)
        for (int64_t r = 0; r < n_rows; r++) {
            int64_t row = row0 + r;
            rows->scales[r * groups + g] =
                get_scale(info->grid.scale_dtype, data[GPTQ_SCALES], g * all + row);
            if (rows->zeros)
                rows->zeros[r * groups + g] = field(
                    load_word(qzeros, g * (all / fields) + row / fields) + more, (int)(row % fields), bits);
        }
    rows->n_rows = n_rows;
}

static void gptq_v1_unpack(const qc_tensor_info *info, int64_t row0, int64_t n_rows,
                           const void *const data[QC_MAX_PARTS], qc_code_rows *rows)
{
    gptq_unpack(info, row0, n_rows, data, ones(info->grid.bits), rows);
}

static void gptq_v2_unpack(const qc_tensor_info *info, int64_t row0, int64_t n_rows,
                           const void *const data[QC_MAX_PARTS], qc_code_rows *rows)
{
    gptq_unpack(info, row0, n_rows, data, 0, rows);
}

const qc_packing qc_packing_gptq_v1 = {false, gptq_parts, gptq_v1_pack, gptq_v1_unpack};
const qc_packing qc_packing_gptq_v2 = {false, gptq_parts, gptq_v2_pack, gptq_v2_unpack};

/* ---- AWQ: qweight[in, out / 8], qzeros[G, out / 8], scales[G, out] ---- */

enum { AWQ_QWEIGHT, AWQ_QZEROS, AWQ_SCALES };

/* Place in its word of row 8 k + i of the matrix. */
static const int awq_place[8] = {0, 4, 1, 5, 2, 6, 3, 7};

static int awq_parts(const qc_tensor_info *info, qc_part parts[QC_MAX_PARTS])
{
    int64_t rows = qc_tensor_rows(info), cols = qc_tensor_cols(info), groups = qc_tensor_n_groups(info);
    parts[AWQ_QWEIGHT] = (qc_part){"qweight", QC_DT_I32, 2, {cols, rows / 8}};
    parts[AWQ_QZEROS] = (qc_part){"qzeros", QC_DT_I32, 2, {groups, rows / 8}};
    parts[AWQ_SCALES] = (qc_part){"scales", QC_DT_F16, 2, {groups, rows}};
    return 3;
}

static int awq_pack(const qc_tensor_info *info, int64_t row0, const qc_code_rows *rows,
                    void *const data[QC_MAX_PARTS], qc_err *err)
{
    int64_t n_rows = qc_tensor_rows(info), cols = qc_tensor_cols(info), groups = qc_tensor_n_groups(info);
    uint32_t *qweight = data[AWQ_QWEIGHT], *qzeros = data[AWQ_QZEROS];
    QC_TRY(check_codes(info, rows, err));
    for (int64_t c = 0; c < cols; c++)
        for (int64_t k = 0; k < rows->n_rows / 8; k++) {
            const uint8_t *codes = rows->codes + k * 8 * cols + c;
            uint32_t word = 0;
            for (int i = 0; i < 8; i++)
                word |= (uint32_t)codes[i * cols] << (4 * awq_place[i]);
            qweight[c * (n_rows / 8) + row0 / 8 + k] = word;
        }
    for (int64_t r = 0; r < rows->n_rows; r++)
        for (int64_t g = 0; g < groups; g++) {
            int64_t row = row0 + r;
            qzeros[g * (n_rows / 8) + row / 8] |= (uint32_t)zero_of(info, rows, r * groups + g)
                                                  << (4 * awq_place[row % 8]);
            QC_TRY(put_scale(info, QC_DT_F16, rows->scales[r * groups + g], data[AWQ_SCALES],
                             g * n_rows + row, err));
        }
    return QC_OK;
}

static void awq_unpack(const qc_tensor_info *info, int64_t row0, int64_t n_rows,
                       const void *const data[QC_MAX_PARTS], qc_code_rows *rows)
{
    int64_t all = qc_tensor_rows(info), cols = qc_tensor_cols(info), groups = qc_tensor_n_groups(info);
    const void *qweight = data[AWQ_QWEIGHT], *qzeros = data[AWQ_QZEROS];
    for (int64_t c = 0; c < cols; c++)
        for (int64_t r = 0; r < n_rows; r++)
            rows->codes[r * cols + c] =
                field(load_word(qweight, c * (all / 8) + (row0 + r) / 8), awq_place[(row0 + r) % 8], 4);
    for (int64_t r = 0; r < n_rows; r++)
        for (int64_t g = 0; g < groups; g++) {
            int64_t row = row0 + r;
            rows->scales[r * groups + g] = get_scale(info->grid.scale_dtype, data[AWQ_SCALES], g * all + row);
            if (rows->zeros)
                rows->zeros[r * groups + g] =
                    field(load_word(qzeros, g * (all / 8) + row / 8), awq_place[row % 8], 4);
        }
    rows->n_rows = n_rows;
}

const qc_packing qc_packing_awq = {false, awq_parts, awq_pack, awq_unpack};

/* ---- compressed-tensors, packed: weight_packed[out, in / f], weight_scale[out, G], weight_shape[2],
 * weight_zero_point[out / f, G] ---- */

enum { CT_PACKED, CT_SCALE, CT_SHAPE, CT_ZERO_POINT };

static int ct_packed_parts(const qc_tensor_info *info, qc_part parts[QC_MAX_PARTS])
{
    int64_t rows = qc_tensor_rows(info), cols = qc_tensor_cols(info), groups = qc_tensor_n_groups(info),
            fields = 32 / info->grid.bits;
    parts[CT_PACKED] = (qc_part){"weight_packed", QC_DT_I32, 2, {rows, cols / fields}};
    parts[CT_SCALE] = (qc_part){"weight_scale", info->grid.scale_dtype, 2, {rows, groups}};
    parts[CT_SHAPE] = (qc_part){"weight_shape", QC_DT_I64, 1, {2}};
    parts[CT_ZERO_POINT] = (qc_part){"weight_zero_point", QC_DT_I32, 2, {rows / fields, groups}};
    return info->grid.symmetric ? 3 : 4;
}

static int ct_packed_pack(const qc_tensor_info *info, int64_t row0, const qc_code_rows *rows,
                          void *const data[QC_MAX_PARTS], qc_err *err)
{
    int64_t cols = qc_tensor_cols(info), groups = qc_tensor_n_groups(info);
    int bits = info->grid.bits, fields = 32 / bits;
    uint32_t *packed = data[CT_PACKED], *zero_point = data[CT_ZERO_POINT];
    int64_t *shape = data[CT_SHAPE];
    QC_TRY(check_codes(info, rows, err));
    shape[0] = qc_tensor_rows(info);
    shape[1] = cols;
    for (int64_t r = 0; r < rows->n_rows; r++) {
        int64_t row = row0 + r;
        for (int64_t w = 0; w < cols / fields; w++)
            packed[row * (cols / fields) + w] = pack_word(rows->codes + r * cols + w * fields, bits);
        for (int64_t g = 0; g < groups; g++) {
            QC_TRY(put_scale(info, info->grid.scale_dtype, rows->scales[r * groups + g], data[CT_SCALE],
                             row * groups + g, err));
            if (!info->grid.symmetric)
                zero_point[row / fields * groups + g] |= (uint32_t)rows->zeros[r * groups + g]
                                                         << (row % fields * bits);
        }
    }
    return QC_OK;
}

static void ct_packed_unpack(const qc_tensor_info *info, int64_t row0, int64_t n_rows,
                             const void *const data[QC_MAX_PARTS], qc_code_rows *rows)
{
    int64_t cols = qc_tensor_cols(info), groups = qc_tensor_n_groups(info);
    int bits = info->grid.bits, fields = 32 / bits;
    const void *packed = data[CT_PACKED], *zero_point = data[CT_ZERO_POINT];
    for (int64_t r = 0; r < n_rows; r++) {
        int64_t row = row0 + r;
        for (int64_t w = 0; w < cols / fields; w++)
            unpack_word(load_word(packed, row * (cols / fields) + w), bits,
                        rows->codes + r * cols + w * fields);
        for (int64_t g = 0; g < groups; g++) {
            rows->scales[r * groups + g] =
                get_scale(info->grid.scale_dtype, data[CT_SCALE], row * groups + g);
            if (!info->grid.symmetric)
                rows->zeros[r * groups + g] =
                    field(load_word(zero_point, row / fields * groups + g), (int)(row % fields), bits);
        }
    }
    rows->n_rows = n_rows;
}

const qc_packing qc_packing_ct_packed = {false, ct_packed_parts, ct_packed_pack, ct_packed_unpack};

/* ---- compressed-tensors, bytes: weight[out, in], weight_scale[out, 1] ---- */

enum { CT_INT_WEIGHT, CT_INT_SCALE };

static int ct_int_parts(const qc_tensor_info *info, qc_part parts[QC_MAX_PARTS])
{
    int64_t rows = qc_tensor_rows(info), cols = qc_tensor_cols(info);
    parts[CT_INT_WEIGHT] = (qc_part){"weight", QC_DT_I8, 2, {rows, cols}};
    parts[CT_INT_SCALE] = (qc_part){"weight_scale", info->grid.scale_dtype, 2, {rows, 1}};
    return 2;
}

static int ct_int_pack(const qc_tensor_info *info, int64_t row0, const qc_code_rows *rows,
                       void *const data[QC_MAX_PARTS], qc_err *err)
{
    int64_t cols = qc_tensor_cols(info);
    uint8_t *weight = (uint8_t *)data[CT_INT_WEIGHT] + row0 * cols;
    for (int64_t i = 0; i < rows->n_rows * cols; i++)
        weight[i] = rows->codes[i] ^ 0x80; /* unsigned with zero 128 to two's complement */
    for (int64_t r = 0; r < rows->n_rows; r++)
        QC_TRY(put_scale(info, info->grid.scale_dtype, rows->scales[r], data[CT_INT_SCALE], row0 + r, err));
    return QC_OK;
}

static void ct_int_unpack(const qc_tensor_info *info, int64_t row0, int64_t n_rows,
                          const void *const data[QC_MAX_PARTS], qc_code_rows *rows)
{
    int64_t cols = qc_tensor_cols(info);
    const uint8_t *weight = (const uint8_t *)data[CT_INT_WEIGHT] + row0 * cols;
    for (int64_t i = 0; i < n_rows * cols; i++)
        rows->codes[i] = weight[i] ^ 0x80;
    for (int64_t r = 0; r < n_rows; r++)
        rows->scales[r] = get_scale(info->grid.scale_dtype, data[CT_INT_SCALE], row0 + r);
    rows->n_rows = n_rows;
}

const qc_packing qc_packing_ct_int = {false, ct_int_parts, ct_int_pack, ct_int_unpack};

/* ---- ONNX (MatMulNBits, GatherBlockQuantized): weight_packed[out, in bits / 8], weight_scale[out, G],
 * weight_zero_point[out, ceil(G bits / 8)] ---- */

enum { ONNX_PACKED, ONNX_SCALE, ONNX_ZERO_POINT };

static int64_t packed_bytes(int64_t n_codes, int bits)
{
    return (n_codes * bits + 7) / 8;
}

/* Codes of 4 or 8 bits to whole bytes; the last one may be filled up with 0. */
static void pack_bytes(const uint8_t *codes, int64_t n, int bits, uint8_t *dst)
{
    if (bits == 8)
        memcpy(dst, codes, (size_t)n);
    for (int64_t i = 0; i < n && bits == 4; i += 2)
        dst[i / 2] = (uint8_t)(codes[i] | (i + 1 < n ? codes[i + 1] << 4 : 0));
}

static void unpack_bytes(const uint8_t *src, int64_t n, int bits, uint8_t *codes)
{
    if (bits == 8)
        memcpy(codes, src, (size_t)n);
    for (int64_t i = 0; i < n && bits == 4; i++)
        codes[i] = src[i / 2] >> (i % 2 * 4) & 15;
}

static int onnx_parts(const qc_tensor_info *info, qc_part parts[QC_MAX_PARTS])
{
    int64_t rows = qc_tensor_rows(info), cols = qc_tensor_cols(info), groups = qc_tensor_n_groups(info);
    int bits = info->grid.bits;
    parts[ONNX_PACKED] = (qc_part){"weight_packed", QC_DT_U8, 2, {rows, packed_bytes(cols, bits)}};
    parts[ONNX_SCALE] = (qc_part){"weight_scale", QC_DT_F32, 2, {rows, groups}};
    parts[ONNX_ZERO_POINT] = (qc_part){"weight_zero_point", QC_DT_U8, 2, {rows, packed_bytes(groups, bits)}};
    return info->grid.symmetric ? 2 : 3;
}

static int onnx_pack(const qc_tensor_info *info, int64_t row0, const qc_code_rows *rows,
                     void *const data[QC_MAX_PARTS], qc_err *err)
{
    int64_t cols = qc_tensor_cols(info), groups = qc_tensor_n_groups(info);
    int bits = info->grid.bits;
    int64_t code_bytes = packed_bytes(cols, bits), zero_bytes = packed_bytes(groups, bits);
    QC_TRY(check_codes(info, rows, err));
    for (int64_t r = 0; r < rows->n_rows; r++) {
        int64_t row = row0 + r;
        pack_bytes(rows->codes + r * cols, cols, bits, (uint8_t *)data[ONNX_PACKED] + row * code_bytes);
        if (!info->grid.symmetric)
            pack_bytes(rows->zeros + r * groups, groups, bits,
                       (uint8_t *)data[ONNX_ZERO_POINT] + row * zero_bytes);
        for (int64_t g = 0; g < groups; g++)
            QC_TRY(put_scale(info, QC_DT_F32, rows->scales[r * groups + g], data[ONNX_SCALE],
                             row * groups + g, err));
    }
    return QC_OK;
}

static void onnx_unpack(const qc_tensor_info *info, int64_t row0, int64_t n_rows,
                        const void *const data[QC_MAX_PARTS], qc_code_rows *rows)
{
    int64_t cols = qc_tensor_cols(info), groups = qc_tensor_n_groups(info);
    int bits = info->grid.bits;
    int64_t code_bytes = packed_bytes(cols, bits), zero_bytes = packed_bytes(groups, bits);
    for (int64_t r = 0; r < n_rows; r++) {
        int64_t row = row0 + r;
        unpack_bytes((const uint8_t *)data[ONNX_PACKED] + row * code_bytes, cols, bits,
                     rows->codes + r * cols);
        if (!info->grid.symmetric)
            unpack_bytes((const uint8_t *)data[ONNX_ZERO_POINT] + row * zero_bytes, groups, bits,
                         rows->zeros + r * groups);
        for (int64_t g = 0; g < groups; g++)
            rows->scales[r * groups + g] = get_scale(QC_DT_F32, data[ONNX_SCALE], row * groups + g);
    }
    rows->n_rows = n_rows;
}

const qc_packing qc_packing_onnx = {true, onnx_parts, onnx_pack, onnx_unpack};
