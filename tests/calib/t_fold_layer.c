/* Channel scaling of whole layers: the 16-bit model stays as it is in every family, statistics see the scaled
 * inputs, and what can not be scaled exactly is left alone. */
#include "fold_layer.h"
#include "family.h"
#include "layer_record.h"
#include "mem_source.h"
#include "pipeline.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_rng.h"
#include "qc_test.h"
#include "tol.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WINDOWS = 2, LENGTH = 48, TOKENS = WINDOWS * LENGTH };

/* Values that went through scales and back, as a factor of the largest: a few roundings of each product, and
 * those of the sums. */
#define TOL_FOLD 2e-5

typedef struct fixture {
    mem_source *src;
    qc_backend *be;
    qc_model model;
    qc_convert_plan plan;
    qc_workspace *ws;
    qc_layer *layer;
    float *x, *u; /* [TOKENS, hidden], [LENGTH, widest] */
    int32_t ids[TOKENS];
    int64_t hidden, widest;
} fixture;

static qc_policy policy_of(int bits, int act_bits)
{
    qc_policy policy = qc_policy_defaults();
    policy.weights.grid.bits = bits;
    policy.weights.grid.group_elems = 32;
    policy.quantize_embedding = false;
    policy.act_bits = act_bits;
    return policy;
}

static void check(int rc, const qc_err *err)
{
    ck_assert_msg(rc == QC_OK, "%s", err->msg);
}

static void embed(const fixture *f, float *x)
{
    ck_assert_int_eq(qc_model_embed(&f->model, f->ids, TOKENS, x, NULL), QC_OK);
    for (int64_t i = 0; i < TOKENS * f->hidden; i++) /* channels of unlike size, as in models of use */
        x[i] *= i % f->hidden % 7 == 3 ? 12.0f : 1;
}

/* Takes src. */
static void setup(fixture *f, mem_source *src, const qc_policy *policy, int layer)
{
    qc_err err = {0};
    qc_rng rng;
    qc_event_list events = {0};
    qc_rng_seed(&rng, 5);
    *f = (fixture){.src = src};
    check(qc_backend_cpu_new(NULL, QC_COMPUTE_F32, &f->be, &err), &err);
    check(qc_model_open(&src->base, &f->model, &err), &err);
    check(
        qc_convert_plan_make(&f->model, policy, qc_writer_format_find("qpk"), NULL, &events, &f->plan, &err),
        &err);
    check(qc_workspace_new(&f->model, f->be, LENGTH, &f->ws, &err), &err);
    check(qc_layer_load(&f->model, f->be, layer, &f->layer, &err), &err);
    f->hidden = f->model.config.hidden;
    for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++) {
        int64_t width = qc_stage_width(&f->model.config, (qc_stage)stage);
        f->widest = width > f->widest ? width : f->widest;
    }
    f->x = qc_alloc((size_t)(TOKENS * f->hidden), sizeof(float));
    f->u = qc_alloc((size_t)(LENGTH * f->widest), sizeof(float));
    for (int i = 0; i < TOKENS; i++)
        f->ids[i] = (int32_t)qc_rng_below(&rng, (uint64_t)f->model.config.vocab);
    qc_event_list_clear(&events);
}

static void teardown(fixture *f)
{
    qc_free(f->x);
    qc_free(f->u);
    qc_layer_free(f->layer);
    qc_workspace_free(f->ws);
    qc_convert_plan_clear(&f->plan);
    qc_model_close(&f->model);
    qc_backend_close(f->be);
    mem_close(f->src);
}

static qc_layer_fold choose(fixture *f, const qc_fold_options *options, int layer)
{
    qc_err err = {0};
    qc_layer_fold fold;
    qc_fold_layer_job job = {.plan = &f->plan,
                             .model = &f->model,
                             .be = f->be,
                             .options = options,
                             .sites = {true, true, true, true},
                             .index = layer,
                             .layer = f->layer,
                             .ws = f->ws,
                             .x = f->x,
                             .u = f->u,
                             .n_windows = WINDOWS,
                             .length = LENGTH};
    embed(f, f->x);
    check(qc_layer_fold_choose(&job, &fold, &err), &err);
    return fold;
}

static double largest(const float *x, int64_t n)
{
    double max = 0;
    for (int64_t i = 0; i < n; i++)
        max = fabs((double)x[i]) > max ? fabs((double)x[i]) : max;
    return max;
}

static double difference(const float *a, const float *b, int64_t n)
{
    double max = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        max = d > max ? d : max;
    }
    return max;
}

/* Sites of a layer with scales of their own; only those without a norm before them are left out. */
static int scaled_sites(const fixture *f, const qc_layer_fold *fold)
{
    static const qc_slot norms[QC_N_DENSE_STAGES] = {QC_SLOT_ATTN_NORM, QC_N_SLOTS, QC_SLOT_MLP_NORM,
                                                     QC_N_SLOTS};
    int n = 0;
    for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++) {
        if (norms[stage] != QC_N_SLOTS && !qc_slot_present(&f->model.config, 0, norms[stage])) {
            ck_assert_ptr_nonnull(strstr(fold->records[stage].skipped, "no norm stands before"));
            ck_assert_ptr_null(fold->in[qc_stage_slots(f->model.config.family, (qc_stage)stage)[0]]);
            continue;
        }
        ck_assert_ptr_null(fold->records[stage].skipped);
        ck_assert_double_le(fold->records[stage].result.loss, fold->records[stage].result.loss_identity);
        n += strcmp(fold->records[stage].result.choice, QC_FOLD_IDENTITY) != 0;
    }
    return n;
}

/* Inputs of all stages and the output of the layer, before and after; inputs times s are what they were. */
static void expect_same_layer(fixture *f, const qc_layer_fold *fold, const qc_layer *folded, const char *name)
{
    float *before = qc_alloc((size_t)(LENGTH * f->widest), sizeof(float)),
          *x = qc_alloc((size_t)(TOKENS * f->hidden), sizeof(float));
    embed(f, f->x);
    for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++) {
        const float *in = fold->in[qc_stage_slots(f->model.config.family, (qc_stage)stage)[0]];
        int64_t width = qc_stage_width(&f->model.config, (qc_stage)stage), n = LENGTH * width;
        ck_assert_int_eq(qc_layer_stage_input(f->layer, f->ws, (qc_stage)stage, f->x, before, LENGTH, NULL),
                         QC_OK);
        ck_assert_int_eq(qc_layer_stage_input(folded, f->ws, (qc_stage)stage, f->x, f->u, LENGTH, NULL),
                         QC_OK);
        ck_assert((in != NULL) == (!fold->records[stage].skipped &&
                                   strcmp(fold->records[stage].result.choice, QC_FOLD_IDENTITY) != 0));
        if (in)
            ck_assert_double_gt(difference(before, f->u, n), 0.01 * largest(before, n));
        for (int64_t i = 0; i < n; i++)
            f->u[i] *= in ? in[i % width] : 1;
        ck_assert_msg(difference(before, f->u, n) <= TOL_FOLD * largest(before, n),
                      "%s, input of %s: %g of %g", name, qc_stage_name((qc_stage)stage),
                      difference(before, f->u, n), largest(before, n));
    }
    memcpy(x, f->x, (size_t)(TOKENS * f->hidden) * sizeof *x);
    ck_assert_int_eq(qc_layer_forward(f->layer, f->ws, f->x, LENGTH, NULL), QC_OK);
    ck_assert_int_eq(qc_layer_forward(folded, f->ws, x, LENGTH, NULL), QC_OK);
    double d = difference(x, f->x, LENGTH * f->hidden), size = largest(x, LENGTH * f->hidden);
    ck_assert_msg(d <= TOL_FOLD * size, "%s: output differs by %g of %g", name, d, size);
    qc_free(before);
    qc_free(x);
}

/* A plan knows before the run which norms and biases may take scales: those of all sites that were looked at,
 * and no others. */
static void expect_marks(fixture *f, const qc_layer_fold *fold, int layer)
{
    static const bool all[QC_N_DENSE_STAGES] = {true, true, true, true};
    static const struct {
        qc_slot slot;
        qc_stage site;
    } norms[] = {{QC_SLOT_ATTN_NORM, QC_STAGE_QKV}, {QC_SLOT_MLP_NORM, QC_STAGE_GATE_UP}};
    const qc_convert_plan *plan = &f->plan;
    qc_layer_fold_mark(plan, &f->model, all, &f->plan);
    for (int slot = QC_SLOT_FIRST_IN_LAYER; slot < QC_N_SLOTS; slot++)
        if (fold->vectors[slot])
            ck_assert(qc_convert_plan_item(plan, qc_model_tensor(&f->model, layer, (qc_slot)slot))->may_fold);
    for (int i = 0; i < 2; i++)
        if (qc_slot_present(&f->model.config, layer, norms[i].slot))
            ck_assert_int_eq(
                qc_convert_plan_item(plan, qc_model_tensor(&f->model, layer, norms[i].slot))->may_fold,
                !fold->records[norms[i].site].skipped);
}

static int fold_model(const char *name, const qc_fold_options *options, int act_bits)
{
    fixture f;
    qc_err err = {0};
    qc_layer *folded = NULL;
    qc_policy policy = policy_of(4, act_bits);
    setup(&f, mem_tiny(name), &policy, 1);
    qc_layer_fold fold = choose(&f, options, 1);
    int n = scaled_sites(&f, &fold);
    check(qc_layer_load(&f.model, f.be, 1, &folded, &err), &err);
    check(qc_layer_fold_apply(&fold, &f.model, 1, folded, &err), &err);
    expect_same_layer(&f, &fold, folded, name);
    expect_marks(&f, &fold, 1);
    qc_layer_free(folded);
    qc_layer_fold_clear(&fold);
    teardown(&f);
    return n;
}

/* Point 12.1 (6): without rounding, a folded layer computes what it did. N-13: v of 2 heads feeds o of 4. */
START_TEST(folds_change_nothing)
{
    static const char *const names[] = {"llama",   "llama-bias",   "llama3-rope", "mistral", "qwen2",
                                        "qwen3",   "qwen3-untied", "phi3",        "gemma2",  "gemma3_text",
                                        "granite", "seed_oss",     "smollm3"};
    qc_fold_options half = qc_fold_defaults(QC_FOLD_AWQ);
    ck_assert_int_ge(fold_model("olmo2", &half, 0), 1); /* norms stand behind its blocks, not before them */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        qc_fold_options awq = qc_fold_defaults(QC_FOLD_AWQ), smooth = qc_fold_defaults(QC_FOLD_SMOOTHQUANT);
        ck_assert_int_ge(fold_model(names[i], &awq, 0), 2);
        ck_assert_int_ge(fold_model(names[i], &smooth, 4), 3);
    }
}
END_TEST

/* A site is left alone where a value would have to be rounded to 16 bit. */
START_TEST(skipped_sites)
{
    static const struct {
        const char *skip;
        qc_stage stages[2];
        int n;
    } cases[] = {{"*.v_proj", {QC_STAGE_QKV, QC_STAGE_O}, 2},
                 {"*.o_proj", {QC_STAGE_O}, 1},
                 {"*.gate_proj", {QC_STAGE_GATE_UP}, 1},
                 {"*.up_proj", {QC_STAGE_GATE_UP, QC_STAGE_DOWN}, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fixture f;
        char skip[32], *list[] = {skip};
        qc_policy policy = policy_of(4, 0);
        qc_fold_options options = qc_fold_defaults(QC_FOLD_AWQ);
        snprintf(skip, sizeof skip, "%s", cases[i].skip);
        policy.skip = list;
        policy.n_skip = 1;
        setup(&f, mem_tiny("qwen3"), &policy, 0);
        qc_layer_fold fold = choose(&f, &options, 0);
        int n = 0;
        for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++)
            n += fold.records[stage].skipped != NULL;
        ck_assert_int_eq(n, cases[i].n);
        expect_marks(&f, &fold, 0);
        for (int k = 0; k < n; k++) {
            ck_assert_ptr_nonnull(strstr(fold.records[cases[i].stages[k]].skipped, "stays 16 bit"));
            ck_assert_ptr_null(fold.in[qc_stage_slots(f.model.config.family, cases[i].stages[k])[0]]);
        }
        qc_layer_fold_clear(&fold);
        teardown(&f);
    }
}
END_TEST

/* ---- through the pipeline ---- */

static qc_journal *run_pipeline(fixture *f, const char *path, const qc_pipeline_options *options)
{
    qc_err err = {0};
    qc_journal *journal = NULL;
    qc_corpus corpus = {.ids = f->ids, .n_windows = WINDOWS, .length = LENGTH};
    static const qc_journal_key key = {"tool", "test"};
    check(qc_journal_open(path, &key, 1, true, false, &journal, &err), &err);
    check(qc_pipeline_run(&f->plan, &f->model, f->be, &corpus, options, journal, &err), &err);
    return journal;
}

static const qc_tensor_info *info_of(const fixture *f, int layer, qc_slot slot)
{
    return f->model.src->info(f->model.src, qc_model_tensor(&f->model, layer, slot));
}

/* Decoded q of a layer as the journal has it. */
static float *decode_q(const fixture *f, const qc_journal *journal, int layer)
{
    const qc_tensor_info *info = info_of(f, layer, QC_SLOT_Q);
    int64_t rows = qc_tensor_rows(info), cols = qc_tensor_cols(info);
    const qc_grid *grid =
        &qc_convert_plan_item(&f->plan, qc_model_tensor(&f->model, layer, QC_SLOT_Q))->spec.grid;
    qc_err err = {0};
    qc_code_rows codes = {.n_rows = rows,
                          .codes = qc_alloc((size_t)(rows * cols), 1),
                          .scales = qc_alloc((size_t)(rows * cols), sizeof(float))};
    float *w = qc_alloc((size_t)(rows * cols), sizeof *w);
    check(qc_journal_read_codes(journal, info->name, grid, cols, 0, rows, &codes, &err), &err);
    qc_code_rows_decode(&codes, grid, cols, w);
    qc_free(codes.codes);
    qc_free(codes.scales);
    return w;
}

/* ||decoded - w s|| / ||w s||, s = gain / new gain of the norm before it */
static double relative_error(const fixture *f, const float *decoded, const float *s)
{
    const qc_tensor_info *info = info_of(f, 0, QC_SLOT_Q);
    int64_t rows = qc_tensor_rows(info), cols = qc_tensor_cols(info);
    const float *w = mem_tensor_of(f->src, info->name)->values;
    double error = 0, size = 0;
    for (int64_t i = 0; i < rows * cols; i++) {
        double want = (double)w[i] * (double)s[i % cols];
        error += ((double)decoded[i] - want) * ((double)decoded[i] - want);
        size += want * want;
    }
    return sqrt(error / size);
}

/* Mean of the diagonal of H for the q, k, v of layer 0: of the normed embeddings times gain. */
static double mean_diag(fixture *f, const float *gain)
{
    double sum = 0;
    int64_t n = f->hidden;
    ck_assert_int_eq(qc_model_embed(&f->model, f->ids, TOKENS, f->x, NULL), QC_OK);
    for (int64_t t = 0; t < TOKENS; t++) {
        double square = 0;
        for (int64_t j = 0; j < n; j++)
            square += (double)f->x[t * n + j] * (double)f->x[t * n + j];
        double r = 1 / sqrt(square / (double)n + (double)f->model.config.rms_eps);
        for (int64_t j = 0; j < n; j++) {
            double y = (double)f->x[t * n + j] * r * (double)gain[j];
            sum += y * y;
        }
    }
    return sum / (double)n;
}

/* Bug that shipped elsewhere: codes from the scaled weights, but H from before the scaling. */
static void expect_h_of_folded_inputs(fixture *f, const qc_journal *journal, const char *method)
{
    const char *norm = info_of(f, 0, QC_SLOT_ATTN_NORM)->name;
    const float *gain = mem_tensor_of(f->src, norm)->values;
    int64_t n = f->hidden;
    float *now = qc_alloc((size_t)n, sizeof *now), *s = qc_alloc((size_t)n, sizeof *s);
    char *text = NULL;
    qc_err err = {0};
    qc_layer_record record;
    check(qc_journal_read_dense(journal, norm, now, n, &err), &err);
    check(qc_journal_read_text(journal, "layer.0", &text, &err), &err);
    check(qc_layer_record_parse(text, &record, &err), &err);
    double before = mean_diag(f, gain), after = mean_diag(f, now), got = record.matrices[0].input.mean_diag;
    ck_assert_double_gt(fabs(before - after), 0.05 * after);
    ck_assert_msg(fabs(got - after) <= 1e-4 * after, "mean of diag(H) %g, %g with scales, %g without", got,
                  after, before);
    ck_assert_str_eq(record.matrices[0].method, method);
    ck_assert_int_eq(record.n_folds, QC_N_DENSE_STAGES);
    ck_assert_str_eq(record.folds[0].stage, "qkv");
    ck_assert_str_ne(record.folds[0].choice, QC_FOLD_IDENTITY);
    for (int64_t j = 0; j < n; j++)
        s[j] = gain[j] / now[j];
    float *q = decode_q(f, journal, 0);
    double with = relative_error(f, q, s);
    for (int64_t j = 0; j < n; j++)
        s[j] = 1;
    double without = relative_error(f, q, s);
    ck_assert_msg(with < 0.25 && without > 2 * with, "codes are off by %g of w s and by %g of w", with,
                  without);
    qc_free(q);
    qc_free(now);
    qc_free(s);
    qc_free(text);
    qc_layer_record_clear(&record);
}

/* Trouble case N-7: an output beyond float16 is computed with, and the layer named. */
START_TEST(beyond_float16)
{
    char path[64], *text = NULL;
    fixture f;
    qc_err err = {0};
    qc_policy policy = policy_of(4, 0);
    qc_pipeline_options options = {.gptq = true, .gptq_options = qc_gptq_defaults()};
    qc_layer_record record;
    mem_source *m = mem_tiny("qwen3");
    mem_scale_all(m, "layers.1.mlp.down_proj.weight", 1e8f, 0);
    snprintf(path, sizeof path, "/tmp/qc-fold-%ld", (long)getpid());
    setup(&f, m, &policy, 0);
    qc_journal *journal = run_pipeline(&f, path, &options);
    for (int layer = 0; layer < 2; layer++) {
        check(qc_journal_read_text(journal, layer ? "layer.1" : "layer.0", &text, &err), &err);
        check(qc_layer_record_parse(text, &record, &err), &err);
        int n = 0;
        for (int64_t i = 0; i < record.events.n_events; i++)
            n += strcmp(record.events.events[i].kind, "f16_range") == 0 &&
                 strcmp(record.events.events[i].subject, "layer 1") == 0;
        ck_assert_int_eq(n, layer);
        qc_layer_record_clear(&record);
        qc_free(text);
    }
    qc_journal_remove(journal);
    teardown(&f);
}
END_TEST

/* Embeddings with channels of unlike size. */
static mem_source *uneven_model(void)
{
    mem_source *m = mem_tiny("qwen3");
    mem_tensor *table = mem_tensor_of(m, "model.embed_tokens.weight");
    for (int64_t i = 0; i < qc_tensor_n_elems(&table->info); i++)
        table->values[i] *= i % table->info.shape[1] % 7 == 3 ? 12.0f : 1;
    return m;
}

static qc_pipeline_options folding(bool gptq, double correct)
{
    return (qc_pipeline_options){.gptq = gptq,
                                 .gptq_options = qc_gptq_defaults(),
                                 .fold = qc_fold_defaults(QC_FOLD_AWQ),
                                 .fold_sites = {true, true, true, true},
                                 .correct = correct};
}

START_TEST(statistics_see_folded_inputs)
{
    char path[64];
    fixture f;
    qc_policy policy = policy_of(6, 0);
    snprintf(path, sizeof path, "/tmp/qc-fold-%ld", (long)getpid());
    setup(&f, uneven_model(), &policy, 0);
    for (int i = 0; i < 3; i++) {
        qc_pipeline_options options = folding(i > 0, i == 2 ? 0.25 : 0);
        qc_journal *journal = run_pipeline(&f, path, &options);
        expect_h_of_folded_inputs(&f, journal, i ? "gptq" : "rtn");
        qc_journal_remove(journal);
    }
    qc_pipeline_options options = folding(true, 0);
    options.fold.method = QC_FOLD_NONE;
    qc_journal *journal = run_pipeline(&f, path, &options);
    ck_assert(!qc_journal_has(journal, info_of(&f, 0, QC_SLOT_ATTN_NORM)->name));
    qc_journal_remove(journal);
    teardown(&f);
}
END_TEST

static void stop_in_second_layer(void *ctx, double fraction)
{
    (void)ctx;
    if (fraction > 0.6)
        raise(SIGTERM);
}

/* A run that was stopped goes on from folded norms and codes of the journal, and ends in the same codes. */
START_TEST(resumed)
{
    char path[64], whole[64];
    fixture f;
    qc_err err = {0};
    qc_policy policy = policy_of(4, 8);
    qc_pipeline_options options = folding(true, 0.25);
    snprintf(path, sizeof path, "/tmp/qc-fold-%ld", (long)getpid());
    snprintf(whole, sizeof whole, "/tmp/qc-fold-whole-%ld", (long)getpid());
    setup(&f, uneven_model(), &policy, 0);
    pid_t child = fork();
    if (child == 0) {
        qc_journal *journal = NULL;
        qc_corpus corpus = {.ids = f.ids, .n_windows = WINDOWS, .length = LENGTH};
        static const qc_journal_key key = {"tool", "test"};
        qc_signals_install();
        options.progress = stop_in_second_layer;
        int rc = qc_journal_open(path, &key, 1, true, false, &journal, &err);
        if (rc == QC_OK)
            rc = qc_pipeline_run(&f.plan, &f.model, f.be, &corpus, &options, journal, &err);
        _exit(rc == QC_E_INTERRUPTED && qc_journal_n_layers(journal) == 1 ? 0 : 1);
    }
    int status;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_int_eq(status, 0);
    qc_journal *a = run_pipeline(&f, path, &options), *b = run_pipeline(&f, whole, &options);
    float *q[2] = {decode_q(&f, a, 1), decode_q(&f, b, 1)};
    ck_assert_mem_eq(q[0], q[1], (size_t)qc_tensor_n_elems(info_of(&f, 1, QC_SLOT_Q)) * sizeof(float));
    qc_journal_remove(a);
    qc_journal_remove(b);
    qc_free(q[0]);
    qc_free(q[1]);
    teardown(&f);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"nothing_changes", folds_change_nothing},  {"skipped", skipped_sites},
        {"pipeline", statistics_see_folded_inputs}, {"resumed", resumed},
        {"beyond_float16", beyond_float16},         {NULL, NULL},
    };
    return run_tests("fold_layer", cases);
}
