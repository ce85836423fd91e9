#include "qc_threads.h"

#include "qc_alloc.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>

struct qc_pool {
    int n_threads;
    int n_started;
    pthread_t *threads; /* n_threads - 1 */
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    unsigned generation; /* counts qc_pool_run calls; a worker sleeps until it changes */
    int n_busy;          /* workers that have not finished this generation */
    bool stop;
    qc_task_fn fn;
    void *ctx;
    int64_t n_tasks;
    atomic_llong next;
};

typedef struct start_arg {
    qc_pool *pool;
    int thread;
} start_arg;

static void work(qc_pool *pool, int thread)
{
    for (;;) {
        int64_t task = atomic_fetch_add(&pool->next, 1);
        if (task >= pool->n_tasks)
            return;
        pool->fn(pool->ctx, task, thread);
    }
}

static void *worker(void *arg)
{
    start_arg a = *(start_arg *)arg;
    qc_free(arg);
    unsigned seen = 0;
    pthread_mutex_lock(&a.pool->lock);
    for (;;) {
        while (a.pool->generation == seen && !a.pool->stop)
            pthread_cond_wait(&a.pool->work, &a.pool->lock);
        if (a.pool->stop)
            break;
        seen = a.pool->generation;
        pthread_mutex_unlock(&a.pool->lock);
        work(a.pool, a.thread);
        pthread_mutex_lock(&a.pool->lock);
        if (--a.pool->n_busy == 0)
            pthread_cond_signal(&a.pool->done);
    }
    pthread_mutex_unlock(&a.pool->lock);
    return NULL;
}

int qc_usable_processors(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1;
    int n = CPU_COUNT(&set);
    return n > 0 ? n : 1;
}

int qc_pool_new(int n_threads, qc_pool **ret, qc_err *err)
{
    if (n_threads <= 0)
        n_threads = qc_usable_processors();
    qc_pool *pool = qc_calloc(1, sizeof *pool);
    if (!pool)
        return qc_fail_nomem(err, "thread pool", sizeof *pool);
    pool->n_threads = n_threads;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    pool->threads = qc_calloc((size_t)n_threads, sizeof *pool->threads);
    for (int i = 1; pool->threads && i < n_threads; i++) {
        start_arg *arg = qc_alloc(1, sizeof *arg);
        if (!arg)
            break;
        *arg = (start_arg){.pool = pool, .thread = i};
        if (pthread_create(&pool->threads[i - 1], NULL, worker, arg) != 0) {
            qc_free(arg);
            break;
        }
        pool->n_started++;
    }
    if (pool->n_started != n_threads - 1) {
        qc_pool_free(pool);
        return qc_fail(err, QC_E_RESOURCE, "can not start %d threads", n_threads);
    }
    *ret = pool;
    return QC_OK;
}

void qc_pool_free(qc_pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->n_started; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    qc_free(pool->threads);
    qc_free(pool);
}

int qc_pool_size(const qc_pool *pool)
{
    return pool ? pool->n_threads : 1;
}

void qc_pool_run(qc_pool *pool, int64_t n_tasks, qc_task_fn fn, void *ctx)
{
    if (!pool || pool->n_threads == 1 || n_tasks <= 1) {
        for (int64_t i = 0; i < n_tasks; i++)
            fn(ctx, i, 0);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->fn = fn;
    pool->ctx = ctx;
    pool->n_tasks = n_tasks;
    atomic_store(&pool->next, 0);
    pool->n_busy = pool->n_threads - 1;
    pool->generation++;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    work(pool, 0);
    pthread_mutex_lock(&pool->lock);
    while (pool->n_busy > 0)
        pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}
