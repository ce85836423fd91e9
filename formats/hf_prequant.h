/* Recognise checkpoints that are quantized already: by a method that we read, or refused with the method
 * named, because their integers read as numbers would be silently wrong. */
#ifndef QC_HF_PREQUANT_H
#define QC_HF_PREQUANT_H

#include "qc_tensor.h"

#include <cjson/cJSON.h>

/* Look at config.json of the folder (absent is fine). *ret = its description of a quantization that is read
 * (hf_quant.h), owned; NULL if it is not quantized. QC_E_UNSUPPORTED names another method. */
int qc_hf_prequant_config(const char *folder, cJSON **ret, qc_err *err) QC_WARN_UNUSED;

/* Look at name, dtype and shape of one tensor of a checkpoint without such a description. `folder` is for
 * messages. */
int qc_hf_prequant_tensor(const char *folder, const qc_tensor_info *info, qc_err *err) QC_WARN_UNUSED;

#endif
