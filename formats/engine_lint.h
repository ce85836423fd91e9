/* What an engine would say to an artifact, known before it is written or from the file alone. The rules are
 * those of the engines' loaders (docs/engines.md names the versions). */
#ifndef QC_ENGINE_LINT_H
#define QC_ENGINE_LINT_H

#include "qc_result.h"
#include "qc_source.h"

/* Names of the engines, "vllm|transformers|llama.cpp|onnxruntime". */
extern const char qc_engine_names[];

/* An artifact as far as the rules look at it. */
typedef struct qc_lint_input {
    const char *path;
    const char *format;                   /* "gptq", "qpk", ... */
    const qc_tensor_info *const *tensors; /* [n_tensors] */
    int64_t n_tensors;
    const qc_source *values; /* to look at values too; NULL: they are not there yet */
} qc_lint_input;

/* Findings about one engine: of level QC_EVENT_FALLBACK what it refuses or would compute wrongly, of level
 * QC_EVENT_NOTE what is worth knowing (tensor parallel, kernels). QC_E_USAGE: no such engine. */
int qc_engine_lint(const char *engine, const qc_lint_input *input, qc_event_list *findings,
                   qc_err *err) QC_WARN_UNUSED;

#endif
