/* Label tasks as json and text. */
#include "qc_json.h"
#include "report.h"

#include <math.h>
#include <string.h>

static void add_score(cJSON *out, const char *key, const qc_label_score *s)
{
    cJSON *item = cJSON_AddObjectToObject(out, key);
    qc_json_add_number(item, "accuracy", s->accuracy);
    qc_json_add_number(item, "accuracy_se", s->accuracy_se);
    qc_json_add_number(item, "macro_f1", s->macro_f1);
}

static void add_pair(cJSON *out, const char *key, const qc_label_pair *p, int64_t n)
{
    cJSON *item = cJSON_AddObjectToObject(out, key);
    qc_json_add_number(item, "accuracy_delta", p->delta);
    qc_json_add_number(item, "accuracy_delta_low", p->low);
    qc_json_add_number(item, "accuracy_delta_high", p->high);
    qc_json_add_number(item, "flips", (double)(p->lost + p->won) / (double)n);
    qc_json_add_number(item, "flips_lost", (double)p->lost);
    qc_json_add_number(item, "flips_won", (double)p->won);
    qc_json_add_number(item, "changed", (double)p->changed / (double)n);
    qc_json_add_number(item, "mcnemar_p", p->mcnemar_p);
}

static void add_list(cJSON *out, const char *key, const int32_t *list, int64_t n)
{
    cJSON *array = list ? cJSON_AddArrayToObject(out, key) : NULL;
    for (int64_t i = 0; list && i < n; i++)
        qc_json_add_item(array, cJSON_CreateNumber(list[i]));
}

/* A list per item. */
static void add_log_p(cJSON *out, const char *key, const qc_label_result *r, const double *log_p)
{
    cJSON *items = log_p ? cJSON_AddArrayToObject(out, key) : NULL;
    for (int64_t i = 0; log_p && i < r->n_items; log_p += r->n_choices[i], i++)
        qc_json_add_item(items, cJSON_CreateDoubleArray(log_p, r->n_choices[i]));
}

cJSON *qc_report_labels(const qc_label_result *r)
{
    qc_json_watch();
    cJSON *out = cJSON_CreateObject();
    cJSON_AddStringToObject(out, "task", r->task);
    cJSON_AddStringToObject(out, "data", r->data);
    cJSON_AddStringToObject(out, "data_sha256", r->data_sha256);
    qc_json_add_number(out, "items", (double)r->n_items);
    qc_json_add_number(out, "rows", (double)r->n_rows);
    qc_json_add_number(out, "tokens", (double)r->tokens);
    add_score(out, "model", &r->model);
    if (r->has_reference) {
        add_score(out, "reference", &r->reference);
        add_pair(out, "pair", &r->pair, r->n_items);
    }
    if (r->has_calibrated)
        add_score(out, "model_calibrated", &r->model_calibrated);
    if (r->has_calibrated && r->has_reference) {
        add_score(out, "reference_calibrated", &r->reference_calibrated);
        add_pair(out, "pair_calibrated", &r->pair_calibrated, r->n_items);
    }
    cJSON *rows = r->n_items < r->n_rows ? cJSON_AddArrayToObject(out, "row_numbers") : NULL;
    for (int64_t i = 0; rows && i < r->n_items; i++)
        qc_json_add_item(rows, cJSON_CreateNumber((double)r->rows[i]));
    add_list(out, "labels", r->labels, r->n_items);
    add_list(out, "answers", r->answers, r->n_items);
    add_list(out, "answers_reference", r->answers_reference, r->n_items);
    add_log_p(out, "log_likelihoods", r, r->log_p);
    add_log_p(out, "log_likelihoods_reference", r, r->log_p_reference);
    return qc_json_watched(out);
}

static int scores_text(const qc_label_result *r, const char *what, const qc_label_score *model,
                       const qc_label_score *reference, const qc_label_pair *p, qc_buf *ret, qc_err *err)
{
    QC_TRY(qc_buf_printf(ret, err, "  accuracy      %.2f +- %.2f %%%s", 100 * model->accuracy,
                         100 * model->accuracy_se, what));
    if (!isnan(model->macro_f1))
        QC_TRY(qc_buf_printf(ret, err, ", macro F1 %.4f", model->macro_f1));
    QC_TRY(qc_buf_printf(ret, err, "\n"));
    if (!r->has_reference)
        return QC_OK;
    QC_TRY(qc_buf_printf(ret, err,
                         "    reference   %.2f %%; difference %+.2f points (95 %%: %+.2f to %+.2f)\n",
                         100 * reference->accuracy, 100 * p->delta, 100 * p->low, 100 * p->high));
    return qc_buf_printf(
        ret, err, "    flips       %.2f %% (%lld lost, %lld won; McNemar p %.3g); another answer %.2f %%\n",
        100.0 * (double)(p->lost + p->won) / (double)r->n_items, (long long)p->lost, (long long)p->won,
        p->mcnemar_p, 100.0 * (double)p->changed / (double)r->n_items);
}

int qc_report_labels_text(const qc_label_result *r, qc_buf *ret, qc_err *err)
{
    QC_TRY(qc_buf_printf(ret, err, "  task          %s, %lld of %lld rows of %s (%lld tokens)\n", r->task,
                         (long long)r->n_items, (long long)r->n_rows, r->data, (long long)r->tokens));
    QC_TRY(scores_text(r, "", &r->model, &r->reference, &r->pair, ret, err));
    if (!r->has_calibrated)
        return QC_OK;
    return scores_text(r, " with contextual calibration", &r->model_calibrated, &r->reference_calibrated,
                       &r->pair_calibrated, ret, err);
}
