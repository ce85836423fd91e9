#include "tokenizer_internal.h"

#include "qc_alloc.h"

#include <stdlib.h>
#include <string.h>

static int compare_added(const void *a, const void *b)
{
    const tok_added *x = a, *y = b;
    size_t n = x->n_bytes < y->n_bytes ? x->n_bytes : y->n_bytes;
    int c = memcmp(x->text, y->text, n);
    if (c == 0)
        c = (x->n_bytes > y->n_bytes) - (x->n_bytes < y->n_bytes);
    return c ? c : (x->id > y->id) - (x->id < y->id);
}

void tok_matcher_build(tok_matcher *matcher)
{
    if (matcher->n_tokens)
        qsort(matcher->tokens, matcher->n_tokens, sizeof *matcher->tokens, compare_added);
    size_t i = 0;
    for (unsigned b = 0; b < 257; b++) {
        while (i < matcher->n_tokens && (unsigned char)matcher->tokens[i].text[0] < b)
            i++;
        matcher->first[b] = (uint32_t)i;
    }
}

void tok_matcher_clear(tok_matcher *matcher)
{
    for (size_t i = 0; i < matcher->n_tokens; i++)
        qc_free(matcher->tokens[i].text);
    qc_free(matcher->tokens);
}

/* First of the tokens lo .. hi - 1 (which agree in their first `depth` bytes and are longer) whose byte there
 * is >= b. */
static uint32_t lower_bound(const tok_matcher *matcher, uint32_t lo, uint32_t hi, size_t depth, unsigned b)
{
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if ((unsigned char)matcher->tokens[mid].text[depth] < b)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Longest token that starts at text, NULL if none does. */
static const tok_added *longest_at(const tok_matcher *matcher, const char *text, size_t n_bytes)
{
    const tok_added *best = NULL;
    unsigned b = (unsigned char)text[0];
    uint32_t lo = matcher->first[b], hi = matcher->first[b + 1];
    for (size_t depth = 1; lo < hi; depth++) {
        if (matcher->tokens[lo].n_bytes == depth)
            best = &matcher->tokens[lo];
        while (lo < hi && matcher->tokens[lo].n_bytes == depth)
            lo++;
        if (depth == n_bytes)
            break;
        b = (unsigned char)text[depth];
        lo = lower_bound(matcher, lo, hi, depth, b);
        hi = lower_bound(matcher, lo, hi, depth, b + 1);
    }
    return best;
}

/* Does a word character touch text[start, end) on either side? */
static bool touches_word(const char *text, size_t n_bytes, size_t start, size_t end)
{
    int n;
    if (start > 0 && tok_is_word(tok_decode_char(text + tok_previous_char(text, start), &n)))
        return true;
    return end < n_bytes && tok_is_word(tok_decode_char(text + end, &n));
}

/* Start of the blanks that end at `start`, not before `floor`. */
static size_t blanks_before(const char *text, size_t start, size_t floor)
{
    while (start > floor) {
        int n;
        size_t p = tok_previous_char(text, start);
        if (!tok_is_space(tok_decode_char(text + p, &n)))
            break;
        start = p;
    }
    return start;
}

static size_t blanks_after(const char *text, size_t n_bytes, size_t end)
{
    while (end < n_bytes) {
        int n;
        if (!tok_is_space(tok_decode_char(text + end, &n)))
            break;
        end += (size_t)n;
    }
    return end;
}

const tok_added *tok_matcher_next(const tok_matcher *matcher, const char *text, size_t n_bytes,
                                  bool plain_special, size_t done, size_t *from, size_t *ret_start,
                                  size_t *ret_end)
{
    if (matcher->n_tokens == 0)
        return NULL;
    for (size_t i = *from; i < n_bytes; i++) {
        unsigned b = (unsigned char)text[i];
        if (matcher->first[b] == matcher->first[b + 1])
            continue;
        const tok_added *token = longest_at(matcher, text + i, n_bytes - i);
        if (!token)
            continue;
        /* A match that its flags or the caller refuse is skipped whole, without looking inside it. */
        size_t start = i, end = i + token->n_bytes;
        i = end - 1;
        if ((token->special && plain_special) ||
            (token->single_word && touches_word(text, n_bytes, start, end)))
            continue;
        *from = end;
        *ret_start = !token->lstrip ? start : start > done ? blanks_before(text, start, done) : done;
        /* Inside blanks that the token before took: they end at `done`. */
        *ret_end = !token->rstrip ? end : done > end ? done : blanks_after(text, n_bytes, end);
        return token;
    }
    return NULL;
}
