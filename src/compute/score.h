/* Running scores of one position while its logits arrive in slices of the vocabulary (Milakov & Gimelshein
 * 2018, online softmax); read by C and by the kernels of cuda/. a = reference or only model, b = the other
 * model (unused when scoring one model). */
#ifndef QC_SCORE_H
#define QC_SCORE_H

#include <stdint.h>

typedef struct qc_score {
    double sum_a, sum_b;      /* sum exp(logit - max) so far */
    double cross;             /* sum exp(a - max_a) * (a - b) so far */
    float max_a, max_b;       /* largest logit so far */
    float target_a, target_b; /* logit of the target id, once seen */
    int32_t top_a, top_b;     /* first id with the largest logit */
    int32_t n_nonfinite;      /* NaN or infinite logits seen */
} qc_score;

#endif
