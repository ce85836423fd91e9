/* Generators against published vectors: splitmix64 (seed 1234567) through the seeding, xoshiro256** (state 1,
 * 2, 3, 4) as in the reference implementation's ports. */
#include "qc_rng.h"

#include "qc_test.h"

#include <math.h>

START_TEST(seeding_is_splitmix64)
{
    const uint64_t want[4] = {6457827717110365317u, 3203168211198807973u, 9817491932198370423u,
                              4593380528125082431u};
    qc_rng rng;
    qc_rng_seed(&rng, 1234567);
    for (int i = 0; i < 4; i++)
        ck_assert_uint_eq(rng.s[i], want[i]);
}
END_TEST

START_TEST(sequence_is_xoshiro256_starstar)
{
    const uint64_t want[] = {11520u,
                             0u,
                             1509978240u,
                             1215971899390074240u,
                             1216172134540287360u,
                             607988272756665600u,
                             16172922978634559625u,
                             8476171486693032832u,
                             10595114339597558777u,
                             2904607092377533576u};
    qc_rng rng = {{1, 2, 3, 4}};
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++)
        ck_assert_uint_eq(qc_rng_next(&rng), want[i]);
}
END_TEST

/* Every value of a small range about equally often: chi-square of 9 degrees of freedom, 27.9 is its 99.9 %
 * point; the seed is fixed, so the outcome is too. */
START_TEST(below_is_even)
{
    qc_rng rng;
    qc_rng_seed(&rng, 5);
    long count[10] = {0};
    for (int i = 0; i < 100000; i++)
        count[qc_rng_below(&rng, 10)]++;
    double chi = 0;
    for (int i = 0; i < 10; i++)
        chi += ((double)count[i] - 1e4) * ((double)count[i] - 1e4) / 1e4;
    ck_assert_double_lt(chi, 27.9);
    for (int i = 0; i < 100; i++)
        ck_assert_uint_eq(qc_rng_below(&rng, 1), 0);
    for (int i = 0; i < 100; i++)
        ck_assert_uint_lt(qc_rng_below(&rng, (1ull << 63) + 1), (1ull << 63) + 1);
}
END_TEST

START_TEST(uniform_and_normal_moments)
{
    enum { N = 200000 };
    qc_rng rng;
    qc_rng_seed(&rng, 0);
    double mean = 0, sq = 0, u_mean = 0;
    for (int i = 0; i < N; i++) {
        double u = qc_rng_uniform(&rng), z = qc_rng_normal(&rng);
        ck_assert(u >= 0 && u < 1 && isfinite(z));
        u_mean += u / N;
        mean += z / N;
        sq += z * z / N;
    }
    /* five standard errors: sd / sqrt(N) of each mean */
    ck_assert_double_lt(fabs(u_mean - 0.5), 5 * sqrt(1.0 / 12 / N));
    ck_assert_double_lt(fabs(mean), 5 / sqrt(N));
    ck_assert_double_lt(fabs(sq - 1), 5 * sqrt(2.0 / N));
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"seeding_is_splitmix64", seeding_is_splitmix64},
        {"sequence_is_xoshiro256_starstar", sequence_is_xoshiro256_starstar},
        {"below_is_even", below_is_even},
        {"uniform_and_normal_moments", uniform_and_normal_moments},
        {0},
    };
    return run_tests("rng", cases);
}
