/* Causal attention in tiles (FlashAttention's order, Dao et al. 2022): a block takes a tile of queries of one
 * head and walks over the keys with an online softmax. 16 x 16 threads: thread (ty, tx) holds rows ty * R ..
 * of scores and of the result, and of both the columns tx, tx + 16, ... The tile of keys makes room for that
 * of values. Memory does not grow with T. */
#include "kernel.cuh"

/* T: queries, and keys, of a tile; D: most elements of a head. */
template <int T, int D> struct attention_tile {
    static constexpr int R = T / 16, C = D / 16, LD = D + 1, LDP = T + 1;
};

/* Rows row0 .. of one head to a tile; what does not exist becomes 0. */
template <int T, int D, class S, class X>
QC_DEVICE void load_tile(S tile, X x, int64_t row0, int64_t n_rows, int64_t ld, int64_t dim, float scale,
                         bool bf16)
{
    for (int i = threadIdx.x; i < T * D; i += blockDim.x) {
        int r = i / D, d = i % D;
        float v = row0 + r < n_rows && d < dim ? scale * x[(row0 + r) * ld + d] : 0;
        tile[r * (D + 1) + d] = bf16 ? qc_round_bf16(v) : v;
    }
}

/* Largest and sum over the 16 threads that share rows. */
QC_DEVICE float row_max(float v)
{
    for (int i = 8; i > 0; i /= 2) {
        float other = __shfl_xor_sync(QC_FULL_WARP, v, i);
        v = other > v ? other : v;
    }
    return v;
}

QC_DEVICE float row_sum(float v)
{
    for (int i = 8; i > 0; i /= 2)
        v += __shfl_xor_sync(QC_FULL_WARP, v, i);
    return v;
}

/* Scores to weights, into the tile p; acc shrinks where a larger score appears. */
template <int T, int D, class S>
QC_DEVICE void softmax_tile(const qc_cuda_attention_args &a, float (&s)[T / 16][T / 16],
                            float (&acc)[T / 16][D / 16], float (&max)[T / 16], float (&sum)[T / 16], S p,
                            int64_t q0, int64_t k0)
{
    typedef attention_tile<T, D> tile;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    QC_UNROLL
    for (int r = 0; r < tile::R; r++) {
        int64_t q = q0 + ty * tile::R + r, first = a.window > 0 ? q - a.window + 1 : 0;
        float top = -FLT_MAX, part = 0;
        bool seen[tile::R];
        QC_UNROLL
        for (int c = 0; c < tile::R; c++) {
            int64_t k = k0 + tx + 16 * c;
            seen[c] = k <= q && k >= first && q < a.n_tokens;
            if (a.softcap > 0)
                s[r][c] = a.softcap * tanhf(s[r][c] / a.softcap);
            if (seen[c] && s[r][c] > top)
                top = s[r][c];
        }
        top = row_max(top);
        top = top > max[r] ? top : max[r];
        float shrink = expf(max[r] - top);
        QC_UNROLL
        for (int c = 0; c < tile::R; c++) {
            float w = seen[c] ? expf(s[r][c] - top) : 0;
            part += w;
            p[(ty * tile::R + r) * tile::LDP + tx + 16 * c] = a.bf16 ? qc_round_bf16(w) : w;
        }
        sum[r] = sum[r] * shrink + row_sum(part);
        max[r] = top;
        QC_UNROLL
        for (int c = 0; c < tile::C; c++)
            acc[r][c] *= shrink;
    }
}

template <int T, int D> QC_DEVICE void attend(const qc_cuda_attention_args &a)
{
    typedef attention_tile<T, D> tile;
    auto q_tile = qc_shared<float>();
    auto kv_tile = q_tile + T * tile::LD;
    auto p_tile = kv_tile + T * tile::LD;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    /* long tiles (late queries) first, so that the multiprocessors end together */
    int64_t q0 = (int64_t)(gridDim.x - 1 - blockIdx.x) * T, head = blockIdx.y,
            kv_head = head / (a.n_heads / a.n_kv_heads);
    int64_t ldq = a.n_heads * a.head_dim, ldk = a.n_kv_heads * a.head_dim;
    auto k = qc_view(a.k) + kv_head * a.head_dim;
    auto v = qc_view(a.v) + kv_head * a.head_dim;
    float acc[tile::R][tile::C] = {}, max[tile::R], sum[tile::R] = {};
    for (int r = 0; r < tile::R; r++)
        max[r] = -FLT_MAX;
    load_tile<T, D>(q_tile, qc_view(a.q) + head * a.head_dim, q0, a.n_tokens, ldq, a.head_dim, a.scale,
                    a.bf16);
    int64_t first = a.window > 0 && q0 - a.window + 1 > 0 ? q0 - a.window + 1 : 0;
    for (int64_t k0 = first / T * T; k0 < q0 + T && k0 < a.n_tokens; k0 += T) {
        float s[tile::R][tile::R] = {};
        load_tile<T, D>(kv_tile, k, k0, a.n_tokens, ldk, a.head_dim, 1, a.bf16);
        __syncthreads();
        for (int d = 0; d < a.head_dim; d++) {
            float x[tile::R], y[tile::R];
            QC_UNROLL
            for (int r = 0; r < tile::R; r++)
                x[r] = q_tile[(ty * tile::R + r) * tile::LD + d];
            QC_UNROLL
            for (int c = 0; c < tile::R; c++)
                y[c] = kv_tile[(tx + 16 * c) * tile::LD + d];
            QC_UNROLL
            for (int r = 0; r < tile::R; r++)
                QC_UNROLL
            for (int c = 0; c < tile::R; c++)
                s[r][c] = qc_mul_add(x[r], y[c], s[r][c]);
        }
        softmax_tile<T, D>(a, s, acc, max, sum, p_tile, q0, k0);
        __syncthreads();
        load_tile<T, D>(kv_tile, v, k0, a.n_tokens, ldk, a.head_dim, 1, a.bf16);
        __syncthreads();
        for (int i = 0; i < T; i++) {
            float x[tile::R];
            QC_UNROLL
            for (int r = 0; r < tile::R; r++)
                x[r] = p_tile[(ty * tile::R + r) * tile::LDP + i];
            QC_UNROLL
            for (int c = 0; c < tile::C; c++) {
                float y = kv_tile[i * tile::LD + tx + 16 * c];
                QC_UNROLL
                for (int r = 0; r < tile::R; r++)
                    acc[r][c] = qc_mul_add(x[r], y, acc[r][c]);
            }
        }
        __syncthreads();
    }
    auto out = qc_view(a.out) + head * a.head_dim;
    for (int r = 0; r < tile::R; r++) {
        int64_t q = q0 + ty * tile::R + r;
        QC_UNROLL
        for (int c = 0; c < tile::C; c++)
            if (q < a.n_tokens && tx + 16 * c < a.head_dim)
                out[q * ldq + tx + 16 * c] = acc[r][c] / sum[r];
    }
}

QC_KERNEL(attention_64, attention, QC_CUDA_THREADS)
{
    attend<64, 64>(a);
}

QC_KERNEL(attention_128, attention, QC_CUDA_THREADS)
{
    attend<64, 128>(a);
}

QC_KERNEL(attention_256, attention, QC_CUDA_THREADS)
{
    attend<32, 256>(a);
}
