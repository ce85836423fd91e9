/* Safetensors files as outputs: tensors are announced first, so that the headers are known, then their bytes
 * may come in any order. One file, or several with an index where a limit would be passed. */
#ifndef QC_ST_WRITE_H
#define QC_ST_WRITE_H

#include "qc_outfolder.h"
#include "qc_tensor.h"

typedef struct qc_st_set qc_st_set;

/* Empty set; files are filled up to shard_bytes of tensors in the order of qc_st_set_add. */
int qc_st_set_new(uint64_t shard_bytes, qc_st_set **ret, qc_err *err) QC_WARN_UNUSED;

/* Announce a tensor; its number counts from 0. QC_E_INPUT: a name twice. */
int qc_st_set_add(qc_st_set *set, const char *name, qc_dtype dtype, int n_dims, const int64_t *shape,
                  qc_err *err) QC_WARN_UNUSED;

/* Lay out the files: no tensor can be added afterwards. Bytes of all files and the index. */
int qc_st_set_layout(qc_st_set *set, uint64_t *ret_bytes, qc_err *err) QC_WARN_UNUSED;

/* Start the files in a folder, write their headers. */
int qc_st_set_open(qc_st_set *set, qc_outfolder *folder, qc_err *err) QC_WARN_UNUSED;

/* Bytes of a tensor from `offset` on; it must stay inside. */
int qc_st_set_write(qc_st_set *set, int64_t tensor, uint64_t offset, const void *data, size_t n_bytes,
                    qc_err *err) QC_WARN_UNUSED;

/* Commit the files, write the index of several. */
int qc_st_set_finish(qc_st_set *set, qc_outfolder *folder, qc_err *err) QC_WARN_UNUSED;

/* Discards files that are not committed. NULL is fine. */
void qc_st_set_free(qc_st_set *set);

#endif
