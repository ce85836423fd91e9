/* quantize_rows: the search of kern_quant.c, bit for bit. Half a warp takes a row; thread l holds the partial
 * sums of the elements j with j mod 16 = l, which is the order in which the processors' kernels add. Compiled
 * without fused multiply-add. Equations: docs/methods/rtn.md. */
#include "scales.cuh"

#define LANES     16
#define N_COARSE  12
#define N_FINE    5
#define N_REFIT   2
#define HALF_STEP 1 /* ids of qc_sym_rule; 0 is the full range */
#define NARROW    2

struct grid_choice {
    float scale, inv, zero, error;
};

/* What one half of a warp knows of its row. */
struct row_ctx {
    float qmax, middle;
    int bits, dtype, lane;
    bool symmetric, full_range;
    unsigned mask; /* the lanes of the half */
};

/* Values of one group; weights only if `weighted`. */
template <class P, class H> struct group_ctx {
    P x;
    H h;
    bool weighted;
    int64_t n;
    float lo, hi;
};

template <class T> QC_DEVICE T fold(const row_ctx &row, T v)
{
    for (int i = LANES / 2; i > 0; i /= 2)
        v += __shfl_xor_sync(row.mask, v, i);
    return v;
}

/* code - zero of the value whose distance from 0 is v steps */
QC_DEVICE float code_of(float v, float qmax, float zero)
{
    float q = rintf(v) + zero;
    q = q < 0 ? 0 : q;
    q = q > qmax ? qmax : q;
    return q - zero;
}

/* Replaces *best if this grid has less error. */
template <class G>
QC_DEVICE void try_stored(const row_ctx &row, const G &g, float scale, float zero, grid_choice *best)
{
    float inv = 1 / scale, sum = 0;
    for (int64_t j = row.lane; j < g.n; j += LANES) {
        float x = g.x[j], e = x - scale * code_of(x * inv, row.qmax, zero);
        sum += g.weighted ? e * e * g.h[j] : e * e;
    }
    sum = fold(row, sum);
    if (sum < best->error) {
        grid_choice better = {scale, inv, zero, sum};
        *best = better;
    }
}

QC_DEVICE float zero_of(const row_ctx &row, float range_end, float scale)
{
    float z = -range_end / scale;
    z = z > 0 ? z : 0;
    return rintf(z < row.qmax ? z : row.qmax);
}

/* A raw scale, and the lower end of its range (asymmetric) or the zero. */
template <class G>
QC_DEVICE void try_range(const row_ctx &row, const G &g, float scale, float end, grid_choice *best)
{
    float s = qc_stored_scale(scale, row.dtype, row.bits);
    try_stored(row, g, s, row.symmetric ? end : zero_of(row, end, s), best);
}

template <class G> QC_DEVICE float minmax_scale(const row_ctx &row, const G &g, int sym_rule)
{
    float m = g.hi >= -g.lo ? g.hi : g.lo, size = fabsf(m); /* equal magnitudes: the positive one */
    if (!row.symmetric)
        return (g.hi - g.lo) / row.qmax;
    if (sym_rule == HALF_STEP)
        return size / (row.qmax / 2);
    if (sym_rule == NARROW)
        return size / (row.middle - 1);
    return m / -row.middle;
}

/* Coarse pass over s = p * base for both ends of the code range; returns the distance of neighbours. */
template <class G> QC_DEVICE float search_coarse(const row_ctx &row, const G &g, grid_choice *best)
{
    float levels = row.symmetric ? row.middle : row.qmax;
    float base = (row.symmetric ? (g.hi > -g.lo ? g.hi : -g.lo) : g.hi - g.lo) / levels;
    float p_max = levels / (levels - 1), p_min = row.bits < 4 ? 0.3f : 0.5f;
    float step = (p_max - p_min) / (N_COARSE - 1);
    for (int sign = 0; sign < (row.full_range ? 2 : 1); sign++)
        for (int i = 0; i < N_COARSE; i++) {
            float p = p_max - step * (float)i;
            try_range(row, g, sign ? -(p * base) : p * base, row.symmetric ? row.middle : p * g.lo, best);
        }
    return step * base;
}

/* Finer steps around the best scale, for asymmetric grids with the zeros next to the best one too. */
template <class G> QC_DEVICE void search_fine(const row_ctx &row, const G &g, float step, grid_choice *best)
{
    int n_zeros = row.symmetric ? 0 : 1;
    grid_choice from = *best;
    for (int dz = -n_zeros; dz <= n_zeros; dz++)
        for (int i = -N_FINE; i <= N_FINE; i++) {
            float s = from.scale + step * (float)i / (N_FINE + 1), z = from.zero + (float)dz;
            z = z < 0 ? 0 : z > row.qmax ? row.qmax : z;
            try_stored(row, g, qc_stored_scale(s, row.dtype, row.bits), z, best);
        }
}

/* The least-squares scale for the codes of the best grid, while it helps. */
template <class G> QC_DEVICE void search_refit(const row_ctx &row, const G &g, grid_choice *best)
{
    for (int i = 0; i < N_REFIT; i++) {
        float dot = 0, norm = 0, before = best->error;
        for (int64_t j = row.lane; j < g.n; j += LANES) {
            float x = g.x[j], p = code_of(x * best->inv, row.qmax, best->zero),
                  hp = g.weighted ? g.h[j] * p : p;
            dot += hp * x;
            norm += hp * p;
        }
        dot = fold(row, dot);
        norm = fold(row, norm);
        if (!(norm > 0))
            return;
        try_stored(row, g, qc_stored_scale(dot / norm, row.dtype, row.bits), best->zero, best);
        if (!(best->error < before))
            return;
    }
}

template <class G> QC_DEVICE void find_range(const row_ctx &row, G *g)
{
    float lo = 0, hi = 0;
    for (int64_t j = row.lane; j < g->n; j += LANES) {
        float x = g->x[j];
        lo = x < lo ? x : lo;
        hi = x > hi ? x : hi;
    }
    for (int i = LANES / 2; i > 0; i /= 2) {
        float l = __shfl_xor_sync(row.mask, lo, i), h = __shfl_xor_sync(row.mask, hi, i);
        lo = l < lo ? l : lo;
        hi = h > hi ? h : hi;
    }
    g->lo = lo;
    g->hi = hi;
}

template <class G> QC_DEVICE grid_choice choose(const row_ctx &row, const G &g, const qc_cuda_quant_args &a)
{
    grid_choice best = {1, 1, row.symmetric ? row.middle : 0, 0};
    if (!(g.hi - g.lo > 0))
        return best;
    best.scale = qc_stored_scale(minmax_scale(row, g, a.sym_rule), row.dtype, row.bits);
    best.inv = 1 / best.scale;
    if (!row.symmetric)
        best.zero = zero_of(row, g.lo, best.scale);
    if (!a.search)
        return best;
    best.error = INFINITY;
    try_stored(row, g, best.scale, best.zero, &best);
    float step = search_coarse(row, g, &best);
    search_fine(row, g, step, &best);
    search_refit(row, g, &best);
    return best;
}

/* Codes of a group; adds to the thread's own sums. */
template <class G, class C>
QC_DEVICE void encode(const row_ctx &row, const G &g, const grid_choice &best, C codes,
                      qc_cuda_quant_stats *sums)
{
    float lo = -best.zero - 0.5f, hi = row.qmax - best.zero + 0.5f;
    for (int64_t j = row.lane; j < g.n; j += LANES) {
        float x = g.x[j], v = x / best.scale, p = code_of(v, row.qmax, best.zero);
        double e = (double)(x - best.scale * p), w = (double)x, h = g.weighted ? (double)g.h[j] : 1;
        codes[j] = (uint8_t)(p + best.zero);
        sums->n_clipped += v < lo || v > hi;
        sums->sq_error += e * e * h;
        sums->sq_weight += w * w * h;
    }
}

QC_KERNEL(quantize_rows, quant, QC_CUDA_THREADS)
{
    int64_t r = qc_global_thread() / LANES;
    if (r >= a.n_rows)
        return;
    int lane = threadIdx.x % LANES;
    row_ctx row = {(float)((1 << a.bits) - 1),
                   (float)(1 << (a.bits - 1)),
                   a.bits,
                   a.scale_dtype,
                   lane,
                   a.symmetric != 0,
                   a.symmetric && a.sym_rule == 0,
                   0xffffu << (threadIdx.x % 32 - lane)};
    auto w = qc_view(a.w);
    auto h = qc_view(a.col_weight ? a.col_weight : a.w);
    auto codes = qc_view(a.codes);
    auto scales = qc_view(a.scales);
    auto stats = qc_view(a.stats);
    qc_cuda_quant_stats sums = {};
    for (int64_t i = 0; i < a.n_groups; i++) {
        int64_t c = i * a.group, n = a.n_cols - c < a.group ? a.n_cols - c : a.group;
        auto x = w + (r * a.n_cols + c);
        auto hc = h + (a.col_weight ? c : 0);
        group_ctx<decltype(x), decltype(hc)> g = {x, hc, a.col_weight != NULL, n, 0, 0};
        find_range(row, &g);
        grid_choice best = choose(row, g, a);
        encode(row, g, best, codes + (r * a.n_cols + c), &sums);
        if (lane > 0)
            continue;
        float size = fabsf(best.scale);
        if (g.hi - g.lo > 0) {
            sums.n_small_scale +=
                size <= qc_scale_floor(row.dtype) || (row.dtype == QC_CUDA_F16 && size < 0x1p-14f);
            sums.n_large_scale += size >= qc_scale_ceiling(row.dtype, row.bits);
        } else {
            sums.n_zero_groups++;
        }
        scales[r * a.n_groups + i] = best.scale;
        if (a.zeros)
            qc_view(a.zeros)[r * a.n_groups + i] = (uint8_t)best.zero;
    }
    double sq_error = fold(row, sums.sq_error), sq_weight = fold(row, sums.sq_weight);
    int n_clipped = fold(row, (int)sums.n_clipped);
    if (lane > 0)
        return;
    sums.sq_error = sq_error;
    sums.sq_weight = sq_weight;
    sums.n_clipped = n_clipped;
    stats[r] = sums;
}
