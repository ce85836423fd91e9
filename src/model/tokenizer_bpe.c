#include "tokenizer_internal.h"

#include "qc_alloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define METASPACE      0x2581 /* U+2581, the blank of SentencePiece */
#define METASPACE_UTF8 "\xE2\x96\x81"

/* ---- byte-level alphabet ---- */

/* Printable Latin-1 bytes stand for themselves, the other 68 for U+0100 onwards in increasing order. */
int32_t tok_byte_to_char(uint8_t byte)
{
    if (byte <= 32)
        return 0x100 + byte;
    if (byte >= 127 && byte <= 160)
        return 0x121 + (byte - 127);
    return byte == 173 ? 0x143 : byte;
}

int tok_char_to_byte(int32_t cp)
{
    if (cp >= 0x100 && cp <= 0x120)
        return cp - 0x100;
    if (cp >= 0x121 && cp <= 0x142)
        return cp - 0x121 + 127;
    if (cp == 0x143)
        return 173;
    return cp >= 0 && cp < 0x100 && tok_byte_to_char((uint8_t)cp) == cp ? cp : -1;
}

/* ---- merge table ---- */

static uint32_t pair_slot(uint64_t pair, uint32_t n_slots)
{
    return (uint32_t)((pair * 0x9E3779B97F4A7C15u) >> 32) & (n_slots - 1);
}

static tok_merge *find_merge(const tok_bpe *bpe, uint64_t pair)
{
    for (uint32_t i = pair_slot(pair, bpe->n_slots);; i = (i + 1) & (bpe->n_slots - 1))
        if (bpe->merges[i].pair == pair || bpe->merges[i].pair == TOK_NO_PAIR)
            return &bpe->merges[i];
}

static uint64_t pair_of(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

/* Both halves of a merge, given as "a b" or as ["a", "b"]. */
static bool merge_halves(const cJSON *item, const char **left, size_t *left_bytes, const char **right,
                         size_t *right_bytes)
{
    if (cJSON_IsString(item)) {
        const char *space = strchr(item->valuestring, ' ');
        if (!space || strchr(space + 1, ' '))
            return false;
        *left = item->valuestring;
        *left_bytes = (size_t)(space - *left);
        *right = space + 1;
    } else {
        const cJSON *a = cJSON_IsArray(item) ? item->child : NULL;
        const cJSON *b = a ? a->next : NULL;
        if (!cJSON_IsString(a) || !cJSON_IsString(b) || b->next)
            return false;
        *left = a->valuestring;
        *left_bytes = strlen(*left);
        *right = b->valuestring;
    }
    *right_bytes = strlen(*right);
    return true;
}

static int32_t model_id(const tok_vocab *vocab, const char *piece, size_t n_bytes)
{
    return (int32_t)qc_map_get(vocab->model, piece, n_bytes, -1);
}

static int add_merge(tok_bpe *bpe, const tok_vocab *vocab, const cJSON *item, uint32_t rank, qc_buf *joined,
                     const char *name, qc_err *err)
{
    const char *left, *right;
    size_t left_bytes, right_bytes;
    if (!merge_halves(item, &left, &left_bytes, &right, &right_bytes))
        return qc_fail(err, QC_E_INPUT, "%s: model.merges[%u]: expected \"a b\" or [\"a\", \"b\"]", name,
                       rank);
    joined->n_bytes = 0;
    QC_TRY(qc_buf_append(joined, left, left_bytes, err));
    QC_TRY(qc_buf_append(joined, right, right_bytes, err));
    int32_t l = model_id(vocab, left, left_bytes), r = model_id(vocab, right, right_bytes);
    int32_t id = model_id(vocab, joined->data, joined->n_bytes);
    if (l < 0 || r < 0 || id < 0)
        return qc_fail(err, QC_E_INPUT, "%s: model.merges[%u]: piece \"%.*s\" is not in the vocabulary", name,
                       rank,
                       (int)(l < 0   ? left_bytes
                             : r < 0 ? right_bytes
                                     : joined->n_bytes),
                       l < 0   ? left
                       : r < 0 ? right
                               : joined->data);
    tok_merge *slot = find_merge(bpe, pair_of(l, r));
    *slot =
        (tok_merge){.pair = pair_of(l, r), .rank = rank, .id = id}; /* a repeated pair: the last one counts */
    return QC_OK;
}

static int load_merges(tok_bpe *bpe, const tok_vocab *vocab, const cJSON *merges, const char *name,
                       qc_err *err)
{
    size_t n_merges = (size_t)cJSON_GetArraySize(merges);
    uint32_t n_slots = 16;
    while (n_slots / 10 * 7 < n_merges)
        n_slots *= 2;
    bpe->n_slots = n_slots;
    bpe->merges = qc_alloc(n_slots, sizeof *bpe->merges);
    if (!bpe->merges)
        return qc_fail_nomem(err, "merges", n_slots * sizeof *bpe->merges);
    for (uint32_t i = 0; i < n_slots; i++)
        bpe->merges[i].pair = TOK_NO_PAIR;
    qc_buf joined = {0};
    uint32_t rank = 0;
    int rc = QC_OK;
    for (const cJSON *m = merges ? merges->child : NULL; m && rc == QC_OK; m = m->next)
        if (!cJSON_IsString(m) || strncmp(m->valuestring, "#version", 8) != 0)
            rc = add_merge(bpe, vocab, m, rank++, &joined, name, err);
    qc_buf_clear(&joined);
    return rc;
}

/* ---- places where no merge can cross ---- */

static int compare_cp(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Add the characters that stand before a U+2581 inside the piece. */
static int note_crossings(tok_bpe *bpe, const char *piece, size_t *cap, qc_err *err)
{
    for (const char *p = piece + 1; *piece && (p = strstr(p, METASPACE_UTF8)) != NULL; p++) {
        int n;
        int32_t cp = tok_decode_char(piece + tok_previous_char(piece, (size_t)(p - piece)), &n);
        if (cp == METASPACE)
            continue;
        if (bpe->n_no_cut == *cap) {
            size_t fresh_cap = *cap * 2 + 64;
            int32_t *fresh = qc_realloc(bpe->no_cut, *cap * sizeof *fresh, fresh_cap * sizeof *fresh);
            if (!fresh)
                return qc_fail_nomem(err, "merges", fresh_cap * sizeof *fresh);
            bpe->no_cut = fresh;
            *cap = fresh_cap;
        }
        bpe->no_cut[bpe->n_no_cut++] = cp;
    }
    return QC_OK;
}

/* SentencePiece models see a whole document as one word. Two neighbouring characters c and U+2581 can only
 * end up in one piece if some merge gives a piece that holds both side by side; where none does, what lies
 * left and right of the place is independent, so it may be encoded (and remembered) word by word with the
 * same result. */
static int find_crossings(tok_bpe *bpe, const tok_vocab *vocab, qc_err *err)
{
    bpe->cut_words = !bpe->byte_level && !bpe->ignore_merges && model_id(vocab, METASPACE_UTF8, 3) >= 0;
    if (!bpe->cut_words)
        return QC_OK;
    size_t cap = 0;
    for (uint32_t i = 0; i < bpe->n_slots; i++)
        if (bpe->merges[i].pair != TOK_NO_PAIR)
            QC_TRY(note_crossings(bpe, tok_piece(vocab, bpe->merges[i].id), &cap, err));
    if (bpe->n_no_cut)
        qsort(bpe->no_cut, bpe->n_no_cut, sizeof *bpe->no_cut, compare_cp);
    size_t n = 0;
    for (size_t i = 0; i < bpe->n_no_cut; i++)
        if (n == 0 || bpe->no_cut[n - 1] != bpe->no_cut[i])
            bpe->no_cut[n++] = bpe->no_cut[i];
    bpe->n_no_cut = n;
    return QC_OK;
}

int tok_bpe_load(tok_bpe *bpe, const tok_vocab *vocab, const cJSON *merges, const char *name, qc_err *err)
{
    char piece[8];
    for (int32_t cp = 0; cp < TOK_N_LOW; cp++)
        bpe->low_id[cp] = model_id(vocab, piece, (size_t)tok_encode_char(cp, piece));
    for (int b = 0; b < 256; b++) {
        snprintf(piece, sizeof piece, "<0x%02X>", b);
        bpe->byte_id[b] = model_id(vocab, piece, 6);
    }
    QC_TRY(load_merges(bpe, vocab, merges, name, err));
    return find_crossings(bpe, vocab, err);
}

void tok_bpe_clear(tok_bpe *bpe)
{
    qc_free(bpe->merges);
    qc_free(bpe->no_cut);
}

/* ---- one word ---- */

static int32_t char_id(const tok_run *run, const char *p, int n_bytes, int32_t cp)
{
    const tok_bpe *bpe = &run->tok->bpe;
    return cp < TOK_N_LOW ? bpe->low_id[cp] : model_id(&run->tok->vocab, p, (size_t)n_bytes);
}

static bool all_bytes_known(const tok_bpe *bpe, const char *p, int n_bytes)
{
    for (int i = 0; i < n_bytes; i++)
        if (bpe->byte_id[(uint8_t)p[i]] < 0)
            return false;
    return true;
}

/* Grow *array (content not kept) to n elements of elem_bytes. */
static int scratch(void **array, size_t *cap, size_t n, size_t elem_bytes, qc_err *err)
{
    if (n <= *cap)
        return QC_OK;
    size_t fresh_cap = n < 256 ? 256 : n + n / 2;
    void *fresh = qc_alloc(fresh_cap, elem_bytes);
    if (!fresh)
        return qc_fail_nomem(err, "tokenizer", fresh_cap * elem_bytes);
    qc_free(*array);
    *array = fresh;
    *cap = fresh_cap;
    return QC_OK;
}

static void add_symbol(tok_run *run, int32_t *n, int32_t id)
{
    run->symbols[*n] = (tok_symbol){.id = id, .prev = *n - 1, .next = *n + 1};
    ++*n;
}

/* Symbols of the characters of a word (no more than it has bytes). An unknown character waits until the next
 * known one, so that byte pieces between overtake it: the reference library has that order. */
static int make_symbols(tok_run *run, const char *word, size_t n_bytes, int32_t *ret_n)
{
    const tok_bpe *bpe = &run->tok->bpe;
    int32_t n = 0;
    bool unk = false;
    QC_TRY(scratch((void **)&run->symbols, &run->cap_symbols, n_bytes, sizeof *run->symbols, run->err));
    for (size_t i = 0; i < n_bytes;) {
        int len;
        int32_t cp = tok_decode_char(word + i, &len);
        int32_t id = char_id(run, word + i, len, cp);
        if (id >= 0) {
            if (unk)
                add_symbol(run, &n, bpe->unk_id);
            unk = false;
            add_symbol(run, &n, id);
        } else if (bpe->byte_fallback && all_bytes_known(bpe, word + i, len)) {
            for (int k = 0; k < len; k++)
                add_symbol(run, &n, bpe->byte_id[(uint8_t)word[i + (size_t)k]]);
        } else if (bpe->unk_id == TOK_UNK_MISSING) {
            return qc_fail(run->err, QC_E_INPUT,
                           "%s: the text has a character outside the vocabulary (U+%04X) and unk_token "
                           "is no piece of the vocabulary",
                           run->tok->name, (unsigned)cp);
        } else if (bpe->unk_id != TOK_UNK_NONE) {
            if (unk && !bpe->fuse_unk)
                add_symbol(run, &n, bpe->unk_id);
            unk = true;
        }
        i += (size_t)len;
    }
    if (unk)
        add_symbol(run, &n, bpe->unk_id);
    if (n > 0)
        run->symbols[n - 1].next = -1;
    *ret_n = n;
    run->n_steps += (uint64_t)n;
    return QC_OK;
}

static void sift_down(uint64_t *heap, size_t n, size_t i)
{
    uint64_t v = heap[i];
    for (size_t c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && heap[c + 1] < heap[c])
            c++;
        if (heap[c] >= v)
            break;
        heap[i] = heap[c];
    }
    heap[i] = v;
}

static void heap_push(uint64_t *heap, size_t *n, uint64_t v)
{
    size_t i = (*n)++;
    for (; i > 0 && heap[(i - 1) / 2] > v; i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = v;
}

/* Look up the merge of symbol i with its right neighbour; true if there is one. */
static bool find_pair(tok_run *run, int32_t i)
{
    tok_symbol *s = &run->symbols[i];
    s->pair_rank = UINT32_MAX;
    if (s->next < 0)
        return false;
    const tok_merge *m = find_merge(&run->tok->bpe, pair_of(s->id, run->symbols[s->next].id));
    if (m->pair == TOK_NO_PAIR)
        return false;
    s->pair_rank = m->rank;
    s->pair_id = m->id;
    return true;
}

/* Join symbol i with its right neighbour, which is marked as gone. */
static void join(tok_symbol *symbols, int32_t i)
{
    tok_symbol *s = &symbols[i];
    tok_symbol *gone = &symbols[s->next];
    s->id = s->pair_id;
    s->next = gone->next;
    gone->pair_rank = UINT32_MAX;
    if (s->next >= 0)
        symbols[s->next].prev = i;
}

/* Always the merge of the lowest rank, the leftmost of equals. The heap holds rank << 32 | position; an entry
 * whose rank is no longer that of its position is out of date. At most n + 2 * n entries are ever made. */
static int merge_symbols(tok_run *run, int32_t n)
{
    QC_TRY(scratch((void **)&run->heap, &run->cap_heap, (size_t)n * 2, sizeof *run->heap, run->err));
    uint64_t *heap = run->heap;
    size_t n_heap = 0;
    for (int32_t i = 0; i < n; i++)
        if (find_pair(run, i))
            heap[n_heap++] = (uint64_t)run->symbols[i].pair_rank << 32 | (uint32_t)i;
    for (size_t i = n_heap / 2; i-- > 0;)
        sift_down(heap, n_heap, i);
    while (n_heap > 0) {
        uint64_t top = heap[0];
        heap[0] = heap[--n_heap];
        sift_down(heap, n_heap, 0);
        run->n_steps++;
        int32_t i = (int32_t)(uint32_t)top;
        if (run->symbols[i].pair_rank != top >> 32)
            continue;
        join(run->symbols, i);
        if (find_pair(run, i))
            heap_push(heap, &n_heap, (uint64_t)run->symbols[i].pair_rank << 32 | (uint32_t)i);
        int32_t prev = run->symbols[i].prev;
        if (prev >= 0 && find_pair(run, prev))
            heap_push(heap, &n_heap, (uint64_t)run->symbols[prev].pair_rank << 32 | (uint32_t)prev);
    }
    return QC_OK;
}

static int map_bytes(tok_run *run, const char *word, size_t n_bytes)
{
    run->mapped.n_bytes = 0;
    for (size_t i = 0; i < n_bytes; i++) {
        char utf8[4];
        int n = tok_encode_char(tok_byte_to_char((uint8_t)word[i]), utf8);
        QC_TRY(qc_buf_append(&run->mapped, utf8, (size_t)n, run->err));
    }
    return QC_OK;
}

static int encode_word(tok_run *run, const char *word, size_t n_bytes)
{
    const tok_bpe *bpe = &run->tok->bpe;
    if (bpe->byte_level) {
        QC_TRY(map_bytes(run, word, n_bytes));
        word = run->mapped.data;
        n_bytes = run->mapped.n_bytes;
    }
    if (bpe->ignore_merges) {
        int32_t id = model_id(&run->tok->vocab, word, n_bytes);
        if (id >= 0)
            return tok_run_push(run, &id, 1);
    }
    int32_t n;
    QC_TRY(make_symbols(run, word, n_bytes, &n));
    if (n == 0)
        return QC_OK;
    QC_TRY(merge_symbols(run, n));
    for (int32_t i = 0; i >= 0; i = run->symbols[i].next)
        QC_TRY(tok_run_push(run, &run->symbols[i].id, 1));
    return QC_OK;
}

/* ---- words seen before ---- */

static uint32_t hash_word(const char *s, size_t n_bytes)
{
    uint64_t h = 0x9E3779B97F4A7C15u ^ n_bytes;
    for (; n_bytes >= 8; s += 8, n_bytes -= 8) {
        uint64_t w;
        memcpy(&w, s, 8);
        h = (h ^ w) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
    }
    uint64_t w = 0;
    memcpy(&w, s, n_bytes);
    h = (h ^ w) * 0xD6E8FEB86659FD93u;
    return (uint32_t)(h >> 32);
}

static int remembered_word(tok_run *run, const char *word, size_t n_bytes)
{
    if (n_bytes > sizeof run->cache->word || run->n_cached == 0)
        return encode_word(run, word, n_bytes);
    uint32_t hash = hash_word(word, n_bytes);
    tok_cached *slot = &run->cache[hash & (run->n_cached - 1)];
    if (slot->n_bytes == n_bytes && slot->hash == hash && memcmp(slot->word, word, n_bytes) == 0)
        return tok_run_push(run, slot->ids, slot->n_ids);
    int64_t start = run->n_ids;
    QC_TRY(encode_word(run, word, n_bytes));
    int64_t n_ids = run->n_ids - start;
    if (n_ids <= (int64_t)(sizeof slot->ids / sizeof *slot->ids)) {
        slot->hash = hash;
        slot->n_bytes = (uint8_t)n_bytes;
        slot->n_ids = (uint8_t)n_ids;
        memcpy(slot->word, word, n_bytes);
        for (int64_t i = 0; i < n_ids; i++)
            slot->ids[i] = run->ids[start + i];
    }
    return QC_OK;
}

/* Can no merge span the place between the character that ends at `at` and the U+2581 there? */
static bool may_cut(const tok_run *run, const char *word, size_t at)
{
    const tok_bpe *bpe = &run->tok->bpe;
    size_t start = tok_previous_char(word, at);
    int n;
    int32_t cp = tok_decode_char(word + start, &n);
    if (cp == METASPACE || char_id(run, word + start, n, cp) < 0)
        return false;
    return !bpe->n_no_cut || !bsearch(&cp, bpe->no_cut, bpe->n_no_cut, sizeof cp, compare_cp);
}

int tok_bpe_word(tok_run *run, const char *word, size_t n_bytes)
{
    if (!run->tok->bpe.cut_words)
        return remembered_word(run, word, n_bytes);
    size_t start = 0;
    for (size_t at = 1; at < n_bytes;) {
        const char *p = memmem(word + at, n_bytes - at, METASPACE_UTF8, 3);
        if (!p)
            break;
        at = (size_t)(p - word);
        if (may_cut(run, word, at)) {
            QC_TRY(remembered_word(run, word + start, at - start));
            start = at;
        }
        at += 3;
    }
    return remembered_word(run, word + start, n_bytes - start);
}
