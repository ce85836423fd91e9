/* The files that hold the tensors of a folder: tensors are announced first, so that the layout is known, then
 * their bytes may come in any order. A container (safetensors, the data file of ONNX) fills the table.
 *
 *   add each tensor -> layout -> open -> write ... -> finish -> free */
#ifndef QC_PART_SET_H
#define QC_PART_SET_H

#include "qc_outfolder.h"
#include "qc_tensor.h"

typedef struct qc_part_set qc_part_set;

struct qc_part_set {
    /* Announce a tensor; its number counts from 0. QC_E_INPUT: a name twice. */
    int (*add)(qc_part_set *set, const char *name, qc_dtype dtype, int n_dims, const int64_t *shape,
               qc_err *err);
    /* Settle the places: no tensor can be added afterwards. Bytes of all files of the set. */
    int (*layout)(qc_part_set *set, uint64_t *ret_bytes, qc_err *err);
    /* Start the files in a folder. */
    int (*open)(qc_part_set *set, qc_outfolder *folder, qc_err *err);
    /* Bytes of a tensor from `offset` on; they must stay inside. */
    int (*write)(qc_part_set *set, int64_t tensor, uint64_t offset, const void *data, size_t n_bytes,
                 qc_err *err);
    /* Commit the files. */
    int (*finish)(qc_part_set *set, qc_outfolder *folder, qc_err *err);
    /* Discards files that are not committed. */
    void (*free)(qc_part_set *set);
};

/* NULL is fine. */
static inline void qc_part_set_free(qc_part_set *set)
{
    if (set)
        set->free(set);
}

#endif
