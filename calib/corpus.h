/* Calibration corpus: a text, chat or token file cut into windows of equal length. */
#ifndef QC_CORPUS_H
#define QC_CORPUS_H

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

/* Read PATH with the tokenizer of the model: .txt (UTF-8, whole; windows mostly begin mid-document), .jsonl
 * (an object with `text`, or `messages` rendered with the model's chat template where it is one of those
 * known, per line), .npy (int32 or int64 token ids, [n] or [n, length]). Events: `corpus` notes (fewer
 * windows than wanted, documents left out). QC_E_INPUT: unreadable, not UTF-8, ids outside the vocabulary, no
 * whole window; QC_E_UNSUPPORTED: messages for a chat template that is not known. */
int qc_corpus_load(const qc_source *src, const char *path, const qc_corpus_options *options, int64_t vocab,
                   qc_event_list *events, qc_corpus *ret, qc_err *err) QC_WARN_UNUSED;
void qc_corpus_clear(qc_corpus *corpus);

#endif
