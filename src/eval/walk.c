#include "eval.h"
#include "stream.h"

#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_math.h"

#include <math.h>
#include <string.h>

/* Head: a slice of the vocabulary is prepared once and meets all tokens, tile by tile. At 2,048 x 512 the
 * logits of both models take 8 MiB: large enough to keep the matrix kernels busy, small enough to stay near
 * the processor. */
enum { SLICE_VOCAB = 2048, TILE_TOKENS = 512 };

typedef struct side {
    const qc_model *model;
    const char *label; /* "reference" or "model", for messages */
    qc_stream stream;
    qc_workspace *ws;
} side;

typedef struct walk {
    qc_backend *be;
    side sides[2];
    int n_sides;
    const qc_sequences *seqs;
    const qc_eval_options *options;
    int64_t total, longest; /* tokens of all sequences, of the longest */
    float *host;            /* [max(longest, TILE_TOKENS), hidden] staging, host */
    float *x;               /* the same in the backend */
    float *logits[2];       /* [TILE_TOKENS, SLICE_VOCAB], backend */
    qc_score *scores;       /* [total] */
    int32_t *targets;       /* [total]; -1 at the last token of a sequence */
    double work_done, work_all;
} walk;

static int64_t n_vocab(const walk *w)
{
    return w->sides[0].model->config.vocab;
}

static int step(walk *w, double work, qc_err *err)
{
    w->work_done += work;
    if (w->options && w->options->progress)
        w->options->progress(w->options->progress_ctx, w->work_done / w->work_all);
    return qc_check_interrupt(err);
}

/* Weight elements x tokens, the unit of progress. */
static double layer_work(const qc_model_config *c)
{
    double q = (double)(c->n_heads * c->head_dim), kv = (double)(c->n_kv_heads * c->head_dim),
           h = (double)c->hidden;
    return h * (2 * q + 2 * kv + 3 * (double)c->ffn);
}

void qc_eval_plan_bytes(const qc_model_config *a, const qc_model_config *b, int64_t longest,
                        int64_t total_tokens, uint64_t *ret_full, uint64_t *ret_least)
{
    uint64_t streams = 0, work = 0, layer = 0;
    for (int i = 0; i < 2; i++) {
        const qc_model_config *c = i ? b : a;
        if (!c)
            continue;
        uint64_t w = qc_workspace_bytes(c, longest), l = qc_layer_bytes(c);
        streams += (uint64_t)total_tokens * (uint64_t)c->hidden * 4;
        work += w + 2ull * (uint64_t)qc_max_i64(longest, TILE_TOKENS) * (uint64_t)c->hidden * 4 +
                (uint64_t)SLICE_VOCAB * (TILE_TOKENS + (uint64_t)c->hidden) * 4;
        layer = l > layer ? l : layer;
    }
    *ret_least = work + layer + (uint64_t)total_tokens * (sizeof(qc_score) + sizeof(qc_token_score) + 8);
    *ret_full = *ret_least + streams;
}

static int check_models(const walk *w, qc_err *err)
{
    const qc_model_config *a = &w->sides[0].model->config;
    for (int64_t i = 0; i < w->total; i++)
        if (w->seqs->ids[i] < 0 || w->seqs->ids[i] >= a->vocab)
            return qc_fail(err, QC_E_INPUT, "token id %d at position %lld: the model has ids 0 to %lld",
                           (int)w->seqs->ids[i], (long long)i, (long long)a->vocab - 1);
    if (w->n_sides == 2 && w->sides[1].model->config.vocab != a->vocab)
        return qc_fail(err, QC_E_INPUT,
                       "%s: %lld vocabulary entries, the reference %s has %lld: not the same kind of model",
                       w->sides[1].model->src->path, (long long)w->sides[1].model->config.vocab,
                       w->sides[0].model->src->path, (long long)a->vocab);
    return QC_OK;
}

static int alloc_walk(walk *w, qc_err *err)
{
    const qc_eval_options *o = w->options;
    int64_t hidden = 0;
    bool spill = false;
    for (int i = 0; i < w->n_sides; i++)
        hidden = qc_max_i64(hidden, w->sides[i].model->config.hidden);
    if (o && o->memory_bytes) {
        uint64_t full, least;
        qc_eval_plan_bytes(&w->sides[0].model->config, w->n_sides == 2 ? &w->sides[1].model->config : NULL,
                           w->longest, w->total, &full, &least);
        if (least > o->memory_bytes)
            return qc_fail(err, QC_E_RESOURCE, "evaluation needs at least %llu MB, the memory cap is %llu MB",
                           (unsigned long long)(least / 1000000 + 1),
                           (unsigned long long)(o->memory_bytes / 1000000));
        spill = full > o->memory_bytes;
    }
    for (int i = 0; i < w->n_sides; i++) {
        side *s = &w->sides[i];
        QC_TRY(qc_stream_open(&s->stream, w->total, s->model->config.hidden, spill,
                              o ? o->scratch_folder : NULL, err));
        QC_TRY(qc_workspace_new(s->model, w->be, w->longest, &s->ws, err));
        if (!(w->logits[i] = w->be->alloc(w->be, (int64_t)TILE_TOKENS * SLICE_VOCAB, err)))
            return QC_E_RESOURCE;
    }
    int64_t stage = qc_max_i64(w->longest, TILE_TOKENS) * hidden;
    if (!(w->x = w->be->alloc(w->be, stage, err)))
        return QC_E_RESOURCE;
    w->host = qc_alloc((size_t)stage, sizeof *w->host);
    w->scores = qc_alloc((size_t)w->total, sizeof *w->scores);
    w->targets = qc_alloc((size_t)w->total, sizeof *w->targets);
    if (!w->host || !w->scores || !w->targets)
        return qc_fail_nomem(err, "evaluation", (unsigned long long)stage * 4);
    return QC_OK;
}

static void free_walk(walk *w)
{
    for (int i = 0; i < w->n_sides; i++) {
        qc_stream_close(&w->sides[i].stream);
        qc_workspace_free(w->sides[i].ws);
        if (w->logits[i])
            w->be->free(w->be, w->logits[i]);
    }
    if (w->x)
        w->be->free(w->be, w->x);
    qc_free(w->host);
    qc_free(w->scores);
    qc_free(w->targets);
}

static int embed_all(walk *w, qc_err *err)
{
    int64_t at = 0;
    for (int64_t s = 0; s < w->seqs->n_sequences; s++) {
        int64_t n = w->seqs->lengths[s];
        for (int64_t i = 0; i < n; i++) {
            w->targets[at + i] = i + 1 < n ? w->seqs->ids[at + i + 1] : -1;
            w->scores[at + i] = qc_score_start();
        }
        for (int i = 0; i < w->n_sides; i++) {
            QC_TRY(qc_model_embed(w->sides[i].model, w->seqs->ids + at, n, w->host, err));
            QC_TRY(qc_stream_put(&w->sides[i].stream, at, n, w->host, err));
        }
        at += n;
    }
    return QC_OK;
}

/* Tokens at .. at + n - 1 of the stream in backend memory: in place where the backend can, else a staged
 * copy. */
static int borrow(walk *w, side *s, int64_t at, int64_t n, float **ret, qc_err *err)
{
    int64_t hidden = s->model->config.hidden;
    if (w->be->host_memory && s->stream.data) {
        *ret = s->stream.data + at * hidden;
        return QC_OK;
    }
    *ret = w->x;
    QC_TRY(qc_stream_get(&s->stream, at, n, w->host, err));
    return w->be->upload(w->be, w->x, w->host, n * hidden, err);
}

/* Put changed tokens back; *ret_host = their values on the host. Nothing to do for those changed in place. */
static int give_back(walk *w, side *s, int64_t at, int64_t n, float *x, const float **ret_host, qc_err *err)
{
    *ret_host = x;
    if (x != w->x)
        return QC_OK;
    *ret_host = w->host;
    QC_TRY(w->be->download(w->be, w->host, x, n * s->model->config.hidden, err));
    return qc_stream_put(&s->stream, at, n, w->host, err);
}

static int run_layer(walk *w, side *s, int layer, qc_err *err)
{
    qc_layer *weights = NULL;
    int64_t hidden = s->model->config.hidden, at = 0;
    QC_TRY(qc_layer_load(s->model, w->be, layer, &weights, err));
    int rc = QC_OK;
    for (int64_t i = 0; i < w->seqs->n_sequences && rc == QC_OK; i++) {
        int64_t n = w->seqs->lengths[i], bad;
        float *x;
        const float *values;
        if ((rc = borrow(w, s, at, n, &x, err)) < 0 ||
            (rc = qc_layer_forward(weights, s->ws, x, n, err)) < 0 ||
            (rc = give_back(w, s, at, n, x, &values, err)) < 0)
            break;
        if ((bad = qc_first_nonfinite(values, n * hidden)) >= 0) {
            char why[QC_ERR_MSG_BYTES];
            qc_model_blame_nonfinite(s->model, layer, why);
            rc = qc_fail(err, QC_E_INPUT,
                         "%s %s: layer %d gives a value that is not finite (window %lld, token %lld)%s",
                         s->label, s->model->src->path, layer, (long long)i, (long long)(bad / hidden), why);
        } else
            rc = step(w, (double)n * layer_work(&s->model->config), err);
        at += n;
    }
    qc_layer_free(weights);
    return rc;
}

static int run_layers(walk *w, qc_err *err)
{
    int64_t n_layers = 0;
    for (int i = 0; i < w->n_sides; i++)
        n_layers = qc_max_i64(n_layers, w->sides[i].model->config.n_layers);
    for (int layer = 0; layer < n_layers; layer++)
        for (int i = 0; i < w->n_sides; i++)
            if (layer < w->sides[i].model->config.n_layers)
                QC_TRY(run_layer(w, &w->sides[i], layer, err));
    return QC_OK;
}

/* The final norm is the same for every slice of the vocabulary: once, in place of the stream. */
static int norm_all(walk *w, qc_err *err)
{
    for (int i = 0; i < w->n_sides; i++) {
        side *s = &w->sides[i];
        for (int64_t t = 0; t < w->total; t += TILE_TOKENS) {
            int64_t n = qc_min_i64(TILE_TOKENS, w->total - t);
            float *x;
            const float *values;
            QC_TRY(borrow(w, s, t, n, &x, err));
            QC_TRY(qc_model_final_norm(s->model, w->be, x, x, n, err));
            QC_TRY(give_back(w, s, t, n, x, &values, err));
        }
    }
    return QC_OK;
}

static int score_slice(walk *w, int64_t vocab0, int64_t n, qc_weight *const heads[2], qc_err *err)
{
    float softcap = w->sides[0].model->config.final_softcap;
    double work = 0;
    for (int i = 0; i < w->n_sides; i++)
        work += (double)n * (double)w->sides[i].model->config.hidden;
    for (int64_t t = 0; t < w->total; t += TILE_TOKENS) {
        int64_t n_tokens = qc_min_i64(TILE_TOKENS, w->total - t);
        for (int i = 0; i < w->n_sides; i++) {
            side *s = &w->sides[i];
            float *x;
            QC_TRY(borrow(w, s, t, n_tokens, &x, err));
            QC_TRY(w->be->linear(w->be, w->logits[i], SLICE_VOCAB, x, s->model->config.hidden, heads[i], NULL,
                                 n_tokens, false, err));
        }
        QC_TRY(w->be->score(w->be, w->scores + t, w->logits[0], w->n_sides == 2 ? w->logits[1] : NULL,
                            SLICE_VOCAB, w->targets + t, n_tokens, vocab0, n, softcap, err));
        QC_TRY(step(w, work * (double)n_tokens, err));
    }
    return QC_OK;
}

static int run_head(walk *w, qc_err *err)
{
    for (int64_t v = 0; v < n_vocab(w); v += SLICE_VOCAB) {
        int64_t n = qc_min_i64(SLICE_VOCAB, n_vocab(w) - v);
        qc_weight *heads[2] = {NULL, NULL};
        int rc = QC_OK;
        for (int i = 0; i < w->n_sides && rc == QC_OK; i++)
            rc = qc_model_head_slice(w->sides[i].model, w->be, v, n, &heads[i], err);
        if (rc == QC_OK)
            rc = score_slice(w, v, n, heads, err);
        for (int i = 0; i < w->n_sides; i++)
            w->be->weight_free(w->be, heads[i]);
        QC_TRY(rc);
    }
    return QC_OK;
}

static int bad_logits(const walk *w, int64_t sequence, int64_t token, qc_err *err)
{
    const qc_model *model = w->sides[w->n_sides - 1].model;
    char why[QC_ERR_MSG_BYTES];
    qc_model_blame_nonfinite(model, (int)model->config.n_layers, why);
    return qc_fail(err, QC_E_INPUT, "%s: logits are not finite (window %lld, token %lld)%s", model->src->path,
                   (long long)sequence, (long long)token, why);
}

static int finish_scores(const walk *w, qc_token_score *ret, qc_err *err)
{
    int64_t at = 0;
    for (int64_t s = 0; s < w->seqs->n_sequences; s++) {
        for (int64_t i = 0; i + 1 < w->seqs->lengths[s]; i++) {
            const qc_score *score = &w->scores[at + i];
            double nll_a, nll_b, kld;
            qc_score_finish(score, &nll_a, &nll_b, &kld);
            if (score->n_nonfinite || !isfinite(nll_a) || !isfinite(nll_b) || !isfinite(kld))
                return bad_logits(w, s, i, err);
            *ret++ = (qc_token_score){.nll_a = (float)nll_a,
                                      .nll_b = (float)nll_b,
                                      .kld = (float)kld,
                                      .top_a = score->top_a,
                                      .top_b = score->top_b};
        }
        at += w->seqs->lengths[s];
    }
    return QC_OK;
}

int qc_eval_tokens(qc_backend *be, const qc_model *a, const qc_model *b, const qc_sequences *seqs,
                   const qc_eval_options *options, qc_token_score *ret, qc_err *err)
{
    walk w = {.be = be, .n_sides = b ? 2 : 1, .seqs = seqs, .options = options};
    w.sides[0] = (side){.model = a, .label = b ? "reference" : "model", .stream.fd = -1};
    w.sides[1] = (side){.model = b, .label = "model", .stream.fd = -1};
    for (int64_t s = 0; s < seqs->n_sequences; s++) {
        w.total += seqs->lengths[s];
        w.longest = qc_max_i64(w.longest, seqs->lengths[s]);
    }
    if (w.total == 0)
        return QC_OK;
    for (int i = 0; i < w.n_sides; i++) {
        const qc_model_config *c = &w.sides[i].model->config;
        w.work_all +=
            (double)w.total * (layer_work(c) * (double)c->n_layers + (double)c->vocab * (double)c->hidden);
    }
    int rc;
    if ((rc = check_models(&w, err)) == QC_OK && (rc = alloc_walk(&w, err)) == QC_OK &&
        (rc = embed_all(&w, err)) == QC_OK && (rc = run_layers(&w, err)) == QC_OK &&
        (rc = norm_all(&w, err)) == QC_OK && (rc = run_head(&w, err)) == QC_OK)
        rc = finish_scores(&w, ret, err);
    free_walk(&w);
    return rc;
}
