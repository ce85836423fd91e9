/* The quantization_config of compressed-tensors. */
#ifndef QC_HF_QUANT_CONFIG_H
#define QC_HF_QUANT_CONFIG_H

#include "qc_err.h"

#include <cjson/cJSON.h>

/* QC_E_UNSUPPORTED: a format, sparsity, transform or kv cache scheme that is not read. */
int qc_ct_config_check(const char *path, const cJSON *config, qc_err *err) QC_WARN_UNUSED;

/* Bits of the activations of a module (the first module_bytes of name), quantized per token while running; 0
 * if they are not. QC_E_UNSUPPORTED: another scheme. */
int qc_ct_config_acts(const char *path, const cJSON *config, const char *name, int module_bytes,
                      int *ret_bits, qc_err *err) QC_WARN_UNUSED;

#endif
