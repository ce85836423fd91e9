/* Choice of scale and zero for each group of a row. Equations and measurements: docs/methods/rtn.md. */
#include "kern_quant.h"

#include "qc_fp.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* Search: N_COARSE values of p, evenly spaced from the largest that can be useful down to p_min; then N_FINE
 * on each side of the best one, up to its neighbours; then at most N_REFIT scales refitted to the codes of
 * the best grid. */
enum { N_COARSE = 12, N_FINE = 5, N_REFIT = 2 };

static float p_min(int bits)
{
    return bits < 4 ? 0.3f : 0.5f;
}

/* What stays the same along a row. */
typedef struct row_ctx {
    const qc_quant_ops *ops;
    const qc_quant_spec *spec;
    float qmax;   /* largest code */
    float middle; /* zero of a symmetric grid */
} row_ctx;

/* One group: its values and the range widened to contain 0. */
typedef struct group_ctx {
    const float *x, *h;
    int64_t n;
    float lo, hi;
} group_ctx;

typedef struct grid_choice {
    float scale, inv, zero, error;
} grid_choice;

/* Scales below this are stored as this: the least subnormal of F16, and the least normal elsewhere so that 1
 * / scale is finite. */
static float scale_floor(qc_dtype dtype)
{
    return dtype == QC_DT_F16 ? 0x1p-24f : FLT_MIN;
}

/* (2^bits - 1) * scale must be finite in float32. */
static float scale_ceiling(qc_dtype dtype, int bits)
{
    return dtype == QC_DT_F16 ? 65504.0f : ldexpf(1, 127 - bits);
}

void qc_quant_store_scales(float *s, int n, qc_dtype dtype, int bits)
{
    const uint32_t drop = dtype == QC_DT_F16 ? 13 : dtype == QC_DT_BF16 ? 16 : 0; /* mantissa bits that go */
    const uint32_t half = drop ? (1u << (drop - 1)) - 1 : 0, keep = ~((1u << drop) - 1), odd = drop ? 1 : 0;
    const float least = scale_floor(dtype), most = scale_ceiling(dtype, bits);
    const float subnormal =
        dtype == QC_DT_F16 ? 0x1p-14f : 0; /* below: multiples of 2^-24, the unit of 0.5 + x */
    for (int i = 0; i < n; i++) {
        float a = fabsf(s[i]);
        uint32_t u = qc_f32_bits(a);
        float normal = qc_f32_from_bits((u + half + ((u >> drop) & odd)) & keep);
        float small = (a + 0.5f) - 0.5f;
        float r = a < subnormal ? small : normal;
        r = r < least ? least : r;
        r = r > most ? most : r;
        s[i] = copysignf(r, s[i]);
    }
}

/* Nearest integer, halves to even, of 0 <= v < 2^22. */
static float round_small(float v)
{
    return (v + 0x1.8p23f) - 0x1.8p23f;
}

/* Turn raw scales into what is stored, with their reciprocals; for asymmetric grids zero[i] holds the lower
 * end of the range on entry and its zero point on return. */
static void finish_tries(const row_ctx *row, qc_quant_tries *t, bool zero_is_range_end)
{
    qc_quant_store_scales(t->scale, t->n, row->spec->grid.scale_dtype, row->spec->grid.bits);
    for (int i = 0; i < t->n; i++)
        t->inv[i] = 1 / t->scale[i];
    if (!zero_is_range_end)
        return;
    for (int i = 0; i < t->n; i++) {
        float z = -t->zero[i] / t->scale[i];
        z = z > 0 ? z : 0;
        t->zero[i] = round_small(z < row->qmax ? z : row->qmax);
    }
}

static void add_try(qc_quant_tries *t, float scale, float zero)
{
    t->scale[t->n] = scale;
    t->zero[t->n++] = zero;
}

/* Evaluate the tries; the first of those with the least error replaces *best if it is better. */
static void take_best(const row_ctx *row, const group_ctx *g, const qc_quant_tries *t, grid_choice *best)
{
    float error[QC_QUANT_MAX_TRIES];
    row->ops->scan(g->x, g->h, g->n, row->qmax, t, error);
    for (int i = 0; i < t->n; i++)
        if (error[i] < best->error)
            *best = (grid_choice){t->scale[i], t->inv[i], t->zero[i], error[i]};
}

/* Raw scale of the min-max rule. */
static float minmax_scale(const row_ctx *row, const group_ctx *g)
{
    float m = g->hi >= -g->lo ? g->hi : g->lo, a = fabsf(m); /* equal magnitudes: the positive one */
    if (!row->spec->grid.symmetric)
        return (g->hi - g->lo) / row->qmax;
    switch (row->spec->sym_rule) {
    case QC_SYM_HALF_STEP:
        return a / (row->qmax / 2);
    case QC_SYM_NARROW:
        return a / (row->middle - 1);
    default:
        return m / -row->middle;
    }
}

static void minmax_grid(const row_ctx *row, const group_ctx *g, grid_choice *ret)
{
    bool symmetric = row->spec->grid.symmetric;
    qc_quant_tries t = {.n = 0};
    add_try(&t, minmax_scale(row, g), symmetric ? row->middle : g->lo);
    finish_tries(row, &t, !symmetric);
    *ret = (grid_choice){t.scale[0], t.inv[0], t.zero[0], 0};
}

static float clamp_zero(const row_ctx *row, float z)
{
    return z < 0 ? 0 : z > row->qmax ? row->qmax : z;
}

/* Coarse pass over s = p * base for both ends of the code range; returns the distance of neighbours. */
static float search_coarse(const row_ctx *row, const group_ctx *g, grid_choice *best)
{
    bool symmetric = row->spec->grid.symmetric;
    float levels = symmetric ? row->middle : row->qmax; /* steps of the longer side / of the range */
    float base = (symmetric ? fmaxf(g->hi, -g->lo) : g->hi - g->lo) / levels;
    float p_max = levels / (levels - 1); /* beyond it a code at the end would never be used */
    float step = (p_max - p_min(row->spec->grid.bits)) / (N_COARSE - 1);
    qc_quant_tries t = {.n = 0};
    for (int i = 0; i < N_COARSE; i++) {
        float p = p_max - step * (float)i;
        add_try(&t, p * base, symmetric ? row->middle : p * g->lo);
    }
    if (symmetric && row->spec->sym_rule == QC_SYM_FULL_RANGE)
        for (int i = 0; i < N_COARSE; i++)
            add_try(&t, -t.scale[i], row->middle);
    finish_tries(row, &t, !symmetric);
    take_best(row, g, &t, best);
    return step * base;
}

/* Finer steps around the best scale, for asymmetric grids with the zeros next to the best one too. */
static void search_fine(const row_ctx *row, const group_ctx *g, float step, grid_choice *best)
{
    int n_zeros = row->spec->grid.symmetric ? 0 : 1;
    qc_quant_tries t = {.n = 0};
    for (int dz = -n_zeros; dz <= n_zeros; dz++)
        for (int i = -N_FINE; i <= N_FINE; i++)
            add_try(&t, best->scale + step * (float)i / (N_FINE + 1),
                    clamp_zero(row, best->zero + (float)dz));
    finish_tries(row, &t, false);
    take_best(row, g, &t, best);
}

/* The least-squares scale for the codes of the best grid (docs/methods/rtn.md), while it helps. */
static void search_refit(const row_ctx *row, const group_ctx *g, grid_choice *best)
{
    for (int i = 0; i < N_REFIT; i++) {
        float dot, norm, before = best->error;
        row->ops->fit(g->x, g->h, g->n, row->qmax, best->inv, best->zero, &dot, &norm);
        if (!(norm > 0))
            return;
        qc_quant_tries t = {.n = 0};
        add_try(&t, dot / norm, best->zero);
        finish_tries(row, &t, false);
        take_best(row, g, &t, best);
        if (!(best->error < before))
            return;
    }
}

static void search_grid(const row_ctx *row, const group_ctx *g, grid_choice *best)
{
    qc_quant_tries t = {.n = 1, .scale = {best->scale}, .inv = {best->inv}, .zero = {best->zero}};
    best->error = INFINITY;
    take_best(row, g, &t, best);
    float step = search_coarse(row, g, best);
    search_fine(row, g, step, best);
    search_refit(row, g, best);
}

static void quant_group(const row_ctx *row, group_ctx *g, uint8_t *codes, float *scale, uint8_t *zero,
                        qc_quant_sums *sums, qc_quant_stats *stats)
{
    const qc_grid *grid = &row->spec->grid;
    row->ops->range(g->x, g->n, &g->lo, &g->hi);
    grid_choice best = {1, 1, grid->symmetric ? row->middle : 0, 0};
    if (g->hi - g->lo > 0) {
        minmax_grid(row, g, &best);
        if (row->spec->search == QC_SEARCH_MSE)
            search_grid(row, g, &best);
        float a = fabsf(best.scale), floor = scale_floor(grid->scale_dtype);
        stats->n_small_scale += a <= floor || (grid->scale_dtype == QC_DT_F16 && a < 0x1p-14f);
        stats->n_large_scale += a >= scale_ceiling(grid->scale_dtype, grid->bits);
    } else {
        stats->n_zero_groups++;
    }
    row->ops->encode(g->x, g->h, g->n, row->qmax, best.scale, best.zero, codes, sums);
    *scale = best.scale;
    if (zero)
        *zero = (uint8_t)best.zero;
}

static double fold(const double *l)
{
    double s[QC_QUANT_LANES];
    memcpy(s, l, sizeof s);
    for (int n = QC_QUANT_LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++)
            s[i] += s[i + n];
    return s[0];
}

void qc_quant_row(const qc_quant_ops *ops, const float *w, int64_t n_cols, const qc_quant_spec *spec,
                  const float *col_weight, uint8_t *codes, float *scales, uint8_t *zeros,
                  qc_quant_stats *stats)
{
    int64_t group = spec->grid.group_elems;
    row_ctx row = {.ops = ops,
                   .spec = spec,
                   .qmax = (float)((1 << spec->grid.bits) - 1),
                   .middle = (float)(1 << (spec->grid.bits - 1))};
    qc_quant_sums sums = {.n_clipped = 0};
    for (int64_t c = 0, i = 0; c < n_cols; c += group, i++) {
        group_ctx g = {.x = w + c,
                       .h = col_weight ? col_weight + c : NULL,
                       .n = n_cols - c < group ? n_cols - c : group};
        quant_group(&row, &g, codes + c, &scales[i], spec->grid.symmetric ? NULL : &zeros[i], &sums, stats);
    }
    stats->sq_error += fold(sums.sq_error);
    stats->sq_weight += fold(sums.sq_weight);
    stats->n_clipped += sums.n_clipped;
}
