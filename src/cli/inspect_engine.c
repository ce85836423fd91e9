/* qinspect --engine: what an engine would say to an artifact. */
#include "inspect.h"

#include "engine_lint.h"
#include "main.h"
#include "open.h"
#include "qc_alloc.h"
#include "qc_json.h"

#include <stdio.h>
#include <string.h>

static cJSON *findings_json(const qc_source *src, const char *engine, const qc_event_list *list)
{
    qc_json_watch();
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddNumberToObject(doc, "version", 1);
    cJSON_AddStringToObject(doc, "path", src->path);
    cJSON_AddStringToObject(doc, "format", src->format);
    cJSON_AddStringToObject(doc, "engine", engine);
    cJSON_AddBoolToObject(doc, "loads", qc_event_count(list, NULL) == 0);
    cJSON *items = cJSON_AddArrayToObject(doc, "findings");
    for (int64_t i = 0; i < list->n_events; i++) {
        const qc_event *e = &list->events[i];
        cJSON *item = qc_json_add_item(items, cJSON_CreateObject());
        cJSON_AddStringToObject(item, "level", e->level == QC_EVENT_FALLBACK ? "refuses" : "note");
        cJSON_AddStringToObject(item, "rule", e->kind);
        cJSON_AddStringToObject(item, "subject", e->subject);
        cJSON_AddStringToObject(item, "detail", e->detail);
    }
    return qc_json_watched(doc);
}

static void print_findings(const qc_source *src, const char *engine, const qc_event_list *list)
{
    for (int64_t i = 0; i < list->n_events; i++) {
        const qc_event *e = &list->events[i];
        printf("%s  %s%s%s\n", e->level == QC_EVENT_FALLBACK ? "refuses" : "note   ", e->subject,
               *e->subject ? ": " : "", e->detail);
    }
    if (qc_event_count(list, NULL) == 0)
        printf("%s: nothing is known that %s refuses (%s)\n", src->path, engine, src->format);
}

static int lint(const qc_source *src, const char *engine, qc_event_list *findings, qc_err *err)
{
    const qc_tensor_info **infos = qc_alloc((size_t)src->n_tensors + 1, sizeof *infos);
    if (!infos)
        return qc_fail_nomem(err, src->path, (unsigned long long)src->n_tensors * sizeof *infos);
    for (int64_t i = 0; i < src->n_tensors; i++)
        infos[i] = src->info(src, i);
    qc_lint_input input = {.path = src->path,
                           .format = src->format,
                           .tensors = infos,
                           .n_tensors = src->n_tensors,
                           .values = src};
    int rc = qc_engine_lint(engine, &input, findings, err);
    qc_free(infos);
    return rc;
}

int qc_inspect_engine(const char *path, const char *engine, bool json, qc_err *err)
{
    qc_source *src;
    qc_event_list findings = {0};
    QC_TRY(qc_source_open(path, &src, err));
    int rc = lint(src, engine, &findings, err);
    int64_t refused = qc_event_count(&findings, NULL);
    if (rc == QC_OK && json)
        rc = qc_print_json(findings_json(src, engine, &findings), err);
    else if (rc == QC_OK)
        print_findings(src, engine, &findings);
    if (rc == QC_OK && refused)
        rc = qc_fail(err, QC_E_UNSUPPORTED, "%s: %s would refuse it (%lld finding%s)", src->path, engine,
                     (long long)refused, refused > 1 ? "s" : "");
    qc_event_list_clear(&findings);
    qc_source_close(src);
    return rc;
}
