/* Rotary position embedding: frequencies and tables of cosines and sines, computed in double precision. */
#ifndef QC_MODEL_ROPE_H
#define QC_MODEL_ROPE_H

#include "config.h"

/* inv_freq[rotary_dim / 2] = angle per position of each pair in a sequence of n_tokens, with the scaling of
 * the config applied. */
void qc_rope_inv_freq(const qc_rope_config *rope, int64_t rotary_dim, int64_t n_tokens, double *inv_freq);

/* A number that does not fall with n_tokens: sequences with the same one have the same angles. */
int64_t qc_rope_variant(const qc_rope_config *rope, int64_t n_tokens);

/* cos_t, sin_t [n_positions, rotary_dim / 2] of positions 0 .., times the attention factor. inv_freq as
 * above. */
void qc_rope_tables(const qc_rope_config *rope, int64_t rotary_dim, const double *inv_freq,
                    int64_t n_positions, float *cos_t, float *sin_t);

#endif
