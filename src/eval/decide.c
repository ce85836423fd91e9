#include "decide.h"

#include "qc_dist.h"
#include "qc_alloc.h"
#include "qc_math.h"

#include <math.h>
#include <string.h>

typedef enum { WINDOW_DELTA_NLL, WINDOW_KLD, WINDOW_TOP1 } window_value;

/* Gates that limit a mean over windows. */
static const struct gate_kind {
    const char *name;
    window_value value;
    bool is_ratio; /* the gate's figure is exp of the value */
    bool least;    /* the limit is the least allowed */
} kinds[] = {{"ppl_ratio", WINDOW_DELTA_NLL, true, false},
             {"delta_nll", WINDOW_DELTA_NLL, false, false},
             {"kld_mean", WINDOW_KLD, false, false},
             {"top1", WINDOW_TOP1, false, true}};

static const struct gate_kind *find(const char *gate)
{
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (strcmp(gate, kinds[i].name) == 0)
            return &kinds[i];
    return NULL;
}

bool qc_decide_can(const char *gate)
{
    return find(gate) != NULL;
}

struct qc_decider {
    int64_t looks[QC_DECIDE_MAX_LOOKS]; /* windows at each */
    double boundaries[QC_DECIDE_MAX_LOOKS];
    int n_looks, n_done;
    qc_decision *decisions; /* [n_gates] */
    int n_gates;
};

/* ---- boundaries ---- */

enum { GRID = 201 }; /* odd, for Simpson's rule */

/* Density of the statistic times the root of its share (a Brownian motion at time `share`) among paths that
 * did not cross yet. */
typedef struct density {
    double x[GRID], f[GRID];
} density;

static double simpson(const density *d, int i)
{
    double h = (d->x[GRID - 1] - d->x[0]) / (GRID - 1);
    return h / 3 * (i == 0 || i == GRID - 1 ? 1 : i % 2 ? 4 : 2);
}

static double upper(double x)
{
    return 0.5 * erfc(x / sqrt(2));
}

/* Chance to be above b after a step of variance v. */
static double crossing(const density *d, double b, double v)
{
    double p = 0;
    for (int i = 0; i < GRID; i++)
        p += simpson(d, i) * d->f[i] * upper((b - d->x[i]) / sqrt(v));
    return p;
}

static void advance(const density *from, density *to, double b, double v, double share)
{
    double low = -9 * sqrt(share), norm = 1 / sqrt(2 * acos(-1) * v);
    for (int i = 0; i < GRID; i++) {
        to->x[i] = low + (b - low) * i / (GRID - 1);
        to->f[i] = 0;
        for (int k = 0; k < GRID; k++) {
            double z = to->x[i] - from->x[k];
            to->f[i] += simpson(from, k) * from->f[k] * norm * exp(-z * z / (2 * v));
        }
    }
}

/* The first look has a single normal variable, the others the recursion of Armitage, McPherson & Rowe 1969.
 */
void qc_decide_boundaries(const double *shares, int n, double alpha, double *ret)
{
    density grids[2];
    double spent = 0;
    for (int k = 0; k < n; k++) {
        const density *from = &grids[(k + 1) % 2];
        density *to = &grids[k % 2];
        double all = alpha * log(1 + (exp(1) - 1) * shares[k]), p = all - spent;
        double v = k ? shares[k] - shares[k - 1] : shares[0], root = sqrt(shares[k]);
        double lo = -9 * root, hi = 9 * root;
        for (int i = 0; i < 50 && k; i++) {
            double mid = 0.5 * (lo + hi);
            if (crossing(from, mid, v) > p)
                lo = mid;
            else
                hi = mid;
        }
        double b = k ? 0.5 * (lo + hi) : qc_normal_quantile(1 - p) * root;
        spent = all;
        ret[k] = b / root;
        if (k)
            advance(from, to, b, v, shares[k]);
        else
            for (int i = 0; i < GRID; i++) {
                to->x[i] = -9 * root + (b + 9 * root) * i / (GRID - 1);
                to->f[i] = exp(-to->x[i] * to->x[i] / (2 * v)) / sqrt(2 * acos(-1) * v);
            }
    }
}

/* ---- looks ---- */

/* At 8, 12, 18, 27 ... windows and at the end; a last step of less than a quarter goes with the one before.
 */
static void plan_looks(qc_decider *d, int64_t n_windows)
{
    double shares[QC_DECIDE_MAX_LOOKS];
    int64_t n = QC_DECIDE_LEAST_WINDOWS;
    for (; n + n / 4 < n_windows && d->n_looks + 1 < QC_DECIDE_MAX_LOOKS; n += n / 2)
        d->looks[d->n_looks++] = n;
    d->looks[d->n_looks++] = n_windows;
    for (int i = 0; i < d->n_looks; i++)
        shares[i] = (double)d->looks[i] / (double)n_windows;
    qc_decide_boundaries(shares, d->n_looks, QC_DECIDE_ALPHA, d->boundaries);
    /* The same tail of Student's t, as the error is that of so few windows. */
    for (int i = 0; i < d->n_looks; i++)
        d->boundaries[i] = qc_t_upper_quantile(upper(d->boundaries[i]), (double)(d->looks[i] - 1));
}

int qc_decider_new(const char *const *gates, const double *limits, int n_gates, int64_t n_windows,
                   qc_decider **ret, qc_err *err)
{
    if (n_windows < QC_DECIDE_LEAST_WINDOWS)
        return qc_fail(err, QC_E_USAGE, "a sequential decision needs at least %d windows, there are %lld",
                       QC_DECIDE_LEAST_WINDOWS, (long long)n_windows);
    qc_decider *d = qc_calloc(1, sizeof *d);
    if (!d || !(d->decisions = qc_calloc((size_t)n_gates, sizeof *d->decisions))) {
        qc_free(d);
        return qc_fail_nomem(err, "decision", (unsigned long long)n_gates * sizeof *d->decisions);
    }
    d->n_gates = n_gates;
    for (int i = 0; i < n_gates; i++)
        d->decisions[i] = (qc_decision){
            .gate = gates[i], .limit = limits[i], .value = NAN, .statistic = NAN, .outcome = "undecided"};
    plan_looks(d, n_windows);
    *ret = d;
    return QC_OK;
}

void qc_decider_free(qc_decider *decider)
{
    if (!decider)
        return;
    qc_free(decider->decisions);
    qc_free(decider);
}

int64_t qc_decider_next(const qc_decider *decider)
{
    return decider->looks[qc_min_i64(decider->n_done, decider->n_looks - 1)];
}

/* ---- one look ---- */

/* Mean over a window's tokens. */
static double value_of(window_value value, const qc_token_score *s, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += value == WINDOW_DELTA_NLL ? (double)s[i].nll_b - (double)s[i].nll_a
               : value == WINDOW_KLD     ? (double)s[i].kld
                                         : s[i].top_a == s[i].top_b;
    return sum / (double)n;
}

/* Mean, standard deviation and skewness of window means. */
typedef struct window_moments {
    double mean, sd, skewness;
} window_moments;

static window_moments moments_of(window_value value, const qc_token_score *scores, const qc_windows *w,
                                 int64_t n_windows)
{
    double sum = 0, squares = 0, cubes = 0, n_all = (double)n_windows;
    for (int pass = 0; pass < 2; pass++) {
        const qc_token_score *s = scores;
        for (int64_t i = 0; i < n_windows; i++) {
            int64_t n = w->lengths[i] - (w->first ? w->first[i] : 1);
            double x = value_of(value, s, n), d = x - sum;
            if (pass == 0)
                sum += x / n_all;
            else {
                squares += d * d;
                cubes += d * d * d;
            }
            s += n;
        }
    }
    double population = sqrt(squares / n_all);
    return (window_moments){sum, sqrt(squares / (n_all - 1)),
                            population > 0 ? cubes / n_all / (population * population * population) : 0};
}

/* The t statistic of a mean against a value, with its skewness taken out by a monotone cubic (Hall 1992):
 * window means of KL divergences lean to the right, and few of them would look surer than they are. */
static double statistic_of(const window_moments *m, double against, int64_t n_windows)
{
    double n = (double)n_windows, t = (m->mean - against) / m->sd, g = m->skewness;
    return sqrt(n) * (t + g * t * t / 3 + g * g * t * t * t / 27 + g / (6 * n));
}

bool qc_decider_look(qc_decider *d, const qc_token_score *scores, const qc_windows *windows)
{
    int look = d->n_done++, n_decided = 0;
    bool failed = false;
    for (int i = 0; i < d->n_gates; i++) {
        qc_decision *c = &d->decisions[i];
        const struct gate_kind *kind = find(c->gate);
        double limit = kind->is_ratio ? log(c->limit) : c->limit;
        if (strcmp(c->outcome, "undecided") != 0) { /* stays as it was decided */
            n_decided++;
            continue;
        }
        window_moments m = moments_of(kind->value, scores, windows, d->looks[look]);
        double above = m.sd > 0          ? statistic_of(&m, limit, d->looks[look])
                       : m.mean == limit ? (kind->least ? INFINITY : -INFINITY)
                       : m.mean > limit  ? INFINITY
                                         : -INFINITY;
        c->value = kind->is_ratio ? exp(m.mean) : m.mean;
        c->statistic = kind->least ? above : -above;
        c->boundary = d->boundaries[look];
        c->windows = d->looks[look];
        if (fabs(c->statistic) >= c->boundary) {
            c->outcome = c->statistic > 0 ? "pass" : "fail";
            n_decided++;
        }
        failed = failed || strcmp(c->outcome, "fail") == 0;
    }
    return failed || n_decided == d->n_gates || d->n_done == d->n_looks;
}

int qc_decider_outcome(const qc_decider *decider, qc_decision **ret, int *ret_n, qc_err *err)
{
    size_t n = (size_t)decider->n_gates;
    *ret = qc_alloc(n, sizeof **ret);
    if (!*ret)
        return qc_fail_nomem(err, "decision", n * sizeof **ret);
    memcpy(*ret, decider->decisions, n * sizeof **ret);
    *ret_n = decider->n_gates;
    return QC_OK;
}
