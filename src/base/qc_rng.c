#include "qc_rng.h"

#include <math.h>

static uint64_t rotl(uint64_t x, int k)
{
    return (x << k) | (x >> (64 - k));
}

void qc_rng_seed(qc_rng *rng, uint64_t seed)
{
    for (int i = 0; i < 4; i++) {
        uint64_t z = (seed += 0x9E3779B97F4A7C15u);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        rng->s[i] = z ^ (z >> 31);
    }
}

uint64_t qc_rng_next(qc_rng *rng)
{
    uint64_t *s = rng->s, result = rotl(s[1] * 5, 7) * 9, t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotl(s[3], 45);
    return result;
}

uint64_t qc_rng_below(qc_rng *rng, uint64_t n)
{
    uint64_t limit = UINT64_MAX - UINT64_MAX % n, x;
    do
        x = qc_rng_next(rng);
    while (x >= limit);
    return x % n;
}

double qc_rng_uniform(qc_rng *rng)
{
    return (double)(qc_rng_next(rng) >> 11) * 0x1p-53;
}

double qc_rng_normal(qc_rng *rng)
{
    double u = 1.0 - qc_rng_uniform(rng), v = qc_rng_uniform(rng);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}
