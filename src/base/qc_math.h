/* Checked integer arithmetic for sizes that come from files. */
#ifndef QC_MATH_H
#define QC_MATH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* *ret = a + b / a * b; false (ret undefined) on overflow. */
static inline bool qc_add_size(size_t a, size_t b, size_t *ret)
{
    return !__builtin_add_overflow(a, b, ret);
}
static inline bool qc_mul_size(size_t a, size_t b, size_t *ret)
{
    return !__builtin_mul_overflow(a, b, ret);
}

/* Smallest multiple of `to` (> 0) that is >= a; the caller knows that it fits. */
static inline int64_t qc_round_up(int64_t a, int64_t to)
{
    return (a + to - 1) / to * to;
}
static inline int64_t qc_ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}
static inline int64_t qc_min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
static inline int64_t qc_max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

#endif
