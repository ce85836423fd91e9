/* Helpers of the packed-file tests. */
#ifndef QPK_TEST_H
#define QPK_TEST_H

#include "open.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_fp.h"
#include "qc_rng.h"
#include "qc_test.h"
#include "qpk.h"
#include "runtime/qpk.h"

#include <unistd.h>

#define SAMPLE_CONFIG "{\"model_type\": \"qwen3\", \"hidden_size\": 64, \"hidden_size_again_for_zlib\": 64}"

/* Name in a folder of this process; free(). */
static inline char *temp_name(const char *name)
{
    char *path = malloc(4096);
    const char *folder = getenv("TMPDIR");
    snprintf(path, 4096, "%s/qc-%ld-%s", folder ? folder : "/tmp", (long)getpid(), name);
    return path;
}

static inline char *slurp(const char *path, size_t *ret_bytes)
{
    qc_err err = {0};
    char *text = NULL;
    ck_assert_msg(qc_file_read(path, (size_t)1 << 30, &text, ret_bytes, &err) == QC_OK, "%s", err.msg);
    return text;
}

static inline qc_tensor_info grid_info(const char *name, int64_t rows, int64_t cols, int bits, int64_t group,
                                       bool symmetric, qc_dtype scale_dtype)
{
    return (qc_tensor_info){.name = name,
                            .dtype = QC_DT_GRID,
                            .n_dims = 2,
                            .shape = {rows, cols},
                            .grid = {.kind = QC_GRID_AFFINE,
                                     .bits = bits,
                                     .symmetric = symmetric,
                                     .group_elems = group,
                                     .scale_dtype = scale_dtype}};
}

static inline qc_code_rows alloc_rows(const qc_tensor_info *info)
{
    size_t rows = (size_t)qc_tensor_rows(info), cols = (size_t)qc_tensor_cols(info);
    size_t n_groups = (size_t)qc_tensor_n_groups(info);
    qc_code_rows r = {.n_rows = (int64_t)rows,
                      .codes = malloc(rows * cols),
                      .scales = malloc(rows * n_groups * sizeof(float)),
                      .zeros = info->grid.symmetric ? NULL : malloc(rows * n_groups)};
    return r;
}

static inline void free_rows(qc_code_rows *r)
{
    free(r->codes);
    free(r->scales);
    free(r->zeros);
}

/* Random codes and zeros over the whole range, scales exact in their type, of both signs, some zero or
 * subnormal. */
static inline qc_code_rows make_rows(const qc_tensor_info *info, uint64_t seed)
{
    qc_rng rng;
    qc_rng_seed(&rng, seed);
    qc_code_rows r = alloc_rows(info);
    int64_t n = r.n_rows * qc_tensor_cols(info), n_scales = r.n_rows * qc_tensor_n_groups(info);
    uint64_t n_codes = 1u << info->grid.bits;
    for (int64_t i = 0; i < n; i++)
        r.codes[i] = (uint8_t)qc_rng_below(&rng, n_codes);
    for (int64_t i = 0; i < n_scales; i++) {
        float s = (float)qc_rng_normal(&rng) * (i % 11 == 5 ? 1e-6f : 0.01f);
        if (i % 13 == 7)
            s = 0;
        if (info->grid.scale_dtype == QC_DT_F16)
            s = qc_f16_to_f32(qc_f32_to_f16(s));
        if (info->grid.scale_dtype == QC_DT_BF16)
            s = qc_bf16_to_f32(qc_f32_to_bf16(s));
        r.scales[i] = s;
        if (r.zeros)
            r.zeros[i] = (uint8_t)qc_rng_below(&rng, n_codes);
    }
    return r;
}

static inline qc_qpk_writer *start(const char *path)
{
    qc_err err = {0};
    qc_qpk_writer *w = NULL;
    ck_assert_msg(qc_qpk_create(path, true, &w, &err) == QC_OK, "%s", err.msg);
    return w;
}

/* Write a tensor on a grid in calls of `step` rows. */
static inline void put_tensor(qc_qpk_writer *w, const qc_tensor_info *info, const qc_code_rows *rows,
                              int64_t step)
{
    qc_err err = {0};
    int64_t cols = qc_tensor_cols(info), n_groups = qc_tensor_n_groups(info);
    ck_assert_msg(qc_qpk_begin_tensor(w, info, &err) == QC_OK, "%s", err.msg);
    for (int64_t r = 0; r < rows->n_rows; r += step) {
        qc_code_rows part = {.n_rows = rows->n_rows - r < step ? rows->n_rows - r : step,
                             .codes = rows->codes + r * cols,
                             .scales = rows->scales + r * n_groups,
                             .zeros = rows->zeros ? rows->zeros + r * n_groups : NULL};
        ck_assert_msg(qc_qpk_put_codes(w, &part, &err) == QC_OK, "%s", err.msg);
    }
    ck_assert_msg(qc_qpk_end_tensor(w, &err) == QC_OK, "%s", err.msg);
}

static inline void put_dense(qc_qpk_writer *w, const qc_tensor_info *info, const void *data)
{
    qc_err err = {0};
    ck_assert_msg(qc_qpk_begin_tensor(w, info, &err) == QC_OK, "%s", err.msg);
    ck_assert_msg(qc_qpk_put_dense(w, data, qc_tensor_rows(info), &err) == QC_OK, "%s", err.msg);
    ck_assert_msg(qc_qpk_end_tensor(w, &err) == QC_OK, "%s", err.msg);
}

static inline void finish(qc_qpk_writer *w)
{
    qc_err err = {0};
    const char *temp = NULL;
    ck_assert_msg(qc_qpk_finish(w, &temp, &err) == QC_OK, "%s", err.msg);
    ck_assert(qc_path_exists(temp));
    ck_assert_msg(qc_qpk_publish(w, NULL, &err) == QC_OK, "%s", err.msg);
}

/* A small file with every kind of section: embedding (8 bit), a 3-bit asymmetric matrix, a norm. Returns the
 * first failing code; made of fallible calls only, so that the sweep over failing allocations can use it. */
static inline int try_sample(const char *path, qc_err *err)
{
    static const int64_t eos[] = {5, -7};
    static const uint64_t kinds[] = {1, 0, 1};
    static const double factors[] = {0.5, -2.25};
    static uint8_t codes[40 * 64], zeros[40 * 2];
    static float scales[40 * 2];
    static uint16_t norm[64];
    for (int i = 0; i < 40 * 64; i++)
        codes[i] = (uint8_t)(i * 7 + i / 64);
    for (int i = 0; i < 80; i++) {
        scales[i] = (float)(i + 1) / 64;
        zeros[i] = (uint8_t)(i % 8);
    }
    for (int i = 0; i < 64; i++)
        norm[i] = (uint16_t)(0x3f80 + i);
    qc_tensor_info embed = grid_info("model.embed_tokens.weight", 40, 64, 8, 64, true, QC_DT_F32);
    qc_tensor_info linear = grid_info("model.layers.0.mlp.up_proj.weight", 19, 61, 3, 32, false, QC_DT_F16);
    qc_tensor_info vector = {.name = "model.norm.weight", .dtype = QC_DT_BF16, .n_dims = 1, .shape = {64}};
    qc_code_rows rows = {.n_rows = 40, .codes = codes, .scales = scales, .zeros = zeros};
    qc_qpk_writer *w = NULL;
    const char *temp = NULL;
    QC_TRY(qc_qpk_create(path, true, &w, err));
    int rc = qc_qpk_add_meta_string(w, "model.family", "qwen3", err);
    if (rc == QC_OK && (rc = qc_qpk_add_meta_u64(w, "model.hidden", 64, err)) == QC_OK &&
        (rc = qc_qpk_add_meta_i64(w, "model.bos", -1, err)) == QC_OK &&
        (rc = qc_qpk_add_meta_f64(w, "model.rms_eps", 1e-6, err)) == QC_OK &&
        (rc = qc_qpk_add_meta_i64_array(w, "model.eos", eos, 2, err)) == QC_OK &&
        (rc = qc_qpk_add_meta_u64_array(w, "kinds", kinds, 3, err)) == QC_OK &&
        (rc = qc_qpk_add_meta_f64_array(w, "factors", factors, 2, err)) == QC_OK &&
        (rc = qc_qpk_add_meta_string(w, "note", "", err)) == QC_OK &&
        (rc = qc_qpk_add_file(w, "config.json", SAMPLE_CONFIG, strlen(SAMPLE_CONFIG), err)) == QC_OK &&
        (rc = qc_qpk_begin_tensor(w, &embed, err)) == QC_OK &&
        (rc = qc_qpk_put_codes(w, &rows, err)) == QC_OK && (rc = qc_qpk_end_tensor(w, err)) == QC_OK &&
        (rc = qc_qpk_begin_tensor(w, &linear, err)) == QC_OK) {
        for (int i = 0; i < 40 * 64; i++)
            codes[i] &= 7;
        rows.n_rows = 19;
        if ((rc = qc_qpk_put_codes(w, &rows, err)) == QC_OK && (rc = qc_qpk_end_tensor(w, err)) == QC_OK &&
            (rc = qc_qpk_begin_tensor(w, &vector, err)) == QC_OK &&
            (rc = qc_qpk_put_dense(w, norm, 1, err)) == QC_OK && (rc = qc_qpk_end_tensor(w, err)) == QC_OK &&
            (rc = qc_qpk_add_alias(w, "lm_head.weight", "model.embed_tokens.weight", err)) == QC_OK &&
            (rc = qc_qpk_add_file(w, "empty.txt", "", 0, err)) == QC_OK)
            rc = qc_qpk_finish(w, &temp, err);
    }
    if (rc == QC_OK)
        return qc_qpk_publish(w, NULL, err);
    qc_qpk_discard(w);
    return rc;
}

static inline void write_sample(const char *path)
{
    qc_err err = {0};
    ck_assert_msg(try_sample(path, &err) == QC_OK, "%s", err.msg);
}

#endif
