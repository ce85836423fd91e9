/* Time of a layer with experts against a dense layer that multiplies each token by as many weights, on one
 * window of 2,048 tokens. Prints both and their quotient. CK_RUN_CASE names the one shape to run. */
#include "mem_source.h"
#include "qc_alloc.h"
#include "qc_log.h"
#include "qc_rng.h"
#include "qc_test.h"
#include "qc_time.h"

#include "model.h"

/* The least of REPEATS passes counts; of two where these take ENOUGH_SECONDS. */
enum { TOKENS = 2048, REPEATS = 5, ENOUGH_SECONDS = 10 };

typedef struct bench_shape {
    const char *name;
    int hidden, n_heads, n_kv_heads, n_experts, n_chosen, expert_ffn;
} bench_shape;

static const bench_shape shapes[] = {
    {"30B-A3B", 2048, 32, 4, 128, 8, 768},
    {"Mixtral-8x7B", 4096, 32, 8, 8, 2, 14336},
};

/* Values of a matrix do not matter, but there are a billion of them. */
static void add_matrix(mem_source *m, const char *name, int64_t rows, int64_t cols)
{
    float *values = mem_add(m, name, rows, cols);
    uint32_t state = (uint32_t)m->base.n_tensors;
    for (int64_t i = 0; i < rows * cols; i++) {
        state = state * 1664525 + 1013904223;
        values[i] = (float)(state >> 8) * 0x1p-24f * 0.1f - 0.05f;
    }
}

static void add_mlp(mem_source *m, const char *prefix, int64_t ffn, int64_t hidden)
{
    static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};
    char name[96];
    for (int part = 0; part < 3; part++) {
        snprintf(name, sizeof name, "model.layers.0.mlp.%s%s.weight", prefix, parts[part]);
        add_matrix(m, name, part < 2 ? ffn : hidden, part < 2 ? hidden : ffn);
    }
}

static mem_source *make(const bench_shape *s, bool sparse)
{
    mem_shape shape = {"qwen3", "Qwen3ForCausalLM", s->hidden, 1, s->n_heads, s->n_kv_heads, 128, 1, 64,
                       true};
    mem_source *m = mem_random(&shape, 1);
    char prefix[32], patch[256];
    for (int64_t i = m->base.n_tensors - 1; i >= 0; i--)
        if (strstr(m->tensors[i].info.name, ".mlp."))
            mem_remove(m, m->tensors[i].info.name);
    if (!sparse) {
        add_mlp(m, "", s->n_chosen * s->expert_ffn, s->hidden);
        snprintf(patch, sizeof patch, "{\"intermediate_size\": %d}", s->n_chosen * s->expert_ffn);
        mem_patch(m, patch);
        return m;
    }
    add_matrix(m, "model.layers.0.mlp.gate.weight", s->n_experts, s->hidden);
    for (int e = 0; e < s->n_experts; e++) {
        snprintf(prefix, sizeof prefix, "experts.%d.", e);
        add_mlp(m, prefix, s->expert_ffn, s->hidden);
    }
    snprintf(
        patch, sizeof patch,
        "{\"model_type\": \"qwen3_moe\", \"architectures\": [\"Qwen3MoeForCausalLM\"], \"num_experts\": %d, "
        "\"num_experts_per_tok\": %d, \"moe_intermediate_size\": %d, \"norm_topk_prob\": true}",
        s->n_experts, s->n_chosen, s->expert_ffn);
    mem_patch(m, patch);
    return m;
}

/* Least time of a pass through the layer, for one thread and for two. */
static void measure(const bench_shape *s, bool sparse, double best[2])
{
    mem_source *m = make(s, sparse);
    qc_backend *be;
    qc_model model;
    qc_layer *layer;
    qc_workspace *ws;
    qc_pool *pool;
    qc_err err = {0};
    float *x = qc_alloc(TOKENS * (size_t)s->hidden, sizeof *x);
    qc_rng rng;
    ck_assert_msg(qc_model_open(&m->base, &model, &err) == QC_OK, "%s", err.msg);
    for (int threads = 1; threads <= 2; threads++) {
        ck_assert_int_eq(qc_pool_new(threads, &pool, NULL), QC_OK);
        ck_assert_int_eq(qc_backend_cpu_new(pool, QC_COMPUTE_F32, &be, NULL), QC_OK);
        ck_assert_int_eq(qc_layer_load(&model, be, 0, &layer, NULL), QC_OK);
        ck_assert_int_eq(qc_workspace_new(&model, be, TOKENS, &ws, NULL), QC_OK);
        best[threads - 1] = 1e9;
        double all = 0;
        for (int i = 0; i < 2 || (i < REPEATS && all < ENOUGH_SECONDS); i++) {
            qc_rng_seed(&rng, 3);
            for (int64_t k = 0; k < TOKENS * (int64_t)s->hidden; k++)
                x[k] = (float)(qc_rng_uniform(&rng) - 0.5);
            double start = qc_now_seconds();
            ck_assert_int_eq(qc_layer_forward(layer, ws, x, TOKENS, NULL), QC_OK);
            double seconds = qc_now_seconds() - start;
            all += seconds;
            best[threads - 1] = seconds < best[threads - 1] ? seconds : best[threads - 1];
        }
        qc_layer_free(layer);
        qc_workspace_free(ws);
        qc_backend_close(be);
        qc_pool_free(pool);
    }
    qc_model_close(&model);
    mem_close(m);
    qc_free(x);
}

START_TEST(expert_layer)
{
    const bench_shape *shape = &shapes[_i];
    double dense[2], sparse[2];
    qc_log_set_level(QC_LOG_QUIET);
    measure(shape, false, dense);
    measure(shape, true, sparse);
    for (int k = 0; k < 2; k++)
        printf("%s, %d threads: dense layer %.3f s, with experts %.3f s: %.2f times\n", shape->name, k + 1,
               dense[k], sparse[k], sparse[k] / dense[k]);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("bench_experts");
    for (int i = 0; i < (int)(sizeof shapes / sizeof shapes[0]); i++) {
        TCase *one = tcase_create(shapes[i].name);
        tcase_set_timeout(one, 0);
        tcase_add_loop_test(one, expert_layer, i, i + 1);
        suite_add_tcase(suite, one);
    }
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? 1 : 0;
}
