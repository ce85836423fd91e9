/* A plain float64 forward pass, written from the formulas of the models and independent of src/model: one
 * sequence, full score matrices, one token at a time. */
#ifndef QC_TEST_REF_FORWARD_H
#define QC_TEST_REF_FORWARD_H

#include "mem_source.h"

typedef struct ref_params {
    int hidden, n_layers, n_heads, n_kv_heads, head_dim, ffn, vocab;
    double eps, theta;
    int window;       /* 0 = none */
    double max_score; /* out: largest absolute attention score seen */
} ref_params;

/* logits[n_tokens, vocab] of a model with the tensor names of mem_random; q_norm and k_norm are used where
 * present. Owned (free). */
double *ref_forward(mem_source *m, ref_params *p, const int32_t *ids, int n_tokens);

#endif
