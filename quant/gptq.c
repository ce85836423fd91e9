/* The GPTQ solver over the operations of a backend. Equations, sources and choices: docs/methods/gptq.md.
 * Letters: R rows of one slice, n columns, G groups per row; position = place in the order of rounding. */
#include "gptq.h"

#include "qc_alloc.h"
#include "qc_blocks.h"
#include "qc_math.h"
#include "rtn.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Rows that are in work together: four buffers of that many rows are all that a matrix needs. Rows do not
 * depend on each other, so neither do results depend on it. */
enum { SLICE_ROWS = 1024 };

/* Rows of one task of what the host does with them. */
enum { TASK_ROWS = 16 };

/* Damping after a failed factorisation: at least DAMP_FIRST, then doubled, never above DAMP_MAX. */
static const double DAMP_FIRST = 0.01, DAMP_MAX = 1;

/* A pivot below this share of its diagonal element is rounding noise of float32, whatever its sign. */
static const double PIVOT_NOISE = 4 * (double)FLT_EPSILON;

/* Columns that min_pivot_order eliminates between two updates of the whole matrix. */
enum { PIVOT_BLOCK = 64 };

struct qc_gptq_input {
    qc_backend *be;
    const float *h; /* backend [n, n], undamped; the caller's */
    int64_t n;
    qc_gptq_options options;
    bool only_rtn;   /* no options were given: nothing is factorised */
    float *diag;     /* host [n], of h; 0 = dead column */
    bool no_data;    /* all columns are dead */
    bool some_dead;  /* some are, but not all */
    float *inv_diag; /* backend [n], 1 / diag, 0 for dead columns */
    int32_t *order;  /* host [n], position -> column */
    float *weight;   /* host [n], of the scale search: pivots by columns */
    float *factor;   /* backend [n, n], of the damped h in the order of rounding; NULL: preparation failed */
    double *pivots;  /* host [n] */
};

qc_gptq_options qc_gptq_defaults(void)
{
    return (qc_gptq_options){.order = QC_ORDER_STATIC, .damp = 0.01, .refit = true, .sweeps = 2};
}

/* ---- preparation of an input ---- */

/* Check h and take its diagonal. mean_diag is over the columns that are not dead. */
static int scan_h(qc_gptq_input *in, const float *h, qc_gptq_input_info *info, qc_err *err)
{
    int64_t n = in->n, bad = qc_first_nonfinite(h, n * n);
    if (bad >= 0)
        return qc_fail(err, QC_E_INPUT,
                       "second moments of inputs %lld and %lld are %s, expected a finite number",
                       (long long)(bad / n), (long long)(bad % n), isnan(h[bad]) ? "NaN" : "infinite");
    double sum = 0;
    for (int64_t j = 0; j < n; j++) {
        float d = h[j * n + j];
        if (d < 0)
            return qc_fail(err, QC_E_INPUT, "second moment of input %lld is %g, expected >= 0", (long long)j,
                           (double)d);
        in->diag[j] = d;
        sum += (double)d;
        info->n_dead += d == 0;
    }
    in->no_data = info->n_dead == n;
    in->some_dead = info->n_dead > 0 && !in->no_data;
    info->mean_diag = in->no_data ? 0 : sum / (double)(n - info->n_dead);
    return QC_OK;
}

/* Diagonal element of the matrix that is factored: dead columns count as average ones (they are coupled to
 * nothing), then damping is added. */
static double damped_diag(const qc_gptq_input *in, const qc_gptq_input_info *info, int64_t column)
{
    double d = (double)in->diag[column];
    return (d > 0 ? d : info->mean_diag) + info->damp * info->mean_diag;
}

typedef struct sort_key {
    float diag;
    int32_t column;
} sort_key;

static int compare_keys(const void *a, const void *b)
{
    const sort_key *x = a, *y = b;
    if (x->diag != y->diag)
        return x->diag > y->diag ? -1 : 1;
    return x->column < y->column ? -1 : 1;
}

static int static_order(qc_gptq_input *in, qc_err *err)
{
    sort_key *keys = qc_alloc((size_t)in->n, sizeof *keys);
    if (!keys)
        return qc_fail_nomem(err, "order of columns", (unsigned long long)in->n * sizeof *keys);
    for (int64_t j = 0; j < in->n; j++)
        keys[j] = (sort_key){in->diag[j], (int32_t)j};
    qsort(keys, (size_t)in->n, sizeof *keys, compare_keys);
    for (int64_t j = 0; j < in->n; j++)
        in->order[j] = keys[j].column;
    qc_free(keys);
    return QC_OK;
}

/* State of the elimination in min_pivot_order. rows[k] of the block is column k of the Cholesky factor,
 * indexed by the column of h; 0 at columns that were eliminated before. */
typedef struct elimination {
    double *schur; /* host [n], present diagonal */
    bool *gone;    /* host [n] */
    float *rows;   /* host [PIVOT_BLOCK, n] */
} elimination;

/* Eliminate the column with the smallest Schur complement as number k of the block; row[n] holds the matrix
 * as of the start of the block. */
static void eliminate(elimination *el, int64_t n, int64_t column, int64_t k, float *row)
{
    for (int64_t i = 0; i < k; i++) {
        const float *l = el->rows + i * n;
        float f = l[column];
        for (int64_t j = 0; j < n; j++)
            row[j] -= f * l[j];
    }
    /* only an order is wanted: a pivot lost to rounding must not spread */
    double pivot = el->schur[column] > (double)FLT_MIN ? el->schur[column] : INFINITY;
    float scale = (float)(1 / sqrt(pivot));
    el->gone[column] = true;
    for (int64_t j = 0; j < n; j++) {
        row[j] = el->gone[j] ? 0 : row[j] * scale;
        el->schur[j] -= (double)row[j] * (double)row[j];
    }
}

static int64_t smallest_left(const elimination *el, int64_t n)
{
    int64_t best = -1;
    for (int64_t j = 0; j < n; j++)
        if (!el->gone[j] && (best < 0 || el->schur[j] < el->schur[best]))
            best = j;
    return best;
}

/* Positions from the last to the first: always the column whose Schur complement (its variance given the
 * columns that come after it) is smallest. a[n, n] (backend, full, damped, order of h) is used up; block is
 * backend scratch [PIVOT_BLOCK, n]. */
static int eliminate_all(qc_gptq_input *in, elimination *el, float *a, float *block, qc_err *err)
{
    qc_backend *be = in->be;
    int64_t n = in->n;
    for (int64_t done = 0; done < n;) {
        int64_t n_block = qc_min_i64(PIVOT_BLOCK, n - done);
        for (int64_t k = 0; k < n_block; k++, done++) {
            int64_t column = smallest_left(el, n);
            float *row = el->rows + k * n;
            QC_TRY(be->download(be, row, a + column * n, n, err));
            eliminate(el, n, column, k, row);
            in->order[n - 1 - done] = (int32_t)column;
        }
        QC_TRY(be->upload(be, block, el->rows, n_block * n, err));
        QC_TRY(be->gram(be, a, block, n, block, n, n_block, n, n, -1, err));
    }
    return QC_OK;
}

static int copy_h(qc_gptq_input *in, const qc_gptq_input_info *info, const float *h, bool lower, float *a,
                  qc_err *err);

static int min_pivot_order(qc_gptq_input *in, const qc_gptq_input_info *info, const float *h, qc_err *err)
{
    qc_backend *be = in->be;
    int64_t n = in->n;
    float *block = be->alloc(be, PIVOT_BLOCK * n, err);
    elimination el = {.schur = qc_alloc((size_t)n, sizeof *el.schur),
                      .gone = qc_calloc((size_t)n, sizeof *el.gone),
                      .rows = qc_alloc((size_t)(PIVOT_BLOCK * n), sizeof *el.rows)};
    int rc = QC_E_RESOURCE;
    if (!el.schur || !el.gone || !el.rows)
        rc = qc_fail_nomem(err, "order of columns", (unsigned long long)(PIVOT_BLOCK * n) * sizeof *el.rows);
    else if (block) {
        for (int64_t j = 0; j < n; j++) {
            in->order[j] = (int32_t)j;
            el.schur[j] = damped_diag(in, info, j);
        }
        rc = copy_h(in, info, h, false, in->factor, err);
        if (rc == QC_OK)
            rc = eliminate_all(in, &el, in->factor, block, err);
    }
    qc_free(el.schur);
    qc_free(el.gone);
    qc_free(el.rows);
    if (block)
        be->free(be, block);
    return rc;
}

/* a (backend [n, n]) <- damped h in the order of rounding; `lower` leaves the upper triangle undefined. h is
 * its host view. */
static int copy_h(qc_gptq_input *in, const qc_gptq_input_info *info, const float *h, bool lower, float *a,
                  qc_err *err)
{
    qc_backend *be = in->be;
    int64_t n = in->n;
    float *row = be->host_memory ? NULL : qc_alloc((size_t)n, sizeof *row);
    if (!be->host_memory && !row)
        return qc_fail_nomem(err, "row of second moments", (unsigned long long)n * sizeof *row);
    int rc = QC_OK;
    for (int64_t i = 0; i < n && rc == QC_OK; i++) {
        const float *src = h + in->order[i] * n;
        float *dst = row ? row : a + i * n;
        int64_t n_used = lower ? i + 1 : n;
        for (int64_t j = 0; j < n_used; j++)
            dst[j] = src[in->order[j]];
        dst[i] = (float)damped_diag(in, info, in->order[i]);
        if (row)
            rc = be->upload(be, a + i * n, row, n_used, err);
    }
    qc_free(row);
    return rc;
}

/* Whether the factorisation went through and all pivots stand out of the rounding noise. */
static bool pivots_good(const qc_gptq_input *in, const qc_gptq_input_info *info, int64_t bad)
{
    if (bad >= 0)
        return false;
    for (int64_t j = 0; j < in->n; j++)
        if (!(in->pivots[j] > PIVOT_NOISE * damped_diag(in, info, in->order[j])))
            return false;
    return true;
}

static int choose_order(qc_gptq_input *in, const qc_gptq_input_info *info, const float *h, qc_err *err)
{
    if (in->options.order == QC_ORDER_STATIC)
        return static_order(in, err);
    if (in->options.order == QC_ORDER_MIN_PIVOT)
        return min_pivot_order(in, info, h, err);
    for (int64_t j = 0; j < in->n; j++)
        in->order[j] = (int32_t)j;
    return QC_OK;
}

/* Order and factor, raising the damping as often as it takes and is allowed. */
static int factor_input(qc_gptq_input *in, const float *h, qc_gptq_input_info *info, qc_err *err)
{
    qc_backend *be = in->be;
    in->factor = be->alloc(be, in->n * in->n, err);
    if (!in->factor)
        return QC_E_RESOURCE;
    QC_TRY(choose_order(in, info, h, err));
    for (;;) {
        int64_t bad = -1;
        QC_TRY(copy_h(in, info, h, true, in->factor, err));
        QC_TRY(be->factor(be, in->factor, in->n, in->pivots, &bad, err));
        if (pivots_good(in, info, bad))
            return QC_OK;
        double damp = fmax(DAMP_FIRST, 2 * info->damp);
        if (damp > DAMP_MAX)
            break;
        info->damp = damp;
        info->n_raises++;
    }
    be->free(be, in->factor);
    in->factor = NULL;
    info->failed = true;
    return QC_OK;
}

/* Reciprocals of the diagonal for coordinate descent. */
static int make_inv_diag(qc_gptq_input *in, qc_err *err)
{
    qc_backend *be = in->be;
    float *inv = qc_alloc((size_t)in->n, sizeof *inv);
    if (!inv)
        return qc_fail_nomem(err, "diagonal", (unsigned long long)in->n * sizeof *inv);
    for (int64_t j = 0; j < in->n; j++)
        inv[j] = in->diag[j] > 0 ? fminf(1 / in->diag[j], FLT_MAX) : 0;
    in->inv_diag = be->alloc(be, in->n, err);
    int rc = in->inv_diag ? be->upload(be, in->inv_diag, inv, in->n, err) : QC_E_RESOURCE;
    qc_free(inv);
    return rc;
}

/* Weights of the search for the scales that the solver rounds with. A column's own error costs its pivot,
 * what later columns can not make up for; H_jj would count what they can. */
static void make_weights(qc_gptq_input *in)
{
    for (int64_t k = 0; k < in->n; k++)
        in->weight[in->order[k]] = (float)in->pivots[k];
}

static int prepare(qc_gptq_input *in, qc_gptq_input_info *info, qc_err *err)
{
    qc_backend *be = in->be;
    int64_t n = in->n;
    in->diag = qc_alloc((size_t)n, sizeof *in->diag);
    in->order = qc_alloc((size_t)n, sizeof *in->order);
    in->pivots = qc_alloc((size_t)n, sizeof *in->pivots);
    in->weight = qc_alloc((size_t)n, sizeof *in->weight);
    float *copy = be->host_memory ? NULL : qc_alloc((size_t)(n * n), sizeof *copy);
    const float *h = be->host_memory ? in->h : copy;
    int rc = QC_OK;
    if (!in->diag || !in->order || !in->pivots || !in->weight || !h)
        rc = qc_fail_nomem(err, "preparation of an input", (unsigned long long)(n * n) * sizeof *copy);
    if (rc == QC_OK && copy)
        rc = be->download(be, copy, in->h, n * n, err);
    if (rc == QC_OK)
        rc = scan_h(in, h, info, err);
    if (rc == QC_OK)
        rc = make_inv_diag(in, err);
    if (rc == QC_OK && in->no_data && !in->only_rtn)
        info->failed = true;
    else if (rc == QC_OK && !in->only_rtn)
        rc = factor_input(in, h, info, err);
    if (rc == QC_OK && in->factor)
        make_weights(in);
    qc_free(copy);
    return rc;
}

int qc_gptq_input_new(qc_backend *be, const float *h, int64_t n, const qc_gptq_options *options,
                      qc_gptq_input **ret, qc_gptq_input_info *ret_info, qc_err *err)
{
    const qc_gptq_options none = {0};
    bool only_rtn = !options;
    if (only_rtn)
        options = &none;
    if (n < 1 || n > INT32_MAX || !(options->damp >= 0) || isinf(options->damp) || options->sweeps < 0)
        return qc_fail(err, QC_E_USAGE,
                       "GPTQ of %lld inputs with damping %g and %lld sweeps, expected 1 or more inputs, "
                       "a damping >= 0 and 0 or more sweeps",
                       (long long)n, options->damp, (long long)options->sweeps);
    qc_gptq_input *in = qc_calloc(1, sizeof *in);
    if (!in)
        return qc_fail_nomem(err, "preparation of an input", sizeof *in);
    *in = (qc_gptq_input){.be = be, .h = h, .n = n, .options = *options, .only_rtn = only_rtn};
    qc_gptq_input_info info = {.damp = options->damp};
    int rc = prepare(in, &info, err);
    if (rc != QC_OK) {
        qc_gptq_input_free(in);
        return rc;
    }
    *ret = in;
    *ret_info = info;
    return QC_OK;
}

void qc_gptq_input_free(qc_gptq_input *in)
{
    if (!in)
        return;
    if (in->inv_diag)
        in->be->free(in->be, in->inv_diag);
    if (in->factor)
        in->be->free(in->be, in->factor);
    qc_free(in->diag);
    qc_free(in->order);
    qc_free(in->pivots);
    qc_free(in->weight);
    qc_free(in);
}

int qc_gptq_shrink(qc_backend *be, float *h, int64_t n, double share, qc_err *err)
{
    if (share == 0)
        return QC_OK;
    float *diag = qc_alloc((size_t)n, sizeof *diag);
    int rc = diag ? QC_OK : qc_fail_nomem(err, "diagonal", (unsigned long long)n * sizeof *diag);
    for (int64_t j = 0; j < n && rc == QC_OK; j++)
        rc = be->download(be, diag + j, h + j * (n + 1), 1, err);
    if (rc == QC_OK)
        rc = be->scale(be, h, h, (float)(1 - share), n * n, err);
    for (int64_t j = 0; j < n && rc == QC_OK; j++)
        rc = be->upload(be, h + j * (n + 1), diag + j, 1, err);
    qc_free(diag);
    return rc;
}

/* ---- corrected target ---- */

typedef struct transposed {
    const float *d;       /* host [n, n] */
    const int32_t *order; /* position -> column */
    int64_t n;
} transposed;

/* Rows of D^T in the order of rounding, so that the product comes out in that order. */
static int fetch_transposed(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *err)
{
    const transposed *t = ctx;
    (void)err;
    for (int64_t k = 0; k < t->n; k++)
        for (int64_t r = 0; r < n_rows; r++)
            dst[r * t->n + k] = t->d[k * t->n + t->order[row0 + r]];
    return QC_OK;
}

/* host[n_rows, n] (in the order of rounding) += r (in that of columns) */
static int add_ordered(qc_gptq_input *in, const float *r, int64_t n_rows, float *host, qc_err *err)
{
    int64_t n = in->n;
    float *copy = qc_alloc((size_t)(n_rows * n), sizeof *copy);
    if (!copy)
        return qc_fail_nomem(err, "corrected target", (unsigned long long)(n_rows * n) * sizeof *copy);
    int rc = in->be->download(in->be, copy, r, n_rows * n, err);
    for (int64_t i = 0; i < n_rows && rc == QC_OK; i++)
        for (int64_t j = 0; j < n; j++)
            host[i * n + j] += copy[i * n + in->order[j]];
    qc_free(copy);
    return rc;
}

/* x, y: backend [SLICE_ROWS, n]; host: [SLICE_ROWS, n]. */
static int correct_slice(qc_gptq_input *in, const qc_weight *d, const float *r, double alpha, float *w,
                         int64_t n_rows, float *x, float *y, float *host, qc_err *err)
{
    qc_backend *be = in->be;
    int64_t n = in->n;
    if (d) {
        QC_TRY(be->upload(be, x, w, n_rows * n, err));
        QC_TRY(be->linear(be, y, n, x, n, d, NULL, n_rows, false, err));
        QC_TRY(be->download(be, host, y, n_rows * n, err));
    } else {
        memset(host, 0, (size_t)(n_rows * n) * sizeof *host);
    }
    if (r)
        QC_TRY(add_ordered(in, r, n_rows, host, err));
    QC_TRY(be->upload(be, y, host, n_rows * n, err));
    QC_TRY(be->factor_solve(be, in->factor, in->pivots, y, n_rows, n, err));
    QC_TRY(be->download(be, host, y, n_rows * n, err));
    for (int64_t i = 0; i < n_rows; i++)
        for (int64_t j = 0; j < n; j++)
            w[i * n + in->order[j]] += (float)(alpha * (double)host[i * n + j]);
    return QC_OK;
}

int qc_gptq_correct_target(qc_gptq_input *in, const float *d, const float *r, double alpha, float *w,
                           int64_t n_rows, qc_err *err)
{
    if (!in->factor || alpha == 0)
        return QC_OK;
    qc_backend *be = in->be;
    int64_t n = in->n, most = qc_min_i64(n_rows, SLICE_ROWS);
    float *copy = be->host_memory || !d ? NULL : qc_alloc((size_t)(n * n), sizeof *copy);
    float *host = qc_alloc((size_t)(most * n), sizeof *host);
    float *x = be->alloc(be, most * n, err), *y = be->alloc(be, most * n, err);
    qc_weight *weight = NULL;
    int rc = x && y ? QC_OK : QC_E_RESOURCE;
    if (rc == QC_OK && (!host || (d && !be->host_memory && !copy)))
        rc = qc_fail_nomem(err, "corrected target", (unsigned long long)(n * n) * sizeof *copy);
    if (rc == QC_OK && copy)
        rc = be->download(be, copy, d, n * n, err);
    transposed t = {.d = copy ? copy : d, .order = in->order, .n = n};
    if (rc == QC_OK && d)
        rc = be->weight_load(be, n, n, fetch_transposed, &t, &weight, err);
    for (int64_t row0 = 0; row0 < n_rows && rc == QC_OK; row0 += SLICE_ROWS)
        rc = correct_slice(in, weight, r ? r + row0 * n : NULL, alpha, w + row0 * n,
                           qc_min_i64(SLICE_ROWS, n_rows - row0), x, y, host, err);
    be->weight_free(be, weight);
    if (x)
        be->free(be, x);
    if (y)
        be->free(be, y);
    qc_free(host);
    qc_free(copy);
    return rc;
}

/* ---- solution of a matrix ---- */

/* One slice of rows in work; buffers hold SLICE_ROWS rows (fewer if the matrix has fewer). */
typedef struct slice {
    qc_gptq_input *in;
    const qc_quant_spec *spec;
    int64_t n_rows, n_groups;
    const float *w;    /* [n_rows, n] of the caller */
    qc_code_rows rows; /* views of the caller's arrays */
    float *host;       /* host [R, n] staging; NULL where the backend has host memory */
    float *target, *error,
        *ordered;           /* backend [R, n]: w and its error by columns, w in the order of rounding */
    uint8_t *ordered_codes; /* host [R, n] */
    int32_t *group_of;      /* host [n] group of a position */
    qc_code_rows best;      /* host copies of the best codes and scales of each row so far */
    /* A grid with minima or super-blocks is shown to the backend as a plain one: its minima are taken off the
     * targets, all zero points are 0. */
    qc_grid grid;
    uint8_t *no_zeros; /* host [R, n_groups], 0; NULL: the grid is plain or symmetric */
    uint8_t *ones;     /* host [R, n], 1: codes under which minima are fitted like scales; NULL likewise */
    bool *best_is_rtn; /* host [R] */
    double *error_rtn, *error_now, *error_best; /* host [R] */
    qc_quant_stats *row_stats;                  /* host [R] */
} slice;

static void slice_free(slice *s)
{
    qc_backend *be = s->in->be;
    float *buffers[] = {s->target, s->error, s->ordered};
    for (int i = 0; i < 3; i++)
        if (buffers[i])
            be->free(be, buffers[i]);
    qc_code_rows_free(&s->best);
    void *arrays[] = {s->best_is_rtn, s->error_best, s->host, s->ordered_codes, s->group_of,
                      s->error_rtn,   s->error_now,  s->ones, s->no_zeros,      s->row_stats};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        qc_free(arrays[i]);
}

static int slice_alloc(slice *s, int64_t n_rows, qc_err *err)
{
    qc_backend *be = s->in->be;
    int64_t n = s->in->n, most = qc_min_i64(n_rows, SLICE_ROWS);
    size_t n_codes = (size_t)(most * n), n_scales = (size_t)(most * s->n_groups);
    bool has_min = qc_grid_has_min(&s->spec->grid);
    s->host = be->host_memory ? NULL : qc_alloc(n_codes, sizeof *s->host);
    s->ordered_codes = qc_alloc(n_codes, 1);
    s->group_of = qc_alloc((size_t)n, sizeof *s->group_of);
    s->no_zeros = has_min ? qc_calloc(n_scales, 1) : NULL;
    s->ones = has_min ? qc_alloc(n_codes, 1) : NULL;
    s->error_rtn = qc_alloc((size_t)most, sizeof *s->error_rtn);
    s->error_now = qc_alloc((size_t)most, sizeof *s->error_now);
    s->error_best = qc_alloc((size_t)most, sizeof *s->error_best);
    s->best_is_rtn = qc_alloc((size_t)most, sizeof *s->best_is_rtn);
    s->row_stats = qc_alloc((size_t)most, sizeof *s->row_stats);
    if ((!s->host && !be->host_memory) || !s->ordered_codes || !s->group_of ||
        (has_min && (!s->no_zeros || !s->ones)) || !s->error_rtn || !s->error_now || !s->error_best ||
        !s->best_is_rtn || !s->row_stats)
        return qc_fail_nomem(err, "rows in work", n_codes * sizeof *s->host);
    if (has_min)
        memset(s->ones, 1, n_codes);
    QC_TRY(qc_code_rows_alloc(&s->spec->grid, most, n, &s->best, err));
    s->target = be->alloc(be, most * n, err);
    s->error = be->alloc(be, most * n, err);
    s->ordered = be->alloc(be, most * n, err);
    if (!s->target || !s->error || !s->ordered)
        return QC_E_RESOURCE;
    for (int64_t j = 0; j < n; j++)
        s->group_of[j] = (int32_t)(s->in->order[j] / s->spec->grid.group_elems);
    return QC_OK;
}

/* ---- rows on the host ---- */

/* Row r of the slice; dst[n] is where what is made of it goes, NULL where nothing is. */
typedef void (*row_fn)(slice *s, int64_t r, float *dst);

typedef struct rows_job {
    slice *s;
    row_fn fn;
    float *dst; /* [R, n] or NULL */
} rows_job;

static void rows_task(void *ctx, int64_t task, int thread)
{
    const rows_job *job = ctx;
    int64_t end = qc_min_i64(job->s->n_rows, (task + 1) * TASK_ROWS);
    (void)thread;
    for (int64_t r = task * TASK_ROWS; r < end; r++)
        job->fn(job->s, r, job->dst ? job->dst + r * job->s->in->n : NULL);
}

static void each_row(slice *s, row_fn fn, float *dst)
{
    rows_job job = {s, fn, dst};
    s->in->be->host_tasks(s->in->be, qc_ceil_div(s->n_rows, TASK_ROWS), rows_task, &job);
}

/* A buffer's rows <- fn. *ret_host (unless NULL): the same in host memory, until the next call. */
static int put_rows(slice *s, row_fn fn, float *buffer, const float **ret_host, qc_err *err)
{
    qc_backend *be = s->in->be;
    float *host = be->host_memory ? buffer : s->host;
    each_row(s, fn, host);
    if (ret_host)
        *ret_host = host;
    return be->host_memory ? QC_OK : be->upload(be, buffer, host, s->n_rows * s->in->n, err);
}

/* What a row shall stand for: dead columns aim at 0, except where there are no data at all. */
static void target_row(slice *s, int64_t r, float *dst)
{
    const qc_gptq_input *in = s->in;
    const float *w = s->w + r * in->n;
    if (!in->some_dead) {
        memcpy(dst, w, (size_t)in->n * sizeof *dst);
        return;
    }
    for (int64_t c = 0; c < in->n; c++)
        dst[c] = in->diag[c] > 0 ? w[c] : 0;
}

static int zero_of(const slice *s, int64_t group)
{
    if (s->rows.mins)
        return 0;
    return s->rows.zeros ? s->rows.zeros[group] : 1 << (s->spec->grid.bits - 1);
}

/* The same less the minima of the groups. */
static void shifted_row(slice *s, int64_t r, float *dst)
{
    int64_t n = s->in->n, group = s->spec->grid.group_elems;
    target_row(s, r, dst);
    for (int64_t g = 0; s->rows.mins && g < s->n_groups; g++) {
        float min = s->rows.mins[r * s->n_groups + g];
        for (int64_t c = g * group; c < qc_min_i64(n, (g + 1) * group); c++)
            dst[c] -= min;
    }
}

/* Target less the value of the present codes. */
static void error_row(slice *s, int64_t r, float *dst)
{
    int64_t n = s->in->n, group = s->spec->grid.group_elems;
    const uint8_t *codes = s->rows.codes + r * n;
    shifted_row(s, r, dst);
    for (int64_t g = 0; g < s->n_groups; g++) {
        float scale = s->rows.scales[r * s->n_groups + g];
        int zero = zero_of(s, r * s->n_groups + g);
        for (int64_t c = g * group; c < qc_min_i64(n, (g + 1) * group); c++)
            dst[c] -= scale * (float)(codes[c] - zero);
    }
}

/* The target less the minima, in the order of rounding. */
static void ordered_row(slice *s, int64_t r, float *dst)
{
    const qc_gptq_input *in = s->in;
    int64_t group = s->spec->grid.group_elems;
    const float *w = s->w + r * in->n, *mins = s->rows.mins ? s->rows.mins + r * s->n_groups : NULL;
    for (int64_t j = 0; j < in->n; j++) {
        int64_t c = in->order[j];
        dst[j] = (in->diag[c] > 0 ? w[c] : 0) - (mins ? mins[c / group] : 0);
    }
}

/* What minima shall stand for: the target less the scaled codes. */
static void minimum_row(slice *s, int64_t r, float *dst)
{
    int64_t n = s->in->n, group = s->spec->grid.group_elems;
    const uint8_t *codes = s->rows.codes + r * n;
    target_row(s, r, dst);
    for (int64_t g = 0; g < s->n_groups; g++) {
        float scale = s->rows.scales[r * s->n_groups + g];
        for (int64_t c = g * group; c < qc_min_i64(n, (g + 1) * group); c++)
            dst[c] -= scale * (float)codes[c];
    }
}

/* Codes in the order of rounding to that of columns. */
static void place_codes(slice *s, int64_t r, float *dst)
{
    int64_t n = s->in->n;
    (void)dst;
    for (int64_t j = 0; j < n; j++)
        s->rows.codes[r * n + s->in->order[j]] = s->ordered_codes[r * n + j];
}

static int put_errors(slice *s, qc_err *err)
{
    return put_rows(s, error_row, s->error, NULL, err);
}

static int measure(slice *s, const float *e, double *ret, qc_err *err)
{
    return s->in->be->hessian_error(s->in->be, s->in->h, e, s->n_rows, s->in->n, ret, err);
}

/* Round to nearest with the scale search weighted by diag(H), what the solver has to beat. */
static int round_to_nearest(slice *s, qc_quant_stats *stats, qc_err *err)
{
    qc_gptq_input *in = s->in;
    const float *targets;
    QC_TRY(put_rows(s, target_row, s->target, &targets, err));
    QC_TRY(qc_rtn_rows(in->be, targets, s->n_rows, in->n, s->spec, in->no_data ? NULL : in->diag, &s->rows,
                       stats, err));
    QC_TRY(put_errors(s, err));
    return measure(s, s->error, s->error_rtn, err);
}

static qc_round_rows rows_in_work(slice *s)
{
    return (qc_round_rows){.n_rows = s->n_rows,
                           .n_cols = s->in->n,
                           .target = s->target,
                           .error = s->error,
                           .codes = s->rows.codes,
                           .scales = s->rows.scales,
                           .zeros = s->no_zeros ? s->no_zeros : s->rows.zeros};
}

/* A grid for the GPTQ passes by a search of its own, and the targets in the order of rounding. */
static int prepare_passes(slice *s, qc_quant_stats *stats, qc_err *err)
{
    qc_gptq_input *in = s->in;
    const float *targets;
    QC_TRY(put_rows(s, target_row, s->target, &targets, err));
    QC_TRY(qc_rtn_rows(in->be, targets, s->n_rows, in->n, s->spec, in->weight, &s->rows, stats, err));
    return put_rows(s, ordered_row, s->ordered, NULL, err);
}

/* A GPTQ pass with the present scales: columns in their order, each error fed forward to later ones. */
static int pass(slice *s, qc_err *err)
{
    qc_gptq_input *in = s->in;
    qc_round_rows rows = rows_in_work(s);
    rows.target = s->ordered;
    rows.codes = s->ordered_codes;
    rows.group_of = s->group_of;
    QC_TRY(in->be->round_forward(in->be, in->factor, &s->grid, &rows, err));
    each_row(s, place_codes, NULL);
    QC_TRY(put_errors(s, err));
    return measure(s, s->error, s->error_now, err);
}

/* Scales and codes in turn, each step lowering e H e^T of every row or leaving it. */
static int descend(slice *s, int64_t n_sweeps, bool refit, qc_err *err)
{
    qc_gptq_input *in = s->in;
    qc_round_rows rows = rows_in_work(s);
    if (s->rows.mins)
        QC_TRY(put_rows(s, shifted_row, s->target, NULL, err));
    return in->be->descend(in->be, in->h, in->inv_diag, &s->grid, &rows, n_sweeps, refit, err);
}

/* Minima that are best for the present codes and scales: the same fit, with the minima as scales of codes
 * that are all 1. */
static int refit_minima(slice *s, qc_err *err)
{
    qc_gptq_input *in = s->in;
    QC_TRY(put_errors(s, err));
    QC_TRY(put_rows(s, minimum_row, s->target, NULL, err));
    qc_round_rows rows = rows_in_work(s);
    rows.codes = s->ones;
    rows.scales = s->rows.mins;
    return in->be->descend(in->be, in->h, in->inv_diag, &s->grid, &rows, 0, true, err);
}

/* What is stored for the fitted scales and minima of super-blocks. */
static void round_supers(slice *s)
{
    const qc_grid *grid = &s->spec->grid;
    int64_t per_super = grid->super_elems / grid->group_elems;
    if (grid->kind != QC_GRID_SUPER)
        return;
    for (int64_t i = 0; i < s->n_rows * s->n_groups / per_super; i++) {
        const float *mins = s->rows.mins ? s->rows.mins + i * per_super : NULL;
        qc_super_round(grid, s->rows.scales + i * per_super, mins, s->rows.supers + 2 * i,
                       s->rows.subs + 2 * i * per_super);
    }
    qc_code_rows_multiply(&s->rows, grid, s->in->n);
}

/* Scales, and minima where the grid has them, fitted to the present codes. */
static int refit(slice *s, qc_err *err)
{
    QC_TRY(put_errors(s, err));
    QC_TRY(descend(s, 0, true, err));
    if (s->rows.mins)
        QC_TRY(refit_minima(s, err));
    round_supers(s);
    return QC_OK;
}

static int polish(slice *s, qc_err *err)
{
    /* fitted scales of super-blocks would not be those that are stored */
    bool fit_scales = s->in->options.refit && s->spec->grid.kind != QC_GRID_SUPER;
    QC_TRY(put_errors(s, err));
    QC_TRY(descend(s, s->in->options.sweeps, fit_scales, err));
    QC_TRY(put_errors(s, err));
    return measure(s, s->error, s->error_now, err);
}

static void copy_row(const slice *s, qc_code_rows *dst, const qc_code_rows *src, int64_t r)
{
    qc_code_rows_copy(dst, r, src, r, &s->spec->grid, s->in->n);
}

/* The best so far and the present codes both become the better of the two. An error that is not a number is
 * never better. */
static void keep_better_row(slice *s, int64_t r, float *dst)
{
    (void)dst;
    if (s->error_now[r] <= s->error_best[r]) {
        copy_row(s, &s->best, &s->rows, r);
        s->error_best[r] = s->error_now[r];
        s->best_is_rtn[r] = false;
    } else
        copy_row(s, &s->rows, &s->best, r);
}

static void keep_better(slice *s)
{
    each_row(s, keep_better_row, NULL);
}

/* What there is to begin with. */
static void keep_rtn_row(slice *s, int64_t r, float *dst)
{
    (void)dst;
    copy_row(s, &s->best, &s->rows, r);
    s->error_best[r] = s->error_rtn[r];
    s->best_is_rtn[r] = true;
}

static double sum_of(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i];
    return sum;
}

static int solve(slice *s, qc_quant_stats *stats, qc_gptq_result *ret, qc_err *err)
{
    QC_TRY(prepare_passes(s, stats, err));
    QC_TRY(pass(s, err));
    ret->error_solve += sum_of(s->error_now, s->n_rows);
    if (s->in->options.refit) {
        keep_better(s);
        QC_TRY(refit(s, err));
        if (s->rows.mins)
            QC_TRY(put_rows(s, ordered_row, s->ordered, NULL, err));
        QC_TRY(pass(s, err));
    }
    keep_better(s);
    for (int64_t r = 0; r < s->n_rows; r++)
        ret->n_rtn_rows += s->best_is_rtn[r];
    QC_TRY(polish(s, err));
    keep_better(s);
    return QC_OK;
}

/* Nothing leaves that a reader could not decode. */
static int check_rows(const slice *s, qc_err *err)
{
    int most = (1 << s->spec->grid.bits) - 1, all = 0;
    for (int64_t i = 0; i < s->n_rows * s->in->n; i++)
        all |= s->rows.codes[i];
    for (int64_t i = 0; all > most; i++)
        if (s->rows.codes[i] > most)
            return qc_fail(err, QC_E_INPUT, "code %d at row %lld, column %lld, expected at most %d",
                           s->rows.codes[i], (long long)(i / s->in->n), (long long)(i % s->in->n), most);
    for (int64_t i = 0; i < s->n_rows * s->n_groups; i++)
        if (!isfinite(s->rows.scales[i]) || s->rows.scales[i] == 0 ||
            (s->rows.zeros && s->rows.zeros[i] > most))
            return qc_fail(
                err, QC_E_INPUT, "scale %g of row %lld, group %lld, expected a finite number, not 0",
                (double)s->rows.scales[i], (long long)(i / s->n_groups), (long long)(i % s->n_groups));
    return QC_OK;
}

/* row_stats[r] <- sums in the conventions of quantize_rows; dst is scratch. */
static void sum_row(slice *s, int64_t r, float *dst)
{
    const qc_gptq_input *in = s->in;
    int64_t group = s->spec->grid.group_elems;
    int most = (1 << s->spec->grid.bits) - 1;
    qc_quant_stats sums = {0};
    target_row(s, r, dst);
    for (int64_t g = 0; g < s->n_groups; g++) {
        double scale = (double)s->rows.scales[r * s->n_groups + g];
        int zero = zero_of(s, r * s->n_groups + g);
        double min = s->rows.mins ? (double)s->rows.mins[r * s->n_groups + g] : 0;
        double one = scale * (-zero - 0.5) + min, other = scale * (most - zero + 0.5) + min;
        double low = fmin(one, other), high = fmax(one, other);
        int64_t end = qc_min_i64(in->n, (g + 1) * group);
        for (int64_t c = g * group; c < end; c++) {
            double w = (double)dst[c], h = in->no_data ? 1 : (double)in->diag[c];
            double e = w - scale * (s->rows.codes[r * in->n + c] - zero) - min;
            sums.sq_error += h * e * e;
            sums.sq_weight += h * w * w;
            sums.n_clipped += (w < low) | (w > high);
        }
    }
    s->row_stats[r] = sums;
}

static int run_slice(slice *s, qc_quant_stats *stats, qc_gptq_result *ret, qc_err *err)
{
    qc_quant_stats grids = {0}; /* only its counts of groups are used */
    QC_TRY(round_to_nearest(s, &grids, err));
    each_row(s, keep_rtn_row, NULL);
    if (s->in->factor) {
        grids = (qc_quant_stats){0};
        QC_TRY(solve(s, &grids, ret, err));
    } else
        ret->error_solve += sum_of(s->error_rtn, s->n_rows);
    QC_TRY(check_rows(s, err));
    ret->error += sum_of(s->error_best, s->n_rows);
    ret->error_rtn += sum_of(s->error_rtn, s->n_rows);
    each_row(s, sum_row, s->host ? s->host : s->error);
    for (int64_t r = 0; r < s->n_rows; r++) {
        stats->sq_error += s->row_stats[r].sq_error;
        stats->sq_weight += s->row_stats[r].sq_weight;
        stats->n_clipped += s->row_stats[r].n_clipped;
    }
    stats->n_zero_groups += grids.n_zero_groups;
    stats->n_small_scale += grids.n_small_scale;
    stats->n_large_scale += grids.n_large_scale;
    return QC_OK;
}

/* What the backend sees of a grid. Scales of super-blocks are products, which float16 does not hold. */
static qc_grid plain_grid(const qc_grid *grid)
{
    qc_grid plain = *grid;
    plain.kind = QC_GRID_AFFINE;
    if (grid->kind == QC_GRID_SUPER)
        plain.scale_dtype = QC_DT_F32;
    return plain;
}

int qc_gptq_matrix(qc_gptq_input *in, const float *w, int64_t n_rows, const qc_quant_spec *spec,
                   qc_code_rows *rows, qc_quant_stats *stats, qc_gptq_result *ret, qc_err *err)
{
    if (spec->grid.group_elems < 1)
        return qc_fail(err, QC_E_UNSUPPORTED, "group of %lld columns, expected at least 1",
                       (long long)spec->grid.group_elems);
    slice s = {.in = in,
               .spec = spec,
               .n_groups = qc_ceil_div(in->n, spec->grid.group_elems),
               .grid = plain_grid(&spec->grid)};
    qc_gptq_result result = {.all_rtn = !in->factor};
    qc_quant_stats sums = *stats;
    int rc = slice_alloc(&s, n_rows, err);
    for (int64_t row0 = 0; row0 < n_rows && rc == QC_OK; row0 += SLICE_ROWS) {
        s.n_rows = qc_min_i64(SLICE_ROWS, n_rows - row0);
        s.w = w + row0 * in->n;
        s.rows = qc_code_rows_from(rows, &spec->grid, in->n, row0);
        s.rows.n_rows = s.n_rows;
        rc = run_slice(&s, &sums, &result, err);
    }
    slice_free(&s);
    if (rc != QC_OK)
        return rc;
    rows->n_rows = n_rows;
    *stats = sums;
    *ret = result;
    return QC_OK;
}

int qc_gptq_norm(const qc_gptq_input *in, const float *w, int64_t n_rows, double *ret, qc_err *err)
{
    qc_backend *be = in->be;
    int64_t most = qc_min_i64(n_rows, SLICE_ROWS);
    double *norms = qc_alloc((size_t)most, sizeof *norms);
    float *rows = be->alloc(be, most * in->n, err);
    int rc = !rows   ? QC_E_RESOURCE
             : norms ? QC_OK
                     : qc_fail_nomem(err, "norms of rows", (size_t)most * sizeof *norms);
    for (int64_t row = 0; row < n_rows && rc == QC_OK; row += SLICE_ROWS) {
        int64_t some = qc_min_i64(SLICE_ROWS, n_rows - row);
        rc = be->upload(be, rows, w + row * in->n, some * in->n, err);
        if (rc == QC_OK)
            rc = be->hessian_error(be, in->h, rows, some, in->n, norms, err);
        if (rc == QC_OK)
            *ret += sum_of(norms, some);
    }
    if (rows)
        be->free(be, rows);
    qc_free(norms);
    return rc;
}

uint64_t qc_gptq_input_bytes(int64_t n)
{
    return (uint64_t)(n * n) * 4;
}

uint64_t qc_gptq_matrix_bytes(int64_t n, int64_t n_rows)
{
    /* three float32 buffers, codes in two orders and ones; at most a scale and a zero for 16 columns */
    uint64_t elems = (uint64_t)(qc_min_i64(n_rows, SLICE_ROWS) * n);
    return 15 * elems + 5 * elems / 16;
}

uint64_t qc_gptq_correct_bytes(int64_t n, int64_t n_rows, bool with_d)
{
    return (uint64_t)(qc_min_i64(n_rows, SLICE_ROWS) * n) * 12 + (with_d ? (uint64_t)(n * n) * 4 : 0);
}
