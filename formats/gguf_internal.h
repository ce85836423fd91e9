/* Shared by the parts of the GGUF reader. */
#ifndef QC_GGUF_INTERNAL_H
#define QC_GGUF_INTERNAL_H

#include "gguf_file.h"
#include "gguf_names.h"

/* What the reader needs of the model's shape. */
typedef struct qc_gguf_shape {
    const qc_gguf_arch *arch;
    int64_t n_heads, n_kv_heads, head_dim;
} qc_gguf_shape;

/* Look at architecture, heads and whatever would change the result. */
int qc_gguf_read_shape(const qc_gguf_file *file, qc_gguf_shape *ret, qc_err *err) QC_WARN_UNUSED;

/* Text of a side file made from the metadata, owned; *ret = NULL if there is nothing to make it from. */
int qc_gguf_make_config(const qc_gguf_file *file, const qc_gguf_shape *shape, char **ret,
                        qc_err *err) QC_WARN_UNUSED;
int qc_gguf_make_generation_config(const qc_gguf_file *file, char **ret, qc_err *err) QC_WARN_UNUSED;
int qc_gguf_make_tokenizer_config(const qc_gguf_file *file, char **ret, qc_err *err) QC_WARN_UNUSED;
int qc_gguf_make_tokenizer(const qc_gguf_file *file, char **ret, qc_err *err) QC_WARN_UNUSED;

/* Pre-tokenizers that are known by a name in GGUF files and by their JSON text in tokenizer.json. */
typedef struct qc_gguf_pre {
    const char *name;       /* tokenizer.ggml.pre */
    const char *normalizer; /* JSON */
    const char *splits;     /* JSON: what stands before the last ByteLevel part; "" = nothing */
    bool use_regex;         /* of that part */
    bool ignore_merges;
} qc_gguf_pre;

/* Row i of the table, NULL behind its end. */
const qc_gguf_pre *qc_gguf_pre_at(int i);

#endif
