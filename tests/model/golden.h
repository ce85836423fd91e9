/* Golden values of a test model: tensors of a safetensors file, numbers of golden.json. */
#ifndef QC_TEST_GOLDEN_H
#define QC_TEST_GOLDEN_H

#include "model.h"
#include "qc_json.h"
#include "safetensors.h"

/* One tensor as float32 (floats) or int32 (I32), owned; fails the test if it is absent. */
float *golden_floats(const qc_st_file *file, const char *name, int64_t *ret_n_elems);
int32_t *golden_ints(const qc_st_file *file, const char *name, int64_t *ret_n_elems);

/* Everything that a forward pass over n_seqs sequences of n_tokens gives. */
typedef struct run_result {
    int64_t n_seqs, n_tokens, hidden, vocab, n_layers;
    float *logits; /* [n_seqs, n_tokens, vocab] */
    float *states; /* [n_layers + 1, n_seqs, n_tokens, hidden]: embeddings, then each layer; the last one
                      normed */
} run_result;

/* Fails the test on any error. The head runs in slices of slice_rows rows. */
run_result run_model(const qc_model *model, qc_backend *be, const int32_t *ids, int64_t n_seqs,
                     int64_t n_tokens, int64_t slice_rows);
void run_free(run_result *r);

/* Sum over targets of the negative log-likelihood of sequence s. */
double run_nll(const run_result *r, const int32_t *ids, int64_t s);

/* Largest |a - b|; infinity if any is not finite. */
double max_abs_diff(const float *a, const float *b, int64_t n);

#endif
