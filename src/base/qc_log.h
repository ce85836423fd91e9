/* Talk on stderr. The only library file that prints; off below the level that a program sets. */
#ifndef QC_LOG_H
#define QC_LOG_H

#include "qc_err.h"

typedef enum {
    QC_LOG_QUIET = -1, /* nothing but errors, which programs print themselves */
    QC_LOG_WARN = 0,
    QC_LOG_INFO = 1,
    QC_LOG_DEBUG = 2
} qc_log_level;

/* Lines above the level are dropped; the default is QC_LOG_WARN. Not for use while other threads log. */
void qc_log_set_level(qc_log_level level);
qc_log_level qc_log_get_level(void);

/* One line "PROGRAM: warning: text"; no newline in fmt. */
void qc_log(qc_log_level level, const char *fmt, ...) QC_PRINTF(2, 3);

/* Name shown in front of every line; borrowed. */
void qc_log_set_program(const char *name);

/* Called before a line is printed, so that a progress line can be wiped; NULL = none. */
void qc_log_set_hook(void (*before_line)(void));

#endif
