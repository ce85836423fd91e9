/* The tensors of a qc_part_set in the order in which they were announced: names, sizes, and places once the
 * set has laid them out. */
#ifndef QC_PART_LIST_H
#define QC_PART_LIST_H

#include "qc_map.h"
#include "qc_tensor.h"

typedef struct qc_part_entry {
    char *name; /* owned */
    qc_dtype dtype;
    int n_dims;
    int64_t shape[QC_MAX_DIMS];
    uint64_t n_bytes;
    uint64_t offset; /* in its file's data, set by the part set */
    int shard;       /* number of its file, likewise */
} qc_part_entry;

typedef struct qc_part_list {
    qc_part_entry *entries;
    int64_t n, cap;
    qc_map *names;
} qc_part_list;

/* QC_E_RESOURCE; nothing is left to clear then. */
int qc_part_list_init(qc_part_list *list, qc_err *err) QC_WARN_UNUSED;
/* Offset and shard are 0. QC_E_INPUT: a name twice; QC_E_RESOURCE. */
int qc_part_list_add(qc_part_list *list, const char *name, qc_dtype dtype, int n_dims, const int64_t *shape,
                     qc_err *err) QC_WARN_UNUSED;
/* NULL if there is none of that name. */
const qc_part_entry *qc_part_list_find(const qc_part_list *list, const char *name);
void qc_part_list_clear(qc_part_list *list);

#endif
