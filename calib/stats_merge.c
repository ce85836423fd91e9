/* Shards of one corpus to one statistics file. */
#include "stats_internal.h"

#include "qc_alloc.h"

#include <stdlib.h>
#include <string.h>

static int by_first_window(const void *a, const void *b)
{
    const qc_stats_file *x = *(qc_stats_file *const *)a, *y = *(qc_stats_file *const *)b;
    int64_t d = x->info.first_window - y->info.first_window;
    return d < 0 ? -1 : d > 0;
}

static int differ(const qc_stats_file *a, const qc_stats_file *b, const char *what, qc_err *err)
{
    return qc_fail(err, QC_E_INPUT, "%s and %s are of different %s: they can not be merged", a->path, b->path,
                   what);
}

/* b follows a. */
static int check_pair(const qc_stats_file *a, const qc_stats_file *b, qc_err *err)
{
    const qc_stats_info *x = &a->info, *y = &b->info;
    if (strcmp(x->model_sha256, y->model_sha256) != 0 || x->n_layers != y->n_layers ||
        memcmp(x->widths, y->widths, sizeof x->widths) != 0 || x->n_experts != y->n_experts ||
        memcmp(x->sparse, y->sparse, sizeof x->sparse) != 0 || strcmp(x->family, y->family) != 0)
        return differ(a, b, "models", err);
    if (strcmp(x->ids_sha256, y->ids_sha256) != 0 || x->corpus_windows != y->corpus_windows ||
        x->length != y->length)
        return differ(a, b, "corpora", err);
    if (strcmp(x->compute, y->compute) != 0)
        return differ(a, b, "arithmetic", err);
    int64_t end = x->first_window + x->n_windows;
    if (y->first_window < end)
        return qc_fail(err, QC_E_INPUT, "%s and %s both hold window %lld", a->path, b->path,
                       (long long)y->first_window);
    if (y->first_window > end)
        return qc_fail(err, QC_E_INPUT, "windows %lld to %lld are missing between %s and %s", (long long)end,
                       (long long)y->first_window - 1, a->path, b->path);
    return QC_OK;
}

static int merge_record(qc_stats_file *const *files, int n_files, int64_t record, qc_backend *be,
                        qc_stats_writer *w, qc_err *err)
{
    qc_stats_place place = qc_stats_place_at(&files[0]->info, record);
    qc_hessian hs;
    QC_TRY(qc_stats_init(&files[0]->info, place, be, &hs, err));
    int rc = QC_OK;
    for (int i = 0; i < n_files && rc == QC_OK; i++)
        rc = qc_stats_append(files[i], place, &hs, err);
    if (rc == QC_OK)
        rc = qc_stats_put(w, &hs, err);
    qc_hessian_clear(&hs);
    return rc;
}

static int merge(qc_stats_file **files, int n_files, const char *path, bool force, qc_backend *be,
                 qc_err *err)
{
    qsort(files, (size_t)n_files, sizeof(qc_stats_file *), by_first_window);
    qc_stats_info info = files[0]->info;
    for (int i = 1; i < n_files; i++) {
        QC_TRY(check_pair(files[i - 1], files[i], err));
        info.n_windows += files[i]->info.n_windows;
    }
    qc_stats_writer *w;
    QC_TRY(qc_stats_create(path, force, &info, &w, err));
    int rc = QC_OK;
    for (int64_t k = 0; k < qc_stats_n_places(&info) && rc == QC_OK; k++)
        if ((rc = qc_check_interrupt(err)) == QC_OK)
            rc = merge_record(files, n_files, k, be, w, err);
    if (rc == QC_OK)
        return qc_stats_commit(w, err);
    qc_stats_discard(w);
    return rc;
}

int qc_stats_merge(const char *const *paths, int n_paths, const char *path, bool force, qc_backend *be,
                   qc_err *err)
{
    qc_stats_file **files = qc_calloc((size_t)n_paths, sizeof *files);
    if (!files)
        return qc_fail_nomem(err, path, (unsigned long long)n_paths * sizeof *files);
    int rc = n_paths > 0 ? QC_OK : qc_fail(err, QC_E_USAGE, "no statistics files to merge");
    for (int i = 0; i < n_paths && rc == QC_OK; i++)
        rc = qc_stats_open(paths[i], &files[i], err);
    if (rc == QC_OK)
        rc = merge(files, n_paths, path, force, be, err);
    for (int i = 0; i < n_paths; i++)
        qc_stats_close(files[i]);
    qc_free(files);
    return rc;
}
