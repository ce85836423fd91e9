/* Stored references (reference.h) on the side of the programs: where they come from, and whether they are of
 * what is measured. */
#ifndef QC_CLI_STORED_H
#define QC_CLI_STORED_H

#include "qc_source.h"
#include "recipe.h"
#include "reference.h"

/* Origin of scores of a model on a text: hashes its files. Strings are borrowed. */
int qc_stored_origin(const qc_source *src, const char *text, int compute, qc_reference_origin *ret,
                     qc_err *err) QC_WARN_UNUSED;

/* SHA-256 of the model's tokenizer.json; "" if it has none. */
int qc_stored_tokenizer_sha256(const qc_source *src, char ret_hex[65], qc_err *err) QC_WARN_UNUSED;

/* The windows are those of the reference, and the source has its vocabulary (qc_reference_fits). */
int qc_stored_check_text(const qc_reference *ref, const qc_source *src, int64_t vocab,
                         const qc_windows *windows, qc_err *err) QC_WARN_UNUSED;

/* QC_E_INPUT if an artifact says in its manifest that it was made from another model than the reference.
 * Nothing is wrong with one that says nothing. */
int qc_stored_check_artifact(const qc_reference *ref, const qc_source *src, qc_err *err) QC_WARN_UNUSED;

/* QC_E_INPUT unless the reference is of the model with these files. */
int qc_stored_check_model(const qc_reference *ref, const qc_source *src, const char (*digests)[65],
                          qc_err *err) QC_WARN_UNUSED;

#endif
