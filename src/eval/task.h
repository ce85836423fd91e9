/* Label tasks: items of a data file put into a prompt, each with choices of which one is right. */
#ifndef QC_EVAL_TASK_H
#define QC_EVAL_TASK_H

#include "qc_err.h"

#include <stdbool.h>
#include <stdint.h>

/* How a choice's summed log-likelihood is divided before choices are compared. */
typedef enum { QC_NORMALIZE_NONE = 0, QC_NORMALIZE_TOKENS, QC_NORMALIZE_BYTES } qc_normalize;

/* One item: everything owned by its list. */
typedef struct qc_task_item {
    char *prompt;
    char **choices; /* [n_choices] */
    int n_choices;
    int label;   /* of the right choice */
    int64_t row; /* of the data file, from 1 */
} qc_task_item;

typedef struct qc_task {
    char *name;
    qc_normalize normalize;
    bool fixed; /* all items have the same choices */
    qc_task_item *items;
    int64_t n_items;
    int64_t n_rows;             /* of the data file */
    qc_task_item *content_free; /* the prompt without content, for contextual calibration; label is 0 */
    int n_content_free;
    char data_sha256[65];
} qc_task;

/* Read a task ("ag_news", or a JSON file: docs/tasks.md) and its items from a CSV or JSONL file (by extension
 * .jsonl). n_items > 0: as many rows, evenly spread. QC_E_INPUT: a broken file, with row or line. Clear with
 * qc_task_clear. */
int qc_task_load(const char *task, const char *data, int64_t n_items, qc_task *ret,
                 qc_err *err) QC_WARN_UNUSED;
void qc_task_clear(qc_task *task);

#endif
