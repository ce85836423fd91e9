#include "progress.h"

#include "qc_time.h"

#include "qc_log.h"

#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

#define FIRST_SECONDS   1.0
#define BETWEEN_SECONDS (1.0 / 6)

static struct {
    qc_progress_mode mode;
    const char *what; /* NULL: no stage */
    double total;
    double begun; /* seconds: start of the stage */
    double shown; /* seconds: last drawing */
    bool on_screen;
} bar;

static bool visible(void)
{
    if (bar.mode != QC_PROGRESS_AUTO)
        return bar.mode == QC_PROGRESS_ALWAYS;
    return isatty(2) && tcgetpgrp(2) == getpgrp();
}

static void wipe(void)
{
    if (bar.on_screen)
        fputs("\r\033[K", stderr);
    bar.on_screen = false;
}

void qc_progress_set_mode(qc_progress_mode mode)
{
    bar.mode = mode;
}

void qc_progress_begin(const char *what, double total)
{
    wipe();
    qc_log_set_hook(wipe);
    bar.what = what;
    bar.total = total;
    bar.begun = qc_now_seconds();
    bar.shown = 0;
}

void qc_progress_update(double done)
{
    if (!bar.what || bar.mode == QC_PROGRESS_NEVER)
        return;
    double now = qc_now_seconds(), spent = now - bar.begun;
    if (spent < FIRST_SECONDS || now - bar.shown < BETWEEN_SECONDS || !visible())
        return;
    double part = done <= 0 ? 0 : done >= bar.total ? 1 : done / bar.total;
    char left[32] = "";
    if (part > 0.01) {
        long s = (long)(spent * (1 - part) / part + 0.5);
        if (s >= 3600)
            snprintf(left, sizeof left, ", %ld:%02ld:%02ld left", s / 3600, s / 60 % 60, s % 60);
        else
            snprintf(left, sizeof left, ", %ld:%02ld left", s / 60, s % 60);
    }
    fprintf(stderr, "\r%s: %3.0f %%%s\033[K", bar.what, 100 * part, left);
    bar.shown = now;
    bar.on_screen = true;
}

void qc_progress_callback(void *ctx, double done)
{
    (void)ctx;
    qc_progress_update(done);
}

void qc_progress_end(void)
{
    wipe();
    bar.what = NULL;
}
