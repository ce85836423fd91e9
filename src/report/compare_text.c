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

static void put_windows(qc_out *out, const cJSON *doc, bool markdown)
{
    const cJSON *w;
    cJSON_ArrayForEach(w, qc_json_get(doc, "windows"))
    {
        double lower = qc_report_number(w, "lower"), upper = qc_report_number(w, "upper");
        const char *verdict = lower == 0 && upper == 0 ? "equal"
                              : lower > 0              ? "worse"
                              : upper < 0              ? "better"
                                                       : "can not be told apart";
        qc_put(out, "%s%s over %.0f windows: %+.6f nats, %+.6f to %+.6f at %.0f %%: %s\n",
               markdown ? "- " : "  ", strcmp(w->string, "nll") == 0 ? "NLL" : "KL divergence",
               qc_report_number(w, "windows"), qc_report_number(w, "difference"), lower, upper,
               100 * qc_report_number(doc, "confidence"), verdict);
    }
}

static void put_name(qc_out *out, const char *text, bool markdown)
{
    if (markdown)
        qc_put_markdown(out, text, 160);
    else
        qc_put_line(out, text);
}

static void put_tensors(qc_out *out, const cJSON *doc, bool markdown)
{
    const cJSON *t;
    double n = qc_report_number(doc, "tensors_that_differ");
    if (n == 0)
        return;
    qc_put(out, "%s%.0f tensor%s differ%s\n%s", markdown ? "\n" : "  ", n, n == 1 ? "" : "s",
           n == 1 ? "s" : "", markdown ? "\n" : "");
    cJSON_ArrayForEach(t, qc_json_get(doc, "tensors"))
    {
        qc_put(out, markdown ? "- " : "    ");
        put_name(out, qc_report_string(t, "name"), markdown);
        qc_put(out, ": %.4g bits, error %.4g -> %.4g bits, %.4g\n", qc_report_number(t, "bits_a"),
               qc_report_number(t, "relative_error_a"), qc_report_number(t, "bits_b"),
               qc_report_number(t, "relative_error_b"));
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

int qc_compare_render(const cJSON *comparison, qc_render_format format, qc_buf *ret, qc_err *err)
{
    qc_out out = {.buf = ret, .err = err};
    bool markdown = format == QC_RENDER_MARKDOWN, same = cJSON_IsTrue(qc_json_get(comparison, "same"));
    const cJSON *f;
    qc_put(&out, markdown ? "### " : "");
    put_name(&out, qc_report_string(comparison, "a"), markdown);
    qc_put(&out, " -> ");
    put_name(&out, qc_report_string(comparison, "b"), markdown);
    qc_put(&out, ": %s\n", same ? "the same" : "different");
    qc_put(&out, markdown ? "\n| figure | first | second | | |\n|---|--:|--:|--:|---|\n" : "");
    cJSON_ArrayForEach(f, qc_json_get(comparison, "figures")) put_text_figure(&out, f, markdown);
    qc_put(&out, markdown ? "\n" : "");
    put_windows(&out, comparison, markdown);
    put_tensors(&out, comparison, markdown);
    put_settings(&out, comparison, markdown);
    return out.rc;
}
