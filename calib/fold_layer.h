/* Channel scaling of one decoder layer (docs/methods/awq.md, smoothquant.md): which producer feeds which
 * matrices, the scales chosen for each of these sites, and the layer with the scales folded in. */
#ifndef QC_FOLD_LAYER_H
#define QC_FOLD_LAYER_H

#include "convert.h"
#include "fold.h"
#include "model.h"

/* What the scaling of the inputs of one stage came to. */
typedef struct qc_fold_record {
    qc_fold_result result;
    const char *skipped; /* static text: why the site was not looked at; NULL if it was */
    double seconds;
} qc_fold_record;

/* Factors by row and column of the matrices, and what takes the place of norms and biases: a matrix's values
 * are its source's times out[row] times in[column]. */
typedef struct qc_layer_fold {
    float *in[QC_N_SLOTS];               /* NULL: 1. Matrices of a stage share them */
    float *out[QC_N_SLOTS];              /* NULL: 1 */
    float *vectors[QC_N_SLOTS];          /* NULL: as in the source */
    float *scales[QC_N_DENSE_STAGES];    /* of each scaled site: what the factors follow from; NULL: none */
    int64_t n_scales[QC_N_DENSE_STAGES]; /* channels of the producer */
    float *owned[2 * QC_N_DENSE_STAGES]; /* what in and out point to */
    int n_owned;
    qc_fold_record records[QC_N_DENSE_STAGES]; /* by the stage that reads the scaled inputs */
} qc_layer_fold;

typedef struct qc_fold_layer_job {
    const qc_convert_plan *plan;
    const qc_model *model;
    qc_backend *be;
    const qc_fold_options *options;
    bool sites[QC_N_DENSE_STAGES]; /* to be scaled */
    int index;
    qc_layer *layer; /* with the weights of the source; its activations are not quantized in here */
    qc_workspace *ws;
    float *x; /* backend [n_windows * length, hidden] residual stream; used up */
    float *u; /* backend [length, widest stage] scratch */
    int64_t n_windows, length;
} qc_fold_layer_job;

/* Mark in `plan` what qc_layer_fold_choose may put scales into (norms, biases, routers) when a calibrated run
 * of the plan `rounded` of the same model scales the inputs of these sites. */
void qc_layer_fold_mark(const qc_convert_plan *rounded, const qc_model *model,
                        const bool sites[QC_N_DENSE_STAGES], qc_convert_plan *plan);

/* Choose scales for the sites of a layer, one after the other, by statistics of its inputs. Sites where a
 * matrix stays 16 bit are skipped. Clear with qc_layer_fold_clear, also after a failure. QC_E_INPUT: a value
 * that is not finite (layer and stage named). */
int qc_layer_fold_choose(const qc_fold_layer_job *job, qc_layer_fold *ret, qc_err *err) QC_WARN_UNUSED;
/* Bytes for plans: most of what qc_layer_fold_choose works with, over n_tokens tokens of statistics. */
uint64_t qc_layer_fold_bytes(const qc_model_config *config, const qc_fold_options *options, int64_t n_tokens,
                             bool acts);

/* Free what the choice holds. */
void qc_layer_fold_clear(qc_layer_fold *fold);

/* The factors of a site from its scales[n] (as qc_layer_fold_choose left them; copied), so that a run that
 * goes on computes with the layer that the choice was made for. Sites in ascending order; vectors stay NULL.
 * QC_E_INPUT: another number than the producer has channels. */
int qc_layer_fold_restore(const qc_model *model, int index, qc_stage site, const float *scales, int64_t n,
                          qc_layer_fold *fold, qc_err *err) QC_WARN_UNUSED;

/* Channels of the producer of a site: as many scales it has. */
int64_t qc_layer_fold_channels(const qc_model_config *config, qc_stage site);

/* w[n_rows, n_cols] (rows row0 .. of the slot's matrix in the source) times the factors, in place. */
void qc_layer_fold_rows(const qc_layer_fold *fold, qc_slot slot, int64_t row0, int64_t n_rows, int64_t n_cols,
                        float *w);

/* dst[n_experts, hidden] = the router with the scales of its inputs folded in. It is never quantized: this is
 * what the output stores. */
int qc_layer_fold_router(const qc_layer_fold *fold, const qc_model *model, int index, float *dst,
                         qc_err *err) QC_WARN_UNUSED;

/* Put the folded matrices, norms and biases into a prepared layer. */
int qc_layer_fold_apply(const qc_layer_fold *fold, const qc_model *model, int index, qc_layer *layer,
                        qc_err *err) QC_WARN_UNUSED;

#endif
