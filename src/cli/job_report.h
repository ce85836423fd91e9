/* What a job tells: the plan, gates, manifest, report. */
#ifndef QC_CLI_JOB_REPORT_H
#define QC_CLI_JOB_REPORT_H

#include "job_forecast.h"

/* The plan as json, with a forecast of its time unless that is NULL; NULL when out of memory. Free with
 * cJSON_Delete. */
cJSON *qc_job_plan_json(const job *j, const job_forecast *forecast);

/* Plan of a dry run on stdout, as text or json. */
int qc_job_print_plan(const job *j, qc_err *err) QC_WARN_UNUSED;

/* Manifest that travels inside the artifact: tool version, source hashes, the part of the recipe that decides
 * its bytes. Owned text (qc_free), NULL when out of memory. */
char *qc_job_embedded_manifest(const job *j, const output *o);

/* Summary on stdout, report and manifest files. */
int qc_job_write_reports(const job *j, qc_err *err) QC_WARN_UNUSED;

#endif
