/* Scratch of the operations, for plans: that of the CPU backend; of a device the host has less. */
#include "backend.h"
#include "qc_math.h"

enum {
    PANEL = 32,         /* columns or rows that lie together: the widest kernel's */
    BLOCK_TOKENS = 256, /* that `gram` lays out as one, and columns of a block of `factor` */
    BLOCK_LD = BLOCK_TOKENS + 16,
    BLOCK_KEYS = 256,
    FACTOR_SOLVE_ROWS = 512
};

/* Elements that a thread lays out: a block of inputs, queries and their scores, a strip of coefficients. */
enum {
    LINEAR_TILE = 256 * BLOCK_LD,
    ATTENTION_QUERIES = 96,
    GRAM_TILE = PANEL * BLOCK_TOKENS,
    STRIP = 128 * BLOCK_LD
};

uint64_t qc_linear_scratch_bytes(qc_compute compute, int n_threads, int64_t n_tokens, int64_t n_in)
{
    uint64_t thread = (uint64_t)qc_max_i64(QC_LOAD_COPIED_ROWS * n_in, LINEAR_TILE),
             tokens = (uint64_t)qc_round_up(qc_min_i64(n_tokens, QC_LINEAR_COPIED_TOKENS), PANEL),
             packed = tokens * (uint64_t)qc_round_up(n_in, PANEL) * sizeof(uint16_t),
             threads = (uint64_t)n_threads * thread * sizeof(float);
    return compute == QC_COMPUTE_BF16 ? qc_max_u64(threads, packed) : threads;
}

uint64_t qc_attention_scratch_bytes(qc_compute compute, int n_threads, const qc_attention_shape *shape)
{
    uint64_t keys = (uint64_t)qc_round_up(shape->n_tokens, BLOCK_KEYS),
             head = (uint64_t)qc_round_up(shape->head_dim, PANEL),
             thread = ATTENTION_QUERIES * (2 * head + BLOCK_KEYS);
    return 2 * keys * (uint64_t)shape->n_kv_heads * head *
               (compute == QC_COMPUTE_BF16 ? sizeof(uint16_t) : sizeof(float)) +
           (uint64_t)n_threads * thread * sizeof(float);
}

uint64_t qc_gram_scratch_bytes(qc_compute compute, int n_threads, int64_t n_tokens, int64_t n_rows,
                               int64_t n_cols)
{
    uint64_t dims = (uint64_t)(qc_round_up(n_rows, PANEL) + qc_round_up(n_cols, PANEL)),
             blocks = (uint64_t)qc_ceil_div(qc_min_i64(n_tokens, QC_GRAM_COPIED_TOKENS), BLOCK_TOKENS);
    if (compute == QC_COMPUTE_BF16)
        return dims * (uint64_t)qc_round_up(qc_min_i64(n_tokens, QC_GRAM_COPIED_TOKENS / 2), PANEL) *
               sizeof(uint16_t);
    return (dims * blocks * BLOCK_LD + (uint64_t)n_threads * GRAM_TILE) * sizeof(float);
}

uint64_t qc_round_scratch_bytes(int n_threads, int64_t n_rows, int64_t n_cols, int64_t group_elems)
{
    uint64_t n = (uint64_t)n_cols, groups = (uint64_t)qc_ceil_div(n_cols, group_elems),
             block = (uint64_t)qc_descent_block(group_elems, n_cols),
             rows = (uint64_t)qc_min_i64(QC_ROUND_COPIED_ROWS, qc_round_up(qc_ceil_div(n_rows, 8), PANEL)),
             /* errors and targets, scales and zeros; of a block sums, other sums and codes, and a fit */
        thread = 2 * rows * (n + groups) + (3 * rows + PANEL) * block + STRIP,
             factor = qc_max_u64(2 * BLOCK_LD, FACTOR_SOLVE_ROWS) * (n + PANEL) +
                      BLOCK_TOKENS * (n + BLOCK_TOKENS) + (uint64_t)n_threads * GRAM_TILE;
    return qc_max_u64((uint64_t)n_threads * thread, factor) * sizeof(float);
}
