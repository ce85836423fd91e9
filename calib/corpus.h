/* Calibration corpus: a text, chat or token file cut into windows of equal length. */
#ifndef QC_CORPUS_H
#define QC_CORPUS_H

#include "eval.h"
#include "qc_err.h"
#include "qc_result.h"
#include "qc_source.h"

#include <stdbool.h>
#include <stdint.h>

/* Where windows are taken from the stream of all tokens. */
typedef enum {
    QC_SAMPLE_EVEN =
        0, /* window i starts at floor(i * (n_tokens - length) / max(1, n - 1)): no seed, covers the text */
    QC_SAMPLE_RANDOM /* seeded, one window in each of n equal parts of the text */
} qc_sample;

/* What a document of a .txt file is. */
typedef enum { QC_DOCUMENTS_WHOLE = 0, QC_DOCUMENTS_BLANK_LINE } qc_documents;

typedef struct qc_corpus_options {
    int64_t windows; /* wanted */
    int64_t length;  /* tokens per window; 0 = min(2048, max_positions) */
    qc_sample sample;
    int64_t seed;
    qc_documents documents;
    bool plain_special;    /* text that spells a special token is ordinary text */
    int64_t max_positions; /* of the model */
    uint64_t memory_bytes; /* cap for making it, 0 = none */
} qc_corpus_options;

/* Owned: clear with qc_corpus_clear. */
typedef struct qc_corpus {
    int32_t *ids;      /* [n_windows * length] */
    int64_t n_windows; /* may be fewer than wanted where the text is short: compare */
    int64_t length;
    int64_t n_text_ids;  /* tokens of the whole corpus */
    int64_t n_documents; /* 1 for a whole text */
    char ids_sha256[65]; /* of ids as little-endian uint32 */
} qc_corpus;

/* Read PATH with the tokenizer of the model: .jsonl (per line an object with `text`, or `messages` rendered
 * with the model's chat template where it is one of those known), .npy (token ids as int32, int64, uint16 or
 * uint32, [n], or [n, length]: rows are windows), anything else as UTF-8 text (windows mostly begin
 * mid-document). Each document starts with the BOS id if the tokenizer adds one. Events: `corpus` notes
 * (fewer windows than wanted, conversations left out). QC_E_USAGE: a length that the model or the file does
 * not allow; QC_E_INPUT: unreadable, not UTF-8, ids outside the vocabulary, no whole window;
 * QC_E_UNSUPPORTED: messages for a chat template that is not known, elements of another type. */
int qc_corpus_load(const qc_source *src, const char *path, const qc_corpus_options *options, int64_t vocab,
                   qc_event_list *events, qc_corpus *ret, qc_err *err) QC_WARN_UNUSED;
void qc_corpus_clear(qc_corpus *corpus);

/* Notes of kind `calibration_rank`: fewer tokens than twice the widest input of a matrix (H is then far from
 * full rank and damping does the rest), or all tokens equal. */
int qc_corpus_check(const qc_corpus *corpus, const qc_model_config *config, const char *name,
                    qc_event_list *events, qc_err *err) QC_WARN_UNUSED;

/* Perplexity of a model on the first windows (as many as 2,048 tokens hold, at least one): a look at whether
 * checkpoint, config, tokenizer and text belong together before hours are spent on them. Above `limit` (0 =
 * none) an event `calibration_perplexity` with the corpus' `name` says so. */
int qc_corpus_perplexity(const qc_corpus *corpus, const qc_model *model, qc_backend *be,
                         const qc_eval_options *options, double limit, const char *name,
                         qc_event_list *events, double *ret_ppl, int64_t *ret_windows,
                         qc_err *err) QC_WARN_UNUSED;
/* How many windows it takes: the first ones. */
int64_t qc_corpus_perplexity_windows(const qc_corpus *corpus);

/* Windows and length by name: "quick" 16 x 512, "standard" 128 x 2048, "thorough" 256 x 2048. A model that
 * takes fewer positions needs a shorter length. */
bool qc_corpus_preset(const char *name, int64_t *ret_windows, int64_t *ret_length);

#endif
