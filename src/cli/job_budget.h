/* Bit budget of an output: measure, choose a grid per matrix, put the choice into the output's plan. */
#ifndef QC_CLI_JOB_BUDGET_H
#define QC_CLI_JOB_BUDGET_H

#include "job_state.h"

/* Does the recipe ask for one? */
bool qc_job_has_budget(const qc_recipe_quantize *quantize);

/* Replace quantize and plan of an output whose recipe asks for a budget by those of the choice; o->plan is
 * that of the recipe without it. A later output with the same grids takes over the choice of its lead.
 * Nothing without a budget. QC_E_USAGE: a budget that no choice reaches (the range is named). */
int qc_job_plan_budget(job *j, output *o, qc_err *err) QC_WARN_UNUSED;

/* The choice, for the plan; the caller watches for failed allocations (qc_json_watch). */
cJSON *qc_job_budget_json(const job *j, const output *o);

/* The choice for people: some lines, then with `recipe` the part of a recipe that makes the same file. */
int qc_job_budget_text(const job *j, const output *o, bool recipe, qc_buf *ret, qc_err *err) QC_WARN_UNUSED;

void qc_job_close_budget(output *o);

#endif
