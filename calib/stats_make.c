/* One pass of the 16-bit model over the windows of a corpus, layer by layer; all stages of a layer are taken
 * in the same walk over the windows. */
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
    qc_hessian hs[QC_N_DENSE_STAGES];  /* of the layer in work */
} pass;

static int64_t widest(const qc_stats_info *info)
{
    int64_t n = 0;
    for (int s = 0; s < QC_N_DENSE_STAGES; s++)
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

static int check_memory(const pass *p, bool *ret_spill, qc_err *err)
{
    const qc_model_config *c = &p->model->config;
    int64_t length = p->info->length, n_tokens = p->info->n_windows * length;
    uint64_t stream = (uint64_t)n_tokens * (uint64_t)c->hidden * sizeof(float),
             least = qc_layer_bytes(c) + qc_workspace_bytes(c, length) +
                     (uint64_t)length * (uint64_t)(2 * c->hidden + widest(p->info)) * sizeof(float);
    uint64_t widest_record = 0;
    for (int s = 0; s < QC_N_DENSE_STAGES; s++) {
        uint64_t n = qc_hessian_bytes(p->info->widths[s], n_tokens);
        least += n;
        widest_record = n > widest_record ? n : widest_record;
    }
    least += 2 * widest_record; /* while a record is packed */
    uint64_t cap = p->options->memory_bytes;
    if (cap && least > cap)
        return qc_fail(
            err, QC_E_RESOURCE,
            "statistics of %s need %llu MB of memory, the memory cap leaves %llu MB: use shorter windows "
            "or more shards",
            p->model->src->path, (unsigned long long)(least / 1000000 + 1),
            (unsigned long long)(cap / 1000000));
    *ret_spill = cap && least + stream > cap;
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

static int walk_window(pass *p, const qc_layer *layer, int64_t window, qc_err *err)
{
    int64_t n = p->info->length;
    float *x;
    QC_TRY(qc_stream_borrow(&p->x, p->be, window * n, n, p->host, p->buffer_x, &x, err));
    for (int s = 0; s < QC_N_DENSE_STAGES; s++) {
        qc_stage stage = (qc_stage)s;
        QC_TRY(qc_layer_stage_input(layer, p->ws, stage, x, p->buffer_u, n, err));
        QC_TRY(qc_hessian_add(&p->hs[s], p->buffer_u, p->hs[s].n, n, err));
        if (stage == QC_STAGE_O || stage == QC_STAGE_DOWN)
            QC_TRY(qc_layer_stage_output(layer, p->ws, stage, p->buffer_u, x, n, err));
    }
    return qc_stream_give_back(&p->x, p->be, window * n, n, p->host, p->buffer_x, x, err);
}

/* A NaN or infinity in any token ends up in the maximum of its column. */
static int check_maxima(pass *p, int layer, qc_err *err)
{
    for (int s = 0; s < QC_N_DENSE_STAGES; s++) {
        int64_t n = p->hs[s].n, bad;
        float *maxima = qc_alloc((size_t)n, sizeof *maxima);
        if (!maxima)
            return qc_fail_nomem(err, "statistics", (unsigned long long)n * 4);
        int rc = p->be->download(p->be, maxima, p->hs[s].max_abs, n, err);
        if (rc == QC_OK && (bad = qc_first_nonfinite(maxima, n)) >= 0) {
            char why[QC_ERR_MSG_BYTES];
            qc_model_blame_nonfinite(p->model, layer, why);
            rc = qc_fail(err, QC_E_INPUT,
                         "%s: layer %d: input %lld of %s is not finite on the calibration text%s",
                         p->model->src->path, layer, (long long)bad, qc_stage_name((qc_stage)s), why);
        }
        qc_free(maxima);
        QC_TRY(rc);
    }
    return QC_OK;
}

static int walk_layer(pass *p, int layer, qc_stats_writer *writer, qc_err *err)
{
    qc_layer *weights;
    for (int s = 0; s < QC_N_DENSE_STAGES; s++)
        QC_TRY(qc_hessian_init(&p->hs[s], p->be, p->info->widths[s], qc_stats_first_block(p->info), err));
    QC_TRY(qc_layer_load(p->model, p->be, layer, &weights, err));
    int rc = QC_OK;
    int64_t n = p->info->n_windows;
    for (int64_t i = 0; i < n && rc == QC_OK; i++) {
        if ((rc = qc_check_interrupt(err)) == QC_OK)
            rc = walk_window(p, weights, i, err);
        if (p->options->progress)
            p->options->progress(p->options->progress_ctx,
                                 (double)(layer * n + i + 1) / (double)(p->info->n_layers * n));
    }
    qc_layer_free(weights);
    if (rc == QC_OK)
        rc = check_maxima(p, layer, err);
    for (int s = 0; s < QC_N_DENSE_STAGES; s++) {
        if (rc == QC_OK)
            rc = qc_stats_put(writer, &p->hs[s], err);
        qc_hessian_clear(&p->hs[s]);
    }
    return rc;
}

static int run(pass *p, qc_stats_writer *writer, qc_err *err)
{
    const qc_model_config *c = &p->model->config;
    int64_t length = p->info->length;
    bool spill = false;
    QC_TRY(check_memory(p, &spill, err));
    QC_TRY(qc_stream_open(&p->x, p->info->n_windows * length, c->hidden, spill, p->options->scratch_folder,
                          err));
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
    pass p = {.model = model, .be = be, .corpus = corpus, .options = options, .info = info, .x.fd = -1};
    int rc = run(&p, writer, err);
    for (int s = 0; s < QC_N_DENSE_STAGES; s++)
        qc_hessian_clear(&p.hs[s]);
    be->free(be, p.buffer_x);
    be->free(be, p.buffer_u);
    qc_free(p.host);
    qc_workspace_free(p.ws);
    qc_stream_close(&p.x);
    return rc;
}
