#include "given_stats.h"

#include "imatrix.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_math.h"
#include "stats_internal.h"

#include <string.h>

struct qc_given_stats {
    qc_stats_file *file; /* this */
    qc_imatrix *imatrix; /* or this */
    int64_t widths[QC_N_STAGES];
};

/* What a file is, by its first bytes; one that can not be read is left to the reader of statistics. */
static bool is_gguf(const char *path)
{
    qc_mapped map;
    if (qc_file_map(path, &map, NULL) < 0)
        return false;
    bool ret = map.n_bytes >= 4 && memcmp(map.data, "GGUF", 4) == 0;
    qc_file_unmap(&map);
    return ret;
}

int qc_given_stats_open(const char *path, const qc_model *model, qc_given_stats **ret, qc_err *err)
{
    qc_given_stats *g = qc_calloc(1, sizeof *g);
    if (!g)
        return qc_fail_nomem(err, path, sizeof *g);
    for (int s = 0; s < (model->config.n_experts ? QC_N_STAGES : QC_N_DENSE_STAGES); s++)
        g->widths[s] = qc_stage_width(&model->config, (qc_stage)s);
    int rc = QC_OK;
    if (is_gguf(path))
        rc = qc_imatrix_open(path, model, &g->imatrix, err);
    else if ((rc = qc_stats_open(path, &g->file, err)) == QC_OK)
        rc = qc_stats_check_model(g->file, model, NULL, err);
    if (rc < 0)
        qc_given_stats_close(g);
    else
        *ret = g;
    return rc;
}

void qc_given_stats_close(qc_given_stats *given)
{
    if (!given)
        return;
    qc_stats_close(given->file);
    qc_imatrix_close(given->imatrix);
    qc_free(given);
}

const qc_stats_info *qc_given_stats_info(const qc_given_stats *given)
{
    return given->file ? qc_stats_of(given->file) : NULL;
}

int qc_given_stats_check(const qc_given_stats *given, const qc_model *model, const char (*digests)[65],
                         qc_err *err)
{
    char sha256[65];
    if (!given->file)
        return QC_OK;
    QC_TRY(qc_stats_model_sha256_of(digests, model->src->n_files, sha256, err));
    return qc_stats_check_model(given->file, model, sha256, err);
}

/* The diagonal as one part of the tree of sums, so that all of hessian.h holds for it. */
static int append_diagonal(const qc_imatrix *im, qc_stats_place place, qc_slot slot, qc_hessian *hs,
                           qc_err *err)
{
    qc_backend *be = hs->be;
    int64_t n = hs->n, n_elems = n * (n + 1) / 2,
            n_tokens = qc_imatrix_tokens(im, place.layer, slot, place.expert);
    const float *weights = qc_imatrix_weights(im, place.layer, slot, place.expert);
    qc_hessian_part part = {.n_tokens = qc_max_i64(n_tokens, 1)};
    while ((int64_t)QC_HESSIAN_BLOCK << part.level < part.n_tokens)
        part.level++;
    float *values = qc_calloc((size_t)n_elems, sizeof *values);
    if (!values)
        return qc_fail_nomem(err, "statistics", (unsigned long long)n_elems * sizeof *values);
    int rc = (part.h = be->alloc(be, n_elems, err)) && (part.sum_abs = be->alloc(be, n, err)) ? QC_OK
                                                                                              : QC_E_RESOURCE;
    if (rc == QC_OK)
        rc = be->upload(be, part.sum_abs, values, n, err); /* zeros: not known, and not used */
    for (int64_t i = 0; i < n; i++)
        values[i * (i + 1) / 2 + i] = weights ? weights[i] * (float)part.n_tokens : 1;
    if (rc == QC_OK)
        rc = be->upload(be, part.h, values, n_elems, err);
    qc_free(values);
    if (rc < 0) {
        be->free(be, part.h);
        be->free(be, part.sum_abs);
        return rc;
    }
    QC_TRY(qc_hessian_append(hs, &part, err));
    hs->n_tokens = n_tokens;
    return QC_OK;
}

int qc_given_stats_load(const qc_given_stats *given, qc_backend *be, qc_stats_place place, qc_slot slot,
                        qc_hessian *hs, const float **ret_h, qc_err *err)
{
    const float *sum_abs;
    if (given->file) {
        QC_TRY(qc_stats_init(qc_stats_of(given->file), place, be, hs, err));
        QC_TRY(qc_stats_append(given->file, place, hs, err));
    } else {
        QC_TRY(qc_hessian_init(hs, be, given->widths[place.stage], 0, err));
        QC_TRY(append_diagonal(given->imatrix, place, slot, hs, err));
    }
    return qc_hessian_finish(hs, ret_h, &sum_abs, err);
}

uint64_t qc_given_stats_bytes(const qc_given_stats *given)
{
    uint64_t most = 0;
    for (int64_t k = 0; k < (given->file ? qc_stats_n_places(&given->file->info) : QC_N_STAGES); k++) {
        uint64_t n = given->file ? 0 : (uint64_t)given->widths[k];
        /* a record as it is stored, put in order, and its parts; or the last part and H */
        uint64_t bytes = given->file ? 3 * given->file->records[k].raw_bytes : 6 * n * n;
        most = bytes > most ? bytes : most;
    }
    return most;
}
