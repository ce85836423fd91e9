/* Stored reference: what one model gives at every scored position of a text, in a file small enough to keep
 * (docs/formats/reference.md), so that other models are compared with it without running it. Per position the
 * NLL of the true token, the `keep` most likely ids and some ids drawn from the rest, with their
 * log-probabilities. */
#ifndef QC_EVAL_REFERENCE_H
#define QC_EVAL_REFERENCE_H

#include "eval.h"

/* Where the scores come from. Hashes are SHA-256 in hex; model: of one line "NAME HASH\n" per file of the
 * model. Strings are borrowed by a writer and owned by a reference. */
typedef struct qc_reference_origin {
    const char *model; /* name, for people */
    const char *text;
    const char *compute; /* "f32", "bf16" */
    char model_sha256[65], tokenizer_sha256[65], text_sha256[65];
} qc_reference_origin;

enum { QC_REFERENCE_KEEP = 256, QC_REFERENCE_DRAWN = 32 };

/* Begin a file for the windows of a model with `vocab` ids (both borrowed until the end). QC_E_USAGE and
 * QC_E_RESOURCE as qc_outfile_open. End with qc_reference_commit or qc_reference_discard. */
int qc_reference_create(const char *path, bool force, const qc_reference_origin *origin,
                        const qc_windows *windows, int64_t vocab, qc_reference_writer **ret,
                        qc_err *err) QC_WARN_UNUSED;

/* Give the file its name; frees the writer, also on failure. QC_E_USAGE if not all windows were scored. */
int qc_reference_commit(qc_reference_writer *writer, qc_err *err) QC_WARN_UNUSED;
/* NULL is fine. */
void qc_reference_discard(qc_reference_writer *writer);

/* Does the file begin like a stored reference? False for what can not be read. */
bool qc_reference_is(const char *path);

/* Open and check headers and sums of all blocks. QC_E_INPUT: no such file, cut off, altered;
 * QC_E_UNSUPPORTED: a newer version. */
int qc_reference_open(const char *path, qc_reference **ret, qc_err *err) QC_WARN_UNUSED;
/* NULL is fine. */
void qc_reference_close(qc_reference *ref);

/* The origin, and how its text was cut. Valid until close. */
const qc_reference_origin *qc_reference_origin_of(const qc_reference *ref);
void qc_reference_rule(const qc_reference *ref, qc_cut_rule *ret);
const char *qc_reference_path(const qc_reference *ref);

/* QC_E_INPUT unless the windows have the ids of the reference and the model its vocabulary. tokenizer_sha256
 * of the model tells in the message what may differ; "" if unknown. */
int qc_reference_fits(const qc_reference *ref, const qc_windows *windows, int64_t vocab,
                      const char *tokenizer_sha256, qc_err *err) QC_WARN_UNUSED;

#endif
