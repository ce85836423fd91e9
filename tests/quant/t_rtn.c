/* RTN: printed vectors, properties, refusals. */
#include "quant_run.h"

#include "qc_fp.h"
#include "qc_rng.h"

#include <math.h>

static qc_quant_spec spec_of(int bits, bool symmetric, int64_t group, qc_search search)
{
    return (qc_quant_spec){.grid = {.kind = QC_GRID_AFFINE,
                                    .bits = bits,
                                    .symmetric = symmetric,
                                    .group_elems = group,
                                    .scale_dtype = QC_DT_F16},
                           .search = search};
}

static float *decoded(const quant_run *q)
{
    float *y = qc_alloc((size_t)(q->n_rows * q->n_cols), sizeof *y);
    ck_assert_ptr_nonnull(y);
    qc_code_rows_decode(&q->rows, &q->spec.grid, q->n_cols, y);
    return y;
}

/* Every value inside the range of its group's grid is off by at most half a stored step (and the rounding of
 * the decoded value itself, an ulp of it); codes are in range; every number is finite. Returns values out of
 * range. */
static int64_t check_half_step(const quant_run *q, const float *w)
{
    float *y = decoded(q);
    int64_t n_outside = 0;
    int qmax = (1 << q->spec.grid.bits) - 1;
    for (int64_t i = 0; i < q->n_rows * q->n_cols; i++) {
        int64_t g = i / q->n_cols * q->n_groups + i % q->n_cols / q->spec.grid.group_elems;
        double s = (double)q->rows.scales[g], v = (double)w[i] / s;
        double zero = q->rows.zeros ? q->rows.zeros[g] : (qmax + 1) / 2;
        ck_assert_int_le(q->rows.codes[i], qmax);
        ck_assert(isfinite(s) && s != 0 && isfinite(y[i]));
        if (v < -zero - 0.5 || v > qmax - zero + 0.5)
            n_outside++;
        else
            ck_assert_double_le(fabs((double)w[i] - (double)y[i]),
                                fabs(s) * 0.5 + fabs((double)y[i]) * 0x1p-23);
    }
    qc_free(y);
    return n_outside;
}

/* Trouble case N-9: one-sided groups. */
START_TEST(one_sided_groups)
{
    static const float a[] = {-22, -21, -20, -19, -18, -17, -16, -15};
    static const uint8_t codes[] = {0, 12, 23, 35, 46, 58, 70, 81};
    qc_quant_spec spec = spec_of(8, false, 8, QC_SEARCH_MINMAX);
    quant_run q = quantize("", 1, a, 1, 8, &spec, NULL);
    ck_assert_mem_eq(q.rows.codes, codes, 8);
    ck_assert_int_eq(q.rows.zeros[0], 255);
    ck_assert_int_eq(check_half_step(&q, a), 0);
    quant_run_free(&q);

    static const float b[] = {10.5f, 11, 11.5f, 12, 12.5f, 13, 13.5f, 14}, c[] = {1, 2};
    for (int search = 0; search < 2; search++) {
        spec = spec_of(4, false, 8, (qc_search)search);
        q = quantize("", 1, b, 1, 8, &spec, NULL);
        ck_assert_int_eq(check_half_step(&q, b), 0);
        quant_run_free(&q);
        q = quantize("", 1, c, 1, 2, &spec, NULL);
        ck_assert_int_eq(check_half_step(&q, c), 0);
        quant_run_free(&q);
    }
}
END_TEST

/* Trouble case N-4: groups of 1e-9 and of zeros beside a normal one, every scale type. N-5: rows of 0 and
 * 1e-30. */
START_TEST(tiny_groups)
{
    float w[3 * 32] = {0};
    for (int i = 0; i < 16; i++) {
        w[i] = qc_bf16_to_f32(qc_f32_to_bf16(1e-9f));
        w[16 + i] = (float)(i - 8) * 0.25f;
        w[64 + i] = w[80 + i] = 1e-30f;
    }
    static const qc_dtype dtypes[] = {QC_DT_F16, QC_DT_BF16, QC_DT_F32};
    for (int k = 0; k < 12; k++) {
        qc_quant_spec spec = spec_of(4, k & 1, 16, (qc_search)((k >> 1) & 1));
        spec.grid.scale_dtype = dtypes[k / 4];
        quant_run q = quantize("", 1, w, 3, 32, &spec, NULL);
        ck_assert_int_eq(q.rc, 0);
        float *y = decoded(&q);
        for (int i = 0; i < 16; i++) {
            ck_assert_float_le(fabsf(y[i]), 1e-7f);
            ck_assert_float_le(fabsf(y[16 + i] - w[16 + i]), 0.125f);
            ck_assert(y[32 + i] == 0 && y[48 + i] == 0);
            ck_assert_float_le(fabsf(y[64 + i]), 1e-7f);
        }
        ck_assert(q.rows.scales[2] == 1 && q.rows.scales[3] == 1);
        ck_assert_int_eq(q.rows.codes[32], spec.grid.symmetric ? 8 : 0);
        ck_assert_int_eq(q.stats.n_zero_groups, 2);
        ck_assert_int_eq(q.stats.n_small_scale, spec.grid.scale_dtype == QC_DT_F16 ? 3 : 0);
        qc_free(y);
        quant_run_free(&q);
    }
}
END_TEST

/* Weights beyond what a scale can hold: finite, and counted. */
START_TEST(huge_groups)
{
    static const float sizes[] = {1e6f, 1e30f, 3.4e38f};
    static const qc_dtype dtypes[] = {QC_DT_F16, QC_DT_BF16, QC_DT_F32};
    for (int k = 0; k < 36; k++) {
        qc_quant_spec spec = spec_of(k & 4 ? 8 : 2, k & 1, 16, (qc_search)((k >> 1) & 1));
        float w[16], size = sizes[k / 4 % 3];
        spec.grid.scale_dtype = dtypes[k / 12];
        for (int i = 0; i < 16; i++)
            w[i] = size * (((float)i - 7) / 8);
        quant_run q = quantize("", 1, w, 1, 16, &spec, NULL);
        ck_assert_int_eq(q.rc, 0);
        check_half_step(&q, w);
        bool fits = spec.grid.scale_dtype != QC_DT_F16 ? size < 1e38f : size < 1e7f && spec.grid.bits == 8;
        ck_assert_int_eq(q.stats.n_large_scale, fits ? 0 : 1);
        quant_run_free(&q);
    }
}
END_TEST

/* Trouble case N-10: maximum 1, scale 1/7 rounded to F16 or BF16, values beside the half steps of the
 * *stored* scale. */
START_TEST(nearest_for_stored_scale)
{
    static const qc_dtype dtypes[] = {QC_DT_F16, QC_DT_BF16};
    for (int k = 0; k < 2; k++) {
        qc_quant_spec spec = spec_of(4, true, 32, QC_SEARCH_MINMAX);
        spec.sym_rule = QC_SYM_NARROW;
        spec.grid.scale_dtype = dtypes[k];
        float s = k ? qc_bf16_to_f32(qc_f32_to_bf16(1 / 7.0f)) : qc_f16_to_f32(qc_f32_to_f16(1 / 7.0f));
        ck_assert(s != 1 / 7.0f);
        float w[32];
        for (int i = 0; i < 26; i++) /* half steps -6.5 .. 5.5, a little to each side */
            w[i] = s * ((float)(i / 2) - 6.5f + (i & 1 ? 1e-4f : -1e-4f));
        for (int i = 26; i < 32; i++)
            w[i] = 1.0f;
        quant_run q = quantize("", 1, w, 1, 32, &spec, NULL);
        ck_assert_float_eq(q.rows.scales[0], s);
        for (int i = 0; i < 26; i++)
            ck_assert_int_eq(q.rows.codes[i], i / 2 + (i & 1) + 1);
        ck_assert_int_eq(check_half_step(&q, w), 0);
        quant_run_free(&q);
    }
}
END_TEST

/* Trouble case Q-7: a quotient that rounds to 16 is clamped to 15 before anything is packed. */
START_TEST(clamped_codes)
{
    float w[16] = {-2, 2}; /* full range: equal magnitudes, s = 2 / -8, so -2 is 8 + 8 = 16 */
    qc_quant_spec spec = spec_of(4, true, 16, QC_SEARCH_MINMAX);
    quant_run q = quantize("", 1, w, 1, 16, &spec, NULL);
    ck_assert_float_eq(q.rows.scales[0], -0.25f);
    ck_assert_int_eq(q.rows.codes[0], 15);
    ck_assert_int_eq(q.rows.codes[1], 0);
    ck_assert_int_eq(q.rows.codes[2], 8);
    ck_assert_int_eq(q.stats.n_clipped, 1);
    quant_run_free(&q);
}
END_TEST

START_TEST(properties)
{
    enum { ROWS = 4, COLS = 160 };
    static float w[ROWS * COLS], h[COLS];
    qc_rng rng;
    qc_rng_seed(&rng, 5);
    for (int i = 0; i < ROWS * COLS; i++)
        w[i] = (float)(qc_rng_normal(&rng) * (qc_rng_below(&rng, 40) ? 0.05 : 0.5));
    for (int i = 0; i < COLS; i++)
        h[i] = (float)exp(2 * qc_rng_normal(&rng));
    static const int64_t groups[] = {16, 32, 48, 160};
    for (int k = 0; k < 7 * 4 * 4 * 2; k++) {
        qc_quant_spec spec = spec_of(2 + k % 7, k / 7 % 4 != 0, groups[k / 28 % 4], QC_SEARCH_MINMAX);
        spec.sym_rule = spec.grid.symmetric ? (qc_sym_rule)(k / 7 % 4 - 1) : QC_SYM_FULL_RANGE;
        const float *weights = k / 112 ? h : NULL;
        quant_run a = quantize("", 1, w, ROWS, COLS, &spec, weights);
        int64_t n_outside = check_half_step(&a, w);
        ck_assert_int_eq(n_outside, a.stats.n_clipped);
        if (spec.grid.symmetric && spec.sym_rule == QC_SYM_NARROW)
            ck_assert_int_eq(n_outside, 0);
        spec.search = QC_SEARCH_MSE;
        quant_run b = quantize("", 1, w, ROWS, COLS, &spec, weights);
        ck_assert_int_eq(check_half_step(&b, w), b.stats.n_clipped);
        /* never worse; 1e-6: float32 sums of the criterion against the double ones of the statistics */
        ck_assert_double_le(b.stats.sq_error, a.stats.sq_error * (1 + 1e-6));
        ck_assert_double_eq(b.stats.sq_weight, a.stats.sq_weight);

        float *y = decoded(&b);
        double error = 0;
        for (int i = 0; i < ROWS * COLS; i++)
            error += pow((double)w[i] - (double)y[i], 2) * (weights ? (double)h[i % COLS] : 1);
        ck_assert_double_eq_tol(error, b.stats.sq_error, error * 1e-6); /* y is rounded once, e once */
        qc_free(y);
        quant_run_free(&a);
        quant_run_free(&b);
    }
}
END_TEST

/* The best step of a uniform quantizer for Gaussian data. The literature has .352 sigma for 15 levels (Max
 * 1960); a full-range grid has 16 or 256 levels, one more on one side: .338 and .0308, by numerical
 * integration of the squared error. A sample of 32,768 values moves the flat optimum by up to 2 %. */
START_TEST(gaussian_steps)
{
    enum { COLS = 32768 };
    static float w[COLS];
    qc_rng rng;
    qc_rng_seed(&rng, 9);
    for (int i = 0; i < COLS; i++)
        w[i] = (float)qc_rng_normal(&rng);
    static const struct {
        int bits;
        double step;
    } cases[] = {{4, .338}, {8, .0308}};
    for (int k = 0; k < 2; k++) {
        qc_quant_spec spec = spec_of(cases[k].bits, true, COLS, QC_SEARCH_MSE);
        quant_run q = quantize("", 1, w, 1, COLS, &spec, NULL);
        double step = fabs((double)q.rows.scales[0]);
        printf("%d bits: step %.4f sigma, expected about %.3f\n", cases[k].bits, step, cases[k].step);
        ck_assert_double_le(fabs(step / cases[k].step - 1), 0.02);
        quant_run_free(&q);
    }
}
END_TEST

START_TEST(refusals)
{
    float w[3 * 20] = {0}, h[20] = {0};
    qc_quant_spec spec = spec_of(4, false, 16, QC_SEARCH_MSE);
    static const struct {
        float value;
        const char *text;
    } bad[] = {{NAN, "row 1, column 17 is NaN"}, {-INFINITY, "row 1, column 17 is infinite"}};
    for (int i = 0; i < 2; i++) {
        w[37] = bad[i].value;
        quant_run q = quantize("", 1, w, 3, 20, &spec, NULL);
        ck_assert_int_eq(q.rc, QC_E_INPUT);
        ck_assert_ptr_nonnull(strstr(q.err.msg, bad[i].text));
        ck_assert_int_eq(q.rows.codes[0], POISON); /* outputs untouched */
        quant_run_free(&q);
    }
    w[37] = 0;
    static const float bad_h[] = {-1, NAN, INFINITY};
    for (int i = 0; i < 3; i++) {
        h[3] = bad_h[i];
        quant_run q = quantize("", 1, w, 3, 20, &spec, h);
        ck_assert_int_eq(q.rc, QC_E_INPUT);
        ck_assert_ptr_nonnull(strstr(q.err.msg, "column 3"));
        quant_run_free(&q);
    }
    for (int bits = -1; bits <= 10; bits++) {
        spec = spec_of(bits, true, 16, QC_SEARCH_MSE);
        quant_run q = quantize("", 1, w, 3, 20, &spec, NULL);
        ck_assert_int_eq(q.rc, bits >= 2 && bits <= 8 ? 0 : QC_E_UNSUPPORTED);
        quant_run_free(&q);
    }
    spec = spec_of(4, true, 16, QC_SEARCH_MSE);
    spec.grid.scale_dtype = QC_DT_F64;
    quant_run q = quantize("", 1, w, 3, 20, &spec, NULL);
    ck_assert_int_eq(q.rc, QC_E_UNSUPPORTED);
    quant_run_free(&q);
}
END_TEST

START_TEST(empty_matrices)
{
    float w[16] = {0};
    qc_quant_spec spec = spec_of(4, false, 16, QC_SEARCH_MSE);
    for (int i = 0; i < 3; i++) {
        quant_run q = quantize("", 2, w, i & 1 ? 4 : 0, i & 2 ? 16 : 0, &spec, NULL);
        ck_assert_int_eq(q.rc, 0);
        ck_assert(q.stats.sq_weight == 0 && q.stats.n_zero_groups == 0);
        quant_run_free(&q);
    }
}
END_TEST

START_TEST(out_of_memory)
{
    float w[64];
    for (int i = 0; i < 64; i++)
        w[i] = (float)i;
    qc_quant_spec spec = spec_of(4, false, 16, QC_SEARCH_MSE);
    uint8_t codes[64], zeros[4];
    float scales[4];
    qc_code_rows rows = {.codes = codes, .scales = scales, .zeros = zeros};
    qc_quant_stats stats = {0};
    qc_backend *be;
    qc_err err;
    ck_assert_int_eq(qc_backend_cpu_new(NULL, QC_COMPUTE_F32, &be, &err), 0);
    long nth = 1;
    for (;; nth++) {
        qc_alloc_fail_at(nth);
        int rc = qc_rtn_rows(be, w, 2, 32, &spec, NULL, &rows, &stats, &err);
        qc_alloc_fail_at(0);
        if (rc == 0)
            break;
        ck_assert_int_eq(rc, QC_E_RESOURCE);
        ck_assert(stats.sq_weight == 0);
    }
    ck_assert_int_ge(nth, 2);
    qc_backend_close(be);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"one-sided groups", one_sided_groups},
        {"tiny groups", tiny_groups},
        {"huge groups", huge_groups},
        {"stored scale", nearest_for_stored_scale},
        {"clamped codes", clamped_codes},
        {"properties", properties},
        {"gaussian steps", gaussian_steps},
        {"refusals", refusals},
        {"empty matrices", empty_matrices},
        {"out of memory", out_of_memory},
        {NULL, NULL},
    };
    return run_tests("RTN", cases);
}
