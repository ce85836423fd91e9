/* Axes of a plot: values to pixels, ticks at round values. */
#ifndef QC_PLOT_AXIS_H
#define QC_PLOT_AXIS_H

#include "report_internal.h"

#include <stdbool.h>

typedef struct qc_axis {
    double lo, hi;   /* of the data; of their log10 with log */
    double from, to; /* pixels of lo and hi */
    bool log;
    double step; /* between ticks */
} qc_axis;

/* Axis over values lo .. hi (finite, with log > 0) with about n_ticks ticks; the ends are moved out to ticks.
 */
qc_axis qc_axis_make(double lo, double hi, bool log, int n_ticks, double from, double to);

/* Pixel of a value; values outside are put at the end. */
double qc_axis_at(const qc_axis *axis, double value);

/* Lines across and labels of a vertical axis (x0 .. x1 is the plot's width) / labels below a horizontal one.
 * `scale` divides the values of the labels. */
void qc_axis_put_y(qc_out *out, const qc_axis *axis, double x0, double x1);
void qc_axis_put_x(qc_out *out, const qc_axis *axis, double y, double scale);

#endif
