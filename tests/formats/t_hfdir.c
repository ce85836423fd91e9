/* Checkpoint folders made on the spot: which files belong, what the index must say, what is refused. Case ids
 * are those of the list of trouble cases. */
#include "open.h"
#include "qc_alloc.h"
#include "qc_log.h"
#include "qc_test.h"

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[64]; /* of the running test */
static char log_path[80];

static void remove_folder(const char *path)
{
    DIR *d = opendir(path);
    ck_assert_ptr_nonnull(d);
    struct dirent *e;
    while ((e = readdir(d))) {
        char name[512];
        snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            unlink(name);
    }
    closedir(d);
    rmdir(path);
}

static void setup(void)
{
    snprintf(folder, sizeof folder, "/tmp/qc_hfdir_XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(log_path, sizeof log_path, "%s.log", folder);
    ck_assert_ptr_nonnull(freopen(log_path, "w", stderr));
}

static void teardown(void)
{
    chmod(folder, 0700);
    remove_folder(folder);
    unlink(log_path);
}

static const char *in_folder(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void put(const char *name, const void *data, size_t n_bytes)
{
    FILE *f = fopen(in_folder(name), "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(data, 1, n_bytes, f), n_bytes);
    fclose(f);
}

static void put_text(const char *name, const char *text)
{
    put(name, text, strlen(text));
}

/* A safetensors file of tensors given as "NAME DTYPE SHAPE;NAME DTYPE SHAPE"; data are zeros unless given. */
static void put_tensors(const char *file, const char *list, const void *data)
{
    char header[4096] = "{", text[1024], *rest, *item;
    size_t used = 1, end = 0;
    snprintf(text, sizeof text, "%s", list);
    for (item = strtok_r(text, ";", &rest); item; item = strtok_r(NULL, ";", &rest)) {
        char name[128], dtype[16], shape[64];
        ck_assert_int_eq(sscanf(item, "%127s %15s %63s", name, dtype, shape), 3);
        size_t n = 1, bits = (size_t)qc_dtype_bits(qc_dtype_from_name(dtype));
        for (const char *p = shape; p; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL)
            n *= strtoul(p, NULL, 10);
        used += (size_t)snprintf(header + used, sizeof header - used,
                                 "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                                 used > 1 ? "," : "", name, dtype, shape, end, end + n * bits / 8);
        end += n * bits / 8;
    }
    header[used++] = '}';
    uint8_t *bytes = calloc(1, 8 + used + end);
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(used >> (8 * i));
    memcpy(bytes + 8, header, used);
    if (data)
        memcpy(bytes + 8 + used, data, end);
    put(file, bytes, 8 + used + end);
    free(bytes);
}

static void put_index(const char *weight_map, const char *total_size)
{
    char text[4096];
    snprintf(text, sizeof text, "{\"metadata\":{\"total_size\":%s},\"weight_map\":{%s}}", total_size,
             weight_map);
    put_text("model.safetensors.index.json", text);
}

#define TWO_MAP "\"a\":\"model-1.safetensors\",\"b\":\"model-2.safetensors\""

static void put_two_shards(void)
{
    put_text("config.json", "{\"model_type\":\"qwen3\"}");
    put_tensors("model-1.safetensors", "a F32 2,3", NULL);
    put_tensors("model-2.safetensors", "b F32 4", NULL);
    put_index(TWO_MAP, "40");
}

static qc_source *must_open(void)
{
    qc_source *src = NULL;
    qc_err err = {0};
    ck_assert_msg(qc_source_open(folder, &src, &err) == QC_OK, "%s", err.msg);
    return src;
}

static void must_fail(int code, const char *message)
{
    qc_source *src = NULL;
    qc_err err = {0};
    int rc = qc_source_open(folder, &src, &err);
    ck_assert_msg(rc == code && src == NULL, "code %d: %s", rc, err.msg);
    ck_assert_msg(strstr(err.msg, message) != NULL, "%s", err.msg);
    ck_assert_msg(strstr(err.msg, folder) != NULL, "%s", err.msg);
}

/* What was logged so far. */
static const char *logged(void)
{
    static char text[8192];
    fflush(stderr);
    FILE *f = fopen(log_path, "r");
    ck_assert_ptr_nonnull(f);
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    fclose(f);
    return text;
}

static int n_lines(const char *text)
{
    int n = 0;
    for (; *text; text++)
        n += *text == '\n';
    return n;
}

START_TEST(single_file)
{
    put_tensors("model.safetensors", "a F32 2,3;b I8 4", NULL);
    put_text("config.json", "{}");
    qc_source *src = must_open();
    ck_assert_int_eq(src->n_tensors, 2);
    ck_assert_int_eq(src->find(src, "b"), 1);
    ck_assert_int_eq(src->find(src, "c"), -1);
    ck_assert_str_eq(src->path, folder);
    ck_assert_str_eq(logged(), "");
    qc_source_close(src);
}
END_TEST

START_TEST(sharded)
{
    put_two_shards();
    qc_source *src = must_open();
    ck_assert_int_eq(src->n_tensors, 2);
    ck_assert_str_eq(src->info(src, src->find(src, "b"))->name, "b");
    ck_assert_str_eq(logged(), "");
    qc_source_close(src);
    put_index(TWO_MAP, "40.0");
    qc_source_close(must_open());
    ck_assert_str_eq(logged(), "");
    put_index(TWO_MAP, "41");
    qc_source_close(must_open());
    ck_assert_ptr_nonnull(strstr(logged(), "total_size is 41, the tensors have 40 bytes"));
}
END_TEST

START_TEST(no_metadata_in_index)
{
    put_two_shards();
    put_text("model.safetensors.index.json", "{\"weight_map\":{" TWO_MAP "}}");
    qc_source_close(must_open());
    ck_assert_str_eq(logged(), "");
}
END_TEST

START_TEST(s5_missing_shards)
{
    put_two_shards();
    unlink(in_folder("model-1.safetensors"));
    unlink(in_folder("model-2.safetensors"));
    must_fail(
        QC_E_INPUT,
        "missing although model.safetensors.index.json names them: model-1.safetensors, model-2.safetensors");
    ck_assert_int_eq(symlink("nowhere", in_folder("model-1.safetensors")), 0);
    must_fail(QC_E_INPUT, "model-1.safetensors (dangling link), model-2.safetensors");
}
END_TEST

START_TEST(s5_many_missing)
{
    char map[4000] = "";
    size_t used = 0;
    for (int i = 0; i < 70; i++)
        used += (size_t)snprintf(map + used, sizeof map - used,
                                 "%s\"t%d\":\"model-%05d-of-00070.safetensors\"", i ? "," : "", i, i);
    put_index(map, "1");
    must_fail(QC_E_INPUT, "model-00000-of-00070.safetensors, model-00001-of-00070.safetensors");
    must_fail(QC_E_INPUT, " more");
}
END_TEST

START_TEST(single_file_dangling)
{
    ck_assert_int_eq(symlink("nowhere", in_folder("model.safetensors")), 0);
    must_fail(QC_E_INPUT, "missing: model.safetensors (dangling link)");
}
END_TEST

START_TEST(links_are_followed)
{
    put_two_shards();
    char target[512];
    snprintf(target, sizeof target, "%s.blob", folder);
    ck_assert_int_eq(rename(in_folder("model-1.safetensors"), target), 0);
    ck_assert_int_eq(symlink(target, in_folder("model-1.safetensors")), 0);
    qc_source_close(must_open());
    unlink(target);
}
END_TEST

START_TEST(s6_not_in_index)
{
    put_two_shards();
    put_tensors("model-2.safetensors", "b F32 4;extra F32 1", NULL);
    qc_source *src = must_open();
    ck_assert_int_ge(src->find(src, "extra"), 0);
    ck_assert_ptr_nonnull(
        strstr(logged(), "index.json and headers disagree: 1 tensors are not in the index: extra"));
    qc_source_close(src);
}
END_TEST

/* A hostile name must not break out of its line. */
START_TEST(newline_in_name)
{
    put_two_shards();
    put_tensors("model-2.safetensors", "b F32 4;ex\\ntra F32 1", NULL);
    qc_source_close(must_open());
    ck_assert_ptr_nonnull(strstr(logged(), "not in the index: ex\\x0atra"));
    ck_assert_int_eq(n_lines(logged()), 2); /* the other is about total_size */
}
END_TEST

START_TEST(s6_other_shard)
{
    put_two_shards();
    put_index("\"a\":\"model-2.safetensors\",\"b\":\"model-1.safetensors\"", "40");
    qc_source_close(must_open());
    ck_assert_ptr_nonnull(strstr(logged(), "2 tensors are in another shard: a, b"));
}
END_TEST

START_TEST(s6_nowhere)
{
    put_two_shards();
    put_index(TWO_MAP ",\"c\":\"model-1.safetensors\"", "40");
    must_fail(QC_E_INPUT, "headers disagree: 1 tensors of the index are in no shard: c");
}
END_TEST

START_TEST(in_two_shards)
{
    put_two_shards();
    put_tensors("model-2.safetensors", "b F32 4;a F32 2,3", NULL);
    must_fail(QC_E_INPUT, "tensor \"a\" is in model-1.safetensors and in model-2.safetensors");
}
END_TEST

START_TEST(s7_s8_strays)
{
    put_two_shards();
    put_tensors("model.safetensors", "zz F32 1", NULL);
    put_tensors("consolidated.safetensors", "yy F32 1", NULL);
    qc_source *src = must_open();
    ck_assert_int_eq(src->n_tensors, 2);
    ck_assert_ptr_nonnull(strstr(logged(), "ignored: consolidated.safetensors, model.safetensors"));
    ck_assert_int_eq(n_lines(logged()), 1);
    qc_source_close(src);
}
END_TEST

START_TEST(s8_only_other_names)
{
    put_tensors("consolidated.safetensors", "yy F32 1", NULL);
    must_fail(QC_E_UNSUPPORTED, "weights under other names are not supported (consolidated.safetensors)");
    put_tensors("model-00001-of-00002.safetensors", "yy F32 1", NULL);
    must_fail(
        QC_E_INPUT,
        "model.safetensors.index.json is missing, but there are shards (model-00001-of-00002.safetensors)");
}
END_TEST

START_TEST(no_safetensors)
{
    must_fail(QC_E_INPUT, "no checkpoint: neither model.safetensors nor model.safetensors.index.json");
    put_text("pytorch_model.bin", "x");
    must_fail(QC_E_UNSUPPORTED, "only weights of other kinds (pytorch_model.bin)");
}
END_TEST

typedef struct text_case {
    const char *text, *message;
    int code;
} text_case;

static const text_case bad_index[] = {
    {"", "empty file", QC_E_INPUT},
    {"{", "syntax error", QC_E_INPUT},
    {"[]", "weight_map is missing, empty or no object", QC_E_INPUT},
    {"{\"weight_map\":{}}", "weight_map is missing, empty or no object", QC_E_INPUT},
    {"{\"weight_map\":[\"a\"]}", "weight_map is missing, empty or no object", QC_E_INPUT},
    {"{\"weight_map\":{\"a\":1}}", "value of \"a\" is no file name", QC_E_INPUT},
    {"{\"weight_map\":{\"a\":null}}", "value of \"a\" is no file name", QC_E_INPUT},
    {"{\"weight_map\":{\"a\":\"../model-1.safetensors\"}}", "no plain name of a .safetensors file",
     QC_E_INPUT},
    {"{\"weight_map\":{\"a\":\"/etc/x.safetensors\"}}", "no plain name", QC_E_INPUT},
    {"{\"weight_map\":{\"a\":\"sub\\\\x.safetensors\"}}", "no plain name", QC_E_INPUT},
    {"{\"weight_map\":{\"a\":\"model-1.bin\"}}", "no plain name", QC_E_INPUT},
    {"{\"weight_map\":{\"a\":\"model-1.safetensors\",\"a\":\"model-2.safetensors\"}}", "duplicate name \"a\"",
     QC_E_INPUT},
};

START_TEST(bad_indexes)
{
    put_two_shards();
    put_text("model.safetensors.index.json", bad_index[_i].text);
    must_fail(bad_index[_i].code, bad_index[_i].message);
}
END_TEST

START_TEST(broken_shard)
{
    put_two_shards();
    ck_assert_int_eq(truncate(in_folder("model-2.safetensors"), 70), 0);
    must_fail(QC_E_INPUT, "model-2.safetensors: file is truncated");
    put_text("model-2.safetensors", "");
    must_fail(QC_E_INPUT, "model-2.safetensors: 0 bytes are no safetensors file");
    unlink(in_folder("model-2.safetensors"));
    ck_assert_int_eq(mkdir(in_folder("model-2.safetensors"), 0700), 0);
    must_fail(QC_E_INPUT, "model-2.safetensors: is a folder");
    rmdir(in_folder("model-2.safetensors"));
    ck_assert_int_eq(mkfifo(in_folder("model-2.safetensors"), 0600), 0);
    must_fail(QC_E_INPUT, "model-2.safetensors: is not a regular file");
}
END_TEST

/* O-7 and S-11: config.json names the method. */
static const text_case quantized_config[] = {
    {"{\"quantization_config\":{\"quant_method\":\"gptq\",\"bits\":4}}",
     "config.json says that the checkpoint is gptq, but no tensor of it is packed", QC_E_INPUT},
    {"{\"text_config\":{\"quantization_config\":{\"quant_method\":\"fp8\"}}}",
     "(quantization_config, method fp8;", QC_E_UNSUPPORTED},
    {"{\"compression_config\":{\"quant_method\":\"compressed-tensors\"}}",
     "config.json: format (none) of compressed-tensors is not read", QC_E_UNSUPPORTED},
    {"{\"quantization\":{\"group_size\":64,\"bits\":4}}", "(quantization, method not named;",
     QC_E_UNSUPPORTED},
    {"{\"quantization_config\":", "config.json:1:", QC_E_INPUT},
    {"{\"quantization_config\":null}", NULL, QC_OK},
    {"{\"text_config\":{\"quantization_config\":null},\"hidden_size\":8}", NULL, QC_OK},
};

START_TEST(o7_configs)
{
    const text_case *c = &quantized_config[_i];
    put_tensors("model.safetensors", "a.weight BF16 2,3", NULL);
    put_text("config.json", c->text);
    if (c->code == QC_OK)
        qc_source_close(must_open());
    else
        must_fail(c->code, c->message);
}
END_TEST

static const text_case quantized_tensors[] = {
    {"l.q_proj.qweight I32 2,4;l.q_proj.scales F16 1,4", "(GPTQ or AWQ, by tensor \"l.q_proj.qweight\")",
     QC_E_UNSUPPORTED},
    {"l.q_proj.scales F16 1,4;l.q_proj.qweight I32 2,4", "by tensor \"l.q_proj.scales\"", QC_E_UNSUPPORTED},
    {"l.q_proj.weight_packed I32 2,4", "(compressed-tensors", QC_E_UNSUPPORTED},
    {"l.q_proj.weight F8_E4M3 200,300;l.q_proj.weight_scale_inv F32 2,3",
     "\"l.q_proj.weight\" holds F8_E4M3, but config.json does not say how it is scaled", QC_E_UNSUPPORTED},
    {"l.q_proj.weight F8_E5M2 4,4", "(F8_E5M2 weights", QC_E_UNSUPPORTED},
    {"l.q_proj.weight_scale_inv F32 2,3", "is a scale, but there is no F8_E4M3 weight for it", QC_E_INPUT},
    {"l.q_proj.weight I8 4,4", "(I8 weights without a description, by tensor \"l.q_proj.weight\")",
     QC_E_UNSUPPORTED},
    {"l.q_proj.weight U8 4,1;l.q_proj.weight.absmax F32 1", "(U8 weights", QC_E_UNSUPPORTED},
    {"l.q_proj.SCB F32 4", "(bitsandbytes INT8", QC_E_UNSUPPORTED},
    {"l.mlp.gate_up_proj_blocks U8 2,2", "(MXFP4", QC_E_UNSUPPORTED},
    {"l.q_proj.weight F4 4,4", "(F4 weights", QC_E_UNSUPPORTED},
    {"l.position_ids I64 8;l.mask BOOL 4,4;l.norm.weight F32 4", NULL, QC_OK},
};

START_TEST(o7_tensors)
{
    const text_case *c = &quantized_tensors[_i];
    put_tensors("model.safetensors", c->text, NULL);
    if (c->code == QC_OK)
        qc_source_close(must_open());
    else
        must_fail(c->code, c->message);
}
END_TEST

/* O-8: nothing is written beside the source. (Root may write anyway, hence the look at the folder.) */
START_TEST(o8_read_only)
{
    put_two_shards();
    chmod(folder, 0500);
    qc_source *src = must_open();
    float x[6];
    qc_err err = {0};
    ck_assert_int_eq(src->read_rows(src, 0, 0, 2, x, &err), QC_OK);
    qc_source_close(src);
    int n = 0;
    DIR *d = opendir(folder);
    while (readdir(d))
        n++;
    closedir(d);
    ck_assert_int_eq(n, 2 + 4);
}
END_TEST

/* S-12: every bit pattern of BF16, as stored bytes and as float32; odd offset in the file. */
START_TEST(s12_all_bf16)
{
    uint8_t *data = malloc(1 + 2 * 65536);
    data[0] = 1;
    for (unsigned i = 0; i < 65536; i++) {
        data[1 + 2 * i] = (uint8_t)i;
        data[2 + 2 * i] = (uint8_t)(i >> 8);
    }
    put_tensors("model.safetensors", "odd U8 1;x BF16 256,256", data);
    qc_source *src = must_open();
    int64_t i = src->find(src, "x");
    ck_assert_int_eq(memcmp(src->raw(src, i), data + 1, 2 * 65536), 0);
    float *x = malloc(65536 * sizeof *x);
    qc_err err = {0};
    ck_assert_int_eq(src->read_rows(src, i, 0, 256, x, &err), QC_OK);
    for (uint32_t k = 0; k < 65536; k++) {
        uint32_t bits;
        memcpy(&bits, &x[k], 4);
        ck_assert_uint_eq(bits, k << 16);
    }
    free(x);
    free(data);
    qc_source_close(src);
}
END_TEST

/* Every finite F16 value by its definition; infinities and NaN keep their kind. */
START_TEST(all_f16)
{
    uint16_t *data = malloc(2 * 65536);
    for (unsigned i = 0; i < 65536; i++)
        data[i] = (uint16_t)i;
    put_tensors("model.safetensors", "x F16 256,256", data);
    qc_source *src = must_open();
    float *x = malloc(65536 * sizeof *x);
    qc_err err = {0};
    ck_assert_int_eq(src->read_rows(src, 0, 0, 256, x, &err), QC_OK);
    for (int k = 0; k < 65536; k++) {
        int e = k >> 10 & 31, m = k & 1023;
        double v = e == 31 ? (m ? NAN : INFINITY) : e == 0 ? ldexp(m, -24) : ldexp(1024 + m, e - 25);
        ck_assert_msg(isnan(v) ? isnan(x[k]) : (double)x[k] == (k >> 15 ? -v : v), "%04x: %g", k,
                      (double)x[k]);
        ck_assert_msg(!signbit(x[k]) == !(k >> 15), "%04x: sign", k);
    }
    free(x);
    free(data);
    qc_source_close(src);
}
END_TEST

/* F16 and the integers against values written by hand. */
START_TEST(other_dtypes)
{
    static const uint8_t data[] = {
        0x00, 0x3C, 0x00, 0xC0, 0xFF, 0x7B, 0x01, 0x00,  /* F16: 1, -2, 65504, 2^-24 */
        0x80, 0x7F,                                      /* I8: -128, 127 */
        0xFF, 0x00,                                      /* U8: 255, 0 */
        0x00, 0x80,                                      /* I16: -32768 */
        0xFE, 0xFF, 0xFF, 0xFF,                          /* I32: -2 */
        0,    0,    0,    0,    0,    0,    0xF8, 0x3F}; /* F64: 1.5 */
    static const struct {
        const char *name;
        float first, last;
    } expected[] = {{"h", 1, 0x1p-24f},      {"i8", -128, 127}, {"u8", 255, 0},
                    {"i16", -32768, -32768}, {"i32", -2, -2},   {"d", 1.5f, 1.5f}};
    put_tensors("model.safetensors", "h F16 2,2;i8 I8 2;u8 U8 2;i16 I16 1;i32 I32 1;d F64 1", data);
    qc_source *src = must_open();
    qc_err err = {0};
    for (size_t k = 0; k < sizeof expected / sizeof expected[0]; k++) {
        float x[4] = {0};
        int64_t i = src->find(src, expected[k].name);
        const qc_tensor_info *info = src->info(src, i);
        ck_assert_int_eq(src->read_rows(src, i, 0, qc_tensor_rows(info), x, &err), QC_OK);
        ck_assert_msg(x[0] == expected[k].first, "%s: %g", info->name, (double)x[0]);
        ck_assert_msg(x[qc_tensor_n_elems(info) - 1] == expected[k].last, "%s", info->name);
    }
    qc_source_close(src);
}
END_TEST

START_TEST(unreadable_dtype)
{
    put_tensors("model.safetensors", "step I64 1;c C64 2", NULL);
    qc_source *src = must_open();
    float x[2];
    qc_err err = {0};
    ck_assert_int_eq(src->read_rows(src, src->find(src, "c"), 0, 1, x, &err), QC_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.msg, "tensor \"c\": C64 elements can not be read as numbers"));
    qc_source_close(src);
}
END_TEST

START_TEST(empty_tensors)
{
    put_tensors("model.safetensors", "e F32 0;x F32 2;f BF16 3,0", NULL);
    qc_source *src = must_open();
    qc_err err = {0};
    float x;
    for (int64_t i = 0; i < 3; i++) {
        ck_assert_int_eq(src->read_rows(src, i, 0, 0, &x, &err), QC_OK);
        src->release(src, i, 0, qc_tensor_rows(src->info(src, i)));
    }
    qc_source_close(src);
}
END_TEST

START_TEST(side_file_limits)
{
    put_tensors("model.safetensors", "a F32 1", NULL);
    put_text("generation_config.json", "");
    ck_assert_int_eq(truncate(in_folder("generation_config.json"), (16 << 20) + 1), 0);
    ck_assert_int_eq(symlink("nowhere", in_folder("tokenizer.json")), 0);
    put_text("chat_template.jinja", "");
    qc_source *src = must_open();
    char *text = NULL;
    size_t n_bytes = 0;
    qc_err err = {0};
    ck_assert_int_eq(src->side_file(src, "generation_config.json", &text, &n_bytes, &err), QC_E_INPUT);
    ck_assert_ptr_nonnull(strstr(err.msg, "16777217 bytes, limit is 16777216"));
    ck_assert_int_eq(src->side_file(src, "tokenizer.json", &text, &n_bytes, &err), QC_E_INPUT);
    ck_assert_ptr_nonnull(strstr(err.msg, "tokenizer.json: No such file"));
    ck_assert_int_eq(src->side_file(src, "chat_template.jinja", &text, &n_bytes, &err), QC_OK);
    ck_assert_ptr_nonnull(text);
    ck_assert_uint_eq(n_bytes, 0);
    qc_free(text);
    qc_source_close(src);
}
END_TEST

static long file_pages_kb(void)
{
    char line[256];
    long kb = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "RssFile: %ld", &kb) == 1)
            break;
    fclose(f);
    return kb;
}

/* Reading a large tensor in small pieces and giving them back keeps little of it in memory. */
START_TEST(released_pages)
{
    enum { ROWS = 16384, COLS = 1000, STEP = 16 };
    put_tensors("model.safetensors", "odd U8 1;x BF16 16384,1000;y BF16 8,8", NULL);
    qc_source *src = must_open();
    qc_err err = {0};
    float *x = malloc(STEP * COLS * sizeof *x);
    int64_t i = src->find(src, "x");
    long before_kb = file_pages_kb(), most_kb = 0;
    for (int64_t row = 0; row < ROWS; row += STEP) {
        ck_assert_int_eq(src->read_rows(src, i, row, STEP, x, &err), QC_OK);
        src->release(src, i, row, STEP);
        if (row % 1024 == 0 && file_pages_kb() - before_kb > most_kb)
            most_kb = file_pages_kb() - before_kb;
    }
    printf("released pages: %ld kB of %d kB stayed\n", most_kb, ROWS * COLS * 2 / 1024);
    ck_assert_int_lt(most_kb, 512);
    free(x);
    qc_source_close(src);
}
END_TEST

START_TEST(failing_allocations)
{
    put_two_shards();
    put_tensors("stray.safetensors", "q F32 1", NULL);
    put_tensors("model-2.safetensors", "b F32 4;extra F32 1", NULL);
    qc_source *src = NULL;
    for (long nth = 1;; nth++) {
        qc_err err = {0};
        qc_alloc_fail_at(nth);
        int rc = qc_source_open(folder, &src, &err);
        long n_allocs = qc_alloc_fail_at(0);
        if (rc == QC_OK) {
            ck_assert_int_lt(n_allocs, nth);
            ck_assert_int_gt(nth, 20);
            break;
        }
        ck_assert_ptr_null(src);
        ck_assert_msg(rc == QC_E_RESOURCE, "allocation %ld: %s", nth, err.msg);
    }
    qc_source_close(src);
}
END_TEST

/* ---- files that are no folder ---- */

typedef struct file_case {
    const char *name, *content, *message;
    int code;
} file_case;

static const file_case no_folders[] = {
    {"m.gguf", "xx", "no GGUF file", QC_E_UNSUPPORTED},
    {"renamed", "GGUF....", "version and counts reach beyond the end", QC_E_INPUT},
    {"model.safetensors", "12345678{}", "give the folder that holds it and its config.json",
     QC_E_UNSUPPORTED},
    {"config.json", "{}", "a json file is no model", QC_E_UNSUPPORTED},
    {"m.onnx", "xx", "one ONNX file is no model", QC_E_UNSUPPORTED},
    {"pytorch_model.bin", "PK", "PyTorch pickle files are not read", QC_E_UNSUPPORTED},
    {"some.thing", "hello", "neither a checkpoint folder nor a packed file", QC_E_INPUT},
    {"empty.qpk", "", "empty file", QC_E_INPUT},
    {"missing", NULL, "missing: No such file", QC_E_INPUT},
};

START_TEST(other_files)
{
    const file_case *c = &no_folders[_i];
    if (c->content)
        put_text(c->name, c->content);
    qc_source *src = NULL;
    qc_err err = {0};
    ck_assert_int_eq(qc_source_open(in_folder(c->name), &src, &err), c->code);
    ck_assert_msg(strstr(err.msg, c->message) != NULL, "%s", err.msg);
    ck_assert_msg(strstr(err.msg, c->name) != NULL, "%s", err.msg);
}
END_TEST

#define COUNT(table) (int)(sizeof table / sizeof table[0])

int main(void)
{
    Suite *s = suite_create("hfdir");
    TCase *tc = tcase_create("folders");
    tcase_add_checked_fixture(tc, setup, teardown);
    suite_add_tcase(s, tc);
    const TTest *const tests[] = {single_file,
                                  sharded,
                                  no_metadata_in_index,
                                  s5_missing_shards,
                                  s5_many_missing,
                                  single_file_dangling,
                                  links_are_followed,
                                  s6_not_in_index,
                                  newline_in_name,
                                  s6_other_shard,
                                  s6_nowhere,
                                  in_two_shards,
                                  s7_s8_strays,
                                  s8_only_other_names,
                                  no_safetensors,
                                  broken_shard,
                                  o8_read_only,
                                  s12_all_bf16,
                                  all_f16,
                                  other_dtypes,
                                  unreadable_dtype,
                                  empty_tensors,
                                  side_file_limits,
                                  released_pages,
                                  failing_allocations};
    for (int i = 0; i < COUNT(tests); i++)
        tcase_add_test(tc, tests[i]);
    tcase_add_loop_test(tc, bad_indexes, 0, COUNT(bad_index));
    tcase_add_loop_test(tc, o7_configs, 0, COUNT(quantized_config));
    tcase_add_loop_test(tc, o7_tensors, 0, COUNT(quantized_tensors));
    tcase_add_loop_test(tc, other_files, 0, COUNT(no_folders));
    SRunner *sr = srunner_create(s);
    srunner_run_all(sr, CK_ENV);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed ? 1 : 0;
}
