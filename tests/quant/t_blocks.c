/* Grids of GGUF's block types: rounding to nearest against blocks of llama.cpp's own library
 * (scripts/make_gguf_vectors.py), rows that break naive code, GPTQ on every grid. What is checked is what a
 * file would hold: rows are packed into blocks and decoded again. */
#include "gptq_run.h"

#include "qc_blocks.h"
#include "qc_file.h"
#include "rtn.h"

enum { COLS = 512, ROWS = 24 };

static qc_backend *be;

static void setup(void)
{
    ck_assert_int_eq(qc_backend_cpu_new(NULL, QC_COMPUTE_F32, &be, NULL), QC_OK);
}

static void teardown(void)
{
    qc_backend_close(be);
}

/* Type i of those with codes; NULL behind the last. */
static const qc_block_info *type_at(int i)
{
    for (int k = 0; qc_block_at(k); k++)
        if (qc_block_at(k)->dtype == QC_DT_GRID && i-- == 0)
            return qc_block_at(k);
    return NULL;
}

static qc_quant_spec spec_of(const qc_block_info *type, qc_search search)
{
    return (qc_quant_spec){.grid = type->grid, .search = search};
}

/* y[n_rows, n_cols] = what a file with these rows decodes to, the same bits as the rows themselves but for
 * the sign of zeros. */
static void stored_values(const qc_block_info *type, const qc_code_rows *rows, int64_t n_cols, float *y)
{
    int64_t n = rows->n_rows * n_cols, n_blocks = n / type->n_elems;
    uint8_t *packed = test_alloc(n_blocks, (size_t)type->n_bytes);
    float *direct = test_alloc(n, sizeof *direct);
    qc_block_pack(type, rows, n_cols, packed);
    qc_block_decode(type, packed, n_blocks, y);
    qc_code_rows_decode(rows, &type->grid, n_cols, direct);
    for (int64_t i = 0; i < n; i++)
        ck_assert_msg(y[i] == direct[i] && isfinite(y[i]), "%s, value %lld: %g, not %g", type->name,
                      (long long)i, (double)y[i], (double)direct[i]);
    qc_free(packed);
    qc_free(direct);
}

static double square_error(const float *x, const float *y, int64_t n, const float *h, int64_t n_cols)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum +=
            ((double)x[i] - (double)y[i]) * ((double)x[i] - (double)y[i]) * (h ? (double)h[i % n_cols] : 1);
    return sum;
}

/* Round w[n_rows, n_cols] and return the error of what is stored; y may be NULL. */
static double rounded_error(const qc_block_info *type, qc_search search, const float *w, int64_t n_rows,
                            int64_t n_cols, const float *h, float *y)
{
    qc_quant_spec spec = spec_of(type, search);
    qc_quant_stats stats = {0};
    qc_code_rows rows;
    qc_err err = {0};
    float *own = y ? y : test_alloc(n_rows * n_cols, sizeof *own);
    ck_assert_int_eq(qc_code_rows_alloc(&type->grid, n_rows, n_cols, &rows, &err), QC_OK);
    ck_assert_msg(qc_rtn_rows(be, w, n_rows, n_cols, &spec, h, &rows, &stats, &err) == QC_OK, "%s", err.msg);
    rows.n_rows = n_rows;
    stored_values(type, &rows, n_cols, own);
    double error = square_error(w, own, n_rows * n_cols, h, n_cols);
    ck_assert_msg(fabs(stats.sq_error - error) <= TOL_U * 16 * (stats.sq_error + error), "%s: %g counted, %g",
                  type->name, stats.sq_error, error);
    if (!y)
        qc_free(own);
    qc_code_rows_free(&rows);
    return error;
}

/* Each record: search ggml gives the library's bytes, the search by squared error is not worse than them. */
START_TEST(library_blocks)
{
    char *data;
    size_t n_bytes;
    int n_types = 0;
    ck_assert_int_eq(qc_file_read(test_data("gguf/blocks.bin"), 1 << 20, &data, &n_bytes, NULL), QC_OK);
    setup();
    for (size_t at = 0; at < n_bytes;) {
        uint32_t head[5];
        memcpy(head, data + at, sizeof head);
        const qc_block_info *type = qc_block_find(head[1]);
        const uint8_t *blocks = (const uint8_t *)data + at + sizeof head;
        const float *values = (const float *)(const void *)(blocks + (size_t)head[2] * head[4]);
        at = (size_t)((const char *)(values + (size_t)head[2] * head[3]) - data);
        if (head[0] != 1)
            continue;
        int64_t n = (int64_t)head[2] * head[3];
        float *theirs = test_alloc(n, sizeof *theirs), *w = test_alloc(n, sizeof *w);
        uint8_t *packed = test_alloc(head[2], head[4]);
        qc_quant_spec spec = spec_of(type, QC_SEARCH_GGML);
        qc_quant_stats stats = {0};
        qc_code_rows rows;
        memcpy(w, values, (size_t)n * sizeof *w);
        ck_assert_int_eq(qc_code_rows_alloc(&type->grid, 1, n, &rows, NULL), QC_OK);
        ck_assert_int_eq(qc_rtn_rows(be, w, 1, n, &spec, NULL, &rows, &stats, NULL), QC_OK);
        qc_block_pack(type, &rows, n, packed);
        for (uint32_t b = 0; b < head[2]; b++)
            ck_assert_msg(memcmp(packed + (size_t)b * head[4], blocks + (size_t)b * head[4], head[4]) == 0,
                          "%s, block %u", type->name, b);
        qc_block_decode(type, blocks, head[2], theirs);
        for (uint32_t b = 0; b < head[2]; b++) {
            const float *x = w + (size_t)b * head[3];
            double ours = rounded_error(type, QC_SEARCH_MSE, x, 1, head[3], NULL, NULL),
                   lib = square_error(x, theirs + (size_t)b * head[3], head[3], NULL, head[3]);
            ck_assert_msg(ours <= lib * (1 + TOL_U * 64), "%s, block %u: %g, the library's %g", type->name, b,
                          ours, lib);
        }
        qc_code_rows_free(&rows);
        qc_free(packed);
        qc_free(theirs);
        qc_free(w);
        n_types++;
    }
    ck_assert_int_eq(n_types, 5);
    teardown();
    qc_free(data);
}
END_TEST

/* More bits, less error; the search is never worse than the extremes, with and without weights of columns. */
START_TEST(order_of_types)
{
    static const char *const by_error[] = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K", "Q8_0", NULL};
    qc_rng rng = {0};
    qc_rng_seed(&rng, 3);
    float *w = test_alloc(ROWS * COLS, sizeof *w), *h = test_alloc(COLS, sizeof *h);
    for (int64_t i = 0; i < ROWS * COLS; i++)
        w[i] = (float)(0.02 * qc_rng_normal(&rng) + 0.01);
    for (int64_t i = 0; i < COLS; i++)
        h[i] = (float)exp(qc_rng_normal(&rng));
    setup();
    const qc_block_info *type;
    for (int i = 0; (type = type_at(i)); i++)
        for (int weighted = 0; weighted < 2; weighted++) {
            const float *weights = weighted ? h : NULL;
            double least = rounded_error(type, QC_SEARCH_MSE, w, ROWS, COLS, weights, NULL),
                   extremes = rounded_error(type, QC_SEARCH_MINMAX, w, ROWS, COLS, weights, NULL);
            ck_assert_msg(least < extremes, "%s: %g, from the extremes %g", type->name, least, extremes);
        }
    double before = INFINITY;
    for (int i = 0; by_error[i]; i++) {
        double error = rounded_error(qc_block_by_name(by_error[i]), QC_SEARCH_MSE, w, ROWS, COLS, NULL, NULL);
        ck_assert_msg(error < before, "%s: %g after %g", by_error[i], error, before);
        before = error;
    }
    double q4_k = rounded_error(qc_block_by_name("Q4_K"), QC_SEARCH_MSE, w, ROWS, COLS, NULL, NULL),
           q4_0 = rounded_error(qc_block_by_name("Q4_0"), QC_SEARCH_MSE, w, ROWS, COLS, NULL, NULL);
    ck_assert_msg(q4_k < q4_0, "Q4_K %g, Q4_0 %g", q4_k, q4_0);
    teardown();
    qc_free(w);
    qc_free(h);
}
END_TEST

/* N-5 and its like: rows of 0 and of 1e-30 decode to 0 or what is as small; constants, one value among zeros,
 * the smallest and large numbers stay finite and near. */
START_TEST(odd_rows)
{
    float *w = test_alloc(8 * 256, sizeof *w), *y = test_alloc(8 * 256, sizeof *y);
    for (int i = 0; i < 256; i++) {
        w[256 + i] = 1e-30f;
        w[2 * 256 + i] = 0.75f;
        w[3 * 256 + i] = -0.75f;
        w[4 * 256 + i] = i == 77 ? 3 : 0;
        w[5 * 256 + i] = i % 2 ? 1e-45f : -1e-45f;
        w[6 * 256 + i] = (float)(i % 7 - 3) * 1e4f;
        w[7 * 256 + i] = i < 128 ? 0 : (float)(i % 5) - 2;
    }
    setup();
    const qc_block_info *type;
    for (int i = 0; (type = type_at(i)); i++)
        for (int search = QC_SEARCH_MINMAX; search <= QC_SEARCH_MSE; search++) {
            rounded_error(type, (qc_search)search, w, 8, 256, NULL, y);
            for (int k = 0; k < 256; k++) {
                ck_assert_msg(y[k] == 0, "%s: a zero became %g", type->name, (double)y[k]);
                ck_assert_msg(fabsf(y[256 + k]) < 1e-6f && fabsf(y[5 * 256 + k]) < 1e-6f, "%s: tiny",
                              type->name);
                ck_assert_msg(fabsf(y[2 * 256 + k] - 0.75f) < 0.06f && fabsf(y[3 * 256 + k] + 0.75f) < 0.06f,
                              "%s: constant %g %g", type->name, (double)y[2 * 256 + k],
                              (double)y[3 * 256 + k]);
                ck_assert_msg(fabsf(y[6 * 256 + k] - w[6 * 256 + k]) < 5e3f, "%s: large", type->name);
                ck_assert_msg(k >= 128 || y[7 * 256 + k] == 0, "%s: a zero group became %g", type->name,
                              (double)y[7 * 256 + k]);
            }
        }
    teardown();
    qc_free(w);
    qc_free(y);
}
END_TEST

/* GPTQ beats rounding to nearest in e H e^T of what is stored on every grid, and no row is worse. */
START_TEST(solved)
{
    qc_rng rng = {0};
    qc_rng_seed(&rng, 5);
    float *w = test_alloc(ROWS * COLS, sizeof *w), *h = test_alloc(COLS * COLS, sizeof *h),
          *y = test_alloc(ROWS * COLS, sizeof *y);
    for (int64_t i = 0; i < ROWS * COLS; i++)
        w[i] = (float)(0.05 * qc_rng_normal(&rng));
    float *x = test_alloc(COLS, sizeof *x);
    for (int t = 0; t < 2 * COLS; t++) {
        double common = qc_rng_normal(&rng);
        for (int64_t j = 0; j < COLS; j++)
            x[j] = (float)(qc_rng_normal(&rng) + (j % 3 ? common : 2));
        for (int64_t i = 0; i < COLS; i++)
            for (int64_t j = 0; j < COLS; j++)
                h[i * COLS + j] += x[i] * x[j];
    }
    setup();
    qc_gptq_input *in;
    qc_gptq_input_info info;
    qc_gptq_options options = qc_gptq_defaults();
    ck_assert_int_eq(qc_gptq_input_new(be, h, COLS, &options, &in, &info, NULL), QC_OK);
    const qc_block_info *type;
    for (int i = 0; (type = type_at(i)); i++) {
        qc_quant_spec spec = spec_of(type, QC_SEARCH_MSE);
        qc_quant_stats stats = {0};
        qc_gptq_result result;
        qc_code_rows rows;
        qc_err err = {0};
        ck_assert_int_eq(qc_code_rows_alloc(&type->grid, ROWS, COLS, &rows, NULL), QC_OK);
        ck_assert_msg(qc_gptq_matrix(in, w, ROWS, &spec, &rows, &stats, &result, &err) == QC_OK, "%s",
                      err.msg);
        stored_values(type, &rows, COLS, y);
        double error = 0;
        for (int64_t r = 0; r < ROWS; r++)
            for (int64_t a = 0; a < COLS; a++) {
                double sum = 0, e = (double)w[r * COLS + a] - (double)y[r * COLS + a];
                for (int64_t b = 0; b < COLS; b++)
                    sum += (double)h[a * COLS + b] * ((double)w[r * COLS + b] - (double)y[r * COLS + b]);
                error += e * sum;
            }
        ck_assert_msg(fabs(error - result.error) <= 1e3 * TOL_U * error, "%s: %g, counted %g", type->name,
                      error, result.error);
        ck_assert_msg(result.error < 0.8 * result.error_rtn, "%s: %g, to nearest %g", type->name,
                      result.error, result.error_rtn);
        qc_code_rows_free(&rows);
    }
    qc_gptq_input_free(in);
    teardown();
    qc_free(w);
    qc_free(h);
    qc_free(x);
    qc_free(y);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"library_blocks", library_blocks},
                               {"order_of_types", order_of_types},
                               {"odd_rows", odd_rows},
                               {"solved", solved},
                               {NULL, NULL}};
    return run_tests("blocks", cases);
}
