/* Fixed pool of threads. Work is cut into tasks by the data alone, never by the number of threads, so results
 * can not depend on it: a task writes only its own outputs, and sums are taken in task order afterwards. */
#ifndef QC_THREADS_H
#define QC_THREADS_H

#include "qc_err.h"

#include <stdint.h>

typedef struct qc_pool qc_pool;

/* One task. `thread` (0 .. qc_pool_size - 1) selects per-thread scratch and nothing else. */
typedef void (*qc_task_fn)(void *ctx, int64_t task, int thread);

/* Processors that this process may run on, 1 or more. */
int qc_usable_processors(void);

/* n_threads <= 0: one per usable processor. The calling thread works too, so n_threads - 1 are started. */
int qc_pool_new(int n_threads, qc_pool **ret, qc_err *err) QC_WARN_UNUSED;
void qc_pool_free(qc_pool *pool);

/* Number of threads, >= 1. NULL counts as one. */
int qc_pool_size(const qc_pool *pool);

/* Run tasks 0 .. n_tasks - 1 in any order and wait for all. NULL pool: in order on the calling thread. Not
 * reentrant: a task may not call it on the same pool. */
void qc_pool_run(qc_pool *pool, int64_t n_tasks, qc_task_fn fn, void *ctx);

#endif
