/* Taps between the walk and stored references: one picks what is kept of the logits as they come by, the
 * other looks up the logits of ids that were kept. */
#include "reference_internal.h"

#include "qc_alloc.h"
#include "qc_math.h"
#include "qc_rng.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ids behind the kept ones are drawn from ranks up to this many times `keep` */
enum { RANKS = 4 };

typedef struct candidate {
    float logit;
    int32_t id;
} candidate;

struct qc_keeper {
    qc_kept *kept;
    int64_t vocab;
    float softcap;
    int64_t seed_position;
    int64_t n_best;        /* candidates that survive */
    candidate *candidates; /* [kept->n, 2 n_best] */
    int32_t *counts;       /* [kept->n] */
    float *thresholds;     /* [kept->n] a logit at or below can not be among the best any more */
};

/* Larger logit first, then smaller id. */
static bool is_before(const candidate *a, const candidate *b)
{
    return a->logit != b->logit ? a->logit > b->logit : a->id < b->id;
}

static int compare_candidates(const void *a, const void *b)
{
    return is_before(a, b) ? -1 : is_before(b, a);
}

static int compare_ids(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    return (x->id > y->id) - (x->id < y->id);
}

/* Move the best n_best of c[n] to its front (Hoare's selection). */
static void select_best(candidate *c, int64_t n, int64_t n_best)
{
    int64_t lo = 0, hi = n - 1;
    while (lo < hi) {
        candidate pivot = c[lo + (hi - lo) / 2];
        int64_t i = lo, j = hi;
        while (i <= j) {
            while (is_before(&c[i], &pivot))
                i++;
            while (is_before(&pivot, &c[j]))
                j--;
            if (i <= j) {
                candidate t = c[i];
                c[i++] = c[j];
                c[j--] = t;
            }
        }
        if (n_best - 1 <= j)
            hi = j;
        else if (n_best - 1 >= i)
            lo = i;
        else
            break;
    }
}

uint64_t qc_keeper_bytes(int64_t n, int64_t keep)
{
    return (uint64_t)n * (2 * RANKS * (uint64_t)keep * sizeof(candidate) + 8);
}

int qc_keeper_new(qc_kept *kept, int64_t vocab, float softcap, int64_t seed_position, qc_keeper **ret,
                  qc_err *err)
{
    qc_keeper *k = qc_calloc(1, sizeof *k);
    if (!k)
        return qc_fail_nomem(err, "reference scores", sizeof *k);
    *k = (qc_keeper){.kept = kept,
                     .vocab = vocab,
                     .softcap = softcap,
                     .seed_position = seed_position,
                     .n_best = qc_min_i64(vocab, RANKS * kept->keep)};
    k->candidates = qc_alloc((size_t)kept->n, (size_t)(2 * k->n_best) * sizeof *k->candidates);
    k->counts = qc_calloc((size_t)kept->n, sizeof *k->counts);
    k->thresholds = qc_alloc((size_t)kept->n, sizeof *k->thresholds);
    if (!k->candidates || !k->counts || !k->thresholds) {
        qc_keeper_free(k);
        return qc_fail_nomem(err, "reference scores", qc_keeper_bytes(kept->n, kept->keep));
    }
    for (int64_t i = 0; i < kept->n; i++)
        k->thresholds[i] = -INFINITY;
    *ret = k;
    return QC_OK;
}

void qc_keeper_free(qc_keeper *keeper)
{
    if (!keeper)
        return;
    qc_free(keeper->candidates);
    qc_free(keeper->counts);
    qc_free(keeper->thresholds);
    qc_free(keeper);
}

static int keep_slice(void *ctx, int64_t target0, int64_t n_targets, int64_t vocab0, int64_t n_vocab,
                      const float *logits, int64_t ld, qc_err *err)
{
    qc_keeper *k = ctx;
    (void)err;
    for (int64_t t = target0; t < target0 + n_targets; t++, logits += ld) {
        candidate *c = k->candidates + t * 2 * k->n_best;
        int32_t n = k->counts[t];
        float threshold = k->thresholds[t];
        for (int64_t i = 0; i < n_vocab; i++) {
            if (!(logits[i] > threshold))
                continue;
            c[n++] = (candidate){logits[i], (int32_t)(vocab0 + i)};
            if (n == 2 * k->n_best) {
                select_best(c, n, k->n_best);
                n = (int32_t)k->n_best;
                threshold = c[0].logit;
                for (int32_t b = 1; b < n; b++)
                    threshold = c[b].logit < threshold ? c[b].logit : threshold;
            }
        }
        k->counts[t] = n;
        k->thresholds[t] = threshold;
    }
    return QC_OK;
}

static double capped(float logit, float softcap)
{
    return softcap > 0 ? (double)(softcap * tanhf(logit / softcap)) : (double)logit;
}

static void store(qc_kept *kept, int64_t t, int64_t place, const candidate *c, float softcap, double log_sum)
{
    int64_t at = t * (kept->keep + kept->drawn) + place;
    kept->ids[at] = c->id;
    kept->levels[at] = qc_level_of(capped(c->logit, softcap) - log_sum);
}

/* `drawn` ids from candidates c[n] in proportion to their probabilities: at equal distances of cumulated
 * probability (systematic sampling), from a start that the position decides. */
static void draw(const qc_keeper *k, int64_t t, candidate *c, int64_t n, double log_sum)
{
    qc_kept *kept = k->kept;
    qc_rng rng;
    double mass = 0, sum = 0;
    int64_t n_drawn = 0;
    qc_rng_seed(&rng, (uint64_t)(k->seed_position + t));
    double start = qc_rng_uniform(&rng);
    qsort(c, (size_t)n, sizeof *c, compare_ids);
    for (int64_t i = 0; i < n; i++)
        mass += exp(capped(c[i].logit, k->softcap) - log_sum);
    for (int64_t i = 0; i < n; i++) {
        sum += exp(capped(c[i].logit, k->softcap) - log_sum);
        while (n_drawn < kept->drawn &&
               (i + 1 == n || ((double)n_drawn + start) / (double)kept->drawn * mass < sum))
            store(kept, t, kept->keep + n_drawn++, &c[i], k->softcap, log_sum);
    }
}

static int keep_finish(void *ctx, int64_t target, double log_sum, qc_token_score *score, qc_err *err)
{
    qc_keeper *k = ctx;
    qc_kept *kept = k->kept;
    candidate *c = k->candidates + target * 2 * k->n_best;
    int64_t n = k->counts[target];
    if (n < k->n_best)
        return qc_fail(err, QC_E_INPUT, "a stored reference keeps %lld ids, position %lld has %lld logits",
                       (long long)k->n_best, (long long)target, (long long)n);
    qsort(c, (size_t)n, sizeof *c, compare_candidates);
    qsort(c, (size_t)kept->keep, sizeof *c, compare_ids);
    for (int64_t i = 0; i < kept->keep; i++) {
        store(kept, target, i, &c[i], k->softcap, log_sum);
        if (c[i].id == score->top_a)
            kept->top[target] = (int32_t)i;
    }
    draw(k, target, c + kept->keep, k->n_best - kept->keep, log_sum);
    kept->nll[target] = score->nll_a > 0 ? score->nll_a : 0;
    return QC_OK;
}

qc_logit_tap qc_keeper_tap(qc_keeper *keeper)
{
    return (qc_logit_tap){.slice = keep_slice, .finish = keep_finish, .ctx = keeper};
}

/* ---- comparison ---- */

int qc_comparer_init(const qc_kept *kept, float softcap, qc_comparer *ret, qc_err *err)
{
    size_t width = (size_t)(kept->keep + kept->drawn);
    *ret = (qc_comparer){.kept = kept, .softcap = softcap};
    ret->logits = qc_alloc((size_t)kept->n, width * sizeof *ret->logits);
    ret->place = qc_calloc((size_t)kept->n, 2 * sizeof *ret->place);
    ret->levels = qc_alloc(width, sizeof *ret->levels);
    if (!ret->logits || !ret->place || !ret->levels)
        return qc_fail_nomem(err, "reference scores", (unsigned long long)kept->n * width * 4);
    return QC_OK;
}

void qc_comparer_clear(qc_comparer *comparer)
{
    qc_free(comparer->logits);
    qc_free(comparer->place);
    qc_free(comparer->levels);
    *comparer = (qc_comparer){0};
}

static int compare_slice(void *ctx, int64_t target0, int64_t n_targets, int64_t vocab0, int64_t n_vocab,
                         const float *logits, int64_t ld, qc_err *err)
{
    qc_comparer *c = ctx;
    int64_t width = c->kept->keep + c->kept->drawn;
    (void)err;
    for (int64_t t = target0; t < target0 + n_targets; t++, logits += ld)
        for (int part = 0; part < 2; part++) {
            int32_t *place = &c->place[2 * t + part];
            int64_t first = part ? c->kept->keep : 0, n = part ? c->kept->drawn : c->kept->keep;
            const int32_t *ids = c->kept->ids + t * width + first;
            for (; *place < n && ids[*place] < vocab0 + n_vocab; ++*place)
                c->logits[t * width + first + *place] = logits[ids[*place] - vocab0];
        }
    return QC_OK;
}

static int compare_finish(void *ctx, int64_t target, double log_sum, qc_token_score *score, qc_err *err)
{
    qc_comparer *c = ctx;
    const qc_kept *kept = c->kept;
    int64_t width = kept->keep + kept->drawn;
    const int32_t *ids = kept->ids + target * width;
    (void)err;
    for (int64_t i = 0; i < width; i++)
        c->levels[i] = qc_level_of(capped(c->logits[target * width + i], c->softcap) - log_sum);
    score->nll_b = score->nll_a > 0 ? score->nll_a : 0;
    score->top_b = score->top_a;
    score->nll_a = kept->nll[target];
    score->top_a = ids[kept->top[target]];
    score->kld = (float)qc_kept_kld(kept->levels + target * width, c->levels, kept->keep, kept->drawn);
    return QC_OK;
}

qc_logit_tap qc_comparer_tap(qc_comparer *comparer)
{
    return (qc_logit_tap){.slice = compare_slice, .finish = compare_finish, .ctx = comparer};
}
