/* The format document and the code say the same: its worked example is what the writer writes, and a reader
 * in another language, made from the document alone, gets the same values out of our files. */
#include "qpk_test.h"

#include <zlib.h>

static char *source_path(const char *name)
{
    char *path = malloc(4096);
    const char *root = getenv("QC_SOURCE_ROOT");
    snprintf(path, 4096, "%s/%s", root ? root : ".", name);
    return path;
}

/* Bytes of the dump "    OOOOOOOO  xx xx ..." (16 a line) in the document; what is not listed is zero. */
static size_t read_dump(const char *text, uint8_t *bytes, size_t cap_bytes)
{
    size_t n_lines = 0;
    for (const char *line = text; line; line = strchr(line, '\n')) {
        unsigned offset, b[16];
        line += *line == '\n';
        if (strncmp(line, "    ", 4) == 0 &&
            sscanf(line + 4, "%8x  %2x %2x %2x %2x %2x %2x %2x %2x %2x %2x %2x %2x %2x %2x %2x %2x", &offset,
                   &b[0], &b[1], &b[2], &b[3], &b[4], &b[5], &b[6], &b[7], &b[8], &b[9], &b[10], &b[11],
                   &b[12], &b[13], &b[14], &b[15]) == 17) {
            ck_assert_uint_le(offset + 16, cap_bytes);
            for (int i = 0; i < 16; i++)
                bytes[offset + (unsigned)i] = (uint8_t)b[i];
            n_lines++;
        }
    }
    return n_lines;
}

static void write_example(const char *path)
{
    qc_err err = {0};
    uint8_t codes[] = {1, 2, 3, 4, 5, 6, 7, 0, 7, 0, 7, 0}, zeros[] = {4, 3, 0, 7};
    float scales[] = {0.5f, -0.25f, 1, 2};
    qc_tensor_info info = grid_info("w", 2, 6, 3, 4, false, QC_DT_F16);
    qc_code_rows rows = {.n_rows = 2, .codes = codes, .scales = scales, .zeros = zeros};
    qc_qpk_writer *w = start(path);
    ck_assert_int_eq(qc_qpk_add_meta_u64(w, "model.hidden", 6, &err), QC_OK);
    ck_assert_int_eq(qc_qpk_add_file(w, "a.txt", "hi", 2, &err), QC_OK);
    put_tensor(w, &info, &rows, 16);
    ck_assert_int_eq(qc_qpk_add_alias(w, "v", "w", &err), QC_OK);
    finish(w);
}

START_TEST(worked_example)
{
    enum { EXAMPLE_BYTES = 12688 };
    static uint8_t expected[EXAMPLE_BYTES];
    size_t n_bytes;
    char *doc = source_path("docs/formats/qpk.md"), *text = slurp(doc, &n_bytes),
         *path = temp_name("example.qpk");
    ck_assert_uint_eq(read_dump(text, expected, sizeof expected), 36);
    ck_assert_ptr_nonnull(strstr(text, "The whole file, 12688 bytes"));
    qc_free(text);
    write_example(path);
    char *got = slurp(path, &n_bytes);
    ck_assert_uint_eq(n_bytes, EXAMPLE_BYTES);
    for (size_t i = 0; i < n_bytes; i++)
        ck_assert_msg((uint8_t)got[i] == expected[i], "byte 0x%zx is %02x, the document says %02x", i,
                      (uint8_t)got[i], expected[i]);
    qc_free(got);
    qpk_file *file = NULL;
    ck_assert_int_eq(qpk_open_memory(expected, sizeof expected, "example", &file, NULL, 0), QPK_OK);
    float y[6], row0[] = {-1.5f, -1, -0.5f, 0, -0.5f, -0.75f};
    ck_assert_int_eq(qpk_dequantize_rows(file, qpk_find(file, "v"), 0, 1, y, NULL, 0), QPK_OK);
    ck_assert_mem_eq(y, row0, sizeof y);
    qpk_close(file);
    unlink(path);
    free(path);
    free(doc);
}
END_TEST

/* Output of read_qpk.py for a file; free(). */
static char *run_python(const char *path)
{
    char command[9000], *script = source_path("scripts/read_qpk.py"), *text = calloc(1, 1 << 20);
    snprintf(command, sizeof command, "python3 '%s' '%s'", script, path);
    FILE *p = popen(command, "r");
    ck_assert_ptr_nonnull(p);
    text[fread(text, 1, (1 << 20) - 1, p)] = 0;
    ck_assert_int_eq(pclose(p), 0);
    free(script);
    return text;
}

static void expect_line(const char *text, const char *kind, const char *name, uint32_t crc)
{
    char line[256];
    snprintf(line, sizeof line, "%s %s %08x\n", kind, name, crc);
    ck_assert_msg(strstr(text, line) != NULL, "no line '%s' in:\n%s", line, text);
}

static void compare_with_python(const char *path)
{
    qc_err err = {0};
    qc_source *src = NULL;
    char *text = run_python(path);
    ck_assert_msg(qc_qpk_open(path, &src, &err) == QC_OK, "%s", err.msg);
    const qpk_file *file = qc_qpk_file(src);
    for (int64_t i = 0; i < src->n_tensors; i++) {
        const qc_tensor_info *info = src->info(src, i);
        size_t n_bytes = (size_t)qc_tensor_n_elems(info) * sizeof(float);
        float *y = malloc(n_bytes);
        ck_assert_msg(src->read_rows(src, i, 0, qc_tensor_rows(info), y, &err) == QC_OK, "%s", err.msg);
        expect_line(text, "tensor", info->name, (uint32_t)crc32_z(0, (uint8_t *)y, n_bytes));
        for (int64_t a = 0; a < qpk_n_aliases(file); a++)
            if (qpk_alias_target(file, a) == i)
                expect_line(text, "tensor", qpk_alias_name(file, a),
                            (uint32_t)crc32_z(0, (uint8_t *)y, n_bytes));
        free(y);
    }
    for (int64_t i = 0; i < qpk_n_files(file); i++) {
        const qpk_side_file *s = qpk_file_at(file, i);
        uint8_t *raw = malloc(s->raw_bytes + 1);
        ck_assert_int_eq(qpk_file_read(file, i, raw, NULL, 0), QPK_OK);
        expect_line(text, "file", s->name, (uint32_t)crc32_z(0, raw, s->raw_bytes));
        free(raw);
    }
    qc_source_close(src);
    free(text);
}

START_TEST(python_reader)
{
    char *path = temp_name("python.qpk");
    write_sample(path);
    compare_with_python(path);
    char *text = run_python(path);
    ck_assert_ptr_nonnull(strstr(text, "meta model.family qwen3\n"));
    ck_assert_ptr_nonnull(strstr(text, "meta model.bos -1\n"));
    ck_assert_ptr_nonnull(strstr(text, "meta model.rms_eps 1e-06\n"));
    ck_assert_ptr_nonnull(strstr(text, "meta model.eos [5, -7]\n"));
    ck_assert_ptr_nonnull(strstr(text, "meta factors [0.5, -2.25]\n"));
    free(text);

    qc_qpk_writer *w =
        start(path); /* every width, both symmetries, all scale types, groups inside and over blocks */
    static const qc_dtype scale_types[] = {QC_DT_F16, QC_DT_BF16, QC_DT_F32};
    static const int64_t groups[] = {16, 32, 77, 64};
    char name[64];
    for (int i = 0; i < 48; i++) {
        int bits = i % 8 + 1;
        snprintf(name, sizeof name, "t%d", i);
        qc_tensor_info info =
            grid_info(name, 16 + i % 3, 77, bits, groups[i / 12], (i / 3) % 2, scale_types[i % 3]);
        qc_code_rows rows = make_rows(&info, (uint64_t)i);
        put_tensor(w, &info, &rows, 16);
        free_rows(&rows);
    }
    static const qc_dtype dense_types[] = {QC_DT_F32, QC_DT_F16, QC_DT_BF16, QC_DT_F64, QC_DT_I8,
                                           QC_DT_U8,  QC_DT_I16, QC_DT_U16,  QC_DT_I32};
    uint8_t data[512];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(i * 37 % 59 + (i % 8 == 7 ? 3 : 0)); /* no NaN, no infinity in any type */
    for (size_t i = 0; i < sizeof dense_types / sizeof dense_types[0]; i++) {
        qc_tensor_info info = {
            .name = qc_dtype_name(dense_types[i]), .dtype = dense_types[i], .n_dims = 3, .shape = {2, 3, 5}};
        put_dense(w, &info, data);
    }
    finish(w);
    compare_with_python(path);
    unlink(path);
    free(path);
}
END_TEST

int main(void)
{
    return run_tests(
        "qpk_document",
        (test_case[]){{"worked example", worked_example}, {"python reader", python_reader}, {NULL, NULL}});
}
