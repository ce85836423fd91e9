#include "part_list.h"

#include "qc_alloc.h"

#include <assert.h>
#include <string.h>

int qc_part_list_init(qc_part_list *list, qc_err *err)
{
    *list = (qc_part_list){.names = qc_map_new(1024)};
    return list->names ? QC_OK : qc_fail_nomem(err, "names of tensors", 1024);
}

int qc_part_list_add(qc_part_list *list, const char *name, qc_dtype dtype, int n_dims, const int64_t *shape,
                     qc_err *err)
{
    assert(n_dims <= QC_MAX_DIMS);
    if (list->n == list->cap) {
        int64_t cap = list->cap ? 2 * list->cap : 256;
        void *p = qc_realloc(list->entries, (size_t)list->cap * sizeof *list->entries,
                             (size_t)cap * sizeof *list->entries);
        if (!p)
            return qc_fail_nomem(err, name, (size_t)cap * sizeof *list->entries);
        list->entries = p;
        list->cap = cap;
    }
    qc_part_entry *e = &list->entries[list->n];
    *e = (qc_part_entry){.name = qc_strdup(name), .dtype = dtype, .n_dims = n_dims};
    if (!e->name)
        return qc_fail_nomem(err, name, strlen(name));
    e->n_bytes = (uint64_t)qc_dtype_bits(dtype) / 8;
    for (int i = 0; i < n_dims; i++) {
        e->shape[i] = shape[i];
        e->n_bytes *= (uint64_t)shape[i];
    }
    int added = qc_map_add(list->names, e->name, strlen(e->name), list->n++);
    if (added < 0)
        return qc_fail_nomem(err, name, strlen(name));
    return added ? QC_OK : qc_fail(err, QC_E_INPUT, "tensor %s would be written twice", name);
}

const qc_part_entry *qc_part_list_find(const qc_part_list *list, const char *name)
{
    int64_t i = qc_map_get(list->names, name, strlen(name), -1);
    return i < 0 ? NULL : &list->entries[i];
}

void qc_part_list_clear(qc_part_list *list)
{
    for (int64_t i = 0; i < list->n; i++)
        qc_free(list->entries[i].name);
    qc_free(list->entries);
    qc_map_free(list->names);
    *list = (qc_part_list){.n = 0};
}
