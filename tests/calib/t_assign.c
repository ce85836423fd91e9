/* Units, bytes and overrides of a bit budget; damage against models that hold the rounded values and go
 * through the ordinary evaluation. */
#include "assign.h"
#include "eval.h"
#include "mem_source.h"
#include "qc_alloc.h"
#include "qc_rng.h"
#include "qc_test.h"
#include "rtn.h"
#include "sensitivity.h"

#include <math.h>

enum { WINDOWS = 2, LENGTH = 24 };

typedef struct fixture {
    mem_source *src;
    qc_model model;
    qc_pool *pool;
    qc_backend *be;
    qc_policy policy;
    qc_convert_plan plan;
    qc_assignment a;
    int32_t ids[WINDOWS * (LENGTH + 1)]; /* one more than is measured: the last has no logits to compare */
} fixture;

static void must(int rc, const qc_err *err)
{
    ck_assert_msg(rc == 0, "%s", rc < 0 ? err->msg : "");
}

static void assign(fixture *f)
{
    qc_err err;
    qc_event_list events = {0};
    must(qc_convert_plan_make(&f->model, &f->policy, qc_writer_format_find("qpk"), NULL, &events, &f->plan,
                              &err),
         &err);
    must(qc_assignment_make(&f->model, &f->policy, &f->plan, &f->a, &err), &err);
    qc_event_list_clear(&events);
}

/* Min-max scales: the values of a rounded matrix then do not depend on column weights. */
static void open_fixture(fixture *f, const char *name, int threads)
{
    qc_err err;
    qc_rng rng;
    memset(f, 0, sizeof *f);
    f->src = mem_tiny(name);
    bool tied = strcmp(name, "qwen3-untied") != 0;
    if (tied && f->src->base.find(&f->src->base, "lm_head.weight") >= 0)
        mem_remove(f->src, "lm_head.weight"); /* a copy of the table would have to be rounded with it */
    for (int64_t i = 0; i < f->src->base.n_tensors; i++)
        f->src->tensors[i].info.dtype = QC_DT_BF16;
    must(qc_model_open(&f->src->base, &f->model, &err), &err);
    must(qc_pool_new(threads, &f->pool, &err), &err);
    must(qc_backend_cpu_new(f->pool, QC_COMPUTE_F32, &f->be, &err), &err);
    f->policy = qc_policy_defaults();
    f->policy.weights.grid.group_elems = 32;
    f->policy.weights.search = f->policy.embedding.search = QC_SEARCH_MINMAX;
    qc_rng_seed(&rng, 3);
    for (int i = 0; i < WINDOWS * (LENGTH + 1); i++)
        f->ids[i] = (int32_t)qc_rng_below(&rng, (uint64_t)f->model.config.vocab);
}

static void close_assignment(fixture *f)
{
    qc_assignment_clear(&f->a);
    qc_convert_plan_clear(&f->plan);
}

static void close_fixture(fixture *f)
{
    close_assignment(f);
    qc_model_close(&f->model);
    mem_close(f->src);
    qc_backend_close(f->be);
    qc_pool_free(f->pool);
}

/* Statistics are taken from the same text. */
static int measure_with(fixture *f, const qc_gptq_options *gptq, uint64_t memory_bytes, qc_err *err)
{
    int32_t ids[WINDOWS * LENGTH];
    qc_sensitivity_options options = {.gptq = gptq, .memory_bytes = memory_bytes};
    for (int i = 0; i < WINDOWS; i++)
        memcpy(ids + i * LENGTH, f->ids + i * (LENGTH + 1), LENGTH * sizeof *ids);
    qc_sample_text text = {ids, WINDOWS, LENGTH};
    return qc_sensitivity_measure(&f->model, f->be, &text, &text, &f->a, &options, err);
}

static void measure(fixture *f, const qc_gptq_options *gptq, uint64_t memory_bytes)
{
    qc_err err;
    must(measure_with(f, gptq, memory_bytes, &err), &err);
}

static void plan_bytes(const fixture *f, uint64_t *full, uint64_t *least)
{
    qc_sample_text text = {f->ids, WINDOWS, LENGTH};
    qc_sensitivity_plan_bytes(&f->model.config, f->be, f->a.n_units, &text, &text, full, least);
}

/* ---- damage ---- */

/* h[n, n] = sum of x x^T over the inputs of a unit in the 16-bit model; tables: unit matrix. */
static void second_moments(fixture *f, const qc_unit *unit, int64_t n, float *h)
{
    qc_err err;
    qc_workspace *ws;
    int64_t hidden = f->model.config.hidden;
    float *x = qc_alloc((size_t)(LENGTH * hidden), sizeof *x),
          *u = qc_alloc((size_t)(LENGTH * 4096), sizeof *u);
    double *sum = qc_calloc((size_t)(n * n), sizeof *sum);
    must(qc_workspace_new(&f->model, f->be, LENGTH, &ws, &err), &err);
    for (int w = 0; w < WINDOWS && unit->layer >= 0; w++) {
        must(qc_model_embed(&f->model, f->ids + w * (LENGTH + 1), LENGTH, x, &err), &err);
        for (int layer = 0; layer <= unit->layer; layer++) {
            qc_layer *weights;
            must(qc_layer_load(&f->model, f->be, layer, &weights, &err), &err);
            for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++) {
                must(qc_layer_stage_input(weights, ws, (qc_stage)stage, x, u, LENGTH, &err), &err);
                for (int64_t t = 0; t < LENGTH && layer == unit->layer && stage == (int)unit->stage; t++)
                    for (int64_t i = 0; i < n * n; i++)
                        sum[i] += (double)u[t * n + i / n] * (double)u[t * n + i % n];
                if (stage == QC_STAGE_O || stage == QC_STAGE_DOWN)
                    must(qc_layer_stage_output(weights, ws, (qc_stage)stage, u, x, LENGTH, &err), &err);
            }
            qc_layer_free(weights);
        }
    }
    for (int64_t i = 0; i < n * n; i++)
        h[i] = unit->layer >= 0 ? (float)sum[i] : i / n == i % n;
    qc_workspace_free(ws);
    qc_free(x);
    qc_free(u);
    qc_free(sum);
}

/* w = values of its codes on the unit's reference grid. */
static void round_values(fixture *f, const qc_unit *unit, int i, const qc_gptq_options *gptq, int64_t n_rows,
                         int64_t n_cols, float *w)
{
    qc_err err;
    qc_quant_spec spec = qc_unit_spec(unit, &f->model, i, &unit->choices[unit->reference]);
    qc_code_rows rows = {.n_rows = n_rows,
                         .codes = qc_alloc((size_t)(n_rows * n_cols), 1),
                         .scales = qc_alloc((size_t)(n_rows * n_cols), sizeof(float))};
    qc_quant_stats stats = {0};
    if (gptq && unit->layer >= 0) {
        float *h = qc_alloc((size_t)(n_cols * n_cols), sizeof *h);
        qc_gptq_input *input;
        qc_gptq_input_info info;
        qc_gptq_result result;
        second_moments(f, unit, n_cols, h);
        must(qc_gptq_input_new(f->be, h, n_cols, gptq, &input, &info, &err), &err);
        must(qc_gptq_matrix(input, w, n_rows, &spec, &rows, &stats, &result, &err), &err);
        qc_gptq_input_free(input);
        qc_free(h);
    } else {
        must(qc_rtn_rows(f->be, w, n_rows, n_cols, &spec, NULL, &rows, &stats, &err), &err);
    }
    qc_code_rows_decode(&rows, &spec.grid, n_cols, w);
    qc_free(rows.codes);
    qc_free(rows.scales);
}

/* Round the unit's matrices in a copy of the model and score the copy beside the original. */
static double evaluate_unit(fixture *f, const qc_unit *unit, const qc_gptq_options *gptq)
{
    qc_err err;
    mem_source *copy = mem_copy(&f->src->base);
    for (int i = 0; i < unit->n_tensors; i++) {
        const qc_tensor_info *info = f->src->base.info(&f->src->base, unit->tensors[i]);
        round_values(f, unit, i, gptq, qc_tensor_rows(info), qc_tensor_cols(info),
                     mem_tensor_of(copy, info->name)->values);
    }
    qc_model rounded;
    must(qc_model_open(&copy->base, &rounded, &err), &err);
    int64_t lengths[WINDOWS] = {LENGTH + 1, LENGTH + 1};
    qc_sequences seqs = {.ids = f->ids, .lengths = lengths, .n_sequences = WINDOWS};
    qc_token_score scores[WINDOWS * LENGTH];
    must(qc_eval_tokens(f->be, &f->model, &rounded, &seqs, NULL, scores, &err), &err);
    double sum = 0;
    for (int i = 0; i < WINDOWS * LENGTH; i++)
        sum += (double)scores[i].kld;
    qc_model_close(&rounded);
    mem_close(copy);
    return sum / (WINDOWS * LENGTH);
}

/* slack: codes near ties move with the order in which second moments are added. */
static void check_damage(const char *name, const qc_gptq_options *gptq, double slack)
{
    fixture f;
    open_fixture(&f, name, 2);
    assign(&f);
    measure(&f, gptq, 0);
    for (int u = 0; u < f.a.n_units; u++) {
        const qc_unit *unit = &f.a.units[u];
        double want = evaluate_unit(&f, unit, gptq), got = unit->choices[unit->reference].damage;
        ck_assert_msg(want > 0 && fabs(got - want) < slack * want + 1e-8, "%s unit %d: %g, not %g", name, u,
                      got, want);
        for (int c = 0; c + 1 < unit->n_choices; c++) { /* a bit more: about a quarter */
            double ratio = unit->choices[c].damage / got;
            double power = pow(4, unit->choices[unit->reference].bits - unit->choices[c].bits);
            ck_assert_msg(ratio > power / 6 && ratio < power * 6, "%s unit %d choice %d: %g", name, u, c,
                          ratio);
        }
        ck_assert(unit->choices[unit->n_choices - 1].damage == 0);
    }
    close_fixture(&f);
}

START_TEST(damage_is_that_of_the_evaluation)
{
    check_damage("qwen3", NULL, 1e-4);        /* tied: the table is embedding and head */
    check_damage("qwen3-untied", NULL, 1e-4); /* two tables */
    check_damage("qwen2", NULL, 1e-4);        /* biases */
}
END_TEST

START_TEST(damage_of_gptq)
{
    qc_gptq_options gptq = qc_gptq_defaults();
    check_damage("qwen3", &gptq, 0.05);
}
END_TEST

static void copy_damages(const qc_assignment *a, double *ret)
{
    for (int u = 0; u < a->n_units; u++)
        for (int c = 0; c < a->units[u].n_choices; c++)
            *ret++ = a->units[u].choices[c].damage;
}

START_TEST(same_numbers_for_threads_and_with_spilled_streams)
{
    enum { N = 4096 };
    static double want[N], got[N];
    static const int threads[] = {1, 2, 7, 2};
    const qc_gptq_options gptq = qc_gptq_defaults();
    for (int i = 0; i < 4; i++) {
        fixture f;
        uint64_t full, least;
        open_fixture(&f, "qwen3", threads[i]);
        f.policy.weights.search = QC_SEARCH_MSE;
        assign(&f);
        plan_bytes(&f, &full, &least);
        ck_assert(least < full);
        measure(&f, &gptq, i == 3 ? full - 1 : 0);
        copy_damages(&f.a, i ? got : want);
        if (i)
            ck_assert(memcmp(got, want, sizeof got) == 0);
        close_fixture(&f);
    }
}
END_TEST

START_TEST(memory_cap)
{
    fixture f;
    qc_err err;
    uint64_t full, least;
    open_fixture(&f, "qwen3", 1);
    assign(&f);
    plan_bytes(&f, &full, &least);
    ck_assert_int_eq(measure_with(&f, NULL, least - 1, &err), QC_E_RESOURCE);
    ck_assert(strstr(err.msg, "bit budget"));
    close_fixture(&f);
}
END_TEST

/* Whichever allocation fails: an error, no crash (the sanitizers see leaks and double frees). */
START_TEST(out_of_memory)
{
    fixture f;
    qc_err err;
    const qc_gptq_options gptq = qc_gptq_defaults();
    open_fixture(&f, "qwen3", 1);
    assign(&f);
    qc_alloc_fail_at(0);
    must(measure_with(&f, &gptq, 0, &err), &err);
    long n_all = qc_alloc_fail_at(0);
    for (int i = 0; i < 40; i++) {
        qc_alloc_fail_at(1 + n_all * i / 40);
        int rc = measure_with(&f, &gptq, 0, &err);
        qc_alloc_fail_at(0);
        ck_assert_msg(rc == QC_E_RESOURCE, "allocation %ld of %ld: %d", 1 + n_all * i / 40, n_all, rc);
    }
    close_fixture(&f);
}
END_TEST

START_TEST(broken_model)
{
    fixture f;
    qc_err err;
    open_fixture(&f, "qwen3", 1);
    mem_tensor_of(f.src, "model.layers.1.mlp.up_proj.weight")->values[7] = NAN;
    assign(&f);
    ck_assert_int_eq(measure_with(&f, NULL, 0, &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "model.layers.1.mlp.up_proj.weight"), "%s", err.msg);
    close_fixture(&f);
}
END_TEST

/* ---- bytes and overrides ---- */

/* Bytes of the plan that a policy with the chosen overrides makes. */
static uint64_t bytes_of_overrides(const fixture *f)
{
    qc_err err;
    qc_event_list events = {0};
    qc_convert_plan plan;
    qc_policy policy = f->policy;
    must(qc_assignment_overrides(&f->a, &f->model, &f->policy, &policy.overrides, &policy.n_overrides, &err),
         &err);
    must(qc_convert_plan_make(&f->model, &policy, qc_writer_format_find("qpk"), NULL, &events, &plan, &err),
         &err);
    uint64_t bytes = plan.bytes_out;
    for (int u = 0; u < f->a.n_units; u++) {
        const qc_unit *unit = &f->a.units[u];
        const qc_grid_choice *c = &unit->choices[unit->chosen];
        for (int i = 0; i < unit->n_tensors; i++) {
            const qc_convert_item *item = qc_convert_plan_item(&plan, unit->tensors[i]);
            ck_assert_int_eq(item->action == QC_ACTION_QUANTIZED, c->bits < 16);
            if (c->bits < 16) {
                qc_grid want = qc_unit_spec(unit, &f->model, i, c).grid;
                ck_assert_int_eq(item->spec.grid.bits, want.bits);
                ck_assert_int_eq(item->spec.grid.symmetric, want.symmetric);
                ck_assert_int_eq(item->spec.grid.group_elems, want.group_elems);
            }
        }
    }
    ck_assert_int_eq(events.n_events, 0);
    qc_convert_plan_clear(&plan);
    qc_overrides_free(policy.overrides, policy.n_overrides);
    return bytes;
}

START_TEST(every_budget_of_the_range)
{
    fixture f;
    qc_err err;
    open_fixture(&f, "qwen3-untied", 2);
    assign(&f);
    measure(&f, NULL, 0);
    uint64_t least, most, last = 0;
    qc_assignment_range(&f.a, &least, &most);
    ck_assert(least < most);
    ck_assert_int_eq(qc_assignment_solve(&f.a, least - 1, &err), QC_E_USAGE);
    for (int i = 0; i <= 20; i++) {
        uint64_t budget = least + (most - least) * (uint64_t)i / 20;
        must(qc_assignment_solve(&f.a, budget, &err), &err);
        uint64_t bytes = qc_assignment_bytes(&f.a);
        ck_assert(bytes <= budget && bytes >= last);
        ck_assert_uint_eq(bytes_of_overrides(&f), bytes);
        ck_assert(qc_assignment_damage(&f.a) >= f.a.bound * (1 - 1e-9));
        last = bytes;
    }
    ck_assert_uint_eq(last, most);
    ck_assert_double_eq(qc_assignment_damage(&f.a), 0);
    /* 16 bit throughout: nothing but the matrices counts */
    ck_assert_double_le(fabs(qc_assignment_bits(&f.a, most) - 16), 1e-9);
    ck_assert_uint_eq(qc_assignment_bytes_at(&f.a, 16), most);
    close_fixture(&f);
}
END_TEST

START_TEST(units_of_a_model)
{
    fixture f;
    open_fixture(&f, "qwen3", 1);
    assign(&f);
    int n_layers = (int)f.model.config.n_layers;
    ck_assert_int_eq(f.a.n_units, 1 + 4 * n_layers);
    ck_assert(f.a.units[0].embedding && f.a.units[0].head && f.a.units[0].layer == -1);
    ck_assert_int_eq(f.a.units[1].n_tensors, 3);
    ck_assert_int_eq(f.a.units[2].n_tensors, 1);
    ck_assert_int_eq(f.a.units[3].n_tensors, 2);
    ck_assert(f.a.units[4].stage == QC_STAGE_DOWN && f.a.units[4].layer == 0);
    const qc_unit *down = &f.a.units[4];
    ck_assert(down->choices[down->reference].bits == 4 && down->choices[down->reference].group == 32);
    ck_assert(down->choices[0].bits == 2 && down->choices[0].group == 16);
    ck_assert(down->choices[down->n_choices - 1].bits == 16);
    double weights = 0;
    for (int64_t i = 0; i < f.plan.n_items; i++)
        if (f.plan.items[i].action == QC_ACTION_QUANTIZED)
            weights += (double)qc_tensor_n_elems(f.src->base.info(&f.src->base, f.plan.items[i].tensor));
    ck_assert_double_eq(f.a.n_weights, weights);
    ck_assert_uint_eq(f.a.fixed_matrix_bytes, 0);
    close_fixture(&f);
}
END_TEST

START_TEST(what_a_user_settled_stays)
{
    fixture f;
    qc_override overrides[] = {
        {.match = (char *)"*.layers.0.self_attn.k_proj", .bits = 3, .symmetric = -1},
        {.match = (char *)"*.up_proj", .group = 16, .symmetric = 0},
    };
    char *skip[] = {(char *)"*.layers.1.self_attn.o_proj"};
    open_fixture(&f, "qwen3", 1);
    f.policy.overrides = overrides;
    f.policy.n_overrides = 2;
    f.policy.skip = skip;
    f.policy.n_skip = 1;
    f.policy.quantize_embedding = false;
    assign(&f);
    ck_assert_int_eq(f.a.n_units, 4 * (int)f.model.config.n_layers - 1); /* no table, one o less */
    ck_assert_int_eq(f.a.units[0].n_tensors, 2);                         /* q and v of layer 0 */
    const qc_unit *gate_up = &f.a.units[2];
    ck_assert(gate_up->stage == QC_STAGE_GATE_UP && !gate_up->own_group[0] && gate_up->own_group[1]);
    for (int c = 0; c + 1 < gate_up->n_choices; c++) {
        qc_quant_spec gate = qc_unit_spec(gate_up, &f.model, 0, &gate_up->choices[c]),
                      up = qc_unit_spec(gate_up, &f.model, 1, &gate_up->choices[c]);
        ck_assert(gate.grid.bits == up.grid.bits && gate.grid.symmetric && !up.grid.symmetric);
        ck_assert_int_eq(up.grid.group_elems, 16);
        ck_assert_int_eq(gate.grid.group_elems, gate_up->choices[c].group);
    }
    uint64_t fixed = 0;
    static const char *const names[] = {"model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight",
                                        "model.layers.1.self_attn.o_proj.weight"};
    for (int i = 0; i < 3; i++)
        fixed += qc_convert_plan_item(&f.plan, f.src->base.find(&f.src->base, names[i]))->bytes_out;
    ck_assert_uint_eq(f.a.fixed_matrix_bytes, fixed);
    for (int u = 0; u < f.a.n_units; u++)
        f.a.units[u].chosen = u % f.a.units[u].n_choices;
    ck_assert_uint_eq(bytes_of_overrides(&f), qc_assignment_bytes(&f.a));
    close_fixture(&f);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"damage", damage_is_that_of_the_evaluation},
                               {"damage of GPTQ", damage_of_gptq},
                               {"threads and spilling", same_numbers_for_threads_and_with_spilled_streams},
                               {"memory cap", memory_cap},
                               {"out of memory", out_of_memory},
                               {"broken model", broken_model},
                               {"every budget", every_budget_of_the_range},
                               {"units", units_of_a_model},
                               {"settled", what_a_user_settled_stays},
                               {NULL, NULL}};
    return run_tests("assign", cases);
}
