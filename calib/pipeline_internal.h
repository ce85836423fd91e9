/* Inside of the pipeline, shared by its files. */
#ifndef QC_PIPELINE_INTERNAL_H
#define QC_PIPELINE_INTERNAL_H

#include "family.h"
#include "fold_layer.h"
#include "hessian.h"
#include "layer_record.h"
#include "pipeline.h"
#include "stream.h"

typedef struct qc_pipeline {
    const qc_convert_plan *plan;
    const qc_model *model;
    qc_backend *be;
    const qc_corpus *corpus;
    const qc_pipeline_options *options;
    qc_journal *journal;
    qc_workspace *ws;
    qc_stream x;     /* residual stream that statistics are taken from */
    qc_stream x_ref; /* that of the 16-bit model, for corrected targets */
    qc_stream kept; /* inputs of the stage that is being quantized, for its output: [tokens, widest of o, down
                       and the inputs of experts] */
    float *host;    /* staging of spilled streams */
    float *buffer_x, *buffer_ref, *buffer_u, *buffer_diff; /* one window each, backend memory */
    double work_done, work_all;
} qc_pipeline;

/* The layer in work. */
typedef struct qc_layer_job {
    qc_pipeline *p;
    int index;
    qc_layer *layer; /* becomes the quantized one, matrix by matrix */
    qc_layer *ref;   /* the 16-bit one; NULL unless targets are corrected */
    qc_layer_fold fold;
    qc_layer_record record;
} qc_layer_job;

/* Statistics of one input. */
typedef struct qc_stage_stats {
    qc_hessian hessian;
    const float *h; /* of the hessian, after finish */
    /* with correction, else NULL: what the quantized model lacks, against the stage's input x */
    float *drift; /* sum of (x16 - x) x^T, [n, n], x16 the input in the 16-bit model */
    float *lack;  /* where the product is added to the stream: sum of (y16 - y) x^T / the residual scale,
                   * [hidden, n], y16 and y the streams after that, y with the 16-bit matrix */
} qc_stage_stats;

void qc_stage_stats_clear(qc_stage_stats *stats, qc_backend *be);

/* All tokens of the corpus. */
static inline int64_t qc_pipeline_tokens(const qc_pipeline *p)
{
    return p->corpus->n_windows * p->corpus->length;
}

static inline const qc_convert_item *qc_pipeline_planned(const qc_pipeline *p, int64_t tensor)
{
    return qc_convert_plan_item(p->plan, tensor);
}

/* Window i of a stream in backend memory: in place where that is possible, else copied to `buffer`; and its
 * way back, if x is the buffer. */
int qc_pipeline_borrow(qc_pipeline *p, const qc_stream *s, int64_t window, float *buffer, float **ret,
                       qc_err *err) QC_WARN_UNUSED;
int qc_pipeline_give_back(qc_pipeline *p, qc_stream *s, int64_t window, const float *x, const float *buffer,
                          qc_err *err) QC_WARN_UNUSED;

/* `work` more is done: progress; a signal ends the run here. */
int qc_pipeline_advance(qc_pipeline *p, double work, qc_err *err) QC_WARN_UNUSED;

/* Are any of the matrices (slots, ended by QC_N_SLOTS) of an expert, or of the layer, to be quantized? */
bool qc_stage_any_quantized(const qc_layer_job *j, const qc_slot *slots, int64_t expert);

/* Quantize these matrices of a stage by statistics that are finished, into journal, record and layer.
 * by_nearest: whatever the method is, by nearest value with the statistics as column weights. */
int qc_stage_quantize(qc_layer_job *j, qc_stage stage, int64_t expert, const qc_slot *slots,
                      const qc_stage_stats *stats, bool by_nearest, qc_err *err) QC_WARN_UNUSED;

/* The experts of a layer, behind its attention: every one is quantized by the inputs of its own tokens and
 * adds its output to the stream before the next one starts. */
int qc_layer_run_experts(qc_layer_job *j, qc_err *err) QC_WARN_UNUSED;

/* Events about experts of the layer with no token (they are rounded to nearest) or fewer than `wanted` of
 * them; tokens [n_experts]. */
int qc_layer_note_tokens(qc_layer_job *j, const int64_t *tokens, int64_t wanted, qc_err *err) QC_WARN_UNUSED;

/* Bytes of memory that qc_layer_run_experts takes beside what all stages do; 0 without experts. */
uint64_t qc_layer_experts_bytes(const qc_model_config *config, const qc_corpus *corpus);

#endif
