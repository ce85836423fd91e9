/* GGUF: blocks against values of llama.cpp's own library (scripts/make_gguf_vectors.py), a model file of that
 * library against the checkpoint that it was made from, files that must be refused. */
#include "gguf.h"
#include "gguf_file.h"
#include "open.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_fp.h"
#include "qc_math.h"
#include "qc_test.h"

#include <math.h>
#include <unistd.h>

/* ---- blocks ---- */

typedef struct record {
    uint32_t kind, id, n_blocks, n_elems, n_bytes;
    const uint8_t *blocks;
    const float *values;
} record;

typedef struct vectors {
    char *data;
    size_t n_bytes, at;
} vectors;

static vectors load_vectors(void)
{
    vectors v = {0};
    qc_err err = {0};
    ck_assert_msg(qc_file_read(test_data("gguf/blocks.bin"), 1 << 20, &v.data, &v.n_bytes, &err) == QC_OK,
                  "%s", err.msg);
    return v;
}

static bool next(vectors *v, record *ret)
{
    if (v->at == v->n_bytes)
        return false;
    memcpy(ret, v->data + v->at, 5 * sizeof(uint32_t));
    v->at += 5 * sizeof(uint32_t);
    ret->blocks = (const uint8_t *)v->data + v->at;
    v->at += (size_t)ret->n_blocks * ret->n_bytes;
    ret->values = (const float *)(const void *)(v->data + v->at);
    v->at += (size_t)ret->n_blocks * ret->n_elems * sizeof(float);
    ck_assert(v->at <= v->n_bytes);
    return true;
}

/* Same bits, or NaN both. */
static void check_values(const char *name, const float *got, const float *want, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float w;
        memcpy(&w, &want[i], sizeof w);
        if (!(isnan(w) && isnan(got[i])))
            ck_assert_msg(qc_f32_bits(got[i]) == qc_f32_bits(w), "%s, value %lld: %g, not %g", name,
                          (long long)i, (double)got[i], (double)w);
    }
}

START_TEST(decoded_blocks)
{
    vectors v = load_vectors();
    record r;
    int n_types = 0;
    while (next(&v, &r)) {
        if (r.kind != 0)
            continue;
        const qc_block_info *type = qc_block_find(r.id);
        ck_assert(type && type->n_elems == (int)r.n_elems && type->n_bytes == (int)r.n_bytes);
        int64_t n = (int64_t)r.n_blocks * r.n_elems;
        float *got = calloc((size_t)n, sizeof *got);
        qc_block_decode(type, r.blocks, r.n_blocks, got);
        check_values(type->name, got, r.values, n);
        free(got);
        n_types++;
    }
    ck_assert_int_eq(n_types, 8);
    free(v.data);
}
END_TEST

static qc_code_rows rows_of(const qc_block_info *type, int64_t n_elems)
{
    int64_t groups = n_elems / type->grid.group_elems;
    return (qc_code_rows){.codes = calloc((size_t)n_elems, 1),
                          .scales = calloc((size_t)groups, sizeof(float)),
                          .mins = calloc((size_t)groups, sizeof(float)),
                          .supers = calloc((size_t)groups, 2 * sizeof(float)),
                          .subs = calloc((size_t)groups, 2 * sizeof(int16_t))};
}

static void free_rows(qc_code_rows *rows)
{
    free(rows->codes);
    free(rows->scales);
    free(rows->mins);
    free(rows->supers);
    free(rows->subs);
}

/* Codes and scales of the blocks decode to the same values and pack into the same bytes, two rows at once. */
START_TEST(unpacked_and_packed)
{
    vectors v = load_vectors();
    record r;
    while (next(&v, &r)) {
        const qc_block_info *type = qc_block_find(r.id);
        int64_t n = (int64_t)r.n_blocks * r.n_elems;
        qc_code_rows rows = rows_of(type, n);
        float *got = calloc((size_t)n, sizeof *got), *want = calloc((size_t)n, sizeof *want);
        uint8_t *packed = calloc(r.n_blocks, r.n_bytes);
        ck_assert(r.n_blocks % 2 == 0 && qc_block_by_grid(&type->grid) == type);
        qc_block_unpack(type, r.blocks, 2, n / 2, &rows);
        qc_code_rows_decode(&rows, &type->grid, n / 2, got);
        qc_block_decode(type, r.blocks, r.n_blocks, want);
        check_values(type->name, got, want, n);
        qc_block_pack(type, &rows, n / 2, packed);
        ck_assert_msg(memcmp(packed, r.blocks, (size_t)r.n_blocks * r.n_bytes) == 0, "%s", type->name);
        free(packed);
        free(got);
        free(want);
        free_rows(&rows);
    }
    free(v.data);
}
END_TEST

/* A group whose codes all stand for 0 is stored with the scale 0. */
START_TEST(zero_groups)
{
    static const int ids[] = {QC_BLOCK_Q4_0, QC_BLOCK_Q5_0, QC_BLOCK_Q8_0};
    for (size_t i = 0; i < sizeof ids / sizeof ids[0]; i++) {
        const qc_block_info *type = qc_block_find(ids[i]);
        qc_code_rows rows = rows_of(type, 32);
        uint8_t packed[64];
        rows.n_rows = 1;
        rows.scales[0] = 0.5f;
        memset(rows.codes, 1 << (type->grid.bits - 1), 32);
        qc_block_pack(type, &rows, 32, packed);
        ck_assert(packed[0] == 0 && packed[1] == 0);
        rows.codes[31]--;
        qc_block_pack(type, &rows, 32, packed);
        ck_assert(packed[0] == 0 && packed[1] == 0x38);
        free_rows(&rows);
    }
}
END_TEST

/* ---- a model ---- */

static qc_source *open_source(const char *path)
{
    qc_source *src = NULL;
    qc_err err = {0};
    ck_assert_msg(qc_source_open(path, &src, &err) == QC_OK, "%s", err.msg);
    return src;
}

static float *all_values(const qc_source *src, int64_t tensor)
{
    const qc_tensor_info *info = src->info(src, tensor);
    qc_err err = {0};
    float *x = calloc((size_t)qc_tensor_n_elems(info), sizeof *x);
    ck_assert_msg(src->read_rows(src, tensor, 0, qc_tensor_rows(info), x, &err) == QC_OK, "%s", err.msg);
    return x;
}

/* Names, shapes and values are those of the checkpoint; on a grid no value is further off than a step. */
START_TEST(model_values)
{
    qc_source *gguf = open_source(test_data("gguf/tiny-llama.gguf")),
              *hf = open_source(test_data("models/tiny/llama"));
    int n_grid = 0;
    ck_assert_str_eq(gguf->format, "gguf");
    ck_assert_int_eq(gguf->n_tensors, 21);
    for (int64_t i = 0; i < gguf->n_tensors; i++) {
        const qc_tensor_info *info = gguf->info(gguf, i);
        int64_t at = hf->find(hf, info->name);
        ck_assert_msg(at >= 0 && gguf->find(gguf, info->name) == i, "%s", info->name);
        const qc_tensor_info *want_info = hf->info(hf, at);
        ck_assert(info->n_dims == want_info->n_dims &&
                  memcmp(info->shape, want_info->shape, sizeof info->shape) == 0);
        float *got = all_values(gguf, i), *want = all_values(hf, at);
        int64_t n = qc_tensor_n_elems(info);
        bool grid = info->dtype == QC_DT_GRID;
        n_grid += grid;
        for (int64_t k = 0; k < n && grid; k++) {
            int64_t group = k / 32 * 32;
            float most = 0;
            for (int64_t j = group; j < group + 32; j++)
                most = fmaxf(most, fabsf(want[j]));
            ck_assert_msg(fabsf(got[k] - want[k]) <= most / (float)(1 << (info->grid.bits - 1)), "%s",
                          info->name);
        }
        if (!grid)
            check_values(info->name, got, want, n);
        ck_assert((gguf->raw(gguf, i) == NULL) ==
                  (grid || strstr(info->name, "q_proj") != NULL || strstr(info->name, "k_proj") != NULL));
        gguf->release(gguf, i, 0, qc_tensor_rows(info));
        free(got);
        free(want);
    }
    ck_assert_int_eq(n_grid, 4);
    qc_source_close(gguf);
    qc_source_close(hf);
}
END_TEST

/* Codes of rows from the middle of a head are those of the values. */
START_TEST(model_codes)
{
    qc_source *src = open_source(test_data("gguf/tiny-llama.gguf"));
    int64_t i = src->find(src, "model.layers.1.self_attn.q_proj.weight");
    const qc_tensor_info *info = src->info(src, i);
    qc_err err = {0};
    uint8_t codes[7 * 128];
    float scales[7 * 4], got[7 * 128], want[7 * 128];
    qc_code_rows rows = {.codes = codes, .scales = scales};
    ck_assert_int_eq(src->read_codes(src, i, 29, 7, &rows, &err), QC_OK);
    ck_assert_int_eq(src->read_rows(src, i, 29, 7, want, &err), QC_OK);
    ck_assert_int_eq(rows.n_rows, 7);
    qc_code_rows_decode(&rows, &info->grid, 128, got);
    ck_assert_mem_eq(got, want, sizeof got);
    ck_assert_int_eq(src->read_codes(src, src->find(src, "model.norm.weight"), 0, 1, &rows, &err),
                     QC_E_USAGE);
    qc_source_close(src);
}
END_TEST

START_TEST(failing_allocations)
{
    char *path = strdup(test_data("gguf/tiny-llama.gguf"));
    static const char *const names[] = {"config.json", "generation_config.json", "tokenizer_config.json"};
    for (long nth = 1;; nth++) {
        qc_source *src = NULL;
        qc_err err = {0};
        qc_alloc_fail_at(nth);
        int rc = qc_gguf_open(path, &src, &err);
        for (size_t i = 0; i < sizeof names / sizeof names[0] && rc == QC_OK; i++) {
            char *text = NULL;
            size_t n_bytes;
            rc = src->side_file(src, names[i], &text, &n_bytes, &err);
            ck_assert(rc < 0 || (text && n_bytes == strlen(text)));
            qc_free(text);
        }
        long n_allocs = qc_alloc_fail_at(0);
        qc_source_close(src);
        if (rc == QC_OK && n_allocs < nth)
            break;
        ck_assert_msg(rc == QC_E_RESOURCE, "allocation %ld: %s", nth, err.msg);
        ck_assert_int_lt(nth, 3000);
    }
    free(path);
}
END_TEST

/* ---- bad files ---- */

/* A file in the making: what is put in front of the next part can be spoiled. */
typedef struct bad {
    qc_gguf_head head;
    int64_t extra_keys, extra_tensors; /* counts that are too large */
    uint32_t version;                  /* 0: the right one */
    int64_t cut_bytes;                 /* of the end; -1: all behind the head */
} bad;

static void check_ok(int rc)
{
    ck_assert_int_eq(rc, QC_OK);
}

static void put_text(bad *b, const char *key, const char *text)
{
    check_ok(qc_gguf_put_text(&b->head, key, text, NULL));
}

static void put_u32(bad *b, const char *key, int64_t value)
{
    check_ok(qc_gguf_put_int(&b->head, key, QC_GGUF_U32, value, NULL));
}

static void put_model_keys(bad *b)
{
    put_text(b, "general.architecture", "llama");
    put_u32(b, "llama.context_length", 64);
    put_u32(b, "llama.embedding_length", 32);
    put_u32(b, "llama.block_count", 1);
    put_u32(b, "llama.feed_forward_length", 32);
    put_u32(b, "llama.attention.head_count", 2);
    check_ok(qc_gguf_put_f32(&b->head, "llama.attention.layer_norm_rms_epsilon", 1e-5f, NULL));
}

static void put_tensor(bad *b, const char *name, int64_t type, int64_t n, int64_t m)
{
    int64_t ne[2] = {n, m};
    check_ok(qc_gguf_put_tensor(&b->head, name, qc_block_find(type), 2, ne, NULL));
}

/* The file, then the reader's answer. */
static int open_bad(bad *b, qc_err *err)
{
    qc_buf out = {0};
    qc_source *src = NULL;
    char path[] = "/tmp/qc-gguf-XXXXXX";
    check_ok(qc_gguf_head_finish(&b->head, &out, NULL));
    size_t n_head = out.n_bytes;
    char *zeros = calloc(1, b->head.data_bytes + 1);
    check_ok(qc_buf_append(&out, zeros, b->head.data_bytes, NULL));
    free(zeros);
    if (b->version)
        qc_put_le((uint8_t *)out.data + 4, b->version, 4);
    qc_put_le((uint8_t *)out.data + 8, b->head.n_tensors + (uint64_t)b->extra_tensors, 8);
    qc_put_le((uint8_t *)out.data + 16, b->head.n_keys + (uint64_t)b->extra_keys, 8);
    size_t n = b->cut_bytes < 0 ? n_head : out.n_bytes - (size_t)b->cut_bytes;
    int fd = mkstemp(path);
    ck_assert(fd >= 0 && write(fd, out.data, n) == (ssize_t)n && close(fd) == 0);
    int rc = qc_source_open(path, &src, err);
    char *config = NULL;
    size_t n_config;
    if (rc == QC_OK)
        rc = src->side_file(src, "config.json", &config, &n_config, err);
    if (rc == QC_OK) {
        qc_free(config);
        rc = src->side_file(src, "tokenizer.json", &config, &n_config, err);
    }
    qc_free(config);
    qc_source_close(src);
    ck_assert_msg(rc == QC_OK || strncmp(err->msg, path, strlen(path)) == 0, "%s", err->msg);
    unlink(path);
    qc_buf_clear(&out);
    qc_gguf_head_clear(&b->head);
    return rc;
}

static void expect(bad *b, int code, const char *words)
{
    qc_err err = {0};
    int rc = open_bad(b, &err);
    ck_assert_msg(rc == code && strstr(err.msg, words), "%d, %s; expected %d, %s", rc, err.msg, code, words);
}

START_TEST(bad_containers)
{
    bad b = {0};
    put_model_keys(&b);
    put_tensor(&b, "token_embd.weight", QC_BLOCK_F16, 32, 8);
    qc_err err = {0};
    ck_assert_msg(open_bad(&b, &err) == QC_OK, "%s", err.msg);

    expect(&(bad){.version = 1}, QC_E_UNSUPPORTED, "version 1");
    expect(&(bad){.version = 4}, QC_E_UNSUPPORTED, "version 4");
    expect(&(bad){.version = 0x03000000}, QC_E_UNSUPPORTED, "big-endian");
    expect(&(bad){.extra_keys = INT64_MAX}, QC_E_INPUT, "do not fit");
    expect(&(bad){.extra_tensors = INT64_MAX / 8}, QC_E_INPUT, "do not fit");
    expect(&(bad){.extra_tensors = 2}, QC_E_INPUT, "do not fit");

    b = (bad){.extra_keys = 1};
    put_model_keys(&b);
    expect(&b, QC_E_INPUT, "its keys reach beyond the end");
    b = (bad){.extra_tensors = 1};
    put_model_keys(&b);
    expect(&b, QC_E_INPUT, "its tensors reach beyond the end");
    b = (bad){0};
    put_text(&b, "a", "x");
    put_text(&b, "a", "y");
    expect(&b, QC_E_INPUT, "key \"a\" is there twice");
    b = (bad){0};
    put_text(&b, "", "x");
    expect(&b, QC_E_INPUT, "has 0 bytes");
    b = (bad){0};
    check_ok(qc_gguf_put_int(&b.head, "a", (qc_gguf_kind)13, 0, NULL));
    expect(&b, QC_E_INPUT, "13 is no type of a value");
    qc_buf none = {0};
    b = (bad){0};
    check_ok(qc_gguf_put_array(&b.head, "a", QC_GGUF_ARRAY, 1, &none, NULL));
    expect(&b, QC_E_UNSUPPORTED, "arrays of arrays");
    b = (bad){0};
    check_ok(qc_gguf_put_array(&b.head, "a", QC_GGUF_U64, UINT64_MAX / 8 + 1, &none, NULL));
    expect(&b, QC_E_INPUT, "key \"a\": its value reaches beyond the end");
    b = (bad){0};
    check_ok(qc_gguf_put_array(&b.head, "a", QC_GGUF_STRING, 3, &none, NULL));
    expect(&b, QC_E_INPUT, "key \"a\": its value reaches beyond the end");
    b = (bad){0};
    put_u32(&b, "general.alignment", 48);
    expect(&b, QC_E_INPUT, "general.alignment is 48");
    b = (bad){0};
    put_u32(&b, "general.alignment", 0);
    expect(&b, QC_E_INPUT, "general.alignment");
}
END_TEST

START_TEST(bad_tensors)
{
    bad b = {0};
    put_model_keys(&b);
    put_tensor(&b, "output.weight", QC_BLOCK_F16, 32, 8);
    put_tensor(&b, "output.weight", QC_BLOCK_F16, 32, 8);
    expect(&b, QC_E_INPUT, "tensor \"output.weight\" is there twice");
    for (int64_t cut = 1; cut < 3; cut++) {
        b = (bad){.cut_bytes = cut == 1 ? 1 : -1};
        put_model_keys(&b);
        put_tensor(&b, "output.weight", QC_BLOCK_Q8_0, 32, 32);
        expect(&b, QC_E_INPUT, "tensor \"output.weight\" needs bytes");
    }
    b = (bad){0};
    put_model_keys(&b);
    put_tensor(&b, "foo.bar", QC_BLOCK_F16, 32, 8);
    expect(&b, QC_E_UNSUPPORTED, "tensor \"foo.bar\" is not known for architecture llama");
    static const struct {
        int at; /* byte of the tensor's record: 8 of the length, 13 of the name, 4 of the count, 16 of the
                   shape */
        uint64_t value;
        int n_bytes, code;
        const char *words;
    } cases[] = {{0, 1u << 20, 8, QC_E_INPUT, "its tensors reach beyond"},
                 {21, 5, 4, QC_E_INPUT, "has 5 dimensions"},
                 {21, 0, 4, QC_E_INPUT, "has 0 dimensions"},
                 {25, 33, 8, QC_E_INPUT, "rows of 33 values, expected a multiple of 32 for Q8_0"},
                 {25, UINT64_MAX, 8, QC_E_INPUT, "too many elements"},
                 {33, UINT64_C(1) << 60, 8, QC_E_INPUT, "too many elements"},
                 {41, 10, 4, QC_E_UNSUPPORTED, "type Q2_K, which is not read"},
                 {41, 20, 4, QC_E_UNSUPPORTED, "type IQ4_NL, which is not read"},
                 {41, 99, 4, QC_E_UNSUPPORTED, "unknown type 99"},
                 {45, 32, 8, QC_E_INPUT, "begins at byte 32 of the data, expected 0"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        b = (bad){0};
        put_model_keys(&b);
        put_tensor(&b, "output.weight", QC_BLOCK_Q8_0, 32, 8);
        qc_put_le((uint8_t *)b.head.tensors.data + cases[i].at, cases[i].value, cases[i].n_bytes);
        expect(&b, cases[i].code, cases[i].words);
    }
}
END_TEST

START_TEST(bad_models)
{
    bad b = {0};
    put_text(&b, "general.name", "x");
    expect(&b, QC_E_INPUT, "\"general.architecture\" is missing");
    b = (bad){0};
    put_text(&b, "general.architecture", "mamba");
    expect(&b, QC_E_UNSUPPORTED, "\"mamba\" is not supported; expected one of llama, qwen2, qwen3");
    b = (bad){0};
    put_text(&b, "general.type", "adapter");
    expect(&b, QC_E_INPUT, "of type \"adapter\"");
    static const struct {
        const char *key;
        int64_t value;
        int code;
        const char *words;
    } cases[] = {{"split.count", 3, QC_E_UNSUPPORTED, "one of 3 parts"},
                 {"llama.expert_count", 8, QC_E_UNSUPPORTED, "\"llama.expert_count\" is not known"},
                 {"llama.attention.sliding_window", 64, QC_E_UNSUPPORTED, "is not known"},
                 {"llama.attention.key_length", 17, QC_E_UNSUPPORTED, "heads of 17 keys"},
                 {"llama.attention.value_length", 32, QC_E_UNSUPPORTED, "32 values"},
                 {"llama.rope.dimension_count", 8, QC_E_UNSUPPORTED, "8 rotating"},
                 {"llama.rope.freq_base", 10000, QC_E_INPUT, "is not a floating point number"},
                 {"llama.attention.head_count_kv", 0, QC_E_INPUT, "head_count_kv\" is 0, expected 1"},
                 {"tokenizer.ggml.model", 1, QC_E_INPUT, "tokenizer.ggml.model\" is not a string"},
                 {"tokenizer.ggml.eos_token_id", -1, QC_OK, ""}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        b = (bad){0};
        put_model_keys(&b);
        put_u32(&b, cases[i].key, cases[i].value);
        expect(&b, cases[i].code, cases[i].words);
    }
    b = (bad){0};
    put_model_keys(&b);
    put_text(&b, "llama.rope.scaling.type", "longrope");
    expect(&b, QC_E_UNSUPPORTED, "\"longrope\", expected none, linear or yarn");
    b = (bad){0};
    put_model_keys(&b);
    put_tensor(&b, "blk.0.attn_q.weight", QC_BLOCK_F16, 32, 30);
    expect(&b, QC_E_INPUT, "has 30 rows, expected 2 heads of 16");
    b = (bad){0};
    put_text(&b, "general.architecture", "qwen3");
    expect(&b, QC_E_INPUT, "\"qwen3.embedding_length\" is missing");
}
END_TEST

START_TEST(bad_tokenizers)
{
    qc_buf packed = {0};
    bad b = {0};
    put_model_keys(&b);
    put_text(&b, "tokenizer.ggml.model", "llama");
    expect(&b, QC_E_UNSUPPORTED, "of kind \"llama\" can not be rebuilt");
    b = (bad){0};
    put_model_keys(&b);
    put_text(&b, "tokenizer.ggml.model", "gpt2");
    put_text(&b, "tokenizer.ggml.pre", "unheard-of");
    expect(&b, QC_E_UNSUPPORTED, "pre-tokenizer \"unheard-of\"");
    b = (bad){0};
    put_model_keys(&b);
    put_text(&b, "tokenizer.ggml.model", "gpt2");
    put_text(&b, "tokenizer.ggml.pre", "qwen2");
    expect(&b, QC_E_INPUT, "\"tokenizer.ggml.tokens\" is missing");
    for (int turn = 0; turn < 2; turn++) {
        b = (bad){0};
        put_model_keys(&b);
        put_text(&b, "tokenizer.ggml.model", "gpt2");
        put_text(&b, "tokenizer.ggml.pre", "qwen2");
        check_ok(qc_gguf_append_text(&packed, turn ? "\xff" : "a", 1, NULL));
        check_ok(qc_gguf_put_array(&b.head, "tokenizer.ggml.tokens", QC_GGUF_STRING, 1, &packed, NULL));
        if (!turn)
            check_ok(qc_gguf_put_array(&b.head, "tokenizer.ggml.token_type", QC_GGUF_I32, 2, &packed, NULL));
        qc_buf_clear(&packed);
        expect(&b, QC_E_INPUT, turn ? "a token is not well-formed" : "2 entries for 1 tokens");
    }
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"decoded_blocks", decoded_blocks},
                               {"unpacked_and_packed", unpacked_and_packed},
                               {"zero_groups", zero_groups},
                               {"model_values", model_values},
                               {"model_codes", model_codes},
                               {"failing_allocations", failing_allocations},
                               {"bad_containers", bad_containers},
                               {"bad_tensors", bad_tensors},
                               {"bad_models", bad_models},
                               {"bad_tokenizers", bad_tokenizers},
                               {NULL, NULL}};
    return run_tests("gguf", cases);
}
