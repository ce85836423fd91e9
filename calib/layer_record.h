/* What the pipeline has to say about one quantized layer, as the JSON text that the journal keeps beside its
 * codes: figures of each matrix, fallbacks, and where the time went. A run and its continuation tell the same
 * because both read them from there. */
#ifndef QC_LAYER_RECORD_H
#define QC_LAYER_RECORD_H

#include "gptq.h"
#include "qc_result.h"

typedef struct qc_matrix_record {
    char *name;         /* of the tensor; owned */
    const char *method; /* static: "rtn", "gptq" */
    const char *order;  /* static: "none", "static", "min-pivot"; NULL for rtn */
    qc_gptq_input_info input;
    qc_gptq_result result;
    double norm; /* of qc_gptq_norm */
    qc_quant_stats stats;
    int64_t tokens; /* that the statistics saw */
    double seconds; /* of rounding this matrix; the preparation of its input counts for the first one */
} qc_matrix_record;

/* Channel scaling of the inputs of one stage. */
typedef struct qc_fold_figures {
    const char *stage; /* static: "qkv", "o", "gate_up", "down" */
    char choice[32];   /* as in qc_fold_result */
    double loss, loss_identity;
    int64_t n_limited;
    double seconds;
} qc_fold_figures;

#define QC_RECORD_FOLDS 4 /* as many as a layer has stages */

typedef struct qc_layer_record {
    int layer;
    qc_matrix_record *matrices; /* owned */
    int n_matrices;
    qc_fold_figures folds[QC_RECORD_FOLDS];
    int n_folds;
    qc_event_list events;
    qc_layer_times times;
} qc_layer_record;

/* Append a copy of *matrix. */
int qc_layer_record_add(qc_layer_record *record, const qc_matrix_record *matrix, qc_err *err) QC_WARN_UNUSED;
/* Append a copy of *fold; stage is static text. QC_E_USAGE: more than QC_RECORD_FOLDS. */
int qc_layer_record_add_fold(qc_layer_record *record, const qc_fold_figures *fold,
                             qc_err *err) QC_WARN_UNUSED;
void qc_layer_record_clear(qc_layer_record *record);

/* Owned text (qc_free); NULL when out of memory. Numbers survive the way there and back unchanged. */
char *qc_layer_record_print(const qc_layer_record *record);

/* The other way. QC_E_INPUT: not such a text. */
int qc_layer_record_parse(const char *text, qc_layer_record *ret, qc_err *err) QC_WARN_UNUSED;

#endif
