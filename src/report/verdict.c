#include "verdict.h"

#include "gates.h"
#include "report_doc.h"
#include "qc_alloc.h"
#include "paired.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef enum { PAIRED, RATIO, MORE, TENSORS } rule_kind;

/* Gates against a baseline. Of PAIRED ones the windows decide, where both reports have them. */
static const struct {
    const char *name;
    rule_kind kind;
    const char *window; /* PAIRED: figure of a window; TENSORS: of a tensor */
} table[] = {
    {"ppl", PAIRED, "nll"},
    {"kld_mean", PAIRED, "kld"},
    {"top1", PAIRED, "top1"},
    {"kld_p99", RATIO, NULL},
    {"kld_max", RATIO, NULL},
    {"size_bytes", RATIO, NULL},
    {"seconds", RATIO, NULL},
    {"peak_rss_bytes", RATIO, NULL},
    {"fallbacks", MORE, NULL},
    {"tensor_error", TENSORS, "relative_error"},
    {"tensor_gain", TENSORS, "error"},
};
#define N_TABLE (sizeof table / sizeof table[0])

static size_t find(const char *name)
{
    size_t i = 0;
    while (i < N_TABLE && strcmp(table[i].name, name) != 0)
        i++;
    return i;
}

int qc_gate_rule_check(const qc_gate_rule *rule, qc_err *err)
{
    size_t i = find(rule->name);
    if (!rule->to_baseline)
        return qc_gate_check(rule->name, rule->limit, err);
    if (i == N_TABLE) {
        char names[300] = "";
        for (size_t k = 0, n = 0; k < N_TABLE; k++)
            n += (size_t)snprintf(names + n, sizeof names - n, "%s%s", k ? ", " : "", table[k].name);
        return qc_fail(err, QC_E_USAGE, "no gate against a baseline is called \"%.60s\" (%s)", rule->name,
                       names);
    }
    bool difference = table[i].kind == MORE || strcmp(rule->name, "top1") == 0;
    if (!isfinite(rule->limit) || (!difference && rule->limit <= 0))
        return qc_fail(err, QC_E_USAGE, "gate %s: %g is no factor above 0", rule->name, rule->limit);
    if (strcmp(rule->name, "top1") == 0 && fabs(rule->limit) > 1)
        return qc_fail(err, QC_E_USAGE,
                       "gate top1: %g is no difference of fractions, as -0.005 for half a percent less",
                       rule->limit);
    return QC_OK;
}

/* What a rule found. */
typedef struct finding {
    double value, baseline;
    bool pass;
    char reason[300];
} finding;

/* ---- windows ---- */

/* Differences that must be at most 0 on average, one per window; NULL where the reports have no pairs of
 * windows. */
static double *window_excess(const cJSON *a, const cJSON *b, const char *key, double limit, int64_t *ret_n)
{
    const cJSON *x = qc_json_get(a, "per_window"), *y = qc_json_get(b, "per_window");
    int n = cJSON_GetArraySize(x);
    double *d = n >= 2 && n == cJSON_GetArraySize(y) ? qc_alloc((size_t)n, sizeof *d) : NULL;
    bool all = d != NULL;
    x = all ? x->child : NULL;
    for (int i = 0; all && i < n; i++, x = x->next) {
        y = i ? y->next : y->child;
        double p = qc_report_number(x, key), q = qc_report_number(y, key);
        d[i] = strcmp(key, "nll") == 0   ? p - q - log(limit)
               : strcmp(key, "kld") == 0 ? p - limit * q
                                         : limit - (p - q);
        all = isfinite(d[i]);
    }
    if (!all) {
        qc_free(d);
        return NULL;
    }
    *ret_n = n;
    return d;
}

/* "1.002 times the baseline's, at most 1.01" */
static void say(const qc_gate_rule *rule, finding *f)
{
    if (strcmp(rule->name, "top1") == 0)
        snprintf(f->reason, sizeof f->reason, "%+.6g on the baseline, at least %+.6g", f->value, rule->limit);
    else
        snprintf(f->reason, sizeof f->reason, "%.6g times the baseline's, at most %.6g", f->value,
                 rule->limit);
}

static void judge_windows(const qc_gate_rule *rule, const qc_gate_rules *rules, const cJSON *a,
                          const cJSON *b, const char *key, finding *f)
{
    int64_t n = 0;
    double *d = window_excess(a, b, key, rule->limit, &n);
    bool top1 = strcmp(rule->name, "top1") == 0;
    double x = qc_report_number(a, rule->name);
    f->baseline = qc_report_number(b, rule->name);
    f->value = top1 ? x - f->baseline : x == f->baseline ? 1 : x / f->baseline;
    say(rule, f);
    size_t said = strlen(f->reason);
    if (!d) {
        f->pass = top1 ? f->value >= rule->limit : f->value <= rule->limit;
        snprintf(f->reason + said, sizeof f->reason - said,
                 " (plain figures: there are no pairs of windows)");
        return;
    }
    int shown = qc_mean_at_most_zero(qc_mean_of(d, n), rules->confidence);
    f->pass = shown > 0 || (shown == 0 && rules->undecided_passes);
    snprintf(f->reason + said, sizeof f->reason - said,
             shown ? " (%lld windows, %g %% sure)" : ": %lld windows do not decide it at %g %%, score more",
             (long long)n, 100 * rules->confidence);
    qc_free(d);
}

/* ---- tensors ---- */

static const cJSON *same_name(const cJSON *list, const cJSON *hint, const char *name)
{
    const cJSON *t;
    if (hint && strcmp(qc_report_string(hint, "name"), name) == 0)
        return hint; /* lists of the same order are walked together */
    cJSON_ArrayForEach(t, list) if (strcmp(qc_report_string(t, "name"), name) == 0) return t;
    return NULL;
}

/* The figure of a tensor that is compared: its relative error, or what calibration left of the error of
 * rounding to nearest, which is 1 of a matrix that was rounded without. NaN: has none. */
static double tensor_figure(const cJSON *t, const char *key)
{
    double x = qc_report_number(t, key), rtn = qc_report_number(t, "error_rtn");
    if (strcmp(key, "error") != 0)
        return x;
    return rtn > 0 ? x / rtn : strcmp(qc_report_string(t, "action"), "quantized") == 0 ? 1 : NAN;
}

/* The worst tensor counts. One that was quantized and is not any more, or the other way round, is a
 * difference too. */
static void judge_tensors(const qc_gate_rule *rule, const cJSON *a, const cJSON *b, const char *key,
                          finding *f)
{
    const cJSON *t, *hint = b ? b->child : NULL, *worst = NULL;
    f->value = NAN;
    f->pass = true;
    cJSON_ArrayForEach(t, a)
    {
        const cJSON *other = same_name(b, hint, qc_report_string(t, "name"));
        double x = tensor_figure(t, key), y = other ? tensor_figure(other, key) : NAN,
               ratio = x == y ? 1 : x / y;
        hint = other ? other->next : NULL;
        if (isnan(x) && isnan(y) && other)
            continue;
        if (isnan(x) != isnan(y)) {
            f->value = NAN;
            f->pass = false;
            snprintf(f->reason, sizeof f->reason, "%.120s was treated otherwise in the baseline",
                     qc_report_string(t, "name"));
            return;
        }
        if (!worst || ratio > f->value) {
            worst = t;
            f->value = ratio;
            f->baseline = y;
        }
    }
    f->pass = worst && f->value <= rule->limit;
    if (worst)
        snprintf(f->reason, sizeof f->reason, "worst is %.120s, %.6g times the baseline's, at most %.6g",
                 qc_report_string(worst, "name"), f->value, rule->limit);
    else
        snprintf(f->reason, sizeof f->reason, "the reports have no such figures of tensors");
}

/* ---- figures ---- */

static double run_figure(const cJSON *doc, qc_report_part part, const char *name)
{
    if (strcmp(name, "size_bytes") == 0)
        return qc_report_number(part.artifact, "bytes");
    if (strcmp(name, "account_error") == 0)
        return qc_report_number(part.artifact, name);
    if (strcmp(name, "seconds") == 0)
        return qc_report_number(qc_json_get(doc, "timings"), "total");
    if (strcmp(name, "peak_rss_bytes") == 0)
        return qc_report_number(doc, name);
    return strcmp(name, "fallbacks") == 0 ? qc_report_events(doc, NULL)
                                          : qc_report_number(part.evaluation, name);
}

static void judge_figure(const qc_gate_rule *rule, double x, double baseline, bool more, finding *f)
{
    f->baseline = baseline;
    f->value = more ? x - baseline : x == baseline ? 1 : x / baseline;
    f->pass = f->value <= rule->limit;
    if (more)
        snprintf(f->reason, sizeof f->reason, "%.6g more than the baseline, at most %.6g", f->value,
                 rule->limit);
    else
        say(rule, f);
}

/* Limits are judged as in a run. */
static void judge_limit(const qc_gate_rule *rule, const cJSON *doc, qc_report_part part, finding *f)
{
    qc_evaluation e;
    const cJSON *from = part.evaluation;
    qc_evaluation_init(&e);
    e.ppl = qc_report_number(from, "ppl");
    e.ppl_ratio = qc_report_number(from, "ppl_ratio");
    e.delta_nll = qc_report_number(from, "delta_nll");
    e.kld_mean = qc_report_number(from, "kld_mean");
    e.kld_p99 = qc_report_number(from, "kld_p99");
    e.kld_max = qc_report_number(from, "kld_max");
    e.top1 = qc_report_number(from, "top1");
    qc_measured measured = {.evaluation = &e,
                            .fallbacks = run_figure(doc, part, "fallbacks"),
                            .size_bytes = run_figure(doc, part, "size_bytes"),
                            .seconds = run_figure(doc, part, "seconds"),
                            .peak_rss_bytes = run_figure(doc, part, "peak_rss_bytes"),
                            .account_error = run_figure(doc, part, "account_error")};
    qc_gate gate = qc_gate_judge(rule->name, rule->limit, &measured);
    f->value = gate.value;
    f->baseline = NAN;
    f->pass = gate.pass;
    if (isnan(gate.value))
        snprintf(f->reason, sizeof f->reason, "was not measured");
    else
        snprintf(f->reason, sizeof f->reason, "%.*g, at %s %.*g", strstr(rule->name, "_bytes") ? 15 : 6,
                 gate.value, strcmp(rule->name, "top1") == 0 ? "least" : "most",
                 strstr(rule->name, "_bytes") ? 15 : 6, rule->limit);
}

/* Output i of a against output k of b. */
static void judge(const qc_gate_rule *rule, const qc_gate_rules *rules, const qc_report_pair *pair, int i,
                  int k, finding *f)
{
    qc_report_part a = qc_report_part_at(pair->a, i);
    if (!rule->to_baseline) {
        judge_limit(rule, pair->a, a, f);
        return;
    }
    qc_report_part b = qc_report_part_at(pair->b, k);
    size_t row = find(rule->name);
    if (table[row].kind == PAIRED)
        judge_windows(rule, rules, a.evaluation, b.evaluation, table[row].window, f);
    else if (table[row].kind == TENSORS)
        judge_tensors(rule, a.tensors, b.tensors, table[row].window, f);
    else
        judge_figure(rule, run_figure(pair->a, a, rule->name), run_figure(pair->b, b, rule->name),
                     table[row].kind == MORE, f);
    if (isnan(f->value) && table[row].kind != TENSORS)
        snprintf(f->reason, sizeof f->reason, "was not measured in both reports");
}

/* match: NULL without a baseline. */
static bool add_gates(cJSON *list, const qc_report_pair *pair, const qc_gate_rules *rules, const int *match)
{
    bool all = true;
    for (int i = 0; i < qc_report_n_parts(pair->a); i++)
        for (int k = 0; k < rules->n_rules; k++) {
            const qc_gate_rule *rule = &rules->rules[k];
            finding f = {.value = NAN, .baseline = NAN};
            judge(rule, rules, pair, i, match ? match[i] : 0, &f);
            all = all && f.pass;
            cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
            cJSON_AddStringToObject(item, "name", rule->name);
            cJSON_AddStringToObject(item, "artifact",
                                    qc_report_string(qc_report_part_at(pair->a, i).artifact, "path"));
            cJSON_AddBoolToObject(item, "to_baseline", rule->to_baseline);
            qc_json_add_number(item, "limit", rule->limit);
            qc_json_add_number(item, "value", f.value);
            qc_json_add_number(item, "baseline", f.baseline);
            cJSON_AddBoolToObject(item, "pass", f.pass);
            cJSON_AddStringToObject(item, "reason", f.reason);
        }
    return all;
}

/* *ret as of qc_subject_match, where every output answers to one. */
static int match_all(const qc_report_pair *pair, int **ret, qc_err *err)
{
    int n_a = qc_report_n_parts(pair->a), n_b = qc_report_n_parts(pair->b), *match;
    QC_TRY(qc_subject_match(pair, &match, err));
    for (int i = 0; i < n_a; i++)
        if (match[i] < 0) {
            qc_free(match);
            return qc_fail(err, QC_E_INPUT, "%s: its output %.200s has none in %s to be judged against",
                           pair->a_name, qc_report_string(qc_report_part_at(pair->a, i).artifact, "path"),
                           pair->b_name);
        }
    if (n_b > n_a) {
        qc_free(match);
        return qc_fail(err, QC_E_INPUT, "%s has %d outputs, the baseline %s has %d", pair->a_name, n_a,
                       pair->b_name, n_b);
    }
    *ret = match;
    return QC_OK;
}

int qc_verdict_make(const qc_report_pair *pair, const qc_gate_rules *rules, cJSON **ret_doc, qc_err *err)
{
    int *match = NULL;
    if (pair->b)
        QC_TRY(match_all(pair, &match, err));
    qc_json_watch();
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddStringToObject(doc, "schema", QC_VERDICT_SCHEMA);
    cJSON_AddStringToObject(doc, "report", pair->a_name);
    if (pair->b)
        cJSON_AddStringToObject(doc, "baseline", pair->b_name);
    else
        cJSON_AddNullToObject(doc, "baseline");
    cJSON_AddNumberToObject(doc, "confidence", rules->confidence);
    bool all = add_gates(cJSON_AddArrayToObject(doc, "gates"), pair, rules, match);
    qc_free(match);
    cJSON_AddBoolToObject(doc, "passed", all);
    doc = qc_json_watched(doc);
    if (!doc)
        return qc_fail_nomem(err, "verdict", 4096);
    *ret_doc = doc;
    return QC_OK;
}
