#include "qc_file.h"

#include "qc_alloc.h"
#include "qc_file_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- reading ---- */

static int open_regular(const char *path, int *ret_fd, struct stat *ret_st, qc_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* NONBLOCK: a FIFO must not hang us */
    if (fd < 0)
        return qc_fail(err, QC_E_INPUT, "%s: %s", path, strerror(errno));
    if (fstat(fd, ret_st) != 0 || !S_ISREG(ret_st->st_mode)) {
        close(fd);
        return qc_fail(err, QC_E_INPUT, "%s: %s", path,
                       S_ISDIR(ret_st->st_mode) ? "is a folder, a file was expected"
                                                : "is not a regular file");
    }
    *ret_fd = fd;
    return QC_OK;
}

int qc_file_map(const char *path, qc_mapped *ret, qc_err *err)
{
    int fd = -1;
    struct stat st;
    QC_TRY(open_regular(path, &fd, &st, err));
    void *p = NULL;
    if (st.st_size > 0)
        p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED)
        return qc_fail(err, QC_E_RESOURCE, "%s: can not map %lld bytes: %s", path, (long long)st.st_size,
                       strerror(errno));
    *ret = (qc_mapped){.data = p, .n_bytes = (size_t)st.st_size};
    return QC_OK;
}

void qc_file_unmap(qc_mapped *map)
{
    if (map && map->data)
        munmap((void *)(uintptr_t)map->data, map->n_bytes);
    if (map)
        *map = (qc_mapped){0};
}

void qc_mapped_release(const qc_mapped *map, size_t offset, size_t n_bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t begin = (offset + page - 1) / page * page;
    size_t end = offset + n_bytes == map->n_bytes ? map->n_bytes : (offset + n_bytes) / page * page;
    if (map->data && begin < end)
        madvise((void *)(uintptr_t)(map->data + begin), end - begin, MADV_DONTNEED);
}

/* Rows read in turn would keep each other's pages alive unless all of them go. Dropping a page that is still
 * in use costs a page fault, no more. */
void qc_mapped_release_around(const qc_mapped *map, size_t offset, size_t n_bytes)
{
    if (n_bytes == 0)
        return;
    size_t folio = QC_FOLIO_BYTES, around = QC_FAULT_WINDOW_BYTES, begin = offset / folio * folio;
    begin = begin < around ? 0 : begin - around;
    size_t end = (offset + n_bytes + folio - 1) / folio * folio + around;
    end = end > map->n_bytes ? map->n_bytes : end;
    qc_mapped_release(map, begin, end - begin);
}

int qc_file_read(const char *path, size_t max_bytes, char **ret_text, size_t *ret_bytes, qc_err *err)
{
    int fd = -1;
    struct stat st;
    QC_TRY(open_regular(path, &fd, &st, err));
    size_t n_bytes = (size_t)st.st_size, done = 0;
    int rc = QC_OK;
    char *text = NULL;
    if (n_bytes > max_bytes) {
        rc = qc_fail(err, QC_E_INPUT, "%s: %zu bytes, limit is %zu", path, n_bytes, max_bytes);
        goto out;
    }
    if (!(text = qc_alloc(n_bytes + 1, 1))) {
        rc = qc_fail_nomem(err, path, n_bytes);
        goto out;
    }
    while (done < n_bytes) {
        ssize_t n = read(fd, text + done, n_bytes - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            rc = qc_fail(err, QC_E_INPUT, "%s: %s", path,
                         n < 0 ? strerror(errno) : "file shrank while it was read");
            goto out;
        }
        done += (size_t)n;
    }
    text[n_bytes] = 0;
    *ret_text = text;
    *ret_bytes = n_bytes;
    text = NULL;
out:
    qc_free(text);
    close(fd);
    return rc;
}

bool qc_path_exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

bool qc_path_is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

bool qc_path_same(const char *a, const char *b)
{
    struct stat sa, sb;
    return stat(a, &sa) == 0 && stat(b, &sb) == 0 && sa.st_dev == sb.st_dev && sa.st_ino == sb.st_ino;
}

bool qc_path_same_entry(const char *a, const char *b)
{
    if (strcmp(qc_path_base(a), qc_path_base(b)) != 0)
        return false;
    char *folder_a = qc_path_dir(a), *folder_b = qc_path_dir(b);
    bool same = strcmp(a, b) == 0 || (folder_a && folder_b && qc_path_same(folder_a, folder_b));
    qc_free(folder_a);
    qc_free(folder_b);
    return same;
}

char *qc_path_join(const char *folder, const char *name)
{
    if (!folder || !*folder || name[0] == '/')
        return qc_strdup(name);
    size_t n = strlen(folder);
    return qc_asprintf("%s%s%s", folder, folder[n - 1] == '/' ? "" : "/", name);
}

char *qc_path_dir(const char *path)
{
    const char *base = qc_path_base(path);
    if (base == path)
        return qc_strdup(".");
    size_t n = (size_t)(base - path) - 1;
    return n == 0 ? qc_strdup("/") : qc_strndup(path, n);
}

const char *qc_path_base(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

bool qc_path_same_disk(const char *a, const char *b)
{
    struct stat sa, sb;
    return stat(a, &sa) == 0 && stat(b, &sb) == 0 && sa.st_dev == sb.st_dev;
}

uint64_t qc_disk_free_bytes(const char *path)
{
    struct statvfs v;
    return statvfs(path, &v) == 0 ? (uint64_t)v.f_bavail * v.f_frsize : UINT64_MAX;
}

int qc_path_bytes(const char *path, uint64_t *ret_bytes, qc_err *err)
{
    struct stat st;
    if (stat(path, &st) != 0)
        return qc_fail(err, QC_E_RESOURCE, "%s: %s", path, strerror(errno));
    DIR *dir = S_ISDIR(st.st_mode) ? opendir(path) : NULL;
    uint64_t n_bytes = dir ? 0 : (uint64_t)st.st_size;
    for (struct dirent *e; dir && (e = readdir(dir));)
        if (fstatat(dirfd(dir), e->d_name, &st, 0) == 0 && S_ISREG(st.st_mode))
            n_bytes += (uint64_t)st.st_size;
    if (dir)
        closedir(dir);
    *ret_bytes = n_bytes;
    return QC_OK;
}

/* ---- writing ---- */

struct qc_outfile {
    char *path;
    char *temp_path;
    bool force;
    int fd; /* holds a lock (flock) as long as the file is being written */
    uint64_t offset;
    int slot; /* in the table of names to remove on a signal, -1 = none */
};

/* Names that the signal handler removes: fixed storage, because a handler may not allocate or lock. A slot is
 * published by setting `used` last. */
#define MAX_TEMPS 64
static struct {
    volatile sig_atomic_t used;
    char path[PATH_MAX];
} temps[MAX_TEMPS];
static pthread_mutex_t temps_lock = PTHREAD_MUTEX_INITIALIZER;

int qc_temps_add(const char *path)
{
    int slot = -1;
    pthread_mutex_lock(&temps_lock);
    for (int i = 0; i < MAX_TEMPS && slot < 0; i++) {
        if (!temps[i].used && strlen(path) < sizeof temps[i].path) {
            memcpy(temps[i].path, path, strlen(path) + 1);
            temps[i].used = 1;
            slot = i;
        }
    }
    pthread_mutex_unlock(&temps_lock);
    return slot;
}

void qc_temps_drop(int slot)
{
    if (slot >= 0)
        temps[slot].used = 0;
}

bool qc_is_temp_name(const char *name, const char *base)
{
    size_t n = strlen(base);
    if (name[0] != '.' || strncmp(name + 1, base, n) != 0 || strncmp(name + 1 + n, ".tmp-", 5) != 0)
        return false;
    const char *digits = name + 1 + n + 5;
    return *digits && digits[strspn(digits, "0123456789")] == 0;
}

/* A writer holds a lock on its temporary file; the lock of a process that ended, however it ended, is gone.
 * (A process id would not do: it means nothing in another container, and comes back.) */
static void remove_if_stale(int folder_fd, const char *name)
{
    int fd = openat(folder_fd, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0)
        unlinkat(folder_fd, name, 0);
    close(fd);
}

static void remove_stale_temps(const char *folder, const char *base)
{
    DIR *dir = opendir(folder);
    if (!dir)
        return;
    for (struct dirent *e; (e = readdir(dir));)
        if (qc_is_temp_name(e->d_name, base))
            remove_if_stale(dirfd(dir), e->d_name);
    closedir(dir);
}

bool qc_lock_new(int fd, const char *path)
{
    struct stat by_name, by_fd;
    bool locked = flock(fd, LOCK_EX | LOCK_NB) == 0 || errno == ENOLCK || errno == EOPNOTSUPP;
    if (locked && stat(path, &by_name) == 0 && fstat(fd, &by_fd) == 0 && by_name.st_ino == by_fd.st_ino)
        return true;
    close(fd);
    return false;
}

/* Create and lock the temporary file; -1 and errno on failure. Somebody who looks for stale files may lock
 * and remove it between the two steps: then the name is gone or another's, and we try again. */
static int create_locked(const char *path)
{
    for (int attempt = 0; attempt < 16; attempt++) {
        int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd < 0)
            return -1;
        if (qc_lock_new(fd, path))
            return fd;
    }
    errno = EBUSY;
    return -1;
}

static void outfile_free(qc_outfile *out)
{
    if (out->fd >= 0)
        close(out->fd);
    qc_temps_drop(out->slot);
    qc_free(out->path);
    qc_free(out->temp_path);
    qc_free(out);
}

int qc_outfile_check(const char *path, bool force, qc_err *err)
{
    struct stat st;
    bool there = stat(path, &st) == 0;
    if (*qc_path_base(path) == 0 || (there && S_ISDIR(st.st_mode)))
        return qc_fail(err, QC_E_USAGE, "'%s': a file name was expected, not a folder", path);
    if (there && !S_ISREG(st.st_mode))
        return qc_fail(err, QC_E_USAGE, "%s: is a device or pipe, a file name was expected", path);
    if (!force && qc_path_exists(path))
        return qc_fail(err, QC_E_USAGE, "%s: exists already (--force replaces it)", path);
    return QC_OK;
}

int qc_outfile_open(const char *path, bool force, qc_outfile **ret, qc_err *err)
{
    QC_TRY(qc_outfile_check(path, force, err));
    int rc = QC_OK;
    char *folder = qc_path_dir(path);
    qc_outfile *out = qc_calloc(1, sizeof *out);
    if (!out || !folder) {
        rc = qc_fail_nomem(err, path, sizeof *out);
        qc_free(folder);
        qc_free(out);
        return rc;
    }
    out->fd = out->slot = -1;
    out->path = qc_strdup(path);
    out->temp_path = qc_asprintf("%s/.%s.tmp-%ld", folder, qc_path_base(path), (long)getpid());
    if (!out->path || !out->temp_path) {
        rc = qc_fail_nomem(err, path, strlen(path));
        goto fail;
    }
    remove_stale_temps(folder, qc_path_base(path));
    out->force = force;
    out->fd = create_locked(out->temp_path);
    if (out->fd < 0) {
        rc = qc_fail(err, QC_E_RESOURCE, "%s: can not create: %s", path,
                     errno == EEXIST ? "it is being written already" : strerror(errno));
        goto fail;
    }
    out->slot = qc_temps_add(out->temp_path);
    qc_free(folder);
    *ret = out;
    return QC_OK;
fail:
    qc_free(folder);
    outfile_free(out);
    return rc;
}

int qc_outfile_pwrite(qc_outfile *out, const void *data, size_t n_bytes, uint64_t offset, qc_err *err)
{
    const char *p = data;
    while (n_bytes > 0) {
        ssize_t n = pwrite(out->fd, p, n_bytes, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return qc_fail(err, QC_E_RESOURCE, "%s: write failed: %s", out->path,
                           n < 0 ? strerror(errno) : "no progress");
        p += n;
        offset += (uint64_t)n;
        n_bytes -= (size_t)n;
    }
    return QC_OK;
}

int qc_outfile_write(qc_outfile *out, const void *data, size_t n_bytes, qc_err *err)
{
    QC_TRY(qc_outfile_pwrite(out, data, n_bytes, out->offset, err));
    out->offset += n_bytes;
    return QC_OK;
}

uint64_t qc_outfile_offset(const qc_outfile *out)
{
    return out->offset;
}

const char *qc_outfile_temp_path(const qc_outfile *out)
{
    return out->temp_path;
}

int qc_outfile_sync(qc_outfile *out, qc_err *err)
{
    if (fsync(out->fd) != 0)
        return qc_fail(err, QC_E_RESOURCE, "%s: fsync failed: %s", out->path, strerror(errno));
    return QC_OK;
}

void qc_folder_sync(const char *path)
{
    char *folder = qc_path_dir(path);
    int fd = folder ? open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        (void)!fsync(fd); /* the rename is done; a file system that can not sync folders is no failure */
        close(fd);
    }
    qc_free(folder);
}

int qc_rename_output(const char *from, const char *to, bool replace, qc_err *err)
{
    int failed = renameat2(AT_FDCWD, from, AT_FDCWD, to, replace ? 0 : RENAME_NOREPLACE);
    if (failed && errno == EINVAL && !replace) { /* a file system without that flag */
        if (qc_path_exists(to))
            errno = EEXIST;
        else
            failed = rename(from, to);
    }
    if (!failed)
        return QC_OK;
    if (errno == EEXIST)
        return qc_fail(err, QC_E_USAGE,
                       "%s: exists already, it appeared during the run (--force replaces it)", to);
    return qc_fail(err, QC_E_RESOURCE, "%s: rename failed: %s", to, strerror(errno));
}

int qc_outfile_commit(qc_outfile *out, const char *other_path, qc_err *err)
{
    const char *path = other_path ? other_path : out->path;
    int rc = qc_outfile_sync(out, err);
    if (rc == QC_OK)
        rc = qc_rename_output(out->temp_path, path, out->force || other_path, err);
    if (rc == QC_OK)
        qc_folder_sync(path);
    else
        unlink(out->temp_path);
    outfile_free(out);
    return rc;
}

void qc_outfile_discard(qc_outfile *out)
{
    if (!out)
        return;
    unlink(out->temp_path);
    outfile_free(out);
}

int qc_file_write(const char *path, bool force, const void *data, size_t n_bytes, qc_err *err)
{
    qc_outfile *out;
    QC_TRY(qc_outfile_open(path, force, &out, err));
    int rc = qc_outfile_write(out, data, n_bytes, err);
    if (rc < 0) {
        qc_outfile_discard(out);
        return rc;
    }
    return qc_outfile_commit(out, NULL, err);
}

const char *qc_scratch_folder(const char *folder)
{
    if (!folder)
        folder = getenv("TMPDIR");
    return folder && *folder ? folder : "/tmp";
}

int qc_scratch_open(const char *folder, int *ret_fd, qc_err *err)
{
    folder = qc_scratch_folder(folder);
    int fd = open(folder, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
    if (fd < 0) { /* a file system without unnamed files */
        char *name = qc_asprintf("%s/qconvert-scratch-XXXXXX", folder);
        if (!name)
            return qc_fail_nomem(err, "scratch file name", PATH_MAX);
        fd = mkstemp(name);
        if (fd >= 0)
            unlink(name);
        qc_free(name);
    }
    if (fd < 0)
        return qc_fail(err, QC_E_RESOURCE, "%s: can not create a scratch file: %s", folder, strerror(errno));
    *ret_fd = fd;
    return QC_OK;
}

/* ---- interrupts ---- */

static volatile sig_atomic_t got_signal;

/* In a signal handler: nothing of libc's folder functions may run. */
static void remove_folder(const char *path)
{
    char entries[4096];
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return;
    for (long n; (n = syscall(SYS_getdents64, fd, entries, sizeof entries)) > 0;)
        for (long at = 0; at < n;) { /* struct linux_dirent64: two u64, then u16 length, u8 type, name */
            uint16_t length;
            memcpy(&length, entries + at + 16, sizeof length);
            unlinkat(fd, entries + at + 19, 0);
            at += length;
        }
    close(fd);
    rmdir(path);
}

static void remove_temps(void)
{
    for (int i = 0; i < MAX_TEMPS; i++)
        if (temps[i].used && unlink(temps[i].path) != 0 && errno == EISDIR)
            remove_folder(temps[i].path);
}

static void on_signal(int sig)
{
    if (!got_signal) {
        got_signal = sig;
        return;
    }
    remove_temps();
    _exit(128 + sig);
}

/* A mapped input that somebody cuts short while we read it ends here: no data to go on with, so say so and
 * leave. */
static void on_bus_error(int sig)
{
    (void)sig;
    static const char text[] = "error: an input file shrank while it was read, or its disk failed\n";
    remove_temps();
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
    _exit(3);
}

void qc_signals_install(void)
{
    struct sigaction sa = {.sa_handler = on_signal};
    sigemptyset(&sa.sa_mask);
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    struct sigaction before;
    if (sigaction(SIGHUP, NULL, &before) == 0 && before.sa_handler != SIG_IGN) /* nohup asked to go on */
        sigaction(SIGHUP, &sa, NULL);
    sa.sa_handler = on_bus_error;
    sigaction(SIGBUS, &sa, NULL);
    signal(SIGPIPE, SIG_IGN); /* a closed pipe or a file over the limit is a write error with a message, */
    signal(SIGXFSZ, SIG_IGN); /* not a silent death */
}

int qc_interrupted(void)
{
    return got_signal;
}

int qc_check_interrupt(qc_err *err)
{
    if (!got_signal)
        return QC_OK;
    return qc_fail(err, QC_E_INTERRUPTED, "interrupted by signal %d", (int)got_signal);
}
