/* Plots of sizes: what a file is made of, and size against damage. */
#include "plot_axis.h"
#include "plots.h"

#include "qc_file.h"

#include <math.h>
#include <string.h>

#define WIDTH 560.0

enum { EMBEDDING, ATTENTION, MLP, REST, N_KINDS };
static const char *const kind_names[N_KINDS + 1] = {"embedding and head", "attention", "MLP",
                                                    "norms and others", "tokenizer, config, tables"};

static int kind_of(const cJSON *t)
{
    const char *name = qc_report_string(t, "name"), *action = qc_report_string(t, "action");
    if (qc_report_number(t, "rows") <= 1 || strstr(name, "norm") || strcmp(action, "copied") == 0)
        return REST;
    if (qc_report_number(t, "layer") < 0)
        return EMBEDDING;
    return strstr(name, "attn") || strstr(name, "attention") ? ATTENTION
           : strstr(name, "mlp") || strstr(name, "ffn")      ? MLP
                                                             : REST;
}

static void put_bar(qc_out *out, const char *label, const double *parts, int n, double scale, double y)
{
    double all = 0, x = 0;
    for (int i = 0; i < n; i++)
        all += parts[i];
    qc_put(out, "<text class=\"label\" x=\"0\" y=\"%.1f\">%s, ", y + 12, label);
    qc_put_bytes(out, all);
    qc_put(out, "</text>\n");
    for (int i = 0; i < n; i++) {
        double width = parts[i] * scale;
        if (width <= 0)
            continue;
        qc_put(out,
               "<rect class=\"s%d\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"30\"><title>%s: ", i + 1, x,
               y + 18, fmax(0.5, width - 1.5), kind_names[i]);
        qc_put_bytes(out, parts[i]);
        qc_put(out, " (%.1f %%)</title></rect>\n", 100 * parts[i] / all);
        if (width > 62)
            qc_put(out, "<text class=\"inside\" x=\"%.1f\" y=\"%.1f\">%.1f %%</text>\n", x + 8, y + 38,
                   100 * parts[i] / all);
        x += width;
    }
}

void qc_plot_sizes(qc_out *out, qc_report_part part)
{
    double in[N_KINDS + 1] = {0}, stored[N_KINDS + 1] = {0}, all_in = 0, all_stored = 0;
    double n_bytes = qc_report_number(part.artifact, "bytes");
    const cJSON *t;
    cJSON_ArrayForEach(t, part.tensors)
    {
        int k = kind_of(t);
        in[k] += qc_report_number(t, "bytes_in");
        stored[k] += qc_report_number(t, "bytes_out");
        all_in += qc_report_number(t, "bytes_in");
        all_stored += qc_report_number(t, "bytes_out");
    }
    stored[N_KINDS] = fmax(0, n_bytes - all_stored);
    if (all_in <= 0)
        return;
    qc_put(out, "<figure class=\"plot\">\n<figcaption><b>Size</b> <span>bytes by kind of "
                "tensor</span></figcaption>\n<p class=\"legend\">");
    for (int i = 0; i <= N_KINDS; i++)
        if (in[i] > 0 || stored[i] > 0)
            qc_put(out, "<span><i class=\"k%d\"></i>%s</span> ", i + 1, kind_names[i]);
    qc_put(out,
           "</p>\n<div class=\"scroll\"><svg viewBox=\"0 0 %.0f 124\" role=\"img\" aria-label=\"size by kind "
           "of tensor\">\n",
           WIDTH);
    double scale = WIDTH / fmax(all_in, all_stored + stored[N_KINDS]);
    put_bar(out, "source", in, N_KINDS + 1, scale, 0);
    put_bar(out, "written", stored, N_KINDS + 1, scale, 62);
    qc_put(out, "</svg></div>\n<table class=\"small\"><tr><th></th><th>source</th><th>written</th></tr>\n");
    for (int i = 0; i <= N_KINDS; i++) {
        if (in[i] <= 0 && stored[i] <= 0)
            continue;
        qc_put(out, "<tr><td>%s</td><td class=\"n\">", kind_names[i]);
        qc_put_bytes(out, in[i]);
        qc_put(out, "</td><td class=\"n\">");
        qc_put_bytes(out, stored[i]);
        qc_put(out, "</td></tr>\n");
    }
    qc_put(out, "</table>\n</figure>\n");
}

/* ---- size against KL divergence ---- */

#define MAX_POINTS 100

typedef struct point {
    double bytes, kld;
    const char *name;
} point;

/* Only what was scored on the same tokens can be compared; *ret_left_out counts the others. */
static int collect(const cJSON *const *docs, int n_docs, point *points, int *ret_left_out)
{
    const char *ids = NULL;
    int n = 0;
    *ret_left_out = 0;
    for (int d = 0; d < n_docs; d++)
        for (int i = 0; i < qc_report_n_parts(docs[d]) && n < MAX_POINTS; i++) {
            qc_report_part part = qc_report_part_at(docs[d], i);
            double kld = qc_report_number(part.evaluation, "kld_mean"),
                   n_bytes = qc_report_number(part.artifact, "bytes");
            const char *these = qc_report_string(part.evaluation, "ids_sha256");
            if (!(kld > 0 && n_bytes > 0))
                continue;
            ids = ids ? ids : these;
            if (strcmp(ids, these) == 0)
                points[n++] = (point){n_bytes, kld, qc_path_base(qc_report_string(part.artifact, "path"))};
            else
                ++*ret_left_out;
        }
    return n;
}

/* Labels from top to bottom, each at least a line below the one before. */
static void put_points(qc_out *out, point *points, int n, const qc_axis *ax, const qc_axis *ay)
{
    double last = -INFINITY;
    for (int i = 1; i < n; i++)
        for (int k = i; k > 0 && points[k].kld > points[k - 1].kld; k--) {
            point swap = points[k];
            points[k] = points[k - 1];
            points[k - 1] = swap;
        }
    for (int i = 0; i < n; i++) {
        double x = qc_axis_at(ax, points[i].bytes), y = qc_axis_at(ay, points[i].kld),
               at = fmax(y + 4, last + 15);
        bool left = x > WIDTH * 0.66;
        last = at;
        qc_put(out, "<circle class=\"point s1\" cx=\"%.1f\" cy=\"%.1f\" r=\"5\"><title>", x, y);
        qc_put_xml(out, points[i].name);
        qc_put(out, ": ");
        qc_put_bytes(out, points[i].bytes);
        qc_put(
            out,
            ", %.4g nats</title></circle>\n<text class=\"label\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">",
            points[i].kld, x + (left ? -9 : 9), at, left ? "end" : "start");
        qc_put_xml(out, points[i].name);
        qc_put(out, "</text>\n");
    }
}

void qc_plot_scatter(qc_out *out, const cJSON *const *docs, int n_docs)
{
    point points[MAX_POINTS];
    int left_out, n = collect(docs, n_docs, points, &left_out);
    double lo_x = INFINITY, hi_x = 0, lo_y = INFINITY, hi_y = 0;
    if (n < 2)
        return;
    for (int i = 0; i < n; i++) {
        lo_x = fmin(lo_x, points[i].bytes);
        hi_x = fmax(hi_x, points[i].bytes);
        lo_y = fmin(lo_y, points[i].kld);
        hi_y = fmax(hi_y, points[i].kld);
    }
    double unit = hi_x >= 1e9 ? 1e9 : hi_x >= 1e6 ? 1e6 : hi_x >= 1e3 ? 1e3 : 1;
    qc_axis ax = qc_axis_make(lo_x, hi_x, false, 6, 64, WIDTH - 20),
            ay = qc_axis_make(lo_y, hi_y, true, 5, 250, 14);
    qc_put(out,
           "<figure class=\"plot wide\">\n<figcaption><b>Size against damage</b> <span>mean KL divergence, "
           "nats; lower left is "
           "better</span></figcaption>\n<div class=\"scroll fit\"><svg viewBox=\"0 0 %.0f 296\" role=\"img\" "
           "aria-label=\"size against "
           "KL divergence\">\n",
           WIDTH);
    qc_axis_put_y(out, &ay, 64, WIDTH - 20);
    qc_axis_put_x(out, &ax, 250, unit);
    put_points(out, points, n, &ax, &ay);
    qc_put(
        out,
        "<text class=\"title\" x=\"%.1f\" y=\"290\" text-anchor=\"middle\">size, %s</text>\n</svg></div>\n",
        WIDTH / 2,
        unit == 1e9   ? "GB"
        : unit == 1e6 ? "MB"
        : unit == 1e3 ? "kB"
                      : "bytes");
    if (left_out)
        qc_put(out, "<p class=\"note\">%d more, scored on other tokens, can not be compared.</p>\n",
               left_out);
    qc_put(out, "</figure>\n");
}
