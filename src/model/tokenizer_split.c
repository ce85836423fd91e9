#include "tokenizer_internal.h"

#include <string.h>

static int run_split(tok_run *run, size_t step, const char *text, size_t n_bytes, bool first);

/* Pieces of one split step as its behaviour makes them of the stretches fed in order. */
typedef struct folder {
    tok_run *run;
    size_t step;
    const char *text;
    bool first;
    tok_behavior behavior;
    bool invert;
    bool pending; /* [start, end) may still grow */
    size_t start, end;
    bool was_match; /* of the stretch fed last */
} folder;

static int emit(folder *f, size_t start, size_t end)
{
    if (start == end)
        return QC_OK;
    return run_split(f->run, f->step + 1, f->text + start, end - start, f->first && start == 0);
}

static bool joins_pending(const folder *f, bool is_match)
{
    switch (f->behavior) {
    case TOK_MERGED_WITH_PREVIOUS:
        return f->pending && is_match && !f->was_match;
    case TOK_MERGED_WITH_NEXT:
        return f->pending && !is_match && f->was_match;
    case TOK_CONTIGUOUS:
        return f->pending && is_match == f->was_match;
    default:
        return false;
    }
}

static int feed(folder *f, size_t start, size_t end, bool is_match)
{
    is_match ^= f->invert;
    if (f->behavior == TOK_ISOLATED || f->behavior == TOK_REMOVED)
        return f->behavior == TOK_REMOVED && is_match ? QC_OK : emit(f, start, end);
    bool joins = joins_pending(f, is_match);
    f->was_match = is_match;
    if (joins) {
        f->end = end;
        return QC_OK;
    }
    if (f->pending)
        QC_TRY(emit(f, f->start, f->end));
    f->pending = true;
    f->start = start;
    f->end = end;
    return QC_OK;
}

static int finish(folder *f)
{
    return f->pending ? emit(f, f->start, f->end) : QC_OK;
}

static int split_regex(tok_run *run, folder *f, const tok_split *split, size_t n_bytes)
{
    const char *subject;
    QC_TRY(tok_regex_subject(f->text, n_bytes, &run->pieces[f->step], &subject, run->err));
    size_t done = 0, start = 0, end = 0;
    int rc;
    while ((rc = tok_regex_find(run, split->regex, subject, n_bytes, done, &start, &end)) > 0) {
        if (done != start)
            QC_TRY(feed(f, done, start, false));
        QC_TRY(feed(f, start, end, true));
        done = end;
    }
    if (rc < 0)
        return rc;
    if (done != n_bytes)
        QC_TRY(feed(f, done, n_bytes, false));
    return finish(f);
}

/* Every numeric character is a match of its own. */
static int split_digits(folder *f, size_t n_bytes)
{
    size_t done = 0;
    for (size_t i = 0; i < n_bytes;) {
        int n;
        bool numeric = tok_is_numeric(tok_decode_char(f->text + i, &n));
        if (numeric) {
            if (done < i)
                QC_TRY(feed(f, done, i, false));
            QC_TRY(feed(f, i, i + (size_t)n, true));
            done = i + (size_t)n;
        }
        i += (size_t)n;
    }
    if (done < n_bytes)
        QC_TRY(feed(f, done, n_bytes, false));
    return finish(f);
}

static int split_metaspace(tok_run *run, folder *f, const tok_split *split, size_t n_bytes)
{
    qc_buf *out = &run->pieces[f->step];
    size_t mark_bytes = strlen(split->replacement);
    bool has_mark =
        f->text[0] == ' ' || (n_bytes >= mark_bytes && memcmp(f->text, split->replacement, mark_bytes) == 0);
    out->n_bytes = 0;
    if (!has_mark &&
        (split->prepend == TOK_PREPEND_ALWAYS || (split->prepend == TOK_PREPEND_FIRST && f->first)))
        QC_TRY(qc_buf_append(out, split->replacement, mark_bytes, run->err));
    for (size_t i = 0; i < n_bytes; i++) {
        bool blank = f->text[i] == ' ';
        QC_TRY(
            qc_buf_append(out, blank ? split->replacement : f->text + i, blank ? mark_bytes : 1, run->err));
    }
    f->text = out->data;
    if (!split->split)
        return emit(f, 0, out->n_bytes);
    size_t done = 0;
    for (const char *hit;
         (hit = memmem(out->data + done, out->n_bytes - done, split->replacement, mark_bytes)) != NULL;) {
        size_t at = (size_t)(hit - out->data);
        if (done < at)
            QC_TRY(feed(f, done, at, false));
        done = at + mark_bytes;
        QC_TRY(feed(f, at, done, true));
    }
    if (done < out->n_bytes)
        QC_TRY(feed(f, done, out->n_bytes, false));
    return finish(f);
}

static int prefix_space(tok_run *run, folder *f, size_t n_bytes)
{
    if (f->text[0] == ' ')
        return emit(f, 0, n_bytes);
    qc_buf *out = &run->pieces[f->step];
    out->n_bytes = 0;
    QC_TRY(qc_buf_append(out, " ", 1, run->err));
    QC_TRY(qc_buf_append(out, f->text, n_bytes, run->err));
    f->text = out->data;
    return emit(f, 0, out->n_bytes);
}

static int run_split(tok_run *run, size_t step, const char *text, size_t n_bytes, bool first)
{
    if (step == run->tok->n_splits)
        return tok_bpe_word(run, text, n_bytes);
    const tok_split *split = &run->tok->splits[step];
    folder f = {.run = run,
                .step = step,
                .text = text,
                .first = first,
                .behavior = split->behavior,
                .invert = split->invert};
    switch (split->kind) {
    case TOK_SPLIT_REGEX:
        return split_regex(run, &f, split, n_bytes);
    case TOK_SPLIT_DIGITS:
        return split_digits(&f, n_bytes);
    case TOK_SPLIT_METASPACE:
        return split_metaspace(run, &f, split, n_bytes);
    case TOK_SPLIT_PREFIX_SPACE:
        return prefix_space(run, &f, n_bytes);
    }
    return QC_OK;
}

int tok_split_piece(tok_run *run, const char *text, size_t n_bytes, bool first)
{
    return n_bytes ? run_split(run, 0, text, n_bytes, first) : QC_OK;
}
