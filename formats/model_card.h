/* README.md of an output folder: what it is, where it comes from, how it was made. */
#ifndef QC_MODEL_CARD_H
#define QC_MODEL_CARD_H

#include "engine_format.h"
#include "qc_buf.h"

/* Append the text. `name` is the folder's, `manifest` that of the conversion (docs/report.md). */
int qc_model_card(const char *name, const qc_engine_format *format, const qc_schemes *schemes,
                  const cJSON *manifest, qc_buf *ret, qc_err *err) QC_WARN_UNUSED;

#endif
