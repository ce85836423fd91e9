/* Files: read-only mappings, whole-file reads, outputs that appear whole or not at all.
 *
 * An output is written under a temporary name in the target folder and renamed by qc_outfile_commit() after
 * fsync. Temporary names are registered, so that a second SIGINT (which ends the process at once) still
 * removes them. A writer holds a lock on its temporary file; files without one were left by a process that
 * was killed and are removed when the same target is opened next. */
#ifndef QC_FILE_H
#define QC_FILE_H

#include "qc_err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- reading ---- */

typedef struct qc_mapped {
    const uint8_t *data; /* NULL for an empty file */
    size_t n_bytes;
} qc_mapped;

/* Map a regular file read-only. QC_E_INPUT: missing, unreadable, not a regular file. */
int qc_file_map(const char *path, qc_mapped *ret, qc_err *err) QC_WARN_UNUSED;
void qc_file_unmap(qc_mapped *map);

/* Give the pages that lie wholly inside [offset, offset + n_bytes) back; the next access reads them again.
 * Keeps peak memory at what is in use although whole files are mapped. */
void qc_mapped_release(const qc_mapped *map, size_t offset, size_t n_bytes);

/* A touched page brings its neighbours along: those of its large folio (aligned in the file, up to 2 MB) or
 * of the window that the kernel maps around a fault. Rows that are read map at most QC_MAPPED_AROUND_BYTES
 * more. */
enum { QC_FOLIO_BYTES = 2 << 20, QC_FAULT_WINDOW_BYTES = 64 << 10 };
enum { QC_MAPPED_AROUND_BYTES = 2 * (QC_FOLIO_BYTES + QC_FAULT_WINDOW_BYTES) };

/* The same with a margin: pages around that came along when these were touched go as well. */
void qc_mapped_release_around(const qc_mapped *map, size_t offset, size_t n_bytes);

/* Whole file into an owned, NUL-terminated buffer (qc_free). QC_E_INPUT if over max_bytes, which bounds what
 * a hostile path can make us allocate. "-" is not special. */
int qc_file_read(const char *path, size_t max_bytes, char **ret_text, size_t *ret_bytes,
                 qc_err *err) QC_WARN_UNUSED;

/* Is there anything of that name (a dangling link counts) / a folder, links followed? */
bool qc_path_exists(const char *path);
bool qc_path_is_dir(const char *path);

/* Do both paths name the same file or folder (device and inode; false if either is missing)? */
bool qc_path_same(const char *a, const char *b);

/* Would an output under one of these names replace that under the other: the same name in the same folder,
 * however it is spelled? Neither has to exist. */
bool qc_path_same_entry(const char *a, const char *b);

/* folder + "/" + name, owned; name alone if it is absolute or folder is "" or NULL. NULL when out of memory.
 */
char *qc_path_join(const char *folder, const char *name);

/* Folder part of a path ("." if it has none), owned. NULL when out of memory. */
char *qc_path_dir(const char *path);

/* Last component of a path; points into it. */
const char *qc_path_base(const char *path);

/* Bytes free for an ordinary user on the file system of `path` (which must exist); UINT64_MAX if unknown. */
uint64_t qc_disk_free_bytes(const char *path);

/* Size of a file, or of all plain files that stand directly in a folder. QC_E_RESOURCE. */
int qc_path_bytes(const char *path, uint64_t *ret_bytes, qc_err *err) QC_WARN_UNUSED;

/* Are both paths, which must exist, on one file system? */
bool qc_path_same_disk(const char *a, const char *b);

/* ---- writing ---- */

typedef struct qc_outfile qc_outfile;

/* May an output become `path`? QC_E_USAGE if the path exists and !force, or names what is no file: a folder,
 * a device, a pipe (also at the end of a link), which a rename would do away with. */
int qc_outfile_check(const char *path, bool force, qc_err *err) QC_WARN_UNUSED;

/* Start an output that will become `path`. QC_E_USAGE as qc_outfile_check;
 * QC_E_RESOURCE if the folder is missing or not writable, or another writer has the same output open. */
int qc_outfile_open(const char *path, bool force, qc_outfile **ret, qc_err *err) QC_WARN_UNUSED;

/* Append bytes / write at an absolute offset (the file grows as needed). QC_E_RESOURCE on any I/O error. */
int qc_outfile_write(qc_outfile *out, const void *data, size_t n_bytes, qc_err *err) QC_WARN_UNUSED;
int qc_outfile_pwrite(qc_outfile *out, const void *data, size_t n_bytes, uint64_t offset,
                      qc_err *err) QC_WARN_UNUSED;

/* Where the next qc_outfile_write goes = bytes appended so far. */
uint64_t qc_outfile_offset(const qc_outfile *out);

/* Name of the temporary file, valid until commit or discard: what verification reads back. */
const char *qc_outfile_temp_path(const qc_outfile *out);

/* fsync the file under its temporary name (written data are on disk, name not yet final). */
int qc_outfile_sync(qc_outfile *out, qc_err *err) QC_WARN_UNUSED;

/* fsync, rename to the final path, fsync the folder, free. Without force a file that appeared there meanwhile
 * is left alone (QC_E_USAGE). With other_path the output gets that name instead, replacing what is there. On
 * failure the temporary file is removed and out is freed too. */
int qc_outfile_commit(qc_outfile *out, const char *other_path, qc_err *err) QC_WARN_UNUSED;

/* fsync the folder that holds `path`, so that a name made there survives a power cut; as far as the file
 * system does that. */
void qc_folder_sync(const char *path);

/* Remove the temporary file and free. NULL is fine. */
void qc_outfile_discard(qc_outfile *out);

/* Write a small file whole (open, write, commit). */
int qc_file_write(const char *path, bool force, const void *data, size_t n_bytes, qc_err *err) QC_WARN_UNUSED;

/* Where scratch files go: `folder`, where that is NULL $TMPDIR, then /tmp. Not owned. */
const char *qc_scratch_folder(const char *folder);

/* Unnamed scratch file in qc_scratch_folder(folder): gone when closed, whatever happens. *ret_fd is
 * the caller's. */
int qc_scratch_open(const char *folder, int *ret_fd, qc_err *err) QC_WARN_UNUSED;

/* ---- interrupts ---- */

/* Install handlers: the first SIGINT, SIGTERM or SIGHUP (that one not where it is ignored, as under nohup)
 * sets a flag, the second removes temporary files and ends the process with 128 + n; a mapped input that
 * shrinks (SIGBUS) ends it with one line and 3; closed pipes and file size limits become write errors. Called
 * once by each program. */
void qc_signals_install(void);

/* Number of the signal that asked to stop, 0 if none: long loops poll it and return QC_E_INTERRUPTED through
 * qc_check_interrupt(). */
int qc_interrupted(void);
int qc_check_interrupt(qc_err *err) QC_WARN_UNUSED;

#endif
