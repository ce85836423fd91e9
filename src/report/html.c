/* One self-contained HTML page: no script, no outside file. */
#include "html_style.h"
#include "plots.h"
#include "render.h"
#include "report_doc.h"
#include "report_internal.h"

#include "qc_alloc.h"
#include "qc_file.h"

#include <math.h>
#include <string.h>

#define MAX_ROWS 4000 /* of a table */

static void put_cell(qc_out *out, const char *classes, const char *text)
{
    qc_put(out, "<td class=\"%s\">", classes);
    qc_put_xml(out, text);
    qc_put(out, "</td>");
}

static void put_number(qc_out *out, const char *fmt_class, double value, const char *format_of_nan,
                       int digits)
{
    if (isnan(value))
        qc_put(out, "<td class=\"%s\">%s</td>", fmt_class, format_of_nan);
    else
        qc_put(out, "<td class=\"%s\">%.*g</td>", fmt_class, digits, value);
}

static void put_size_cell(qc_out *out, double n_bytes)
{
    qc_put(out, "<td class=\"n\">");
    qc_put_bytes(out, n_bytes);
    qc_put(out, "</td>");
}

/* ---- figures ---- */

static void put_size_card(qc_out *out, qc_report_part part)
{
    double n_bytes = qc_report_number(part.artifact, "bytes"),
           bytes_in = qc_report_sum(part.tensors, "bytes_in");
    qc_put(out, "<div class=\"card\"><span>size</span><b>");
    qc_put_bytes(out, n_bytes);
    qc_put(out, "</b><span>");
    if (bytes_in > 0)
        qc_put(out, "%.1f %% of ", 100 * n_bytes / bytes_in);
    qc_put_bytes(out, bytes_in);
    qc_put(out, "</span></div>\n");
}

static void put_evaluation_cards(qc_out *out, const cJSON *e)
{
    double se = qc_report_number(e, "delta_nll_se");
    if (isnan(qc_report_number(e, "ppl_reference"))) {
        qc_put(out, "<div class=\"card\"><span>perplexity</span><b>%.4f</b></div>\n",
               qc_report_number(e, "ppl"));
        return;
    }
    qc_put(out,
           "<div class=\"card\"><span>perplexity ratio</span><b>%.5f</b><span>%.4f, reference "
           "%.4f</span></div>\n",
           qc_report_number(e, "ppl_ratio"), qc_report_number(e, "ppl"),
           qc_report_number(e, "ppl_reference"));
    qc_put(out, "<div class=\"card\"><span>delta NLL</span><b>%+.5f</b><span>",
           qc_report_number(e, "delta_nll"));
    if (isnan(se))
        qc_put(out, "nats</span></div>\n");
    else
        qc_put(out, "± %.5f nats</span></div>\n", se);
    qc_put(out,
           "<div class=\"card\"><span>KL divergence</span><b>%.6f</b><span>p99 %.4f, max %.3f "
           "nats</span></div>\n",
           qc_report_number(e, "kld_mean"), qc_report_number(e, "kld_p99"), qc_report_number(e, "kld_max"));
    qc_put(
        out,
        "<div class=\"card\"><span>same top token</span><b>%.2f %%</b><span>of %.0f positions</span></div>\n",
        100 * qc_report_number(e, "top1"), qc_report_number(e, "tokens_scored"));
}

static void put_run_cards(qc_out *out, const cJSON *doc)
{
    double seconds = qc_report_number(qc_json_get(doc, "timings"), "total");
    qc_put(out, "<div class=\"card\"><span>fallbacks</span><b>%.0f</b></div>\n", qc_report_events(doc, NULL));
    qc_put(out, "<div class=\"card\"><span>time</span><b>%.1f s</b><span>peak memory ", seconds);
    qc_put_bytes(out, qc_report_number(doc, "peak_rss_bytes"));
    qc_put(out, "</span></div>\n");
}

/* ---- tables ---- */

static void put_gates(qc_out *out, const cJSON *gates)
{
    const cJSON *gate;
    if (!gates || !gates->child)
        return;
    qc_put(out, "<h3>Gates</h3>\n<div class=\"box\"><table>\n<tr><th>gate</th><th class=\"n\">value</th><th "
                "class=\"n\">limit</th>"
                "<th></th></tr>\n");
    cJSON_ArrayForEach(gate, gates)
    {
        const char *name = qc_report_string(gate, "name");
        bool pass = cJSON_IsTrue(qc_json_get(gate, "pass"));
        qc_put(out, "<tr>");
        put_cell(out, "name", name);
        qc_put(out, "<td class=\"n\">");
        qc_put_figure(out, name, qc_report_number(gate, "value"));
        qc_put(out, "</td><td class=\"n\">");
        qc_put_figure(out, name, qc_report_number(gate, "limit"));
        qc_put(out, "</td><td class=\"%s\">%s</td></tr>\n", pass ? "ok" : "no",
               pass ? "✓ passed" : "✗ failed");
    }
    qc_put(out, "</table></div>\n");
}

static void put_percentiles(qc_out *out, const cJSON *evaluation)
{
    const cJSON *list = qc_json_get(evaluation, "kld_percentiles"), *p;
    if (!list || !list->child)
        return;
    qc_put(out, "<details><summary>KL divergence in percentiles</summary><div><table>\n<tr>");
    cJSON_ArrayForEach(p, list)
    {
        qc_put(out, "<th class=\"n\">");
        qc_put_xml(out, p->string);
        qc_put(out, "</th>");
    }
    qc_put(out, "</tr>\n<tr>");
    cJSON_ArrayForEach(p, list) put_number(out, "n", cJSON_IsNumber(p) ? p->valuedouble : NAN, "", 4);
    qc_put(out, "</tr></table></div></details>\n");
}

static void put_tensors(qc_out *out, const cJSON *tensors)
{
    int n = cJSON_GetArraySize(tensors), row = 0;
    const cJSON *t;
    qc_put(out,
           "<details><summary>Tensors (%d)</summary><div><table>\n<tr><th>tensor</th><th>done</th><th "
           "class=\"n\">bits</th>"
           "<th class=\"n\">group</th><th class=\"n\">size</th><th>method</th><th class=\"n\">relative "
           "error</th>"
           "<th class=\"n\">of RTN's error</th></tr>\n",
           n);
    cJSON_ArrayForEach(t, tensors)
    {
        double rtn = qc_report_number(t, "error_rtn");
        if (row++ == MAX_ROWS)
            break;
        qc_put(out, "<tr>");
        put_cell(out, "name", qc_report_string(t, "name"));
        put_cell(out, "", qc_report_string(t, "action"));
        put_number(out, "n", qc_report_number(t, "bits"), "", 4);
        put_number(out, "n", qc_report_number(t, "group"), "", 6);
        put_size_cell(out, qc_report_number(t, "bytes_out"));
        put_cell(out, "", qc_report_string(t, "method"));
        put_number(out, "n", qc_report_number(t, "relative_error"), "", 4);
        put_number(out, "n", rtn > 0 ? qc_report_number(t, "error") / rtn : NAN, "", 3);
        qc_put(out, "</tr>\n");
    }
    qc_put(out, "</table>");
    if (n > MAX_ROWS)
        qc_put(out, "<p class=\"note\">and %d more, in the JSON</p>", n - MAX_ROWS);
    qc_put(out, "</div></details>\n");
}

static void put_events(qc_out *out, const cJSON *events)
{
    int n = cJSON_GetArraySize(events), row = 0;
    const cJSON *e;
    if (n == 0)
        return;
    qc_put(out,
           "<details%s><summary>Events (%d)</summary><div><table>\n<tr><th>kind</th><th>level</th><th "
           "class=\"n\">times</th>"
           "<th>what</th><th>done</th></tr>\n",
           n <= 12 ? " open" : "", n);
    cJSON_ArrayForEach(e, events)
    {
        if (row++ == MAX_ROWS)
            break;
        qc_put(out, "<tr>");
        put_cell(out, "", qc_report_string(e, "kind"));
        put_cell(out, "", qc_report_string(e, "level"));
        put_number(out, "n", qc_report_number(e, "count"), "", 12);
        put_cell(out, "name", qc_report_string(e, "subject"));
        put_cell(out, "name", qc_report_string(e, "detail"));
        qc_put(out, "</tr>\n");
    }
    qc_put(out, "</table></div></details>\n");
}

static void put_pair(qc_out *out, const char *name, const char *value, const char *more)
{
    if (!*value)
        return;
    qc_put(out, "<tr><td>%s</td><td class=\"name\">", name);
    qc_put_xml(out, value);
    if (*more) {
        qc_put(out, " <code>");
        qc_put_xml(out, more);
        qc_put(out, "</code>");
    }
    qc_put(out, "</td></tr>\n");
}

static void put_provenance(qc_out *out, const cJSON *doc)
{
    const cJSON *tool = qc_json_get(doc, "tool"), *model = qc_json_get(doc, "model"), *x;
    const cJSON *calibration = qc_json_get(doc, "calibration");
    qc_put(out, "<details><summary>Provenance</summary><div><table>\n");
    put_pair(out, "tool", qc_report_string(tool, "name"), qc_report_string(tool, "version"));
    put_pair(out, "commit", qc_report_string(tool, "commit"), "");
    put_pair(out, "kernels", qc_report_string(tool, "kernels"), qc_report_string(tool, "compute"));
    cJSON_ArrayForEach(x, qc_json_get(model, "files"))
        put_pair(out, "input", qc_report_string(x, "file"), qc_report_string(x, "sha256"));
    put_pair(out, "calibration", qc_report_string(calibration, "text"),
             qc_report_string(calibration, "ids_sha256"));
    put_pair(out, "statistics", qc_report_string(calibration, "statistics"),
             qc_report_string(calibration, "statistics_sha256"));
    for (int i = 0; i < qc_report_n_parts(doc); i++) {
        qc_report_part part = qc_report_part_at(doc, i);
        put_pair(out, "scored text", qc_report_string(part.evaluation, "text"),
                 qc_report_string(part.evaluation, "ids_sha256"));
        put_pair(out, "output", qc_report_string(part.artifact, "path"),
                 qc_report_string(part.artifact, "sha256"));
    }
    cJSON_ArrayForEach(x, qc_json_get(doc, "timings")) if (cJSON_IsNumber(x))
    {
        qc_put(out, "<tr><td>seconds, ");
        qc_put_xml(out, x->string);
        qc_put(out, "</td><td>%.2f</td></tr>\n", x->valuedouble);
    }
    qc_put(out, "</table></div></details>\n");
}

static void put_recipe(qc_out *out, const cJSON *doc)
{
    char *text = qc_json_print(qc_json_get(doc, "recipe"));
    if (!text && out->rc == QC_OK)
        out->rc = qc_fail_nomem(out->err, "recipe", 1);
    if (!text)
        return;
    qc_put(out, "<details><summary>Recipe, defaults included</summary><pre>");
    qc_put_xml(out, text);
    qc_put(out, "</pre></details>\n");
    qc_free(text);
}

/* ---- page ---- */

static void put_verdict(qc_out *out, const cJSON *doc)
{
    int n = 0, failed = 0;
    for (int i = 0; i < qc_report_n_parts(doc); i++) {
        const cJSON *gate;
        cJSON_ArrayForEach(gate, qc_report_part_at(doc, i).gates)
        {
            n++;
            failed += !cJSON_IsTrue(qc_json_get(gate, "pass"));
        }
    }
    if (failed)
        qc_put(out, "<span class=\"verdict fail\">✗ %d of %d gates failed</span>", failed, n);
    else if (n)
        qc_put(out, "<span class=\"verdict pass\">✓ all %d gates passed</span>", n);
    else
        qc_put(out, "<span class=\"verdict none\">no gates</span>");
}

static void put_part(qc_out *out, const cJSON *doc, int i)
{
    qc_report_part part = qc_report_part_at(doc, i);
    qc_put(out, "<h2>");
    qc_put_xml(out, qc_report_string(part.artifact, "path"));
    qc_put(out, "%s</h2>\n<div class=\"cards\">\n",
           cJSON_IsTrue(qc_json_get(part.artifact, "rejected"))
               ? " <span class=\"verdict fail\">rejected</span>"
               : "");
    put_size_card(out, part);
    if (part.evaluation)
        put_evaluation_cards(out, part.evaluation);
    if (i == 0)
        put_run_cards(out, doc);
    qc_put(out, "</div>\n");
    put_gates(out, part.gates);
    qc_put(out, "<div class=\"plots\">\n");
    if (part.evaluation) {
        qc_plot_windows(out, part.evaluation);
        qc_plot_kld(out, part.evaluation);
    }
    qc_plot_errors(out, part.tensors);
    qc_plot_sizes(out, part);
    qc_put(out, "</div>\n");
    if (part.evaluation)
        put_percentiles(out, part.evaluation);
    put_tensors(out, part.tensors);
}

static void put_report(qc_out *out, const cJSON *doc, bool several)
{
    const cJSON *model = qc_json_get(doc, "model"), *tool = qc_json_get(doc, "tool");
    const char *path = qc_report_string(model, "path"), *heading = several ? "h2" : "h1";
    qc_put(out, "<section>\n<header><%s>", heading);
    qc_put_xml(out, *path ? qc_path_base(path) : "report");
    qc_put(out, "</%s>\n<p class=\"soft\">", heading);
    put_verdict(out, doc);
    qc_put(out, " &nbsp;");
    qc_put_xml(out, path);
    qc_put(out, ", family ");
    qc_put_xml(out, qc_report_string(model, "family"));
    qc_put(out, ", %.0f layers; ", qc_report_number(model, "layers"));
    qc_put_xml(out, qc_report_string(tool, "name"));
    qc_put(out, " ");
    qc_put_xml(out, qc_report_string(tool, "version"));
    qc_put(out, "</p></header>\n");
    for (int i = 0; i < qc_report_n_parts(doc); i++)
        put_part(out, doc, i);
    put_events(out, qc_json_get(doc, "events"));
    put_provenance(out, doc);
    put_recipe(out, doc);
    qc_put(out, "</section>\n");
}

/* One line per output. */
static void put_overview(qc_out *out, const cJSON *const *docs, int n_docs)
{
    qc_put(out,
           "<header><h1>%d reports</h1></header>\n<div class=\"box\"><table>\n<tr><th>output</th><th "
           "class=\"n\">size</th>"
           "<th class=\"n\">perplexity</th><th class=\"n\">ratio</th><th class=\"n\">KLD mean</th><th "
           "class=\"n\">same top</th>"
           "<th class=\"n\">fallbacks</th><th>gates</th></tr>\n",
           n_docs);
    for (int d = 0; d < n_docs; d++)
        for (int i = 0; i < qc_report_n_parts(docs[d]); i++) {
            qc_report_part part = qc_report_part_at(docs[d], i);
            const cJSON *gate;
            bool pass = true;
            cJSON_ArrayForEach(gate, part.gates) pass = pass && cJSON_IsTrue(qc_json_get(gate, "pass"));
            qc_put(out, "<tr>");
            put_cell(out, "name", qc_report_string(part.artifact, "path"));
            put_size_cell(out, qc_report_number(part.artifact, "bytes"));
            put_number(out, "n", qc_report_number(part.evaluation, "ppl"), "", 6);
            put_number(out, "n", qc_report_number(part.evaluation, "ppl_ratio"), "", 6);
            put_number(out, "n", qc_report_number(part.evaluation, "kld_mean"), "", 4);
            put_number(out, "n", qc_report_number(part.evaluation, "top1"), "", 4);
            put_number(out, "n", qc_report_events(docs[d], NULL), "", 12);
            if (!part.gates || !part.gates->child)
                qc_put(out, "<td></td></tr>\n");
            else
                qc_put(out, "<td class=\"%s\">%s</td></tr>\n", pass ? "ok" : "no",
                       pass ? "✓ passed" : "✗ failed");
        }
    qc_put(out, "</table></div>\n");
}

void qc_put_html(qc_out *out, const cJSON *const *docs, int n_docs)
{
    qc_put(out, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
                "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<title>qconvert: ");
    qc_put_xml(out, qc_path_base(qc_report_string(qc_report_part_at(docs[0], 0).artifact, "path")));
    qc_put(out, "</title>\n<style>\n");
    for (int i = 0; qc_html_style[i]; i++)
        qc_put(out, "%s", qc_html_style[i]);
    qc_put(out, "</style>\n</head>\n<body>\n<main>\n");
    if (n_docs > 1) {
        put_overview(out, docs, n_docs);
        qc_put(out, "<div class=\"plots\">\n");
    } else
        qc_put(out, "<div>\n");
    if (n_docs > 1)
        qc_plot_scatter(out, docs, n_docs);
    qc_put(out, "</div>\n");
    for (int d = 0; d < n_docs; d++)
        put_report(out, docs[d], n_docs > 1);
    if (n_docs == 1 && qc_report_n_parts(docs[0]) > 1)
        qc_plot_scatter(out, docs, 1);
    qc_put(out, "</main>\n</body>\n</html>\n");
}
