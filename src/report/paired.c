#include "paired.h"

#include "qc_dist.h"

#include <math.h>

qc_mean qc_mean_of(const double *values, int64_t n)
{
    qc_mean m = {.n = n, .se = NAN};
    double ss = 0;
    for (int64_t i = 0; i < n; i++)
        m.mean += values[i] / (double)n;
    for (int64_t i = 0; i < n; i++)
        ss += (values[i] - m.mean) * (values[i] - m.mean);
    if (n > 1)
        m.se = sqrt(ss / (double)(n - 1) / (double)n);
    return m;
}

int qc_mean_at_most_zero(qc_mean m, double p)
{
    double reach = qc_t_quantile(p, (double)(m.n - 1)) * m.se;
    return m.mean + reach <= 0 ? 1 : m.mean - reach > 0 ? -1 : 0;
}
