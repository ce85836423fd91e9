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

/* One site in work. */
typedef struct site_job {
    const qc_fold_layer_job *job;
    qc_layer_fold *fold;
    qc_stage stage;
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

static const qc_convert_item *item_of(const qc_fold_layer_job *job, qc_slot slot)
{
    return qc_convert_plan_item(job->plan, qc_model_tensor(job->model, job->index, slot));
}

static qc_dtype dtype_of(const qc_fold_layer_job *job, qc_slot slot)
{
    return job->model->src->info(job->model->src, qc_model_tensor(job->model, job->index, slot))->dtype;
}

/* Why a site can not be scaled without changing the 16-bit model; NULL if it can. */
static const char *obstacle(const qc_fold_layer_job *job, qc_stage stage)
{
    producer p = producers[stage];
    const qc_model_config *c = &job->model->config;
    int64_t row0;
    if (!job->sites[stage])
        return "not asked for";
    if (p.matrix == QC_N_SLOTS && !qc_slot_present(c, job->index, p.vector))
        return "no norm stands before the matrices that read them";
    for (const qc_slot *s = qc_stage_slots(job->model->config.family, stage); *s != QC_N_SLOTS; s++)
        if (item_of(job, *s)->action != QC_ACTION_QUANTIZED)
            return "a matrix that reads the inputs stays 16 bit";
    if (p.matrix != QC_N_SLOTS &&
        item_of(job, qc_slot_stored(c, p.matrix, &row0))->action != QC_ACTION_QUANTIZED)
        return "the matrix that produces the inputs stays 16 bit";
    if (!qc_slot_present(c, job->index, p.vector))
        return NULL;
    qc_dtype dtype = dtype_of(job, p.vector);
    if (dtype != QC_DT_F32 && dtype != QC_DT_F16 && dtype != QC_DT_BF16)
        return "the norm or bias is stored in another type than F32, F16 or BF16";
    return NULL;
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

/* A matrix of the source, read row by row. */
typedef struct source_matrix {
    const qc_source *src;
    int64_t tensor;
} source_matrix;

static int fetch_source(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    const source_matrix *m = ctx;
    int rc = m->src->read_rows(m->src, m->tensor, row0, n_rows, dst, err);
    m->src->release(m->src, m->tensor, row0, n_rows);
    return rc;
}

static int choose(site_job *s, qc_fold_result *ret, qc_err *err)
{
    const qc_fold_layer_job *job = s->job;
    const qc_convert_item *first = item_of(job, slots_of(s)[0]);
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
    if (producers[s->stage].matrix == QC_N_SLOTS)
        site.gain_offset = job->model->config.norm_offset;
    if (s->gain)
        site.gain_dtype = dtype_of(job, producers[s->stage].vector);
    for (const qc_slot *slot = slots_of(s); *slot != QC_N_SLOTS; slot++) {
        const qc_convert_item *item = item_of(job, *slot);
        source_matrix *source = &sources[site.n_matrices];
        *source = (source_matrix){job->model->src, item->tensor};
        site.matrices[site.n_matrices++] =
            (qc_fold_matrix){.fetch = fetch_source,
                             .ctx = source,
                             .n_rows = qc_tensor_rows(source->src->info(source->src, item->tensor)),
                             .spec = &item->spec};
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
    producer p = producers[s->stage];
    float *in = new_factors(s->fold, s->width, err);
    if (!in)
        return QC_E_RESOURCE;
    for (int64_t j = 0; j < s->width; j++)
        in[j] = s->scales[s->scale_of ? s->scale_of[j] : j];
    for (const qc_slot *slot = slots_of(s); *slot != QC_N_SLOTS; slot++)
        s->fold->in[*slot] = in;
    if (p.matrix != QC_N_SLOTS)
        QC_TRY(keep_out(s, p.matrix, err));
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

static int site_alloc(site_job *s, qc_err *err)
{
    const qc_fold_layer_job *job = s->job;
    const qc_model_config *c = &job->model->config;
    producer p = producers[s->stage];
    bool shared = s->stage == QC_STAGE_O && c->n_kv_heads < c->n_heads;
    s->width = qc_stage_width(c, s->stage);
    s->n_scales = p.matrix == QC_N_SLOTS ? s->width : qc_dim_elems(c, qc_slot_of(p.matrix)->rows);
    s->n_sample = qc_min_i64(job->n_windows * job->length, SAMPLE_TOKENS);
    size_t width = (size_t)s->width, n_scales = (size_t)s->n_scales;
    s->sum_abs = qc_alloc(width, sizeof(float));
    s->max_abs = qc_alloc(width, sizeof(float));
    s->sample = qc_alloc((size_t)s->n_sample * width, sizeof(float));
    s->scales = qc_alloc(n_scales, sizeof(float));
    bool ok = s->sum_abs && s->max_abs && s->sample && s->scales;
    if (shared)
        ok = (s->scale_of = qc_alloc(width, sizeof *s->scale_of)) && ok;
    if (qc_slot_present(c, job->index, p.vector)) {
        ok = (s->gain = qc_alloc(n_scales, sizeof(float))) && ok;
        ok = (s->new_gain = qc_alloc(n_scales, sizeof(float))) && ok;
    }
    if (!ok)
        return qc_fail_nomem(err, "channel scales", (unsigned long long)s->n_sample * width * 4);
    if (shared)
        share_heads(c, s->scale_of);
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

static int run_site(const qc_fold_layer_job *job, qc_stage stage, qc_layer_fold *fold, qc_err *err)
{
    site_job s = {.job = job, .fold = fold, .stage = stage};
    qc_fold_record *record = &fold->records[stage];
    double start = qc_now_seconds();
    record->skipped = obstacle(job, stage);
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
                                  job->index, qc_stage_name(stage))
                  : QC_OK;
}

int qc_layer_fold_choose(const qc_fold_layer_job *job, qc_layer_fold *ret, qc_err *err)
{
    *ret = (qc_layer_fold){.n_owned = 0};
    for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++)
        qc_layer_set_acts(job->layer, (qc_stage)stage, 0, 0);
    for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++)
        QC_TRY(run_site(job, (qc_stage)stage, ret, err));
    return QC_OK;
}

void qc_layer_fold_clear(qc_layer_fold *fold)
{
    for (int i = 0; i < fold->n_owned; i++)
        qc_free(fold->owned[i]);
    for (int slot = 0; slot < QC_N_SLOTS; slot++)
        qc_free(fold->vectors[slot]);
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
    qc_slot slot;
    int64_t n_cols;
} folded_matrix;

static int fetch_folded(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    folded_matrix *m = ctx;
    QC_TRY(fetch_source(&m->source, row0, n_rows, dst, err));
    qc_layer_fold_rows(m->fold, m->slot, row0, n_rows, m->n_cols, dst);
    return QC_OK;
}

int qc_layer_fold_apply(const qc_layer_fold *fold, const qc_model *model, int index, qc_layer *layer,
                        qc_err *err)
{
    for (int slot = QC_SLOT_FIRST_IN_LAYER; slot < QC_N_SLOTS; slot++) {
        int64_t tensor = qc_model_tensor(model, index, (qc_slot)slot);
        if (fold->vectors[slot])
            QC_TRY(qc_layer_set_vector(layer, (qc_slot)slot, fold->vectors[slot], err));
        if (!fold->in[slot] && !fold->out[slot])
            continue;
        folded_matrix m = {
            {model->src, tensor}, fold, (qc_slot)slot, qc_tensor_cols(model->src->info(model->src, tensor))};
        QC_TRY(qc_layer_set_matrix(layer, (qc_slot)slot, 0, fetch_folded, &m, err));
    }
    return QC_OK;
}
