#include "corpus_internal.h"

#include "qc_alloc.h"
#include "qc_math.h"
#include "qc_rng.h"

#include <string.h>

static int check_ids(const qc_id_stream *st, const char *path, int64_t vocab, qc_err *err)
{
    for (size_t i = 0; i < st->n_ids; i++)
        if (st->ids[i] < 0 || st->ids[i] >= vocab)
            return qc_fail(err, QC_E_INPUT, "%s: the id of token %zu is none of the model's 0 .. %lld", path,
                           i, (long long)vocab - 1);
    return QC_OK;
}

/* Windows start on multiples of `unit`: 1, or the row length where the file is cut into windows already. */
static void copy_windows(const qc_id_stream *st, const qc_corpus_options *options, qc_corpus *c)
{
    qc_rng rng;
    qc_rng_seed(&rng, (uint64_t)options->seed);
    int64_t unit = qc_max_i64(st->row_length, 1), n = c->n_windows, all = c->n_text_ids / unit,
            length = c->length / unit;
    for (int64_t i = 0; i < n; i++) {
        int64_t start = i * (all - length) / qc_max_i64(1, n - 1);
        if (options->sample == QC_SAMPLE_RANDOM) { /* each part holds a window: n * length <= all */
            int64_t lo = i * all / n, part = (i + 1) * all / n - lo;
            start = lo + (int64_t)qc_rng_below(&rng, (uint64_t)(part - length + 1));
        }
        memcpy(c->ids + i * c->length, st->ids + start * unit, (size_t)c->length * sizeof *c->ids);
    }
}

static int cut_windows(const qc_id_stream *st, const char *path, const qc_corpus_options *options,
                       qc_event_list *events, qc_corpus *c, qc_err *err)
{
    c->n_text_ids = (int64_t)st->n_ids;
    c->n_documents = st->n_documents;
    int64_t there = c->n_text_ids / c->length;
    if (there == 0)
        return qc_fail(err, QC_E_INPUT,
                       "%s: %lld tokens, a calibration window has %lld: use a longer text or shorter windows",
                       path, (long long)c->n_text_ids, (long long)c->length);
    c->n_windows = qc_min_i64(options->windows, there);
    if (c->n_windows < options->windows)
        QC_TRY(qc_event_add(events, QC_EVENT_NOTE, "corpus", path, 1, err,
                            "%lld windows of %lld tokens instead of %lld: the text has %lld tokens",
                            (long long)c->n_windows, (long long)c->length, (long long)options->windows,
                            (long long)c->n_text_ids));
    c->ids = qc_alloc((size_t)(c->n_windows * c->length), sizeof *c->ids);
    if (!c->ids)
        return qc_fail_nomem(err, "calibration windows", (unsigned long long)(c->n_windows * c->length) * 4);
    copy_windows(st, options, c);
    return qc_ids_sha256(c->ids, c->n_windows * c->length, c->ids_sha256, err);
}

static int choose_length(const qc_corpus_options *o, const char *path, int64_t row_length, qc_corpus *c,
                         qc_err *err)
{
    if (row_length && o->length && o->length != row_length)
        return qc_fail(err, QC_E_USAGE, "%s holds windows of %lld tokens, %lld were asked for", path,
                       (long long)row_length, (long long)o->length);
    c->length = row_length ? row_length : o->length ? o->length : qc_min_i64(2048, o->max_positions);
    if (c->length < 2 || c->length > o->max_positions)
        return qc_fail(err, QC_E_USAGE, "calibration windows of %lld tokens: this model takes 2 .. %lld",
                       (long long)c->length, (long long)o->max_positions);
    return QC_OK;
}

static bool ends_with(const char *text, const char *ending)
{
    size_t n = strlen(text), m = strlen(ending);
    return n >= m && strcmp(text + n - m, ending) == 0;
}

static int load(qc_id_stream *st, const qc_source *src, const char *path, const qc_corpus_options *options,
                int64_t vocab, qc_event_list *events, qc_corpus *c, qc_err *err)
{
    if (options->windows < 1)
        return qc_fail(err, QC_E_USAGE, "%lld calibration windows: at least 1 is needed",
                       (long long)options->windows);
    QC_TRY(choose_length(options, path, 0, c, err)); /* before a long text is read */
    if (ends_with(path, ".npy"))
        QC_TRY(qc_corpus_read_npy(st, path, options, err));
    else
        QC_TRY(qc_corpus_read_text(st, src, path, options, events, err));
    QC_TRY(choose_length(options, path, st->row_length, c, err));
    QC_TRY(check_ids(st, path, vocab, err));
    return cut_windows(st, path, options, events, c, err);
}

int qc_corpus_load(const qc_source *src, const char *path, const qc_corpus_options *options, int64_t vocab,
                   qc_event_list *events, qc_corpus *ret, qc_err *err)
{
    qc_corpus c = {0};
    qc_id_stream st = {0};
    int rc = load(&st, src, path, options, vocab, events, &c, err);
    qc_free(st.ids);
    qc_alloc_trim();
    if (rc == QC_OK)
        *ret = c;
    else
        qc_corpus_clear(&c);
    return rc;
}

void qc_corpus_clear(qc_corpus *corpus)
{
    if (!corpus)
        return;
    qc_free(corpus->ids);
    *corpus = (qc_corpus){0};
}

int qc_corpus_check(const qc_corpus *corpus, const qc_model_config *config, const char *name,
                    qc_event_list *events, qc_err *err)
{
    int64_t n = corpus->n_windows * corpus->length, same = 1, widest = 0;
    for (int s = 0; s < QC_N_STAGES; s++)
        widest = qc_max_i64(widest, qc_stage_width(config, (qc_stage)s));
    while (same < n && corpus->ids[same] == corpus->ids[0])
        same++;
    if (same == n)
        return qc_event_add(events, QC_EVENT_NOTE, "calibration_rank", name, 1, err,
                            "all calibration tokens are the same (id %d): the statistics say next to nothing",
                            corpus->ids[0]);
    if (n < 2 * widest)
        return qc_event_add(
            events, QC_EVENT_NOTE, "calibration_rank", name, 1, err,
            "%lld calibration tokens for up to %lld inputs of a matrix: at least twice as many "
            "tokens as inputs are advisable",
            (long long)n, (long long)widest);
    return QC_OK;
}

enum { PERPLEXITY_TOKENS = 2048 };

int64_t qc_corpus_perplexity_windows(const qc_corpus *corpus)
{
    return qc_min_i64(corpus->n_windows, qc_max_i64(1, PERPLEXITY_TOKENS / corpus->length));
}

int qc_corpus_perplexity(const qc_corpus *corpus, const qc_model *model, qc_backend *be,
                         const qc_eval_options *options, double limit, const char *name,
                         qc_event_list *events, double *ret_ppl, int64_t *ret_windows, qc_err *err)
{
    int64_t n = qc_corpus_perplexity_windows(corpus), lengths[PERPLEXITY_TOKENS];
    for (int64_t i = 0; i < n; i++)
        lengths[i] = corpus->length;
    qc_windows windows = {.ids = corpus->ids, .lengths = lengths, .n_windows = n, .length = corpus->length};
    qc_evaluation e;
    if (qc_evaluate(be, NULL, model, &windows, options, &e, err) < 0)
        return qc_err_prefix(err, "calibration with %s", name);
    double ppl = *ret_ppl = e.ppl;
    *ret_windows = n;
    qc_evaluation_clear(&e);
    if (limit <= 0 || ppl <= limit)
        return QC_OK;
    return qc_event_add(
        events, QC_EVENT_NOTE, "calibration_perplexity", name, 1, err,
        "perplexity %.4g of the 16-bit model, expected at most %.4g: checkpoint, config, tokenizer "
        "and text may not belong together",
        ppl, limit);
}

bool qc_corpus_preset(const char *name, int64_t *ret_windows, int64_t *ret_length)
{
    static const struct {
        const char *name;
        int64_t windows, length;
    } presets[] = {{"quick", 16, 512}, {"standard", 128, 2048}, {"thorough", 256, 2048}};
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++)
        if (strcmp(name, presets[i].name) == 0) {
            *ret_windows = presets[i].windows;
            *ret_length = presets[i].length;
            return true;
        }
    return false;
}
