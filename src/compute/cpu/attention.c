/* Causal attention in blocks (FlashAttention's order, Dao et al. 2022): a task takes TILE_Q queries of one head and
 * walks over the keys in blocks of BLOCK_KEYS with an online softmax. Keys and values are first packed into the panels
 * that `gemm` reads. Within a block every strip of kern.mr queries computes only the keys that it can see. */
#include "cpu.h"
#include "qc_math.h"

#include <float.h>
#include <string.h>

enum { TILE_Q = 96, BLOCK_KEYS = 128 };

typedef struct attention_job {
    const qc_cpu_backend *cb;
    float *out;
    const float *q, *k, *v;
    const qc_attention_shape *s;
    int64_t n_blocks;       /* of keys, BLOCK_KEYS each */
    int64_t k_block_elems;  /* packed keys of one block of one head: panels [D, nr] of nr keys */
    int64_t v_block_elems;  /* packed values: panels [BLOCK_KEYS, nr] of nr columns */
    float *packed_k;        /* [kv heads, n_blocks, k_block_elems] */
    float *packed_v;        /* [kv heads, n_blocks, v_block_elems] */
    float *scratch;         /* [threads, scratch_elems] */
    int64_t scratch_elems;
    int64_t n_q_tiles;
} attention_job;

/* Per-thread scratch of a tile. */
typedef struct tile {
    float *q;      /* [TILE_Q, D], scaled */
    float *scores; /* [TILE_Q, BLOCK_KEYS] */
    float *acc;    /* [TILE_Q, D] */
    qc_softmax_state state[TILE_Q];
} tile;

static void pack_values(float *dst, const float *v, int64_t ldv, int64_t n_keys, int64_t dim, int64_t nr)
{
    for (int64_t c = 0; c < dim; c += nr)
        for (int64_t i = 0; i < n_keys; i++, dst += nr) {
            int64_t n = qc_min_i64(nr, dim - c);
            memcpy(dst, v + i * ldv + c, (size_t)n * sizeof *dst);
            memset(dst + n, 0, (size_t)(nr - n) * sizeof *dst);
        }
}

static void pack_task(void *ctx, int64_t task, int thread)
{
    (void)thread;
    const attention_job *j = ctx;
    const qc_kern *kern = &j->cb->kern;
    int64_t head = task / j->n_blocks, k0 = task % j->n_blocks * BLOCK_KEYS, dim = j->s->head_dim;
    int64_t ld = j->s->n_kv_heads * dim, n_keys = qc_min_i64(BLOCK_KEYS, j->s->n_tokens - k0);
    const float *k = j->k + k0 * ld + head * dim, *v = j->v + k0 * ld + head * dim;
    float *packed = j->packed_k + task * j->k_block_elems;
    for (int64_t i = 0; i < n_keys; i += kern->nr)
        kern->pack(packed + i * dim, k + i * ld, ld, qc_min_i64(kern->nr, n_keys - i), dim);
    pack_values(j->packed_v + task * j->v_block_elems, v, ld, n_keys, dim, kern->nr);
}

/* Queries q0 + r .. q0 + r + m - 1 (a strip) against the block of n_keys keys from k0. */
static void strip_block(const attention_job *j, tile *t, int64_t q0, int64_t r, int64_t m, int64_t k0, int64_t n_keys,
                        const float *packed_k, const float *packed_v)
{
    const qc_kern *kern = &j->cb->kern;
    const qc_attention_shape *s = j->s;
    int64_t dim = s->head_dim, first = q0 + r, last = first + m - 1;
    int64_t n = qc_min_i64(n_keys, last - k0 + 1);
    int64_t lowest = s->window > 0 ? first - s->window + 1 - k0 : 0;
    if (n <= 0 || lowest >= n_keys)
        return;
    float *scores = t->scores + r * BLOCK_KEYS, *acc = t->acc + r * dim;
    for (int64_t i = 0; i < n; i += kern->nr)
        kern->gemm(scores + i, BLOCK_KEYS, t->q + r * dim, dim, packed_k + i * dim, m, qc_min_i64(kern->nr, n - i), dim,
                   false);
    for (int64_t i = 0; i < m; i++) {
        float *row = scores + i * BLOCK_KEYS;
        int64_t hi = qc_min_i64(n, first + i - k0 + 1);
        int64_t lo = s->window > 0 ? qc_max_i64(0, first + i - s->window + 1 - k0) : 0;
        if (lo >= hi) { /* this query sees none of the block */
            memset(row, 0, (size_t)n * sizeof *row);
            continue;
        }
        if (s->softcap > 0)
            kern->softcap(row, row, s->softcap, n);
        float shrink = kern->softmax(row, lo, hi, n, &t->state[r + i]);
        if (shrink != 1)
            kern->scale(acc + i * dim, acc + i * dim, shrink, dim);
    }
    for (int64_t c = 0; c < dim; c += kern->nr)
        kern->gemm(acc + c, dim, scores, BLOCK_KEYS, packed_v + c * n_keys, m, qc_min_i64(kern->nr, dim - c), n, true);
}

static void tile_task(void *ctx, int64_t task, int thread)
{
    const attention_job *j = ctx;
    const qc_kern *kern = &j->cb->kern;
    const qc_attention_shape *s = j->s;
    /* long tiles (late queries) first, so that threads end together */
    int64_t head = task % s->n_heads, q0 = (j->n_q_tiles - 1 - task / s->n_heads) * TILE_Q, dim = s->head_dim;
    int64_t kv_head = head / (s->n_heads / s->n_kv_heads), m = qc_min_i64(TILE_Q, s->n_tokens - q0);
    int64_t ld = s->n_heads * dim;
    tile t;
    t.q = j->scratch + thread * j->scratch_elems;
    t.scores = t.q + TILE_Q * dim;
    t.acc = t.scores + TILE_Q * BLOCK_KEYS;
    for (int64_t i = 0; i < m; i++) {
        kern->scale(t.q + i * dim, j->q + (q0 + i) * ld + head * dim, s->scale, dim);
        t.state[i] = (qc_softmax_state){.max = -FLT_MAX, .sum = 0};
    }
    memset(t.acc, 0, (size_t)(m * dim) * sizeof *t.acc);
    int64_t first_key = s->window > 0 ? qc_max_i64(0, q0 - s->window + 1) : 0;
    for (int64_t b = first_key / BLOCK_KEYS; b < j->n_blocks && b * BLOCK_KEYS < q0 + m; b++) {
        int64_t k0 = b * BLOCK_KEYS, n_keys = qc_min_i64(BLOCK_KEYS, s->n_tokens - k0);
        const float *packed_k = j->packed_k + (kv_head * j->n_blocks + b) * j->k_block_elems;
        const float *packed_v = j->packed_v + (kv_head * j->n_blocks + b) * j->v_block_elems;
        for (int64_t r = 0; r < m; r += kern->mr)
            strip_block(j, &t, q0, r, qc_min_i64(kern->mr, m - r), k0, n_keys, packed_k, packed_v);
    }
    for (int64_t i = 0; i < m; i++)
        kern->scale(j->out + (q0 + i) * ld + head * dim, t.acc + i * dim, 1 / t.state[i].sum, dim);
}

int qc_cpu_attention(qc_backend *be, float *out, const float *q, const float *k, const float *v,
                     const qc_attention_shape *shape, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    if (shape->n_kv_heads < 1 || shape->n_heads < 1 || shape->n_heads % shape->n_kv_heads != 0 || shape->head_dim < 1)
        return qc_fail(err, QC_E_UNSUPPORTED, "attention with %lld heads of %lld on %lld key heads",
                       (long long)shape->n_heads, (long long)shape->head_dim, (long long)shape->n_kv_heads);
    int64_t dim = shape->head_dim, nr = cb->kern.nr, n_threads = qc_pool_size(cb->pool);
    attention_job j = {.cb = cb, .out = out, .q = q, .k = k, .v = v, .s = shape};
    j.n_blocks = qc_ceil_div(shape->n_tokens, BLOCK_KEYS);
    j.n_q_tiles = qc_ceil_div(shape->n_tokens, TILE_Q);
    j.k_block_elems = qc_round_up(BLOCK_KEYS, nr) * dim;
    j.v_block_elems = BLOCK_KEYS * qc_round_up(dim, nr);
    j.scratch_elems = qc_round_up(TILE_Q * (2 * dim + BLOCK_KEYS), 16);
    int64_t n_packed = shape->n_kv_heads * j.n_blocks;
    j.packed_k = qc_cpu_scratch(cb, n_packed * (j.k_block_elems + j.v_block_elems) + n_threads * j.scratch_elems, err);
    if (!j.packed_k)
        return QC_E_RESOURCE;
    j.packed_v = j.packed_k + n_packed * j.k_block_elems;
    j.scratch = j.packed_v + n_packed * j.v_block_elems;
    qc_pool_run(cb->pool, n_packed, pack_task, &j);
    qc_pool_run(cb->pool, j.n_q_tiles * shape->n_heads, tile_task, &j);
    return QC_OK;
}
