/* Statistics of an evaluation: distribution functions against published values, all figures against sums
 * written out here, and the coverage of the intervals by simulation. */
#include "qc_dist.h"
#include "eval.h"
#include "qc_alloc.h"
#include "qc_rng.h"
#include "qc_test.h"
#include "tol.h"

#include <math.h>

/* Tables of the t distribution and the normal one (NIST/SEMATECH e-Handbook 1.3.6.7, more digits from
 * closed forms: df 1 is tan(pi (p - 1/2)), df 2 is 2 (p - 1/2) sqrt(2 / (4 p (1 - p)))). */
START_TEST(distributions)
{
    static const double table[][3] = {/* p, df, t */
                                      {0.975, 1, 12.706204736174696}, {0.975, 2, 4.302652729749464},
                                      {0.975, 7, 2.364624251592785},  {0.975, 15, 2.131449545559323},
                                      {0.95, 15, 1.753050355692558},  {0.995, 30, 2.749995653567232}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        ck_assert_double_eq_tol(qc_t_quantile(table[i][0], table[i][1]), table[i][2], 1e-9);
        ck_assert_double_eq_tol(qc_t_upper(table[i][2], table[i][1]), 1 - table[i][0], 1e-12);
        ck_assert_double_eq_tol(qc_t_upper(-table[i][2], table[i][1]), table[i][0], 1e-12);
    }
    ck_assert_double_eq_tol(qc_normal_quantile(0.975), 1.959963984540054, 1e-12);
    ck_assert_double_eq_tol(qc_normal_quantile(0.05), -1.6448536269514722, 1e-12);
    ck_assert_double_eq_tol(qc_normal_cdf(1.959963984540054), 0.975, 1e-14);
    /* 2 (C(10, 0) + C(10, 1)) / 2^10 */
    ck_assert_double_eq_tol(qc_mcnemar_p(1, 9), 22.0 / 1024, 1e-14);
    ck_assert_double_eq_tol(qc_mcnemar_p(9, 1), 22.0 / 1024, 1e-14);
    ck_assert(qc_mcnemar_p(0, 0) == 1 && qc_mcnemar_p(4, 4) == 1);
    ck_assert(isnan(qc_t_quantile(1, 3)) && isnan(qc_t_upper_quantile(0.1, 0)));
    /* deep tails keep their digits: df 2 has P(T > t) = (1 - t / sqrt(2 + t^2)) / 2 ~ 1 / (2 t^2) */
    ck_assert_double_eq_tol(qc_t_upper(1e8, 2) * 2e16, 1, 1e-9);
}
END_TEST

enum { MOST_WINDOWS = 16, PER_WINDOW = 40 };

typedef struct sample {
    qc_windows w;
    int64_t lengths[MOST_WINDOWS];
    qc_token_score scores[MOST_WINDOWS * PER_WINDOW];
} sample;

static void start(sample *s, int64_t n_windows)
{
    s->w = (qc_windows){.lengths = s->lengths, .n_windows = n_windows, .length = PER_WINDOW + 1};
    for (int64_t i = 0; i < n_windows; i++)
        s->lengths[i] = PER_WINDOW + 1;
}

static void summarize(const sample *s, qc_evaluation *e)
{
    qc_err err = {0};
    qc_evaluation_init(e);
    ck_assert_int_eq(qc_summarize(s->scores, &s->w, s->w.n_windows, true, e, &err), QC_OK);
}

/* True means 0.02 (delta NLL) and 0.05 (KL divergence); a window has a share of its own in both, so that
 * tokens of a window are correlated. */
static void draw(sample *s, qc_rng *rng)
{
    qc_token_score *t = s->scores;
    for (int64_t i = 0; i < s->w.n_windows; i++) {
        double own = 0.05 * qc_rng_normal(rng), spread = 0.2 * qc_rng_normal(rng);
        for (int64_t k = 0; k < PER_WINDOW; k++, t++) {
            double z = qc_rng_normal(rng), size = exp(qc_rng_normal(rng) * 0.8 - 0.32); /* mean 1 */
            *t = (qc_token_score){.nll_a = 3, .nll_b = (float)(3.02 + own + 0.3 * z)};
            t->kld = (float)(0.05 * size * (1 + spread));
        }
    }
}

/* Nominal 95 %; 4000 samples give it to +- 0.34 % (one standard error). */
START_TEST(coverage)
{
    enum { TRIALS = 4000 };
    static sample s;
    static const int64_t sizes[] = {4, 8, 16};
    qc_rng rng;
    qc_rng_seed(&rng, 20261201);
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        int delta = 0, kld = 0;
        start(&s, sizes[k]);
        for (int i = 0; i < TRIALS; i++) {
            qc_evaluation e;
            draw(&s, &rng);
            summarize(&s, &e);
            delta += e.delta_nll_low <= 0.02 && 0.02 <= e.delta_nll_high;
            kld += e.kld.low <= 0.05 && 0.05 <= e.kld.high;
            ck_assert(e.delta_nll_se >= (e.delta_nll_high - e.delta_nll) /
                                            qc_t_quantile(0.975, (double)(sizes[k] - 1)) * (1 - 1e-12));
            qc_evaluation_clear(&e);
        }
        printf("%lld windows: coverage %.2f %% (delta NLL), %.2f %% (KL divergence)\n", (long long)sizes[k],
               100.0 * delta / TRIALS, 100.0 * kld / TRIALS);
        ck_assert(delta > 0.93 * TRIALS && delta < 0.97 * TRIALS);
        ck_assert(kld > 0.93 * TRIALS && kld < 0.97 * TRIALS);
    }
}
END_TEST

/* Three windows of 40 positions with all quantities known. */
START_TEST(figures)
{
    static sample s;
    qc_evaluation e;
    start(&s, 3);
    for (int i = 0; i < 120; i++)
        s.scores[i] = (qc_token_score){.nll_a = 1,
                                       .nll_b = i < 40 ? 2 : 1,
                                       .kld = (float)(i + 1) / 128,
                                       .target = 7,
                                       .top_a = i % 4 == 0 ? 7 : 8,
                                       .top_b = i % 6 == 0 ? 7 : 8};
    summarize(&s, &e);
    /* window means of the difference: 1, 0, 0; mean 1/3, sd sqrt(1/3), se 1/3 */
    ck_assert_double_eq_tol(e.delta_nll, 1.0 / 3, 1e-12);
    ck_assert_double_eq_tol(e.delta_nll_se, 1.0 / 3, 1e-12);
    ck_assert_double_eq_tol(e.delta_nll_high, 1.0 / 3 + 4.302652729749464 / 3, 1e-9);
    ck_assert_double_eq_tol(e.ppl_ratio_se, exp(1.0 / 3) / 3, 1e-12);
    /* order statistics 1/128 .. 120/128; percentile p at place p * 119 */
    ck_assert_double_eq_tol(e.kld.mean, 60.5 / 128, 1e-12);
    ck_assert_double_eq_tol(e.kld.at[0], 1.0 / 128, 1e-12);
    ck_assert_double_eq_tol(e.kld.at[1], (1 + 0.119) / 128, 1e-12);
    ck_assert_double_eq_tol(e.kld.at[5], (1 + 29.75) / 128, 1e-12);
    ck_assert_double_eq_tol(e.kld.at[6], 60.5 / 128, 1e-12);
    ck_assert_double_eq_tol(e.kld_p99, (1 + 117.81) / 128, 1e-12);
    ck_assert_double_eq_tol(e.kld_max, 120.0 / 128, 1e-12);
    double dp = exp(-2) - exp(-1);
    ck_assert_double_eq_tol(e.delta_p.mean, dp / 3, 1e-7); /* scores are float32 */
    ck_assert_double_eq_tol(e.delta_p_rms, -dp / sqrt(3), 1e-7);
    /* of 12 in a row: the reference is right at 0, 4, 8, the model at 0, 6 */
    ck_assert_double_eq_tol(e.flips_lost, 2.0 / 12, 1e-12);
    ck_assert_double_eq_tol(e.flips_won, 1.0 / 12, 1e-12);
    ck_assert_double_eq_tol(e.flips, 3.0 / 12, 1e-12);
    ck_assert_double_eq_tol(e.top1, 9.0 / 12, 1e-12);
    int64_t n = 0, tokens = 0;
    for (int i = 0; i < QC_N_KLD_BINS; i++)
        n += e.kld_counts[i];
    ck_assert_int_eq(n, 120);
    /* edges are 10^(-9 + i / 4): 0.1 .. 0.178 holds 13/128 .. 22/128 */
    ck_assert_int_eq(e.kld_counts[32], 10);
    ck_assert_int_eq(e.n_places, 16);
    for (int64_t i = 0; i < e.n_places; i++)
        tokens += e.per_place[i].tokens_scored;
    ck_assert_int_eq(tokens, 120);
    ck_assert(e.per_place[0].first == 1 && e.per_place[15].last == 40);
    ck_assert_double_eq_tol(e.per_place[0].kld, (1.5 + 41.5 + 81.5) / 3 / 128, 1e-7);
    qc_evaluation_clear(&e);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"distributions", distributions}, {"coverage", coverage}, {"figures", figures}, {NULL, NULL}};
    return run_tests("stats", cases);
}
