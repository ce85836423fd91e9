/* Bit budget of a model: which grids its matrices could have, what each would cost in the packed file, and
 * the choice of one per unit under a budget (docs/methods/budget.md). The damage that a grid does comes from
 * calib/sensitivity.h. */
#ifndef QC_ASSIGN_H
#define QC_ASSIGN_H

#include "convert.h"

#define QC_UNIT_TENSORS 3

/* A grid that all matrices of a unit could have. */
typedef struct qc_grid_choice {
    int bits;       /* 2 .. 8, or 16: left as they are */
    int64_t group;  /* columns that share a scale; -1 = one scale per row. Matrices whose group an override
                       settles keep that */
    uint64_t bytes; /* of all matrices of the unit in the packed file */
    double damage;  /* expected mean KL divergence from the 16-bit model, nats */
} qc_grid_choice;

/* Matrices that get one grid: those of a layer that share an input (engines fuse them), the embedding table,
 * the head. */
typedef struct qc_unit {
    int layer;            /* -1: embedding or head */
    qc_stage stage;       /* in a layer */
    bool embedding, head; /* outside the layers; a tied table is both */
    int64_t tensors[QC_UNIT_TENSORS];
    qc_quant_spec specs[QC_UNIT_TENSORS]; /* as the policy has them */
    bool own_group[QC_UNIT_TENSORS];      /* an override settles the group */
    int n_tensors;
    qc_grid_choice *choices; /* by bits, then group; owned */
    int n_choices;
    int reference; /* choice whose damage is measured */
    int chosen;
} qc_unit;

typedef struct qc_assignment {
    qc_unit *units; /* embedding, then layers in order, then the head; owned */
    int n_units;
    uint64_t fixed_bytes;        /* of all tensors that are in no unit, in the packed file */
    uint64_t fixed_matrix_bytes; /* those of them that are weight matrices (overrides, skips) */
    double n_weights;            /* of all matrices: layers, embedding, head; a tied table counts once */
    double bound;                /* no choice within the budget has less damage by the estimate */
} qc_assignment;

/* Units and choices from a plan that `policy` made. Matrices that an override or skip gives bits are in no
 * unit. Clear with qc_assignment_clear. */
int qc_assignment_make(const qc_model *model, const qc_policy *policy, const qc_convert_plan *plan,
                       qc_assignment *ret, qc_err *err) QC_WARN_UNUSED;
void qc_assignment_clear(qc_assignment *a);

/* Grid of matrix number i of a unit under one of its choices (not that of 16 bit). */
qc_quant_spec qc_unit_spec(const qc_unit *unit, const qc_model *model, int i, const qc_grid_choice *choice);

/* Bytes of all tensors with the least and the most that any choice can use. */
void qc_assignment_range(const qc_assignment *a, uint64_t *ret_least, uint64_t *ret_most);

/* Choose, so that all tensors together take at most tensor_bytes. QC_E_USAGE: below the range. */
int qc_assignment_solve(qc_assignment *a, uint64_t tensor_bytes, qc_err *err) QC_WARN_UNUSED;

/* Of the choice made: bytes of all tensors, bits per weight over all matrices (scales, zero points and
 * padding included), summed damage. */
uint64_t qc_assignment_bytes(const qc_assignment *a);
double qc_assignment_bits(const qc_assignment *a, uint64_t tensor_bytes);
double qc_assignment_damage(const qc_assignment *a);

/* Tensor bytes at which the average over all matrices is `bits` per weight. */
uint64_t qc_assignment_bytes_at(const qc_assignment *a, double bits);

/* The policy's overrides with those of the choice behind them, by exact names: a policy with these makes the
 * chosen plan. Owned: qc_overrides_free. */
int qc_assignment_overrides(const qc_assignment *a, const qc_model *model, const qc_policy *policy,
                            qc_override **ret, int *ret_n, qc_err *err) QC_WARN_UNUSED;
void qc_overrides_free(qc_override *overrides, int n);

#endif
