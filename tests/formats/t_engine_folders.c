/* Packed matrices against what the engines' own libraries made (tests/data/engines, by
 * scripts/make_engine_vectors.py): their parts give their codes, scales, zeros and values, bit for bit, and
 * our packing of their codes gives their parts. */
#include "open.h"
#include "packing.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "safetensors.h"
#include "writer.h"

#include "qc_test.h"

enum { ROWS = 32, COLS = 96 };

static const char *const cases[] = {
    "gptq-v1-4",      "gptq-v2-4",       "gptq-v1-4-asym", "gptq-v2-4-asym", "gptq-v1-8-channel",
    "gptq-v2-8-asym", "gptq-v2-4-order", "awq-4-asym",     "awq-4-sym",      "ct-4",
    "ct-4-asym",      "ct-8-channel",    "ct-8-asym",      "ct-w8a8",
};
enum { N_CASES = sizeof cases / sizeof cases[0] };

/* A case as the library has it. */
typedef struct vectors {
    qc_st_file values, parts;
    qc_source *src;
    const qc_tensor_info *info;
    bool ordered; /* columns not in the order of their groups */
} vectors;

static const qc_st_tensor *tensor(const qc_st_file *file, const char *name)
{
    for (int64_t i = 0; i < file->n_tensors; i++)
        if (strcmp(file->tensors[i].info.name, name) == 0)
            return &file->tensors[i];
    return NULL;
}

static const void *data(const qc_st_file *file, const char *name)
{
    const qc_st_tensor *t = tensor(file, name);
    ck_assert_msg(t != NULL, "%s", name);
    return file->map.data + t->offset;
}

static void open_case(const char *name, vectors *v)
{
    char path[4096], file[4200];
    qc_err err = {0};
    snprintf(path, sizeof path, "%s/%s", test_data("engines"), name);
    ck_assert_msg(qc_source_open(path, &v->src, &err) == QC_OK, "%s", err.msg);
    snprintf(file, sizeof file, "%s/values.st", path);
    ck_assert_msg(qc_st_open(file, &v->values, &err) == QC_OK, "%s", err.msg);
    snprintf(file, sizeof file, "%s/model.safetensors", path);
    ck_assert_msg(qc_st_open(file, &v->parts, &err) == QC_OK, "%s", err.msg);
    ck_assert_int_eq(v->src->n_tensors, 1);
    ck_assert_int_eq(v->src->find(v->src, "m.weight"), 0);
    v->info = v->src->info(v->src, 0);
    ck_assert(v->info->n_dims == 2 && v->info->shape[0] == ROWS && v->info->shape[1] == COLS);
    v->ordered = v->info->dtype != QC_DT_GRID;
    ck_assert_int_eq(v->ordered, strcmp(name, "gptq-v2-4-order") == 0);
}

static void close_case(vectors *v)
{
    qc_source_close(v->src);
    qc_st_close(&v->values);
    qc_st_close(&v->parts);
}

START_TEST(values_of_the_library)
{
    for (int i = 0; i < N_CASES; i++) {
        vectors v;
        float got[ROWS * COLS];
        qc_err err = {0};
        open_case(cases[i], &v);
        for (int row = 0; row < ROWS; row += 5) { /* pieces that begin inside words */
            int n = ROWS - row < 5 ? ROWS - row : 5;
            ck_assert_int_eq(v.src->read_rows(v.src, 0, row, n, got + row * COLS, &err), QC_OK);
        }
        ck_assert_msg(memcmp(got, data(&v.values, "values"), sizeof got) == 0, "%s", cases[i]);
        close_case(&v);
    }
}
END_TEST

START_TEST(codes_of_the_library)
{
    for (int i = 0; i < N_CASES; i++) {
        vectors v;
        uint8_t codes[ROWS * COLS], zeros[ROWS * COLS];
        float scales[ROWS * COLS];
        qc_err err = {0};
        open_case(cases[i], &v);
        if (!v.ordered) {
            bool symmetric = v.info->grid.symmetric;
            qc_code_rows rows = {.codes = codes, .scales = scales, .zeros = symmetric ? NULL : zeros};
            size_t n = (size_t)(ROWS * qc_tensor_n_groups(v.info));
            ck_assert_int_eq(symmetric, strstr(cases[i], "asym") == NULL);
            ck_assert_int_eq(v.info->act_bits, strcmp(cases[i], "ct-w8a8") == 0 ? 8 : 0);
            ck_assert_int_eq(v.src->read_codes(v.src, 0, 0, ROWS, &rows, &err), QC_OK);
            ck_assert_msg(memcmp(codes, data(&v.values, "codes"), sizeof codes) == 0, "%s", cases[i]);
            ck_assert_msg(memcmp(scales, data(&v.values, "scales"), n * sizeof *scales) == 0, "%s", cases[i]);
            if (!symmetric)
                ck_assert_msg(memcmp(zeros, data(&v.values, "zeros"), n) == 0, "%s", cases[i]);
        }
        close_case(&v);
    }
}
END_TEST

static const qc_packing *packing_of(const char *name)
{
    return strncmp(name, "gptq-v1", 7) == 0   ? &qc_packing_gptq_v1
           : strncmp(name, "gptq-v2", 7) == 0 ? &qc_packing_gptq_v2
           : strncmp(name, "awq", 3) == 0     ? &qc_packing_awq
           : strcmp(name, "ct-w8a8") == 0     ? &qc_packing_ct_int
                                              : &qc_packing_ct_packed;
}

/* The library's codes in two calls, packed; *ret_parts as the library stored them. */
static void pack_case(const char *name, const vectors *v, void *parts_data[QC_MAX_PARTS],
                      qc_part parts[QC_MAX_PARTS], int *ret_n)
{
    const qc_packing *packing = packing_of(name);
    int64_t groups = qc_tensor_n_groups(v->info);
    qc_err err = {0};
    *ret_n = packing->parts(v->info, parts);
    for (int p = 0; p < *ret_n; p++)
        parts_data[p] = qc_calloc(qc_part_bytes(&parts[p]), 1);
    for (int row = 0; row < ROWS; row += QC_WRITER_ROWS) {
        qc_code_rows rows = {
            .n_rows = QC_WRITER_ROWS,
            .codes = (uint8_t *)(uintptr_t)data(&v->values, "codes") + row * COLS,
            .scales = (float *)(uintptr_t)data(&v->values, "scales") + row * groups,
            .zeros = v->info->grid.symmetric ? NULL
                                             : (uint8_t *)(uintptr_t)data(&v->values, "zeros") + row * groups,
        };
        ck_assert_msg(packing->pack(v->info, row, &rows, parts_data, &err) == QC_OK, "%s", err.msg);
    }
}

START_TEST(parts_of_the_library)
{
    for (int i = 0; i < N_CASES; i++) {
        vectors v;
        void *got[QC_MAX_PARTS] = {NULL};
        qc_part parts[QC_MAX_PARTS];
        int n = 0;
        open_case(cases[i], &v);
        if (!v.ordered)
            pack_case(cases[i], &v, got, parts, &n);
        for (int p = 0; p < n; p++) {
            char name[64];
            snprintf(name, sizeof name, "m.%s", parts[p].suffix);
            const qc_st_tensor *want = tensor(&v.parts, name);
            ck_assert_msg(want != NULL, "%s has no %s", cases[i], name);
            ck_assert_msg(want->info.dtype == parts[p].dtype &&
                              want->info.n_bytes == qc_part_bytes(&parts[p]),
                          "%s: type or size of %s", cases[i], name);
            ck_assert_msg(memcmp(got[p], data(&v.parts, name), qc_part_bytes(&parts[p])) == 0, "%s: %s",
                          cases[i], name);
            qc_free(got[p]);
        }
        ck_assert(v.ordered || n == v.parts.n_tensors); /* nothing of the library's is missing */
        close_case(&v);
    }
}
END_TEST

/* The examples of docs/formats/engines.md, from the published descriptions of the formats. */
START_TEST(words_of_the_document)
{
    uint8_t codes[32 * 32], zeros[32];
    float scales[32];
    qc_err err = {0};
    for (int r = 0; r < 32; r++) {
        scales[r] = 1;
        zeros[r] = (uint8_t)(r % 16);
        for (int c = 0; c < 32; c++)
            codes[r * 32 + c] = (uint8_t)c % 8;
    }
    qc_tensor_info info = {.name = "m.weight", .dtype = QC_DT_GRID, .n_dims = 2, .shape = {32, 32}};
    info.grid = (qc_grid){
        .kind = QC_GRID_AFFINE, .bits = 4, .symmetric = true, .group_elems = 32, .scale_dtype = QC_DT_F16};
    qc_code_rows rows = {.n_rows = 32, .codes = codes, .scales = scales};
    uint32_t words[32 * 4] = {0}, z[32] = {0};
    uint16_t s[32];
    int32_t g_idx[32];
    int64_t shape[2];
    ck_assert_int_eq(qc_packing_gptq_v1.pack(&info, 0, &rows, (void *[]){words, z, s, g_idx}, &err), QC_OK);
    ck_assert_uint_eq(words[0], 0x76543210);
    ck_assert_uint_eq(z[0], 0x77777777);
    memset(z, 0, sizeof z);
    ck_assert_int_eq(qc_packing_gptq_v2.pack(&info, 0, &rows, (void *[]){words, z, s, g_idx}, &err), QC_OK);
    ck_assert_uint_eq(z[0], 0x88888888);
    ck_assert_int_eq(qc_packing_ct_packed.pack(&info, 0, &rows, (void *[]){words, s, shape, NULL}, &err),
                     QC_OK);
    ck_assert_uint_eq(words[0], 0x76543210);
    for (int i = 0; i < 32 * 32; i++)
        codes[i] = (uint8_t)(i / 32) % 8;
    memset(z, 0, sizeof z);
    ck_assert_int_eq(qc_packing_awq.pack(&info, 0, &rows, (void *[]){words, z, s, NULL}, &err), QC_OK);
    ck_assert_uint_eq(words[0], 0x75316420);
    ck_assert_uint_eq(z[0], 0x88888888);
    /* every zero of a word comes back, 0 and 15 beside each other */
    uint8_t back_codes[32 * 32], back[32];
    float back_scales[32];
    qc_code_rows out = {.codes = back_codes, .scales = back_scales, .zeros = back};
    const qc_packing *const both[] = {&qc_packing_gptq_v1, &qc_packing_gptq_v2};
    info.grid.symmetric = false;
    rows.zeros = zeros;
    for (int v = 0; v < 2; v++) {
        memset(z, 0, sizeof z);
        ck_assert_int_eq(both[v]->pack(&info, 0, &rows, (void *[]){words, z, s, g_idx}, &err), QC_OK);
        both[v]->unpack(&info, 0, 32, (const void *[]){words, z, s, g_idx}, &out);
        ck_assert(memcmp(zeros, back, sizeof zeros) == 0);
    }
}
END_TEST

START_TEST(refused)
{
    uint8_t codes[32 * 32] = {0};
    float scales[32];
    qc_err err = {0};
    for (int r = 0; r < 32; r++)
        scales[r] = 1;
    qc_tensor_info info = {.name = "m.weight", .dtype = QC_DT_GRID, .n_dims = 2, .shape = {32, 32}};
    info.grid = (qc_grid){
        .kind = QC_GRID_AFFINE, .bits = 4, .symmetric = true, .group_elems = 32, .scale_dtype = QC_DT_F16};
    qc_code_rows rows = {.n_rows = 32, .codes = codes, .scales = scales};
    uint32_t words[32 * 4] = {0}, z[32] = {0};
    uint16_t s[32];
    int32_t g_idx[32];
    void *data[] = {words, z, s, g_idx};
    codes[77] = 16;
    ck_assert_int_eq(qc_packing_gptq_v1.pack(&info, 0, &rows, data, &err), QC_E_INPUT);
    ck_assert_ptr_nonnull(strstr(err.msg, "does not fit 4 bits"));
    codes[77] = 0;
    static const float bad[] = {1.0001f, 1e6f, 1e-9f, 0.0f / 0.0f, 1.0f / 0.0f};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        scales[3] = bad[i];
        ck_assert_int_eq(qc_packing_gptq_v1.pack(&info, 0, &rows, data, &err), QC_E_INPUT);
        ck_assert_ptr_nonnull(strstr(err.msg, "is not exact in F16"));
    }
}
END_TEST

/* ---- the writer ---- */

static const char config_text[] =
    "{\"model_type\": \"qwen3\", \"tie_word_embeddings\": true, \"torch_dtype\": \"bfloat16\"}";

static const qc_tensor_use embedding_use = {.kind = QC_KIND_EMBEDDING,
                                            .layer = -1,
                                            .n_layers = 1,
                                            .source = QC_DT_BF16},
                           linear_use = {.kind = QC_KIND_LINEAR, .n_layers = 1, .source = QC_DT_BF16};

/* One table as values and two matrices on a grid, the second in two pieces. */
static int put_all(qc_writer *w, const qc_tensor_info *table, const qc_tensor_info *grids, qc_err *err)
{
    static const uint16_t values[64 * 32];
    static uint8_t codes[32 * 32];
    static float scales[32];
    for (int i = 0; i < 32 * 32; i++)
        codes[i] = (uint8_t)(i * 7 % 16);
    for (int i = 0; i < 32; i++)
        scales[i] = 0.5f + (float)i / 32;
    uint64_t n_bytes;
    QC_TRY(w->add_meta(w, &(qc_meta){.key = "model.tied", .type = QC_META_U64, .u64 = 0}, err));
    QC_TRY(w->add_file(w, "config.json", config_text, strlen(config_text), err));
    QC_TRY(w->add_file(w, "tokenizer.json", "{}", 2, err));
    QC_TRY(w->declare(w, &embedding_use, table, err));
    QC_TRY(w->declare(w, &linear_use, &grids[0], err));
    QC_TRY(w->declare(w, &linear_use, &grids[1], err));
    QC_TRY(w->size(w, &n_bytes, err));
    QC_TRY(w->begin_tensor(w, table, err));
    QC_TRY(w->put_dense(w, values, 64, err));
    QC_TRY(w->end_tensor(w, err));
    for (int t = 0; t < 2; t++) {
        QC_TRY(w->begin_tensor(w, &grids[t], err));
        for (int row = 0; row < 32; row += 16) {
            qc_code_rows rows = {.n_rows = 16, .codes = codes + row * 32, .scales = scales + row};
            QC_TRY(w->put_codes(w, &rows, err));
        }
        QC_TRY(w->end_tensor(w, err));
    }
    return QC_OK;
}

static int write_folder(const char *path, uint64_t shard_bytes, qc_err *err)
{
    const char *temp;
    qc_writer *w = NULL;
    qc_tensor_info table = {.name = "model.embed_tokens.weight",
                            .dtype = QC_DT_BF16,
                            .n_dims = 2,
                            .shape = {64, 32}},
                   grids[2] = {{.name = "model.layers.0.self_attn.q_proj.weight"},
                               {.name = "model.layers.0.self_attn.k_proj.weight"}};
    for (int t = 0; t < 2; t++) {
        grids[t].dtype = QC_DT_GRID;
        grids[t].n_dims = 2;
        grids[t].shape[0] = grids[t].shape[1] = 32;
        grids[t].grid = (qc_grid){.kind = QC_GRID_AFFINE,
                                  .bits = 4,
                                  .symmetric = true,
                                  .group_elems = 32,
                                  .scale_dtype = QC_DT_F16};
    }
    const qc_writer_format *format = qc_writer_format_find("gptq");
    QC_TRY(format->create(&(qc_writer_options){.path = path, .shard_bytes = shard_bytes}, &w, err));
    int rc = put_all(w, &table, grids, err);
    if (rc == QC_OK)
        rc = w->finish(w, &temp, err);
    if (rc == QC_OK)
        return w->publish(w, NULL, err);
    qc_writer_discard(w);
    return rc;
}

static char scratch[64];

static void make_scratch(void)
{
    snprintf(scratch, sizeof scratch, "/tmp/qc-engine-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(scratch));
}

static void remove_scratch(void)
{
    char command[96];
    snprintf(command, sizeof command, "rm -r %s", scratch);
    ck_assert_int_eq(system(command), 0);
}

/* Files in the scratch folder, and below it. */
static int n_files(void)
{
    char command[128];
    int n = -1;
    snprintf(command, sizeof command, "find %s -mindepth 1 | wc -l", scratch);
    FILE *p = popen(command, "r");
    ck_assert_int_eq(fscanf(p, "%d", &n), 1);
    pclose(p);
    return n;
}

START_TEST(shards)
{
    make_scratch();
    char path[80], file[160];
    qc_err err = {0};
    snprintf(path, sizeof path, "%s/m", scratch);
    ck_assert_msg(write_folder(path, 1500, &err) == QC_OK, "%s", err.msg);
    /* the table of 4096 bytes fills a file of its own; a matrix has 512 + 16 + 64 + 128 bytes, two fit */
    static const char *const names[] = {"model-00001-of-00002.safetensors",
                                        "model-00002-of-00002.safetensors",
                                        "model.safetensors.index.json",
                                        "config.json",
                                        "quantize_config.json",
                                        "tokenizer.json",
                                        "README.md"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(file, sizeof file, "%s/%s", path, names[i]);
        ck_assert_msg(qc_path_exists(file), "%s", names[i]);
    }
    ck_assert_int_eq(n_files(), 1 + (int)(sizeof names / sizeof names[0]));
    qc_source *src;
    ck_assert_msg(qc_source_open(path, &src, &err) == QC_OK, "%s", err.msg);
    ck_assert_int_eq(src->n_tensors, 3);
    ck_assert_str_eq(src->format, "gptq");
    float row[32];
    int64_t k = src->find(src, "model.layers.0.self_attn.k_proj.weight");
    ck_assert_int_eq(src->read_rows(src, k, 31, 1, row, &err), QC_OK);
    for (int c = 0; c < 32; c++)
        ck_assert(row[c] == (0.5f + 31.0f / 32) * (float)((31 * 32 + c) * 7 % 16 - 8));
    char *text;
    size_t n_bytes;
    ck_assert_int_eq(src->side_file(src, "config.json", &text, &n_bytes, &err), QC_OK);
    ck_assert(!strstr(text, "quantization_config") && strstr(text, "\"tie_word_embeddings\": false"));
    qc_free(text);
    qc_source_close(src);
    remove_scratch();
}
END_TEST

/* Whatever allocation fails: one clean error, and nothing stays behind. */
START_TEST(failing_allocations)
{
    make_scratch();
    char path[80];
    snprintf(path, sizeof path, "%s/m", scratch);
    for (long nth = 1;; nth++) {
        qc_err err = {0};
        qc_alloc_fail_at(nth);
        int rc = write_folder(path, 1500, &err);
        long made = qc_alloc_fail_at(0);
        if (rc ==
            QC_OK) { /* a folder is synced as far as that goes: such a failure is none, if all is there */
            ck_assert_int_eq(n_files(), 8);
            remove_scratch();
            if (made < nth)
                return;
            make_scratch();
            snprintf(path, sizeof path, "%s/m", scratch);
            continue;
        }
        ck_assert_msg(rc == QC_E_RESOURCE && err.code == rc && *err.msg, "allocation %ld: %d %s", nth, rc,
                      err.msg);
        ck_assert_msg(n_files() == 0, "allocation %ld left files", nth);
    }
}
END_TEST

int main(void)
{
    return run_tests("engine folders", (test_case[]){{"values of the library", values_of_the_library},
                                                     {"codes of the library", codes_of_the_library},
                                                     {"parts of the library", parts_of_the_library},
                                                     {"words of the document", words_of_the_document},
                                                     {"refused", refused},
                                                     {"shards", shards},
                                                     {"failing allocations", failing_allocations},
                                                     {NULL, NULL}});
}
