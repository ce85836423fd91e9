/* Every grid and many shapes: what is written is what is read, bit for bit, through libqpk and through the
 * source. */
#include "qpk_test.h"

/* Compare tensor `index` of a source with what was written, for many ranges of rows, also ones that begin and
 * end inside tiles. */
static void compare_tensor(const qc_source *src, int64_t index, const qc_tensor_info *info,
                           const qc_code_rows *in)
{
    qc_err err = {0};
    const qc_tensor_info *got = src->info(src, index);
    int64_t rows = qc_tensor_rows(info), cols = qc_tensor_cols(info), n_groups = qc_tensor_n_groups(info);
    ck_assert_uint_eq(got->n_bytes, qc_qpk_tensor_bytes(info));
    ck_assert_int_eq(got->grid.bits, info->grid.bits);
    ck_assert_int_eq(got->grid.symmetric, info->grid.symmetric);
    ck_assert_int_eq(got->grid.group_elems, info->grid.group_elems);
    ck_assert_int_eq(got->grid.scale_dtype, info->grid.scale_dtype);
    qc_code_rows out = alloc_rows(info);
    float *expected = malloc((size_t)(rows * cols) * sizeof *expected),
          *y = malloc((size_t)(rows * cols) * sizeof *y);
    qc_code_rows_decode(in, &info->grid, cols, expected);
    for (int64_t row0 = 0; row0 < rows; row0 += 1 + row0 * 2)
        for (int64_t n = rows - row0; n > 0; n = n / 2) {
            memset(y, 0xAA, (size_t)(n * cols) * sizeof *y);
            ck_assert_msg(src->read_codes(src, index, row0, n, &out, &err) == QC_OK, "%s", err.msg);
            ck_assert_int_eq(out.n_rows, n);
            ck_assert_mem_eq(out.codes, in->codes + row0 * cols, (size_t)(n * cols));
            ck_assert_mem_eq(out.scales, in->scales + row0 * n_groups,
                             (size_t)(n * n_groups) * sizeof(float));
            if (!info->grid.symmetric)
                ck_assert_mem_eq(out.zeros, in->zeros + row0 * n_groups, (size_t)(n * n_groups));
            ck_assert_msg(src->read_rows(src, index, row0, n, y, &err) == QC_OK, "%s", err.msg);
            ck_assert_mem_eq(y, expected + row0 * cols, (size_t)(n * cols) * sizeof *y);
        }
    src->release(src, index, 0, rows);
    free(expected);
    free(y);
    free_rows(&out);
}

/* Tensor number i of the file of one width: all groups x symmetries x scale types x shapes. */
static bool nth_info(int bits, int64_t i, char *name, size_t name_bytes, qc_tensor_info *ret)
{
    static const int64_t groups[] = {16, 24, 32, 64, 128, 1024, INT64_MAX};
    static const qc_dtype scales[] = {QC_DT_F16, QC_DT_BF16, QC_DT_F32};
    static const int64_t shapes[][2] = {{1, 1}, {15, 31}, {16, 32}, {17, 33}, {33, 100}, {5, 1031}};
    int64_t rows = shapes[i % 6][0], cols = shapes[i % 6][1], group = groups[i / 36 % 7];
    snprintf(name, name_bytes, "t%lld", (long long)i);
    *ret = grid_info(name, rows, cols, bits, group > cols ? cols : group, i / 18 % 2, scales[i / 6 % 3]);
    return i < 6 * 3 * 2 * 7;
}

START_TEST(grids)
{
    char name[32], *path = temp_name("roundtrip.qpk");
    qc_err err = {0};
    qc_tensor_info info;
    for (int bits = 1; bits <= 8; bits++) {
        qc_qpk_writer *w = start(path);
        for (int64_t i = 0; nth_info(bits, i, name, sizeof name, &info); i++) {
            qc_code_rows rows = make_rows(&info, (uint64_t)i);
            put_tensor(w, &info, &rows, 32);
            free_rows(&rows);
        }
        finish(w);
        qc_source *src = NULL;
        ck_assert_msg(qc_qpk_open(path, &src, &err) == QC_OK, "%s", err.msg);
        ck_assert_int_eq(src->n_tensors, 252);
        for (int64_t i = 0; nth_info(bits, i, name, sizeof name, &info); i++) {
            qc_code_rows rows = make_rows(&info, (uint64_t)i);
            ck_assert_int_eq(src->find(src, name), i);
            compare_tensor(src, i, &info, &rows);
            free_rows(&rows);
        }
        ck_assert_msg(qc_qpk_check(src, &err) == QC_OK, "%s", err.msg);
        qc_source_close(src);
    }
    unlink(path);
    free(path);
}
END_TEST

START_TEST(dense)
{
    static const qc_dtype types[] = {QC_DT_F32, QC_DT_F16, QC_DT_BF16, QC_DT_F64,  QC_DT_I8,  QC_DT_U8,
                                     QC_DT_I16, QC_DT_U16, QC_DT_I32,  QC_DT_BOOL, QC_DT_I64, QC_DT_F8_E4M3};
    static uint16_t all16[65536];
    for (int i = 0; i < 65536; i++)
        all16[i] = (uint16_t)i;
    qc_err err = {0};
    char *path = temp_name("dense.qpk");
    qc_qpk_writer *w = start(path);
    enum { N_TYPES = sizeof types / sizeof types[0] };
    for (size_t i = 0; i < N_TYPES; i++) {
        int64_t n_elems = 65536 * 16 / qc_dtype_bits(types[i]);
        qc_tensor_info info = {
            .name = qc_dtype_name(types[i]), .dtype = types[i], .n_dims = 2, .shape = {32, n_elems / 32}};
        put_dense(w, &info, all16);
    }
    qc_tensor_info odd = {.name = "scalar", .dtype = QC_DT_F32, .n_dims = 0};
    put_dense(w, &odd, all16);
    odd = (qc_tensor_info){.name = "empty", .dtype = QC_DT_F32, .n_dims = 2, .shape = {0, 5}};
    put_dense(w, &odd, NULL);
    odd = (qc_tensor_info){.name = "rank4", .dtype = QC_DT_BF16, .n_dims = 4, .shape = {2, 3, 4, 5}};
    put_dense(w, &odd, all16);
    finish(w);

    qc_source *src = NULL;
    ck_assert_msg(qc_qpk_open(path, &src, &err) == QC_OK, "%s", err.msg);
    float *y = malloc(sizeof *y * 131072), *expected = malloc(sizeof *y * 131072);
    for (int64_t i = 0; i < src->n_tensors; i++) {
        const qc_tensor_info *info = src->info(src, i);
        int64_t rows = qc_tensor_rows(info), cols = qc_tensor_cols(info);
        ck_assert_int_eq((uintptr_t)src->raw(src, i) % 64, 0);
        ck_assert_mem_eq(src->raw(src, i), all16, (size_t)info->n_bytes);
        int expected_rc = qc_dense_to_f32(info->dtype, all16, rows * cols, expected, &err);
        ck_assert_int_eq(src->read_rows(src, i, 0, rows, y, &err), expected_rc);
        if (expected_rc < 0)
            continue;
        for (int64_t j = 0; j < rows * cols; j++) /* NaNs keep being NaNs, their payload is free */
            if (!(y[j] != y[j] && expected[j] != expected[j]))
                ck_assert_mem_eq(&y[j], &expected[j], sizeof *y);
        if (rows > 3) {
            ck_assert_int_eq(src->read_rows(src, i, 3, 1, y, &err), QC_OK);
            ck_assert(y[0] == expected[3 * cols] || y[0] != y[0]);
        }
        src->release(src, i, 0, rows);
        ck_assert_mem_eq(src->raw(src, i), all16, (size_t)info->n_bytes);
    }
    ck_assert_int_eq(src->read_codes(src, 0, 0, 1, &(qc_code_rows){0}, &err), QC_E_USAGE);
    ck_assert_int_eq(src->read_rows(src, 0, 31, 2, y, &err), QC_E_USAGE);
    qc_source_close(src);
    free(y);
    free(expected);
    unlink(path);
    free(path);
}
END_TEST

/* The scheme of the inputs comes back; files without one need no feature, as those of before. */
START_TEST(activation_scheme)
{
    static const struct {
        int bits;
        int64_t group;
        int rc;
    } acts[] = {{8, 0, QC_OK},        {4, 64, QC_OK},     {0, 0, QC_OK},      {8, 100, QC_E_INPUT},
                {8, 128, QC_E_INPUT}, {9, 0, QC_E_INPUT}, {1, 0, QC_E_INPUT}, {8, -32, QC_E_INPUT}};
    for (size_t i = 0; i < sizeof acts / sizeof acts[0]; i++) {
        char *path = temp_name("acts.qpk");
        qc_err err = {0};
        qc_tensor_info info = grid_info("w", 5, 100, 8, 100, true, QC_DT_F16);
        info.act_bits = acts[i].bits;
        info.act_group = acts[i].group;
        qc_code_rows rows = make_rows(&info, 1);
        qc_qpk_writer *w = start(path);
        if (acts[i].rc < 0) {
            ck_assert_int_eq(qc_qpk_begin_tensor(w, &info, &err), acts[i].rc);
            ck_assert_msg(strstr(err.msg, "tensor 'w': activations of") != NULL, "%s", err.msg);
            qc_qpk_discard(w);
        } else {
            size_t n_bytes;
            qc_source *src = NULL;
            put_tensor(w, &info, &rows, 16);
            finish(w);
            ck_assert_msg(qc_qpk_open(path, &src, &err) == QC_OK, "%s", err.msg);
            ck_assert_int_eq(src->info(src, 0)->act_bits, acts[i].bits);
            ck_assert_int_eq(src->info(src, 0)->act_group, acts[i].group);
            compare_tensor(src, 0, &info, &rows);
            qc_source_close(src);
            char *file = slurp(path, &n_bytes);
            ck_assert_int_eq(file[16], acts[i].bits != 0); /* header: required features */
            qc_free(file);
            unlink(path);
        }
        free_rows(&rows);
        free(path);
    }
}
END_TEST

START_TEST(tables)
{
    qc_err err = {0};
    char *path = temp_name("tables.qpk");
    write_sample(path);
    qc_source *src = NULL;
    ck_assert_msg(qc_source_open(path, &src, &err) == QC_OK, "%s", err.msg);
    ck_assert_str_eq(src->format, "qpk");
    ck_assert_str_eq(src->path, path);
    ck_assert_int_eq(src->n_files, 1);
    ck_assert_str_eq(src->files[0], path);
    ck_assert_int_eq(src->n_tensors, 3);
    ck_assert_int_eq(src->find(src, "lm_head.weight"), src->find(src, "model.embed_tokens.weight"));
    ck_assert_int_eq(src->find(src, "none"), -1);
    char *text = NULL;
    size_t n_bytes = 1;
    ck_assert_int_eq(src->side_file(src, "config.json", &text, &n_bytes, &err), QC_OK);
    ck_assert_uint_eq(n_bytes, strlen(SAMPLE_CONFIG));
    ck_assert_str_eq(text, SAMPLE_CONFIG);
    qc_free(text);
    ck_assert_int_eq(src->side_file(src, "empty.txt", &text, &n_bytes, &err), QC_OK);
    ck_assert_uint_eq(n_bytes, 0);
    ck_assert_str_eq(text, "");
    qc_free(text);
    ck_assert_int_eq(src->side_file(src, "absent.json", &text, &n_bytes, &err), QC_OK);
    ck_assert_ptr_null(text);
    const qpk_file *file = qc_qpk_file(src);
    ck_assert_str_eq(qpk_meta_string(file, "model.family", ""), "qwen3");
    ck_assert_str_eq(qpk_meta_string(file, "note", "x"), "");
    ck_assert_uint_eq(qpk_meta_u64(file, "model.hidden", 0), 64);
    ck_assert_int_eq(qpk_meta_i64(file, "model.bos", 0), -1);
    ck_assert_double_eq(qpk_meta_f64(file, "model.rms_eps", 0), 1e-6);
    ck_assert_double_eq(qpk_meta_f64(file, "model.hidden", 7), 7); /* another type */
    const qpk_meta *eos = qpk_meta_find(file, "model.eos");
    ck_assert_uint_eq(eos->type, QPK_META_I64_ARRAY);
    ck_assert_uint_eq(eos->n_elems, 2);
    ck_assert_int_eq(eos->value.i64_array[1], -7);
    ck_assert_int_eq(qpk_n_aliases(file), 1);
    ck_assert_str_eq(qpk_alias_name(file, 0), "lm_head.weight");
    ck_assert_int_eq(qpk_alias_target(file, 0), 0);
    ck_assert_msg(qc_qpk_check(src, &err) == QC_OK, "%s", err.msg);
    ck_assert(qc_qpk_probe(path));
    qc_source_close(src);

    size_t bytes_a, bytes_b; /* the same bytes a second time */
    char *a = slurp(path, &bytes_a);
    write_sample(path);
    char *b = slurp(path, &bytes_b);
    ck_assert_uint_eq(bytes_a, bytes_b);
    ck_assert_mem_eq(a, b, bytes_a);
    qc_free(a);
    qc_free(b);
    unlink(path);
    free(path);
}
END_TEST

int main(void)
{
    return run_tests("qpk_roundtrip", (test_case[]){{"grids", grids},
                                                    {"dense", dense},
                                                    {"acts", activation_scheme},
                                                    {"tables", tables},
                                                    {NULL, NULL}});
}
