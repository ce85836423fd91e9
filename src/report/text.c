/* The summary that a run prints. docs/report.md shows every line that there can be. */
#include "render.h"
#include "report_doc.h"
#include "report_internal.h"

#include <math.h>
#include <string.h>

static const char *plural(double n)
{
    return n == 1 ? "" : "s";
}

static void put_evaluation(qc_out *out, const cJSON *e)
{
    double windows = qc_report_number(e, "windows"), ratio = qc_report_number(e, "ppl_ratio");
    const char *text = qc_report_string(e, "text"), *protocol = qc_report_string(e, "protocol");
    qc_put(out, "  scored        %.0f window%s of %.0f tokens (%.0f positions) of ", windows, plural(windows),
           qc_report_number(e, "length"), qc_report_number(e, "tokens_scored"));
    qc_put_line(out, *text ? text : "?");
    qc_put(out, "%s", cJSON_IsTrue(qc_json_get(e, "bos")) ? ", BOS in front" : "");
    if (strcmp(protocol, "gptq") != 0) {
        qc_put(out, ", protocol ");
        qc_put_line(out, protocol);
    }
    if (strcmp(protocol, "full") == 0)
        qc_put(out, ", stride %.0f", qc_report_number(e, "stride"));
    qc_put(out, "\n  perplexity    %.4f", qc_report_number(e, "ppl"));
    if (isnan(qc_report_number(e, "ppl_reference"))) {
        qc_put(out, " +- %.4f\n", qc_report_number(e, "ppl_se"));
        return;
    }
    qc_put(out, ", reference %.4f, ratio %.5f\n", qc_report_number(e, "ppl_reference"), ratio);
    qc_put(out, "  delta NLL     %+.6f +- %.6f nats\n", qc_report_number(e, "delta_nll"),
           qc_report_number(e, "delta_nll_se"));
    qc_put(out, "  KL divergence mean %.6f, p99 %.5f, max %.4f nats; same top token %.2f %%\n",
           qc_report_number(e, "kld_mean"), qc_report_number(e, "kld_p99"), qc_report_number(e, "kld_max"),
           100 * qc_report_number(e, "top1"));
}

static void put_gate(qc_out *out, const cJSON *gate)
{
    const char *name = qc_report_string(gate, "name");
    qc_put(out, "  gate          ");
    qc_put_line(out, name);
    qc_put(out, " ");
    qc_put_figure(out, name, qc_report_number(gate, "value"));
    qc_put(out, ", limit ");
    qc_put_figure(out, name, qc_report_number(gate, "limit"));
    qc_put(out, ": %s\n", cJSON_IsTrue(qc_json_get(gate, "pass")) ? "passed" : "FAILED");
}

static void put_part(qc_out *out, qc_report_part part)
{
    double n_bytes = qc_report_number(part.artifact, "bytes"),
           bytes_in = qc_report_sum(part.tensors, "bytes_in");
    const cJSON *gate;
    qc_put_line(out, qc_report_string(part.artifact, "path"));
    qc_put(out, "%s\n  size          %.2f MB of %.2f MB (%.1f %%)\n",
           cJSON_IsTrue(qc_json_get(part.artifact, "rejected")) ? "  (rejected: a gate failed)" : "",
           n_bytes / 1e6, bytes_in / 1e6, bytes_in > 0 ? 100 * n_bytes / bytes_in : 0);
    if (part.evaluation)
        put_evaluation(out, part.evaluation);
    cJSON_ArrayForEach(gate, part.gates) put_gate(out, gate);
}

/* One line per kind of fallback: how often, and the first one. */
static void put_fallbacks(qc_out *out, const cJSON *doc)
{
    const cJSON *events = qc_json_get(doc, "events"), *event;
    cJSON_ArrayForEach(event, events)
    {
        const char *kind = qc_report_string(event, "kind");
        bool first = strcmp(qc_report_string(event, "level"), "fallback") == 0;
        for (const cJSON *e = events->child; e != event && first; e = e->next)
            first = strcmp(qc_report_string(e, "level"), "fallback") != 0 ||
                    strcmp(qc_report_string(e, "kind"), kind) != 0;
        if (!first)
            continue;
        qc_put(out, "fallback        ");
        qc_put_line(out, kind);
        qc_put(out, ", %.0f times, first ", qc_report_events(doc, kind));
        qc_put_line(out, qc_report_string(event, "subject"));
        qc_put(out, ": ");
        qc_put_line(out, qc_report_string(event, "detail"));
        qc_put(out, "\n");
    }
}

static void put_calibration(qc_out *out, const cJSON *c)
{
    const char *statistics = qc_report_string(c, "statistics");
    double windows = qc_report_number(c, "windows");
    qc_put(out, "calibration     ");
    if (*statistics && isnan(windows))
        qc_put(out, "importance matrix ");
    qc_put_line(out, statistics);
    if (!isnan(windows)) {
        qc_put(out, "%s%.0f window%s of %.0f tokens ", *statistics ? ", " : "", windows, plural(windows),
               qc_report_number(c, "length"));
        if (!*statistics)
            qc_put(out, "(%.0f of %.0f) ", qc_report_number(c, "tokens"), qc_report_number(c, "tokens_text"));
        qc_put(out, "of ");
        qc_put_line(out, qc_report_string(c, "text"));
    }
    if (!*statistics)
        qc_put(out, ", perplexity of the model there %.4f", qc_report_number(c, "ppl"));
    qc_put(out, "\n");
}

void qc_put_text(qc_out *out, const cJSON *doc)
{
    const cJSON *calibration = qc_json_get(doc, "calibration");
    for (int i = 0; i < qc_report_n_parts(doc); i++)
        put_part(out, qc_report_part_at(doc, i));
    put_fallbacks(out, doc);
    if (calibration)
        put_calibration(out, calibration);
    qc_put(out, "peak memory     %.0f MB\n", qc_report_number(doc, "peak_rss_bytes") / 1e6);
}

int qc_render_evaluation(const cJSON *evaluation, qc_buf *ret, qc_err *err)
{
    qc_out out = {.buf = ret, .err = err};
    put_evaluation(&out, evaluation);
    return out.rc;
}
