/* Label tasks in qeval. */
#ifndef QC_CLI_QEVAL_TASK_H
#define QC_CLI_QEVAL_TASK_H

#include "measure.h"

/* Score the task of --task on the rows of --data and print the result. reference may be NULL. */
int qc_qeval_task(const qc_args *args, const qc_recipe *recipe, qc_backend *be, const qc_model *reference,
                  const qc_model *model, qc_err *err) QC_WARN_UNUSED;

#endif
