/* 16-bit floats against the definition of the formats (IEEE 754-2019, 3.4: value = (-1)^s 2^(e-bias) (1 +
 * m/2^p)), by exact arithmetic in double, and against the compiler's _Float16 where it has one. */
#include "qc_fp.h"
#include "qc_rng.h"

#include "qc_test.h"

#include <math.h>
#include <stdbool.h>

/* Value of a pattern with `e_bits` exponent and `m_bits` mantissa bits. */
static double definition(unsigned h, int e_bits, int m_bits)
{
    int bias = (1 << (e_bits - 1)) - 1;
    int e = (int)(h >> m_bits) & ((1 << e_bits) - 1);
    double m = (double)(h & ((1u << m_bits) - 1)), sign = h >> (e_bits + m_bits) ? -1.0 : 1.0;
    if (e == (1 << e_bits) - 1)
        return m != 0 ? NAN : sign * INFINITY;
    if (e == 0)
        return sign * ldexp(m, 1 - bias - m_bits);
    return sign * ldexp(ldexp(1, m_bits) + m, e - bias - m_bits);
}

static bool same_number(double a, double b)
{
    if (isnan(b))
        return isnan(a);
    return a == b && !signbit(a) == !signbit(b);
}

START_TEST(every_pattern_round_trips)
{
    for (unsigned h = 0; h < 65536; h++) {
        float f16 = qc_f16_to_f32((uint16_t)h), bf16 = qc_bf16_to_f32((uint16_t)h);
        double want16 = definition(h, 5, 10), want_b16 = definition(h, 8, 7);
        ck_assert_msg(same_number(f16, want16), "f16 %04x: %g, not %g", h, (double)f16, want16);
        ck_assert_msg(same_number(bf16, want_b16), "bf16 %04x: %g, not %g", h, (double)bf16, want_b16);
        /* back: the same pattern; a NaN stays one and keeps its sign */
        uint16_t back = qc_f32_to_f16(f16), b_back = qc_f32_to_bf16(bf16);
        if (isnan(f16))
            ck_assert((back & 0x7c00) == 0x7c00 && (back & 0x3ff) && (back & 0x8000) == (h & 0x8000));
        else
            ck_assert_uint_eq(back, h);
        if (isnan(bf16))
            ck_assert((b_back & 0x7f80) == 0x7f80 && (b_back & 0x7f) && (b_back & 0x8000) == (h & 0x8000));
        else
            ck_assert_uint_eq(b_back, h);
    }
}
END_TEST

/* Around every pair of neighbours: the exact middle goes to the even one, one float beside it to the nearer
 * one. */
static void check_middles(int e_bits, int m_bits, uint16_t (*convert)(float))
{
    unsigned infinity = ((1u << e_bits) - 1) << m_bits;
    for (unsigned h = 0; h < infinity; h++) {
        double low = definition(h, e_bits, m_bits);
        /* above the largest finite value stands the value that the next pattern would have */
        double high = h + 1 == infinity ? low + (low - definition(h - 1, e_bits, m_bits))
                                        : definition(h + 1, e_bits, m_bits);
        float middle = (float)((low + high) / 2);
        if ((double)middle != (low + high) / 2)
            continue; /* below the smallest float32: cannot be asked for */
        for (int sign = 0; sign < 2; sign++) {
            unsigned s = (unsigned)sign << 15;
            float m = sign ? -middle : middle, towards = sign ? -INFINITY : INFINITY;
            ck_assert_uint_eq(convert(m), s | (h & 1 ? h + 1 : h));
            ck_assert_uint_eq(convert(nextafterf(m, 0)), s | h);
            ck_assert_uint_eq(convert(nextafterf(m, towards)), s | (h + 1));
        }
    }
}

START_TEST(ties_go_to_even)
{
    check_middles(5, 10, qc_f32_to_f16);
    check_middles(8, 7, qc_f32_to_bf16);
}
END_TEST

START_TEST(extremes)
{
    ck_assert_uint_eq(qc_f32_to_f16(65504.0f), 0x7bff);
    ck_assert_uint_eq(qc_f32_to_f16(1e30f), 0x7c00);
    ck_assert_uint_eq(qc_f32_to_f16(-INFINITY), 0xfc00);
    ck_assert_uint_eq(qc_f32_to_f16(-0.0f), 0x8000);
    ck_assert_uint_eq(qc_f32_to_f16(1e-40f), 0); /* a float32 subnormal */
    ck_assert_uint_eq(qc_f32_to_bf16(3.4e38f), 0x7f80);
    ck_assert_uint_eq(qc_f32_to_bf16(qc_f32_from_bits(0x7f800001)) & 0x7fc0, 0x7fc0); /* signalling NaN */
}
END_TEST

#if defined(__FLT16_MAX__) && defined(__x86_64__)
__extension__ typedef _Float16 half;

START_TEST(agrees_with_the_compiler)
{
    qc_rng rng;
    qc_rng_seed(&rng, 1);
    for (int i = 0; i < 2000000; i++) {
        float x = qc_f32_from_bits((uint32_t)qc_rng_next(&rng));
        if (i % 2) /* most random patterns overflow or vanish: half of them in the range that does not */
            x = (float)ldexp(qc_rng_uniform(&rng) - 0.5, (int)qc_rng_below(&rng, 44) - 27);
        half y = (half)x;
        uint16_t want;
        memcpy(&want, &y, sizeof want);
        if (isnan(x))
            ck_assert((qc_f32_to_f16(x) & 0x7fff) > 0x7c00);
        else
            ck_assert_uint_eq(qc_f32_to_f16(x), want);
    }
}
END_TEST
#endif

int main(void)
{
    const test_case cases[] = {
        {"every_pattern_round_trips", every_pattern_round_trips},
        {"ties_go_to_even", ties_go_to_even},
        {"extremes", extremes},
#if defined(__FLT16_MAX__) && defined(__x86_64__)
        {"agrees_with_the_compiler", agrees_with_the_compiler},
#endif
        {0},
    };
    return run_tests("fp", cases);
}
