#include "ref_forward.h"

#include "qc_test.h"

#include <math.h>

static const float *weights(mem_source *m, int layer, const char *name)
{
    char full[160];
    if (layer < 0)
        snprintf(full, sizeof full, "%s.weight", name);
    else
        snprintf(full, sizeof full, "model.layers.%d.%s.weight", layer, name);
    return m->base.find(&m->base, full) < 0 ? NULL : mem_tensor_of(m, full)->values;
}

static void matvec(double *y, const float *w, const double *x, int n_out, int n_in)
{
    for (int i = 0; i < n_out; i++) {
        double sum = 0;
        for (int k = 0; k < n_in; k++)
            sum += (double)w[(int64_t)i * n_in + k] * x[k];
        y[i] = sum;
    }
}

static void norm(double *y, const double *x, const float *gain, int n, double eps)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += x[i] * x[i];
    double r = 1 / sqrt(sum / n + eps);
    for (int i = 0; i < n; i++)
        y[i] = x[i] * r * (double)gain[i];
}

static void rotate(double *head, int d, double theta, int position)
{
    for (int i = 0; i < d / 2; i++) {
        double angle = position * pow(theta, -2.0 * i / d), c = cos(angle), s = sin(angle);
        double a = head[i], b = head[i + d / 2];
        head[i] = a * c - b * s;
        head[i + d / 2] = b * c + a * s;
    }
}

static void attend(double *out, const double *q, const double *k, const double *v, ref_params *p, int t,
                   double *score)
{
    int d = p->head_dim, kv = p->n_kv_heads * d,
        first = p->window && t - p->window + 1 > 0 ? t - p->window + 1 : 0;
    for (int h = 0; h < p->n_heads; h++) {
        int g = h / (p->n_heads / p->n_kv_heads);
        double top = -INFINITY, sum = 0;
        for (int j = first; j <= t; j++) {
            score[j] = 0;
            for (int i = 0; i < d; i++)
                score[j] += q[h * d + i] * k[(int64_t)j * kv + g * d + i];
            score[j] /= sqrt(d);
            top = fmax(top, score[j]);
            p->max_score = fmax(p->max_score, fabs(score[j]));
        }
        for (int j = first; j <= t; j++)
            sum += score[j] = exp(score[j] - top);
        for (int i = 0; i < d; i++) {
            double o = 0;
            for (int j = first; j <= t; j++)
                o += score[j] / sum * v[(int64_t)j * kv + g * d + i];
            out[h * d + i] = o;
        }
    }
}

typedef struct scratch {
    double *k, *v, *q, *h, *mix, *gate, *up, *score;
} scratch;

static void heads(mem_source *m, ref_params *p, int layer, const char *name, double *x, int n_heads, int t)
{
    const float *gain = weights(m, layer, name);
    for (int h = 0; h < n_heads; h++) {
        if (gain)
            norm(x + h * p->head_dim, x + h * p->head_dim, gain, p->head_dim, p->eps);
        rotate(x + h * p->head_dim, p->head_dim, p->theta, t);
    }
}

static void one_token(mem_source *m, ref_params *p, int layer, double *x, int t, scratch *s)
{
    int d = p->head_dim, nq = p->n_heads * d, kv = p->n_kv_heads * d;
    double *k = s->k + (int64_t)t * kv;
    norm(s->h, x, weights(m, layer, "input_layernorm"), p->hidden, p->eps);
    matvec(s->q, weights(m, layer, "self_attn.q_proj"), s->h, nq, p->hidden);
    matvec(k, weights(m, layer, "self_attn.k_proj"), s->h, kv, p->hidden);
    matvec(s->v + (int64_t)t * kv, weights(m, layer, "self_attn.v_proj"), s->h, kv, p->hidden);
    heads(m, p, layer, "self_attn.q_norm", s->q, p->n_heads, t);
    heads(m, p, layer, "self_attn.k_norm", k, p->n_kv_heads, t);
    attend(s->mix, s->q, s->k, s->v, p, t, s->score);
    matvec(s->h, weights(m, layer, "self_attn.o_proj"), s->mix, p->hidden, nq);
    for (int i = 0; i < p->hidden; i++)
        x[i] += s->h[i];
    norm(s->h, x, weights(m, layer, "post_attention_layernorm"), p->hidden, p->eps);
    matvec(s->gate, weights(m, layer, "mlp.gate_proj"), s->h, p->ffn, p->hidden);
    matvec(s->up, weights(m, layer, "mlp.up_proj"), s->h, p->ffn, p->hidden);
    for (int i = 0; i < p->ffn; i++)
        s->gate[i] = s->gate[i] / (1 + exp(-s->gate[i])) * s->up[i];
    matvec(s->h, weights(m, layer, "mlp.down_proj"), s->gate, p->hidden, p->ffn);
    for (int i = 0; i < p->hidden; i++)
        x[i] += s->h[i];
}

static double *doubles(int64_t n)
{
    double *x = calloc((size_t)n, sizeof *x);
    ck_assert_ptr_nonnull(x);
    return x;
}

double *ref_forward(mem_source *m, ref_params *p, const int32_t *ids, int n_tokens)
{
    int64_t nq = (int64_t)p->n_heads * p->head_dim, kv = (int64_t)p->n_kv_heads * p->head_dim;
    scratch s = {
        doubles(n_tokens * kv), doubles(n_tokens * kv), doubles(nq),      doubles(p->hidden), doubles(nq),
        doubles(p->ffn),        doubles(p->ffn),        doubles(n_tokens)};
    double *x = doubles((int64_t)n_tokens * p->hidden), *logits = doubles((int64_t)n_tokens * p->vocab);
    const float *table = weights(m, -1, "model.embed_tokens");
    for (int t = 0; t < n_tokens; t++)
        for (int i = 0; i < p->hidden; i++)
            x[(int64_t)t * p->hidden + i] = (double)table[(int64_t)ids[t] * p->hidden + i];
    for (int layer = 0; layer < p->n_layers; layer++)
        for (int t = 0; t < n_tokens; t++)
            one_token(m, p, layer, x + (int64_t)t * p->hidden, t, &s);
    const float *head = weights(m, -1, "lm_head");
    for (int t = 0; t < n_tokens; t++) {
        norm(s.h, x + (int64_t)t * p->hidden, weights(m, -1, "model.norm"), p->hidden, p->eps);
        matvec(logits + (int64_t)t * p->vocab, head ? head : table, s.h, p->vocab, p->hidden);
    }
    double *all[] = {s.k, s.v, s.q, s.h, s.mix, s.gate, s.up, s.score, x};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    return logits;
}
