/* Which tensor gets which grid: defaults, overrides by name pattern, skip list, groups that do not divide. */
#ifndef QC_POLICY_H
#define QC_POLICY_H

#include "qc_quant_spec.h"

#include <stdbool.h>

/* What to do where the group size does not divide a matrix's input width. */
typedef enum {
    QC_GROUP_ERROR = 0, /* refuse, naming the tensor */
    QC_GROUP_CHANNEL,   /* one scale per row */
    QC_GROUP_SMALLER,   /* the largest divisor of the width that is <= group, >= 16 and a multiple of 8 */
    QC_GROUP_KEEP       /* leave the tensor in 16 bit */
} qc_group_fallback;

/* One rule; fields at their "unset" value do not change anything. */
typedef struct qc_override {
    char *match;   /* glob over tensor names with or without ".weight": * ? [..] */
    int bits;      /* 2 .. 8; 16 = leave as it is; 0 = unset */
    int64_t group; /* > 0; -1 = per channel; 0 = unset */
    int symmetric; /* 0 or 1; -1 = unset */
} qc_override;

/* Patterns and overrides are borrowed from whoever filled the policy. */
typedef struct qc_policy {
    qc_quant_spec weights;   /* linears; weights.grid.group_elems -1 = per channel */
    qc_quant_spec embedding; /* embedding and head */
    bool quantize_embedding; /* false: leave in 16 bit */
    qc_group_fallback group_fallback;
    qc_override *overrides; /* applied in order, later ones win */
    int n_overrides;
    char **skip; /* globs: leave in 16 bit */
    int n_skip;
    int act_bits;      /* inputs of the linears are quantized while running; 0 = they are not */
    int64_t act_group; /* their columns that share a scale: a multiple of 32; 0 = the whole token */
} qc_policy;

/* Linears: 4 bit, groups of 128, symmetric full range, F16 scales with squared-error search. Embedding and
 * head: 8 bit, one scale per row, else the same. Groups that do not divide are refused; no overrides, nothing
 * skipped. */
qc_policy qc_policy_defaults(void);

typedef enum { QC_TARGET_LINEAR, QC_TARGET_EMBEDDING } qc_target;

/* Decide for one matrix [n_rows, n_cols]. *ret_quantize false = leave as it is (*ret_spec is then untouched);
 * *ret_fallback true if the group rule changed the group or left the matrix in 16 bit (an event for the
 * report). QC_E_UNSUPPORTED: the group does not divide n_cols and the rule is error, or no smaller one does;
 * QC_E_USAGE: bits that are neither 2 .. 8 nor 16, a group that is neither -1 nor a multiple of 8 in 16 ..
 * 1024. */
int qc_policy_decide(const qc_policy *policy, const char *name, qc_target target, int64_t n_rows,
                     int64_t n_cols, qc_quant_spec *ret_spec, bool *ret_quantize, bool *ret_fallback,
                     qc_err *err) QC_WARN_UNUSED;

/* What overrides and skips settle for a matrix of this name: its bits (16 or a skip included), its group. */
void qc_policy_settled(const qc_policy *policy, const char *name, bool *ret_bits, bool *ret_group);

/* Do all overrides and skips match at least one of the names? Else QC_E_USAGE naming the first that matches
 * nothing. */
int qc_policy_check_used(const qc_policy *policy, const char *const *names, int64_t n_names,
                         qc_err *err) QC_WARN_UNUSED;

#endif
