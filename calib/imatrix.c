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

/* The names of llama.cpp follow from those that families here give their matrices; for all experts of a layer
 * it has one. */
void qc_imatrix_name(int layer, qc_slot slot, char ret[64])
{
    static const char *const of_experts[] = {"gate", "up", "down"};
    const qc_family *f = NULL;
    char name[256];
    if (slot >= QC_SLOT_FIRST_IN_EXPERT) {
        snprintf(ret, 64, "blk.%d.ffn_%s_exps.weight", layer, of_experts[slot - QC_SLOT_FIRST_IN_EXPERT]);
        return;
    }
    for (int i = 0; qc_family_at(i) && !f; i++)
        f = qc_family_at(i)->names[slot] ? qc_family_at(i) : NULL;
    *ret = 0;
    if (f)
        snprintf(name, sizeof name, "%s%d.%s", f->layer_prefix, layer, f->names[slot]);
    if (f && !qc_gguf_name_of(name, ret))
        *ret = 0;
}

/* ---- writing ---- */

/* The sums of the matrices of one name: one, or as many as there are experts. */
typedef struct stage_sums {
    float *squares; /* [n_matrices, width] */
    float *counts;  /* [n_matrices] */
    int64_t width, n_matrices;
} stage_sums;

typedef struct entry {
    char name[64];
    const stage_sums *sums; /* matrices of a stage share them */
} entry;

typedef struct entries {
    entry *list;
    int64_t n;
    stage_sums *sums; /* [layers * stages], owned */
    int64_t n_sums;
} entries;

static void entries_clear(entries *e)
{
    for (int64_t i = 0; i < e->n_sums; i++) {
        qc_free(e->sums[i].squares);
        qc_free(e->sums[i].counts);
    }
    qc_free(e->sums);
    qc_free(e->list);
}

static int read_sums(const qc_stats_file *file, qc_backend *be, int layer, qc_stage stage, stage_sums *s,
                     qc_err *err)
{
    *s = (stage_sums){.width = file->info.widths[stage],
                      .n_matrices = stage < QC_N_DENSE_STAGES ? 1 : file->info.n_experts};
    s->squares = qc_alloc((size_t)(s->n_matrices * s->width), sizeof *s->squares);
    s->counts = qc_alloc((size_t)s->n_matrices, sizeof *s->counts);
    if (!s->squares || !s->counts)
        return qc_fail_nomem(err, "importance matrix",
                             (unsigned long long)(s->n_matrices * s->width) * sizeof *s->squares);
    for (int64_t i = 0; i < s->n_matrices; i++) {
        int64_t tokens;
        QC_TRY(qc_stats_summary(file, be, (qc_stats_place){layer, stage, i}, s->squares + i * s->width, NULL,
                                NULL, &tokens, err));
        s->counts[i] = (float)tokens;
    }
    return QC_OK;
}

static int gather(const qc_stats_file *file, qc_backend *be, entries *e, qc_err *err)
{
    size_t n_layers = (size_t)file->info.n_layers;
    const qc_family *family = qc_family_find(file->info.family);
    if (!family)
        return qc_fail(err, QC_E_UNSUPPORTED, "statistics of model_type \"%s\", which is not supported",
                       file->info.family);
    e->list = qc_calloc(n_layers * QC_N_SLOTS, sizeof *e->list);
    e->sums = qc_calloc(n_layers * QC_N_STAGES, sizeof *e->sums);
    if (!e->list || !e->sums)
        return qc_fail_nomem(err, "importance matrix", n_layers * QC_N_SLOTS * sizeof *e->list);
    for (int64_t k = 0; k < qc_stats_n_places(&file->info); k++) {
        qc_stats_place place = qc_stats_place_at(&file->info, k);
        if (place.expert > 0)
            continue;
        stage_sums *s = &e->sums[e->n_sums++];
        QC_TRY(read_sums(file, be, place.layer, place.stage, s, err));
        for (const qc_slot *slot = qc_stage_slots(family, place.stage); *slot != QC_N_SLOTS; slot++) {
            entry *x = &e->list[e->n++];
            x->sums = s;
            qc_imatrix_name(place.layer, *slot, x->name);
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

static int put_tensor(qc_gguf_head *head, const char *name, const char *suffix, int64_t width, int64_t n_rows,
                      qc_err *err)
{
    char full[80];
    snprintf(full, sizeof full, "%s%s", name, suffix);
    return qc_gguf_put_tensor(head, full, qc_block_find(QC_BLOCK_F32), n_rows > 1 ? 2 : 1,
                              (int64_t[]){width, n_rows}, err);
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
        const stage_sums *s = e->list[i].sums;
        QC_TRY(put_tensor(head, e->list[i].name, ".in_sum2", s->width, s->n_matrices, err));
        QC_TRY(put_tensor(head, e->list[i].name, ".counts", 1, s->n_matrices, err));
    }
    QC_TRY(qc_gguf_head_finish(head, buf, err));
    for (int64_t i = 0; i < e->n; i++) {
        const stage_sums *s = e->list[i].sums;
        QC_TRY(put_data(buf, s->squares, s->n_matrices * s->width, err));
        QC_TRY(put_data(buf, s->counts, s->n_matrices, err));
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

/* What is known of the inputs of one matrix. */
typedef struct matrix_weights {
    float *weights; /* NULL where there are none */
    int64_t tokens;
} matrix_weights;

struct qc_imatrix {
    int64_t n_layers, n_experts; /* n_experts: at least 1 */
    matrix_weights *matrices;    /* [n_layers, QC_N_SLOTS, n_experts], those of no expert at 0 */
};

static matrix_weights *matrices_of(const qc_imatrix *im, int layer, qc_slot slot)
{
    return im->matrices + ((int64_t)layer * QC_N_SLOTS + (int)slot) * im->n_experts;
}

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

/* The values of a tensor [n_rows, n]; *ret = NULL if the file has none of that name. */
static int find_values(const qc_gguf_file *g, const char *name, const char *suffix, int64_t n, int64_t n_rows,
                       const float **ret, qc_err *err)
{
    char full[80];
    snprintf(full, sizeof full, "%s%s", name, suffix);
    const qc_gguf_tensor *t = qc_gguf_tensor_find(g, full);
    *ret = NULL;
    if (!t)
        return QC_OK;
    int64_t rows = 1;
    for (int d = 1; d < t->n_dims; d++)
        rows *= t->ne[d];
    if (t->ne[0] != n)
        return qc_fail(err, QC_E_INPUT, "%s: %s has %lld values, %lld were expected", g->path, full,
                       (long long)t->ne[0], (long long)n);
    if (rows != n_rows)
        return qc_fail(err, QC_E_INPUT, "%s: %s holds the sums of %lld matrices, %lld were expected", g->path,
                       full, (long long)rows, (long long)n_rows);
    if (t->type->id != QC_BLOCK_F32 || t->offset % sizeof **ret)
        return broken(g, full, err);
    *ret = (const float *)(const void *)(g->data + t->offset);
    return QC_OK;
}

static int take_matrix(const qc_gguf_file *g, const char *name, const float *sums, int64_t n, float count,
                       matrix_weights *ret, qc_err *err)
{
    for (int64_t i = 0; i < n; i++)
        if (!(sums[i] >= 0 && sums[i] <= 3.4e38f))
            return broken(g, name, err);
    if (!(count == 0 || (count >= 1 && count <= 1e18f)))
        return broken(g, name, err);
    if (count == 0)
        return QC_OK;
    ret->weights = qc_alloc((size_t)n, sizeof *ret->weights);
    if (!ret->weights)
        return qc_fail_nomem(err, g->path, (unsigned long long)n * sizeof *ret->weights);
    qc_stats_weights_of_sums(sums, n, (double)count, ret->weights);
    ret->tokens = (int64_t)count;
    return QC_OK;
}

/* The matrices of one name. */
static int read_slot(const qc_gguf_file *g, const qc_imatrix *im, int layer, qc_slot slot, int64_t n,
                     int64_t *n_found, qc_err *err)
{
    char name[64];
    const float *sums, *counts;
    int64_t n_matrices = slot < QC_SLOT_FIRST_IN_EXPERT ? 1 : im->n_experts;
    matrix_weights *matrices = matrices_of(im, layer, slot);
    qc_imatrix_name(layer, slot, name);
    QC_TRY(find_values(g, name, ".in_sum2", n, n_matrices, &sums, err));
    QC_TRY(find_values(g, name, ".counts", 1, n_matrices, &counts, err));
    if (!sums && !counts)
        return QC_OK;
    if (!sums || !counts)
        return broken(g, name, err);
    for (int64_t i = 0; i < n_matrices; i++) {
        QC_TRY(take_matrix(g, name, sums + i * n, n, counts[i], &matrices[i], err));
        *n_found += matrices[i].weights != NULL;
    }
    return QC_OK;
}

static int read_all(const qc_gguf_file *g, const qc_model *model, qc_imatrix *im, qc_err *err)
{
    const qc_model_config *c = &model->config;
    int64_t n_found = 0;
    QC_TRY(check_kind(g, err));
    for (int layer = 0; layer < (int)im->n_layers; layer++)
        for (int stage = 0; stage < QC_N_STAGES; stage++) {
            const qc_slot *slot = qc_stage_slots(c->family, (qc_stage)stage);
            for (; qc_stage_present(c, layer, (qc_stage)stage) && *slot != QC_N_SLOTS; slot++)
                QC_TRY(read_slot(g, im, layer, *slot, qc_stage_width(c, (qc_stage)stage), &n_found, err));
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
    im->n_layers = model->config.n_layers;
    im->n_experts = qc_max_i64(1, model->config.n_experts);
    size_t n = (size_t)(im->n_layers * QC_N_SLOTS * im->n_experts);
    im->matrices = qc_calloc(n, sizeof *im->matrices);
    if (!im->matrices) {
        qc_imatrix_close(im);
        return qc_fail_nomem(err, path, n * sizeof *im->matrices);
    }
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
    for (int64_t i = 0; im->matrices && i < im->n_layers * QC_N_SLOTS * im->n_experts; i++)
        qc_free(im->matrices[i].weights);
    qc_free(im->matrices);
    qc_free(im);
}

const float *qc_imatrix_weights(const qc_imatrix *im, int layer, qc_slot slot, int64_t expert)
{
    return matrices_of(im, layer, slot)[expert].weights;
}

int64_t qc_imatrix_tokens(const qc_imatrix *im, int layer, qc_slot slot, int64_t expert)
{
    return matrices_of(im, layer, slot)[expert].tokens;
}
