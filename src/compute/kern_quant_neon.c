/* Loops of kern_quant.h with NEON (AArch64): a vector of 16 is four of 4. */
#include <arm_neon.h>
#include <stdint.h>

typedef struct vf {
    float32x4_t v[4];
} vf;

static inline vf vf_load(const float *p)
{
    return (vf){{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}

static inline vf vf_load_n(const float *p, int64_t n)
{
    float t[16] = {0};
    for (int64_t i = 0; i < n; i++)
        t[i] = p[i];
    return vf_load(t);
}

static inline vf vf_set1(float f)
{
    float32x4_t q = vdupq_n_f32(f);
    return (vf){{q, q, q, q}};
}

static inline vf vf_zero(void)
{
    return vf_set1(0);
}

#define FOURWISE(name, op)                                                                                   \
    static inline vf name(vf x, vf y)                                                                        \
    {                                                                                                        \
        return (vf){{op(x.v[0], y.v[0]), op(x.v[1], y.v[1]), op(x.v[2], y.v[2]), op(x.v[3], y.v[3])}};       \
    }
FOURWISE(vf_add, vaddq_f32)
FOURWISE(vf_sub, vsubq_f32)
FOURWISE(vf_mul, vmulq_f32)
FOURWISE(vf_div, vdivq_f32)
FOURWISE(vf_min, vminq_f32)
FOURWISE(vf_max, vmaxq_f32)

static inline vf vf_round(vf x)
{
    return (vf){{vrndnq_f32(x.v[0]), vrndnq_f32(x.v[1]), vrndnq_f32(x.v[2]), vrndnq_f32(x.v[3])}};
}

static inline float vf_fold(vf x)
{
    float32x4_t q = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
    float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
    return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}

static inline float vf_fold_min(vf x)
{
    return vminvq_f32(vminq_f32(vminq_f32(x.v[0], x.v[1]), vminq_f32(x.v[2], x.v[3])));
}

static inline float vf_fold_max(vf x)
{
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.v[0], x.v[1]), vmaxq_f32(x.v[2], x.v[3])));
}

static inline int vf_count_outside(vf x, vf lo, vf hi)
{
    uint32x4_t sum = vdupq_n_u32(0);
    for (int i = 0; i < 4; i++) /* a true comparison is -1 */
        sum = vsubq_u32(sum, vorrq_u32(vcltq_f32(x.v[i], lo.v[i]), vcgtq_f32(x.v[i], hi.v[i])));
    return (int)vaddvq_u32(sum);
}

static inline void vf_store_u8(uint8_t *p, vf x)
{
    uint16x8_t a = vcombine_u16(vmovn_u32(vcvtnq_u32_f32(x.v[0])), vmovn_u32(vcvtnq_u32_f32(x.v[1])));
    uint16x8_t b = vcombine_u16(vmovn_u32(vcvtnq_u32_f32(x.v[2])), vmovn_u32(vcvtnq_u32_f32(x.v[3])));
    vst1q_u8(p, vcombine_u8(vmovn_u16(a), vmovn_u16(b)));
}

static inline void add_squares2(double *sum, float32x2_t v, float32x2_t h, int weighted)
{
    float64x2_t d = vcvt_f64_f32(v), sq = vmulq_f64(d, d);
    sq = weighted ? vmulq_f64(sq, vcvt_f64_f32(h)) : sq;
    vst1q_f64(sum, vaddq_f64(vld1q_f64(sum), sq));
}

static inline void vf_add_squares(double *sum, vf x, const vf *h)
{
    vf w = h ? *h : vf_zero();
    for (int i = 0; i < 4; i++) {
        add_squares2(sum + 4 * i, vget_low_f32(x.v[i]), vget_low_f32(w.v[i]), h != 0);
        add_squares2(sum + 4 * i + 2, vget_high_f32(x.v[i]), vget_high_f32(w.v[i]), h != 0);
    }
}

#include "kern_quant_simd.h"

void qc_kern_init_quant_neon(qc_kern *kern)
{
    kern->quantize_row = quantize_row;
}
