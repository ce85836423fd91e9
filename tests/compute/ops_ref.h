/* Plain float64 versions of the operations of backend.h, written from their formulas, and test buffers. */
#ifndef QC_TEST_OPS_REF_H
#define QC_TEST_OPS_REF_H

#include "backend.h"
#include "qc_rng.h"

#include <stdint.h>

/* n floats with guard bands before and behind; poisoned with NaN. */
typedef struct guarded {
    float *data; /* first element */
    int64_t n;
} guarded;

/* skew: elements by which the data miss 64-byte alignment. */
guarded guarded_new(int64_t n, int skew);
/* Poisoned copy of the same values. */
guarded guarded_copy(const guarded *g);
void guarded_normal(guarded *g, qc_rng *rng, double scale);
/* Checks the guard bands. */
void guarded_free(guarded *g);
int guarded_intact(const guarded *g);

/* Result and, where wanted, the scale that its tolerance is a factor of. */
typedef struct expected {
    double *value, *scale;
} expected;

expected expected_new(int64_t n);
void expected_free(expected *e);

/* y is the content before the call, or NULL. All [T, N] dense. scale: sum of absolute terms. */
void ref_linear(expected *e, const float *y, int64_t ldy, const float *x, int64_t ldx, const float *w,
                const float *bias, int64_t n_tokens, int64_t n_out, int64_t n_in);
/* scale: the tolerance itself, from the sizes of the scores and of the values. */
void ref_attention(expected *e, const float *q, const float *k, const float *v, const qc_attention_shape *s);
/* One token's whole vocabulary. tol_cross: sum of |terms| of cross. */
void ref_score(qc_score *s, double *abs_cross, const float *a, const float *b, int64_t n, int32_t target,
               double softcap);

#endif
