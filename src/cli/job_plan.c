#include "job_report.h"

#include "family.h"
#include "job_budget.h"
#include "main.h"
#include "qc_json.h"

#include <stdio.h>
#include <string.h>

static double mb(uint64_t n_bytes)
{
    return (double)n_bytes / 1e6;
}

typedef struct tally {
    int64_t n_quantized, n_copied, n_kept16, n_left_out;
} tally;

static tally count_actions(const qc_convert_plan *plan)
{
    tally t = {0};
    for (int64_t i = 0; i < plan->n_items; i++) {
        qc_tensor_action a = plan->items[i].action;
        t.n_quantized += a == QC_ACTION_QUANTIZED;
        t.n_copied += a == QC_ACTION_COPIED;
        t.n_kept16 += a == QC_ACTION_KEPT16;
        t.n_left_out += a == QC_ACTION_TIED || a == QC_ACTION_DROPPED;
    }
    return t;
}

/* A gap is found by qc_json_watched. */
static void add_budget(cJSON *step, const job *j, const output *o)
{
    cJSON *budget = qc_job_budget_json(j, o);
    if (!cJSON_AddItemToObject(step, "budget", budget))
        cJSON_Delete(budget);
}

static void add_forecast(cJSON *plan, const job_forecast *f)
{
    cJSON *seconds = cJSON_AddObjectToObject(plan, "seconds");
    cJSON_AddNumberToObject(seconds, "hash", f->hash);
    cJSON_AddNumberToObject(seconds, "calibrate", f->calibrate);
    cJSON_AddNumberToObject(seconds, "calibrate_layer", f->layer);
    cJSON_AddNumberToObject(seconds, "convert", f->convert);
    cJSON_AddNumberToObject(seconds, "verify", f->verify);
    cJSON_AddNumberToObject(seconds, "total", f->total);
}

cJSON *qc_job_plan_json(const job *j, const job_forecast *forecast)
{
    qc_json_watch();
    cJSON *plan = cJSON_CreateObject();
    cJSON_AddNumberToObject(plan, "peak_rss_bytes", (double)j->peak_plan_bytes);
    cJSON_AddNumberToObject(plan, "disk_bytes", (double)j->disk_plan_bytes);
    if (forecast)
        add_forecast(plan, forecast);
    cJSON *steps = cJSON_AddArrayToObject(plan, "steps");
    for (int i = 0; i < j->n_outputs; i++) {
        const output *o = &j->outputs[i];
        tally t = count_actions(&o->plan);
        cJSON *s = qc_json_add_item(steps, cJSON_CreateObject());
        cJSON_AddStringToObject(s, "format", o->format->name);
        cJSON_AddStringToObject(s, "path", o->emit->path);
        cJSON_AddNumberToObject(s, "bytes_in", (double)o->plan.bytes_in);
        cJSON_AddNumberToObject(s, "bytes_out", (double)o->plan.bytes_out);
        cJSON_AddNumberToObject(s, "file_bytes", (double)o->planned_bytes);
        cJSON_AddNumberToObject(s, "weights", o->plan.n_weights);
        cJSON_AddNumberToObject(s, "quantized", (double)t.n_quantized);
        cJSON_AddNumberToObject(s, "copied", (double)t.n_copied);
        cJSON_AddNumberToObject(s, "kept16", (double)t.n_kept16);
        cJSON_AddNumberToObject(s, "left_out", (double)t.n_left_out);
        if (qc_job_has_budget(o->asked))
            add_budget(s, j, o);
        if (o->journal_path) {
            cJSON_AddStringToObject(s, "journal", o->journal_path);
            cJSON_AddNumberToObject(s, "journal_bytes", (double)o->journal_bytes);
        }
    }
    if (j->calibration.windows) {
        cJSON_AddNumberToObject(plan, "calibration_windows", (double)j->calibration.windows);
        cJSON_AddNumberToObject(plan, "calibration_length", (double)j->calibration.length);
    }
    cJSON_AddNumberToObject(plan, "verify_windows", (double)j->windows.n_windows);
    cJSON_AddNumberToObject(plan, "verify_length", (double)j->windows.length);
    return qc_json_watched(plan);
}

static int print_budget(const job *j, const output *o, qc_err *err)
{
    qc_buf text = {0};
    if (!qc_job_has_budget(o->asked))
        return QC_OK;
    int rc = qc_job_budget_text(j, o, o == &j->outputs[o->lead], &text, err);
    if (rc == QC_OK)
        printf("budget   %s", text.data);
    qc_buf_clear(&text);
    return rc;
}

static void print_calibration(const qc_calibration *c, const output *o)
{
    printf("calibrate with ");
    if (c->statistics)
        printf("%s%s", c->statistics, c->windows ? ", " : "");
    if (c->windows)
        printf("%lld window%s of %lld tokens of %s", (long long)c->windows, c->windows == 1 ? "" : "s",
               (long long)c->length, c->text);
    printf(", %.1f MB of work in %s\n         ", mb(o->journal_bytes), o->journal_path);
}

static void print_forecast(const job_forecast *f)
{
    const struct {
        const char *name;
        double seconds;
    } phases[] = {
        {"hash", f->hash}, {"calibrate", f->calibrate}, {"convert", f->convert}, {"verify", f->verify}};
    const char *between = "";
    printf("time     about %.3g s on this machine (", f->total);
    for (size_t i = 0; i < sizeof phases / sizeof phases[0]; i++)
        if (phases[i].seconds > 0) {
            printf("%s%s %.3g", between, phases[i].name, phases[i].seconds);
            between = ", ";
        }
    printf("%s), without waiting for the disk\n", f->layer > 0 ? " s" : "");
    if (f->layer > 0)
        printf("         %.3g s for each layer of the calibration\n", f->layer);
}

int qc_job_print_plan(const job *j, qc_err *err)
{
    job_forecast forecast;
    QC_TRY(qc_job_forecast(j, &forecast, err));
    if (j->options->json)
        return qc_print_json(qc_job_plan_json(j, &forecast), err);
    const qc_model_config *c = &j->model.config;
    printf("model    %s (%s, %lld layers, %lld tensors, %.1f MB)\n", j->recipe->model, c->family->model_type,
           (long long)c->n_layers, (long long)j->src->n_tensors, mb(j->outputs[0].plan.bytes_in));
    for (int i = 0; i < j->n_outputs; i++) {
        const output *o = &j->outputs[i];
        tally t = count_actions(&o->plan);
        printf("step %d   ", i + 1);
        if (o->journal_path)
            print_calibration(&j->calibration, o);
        printf("quantize %lld tensors (%.1f M weights), copy %lld, leave %lld in 16 bit, leave out "
               "%lld\n",
               (long long)t.n_quantized, o->plan.n_weights / 1e6, (long long)t.n_copied,
               (long long)t.n_kept16, (long long)t.n_left_out);
        printf("         write %s (%s, %llu bytes and a manifest)\n", o->emit->path, o->format->name,
               (unsigned long long)o->planned_bytes);
        if (j->text)
            printf("         read it back and score %lld window%s of %lld tokens of %s beside the model\n",
                   (long long)j->windows.n_windows, j->windows.n_windows == 1 ? "" : "s",
                   (long long)j->windows.length, j->text);
        else
            printf("         read it back and compare its sums\n");
    }
    for (int i = 0; i < j->n_outputs; i++)
        QC_TRY(print_budget(j, &j->outputs[i], err));
    printf("memory   about %.0f MB at the peak\n", mb(j->peak_plan_bytes));
    printf("disk     %.1f MB, without tokenizer and config\n", mb(j->disk_plan_bytes));
    print_forecast(&forecast);
    return QC_OK;
}
