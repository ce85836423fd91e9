/* Layers with experts. The router's choice for every token is recorded; then the experts come one after the
 * other, so that nothing but the weights of the layer grows with their number: gather the inputs of the
 * expert's tokens, quantize gate and up, run the tokens through them, quantize down, add the output to the
 * stream. */
#include "pipeline_internal.h"

#include "qc_alloc.h"
#include "qc_math.h"
#include "qc_time.h"

#include <stdio.h>
#include <string.h>

typedef struct expert_run {
    qc_layer_job *j;
    qc_routing routing;
    int32_t *all; /* [tokens] 0, 1, 2 .. */
    int32_t *sample;
    int64_t n_sample;
    float *h;                /* backend [length, expert_ffn] */
    qc_hessian sample_input; /* of gate and up over the sample; n = 0: not needed so far */
} expert_run;

/* Some tokens of the text. */
typedef struct token_list {
    const int32_t *tokens; /* ascending */
    int64_t n;
} token_list;

uint64_t qc_layer_experts_bytes(const qc_model_config *config, const qc_corpus *corpus)
{
    uint64_t tokens = (uint64_t)(corpus->n_windows * corpus->length), hidden = (uint64_t)config->hidden,
             ffn = (uint64_t)config->expert_ffn;
    if (config->n_experts == 0)
        return 0;
    return qc_routing_bytes(config, (int64_t)tokens) + 4 * tokens + 4 * (uint64_t)corpus->length * ffn +
           8 * (hidden * hidden + ffn * ffn);
}

static const qc_model_config *config_of(const expert_run *r)
{
    return &r->j->p->model->config;
}

static int run_alloc(expert_run *r, qc_err *err)
{
    qc_pipeline *p = r->j->p;
    const qc_model_config *c = config_of(r);
    int64_t n = qc_pipeline_tokens(p);
    QC_TRY(qc_routing_new(c, n, &r->routing, err));
    r->n_sample = qc_min_i64(n, QC_EXPERT_SAMPLE_TOKENS);
    r->all = qc_alloc((size_t)n, sizeof *r->all);
    r->sample = qc_alloc((size_t)r->n_sample, sizeof *r->sample);
    if (!r->all || !r->sample)
        return qc_fail_nomem(err, "a list of tokens", 4 * (unsigned long long)(n + r->n_sample));
    for (int64_t i = 0; i < n; i++)
        r->all[i] = (int32_t)i;
    for (int64_t i = 0; i < r->n_sample; i++)
        r->sample[i] = (int32_t)(i * n / r->n_sample);
    r->h = p->be->alloc(p->be, p->corpus->length * c->expert_ffn, err);
    return r->h ? QC_OK : QC_E_RESOURCE;
}

static void run_free(expert_run *r)
{
    qc_backend *be = r->j->p->be;
    qc_routing_clear(&r->routing);
    qc_free(r->all);
    qc_free(r->sample);
    if (r->h)
        be->free(be, r->h);
    if (r->sample_input.n)
        qc_hessian_clear(&r->sample_input);
}

/* ---- rows of a stream ---- */

static int put_rows(qc_pipeline *p, qc_stream *s, const int32_t *tokens, int64_t n, const float *src,
                    qc_err *err)
{
    QC_TRY(p->be->download(p->be, p->host, src, n * s->hidden, err));
    for (int64_t i = 0; i < n; i++)
        QC_TRY(qc_stream_put(s, tokens[i], 1, p->host + i * s->hidden, err));
    return QC_OK;
}

/* ---- routing ---- */

/* What the router chooses, and what the experts read, for all tokens. */
static int record_routing(expert_run *r, qc_err *err)
{
    qc_layer_job *j = r->j;
    qc_pipeline *p = j->p;
    int64_t n = p->corpus->length, k = config_of(r)->n_chosen;
    double start = qc_now_seconds();
    p->kept.hidden = config_of(r)->hidden;
    for (int64_t i = 0; i < p->corpus->n_windows; i++) {
        float *x, *u = p->buffer_u;
        QC_TRY(qc_pipeline_borrow(p, &p->x, i, p->buffer_x, &x, err));
        if (p->be->host_memory && p->kept.data)
            u = p->kept.data + i * n * p->kept.hidden;
        QC_TRY(qc_layer_route(j->layer, p->ws, x, n, r->routing.experts + i * n * k,
                              r->routing.weights + i * n * k, err));
        QC_TRY(qc_layer_stage_input(j->layer, p->ws, QC_STAGE_EXPERT_GATE_UP, x, u, n, err));
        QC_TRY(qc_pipeline_give_back(p, &p->kept, i, u, p->buffer_u, err));
    }
    qc_routing_by_expert(config_of(r), &r->routing, qc_pipeline_tokens(p));
    j->record.times.forward += qc_now_seconds() - start;
    return QC_OK;
}

/* The 16-bit stream has its own routing. */
static int advance_reference(qc_layer_job *j, qc_err *err)
{
    qc_pipeline *p = j->p;
    double start = qc_now_seconds();
    for (int64_t i = 0; i < p->corpus->n_windows; i++) {
        float *x;
        QC_TRY(qc_pipeline_borrow(p, &p->x_ref, i, p->buffer_ref, &x, err));
        QC_TRY(qc_layer_experts_forward(j->ref, p->ws, x, p->corpus->length, err));
        QC_TRY(qc_pipeline_give_back(p, &p->x_ref, i, x, p->buffer_ref, err));
    }
    j->record.times.forward += qc_now_seconds() - start;
    return QC_OK;
}

/* ---- statistics ---- */

/* hs takes the inputs that the stage of an expert has for these tokens. */
static int add_tokens(expert_run *r, qc_stage stage, int64_t expert, token_list list, qc_hessian *hs,
                      qc_err *err)
{
    qc_layer_job *j = r->j;
    qc_pipeline *p = j->p;
    for (int64_t i = 0; i < list.n; i += p->corpus->length) {
        int64_t n = qc_min_i64(p->corpus->length, list.n - i);
        const float *u = p->buffer_u;
        double start = qc_now_seconds();
        QC_TRY(qc_stream_gather(&p->kept, p->be, list.tokens + i, n, p->host, p->buffer_u, err));
        if (stage == QC_STAGE_EXPERT_DOWN) {
            QC_TRY(qc_layer_expert_down_input(j->layer, p->ws, expert, u, r->h, n, err));
            u = r->h;
        }
        j->record.times.forward += qc_now_seconds() - start;
        start = qc_now_seconds();
        QC_TRY(qc_hessian_add(hs, u, hs->n, n, err));
        j->record.times.hessian += qc_now_seconds() - start;
        QC_TRY(qc_pipeline_advance(p, (double)(hs->n * n), err));
    }
    return QC_OK;
}

static int collect(expert_run *r, qc_stage stage, int64_t expert, token_list list, qc_hessian *hs,
                   qc_err *err)
{
    const float *h, *sum_abs;
    QC_TRY(qc_hessian_init(hs, r->j->p->be, qc_stage_width(config_of(r), stage), 0, err));
    QC_TRY(add_tokens(r, stage, expert, list, hs, err));
    return qc_hessian_finish(hs, &h, &sum_abs, err);
}

/* An expert whose own tokens are fewer than the inputs of the stage: what a sample of all tokens would give
 * there stands in for those that are missing. Both sums count each token alike, so the sample's weight is
 * missing / sample size. Without any token of its own the expert has nothing to be fitted to. */
static int add_sample(expert_run *r, qc_stage stage, int64_t expert, int64_t n_own, qc_hessian *hs,
                      qc_err *err)
{
    qc_backend *be = r->j->p->be;
    int64_t missing = qc_min_i64(hs->n, qc_pipeline_tokens(r->j->p)) - n_own;
    token_list sample = {r->sample, r->n_sample};
    qc_hessian own = {.n = 0};
    int rc = QC_OK;
    if (stage == QC_STAGE_EXPERT_DOWN)
        rc = collect(r, stage, expert, sample, &own, err);
    else if (r->sample_input.n == 0)
        rc = collect(r, stage, expert, sample, &r->sample_input, err);
    const qc_hessian *from = own.n ? &own : &r->sample_input;
    if (rc == QC_OK)
        rc = be->add(be, hs->block_h, from->block_h, (float)missing / (float)r->n_sample, hs->n * hs->n, err);
    if (own.n)
        qc_hessian_clear(&own);
    return rc;
}

/* "3 (0 tokens), 17 (5 tokens) and 2 more": experts with lo <= tokens < hi. Returns their number. */
static int64_t list_experts(const int64_t *tokens, int64_t n_experts, int64_t lo, int64_t hi, char *ret,
                            size_t cap_bytes)
{
    const size_t tail_bytes = 32; /* " and N more" */
    int64_t n = 0, n_listed = 0;
    size_t used = 0;
    ret[0] = 0;
    for (int64_t e = 0; e < n_experts; e++) {
        if (tokens[e] < lo || tokens[e] >= hi || n++ > n_listed)
            continue;
        char one[64];
        snprintf(one, sizeof one, "%s%lld (%lld tokens)", n > 1 ? ", " : "", (long long)e,
                 (long long)tokens[e]);
        if (used + strlen(one) + tail_bytes > cap_bytes)
            continue;
        used += (size_t)snprintf(ret + used, cap_bytes - used, "%s", one);
        n_listed++;
    }
    if (n > n_listed)
        snprintf(ret + used, cap_bytes - used, " and %lld more", (long long)(n - n_listed));
    return n;
}

/* An expert without tokens is a fallback; where there are too few to tell all inputs apart that is said. What
 * stands in for missing tokens is a sample of all, which given statistics do not have. */
int qc_layer_note_tokens(qc_layer_job *j, const int64_t *tokens, int64_t wanted, qc_err *err)
{
    int64_t n_experts = j->p->model->config.n_experts;
    bool given = j->p->options->given != NULL;
    char subject[32], list[320];
    snprintf(subject, sizeof subject, "layer %d", j->index);
    int64_t n = list_experts(tokens, n_experts, 0, 1, list, sizeof list);
    if (n)
        QC_TRY(qc_event_add(&j->record.events, QC_EVENT_FALLBACK, "expert_without_tokens", subject, n, err,
                            "experts that the router sends nothing to, rounded to nearest%s: %s",
                            given ? "" : " and weighted by a sample of all tokens", list));
    n = list_experts(tokens, n_experts, 1, wanted, list, sizeof list);
    if (n == 0)
        return QC_OK;
    return qc_event_add(&j->record.events, QC_EVENT_NOTE, "expert_few_tokens", subject, n, err,
                        "experts with fewer than %lld tokens%s: %s", (long long)wanted,
                        given ? "" : ", a sample of all tokens stands in for the missing ones", list);
}

/* The same for what the router chose. */
static int note_tokens(expert_run *r, qc_err *err)
{
    const qc_model_config *c = config_of(r);
    int64_t wanted = qc_min_i64(qc_max_i64(c->hidden, c->expert_ffn), qc_pipeline_tokens(r->j->p)),
            *tokens = qc_alloc((size_t)c->n_experts, sizeof *tokens);
    if (!tokens)
        return qc_fail_nomem(err, "experts", (unsigned long long)c->n_experts * sizeof *tokens);
    for (int64_t e = 0; e < c->n_experts; e++)
        tokens[e] = r->routing.first[e + 1] - r->routing.first[e];
    int rc = qc_layer_note_tokens(r->j, tokens, wanted, err);
    qc_free(tokens);
    return rc;
}

/* ---- one expert ---- */

static int run_stage(expert_run *r, qc_stage stage, int64_t expert, qc_err *err)
{
    qc_layer_job *j = r->j;
    qc_pipeline *p = j->p;
    const qc_slot *slots = qc_stage_slots(config_of(r)->family, stage);
    qc_stage_stats stats = {.drift = NULL};
    int64_t n_own = r->routing.first[expert + 1] - r->routing.first[expert], n_all = qc_pipeline_tokens(p);
    token_list list = {r->routing.tokens + r->routing.first[expert], n_own};
    bool all = p->options->all_experts;
    if (!qc_stage_any_quantized(j, slots, expert))
        return QC_OK;
    int rc = collect(r, stage, expert, all ? (token_list){r->all, n_all} : list, &stats.hessian, err);
    if (rc == QC_OK && !all && n_own < qc_min_i64(stats.hessian.n, n_all))
        rc = add_sample(r, stage, expert, n_own, &stats.hessian, err);
    stats.h = stats.hessian.block_h;
    if (rc == QC_OK)
        rc = qc_gptq_shrink(p->be, stats.hessian.block_h, stats.hessian.n, p->options->shrink, err);
    if (rc == QC_OK)
        rc = qc_stage_quantize(j, stage, expert, slots, &stats, !all && n_own == 0, err);
    qc_stage_stats_clear(&stats, p->be);
    return rc;
}

static int put_output(expert_run *r, int64_t expert, qc_err *err)
{
    qc_layer_job *j = r->j;
    qc_pipeline *p = j->p;
    bool in_place = p->be->host_memory && p->x.data;
    double start = qc_now_seconds();
    for (int64_t i = r->routing.first[expert]; i < r->routing.first[expert + 1]; i += p->corpus->length) {
        int64_t n = qc_min_i64(p->corpus->length, r->routing.first[expert + 1] - i);
        QC_TRY(qc_stream_gather(&p->kept, p->be, r->routing.tokens + i, n, p->host, p->buffer_u, err));
        QC_TRY(qc_layer_expert_down_input(j->layer, p->ws, expert, p->buffer_u, r->h, n, err));
        if (!in_place)
            QC_TRY(qc_stream_gather(&p->x, p->be, r->routing.tokens + i, n, p->host, p->buffer_x, err));
        QC_TRY(qc_layer_expert_output(j->layer, p->ws, expert, r->h,
                                      in_place ? r->routing.tokens + i : r->all, r->routing.token_weights + i,
                                      n, in_place ? p->x.data : p->buffer_x, err));
        if (!in_place)
            QC_TRY(put_rows(p, &p->x, r->routing.tokens + i, n, p->buffer_x, err));
    }
    j->record.times.forward += qc_now_seconds() - start;
    return QC_OK;
}

static int run_expert(expert_run *r, int64_t expert, qc_err *err)
{
    QC_TRY(run_stage(r, QC_STAGE_EXPERT_GATE_UP, expert, err));
    QC_TRY(run_stage(r, QC_STAGE_EXPERT_DOWN, expert, err));
    return put_output(r, expert, err);
}

int qc_layer_run_experts(qc_layer_job *j, qc_err *err)
{
    expert_run r = {.j = j};
    int rc = run_alloc(&r, err);
    if (rc == QC_OK)
        rc = record_routing(&r, err);
    if (rc == QC_OK && !j->p->options->all_experts)
        rc = note_tokens(&r, err);
    for (int64_t e = 0; e < config_of(&r)->n_experts && rc == QC_OK; e++)
        rc = run_expert(&r, e, err);
    if (rc == QC_OK && j->ref)
        rc = advance_reference(j, err);
    run_free(&r);
    return rc;
}
