#include "job_paths.h"

#include "qc_alloc.h"
#include "qc_file.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

/* A name that the job may write. */
typedef struct target {
    const char *what;
    const char *path;
    char *owned; /* where `path` was made here, else NULL */
    bool force;
    const qc_writer_format *format; /* of an artifact, else NULL */
} target;

#define N_REPORTS 5

/* Device and inode decide, whatever a name looks like. */
static int check_no_input(const job *j, const target *t, const char *folder, qc_err *err)
{
    const qc_recipe *r = j->recipe;
    if (qc_path_same(t->path, r->model) || qc_path_same(folder, r->model))
        return qc_fail(err, QC_E_USAGE, "%s: %s would be written into the model %s", t->path, t->what,
                       r->model);
    const char *calibration = r->calibration.text;
    if (calibration && qc_path_same(t->path, calibration))
        return qc_fail(err, QC_E_USAGE, "%s: %s would replace the text to calibrate with", t->path, t->what);
    const char *statistics = r->calibration.statistics;
    if (statistics && qc_path_same(t->path, statistics))
        return qc_fail(err, QC_E_USAGE, "%s: %s would replace the statistics", t->path, t->what);
    if (j->text && qc_path_same(t->path, j->text))
        return qc_fail(err, QC_E_USAGE, "%s: %s would replace the text that is scored", t->path, t->what);
    if (r->file && qc_path_same(t->path, r->file))
        return qc_fail(err, QC_E_USAGE, "%s: %s would replace the recipe", t->path, t->what);
    for (int64_t i = 0; i < j->src->n_files; i++)
        if (qc_path_same(t->path, j->src->files[i]))
            return qc_fail(err, QC_E_USAGE, "%s: %s is a file of the model %s", t->path, t->what, r->model);
    return QC_OK;
}

/* The journal of an earlier run is neither continued nor thrown away unasked. */
static int check_left_over(const job *j, const target *t, qc_err *err)
{
    for (int i = 0; i < j->n_outputs && !j->options->resume && !j->options->force; i++)
        if (t->path == j->outputs[i].journal_path && qc_path_exists(t->path))
            return qc_fail(err, QC_E_USAGE,
                           "%s: is left from a run that did not end (--resume continues it, --force starts "
                           "anew)",
                           t->path);
    return QC_OK;
}

static int check_target(const job *j, const target *t, qc_err *err)
{
    char *folder = qc_path_dir(t->path);
    if (!folder)
        return qc_fail_nomem(err, t->path, strlen(t->path));
    int rc = check_no_input(j, t, folder, err);
    if (rc == QC_OK)
        rc = t->format ? qc_writer_check_path(t->format, t->path, t->force, err)
                       : qc_outfile_check(t->path, t->force, err);
    if (rc == QC_OK)
        rc = check_left_over(j, t, err);
    if (rc == QC_OK && !qc_path_is_dir(folder))
        rc = qc_fail(err, QC_E_RESOURCE, "%s: the folder does not exist, make it first", t->path);
    if (rc == QC_OK && access(folder, W_OK) != 0)
        rc = qc_fail(err, QC_E_RESOURCE, "%s: can not write to the folder: %s", t->path, strerror(errno));
    qc_free(folder);
    return rc;
}

/* Fills targets[3 * n_emit + N_REPORTS], returns how many; -1 when out of memory. */
static int list_targets(const job *j, target *targets)
{
    const qc_recipe *r = j->recipe;
    bool may_be_rejected = r->verify.n_gates > 0 && !j->options->keep_failed;
    int n = 0;
    for (int i = 0; i < r->n_emit; i++) {
        const qc_writer_format *format = j->outputs[i].format;
        targets[n++] = (target){"the artifact", r->emit[i].path, NULL, j->options->force, format};
        if (j->outputs[i].journal_path)
            targets[n++] = (target){"the journal", j->outputs[i].journal_path, NULL, true, NULL};
        if (!may_be_rejected)
            continue;
        char *rejected = qc_asprintf("%s.rejected", r->emit[i].path);
        if (!rejected)
            return -1;
        targets[n++] = (target){"the rejected artifact", rejected, rejected, true, format};
    }
    const target reports[N_REPORTS] = {
        {"the report", r->report.json, NULL, j->options->force, NULL},
        {"the HTML report", r->report.html, NULL, j->options->force, NULL},
        {"the markdown report", r->report.markdown, NULL, j->options->force, NULL},
        {"the JUnit file", r->report.junit, NULL, j->options->force, NULL},
        {"the manifest", r->report.manifest, NULL, j->options->force, NULL}};
    for (int i = 0; i < N_REPORTS; i++)
        if (reports[i].path)
            targets[n++] = reports[i];
    return n;
}

static int check_all(const job *j, const target *targets, int n, qc_err *err)
{
    for (int i = 0; i < n; i++) {
        QC_TRY(check_target(j, &targets[i], err));
        for (int k = 0; k < i; k++)
            if (qc_path_same_entry(targets[i].path, targets[k].path))
                return qc_fail(err, QC_E_USAGE, "%s: named for both %s and %s", targets[i].path,
                               targets[k].what, targets[i].what);
    }
    return QC_OK;
}

int qc_job_check_paths(const job *j, qc_err *err)
{
    size_t most = (size_t)j->recipe->n_emit * 3 + N_REPORTS;
    target *targets = qc_calloc(most, sizeof *targets);
    int n = targets ? list_targets(j, targets) : -1;
    int rc =
        n < 0 ? qc_fail_nomem(err, "output names", most * sizeof *targets) : check_all(j, targets, n, err);
    for (size_t i = 0; targets && i < most; i++)
        qc_free(targets[i].owned);
    qc_free(targets);
    return rc;
}

/* Planned bytes in a folder. */
typedef struct demand {
    char *folder; /* owned */
    uint64_t n_bytes;
} demand;

static int check_room(const demand *demands, int n, qc_err *err)
{
    for (int i = 0; i < n; i++) {
        uint64_t needed = 0, there = qc_disk_free_bytes(demands[i].folder);
        for (int k = 0; k < n; k++)
            if (k == i || qc_path_same_disk(demands[k].folder, demands[i].folder))
                needed += demands[k].n_bytes;
        if (needed > there)
            return qc_fail(err, QC_E_RESOURCE, "%s: %llu MB are needed on disk, %llu MB are free",
                           demands[i].folder, (unsigned long long)(needed / 1000000 + 1),
                           (unsigned long long)(there / 1000000));
    }
    return QC_OK;
}

int qc_job_check_disk(const job *j, qc_err *err)
{
    const char *scratch = qc_scratch_folder(j->recipe->run.scratch);
    if (j->scratch_plan_bytes && !qc_path_is_dir(scratch))
        return qc_fail(err, QC_E_RESOURCE, "%s: the folder for scratch files does not exist", scratch);
    demand *demands = qc_calloc((size_t)j->n_outputs + 1, sizeof *demands);
    bool complete = demands != NULL;
    int n = 0;
    for (; complete && n < j->n_outputs; n++) {
        demands[n] = (demand){qc_path_dir(j->outputs[n].emit->path),
                              j->outputs[n].plan.bytes_out + j->outputs[n].journal_bytes};
        complete = demands[n].folder != NULL;
    }
    if (complete && j->scratch_plan_bytes) {
        demands[n] = (demand){qc_strdup(scratch), j->scratch_plan_bytes};
        complete = demands[n++].folder != NULL;
    }
    int rc =
        complete ? check_room(demands, n, err) : qc_fail_nomem(err, "folders", (size_t)n * sizeof *demands);
    for (int i = 0; i < n; i++)
        qc_free(demands[i].folder);
    qc_free(demands);
    return rc;
}
