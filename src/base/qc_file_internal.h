/* What outputs of one file and outputs of a folder share. */
#ifndef QC_FILE_INTERNAL_H
#define QC_FILE_INTERNAL_H

#include "qc_err.h"

#include <stdbool.h>

/* Register a temporary file or folder for removal by the signal handler; a slot, -1 = the table is full. */
int qc_temps_add(const char *path);
/* -1 is fine. */
void qc_temps_drop(int slot);

/* Is `name` ".BASE.tmp-DIGITS"? */
bool qc_is_temp_name(const char *name, const char *base);

/* Lock what was just created under `path` and opened as fd. False, fd closed: somebody who looks for stale
 * outputs locked and removed it in between, so the name is gone or another's. */
bool qc_lock_new(int fd, const char *path);

/* Rename, but not over something that appeared since the output was opened, unless `replace`. */
int qc_rename_output(const char *from, const char *to, bool replace, qc_err *err) QC_WARN_UNUSED;

#endif
