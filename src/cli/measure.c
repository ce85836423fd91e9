#include "measure.h"

#include "datadir.h"
#include "device.h"
#include "progress.h"
#include "qc_alloc.h"
#include "qc_math.h"
#include "qc_threads.h"
#include "schema.h"

#include <string.h>

/* Measured: 14 MB with one thread, and up to 5 MB more for the same run where the system maps files in large
 * pieces; the stack of a thread and its part of the heap. */
#define CODE_BYTES   (20ull << 20)
#define THREAD_BYTES (128ull << 10)

uint64_t qc_program_bytes(const qc_recipe *recipe)
{
    int n_threads = recipe->run.threads > 0 ? recipe->run.threads : qc_usable_processors();
    return CODE_BYTES + (uint64_t)n_threads * THREAD_BYTES;
}

qc_eval_options qc_measure_options(const qc_recipe *recipe)
{
    uint64_t cap = recipe->run.memory_bytes;
    return (qc_eval_options){.memory_bytes = cap ? cap - qc_program_bytes(recipe) : 0,
                             .scratch_folder = recipe->run.scratch,
                             .progress = qc_progress_callback};
}

int qc_measure_check_cap(const qc_recipe *recipe, const char *name, qc_err *err)
{
    if (recipe->run.memory_bytes == 0 || recipe->run.memory_bytes > qc_program_bytes(recipe))
        return QC_OK;
    return qc_fail(err, QC_E_RESOURCE, "%s: the program alone needs %llu MB", name,
                   (unsigned long long)(qc_program_bytes(recipe) / 1000000 + 1));
}

int qc_measure_text(const qc_recipe *recipe, char **ret, qc_err *err)
{
    const char *text = recipe->verify.text;
    if (!text)
        return qc_demo_text(ret, err);
    *ret = qc_strdup(text);
    return *ret ? QC_OK : qc_fail_nomem(err, "text path", strlen(text));
}

int qc_measure_decider(const qc_recipe *recipe, int64_t n_windows, qc_decider **ret, qc_err *err)
{
    const qc_recipe_verify *v = &recipe->verify;
    const char **gates = qc_calloc((size_t)v->n_gates + 1, sizeof *gates);
    double *limits = qc_calloc((size_t)v->n_gates + 1, sizeof *limits);
    int n = 0, rc = QC_OK;
    for (int i = 0; gates && limits && i < v->n_gates; i++)
        if (qc_decide_can(v->gates[i].name)) {
            gates[n] = v->gates[i].name;
            limits[n++] = v->gates[i].limit;
        }
    if (!gates || !limits)
        rc = qc_fail_nomem(err, "gates", (unsigned long long)v->n_gates * 16);
    else if (n == 0)
        rc = qc_fail(err, QC_E_USAGE,
                     "verify.decide: there is no gate on ppl_ratio, delta_nll, kld_mean or top1 to decide");
    else
        rc = qc_decider_new(gates, limits, n, n_windows, ret, err);
    qc_free(gates);
    qc_free(limits);
    return rc;
}

void qc_measure_judge(const qc_recipe *recipe, const qc_measured *measured, qc_gate *ret)
{
    const qc_recipe_verify *v = &recipe->verify;
    const qc_evaluation *e = measured->evaluation;
    for (int i = 0; i < v->n_gates; i++) {
        ret[i] = qc_gate_judge(v->gates[i].name, v->gates[i].limit, measured);
        for (int k = 0; e && k < e->n_decisions; k++)
            if (strcmp(e->decisions[k].gate, ret[i].name) == 0)
                ret[i].pass = strcmp(e->decisions[k].outcome, "pass") == 0;
    }
}

/* The model against itself on another backend. */
static int compare_backends(const qc_recipe *recipe, qc_backend *be, int n_threads, qc_compute compute,
                            const qc_model *model, const qc_windows *windows, qc_evaluation *ret, qc_err *err)
{
    qc_pool *pool = NULL;
    qc_eval_options options = qc_measure_options(recipe);
    qc_recipe_run run = recipe->run;
    run.compute = (int)compute;
    int rc = qc_pool_new(n_threads, &pool, err);
    if (rc == QC_OK)
        rc = qc_device_open(&run, pool, &options.model_backend, err);
    if (rc == QC_OK)
        rc = qc_evaluate(be, model, model, windows, &options, ret, err);
    qc_backend_close(options.model_backend);
    qc_pool_free(pool);
    return rc;
}

int qc_measure_noise(const qc_recipe *recipe, const qc_pool *pool, qc_backend *be, const qc_model *model,
                     const qc_windows *windows, qc_noise_floor *ret, qc_err *err)
{
    static const char *const names[] = {[QC_COMPUTE_F32] = "f32", [QC_COMPUTE_BF16] = "bf16"};
    enum { NOISE_WINDOWS = 2 };
    qc_windows first = *windows;
    qc_evaluation e;
    qc_compute own = (qc_compute)recipe->run.compute,
               other = own == QC_COMPUTE_F32 ? QC_COMPUTE_BF16 : QC_COMPUTE_F32;
    int threads = qc_pool_size(pool), other_threads = threads > 1 ? 1 : 2;
    first.n_windows = qc_min_i64(windows->n_windows, NOISE_WINDOWS);
    qc_noise_floor n = {.windows = first.n_windows,
                        .threads = threads,
                        .other_threads = other_threads,
                        .compute = names[own],
                        .other_compute = names[other]};
    QC_TRY(compare_backends(recipe, be, other_threads, own, model, &first, &e, err));
    n.threads_kld_max = e.kld_max;
    qc_evaluation_clear(&e);
    QC_TRY(compare_backends(recipe, be, threads, other, model, &first, &e, err));
    n.kld_mean = e.kld_mean;
    n.kld_p99 = e.kld_p99;
    n.delta_nll = e.delta_nll;
    n.top1 = e.top1;
    qc_evaluation_clear(&e);
    *ret = n;
    return QC_OK;
}

static int read_bos(const char *text, qc_cut_rule *rule, qc_err *err)
{
    qc_err why;
    int64_t id;
    rule->bos = strcmp(text, "none") == 0 ? QC_BOS_NONE : QC_BOS_TOKENIZER;
    if (rule->bos == QC_BOS_NONE || strcmp(text, "tokenizer") == 0)
        return QC_OK;
    if (qc_parse_int(text, &id, &why) < 0 || id < 0 || id > INT32_MAX)
        return qc_fail(err, QC_E_USAGE, "verify.bos: '%.60s' is none of tokenizer, none and an id", text);
    rule->bos = QC_BOS_ID;
    rule->bos_id = (int32_t)id;
    return QC_OK;
}

int qc_measure_rule(const qc_recipe *recipe, int64_t max_positions, qc_cut_rule *ret, qc_err *err)
{
    const qc_recipe_verify *v = &recipe->verify;
    int64_t usual = v->protocol == QC_PROTOCOL_LLAMA ? 512 : 2048;
    *ret = (qc_cut_rule){.protocol = (qc_protocol)v->protocol,
                         .length = v->length ? v->length : qc_min_i64(max_positions, usual),
                         .stride = v->stride,
                         .n_windows = v->windows,
                         .plain_special = v->plain_special};
    QC_TRY(read_bos(v->bos, ret, err));
    if (ret->length <= max_positions)
        return QC_OK;
    return qc_fail(err, QC_E_USAGE, "verify.length %lld: the model has at most %lld positions",
                   (long long)ret->length, (long long)max_positions);
}
