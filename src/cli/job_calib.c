#include "job_calib.h"

#include "device.h"
#include "eval.h"
#include "fold_layer.h"
#include "job_budget.h"
#include "main.h"
#include "measure.h"
#include "pipeline.h"
#include "progress.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_log.h"
#include "qc_math.h"
#include "qc_sha256.h"
#include "qc_time.h"

#include <math.h>
#include <string.h>

/* Tokens that the 16-bit model is measured with before the work: enough to see that model and text fit. */

/* ---- text ---- */

bool qc_job_calibrates(const qc_recipe *recipe, const qc_recipe_quantize *quantize)
{
    return quantize->method != QC_METHOD_RTN || recipe->calibration.text || recipe->calibration.statistics ||
           qc_job_has_budget(quantize);
}

bool qc_job_has_calibration(const job *j)
{
    return j->corpus.n_windows || j->given;
}

static int check_settings(const qc_recipe *r, const qc_recipe_quantize *q, qc_err *err)
{
    if (q->budget.bits_average > 0 && q->budget.size_bytes)
        return qc_fail(err, QC_E_USAGE, "quantize.budget: bits_average and size are two budgets, give one");
    const char *text = r->calibration.text, *statistics = r->calibration.statistics;
    if (text && statistics)
        return qc_fail(err, QC_E_USAGE,
                       "calibration: text and statistics are both given, one is taken instead of the other");
    if (!text && qc_job_has_budget(q))
        return qc_fail(err, QC_E_USAGE,
                       "quantize.budget: choosing bits needs a text to measure with (calibration.text, "
                       "--calib FILE)");
    if (!text && !statistics)
        return qc_fail(
            err, QC_E_USAGE,
            "quantize.method: all methods but rtn need a text to calibrate with (calibration.text, "
            "--calib FILE)");
    if (statistics && q->method != QC_METHOD_RTN && q->method != QC_METHOD_GPTQ)
        return qc_fail(err, QC_E_USAGE,
                       "quantize.method: methods that scale channels try the scales on tokens, so they need "
                       "calibration.text (--calib FILE) instead of calibration.statistics");
    if (q->method != QC_METHOD_RTN && q->weights.search == QC_SEARCH_GGML)
        return qc_fail(err, QC_E_USAGE,
                       "quantize.weights.search ggml is llama.cpp's rounding to nearest, so method rtn only");
    if (q->method == QC_METHOD_RTN && q->weights.search != QC_SEARCH_MSE && !qc_job_has_budget(q))
        return qc_fail(err, QC_E_USAGE,
                       "calibration.%s is given, but method rtn with search %s makes no use of it",
                       text ? "text" : "statistics", q->weights.search == QC_SEARCH_GGML ? "ggml" : "minmax");
    if (q->method != QC_METHOD_RTN && q->method != QC_METHOD_GPTQ && q->gptq.inputs == 1)
        return qc_fail(err, QC_E_USAGE,
                       "quantize.gptq.inputs original: methods that scale channels use the quantized inputs");
    /* Measured on the demo model (KLD, half corrected): .0031 at shrink .1, .0034 at .6, 7.4 at .9, where it
     * is .0058 without correction: what remains of the correlations no longer holds the corrections together.
     */
    if (text && qc_job_correction(q) > 0 && q->gptq.shrink > 0.6)
        return qc_fail(
            err, QC_E_USAGE,
            "quantize.gptq: shrink %g and correct %g contradict each other: corrected targets rely on "
            "the correlations (shrink at most 0.6, or correct 0)",
            q->gptq.shrink, q->gptq.correct);
    return QC_OK;
}

static uint64_t memory_cap(const job *j)
{
    uint64_t cap = j->recipe->run.memory_bytes;
    return cap ? cap - qc_program_bytes(j->recipe) : 0;
}

static int load_corpus(job *j, qc_err *err)
{
    const qc_recipe_calibration *c = &j->recipe->calibration;
    int64_t limit = j->model.config.max_positions;
    if (c->length > limit)
        return qc_fail(err, QC_E_USAGE, "calibration.length %lld: %s has at most %lld positions",
                       (long long)c->length, j->recipe->model, (long long)limit);
    qc_corpus_options options = {.windows = c->windows,
                                 .length = c->length,
                                 .sample = (qc_sample)c->sample,
                                 .seed = c->seed,
                                 .documents = (qc_documents)c->documents,
                                 .plain_special = c->plain_special,
                                 .max_positions = limit,
                                 .memory_bytes = memory_cap(j)};
    QC_TRY(qc_text_plan(j->src, c->text, memory_cap(j), &j->corpus_plan_bytes, err));
    QC_TRY(qc_corpus_load(j->src, c->text, &options, j->model.config.vocab, &j->events, &j->corpus, err));
    QC_TRY(qc_corpus_check(&j->corpus, &j->model.config, c->text, &j->events, err));
    j->calibration = (qc_calibration){.text = c->text,
                                      .windows = j->corpus.n_windows,
                                      .length = j->corpus.length,
                                      .tokens = j->corpus.n_windows * j->corpus.length,
                                      .tokens_text = j->corpus.n_text_ids,
                                      .documents = j->corpus.n_documents,
                                      .sample = c->sample == QC_SAMPLE_EVEN ? "even" : "random",
                                      .seed = c->seed,
                                      .plain_special = c->plain_special,
                                      .ppl = NAN};
    memcpy(j->calibration.ids_sha256, j->corpus.ids_sha256, sizeof j->calibration.ids_sha256);
    return QC_OK;
}

/* What a statistics file says of its text; an importance matrix is taken as it is. */
static int open_given(job *j, bool gptq, qc_err *err)
{
    const char *path = j->recipe->calibration.statistics;
    QC_TRY(qc_given_stats_open(path, &j->model, &j->given, err));
    const qc_stats_info *info = qc_given_stats_info(j->given);
    j->calibration = (qc_calibration){.statistics = path, .ppl = NAN};
    if (!info && gptq)
        return qc_fail(
            err, QC_E_USAGE,
            "%s: an importance matrix has no products of two inputs, which method gptq needs: take "
            "method rtn, or statistics made by qcalib",
            path);
    if (!info)
        return QC_OK;
    j->calibration.text = info->text;
    j->calibration.windows = info->n_windows;
    j->calibration.length = info->length;
    j->calibration.tokens = info->n_windows * info->length;
    j->calibration.compute = info->compute;
    memcpy(j->calibration.ids_sha256, info->ids_sha256, sizeof j->calibration.ids_sha256);
    return QC_OK;
}

int qc_job_open_calibration(job *j, qc_err *err)
{
    const qc_recipe *r = j->recipe;
    bool any = false, gptq = false;
    for (int i = 0; i < r->n_emit; i++) {
        const qc_recipe_quantize *q = r->emit[i].own_quantize ? &r->emit[i].quantize : &r->quantize;
        if (!qc_job_calibrates(r, q))
            continue;
        QC_TRY(check_settings(r, q, err));
        any = true;
        gptq = gptq || qc_job_rounds_by_gptq(q);
    }
    if (!any)
        return QC_OK;
    QC_TRY(qc_measure_check_cap(r, "run.memory", err));
    return r->calibration.statistics ? open_given(j, gptq, err) : load_corpus(j, err);
}

int qc_job_check_statistics(job *j, qc_err *err)
{
    if (!j->given)
        return QC_OK;
    QC_TRY(qc_given_stats_check(j->given, &j->model, (const char(*)[65])j->source_sha256, err));
    return qc_sha256_file(j->calibration.statistics, j->calibration.statistics_sha256, err);
}

/* ---- plan ---- */

bool qc_job_rounds_by_gptq(const qc_recipe_quantize *q)
{
    return q->method == QC_METHOD_GPTQ || q->method == QC_METHOD_AWQ_GPTQ ||
           q->method == QC_METHOD_SMOOTHQUANT_GPTQ;
}

double qc_job_correction(const qc_recipe_quantize *q)
{
    return qc_job_rounds_by_gptq(q) && q->gptq.inputs == 0 ? q->gptq.correct : 0;
}

qc_gptq_options qc_job_gptq_options(const qc_recipe_quantize *q)
{
    return (qc_gptq_options){.order = (qc_gptq_order)q->gptq.order,
                             .damp = q->gptq.damp,
                             .refit = q->gptq.refit,
                             .sweeps = q->gptq.sweeps};
}

/* Channel scaling as the method wants it. */
qc_fold_options qc_job_fold_options(const qc_recipe_quantize *q, bool ret_sites[QC_N_DENSE_STAGES])
{
    bool awq = q->method == QC_METHOD_AWQ || q->method == QC_METHOD_AWQ_GPTQ;
    bool smooth = q->method == QC_METHOD_SMOOTHQUANT || q->method == QC_METHOD_SMOOTHQUANT_GPTQ;
    int sites = awq ? q->awq.sites : q->smoothquant.sites;
    qc_fold_options options = qc_fold_defaults(awq      ? QC_FOLD_AWQ
                                               : smooth ? QC_FOLD_SMOOTHQUANT
                                                        : QC_FOLD_NONE);
    options.n_ratios = q->awq.ratios;
    options.alpha = q->smoothquant.alpha;
    for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++)
        ret_sites[stage] =
            (awq || smooth) && (sites == QC_SITES_ALL || stage == QC_STAGE_QKV || stage == QC_STAGE_GATE_UP);
    return options;
}

static qc_pipeline_options pipeline_options(const job *j, const qc_recipe_quantize *q)
{
    qc_pipeline_options options = {
        .gptq = qc_job_rounds_by_gptq(q),
        .gptq_options = qc_job_gptq_options(q),
        .given = j->given,
        .original_inputs = q->gptq.inputs == 1,
        .all_experts = j->recipe->calibration.experts == 1,
        .shrink = qc_job_rounds_by_gptq(q) ? q->gptq.shrink : 0,
        .correct = qc_job_correction(q),
        .memory_bytes = memory_cap(j),
        .scratch_folder = j->recipe->run.scratch,
        .progress = qc_progress_callback,
    };
    options.fold = qc_job_fold_options(q, options.fold_sites);
    return options;
}

/* Is the tensor rounded in the calibrated run, and not while the output is written? */
static bool in_layers(const job *j, const qc_convert_item *item)
{
    return item->action == QC_ACTION_QUANTIZED && j->model.places[item->tensor].layer >= 0;
}

int qc_job_make_plan(const job *j, output *o, const qc_policy *policy, qc_event_list *events, qc_err *err)
{
    bool sites[QC_N_DENSE_STAGES];
    QC_TRY(qc_convert_plan_make(&j->model, policy, o->format, o->emit->type, events, &o->plan, err));
    qc_job_fold_options(o->quantize, sites);
    qc_layer_fold_mark(&j->outputs[o->lead].plan, &j->model, sites, &o->plan);
    return QC_OK;
}

int qc_job_plan_calibration(job *j, output *o, qc_err *err)
{
    o->calibrated = qc_job_calibrates(j->recipe, o->quantize);
    if (!o->calibrated || o != &j->outputs[o->lead])
        return QC_OK;
    qc_free(o->journal_path);
    o->journal_bytes = 0;
    if (!(o->journal_path = qc_asprintf("%s.journal", o->emit->path)))
        return qc_fail_nomem(err, "path", strlen(o->emit->path) + 9);
    for (int64_t i = 0; i < o->plan.n_items; i++) {
        const qc_convert_item *item = &o->plan.items[i];
        const qc_tensor_info *info = j->src->info(j->src, item->tensor);
        if (in_layers(j, item))
            o->journal_bytes +=
                qc_journal_codes_bytes(&item->spec.grid, qc_tensor_rows(info), qc_tensor_cols(info));
    }
    return QC_OK;
}

void qc_job_calibration_bytes(const job *j, uint64_t *ret_memory, uint64_t *ret_scratch)
{
    *ret_memory = *ret_scratch = 0;
    for (int i = 0; i < j->n_outputs; i++) {
        const output *o = &j->outputs[i];
        if (!o->journal_path)
            continue;
        uint64_t full, least, scratch;
        qc_pipeline_options options = pipeline_options(j, o->quantize);
        qc_pipeline_plan_bytes(&o->plan, &j->model, &j->corpus, &options, j->be, &full, &least, &scratch);
        if (options.memory_bytes && full > options.memory_bytes) {
            *ret_scratch = scratch > *ret_scratch ? scratch : *ret_scratch;
            full = least;
        }
        *ret_memory = full > *ret_memory ? full : *ret_memory;
    }
    if (j->corpus_plan_bytes > *ret_memory)
        *ret_memory = j->corpus_plan_bytes;
    if (j->corpus.n_windows) { /* the model's own perplexity; its streams are small */
        uint64_t full, least;
        qc_eval_plan_bytes(&j->model.config, NULL, j->corpus.length,
                           qc_corpus_perplexity_windows(&j->corpus) * j->corpus.length, j->be->compute,
                           j->be->n_threads, &full, &least);
        *ret_memory = full > *ret_memory ? full : *ret_memory;
    }
}

/* ---- what must stay the same for a journal to be continued ---- */

typedef struct key_list {
    qc_journal_key *keys; /* names and values are owned */
    int n, cap;
} key_list;

static void key_list_clear(key_list *list)
{
    for (int i = 0; i < list->n; i++) {
        qc_free((char *)(uintptr_t)list->keys[i].name);
        qc_free((char *)(uintptr_t)list->keys[i].value);
    }
    qc_free(list->keys);
}

/* Takes both strings. */
static int key_add(key_list *list, char *name, char *value, qc_err *err)
{
    if (name && value && list->n == list->cap) {
        int cap = list->cap ? 2 * list->cap : 64;
        void *p =
            qc_realloc(list->keys, (size_t)list->cap * sizeof *list->keys, (size_t)cap * sizeof *list->keys);
        if (p) {
            list->keys = p;
            list->cap = cap;
        }
    }
    if (!name || !value || list->n == list->cap) {
        qc_free(name);
        qc_free(value);
        return qc_fail_nomem(err, "keys of the journal", 4096);
    }
    list->keys[list->n++] = (qc_journal_key){name, value};
    return QC_OK;
}

/* Every setting below `item` as one key. */
static int add_settings(key_list *list, const char *path, const cJSON *item, qc_err *err)
{
    if (!cJSON_IsObject(item) && !cJSON_IsArray(item)) {
        char *text = cJSON_PrintUnformatted(item);
        int rc = key_add(list, qc_strdup(path), text ? qc_strdup(text) : NULL, err);
        cJSON_free(text);
        return rc;
    }
    int i = 0;
    for (const cJSON *child = item->child; child; child = child->next, i++) {
        char *name =
            cJSON_IsObject(item) ? qc_asprintf("%s.%s", path, child->string) : qc_asprintf("%s[%d]", path, i);
        int rc = name ? add_settings(list, name, child, err) : qc_fail_nomem(err, path, strlen(path));
        qc_free(name);
        QC_TRY(rc);
    }
    return QC_OK;
}

static int build_keys(const job *j, const output *o, key_list *list, qc_err *err)
{
    const qc_recipe *r = j->recipe;
    QC_TRY(key_add(list, qc_strdup("the program"), qc_asprintf("%s (%s)", qc_version(), qc_version_commit()),
                   err));
    QC_TRY(key_add(list, qc_strdup("the kernels"), qc_strdup(qc_device_describe(j->be).kernels), err));
    QC_TRY(key_add(list, qc_strdup("run.compute"),
                   qc_strdup(r->run.compute == QC_COMPUTE_BF16 ? "bf16" : "f32"), err));
    for (int64_t i = 0; i < j->src->n_files; i++)
        QC_TRY(key_add(list, qc_asprintf("SHA-256 of %s", qc_path_base(j->src->files[i])),
                       qc_strdup(j->source_sha256[i]), err));
    cJSON *quantize = qc_recipe_quantize_json(o->quantize);
    int rc = quantize ? add_settings(list, "quantize", quantize, err) : qc_fail_nomem(err, "recipe", 4096);
    cJSON_Delete(quantize);
    QC_TRY(rc);
    if (j->given)
        return key_add(list, qc_strdup("SHA-256 of the statistics"),
                       qc_strdup(j->calibration.statistics_sha256), err);
    QC_TRY(key_add(list, qc_strdup("length of a calibration window"),
                   qc_asprintf("%lld", (long long)j->corpus.length), err));
    if (j->model.config.n_experts)
        QC_TRY(key_add(list, qc_strdup("calibration.experts"),
                       qc_strdup(r->calibration.experts == 1 ? "all" : "routed"), err));
    return key_add(list, qc_strdup("SHA-256 of the calibration ids"), qc_strdup(j->corpus.ids_sha256), err);
}

static int open_journal(job *j, output *o, qc_err *err)
{
    key_list list = {0};
    int rc = build_keys(j, o, &list, err);
    if (rc == QC_OK)
        rc = qc_journal_open(o->journal_path, list.keys, list.n, j->options->resume, j->options->force,
                             &o->journal, err);
    key_list_clear(&list);
    return rc;
}

/* ---- run ---- */

static int measure_model(job *j, qc_err *err)
{
    qc_eval_options options = qc_measure_options(j->recipe);
    options.progress = NULL;
    double limit = j->recipe->calibration.perplexity_limit;
    qc_calibration *c = &j->calibration;
    QC_TRY(qc_corpus_perplexity(&j->corpus, &j->model, j->be, &options, limit, c->text, &j->events, &c->ppl,
                                &c->ppl_windows, err));
    qc_log(QC_LOG_INFO, "calibration: %lld windows of %lld tokens, perplexity of the model %.4g",
           (long long)c->windows, (long long)c->length, c->ppl);
    if (!(c->ppl <= limit))
        qc_log(QC_LOG_WARN,
               "the 16-bit model has perplexity %.4g on %s, over calibration.perplexity_limit %.4g: is the "
               "model sound, the text of its kind?",
               c->ppl, c->text, limit);
    return QC_OK;
}

static int run_one(job *j, output *o, qc_err *err)
{
    QC_TRY(open_journal(j, o, err));
    int64_t done = qc_journal_n_layers(o->journal), all = j->model.config.n_layers;
    if (j->options->resume)
        qc_log(QC_LOG_INFO, "%s: %lld of %lld layers are done", o->journal_path, (long long)done,
               (long long)all);
    if (done == all)
        return QC_OK;
    qc_progress_begin("calibrate", 1);
    qc_pipeline_options options = pipeline_options(j, o->quantize);
    int rc = qc_pipeline_run(&o->plan, &j->model, j->be, &j->corpus, &options, o->journal, err);
    qc_progress_end();
    return rc;
}

int qc_job_calibrate(job *j, qc_err *err)
{
    if (!qc_job_has_calibration(j))
        return QC_OK;
    double start = qc_now_seconds();
    if (!j->given)
        QC_TRY(measure_model(j, err));
    for (int i = 0; i < j->n_outputs; i++)
        if (j->outputs[i].journal_path)
            QC_TRY(run_one(j, &j->outputs[i], err));
    j->times.calibrate = qc_now_seconds() - start;
    return QC_OK;
}

const qc_journal *qc_job_journal(const job *j, const output *o)
{
    return j->outputs[o->lead].journal;
}

void qc_job_close_calibration(job *j, bool ended)
{
    for (int i = 0; i < j->n_outputs; i++) {
        output *o = &j->outputs[i];
        int64_t done = o->journal ? qc_journal_n_layers(o->journal) : 0;
        if (ended || done == 0) {
            qc_journal_remove(o->journal);
        } else {
            qc_journal_close(o->journal);
            qc_log(QC_LOG_WARN, "%s holds %lld of %lld layers, --resume goes on from there", o->journal_path,
                   (long long)done, (long long)j->model.config.n_layers);
        }
        qc_free(o->journal_path);
    }
    qc_corpus_clear(&j->corpus);
    qc_given_stats_close(j->given);
}
