/* The hash map against a plain array of the same keys. */
#include "qc_alloc.h"
#include "qc_map.h"

#include "qc_test.h"

enum { N = 20000 };
static char keys[N][24];

static void make_keys(void)
{
    for (int i = 0; i < N; i++)
        snprintf(keys[i], sizeof keys[i], "%s%d", i % 3 ? "model.layers." : "", i);
}

START_TEST(finds_what_was_added)
{
    make_keys();
    qc_map *map = qc_map_new(0);
    for (int i = 0; i < N; i++)
        ck_assert_int_eq(qc_map_add(map, keys[i], strlen(keys[i]), i), 1);
    for (int i = 0; i < N; i += 17)
        ck_assert_int_eq(qc_map_add(map, keys[i], strlen(keys[i]), -7), 0);
    ck_assert_uint_eq(qc_map_count(map), N);
    for (int i = 0; i < N; i++)
        ck_assert_int_eq(qc_map_get(map, keys[i], strlen(keys[i]), -1), i);
    ck_assert_int_eq(qc_map_get(map, "model.layers.x", 14, -1), -1);
    qc_map_free(map);
    qc_map_free(NULL);
}
END_TEST

START_TEST(keys_are_bytes)
{
    qc_map *map = qc_map_new(4);
    ck_assert_int_eq(qc_map_add(map, "", 0, 1), 1);
    ck_assert_int_eq(qc_map_add(map, "\0", 1, 2), 1);
    ck_assert_int_eq(qc_map_add(map, "\0\0", 2, 3), 1);
    ck_assert_int_eq(qc_map_add(map, "12345678", 8, 4), 1);
    ck_assert_int_eq(qc_map_add(map, "12345678\0", 9, 5), 1);
    ck_assert_int_eq(qc_map_get(map, "", 0, -1), 1);
    ck_assert_int_eq(qc_map_get(map, "\0", 1, -1), 2);
    ck_assert_int_eq(qc_map_get(map, "\0\0", 2, -1), 3);
    ck_assert_int_eq(qc_map_get(map, "12345678", 8, -1), 4);
    ck_assert_int_eq(qc_map_get(map, "12345678\0", 9, -1), 5);
    qc_map_free(map);
}
END_TEST

START_TEST(out_of_memory_leaves_the_map_whole)
{
    make_keys();
    qc_alloc_fail_at(2);
    ck_assert_ptr_null(qc_map_new(8));
    qc_alloc_fail_at(0);
    ck_assert_ptr_null(qc_map_new(SIZE_MAX));
    qc_map *map = qc_map_new(0);
    int n = 0;
    qc_alloc_fail_at(1);
    while (qc_map_add(map, keys[n], strlen(keys[n]), n) == 1)
        n++;
    ck_assert_int_eq(qc_map_add(map, keys[n], strlen(keys[n]), n), 1); /* the next try finds memory again */
    qc_alloc_fail_at(0);
    for (int i = 0; i <= n; i++)
        ck_assert_int_eq(qc_map_get(map, keys[i], strlen(keys[i]), -1), i);
    qc_map_free(map);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"finds_what_was_added", finds_what_was_added},
        {"keys_are_bytes", keys_are_bytes},
        {"out_of_memory_leaves_the_map_whole", out_of_memory_leaves_the_map_whole},
        {0},
    };
    return run_tests("map", cases);
}
