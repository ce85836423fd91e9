/* Distribution functions that statistical tests and intervals need. Probabilities are lower tails; nothing
 * fails: a NaN or an argument outside the domain gives NaN. */
#ifndef QC_DIST_H
#define QC_DIST_H

#include <stdint.h>

/* Standard normal: distribution function and its inverse (0 < p < 1). */
double qc_normal_cdf(double x);
double qc_normal_quantile(double p);

/* Student's t with df > 0 degrees of freedom. The upper tail keeps its digits where it is tiny. */
double qc_t_upper(double t, double df);
double qc_t_quantile(double p, double df);

/* x with qc_t_upper(x, df) = p, for p down to 1e-300. */
double qc_t_upper_quantile(double p, double df);

/* Two-sided p of b against c discordant pairs (McNemar 1947), exact: binomial with 1/2; 1 where there are
 * none. */
double qc_mcnemar_p(int64_t b, int64_t c);

#endif
