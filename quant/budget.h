/* Bit budget: one choice per item so that the summed damage is small and the summed cost stays within a
 * budget (the multiple-choice knapsack of docs/methods/budget.md). */
#ifndef QC_BUDGET_H
#define QC_BUDGET_H

#include "qc_err.h"

#include <stdint.h>

typedef struct qc_budget_choice {
    uint64_t cost; /* bytes */
    double damage; /* finite, >= 0 */
} qc_budget_choice;

/* Exactly one of n_choices >= 1 is taken. Borrowed. */
typedef struct qc_budget_item {
    const qc_budget_choice *choices;
    int n_choices;
} qc_budget_item;

typedef struct qc_budget_result {
    uint64_t cost;
    double damage;
    double bound; /* no selection within the budget has less damage than this */
} qc_budget_result;

/* Cost of the cheapest selection, and of the cheapest one that has the least damage of all. */
void qc_budget_range(const qc_budget_item *items, int n_items, uint64_t *ret_least, uint64_t *ret_most);

/* Fill ret_choices[n_items]. On the lower convex hull of each item the steps of best damage per byte are
 * taken until one does not fit, which is the optimum of the Lagrangian at the multiplier of that step; what
 * is left of the budget goes to the single steps, on the hull or not, that still fit and gain most. Ties:
 * lower item, then lower choice. QC_E_USAGE: the cheapest selection is above the budget. */
int qc_budget_solve(const qc_budget_item *items, int n_items, uint64_t budget, int *ret_choices,
                    qc_budget_result *ret, qc_err *err) QC_WARN_UNUSED;

#endif
