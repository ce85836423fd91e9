#include "labels.h"

#include "qc_alloc.h"
#include "qc_math.h"
#include "label_stats.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Tokens of a pack (one sequence of the walk) and of the packs of one walk. */
enum { PACK_TOKENS = 2048, WALK_TOKENS = 65536 };

/* An item as ids: the prompt, then the choices, each whole. */
typedef struct item_ids {
    int32_t *prompt;
    int64_t n_prompt;
    int32_t **choices;
    int64_t *n_choices; /* ids of each */
    int count;
} item_ids;

typedef struct labels {
    qc_backend *be;
    const qc_tokenizer *tok;
    const qc_model *reference, *model;
    const qc_task *task;
    const qc_label_options *options;
    const qc_task_item *items; /* in work: the task's, or its content-free ones */
    int64_t n_items;
    item_ids *ids;    /* [n_items] */
    int64_t shared;   /* ids that all prompts begin with */
    double **sums[2]; /* [2][n_items][count] normalised log-likelihoods: model, reference */
    int64_t n_tokens; /* computed so far */
} labels;

/* ---- tokens ---- */

static int encode(const labels *l, const char *text, int32_t **ret, int64_t *ret_n, qc_err *err)
{
    qc_encode_options options = {.add_special = true};
    QC_TRY(qc_tokenizer_encode(l->tok, text, strlen(text), &options, ret, ret_n, err));
    if (*ret_n > 0 && (*ret)[*ret_n - 1] == qc_tokenizer_eos(l->tok))
        --*ret_n; /* an end of text belongs behind the choice */
    return QC_OK;
}

static bool begins_with(const int32_t *ids, int64_t n, const int32_t *head, int64_t n_head)
{
    return n > n_head && memcmp(ids, head, (size_t)n_head * sizeof *ids) == 0;
}

/* Ids that the choice adds to the prompt; where the border of tokens moves, those of the choice alone. */
static int encode_choice(const labels *l, const qc_task_item *item, int choice, item_ids *x, qc_err *err)
{
    char *whole = qc_asprintf("%s%s", item->prompt, item->choices[choice]);
    int32_t *ids = NULL;
    int64_t n = 0, skip = 0;
    if (!whole)
        return qc_fail_nomem(err, "an item", strlen(item->prompt));
    int rc = encode(l, whole, &ids, &n, err);
    qc_free(whole);
    if (rc == QC_OK && begins_with(ids, n, x->prompt, x->n_prompt))
        skip = x->n_prompt;
    else if (rc == QC_OK) {
        qc_free(ids);
        ids = NULL;
        rc = qc_tokenizer_encode(l->tok, item->choices[choice], strlen(item->choices[choice]), NULL, &ids, &n,
                                 err);
    }
    if (rc == QC_OK && n - skip < 1)
        rc = qc_fail(err, QC_E_INPUT, "row %lld: choice %d has no tokens", (long long)item->row, choice);
    if (rc == QC_OK) {
        memmove(ids, ids + skip, (size_t)(n - skip) * sizeof *ids);
        x->choices[choice] = ids;
        x->n_choices[choice] = n - skip;
        return QC_OK;
    }
    qc_free(ids);
    return rc;
}

static int encode_item(const labels *l, const qc_task_item *item, item_ids *x, qc_err *err)
{
    int64_t longest = 0, limit = l->model->config.max_positions;
    if (l->reference)
        limit = qc_min_i64(limit, l->reference->config.max_positions);
    QC_TRY(encode(l, item->prompt, &x->prompt, &x->n_prompt, err));
    x->choices = qc_calloc((size_t)item->n_choices, sizeof *x->choices);
    x->n_choices = qc_calloc((size_t)item->n_choices, sizeof *x->n_choices);
    if (!x->choices || !x->n_choices)
        return qc_fail_nomem(err, "an item", (unsigned long long)item->n_choices * 16);
    x->count = item->n_choices;
    if (x->n_prompt < 1)
        return qc_fail(err, QC_E_INPUT, "row %lld: its prompt has no tokens", (long long)item->row);
    for (int c = 0; c < x->count; c++) {
        QC_TRY(encode_choice(l, item, c, x, err));
        longest = qc_max_i64(longest, x->n_choices[c]);
    }
    if (x->n_prompt + longest <= limit)
        return QC_OK;
    return qc_fail(err, QC_E_INPUT, "row %lld: %lld tokens, the models have at most %lld positions",
                   (long long)item->row, (long long)(x->n_prompt + longest), (long long)limit);
}

static int encode_all(labels *l, qc_err *err)
{
    l->ids = qc_calloc((size_t)l->n_items, sizeof *l->ids);
    for (int side = 0; side < 2; side++)
        l->sums[side] = qc_calloc((size_t)l->n_items, sizeof *l->sums[side]);
    if (!l->ids || !l->sums[0] || !l->sums[1])
        return qc_fail_nomem(err, "items", (unsigned long long)l->n_items * sizeof *l->ids);
    for (int64_t i = 0; i < l->n_items; i++) {
        QC_TRY(encode_item(l, &l->items[i], &l->ids[i], err));
        int64_t n = i ? qc_min_i64(l->shared, l->ids[i].n_prompt - 1) : l->ids[0].n_prompt - 1;
        l->shared = 0;
        while (l->shared < n && l->ids[i].prompt[l->shared] == l->ids[0].prompt[l->shared])
            l->shared++;
        for (int side = 0; side < 2; side++)
            if (!(l->sums[side][i] = qc_calloc((size_t)l->ids[i].count, sizeof(double))))
                return qc_fail_nomem(err, "items", (unsigned long long)l->ids[i].count * 8);
    }
    return QC_OK;
}

static void free_items(labels *l)
{
    for (int64_t i = 0; l->ids && i < l->n_items; i++) {
        for (int c = 0; c < l->ids[i].count; c++)
            qc_free(l->ids[i].choices[c]);
        qc_free(l->ids[i].prompt);
        qc_free(l->ids[i].choices);
        qc_free(l->ids[i].n_choices);
        for (int side = 0; side < 2; side++)
            if (l->sums[side])
                qc_free(l->sums[side][i]);
    }
    qc_free(l->sums[0]);
    qc_free(l->sums[1]);
    qc_free(l->ids);
}

/* ---- packs ---- */

/* What one walk gets; arrays are sized for the most that its items can need. */
typedef struct batch {
    int32_t *ids;
    int64_t *lengths, *n_parts;
    qc_part *parts;
    qc_eval_target *targets;
    int64_t n_ids, n_packs, n_all_parts, n_targets;
    int64_t pack_parts; /* of the last pack */
} batch;

/* Tokens that an item takes behind the shared ones: the last id of a choice is only scored. */
static int64_t own_tokens(const labels *l, const item_ids *x)
{
    int64_t n = x->n_prompt - l->shared;
    for (int c = 0; c < x->count; c++)
        n += x->n_choices[c] - 1;
    return n;
}

static void add_part(batch *b, const int32_t *ids, int64_t n, int64_t parent)
{
    memcpy(b->ids + b->n_ids, ids, (size_t)n * sizeof *ids);
    b->n_ids += n;
    b->lengths[b->n_packs - 1] += n;
    b->parts[b->n_all_parts++] = (qc_part){.n_tokens = n, .parent = parent};
    b->n_parts[b->n_packs - 1] = ++b->pack_parts;
}

static void add_item(const labels *l, const item_ids *x, batch *b)
{
    int64_t own = own_tokens(l, x);
    if (b->n_packs == 0 || b->lengths[b->n_packs - 1] + own > PACK_TOKENS) {
        b->lengths[b->n_packs] = 0;
        b->n_packs++;
        b->pack_parts = 0;
        if (l->shared > 0)
            add_part(b, x->prompt, l->shared, -1);
    }
    add_part(b, x->prompt + l->shared, x->n_prompt - l->shared, l->shared > 0 ? 0 : -1);
    int64_t prompt_part = b->pack_parts - 1, prompt_end = b->n_ids - 1;
    for (int c = 0; c < x->count; c++) {
        int64_t n = x->n_choices[c], at = b->n_ids;
        b->targets[b->n_targets++] = (qc_eval_target){.position = prompt_end, .id = x->choices[c][0]};
        for (int64_t k = 1; k < n; k++)
            b->targets[b->n_targets++] = (qc_eval_target){.position = at + k - 1, .id = x->choices[c][k]};
        if (n > 1)
            add_part(b, x->choices[c], n - 1, prompt_part);
    }
}

/* Items first .. of at most WALK_TOKENS tokens together; at least one. */
static int64_t batch_items(const labels *l, int64_t first, int64_t *ret_tokens, int64_t *ret_choices,
                           int64_t *ret_targets)
{
    int64_t n = 0, tokens = 0;
    *ret_choices = *ret_targets = 0;
    for (; first + n < l->n_items; n++) {
        const item_ids *x = &l->ids[first + n];
        int64_t own = own_tokens(l, x) + l->shared; /* at worst each begins a pack */
        if (n > 0 && tokens + own > WALK_TOKENS)
            break;
        tokens += own;
        *ret_choices += x->count;
        for (int c = 0; c < x->count; c++)
            *ret_targets += x->n_choices[c];
    }
    *ret_tokens = tokens;
    return n;
}

static void free_batch(batch *b)
{
    qc_free(b->ids);
    qc_free(b->lengths);
    qc_free(b->n_parts);
    qc_free(b->parts);
    qc_free(b->targets);
}

static void take_scores(labels *l, int64_t first, int64_t n_items, const qc_token_score *s)
{
    for (int64_t i = first; i < first + n_items; i++)
        for (int c = 0; c < l->ids[i].count; c++) {
            double sum[2] = {0, 0}, size = 1;
            for (int64_t k = 0; k < l->ids[i].n_choices[c]; k++, s++) {
                sum[0] -= (double)(l->reference ? s->nll_b : s->nll_a);
                sum[1] -= (double)s->nll_a;
            }
            if (l->task->normalize == QC_NORMALIZE_TOKENS)
                size = (double)l->ids[i].n_choices[c];
            if (l->task->normalize == QC_NORMALIZE_BYTES)
                size = (double)strlen(l->items[i].choices[c]);
            l->sums[0][i][c] = sum[0] / size;
            l->sums[1][i][c] = sum[1] / size;
        }
}

static int score_batch(labels *l, int64_t first, int64_t *ret_items, qc_err *err)
{
    int64_t tokens, choices, targets, n = batch_items(l, first, &tokens, &choices, &targets);
    batch b = {.ids = qc_alloc((size_t)tokens, sizeof *b.ids),
               .lengths = qc_calloc((size_t)n, sizeof *b.lengths),
               .n_parts = qc_calloc((size_t)n, sizeof *b.n_parts),
               .parts = qc_alloc((size_t)(2 * n + choices), sizeof *b.parts),
               .targets = qc_alloc((size_t)targets, sizeof *b.targets)};
    qc_token_score *scores = qc_alloc((size_t)targets, sizeof *scores);
    int rc = QC_OK;
    if (!b.ids || !b.lengths || !b.n_parts || !b.parts || !b.targets || !scores)
        rc = qc_fail_nomem(err, "items", (unsigned long long)(tokens + targets) * 32);
    for (int64_t i = first; i < first + n && rc == QC_OK; i++)
        add_item(l, &l->ids[i], &b);
    if (rc == QC_OK) {
        qc_sequences seqs = {.ids = b.ids,
                             .lengths = b.lengths,
                             .n_sequences = b.n_packs,
                             .targets = b.targets,
                             .n_targets = b.n_targets,
                             .parts = b.parts,
                             .n_parts = b.n_parts};
        rc = qc_eval_tokens(l->be, l->reference ? l->reference : l->model, l->reference ? l->model : NULL,
                            &seqs, &l->options->eval, scores, err);
    }
    if (rc == QC_OK)
        take_scores(l, first, n, scores);
    l->n_tokens += b.n_ids;
    *ret_items = n;
    free_batch(&b);
    qc_free(scores);
    return rc;
}

/* Encode and score l->items. */
static int score_items(labels *l, qc_err *err)
{
    l->shared = 0;
    QC_TRY(encode_all(l, err));
    for (int64_t i = 0, n; i < l->n_items; i += n)
        QC_TRY(score_batch(l, i, &n, err));
    return QC_OK;
}

/* ln of the mean probability of each choice without content, for both models: ret[2][n_choices]. */
static int content_free(const labels *l, double *ret[2], int64_t *ret_tokens, qc_err *err)
{
    labels own = *l;
    own.items = l->task->content_free;
    own.n_items = l->task->n_content_free;
    own.n_tokens = 0;
    own.ids = NULL;
    own.sums[0] = own.sums[1] = NULL;
    int rc = score_items(&own, err);
    for (int side = 0; side < 2 && rc == QC_OK; side++)
        for (int c = 0; c < own.ids[0].count; c++) {
            double p = 0;
            for (int64_t i = 0; i < own.n_items; i++)
                p += exp(own.sums[side][i][c]) / (double)own.n_items;
            ret[side][c] = log(p);
        }
    *ret_tokens = own.n_tokens;
    free_items(&own);
    return rc;
}

/* Answers of a model: the choice with the largest sum, less what it has without content. */
static void choose(const labels *l, int side, const double *without, int32_t *ret)
{
    for (int64_t i = 0; i < l->n_items; i++) {
        ret[i] = 0;
        for (int c = 1; c < l->ids[i].count; c++) {
            const double *s = l->sums[side][i];
            if (s[c] - (without ? without[c] : 0) > s[ret[i]] - (without ? without[ret[i]] : 0))
                ret[i] = c;
        }
    }
}

/* The log-likelihoods of all choices, one item's after the other's. */
static int keep_sums(const labels *l, qc_label_result *r, qc_err *err)
{
    size_t total = 0, at = 0;
    for (int64_t i = 0; i < l->n_items; i++)
        total += (size_t)l->ids[i].count;
    r->n_choices = qc_alloc((size_t)l->n_items, sizeof *r->n_choices);
    r->log_p = qc_alloc(total, sizeof *r->log_p);
    r->log_p_reference = l->reference ? qc_alloc(total, sizeof *r->log_p_reference) : NULL;
    if (!r->n_choices || !r->log_p || (l->reference && !r->log_p_reference))
        return qc_fail_nomem(err, "log-likelihoods", total * 16);
    for (int64_t i = 0; i < l->n_items; at += (size_t)l->ids[i].count, i++) {
        size_t n = (size_t)l->ids[i].count;
        r->n_choices[i] = l->ids[i].count;
        memcpy(r->log_p + at, l->sums[0][i], n * sizeof *r->log_p);
        if (l->reference)
            memcpy(r->log_p_reference + at, l->sums[1][i], n * sizeof *r->log_p_reference);
    }
    return QC_OK;
}

static int judge(const labels *l, double *without[2], qc_label_result *r, qc_err *err)
{
    size_t n = (size_t)l->n_items;
    int n_classes = l->task->fixed ? l->ids[0].count : 0;
    int32_t *answers = qc_alloc(2 * n, sizeof *answers);
    r->answers = qc_alloc(n, sizeof *r->answers);
    r->labels = qc_alloc(n, sizeof *r->labels);
    r->rows = qc_alloc(n, sizeof *r->rows);
    r->answers_reference = l->reference ? qc_alloc(n, sizeof *r->answers_reference) : NULL;
    if (!answers || !r->answers || !r->labels || !r->rows || (l->reference && !r->answers_reference)) {
        qc_free(answers);
        return qc_fail_nomem(err, "answers", n * 24);
    }
    for (int64_t i = 0; i < l->n_items; i++) {
        r->labels[i] = l->items[i].label;
        r->rows[i] = l->items[i].row;
    }
    choose(l, 0, NULL, r->answers);
    r->model = qc_label_score_of(r->answers, r->labels, l->n_items, n_classes);
    if (l->reference) {
        choose(l, 1, NULL, r->answers_reference);
        r->reference = qc_label_score_of(r->answers_reference, r->labels, l->n_items, n_classes);
        r->pair = qc_label_pair_of(r->answers, r->answers_reference, r->labels, l->n_items);
    }
    if (without[0]) {
        choose(l, 0, without[0], answers);
        choose(l, 1, without[1], answers + n);
        r->model_calibrated = qc_label_score_of(answers, r->labels, l->n_items, n_classes);
        r->reference_calibrated = qc_label_score_of(answers + n, r->labels, l->n_items, n_classes);
        r->pair_calibrated = qc_label_pair_of(answers, answers + n, r->labels, l->n_items);
    }
    qc_free(answers);
    return QC_OK;
}

int qc_labels_score(qc_backend *be, const qc_tokenizer *tok, const qc_model *reference, const qc_model *model,
                    const qc_task *task, const qc_label_options *options, qc_label_result *ret, qc_err *err)
{
    labels l = {.be = be,
                .tok = tok,
                .reference = reference,
                .model = model,
                .task = task,
                .options = options,
                .items = task->items,
                .n_items = task->n_items};
    double *without[2] = {NULL, NULL};
    bool calibrate = options->calibrate && task->n_content_free > 0;
    qc_label_result r = {.n_items = task->n_items,
                         .n_rows = task->n_rows,
                         .has_reference = reference != NULL,
                         .has_calibrated = calibrate};
    memcpy(r.data_sha256, task->data_sha256, sizeof r.data_sha256);
    int64_t more = 0;
    int rc = (r.task = qc_strdup(task->name)) ? score_items(&l, err) : qc_fail_nomem(err, "task", 64);
    for (int side = 0; side < 2 && calibrate && rc == QC_OK; side++)
        if (!(without[side] = qc_calloc((size_t)l.ids[0].count, sizeof(double))))
            rc = qc_fail_nomem(err, "choices", 512);
    if (rc == QC_OK && calibrate)
        rc = content_free(&l, without, &more, err);
    if (rc == QC_OK)
        rc = keep_sums(&l, &r, err);
    if (rc == QC_OK)
        rc = judge(&l, without, &r, err);
    r.tokens = l.n_tokens + more;
    free_items(&l);
    qc_free(without[0]);
    qc_free(without[1]);
    if (rc == QC_OK)
        *ret = r;
    else
        qc_label_result_clear(&r);
    return rc;
}
