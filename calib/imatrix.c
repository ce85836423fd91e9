#include "imatrix.h"

#include "family.h"
#include "gguf_file.h"
#include "gguf_names.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_math.h"
#include "stats_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The names of llama.cpp follow from those that families here give their matrices. */
void qc_imatrix_name(int layer, qc_slot slot, char ret[64])
{
    const qc_family *f = NULL;
    for (int i = 0; qc_family_at(i) && !f; i++)
        f = qc_family_at(i)->names[slot] ? qc_family_at(i) : NULL;
    char name[256];
    *ret = 0;
    if (f)
        snprintf(name, sizeof name, "%s%d.%s", f->layer_prefix, layer, f->names[slot]);
    if (f && !qc_gguf_name_of(name, ret))
        *ret = 0;
}

/* ---- writing ---- */

typedef struct entry {
    char name[64];
    const float *sums; /* [n] sum of x^2 */
    int64_t n;
    float count;
} entry;

typedef struct entries {
    entry *list;
    int64_t n, cap;
    float **sums; /* [layers * stages], owned; matrices of a stage share one */
    int64_t n_sums;
} entries;

static void entries_clear(entries *e)
{
    for (int64_t i = 0; i < e->n_sums; i++)
        qc_free(e->sums[i]);
    qc_free(e->sums);
    qc_free(e->list);
}

static int gather(const qc_stats_file *file, qc_backend *be, entries *e, qc_err *err)
{
    int64_t n_layers = file->info.n_layers;
    const qc_family *family = qc_family_find(file->info.family);
    if (!family)
        return qc_fail(err, QC_E_UNSUPPORTED, "statistics of model_type \"%s\", which is not supported",
                       file->info.family);
    e->cap = n_layers * QC_N_SLOTS;
    e->list = qc_calloc((size_t)e->cap, sizeof *e->list);
    e->sums = qc_calloc((size_t)(n_layers * QC_N_DENSE_STAGES), sizeof *e->sums);
    if (!e->list || !e->sums)
        return qc_fail_nomem(err, "importance matrix", (unsigned long long)e->cap * sizeof *e->list);
    for (int64_t k = 0; k < n_layers * QC_N_DENSE_STAGES; k++) {
        qc_stage stage = (qc_stage)(k % QC_N_DENSE_STAGES);
        int layer = (int)(k / QC_N_DENSE_STAGES);
        int64_t n = file->info.widths[stage], tokens;
        float *sums = e->sums[e->n_sums++] = qc_alloc((size_t)n, sizeof *sums);
        if (!sums)
            return qc_fail_nomem(err, "importance matrix", (unsigned long long)n * sizeof *sums);
        QC_TRY(qc_stats_summary(file, be, layer, stage, sums, NULL, NULL, &tokens, err));
        for (const qc_slot *slot = qc_stage_slots(family, stage); *slot != QC_N_SLOTS; slot++) {
            entry *x = &e->list[e->n++];
            *x = (entry){.sums = sums, .n = n, .count = (float)tokens};
            qc_imatrix_name(layer, *slot, x->name);
        }
    }
    return QC_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const entry *)a)->name, ((const entry *)b)->name);
}

static int put_keys(qc_gguf_head *head, const qc_stats_info *info, qc_err *err)
{
    qc_buf text = {0};
    QC_TRY(qc_gguf_put_text(head, "general.type", "imatrix", err));
    int rc = qc_gguf_append_text(&text, info->text, strlen(info->text), err);
    if (rc == QC_OK)
        rc = qc_gguf_put_array(head, "imatrix.datasets", QC_GGUF_STRING, 1, &text, err);
    qc_buf_clear(&text);
    QC_TRY(rc);
    QC_TRY(qc_gguf_put_int(head, "imatrix.chunk_count", QC_GGUF_U32, info->n_windows, err));
    return qc_gguf_put_int(head, "imatrix.chunk_size", QC_GGUF_U32, info->length, err);
}

static int put_tensor(qc_gguf_head *head, const char *name, const char *suffix, int64_t n, qc_err *err)
{
    char full[80];
    snprintf(full, sizeof full, "%s%s", name, suffix);
    return qc_gguf_put_tensor(head, full, qc_block_find(QC_BLOCK_F32), 1, &n, err);
}

static int put_data(qc_buf *buf, const float *values, int64_t n, qc_err *err)
{
    static const char zeros[QC_GGUF_ALIGNMENT];
    size_t bytes = (size_t)n * sizeof *values;
    QC_TRY(qc_buf_append(buf, values, bytes, err));
    return qc_buf_append(buf, zeros, (size_t)qc_round_up((int64_t)bytes, QC_GGUF_ALIGNMENT) - bytes, err);
}

static int build(const entries *e, qc_gguf_head *head, const qc_stats_info *info, qc_buf *buf, qc_err *err)
{
    QC_TRY(put_keys(head, info, err));
    for (int64_t i = 0; i < e->n; i++) {
        QC_TRY(put_tensor(head, e->list[i].name, ".in_sum2", e->list[i].n, err));
        QC_TRY(put_tensor(head, e->list[i].name, ".counts", 1, err));
    }
    QC_TRY(qc_gguf_head_finish(head, buf, err));
    for (int64_t i = 0; i < e->n; i++) {
        QC_TRY(put_data(buf, e->list[i].sums, e->list[i].n, err));
        QC_TRY(put_data(buf, &e->list[i].count, 1, err));
    }
    return QC_OK;
}

int qc_imatrix_write(const qc_stats_file *file, qc_backend *be, const char *path, bool force, qc_err *err)
{
    entries e = {0};
    qc_gguf_head head = {0};
    qc_buf buf = {0};
    int rc = qc_outfile_check(path, force, err);
    if (rc == QC_OK)
        rc = gather(file, be, &e, err);
    if (rc == QC_OK) {
        qsort(e.list, (size_t)e.n, sizeof *e.list, by_name);
        rc = build(&e, &head, &file->info, &buf, err);
    }
    if (rc == QC_OK)
        rc = qc_file_write(path, force, buf.data, buf.n_bytes, err);
    entries_clear(&e);
    qc_gguf_head_clear(&head);
    qc_buf_clear(&buf);
    return rc;
}

/* ---- reading ---- */

struct qc_imatrix {
    int64_t n_layers;
    float **weights; /* [n_layers * QC_N_SLOTS], NULL where there are none */
    int64_t *tokens; /* the same */
};

static int broken(const qc_gguf_file *g, const char *what, qc_err *err)
{
    return qc_fail(err, QC_E_INPUT, "%s: damaged importance matrix: %s", g->path, what);
}

static int check_kind(const qc_gguf_file *g, qc_err *err)
{
    qc_gguf_text type;
    QC_TRY(qc_gguf_get_text(g, "general.type", &type, err));
    if (qc_gguf_text_is(type, "imatrix"))
        return QC_OK;
    return qc_fail(err, QC_E_INPUT, "%s: a GGUF file, but no importance matrix (general.type)", g->path);
}

/* The values of a tensor with n elements; *ret = NULL if the file has none of that name. */
static int find_values(const qc_gguf_file *g, const char *name, const char *suffix, int64_t n,
                       const float **ret, qc_err *err)
{
    char full[80];
    snprintf(full, sizeof full, "%s%s", name, suffix);
    const qc_gguf_tensor *t = qc_gguf_tensor_find(g, full);
    *ret = NULL;
    if (!t)
        return QC_OK;
    for (int d = 1; d < t->n_dims; d++)
        if (t->ne[d] != 1)
            return qc_fail(err, QC_E_UNSUPPORTED, "%s: %s holds the sums of several experts", g->path, full);
    if (t->ne[0] != n)
        return qc_fail(err, QC_E_INPUT, "%s: %s has %lld values, %lld were expected", g->path, full,
                       (long long)t->ne[0], (long long)n);
    if (t->type->id != QC_BLOCK_F32 || t->offset % sizeof **ret)
        return broken(g, full, err);
    *ret = (const float *)(const void *)(g->data + t->offset);
    return QC_OK;
}

static int read_matrix(const qc_gguf_file *g, int layer, qc_slot slot, int64_t n, float **ret,
                       int64_t *ret_tokens, qc_err *err)
{
    char name[64];
    const float *sums, *count;
    qc_imatrix_name(layer, slot, name);
    QC_TRY(find_values(g, name, ".in_sum2", n, &sums, err));
    QC_TRY(find_values(g, name, ".counts", 1, &count, err));
    if (!sums && !count)
        return QC_OK;
    if (!sums || !count)
        return broken(g, name, err);
    for (int64_t i = 0; i < n; i++)
        if (!(sums[i] >= 0 && sums[i] <= 3.4e38f))
            return broken(g, name, err);
    if (!(*count == 0 || (*count >= 1 && *count <= 1e18f)))
        return broken(g, name, err);
    if (*count == 0)
        return QC_OK;
    *ret = qc_alloc((size_t)n, sizeof **ret);
    if (!*ret)
        return qc_fail_nomem(err, g->path, (unsigned long long)n * sizeof **ret);
    qc_stats_weights_of_sums(sums, n, (double)*count, *ret);
    *ret_tokens = (int64_t)*count;
    return QC_OK;
}

static int read_all(const qc_gguf_file *g, const qc_model *model, qc_imatrix *im, qc_err *err)
{
    int64_t n_found = 0;
    QC_TRY(check_kind(g, err));
    for (int layer = 0; layer < (int)im->n_layers; layer++)
        for (int s = 0; s < QC_N_DENSE_STAGES; s++)
            for (const qc_slot *slot = qc_stage_slots(model->config.family, (qc_stage)s); *slot != QC_N_SLOTS;
                 slot++) {
                int at = layer * QC_N_SLOTS + (int)*slot;
                float **w = &im->weights[at];
                QC_TRY(read_matrix(g, layer, *slot, qc_stage_width(&model->config, (qc_stage)s), w,
                                   &im->tokens[at], err));
                n_found += *w != NULL;
            }
    if (n_found == 0)
        return qc_fail(err, QC_E_INPUT, "%s: holds nothing about the matrices of %s", g->path,
                       model->src->path);
    return QC_OK;
}

int qc_imatrix_open(const char *path, const qc_model *model, qc_imatrix **ret, qc_err *err)
{
    qc_mapped map = {0};
    qc_imatrix *im = qc_calloc(1, sizeof *im);
    if (!im)
        return qc_fail_nomem(err, path, sizeof *im);
    size_t n = (size_t)(model->config.n_layers * QC_N_SLOTS);
    im->weights = qc_calloc(n, sizeof *im->weights);
    im->tokens = qc_calloc(n, sizeof *im->tokens);
    if (!im->weights || !im->tokens) {
        qc_imatrix_close(im);
        return qc_fail_nomem(err, path, n * 16);
    }
    im->n_layers = model->config.n_layers;
    qc_gguf_file file = {0};
    int rc = qc_file_map(path, &map, err);
    if (rc == QC_OK && !qc_gguf_probe(map.data, map.n_bytes))
        rc = qc_fail(
            err, QC_E_UNSUPPORTED,
            "%s: no GGUF file; importance matrices of the older .dat format are not read (llama-imatrix "
            "--in-file converts them)",
            path);
    else if (rc == QC_OK && (rc = qc_gguf_parse(map.data, map.n_bytes, path, &file, err)) < 0)
        rc = qc_err_prefix(err, "damaged importance matrix");
    if (rc == QC_OK)
        rc = read_all(&file, model, im, err);
    qc_gguf_clear(&file);
    qc_file_unmap(&map);
    if (rc < 0)
        qc_imatrix_close(im);
    else
        *ret = im;
    return rc;
}

void qc_imatrix_close(qc_imatrix *im)
{
    if (!im)
        return;
    for (int64_t i = 0; i < im->n_layers * QC_N_SLOTS; i++)
        qc_free(im->weights[i]);
    qc_free(im->weights);
    qc_free(im->tokens);
    qc_free(im);
}

const float *qc_imatrix_weights(const qc_imatrix *im, int layer, qc_slot slot)
{
    return im->weights[layer * QC_N_SLOTS + (int)slot];
}

int64_t qc_imatrix_tokens(const qc_imatrix *im, int layer, qc_slot slot)
{
    return im->tokens[layer * QC_N_SLOTS + (int)slot];
}
