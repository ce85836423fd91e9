#include "job_forecast.h"

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

#include <math.h>
#include <string.h>

/* Sizes of the samples: large enough to keep all threads in work, small enough to end in some hundredths of a
 * second; a sample is repeated until it has taken this long. */
enum { SAMPLE_TOKENS = 512, SAMPLE_WIDTH = 1024, SAMPLE_ROWS = 256 };
#define SAMPLE_SECONDS 0.05

/* Seconds of one unit of work. */
typedef struct rates {
    double product;   /* multiplication and addition of `linear` */
    double gram;      /* of `gram` */
    double prepare;   /* weight that is prepared for products */
    double round;     /* weight that is rounded to nearest */
    double factor;    /* cube of a width: an input that is prepared for the solve */
    double solve;     /* rows times square of the width: a matrix that is solved */
    double correct;   /* the same, of corrected targets */
    double fold_site; /* square of a width: inputs whose channel scales are chosen */
    double fold_row;  /* the same, for each row of the matrices that read them */
    double hash;      /* byte */
} rates;

typedef struct sampler {
    qc_backend *be;
    float *x, *y, *h;  /* [tokens, width], [tokens, width], [width, width] */
    qc_weight *weight; /* [width, width] */
    qc_code_rows rows; /* [rows, width] */
    qc_quant_spec spec;
    qc_gptq_options gptq;
    qc_gptq_input *input;
    qc_fold_options fold;
    int64_t fold_rows; /* of the sample of a choice of scales */
    int act_bits;
    float *sizes; /* [width] above 0 */
    char *bytes;  /* as many as x has */
} sampler;

enum { X_ELEMS = SAMPLE_TOKENS * SAMPLE_WIDTH, H_ELEMS = SAMPLE_WIDTH * SAMPLE_WIDTH };

static int fetch_sample(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    const sampler *s = ctx;
    (void)err;
    for (int64_t r = 0; r < n_rows; r++)
        memcpy(dst + r * SAMPLE_WIDTH, s->x + (row0 + r) % SAMPLE_TOKENS * SAMPLE_WIDTH,
               SAMPLE_WIDTH * sizeof *dst);
    return QC_OK;
}

static int sample_product(sampler *s, qc_err *err)
{
    return s->be->linear(s->be, s->y, SAMPLE_WIDTH, s->x, SAMPLE_WIDTH, s->weight, NULL, SAMPLE_TOKENS, false,
                         err);
}

static int sample_gram(sampler *s, qc_err *err)
{
    return s->be->gram(s->be, s->h, s->x, SAMPLE_WIDTH, NULL, 0, SAMPLE_TOKENS, SAMPLE_WIDTH, SAMPLE_WIDTH, 1,
                       err);
}

static int sample_prepare(sampler *s, qc_err *err)
{
    s->be->weight_free(s->be, s->weight);
    s->weight = NULL;
    return s->be->weight_load(s->be, SAMPLE_WIDTH, SAMPLE_WIDTH, fetch_sample, s, &s->weight, err);
}

static int sample_round(sampler *s, qc_err *err)
{
    qc_quant_stats stats = {0};
    return qc_rtn_rows(s->be, s->x, SAMPLE_ROWS, SAMPLE_WIDTH, &s->spec, NULL, &s->rows, &stats, err);
}

static int sample_factor(sampler *s, qc_err *err)
{
    qc_gptq_input_info info;
    qc_gptq_input_free(s->input);
    s->input = NULL;
    return qc_gptq_input_new(s->be, s->h, SAMPLE_WIDTH, &s->gptq, &s->input, &info, err);
}

static int sample_solve(sampler *s, qc_err *err)
{
    qc_quant_stats stats = {0};
    qc_gptq_result result;
    return qc_gptq_matrix(s->input, s->x, SAMPLE_ROWS, &s->spec, &s->rows, &stats, &result, err);
}

static int sample_correct(sampler *s, qc_err *err)
{
    memcpy(s->y, s->x, SAMPLE_ROWS * SAMPLE_WIDTH * sizeof *s->y);
    return qc_gptq_correct_target(s->input, s->h, NULL, 1e-9, s->y, SAMPLE_ROWS, err);
}

static int sample_fold(sampler *s, qc_err *err)
{
    qc_fold_result result;
    qc_fold_site site = {.matrices = {{fetch_sample, s, s->fold_rows, &s->spec}},
                         .n_matrices = 1,
                         .n_cols = SAMPLE_WIDTH,
                         .n_scales = SAMPLE_WIDTH,
                         .h = s->h,
                         .n_tokens = SAMPLE_TOKENS,
                         .sum_abs = s->sizes,
                         .max_abs = s->sizes,
                         .sample = s->x,
                         .n_sample = SAMPLE_TOKENS,
                         .act_bits = s->act_bits};
    return qc_fold_choose(s->be, &site, &s->fold, s->y, NULL, &result, err);
}

static int sample_hash(sampler *s, qc_err *err)
{
    char hex[QC_SHA256_HEX_BYTES];
    return qc_sha256_buffer(s->bytes, X_ELEMS, hex, err);
}

/* *ret = seconds of a unit, of which a sample has n: of the fastest run, which other programs disturbed
 * least. */
static int time_sample(sampler *s, int (*sample)(sampler *, qc_err *), double n, double *ret, qc_err *err)
{
    double start = qc_now_seconds(), now = start, least = INFINITY;
    for (int runs = 0; runs < 2 || now - start < SAMPLE_SECONDS; runs++) {
        double before = now;
        QC_TRY(sample(s, err));
        now = qc_now_seconds();
        least = now - before < least ? now - before : least;
    }
    *ret = least / n;
    return QC_OK;
}

static int sampler_open(sampler *s, qc_err *err)
{
    qc_rng rng;
    qc_rng_seed(&rng, 1);
    int64_t groups = qc_ceil_div(SAMPLE_WIDTH, s->spec.grid.group_elems);
    s->x = qc_alloc(X_ELEMS, sizeof *s->x);
    s->y = qc_alloc(X_ELEMS, sizeof *s->y);
    s->sizes = qc_alloc(SAMPLE_WIDTH, sizeof *s->sizes);
    s->bytes = qc_calloc(X_ELEMS, 1);
    s->rows =
        (qc_code_rows){.n_rows = SAMPLE_ROWS,
                       .codes = qc_alloc(SAMPLE_ROWS * SAMPLE_WIDTH, 1),
                       .scales = qc_alloc((size_t)(SAMPLE_ROWS * groups), sizeof *s->rows.scales),
                       .zeros = s->spec.grid.symmetric ? NULL : qc_alloc((size_t)(SAMPLE_ROWS * groups), 1)};
    if (!s->x || !s->y || !s->sizes || !s->bytes || !s->rows.codes || !s->rows.scales ||
        (!s->rows.zeros && !s->spec.grid.symmetric))
        return qc_fail_nomem(err, "samples of the work", 3 * X_ELEMS * sizeof *s->x);
    for (int64_t i = 0; i < X_ELEMS; i++)
        s->x[i] = (float)qc_rng_normal(&rng);
    for (int64_t i = 0; i < SAMPLE_WIDTH; i++)
        s->sizes[i] = 1 + s->x[i] * s->x[i];
    s->h = qc_backend_zeros(s->be, H_ELEMS, err);
    return s->h ? QC_OK : QC_E_RESOURCE;
}

static void sampler_close(sampler *s)
{
    qc_gptq_input_free(s->input);
    s->be->weight_free(s->be, s->weight);
    if (s->h)
        s->be->free(s->be, s->h);
    qc_free(s->x);
    qc_free(s->y);
    qc_free(s->sizes);
    qc_free(s->bytes);
    qc_free(s->rows.codes);
    qc_free(s->rows.scales);
    qc_free(s->rows.zeros);
}

/* Two sizes tell what belongs to the inputs and what to the rows. */
static int measure_fold(sampler *s, rates *ret, qc_err *err)
{
    const double w = SAMPLE_WIDTH;
    double few, many;
    s->fold_rows = SAMPLE_ROWS;
    QC_TRY(time_sample(s, sample_fold, w * w, &few, err));
    s->fold_rows = 2 * SAMPLE_ROWS;
    QC_TRY(time_sample(s, sample_fold, w * w, &many, err));
    ret->fold_row = many > few ? (many - few) / SAMPLE_ROWS : 0;
    ret->fold_site = many > few ? few - SAMPLE_ROWS * ret->fold_row : few;
    ret->fold_site = ret->fold_site > 0 ? ret->fold_site : 0;
    return QC_OK;
}

static int measure(sampler *s, bool gptq, rates *ret, qc_err *err)
{
    const double w = SAMPLE_WIDTH, t = SAMPLE_TOKENS, r = SAMPLE_ROWS;
    QC_TRY(sampler_open(s, err));
    QC_TRY(time_sample(s, sample_prepare, w * w, &ret->prepare, err));
    QC_TRY(time_sample(s, sample_product, t * w * w, &ret->product, err));
    QC_TRY(time_sample(s, sample_gram, t * w * w / 2, &ret->gram, err));
    QC_TRY(time_sample(s, sample_round, r * w, &ret->round, err));
    QC_TRY(time_sample(s, sample_hash, X_ELEMS, &ret->hash, err));
    QC_TRY(s->be->mirror(s->be, s->h, SAMPLE_WIDTH, err));
    if (s->fold.method != QC_FOLD_NONE)
        QC_TRY(measure_fold(s, ret, err));
    if (!gptq)
        return QC_OK;
    QC_TRY(time_sample(s, sample_factor, w * w * w, &ret->factor, err));
    QC_TRY(time_sample(s, sample_solve, r * w * w, &ret->solve, err));
    return time_sample(s, sample_correct, r * w * w, &ret->correct, err);
}

/* ---- the work ---- */

/* Multiplications of a token with the matrices of a stage: of experts, those that it goes to. */
static double stage_weights(const qc_model_config *c, int layer, qc_stage stage)
{
    double n = 0;
    for (const qc_slot *s = qc_stage_slots(c->family, stage);
         *s != QC_N_SLOTS && qc_stage_present(c, layer, stage); s++)
        n += (double)qc_dim_elems(c, qc_slot_of(*s)->rows) * (double)qc_dim_elems(c, qc_slot_of(*s)->cols) *
             (double)(*s < QC_SLOT_FIRST_IN_EXPERT ? 1 : c->n_chosen);
    return n;
}

static double layer_weights(const qc_model_config *c, int layer)
{
    double n = 0;
    for (int stage = 0; stage < QC_N_STAGES; stage++)
        n += stage_weights(c, layer, (qc_stage)stage);
    return n;
}

/* Multiplications of attention per token of a sequence: scores and values of half the keys on average. */
static double attention_work(const qc_model_config *c, int layer, int64_t length)
{
    double keys = (double)length / 2;
    if (c->layer_slides[layer] && (double)c->sliding_window < keys)
        keys = (double)c->sliding_window;
    return 2 * keys * (double)qc_dim_elems(c, QC_DIM_Q);
}

static double forward_seconds(const qc_model_config *c, const rates *r, int layer, int64_t n_windows,
                              int64_t length)
{
    return r->product * (double)(n_windows * length) *
           (layer_weights(c, layer) + attention_work(c, layer, length));
}

static double model_seconds(const job *j, const rates *r, int64_t n_windows, int64_t length)
{
    const qc_model_config *c = &j->model.config;
    double head = (double)c->vocab * (double)c->hidden, seconds = head * r->prepare;
    for (int layer = 0; layer < c->n_layers; layer++)
        seconds += forward_seconds(c, r, layer, n_windows, length);
    for (int64_t i = 0; i < j->outputs[0].plan.n_items; i++)
        if (j->model.places[j->outputs[0].plan.items[i].tensor].layer >= 0)
            seconds += r->prepare *
                       (double)qc_tensor_n_elems(j->src->info(j->src, j->outputs[0].plan.items[i].tensor));
    return seconds + r->product * (double)(n_windows * length) * head;
}

/* Statistics, solve and forward passes of one stage; the 16-bit stream runs beside where targets are
 * corrected. */
static double stage_seconds(const job *j, const output *o, const rates *r, int layer, qc_stage stage)
{
    const qc_model_config *c = &j->model.config;
    double n = (double)qc_stage_width(c, stage), tokens = (double)(j->corpus.n_windows * j->corpus.length),
           weights = stage_weights(c, layer, stage), seconds = 0;
    bool gptq = qc_job_rounds_by_gptq(o->quantize),
         correct = gptq && o->quantize->gptq.inputs == 0 && o->quantize->gptq.correct > 0,
         ends = stage == QC_STAGE_O || stage == QC_STAGE_DOWN;
    seconds += tokens * n * n / 2 * r->gram;
    if (correct)
        seconds += tokens * n * (ends ? (double)c->hidden * r->gram + weights / n * r->product : n * r->gram);
    if (!gptq)
        return seconds + weights * r->round;
    return seconds + n * n * n * r->factor + weights * n * (r->solve + (correct ? r->correct : 0)) +
           2 * weights * r->prepare;
}

static double layer_seconds(const job *j, const output *o, const rates *r, int layer)
{
    const qc_model_config *c = &j->model.config;
    bool correct =
        qc_job_rounds_by_gptq(o->quantize) && o->quantize->gptq.inputs == 0 && o->quantize->gptq.correct > 0;
    double seconds = (correct ? 2 : 1) * forward_seconds(c, r, layer, j->corpus.n_windows, j->corpus.length);
    bool sites[QC_N_DENSE_STAGES];
    qc_job_fold_options(o->quantize, sites);
    for (int stage = 0; stage < QC_N_STAGES; stage++) {
        double n = (double)qc_stage_width(c, (qc_stage)stage);
        if (!qc_stage_present(c, layer, (qc_stage)stage))
            continue;
        seconds += stage_seconds(j, o, r, layer, (qc_stage)stage);
        if (stage < QC_N_DENSE_STAGES && sites[stage])
            seconds += n * n * r->fold_site + n * stage_weights(c, layer, (qc_stage)stage) * r->fold_row;
    }
    return seconds;
}

static void add_output(const job *j, const output *o, const rates *r, job_forecast *f)
{
    for (int layer = 0; o->journal_path && layer < j->model.config.n_layers; layer++)
        f->calibrate += layer_seconds(j, o, r, layer);
    for (int64_t i = 0; i < o->plan.n_items; i++) {
        const qc_convert_item *item = &o->plan.items[i];
        bool solved = o->calibrated && j->model.places[item->tensor].layer >= 0;
        if (item->action == QC_ACTION_QUANTIZED && !solved)
            f->convert += r->round * (double)qc_tensor_n_elems(j->src->info(j->src, item->tensor));
    }
    f->hash += r->hash * (double)o->plan.bytes_out;
    if (j->text)
        f->verify += 2 * model_seconds(j, r, j->windows.n_windows, j->windows.length);
}

/* The grid of most matrices, for samples. */
static void sample_spec(const job *j, qc_quant_spec *ret)
{
    for (int64_t i = 0; i < j->outputs[0].plan.n_items; i++) {
        const qc_convert_item *item = &j->outputs[0].plan.items[i];
        if (item->action == QC_ACTION_QUANTIZED)
            *ret = item->spec;
        if (item->action == QC_ACTION_QUANTIZED && j->model.places[item->tensor].layer >= 0)
            break;
    }
    ret->grid.group_elems = qc_min_i64(ret->grid.group_elems, SAMPLE_WIDTH);
}

int qc_job_forecast(const job *j, job_forecast *ret, qc_err *err)
{
    const qc_recipe_quantize *q = j->outputs[0].quantize;
    bool sites[QC_N_DENSE_STAGES];
    sampler s = {.be = j->be,
                 .gptq = qc_job_gptq_options(q),
                 .fold = qc_job_fold_options(q, sites),
                 .act_bits = q->activations.bits};
    s.fold.gptq = qc_job_rounds_by_gptq(q) ? &s.gptq : NULL;
    rates r = {0};
    *ret = (job_forecast){0};
    sample_spec(j, &s.spec);
    int rc = s.spec.grid.group_elems ? measure(&s, qc_job_rounds_by_gptq(q), &r, err) : QC_OK;
    sampler_close(&s);
    QC_TRY(rc);
    for (int i = 0; i < j->n_outputs; i++)
        add_output(j, &j->outputs[i], &r, ret);
    ret->layer = ret->calibrate / (double)j->model.config.n_layers;
    ret->hash += r.hash * (double)j->outputs[0].plan.bytes_in;
    if (j->corpus.n_windows)
        ret->calibrate += model_seconds(j, &r, qc_min_i64(j->corpus.n_windows, 4), j->corpus.length);
    ret->total = ret->hash + ret->calibrate + ret->convert + ret->verify;
    return QC_OK;
}
