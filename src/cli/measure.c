#include "measure.h"

#include "datadir.h"
#include "main.h"
#include "progress.h"
#include "qc_alloc.h"
#include "qc_math.h"

#include <string.h>

qc_eval_options qc_measure_options(const qc_recipe *recipe)
{
    uint64_t cap = recipe->run.memory_bytes;
    return (qc_eval_options){.memory_bytes = cap ? cap - QC_PROGRAM_BYTES : 0,
                             .scratch_folder = recipe->run.scratch,
                             .progress = qc_progress_callback};
}

int qc_measure_check_cap(const qc_recipe *recipe, const char *name, qc_err *err)
{
    if (recipe->run.memory_bytes == 0 || recipe->run.memory_bytes > QC_PROGRAM_BYTES)
        return QC_OK;
    return qc_fail(err, QC_E_RESOURCE, "%s: the program alone needs %llu MB", name,
                   (unsigned long long)(QC_PROGRAM_BYTES / 1000000 + 1));
}

int qc_measure_text(const qc_recipe *recipe, char **ret, qc_err *err)
{
    const char *text = recipe->verify.text;
    if (!text)
        return qc_demo_text(ret, err);
    *ret = qc_strdup(text);
    return *ret ? QC_OK : qc_fail_nomem(err, "text path", strlen(text));
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
    if (ret->length <= max_positions)
        return QC_OK;
    return qc_fail(err, QC_E_USAGE, "verify.length %lld: the model has at most %lld positions",
                   (long long)ret->length, (long long)max_positions);
}
