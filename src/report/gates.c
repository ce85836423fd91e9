#include "gates.h"

#include "qc_buf.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

typedef enum { FROM_EVALUATION, FROM_RUN, FROM_BYTES } gate_place;

/* Names are those of the report. */
static const struct {
    const char *name;
    gate_place place;
    size_t offset; /* of the double in qc_evaluation or qc_measured */
    bool least;    /* the value must be >= the limit */
} table[] = {
    {"ppl", FROM_EVALUATION, offsetof(qc_evaluation, ppl), false},
    {"ppl_ratio", FROM_EVALUATION, offsetof(qc_evaluation, ppl_ratio), false},
    {"delta_nll", FROM_EVALUATION, offsetof(qc_evaluation, delta_nll), false},
    {"kld_mean", FROM_EVALUATION, offsetof(qc_evaluation, kld_mean), false},
    {"kld_p99", FROM_EVALUATION, offsetof(qc_evaluation, kld_p99), false},
    {"kld_max", FROM_EVALUATION, offsetof(qc_evaluation, kld_max), false},
    {"top1", FROM_EVALUATION, offsetof(qc_evaluation, top1), true},
    {"account_error", FROM_BYTES, offsetof(qc_measured, account_error), false},
    {"fallbacks", FROM_RUN, offsetof(qc_measured, fallbacks), false},
    {"size_bytes", FROM_RUN, offsetof(qc_measured, size_bytes), false},
    {"seconds", FROM_RUN, offsetof(qc_measured, seconds), false},
    {"peak_rss_bytes", FROM_RUN, offsetof(qc_measured, peak_rss_bytes), false},
};
#define N_GATES (sizeof table / sizeof table[0])

static size_t find(const char *name)
{
    size_t i = 0;
    while (i < N_GATES && strcmp(table[i].name, name) != 0)
        i++;
    return i;
}

int qc_gate_check(const char *name, double limit, qc_err *err)
{
    if (find(name) == N_GATES) {
        qc_buf names = {0};
        int rc = QC_OK;
        for (size_t i = 0; i < N_GATES && rc == QC_OK; i++)
            rc = qc_buf_printf(&names, err, "%s%s", i ? ", " : "", table[i].name);
        if (rc == QC_OK)
            rc = qc_fail(err, QC_E_USAGE, "no gate is called \"%s\" (%s)", name, names.data);
        qc_buf_clear(&names);
        return rc;
    }
    if (!isfinite(limit))
        return qc_fail(err, QC_E_USAGE, "gate %s: the limit is not a finite number", name);
    if (strcmp(name, "top1") == 0 && (limit < 0 || limit > 1))
        return qc_fail(err, QC_E_USAGE, "gate top1: the limit %g is no fraction from 0 to 1 (0.9 is 90 %%)",
                       limit);
    return QC_OK;
}

bool qc_gate_needs_verification(const char *name)
{
    size_t i = find(name);
    return i < N_GATES && table[i].place != FROM_RUN;
}

qc_gate qc_gate_judge(const char *name, double limit, const qc_measured *measured)
{
    size_t i = find(name);
    const char *base =
        table[i].place != FROM_EVALUATION ? (const char *)measured : (const char *)measured->evaluation;
    qc_gate gate = {.name = table[i].name, .limit = limit, .value = NAN};
    if (base)
        memcpy(&gate.value, base + table[i].offset, sizeof gate.value);
    gate.pass = table[i].least ? gate.value >= limit : gate.value <= limit; /* false for NaN either way */
    return gate;
}
