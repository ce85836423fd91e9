/* Statistics files: sums of the first layer against float64, shards merged to the bytes of one pass, refusal
 * of files that are damaged or belong to something else. */
#include "open.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_math.h"
#include "qc_test.h"
#include "stats_file.h"
#include "tol.h"

#include <math.h>
#include <unistd.h>

enum { LEN = 256, WINDOWS = 58 }; /* 7 whole blocks and 512 tokens */

typedef struct fixture {
    qc_pool *pool;
    qc_backend *be;
    qc_source *src;
    qc_model model;
    qc_corpus corpus;
    qc_stats_info info;
    char folder[64], path[16][96];
} fixture;

static void setup_of(fixture *f, const char *model, int64_t windows)
{
    char folder[64];
    snprintf(folder, sizeof folder, "models/tiny/%s", model);
    qc_err err = {0};
    *f = (fixture){0};
    qc_event_list events = {0};
    ck_assert_int_eq(qc_pool_new(0, &f->pool, &err), QC_OK);
    ck_assert_int_eq(qc_backend_cpu_new(f->pool, QC_COMPUTE_F32, &f->be, &err), QC_OK);
    ck_assert_int_eq(qc_source_open(test_data(folder), &f->src, &err), QC_OK);
    ck_assert_msg(qc_model_open(f->src, &f->model, &err) == QC_OK, "%s", err.msg);
    qc_corpus_options o = {.windows = windows, .length = LEN, .max_positions = LEN};
    ck_assert_msg(qc_corpus_load(f->src, test_data("text/austen-calib.txt"), &o, f->model.config.vocab,
                                 &events, &f->corpus, &err) == QC_OK,
                  "%s", err.msg);
    ck_assert(events.n_events == 0 && f->corpus.n_windows == windows);
    ck_assert_msg(qc_stats_describe(&f->model, &f->corpus, "some/folder/austen-calib.txt", QC_COMPUTE_F32,
                                    &f->info, &err) == QC_OK,
                  "%s", err.msg);
    strcpy(f->folder, "/tmp/qc-stats-XXXXXX");
    ck_assert(mkdtemp(f->folder) != NULL);
    for (int i = 0; i < 16; i++)
        snprintf(f->path[i], sizeof f->path[i], "%s/%d.qcs", f->folder, i);
}

static void setup(fixture *f, int64_t windows)
{
    setup_of(f, "llama", windows);
}

static void teardown(fixture *f)
{
    for (int i = 0; i < 16; i++)
        unlink(f->path[i]);
    rmdir(f->folder);
    qc_corpus_clear(&f->corpus);
    qc_model_close(&f->model);
    qc_source_close(f->src);
    qc_backend_close(f->be);
    qc_pool_free(f->pool);
}

static void make(fixture *f, int shard, int n_shards, uint64_t memory_bytes, const char *path)
{
    qc_err err = {0};
    qc_stats_writer *w;
    qc_stats_info info = f->info;
    qc_stats_options o = {.shard = shard, .n_shards = n_shards, .memory_bytes = memory_bytes};
    ck_assert_msg(qc_stats_shard(&f->corpus, &o, &info, &err) == QC_OK, "%s", err.msg);
    ck_assert_int_eq(qc_stats_create(path, true, &info, &w, &err), QC_OK);
    ck_assert_msg(qc_stats_make(&f->model, f->be, &f->corpus, &o, &info, w, &err) == QC_OK, "%s", err.msg);
    ck_assert_int_eq(qc_stats_commit(w, &err), QC_OK);
}

static void same_bytes(const char *a, const char *b)
{
    qc_err err = {0};
    qc_mapped x, y;
    ck_assert_int_eq(qc_file_map(a, &x, &err), QC_OK);
    ck_assert_int_eq(qc_file_map(b, &y, &err), QC_OK);
    ck_assert_uint_eq(x.n_bytes, y.n_bytes);
    ck_assert_mem_eq(x.data, y.data, x.n_bytes);
    qc_file_unmap(&x);
    qc_file_unmap(&y);
}

/* path[14] <- merged from 1, 3 and 7 shards, which stay; always the bytes of path[15]. */
static void merge_shards(fixture *f)
{
    static const int counts[] = {1, 3, 7};
    qc_err err = {0};
    make(f, 0, 1, 0, f->path[15]);
    for (int k = 0; k < 3; k++) {
        const char *paths[8];
        int n = counts[k];
        for (int s = 0; s < n; s++) {
            int place = (s * 2 + 1) % n; /* merged in another order than made */
            make(f, s, n, 0, f->path[s]);
            paths[place] = f->path[s];
        }
        ck_assert_msg(qc_stats_merge(paths, n, f->path[14], true, f->be, &err) == QC_OK, "%s", err.msg);
        same_bytes(f->path[14], f->path[15]);
    }
}

START_TEST(shards)
{
    fixture f;
    setup(&f, WINDOWS);
    qc_err err = {0};
    merge_shards(&f);
    /* in two steps */
    ck_assert_int_eq(qc_stats_merge((const char *[]){f.path[4], f.path[3]}, 2, f.path[8], true, f.be, &err),
                     QC_OK);
    ck_assert_int_eq(qc_stats_merge((const char *[]){f.path[6], f.path[5]}, 2, f.path[9], true, f.be, &err),
                     QC_OK);
    ck_assert_int_eq(qc_stats_merge((const char *[]){f.path[9], f.path[0], f.path[2], f.path[8], f.path[1]},
                                    5, f.path[14], true, f.be, &err),
                     QC_OK);
    same_bytes(f.path[14], f.path[15]);
    /* what can not be merged */
    ck_assert_int_eq(qc_stats_merge((const char *[]){f.path[0], f.path[2]}, 2, f.path[10], true, f.be, &err),
                     QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "missing between") && strstr(err.msg, f.path[2]), "%s", err.msg);
    ck_assert_int_eq(qc_stats_merge((const char *[]){f.path[2], f.path[15]}, 2, f.path[10], true, f.be, &err),
                     QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "both hold window"), "%s", err.msg);
    strcpy(f.info.ids_sha256, "other");
    make(&f, 1, 7, 0, f.path[11]);
    ck_assert_int_eq(qc_stats_merge((const char *[]){f.path[0], f.path[11]}, 2, f.path[10], true, f.be, &err),
                     QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "different corpora"), "%s", err.msg);
    strcpy(f.info.model_sha256, "other");
    make(&f, 1, 7, 0, f.path[11]);
    ck_assert_int_eq(qc_stats_merge((const char *[]){f.path[0], f.path[11]}, 2, f.path[10], true, f.be, &err),
                     QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "different models"), "%s", err.msg);
    ck_assert(!qc_path_exists(f.path[10]));
    qc_stats_info info;
    ck_assert_int_eq(qc_stats_shard(&f.corpus, &(qc_stats_options){.n_shards = 9}, &info, &err), QC_E_USAGE);
    ck_assert_msg(strstr(err.msg, "at most 8 shards"), "%s", err.msg);
    teardown(&f);
}
END_TEST

/* Input of the first matrices: the normalised embedding, computed here in float64. */
static void first_input(const fixture *f, const int32_t *ids, int64_t n, double *ret)
{
    qc_err err = {0};
    int64_t d = f->model.config.hidden;
    float *x = qc_alloc((size_t)(n * d), sizeof *x), *gain = qc_alloc((size_t)d, sizeof *gain);
    ck_assert_int_eq(qc_model_embed(&f->model, ids, n, x, &err), QC_OK);
    ck_assert_int_eq(
        f->src->read_rows(f->src, qc_model_tensor(&f->model, 0, QC_SLOT_ATTN_NORM), 0, 1, gain, &err), QC_OK);
    for (int64_t t = 0; t < n; t++) {
        double sum = 0;
        for (int64_t i = 0; i < d; i++)
            sum += (double)x[t * d + i] * (double)x[t * d + i];
        for (int64_t i = 0; i < d; i++)
            ret[t * d + i] = (double)x[t * d + i] / sqrt(sum / (double)d + (double)f->model.config.rms_eps) *
                             (double)gain[i];
    }
    qc_free(x);
    qc_free(gain);
}

START_TEST(against_float64)
{
    fixture f;
    setup(&f, 10);
    qc_err err = {0};
    make(&f, 0, 1, 0, f.path[0]);
    make(&f, 0, 1, 6 << 20, f.path[1]); /* the stream in a scratch file */
    same_bytes(f.path[0], f.path[1]);
    qc_stats_file *file;
    qc_hessian hs;
    const float *h, *sum_abs;
    int64_t d = f.model.config.hidden, n = f.corpus.n_windows * LEN;
    ck_assert_msg(qc_stats_open(f.path[0], &file, &err) == QC_OK, "%s", err.msg);
    ck_assert_str_eq(qc_stats_of(file)->text, "austen-calib.txt");
    ck_assert_int_eq(qc_hessian_init(&hs, f.be, d, 0, &err), QC_OK);
    ck_assert_msg(qc_stats_append(file, (qc_stats_place){0}, &hs, &err) == QC_OK, "%s", err.msg);
    ck_assert_int_eq(hs.n_tokens, n);
    ck_assert_int_eq(qc_hessian_finish(&hs, &h, &sum_abs, &err), QC_OK);
    double *x = qc_alloc((size_t)(n * d), sizeof *x);
    float *weights = qc_alloc((size_t)d, sizeof *weights);
    first_input(&f, f.corpus.ids, n, x);
    ck_assert_int_eq(qc_stats_column_weights(file, f.be, (qc_stats_place){0}, weights, &err), QC_OK);
    for (int64_t i = 0; i < d; i++) {
        double max = 0, abs_sum = 0;
        for (int64_t j = 0; j < d; j++) {
            double want = 0, scale = 0;
            for (int64_t t = 0; t < n; t++) {
                want += x[t * d + i] * x[t * d + j];
                scale += fabs(x[t * d + i] * x[t * d + j]);
            }
            ck_assert_double_le(fabs((double)h[i * d + j] - want), TOL_DOT(2048) * scale);
            if (i == j)
                ck_assert_double_le(fabs((double)weights[i] - want / (double)n),
                                    TOL_DOT(2048) * want / (double)n);
        }
        for (int64_t t = 0; t < n; t++) {
            max = fmax(max, fabs(x[t * d + i]));
            abs_sum += fabs(x[t * d + i]);
        }
        ck_assert_double_le(fabs((double)hs.max_abs[i] - max), 1e-6 * max);
        ck_assert_double_le(fabs((double)sum_abs[i] - abs_sum), TOL_DOT(2048) * abs_sum);
    }
    qc_hessian_clear(&hs);
    for (int layer = 0; layer < (int)f.model.config.n_layers; layer++) /* every stage saw every token */
        for (int s = 0; s < QC_N_DENSE_STAGES; s++) {
            ck_assert_int_eq(qc_hessian_init(&hs, f.be, qc_stats_of(file)->widths[s], 0, &err), QC_OK);
            ck_assert_int_eq(qc_stats_append(file, (qc_stats_place){layer, (qc_stage)s, 0}, &hs, &err),
                             QC_OK);
            ck_assert_int_eq(hs.n_tokens, n);
            qc_hessian_clear(&hs);
        }
    ck_assert_int_eq(qc_stats_check_model(file, &f.model, f.info.model_sha256, &err), QC_OK);
    ck_assert_int_eq(qc_stats_check_model(file, &f.model, "0123", &err), QC_E_INPUT);
    f.model.config.ffn++;
    ck_assert_int_eq(qc_stats_check_model(file, &f.model, NULL, &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "inputs of down"), "%s", err.msg);
    f.model.config.n_layers--;
    ck_assert_int_eq(qc_stats_check_model(file, &f.model, NULL, &err), QC_E_INPUT);
    f.model.config.ffn--;
    f.model.config.n_layers++;
    qc_stats_close(file);
    make(&f, 0, 2, 0, f.path[2]);
    ck_assert_int_eq(qc_stats_open(f.path[2], &file, &err), QC_OK);
    ck_assert_int_eq(qc_stats_check_model(file, &f.model, NULL, &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "merge all shards"), "%s", err.msg);
    qc_stats_close(file);
    qc_free(x);
    qc_free(weights);
    teardown(&f);
}
END_TEST

/* What the experts of a layer get, by the model's own functions: u[tokens, hidden] and the router's choices
 * [tokens, n_chosen]. before: the layer under it, the model's first. */
static void route(const fixture *f, const qc_layer *before, const qc_layer *layer, qc_workspace *ws, float *u,
                  int32_t *experts)
{
    qc_err err = {0};
    const qc_model_config *c = &f->model.config;
    float *x = qc_alloc((size_t)(LEN * c->hidden), sizeof *x), *o = qc_alloc(LEN * 1024, sizeof *o),
          *weights = qc_alloc((size_t)(LEN * c->n_chosen), sizeof *weights);
    ck_assert_int_le(qc_stage_width(c, QC_STAGE_O), 1024);
    for (int64_t w = 0; w < f->corpus.n_windows; w++) {
        ck_assert_int_eq(qc_model_embed(&f->model, f->corpus.ids + w * LEN, LEN, x, &err), QC_OK);
        ck_assert_int_eq(qc_layer_forward(before, ws, x, LEN, &err), QC_OK);
        ck_assert_int_eq(qc_layer_stage_input(layer, ws, QC_STAGE_O, x, o, LEN, &err), QC_OK);
        ck_assert_int_eq(qc_layer_stage_output(layer, ws, QC_STAGE_O, o, x, LEN, &err), QC_OK);
        ck_assert_int_eq(qc_layer_route(layer, ws, x, LEN, experts + w * LEN * c->n_chosen, weights, &err),
                         QC_OK);
        ck_assert_int_eq(
            qc_layer_stage_input(layer, ws, QC_STAGE_EXPERT_GATE_UP, x, u + w * LEN * c->hidden, LEN, &err),
            QC_OK);
    }
    qc_free(x);
    qc_free(o);
    qc_free(weights);
}

/* The sums of a place against those of rows[n, width], in float64. */
static void check_sums(const fixture *f, const qc_stats_file *file, qc_stats_place place, const float *rows,
                       int64_t n)
{
    qc_err err = {0};
    qc_hessian hs;
    const float *h, *sum_abs;
    ck_assert_int_eq(qc_stats_init(qc_stats_of(file), place, f->be, &hs, &err), QC_OK);
    ck_assert_msg(qc_stats_append(file, place, &hs, &err) == QC_OK, "%s", err.msg);
    ck_assert_int_eq(hs.n_tokens, n);
    ck_assert_int_eq(qc_hessian_finish(&hs, &h, &sum_abs, &err), QC_OK);
    for (int64_t i = 0; i < hs.n; i++) {
        double max = 0;
        for (int64_t t = 0; t < n; t++) {
            double x = fabs((double)rows[t * hs.n + i]);
            max = x > max ? x : max;
        }
        ck_assert_double_eq((double)hs.max_abs[i], max);
        for (int64_t j = 0; j < hs.n; j++) {
            double want = 0, scale = 0;
            for (int64_t t = 0; t < n; t++) {
                double product = (double)rows[t * hs.n + i] * (double)rows[t * hs.n + j];
                want += product;
                scale += fabs(product);
            }
            ck_assert_double_le(fabs((double)h[i * hs.n + j] - want), TOL_DOT(2048) * scale);
        }
    }
    qc_hessian_clear(&hs);
}

/* Each expert has the sums of the tokens that the router sends to it, however many and in whatever shards. */
START_TEST(experts)
{
    fixture f;
    qc_err err = {0};
    setup_of(&f, "qwen3_moe", WINDOWS); /* experts from the second layer on */
    merge_shards(&f);
    make(&f, 0, 1, 6 << 20, f.path[0]); /* streams in scratch files */
    same_bytes(f.path[0], f.path[15]);
    qc_stats_file *file;
    qc_layer *layer, *before;
    qc_workspace *ws;
    const qc_model_config *c = &f.model.config;
    int64_t n = WINDOWS * LEN, n_all = 0;
    float *u = qc_alloc((size_t)(n * c->hidden), sizeof *u),
          *own = qc_alloc((size_t)(n * c->hidden), sizeof *own),
          *h = qc_alloc((size_t)(n * c->expert_ffn), sizeof *h);
    int32_t *chosen = qc_alloc((size_t)(n * c->n_chosen), sizeof *chosen);
    ck_assert_int_eq(qc_layer_load(&f.model, f.be, 1, &layer, &err), QC_OK);
    ck_assert_int_eq(qc_layer_load(&f.model, f.be, 0, &before, &err), QC_OK);
    ck_assert_int_eq(qc_workspace_new(&f.model, f.be, LEN, &ws, &err), QC_OK);
    route(&f, before, layer, ws, u, chosen);
    ck_assert_int_eq(qc_stats_open(f.path[15], &file, &err), QC_OK);
    ck_assert_int_eq(qc_stats_check_model(file, &f.model, f.info.model_sha256, &err), QC_OK);
    for (int64_t e = 0; e < c->n_experts; e++) {
        int64_t n_own = 0;
        for (int64_t i = 0; i < n * c->n_chosen; i++)
            if (chosen[i] == e)
                memcpy(own + n_own++ * c->hidden, u + i / c->n_chosen * c->hidden,
                       (size_t)c->hidden * sizeof *own);
        for (int64_t i = 0; i < n_own; i += LEN)
            ck_assert_int_eq(qc_layer_expert_down_input(layer, ws, e, own + i * c->hidden,
                                                        h + i * c->expert_ffn, qc_min_i64(LEN, n_own - i),
                                                        &err),
                             QC_OK);
        n_all += n_own;
        check_sums(&f, file, (qc_stats_place){1, QC_STAGE_EXPERT_GATE_UP, e}, own, n_own);
        check_sums(&f, file, (qc_stats_place){1, QC_STAGE_EXPERT_DOWN, e}, h, n_own);
    }
    ck_assert_int_eq(n_all, n * c->n_chosen);
    f.model.config.n_experts--;
    ck_assert_int_eq(qc_stats_check_model(file, &f.model, NULL, &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "experts"), "%s", err.msg);
    f.model.config.n_experts++;
    qc_stats_close(file);
    qc_layer_free(layer);
    qc_layer_free(before);
    qc_workspace_free(ws);
    qc_free(u);
    qc_free(own);
    qc_free(h);
    qc_free(chosen);
    teardown(&f);
}
END_TEST

/* Every record of a file as QC_OK or the first error. */
static int read_all(const fixture *f, const char *path, qc_err *err)
{
    qc_stats_file *file;
    QC_TRY(qc_stats_open(path, &file, err));
    int rc = QC_OK;
    const qc_stats_info *info = qc_stats_of(file);
    for (int64_t k = 0; k < qc_stats_n_places(info) && rc == QC_OK; k++) {
        qc_hessian hs;
        qc_stats_place place = qc_stats_place_at(info, k);
        ck_assert_int_eq(qc_stats_init(info, place, f->be, &hs, err), QC_OK);
        rc = qc_stats_append(file, place, &hs, err);
        qc_hessian_clear(&hs);
    }
    qc_stats_close(file);
    return rc;
}

static void expect_bad(const fixture *f, const void *data, size_t n_bytes, const char *fragment)
{
    qc_err err = {0};
    FILE *file = fopen(f->path[1], "wb"); /* not qc_file_write, which waits for the disk */
    ck_assert(file && fwrite(data, 1, n_bytes, file) == n_bytes && fclose(file) == 0);
    ck_assert_msg(read_all(f, f->path[1], &err) == QC_E_INPUT, "%zu bytes", n_bytes);
    ck_assert_msg(strstr(err.msg, f->path[1]) && strstr(err.msg, fragment), "%s", err.msg);
}

START_TEST(damaged)
{
    fixture f;
    setup(&f, 4);
    qc_err err = {0};
    make(&f, 0, 1, 0, f.path[0]);
    char *data;
    size_t n_bytes;
    ck_assert_int_eq(qc_file_read(f.path[0], 1 << 26, &data, &n_bytes, &err), QC_OK);
    ck_assert_int_eq(read_all(&f, f.path[0], &err), QC_OK);
    expect_bad(&f, "", 0, "no statistics file");
    expect_bad(&f, "just some text, longer than the header of such a file", 53, "no statistics file");
    expect_bad(&f, data, 20, "no statistics file");
    expect_bad(&f, data, n_bytes / 2, "cut");
    expect_bad(&f, data, n_bytes - 1, "cut");
    for (size_t n = 32; n < n_bytes; n += n_bytes / 61)
        expect_bad(&f, data, n, "cut");
    for (size_t i = 8; i < n_bytes; i += i < 600 ? 1 : n_bytes / 97) { /* one bit anywhere */
        data[i] ^= 4;
        if (i >= 8 && i < 12) { /* the version: its checksum is checked first */
            expect_bad(&f, data, n_bytes, "checksum of the header");
        } else {
            expect_bad(&f, data, n_bytes, "damaged");
        }
        data[i] ^= 4;
    }
    char *longer = qc_realloc(data, n_bytes, n_bytes + 1);
    longer[n_bytes] = 0;
    expect_bad(&f, longer, n_bytes + 1, "behind its end");
    qc_free(longer);
    teardown(&f);
}
END_TEST

START_TEST(over_the_cap)
{
    fixture f;
    setup(&f, 4);
    qc_err err = {0};
    qc_stats_writer *w;
    ck_assert_int_eq(qc_stats_create(f.path[0], false, &f.info, &w, &err), QC_OK);
    ck_assert_int_eq(qc_stats_make(&f.model, f.be, &f.corpus,
                                   &(qc_stats_options){.n_shards = 1, .memory_bytes = 1000}, &f.info, w,
                                   &err),
                     QC_E_RESOURCE);
    ck_assert_msg(strstr(err.msg, "memory cap"), "%s", err.msg);
    qc_stats_discard(w);
    ck_assert(!qc_path_exists(f.path[0]));
    teardown(&f);
}
END_TEST

START_TEST(column_weights)
{
    float w[4];
    qc_stats_weights_of_sums((const float[]){8, 0, 4, 0}, 4, 2, w);
    ck_assert(w[0] == 4 && w[2] == 2);
    ck_assert_float_eq_tol(w[1], 1.5e-6f, 1e-12f); /* a millionth of the mean of 4, 0, 2, 0 */
    ck_assert(w[3] == w[1]);
    qc_stats_weights_of_sums((const float[]){0, 0, 0, 0}, 4, 2, w);
    ck_assert(w[0] == 1 && w[3] == 1);
}
END_TEST

/* K-6 of the trouble cases: a model that was broken on purpose shows in its perplexity. */
START_TEST(perplexity)
{
    fixture f;
    setup(&f, 4);
    qc_err err = {0};
    qc_event_list events = {0};
    double ppl = 0;
    int64_t n = 0;
    ck_assert_int_eq(qc_corpus_perplexity(&f.corpus, &f.model, f.be, NULL, 0, "t", &events, &ppl, &n, &err),
                     QC_OK);
    ck_assert(n == 4 && ppl > 1 && isfinite(ppl) && events.n_events == 0);
    ck_assert_int_eq(
        qc_corpus_perplexity(&f.corpus, &f.model, f.be, NULL, ppl / 2, "t", &events, &ppl, &n, &err), QC_OK);
    ck_assert_int_eq(qc_event_count(&events, "calibration_perplexity"), 1);
    qc_event_list_clear(&events);
    teardown(&f);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"shards", shards},
                               {"against_float64", against_float64},
                               {"experts", experts},
                               {"damaged", damaged},
                               {"over_the_cap", over_the_cap},
                               {"column_weights", column_weights},
                               {"perplexity", perplexity},
                               {NULL, NULL}};
    return run_tests("stats", cases);
}
