/* Importance matrices: one written by llama.cpp's own GGUF library (scripts/make_imatrix_vectors.py), the way
 * through a file of ours, files that must be refused. */
#include "imatrix.h"
#include "open.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_test.h"

#include <unistd.h>

typedef struct fixture {
    qc_source *src;
    qc_model model;
    char *data;
    size_t n_bytes;
    char folder[64], path[96];
} fixture;

static void setup(fixture *f)
{
    qc_err err = {0};
    *f = (fixture){0};
    ck_assert_int_eq(qc_source_open(test_data("models/tiny/llama"), &f->src, &err), QC_OK);
    ck_assert_int_eq(qc_model_open(f->src, &f->model, &err), QC_OK);
    ck_assert_int_eq(qc_file_read(test_data("quant/imatrix.gguf"), 1 << 20, &f->data, &f->n_bytes, &err),
                     QC_OK);
    strcpy(f->folder, "/tmp/qc-imatrix-XXXXXX");
    ck_assert(mkdtemp(f->folder) != NULL);
    snprintf(f->path, sizeof f->path, "%s/x.gguf", f->folder);
}

static void teardown(fixture *f)
{
    unlink(f->path);
    rmdir(f->folder);
    qc_free(f->data);
    qc_model_close(&f->model);
    qc_source_close(f->src);
}

static void put(const fixture *f, const void *data, size_t n_bytes)
{
    FILE *file = fopen(f->path, "wb");
    ck_assert(file && fwrite(data, 1, n_bytes, file) == n_bytes && fclose(file) == 0);
}

START_TEST(of_llama_cpp)
{
    static const qc_slot slots[] = {QC_SLOT_Q,    QC_SLOT_K,  QC_SLOT_V,   QC_SLOT_O,
                                    QC_SLOT_GATE, QC_SLOT_UP, QC_SLOT_DOWN};
    fixture f;
    setup(&f);
    qc_err err = {0};
    qc_imatrix *im;
    ck_assert_msg(qc_imatrix_open(test_data("quant/imatrix.gguf"), &f.model, &im, &err) == QC_OK, "%s",
                  err.msg);
    for (int k = 0; k < 14; k++) {
        const float *w = qc_imatrix_weights(im, k / 7, slots[k % 7], 0);
        if (k == 13) { /* no tokens */
            ck_assert(w == NULL && qc_imatrix_tokens(im, k / 7, slots[k % 7], 0) == 0);
            continue;
        }
        ck_assert(w != NULL);
        int n = k % 7 == 6 ? 256 : 128;
        for (int i = 0; i < n; i++)
            ck_assert(w[i] == (float)(i + 1) / 128);
    }
    qc_imatrix_close(im);
    f.model.config.ffn = 255;
    ck_assert_int_eq(qc_imatrix_open(test_data("quant/imatrix.gguf"), &f.model, &im, &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "blk.0.ffn_down.weight.in_sum2 has 256 values, 255"), "%s", err.msg);
    f.model.config.ffn = 256;
    teardown(&f);
}
END_TEST

/* Per layer of experts three tensors with a row for each of them. */
START_TEST(of_experts)
{
    static const qc_slot slots[] = {QC_SLOT_EXPERT_GATE, QC_SLOT_EXPERT_UP, QC_SLOT_EXPERT_DOWN};
    const char *path = test_data("quant/imatrix-experts.gguf");
    qc_source *src;
    qc_model model;
    qc_imatrix *im;
    qc_err err = {0};
    ck_assert_int_eq(qc_source_open(test_data("models/tiny/qwen3_moe"), &src, &err), QC_OK);
    ck_assert_int_eq(qc_model_open(src, &model, &err), QC_OK);
    ck_assert_msg(qc_imatrix_open(path, &model, &im, &err) == QC_OK, "%s", err.msg);
    for (int layer = 0; layer < 6; layer++)
        for (int k = 0; k < 3; k++)
            for (int e = 0; e < 8; e++) {
                const float *w = qc_imatrix_weights(im, layer, slots[k], e);
                bool dense = layer != 1 && layer != 5, last = layer == 5 && k == 2 && e == 7;
                ck_assert((w == NULL) == (dense || last));
                for (int i = 0; w && i < (k == 2 ? 32 : 64); i++)
                    ck_assert(w[i] == (float)((e + 1) * (i + 1)) / 128);
            }
    ck_assert(qc_imatrix_weights(im, 0, QC_SLOT_DOWN, 0) && !qc_imatrix_weights(im, 1, QC_SLOT_DOWN, 0));
    qc_imatrix_close(im);
    model.config.n_experts = 7;
    ck_assert_int_eq(qc_imatrix_open(path, &model, &im, &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "blk.1.ffn_gate_exps.weight.in_sum2 holds the sums of 8 matrices, 7 were"),
                  "%s", err.msg);
    model.config.n_experts = 8;
    qc_model_close(&model);
    qc_source_close(src);
}
END_TEST

/* Statistics of 4 windows -> importance matrix -> the column weights of the statistics. */
START_TEST(round_trip)
{
    fixture f;
    setup(&f);
    qc_err err = {0};
    qc_backend *be;
    qc_corpus corpus;
    qc_event_list events = {0};
    qc_stats_info info;
    qc_stats_writer *writer;
    qc_stats_file *file;
    qc_imatrix *im;
    qc_corpus_options o = {.windows = 4, .length = 256, .max_positions = 256};
    char stats[96];
    snprintf(stats, sizeof stats, "%s/s.qcs", f.folder);
    ck_assert_int_eq(qc_backend_cpu_new(NULL, QC_COMPUTE_F32, &be, &err), QC_OK);
    ck_assert_int_eq(qc_corpus_load(f.src, test_data("text/austen-calib.txt"), &o, f.model.config.vocab,
                                    &events, &corpus, &err),
                     QC_OK);
    ck_assert_int_eq(qc_stats_describe(&f.model, &corpus, "t", QC_COMPUTE_F32, &info, &err), QC_OK);
    ck_assert_int_eq(qc_stats_create(stats, false, &info, &writer, &err), QC_OK);
    ck_assert_int_eq(
        qc_stats_make(&f.model, be, &corpus, &(qc_stats_options){.n_shards = 1}, &info, writer, &err), QC_OK);
    ck_assert_int_eq(qc_stats_commit(writer, &err), QC_OK);
    ck_assert_int_eq(qc_stats_open(stats, &file, &err), QC_OK);
    ck_assert_msg(qc_imatrix_write(file, be, f.path, false, &err) == QC_OK, "%s", err.msg);
    ck_assert_int_eq(qc_imatrix_write(file, be, f.path, false, &err), QC_E_USAGE);
    ck_assert_msg(qc_imatrix_open(f.path, &f.model, &im, &err) == QC_OK, "%s", err.msg);
    float want[256];
    for (int layer = 0; layer < (int)f.model.config.n_layers; layer++)
        for (int s = 0; s < QC_N_DENSE_STAGES; s++) {
            ck_assert_int_eq(
                qc_stats_column_weights(file, be, (qc_stats_place){layer, (qc_stage)s, 0}, want, &err),
                QC_OK);
            for (const qc_slot *slot = qc_stage_slots(f.model.config.family, (qc_stage)s);
                 *slot != QC_N_SLOTS; slot++) {
                ck_assert_mem_eq(qc_imatrix_weights(im, layer, *slot, 0), want,
                                 (size_t)info.widths[s] * sizeof *want);
                ck_assert_int_eq(qc_imatrix_tokens(im, layer, *slot, 0), info.n_windows * info.length);
            }
        }
    qc_imatrix_close(im);
    qc_stats_close(file);
    unlink(stats);
    qc_corpus_clear(&corpus);
    qc_backend_close(be);
    teardown(&f);
}
END_TEST

START_TEST(damaged)
{
    fixture f;
    setup(&f);
    qc_err err = {0};
    qc_imatrix *im;
    put(&f, "", 0);
    ck_assert_int_eq(qc_imatrix_open(f.path, &f.model, &im, &err), QC_E_UNSUPPORTED);
    put(&f, "\x0e\0\0\0\x14\0\0\0blk.0.attn_q.weight", 28); /* the older format */
    ck_assert_int_eq(qc_imatrix_open(f.path, &f.model, &im, &err), QC_E_UNSUPPORTED);
    ck_assert_msg(strstr(err.msg, ".dat"), "%s", err.msg);
    for (size_t n = 4; n < f.n_bytes - 1024;
         n += 7) { /* the last tensors are the head's, which nobody reads */
        put(&f, f.data, n);
        ck_assert_msg(qc_imatrix_open(f.path, &f.model, &im, &err) < 0, "%zu bytes", n);
        ck_assert(strstr(err.msg, f.path));
    }
    char *type = memmem(f.data, f.n_bytes, "imatrix", 7);
    type[0] = 'x';
    put(&f, f.data, f.n_bytes);
    ck_assert_int_eq(qc_imatrix_open(f.path, &f.model, &im, &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "no importance matrix"), "%s", err.msg);
    type[0] = 'i';
    for (size_t i = 0; i < 3000; i++) { /* nothing worse than an error, whatever a byte of the head is */
        char old = f.data[i];
        f.data[i] = (char)(old ^ (i % 2 ? 0xFF : 0x81));
        put(&f, f.data, f.n_bytes);
        if (qc_imatrix_open(f.path, &f.model, &im, &err) == QC_OK)
            qc_imatrix_close(im);
        f.data[i] = old;
    }
    float nan = __builtin_nanf("");
    memcpy(f.data + f.n_bytes - 1300 / 4 * 4, &nan, sizeof nan); /* among the sums of the last matrix */
    put(&f, f.data, f.n_bytes);
    ck_assert_int_eq(qc_imatrix_open(f.path, &f.model, &im, &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "damaged"), "%s", err.msg);
    teardown(&f);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"of_llama_cpp", of_llama_cpp},
                               {"of_experts", of_experts},
                               {"round_trip", round_trip},
                               {"damaged", damaged},
                               {NULL, NULL}};
    return run_tests("imatrix", cases);
}
