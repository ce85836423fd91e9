/* Tokenizer: text to token ids exactly as a Hugging Face tokenizer.json says (BPE: byte-level, and
 * SentencePiece style with byte fallback). An unknown normalizer, pre-tokenizer, model or post-processor
 * piece is refused by name: never an approximate id. */
#ifndef QC_TOKENIZER_H
#define QC_TOKENIZER_H

#include "qc_err.h"
#include "qc_source.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qc_tokenizer qc_tokenizer;

/* Parse a tokenizer.json text (n_bytes, borrowed during the call; `name` for messages). QC_E_INPUT: broken
 * file; QC_E_UNSUPPORTED: a piece that is not implemented. Free with qc_tokenizer_free. */
int qc_tokenizer_new(const char *json, size_t n_bytes, const char *name, qc_tokenizer **ret,
                     qc_err *err) QC_WARN_UNUSED;

/* Take add_bos_token / add_eos_token (and the tokens they name) from a tokenizer_config.json text: encoding
 * with special tokens then adds them where the post-processor of tokenizer.json does not. */
int qc_tokenizer_apply_config(qc_tokenizer *tok, const char *json, size_t n_bytes, const char *name,
                              qc_err *err) QC_WARN_UNUSED;

/* Tokenizer of a model: its tokenizer.json and tokenizer_config.json side files. QC_E_INPUT if it has none.
 */
int qc_tokenizer_from_source(const qc_source *src, qc_tokenizer **ret, qc_err *err) QC_WARN_UNUSED;

/* NULL is fine. */
void qc_tokenizer_free(qc_tokenizer *tok);

typedef struct qc_encode_options {
    bool add_special; /* add what the post-processor (and tokenizer_config) adds: BOS, EOS */
    bool
        plain_special; /* treat the text of special tokens as ordinary text (default: it becomes the token) */
} qc_encode_options;

/* Ids of n_bytes of UTF-8 text (NUL bytes allowed), owned by the caller (qc_free). Linear in the text's
 * length up to a logarithm. Invalid UTF-8 is QC_E_INPUT with the byte offset. Thread-safe. options NULL: all
 * false. */
int qc_tokenizer_encode(const qc_tokenizer *tok, const char *text, size_t n_bytes,
                        const qc_encode_options *options, int32_t **ret_ids, int64_t *ret_n_ids,
                        qc_err *err) QC_WARN_UNUSED;

/* Text of ids, owned (qc_free), NUL-terminated; bytes that form no UTF-8 become U+FFFD. QC_E_INPUT: id out of
 * range. */
int qc_tokenizer_decode(const qc_tokenizer *tok, const int32_t *ids, int64_t n_ids, bool skip_special,
                        char **ret_text, size_t *ret_bytes, qc_err *err) QC_WARN_UNUSED;

/* Number of ids = largest id + 1 (holes included). */
int64_t qc_tokenizer_vocab_size(const qc_tokenizer *tok);

/* Text of one id as stored (byte-level alphabet), NULL for a hole; belongs to the tokenizer. */
const char *qc_tokenizer_piece(const qc_tokenizer *tok, int32_t id);

/* Id of an exact added or vocabulary token, -1 if there is none. */
int32_t qc_tokenizer_token_id(const qc_tokenizer *tok, const char *piece);

/* Is the id an added token flagged special? */
bool qc_tokenizer_is_special(const qc_tokenizer *tok, int32_t id);

/* Ids that encoding with add_special puts in front / behind (-1 = none). */
int32_t qc_tokenizer_bos(const qc_tokenizer *tok);
int32_t qc_tokenizer_eos(const qc_tokenizer *tok);

#endif
