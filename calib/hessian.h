/* Statistics of one input over many tokens: H = sum x x^T, sum |x|, max |x|, count.
 *
 * Tokens are taken in blocks of QC_HESSIAN_BLOCK; each block is summed in float32 in token order, and blocks
 * are added as a binary tree over their global index (blocks 2i and 2i + 1 of a level are one block of the
 * next). The sum of a run of blocks therefore is the same however the run was cut into shards, provided that
 * the cuts lie between blocks: a shard keeps at most two partial sums per level of the tree, and merging them
 * joins siblings.
 *
 * Memory: one square matrix for the block being filled (and for the result), and half of one for each partial
 * sum, of which a run from block 0 keeps log2(blocks) + 1 at most. */
#ifndef QC_HESSIAN_H
#define QC_HESSIAN_H

#include "backend.h"

#define QC_HESSIAN_BLOCK 2048

/* Sum over blocks index << level .. ((index + 1) << level) - 1. */
typedef struct qc_hessian_part {
    int level;
    int64_t index;
    int64_t n_tokens; /* QC_HESSIAN_BLOCK << level, fewer where the last block of the text is not full, or
                         whatever was routed here */
    float *h;         /* lower triangle by rows, [n * (n + 1) / 2]: row r starts at r * (r + 1) / 2; backend
                         memory */
    float *sum_abs;   /* [n], backend memory */
} qc_hessian_part;

typedef struct qc_hessian {
    qc_backend *be; /* borrowed */
    int64_t n;      /* input width */
    bool routed;    /* of an expert: blocks hold the tokens that it gets of each block of the corpus */
    int64_t n_tokens;
    float *max_abs;         /* [n], backend memory */
    qc_hessian_part *parts; /* in ascending order of blocks; owned */
    int n_parts, cap_parts;
    int64_t next_block;   /* global index of the block being filled */
    int64_t block_tokens; /* tokens in it so far */
    float *block_h;       /* [n, n] its sum, lower triangle; the result after qc_hessian_finish */
    float *block_abs;     /* [n] */
} qc_hessian;

/* Start at block `first_block` of the corpus. */
int qc_hessian_init(qc_hessian *hs, qc_backend *be, int64_t n, int64_t first_block,
                    qc_err *err) QC_WARN_UNUSED;
void qc_hessian_clear(qc_hessian *hs);

/* The same for an expert, which gets any number of the tokens of a block, also none. Blocks end where the
 * caller says so, by qc_hessian_end_block, for every block of the corpus; so the tree, and with it merging,
 * is that of all tokens. */
int qc_hessian_init_routed(qc_hessian *hs, qc_backend *be, int64_t n, int64_t first_block,
                           qc_err *err) QC_WARN_UNUSED;
int qc_hessian_end_block(qc_hessian *hs, qc_err *err) QC_WARN_UNUSED;

/* Take tokens x[n_tokens, n] (backend memory, stride ldx). Other cuts into calls may give other last bits (of
 * H: except at multiples of 512 tokens), so every user adds one window at a time. */
int qc_hessian_add(qc_hessian *hs, const float *x, int64_t ldx, int64_t n_tokens, qc_err *err) QC_WARN_UNUSED;

/* Close the block being filled, be it full or not: `parts` then hold all tokens. Behind a block that is not
 * full nothing can follow. */
int qc_hessian_close(qc_hessian *hs, qc_err *err) QC_WARN_UNUSED;

/* Put a part behind those that are there (from a statistics file); takes its buffers (backend memory), also
 * on failure. QC_E_INPUT if its blocks do not follow. The caller sees to max_abs. */
int qc_hessian_append(qc_hessian *hs, const qc_hessian_part *part, qc_err *err) QC_WARN_UNUSED;

/* Close the last block, add what is left in ascending order of size and fill the upper triangle: *ret_h [n,
 * n] and *ret_sum_abs [n] are owned by hs. Nothing can be added afterwards. */
int qc_hessian_finish(qc_hessian *hs, const float **ret_h, const float **ret_sum_abs,
                      qc_err *err) QC_WARN_UNUSED;

/* Bytes that the statistics of n_tokens tokens of width n take at most, for plans. */
uint64_t qc_hessian_bytes(int64_t n, int64_t n_tokens);

/* Backend buffer of n_elems zeros; NULL with a message when out of memory. */
float *qc_backend_zeros(qc_backend *be, int64_t n_elems, qc_err *err);

#endif
