/* How long a job will take: its work is counted from shapes, and samples of the same operations are timed on
 * this machine. Waiting for the disk and for other processes is not in it. */
#ifndef QC_CLI_JOB_FORECAST_H
#define QC_CLI_JOB_FORECAST_H

#include "job_state.h"

/* Seconds, by the phases of a run. */
typedef struct job_forecast {
    double hash, calibrate, convert, verify, total;
    double layer; /* calibration of a decoder layer, on average */
} job_forecast;

/* Of a job whose plan is made, bit budgets aside. Takes some seconds. */
int qc_job_forecast(const job *j, job_forecast *ret, qc_err *err) QC_WARN_UNUSED;

#endif
