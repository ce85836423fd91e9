#include "decide.h"
#include "reference_internal.h"

#include "qc_alloc.h"
#include "qc_math.h"
#include "qc_time.h"

#include <string.h>

/* Windows go through the walk in groups: all at once where nothing asks for less. */
typedef struct evaluation {
    qc_backend *be;
    const qc_model *reference, *model;
    const qc_windows *windows;
    const qc_eval_options *options; /* may be NULL */
    qc_token_score *scores;         /* of all windows */
    int64_t n_done;                 /* windows that are scored */
    int64_t n_next;                 /* of the group in work */
} evaluation;

static void group_progress(void *ctx, double fraction)
{
    const evaluation *v = ctx;
    double done = (double)v->n_done + fraction * (double)v->n_next;
    v->options->progress(v->options->progress_ctx, done / (double)v->windows->n_windows);
}

static int make_targets(const evaluation *v, qc_eval_target **ret, qc_err *err)
{
    const qc_windows *w = v->windows;
    int64_t n = qc_windows_scored(w, v->n_done + v->n_next) - qc_windows_scored(w, v->n_done);
    qc_eval_target *t = *ret = qc_alloc((size_t)n, sizeof *t);
    if (!t)
        return qc_fail_nomem(err, "positions to score", (unsigned long long)n * sizeof *t);
    const int32_t *ids = w->ids + qc_windows_ids(w, v->n_done);
    int64_t at = 0;
    for (int64_t i = v->n_done; i < v->n_done + v->n_next; at += w->lengths[i++])
        for (int64_t k = w->first ? w->first[i] : 1; k < w->lengths[i]; k++)
            *t++ = (qc_eval_target){.position = at + k - 1, .id = ids[at + k]};
    return QC_OK;
}

/* Score the next v->n_next windows; tap may be NULL. */
static int score_group(evaluation *v, const qc_logit_tap *tap, uint64_t tap_bytes, qc_err *err)
{
    const qc_windows *w = v->windows;
    qc_eval_options options = v->options ? *v->options : (qc_eval_options){0};
    options.tap = tap;
    if (options.memory_bytes)
        options.memory_bytes = options.memory_bytes > tap_bytes ? options.memory_bytes - tap_bytes : 1;
    if (options.progress) {
        options.progress = group_progress;
        options.progress_ctx = v;
    }
    qc_eval_target *targets;
    int64_t done = qc_windows_scored(w, v->n_done);
    QC_TRY(make_targets(v, &targets, err));
    qc_sequences seqs = {.ids = w->ids + qc_windows_ids(w, v->n_done),
                         .lengths = w->lengths + v->n_done,
                         .n_sequences = v->n_next,
                         .targets = targets,
                         .n_targets = qc_windows_scored(w, v->n_done + v->n_next) - done};
    int rc = qc_eval_tokens(v->be, v->reference ? v->reference : v->model, v->reference ? v->model : NULL,
                            &seqs, &options, v->scores + done, err);
    qc_free(targets);
    return rc;
}

/* The same while the scores are stored as a reference. */
static int store_group(evaluation *v, qc_err *err)
{
    qc_reference_writer *storing = v->options->storing;
    int64_t keep, drawn, done = qc_windows_scored(v->windows, v->n_done),
                         n = qc_windows_scored(v->windows, v->n_done + v->n_next) - done;
    const qc_model_config *c = &v->model->config;
    qc_kept kept;
    qc_keeper *keeper = NULL;
    qc_reference_sizes(storing, &keep, &drawn);
    int rc = qc_kept_alloc(n, keep, drawn, &kept, err);
    if (rc == QC_OK)
        rc = qc_keeper_new(&kept, c->vocab, c->final_softcap, done, &keeper, err);
    if (rc == QC_OK) {
        qc_logit_tap tap = qc_keeper_tap(keeper);
        rc = score_group(v, &tap, qc_keeper_bytes(n, keep), err);
    }
    if (rc == QC_OK)
        rc = qc_reference_put(storing, &kept, v->n_next, err);
    qc_keeper_free(keeper);
    qc_kept_clear(&kept);
    return rc;
}

/* The same against a stored reference. */
static int compare_group(evaluation *v, qc_err *err)
{
    qc_kept kept;
    qc_comparer comparer = {0};
    int rc = qc_reference_get(v->options->stored, v->windows, v->n_done, v->n_next, &kept, err);
    if (rc == QC_OK)
        rc = qc_comparer_init(&kept, v->model->config.final_softcap, &comparer, err);
    if (rc == QC_OK) {
        qc_logit_tap tap = qc_comparer_tap(&comparer);
        rc = score_group(v, &tap, (uint64_t)kept.n * (uint64_t)(kept.keep + kept.drawn) * 12, err);
    }
    qc_comparer_clear(&comparer);
    qc_kept_clear(&kept);
    return rc;
}

/* Positions that are in work at once where values are kept of each: at 16 KiB per position 128 MiB. */
enum { GROUP_POSITIONS = 8192 };

static int64_t group_size(const evaluation *v, bool limited)
{
    int64_t n = 0, done = qc_windows_scored(v->windows, v->n_done);
    while (v->n_done + n < v->windows->n_windows &&
           (n == 0 || !limited || qc_windows_scored(v->windows, v->n_done + n + 1) - done <= GROUP_POSITIONS))
        n++;
    return n;
}

/* Score windows up to number `end`. */
static int score_up_to(evaluation *v, int64_t end, qc_err *err)
{
    bool storing = v->options && v->options->storing, stored = v->options && v->options->stored;
    while (v->n_done < end) {
        v->n_next = qc_min_i64(group_size(v, storing || stored), end - v->n_done);
        QC_TRY(storing ? store_group(v, err) : stored ? compare_group(v, err) : score_group(v, NULL, 0, err));
        v->n_done += v->n_next;
    }
    return QC_OK;
}

static int score_windows(evaluation *v, qc_err *err)
{
    qc_decider *decider = v->options ? v->options->decider : NULL;
    if (!decider)
        return score_up_to(v, v->windows->n_windows, err);
    do
        QC_TRY(score_up_to(v, qc_decider_next(decider), err));
    while (!qc_decider_look(decider, v->scores, v->windows));
    return QC_OK;
}

int qc_evaluate(qc_backend *be, const qc_model *reference, const qc_model *model, const qc_windows *windows,
                const qc_eval_options *options, qc_evaluation *ret, qc_err *err)
{
    double start = qc_now_seconds();
    evaluation v = {.be = be, .reference = reference, .model = model, .windows = windows, .options = options};
    int64_t n = qc_windows_scored(windows, windows->n_windows);
    if (!(v.scores = qc_alloc((size_t)n, sizeof *v.scores)))
        return qc_fail_nomem(err, "token scores", (unsigned long long)n * sizeof *v.scores);
    qc_evaluation e;
    qc_evaluation_init(&e);
    bool paired = reference || (options && options->stored);
    int rc = score_windows(&v, err);
    if (rc == QC_OK)
        rc = qc_summarize(v.scores, windows, v.n_done, paired, &e, err);
    if (rc == QC_OK && options && options->decider)
        rc = qc_decider_outcome(options->decider, &e.decisions, &e.n_decisions, err);
    if (rc == QC_OK)
        rc = qc_ids_sha256(windows->ids, qc_windows_ids(windows, v.n_done), e.ids_sha256, err);
    qc_free(v.scores);
    e.seconds = qc_now_seconds() - start;
    if (rc == QC_OK)
        *ret = e;
    else
        qc_evaluation_clear(&e);
    return rc;
}
