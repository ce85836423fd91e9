/* What the formats for engines can hold. */
#include "engine_format.h"

#include <string.h>

/* ---- what is stored how ---- */

/* Engines compute in the type of the model: vectors that scales were folded into are stored in it, as the
 * engine would round them anyway. */
static void hold_dense(const qc_tensor_use *use, qc_tensor_info *info)
{
    bool half = use->source == QC_DT_F16 || use->source == QC_DT_BF16;
    if (info->dtype == QC_DT_GRID || info->dtype == QC_DT_F64 || half)
        info->dtype = half ? use->source : use->source == QC_DT_GRID ? QC_DT_BF16 : QC_DT_F32;
    info->grid = (qc_grid){0};
}

/* Shared by the packed formats: true if the matrix is settled as dense. */
static bool hold_table(const qc_tensor_use *use, qc_tensor_info *info, const char **ret_why)
{
    bool grid = info->dtype == QC_DT_GRID;
    if (use->kind == QC_KIND_LINEAR && grid)
        return false;
    if (grid)
        *ret_why = "left in 16 bit: engines do not take a quantized embedding or head in this format";
    hold_dense(use, info);
    return true;
}

static int refuse_grid(const qc_tensor_info *info, const char *format, const char *expected, qc_err *err)
{
    const qc_grid *g = &info->grid;
    return qc_fail(err, QC_E_UNSUPPORTED, "tensor %s: %s can not hold INT%d %s with group %lld, expected %s",
                   info->name, format, g->bits, g->symmetric ? "symmetric" : "asymmetric",
                   (long long)g->group_elems, expected);
}

static bool groups_divide(const qc_tensor_info *info)
{
    return info->grid.kind == QC_GRID_AFFINE && qc_tensor_cols(info) % info->grid.group_elems == 0;
}

/* Left as it is because of its shape, which is no fault of the recipe. */
static int keep_shape(const qc_tensor_use *use, qc_tensor_info *info, const char *why, const char **ret_why)
{
    *ret_why = why;
    hold_dense(use, info);
    return QC_OK;
}

static int gptq_hold(const char *type, const qc_tensor_use *use, qc_tensor_info *info, const char **ret_why,
                     qc_err *err)
{
    if (hold_table(use, info, ret_why))
        return QC_OK;
    if (!groups_divide(info) || (info->grid.bits != 4 && info->grid.bits != 8))
        return refuse_grid(info, "gptq", "4 or 8 bits and a group that divides the width", err);
    if (type && strcmp(type, "v1") == 0 && !info->grid.symmetric)
        return refuse_grid(info, "gptq v1", "a symmetric grid (zero points need emit[].type v2)", err);
    if (qc_tensor_rows(info) % 32 || qc_tensor_cols(info) % 32)
        return keep_shape(use, info, "left in 16 bit: GPTQ packs matrices whose sides are multiples of 32",
                          ret_why);
    if (info->grid.scale_dtype == QC_DT_F32)
        info->grid.scale_dtype = QC_DT_F16;
    return QC_OK;
}

static int awq_hold(const char *type, const qc_tensor_use *use, qc_tensor_info *info, const char **ret_why,
                    qc_err *err)
{
    (void)type;
    if (hold_table(use, info, ret_why))
        return QC_OK;
    if (!groups_divide(info) || info->grid.bits != 4)
        return refuse_grid(info, "awq", "4 bits and a group that divides the width", err);
    if (qc_tensor_rows(info) % 8)
        return keep_shape(use, info, "left in 16 bit: AWQ packs matrices whose rows are a multiple of 8",
                          ret_why);
    if (info->grid.scale_dtype == QC_DT_F32)
        info->grid.scale_dtype = QC_DT_F16;
    return QC_OK;
}

static int ct_hold(const char *type, const qc_tensor_use *use, qc_tensor_info *info, const char **ret_why,
                   qc_err *err)
{
    (void)type;
    if (hold_table(use, info, ret_why))
        return QC_OK;
    if (!groups_divide(info) || (info->grid.bits != 4 && info->grid.bits != 8))
        return refuse_grid(info, "compressed-tensors", "4 or 8 bits and a group that divides the width", err);
    int fields = 32 / info->grid.bits;
    if (qc_tensor_cols(info) % fields || (!info->grid.symmetric && qc_tensor_rows(info) % fields))
        return keep_shape(use, info, "left in 16 bit: its sides are no multiples of the codes in a word",
                          ret_why);
    return QC_OK;
}

static int hf_hold(const char *type, const qc_tensor_use *use, qc_tensor_info *info, const char **ret_why,
                   qc_err *err)
{
    (void)ret_why;
    (void)err;
    static const struct {
        const char *type;
        qc_dtype dtype;
    } types[] = {{"bf16", QC_DT_BF16}, {"f16", QC_DT_F16}, {"f32", QC_DT_F32}};
    if (info->dtype == QC_DT_GRID)
        return QC_OK; /* its values are stored: tensor_bytes, and the writer, know in which type */
    hold_dense(use, info);
    for (size_t i = 0; type && i < sizeof types / sizeof types[0]; i++)
        if (strcmp(type, types[i].type) == 0)
            info->dtype = types[i].dtype;
    return QC_OK;
}

/* ---- sizes ---- */

static uint64_t dense_bytes(const qc_tensor_info *info, qc_dtype dtype)
{
    return (uint64_t)qc_tensor_n_elems(info) * (uint64_t)qc_dtype_bits(dtype) / 8;
}

static uint64_t packed_bytes(const qc_packing *packing, const qc_tensor_info *info)
{
    if (info->dtype != QC_DT_GRID)
        return dense_bytes(info, info->dtype);
    qc_part parts[QC_MAX_PARTS];
    uint64_t n_bytes = 0;
    for (int i = packing->parts(info, parts) - 1; i >= 0; i--)
        n_bytes += qc_part_bytes(&parts[i]);
    return n_bytes;
}

static uint64_t gptq_bytes(const char *type, const qc_tensor_info *info)
{
    (void)type;
    return packed_bytes(&qc_packing_gptq_v2, info);
}

static uint64_t awq_bytes(const char *type, const qc_tensor_info *info)
{
    (void)type;
    return packed_bytes(&qc_packing_awq, info);
}

static uint64_t ct_bytes(const char *type, const qc_tensor_info *info)
{
    (void)type;
    return packed_bytes(&qc_packing_ct_packed, info);
}

qc_dtype qc_hf_value_dtype(const char *type)
{
    return type && strcmp(type, "f32") == 0   ? QC_DT_F32
           : type && strcmp(type, "f16") == 0 ? QC_DT_F16
                                              : QC_DT_BF16;
}

static uint64_t hf_bytes(const char *type, const qc_tensor_info *info)
{
    return dense_bytes(info, info->dtype == QC_DT_GRID ? qc_hf_value_dtype(type) : info->dtype);
}

/* ---- table ---- */

static int gptq_create(const qc_writer_options *options, qc_writer **ret, qc_err *err)
{
    return qc_engine_writer_create(&qc_gptq_writer_format, &qc_engine_gptq, options, ret, err);
}

static int awq_create(const qc_writer_options *options, qc_writer **ret, qc_err *err)
{
    return qc_engine_writer_create(&qc_awq_writer_format, &qc_engine_awq, options, ret, err);
}

static int ct_create(const qc_writer_options *options, qc_writer **ret, qc_err *err)
{
    return qc_engine_writer_create(&qc_ct_writer_format, &qc_engine_ct, options, ret, err);
}

static int hf_create(const qc_writer_options *options, qc_writer **ret, qc_err *err)
{
    return qc_engine_writer_create(&qc_hf_writer_format, &qc_engine_hf, options, ret, err);
}

const qc_writer_format qc_gptq_writer_format = {.name = "gptq",
                                                .types = "v1|v2",
                                                .hold = gptq_hold,
                                                .tensor_bytes = gptq_bytes,
                                                .create = gptq_create,
                                                .packs_whole = true};
const qc_writer_format qc_awq_writer_format = {
    .name = "awq", .hold = awq_hold, .tensor_bytes = awq_bytes, .create = awq_create, .packs_whole = true};
const qc_writer_format qc_ct_writer_format = {.name = "compressed-tensors",
                                              .hold = ct_hold,
                                              .tensor_bytes = ct_bytes,
                                              .create = ct_create,
                                              .packs_whole = true};
const qc_writer_format qc_hf_writer_format = {
    .name = "hf", .types = "bf16|f16|f32", .hold = hf_hold, .tensor_bytes = hf_bytes, .create = hf_create};
