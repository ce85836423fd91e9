/* What is prepared on a backend: the weights of a layer, and the two ends of the model. */
#include "layer_internal.h"

#include "qc_alloc.h"
#include "qc_math.h"

/* Rows of a tensor of the source, from row0 on, times scale. */
typedef struct tensor_rows {
    const qc_source *src;
    int64_t tensor, row0;
    float scale;
} tensor_rows;

static int fetch_tensor(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    const tensor_rows *t = ctx;
    int64_t n = n_rows * qc_tensor_cols(t->src->info(t->src, t->tensor));
    QC_TRY(t->src->read_rows(t->src, t->tensor, t->row0 + row0, n_rows, dst, err));
    for (int64_t i = 0; i < n && t->scale != 1; i++)
        dst[i] *= t->scale;
    return QC_OK;
}

/* Rows of another source of rows, from row0 on. */
typedef struct part_rows {
    qc_fetch_rows_fn fetch;
    void *ctx;
    int64_t row0;
} part_rows;

static int fetch_part(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    const part_rows *p = ctx;
    return p->fetch(p->ctx, p->row0 + row0, n_rows, dst, err);
}

/* Prepare a matrix as it is stored: a fused one becomes its parts. */
int qc_layer_set_matrix(qc_layer *l, qc_slot slot, int64_t expert, qc_fetch_rows_fn fetch, void *ctx,
                        qc_err *err)
{
    const qc_model_config *c = &l->model->config;
    const qc_slot own[] = {slot, QC_N_SLOTS}, *parts = qc_slot_parts(slot);
    part_rows rows = {fetch, ctx, 0};
    for (const qc_slot *p = parts ? parts : own; *p != QC_N_SLOTS; p++) {
        const qc_slot_info *info = qc_slot_of(*p);
        int64_t n = qc_dim_elems(c, info->rows);
        qc_weight *w;
        QC_TRY(l->be->weight_load(l->be, n, qc_dim_elems(c, info->cols), fetch_part, &rows, &w, err));
        qc_weight **place = qc_layer_weight(l, *p, expert);
        l->be->weight_free(l->be, *place);
        *place = w;
        rows.row0 += n;
    }
    return QC_OK;
}

static int load_matrix(qc_layer *l, qc_slot slot, int64_t expert, int64_t tensor, qc_err *err)
{
    const qc_source *src = l->model->src;
    tensor_rows rows = {src, tensor, 0, 1};
    int rc = qc_layer_set_matrix(l, slot, expert, fetch_tensor, &rows, err);
    src->release(src, tensor, 0, qc_tensor_rows(src->info(src, tensor)));
    return rc;
}

static int load_vector(const qc_source *src, qc_backend *be, int64_t tensor, float **ret, qc_err *err)
{
    int64_t n = qc_tensor_cols(src->info(src, tensor));
    float *host = qc_alloc((size_t)n, sizeof *host), *buffer = NULL;
    int rc = host ? src->read_rows(src, tensor, 0, 1, host, err)
                  : qc_fail_nomem(err, "a vector", (unsigned long long)n * sizeof *host);
    if (rc == QC_OK) {
        buffer = be->alloc(be, n, err);
        rc = buffer ? be->upload(be, buffer, host, n, err) : QC_E_RESOURCE;
    }
    qc_free(host);
    if (rc == QC_OK)
        *ret = buffer;
    else if (buffer)
        be->free(be, buffer);
    return rc;
}

/* How the inputs of a stage are quantized: what its tensors say, and all of them say the same. */
static int load_acts(qc_layer *l, qc_stage stage, qc_err *err)
{
    const qc_source *src = l->model->src;
    const qc_slot *slots = qc_stage_slots(l->model->config.family, stage);
    int64_t n_experts = qc_stage_experts(&l->model->config, stage);
    if (!qc_stage_present(&l->model->config, l->index, stage))
        return QC_OK;
    const qc_tensor_info *first = src->info(src, qc_model_tensor(l->model, l->index, slots[0]));
    for (int64_t i = 0; slots[i / n_experts] != QC_N_SLOTS; i++) {
        const qc_tensor_info *other =
            src->info(src, qc_model_expert_tensor(l->model, l->index, slots[i / n_experts], i % n_experts));
        if (other->act_bits != first->act_bits || other->act_group != first->act_group)
            return qc_fail(err, QC_E_UNSUPPORTED,
                           "%s: tensors \"%s\" and \"%s\" read the same activations but quantize them "
                           "differently (%d bits, groups of %lld; %d bits, groups of %lld)",
                           src->path, first->name, other->name, first->act_bits, (long long)first->act_group,
                           other->act_bits, (long long)other->act_group);
    }
    qc_layer_set_acts(l, stage, first->act_bits, first->act_group);
    return QC_OK;
}

static int load_slot(qc_layer *l, qc_slot slot, qc_err *err)
{
    int64_t n = slot < QC_SLOT_FIRST_IN_EXPERT ? 1 : l->model->config.n_experts;
    for (int64_t expert = 0; expert < n; expert++) {
        int64_t tensor = qc_model_expert_tensor(l->model, l->index, slot, expert);
        if (tensor < 0)
            return QC_OK;
        QC_TRY(qc_slot_of(slot)->rows == QC_DIM_NONE
                   ? load_vector(l->model->src, l->be, tensor, &l->vectors[slot], err)
                   : load_matrix(l, slot, expert, tensor, err));
    }
    return QC_OK;
}

static int alloc_experts(qc_layer *l, qc_err *err)
{
    size_t n = (size_t)l->model->config.n_experts * (QC_N_SLOTS - QC_SLOT_FIRST_IN_EXPERT);
    if (!l->model->config.layer_sparse[l->index])
        return QC_OK;
    l->experts = qc_calloc(n, sizeof *l->experts);
    return l->experts ? QC_OK : qc_fail_nomem(err, "experts", n * sizeof *l->experts);
}

int qc_layer_load(const qc_model *model, qc_backend *be, int layer, qc_layer **ret, qc_err *err)
{
    qc_layer *l = qc_calloc(1, sizeof *l);
    if (!l)
        return qc_fail_nomem(err, "a layer", sizeof *l);
    *l = (qc_layer){.model = model, .be = be, .index = layer};
    int rc = alloc_experts(l, err);
    for (int slot = QC_SLOT_FIRST_IN_LAYER; slot < QC_N_SLOTS && rc == QC_OK; slot++)
        rc = load_slot(l, (qc_slot)slot, err);
    for (int stage = 0; stage < QC_N_STAGES && rc == QC_OK; stage++)
        rc = load_acts(l, (qc_stage)stage, err);
    if (rc == QC_OK)
        *ret = l;
    else
        qc_layer_free(l);
    return rc;
}

void qc_layer_free(qc_layer *layer)
{
    if (!layer)
        return;
    for (int slot = 0; slot < QC_N_SLOTS; slot++) {
        layer->be->weight_free(layer->be, layer->weights[slot]);
        if (layer->vectors[slot])
            layer->be->free(layer->be, layer->vectors[slot]);
    }
    int64_t n = layer->model->config.n_experts * (QC_N_SLOTS - QC_SLOT_FIRST_IN_EXPERT);
    for (int64_t i = 0; layer->experts && i < n; i++)
        layer->be->weight_free(layer->be, layer->experts[i]);
    qc_free(layer->experts);
    qc_free(layer);
}

static int64_t layer_elems(const qc_model_config *config, int layer)
{
    int64_t total = 0;
    for (int slot = QC_SLOT_FIRST_IN_LAYER; slot < QC_N_SLOTS; slot++) {
        const qc_slot_info *info = qc_slot_of((qc_slot)slot);
        if (qc_slot_present(config, layer, (qc_slot)slot))
            total += (info->rows == QC_DIM_NONE ? 1 : qc_dim_elems(config, info->rows)) *
                     qc_dim_elems(config, info->cols) *
                     (slot < QC_SLOT_FIRST_IN_EXPERT ? 1 : config->n_experts);
    }
    return total;
}

uint64_t qc_layer_bytes(const qc_model_config *config, qc_compute compute)
{
    int64_t largest = 0;
    for (int layer = 0; layer < config->n_layers; layer++)
        largest = qc_max_i64(largest, layer_elems(config, layer));
    return (uint64_t)largest * (compute == QC_COMPUTE_BF16 ? 2 : 4);
}

int qc_layer_set_vector(qc_layer *layer, qc_slot slot, const float *values, qc_err *err)
{
    return layer->be->upload(layer->be, layer->vectors[slot], values,
                             qc_dim_elems(&layer->model->config, qc_slot_of(slot)->cols), err);
}

void qc_layer_set_acts(qc_layer *layer, qc_stage stage, int bits, int64_t group_elems)
{
    layer->act_bits[stage] = bits;
    layer->act_group[stage] = group_elems;
}

/* ---- the two ends ---- */

int qc_model_embed(const qc_model *model, const int32_t *ids, int64_t n_ids, float *dst, qc_err *err)
{
    const qc_source *src = model->src;
    const qc_model_config *c = &model->config;
    int64_t tensor = qc_model_tensor(model, 0, QC_SLOT_EMBEDDING);
    int rc = QC_OK;
    for (int64_t i = 0; i < n_ids && rc == QC_OK; i++) {
        float *row = dst + i * c->hidden;
        if (ids[i] < 0 || ids[i] >= c->vocab)
            rc = qc_fail(err, QC_E_INPUT, "token id %d at position %lld, expected 0 to %lld", (int)ids[i],
                         (long long)i, (long long)c->vocab - 1);
        else
            rc = src->read_rows(src, tensor, ids[i], 1, row, err);
        for (int64_t k = 0; k < c->hidden && rc == QC_OK && c->embedding_scale != 1; k++)
            row[k] *= c->embedding_scale;
    }
    src->release(src, tensor, 0, c->vocab);
    return rc;
}

int qc_model_final_norm(const qc_model *model, qc_backend *be, float *y, const float *x, int64_t n_tokens,
                        qc_err *err)
{
    const qc_model_config *c = &model->config;
    float *gain;
    QC_TRY(load_vector(model->src, be, qc_model_tensor(model, 0, QC_SLOT_FINAL_NORM), &gain, err));
    int rc = be->rms_norm(be, y, c->hidden, x, c->hidden, gain, c->norm_offset, n_tokens, c->hidden,
                          c->rms_eps, err);
    be->free(be, gain);
    return rc;
}

int qc_model_head_slice(const qc_model *model, qc_backend *be, int64_t row0, int64_t n_rows, qc_weight **ret,
                        qc_err *err)
{
    const qc_source *src = model->src;
    tensor_rows rows = {src, qc_model_tensor(model, 0, QC_SLOT_HEAD), row0, model->config.logit_scale};
    int rc = be->weight_load(be, n_rows, model->config.hidden, fetch_tensor, &rows, ret, err);
    src->release(src, rows.tensor, row0, n_rows);
    return rc;
}
