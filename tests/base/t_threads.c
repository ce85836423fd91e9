/* The pool: every task exactly once, for any number of threads; results do not depend on it. */
#include "qc_alloc.h"
#include "qc_threads.h"

#include "qc_test.h"

#include <stdatomic.h>

enum { MAX_TASKS = 5000 };

typedef struct shared {
    atomic_int runs[MAX_TASKS];
    atomic_int n_bad_thread;
    int n_threads;
    double result[MAX_TASKS];
} shared;

static void task(void *ctx, int64_t i, int thread)
{
    shared *s = ctx;
    atomic_fetch_add(&s->runs[i], 1);
    if (thread < 0 || thread >= s->n_threads)
        atomic_fetch_add(&s->n_bad_thread, 1);
    double sum = 0;
    for (int64_t k = 1; k <= i % 97 + 1; k++)
        sum += 1.0 / (double)k;
    s->result[i] = sum;
}

static shared s, first;

START_TEST(each_task_once)
{
    const int64_t n_tasks[] = {0, 1, 2, 3, 7, 64, MAX_TASKS};
    const int n_threads[] = {1, 2, 3, 7, 16};
    for (size_t t = 0; t < sizeof n_threads / sizeof n_threads[0]; t++) {
        qc_pool *pool;
        ck_assert_int_eq(qc_pool_new(n_threads[t], &pool, NULL), QC_OK);
        ck_assert_int_eq(qc_pool_size(pool), n_threads[t]);
        for (size_t k = 0; k < sizeof n_tasks / sizeof n_tasks[0]; k++) {
            memset(&s, 0, sizeof s);
            s.n_threads = n_threads[t];
            qc_pool_run(pool, n_tasks[k], task, &s);
            for (int64_t i = 0; i < MAX_TASKS; i++)
                ck_assert_int_eq(atomic_load(&s.runs[i]), i < n_tasks[k]);
            ck_assert_int_eq(atomic_load(&s.n_bad_thread), 0);
        }
        if (t == 0)
            memcpy(first.result, s.result, sizeof s.result);
        ck_assert_mem_eq(first.result, s.result, sizeof s.result);
        qc_pool_free(pool);
    }
    memset(&s, 0, sizeof s);
    s.n_threads = 1;
    qc_pool_run(NULL, 10, task, &s);
    ck_assert_int_eq(atomic_load(&s.runs[9]), 1);
    ck_assert_int_eq(qc_pool_size(NULL), 1);
    qc_pool_free(NULL);
}
END_TEST

/* Many short runs one after the other: a worker that is late for one must not take tasks of the next twice.
 */
START_TEST(many_short_runs)
{
    qc_pool *pool;
    ck_assert_int_eq(qc_pool_new(4, &pool, NULL), QC_OK);
    memset(&s, 0, sizeof s);
    s.n_threads = 4;
    for (int i = 0; i < 3000; i++)
        qc_pool_run(pool, 1 + i % 5, task, &s);
    for (int i = 0; i < 5; i++)
        ck_assert_int_eq(atomic_load(&s.runs[i]), 3000 * (5 - i) / 5);
    qc_pool_free(pool);
}
END_TEST

START_TEST(no_memory_no_pool)
{
    qc_pool *pool = NULL;
    for (long nth = 1; nth <= 4; nth++) {
        qc_err err = {0};
        qc_alloc_fail_at(nth);
        int rc = qc_pool_new(3, &pool, &err);
        qc_alloc_fail_at(0);
        ck_assert_int_eq(rc, QC_E_RESOURCE);
        ck_assert_int_gt((int)strlen(err.msg), 0);
    }
    ck_assert_ptr_null(pool);
    ck_assert_int_eq(qc_pool_new(0, &pool, NULL), QC_OK); /* one per processor */
    ck_assert_int_ge(qc_pool_size(pool), 1);
    qc_pool_free(pool);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"each_task_once", each_task_once},
        {"many_short_runs", many_short_runs},
        {"no_memory_no_pool", no_memory_no_pool},
        {0},
    };
    return run_tests("threads", cases);
}
