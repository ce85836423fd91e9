/* Scalar reference of the loops of kern_quant.h. */
#include "kern_quant.h"

#include <math.h>

#define LANES QC_QUANT_LANES

static float fold(const float *lanes)
{
    float s[LANES];
    for (int i = 0; i < LANES; i++)
        s[i] = lanes[i];
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++)
            s[i] += s[i + n];
    return s[0];
}

/* code - zero of the value whose distance from 0 is v steps */
static float code_of(float v, float qmax, float zero)
{
    float q = rintf(v) + zero;
    q = q < 0 ? 0 : q;
    q = q > qmax ? qmax : q;
    return q - zero;
}

static void range_ref(const float *x, int64_t n, float *ret_lo, float *ret_hi)
{
    float lo = 0, hi = 0;
    for (int64_t j = 0; j < n; j++) {
        lo = x[j] < lo ? x[j] : lo;
        hi = x[j] > hi ? x[j] : hi;
    }
    *ret_lo = lo;
    *ret_hi = hi;
}

static void scan_ref(const float *x, const float *h, int64_t n, float qmax, const qc_quant_tries *tries,
                     float *ret_error)
{
    for (int i = 0; i < tries->n; i++) {
        float sum[LANES] = {0};
        for (int64_t j = 0; j < n; j++) {
            float e = x[j] - tries->scale[i] * code_of(x[j] * tries->inv[i], qmax, tries->zero[i]);
            sum[j % LANES] += h ? e * e * h[j] : e * e;
        }
        ret_error[i] = fold(sum);
    }
}

static void fit_ref(const float *x, const float *h, int64_t n, float qmax, float inv, float zero,
                    float *ret_dot, float *ret_norm)
{
    float dot[LANES] = {0}, norm[LANES] = {0};
    for (int64_t j = 0; j < n; j++) {
        float p = code_of(x[j] * inv, qmax, zero), hp = h ? h[j] * p : p;
        dot[j % LANES] += hp * x[j];
        norm[j % LANES] += hp * p;
    }
    *ret_dot = fold(dot);
    *ret_norm = fold(norm);
}

static void encode_ref(const float *x, const float *h, int64_t n, float qmax, float scale, float zero,
                       uint8_t *codes, qc_quant_sums *sums)
{
    float lo = -zero - 0.5f, hi = qmax - zero + 0.5f;
    for (int64_t j = 0; j < n; j++) {
        float v = x[j] / scale, p = code_of(v, qmax, zero);
        double e = (double)(x[j] - scale * p), w = (double)x[j], hj = h ? (double)h[j] : 1;
        codes[j] = (uint8_t)(p + zero);
        sums->n_clipped += v < lo || v > hi;
        sums->sq_error[j % LANES] += e * e * hj;
        sums->sq_weight[j % LANES] += w * w * hj;
    }
}

static void quantize_row(const float *w, int64_t n_cols, const qc_quant_spec *spec, const float *col_weight,
                         uint8_t *codes, float *scales, uint8_t *zeros, qc_quant_stats *stats)
{
    static const qc_quant_ops ops = {range_ref, scan_ref, fit_ref, encode_ref};
    qc_quant_row(&ops, w, n_cols, spec, col_weight, codes, scales, zeros, stats);
}

void qc_kern_init_quant_ref(qc_kern *kern)
{
    kern->quantize_row = quantize_row;
}
