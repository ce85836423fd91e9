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

/* One position to score: the probability of id behind the token at `position` (an index into the sequences'
 * ids; the token belongs to one of them). */
typedef struct qc_eval_target {
    int64_t position;
    int32_t id;
} qc_eval_target;

/* Token sequences, one after the other in ids: sequence i has lengths[i] >= 1 ids; each runs on its own from
 * position 0. */
typedef struct qc_sequences {
    const int32_t *ids;
    const int64_t *lengths;
    int64_t n_sequences;
    const qc_eval_target *targets; /* what is scored; NULL: all ids of each sequence but its first */
    int64_t n_targets;
    /* Sequence i may be a pack of n_parts[i] parts (model.h), which stand one after the other in parts; NULL:
     * none is. */
    const qc_part *parts;
    const int64_t *n_parts;
} qc_sequences;

/* Scores of one target, in nats; b-fields are 0 when one model is scored. */
typedef struct qc_token_score {
    float nll_a, nll_b;
    float kld; /* KL(a || b) */
    int32_t target, top_a, top_b;
} qc_token_score;

/* Sees the logits of the model (b of a pair) on their way: in slices of the vocabulary, ascending, and within
 * a slice in tiles of targets. Both functions return 0 or a QC_E_*. */
typedef struct qc_logit_tap {
    /* logits[n_targets, ld] in host memory: targets target0 .., ids vocab0 .. vocab0 + n_vocab - 1, before
     * any softcap. */
    int (*slice)(void *ctx, int64_t target0, int64_t n_targets, int64_t vocab0, int64_t n_vocab,
                 const float *logits, int64_t ld, qc_err *err);
    /* After the last slice, per target in order: ln of the sum of exp(logit) (softcap applied) of that model,
     * and its score, to which a-fields and kld may be written. */
    int (*finish)(void *ctx, int64_t target, double log_sum, qc_token_score *score, qc_err *err);
    void *ctx;
} qc_logit_tap;

typedef struct qc_reference qc_reference;               /* reference.h */
typedef struct qc_reference_writer qc_reference_writer; /* reference.h */
typedef struct qc_decider qc_decider;                   /* decide.h */

typedef struct qc_eval_options {
    uint64_t
        memory_bytes; /* cap for the whole process, 0 = none: the residual streams spill to a scratch file */
    const char *scratch_folder; /* for that file; NULL = $TMPDIR, then /tmp */
    /* Called with the share of the work that is done, 0 .. 1; NULL = none. */
    void (*progress)(void *ctx, double fraction);
    void *progress_ctx;
    qc_backend *model_backend;    /* where model b of a pair runs; NULL: where a does */
    const qc_logit_tap *tap;      /* of qc_eval_tokens; NULL = none */
    const qc_reference *stored;   /* of qc_evaluate: a reference that is not run, checked to fit; NULL */
    qc_reference_writer *storing; /* of qc_evaluate: takes the model's scores as a reference; NULL */
    qc_decider *decider;          /* of qc_evaluate, with a reference: whether to go on; NULL: all windows */
} qc_eval_options;

/* Score all targets in order. b NULL: a alone. A NaN or infinity fails with QC_E_INPUT naming model, layer
 * (or head), sequence and token. */
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

/* Which id is put in front, the BOS below: the one that the tokenizer adds, if it adds one; none; this id. */
typedef enum { QC_BOS_TOKENIZER = 0, QC_BOS_NONE, QC_BOS_ID } qc_bos;

/* How a text is cut (docs/report.md says it in full). One tokenizer call for the whole text without special
 * tokens. Windows of `length` ids, each run from position 0.
 * GPTQ: side by side, every id of a window but its first scored; the BOS id, if there is one, once in front
 * of the text; remainder dropped. LLAMA: that of llama-perplexity: the text without one newline at its end,
 * side by side, only ids length / 2 + 1 .. scored, the first id of every window replaced by the BOS id if
 * there is one; remainder dropped. FULL: windows start every `stride` ids of the text, behind a BOS id if
 * there is one; every id of the text but the first is scored exactly once, in the first
 * window that holds it; the last window is as long as what is left. */
typedef enum { QC_PROTOCOL_GPTQ = 0, QC_PROTOCOL_LLAMA, QC_PROTOCOL_FULL } qc_protocol;

/* "gptq", "llama", "full"; static. */
const char *qc_protocol_name(qc_protocol protocol);

typedef struct qc_cut_rule {
    qc_protocol protocol;
    int64_t length;     /* >= 2, LLAMA: >= 4 */
    int64_t stride;     /* FULL: 1 .. length - 1, less one if a BOS is put in front; 0 = length / 2 */
    int64_t n_windows;  /* the first ones only; 0 = as many as there are */
    bool plain_special; /* text that spells a special token is ordinary text; LLAMA: always */
    qc_bos bos;
    int32_t bos_id; /* of QC_BOS_ID, one of the tokenizer's */
} qc_cut_rule;

/* Owned: clear with qc_windows_clear. */
typedef struct qc_windows {
    qc_protocol protocol;
    int32_t *ids;     /* of window after window */
    int64_t *lengths; /* [n_windows] */
    int64_t *first;   /* [n_windows] place in the window of the first id that is scored; NULL: 1 in all */
    int64_t n_windows;
    int64_t length;     /* of the longest */
    int64_t stride;     /* 0: = length */
    int64_t n_text_ids; /* ids of the whole text, a BOS in front of it included */
    bool bos;           /* a BOS id was put in front: */
    int32_t bos_id;
    bool plain_special;  /* the text of special tokens was ordinary text */
    int64_t n_special;   /* special ids found in the text, the BOS not counted */
    char ids_sha256[65]; /* of all ids as little-endian uint32 */
    uint64_t plan_bytes; /* memory that making them took at most; 0 from qc_windows_from_text */
} qc_windows;

/* Read a text file and cut it. QC_E_INPUT as in qc_text_read, or too short for one window (FULL: for one
 * scored id); QC_E_USAGE: a rule outside its limits. Fewer windows than asked for is no error; compare
 * n_windows. */
int qc_windows_from_text(const qc_tokenizer *tok, const char *path, const qc_cut_rule *rule, qc_windows *ret,
                         qc_err *err) QC_WARN_UNUSED;

/* The same with the tokenizer of a model, which is gone again afterwards. ret->plan_bytes and memory_bytes as
 * in qc_text_plan. */
int qc_windows_of_model(const qc_source *src, const char *path, const qc_cut_rule *rule,
                        uint64_t memory_bytes, qc_windows *ret, qc_err *err) QC_WARN_UNUSED;

/* Ids that are scored in the first n_windows windows, and the ids that those have. */
int64_t qc_windows_scored(const qc_windows *windows, int64_t n_windows);
int64_t qc_windows_ids(const qc_windows *windows, int64_t n_windows);
void qc_windows_clear(qc_windows *windows);

/* Perplexity of `model`, and against `reference` (NULL: alone), run beside it, KL divergence, agreement and
 * all that qc_evaluation holds (docs/report.md). At most one of reference, options->stored and
 * options->storing. With a decider only the windows up to the decision are scored and counted. */
int qc_evaluate(qc_backend *be, const qc_model *reference, const qc_model *model, const qc_windows *windows,
                const qc_eval_options *options, qc_evaluation *ret, qc_err *err) QC_WARN_UNUSED;

/* The figures from scores of the first n_windows windows (qc_windows_scored of them); paired: a is the
 * reference, b the model, else a is the model. *ret must be initialised; on failure it may be half filled. */
int qc_summarize(const qc_token_score *scores, const qc_windows *windows, int64_t n_windows, bool paired,
                 qc_evaluation *ret, qc_err *err) QC_WARN_UNUSED;

/* Bytes of memory that the walk needs: with the residual streams in memory, and at least (streams spilled). b
 * NULL: one model. */
void qc_eval_plan_bytes(const qc_model_config *a, const qc_model_config *b, int64_t longest,
                        int64_t total_tokens, qc_compute compute, int n_threads, uint64_t *ret_full,
                        uint64_t *ret_least);

#endif
