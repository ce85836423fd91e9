/* Looks over an array of floats: against loops with the functions of the C library. */
#include "qc_rng.h"
#include "qc_tensor.h"

#include "qc_test.h"

#include <float.h>
#include <math.h>

enum { MOST = 300 };

static float largest_by_fabs(const float *x, int64_t n)
{
    float most = 0;
    for (int64_t i = 0; i < n; i++)
        most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    return most;
}

START_TEST(finite_values)
{
    float x[MOST];
    qc_rng rng;
    qc_rng_seed(&rng, 7);
    for (int64_t n = 0; n <= MOST; n++) {
        for (int64_t i = 0; i < n; i++)
            x[i] = ldexpf((float)qc_rng_next(&rng) - 0x1p63f, -(int)(qc_rng_next(&rng) % 200));
        ck_assert_float_eq(qc_largest_abs(x, n), largest_by_fabs(x, n));
        ck_assert_int_eq(qc_first_nonfinite(x, n), -1);
    }
}
END_TEST

START_TEST(one_that_is_not_finite)
{
    const float bad[] = {INFINITY, -INFINITY, NAN, -NAN};
    float x[MOST];
    for (int k = 0; k < 4; k++)
        for (int64_t at = 0; at < MOST; at++) {
            for (int64_t i = 0; i < MOST; i++)
                x[i] = i % 2 ? FLT_MAX : -FLT_MIN;
            x[at] = bad[k];
            ck_assert(!isfinite(qc_largest_abs(x, MOST)));
            ck_assert_int_eq(qc_first_nonfinite(x, MOST), at);
        }
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"finite_values", finite_values}, {"one_that_is_not_finite", one_that_is_not_finite}, {0}};
    return run_tests("tensor", cases);
}
