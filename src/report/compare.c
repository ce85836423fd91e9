#include "compare.h"

#include "qc_alloc.h"
#include "paired.h"
#include "qc_dist.h"
#include "report_doc.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define CONFIDENCE   0.95 /* two-sided, of the intervals */
#define MAX_TENSORS  20
#define MAX_SETTINGS 50

/* Not measured in either is the same; in one alone differs. */
static bool differs(double a, double b, double tolerance)
{
    if (isnan(a) || isnan(b))
        return isnan(a) != isnan(b);
    return fabs(a - b) > tolerance * fmax(fabs(a), fabs(b));
}

static bool add_figure(cJSON *list, const char *name, double a, double b, bool counts, double tolerance)
{
    bool differ = counts && differs(a, b, tolerance);
    if (isnan(a) && isnan(b))
        return false;
    cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
    cJSON_AddStringToObject(item, "name", name);
    qc_json_add_number(item, "a", a);
    qc_json_add_number(item, "b", b);
    qc_json_add_number(item, "ratio", a == b ? 1 : b / a);
    cJSON_AddBoolToObject(item, "differs", differ);
    return differ;
}

static bool add_figures(cJSON *list, qc_report_part a, qc_report_part b, double tolerance)
{
    static const char *const names[] = {"ppl",      "ppl_reference", "ppl_ratio", "delta_nll",
                                        "kld_mean", "kld_p99",       "kld_max",   "top1"};
    bool any = add_figure(list, "size_bytes", qc_report_number(a.artifact, "bytes"),
                          qc_report_number(b.artifact, "bytes"), true, tolerance);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        any |= add_figure(list, names[i], qc_report_number(a.evaluation, names[i]),
                          qc_report_number(b.evaluation, names[i]), true, tolerance);
    return any;
}

/* Figures of the whole run. */
static bool add_run_figures(cJSON *list, const qc_report_pair *pair, double tolerance)
{
    bool any = add_figure(list, "fallbacks", qc_report_events(pair->a, NULL), qc_report_events(pair->b, NULL),
                          true, tolerance);
    add_figure(list, "seconds", qc_report_number(qc_json_get(pair->a, "timings"), "total"),
               qc_report_number(qc_json_get(pair->b, "timings"), "total"), false, tolerance);
    add_figure(list, "peak_rss_bytes", qc_report_number(pair->a, "peak_rss_bytes"),
               qc_report_number(pair->b, "peak_rss_bytes"), false, tolerance);
    return any;
}

/* Mean of the windows' differences b - a with its interval by Student's t. */
static void add_windows(cJSON *out, const cJSON *a, const cJSON *b, const char *key)
{
    const cJSON *x = qc_json_get(a, "per_window"), *y = qc_json_get(b, "per_window");
    int n = cJSON_GetArraySize(x), i = 0;
    double *d = n >= 2 && n == cJSON_GetArraySize(y) ? qc_alloc((size_t)n, sizeof *d) : NULL;
    if (!d)
        return;
    for (x = x->child, y = y->child; x; x = x->next, y = y->next)
        d[i++] = qc_report_number(y, key) - qc_report_number(x, key);
    qc_mean m = qc_mean_of(d, n);
    qc_free(d);
    if (!isfinite(m.mean))
        return;
    double reach = qc_t_quantile(1 - (1 - CONFIDENCE) / 2, n - 1) * m.se;
    cJSON *item = cJSON_AddObjectToObject(out, key);
    cJSON_AddNumberToObject(item, "windows", n);
    cJSON_AddNumberToObject(item, "difference", m.mean);
    cJSON_AddNumberToObject(item, "standard_error", m.se);
    cJSON_AddNumberToObject(item, "lower", m.mean - reach);
    cJSON_AddNumberToObject(item, "upper", m.mean + reach);
}

static const cJSON *tensor_named(const cJSON *list, const cJSON *hint, const char *name)
{
    const cJSON *t;
    if (hint && strcmp(qc_report_string(hint, "name"), name) == 0)
        return hint;
    cJSON_ArrayForEach(t, list) if (strcmp(qc_report_string(t, "name"), name) == 0) return t;
    return NULL;
}

/* The first tensors whose bytes, bits or error differ; *ret_n counts all. */
static cJSON *tensors_json(const cJSON *a, const cJSON *b, double tolerance, int *ret_n)
{
    cJSON *list = cJSON_CreateArray();
    const cJSON *t, *hint = b ? b->child : NULL;
    *ret_n = 0;
    cJSON_ArrayForEach(t, a)
    {
        const cJSON *other = tensor_named(b, hint, qc_report_string(t, "name"));
        double x = qc_report_number(t, "relative_error"), y = qc_report_number(other, "relative_error");
        hint = other ? other->next : NULL;
        if (other && !differs(x, y, tolerance) &&
            qc_report_number(t, "bytes_out") == qc_report_number(other, "bytes_out"))
            continue;
        if (++*ret_n > MAX_TENSORS)
            continue;
        cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
        cJSON_AddStringToObject(item, "name", qc_report_string(t, "name"));
        qc_json_add_number(item, "bits_a", qc_report_number(t, "bits"));
        qc_json_add_number(item, "bits_b", qc_report_number(other, "bits"));
        qc_json_add_number(item, "relative_error_a", x);
        qc_json_add_number(item, "relative_error_b", y);
    }
    *ret_n +=
        cJSON_GetArraySize(b) > cJSON_GetArraySize(a) ? cJSON_GetArraySize(b) - cJSON_GetArraySize(a) : 0;
    return list;
}

/* Scalars of the recipes that differ, by their path; "" for what one lacks. */
static void add_settings(cJSON *list, const cJSON *a, const cJSON *b, const char *path)
{
    const cJSON *from = a ? a : b, *item;
    if (cJSON_Compare(a, b, true) || cJSON_GetArraySize(list) >= MAX_SETTINGS)
        return;
    if ((cJSON_IsObject(a) && cJSON_IsObject(b)) || (from && !(a && b) && cJSON_IsObject(from))) {
        char below[256];
        cJSON_ArrayForEach(item, from)
        {
            snprintf(below, sizeof below, "%s%s%s", path, *path ? "." : "", item->string);
            add_settings(list, cJSON_GetObjectItemCaseSensitive(a, item->string),
                         cJSON_GetObjectItemCaseSensitive(b, item->string), below);
        }
        return;
    }
    char *x = a ? cJSON_PrintUnformatted(a) : NULL, *y = b ? cJSON_PrintUnformatted(b) : NULL;
    cJSON *entry = qc_json_add_item(list, cJSON_CreateObject());
    cJSON_AddStringToObject(entry, "key", path);
    cJSON_AddStringToObject(entry, "a", x ? x : "");
    cJSON_AddStringToObject(entry, "b", y ? y : "");
    cJSON_free(x);
    cJSON_free(y);
}

static void add_path(cJSON *item, const char *key, const cJSON *artifact)
{
    if (artifact)
        cJSON_AddStringToObject(item, key, qc_report_string(artifact, "path"));
    else
        cJSON_AddNullToObject(item, key);
}

/* What one output became, nothing if none answers. True if it differs. */
static bool add_output(cJSON *item, qc_report_part a, qc_report_part b, double tolerance)
{
    int n_tensors = 0;
    bool alone = a.artifact && !b.artifact;
    add_path(item, "output_a", a.artifact);
    add_path(item, "output_b", b.artifact);
    cJSON *figures = cJSON_AddArrayToObject(item, "figures"),
          *windows = cJSON_AddObjectToObject(item, "windows");
    bool any = alone || add_figures(figures, a, b, tolerance);
    add_windows(windows, a.evaluation, b.evaluation, "nll");
    add_windows(windows, a.evaluation, b.evaluation, "kld");
    cJSON *tensors = tensors_json(alone ? NULL : a.tensors, b.tensors, tolerance, &n_tensors);
    cJSON_AddNumberToObject(item, "tensors_that_differ", n_tensors);
    if (!cJSON_AddItemToObject(item, "tensors", tensors))
        cJSON_Delete(tensors);
    return any || n_tensors > 0;
}

/* Outputs behind the first of a, and those of b that answer to none. True if one differs. */
static bool add_others(cJSON *doc, const qc_report_pair *pair, const int *match, double tolerance)
{
    cJSON *others = cJSON_AddArrayToObject(doc, "others"), *left = cJSON_AddArrayToObject(doc, "only_in_b");
    int n_a = qc_report_n_parts(pair->a);
    bool any = false;
    for (int i = 1; i < n_a; i++) {
        cJSON *item = qc_json_add_item(others, cJSON_CreateObject());
        qc_report_part b = match[i] < 0 ? (qc_report_part){0} : qc_report_part_at(pair->b, match[i]);
        any |= add_output(item, qc_report_part_at(pair->a, i), b, tolerance);
    }
    for (int k = 0; k < qc_report_n_parts(pair->b); k++) {
        bool found = false;
        for (int i = 0; i < n_a; i++)
            found = found || match[i] == k;
        if (!found)
            qc_json_add_item(
                left, cJSON_CreateString(qc_report_string(qc_report_part_at(pair->b, k).artifact, "path")));
        any |= !found;
    }
    return any;
}

cJSON *qc_compare_make(const qc_report_pair *pair, double tolerance)
{
    int *match;
    if (qc_subject_match(pair, &match, NULL) < 0)
        return NULL;
    int first = qc_report_n_parts(pair->a) > 0 ? match[0] : 0;
    qc_report_part a = qc_report_part_at(pair->a, 0),
                   b = first < 0 ? (qc_report_part){0} : qc_report_part_at(pair->b, first);
    qc_json_watch();
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddStringToObject(doc, "schema", QC_COMPARISON_SCHEMA);
    cJSON_AddStringToObject(doc, "a", pair->a_name);
    cJSON_AddStringToObject(doc, "b", pair->b_name);
    cJSON_AddNumberToObject(doc, "confidence", CONFIDENCE);
    bool any = add_output(doc, a, b, tolerance);
    any |= add_run_figures(cJSON_GetObjectItemCaseSensitive(doc, "figures"), pair, tolerance);
    any |= add_others(doc, pair, match, tolerance);
    add_settings(cJSON_AddArrayToObject(doc, "settings"), qc_json_get(pair->a, "recipe"),
                 qc_json_get(pair->b, "recipe"), "");
    cJSON_AddBoolToObject(doc, "same", !any);
    qc_free(match);
    return qc_json_watched(doc);
}
