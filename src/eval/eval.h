/* Evaluation: one walk over the layers for one model or for a reference and a model side by side (design:
 * paired evaluation). The layers' weights stream; what stays in memory is one residual stream per model, or a
 * scratch file when a memory cap asks for it. Logits exist only as slices of the vocabulary for a tile of
 * tokens: KL divergence is exact and no logits are stored. */
#ifndef QC_EVAL_H
#define QC_EVAL_H

#include "backend.h"
#include "model.h"
#include "qc_result.h"
#include "tokenizer.h"

#include <stdint.h>

typedef struct qc_eval_options {
    uint64_t
        memory_bytes; /* cap for the whole process, 0 = none: the residual streams spill to a scratch file */
    const char *scratch_folder; /* for that file; NULL = $TMPDIR, then /tmp */
    /* Called with the share of the work that is done, 0 .. 1; NULL = none. */
    void (*progress)(void *ctx, double fraction);
    void *progress_ctx;
} qc_eval_options;

/* Token sequences to score, one after the other in ids: sequence i has lengths[i] >= 1 ids; each runs on its
 * own from position 0 and its ids 1 .. are scored. */
typedef struct qc_sequences {
    const int32_t *ids;
    const int64_t *lengths;
    int64_t n_sequences;
} qc_sequences;

/* Scores of one scored position, in nats; b-fields are 0 when one model is scored. */
typedef struct qc_token_score {
    float nll_a, nll_b;
    float kld; /* KL(a || b) */
    int32_t top_a, top_b;
} qc_token_score;

/* Score all sequences. b NULL: a alone. Results go to ret[total - n_sequences], sequence after sequence. A
 * NaN or infinity fails with QC_E_INPUT naming model, layer (or head), sequence and token. */
int qc_eval_tokens(qc_backend *be, const qc_model *a, const qc_model *b, const qc_sequences *seqs,
                   const qc_eval_options *options, qc_token_score *ret, qc_err *err) QC_WARN_UNUSED;

/* A text file (UTF-8, at most 4 GiB), owned (qc_free) and NUL-terminated. QC_E_INPUT: unreadable, empty, not
 * UTF-8 (byte offset). */
int qc_text_read(const char *path, char **ret_text, size_t *ret_bytes, qc_err *err) QC_WARN_UNUSED;

/* Memory that the tokenizer of a model and the ids of a text take at most: measured on the tokenizers of five
 * families (at most 7.5 times their file) and on a text that is one word (8.7 times the text). QC_E_RESOURCE
 * if it is more than memory_bytes, the cap (0 = none). */
int qc_text_plan(const qc_source *src, const char *path, uint64_t memory_bytes, uint64_t *ret,
                 qc_err *err) QC_WARN_UNUSED;

/* SHA-256 of ids as little-endian uint32. */
int qc_ids_sha256(const int32_t *ids, int64_t n_ids, char ret_hex[65], qc_err *err) QC_WARN_UNUSED;

/* Text cut to windows by the "gptq" protocol (docs/report.md): one tokenizer call for the whole text without
 * special tokens, the BOS id once in front if the tokenizer adds one, non-overlapping windows from the start,
 * remainder dropped. Owned: clear with qc_windows_clear. */
typedef struct qc_windows {
    int32_t *ids;     /* [n_windows * length] */
    int64_t *lengths; /* [n_windows], all equal to length */
    int64_t n_windows;
    int64_t length;
    int64_t n_text_ids;  /* ids of the whole text */
    bool bos;            /* a BOS id was put in front */
    bool plain_special;  /* the text of special tokens was ordinary text */
    int64_t n_special;   /* special ids found in the text, the BOS not counted */
    char ids_sha256[65]; /* of ids[n_windows * length] as little-endian uint32 */
    uint64_t plan_bytes; /* memory that making them took at most; 0 from qc_windows_from_text */
} qc_windows;

/* Read a text file and cut its first n_windows windows (0 = as many as there are). QC_E_INPUT as in
 * qc_text_read, or shorter than one window. Fewer windows than
 * asked for is no error; compare n_windows. Text that spells a special token becomes that token unless
 * plain_special. */
int qc_windows_from_text(const qc_tokenizer *tok, const char *path, int64_t length, int64_t n_windows,
                         bool plain_special, qc_windows *ret, qc_err *err) QC_WARN_UNUSED;

/* The same with the tokenizer of a model, which is gone again afterwards. ret->plan_bytes and memory_bytes as
 * in qc_text_plan. */
int qc_windows_of_model(const qc_source *src, const char *path, int64_t length, int64_t n_windows,
                        bool plain_special, uint64_t memory_bytes, qc_windows *ret,
                        qc_err *err) QC_WARN_UNUSED;
void qc_windows_clear(qc_windows *windows);

/* Perplexity of `model`, and against `reference` (NULL: alone) KL divergence, top-1 agreement and delta NLL
 * with the larger of the token-wise and the window-clustered standard error (docs/report.md). */
int qc_evaluate(qc_backend *be, const qc_model *reference, const qc_model *model, const qc_windows *windows,
                const qc_eval_options *options, qc_evaluation *ret, qc_err *err) QC_WARN_UNUSED;

/* Bytes of memory that the walk needs: with the residual streams in memory, and at least (streams spilled). b
 * NULL: one model. */
void qc_eval_plan_bytes(const qc_model_config *a, const qc_model_config *b, int64_t longest,
                        int64_t total_tokens, uint64_t *ret_full, uint64_t *ret_least);

#endif
