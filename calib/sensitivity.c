/* One walk over the layers with many residual streams: the 16-bit model's and, for every unit that lies
 * behind, that of the model in which this unit alone is rounded. So each layer's weights are prepared once
 * (and its matrices exchanged for a moment), and KL divergence at the end is exact. */
#include "sensitivity.h"

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

typedef struct probe {
    const qc_model *model;
    qc_backend *be;
    const int32_t *ids;
    int64_t n_windows, length;
    qc_assignment *assignment;
    const qc_sensitivity_options *options;
    bool spill;
    qc_workspace *ws;
    qc_stream base;
    qc_stream *branches;        /* [n_units]; opened when the walk comes to the unit */
    float *buffer_x, *buffer_u; /* one window each, backend memory */
    float *host;                /* one window */
    float *column_weight;       /* [widest input], mean x^2 of the stage at hand */
    double work_done, work_all;
} probe;

static int64_t n_tokens(const probe *p)
{
    return p->n_windows * p->length;
}

static int64_t widest(const qc_model_config *c)
{
    int64_t w = c->hidden;
    for (int stage = 0; stage < QC_N_STAGES; stage++)
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

static int open_branch(probe *p, int unit, qc_err *err)
{
    return qc_stream_open(&p->branches[unit], n_tokens(p), p->model->config.hidden, p->spill,
                          p->options->scratch_folder, err);
}

/* Copy of window i in buffer_x. */
static int load_window(probe *p, const qc_stream *s, int64_t window, qc_err *err)
{
    QC_TRY(qc_stream_get(s, window * p->length, p->length, p->host, err));
    return p->be->upload(p->be, p->buffer_x, p->host, p->length * s->hidden, err);
}

static int store_window(probe *p, qc_stream *s, int64_t window, qc_err *err)
{
    QC_TRY(p->be->download(p->be, p->host, p->buffer_x, p->length * s->hidden, err));
    return qc_stream_put(s, window * p->length, p->length, p->host, err);
}

/* to = the layer's output for `from` (the same stream is fine). */
static int forward(probe *p, const qc_layer *layer, const qc_stream *from, qc_stream *to, qc_err *err)
{
    for (int64_t i = 0; i < p->n_windows; i++) {
        QC_TRY(load_window(p, from, i, err));
        QC_TRY(qc_layer_forward(layer, p->ws, p->buffer_x, p->length, err));
        QC_TRY(store_window(p, to, i, err));
    }
    return step(p, 1, err);
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
    qc_free(r->rows.codes);
    qc_free(r->rows.scales);
    qc_free(r->rows.zeros);
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

/* Codes of w on a grid; relative squared error in *ret (0 for a matrix of zeros). */
static int round_matrix(probe *p, rounded *r, const qc_quant_spec *spec, const float *column_weight,
                        double *ret, qc_err *err)
{
    qc_quant_stats stats = {0};
    qc_code_rows rows = r->rows;
    rows.zeros = spec->grid.symmetric ? NULL : rows.zeros;
    QC_TRY(qc_rtn_rows(p->be, r->w, r->n_rows, r->n_cols, spec, column_weight, &rows, &stats, err));
    *ret = stats.sq_weight > 0 ? stats.sq_error / stats.sq_weight : 0;
    return QC_OK;
}

static void decode(rounded *r, const qc_quant_spec *spec)
{
    qc_code_rows rows = r->rows;
    rows.zeros = spec->grid.symmetric ? NULL : rows.zeros;
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

/* column_weight = mean square of the stage's inputs in the 16-bit model. */
static int weigh_columns(probe *p, const qc_layer *layer, qc_stage stage, qc_err *err)
{
    int64_t width = qc_stage_width(&p->model->config, stage);
    double *sums = qc_calloc((size_t)width, sizeof *sums);
    if (!sums)
        return qc_fail_nomem(err, "column weights", (unsigned long long)width * sizeof *sums);
    int rc = QC_OK;
    for (int64_t i = 0; i < p->n_windows && rc == QC_OK; i++) {
        if ((rc = load_window(p, &p->base, i, err)) < 0 ||
            (rc = qc_layer_stage_input(layer, p->ws, stage, p->buffer_x, p->buffer_u, p->length, err)) < 0 ||
            (rc = p->be->download(p->be, p->host, p->buffer_u, p->length * width, err)) < 0)
            break;
        for (int64_t t = 0; t < p->length; t++)
            for (int64_t j = 0; j < width; j++)
                sums[j] += (double)p->host[t * width + j] * (double)p->host[t * width + j];
    }
    for (int64_t j = 0; j < width; j++)
        p->column_weight[j] = (float)(sums[j] / (double)n_tokens(p));
    qc_free(sums);
    return rc;
}

/* Exchange matrix number i of the unit for its rounded form. */
static int put_rounded(probe *p, qc_layer *layer, const qc_unit *unit, int i, qc_slot slot, qc_err *err)
{
    const qc_source *src = p->model->src;
    const qc_tensor_info *info = src->info(src, unit->tensors[i]);
    qc_quant_spec spec = qc_unit_spec(unit, p->model, i, &unit->choices[unit->reference]);
    rounded r;
    double error;
    QC_TRY(rounded_alloc(&r, qc_tensor_rows(info), qc_tensor_cols(info), err));
    int rc = src->read_rows(src, unit->tensors[i], 0, r.n_rows, r.w, err);
    if (rc == QC_OK && (rc = round_matrix(p, &r, &spec, p->column_weight, &error, err)) == QC_OK) {
        decode(&r, &spec);
        rc = qc_layer_set_matrix(layer, slot, fetch_rounded, &r, err);
    }
    rounded_free(&r);
    return rc < 0 ? qc_err_prefix(err, "%s: tensor %s", src->path, info->name) : QC_OK;
}

static qc_slot slot_of(const probe *p, const qc_unit *unit, int i)
{
    const qc_slot *s = qc_stage_slots(unit->stage);
    while (qc_model_tensor(p->model, unit->layer, *s) != unit->tensors[i])
        s++;
    return *s;
}

static int start_unit(probe *p, qc_layer *layer, int u, qc_err *err)
{
    qc_unit *unit = &p->assignment->units[u];
    QC_TRY(weigh_columns(p, layer, unit->stage, err));
    for (int i = 0; i < unit->n_tensors; i++) {
        QC_TRY(add_curve(p, unit, i, p->column_weight, err));
        QC_TRY(put_rounded(p, layer, unit, i, slot_of(p, unit, i), err));
    }
    QC_TRY(open_branch(p, u, err));
    QC_TRY(forward(p, layer, &p->base, &p->branches[u], err));
    for (int i = 0; i < unit->n_tensors; i++) {
        original o = {p->model->src, unit->tensors[i]};
        QC_TRY(qc_layer_set_matrix(layer, slot_of(p, unit, i), fetch_original, &o, err));
    }
    return QC_OK;
}

static int run_layer(probe *p, int index, qc_err *err)
{
    qc_layer *layer = NULL;
    QC_TRY(qc_layer_load(p->model, p->be, index, &layer, err));
    int rc = QC_OK;
    for (int u = 0; u < p->assignment->n_units && rc == QC_OK; u++)
        if (p->branches[u].n_tokens)
            rc = forward(p, layer, &p->branches[u], &p->branches[u], err);
    for (int u = 0; u < p->assignment->n_units && rc == QC_OK; u++)
        if (p->assignment->units[u].layer == index)
            rc = start_unit(p, layer, u, err);
    if (rc == QC_OK)
        rc = forward(p, layer, &p->base, &p->base, err);
    qc_layer_free(layer);
    return rc;
}

/* ---- embedding ---- */

/* Streams of the 16-bit model and, if u >= 0, of the one with a rounded table. */
static int embed(probe *p, int u, qc_err *err)
{
    int64_t hidden = p->model->config.hidden;
    rounded r;
    qc_quant_spec spec = {.search = QC_SEARCH_MINMAX};
    if (u >= 0) {
        const qc_unit *unit = &p->assignment->units[u];
        spec = qc_unit_spec(unit, p->model, 0, &unit->choices[unit->reference]);
        QC_TRY(open_branch(p, u, err));
    }
    QC_TRY(rounded_alloc(&r, p->length, hidden, err));
    int rc = QC_OK;
    double error;
    for (int64_t i = 0; i < p->n_windows && rc == QC_OK; i++) {
        int64_t at = i * p->length;
        if ((rc = qc_model_embed(p->model, p->ids + at, p->length, r.w, err)) < 0 ||
            (rc = qc_stream_put(&p->base, at, p->length, r.w, err)) < 0 || u < 0)
            continue;
        if ((rc = round_matrix(p, &r, &spec, NULL, &error, err)) == QC_OK) {
            decode(&r, &spec);
            rc = qc_stream_put(&p->branches[u], at, p->length, r.w, err);
        }
    }
    rounded_free(&r);
    return rc;
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
    int64_t hidden = p->model->config.hidden, at = window * p->length;
    QC_TRY(load_window(p, &p->base, window, err));
    QC_TRY(be->linear(be, h->a, SLICE_VOCAB, p->buffer_x, hidden, head, NULL, p->length, false, err));
    for (int u = 0; u < p->assignment->n_units; u++) {
        const qc_stream *s = p->branches[u].n_tokens ? &p->branches[u] : &p->base;
        QC_TRY(load_window(p, s, window, err));
        QC_TRY(be->linear(be, h->b, SLICE_VOCAB, p->buffer_x, hidden, u == h->head_unit ? rounded_head : head,
                          NULL, p->length, false, err));
        QC_TRY(be->score(be, h->scores + u * n_tokens(p) + at, h->a, h->b, SLICE_VOCAB, h->targets + at,
                         p->length, vocab0, n, p->model->config.final_softcap, err));
    }
    return QC_OK;
}

static int score_slice(head_job *h, int64_t vocab0, int64_t n, qc_err *err)
{
    probe *p = h->p;
    qc_weight *head = NULL, *rounded_head = NULL;
    int rc = qc_model_head_slice(p->model, p->be, vocab0, n, &head, err);
    if (rc == QC_OK && h->head_unit >= 0)
        rc = load_rounded_slice(h, vocab0, n, &rounded_head, err);
    for (int64_t i = 0; i < p->n_windows && rc == QC_OK; i++)
        rc = score_window(h, i, vocab0, n, head, rounded_head, err);
    p->be->weight_free(p->be, head);
    p->be->weight_free(p->be, rounded_head);
    return rc == QC_OK ? step(p, (double)p->assignment->n_units * (double)n / (double)SLICE_VOCAB, err) : rc;
}

static int norm_stream(probe *p, qc_stream *s, qc_err *err)
{
    for (int64_t i = 0; i < p->n_windows; i++) {
        QC_TRY(load_window(p, s, i, err));
        QC_TRY(qc_model_final_norm(p->model, p->be, p->buffer_x, p->buffer_x, p->length, err));
        QC_TRY(store_window(p, s, i, err));
    }
    return QC_OK;
}

static int finish_units(head_job *h, qc_err *err)
{
    probe *p = h->p;
    for (int u = 0; u < p->assignment->n_units; u++) {
        double sum = 0, nll_a, nll_b, kld;
        for (int64_t t = 0; t < n_tokens(p); t++) {
            qc_score_finish(&h->scores[u * n_tokens(p) + t], &nll_a, &nll_b, &kld);
            sum += fmax(0, kld);
        }
        if (!isfinite(sum))
            return qc_fail(err, QC_E_INPUT,
                           "%s: logits are not finite on the calibration text with one part of the model "
                           "rounded",
                           p->model->src->path);
        scale_curve(&p->assignment->units[u], sum / (double)n_tokens(p));
    }
    return QC_OK;
}

static int alloc_head(head_job *h, qc_err *err)
{
    probe *p = h->p;
    size_t n = (size_t)(n_tokens(p) * p->assignment->n_units);
    h->scores = qc_alloc(n, sizeof *h->scores);
    h->targets = qc_alloc((size_t)n_tokens(p), sizeof *h->targets);
    if (!h->scores || !h->targets)
        return qc_fail_nomem(err, "scores", n * sizeof *h->scores);
    for (size_t i = 0; i < n; i++)
        h->scores[i] = qc_score_start();
    for (int64_t i = 0; i < n_tokens(p); i++)
        h->targets[i] = -1;
    if (!(h->a = p->be->alloc(p->be, p->length * SLICE_VOCAB, err)) ||
        !(h->b = p->be->alloc(p->be, p->length * SLICE_VOCAB, err)))
        return QC_E_RESOURCE;
    return rounded_alloc(&h->slice, SLICE_VOCAB, p->model->config.hidden, err);
}

static int run_head(probe *p, int head_unit, qc_err *err)
{
    head_job h = {.p = p, .head_unit = head_unit};
    int64_t vocab = p->model->config.vocab;
    int rc = alloc_head(&h, err);
    if (rc == QC_OK)
        rc = norm_stream(p, &p->base, err);
    for (int u = 0; u < p->assignment->n_units && rc == QC_OK; u++)
        if (p->branches[u].n_tokens)
            rc = norm_stream(p, &p->branches[u], err);
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

void qc_sensitivity_plan_bytes(const qc_model_config *config, int64_t n_units, int64_t n_windows,
                               int64_t length, uint64_t *ret_full, uint64_t *ret_least)
{
    uint64_t tokens = (uint64_t)(n_windows * length), window = (uint64_t)(length * widest(config)) * 4;
    uint64_t head = 2ull * SLICE_VOCAB * ((uint64_t)length + 3 * (uint64_t)config->hidden) * 4 +
                    tokens * (uint64_t)n_units * sizeof(qc_score);
    uint64_t matrix = (uint64_t)(widest(config) * qc_max_i64(config->hidden, config->ffn)) * 6;
    uint64_t layer = qc_layer_bytes(config) + matrix;
    *ret_least = qc_workspace_bytes(config, length) + 3 * window + (head > layer ? head : layer);
    *ret_full = *ret_least + tokens * (uint64_t)(n_units + 1) * (uint64_t)config->hidden * 4;
}

static int open_probe(probe *p, qc_err *err)
{
    const qc_model_config *c = &p->model->config;
    const qc_sensitivity_options *o = p->options;
    int n_units = p->assignment->n_units;
    uint64_t full, least;
    qc_sensitivity_plan_bytes(c, n_units, p->n_windows, p->length, &full, &least);
    if (o->memory_bytes && least > o->memory_bytes)
        return qc_fail(err, QC_E_RESOURCE,
                       "measuring for the bit budget needs at least %llu MB, the memory cap is %llu MB",
                       (unsigned long long)(least / 1000000 + 1),
                       (unsigned long long)(o->memory_bytes / 1000000));
    p->spill = o->memory_bytes && full > o->memory_bytes;
    if (!(p->branches = qc_calloc((size_t)n_units + 1, sizeof *p->branches)))
        return qc_fail_nomem(err, "streams", (unsigned long long)n_units * sizeof *p->branches);
    for (int u = 0; u < n_units; u++)
        p->branches[u].fd = -1;
    QC_TRY(qc_stream_open(&p->base, n_tokens(p), c->hidden, p->spill, o->scratch_folder, err));
    QC_TRY(qc_workspace_new(p->model, p->be, p->length, &p->ws, err));
    int64_t window = p->length * widest(c);
    if (!(p->buffer_x = p->be->alloc(p->be, window, err)) ||
        !(p->buffer_u = p->be->alloc(p->be, window, err)))
        return QC_E_RESOURCE;
    p->host = qc_alloc((size_t)window, sizeof *p->host);
    p->column_weight = qc_alloc((size_t)widest(c), sizeof *p->column_weight);
    if (!p->host || !p->column_weight)
        return qc_fail_nomem(err, "windows", (unsigned long long)window * sizeof *p->host);
    p->work_all =
        (double)n_units * (double)c->n_layers / 2 + (double)n_units * (double)c->vocab / (double)SLICE_VOCAB;
    return QC_OK;
}

static void close_probe(probe *p)
{
    for (int u = 0; p->branches && u < p->assignment->n_units; u++)
        qc_stream_close(&p->branches[u]);
    qc_free(p->branches);
    qc_stream_close(&p->base);
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
    QC_TRY(open_probe(p, err));
    for (int u = 0; u < p->assignment->n_units; u++) {
        qc_unit *unit = &p->assignment->units[u];
        for (int c = 0; c < unit->n_choices; c++)
            unit->choices[c].damage = 0;
        table = unit->embedding ? u : table;
        head = unit->head ? u : head;
    }
    QC_TRY(embed(p, table, err));
    for (int layer = 0; layer < p->model->config.n_layers; layer++)
        QC_TRY(run_layer(p, layer, err));
    if (table >= 0)
        QC_TRY(add_curve(p, &p->assignment->units[table], 0, NULL, err));
    if (head >= 0 && head != table)
        QC_TRY(add_curve(p, &p->assignment->units[head], 0, NULL, err));
    return run_head(p, head, err);
}

int qc_sensitivity_measure(const qc_model *model, qc_backend *be, const int32_t *ids, int64_t n_windows,
                           int64_t length, qc_assignment *assignment, const qc_sensitivity_options *options,
                           qc_err *err)
{
    probe p = {.model = model,
               .be = be,
               .ids = ids,
               .n_windows = n_windows,
               .length = length,
               .assignment = assignment,
               .options = options,
               .base.fd = -1};
    int rc = run(&p, err);
    close_probe(&p);
    return rc;
}
