#include "fold_noise.h"

#include "qc_math.h"

#include <math.h>
#include <string.h>

/* Descent: steps of the logarithms, from STEP_FIRST falling evenly to nothing, each divided by a running root
 * mean square of the slope (as in RMSProp): slopes of rare channels are tiny, yet their scales may be far
 * off. */
enum { N_STEPS = 80 };
static const double STEP_FIRST = 0.1, SLOPE_MEMORY = 0.9;

enum { LANES = 16 }; /* maxima kept side by side, so that the loop becomes vector code */

/* First j with |a_j| f_j = value, n - 1 if there is none (NaN). */
static int64_t first_equal(const float *a, const float *f, int64_t n, float value)
{
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES) {
        int equal = 0;
        for (int k = 0; k < LANES; k++)
            equal |= fabsf(a[j + k]) * f[j + k] == value;
        if (equal)
            break;
    }
    while (j + 1 < n && fabsf(a[j]) * f[j] != value)
        j++;
    return qc_min_i64(j, n - 1);
}

/* Largest |a_j| f_j and its index. */
static float largest_of(const float *a, const float *f, int64_t n, int64_t *ret_at)
{
    float lane[LANES] = {0}, largest = 0;
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        for (int k = 0; k < LANES; k++) {
            float v = fabsf(a[j + k]) * f[j + k];
            lane[k] = v > lane[k] ? v : lane[k];
        }
    for (int k = 0; k < LANES; k++)
        largest = lane[k] > largest ? lane[k] : largest;
    for (; j < n; j++)
        largest = fmaxf(largest, fabsf(a[j]) * f[j]);
    *ret_at = first_equal(a, f, n, largest);
    return largest;
}

enum { TASK_ROWS = 16 };

typedef struct rows_job {
    const qc_fold_noise *m;
    int64_t n;
    const float *f;
} rows_job;

static void rows_task(void *ctx, int64_t task, int thread)
{
    const rows_job *job = ctx;
    const qc_fold_noise *m = job->m;
    int64_t n_groups = qc_ceil_div(job->n, m->group), end = qc_min_i64(m->n_rows, (task + 1) * TASK_ROWS), at;
    (void)thread;
    for (int64_t r = task * TASK_ROWS; r < end; r++)
        for (int64_t i = 0; i < n_groups; i++) {
            int64_t g = i * m->group, some = qc_min_i64(m->group, job->n - g);
            m->largest[r * n_groups + i] = largest_of(m->a + r * job->n + g, job->f + g, some, &at);
            m->at[r * n_groups + i] = (int32_t)at;
        }
}

/* Noise of one operand with the factors f[n] = s^power; adds its slope by the logarithm of each column's
 * scale to slope[n] (NULL: not wanted). */
static double noise_of(qc_backend *be, const qc_fold_noise *m, int64_t n, const float *f, double *slope)
{
    double total = 0, share = m->factor / (double)m->n_rows;
    int64_t n_groups = qc_ceil_div(n, m->group);
    rows_job job = {m, n, f};
    be->host_tasks(be, qc_ceil_div(m->n_rows, TASK_ROWS), rows_task, &job);
    for (int64_t i = 0; i < n_groups; i++) {
        int64_t g = i * m->group, end = qc_min_i64(n, g + m->group);
        double partners = 0, squares = 0;
        for (int64_t j = g; j < end; j++)
            partners += m->partner[j] / ((double)f[j] * (double)f[j]);
        for (int64_t r = 0; r < m->n_rows; r++) {
            double largest = (double)m->largest[r * n_groups + i];
            squares += largest * largest;
            if (slope)
                slope[g + m->at[r * n_groups + i]] += 2 * m->power * share * largest * largest * partners;
        }
        total += share * squares * partners;
        for (int64_t j = g; slope && j < end; j++)
            slope[j] -= 2 * m->power * share * squares * m->partner[j] / ((double)f[j] * (double)f[j]);
    }
    return total;
}

double qc_fold_noise_value(qc_backend *be, const qc_fold_noise *m, int64_t n, const float *s, float *scratch)
{
    for (int64_t j = 0; j < n; j++)
        scratch[j] = m->power > 0 ? s[j] : 1 / s[j];
    return noise_of(be, m, n, scratch, NULL);
}

void qc_fold_noise_descend(qc_backend *be, const qc_fold_noise *noises, int n_noises, int64_t n,
                           int64_t n_scales, const int32_t *scale_of, const bool *fixed, float *scales,
                           double *scratch)
{
    double *log_s = scratch, *best = log_s + n_scales, *mean_square = best + n_scales,
           *slope = mean_square + n_scales, *by_column = slope + n_scales, least = INFINITY;
    float *f = (float *)(by_column + n);
    for (int64_t c = 0; c < n_scales; c++) {
        log_s[c] = best[c] = log((double)scales[c]);
        mean_square[c] = 0;
    }
    for (int i = 0; i < N_STEPS; i++) {
        double noise = 0, kept = 1 - pow(SLOPE_MEMORY, i + 1);
        memset(by_column, 0, (size_t)n * sizeof *by_column);
        memset(slope, 0, (size_t)n_scales * sizeof *slope);
        for (int k = 0; k < n_noises; k++) {
            for (int64_t j = 0; j < n; j++)
                f[j] = (float)exp(noises[k].power * log_s[scale_of ? scale_of[j] : j]);
            noise += noise_of(be, &noises[k], n, f, by_column);
        }
        if (noise < least) {
            least = noise;
            memcpy(best, log_s, (size_t)n_scales * sizeof *best);
        }
        for (int64_t j = 0; j < n; j++)
            slope[scale_of ? scale_of[j] : j] += by_column[j];
        for (int64_t c = 0; c < n_scales; c++) {
            mean_square[c] = SLOPE_MEMORY * mean_square[c] + (1 - SLOPE_MEMORY) * slope[c] * slope[c];
            double step = STEP_FIRST * (N_STEPS - i) / N_STEPS;
            if (!fixed[c] && mean_square[c] > 0)
                log_s[c] -= step * slope[c] / sqrt(mean_square[c] / kept);
        }
    }
    for (int64_t c = 0; c < n_scales; c++)
        scales[c] = fixed[c] ? scales[c] : (float)exp(best[c]);
}
