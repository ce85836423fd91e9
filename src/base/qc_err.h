/* Errors: one convention for the whole project.
 *
 * A fallible function returns int: 0 on success, a negative QC_E_* code on failure, and writes one complete
 * line (no full stop, no newline) that names file, tensor or key, what is wrong and what was expected into
 * the caller's qc_err. Outputs are untouched on failure. Libraries never print and never exit; src/cli maps
 * codes to exit codes with qc_exit_code(). */
#ifndef QC_ERR_H
#define QC_ERR_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    QC_OK = 0,
    QC_E_USAGE = -2,       /* bad options, an output exists */
    QC_E_INPUT = -3,       /* a file or value from outside is broken */
    QC_E_UNSUPPORTED = -4, /* well formed, but this program does not do it */
    QC_E_RESOURCE = -5,    /* out of memory or disk, over a cap, I/O error while writing */
    QC_E_INTERRUPTED = -6  /* the user asked to stop (first SIGINT, SIGTERM or SIGHUP) */
};

#define QC_ERR_MSG_BYTES 1024

typedef struct qc_err {
    int code;                   /* QC_OK or the QC_E_* of the failure recorded in msg */
    char msg[QC_ERR_MSG_BYTES]; /* one line of valid UTF-8, NUL-terminated */
} qc_err;

#define QC_WARN_UNUSED            __attribute__((warn_unused_result))
#define QC_PRINTF(fmt_arg, first) __attribute__((format(printf, fmt_arg, first)))

/* Record a failure and return `code`. err may be NULL. The formatted text goes through qc_one_line. */
int qc_fail(qc_err *err, int code, const char *fmt, ...) QC_PRINTF(3, 4);

/* Put "prefix: " before the recorded message (context added while an error travels up); returns err->code
 * (QC_E_INPUT where err is NULL). */
int qc_err_prefix(qc_err *err, const char *fmt, ...) QC_PRINTF(2, 3);

/* qc_fail(QC_E_RESOURCE) for a failed allocation of n_bytes for `what`. */
int qc_fail_nomem(qc_err *err, const char *what, unsigned long long n_bytes);

/* Copy text to dst[cap_bytes] (cap_bytes >= 64) as one line of valid UTF-8: control characters, line
 * separators and bytes that are no UTF-8 become \xNN, so that a hostile name can neither fake a second line
 * nor steer a terminal. What does not fit is left out of the middle ("..."), because the reason stands at the
 * end. */
void qc_one_line(char *dst, size_t cap_bytes, const char *text);

/* Process exit code (design: 0, 2, 3, 4, 5, 128 + number of the signal) of a QC_E_* code. */
int qc_exit_code(int code);

/* Forward a failure to the caller; only where nothing needs cleaning up. */
#define QC_TRY(expr)                                                                                         \
    do {                                                                                                     \
        int qc_try_rc_ = (expr);                                                                             \
        if (qc_try_rc_ < 0)                                                                                  \
            return qc_try_rc_;                                                                               \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
