/* One matrix through the GPTQ solver on the CPU backend, and the sums that tests compare with, in double. */
#ifndef GPTQ_RUN_H
#define GPTQ_RUN_H

#include "gptq.h"
#include "qc_alloc.h"
#include "qc_cpu.h"
#include "qc_fp.h"
#include "qc_rng.h"
#include "qc_test.h"
#include "tol.h"

#include <math.h>

typedef struct gptq_run {
    int64_t n_rows, n, n_groups;
    qc_quant_spec spec;
    qc_gptq_input_info info;
    qc_gptq_result result;
    double norm;
    qc_code_rows rows;
    qc_quant_stats stats;
    qc_err err;
    int rc;
} gptq_run;

static inline void *test_alloc(int64_t n_elems, size_t elem_bytes)
{
    void *p = qc_calloc((size_t)n_elems, elem_bytes);
    ck_assert_ptr_nonnull(p);
    return p;
}

static inline void gptq_run_free(gptq_run *g)
{
    qc_free(g->rows.codes);
    qc_free(g->rows.scales);
    qc_free(g->rows.zeros);
}

static inline qc_quant_spec gptq_spec(int bits, bool symmetric, int64_t group, qc_search search)
{
    return (qc_quant_spec){.grid = {.kind = QC_GRID_AFFINE,
                                    .bits = bits,
                                    .symmetric = symmetric,
                                    .group_elems = group,
                                    .scale_dtype = QC_DT_F16},
                           .search = search};
}

static inline gptq_run gptq_matrix(qc_gptq_input *in, int64_t n, const float *w, int64_t n_rows,
                                   const qc_quant_spec *spec)
{
    gptq_run g = {.n_rows = n_rows, .n = n, .spec = *spec};
    g.n_groups = (n + spec->grid.group_elems - 1) / spec->grid.group_elems;
    g.rows.codes = test_alloc(n_rows * n, 1);
    g.rows.scales = test_alloc(n_rows * g.n_groups, sizeof(float));
    g.rows.zeros = spec->grid.symmetric ? NULL : test_alloc(n_rows * g.n_groups, 1);
    g.rc = qc_gptq_matrix(in, w, n_rows, spec, &g.rows, &g.stats, &g.result, &g.err);
    if (g.rc == 0)
        g.rc = qc_gptq_norm(in, w, n_rows, &g.norm, &g.err);
    return g;
}

typedef struct test_backend {
    qc_pool *pool;
    qc_backend *be;
} test_backend;

/* mask as for qc_cpu_set_mask. */
static inline test_backend test_backend_new(const char *mask, int n_threads)
{
    test_backend t;
    qc_err err;
    ck_assert_int_eq(qc_cpu_set_mask(mask, &err), 0);
    ck_assert_int_eq(qc_pool_new(n_threads, &t.pool, &err), 0);
    ck_assert_int_eq(qc_backend_cpu_new(t.pool, QC_COMPUTE_F32, &t.be, &err), 0);
    return t;
}

static inline void test_backend_free(test_backend *t)
{
    qc_backend_close(t->be);
    qc_pool_free(t->pool);
}

/* Prepare and solve; free with gptq_run_free, also after a failure. */
static inline gptq_run gptq_on(qc_backend *be, const float *h, int64_t n, const qc_gptq_options *options,
                               const float *w, int64_t n_rows, const qc_quant_spec *spec)
{
    qc_gptq_input *in = NULL;
    qc_gptq_input_info info;
    gptq_run g = {0};
    g.rc = qc_gptq_input_new(be, h, n, options, &in, &info, &g.err);
    if (g.rc == 0) {
        g = gptq_matrix(in, n, w, n_rows, spec);
        g.info = info;
        qc_gptq_input_free(in);
    }
    return g;
}

static inline gptq_run gptq(const float *h, int64_t n, const qc_gptq_options *options, const float *w,
                            int64_t n_rows, const qc_quant_spec *spec)
{
    test_backend t = test_backend_new("", 1);
    gptq_run g = gptq_on(t.be, h, n, options, w, n_rows, spec);
    test_backend_free(&t);
    return g;
}

/* The value that a reader of codes, scales and zeros gets. */
static inline double gptq_value(const gptq_run *g, int64_t r, int64_t c)
{
    int64_t at = r * g->n_groups + c / g->spec.grid.group_elems;
    int zero = g->rows.zeros ? g->rows.zeros[at] : 1 << (g->spec.grid.bits - 1);
    return (double)g->rows.scales[at] * (g->rows.codes[r * g->n + c] - zero);
}

/* e H e^T of one row, e = w - value; columns without data count as target 0. */
static inline double gptq_row_error(const gptq_run *g, const float *h, const float *w, int64_t r)
{
    double e[1024], sum = 0;
    ck_assert_int_le(g->n, 1024);
    for (int64_t c = 0; c < g->n; c++)
        e[c] = (double)w[r * g->n + c] - gptq_value(g, r, c);
    for (int64_t i = 0; i < g->n; i++)
        for (int64_t j = 0; j < g->n; j++)
            sum += e[i] * (double)h[i * g->n + j] * e[j];
    return sum;
}

static inline double gptq_error(const gptq_run *g, const float *h, const float *w)
{
    double sum = 0;
    for (int64_t r = 0; r < g->n_rows; r++)
        sum += gptq_row_error(g, h, w, r);
    return sum;
}

#endif
