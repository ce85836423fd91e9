/* One pass of the 16-bit model over the windows of a corpus, layer by layer; all stages of a layer are taken
 * in the same walk over the windows. Those of its experts follow, expert by expert, from what the walk
 * recorded: the router's choices and the inputs. */
#include "stats_internal.h"

#include "qc_alloc.h"
#include "qc_math.h"
#include "qc_tensor.h"
#include "stream.h"

#include <string.h>

typedef struct pass {
    const qc_model *model;
    qc_backend *be;
    const qc_corpus *corpus;
    const qc_stats_options *options;
    const qc_stats_info *info;
    qc_workspace *ws;
    qc_stream x;
    float *host, *buffer_x, *buffer_u; /* one window each; host memory, backend memory */
    qc_hessian hs[QC_N_STAGES];        /* of the layer in work, those of experts one expert at a time */
    /* with experts */
    qc_stream kept; /* their inputs, [tokens, hidden] */
    qc_routing routing;
    float *buffer_h; /* one window of inputs of down; backend memory */
} pass;

static int64_t n_tokens(const pass *p)
{
    return p->info->n_windows * p->info->length;
}

static int64_t widest(const qc_stats_info *info)
{
    int64_t n = 0;
    for (int s = 0; s < QC_N_STAGES; s++)
        n = qc_max_i64(n, info->widths[s]);
    return n;
}

int qc_stats_shard(const qc_corpus *corpus, const qc_stats_options *options, qc_stats_info *info, qc_err *err)
{
    /* the fewest windows that end with a block: 2048 / gcd(2048, length), and 2048 is a power of two */
    int64_t unit = QC_HESSIAN_BLOCK / qc_min_i64(QC_HESSIAN_BLOCK, corpus->length & -corpus->length),
            n_units = qc_ceil_div(corpus->n_windows, unit);
    if (options->n_shards > n_units)
        return qc_fail(
            err, QC_E_USAGE,
            "%d shards of %lld windows of %lld tokens: each needs whole blocks of %d tokens, at most "
            "%lld shards are possible",
            options->n_shards, (long long)corpus->n_windows, (long long)corpus->length, QC_HESSIAN_BLOCK,
            (long long)n_units);
    int64_t first = options->shard * n_units / options->n_shards * unit,
            end = (options->shard + 1) * n_units / options->n_shards * unit;
    info->first_window = first;
    info->n_windows = qc_min_i64(end, corpus->n_windows) - first;
    return QC_OK;
}

/* ---- memory ---- */

/* Bytes beside the streams; *ret_streams: theirs, which may be spilled. */
static uint64_t plan_bytes(const pass *p, uint64_t *ret_streams)
{
    const qc_model_config *c = &p->model->config;
    uint64_t length = (uint64_t)p->info->length, hidden = (uint64_t)c->hidden, tokens = (uint64_t)n_tokens(p),
             record = 0, wide = (uint64_t)widest(p->info),
             forward = qc_forward_scratch_bytes(c, p->be->compute, p->be->n_threads, p->info->length),
             gram = qc_gram_scratch_bytes(p->be->compute, p->be->n_threads, p->info->length, (int64_t)wide,
                                          (int64_t)wide),
             bytes = qc_layer_bytes(c, p->be->compute) + qc_workspace_bytes(c, p->info->length) +
                     qc_max_u64(forward, gram) + length * (2 * hidden + wide) * sizeof(float);
    for (int s = 0; s < QC_N_STAGES; s++) {
        uint64_t n = qc_hessian_bytes(p->info->widths[s], n_tokens(p));
        bytes += n;
        record = qc_max_u64(record, n);
    }
    *ret_streams = tokens * hidden * sizeof(float);
    if (c->n_experts) {
        *ret_streams *= 2;
        bytes += qc_routing_bytes(c, n_tokens(p)) + length * (uint64_t)c->expert_ffn * sizeof(float);
    }
    return bytes + 2 * record; /* while a record is packed */
}

static int check_memory(const pass *p, bool *ret_spill, qc_err *err)
{
    uint64_t streams, least = plan_bytes(p, &streams), cap = p->options->memory_bytes;
    if (cap && least > cap)
        return qc_fail(
            err, QC_E_RESOURCE,
            "statistics of %s need %llu MB of memory, the memory cap leaves %llu MB: use shorter windows "
            "or more shards",
            p->model->src->path, (unsigned long long)(least / 1000000 + 1),
            (unsigned long long)(cap / 1000000));
    *ret_spill = cap && least + streams > cap;
    return QC_OK;
}

/* ---- walk ---- */

static int embed_all(pass *p, qc_err *err)
{
    int64_t n = p->info->length;
    const int32_t *ids = p->corpus->ids + p->info->first_window * n;
    for (int64_t i = 0; i < p->info->n_windows; i++) {
        QC_TRY(qc_model_embed(p->model, ids + i * n, n, p->host, err));
        QC_TRY(qc_stream_put(&p->x, i * n, n, p->host, err));
    }
    return QC_OK;
}

/* What the experts of the layer read and which of them each token goes to, for later; then what they add. */
static int walk_experts(pass *p, const qc_layer *layer, int64_t window, float *x, qc_err *err)
{
    int64_t n = p->info->length, at = window * n, k = p->model->config.n_chosen;
    QC_TRY(qc_layer_route(layer, p->ws, x, n, p->routing.experts + at * k, p->routing.weights + at * k, err));
    QC_TRY(qc_layer_stage_input(layer, p->ws, QC_STAGE_EXPERT_GATE_UP, x, p->buffer_u, n, err));
    QC_TRY(qc_stream_store(&p->kept, p->be, at, n, p->host, p->buffer_u, err));
    return qc_layer_experts_forward(layer, p->ws, x, n, err);
}

static int walk_window(pass *p, const qc_layer *layer, int index, int64_t window, qc_err *err)
{
    int64_t n = p->info->length;
    float *x;
    QC_TRY(qc_stream_borrow(&p->x, p->be, window * n, n, p->host, p->buffer_x, &x, err));
    for (int s = 0; s < qc_stats_n_shared(p->info, index); s++) {
        qc_stage stage = (qc_stage)s;
        QC_TRY(qc_layer_stage_input(layer, p->ws, stage, x, p->buffer_u, n, err));
        QC_TRY(qc_hessian_add(&p->hs[s], p->buffer_u, p->hs[s].n, n, err));
        if (stage == QC_STAGE_O || stage == QC_STAGE_DOWN)
            QC_TRY(qc_layer_stage_output(layer, p->ws, stage, p->buffer_u, x, n, err));
    }
    if (p->info->sparse[index])
        QC_TRY(walk_experts(p, layer, window, x, err));
    return qc_stream_give_back(&p->x, p->be, window * n, n, p->host, p->buffer_x, x, err);
}

/* Tokens of an expert within one block of the corpus, cut into calls from the block's first on, so that sums
 * do not depend on the shards. */
static int add_tokens(pass *p, const qc_layer *layer, int64_t expert, const int32_t *tokens, int64_t n,
                      qc_err *err)
{
    qc_hessian *gate_up = &p->hs[QC_STAGE_EXPERT_GATE_UP], *down = &p->hs[QC_STAGE_EXPERT_DOWN];
    for (int64_t i = 0; i < n; i += p->info->length) {
        int64_t some = qc_min_i64(p->info->length, n - i);
        QC_TRY(qc_stream_gather(&p->kept, p->be, tokens + i, some, p->host, p->buffer_u, err));
        QC_TRY(qc_hessian_add(gate_up, p->buffer_u, gate_up->n, some, err));
        QC_TRY(qc_layer_expert_down_input(layer, p->ws, expert, p->buffer_u, p->buffer_h, some, err));
        QC_TRY(qc_hessian_add(down, p->buffer_h, down->n, some, err));
    }
    QC_TRY(qc_hessian_end_block(gate_up, err));
    return qc_hessian_end_block(down, err);
}

/* A NaN or infinity in any token ends up in the maximum of its column. */
static int check_maxima(pass *p, qc_stats_place place, qc_err *err)
{
    int64_t n = p->hs[place.stage].n, bad;
    float *maxima = qc_alloc((size_t)n, sizeof *maxima);
    if (!maxima)
        return qc_fail_nomem(err, "statistics", (unsigned long long)n * 4);
    int rc = p->be->download(p->be, maxima, p->hs[place.stage].max_abs, n, err);
    if (rc == QC_OK && (bad = qc_first_nonfinite(maxima, n)) >= 0) {
        char why[QC_ERR_MSG_BYTES];
        qc_model_blame_nonfinite(p->model, place.layer, why);
        rc =
            qc_fail(err, QC_E_INPUT, "%s: layer %d: input %lld of %s is not finite on the calibration text%s",
                    p->model->src->path, place.layer, (long long)bad, qc_stage_name(place.stage), why);
    }
    qc_free(maxima);
    return rc;
}

/* Check and write one input's sums, which go. */
static int put(pass *p, qc_stats_place place, qc_stats_writer *writer, qc_err *err)
{
    int rc = check_maxima(p, place, err);
    if (rc == QC_OK)
        rc = qc_stats_put(writer, &p->hs[place.stage], err);
    qc_hessian_clear(&p->hs[place.stage]);
    return rc;
}

static int take_expert(pass *p, const qc_layer *layer, int index, int64_t expert, qc_stats_writer *writer,
                       qc_err *err)
{
    const qc_routing *r = &p->routing;
    const int32_t *tokens = r->tokens + r->first[expert], *end = r->tokens + r->first[expert + 1];
    for (int s = QC_STAGE_EXPERT_GATE_UP; s <= QC_STAGE_EXPERT_DOWN; s++)
        QC_TRY(qc_stats_init(p->info, (qc_stats_place){index, (qc_stage)s, expert}, p->be, &p->hs[s], err));
    for (int64_t block = QC_HESSIAN_BLOCK; block < n_tokens(p) + QC_HESSIAN_BLOCK;
         block += QC_HESSIAN_BLOCK) {
        int64_t n = 0;
        while (tokens + n < end && tokens[n] < block)
            n++;
        QC_TRY(add_tokens(p, layer, expert, tokens, n, err));
        tokens += n;
    }
    for (int s = QC_STAGE_EXPERT_GATE_UP; s <= QC_STAGE_EXPERT_DOWN; s++)
        QC_TRY(put(p, (qc_stats_place){index, (qc_stage)s, expert}, writer, err));
    return QC_OK;
}

/* `share` of the layer is done. */
static int advance(const pass *p, int layer, double share, qc_err *err)
{
    if (p->options->progress)
        p->options->progress(p->options->progress_ctx, (layer + share) / (double)p->info->n_layers);
    return qc_check_interrupt(err);
}

static int walk_loaded(pass *p, const qc_layer *weights, int layer, qc_stats_writer *writer, qc_err *err)
{
    bool sparse = p->info->sparse[layer];
    int64_t n = p->info->n_windows, n_experts = sparse ? p->info->n_experts : 0;
    int n_shared = qc_stats_n_shared(p->info, layer);
    double walk = sparse ? .5 : 1;
    for (int s = 0; s < n_shared; s++)
        QC_TRY(qc_stats_init(p->info, (qc_stats_place){layer, (qc_stage)s, 0}, p->be, &p->hs[s], err));
    for (int64_t i = 0; i < n; i++) {
        QC_TRY(walk_window(p, weights, layer, i, err));
        QC_TRY(advance(p, layer, walk * (double)(i + 1) / (double)n, err));
    }
    for (int s = 0; s < n_shared; s++)
        QC_TRY(put(p, (qc_stats_place){layer, (qc_stage)s, 0}, writer, err));
    if (sparse)
        qc_routing_by_expert(&p->model->config, &p->routing, n_tokens(p));
    for (int64_t e = 0; e < n_experts; e++) {
        QC_TRY(take_expert(p, weights, layer, e, writer, err));
        QC_TRY(advance(p, layer, walk + (1 - walk) * (double)(e + 1) / (double)n_experts, err));
    }
    return QC_OK;
}

static int walk_layer(pass *p, int layer, qc_stats_writer *writer, qc_err *err)
{
    qc_layer *weights;
    QC_TRY(qc_layer_load(p->model, p->be, layer, &weights, err));
    int rc = walk_loaded(p, weights, layer, writer, err);
    qc_layer_free(weights);
    return rc;
}

static int alloc_experts(pass *p, bool spill, qc_err *err)
{
    const qc_model_config *c = &p->model->config;
    QC_TRY(qc_routing_new(c, n_tokens(p), &p->routing, err));
    if (!(p->buffer_h = p->be->alloc(p->be, p->info->length * c->expert_ffn, err)))
        return QC_E_RESOURCE;
    return qc_stream_open(&p->kept, n_tokens(p), c->hidden, spill, p->options->scratch_folder, err);
}

static int run(pass *p, qc_stats_writer *writer, qc_err *err)
{
    const qc_model_config *c = &p->model->config;
    int64_t length = p->info->length;
    bool spill = false;
    QC_TRY(check_memory(p, &spill, err));
    QC_TRY(qc_stream_open(&p->x, n_tokens(p), c->hidden, spill, p->options->scratch_folder, err));
    if (p->info->n_experts)
        QC_TRY(alloc_experts(p, spill, err));
    QC_TRY(qc_workspace_new(p->model, p->be, length, &p->ws, err));
    p->host = qc_alloc((size_t)(length * c->hidden), sizeof *p->host);
    if (!p->host)
        return qc_fail_nomem(err, "a window", (unsigned long long)(length * c->hidden) * 4);
    if (!(p->buffer_x = p->be->alloc(p->be, length * c->hidden, err)) ||
        !(p->buffer_u = p->be->alloc(p->be, length * widest(p->info), err)))
        return QC_E_RESOURCE;
    QC_TRY(embed_all(p, err));
    for (int layer = 0; layer < (int)p->info->n_layers; layer++)
        QC_TRY(walk_layer(p, layer, writer, err));
    return QC_OK;
}

int qc_stats_make(const qc_model *model, qc_backend *be, const qc_corpus *corpus,
                  const qc_stats_options *options, const qc_stats_info *info, qc_stats_writer *writer,
                  qc_err *err)
{
    pass p = {.model = model,
              .be = be,
              .corpus = corpus,
              .options = options,
              .info = info,
              .x.fd = -1,
              .kept.fd = -1};
    int rc = run(&p, writer, err);
    for (int s = 0; s < QC_N_STAGES; s++)
        qc_hessian_clear(&p.hs[s]);
    be->free(be, p.buffer_x);
    be->free(be, p.buffer_u);
    be->free(be, p.buffer_h);
    qc_routing_clear(&p.routing);
    qc_stream_close(&p.kept);
    qc_free(p.host);
    qc_workspace_free(p.ws);
    qc_stream_close(&p.x);
    return rc;
}
