/* A comparison for people. */
#include "compare.h"
#include "report_doc.h"
#include "report_internal.h"

#include <math.h>
#include <string.h>

static void put_text_figure(qc_out *out, const cJSON *f, bool markdown)
{
    const char *name = qc_report_string(f, "name");
    double ratio = qc_report_number(f, "ratio");
    if (markdown) {
        qc_put(out, "| ");
        qc_put_markdown(out, name, 64);
        qc_put(out, " | ");
    } else
        qc_put(out, "  %-14s ", name);
    qc_put_figure(out, name, qc_report_number(f, "a"));
    qc_put(out, markdown ? " | " : " -> ");
    qc_put_figure(out, name, qc_report_number(f, "b"));
    if (markdown)
        qc_put(out, " | ");
    if (isfinite(ratio) && ratio != 1)
        qc_put(out, markdown ? "×%.5g" : " (x %.5g)", ratio);
    if (markdown)
        qc_put(out, " | %s |\n", cJSON_IsTrue(qc_json_get(f, "differs")) ? "≠" : "");
    else
        qc_put(out, "%s\n", cJSON_IsTrue(qc_json_get(f, "differs")) ? "  differs" : "");
}

static void put_windows(qc_out *out, const cJSON *item, double confidence, bool markdown)
{
    const cJSON *w;
    cJSON_ArrayForEach(w, qc_json_get(item, "windows"))
    {
        double lower = qc_report_number(w, "lower"), upper = qc_report_number(w, "upper");
        const char *verdict = lower == 0 && upper == 0 ? "equal"
                              : lower > 0              ? "worse"
                              : upper < 0              ? "better"
                                                       : "can not be told apart";
        qc_put(out, "%s%s over %.0f windows: %+.6f nats, %+.6f to %+.6f at %.0f %%: %s\n",
               markdown ? "- " : "  ", strcmp(w->string, "nll") == 0 ? "NLL" : "KL divergence",
               qc_report_number(w, "windows"), qc_report_number(w, "difference"), lower, upper,
               100 * confidence, verdict);
    }
}

static void put_name(qc_out *out, const char *text, bool markdown)
{
    if (markdown)
        qc_put_markdown(out, text, 160);
    else
        qc_put_line(out, text);
}

/* "4 bits, error 0.01"; without an error where nothing was rounded. */
static void put_tensor(qc_out *out, double bits, double error)
{
    if (isnan(bits))
        qc_put(out, "none");
    else
        qc_put(out, "%.4g bits", bits);
    if (isfinite(error))
        qc_put(out, ", error %.4g", error);
}

static void put_tensors(qc_out *out, const cJSON *item, bool markdown)
{
    const cJSON *t;
    double n = qc_report_number(item, "tensors_that_differ");
    if (n == 0)
        return;
    qc_put(out, "%s%.0f tensor%s differ%s\n%s", markdown ? "\n" : "  ", n, n == 1 ? "" : "s",
           n == 1 ? "s" : "", markdown ? "\n" : "");
    cJSON_ArrayForEach(t, qc_json_get(item, "tensors"))
    {
        qc_put(out, markdown ? "- " : "    ");
        put_name(out, qc_report_string(t, "name"), markdown);
        qc_put(out, ": ");
        put_tensor(out, qc_report_number(t, "bits_a"), qc_report_number(t, "relative_error_a"));
        qc_put(out, " -> ");
        put_tensor(out, qc_report_number(t, "bits_b"), qc_report_number(t, "relative_error_b"));
        qc_put(out, "\n");
    }
}

static void put_settings(qc_out *out, const cJSON *doc, bool markdown)
{
    const cJSON *s, *list = qc_json_get(doc, "settings");
    if (!list || !list->child)
        return;
    qc_put(out, markdown ? "\nsettings:\n\n" : "  settings\n");
    cJSON_ArrayForEach(s, list)
    {
        const char *a = qc_report_string(s, "a"), *b = qc_report_string(s, "b");
        qc_put(out, markdown ? "- " : "    ");
        put_name(out, qc_report_string(s, "key"), markdown);
        qc_put(out, ": ");
        put_name(out, *a ? a : "not set", markdown);
        qc_put(out, " -> ");
        put_name(out, *b ? b : "not set", markdown);
        qc_put(out, "\n");
    }
}

/* One output: its names where there are several, its figures, windows, tensors. */
static void put_output(qc_out *out, const cJSON *item, bool named, double confidence, bool markdown)
{
    const char *b = qc_report_string(item, "output_b");
    const cJSON *f, *figures = qc_json_get(item, "figures");
    if (named) {
        qc_put(out, markdown ? "\n**" : "  output ");
        put_name(out, qc_report_string(item, "output_a"), markdown);
        qc_put(out, " -> ");
        put_name(out, *b ? b : "none", markdown);
        qc_put(out, markdown ? "**\n" : "\n");
    }
    if (markdown && cJSON_GetArraySize(figures) > 0)
        qc_put(out, "\n| figure | first | second | | |\n|---|--:|--:|--:|---|\n");
    cJSON_ArrayForEach(f, figures) put_text_figure(out, f, markdown);
    qc_put(out, markdown ? "\n" : "");
    put_windows(out, item, confidence, markdown);
    put_tensors(out, item, markdown);
}

int qc_compare_render(const cJSON *comparison, qc_render_format format, qc_buf *ret, qc_err *err)
{
    qc_out out = {.buf = ret, .err = err};
    bool markdown = format == QC_RENDER_MARKDOWN, same = cJSON_IsTrue(qc_json_get(comparison, "same"));
    const cJSON *item, *others = qc_json_get(comparison, "others"),
                       *left = qc_json_get(comparison, "only_in_b");
    bool named = cJSON_GetArraySize(others) + cJSON_GetArraySize(left) > 0;
    double confidence = qc_report_number(comparison, "confidence");
    qc_put(&out, markdown ? "### " : "");
    put_name(&out, qc_report_string(comparison, "a"), markdown);
    qc_put(&out, " -> ");
    put_name(&out, qc_report_string(comparison, "b"), markdown);
    qc_put(&out, ": %s\n", same ? "the same" : "different");
    put_output(&out, comparison, named, confidence, markdown);
    cJSON_ArrayForEach(item, others) put_output(&out, item, named, confidence, markdown);
    cJSON_ArrayForEach(item, left)
    {
        qc_put(&out, markdown ? "\n**none -> " : "  output none -> ");
        put_name(&out, cJSON_GetStringValue(item), markdown);
        qc_put(&out, markdown ? "**\n" : "\n");
    }
    put_settings(&out, comparison, markdown);
    return out.rc;
}
