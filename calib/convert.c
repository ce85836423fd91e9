#include "convert_internal.h"

#include "layer_record.h"
#include "pipeline.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_math.h"
#include "rtn.h"

#include <math.h>
#include <string.h>

typedef struct run {
    const qc_convert_plan *plan;
    const qc_model *model;
    qc_backend *be;
    const qc_convert_options *options;
    qc_writer *writer;
    double done, all;       /* elements, for progress */
    qc_layer_record record; /* of the layer at hand, where the journal has one */
    int record_layer;       /* -1: none yet */
} run;

static int advance(run *r, double elems, qc_err *err)
{
    r->done += elems;
    if (r->options->progress && r->all > 0)
        r->options->progress(r->options->progress_ctx, r->done / r->all);
    return qc_check_interrupt(err);
}

/* Values in the type of *out, from the top row on. */
static int convert_tensor(run *r, const qc_convert_item *item, const qc_tensor_info *out, qc_err *err)
{
    const qc_source *src = r->model->src;
    int64_t n_rows = qc_tensor_rows(out), n_cols = qc_tensor_cols(out), step = qc_convert_block_rows(n_cols);
    size_t elems = (size_t)(qc_min_i64(step, n_rows) * n_cols);
    float *values = qc_alloc(elems, sizeof *values);
    void *stored = qc_alloc(elems, (size_t)qc_dtype_bits(out->dtype) / 8);
    int rc = values && stored ? r->writer->begin_tensor(r->writer, out, err)
                              : qc_fail_nomem(err, out->name, (unsigned long long)elems * 8);
    for (int64_t row = 0; row < n_rows && rc == QC_OK; row += step) {
        int64_t n = qc_min_i64(step, n_rows - row);
        if ((rc = src->read_rows(src, item->tensor, row, n, values, err)) < 0)
            break;
        src->release(src, item->tensor, row, n);
        if ((rc = qc_dense_from_f32(out->dtype, values, n * n_cols, stored, err)) == QC_OK &&
            (rc = r->writer->put_dense(r->writer, stored, n, err)) == QC_OK)
            rc = advance(r, (double)(n * n_cols), err);
    }
    qc_free(values);
    qc_free(stored);
    return rc == QC_OK ? r->writer->end_tensor(r->writer, err) : rc;
}

static int copy_tensor(run *r, const qc_convert_item *item, qc_err *err)
{
    const qc_source *src = r->model->src;
    qc_tensor_info info;
    qc_convert_stored_info(r->model, item, &info);
    const char *raw = src->raw(src, item->tensor);
    int64_t n_rows = qc_tensor_rows(&info), n_cols = qc_tensor_cols(&info),
            step = qc_convert_block_rows(n_cols);
    int64_t row_bytes = n_rows ? (int64_t)info.n_bytes / n_rows : 0;
    if (info.dtype != src->info(src, item->tensor)->dtype || (!raw && n_rows > 0))
        return convert_tensor(r, item, &info, err);
    QC_TRY(r->writer->begin_tensor(r->writer, &info, err));
    for (int64_t row = 0; row < n_rows; row += step) {
        int64_t n = qc_min_i64(step, n_rows - row);
        QC_TRY(r->writer->put_dense(r->writer, raw + row * row_bytes, n, err));
        src->release(src, item->tensor, row, n);
        QC_TRY(advance(r, (double)(n * n_cols), err));
    }
    return r->writer->end_tensor(r->writer, err);
}

/* A vector that scales were folded into. */
static int put_folded(run *r, qc_convert_item *item, qc_err *err)
{
    qc_tensor_info out;
    QC_TRY(qc_convert_folded_info(r->plan, r->model, item, &out, err));
    int64_t n = qc_tensor_n_elems(&out);
    float *values = qc_alloc((size_t)n, sizeof *values);
    void *stored = qc_alloc((size_t)n, (size_t)qc_dtype_bits(out.dtype) / 8);
    int rc = values && stored ? qc_journal_read_dense(r->options->journal, out.name, values, n, err)
                              : qc_fail_nomem(err, out.name, (unsigned long long)n * 2 * sizeof *values);
    if (rc == QC_OK && (rc = qc_dense_from_f32(out.dtype, values, n, stored, err)) == QC_OK &&
        (rc = r->writer->begin_tensor(r->writer, &out, err)) == QC_OK &&
        (rc = r->writer->put_dense(r->writer, stored, qc_tensor_rows(&out), err)) == QC_OK)
        rc = r->writer->end_tensor(r->writer, err);
    qc_free(values);
    qc_free(stored);
    item->dtype = out.dtype;
    item->bytes_out = r->plan->format->tensor_bytes(r->plan->type, &out);
    return rc;
}

typedef struct block {
    float *w;
    qc_code_rows rows;
} block;

static void block_free(block *b)
{
    qc_free(b->w);
    qc_code_rows_free(&b->rows);
}

static int block_alloc(block *b, int64_t n_rows, int64_t n_cols, const qc_grid *grid, qc_err *err)
{
    *b = (block){.w = qc_alloc((size_t)(n_rows * n_cols), sizeof *b->w)};
    int rc = b->w ? QC_OK : qc_fail_nomem(err, "block of rows", (unsigned long long)(n_rows * n_cols) * 4);
    if (rc == QC_OK)
        rc = qc_code_rows_alloc(grid, n_rows, n_cols, &b->rows, err);
    if (rc < 0)
        block_free(b);
    return rc;
}

/* Distance of what is written from the checkpoint, without weights. */
typedef struct stored_sums {
    double sq_error, sq_weight;
} stored_sums;

/* Rows b->w of the checkpoint against the codes that are put for them, decoded as readers do. */
static int add_stored(const block *b, const qc_grid *grid, int64_t n_cols, stored_sums *sums, qc_err *err)
{
    int64_t n = b->rows.n_rows;
    float *decoded = qc_alloc((size_t)(n * n_cols), sizeof *decoded);
    if (!decoded)
        return qc_fail_nomem(err, "decoded rows", (unsigned long long)(n * n_cols) * sizeof *decoded);
    qc_code_rows_decode(&b->rows, grid, n_cols, decoded);
    for (int64_t r = 0; r < n; r++) {
        double error = 0, weight = 0;
        for (int64_t i = r * n_cols; i < (r + 1) * n_cols; i++) {
            double w = (double)b->w[i], e = w - (double)decoded[i];
            error += e * e;
            weight += w * w;
        }
        sums->sq_error += error;
        sums->sq_weight += weight;
    }
    qc_free(decoded);
    return QC_OK;
}

/* Does the journal hold the tensor? Names of tensors and of other records do not meet. */
static bool is_solved(const run *r, const char *name)
{
    return r->options->journal && qc_journal_has(r->options->journal, name);
}

/* Codes that exist already, in the journal or in the source, to the output. */
static int carry_codes(run *r, const qc_convert_item *item, bool from_journal, stored_sums *stored,
                       qc_err *err)
{
    const qc_source *src = r->model->src;
    const qc_tensor_info *info = src->info(src, item->tensor);
    int64_t n_rows = qc_tensor_rows(info), n_cols = qc_tensor_cols(info),
            step = qc_min_i64(qc_convert_block_rows(n_cols), n_rows);
    const qc_grid *grid = &item->spec.grid;
    qc_tensor_info out;
    qc_convert_stored_info(r->model, item, &out);
    block b;
    QC_TRY(block_alloc(&b, step, n_cols, grid, err));
    int rc = r->writer->begin_tensor(r->writer, &out, err);
    for (int64_t row = 0; row < n_rows && rc == QC_OK; row += step) {
        int64_t n = qc_min_i64(step, n_rows - row);
        b.rows.n_rows = n;
        rc = from_journal
                 ? qc_journal_read_codes(r->options->journal, info->name, grid, n_cols, row, n, &b.rows, err)
                 : src->read_codes(src, item->tensor, row, n, &b.rows, err);
        if (rc < 0 || (rc = src->read_rows(src, item->tensor, row, n, b.w, err)) < 0)
            break;
        src->release(src, item->tensor, row, n);
        if ((rc = add_stored(&b, grid, n_cols, stored, err)) == QC_OK &&
            (rc = r->writer->put_codes(r->writer, &b.rows, err)) == QC_OK)
            rc = advance(r, (double)(n * n_cols), err);
    }
    block_free(&b);
    return rc == QC_OK ? r->writer->end_tensor(r->writer, err) : rc;
}

static int quantize_tensor(run *r, const qc_convert_item *item, qc_quant_stats *stats, stored_sums *stored,
                           qc_err *err)
{
    const qc_source *src = r->model->src;
    const qc_tensor_info *info = src->info(src, item->tensor);
    int64_t n_rows = qc_tensor_rows(info), n_cols = qc_tensor_cols(info),
            step = qc_min_i64(qc_convert_block_rows(n_cols), n_rows);
    qc_tensor_info out;
    qc_convert_stored_info(r->model, item, &out);
    block b;
    QC_TRY(block_alloc(&b, step, n_cols, &item->spec.grid, err));
    int rc = r->writer->begin_tensor(r->writer, &out, err);
    for (int64_t row = 0; row < n_rows && rc == QC_OK; row += step) {
        int64_t n = qc_min_i64(step, n_rows - row);
        b.rows.n_rows = n;
        if ((rc = src->read_rows(src, item->tensor, row, n, b.w, err)) < 0)
            break;
        src->release(src, item->tensor, row, n);
        if ((rc = qc_rtn_rows(r->be, b.w, n, n_cols, &item->spec, NULL, &b.rows, stats, err)) < 0)
            rc = qc_err_prefix(err, "%s: tensor %s, rows from %lld", src->path, info->name, (long long)row);
        else if ((rc = add_stored(&b, &item->spec.grid, n_cols, stored, err)) == QC_OK &&
                 (rc = r->writer->put_codes(r->writer, &b.rows, err)) == QC_OK)
            rc = advance(r, (double)(n * n_cols), err);
    }
    block_free(&b);
    return rc == QC_OK ? r->writer->end_tensor(r->writer, err) : rc;
}

/* Figures of a matrix in the record of its layer; NULL if it has none. */
static const qc_matrix_record *find_record(const run *r, const char *name)
{
    for (int i = 0; i < r->record.n_matrices; i++)
        if (strcmp(r->record.matrices[i].name, name) == 0)
            return &r->record.matrices[i];
    return NULL;
}

static qc_tensor_solve solve_account(const qc_matrix_record *m)
{
    return (qc_tensor_solve){.method = m->method,
                             .order = m->order,
                             .error = m->result.error,
                             .error_rtn = m->result.error_rtn,
                             .error_norm = m->norm,
                             .damp = m->input.damp,
                             .n_dead = m->input.n_dead,
                             .n_tokens = m->tokens,
                             .n_rtn_rows = m->result.n_rtn_rows,
                             .seconds = m->seconds};
}

/* What became of a tensor. */
typedef struct outcome {
    qc_quant_stats stats;
    stored_sums stored;
    const qc_matrix_record *record; /* NULL: no calibration */
    bool folded;                    /* scales of a neighbour were multiplied in */
} outcome;

static int account(const run *r, const qc_convert_item *item, const outcome *out, qc_account_list *accounts,
                   qc_err *err)
{
    const qc_quant_stats *stats = &out->stats;
    qc_dtype dense = item->dtype;
    const qc_source *src = r->model->src;
    const qc_tensor_info *info = src->info(src, item->tensor);
    bool quantized = item->action == QC_ACTION_QUANTIZED, stored = item->bytes_out > 0;
    qc_tensor_account a = {
        .name = (char *)(uintptr_t)info->name,
        .rule = (char *)(uintptr_t)(out->folded ? "scales folded in" : item->rule),
        .action = item->action,
        .layer = r->model->places[item->tensor].layer,
        .source_dtype = info->dtype,
        .dtype = quantized ? QC_DT_GRID
                 : stored  ? dense
                           : QC_DT_INVALID,
        .n_rows = qc_tensor_rows(info),
        .n_cols = qc_tensor_cols(info),
        .bits = quantized ? item->spec.grid.bits
                : stored  ? qc_dtype_bits(dense)
                          : 0,
        .group_elems = quantized ? item->spec.grid.group_elems : 0,
        .symmetric = quantized && item->spec.grid.symmetric,
        .searched = quantized && item->spec.search == QC_SEARCH_MSE,
        .carried = item->carried && !out->record,
        .bytes_in = info->n_bytes,
        .bytes_out = item->bytes_out,
        .sq_error = quantized ? stats->sq_error : NAN,
        .sq_weight = quantized ? stats->sq_weight : NAN,
        .sq_stored = out->stored.sq_error,
        .sq_source = out->stored.sq_weight,
        .sq_read = NAN,
        .sq_error_minmax = NAN,
        .n_clipped = stats->n_clipped,
        .n_zero_groups = stats->n_zero_groups,
        .n_small_scale = stats->n_small_scale,
    };
    if (out->record)
        a.solve = solve_account(out->record);
    return qc_account_add(accounts, &a, err);
}

/* NaN and infinities: refused by name, or with allow_nonfinite the tensor stays as it is. */
static int check_finite(const run *r, qc_convert_item *item, qc_event_list *events, qc_err *err)
{
    const qc_source *src = r->model->src;
    const qc_tensor_info *info = src->info(src, item->tensor);
    bool quantized = item->action == QC_ACTION_QUANTIZED;
    if (quantized && !r->options->allow_nonfinite)
        return QC_OK; /* the quantizer looks at every value anyway */
    int64_t row, col;
    QC_TRY(qc_model_find_nonfinite(r->model, item->tensor, &row, &col, err));
    if (row < 0)
        return QC_OK;
    if (!r->options->allow_nonfinite)
        return qc_fail(err, QC_E_INPUT, "%s: tensor %s holds a NaN or infinity at row %lld, column %lld",
                       src->path, info->name, (long long)row, (long long)col);
    if (quantized) {
        item->action = QC_ACTION_KEPT16;
        item->dtype = info->dtype;
        item->bytes_out = r->plan->format->tensor_bytes(r->plan->type, info);
    }
    return qc_event_add(events, QC_EVENT_FALLBACK, "nonfinite", info->name, 1, err,
                        "NaN or infinity at row %lld, column %lld; stored as it is", (long long)row,
                        (long long)col);
}

/* Read what the journal says about a layer when the first of its tensors comes: the account of its time, and
 * its events. */
static int enter_layer(run *r, int layer, qc_account_list *accounts, qc_event_list *events, qc_err *err)
{
    char name[32], *text;
    qc_pipeline_record_name(layer, name, sizeof name);
    if (layer < 0 || layer == r->record_layer || !is_solved(r, name))
        return QC_OK;
    QC_TRY(qc_journal_read_text(r->options->journal, name, &text, err));
    qc_layer_record_clear(&r->record);
    int rc = qc_layer_record_parse(text, &r->record, err);
    qc_free(text);
    QC_TRY(rc);
    r->record_layer = layer;
    for (int64_t i = 0; i < r->record.events.n_events; i++) {
        const qc_event *e = &r->record.events.events[i];
        QC_TRY(qc_event_add(events, e->level, e->kind, e->subject, e->count, err, "%s", e->detail));
    }
    return qc_account_add_layer(accounts, &r->record.times, err);
}

/* Write the tensor: from the journal where that has it, else from the source. */
static int write_item(run *r, qc_convert_item *item, outcome *out, qc_event_list *events, qc_err *err)
{
    const char *name = r->model->src->info(r->model->src, item->tensor)->name;
    if (item->action == QC_ACTION_TIED || item->action == QC_ACTION_DROPPED)
        return QC_OK;
    bool solved = is_solved(r, name);
    if (solved && item->action == QC_ACTION_QUANTIZED) {
        out->record = find_record(r, name);
        out->stats = out->record ? out->record->stats : out->stats;
        return carry_codes(r, item, true, &out->stored, err);
    }
    if (solved && item->action == QC_ACTION_COPIED) {
        out->folded = true;
        return put_folded(r, item, err);
    }
    if (item->carried)
        return carry_codes(r, item, false, &out->stored, err);
    QC_TRY(check_finite(r, item, events, err));
    return item->action == QC_ACTION_QUANTIZED ? quantize_tensor(r, item, &out->stats, &out->stored, err)
                                               : copy_tensor(r, item, err);
}

static int convert_item(run *r, const qc_convert_item *planned, qc_account_list *accounts,
                        qc_event_list *events, qc_err *err)
{
    qc_convert_item item = *planned;
    outcome out = {.record = NULL};
    const char *name = r->model->src->info(r->model->src, item.tensor)->name;
    QC_TRY(enter_layer(r, r->model->places[item.tensor].layer, accounts, events, err));
    QC_TRY(write_item(r, &item, &out, events, err));
    if (out.stats.n_small_scale)
        QC_TRY(qc_event_add(events, QC_EVENT_NOTE, "small_scale", name, out.stats.n_small_scale, err,
                            "scales below the normal range of the stored type"));
    return account(r, &item, &out, accounts, err);
}

int qc_convert_run(const qc_convert_plan *plan, const qc_model *model, qc_backend *be,
                   const qc_convert_options *options, qc_writer *writer, qc_account_list *accounts,
                   qc_event_list *events, qc_err *err)
{
    run r = {
        .plan = plan, .model = model, .be = be, .options = options, .writer = writer, .record_layer = -1};
    for (int64_t i = 0; i < plan->n_items; i++)
        if (plan->items[i].bytes_out)
            r.all += (double)qc_tensor_n_elems(model->src->info(model->src, plan->items[i].tensor));
    int rc = QC_OK;
    for (int64_t i = 0; i < plan->n_items && rc == QC_OK; i++)
        rc = convert_item(&r, &plan->items[i], accounts, events, err);
    qc_layer_record_clear(&r.record);
    return rc;
}
