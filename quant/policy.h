/* Which tensor gets which grid: defaults, overrides by name pattern, skip list, groups that do not divide. */
#ifndef QC_POLICY_H
#define QC_POLICY_H

#include "qc_quant_spec.h"

#include <stdbool.h>

/* What to do where the group size does not divide a matrix's input width. */
typedef enum {
    QC_GROUP_ERROR = 0,  /* refuse, naming the tensor */
    QC_GROUP_CHANNEL,    /* one scale per row */
    QC_GROUP_SMALLER,    /* the largest divisor of the width that is <= group, >= 16 and a multiple of 8 */
    QC_GROUP_KEEP        /* leave the tensor in 16 bit */
} qc_group_fallback;

/* One rule; fields at their "unset" value do not change anything. */
typedef struct qc_override {
    char *match;        /* glob over tensor names with or without ".weight": * ? [..]; owned */
    int bits;           /* 2 .. 8; 16 = leave as it is; 0 = unset */
    int64_t group;      /* > 0; -1 = per channel; 0 = unset */
    int symmetric;      /* 0 or 1; -1 = unset */
} qc_override;

typedef struct qc_policy {
    qc_quant_spec weights;   /* linears; weights.grid.group_elems -1 = per channel */
    qc_quant_spec embedding; /* embedding and head */
    bool quantize_embedding; /* false: leave in 16 bit */
    qc_group_fallback group_fallback;
    qc_override *overrides;  /* applied in order, later ones win */
    int n_overrides;
    char **skip;             /* globs: leave in 16 bit */
    int n_skip;
} qc_policy;

typedef enum { QC_TARGET_LINEAR, QC_TARGET_EMBEDDING } qc_target;

/* Decide for one matrix [n_rows, n_cols]. *ret_quantize false = leave as it is; *ret_fallback true if the group rule
 * changed the group (an event for the report). QC_E_UNSUPPORTED if the group does not divide and the rule is error. */
int qc_policy_decide(const qc_policy *policy, const char *name, qc_target target, int64_t n_rows, int64_t n_cols,
                     qc_quant_spec *ret_spec, bool *ret_quantize, bool *ret_fallback, qc_err *err) QC_WARN_UNUSED;

/* Do all overrides and skips match at least one of the names? Else QC_E_USAGE naming the first that matches nothing. */
int qc_policy_check_used(const qc_policy *policy, const char *const *names, int64_t n_names, qc_err *err) QC_WARN_UNUSED;

#endif
