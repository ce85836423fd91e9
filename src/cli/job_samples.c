#include "job_samples.h"

#include "family.h"
#include "fold.h"
#include "hessian.h"
#include "job_calib.h"
#include "qc_alloc.h"
#include "qc_math.h"
#include "qc_rng.h"
#include "qc_sha256.h"
#include "qc_time.h"
#include "rtn.h"
#include "stream.h"

#include <math.h>
#include <string.h>

/* Sizes of the samples: large enough to keep all threads in work, small enough to end in some tenths of a
 * second; a sample is repeated until it has taken SAMPLE_SECONDS. Wider inputs than WIDEST are not tried:
 * their cost follows from the powers of the width. */
enum { TOKENS = 512, ROWS = 768, WIDEST = 2048, LENGTH = 1024, VOCAB = 1024, N_HASH = 1 << 20 };
#define SAMPLE_SECONDS 0.03
#define ENOUGH_SECONDS 0.3 /* for a single run */

typedef struct sampler {
    const job *j;
    qc_backend *be;
    int64_t width;    /* of the inputs in work, at most WIDEST */
    int64_t some;     /* rows of a matrix that reads them, at most ROWS */
    int64_t n_tokens; /* of a product */
    float *x;         /* host [ROWS, most] random numbers; most: WIDEST, or less if no input is that wide */
    float *in, *out;  /* backend, the same size; in holds x */
    int64_t most;
    qc_weight *weight; /* [ROWS, width] */
    qc_hessian sums;
    const float *h;      /* of sums, finished */
    qc_code_rows rows;   /* [ROWS, most] */
    qc_quant_spec spec;  /* of the matrix below */
    qc_quant_spec local; /* the same at the width in work */
    qc_gptq_options gptq;
    bool solves;
    qc_gptq_input *input;
    qc_fold_options fold;
    int64_t fold_rows;
    int act_bits;
    float *sizes; /* host [most] above 0 */
    float *work;  /* host [work_elems] */
    int64_t work_elems;
    int64_t tensor, n_rows, n_cols; /* a matrix of the layers, and those of its rows that are read */
    qc_attention_shape attention;
    float *heads;         /* backend: queries, keys, values and result */
    float *angles, *gain; /* backend: ones */
    qc_stream kept;
    qc_score scores[TOKENS];
    int32_t targets[TOKENS], experts[TOKENS * 64];
    float weights[TOKENS * 64];
} sampler;

/* *ret = seconds of a run, of the fastest one, which other programs disturbed least. */
static int time_sample(sampler *s, int (*sample)(sampler *, qc_err *), double *ret, qc_err *err)
{
    double start = qc_now_seconds(), now = start, least = INFINITY;
    for (int runs = 0; runs == 0 || now - start < (runs < 2 ? ENOUGH_SECONDS : SAMPLE_SECONDS); runs++) {
        double before = now;
        QC_TRY(sample(s, err));
        now = qc_now_seconds();
        least = now - before < least ? now - before : least;
    }
    *ret = least;
    return QC_OK;
}

/* ---- calibration ---- */

static int fetch_x(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    const sampler *s = ctx;
    (void)err;
    for (int64_t r = 0; r < n_rows; r++)
        memcpy(dst + r * s->width, s->x + (row0 + r) % ROWS * s->width, (size_t)s->width * sizeof *dst);
    return QC_OK;
}

static int sample_product(sampler *s, qc_err *err)
{
    return s->be->linear(s->be, s->out, s->some, s->in, s->width, s->weight, NULL, s->n_tokens, false, err);
}

static int sample_gram(sampler *s, qc_err *err)
{
    QC_TRY(s->be->gram(s->be, s->sums.block_h, s->in, s->width, NULL, 0, TOKENS, s->width, s->width, 1, err));
    return s->be->column_stats(s->be, s->sums.block_abs, s->sums.max_abs, s->in, s->width, TOKENS, s->width,
                               err);
}

/* H of TOKENS tokens, from nothing. */
static int sample_sums(sampler *s, qc_err *err)
{
    const float *sum_abs;
    if (s->sums.n)
        qc_hessian_clear(&s->sums);
    QC_TRY(qc_hessian_init(&s->sums, s->be, s->width, 0, err));
    QC_TRY(qc_hessian_add(&s->sums, s->in, s->width, TOKENS, err));
    QC_TRY(qc_hessian_finish(&s->sums, &s->h, &sum_abs, err));
    return qc_gptq_shrink(s->be, s->sums.block_h, s->width, 0.5, err);
}

static int sample_factor(sampler *s, qc_err *err)
{
    qc_gptq_input_info info;
    qc_gptq_input_free(s->input);
    s->input = NULL;
    return qc_gptq_input_new(s->be, s->h, s->width, s->solves ? &s->gptq : NULL, &s->input, &info, err);
}

static int sample_row(sampler *s, qc_err *err)
{
    qc_quant_stats stats = {0};
    qc_gptq_result result;
    double norm = 0;
    QC_TRY(qc_gptq_matrix(s->input, s->x, s->some, &s->local, &s->rows, &stats, &result, err));
    return qc_gptq_norm(s->input, s->x, s->some, &norm, err);
}

static int sample_correct_row(sampler *s, qc_err *err)
{
    memcpy(s->work, s->x, (size_t)(s->some * s->width) * sizeof *s->work);
    return qc_gptq_correct_target(s->input, NULL, s->in, 1e-9, s->work, s->some, err);
}

static int sample_correct(sampler *s, qc_err *err)
{
    memcpy(s->work, s->x, (size_t)(s->some * s->width) * sizeof *s->work);
    return qc_gptq_correct_target(s->input, s->h, NULL, 1e-9, s->work, s->some, err);
}

static int sample_fold(sampler *s, qc_err *err)
{
    qc_fold_result result;
    qc_fold_site site = {.matrices = {{fetch_x, s, s->fold_rows, &s->local}},
                         .n_matrices = 1,
                         .n_cols = s->width,
                         .n_scales = s->width,
                         .h = s->h,
                         .n_tokens = TOKENS,
                         .sum_abs = s->sizes,
                         .max_abs = s->sizes,
                         .sample = s->x,
                         .n_sample = TOKENS,
                         .act_bits = s->act_bits};
    return qc_fold_choose(s->be, &site, &s->fold, s->work, NULL, &result, err);
}

/* What the number of tokens says nothing about: the whole less the products of its tokens. */
static double rest(double whole, double part)
{
    return whole > part ? whole - part : 0;
}

/* Two numbers of rows tell what belongs to the inputs and what to the rows. */
static int measure_fold(sampler *s, stage_samples *ret, qc_err *err)
{
    double few, many;
    s->fold_rows = qc_ceil_div(s->some, 2);
    QC_TRY(time_sample(s, sample_fold, &few, err));
    s->fold_rows = s->some;
    QC_TRY(time_sample(s, sample_fold, &many, err));
    double half = (double)(s->some / 2);
    ret->fold_row = half > 0 ? rest(many, few) / half : 0;
    ret->fold = rest(many, ret->fold_row * (double)s->some);
    return QC_OK;
}

static int measure_correction(sampler *s, stage_samples *ret, qc_err *err)
{
    double w = (double)s->width, with_d;
    QC_TRY(time_sample(s, sample_correct_row, &ret->correct_row, err));
    QC_TRY(time_sample(s, sample_correct, &with_d, err));
    ret->correct = rest(with_d, ret->correct_row + w * w * (double)s->some * ret->product);
    ret->correct_row /= (double)s->some;
    return QC_OK;
}

static int measure_width(sampler *s, bool corrects, stage_samples *ret, qc_err *err)
{
    double w = (double)s->width, sums;
    s->be->weight_free(s->be, s->weight);
    s->weight = NULL;
    QC_TRY(s->be->weight_load(s->be, s->some, s->width, fetch_x, s, &s->weight, err));
    s->n_tokens = TOKENS;
    QC_TRY(time_sample(s, sample_product, &ret->product, err));
    ret->product /= TOKENS * (double)s->some * w;
    if (!qc_job_has_calibration(s->j))
        return QC_OK;
    QC_TRY(time_sample(s, sample_sums, &sums, err));
    QC_TRY(time_sample(s, sample_gram, &ret->gram, err));
    ret->sums = rest(sums, ret->gram);
    ret->gram /= TOKENS * w * w / 2;
    QC_TRY(sample_sums(s, err)); /* what the solve reads */
    if (s->fold.method != QC_FOLD_NONE)
        QC_TRY(measure_fold(s, ret, err));
    QC_TRY(time_sample(s, sample_factor, &ret->factor, err));
    QC_TRY(time_sample(s, sample_row, &ret->row, err));
    ret->row /= (double)s->some;
    return corrects ? measure_correction(s, ret, err) : QC_OK;
}

/* From the sampled width to that of the model. */
static void widen(stage_samples *p, double factor)
{
    p->sums *= factor * factor;
    p->factor *= factor * factor * factor;
    p->row *= factor * factor;
    p->correct *= factor * factor;
    p->correct_row *= factor * factor;
    p->fold *= factor * factor;
    p->fold_row *= factor * factor;
}

/* A scale per row stays one; super-blocks must be whole. */
static void set_width(sampler *s, int64_t n, int64_t n_rows)
{
    qc_grid *grid = &s->local.grid;
    s->local = s->spec;
    s->width = qc_min_i64(n, WIDEST);
    s->some = qc_min_i64(n_rows, ROWS);
    if (grid->kind == QC_GRID_SUPER)
        s->width = qc_max_i64(s->width / grid->super_elems, 1) * grid->super_elems;
    else if (grid->group_elems >= s->n_cols || grid->group_elems > s->width)
        grid->group_elems = s->width;
}

static int measure_stages(sampler *s, job_samples *ret, qc_err *err)
{
    const qc_model_config *c = &s->j->model.config;
    const qc_recipe_quantize *q = s->j->outputs[0].quantize;
    bool corrects = qc_job_correction(q) > 0;
    stage_samples done[QC_N_STAGES];
    int64_t widths[QC_N_STAGES] = {0}, rows[QC_N_STAGES];
    for (int i = 0; i < QC_N_STAGES; i++) {
        qc_stage stage = (qc_stage)i;
        int same = 0;
        if (!qc_stage_in_any_layer(c, stage))
            continue;
        set_width(s, qc_stage_width(c, stage), qc_stage_rows(c, stage));
        while (same < i && (widths[same] != s->width || rows[same] != s->some))
            same++;
        widths[i] = s->width;
        rows[i] = s->some;
        done[i] = (stage_samples){0};
        if (same < i)
            done[i] = done[same];
        else
            QC_TRY(measure_width(s, corrects, &done[i], err));
        double expert = ret->stages[i].expert;
        ret->stages[i] = done[i];
        ret->stages[i].expert = expert;
        widen(&ret->stages[i], (double)qc_stage_width(c, stage) / (double)s->width);
    }
    return QC_OK;
}

/* ---- the forward pass ---- */

/* An expert sees its share of the tokens of a window. */
static int measure_experts(sampler *s, job_samples *ret, qc_err *err)
{
    const qc_model_config *c = &s->j->model.config;
    int64_t length = s->j->corpus.length ? s->j->corpus.length : s->j->windows.length;
    for (int stage = QC_N_DENSE_STAGES; stage < QC_N_STAGES && c->n_experts; stage++) {
        set_width(s, qc_stage_width(c, (qc_stage)stage), qc_stage_rows(c, (qc_stage)stage));
        s->n_tokens = qc_min_i64(TOKENS, qc_max_i64(1, length * c->n_chosen / c->n_experts));
        s->be->weight_free(s->be, s->weight);
        s->weight = NULL;
        QC_TRY(s->be->weight_load(s->be, s->some, s->width, fetch_x, s, &s->weight, err));
        double *expert = &ret->stages[stage].expert;
        QC_TRY(time_sample(s, sample_product, expert, err));
        *expert /= (double)(s->n_tokens * s->some * s->width);
    }
    return QC_OK;
}

static int sample_attention(sampler *s, qc_err *err)
{
    const qc_attention_shape *a = &s->attention;
    int64_t nq = a->n_heads * a->head_dim * a->n_tokens, nkv = a->n_kv_heads * a->head_dim * a->n_tokens;
    float *k = s->heads + nq, *v = k + nkv;
    return s->be->attention(s->be, v + nkv, s->heads, k, v, a, err);
}

static int fill(qc_backend *be, float *buffer, const float *x, int64_t n_x, int64_t n, qc_err *err)
{
    for (int64_t i = 0; i < n; i += n_x)
        QC_TRY(be->upload(be, buffer + i, x, qc_min_i64(n_x, n - i), err));
    return QC_OK;
}

static int measure_attention(sampler *s, job_samples *ret, qc_err *err)
{
    const qc_model_config *c = &s->j->model.config;
    int64_t length = qc_max_i64(s->j->corpus.length, s->j->windows.length);
    length = qc_min_i64(length ? length : 1, LENGTH);
    s->attention = (qc_attention_shape){.n_tokens = length,
                                        .n_heads = c->n_heads,
                                        .n_kv_heads = c->n_kv_heads,
                                        .head_dim = c->head_dim,
                                        .scale = c->attention_scale,
                                        .softcap = c->attention_softcap};
    int64_t n = 2 * length * (c->n_heads + c->n_kv_heads) * c->head_dim;
    if (!(s->heads = s->be->alloc(s->be, n, err)))
        return QC_E_RESOURCE;
    QC_TRY(fill(s->be, s->heads, s->x, ROWS * s->most, n, err));
    QC_TRY(time_sample(s, sample_attention, &ret->attention, err));
    ret->attention /= (double)(length * length * c->n_heads * c->head_dim);
    return QC_OK;
}

/* What a token costs beside products, in pieces that fit the buffers. */
static int sample_token(sampler *s, qc_err *err)
{
    const qc_model_config *c = &s->j->model.config;
    qc_backend *be = s->be;
    int64_t width = qc_min_i64(c->hidden, s->most), half = c->rotary_dim / 2,
            ffn = c->n_experts ? c->n_chosen * c->expert_ffn : c->ffn;
    for (int i = 0; i < 2; i++)
        QC_TRY(be->rms_norm(be, s->out, width, s->in, width, s->gain, 0, TOKENS, width, c->rms_eps, err));
    for (int64_t h = 0; h < c->n_heads + c->n_kv_heads; h++) {
        if (c->qk_norm)
            QC_TRY(be->rms_norm(be, s->out, c->head_dim, s->in, c->head_dim, s->gain, 0, TOKENS, c->head_dim,
                                c->rms_eps, err));
        QC_TRY(be->rope(be, s->out, c->head_dim, s->angles, s->angles + TOKENS * half, TOKENS, 1, c->head_dim,
                        c->rotary_dim, err));
    }
    for (int64_t i = 0; i < ffn; i += s->most)
        QC_TRY(be->gated_act(be, s->out, s->in, s->in, TOKENS * qc_min_i64(s->most, ffn - i), c->act, err));
    if (c->n_experts == 0)
        return QC_OK;
    int64_t n_experts = qc_min_i64(c->n_experts, s->most), n_chosen = qc_min_i64(c->n_chosen, 64);
    return be->route(be, s->experts, s->weights, s->in, n_experts, TOKENS, n_experts, n_chosen, true, err);
}

static int sample_logit(sampler *s, qc_err *err)
{
    for (int64_t t = 0; t < TOKENS; t++)
        s->scores[t] = qc_score_start();
    int64_t n = qc_min_i64(VOCAB, s->most);
    return s->be->score(s->be, s->scores, s->in, s->in, n, s->targets, TOKENS, 0, n,
                        s->j->model.config.final_softcap, err);
}

/* ---- weights and files ---- */

static int fetch_rows(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    const sampler *s = ctx;
    return s->j->src->read_rows(s->j->src, s->tensor, row0, n_rows, dst, err);
}

static int sample_prepare(sampler *s, qc_err *err)
{
    s->be->weight_free(s->be, s->weight);
    s->weight = NULL;
    return s->be->weight_load(s->be, s->n_rows, s->n_cols, fetch_rows, s, &s->weight, err);
}

static int sample_round(sampler *s, qc_err *err)
{
    qc_quant_stats stats = {0};
    int64_t n = qc_min_i64(ROWS, s->n_rows);
    QC_TRY(fetch_rows(s, 0, n, s->work, err));
    QC_TRY(qc_rtn_rows(s->be, s->work, n, s->n_cols, &s->spec, NULL, &s->rows, &stats, err));
    s->rows.n_rows = n;
    qc_code_rows_decode(&s->rows, &s->spec.grid, s->n_cols, s->work);
    return QC_OK;
}

static int sample_keep(sampler *s, qc_err *err)
{
    QC_TRY(qc_stream_put(&s->kept, 0, TOKENS, s->x, err));
    return qc_stream_get(&s->kept, 0, TOKENS, s->work, err);
}

static int sample_hash(sampler *s, qc_err *err)
{
    char hex[QC_SHA256_HEX_BYTES];
    return qc_sha256_buffer((const char *)s->work, N_HASH, hex, err);
}

/* The largest matrix of the layers, and the grid of most. */
static void find_matrix(sampler *s)
{
    const job *j = s->j;
    s->tensor = -1;
    for (int64_t i = 0; i < j->outputs[0].plan.n_items; i++) {
        const qc_convert_item *item = &j->outputs[0].plan.items[i];
        const qc_tensor_info *info = j->src->info(j->src, item->tensor);
        bool in_layers = j->model.places[item->tensor].layer >= 0;
        if (item->action != QC_ACTION_QUANTIZED || qc_tensor_rows(info) * qc_tensor_cols(info) == 0)
            continue;
        if (s->tensor < 0 || (in_layers && qc_tensor_n_elems(info) > s->n_rows * s->n_cols)) {
            s->tensor = item->tensor;
            s->n_rows = qc_tensor_rows(info);
            s->n_cols = qc_tensor_cols(info);
            s->spec = item->spec;
        }
        if (j->model.places[item->tensor].layer > 0)
            break;
    }
}

static int measure_weights(sampler *s, job_samples *ret, qc_err *err)
{
    s->n_rows = qc_min_i64(s->n_rows, qc_max_i64(1, (16 << 20) / s->n_cols));
    QC_TRY(time_sample(s, sample_prepare, &ret->prepare, err));
    ret->prepare /= (double)(s->n_rows * s->n_cols);
    s->be->weight_free(s->be, s->weight);
    s->weight = NULL;
    QC_TRY(time_sample(s, sample_round, &ret->round, err));
    ret->round /= (double)(qc_min_i64(ROWS, s->n_rows) * s->n_cols);
    s->j->src->release(s->j->src, s->tensor, 0, s->n_rows);
    return QC_OK;
}

/* ---- the whole ---- */

static int open_sampler(sampler *s, qc_err *err)
{
    const qc_model_config *c = &s->j->model.config;
    qc_backend *be = s->be;
    qc_rng rng;
    s->most = c->hidden;
    for (int stage = 0; stage < QC_N_STAGES; stage++)
        if (qc_stage_in_any_layer(c, (qc_stage)stage))
            s->most = qc_max_i64(s->most, qc_stage_width(c, (qc_stage)stage));
    s->most = qc_max_i64(qc_min_i64(s->most, WIDEST), ROWS);
    int64_t n = ROWS * s->most;
    s->work_elems = qc_max_i64(qc_max_i64(n, ROWS * s->n_cols), N_HASH / (int64_t)sizeof(float));
    s->x = qc_alloc((size_t)n, sizeof *s->x);
    s->sizes = qc_alloc((size_t)s->most, sizeof *s->sizes);
    s->work = qc_calloc((size_t)s->work_elems, sizeof *s->work);
    if (!s->x || !s->sizes || !s->work)
        return qc_fail_nomem(err, "samples of the work", (unsigned long long)n * 3 * sizeof *s->x);
    qc_rng_seed(&rng, 1);
    for (int64_t i = 0; i < n; i++)
        s->x[i] = (float)qc_rng_normal(&rng);
    for (int64_t i = 0; i < s->most; i++)
        s->sizes[i] = 1 + s->x[i] * s->x[i];
    QC_TRY(qc_code_rows_alloc(&s->spec.grid, ROWS, qc_max_i64(s->most, s->n_cols), &s->rows, err));
    int64_t n_gain = qc_max_i64(qc_max_i64(c->hidden, c->head_dim), 1), n_angles = TOKENS * c->rotary_dim;
    if (!(s->in = be->alloc(be, n, err)) || !(s->out = be->alloc(be, n, err)) ||
        !(s->gain = be->alloc(be, n_gain, err)) || !(s->angles = be->alloc(be, qc_max_i64(n_angles, 1), err)))
        return QC_E_RESOURCE;
    QC_TRY(be->upload(be, s->in, s->x, n, err));
    QC_TRY(fill(be, s->gain, s->sizes, s->most, n_gain, err));
    QC_TRY(fill(be, s->angles, s->sizes, s->most, n_angles, err));
    return qc_stream_open(&s->kept, TOKENS, s->most, true, s->j->recipe->run.scratch, err);
}

static void close_sampler(sampler *s)
{
    qc_backend *be = s->be;
    float *buffers[] = {s->in, s->out, s->gain, s->angles, s->heads};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++)
        if (buffers[i])
            be->free(be, buffers[i]);
    qc_gptq_input_free(s->input);
    be->weight_free(be, s->weight);
    if (s->sums.n)
        qc_hessian_clear(&s->sums);
    qc_code_rows_free(&s->rows);
    qc_stream_close(&s->kept);
    qc_free(s->x);
    qc_free(s->sizes);
    qc_free(s->work);
}

static int take(sampler *s, job_samples *ret, qc_err *err)
{
    QC_TRY(open_sampler(s, err));
    QC_TRY(time_sample(s, sample_hash, &ret->hash, err));
    ret->hash /= N_HASH;
    QC_TRY(measure_weights(s, ret, err));
    if (qc_job_has_calibration(s->j) || s->j->text) {
        QC_TRY(measure_experts(s, ret, err));
        QC_TRY(measure_attention(s, ret, err));
        QC_TRY(time_sample(s, sample_token, &ret->token, err));
        ret->token /= TOKENS;
        QC_TRY(time_sample(s, sample_logit, &ret->logit, err));
        ret->logit /= (double)(TOKENS * qc_min_i64(VOCAB, s->most));
        QC_TRY(time_sample(s, sample_keep, &ret->keep, err));
        ret->keep /= (double)(TOKENS * s->most);
        QC_TRY(measure_stages(s, ret, err));
    }
    return QC_OK;
}

int qc_job_take_samples(const job *j, job_samples *ret, qc_err *err)
{
    const qc_recipe_quantize *q = j->outputs[0].quantize;
    bool sites[QC_N_DENSE_STAGES];
    *ret = (job_samples){0};
    sampler *s = qc_calloc(1, sizeof *s);
    if (!s)
        return qc_fail_nomem(err, "samples of the work", sizeof *s);
    *s = (sampler){.j = j,
                   .be = j->be,
                   .gptq = qc_job_gptq_options(q),
                   .solves = qc_job_rounds_by_gptq(q),
                   .fold = qc_job_fold_options(q, sites),
                   .act_bits = q->activations.bits,
                   .kept.fd = -1};
    s->fold.gptq = s->solves ? &s->gptq : NULL;
    find_matrix(s);
    int rc = s->tensor >= 0 ? take(s, ret, err) : QC_OK;
    close_sampler(s);
    qc_free(s);
    return rc;
}
