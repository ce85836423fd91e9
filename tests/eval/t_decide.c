/* Sequential decisions: boundaries against published ones, error rates and windows used by simulation. */
#include "decide.h"
#include "qc_alloc.h"
#include "qc_rng.h"
#include "qc_test.h"

#include <math.h>

static qc_err err;

static void must(int rc)
{
    ck_assert_msg(rc == QC_OK, "%s", err.msg);
}

/* One look is the fixed test. Five equal looks: simulated paths cross with the chance that is spent (Lan &
 * DeMets 1983), none of it depends on the recursion that is tested. */
START_TEST(boundaries)
{
    enum { PATHS = 200000, LOOKS = 5 };
    static const double shares[LOOKS] = {0.2, 0.4, 0.6, 0.8, 1};
    double one, b[LOOKS];
    int crossed[LOOKS] = {0};
    qc_rng rng;
    qc_decide_boundaries(&(double){1}, 1, 0.05, &one);
    ck_assert_double_eq_tol(one, 1.6448536269514722, 1e-9);
    qc_decide_boundaries(shares, LOOKS, 0.025, b);
    qc_rng_seed(&rng, 11);
    for (int i = 0; i < PATHS; i++) {
        double s = 0;
        for (int k = 0; k < LOOKS; k++) {
            s += sqrt(0.2) * qc_rng_normal(&rng);
            if (s / sqrt(shares[k]) >= b[k]) {
                crossed[k]++;
                break;
            }
        }
    }
    double sum = 0;
    for (int k = 0; k < LOOKS; k++) {
        sum += (double)crossed[k] / PATHS;
        double want = 0.025 * log(1 + (exp(1) - 1) * shares[k]);
        printf("look %d: boundary %.4f, crossed %.5f of %.5f\n", k + 1, b[k], sum, want);
        ck_assert_double_eq_tol(sum, want, 4 * sqrt(want / PATHS));
    }
    fflush(stdout);
}
END_TEST

enum { WINDOWS = 64, TOKENS = 8 };

typedef struct sample {
    qc_windows w;
    int64_t lengths[WINDOWS];
    qc_token_score scores[WINDOWS * TOKENS];
} sample;

/* Windows with a mean of their own around `mean`, sd 0.01, skewed like means of KL divergences. */
static void draw(sample *s, qc_rng *rng, double mean)
{
    s->w = (qc_windows){.lengths = s->lengths, .n_windows = WINDOWS, .length = TOKENS + 1};
    for (int i = 0; i < WINDOWS; i++) {
        double z = qc_rng_normal(rng), skewed = (exp(0.3 * z) - exp(0.045)) / 0.3137; /* sd 1 */
        s->lengths[i] = TOKENS + 1;
        for (int k = 0; k < TOKENS; k++)
            s->scores[i * TOKENS + k] =
                (qc_token_score){.nll_b = (float)(mean + 0.01 * z), .kld = (float)(mean + 0.01 * skewed)};
    }
}

typedef struct tally {
    int pass, fail, undecided;
    double windows;
} tally;

static tally run(const char *gate, double limit, double mean, int trials, uint64_t seed)
{
    static sample s;
    qc_rng rng;
    tally t = {0};
    qc_rng_seed(&rng, seed);
    for (int i = 0; i < trials; i++) {
        qc_decider *d;
        qc_decision *c;
        int n;
        draw(&s, &rng, mean);
        must(qc_decider_new(&gate, &limit, 1, WINDOWS, &d, &err));
        while (!qc_decider_look(d, s.scores, &s.w))
            continue;
        must(qc_decider_outcome(d, &c, &n, &err));
        t.pass += strcmp(c->outcome, "pass") == 0;
        t.fail += strcmp(c->outcome, "fail") == 0;
        t.undecided += strcmp(c->outcome, "undecided") == 0;
        t.windows += (double)c->windows / trials;
        qc_free(c);
        qc_decider_free(d);
    }
    printf("%s, limit %g, true mean %g: pass %d, fail %d, undecided %d of %d; %.1f windows\n", gate, limit,
           mean, t.pass, t.fail, t.undecided, trials, t.windows);
    fflush(stdout);
    return t;
}

/* At the limit each error is made in 5 % of the cases (+- 2, and + 3 for window means as skewed as those of
 * draw, 0.95, of which few say little); far from it the least number of windows decides. */
START_TEST(error_rates)
{
    enum { TRIALS = 200 };
    tally t = run("delta_nll", 0.05, 0.05, 4 * TRIALS, 1);
    ck_assert(t.pass < 0.07 * 4 * TRIALS && t.fail < 0.07 * 4 * TRIALS);
    ck_assert(t.pass > 0.03 * 4 * TRIALS && t.fail > 0.03 * 4 * TRIALS);
    t = run("kld_mean", 0.05, 0.05, 4 * TRIALS, 2);
    ck_assert(t.pass < 0.08 * 4 * TRIALS && t.fail < 0.08 * 4 * TRIALS);
    t = run("kld_mean", 0.1, 0.05, TRIALS, 3);
    ck_assert(t.pass == TRIALS && t.windows < 8.5);
    t = run("ppl_ratio", exp(0.02), 0.05, TRIALS, 4);
    ck_assert(t.fail == TRIALS && t.windows < 14);
    t = run("delta_nll", 0.05, 0.045, TRIALS, 5); /* 4 standard errors of all windows */
    ck_assert(t.pass > 0.9 * TRIALS && t.windows < 0.6 * WINDOWS);
}
END_TEST

START_TEST(rules)
{
    static sample s;
    qc_rng rng;
    qc_decider *d;
    qc_decision *c;
    int n;
    const char *gates[] = {"top1", "kld_mean"};
    const double limits[] = {0.9, 1};
    ck_assert_int_eq(qc_decider_new(gates, limits, 2, 7, &d, &err), QC_E_USAGE);
    ck_assert(qc_decide_can("ppl_ratio") && !qc_decide_can("kld_max"));
    qc_rng_seed(&rng, 9);
    draw(&s, &rng, 0.5); /* top ids all agree, KL divergences are far inside */
    must(qc_decider_new(gates, limits, 2, WINDOWS, &d, &err));
    ck_assert_int_eq(qc_decider_next(d), 8);
    ck_assert(qc_decider_look(d, s.scores, &s.w));
    must(qc_decider_outcome(d, &c, &n, &err));
    ck_assert(n == 2 && strcmp(c[0].outcome, "pass") == 0 && strcmp(c[1].outcome, "pass") == 0);
    ck_assert(c[0].value == 1 && c[0].statistic == INFINITY && c[0].windows == 8);
    qc_free(c);
    qc_decider_free(d);
    for (int i = 0; i < WINDOWS * TOKENS; i++)
        s.scores[i].top_b = 1; /* none agrees: one failed gate ends it */
    must(qc_decider_new(gates, limits, 2, WINDOWS, &d, &err));
    ck_assert(qc_decider_look(d, s.scores, &s.w));
    must(qc_decider_outcome(d, &c, &n, &err));
    ck_assert_str_eq(c[0].outcome, "fail");
    qc_free(c);
    qc_decider_free(d);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"boundaries", boundaries}, {"error_rates", error_rates}, {"rules", rules}, {NULL, NULL}};
    return run_tests("decide", cases);
}
