/* Weights in FP8 with a scale per block: every value as torch computes it. */
#include "open.h"
#include "qc_alloc.h"
#include "qc_json.h"
#include "qc_log.h"
#include "qc_test.h"
#include "safetensors.h"

#include <string.h>

static qc_source *open_fp8(void)
{
    qc_source *src = NULL;
    qc_err err = {0};
    qc_log_set_level(QC_LOG_QUIET);
    ck_assert_msg(qc_source_open(test_data("fp8"), &src, &err) == QC_OK, "%s", err.msg);
    return src;
}

static void check_matrix(const qc_source *src, const qc_st_file *file, const qc_st_tensor *want)
{
    int64_t t = src->find(src, want->info.name), rows = want->info.shape[0], cols = want->info.shape[1];
    size_t n = (size_t)(rows * cols);
    float *expected = qc_alloc(n, sizeof *expected), *got = qc_alloc(n, sizeof *got);
    ck_assert_msg(t >= 0, "%s", want->info.name);
    const qc_tensor_info *info = src->info(src, t);
    ck_assert(info->dtype == QC_DT_BF16 && info->n_dims == 2 && info->shape[0] == rows &&
              info->shape[1] == cols);
    ck_assert_int_eq(qc_dense_to_f32(QC_DT_BF16, file->map.data + want->offset, rows * cols, expected, NULL),
                     QC_OK);
    ck_assert_int_eq(src->read_rows(src, t, 0, rows, got, NULL), QC_OK);
    ck_assert_mem_eq(got, expected, n * sizeof *got);
    for (int64_t row = 0; row < rows; row += 7) { /* one by one, across the border of a block */
        ck_assert_int_eq(src->read_rows(src, t, row, 1, got, NULL), QC_OK);
        ck_assert_mem_eq(got, expected + row * cols, (size_t)cols * sizeof *got);
    }
    src->release(src, t, 0, rows);
    qc_free(expected);
    qc_free(got);
}

START_TEST(values)
{
    qc_source *src = open_fp8();
    qc_st_file file;
    ck_assert_int_eq(qc_st_open(test_data("fp8/values.safetensors"), &file, NULL), QC_OK);
    ck_assert_int_eq(src->n_tensors, file.n_tensors); /* scales are none of their own */
    ck_assert_int_eq(file.n_tensors, 4);
    for (int64_t i = 0; i < file.n_tensors; i++)
        check_matrix(src, &file, &file.tensors[i]);
    ck_assert_ptr_null(src->raw(src, src->find(src, "a.weight")));
    ck_assert_ptr_nonnull(src->raw(src, src->find(src, "d.weight")));
    ck_assert_uint_eq(src->info(src, src->find(src, "a.weight"))->n_bytes, 140 * 300 + 6 * 4);
    qc_st_close(&file);
    qc_source_close(src);
}
END_TEST

/* What is read is not quantized any more, and its config says nothing of it. */
START_TEST(config)
{
    qc_source *src = open_fp8();
    char *text = NULL;
    size_t n_bytes;
    cJSON *doc = NULL;
    ck_assert_int_eq(src->side_file(src, "config.json", &text, &n_bytes, NULL), QC_OK);
    ck_assert_int_eq(qc_json_parse(text, n_bytes, "config.json", true, &doc, NULL), QC_OK);
    ck_assert_ptr_nonnull(qc_json_get(doc, "model_type"));
    ck_assert_ptr_null(qc_json_get(doc, "quantization_config"));
    cJSON_Delete(doc);
    qc_free(text);
    qc_source_close(src);
}
END_TEST

START_TEST(failing_allocations)
{
    qc_source *src = NULL;
    qc_err err;
    qc_log_set_level(QC_LOG_QUIET);
    for (long i = 1;; i++) {
        qc_alloc_fail_at(i);
        int rc = qc_source_open(test_data("fp8"), &src, &err);
        qc_alloc_fail_at(0);
        if (rc == QC_OK)
            break;
        ck_assert_int_eq(rc, QC_E_RESOURCE);
    }
    qc_source_close(src);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"values", values}, {"config", config}, {"failing_allocations", failing_allocations}, {NULL, NULL}};
    return run_tests("hf_view", cases);
}
