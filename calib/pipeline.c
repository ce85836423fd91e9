#include "pipeline_internal.h"

#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_fp.h"
#include "qc_math.h"
#include "qc_time.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Tokens of the windows that channel scales are chosen by. */
enum { FOLD_TOKENS = 4096 };

/* Kept inputs above this go to a scratch file (to memory if there is none): they are read once, in order, and
 * the page cache holds what there is room for. */
#define KEPT_MAX_BYTES (128 << 20)

/* Rows of a matrix that are solved at once: 64 MiB of float32. */
#define SOLVE_ELEMS (16 << 20)

void qc_pipeline_record_name(int layer, char *ret, size_t cap_bytes)
{
    snprintf(ret, cap_bytes, "layer.%d", layer);
}

static int64_t total_tokens(const qc_corpus *corpus)
{
    return corpus->n_windows * corpus->length;
}

static bool keeps_output(qc_stage stage)
{
    return stage == QC_STAGE_O || stage == QC_STAGE_DOWN;
}

static int64_t kept_width(const qc_model_config *c)
{
    static const qc_stage kept[] = {QC_STAGE_O, QC_STAGE_DOWN, QC_STAGE_EXPERT_GATE_UP};
    int64_t width = 0;
    for (int i = 0; i < 3; i++)
        if (qc_stage_in_any_layer(c, kept[i]))
            width = qc_max_i64(width, qc_stage_width(c, kept[i]));
    return width;
}

static int64_t widest(const qc_model_config *c)
{
    return qc_max_i64(kept_width(c), c->hidden);
}

static const qc_slot *slots_of(const qc_pipeline *p, qc_stage stage)
{
    return qc_stage_slots(p->model->config.family, stage);
}

/* ---- streams ---- */

int qc_pipeline_borrow(qc_pipeline *p, const qc_stream *s, int64_t window, float *buffer, float **ret,
                       qc_err *err)
{
    int64_t n = p->corpus->length;
    return qc_stream_borrow(s, p->be, window * n, n, p->host, buffer, ret, err);
}

int qc_pipeline_give_back(qc_pipeline *p, qc_stream *s, int64_t window, const float *x, const float *buffer,
                          qc_err *err)
{
    int64_t n = p->corpus->length;
    return qc_stream_give_back(s, p->be, window * n, n, p->host, buffer, x, err);
}

static int embed_all(qc_pipeline *p, qc_err *err)
{
    int64_t n = p->corpus->length;
    for (int64_t i = 0; i < p->corpus->n_windows; i++) {
        QC_TRY(qc_model_embed(p->model, p->corpus->ids + i * n, n, p->host, err));
        QC_TRY(qc_stream_put(&p->x, i * n, n, p->host, err));
        if (p->x_ref.n_tokens)
            QC_TRY(qc_stream_put(&p->x_ref, i * n, n, p->host, err));
    }
    return QC_OK;
}

/* Tasks that share the look at a window. */
enum { SCAN_TASKS = 16 };

typedef struct scan_job {
    const float *x;
    int64_t n;
    float most[SCAN_TASKS];
} scan_job;

static void scan_task(void *ctx, int64_t task, int thread)
{
    scan_job *job = ctx;
    int64_t from = task * job->n / SCAN_TASKS;
    (void)thread;
    job->most[task] = qc_largest_abs(job->x + from, (task + 1) * job->n / SCAN_TASKS - from);
}

/* qc_largest_abs on all threads */
static float largest_abs(qc_backend *be, const float *x, int64_t n)
{
    scan_job job = {.x = x, .n = n};
    be->host_tasks(be, SCAN_TASKS, scan_task, &job);
    return qc_largest_abs(job.most, SCAN_TASKS);
}

/* The stream behind a layer. Its weights or inputs were broken: say where, not just that the end is no
 * number. What is finite here may not be where an engine keeps activations in float16: a note. */
static int check_stream(qc_layer_job *j, qc_err *err)
{
    qc_pipeline *p = j->p;
    const qc_stream *s = &p->x;
    int64_t n = p->corpus->length;
    float most = 0;
    for (int64_t i = 0; i < p->corpus->n_windows; i++) {
        const float *x = p->host;
        if (s->data)
            x = s->data + i * n * s->hidden;
        else
            QC_TRY(qc_stream_get(s, i * n, n, p->host, err));
        float here = largest_abs(p->be, x, n * s->hidden);
        if (!isfinite(here)) {
            int64_t bad = qc_first_nonfinite(x, n * s->hidden);
            char why[QC_ERR_MSG_BYTES];
            qc_model_blame_nonfinite(p->model, j->index, why);
            return qc_fail(
                err, QC_E_INPUT,
                "%s: layer %d gives a value that is not finite (calibration window %lld, token %lld)%s",
                p->model->src->path, j->index, (long long)i, (long long)(bad / s->hidden), why);
        }
        most = here > most ? here : most;
    }
    char subject[32];
    snprintf(subject, sizeof subject, "layer %d", j->index);
    return most <= QC_F16_MAX
               ? QC_OK
               : qc_event_add(&j->record.events, QC_EVENT_NOTE, "f16_range", subject, 1, err,
                              "its output reaches %.4g: an engine that keeps activations in float16, which "
                              "ends at 65504, overflows",
                              (double)most);
}

int qc_pipeline_advance(qc_pipeline *p, double work, qc_err *err)
{
    p->work_done += work;
    if (p->options->progress && p->work_all > 0)
        p->options->progress(p->options->progress_ctx, p->work_done / p->work_all);
    return qc_check_interrupt(err);
}

/* ---- statistics of one stage ---- */

void qc_stage_stats_clear(qc_stage_stats *s, qc_backend *be)
{
    qc_hessian_clear(&s->hessian);
    if (s->drift)
        be->free(be, s->drift);
    if (s->lack)
        be->free(be, s->lack);
}

/* One window of a stage whose product is not added to the stream as it is: the inputs of the 16-bit stream
 * against u; that stream moves on if the stage ends in it. */
static int add_drift(qc_layer_job *j, qc_stage stage, int64_t window, const float *u, int64_t width,
                     qc_stage_stats *stats, qc_err *err)
{
    qc_pipeline *p = j->p;
    qc_backend *be = p->be;
    int64_t n = p->corpus->length;
    float *x16;
    QC_TRY(qc_pipeline_borrow(p, &p->x_ref, window, p->buffer_ref, &x16, err));
    QC_TRY(qc_layer_stage_input(j->ref, p->ws, stage, x16, p->buffer_diff, n, err));
    if (keeps_output(stage)) {
        QC_TRY(qc_layer_stage_output(j->ref, p->ws, stage, p->buffer_diff, x16, n, err));
        QC_TRY(qc_pipeline_give_back(p, &p->x_ref, window, x16, p->buffer_ref, err));
    }
    QC_TRY(be->add(be, p->buffer_diff, u, -1, n * width, err));
    return be->gram(be, stats->drift, p->buffer_diff, width, u, width, n, width, width, 1, err);
}

/* One window of a stage whose product is added to the stream x: the 16-bit stream moves on, and what x would
 * lack of it after this stage with its 16-bit matrix is taken against u. */
static int add_lack(qc_layer_job *j, qc_stage stage, int64_t window, const float *x, const float *u,
                    int64_t width, qc_stage_stats *stats, qc_err *err)
{
    qc_pipeline *p = j->p;
    qc_backend *be = p->be;
    int64_t n = p->corpus->length, hidden = p->model->config.hidden;
    float *x16;
    QC_TRY(qc_pipeline_borrow(p, &p->x_ref, window, p->buffer_ref, &x16, err));
    QC_TRY(qc_layer_stage_input(j->ref, p->ws, stage, x16, p->buffer_diff, n, err));
    QC_TRY(qc_layer_stage_output(j->ref, p->ws, stage, p->buffer_diff, x16, n, err));
    QC_TRY(qc_pipeline_give_back(p, &p->x_ref, window, x16, p->buffer_ref, err));
    QC_TRY(be->scale(be, p->buffer_diff, x, 1, n * hidden, err));
    QC_TRY(qc_layer_stage_output(j->ref, p->ws, stage, u, p->buffer_diff, n, err));
    QC_TRY(be->scale(be, p->buffer_diff, p->buffer_diff, -1, n * hidden, err));
    QC_TRY(be->add(be, p->buffer_diff, x16, 1, n * hidden, err));
    if (p->model->config.residual_scale != 1)
        QC_TRY(be->scale(be, p->buffer_diff, p->buffer_diff, 1 / p->model->config.residual_scale, n * hidden,
                         err));
    return be->gram(be, stats->lack, p->buffer_diff, hidden, u, width, n, hidden, width, 1, err);
}

static int collect(qc_layer_job *j, qc_stage stage, qc_stage_stats *stats, qc_err *err)
{
    qc_pipeline *p = j->p;
    qc_backend *be = p->be;
    int64_t n = p->corpus->length, width = qc_stage_width(&p->model->config, stage);
    QC_TRY(qc_hessian_init(&stats->hessian, be, width, 0, err));
    bool product = keeps_output(stage) && qc_stage_adds_product(&p->model->config, stage);
    float **correction = product ? &stats->lack : &stats->drift;
    int64_t rows = product ? p->model->config.hidden : width;
    if (j->ref && !(*correction = qc_backend_zeros(be, rows * width, err)))
        return QC_E_RESOURCE;
    for (int64_t i = 0; i < p->corpus->n_windows; i++) {
        float *x, *u = p->buffer_u;
        double start = qc_now_seconds();
        QC_TRY(qc_pipeline_borrow(p, &p->x, i, p->buffer_x, &x, err));
        if (keeps_output(stage) && be->host_memory && p->kept.data)
            u = p->kept.data + i * n * width; /* the stream's rows are as wide as this stage needs */
        QC_TRY(qc_layer_stage_input(j->layer, p->ws, stage, x, u, n, err));
        if (keeps_output(stage))
            QC_TRY(qc_pipeline_give_back(p, &p->kept, i, u, p->buffer_u, err));
        j->record.times.forward += qc_now_seconds() - start;
        start = qc_now_seconds();
        QC_TRY(qc_hessian_add(&stats->hessian, u, width, n, err));
        j->record.times.hessian += qc_now_seconds() - start;
        start = qc_now_seconds();
        if (stats->drift)
            QC_TRY(add_drift(j, stage, i, u, width, stats, err));
        if (stats->lack)
            QC_TRY(add_lack(j, stage, i, x, u, width, stats, err));
        j->record.times.forward += qc_now_seconds() - start;
        QC_TRY(qc_pipeline_advance(p, (double)(width * n), err));
    }
    double start = qc_now_seconds();
    const float *sum_abs;
    QC_TRY(qc_hessian_finish(&stats->hessian, &stats->h, &sum_abs, err));
    QC_TRY(qc_gptq_shrink(be, stats->hessian.block_h, width, p->options->shrink, err));
    j->record.times.hessian += qc_now_seconds() - start;
    return QC_OK;
}

/* ---- one matrix ---- */

typedef struct matrix_job {
    const qc_convert_item *item;
    const qc_tensor_info *info;
    int64_t n_rows, n_cols;
    float *w; /* [block of rows, n_cols] */
    qc_code_rows rows;
} matrix_job;

static void matrix_job_clear(matrix_job *m)
{
    qc_free(m->w);
    qc_code_rows_free(&m->rows);
}

static int64_t rows_per_solve(int64_t n_rows, int64_t n_cols)
{
    return qc_min_i64(n_rows, qc_max_i64(1, SOLVE_ELEMS / n_cols));
}

static int matrix_job_alloc(matrix_job *m, qc_err *err)
{
    int64_t n = rows_per_solve(m->n_rows, m->n_cols) * m->n_cols;
    m->w = qc_alloc((size_t)n, sizeof *m->w);
    if (!m->w)
        return qc_fail_nomem(err, m->info->name, (unsigned long long)n * sizeof *m->w);
    QC_TRY(qc_code_rows_alloc(&m->item->spec.grid, m->n_rows, m->n_cols, &m->rows, err));
    m->rows.n_rows = m->n_rows;
    return QC_OK;
}

static qc_code_rows rows_from(const matrix_job *m, int64_t row, int64_t n)
{
    qc_code_rows rows = qc_code_rows_from(&m->rows, &m->item->spec.grid, m->n_cols, row);
    rows.n_rows = n;
    return rows;
}

/* Columns that are next to dead can take any number where nothing damps them. */
static int correct_rows(const qc_layer_job *j, const matrix_job *m, qc_gptq_input *input,
                        const qc_stage_stats *stats, int64_t row, int64_t n, qc_err *err)
{
    const qc_pipeline_options *o = j->p->options;
    QC_TRY(qc_gptq_correct_target(input, stats->drift, stats->lack ? stats->lack + row * m->n_cols : NULL,
                                  o->correct, m->w, n, err));
    if (qc_first_nonfinite(m->w, n * m->n_cols) < 0)
        return QC_OK;
    return qc_fail(
        err, QC_E_INPUT,
        "%s: tensor %s: the corrected targets overflow (quantize.gptq: correct %g, damp %g, shrink %g): "
        "more damping or less correction is needed",
        j->p->model->src->path, m->info->name, o->correct, o->gptq_options.damp, o->shrink);
}

static int solve_matrix(qc_layer_job *j, qc_slot slot, matrix_job *m, qc_gptq_input *input,
                        const qc_stage_stats *stats, qc_matrix_record *record, qc_err *err)
{
    const qc_source *src = j->p->model->src;
    int64_t step = rows_per_solve(m->n_rows, m->n_cols);
    for (int64_t row = 0; row < m->n_rows; row += step) {
        int64_t n = qc_min_i64(step, m->n_rows - row), at;
        double start = qc_now_seconds();
        QC_TRY(src->read_rows(src, m->item->tensor, row, n, m->w, err));
        src->release(src, m->item->tensor, row, n);
        j->record.times.io += qc_now_seconds() - start;
        if ((at = qc_first_nonfinite(m->w, n * m->n_cols)) >= 0)
            return qc_fail(err, QC_E_INPUT, "%s: tensor %s holds a NaN or infinity at row %lld, column %lld",
                           src->path, m->info->name, (long long)(row + at / m->n_cols),
                           (long long)(at % m->n_cols));
        qc_layer_fold_rows(&j->fold, slot, row, n, m->n_cols, m->w);
        start = qc_now_seconds();
        qc_gptq_result r;
        qc_code_rows rows = rows_from(m, row, n);
        if (stats->drift || stats->lack)
            QC_TRY(correct_rows(j, m, input, stats, row, n, err));
        if (qc_gptq_matrix(input, m->w, n, &m->item->spec, &rows, &record->stats, &r, err) < 0 ||
            qc_gptq_norm(input, m->w, n, &record->norm, err) < 0)
            return qc_err_prefix(err, "%s: tensor %s, rows from %lld", src->path, m->info->name,
                                 (long long)row);
        record->result.error += r.error;
        record->result.error_rtn += r.error_rtn;
        record->result.n_rtn_rows += r.n_rtn_rows;
        record->result.all_rtn = r.all_rtn;
        j->record.times.solve += qc_now_seconds() - start;
    }
    return QC_OK;
}

static int fetch_decoded(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    const matrix_job *m = ctx;
    qc_code_rows rows = rows_from(m, row0, n_rows);
    (void)err;
    qc_code_rows_decode(&rows, &m->item->spec.grid, m->n_cols, dst);
    return QC_OK;
}

static void matrix_job_init(const qc_pipeline *p, int layer, qc_slot slot, int64_t expert, matrix_job *m)
{
    int64_t tensor = qc_model_expert_tensor(p->model, layer, slot, expert);
    *m = (matrix_job){.item = qc_pipeline_planned(p, tensor),
                      .info = p->model->src->info(p->model->src, tensor)};
    m->n_rows = qc_tensor_rows(m->info);
    m->n_cols = qc_tensor_cols(m->info);
}

/* "layer 3, qkv", "layer 3, expert 17, expert_down" */
static void stage_subject(const qc_layer_job *j, qc_stage stage, int64_t expert, char ret[64])
{
    if (stage < QC_N_DENSE_STAGES)
        snprintf(ret, 64, "layer %d, %s", j->index, qc_stage_name(stage));
    else
        snprintf(ret, 64, "layer %d, expert %lld, %s", j->index, (long long)expert, qc_stage_name(stage));
}

static const char *order_name(qc_gptq_order order)
{
    return order == QC_ORDER_NATURAL ? "none" : order == QC_ORDER_STATIC ? "static" : "min-pivot";
}

/* input: prepared for `gptq`, or to round to nearest */
static int quantize_matrix(qc_layer_job *j, qc_slot slot, int64_t expert, qc_gptq_input *input, bool gptq,
                           const qc_stage_stats *stats, const qc_gptq_input_info *info, double seconds_before,
                           qc_err *err)
{
    qc_pipeline *p = j->p;
    matrix_job m;
    double start = qc_now_seconds();
    matrix_job_init(p, j->index, slot, expert, &m);
    qc_matrix_record record = {.name = (char *)(uintptr_t)m.info->name,
                               .method = gptq && !info->failed ? "gptq" : "rtn",
                               .order =
                                   gptq && !info->failed ? order_name(p->options->gptq_options.order) : NULL,
                               .input = *info,
                               .tokens = stats->hessian.n_tokens};
    int rc = matrix_job_alloc(&m, err);
    if (rc == QC_OK && (rc = solve_matrix(j, slot, &m, input, stats, &record, err)) == QC_OK) {
        double pack = qc_now_seconds();
        rc = qc_journal_put_codes(p->journal, m.info->name, &m.item->spec.grid, m.n_cols, &m.rows, err);
        if (rc == QC_OK && !p->options->original_inputs)
            rc = qc_layer_set_matrix(j->layer, slot, expert, fetch_decoded, &m, err);
        j->record.times.pack += qc_now_seconds() - pack;
    }
    matrix_job_clear(&m);
    record.seconds = qc_now_seconds() - start + seconds_before;
    return rc == QC_OK ? qc_layer_record_add(&j->record, &record, err) : rc;
}

/* ---- one stage ---- */

static int note_input(qc_layer_job *j, qc_stage stage, int64_t expert, const qc_gptq_input_info *info,
                      qc_err *err)
{
    char subject[64];
    stage_subject(j, stage, expert, subject);
    if (info->failed && info->n_dead == qc_stage_width(&j->p->model->config, stage))
        return qc_event_add(&j->record.events, QC_EVENT_FALLBACK, "rtn_fallback", subject, 1, err,
                            "all inputs are 0 in all calibration tokens");
    if (info->failed)
        return qc_event_add(&j->record.events, QC_EVENT_FALLBACK, "rtn_fallback", subject, 1, err,
                            "the statistics can not be factorised with any damping up to %g", info->damp);
    if (info->n_raises)
        QC_TRY(qc_event_add(&j->record.events, QC_EVENT_FALLBACK, "damping", subject, 1, err,
                            "raised to %g in %d steps", info->damp, info->n_raises));
    if (info->n_dead)
        return qc_event_add(&j->record.events, QC_EVENT_NOTE, "dead_columns", subject, info->n_dead, err,
                            "inputs that are 0 in all calibration tokens");
    return QC_OK;
}

bool qc_stage_any_quantized(const qc_layer_job *j, const qc_slot *slots, int64_t expert)
{
    for (const qc_slot *s = slots; *s != QC_N_SLOTS; s++)
        if (qc_pipeline_planned(j->p, qc_model_expert_tensor(j->p->model, j->index, *s, expert))->action ==
            QC_ACTION_QUANTIZED)
            return true;
    return false;
}

int qc_stage_quantize(qc_layer_job *j, qc_stage stage, int64_t expert, const qc_slot *slots,
                      const qc_stage_stats *stats, bool by_nearest, qc_err *err)
{
    qc_pipeline *p = j->p;
    qc_gptq_input *input = NULL;
    qc_gptq_input_info info;
    bool gptq = p->options->gptq && !by_nearest;
    double start = qc_now_seconds(), seconds;
    int rc = qc_gptq_input_new(p->be, stats->h, stats->hessian.n, gptq ? &p->options->gptq_options : NULL,
                               &input, &info, err);
    if (rc < 0) {
        char why[QC_ERR_MSG_BYTES] = "", subject[64];
        stage_subject(j, stage, expert, subject);
        if (rc == QC_E_INPUT)
            qc_model_blame_nonfinite(p->model, j->index, why);
        return qc_err_prefix(err, "%s: %s: input%s", p->model->src->path, subject, why);
    }
    seconds = qc_now_seconds() - start;
    j->record.times.factor += seconds;
    rc = gptq ? note_input(j, stage, expert, &info, err) : QC_OK;
    for (const qc_slot *s = slots; *s != QC_N_SLOTS && rc == QC_OK; s++) {
        if (qc_pipeline_planned(p, qc_model_expert_tensor(p->model, j->index, *s, expert))->action !=
            QC_ACTION_QUANTIZED)
            continue;
        rc = quantize_matrix(j, *s, expert, input, gptq, stats, &info, seconds, err);
        seconds = 0;
    }
    qc_gptq_input_free(input);
    return rc;
}

/* x += output of the stage's kept inputs. */
static int put_output(qc_layer_job *j, qc_stage stage, qc_err *err)
{
    qc_pipeline *p = j->p;
    double start = qc_now_seconds();
    for (int64_t i = 0; i < p->corpus->n_windows; i++) {
        float *x, *u;
        QC_TRY(qc_pipeline_borrow(p, &p->x, i, p->buffer_x, &x, err));
        QC_TRY(qc_pipeline_borrow(p, &p->kept, i, p->buffer_u, &u, err));
        QC_TRY(qc_layer_stage_output(j->layer, p->ws, stage, u, x, p->corpus->length, err));
        QC_TRY(qc_pipeline_give_back(p, &p->x, i, x, p->buffer_x, err));
    }
    j->record.times.forward += qc_now_seconds() - start;
    return QC_OK;
}

static int run_stage(qc_layer_job *j, qc_stage stage, qc_err *err)
{
    qc_pipeline *p = j->p;
    qc_stage_stats stats = {.drift = NULL};
    const qc_slot *slots = slots_of(j->p, stage);
    p->kept.hidden = qc_stage_width(&p->model->config, stage);
    int rc = collect(j, stage, &stats, err);
    if (rc == QC_OK && qc_stage_any_quantized(j, slots, 0))
        rc = qc_stage_quantize(j, stage, 0, slots, &stats, false, err);
    qc_stage_stats_clear(&stats, p->be);
    return rc == QC_OK && keeps_output(stage) ? put_output(j, stage, err) : rc;
}

/* ---- given statistics ---- */

/* Matrices of a stage that have the statistics of the first of them. *ret_tokens: how many they are of, left
 * alone where nothing is to be quantized. */
static int run_given(qc_layer_job *j, qc_stats_place place, const qc_slot *slots, int64_t *ret_tokens,
                     qc_err *err)
{
    qc_pipeline *p = j->p;
    qc_stage_stats stats = {.drift = NULL};
    int64_t tensor = qc_model_expert_tensor(p->model, j->index, slots[0], place.expert),
            width = qc_stage_width(&p->model->config, place.stage);
    bool of_expert = place.stage >= QC_N_DENSE_STAGES;
    if (!qc_stage_any_quantized(j, slots, place.expert))
        return QC_OK;
    double start = qc_now_seconds();
    int rc = qc_given_stats_load(p->options->given, p->be, place, slots[0], &stats.hessian, &stats.h, err);
    if (rc == QC_OK)
        rc = qc_gptq_shrink(p->be, stats.hessian.block_h, width, p->options->shrink, err);
    j->record.times.hessian += qc_now_seconds() - start;
    *ret_tokens = stats.hessian.n_tokens;
    if (rc == QC_OK && *ret_tokens == 0 && !of_expert)
        rc = qc_event_add(&j->record.events, QC_EVENT_FALLBACK, "no_statistics",
                          p->model->src->info(p->model->src, tensor)->name, 1, err,
                          "the importance matrix has nothing about it: all columns count alike");
    if (rc == QC_OK)
        rc = qc_stage_quantize(j, place.stage, place.expert, slots, &stats, of_expert && *ret_tokens == 0,
                               err);
    qc_stage_stats_clear(&stats, p->be);
    return rc;
}

/* An importance matrix has statistics of each matrix, a statistics file of each stage. */
static int run_given_stage(qc_layer_job *j, qc_stats_place place, int64_t *ret_tokens, qc_err *err)
{
    const qc_slot *slots = slots_of(j->p, place.stage);
    if (qc_given_stats_info(j->p->options->given))
        return run_given(j, place, slots, ret_tokens, err);
    for (const qc_slot *s = slots; *s != QC_N_SLOTS; s++)
        QC_TRY(run_given(j, place, (qc_slot[]){*s, QC_N_SLOTS}, ret_tokens, err));
    return QC_OK;
}

/* Experts one after the other. Those that had few tokens are named. */
static int run_given_experts(qc_layer_job *j, qc_err *err)
{
    const qc_model_config *c = &j->p->model->config;
    const qc_stats_info *info = qc_given_stats_info(j->p->options->given);
    int64_t *tokens = qc_alloc((size_t)c->n_experts, sizeof *tokens),
            wanted = qc_max_i64(c->hidden, c->expert_ffn);
    int rc =
        tokens ? QC_OK : qc_fail_nomem(err, "experts", (unsigned long long)c->n_experts * sizeof *tokens);
    for (int64_t e = 0; e < c->n_experts && rc == QC_OK; e++) {
        tokens[e] = wanted;
        for (int s = QC_STAGE_EXPERT_GATE_UP; s <= QC_STAGE_EXPERT_DOWN && rc == QC_OK; s++)
            rc = run_given_stage(j, (qc_stats_place){j->index, (qc_stage)s, e}, &tokens[e], err);
    }
    if (rc == QC_OK)
        rc = qc_layer_note_tokens(
            j, tokens, info ? qc_min_i64(wanted, info->corpus_windows * info->length) : wanted, err);
    qc_free(tokens);
    return rc;
}

/* ---- one layer ---- */

static int finish_record(qc_layer_job *j, qc_err *err)
{
    char name[32];
    qc_pipeline_record_name(j->index, name, sizeof name);
    char *text = qc_layer_record_print(&j->record);
    if (!text)
        return qc_fail_nomem(err, "record of a layer", 4096);
    int rc = qc_journal_put_text(j->p->journal, name, text, err);
    qc_free(text);
    return rc == QC_OK ? qc_journal_end_layer(j->p->journal, err) : rc;
}

static int load_layers(qc_layer_job *j, qc_err *err)
{
    qc_pipeline *p = j->p;
    double start = qc_now_seconds();
    QC_TRY(qc_layer_load(p->model, p->be, j->index, &j->layer, err));
    if (p->x_ref.n_tokens)
        QC_TRY(qc_layer_load(p->model, p->be, j->index, &j->ref, err));
    j->record.times.io += qc_now_seconds() - start;
    return QC_OK;
}

/* The layer's inputs are rounded while running, as planned. */
static void set_acts(qc_layer_job *j)
{
    for (int stage = 0; stage < QC_N_STAGES; stage++) {
        if (!qc_stage_present(&j->p->model->config, j->index, (qc_stage)stage))
            continue;
        const qc_convert_item *item = qc_pipeline_planned(
            j->p, qc_model_tensor(j->p->model, j->index, slots_of(j->p, (qc_stage)stage)[0]));
        qc_layer_set_acts(j->layer, (qc_stage)stage, item->act_bits, item->act_group);
    }
}

/* ---- channel scaling ---- */

/* Windows that scales are chosen by: some thousand tokens show what a channel is like. */
static int64_t fold_windows(const qc_corpus *corpus)
{
    return qc_min_i64(corpus->n_windows, qc_max_i64(1, FOLD_TOKENS / corpus->length));
}

static int note_fold(qc_layer_job *j, qc_stage stage, qc_err *err)
{
    const qc_fold_record *r = &j->fold.records[stage];
    char subject[64];
    snprintf(subject, sizeof subject, "layer %d, %s", j->index, qc_stage_name(stage));
    if (!j->p->options->fold_sites[stage])
        return QC_OK;
    if (r->skipped)
        return qc_event_add(&j->record.events, QC_EVENT_NOTE, "fold_skipped", subject, 1, err,
                            "inputs are not scaled: %s", r->skipped);
    if (r->result.refused)
        QC_TRY(qc_event_add(&j->record.events, QC_EVENT_NOTE, "fold_identity", subject, 1, err,
                            "inputs are not scaled: the best scales were worse than none on all rows"));
    if (r->result.n_limited)
        QC_TRY(qc_event_add(&j->record.events, QC_EVENT_NOTE, "fold_limited", subject, r->result.n_limited,
                            err, "channels whose scale had to be limited"));
    qc_fold_figures figures = {.stage = qc_stage_name(stage),
                               .loss = r->result.loss,
                               .loss_identity = r->result.loss_identity,
                               .n_limited = r->result.n_limited,
                               .seconds = r->seconds};
    memcpy(figures.choice, r->result.choice, sizeof figures.choice);
    return qc_layer_record_add_fold(&j->record, &figures, err);
}

static int choose_folds(qc_layer_job *j, float *x, qc_err *err)
{
    qc_pipeline *p = j->p;
    int64_t n = p->corpus->length, hidden = p->model->config.hidden;
    qc_fold_options options = p->options->fold;
    options.gptq = p->options->gptq ? &p->options->gptq_options : NULL;
    qc_fold_layer_job job = {.plan = p->plan,
                             .model = p->model,
                             .be = p->be,
                             .options = &options,
                             .index = j->index,
                             .layer = j->layer,
                             .ws = p->ws,
                             .x = x,
                             .u = p->buffer_u,
                             .n_windows = fold_windows(p->corpus),
                             .length = n};
    memcpy(job.sites, p->options->fold_sites, sizeof job.sites);
    for (int64_t i = 0; i < job.n_windows; i++) {
        int64_t window = i * p->corpus->n_windows / job.n_windows;
        QC_TRY(qc_stream_load(&p->x, p->be, window * n, n, p->host, x + i * n * hidden, err));
    }
    return qc_layer_fold_choose(&job, &j->fold, err);
}

static int put_router(qc_layer_job *j, qc_err *err)
{
    const qc_model *model = j->p->model;
    const qc_tensor_info *info =
        model->src->info(model->src, qc_model_tensor(model, j->index, QC_SLOT_ROUTER));
    int64_t n = qc_tensor_n_elems(info);
    float *values = qc_alloc((size_t)n, sizeof *values);
    int rc = values ? qc_layer_fold_router(&j->fold, model, j->index, values, err)
                    : qc_fail_nomem(err, info->name, (unsigned long long)n * sizeof *values);
    if (rc == QC_OK)
        rc = qc_journal_put_dense(j->p->journal, info->name, values, n, err);
    qc_free(values);
    return rc;
}

static void scales_name(int layer, qc_stage site, char ret[64])
{
    snprintf(ret, 64, "layer.%d.scales.%s", layer, qc_stage_name(site));
}

/* The statistics of all later steps see the folded layer. */
static int fold_layer(qc_layer_job *j, qc_err *err)
{
    qc_pipeline *p = j->p;
    const qc_source *src = p->model->src;
    if (p->options->fold.method == QC_FOLD_NONE)
        return QC_OK;
    float *x =
        p->be->alloc(p->be, fold_windows(p->corpus) * p->corpus->length * p->model->config.hidden, err);
    int rc = x ? choose_folds(j, x, err) : QC_E_RESOURCE;
    if (x)
        p->be->free(p->be, x);
    QC_TRY(rc);
    for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++) {
        j->record.times.fold += j->fold.records[stage].seconds;
        QC_TRY(note_fold(j, (qc_stage)stage, err));
    }
    for (int slot = QC_SLOT_FIRST_IN_LAYER; slot < QC_N_SLOTS; slot++) {
        const float *v = j->fold.vectors[slot];
        if (!v)
            continue;
        const qc_tensor_info *info = src->info(src, qc_model_tensor(p->model, j->index, (qc_slot)slot));
        QC_TRY(qc_journal_put_dense(p->journal, info->name, v, qc_tensor_cols(info), err));
    }
    if (j->fold.in[QC_SLOT_ROUTER])
        QC_TRY(put_router(j, err));
    for (int site = 0; site < QC_N_DENSE_STAGES; site++)
        if (j->fold.scales[site]) {
            char name[64];
            scales_name(j->index, (qc_stage)site, name);
            QC_TRY(qc_journal_put_dense(p->journal, name, j->fold.scales[site], j->fold.n_scales[site], err));
        }
    if (j->ref)
        QC_TRY(qc_layer_fold_apply(&j->fold, p->model, j->index, j->ref, err));
    return qc_layer_fold_apply(&j->fold, p->model, j->index, j->layer, err);
}

static int quantize_layer(qc_layer_job *j, qc_err *err)
{
    QC_TRY(qc_journal_begin_layer(j->p->journal, j->index, err));
    QC_TRY(load_layers(j, err));
    QC_TRY(fold_layer(j, err));
    set_acts(j);
    for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++)
        if (qc_stage_present(&j->p->model->config, j->index, (qc_stage)stage))
            QC_TRY(run_stage(j, (qc_stage)stage, err));
    if (j->p->model->config.layer_sparse[j->index])
        QC_TRY(qc_layer_run_experts(j, err));
    QC_TRY(check_stream(j, err));
    return finish_record(j, err);
}

/* Layers do not depend on each other here. */
static int quantize_given_layer(qc_layer_job *j, qc_err *err)
{
    if (j->index < qc_journal_n_layers(j->p->journal))
        return QC_OK;
    QC_TRY(qc_journal_begin_layer(j->p->journal, j->index, err));
    for (int s = 0; s < QC_N_STAGES; s++) {
        const qc_model_config *c = &j->p->model->config;
        qc_stage stage = (qc_stage)s;
        int64_t unused;
        if (!qc_stage_present(c, j->index, stage))
            continue;
        if (stage < QC_N_DENSE_STAGES)
            QC_TRY(run_given_stage(j, (qc_stats_place){j->index, stage, 0}, &unused, err));
        else if (stage == QC_STAGE_EXPERT_GATE_UP)
            QC_TRY(run_given_experts(j, err));
        QC_TRY(qc_pipeline_advance(j->p, (double)qc_stage_width(c, stage), err));
    }
    return finish_record(j, err);
}

/* A layer that the journal has: its codes take the place of the solve. */
static int set_from_journal(qc_layer_job *j, qc_slot slot, int64_t expert, qc_err *err)
{
    qc_pipeline *p = j->p;
    matrix_job m;
    matrix_job_init(p, j->index, slot, expert, &m);
    if (m.item->action != QC_ACTION_QUANTIZED || p->options->original_inputs)
        return QC_OK;
    int rc = matrix_job_alloc(&m, err);
    if (rc == QC_OK)
        rc = qc_journal_read_codes(p->journal, m.info->name, &m.item->spec.grid, m.n_cols, 0, m.n_rows,
                                   &m.rows, err);
    if (rc == QC_OK)
        rc = qc_layer_set_matrix(j->layer, slot, expert, fetch_decoded, &m, err);
    matrix_job_clear(&m);
    return rc;
}

typedef struct plain_matrix {
    float *values;
    int64_t n_cols;
} plain_matrix;

static int fetch_plain(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    const plain_matrix *m = ctx;
    (void)err;
    memcpy(dst, m->values + row0 * m->n_cols, (size_t)(n_rows * m->n_cols) * sizeof *dst);
    return QC_OK;
}

static int set_plain(qc_layer *layer, qc_slot slot, plain_matrix *m, qc_err *err)
{
    return slot == QC_SLOT_ROUTER ? qc_layer_set_matrix(layer, slot, 0, fetch_plain, m, err)
                                  : qc_layer_set_vector(layer, slot, m->values, err);
}

/* A norm, bias or router that scales were folded into, in the 16-bit layer too. */
static int set_dense_from_journal(qc_layer_job *j, qc_slot slot, qc_err *err)
{
    qc_pipeline *p = j->p;
    int64_t tensor = qc_model_tensor(p->model, j->index, slot);
    if (tensor < 0 || (qc_slot_of(slot)->rows != QC_DIM_NONE && slot != QC_SLOT_ROUTER))
        return QC_OK;
    const qc_tensor_info *info = p->model->src->info(p->model->src, tensor);
    if (!qc_journal_has(p->journal, info->name))
        return QC_OK;
    int64_t n = qc_tensor_n_elems(info);
    plain_matrix m = {qc_alloc((size_t)n, sizeof *m.values), qc_tensor_cols(info)};
    if (!m.values)
        return qc_fail_nomem(err, info->name, (unsigned long long)n * sizeof *m.values);
    int rc = qc_journal_read_dense(p->journal, info->name, m.values, n, err);
    if (rc == QC_OK)
        rc = set_plain(j->layer, slot, &m, err);
    if (rc == QC_OK && j->ref)
        rc = set_plain(j->ref, slot, &m, err);
    qc_free(m.values);
    return rc;
}

static int forward_all(qc_layer_job *j, const qc_layer *layer, qc_stream *stream, float *buffer, qc_err *err)
{
    qc_pipeline *p = j->p;
    for (int64_t i = 0; i < p->corpus->n_windows; i++) {
        float *x;
        QC_TRY(qc_pipeline_borrow(p, stream, i, buffer, &x, err));
        QC_TRY(qc_layer_forward(layer, p->ws, x, p->corpus->length, err));
        QC_TRY(qc_pipeline_give_back(p, stream, i, x, buffer, err));
        QC_TRY(qc_check_interrupt(err));
    }
    return QC_OK;
}

/* The 16-bit layer with the scales that the journal has, as it was when they were chosen: without them the
 * stream behind it would have other last bits. */
static int fold_ref_from_journal(qc_layer_job *j, qc_err *err)
{
    qc_pipeline *p = j->p;
    for (int site = 0; site < QC_N_DENSE_STAGES; site++) {
        char name[64];
        scales_name(j->index, (qc_stage)site, name);
        if (!qc_journal_has(p->journal, name))
            continue;
        int64_t n = qc_layer_fold_channels(&p->model->config, (qc_stage)site);
        float *scales = qc_alloc((size_t)n, sizeof *scales);
        int rc = scales ? qc_journal_read_dense(p->journal, name, scales, n, err)
                        : qc_fail_nomem(err, name, (unsigned long long)n * sizeof *scales);
        if (rc == QC_OK)
            rc = qc_layer_fold_restore(p->model, j->index, (qc_stage)site, scales, n, &j->fold, err);
        qc_free(scales);
        QC_TRY(rc);
    }
    return qc_layer_fold_apply(&j->fold, p->model, j->index, j->ref, err);
}

static int replay_layer(qc_layer_job *j, qc_err *err)
{
    qc_pipeline *p = j->p;
    QC_TRY(load_layers(j, err));
    set_acts(j);
    if (j->ref)
        QC_TRY(fold_ref_from_journal(j, err));
    for (int slot = QC_SLOT_FIRST_IN_LAYER; slot < QC_N_SLOTS; slot++)
        QC_TRY(set_dense_from_journal(j, (qc_slot)slot, err));
    for (int stage = 0; stage < QC_N_STAGES; stage++) {
        const qc_slot *slots = slots_of(p, (qc_stage)stage);
        int64_t n = qc_stage_experts(&p->model->config, (qc_stage)stage);
        if (qc_stage_present(&p->model->config, j->index, (qc_stage)stage))
            for (int64_t k = 0; slots[k / n] != QC_N_SLOTS; k++)
                QC_TRY(set_from_journal(j, slots[k / n], k % n, err));
    }
    QC_TRY(forward_all(j, j->layer, &p->x, p->buffer_x, err));
    if (j->ref)
        QC_TRY(forward_all(j, j->ref, &p->x_ref, p->buffer_ref, err));
    return QC_OK;
}

static int run_layer(qc_pipeline *p, int index, qc_err *err)
{
    qc_layer_job j = {.p = p, .index = index, .record.layer = index};
    int rc = p->options->given                         ? quantize_given_layer(&j, err)
             : index < qc_journal_n_layers(p->journal) ? replay_layer(&j, err)
                                                       : quantize_layer(&j, err);
    qc_layer_free(j.layer);
    qc_layer_free(j.ref);
    qc_layer_fold_clear(&j.fold);
    qc_layer_record_clear(&j.record);
    return rc;
}

/* ---- the whole ---- */

/* A matrix in work: rows and codes, then the solver or, behind it, the same matrix prepared anew. */
static uint64_t matrix_bytes(const qc_model_config *c, const qc_pipeline_options *o, qc_compute compute,
                             qc_stage stage, bool corrected, bool drift)
{
    int64_t n = qc_stage_width(c, stage), rows = qc_stage_rows(c, stage), some = rows_per_solve(rows, n);
    uint64_t elems = (uint64_t)(rows * n), solve = qc_gptq_matrix_bytes(n, some),
             correct = corrected ? qc_gptq_correct_bytes(n, some, drift) : 0,
             again = elems * (compute == QC_COMPUTE_BF16 ? 2 : 4);
    return 4 * (uint64_t)(some * n) + elems + 5 * elems / 16 + qc_max_u64(again, qc_max_u64(correct, solve)) +
           (o->gptq ? qc_gptq_input_bytes(n) : 0);
}

/* Most that one stage takes beside streams, buffers and the layer: its sums, then H and a matrix. */
static uint64_t stage_bytes(const qc_model_config *c, const qc_pipeline_options *o, qc_compute compute,
                            int64_t n_tokens, qc_stage stage)
{
    int64_t n = qc_stage_width(c, stage);
    bool corrected = o->correct > 0 && stage < QC_N_DENSE_STAGES,
         drift = !(keeps_output(stage) && qc_stage_adds_product(c, stage));
    uint64_t correction = corrected ? (uint64_t)((drift ? n : c->hidden) * n) * 4 : 0,
             sums = qc_hessian_bytes(n, n_tokens),
             solve = (uint64_t)(n * n) * 4 + matrix_bytes(c, o, compute, stage, corrected, drift);
    return correction + qc_max_u64(sums, solve);
}

static bool rounds_inputs(const qc_convert_plan *plan)
{
    for (int64_t i = 0; i < plan->n_items; i++)
        if (plan->items[i].act_bits)
            return true;
    return false;
}

/* What the operations of any stage keep in the backend. */
static uint64_t scratch_bytes(const qc_convert_plan *plan, const qc_model *model, int64_t length,
                              const qc_backend *be)
{
    const qc_model_config *c = &model->config;
    uint64_t most = qc_forward_scratch_bytes(c, be->compute, be->n_threads, length);
    for (int stage = 0; stage < QC_N_STAGES; stage++) {
        int64_t n = qc_stage_width(c, (qc_stage)stage);
        if (qc_stage_in_any_layer(c, (qc_stage)stage))
            most = qc_max_u64(most, qc_gram_scratch_bytes(be->compute, be->n_threads, length, n, n));
    }
    for (int64_t i = 0; i < plan->n_items; i++) {
        const qc_convert_item *item = &plan->items[i];
        const qc_tensor_info *info = model->src->info(model->src, item->tensor);
        if (item->action == QC_ACTION_QUANTIZED && model->places[item->tensor].layer >= 0)
            most =
                qc_max_u64(most, qc_round_scratch_bytes(be->n_threads, qc_tensor_rows(info),
                                                        qc_tensor_cols(info), item->spec.grid.group_elems));
    }
    return most;
}

/* The most of any part of a layer. */
static uint64_t work_bytes(const qc_convert_plan *plan, const qc_model_config *c, const qc_corpus *corpus,
                           const qc_pipeline_options *o, qc_compute compute)
{
    uint64_t most = 0, experts = qc_layer_experts_bytes(c, corpus);
    if (o->fold.method != QC_FOLD_NONE) {
        qc_fold_options fold = o->fold;
        fold.gptq = o->gptq ? &o->gptq_options : NULL;
        most = qc_layer_fold_bytes(c, &fold, qc_pipeline_fold_tokens(corpus), rounds_inputs(plan));
    }
    for (int stage = 0; stage < QC_N_STAGES; stage++)
        if (qc_stage_in_any_layer(c, (qc_stage)stage))
            most = qc_max_u64(most, stage_bytes(c, o, compute, total_tokens(corpus), (qc_stage)stage) +
                                        (stage < QC_N_DENSE_STAGES ? 0 : experts));
    return most;
}

/* Nothing runs: H is loaded, or it and its factor lie beside a matrix. */
static uint64_t given_bytes(const qc_model_config *c, const qc_pipeline_options *o, qc_compute compute)
{
    uint64_t most = qc_given_stats_bytes(o->given);
    for (int stage = 0; stage < QC_N_STAGES; stage++)
        if (qc_stage_in_any_layer(c, (qc_stage)stage))
            most = qc_max_u64(most, stage_bytes(c, o, compute, 1, (qc_stage)stage));
    return most;
}

void qc_pipeline_plan_bytes(const qc_convert_plan *plan, const qc_model *model, const qc_corpus *corpus,
                            const qc_pipeline_options *options, const qc_backend *be, uint64_t *ret_full,
                            uint64_t *ret_least, uint64_t *ret_scratch)
{
    const qc_model_config *c = &model->config;
    uint64_t scratch = scratch_bytes(plan, model, options->given ? 0 : corpus->length, be);
    if (options->given) {
        *ret_scratch = 0;
        *ret_full = *ret_least = scratch + given_bytes(c, options, be->compute);
        return;
    }
    int64_t tokens = total_tokens(corpus), n_streams = options->correct > 0 ? 2 : 1;
    bool kept_in_file = qc_pipeline_keeps_in_file(c, corpus), folds = options->fold.method != QC_FOLD_NONE;
    uint64_t row = (uint64_t)(n_streams * c->hidden) * 4, window = (uint64_t)(corpus->length * widest(c)) * 4,
             narrow = (uint64_t)(corpus->length * c->hidden) * 4,
             kept = (uint64_t)(tokens * kept_width(c)) * 4, streams = (uint64_t)tokens * row,
             work = scratch + qc_workspace_bytes(c, corpus->length) +
                    (uint64_t)n_streams * qc_layer_bytes(c, be->compute) +
                    work_bytes(plan, c, corpus, options, be->compute) + (n_streams == 2 ? window : 0);
    *ret_scratch = streams + kept;
    /* staging and inputs of a stage; streams that are not spilled are worked on in place */
    *ret_least = work + 2 * window + (uint64_t)corpus->length * row;
    *ret_full = work + streams + (kept_in_file ? 2 * window : kept + narrow + (folds ? window : narrow));
}

int64_t qc_pipeline_fold_tokens(const qc_corpus *corpus)
{
    return fold_windows(corpus) * corpus->length;
}

bool qc_pipeline_keeps_in_file(const qc_model_config *config, const qc_corpus *corpus)
{
    return total_tokens(corpus) * kept_width(config) * (int64_t)sizeof(float) > KEPT_MAX_BYTES;
}

static int open_kept(qc_pipeline *p, int64_t tokens, bool spill, qc_err *err)
{
    int64_t width = kept_width(&p->model->config);
    if (!spill && qc_pipeline_keeps_in_file(&p->model->config, p->corpus) &&
        qc_stream_open(&p->kept, tokens, width, true, p->options->scratch_folder, NULL) == QC_OK)
        return QC_OK;
    return qc_stream_open(&p->kept, tokens, width, spill, p->options->scratch_folder, err);
}

static void count_work(qc_pipeline *p, int64_t tokens)
{
    const qc_model_config *c = &p->model->config;
    for (int layer = 0; layer < c->n_layers; layer++)
        for (int stage = 0; stage < QC_N_STAGES; stage++)
            if (qc_stage_present(c, layer, (qc_stage)stage))
                p->work_all += (double)qc_stage_width(c, (qc_stage)stage) * (double)tokens *
                               (double)(stage < QC_N_DENSE_STAGES ? 1
                                        : p->options->all_experts ? c->n_experts
                                                                  : c->n_chosen);
}

static int open_streams(qc_pipeline *p, bool spill, qc_err *err)
{
    const qc_model_config *c = &p->model->config;
    const qc_pipeline_options *o = p->options;
    int64_t n = p->corpus->length, tokens = total_tokens(p->corpus), w = widest(c);
    QC_TRY(qc_stream_open(&p->x, tokens, c->hidden, spill, o->scratch_folder, err));
    QC_TRY(open_kept(p, tokens, spill, err));
    if (o->correct > 0)
        QC_TRY(qc_stream_open(&p->x_ref, tokens, c->hidden, spill, o->scratch_folder, err));
    QC_TRY(qc_workspace_new(p->model, p->be, n, &p->ws, err));
    float **buffers[] = {&p->buffer_x, &p->buffer_u, &p->buffer_ref, &p->buffer_diff};
    for (int i = 0; i < (o->correct > 0 ? 4 : 2); i++)
        if (!(*buffers[i] = p->be->alloc(p->be, n * w, err)))
            return QC_E_RESOURCE;
    if (!(p->host = qc_alloc((size_t)(n * w), sizeof *p->host)))
        return qc_fail_nomem(err, "calibration", (unsigned long long)(n * w) * 4);
    count_work(p, tokens);
    return embed_all(p, err);
}

static int open_pipeline(qc_pipeline *p, qc_err *err)
{
    const qc_pipeline_options *o = p->options;
    uint64_t full, least, scratch;
    qc_pipeline_plan_bytes(p->plan, p->model, p->corpus, o, p->be, &full, &least, &scratch);
    if (o->memory_bytes && least > o->memory_bytes)
        return qc_fail(err, QC_E_RESOURCE, "calibration needs at least %llu MB, the memory cap is %llu MB",
                       (unsigned long long)(least / 1000000 + 1),
                       (unsigned long long)(o->memory_bytes / 1000000));
    if (!o->given)
        return open_streams(p, o->memory_bytes && full > o->memory_bytes, err);
    count_work(p, 1);
    return QC_OK;
}

static void close_pipeline(qc_pipeline *p)
{
    qc_stream_close(&p->x);
    qc_stream_close(&p->kept);
    qc_stream_close(&p->x_ref);
    qc_workspace_free(p->ws);
    float *buffers[] = {p->buffer_x, p->buffer_u, p->buffer_ref, p->buffer_diff};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++)
        if (buffers[i])
            p->be->free(p->be, buffers[i]);
    qc_free(p->host);
}

int qc_pipeline_run(const qc_convert_plan *plan, const qc_model *model, qc_backend *be,
                    const qc_corpus *corpus, const qc_pipeline_options *options, qc_journal *journal,
                    qc_err *err)
{
    qc_pipeline p = {.plan = plan,
                     .model = model,
                     .be = be,
                     .corpus = corpus,
                     .options = options,
                     .journal = journal,
                     .x.fd = -1,
                     .x_ref.fd = -1,
                     .kept.fd = -1};
    int rc = open_pipeline(&p, err);
    for (int layer = 0; layer < model->config.n_layers && rc == QC_OK; layer++)
        rc = run_layer(&p, layer, err);
    close_pipeline(&p);
    return rc;
}
