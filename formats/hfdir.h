/* Hugging Face checkpoint folder: config.json, one or several safetensors files, side files. */
#ifndef QC_HFDIR_H
#define QC_HFDIR_H

#include "qc_source.h"

/* Open a folder. The index, when there is one, decides which shards belong to the model. Warnings (stray
 * files, index and headers that disagree) go to qc_log. */
int qc_hfdir_open(const char *path, qc_source **ret, qc_err *err) QC_WARN_UNUSED;

#endif
