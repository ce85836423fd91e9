/* The one-line rule of messages, whatever a hostile name holds, and the mapping to exit codes. */
#include "qc_err.h"
#include "qc_file.h"
#include "qc_json.h"

#include "qc_test.h"

#include <signal.h>

static void expect_line(const char *text, const char *want)
{
    qc_err err = {0};
    ck_assert_int_eq(qc_fail(&err, QC_E_INPUT, "%s", text), QC_E_INPUT);
    ck_assert_int_eq(err.code, QC_E_INPUT);
    ck_assert_str_eq(err.msg, want);
}

START_TEST(control_and_broken_bytes_are_escaped)
{
    expect_line("plain", "plain");
    expect_line("a\nb\tc\x1b[31m\x7f", "a\\x0ab\\x09c\\x1b[31m\\x7f");
    expect_line("\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
    expect_line("x\xff\xc3", "x\\xff\\xc3");        /* no UTF-8, split at the end */
    expect_line("\xed\xa0\x80", "\\xed\\xa0\\x80"); /* a surrogate */
    expect_line("\xc2\x9b"
                "1m",
                "\\xc2\\x9b1m"); /* C1: CSI of some terminals */
    expect_line("a\xe2\x80\xa8"
                "b",
                "a\\xe2\\x80\\xa8"
                "b"); /* line separator */
}
END_TEST

/* Long texts, of every length around the limit: one line, valid, ending with the reason. */
START_TEST(long_text_keeps_its_end)
{
    for (int n = QC_ERR_MSG_BYTES - 40; n < QC_ERR_MSG_BYTES + 40; n++) {
        char name[3 * QC_ERR_MSG_BYTES] = {0};
        for (int i = 0; i < n; i++)
            memcpy(name + 2 * i, "\xc3\xa9", 2);
        qc_err err;
        (void)!qc_fail(&err, QC_E_INPUT, "%s: wrong", name);
        ck_assert(qc_utf8_valid(err.msg, strlen(err.msg), NULL));
        ck_assert_int_lt((int)strlen(err.msg), QC_ERR_MSG_BYTES);
        ck_assert_str_eq(err.msg + strlen(err.msg) - 7, ": wrong");
        ck_assert_ptr_nonnull(strstr(err.msg, "..."));
    }
    for (size_t cap = 64; cap < 80; cap++) {
        for (size_t n = cap - 10; n < cap + 10; n++) {
            char text[128], line[128];
            memset(text, '\n', sizeof text); /* 4 bytes each */
            text[n] = 0;
            memset(line, 'z', sizeof line);
            qc_one_line(line, cap, text);
            ck_assert_uint_lt(strlen(line), cap);
            ck_assert_int_eq(line[cap], 'z');
        }
    }
}
END_TEST

START_TEST(prefix_keeps_code)
{
    qc_err err = {0};
    (void)!qc_fail(&err, QC_E_UNSUPPORTED, "rope kind 'x'");
    ck_assert_int_eq(qc_err_prefix(&err, "%s", "config.json"), QC_E_UNSUPPORTED);
    ck_assert_str_eq(err.msg, "config.json: rope kind 'x'");
    ck_assert_int_eq(qc_fail(NULL, QC_E_USAGE, "nobody listens"), QC_E_USAGE);
}
END_TEST

START_TEST(exit_codes)
{
    ck_assert_int_eq(qc_exit_code(QC_OK), 0);
    ck_assert_int_eq(qc_exit_code(QC_E_USAGE), 2);
    ck_assert_int_eq(qc_exit_code(QC_E_INPUT), 3);
    ck_assert_int_eq(qc_exit_code(QC_E_UNSUPPORTED), 4);
    ck_assert_int_eq(qc_exit_code(QC_E_RESOURCE), 5);
    ck_assert_int_eq(qc_exit_code(QC_E_INTERRUPTED), 130);
    qc_signals_install();
    raise(SIGTERM);
    ck_assert_int_eq(qc_exit_code(qc_check_interrupt(NULL)), 143);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"control_and_broken_bytes_are_escaped", control_and_broken_bytes_are_escaped},
        {"long_text_keeps_its_end", long_text_keeps_its_end},
        {"prefix_keeps_code", prefix_keeps_code},
        {"exit_codes", exit_codes},
        {0},
    };
    return run_tests("err", cases);
}
