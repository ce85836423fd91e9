#include "qeval_task.h"

#include "labels.h"
#include "main.h"
#include "progress.h"
#include "qc_alloc.h"
#include "report.h"
#include "schema.h"

#include <stdio.h>
#include <string.h>

static int items_wanted(const qc_args *args, int64_t *ret, qc_err *err)
{
    const char *text = qc_args_value(args, "items");
    *ret = 0;
    if (!text)
        return QC_OK;
    if (qc_parse_int(text, ret, err) < 0 || *ret < 1)
        return qc_args_fail(args->program, err, "--items %s: a whole number from 1 was expected", text);
    return QC_OK;
}

/* Both models must make the same ids of the prompts. */
static int check_tokenizers(const qc_model *reference, const qc_tokenizer *tok, const qc_task *task,
                            qc_err *err)
{
    qc_tokenizer *other;
    qc_encode_options options = {.add_special = true};
    if (!reference)
        return QC_OK;
    QC_TRY(qc_tokenizer_from_source(reference->src, &other, err));
    int rc = QC_OK;
    for (int64_t i = 0; i < task->n_items && rc == QC_OK; i++) {
        int32_t *a = NULL, *b = NULL;
        int64_t n = 0, m = 0;
        const char *prompt = task->items[i].prompt;
        rc = qc_tokenizer_encode(tok, prompt, strlen(prompt), &options, &a, &n, err);
        if (rc == QC_OK)
            rc = qc_tokenizer_encode(other, prompt, strlen(prompt), &options, &b, &m, err);
        if (rc == QC_OK && (n != m || memcmp(a, b, (size_t)n * sizeof *a) != 0))
            rc = qc_fail(err, QC_E_INPUT,
                         "%s turns the prompt of row %lld into other token ids than the model",
                         reference->src->path, (long long)task->items[i].row);
        qc_free(a);
        qc_free(b);
    }
    qc_tokenizer_free(other);
    return rc;
}

static int print_result(const qc_args *args, const qc_model *reference, const qc_model *model,
                        const qc_label_result *r, qc_err *err)
{
    qc_buf text = {0};
    if (qc_args_has(args, "json"))
        return qc_print_json(qc_report_labels(r), err);
    int rc = qc_report_labels_text(r, &text, err);
    if (rc == QC_OK)
        printf("%s%s%s\n%s", model->src->path, reference ? " against " : "",
               reference ? reference->src->path : "", text.data);
    qc_buf_clear(&text);
    return rc;
}

int qc_qeval_task(const qc_args *args, const qc_recipe *recipe, qc_backend *be, const qc_model *reference,
                  const qc_model *model, qc_err *err)
{
    const char *data = qc_args_value(args, "data");
    int64_t n_items;
    qc_task task;
    qc_tokenizer *tok = NULL;
    qc_label_result result = {0};
    qc_label_options options = {.eval = qc_measure_options(recipe),
                                .calibrate = qc_args_has(args, "calibrate")};
    if (!data)
        return qc_args_fail(args->program, err, "--task goes with --data FILE");
    QC_TRY(items_wanted(args, &n_items, err));
    QC_TRY(qc_task_load(qc_args_value(args, "task"), data, n_items, &task, err));
    int rc = options.calibrate && task.n_content_free == 0
                 ? qc_args_fail(args->program, err, "--calibrate: task %s has no content_free", task.name)
                 : qc_tokenizer_from_source(model->src, &tok, err);
    if (rc == QC_OK)
        rc = check_tokenizers(reference, tok, &task, err);
    if (rc == QC_OK) {
        qc_progress_begin("evaluate", 1);
        rc = qc_labels_score(be, tok, reference, model, &task, &options, &result, err);
        qc_progress_end();
    }
    if (rc == QC_OK && !(result.data = qc_strdup(data)))
        rc = qc_fail_nomem(err, "data path", strlen(data));
    if (rc == QC_OK)
        rc = print_result(args, reference, model, &result, err);
    qc_label_result_clear(&result);
    qc_tokenizer_free(tok);
    qc_task_clear(&task);
    return rc;
}
