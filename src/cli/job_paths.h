/* What a job may write. */
#ifndef QC_CLI_JOB_PATHS_H
#define QC_CLI_JOB_PATHS_H

#include "job_state.h"

/* Every name that the job may write must be free or replaceable (--force), in a folder that takes files, no
 * input of the job and no other output. QC_E_USAGE or QC_E_RESOURCE with the name. Needs recipe, options,
 * source and text. */
int qc_job_check_paths(const job *j, qc_err *err) QC_WARN_UNUSED;

/* Is there room for the planned artifacts and the scratch file, each on its own file system? QC_E_RESOURCE.
 */
int qc_job_check_disk(const job *j, qc_err *err) QC_WARN_UNUSED;

#endif
