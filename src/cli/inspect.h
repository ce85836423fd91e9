/* The jobs of qinspect. */
#ifndef QC_CLI_INSPECT_H
#define QC_CLI_INSPECT_H

#include "qc_err.h"
#include "tokenizer.h"

#include <stdbool.h>

/* Table of tensors, or JSON. */
int qc_inspect_list(const char *path, bool json, qc_err *err) QC_WARN_UNUSED;

/* Compare a packed file with its sums; look for NaN and infinity in all values. */
int qc_inspect_check(const char *path, bool json, qc_err *err) QC_WARN_UNUSED;

/* Errors of a quantized artifact's tensors, from its bytes, against what its report says of them. Returns 1
 * if one differs by more than `tolerance` of it. */
int qc_inspect_account(const char *path, const char *model, const char *report, double tolerance, bool json,
                       qc_err *err) QC_WARN_UNUSED;

/* What an engine would refuse or run badly (formats/engine_lint.h). QC_E_UNSUPPORTED after the list if it
 * refuses. */
int qc_inspect_engine(const char *path, const char *engine, bool json, qc_err *err) QC_WARN_UNUSED;

/* SHA-256 of a file or of the files of a folder. */
int qc_inspect_hash(const char *path, bool json, qc_err *err) QC_WARN_UNUSED;

/* stdin to stdout through the tokenizer of a tokenizer.json, a folder, or a packed file. */
int qc_inspect_tokenize(const char *path, const qc_encode_options *options, bool jsonl,
                        qc_err *err) QC_WARN_UNUSED;
int qc_inspect_detokenize(const char *path, bool jsonl, qc_err *err) QC_WARN_UNUSED;

#endif
