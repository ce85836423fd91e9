#include "plots.h"

#include "plot_axis.h"

#include <math.h>
#include <string.h>

#define WIDTH      560.0
#define LEFT       64.0
#define RIGHT      20.0
#define MAX_POINTS 512 /* windows drawn one by one; more are put together */

static void begin(qc_out *out, const char *title, const char *what)
{
    qc_put(out, "<figure class=\"plot\">\n<figcaption><b>%s</b> <span>%s</span></figcaption>\n", title, what);
}

static void begin_svg(qc_out *out, const char *label, double height)
{
    qc_put(out, "<div class=\"scroll\"><svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" aria-label=\"%s\">\n",
           WIDTH, height, label);
}

static void end(qc_out *out)
{
    qc_put(out, "</svg></div>\n</figure>\n");
}

static void put_x_title(qc_out *out, const char *text, double y)
{
    qc_put(out, "<text class=\"title\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%s</text>\n",
           (LEFT + WIDTH - RIGHT) / 2, y, text);
}

/* ---- windows ---- */

/* Means of a figure of the windows, several windows to a point where there are many. */
typedef struct points {
    double model[MAX_POINTS], reference[MAX_POINTS];
    int n, per_point;
    bool paired;
} points;

static void collect_windows(const cJSON *list, points *p)
{
    int n = cJSON_GetArraySize(list), i = 0;
    p->per_point = (n + MAX_POINTS - 1) / MAX_POINTS;
    p->paired = true;
    p->n = 0;
    for (const cJSON *w = list->child; w && p->n < MAX_POINTS;) {
        double model = 0, reference = 0;
        for (i = 0; w && i < p->per_point; i++, w = w->next) {
            model += qc_report_number(w, "nll");
            reference += qc_report_number(w, "nll_reference");
        }
        if (!isfinite(model))
            continue;
        p->paired = p->paired && isfinite(reference);
        p->model[p->n] = model / i;
        p->reference[p->n++] = reference / i;
    }
}

static void put_line(qc_out *out, const double *y, int n, const qc_axis *ax, const qc_axis *ay,
                     const char *series)
{
    qc_put(out, "<polyline class=\"line %s\" points=\"", series);
    for (int i = 0; i < n; i++)
        qc_put(out, "%.1f,%.1f ", qc_axis_at(ax, i + 1), qc_axis_at(ay, y[i]));
    qc_put(out, "\"/>\n");
}

static void put_window_dots(qc_out *out, const points *p, const qc_axis *ax, const qc_axis *ay)
{
    for (int i = 0; i < p->n; i++) {
        qc_put(out, "<circle class=\"dot s1\" cx=\"%.1f\" cy=\"%.1f\" r=\"%.1f\"><title>",
               qc_axis_at(ax, i + 1), qc_axis_at(ay, p->model[i]), p->n > 64 ? 1.5 : 3.0);
        qc_put(out, "window %d: %.5f nats", i * p->per_point + 1, p->model[i]);
        if (p->paired)
            qc_put(out, ", reference %.5f, difference %+.5f", p->reference[i], p->model[i] - p->reference[i]);
        qc_put(out, "</title></circle>\n");
    }
}

static void put_differences(qc_out *out, const points *p, const qc_axis *ax, double top, double bottom)
{
    double lo = 0, hi = 0, width = fmin(18, fmax(1, 0.7 * (ax->to - ax->from) / p->n));
    for (int i = 0; i < p->n; i++) {
        lo = fmin(lo, p->model[i] - p->reference[i]);
        hi = fmax(hi, p->model[i] - p->reference[i]);
    }
    qc_axis ay = qc_axis_make(lo, hi, false, 3, bottom, top);
    double zero = qc_axis_at(&ay, 0);
    qc_axis_put_y(out, &ay, LEFT, WIDTH - RIGHT);
    for (int i = 0; i < p->n; i++) {
        double d = p->model[i] - p->reference[i], y = qc_axis_at(&ay, d);
        qc_put(out,
               "<rect class=\"%s\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"><title>window %d: "
               "%+.5f nats</title></rect>\n",
               d > 0 ? "s2" : "s3", qc_axis_at(ax, i + 1) - width / 2, fmin(y, zero), width,
               fmax(0.5, fabs(y - zero)), i * p->per_point + 1, d);
    }
    qc_put(out, "<line class=\"axis\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>\n", LEFT,
           WIDTH - RIGHT, zero, zero);
}

void qc_plot_windows(qc_out *out, const cJSON *evaluation)
{
    points p;
    const cJSON *list = qc_json_get(evaluation, "per_window");
    if (!list || !list->child)
        return;
    collect_windows(list, &p);
    if (p.n == 0)
        return;
    double lo = INFINITY, hi = -INFINITY;
    for (int i = 0; i < p.n; i++) {
        lo = fmin(lo, p.paired ? fmin(p.model[i], p.reference[i]) : p.model[i]);
        hi = fmax(hi, p.paired ? fmax(p.model[i], p.reference[i]) : p.model[i]);
    }
    double inset = fmin(14, 200.0 / p.n);
    qc_axis ax = {.lo = 1, .hi = p.n > 1 ? p.n : 2, .from = LEFT + inset, .to = WIDTH - RIGHT - inset};
    qc_axis ay = qc_axis_make(lo, hi, false, 5, 186, 10);
    begin(out, "NLL per window", "mean negative log-likelihood of a token, nats");
    qc_put(out, "<p class=\"legend\"><span><i class=\"k1\"></i>model</span>%s</p>\n",
           p.paired ? " <span><i class=\"k4\"></i>reference</span> <span><i class=\"k2\"></i>worse than the "
                      "reference</span> <span><i class=\"k3\"></i>better</span>"
                    : "");
    begin_svg(out, "NLL per window", p.paired ? 320 : 226);
    qc_axis_put_y(out, &ay, LEFT, WIDTH - RIGHT);
    if (p.paired)
        put_line(out, p.reference, p.n, &ax, &ay, "s4");
    put_line(out, p.model, p.n, &ax, &ay, "s1");
    put_window_dots(out, &p, &ax, &ay);
    if (p.paired)
        put_differences(out, &p, &ax, 212, 284);
    double y = p.paired ? 284 : 190;
    for (int i = 1, step = p.n > 24 ? (p.n + 11) / 12 : p.n > 12 ? 2 : 1; i <= p.n; i += step)
        qc_put(out, "<text class=\"tick\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%d</text>\n",
               qc_axis_at(&ax, i), y + 17, (i - 1) * p.per_point + 1);
    put_x_title(out, p.paired ? "window (below: difference of the two)" : "window", y + 34);
    end(out);
}

/* ---- KL divergence ---- */

static void put_marker(qc_out *out, const qc_axis *ax, double value, const char *label, double y)
{
    if (!(value > 0))
        return;
    double x = qc_axis_at(ax, value);
    bool left = x > WIDTH - 80;
    qc_put(out, "<line class=\"mark\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"210\"/>", x, x, y - 8);
    qc_put(out, "<text class=\"label\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s %.3g</text>\n",
           x + (left ? -5 : 5), y, left ? "end" : "start", label, value);
}

void qc_plot_kld(qc_out *out, const cJSON *evaluation)
{
    const cJSON *h = qc_json_get(evaluation, "kld_histogram"), *counts = qc_json_get(h, "counts");
    double from = qc_report_number(h, "log10_from"), step = qc_report_number(h, "log10_step"), most = 0,
           all = 0;
    int first = -1, last = -1, i = 0;
    const cJSON *c;
    cJSON_ArrayForEach(c, counts)
    {
        double n = cJSON_IsNumber(c) ? c->valuedouble : 0;
        if (n > 0) {
            first = first < 0 ? i : first;
            last = i;
        }
        most = fmax(most, n);
        all += n;
        i++;
    }
    if (first < 0 || !(step > 0 && step < 10) || !(fabs(from) < 100) || last > 4000)
        return;
    qc_axis ax = {.lo = floor(from + first * step),
                  .hi = ceil(from + (last + 1) * step),
                  .from = LEFT,
                  .to = WIDTH - RIGHT,
                  .log = true,
                  .step = 1};
    qc_axis ay = qc_axis_make(0, 100 * most / all, false, 5, 210, 10);
    begin(out, "KL divergence", "share of the scored positions, %, by KL(reference ‖ model) in nats");
    begin_svg(out, "distribution of the KL divergence", 252);
    qc_axis_put_y(out, &ay, LEFT, WIDTH - RIGHT);
    i = 0;
    cJSON_ArrayForEach(c, counts)
    {
        double n = cJSON_IsNumber(c) ? c->valuedouble : 0, lo = pow(10, from + i * step),
               hi = pow(10, from + (i + 1) * step);
        double x0 = qc_axis_at(&ax, lo), x1 = qc_axis_at(&ax, hi), y = qc_axis_at(&ay, 100 * n / all);
        if (n > 0)
            qc_put(out,
                   "<rect class=\"s1\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"><title>%.2g to "
                   "%.2g nats: %.0f "
                   "positions, %.2f %%</title></rect>\n",
                   x0 + 0.5, y, fmax(0.5, x1 - x0 - 1), 210 - y, lo, hi, n, 100 * n / all);
        i++;
    }
    qc_axis_put_x(out, &ax, 210, 1);
    put_marker(out, &ax, qc_report_number(evaluation, "kld_mean"), "mean", 22);
    put_marker(out, &ax, qc_report_number(evaluation, "kld_p99"), "p99", 38);
    put_x_title(out, "KL divergence of a position, nats", 246);
    end(out);
}

/* ---- errors ---- */

#define MAX_TYPES  24
#define MAX_LAYERS 1024
#define TYPE_BYTES 40

/* "self_attn.q_proj.weight" -> "q_proj": the last part of a name that says something. */
static void matrix_type(const char *name, char *ret)
{
    size_t n = strlen(name), end_ = n > 7 && strcmp(name + n - 7, ".weight") == 0 ? n - 7 : n, begin_ = end_;
    while (begin_ > 0 && name[begin_ - 1] != '.')
        begin_--;
    size_t n_type = end_ - begin_ < TYPE_BYTES - 1 ? end_ - begin_ : TYPE_BYTES - 1;
    while (n_type > 0 && ((unsigned char)name[begin_ + n_type] & 0xC0) == 0x80)
        n_type--; /* not inside a character */
    memcpy(ret, name + begin_, n_type);
    ret[n_type] = 0;
}

typedef struct heat {
    char types[MAX_TYPES][TYPE_BYTES];
    int n_types, n_layers;
    double lo, hi; /* log10 */
} heat;

static int type_row(heat *h, const cJSON *t, bool add)
{
    char type[TYPE_BYTES];
    int i = 0;
    matrix_type(qc_report_string(t, "name"), type);
    while (i < h->n_types && strcmp(h->types[i], type) != 0)
        i++;
    if (i == h->n_types && add && i < MAX_TYPES)
        memcpy(h->types[h->n_types++], type, sizeof type);
    return i < h->n_types ? i : -1;
}

/* Error of a tensor that belongs into the map, NaN for others. */
static double mapped_error(const cJSON *t)
{
    double layer = qc_report_number(t, "layer"), error = qc_report_number(t, "relative_error");
    return layer >= 0 && layer < MAX_LAYERS && error > 0 && isfinite(error) ? error : NAN;
}

static void put_heat_scale(qc_out *out, const heat *h)
{
    qc_put(out, "<p class=\"legend scale\">%.1e ", pow(10, h->lo));
    for (int i = 0; i <= 8; i++)
        qc_put(out, "<i class=\"k1\" style=\"opacity:%.2f\"></i>", 0.12 + 0.88 * i / 8);
    qc_put(out, " %.1e</p>\n", pow(10, h->hi));
}

static void put_cells(qc_out *out, heat *h, const cJSON *tensors, double left, double cell, double row)
{
    const cJSON *t;
    cJSON_ArrayForEach(t, tensors)
    {
        double error = mapped_error(t);
        int i = isnan(error) ? -1 : type_row(h, t, false);
        if (i < 0)
            continue;
        double shade = h->hi > h->lo ? (log10(error) - h->lo) / (h->hi - h->lo) : 1;
        double gap = cell > 4 ? 1 : 0;
        qc_put(out,
               "<rect class=\"s1\" x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" "
               "fill-opacity=\"%.3f\"><title>",
               left + qc_report_number(t, "layer") * cell, i * row, cell - gap, row - 1, 0.12 + 0.88 * shade);
        qc_put_xml(out, qc_report_string(t, "name"));
        qc_put(out, ": %.3e, %.0f bits</title></rect>\n", error, qc_report_number(t, "bits"));
    }
}

void qc_plot_errors(qc_out *out, const cJSON *tensors)
{
    heat h = {.lo = INFINITY, .hi = -INFINITY};
    const cJSON *t;
    cJSON_ArrayForEach(t, tensors)
    {
        double error = mapped_error(t);
        if (isnan(error) || type_row(&h, t, true) < 0)
            continue;
        h.lo = fmin(h.lo, log10(error));
        h.hi = fmax(h.hi, log10(error));
        h.n_layers = fmax(h.n_layers, qc_report_number(t, "layer") + 1);
    }
    if (h.n_types == 0)
        return;
    double left = 110, cell = (WIDTH - RIGHT - left) / h.n_layers, row = 28, bottom = h.n_types * row;
    begin(out, "Error per layer and matrix type", "Σ(w − w′)² ∕ Σw², logarithmic shades");
    put_heat_scale(out, &h);
    begin_svg(out, "relative error per layer and matrix type", bottom + 40);
    for (int i = 0; i < h.n_types; i++) {
        qc_put(out, "<text class=\"tick\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">", left - 8,
               i * row + row / 2 + 4);
        qc_put_xml(out, h.types[i]);
        qc_put(out, "</text>\n");
    }
    put_cells(out, &h, tensors, left, cell, row);
    for (int i = 0, step = h.n_layers > 16 ? (h.n_layers + 7) / 8 : 1; i < h.n_layers; i += step)
        qc_put(out, "<text class=\"tick\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%d</text>\n",
               left + (i + 0.5) * cell, bottom + 16, i);
    put_x_title(out, "layer", bottom + 34);
    end(out);
}
