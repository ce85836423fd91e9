#include "onnx_set.h"

#include "onnx_file.h"
#include "qc_alloc.h"
#include "qc_map.h"

#include <assert.h>
#include <string.h>

#define ALIGN 64 /* engines map the file: what begins on a cache line stays on it */

typedef struct entry {
    char *name; /* owned */
    qc_onnx_place place;
} entry;

typedef struct onnx_set {
    qc_part_set base; /* first: a qc_part_set pointer is one to this struct */
    entry *entries;
    int64_t n_entries, cap_entries;
    qc_map *names;
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
    if (set->n_entries == set->cap_entries) {
        int64_t cap = 2 * set->cap_entries + 256;
        void *p = qc_realloc(set->entries, (size_t)set->cap_entries * sizeof *set->entries,
                             (size_t)cap * sizeof *set->entries);
        if (!p)
            return qc_fail_nomem(err, name, (size_t)cap * sizeof *set->entries);
        set->entries = p;
        set->cap_entries = cap;
    }
    entry *e = &set->entries[set->n_entries];
    *e = (entry){.name = qc_strdup(name), .place = {.dtype = dtype, .offset = set->n_bytes}};
    if (!e->name)
        return qc_fail_nomem(err, name, strlen(name));
    e->place.n_bytes = (uint64_t)qc_dtype_bits(dtype) / 8;
    for (int i = 0; i < n_dims; i++)
        e->place.n_bytes *= (uint64_t)shape[i];
    set->n_bytes += (e->place.n_bytes + ALIGN - 1) / ALIGN * ALIGN;
    int added = qc_map_add(set->names, e->name, strlen(e->name), set->n_entries++);
    if (added < 0)
        return qc_fail_nomem(err, name, strlen(name));
    return added ? QC_OK : qc_fail(err, QC_E_INPUT, "tensor %s would be written twice", name);
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
    const qc_onnx_place *place = &set->entries[tensor].place;
    assert(offset + n_bytes <= place->n_bytes);
    return qc_outfile_pwrite(set->file, data, n_bytes, place->offset + offset, err);
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
    for (int64_t i = 0; i < set->n_entries; i++)
        qc_free(set->entries[i].name);
    qc_free(set->entries);
    qc_map_free(set->names);
    qc_free(set);
}

int qc_onnx_set_new(uint64_t shard_bytes, qc_part_set **ret, qc_err *err)
{
    (void)shard_bytes;
    onnx_set *set = qc_calloc(1, sizeof *set);
    if (!set || !(set->names = qc_map_new(1024))) {
        qc_free(set);
        return qc_fail_nomem(err, QC_ONNX_DATA_FILE, sizeof *set);
    }
    set->base = (qc_part_set){set_add, set_layout, set_open, set_write, set_finish, set_free};
    *ret = &set->base;
    return QC_OK;
}

bool qc_onnx_set_find(const qc_part_set *base, const char *name, qc_onnx_place *ret)
{
    const onnx_set *set = (const onnx_set *)base;
    int64_t i = qc_map_get(set->names, name, strlen(name), -1);
    if (i >= 0)
        *ret = set->entries[i].place;
    return i >= 0;
}
