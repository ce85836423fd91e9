/* A model of what rounding costs with channel scales, and scales that make it small. Internal to quant/. */
#ifndef QC_FOLD_NOISE_H
#define QC_FOLD_NOISE_H

#include "backend.h"

#include <stdbool.h>
#include <stdint.h>

/* One operand of the product y = (W diag(s)) (x / s): rows of numbers that are rounded with a step
 * proportional to the largest of a group, |a_rj| s_j^power; the rounding noise of element j then counts
 * partner_j s_j^(-2 power) in y. The noise is factor times the mean over rows r of the sum over groups of
 *     max_j (|a_rj| s_j^power)^2 * sum_j partner_j s_j^(-2 power). */
typedef struct qc_fold_noise {
    const float *a; /* [n_rows, n_cols] */
    int64_t n_rows;
    const double *partner; /* [n_cols] */
    int64_t group;         /* columns; the last group may be shorter */
    int power;             /* 1: weights, -1: activations */
    double factor;
    float *largest; /* scratch [n_rows, groups] */
    int32_t *at;    /* scratch [n_rows, groups] */
} qc_fold_noise;

/* Noise of one operand; column j has the scale s[j]. The rows are looked at on the threads of be. scratch:
 * [n_cols]. */
double qc_fold_noise_value(qc_backend *be, const qc_fold_noise *noise, int64_t n_cols, const float *s,
                           float *scratch);

/* Change scales[n_scales] (> 0) so that the sum of the operands' noises falls, by subgradient descent on
 * their logarithms; column j has scale number scale_of[j], NULL: its own. Channels that are fixed stay.
 * scratch: [4 * n_scales + 2 * n_cols]. */
void qc_fold_noise_descend(qc_backend *be, const qc_fold_noise *noises, int n_noises, int64_t n_cols,
                           int64_t n_scales, const int32_t *scale_of, const bool *fixed, float *scales,
                           double *scratch);

#endif
