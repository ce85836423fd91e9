#include "main.h"

#include "progress.h"
#include "qc_json.h"
#include "qc_alloc.h"
#include "qc_cpu.h"
#include "qc_file.h"
#include "qc_log.h"
#include "version.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

const char *qc_version(void)
{
    return QC_VERSION;
}

const char *qc_version_commit(void)
{
    return QC_VERSION_COMMIT;
}

/* A closed standard stream would give its number to the next file that is opened: fill the gaps, stdout with
 * something that can not be written, so that lost output is still an error. */
static void fill_standard_streams(void)
{
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", fd == 2 ? O_WRONLY : O_RDONLY) < 0)
            _exit(5);
}

static void set_verbosity(const qc_args *args)
{
    int verbose = qc_args_count(args, "verbose");
    if (qc_args_has(args, "quiet"))
        qc_log_set_level(QC_LOG_QUIET);
    else
        qc_log_set_level(verbose >= 2 ? QC_LOG_DEBUG : verbose == 1 ? QC_LOG_INFO : QC_LOG_WARN);
    if (qc_args_has(args, "no-progress") || qc_args_has(args, "quiet"))
        qc_progress_set_mode(QC_PROGRESS_NEVER);
    else if (qc_args_has(args, "progress"))
        qc_progress_set_mode(QC_PROGRESS_ALWAYS);
}

/* --help, --version, --man. */
static int serve(const qc_args *args, qc_err *err)
{
    qc_buf text = {0};
    int rc;
    if (qc_args_has(args, "version"))
        rc =
            qc_buf_printf(&text, err, "%s %s (%s)\n", args->program->name, qc_version(), qc_version_commit());
    else if (qc_args_has(args, "man"))
        rc = qc_opt_man(args->program, qc_version(), &text, err);
    else
        rc = qc_opt_help(args->program, &text, err);
    if (rc == QC_OK)
        fwrite(text.data, 1, text.n_bytes, stdout);
    qc_buf_clear(&text);
    return rc;
}

static int run(const qc_program *program, int argc, char **argv, qc_main_fn job, qc_err *err)
{
    qc_args args;
    QC_TRY(qc_args_parse(program, argc, argv, &args, err));
    int rc;
    set_verbosity(&args);
    if (qc_args_has(&args, "help") || qc_args_has(&args, "version") || qc_args_has(&args, "man")) {
        rc = serve(&args, err);
    } else {
        const char *mask = qc_args_value(&args, "cpu-mask");
        rc = mask ? qc_cpu_set_mask(mask, err) : QC_OK;
        if (rc < 0)
            qc_err_prefix(err, "--cpu-mask");
        else
            rc = job(&args, err);
    }
    qc_args_clear(&args);
    return rc;
}

int qc_print_json(cJSON *doc, qc_err *err)
{
    char *text = doc ? qc_json_print(doc) : NULL;
    cJSON_Delete(doc);
    if (!text)
        return qc_fail(err, QC_E_RESOURCE, "out of memory: json text");
    fputs(text, stdout);
    qc_free(text);
    return QC_OK;
}

/* End the process without exit handlers: OpenBLAS joins its threads in one, and waits for ever for a thread
 * that can not get its memory (ulimit -v). Nothing of ours is open by now. Leak checkers work in such a
 * handler and need exit(). */
static int leave(int code)
{
#ifndef QC_SANITIZED
    _exit(code);
#endif
    return code;
}

/* Output longer than its buffer failed earlier and errno is gone: one more byte fails for the same reason. */
static const char *stdout_failure(void)
{
    clearerr(stdout);
    if (fputc('\n', stdout) != EOF)
        fflush(stdout);
    return errno ? strerror(errno) : "write error";
}

int qc_main(const qc_program *program, int argc, char **argv, qc_main_fn job)
{
    qc_err err = {0};
    fill_standard_streams();
    qc_alloc_return_large();
    qc_signals_install();
    qc_log_set_program(program->name);
    int rc = run(program, argc, argv, job, &err);
    qc_progress_end();
    errno = 0;
    if ((fflush(stdout) != 0 || ferror(stdout)) && (rc >= 0 || rc == QC_E_RESOURCE))
        rc = qc_fail(&err, QC_E_RESOURCE, "stdout: %s", errno ? strerror(errno) : stdout_failure());
    if (rc >= 0)
        return leave(rc);
    fprintf(stderr, "%s: error: %s\n", program->name, err.msg);
    return leave(qc_exit_code(rc));
}
