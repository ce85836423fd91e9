/* Open any artifact we can read, by what it is: a Hugging Face folder, a packed file, a GGUF file, an
 * ONNX folder. */
#ifndef QC_OPEN_H
#define QC_OPEN_H

#include "qc_source.h"

/* *ret is closed with qc_source_close. QC_E_INPUT: missing or broken; QC_E_UNSUPPORTED: a kind we do not read
 * (named where it is recognised). */
int qc_source_open(const char *path, qc_source **ret, qc_err *err) QC_WARN_UNUSED;

#endif
