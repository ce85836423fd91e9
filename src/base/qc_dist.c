#include "qc_dist.h"

#include <math.h>

double qc_normal_cdf(double x)
{
    return 0.5 * erfc(-x / sqrt(2));
}

/* x in [lo, hi] with f(x) = p for a falling f. */
static double bisect(double (*f)(double x, double df), double df, double p, double lo, double hi)
{
    for (int i = 0; i < 200 && lo < hi; i++) {
        double mid = 0.5 * (lo + hi);
        if (mid <= lo || mid >= hi)
            break;
        if (f(mid, df) > p)
            lo = mid;
        else
            hi = mid;
    }
    return 0.5 * (lo + hi);
}

static double normal_upper(double x, double df)
{
    (void)df;
    return 0.5 * erfc(x / sqrt(2));
}

double qc_normal_quantile(double p)
{
    if (!(p > 0 && p < 1))
        return NAN;
    return p > 0.5 ? -bisect(normal_upper, 0, p, -40, 0) : -bisect(normal_upper, 0, p, 0, 40);
}

/* Continued fraction of the incomplete beta function (DLMF 8.17.22), evaluated from the front (Lentz); it
 * converges fast for x < (a + 1) / (a + b + 2). */
static double beta_fraction(double a, double b, double x)
{
    const double tiny = 1e-300;
    double c = 1, d = 1 - (a + b) * x / (a + 1);
    d = 1 / (fabs(d) < tiny ? tiny : d);
    double f = d;
    for (int m = 1; m <= 10000; m++) {
        double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
        double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
        for (int k = 0; k < 2; k++) {
            double term = k ? odd : even;
            d = 1 + term * d;
            c = 1 + term / c;
            d = 1 / (fabs(d) < tiny ? tiny : d);
            c = fabs(c) < tiny ? tiny : c;
            f *= c * d;
        }
        if (fabs(c * d - 1) < 1e-16)
            break;
    }
    return f;
}

/* Regularised incomplete beta function I_x(a, b). */
static double beta_cdf(double a, double b, double x)
{
    if (x <= 0)
        return 0;
    if (x >= 1)
        return 1;
    double front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x));
    if (x < (a + 1) / (a + b + 2))
        return front * beta_fraction(a, b, x) / a;
    return 1 - front * beta_fraction(b, a, 1 - x) / b;
}

double qc_t_upper(double t, double df)
{
    if (!(df > 0) || isnan(t))
        return NAN;
    if (t < 0)
        return 1 - qc_t_upper(-t, df);
    return 0.5 * beta_cdf(df / 2, 0.5, df / (df + t * t));
}

double qc_t_upper_quantile(double p, double df)
{
    if (!(p > 0 && p < 1) || !(df > 0))
        return NAN;
    if (p > 0.5)
        return -qc_t_upper_quantile(1 - p, df);
    double hi = 1;
    while (qc_t_upper(hi, df) > p && hi < 1e300)
        hi *= 2;
    return bisect(qc_t_upper, df, p, 0, hi);
}

double qc_t_quantile(double p, double df)
{
    return -qc_t_upper_quantile(p, df);
}

double qc_mcnemar_p(int64_t b, int64_t c)
{
    int64_t n = b + c, least = b < c ? b : c;
    if (n == 0 || 2 * least == n)
        return 1;
    /* P(X <= least) with X binomial(n, 1/2) is I_1/2(n - least, least + 1). */
    return fmin(1, 2 * beta_cdf((double)(n - least), (double)(least + 1), 0.5));
}
