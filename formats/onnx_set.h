/* The data file of an ONNX folder: tensors one behind the other, each on a multiple of 64 bytes. */
#ifndef QC_ONNX_SET_H
#define QC_ONNX_SET_H

#include "part_set.h"

typedef struct qc_onnx_place {
    qc_dtype dtype;
    uint64_t offset, n_bytes;
} qc_onnx_place;

/* Empty set; shard_bytes is of no account, the file is one. */
int qc_onnx_set_new(uint64_t shard_bytes, qc_part_set **ret, qc_err *err) QC_WARN_UNUSED;

/* Place of a tensor of a set made above; false if it has none of that name. */
bool qc_onnx_set_find(const qc_part_set *set, const char *name, qc_onnx_place *ret);

#endif
