/* qcalib: calibration statistics of a model, made once for many recipes. */
#include "backend.h"
#include "corpus.h"
#include "device.h"
#include "imatrix.h"
#include "main.h"
#include "measure.h"
#include "model.h"
#include "open.h"
#include "programs.h"
#include "progress.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_json.h"
#include "qc_log.h"
#include "qc_math.h"
#include "recipe.h"
#include "schema.h"
#include "stats_file.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define JSON_VERSION 1

typedef struct calib_job {
    const qc_args *args;
    qc_recipe recipe; /* model, calibration.*, run.* */
    qc_pool *pool;
    qc_backend *be;
} calib_job;

static int usage(const calib_job *j, qc_err *err, const char *what)
{
    return qc_args_fail(j->args->program, err, "%s", what);
}

/* An output that is an input, or lies in the model's folder, would destroy it. Device and inode decide. */
static int check_no_input(const calib_job *j, const char *path, qc_err *err)
{
    const char *text = j->recipe.calibration.text;
    char *folder = qc_path_dir(path);
    if (!folder)
        return qc_fail_nomem(err, path, strlen(path));
    int rc = QC_OK;
    for (int i = 0; i < j->args->n_operands && rc == QC_OK; i++)
        if (qc_path_same(path, j->args->operands[i]))
            rc = qc_fail(err, QC_E_USAGE, "%s: the output would replace an input", path);
        else if (qc_path_same(folder, j->args->operands[i]))
            rc = qc_fail(err, QC_E_USAGE, "%s: the output would be written into the model %s", path,
                         j->args->operands[i]);
    if (rc == QC_OK && text && qc_path_same(path, text))
        rc = qc_fail(err, QC_E_USAGE, "%s: the output would replace the text to calibrate with", path);
    qc_free(folder);
    return rc;
}

/* -o FILE, which must be possible before anything takes long. */
static int output_path(const calib_job *j, const char **ret, qc_err *err)
{
    *ret = qc_args_value(j->args, "output");
    if (!*ret)
        return usage(j, err, "no output: name one with -o FILE");
    QC_TRY(check_no_input(j, *ret, err));
    return qc_outfile_check(*ret, qc_args_has(j->args, "force"), err);
}

/* ---- make ---- */

/* "2/3": the second of three shards. */
static int parse_shard(const calib_job *j, qc_stats_options *ret, qc_err *err)
{
    const char *text = qc_args_value(j->args, "shard"), *slash = text ? strchr(text, '/') : NULL;
    int64_t i = 1, n = 1;
    bool ok = true;
    if (text) {
        char *first = slash ? qc_strndup(text, (size_t)(slash - text)) : NULL;
        ok = first && qc_parse_int(first, &i, NULL) == QC_OK && qc_parse_int(slash + 1, &n, NULL) == QC_OK &&
             i >= 1 && i <= n && n <= 100000;
        qc_free(first);
    }
    if (!ok)
        return qc_args_fail(j->args->program, err, "--shard %s: I/N was expected, as 1/3, 2/3 and 3/3", text);
    ret->shard = (int)i - 1;
    ret->n_shards = (int)n;
    return QC_OK;
}

static int corpus_options(const calib_job *j, const qc_model *model, qc_corpus_options *ret, qc_err *err)
{
    const qc_recipe_calibration *c = &j->recipe.calibration;
    const char *preset = qc_args_value(j->args, "preset");
    int64_t windows = c->windows, length = c->length;
    if (preset) {
        if (!qc_corpus_preset(preset, &windows, &length))
            return qc_args_fail(j->args->program, err,
                                "--preset %s: quick, standard or thorough was expected", preset);
        length = qc_min_i64(length, model->config.max_positions);
        windows = qc_args_has(j->args, "windows") ? c->windows : windows;
        length = qc_args_has(j->args, "length") ? c->length : length;
    }
    *ret = (qc_corpus_options){.windows = windows,
                               .length = length,
                               .sample = (qc_sample)c->sample,
                               .seed = c->seed,
                               .documents = (qc_documents)c->documents,
                               .plain_special = c->plain_special,
                               .max_positions = model->config.max_positions,
                               .memory_bytes = qc_measure_options(&j->recipe).memory_bytes};
    return QC_OK;
}

static void print_events(const qc_event_list *events)
{
    for (int64_t i = 0; i < events->n_events; i++)
        qc_log(QC_LOG_WARN, "%s: %s", events->events[i].subject, events->events[i].detail);
}

static int check_corpus(const calib_job *j, const qc_model *model, const qc_corpus *corpus,
                        qc_event_list *events, qc_err *err)
{
    double ppl = 0;
    int64_t n_scored;
    const char *text = j->recipe.calibration.text;
    qc_eval_options options = qc_measure_options(&j->recipe);
    QC_TRY(qc_corpus_check(corpus, &model->config, text, events, err));
    printf("%lld windows of %lld tokens, %lld in the whole text (%lld document%s)\n",
           (long long)corpus->n_windows, (long long)corpus->length, (long long)corpus->n_text_ids,
           (long long)corpus->n_documents, corpus->n_documents == 1 ? "" : "s");
    if (qc_args_has(j->args, "no-perplexity"))
        return QC_OK;
    qc_progress_begin("perplexity", 1);
    QC_TRY(qc_corpus_perplexity(corpus, model, j->be, &options, j->recipe.calibration.perplexity_limit, text,
                                events, &ppl, &n_scored, err));
    qc_progress_end();
    printf("perplexity of the model on the first of them: %.4g\n", ppl);
    return QC_OK;
}

static int write_statistics(const calib_job *j, const qc_model *model, const qc_corpus *corpus,
                            const qc_stats_options *options, const char *path, qc_err *err)
{
    qc_stats_info info;
    qc_stats_writer *writer;
    QC_TRY(qc_stats_describe(model, corpus, j->recipe.calibration.text, (qc_compute)j->recipe.run.compute,
                             &info, err));
    QC_TRY(qc_stats_shard(corpus, options, &info, err));
    QC_TRY(qc_stats_create(path, qc_args_has(j->args, "force"), &info, &writer, err));
    qc_progress_begin("statistics", 1);
    int rc = qc_stats_make(model, j->be, corpus, options, &info, writer, err);
    qc_progress_end();
    if (rc < 0) {
        qc_stats_discard(writer);
        return rc;
    }
    QC_TRY(qc_stats_commit(writer, err));
    printf("%s: %lld layers, %lld tokens\n", path, (long long)info.n_layers,
           (long long)(info.n_windows * info.length));
    return QC_OK;
}

static int make_with(const calib_job *j, const qc_model *model, const char *path, qc_err *err)
{
    qc_eval_options run = qc_measure_options(&j->recipe);
    qc_stats_options options = {.memory_bytes = run.memory_bytes,
                                .scratch_folder = run.scratch_folder,
                                .progress = run.progress,
                                .progress_ctx = run.progress_ctx};
    qc_corpus_options wanted;
    qc_corpus corpus = {0};
    qc_event_list events = {0};
    QC_TRY(parse_shard(j, &options, err));
    QC_TRY(corpus_options(j, model, &wanted, err));
    int rc = qc_corpus_load(model->src, j->recipe.calibration.text, &wanted, model->config.vocab, &events,
                            &corpus, err);
    if (rc == QC_OK)
        rc = check_corpus(j, model, &corpus, &events, err);
    print_events(&events);
    if (rc == QC_OK)
        rc = write_statistics(j, model, &corpus, &options, path, err);
    qc_event_list_clear(&events);
    qc_corpus_clear(&corpus);
    return rc;
}

static int make(const calib_job *j, qc_err *err)
{
    const char *path;
    qc_source *src;
    qc_model model;
    if (!j->recipe.calibration.text)
        return usage(j, err, "no text to calibrate with: --text FILE");
    QC_TRY(output_path(j, &path, err));
    QC_TRY(qc_measure_check_cap(&j->recipe, "--memory", err));
    QC_TRY(qc_source_open(j->recipe.model, &src, err));
    int rc = qc_model_open(src, &model, err);
    if (rc == QC_OK) {
        rc = make_with(j, &model, path, err);
        qc_model_close(&model);
    }
    qc_source_close(src);
    return rc;
}

/* ---- show ---- */

typedef struct input_row {
    qc_stats_place place;
    int64_t tokens;
    double rms, mean_abs, max_abs; /* of all elements */
} input_row;

static int read_row(const calib_job *j, const qc_stats_file *file, qc_stats_place place, input_row *ret,
                    qc_err *err)
{
    int64_t n = qc_stats_of(file)->widths[place.stage];
    float *rows = qc_alloc((size_t)(3 * n), sizeof *rows);
    *ret = (input_row){.place = place};
    if (!rows)
        return qc_fail_nomem(err, "statistics", (unsigned long long)(3 * n) * sizeof *rows);
    int rc = qc_stats_summary(file, j->be, place, rows, rows + n, rows + 2 * n, &ret->tokens, err);
    double squares = 0, sum = 0;
    for (int64_t i = 0; i < n && rc == QC_OK; i++) {
        squares += (double)rows[i];
        sum += (double)rows[n + i];
        ret->max_abs = fmax(ret->max_abs, (double)rows[2 * n + i]);
    }
    double count = (double)(n * qc_max_i64(1, ret->tokens)); /* an expert may have none */
    ret->rms = sqrt(squares / count);
    ret->mean_abs = sum / count;
    qc_free(rows);
    return rc;
}

/* "down", or "expert_gate_up 127" */
static int stage_columns(const qc_stats_info *i)
{
    return i->n_experts ? 19 : 8;
}

static void print_head(const qc_stats_info *i, const char *path)
{
    printf("%s\nmodel    %s, %lld layers, inputs", path, i->family, (long long)i->n_layers);
    for (int s = 0; s < QC_N_STAGES; s++)
        if (i->widths[s])
            printf("%s %lld (%s)", s ? "," : "", (long long)i->widths[s], qc_stage_name((qc_stage)s));
    if (i->n_experts)
        printf("\n         %lld experts", (long long)i->n_experts);
    printf("\n         SHA-256 %s\n", i->model_sha256);
    printf("corpus   %s, %lld windows of %lld tokens\n         SHA-256 %s\n", i->text,
           (long long)i->corpus_windows, (long long)i->length, i->ids_sha256);
    if (i->n_windows == i->corpus_windows)
        printf("windows  all\n");
    else
        printf("windows  %lld to %lld (a shard)\n", (long long)i->first_window,
               (long long)(i->first_window + i->n_windows - 1));
    printf("compute  %s\n\nlayer  %-*s   tokens        rms   mean abs    max abs\n", i->compute,
           stage_columns(i), "stage");
}

static cJSON *head_json(const qc_stats_info *i)
{
    cJSON *doc = cJSON_CreateObject(), *widths;
    cJSON_AddNumberToObject(doc, "version", JSON_VERSION);
    cJSON_AddStringToObject(doc, "family", i->family);
    cJSON_AddNumberToObject(doc, "layers", (double)i->n_layers);
    widths = cJSON_AddObjectToObject(doc, "widths");
    for (int s = 0; s < QC_N_STAGES; s++)
        if (i->widths[s])
            cJSON_AddNumberToObject(widths, qc_stage_name((qc_stage)s), (double)i->widths[s]);
    if (i->n_experts)
        cJSON_AddNumberToObject(doc, "experts", (double)i->n_experts);
    cJSON_AddStringToObject(doc, "model_sha256", i->model_sha256);
    cJSON_AddStringToObject(doc, "text", i->text);
    cJSON_AddStringToObject(doc, "ids_sha256", i->ids_sha256);
    cJSON_AddNumberToObject(doc, "corpus_windows", (double)i->corpus_windows);
    cJSON_AddNumberToObject(doc, "length", (double)i->length);
    cJSON_AddNumberToObject(doc, "first_window", (double)i->first_window);
    cJSON_AddNumberToObject(doc, "windows", (double)i->n_windows);
    cJSON_AddStringToObject(doc, "compute", i->compute);
    return doc;
}

static void add_row(cJSON *list, const qc_stats_info *info, const input_row *r, bool json)
{
    bool of_expert = r->place.stage >= QC_N_DENSE_STAGES;
    if (!json) {
        char name[48];
        snprintf(name, sizeof name, of_expert ? "%s %lld" : "%s", qc_stage_name(r->place.stage),
                 (long long)r->place.expert);
        printf("%5d  %-*s %8lld %10.4g %10.4g %10.4g\n", r->place.layer, stage_columns(info), name,
               (long long)r->tokens, r->rms, r->mean_abs, r->max_abs);
        return;
    }
    cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
    cJSON_AddNumberToObject(item, "layer", r->place.layer);
    cJSON_AddStringToObject(item, "stage", qc_stage_name(r->place.stage));
    if (of_expert)
        cJSON_AddNumberToObject(item, "expert", (double)r->place.expert);
    cJSON_AddNumberToObject(item, "tokens", (double)r->tokens);
    cJSON_AddNumberToObject(item, "rms", r->rms);
    cJSON_AddNumberToObject(item, "mean_abs", r->mean_abs);
    cJSON_AddNumberToObject(item, "max_abs", r->max_abs);
}

static int show_file(const calib_job *j, const qc_stats_file *file, qc_err *err)
{
    const qc_stats_info *info = qc_stats_of(file);
    bool json = qc_args_has(j->args, "json");
    int rc = QC_OK;
    qc_json_watch();
    cJSON *doc = json ? head_json(info) : NULL, *list = cJSON_AddArrayToObject(doc, "inputs");
    if (!json)
        print_head(info, j->args->operands[0]);
    for (int64_t k = 0; k < qc_stats_n_places(info) && rc == QC_OK; k++) {
        input_row row;
        rc = read_row(j, file, qc_stats_place_at(info, k), &row, err);
        if (rc == QC_OK)
            add_row(list, info, &row, json);
    }
    doc = qc_json_watched(doc);
    if (rc == QC_OK && json)
        return qc_print_json(doc, err);
    cJSON_Delete(doc);
    return rc;
}

static int show(const calib_job *j, qc_err *err)
{
    qc_stats_file *file;
    QC_TRY(qc_stats_open(j->args->operands[0], &file, err));
    int rc = show_file(j, file, err);
    qc_stats_close(file);
    return rc;
}

/* ---- merge, imatrix ---- */

static int merge(const calib_job *j, qc_err *err)
{
    const char *path;
    QC_TRY(output_path(j, &path, err));
    return qc_stats_merge((const char *const *)j->args->operands, j->args->n_operands, path,
                          qc_args_has(j->args, "force"), j->be, err);
}

static int imatrix(const calib_job *j, qc_err *err)
{
    const char *path;
    qc_stats_file *file;
    QC_TRY(output_path(j, &path, err));
    QC_TRY(qc_stats_open(j->args->operands[0], &file, err));
    int rc = qc_imatrix_write(file, j->be, path, qc_args_has(j->args, "force"), err);
    qc_stats_close(file);
    return rc;
}

/* ---- the program ---- */

static int run(calib_job *j, qc_err *err)
{
    static const struct {
        const char *name, *operand;
        int (*fn)(const calib_job *j, qc_err *err);
    } commands[] = {{"make", "no MODEL given", make},
                    {"merge", "no files given", merge},
                    {"show", "no FILE given", show},
                    {"imatrix", "no FILE given", imatrix}};
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        if (!j->args->command || strcmp(j->args->command, commands[i].name) != 0)
            continue;
        if (j->args->n_operands == 0)
            return usage(j, err, commands[i].operand);
        if (j->args->n_operands > 1 && commands[i].fn != merge)
            return qc_args_fail(j->args->program, err, "unexpected argument '%s'", j->args->operands[1]);
        QC_TRY(qc_pool_new(j->recipe.run.threads, &j->pool, err));
        QC_TRY(qc_device_open(&j->recipe.run, j->pool, &j->be, err));
        return commands[i].fn(j, err);
    }
    return usage(j, err, "no command given: make, merge, show or imatrix");
}

static int calibrate(const qc_args *args, qc_err *err)
{
    calib_job j = {.args = args};
    QC_TRY(qc_recipe_load(args, &j.recipe, err));
    int rc = run(&j, err);
    qc_backend_close(j.be);
    qc_pool_free(j.pool);
    qc_recipe_clear(&j.recipe);
    return rc;
}

int main(int argc, char **argv)
{
    return qc_main(&qc_program_qcalib, argc, argv, calibrate);
}
