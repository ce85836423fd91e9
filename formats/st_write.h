/* Safetensors files as outputs: one file, or several with an index where a limit would be passed. */
#ifndef QC_ST_WRITE_H
#define QC_ST_WRITE_H

#include "part_set.h"

/* Empty set; files are filled up to shard_bytes of tensors in the order in which they are announced. */
int qc_st_set_new(uint64_t shard_bytes, qc_part_set **ret, qc_err *err) QC_WARN_UNUSED;

#endif
