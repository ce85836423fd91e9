/* How far a stored tensor is from the one that it was made of, from the bytes of both. */
#ifndef QC_SOURCE_ERROR_H
#define QC_SOURCE_ERROR_H

#include "qc_source.h"

/* Sum of (a - b)^2 and of a^2 over the tensor that both sources have under this name; *ret_found false: one
 * lacks it. QC_E_INPUT: the shapes differ. Rows are read in blocks and given back. */
int qc_source_error(const qc_source *a, const qc_source *b, const char *name, bool *ret_found,
                    double *ret_sq_error, double *ret_sq_weight, qc_err *err) QC_WARN_UNUSED;

#endif
