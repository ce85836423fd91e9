#include "corpus.h"

#include "eval.h"
#include "qc_alloc.h"
#include "qc_math.h"
#include "qc_rng.h"
#include "tokenizer.h"

#include <string.h>

/* Ids of all documents, one behind the other. */
typedef struct stream {
    int32_t *ids;
    size_t n_ids, cap_ids;
    int64_t n_documents;
} stream;

static int stream_add(stream *st, const int32_t *ids, size_t n_ids, qc_err *err)
{
    size_t need = st->n_ids + n_ids;
    if (need > st->cap_ids) {
        size_t cap = st->cap_ids ? need + st->cap_ids / 2 : need;
        int32_t *grown = qc_realloc(st->ids, st->cap_ids * sizeof *grown, cap * sizeof *grown);
        if (!grown)
            return qc_fail_nomem(err, "token ids", cap * sizeof *grown);
        st->ids = grown;
        st->cap_ids = cap;
    }
    memcpy(st->ids + st->n_ids, ids, n_ids * sizeof *ids);
    st->n_ids = need;
    return QC_OK;
}

/* One document: the BOS id if the tokenizer adds one, then its text. */
static int add_document(stream *st, const qc_tokenizer *tok, const char *text, size_t n_bytes,
                        bool plain_special, qc_err *err)
{
    qc_encode_options options = {.plain_special = plain_special};
    int32_t *ids = NULL, bos = qc_tokenizer_bos(tok);
    int64_t n_ids;
    QC_TRY(qc_tokenizer_encode(tok, text, n_bytes, &options, &ids, &n_ids, err));
    int rc = bos >= 0 ? stream_add(st, &bos, 1, err) : QC_OK;
    if (rc == QC_OK)
        rc = stream_add(st, ids, (size_t)n_ids, err);
    qc_free(ids);
    st->n_documents++;
    return rc;
}

/* Paragraphs: runs of lines that are not blank. */
static int add_paragraphs(stream *st, const qc_tokenizer *tok, const char *text, size_t n_bytes,
                          bool plain_special, qc_err *err)
{
    const char *end = text + n_bytes, *start = NULL;
    for (const char *line = text, *next; line < end; line = next) {
        const char *nl = memchr(line, '\n', (size_t)(end - line));
        next = nl ? nl + 1 : end;
        bool blank = true;
        for (const char *c = line; c < next && blank; c++)
            blank = *c == ' ' || *c == '\t' || *c == '\r' || *c == '\n';
        if (!blank && !start)
            start = line;
        if (start && (blank || next == end)) {
            QC_TRY(add_document(st, tok, start, (size_t)((blank ? line : next) - start), plain_special, err));
            start = NULL;
        }
    }
    return QC_OK;
}

static int add_text_file(stream *st, const qc_tokenizer *tok, const char *path,
                         const qc_corpus_options *options, qc_err *err)
{
    char *text = NULL;
    size_t n_bytes;
    QC_TRY(qc_text_read(path, &text, &n_bytes, err));
    int rc = options->documents == QC_DOCUMENTS_BLANK_LINE
                 ? add_paragraphs(st, tok, text, n_bytes, options->plain_special, err)
                 : add_document(st, tok, text, n_bytes, options->plain_special, err);
    qc_free(text);
    return rc;
}

static int read_with_tokenizer(stream *st, const qc_source *src, const char *path,
                               const qc_corpus_options *options, qc_err *err)
{
    uint64_t needed;
    QC_TRY(qc_text_plan(src, path, options->memory_bytes, &needed, err));
    qc_tokenizer *tok;
    QC_TRY(qc_tokenizer_from_source(src, &tok, err));
    int rc = add_text_file(st, tok, path, options, err);
    qc_tokenizer_free(tok); /* its tables are large and not needed again */
    return rc;
}

static int check_ids(const stream *st, const char *path, int64_t vocab, qc_err *err)
{
    for (size_t i = 0; i < st->n_ids; i++)
        if (st->ids[i] < 0 || st->ids[i] >= vocab)
            return qc_fail(err, QC_E_INPUT, "%s: token %zu has id %d, the model knows 0 .. %lld", path, i,
                           st->ids[i], (long long)vocab - 1);
    return QC_OK;
}

static void copy_windows(const stream *st, const qc_corpus_options *options, qc_corpus *c)
{
    qc_rng rng;
    qc_rng_seed(&rng, (uint64_t)options->seed);
    int64_t n = c->n_windows, all = c->n_text_ids;
    for (int64_t i = 0; i < n; i++) {
        int64_t start = i * (all - c->length) / qc_max_i64(1, n - 1);
        if (options->sample == QC_SAMPLE_RANDOM) { /* each part holds a window: n * length <= all */
            int64_t lo = i * all / n, part = (i + 1) * all / n - lo;
            start = lo + (int64_t)qc_rng_below(&rng, (uint64_t)(part - c->length + 1));
        }
        memcpy(c->ids + i * c->length, st->ids + start, (size_t)c->length * sizeof *c->ids);
    }
}

static int cut_windows(const stream *st, const char *path, const qc_corpus_options *options,
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

static int check_options(const qc_corpus_options *o, qc_corpus *c, qc_err *err)
{
    c->length = o->length ? o->length : qc_min_i64(2048, o->max_positions);
    if (o->windows < 1)
        return qc_fail(err, QC_E_USAGE, "%lld calibration windows: at least 1 is needed",
                       (long long)o->windows);
    if (c->length < 2 || c->length > o->max_positions)
        return qc_fail(err, QC_E_USAGE, "calibration windows of %lld tokens: 2 .. %lld are possible",
                       (long long)c->length, (long long)o->max_positions);
    return QC_OK;
}

int qc_corpus_load(const qc_source *src, const char *path, const qc_corpus_options *options, int64_t vocab,
                   qc_event_list *events, qc_corpus *ret, qc_err *err)
{
    qc_corpus c = {0};
    stream st = {0};
    QC_TRY(check_options(options, &c, err));
    int rc = read_with_tokenizer(&st, src, path, options, err);
    if (rc == QC_OK)
        rc = check_ids(&st, path, vocab, err);
    if (rc == QC_OK)
        rc = cut_windows(&st, path, options, events, &c, err);
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
