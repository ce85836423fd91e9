/* quantize_rows, round_forward, descend, hessian_error: what the host of a device does, codes and scales
 * going there and back. */
#include "device.h"
#include "kern_quant.h"
#include "qc_alloc.h"
#include "qc_math.h"

enum { WARPS = QC_CUDA_THREADS / 32, MAX_ROUND_BLOCKS = 1024 };

/* ---- rounding with errors of other columns ---- */

/* The rows in work and the device's copies of what the caller keeps on the host. */
typedef struct round_job {
    qc_cuda_backend *cb;
    const float *c; /* [n, n] */
    const float *inv;
    const qc_grid *grid;
    const qc_round_rows *rows;
    int64_t n_rows, n, n_groups, block;
    uint8_t *codes, *zeros;
    float *scales, *sum, *change, *fit;
    int32_t *group_of;
} round_job;

/* Group of each column, on the device. */
static int send_groups(round_job *j, qc_err *err)
{
    size_t n_bytes = (size_t)j->n * sizeof(int32_t);
    j->group_of = qc_cuda_scratch(j->cb, QC_CUDA_S_GROUPS, n_bytes, err);
    if (!j->group_of)
        return QC_E_RESOURCE;
    if (j->rows->group_of)
        return qc_cuda_to_device(j->cb, j->group_of, j->rows->group_of, n_bytes, err);
    int32_t *own = qc_alloc((size_t)j->n, sizeof *own);
    if (!own)
        return qc_fail_nomem(err, "groups of columns", n_bytes);
    for (int64_t i = 0; i < j->n; i++)
        own[i] = (int32_t)(i / j->grid->group_elems);
    int rc = qc_cuda_to_device(j->cb, j->group_of, own, n_bytes, err);
    qc_free(own);
    return rc;
}

/* Codes go along only where some exist. */
static int begin_rounding(round_job *j, bool has_codes, bool refit, qc_err *err)
{
    qc_cuda_backend *cb = j->cb;
    const qc_round_rows *rows = j->rows;
    size_t n_codes = (size_t)(j->n_rows * j->n), n_scales = (size_t)(j->n_rows * j->n_groups);
    size_t block_bytes = (size_t)(j->n_rows * qc_min_i64(j->block, j->n)) * sizeof(float);
    size_t tile_bytes = (size_t)(j->n_rows * qc_max_i64(QC_CUDA_TILE, refit ? j->block : 0)) * sizeof(float);
    QC_TRY(qc_cuda_check_size(j->n, err));
    QC_TRY(qc_cuda_check_size(j->n_rows, err));
    if (!(j->codes = qc_cuda_scratch(cb, QC_CUDA_S_CODES, n_codes, err)) ||
        !(j->scales = qc_cuda_scratch(cb, QC_CUDA_S_SCALES, n_scales * sizeof *j->scales, err)) ||
        !(j->sum = qc_cuda_scratch(cb, QC_CUDA_S_SUM, block_bytes, err)) ||
        !(j->change = qc_cuda_scratch(cb, QC_CUDA_S_CHANGE, tile_bytes, err)) ||
        (refit && !(j->fit = qc_cuda_scratch(cb, QC_CUDA_S_FIT, tile_bytes, err))) ||
        (rows->zeros && !(j->zeros = qc_cuda_scratch(cb, QC_CUDA_S_ZEROS, n_scales, err))))
        return QC_E_RESOURCE;
    QC_TRY(qc_cuda_to_device(cb, j->scales, rows->scales, n_scales * sizeof *j->scales, err));
    if (j->zeros)
        QC_TRY(qc_cuda_to_device(cb, j->zeros, rows->zeros, n_scales, err));
    if (has_codes)
        QC_TRY(qc_cuda_to_device(cb, j->codes, rows->codes, n_codes, err));
    return send_groups(j, err);
}

/* Rounds the columns j0 .. j0 + m - 1; sum: their part of [n_rows, ld_sum]. */
static int round_tile(round_job *j, int64_t j0, int64_t m, const float *sum, int64_t ld_sum, qc_err *err)
{
    qc_cuda_round_args args = {.c = j->c,
                               .inv = j->inv,
                               .target = j->rows->target,
                               .error = j->rows->error,
                               .sum = sum,
                               .scales = j->scales,
                               .zeros = j->zeros,
                               .group_of = j->group_of,
                               .codes = j->codes,
                               .change = j->inv ? j->change : NULL,
                               .n_rows = j->n_rows,
                               .n = j->n,
                               .n_groups = j->n_groups,
                               .ld_sum = ld_sum,
                               .j0 = j0,
                               .m = m,
                               .qmax = (float)((1 << j->grid->bits) - 1)};
    return QC_CUDA_LAUNCH(j->cb, round_tile, qc_min_i64(qc_ceil_div(j->n_rows, WARPS), MAX_ROUND_BLOCKS), 1,
                          QC_CUDA_THREADS, QC_CUDA_TILE * QC_CUDA_TILE_LD * sizeof(float), &args, err);
}

int qc_cuda_round_forward(qc_backend *be, const float *factor, const qc_grid *grid, const qc_round_rows *rows,
                          qc_err *err)
{
    round_job j = {.cb = (qc_cuda_backend *)be,
                   .c = factor,
                   .grid = grid,
                   .rows = rows,
                   .n_rows = rows->n_rows,
                   .n = rows->n_cols,
                   .n_groups = qc_ceil_div(rows->n_cols, grid->group_elems),
                   .block = QC_CUDA_TILE};
    if (j.n_rows == 0 || j.n == 0)
        return QC_OK;
    QC_TRY(begin_rounding(&j, false, false, err));
    for (int64_t j0 = 0; j0 < j.n; j0 += QC_CUDA_TILE) {
        int64_t m = qc_min_i64(QC_CUDA_TILE, j.n - j0);
        /* what the errors so far give; none for the first tile */
        QC_TRY(qc_cuda_gemm(j.cb, j.sum, m, rows->error, j.n, false, factor + j0 * j.n, j.n, false, j.n_rows,
                            m, j0, 1, 0, err));
        QC_TRY(round_tile(&j, j0, m, j.sum, m, err));
    }
    return qc_cuda_to_host(j.cb, rows->codes, j.codes, (size_t)(j.n_rows * j.n), err);
}

/* Scales of one group of the block at j0 (m columns), then the errors and sums that follow. */
static int fit_group(round_job *j, int64_t j0, int64_t m, int64_t at, qc_err *err)
{
    int64_t n = qc_min_i64(j->grid->group_elems, j0 + m - at);
    qc_cuda_fit_args args = {.steps = j->change,
                             .fit = j->fit,
                             .sum = j->sum + (at - j0),
                             .target = j->rows->target,
                             .error = j->rows->error,
                             .scales = j->scales,
                             .codes = j->codes,
                             .zeros = j->zeros,
                             .n_rows = j->n_rows,
                             .n = j->n,
                             .n_groups = j->n_groups,
                             .ld_sum = m,
                             .at = at,
                             .m = n,
                             .index = at / j->grid->group_elems,
                             .bits = j->grid->bits,
                             .scale_dtype = (int32_t)j->grid->scale_dtype};
    QC_TRY(QC_CUDA_LAUNCH(j->cb, fit_steps, qc_ceil_div(j->n_rows * n, QC_CUDA_THREADS), 1, QC_CUDA_THREADS,
                          0, &args, err));
    QC_TRY(qc_cuda_gemm(j->cb, j->fit, n, j->change, n, false, j->c + at * (j->n + 1), j->n, false, j->n_rows,
                        n, n, 1, 0, err));
    QC_TRY(
        QC_CUDA_LAUNCH(j->cb, fit_scale, qc_ceil_div(j->n_rows, WARPS), 1, QC_CUDA_THREADS, 0, &args, err));
    return qc_cuda_gemm(j->cb, j->sum, m, j->change, n, false, j->c + j0 * j->n + at, j->n, false, j->n_rows,
                        m, n, 1, 1, err);
}

/* One pass over the blocks of columns: scales, codes or both of each. */
static int descend_pass(round_job *j, bool refit, bool codes, qc_err *err)
{
    for (int64_t j0 = 0; j0 < j->n; j0 += j->block) {
        int64_t m = qc_min_i64(j->block, j->n - j0), end = j0 + m;
        QC_TRY(qc_cuda_gemm(j->cb, j->sum, m, j->rows->error, j->n, false, j->c + j0 * j->n, j->n, false,
                            j->n_rows, m, j->n, 1, 0, err));
        for (int64_t at = j0; at < end && refit; at += j->grid->group_elems)
            QC_TRY(fit_group(j, j0, m, at, err));
        for (int64_t at = j0; at < end && codes; at += QC_CUDA_TILE) {
            int64_t n = qc_min_i64(QC_CUDA_TILE, end - at), next = at + n;
            QC_TRY(round_tile(j, at, n, j->sum + (at - j0), m, err));
            /* a block that is larger than a tile: what changed reaches its later columns */
            QC_TRY(qc_cuda_gemm(j->cb, j->sum + (next - j0), m, j->change, n, false, j->c + next * j->n + at,
                                j->n, false, j->n_rows, end - next, n, 1, 1, err));
        }
    }
    return QC_OK;
}

int qc_cuda_descend(qc_backend *be, const float *h, const float *inv, const qc_grid *grid,
                    const qc_round_rows *rows, int64_t n_sweeps, bool refit, qc_err *err)
{
    round_job j = {.cb = (qc_cuda_backend *)be,
                   .c = h,
                   .inv = inv,
                   .grid = grid,
                   .rows = rows,
                   .n_rows = rows->n_rows,
                   .n = rows->n_cols,
                   .n_groups = qc_ceil_div(rows->n_cols, grid->group_elems),
                   .block = qc_descent_block(grid->group_elems, rows->n_cols)};
    if (j.n_rows == 0 || j.n == 0)
        return QC_OK;
    QC_TRY(begin_rounding(&j, true, refit, err));
    for (int64_t i = 0; i < n_sweeps; i++)
        QC_TRY(descend_pass(&j, refit, true, err));
    if (refit) {
        QC_TRY(descend_pass(&j, true, false, err));
        QC_TRY(qc_cuda_to_host(j.cb, rows->scales, j.scales,
                               (size_t)(j.n_rows * j.n_groups) * sizeof *j.scales, err));
    }
    return qc_cuda_to_host(j.cb, rows->codes, j.codes, (size_t)(j.n_rows * j.n), err);
}

/* ---- hessian_error ---- */

int qc_cuda_hessian_error(qc_backend *be, const float *h, const float *e, int64_t n_rows, int64_t n,
                          double *ret, qc_err *err)
{
    enum { SLICE_ROWS = 4096 };
    qc_cuda_backend *cb = (qc_cuda_backend *)be;
    int64_t most = qc_min_i64(n_rows, SLICE_ROWS);
    if (n_rows == 0)
        return QC_OK;
    float *eh = qc_cuda_scratch(cb, QC_CUDA_S_SUM, (size_t)(most * n) * sizeof *eh, err);
    double *sums = eh ? qc_cuda_scratch(cb, QC_CUDA_S_PIVOTS, (size_t)most * sizeof *sums, err) : NULL;
    if (!sums)
        return QC_E_RESOURCE;
    for (int64_t row = 0; row < n_rows; row += SLICE_ROWS) {
        int64_t m = qc_min_i64(SLICE_ROWS, n_rows - row);
        QC_TRY(qc_cuda_gemm(cb, eh, n, e + row * n, n, false, h, n, false, m, n, n, 1, 0, err));
        qc_cuda_dot_args args = {.ret = sums, .x = e + row * n, .y = eh, .n = n};
        QC_TRY(QC_CUDA_LAUNCH(cb, row_dot, m, 1, QC_CUDA_THREADS, WARPS * sizeof(double), &args, err));
        QC_TRY(qc_cuda_to_host(cb, ret + row, sums, (size_t)m * sizeof *sums, err));
    }
    return QC_OK;
}

/* ---- quantize_rows ---- */

/* The device's copies for one slice of rows. */
typedef struct quant_job {
    qc_cuda_backend *cb;
    qc_cuda_quant_args args;
    float *w;
    qc_cuda_quant_stats *device_stats, *host_stats;
} quant_job;

static int begin_quant(quant_job *j, int64_t most, const float *col_weight, qc_err *err)
{
    qc_cuda_quant_args *a = &j->args;
    qc_cuda_backend *cb = j->cb;
    size_t n_elems = (size_t)(most * a->n_cols), n_scales = (size_t)(most * a->n_groups);
    size_t weight_bytes = (size_t)a->n_cols * sizeof(float);
    if (!(j->w = qc_cuda_scratch(cb, QC_CUDA_S_INPUT, n_elems * sizeof(float), err)) ||
        !(a->codes = qc_cuda_scratch(cb, QC_CUDA_S_CODES, n_elems, err)) ||
        !(a->scales = qc_cuda_scratch(cb, QC_CUDA_S_SCALES, n_scales * sizeof(float), err)) ||
        !(j->device_stats =
              qc_cuda_scratch(cb, QC_CUDA_S_STATS, (size_t)most * sizeof *j->device_stats, err)) ||
        (!a->symmetric && !(a->zeros = qc_cuda_scratch(cb, QC_CUDA_S_ZEROS, n_scales, err))))
        return QC_E_RESOURCE;
    a->w = j->w;
    a->stats = j->device_stats;
    j->host_stats = qc_alloc((size_t)most, sizeof *j->host_stats);
    if (!j->host_stats)
        return qc_fail_nomem(err, "statistics", (size_t)most * sizeof *j->host_stats);
    if (!col_weight)
        return QC_OK;
    float *weights = qc_cuda_scratch(cb, QC_CUDA_S_CHANGE, weight_bytes, err);
    a->col_weight = weights;
    return weights ? qc_cuda_to_device(cb, weights, col_weight, weight_bytes, err) : QC_E_RESOURCE;
}

/* Rows of w (host) to codes (host); sums are added row by row, however the caller cut the matrix. */
static int quant_slice(quant_job *j, const float *w, const qc_code_rows *rows, qc_quant_stats *stats,
                       qc_err *err)
{
    const qc_cuda_quant_args *a = &j->args;
    size_t n_elems = (size_t)(a->n_rows * a->n_cols), n_scales = (size_t)(a->n_rows * a->n_groups);
    QC_TRY(qc_cuda_to_device(j->cb, j->w, w, n_elems * sizeof *w, err));
    QC_TRY(QC_CUDA_LAUNCH(j->cb, quantize_rows, qc_ceil_div(a->n_rows, 2 * WARPS), 1, QC_CUDA_THREADS, 0, a,
                          err));
    QC_TRY(qc_cuda_to_host(j->cb, rows->codes, a->codes, n_elems, err));
    QC_TRY(qc_cuda_to_host(j->cb, rows->scales, a->scales, n_scales * sizeof(float), err));
    if (a->zeros)
        QC_TRY(qc_cuda_to_host(j->cb, rows->zeros, a->zeros, n_scales, err));
    QC_TRY(qc_cuda_to_host(j->cb, j->host_stats, j->device_stats, (size_t)a->n_rows * sizeof *j->host_stats,
                           err));
    for (int64_t i = 0; i < a->n_rows; i++) {
        stats->sq_error += j->host_stats[i].sq_error;
        stats->sq_weight += j->host_stats[i].sq_weight;
        stats->n_clipped += j->host_stats[i].n_clipped;
        stats->n_zero_groups += j->host_stats[i].n_zero_groups;
        stats->n_small_scale += j->host_stats[i].n_small_scale;
        stats->n_large_scale += j->host_stats[i].n_large_scale;
    }
    return QC_OK;
}

int qc_cuda_quantize_rows(qc_backend *be, const float *w, int64_t n_rows, int64_t n_cols,
                          const qc_quant_spec *spec, const float *col_weight, qc_code_rows *rows,
                          qc_quant_stats *stats, qc_err *err)
{
    enum { SLICE_ELEMS = 64 << 20 };
    quant_job j = {.cb = (qc_cuda_backend *)be,
                   .args = {.n_cols = n_cols,
                            .group = spec->grid.group_elems,
                            .n_groups = n_cols > 0 ? qc_ceil_div(n_cols, spec->grid.group_elems) : 0,
                            .bits = spec->grid.bits,
                            .symmetric = spec->grid.symmetric,
                            .scale_dtype = (int32_t)spec->grid.scale_dtype,
                            .sym_rule = (int32_t)spec->sym_rule,
                            .search = spec->search == QC_SEARCH_MSE}};
    int64_t most = qc_min_i64(n_rows, qc_max_i64(1, SLICE_ELEMS / qc_max_i64(n_cols, 1)));
    rows->n_rows = n_rows;
    if (n_rows == 0 || n_cols == 0)
        return QC_OK;
    if (spec->grid.kind != QC_GRID_AFFINE) { /* rare, and cheap beside the solve: on the host */
        for (int64_t r = 0; r < n_rows; r++) {
            qc_code_rows row = qc_code_rows_from(rows, &spec->grid, n_cols, r);
            qc_quant_super_row(w + r * n_cols, n_cols, spec, col_weight, &row, stats);
        }
        return QC_OK;
    }
    int rc = begin_quant(&j, most, col_weight, err);
    for (int64_t r = 0; r < n_rows && rc == QC_OK; r += most) {
        qc_code_rows part = qc_code_rows_from(rows, &spec->grid, n_cols, r);
        j.args.n_rows = qc_min_i64(most, n_rows - r);
        rc = quant_slice(&j, w + r * n_cols, &part, stats, err);
    }
    qc_free(j.host_stats);
    return rc;
}
