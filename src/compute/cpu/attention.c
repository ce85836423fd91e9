/* Causal attention in blocks (FlashAttention's order, Dao et al. 2022): a task takes TILE_Q queries of one
 * head and walks over the keys in blocks of BLOCK_KEYS with an online softmax. Keys and values are first
 * packed into the panels that `gemm` reads. Keys above the diagonal are left out in steps of a panel and a
 * strip of kern.mr queries. */
#include "cpu.h"
#include "qc_math.h"

#include <float.h>
#include <string.h>

enum { TILE_Q = 96, BLOCK_KEYS = 256 };

typedef struct attention_job {
    const qc_cpu_backend *cb;
    float *out;
    const float *q, *k, *v;
    const qc_attention_shape *s;
    int64_t n_blocks;      /* of keys, BLOCK_KEYS each */
    int64_t k_block_elems; /* packed keys of one block of one head: panels [D, nr] of nr keys */
    int64_t v_block_elems; /* packed values: panels [BLOCK_KEYS, nr] of nr columns */
    float *packed_k;       /* [kv heads, n_blocks, k_block_elems] */
    float *packed_v;       /* [kv heads, n_blocks, v_block_elems] */
    float *scratch;        /* [threads, scratch_elems] */
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

/* A tile of queries q0 .. q0 + m - 1 against the block of keys k0 .. k0 + n - 1. */
typedef struct block {
    int64_t q0, m, k0, n;
} block;

/* First and last + 1 key of the block that query q0 + r sees; lo >= hi if none. */
static void seen(const attention_job *j, const block *b, int64_t r, int64_t *lo, int64_t *hi)
{
    int64_t key = b->q0 + r - b->k0;
    *hi = qc_min_i64(b->n, key + 1);
    *lo = j->s->window > 0 ? qc_max_i64(0, key - j->s->window + 1) : 0;
}

/* Scores of the queries that see something of a panel of keys, whole strips of kern.mr queries. */
static void block_scores(const attention_job *j, tile *t, const block *b, const float *packed_k)
{
    const qc_kern *kern = &j->cb->kern;
    int64_t dim = j->s->head_dim, mr = kern->mr;
    for (int64_t i = 0; i < b->n; i += kern->nr) {
        int64_t n = qc_min_i64(kern->nr, b->n - i), above = b->k0 + i - b->q0;
        int64_t r0 = above > 0 ? above / mr * mr : 0;
        int64_t r1 = j->s->window > 0 ? qc_min_i64(b->m, above + n - 1 + j->s->window) : b->m;
        if (r0 < r1)
            kern->gemm(t->scores + r0 * BLOCK_KEYS + i, BLOCK_KEYS, t->q + r0 * dim, dim, packed_k + i * dim,
                       r1 - r0, n, dim, false);
    }
}

/* Scores to weights, zero for unseen keys up to the last one that the strip of the query sees. */
static void block_softmax(const attention_job *j, tile *t, const block *b)
{
    const qc_kern *kern = &j->cb->kern;
    int64_t dim = j->s->head_dim, lo, hi;
    for (int64_t r = 0; r < b->m; r++) {
        float *row = t->scores + r * BLOCK_KEYS, *acc = t->acc + r * dim;
        seen(j, b, r, &lo, &hi);
        if (lo >= hi) {
            memset(row, 0, (size_t)b->n * sizeof *row);
            continue;
        }
        if (j->s->softcap > 0)
            kern->softcap(row + lo, row + lo, j->s->softcap, hi - lo);
        float shrink = kern->softmax(row, lo, hi, qc_min_i64(b->n, hi + kern->mr - 1), &t->state[r]);
        if (shrink != 1)
            kern->scale(acc, acc, shrink, dim);
    }
}

/* acc += weights * values. Below the diagonal all queries at once, else strip by strip up to its last seen
 * key. */
static void block_values(const attention_job *j, tile *t, const block *b, const float *packed_v)
{
    const qc_kern *kern = &j->cb->kern;
    int64_t dim = j->s->head_dim, step = b->k0 + b->n - 1 <= b->q0 ? b->m : kern->mr;
    for (int64_t c = 0; c < dim; c += kern->nr)
        for (int64_t r = 0; r < b->m; r += step) {
            int64_t m = qc_min_i64(step, b->m - r), n = qc_min_i64(b->n, b->q0 + r + m - b->k0);
            if (n > 0)
                kern->gemm(t->acc + r * dim + c, dim, t->scores + r * BLOCK_KEYS, BLOCK_KEYS,
                           packed_v + c * b->n, m, qc_min_i64(kern->nr, dim - c), n, true);
        }
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
    for (int64_t i = first_key / BLOCK_KEYS; i * BLOCK_KEYS < q0 + m; i++) {
        block b = {.q0 = q0, .m = m, .k0 = i * BLOCK_KEYS};
        b.n = qc_min_i64(BLOCK_KEYS, s->n_tokens - b.k0);
        int64_t packed = kv_head * j->n_blocks + i;
        block_scores(j, &t, &b, j->packed_k + packed * j->k_block_elems);
        block_softmax(j, &t, &b);
        block_values(j, &t, &b, j->packed_v + packed * j->v_block_elems);
    }
    for (int64_t i = 0; i < m; i++)
        kern->scale(j->out + (q0 + i) * ld + head * dim, t.acc + i * dim, 1 / t.state[i].sum, dim);
}

int qc_cpu_check_attention(const qc_attention_shape *shape, qc_err *err)
{
    if (shape->n_kv_heads >= 1 && shape->n_heads >= 1 && shape->n_heads % shape->n_kv_heads == 0 &&
        shape->head_dim >= 1)
        return QC_OK;
    return qc_fail(err, QC_E_UNSUPPORTED, "attention with %lld heads of %lld on %lld key heads",
                   (long long)shape->n_heads, (long long)shape->head_dim, (long long)shape->n_kv_heads);
}

int qc_cpu_attention(qc_backend *be, float *out, const float *q, const float *k, const float *v,
                     const qc_attention_shape *shape, qc_err *err)
{
    qc_cpu_backend *cb = (qc_cpu_backend *)be;
    QC_TRY(qc_cpu_check_attention(shape, err));
    int64_t dim = shape->head_dim, nr = cb->kern.nr, n_threads = qc_pool_size(cb->pool);
    attention_job j = {.cb = cb, .out = out, .q = q, .k = k, .v = v, .s = shape};
    j.n_blocks = qc_ceil_div(shape->n_tokens, BLOCK_KEYS);
    j.n_q_tiles = qc_ceil_div(shape->n_tokens, TILE_Q);
    j.k_block_elems = qc_round_up(BLOCK_KEYS, nr) * dim;
    j.v_block_elems = BLOCK_KEYS * qc_round_up(dim, nr);
    j.scratch_elems = qc_round_up(TILE_Q * (2 * dim + BLOCK_KEYS), 16);
    int64_t n_packed = shape->n_kv_heads * j.n_blocks;
    j.packed_k =
        qc_cpu_scratch(cb, n_packed * (j.k_block_elems + j.v_block_elems) + n_threads * j.scratch_elems, err);
    if (!j.packed_k)
        return QC_E_RESOURCE;
    j.packed_v = j.packed_k + n_packed * j.k_block_elems;
    j.scratch = j.packed_v + n_packed * j.v_block_elems;
    qc_pool_run(cb->pool, n_packed, pack_task, &j);
    qc_pool_run(cb->pool, j.n_q_tiles * shape->n_heads, tile_task, &j);
    return QC_OK;
}
