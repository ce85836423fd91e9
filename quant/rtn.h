/* Round-to-nearest quantization of whole matrices, and the rule which tensor gets which grid. */
#ifndef QC_RTN_H
#define QC_RTN_H

#include "backend.h"
#include "qc_quant_spec.h"

/* Put rows [n_rows, n_cols] (host, float32) on the grid of the spec. Refuses NaN and infinities (QC_E_INPUT
 * names row and column). Fills *rows (arrays sized by the caller) and adds to *stats. */
int qc_rtn_rows(qc_backend *be, const float *w, int64_t n_rows, int64_t n_cols, const qc_quant_spec *spec,
                const float *col_weight, qc_code_rows *rows, qc_quant_stats *stats,
                qc_err *err) QC_WARN_UNUSED;

#endif
