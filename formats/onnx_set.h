/* The data file of an ONNX folder: tensors one behind the other, each on a multiple of 64 bytes. */
#ifndef QC_ONNX_SET_H
#define QC_ONNX_SET_H

#include "part_list.h"
#include "part_set.h"

/* Empty set; shard_bytes is of no account, the file is one. */
int qc_onnx_set_new(uint64_t shard_bytes, qc_part_set **ret, qc_err *err) QC_WARN_UNUSED;

/* A tensor of a set made above with its place; NULL if it has none of that name. Valid until the next add. */
const qc_part_entry *qc_onnx_set_find(const qc_part_set *set, const char *name);

#endif
