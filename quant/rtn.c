#include "rtn.h"

#include "qc_blocks.h"

static int check_weights(const float *w, int64_t n_rows, int64_t n_cols, qc_err *err)
{
    int64_t at = qc_first_nonfinite(w, n_rows * n_cols);
    if (at < 0)
        return QC_OK;
    return qc_fail(err, QC_E_INPUT, "weight at row %lld, column %lld is %s, expected a finite number",
                   (long long)(at / n_cols), (long long)(at % n_cols), w[at] != w[at] ? "NaN" : "infinite");
}

static int check_col_weight(const float *h, int64_t n_cols, qc_err *err)
{
    for (int64_t c = 0; c < n_cols; c++)
        if (qc_first_nonfinite(h + c, 1) >= 0 || h[c] < 0)
            return qc_fail(err, QC_E_INPUT, "importance of column %lld is %g, expected a finite number >= 0",
                           (long long)c, (double)h[c]);
    return QC_OK;
}

static int check_spec(const qc_quant_spec *spec, qc_err *err)
{
    const qc_grid *g = &spec->grid;
    if (g->kind == QC_GRID_NONE || g->bits < 2 || g->bits > 8)
        return qc_fail(err, QC_E_UNSUPPORTED, "grid of %d bits, expected one of 2 .. 8", g->bits);
    if (g->group_elems < 1)
        return qc_fail(err, QC_E_UNSUPPORTED, "group of %lld columns, expected at least 1",
                       (long long)g->group_elems);
    if (g->scale_dtype != QC_DT_F16 && g->scale_dtype != QC_DT_BF16 && g->scale_dtype != QC_DT_F32)
        return qc_fail(err, QC_E_UNSUPPORTED, "scales in %s, expected F16, BF16 or F32",
                       qc_dtype_name(g->scale_dtype));
    return QC_OK;
}

/* The rounding of ggml's reference, one block after the other. */
static void round_like_ggml(const qc_block_info *type, const float *w, int64_t n_rows, int64_t n_cols,
                            const float *col_weight, qc_code_rows *rows, qc_quant_stats *stats)
{
    uint8_t block[QC_BLOCK_MAX_BYTES];
    float y[QC_BLOCK_MAX_ELEMS];
    qc_grid as_rows = type->grid;
    for (int64_t i = 0; i < n_rows * n_cols; i += type->n_elems) {
        qc_code_rows one = qc_code_rows_from(rows, &as_rows, type->n_elems, i / type->n_elems);
        qc_block_encode(type, w + i, 1, block);
        qc_block_unpack(type, block, 1, type->n_elems, &one);
        qc_block_decode(type, block, 1, y);
        bool zeros = true;
        for (int j = 0; j < type->n_elems; j++) {
            double h = col_weight ? (double)col_weight[(i + j) % n_cols] : 1, x = (double)w[i + j],
                   e = x - (double)y[j];
            stats->sq_error += h * e * e;
            stats->sq_weight += h * x * x;
            zeros = zeros && w[i + j] == 0;
        }
        stats->n_zero_groups += zeros;
    }
    rows->n_rows = n_rows;
}

int qc_rtn_rows(qc_backend *be, const float *w, int64_t n_rows, int64_t n_cols, const qc_quant_spec *spec,
                const float *col_weight, qc_code_rows *rows, qc_quant_stats *stats, qc_err *err)
{
    QC_TRY(check_spec(spec, err));
    QC_TRY(check_weights(w, n_rows, n_cols, err));
    if (col_weight)
        QC_TRY(check_col_weight(col_weight, n_cols, err));
    const qc_block_info *type = spec->search == QC_SEARCH_GGML ? qc_block_by_grid(&spec->grid) : NULL;
    if (type && type->n_elems == 32 && n_cols % 32 == 0) {
        round_like_ggml(type, w, n_rows, n_cols, col_weight, rows, stats);
        return QC_OK;
    }
    return be->quantize_rows(be, w, n_rows, n_cols, spec, col_weight, rows, stats, err);
}
