#include "report_eval.h"

#include "report.h"

#include <math.h>
#include <stdio.h>

static void add_windows(cJSON *out, const qc_evaluation *e)
{
    cJSON *list = cJSON_AddArrayToObject(out, "per_window");
    for (int64_t i = 0; e->per_window && i < e->windows; i++) {
        const qc_window_result *w = &e->per_window[i];
        double n = (double)w->tokens_scored;
        cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
        qc_json_add_number(item, "tokens", n);
        qc_json_add_number(item, "nll", w->nll / n);
        qc_json_add_number(item, "nll_reference", w->nll_reference / n);
        qc_json_add_number(item, "kld", w->kld / n);
        qc_json_add_number(item, "top1", isfinite(w->kld) ? (double)w->top1_agree / n : NAN);
    }
}

static void add_places(cJSON *out, const qc_evaluation *e)
{
    cJSON *list = cJSON_AddArrayToObject(out, "per_place");
    for (int64_t i = 0; i < e->n_places; i++) {
        const qc_place_result *p = &e->per_place[i];
        cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
        qc_json_add_number(item, "first", (double)p->first);
        qc_json_add_number(item, "last", (double)p->last);
        qc_json_add_number(item, "tokens", (double)p->tokens_scored);
        qc_json_add_number(item, "nll", p->nll);
        qc_json_add_number(item, "nll_reference", p->nll_reference);
        qc_json_add_number(item, "kld", p->kld);
        qc_json_add_number(item, "top1", p->top1);
    }
}

/* Members p0, p0.1 .. p100. */
static void add_percentiles(cJSON *out, const char *key, const qc_spread *s)
{
    cJSON *item = cJSON_AddObjectToObject(out, key);
    for (int i = 0; i < QC_N_PERCENTS; i++) {
        char name[16];
        snprintf(name, sizeof name, "p%g", qc_percents[i]);
        qc_json_add_number(item, name, s->at[i]);
    }
}

static void add_histogram(cJSON *out, const qc_evaluation *e)
{
    cJSON *item = cJSON_AddObjectToObject(out, "kld_histogram");
    qc_json_add_number(item, "log10_from", QC_KLD_LOG10_FROM);
    qc_json_add_number(item, "log10_step", QC_KLD_LOG10_STEP);
    cJSON *counts = cJSON_AddArrayToObject(item, "counts");
    for (int i = 0; i < QC_N_KLD_BINS; i++)
        qc_json_add_item(counts, cJSON_CreateNumber((double)e->kld_counts[i]));
}

static void add_pair(cJSON *out, const qc_evaluation *e)
{
    qc_json_add_number(out, "ppl_reference_se", e->ppl_reference_se);
    qc_json_add_number(out, "ppl_ratio_se", e->ppl_ratio_se);
    qc_json_add_number(out, "nll_correlation", e->nll_correlation);
    qc_json_add_number(out, "delta_nll_low", e->delta_nll_low);
    qc_json_add_number(out, "delta_nll_high", e->delta_nll_high);
    qc_json_add_number(out, "kld_mean_se", e->kld.se);
    qc_json_add_number(out, "kld_mean_low", e->kld.low);
    qc_json_add_number(out, "kld_mean_high", e->kld.high);
    add_percentiles(out, "kld_percentiles", &e->kld);
    add_histogram(out, e);
    qc_json_add_number(out, "delta_p_mean", e->delta_p.mean);
    qc_json_add_number(out, "delta_p_mean_se", e->delta_p.se);
    add_percentiles(out, "delta_p_percentiles", &e->delta_p);
    qc_json_add_number(out, "delta_p_rms", e->delta_p_rms);
    qc_json_add_number(out, "delta_p_rms_se", e->delta_p_rms_se);
    qc_json_add_number(out, "top1_se", e->top1_se);
    qc_json_add_number(out, "flips", e->flips);
    qc_json_add_number(out, "flips_lost", e->flips_lost);
    qc_json_add_number(out, "flips_won", e->flips_won);
}

static void add_noise(cJSON *out, const qc_noise_floor *n)
{
    cJSON *item = cJSON_AddObjectToObject(out, "noise_floor");
    qc_json_add_number(item, "windows", (double)n->windows);
    qc_json_add_number(item, "threads", n->threads);
    qc_json_add_number(item, "other_threads", n->other_threads);
    qc_json_add_number(item, "threads_kld_max", n->threads_kld_max);
    qc_json_add_text(item, "compute", n->compute);
    qc_json_add_text(item, "other_compute", n->other_compute);
    qc_json_add_number(item, "kld_mean", n->kld_mean);
    qc_json_add_number(item, "kld_p99", n->kld_p99);
    qc_json_add_number(item, "delta_nll", n->delta_nll);
    qc_json_add_number(item, "top1", n->top1);
}

static void add_decisions(cJSON *out, const qc_evaluation *e)
{
    cJSON *list = e->n_decisions ? cJSON_AddArrayToObject(out, "decisions") : NULL;
    for (int i = 0; i < e->n_decisions; i++) {
        const qc_decision *d = &e->decisions[i];
        cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
        qc_json_add_text(item, "gate", d->gate);
        qc_json_add_number(item, "limit", d->limit);
        qc_json_add_number(item, "value", d->value);
        qc_json_add_number(item, "statistic", d->statistic);
        qc_json_add_number(item, "boundary", d->boundary);
        qc_json_add_number(item, "windows", (double)d->windows);
        qc_json_add_text(item, "outcome", d->outcome);
    }
}

cJSON *qc_report_eval_json(const qc_evaluation *e)
{
    cJSON *out = cJSON_CreateObject();
    qc_json_add_text(out, "protocol", e->protocol);
    qc_json_add_text(out, "text", e->text);
    if (e->reference)
        qc_json_add_text(out, "reference", e->reference);
    qc_json_add_number(out, "windows", (double)e->windows);
    qc_json_add_number(out, "length", (double)e->length);
    qc_json_add_number(out, "stride", (double)e->stride);
    cJSON_AddBoolToObject(out, "bos", e->bos);
    cJSON_AddBoolToObject(out, "plain_special", e->plain_special);
    qc_json_add_number(out, "special_ids", (double)e->special_ids);
    qc_json_add_number(out, "tokens_text", (double)e->tokens_text);
    qc_json_add_number(out, "tokens_scored", (double)e->tokens_scored);
    qc_json_add_text(out, "text_sha256", e->text_sha256);
    qc_json_add_text(out, "ids_sha256", e->ids_sha256);
    qc_json_add_number(out, "ppl", e->ppl);
    qc_json_add_number(out, "ppl_se", e->ppl_se);
    qc_json_add_number(out, "ppl_reference", e->ppl_reference);
    qc_json_add_number(out, "ppl_ratio", e->ppl_ratio);
    qc_json_add_number(out, "delta_nll", e->delta_nll);
    qc_json_add_number(out, "delta_nll_se", e->delta_nll_se);
    qc_json_add_number(out, "kld_mean", e->kld_mean);
    qc_json_add_number(out, "kld_p99", e->kld_p99);
    qc_json_add_number(out, "kld_max", e->kld_max);
    qc_json_add_number(out, "top1", e->top1);
    if (!isnan(e->ppl_reference))
        add_pair(out, e);
    add_decisions(out, e);
    if (e->noise.windows)
        add_noise(out, &e->noise);
    add_windows(out, e);
    add_places(out, e);
    return out;
}

cJSON *qc_report_evaluation(const qc_evaluation *e)
{
    qc_json_watch();
    return qc_json_watched(qc_report_eval_json(e));
}

int qc_report_evaluation_details(const qc_evaluation *e, qc_buf *ret, qc_err *err)
{
    if (e->noise.windows)
        QC_TRY(qc_buf_printf(
            ret, err,
            "  noise floor   %s against %s: KL divergence mean %.3g, p99 %.3g, delta NLL %+.3g; "
            "%d against %d threads: at most %.3g (%lld windows)\n",
            e->noise.other_compute, e->noise.compute, e->noise.kld_mean, e->noise.kld_p99, e->noise.delta_nll,
            e->noise.other_threads, e->noise.threads, e->noise.threads_kld_max, (long long)e->noise.windows));
    if (isnan(e->ppl_reference))
        return QC_OK;
    QC_TRY(qc_buf_printf(ret, err,
                         "  intervals     delta NLL %+.6f to %+.6f, KL divergence %.6f to %.6f (95 %%)\n",
                         e->delta_nll_low, e->delta_nll_high, e->kld.low, e->kld.high));
    QC_TRY(qc_buf_printf(ret, err,
                         "  true token    delta p %+.3f +- %.3f %%, RMS %.3f +- %.3f %%; on top in the "
                         "reference alone %.2f %%, "
                         "in the model alone %.2f %%\n",
                         100 * e->delta_p.mean, 100 * e->delta_p.se, 100 * e->delta_p_rms,
                         100 * e->delta_p_rms_se, 100 * e->flips_lost, 100 * e->flips_won));
    QC_TRY(qc_buf_printf(ret, err, "  percentile    KL divergence   delta p (%%)\n"));
    for (int i = QC_N_PERCENTS - 1; i >= 0; i--)
        QC_TRY(qc_buf_printf(ret, err, "    %-9g   %13.6f   %11.3f\n", qc_percents[i], e->kld.at[i],
                             100 * e->delta_p.at[i]));
    return QC_OK;
}
