/* Means over windows, and what they show: what gates and comparisons decide by. */
#ifndef QC_PAIRED_H
#define QC_PAIRED_H

#include <stdint.h>

typedef struct qc_mean {
    double mean;
    double se; /* standard error; NaN for n < 2 */
    int64_t n; /* of values */
} qc_mean;

/* Mean of n >= 1 values. */
qc_mean qc_mean_of(const double *values, int64_t n);

/* Is a mean at most 0? 1 shown, -1 its opposite shown, 0 undecided, each with one-sided confidence
 * 0.5 < p < 1 by Student's t over n >= 2 values. Equal values leave nothing undecided. */
int qc_mean_at_most_zero(qc_mean m, double p);

#endif
