/* The knapsack against all selections of small random problems, and its rules for ties and impossible
 * budgets. */
#include "budget.h"
#include "qc_rng.h"
#include "qc_test.h"

#include <math.h>

enum { MAX_ITEMS = 6, MAX_CHOICES = 5 };

typedef struct problem {
    qc_budget_choice choices[MAX_ITEMS][MAX_CHOICES];
    qc_budget_item items[MAX_ITEMS];
    int n_items;
} problem;

/* Costs and damages at random: dominated choices, equal ones and ones off the hull all occur. */
static void make_random(problem *p, qc_rng *rng)
{
    p->n_items = 1 + (int)qc_rng_below(rng, MAX_ITEMS);
    for (int i = 0; i < p->n_items; i++) {
        p->items[i] = (qc_budget_item){p->choices[i], 1 + (int)qc_rng_below(rng, MAX_CHOICES)};
        for (int c = 0; c < p->items[i].n_choices; c++)
            p->choices[i][c] = (qc_budget_choice){1 + qc_rng_below(rng, 12), (double)qc_rng_below(rng, 50)};
    }
}

/* Choices whose damage falls by the square of the step, as rounding errors do: cost b, damage k * 4^-b. */
static void make_curves(problem *p, qc_rng *rng)
{
    p->n_items = MAX_ITEMS;
    for (int i = 0; i < p->n_items; i++) {
        double k = exp(3 * qc_rng_normal(rng));
        uint64_t bytes = 1 + qc_rng_below(rng, 9);
        p->items[i] = (qc_budget_item){p->choices[i], MAX_CHOICES};
        for (int c = 0; c < MAX_CHOICES; c++)
            p->choices[i][c] = (qc_budget_choice){bytes * (uint64_t)(c + 2), k * pow(4, -(c + 2))};
    }
}

/* Least damage within the budget over all selections; infinite if there is none. */
static double brute_force(const problem *p, uint64_t budget, int item, uint64_t cost, double damage)
{
    if (cost > budget)
        return INFINITY;
    if (item == p->n_items)
        return damage;
    double best = INFINITY;
    for (int c = 0; c < p->items[item].n_choices; c++)
        best = fmin(best, brute_force(p, budget, item + 1, cost + p->choices[item][c].cost,
                                      damage + p->choices[item][c].damage));
    return best;
}

static double largest_damage(const problem *p)
{
    double most = 0;
    for (int i = 0; i < p->n_items; i++)
        for (int c = 0; c < p->items[i].n_choices; c++)
            most = fmax(most, p->choices[i][c].damage);
    return most;
}

static void check_problem(const problem *p, uint64_t budget)
{
    int choices[MAX_ITEMS];
    qc_budget_result r;
    qc_err err;
    uint64_t least, most, cost = 0;
    double best = brute_force(p, budget, 0, 0, 0), damage = 0;
    qc_budget_range(p->items, p->n_items, &least, &most);
    int rc = qc_budget_solve(p->items, p->n_items, budget, choices, &r, &err);
    ck_assert_int_eq(rc, isinf(best) ? QC_E_USAGE : QC_OK);
    ck_assert_int_eq(rc == QC_OK, least <= budget);
    if (rc < 0)
        return;
    for (int i = 0; i < p->n_items; i++) {
        cost += p->choices[i][choices[i]].cost;
        damage += p->choices[i][choices[i]].damage;
    }
    ck_assert_uint_eq(r.cost, cost);
    ck_assert_double_eq(r.damage, damage);
    ck_assert(cost <= budget);
    /* bound <= optimum <= what was found, and that is at most one step of one item above the bound */
    double eps = 1e-9 * (1 + best);
    ck_assert_double_le(r.bound, best + eps);
    ck_assert_double_ge(r.damage, best - eps);
    ck_assert_double_le(r.damage, r.bound + largest_damage(p) + eps);
    if (budget >= most) {
        ck_assert_double_le(fabs(r.damage - best), eps);
        ck_assert_uint_eq(cost, most);
    }
    /* nothing is left that a single further step could use */
    for (int i = 0; i < p->n_items; i++)
        for (int c = 0; c < p->items[i].n_choices; c++)
            ck_assert(cost - p->choices[i][choices[i]].cost + p->choices[i][c].cost > budget ||
                      p->choices[i][c].damage >= p->choices[i][choices[i]].damage);
}

START_TEST(against_all_selections)
{
    qc_rng rng;
    problem p;
    qc_rng_seed(&rng, 7);
    for (int n = 0; n < 3000; n++) {
        make_random(&p, &rng);
        check_problem(&p, qc_rng_below(&rng, 70));
    }
}
END_TEST

/* Whenever the budget is a corner of the hull the answer is the optimum itself. */
START_TEST(exact_on_the_hull)
{
    qc_rng rng;
    problem p;
    int choices[MAX_ITEMS], n_exact = 0;
    qc_budget_result r;
    qc_err err;
    qc_rng_seed(&rng, 8);
    for (int n = 0; n < 300; n++) {
        make_curves(&p, &rng);
        uint64_t least, most;
        qc_budget_range(p.items, p.n_items, &least, &most);
        for (uint64_t budget = least; budget <= most; budget += 7) {
            check_problem(&p, budget);
            ck_assert_int_eq(qc_budget_solve(p.items, p.n_items, budget, choices, &r, &err), 0);
            if (fabs(r.damage - r.bound) > 1e-12 * r.damage)
                continue;
            double best = brute_force(&p, budget, 0, 0, 0);
            ck_assert_double_le(fabs(r.damage - best), 1e-9 * best);
            n_exact++;
        }
    }
    ck_assert_int_gt(n_exact, 100);
}
END_TEST

START_TEST(ties_go_to_the_lower_item)
{
    static const qc_budget_choice same[] = {{4, 8}, {8, 2}, {8, 2}};
    qc_budget_item items[4];
    int choices[4];
    qc_budget_result r;
    qc_err err;
    for (int i = 0; i < 4; i++)
        items[i] = (qc_budget_item){same, 3};
    ck_assert_int_eq(qc_budget_solve(items, 4, 24, choices, &r, &err), 0);
    ck_assert(choices[0] == 1 && choices[1] == 1 && choices[2] == 0 && choices[3] == 0);
    ck_assert_uint_eq(r.cost, 24);
    ck_assert_double_eq(r.damage, 20);
    ck_assert_double_eq(r.bound, 20);
    ck_assert_int_eq(qc_budget_solve(items, 0, 0, choices, &r, &err), 0);
    ck_assert_uint_eq(r.cost, 0);
}
END_TEST

START_TEST(impossible)
{
    static const qc_budget_choice a[] = {{40, 8}, {80, 2}}, b[] = {{10, 1}, {11, 1}};
    qc_budget_item items[] = {{a, 2}, {b, 2}};
    int choices[2];
    qc_budget_result r;
    qc_err err;
    ck_assert_int_eq(qc_budget_solve(items, 2, 49, choices, &r, &err), QC_E_USAGE);
    ck_assert_str_eq(err.msg, "a budget of 49 bytes is too small, expected 50 to 90");
    ck_assert_int_eq(qc_budget_solve(items, 2, 50, choices, &r, &err), 0);
    ck_assert(choices[0] == 0 && choices[1] == 0);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"against all selections", against_all_selections},
                               {"exact on the hull", exact_on_the_hull},
                               {"ties", ties_go_to_the_lower_item},
                               {"impossible", impossible},
                               {NULL, NULL}};
    return run_tests("budget", cases);
}
