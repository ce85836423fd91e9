/* Rotary position embedding: frequencies and tables of cosines and sines, computed in double precision. */
#ifndef QC_ROPE_H
#define QC_ROPE_H

#include <stdbool.h>
#include <stdint.h>

typedef enum {
    QC_ROPE_DEFAULT = 0,
    QC_ROPE_LINEAR,
    QC_ROPE_DYNAMIC,
    QC_ROPE_YARN,
    QC_ROPE_LLAMA3,
    QC_ROPE_LONGROPE
} qc_rope_kind;

#define QC_ROPE_FACTORS 128 /* pairs of a head that longrope can have */

typedef struct qc_rope_config {
    qc_rope_kind kind;
    double theta;
    double partial_rotary_factor; /* 1 = the whole head rotates */
    double factor;                /* of the scaling kinds */
    int64_t original_max_positions;
    double low_freq_factor, high_freq_factor; /* llama3 */
    double beta_fast, beta_slow;              /* yarn */
    double attention_factor;                  /* yarn, longrope: multiplies cos and sin */
    bool truncate;                            /* yarn: round the correction range to whole dimensions */
    /* longrope: each pair's wavelength grows by its factor; the long ones count in sequences beyond the
     * original length */
    double short_factors[QC_ROPE_FACTORS], long_factors[QC_ROPE_FACTORS];
} qc_rope_config;

/* "default", "linear", ...: as configurations call it; static. */
const char *qc_rope_kind_name(qc_rope_kind kind);

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
