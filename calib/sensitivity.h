/* What the grids of a model's units do to it, measured: each unit is rounded alone, at its reference choice,
 * and the KL divergence from the 16-bit model is taken over a short text; other choices are scaled by their
 * rounding error (docs/methods/budget.md). */
#ifndef QC_SENSITIVITY_H
#define QC_SENSITIVITY_H

#include "assign.h"
#include "gptq.h"

/* Sequences of equal length, each from position 0. */
typedef struct qc_sample_text {
    const int32_t *ids; /* [n_windows * length] */
    int64_t n_windows, length;
} qc_sample_text;

typedef struct qc_sensitivity_options {
    const qc_gptq_options *gptq; /* how matrices are rounded; NULL: to nearest */
    uint64_t memory_bytes;       /* cap for the whole process, 0 = none: streams spill to scratch */
    const char *scratch_folder;
    void (*progress)(void *ctx, double fraction);
    void *progress_ctx;
} qc_sensitivity_options;

/* Fill the damages of all choices: divergence on the text `measured`, rounding by second moments of the
 * inputs on the text `statistics`. QC_E_INPUT: a value that is not finite; QC_E_RESOURCE: more than the cap
 * allows. */
int qc_sensitivity_measure(const qc_model *model, qc_backend *be, const qc_sample_text *statistics,
                           const qc_sample_text *measured, qc_assignment *assignment,
                           const qc_sensitivity_options *options, qc_err *err) QC_WARN_UNUSED;

/* Bytes of memory with all streams in memory, and at least. */
void qc_sensitivity_plan_bytes(const qc_model_config *config, const qc_backend *be, int64_t n_units,
                               const qc_sample_text *statistics, const qc_sample_text *measured,
                               uint64_t *ret_full, uint64_t *ret_least);

#endif
