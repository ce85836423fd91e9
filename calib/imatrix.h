/* Importance matrices of llama.cpp: per matrix the sums of x^2 of its inputs over the tokens of a text, in a
 * GGUF file (general.type "imatrix", tensors NAME.in_sum2 and NAME.counts as llama-imatrix writes them since
 * July 2025; those of a layer's experts are one tensor with a row for each). The older .dat files are not
 * read. */
#ifndef QC_IMATRIX_H
#define QC_IMATRIX_H

#include "stats_file.h"

/* Write the diagonals of a statistics file, ready for llama-quantize --imatrix. */
int qc_imatrix_write(const qc_stats_file *file, qc_backend *be, const char *path, bool force,
                     qc_err *err) QC_WARN_UNUSED;

typedef struct qc_imatrix qc_imatrix;

/* Read what belongs to a model's matrices. QC_E_INPUT: no such file, damaged, of other widths, nothing of
 * this model; QC_E_UNSUPPORTED: the older format. Close with qc_imatrix_close. */
int qc_imatrix_open(const char *path, const qc_model *model, qc_imatrix **ret, qc_err *err) QC_WARN_UNUSED;
/* NULL is fine. */
void qc_imatrix_close(qc_imatrix *im);

/* Column weights of a matrix (qc_stats_weights_of_sums; expert: 0 unless it is one's), as wide as its input;
 * NULL where the file has no tokens for it. Owned by im. */
const float *qc_imatrix_weights(const qc_imatrix *im, int layer, qc_slot slot, int64_t expert);

/* Tokens that these are the means over; 0 where there are none. */
int64_t qc_imatrix_tokens(const qc_imatrix *im, int layer, qc_slot slot, int64_t expert);

/* "blk.LAYER.attn_q.weight" and its like for the matrices of a layer, "blk.LAYER.ffn_up_exps.weight" for
 * those of all its experts: the names of llama.cpp. */
void qc_imatrix_name(int layer, qc_slot slot, char ret[64]);

#endif
