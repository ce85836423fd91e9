#include "hessian.h"

#include "qc_alloc.h"
#include "qc_math.h"

#include <assert.h>

static int64_t triangle(int64_t n)
{
    return n * (n + 1) / 2;
}

static int fill_zero(qc_backend *be, float *buffer, int64_t n_elems, qc_err *err)
{
    enum { CHUNK = 1 << 14 };
    static const float zeros[CHUNK];
    for (int64_t i = 0; i < n_elems; i += CHUNK)
        QC_TRY(be->upload(be, buffer + i, zeros, qc_min_i64(CHUNK, n_elems - i), err));
    return QC_OK;
}

float *qc_backend_zeros(qc_backend *be, int64_t n_elems, qc_err *err)
{
    float *buffer = be->alloc(be, n_elems, err);
    if (buffer && fill_zero(be, buffer, n_elems, err) < 0) {
        be->free(be, buffer);
        return NULL;
    }
    return buffer;
}

static void free_part(qc_backend *be, qc_hessian_part *part)
{
    be->free(be, part->h);
    be->free(be, part->sum_abs);
    *part = (qc_hessian_part){0};
}

int qc_hessian_init(qc_hessian *hs, qc_backend *be, int64_t n, int64_t first_block, qc_err *err)
{
    *hs = (qc_hessian){.be = be, .n = n, .next_block = first_block};
    hs->max_abs = qc_backend_zeros(be, n, err);
    return hs->max_abs ? QC_OK : QC_E_RESOURCE;
}

int qc_hessian_init_routed(qc_hessian *hs, qc_backend *be, int64_t n, int64_t first_block, qc_err *err)
{
    QC_TRY(qc_hessian_init(hs, be, n, first_block, err));
    hs->routed = true;
    return QC_OK;
}

static void free_block(qc_hessian *hs)
{
    hs->be->free(hs->be, hs->block_h);
    hs->be->free(hs->be, hs->block_abs);
    hs->block_h = hs->block_abs = NULL;
}

void qc_hessian_clear(qc_hessian *hs)
{
    if (!hs->be)
        return;
    free_block(hs);
    hs->be->free(hs->be, hs->max_abs);
    for (int i = 0; i < hs->n_parts; i++)
        free_part(hs->be, &hs->parts[i]);
    qc_free(hs->parts);
    *hs = (qc_hessian){0};
}

/* Add the triangle of a square matrix to a packed one (to_packed), or the other way round. The elements above
 * the diagonal are not touched. */
static int add_triangle(qc_backend *be, float *packed, float *square, int64_t n, bool to_packed, qc_err *err)
{
    for (int64_t r = 0; r < n; r++) {
        float *p = packed + triangle(r), *s = square + r * n;
        QC_TRY(to_packed ? be->add(be, p, s, 1, r + 1, err) : be->add(be, s, p, 1, r + 1, err));
    }
    return QC_OK;
}

/* left += right, which goes. */
static int join(qc_hessian *hs, qc_hessian_part *left, qc_hessian_part *right, qc_err *err)
{
    QC_TRY(hs->be->add(hs->be, left->h, right->h, 1, triangle(hs->n), err));
    QC_TRY(hs->be->add(hs->be, left->sum_abs, right->sum_abs, 1, hs->n, err));
    left->n_tokens += right->n_tokens;
    free_part(hs->be, right);
    hs->n_parts--;
    return QC_OK;
}

/* Siblings at the end become one part of the next level, as often as there are some. */
static int join_siblings(qc_hessian *hs, qc_err *err)
{
    while (hs->n_parts >= 2) {
        qc_hessian_part *left = &hs->parts[hs->n_parts - 2], *right = left + 1;
        if (left->level != right->level || left->index % 2 != 0 || left->index + 1 != right->index)
            break;
        QC_TRY(join(hs, left, right, err));
        left->level++;
        left->index /= 2;
    }
    return QC_OK;
}

static int grow_parts(qc_hessian *hs, qc_err *err)
{
    if (hs->n_parts < hs->cap_parts)
        return QC_OK;
    size_t cap = hs->cap_parts ? (size_t)hs->cap_parts * 2 : 8;
    qc_hessian_part *parts =
        qc_realloc(hs->parts, (size_t)hs->cap_parts * sizeof *parts, cap * sizeof *parts);
    if (!parts)
        return qc_fail_nomem(err, "statistics", cap * sizeof *parts);
    hs->parts = parts;
    hs->cap_parts = (int)cap;
    return QC_OK;
}

/* May a part follow what is there? */
static int check_part(const qc_hessian *hs, const qc_hessian_part *part, qc_err *err)
{
    const qc_hessian_part *last = hs->n_parts ? &hs->parts[hs->n_parts - 1] : NULL;
    if (part->level < 0 || part->level > 30 || part->index < 0 || part->index > INT32_MAX ||
        part->n_tokens < !hs->routed || part->n_tokens > (int64_t)QC_HESSIAN_BLOCK << part->level)
        return qc_fail(err, QC_E_INPUT, "sums of %lld tokens at level %d, index %lld are impossible",
                       (long long)part->n_tokens, part->level, (long long)part->index);
    if (part->index << part->level != hs->next_block)
        return qc_fail(err, QC_E_INPUT, "sums from block %lld where block %lld should follow",
                       (long long)(part->index << part->level), (long long)hs->next_block);
    if (!hs->routed && last && last->n_tokens != (int64_t)QC_HESSIAN_BLOCK << last->level)
        return qc_fail(err, QC_E_INPUT, "sums follow block %lld, which is not full (%d tokens)",
                       (long long)hs->next_block - 1, QC_HESSIAN_BLOCK);
    return QC_OK;
}

int qc_hessian_append(qc_hessian *hs, const qc_hessian_part *part, qc_err *err)
{
    qc_hessian_part copy = *part;
    int rc = check_part(hs, part, err);
    if (rc == QC_OK)
        rc = grow_parts(hs, err);
    if (rc < 0) {
        free_part(hs->be, &copy);
        return rc;
    }
    hs->parts[hs->n_parts++] = copy;
    hs->n_tokens += copy.n_tokens;
    hs->next_block += (int64_t)1 << copy.level;
    return join_siblings(hs, err);
}

/* part += the block's sums */
static int add_block(const qc_hessian *hs, const qc_hessian_part *part, qc_err *err)
{
    if (hs->block_tokens == 0)
        return QC_OK;
    QC_TRY(add_triangle(hs->be, part->h, hs->block_h, hs->n, true, err));
    return hs->be->add(hs->be, part->sum_abs, hs->block_abs, 1, hs->n, err);
}

/* The block's sum goes straight into its left sibling if that is there. */
static int close_into_sibling(qc_hessian *hs, qc_hessian_part *left, qc_err *err)
{
    QC_TRY(add_block(hs, left, err));
    left->n_tokens += hs->block_tokens;
    left->level = 1;
    left->index /= 2;
    hs->next_block++;
    hs->block_tokens = 0;
    return join_siblings(hs, err);
}

int qc_hessian_end_block(qc_hessian *hs, qc_err *err)
{
    qc_backend *be = hs->be;
    qc_hessian_part *last = hs->n_parts ? &hs->parts[hs->n_parts - 1] : NULL;
    if (last && last->level == 0 && last->index % 2 == 0)
        return close_into_sibling(hs, last, err);
    qc_hessian_part part = {.index = hs->next_block, .n_tokens = hs->block_tokens};
    part.h = qc_backend_zeros(be, triangle(hs->n), err);
    part.sum_abs = part.h ? qc_backend_zeros(be, hs->n, err) : NULL;
    int rc = part.sum_abs ? add_block(hs, &part, err) : QC_E_RESOURCE;
    if (rc < 0) {
        free_part(be, &part);
        return rc;
    }
    hs->n_tokens -= hs->block_tokens; /* counted again as a part */
    hs->block_tokens = 0;
    return qc_hessian_append(hs, &part, err);
}

int qc_hessian_close(qc_hessian *hs, qc_err *err)
{
    return hs->block_tokens ? qc_hessian_end_block(hs, err) : QC_OK;
}

/* The square matrix stays allocated from block to block. */
static int zero_block(qc_hessian *hs, qc_err *err)
{
    qc_backend *be = hs->be;
    if (!hs->block_h && !(hs->block_h = be->alloc(be, hs->n * hs->n, err)))
        return QC_E_RESOURCE;
    if (!hs->block_abs && !(hs->block_abs = be->alloc(be, hs->n, err)))
        return QC_E_RESOURCE;
    QC_TRY(fill_zero(be, hs->block_h, hs->n * hs->n, err));
    return fill_zero(be, hs->block_abs, hs->n, err);
}

int qc_hessian_add(qc_hessian *hs, const float *x, int64_t ldx, int64_t n_tokens, qc_err *err)
{
    qc_backend *be = hs->be;
    while (n_tokens > 0) {
        if (hs->block_tokens == 0)
            QC_TRY(zero_block(hs, err));
        int64_t take = qc_min_i64(n_tokens, QC_HESSIAN_BLOCK - hs->block_tokens);
        assert(take > 0);
        QC_TRY(be->gram(be, hs->block_h, x, ldx, NULL, 0, take, hs->n, hs->n, 1, err));
        QC_TRY(be->column_stats(be, hs->block_abs, hs->max_abs, x, ldx, take, hs->n, err));
        hs->block_tokens += take;
        hs->n_tokens += take;
        x += take * ldx;
        n_tokens -= take;
        if (hs->block_tokens == QC_HESSIAN_BLOCK && !hs->routed)
            QC_TRY(qc_hessian_close(hs, err));
    }
    return QC_OK;
}

/* The sum of all parts in the square matrix. */
static int unpack_parts(qc_hessian *hs, qc_err *err)
{
    QC_TRY(qc_hessian_close(hs, err));
    while (hs->n_parts > 1)
        QC_TRY(join(hs, &hs->parts[hs->n_parts - 2], &hs->parts[hs->n_parts - 1], err));
    QC_TRY(zero_block(hs, err));
    if (hs->n_parts == 0)
        return QC_OK;
    QC_TRY(add_triangle(hs->be, hs->parts[0].h, hs->block_h, hs->n, false, err));
    QC_TRY(hs->be->add(hs->be, hs->block_abs, hs->parts[0].sum_abs, 1, hs->n, err));
    free_part(hs->be, &hs->parts[0]);
    hs->n_parts = 0;
    return QC_OK;
}

int qc_hessian_finish(qc_hessian *hs, const float **ret_h, const float **ret_sum_abs, qc_err *err)
{
    if (hs->n_parts || hs->block_tokens == 0)
        QC_TRY(unpack_parts(hs, err));
    hs->block_tokens = 0; /* a single block is there already, as experts mostly have it */
    QC_TRY(hs->be->mirror(hs->be, hs->block_h, hs->n, err));
    *ret_h = hs->block_h;
    *ret_sum_abs = hs->block_abs;
    return QC_OK;
}

uint64_t qc_hessian_bytes(int64_t n, int64_t n_tokens)
{
    int64_t blocks = qc_ceil_div(n_tokens, QC_HESSIAN_BLOCK), parts = 1;
    while (blocks > 2) {
        blocks = qc_ceil_div(blocks, 2);
        parts++;
    }
    return ((uint64_t)n * (uint64_t)n + (uint64_t)(parts * triangle(n))) * sizeof(float);
}
