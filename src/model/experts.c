/* Layers with experts: the router sends each token to a few of them, and each expert computes the rows of its
 * tokens alone. Experts come one after the other, and so do what they add to a token: results depend neither
 * on threads nor on which other tokens an expert has. */
#include "layer_internal.h"

#include "qc_alloc.h"
#include "qc_math.h"

#include <string.h>

enum { N_BUFFERS = 6 };

/* Elements of the buffers in backend memory, in the order of `buffers`. */
static void scratch_elems(const qc_model_config *c, int64_t max_tokens, int64_t n[N_BUFFERS])
{
    int64_t chunk = qc_min_i64(max_tokens, QC_CHUNK_TOKENS);
    n[0] = max_tokens * c->hidden;
    n[1] = max_tokens * c->n_experts;
    n[2] = n[3] = chunk * c->hidden;
    n[4] = n[5] = chunk * c->expert_ffn;
}

static void buffers(qc_expert_scratch *s, float **ret[N_BUFFERS])
{
    float **all[N_BUFFERS] = {&s->norm, &s->logits, &s->in, &s->out, &s->gate, &s->up};
    memcpy(ret, all, sizeof all);
}

int qc_expert_scratch_new(const qc_model_config *config, qc_backend *be, int64_t max_tokens,
                          qc_expert_scratch *ret, qc_err *err)
{
    float **b[N_BUFFERS];
    int64_t n[N_BUFFERS];
    *ret = (qc_expert_scratch){.be = be};
    if (config->n_experts == 0)
        return QC_OK;
    buffers(ret, b);
    scratch_elems(config, max_tokens, n);
    for (int i = 0; i < N_BUFFERS; i++)
        if (!(*b[i] = be->alloc(be, n[i], err)))
            return QC_E_RESOURCE;
    return qc_routing_new(config, max_tokens, &ret->routing, err);
}

void qc_expert_scratch_clear(qc_expert_scratch *s)
{
    float **b[N_BUFFERS];
    buffers(s, b);
    for (int i = 0; i < N_BUFFERS; i++)
        if (*b[i])
            s->be->free(s->be, *b[i]);
    qc_routing_clear(&s->routing);
}

uint64_t qc_expert_scratch_bytes(const qc_model_config *config, int64_t max_tokens)
{
    int64_t n[N_BUFFERS], total = 0;
    if (config->n_experts == 0)
        return 0;
    scratch_elems(config, max_tokens, n);
    for (int i = 0; i < N_BUFFERS; i++)
        total += n[i];
    return (uint64_t)total * 4 + qc_routing_bytes(config, max_tokens);
}

int qc_routing_new(const qc_model_config *config, int64_t n_tokens, qc_routing *ret, qc_err *err)
{
    size_t routes = (size_t)(n_tokens * config->n_chosen);
    *ret = (qc_routing){0};
    if (n_tokens > INT32_MAX)
        return qc_fail(err, QC_E_UNSUPPORTED, "%lld tokens with experts, at most %d", (long long)n_tokens,
                       INT32_MAX);
    ret->experts = qc_alloc(routes, sizeof *ret->experts);
    ret->weights = qc_alloc(routes, sizeof *ret->weights);
    ret->first = qc_alloc((size_t)config->n_experts + 1, sizeof *ret->first);
    ret->tokens = qc_alloc(routes, sizeof *ret->tokens);
    ret->token_weights = qc_alloc(routes, sizeof *ret->token_weights);
    if (ret->experts && ret->weights && ret->first && ret->tokens && ret->token_weights)
        return QC_OK;
    return qc_fail_nomem(err, "the routing of tokens", qc_routing_bytes(config, n_tokens));
}

void qc_routing_clear(qc_routing *routing)
{
    qc_free(routing->experts);
    qc_free(routing->weights);
    qc_free(routing->first);
    qc_free(routing->tokens);
    qc_free(routing->token_weights);
}

uint64_t qc_routing_bytes(const qc_model_config *config, int64_t n_tokens)
{
    return 16 * (uint64_t)(n_tokens * config->n_chosen) + 8 * (uint64_t)(config->n_experts + 1);
}

void qc_routing_by_expert(const qc_model_config *config, qc_routing *routing, int64_t n_tokens)
{
    int64_t n = n_tokens * config->n_chosen, n_experts = config->n_experts, *first = routing->first;
    memset(first, 0, (size_t)(n_experts + 1) * sizeof *first);
    for (int64_t i = 0; i < n; i++)
        first[routing->experts[i] + 1]++;
    for (int64_t e = 0; e < n_experts; e++)
        first[e + 1] += first[e];
    for (int64_t i = 0; i < n; i++) {
        int64_t at = first[routing->experts[i]]++;
        routing->tokens[at] = (int32_t)(i / config->n_chosen);
        routing->token_weights[at] = routing->weights[i];
    }
    memmove(first + 1, first, (size_t)n_experts * sizeof *first); /* each stands at its end now */
    first[0] = 0;
}

/* Routing of tokens whose normed rows lie in ws->experts.norm. */
static int route(const qc_layer *l, qc_workspace *ws, int64_t n, int32_t *experts, float *weights,
                 qc_err *err)
{
    const qc_model_config *c = &l->model->config;
    const qc_expert_scratch *s = &ws->experts;
    QC_TRY(l->be->linear(l->be, s->logits, c->n_experts, s->norm, c->hidden, l->weights[QC_SLOT_ROUTER], NULL,
                         n, false, err));
    return l->be->route(l->be, experts, weights, s->logits, c->n_experts, n, c->n_experts, c->n_chosen,
                        c->renormalise, err);
}

/* ws->experts.norm = normed x, as the router reads it. */
static int norm_all(const qc_layer *l, qc_workspace *ws, const float *x, int64_t n, qc_err *err)
{
    const qc_model_config *c = &l->model->config;
    return l->be->rms_norm(l->be, ws->experts.norm, c->hidden, x, c->hidden, l->vectors[QC_SLOT_MLP_NORM],
                           c->norm_offset, n, c->hidden, c->rms_eps, err);
}

int qc_layer_route(const qc_layer *layer, qc_workspace *ws, const float *x, int64_t n_tokens,
                   int32_t *experts, float *weights, qc_err *err)
{
    QC_TRY(norm_all(layer, ws, x, n_tokens, err));
    return route(layer, ws, n_tokens, experts, weights, err);
}

static const qc_weight *matrix(const qc_layer *l, qc_slot slot, int64_t expert)
{
    return *qc_layer_weight((qc_layer *)l, slot, expert);
}

/* At most a chunk of rows; h may be ws->experts.gate. */
static int down_input(const qc_layer *l, qc_workspace *ws, int64_t expert, const float *u, float *h,
                      int64_t n, qc_err *err)
{
    qc_backend *be = l->be;
    const qc_model_config *c = &l->model->config;
    const qc_expert_scratch *s = &ws->experts;
    int64_t ffn = c->expert_ffn;
    QC_TRY(be->linear(be, s->gate, ffn, u, c->hidden, matrix(l, QC_SLOT_EXPERT_GATE, expert), NULL, n, false,
                      err));
    QC_TRY(
        be->linear(be, s->up, ffn, u, c->hidden, matrix(l, QC_SLOT_EXPERT_UP, expert), NULL, n, false, err));
    QC_TRY(be->gated_act(be, h, s->gate, s->up, n * ffn, c->act, err));
    return qc_layer_quantize_input(l, QC_STAGE_EXPERT_DOWN, h, n, err);
}

static int add_output(const qc_layer *l, qc_workspace *ws, int64_t expert, const float *h,
                      const int32_t *tokens, const float *weights, int64_t n, float *x, qc_err *err)
{
    const qc_model_config *c = &l->model->config;
    float *out = ws->experts.out;
    QC_TRY(l->be->linear(l->be, out, c->hidden, h, c->expert_ffn, matrix(l, QC_SLOT_EXPERT_DOWN, expert),
                         NULL, n, false, err));
    return l->be->add_rows(l->be, x, out, tokens, weights, n, c->hidden, err);
}

int qc_layer_expert_down_input(const qc_layer *layer, qc_workspace *ws, int64_t expert, const float *u,
                               float *h, int64_t n_rows, qc_err *err)
{
    const qc_model_config *c = &layer->model->config;
    for (int64_t i = 0; i < n_rows; i += QC_CHUNK_TOKENS)
        QC_TRY(down_input(layer, ws, expert, u + i * c->hidden, h + i * c->expert_ffn,
                          qc_min_i64(QC_CHUNK_TOKENS, n_rows - i), err));
    return QC_OK;
}

int qc_layer_expert_output(const qc_layer *layer, qc_workspace *ws, int64_t expert, const float *h,
                           const int32_t *tokens, const float *weights, int64_t n_rows, float *x, qc_err *err)
{
    int64_t ffn = layer->model->config.expert_ffn;
    for (int64_t i = 0; i < n_rows; i += QC_CHUNK_TOKENS)
        QC_TRY(add_output(layer, ws, expert, h + i * ffn, tokens + i, weights + i,
                          qc_min_i64(QC_CHUNK_TOKENS, n_rows - i), x, err));
    return QC_OK;
}

int qc_layer_experts_forward(const qc_layer *layer, qc_workspace *ws, float *x, int64_t n_tokens, qc_err *err)
{
    const qc_model_config *c = &layer->model->config;
    qc_expert_scratch *s = &ws->experts;
    qc_routing *r = &s->routing;
    qc_backend *be = layer->be;
    QC_TRY(norm_all(layer, ws, x, n_tokens, err));
    QC_TRY(route(layer, ws, n_tokens, r->experts, r->weights, err));
    QC_TRY(qc_layer_quantize_input(layer, QC_STAGE_EXPERT_GATE_UP, s->norm, n_tokens, err));
    qc_routing_by_expert(c, r, n_tokens);
    for (int64_t e = 0; e < c->n_experts; e++)
        for (int64_t i = r->first[e]; i < r->first[e + 1]; i += QC_CHUNK_TOKENS) {
            int64_t rows = qc_min_i64(QC_CHUNK_TOKENS, r->first[e + 1] - i);
            QC_TRY(be->gather_rows(be, s->in, s->norm, r->tokens + i, rows, c->hidden, err));
            QC_TRY(down_input(layer, ws, e, s->in, s->gate, rows, err));
            QC_TRY(add_output(layer, ws, e, s->gate, r->tokens + i, r->token_weights + i, rows, x, err));
        }
    return QC_OK;
}
