/* Parts of the tokenizer. Text runs through them in this order: added tokens are cut out of the raw text
 * (tokenizer_added.c), the pieces between are normalised (tokenizer_norm.c), added tokens of the normalised
 * kind are cut out, the rest is split into words (tokenizer_split.c), and each word becomes ids
 * (tokenizer_bpe.c).
 *
 * A tokenizer is constant once loaded; all state of one encode call lives in a tok_run. Texts inside are
 * valid UTF-8 of less than 2^31 bytes. */
#ifndef QC_TOKENIZER_INTERNAL_H
#define QC_TOKENIZER_INTERNAL_H

#define PCRE2_CODE_UNIT_WIDTH 8

#include "qc_buf.h"
#include "qc_map.h"
#include "tokenizer.h"
#include "tokenizer_unicode.h"

#include <cjson/cJSON.h>
#include <pcre2.h>

#define TOK_MAX_ID          ((1 << 24) - 1) /* bounds the tables that a hostile file can make us allocate */
#define TOK_MAX_ADDED_BYTES 1024            /* of one added token: bounds the work per byte of text */
#define TOK_HOLE            UINT32_MAX

typedef struct tok_run tok_run;

/* ---- pieces and ids ---- */

enum { TOK_ADDED = 1, TOK_SPECIAL = 2 };

typedef struct tok_vocab {
    int32_t n_ids;    /* largest id + 1 */
    char *pool;       /* all pieces, NUL-terminated */
    uint32_t *offset; /* [n_ids] of the piece in pool, TOK_HOLE for an id without one */
    uint8_t *flags;   /* [n_ids] TOK_ADDED | TOK_SPECIAL */
    qc_map *model;    /* pieces of the model -> id */
    qc_map *added;    /* added tokens -> id */
} tok_vocab;

const char *tok_piece(const tok_vocab *vocab, int32_t id);

/* ---- BPE model ---- */

typedef struct tok_merge {
    uint64_t pair; /* left id << 32 | right id; TOK_NO_PAIR = free slot */
    uint32_t rank; /* lower merges first */
    int32_t id;    /* of the joined piece */
} tok_merge;

#define TOK_UNK_NONE    (-1) /* no unk_token: unknown characters are dropped */
#define TOK_UNK_MISSING (-2) /* the unk_token is not in the vocabulary: unknown characters are an error */
#define TOK_NO_PAIR     UINT64_MAX
#define TOK_N_LOW       0x180 /* covers the byte-level alphabet (up to U+0143) */

typedef struct tok_bpe {
    tok_merge *merges;         /* open addressing */
    uint32_t n_slots;          /* power of two */
    int32_t low_id[TOK_N_LOW]; /* id of the piece that is this one character, -1 = none */
    int32_t byte_id[256];      /* byte fallback pieces <0x00>..<0xFF>, -1 = none */
    int32_t unk_id;            /* or one of the TOK_UNK_ values */
    bool fuse_unk, byte_fallback, ignore_merges;
    bool byte_level; /* bytes of a word are mapped to the byte-level alphabet first */
    /* U+2581 starts a new word where no merge can span the place (tokenizer_bpe.c): characters after which
     * one can, sorted. Only if cut_words. */
    bool cut_words;
    int32_t *no_cut;
    size_t n_no_cut;
} tok_bpe;

/* Find the merges (an array of "a b" or ["a", "b"]) and fill the tables of characters and bytes. */
int tok_bpe_load(tok_bpe *bpe, const tok_vocab *vocab, const cJSON *merges, const char *name,
                 qc_err *err) QC_WARN_UNUSED;
void tok_bpe_clear(tok_bpe *bpe);

/* Ids of one word of the split appended to the run. */
int tok_bpe_word(tok_run *run, const char *word, size_t n_bytes) QC_WARN_UNUSED;

/* Character that stands for a byte in the byte-level alphabet, and back (-1: none). */
int32_t tok_byte_to_char(uint8_t byte);
int tok_char_to_byte(int32_t cp);

/* ---- regular expressions ---- */

/* Compile a pattern of a tokenizer file; QC_E_UNSUPPORTED for constructs that PCRE2 reads differently from
 * the library the file was made for. literal: the pattern is plain text. */
int tok_regex_new(const char *pattern, bool literal, const char *name, pcre2_code **ret,
                  qc_err *err) QC_WARN_UNUSED;

/* First match at or after `from`: 1 and its range (not empty), 0 if there is none, QC_E_RESOURCE if the
 * pattern needs too much work. */
int tok_regex_find(tok_run *run, const pcre2_code *code, const char *subject, size_t n_bytes, size_t from,
                   size_t *ret_start, size_t *ret_end) QC_WARN_UNUSED;

/* Text to match for `text`: itself, or a copy in *copy where characters have their stand-ins. */
int tok_regex_subject(const char *text, size_t n_bytes, qc_buf *copy, const char **ret,
                      qc_err *err) QC_WARN_UNUSED;

/* ---- normaliser ---- */

typedef enum tok_norm_kind {
    TOK_NORM_NFC, /* the four forms in the order of tok_form */
    TOK_NORM_NFD,
    TOK_NORM_NFKC,
    TOK_NORM_NFKD,
    TOK_NORM_LOWERCASE,
    TOK_NORM_STRIP,
    TOK_NORM_PREPEND,
    TOK_NORM_REPLACE
} tok_norm_kind;

typedef struct tok_norm {
    tok_norm_kind kind;
    bool left, right; /* strip */
    char *content;    /* prepend, replace: new text */
    char *pattern;    /* replace: literal text, NULL if it is a regex */
    pcre2_code *regex;
} tok_norm;

/* Apply all normalisers; *ret points to the text itself or into a buffer of the run (valid until the next
 * call). */
int tok_normalise(tok_run *run, const char *text, size_t n_bytes, const char **ret,
                  size_t *ret_bytes) QC_WARN_UNUSED;

/* ---- pre-tokenizer ---- */

typedef enum tok_split_kind {
    TOK_SPLIT_REGEX,
    TOK_SPLIT_DIGITS,
    TOK_SPLIT_METASPACE,
    TOK_SPLIT_PREFIX_SPACE
} tok_split_kind;

typedef enum tok_behavior {
    TOK_REMOVED,
    TOK_ISOLATED,
    TOK_MERGED_WITH_PREVIOUS,
    TOK_MERGED_WITH_NEXT,
    TOK_CONTIGUOUS
} tok_behavior;

typedef enum tok_prepend { TOK_PREPEND_ALWAYS, TOK_PREPEND_FIRST, TOK_PREPEND_NEVER } tok_prepend;

typedef struct tok_split {
    tok_split_kind kind;
    tok_behavior behavior; /* regex, digits */
    bool invert;
    pcre2_code *regex;
    char replacement[5]; /* metaspace: one character */
    tok_prepend prepend;
    bool split;
} tok_split;

/* Split one piece into words and hand each to the model. first: the piece starts at offset 0 of the whole
 * text. */
int tok_split_piece(tok_run *run, const char *text, size_t n_bytes, bool first) QC_WARN_UNUSED;

/* ---- added tokens ---- */

typedef struct tok_added {
    char *text; /* what is looked for (normalised for tokens of that kind); owned */
    size_t n_bytes;
    int32_t id;
    bool single_word, lstrip, rstrip, special;
} tok_added;

typedef struct tok_matcher {
    tok_added *tokens; /* sorted by text */
    size_t n_tokens;
    uint32_t first[257]; /* tokens that start with byte b: first[b] .. first[b + 1] - 1 */
} tok_matcher;

/* Sort the tokens and index them. */
void tok_matcher_build(tok_matcher *matcher);
void tok_matcher_clear(tok_matcher *matcher);

/* Next token at or after *from in leftmost-longest order: its range with stripped blanks, NULL if there is
 * none. *from moves behind the token's own text; done = end of what earlier matches took. A token that stands
 * in blanks which the one before took, and takes blanks on its left itself, has an empty range and counts for
 * nothing. */
const tok_added *tok_matcher_next(const tok_matcher *matcher, const char *text, size_t n_bytes,
                                  bool plain_special, size_t done, size_t *from, size_t *ret_start,
                                  size_t *ret_end);

/* ---- decoder ---- */

typedef enum tok_decoder_kind {
    TOK_DEC_BYTE_LEVEL,
    TOK_DEC_BYTE_FALLBACK,
    TOK_DEC_FUSE,
    TOK_DEC_REPLACE,
    TOK_DEC_STRIP,
    TOK_DEC_METASPACE
} tok_decoder_kind;

typedef struct tok_decoder {
    tok_decoder_kind kind;
    char *pattern;       /* replace: literal text; strip, metaspace: one character; owned */
    char *content;       /* replace; owned */
    int32_t start, stop; /* strip: most characters to take off */
    bool prepend;        /* metaspace: the first blank was put there by the pre-tokenizer */
} tok_decoder;

/* ---- the whole ---- */

typedef struct tok_ids {
    int32_t *ids;
    int64_t n;
} tok_ids;

struct qc_tokenizer {
    char *name; /* for messages */
    tok_vocab vocab;
    tok_bpe bpe;
    tok_matcher raw, normalised; /* added tokens looked for before and after normalising */
    tok_norm *norms;
    size_t n_norms;
    tok_split *splits;
    size_t n_splits;
    tok_decoder *decoders;
    size_t n_decoders;
    tok_ids prefix, suffix; /* of the post-processor and tokenizer_config */
};

/* Fill an empty tokenizer from a parsed tokenizer.json (tokenizer_load.c, tokenizer_parts.c). */
int tok_load(qc_tokenizer *tok, const cJSON *doc, qc_err *err) QC_WARN_UNUSED;
int tok_load_normalizer(qc_tokenizer *tok, const cJSON *item, qc_err *err) QC_WARN_UNUSED;
int tok_load_pre_tokenizer(qc_tokenizer *tok, const cJSON *item, qc_err *err) QC_WARN_UNUSED;
int tok_load_post_processor(qc_tokenizer *tok, const cJSON *item, qc_err *err) QC_WARN_UNUSED;
int tok_load_decoder(qc_tokenizer *tok, const cJSON *item, qc_err *err) QC_WARN_UNUSED;

/* Optional boolean / required string member of an object; `where` starts the message. */
int tok_get_bool(const cJSON *object, const char *key, bool absent, const char *where, bool *ret,
                 qc_err *err) QC_WARN_UNUSED;
int tok_get_string(const cJSON *object, const char *key, const char *where, const char **ret,
                   qc_err *err) QC_WARN_UNUSED;

/* Insert n ids at position `at` of a list. */
int tok_ids_insert(tok_ids *list, int64_t at, const int32_t *ids, int64_t n, qc_err *err) QC_WARN_UNUSED;

/* Symbol of a word while it is merged. */
typedef struct tok_symbol {
    int32_t id;
    int32_t prev, next; /* neighbours, -1 = none */
    uint32_t pair_rank; /* of the merge with next, UINT32_MAX = none */
    int32_t pair_id;    /* what that merge gives */
} tok_symbol;

/* One remembered word. */
typedef struct tok_cached {
    uint32_t hash;
    uint8_t n_bytes; /* 0 = empty */
    uint8_t n_ids;
    char word[26];
    int32_t ids[8];
} tok_cached;

struct tok_run {
    const qc_tokenizer *tok;
    qc_err *err;
    int32_t *ids; /* result */
    int64_t n_ids, cap_ids;
    qc_buf norm[2]; /* text before and after a normaliser */
    qc_buf *pieces; /* [n_splits] texts changed by pre-tokenizers, or copies for matching */
    qc_buf subject; /* copy for matching of a normaliser */
    qc_buf mapped;  /* word in the byte-level alphabet */
    tok_symbol *symbols;
    size_t cap_symbols;
    uint64_t *heap;
    size_t cap_heap;
    tok_cached *cache;
    uint32_t n_cached; /* slots, power of two */
    pcre2_match_data *match;
    pcre2_match_context *match_context;
    pcre2_jit_stack *jit_stack;
    uint64_t n_steps; /* merges tried and symbols made: work, for tests */
};

int tok_run_begin(tok_run *run, const qc_tokenizer *tok, size_t n_bytes, qc_err *err) QC_WARN_UNUSED;
void tok_run_end(tok_run *run);
int tok_run_text(tok_run *run, const char *text, size_t n_bytes, bool plain_special) QC_WARN_UNUSED;
int tok_run_push(tok_run *run, const int32_t *ids, int64_t n) QC_WARN_UNUSED;

#endif
