#include "source_error.h"

#include "qc_alloc.h"
#include "qc_math.h"

#define BLOCK_ELEMS (1 << 20)

static int add_rows(const qc_source *a, const qc_source *b, const int64_t tensor[2], int64_t n_cols,
                    int64_t row, int64_t n, float *values, double *sums, qc_err *err)
{
    float *x = values, *y = values + n * n_cols;
    QC_TRY(a->read_rows(a, tensor[0], row, n, x, err));
    QC_TRY(b->read_rows(b, tensor[1], row, n, y, err));
    a->release(a, tensor[0], row, n);
    b->release(b, tensor[1], row, n);
    for (int64_t r = 0; r < n; r++) {
        double error = 0, weight = 0;
        for (int64_t i = r * n_cols; i < (r + 1) * n_cols; i++) {
            double d = (double)x[i] - (double)y[i];
            error += d * d;
            weight += (double)x[i] * (double)x[i];
        }
        sums[0] += error;
        sums[1] += weight;
    }
    return QC_OK;
}

int qc_source_error(const qc_source *a, const qc_source *b, const char *name, bool *ret_found,
                    double *ret_sq_error, double *ret_sq_weight, qc_err *err)
{
    int64_t tensor[2] = {a->find(a, name), b->find(b, name)};
    double sums[2] = {0, 0};
    *ret_found = tensor[0] >= 0 && tensor[1] >= 0;
    if (!*ret_found)
        return QC_OK;
    const qc_tensor_info *x = a->info(a, tensor[0]), *y = b->info(b, tensor[1]);
    int64_t n_rows = qc_tensor_rows(x), n_cols = qc_tensor_cols(x);
    if (n_rows != qc_tensor_rows(y) || n_cols != qc_tensor_cols(y))
        return qc_fail(err, QC_E_INPUT, "%s: tensor %s is %lld x %lld, in %s it is %lld x %lld", b->path,
                       name, (long long)qc_tensor_rows(y), (long long)qc_tensor_cols(y), a->path,
                       (long long)n_rows, (long long)n_cols);
    int64_t step = n_cols < BLOCK_ELEMS ? BLOCK_ELEMS / (n_cols ? n_cols : 1) : 1;
    step = qc_min_i64(step, n_rows);
    float *values = qc_alloc((size_t)(2 * step * n_cols), sizeof *values);
    int rc =
        values ? QC_OK : qc_fail_nomem(err, name, (unsigned long long)(2 * step * n_cols) * sizeof *values);
    for (int64_t row = 0; row < n_rows && rc == QC_OK; row += step)
        rc = add_rows(a, b, tensor, n_cols, row, qc_min_i64(step, n_rows - row), values, sums, err);
    qc_free(values);
    if (rc == QC_OK) {
        *ret_sq_error = sums[0];
        *ret_sq_weight = sums[1];
    }
    return rc;
}
