/* One walk over the layers with many residual streams: the 16-bit model's and, for every unit that lies
 * behind, that of the model in which this unit alone is rounded. So each layer's weights are prepared once
 * (and its matrices exchanged for a moment), and KL divergence at the end is exact. */
#include "sensitivity.h"

#include "hessian.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_math.h"
#include "rtn.h"
#include "stream.h"

#include <math.h>
#include <string.h>

enum {
    SLICE_VOCAB = 2048,
    CURVE_ROWS = 256 /* rows of a matrix, evenly spread, whose errors scale the damage of the other choices */
};

/* A residual stream and the text that it runs over. */
typedef struct flow {
    qc_stream x;
    const qc_sample_text *text;
} flow;

typedef struct probe {
    const qc_model *model;
    qc_backend *be;
    qc_assignment *assignment;
    const qc_sensitivity_options *options;
    bool spill;
    qc_workspace *ws;
    flow statistics;            /* 16-bit model; runs on by halves of a layer */
    flow base;                  /* 16-bit model on the measured text */
    flow *branches;             /* [n_units] on the measured text; opened when the walk comes to the unit */
    float *buffer_x, *buffer_u; /* one window each, backend memory */
    float *host;                /* one window */
    float *column_weight;       /* [widest input], second moments of the stage at hand */
    double work_done, work_all;
} probe;

static int64_t n_tokens(const flow *f)
{
    return f->text->n_windows * f->text->length;
}

static int64_t widest(const qc_model_config *c)
{
    int64_t w = c->hidden;
    for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++)
        w = qc_max_i64(w, qc_stage_width(c, (qc_stage)stage));
    return w;
}

static int step(probe *p, double work, qc_err *err)
{
    p->work_done += work;
    if (p->options->progress && p->work_all > 0)
        p->options->progress(p->options->progress_ctx, fmin(1, p->work_done / p->work_all));
    return qc_check_interrupt(err);
}

/* ---- streams ---- */

static int open_flow(probe *p, flow *f, const qc_sample_text *text, qc_err *err)
{
    f->text = text;
    return qc_stream_open(&f->x, n_tokens(f), p->model->config.hidden, p->spill, p->options->scratch_folder,
                          err);
}

/* Copy of window i in buffer_x. */
static int load_window(probe *p, const flow *f, int64_t window, qc_err *err)
{
    int64_t n = f->text->length;
    return qc_stream_load(&f->x, p->be, window * n, n, p->host, p->buffer_x, err);
}

static int store_window(probe *p, flow *f, int64_t window, qc_err *err)
{
    int64_t n = f->text->length;
    return qc_stream_store(&f->x, p->be, window * n, n, p->host, p->buffer_x, err);
}

/* to = the layer's output for `from` (the same flow is fine). */
static int forward(probe *p, const qc_layer *layer, const flow *from, flow *to, qc_err *err)
{
    for (int64_t i = 0; i < from->text->n_windows; i++) {
        QC_TRY(load_window(p, from, i, err));
        QC_TRY(qc_layer_forward(layer, p->ws, p->buffer_x, from->text->length, err));
        QC_TRY(store_window(p, to, i, err));
    }
    return step(p, (double)n_tokens(from), err);
}

/* ---- rounding ---- */

/* A matrix on a grid for a moment. */
typedef struct rounded {
    int64_t n_rows, n_cols;
    float *w; /* [n_rows, n_cols] 16-bit values, then those of the codes */
    qc_code_rows rows;
} rounded;

static void rounded_free(rounded *r)
{
    qc_free(r->w);
    qc_code_rows_free(&r->rows);
    *r = (rounded){.n_rows = 0};
}

/* Room for every choice: at worst a scale for every 16 columns. */
static int rounded_alloc(rounded *r, int64_t n_rows, int64_t n_cols, qc_err *err)
{
    size_t n = (size_t)(n_rows * n_cols), groups = (size_t)(n_rows * qc_ceil_div(n_cols, 16));
    *r = (rounded){.n_rows = n_rows, .n_cols = n_cols, .w = qc_alloc(n, sizeof *r->w)};
    r->rows = (qc_code_rows){.n_rows = n_rows,
                             .codes = qc_alloc(n, 1),
                             .scales = qc_alloc(groups, sizeof *r->rows.scales),
                             .zeros = qc_alloc(groups, 1)};
    if (r->w && r->rows.codes && r->rows.scales && r->rows.zeros)
        return QC_OK;
    rounded_free(r);
    return qc_fail_nomem(err, "rounded matrix", (unsigned long long)n * 6);
}

static qc_code_rows rows_for(const rounded *r, const qc_quant_spec *spec)
{
    return qc_code_rows_for(&r->rows, &spec->grid);
}

/* Codes of w on a grid; relative squared error in *ret (0 for a matrix of zeros). */
static int round_matrix(probe *p, rounded *r, const qc_quant_spec *spec, const float *column_weight,
                        double *ret, qc_err *err)
{
    qc_quant_stats stats = {0};
    qc_code_rows rows = rows_for(r, spec);
    QC_TRY(qc_rtn_rows(p->be, r->w, r->n_rows, r->n_cols, spec, column_weight, &rows, &stats, err));
    *ret = stats.sq_weight > 0 ? stats.sq_error / stats.sq_weight : 0;
    return QC_OK;
}

static void decode(rounded *r, const qc_quant_spec *spec)
{
    qc_code_rows rows = rows_for(r, spec);
    qc_code_rows_decode(&rows, &spec->grid, r->n_cols, r->w);
}

static int fetch_rounded(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    const rounded *r = ctx;
    (void)err;
    memcpy(dst, r->w + row0 * r->n_cols, (size_t)(n_rows * r->n_cols) * sizeof *dst);
    return QC_OK;
}

typedef struct original {
    const qc_source *src;
    int64_t tensor;
} original;

static int fetch_original(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    const original *o = ctx;
    return o->src->read_rows(o->src, o->tensor, row0, n_rows, dst, err);
}

/* ---- errors of the other choices ---- */

static int read_sample(probe *p, int64_t tensor, int64_t n_all, rounded *r, qc_err *err)
{
    const qc_source *src = p->model->src;
    for (int64_t i = 0; i < r->n_rows; i++)
        QC_TRY(src->read_rows(src, tensor, i * n_all / r->n_rows, 1, r->w + i * r->n_cols, err));
    return QC_OK;
}

/* Add the relative error of matrix number i of the unit to the damage of each choice, which holds the sum
 * over its matrices until it is scaled. */
static int add_curve(probe *p, qc_unit *unit, int i, const float *column_weight, qc_err *err)
{
    const qc_source *src = p->model->src;
    const qc_tensor_info *info = src->info(src, unit->tensors[i]);
    int64_t n_all = qc_tensor_rows(info);
    rounded sample;
    QC_TRY(rounded_alloc(&sample, qc_min_i64(n_all, CURVE_ROWS), qc_tensor_cols(info), err));
    int rc = read_sample(p, unit->tensors[i], n_all, &sample, err);
    for (int c = 0; c < unit->n_choices && rc == QC_OK; c++) {
        if (unit->choices[c].bits == 16)
            continue;
        qc_quant_spec spec = qc_unit_spec(unit, p->model, i, &unit->choices[c]);
        double error;
        if ((rc = round_matrix(p, &sample, &spec, column_weight, &error, err)) == QC_OK)
            unit->choices[c].damage += error;
    }
    rounded_free(&sample);
    return rc < 0 ? qc_err_prefix(err, "%s: tensor %s", src->path, info->name) : QC_OK;
}

/* From sums of relative errors to nats. */
static void scale_curve(qc_unit *unit, double kld)
{
    double reference = unit->choices[unit->reference].damage;
    for (int c = 0; c < unit->n_choices; c++)
        unit->choices[c].damage = reference > 0 ? kld * unit->choices[c].damage / reference : 0;
}

/* ---- units of a layer ---- */

/* Second moments of the stage's inputs in the 16-bit model, and the flow of the statistics over its half. */
static int collect(probe *p, const qc_layer *layer, qc_stage stage, qc_hessian *hs, const float **ret_h,
                   qc_err *err)
{
    flow *f = &p->statistics;
    int64_t width = qc_stage_width(&p->model->config, stage), n = f->text->length;
    bool output = stage == QC_STAGE_O || stage == QC_STAGE_DOWN;
    const float *sum_abs;
    QC_TRY(qc_hessian_init(hs, p->be, width, 0, err));
    for (int64_t i = 0; i < f->text->n_windows; i++) {
        QC_TRY(load_window(p, f, i, err));
        QC_TRY(qc_layer_stage_input(layer, p->ws, stage, p->buffer_x, p->buffer_u, n, err));
        QC_TRY(qc_hessian_add(hs, p->buffer_u, width, n, err));
        if (!output)
            continue;
        QC_TRY(qc_layer_stage_output(layer, p->ws, stage, p->buffer_u, p->buffer_x, n, err));
        QC_TRY(store_window(p, f, i, err));
    }
    QC_TRY(qc_hessian_finish(hs, ret_h, &sum_abs, err));
    for (int64_t j = 0; j < width; j++)
        QC_TRY(p->be->download(p->be, &p->column_weight[j], *ret_h + j * width + j, 1, err));
    return step(p, (double)n_tokens(f) / 2, err);
}

/* Exchange matrix number i of the unit for its rounded form; input NULL: to nearest. */
static int put_rounded(probe *p, qc_layer *layer, const qc_unit *unit, int i, qc_slot slot,
                       qc_gptq_input *input, qc_err *err)
{
    const qc_source *src = p->model->src;
    const qc_tensor_info *info = src->info(src, unit->tensors[i]);
    qc_quant_spec spec = qc_unit_spec(unit, p->model, i, &unit->choices[unit->reference]);
    rounded r;
    qc_gptq_result result;
    qc_quant_stats stats = {0};
    double error;
    QC_TRY(rounded_alloc(&r, qc_tensor_rows(info), qc_tensor_cols(info), err));
    qc_code_rows rows = rows_for(&r, &spec);
    int rc = src->read_rows(src, unit->tensors[i], 0, r.n_rows, r.w, err);
    if (rc == QC_OK && input)
        rc = qc_gptq_matrix(input, r.w, r.n_rows, &spec, &rows, &stats, &result, err);
    else if (rc == QC_OK)
        rc = round_matrix(p, &r, &spec, p->column_weight, &error, err);
    if (rc == QC_OK) {
        decode(&r, &spec);
        rc = qc_layer_set_matrix(layer, slot, 0, fetch_rounded, &r, err);
    }
    rounded_free(&r);
    return rc < 0 ? qc_err_prefix(err, "%s: tensor %s", src->path, info->name) : QC_OK;
}

static qc_slot slot_of(const probe *p, const qc_unit *unit, int i)
{
    const qc_slot *s = qc_stage_slots(p->model->config.family, unit->stage);
    while (qc_model_tensor(p->model, unit->layer, *s) != unit->tensors[i])
        s++;
    return *s;
}

/* Put the unit's matrices in their rounded form; add_curve has looked at all values before. */
static int round_unit(probe *p, qc_layer *layer, qc_unit *unit, const float *h, qc_err *err)
{
    qc_gptq_input *input = NULL;
    qc_gptq_input_info info;
    for (int i = 0; i < unit->n_tensors; i++)
        QC_TRY(add_curve(p, unit, i, p->column_weight, err));
    if (p->options->gptq)
        QC_TRY(qc_gptq_input_new(p->be, h, qc_stage_width(&p->model->config, unit->stage), p->options->gptq,
                                 &input, &info, err));
    int rc = QC_OK;
    for (int i = 0; i < unit->n_tensors && rc == QC_OK; i++)
        rc = put_rounded(p, layer, unit, i, slot_of(p, unit, i), input, err);
    qc_gptq_input_free(input);
    return rc;
}

static int restore_unit(probe *p, qc_layer *layer, const qc_unit *unit, qc_err *err)
{
    for (int i = 0; i < unit->n_tensors; i++) {
        original o = {p->model->src, unit->tensors[i]};
        QC_TRY(qc_layer_set_matrix(layer, slot_of(p, unit, i), 0, fetch_original, &o, err));
    }
    return QC_OK;
}

static int run_stage(probe *p, qc_layer *layer, int index, qc_stage stage, qc_err *err)
{
    qc_hessian hs = {.n = 0};
    const float *h;
    int rc = collect(p, layer, stage, &hs, &h, err);
    for (int u = 0; u < p->assignment->n_units && rc == QC_OK; u++) {
        qc_unit *unit = &p->assignment->units[u];
        if (unit->layer != index || unit->stage != stage)
            continue;
        if ((rc = round_unit(p, layer, unit, h, err)) == QC_OK &&
            (rc = open_flow(p, &p->branches[u], p->base.text, err)) == QC_OK &&
            (rc = forward(p, layer, &p->base, &p->branches[u], err)) == QC_OK)
            rc = restore_unit(p, layer, unit, err);
    }
    qc_hessian_clear(&hs);
    return rc;
}

static int run_layer(probe *p, int index, qc_err *err)
{
    qc_layer *layer = NULL;
    QC_TRY(qc_layer_load(p->model, p->be, index, &layer, err));
    int rc = QC_OK;
    for (int u = 0; u < p->assignment->n_units && rc == QC_OK; u++)
        if (p->branches[u].text)
            rc = forward(p, layer, &p->branches[u], &p->branches[u], err);
    for (int stage = 0; stage < QC_N_DENSE_STAGES && rc == QC_OK; stage++)
        rc = run_stage(p, layer, index, (qc_stage)stage, err);
    if (rc == QC_OK)
        rc = forward(p, layer, &p->base, &p->base, err);
    qc_layer_free(layer);
    return rc;
}

/* ---- embedding ---- */

/* Embeddings of the flow's text; spec: of a rounded table. */
static int embed(probe *p, flow *f, const qc_quant_spec *spec, qc_err *err)
{
    int64_t n = f->text->length;
    rounded r;
    double error;
    QC_TRY(rounded_alloc(&r, n, p->model->config.hidden, err));
    int rc = QC_OK;
    for (int64_t i = 0; i < f->text->n_windows && rc == QC_OK; i++) {
        if ((rc = qc_model_embed(p->model, f->text->ids + i * n, n, r.w, err)) < 0)
            break;
        if (spec && (rc = round_matrix(p, &r, spec, NULL, &error, err)) == QC_OK)
            decode(&r, spec);
        if (rc == QC_OK)
            rc = qc_stream_put(&f->x, i * n, n, r.w, err);
    }
    rounded_free(&r);
    return rc;
}

static int embed_all(probe *p, int table, qc_err *err)
{
    QC_TRY(embed(p, &p->statistics, NULL, err));
    QC_TRY(embed(p, &p->base, NULL, err));
    if (table < 0)
        return QC_OK;
    const qc_unit *unit = &p->assignment->units[table];
    qc_quant_spec spec = qc_unit_spec(unit, p->model, 0, &unit->choices[unit->reference]);
    QC_TRY(open_flow(p, &p->branches[table], p->base.text, err));
    return embed(p, &p->branches[table], &spec, err);
}

/* ---- head and divergence ---- */

typedef struct head_job {
    probe *p;
    int head_unit;    /* whose head is rounded, -1: none */
    qc_score *scores; /* [n_units, n_tokens] */
    int32_t *targets; /* [n_tokens], none */
    float *a, *b;     /* logits [length, SLICE_VOCAB], backend memory */
    rounded slice;    /* rows of the rounded head */
} head_job;

static int load_rounded_slice(head_job *h, int64_t row0, int64_t n, qc_weight **ret, qc_err *err)
{
    probe *p = h->p;
    const qc_unit *unit = &p->assignment->units[h->head_unit];
    qc_quant_spec spec = qc_unit_spec(unit, p->model, 0, &unit->choices[unit->reference]);
    double error;
    h->slice.n_rows = h->slice.rows.n_rows = n;
    QC_TRY(p->model->src->read_rows(p->model->src, unit->tensors[0], row0, n, h->slice.w, err));
    QC_TRY(round_matrix(p, &h->slice, &spec, NULL, &error, err));
    decode(&h->slice, &spec);
    return p->be->weight_load(p->be, n, h->slice.n_cols, fetch_rounded, &h->slice, ret, err);
}

static int score_window(head_job *h, int64_t window, int64_t vocab0, int64_t n, const qc_weight *head,
                        const qc_weight *rounded_head, qc_err *err)
{
    probe *p = h->p;
    qc_backend *be = p->be;
    int64_t hidden = p->model->config.hidden, length = p->base.text->length, at = window * length;
    QC_TRY(load_window(p, &p->base, window, err));
    QC_TRY(be->linear(be, h->a, SLICE_VOCAB, p->buffer_x, hidden, head, NULL, length, false, err));
    for (int u = 0; u < p->assignment->n_units; u++) {
        QC_TRY(load_window(p, p->branches[u].text ? &p->branches[u] : &p->base, window, err));
        QC_TRY(be->linear(be, h->b, SLICE_VOCAB, p->buffer_x, hidden, u == h->head_unit ? rounded_head : head,
                          NULL, length, false, err));
        QC_TRY(be->score(be, h->scores + u * n_tokens(&p->base) + at, h->a, h->b, SLICE_VOCAB,
                         h->targets + at, length, vocab0, n, p->model->config.final_softcap, err));
    }
    return QC_OK;
}

/* Per entry of the vocabulary, in units of a token's way through a layer. */
static double head_work(const probe *p)
{
    const qc_model_config *c = &p->model->config;
    double layer = 0;
    for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++)
        layer += (double)qc_stage_width(c, (qc_stage)stage) * (double)c->hidden;
    return (double)p->assignment->n_units * (double)n_tokens(&p->base) * (double)c->hidden / (1.5 * layer);
}

static int score_slice(head_job *h, int64_t vocab0, int64_t n, qc_err *err)
{
    probe *p = h->p;
    qc_weight *head = NULL, *rounded_head = NULL;
    int rc = qc_model_head_slice(p->model, p->be, vocab0, n, &head, err);
    if (rc == QC_OK && h->head_unit >= 0)
        rc = load_rounded_slice(h, vocab0, n, &rounded_head, err);
    for (int64_t i = 0; i < p->base.text->n_windows && rc == QC_OK; i++)
        rc = score_window(h, i, vocab0, n, head, rounded_head, err);
    p->be->weight_free(p->be, head);
    p->be->weight_free(p->be, rounded_head);
    return rc == QC_OK ? step(p, head_work(p) * (double)n, err) : rc;
}

static int norm_flow(probe *p, flow *f, qc_err *err)
{
    for (int64_t i = 0; i < f->text->n_windows; i++) {
        QC_TRY(load_window(p, f, i, err));
        QC_TRY(qc_model_final_norm(p->model, p->be, p->buffer_x, p->buffer_x, f->text->length, err));
        QC_TRY(store_window(p, f, i, err));
    }
    return QC_OK;
}

static int finish_units(head_job *h, qc_err *err)
{
    probe *p = h->p;
    for (int u = 0; u < p->assignment->n_units; u++) {
        double sum = 0, nll_a, nll_b, kld;
        for (int64_t t = 0; t < n_tokens(&p->base); t++) {
            qc_score_finish(&h->scores[u * n_tokens(&p->base) + t], &nll_a, &nll_b, &kld);
            sum += fmax(0, kld);
        }
        if (!isfinite(sum))
            return qc_fail(err, QC_E_INPUT,
                           "%s: logits are not finite on the calibration text with one part of the model "
                           "rounded",
                           p->model->src->path);
        scale_curve(&p->assignment->units[u], sum / (double)n_tokens(&p->base));
    }
    return QC_OK;
}

static int alloc_head(head_job *h, qc_err *err)
{
    probe *p = h->p;
    size_t n = (size_t)(n_tokens(&p->base) * p->assignment->n_units);
    h->scores = qc_alloc(n, sizeof *h->scores);
    h->targets = qc_alloc((size_t)n_tokens(&p->base), sizeof *h->targets);
    if (!h->scores || !h->targets)
        return qc_fail_nomem(err, "scores", n * sizeof *h->scores);
    for (size_t i = 0; i < n; i++)
        h->scores[i] = qc_score_start();
    for (int64_t i = 0; i < n_tokens(&p->base); i++)
        h->targets[i] = -1;
    if (!(h->a = p->be->alloc(p->be, p->base.text->length * SLICE_VOCAB, err)) ||
        !(h->b = p->be->alloc(p->be, p->base.text->length * SLICE_VOCAB, err)))
        return QC_E_RESOURCE;
    return rounded_alloc(&h->slice, SLICE_VOCAB, p->model->config.hidden, err);
}

static int run_head(probe *p, int head_unit, qc_err *err)
{
    head_job h = {.p = p, .head_unit = head_unit};
    int64_t vocab = p->model->config.vocab;
    int rc = alloc_head(&h, err);
    if (rc == QC_OK)
        rc = norm_flow(p, &p->base, err);
    for (int u = 0; u < p->assignment->n_units && rc == QC_OK; u++)
        if (p->branches[u].text)
            rc = norm_flow(p, &p->branches[u], err);
    for (int64_t v = 0; v < vocab && rc == QC_OK; v += SLICE_VOCAB)
        rc = score_slice(&h, v, qc_min_i64(SLICE_VOCAB, vocab - v), err);
    if (rc == QC_OK)
        rc = finish_units(&h, err);
    qc_free(h.scores);
    qc_free(h.targets);
    rounded_free(&h.slice);
    if (h.a)
        p->be->free(p->be, h.a);
    if (h.b)
        p->be->free(p->be, h.b);
    return rc;
}

/* ---- the whole ---- */

void qc_sensitivity_plan_bytes(const qc_model_config *config, const qc_backend *be, int64_t n_units,
                               const qc_sample_text *statistics, const qc_sample_text *measured,
                               uint64_t *ret_full, uint64_t *ret_least)
{
    int64_t length = qc_max_i64(statistics->length, measured->length), wide = widest(config);
    uint64_t n_measured = (uint64_t)(measured->n_windows * measured->length),
             n_statistics = (uint64_t)(statistics->n_windows * statistics->length);
    uint64_t head = 2ull * SLICE_VOCAB * ((uint64_t)measured->length + 3 * (uint64_t)config->hidden) * 4 +
                    n_measured * (uint64_t)n_units * sizeof(qc_score);
    /* a matrix, its codes and the solver's copies of rows; H, its factor and the sum of a block */
    uint64_t matrix =
        (uint64_t)(wide * qc_max_i64(config->hidden, config->ffn)) * 6 + 1024ull * 5 * 4 * (uint64_t)wide;
    uint64_t h = (uint64_t)(wide * wide) * 4 + qc_hessian_bytes(wide, (int64_t)n_statistics);
    uint64_t layer = qc_layer_bytes(config, be->compute) + matrix + h,
             forward = qc_forward_scratch_bytes(config, be->compute, be->n_threads, length),
             gram = qc_gram_scratch_bytes(be->compute, be->n_threads, length, wide, wide),
             round =
                 qc_round_scratch_bytes(be->n_threads, qc_max_i64(config->hidden, config->ffn), wide, wide),
             scratch = qc_max_u64(forward, qc_max_u64(gram, round));
    *ret_least = scratch + qc_workspace_bytes(config, length) + 3 * (uint64_t)(length * wide) * 4 +
                 qc_max_u64(head, layer);
    *ret_full =
        *ret_least + (n_statistics + n_measured * (uint64_t)(n_units + 1)) * (uint64_t)config->hidden * 4;
}

static int check_memory(probe *p, const qc_sample_text *statistics, const qc_sample_text *measured,
                        qc_err *err)
{
    uint64_t full, least, cap = p->options->memory_bytes;
    qc_sensitivity_plan_bytes(&p->model->config, p->be, p->assignment->n_units, statistics, measured, &full,
                              &least);
    if (cap && least > cap)
        return qc_fail(err, QC_E_RESOURCE,
                       "measuring for the bit budget needs at least %llu MB, the memory cap is %llu MB",
                       (unsigned long long)(least / 1000000 + 1), (unsigned long long)(cap / 1000000));
    p->spill = cap && full > cap;
    return QC_OK;
}

static int open_probe(probe *p, const qc_sample_text *statistics, const qc_sample_text *measured, qc_err *err)
{
    const qc_model_config *c = &p->model->config;
    int n_units = p->assignment->n_units;
    int64_t length = qc_max_i64(statistics->length, measured->length), window = length * widest(c);
    QC_TRY(check_memory(p, statistics, measured, err));
    if (!(p->branches = qc_calloc((size_t)n_units + 1, sizeof *p->branches)))
        return qc_fail_nomem(err, "streams", (unsigned long long)n_units * sizeof *p->branches);
    for (int u = 0; u < n_units; u++)
        p->branches[u].x.fd = -1;
    QC_TRY(open_flow(p, &p->statistics, statistics, err));
    QC_TRY(open_flow(p, &p->base, measured, err));
    QC_TRY(qc_workspace_new(p->model, p->be, length, &p->ws, err));
    if (!(p->buffer_x = p->be->alloc(p->be, window, err)) ||
        !(p->buffer_u = p->be->alloc(p->be, window, err)))
        return QC_E_RESOURCE;
    p->host = qc_alloc((size_t)window, sizeof *p->host);
    p->column_weight = qc_alloc((size_t)widest(c), sizeof *p->column_weight);
    if (!p->host || !p->column_weight)
        return qc_fail_nomem(err, "windows", (unsigned long long)window * sizeof *p->host);
    p->work_all = (double)c->n_layers *
                      (2 * (double)n_tokens(&p->statistics) + (double)n_tokens(&p->base) * n_units / 2) +
                  head_work(p) * (double)c->vocab;
    return QC_OK;
}

static void close_probe(probe *p)
{
    for (int u = 0; p->branches && u < p->assignment->n_units; u++)
        qc_stream_close(&p->branches[u].x);
    qc_free(p->branches);
    qc_stream_close(&p->statistics.x);
    qc_stream_close(&p->base.x);
    qc_workspace_free(p->ws);
    if (p->buffer_x)
        p->be->free(p->be, p->buffer_x);
    if (p->buffer_u)
        p->be->free(p->be, p->buffer_u);
    qc_free(p->host);
    qc_free(p->column_weight);
}

static int run(probe *p, qc_err *err)
{
    int table = -1, head = -1;
    for (int u = 0; u < p->assignment->n_units; u++) {
        qc_unit *unit = &p->assignment->units[u];
        for (int c = 0; c < unit->n_choices; c++)
            unit->choices[c].damage = 0;
        table = unit->embedding ? u : table;
        head = unit->head ? u : head;
    }
    QC_TRY(embed_all(p, table, err));
    for (int layer = 0; layer < p->model->config.n_layers; layer++)
        QC_TRY(run_layer(p, layer, err));
    if (table >= 0)
        QC_TRY(add_curve(p, &p->assignment->units[table], 0, NULL, err));
    if (head >= 0 && head != table)
        QC_TRY(add_curve(p, &p->assignment->units[head], 0, NULL, err));
    return run_head(p, head, err);
}

int qc_sensitivity_measure(const qc_model *model, qc_backend *be, const qc_sample_text *statistics,
                           const qc_sample_text *measured, qc_assignment *assignment,
                           const qc_sensitivity_options *options, qc_err *err)
{
    probe p = {.model = model,
               .be = be,
               .assignment = assignment,
               .options = options,
               .statistics.x.fd = -1,
               .base.x.fd = -1};
    int rc = open_probe(&p, statistics, measured, err);
    if (rc == QC_OK)
        rc = run(&p, err);
    close_probe(&p);
    return rc;
}
