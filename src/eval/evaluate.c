#include "eval.h"

#include "qc_alloc.h"
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

static int score_group(evaluation *v, qc_err *err)
{
    const qc_windows *w = v->windows;
    qc_eval_options options = v->options ? *v->options : (qc_eval_options){0};
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
    if (rc == QC_OK)
        v->n_done += v->n_next;
    return rc;
}

static int score_windows(evaluation *v, qc_err *err)
{
    v->n_next = v->windows->n_windows;
    return score_group(v, err);
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
    int rc = score_windows(&v, err);
    if (rc == QC_OK)
        rc = qc_summarize(v.scores, windows, v.n_done, reference != NULL, &e, err);
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
