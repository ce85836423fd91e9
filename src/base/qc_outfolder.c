#include "qc_outfolder.h"

#include "qc_alloc.h"
#include "qc_file_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

struct qc_outfolder {
    char *path;
    char *temp_path;
    bool force;
    int fd; /* of the temporary folder; holds a lock (flock) as long as it is being written */
    int slot;
};

/* Remove a folder of plain files. */
static void remove_folder(const char *path)
{
    DIR *dir = opendir(path);
    if (!dir)
        return;
    for (struct dirent *e; (e = readdir(dir));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            unlinkat(dirfd(dir), e->d_name, 0);
    closedir(dir);
    rmdir(path);
}

/* Plain files only, config.json among them (or nothing at all)? */
static bool is_model_folder(const char *path)
{
    DIR *dir = opendir(path);
    if (!dir)
        return false;
    bool plain = true, config = false, any = false;
    for (struct dirent *e; plain && (e = readdir(dir));) {
        struct stat st;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        any = true;
        config = config || strcmp(e->d_name, "config.json") == 0;
        plain = fstatat(dirfd(dir), e->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode);
    }
    closedir(dir);
    return plain && (config || !any);
}

int qc_outfolder_check(const char *path, bool force, qc_err *err)
{
    struct stat st;
    if (*qc_path_base(path) == 0 || strcmp(qc_path_base(path), ".") == 0 ||
        strcmp(qc_path_base(path), "..") == 0)
        return qc_fail(err, QC_E_USAGE, "'%s': a name for a new folder was expected, without a slash behind",
                       path);
    if (!qc_path_exists(path))
        return QC_OK;
    if (!force)
        return qc_fail(err, QC_E_USAGE, "%s: exists already (--force replaces it)", path);
    if (lstat(path, &st) != 0 || !S_ISDIR(st.st_mode) || !is_model_folder(path))
        return qc_fail(err, QC_E_USAGE,
                       "%s: is no folder of plain files with a config.json, and only such are replaced",
                       path);
    return QC_OK;
}

/* The lock of a process that ended, however it ended, is gone: what it left is removed. */
static void remove_stale(const char *folder, const char *base)
{
    DIR *dir = opendir(folder);
    if (!dir)
        return;
    for (struct dirent *e; (e = readdir(dir));) {
        if (!qc_is_temp_name(e->d_name, base))
            continue;
        int fd = openat(dirfd(dir), e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0)
            continue;
        char *path = flock(fd, LOCK_EX | LOCK_NB) == 0 ? qc_path_join(folder, e->d_name) : NULL;
        if (path)
            remove_folder(path);
        qc_free(path);
        close(fd);
    }
    closedir(dir);
}

/* -1 and errno on failure. Somebody who looks for stale folders may lock and remove it between the steps. */
static int create_locked(const char *path)
{
    for (int attempt = 0; attempt < 16; attempt++) {
        if (mkdir(path, 0777) != 0)
            return -1;
        int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0)
            continue;
        if (qc_lock_new(fd, path))
            return fd;
    }
    errno = EBUSY;
    return -1;
}

static void outfolder_free(qc_outfolder *out)
{
    if (out->fd >= 0)
        close(out->fd);
    qc_temps_drop(out->slot);
    qc_free(out->path);
    qc_free(out->temp_path);
    qc_free(out);
}

int qc_outfolder_open(const char *path, bool force, qc_outfolder **ret, qc_err *err)
{
    QC_TRY(qc_outfolder_check(path, force, err));
    char *folder = qc_path_dir(path);
    qc_outfolder *out = qc_calloc(1, sizeof *out);
    if (!out || !folder) {
        qc_free(folder);
        qc_free(out);
        return qc_fail_nomem(err, path, sizeof *out);
    }
    int rc = QC_OK;
    *out = (qc_outfolder){.fd = -1, .slot = -1, .force = force, .path = qc_strdup(path)};
    out->temp_path = qc_asprintf("%s/.%s.tmp-%ld", folder, qc_path_base(path), (long)getpid());
    if (!out->path || !out->temp_path)
        rc = qc_fail_nomem(err, path, strlen(path));
    if (rc == QC_OK) {
        remove_stale(folder, qc_path_base(path));
        out->fd = create_locked(out->temp_path);
        if (out->fd < 0)
            rc = qc_fail(err, QC_E_RESOURCE, "%s: can not create: %s", path,
                         errno == EEXIST ? "it is being written already" : strerror(errno));
    }
    qc_free(folder);
    if (rc < 0) {
        outfolder_free(out);
        return rc;
    }
    out->slot = qc_temps_add(out->temp_path);
    *ret = out;
    return QC_OK;
}

int qc_outfolder_file(qc_outfolder *out, const char *name, qc_outfile **ret, qc_err *err)
{
    char *path = qc_path_join(out->temp_path, name);
    int rc = path ? qc_outfile_open(path, false, ret, err) : qc_fail_nomem(err, name, strlen(name));
    qc_free(path);
    return rc;
}

int qc_outfolder_write(qc_outfolder *out, const char *name, const void *data, size_t n_bytes, qc_err *err)
{
    char *path = qc_path_join(out->temp_path, name);
    int rc = path ? qc_file_write(path, false, data, n_bytes, err) : qc_fail_nomem(err, name, strlen(name));
    qc_free(path);
    return rc;
}

const char *qc_outfolder_temp_path(const qc_outfolder *out)
{
    return out->temp_path;
}

/* Put the temporary folder in the place of one that is there; that one then has the temporary name. */
static int exchange(const char *temp, const char *path, qc_err *err)
{
    QC_TRY(qc_outfolder_check(path, true, err));
    if (renameat2(AT_FDCWD, temp, AT_FDCWD, path, RENAME_EXCHANGE) == 0) {
        remove_folder(temp);
        return QC_OK;
    }
    if (errno != EINVAL) /* else a file system without that flag: not atomic there */
        return qc_fail(err, QC_E_RESOURCE, "%s: rename failed: %s", path, strerror(errno));
    remove_folder(path);
    return qc_rename_output(temp, path, false, err);
}

int qc_outfolder_commit(qc_outfolder *out, const char *other_path, qc_err *err)
{
    const char *path = other_path ? other_path : out->path;
    int rc = QC_OK;
    if (fsync(out->fd) != 0)
        rc = qc_fail(err, QC_E_RESOURCE, "%s: fsync failed: %s", out->path, strerror(errno));
    if (rc == QC_OK && (out->force || other_path) && qc_path_exists(path))
        rc = exchange(out->temp_path, path, err);
    else if (rc == QC_OK)
        rc = qc_rename_output(out->temp_path, path, false, err);
    if (rc == QC_OK)
        qc_folder_sync(path);
    else
        remove_folder(out->temp_path);
    outfolder_free(out);
    return rc;
}

void qc_outfolder_discard(qc_outfolder *out)
{
    if (!out)
        return;
    remove_folder(out->temp_path);
    outfolder_free(out);
}
