#include "onnx_set.h"

#include "onnx_file.h"
#include "qc_alloc.h"

#include <assert.h>

#define ALIGN 64 /* engines map the file: what begins on a cache line stays on it */

typedef struct onnx_set {
    qc_part_set base; /* first: a qc_part_set pointer is one to this struct */
    qc_part_list list;
    uint64_t n_bytes;
    qc_outfile *file; /* NULL before open and after finish */
} onnx_set;

static onnx_set *self_of(qc_part_set *set)
{
    return (onnx_set *)set;
}

static int set_add(qc_part_set *base, const char *name, qc_dtype dtype, int n_dims, const int64_t *shape,
                   qc_err *err)
{
    onnx_set *set = self_of(base);
    QC_TRY(qc_part_list_add(&set->list, name, dtype, n_dims, shape, err));
    qc_part_entry *e = &set->list.entries[set->list.n - 1];
    e->offset = set->n_bytes;
    set->n_bytes += (e->n_bytes + ALIGN - 1) / ALIGN * ALIGN;
    return QC_OK;
}

static int set_layout(qc_part_set *base, uint64_t *ret_bytes, qc_err *err)
{
    (void)err;
    *ret_bytes = self_of(base)->n_bytes;
    return QC_OK;
}

/* The last tensor's padding too is in the file, so that its size is the one that was counted. */
static int set_open(qc_part_set *base, qc_outfolder *folder, qc_err *err)
{
    onnx_set *set = self_of(base);
    QC_TRY(qc_outfolder_file(folder, QC_ONNX_DATA_FILE, &set->file, err));
    return set->n_bytes ? qc_outfile_pwrite(set->file, "", 1, set->n_bytes - 1, err) : QC_OK;
}

static int set_write(qc_part_set *base, int64_t tensor, uint64_t offset, const void *data, size_t n_bytes,
                     qc_err *err)
{
    const onnx_set *set = self_of(base);
    const qc_part_entry *e = &set->list.entries[tensor];
    assert(offset + n_bytes <= e->n_bytes);
    return qc_outfile_pwrite(set->file, data, n_bytes, e->offset + offset, err);
}

static int set_finish(qc_part_set *base, qc_outfolder *folder, qc_err *err)
{
    onnx_set *set = self_of(base);
    qc_outfile *file = set->file;
    (void)folder;
    set->file = NULL; /* freed by commit, also on failure */
    return qc_outfile_commit(file, NULL, err);
}

static void set_free(qc_part_set *base)
{
    onnx_set *set = self_of(base);
    qc_outfile_discard(set->file);
    qc_part_list_clear(&set->list);
    qc_free(set);
}

int qc_onnx_set_new(uint64_t shard_bytes, qc_part_set **ret, qc_err *err)
{
    (void)shard_bytes;
    onnx_set *set = qc_calloc(1, sizeof *set);
    int rc = set ? qc_part_list_init(&set->list, err) : qc_fail_nomem(err, QC_ONNX_DATA_FILE, sizeof *set);
    if (rc < 0) {
        qc_free(set);
        return rc;
    }
    set->base = (qc_part_set){set_add, set_layout, set_open, set_write, set_finish, set_free};
    *ret = &set->base;
    return QC_OK;
}

const qc_part_entry *qc_onnx_set_find(const qc_part_set *base, const char *name)
{
    return qc_part_list_find(&((const onnx_set *)base)->list, name);
}
