/* ONNX folders against what the package onnx made and ONNX Runtime decodes (tests/data/onnx, by
 * scripts/make_onnx_vectors.py), the wire format against the examples of its public description. */
#include "onnx.h"
#include "onnx_proto.h"
#include "onnx_read.h"
#include "packing.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "safetensors.h"
#include "writer.h"

#include "qc_test.h"

#include <unistd.h>

enum { ROWS = 8, COLS = 64, DATA_BYTES = 3456 };

static const char *const matrices[] = {"m0", "m1", "m2", "m3", "table"};
enum { N_MATRICES = sizeof matrices / sizeof matrices[0] };

static const void *vector(const qc_st_file *file, const char *matrix, const char *what)
{
    char name[64];
    snprintf(name, sizeof name, "%s.%s", matrix, what);
    for (int64_t i = 0; i < file->n_tensors; i++)
        if (strcmp(file->tensors[i].info.name, name) == 0)
            return file->map.data + file->tensors[i].offset;
    return NULL;
}

static void open_vectors(qc_source **src, qc_st_file *values)
{
    qc_err err = {0};
    char path[4200];
    ck_assert_msg(qc_onnx_open(test_data("onnx"), src, &err) == QC_OK, "%s", err.msg);
    snprintf(path, sizeof path, "%s/values.st", test_data("onnx"));
    ck_assert_msg(qc_st_open(path, values, &err) == QC_OK, "%s", err.msg);
}

START_TEST(values_of_the_engine)
{
    qc_source *src;
    qc_st_file values;
    qc_err err = {0};
    open_vectors(&src, &values);
    ck_assert_int_eq(src->n_tensors, N_MATRICES + 1);
    ck_assert_str_eq(src->format, "onnx");
    for (int i = 0; i <= N_MATRICES; i++) {
        const char *matrix = i < N_MATRICES ? matrices[i] : "dense";
        char name[64];
        float got[ROWS * COLS];
        snprintf(name, sizeof name, "%s.weight", matrix);
        int64_t t = src->find(src, name);
        ck_assert_msg(t >= 0, "%s", name);
        ck_assert_int_eq(src->read_rows(src, t, 0, 3, got, &err), QC_OK);
        ck_assert_int_eq(src->read_rows(src, t, 3, ROWS - 3, got + 3 * COLS, &err), QC_OK);
        ck_assert_msg(memcmp(got, vector(&values, matrix, "values"), sizeof got) == 0, "%s", matrix);
    }
    qc_source_close(src);
    qc_st_close(&values);
}
END_TEST

START_TEST(codes_and_parts)
{
    static const char *const suffixes[] = {"packed", "scale", "zero_point"};
    qc_source *src;
    qc_st_file values;
    qc_mapped file, data;
    qc_onnx_graph graph;
    qc_err err = {0};
    char path[4200];
    open_vectors(&src, &values);
    snprintf(path, sizeof path, "%s/model.onnx", test_data("onnx"));
    ck_assert_int_eq(qc_file_map(path, &file, &err), QC_OK);
    snprintf(path, sizeof path, "%s/model.onnx.data", test_data("onnx"));
    ck_assert_int_eq(qc_file_map(path, &data, &err), QC_OK);
    ck_assert_int_eq(qc_onnx_parse(file.data, file.n_bytes, data.n_bytes, "t", &graph, &err), QC_OK);
    for (int i = 0; i < N_MATRICES; i++) {
        char name[64];
        qc_code_rows rows;
        snprintf(name, sizeof name, "%s.weight", matrices[i]);
        int64_t t = src->find(src, name);
        const qc_tensor_info *info = src->info(src, t);
        size_t n_groups = (size_t)(ROWS * qc_tensor_n_groups(info));
        const void *zeros = vector(&values, matrices[i], "zeros");
        ck_assert_int_eq(info->grid.symmetric, zeros == NULL);
        ck_assert_int_eq(qc_code_rows_alloc(&info->grid, ROWS, COLS, &rows, &err), QC_OK);
        ck_assert_int_eq(src->read_codes(src, t, 0, ROWS, &rows, &err), QC_OK);
        ck_assert(memcmp(rows.codes, vector(&values, matrices[i], "codes"), ROWS * COLS) == 0);
        ck_assert(memcmp(rows.scales, vector(&values, matrices[i], "scales"), n_groups * sizeof(float)) == 0);
        if (zeros)
            ck_assert(memcmp(rows.zeros, zeros, n_groups) == 0);
        /* and packed again they are the bytes that the engine read */
        qc_part parts[QC_MAX_PARTS];
        void *packed[QC_MAX_PARTS] = {NULL};
        int n = qc_packing_onnx.parts(info, parts);
        for (int p = 0; p < n; p++)
            packed[p] = qc_calloc(qc_part_bytes(&parts[p]), 1);
        ck_assert_int_eq(qc_packing_onnx.pack(info, 0, &rows, packed, &err), QC_OK);
        for (int p = 0; p < n; p++) {
            snprintf(name, sizeof name, "%s.weight_%s", matrices[i], suffixes[p]);
            int64_t at = qc_map_get(graph.by_name, name, strlen(name), -1);
            ck_assert_msg(at >= 0, "%s", name);
            ck_assert_msg(memcmp(packed[p], data.data + graph.tensors[at].offset, qc_part_bytes(&parts[p])) ==
                              0,
                          "%s", name);
            qc_free(packed[p]);
        }
        qc_code_rows_free(&rows);
    }
    qc_onnx_clear(&graph);
    qc_file_unmap(&file);
    qc_file_unmap(&data);
    qc_source_close(src);
    qc_st_close(&values);
}
END_TEST

/* Examples of protobuf.dev, "Encoding": 150 in field 1, -2 as int64, "testing" in field 2, a message with
 * field 1 = 150 in field 3. */
START_TEST(wire_format)
{
    qc_err err = {0};
    qc_proto p = {.err = &err}, inner = {.err = &err};
    static const uint8_t want[] = {0x08, 0x96, 0x01, 0x20, 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
                                   0xff, 0xff, 0x01, 0x12, 0x07, 't',  'e',  's',  't',  'i',  'n',
                                   'g',  0x1a, 0x03, 0x08, 0x96, 0x01, 0x2d, 0x00, 0x00, 0x80, 0x3f};
    qc_proto_int(&p, 1, 150);
    qc_proto_int(&p, 4, -2);
    qc_proto_text(&p, 2, "testing");
    qc_proto_int(&inner, 1, 150);
    qc_proto_message(&p, 3, &inner);
    qc_proto_float(&p, 5, 1);
    ck_assert_int_eq(p.rc, QC_OK);
    ck_assert_uint_eq(p.buf.n_bytes, sizeof want);
    ck_assert(memcmp(p.buf.data, want, sizeof want) == 0);
    qc_proto_reader r = {want, sizeof want};
    qc_proto_field f;
    ck_assert(qc_proto_next(&r, &f) == 1 && f.number == 1 && f.value == 150);
    ck_assert(qc_proto_next(&r, &f) == 1 && f.number == 4 && (int64_t)f.value == -2);
    ck_assert(qc_proto_next(&r, &f) == 1 && f.n_bytes == 7 && memcmp(f.data, "testing", 7) == 0);
    ck_assert(qc_proto_next(&r, &f) == 1 && f.number == 3 && f.n_bytes == 3);
    ck_assert(qc_proto_next(&r, &f) == 1 && f.wire == QC_WIRE_32 && f.value == 0x3f800000);
    ck_assert_int_eq(qc_proto_next(&r, &f), 0);
    qc_buf_clear(&p.buf);
}
END_TEST

/* Fields that begin a message which breaks off or never ends. */
START_TEST(wire_format_broken)
{
    static const struct {
        uint8_t bytes[12];
        size_t n_bytes;
    } bad[] = {{{0x08}, 1},
               {{0x08, 0x80}, 2},
               {{0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01}, 12},
               {{0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02}, 11},
               {{0x00, 0x01}, 2},
               {{0x12, 0x03, 'a', 'b'}, 4},
               {{0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01}, 11},
               {{0x0d, 0, 0, 0}, 4},
               {{0x09, 0, 0, 0, 0, 0, 0, 0}, 8},
               {{0x0b}, 1},
               {{0x0f}, 1}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        qc_proto_reader r = {bad[i].bytes, bad[i].n_bytes};
        qc_proto_field f;
        ck_assert_msg(qc_proto_next(&r, &f) == QC_E_INPUT, "bytes %zu", i);
    }
}
END_TEST

/* Occurrence number `which` of a text in a file becomes another of the same length. */
static void spoil(char *data, size_t n_bytes, const char *old, int which, const char *new)
{
    ck_assert_uint_eq(strlen(old), strlen(new));
    for (char *at = data; (at = memmem(at, n_bytes - (size_t)(at - data), old, strlen(old))); at++)
        if (which-- == 0) {
            memcpy(at, new, strlen(new));
            return;
        }
    ck_abort_msg("%s is not in the file", old);
}

START_TEST(bad_graphs)
{
    static const struct {
        const char *old;
        int which;
        const char *new;
        int code;
        const char *words;
    } bad[] = {
        {"qconvert.layout", 0, "qconvert.layouX", QC_E_UNSUPPORTED, "not a graph that qconvert wrote"},
        {"com.microsoft\x10\x01", 0, "com.microsoft\x10\x02", QC_E_UNSUPPORTED,
         "not a graph that qconvert wrote"},
        {"FusedMatMul", 0, "FusedMatMuX", QC_E_UNSUPPORTED, "none of the layout"},
        {"transB\x18\x01", 0, "transB\x18\x03", QC_E_UNSUPPORTED, "none of the layout"},
        {"gather_axis\x18", 0, "gather_axiX\x18", QC_E_UNSUPPORTED, "none of the layout"},
        {"model.onnx.data", 0, "model.onnx.dat2", QC_E_UNSUPPORTED, "is not in model.onnx.data"},
        {"m1.weight_zero_point", 0, "m1.weight_zero_poinX", QC_E_INPUT, "expects an initializer"},
        {"m1.weight_scale", 0, "m1.weight_scalX", QC_E_INPUT, "blocks of 16 to 256"},
        {"m1.weight_scale", 0, "m2.weight_scale", QC_E_INPUT, "expects an initializer"},
        {"m0.weight_packed", 0, "m0.weight_packeX", QC_E_INPUT, "expects an initializer"},
        {"m0.weight_packed", 1, "m1.weight_packed", QC_E_INPUT, "is there twice"},
        {"tied_head.weight_packed", 0, "tied_head.weight_packeX", QC_E_INPUT, "expects an initializer"},
        {"dense.weight", 1, "dense.weighX", QC_E_INPUT, "no node reads initializer"},
        {"block_size\x18\x10", 0, "block_size\x18\x08", QC_E_INPUT, "blocks of 16 to 256"},
        {"bits\x18\x04", 0, "bits\x18\x03", QC_E_INPUT, "blocks of 16 to 256"},
        {"bits\x18\x04", 0, "bits\x18\x08", QC_E_INPUT, "expects an initializer"},
        {"offset\x12\x01"
         "0",
         0,
         "offset\x12\x01"
         "x",
         QC_E_INPUT, "expected a number"},
        {"length\x12\x03"
         "256",
         0,
         "length\x12\x03"
         "257",
         QC_E_INPUT, "do not fit"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char path[4200], *data;
        size_t n_bytes;
        qc_onnx_graph graph;
        qc_err err = {0};
        snprintf(path, sizeof path, "%s/model.onnx", test_data("onnx"));
        ck_assert_int_eq(qc_file_read(path, 1 << 20, &data, &n_bytes, &err), QC_OK);
        spoil(data, n_bytes, bad[i].old, bad[i].which, bad[i].new);
        int rc = qc_onnx_parse(data, n_bytes, DATA_BYTES, "t", &graph, &err);
        ck_assert_msg(rc == bad[i].code && strstr(err.msg, bad[i].words), "%s: %d %s", bad[i].new, rc,
                      err.msg);
        qc_free(data);
    }
}
END_TEST

/* Cut anywhere: an error, or what is left says nothing of its layout. */
START_TEST(cut_off)
{
    char path[4200], *data;
    size_t n_bytes;
    qc_onnx_graph graph;
    qc_err err = {0};
    snprintf(path, sizeof path, "%s/model.onnx", test_data("onnx"));
    ck_assert_int_eq(qc_file_read(path, 1 << 20, &data, &n_bytes, &err), QC_OK);
    for (size_t n = 0; n < n_bytes; n++) {
        char *part = malloc(n + 1); /* of its own size, so that a sanitizer sees a read behind it */
        memcpy(part, data, n);
        int rc = qc_onnx_parse(part, n, DATA_BYTES, "t", &graph, &err);
        ck_assert_msg(rc == QC_E_INPUT || rc == QC_E_UNSUPPORTED, "%zu bytes: %d", n, rc);
        free(part);
    }
    ck_assert_int_eq(qc_onnx_parse(data, n_bytes, DATA_BYTES - 64, "t", &graph, &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "do not fit"), "%s", err.msg);
    qc_free(data);
}
END_TEST

START_TEST(failing_allocations)
{
    for (long nth = 1;; nth++) {
        qc_source *src = NULL;
        qc_err err = {0};
        qc_alloc_fail_at(nth);
        int rc = qc_onnx_open(test_data("onnx"), &src, &err);
        long made = qc_alloc_fail_at(0);
        qc_source_close(src);
        if (rc == QC_OK && made < nth)
            break;
        ck_assert_msg(rc == QC_E_RESOURCE && *err.msg, "allocation %ld: %d %s", nth, rc, err.msg);
        ck_assert_int_lt(nth, 3000);
    }
}
END_TEST

/* ---- the writer ---- */

enum { HIDDEN = 32, VOCAB = 64 };

/* Tensors of a llama of one layer; matrices of the layer are on a grid. */
static const char *const tensors[] = {"model.embed_tokens.weight",
                                      "model.layers.0.input_layernorm.weight",
                                      "model.layers.0.self_attn.q_proj.weight",
                                      "model.layers.0.self_attn.k_proj.weight",
                                      "model.layers.0.self_attn.v_proj.weight",
                                      "model.layers.0.self_attn.o_proj.weight",
                                      "model.layers.0.post_attention_layernorm.weight",
                                      "model.layers.0.mlp.gate_proj.weight",
                                      "model.layers.0.mlp.up_proj.weight",
                                      "model.layers.0.mlp.down_proj.weight",
                                      "model.norm.weight"};
enum { N_TENSORS = sizeof tensors / sizeof tensors[0] };

static void describe(int i, qc_tensor_use *use, qc_tensor_info *info)
{
    bool norm = strstr(tensors[i], "norm") != NULL;
    *use = (qc_tensor_use){.kind = norm     ? QC_KIND_VECTOR
                                   : i == 0 ? QC_KIND_EMBEDDING
                                            : QC_KIND_LINEAR,
                           .n_layers = 1,
                           .source = QC_DT_BF16};
    *info = (qc_tensor_info){.name = tensors[i], .n_dims = norm ? 1 : 2};
    info->shape[0] = i == 0 ? VOCAB : HIDDEN;
    info->shape[1] = norm ? 0 : HIDDEN;
    info->dtype = norm ? QC_DT_F32 : i == 0 ? QC_DT_BF16 : QC_DT_GRID;
    if (info->dtype == QC_DT_GRID)
        info->grid =
            (qc_grid){.kind = QC_GRID_AFFINE, .bits = 4, .group_elems = 16, .scale_dtype = QC_DT_F16};
}

static int put_tensor(qc_writer *w, int i, qc_err *err)
{
    static const uint16_t dense[VOCAB * HIDDEN];
    static uint8_t codes[HIDDEN * HIDDEN], zeros[HIDDEN * 2];
    static float scales[HIDDEN * 2];
    qc_tensor_use use;
    qc_tensor_info info;
    describe(i, &use, &info);
    QC_TRY(w->begin_tensor(w, &info, err));
    for (int k = 0; k < HIDDEN * HIDDEN; k++)
        codes[k] = (uint8_t)((k * 7 + i) % 16);
    for (int k = 0; k < HIDDEN * 2; k++) {
        zeros[k] = (uint8_t)(k % 16);
        scales[k] = 0.25f * (float)(k + 1);
    }
    for (int row = 0; row < HIDDEN && info.dtype == QC_DT_GRID; row += 16) {
        qc_code_rows rows = {.n_rows = 16,
                             .codes = codes + row * HIDDEN,
                             .scales = scales + row * 2,
                             .zeros = zeros + row * 2};
        QC_TRY(w->put_codes(w, &rows, err));
    }
    if (info.dtype != QC_DT_GRID)
        QC_TRY(w->put_dense(w, dense, qc_tensor_rows(&info), err));
    return w->end_tensor(w, err);
}

/* Everything but tensor number `without`. */
static int put_all(qc_writer *w, int without, qc_err *err)
{
    static const struct {
        const char *key;
        uint64_t value;
    } sizes[] = {{"model.hidden", HIDDEN}, {"model.layers", 1},        {"model.heads", 2},
                 {"model.kv_heads", 2},    {"model.head_dim", 16},     {"model.ffn", HIDDEN},
                 {"model.vocab", VOCAB},   {"model.max_positions", 8}, {"model.tied", 1},
                 {"model.rotary_dim", 16}};
    uint64_t n_bytes;
    qc_meta family = {.key = "model.family", .type = QC_META_STRING, .string = "llama"},
            act = {.key = "model.activation", .type = QC_META_STRING, .string = "silu"},
            rope = {.key = "rope.kind", .type = QC_META_STRING, .string = "default"};
    QC_TRY(w->add_meta(w, &family, err));
    QC_TRY(w->add_meta(w, &act, err));
    QC_TRY(w->add_meta(w, &rope, err));
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        QC_TRY(
            w->add_meta(w, &(qc_meta){.key = sizes[i].key, .type = QC_META_U64, .u64 = sizes[i].value}, err));
    QC_TRY(w->add_file(w, "config.json", "{\"model_type\": \"llama\"}", 23, err));
    for (int i = 0; i < N_TENSORS; i++) {
        qc_tensor_use use;
        qc_tensor_info info;
        describe(i, &use, &info);
        if (i != without)
            QC_TRY(w->declare(w, &use, &info, err));
    }
    QC_TRY(w->size(w, &n_bytes, err));
    for (int i = 0; i < N_TENSORS; i++)
        if (i != without)
            QC_TRY(put_tensor(w, i, err));
    return QC_OK;
}

static int write_folder(const char *path, int without, qc_err *err)
{
    const char *temp;
    qc_writer *w = NULL;
    QC_TRY(qc_writer_format_find("onnx")->create(&(qc_writer_options){.path = path}, &w, err));
    int rc = put_all(w, without, err);
    if (rc == QC_OK)
        rc = w->finish(w, &temp, err);
    if (rc == QC_OK)
        return w->publish(w, NULL, err);
    qc_writer_discard(w);
    return rc;
}

static char scratch[64];

static void make_scratch(char path[80])
{
    snprintf(scratch, sizeof scratch, "/tmp/qc-onnx-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(scratch));
    snprintf(path, 80, "%s/m", scratch);
}

static void remove_scratch(void)
{
    char command[96];
    snprintf(command, sizeof command, "rm -r %s", scratch);
    ck_assert_int_eq(system(command), 0);
}

START_TEST(written)
{
    char path[80];
    qc_source *src;
    qc_err err = {0};
    make_scratch(path);
    ck_assert_msg(write_folder(path, -1, &err) == QC_OK, "%s", err.msg);
    ck_assert_msg(qc_onnx_open(path, &src, &err) == QC_OK, "%s", err.msg);
    ck_assert_int_eq(src->n_tensors, N_TENSORS);
    float row[HIDDEN];
    int64_t t = src->find(src, tensors[9]);
    ck_assert_int_eq(src->read_rows(src, t, 20, 1, row, &err), QC_OK);
    for (int c = 0; c < HIDDEN; c++) {
        int at = 20 * 2 + c / 16;
        ck_assert(row[c] == 0.25f * (float)(at + 1) * (float)(((20 * HIDDEN + c) * 7 + 9) % 16 - at % 16));
    }
    qc_source_close(src);
    remove_scratch();
}
END_TEST

START_TEST(tensors_that_the_graph_needs)
{
    for (int i = 0; i < N_TENSORS; i++) {
        char path[80];
        qc_err err = {0};
        make_scratch(path);
        ck_assert_int_eq(write_folder(path, i, &err), QC_E_INPUT);
        ck_assert_msg(strstr(err.msg, "needs a tensor") && strstr(err.msg, tensors[i]), "%s", err.msg);
        ck_assert_int_eq(rmdir(scratch), 0); /* nothing was written */
    }
}
END_TEST

START_TEST(failing_allocations_of_the_writer)
{
    for (long nth = 1;; nth++) {
        char path[80];
        qc_err err = {0};
        make_scratch(path);
        qc_alloc_fail_at(nth);
        int rc = write_folder(path, -1, &err);
        long made = qc_alloc_fail_at(0);
        if (rc == QC_OK) {
            remove_scratch();
            if (made < nth)
                break;
            continue; /* a folder is synced as far as that goes */
        }
        ck_assert_msg(rc == QC_E_RESOURCE && *err.msg, "allocation %ld: %d %s", nth, rc, err.msg);
        ck_assert_msg(rmdir(scratch) == 0, "allocation %ld left files", nth);
        ck_assert_int_lt(nth, 10000);
    }
}
END_TEST

int main(void)
{
    return run_tests("onnx",
                     (test_case[]){{"values of the engine", values_of_the_engine},
                                   {"codes and parts", codes_and_parts},
                                   {"wire format", wire_format},
                                   {"wire format broken", wire_format_broken},
                                   {"bad graphs", bad_graphs},
                                   {"cut off", cut_off},
                                   {"failing allocations", failing_allocations},
                                   {"written", written},
                                   {"tensors that the graph needs", tensors_that_the_graph_needs},
                                   {"failing allocations of the writer", failing_allocations_of_the_writer},
                                   {NULL, NULL}});
}
