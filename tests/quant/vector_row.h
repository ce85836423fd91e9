/* How files of vectors state a quantized row. */
#ifndef QC_TEST_VECTOR_ROW_H
#define QC_TEST_VECTOR_ROW_H

#include "qc_fp.h"
#include "qc_tensor.h"
#include "qc_test.h"

#include <stdio.h>

/* The next row of a file of vectors: scales as bits, zeros ("-" if symmetric), codes. */
static inline void check_vector_row(FILE *f, const qc_code_rows *rows, const qc_grid *grid, int n_cols,
                                    int n_groups, int64_t row)
{
    unsigned u;
    for (int64_t g = 0; g < n_groups; g++) {
        ck_assert_int_eq(fscanf(f, "%8x", &u), 1);
        ck_assert_uint_eq(qc_f32_bits(rows->scales[row * n_groups + g]), u);
    }
    for (int64_t g = 0; g < n_groups && !grid->symmetric; g++) {
        ck_assert_int_eq(fscanf(f, "%u", &u), 1);
        ck_assert_uint_eq(rows->zeros[row * n_groups + g], u);
    }
    if (grid->symmetric)
        ck_assert_int_eq(fscanf(f, " -"), 0);
    for (int64_t c = 0; c < n_cols; c++) {
        ck_assert_int_eq(fscanf(f, "%2x", &u), 1);
        ck_assert_uint_eq(rows->codes[row * n_cols + c], u);
    }
}

#endif
