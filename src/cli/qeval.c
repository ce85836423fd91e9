/* qeval: perplexity and KL divergence of any readable model, alone or against a reference. */
#include "backend.h"
#include "device.h"
#include "eval.h"
#include "main.h"
#include "measure.h"
#include "model.h"
#include "open.h"
#include "programs.h"
#include "progress.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_json.h"
#include "qc_math.h"
#include "qc_sha256.h"
#include "qeval_task.h"
#include "recipe.h"
#include "render.h"
#include "report.h"
#include "stored.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define MAX_IDS_BYTES ((size_t)1 << 30)

typedef struct input {
    qc_source *src;
    qc_model model;
    bool is_open;
} input;

typedef struct eval_job {
    const qc_args *args;
    qc_recipe recipe; /* model, verify.*, run.* */
    qc_pool *pool;
    qc_backend *be;
    input model, reference; /* reference.is_open false: none is run */
    qc_reference *stored;   /* in place of one; NULL: none */
} eval_job;

static int open_input(const char *path, input *ret, qc_err *err)
{
    QC_TRY(qc_source_open(path, &ret->src, err));
    QC_TRY(qc_source_check(ret->src, err)); /* the figures of a damaged file look like figures */
    QC_TRY(qc_model_open(ret->src, &ret->model, err));
    ret->is_open = true;
    return QC_OK;
}

static void close_input(input *in)
{
    if (in->is_open)
        qc_model_close(&in->model);
    qc_source_close(in->src);
}

/* ---- a text ---- */

static int cut_text(const eval_job *j, const input *in, const char *text, const qc_cut_rule *rule,
                    qc_windows *ret, qc_err *err)
{
    return qc_windows_of_model(in->src, text, rule, qc_measure_options(&j->recipe).memory_bytes, ret, err);
}

/* Both models must see the same ids, else their figures are about different things. */
static int check_same_ids(const eval_job *j, const char *text, const qc_cut_rule *rule,
                          const qc_windows *windows, qc_err *err)
{
    qc_windows other = {0};
    if (!j->reference.is_open)
        return QC_OK;
    int rc = cut_text(j, &j->reference, text, rule, &other, err);
    if (rc == QC_OK && strcmp(other.ids_sha256, windows->ids_sha256) != 0)
        rc = qc_fail(err, QC_E_INPUT, "%s and %s turn the text %s into different token ids", j->recipe.model,
                     j->reference.src->path, text);
    qc_windows_clear(&other);
    return rc;
}

static int64_t max_positions(const eval_job *j)
{
    int64_t limit = j->model.model.config.max_positions;
    if (j->reference.is_open)
        limit = qc_min_i64(limit, j->reference.model.config.max_positions);
    return limit;
}

/* The windows that are asked for, or those of a stored reference. */
static int choose_rule(const eval_job *j, qc_cut_rule *ret, qc_err *err)
{
    static const char *const options[] = {"protocol", "windows", "length", "stride", "bos", "plain-special"};
    if (!j->stored)
        return qc_measure_rule(&j->recipe, max_positions(j), ret, err);
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++)
        if (qc_args_has(j->args, options[i]))
            return qc_args_fail(j->args->program, err, "--%s: a stored reference says how the text is cut",
                                options[i]);
    qc_reference_rule(j->stored, ret);
    if (ret->length <= max_positions(j))
        return QC_OK;
    return qc_fail(err, QC_E_INPUT, "%s: windows of %lld tokens, the model has at most %lld positions",
                   qc_reference_path(j->stored), (long long)ret->length, (long long)max_positions(j));
}

static int print_evaluation(const eval_job *j, const qc_evaluation *e, qc_err *err)
{
    qc_buf text = {0};
    cJSON *doc = qc_report_evaluation(e);
    int rc = doc ? qc_render_evaluation(doc, &text, err) : qc_fail_nomem(err, "evaluation", 4096);
    if (rc == QC_OK)
        rc = qc_report_evaluation_details(e, &text, err);
    cJSON_Delete(doc);
    if (rc == QC_OK && j->reference.is_open)
        printf("%s against %s\n%s", j->recipe.model, j->reference.src->path, text.data);
    else if (rc == QC_OK && j->stored)
        printf("%s against %s of %s\n%s", j->recipe.model, qc_reference_path(j->stored),
               qc_reference_origin_of(j->stored)->model, text.data);
    else if (rc == QC_OK)
        printf("%s\n%s", j->recipe.model, text.data);
    qc_buf_clear(&text);
    return rc;
}

/* Begin the file of --save-reference; *ret = NULL without it. */
static int begin_reference(const eval_job *j, const char *text, const qc_windows *windows,
                           qc_reference_writer **ret, qc_err *err)
{
    const char *path = qc_args_value(j->args, "save-reference");
    qc_reference_origin origin;
    *ret = NULL;
    if (!path)
        return QC_OK;
    bool force = qc_args_has(j->args, "force");
    QC_TRY(qc_outfile_check(path, force, err));
    QC_TRY(qc_stored_origin(j->model.src, text, j->recipe.run.compute, &origin, err));
    return qc_reference_create(path, force, &origin, windows, j->model.model.config.vocab, ret, err);
}

/* Names of what was measured, for people. */
static int name_evaluation(const eval_job *j, const char *text, qc_evaluation *e, qc_err *err)
{
    e->text = qc_strdup(text);
    e->reference = j->stored ? qc_strdup(qc_reference_path(j->stored)) : NULL;
    if (!e->text || (j->stored && !e->reference))
        return qc_fail_nomem(err, "paths", strlen(text));
    return qc_sha256_file(text, e->text_sha256, err);
}

/* The decisions and gates, below the figures. */
static void print_gates(const qc_evaluation *e, const qc_gate *gates, int n_gates)
{
    for (int i = 0; i < e->n_decisions; i++)
        printf("  decision      %s %s: %s after %lld windows (%.6g, %.3g standard errors from the limit, "
               "boundary %.3g)\n",
               e->decisions[i].gate, e->decisions[i].outcome, e->decisions[i].gate,
               (long long)e->decisions[i].windows, e->decisions[i].value, e->decisions[i].statistic,
               e->decisions[i].boundary);
    for (int i = 0; i < n_gates; i++)
        printf("  gate          %s %.6g, limit %.6g: %s\n", gates[i].name, gates[i].value, gates[i].limit,
               gates[i].pass ? "passed" : "FAILED");
}

/* 0, or 1 if a gate failed. */
static int finish_evaluation(const eval_job *j, const char *text, qc_evaluation *e, qc_err *err)
{
    int n = j->recipe.verify.n_gates;
    qc_measured measured = {.evaluation = e,
                            .fallbacks = NAN,
                            .size_bytes = NAN,
                            .seconds = e->seconds,
                            .peak_rss_bytes = (double)qc_peak_rss_bytes()};
    qc_gate *gates = qc_calloc((size_t)n + 1, sizeof *gates);
    bool passed = true;
    if (!gates)
        return qc_fail_nomem(err, "gates", (unsigned long long)n * sizeof *gates);
    int rc = name_evaluation(j, text, e, err);
    qc_measure_judge(&j->recipe, &measured, gates);
    for (int i = 0; i < n; i++)
        passed = passed && gates[i].pass;
    if (rc == QC_OK && qc_args_has(j->args, "json"))
        rc = qc_print_json(qc_report_evaluation(e), err);
    else if (rc == QC_OK && (rc = print_evaluation(j, e, err)) == QC_OK)
        print_gates(e, gates, n);
    qc_free(gates);
    return rc < 0 ? rc : !passed;
}

static int score_windows(const eval_job *j, const char *text, const qc_windows *windows, qc_err *err)
{
    qc_evaluation e;
    qc_eval_options options = qc_measure_options(&j->recipe);
    qc_reference_writer *storing;
    options.stored = j->stored;
    if (j->recipe.verify.decide)
        QC_TRY(qc_measure_decider(&j->recipe, windows->n_windows, &options.decider, err));
    int rc = begin_reference(j, text, windows, &storing, err);
    options.storing = storing;
    qc_progress_begin("evaluate", 1);
    if (rc == QC_OK)
        rc = qc_evaluate(j->be, j->reference.is_open ? &j->reference.model : NULL, &j->model.model, windows,
                         &options, &e, err);
    qc_progress_end();
    qc_decider_free(options.decider);
    if (rc == QC_OK && j->recipe.verify.noise_floor &&
        (rc = qc_measure_noise(&j->recipe, j->pool, j->be,
                               j->reference.is_open ? &j->reference.model : &j->model.model, windows,
                               &e.noise, err)) < 0)
        qc_evaluation_clear(&e);
    if (rc < 0) {
        qc_reference_discard(storing);
        return rc;
    }
    if (storing)
        rc = qc_reference_commit(storing, err);
    if (rc == QC_OK)
        rc = finish_evaluation(j, text, &e, err);
    qc_evaluation_clear(&e);
    return rc;
}

static int check_gates(const eval_job *j, qc_err *err)
{
    const qc_recipe_verify *v = &j->recipe.verify;
    bool paired = j->reference.is_open || j->stored;
    for (int i = 0; i < v->n_gates; i++) {
        QC_TRY(qc_gate_check(v->gates[i].name, v->gates[i].limit, err));
        if (!paired && qc_gate_needs_verification(v->gates[i].name) && strcmp(v->gates[i].name, "ppl") != 0)
            return qc_args_fail(j->args->program, err, "gate %s: there is no --reference", v->gates[i].name);
    }
    return QC_OK;
}

static int evaluate_text(const eval_job *j, qc_err *err)
{
    char *text = NULL;
    qc_cut_rule rule;
    qc_windows windows = {0};
    QC_TRY(choose_rule(j, &rule, err));
    if (j->recipe.verify.decide && !j->stored && !qc_args_has(j->args, "windows"))
        rule.n_windows = 0;
    QC_TRY(check_gates(j, err));
    QC_TRY(qc_measure_text(&j->recipe, &text, err));
    int rc = cut_text(j, &j->model, text, &rule, &windows, err);
    if (rc == QC_OK)
        rc = check_same_ids(j, text, &rule, &windows, err);
    if (rc == QC_OK && j->stored)
        rc = qc_stored_check_text(j->stored, j->model.src, j->model.model.config.vocab, &windows, err);
    if (rc == QC_OK)
        rc = score_windows(j, text, &windows, err);
    qc_windows_clear(&windows);
    qc_free(text);
    return rc;
}

/* ---- lists of ids ---- */

/* Arrays of one file of ids. */
typedef struct id_lists {
    int32_t *ids;
    int64_t *lengths;
    int64_t n, n_ids;
} id_lists;

static int check_list(const cJSON *list, int64_t number, const char *path, const qc_model_config *config,
                      qc_err *err)
{
    int64_t id, i = 0;
    if (!cJSON_IsArray(list) || !list->child)
        return qc_fail(err, QC_E_INPUT, "%s: element %lld is no list of ids", path, (long long)number);
    for (const cJSON *item = list->child; item; item = item->next, i++)
        if (!qc_json_int(item, &id) || id < 0 || id >= config->vocab)
            return qc_fail(err, QC_E_INPUT, "%s: list %lld, element %lld is no id from 0 to %lld", path,
                           (long long)number, (long long)i, (long long)config->vocab - 1);
    if (i > config->max_positions)
        return qc_fail(err, QC_E_INPUT, "%s: list %lld has %lld ids, the model has at most %lld positions",
                       path, (long long)number, (long long)i, (long long)config->max_positions);
    return QC_OK;
}

static int read_lists(const cJSON *doc, const char *path, const qc_model_config *config, id_lists *ret,
                      qc_err *err)
{
    if (!cJSON_IsArray(doc) || !doc->child)
        return qc_fail(err, QC_E_INPUT, "%s: a list of lists of ids was expected", path);
    for (const cJSON *list = doc->child; list; list = list->next) {
        QC_TRY(check_list(list, ret->n++, path, config, err));
        ret->n_ids += cJSON_GetArraySize(list);
    }
    ret->ids = qc_alloc((size_t)ret->n_ids, sizeof *ret->ids);
    ret->lengths = qc_calloc((size_t)ret->n, sizeof *ret->lengths);
    if (!ret->ids || !ret->lengths)
        return qc_fail_nomem(err, "ids", (unsigned long long)ret->n_ids * sizeof *ret->ids);
    int64_t i = 0, n = 0;
    for (const cJSON *list = doc->child; list; list = list->next, n++)
        for (const cJSON *item = list->child; item; item = item->next, ret->lengths[n]++)
            ret->ids[i++] = (int32_t)item->valuedouble;
    return QC_OK;
}

/* The sequences' figures, printed or (json) as a document; NULL also when out of memory. */
static cJSON *sums_json(const id_lists *lists, const qc_token_score *scores, bool json)
{
    qc_json_watch();
    cJSON *doc = json ? cJSON_CreateObject() : NULL, *list = cJSON_AddArrayToObject(doc, "sequences");
    for (int64_t i = 0; i < lists->n; i++) {
        double nll = 0;
        int64_t n = lists->lengths[i] - 1, n_top = 0;
        for (int64_t t = 0; t < n; t++, scores++) {
            nll += scores->nll_a;
            n_top += scores->top_a == scores->target;
        }
        if (!json) {
            printf("%lld: %lld tokens scored, nll %.6f nats\n", (long long)i, (long long)n, nll);
            continue;
        }
        cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
        cJSON_AddNumberToObject(item, "tokens", (double)n);
        cJSON_AddNumberToObject(item, "nll_sum", nll);
        cJSON_AddNumberToObject(item, "top1_sum", (double)n_top);
    }
    return qc_json_watched(doc);
}

static int score_lists(const eval_job *j, const id_lists *lists, qc_err *err)
{
    qc_eval_options options = qc_measure_options(&j->recipe);
    qc_sequences seqs = {.ids = lists->ids, .lengths = lists->lengths, .n_sequences = lists->n};
    qc_token_score *scores = qc_alloc((size_t)(lists->n_ids - lists->n), sizeof *scores);
    if (!scores)
        return qc_fail_nomem(err, "token scores", (unsigned long long)lists->n_ids * sizeof *scores);
    qc_progress_begin("evaluate", 1);
    int rc = qc_eval_tokens(j->be, &j->model.model, NULL, &seqs, &options, scores, err);
    qc_progress_end();
    bool json = qc_args_has(j->args, "json");
    cJSON *doc = rc == QC_OK ? sums_json(lists, scores, json) : NULL;
    if (rc == QC_OK && json)
        rc = qc_print_json(doc, err);
    qc_free(scores);
    return rc;
}

static int evaluate_ids(const eval_job *j, const char *path, qc_err *err)
{
    cJSON *doc;
    id_lists lists = {0};
    if (j->reference.is_open || j->stored || j->recipe.verify.text || qc_args_has(j->args, "save-reference"))
        return qc_args_fail(j->args->program, err,
                            "--ids goes without --reference, --save-reference and --text");
    QC_TRY(qc_json_load(path, MAX_IDS_BYTES, true, &doc, err));
    int rc = read_lists(doc, path, &j->model.model.config, &lists, err);
    cJSON_Delete(doc);
    if (rc == QC_OK)
        rc = score_lists(j, &lists, err);
    qc_free(lists.ids);
    qc_free(lists.lengths);
    return rc;
}

/* ---- the program ---- */

static int run(eval_job *j, qc_err *err)
{
    const char *reference = qc_args_value(j->args, "reference"), *ids = qc_args_value(j->args, "ids");
    if (!j->recipe.model)
        return qc_args_fail(j->args->program, err, "no MODEL given");
    if (reference && qc_args_has(j->args, "save-reference"))
        return qc_args_fail(j->args->program, err, "--save-reference goes without --reference");
    QC_TRY(qc_measure_check_cap(&j->recipe, "--memory", err));
    QC_TRY(qc_pool_new(j->recipe.run.threads, &j->pool, err));
    QC_TRY(qc_device_open(&j->recipe.run, j->pool, &j->be, err));
    QC_TRY(open_input(j->recipe.model, &j->model, err));
    if (reference && qc_reference_is(reference)) {
        QC_TRY(qc_reference_open(reference, &j->stored, err));
        QC_TRY(qc_stored_check_artifact(j->stored, j->model.src, err));
    } else if (reference)
        QC_TRY(open_input(reference, &j->reference, err));
    if (qc_args_has(j->args, "task")) {
        if (ids || j->stored || j->recipe.verify.text || qc_args_has(j->args, "save-reference"))
            return qc_args_fail(j->args->program, err,
                                "--task goes without --ids, --text, --save-reference and a stored reference");
        return qc_qeval_task(j->args, &j->recipe, j->be, j->reference.is_open ? &j->reference.model : NULL,
                             &j->model.model, err);
    }
    return ids ? evaluate_ids(j, ids, err) : evaluate_text(j, err);
}

static int evaluate(const qc_args *args, qc_err *err)
{
    eval_job j = {.args = args};
    QC_TRY(qc_recipe_load(args, &j.recipe, err));
    int rc = run(&j, err);
    close_input(&j.model);
    close_input(&j.reference);
    qc_reference_close(j.stored);
    qc_backend_close(j.be);
    qc_pool_free(j.pool);
    qc_recipe_clear(&j.recipe);
    return rc;
}

int main(int argc, char **argv)
{
    return qc_main(&qc_program_qeval, argc, argv, evaluate);
}
