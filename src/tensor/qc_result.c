#include "qc_result.h"

#include "qc_alloc.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Make room for one more element; keeps the list valid on failure. */
static int grow(void **items, int64_t n_items, int64_t *cap_items, size_t item_bytes, qc_err *err)
{
    if (n_items < *cap_items)
        return QC_OK;
    int64_t cap = *cap_items ? *cap_items * 2 : 16;
    void *p = qc_realloc(*items, (size_t)n_items * item_bytes, (size_t)cap * item_bytes);
    if (!p)
        return qc_fail_nomem(err, "result list", (unsigned long long)cap * item_bytes);
    *items = p;
    *cap_items = cap;
    return QC_OK;
}

static void event_free(qc_event *e)
{
    qc_free(e->kind);
    qc_free(e->subject);
    qc_free(e->detail);
}

int qc_event_add(qc_event_list *list, qc_event_level level, const char *kind, const char *subject,
                 int64_t count, qc_err *err, const char *detail_fmt, ...)
{
    char detail[512];
    va_list ap;
    va_start(ap, detail_fmt);
    vsnprintf(detail, sizeof detail, detail_fmt, ap);
    va_end(ap);
    if (!subject)
        subject = "";
    for (int64_t i = 0; i < list->n_events; i++) {
        qc_event *e = &list->events[i];
        if (strcmp(e->kind, kind) == 0 && strcmp(e->subject, subject) == 0 &&
            strcmp(e->detail, detail) == 0) {
            e->count += count;
            return QC_OK;
        }
    }
    void *items = list->events;
    QC_TRY(grow(&items, list->n_events, &list->cap_events, sizeof *list->events, err));
    list->events = items;
    qc_event e = {.kind = qc_strdup(kind),
                  .subject = qc_strdup(subject),
                  .detail = qc_strdup(detail),
                  .level = level,
                  .count = count};
    if (!e.kind || !e.subject || !e.detail) {
        event_free(&e);
        return qc_fail_nomem(err, "event", sizeof e);
    }
    list->events[list->n_events++] = e;
    return QC_OK;
}

int64_t qc_event_count(const qc_event_list *list, const char *kind)
{
    int64_t n = 0;
    for (int64_t i = 0; i < list->n_events; i++) {
        const qc_event *e = &list->events[i];
        if (kind ? strcmp(e->kind, kind) == 0 : e->level == QC_EVENT_FALLBACK)
            n += e->count;
    }
    return n;
}

void qc_event_list_clear(qc_event_list *list)
{
    if (!list)
        return;
    for (int64_t i = 0; i < list->n_events; i++)
        event_free(&list->events[i]);
    qc_free(list->events);
    *list = (qc_event_list){0};
}

int qc_account_add(qc_account_list *list, const qc_tensor_account *tensor, qc_err *err)
{
    void *items = list->tensors;
    QC_TRY(grow(&items, list->n_tensors, &list->cap_tensors, sizeof *list->tensors, err));
    list->tensors = items;
    qc_tensor_account t = *tensor;
    t.name = qc_strdup(tensor->name);
    t.rule = qc_strdup(tensor->rule ? tensor->rule : "");
    if (!t.name || !t.rule) {
        qc_free(t.name);
        qc_free(t.rule);
        return qc_fail_nomem(err, "account of tensors", sizeof t);
    }
    list->tensors[list->n_tensors++] = t;
    return QC_OK;
}

int qc_account_add_layer(qc_account_list *list, const qc_layer_times *times, qc_err *err)
{
    size_t n = (size_t)list->n_layer_times;
    void *p = qc_realloc(list->layer_times, n * sizeof *times, (n + 1) * sizeof *times);
    if (!p)
        return qc_fail_nomem(err, "account of layers", (n + 1) * sizeof *times);
    list->layer_times = p;
    list->layer_times[list->n_layer_times++] = *times;
    return QC_OK;
}

void qc_account_bytes(const qc_account_list *list, uint64_t *ret_bytes_in, uint64_t *ret_bytes_out)
{
    uint64_t in = 0, out = 0;
    for (int64_t i = 0; i < list->n_tensors; i++) {
        in += list->tensors[i].bytes_in;
        out += list->tensors[i].bytes_out;
    }
    if (ret_bytes_in)
        *ret_bytes_in = in;
    if (ret_bytes_out)
        *ret_bytes_out = out;
}

double qc_error_difference(double read, double stored)
{
    return fabs(read - stored) / fmax(stored, 1e-9);
}

double qc_account_error(const qc_account_list *list)
{
    double worst = NAN;
    for (int64_t i = 0; i < list->n_tensors; i++) {
        const qc_tensor_account *t = &list->tensors[i];
        if (t->action != QC_ACTION_QUANTIZED || isnan(t->sq_read) || isnan(t->sq_stored))
            continue;
        double norm = t->sq_source > 0 ? t->sq_source : 1;
        double off = qc_error_difference(t->sq_read / norm, t->sq_stored / norm);
        worst = off > worst || isnan(worst) ? off : worst;
    }
    return worst;
}

void qc_account_list_clear(qc_account_list *list)
{
    if (!list)
        return;
    for (int64_t i = 0; i < list->n_tensors; i++) {
        qc_free(list->tensors[i].name);
        qc_free(list->tensors[i].rule);
    }
    qc_free(list->tensors);
    qc_free(list->layer_times);
    *list = (qc_account_list){0};
}

const char *qc_action_name(qc_tensor_action action)
{
    static const char *const names[] = {
        [QC_ACTION_QUANTIZED] = "quantized", [QC_ACTION_COPIED] = "copied", [QC_ACTION_KEPT16] = "kept16",
        [QC_ACTION_TIED] = "tied",           [QC_ACTION_FOLDED] = "folded", [QC_ACTION_DROPPED] = "dropped",
    };
    return names[action];
}

const double qc_percents[QC_N_PERCENTS] = {0, 0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100};

static qc_spread no_spread(void)
{
    qc_spread s = {.mean = NAN, .se = NAN, .low = NAN, .high = NAN};
    for (int i = 0; i < QC_N_PERCENTS; i++)
        s.at[i] = NAN;
    return s;
}

void qc_evaluation_init(qc_evaluation *eval)
{
    *eval = (qc_evaluation){
        .nll_mean = NAN,
        .ppl = NAN,
        .ppl_reference = NAN,
        .ppl_se = NAN,
        .ppl_reference_se = NAN,
        .ppl_ratio_se = NAN,
        .ppl_ratio = NAN,
        .nll_correlation = NAN,
        .delta_nll = NAN,
        .delta_nll_se = NAN,
        .delta_nll_low = NAN,
        .delta_nll_high = NAN,
        .kld_mean = NAN,
        .kld_p99 = NAN,
        .kld_max = NAN,
        .kld = no_spread(),
        .delta_p = no_spread(),
        .delta_p_rms = NAN,
        .delta_p_rms_se = NAN,
        .top1 = NAN,
        .top1_se = NAN,
        .flips = NAN,
        .flips_lost = NAN,
        .flips_won = NAN,
        .seconds = NAN,
    };
}

void qc_evaluation_clear(qc_evaluation *eval)
{
    if (!eval)
        return;
    qc_free(eval->protocol);
    qc_free(eval->text);
    qc_free(eval->reference);
    qc_free(eval->per_window);
    qc_free(eval->per_place);
    qc_free(eval->decisions);
    qc_evaluation_init(eval);
}

void qc_label_result_clear(qc_label_result *result)
{
    if (!result)
        return;
    qc_free(result->task);
    qc_free(result->data);
    qc_free(result->rows);
    qc_free(result->labels);
    qc_free(result->answers);
    qc_free(result->answers_reference);
    qc_free(result->n_choices);
    qc_free(result->log_p);
    qc_free(result->log_p_reference);
    *result = (qc_label_result){0};
}
