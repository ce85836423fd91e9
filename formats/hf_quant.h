/* Checkpoint folders in the formats of engines (GPTQ v1 and v2, AWQ GEMM, compressed-tensors) as sources of
 * logical tensors: the parts that a matrix is stored as become one tensor MODULE.weight on its grid. */
#ifndef QC_HF_QUANT_H
#define QC_HF_QUANT_H

#include "qc_source.h"

#include <cjson/cJSON.h>

/* Source over the tensors of `inner`, which it takes over, also on failure; `config` is the
 * quantization_config, which lives as long as `inner`. A matrix whose columns are not in the order of their
 * groups (GPTQ with desc_act) is given as its values. QC_E_INPUT: parts missing, of a wrong type or shape, or
 * that contradict config.json; QC_E_UNSUPPORTED: a variant that is not read. */
int qc_hf_quant_open(qc_source *inner, const cJSON *config, qc_source **ret, qc_err *err) QC_WARN_UNUSED;

#endif
