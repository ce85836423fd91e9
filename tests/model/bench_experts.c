/* Time of a layer with experts against a dense layer that multiplies each token by as many weights: shapes
 * and tokens per expert are those of Qwen3-30B-A3B on windows of 2,048 tokens. Prints both and their
 * quotient. */
#include "mem_source.h"
#include "qc_alloc.h"
#include "qc_log.h"
#include "qc_rng.h"
#include "qc_test.h"
#include "qc_time.h"

#include "model.h"

enum { TOKENS = 2048, EXPERTS = 32, CHOSEN = 2, FFN = 768, REPEATS = 5 };

static const mem_shape shape = {"qwen3", "Qwen3ForCausalLM", 2048, 1, 32, 4, 128, CHOSEN *FFN, 64, true};

static void add_matrix(mem_source *m, qc_rng *rng, const char *name, int64_t rows, int64_t cols)
{
    float *values = mem_add(m, name, rows, cols);
    for (int64_t i = 0; i < rows * cols; i++)
        values[i] = (float)(qc_rng_uniform(rng) - 0.5) * 0.05f;
}

static mem_source *make(bool sparse)
{
    static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};
    mem_source *m = mem_random(&shape, 1);
    qc_rng rng;
    char name[96], patch[256];
    if (!sparse)
        return m;
    qc_rng_seed(&rng, 2);
    for (int part = 0; part < 3; part++) {
        snprintf(name, sizeof name, "mlp.%s.weight", parts[part]);
        mem_remove_all(m, name);
    }
    add_matrix(m, &rng, "model.layers.0.mlp.gate.weight", EXPERTS, shape.hidden);
    for (int e = 0; e < EXPERTS; e++)
        for (int part = 0; part < 3; part++) {
            snprintf(name, sizeof name, "model.layers.0.mlp.experts.%d.%s.weight", e, parts[part]);
            add_matrix(m, &rng, name, part < 2 ? FFN : shape.hidden, part < 2 ? shape.hidden : FFN);
        }
    snprintf(
        patch, sizeof patch,
        "{\"model_type\": \"qwen3_moe\", \"architectures\": [\"Qwen3MoeForCausalLM\"], \"num_experts\": %d, "
        "\"num_experts_per_tok\": %d, \"moe_intermediate_size\": %d, \"norm_topk_prob\": true}",
        EXPERTS, CHOSEN, FFN);
    mem_patch(m, patch);
    return m;
}

/* Least time of a pass through the layer. */
static double measure(bool sparse, qc_pool *pool)
{
    mem_source *m = make(sparse);
    qc_backend *be;
    qc_model model;
    qc_layer *layer;
    qc_workspace *ws;
    qc_err err = {0};
    double best = 1e9;
    float *x = qc_alloc(TOKENS * (size_t)shape.hidden, sizeof *x);
    qc_rng rng;
    ck_assert_int_eq(qc_backend_cpu_new(pool, QC_COMPUTE_F32, &be, NULL), QC_OK);
    ck_assert_msg(qc_model_open(&m->base, &model, &err) == QC_OK, "%s", err.msg);
    ck_assert_int_eq(qc_layer_load(&model, be, 0, &layer, NULL), QC_OK);
    ck_assert_int_eq(qc_workspace_new(&model, be, TOKENS, &ws, NULL), QC_OK);
    for (int i = 0; i < REPEATS; i++) {
        qc_rng_seed(&rng, 3);
        for (int64_t k = 0; k < TOKENS * (int64_t)shape.hidden; k++)
            x[k] = (float)(qc_rng_uniform(&rng) - 0.5);
        double start = qc_now_seconds();
        ck_assert_int_eq(qc_layer_forward(layer, ws, x, TOKENS, NULL), QC_OK);
        double seconds = qc_now_seconds() - start;
        best = seconds < best ? seconds : best;
    }
    qc_layer_free(layer);
    qc_workspace_free(ws);
    qc_model_close(&model);
    qc_backend_close(be);
    mem_close(m);
    qc_free(x);
    return best;
}

START_TEST(expert_layer)
{
    static const int threads[] = {1, 2};
    qc_log_set_level(QC_LOG_QUIET);
    for (int i = 0; i < 2; i++) {
        qc_pool *pool;
        ck_assert_int_eq(qc_pool_new(threads[i], &pool, NULL), QC_OK);
        double dense = measure(false, pool), sparse = measure(true, pool);
        printf("%d threads: dense layer %.3f s, with experts %.3f s: %.2f times\n", threads[i], dense, sparse,
               sparse / dense);
        qc_pool_free(pool);
    }
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"expert_layer", expert_layer}, {NULL, NULL}};
    return run_tests("bench_experts", cases);
}
