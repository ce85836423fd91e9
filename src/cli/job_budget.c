#include "job_budget.h"

#include "job_calib.h"
#include "job_file.h"
#include "measure.h"
#include "progress.h"
#include "qc_alloc.h"
#include "qc_json.h"
#include "qc_math.h"
#include "qc_time.h"
#include "sensitivity.h"

#include <math.h>
#include <string.h>

/* Tokens that damage is measured with, and tokens for the second moments by which matrices are rounded for
 * it. More of either change the choice little (docs/methods/budget.md). */
enum { MEASURED_WINDOWS = 4, MEASURED_LENGTH = 128, STATISTICS_TOKENS = 8192 };

/* The manifest inside the file names the choice, so its size moves with it; a few corrections are enough,
 * since the file grows in pages. */
enum { MAX_CORRECTIONS = 8 };

bool qc_job_has_budget(const qc_recipe_quantize *quantize)
{
    return quantize->budget.bits_average > 0 || quantize->budget.size_bytes > 0;
}

/* ---- measuring ---- */

/* Part of the calibration text, copied. */
typedef struct part {
    int32_t *ids;
    qc_sample_text text;
} part;

/* Copy the first `length` tokens of n windows of the corpus. */
static int take(const job *j, const int64_t *windows, int64_t n, int64_t length, part *ret, qc_err *err)
{
    int32_t *ids = qc_alloc((size_t)(n * length), sizeof *ids);
    if (!ids)
        return qc_fail_nomem(err, "sample", (unsigned long long)(n * length) * sizeof *ids);
    for (int64_t i = 0; i < n; i++)
        memcpy(ids + i * length, j->corpus.ids + windows[i] * j->corpus.length, (size_t)length * sizeof *ids);
    *ret = (part){ids, {ids, n, length}};
    return QC_OK;
}

/* n of the windows in list[n_list], evenly spread, to the front of `ret`. */
static void spread(const int64_t *list, int64_t n_list, int64_t n, int64_t *ret)
{
    for (int64_t i = 0; i < n; i++)
        ret[i] = list[(2 * i + 1) * n_list / (2 * n)];
}

/* Windows to measure with, and others (as far as there are any) for the statistics: what rounding has fitted
 * to would flatter it. */
static int divide_text(const job *j, part *statistics, part *measured, qc_err *err)
{
    int64_t n_all = j->corpus.n_windows, length = j->corpus.length, n_rest = 0;
    int64_t n_measured = qc_max_i64(1, qc_min_i64(MEASURED_WINDOWS, n_all / 2));
    int64_t *list = qc_alloc((size_t)n_all * 3, sizeof *list), *rest = list + n_all, *chosen = rest + n_all;
    if (!list)
        return qc_fail_nomem(err, "sample", (unsigned long long)n_all * 3 * sizeof *list);
    for (int64_t i = 0; i < n_all; i++)
        list[i] = i;
    spread(list, n_all, n_measured, chosen);
    for (int64_t i = 0, k = 0; i < n_all; i++) {
        bool is_measured = k < n_measured && chosen[k] == i;
        k += is_measured;
        if (!is_measured)
            rest[n_rest++] = i;
    }
    int rc = take(j, chosen, n_measured, qc_min_i64(MEASURED_LENGTH, length), measured, err);
    int64_t n_statistics = qc_min_i64(n_rest ? n_rest : n_all, qc_max_i64(1, STATISTICS_TOKENS / length));
    spread(n_rest ? rest : list, n_rest ? n_rest : n_all, n_statistics, chosen);
    if (rc == QC_OK)
        rc = take(j, chosen, n_statistics, length, statistics, err);
    qc_free(list);
    return rc;
}

static int measure(job *j, output *o, qc_err *err)
{
    uint64_t cap = j->recipe->run.memory_bytes, full, least;
    qc_gptq_options gptq = qc_job_gptq_options(o->asked);
    gptq.refit = false; /* polishing costs more than the solve and lowers all damages by about the same */
    gptq.sweeps = 0;
    qc_sensitivity_options options = {.gptq = qc_job_rounds_by_gptq(o->asked) ? &gptq : NULL,
                                      .memory_bytes = cap ? cap - qc_program_bytes(j->recipe) : 0,
                                      .scratch_folder = j->recipe->run.scratch,
                                      .progress = qc_progress_callback};
    part statistics = {NULL, {NULL, 0, 0}}, measured = statistics;
    double start = qc_now_seconds();
    int rc = divide_text(j, &statistics, &measured, err);
    if (rc == QC_OK) {
        qc_sensitivity_plan_bytes(&j->model.config, j->be, o->assignment.n_units, &statistics.text,
                                  &measured.text, &full, &least);
        j->budget_plan_bytes = options.memory_bytes && full > options.memory_bytes ? least : full;
        o->measured_tokens = measured.text.n_windows * measured.text.length;
        o->statistics_tokens = statistics.text.n_windows * statistics.text.length;
        qc_progress_begin("measure", 1);
        rc = qc_sensitivity_measure(&j->model, j->be, &statistics.text, &measured.text, &o->assignment,
                                    &options, err);
        qc_progress_end();
    }
    j->times.budget += qc_now_seconds() - start;
    qc_free(statistics.ids);
    qc_free(measured.ids);
    return rc;
}

/* ---- choosing ---- */

/* Put the choice that o->assignment holds into quantize and plan. */
static int adopt(job *j, output *o, qc_err *err)
{
    qc_policy policy;
    qc_recipe_quantize q = *o->asked;
    qc_recipe_policy(o->asked, o->scale, &policy);
    QC_TRY(qc_assignment_overrides(&o->assignment, &j->model, &policy, &q.overrides, &q.n_overrides, err));
    q.budget = (qc_recipe_budget){0};
    qc_overrides_free(o->chosen.overrides, o->chosen.n_overrides);
    o->chosen = q;
    o->quantize = &o->chosen;
    qc_convert_plan_clear(&o->plan);
    qc_recipe_policy(&o->chosen, o->scale, &policy);
    return qc_job_make_plan(j, o, &policy, &j->repeated_events, err);
}

static int count_file(job *j, const output *o, uint64_t *ret, qc_err *err)
{
    qc_writer *writer;
    QC_TRY(qc_job_begin_output(j, o, true, &writer, ret, err));
    qc_writer_discard(writer);
    return QC_OK;
}

static int choose(job *j, output *o, uint64_t tensor_bytes, qc_err *err)
{
    QC_TRY(qc_assignment_solve(&o->assignment, tensor_bytes, err));
    QC_TRY(adopt(j, o, err));
    return count_file(j, o, &o->budget_bytes, err);
}

/* The range of the key that was asked for, from the bytes of tensors at both ends. */
static int refuse(job *j, output *o, qc_err *err)
{
    const qc_recipe_budget *b = &o->asked->budget;
    uint64_t least, most, rest;
    qc_assignment_range(&o->assignment, &least, &most);
    if (!b->size_bytes)
        return qc_fail(err, QC_E_USAGE,
                       "quantize.budget.bits_average %.6g can not be reached, %.3f to %.3f can",
                       b->bits_average, ceil(qc_assignment_bits(&o->assignment, least) * 1000 - 1e-6) / 1000,
                       floor(qc_assignment_bits(&o->assignment, most) * 1000 + 1e-6) / 1000);
    QC_TRY(choose(j, o, most, err));
    rest = o->budget_bytes - qc_assignment_bytes(&o->assignment);
    return qc_fail(err, QC_E_USAGE,
                   "quantize.budget.size: %.2f MB can not be reached, about %.2f MB to %.2f MB can",
                   (double)b->size_bytes / 1e6, (double)(least + rest) / 1e6, (double)(most + rest) / 1e6);
}

static int choose_bits(job *j, output *o, qc_err *err)
{
    uint64_t least, most, budget = qc_assignment_bytes_at(&o->assignment, o->asked->budget.bits_average);
    qc_assignment_range(&o->assignment, &least, &most);
    if (budget < least || qc_assignment_bits(&o->assignment, most) < o->asked->budget.bits_average)
        return refuse(j, o, err);
    return choose(j, o, budget, err);
}

/* The largest budget of tensor bytes with which the whole file stays within its size. */
static int choose_size(job *j, output *o, qc_err *err)
{
    uint64_t least, most, size = o->asked->budget.size_bytes, best = 0;
    qc_assignment_range(&o->assignment, &least, &most);
    uint64_t budget = size < most ? size : most;
    for (int i = 0; i < MAX_CORRECTIONS && budget >= least; i++) {
        QC_TRY(choose(j, o, budget, err));
        if (o->budget_bytes > size) {
            uint64_t over = o->budget_bytes - size;
            if (best)
                break;
            budget -= over < budget ? over : budget;
            continue;
        }
        uint64_t used = qc_assignment_bytes(&o->assignment), rest = size - o->budget_bytes;
        if (rest > 0 && used == most)
            return refuse(j, o, err);
        if (used + rest <= budget)
            return QC_OK; /* nothing is left that this choice could not have had */
        best = budget;
        budget = used + rest;
    }
    return best ? choose(j, o, best, err) : refuse(j, o, err);
}

static int plan_lead(job *j, output *o, qc_err *err)
{
    qc_policy policy;
    qc_recipe_policy(o->asked, o->scale, &policy);
    QC_TRY(qc_assignment_make(&j->model, &policy, &o->plan, &o->assignment, err));
    QC_TRY(measure(j, o, err));
    return o->asked->budget.size_bytes ? choose_size(j, o, err) : choose_bits(j, o, err);
}

int qc_job_plan_budget(job *j, output *o, qc_err *err)
{
    const output *lead = &j->outputs[o->lead];
    if (!qc_job_has_budget(o->asked))
        return QC_OK;
    if (o == lead)
        return plan_lead(j, o, err);
    qc_policy policy;
    o->quantize = lead->quantize;
    qc_convert_plan_clear(&o->plan);
    qc_recipe_policy(o->quantize, o->scale, &policy);
    return qc_job_make_plan(j, o, &policy, o->events, err);
}

void qc_job_close_budget(output *o)
{
    qc_overrides_free(o->chosen.overrides, o->chosen.n_overrides);
    qc_assignment_clear(&o->assignment);
}

/* ---- telling ---- */

static const char *part_name(const qc_unit *unit)
{
    return unit->layer >= 0 ? qc_stage_name(unit->stage) : unit->embedding ? "embedding" : "head";
}

static void unit_json(cJSON *out, const job *j, const qc_unit *unit)
{
    const qc_grid_choice *c = &unit->choices[unit->chosen];
    if (unit->layer >= 0)
        cJSON_AddNumberToObject(out, "layer", unit->layer);
    else
        cJSON_AddNullToObject(out, "layer");
    cJSON_AddStringToObject(out, "part", part_name(unit));
    cJSON *names = cJSON_AddArrayToObject(out, "tensors");
    for (int i = 0; i < unit->n_tensors; i++)
        qc_json_add_item(names, cJSON_CreateString(j->src->info(j->src, unit->tensors[i])->name));
    cJSON_AddNumberToObject(out, "bits", c->bits);
    cJSON_AddNumberToObject(out, "group", c->bits == 16 ? 0 : (double)c->group);
    cJSON_AddNumberToObject(out, "bytes", (double)c->bytes);
    cJSON_AddNumberToObject(out, "kld", c->damage);
    cJSON_AddNumberToObject(out, "measured_bits", unit->choices[unit->reference].bits);
    cJSON_AddNumberToObject(out, "measured_kld", unit->choices[unit->reference].damage);
}

cJSON *qc_job_budget_json(const job *j, const output *o)
{
    const output *lead = &j->outputs[o->lead];
    const qc_assignment *a = &lead->assignment;
    const qc_recipe_budget *asked = &o->asked->budget;
    cJSON *out = cJSON_CreateObject(), *ask = cJSON_AddObjectToObject(out, "asked");
    if (asked->size_bytes)
        cJSON_AddNumberToObject(ask, "size", (double)asked->size_bytes);
    else
        cJSON_AddNumberToObject(ask, "bits_average", asked->bits_average);
    cJSON_AddNumberToObject(out, "bits_average", qc_assignment_bits(a, qc_assignment_bytes(a)));
    cJSON_AddNumberToObject(out, "weights", a->n_weights);
    cJSON_AddNumberToObject(out, "size", (double)lead->budget_bytes);
    cJSON_AddNumberToObject(out, "expected_kld", qc_assignment_damage(a));
    cJSON_AddNumberToObject(out, "least_kld", a->bound);
    cJSON_AddStringToObject(out, "rounded_by", qc_job_rounds_by_gptq(o->asked) ? "gptq" : "rtn");
    cJSON_AddNumberToObject(out, "measured_tokens", (double)lead->measured_tokens);
    cJSON_AddNumberToObject(out, "statistics_tokens", (double)lead->statistics_tokens);
    cJSON *units = cJSON_AddArrayToObject(out, "units");
    for (int u = 0; u < a->n_units; u++)
        unit_json(qc_json_add_item(units, cJSON_CreateObject()), j, &a->units[u]);
    return out;
}

static int override_text(const qc_override *v, qc_buf *ret, qc_err *err)
{
    QC_TRY(qc_buf_printf(ret, err, "    - {match: '"));
    for (const char *p = v->match; *p; p++)
        QC_TRY(qc_buf_printf(ret, err, *p == '\'' ? "''" : "%c", *p));
    QC_TRY(qc_buf_printf(ret, err, "'"));
    if (v->bits)
        QC_TRY(qc_buf_printf(ret, err, ", bits: %d", v->bits));
    if (v->group == -1)
        QC_TRY(qc_buf_printf(ret, err, ", group: channel"));
    else if (v->group)
        QC_TRY(qc_buf_printf(ret, err, ", group: %lld", (long long)v->group));
    if (v->symmetric >= 0)
        QC_TRY(qc_buf_printf(ret, err, ", symmetric: %s", v->symmetric ? "true" : "false"));
    return qc_buf_printf(ret, err, "}\n");
}

int qc_job_budget_text(const job *j, const output *o, bool recipe, qc_buf *ret, qc_err *err)
{
    const output *lead = &j->outputs[o->lead];
    const qc_assignment *a = &lead->assignment;
    const qc_recipe_budget *asked = &o->asked->budget;
    if (asked->size_bytes)
        QC_TRY(qc_buf_printf(ret, err, "%.3f MB asked, ", (double)asked->size_bytes / 1e6));
    else
        QC_TRY(qc_buf_printf(ret, err, "%.6g bits per weight asked, ", asked->bits_average));
    QC_TRY(qc_buf_printf(ret, err, "%.3f bits per weight and %.3f MB chosen, expected KL divergence %.3g\n",
                         qc_assignment_bits(a, qc_assignment_bytes(a)), (double)lead->budget_bytes / 1e6,
                         qc_assignment_damage(a)));
    if (!recipe)
        return QC_OK;
    QC_TRY(qc_buf_printf(ret, err, "quantize:\n  overrides:\n"));
    for (int i = 0; i < o->quantize->n_overrides; i++)
        QC_TRY(override_text(&o->quantize->overrides[i], ret, err));
    return QC_OK;
}
