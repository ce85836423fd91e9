#include "qc_rope.h"

#include <math.h>

const char *qc_rope_kind_name(qc_rope_kind kind)
{
    static const char *const names[] = {
        [QC_ROPE_DEFAULT] = "default", [QC_ROPE_LINEAR] = "linear", [QC_ROPE_DYNAMIC] = "dynamic",
        [QC_ROPE_YARN] = "yarn",       [QC_ROPE_LLAMA3] = "llama3", [QC_ROPE_LONGROPE] = "longrope",
    };
    return names[kind];
}

#define TWO_PI 6.283185307179586476925

/* Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between blended linearly in
 * original_max_positions / wavelength. */
static double llama3_freq(const qc_rope_config *rope, double freq)
{
    double turns = (double)rope->original_max_positions * freq / TWO_PI;
    if (turns < rope->low_freq_factor)
        return freq / rope->factor;
    if (turns > rope->high_freq_factor)
        return freq;
    double keep = (turns - rope->low_freq_factor) / (rope->high_freq_factor - rope->low_freq_factor);
    return (1 - keep) * freq / rope->factor + keep * freq;
}

/* Dimension (a real number) whose pair makes n_turns over the original context; Peng et al. 2023 (YaRN), 3.2.
 */
static double yarn_dim(const qc_rope_config *rope, int64_t rotary_dim, double n_turns)
{
    return (double)rotary_dim * log((double)rope->original_max_positions / (n_turns * TWO_PI)) /
           (2 * log(rope->theta));
}

/* Pairs below `low` turn fast and are kept, those above `high` are interpolated, a linear ramp between. */
static void yarn_scale(const qc_rope_config *rope, int64_t rotary_dim, double *inv_freq)
{
    double low = yarn_dim(rope, rotary_dim, rope->beta_fast),
           high = yarn_dim(rope, rotary_dim, rope->beta_slow);
    if (rope->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, (double)(rotary_dim - 1));
    if (low == high)
        high += 0.001; /* no division by zero: a step instead of a ramp */
    for (int64_t i = 0; i < rotary_dim / 2; i++) {
        double ramp = fmin(fmax(((double)i - low) / (high - low), 0), 1);
        inv_freq[i] = ramp * inv_freq[i] / rope->factor + (1 - ramp) * inv_freq[i];
    }
}

/* Beyond the original length the base grows with the sequence, so that the slowest pair turns as far as it
 * did in training ("dynamic NTK"). */
static double dynamic_theta(const qc_rope_config *rope, int64_t rotary_dim, int64_t n_tokens)
{
    double d = (double)rotary_dim, original = (double)rope->original_max_positions,
           n = fmax((double)n_tokens, original);
    return rope->theta * pow(rope->factor * n / original - (rope->factor - 1), d / (d - 2));
}

int64_t qc_rope_variant(const qc_rope_config *rope, int64_t n_tokens)
{
    if (rope->kind == QC_ROPE_LONGROPE)
        return n_tokens > rope->original_max_positions;
    return rope->kind == QC_ROPE_DYNAMIC && n_tokens > rope->original_max_positions ? n_tokens : 0;
}

void qc_rope_inv_freq(const qc_rope_config *rope, int64_t rotary_dim, int64_t n_tokens, double *inv_freq)
{
    const double *factors =
        n_tokens > rope->original_max_positions ? rope->long_factors : rope->short_factors;
    double theta = rope->kind == QC_ROPE_DYNAMIC ? dynamic_theta(rope, rotary_dim, n_tokens) : rope->theta;
    for (int64_t i = 0; i < rotary_dim / 2; i++) {
        double freq = pow(theta, -2.0 * (double)i / (double)rotary_dim);
        if (rope->kind == QC_ROPE_LINEAR)
            freq /= rope->factor;
        else if (rope->kind == QC_ROPE_LONGROPE)
            freq /= factors[i];
        else if (rope->kind == QC_ROPE_LLAMA3)
            freq = llama3_freq(rope, freq);
        inv_freq[i] = freq;
    }
    if (rope->kind == QC_ROPE_YARN)
        yarn_scale(rope, rotary_dim, inv_freq);
}

void qc_rope_tables(const qc_rope_config *rope, int64_t rotary_dim, const double *inv_freq,
                    int64_t n_positions, float *cos_t, float *sin_t)
{
    int64_t half = rotary_dim / 2;
    for (int64_t t = 0; t < n_positions; t++)
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)t * inv_freq[i];
            cos_t[t * half + i] = (float)(cos(angle) * rope->attention_factor);
            sin_t[t * half + i] = (float)(sin(angle) * rope->attention_factor);
        }
}
