/* One quantization of a matrix through the CPU backend, with guarded outputs. */
#ifndef QUANT_RUN_H
#define QUANT_RUN_H

#include "qc_alloc.h"
#include "qc_cpu.h"
#include "qc_test.h"
#include "rtn.h"

enum { GUARD = 64, POISON = 0xa5 };

typedef struct quant_run {
    int64_t n_rows, n_cols, n_groups;
    qc_quant_spec spec;
    qc_code_rows rows;
    qc_quant_stats stats;
    qc_err err;
    int rc;
} quant_run;

static inline void *guarded(size_t n_bytes)
{
    char *p = qc_alloc(n_bytes + GUARD, 1);
    ck_assert_ptr_nonnull(p);
    memset(p, POISON, n_bytes + GUARD);
    return p;
}

static inline void check_guard(const void *p, size_t n_bytes)
{
    const unsigned char *end = (const unsigned char *)p + n_bytes;
    for (int i = 0; i < GUARD; i++)
        ck_assert_int_eq(end[i], POISON);
}

static inline void quant_run_free(quant_run *q)
{
    qc_free(q->rows.codes);
    qc_free(q->rows.scales);
    qc_free(q->rows.zeros);
}

/* Free with quant_run_free, also after a failure. */
static inline quant_run quantize_on(qc_backend *be, const float *w, int64_t n_rows, int64_t n_cols,
                                    const qc_quant_spec *spec, const float *col_weight)
{
    quant_run q = {.n_rows = n_rows, .n_cols = n_cols, .spec = *spec};
    q.n_groups = (n_cols + spec->grid.group_elems - 1) / spec->grid.group_elems;
    size_t n_codes = (size_t)(n_rows * n_cols), n_scales = (size_t)(n_rows * q.n_groups);
    q.rows.codes = guarded(n_codes);
    q.rows.scales = guarded(n_scales * sizeof(float));
    q.rows.zeros = spec->grid.symmetric ? NULL : guarded(n_scales);
    q.rc = qc_rtn_rows(be, w, n_rows, n_cols, spec, col_weight, &q.rows, &q.stats, &q.err);
    check_guard(q.rows.codes, n_codes);
    check_guard(q.rows.scales, n_scales * sizeof(float));
    if (q.rows.zeros)
        check_guard(q.rows.zeros, n_scales);
    return q;
}

/* The same with a backend of its own; mask as for qc_cpu_set_mask. */
static inline quant_run quantize(const char *mask, int n_threads, const float *w, int64_t n_rows,
                                 int64_t n_cols, const qc_quant_spec *spec, const float *col_weight)
{
    qc_pool *pool;
    qc_backend *be;
    qc_err err;
    ck_assert_int_eq(qc_cpu_set_mask(mask, &err), 0);
    ck_assert_int_eq(qc_pool_new(n_threads, &pool, &err), 0);
    ck_assert_int_eq(qc_backend_cpu_new(pool, QC_COMPUTE_F32, &be, &err), 0);
    quant_run q = quantize_on(be, w, n_rows, n_cols, spec, col_weight);
    qc_backend_close(be);
    qc_pool_free(pool);
    return q;
}

#endif
