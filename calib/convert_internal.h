/* What planning a conversion and carrying it out share. */
#ifndef QC_CONVERT_INTERNAL_H
#define QC_CONVERT_INTERNAL_H

#include "convert.h"

/* Rows of a block in work. */
int64_t qc_convert_block_rows(int64_t n_cols);

/* Description of an item as it is stored: dtype, grid and activations of the plan. */
void qc_convert_stored_info(const qc_model *model, const qc_convert_item *item, qc_tensor_info *ret);

/* What the tensor is, for the writer's format. */
qc_tensor_use qc_convert_use(const qc_model *model, int64_t tensor);

/* Type in which scales folded into a vector are stored; *info is changed to it. */
int qc_convert_folded_info(const qc_convert_plan *plan, const qc_model *model, const qc_convert_item *item,
                           qc_tensor_info *info, qc_err *err) QC_WARN_UNUSED;

#endif
