/* Layers with experts: against a plain float64 computation, expert by expert, on several threads; the account
 * of their tensors. */
#include "mem_source.h"
#include "qc_alloc.h"
#include "qc_log.h"
#include "qc_rng.h"
#include "qc_test.h"
#include "tol.h"

#include "model.h"

#include <math.h>

/* More than two chunks of the projections in an expert. */
enum { TOKENS = 1300 };

typedef struct fixture {
    mem_source *m;
    qc_pool *pool;
    qc_backend *be;
    qc_model model;
    qc_layer *layer;
    qc_workspace *ws;
    int index;
    int64_t hidden;
    float *x; /* [TOKENS, hidden] embeddings of random ids */
} fixture;

static void setup(fixture *f, const char *name, int layer, int n_threads)
{
    *f = (fixture){.m = mem_tiny(name), .index = layer};
    qc_err err = {0};
    qc_rng rng;
    static int32_t ids[TOKENS];
    qc_log_set_level(QC_LOG_QUIET);
    ck_assert_int_eq(qc_pool_new(n_threads, &f->pool, NULL), QC_OK);
    ck_assert_int_eq(qc_backend_cpu_new(f->pool, QC_COMPUTE_F32, &f->be, NULL), QC_OK);
    ck_assert_msg(qc_model_open(&f->m->base, &f->model, &err) == QC_OK, "%s", err.msg);
    ck_assert_int_eq(qc_layer_load(&f->model, f->be, layer, &f->layer, NULL), QC_OK);
    ck_assert_int_eq(qc_workspace_new(&f->model, f->be, TOKENS, &f->ws, NULL), QC_OK);
    f->hidden = f->model.config.hidden;
    qc_rng_seed(&rng, 11);
    for (int i = 0; i < TOKENS; i++)
        ids[i] = (int32_t)qc_rng_below(&rng, (uint64_t)f->model.config.vocab);
    f->x = qc_alloc((size_t)(TOKENS * f->hidden), sizeof *f->x);
    ck_assert_int_eq(qc_model_embed(&f->model, ids, TOKENS, f->x, NULL), QC_OK);
}

static void teardown(fixture *f)
{
    qc_free(f->x);
    qc_workspace_free(f->ws);
    qc_layer_free(f->layer);
    qc_model_close(&f->model);
    qc_backend_close(f->be);
    qc_pool_free(f->pool);
    mem_close(f->m);
}

/* The attention half of the layer. */
static void attend(fixture *f, float *x)
{
    int64_t width = qc_stage_width(&f->model.config, QC_STAGE_O);
    float *u = qc_alloc((size_t)(TOKENS * width), sizeof *u);
    ck_assert_int_eq(qc_layer_stage_input(f->layer, f->ws, QC_STAGE_O, x, u, TOKENS, NULL), QC_OK);
    ck_assert_int_eq(qc_layer_stage_output(f->layer, f->ws, QC_STAGE_O, u, x, TOKENS, NULL), QC_OK);
    qc_free(u);
}

/* ---- float64 ---- */

static const float *values(const fixture *f, qc_slot slot, int64_t expert)
{
    return f->m->tensors[qc_model_expert_tensor(&f->model, f->index, slot, expert)].values;
}

static double dot(const float *w, const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)w[i] * x[i];
    return sum;
}

static void plain_expert(const fixture *f, int64_t expert, double weight, const double *u, double *y)
{
    int64_t ffn = f->model.config.expert_ffn, hidden = f->hidden;
    const float *gate = values(f, QC_SLOT_EXPERT_GATE, expert), *up = values(f, QC_SLOT_EXPERT_UP, expert),
                *down = values(f, QC_SLOT_EXPERT_DOWN, expert);
    double *h = malloc((size_t)ffn * sizeof *h);
    for (int64_t i = 0; i < ffn; i++) {
        double g = dot(gate + i * hidden, u, hidden);
        h[i] = g / (1 + exp(-g)) * dot(up + i * hidden, u, hidden);
    }
    for (int64_t i = 0; i < hidden; i++)
        y[i] += weight * dot(down + i * ffn, h, ffn);
    free(h);
}

/* y = x + experts of one token. */
static void plain_token(const fixture *f, const float *x, double *y)
{
    const qc_model_config *c = &f->model.config;
    const float *gain = values(f, QC_SLOT_MLP_NORM, 0), *router = values(f, QC_SLOT_ROUTER, 0);
    double squares = 0, sum = 0, chosen = 0, u[64], p[8];
    bool taken[8] = {false};
    for (int64_t i = 0; i < c->hidden; i++)
        squares += (double)x[i] * (double)x[i];
    for (int64_t i = 0; i < c->hidden; i++)
        u[i] = (double)x[i] / sqrt(squares / (double)c->hidden + (double)c->rms_eps) * (double)gain[i];
    for (int64_t e = 0; e < c->n_experts; e++)
        sum += p[e] = exp(dot(router + e * c->hidden, u, c->hidden));
    for (int64_t k = 0; k < c->n_chosen; k++) {
        int64_t best = -1;
        for (int64_t e = 0; e < c->n_experts; e++)
            if (!taken[e] && (best < 0 || p[e] > p[best]))
                best = e;
        taken[best] = true;
        chosen += p[best];
    }
    for (int64_t i = 0; i < c->hidden; i++)
        y[i] = (double)x[i];
    for (int64_t e = 0; e < c->n_experts; e++)
        if (taken[e])
            plain_expert(f, e, p[e] / (c->renormalise ? chosen : sum), u, y);
}

static void expect_plain(const char *name, int layer)
{
    fixture f;
    setup(&f, name, layer, 1);
    double y[64], worst = 0;
    float *x = qc_alloc((size_t)(TOKENS * f.hidden), sizeof *x);
    memcpy(x, f.x, (size_t)(TOKENS * f.hidden) * sizeof *x);
    ck_assert(f.hidden == 64 && f.model.config.n_experts <= 8 && f.model.config.layer_sparse[layer]);
    attend(&f, x);
    ck_assert_int_eq(qc_layer_forward(f.layer, f.ws, f.x, TOKENS, NULL), QC_OK);
    for (int64_t t = 0; t < TOKENS; t++) {
        plain_token(&f, x + t * f.hidden, y);
        for (int64_t i = 0; i < f.hidden; i++) {
            double off = fabs((double)f.x[t * f.hidden + i] - y[i]);
            if (!(off <= worst)) /* no fmax: gcc 12 for aarch64 fails on its reduction */
                worst = off;
        }
    }
    ck_assert_msg(worst <= TOL_LOGITS, "%s: differs by %g", name, worst);
    qc_free(x);
    teardown(&f);
}

START_TEST(plain_formula)
{
    expect_plain("mixtral", 1);
    expect_plain("qwen3_moe", 5);
}
END_TEST

/* ---- expert by expert ---- */

/* The experts' half of the layer as calibration runs it: rows gathered, one expert after the other. */
static void one_by_one(fixture *f, float *x)
{
    const qc_model_config *c = &f->model.config;
    qc_routing r;
    float *u = qc_alloc((size_t)(TOKENS * c->hidden), sizeof *u),
          *in = qc_alloc((size_t)(TOKENS * c->hidden), sizeof *in),
          *h = qc_alloc((size_t)(TOKENS * c->expert_ffn), sizeof *h);
    ck_assert_int_eq(qc_routing_new(c, TOKENS, &r, NULL), QC_OK);
    ck_assert_int_eq(qc_layer_route(f->layer, f->ws, x, TOKENS, r.experts, r.weights, NULL), QC_OK);
    ck_assert_int_eq(qc_layer_stage_input(f->layer, f->ws, QC_STAGE_EXPERT_GATE_UP, x, u, TOKENS, NULL),
                     QC_OK);
    qc_routing_by_expert(c, &r, TOKENS);
    ck_assert_int_eq(r.first[c->n_experts], TOKENS * c->n_chosen);
    for (int64_t e = 0; e < c->n_experts; e++) {
        int64_t n_rows = r.first[e + 1] - r.first[e];
        for (int64_t i = r.first[e] + 1; i < r.first[e + 1]; i++)
            ck_assert_int_lt(r.tokens[i - 1], r.tokens[i]);
        for (int64_t i = 0; i < n_rows; i++)
            memcpy(in + i * c->hidden, u + r.tokens[r.first[e] + i] * c->hidden,
                   (size_t)c->hidden * sizeof *in);
        ck_assert_int_eq(qc_layer_expert_down_input(f->layer, f->ws, e, in, h, n_rows, NULL), QC_OK);
        ck_assert_int_eq(qc_layer_expert_output(f->layer, f->ws, e, h, r.tokens + r.first[e],
                                                r.token_weights + r.first[e], n_rows, x, NULL),
                         QC_OK);
    }
    qc_routing_clear(&r);
    void *all[] = {u, in, h};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        qc_free(all[i]);
}

static void expect_same_halves(const char *name, int layer, int act_bits)
{
    fixture f;
    setup(&f, name, layer, 2);
    size_t n_bytes = (size_t)(TOKENS * f.hidden) * sizeof(float);
    float *x = qc_alloc(1, n_bytes), *before = qc_alloc(1, n_bytes);
    memcpy(x, f.x, n_bytes);
    qc_layer_set_acts(f.layer, QC_STAGE_EXPERT_GATE_UP, act_bits, 0);
    qc_layer_set_acts(f.layer, QC_STAGE_EXPERT_DOWN, act_bits, 16);
    ck_assert_int_eq(qc_layer_forward(f.layer, f.ws, f.x, TOKENS, NULL), QC_OK);
    attend(&f, x);
    memcpy(before, x, n_bytes);
    one_by_one(&f, x);
    ck_assert_mem_eq(x, f.x, n_bytes);
    if (act_bits) { /* which makes a difference */
        qc_layer_set_acts(f.layer, QC_STAGE_EXPERT_DOWN, 0, 0);
        one_by_one(&f, before);
        ck_assert_mem_ne(x, before, n_bytes);
    }
    qc_free(x);
    qc_free(before);
    teardown(&f);
}

START_TEST(expert_by_expert)
{
    expect_same_halves("mixtral", 2, 0);
    expect_same_halves("qwen3_moe", 1, 0);
    expect_same_halves("qwen3_moe", 1, 8);
}
END_TEST

START_TEST(same_bits_for_any_thread_count)
{
    static const int sizes[] = {1, 2, 7};
    float *first = NULL;
    for (int i = 0; i < 3; i++) {
        fixture f;
        setup(&f, "qwen3_moe", 5, sizes[i]);
        size_t n_bytes = (size_t)(TOKENS * f.hidden) * sizeof(float);
        ck_assert_int_eq(qc_layer_forward(f.layer, f.ws, f.x, TOKENS, NULL), QC_OK);
        if (i == 0) {
            first = qc_alloc(1, n_bytes);
            memcpy(first, f.x, n_bytes);
        }
        ck_assert_mem_eq(first, f.x, n_bytes);
        teardown(&f);
    }
    qc_free(first);
}
END_TEST

/* ---- the account ---- */

static void expect_open(mem_source *m, int rc, const char *expected)
{
    qc_model model;
    qc_err err = {0};
    qc_log_set_level(QC_LOG_QUIET);
    int got = qc_model_open(&m->base, &model, &err);
    ck_assert_msg(got == rc, "code %d, expected %d: %s", got, rc, err.msg);
    ck_assert_msg(got == QC_OK || strstr(err.msg, expected) != NULL, "\"%s\" lacks \"%s\"", err.msg,
                  expected);
    if (got == QC_OK)
        qc_model_close(&model);
    mem_close(m);
}

static void expect_patched(const char *name, const char *patch, int rc, const char *expected)
{
    mem_source *m = mem_tiny(name);
    mem_patch(m, patch);
    expect_open(m, rc, expected);
}

START_TEST(places)
{
    mem_source *m = mem_tiny("qwen3_moe");
    qc_model model;
    ck_assert_int_eq(qc_model_open(&m->base, &model, NULL), QC_OK);
    int64_t t = m->base.find(&m->base, "model.layers.5.mlp.experts.7.up_proj.weight");
    ck_assert(t >= 0 && qc_model_expert_tensor(&model, 5, QC_SLOT_EXPERT_UP, 7) == t);
    ck_assert(model.places[t].role == QC_ROLE_LINEAR && model.places[t].layer == 5 &&
              model.places[t].expert == 7);
    t = m->base.find(&m->base, "model.layers.1.mlp.gate.weight");
    ck_assert(t >= 0 && qc_model_tensor(&model, 1, QC_SLOT_ROUTER) == t);
    ck_assert(model.places[t].role == QC_ROLE_ROUTER && model.places[t].expert == -1);
    for (int layer = 0; layer < 6; layer++) {
        bool sparse = layer == 1 || layer == 5;
        ck_assert(qc_stage_present(&model.config, layer, QC_STAGE_DOWN) == !sparse);
        ck_assert(qc_stage_present(&model.config, layer, QC_STAGE_EXPERT_DOWN) == sparse);
        ck_assert((qc_model_tensor(&model, layer, QC_SLOT_GATE) < 0) == sparse);
        ck_assert((qc_model_tensor(&model, layer, QC_SLOT_EXPERT_GATE) < 0) == !sparse);
    }
    ck_assert_int_eq(qc_stage_experts(&model.config, QC_STAGE_EXPERT_GATE_UP), 8);
    /* norms, q and o, k and v, router, experts: more than a dense layer */
    ck_assert_uint_eq(qc_layer_bytes(&model.config, QC_COMPUTE_F32),
                      4 * (2 * 64 + 2 * 24 + 2 * 64 * 96 + 2 * 64 * 48 + 8 * 64 + 8 * 3 * 64 * 32));
    qc_model_close(&model);
    mem_close(m);
}
END_TEST

START_TEST(counts_that_disagree)
{
    expect_patched("qwen3_moe", "{\"num_experts\": 9}", QC_E_INPUT,
                   "\"model.layers.1.mlp.gate.weight\" has shape [8, 64], expected [9, 64]");
    mem_source *m = mem_tiny("qwen3_moe"); /* a router of that size alone does not help */
    mem_patch(m, "{\"num_experts\": 9}");
    mem_remove_all(m, "mlp.gate.weight");
    mem_add(m, "model.layers.1.mlp.gate.weight", 9, 64);
    mem_add(m, "model.layers.5.mlp.gate.weight", 9, 64);
    expect_open(m, QC_E_INPUT,
                "\"model.layers.1.mlp.experts.8.gate_proj.weight\" and 5 more tensors are missing, but "
                "num_experts in config.json is 9");
    m = mem_tiny("mixtral"); /* fewer than there are */
    mem_patch(m, "{\"num_local_experts\": 3}");
    mem_remove_all(m, "block_sparse_moe.gate.weight");
    for (int i = 0; i < 3; i++) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.gate.weight", i);
        mem_add(m, name, 3, 64);
    }
    expect_open(m, QC_E_INPUT, "block_sparse_moe.experts.3.w");
    m = mem_tiny("mixtral");
    mem_remove(m, "model.layers.2.block_sparse_moe.experts.1.w2.weight");
    expect_open(m, QC_E_INPUT, "\"model.layers.2.block_sparse_moe.experts.1.w2.weight\" is missing");
    expect_patched("qwen3_moe", "{\"num_experts\": 60000}", QC_E_INPUT,
                   "num_experts is 60000, which asks for 360000 tensors of experts");
    expect_patched("qwen3_moe", "{\"num_experts\": 70000}", QC_E_INPUT, "num_experts");
    expect_patched("qwen3_moe", "{\"moe_intermediate_size\": 33}", QC_E_INPUT,
                   "experts.0.gate_proj.weight\" has shape [32, 64], expected [33, 64]");
}
END_TEST

START_TEST(settings)
{
    expect_patched("qwen3_moe", "{\"num_experts_per_tok\": 9}", QC_E_INPUT,
                   "\"num_experts_per_tok\" is 9, expected 1 to 8");
    expect_patched("qwen3_moe", "{\"num_experts_per_tok\": 0}", QC_E_INPUT, "num_experts_per_tok");
    expect_patched("qwen3_moe", "{\"mlp_only_layers\": [6]}", QC_E_INPUT,
                   "\"mlp_only_layers\" names a layer");
    expect_patched("qwen3_moe", "{\"mlp_only_layers\": 3}", QC_E_INPUT, "\"mlp_only_layers\" is not a list");
    expect_patched("qwen3_moe", "{\"mlp_only_layers\": []}", QC_E_INPUT, "layers.3.mlp.gate.weight");
    expect_patched("qwen3_moe", "{\"decoder_sparse_step\": 0}", QC_E_INPUT, "decoder_sparse_step");
    expect_patched("qwen3_moe", "{\"norm_topk_prob\": 1}", QC_E_INPUT, "norm_topk_prob");
    expect_patched("qwen3_moe", "{\"num_experts\": 0}", QC_E_INPUT, "layers.1.mlp.gate_proj.weight");
    expect_patched("qwen3_moe", "{\"n_shared_experts\": 1}", QC_E_UNSUPPORTED, "n_shared_experts");
    expect_patched("qwen3_moe", "{\"num_local_experts\": 8}", QC_OK, "");
    expect_patched("qwen3_moe", "{\"num_local_experts\": 8, \"num_experts\": \"ABSENT\"}", QC_OK, "");
    expect_patched("qwen3_moe", "{\"num_local_experts\": 4}", QC_E_INPUT,
                   "num_experts is 8, but num_local_experts is 4");
    expect_patched("qwen3_moe", "{\"num_experts\": \"ABSENT\"}", QC_E_INPUT,
                   "num_experts is 128, which asks for");
    expect_patched("mixtral", "{\"norm_topk_prob\": true}", QC_E_UNSUPPORTED, "norm_topk_prob");
    expect_patched("mixtral", "{\"router_jitter_noise\": 0.01}", QC_OK, "");
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"plain_formula", plain_formula},
        {"expert_by_expert", expert_by_expert},
        {"threads", same_bits_for_any_thread_count},
        {"places", places},
        {"counts_that_disagree", counts_that_disagree},
        {"settings", settings},
        {NULL, NULL},
    };
    return run_tests("experts", cases);
}
