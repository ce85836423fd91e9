/* Scalar reference of every kernel slot. Sums are taken in double, transcendental functions come from libm in
 * double; built without contraction and without fast math. Slow on purpose: the other kernels are measured
 * against it. */
#include "kern.h"

#include <math.h>

#define NR_REF 16

static void gemm_ref(float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t m, int64_t n,
                     int64_t k, bool accumulate)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = accumulate ? (double)c[i * ldc + j] : 0;
            for (int64_t p = 0; p < k; p++)
                sum += (double)a[i * lda + p] * (double)b[p * NR_REF + j];
            c[i * ldc + j] = (float)sum;
        }
}

static void pack_ref(float *dst, const float *src, int64_t lds, int64_t n, int64_t k)
{
    for (int64_t j = 0; j < k; j++)
        for (int64_t i = 0; i < NR_REF; i++)
            dst[j * NR_REF + i] = i < n ? src[i * lds + j] : 0;
}

static void unpack_ref(float *dst, int64_t ldd, const float *src, int64_t n, int64_t k, float alpha)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < k; j++)
            dst[i * ldd + j] = alpha * src[j * NR_REF + i];
}

static void rms_norm_ref(float *y, const float *x, const float *gain, float gain_offset, int64_t dim,
                         float eps)
{
    double sum = 0;
    for (int64_t i = 0; i < dim; i++)
        sum += (double)x[i] * (double)x[i];
    double r = 1 / sqrt(sum / (double)dim + (double)eps);
    for (int64_t i = 0; i < dim; i++)
        y[i] = (float)((double)x[i] * r * ((double)gain[i] + (double)gain_offset));
}

static void rope_ref(float *x, const float *cos_t, const float *sin_t, int64_t half)
{
    for (int64_t i = 0; i < half; i++) {
        double a = (double)x[i], b = (double)x[i + half], c = (double)cos_t[i], s = (double)sin_t[i];
        x[i] = (float)(a * c - b * s);
        x[i + half] = (float)(b * c + a * s);
    }
}

static void gated_act_ref(float *y, const float *gate, const float *up, int64_t n, qc_activation act)
{
    for (int64_t i = 0; i < n; i++) {
        double g = (double)gate[i], z = g;
        /* 0.5 g (1 + tanh(u)) = g / (1 + exp(-2u)), without its cancellation for negative u */
        if (act == QC_ACT_GELU_TANH)
            z = 2 * 0.79788456080286535588 * (g + 0.044715 * g * g * g);
        y[i] = (float)(g / (1 + exp(-z)) * (double)up[i]);
    }
}

static void add_ref(float *y, const float *x, float alpha, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = (float)((double)y[i] + (double)alpha * (double)x[i]);
}

static void scale_ref(float *y, const float *x, float alpha, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = alpha * x[i];
}

static void softcap_ref(float *y, const float *x, float cap, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = (float)((double)cap * tanh((double)x[i] / (double)cap));
}

static float softmax_ref(float *s, int64_t lo, int64_t hi, int64_t n, qc_softmax_state *state)
{
    float max = state->max;
    for (int64_t i = lo; i < hi; i++)
        max = s[i] > max ? s[i] : max;
    double shrink = exp((double)state->max - (double)max), sum = shrink * (double)state->sum;
    for (int64_t i = 0; i < n; i++) {
        s[i] = i >= lo && i < hi ? (float)exp((double)s[i] - (double)max) : 0;
        sum += (double)s[i];
    }
    *state = (qc_softmax_state){.max = max, .sum = (float)sum};
    return (float)shrink;
}

/* Largest finite logit and its first id; counts the others. */
static void block_max(const float *x, int64_t n, int32_t id0, float *max, int32_t *top, int32_t *n_nonfinite)
{
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(x[i]))
            ++*n_nonfinite;
        else if (x[i] > *max || *top < 0) {
            *max = x[i];
            *top = id0 + (int32_t)i;
        }
    }
}

void qc_kern_score_block_ref(qc_score *s, const float *a, const float *b, int64_t n, int32_t id0)
{
    float old_a = s->max_a, old_b = s->max_b;
    block_max(a, n, id0, &s->max_a, &s->top_a, &s->n_nonfinite);
    double shrink = exp((double)old_a - (double)s->max_a);
    s->sum_a *= shrink;
    s->cross *= shrink;
    if (b) {
        block_max(b, n, id0, &s->max_b, &s->top_b, &s->n_nonfinite);
        s->sum_b *= exp((double)old_b - (double)s->max_b);
    }
    for (int64_t i = 0; i < n; i++) {
        double ea = isfinite(a[i]) ? exp((double)a[i] - (double)s->max_a) : 0;
        s->sum_a += ea;
        if (b && isfinite(b[i])) {
            s->sum_b += exp((double)b[i] - (double)s->max_b);
            if (isfinite(a[i]))
                s->cross += ea * ((double)a[i] - (double)b[i]);
        }
    }
}

static void column_stats_ref(float *sum_abs, float *max_abs, const float *x, int64_t ldx, int64_t n_tokens,
                             int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double sum = 0;
        float max = max_abs[i];
        for (int64_t t = 0; t < n_tokens; t++) {
            float a = fabsf(x[t * ldx + i]);
            sum += (double)a;
            max = a > max ? a : max;
        }
        sum_abs[i] += (float)sum;
        max_abs[i] = max;
    }
}

static void quantize_act_ref(float *y, const float *x, int64_t n, float qmax)
{
    float max = 0;
    for (int64_t i = 0; i < n; i++)
        max = fabsf(x[i]) > max ? fabsf(x[i]) : max;
    float step = max / qmax;
    for (int64_t i = 0; i < n; i++) {
        float q = step > 0 ? rintf(x[i] / step) : x[i] * 0;
        q = q > qmax ? qmax : q < -qmax ? -qmax : q;
        y[i] = q * step;
    }
}

/* code - zero of one column of one row; old: the code it has, or NULL. */
static float round_one(float t, float scale, float zero, float qmax, const float *old)
{
    float lo = -zero, hi = qmax - zero, p = rintf(t / scale);
    p = p > lo ? p : lo;
    p = p < hi ? p : hi;
    if (old && fabsf(t - scale * (*old - zero)) <= fabsf(t - scale * p))
        p = *old - zero;
    return p;
}

/* Column j of one row, whose first column is at the start of each panel of *b. */
static void round_column(const qc_round_part *b, int64_t j)
{
    int64_t at = j * NR_REF, g = b->group_of[j] * NR_REF;
    float old = b->change ? b->error[at] : 0;
    float sum = b->change ? b->sum[at] - b->c[j * b->ldc + j] * old : b->sum[at];
    float t = b->target[at] + (b->inv ? b->inv[j] * sum : sum);
    float p = round_one(t, b->scales[g], b->zeros[g], b->qmax, b->change ? &b->codes[at] : NULL);
    float e = b->target[at] - b->scales[g] * p;
    b->codes[at] = p + b->zeros[g];
    b->error[at] = e;
    if (b->change)
        b->change[at] = e - old;
    for (int64_t i = j + 1; i < b->n_cols; i++)
        b->sum[i * NR_REF] += b->c[i * b->ldc + j] * (e - old);
}

static void round_part_ref(const qc_round_part *part)
{
    for (int64_t i = 0; i < part->n_panels * NR_REF; i++) {
        int64_t p = i / NR_REF, r = i % NR_REF;
        qc_round_part row = *part;
        row.scales += p * part->grid_step + r;
        row.zeros += p * part->grid_step + r;
        row.target += p * part->row_step + r;
        row.error += p * part->row_step + r;
        row.sum += p * part->block_step + r;
        row.codes += p * part->block_step + r;
        if (part->change)
            row.change += p * part->block_step + r;
        for (int64_t j = 0; j < part->n_cols; j++)
            round_column(&row, j);
    }
}

static void add_dots_ref(double *total, const float *a, const float *b, int64_t k, double weight)
{
    for (int64_t i = 0; i < k * NR_REF; i++)
        total[i % NR_REF] += weight * (double)a[i] * (double)b[i];
}

void qc_kern_init_ref(qc_kern *kern)
{
    *kern = (qc_kern){
        .name = "scalar",
        .use_blas = true,
        .mr = 4,
        .nr = NR_REF,
        .gemm = gemm_ref,
        .pack = pack_ref,
        .unpack = unpack_ref,
        .add_dots = add_dots_ref,
        .rms_norm = rms_norm_ref,
        .rope = rope_ref,
        .gated_act = gated_act_ref,
        .add = add_ref,
        .scale = scale_ref,
        .softcap = softcap_ref,
        .softmax = softmax_ref,
        .score_block = qc_kern_score_block_ref,
        .column_stats = column_stats_ref,
        .quantize_act = quantize_act_ref,
        .round_part = round_part_ref,
    };
}
