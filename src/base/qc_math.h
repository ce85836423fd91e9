/* Checked integer arithmetic for sizes that come from files, and the little-endian integers there. */
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
static inline uint64_t qc_max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Integer of n_bytes (up to 8) that stands at p, least significant byte first; and back. */
static inline uint64_t qc_get_le(const uint8_t *p, int n_bytes)
{
    uint64_t v = 0;
    for (int i = n_bytes - 1; i >= 0; i--)
        v = v << 8 | p[i];
    return v;
}

static inline void qc_put_le(uint8_t *p, uint64_t value, int n_bytes)
{
    for (int i = 0; i < n_bytes; i++, value >>= 8)
        p[i] = (uint8_t)value;
}

#endif
