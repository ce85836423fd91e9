#include "job_forecast.h"

#include "family.h"
#include "job_calib.h"
#include "job_samples.h"
#include "pipeline.h"
#include "qc_math.h"

/* Weights of the matrices of a stage, of one expert if it is theirs. */
static double stage_weights(const qc_model_config *c, qc_stage stage)
{
    double n = 0;
    for (const qc_slot *s = qc_stage_slots(c->family, stage); *s != QC_N_SLOTS; s++)
        n += (double)qc_dim_elems(c, qc_slot_of(*s)->rows) * (double)qc_dim_elems(c, qc_slot_of(*s)->cols);
    return n;
}

static double stage_rows(const qc_model_config *c, qc_stage stage)
{
    return stage_weights(c, stage) / (double)qc_stage_width(c, stage);
}

static bool of_experts(qc_stage stage)
{
    return stage >= QC_N_DENSE_STAGES;
}

/* Products of a token with the matrices of a stage, once. */
static double product_seconds(const qc_model_config *c, const job_samples *s, qc_stage stage)
{
    const stage_samples *p = &s->stages[stage];
    return stage_weights(c, stage) * (of_experts(stage) ? p->expert * (double)c->n_chosen : p->product);
}

/* Attention of a token of a sequence: half of the keys on average, for scores and for values. */
static double attention_seconds(const qc_model_config *c, const job_samples *s, int layer, int64_t length)
{
    double keys = (double)length / 2;
    if (c->layer_slides[layer] && (double)c->sliding_window < keys)
        keys = (double)c->sliding_window;
    return 2 * keys * (double)qc_dim_elems(c, QC_DIM_Q) * s->attention;
}

/* A token through a layer. */
static double forward_seconds(const qc_model_config *c, const job_samples *s, int layer, int64_t length)
{
    double seconds = s->token + attention_seconds(c, s, layer, length);
    for (int stage = 0; stage < QC_N_STAGES; stage++)
        if (qc_stage_present(c, layer, (qc_stage)stage))
            seconds += product_seconds(c, s, (qc_stage)stage);
    if (c->layer_sparse[layer])
        seconds += (double)(c->n_experts * c->hidden) * s->stages[QC_STAGE_QKV].product;
    return seconds;
}

static double layer_weights(const qc_model_config *c, int layer)
{
    double n = 0;
    for (int stage = 0; stage < QC_N_STAGES; stage++)
        if (qc_stage_present(c, layer, (qc_stage)stage))
            n += stage_weights(c, (qc_stage)stage) * (double)qc_stage_experts(c, (qc_stage)stage);
    return n;
}

/* A pass of the whole model with its head; `sides` models are scored together. */
static double model_seconds(const job *j, const job_samples *s, int64_t n_windows, int64_t length, int sides)
{
    const qc_model_config *c = &j->model.config;
    double tokens = (double)(n_windows * length), seconds = 0;
    for (int layer = 0; layer < c->n_layers; layer++)
        seconds += layer_weights(c, layer) * s->prepare + tokens * forward_seconds(c, s, layer, length);
    seconds += (double)(c->vocab * c->hidden) * (s->prepare + tokens * s->stages[QC_STAGE_QKV].product);
    return sides * seconds + tokens * (double)c->vocab * s->logit * (sides == 2 ? 1 : 0.5);
}

/* Corrected targets: the 16-bit stream against the quantized one. */
static double correction_seconds(const qc_model_config *c, const job_samples *s, double tokens,
                                 qc_stage stage)
{
    const stage_samples *p = &s->stages[stage];
    double n = (double)qc_stage_width(c, stage), rows = stage_rows(c, stage);
    bool lack = (stage == QC_STAGE_O || stage == QC_STAGE_DOWN) && qc_stage_adds_product(c, stage);
    if (lack)
        return tokens * (product_seconds(c, s, stage) + n * (double)c->hidden * p->gram) +
               rows * p->correct_row;
    double matrices = 0;
    for (const qc_slot *slot = qc_stage_slots(c->family, stage); *slot != QC_N_SLOTS; slot++)
        matrices++;
    return tokens * n * n * p->gram + matrices * p->correct + rows * (p->correct_row + n * n * p->product);
}

/* Statistics and solve of the matrices that share one input, behind the pass of its tokens. */
static double solve_seconds(const qc_model_config *c, const job_samples *s, double tokens, qc_stage stage)
{
    const stage_samples *p = &s->stages[stage];
    double n = (double)qc_stage_width(c, stage);
    return tokens * n * n / 2 * p->gram + p->sums + p->factor + stage_rows(c, stage) * p->row +
           stage_weights(c, stage) * s->prepare;
}

/* Each expert's inputs are gathered twice: for down's statistics its gate and up are run, and again for its
 * output. A sample of all tokens runs through the experts that get too few, as in the pipeline. */
static double experts_seconds(const job *j, const job_samples *s)
{
    const qc_model_config *c = &j->model.config;
    int64_t all = j->corpus.n_windows * j->corpus.length, sample = qc_min_i64(all, QC_EXPERT_SAMPLE_TOKENS);
    double share = (double)(all * c->n_chosen) / (double)c->n_experts,
           tokens = j->recipe->calibration.experts == 1 ? (double)all : share, seconds = 0;
    for (int i = QC_N_DENSE_STAGES; i < QC_N_STAGES; i++) {
        qc_stage stage = (qc_stage)i;
        double n = (double)qc_stage_width(c, stage);
        const stage_samples *p = &s->stages[stage];
        seconds += solve_seconds(c, s, tokens, stage);
        if (tokens < n && tokens < (double)all && stage == QC_STAGE_EXPERT_DOWN)
            seconds += p->sums + (double)sample *
                                     (n * n / 2 * p->gram + stage_weights(c, QC_STAGE_EXPERT_GATE_UP) *
                                                                s->stages[QC_STAGE_EXPERT_GATE_UP].product);
    }
    seconds += tokens * stage_weights(c, QC_STAGE_EXPERT_GATE_UP) * s->stages[QC_STAGE_EXPERT_GATE_UP].expert;
    return seconds * (double)c->n_experts;
}

static double stage_seconds(const job *j, const output *o, const job_samples *s, double tokens,
                            qc_stage stage)
{
    const qc_model_config *c = &j->model.config;
    const qc_recipe_quantize *q = o->quantize;
    bool correct = qc_job_correction(q) > 0;
    double seconds = solve_seconds(c, s, tokens, stage);
    if (correct)
        seconds += correction_seconds(c, s, tokens, stage);
    if ((stage == QC_STAGE_O || stage == QC_STAGE_DOWN) && qc_pipeline_keeps_in_file(c, &j->corpus))
        seconds += tokens * (double)qc_stage_width(c, stage) * s->keep;
    return seconds;
}

/* Scales are chosen after a pass over some of the windows. */
static double fold_seconds(const job *j, const output *o, const job_samples *s, int layer)
{
    const qc_model_config *c = &j->model.config;
    bool sites[QC_N_DENSE_STAGES];
    double seconds = 0, tokens = (double)qc_pipeline_fold_tokens(&j->corpus);
    if (qc_job_fold_options(o->quantize, sites).method == QC_FOLD_NONE)
        return 0;
    for (int i = 0; i < QC_N_DENSE_STAGES; i++) {
        qc_stage stage = (qc_stage)i;
        const stage_samples *p = &s->stages[i];
        double n = (double)qc_stage_width(c, stage);
        if (sites[i] && qc_stage_present(c, layer, stage))
            seconds += p->fold + stage_rows(c, stage) * p->fold_row + p->sums + tokens * n * n / 2 * p->gram;
    }
    return seconds + tokens * forward_seconds(c, s, layer, j->corpus.length);
}

static double layer_seconds(const job *j, const output *o, const job_samples *s, int layer)
{
    const qc_model_config *c = &j->model.config;
    const qc_recipe_quantize *q = o->quantize;
    int streams = qc_job_correction(q) > 0 ? 2 : 1;
    double tokens = (double)(j->corpus.n_windows * j->corpus.length), forward = 0;
    if (!j->given)
        forward = streams * (layer_weights(c, layer) * s->prepare +
                             tokens * forward_seconds(c, s, layer, j->corpus.length)) +
                  fold_seconds(j, o, s, layer);
    for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++)
        if (qc_stage_present(c, layer, (qc_stage)stage))
            forward += stage_seconds(j, o, s, tokens, (qc_stage)stage);
    return forward + (c->layer_sparse[layer] ? experts_seconds(j, s) : 0);
}

static void add_output(const job *j, const output *o, const job_samples *s, job_forecast *f)
{
    for (int layer = 0; o->journal_path && layer < j->model.config.n_layers; layer++)
        f->calibrate += layer_seconds(j, o, s, layer);
    for (int64_t i = 0; i < o->plan.n_items; i++) {
        const qc_convert_item *item = &o->plan.items[i];
        if (item->action == QC_ACTION_QUANTIZED)
            f->convert += s->round * (double)qc_tensor_n_elems(j->src->info(j->src, item->tensor));
    }
    f->hash += s->hash * (double)o->plan.bytes_out;
    if (j->text)
        f->verify += model_seconds(j, s, j->windows.n_windows, j->windows.length, 2);
}

int qc_job_forecast(const job *j, job_forecast *ret, qc_err *err)
{
    job_samples s;
    *ret = (job_forecast){0};
    QC_TRY(qc_job_take_samples(j, &s, err));
    for (int i = 0; i < j->n_outputs; i++)
        add_output(j, &j->outputs[i], &s, ret);
    ret->layer = ret->calibrate / (double)j->model.config.n_layers;
    ret->hash += s.hash * (double)j->outputs[0].plan.bytes_in;
    if (j->corpus.n_windows) /* the model's own perplexity */
        ret->calibrate += model_seconds(j, &s, qc_corpus_perplexity_windows(&j->corpus), j->corpus.length, 1);
    ret->total = ret->hash + ret->calibrate + ret->convert + ret->verify;
    return QC_OK;
}
