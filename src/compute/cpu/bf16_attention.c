/* attention with bfloat16 operands: (scale q) k^T and weights v; the softmax stays in float32, its sum is of
 * the weights before rounding. The same walk as attention.c, but in groups of 32 queries, whose scores of a
 * block of keys stay in the first level cache. Keys become strips of column tiles of 16 keys, values strips
 * of 16 columns whose inputs are all keys. */
#include "cpu.h"
#include "qc_math.h"

#include <float.h>
#include <string.h>

enum {
    GROUP = 32,                  /* queries of a task */
    BLOCK_KEYS = 512,            /* a multiple of QC_BF16_INPUTS */
    SCORES_LD = BLOCK_KEYS + 16, /* rows 1024 bytes apart would share few sets of the cache */
    PACK_KEYS = 64
};

typedef struct attention_job {
    const qc_cpu_backend *cb;
    float *out;
    const float *q, *k, *v;
    const qc_attention_shape *s;
    int64_t n_groups;                     /* of queries */
    int64_t key_strip, value_strip;       /* elements of a strip of tiles */
    int64_t keys_of_head, values_of_head; /* elements of a head */
    uint16_t *keys, *values;              /* packed, [kv heads, ..] */
    float *scratch;                       /* [threads, scratch_elems] */
    int64_t scratch_elems;
} attention_job;

static void pack_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const attention_job *j = ctx;
    const qc_kern_bf16 *kern = &j->cb->bf16;
    int64_t head = task % j->s->n_kv_heads, k0 = task / j->s->n_kv_heads * PACK_KEYS, dim = j->s->head_dim;
    int64_t ld = j->s->n_kv_heads * dim, n_keys = qc_min_i64(PACK_KEYS, j->s->n_tokens - k0);
    const float *k = j->k + k0 * ld + head * dim, *v = j->v + k0 * ld + head * dim;
    uint16_t *keys = j->keys + head * j->keys_of_head + k0 / QC_BF16_ROWS * j->key_strip;
    uint16_t *values = j->values + head * j->values_of_head + k0 / QC_BF16_INPUTS * QC_BF16_TILE;
    for (int64_t i = 0; i < n_keys; i += QC_BF16_ROWS, keys += j->key_strip)
        kern->pack_rows(keys, k + i * ld, ld, qc_min_i64(QC_BF16_ROWS, n_keys - i), dim, true);
    for (int64_t c = 0; c < dim; c += QC_BF16_ROWS, values += j->value_strip)
        kern->pack_inputs(values, v + c, ld, qc_min_i64(QC_BF16_ROWS, dim - c), n_keys, true, false);
}

/* A group of queries q0 .. q0 + m - 1 of one head and its scratch. */
typedef struct group {
    int64_t q0, m;
    const uint16_t *keys, *values; /* of its kv head */
    float *scores;                 /* [GROUP, SCORES_LD] */
    float *acc;                    /* [GROUP, D] */
    uint16_t *q;                   /* 2 strips of row tiles, scaled */
    uint16_t *weights;             /* 2 strips of row tiles, BLOCK_KEYS inputs */
    qc_softmax_state state[GROUP];
} group;

enum { WEIGHT_STRIP = BLOCK_KEYS / QC_BF16_INPUTS * QC_BF16_TILE };

/* Scores of a row to weights; the sums so far shrink if a larger score appears. */
static void row_weights(const attention_job *j, group *g, int64_t r, int64_t lo, int64_t hi, int64_t n)
{
    const qc_kern *kern = &j->cb->kern;
    float *row = g->scores + r * SCORES_LD, *acc = g->acc + r * j->s->head_dim;
    uint16_t *weights = g->weights + r / QC_BF16_ROWS * WEIGHT_STRIP + r % QC_BF16_ROWS * QC_BF16_INPUTS;
    if (lo >= hi) {
        for (int64_t i = 0; i < n; i += QC_BF16_INPUTS)
            memset(weights + i / QC_BF16_INPUTS * QC_BF16_TILE, 0, QC_BF16_INPUTS * sizeof *weights);
        return;
    }
    if (j->s->softcap > 0)
        kern->softcap(row + lo, row + lo, j->s->softcap, hi - lo);
    float shrink = j->cb->bf16.softmax(weights, row, lo, hi, n, &g->state[r]);
    if (shrink != 1)
        kern->scale(acc, acc, shrink, j->s->head_dim);
}

/* Keys k0 .. k0 + n - 1, of which the first query sees some of the last and the last query of the first. */
static void add_keys(const attention_job *j, group *g, int64_t k0, int64_t n)
{
    const qc_kern_bf16 *kern = &j->cb->bf16;
    int64_t dim = j->s->head_dim, n_tiles = qc_ceil_div(n, QC_BF16_INPUTS);
    kern->product(g->scores, SCORES_LD, g->q, j->key_strip, g->keys + k0 / QC_BF16_ROWS * j->key_strip,
                  j->key_strip, g->m, n, j->key_strip / QC_BF16_TILE, false);
    for (int64_t r = 0; r < g->m; r++) {
        int64_t key = g->q0 + r - k0; /* the query's own */
        int64_t lo = j->s->window > 0 ? qc_max_i64(0, key - j->s->window + 1) : 0;
        row_weights(j, g, r, lo, qc_min_i64(n, key + 1), n_tiles * QC_BF16_INPUTS);
    }
    kern->product(g->acc, dim, g->weights, WEIGHT_STRIP, g->values + k0 / QC_BF16_INPUTS * QC_BF16_TILE,
                  j->value_strip, g->m, dim, n_tiles, true);
}

static void load_queries(const attention_job *j, group *g, const float *q)
{
    int64_t dim = j->s->head_dim, ld = j->s->n_heads * dim;
    for (int64_t r = 0; r < g->m; r++) { /* acc serves as the place of the scaled rows */
        j->cb->kern.scale(g->acc + r * dim, q + (g->q0 + r) * ld, j->s->scale, dim);
        g->state[r] = (qc_softmax_state){.max = -FLT_MAX, .sum = 0};
    }
    for (int64_t r = 0; r < g->m; r += QC_BF16_ROWS)
        j->cb->bf16.pack_rows(g->q + r / QC_BF16_ROWS * j->key_strip, g->acc + r * dim, dim,
                              qc_min_i64(QC_BF16_ROWS, g->m - r), dim, false);
    memset(g->acc, 0, (size_t)(g->m * dim) * sizeof *g->acc);
}

static void group_task(void *ctx, int64_t task, int thread)
{
    const attention_job *j = ctx;
    const qc_attention_shape *s = j->s;
    int64_t sharing = s->n_heads / s->n_kv_heads, dim = s->head_dim, ld = s->n_heads * dim;
    /* the heads of one key head in a row; long groups (late queries) first, so that threads end together */
    int64_t kv_head = task / (sharing * j->n_groups), in_head = task % (sharing * j->n_groups);
    int64_t head = kv_head * sharing + in_head % sharing, q0 = (j->n_groups - 1 - in_head / sharing) * GROUP;
    float *scratch = j->scratch + thread * j->scratch_elems;
    group g = {.q0 = q0,
               .m = qc_min_i64(GROUP, s->n_tokens - q0),
               .keys = j->keys + kv_head * j->keys_of_head,
               .values = j->values + kv_head * j->values_of_head,
               .scores = scratch,
               .acc = scratch + GROUP * SCORES_LD};
    g.q = (uint16_t *)(void *)(g.acc + qc_round_up(GROUP * dim, 16));
    g.weights = g.q + 2 * j->key_strip;
    load_queries(j, &g, j->q + head * dim);
    int64_t first = s->window > 0 ? qc_max_i64(0, q0 - s->window + 1) : 0, end = q0 + g.m;
    for (int64_t k0 = first / QC_BF16_INPUTS * QC_BF16_INPUTS; k0 < end; k0 += BLOCK_KEYS)
        add_keys(j, &g, k0, qc_min_i64(BLOCK_KEYS, end - k0));
    for (int64_t r = 0; r < g.m; r++)
        j->cb->kern.scale(j->out + (q0 + r) * ld + head * dim, g.acc + r * dim, 1 / g.state[r].sum, dim);
}

int qc_cpu_attention_bf16(qc_backend *be, float *out, const float *q, const float *k, const float *v,
                          const qc_attention_shape *shape, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    QC_TRY(qc_cpu_check_attention(shape, err));
    int64_t dim = shape->head_dim, n_threads = qc_pool_size(cb->pool), n_kv = shape->n_kv_heads;
    attention_job j = {.cb = cb, .out = out, .q = q, .k = k, .v = v, .s = shape};
    j.n_groups = qc_ceil_div(shape->n_tokens, GROUP);
    j.key_strip = qc_bf16_strip(dim);
    j.value_strip = qc_bf16_strip(shape->n_tokens);
    j.keys_of_head = qc_ceil_div(shape->n_tokens, QC_BF16_ROWS) * j.key_strip;
    j.values_of_head = qc_ceil_div(dim, QC_BF16_ROWS) * j.value_strip;
    j.scratch_elems = GROUP * SCORES_LD + qc_round_up(GROUP * dim, 16) + j.key_strip + WEIGHT_STRIP;
    int64_t packed_elems = n_kv * (j.keys_of_head + j.values_of_head) / 2; /* two bf16 in a float */
    j.scratch = qc_cpu_scratch(cb, n_threads * j.scratch_elems + packed_elems, err);
    if (!j.scratch)
        return QC_E_RESOURCE;
    j.keys = (uint16_t *)(void *)(j.scratch + n_threads * j.scratch_elems);
    j.values = j.keys + n_kv * j.keys_of_head;
    qc_pool_run(cb->pool, qc_ceil_div(shape->n_tokens, PACK_KEYS) * n_kv, pack_task, &j);
    qc_pool_run(cb->pool, j.n_groups * shape->n_heads, group_task, &j);
    return QC_OK;
}
