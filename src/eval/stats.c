/* From scores of tokens to figures. Standard errors are the larger of the plain one and the one clustered by
 * window, because tokens of a window are not independent (Miller 2024, "Adding error bars to evals");
 * intervals take the means of windows as the independent values and Student's t. */
#include "qc_dist.h"
#include "eval.h"

#include "qc_alloc.h"
#include "qc_math.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PLACES = 16 };

typedef struct figures {
    const qc_token_score *scores;
    const qc_windows *w;
    int64_t n_windows, n;
    bool paired;
    double *x; /* [n] values of one quantity */
} figures;

/* Mean of x with its errors, over all tokens and clustered by window. */
typedef struct moments {
    double mean, se, low, high;
} moments;

static int64_t scored_in(const qc_windows *w, int64_t window)
{
    return w->lengths[window] - (w->first ? w->first[window] : 1);
}

static double sum_of(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i];
    return sum;
}

/* Standard error of the mean as a ratio of sums over windows: sqrt(W / (W - 1) sum (n_w (mean_w - mean))^2) /
 * n; that of the window means where all windows are alike. */
static double clustered_error(const figures *f, double mean)
{
    double ss = 0, w = (double)f->n_windows;
    int64_t at = 0;
    for (int64_t i = 0; i < f->n_windows; i++) {
        int64_t n = scored_in(f->w, i);
        double d = sum_of(f->x + at, n) - (double)n * mean;
        ss += d * d;
        at += n;
    }
    return f->n_windows > 1 ? sqrt(ss * w / (w - 1)) / (double)f->n : NAN;
}

static moments moments_of(const figures *f)
{
    double n = (double)f->n, mean = sum_of(f->x, f->n) / n, ss = 0;
    for (int64_t i = 0; i < f->n; i++)
        ss += (f->x[i] - mean) * (f->x[i] - mean);
    double plain = f->n > 1 ? sqrt(ss / (n - 1) / n) : NAN, clustered = clustered_error(f, mean);
    double half = clustered * qc_t_quantile(0.975, (double)(f->n_windows - 1));
    return (moments){mean, clustered > plain ? clustered : plain, mean - half, mean + half};
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Mean, errors and percentiles of f->x, which is sorted afterwards. */
static qc_spread spread_of(figures *f)
{
    moments m = moments_of(f);
    qc_spread s = {.mean = m.mean, .se = m.se, .low = m.low, .high = m.high};
    qsort(f->x, (size_t)f->n, sizeof *f->x, compare_doubles);
    for (int i = 0; i < QC_N_PERCENTS; i++) {
        double at = qc_percents[i] / 100 * (double)(f->n - 1);
        int64_t k = (int64_t)at;
        double frac = at - (double)k;
        s.at[i] = k + 1 < f->n ? (1 - frac) * f->x[k] + frac * f->x[k + 1] : f->x[k];
    }
    return s;
}

/* ---- quantities of one token ---- */

/* The model's scores are the b-side of a pair and the a-side alone. */
static double model_nll(const qc_token_score *s, bool paired)
{
    return (double)(paired ? s->nll_b : s->nll_a);
}

static double delta_p(const qc_token_score *s)
{
    return exp(-(double)s->nll_b) - exp(-(double)s->nll_a);
}

typedef enum {
    NLL_MODEL,
    NLL_REFERENCE,
    DELTA_NLL,
    KLD,
    DELTA_P,
    DELTA_P_SQUARED,
    TOP1,
    FLIP_LOST,
    FLIP_WON
} quantity;

static void fill(figures *f, quantity q)
{
    for (int64_t i = 0; i < f->n; i++) {
        const qc_token_score *s = &f->scores[i];
        bool a = s->top_a == s->target, b = s->top_b == s->target;
        double dp;
        switch (q) {
        case NLL_MODEL:
            f->x[i] = model_nll(s, f->paired);
            break;
        case NLL_REFERENCE:
            f->x[i] = (double)s->nll_a;
            break;
        case DELTA_NLL:
            f->x[i] = (double)s->nll_b - (double)s->nll_a;
            break;
        case KLD:
            f->x[i] = (double)s->kld;
            break;
        case DELTA_P:
            f->x[i] = delta_p(s);
            break;
        case DELTA_P_SQUARED:
            dp = delta_p(s);
            f->x[i] = dp * dp;
            break;
        case TOP1:
            f->x[i] = s->top_a == s->top_b;
            break;
        case FLIP_LOST:
            f->x[i] = a && !b;
            break;
        case FLIP_WON:
            f->x[i] = b && !a;
            break;
        }
    }
}

static moments measure(figures *f, quantity q)
{
    fill(f, q);
    return moments_of(f);
}

/* ---- windows, places, bins ---- */

static void sum_windows(const figures *f, qc_window_result *ret)
{
    const qc_token_score *s = f->scores;
    for (int64_t i = 0; i < f->n_windows; i++) {
        qc_window_result *r = &ret[i];
        *r = (qc_window_result){.tokens_scored = scored_in(f->w, i),
                                .nll_reference = f->paired ? 0 : NAN,
                                .kld = f->paired ? 0 : NAN};
        for (int64_t t = 0; t < r->tokens_scored; t++, s++) {
            r->nll += model_nll(s, f->paired);
            if (f->paired) {
                r->nll_reference += (double)s->nll_a;
                r->kld += (double)s->kld;
                r->top1_agree += s->top_a == s->top_b;
            }
        }
    }
}

/* Equal ranges of the places in a window where tokens are scored. */
static void sum_places(const figures *f, qc_place_result *ret, int64_t n_places, int64_t first, int64_t last)
{
    int64_t n = last - first + 1;
    for (int64_t p = 0; p < n_places; p++)
        ret[p] = (qc_place_result){.first = first + p * n / n_places,
                                   .last = first + (p + 1) * n / n_places - 1,
                                   .nll_reference = f->paired ? 0 : NAN,
                                   .kld = f->paired ? 0 : NAN,
                                   .top1 = f->paired ? 0 : NAN};
    const qc_token_score *s = f->scores;
    for (int64_t i = 0; i < f->n_windows; i++)
        for (int64_t place = f->w->lengths[i] - scored_in(f->w, i), p = 0; place < f->w->lengths[i];
             place++, s++) {
            while (ret[p].last < place)
                p++;
            qc_place_result *r = &ret[p];
            r->tokens_scored++;
            r->nll += model_nll(s, f->paired);
            r->nll_reference += (double)s->nll_a; /* NaN stays NaN */
            r->kld += (double)s->kld;
            r->top1 += s->top_a == s->top_b;
        }
    for (int64_t p = 0; p < n_places; p++) {
        qc_place_result *r = &ret[p];
        double k = (double)r->tokens_scored;
        r->nll = k > 0 ? r->nll / k : NAN;
        r->nll_reference = k > 0 ? r->nll_reference / k : NAN;
        r->kld = k > 0 ? r->kld / k : NAN;
        r->top1 = k > 0 ? r->top1 / k : NAN;
    }
}

static int add_places(const figures *f, qc_evaluation *e, qc_err *err)
{
    int64_t first = INT64_MAX, last = 0;
    for (int64_t i = 0; i < f->n_windows; i++) {
        first = qc_min_i64(first, f->w->lengths[i] - scored_in(f->w, i));
        last = qc_max_i64(last, f->w->lengths[i] - 1);
    }
    e->n_places = qc_min_i64(MAX_PLACES, last - first + 1);
    e->per_place = qc_alloc((size_t)e->n_places, sizeof *e->per_place);
    if (!e->per_place)
        return qc_fail_nomem(err, "evaluation", (unsigned long long)e->n_places * sizeof *e->per_place);
    sum_places(f, e->per_place, e->n_places, first, last);
    return QC_OK;
}

static void count_klds(const figures *f, int64_t ret[QC_N_KLD_BINS])
{
    for (int64_t i = 0; i < f->n; i++) {
        double kld = (double)f->scores[i].kld;
        double at = kld > 0 ? (log10(kld) - QC_KLD_LOG10_FROM) / QC_KLD_LOG10_STEP : 0;
        ret[at < 0 ? 0 : at >= QC_N_KLD_BINS ? QC_N_KLD_BINS - 1 : (int)at]++;
    }
}

/* ---- all of them ---- */

static double correlation(const figures *f, double mean_a, double mean_b)
{
    double aa = 0, bb = 0, ab = 0;
    for (int64_t i = 0; i < f->n; i++) {
        double a = (double)f->scores[i].nll_a - mean_a, b = (double)f->scores[i].nll_b - mean_b;
        aa += a * a;
        bb += b * b;
        ab += a * b;
    }
    return ab / sqrt(aa * bb);
}

static void summarize_pair(figures *f, qc_evaluation *e)
{
    moments reference = measure(f, NLL_REFERENCE), delta = measure(f, DELTA_NLL), top = measure(f, TOP1);
    e->ppl_reference = exp(reference.mean);
    e->ppl_reference_se = e->ppl_reference * reference.se;
    e->nll_correlation = correlation(f, reference.mean, e->nll_mean);
    e->delta_nll = delta.mean;
    e->delta_nll_se = delta.se;
    e->delta_nll_low = delta.low;
    e->delta_nll_high = delta.high;
    e->ppl_ratio = exp(delta.mean);
    e->ppl_ratio_se = e->ppl_ratio * delta.se;
    e->top1 = top.mean;
    e->top1_se = top.se;
    e->flips_lost = measure(f, FLIP_LOST).mean;
    e->flips_won = measure(f, FLIP_WON).mean;
    e->flips = e->flips_lost + e->flips_won;
    fill(f, KLD);
    e->kld = spread_of(f);
    e->kld_mean = e->kld.mean;
    e->kld_p99 = e->kld.at[QC_N_PERCENTS - 3];
    e->kld_max = e->kld.at[QC_N_PERCENTS - 1];
    moments squared = measure(f, DELTA_P_SQUARED);
    e->delta_p_rms = sqrt(squared.mean);
    e->delta_p_rms_se = squared.mean > 0 ? squared.se / (2 * e->delta_p_rms) : 0;
    fill(f, DELTA_P);
    e->delta_p = spread_of(f);
    count_klds(f, e->kld_counts);
}

int qc_summarize(const qc_token_score *scores, const qc_windows *windows, int64_t n_windows, bool paired,
                 qc_evaluation *ret, qc_err *err)
{
    qc_evaluation *e = ret;
    figures f = {.scores = scores,
                 .w = windows,
                 .n_windows = n_windows,
                 .n = qc_windows_scored(windows, n_windows),
                 .paired = paired};
    e->protocol = qc_strdup(qc_protocol_name(windows->protocol));
    e->per_window = qc_alloc((size_t)n_windows, sizeof *e->per_window);
    f.x = qc_alloc((size_t)f.n, sizeof *f.x);
    if (!e->protocol || !e->per_window || !f.x) {
        qc_free(f.x);
        return qc_fail_nomem(err, "evaluation", (unsigned long long)f.n * sizeof *f.x);
    }
    e->windows = n_windows;
    e->length = windows->length;
    e->stride = windows->stride ? windows->stride : windows->length;
    e->bos = windows->bos;
    e->plain_special = windows->plain_special;
    e->special_ids = windows->n_special;
    e->tokens_text = windows->n_text_ids;
    e->tokens_scored = f.n;
    sum_windows(&f, e->per_window);
    moments nll = measure(&f, NLL_MODEL);
    e->nll_mean = nll.mean;
    e->ppl = exp(nll.mean);
    e->ppl_se = e->ppl * nll.se;
    if (paired)
        summarize_pair(&f, e);
    qc_free(f.x);
    return add_places(&f, e, err);
}
