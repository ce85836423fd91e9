#include "qc_tensor.h"

#include "qc_alloc.h"
#include "qc_fp.h"

#include <stdio.h>
#include <string.h>

int64_t qc_tensor_n_elems(const qc_tensor_info *info)
{
    int64_t n = 1;
    for (int i = 0; i < info->n_dims; i++)
        n *= info->shape[i];
    return n;
}

int64_t qc_tensor_cols(const qc_tensor_info *info)
{
    return info->n_dims ? info->shape[info->n_dims - 1] : 1;
}

int64_t qc_tensor_rows(const qc_tensor_info *info)
{
    int64_t cols = qc_tensor_cols(info);
    return cols ? qc_tensor_n_elems(info) / cols : 0;
}

int64_t qc_tensor_n_groups(const qc_tensor_info *info)
{
    if (info->grid.kind == QC_GRID_NONE)
        return 0;
    return (qc_tensor_cols(info) + info->grid.group_elems - 1) / info->grid.group_elems;
}

static size_t groups_of(const qc_grid *grid, int64_t cols)
{
    return (size_t)((cols + grid->group_elems - 1) / grid->group_elems);
}

static size_t supers_of(const qc_grid *grid, int64_t cols)
{
    return grid->kind == QC_GRID_SUPER ? (size_t)(cols / grid->super_elems) : 0;
}

int qc_code_rows_alloc(const qc_grid *grid, int64_t n_rows, int64_t cols, qc_code_rows *ret, qc_err *err)
{
    size_t n = (size_t)n_rows, groups = n * groups_of(grid, cols), supers = n * supers_of(grid, cols);
    bool min = qc_grid_has_min(grid), zero = grid->kind == QC_GRID_AFFINE && !grid->symmetric,
         super = grid->kind == QC_GRID_SUPER;
    qc_code_rows rows = {.codes = qc_alloc(n * (size_t)cols, 1),
                         .scales = qc_alloc(groups, sizeof *rows.scales),
                         .zeros = zero ? qc_alloc(groups, 1) : NULL,
                         .mins = min ? qc_alloc(groups, sizeof *rows.mins) : NULL,
                         .supers = super ? qc_alloc(supers, 2 * sizeof *rows.supers) : NULL,
                         .subs = super ? qc_alloc(groups, 2 * sizeof *rows.subs) : NULL};
    if (rows.codes && rows.scales && (!zero || rows.zeros) && (!min || rows.mins) &&
        (!super || (rows.supers && rows.subs))) {
        *ret = rows;
        return QC_OK;
    }
    qc_code_rows_free(&rows);
    return qc_fail_nomem(err, "codes of rows", (unsigned long long)(n * (size_t)cols) + 4 * groups);
}

void qc_code_rows_free(qc_code_rows *rows)
{
    qc_free(rows->codes);
    qc_free(rows->scales);
    qc_free(rows->zeros);
    qc_free(rows->mins);
    qc_free(rows->supers);
    qc_free(rows->subs);
    *rows = (qc_code_rows){.n_rows = 0};
}

qc_code_rows qc_code_rows_for(const qc_code_rows *all, const qc_grid *grid)
{
    qc_code_rows rows = *all;
    rows.zeros = grid->kind == QC_GRID_AFFINE && !grid->symmetric ? rows.zeros : NULL;
    rows.mins = qc_grid_has_min(grid) ? rows.mins : NULL;
    rows.supers = grid->kind == QC_GRID_SUPER ? rows.supers : NULL;
    rows.subs = grid->kind == QC_GRID_SUPER ? rows.subs : NULL;
    return rows;
}

void qc_code_rows_copy(qc_code_rows *dst, int64_t to, const qc_code_rows *src, int64_t from,
                       const qc_grid *grid, int64_t cols)
{
    qc_code_rows d = qc_code_rows_from(dst, grid, cols, to), s = qc_code_rows_from(src, grid, cols, from);
    size_t groups = groups_of(grid, cols);
    memcpy(d.codes, s.codes, (size_t)cols);
    memcpy(d.scales, s.scales, groups * sizeof *d.scales);
    if (d.zeros)
        memcpy(d.zeros, s.zeros, groups);
    if (d.mins)
        memcpy(d.mins, s.mins, groups * sizeof *d.mins);
    if (d.supers) {
        memcpy(d.supers, s.supers, supers_of(grid, cols) * 2 * sizeof *d.supers);
        memcpy(d.subs, s.subs, groups * 2 * sizeof *d.subs);
    }
}

qc_code_rows qc_code_rows_from(const qc_code_rows *rows, const qc_grid *grid, int64_t cols, int64_t row)
{
    size_t groups = (size_t)row * groups_of(grid, cols), supers = (size_t)row * supers_of(grid, cols);
    return (qc_code_rows){.codes = rows->codes + row * cols,
                          .scales = rows->scales + groups,
                          .zeros = rows->zeros ? rows->zeros + groups : NULL,
                          .mins = rows->mins ? rows->mins + groups : NULL,
                          .supers = rows->supers ? rows->supers + 2 * supers : NULL,
                          .subs = rows->subs ? rows->subs + 2 * groups : NULL};
}

void qc_code_rows_multiply(qc_code_rows *rows, const qc_grid *grid, int64_t cols)
{
    int64_t per_super = grid->super_elems / grid->group_elems;
    for (int64_t i = 0; i < rows->n_rows * (int64_t)groups_of(grid, cols); i++) {
        const float *super = rows->supers + i / per_super * 2;
        rows->scales[i] = super[0] * (float)rows->subs[2 * i];
        if (!grid->symmetric)
            rows->mins[i] = -(super[1] * (float)rows->subs[2 * i + 1]);
    }
}

void qc_code_rows_decode(const qc_code_rows *rows, const qc_grid *grid, int64_t cols, float *dst)
{
    int64_t n_groups = (cols + grid->group_elems - 1) / grid->group_elems;
    for (int64_t r = 0; r < rows->n_rows; r++) {
        const uint8_t *q = rows->codes + r * cols;
        float *y = dst + r * cols;
        for (int64_t g = 0; g < n_groups; g++) {
            int64_t end = (g + 1) * grid->group_elems < cols ? (g + 1) * grid->group_elems : cols;
            float scale = rows->scales[r * n_groups + g];
            if (qc_grid_has_min(grid)) {
                float min = rows->mins[r * n_groups + g];
                for (int64_t c = g * grid->group_elems; c < end; c++)
                    y[c] = scale * (float)q[c] + min;
                continue;
            }
            int zero = grid->symmetric ? 1 << (grid->bits - 1) : rows->zeros[r * n_groups + g];
            for (int64_t c = g * grid->group_elems; c < end; c++)
                y[c] = scale * (float)((int)q[c] - zero);
        }
    }
}

void qc_shape_text(const int64_t *shape, int n_dims, char *ret, size_t cap_bytes)
{
    size_t n = (size_t)snprintf(ret, cap_bytes, "[");
    for (int i = 0; i < n_dims && n < cap_bytes; i++)
        n += (size_t)snprintf(ret + n, cap_bytes - n, "%s%lld", i ? ", " : "", (long long)shape[i]);
    if (n < cap_bytes)
        snprintf(ret + n, cap_bytes - n, "]");
}

/* All exponent bits set: an infinity or NaN. */
static bool is_special(float x)
{
    return (qc_f32_bits(x) & 0x7f800000u) == 0x7f800000u;
}

int64_t qc_first_nonfinite(const float *x, int64_t n_elems)
{
    uint32_t bad =
        0; /* one pass without branches, which is what nearly every call needs, goes through vectors */
    for (int64_t i = 0; i < n_elems; i++)
        bad |= is_special(x[i]);
    if (!bad)
        return -1;
    int64_t i = 0;
    while (!is_special(x[i]))
        i++;
    return i;
}

float qc_largest_abs(const float *x, int64_t n_elems)
{
    uint32_t most = 0; /* without the sign bit, bits are in the order of absolute values, NaNs last */
    for (int64_t i = 0; i < n_elems; i++) {
        uint32_t bits = qc_f32_bits(x[i]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return qc_f32_from_bits(most);
}

/* One function per type: restrict and element types of byte alignment let the compiler use vectors. */
#define CONVERTER(name, type, expr)                                                                          \
    typedef type name##_elem __attribute__((aligned(1), may_alias));                                         \
    static int name(const void *restrict src, int64_t n_elems, float *restrict dst)                          \
    {                                                                                                        \
        const name##_elem *restrict s = src;                                                                 \
        for (int64_t i = 0; i < n_elems; i++) {                                                              \
            type v = s[i];                                                                                   \
            dst[i] = expr;                                                                                   \
        }                                                                                                    \
        return QC_OK;                                                                                        \
    }

CONVERTER(from_f16, uint16_t, qc_f16_to_f32(v))
CONVERTER(from_bf16, uint16_t, qc_bf16_to_f32(v))
CONVERTER(from_f64, double, (float)v)
CONVERTER(from_i8, int8_t, (float)v)
CONVERTER(from_u8, uint8_t, (float)v)
CONVERTER(from_i16, int16_t, (float)v)
CONVERTER(from_u16, uint16_t, (float)v)
CONVERTER(from_i32, int32_t, (float)v)

int qc_dense_to_f32(qc_dtype dtype, const void *src, int64_t n_elems, float *dst, qc_err *err)
{
    switch (dtype) {
    case QC_DT_F32:
        memcpy(dst, src, (size_t)n_elems * sizeof *dst);
        return QC_OK;
    case QC_DT_F16:
        return from_f16(src, n_elems, dst);
    case QC_DT_BF16:
        return from_bf16(src, n_elems, dst);
    case QC_DT_F64:
        return from_f64(src, n_elems, dst);
    case QC_DT_I8:
        return from_i8(src, n_elems, dst);
    case QC_DT_U8:
    case QC_DT_BOOL:
        return from_u8(src, n_elems, dst);
    case QC_DT_I16:
        return from_i16(src, n_elems, dst);
    case QC_DT_U16:
        return from_u16(src, n_elems, dst);
    case QC_DT_I32:
        return from_i32(src, n_elems, dst);
    default:
        return qc_fail(err, QC_E_UNSUPPORTED, "%s elements can not be read as numbers", qc_dtype_name(dtype));
    }
}

/* The same the other way round. */
#define ROUNDER(name, expr)                                                                                  \
    static int name(const float *restrict src, int64_t n_elems, void *restrict dst)                          \
    {                                                                                                        \
        name##_elem *restrict d = dst;                                                                       \
        for (int64_t i = 0; i < n_elems; i++) {                                                              \
            float v = src[i];                                                                                \
            d[i] = expr;                                                                                     \
        }                                                                                                    \
        return QC_OK;                                                                                        \
    }

typedef uint16_t to_f16_elem __attribute__((aligned(1), may_alias));
typedef uint16_t to_bf16_elem __attribute__((aligned(1), may_alias));
typedef double to_f64_elem __attribute__((aligned(1), may_alias));
ROUNDER(to_f16, qc_f32_to_f16(v))
ROUNDER(to_bf16, qc_f32_to_bf16(v))
ROUNDER(to_f64, (double)v)

int qc_dense_from_f32(qc_dtype dtype, const float *src, int64_t n_elems, void *dst, qc_err *err)
{
    switch (dtype) {
    case QC_DT_F32:
        memcpy(dst, src, (size_t)n_elems * sizeof *src);
        return QC_OK;
    case QC_DT_F16:
        return to_f16(src, n_elems, dst);
    case QC_DT_BF16:
        return to_bf16(src, n_elems, dst);
    case QC_DT_F64:
        return to_f64(src, n_elems, dst);
    default:
        return qc_fail(err, QC_E_UNSUPPORTED, "numbers can not be stored as %s", qc_dtype_name(dtype));
    }
}
