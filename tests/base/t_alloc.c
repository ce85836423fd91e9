/* The heap's door: alignment, overflow, injected failures; and the growable buffer on top of it. */
#include "qc_alloc.h"
#include "qc_buf.h"

#include "qc_test.h"

#include <stdint.h>

START_TEST(aligned_and_checked)
{
    for (size_t n = 0; n < 300; n += 7) {
        char *p = qc_alloc(n, 1);
        ck_assert_ptr_nonnull(p);
        ck_assert_uint_eq((uintptr_t)p % 64, 0);
        memset(p, 1, n);
        qc_free(p);
    }
    ck_assert_ptr_null(qc_alloc(SIZE_MAX / 2, 3));
    ck_assert_ptr_null(qc_calloc(SIZE_MAX, 2));
    ck_assert_ptr_null(qc_alloc(SIZE_MAX, 1));
    qc_free(NULL);
}
END_TEST

START_TEST(calloc_is_zero_and_realloc_keeps)
{
    unsigned char *p = qc_calloc(1000, 1);
    for (int i = 0; i < 1000; i++)
        ck_assert_int_eq(p[i], 0);
    for (int i = 0; i < 1000; i++)
        p[i] = (unsigned char)i;
    p = qc_realloc(p, 1000, 5000);
    for (int i = 0; i < 1000; i++)
        ck_assert_int_eq(p[i], i & 255);
    p = qc_realloc(p, 5000, 10);
    ck_assert_int_eq(p[9], 9);
    ck_assert_ptr_null(qc_realloc(p, 10, SIZE_MAX));
    ck_assert_int_eq(p[9], 9);
    qc_free(p);
    p = qc_realloc(NULL, 0, 4);
    ck_assert_ptr_nonnull(p);
    qc_free(p);
}
END_TEST

START_TEST(strings)
{
    char *s = qc_strndup("abcdef", 3);
    ck_assert_str_eq(s, "abc");
    qc_free(s);
    s = qc_asprintf("%s-%d", "x", 42);
    ck_assert_str_eq(s, "x-42");
    qc_free(s);
}
END_TEST

START_TEST(nth_allocation_fails)
{
    qc_alloc_fail_at(2);
    void *a = qc_alloc(1, 1), *b = qc_alloc(1, 1), *c = qc_alloc(1, 1);
    ck_assert_ptr_nonnull(a);
    ck_assert_ptr_null(b);
    ck_assert_ptr_nonnull(c);
    ck_assert_int_eq(qc_alloc_fail_at(0), 3);
    qc_free(a);
    qc_free(c);
}
END_TEST

START_TEST(buffer_grows_to_its_limit)
{
    qc_buf buf = {.max_bytes = 1000};
    qc_err err;
    for (int i = 0; i < 100; i++)
        ck_assert_int_eq(qc_buf_printf(&buf, &err, "%09d ", i), QC_OK);
    ck_assert_uint_eq(buf.n_bytes, 1000);
    ck_assert_str_eq(buf.data + 990, "000000099 ");
    ck_assert_int_eq(qc_buf_append(&buf, "x", 1, &err), QC_E_INPUT);
    ck_assert_uint_eq(buf.n_bytes, 1000);
    qc_buf_clear(&buf);
    ck_assert_int_eq(qc_buf_append(&buf, NULL, 0, &err), QC_OK);
    ck_assert_str_eq(buf.data, "");
    qc_alloc_fail_at(1);
    ck_assert_int_eq(
        qc_buf_append(&buf, "0123456789012345678901234567890123456789012345678901234567890123", 64, &err),
        QC_E_RESOURCE);
    qc_alloc_fail_at(0);
    ck_assert_uint_eq(buf.n_bytes, 0);
    qc_buf_clear(&buf);
    qc_buf_clear(NULL);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"aligned_and_checked", aligned_and_checked},
        {"calloc_is_zero_and_realloc_keeps", calloc_is_zero_and_realloc_keeps},
        {"strings", strings},
        {"nth_allocation_fails", nth_allocation_fails},
        {"buffer_grows_to_its_limit", buffer_grows_to_its_limit},
        {0},
    };
    return run_tests("alloc", cases);
}
