#include "report_doc.h"

#include "report_internal.h"

#include <math.h>
#include <string.h>

#define MAX_REPORT_BYTES ((size_t)256 << 20)

int qc_report_load(const char *path, cJSON **ret_doc, qc_err *err)
{
    cJSON *doc;
    QC_TRY(qc_json_load(path, MAX_REPORT_BYTES, true, &doc, err));
    int rc = qc_report_check(doc, path, err);
    if (rc == QC_OK)
        *ret_doc = doc;
    else
        cJSON_Delete(doc);
    return rc;
}

int qc_report_n_parts(const cJSON *doc)
{
    return cJSON_GetArraySize(qc_json_get(doc, "artifacts"));
}

qc_report_part qc_report_part_at(const cJSON *doc, int i)
{
    const cJSON *artifact = cJSON_GetArrayItem(qc_json_get(doc, "artifacts"), i);
    const cJSON *from = i == 0 ? doc : artifact;
    return (qc_report_part){artifact, qc_json_get(from, "tensors"), qc_json_get(from, "evaluation"),
                            qc_json_get(from, "gates")};
}

double qc_report_number(const cJSON *object, const char *key)
{
    const cJSON *item = qc_json_get(object, key);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

const char *qc_report_string(const cJSON *object, const char *key)
{
    const cJSON *item = qc_json_get(object, key);
    return cJSON_IsString(item) ? item->valuestring : "";
}

double qc_report_sum(const cJSON *list, const char *key)
{
    double sum = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, list)
    {
        double x = qc_report_number(item, key);
        sum += isnan(x) ? 0 : x;
    }
    return sum;
}

bool qc_report_passed(const cJSON *doc)
{
    bool all = true;
    for (int i = 0; i < qc_report_n_parts(doc); i++) {
        const cJSON *gate;
        cJSON_ArrayForEach(gate, qc_report_part_at(doc, i).gates) all =
            all && cJSON_IsTrue(qc_json_get(gate, "pass"));
    }
    return all;
}

double qc_report_events(const cJSON *doc, const char *kind)
{
    double sum = 0;
    const cJSON *event;
    cJSON_ArrayForEach(event, qc_json_get(doc, "events"))
    {
        bool counts = kind ? strcmp(qc_report_string(event, "kind"), kind) == 0
                           : strcmp(qc_report_string(event, "level"), "fallback") == 0;
        double n = qc_report_number(event, "count");
        sum += counts && n > 0 ? n : 0;
    }
    return sum;
}
