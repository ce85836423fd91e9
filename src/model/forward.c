/* The forward pass. Everything is computed by the backend; this file decides the order. Tokens go through the
 * projections in chunks, so that scratch does not grow with ffn * n_tokens; attention sees the whole
 * sequence. */
#include "layer_internal.h"

#include "qc_alloc.h"
#include "qc_math.h"

#include <string.h>

enum { N_BUFFERS = 11 };

/* Width of the dense MLPs, 0 if all layers have experts. */
static int64_t dense_ffn(const qc_model_config *c)
{
    for (int64_t i = 0; i < c->n_layers; i++)
        if (!c->layer_sparse[i])
            return c->ffn;
    return 0;
}

/* Elements of the buffers of a workspace, in the order of the struct. */
static void workspace_elems(const qc_model_config *c, int64_t max_tokens, int64_t n[N_BUFFERS])
{
    int64_t chunk = qc_min_i64(max_tokens, QC_CHUNK_TOKENS);
    int64_t q = qc_dim_elems(c, QC_DIM_Q), kv = qc_dim_elems(c, QC_DIM_KV);
    n[0] = n[1] = max_tokens * (c->rotary_dim / 2);
    n[2] = n[3] = c->has_local_rope ? n[0] : 0;
    n[4] = max_tokens * q;
    n[5] = n[6] = max_tokens * kv;
    n[7] = max_tokens * q;
    n[8] = chunk * c->hidden;
    n[9] = n[10] = chunk * dense_ffn(c);
}

static void workspace_buffers(qc_workspace *ws, float **ret[N_BUFFERS])
{
    float **buffers[N_BUFFERS] = {&ws->cos_t, &ws->sin_t, &ws->cos_local, &ws->sin_local, &ws->q, &ws->k,
                                  &ws->v,     &ws->mix,   &ws->norm,      &ws->gate,      &ws->up};
    memcpy(ret, buffers, sizeof buffers);
}

static int fill_tables(const qc_workspace *ws, const qc_rope_config *rope, int64_t rotary_dim,
                       int64_t n_tokens, float *cos_t, float *sin_t, qc_err *err)
{
    int64_t half = rotary_dim / 2, n = ws->max_tokens * half;
    double *inv_freq = qc_alloc((size_t)half, sizeof *inv_freq);
    float *host = qc_alloc(2 * (size_t)n, sizeof *host);
    int rc = inv_freq && host ? QC_OK
                              : qc_fail_nomem(err, "rotary tables", 2 * (unsigned long long)n * sizeof *host);
    if (rc == QC_OK) {
        qc_rope_inv_freq(rope, rotary_dim, n_tokens, inv_freq);
        qc_rope_tables(rope, rotary_dim, inv_freq, ws->max_tokens, host, host + n);
        rc = ws->be->upload(ws->be, cos_t, host, n, err);
    }
    if (rc == QC_OK)
        rc = ws->be->upload(ws->be, sin_t, host + n, n, err);
    qc_free(host);
    qc_free(inv_freq);
    return rc;
}

/* The tables of a sequence of n_tokens: they are kept as long as the length makes no difference. */
static int fill_rope(qc_workspace *ws, const qc_model_config *c, int64_t n_tokens, qc_err *err)
{
    int64_t variant = qc_rope_variant(&c->rope, n_tokens); /* grows with n_tokens, as the sum does */
    if (c->has_local_rope)
        variant += qc_rope_variant(&c->local_rope, n_tokens);
    if (variant == ws->rope_variant)
        return QC_OK;
    QC_TRY(fill_tables(ws, &c->rope, c->rotary_dim, n_tokens, ws->cos_t, ws->sin_t, err));
    if (c->has_local_rope)
        QC_TRY(fill_tables(ws, &c->local_rope, c->rotary_dim, n_tokens, ws->cos_local, ws->sin_local, err));
    ws->rope_variant = variant;
    return QC_OK;
}

int qc_workspace_new(const qc_model *model, qc_backend *be, int64_t max_tokens, qc_workspace **ret,
                     qc_err *err)
{
    qc_workspace *ws = qc_calloc(1, sizeof *ws);
    if (!ws)
        return qc_fail_nomem(err, "a workspace", sizeof *ws);
    ws->be = be;
    ws->max_tokens = max_tokens;
    ws->rope_variant = -1;
    float **buffers[N_BUFFERS];
    int64_t n[N_BUFFERS];
    workspace_buffers(ws, buffers);
    workspace_elems(&model->config, max_tokens, n);
    int rc = QC_OK;
    for (int i = 0; i < N_BUFFERS && rc == QC_OK; i++) {
        if (n[i] == 0)
            continue;
        *buffers[i] = be->alloc(be, n[i], err);
        rc = *buffers[i] ? QC_OK : QC_E_RESOURCE;
    }
    if (rc == QC_OK)
        rc = qc_expert_scratch_new(&model->config, be, max_tokens, &ws->experts, err);
    if (rc == QC_OK)
        *ret = ws;
    else
        qc_workspace_free(ws);
    return rc;
}

void qc_workspace_free(qc_workspace *ws)
{
    if (!ws)
        return;
    float **buffers[N_BUFFERS];
    workspace_buffers(ws, buffers);
    for (int i = 0; i < N_BUFFERS; i++)
        if (*buffers[i])
            ws->be->free(ws->be, *buffers[i]);
    qc_expert_scratch_clear(&ws->experts);
    qc_free(ws);
}

uint64_t qc_workspace_bytes(const qc_model_config *config, int64_t max_tokens)
{
    int64_t n[N_BUFFERS], total = 0;
    workspace_elems(config, max_tokens, n);
    for (int i = 0; i < N_BUFFERS; i++)
        total += n[i];
    return (uint64_t)total * sizeof(float) + qc_expert_scratch_bytes(config, max_tokens);
}

uint64_t qc_forward_scratch_bytes(const qc_model_config *config, qc_compute compute, int n_threads,
                                  int64_t n_tokens)
{
    qc_attention_shape shape = {
        .n_tokens = n_tokens, .n_kv_heads = config->n_kv_heads, .head_dim = config->head_dim};
    uint64_t most = qc_attention_scratch_bytes(compute, n_threads, &shape);
    for (int stage = 0; stage < QC_N_STAGES; stage++) {
        if (!qc_stage_in_any_layer(config, (qc_stage)stage))
            continue;
        most = qc_max_u64(most, qc_linear_scratch_bytes(compute, n_threads, n_tokens,
                                                        qc_stage_width(config, (qc_stage)stage)));
    }
    return most;
}

/* ---- stages ---- */

typedef struct stage_info {
    const char *name;
    qc_slot slots[4], fused[2]; /* one by one; in one matrix where a family stores it so */
    qc_slot norm;               /* before qkv and gate_up, of the result of o and down */
} stage_info;

static const stage_info *stage_of(qc_stage stage)
{
    static const stage_info table[QC_N_STAGES] = {
        [QC_STAGE_QKV] = {.name = "qkv",
                          .slots = {QC_SLOT_Q, QC_SLOT_K, QC_SLOT_V, QC_N_SLOTS},
                          .fused = {QC_SLOT_QKV, QC_N_SLOTS},
                          .norm = QC_SLOT_ATTN_NORM},
        [QC_STAGE_O] = {.name = "o",
                        .slots = {QC_SLOT_O, QC_N_SLOTS},
                        .fused = {QC_N_SLOTS},
                        .norm = QC_SLOT_POST_ATTN_NORM},
        [QC_STAGE_GATE_UP] = {.name = "gate_up",
                              .slots = {QC_SLOT_GATE, QC_SLOT_UP, QC_N_SLOTS},
                              .fused = {QC_SLOT_GATE_UP, QC_N_SLOTS},
                              .norm = QC_SLOT_MLP_NORM},
        [QC_STAGE_DOWN] = {.name = "down",
                           .slots = {QC_SLOT_DOWN, QC_N_SLOTS},
                           .fused = {QC_N_SLOTS},
                           .norm = QC_SLOT_POST_MLP_NORM},
        [QC_STAGE_EXPERT_GATE_UP] = {.name = "expert_gate_up",
                                     .slots = {QC_SLOT_EXPERT_GATE, QC_SLOT_EXPERT_UP, QC_N_SLOTS},
                                     .fused = {QC_N_SLOTS},
                                     .norm = QC_SLOT_MLP_NORM},
        [QC_STAGE_EXPERT_DOWN] = {.name = "expert_down",
                                  .slots = {QC_SLOT_EXPERT_DOWN, QC_N_SLOTS},
                                  .fused = {QC_N_SLOTS},
                                  .norm = QC_SLOT_POST_MLP_NORM},
    };
    return &table[stage];
}

const char *qc_stage_name(qc_stage stage)
{
    return stage_of(stage)->name;
}

const qc_slot *qc_stage_slots(const qc_family *family, qc_stage stage)
{
    const stage_info *s = stage_of(stage);
    return s->fused[0] != QC_N_SLOTS && family->names[s->fused[0]] ? s->fused : s->slots;
}

bool qc_stage_adds_product(const qc_model_config *config, qc_stage stage)
{
    return !config->family->names[stage_of(stage)->norm];
}

int64_t qc_stage_width(const qc_model_config *config, qc_stage stage)
{
    return qc_dim_elems(config, qc_slot_of(stage_of(stage)->slots[0])->cols);
}

int64_t qc_stage_rows(const qc_model_config *config, qc_stage stage)
{
    int64_t most = 0;
    for (const qc_slot *s = qc_stage_slots(config->family, stage); *s != QC_N_SLOTS; s++)
        most = qc_max_i64(most, qc_dim_elems(config, qc_slot_of(*s)->rows));
    return most;
}

bool qc_stage_present(const qc_model_config *config, int layer, qc_stage stage)
{
    return qc_slot_present(config, layer, qc_stage_slots(config->family, stage)[0]);
}

bool qc_stage_in_any_layer(const qc_model_config *config, qc_stage stage)
{
    for (int layer = 0; layer < config->n_layers; layer++)
        if (qc_stage_present(config, layer, stage))
            return true;
    return false;
}

int64_t qc_stage_experts(const qc_model_config *config, qc_stage stage)
{
    return stage_of(stage)->slots[0] < QC_SLOT_FIRST_IN_EXPERT ? 1 : config->n_experts;
}

int qc_layer_quantize_input(const qc_layer *l, qc_stage stage, float *u, int64_t n, qc_err *err)
{
    int64_t width = qc_stage_width(&l->model->config, stage);
    if (!l->act_bits[stage])
        return QC_OK;
    return l->be->quantize_acts(l->be, u, width, u, width, n, width, l->act_bits[stage], l->act_group[stage],
                                err);
}

/* y = norm of n rows of dim elements; x may be y */
static int norm_rows(const qc_layer *l, qc_slot slot, float *y, const float *x, int64_t n, int64_t dim,
                     qc_err *err)
{
    const qc_model_config *c = &l->model->config;
    return l->be->rms_norm(l->be, y, dim, x, dim, l->vectors[slot], c->norm_offset, n, dim, c->rms_eps, err);
}

/* stage: QC_STAGE_QKV, QC_STAGE_GATE_UP or QC_STAGE_EXPERT_GATE_UP */
static int normed_input(const qc_layer *l, qc_stage stage, const float *x, float *u, int64_t n, qc_err *err)
{
    const qc_model_config *c = &l->model->config;
    qc_slot norm = stage_of(stage)->norm;
    QC_TRY(l->vectors[norm] ? norm_rows(l, norm, u, x, n, c->hidden, err)
                            : l->be->scale(l->be, u, x, 1, n * c->hidden, err));
    return qc_layer_quantize_input(l, stage, u, n, err);
}

static int project(const qc_layer *l, qc_slot slot, qc_slot bias, float *y, const float *u, int64_t n,
                   bool accumulate, qc_err *err)
{
    const qc_model_config *c = &l->model->config;
    int64_t n_out = qc_dim_elems(c, qc_slot_of(slot)->rows), n_in = qc_dim_elems(c, qc_slot_of(slot)->cols);
    return l->be->linear(l->be, y, n_out, u, n_in, l->weights[slot], l->vectors[bias], n, accumulate, err);
}

/* q, k, v of tokens t0 .. t0 + n - 1, normed. */
static int project_qkv(const qc_layer *l, qc_workspace *ws, const float *x, int64_t t0, int64_t n,
                       qc_err *err)
{
    const qc_model_config *c = &l->model->config;
    int64_t nq = qc_dim_elems(c, QC_DIM_Q), nkv = qc_dim_elems(c, QC_DIM_KV);
    float *q = ws->q + t0 * nq, *k = ws->k + t0 * nkv, *v = ws->v + t0 * nkv;
    QC_TRY(normed_input(l, QC_STAGE_QKV, x + t0 * c->hidden, ws->norm, n, err));
    QC_TRY(project(l, QC_SLOT_Q, QC_SLOT_Q_BIAS, q, ws->norm, n, false, err));
    QC_TRY(project(l, QC_SLOT_K, QC_SLOT_K_BIAS, k, ws->norm, n, false, err));
    QC_TRY(project(l, QC_SLOT_V, QC_SLOT_V_BIAS, v, ws->norm, n, false, err));
    if (c->qk_norm) {
        int64_t q_dim = qc_dim_elems(c, QC_DIM_Q_NORM), k_dim = qc_dim_elems(c, QC_DIM_K_NORM);
        QC_TRY(norm_rows(l, QC_SLOT_Q_NORM, q, q, n * (nq / q_dim), q_dim, err));
        QC_TRY(norm_rows(l, QC_SLOT_K_NORM, k, k, n * (nkv / k_dim), k_dim, err));
    }
    return QC_OK;
}

/* Rotate q and k of tokens t0 .. t0 + n - 1, which are at positions position0 .. of their sequence. */
static int rotate(const qc_layer *l, qc_workspace *ws, int64_t t0, int64_t n, int64_t position0, qc_err *err)
{
    qc_backend *be = l->be;
    const qc_model_config *c = &l->model->config;
    int64_t nq = qc_dim_elems(c, QC_DIM_Q), nkv = qc_dim_elems(c, QC_DIM_KV);
    bool local = c->has_local_rope && c->layer_slides[l->index];
    const float *cos_t = (local ? ws->cos_local : ws->cos_t) + position0 * (c->rotary_dim / 2),
                *sin_t = (local ? ws->sin_local : ws->sin_t) + position0 * (c->rotary_dim / 2);
    if (!c->layer_rotates[l->index])
        return QC_OK;
    QC_TRY(be->rope(be, ws->q + t0 * nq, nq, cos_t, sin_t, n, c->n_heads, c->head_dim, c->rotary_dim, err));
    return be->rope(be, ws->k + t0 * nkv, nkv, cos_t, sin_t, n, c->n_kv_heads, c->head_dim, c->rotary_dim,
                    err);
}

static qc_attention_shape attention_shape(const qc_layer *l, int64_t n_tokens)
{
    const qc_model_config *c = &l->model->config;
    return (qc_attention_shape){
        .n_tokens = n_tokens,
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
        .window = c->layer_slides[l->index] ? c->sliding_window : 0,
        .scale = c->attention_scale,
        .softcap = c->attention_softcap,
    };
}

/* u = attention over the projections of x: one sequence. */
static int attention_input(const qc_layer *l, qc_workspace *ws, const float *x, float *u, int64_t n,
                           qc_err *err)
{
    const qc_model_config *c = &l->model->config;
    qc_attention_shape shape = attention_shape(l, n);
    QC_TRY(fill_rope(ws, c, n, err));
    for (int64_t t = 0; t < n; t += QC_CHUNK_TOKENS)
        QC_TRY(project_qkv(l, ws, x, t, qc_min_i64(QC_CHUNK_TOKENS, n - t), err));
    QC_TRY(rotate(l, ws, 0, n, 0, err));
    QC_TRY(l->be->attention(l->be, u, ws->q, ws->k, ws->v, &shape, err));
    return qc_layer_quantize_input(l, QC_STAGE_O, u, n, err);
}

/* u = gated activation of the normed x, at most a chunk of tokens; u may be ws->gate. */
static int down_input(const qc_layer *l, qc_workspace *ws, const float *x, float *u, int64_t n, qc_err *err)
{
    const qc_model_config *c = &l->model->config;
    QC_TRY(normed_input(l, QC_STAGE_GATE_UP, x, ws->norm, n, err));
    QC_TRY(project(l, QC_SLOT_GATE, QC_SLOT_GATE_BIAS, ws->gate, ws->norm, n, false, err));
    QC_TRY(project(l, QC_SLOT_UP, QC_SLOT_UP_BIAS, ws->up, ws->norm, n, false, err));
    QC_TRY(l->be->gated_act(l->be, u, ws->gate, ws->up, n * c->ffn, c->act, err));
    return qc_layer_quantize_input(l, QC_STAGE_DOWN, u, n, err);
}

static int check_length(const qc_workspace *ws, int64_t n_tokens, qc_err *err)
{
    if (n_tokens <= ws->max_tokens)
        return QC_OK;
    return qc_fail(err, QC_E_USAGE, "a sequence of %lld tokens, but the workspace holds %lld",
                   (long long)n_tokens, (long long)ws->max_tokens);
}

int qc_layer_stage_input(const qc_layer *layer, qc_workspace *ws, qc_stage stage, const float *x, float *u,
                         int64_t n_tokens, qc_err *err)
{
    const qc_model_config *c = &layer->model->config;
    QC_TRY(check_length(ws, n_tokens, err));
    switch (stage) {
    case QC_STAGE_QKV:
        return normed_input(layer, QC_STAGE_QKV, x, u, n_tokens, err);
    case QC_STAGE_O:
        return attention_input(layer, ws, x, u, n_tokens, err);
    case QC_STAGE_GATE_UP:
    case QC_STAGE_EXPERT_GATE_UP:
        return normed_input(layer, stage, x, u, n_tokens, err);
    default:
        for (int64_t t = 0; t < n_tokens; t += QC_CHUNK_TOKENS)
            QC_TRY(down_input(layer, ws, x + t * c->hidden, u + t * c->ffn,
                              qc_min_i64(QC_CHUNK_TOKENS, n_tokens - t), err));
        return QC_OK;
    }
}

int qc_layer_stage_output(const qc_layer *layer, qc_workspace *ws, qc_stage stage, const float *u, float *x,
                          int64_t n_tokens, qc_err *err)
{
    const qc_model_config *c = &layer->model->config;
    qc_slot matrix = stage == QC_STAGE_O ? QC_SLOT_O : QC_SLOT_DOWN,
            bias = stage == QC_STAGE_O ? QC_SLOT_O_BIAS : QC_SLOT_DOWN_BIAS, norm = stage_of(stage)->norm;
    int64_t width = qc_stage_width(c, stage);
    QC_TRY(check_length(ws, n_tokens, err));
    if (!layer->vectors[norm] && c->residual_scale == 1)
        return project(layer, matrix, bias, x, u, n_tokens, true, err);
    for (int64_t t = 0; t < n_tokens; t += QC_CHUNK_TOKENS) {
        int64_t n = qc_min_i64(QC_CHUNK_TOKENS, n_tokens - t);
        float *y = ws->norm; /* free: what was read from it lies in u */
        QC_TRY(project(layer, matrix, bias, y, u + t * width, n, false, err));
        if (layer->vectors[norm])
            QC_TRY(norm_rows(layer, norm, y, y, n, c->hidden, err));
        QC_TRY(layer->be->add(layer->be, x + t * c->hidden, y, c->residual_scale, n * c->hidden, err));
    }
    return QC_OK;
}

/* From attention's result in ws->mix to the end of the layer. */
static int after_attention(const qc_layer *layer, qc_workspace *ws, float *x, int64_t n_tokens, qc_err *err)
{
    int64_t hidden = layer->model->config.hidden;
    QC_TRY(qc_layer_stage_output(layer, ws, QC_STAGE_O, ws->mix, x, n_tokens, err));
    if (layer->experts)
        return qc_layer_experts_forward(layer, ws, x, n_tokens, err);
    for (int64_t t = 0; t < n_tokens; t += QC_CHUNK_TOKENS) {
        int64_t n = qc_min_i64(QC_CHUNK_TOKENS, n_tokens - t);
        QC_TRY(down_input(layer, ws, x + t * hidden, ws->gate, n, err));
        QC_TRY(qc_layer_stage_output(layer, ws, QC_STAGE_DOWN, ws->gate, x + t * hidden, n, err));
    }
    return QC_OK;
}

int qc_layer_forward(const qc_layer *layer, qc_workspace *ws, float *x, int64_t n_tokens, qc_err *err)
{
    QC_TRY(check_length(ws, n_tokens, err));
    QC_TRY(attention_input(layer, ws, x, ws->mix, n_tokens, err));
    return after_attention(layer, ws, x, n_tokens, err);
}

/* ---- packs ---- */

/* Where the parts of a pack lie, and how long the text before each is. */
typedef struct part_place {
    int64_t start, before;
} part_place;

static int place_parts(const qc_workspace *ws, const qc_model_config *c, const qc_part *parts,
                       int64_t n_parts, part_place *ret, int64_t *ret_total, int64_t *ret_longest,
                       qc_err *err)
{
    int64_t total = 0, longest = 0, shortest = INT64_MAX;
    for (int64_t i = 0; i < n_parts; i++) {
        int64_t parent = parts[i].parent;
        if (parts[i].n_tokens < 1 || parent >= i)
            return qc_fail(err, QC_E_USAGE, "part %lld of a pack: %lld tokens behind part %lld", (long long)i,
                           (long long)parts[i].n_tokens, (long long)parent);
        ret[i] = (part_place){total, parent < 0 ? 0 : ret[parent].before + parts[parent].n_tokens};
        total += parts[i].n_tokens;
        longest = qc_max_i64(longest, ret[i].before + parts[i].n_tokens);
        shortest = qc_min_i64(shortest, ret[i].before + parts[i].n_tokens);
    }
    *ret_total = total;
    *ret_longest = longest;
    if (qc_rope_variant(&c->rope, shortest) != qc_rope_variant(&c->rope, longest))
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "a pack of texts of %lld to %lld tokens: the rotary embedding of the model changes in "
                       "between",
                       (long long)shortest, (long long)longest);
    return check_length(ws, total, err);
}

/* Copies of the rows of a path, one behind the other: for one part at a time. */
typedef struct path_rows {
    float *q, *k, *v, *out; /* [longest, heads * head_dim], kv: [.., n_kv_heads * head_dim] */
} path_rows;

static int copy_rows(qc_backend *be, float *dst, const float *src, int64_t n_rows, int64_t width, qc_err *err)
{
    return be->scale(be, dst, src, 1, n_rows * width, err);
}

/* ws->mix of part p = attention along its path. A part without parent lies there as it is; else the path is
 * put together and its own rows of the result are kept. */
static int attend_part(const qc_layer *l, qc_workspace *ws, const qc_part *parts, const part_place *places,
                       int64_t p, const path_rows *rows, qc_err *err)
{
    qc_backend *be = l->be;
    const qc_model_config *c = &l->model->config;
    int64_t nq = qc_dim_elems(c, QC_DIM_Q), nkv = qc_dim_elems(c, QC_DIM_KV), at = places[p].start,
            before = places[p].before, n = parts[p].n_tokens;
    qc_attention_shape shape = attention_shape(l, before + n);
    if (parts[p].parent < 0)
        return be->attention(be, ws->mix + at * nq, ws->q + at * nq, ws->k + at * nkv, ws->v + at * nkv,
                             &shape, err);
    for (int64_t i = p; i >= 0; i = parts[i].parent) {
        int64_t from = places[i].start, to = places[i].before, m = parts[i].n_tokens;
        QC_TRY(copy_rows(be, rows->q + to * nq, ws->q + from * nq, m, nq, err));
        QC_TRY(copy_rows(be, rows->k + to * nkv, ws->k + from * nkv, m, nkv, err));
        QC_TRY(copy_rows(be, rows->v + to * nkv, ws->v + from * nkv, m, nkv, err));
    }
    QC_TRY(be->attention(be, rows->out, rows->q, rows->k, rows->v, &shape, err));
    return copy_rows(be, ws->mix + at * nq, rows->out + before * nq, n, nq, err);
}

static int attend_parts(const qc_layer *l, qc_workspace *ws, const qc_part *parts, const part_place *places,
                        int64_t n_parts, int64_t longest, qc_err *err)
{
    qc_backend *be = l->be;
    const qc_model_config *c = &l->model->config;
    int64_t nq = qc_dim_elems(c, QC_DIM_Q), nkv = qc_dim_elems(c, QC_DIM_KV);
    float *buffer = be->alloc(be, 2 * longest * (nq + nkv), err);
    if (!buffer)
        return QC_E_RESOURCE;
    path_rows rows = {.q = buffer, .k = buffer + longest * nq};
    rows.v = rows.k + longest * nkv;
    rows.out = rows.v + longest * nkv;
    int rc = QC_OK;
    for (int64_t p = 0; p < n_parts && rc == QC_OK; p++)
        rc = attend_part(l, ws, parts, places, p, &rows, err);
    be->free(be, buffer);
    return rc;
}

int qc_layer_forward_parts(const qc_layer *layer, qc_workspace *ws, float *x, const qc_part *parts,
                           int64_t n_parts, qc_err *err)
{
    const qc_model_config *c = &layer->model->config;
    int64_t n = 0, longest = 0;
    part_place *places = qc_alloc((size_t)n_parts, sizeof *places);
    if (!places)
        return qc_fail_nomem(err, "a pack", (unsigned long long)n_parts * sizeof *places);
    int rc = place_parts(ws, c, parts, n_parts, places, &n, &longest, err);
    if (rc == QC_OK)
        rc = fill_rope(ws, c, longest, err);
    for (int64_t t = 0; t < n && rc == QC_OK; t += QC_CHUNK_TOKENS)
        rc = project_qkv(layer, ws, x, t, qc_min_i64(QC_CHUNK_TOKENS, n - t), err);
    for (int64_t p = 0; p < n_parts && rc == QC_OK; p++)
        rc = rotate(layer, ws, places[p].start, parts[p].n_tokens, places[p].before, err);
    if (rc == QC_OK)
        rc = attend_parts(layer, ws, parts, places, n_parts, longest, err);
    qc_free(places);
    if (rc == QC_OK)
        rc = qc_layer_quantize_input(layer, QC_STAGE_O, ws->mix, n, err);
    return rc == QC_OK ? after_attention(layer, ws, x, n, err) : rc;
}
