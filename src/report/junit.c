/* JUnit XML as CI systems read it: testsuites > testsuite > testcase, a failure with its message. */
#include "render.h"
#include "report_doc.h"
#include "report_internal.h"

#include "qc_alloc.h"

#include <math.h>
#include <string.h>

static int n_failed(const cJSON *gates)
{
    int n = 0;
    const cJSON *gate;
    cJSON_ArrayForEach(gate, gates) n += !cJSON_IsTrue(qc_json_get(gate, "pass"));
    return n;
}

static void put_property(qc_out *out, const char *name, const char *value)
{
    if (!*value)
        return;
    qc_put(out, "      <property name=\"%s\" value=\"", name);
    qc_put_xml(out, value);
    qc_put(out, "\"/>\n");
}

/* The reason of a verdict, or value and limit of a run. */
static void put_message(qc_out *out, const cJSON *gate)
{
    const char *name = qc_report_string(gate, "name"), *reason = qc_report_string(gate, "reason");
    qc_put_xml(out, name);
    if (*reason) {
        qc_put(out, ": ");
        qc_put_xml(out, reason);
        return;
    }
    qc_put(out, " ");
    qc_put_figure(out, name, qc_report_number(gate, "value"));
    qc_put(out, ", limit ");
    qc_put_figure(out, name, qc_report_number(gate, "limit"));
}

static void put_case(qc_out *out, const char *suite, const cJSON *gate)
{
    const char *artifact = qc_report_string(gate, "artifact");
    qc_put(out, "    <testcase classname=\"");
    qc_put_xml(out, *artifact ? artifact : suite);
    qc_put(out, "\" name=\"");
    qc_put_xml(out, qc_report_string(gate, "name"));
    qc_put(out, "%s\" time=\"0\">\n", cJSON_IsTrue(qc_json_get(gate, "to_baseline")) ? " to baseline" : "");
    if (cJSON_IsTrue(qc_json_get(gate, "pass"))) {
        qc_put(out, "      <system-out>");
        put_message(out, gate);
        qc_put(out, "</system-out>\n    </testcase>\n");
    } else {
        qc_put(out, "      <failure type=\"gate\" message=\"");
        put_message(out, gate);
        qc_put(out, "\"/>\n    </testcase>\n");
    }
}

/* A suite without a case is an error to some systems: without gates there is one that was skipped. */
static void put_suite(qc_out *out, const qc_junit_suite *s)
{
    int n = cJSON_GetArraySize(s->gates);
    const cJSON *gate, *tool = qc_json_get(s->doc, "tool");
    qc_put(out, "  <testsuite name=\"");
    qc_put_xml(out, s->name);
    qc_put(out, "\" tests=\"%d\" failures=\"%d\" errors=\"0\" skipped=\"%d\" time=\"%.3f\">\n", n ? n : 1,
           n_failed(s->gates), n ? 0 : 1, isfinite(s->seconds) ? s->seconds : 0);
    if (s->doc) {
        qc_put(out, "    <properties>\n");
        put_property(out, "model", qc_report_string(qc_json_get(s->doc, "model"), "path"));
        put_property(out, "tool", qc_report_string(tool, "name"));
        put_property(out, "version", qc_report_string(tool, "version"));
        put_property(out, "commit", qc_report_string(tool, "commit"));
        put_property(out, "sha256", s->sha256);
        qc_put(out, "    </properties>\n");
    }
    cJSON_ArrayForEach(gate, s->gates) put_case(out, s->name, gate);
    if (n == 0) {
        qc_put(out, "    <testcase classname=\"");
        qc_put_xml(out, s->name);
        qc_put(out, "\" name=\"no gates\" time=\"0\">\n      <skipped message=\"there are no gates\"/>\n    "
                    "</testcase>\n");
    }
    qc_put(out, "  </testsuite>\n");
}

void qc_put_junit_suites(qc_out *out, const qc_junit_suite *suites, int n_suites)
{
    int n = 0, failed = 0;
    for (int i = 0; i < n_suites; i++) {
        n += suites[i].gates && suites[i].gates->child ? cJSON_GetArraySize(suites[i].gates) : 1;
        failed += n_failed(suites[i].gates);
    }
    qc_put(out,
           "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"qconvert\" tests=\"%d\" "
           "failures=\"%d\">\n",
           n, failed);
    for (int i = 0; i < n_suites; i++)
        put_suite(out, &suites[i]);
    qc_put(out, "</testsuites>\n");
}

void qc_put_junit(qc_out *out, const cJSON *const *docs, int n_docs)
{
    size_t n = 0, i = 0;
    for (int d = 0; d < n_docs; d++)
        n += (size_t)qc_report_n_parts(docs[d]);
    qc_junit_suite *suites = qc_alloc(n, sizeof *suites);
    if (!suites) {
        out->rc = out->rc < 0 ? out->rc : qc_fail_nomem(out->err, "suites", n * sizeof *suites);
        return;
    }
    for (int d = 0; d < n_docs; d++)
        for (int p = 0; p < qc_report_n_parts(docs[d]); p++) {
            qc_report_part part = qc_report_part_at(docs[d], p);
            suites[i++] =
                (qc_junit_suite){.name = qc_report_string(part.artifact, "path"),
                                 .gates = part.gates,
                                 .doc = docs[d],
                                 .seconds = qc_report_number(qc_json_get(docs[d], "timings"), "total"),
                                 .sha256 = qc_report_string(part.artifact, "sha256")};
        }
    qc_put_junit_suites(out, suites, (int)n);
    qc_free(suites);
}
