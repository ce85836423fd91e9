#include "st_write.h"

#include "hf_layout.h"
#include "part_list.h"
#include "qc_alloc.h"
#include "qc_buf.h"
#include "qc_json.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEADER_ALIGN 64 /* readers map files: data that begin on a cache line stay on it */

typedef struct shard {
    char *header; /* JSON, padded */
    size_t header_bytes;
    uint64_t data_bytes;
    qc_outfile *file;
} shard;

typedef struct st_set {
    qc_part_set base; /* first: a qc_part_set pointer is one to this struct */
    uint64_t limit;
    qc_part_list list;
    shard *shards; /* NULL before layout */
    int n_shards;
    char *index; /* text; NULL for a single file */
} st_set;

static st_set *self_of(qc_part_set *set)
{
    return (st_set *)set;
}

static int st_add(qc_part_set *base, const char *name, qc_dtype dtype, int n_dims, const int64_t *shape,
                  qc_err *err)
{
    st_set *set = self_of(base);
    assert(!set->shards);
    return qc_part_list_add(&set->list, name, dtype, n_dims, shape, err);
}

/* ---- layout ---- */

/* Types in the order of their ids in the reference library, widest last: files begin with the widest, so that
 * every tensor is aligned. */
static int dtype_rank(qc_dtype dtype)
{
    static const qc_dtype order[] = {QC_DT_BOOL, QC_DT_U8,  QC_DT_I8,  QC_DT_I16, QC_DT_U16, QC_DT_F16,
                                     QC_DT_BF16, QC_DT_I32, QC_DT_U32, QC_DT_F32, QC_DT_F64, QC_DT_I64};
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++)
        if (order[i] == dtype)
            return (int)i;
    return (int)(sizeof order / sizeof order[0]);
}

static int by_file_order(const void *a, const void *b)
{
    const qc_part_entry *x = *(const qc_part_entry *const *)a, *y = *(const qc_part_entry *const *)b;
    if (x->shard != y->shard)
        return x->shard < y->shard ? -1 : 1;
    int rx = dtype_rank(x->dtype), ry = dtype_rank(y->dtype);
    return rx != ry ? ry - rx : strcmp(x->name, y->name);
}

/* Text of a name in JSON. */
static int append_string(qc_buf *buf, const char *text, qc_err *err)
{
    cJSON *item = cJSON_CreateString(text);
    char *quoted = item ? cJSON_PrintUnformatted(item) : NULL;
    int rc = quoted ? qc_buf_printf(buf, err, "%s", quoted) : qc_fail_nomem(err, text, strlen(text));
    cJSON_free(quoted);
    cJSON_Delete(item);
    return rc;
}

static int append_entry(qc_buf *buf, const qc_part_entry *e, qc_err *err)
{
    QC_TRY(qc_buf_printf(buf, err, ","));
    QC_TRY(append_string(buf, e->name, err));
    QC_TRY(qc_buf_printf(buf, err, ":{\"dtype\":\"%s\",\"shape\":[", qc_dtype_name(e->dtype)));
    for (int i = 0; i < e->n_dims; i++)
        QC_TRY(qc_buf_printf(buf, err, "%s%lld", i ? "," : "", (long long)e->shape[i]));
    return qc_buf_printf(buf, err, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)e->offset,
                         (unsigned long long)(e->offset + e->n_bytes));
}

/* Offsets and header of one file, whose entries are order[0 .. n). */
static int lay_out_shard(shard *s, qc_part_entry *const *order, int64_t n, qc_err *err)
{
    qc_buf buf = {0};
    int rc = qc_buf_printf(&buf, err, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (int64_t i = 0; i < n && rc == QC_OK; i++) {
        order[i]->offset = s->data_bytes;
        s->data_bytes += order[i]->n_bytes;
        rc = append_entry(&buf, order[i], err);
    }
    if (rc == QC_OK)
        rc = qc_buf_printf(&buf, err, "}");
    while (rc == QC_OK && (buf.n_bytes + 8) % HEADER_ALIGN)
        rc = qc_buf_append(&buf, " ", 1, err);
    s->header = buf.data; /* freed by qc_free, as a qc_buf's content is */
    s->header_bytes = buf.n_bytes;
    return rc;
}

static void shard_name(const st_set *set, int i, char ret[64])
{
    if (set->n_shards == 1)
        snprintf(ret, 64, "model.safetensors");
    else
        snprintf(ret, 64, "model-%05d-of-%05d.safetensors", i + 1, set->n_shards);
}

static int make_index(st_set *set, qc_err *err)
{
    char name[64];
    uint64_t total = 0;
    for (int64_t i = 0; i < set->list.n; i++)
        total += set->list.entries[i].n_bytes;
    qc_json_watch();
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddNumberToObject(cJSON_AddObjectToObject(doc, "metadata"), "total_size", (double)total);
    cJSON *map = cJSON_AddObjectToObject(doc, "weight_map");
    for (int64_t i = 0; i < set->list.n; i++) {
        shard_name(set, set->list.entries[i].shard, name);
        cJSON_AddStringToObject(map, set->list.entries[i].name, name);
    }
    doc = qc_json_watched(doc);
    set->index = doc ? qc_json_print(doc) : NULL;
    cJSON_Delete(doc);
    return set->index ? QC_OK : qc_fail_nomem(err, QC_HF_INDEX, (uint64_t)set->list.n * 128);
}

static int st_layout(qc_part_set *base, uint64_t *ret_bytes, qc_err *err)
{
    st_set *set = self_of(base);
    uint64_t used = 0, sum = 0;
    set->n_shards = 1;
    for (int64_t i = 0; i < set->list.n; i++) {
        qc_part_entry *e = &set->list.entries[i];
        if (used && used + e->n_bytes > set->limit) {
            set->n_shards++;
            used = 0;
        }
        used += e->n_bytes;
        e->shard = set->n_shards - 1;
    }
    qc_part_entry **order = qc_alloc((size_t)set->list.n, sizeof(qc_part_entry *));
    set->shards = qc_calloc((size_t)set->n_shards, sizeof *set->shards);
    int rc = order && set->shards ? QC_OK : qc_fail_nomem(err, "safetensors", (size_t)set->list.n * 8);
    for (int64_t i = 0; i < set->list.n && rc == QC_OK; i++)
        order[i] = &set->list.entries[i];
    if (rc == QC_OK && set->list.n > 1)
        qsort(order, (size_t)set->list.n, sizeof(qc_part_entry *), by_file_order);
    int64_t at = 0;
    for (int s = 0; s < set->n_shards && rc == QC_OK; s++) {
        int64_t n = 0;
        while (at + n < set->list.n && order[at + n]->shard == s)
            n++;
        rc = lay_out_shard(&set->shards[s], order + at, n, err);
        sum += 8 + set->shards[s].header_bytes + set->shards[s].data_bytes;
        at += n;
    }
    qc_free(order);
    if (rc == QC_OK && set->n_shards > 1)
        rc = make_index(set, err);
    if (rc == QC_OK)
        *ret_bytes = sum + (set->index ? strlen(set->index) : 0);
    return rc;
}

/* ---- files ---- */

static int st_open(qc_part_set *base, qc_outfolder *folder, qc_err *err)
{
    st_set *set = self_of(base);
    char name[64];
    for (int i = 0; i < set->n_shards; i++) {
        shard *s = &set->shards[i];
        uint64_t n = s->header_bytes;
        shard_name(set, i, name);
        QC_TRY(qc_outfolder_file(folder, name, &s->file, err));
        QC_TRY(qc_outfile_write(s->file, &n, sizeof n, err));
        QC_TRY(qc_outfile_write(s->file, s->header, s->header_bytes, err));
    }
    return QC_OK;
}

static int st_write(qc_part_set *base, int64_t tensor, uint64_t offset, const void *data, size_t n_bytes,
                    qc_err *err)
{
    st_set *set = self_of(base);
    const qc_part_entry *e = &set->list.entries[tensor];
    shard *s = &set->shards[e->shard];
    assert(offset + n_bytes <= e->n_bytes);
    return qc_outfile_pwrite(s->file, data, n_bytes, 8 + s->header_bytes + e->offset + offset, err);
}

static int st_finish(qc_part_set *base, qc_outfolder *folder, qc_err *err)
{
    st_set *set = self_of(base);
    for (int i = 0; i < set->n_shards; i++) {
        qc_outfile *file = set->shards[i].file;
        set->shards[i].file = NULL; /* freed by commit, also on failure */
        QC_TRY(qc_outfile_commit(file, NULL, err));
    }
    return set->index ? qc_outfolder_write(folder, QC_HF_INDEX, set->index, strlen(set->index), err) : QC_OK;
}

static void st_free(qc_part_set *base)
{
    st_set *set = self_of(base);
    for (int i = 0; set->shards && i < set->n_shards; i++) {
        qc_outfile_discard(set->shards[i].file);
        qc_free(set->shards[i].header);
    }
    qc_part_list_clear(&set->list);
    qc_free(set->shards);
    qc_free(set->index);
    qc_free(set);
}

int qc_st_set_new(uint64_t shard_bytes, qc_part_set **ret, qc_err *err)
{
    st_set *set = qc_calloc(1, sizeof *set);
    int rc = set ? qc_part_list_init(&set->list, err) : qc_fail_nomem(err, "safetensors", sizeof *set);
    if (rc < 0) {
        qc_free(set);
        return rc;
    }
    set->base = (qc_part_set){st_add, st_layout, st_open, st_write, st_finish, st_free};
    set->limit = shard_bytes;
    *ret = &set->base;
    return QC_OK;
}
