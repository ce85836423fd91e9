/* Conversion of a model to an output of any format, tensor by tensor: first a plan (every tensor of the
 * source gets an action, all refusals happen here), then one streaming pass that never holds more than a
 * block of rows. */
#ifndef QC_CONVERT_H
#define QC_CONVERT_H

#include "backend.h"
#include "journal.h"
#include "model.h"
#include "policy.h"
#include "qc_result.h"
#include "writer.h"

#include <stdbool.h>
#include <stdint.h>

/* What happens to one tensor of the source. */
typedef struct qc_convert_item {
    int64_t tensor; /* index in the source */
    qc_tensor_action action;
    qc_dtype dtype;     /* as stored; QC_DT_GRID when action is QC_ACTION_QUANTIZED */
    qc_quant_spec spec; /* when action is QC_ACTION_QUANTIZED */
    int act_bits;       /* of the matrix's inputs while running; 0 = not quantized. The same in a stage */
    int64_t act_group;  /* as in qc_tensor_info */
    bool carried;       /* the source has the tensor on this very grid: its codes go over bit for bit */
    bool may_fold;      /* a calibrated run may put scales into it (calib/fold_layer.h) */
    const char *rule;   /* static text: why */
    uint64_t bytes_out; /* in the output, without scales; 0 when not stored */
} qc_convert_item;

typedef struct qc_convert_plan {
    const qc_writer_format *format; /* of the output */
    const char *type;               /* its subtype, borrowed; NULL = the default */
    qc_convert_item
        *items; /* every tensor of the source once, in writing order: embedding, layers, norm, head */
    int64_t n_items;
    int64_t *of_tensor; /* [n_items] where a tensor of the source stands in items */
    uint64_t bytes_in, bytes_out; /* of tensor data */
    uint64_t work_bytes;          /* memory of the streaming pass */
    double n_weights;             /* to be quantized */
} qc_convert_plan;

/* Decide for every tensor. Without a policy what is on a grid in the source stays on that grid, codes and
 * scales bit for bit, and all else stays as it is; with one, the same happens where both grids are equal.
 * Events: group_fallback; kept16, where the format has no grid for a matrix; requantized, where codes of the
 * source are rounded anew because the grids differ.
 * QC_E_UNSUPPORTED: a group that does not divide, a grid that the format can not hold; QC_E_USAGE: an
 * override or skip pattern that matches nothing. Clear with qc_convert_plan_clear. */
int qc_convert_plan_make(const qc_model *model, const qc_policy *policy, const qc_writer_format *format,
                         const char *type, qc_event_list *events, qc_convert_plan *ret,
                         qc_err *err) QC_WARN_UNUSED;
void qc_convert_plan_clear(qc_convert_plan *plan);

/* What happens to a tensor of the source. */
qc_convert_item *qc_convert_plan_item(const qc_convert_plan *plan, int64_t tensor);

typedef struct qc_convert_options {
    const qc_journal *journal; /* of a calibrated run of the same plan: what it holds is taken from there,
                                  events of its layers too; NULL = none */
    bool allow_nonfinite; /* a matrix with NaN or infinities is left in 16 bit (event) instead of refused */
    void (*progress)(void *ctx, double fraction); /* NULL = none */
    void *progress_ctx;
} qc_convert_options;

/* What an engine would say to the output of a plan (formats/engine_lint.h). */
int qc_convert_lint(const qc_convert_plan *plan, const qc_model *model, const char *engine, const char *path,
                    qc_event_list *findings, qc_err *err) QC_WARN_UNUSED;

/* Tell the writer, which has its metadata and side files, all that will come (journal as in the options), and
 * ask for the size of the output. A writer that counts is then done. Without a journal all that may be folded
 * counts as folded: the output will not be larger. QC_E_UNSUPPORTED: what the format can not put together. */
int qc_convert_declare(const qc_convert_plan *plan, const qc_model *model, const qc_journal *journal,
                       qc_writer *writer, uint64_t *ret_bytes, qc_err *err) QC_WARN_UNUSED;

/* Carry out the plan, which was declared. `accounts` gets one entry per tensor in the plan's order.
 * QC_E_INPUT: a value that is not finite (tensor, row and column named). */
int qc_convert_run(const qc_convert_plan *plan, const qc_model *model, qc_backend *be,
                   const qc_convert_options *options, qc_writer *writer, qc_account_list *accounts,
                   qc_event_list *events, qc_err *err) QC_WARN_UNUSED;

/* Give the writer the normalised config as metadata, under the keys of docs/formats/qpk.md: what an engine
 * needs without reading config.json. */
int qc_convert_metadata(const qc_model_config *config, qc_writer *writer, qc_err *err) QC_WARN_UNUSED;

#endif
