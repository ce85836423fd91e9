/* The loops of kern_quant.h over vectors of 16 float32. The including file has defined vf (such a vector) and
 *   vf_load(p), vf_load_n(p, n) (zeros behind n < 16), vf_set1(f), vf_zero()
 *   vf_add, vf_sub, vf_mul, vf_div, vf_min, vf_max, vf_round (to integers, halves to even)
 *   vf_fold(v), vf_fold_min(v), vf_fold_max(v)
 *   vf_count_outside(v, lo, hi)   number of elements < lo or > hi
 *   vf_store_u8(p, v)             16 integers 0 .. 255 as bytes
 *   vf_add_squares(sum, v, h)     sum[i] += (double)v[i]^2 * h[i], h NULL = 1 (a vf pointer)
 * Elements that pad the last vector are zeros: their code is the zero point, their error 0. */
#include "kern_quant.h"

#include <string.h>

#define LANES QC_QUANT_LANES

static inline vf load_any(const float *p, int64_t n)
{
    return n >= LANES ? vf_load(p) : vf_load_n(p, n);
}

/* Lowest and highest code - zero. */
typedef struct bounds {
    vf lo, hi;
} bounds;

static inline bounds bounds_of(float qmax, float zero)
{
    return (bounds){vf_set1(0 - zero), vf_set1(qmax - zero)};
}

static inline vf steps_of(vf v, bounds b)
{
    return vf_min(vf_max(vf_round(v), b.lo), b.hi);
}

static void range_simd(const float *x, int64_t n, float *ret_lo, float *ret_hi)
{
    vf lo = vf_zero(), hi = vf_zero();
    for (int64_t j = 0; j < n; j += LANES) {
        vf v = load_any(x + j, n - j);
        lo = vf_min(lo, v);
        hi = vf_max(hi, v);
    }
    *ret_lo = vf_fold_min(lo);
    *ret_hi = vf_fold_max(hi);
}

static inline vf add_error(vf sum, vf v, const float *h, int64_t n, vf scale, vf inv, bounds b)
{
    vf e = vf_sub(v, vf_mul(scale, steps_of(vf_mul(v, inv), b)));
    vf sq = vf_mul(e, e);
    return vf_add(sum, h ? vf_mul(sq, load_any(h, n)) : sq);
}

/* Two tries at once: each value is loaded once, and two chains of sums hide the latency of addition. */
static inline __attribute__((always_inline)) void scan_pair(const float *x, const float *h, int64_t n,
                                                            float qmax, const qc_quant_tries *t, int a, int b,
                                                            float *ret_error)
{
    vf scale_a = vf_set1(t->scale[a]), inv_a = vf_set1(t->inv[a]), sum_a = vf_zero();
    vf scale_b = vf_set1(t->scale[b]), inv_b = vf_set1(t->inv[b]), sum_b = vf_zero();
    bounds bounds_a = bounds_of(qmax, t->zero[a]), bounds_b = bounds_of(qmax, t->zero[b]);
    for (int64_t j = 0; j < n; j += LANES) {
        vf v = load_any(x + j, n - j);
        sum_a = add_error(sum_a, v, h ? h + j : NULL, n - j, scale_a, inv_a, bounds_a);
        sum_b = add_error(sum_b, v, h ? h + j : NULL, n - j, scale_b, inv_b, bounds_b);
    }
    ret_error[a] = vf_fold(sum_a);
    ret_error[b] = vf_fold(sum_b);
}

static void scan_simd(const float *x, const float *h, int64_t n, float qmax, const qc_quant_tries *tries,
                      float *ret_error)
{
    for (int i = 0; i < tries->n; i += 2) {
        int next = i + 1 < tries->n ? i + 1 : i;
        if (h)
            scan_pair(x, h, n, qmax, tries, i, next, ret_error);
        else
            scan_pair(x, NULL, n, qmax, tries, i, next, ret_error);
    }
}

static void fit_simd(const float *x, const float *h, int64_t n, float qmax, float inv, float zero,
                     float *ret_dot, float *ret_norm)
{
    vf dot = vf_zero(), norm = vf_zero(), vinv = vf_set1(inv);
    bounds b = bounds_of(qmax, zero);
    for (int64_t j = 0; j < n; j += LANES) {
        vf v = load_any(x + j, n - j), p = steps_of(vf_mul(v, vinv), b);
        vf hp = h ? vf_mul(load_any(h + j, n - j), p) : p;
        dot = vf_add(dot, vf_mul(hp, v));
        norm = vf_add(norm, vf_mul(hp, p));
    }
    *ret_dot = vf_fold(dot);
    *ret_norm = vf_fold(norm);
}

static inline __attribute__((always_inline)) void encode_any(const float *x, const float *h, int64_t n,
                                                             float qmax, float scale, float zero,
                                                             uint8_t *codes, qc_quant_sums *sums)
{
    vf vscale = vf_set1(scale), vzero = vf_set1(zero);
    vf lo = vf_set1(-zero - 0.5f), hi = vf_set1(qmax - zero + 0.5f);
    bounds b = bounds_of(qmax, zero);
    for (int64_t j = 0; j < n; j += LANES) {
        vf v = load_any(x + j, n - j), q = vf_div(v, vscale), p = steps_of(q, b);
        vf e = vf_sub(v, vf_mul(vscale, p)), hv = h ? load_any(h + j, n - j) : vf_zero();
        sums->n_clipped += vf_count_outside(q, lo, hi);
        vf_add_squares(sums->sq_error, e, h ? &hv : NULL);
        vf_add_squares(sums->sq_weight, v, h ? &hv : NULL);
        if (n - j >= LANES) {
            vf_store_u8(codes + j, vf_add(p, vzero));
        } else {
            uint8_t tail[LANES];
            vf_store_u8(tail, vf_add(p, vzero));
            memcpy(codes + j, tail, (size_t)(n - j));
        }
    }
}

static void encode_simd(const float *x, const float *h, int64_t n, float qmax, float scale, float zero,
                        uint8_t *codes, qc_quant_sums *sums)
{
    if (h)
        encode_any(x, h, n, qmax, scale, zero, codes, sums);
    else
        encode_any(x, NULL, n, qmax, scale, zero, codes, sums);
}

static void quantize_row(const float *w, int64_t n_cols, const qc_quant_spec *spec, const float *col_weight,
                         uint8_t *codes, float *scales, uint8_t *zeros, qc_quant_stats *stats)
{
    static const qc_quant_ops ops = {range_simd, scan_simd, fit_simd, encode_simd};
    qc_quant_row(&ops, w, n_cols, spec, col_weight, codes, scales, zeros, stats);
}
