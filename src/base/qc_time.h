/* Wall time for reports and progress. */
#ifndef QC_TIME_H
#define QC_TIME_H

#include <time.h>

/* Seconds of the monotonic clock; differences alone mean something. */
static inline double qc_now_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
