/* Which weight is to blame for a value that is not finite. */
#include "model.h"

#include "qc_alloc.h"
#include "qc_math.h"

#include <stdio.h>

/* Elements that are looked at together: 4 MiB of float32. */
enum { BLOCK_ELEMS = 1 << 20 };

int qc_model_find_nonfinite(const qc_model *model, int64_t tensor, int64_t *ret_row, int64_t *ret_col,
                            qc_err *err)
{
    const qc_source *src = model->src;
    const qc_tensor_info *info = src->info(src, tensor);
    int64_t n_rows = qc_tensor_rows(info), n_cols = qc_tensor_cols(info),
            step = qc_min_i64(qc_max_i64(1, BLOCK_ELEMS / qc_max_i64(n_cols, 1)), n_rows);
    *ret_row = *ret_col = -1;
    float *w = qc_alloc((size_t)(step * n_cols), sizeof *w);
    if (!w)
        return qc_fail_nomem(err, info->name, (unsigned long long)(step * n_cols) * sizeof *w);
    int rc = QC_OK;
    for (int64_t row = 0; row < n_rows && rc == QC_OK && *ret_row < 0; row += step) {
        int64_t n = qc_min_i64(step, n_rows - row), at;
        rc = src->read_rows(src, tensor, row, n, w, err);
        src->release(src, tensor, row, n);
        if (rc == QC_OK && (at = qc_first_nonfinite(w, n * n_cols)) >= 0) {
            *ret_row = row + at / n_cols;
            *ret_col = at % n_cols;
        }
    }
    qc_free(w);
    return rc;
}

/* Whether what comes out of the layer (of the head, if layer is the number of layers) goes through it. */
static bool is_used(const qc_model *model, int64_t tensor, int layer)
{
    const qc_tensor_place *p = &model->places[tensor];
    int64_t head = qc_model_tensor(model, 0, QC_SLOT_HEAD),
            embedding = qc_model_tensor(model, 0, QC_SLOT_EMBEDDING);
    if (p->layer >= 0)
        return p->layer == layer;
    if (tensor == embedding && layer == 0)
        return true;
    return layer == (int)model->config.n_layers && (tensor == head || p->role == QC_ROLE_NORM);
}

void qc_model_blame_nonfinite(const qc_model *model, int layer, char ret[QC_ERR_MSG_BYTES])
{
    const qc_source *src = model->src;
    snprintf(ret, QC_ERR_MSG_BYTES, "; its weights are finite, so it is too large a number");
    for (int64_t t = 0; t < src->n_tensors; t++) {
        int64_t row, col;
        if (!is_used(model, t, layer))
            continue;
        if (qc_model_find_nonfinite(model, t, &row, &col, NULL) < 0) {
            *ret = 0;
            return;
        }
        if (row >= 0) {
            snprintf(ret, QC_ERR_MSG_BYTES, "; tensor %s holds a NaN or infinity at row %lld, column %lld",
                     src->info(src, t)->name, (long long)row, (long long)col);
            return;
        }
    }
}
