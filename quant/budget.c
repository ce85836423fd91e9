#include "budget.h"

#include "qc_alloc.h"

#include <stdbool.h>
#include <stdlib.h>

/* From one vertex of an item's hull to the next. */
typedef struct hull_step {
    int item, to;
    int order;    /* along the hull */
    double slope; /* damage saved per byte; falls along the hull */
    uint64_t bytes;
} hull_step;

/* Least cost, then least damage. */
static int cheapest(const qc_budget_item *it)
{
    int best = 0;
    for (int c = 1; c < it->n_choices; c++) {
        const qc_budget_choice *a = &it->choices[c], *b = &it->choices[best];
        if (a->cost < b->cost || (a->cost == b->cost && a->damage < b->damage))
            best = c;
    }
    return best;
}

/* Least damage, then least cost. */
static int gentlest(const qc_budget_item *it)
{
    int best = 0;
    for (int c = 1; c < it->n_choices; c++) {
        const qc_budget_choice *a = &it->choices[c], *b = &it->choices[best];
        if (a->damage < b->damage || (a->damage == b->damage && a->cost < b->cost))
            best = c;
    }
    return best;
}

void qc_budget_range(const qc_budget_item *items, int n_items, uint64_t *ret_least, uint64_t *ret_most)
{
    *ret_least = *ret_most = 0;
    for (int i = 0; i < n_items; i++) {
        *ret_least += items[i].choices[cheapest(&items[i])].cost;
        *ret_most += items[i].choices[gentlest(&items[i])].cost;
    }
}

/* The next vertex of the hull behind choice `from`; false at its end. */
static bool next_step(const qc_budget_item *it, int from, hull_step *ret)
{
    bool found = false;
    for (int c = 0; c < it->n_choices; c++) {
        const qc_budget_choice *a = &it->choices[from], *b = &it->choices[c];
        if (b->cost <= a->cost || b->damage >= a->damage)
            continue;
        uint64_t bytes = b->cost - a->cost;
        double slope = (a->damage - b->damage) / (double)bytes;
        if (found && (slope < ret->slope || (slope == ret->slope && bytes >= ret->bytes)))
            continue;
        ret->to = c;
        ret->slope = slope;
        ret->bytes = bytes;
        found = true;
    }
    return found;
}

static int compare_steps(const void *a, const void *b)
{
    const hull_step *x = a, *y = b;
    if (x->slope != y->slope)
        return x->slope > y->slope ? -1 : 1;
    if (x->item != y->item)
        return x->item < y->item ? -1 : 1;
    return x->order - y->order;
}

static int list_steps(const qc_budget_item *items, int n_items, const int *start, hull_step *steps)
{
    int n = 0;
    for (int i = 0; i < n_items; i++) {
        hull_step s = {.item = i, .order = 0};
        double last = 0;
        for (int from = start[i]; next_step(&items[i], from, &s); from = s.to, s.order++) {
            if (s.order > 0 && s.slope > last)
                s.slope = last; /* equal up to rounding: the order along the hull must survive the sort */
            last = s.slope;
            steps[n++] = s;
        }
    }
    qsort(steps, (size_t)n, sizeof *steps, compare_steps);
    return n;
}

/* Single steps that fit what is left, the largest gain first. */
static void fill(const qc_budget_item *items, int n_items, uint64_t left, int *choices)
{
    for (;;) {
        int item = -1, to = -1;
        double best = 0;
        for (int i = 0; i < n_items; i++) {
            const qc_budget_choice *now = &items[i].choices[choices[i]];
            for (int c = 0; c < items[i].n_choices; c++) {
                const qc_budget_choice *then = &items[i].choices[c];
                if (then->cost <= now->cost + left && now->damage - then->damage > best) {
                    best = now->damage - then->damage;
                    item = i;
                    to = c;
                }
            }
        }
        if (item < 0)
            return;
        left = left + items[item].choices[choices[item]].cost - items[item].choices[to].cost;
        choices[item] = to;
    }
}

int qc_budget_solve(const qc_budget_item *items, int n_items, uint64_t budget, int *ret_choices,
                    qc_budget_result *ret, qc_err *err)
{
    uint64_t least, most;
    size_t n_choices = 0;
    qc_budget_range(items, n_items, &least, &most);
    if (least > budget)
        return qc_fail(err, QC_E_USAGE, "a budget of %llu bytes is too small, expected %llu to %llu",
                       (unsigned long long)budget, (unsigned long long)least, (unsigned long long)most);
    for (int i = 0; i < n_items; i++)
        n_choices += (size_t)items[i].n_choices;
    hull_step *steps = qc_alloc(n_choices + 1, sizeof *steps);
    if (!steps)
        return qc_fail_nomem(err, "bit budget", n_choices * sizeof *steps);
    *ret = (qc_budget_result){0};
    for (int i = 0; i < n_items; i++)
        ret_choices[i] = cheapest(&items[i]);
    int n_steps = list_steps(items, n_items, ret_choices, steps);
    uint64_t left = budget - least;
    double part = 0; /* what the step that does not fit would save if it could be taken in part */
    for (int s = 0; s < n_steps; s++) {
        if (steps[s].bytes > left) {
            part = steps[s].slope * (double)left;
            break;
        }
        left -= steps[s].bytes;
        ret_choices[steps[s].item] = steps[s].to;
    }
    qc_free(steps);
    for (int i = 0; i < n_items; i++)
        ret->bound += items[i].choices[ret_choices[i]].damage;
    ret->bound -= part;
    fill(items, n_items, left, ret_choices);
    for (int i = 0; i < n_items; i++) {
        ret->cost += items[i].choices[ret_choices[i]].cost;
        ret->damage += items[i].choices[ret_choices[i]].damage;
    }
    return QC_OK;
}
