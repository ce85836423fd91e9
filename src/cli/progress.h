/* One progress line on stderr: what is done, how far, time left. Shown only where somebody sees it: stderr is
 * a terminal and this process is in its foreground; not in the first second, at most six times a second. Main
 * thread only. */
#ifndef QC_CLI_PROGRESS_H
#define QC_CLI_PROGRESS_H

typedef enum { QC_PROGRESS_AUTO = 0, QC_PROGRESS_NEVER, QC_PROGRESS_ALWAYS } qc_progress_mode;

/* ALWAYS drops the conditions about terminal and foreground, not those about time. */
void qc_progress_set_mode(qc_progress_mode mode);

/* Start a stage of `total` units of work (> 0); ends the one before. `what` is borrowed. */
void qc_progress_begin(const char *what, double total);

/* Units done so far in this stage. Cheap: call it as often as you like. */
void qc_progress_update(double done);

/* The same in the form that the libraries call; ctx is not used. */
void qc_progress_callback(void *ctx, double done);

/* Wipe the line. Harmless when nothing is shown. */
void qc_progress_end(void);

#endif
