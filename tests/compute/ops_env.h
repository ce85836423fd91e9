/* What the tests of operations share: a backend for every instruction set this processor has, on pools of
 * several sizes, and a generator seeded by QC_TEST_SEED. */
#ifndef QC_TEST_OPS_ENV_H
#define QC_TEST_OPS_ENV_H

#include "ops_ref.h"

#include "qc_test.h"

#define MAX_MASKS 5
#define MAX_POOLS 3

/* Each test program says which processors to pretend, the arithmetic and a seed. With QC_TEST_DEVICE in the
 * environment there is that device instead (device_env.h), twice: the second shows that a call can be
 * repeated. */
extern const char *masks[MAX_MASKS];
extern int n_masks, n_pools;
extern const qc_compute ops_compute;
extern const uint64_t ops_seed;

extern const int pool_sizes[MAX_POOLS];
extern qc_pool *pools[MAX_POOLS];
extern qc_backend *backends[MAX_MASKS][MAX_POOLS];
/* Whether the backends are a device's: what only the CPU backend promises is not asked of it. */
bool ops_on_device(void);
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
/* A call of one operation on out (inputs in place) by any backend; out is [rows, ld], of which cols count. */
typedef struct op_call {
    void (*run)(const struct op_call *c, qc_backend *be, float *out);
    const char *what;
    guarded out; /* content before the call */
    int64_t rows, cols, ld;
    const void *args;
} op_call;

/* Run everywhere; e->scale holds absolute tolerances, a negative one: the element keeps its bits. Padding
 * between rows does too. */
void check_op(const op_call *c, const expected *e);

/* Arguments of the operation `linear` with w[n_out, n_in], bias or NULL, x[n_tokens, ldx]. */
typedef struct linear_args {
    const float *x, *w, *bias;
    int64_t ldx, n_tokens, n_out, n_in;
    bool accumulate;
} linear_args;
int ops_fetch_rows(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *e);
void run_linear(const op_call *c, qc_backend *be, float *out);

/* h[n, n] full: sum over n + 3 tokens of correlated inputs, plus damp times about the mean of its diagonal.
 */
guarded hessian_new(int64_t n, double damp);

#endif
