/* What every program does around its job: start-up, common options, the final error line, the exit code. */
#ifndef QC_CLI_MAIN_H
#define QC_CLI_MAIN_H

#include "opt.h"

#include <cjson/cJSON.h>

/* The job of a program. Returns 0, a positive exit code of its own (1: a gate failed or things differ, 6: too
 * many fallbacks) or a QC_E_* code with its message in *err. Prints results on stdout with stdio and need not
 * check the writes. */
typedef int (*qc_main_fn)(const qc_args *args, qc_err *err);

/* Parse the command line, serve --help, --version and --man, set up signals, log, processor mask and
 * progress, run the job, report its error as one line "PROGRAM: error: ..." on stderr, and return the exit
 * code: 128 + n after signal n, 5 if stdout could not be written although the job went well. main() returns
 * it. */
int qc_main(const qc_program *program, int argc, char **argv, qc_main_fn job);

/* Print a document on stdout and delete it. NULL counts as out of memory. */
int qc_print_json(cJSON *doc, qc_err *err) QC_WARN_UNUSED;

/* "0.1.0" and the commit ("0.1.0" again where it was built outside a repository). */
const char *qc_version(void);
const char *qc_version_commit(void);

#endif
