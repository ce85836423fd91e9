/* GGUF files for llama.cpp (docs/formats/gguf.md): the format behind the table of writer.h, and its parts. */
#ifndef QC_GGUF_WRITE_H
#define QC_GGUF_WRITE_H

#include "gguf_file.h"
#include "gguf_names.h"
#include "metas.h"

/* Types of the whole output; auto: each matrix by the bits that the recipe wants of it. */
#define QC_GGUF_TYPES "auto|q4_0|q4_1|q5_0|q5_1|q8_0|q4_k|q4_k_m|q5_k|q6_k|f16|bf16|f32"

/* The format in terms of writer.h; what follows is what it is made of. */
extern const qc_writer_format qc_gguf_writer_format;

/* ---- types (gguf_types.c) ---- */

/* The functions hold and tensor_bytes of the format. */
int qc_gguf_hold(const char *type, const qc_tensor_use *use, qc_tensor_info *info, const char **ret_why,
                 qc_err *err) QC_WARN_UNUSED;
uint64_t qc_gguf_tensor_bytes(const char *type, const qc_tensor_info *info);

/* Block type of a tensor that hold approved. */
const qc_block_info *qc_gguf_block_of(const qc_tensor_info *info);

/* general.file_type of a type of the format, -1 if it has none. */
int qc_gguf_file_type(const char *type);

/* ---- metadata (gguf_meta.c) ---- */

/* What the writer itself needs of the configuration. */
typedef struct qc_gguf_model {
    const qc_gguf_arch *arch;
    int64_t head_dim, vocab;
    float *rope_freqs; /* [n_rope_freqs] divisors of Llama 3, owned; NULL: none */
    int64_t n_rope_freqs;
} qc_gguf_model;

/* Put the keys of the architecture. QC_E_UNSUPPORTED: llama.cpp does not compute such a model. */
int qc_gguf_put_model(qc_gguf_head *head, const qc_metas *metas, qc_gguf_model *ret,
                      qc_err *err) QC_WARN_UNUSED;

/* ---- tokenizer (gguf_vocab.c) ---- */

/* Texts of the side files, NULL where there is none. */
typedef struct qc_gguf_side {
    char *tokenizer, *tokenizer_config, *chat_template; /* owned by the writer, NUL-terminated */
} qc_gguf_side;

/* Put the keys of the tokenizer for a model of `vocab` ids; nothing without a tokenizer.json.
 * QC_E_UNSUPPORTED: llama.cpp has no such tokenizer. */
int qc_gguf_put_vocab(qc_gguf_head *head, const qc_gguf_side *side, const qc_metas *metas, int64_t vocab,
                      qc_err *err) QC_WARN_UNUSED;

#endif
