#include "convert.h"

#include "family.h"
#include "layer_record.h"
#include "pipeline.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_math.h"
#include "rtn.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A block of rows in work: 8 MiB of float32, so that a block and its codes stay in the processor's cache
 * while enough rows are there for all threads. */
#define BLOCK_ELEMS (2 << 20)

/* ---- plan ---- */

static int64_t block_rows(int64_t n_cols)
{
    return qc_max_i64(BLOCK_ELEMS / qc_max_i64(n_cols, 1) / QC_QPK_TILE_ROWS, 1) * QC_QPK_TILE_ROWS;
}

static bool is_matrix(qc_tensor_role role)
{
    return role == QC_ROLE_LINEAR || role == QC_ROLE_EMBEDDING || role == QC_ROLE_HEAD;
}

/* Writing order: embedding, layers, what stands behind them, head. Ties keep the order of the source. */
static int place_rank(const qc_model *model, int64_t tensor)
{
    const qc_tensor_place *p = &model->places[tensor];
    int n_layers = (int)model->config.n_layers;
    if (p->role == QC_ROLE_EMBEDDING)
        return -1;
    if (p->layer >= 0)
        return p->layer;
    return p->role == QC_ROLE_HEAD ? n_layers + 1 : n_layers;
}

/* Stable counting sort of the source's tensors by rank. */
static void order_items(const qc_model *model, qc_convert_plan *plan)
{
    int64_t n = 0;
    for (int rank = -1; rank <= (int)model->config.n_layers + 1; rank++)
        for (int64_t i = 0; i < model->src->n_tensors; i++)
            if (place_rank(model, i) == rank)
                plan->items[n++].tensor = i;
}

static void stored_info(const qc_tensor_info *in, const qc_convert_item *item, qc_tensor_info *ret)
{
    *ret = *in;
    if (item->action == QC_ACTION_QUANTIZED) {
        ret->dtype = QC_DT_GRID;
        ret->grid = item->spec.grid;
        ret->act_bits = item->act_bits;
        ret->act_group = item->act_group;
    }
}

static int plan_matrix(const qc_policy *policy, const qc_tensor_info *info, qc_tensor_role role,
                       qc_convert_item *item, qc_event_list *events, qc_err *err)
{
    bool quantize, fallback;
    qc_target target = role == QC_ROLE_LINEAR ? QC_TARGET_LINEAR : QC_TARGET_EMBEDDING;
    QC_TRY(qc_policy_decide(policy, info->name, target, qc_tensor_rows(info), qc_tensor_cols(info),
                            &item->spec, &quantize, &fallback, err));
    item->action = quantize ? QC_ACTION_QUANTIZED : QC_ACTION_KEPT16;
    item->rule = role == QC_ROLE_LINEAR ? "linear" : role == QC_ROLE_EMBEDDING ? "embedding" : "head";
    if (!fallback)
        return QC_OK;
    if (!quantize)
        return qc_event_add(events, QC_EVENT_FALLBACK, "group_fallback", info->name, 1, err,
                            "left in 16 bit: the group does not divide %lld inputs",
                            (long long)qc_tensor_cols(info));
    return qc_event_add(events, QC_EVENT_FALLBACK, "group_fallback", info->name, 1, err,
                        "group %lld for %lld inputs", (long long)item->spec.grid.group_elems,
                        (long long)qc_tensor_cols(info));
}

static int plan_item(const qc_model *model, const qc_policy *policy, qc_convert_item *item,
                     qc_event_list *events, qc_err *err)
{
    const qc_tensor_info *info = model->src->info(model->src, item->tensor);
    qc_tensor_role role = model->places[item->tensor].role;
    if (info->dtype == QC_DT_GRID)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: tensor %s is quantized already", model->src->path,
                       info->name);
    if (is_matrix(role)) {
        QC_TRY(plan_matrix(policy, info, role, item, events, err));
    } else if (role == QC_ROLE_TIED) {
        item->action = QC_ACTION_TIED;
        item->rule = "tied to the embedding";
    } else if (role == QC_ROLE_BUFFER) {
        item->action = QC_ACTION_DROPPED;
        item->rule = "computed buffer";
    } else {
        item->action = QC_ACTION_COPIED;
        item->rule = role == QC_ROLE_NORM ? "norm" : "bias";
    }
    if (item->action != QC_ACTION_TIED && item->action != QC_ACTION_DROPPED) {
        qc_tensor_info out;
        stored_info(info, item, &out);
        item->bytes_out = qc_qpk_tensor_bytes(&out);
    }
    return QC_OK;
}

qc_convert_item *qc_convert_plan_item(const qc_convert_plan *plan, int64_t tensor)
{
    for (int64_t i = 0; i < plan->n_items; i++)
        if (plan->items[i].tensor == tensor)
            return &plan->items[i];
    return NULL;
}

/* Matrices of a stage see the same activations: quantized if all of them are on a grid. */
static int plan_acts_of_stage(const qc_model *model, const qc_policy *policy, int layer, qc_stage stage,
                              qc_convert_plan *plan, qc_event_list *events, qc_err *err)
{
    const qc_slot *slots = qc_stage_slots(stage);
    int64_t width = qc_stage_width(&model->config, stage);
    for (const qc_slot *s = slots; *s != QC_N_SLOTS; s++) {
        int64_t tensor = qc_model_tensor(model, layer, *s);
        if (qc_convert_plan_item(plan, tensor)->action != QC_ACTION_QUANTIZED)
            return qc_event_add(events, QC_EVENT_NOTE, "activations",
                                model->src->info(model->src, tensor)->name, 1, err,
                                "left in 16 bit, and so are the activations that it reads");
    }
    for (const qc_slot *s = slots; *s != QC_N_SLOTS; s++) {
        qc_convert_item *item = qc_convert_plan_item(plan, qc_model_tensor(model, layer, *s));
        item->act_bits = policy->act_bits;
        item->act_group = policy->act_group < width ? policy->act_group : 0;
    }
    return QC_OK;
}

static int plan_acts(const qc_model *model, const qc_policy *policy, qc_convert_plan *plan,
                     qc_event_list *events, qc_err *err)
{
    for (int layer = 0; layer < (int)model->config.n_layers && policy->act_bits; layer++)
        for (int stage = 0; stage < QC_N_STAGES; stage++)
            QC_TRY(plan_acts_of_stage(model, policy, layer, (qc_stage)stage, plan, events, err));
    return QC_OK;
}

/* Names that overrides and skip patterns may match. */
static int check_patterns(const qc_model *model, const qc_policy *policy, qc_err *err)
{
    const char **names = qc_alloc((size_t)model->src->n_tensors, sizeof *names);
    if (!names)
        return qc_fail_nomem(err, "tensor names", (unsigned long long)model->src->n_tensors * sizeof *names);
    int64_t n = 0;
    for (int64_t i = 0; i < model->src->n_tensors; i++)
        if (is_matrix(model->places[i].role))
            names[n++] = model->src->info(model->src, i)->name;
    int rc = qc_policy_check_used(policy, names, n, err);
    qc_free(names);
    return rc;
}

int qc_convert_plan_make(const qc_model *model, const qc_policy *policy, qc_event_list *events,
                         qc_convert_plan *ret, qc_err *err)
{
    QC_TRY(check_patterns(model, policy, err));
    qc_convert_plan plan = {.n_items = model->src->n_tensors};
    plan.items = qc_calloc((size_t)plan.n_items, sizeof *plan.items);
    if (!plan.items)
        return qc_fail_nomem(err, "plan", (unsigned long long)plan.n_items * sizeof *plan.items);
    order_items(model, &plan);
    for (int64_t i = 0; i < plan.n_items; i++) {
        qc_convert_item *item = &plan.items[i];
        const qc_tensor_info *info = model->src->info(model->src, item->tensor);
        int rc = plan_item(model, policy, item, events, err);
        if (rc < 0) {
            qc_convert_plan_clear(&plan);
            return rc;
        }
        plan.bytes_in += info->n_bytes;
        plan.bytes_out += item->bytes_out;
        if (item->action == QC_ACTION_QUANTIZED) {
            plan.n_weights += (double)qc_tensor_n_elems(info);
            /* float32, codes and packed codes of a block, and at worst a scale and a zero for every 16 of
             * them */
            uint64_t elems = (uint64_t)block_rows(qc_tensor_cols(info)) * (uint64_t)qc_tensor_cols(info);
            plan.work_bytes = elems * 7 > plan.work_bytes ? elems * 7 : plan.work_bytes;
        }
    }
    int rc = plan_acts(model, policy, &plan, events, err);
    if (rc == QC_OK)
        *ret = plan;
    else
        qc_convert_plan_clear(&plan);
    return rc;
}

void qc_convert_plan_clear(qc_convert_plan *plan)
{
    if (!plan)
        return;
    qc_free(plan->items);
    *plan = (qc_convert_plan){0};
}

/* ---- run ---- */

typedef struct run {
    const qc_model *model;
    qc_backend *be;
    const qc_convert_options *options;
    qc_qpk_writer *writer;
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

static int copy_tensor(run *r, const qc_convert_item *item, qc_err *err)
{
    const qc_source *src = r->model->src;
    const qc_tensor_info *info = src->info(src, item->tensor);
    const char *raw = src->raw(src, item->tensor);
    int64_t n_rows = qc_tensor_rows(info), n_cols = qc_tensor_cols(info), step = block_rows(n_cols);
    int64_t row_bytes = n_rows ? (int64_t)info->n_bytes / n_rows : 0;
    if (!raw && n_rows > 0)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: tensor %s can not be copied as it is", src->path,
                       info->name);
    QC_TRY(qc_qpk_begin_tensor(r->writer, info, err));
    for (int64_t row = 0; row < n_rows; row += step) {
        int64_t n = qc_min_i64(step, n_rows - row);
        QC_TRY(qc_qpk_put_dense(r->writer, raw + row * row_bytes, n, err));
        src->release(src, item->tensor, row, n);
        QC_TRY(advance(r, (double)(n * n_cols), err));
    }
    return qc_qpk_end_tensor(r->writer, err);
}

/* A vector that scales were folded into: float32, since rounding it to 16 bit would undo the exactness. */
static int put_folded(run *r, qc_convert_item *item, qc_err *err)
{
    qc_tensor_info out = *r->model->src->info(r->model->src, item->tensor);
    int64_t n = qc_tensor_n_elems(&out);
    out.dtype = QC_DT_F32;
    float *values = qc_alloc((size_t)n, sizeof *values);
    if (!values)
        return qc_fail_nomem(err, out.name, (unsigned long long)n * sizeof *values);
    int rc = qc_journal_read_dense(r->options->journal, out.name, values, n, err);
    if (rc == QC_OK && (rc = qc_qpk_begin_tensor(r->writer, &out, err)) == QC_OK &&
        (rc = qc_qpk_put_dense(r->writer, values, qc_tensor_rows(&out), err)) == QC_OK)
        rc = qc_qpk_end_tensor(r->writer, err);
    qc_free(values);
    item->bytes_out = qc_qpk_tensor_bytes(&out);
    return rc;
}

typedef struct block {
    float *w;
    qc_code_rows rows;
} block;

static void block_free(block *b)
{
    qc_free(b->w);
    qc_free(b->rows.codes);
    qc_free(b->rows.scales);
    qc_free(b->rows.zeros);
}

static int block_alloc(block *b, int64_t n_rows, int64_t n_cols, const qc_grid *grid, qc_err *err)
{
    size_t groups = (size_t)(n_rows * qc_ceil_div(n_cols, grid->group_elems));
    *b = (block){.w = qc_alloc((size_t)(n_rows * n_cols), sizeof *b->w)};
    b->rows.codes = qc_alloc((size_t)(n_rows * n_cols), 1);
    b->rows.scales = qc_alloc(groups, sizeof *b->rows.scales);
    if (!grid->symmetric)
        b->rows.zeros = qc_alloc(groups, 1);
    if (b->w && b->rows.codes && b->rows.scales && (grid->symmetric || b->rows.zeros))
        return QC_OK;
    block_free(b);
    return qc_fail_nomem(err, "block of rows", (unsigned long long)(n_rows * n_cols) * 5);
}

/* Does the journal hold the tensor? Names of tensors and of other records do not meet. */
static bool is_solved(const run *r, const char *name)
{
    return r->options->journal && qc_journal_has(r->options->journal, name);
}

/* Codes of the journal to the file. */
static int carry_codes(run *r, const qc_convert_item *item, qc_err *err)
{
    const qc_tensor_info *info = r->model->src->info(r->model->src, item->tensor);
    int64_t n_rows = qc_tensor_rows(info), n_cols = qc_tensor_cols(info),
            step = qc_min_i64(block_rows(n_cols), n_rows);
    const qc_grid *grid = &item->spec.grid;
    qc_tensor_info out;
    stored_info(info, item, &out);
    block b;
    QC_TRY(block_alloc(&b, step, n_cols, grid, err));
    int rc = qc_qpk_begin_tensor(r->writer, &out, err);
    for (int64_t row = 0; row < n_rows && rc == QC_OK; row += step) {
        int64_t n = qc_min_i64(step, n_rows - row);
        if ((rc = qc_journal_read_codes(r->options->journal, info->name, grid, n_cols, row, n, &b.rows,
                                        err)) == QC_OK &&
            (rc = qc_qpk_put_codes(r->writer, &b.rows, err)) == QC_OK)
            rc = advance(r, (double)(n * n_cols), err);
    }
    block_free(&b);
    return rc == QC_OK ? qc_qpk_end_tensor(r->writer, err) : rc;
}

static int quantize_tensor(run *r, const qc_convert_item *item, qc_quant_stats *stats, qc_err *err)
{
    const qc_source *src = r->model->src;
    const qc_tensor_info *info = src->info(src, item->tensor);
    int64_t n_rows = qc_tensor_rows(info), n_cols = qc_tensor_cols(info),
            step = qc_min_i64(block_rows(n_cols), n_rows);
    qc_tensor_info out;
    stored_info(info, item, &out);
    block b;
    QC_TRY(block_alloc(&b, step, n_cols, &item->spec.grid, err));
    int rc = qc_qpk_begin_tensor(r->writer, &out, err);
    for (int64_t row = 0; row < n_rows && rc == QC_OK; row += step) {
        int64_t n = qc_min_i64(step, n_rows - row);
        b.rows.n_rows = n;
        if ((rc = src->read_rows(src, item->tensor, row, n, b.w, err)) < 0)
            break;
        src->release(src, item->tensor, row, n);
        if ((rc = qc_rtn_rows(r->be, b.w, n, n_cols, &item->spec, NULL, &b.rows, stats, err)) < 0)
            rc = qc_err_prefix(err, "%s: tensor %s, rows from %lld", src->path, info->name, (long long)row);
        else if ((rc = qc_qpk_put_codes(r->writer, &b.rows, err)) == QC_OK)
            rc = advance(r, (double)(n * n_cols), err);
    }
    block_free(&b);
    return rc == QC_OK ? qc_qpk_end_tensor(r->writer, err) : rc;
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
                             .error_norm = m->result.norm,
                             .damp = m->input.damp,
                             .n_dead = m->input.n_dead,
                             .n_tokens = m->tokens,
                             .n_rtn_rows = m->result.n_rtn_rows,
                             .seconds = m->seconds};
}

/* What became of a tensor. */
typedef struct outcome {
    qc_quant_stats stats;
    const qc_matrix_record *record; /* NULL: no calibration */
    bool folded;                    /* scales of a neighbour were multiplied in */
} outcome;

static int account(const run *r, const qc_convert_item *item, const outcome *out, qc_account_list *accounts,
                   qc_err *err)
{
    const qc_quant_stats *stats = &out->stats;
    qc_dtype dense = out->folded ? QC_DT_F32 : r->model->src->info(r->model->src, item->tensor)->dtype;
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
        .searched = quantized && item->spec.search != QC_SEARCH_MINMAX,
        .bytes_in = info->n_bytes,
        .bytes_out = item->bytes_out,
        .sq_error = quantized ? stats->sq_error : NAN,
        .sq_weight = quantized ? stats->sq_weight : NAN,
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
        item->bytes_out = qc_qpk_tensor_bytes(info);
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
        return carry_codes(r, item, err);
    }
    if (solved && item->action == QC_ACTION_COPIED) {
        out->folded = true;
        return put_folded(r, item, err);
    }
    QC_TRY(check_finite(r, item, events, err));
    return item->action == QC_ACTION_QUANTIZED ? quantize_tensor(r, item, &out->stats, err)
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

/* A tied table is stored once, under the name that it has in the source; the other name becomes an alias. */
static int add_tied_name(const qc_model *model, qc_qpk_writer *writer, qc_err *err)
{
    const char *const *names = model->config.family->names;
    const char *stored = model->src->info(model->src, qc_model_tensor(model, 0, QC_SLOT_EMBEDDING))->name;
    bool as_head = strcmp(stored, names[QC_SLOT_HEAD]) == 0;
    return qc_qpk_add_alias(writer, names[as_head ? QC_SLOT_EMBEDDING : QC_SLOT_HEAD], stored, err);
}

int qc_convert_run(const qc_convert_plan *plan, const qc_model *model, qc_backend *be,
                   const qc_convert_options *options, qc_qpk_writer *writer, qc_account_list *accounts,
                   qc_event_list *events, qc_err *err)
{
    run r = {.model = model, .be = be, .options = options, .writer = writer, .record_layer = -1};
    for (int64_t i = 0; i < plan->n_items; i++)
        if (plan->items[i].bytes_out)
            r.all += (double)qc_tensor_n_elems(model->src->info(model->src, plan->items[i].tensor));
    int rc = QC_OK;
    for (int64_t i = 0; i < plan->n_items && rc == QC_OK; i++)
        rc = convert_item(&r, &plan->items[i], accounts, events, err);
    qc_layer_record_clear(&r.record);
    if (rc == QC_OK && model->config.tied)
        rc = add_tied_name(model, writer, err);
    return rc;
}

int qc_convert_count(const qc_convert_plan *plan, const qc_model *model, qc_qpk_writer *writer,
                     uint64_t *ret_bytes, qc_err *err)
{
    for (int64_t i = 0; i < plan->n_items; i++) {
        const qc_convert_item *item = &plan->items[i];
        qc_tensor_info out;
        if (item->action == QC_ACTION_TIED || item->action == QC_ACTION_DROPPED)
            continue;
        stored_info(model->src->info(model->src, item->tensor), item, &out);
        QC_TRY(qc_qpk_count_tensor(writer, &out, err));
    }
    if (model->config.tied)
        QC_TRY(add_tied_name(model, writer, err));
    return qc_qpk_count(writer, ret_bytes, err);
}
