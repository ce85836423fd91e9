/* Statistics that were made earlier, in place of a pass over a text: a statistics file (qcalib make), or an
 * importance matrix of llama.cpp, which knows the diagonal of H alone. */
#ifndef QC_GIVEN_STATS_H
#define QC_GIVEN_STATS_H

#include "hessian.h"
#include "model.h"
#include "stats_file.h"

typedef struct qc_given_stats qc_given_stats;

/* Open either kind (a file that begins with "GGUF" is an importance matrix) and check that it has the shape
 * of the model: QC_E_INPUT names what differs. Close with qc_given_stats_close, NULL is fine. */
int qc_given_stats_open(const char *path, const qc_model *model, qc_given_stats **ret,
                        qc_err *err) QC_WARN_UNUSED;
void qc_given_stats_close(qc_given_stats *given);

/* What a statistics file says of itself; NULL for an importance matrix. */
const qc_stats_info *qc_given_stats_info(const qc_given_stats *given);

/* Are they of this model's weights (digests: SHA-256 of each file of its source)? QC_E_INPUT: no. An
 * importance matrix does not say what it is of. */
int qc_given_stats_check(const qc_given_stats *given, const qc_model *model, const char (*digests)[65],
                         qc_err *err) QC_WARN_UNUSED;

/* H of the inputs of a matrix (slot: one of the place's): fills the zeroed *hs, which owns *ret_h [n, n]
 * (clear it also on failure). All matrices of a stage have the same in a statistics file; an expert without
 * tokens has 0. From an importance matrix it is diagonal, with the rule of qc_stats_weights_of_sums, and 1
 * where hs->n_tokens stays 0: nothing is known of this matrix. */
int qc_given_stats_load(const qc_given_stats *given, qc_backend *be, qc_stats_place place, qc_slot slot,
                        qc_hessian *hs, const float **ret_h, qc_err *err) QC_WARN_UNUSED;

/* Most bytes that a load takes, the result included. */
uint64_t qc_given_stats_bytes(const qc_given_stats *given);

#endif
