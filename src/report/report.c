#include "report.h"

#include "report_eval.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

uint64_t qc_peak_rss_bytes(void)
{
    FILE *f = fopen("/proc/self/status", "re");
    char line[256];
    unsigned long long kb = 0;
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "VmHWM: %llu kB", &kb) == 1)
            break;
    if (f)
        fclose(f);
    return kb * 1024;
}

/* ---- document ---- */

/* Where an allocation fails, what can not be attached is freed; the gap is found by qc_json_watched. */
static void add_member(cJSON *object, const char *key, cJSON *member)
{
    if (!cJSON_AddItemToObject(object, key, member))
        cJSON_Delete(member);
}

static cJSON *tool_json(const qc_report_tool *tool, bool with_kernels)
{
    cJSON *out = cJSON_CreateObject();
    qc_json_add_text(out, "name", tool->name);
    qc_json_add_text(out, "version", tool->version);
    if (with_kernels) {
        qc_json_add_text(out, "commit", tool->commit);
        qc_json_add_text(out, "kernels", tool->kernels);
    }
    qc_json_add_text(out, "compute", tool->compute);
    if (with_kernels) {
        qc_json_add_text(out, "device", tool->device);
        if (tool->device_detail && *tool->device_detail)
            qc_json_add_text(out, "device_detail", tool->device_detail);
    }
    return out;
}

/* In manifests files go by their base name: the same model in another folder is the same model. */
static cJSON *files_json(const qc_report_input *in, bool base_names)
{
    cJSON *list = cJSON_CreateArray();
    for (int64_t i = 0; i < in->n_sources; i++) {
        const char *slash = strrchr(in->sources[i].path, '/');
        cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
        qc_json_add_text(item, "file", base_names && slash ? slash + 1 : in->sources[i].path);
        qc_json_add_text(item, "sha256", in->sources[i].sha256);
    }
    return list;
}

static void solve_json(cJSON *out, const qc_tensor_solve *s)
{
    qc_json_add_text(out, "order", s->order);
    qc_json_add_number(out, "error", s->error);
    qc_json_add_number(out, "error_rtn", s->error_rtn);
    qc_json_add_number(out, "error_norm", s->error_norm);
    qc_json_add_number(out, "damp", s->damp);
    qc_json_add_number(out, "dead_columns", (double)s->n_dead);
    qc_json_add_number(out, "tokens", (double)s->n_tokens);
    qc_json_add_number(out, "rtn_rows", (double)s->n_rtn_rows);
    qc_json_add_number(out, "seconds", s->seconds);
}

static void tensor_json(cJSON *out, const qc_tensor_account *t)
{
    qc_json_add_text(out, "name", t->name);
    qc_json_add_text(out, "action", qc_action_name(t->action));
    qc_json_add_text(out, "rule", t->rule);
    qc_json_add_number(out, "layer", t->layer);
    qc_json_add_text(out, "source_dtype", qc_dtype_name(t->source_dtype));
    qc_json_add_number(out, "rows", (double)t->n_rows);
    qc_json_add_number(out, "cols", (double)t->n_cols);
    qc_json_add_number(out, "bits", t->bits);
    qc_json_add_number(out, "bytes_in", (double)t->bytes_in);
    qc_json_add_number(out, "bytes_out", (double)t->bytes_out);
    if (t->action == QC_ACTION_QUANTIZED) {
        qc_json_add_number(out, "group", (double)t->group_elems);
        cJSON_AddBoolToObject(out, "symmetric", t->symmetric);
        cJSON_AddBoolToObject(out, "searched", t->searched);
        qc_json_add_text(out, "method", t->solve.method ? t->solve.method : t->carried ? "carried" : "rtn");
        qc_json_add_number(out, "relative_error", t->sq_weight > 0 ? t->sq_error / t->sq_weight : 0);
        qc_json_add_number(out, "stored_error", t->sq_source > 0 ? t->sq_stored / t->sq_source : NAN);
        qc_json_add_number(out, "stored_error_read", t->sq_source > 0 ? t->sq_read / t->sq_source : NAN);
        qc_json_add_number(out, "clipped", (double)t->n_clipped);
        qc_json_add_number(out, "clipped_fraction",
                           (double)t->n_clipped / ((double)t->n_rows * (double)t->n_cols));
        qc_json_add_number(out, "zero_groups", (double)t->n_zero_groups);
        qc_json_add_number(out, "small_scales", (double)t->n_small_scale);
        if (t->solve.method)
            solve_json(out, &t->solve);
    }
}

static cJSON *tensors_json(const qc_account_list *accounts)
{
    cJSON *list = cJSON_CreateArray();
    for (int64_t i = 0; i < accounts->n_tensors; i++)
        tensor_json(qc_json_add_item(list, cJSON_CreateObject()), &accounts->tensors[i]);
    return list;
}

static void times_json(cJSON *out, const qc_layer_times *t)
{
    qc_json_add_number(out, "forward", t->forward);
    qc_json_add_number(out, "hessian", t->hessian);
    qc_json_add_number(out, "factor", t->factor);
    qc_json_add_number(out, "solve", t->solve);
    qc_json_add_number(out, "fold", t->fold);
    qc_json_add_number(out, "pack", t->pack);
    qc_json_add_number(out, "io", t->io);
}

/* Error of a layer's quantized matrices together. */
static cJSON *layers_json(const qc_account_list *accounts, int64_t n_layers)
{
    cJSON *list = cJSON_CreateArray();
    for (int64_t layer = 0; layer < n_layers; layer++) {
        double error = 0, weight = 0, bytes_in = 0, bytes_out = 0, solved = 0, rtn = 0, norm = 0;
        bool calibrated = false;
        for (int64_t i = 0; i < accounts->n_tensors; i++) {
            const qc_tensor_account *t = &accounts->tensors[i];
            if (t->layer != layer)
                continue;
            bytes_in += (double)t->bytes_in;
            bytes_out += (double)t->bytes_out;
            if (t->action == QC_ACTION_QUANTIZED) {
                error += t->sq_error;
                weight += t->sq_weight;
            }
            if (t->action == QC_ACTION_QUANTIZED && t->solve.method) {
                calibrated = true;
                solved += t->solve.error;
                rtn += t->solve.error_rtn;
                norm += t->solve.error_norm;
            }
        }
        cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
        qc_json_add_number(item, "layer", (double)layer);
        qc_json_add_number(item, "bytes_in", bytes_in);
        qc_json_add_number(item, "bytes_out", bytes_out);
        qc_json_add_number(item, "relative_error", weight > 0 ? error / weight : 0);
        if (calibrated) {
            qc_json_add_number(item, "error", solved);
            qc_json_add_number(item, "error_rtn", rtn);
            qc_json_add_number(item, "error_norm", norm);
        }
        if (layer < accounts->n_layer_times)
            times_json(cJSON_AddObjectToObject(item, "seconds"), &accounts->layer_times[layer]);
    }
    return list;
}

static cJSON *events_json(const qc_event_list *events)
{
    cJSON *list = cJSON_CreateArray();
    for (int64_t i = 0; i < events->n_events; i++) {
        const qc_event *e = &events->events[i];
        cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
        qc_json_add_text(item, "kind", e->kind);
        qc_json_add_text(item, "level", e->level == QC_EVENT_FALLBACK ? "fallback" : "note");
        qc_json_add_text(item, "subject", e->subject);
        qc_json_add_text(item, "detail", e->detail);
        qc_json_add_number(item, "count", (double)e->count);
    }
    return list;
}

static cJSON *gates_json(const qc_report_output *o)
{
    cJSON *list = cJSON_CreateArray();
    for (int i = 0; i < o->n_gates; i++) {
        cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
        qc_json_add_text(item, "name", o->gates[i].name);
        qc_json_add_number(item, "limit", o->gates[i].limit);
        qc_json_add_number(item, "value", o->gates[i].value);
        cJSON_AddBoolToObject(item, "pass", o->gates[i].pass);
    }
    return list;
}

/* The first output's tensors, evaluation and gates stand at the top level, those of further ones here. */
static cJSON *artifacts_json(const qc_report_input *in)
{
    cJSON *list = cJSON_CreateArray();
    for (int i = 0; i < in->n_outputs; i++) {
        const qc_report_output *o = &in->outputs[i];
        cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
        qc_json_add_text(item, "format", o->artifact.format);
        qc_json_add_text(item, "path", o->artifact.path);
        qc_json_add_number(item, "bytes", (double)o->artifact.n_bytes);
        qc_json_add_text(item, "sha256", o->artifact.sha256);
        cJSON_AddBoolToObject(item, "rejected", o->artifact.rejected);
        qc_json_add_number(item, "account_error", qc_account_error(o->accounts));
        if (i > 0) {
            add_member(item, "tensors", tensors_json(o->accounts));
            if (o->evaluation)
                add_member(item, "evaluation", qc_report_eval_json(o->evaluation));
            add_member(item, "gates", gates_json(o));
        }
    }
    return list;
}

/* null where given statistics do not say it. */
static double known(bool is_known, int64_t value)
{
    return is_known ? (double)value : NAN;
}

static cJSON *calibration_json(const qc_calibration *c)
{
    cJSON *out = cJSON_CreateObject();
    bool own = !c->statistics, of_text = c->windows > 0;
    qc_json_add_text(out, "statistics", c->statistics);
    qc_json_add_text(out, "statistics_sha256", c->statistics_sha256);
    qc_json_add_text(out, "compute", c->compute);
    qc_json_add_text(out, "text", c->text);
    qc_json_add_number(out, "windows", known(of_text, c->windows));
    qc_json_add_number(out, "length", known(of_text, c->length));
    qc_json_add_number(out, "tokens", known(of_text, c->tokens));
    qc_json_add_number(out, "tokens_text", known(own, c->tokens_text));
    qc_json_add_number(out, "documents", known(own, c->documents));
    qc_json_add_text(out, "sample", c->sample);
    qc_json_add_number(out, "seed", known(own, c->seed));
    if (own)
        cJSON_AddBoolToObject(out, "plain_special", c->plain_special);
    else
        cJSON_AddNullToObject(out, "plain_special");
    qc_json_add_text(out, "ids_sha256", c->ids_sha256);
    qc_json_add_number(out, "ppl", c->ppl);
    qc_json_add_number(out, "ppl_windows", known(own, c->ppl_windows));
    return out;
}

cJSON *qc_report_document(const qc_report_input *in)
{
    qc_json_watch();
    const qc_report_output *first = &in->outputs[0];
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddStringToObject(doc, "schema", QC_REPORT_SCHEMA);
    add_member(doc, "tool", tool_json(&in->tool, true));
    cJSON *model = cJSON_AddObjectToObject(doc, "model");
    qc_json_add_text(model, "path", in->model_path);
    qc_json_add_text(model, "family", in->model_family);
    qc_json_add_number(model, "layers", (double)in->n_layers);
    add_member(model, "files", files_json(in, false));
    add_member(doc, "recipe", cJSON_Duplicate(in->recipe, true));
    add_member(doc, "plan", cJSON_Duplicate(in->plan, true));
    if (in->calibration)
        add_member(doc, "calibration", calibration_json(in->calibration));
    else
        cJSON_AddNullToObject(doc, "calibration");
    add_member(doc, "tensors", tensors_json(first->accounts));
    add_member(doc, "layers", layers_json(first->accounts, in->n_layers));
    add_member(doc, "events", events_json(in->events));
    if (first->evaluation)
        add_member(doc, "evaluation", qc_report_eval_json(first->evaluation));
    else
        cJSON_AddNullToObject(doc, "evaluation");
    add_member(doc, "artifacts", artifacts_json(in));
    add_member(doc, "gates", gates_json(first));
    cJSON *timings = cJSON_AddObjectToObject(doc, "timings");
    for (int i = 0; i < in->n_timings; i++)
        qc_json_add_number(timings, in->timings[i].name, in->timings[i].seconds);
    qc_json_add_number(doc, "peak_rss_bytes", (double)in->peak_rss_bytes);
    if (in->peak_device_bytes)
        qc_json_add_number(doc, "peak_device_bytes", (double)in->peak_device_bytes);
    return qc_json_watched(doc);
}

cJSON *qc_manifest_document(const qc_report_input *in, bool embedded)
{
    qc_json_watch();
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddStringToObject(doc, "schema", QC_MANIFEST_SCHEMA);
    add_member(doc, "tool", tool_json(&in->tool, !embedded));
    add_member(doc, "inputs", files_json(in, true));
    add_member(doc, "recipe", cJSON_Duplicate(in->recipe, true));
    if (embedded)
        return qc_json_watched(doc);
    cJSON *list = cJSON_AddArrayToObject(doc, "outputs");
    for (int i = 0; i < in->n_outputs; i++) {
        const qc_artifact *a = &in->outputs[i].artifact;
        const char *slash = strrchr(a->path, '/');
        cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
        qc_json_add_text(item, "file", slash ? slash + 1 : a->path);
        qc_json_add_text(item, "format", a->format);
        qc_json_add_number(item, "bytes", (double)a->n_bytes);
        qc_json_add_text(item, "sha256", a->sha256);
        cJSON *files = a->n_files ? cJSON_AddArrayToObject(item, "files") : NULL;
        for (int k = 0; k < a->n_files; k++) {
            cJSON *file = qc_json_add_item(files, cJSON_CreateObject());
            qc_json_add_text(file, "file", a->files[k].name);
            qc_json_add_number(file, "bytes", (double)a->files[k].n_bytes);
            qc_json_add_text(file, "sha256", a->files[k].sha256);
        }
    }
    return qc_json_watched(doc);
}
