/* Thin layer over Check: one suite per program, exit 77 for skip, paths of the data. */
#ifndef QC_TEST_H
#define QC_TEST_H

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* QC_TEST_DATA is tests/data of the source tree (set by meson); QC_DATA the optional larger data folder. */
static inline const char *test_data(const char *name)
{
    static char path[4][4096];
    static int turn;
    char *p = path[turn++ & 3];
    const char *root = getenv("QC_TEST_DATA");
    snprintf(p, sizeof path[0], "%s/%s", root ? root : "tests/data", name);
    return p;
}

/* Skip the whole program, with its reason. */
#define TEST_SKIP(reason)                                                                                    \
    do {                                                                                                     \
        printf("SKIP: %s\n", reason);                                                                        \
        exit(77);                                                                                            \
    } while (0)

/* Run a NULL-terminated list of (name, Check test function) in one process each. */
typedef struct test_case {
    const char *name;
    const TTest *fn;
} test_case;

static inline int run_tests(const char *suite_name, const test_case *cases)
{
    Suite *s = suite_create(suite_name);
    for (; cases->name; cases++) {
        TCase *tc = tcase_create(cases->name);
        tcase_set_timeout(tc, 120);
        tcase_add_test(tc, cases->fn);
        suite_add_tcase(s, tc);
    }
    SRunner *sr = srunner_create(s);
    srunner_run_all(sr, CK_ENV);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed ? 1 : 0;
}

#endif
