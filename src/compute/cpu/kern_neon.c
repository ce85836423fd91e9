/* NEON (Advanced SIMD of aarch64): 4 lanes; a tile of 6 x 16 sums takes 24 of the 32 registers. */
#include <arm_neon.h>
#include <string.h>

#define VL  4
#define MR  6
#define NRV 4
typedef float32x4_t vf;

static inline vf v_load(const float *p)
{
    return vld1q_f32(p);
}
static inline void v_store(float *p, vf a)
{
    vst1q_f32(p, a);
}
static inline vf v_loadn(const float *p, int n)
{
    float t[4] = {0};
    memcpy(t, p, (size_t)n * sizeof *t);
    return vld1q_f32(t);
}
static inline void v_storen(float *p, int n, vf a)
{
    float t[4];
    vst1q_f32(t, a);
    memcpy(p, t, (size_t)n * sizeof *t);
}
static inline vf v_set1(float x)
{
    return vdupq_n_f32(x);
}
static inline vf v_fma(vf a, vf b, vf c)
{
    return vfmaq_f32(c, a, b);
}
/* b if either is NaN, as on x86 (vmaxq would give NaN for a NaN in a, too) */
static inline vf v_max(vf a, vf b)
{
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}
static inline vf v_min(vf a, vf b)
{
    return vbslq_f32(vcltq_f32(a, b), a, b);
}
static inline vf v_round(vf a)
{
    return vrndnq_f32(a);
}
static inline vf power_of_two(int32x4_t n)
{
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
/* In two steps, as 2^n itself may lie outside the normal numbers. */
static inline vf v_ldexp(vf p, vf n)
{
    int32x4_t i = vcvtq_s32_f32(n), half = vshrq_n_s32(i, 1);
    return vmulq_f32(vmulq_f32(p, power_of_two(half)), power_of_two(vsubq_s32(i, half)));
}
static inline float v_hsum(vf a)
{
    return vaddvq_f32(a);
}
static inline float v_hmax(vf a)
{
    return vmaxnmvq_f32(a);
}

static inline void v_transpose(vf r[4])
{
    float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

#include "kern_bf16_simd.h"
#include "kern_simd.h"

void qc_kern_init_neon(qc_kern *kern)
{
    kern_slots(kern, "neon");
}

void qc_kern_bf16_init_neon(qc_kern_bf16 *kern)
{
    kern_bf16_slots(kern, "neon");
}
