/* Samples of the work of a job, timed on this machine: the operations that the job will run, at the widths of
 * its model, on random numbers. */
#ifndef QC_CLI_JOB_SAMPLES_H
#define QC_CLI_JOB_SAMPLES_H

#include "job_state.h"

/* Seconds of the steps of one stage (qc_stage) of the calibration. */
typedef struct stage_samples {
    double product;     /* a multiplication and addition of `linear`, with the tokens of a window */
    double expert;      /* the same with an expert's share of a window */
    double gram;        /* a multiplication and addition of `gram` */
    double sums;        /* opening and finishing H, whatever the number of tokens */
    double factor;      /* preparing H for the solve */
    double row;         /* solving a row */
    double correct;     /* preparing the correction of a matrix */
    double correct_row; /* correcting a row */
    double fold;        /* choosing channel scales */
    double fold_row;    /* the same, for each row of the matrices that read them */
} stage_samples;

typedef struct job_samples {
    stage_samples stages[QC_N_STAGES]; /* of those that the model has */
    double attention;                  /* a multiplication and addition of scores and values */
    double token;   /* norms, rotation and activation of a token in a layer; experts: also its routing */
    double prepare; /* reading a weight of the source and preparing it for products */
    double round;   /* reading a weight, rounding it to nearest and decoding it */
    double logit;   /* comparing two logits */
    double keep;    /* writing a number to the scratch file and reading it back */
    double hash;    /* a byte */
} job_samples;

/* Takes some seconds for a large model. */
int qc_job_take_samples(const job *j, job_samples *ret, qc_err *err) QC_WARN_UNUSED;

#endif
