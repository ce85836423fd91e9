/* Label tasks scored: each item's choices by their log-likelihood behind the prompt. */
#ifndef QC_EVAL_LABELS_H
#define QC_EVAL_LABELS_H

#include "eval.h"
#include "task.h"

typedef struct qc_label_options {
    qc_eval_options eval; /* memory, scratch folder, progress */
    bool calibrate;       /* also with contextual calibration, where the task has content-free texts */
} qc_label_options;

/* Score all items. reference NULL: the model alone. Prompts are tokenized with the special tokens in front
 * that the tokenizer adds; a choice is what it adds behind the prompt's ids. Texts that all prompts begin
 * with are computed once per pack of items; no padding is. QC_E_INPUT: an item longer than the model allows,
 * a choice without tokens, values that are not finite. *ret: clear with qc_label_result_clear. */
int qc_labels_score(qc_backend *be, const qc_tokenizer *tok, const qc_model *reference, const qc_model *model,
                    const qc_task *task, const qc_label_options *options, qc_label_result *ret,
                    qc_err *err) QC_WARN_UNUSED;

#endif
