#include "job_report.h"

#include "device.h"
#include "family.h"
#include "job_budget.h"
#include "job_calib.h"
#include "main.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "render.h"
#include "report.h"

#include <stdio.h>
#include <string.h>

/* Everything that report.h wants, with the arrays that only exist for it. */
typedef struct inputs {
    qc_report_input in;
    qc_report_file *sources;
    qc_report_output *outputs;
    cJSON *recipe, *plan;
    qc_report_timing timings[7];
    qc_device_text device;
} inputs;

static void free_inputs(inputs *x)
{
    qc_free(x->sources);
    qc_free(x->outputs);
    cJSON_Delete(x->recipe);
    cJSON_Delete(x->plan);
}

static bool make_inputs(const job *j, bool artifact_recipe, inputs *x)
{
    *x = (inputs){
        .sources = qc_calloc((size_t)j->src->n_files + 1, sizeof *x->sources),
        .outputs = qc_calloc((size_t)j->n_outputs + 1, sizeof *x->outputs),
        .recipe = artifact_recipe ? qc_recipe_artifact_json(j->recipe) : qc_recipe_to_json(j->recipe),
        .plan = qc_job_plan_json(j, NULL),
        .device = qc_device_describe(j->be),
        .timings = {{"open", j->times.open},
                    {"hash", j->times.hash},
                    {"budget", j->times.budget},
                    {"calibrate", j->times.calibrate},
                    {"convert", j->times.convert},
                    {"verify", j->times.verify},
                    {"total", j->times.total}},
    };
    if (!x->sources || !x->outputs || !x->recipe || !x->plan)
        return false;
    for (int64_t i = 0; i < j->src->n_files; i++)
        x->sources[i] = (qc_report_file){j->src->files[i], j->source_sha256[i]};
    for (int i = 0; i < j->n_outputs; i++) {
        const output *o = &j->outputs[i];
        qc_report_output *r = &x->outputs[i];
        *r = (qc_report_output){
            .artifact = {.format = o->format->name,
                         .path = o->final_path,
                         .n_bytes = o->n_bytes,
                         .files = o->files,
                         .n_files = o->n_files,
                         .rejected = o->rejected},
            .accounts = &o->accounts,
            .evaluation = j->recipe->verify.enabled ? &o->evaluation : NULL,
            .gates = o->gates,
            .n_gates = o->n_gates,
        };
        memcpy(r->artifact.sha256, o->sha256, sizeof o->sha256);
    }
    x->in = (qc_report_input){
        .tool = {"qconvert", qc_version(), qc_version_commit(), x->device.kernels,
                 j->recipe->run.compute == QC_COMPUTE_BF16 ? "bf16" : "f32", j->be->name, x->device.detail},
        .calibration = qc_job_has_calibration(j) ? &j->calibration : NULL,
        .model_path = j->recipe->model,
        .model_family = j->model.config.family->model_type,
        .n_layers = j->model.config.n_layers,
        .sources = x->sources,
        .n_sources = j->src->n_files,
        .recipe = x->recipe,
        .plan = x->plan,
        .outputs = x->outputs,
        .n_outputs = j->n_outputs,
        .events = &j->events,
        .timings = x->timings,
        .n_timings = (int)(sizeof x->timings / sizeof x->timings[0]),
        .peak_rss_bytes = qc_peak_rss_bytes(),
        .peak_device_bytes = x->device.peak_bytes,
    };
    return true;
}

/* Text of a document that is then deleted; NULL when out of memory. */
static char *print_and_delete(cJSON *doc)
{
    char *text = doc ? qc_json_print(doc) : NULL;
    cJSON_Delete(doc);
    return text;
}

char *qc_job_embedded_manifest(const job *j, const output *o)
{
    inputs x;
    char *text = NULL;
    if (make_inputs(j, true, &x)) {
        x.in.outputs = NULL;
        x.in.n_outputs = 0;
        cJSON *quantize = qc_recipe_quantize_json(o->quantize);
        x.in.recipe = quantize;
        text = quantize ? print_and_delete(qc_manifest_document(&x.in, true)) : NULL;
        cJSON_Delete(quantize);
    }
    free_inputs(&x);
    return text;
}

static int write_text(const job *j, const char *path, const char *text, size_t n_bytes, qc_err *err)
{
    return text ? qc_file_write(path, j->options->force, text, n_bytes, err)
                : qc_fail_nomem(err, path, 65536);
}

static int write_json(const job *j, const char *path, char *text, qc_err *err)
{
    int rc = write_text(j, path, text, text ? strlen(text) : 0, err);
    qc_free(text);
    return rc;
}

static int write_rendering(const job *j, const cJSON *doc, const char *path, qc_render_format format,
                           qc_err *err)
{
    qc_buf text = {0};
    if (!path)
        return QC_OK;
    int rc = qc_render(&doc, 1, format, &text, err);
    if (rc == QC_OK)
        rc = write_text(j, path, text.data, text.n_bytes, err);
    qc_buf_clear(&text);
    return rc;
}

static int print_budget(const job *j, const output *o, qc_err *err)
{
    qc_buf text = {0};
    if (!qc_job_has_budget(o->asked))
        return QC_OK;
    int rc = qc_job_budget_text(j, o, false, &text, err);
    if (rc == QC_OK)
        printf("budget          %s", text.data);
    qc_buf_clear(&text);
    return rc;
}

static void print_names(const job *j)
{
    const qc_recipe_report *r = &j->recipe->report;
    const char *const paths[] = {r->json, r->html, r->markdown, r->junit};
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++)
        if (paths[i])
            printf("report          %s\n", paths[i]);
}

static int print_summary(const job *j, cJSON *doc, qc_err *err)
{
    if (j->options->json)
        return qc_print_json(cJSON_Duplicate(doc, true), err);
    if (j->options->quiet)
        return QC_OK;
    qc_buf text = {0};
    int rc = qc_render((const cJSON *const *)&doc, 1, QC_RENDER_TEXT, &text, err);
    if (rc == QC_OK)
        fputs(text.data, stdout);
    qc_buf_clear(&text);
    for (int i = 0; i < j->n_outputs && rc == QC_OK; i++)
        rc = print_budget(j, &j->outputs[i], err);
    if (rc == QC_OK)
        print_names(j);
    return rc;
}

static int write_report(const job *j, cJSON *doc, qc_err *err)
{
    const qc_recipe_report *r = &j->recipe->report;
    if (r->json)
        QC_TRY(write_json(j, r->json, qc_json_print(doc), err));
    QC_TRY(write_rendering(j, doc, r->html, QC_RENDER_HTML, err));
    QC_TRY(write_rendering(j, doc, r->markdown, QC_RENDER_MARKDOWN, err));
    QC_TRY(write_rendering(j, doc, r->junit, QC_RENDER_JUNIT, err));
    return print_summary(j, doc, err);
}

static int write_manifest(const job *j, qc_err *err)
{
    inputs x;
    const char *path = j->recipe->report.manifest;
    int rc = make_inputs(j, true, &x) ? QC_OK : qc_fail_nomem(err, "manifest", 65536);
    if (rc == QC_OK)
        rc = write_json(j, path, print_and_delete(qc_manifest_document(&x.in, false)), err);
    free_inputs(&x);
    if (rc == QC_OK && !j->options->quiet && !j->options->json)
        printf("manifest        %s\n", path);
    return rc;
}

int qc_job_write_reports(const job *j, qc_err *err)
{
    inputs x;
    cJSON *doc = make_inputs(j, false, &x) ? qc_report_document(&x.in) : NULL;
    int rc = doc ? write_report(j, doc, err) : qc_fail_nomem(err, "report", 65536);
    cJSON_Delete(doc);
    free_inputs(&x);
    return rc == QC_OK && j->recipe->report.manifest ? write_manifest(j, err) : rc;
}
