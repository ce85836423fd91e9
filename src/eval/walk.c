#include "eval.h"
#include "stream.h"

#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_math.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Head: a slice of the vocabulary is prepared once and meets all tokens, tile by tile. At 2,048 x 512 the
 * logits of both models take 8 MiB: large enough to keep the matrix kernels busy, small enough to stay near
 * the processor. */
enum { SLICE_VOCAB = 2048, TILE_TOKENS = 512 };

typedef struct side {
    const qc_model *model;
    qc_backend *be;
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
    int64_t n_targets;
    const qc_eval_target *targets; /* [n_targets] */
    qc_eval_target *own_targets;   /* the same where the caller gave none */
    int32_t *target_ids;           /* [n_targets] */
    float *host;                   /* [max(longest, TILE_TOKENS), hidden] staging, host */
    float *x;                      /* the same in the backend */
    float *logits[2];              /* [TILE_TOKENS, SLICE_VOCAB], backend */
    float *seen;      /* the same of the model on the host, for a tap of a backend that is elsewhere */
    qc_score *scores; /* [n_targets] */
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

/* Largest matrix of the layers. */
static uint64_t matrix_elems(const qc_model_config *c)
{
    int64_t most = 0;
    for (int stage = 0; stage < QC_N_STAGES; stage++)
        if (qc_stage_in_any_layer(c, (qc_stage)stage))
            most = qc_max_i64(most, qc_stage_rows(c, (qc_stage)stage) * qc_stage_width(c, (qc_stage)stage));
    return (uint64_t)most;
}

void qc_eval_plan_bytes(const qc_model_config *a, const qc_model_config *b, int64_t longest,
                        int64_t total_tokens, qc_compute compute, int n_threads, uint64_t *ret_full,
                        uint64_t *ret_least)
{
    const qc_model_config *sides[2] = {a, b};
    uint64_t streams = 0, spaces = 0, layer = 0, heads = 0, hidden = 0;
    for (int i = 0; i < 2 && sides[i]; i++) {
        const qc_model_config *c = sides[i];
        /* what is read lies mapped beside what is prepared from it */
        uint64_t h = (uint64_t)c->hidden, l = qc_layer_bytes(c, compute) + 2 * matrix_elems(c);
        streams += (uint64_t)total_tokens * h * 4;
        spaces += qc_workspace_bytes(c, longest) +
                  qc_forward_scratch_bytes(c, compute, n_threads, qc_max_i64(longest, TILE_TOKENS)) +
                  QC_MAPPED_AROUND_BYTES;
        heads += (uint64_t)SLICE_VOCAB * (TILE_TOKENS * 4 + h * (compute == QC_COMPUTE_BF16 ? 4 : 6));
        layer = qc_max_u64(layer, l);
        hidden = qc_max_u64(hidden, h);
    }
    /* on the host; in the backend for spilled streams, else for a tile whose targets lie apart */
    uint64_t staging = (uint64_t)qc_max_i64(longest, TILE_TOKENS) * hidden * 4,
             tile = TILE_TOKENS * hidden * 4,
             scores = (uint64_t)total_tokens * (sizeof(qc_score) + sizeof(qc_token_score) +
                                                sizeof(qc_eval_target) + sizeof(int32_t) * 2),
             work = spaces + staging + qc_max_u64(heads, layer) + scores;
    *ret_full = work + streams + tile;
    *ret_least = work + staging;
}

/* Targets of sequences that are scored from their second id on. */
static int all_targets(walk *w, qc_err *err)
{
    w->n_targets = w->total - w->seqs->n_sequences;
    qc_eval_target *t = w->own_targets = qc_alloc((size_t)w->n_targets + 1, sizeof *t);
    if (!t)
        return qc_fail_nomem(err, "evaluation", (unsigned long long)w->n_targets * sizeof *t);
    int64_t at = 0;
    for (int64_t s = 0; s < w->seqs->n_sequences; at += w->seqs->lengths[s++])
        for (int64_t i = 0; i + 1 < w->seqs->lengths[s]; i++)
            *t++ = (qc_eval_target){.position = at + i, .id = w->seqs->ids[at + i + 1]};
    w->targets = w->own_targets;
    return QC_OK;
}

static int set_targets(walk *w, qc_err *err)
{
    if (w->seqs->targets) {
        w->targets = w->seqs->targets;
        w->n_targets = w->seqs->n_targets;
    } else
        QC_TRY(all_targets(w, err));
    w->target_ids = qc_alloc((size_t)w->n_targets + 1, sizeof *w->target_ids);
    w->scores = qc_alloc((size_t)w->n_targets + 1, sizeof *w->scores);
    if (!w->target_ids || !w->scores)
        return qc_fail_nomem(err, "evaluation", (unsigned long long)w->n_targets * sizeof *w->scores);
    for (int64_t i = 0; i < w->n_targets; i++) {
        w->target_ids[i] = w->targets[i].id;
        w->scores[i] = qc_score_start();
    }
    return QC_OK;
}

static int check_models(const walk *w, qc_err *err)
{
    const qc_model_config *a = &w->sides[0].model->config;
    for (int64_t i = 0; i < w->total; i++)
        if (w->seqs->ids[i] < 0 || w->seqs->ids[i] >= a->vocab)
            return qc_fail(err, QC_E_INPUT, "token id %d at position %lld: the model has ids 0 to %lld",
                           (int)w->seqs->ids[i], (long long)i, (long long)a->vocab - 1);
    for (int64_t i = 0; i < w->n_targets; i++)
        if (w->target_ids[i] < 0 || w->target_ids[i] >= a->vocab)
            return qc_fail(err, QC_E_INPUT, "token id %d to score: the model has ids 0 to %lld",
                           (int)w->target_ids[i], (long long)a->vocab - 1);
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
    int n_threads = w->be->n_threads;
    qc_compute compute = QC_COMPUTE_BF16; /* F32 if a backend of either side is */
    for (int i = 0; i < w->n_sides; i++) {
        hidden = qc_max_i64(hidden, w->sides[i].model->config.hidden);
        compute = w->sides[i].be->compute == QC_COMPUTE_F32 ? QC_COMPUTE_F32 : compute;
        n_threads = w->sides[i].be->n_threads > n_threads ? w->sides[i].be->n_threads : n_threads;
    }
    if (o && o->memory_bytes) {
        uint64_t full, least;
        qc_eval_plan_bytes(&w->sides[0].model->config, w->n_sides == 2 ? &w->sides[1].model->config : NULL,
                           w->longest, w->total, compute, n_threads, &full, &least);
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
        QC_TRY(qc_workspace_new(s->model, s->be, w->longest, &s->ws, err));
        if (!(w->logits[i] = w->be->alloc(w->be, (int64_t)TILE_TOKENS * SLICE_VOCAB, err)))
            return QC_E_RESOURCE;
    }
    if (o && o->tap && !w->be->host_memory &&
        !(w->seen = qc_alloc((size_t)TILE_TOKENS * SLICE_VOCAB, sizeof *w->seen)))
        return qc_fail_nomem(err, "logits", (unsigned long long)TILE_TOKENS * SLICE_VOCAB * 4);
    int64_t stage = qc_max_i64(w->longest, TILE_TOKENS) * hidden;
    if (!(w->x = w->be->alloc(w->be, stage, err)))
        return QC_E_RESOURCE;
    w->host = qc_alloc((size_t)stage, sizeof *w->host);
    if (!w->host)
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
    qc_free(w->seen);
    qc_free(w->scores);
    qc_free(w->own_targets);
    qc_free(w->target_ids);
}

/* `what` gave the value at place `bad` of a sequence [n, hidden]. */
static int not_finite(const side *s, const char *what, int layer, int64_t sequence, int64_t bad, qc_err *err)
{
    char why[QC_ERR_MSG_BYTES];
    qc_model_blame_nonfinite(s->model, layer, why);
    return qc_fail(err, QC_E_INPUT, "%s %s: %s gives a value that is not finite (window %lld, token %lld)%s",
                   s->label, s->model->src->path, what, (long long)sequence,
                   (long long)(bad / s->model->config.hidden), why);
}

static int embed_all(walk *w, qc_err *err)
{
    int64_t at = 0;
    for (int64_t s = 0; s < w->seqs->n_sequences; s++) {
        int64_t n = w->seqs->lengths[s];
        for (int i = 0; i < w->n_sides; i++) {
            QC_TRY(qc_model_embed(w->sides[i].model, w->seqs->ids + at, n, w->host, err));
            /* looked at here, since attention spreads it over the tokens of a tile */
            int64_t bad = qc_first_nonfinite(w->host, n * w->sides[i].model->config.hidden);
            if (bad >= 0)
                return not_finite(&w->sides[i], "the embedding", 0, s, bad, err);
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
    return qc_stream_borrow(&s->stream, w->be, at, n, w->host, w->x, ret, err);
}

/* Put changed tokens back; *ret_host = their values on the host. Nothing to do for those changed in place. */
static int give_back(walk *w, side *s, int64_t at, int64_t n, float *x, const float **ret_host, qc_err *err)
{
    *ret_host = w->be->host_memory ? x : w->host;
    return qc_stream_give_back(&s->stream, w->be, at, n, w->host, w->x, x, err);
}

static int run_layer(walk *w, side *s, int layer, qc_err *err)
{
    qc_layer *weights = NULL;
    int64_t hidden = s->model->config.hidden, at = 0;
    const qc_part *parts = w->seqs->parts;
    QC_TRY(qc_layer_load(s->model, s->be, layer, &weights, err));
    int rc = QC_OK;
    for (int64_t i = 0; i < w->seqs->n_sequences && rc == QC_OK; i++) {
        int64_t n = w->seqs->lengths[i], n_parts = parts ? w->seqs->n_parts[i] : 0, bad;
        float *x;
        const float *values;
        if ((rc = borrow(w, s, at, n, &x, err)) < 0 ||
            (rc = parts ? qc_layer_forward_parts(weights, s->ws, x, parts, n_parts, err)
                        : qc_layer_forward(weights, s->ws, x, n, err)) < 0 ||
            (rc = give_back(w, s, at, n, x, &values, err)) < 0)
            break;
        if ((bad = qc_first_nonfinite(values, n * hidden)) >= 0) {
            char what[32];
            snprintf(what, sizeof what, "layer %d", layer);
            rc = not_finite(s, what, layer, i, bad, err);
        } else
            rc = step(w, (double)n * layer_work(&s->model->config), err);
        at += n;
        parts = parts ? parts + n_parts : NULL;
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
            QC_TRY(qc_model_final_norm(s->model, s->be, x, x, n, err));
            QC_TRY(give_back(w, s, t, n, x, &values, err));
        }
    }
    return QC_OK;
}

/* Rows of targets t .. t + n - 1: as they lie in the stream if they follow one another there, else copied
 * together. */
static int gather(walk *w, side *s, int64_t t, int64_t n, float **ret, qc_err *err)
{
    int64_t hidden = s->model->config.hidden, done = 0;
    while (done < n) {
        const qc_eval_target *from = w->targets + t + done;
        int64_t run = 1;
        while (done + run < n && from[run].position == from->position + run)
            run++;
        if (run == n)
            return borrow(w, s, from->position, n, ret, err);
        QC_TRY(qc_stream_get(&s->stream, from->position, run, w->host + done * hidden, err));
        done += run;
    }
    *ret = w->x;
    return w->be->upload(w->be, w->x, w->host, n * hidden, err);
}

static int show(walk *w, int64_t t, int64_t n_targets, int64_t vocab0, int64_t n, qc_err *err)
{
    const qc_logit_tap *tap = w->options ? w->options->tap : NULL;
    const float *logits = w->logits[w->n_sides - 1];
    if (!tap)
        return QC_OK;
    if (w->seen) {
        QC_TRY(w->be->download(w->be, w->seen, logits, n_targets * SLICE_VOCAB, err));
        logits = w->seen;
    }
    return tap->slice(tap->ctx, t, n_targets, vocab0, n, logits, SLICE_VOCAB, err);
}

static int score_slice(walk *w, int64_t vocab0, int64_t n, qc_weight *const heads[2], qc_err *err)
{
    float softcap = w->sides[0].model->config.final_softcap;
    double work = 0;
    for (int i = 0; i < w->n_sides; i++)
        work += (double)n * (double)w->sides[i].model->config.hidden;
    for (int64_t t = 0; t < w->n_targets; t += TILE_TOKENS) {
        int64_t n_targets = qc_min_i64(TILE_TOKENS, w->n_targets - t);
        for (int i = 0; i < w->n_sides; i++) {
            side *s = &w->sides[i];
            float *x;
            QC_TRY(gather(w, s, t, n_targets, &x, err));
            QC_TRY(s->be->linear(s->be, w->logits[i], SLICE_VOCAB, x, s->model->config.hidden, heads[i], NULL,
                                 n_targets, false, err));
        }
        QC_TRY(w->be->score(w->be, w->scores + t, w->logits[0], w->n_sides == 2 ? w->logits[1] : NULL,
                            SLICE_VOCAB, w->target_ids + t, n_targets, vocab0, n, softcap, err));
        QC_TRY(show(w, t, n_targets, vocab0, n, err));
        QC_TRY(step(w, work * (double)n_targets, err));
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
            rc = qc_model_head_slice(w->sides[i].model, w->sides[i].be, v, n, &heads[i], err);
        if (rc == QC_OK)
            rc = score_slice(w, v, n, heads, err);
        for (int i = 0; i < w->n_sides; i++)
            w->sides[i].be->weight_free(w->sides[i].be, heads[i]);
        QC_TRY(rc);
    }
    return QC_OK;
}

static int bad_logits(const walk *w, int64_t target, qc_err *err)
{
    const qc_model *model = w->sides[w->n_sides - 1].model;
    int64_t sequence = 0, token = w->targets[target].position;
    while (token >= w->seqs->lengths[sequence])
        token -= w->seqs->lengths[sequence++];
    char why[QC_ERR_MSG_BYTES];
    qc_model_blame_nonfinite(model, (int)model->config.n_layers, why);
    return qc_fail(err, QC_E_INPUT, "%s: logits are not finite (window %lld, token %lld)%s", model->src->path,
                   (long long)sequence, (long long)token, why);
}

static int finish_scores(const walk *w, qc_token_score *ret, qc_err *err)
{
    const qc_logit_tap *tap = w->options ? w->options->tap : NULL;
    for (int64_t i = 0; i < w->n_targets; i++) {
        const qc_score *score = &w->scores[i];
        double nll_a, nll_b, kld;
        qc_score_finish(score, &nll_a, &nll_b, &kld);
        if (score->n_nonfinite || !isfinite(nll_a) || !isfinite(nll_b) || !isfinite(kld))
            return bad_logits(w, i, err);
        ret[i] = (qc_token_score){.nll_a = (float)nll_a,
                                  .nll_b = (float)nll_b,
                                  .kld = (float)kld,
                                  .target = w->target_ids[i],
                                  .top_a = score->top_a,
                                  .top_b = score->top_b};
        bool pair = w->n_sides == 2;
        double log_sum = pair ? nll_b + (double)score->target_b : nll_a + (double)score->target_a;
        if (tap)
            QC_TRY(tap->finish(tap->ctx, i, log_sum, &ret[i], err));
    }
    return QC_OK;
}

int qc_eval_tokens(qc_backend *be, const qc_model *a, const qc_model *b, const qc_sequences *seqs,
                   const qc_eval_options *options, qc_token_score *ret, qc_err *err)
{
    walk w = {.be = be, .n_sides = b ? 2 : 1, .seqs = seqs, .options = options};
    qc_backend *other = options && options->model_backend ? options->model_backend : be;
    w.sides[0] = (side){.model = a, .be = be, .label = b ? "reference" : "model", .stream.fd = -1};
    w.sides[1] = (side){.model = b, .be = other, .label = "model", .stream.fd = -1};
    for (int64_t s = 0; s < seqs->n_sequences; s++) {
        w.total += seqs->lengths[s];
        w.longest = qc_max_i64(w.longest, seqs->lengths[s]);
    }
    if (w.total == 0)
        return QC_OK;
    int rc = set_targets(&w, err);
    for (int i = 0; i < w.n_sides; i++) {
        const qc_model_config *c = &w.sides[i].model->config;
        w.work_all += (double)w.total * layer_work(c) * (double)c->n_layers +
                      (double)w.n_targets * (double)c->vocab * (double)c->hidden;
    }
    if (rc == QC_OK && (rc = check_models(&w, err)) == QC_OK && (rc = alloc_walk(&w, err)) == QC_OK &&
        (rc = embed_all(&w, err)) == QC_OK && (rc = run_layers(&w, err)) == QC_OK &&
        (rc = norm_all(&w, err)) == QC_OK && (rc = run_head(&w, err)) == QC_OK)
        rc = finish_scores(&w, ret, err);
    free_walk(&w);
    return rc;
}
