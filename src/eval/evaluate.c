#include "eval.h"

#include "qc_alloc.h"
#include "qc_time.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int compare_floats(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Percentile p (0 .. 1) of n >= 1 values by linear interpolation between order statistics; sorts x. */
static double percentile(float *x, int64_t n, double p)
{
    qsort(x, (size_t)n, sizeof *x, compare_floats);
    double at = p * (double)(n - 1);
    int64_t i = (int64_t)at;
    double frac = at - (double)i;
    return i + 1 < n ? (1 - frac) * (double)x[i] + frac * (double)x[i + 1] : (double)x[i];
}

/* The model's scores are the b-side of a pair and the a-side alone. */
static float model_nll(const qc_token_score *s, bool paired)
{
    return paired ? s->nll_b : s->nll_a;
}

static void sum_windows(const qc_token_score *scores, const qc_windows *w, bool paired, qc_window_result *ret)
{
    for (int64_t i = 0; i < w->n_windows; i++) {
        qc_window_result *r = &ret[i];
        *r = (qc_window_result){
            .tokens_scored = w->length - 1, .nll_reference = paired ? 0 : NAN, .kld = paired ? 0 : NAN};
        for (int64_t t = 0; t < w->length - 1; t++) {
            const qc_token_score *s = scores + i * (w->length - 1) + t;
            r->nll += model_nll(s, paired);
            if (paired) {
                r->nll_reference += s->nll_a;
                r->kld += s->kld;
                r->top1_agree += s->top_a == s->top_b;
            }
        }
    }
}

/* Standard error of the mean of d = nll - nll_reference: token-wise, and clustered by window because tokens
 * of a window are not independent; the larger counts (Miller 2024, "Adding error bars to evals"). */
static double delta_error(const qc_token_score *scores, const qc_evaluation *e, double mean)
{
    double ss = 0, sw = 0;
    int64_t n = e->tokens_scored;
    for (int64_t i = 0; i < n; i++) {
        double d = (double)scores[i].nll_b - (double)scores[i].nll_a - mean;
        ss += d * d;
    }
    double se = n > 1 ? sqrt(ss / (double)(n - 1) / (double)n) : NAN;
    for (int64_t i = 0; i < e->windows; i++) {
        const qc_window_result *r = &e->per_window[i];
        double d = (r->nll - r->nll_reference) / (double)r->tokens_scored - mean;
        sw += d * d;
    }
    if (e->windows > 1) {
        double clustered = sqrt(sw / (double)(e->windows - 1) / (double)e->windows);
        se = clustered > se ? clustered : se;
    }
    return se;
}

static int summarize_pair(const qc_token_score *scores, qc_evaluation *e, qc_err *err)
{
    int64_t n = e->tokens_scored, agree = 0;
    double nll_reference = 0, kld = 0;
    for (int64_t i = 0; i < e->windows; i++) {
        nll_reference += e->per_window[i].nll_reference;
        kld += e->per_window[i].kld;
        agree += e->per_window[i].top1_agree;
    }
    float *sorted = qc_alloc((size_t)n, sizeof *sorted);
    if (!sorted)
        return qc_fail_nomem(err, "KL divergences", (unsigned long long)n * 4);
    for (int64_t i = 0; i < n; i++)
        sorted[i] = scores[i].kld;
    e->kld_p99 = percentile(sorted, n, 0.99);
    e->kld_max = sorted[n - 1];
    qc_free(sorted);
    e->ppl_reference = exp(nll_reference / (double)n);
    e->delta_nll = e->nll_mean - nll_reference / (double)n;
    e->ppl_ratio = exp(e->delta_nll);
    e->delta_nll_se = delta_error(scores, e, e->delta_nll);
    e->kld_mean = kld / (double)n;
    e->top1 = (double)agree / (double)n;
    return QC_OK;
}

static int summarize(const qc_token_score *scores, const qc_windows *w, bool paired, qc_evaluation *e,
                     qc_err *err)
{
    e->protocol = qc_strdup("gptq");
    e->per_window = qc_alloc((size_t)w->n_windows, sizeof *e->per_window);
    if (!e->protocol || !e->per_window)
        return qc_fail_nomem(err, "evaluation", (unsigned long long)w->n_windows * sizeof *e->per_window);
    e->windows = w->n_windows;
    e->length = e->stride = w->length;
    e->bos = w->bos;
    e->plain_special = w->plain_special;
    e->special_ids = w->n_special;
    e->tokens_text = w->n_text_ids;
    e->tokens_scored = w->n_windows * (w->length - 1);
    memcpy(e->ids_sha256, w->ids_sha256, sizeof e->ids_sha256);
    sum_windows(scores, w, paired, e->per_window);
    double nll = 0;
    for (int64_t i = 0; i < e->windows; i++)
        nll += e->per_window[i].nll;
    e->nll_mean = nll / (double)e->tokens_scored;
    e->ppl = exp(e->nll_mean);
    return paired ? summarize_pair(scores, e, err) : QC_OK;
}

int qc_evaluate(qc_backend *be, const qc_model *reference, const qc_model *model, const qc_windows *windows,
                const qc_eval_options *options, qc_evaluation *ret, qc_err *err)
{
    double start = qc_now_seconds();
    qc_sequences seqs = {.ids = windows->ids, .lengths = windows->lengths, .n_sequences = windows->n_windows};
    int64_t n = windows->n_windows * (windows->length - 1);
    qc_token_score *scores = qc_alloc((size_t)n, sizeof *scores);
    if (!scores)
        return qc_fail_nomem(err, "token scores", (unsigned long long)n * sizeof *scores);
    qc_evaluation e;
    qc_evaluation_init(&e);
    int rc = qc_eval_tokens(be, reference ? reference : model, reference ? model : NULL, &seqs, options,
                            scores, err);
    if (rc == QC_OK)
        rc = summarize(scores, windows, reference != NULL, &e, err);
    qc_free(scores);
    e.seconds = qc_now_seconds() - start;
    if (rc == QC_OK)
        *ret = e;
    else
        qc_evaluation_clear(&e);
    return rc;
}
