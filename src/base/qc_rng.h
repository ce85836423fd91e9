/* Seeded random numbers (xoshiro256**, Blackman & Vigna 2018; state filled by splitmix64) for tests and
 * sampling: the same sequence on every machine. */
#ifndef QC_RNG_H
#define QC_RNG_H

#include <stdint.h>

typedef struct qc_rng {
    uint64_t s[4];
} qc_rng;

/* Any seed is fine, 0 too. */
void qc_rng_seed(qc_rng *rng, uint64_t seed);
/* 64 random bits. */
uint64_t qc_rng_next(qc_rng *rng);
/* Uniform in 0 .. n - 1 without bias; n >= 1. */
uint64_t qc_rng_below(qc_rng *rng, uint64_t n);
/* Uniform in [0, 1). */
double qc_rng_uniform(qc_rng *rng);
/* Standard normal (Box-Muller). */
double qc_rng_normal(qc_rng *rng);

#endif
