/* A verdict for people and for CI systems. */
#include "report_doc.h"
#include "report_internal.h"
#include "verdict.h"

#include <string.h>

static int n_failed(const cJSON *gates)
{
    int n = 0;
    const cJSON *gate;
    cJSON_ArrayForEach(gate, gates) n += !cJSON_IsTrue(qc_json_get(gate, "pass"));
    return n;
}

static void put_text(qc_out *out, const cJSON *gates)
{
    const char *artifact = "";
    const cJSON *gate;
    cJSON_ArrayForEach(gate, gates)
    {
        if (strcmp(artifact, qc_report_string(gate, "artifact")) != 0) {
            artifact = qc_report_string(gate, "artifact");
            qc_put_line(out, artifact);
            qc_put(out, "\n");
        }
        qc_put(out, "  %-14s %s: ", qc_report_string(gate, "name"),
               cJSON_IsTrue(qc_json_get(gate, "pass")) ? "passed" : "FAILED");
        qc_put_line(out, qc_report_string(gate, "reason"));
        qc_put(out, "\n");
    }
    int n = cJSON_GetArraySize(gates), failed = n_failed(gates);
    if (failed)
        qc_put(out, "%d of %d gates failed\n", failed, n);
    else
        qc_put(out, "all %d gates passed\n", n);
}

#define MAX_ROWS 100

static void put_markdown(qc_out *out, const cJSON *verdict, const cJSON *gates)
{
    int n = cJSON_GetArraySize(gates), failed = n_failed(gates), row = 0;
    const char *baseline = qc_report_string(verdict, "baseline");
    const cJSON *gate;
    if (failed)
        qc_put(out, "### ❌ %d of %d gates failed: ", failed, n);
    else
        qc_put(out, "### ✅ all %d gates passed: ", n);
    qc_put_markdown(out, qc_report_string(verdict, "report"), 120);
    qc_put(out, "\n");
    if (*baseline) {
        qc_put(out, "\nagainst ");
        qc_put_markdown(out, baseline, 120);
        qc_put(out, "\n");
    }
    qc_put(out, "\n| output | gate | | why |\n|---|---|---|---|\n");
    cJSON_ArrayForEach(gate, gates)
    {
        if (row++ == MAX_ROWS)
            break;
        qc_put(out, "| ");
        qc_put_markdown(out, qc_report_string(gate, "artifact"), 120);
        qc_put(out, " | ");
        qc_put_markdown(out, qc_report_string(gate, "name"), 120);
        qc_put(out, " | %s | ", cJSON_IsTrue(qc_json_get(gate, "pass")) ? "✅" : "❌");
        qc_put_markdown(out, qc_report_string(gate, "reason"), 320);
        qc_put(out, " |\n");
    }
    if (n > MAX_ROWS)
        qc_put(out, "\nand %d gates more\n", n - MAX_ROWS);
}

int qc_verdict_render(const cJSON *verdict, qc_render_format format, qc_buf *ret, qc_err *err)
{
    qc_out out = {.buf = ret, .err = err};
    const cJSON *gates = qc_json_get(verdict, "gates");
    if (format == QC_RENDER_JUNIT) {
        const qc_junit_suite suite = {.name = qc_report_string(verdict, "report"), .gates = gates};
        qc_put_junit_suites(&out, &suite, 1);
    } else if (format == QC_RENDER_MARKDOWN)
        put_markdown(&out, verdict, gates);
    else
        put_text(&out, gates);
    return out.rc;
}
