/* What stands in an output beside its tensors. */
#ifndef QC_CLI_JOB_FILE_H
#define QC_CLI_JOB_FILE_H

#include "job_state.h"

/* Begin an output: side files of the model, manifest (once j->source_sha256 is set), configuration. */
int qc_job_begin_file(const job *j, const output *o, qc_writer *writer, qc_err *err) QC_WARN_UNUSED;

/* Create a writer for an output and take it through its declarations: with `count` to the size of the output,
 * else ready for tensors. On success *ret is the caller's. */
int qc_job_begin_output(const job *j, const output *o, bool count, qc_writer **ret, uint64_t *ret_bytes,
                        qc_err *err) QC_WARN_UNUSED;

/* Size and SHA-256 of what was written under `path`, a file or every file of a folder. Once per output. */
int qc_job_measure_artifact(job *j, output *o, const char *path, qc_err *err) QC_WARN_UNUSED;

#endif
