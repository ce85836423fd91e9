#include "job.h"

#include "backend.h"
#include "convert.h"
#include "device.h"
#include "eval.h"
#include "gates.h"
#include "job_budget.h"
#include "job_calib.h"
#include "job_file.h"
#include "job_paths.h"
#include "job_report.h"
#include "job_state.h"
#include "main.h"
#include "measure.h"
#include "model.h"
#include "open.h"
#include "progress.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_log.h"
#include "qc_sha256.h"
#include "qc_time.h"
#include "report.h"
#include "source_error.h"
#include "stored.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- opening ---- */

static bool is_quantized(const qc_source *src)
{
    for (int64_t i = 0; i < src->n_tensors; i++)
        if (src->info(src, i)->dtype == QC_DT_GRID)
            return true;
    return false;
}

static int check_source(const job *j, qc_err *err)
{
    const qc_recipe *r = j->recipe;
    for (int i = 0; i < r->n_emit && is_quantized(j->src); i++)
        if (qc_job_calibrates(r, r->emit[i].own_quantize ? &r->emit[i].quantize : &r->quantize))
            return qc_fail(err, QC_E_UNSUPPORTED,
                           "%s: is quantized already, and calibration starts from the 16-bit checkpoint",
                           r->model);
    return QC_OK;
}

static int open_inputs(job *j, qc_err *err)
{
    const qc_recipe *r = j->recipe;
    QC_TRY(qc_pool_new(r->run.threads, &j->pool, err));
    QC_TRY(qc_device_open(&j->recipe->run, j->pool, &j->be, err));
    QC_TRY(qc_source_open(r->model, &j->src, err));
    QC_TRY(qc_model_open(j->src, &j->model, err));
    j->model_open = true;
    QC_TRY(check_source(j, err));
    QC_TRY(qc_job_open_calibration(j, err));
    if (!r->verify.enabled)
        return QC_OK;
    QC_TRY(qc_measure_text(r, &j->text, err));
    qc_cut_rule rule;
    QC_TRY(qc_measure_rule(r, j->model.config.max_positions, &rule, err));
    if (r->verify.reference) {
        QC_TRY(qc_reference_open(r->verify.reference, &j->stored, err));
        qc_reference_rule(j->stored, &rule);
    }
    QC_TRY(qc_measure_check_cap(r, "run.memory", err));
    QC_TRY(qc_windows_of_model(j->src, j->text, &rule, qc_measure_options(r).memory_bytes, &j->windows, err));
    return j->stored ? qc_stored_check_text(j->stored, j->src, j->model.config.vocab, &j->windows, err)
                     : QC_OK;
}

static void close_job(job *j, bool ended)
{
    qc_job_close_calibration(j, ended);
    for (int i = 0; i < j->n_outputs; i++) {
        output *o = &j->outputs[i];
        qc_writer_discard(o->writer);
        qc_convert_plan_clear(&o->plan);
        qc_job_close_budget(o);
        qc_account_list_clear(&o->accounts);
        qc_evaluation_clear(&o->evaluation);
        qc_free(o->final_path);
        qc_free(o->gates);
        qc_free(o->files);
    }
    qc_free(j->outputs);
    qc_free(j->source_sha256);
    qc_event_list_clear(&j->events);
    qc_event_list_clear(&j->repeated_events);
    qc_windows_clear(&j->windows);
    qc_reference_close(j->stored);
    qc_free(j->text);
    if (j->model_open)
        qc_model_close(&j->model);
    qc_source_close(j->src);
    qc_backend_close(j->be);
    qc_pool_free(j->pool);
}

/* ---- plan: everything that can be refused is refused here ---- */

static void plan_resources(job *j)
{
    uint64_t work = j->windows.plan_bytes, full = 0, least = 0;
    for (int i = 0; i < j->n_outputs; i++) {
        work = j->outputs[i].plan.work_bytes > work ? j->outputs[i].plan.work_bytes : work;
        j->disk_plan_bytes += j->outputs[i].plan.bytes_out + j->outputs[i].journal_bytes;
    }
    uint64_t calibration, scratch;
    qc_job_calibration_bytes(j, &calibration, &scratch);
    work = calibration > work ? calibration : work;
    work = j->budget_plan_bytes > work ? j->budget_plan_bytes : work;
    if (j->recipe->verify.enabled) {
        const qc_model_config *c = &j->model.config;
        qc_eval_plan_bytes(c, c, j->windows.length, qc_windows_ids(&j->windows, j->windows.n_windows),
                           j->recipe->verify.noise_floor ? QC_COMPUTE_F32 : j->be->compute, j->be->n_threads,
                           &full, &least);
        if (j->recipe->run.memory_bytes && full + qc_program_bytes(j->recipe) > j->recipe->run.memory_bytes) {
            scratch = full - least > scratch ? full - least : scratch; /* one after the other */
            full = least;
        }
    }
    j->scratch_plan_bytes = scratch;
    j->disk_plan_bytes += scratch;
    j->peak_plan_bytes = qc_program_bytes(j->recipe) + (work > full ? work : full);
}

static int check_resources(const job *j, qc_err *err)
{
    uint64_t cap = j->recipe->run.memory_bytes;
    if (cap && j->peak_plan_bytes > cap)
        return qc_fail(err, QC_E_RESOURCE, "the plan needs %llu MB of memory, run.memory is %llu MB",
                       (unsigned long long)(j->peak_plan_bytes / 1000000 + 1),
                       (unsigned long long)(cap / 1000000));
    return qc_job_check_disk(j, err);
}

static int hash_source(job *j, qc_err *err)
{
    double start = qc_now_seconds();
    if (j->source_sha256)
        return QC_OK;
    j->source_sha256 = qc_calloc((size_t)j->src->n_files + 1, sizeof *j->source_sha256);
    if (!j->source_sha256)
        return qc_fail_nomem(err, "hashes", (unsigned long long)j->src->n_files * 65);
    for (int64_t i = 0; i < j->src->n_files; i++)
        QC_TRY(qc_sha256_file(j->src->files[i], j->source_sha256[i], err));
    j->times.hash = qc_now_seconds() - start;
    return QC_OK;
}

/* Engines compute in the type of the model and round scales to it. Outputs of one run have the same scales.
 */
static qc_dtype scale_type(const job *j, const output *o)
{
    int64_t norm = qc_model_tensor(&j->model, 0, QC_SLOT_FINAL_NORM);
    bool bf16 = j->src->info(j->src, norm)->dtype == QC_DT_BF16;
    for (int i = 0; i < j->recipe->n_emit && bf16; i++) {
        const qc_recipe_emit *e = &j->recipe->emit[i];
        const qc_recipe_quantize *asked = e->own_quantize ? &e->quantize : &j->recipe->quantize;
        if (asked == o->asked && (e->format == QC_EMIT_GPTQ || e->format == QC_EMIT_AWQ ||
                                  e->format == QC_EMIT_COMPRESSED_TENSORS))
            return QC_DT_BF16;
    }
    return QC_DT_F16;
}

/* What the recipe says of each output, budgets left out. */
static int plan_outputs(job *j, qc_err *err)
{
    const qc_recipe *r = j->recipe;
    j->outputs = qc_calloc((size_t)r->n_emit, sizeof *j->outputs);
    if (!j->outputs)
        return qc_fail_nomem(err, "outputs", (unsigned long long)r->n_emit * sizeof *j->outputs);
    j->n_outputs = r->n_emit;
    for (int i = 0; i < r->n_emit; i++) {
        output *o = &j->outputs[i];
        o->emit = &r->emit[i];
        o->format = qc_recipe_format(o->emit);
        o->asked = o->quantize = o->emit->own_quantize ? &o->emit->quantize : &r->quantize;
        o->events = &j->events;
        for (o->lead = 0; j->outputs[o->lead].asked != o->asked;)
            o->lead++;
        if (o->lead < i || qc_job_has_budget(o->asked)) /* a choice needs no fallback */
            o->events = &j->repeated_events;
        qc_evaluation_init(&o->evaluation);
        qc_policy policy;
        o->scale = scale_type(j, o);
        o->carries = is_quantized(j->src) && !r->asks_grid && !o->emit->own_quantize;
        qc_recipe_policy(o->quantize, o->scale, &policy);
        QC_TRY(qc_job_make_plan(j, o, o->carries ? NULL : &policy, o->events, err));
        QC_TRY(qc_job_plan_calibration(j, o, err));
    }
    return QC_OK;
}

/* Last, since choosing takes a while. */
static int plan_budgets(job *j, qc_err *err)
{
    for (int i = 0; i < j->n_outputs; i++) {
        output *o = &j->outputs[i];
        if (!qc_job_has_budget(o->asked))
            continue;
        if (j->model.config.n_experts)
            return qc_fail(err, QC_E_UNSUPPORTED,
                           "%s: quantize.budget is not supported for layers with experts; expected "
                           "quantize.weights.bits",
                           j->recipe->model);
        QC_TRY(hash_source(j, err));
        QC_TRY(qc_job_plan_budget(j, o, err));
        QC_TRY(qc_job_plan_calibration(j, o, err));
    }
    return QC_OK;
}

/* Codes of a calibrated run belong to the grids that they were found for: an output that shares the run of
 * another must hold exactly those, or leave the matrix in 16 bit. */
static int check_shared_codes(const job *j, const output *o, qc_err *err)
{
    const output *lead = &j->outputs[o->lead];
    for (int64_t i = 0; i < o->plan.n_items && o->calibrated && o != lead; i++) {
        const qc_convert_item *item = &o->plan.items[i], *first = &lead->plan.items[i];
        const qc_grid *a = &item->spec.grid, *b = &first->spec.grid;
        if (item->action != QC_ACTION_QUANTIZED || j->model.places[item->tensor].layer < 0)
            continue;
        if (first->action == QC_ACTION_QUANTIZED && a->kind == b->kind && a->bits == b->bits &&
            a->symmetric == b->symmetric && a->group_elems == b->group_elems &&
            a->scale_dtype == b->scale_dtype)
            continue;
        return qc_fail(
            err, QC_E_UNSUPPORTED,
            "emit[%d] (%s): tensor %s needs another grid than in emit[%d] (%s), so it can not have "
            "the same codes: give it a `quantize` of its own, or run it alone",
            (int)(o - j->outputs), o->format->name, j->src->info(j->src, item->tensor)->name, o->lead,
            lead->format->name);
    }
    return QC_OK;
}

/* What the engine that an output is for would refuse is refused; what those would that it may be for is
 * noted. */
static int check_engines(job *j, const output *o, qc_err *err)
{
    static const char *const engines[] = {
        [QC_ENGINE_NONE] = NULL, "vllm", "transformers", "llama.cpp", "onnxruntime"};
    const char *wanted = engines[o->emit->engine];
    int rc = QC_OK;
    for (int e = 1; e <= 4 && rc == QC_OK; e++) {
        qc_event_list found = {0};
        bool asked = wanted == engines[e];
        if (!asked && (wanted || e > 2 || o->format->extension))
            continue;
        rc = qc_convert_lint(&o->plan, &j->model, engines[e], o->emit->path, &found, err);
        for (int64_t i = 0; i < found.n_events && rc == QC_OK; i++) {
            const qc_event *f = &found.events[i];
            if (asked && f->level == QC_EVENT_FALLBACK)
                rc = qc_fail(err, QC_E_UNSUPPORTED, "emit[%d] (%s): %s would refuse it: %s: %s",
                             (int)(o - j->outputs), o->format->name, engines[e], f->subject, f->detail);
            else if (asked || f->level == QC_EVENT_FALLBACK)
                rc = qc_event_add(o->events, QC_EVENT_NOTE, "engine", f->subject, 1, err, "%s: %s",
                                  engines[e], f->detail);
        }
        qc_event_list_clear(&found);
    }
    return rc;
}

/* Take each output through its declarations, so that what its format can not put together is refused now. */
static int check_formats(job *j, qc_err *err)
{
    for (int i = 0; i < j->n_outputs; i++) {
        output *o = &j->outputs[i];
        qc_writer *writer;
        if (qc_job_has_budget(o->asked) && o->format != qc_writer_format_find("qpk"))
            return qc_fail(err, QC_E_UNSUPPORTED,
                           "emit[%d] (%s): quantize.budget chooses among the grids of packed files only", i,
                           o->format->name);
        QC_TRY(check_shared_codes(j, o, err));
        QC_TRY(check_engines(j, o, err));
        QC_TRY(qc_job_begin_output(j, o, true, &writer, &o->planned_bytes, err));
        qc_writer_discard(writer);
    }
    return QC_OK;
}

static int make_plan(job *j, qc_err *err)
{
    const qc_recipe *r = j->recipe;
    QC_TRY(plan_outputs(j, err));
    QC_TRY(qc_job_check_paths(j, err));
    QC_TRY(check_formats(j, err));
    for (int i = 0; i < r->verify.n_gates; i++) {
        QC_TRY(qc_gate_check(r->verify.gates[i].name, r->verify.gates[i].limit, err));
        if (!r->verify.enabled && qc_gate_needs_verification(r->verify.gates[i].name))
            return qc_fail(err, QC_E_USAGE, "gate %s: nothing is measured, verification is switched off",
                           r->verify.gates[i].name);
    }
    if (j->given || j->stored)
        QC_TRY(hash_source(j, err));
    if (j->stored)
        QC_TRY(qc_stored_check_model(j->stored, j->src, (const char(*)[65])j->source_sha256, err));
    QC_TRY(qc_job_check_statistics(j, err));
    QC_TRY(plan_budgets(j, err));
    plan_resources(j);
    return QC_OK;
}

/* ---- run ---- */

static int convert(job *j, output *o, qc_err *err)
{
    double start = qc_now_seconds();
    qc_progress_begin("quantize", 1);
    qc_convert_options options = {.allow_nonfinite = j->recipe->run.allow_nonfinite,
                                  .journal = qc_job_journal(j, o),
                                  .progress = qc_progress_callback};
    uint64_t n_bytes;
    int rc = qc_job_begin_output(j, o, false, &o->writer, &n_bytes, err);
    if (rc == QC_OK)
        rc = qc_convert_run(&o->plan, &j->model, j->be, &options, o->writer, &o->accounts, o->events, err);
    qc_progress_end();
    j->times.convert += qc_now_seconds() - start;
    return rc;
}

/* Errors of the quantized tensors from the bytes that were written. */
static int read_back(job *j, output *o, const qc_source *src, qc_err *err)
{
    for (int64_t i = 0; i < o->accounts.n_tensors; i++) {
        qc_tensor_account *a = &o->accounts.tensors[i];
        bool found;
        double weight;
        if (a->action != QC_ACTION_QUANTIZED || isnan(a->sq_stored))
            continue;
        QC_TRY(qc_source_error(j->src, src, a->name, &found, &a->sq_read, &weight, err));
        QC_TRY(qc_check_interrupt(err));
    }
    return QC_OK;
}

/* Open what was written and score it beside the source. */
static int verify(job *j, output *o, const char *path, qc_err *err)
{
    qc_source *src = NULL;
    qc_model model;
    QC_TRY(qc_source_open(path, &src, err));
    src->path = o->emit->path; /* messages name the artifact, not its temporary file */
    int rc = qc_source_check(src, err);
    if (rc == QC_OK && j->recipe->verify.enabled)
        rc = read_back(j, o, src, err);
    if (rc == QC_OK && j->recipe->verify.enabled && (rc = qc_model_open(src, &model, err)) == QC_OK) {
        qc_progress_begin("verify", 1);
        qc_eval_options options = qc_measure_options(j->recipe);
        options.stored = j->stored;
        if (j->recipe->verify.decide)
            rc = qc_measure_decider(j->recipe, j->windows.n_windows, &options.decider, err);
        if (rc == QC_OK)
            rc = qc_evaluate(j->be, j->stored ? NULL : &j->model, &model, &j->windows, &options,
                             &o->evaluation, err);
        if (rc == QC_OK && j->recipe->verify.noise_floor)
            rc = qc_measure_noise(j->recipe, j->pool, j->be, &j->model, &j->windows, &o->evaluation.noise,
                                  err);
        if (rc == QC_OK && j->stored && !(o->evaluation.reference = qc_strdup(j->recipe->verify.reference)))
            rc = qc_fail_nomem(err, "reference path", 1);
        if (rc == QC_OK && !(o->evaluation.text = qc_strdup(j->text)))
            rc = qc_fail_nomem(err, "text path", 1);
        if (rc == QC_OK)
            rc = qc_sha256_file(j->text, o->evaluation.text_sha256, err);
        qc_decider_free(options.decider);
        qc_progress_end();
        qc_model_close(&model);
    }
    qc_source_close(src);
    return rc;
}

static int publish(job *j, output *o, bool passed, qc_err *err)
{
    o->rejected = !passed && !j->options->keep_failed;
    o->final_path = o->rejected ? qc_asprintf("%s.rejected", o->emit->path) : qc_strdup(o->emit->path);
    if (!o->final_path)
        return qc_fail_nomem(err, "path", strlen(o->emit->path));
    qc_writer *writer = o->writer;
    o->writer = NULL; /* freed by publish, also on failure */
    return writer->publish(writer, o->final_path, err);
}

static int judge(job *j, output *o, qc_err *err)
{
    const qc_recipe_verify *v = &j->recipe->verify;
    qc_measured measured = {
        .evaluation = v->enabled ? &o->evaluation : NULL,
        .fallbacks = (double)qc_event_count(&j->events, NULL),
        .size_bytes = (double)o->n_bytes,
        .seconds = qc_now_seconds() - j->start,
        .peak_rss_bytes = (double)qc_peak_rss_bytes(),
        .account_error = qc_account_error(&o->accounts),
    };
    if (!(o->gates = qc_calloc((size_t)v->n_gates + 1, sizeof *o->gates)))
        return qc_fail_nomem(err, "gates", (unsigned long long)v->n_gates * sizeof *o->gates);
    o->n_gates = v->n_gates;
    qc_measure_judge(j->recipe, &measured, o->gates);
    return QC_OK;
}

static int run_output(job *j, output *o, bool *ret_passed, qc_err *err)
{
    const char *path;
    QC_TRY(convert(j, o, err));
    QC_TRY(o->writer->finish(o->writer, &path, err));
    double start = qc_now_seconds();
    int rc = verify(j, o, path, err);
    j->times.verify += qc_now_seconds() - start;
    if (rc < 0)
        return qc_err_prefix(err, "verification of %s", o->emit->path);
    QC_TRY(qc_job_measure_artifact(j, o, path, err));
    QC_TRY(judge(j, o, err));
    *ret_passed = true;
    for (int i = 0; i < o->n_gates; i++)
        *ret_passed = *ret_passed && o->gates[i].pass;
    return publish(j, o, *ret_passed, err);
}

/* More fallbacks of a kind than the recipe allows? */
static bool over_allowance(const job *j)
{
    for (int64_t i = 0; i < j->events.n_events; i++) {
        const qc_event *e = &j->events.events[i];
        double allowed = 0;
        for (int k = 0; k < j->recipe->n_allow; k++)
            if (strcmp(j->recipe->allow[k].name, e->kind) == 0)
                allowed = j->recipe->allow[k].limit;
        if (e->level == QC_EVENT_FALLBACK && (double)qc_event_count(&j->events, e->kind) > allowed) {
            qc_log(QC_LOG_WARN,
                   "%lld fallbacks of the kind %s, allow.%s permits %g: exit code 6 (--set allow.%s=N "
                   "permits N)",
                   (long long)qc_event_count(&j->events, e->kind), e->kind, e->kind, allowed, e->kind);
            return true;
        }
    }
    return false;
}

static int add_notes(job *j, qc_err *err)
{
    for (const char *p = j->model.config.notes; p && *p;) {
        size_t n = strcspn(p, "\n");
        QC_TRY(qc_event_add(&j->events, QC_EVENT_NOTE, "config", "config.json", 1, err, "%.*s", (int)n, p));
        p += n + (p[n] == '\n');
    }
    return QC_OK;
}

static int run_job(job *j, qc_err *err)
{
    j->start = qc_now_seconds();
    QC_TRY(open_inputs(j, err));
    QC_TRY(add_notes(j, err));
    QC_TRY(make_plan(j, err));
    j->times.open = qc_now_seconds() - j->start;
    if (j->options->dry_run) /* what is missing is seen beside what is needed */
        QC_TRY(qc_job_print_plan(j, err));
    QC_TRY(check_resources(j, err));
    if (j->options->dry_run)
        return QC_OK;
    QC_TRY(hash_source(j, err));
    QC_TRY(qc_job_calibrate(j, err));
    bool all_passed = true;
    for (int i = 0; i < j->n_outputs; i++) {
        bool passed = false;
        QC_TRY(run_output(j, &j->outputs[i], &passed, err));
        all_passed = all_passed && passed;
    }
    j->times.total = qc_now_seconds() - j->start;
    QC_TRY(qc_job_write_reports(j, err));
    return !all_passed ? 1 : over_allowance(j) ? 6 : 0;
}

int qc_job_run(const qc_recipe *recipe, const qc_job_options *options, qc_err *err)
{
    job j = {.recipe = recipe, .options = options};
    int rc = run_job(&j, err);
    close_job(&j, rc >= 0);
    return rc;
}
