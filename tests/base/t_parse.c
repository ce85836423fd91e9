/* Numbers from text: all of it or nothing. */
#include "qc_parse.h"

#include "qc_test.h"

START_TEST(integers)
{
    int64_t x = 99;
    ck_assert(qc_parse_i64("0", 0, 10, &x) && x == 0);
    ck_assert(qc_parse_i64("-7", -10, 10, &x) && x == -7);
    ck_assert(qc_parse_i64("+10", -10, 10, &x) && x == 10);
    ck_assert(qc_parse_i64("9223372036854775807", INT64_MIN, INT64_MAX, &x) && x == INT64_MAX);
    ck_assert(qc_parse_i64("-9223372036854775808", INT64_MIN, INT64_MAX, &x) && x == INT64_MIN);
    x = 99;
    const char *bad[] = {"", "-", "+", " 1", "1 ", "1x", "0x10", "1.0", "1e3", "--1", "11", "9223372036854775808",
                         "99999999999999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        ck_assert_msg(!qc_parse_i64(bad[i], -10, 10, &x) && x == 99, "'%s'", bad[i]);
    ck_assert(!qc_parse_i64("9223372036854775808", INT64_MIN, INT64_MAX, &x) && x == 99);
}
END_TEST

START_TEST(doubles)
{
    double x = 99;
    ck_assert(qc_parse_double("0.5", &x) && x == 0.5);
    ck_assert(qc_parse_double("-1e-3", &x) && x == -1e-3);
    ck_assert(qc_parse_double("+.25", &x) && x == 0.25);
    ck_assert(qc_parse_double("3.", &x) && x == 3);
    ck_assert(qc_parse_double("1E+2", &x) && x == 100);
    x = 99;
    const char *bad[] = {"", ".", "-", "e5", "1e", "1e+", "1 ", " 1", "nan", "inf", "-inf", "0x1p3", "1e999", "1,5", "1.5.5"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        ck_assert_msg(!qc_parse_double(bad[i], &x) && x == 99, "'%s'", bad[i]);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"integers", integers}, {"doubles", doubles}, {0}};
    return run_tests("parse", cases);
}
