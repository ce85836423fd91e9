#include "assign.h"

#include "budget.h"
#include "qc_alloc.h"
#include "qc_math.h"
#include "qpk.h"

#include <math.h>
#include <string.h>

/* Bits at which the damage of a unit is measured: about what budgets ask for. */
enum { REFERENCE_BITS = 4, REFERENCE_BITS_TABLE = 6 };

/* A table below 4 bits never pays: every token passes it. */
enum { LEAST_BITS = 2, LEAST_BITS_TABLE = 4, MOST_BITS = 8 };

enum { GROUP_MIN = 16, GROUP_MAX = 1024, GROUP_ALIGN = 8, MAX_GROUPS = 3 };

static const qc_tensor_info *info_of(const qc_model *model, int64_t tensor)
{
    return model->src->info(model->src, tensor);
}

qc_quant_spec qc_unit_spec(const qc_unit *unit, const qc_model *model, int i, const qc_grid_choice *choice)
{
    qc_quant_spec spec = unit->specs[i];
    spec.grid.bits = choice->bits;
    if (!unit->own_group[i])
        spec.grid.group_elems =
            choice->group == -1 ? qc_tensor_cols(info_of(model, unit->tensors[i])) : choice->group;
    return spec;
}

/* ---- choices ---- */

static uint64_t choice_bytes(const qc_unit *unit, const qc_model *model, const qc_grid_choice *choice)
{
    uint64_t sum = 0;
    for (int i = 0; i < unit->n_tensors; i++) {
        qc_tensor_info info = *info_of(model, unit->tensors[i]);
        if (choice->bits < 16) {
            info.dtype = QC_DT_GRID;
            info.grid = qc_unit_spec(unit, model, i, choice).grid;
        }
        sum += qc_qpk_tensor_bytes(&info);
    }
    return sum;
}

static bool is_table(const qc_unit *unit)
{
    return unit->layer < 0;
}

static bool group_fits(int64_t group, int64_t n_cols)
{
    return group >= GROUP_MIN && group <= GROUP_MAX && group % GROUP_ALIGN == 0 && n_cols % group == 0 &&
           group < n_cols;
}

/* Groups to choose from, ascending, -1 (one scale per row) last. In a layer: the recipe's, half and twice of
 * it; one scale per row stays that. For tables: their own and that of the layers. */
static int list_groups(const qc_unit *unit, const qc_model *model, const qc_policy *policy,
                       int64_t ret[MAX_GROUPS])
{
    int first = 0, n = 0;
    while (first < unit->n_tensors && unit->own_group[first])
        first++;
    if (first == unit->n_tensors) {
        ret[0] = -1; /* no matrix looks at it */
        return 1;
    }
    int64_t n_cols = qc_tensor_cols(info_of(model, unit->tensors[first])),
            own = unit->specs[first].grid.group_elems;
    if (is_table(unit)) {
        int64_t other = policy->weights.grid.group_elems;
        if (group_fits(other, n_cols) && (own >= n_cols || other < own))
            ret[n++] = other;
        ret[n++] = own >= n_cols ? -1 : own;
        if (group_fits(other, n_cols) && own < n_cols && other > own)
            ret[n++] = other;
        return n;
    }
    if (own >= n_cols) {
        ret[0] = -1;
        return 1;
    }
    if (own % 2 == 0 && group_fits(own / 2, n_cols))
        ret[n++] = own / 2;
    ret[n++] = own;
    if (group_fits(own * 2, n_cols))
        ret[n++] = own * 2;
    return n;
}

static int make_choices(qc_unit *unit, const qc_model *model, const qc_policy *policy, qc_err *err)
{
    int64_t groups[MAX_GROUPS], n_cols = qc_tensor_cols(info_of(model, unit->tensors[0]));
    int n_groups = list_groups(unit, model, policy, groups), n = 0;
    int least = is_table(unit) ? LEAST_BITS_TABLE : LEAST_BITS,
        reference = is_table(unit) ? REFERENCE_BITS_TABLE : REFERENCE_BITS;
    int64_t own = unit->specs[0].grid.group_elems >= n_cols ? -1 : unit->specs[0].grid.group_elems;
    unit->choices = qc_calloc((size_t)(MAX_GROUPS * MOST_BITS), sizeof *unit->choices);
    if (!unit->choices)
        return qc_fail_nomem(err, "choices", MAX_GROUPS * MOST_BITS * sizeof *unit->choices);
    for (int bits = least; bits <= MOST_BITS; bits++)
        for (int g = 0; g < n_groups; g++) {
            if (bits == reference && (g == 0 || groups[g] == own))
                unit->reference = n;
            unit->choices[n++] = (qc_grid_choice){.bits = bits, .group = groups[g]};
        }
    unit->choices[n++] = (qc_grid_choice){.bits = 16, .group = -1};
    unit->n_choices = n;
    for (int c = 0; c < n; c++)
        unit->choices[c].bytes = choice_bytes(unit, model, &unit->choices[c]);
    return QC_OK;
}

/* ---- units ---- */

/* Put a matrix into the unit unless its bits are settled. */
static void join_unit(qc_unit *unit, const qc_model *model, const qc_policy *policy,
                      const qc_convert_plan *plan, int64_t tensor)
{
    const qc_convert_item *item = tensor < 0 ? NULL : qc_convert_plan_item(plan, tensor);
    bool bits, group;
    if (!item || item->action != QC_ACTION_QUANTIZED)
        return;
    qc_policy_settled(policy, info_of(model, tensor)->name, &bits, &group);
    if (bits)
        return;
    unit->tensors[unit->n_tensors] = tensor;
    unit->specs[unit->n_tensors] = item->spec;
    unit->own_group[unit->n_tensors++] = group;
}

static int end_unit(qc_assignment *a, qc_unit *unit, const qc_model *model, const qc_policy *policy,
                    qc_err *err)
{
    if (unit->n_tensors == 0)
        return QC_OK;
    qc_unit *u = &a->units[a->n_units++];
    *u = *unit;
    return make_choices(u, model, policy, err);
}

static int make_units(qc_assignment *a, const qc_model *model, const qc_policy *policy,
                      const qc_convert_plan *plan, qc_err *err)
{
    bool tied = model->config.tied;
    qc_unit table = {.layer = -1, .embedding = true, .head = tied};
    join_unit(&table, model, policy, plan, qc_model_tensor(model, 0, QC_SLOT_EMBEDDING));
    QC_TRY(end_unit(a, &table, model, policy, err));
    for (int layer = 0; layer < model->config.n_layers; layer++)
        for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++) {
            qc_unit unit = {.layer = layer, .stage = (qc_stage)stage};
            for (const qc_slot *s = qc_stage_slots(model->config.family, (qc_stage)stage); *s != QC_N_SLOTS;
                 s++)
                join_unit(&unit, model, policy, plan, qc_model_tensor(model, layer, *s));
            QC_TRY(end_unit(a, &unit, model, policy, err));
        }
    if (tied)
        return QC_OK;
    qc_unit head = {.layer = -1, .head = true};
    join_unit(&head, model, policy, plan, qc_model_tensor(model, 0, QC_SLOT_HEAD));
    return end_unit(a, &head, model, policy, err);
}

static bool in_unit(const qc_assignment *a, int64_t tensor)
{
    for (int u = 0; u < a->n_units; u++)
        for (int i = 0; i < a->units[u].n_tensors; i++)
            if (a->units[u].tensors[i] == tensor)
                return true;
    return false;
}

int qc_assignment_make(const qc_model *model, const qc_policy *policy, const qc_convert_plan *plan,
                       qc_assignment *ret, qc_err *err)
{
    qc_assignment a = {0};
    size_t most = (size_t)model->config.n_layers * QC_N_DENSE_STAGES + 2;
    a.units = qc_calloc(most, sizeof *a.units);
    if (!a.units)
        return qc_fail_nomem(err, "units", most * sizeof *a.units);
    int rc = make_units(&a, model, policy, plan, err);
    if (rc < 0) {
        qc_assignment_clear(&a);
        return rc;
    }
    for (int64_t i = 0; i < plan->n_items; i++) {
        const qc_convert_item *item = &plan->items[i];
        bool matrix = item->action == QC_ACTION_QUANTIZED || item->action == QC_ACTION_KEPT16;
        if (matrix)
            a.n_weights += (double)qc_tensor_n_elems(info_of(model, item->tensor));
        if (in_unit(&a, item->tensor))
            continue;
        a.fixed_bytes += item->bytes_out;
        a.fixed_matrix_bytes += matrix ? item->bytes_out : 0;
    }
    *ret = a;
    return QC_OK;
}

void qc_assignment_clear(qc_assignment *a)
{
    if (!a)
        return;
    for (int u = 0; u < a->n_units; u++)
        qc_free(a->units[u].choices);
    qc_free(a->units);
    *a = (qc_assignment){0};
}

/* ---- choice ---- */

/* The units as the knapsack sees them; one block of memory, qc_free. */
static qc_budget_item *make_items(const qc_assignment *a)
{
    size_t n = 0;
    for (int u = 0; u < a->n_units; u++)
        n += (size_t)a->units[u].n_choices;
    size_t head = (size_t)qc_round_up((int64_t)((size_t)a->n_units * sizeof(qc_budget_item)), 16);
    char *block = qc_alloc(head + n * sizeof(qc_budget_choice), 1);
    if (!block)
        return NULL;
    qc_budget_item *items = (qc_budget_item *)(void *)block;
    qc_budget_choice *choice = (qc_budget_choice *)(void *)(block + head);
    for (int u = 0; u < a->n_units; u++) {
        const qc_unit *unit = &a->units[u];
        items[u] = (qc_budget_item){choice, unit->n_choices};
        for (int c = 0; c < unit->n_choices; c++)
            *choice++ = (qc_budget_choice){unit->choices[c].bytes, unit->choices[c].damage};
    }
    return items;
}

void qc_assignment_range(const qc_assignment *a, uint64_t *ret_least, uint64_t *ret_most)
{
    *ret_least = *ret_most = a->fixed_bytes;
    for (int u = 0; u < a->n_units; u++) {
        uint64_t least = UINT64_MAX, most = 0;
        for (int c = 0; c < a->units[u].n_choices; c++) {
            uint64_t bytes = a->units[u].choices[c].bytes;
            least = bytes < least ? bytes : least;
            most = bytes > most ? bytes : most;
        }
        *ret_least += least;
        *ret_most += most;
    }
}

int qc_assignment_solve(qc_assignment *a, uint64_t tensor_bytes, qc_err *err)
{
    qc_budget_result result;
    qc_budget_item *items = make_items(a);
    int *chosen = qc_alloc((size_t)a->n_units, sizeof *chosen);
    int rc;
    if (!items || !chosen)
        rc = qc_fail_nomem(err, "bit budget", (unsigned long long)a->n_units * sizeof *items);
    else
        rc = qc_budget_solve(items, a->n_units,
                             tensor_bytes > a->fixed_bytes ? tensor_bytes - a->fixed_bytes : 0, chosen,
                             &result, err);
    if (rc == QC_OK) {
        a->bound = result.bound;
        for (int u = 0; u < a->n_units; u++)
            a->units[u].chosen = chosen[u];
    }
    qc_free(items);
    qc_free(chosen);
    return rc;
}

static const qc_grid_choice *chosen_of(const qc_unit *unit)
{
    return &unit->choices[unit->chosen];
}

uint64_t qc_assignment_bytes(const qc_assignment *a)
{
    uint64_t sum = a->fixed_bytes;
    for (int u = 0; u < a->n_units; u++)
        sum += chosen_of(&a->units[u])->bytes;
    return sum;
}

double qc_assignment_bits(const qc_assignment *a, uint64_t tensor_bytes)
{
    double matrix_bytes = (double)tensor_bytes - (double)(a->fixed_bytes - a->fixed_matrix_bytes);
    return a->n_weights > 0 ? 8 * matrix_bytes / a->n_weights : 0;
}

uint64_t qc_assignment_bytes_at(const qc_assignment *a, double bits)
{
    return (uint64_t)floor(bits * a->n_weights / 8) + (a->fixed_bytes - a->fixed_matrix_bytes);
}

double qc_assignment_damage(const qc_assignment *a)
{
    double sum = 0;
    for (int u = 0; u < a->n_units; u++)
        sum += chosen_of(&a->units[u])->damage;
    return sum;
}

/* ---- overrides ---- */

void qc_overrides_free(qc_override *overrides, int n)
{
    for (int i = 0; overrides && i < n; i++)
        qc_free(overrides[i].match);
    qc_free(overrides);
}

/* A pattern that matches this name only. */
static char *literal_pattern(const char *name)
{
    char *text = qc_alloc(2 * strlen(name) + 1, 1), *p = text;
    for (; text && *name; name++) {
        if (strchr("*?[]\\", *name))
            *p++ = '\\';
        *p++ = *name;
    }
    if (text)
        *p = 0;
    return text;
}

static qc_override unit_override(const qc_unit *unit, int i)
{
    const qc_grid_choice *c = chosen_of(unit);
    return (qc_override){
        .bits = c->bits, .group = c->bits == 16 || unit->own_group[i] ? 0 : c->group, .symmetric = -1};
}

int qc_assignment_overrides(const qc_assignment *a, const qc_model *model, const qc_policy *policy,
                            qc_override **ret, int *ret_n, qc_err *err)
{
    int most = policy->n_overrides + a->n_units * QC_UNIT_TENSORS, n = 0;
    qc_override *list = qc_calloc((size_t)most + 1, sizeof *list);
    bool ok = list != NULL;
    for (int i = 0; i < policy->n_overrides && ok; i++) {
        list[n] = policy->overrides[i];
        ok = (list[n++].match = qc_strdup(policy->overrides[i].match)) != NULL;
    }
    for (int u = 0; u < a->n_units && ok; u++)
        for (int i = 0; i < a->units[u].n_tensors && ok; i++) {
            list[n] = unit_override(&a->units[u], i);
            ok = (list[n++].match = literal_pattern(info_of(model, a->units[u].tensors[i])->name)) != NULL;
        }
    if (!ok) {
        qc_overrides_free(list, n);
        return qc_fail_nomem(err, "overrides", (unsigned long long)most * sizeof *list);
    }
    *ret = list;
    *ret_n = n;
    return QC_OK;
}
