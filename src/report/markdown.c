/* Markdown for a comment of a pull request. Lists that a report may make long are cut. */
#include "render.h"
#include "report_doc.h"
#include "report_internal.h"

#include "qc_file.h"

#include <math.h>
#include <string.h>

#define MAX_PARTS   8
#define MAX_GATES   40
#define MAX_TENSORS 5
#define MAX_EVENTS  8
#define NAME_BYTES  120

static void put_gates(qc_out *out, const cJSON *gates)
{
    int n = 0;
    const cJSON *gate;
    if (!gates || !gates->child)
        return;
    qc_put(out, "\n| gate | value | limit | |\n|---|--:|--:|---|\n");
    cJSON_ArrayForEach(gate, gates)
    {
        const char *name = qc_report_string(gate, "name");
        if (n++ == MAX_GATES)
            break;
        qc_put(out, "| ");
        qc_put_markdown(out, name, NAME_BYTES);
        qc_put(out, " | ");
        qc_put_figure(out, name, qc_report_number(gate, "value"));
        qc_put(out, " | ");
        qc_put_figure(out, name, qc_report_number(gate, "limit"));
        qc_put(out, " | %s |\n", cJSON_IsTrue(qc_json_get(gate, "pass")) ? "✅ passed" : "❌ **failed**");
    }
    if (n > MAX_GATES)
        qc_put(out, "\nand %d gates more\n", cJSON_GetArraySize(gates) - MAX_GATES);
}

static void put_evaluation(qc_out *out, const cJSON *e)
{
    qc_put(out, "\n| figure | value |\n|---|--:|\n");
    qc_put(out, "| perplexity | %.4f |\n", qc_report_number(e, "ppl"));
    if (!isnan(qc_report_number(e, "ppl_reference"))) {
        qc_put(out, "| reference | %.4f |\n| ratio | %.5f |\n", qc_report_number(e, "ppl_reference"),
               qc_report_number(e, "ppl_ratio"));
        qc_put(out, "| delta NLL | %+.6f ± %.6f |\n", qc_report_number(e, "delta_nll"),
               qc_report_number(e, "delta_nll_se"));
        qc_put(
            out,
            "| KL divergence, mean | %.6f |\n| KL divergence, p99 | %.5f |\n| same top token | %.2f %% |\n",
            qc_report_number(e, "kld_mean"), qc_report_number(e, "kld_p99"),
            100 * qc_report_number(e, "top1"));
    }
    qc_put(out, "\n%.0f windows of %.0f tokens of ", qc_report_number(e, "windows"),
           qc_report_number(e, "length"));
    qc_put_markdown(out, qc_report_string(e, "text"), NAME_BYTES);
    qc_put(out, "\n");
}

/* The quantized tensors with the largest errors, worst first. */
static void put_worst(qc_out *out, const cJSON *tensors)
{
    const cJSON *worst[MAX_TENSORS] = {NULL}, *t;
    int n = 0;
    cJSON_ArrayForEach(t, tensors)
    {
        double error = qc_report_number(t, "relative_error");
        int at = n;
        while (!isnan(error) && at > 0 && error > qc_report_number(worst[at - 1], "relative_error"))
            at--;
        if (isnan(error) || at == MAX_TENSORS)
            continue;
        n += n < MAX_TENSORS;
        memmove(worst + at + 1, worst + at, sizeof *worst * (size_t)(n - 1 - at));
        worst[at] = t;
    }
    if (n == 0)
        return;
    qc_put(out, "\n<details><summary>largest errors of matrices</summary>\n\n| tensor | bits | relative "
                "error |\n|---|--:|--:|\n");
    for (int i = 0; i < n; i++) {
        qc_put(out, "| ");
        qc_put_markdown(out, qc_report_string(worst[i], "name"), NAME_BYTES);
        qc_put(out, " | %.0f | %.3e |\n", qc_report_number(worst[i], "bits"),
               qc_report_number(worst[i], "relative_error"));
    }
    qc_put(out, "\n</details>\n");
}

static void put_fallbacks(qc_out *out, const cJSON *doc)
{
    int n = 0;
    const cJSON *event;
    double all = qc_report_events(doc, NULL);
    if (all == 0)
        return;
    qc_put(out, "\n**%.0f fallback%s**\n\n", all, all == 1 ? "" : "s");
    cJSON_ArrayForEach(event, qc_json_get(doc, "events"))
    {
        if (strcmp(qc_report_string(event, "level"), "fallback") != 0)
            continue;
        if (n++ == MAX_EVENTS) {
            qc_put(out, "- ...\n");
            return;
        }
        qc_put(out, "- ");
        qc_put_markdown(out, qc_report_string(event, "kind"), NAME_BYTES);
        qc_put(out, ", %.0f times: ", qc_report_number(event, "count"));
        qc_put_markdown(out, qc_report_string(event, "subject"), NAME_BYTES);
        qc_put(out, " — ");
        qc_put_markdown(out, qc_report_string(event, "detail"), 2 * NAME_BYTES);
        qc_put(out, "\n");
    }
}

static void put_part(qc_out *out, qc_report_part part)
{
    double n_bytes = qc_report_number(part.artifact, "bytes"),
           bytes_in = qc_report_sum(part.tensors, "bytes_in");
    qc_put(out, "\n**");
    qc_put_markdown(out, qc_report_string(part.artifact, "path"), NAME_BYTES);
    qc_put(out, "**%s: ", cJSON_IsTrue(qc_json_get(part.artifact, "rejected")) ? " (rejected)" : "");
    qc_put_bytes(out, n_bytes);
    qc_put(out, " of ");
    qc_put_bytes(out, bytes_in);
    qc_put(out, " (%.1f %%)\n", bytes_in > 0 ? 100 * n_bytes / bytes_in : 0);
    put_gates(out, part.gates);
    if (part.evaluation)
        put_evaluation(out, part.evaluation);
    put_worst(out, part.tensors);
}

void qc_put_markdown_report(qc_out *out, const cJSON *doc)
{
    int n = qc_report_n_parts(doc), n_gates = 0;
    const cJSON *model = qc_json_get(doc, "model"), *tool = qc_json_get(doc, "tool");
    for (int i = 0; i < n; i++)
        n_gates += cJSON_GetArraySize(qc_report_part_at(doc, i).gates);
    qc_put(out, "### %s ",
           !qc_report_passed(doc) ? "❌ a gate failed:"
           : n_gates              ? "✅ all gates passed:"
                                  : "quantized:");
    qc_put_markdown(out, qc_path_base(qc_report_string(model, "path")), NAME_BYTES);
    qc_put(out, "\n");
    for (int i = 0; i < n && i < MAX_PARTS; i++)
        put_part(out, qc_report_part_at(doc, i));
    if (n > MAX_PARTS)
        qc_put(out, "\nand %d outputs more\n", n - MAX_PARTS);
    put_fallbacks(out, doc);
    qc_put(out, "\n<sub>");
    qc_put_markdown(out, qc_report_string(tool, "name"), NAME_BYTES);
    qc_put(out, " ");
    qc_put_markdown(out, qc_report_string(tool, "version"), NAME_BYTES);
    qc_put(out, ", %.0f s, peak memory ", qc_report_number(qc_json_get(doc, "timings"), "total"));
    qc_put_bytes(out, qc_report_number(doc, "peak_rss_bytes"));
    qc_put(out, "</sub>\n");
}
