/* Vector kernels, written once. A file kern_ISA.c defines the type vf of VL floats and the primitives listed
 * here as static inline functions, the tile MR x (NRV * VL) of `gemm`, and includes this file; `kern_slots`
 * then fills the table. Partial vectors: n elements, 0 < n < VL; loads give zeros beyond. v_load v_store
 * v_loadn v_storen v_set1; v_fma(a, b, c) = a b + c; v_max(a, b), v_min(a, b) = b if either is NaN; v_round
 * to the nearest integer; v_ldexp(p, n) = p 2^n for integers n in -151 .. 129, with overflow to infinity;
 *   v_hsum and v_hmax across the lanes; v_transpose: VL x VL in place.
 * + - * / come from the compiler's vector types. */
#ifndef QC_KERN_SIMD_H
#define QC_KERN_SIMD_H

#include "kern.h"

#include <math.h>
#include <stdint.h>

enum { NR = NRV * VL, LINES = NR / 16 /* cache lines per row of a tile */ };

#define INLINE static inline __attribute__((always_inline))

/* exp within 1 ulp (0.957 measured over 1 in 1009 of all x <= 0). x = n ln 2 + r; the polynomial 1 + r + r^2
 * P(r) is within 0.06 u of e^r on |r| <= 0.347 (minimax, own fit). x is held in -104 .. 89, where the result
 * is already 0 or infinite; NaN stays NaN. */
typedef struct exp_parts {
    vf n, em1; /* e^x = 2^n (1 + em1) */
} exp_parts;

INLINE exp_parts exp_reduce(vf x)
{
    x = v_max(v_set1(-104), v_min(v_set1(89), x));
    vf n = v_round(x * v_set1(1.44269504f));
    vf r = v_fma(n, v_set1(-0.693359375f), x); /* the first part of ln 2 has 9 bits: n times it is exact */
    r = v_fma(n, v_set1(2.12194440e-4f), r);
    vf p = v_fma(r, v_set1(0.00138144672f), v_set1(0.00836878084f));
    p = v_fma(p, r, v_set1(0.0416683927f));
    p = v_fma(p, r, v_set1(0.166665196f));
    p = v_fma(p, r, v_set1(0.49999994f));
    return (exp_parts){n, v_fma(r * r, p, r)};
}

INLINE vf v_exp(vf x)
{
    exp_parts e = exp_reduce(x);
    return v_ldexp(v_set1(1) + e.em1, e.n);
}

/* tanh x = em / (em + 2) with em = e^2x - 1, formed without cancellation near 0; +-1 from |x| = 10 on. */
INLINE vf v_tanh(vf x)
{
    exp_parts e = exp_reduce(v_max(v_set1(-20), v_min(v_set1(20), x + x)));
    vf two_n = v_ldexp(v_set1(1), e.n);
    vf em = v_fma(two_n, e.em1, two_n - v_set1(1));
    return em / (em + v_set1(2));
}

/* Run BODY(i, LOAD, STORE) over i = 0, VL .. with whole vectors, then once with the rest. */
#define FOR_VECTORS(n, BODY)                                                                                 \
    do {                                                                                                     \
        int64_t i = 0, n_ = (n);                                                                             \
        for (; i + VL <= n_; i += VL)                                                                        \
            BODY(LOAD_WHOLE, STORE_WHOLE);                                                                   \
        if (i < n_) {                                                                                        \
            int rest = (int)(n_ - i);                                                                        \
            BODY(LOAD_REST, STORE_REST);                                                                     \
        }                                                                                                    \
    } while (0)
#define LOAD_WHOLE(p)     v_load(p)
#define STORE_WHOLE(p, v) v_store(p, v)
#define LOAD_REST(p)      v_loadn(p, rest)
#define STORE_REST(p, v)  v_storen(p, rest, v)

/* ---- gemm ---- */

/* M rows of c; M is a constant at every call, so that the sums stay in registers. Rows are reached by a
 * pointer per three and multiples of the stride: more pointers than that would not fit the integer registers.
 * Every 8 steps one line of c, needed at the end, and one from `ahead`, needed later, are asked for; all at
 * once they would take the places of the loads that are needed now. */
INLINE void gemm_rows(int M, float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t n,
                      int64_t k, bool accumulate, uintptr_t ahead)
{
    vf sum[MR][NRV];
    const float *row[(MR + 2) / 3];
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NRV; j++)
            sum[i][j] = v_set1(0);
#pragma GCC unroll 16
    for (int i = 0; i < (M + 2) / 3; i++)
        row[i] = a + 3 * i * lda;
    for (int64_t p = 0; p < k; p++) {
        if (p % 8 == 0) {
            int64_t line = p / 8;
            __builtin_prefetch((const void *)(ahead + 64 * (uintptr_t)line), 0, 2);
            if (line < M * LINES)
                __builtin_prefetch((const void *)((uintptr_t)(c + line / LINES * ldc) + line % LINES * 64),
                                   1);
        }
        vf w[NRV];
#pragma GCC unroll 4
        for (int j = 0; j < NRV; j++)
            w[j] = v_load(b + j * VL);
        b += NR;
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) {
            vf x = v_set1(row[i / 3][(i % 3) * lda]);
#pragma GCC unroll 4
            for (int j = 0; j < NRV; j++)
                sum[i][j] = v_fma(x, w[j], sum[i][j]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < (M + 2) / 3; i++)
            row[i]++;
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NRV; j++) {
            float *to = c + i * ldc + j * VL;
            int64_t left = n - j * VL;
            vf y = sum[i][j];
            if (left >= VL) {
                if (accumulate)
                    y += v_load(to);
                v_store(to, y);
            } else if (left > 0) {
                if (accumulate)
                    y += v_loadn(to, (int)left);
                v_storen(to, (int)left, y);
            }
        }
}

static void gemm_simd(float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t m,
                      int64_t n, int64_t k, bool accumulate)
{
    uintptr_t ahead = (uintptr_t)(b + k * NR); /* the panel that follows, a piece per tile */
    for (; m >= MR; m -= MR, a += MR * lda, c += MR * ldc, ahead += 8 * (uintptr_t)k)
        gemm_rows(MR, c, ldc, a, lda, b, n, k, accumulate, ahead);
    switch (m) {
#define ROWS(M)                                                                                              \
    case M:                                                                                                  \
        if (M < MR)                                                                                          \
            gemm_rows(M < MR ? M : 1, c, ldc, a, lda, b, n, k, accumulate, ahead);                           \
        break
        ROWS(1);
        ROWS(2);
        ROWS(3);
        ROWS(4);
        ROWS(5);
        ROWS(6);
        ROWS(7);
        ROWS(8);
        ROWS(9);
        ROWS(10);
        ROWS(11);
#undef ROWS
    default:
        break;
    }
}

/* Columns j .. j + VL - 1 of the rows i .. i + VL - 1 that exist become rows of the panel. */
static void pack_simd(float *dst, const float *src, int64_t lds, int64_t n, int64_t k)
{
    vf t[VL];
    for (int64_t j = 0; j < k; j += VL)
        for (int64_t i = 0; i < NR; i += VL) {
            int64_t cols = k - j < VL ? k - j : VL;
            for (int r = 0; r < VL; r++) {
                const float *p = src + (i + r) * lds + j;
                t[r] = i + r >= n ? v_set1(0) : cols == VL ? v_load(p) : v_loadn(p, (int)cols);
            }
            v_transpose(t);
            for (int64_t r = 0; r < cols; r++)
                v_store(dst + (j + r) * NR + i, t[r]);
        }
}

/* Rows j .. j + VL - 1 of the panel become columns of the rows i .. i + VL - 1 that exist. */
static void unpack_simd(float *dst, int64_t ldd, const float *src, int64_t n, int64_t k, float alpha)
{
    vf t[VL], a = v_set1(alpha);
    for (int64_t i = 0; i < n; i += VL)
        for (int64_t j = 0; j < k; j += VL) {
            int64_t rows = n - i < VL ? n - i : VL, cols = k - j < VL ? k - j : VL;
            for (int r = 0; r < VL; r++) {
                t[r] = v_set1(0);
                if (r < cols)
                    t[r] = a * v_load(src + (j + r) * NR + i);
            }
            v_transpose(t);
            for (int64_t r = 0; r < rows; r++)
                if (cols == VL)
                    v_store(dst + (i + r) * ldd + j, t[r]);
                else
                    v_storen(dst + (i + r) * ldd + j, (int)cols, t[r]);
        }
}

/* ---- rows and elements ---- */

static void rms_norm_simd(float *y, const float *x, const float *gain, float gain_offset, int64_t dim,
                          float eps)
{
    vf s0 = v_set1(0), s1 = s0, s2 = s0, s3 = s0;
    int64_t j = 0;
    for (; j + 4 * VL <= dim; j += 4 * VL) {
        vf a = v_load(x + j), b = v_load(x + j + VL), c = v_load(x + j + 2 * VL), d = v_load(x + j + 3 * VL);
        s0 = v_fma(a, a, s0);
        s1 = v_fma(b, b, s1);
        s2 = v_fma(c, c, s2);
        s3 = v_fma(d, d, s3);
    }
    for (; j < dim; j += VL) {
        vf a = dim - j >= VL ? v_load(x + j) : v_loadn(x + j, (int)(dim - j));
        s0 = v_fma(a, a, s0);
    }
    double mean = (double)v_hsum((s0 + s1) + (s2 + s3)) / (double)dim;
    vf r = v_set1((float)(1 / sqrt(mean + (double)eps))), offset = v_set1(gain_offset);
#define BODY(LOAD, STORE) STORE(y + i, LOAD(x + i) * r * (LOAD(gain + i) + offset))
    FOR_VECTORS(dim, BODY);
#undef BODY
}

static void rope_simd(float *x, const float *cos_t, const float *sin_t, int64_t half)
{
#define BODY(LOAD, STORE)                                                                                    \
    do {                                                                                                     \
        vf a = LOAD(x + i), b = LOAD(x + half + i), c = LOAD(cos_t + i), s = LOAD(sin_t + i);                \
        STORE(x + i, v_fma(a, c, v_set1(0) - b * s));                                                        \
        STORE(x + half + i, v_fma(b, c, a * s));                                                             \
    } while (0)
    FOR_VECTORS(half, BODY);
#undef BODY
}

static void silu_simd(float *y, const float *gate, const float *up, int64_t n)
{
#define BODY(LOAD, STORE)                                                                                    \
    do {                                                                                                     \
        vf g = LOAD(gate + i);                                                                               \
        STORE(y + i, g / (v_set1(1) + v_exp(v_set1(0) - g)) * LOAD(up + i));                                 \
    } while (0)
    FOR_VECTORS(n, BODY);
#undef BODY
}

/* 0.5 g (1 + tanh u) = g / (1 + exp(-2u)), u = sqrt(2 / pi) (g + 0.044715 g^3) */
static void gelu_simd(float *y, const float *gate, const float *up, int64_t n)
{
    const vf c1 = v_set1(-1.59576912f), c3 = v_set1(-0.0713548163f);
#define BODY(LOAD, STORE)                                                                                    \
    do {                                                                                                     \
        vf g = LOAD(gate + i);                                                                               \
        STORE(y + i, g / (v_set1(1) + v_exp(g * v_fma(g * g, c3, c1))) * LOAD(up + i));                      \
    } while (0)
    FOR_VECTORS(n, BODY);
#undef BODY
}

static void gated_act_simd(float *y, const float *gate, const float *up, int64_t n, qc_activation act)
{
    if (act == QC_ACT_GELU_TANH)
        gelu_simd(y, gate, up, n);
    else
        silu_simd(y, gate, up, n);
}

static void add_simd(float *y, const float *x, float alpha, int64_t n)
{
    vf a = v_set1(alpha);
#define BODY(LOAD, STORE) STORE(y + i, v_fma(a, LOAD(x + i), LOAD(y + i)))
    FOR_VECTORS(n, BODY);
#undef BODY
}

static void scale_simd(float *y, const float *x, float alpha, int64_t n)
{
    vf a = v_set1(alpha);
#define BODY(LOAD, STORE) STORE(y + i, a * LOAD(x + i))
    FOR_VECTORS(n, BODY);
#undef BODY
}

static void softcap_simd(float *y, const float *x, float cap, int64_t n)
{
    vf c = v_set1(cap);
#define BODY(LOAD, STORE) STORE(y + i, c * v_tanh(LOAD(x + i) / c))
    FOR_VECTORS(n, BODY);
#undef BODY
}

/* ---- softmax and score ---- */

static float softmax_simd(float *s, int64_t lo, int64_t hi, int64_t n, qc_softmax_state *state)
{
    vf m = v_set1(state->max);
    int64_t j = lo;
    for (; j + VL <= hi; j += VL)
        m = v_max(m, v_load(s + j));
    float max = v_hmax(m);
    for (; j < hi; j++)
        max = s[j] > max ? s[j] : max;
    for (j = 0; j < lo; j++)
        s[j] = 0;
    vf sum = v_set1(0), vmax = v_set1(max);
    for (j = lo; j + VL <= hi; j += VL) {
        vf e = v_exp(v_load(s + j) - vmax);
        v_store(s + j, e);
        sum = sum + e;
    }
    float total = v_hsum(sum);
    if (j < hi) {
        float e[VL];
        v_store(e, v_exp(v_loadn(s + j, (int)(hi - j)) - vmax));
        for (int i = 0; j < hi; i++, j++)
            total += s[j] = e[i];
    }
    for (; j < n; j++)
        s[j] = 0;
    float shrink = max == state->max ? 1 : (float)exp((double)state->max - (double)max);
    *state = (qc_softmax_state){.max = max, .sum = state->sum * shrink + total};
    return shrink;
}

/* Largest of n values; *bad is set if one is NaN or infinite (x * 0 is then NaN, else 0). */
INLINE float block_max(const float *x, int64_t n, int *bad)
{
    vf m0 = v_set1(x[0]), m1 = m0, z0 = v_set1(0), z1 = z0;
    int64_t j = 0;
    for (; j + 2 * VL <= n; j += 2 * VL) {
        vf a = v_load(x + j), b = v_load(x + j + VL);
        m0 = v_max(m0, a);
        m1 = v_max(m1, b);
        z0 = v_fma(a, v_set1(0), z0);
        z1 = v_fma(b, v_set1(0), z1);
    }
    float max = v_hmax(v_max(m0, m1)), zero = v_hsum(z0 + z1);
    for (; j < n; j++) {
        max = x[j] > max ? x[j] : max;
        zero += x[j] * 0;
    }
    *bad |= zero != 0;
    return max;
}

INLINE int32_t first_equal(const float *x, float value)
{
    int32_t i = 0;
    while (x[i] != value)
        i++;
    return i;
}

/* Raise *max to that of this block; returns the factor for sums over earlier blocks. */
INLINE double raise_max(float *max, int32_t *top, const float *x, float block, int32_t id0)
{
    if (!(block > *max) && *top >= 0)
        return 1;
    double shrink = exp((double)*max - (double)block);
    *max = block;
    *top = id0 + first_equal(x, block);
    return shrink;
}

/* Terms of one vector of logits, added to three lanes of sums. */
#define SCORE_TERMS(va, vb)                                                                                  \
    do {                                                                                                     \
        vf a_ = (va), b_ = (vb), e_ = v_exp(a_ - max_a);                                                     \
        sa = sa + e_;                                                                                        \
        sb = sb + v_exp(b_ - max_b);                                                                         \
        sc = v_fma(e_, a_ - b_, sc);                                                                         \
    } while (0)

/* Float32 sums over 8 vectors, then double: the sums keep the accuracy of the single terms. */
enum { SCORE_RUN = 8 * VL };

INLINE void score_one(qc_score *s, const float *a, int64_t n)
{
    vf max_a = v_set1(s->max_a);
    int64_t i = 0;
    while (i + VL <= n) {
        int64_t end = i + SCORE_RUN < n ? i + SCORE_RUN : n;
        vf sa = v_set1(0);
        for (; i + VL <= end; i += VL)
            sa = sa + v_exp(v_load(a + i) - max_a);
        s->sum_a += (double)v_hsum(sa);
    }
    if (i < n) {
        float e[VL];
        v_store(e, v_exp(v_loadn(a + i, (int)(n - i)) - max_a));
        for (int r = 0; r < n - i; r++)
            s->sum_a += (double)e[r];
    }
}

INLINE void score_two(qc_score *s, const float *a, const float *b, int64_t n)
{
    vf max_a = v_set1(s->max_a), max_b = v_set1(s->max_b);
    int64_t i = 0;
    while (i + VL <= n) {
        int64_t end = i + SCORE_RUN < n ? i + SCORE_RUN : n;
        vf sa = v_set1(0), sb = sa, sc = sa;
        for (; i + VL <= end; i += VL)
            SCORE_TERMS(v_load(a + i), v_load(b + i));
        s->sum_a += (double)v_hsum(sa);
        s->sum_b += (double)v_hsum(sb);
        s->cross += (double)v_hsum(sc);
    }
    if (i < n) {
        float ea[VL], eb[VL];
        v_store(ea, v_exp(v_loadn(a + i, (int)(n - i)) - max_a));
        v_store(eb, v_exp(v_loadn(b + i, (int)(n - i)) - max_b));
        for (int r = 0; r < n - i; r++) {
            s->sum_a += (double)ea[r];
            s->sum_b += (double)eb[r];
            s->cross += (double)ea[r] * ((double)a[i + r] - (double)b[i + r]);
        }
    }
}

static void score_block_simd(qc_score *s, const float *a, const float *b, int64_t n, int32_t id0)
{
    if (n == 0)
        return;
    int bad = 0;
    float block_a = block_max(a, n, &bad), block_b = b ? block_max(b, n, &bad) : 0;
    if (bad) { /* rare: leave the sorting out to the reference */
        qc_kern_score_block_ref(s, a, b, n, id0);
        return;
    }
    double shrink = raise_max(&s->max_a, &s->top_a, a, block_a, id0);
    s->sum_a *= shrink;
    s->cross *= shrink;
    if (!b) {
        score_one(s, a, n);
        return;
    }
    s->sum_b *= raise_max(&s->max_b, &s->top_b, b, block_b, id0);
    score_two(s, a, b, n);
}

/* ---- activations and rounding ---- */

INLINE vf v_abs(vf a)
{
    return v_max(a, v_set1(0) - a); /* NaN stays: the second operand is NaN, too */
}

/* Up to 4 vectors of columns at once: whole cache lines of a row. */
INLINE void stats_columns(int N, float *sum_abs, float *max_abs, const float *x, int64_t ldx,
                          int64_t n_tokens)
{
    vf sum[4], max[4];
#pragma GCC unroll 4
    for (int v = 0; v < N; v++) {
        sum[v] = v_set1(0);
        max[v] = v_load(max_abs + v * VL);
    }
    for (int64_t t = 0; t < n_tokens; t++) {
#pragma GCC unroll 4
        for (int v = 0; v < N; v++) {
            vf a = v_abs(v_load(x + t * ldx + v * VL));
            sum[v] += a;
            max[v] = v_max(a, max[v]);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < N; v++) {
        v_store(sum_abs + v * VL, v_load(sum_abs + v * VL) + sum[v]);
        v_store(max_abs + v * VL, max[v]);
    }
}

static void column_stats_simd(float *sum_abs, float *max_abs, const float *x, int64_t ldx, int64_t n_tokens,
                              int64_t n)
{
    int64_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL)
        stats_columns(4, sum_abs + i, max_abs + i, x + i, ldx, n_tokens);
    for (; i + VL <= n; i += VL)
        stats_columns(1, sum_abs + i, max_abs + i, x + i, ldx, n_tokens);
    if (i == n)
        return;
    int rest = (int)(n - i);
    vf sum = v_set1(0), max = v_loadn(max_abs + i, rest);
    for (int64_t t = 0; t < n_tokens; t++) {
        vf a = v_abs(v_loadn(x + t * ldx + i, rest));
        sum += a;
        max = v_max(a, max);
    }
    v_storen(sum_abs + i, rest, v_loadn(sum_abs + i, rest) + sum);
    v_storen(max_abs + i, rest, max);
}

static void quantize_act_simd(float *y, const float *x, int64_t n, float qmax)
{
    vf m = v_set1(0);
#define BODY(LOAD, STORE) m = v_max(v_abs(LOAD(x + i)), m)
    FOR_VECTORS(n, BODY);
#undef BODY
    float step = v_hmax(m) / qmax;
    /* step 0: all are 0 or NaN, or so small that they count as 0; 0 or NaN is left of x * 0 / 1 */
    vf s = v_set1(step), by = v_set1(step > 0 ? step : 1), once = v_set1(step > 0 ? 1 : 0);
    vf hi = v_set1(qmax), lo = v_set1(-qmax);
#define BODY(LOAD, STORE) STORE(y + i, s * v_max(lo, v_min(hi, v_round(LOAD(x + i) * once / by))))
    FOR_VECTORS(n, BODY);
#undef BODY
}

typedef int32_t vmask __attribute__((vector_size(sizeof(vf))));

/* a where the mask is set, else b */
INLINE vf v_select(vmask mask, vf a, vf b)
{
    return (vf)((mask & (vmask)a) | (~mask & (vmask)b));
}

/* Column j of panel q. */
INLINE void round_column(const qc_round_part *b, int64_t j, int64_t q, bool again)
{
    vf qmax = v_set1(b->qmax), inv = v_set1(b->inv ? b->inv[j] : 1), change[NRV];
    const float *scales = b->scales + q * b->grid_step + b->group_of[j] * NR;
    const float *zeros = b->zeros + q * b->grid_step + b->group_of[j] * NR;
    const float *targets = b->target + q * b->row_step + j * NR;
    float *errors = b->error + q * b->row_step + j * NR, *sums = b->sum + q * b->block_step;
    float *codes = b->codes + q * b->block_step + j * NR;
#pragma GCC unroll 4
    for (int v = 0; v < NRV; v++) {
        vf scale = v_load(scales + v * VL), zero = v_load(zeros + v * VL), target = v_load(targets + v * VL);
        vf sum = v_load(sums + j * NR + v * VL), before = v_set1(0);
        if (again) {
            before = v_load(errors + v * VL);
            sum -= v_set1(b->c[j * b->ldc + j]) * before;
        }
        vf t = target + inv * sum;
        vf p = v_min(v_max(v_round(t / scale), v_set1(0) - zero), qmax - zero);
        if (again) {
            vf old = v_load(codes + v * VL) - zero;
            p = v_select((vmask)(v_abs(t - scale * old) <= v_abs(t - scale * p)), old, p);
        }
        vf error = target - scale * p;
        change[v] = error - before;
        v_store(codes + v * VL, p + zero);
        v_store(errors + v * VL, error);
        if (again)
            v_store(b->change + q * b->block_step + j * NR + v * VL, change[v]);
    }
    for (int64_t i = j + 1; i < b->n_cols; i++) {
        vf c = v_set1(b->c[i * b->ldc + j]);
#pragma GCC unroll 4
        for (int v = 0; v < NRV; v++) {
            float *sum = sums + i * NR + v * VL;
            v_store(sum, v_fma(c, change[v], v_load(sum)));
        }
    }
}

/* A column waits for the one before it: the panels, which do not, are what runs side by side. */
INLINE void round_columns(const qc_round_part *b, bool again)
{
    for (int64_t j = 0; j < b->n_cols; j++)
        for (int64_t q = 0; q < b->n_panels; q++)
            round_column(b, j, q, again);
}

static void round_part_simd(const qc_round_part *part)
{
    if (part->change)
        round_columns(part, true);
    else
        round_columns(part, false);
}

/* The sums stay in vectors of the compiler's choice. */
static void add_dots_simd(double *total, const float *a, const float *b, int64_t k, double weight)
{
    double sum[NR];
    for (int r = 0; r < NR; r++)
        sum[r] = total[r];
    for (int64_t j = 0; j < k; j++, a += NR, b += NR)
        for (int r = 0; r < NR; r++)
            sum[r] += weight * (double)a[r] * (double)b[r];
    for (int r = 0; r < NR; r++)
        total[r] = sum[r];
}

static void kern_slots(qc_kern *kern, const char *name)
{
    kern->name = name;
    kern->use_blas = false;
    kern->mr = MR;
    kern->nr = NR;
    kern->gemm = gemm_simd;
    kern->pack = pack_simd;
    kern->unpack = unpack_simd;
    kern->add_dots = add_dots_simd;
    kern->rms_norm = rms_norm_simd;
    kern->rope = rope_simd;
    kern->gated_act = gated_act_simd;
    kern->add = add_simd;
    kern->scale = scale_simd;
    kern->softcap = softcap_simd;
    kern->softmax = softmax_simd;
    kern->score_block = score_block_simd;
    kern->column_stats = column_stats_simd;
    kern->quantize_act = quantize_act_simd;
    kern->round_part = round_part_simd;
}

#endif
