#include "ops_ref.h"

#include "tol.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define GUARD  64
#define CANARY 0x7fb5a5a5u /* a signalling NaN */

static void fill_bits(float *p, int64_t n, uint32_t bits)
{
    for (int64_t i = 0; i < n; i++)
        memcpy(p + i, &bits, sizeof bits);
}

/* The block starts at a multiple of 64 bytes; the skew sits in the first element so that free finds the
 * start. */
guarded guarded_new(int64_t n, int skew)
{
    size_t total = (size_t)(n + 2 * GUARD + 32) * sizeof(float);
    float *p = aligned_alloc(64, (total + 63) / 64 * 64);
    if (!p)
        abort();
    fill_bits(p, n + 2 * GUARD + 32, CANARY);
    fill_bits(p + GUARD + skew, n, 0x7fc00000u);
    return (guarded){.data = p + GUARD + skew, .n = n};
}

static float *block_start(const guarded *g)
{
    return (float *)((uintptr_t)(g->data - GUARD) & ~(uintptr_t)63);
}

guarded guarded_copy(const guarded *g)
{
    guarded c = guarded_new(g->n, (int)(g->data - GUARD - block_start(g)));
    memcpy(c.data, g->data, (size_t)g->n * sizeof(float));
    return c;
}

void guarded_normal(guarded *g, qc_rng *rng, double scale)
{
    for (int64_t i = 0; i < g->n; i++)
        g->data[i] = (float)(scale * qc_rng_normal(rng));
}

int guarded_intact(const guarded *g)
{
    const uint32_t canary = CANARY;
    for (int i = 1; i <= GUARD; i++)
        if (memcmp(g->data - i, &canary, 4) != 0 || memcmp(g->data + g->n + i - 1, &canary, 4) != 0)
            return 0;
    return 1;
}

void guarded_free(guarded *g)
{
    free(block_start(g));
}

expected expected_new(int64_t n)
{
    return (expected){calloc((size_t)n + 1, sizeof(double)), calloc((size_t)n + 1, sizeof(double))};
}

void expected_free(expected *e)
{
    free(e->value);
    free(e->scale);
}

void ref_linear(expected *e, const float *y, int64_t ldy, const float *x, int64_t ldx, const float *w,
                const float *bias, int64_t n_tokens, int64_t n_out, int64_t n_in)
{
    for (int64_t t = 0; t < n_tokens; t++)
        for (int64_t o = 0; o < n_out; o++) {
            double sum = (y ? (double)y[t * ldy + o] : 0) + (bias ? (double)bias[o] : 0);
            double scale = fabs(y ? (double)y[t * ldy + o] : 0) + fabs(bias ? (double)bias[o] : 0);
            for (int64_t i = 0; i < n_in; i++) {
                double p = (double)x[t * ldx + i] * (double)w[o * n_in + i];
                sum += p;
                scale += fabs(p);
            }
            e->value[t * n_out + o] = sum;
            e->scale[t * n_out + o] = scale;
        }
}

/* Scores of query t, head h in p[]; returns the largest sum of absolute products. */
static double ref_scores(double *p, const float *q, const float *k, const qc_attention_shape *s, int64_t t,
                         int64_t lo)
{
    double largest = 0, scale = (double)s->scale, cap = (double)s->softcap;
    for (int64_t j = lo; j <= t; j++) {
        double dot = 0, sum_abs = 0;
        for (int64_t d = 0; d < s->head_dim; d++) {
            double x = (double)q[d] * (double)k[j * s->n_kv_heads * s->head_dim + d];
            dot += x;
            sum_abs += fabs(x);
        }
        p[j] = cap > 0 ? cap * tanh(dot * scale / cap) : dot * scale;
        largest = fmax(largest, sum_abs * fabs(scale));
    }
    return largest;
}

void ref_attention(expected *e, const float *q, const float *k, const float *v, const qc_attention_shape *s)
{
    int64_t dim = s->head_dim, ldq = s->n_heads * dim, ldk = s->n_kv_heads * dim;
    double *p = calloc((size_t)s->n_tokens + 1, sizeof *p);
    for (int64_t t = 0; t < s->n_tokens; t++)
        for (int64_t h = 0; h < s->n_heads; h++) {
            int64_t kv = h / (s->n_heads / s->n_kv_heads);
            int64_t lo = s->window > 0 && t - s->window + 1 > 0 ? t - s->window + 1 : 0;
            double size = ref_scores(p, q + t * ldq + h * dim, k + kv * dim, s, t, lo);
            double max = -INFINITY, sum = 0;
            for (int64_t j = lo; j <= t; j++)
                max = fmax(max, p[j]);
            for (int64_t j = lo; j <= t; j++)
                sum += p[j] = exp(p[j] - max);
            /* a score is off by TOL_DOT of its terms (and by the rounding of tanh), the largest one too */
            double tol =
                TOL_EXP + TOL_DOT(t + 1) + 2 * TOL_DOT(dim) * size + 2 * TOL_EXP * (double)s->softcap;
            for (int64_t d = 0; d < dim; d++) {
                double out = 0, sum_abs = 0;
                for (int64_t j = lo; j <= t; j++) {
                    double x = p[j] / sum * (double)v[j * ldk + kv * dim + d];
                    out += x;
                    sum_abs += fabs(x);
                }
                e->value[t * ldq + h * dim + d] = out;
                e->scale[t * ldq + h * dim + d] = tol * sum_abs + TOL_TINY;
            }
        }
    free(p);
}

static double capped(float x, double cap)
{
    return cap > 0 ? cap * tanh((double)x / cap) : (double)x;
}

static void ref_max(float *max, int32_t *top, int32_t *n_nonfinite, const float *x, int64_t n, double cap)
{
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(x[i]))
            ++*n_nonfinite;
        else if (*top < 0 || capped(x[i], cap) > (double)*max) {
            *max = (float)capped(x[i], cap);
            *top = (int32_t)i;
        }
    }
}

void ref_score(qc_score *s, double *abs_cross, const float *a, const float *b, int64_t n, int32_t target,
               double softcap)
{
    *s = qc_score_start();
    ref_max(&s->max_a, &s->top_a, &s->n_nonfinite, a, n, softcap);
    if (b)
        ref_max(&s->max_b, &s->top_b, &s->n_nonfinite, b, n, softcap);
    *abs_cross = 0;
    for (int64_t i = 0; i < n; i++) {
        double ea = isfinite(a[i]) ? exp(capped(a[i], softcap) - (double)s->max_a) : 0;
        s->sum_a += ea;
        if (!b || !isfinite(b[i]))
            continue;
        s->sum_b += exp(capped(b[i], softcap) - (double)s->max_b);
        double d = isfinite(a[i]) ? capped(a[i], softcap) - capped(b[i], softcap) : 0;
        s->cross += ea * d;
        *abs_cross += fabs(ea * d);
    }
    if (target >= 0 && target < n) {
        s->target_a = (float)capped(a[target], softcap);
        s->target_b = b ? (float)capped(b[target], softcap) : 0;
    }
}
