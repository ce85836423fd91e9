#include "plot_axis.h"

#include <math.h>

/* 1, 2 or 5 times a power of ten, at least `least`. */
static double round_step(double least)
{
    double power = pow(10, floor(log10(least)));
    double m = least / power;
    return power * (m <= 1 ? 1 : m <= 2 ? 2 : m <= 5 ? 5 : 10);
}

qc_axis qc_axis_make(double lo, double hi, bool log, int n_ticks, double from, double to)
{
    qc_axis axis = {.log = log, .from = from, .to = to};
    if (log) {
        lo = log10(lo);
        hi = log10(hi);
    }
    lo = fmax(lo, -1e290); /* what a file may hold, but no run makes */
    hi = fmin(hi, 1e290);
    double span = hi - lo, least = fmax(fabs(lo), fabs(hi)) * 1e-6;
    if (!(span > least)) { /* equal values get some room */
        span = log ? 1 : fmax(fabs(hi) * 0.1, 1e-9);
        lo -= span / 2;
        hi += span / 2;
    }
    axis.step = round_step((hi - lo) / n_ticks);
    if (log && axis.step < 1)
        axis.step = 1;
    axis.lo = floor(lo / axis.step + 1e-9) * axis.step;
    axis.hi = ceil(hi / axis.step - 1e-9) * axis.step;
    return axis;
}

double qc_axis_at(const qc_axis *axis, double value)
{
    double v = axis->log ? log10(fmax(value, 1e-300)) : value;
    v = fmin(fmax(v, axis->lo), axis->hi);
    return axis->from + (v - axis->lo) / (axis->hi - axis->lo) * (axis->to - axis->from);
}

static double tick(const qc_axis *axis, int i)
{
    double v = axis->lo + i * axis->step;
    return fabs(v) < axis->step * 1e-6 ? 0 : v;
}

static int n_ticks(const qc_axis *axis)
{
    return (int)lround((axis->hi - axis->lo) / axis->step) + 1;
}

static double tick_pixel(const qc_axis *axis, double v)
{
    return axis->from + (v - axis->lo) / (axis->hi - axis->lo) * (axis->to - axis->from);
}

static void put_label(qc_out *out, const qc_axis *axis, double v, double scale)
{
    if (axis->log && v >= -3 && v <= 3)
        qc_put(out, "%.4g", pow(10, v) / scale);
    else if (axis->log)
        qc_put(out, "10<tspan class=\"up\" dy=\"-4\">%.0f</tspan>", v);
    else
        qc_put(out, "%.5g", v / scale);
}

void qc_axis_put_y(qc_out *out, const qc_axis *axis, double x0, double x1)
{
    for (int i = 0; i < n_ticks(axis); i++) {
        double v = tick(axis, i), y = tick_pixel(axis, v);
        qc_put(out, "<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>", x0, x1, y, y);
        qc_put(out, "<text class=\"tick\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">", x0 - 6, y + 4);
        put_label(out, axis, v, 1);
        qc_put(out, "</text>\n");
    }
}

void qc_axis_put_x(qc_out *out, const qc_axis *axis, double y, double scale)
{
    qc_put(out, "<line class=\"axis\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>", axis->from,
           axis->to, y, y);
    for (int i = 0; i < n_ticks(axis); i++) {
        double v = tick(axis, i), x = tick_pixel(axis, v);
        qc_put(out, "<text class=\"tick\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">", x, y + 17);
        put_label(out, axis, v, scale);
        qc_put(out, "</text>\n");
    }
}
