/* The report of a run (version 1, docs/report.md) and its manifest as json documents. report_doc.h reads
 * reports, render.h shows them. */
#ifndef QC_REPORT_H
#define QC_REPORT_H

#include "qc_buf.h"
#include "qc_err.h"
#include "qc_json.h"
#include "qc_result.h"

#include <stdint.h>

#define QC_REPORT_SCHEMA   "qconvert-report/1"
#define QC_MANIFEST_SCHEMA "qconvert-manifest/1"

typedef struct qc_report_tool {
    const char *name, *version, *commit;
    const char *kernels; /* "avx2+avx512", chosen at run time */
    const char *compute; /* "f32" */
    const char *device;  /* "cpu", "cuda:0" */
    const char *device_detail; /* driver, clock and memory of a device; "" for the CPU */
} qc_report_tool;

typedef struct qc_report_file {
    const char *path;
    const char *sha256;
} qc_report_file;

typedef struct qc_report_timing {
    const char *name;
    double seconds;
} qc_report_timing;

/* One artifact with everything that was decided and measured about it. */
typedef struct qc_report_output {
    qc_artifact artifact;
    const qc_account_list *accounts;
    const qc_evaluation *evaluation; /* NULL without verification */
    const qc_gate *gates;
    int n_gates;
} qc_report_output;

/* Everything is borrowed. */
typedef struct qc_report_input {
    qc_report_tool tool;
    const char *model_path, *model_family;
    int64_t n_layers;
    const qc_report_file *sources; /* files of the model with their hashes */
    int64_t n_sources;
    const cJSON *recipe; /* as it was understood, defaults filled in */
    const cJSON *plan;
    const qc_report_output *outputs; /* the first one gives tensors, evaluation and gates of the document */
    int n_outputs;
    const qc_event_list *events;
    const qc_calibration *calibration; /* NULL without */
    const qc_report_timing *timings;
    int n_timings;
    uint64_t peak_rss_bytes;
    uint64_t peak_device_bytes; /* of the device's memory; 0 on the CPU */
} qc_report_input;

/* The report. NULL when out of memory; free with cJSON_Delete. Numbers that were not measured are null. */
cJSON *qc_report_document(const qc_report_input *in);

/* The manifest: what went in, how it was made, what came out; no time stamps, so that equal runs give equal
 * bytes. With embedded only what decides the bytes of the artifact (it travels inside): neither outputs nor
 * kernels. */
cJSON *qc_manifest_document(const qc_report_input *in, bool embedded);

/* An evaluation alone (what qeval --json prints). NULL when out of memory. */
cJSON *qc_report_evaluation(const qc_evaluation *e);

/* A label task as json (NULL when out of memory) and as some indented lines for people (docs/tasks.md). */
cJSON *qc_report_labels(const qc_label_result *r);
int qc_report_labels_text(const qc_label_result *r, qc_buf *ret, qc_err *err) QC_WARN_UNUSED;

/* What qeval prints below an evaluation for people (render.h): intervals, distributions, flips; nothing
 * without a reference. */
int qc_report_evaluation_details(const qc_evaluation *e, qc_buf *ret, qc_err *err) QC_WARN_UNUSED;

/* Peak resident memory of this process (VmHWM, mapped pages included); 0 if unknown. */
uint64_t qc_peak_rss_bytes(void);

#endif
