/* Work journal of a calibrated run: the finished matrices of each layer, on disk before the next layer
 * starts. A run that was killed goes on behind the last whole record (--resume), and the artifact is written
 * from the journal alone, so that both ways give the same bytes. Layout: docs/formats/journal.md. */
#ifndef QC_JOURNAL_H
#define QC_JOURNAL_H

#include "qc_result.h"
#include "qc_tensor.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct qc_journal qc_journal;

/* What must be equal for a journal to be continued: named texts, in a fixed order ("tool",
 * "model.safetensors", "recipe", "calibration", "kernels", ...). Borrowed. */
typedef struct qc_journal_key {
    const char *name, *value;
} qc_journal_key;

/* Open the journal of an output. resume: continue an existing one (QC_E_INPUT if a key differs: says which,
 * what it was and what it is), a torn last record is cut off; without one start anew. Not resume: QC_E_USAGE
 * if one exists, unless force; QC_E_USAGE for a file that is no journal. QC_E_RESOURCE: another process has
 * it open, or the disk is full. */
int qc_journal_open(const char *path, const qc_journal_key *keys, int n_keys, bool resume, bool force,
                    qc_journal **ret, qc_err *err) QC_WARN_UNUSED;

/* Close and keep the file / close and remove it. NULL is fine. */
void qc_journal_close(qc_journal *journal);
void qc_journal_remove(qc_journal *journal);

/* Layers that are complete: 0 .. n - 1. */
int64_t qc_journal_n_layers(const qc_journal *journal);

/* Append one layer (numbers count from 0): begin, its tensors, events and figures (a text that the pipeline
 * makes of its records and reads back), end (CRC-32, fsync). Names occur once in a journal. After a failure
 * the journal ends with the layer before and takes no more. */
int qc_journal_begin_layer(qc_journal *journal, int64_t layer, qc_err *err) QC_WARN_UNUSED;
int qc_journal_put_codes(qc_journal *journal, const char *name, const qc_grid *grid, int64_t n_cols,
                         const qc_code_rows *rows, qc_err *err) QC_WARN_UNUSED;
int qc_journal_put_dense(qc_journal *journal, const char *name, const float *values, int64_t n_elems,
                         qc_err *err) QC_WARN_UNUSED;
int qc_journal_put_text(qc_journal *journal, const char *name, const char *text, qc_err *err) QC_WARN_UNUSED;
int qc_journal_end_layer(qc_journal *journal, qc_err *err) QC_WARN_UNUSED;

/* Bytes that the codes of a matrix take in a journal, for plans. */
uint64_t qc_journal_codes_bytes(const qc_grid *grid, int64_t n_rows, int64_t n_cols);

/* Find what a complete layer holds under a name; QC_E_INPUT where there is nothing, or of another size. */
bool qc_journal_has(const qc_journal *journal, const char *name);
/* Rows row0 .. of a tensor that lies on this grid with so many columns (arrays of *rows are the caller's). */
int qc_journal_read_codes(const qc_journal *journal, const char *name, const qc_grid *grid, int64_t n_cols,
                          int64_t row0, int64_t n_rows, qc_code_rows *rows, qc_err *err) QC_WARN_UNUSED;
int qc_journal_read_dense(const qc_journal *journal, const char *name, float *values, int64_t n_elems,
                          qc_err *err) QC_WARN_UNUSED;
/* Owned text (qc_free). */
int qc_journal_read_text(const qc_journal *journal, const char *name, char **ret, qc_err *err) QC_WARN_UNUSED;

#endif
