/* Packed runtime format (docs/formats/qpk.md): the writer, and the reader as a source (over src/runtime). */
#ifndef QC_QPK_H
#define QC_QPK_H

#include "qc_source.h"
#include "writer.h"

/* Open a packed file; checks header, table and sizes (not yet the checksums). */
int qc_qpk_open(const char *path, qc_source **ret, qc_err *err) QC_WARN_UNUSED;

/* Is this a packed file (by its magic)? */
bool qc_qpk_probe(const char *path);

/* Compare every section and tensor with its CRC-32. QC_E_INPUT names the first damaged one. src must come
 * from qc_qpk_open. */
int qc_qpk_check(const qc_source *src, qc_err *err) QC_WARN_UNUSED;

/* The open file of such a source in terms of libqpk (runtime/qpk.h): metadata, aliases, tiles. */
struct qpk_file;
const struct qpk_file *qc_qpk_file(const qc_source *src);

/* The format in terms of writer.h; what follows is what it is made of. */
extern const qc_writer_format qc_qpk_writer_format;

typedef struct qc_qpk_writer qc_qpk_writer;

/* Start a packed file that will become `path` (see qc_outfile). */
int qc_qpk_create(const char *path, bool force, qc_qpk_writer **ret, qc_err *err) QC_WARN_UNUSED;

/* A writer that writes nothing: what the same calls would make of a file can be counted before there is one.
 * Tensors go through qc_qpk_count_tensor, qc_qpk_count gives the size of the finished file (once),
 * qc_qpk_discard ends it. `name` is for messages. */
int qc_qpk_create_count(const char *name, qc_qpk_writer **ret, qc_err *err) QC_WARN_UNUSED;
int qc_qpk_count_tensor(qc_qpk_writer *w, const qc_tensor_info *info, qc_err *err) QC_WARN_UNUSED;
int qc_qpk_count(qc_qpk_writer *w, uint64_t *ret_bytes, qc_err *err) QC_WARN_UNUSED;

/* Embed a side file ("config.json", "tokenizer.json", "manifest.json", ...), before or after tensors. */
int qc_qpk_add_file(qc_qpk_writer *w, const char *name, const void *data, size_t n_bytes,
                    qc_err *err) QC_WARN_UNUSED;

/* A failed call leaves the writer fit for qc_qpk_discard only. QC_E_RESOURCE: out of memory or disk;
 * QC_E_USAGE: calls out of order; QC_E_INPUT: a name twice, a code, scale or shape that the format can not
 * hold.
 *
 * Tensors are written one after the other, each row by row from the top: begin, put rows until all are there,
 * end. Rows of a dense tensor are given as its stored bytes, those of a tensor on a grid as codes. n_rows per
 * call must be a multiple of QC_QPK_TILE_ROWS except in the last call of a tensor. */
#define QC_QPK_TILE_ROWS 16
int qc_qpk_begin_tensor(qc_qpk_writer *w, const qc_tensor_info *info, qc_err *err) QC_WARN_UNUSED;
int qc_qpk_put_dense(qc_qpk_writer *w, const void *data, int64_t n_rows, qc_err *err) QC_WARN_UNUSED;
int qc_qpk_put_codes(qc_qpk_writer *w, const qc_code_rows *rows, qc_err *err) QC_WARN_UNUSED;
int qc_qpk_end_tensor(qc_qpk_writer *w, qc_err *err) QC_WARN_UNUSED;

/* Metadata, in call order; a key may be used once. docs/formats/qpk.md lists the keys of the model's
 * configuration, which an engine reads instead of config.json. */
int qc_qpk_add_meta_u64(qc_qpk_writer *w, const char *key, uint64_t value, qc_err *err) QC_WARN_UNUSED;
int qc_qpk_add_meta_i64(qc_qpk_writer *w, const char *key, int64_t value, qc_err *err) QC_WARN_UNUSED;
int qc_qpk_add_meta_f64(qc_qpk_writer *w, const char *key, double value, qc_err *err) QC_WARN_UNUSED;
int qc_qpk_add_meta_string(qc_qpk_writer *w, const char *key, const char *text, qc_err *err) QC_WARN_UNUSED;
int qc_qpk_add_meta_u64_array(qc_qpk_writer *w, const char *key, const uint64_t *values, uint32_t n_elems,
                              qc_err *err) QC_WARN_UNUSED;
int qc_qpk_add_meta_i64_array(qc_qpk_writer *w, const char *key, const int64_t *values, uint32_t n_elems,
                              qc_err *err) QC_WARN_UNUSED;
int qc_qpk_add_meta_f64_array(qc_qpk_writer *w, const char *key, const double *values, uint32_t n_elems,
                              qc_err *err) QC_WARN_UNUSED;

/* The tensor `name` is another name of the tensor `target` (a tied head), which was begun before. Readers
 * find the target under both. */
int qc_qpk_add_alias(qc_qpk_writer *w, const char *name, const char *target, qc_err *err) QC_WARN_UNUSED;

/* Bytes that a tensor of this description takes in the file (data, scales, padding), for plans. */
uint64_t qc_qpk_tensor_bytes(const qc_tensor_info *info);

/* Write table and header and fsync, still under the temporary name, which is returned for reading back. */
int qc_qpk_finish(qc_qpk_writer *w, const char **ret_temp_path, qc_err *err) QC_WARN_UNUSED;

/* Give the finished file its final name (or other_path, e.g. NAME.rejected) and free the writer, also on
 * failure. */
int qc_qpk_publish(qc_qpk_writer *w, const char *other_path, qc_err *err) QC_WARN_UNUSED;

/* Remove what was written and free. NULL is fine. */
void qc_qpk_discard(qc_qpk_writer *w);

#endif
