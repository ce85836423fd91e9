/* GGUF files of llama.cpp as a source (docs/formats/gguf.md). Tensors have their Hugging Face names, rows of
 * q and k the order of checkpoints; config.json, tokenizer.json, tokenizer_config.json and
 * generation_config.json are made from the metadata. */
#ifndef QC_GGUF_H
#define QC_GGUF_H

#include "qc_source.h"

/* Open a file. A tokenizer of a kind that can not be rebuilt is taken from a tokenizer.json beside the file.
 * QC_E_INPUT: broken; QC_E_UNSUPPORTED: an architecture, a type or a setting that is not read. */
int qc_gguf_open(const char *path, qc_source **ret, qc_err *err) QC_WARN_UNUSED;

/* Is this a GGUF file (by its magic)? */
bool qc_gguf_probe_path(const char *path);

#endif
