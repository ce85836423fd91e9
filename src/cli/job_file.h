/* What stands in a packed file beside its tensors. */
#ifndef QC_CLI_JOB_FILE_H
#define QC_CLI_JOB_FILE_H

#include "job_state.h"

/* Begin an output's file: side files of the model, manifest (j->source_sha256 is set), configuration. */
int qc_job_begin_file(const job *j, const output *o, qc_qpk_writer *writer, qc_err *err) QC_WARN_UNUSED;

#endif
