/* Statistics of experts: whose tokens they are taken from, and with what weight a sample of all tokens stands
 * in for those that are missing. Sums of squares of outputs, sum_t |W u_t|^2, are what a layer's record keeps
 * of H (tr W H W^T), so they are compared with the plain formula in float64. */
#include "layer_record.h"
#include "mem_source.h"
#include "pipeline.h"
#include "qc_alloc.h"
#include "qc_log.h"
#include "qc_rng.h"
#include "qc_test.h"

#include <math.h>
#include <unistd.h>

enum { LENGTH = 128, HIDDEN = 64, EXPERTS = 4, MAX_FFN = 128 };

/* Of a sum of squares of float32 dot products against float64, relative: the rounding of a dot product is a
 * few u = 6e-8 of its terms' size, twice that in its square, and cancellation within the product makes the
 * terms some times larger than the result. */
#define TOL_SQUARES 3e-6

typedef struct fixture {
    mem_source *src;
    qc_pool *pool;
    qc_backend *be;
    qc_model model;
    qc_convert_plan plan;
    qc_corpus corpus;
    int64_t n_tokens, ffn;
    double (*u)[HIDDEN];    /* [n_tokens] what the experts read */
    int *expert;            /* [n_tokens] where the router sends a token */
    int64_t n_own[EXPERTS]; /* its tokens */
} fixture;

static void check(int rc, const qc_err *err)
{
    ck_assert_msg(rc == QC_OK, "%s", err->msg);
}

static const float *values(const fixture *f, qc_slot slot, int64_t expert)
{
    return f->src->tensors[qc_model_expert_tensor(&f->model, 0, slot, expert)].values;
}

static double dot(const float *w, const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)w[i] * x[i];
    return sum;
}

/* Expert 3 wins only where the other three are about equal, so it gets few tokens; or none. */
static void starve(mem_source *m, float own_share)
{
    float *w = mem_tensor_of(m, "model.layers.0.block_sparse_moe.gate.weight")->values;
    for (int i = 0; i < HIDDEN; i++) {
        float mean = (w[i] + w[HIDDEN + i] + w[2 * HIDDEN + i]) / 3;
        w[3 * HIDDEN + i] = mean + own_share * w[3 * HIDDEN + i];
    }
}

/* Stream behind the attention of the first layer, one window. */
static void attend(fixture *f, const qc_layer *layer, qc_workspace *ws, const int32_t *ids, float *x)
{
    float *u = qc_alloc((size_t)(LENGTH * qc_stage_width(&f->model.config, QC_STAGE_O)), sizeof *u);
    ck_assert_int_eq(qc_model_embed(&f->model, ids, LENGTH, x, NULL), QC_OK);
    ck_assert_int_eq(qc_layer_stage_input(layer, ws, QC_STAGE_O, x, u, LENGTH, NULL), QC_OK);
    ck_assert_int_eq(qc_layer_stage_output(layer, ws, QC_STAGE_O, u, x, LENGTH, NULL), QC_OK);
    qc_free(u);
}

/* Norm and router of one token. */
static void place_token(fixture *f, const float *x, int64_t token)
{
    const float *gain = values(f, QC_SLOT_MLP_NORM, 0), *router = values(f, QC_SLOT_ROUTER, 0);
    double squares = 0, *u = f->u[token], best = -INFINITY;
    for (int i = 0; i < HIDDEN; i++)
        squares += (double)x[i] * (double)x[i];
    for (int i = 0; i < HIDDEN; i++)
        u[i] = (double)x[i] / sqrt(squares / HIDDEN + (double)f->model.config.rms_eps) * (double)gain[i];
    for (int e = 0; e < EXPERTS; e++) {
        double logit = dot(router + e * HIDDEN, u, HIDDEN);
        f->expert[token] = logit > best ? e : f->expert[token];
        best = logit > best ? logit : best;
    }
    f->n_own[f->expert[token]]++;
}

static void place_tokens(fixture *f)
{
    static float x[LENGTH * HIDDEN];
    qc_layer *layer;
    qc_workspace *ws;
    ck_assert_int_eq(qc_layer_load(&f->model, f->be, 0, &layer, NULL), QC_OK);
    ck_assert_int_eq(qc_workspace_new(&f->model, f->be, LENGTH, &ws, NULL), QC_OK);
    for (int64_t w = 0; w < f->corpus.n_windows; w++) {
        attend(f, layer, ws, f->corpus.ids + w * LENGTH, x);
        for (int64_t t = 0; t < LENGTH; t++)
            place_token(f, x + t * HIDDEN, w * LENGTH + t);
    }
    qc_layer_free(layer);
    qc_workspace_free(ws);
}

/* Only the matrices that match `rounded` of the first layer's experts are: all that comes before them is the
 * 16-bit model. */
static void setup(fixture *f, int64_t n_windows, float own_share, const char *rounded)
{
    static char skips[][24] = {"*self_attn*", "*.w1", "*.w2", "*.w3"};
    char *list[4];
    qc_err err = {0};
    qc_rng rng;
    qc_event_list events = {0};
    qc_policy policy = qc_policy_defaults();
    *f = (fixture){.src = mem_tiny("mixtral"), .n_tokens = n_windows * LENGTH};
    mem_patch(f->src, "{\"num_experts_per_tok\": 1}");
    starve(f->src, own_share);
    policy.weights.grid.group_elems = 16;
    policy.quantize_embedding = false;
    policy.skip = list;
    for (int i = 0; i < 4; i++)
        if (strcmp(skips[i], rounded) != 0)
            list[policy.n_skip++] = skips[i];
    check(qc_pool_new(2, &f->pool, &err), &err);
    check(qc_backend_cpu_new(f->pool, QC_COMPUTE_F32, &f->be, &err), &err);
    check(qc_model_open(&f->src->base, &f->model, &err), &err);
    check(
        qc_convert_plan_make(&f->model, &policy, qc_writer_format_find("qpk"), NULL, &events, &f->plan, &err),
        &err);
    f->ffn = f->model.config.expert_ffn;
    ck_assert(f->model.config.hidden == HIDDEN && f->model.config.n_experts == EXPERTS && f->ffn <= MAX_FFN);
    f->corpus = (qc_corpus){.n_windows = n_windows, .length = LENGTH};
    f->corpus.ids = qc_alloc((size_t)f->n_tokens, sizeof *f->corpus.ids);
    f->u = malloc((size_t)f->n_tokens * sizeof *f->u);
    f->expert = calloc((size_t)f->n_tokens, sizeof *f->expert);
    qc_rng_seed(&rng, 3);
    for (int64_t i = 0; i < f->n_tokens; i++)
        f->corpus.ids[i] = (int32_t)qc_rng_below(&rng, (uint64_t)f->model.config.vocab);
    place_tokens(f);
}

static void teardown(fixture *f)
{
    free(f->u);
    free(f->expert);
    qc_free(f->corpus.ids);
    qc_convert_plan_clear(&f->plan);
    qc_model_close(&f->model);
    qc_backend_close(f->be);
    qc_pool_free(f->pool);
    mem_close(f->src);
}

/* ---- the formula ---- */

/* |W u|^2 of one token: of the gate matrix, or of the down matrix behind this expert's gate and up. */
static double squares_of(const fixture *f, qc_slot slot, int64_t expert, int64_t token)
{
    const double *u = f->u[token];
    double h[MAX_FFN], sum = 0;
    const float *gate = values(f, QC_SLOT_EXPERT_GATE, expert), *up = values(f, QC_SLOT_EXPERT_UP, expert),
                *down = values(f, QC_SLOT_EXPERT_DOWN, expert);
    for (int64_t i = 0; i < f->ffn; i++) {
        double g = dot(gate + i * HIDDEN, u, HIDDEN);
        h[i] = g / (1 + exp(-g)) * dot(up + i * HIDDEN, u, HIDDEN);
        sum += slot == QC_SLOT_EXPERT_GATE ? g * g : 0;
    }
    for (int64_t i = 0; i < HIDDEN && slot == QC_SLOT_EXPERT_DOWN; i++) {
        double y = dot(down + i * f->ffn, h, f->ffn);
        sum += y * y;
    }
    return sum;
}

/* docs/methods/calibration.md, Experts: own tokens, and (K - n) / S of what S evenly spaced tokens give if
 * the n own ones are fewer than the K inputs of the matrix. */
static double expected(const fixture *f, qc_slot slot, int64_t expert, bool all)
{
    int64_t inputs = slot == QC_SLOT_EXPERT_DOWN ? f->ffn : HIDDEN;
    int64_t n_sample = f->n_tokens < 4096 ? f->n_tokens : 4096;
    int64_t wanted = inputs < f->n_tokens ? inputs : f->n_tokens;
    double own = 0, sample = 0;
    for (int64_t t = 0; t < f->n_tokens; t++)
        own += all || f->expert[t] == expert ? squares_of(f, slot, expert, t) : 0;
    if (all || f->n_own[expert] >= wanted)
        return own;
    for (int64_t i = 0; i < n_sample; i++)
        sample += squares_of(f, slot, expert, i * f->n_tokens / n_sample);
    return own + (double)(wanted - f->n_own[expert]) / (double)n_sample * sample;
}

static void expect_sums(fixture *f, qc_slot slot, bool gptq, bool all)
{
    char path[64], *text = NULL;
    qc_err err = {0};
    qc_journal *journal = NULL;
    qc_layer_record record = {0};
    static const qc_journal_key key = {"tool", "test"};
    qc_pipeline_options options = {.gptq = gptq,
                                   .gptq_options = qc_gptq_defaults(),
                                   .fold = qc_fold_defaults(QC_FOLD_NONE),
                                   .all_experts = all};
    snprintf(path, sizeof path, "/tmp/qc-experts-%ld", (long)getpid());
    check(qc_journal_open(path, &key, 1, false, true, &journal, &err), &err);
    check(qc_pipeline_run(&f->plan, &f->model, f->be, &f->corpus, &options, journal, &err), &err);
    check(qc_journal_read_text(journal, "layer.0", &text, &err), &err);
    check(qc_layer_record_parse(text, &record, &err), &err);
    ck_assert_int_eq(record.n_matrices, EXPERTS);
    for (int e = 0; e < EXPERTS; e++) {
        const qc_matrix_record *m = &record.matrices[e];
        double want = expected(f, slot, e, all);
        ck_assert_str_eq(
            m->name, f->model.src->info(f->model.src, qc_model_expert_tensor(&f->model, 0, slot, e))->name);
        ck_assert_int_eq(m->tokens, all ? f->n_tokens : f->n_own[e]);
        ck_assert_msg(fabs(m->norm - want) <= TOL_SQUARES * want, "%s with %lld tokens: %.9g, expected %.9g",
                      m->name, (long long)f->n_own[e], m->norm, want);
    }
    qc_layer_record_clear(&record);
    qc_free(text);
    qc_journal_remove(journal);
}

static void run(int64_t n_windows, float own_share, const char *rounded, qc_slot slot)
{
    fixture f;
    setup(&f, n_windows, own_share, rounded);
    bool none = own_share == 0;
    ck_assert_msg(none ? f.n_own[3] == 0 : f.n_own[3] > 0 && f.n_own[3] < HIDDEN, "expert 3 has %lld tokens",
                  (long long)f.n_own[3]);
    for (int gptq = 0; gptq < 2; gptq++)
        expect_sums(&f, slot, gptq, false);
    expect_sums(&f, slot, false, true);
    teardown(&f);
}

/* The sample is all tokens of a short text. */
START_TEST(short_text)
{
    run(3, 0.5f, "*.w1", QC_SLOT_EXPERT_GATE);
    run(3, 0.5f, "*.w2", QC_SLOT_EXPERT_DOWN);
}
END_TEST

/* 4096 of 4608 tokens. */
START_TEST(sample_of_a_long_text)
{
    run(36, 0.1f, "*.w1", QC_SLOT_EXPERT_GATE);
    run(36, 0.1f, "*.w2", QC_SLOT_EXPERT_DOWN);
}
END_TEST

START_TEST(no_tokens)
{
    run(3, 0, "*.w1", QC_SLOT_EXPERT_GATE);
    run(3, 0, "*.w2", QC_SLOT_EXPERT_DOWN);
}
END_TEST

int main(void)
{
    qc_log_set_level(QC_LOG_QUIET);
    const test_case cases[] = {{"short_text", short_text},
                               {"sample_of_a_long_text", sample_of_a_long_text},
                               {"no_tokens", no_tokens},
                               {NULL, NULL}};
    return run_tests("experts", cases);
}
