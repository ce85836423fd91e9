/* Plots of a report as inline SVG. Each is a <figure> with its title, legend and drawing; colours and fonts
 * come from the page's style sheet (html_style.c). A plot whose data the report lacks puts nothing. */
#ifndef QC_PLOTS_H
#define QC_PLOTS_H

#include "report_doc.h"
#include "report_internal.h"

/* Mean NLL of each window of model and reference, and their difference below. */
void qc_plot_windows(qc_out *out, const cJSON *evaluation);

/* Histogram of the KL divergences of all positions. */
void qc_plot_kld(qc_out *out, const cJSON *evaluation);

/* Relative error of each layer's matrices by type: a heat map. */
void qc_plot_errors(qc_out *out, const cJSON *tensors);

/* Bytes by kind of tensor, of the source and of the artifact. */
void qc_plot_sizes(qc_out *out, qc_report_part part);

/* Size against mean KL divergence of all outputs of several reports. */
void qc_plot_scatter(qc_out *out, const cJSON *const *docs, int n_docs);

#endif
