/* Round-to-nearest of one row on grids with minima or super-blocks (QC_GRID_MIN, QC_GRID_SUPER); scalar, so
 * that every processor gives the same bits. Equations: docs/methods/rtn.md. */
#include "kern_quant.h"

#include "qc_blocks.h"
#include "qc_fp.h"

#include <math.h>
#include <string.h>

/* Candidates of the search: codes of a range that is cut to 1 / r of the whole, r from FIRST on. */
enum { N_CUTS = 16, N_REFINE = 2 };
#define FIRST_CUT 0.94f
#define STEP_CUT  0.03f

/* One group. */
typedef struct group_ctx {
    const float *x, *h; /* h NULL: all 1 */
    int64_t n;
    float lo, hi;
    float qmax, zero; /* zero: code of 0 on a symmetric grid, else 0 */
} group_ctx;

typedef struct fit {
    float scale, min, error;
} fit;

static float weight(const group_ctx *g, int64_t j)
{
    return g->h ? g->h[j] : 1;
}

/* Nearest code, halves to even. */
static float code_of(const group_ctx *g, float x, float inv, float min)
{
    float v = (x - min) * inv + g->zero;
    v = v > 0 ? v : 0;
    v = v < g->qmax ? v : g->qmax;
    return (v + 0x1.8p23f) - 0x1.8p23f;
}

static float error_of(const group_ctx *g, float scale, float min)
{
    float inv = 1 / scale, sum = 0;
    for (int64_t j = 0; j < g->n; j++) {
        float e = g->x[j] - (scale * (code_of(g, g->x[j], inv, min) - g->zero) + min);
        sum += e * e * weight(g, j);
    }
    return sum;
}

static void take(const group_ctx *g, float scale, float min, fit *best)
{
    if (!(scale != 0) || !isfinite(scale) || !isfinite(1 / scale) || !isfinite(min))
        return;
    float error = error_of(g, scale, min);
    if (error < best->error)
        *best = (fit){scale, min, error};
}

/* Least squares for the codes of a scale and a minimum: of both; of the scale alone where the minimum would
 * be above 0 although it may not, or the grid has none. */
static void fit_codes(const group_ctx *g, float scale, float min, bool has_min, bool below_zero, fit *best)
{
    float inv = 1 / scale, sw = 0, sx = 0, sl = 0, sll = 0, sxl = 0;
    for (int64_t j = 0; j < g->n; j++) {
        float w = weight(g, j), l = code_of(g, g->x[j], inv, min) - g->zero, wl = w * l;
        sw += w;
        sx += w * g->x[j];
        sl += wl;
        sll += wl * l;
        sxl += wl * g->x[j];
    }
    float det = sw * sll - sl * sl, m = 0, s = sll > 0 ? sxl / sll : 0;
    if (has_min && det > 0) {
        float both = (sll * sx - sl * sxl) / det;
        if (!below_zero || both < 0) {
            m = both;
            s = (sw * sxl - sl * sx) / det;
        }
    }
    take(g, s, m, best);
}

static void search_min(const group_ctx *g, bool below_zero, fit *best)
{
    float range = g->hi - g->lo;
    for (int i = 0; i < N_CUTS; i++)
        fit_codes(g, range / (g->qmax * (FIRST_CUT + STEP_CUT * (float)i)), g->lo, true, below_zero, best);
    for (int i = 0; i < N_REFINE; i++)
        fit_codes(g, best->scale, best->min, true, below_zero, best);
}

/* Symmetric: the larger side of the range at either end of the codes. */
static void search_symmetric(const group_ctx *g, fit *best)
{
    float base = fmaxf(g->hi, -g->lo) / g->zero;
    for (int i = 0; i < N_CUTS; i++) {
        float s = base / (FIRST_CUT + STEP_CUT * (float)i);
        fit_codes(g, s, 0, false, false, best);
        fit_codes(g, -s, 0, false, false, best);
    }
    for (int i = 0; i < N_REFINE; i++)
        fit_codes(g, best->scale, 0, false, false, best);
}

static group_ctx group_of(const float *x, const float *h, int64_t n, const qc_grid *grid)
{
    group_ctx g = {.x = x, .h = h, .n = n, .lo = x[0], .hi = x[0]};
    for (int64_t j = 1; j < n; j++) {
        g.lo = x[j] < g.lo ? x[j] : g.lo;
        g.hi = x[j] > g.hi ? x[j] : g.hi;
    }
    g.qmax = (float)((1 << grid->bits) - 1);
    g.zero = grid->symmetric ? (float)(1 << (grid->bits - 1)) : 0;
    return g;
}

/* Scale and minimum of a group as real numbers. A super-block can only subtract, so its minima are at most 0.
 */
static fit fit_group(group_ctx *g, const qc_quant_spec *spec)
{
    bool below_zero = spec->grid.kind == QC_GRID_SUPER;
    if (below_zero && g->lo > 0)
        g->lo = 0;
    float range = g->hi - g->lo;
    if (spec->grid.symmetric) {
        float most = g->hi >= -g->lo ? g->hi : g->lo;
        fit best = {most / -g->zero, 0, INFINITY};
        if (most == 0 || !isfinite(1 / best.scale))
            return (fit){0, 0, 0};
        best.error = error_of(g, best.scale, 0);
        if (spec->search == QC_SEARCH_MSE)
            search_symmetric(g, &best);
        return best;
    }
    fit best = {range / g->qmax, g->lo, INFINITY};
    if (range == 0 || !isfinite(1 / best.scale))
        return (fit){0, g->lo, 0};
    best.error = error_of(g, best.scale, best.min);
    if (spec->search == QC_SEARCH_MSE)
        search_min(g, below_zero, &best);
    return best;
}

/* Codes of the stored scale and minimum, and their share of the statistics. */
static void encode(const group_ctx *g, float scale, float min, uint8_t *codes, qc_quant_stats *stats)
{
    float inv = 1 / scale, below = -g->zero - 0.5f, above = g->qmax - g->zero + 0.5f;
    bool zeros = true;
    for (int64_t j = 0; j < g->n; j++) {
        float q = code_of(g, g->x[j], inv, min), v = (g->x[j] - min) * inv;
        double e = (double)(g->x[j] - (scale * (q - g->zero) + min)), h = (double)weight(g, j);
        codes[j] = (uint8_t)q;
        stats->sq_error += e * e * h;
        stats->sq_weight += (double)g->x[j] * (double)g->x[j] * h;
        stats->n_clipped += v < below || v > above;
        zeros = zeros && g->x[j] == 0;
    }
    stats->n_zero_groups += zeros;
    stats->n_small_scale += !zeros && fabsf(scale) < 0x1p-14f;
}

static float half(float x)
{
    x = fminf(fmaxf(x, -65504.0f), 65504.0f);
    return qc_f16_to_f32(qc_f32_to_f16(x));
}

/* A scale that divides: never 0. */
static float half_scale(float x, const qc_grid *grid)
{
    qc_quant_store_scales(&x, 1, QC_DT_F16, grid->bits);
    return x;
}

static void row_with_minima(const float *w, int64_t n_cols, const qc_quant_spec *spec, const float *h,
                            const qc_code_rows *row, qc_quant_stats *stats)
{
    const qc_grid *grid = &spec->grid;
    for (int64_t c = 0, i = 0; c < n_cols; c += grid->group_elems, i++) {
        int64_t n = n_cols - c < grid->group_elems ? n_cols - c : grid->group_elems;
        group_ctx g = group_of(w + c, h ? h + c : NULL, n, grid);
        fit f = fit_group(&g, spec);
        row->scales[i] = half_scale(f.scale, grid);
        row->mins[i] = half(f.min);
        encode(&g, row->scales[i], row->mins[i], row->codes + c, stats);
    }
}

/* Sub-scale and sub-minimum next to the rounded ones whose codes have the least error. */
static void refine_subs(const group_ctx *g, const qc_grid *grid, const float *super, int16_t *subs)
{
    int most = grid->symmetric ? 127 : 63, least = grid->symmetric ? -127 : 1, ds, dm;
    int scale = subs[0], min = subs[1];
    float best = error_of(g, super[0] * (float)scale, -(super[1] * (float)min));
    for (ds = -1; ds <= 1; ds++)
        for (dm = grid->symmetric ? 0 : -1; dm <= (grid->symmetric ? 0 : 1); dm++) {
            int s = scale + ds, m = min + dm;
            if (s < least || s > most || s == 0 || m < 0 || m > 63)
                continue;
            float error = error_of(g, super[0] * (float)s, -(super[1] * (float)m));
            if (error < best) {
                best = error;
                subs[0] = (int16_t)s;
                subs[1] = (int16_t)m;
            }
        }
}

static void row_of_supers(const float *w, int64_t n_cols, const qc_quant_spec *spec, const float *h,
                          const qc_code_rows *row, qc_quant_stats *stats)
{
    const qc_grid *grid = &spec->grid;
    int64_t n_groups = grid->super_elems / grid->group_elems;
    float scales[QC_BLOCK_MAX_GROUPS], mins[QC_BLOCK_MAX_GROUPS];
    group_ctx groups[QC_BLOCK_MAX_GROUPS];
    for (int64_t i = 0; i < n_cols / grid->super_elems; i++) {
        float *super = row->supers + 2 * i;
        int16_t *subs = row->subs + 2 * i * n_groups;
        for (int64_t j = 0; j < n_groups; j++) {
            int64_t c = i * grid->super_elems + j * grid->group_elems;
            groups[j] = group_of(w + c, h ? h + c : NULL, grid->group_elems, grid);
            fit f = fit_group(&groups[j], spec);
            scales[j] = f.scale;
            mins[j] = f.min;
        }
        qc_super_round(grid, scales, mins, super, subs);
        for (int64_t j = 0; j < n_groups; j++) {
            if (spec->search == QC_SEARCH_MSE)
                refine_subs(&groups[j], grid, super, subs + 2 * j);
            float scale = super[0] * (float)subs[2 * j], min = -(super[1] * (float)subs[2 * j + 1]);
            row->scales[i * n_groups + j] = scale;
            if (row->mins)
                row->mins[i * n_groups + j] = min;
            encode(&groups[j], scale, min, row->codes + i * grid->super_elems + j * grid->group_elems, stats);
        }
    }
}

void qc_quant_super_row(const float *w, int64_t n_cols, const qc_quant_spec *spec, const float *col_weight,
                        const qc_code_rows *row, qc_quant_stats *stats)
{
    if (spec->grid.kind == QC_GRID_MIN)
        row_with_minima(w, n_cols, spec, col_weight, row, stats);
    else
        row_of_supers(w, n_cols, spec, col_weight, row, stats);
}
