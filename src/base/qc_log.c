#include "qc_log.h"

#include <stdarg.h>
#include <stdio.h>

static qc_log_level max_level = QC_LOG_WARN;
static const char *program = "qconvert";
static void (*hook)(void);

void qc_log_set_level(qc_log_level level)
{
    max_level = level;
}

qc_log_level qc_log_get_level(void)
{
    return max_level;
}

void qc_log_set_program(const char *name)
{
    program = name;
}

void qc_log_set_hook(void (*before_line)(void))
{
    hook = before_line;
}

void qc_log(qc_log_level level, const char *fmt, ...)
{
    if (level > max_level)
        return;
    char line[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    if (hook)
        hook();
    char shown[2048];
    qc_one_line(shown, sizeof shown, line);
    fprintf(stderr, "%s: %s%s\n", program, level == QC_LOG_WARN ? "warning: " : "", shown);
}
