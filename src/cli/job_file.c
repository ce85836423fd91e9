#include "job_file.h"

#include "job_calib.h"
#include "job_report.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_sha256.h"
#include "qc_time.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

int qc_job_begin_file(const job *j, const output *o, qc_writer *writer, qc_err *err)
{
    static const char *const names[] = {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "special_tokens_map.json", "chat_template.jinja",
        /* only folders have them: other programs may look for them */
        "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "preprocessor_config.json"};
    const size_t n_names = o->format->extension ? 6 : sizeof names / sizeof names[0];
    for (size_t i = 0; i < n_names; i++) {
        char *text = NULL;
        size_t n_bytes = 0;
        QC_TRY(j->src->side_file(j->src, names[i], &text, &n_bytes, err));
        int rc = text ? writer->add_file(writer, names[i], text, n_bytes, err) : QC_OK;
        qc_free(text);
        QC_TRY(rc);
    }
    if (!j->source_sha256)
        return qc_convert_metadata(&j->model.config, writer, err);
    char *manifest = qc_job_embedded_manifest(j, o);
    if (!manifest)
        return qc_fail_nomem(err, "manifest", 4096);
    int rc = writer->add_file(writer, "manifest.json", manifest, strlen(manifest), err);
    qc_free(manifest);
    return rc == QC_OK ? qc_convert_metadata(&j->model.config, writer, err) : rc;
}

int qc_job_begin_output(const job *j, const output *o, bool count, qc_writer **ret, uint64_t *ret_bytes,
                        qc_err *err)
{
    qc_writer *writer;
    qc_writer_options options = {.path = o->emit->path,
                                 .type = o->emit->type,
                                 .count = count,
                                 .force = j->options->force,
                                 .shard_bytes = o->emit->shard_bytes};
    QC_TRY(o->format->create(&options, &writer, err));
    int rc = qc_job_begin_file(j, o, writer, err);
    if (rc == QC_OK)
        rc = qc_convert_declare(&o->plan, &j->model, qc_job_journal(j, o), writer, ret_bytes, err);
    if (rc == QC_OK)
        *ret = writer;
    else
        qc_writer_discard(writer);
    return rc;
}

/* ---- what was written ---- */

static int by_name(const void *a, const void *b)
{
    const qc_artifact_file *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static int add_file(output *o, const char *folder, const char *name, qc_err *err)
{
    char *path = qc_asprintf("%s/%s", folder, name);
    size_t n = (size_t)o->n_files;
    qc_artifact_file *files = qc_realloc(o->files, n * sizeof *files, (n + 1) * sizeof *files);
    if (files)
        o->files = files;
    int rc = path && files ? QC_OK : qc_fail_nomem(err, folder, (n + 1) * sizeof *files);
    if (rc == QC_OK) {
        qc_artifact_file *file = &files[n];
        memcpy(file->name, name, strlen(name) + 1);
        rc = qc_path_bytes(path, &file->n_bytes, err);
        if (rc == QC_OK)
            rc = qc_sha256_file(path, file->sha256, err);
        o->n_files += rc == QC_OK;
    }
    qc_free(path);
    return rc;
}

static int measure_folder(output *o, const char *path, qc_err *err)
{
    DIR *dir = opendir(path);
    if (!dir)
        return qc_fail(err, QC_E_RESOURCE, "%s: %s", path, strerror(errno));
    int rc = QC_OK;
    for (struct dirent *e; rc == QC_OK && (e = readdir(dir));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            rc = add_file(o, path, e->d_name, err);
    closedir(dir);
    if (rc == QC_OK)
        qsort(o->files, (size_t)o->n_files, sizeof *o->files, by_name);
    return rc;
}

int qc_job_measure_artifact(job *j, output *o, const char *path, qc_err *err)
{
    double start = qc_now_seconds();
    QC_TRY(qc_path_bytes(path, &o->n_bytes, err));
    QC_TRY(o->format->extension ? qc_sha256_file(path, o->sha256, err) : measure_folder(o, path, err));
    j->times.hash += qc_now_seconds() - start;
    return QC_OK;
}
