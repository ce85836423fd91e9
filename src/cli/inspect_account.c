/* qinspect account: the tensors of an artifact against the report of the run that made it. */
#include "inspect.h"

#include "main.h"
#include "open.h"
#include "qc_file.h"
#include "qc_json.h"
#include "qc_result.h"
#include "report_doc.h"
#include "source_error.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define JSON_VERSION 1

typedef struct account_job {
    const char *path;
    qc_source *artifact, *model;
    cJSON *report;
    double tolerance;
    cJSON *list; /* of the answer */
    int n_compared, n_off;
    double worst;
} account_job;

/* The output of that file name; the only one goes by any name. */
static int find_part(const account_job *j, const char *report, qc_report_part *ret, qc_err *err)
{
    int n = qc_report_n_parts(j->report);
    for (int i = 0; i < n; i++) {
        *ret = qc_report_part_at(j->report, i);
        if (n == 1 ||
            strcmp(qc_path_base(qc_report_string(ret->artifact, "path")), qc_path_base(j->path)) == 0)
            return QC_OK;
    }
    return qc_fail(err, QC_E_INPUT, "%s: none of its %d outputs is called %s", report, n,
                   qc_path_base(j->path));
}

static bool is_comparable(const cJSON *tensor)
{
    return !isnan(qc_report_number(tensor, "stored_error"));
}

static int compare_tensor(account_job *j, const cJSON *tensor, qc_err *err)
{
    const char *name = qc_report_string(tensor, "name");
    double error = 0, weight = 0, said = qc_report_number(tensor, "stored_error");
    bool found;
    QC_TRY(qc_source_error(j->model, j->artifact, name, &found, &error, &weight, err));
    QC_TRY(qc_check_interrupt(err));
    if (!found)
        return qc_fail(err, QC_E_INPUT, "%s: has no tensor %.200s, its report has", j->path, name);
    error = weight > 0 ? error / weight : error;
    double off = qc_error_difference(error, said);
    bool is_off = !(off <= j->tolerance);
    j->n_compared++;
    j->n_off += is_off;
    j->worst = off > j->worst ? off : j->worst;
    cJSON *item = qc_json_add_item(j->list, cJSON_CreateObject());
    cJSON_AddStringToObject(item, "name", name);
    cJSON_AddNumberToObject(item, "stored_error", said);
    cJSON_AddNumberToObject(item, "stored_error_read", error);
    cJSON_AddBoolToObject(item, "same", !is_off);
    return QC_OK;
}

static void print_text(const account_job *j)
{
    const cJSON *t;
    cJSON_ArrayForEach(t, j->list)
    {
        char name[512];
        if (cJSON_IsTrue(qc_json_get(t, "same")))
            continue;
        qc_one_line(name, sizeof name, qc_report_string(t, "name"));
        printf("%s: stored error %.6g, its report says %.6g\n", name,
               qc_report_number(t, "stored_error_read"), qc_report_number(t, "stored_error"));
    }
    printf("%d of %d tensors are not those of the report (largest difference %.3g, tolerance %.3g)\n",
           j->n_off, j->n_compared, j->worst, j->tolerance);
}

static int answer(account_job *j, bool json, qc_err *err)
{
    if (!json) {
        print_text(j);
        return j->n_off ? 1 : 0;
    }
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddNumberToObject(doc, "version", JSON_VERSION);
    cJSON_AddStringToObject(doc, "path", j->path);
    cJSON_AddNumberToObject(doc, "account_error", j->worst);
    cJSON_AddNumberToObject(doc, "tensors_off", j->n_off);
    cJSON *list = cJSON_Duplicate(j->list, true);
    if (!cJSON_AddItemToObject(doc, "tensors", list))
        cJSON_Delete(list);
    QC_TRY(qc_print_json(qc_json_watched(doc), err));
    return j->n_off ? 1 : 0;
}

static int run(account_job *j, const char *model, const char *report, bool json, qc_err *err)
{
    qc_report_part part;
    const cJSON *tensor;
    QC_TRY(qc_report_load(report, &j->report, err));
    QC_TRY(find_part(j, report, &part, err));
    QC_TRY(qc_source_open(j->path, &j->artifact, err));
    QC_TRY(qc_source_check(j->artifact, err));
    QC_TRY(qc_source_open(model, &j->model, err));
    qc_json_watch();
    j->list = cJSON_CreateArray();
    cJSON_ArrayForEach(tensor, part.tensors) if (is_comparable(tensor))
        QC_TRY(compare_tensor(j, tensor, err));
    if (j->n_compared == 0)
        return qc_fail(err, QC_E_INPUT, "%s: has no tensor that can be compared", report);
    return answer(j, json, err);
}

int qc_inspect_account(const char *path, const char *model, const char *report, double tolerance, bool json,
                       qc_err *err)
{
    account_job j = {.path = path, .tolerance = tolerance};
    int rc = run(&j, model, report, json, err);
    cJSON_Delete(j.list);
    cJSON_Delete(j.report);
    qc_source_close(j.artifact);
    qc_source_close(j.model);
    return rc;
}
