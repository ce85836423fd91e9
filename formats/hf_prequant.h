/* Recognise checkpoints that are quantized already: they are refused with the method named, because their
 * integers read as numbers would be silently wrong. */
#ifndef QC_HF_PREQUANT_H
#define QC_HF_PREQUANT_H

#include "qc_tensor.h"

/* Look at config.json of the folder (absent is fine). QC_E_UNSUPPORTED names the method. */
int qc_hf_prequant_config(const char *folder, qc_err *err) QC_WARN_UNUSED;

/* Look at name, dtype and shape of one tensor. `folder` is for messages. */
int qc_hf_prequant_tensor(const char *folder, const qc_tensor_info *info, qc_err *err) QC_WARN_UNUSED;

#endif
