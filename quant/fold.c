/* Choice of channel scales for one site. Losses are measured, not modelled: the weights by rounding them with
 * the method that will be used (e H' e^T with H' = diag(1/s) H diag(1/s)), the activations on a sample of
 * them. */
#include "fold.h"

#include "fold_noise.h"
#include "qc_alloc.h"
#include "qc_fp.h"
#include "qc_math.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* A scale and its inverse stay inside these; AWQ's floor. */
static const float SCALE_MIN = 1e-4f, SCALE_MAX = 1e4f;

/* Rounding of the stored gain may move a scale by this share; where it would be more, the type has no digits
 * left and the channel stays as it is. */
static const float MAX_DRIFT = 1.0f / 16;

/* Rows of a matrix that are read and rounded at once. */
enum { BLOCK_ROWS = 512 };

/* Where a candidate costs a factorisation or products with a sample, first every so manyth one is tried, then
 * the neighbours of the best. */
enum { COARSE_STEP = 4 };

typedef struct fold_work {
    qc_backend *be;
    const qc_fold_site *site;
    const qc_fold_options *options;
    const qc_gptq_options *gptq; /* without its polish, which lowers the errors of all candidates alike */
    float *h_host;               /* [n, n] copy of site->h; NULL if that is host memory */
    float *h_staging;            /* host [n, n] */
    float *h_scaled;             /* backend [n, n] */
    float *wtw; /* backend [n, n] sum of w^T w over all rows of all matrices; NULL if not needed */
    float *rows[QC_FOLD_MATRICES]; /* host [n_rows, n] the probe */
    int64_t n_rows[QC_FOLD_MATRICES];
    float *block;                           /* host [BLOCK_ROWS, n] rows times scales */
    qc_code_rows codes;                     /* of a block */
    float *act_host, *act;                  /* host and backend [n_sample, n] */
    double *act_error;                      /* [n_sample] */
    float *x_mean, *x_max, *w_mean, *w_max; /* [n_scales] by channel of the producer */
    float *trial, *trial_gain;              /* [n_scales] */
    float *by_column;                       /* [n_cols] scales or their inverses */
} fold_work;

qc_fold_options qc_fold_defaults(qc_fold_method method)
{
    return (qc_fold_options){.method = method,
                             .n_ratios = 20,
                             .alpha = -1,
                             .refine = method == QC_FOLD_SMOOTHQUANT,
                             .probe_rows = 192};
}

/* ---- exactness ---- */

static float round_to(qc_dtype dtype, float x)
{
    if (dtype == QC_DT_F16)
        return qc_f16_to_f32(qc_f32_to_f16(x));
    return dtype == QC_DT_BF16 ? qc_bf16_to_f32(qc_f32_to_bf16(x)) : x;
}

int64_t qc_fold_exact(const float *gain, float offset, qc_dtype dtype, int64_t n, float *scales,
                      float *new_gain)
{
    int64_t n_limited = 0;
    for (int64_t j = 0; j < n; j++) {
        float g = gain[j] + offset, stored, s;
        new_gain[j] = gain[j];
        if (g == 0)
            continue; /* 0 / s is 0 */
        stored = round_to(dtype, g / scales[j] - offset);
        s = g / (stored + offset);
        if (isfinite(stored) && isfinite(s) && fabsf(s / scales[j] - 1) <= MAX_DRIFT) {
            new_gain[j] = stored;
            scales[j] = s;
        } else {
            scales[j] = 1;
            n_limited++;
        }
    }
    return n_limited;
}

/* The trial scales as they would be used; fills trial_gain. */
static int64_t make_exact(fold_work *f)
{
    const qc_fold_site *site = f->site;
    int64_t n_limited = 0;
    for (int64_t c = 0; c < site->n_scales; c++) {
        float s = f->trial[c], limited = fminf(fmaxf(s, SCALE_MIN), SCALE_MAX);
        n_limited += s != limited;
        f->trial[c] = limited;
    }
    if (site->gain)
        n_limited += qc_fold_exact(site->gain, site->gain_offset, site->gain_dtype, site->n_scales, f->trial,
                                   f->trial_gain);
    return n_limited;
}

static int64_t channel(const qc_fold_site *site, int64_t column)
{
    return site->scale_of ? site->scale_of[column] : column;
}

/* ---- what is known of channels ---- */

static int64_t row_of_probe(int64_t i, int64_t n_probe, int64_t n_rows)
{
    return i * n_rows / n_probe;
}

/* |w| of a block: its largest value per column, and the sum of |w| / max |w| of its row and group (AWQ's
 * measure of how much a channel's weights count in their group). */
static void scan_rows(const float *w, int64_t n_rows, int64_t n, int64_t group, double *sum_share,
                      float *max_abs)
{
    for (int64_t r = 0; r < n_rows; r++)
        for (int64_t g = 0; g < n; g += group) {
            int64_t end = qc_min_i64(g + group, n);
            float largest = 0;
            for (int64_t c = g; c < end; c++) {
                float a = fabsf(w[r * n + c]);
                largest = a > largest ? a : largest;
            }
            for (int64_t c = g; c < end; c++) {
                float a = fabsf(w[r * n + c]);
                max_abs[c] = a > max_abs[c] ? a : max_abs[c];
                sum_share[c] += largest > 0 ? (double)(a / largest) : 0;
            }
        }
}

/* One pass over all rows of a matrix: figures of its columns, the rows of the probe, w^T w. buffer: backend
 * [BLOCK_ROWS, n], used with wtw. */
static int scan_matrix(fold_work *f, int m, double *sum_share, float *max_abs, float *buffer, qc_err *err)
{
    const qc_fold_matrix *matrix = &f->site->matrices[m];
    int64_t n = f->site->n_cols, probe = 0;
    for (int64_t row = 0; row < matrix->n_rows; row += BLOCK_ROWS) {
        int64_t n_rows = qc_min_i64(BLOCK_ROWS, matrix->n_rows - row);
        QC_TRY(matrix->fetch(matrix->ctx, row, n_rows, f->block, err));
        scan_rows(f->block, n_rows, n, matrix->spec->grid.group_elems, sum_share, max_abs);
        for (; probe < f->n_rows[m]; probe++) {
            int64_t at = row_of_probe(probe, f->n_rows[m], matrix->n_rows) - row;
            if (at >= n_rows)
                break;
            memcpy(f->rows[m] + probe * n, f->block + at * n, (size_t)n * sizeof(float));
        }
        if (!f->wtw)
            continue;
        QC_TRY(f->be->upload(f->be, buffer, f->block, n_rows * n, err));
        QC_TRY(f->be->gram(f->be, f->wtw, buffer, n, NULL, 0, n_rows, n, n, 1, err));
    }
    return QC_OK;
}

/* Figures by channel of the producer: means over the inputs that share it, and maxima. */
static void by_channel(fold_work *f, const double *sum_share, const float *w_max, int64_t n_rows)
{
    const qc_fold_site *site = f->site;
    double per_token = 1 / (double)qc_max_i64(site->n_tokens, 1),
           inputs = (double)site->n_cols / (double)site->n_scales;
    for (int64_t j = 0; j < site->n_cols; j++) {
        int64_t c = channel(site, j);
        f->x_mean[c] += (float)((double)site->sum_abs[j] * per_token / inputs);
        f->w_mean[c] += (float)(sum_share[j] / (double)n_rows / inputs);
        f->x_max[c] = fmaxf(f->x_max[c], site->max_abs[j]);
        f->w_max[c] = fmaxf(f->w_max[c], w_max[j]);
    }
}

static int scan_all(fold_work *f, qc_err *err)
{
    int64_t n = f->site->n_cols, n_rows = 0;
    double *sum_share = qc_calloc((size_t)n, sizeof *sum_share);
    float *max_abs = qc_calloc((size_t)n, sizeof *max_abs);
    float *buffer = f->wtw ? f->be->alloc(f->be, BLOCK_ROWS * n, err) : NULL;
    int rc = sum_share && max_abs ? QC_OK : qc_fail_nomem(err, "channel figures", (unsigned long long)n * 12);
    if (rc == QC_OK && f->wtw && !buffer)
        rc = QC_E_RESOURCE;
    for (int m = 0; m < f->site->n_matrices && rc == QC_OK; m++) {
        n_rows += f->site->matrices[m].n_rows;
        rc = scan_matrix(f, m, sum_share, max_abs, buffer, err);
    }
    if (rc == QC_OK && f->wtw)
        rc = f->be->mirror(f->be, f->wtw, n, err);
    if (rc == QC_OK)
        by_channel(f, sum_share, max_abs, n_rows);
    if (buffer)
        f->be->free(f->be, buffer);
    qc_free(sum_share);
    qc_free(max_abs);
    return rc;
}

/* ---- candidates ---- */

/* s of a channel that was never active is 1; the others are centred on 1 by their extremes (AWQ). */
static void normalise(fold_work *f)
{
    float low = INFINITY, high = 0;
    int64_t n = f->site->n_scales;
    for (int64_t c = 0; c < n; c++) {
        float s = fmaxf(f->trial[c], SCALE_MIN);
        if (f->x_max[c] > 0 && isfinite(s)) {
            low = fminf(low, s);
            high = fmaxf(high, s);
        }
        f->trial[c] = s;
    }
    float centre = sqrtf(low) * sqrtf(high);
    for (int64_t c = 0; c < n; c++) {
        float s = f->trial[c] / centre;
        f->trial[c] = f->x_max[c] > 0 && isfinite(s) && s > 0 ? s : 1;
    }
}

/* x^a / w^b per channel */
static void powers(fold_work *f, const float *x, double a, const float *w, double b)
{
    for (int64_t c = 0; c < f->site->n_scales; c++)
        f->trial[c] = (float)(pow((double)x[c], a) / pow(fmax((double)w[c], 1e-5), b));
    normalise(f);
}

/* Put candidate i into f->trial; false when there are no more. Identity is none of them. */
static bool candidate(fold_work *f, int64_t i, char label[32])
{
    const qc_fold_options *o = f->options;
    if (o->method == QC_FOLD_SMOOTHQUANT) {
        int64_t n = o->alpha < 0 ? QC_FOLD_ALPHAS : 1;
        double alpha = o->alpha < 0 ? (double)i / (QC_FOLD_ALPHAS - 1) : o->alpha;
        if (i >= n)
            return false;
        snprintf(label, 32, "alpha %.2f", alpha);
        powers(f, f->x_max, alpha, f->w_max, 1 - alpha);
        return true;
    }
    int64_t n = qc_max_i64(o->n_ratios, 2);
    bool duo = i < n;
    double ratio = (double)(duo ? i : i - n + 1) / (double)(n - 1); /* plain with ratio 0 is identity */
    if (i >= 2 * n - 1)
        return false;
    snprintf(label, 32, "%s %.2f", duo ? "duo" : "plain", ratio);
    powers(f, f->x_mean, ratio, f->w_mean, duo ? 1 - ratio : 0);
    return true;
}

/* ---- losses ---- */

/* by_column = the scale of each column. */
static void spread(fold_work *f, const float *s)
{
    for (int64_t j = 0; j < f->site->n_cols; j++)
        f->by_column[j] = s[channel(f->site, j)];
}

/* What the host does row by row between two products; a task is one row. */
static void scale_h_task(void *ctx, int64_t i, int thread)
{
    fold_work *f = ctx;
    const float *h = f->h_host ? f->h_host : f->site->h;
    int64_t n = f->site->n_cols;
    float a = f->by_column[i];
    (void)thread;
    for (int64_t j = 0; j < n; j++)
        f->h_staging[i * n + j] = h[i * n + j] * (a * f->by_column[j]);
}

/* act_host <- x / s */
static void divide_task(void *ctx, int64_t t, int thread)
{
    fold_work *f = ctx;
    int64_t n = f->site->n_cols;
    (void)thread;
    for (int64_t j = 0; j < n; j++)
        f->act_host[t * n + j] = f->site->sample[t * n + j] / f->by_column[j];
}

/* act_host <- s act_host - x */
static void difference_task(void *ctx, int64_t t, int thread)
{
    fold_work *f = ctx;
    int64_t n = f->site->n_cols;
    (void)thread;
    for (int64_t j = 0; j < n; j++)
        f->act_host[t * n + j] = f->act_host[t * n + j] * f->by_column[j] - f->site->sample[t * n + j];
}

/* h_scaled = diag(1/s) H diag(1/s) */
static int scale_h(fold_work *f, const float *s, qc_err *err)
{
    int64_t n = f->site->n_cols;
    for (int64_t j = 0; j < n; j++)
        f->by_column[j] = 1 / s[channel(f->site, j)];
    f->be->host_tasks(f->be, n, scale_h_task, f);
    return f->be->upload(f->be, f->h_scaled, f->h_staging, n * n, err);
}

/* Round some rows, times s, as the method does: error += their e H' e^T. */
static int round_rows(fold_work *f, qc_gptq_input *input, const qc_fold_matrix *matrix, const float *w,
                      int64_t n_rows, const float *s, double *error, qc_err *err)
{
    qc_quant_stats stats = {0};
    qc_gptq_result result;
    int64_t n = f->site->n_cols;
    spread(f, s);
    for (int64_t row = 0; row < n_rows; row += BLOCK_ROWS) {
        int64_t some = qc_min_i64(BLOCK_ROWS, n_rows - row);
        for (int64_t r = 0; r < some; r++)
            for (int64_t j = 0; j < n; j++)
                f->block[r * n + j] = w[(row + r) * n + j] * f->by_column[j];
        qc_code_rows codes = qc_code_rows_for(&f->codes, &matrix->spec->grid);
        QC_TRY(qc_gptq_matrix(input, f->block, some, matrix->spec, &codes, &stats, &result, err));
        *error += result.error;
    }
    return QC_OK;
}

/* All rows of a matrix, read again. */
static int round_all(fold_work *f, qc_gptq_input *input, const qc_fold_matrix *matrix, const float *s,
                     double *error, qc_err *err)
{
    int64_t n = f->site->n_cols;
    float *w = qc_alloc((size_t)(BLOCK_ROWS * n), sizeof *w);
    int rc = w ? QC_OK : qc_fail_nomem(err, "rows in work", (unsigned long long)(BLOCK_ROWS * n) * sizeof *w);
    for (int64_t row = 0; row < matrix->n_rows && rc == QC_OK; row += BLOCK_ROWS) {
        int64_t some = qc_min_i64(BLOCK_ROWS, matrix->n_rows - row);
        if ((rc = matrix->fetch(matrix->ctx, row, some, w, err)) == QC_OK)
            rc = round_rows(f, input, matrix, w, some, s, error, err);
    }
    qc_free(w);
    return rc;
}

/* Error by rounding weights, per token; on the probe it stands for all rows. */
static int weight_loss(fold_work *f, const float *s, bool all_rows, double *ret, qc_err *err)
{
    const qc_fold_site *site = f->site;
    qc_gptq_input *input;
    qc_gptq_input_info info;
    double sum = 0;
    QC_TRY(scale_h(f, s, err));
    QC_TRY(qc_gptq_input_new(f->be, f->h_scaled, site->n_cols, f->gptq, &input, &info, err));
    int rc = QC_OK;
    for (int m = 0; m < site->n_matrices && rc == QC_OK; m++) {
        double error = 0;
        if (all_rows)
            rc = round_all(f, input, &site->matrices[m], s, &error, err);
        else
            rc = round_rows(f, input, &site->matrices[m], f->rows[m], f->n_rows[m], s, &error, err);
        sum += all_rows ? error : error * (double)site->matrices[m].n_rows / (double)f->n_rows[m];
    }
    qc_gptq_input_free(input);
    *ret = sum / (double)qc_max_i64(site->n_tokens, 1);
    return rc;
}

/* Error by rounding activations, per token: sum over the sample of d W^T W d^T with d = s round(x / s) - x.
 */
static int act_loss(fold_work *f, const float *s, double *ret, qc_err *err)
{
    const qc_fold_site *site = f->site;
    qc_backend *be = f->be;
    int64_t n = site->n_cols, n_elems = site->n_sample * n;
    double sum = 0;
    spread(f, s);
    be->host_tasks(be, site->n_sample, divide_task, f);
    QC_TRY(be->upload(be, f->act, f->act_host, n_elems, err));
    QC_TRY(
        be->quantize_acts(be, f->act, n, f->act, n, site->n_sample, n, site->act_bits, site->act_group, err));
    QC_TRY(be->download(be, f->act_host, f->act, n_elems, err));
    be->host_tasks(be, site->n_sample, difference_task, f);
    QC_TRY(be->upload(be, f->act, f->act_host, n_elems, err));
    QC_TRY(be->hessian_error(be, f->wtw, f->act, site->n_sample, n, f->act_error, err));
    for (int64_t t = 0; t < site->n_sample; t++)
        sum += f->act_error[t];
    *ret = sum / (double)site->n_sample;
    return QC_OK;
}

static int total_loss(fold_work *f, const float *s, bool all_rows, double *ret, qc_err *err)
{
    double weights, acts = 0;
    QC_TRY(weight_loss(f, s, all_rows, &weights, err));
    if (f->wtw)
        QC_TRY(act_loss(f, s, &acts, err));
    *ret = weights + acts;
    return QC_OK;
}

/* ---- the choice ---- */

static void work_free(fold_work *f)
{
    float *buffers[] = {f->h_scaled, f->wtw, f->act};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        if (buffers[i])
            f->be->free(f->be, buffers[i]);
    for (int m = 0; m < QC_FOLD_MATRICES; m++)
        qc_free(f->rows[m]);
    qc_code_rows_free(&f->codes);
    void *arrays[] = {f->h_host, f->h_staging, f->block, f->act_host, f->act_error,  f->x_mean,
                      f->x_max,  f->w_mean,    f->w_max, f->trial,    f->trial_gain, f->by_column};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        qc_free(arrays[i]);
}

static int alloc_acts(fold_work *f, qc_err *err)
{
    int64_t n = f->site->n_cols, n_sample = f->site->n_sample;
    f->wtw = f->be->alloc(f->be, n * n, err);
    f->act = f->be->alloc(f->be, n_sample * n, err);
    if (!f->wtw || !f->act)
        return QC_E_RESOURCE;
    f->act_host = qc_alloc((size_t)(n_sample * n), sizeof(float));
    f->act_error = qc_alloc((size_t)n_sample, sizeof(double));
    if (!f->act_host || !f->act_error)
        return qc_fail_nomem(err, "sample of activations", (unsigned long long)(n_sample * n) * 4);
    memset(f->h_staging, 0, (size_t)(n * n) * sizeof(float));
    return f->be->upload(f->be, f->wtw, f->h_staging, n * n, err);
}

static int work_alloc(fold_work *f, qc_err *err)
{
    const qc_fold_site *site = f->site;
    int64_t n = site->n_cols, smallest = n;
    size_t n_scales = (size_t)site->n_scales;
    bool ok = true;
    for (int m = 0; m < site->n_matrices; m++) {
        f->n_rows[m] =
            qc_min_i64(site->matrices[m].n_rows, qc_max_i64(f->options->probe_rows / site->n_matrices, 1));
        f->rows[m] = qc_alloc((size_t)(f->n_rows[m] * n), sizeof(float));
        smallest = qc_min_i64(smallest, site->matrices[m].spec->grid.group_elems);
        ok = ok && f->rows[m];
    }
    size_t n_groups = (size_t)(BLOCK_ROWS * qc_ceil_div(n, smallest));
    f->h_staging = qc_alloc((size_t)(n * n), sizeof(float));
    f->block = qc_alloc((size_t)(BLOCK_ROWS * n), sizeof(float));
    f->by_column = qc_alloc((size_t)n, sizeof(float));
    f->codes = (qc_code_rows){.codes = qc_alloc((size_t)(BLOCK_ROWS * n), 1),
                              .scales = qc_alloc(n_groups, sizeof(float)),
                              .zeros = qc_alloc(n_groups, 1),
                              .mins = qc_alloc(n_groups, sizeof(float)),
                              .supers = qc_alloc(n_groups, 2 * sizeof(float)),
                              .subs = qc_alloc(n_groups, 2 * sizeof(int16_t))};
    float **vectors[] = {&f->x_mean, &f->x_max, &f->w_mean, &f->w_max, &f->trial, &f->trial_gain};
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++)
        ok = (*vectors[i] = qc_calloc(n_scales, sizeof(float))) && ok;
    if (!f->be->host_memory)
        ok = (f->h_host = qc_alloc((size_t)(n * n), sizeof(float))) && ok;
    if (!ok || !f->h_staging || !f->block || !f->by_column || !f->codes.codes || !f->codes.scales ||
        !f->codes.zeros || !f->codes.mins || !f->codes.supers || !f->codes.subs)
        return qc_fail_nomem(err, "channel scales", (unsigned long long)(n * n) * 4);
    if (!(f->h_scaled = f->be->alloc(f->be, n * n, err)))
        return QC_E_RESOURCE;
    if (f->h_host)
        QC_TRY(f->be->download(f->be, f->h_host, site->h, n * n, err));
    return site->act_bits ? alloc_acts(f, err) : QC_OK;
}

static void set_identity(const qc_fold_site *site, float *scales, float *gain)
{
    for (int64_t c = 0; c < site->n_scales; c++)
        scales[c] = 1;
    if (site->gain)
        memcpy(gain, site->gain, (size_t)site->n_scales * sizeof *gain);
}

typedef struct search_state {
    float *scales, *gain; /* of the best so far */
    int64_t best;         /* its number; -1: identity */
} search_state;

/* Candidate i on the probe; *ret_exists false if there is none. */
static int try_candidate(fold_work *f, int64_t i, search_state *s, qc_fold_result *ret, bool *ret_exists,
                         qc_err *err)
{
    size_t n_bytes = (size_t)f->site->n_scales * sizeof *s->scales;
    char label[32];
    double loss;
    *ret_exists = i >= 0 && candidate(f, i, label);
    if (!*ret_exists)
        return QC_OK;
    int64_t n_limited = make_exact(f);
    QC_TRY(total_loss(f, f->trial, false, &loss, err));
    if (!(loss < ret->loss))
        return QC_OK;
    ret->loss = loss;
    ret->n_limited = n_limited;
    s->best = i;
    memcpy(ret->choice, label, sizeof label);
    memcpy(s->scales, f->trial, n_bytes);
    if (f->site->gain)
        memcpy(s->gain, f->trial_gain, n_bytes);
    return QC_OK;
}

/* The best candidate on the probe; scales and gain hold identity on entry. */
static int search(fold_work *f, float *scales, float *gain, qc_fold_result *ret, qc_err *err)
{
    search_state s = {.scales = scales, .gain = gain, .best = -1};
    int64_t step = f->gptq || f->wtw ? COARSE_STEP : 1;
    bool exists = true;
    QC_TRY(total_loss(f, scales, false, &ret->loss_identity, err));
    ret->loss = ret->loss_identity;
    for (int64_t i = 0; exists; i += step)
        QC_TRY(try_candidate(f, i, &s, ret, &exists, err));
    for (step /= 2; step > 0 && s.best >= 0; step /= 2) {
        int64_t centre = s.best;
        QC_TRY(try_candidate(f, centre - step, &s, ret, &exists, err));
        QC_TRY(try_candidate(f, centre + step, &s, ret, &exists, err));
    }
    return QC_OK;
}

/* ---- refinement ---- */

enum { NOISE_TOKENS = 256 };

/* Columns that share a step of an input. */
static int64_t act_group(const qc_fold_site *site)
{
    return site->act_group ? site->act_group : site->n_cols;
}

typedef struct refinement {
    double *x_square, *w_square; /* [n] diag(H) per token, diag(W^T W) */
    float *scratch;              /* [n] */
    bool *fixed;                 /* [n_scales] */
    double *work;
    float *largest; /* scratch of the noises, [rows, groups] of the one that needs most */
    int32_t *at;
} refinement;

static int refinement_alloc(refinement *r, const fold_work *f, qc_err *err)
{
    int64_t n = f->site->n_cols, n_scales = f->site->n_scales, n_maxima = 0;
    if (f->wtw)
        n_maxima = qc_min_i64(f->site->n_sample, NOISE_TOKENS) * qc_ceil_div(n, act_group(f->site));
    for (int m = 0; m < f->site->n_matrices; m++)
        n_maxima =
            qc_max_i64(n_maxima, f->n_rows[m] * qc_ceil_div(n, f->site->matrices[m].spec->grid.group_elems));
    *r = (refinement){.x_square = qc_alloc((size_t)n, sizeof(double)),
                      .w_square = qc_alloc((size_t)n, sizeof(double)),
                      .scratch = qc_alloc((size_t)n, sizeof(float)),
                      .fixed = qc_alloc((size_t)n_scales, sizeof(bool)),
                      .work = qc_alloc((size_t)(4 * n_scales + 2 * n), sizeof(double)),
                      .largest = qc_alloc((size_t)n_maxima, sizeof(float)),
                      .at = qc_alloc((size_t)n_maxima, sizeof(int32_t))};
    if (r->x_square && r->w_square && r->scratch && r->fixed && r->work && r->largest && r->at)
        return QC_OK;
    return qc_fail_nomem(err, "channel scales", (unsigned long long)(n * 44 + n_maxima * 8));
}

static void refinement_free(refinement *r)
{
    void *arrays[] = {r->x_square, r->w_square, r->scratch, r->fixed, r->work, r->largest, r->at};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        qc_free(arrays[i]);
}

/* Diagonals that turn noise of one operand into noise of the output. */
static int take_diagonals(fold_work *f, refinement *r, qc_err *err)
{
    const qc_fold_site *site = f->site;
    const float *h = f->h_host ? f->h_host : site->h;
    int64_t n = site->n_cols;
    for (int64_t j = 0; j < n; j++)
        r->x_square[j] = (double)h[j * n + j] / (double)qc_max_i64(site->n_tokens, 1);
    if (!f->wtw)
        return QC_OK;
    QC_TRY(f->be->download(f->be, f->h_staging, f->wtw, n * n, err));
    for (int64_t j = 0; j < n; j++)
        r->w_square[j] = (double)f->h_staging[j * n + j];
    return QC_OK;
}

/* The operands of a site: weights of the probe, and activations if they are rounded. Returns their number. */
static int list_noises(const fold_work *f, const refinement *r, qc_fold_noise *noises)
{
    const qc_fold_site *site = f->site;
    int n = 0;
    for (int m = 0; m < site->n_matrices; m++)
        noises[n++] = (qc_fold_noise){.a = f->rows[m],
                                      .n_rows = f->n_rows[m],
                                      .partner = r->x_square,
                                      .group = site->matrices[m].spec->grid.group_elems,
                                      .power = 1,
                                      .factor = (double)site->matrices[m].n_rows,
                                      .largest = r->largest,
                                      .at = r->at};
    if (f->wtw)
        noises[n++] = (qc_fold_noise){.a = site->sample,
                                      .n_rows = qc_min_i64(site->n_sample, NOISE_TOKENS),
                                      .partner = r->w_square,
                                      .group = act_group(site),
                                      .power = -1,
                                      .factor = 1,
                                      .largest = r->largest,
                                      .at = r->at};
    return n;
}

/* Factors by which the model's noise of weights and of activations is what was measured with these scales. */
static int calibrate(fold_work *f, const float *scales, qc_fold_noise *noises, int n_noises, refinement *r,
                     qc_err *err)
{
    double measured[2] = {0}, modelled[2] = {0};
    QC_TRY(weight_loss(f, scales, false, &measured[0], err));
    if (f->wtw)
        QC_TRY(act_loss(f, scales, &measured[1], err));
    spread(f, scales);
    for (int k = 0; k < n_noises; k++)
        modelled[noises[k].power < 0] +=
            qc_fold_noise_value(f->be, &noises[k], f->site->n_cols, f->by_column, r->scratch);
    for (int k = 0; k < n_noises; k++) {
        int kind = noises[k].power < 0;
        noises[k].factor *= modelled[kind] > 0 ? measured[kind] / modelled[kind] : 0;
    }
    return QC_OK;
}

/* Trial scales: from the best candidate down the slope of the noise model. */
static int refine(fold_work *f, const float *scales, qc_err *err)
{
    const qc_fold_site *site = f->site;
    qc_fold_noise noises[QC_FOLD_MATRICES + 1];
    size_t n_bytes = (size_t)site->n_scales * sizeof *scales;
    refinement r;
    int rc = refinement_alloc(&r, f, err);
    if (rc == QC_OK)
        rc = take_diagonals(f, &r, err);
    if (rc == QC_OK) {
        int n = list_noises(f, &r, noises);
        if ((rc = calibrate(f, scales, noises, n, &r, err)) == QC_OK) {
            memcpy(f->trial, scales, n_bytes);
            for (int64_t c = 0; c < site->n_scales; c++)
                r.fixed[c] = !(f->x_max[c] > 0 && f->w_max[c] > 0);
            qc_fold_noise_descend(f->be, noises, n, site->n_cols, site->n_scales, site->scale_of, r.fixed,
                                  f->trial, r.work);
        }
    }
    refinement_free(&r);
    return rc;
}

/* All rows decide between identity, the best candidate of the probe and what refinement makes of it. */
static int confirm(fold_work *f, float *scales, float *gain, qc_fold_result *ret, qc_err *err)
{
    const qc_fold_site *site = f->site;
    size_t n_bytes = (size_t)site->n_scales * sizeof *scales;
    bool scaled = strcmp(ret->choice, QC_FOLD_IDENTITY) != 0;
    double refined;
    for (int64_t c = 0; c < site->n_scales; c++)
        f->trial[c] = 1;
    QC_TRY(total_loss(f, f->trial, true, &ret->loss_identity, err));
    ret->loss = ret->loss_identity;
    if (scaled)
        QC_TRY(total_loss(f, scales, true, &ret->loss, err));
    if (f->options->refine && ret->loss_identity > 0) {
        QC_TRY(refine(f, scales, err));
        int64_t n_limited = make_exact(f);
        QC_TRY(total_loss(f, f->trial, true, &refined, err));
        if (refined < ret->loss) {
            ret->loss = refined;
            ret->n_limited = n_limited;
            memcpy(scales, f->trial, n_bytes);
            if (site->gain)
                memcpy(gain, f->trial_gain, n_bytes);
            snprintf(ret->choice + strlen(ret->choice), sizeof ret->choice - strlen(ret->choice), " +");
        }
    }
    if (ret->loss <= ret->loss_identity)
        return QC_OK;
    ret->refused = true;
    ret->loss = ret->loss_identity;
    ret->n_limited = 0;
    snprintf(ret->choice, sizeof ret->choice, QC_FOLD_IDENTITY);
    set_identity(site, scales, gain);
    return QC_OK;
}

int qc_fold_choose(qc_backend *be, const qc_fold_site *site, const qc_fold_options *options, float *scales,
                   float *gain, qc_fold_result *ret, qc_err *err)
{
    fold_work f = {.be = be, .site = site, .options = options};
    qc_gptq_options plain = options->gptq ? *options->gptq : qc_gptq_defaults();
    plain.refit = false;
    plain.sweeps = 0;
    f.gptq = options->gptq ? &plain : NULL;
    *ret = (qc_fold_result){.choice = QC_FOLD_IDENTITY};
    set_identity(site, scales, gain);
    int rc = work_alloc(&f, err);
    if (rc == QC_OK && (rc = scan_all(&f, err)) == QC_OK)
        rc = search(&f, scales, gain, ret, err);
    if (rc == QC_OK && ret->loss_identity > 0 &&
        (options->refine || strcmp(ret->choice, QC_FOLD_IDENTITY) != 0))
        rc = confirm(&f, scales, gain, ret, err);
    work_free(&f);
    return rc;
}

uint64_t qc_fold_bytes(const qc_fold_options *options, int64_t n, int64_t n_sample, bool acts)
{
    uint64_t width = (uint64_t)n, square = 4 * width * width;
    /* H scaled, and a copy of it; rows that are tried, blocks of them with codes; W^T W, sample and copy */
    uint64_t bytes = 2 * square + width * (4 * (uint64_t)options->probe_rows + BLOCK_ROWS * 9);
    if (options->gptq)
        bytes += qc_gptq_input_bytes(n) + qc_gptq_matrix_bytes(n, options->probe_rows);
    return bytes + (acts ? square + 8 * width * (uint64_t)n_sample : 0);
}
