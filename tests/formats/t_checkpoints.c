/* Every test model against what the safetensors library reads from it (checkpoints.txt, made by
 * scripts/make_checkpoint_vectors.py). */
#include "open.h"
#include "qc_alloc.h"
#include "qc_test.h"

#include <zlib.h>

typedef struct vector {
    char folder[64], name[160], dtype[16], shape[64];
    unsigned crc, first, last;
} vector;

static qc_source *open_model(const char *folder)
{
    qc_source *src = NULL;
    qc_err err = {0};
    char name[128];
    snprintf(name, sizeof name, "models/%s", folder);
    ck_assert_msg(qc_source_open(test_data(name), &src, &err) == QC_OK, "%s", err.msg);
    return src;
}

static void shape_text(const qc_tensor_info *info, char *text, size_t n_bytes)
{
    size_t used = 0;
    snprintf(text, n_bytes, "-");
    for (int i = 0; i < info->n_dims; i++)
        used +=
            (size_t)snprintf(text + used, n_bytes - used, "%s%lld", i ? "," : "", (long long)info->shape[i]);
}

/* Values in two pieces, so that row offsets are seen to be right; pages are given back in between. */
static void check_tensor(const qc_source *src, const vector *v)
{
    int64_t i = src->find(src, v->name);
    ck_assert_msg(i >= 0, "%s: %s is missing", v->folder, v->name);
    const qc_tensor_info *info = src->info(src, i);
    char shape[64];
    shape_text(info, shape, sizeof shape);
    ck_assert_str_eq(info->name, v->name);
    ck_assert_str_eq(qc_dtype_name(info->dtype), v->dtype);
    ck_assert_str_eq(shape, v->shape);
    int64_t rows = qc_tensor_rows(info), cols = qc_tensor_cols(info), top = rows / 3;
    float *x = qc_alloc((size_t)(rows * cols), sizeof *x);
    qc_err err = {0};
    ck_assert_msg(src->read_rows(src, i, top, rows - top, x + top * cols, &err) == QC_OK, "%s", err.msg);
    src->release(src, i, top, rows - top);
    ck_assert_msg(src->read_rows(src, i, 0, top, x, &err) == QC_OK, "%s", err.msg);
    src->release(src, i, 0, rows);
    unsigned first, last;
    memcpy(&first, x, 4);
    memcpy(&last, x + rows * cols - 1, 4);
    ck_assert_msg(first == v->first && last == v->last, "%s: %s: %08x %08x", v->folder, v->name, first, last);
    ck_assert_uint_eq(crc32(0, (const Bytef *)x, (uInt)(rows * cols * 4)), v->crc);
    qc_free(x);
}

START_TEST(all_models)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/tests/formats/checkpoints.txt", getenv("QC_SOURCE_ROOT"));
    FILE *f = fopen(path, "r");
    ck_assert_ptr_nonnull(f);
    qc_source *src = NULL;
    char open_folder[64] = "";
    int64_t n_models = 0, n_seen = 0;
    vector v;
    while (fscanf(f, "%63s %159s %15s %63s %x %x %x", v.folder, v.name, v.dtype, v.shape, &v.crc, &v.first,
                  &v.last) == 7) {
        if (strcmp(v.folder, open_folder) != 0) {
            ck_assert(!src || n_seen == src->n_tensors);
            qc_source_close(src);
            src = open_model(v.folder);
            snprintf(open_folder, sizeof open_folder, "%s", v.folder);
            n_models++;
            n_seen = 0;
        }
        check_tensor(src, &v);
        n_seen++;
    }
    ck_assert_int_eq(n_seen, src->n_tensors);
    ck_assert_int_ge(n_models, 15);
    qc_source_close(src);
    fclose(f);
}
END_TEST

START_TEST(side_files)
{
    qc_source *src = open_model("demo-qwen3");
    qc_err err = {0};
    char *text = NULL;
    size_t n_bytes = 0;
    ck_assert_int_eq(src->side_file(src, "config.json", &text, &n_bytes, &err), QC_OK);
    ck_assert_uint_eq(n_bytes, 714);
    ck_assert_uint_eq(strlen(text), 714);
    ck_assert_ptr_nonnull(strstr(text, "Qwen3ForCausalLM"));
    qc_free(text);
    ck_assert_int_eq(src->side_file(src, "no_such.json", &text, &n_bytes, &err), QC_OK);
    ck_assert_ptr_null(text);
    ck_assert_str_eq(src->format, "hf");
    qc_source_close(src);
}
END_TEST

static bool ends_with(const char *s, const char *suffix)
{
    return strlen(s) >= strlen(suffix) && strcmp(s + strlen(s) - strlen(suffix), suffix) == 0;
}

/* The manifest hashes these; their order must not depend on the file system. */
START_TEST(files)
{
    static const char *const expected[] = {"/config.json",
                                           "/tokenizer.json",
                                           "/model.safetensors.index.json",
                                           "/model-00001-of-00003.safetensors",
                                           "/model-00002-of-00003.safetensors",
                                           "/model-00003-of-00003.safetensors"};
    qc_source *src = open_model("tiny/qwen3-untied");
    ck_assert_int_eq(src->n_files, 6);
    for (int i = 0; i < 6; i++)
        ck_assert_msg(ends_with(src->files[i], expected[i]), "%s", src->files[i]);
    qc_source_close(src);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"all models", all_models}, {"side files", side_files}, {"files", files}, {NULL, NULL}};
    return run_tests("checkpoints", cases);
}
