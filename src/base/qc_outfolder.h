/* Outputs that are folders of plain files: like qc_outfile, they appear whole or not at all. */
#ifndef QC_OUTFOLDER_H
#define QC_OUTFOLDER_H

#include "qc_file.h"

typedef struct qc_outfolder qc_outfolder;

/* May an output folder become `path`? QC_E_USAGE if something is there and !force, or if it is no folder of
 * plain files with a config.json: --force replaces models, nothing else. */
int qc_outfolder_check(const char *path, bool force, qc_err *err) QC_WARN_UNUSED;

/* Start a folder that will become `path`. Errors as qc_outfile_open. */
int qc_outfolder_open(const char *path, bool force, qc_outfolder **ret, qc_err *err) QC_WARN_UNUSED;

/* Start / write a file of the folder; it must be committed or discarded before the folder is. */
int qc_outfolder_file(qc_outfolder *out, const char *name, qc_outfile **ret, qc_err *err) QC_WARN_UNUSED;
int qc_outfolder_write(qc_outfolder *out, const char *name, const void *data, size_t n_bytes,
                       qc_err *err) QC_WARN_UNUSED;

/* The temporary folder, valid until commit or discard. */
const char *qc_outfolder_temp_path(const qc_outfolder *out);

/* fsync, rename to the final path, free, also on failure (the temporary folder is then removed). With force
 * what was there is exchanged for it and then removed. With other_path the output gets that name instead,
 * replacing what is there if qc_outfolder_check with force would permit it. */
int qc_outfolder_commit(qc_outfolder *out, const char *other_path, qc_err *err) QC_WARN_UNUSED;

/* Remove everything and free. NULL is fine. */
void qc_outfolder_discard(qc_outfolder *out);

#endif
