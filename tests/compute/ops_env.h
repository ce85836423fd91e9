/* What the tests of operations share: a backend for every instruction set this processor has, on pools of
 * several sizes, and a generator seeded by QC_TEST_SEED. */
#ifndef QC_TEST_OPS_ENV_H
#define QC_TEST_OPS_ENV_H

#include "ops_ref.h"

#include "qc_test.h"

#define N_MASKS 3
#define N_POOLS 3

extern const char *const masks[N_MASKS];
extern const int pool_sizes[N_POOLS];
extern qc_pool *pools[N_POOLS];
extern qc_backend *backends[N_MASKS][N_POOLS];
extern qc_rng rng;
extern qc_err err;

/* Fixture of a test case. */
void ops_setup(void);
void ops_teardown(void);
/* Runs the cases with the fixture; the exit status. */
int ops_run(const char *name, const test_case *cases, size_t n_cases);

guarded normal_new(int64_t n, int skew, double scale);
/* NaN is equal to NaN. */
int close_to(double got, double want, double tol);
int same_bits(const void *a, const void *b, int64_t n_floats);
/* The result of a call on pool p must be that of pool 0, which is kept in *first; frees *got otherwise. */
void check_same(guarded *first, guarded *got, int p, const char *what, const char *mask);
/* h[n, n] full: sum over n + 3 tokens of correlated inputs, plus damp times about the mean of its diagonal.
 */
guarded hessian_new(int64_t n, double damp);

#endif
