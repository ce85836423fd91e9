/* The GPTQ solver against vectors of an independent float64 implementation (scripts/gen_gptq_vectors.py,
 * which describes the file): codes, scales and zeros equal, errors equal to rounding. */
#include "gptq_run.h"
#include "vector_row.h"

enum { MAX_COLS = 96, MAX_ROWS = 32 };

typedef struct problem {
    char name[32];
    int n, n_rows;
    float h[MAX_COLS * MAX_COLS], w[MAX_ROWS * MAX_COLS];
} problem;

/* e H e^T and w H w^T in float32 products against double: the sums run over n^2 terms of either sign, whose
 * absolute values add up to at most some ten times the result on these inputs. */
#define TOL_ERROR (10 * TOL_DOT(MAX_COLS * MAX_COLS))

static const char *const masks[] = {"", "avx512", "all"};

static void read_floats(FILE *f, float *dst, int n)
{
    for (int i = 0; i < n; i++) {
        unsigned u;
        ck_assert_int_eq(fscanf(f, "%8x", &u), 1);
        dst[i] = qc_f32_from_bits(u);
    }
}

static void read_problem(FILE *f, problem *p)
{
    ck_assert_int_eq(fscanf(f, "%31s %d %d", p->name, &p->n, &p->n_rows), 3);
    ck_assert(p->n <= MAX_COLS && p->n_rows <= MAX_ROWS);
    for (int i = 0; i < p->n; i++) {
        read_floats(f, p->h + i * p->n, i + 1);
        for (int j = 0; j <= i; j++)
            p->h[j * p->n + i] = p->h[i * p->n + j];
    }
    read_floats(f, p->w, p->n_rows * p->n);
}

static void read_case(FILE *f, qc_quant_spec *spec, qc_gptq_options *options, double error[3])
{
    static const char *const orders[] = {"natural", "static", "minpivot"};
    char rule[16], order[16];
    int bits, group, refit, sweeps;
    ck_assert_int_eq(
        fscanf(f, "%d %15s %d %15s %lf %d %d", &bits, rule, &group, order, &options->damp, &refit, &sweeps),
        7);
    ck_assert_int_eq(fscanf(f, " error %lf %lf %lf", error, error + 1, error + 2), 3);
    *spec = gptq_spec(bits, strcmp(rule, "full") == 0, group, QC_SEARCH_MINMAX);
    options->refit = refit;
    options->sweeps = sweeps;
    for (int i = 0; i < 3; i++)
        if (strcmp(order, orders[i]) == 0)
            options->order = (qc_gptq_order)i;
}

static void check_near(double got, double expected)
{
    ck_assert_double_le(fabs(got - expected), TOL_ERROR * fabs(expected));
}

static void check_case(FILE *f, const problem *p)
{
    qc_quant_spec spec;
    qc_gptq_options options;
    double error[3];
    read_case(f, &spec, &options, error);
    long start = ftell(f);
    for (size_t k = 0; k < sizeof masks / sizeof masks[0]; k++) {
        test_backend t = test_backend_new(masks[k], 1);
        gptq_run g = gptq_on(t.be, p->h, p->n, &options, p->w, p->n_rows, &spec);
        ck_assert_int_eq(g.rc, 0);
        fseek(f, start, SEEK_SET);
        for (int r = 0; r < p->n_rows; r++)
            check_vector_row(f, &g.rows, &g.spec.grid, g.n, g.n_groups, r);
        check_near(g.result.error_rtn, error[0]);
        check_near(g.result.error_solve, error[1]);
        check_near(g.result.error, error[2]);
        ck_assert(g.result.n_rtn_rows == 0 && !g.result.all_rtn && !g.info.failed);
        ck_assert(g.info.n_raises == 0 && g.info.damp == options.damp);
        gptq_run_free(&g);
        test_backend_free(&t);
    }
}

START_TEST(vectors)
{
    FILE *f = fopen(test_data("quant/gptq.txt"), "r");
    ck_assert_ptr_nonnull(f);
    static problem p;
    char word[16];
    int n_cases = 0;
    ck_assert_int_eq(fscanf(f, "#%*[^\n]"), 0);
    while (fscanf(f, "%15s", word) == 1) {
        if (strcmp(word, "problem") == 0) {
            read_problem(f, &p);
            continue;
        }
        ck_assert_str_eq(word, "case");
        check_case(f, &p);
        n_cases++;
    }
    fclose(f);
    ck_assert_int_eq(n_cases, 28);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"vectors", vectors}, {NULL, NULL}};
    return run_tests("gptq_vectors", cases);
}
