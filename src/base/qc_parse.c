#include "qc_parse.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

bool qc_parse_i64(const char *text, int64_t min, int64_t max, int64_t *ret)
{
    const char *digits = text + (*text == '-' || *text == '+');
    if (!*digits || digits[strspn(digits, "0123456789")] != 0)
        return false;
    errno = 0;
    long long x = strtoll(text, NULL, 10);
    if (errno != 0 || x < min || x > max)
        return false;
    *ret = x;
    return true;
}

bool qc_parse_double(const char *text, double *ret)
{
    const char *p = text + (*text == '-' || *text == '+');
    size_t whole = strspn(p, "0123456789"), fraction = 0;
    p += whole;
    if (*p == '.') {
        fraction = strspn(p + 1, "0123456789");
        p += 1 + fraction;
    }
    if (whole + fraction == 0)
        return false;
    if (*p == 'e' || *p == 'E') {
        p += 1 + (p[1] == '-' || p[1] == '+');
        size_t n_digits = strspn(p, "0123456789");
        if (n_digits == 0)
            return false;
        p += n_digits;
    }
    double x = strtod(text, NULL);
    if (*p || !isfinite(x))
        return false;
    *ret = x;
    return true;
}
