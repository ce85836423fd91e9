#include "fold_layer.h"

#include "family.h"
#include "hessian.h"
#include "qc_alloc.h"
#include "qc_math.h"
#include "qc_time.h"

#include <string.h>

/* Tokens whose activations are kept to see what rounding them does. */
enum { SAMPLE_TOKENS = 512 };

/* Who produces the inputs of a stage: a norm (vector), or the rows of a matrix and its bias. The matrix may
 * be stored as part of a fused one. */
typedef struct producer {
    qc_slot matrix; /* QC_N_SLOTS: none */
    qc_slot vector; /* gain or bias */
} producer;

static const producer producers[QC_N_DENSE_STAGES] = {
    [QC_STAGE_QKV] = {QC_N_SLOTS, QC_SLOT_ATTN_NORM},
    [QC_STAGE_O] = {QC_SLOT_V, QC_SLOT_V_BIAS},
    [QC_STAGE_GATE_UP] = {QC_N_SLOTS, QC_SLOT_MLP_NORM},
    [QC_STAGE_DOWN] = {QC_SLOT_UP, QC_SLOT_UP_BIAS},
};

/* One site in work. Router and experts of a layer read the same inputs: they share the site of gate and up,
 * whose statistics are those of all tokens. */
typedef struct site_job {
    const qc_fold_layer_job *job;
    qc_layer_fold *fold;
    qc_stage site;  /* QC_N_DENSE_STAGES of them */
    qc_stage stage; /* whose inputs they are: of experts, where the layer has them */
    qc_hessian hessian;
    const float *h;
    float *sum_abs, *max_abs; /* host [width] */
    float *sample;            /* host [n_sample, width] */
    int64_t n_sample;
    int32_t *scale_of;       /* [width]; NULL: one channel per input */
    float *gain, *new_gain;  /* host [n_scales]; NULL if the producer stores nothing */
    float *scales;           /* host [n_scales] */
    int64_t width, n_scales; /* inputs, channels of the producer */
} site_job;

static const qc_slot *slots_of(const site_job *s)
{
    return qc_stage_slots(s->job->model->config.family, s->stage);
}

static const qc_convert_item *item_of(const qc_fold_layer_job *job, qc_slot slot, int64_t expert)
{
    return qc_convert_plan_item(job->plan, qc_model_expert_tensor(job->model, job->index, slot, expert));
}

/* The stage that reads the inputs of a site in this layer. */
static qc_stage stage_of(const qc_fold_layer_job *job, qc_stage site)
{
    bool sparse = job->model->config.layer_sparse[job->index];
    return sparse && site == QC_STAGE_GATE_UP ? QC_STAGE_EXPERT_GATE_UP
           : sparse && site == QC_STAGE_DOWN  ? QC_STAGE_EXPERT_DOWN
                                              : site;
}

static bool same_grid(const qc_convert_item *a, const qc_convert_item *b)
{
    const qc_grid *g = &a->spec.grid, *h = &b->spec.grid;
    return g->bits == h->bits && g->symmetric == h->symmetric && g->group_elems == h->group_elems &&
           g->scale_dtype == h->scale_dtype;
}

static qc_dtype dtype_of(const qc_fold_layer_job *job, qc_slot slot)
{
    return job->model->src->info(job->model->src, qc_model_tensor(job->model, job->index, slot))->dtype;
}

/* Why a site can not be scaled without changing the 16-bit model; NULL if it can. */
static const char *obstacle(const qc_fold_layer_job *job, qc_stage site)
{
    producer p = producers[site];
    const qc_model_config *c = &job->model->config;
    qc_stage stage = stage_of(job, site);
    int64_t row0, n = qc_stage_experts(c, stage);
    const qc_slot *slots = qc_stage_slots(c->family, stage);
    if (!job->sites[site])
        return "not asked for";
    if (stage == QC_STAGE_EXPERT_DOWN)
        return "inputs of the down matrices of experts are left as they are";
    if (p.matrix == QC_N_SLOTS && !qc_slot_present(c, job->index, p.vector))
        return "no norm stands before the matrices that read them";
    for (int64_t k = 0; slots[k / n] != QC_N_SLOTS; k++) {
        if (item_of(job, slots[k / n], k % n)->action != QC_ACTION_QUANTIZED)
            return "a matrix that reads the inputs stays 16 bit";
        if (k % n && !same_grid(item_of(job, slots[k / n], 0), item_of(job, slots[k / n], k % n)))
            return "experts are on different grids";
    }
    if (p.matrix != QC_N_SLOTS &&
        item_of(job, qc_slot_stored(c, p.matrix, &row0), 0)->action != QC_ACTION_QUANTIZED)
        return "the matrix that produces the inputs stays 16 bit";
    if (!qc_slot_present(c, job->index, p.vector))
        return NULL;
    qc_dtype dtype = dtype_of(job, p.vector);
    if (dtype != QC_DT_F32 && dtype != QC_DT_F16 && dtype != QC_DT_BF16)
        return "the norm or bias is stored in another type than F32, F16 or BF16";
    return NULL;
}

static void mark(const qc_fold_layer_job *job, qc_slot slot, qc_convert_plan *plan)
{
    if (qc_slot_present(&job->model->config, job->index, slot))
        qc_convert_plan_item(plan, qc_model_tensor(job->model, job->index, slot))->may_fold = true;
}

void qc_layer_fold_mark(const qc_convert_plan *rounded, const qc_model *model,
                        const bool sites[QC_N_DENSE_STAGES], qc_convert_plan *plan)
{
    qc_fold_layer_job job = {.plan = rounded, .model = model};
    memcpy(job.sites, sites, sizeof job.sites);
    for (; job.index < (int)model->config.n_layers; job.index++)
        for (int site = 0; site < QC_N_DENSE_STAGES; site++) {
            if (obstacle(&job, (qc_stage)site))
                continue;
            mark(&job, producers[site].vector, plan);
            if (stage_of(&job, (qc_stage)site) == QC_STAGE_EXPERT_GATE_UP)
                mark(&job, QC_SLOT_ROUTER, plan);
        }
}

/* ---- statistics ---- */

/* Tokens of a window that belong to the sample: token i * tokens / n_sample of all. */
static int keep_sample(site_job *s, int64_t window, const float *u, qc_err *err)
{
    const qc_fold_layer_job *job = s->job;
    int64_t all = job->n_windows * job->length, first = window * job->length;
    for (int64_t i = 0; i < s->n_sample; i++) {
        int64_t at = i * all / s->n_sample - first;
        if (at >= 0 && at < job->length)
            QC_TRY(job->be->download(job->be, s->sample + i * s->width, u + at * s->width, s->width, err));
    }
    return QC_OK;
}

static int collect(site_job *s, bool wanted, qc_err *err)
{
    const qc_fold_layer_job *job = s->job;
    int64_t hidden = job->model->config.hidden;
    const float *sum_abs;
    if (wanted)
        QC_TRY(qc_hessian_init(&s->hessian, job->be, s->width, 0, err));
    for (int64_t i = 0; i < job->n_windows; i++) {
        float *x = job->x + i * job->length * hidden;
        QC_TRY(qc_layer_stage_input(job->layer, job->ws, s->stage, x, job->u, job->length, err));
        if (wanted) {
            QC_TRY(qc_hessian_add(&s->hessian, job->u, s->width, job->length, err));
            QC_TRY(keep_sample(s, i, job->u, err));
        }
        if (s->stage == QC_STAGE_O)
            QC_TRY(qc_layer_stage_output(job->layer, job->ws, s->stage, job->u, x, job->length, err));
    }
    if (!wanted)
        return QC_OK;
    QC_TRY(qc_hessian_finish(&s->hessian, &s->h, &sum_abs, err));
    QC_TRY(job->be->download(job->be, s->sum_abs, sum_abs, s->width, err));
    return job->be->download(job->be, s->max_abs, s->hessian.max_abs, s->width, err);
}

/* ---- choice ---- */

/* A matrix of the source, read row by row; of experts, all of them, one below the other. */
typedef struct source_matrix {
    const qc_model *model;
    int layer;
    qc_slot slot;
    int64_t n_rows, n_cols; /* of one */
} source_matrix;

static source_matrix source_of(const qc_model *model, int layer, qc_slot slot)
{
    const qc_tensor_info *info = model->src->info(model->src, qc_model_tensor(model, layer, slot));
    return (source_matrix){model, layer, slot, qc_tensor_rows(info), qc_tensor_cols(info)};
}

static int fetch_source(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    const source_matrix *m = ctx;
    const qc_source *src = m->model->src;
    while (n_rows > 0) {
        int64_t at = row0 % m->n_rows, n = qc_min_i64(n_rows, m->n_rows - at),
                tensor = qc_model_expert_tensor(m->model, m->layer, m->slot, row0 / m->n_rows);
        QC_TRY(src->read_rows(src, tensor, at, n, dst, err));
        src->release(src, tensor, at, n);
        dst += n * m->n_cols;
        row0 += n;
        n_rows -= n;
    }
    return QC_OK;
}

static int choose(site_job *s, qc_fold_result *ret, qc_err *err)
{
    const qc_fold_layer_job *job = s->job;
    const qc_convert_item *first = item_of(job, slots_of(s)[0], 0);
    int64_t n_experts = qc_stage_experts(&job->model->config, s->stage);
    source_matrix sources[QC_FOLD_MATRICES];
    qc_fold_site site = {.n_cols = s->width,
                         .n_scales = s->n_scales,
                         .scale_of = s->scale_of,
                         .h = s->h,
                         .n_tokens = s->hessian.n_tokens,
                         .sum_abs = s->sum_abs,
                         .max_abs = s->max_abs,
                         .sample = s->sample,
                         .n_sample = s->n_sample,
                         .act_bits = first->act_bits,
                         .act_group = first->act_group,
                         .gain = s->gain};
    if (producers[s->site].matrix == QC_N_SLOTS)
        site.gain_offset = job->model->config.norm_offset;
    if (s->gain)
        site.gain_dtype = dtype_of(job, producers[s->site].vector);
    for (const qc_slot *slot = slots_of(s); *slot != QC_N_SLOTS; slot++) {
        source_matrix *source = &sources[site.n_matrices];
        *source = source_of(job->model, job->index, *slot);
        site.matrices[site.n_matrices++] = (qc_fold_matrix){.fetch = fetch_source,
                                                            .ctx = source,
                                                            .n_rows = source->n_rows * n_experts,
                                                            .spec = &item_of(job, *slot, 0)->spec};
    }
    return qc_fold_choose(job->be, &site, job->options, s->scales, s->new_gain, ret, err);
}

/* ---- from scales to factors ---- */

static float *new_factors(qc_layer_fold *fold, int64_t n, qc_err *err)
{
    float *p = qc_alloc((size_t)n, sizeof *p);
    if (!p)
        qc_fail_nomem(err, "channel scales", (unsigned long long)n * sizeof *p);
    else
        fold->owned[fold->n_owned++] = p;
    return p;
}

/* Rows of the producer's matrix are divided by the scales; those of its neighbours in a fused matrix are not.
 */
static int keep_out(site_job *s, qc_slot part, qc_err *err)
{
    const qc_model_config *c = &s->job->model->config;
    int64_t row0;
    qc_slot slot = qc_slot_stored(c, part, &row0);
    int64_t n_rows = qc_dim_elems(c, qc_slot_of(slot)->rows);
    float *out = new_factors(s->fold, n_rows, err);
    if (!out)
        return QC_E_RESOURCE;
    for (int64_t r = 0; r < n_rows; r++)
        out[r] = r >= row0 && r < row0 + s->n_scales ? 1 / s->scales[r - row0] : 1;
    s->fold->out[slot] = out;
    return QC_OK;
}

static int keep_factors(site_job *s, qc_err *err)
{
    producer p = producers[s->site];
    float *in = new_factors(s->fold, s->width, err);
    if (!in)
        return QC_E_RESOURCE;
    for (int64_t j = 0; j < s->width; j++)
        in[j] = s->scales[s->scale_of ? s->scale_of[j] : j];
    for (const qc_slot *slot = slots_of(s); *slot != QC_N_SLOTS; slot++)
        s->fold->in[*slot] = in;
    if (s->stage == QC_STAGE_EXPERT_GATE_UP)
        s->fold->in[QC_SLOT_ROUTER] = in;
    if (p.matrix != QC_N_SLOTS)
        QC_TRY(keep_out(s, p.matrix, err));
    s->fold->scales[s->site] = s->scales;
    s->fold->n_scales[s->site] = s->n_scales;
    s->scales = NULL;
    if (s->new_gain)
        s->fold->vectors[p.vector] = s->new_gain;
    s->new_gain = NULL;
    return QC_OK;
}

/* ---- one site ---- */

/* Several query heads read one head of v: their inputs of o share its channels. */
static void share_heads(const qc_model_config *c, int32_t *scale_of)
{
    int64_t d = c->head_dim, share = c->n_heads / c->n_kv_heads;
    for (int64_t j = 0; j < c->n_heads * d; j++)
        scale_of[j] = (int32_t)(j / d / share * d + j % d);
}

int64_t qc_layer_fold_channels(const qc_model_config *config, qc_stage site)
{
    producer p = producers[site];
    return p.matrix == QC_N_SLOTS ? qc_stage_width(config, site)
                                  : qc_dim_elems(config, qc_slot_of(p.matrix)->rows);
}

/* Room for the scales, and which of them each input has. */
static int scales_alloc(site_job *s, qc_err *err)
{
    const qc_model_config *c = &s->job->model->config;
    bool shared = s->stage == QC_STAGE_O && c->n_kv_heads < c->n_heads;
    s->width = qc_stage_width(c, s->stage);
    s->n_scales = qc_layer_fold_channels(c, s->site);
    s->scales = qc_alloc((size_t)s->n_scales, sizeof(float));
    s->scale_of = shared ? qc_alloc((size_t)s->width, sizeof *s->scale_of) : NULL;
    if (!s->scales || (shared && !s->scale_of))
        return qc_fail_nomem(err, "channel scales", (unsigned long long)s->width * 8);
    if (shared)
        share_heads(c, s->scale_of);
    return QC_OK;
}

static int site_alloc(site_job *s, qc_err *err)
{
    const qc_fold_layer_job *job = s->job;
    const qc_model_config *c = &job->model->config;
    producer p = producers[s->site];
    QC_TRY(scales_alloc(s, err));
    s->n_sample = qc_min_i64(job->n_windows * job->length, SAMPLE_TOKENS);
    size_t width = (size_t)s->width, n_scales = (size_t)s->n_scales;
    s->sum_abs = qc_alloc(width, sizeof(float));
    s->max_abs = qc_alloc(width, sizeof(float));
    s->sample = qc_alloc((size_t)s->n_sample * width, sizeof(float));
    bool ok = s->sum_abs && s->max_abs && s->sample;
    if (qc_slot_present(c, job->index, p.vector)) {
        ok = (s->gain = qc_alloc(n_scales, sizeof(float))) && ok;
        ok = (s->new_gain = qc_alloc(n_scales, sizeof(float))) && ok;
    }
    if (!ok)
        return qc_fail_nomem(err, "channel scales", (unsigned long long)s->n_sample * width * 4);
    const qc_source *src = job->model->src;
    return s->gain
               ? src->read_rows(src, qc_model_tensor(job->model, job->index, p.vector), 0, 1, s->gain, err)
               : QC_OK;
}

static void site_free(site_job *s)
{
    qc_hessian_clear(&s->hessian);
    void *arrays[] = {s->sum_abs, s->max_abs, s->sample, s->scale_of, s->gain, s->new_gain, s->scales};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        qc_free(arrays[i]);
}

static int run_site(const qc_fold_layer_job *job, qc_stage site, qc_layer_fold *fold, qc_err *err)
{
    site_job s = {.job = job, .fold = fold, .site = site, .stage = stage_of(job, site)};
    qc_fold_record *record = &fold->records[site];
    double start = qc_now_seconds();
    record->skipped = obstacle(job, site);
    if (s.stage == QC_STAGE_EXPERT_DOWN)
        return QC_OK;
    int rc = site_alloc(&s, err);
    if (rc == QC_OK)
        rc = collect(&s, !record->skipped, err);
    if (rc == QC_OK && !record->skipped)
        rc = choose(&s, &record->result, err);
    if (rc == QC_OK && !record->skipped && strcmp(record->result.choice, QC_FOLD_IDENTITY) != 0)
        rc = keep_factors(&s, err);
    site_free(&s);
    record->seconds = qc_now_seconds() - start;
    return rc < 0 ? qc_err_prefix(err, "%s: layer %d, scaling the inputs of %s", job->model->src->path,
                                  job->index, qc_stage_name(s.stage))
                  : QC_OK;
}

int qc_layer_fold_restore(const qc_model *model, int index, qc_stage site, const float *scales, int64_t n,
                          qc_layer_fold *fold, qc_err *err)
{
    qc_fold_layer_job job = {.model = model, .index = index};
    site_job s = {.job = &job, .fold = fold, .site = site, .stage = stage_of(&job, site)};
    int rc = scales_alloc(&s, err);
    if (rc == QC_OK && n != s.n_scales)
        rc = qc_fail(err, QC_E_INPUT, "%lld scales for the inputs of %s, expected %lld", (long long)n,
                     qc_stage_name(site), (long long)s.n_scales);
    if (rc == QC_OK) {
        memcpy(s.scales, scales, (size_t)n * sizeof *scales);
        rc = keep_factors(&s, err);
    }
    site_free(&s);
    return rc;
}

int qc_layer_fold_choose(const qc_fold_layer_job *job, qc_layer_fold *ret, qc_err *err)
{
    *ret = (qc_layer_fold){.n_owned = 0};
    for (int stage = 0; stage < QC_N_STAGES; stage++)
        qc_layer_set_acts(job->layer, (qc_stage)stage, 0, 0);
    for (int site = 0; site < QC_N_DENSE_STAGES; site++)
        QC_TRY(run_site(job, (qc_stage)site, ret, err));
    return QC_OK;
}

uint64_t qc_layer_fold_bytes(const qc_model_config *config, const qc_fold_options *options, int64_t n_tokens,
                             bool acts)
{
    uint64_t most = 0;
    int64_t n_sample = qc_min_i64(n_tokens, SAMPLE_TOKENS);
    for (int stage = 0; stage < QC_N_STAGES; stage++) {
        if (stage == QC_STAGE_EXPERT_DOWN || !qc_stage_in_any_layer(config, (qc_stage)stage))
            continue;
        int64_t n = qc_stage_width(config, (qc_stage)stage);
        uint64_t sums = qc_hessian_bytes(n, n_tokens),
                 choice = (uint64_t)(n * n) * 4 + qc_fold_bytes(options, n, n_sample, acts),
                 bytes = (sums > choice ? sums : choice) + (uint64_t)(n_sample * n) * 4;
        most = bytes > most ? bytes : most;
    }
    return most + (uint64_t)(n_tokens * config->hidden) * 4;
}

void qc_layer_fold_clear(qc_layer_fold *fold)
{
    for (int i = 0; i < fold->n_owned; i++)
        qc_free(fold->owned[i]);
    for (int slot = 0; slot < QC_N_SLOTS; slot++)
        qc_free(fold->vectors[slot]);
    for (int site = 0; site < QC_N_DENSE_STAGES; site++)
        qc_free(fold->scales[site]);
    *fold = (qc_layer_fold){.n_owned = 0};
}

/* ---- use ---- */

void qc_layer_fold_rows(const qc_layer_fold *fold, qc_slot slot, int64_t row0, int64_t n_rows, int64_t n_cols,
                        float *w)
{
    const float *in = fold->in[slot], *out = fold->out[slot];
    if (!in && !out)
        return;
    for (int64_t r = 0; r < n_rows; r++)
        for (int64_t c = 0; c < n_cols; c++)
            w[r * n_cols + c] *= (out ? out[row0 + r] : 1) * (in ? in[c] : 1);
}

typedef struct folded_matrix {
    source_matrix source;
    const qc_layer_fold *fold;
    int64_t expert;
} folded_matrix;

static int fetch_folded(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    folded_matrix *m = ctx;
    QC_TRY(fetch_source(&m->source, m->expert * m->source.n_rows + row0, n_rows, dst, err));
    qc_layer_fold_rows(m->fold, m->source.slot, row0, n_rows, m->source.n_cols, dst);
    return QC_OK;
}

int qc_layer_fold_router(const qc_layer_fold *fold, const qc_model *model, int index, float *dst, qc_err *err)
{
    folded_matrix m = {source_of(model, index, QC_SLOT_ROUTER), fold, 0};
    return fetch_folded(&m, 0, m.source.n_rows, dst, err);
}

int qc_layer_fold_apply(const qc_layer_fold *fold, const qc_model *model, int index, qc_layer *layer,
                        qc_err *err)
{
    for (int slot = QC_SLOT_FIRST_IN_LAYER; slot < QC_N_SLOTS; slot++) {
        int64_t n_experts = slot < QC_SLOT_FIRST_IN_EXPERT ? 1 : model->config.n_experts;
        if (fold->vectors[slot])
            QC_TRY(qc_layer_set_vector(layer, (qc_slot)slot, fold->vectors[slot], err));
        if (!fold->in[slot] && !fold->out[slot])
            continue;
        folded_matrix m = {source_of(model, index, (qc_slot)slot), fold, 0};
        for (; m.expert < n_experts; m.expert++)
            QC_TRY(qc_layer_set_matrix(layer, (qc_slot)slot, m.expert, fetch_folded, &m, err));
    }
    return QC_OK;
}
