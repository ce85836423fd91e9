#include "rtn.h"

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
    if (g->kind != QC_GRID_AFFINE || g->bits < 2 || g->bits > 8)
        return qc_fail(err, QC_E_UNSUPPORTED, "grid of %d bits, expected an affine one of 2 .. 8", g->bits);
    if (g->group_elems < 1)
        return qc_fail(err, QC_E_UNSUPPORTED, "group of %lld columns, expected at least 1",
                       (long long)g->group_elems);
    if (g->scale_dtype != QC_DT_F16 && g->scale_dtype != QC_DT_BF16 && g->scale_dtype != QC_DT_F32)
        return qc_fail(err, QC_E_UNSUPPORTED, "scales in %s, expected F16, BF16 or F32",
                       qc_dtype_name(g->scale_dtype));
    return QC_OK;
}

int qc_rtn_rows(qc_backend *be, const float *w, int64_t n_rows, int64_t n_cols, const qc_quant_spec *spec,
                const float *col_weight, qc_code_rows *rows, qc_quant_stats *stats, qc_err *err)
{
    QC_TRY(check_spec(spec, err));
    QC_TRY(check_weights(w, n_rows, n_cols, err));
    if (col_weight)
        QC_TRY(check_col_weight(col_weight, n_cols, err));
    return be->quantize_rows(be, w, n_rows, n_cols, spec, col_weight, rows, stats, err);
}
