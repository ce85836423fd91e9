/* Rotary position embedding: frequencies and tables of cosines and sines, computed in double precision. */
#ifndef QC_MODEL_ROPE_H
#define QC_MODEL_ROPE_H

#include "config.h"

/* inv_freq[rotary_dim / 2] = angle per position of each pair, with the scaling of the config applied.
 * Kinds: default, linear, yarn, llama3. */
void qc_rope_inv_freq(const qc_rope_config *rope, int64_t rotary_dim, double *inv_freq);

/* cos_t, sin_t [n_positions, rotary_dim / 2] of positions 0 .., times the attention factor. inv_freq as
 * above. */
void qc_rope_tables(const qc_rope_config *rope, int64_t rotary_dim, const double *inv_freq,
                    int64_t n_positions, float *cos_t, float *sin_t);

#endif
