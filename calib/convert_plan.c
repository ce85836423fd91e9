#include "convert_internal.h"

#include "engine_lint.h"
#include "family.h"
#include "qc_alloc.h"
#include "qc_math.h"

#include <stdio.h>
#include <string.h>

/* A block of rows in work: 8 MiB of float32, so that a block and its codes stay in the processor's cache
 * while enough rows are there for all threads. */
#define BLOCK_ELEMS (2 << 20)

/* ---- plan ---- */

int64_t qc_convert_block_rows(int64_t n_cols)
{
    return qc_max_i64(BLOCK_ELEMS / qc_max_i64(n_cols, 1) / QC_WRITER_ROWS, 1) * QC_WRITER_ROWS;
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
            if (place_rank(model, i) == rank) {
                plan->of_tensor[i] = n;
                plan->items[n++].tensor = i;
            }
}

void qc_convert_stored_info(const qc_model *model, const qc_convert_item *item, qc_tensor_info *ret)
{
    *ret = *model->src->info(model->src, item->tensor);
    ret->dtype = item->dtype;
    ret->grid = (qc_grid){0};
    if (ret->dtype != QC_DT_GRID)
        ret->n_bytes = (uint64_t)qc_tensor_n_elems(ret) * (uint64_t)qc_dtype_bits(ret->dtype) / 8;
    ret->act_bits = 0;
    ret->act_group = 0;
    if (item->action == QC_ACTION_QUANTIZED) {
        ret->grid = item->spec.grid;
        ret->act_bits = item->act_bits;
        ret->act_group = item->act_group;
    }
}

qc_tensor_use qc_convert_use(const qc_model *model, int64_t tensor)
{
    const qc_tensor_place *p = &model->places[tensor];
    qc_tensor_kind kind = p->role == QC_ROLE_LINEAR      ? QC_KIND_LINEAR
                          : p->role == QC_ROLE_EMBEDDING ? QC_KIND_EMBEDDING
                          : p->role == QC_ROLE_HEAD      ? QC_KIND_HEAD
                                                         : QC_KIND_VECTOR;
    return (qc_tensor_use){.kind = kind,
                           .layer = p->layer,
                           .n_layers = (int)model->config.n_layers,
                           .tied = kind == QC_KIND_EMBEDDING && model->config.tied,
                           .source = model->src->info(model->src, tensor)->dtype};
}

int qc_convert_folded_info(const qc_convert_plan *plan, const qc_model *model, const qc_convert_item *item,
                           qc_tensor_info *info, qc_err *err)
{
    const char *why;
    qc_tensor_use use = qc_convert_use(model, item->tensor);
    *info = *model->src->info(model->src, item->tensor);
    info->dtype =
        QC_DT_F32; /* rounding it to 16 bit would undo the exactness, where the format has a choice */
    return plan->format->hold(plan->type, &use, info, &why, err);
}

/* Let the format say how it stores what the policy wants. */
static int hold_item(const qc_convert_plan *plan, const qc_model *model, qc_convert_item *item,
                     qc_event_list *events, qc_err *err)
{
    const char *why = NULL;
    qc_tensor_info stored;
    qc_tensor_use use = qc_convert_use(model, item->tensor);
    qc_convert_stored_info(model, item, &stored);
    QC_TRY(plan->format->hold(plan->type, &use, &stored, &why, err));
    item->dtype = stored.dtype;
    if (item->action == QC_ACTION_QUANTIZED && stored.dtype != QC_DT_GRID) {
        item->action = QC_ACTION_KEPT16;
        QC_TRY(qc_event_add(events, QC_EVENT_NOTE, "kept16", stored.name, 1, err, "%s", why));
    }
    if (item->action == QC_ACTION_QUANTIZED && why)
        QC_TRY(qc_event_add(events, QC_EVENT_NOTE, "type_fallback", stored.name, 1, err, "%s", why));
    if (item->action == QC_ACTION_QUANTIZED)
        item->spec.grid = stored.grid;
    item->bytes_out = plan->format->tensor_bytes(plan->type, &stored);
    return QC_OK;
}

static int plan_matrix(const qc_policy *policy, const qc_tensor_info *info, qc_tensor_role role,
                       bool own_grids, qc_convert_item *item, qc_event_list *events, qc_err *err)
{
    bool quantize, fallback;
    qc_target target = role == QC_ROLE_LINEAR ? QC_TARGET_LINEAR : QC_TARGET_EMBEDDING;
    qc_policy fitting = *policy;
    if (own_grids) /* no group of the recipe's can be at fault */
        fitting.group_fallback = QC_GROUP_CHANNEL;
    QC_TRY(qc_policy_decide(&fitting, info->name, target, qc_tensor_rows(info), qc_tensor_cols(info),
                            &item->spec, &quantize, &fallback, err));
    fallback = fallback && !own_grids;
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

/* As the source has it. */
static void keep_matrix(const qc_tensor_info *info, qc_tensor_role role, qc_convert_item *item)
{
    bool grid = info->dtype == QC_DT_GRID;
    item->action = grid ? QC_ACTION_QUANTIZED : QC_ACTION_KEPT16;
    item->spec = (qc_quant_spec){.grid = info->grid};
    item->act_bits = grid ? info->act_bits : 0;
    item->act_group = grid ? info->act_group : 0;
    item->rule = role == QC_ROLE_LINEAR ? "linear" : role == QC_ROLE_EMBEDDING ? "embedding" : "head";
}

static bool same_grid(const qc_grid *a, const qc_grid *b)
{
    return a->kind == b->kind && a->bits == b->bits && a->symmetric == b->symmetric &&
           a->group_elems == b->group_elems && a->scale_dtype == b->scale_dtype &&
           a->super_elems == b->super_elems && a->sub_bits == b->sub_bits;
}

static void grid_text(const qc_grid *g, char *ret, size_t ret_bytes)
{
    snprintf(ret, ret_bytes, "INT%d g%lld %s %s", g->bits, (long long)g->group_elems,
             g->symmetric ? "sym" : "asym", qc_dtype_name(g->scale_dtype));
}

/* A matrix that is on a grid in the source: carried over if its grid stays, else that is said. */
static int settle_source_grid(const qc_model *model, qc_convert_item *item, qc_event_list *events,
                              qc_err *err)
{
    const qc_tensor_info *info = model->src->info(model->src, item->tensor);
    char from[64], to[64];
    if (info->dtype != QC_DT_GRID || item->action == QC_ACTION_TIED || item->action == QC_ACTION_DROPPED)
        return QC_OK;
    grid_text(&info->grid, from, sizeof from);
    if (item->action != QC_ACTION_QUANTIZED)
        return qc_event_add(events, QC_EVENT_NOTE, "dequantized", info->name, 1, err, "%s to values in %s",
                            from, qc_dtype_name(item->dtype));
    item->carried = same_grid(&info->grid, &item->spec.grid);
    if (item->carried)
        return QC_OK;
    grid_text(&item->spec.grid, to, sizeof to);
    return qc_event_add(events, QC_EVENT_FALLBACK, "requantized", info->name, 1, err, "%s rounded anew to %s",
                        from, to);
}

static int plan_item(const qc_convert_plan *plan, const qc_model *model, const qc_policy *policy,
                     qc_convert_item *item, qc_event_list *events, qc_err *err)
{
    const qc_tensor_info *info = model->src->info(model->src, item->tensor);
    qc_tensor_role role = model->places[item->tensor].role;
    if (is_matrix(role) && !policy) {
        keep_matrix(info, role, item);
    } else if (is_matrix(role)) {
        QC_TRY(plan_matrix(policy, info, role, plan->format->own_grids, item, events, err));
    } else if (role == QC_ROLE_TIED) {
        item->action = QC_ACTION_TIED;
        item->rule = "tied to the embedding";
    } else if (role == QC_ROLE_BUFFER) {
        item->action = QC_ACTION_DROPPED;
        item->rule = "computed buffer";
    } else if (role == QC_ROLE_OUTSIDE) {
        item->action = QC_ACTION_DROPPED;
        item->rule = "no part of the text model";
    } else {
        item->action = QC_ACTION_COPIED;
        item->rule = role == QC_ROLE_NORM ? "norm" : role == QC_ROLE_ROUTER ? "router" : "bias";
    }
    if (item->action == QC_ACTION_TIED || item->action == QC_ACTION_DROPPED)
        return QC_OK;
    item->dtype = item->action == QC_ACTION_QUANTIZED ? QC_DT_GRID : info->dtype;
    if (item->dtype == QC_DT_GRID && item->action != QC_ACTION_QUANTIZED)
        item->dtype = QC_DT_BF16; /* 16 bit was asked for a matrix that is on a grid */
    QC_TRY(hold_item(plan, model, item, events, err));
    return settle_source_grid(model, item, events, err);
}

qc_convert_item *qc_convert_plan_item(const qc_convert_plan *plan, int64_t tensor)
{
    return tensor >= 0 && tensor < plan->n_items ? &plan->items[plan->of_tensor[tensor]] : NULL;
}

/* Matrices of a stage see the same activations: quantized if all of them are on a grid. */
static int plan_acts_of_stage(const qc_model *model, const qc_policy *policy, int layer, qc_stage stage,
                              qc_convert_plan *plan, qc_event_list *events, qc_err *err)
{
    const qc_slot *slots = qc_stage_slots(model->config.family, stage);
    int64_t width = qc_stage_width(&model->config, stage), n = qc_stage_experts(&model->config, stage);
    for (int64_t k = 0; slots[k / n] != QC_N_SLOTS; k++) {
        int64_t tensor = qc_model_expert_tensor(model, layer, slots[k / n], k % n);
        if (qc_convert_plan_item(plan, tensor)->action != QC_ACTION_QUANTIZED)
            return qc_event_add(events, QC_EVENT_NOTE, "activations",
                                model->src->info(model->src, tensor)->name, 1, err,
                                "left in 16 bit, and so are the activations that it reads");
    }
    for (int64_t k = 0; slots[k / n] != QC_N_SLOTS; k++) {
        qc_convert_item *item =
            qc_convert_plan_item(plan, qc_model_expert_tensor(model, layer, slots[k / n], k % n));
        item->act_bits = policy->act_bits;
        item->act_group = policy->act_group < width ? policy->act_group : 0;
    }
    return QC_OK;
}

static int plan_acts(const qc_model *model, const qc_policy *policy, qc_convert_plan *plan,
                     qc_event_list *events, qc_err *err)
{
    for (int layer = 0; policy && layer < (int)model->config.n_layers && policy->act_bits; layer++)
        for (int stage = 0; stage < QC_N_STAGES; stage++)
            if (qc_stage_present(&model->config, layer, (qc_stage)stage))
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

int qc_convert_plan_make(const qc_model *model, const qc_policy *policy, const qc_writer_format *format,
                         const char *type, qc_event_list *events, qc_convert_plan *ret, qc_err *err)
{
    if (policy)
        QC_TRY(check_patterns(model, policy, err));
    qc_convert_plan plan = {.format = format, .type = type, .n_items = model->src->n_tensors};
    plan.items = qc_calloc((size_t)plan.n_items, sizeof *plan.items);
    plan.of_tensor = qc_alloc((size_t)plan.n_items, sizeof *plan.of_tensor);
    if (!plan.items || !plan.of_tensor) {
        qc_convert_plan_clear(&plan);
        return qc_fail_nomem(err, "plan", (unsigned long long)model->src->n_tensors * sizeof *plan.items);
    }
    order_items(model, &plan);
    for (int64_t i = 0; i < plan.n_items; i++) {
        qc_convert_item *item = &plan.items[i];
        const qc_tensor_info *info = model->src->info(model->src, item->tensor);
        int rc = plan_item(&plan, model, policy, item, events, err);
        if (rc < 0) {
            qc_convert_plan_clear(&plan);
            return rc;
        }
        plan.bytes_in += info->n_bytes;
        plan.bytes_out += item->bytes_out;
        if (item->action == QC_ACTION_QUANTIZED) {
            plan.n_weights += (double)qc_tensor_n_elems(info);
            /* float32, decoded float32, codes and packed codes of a block, and at worst a scale and a zero
             * for every 16 of them */
            int64_t rows = qc_min_i64(qc_convert_block_rows(qc_tensor_cols(info)), qc_tensor_rows(info));
            uint64_t elems = (uint64_t)(rows * qc_tensor_cols(info));
            uint64_t work = elems * 11 + (format->packs_whole ? item->bytes_out : 0);
            plan.work_bytes = work > plan.work_bytes ? work : plan.work_bytes;
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
    qc_free(plan->of_tensor);
    *plan = (qc_convert_plan){0};
}

/* ---- declaration ---- */

/* A tied table is stored once, under the name that it has in the source; the other name becomes an alias. */
static int add_tied_name(const qc_model *model, qc_writer *writer, qc_err *err)
{
    const char *const *names = model->config.family->names;
    const char *stored = model->src->info(model->src, qc_model_tensor(model, 0, QC_SLOT_EMBEDDING))->name;
    char table[QC_NAME_BYTES], head[QC_NAME_BYTES];
    qc_full_name(model->config.form, names[QC_SLOT_EMBEDDING], table);
    qc_full_name(model->config.form, names[QC_SLOT_HEAD], head);
    return writer->alias(writer, strcmp(stored, head) == 0 ? table : head, stored, err);
}

int qc_convert_declare(const qc_convert_plan *plan, const qc_model *model, const qc_journal *journal,
                       qc_writer *writer, uint64_t *ret_bytes, qc_err *err)
{
    for (int64_t i = 0; i < plan->n_items; i++) {
        const qc_convert_item *item = &plan->items[i];
        qc_tensor_info stored;
        if (item->action == QC_ACTION_TIED || item->action == QC_ACTION_DROPPED)
            continue;
        qc_convert_stored_info(model, item, &stored);
        if (item->action == QC_ACTION_COPIED &&
            (journal ? qc_journal_has(journal, stored.name) : item->may_fold))
            QC_TRY(qc_convert_folded_info(plan, model, item, &stored, err));
        qc_tensor_use use = qc_convert_use(model, item->tensor);
        QC_TRY(writer->declare(writer, &use, &stored, err));
    }
    if (model->config.tied)
        QC_TRY(add_tied_name(model, writer, err));
    return writer->size(writer, ret_bytes, err);
}

/* ---- engines ---- */

int qc_convert_lint(const qc_convert_plan *plan, const qc_model *model, const char *engine, const char *path,
                    qc_event_list *findings, qc_err *err)
{
    size_t n = 0;
    qc_tensor_info *infos = qc_alloc((size_t)plan->n_items + 1, sizeof *infos);
    const qc_tensor_info **tensors = qc_alloc((size_t)plan->n_items + 1, sizeof *tensors);
    int rc = infos && tensors ? QC_OK : qc_fail_nomem(err, path, (size_t)plan->n_items * sizeof *infos);
    qc_lint_input input = {.path = path, .format = plan->format->name, .tensors = tensors};
    for (int64_t i = 0; i < plan->n_items && rc == QC_OK; i++) {
        const qc_convert_item *item = &plan->items[i];
        if (item->action == QC_ACTION_TIED || item->action == QC_ACTION_DROPPED)
            continue;
        qc_convert_stored_info(model, item, &infos[n]);
        tensors[n] = &infos[n];
        n++;
    }
    input.n_tensors = (int64_t)n;
    if (rc == QC_OK)
        rc = qc_engine_lint(engine, &input, findings, err);
    qc_free(infos);
    qc_free(tensors);
    return rc;
}
