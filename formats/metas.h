/* The normalised configuration as a writer was handed it (qc_meta of writer.h), collected. */
#ifndef QC_METAS_H
#define QC_METAS_H

#include "writer.h"

/* Zero-initialise. Names and values are owned. */
typedef struct qc_metas {
    qc_meta *list;
    int n, cap;
} qc_metas;

/* A copy of *meta. QC_E_RESOURCE. */
int qc_metas_add(qc_metas *metas, const qc_meta *meta, qc_err *err) QC_WARN_UNUSED;
void qc_metas_clear(qc_metas *metas);

/* NULL if there is no such key. */
const qc_meta *qc_metas_find(const qc_metas *metas, const char *key);
/* Value of a key; `absent`, or "", if there is none of that type. */
int64_t qc_metas_int(const qc_metas *metas, const char *key, int64_t absent);
double qc_metas_number(const qc_metas *metas, const char *key, double absent);
const char *qc_metas_string(const qc_metas *metas, const char *key);

/* What the model computes beyond the plain decoder that llama, mistral, qwen2 and qwen3 share (multipliers,
 * soft caps, another activation, layers that rotate unlike the others): static text, NULL if nothing. Norms
 * of queries and keys, biases and the attention scale are not looked at. */
const char *qc_metas_beyond_plain(const qc_metas *metas);

#endif
