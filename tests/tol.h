/* Tolerances of the tests: one class per kind of computation, each with its reason. u = 2^-24 is the largest
 * relative error of one float32 rounding. */
#ifndef QC_TEST_TOL_H
#define QC_TEST_TOL_H

#include <float.h>
#include <math.h>

#define TOL_U 0x1p-24

/* Sum of n float32 products against the exact sum, as a factor of sum |x_i w_i|: rounding errors of either
 * sign add up like sqrt(n) u (Higham & Mary 2019, theorem 3.1 with lambda = 1), and the few roundings of
 * blocks, lanes and the final store come on top. The guaranteed bound n u would hide a lost block. */
#define TOL_DOT(n) ((8 + sqrt((double)(n))) * TOL_U)

/* Elementwise formulas with an exp inside (softmax weights, SiLU, tanh), relative: exp of the vector kernels
 * is within 1 ulp = 2 u, then at most 6 more roundings. Results below FLT_MIN may be flushed: TOL_TINY
 * absolute. */
#define TOL_EXP  (8 * TOL_U)
#define TOL_TINY ((double)FLT_MIN)

/* A rotation or axpy: two products and a sum, each rounded once, as a factor of the sum of absolute terms. */
#define TOL_AXPY (3 * TOL_U)

/* Golden logits and hidden states of the test models (float32 by another library, a few layers, values below
 * 10): the models' README states that float64 agrees with them within 1.5e-5 and asks for no more than this
 * of float32 code; ignoring any feature moves the logits by 0.5 or more. Sums of NLL over about 50 targets:
 * the same error, summed. */
#define TOL_LOGITS    1e-4
#define TOL_TOKEN_NLL 1e-4
#define TOL_NLL_SUM   1e-3
/* Mean NLL of a window of 512: the demo model's README states 1e-6 between float64 and the golden float32
 * values; ours is float32 too, so twice that. */
#define TOL_WINDOW_NLL 2e-6

/* Effects of ablations are written with four digits in golden.json; relative. */
#define TOL_STATED_CHANGE 1e-3

/* Sums of at most some hundred doubles in another order, then exp: relative. */
#define TOL_SUMMARY 1e-12

#endif
