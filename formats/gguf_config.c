/* config.json and generation_config.json from the metadata of a GGUF file. A key of the architecture that is
 * not understood is refused unless it switches something off. */
#include "gguf_internal.h"

#include "qc_alloc.h"
#include "qc_json.h"
#include "qc_math.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define MAX_COUNT (INT64_C(1) << 31)

/* "qwen3.block_count" in a buffer of the caller. */
static const char *arch_key(const qc_gguf_shape *shape, const char *name, char buf[128])
{
    snprintf(buf, 128, "%s.%s", shape->arch->name, name);
    return buf;
}

static int get_count(const qc_gguf_file *file, const qc_gguf_shape *shape, const char *name, int64_t absent,
                     int64_t *ret, qc_err *err)
{
    char key[128];
    QC_TRY(qc_gguf_get_int(file, arch_key(shape, name, key), absent, 1, MAX_COUNT, ret, err));
    if (*ret < 0)
        return qc_fail(err, QC_E_INPUT, "%s: key \"%s\" is missing", file->path, key);
    return QC_OK;
}

/* ---- what would change the result ---- */

static const char *const read_keys[] = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
};

static bool is_off(const qc_gguf_value *v)
{
    static const uint8_t zeros[8];
    static const int sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return !v->is_array && sizes[v->kind] > 0 && memcmp(v->data, zeros, (size_t)sizes[v->kind]) == 0;
}

static int check_keys(const qc_gguf_file *file, const qc_gguf_shape *shape, qc_err *err)
{
    size_t n_prefix = strlen(shape->arch->name);
    for (int64_t i = 0; i < file->n_values; i++) {
        const qc_gguf_value *v = &file->values[i];
        if (v->key.n_bytes <= n_prefix || memcmp(v->key.p, shape->arch->name, n_prefix) != 0 ||
            v->key.p[n_prefix] != '.' || is_off(v))
            continue;
        qc_gguf_text rest = {v->key.p + n_prefix + 1, v->key.n_bytes - n_prefix - 1};
        bool known = false;
        for (size_t k = 0; k < sizeof read_keys / sizeof read_keys[0]; k++)
            known = known || qc_gguf_text_is(rest, read_keys[k]);
        if (!known)
            return qc_fail(err, QC_E_UNSUPPORTED, "%s: key \"%.*s\" is not known and could change the result",
                           file->path, (int)qc_min_i64((int64_t)v->key.n_bytes, 200), v->key.p);
    }
    return QC_OK;
}

static int find_arch(const qc_gguf_file *file, const qc_gguf_arch **ret, qc_err *err)
{
    qc_gguf_text name;
    char list[128] = "";
    QC_TRY(qc_gguf_get_text(file, "general.architecture", &name, err));
    if (!name.p)
        return qc_fail(err, QC_E_INPUT, "%s: key \"general.architecture\" is missing", file->path);
    for (int i = 0; qc_gguf_arch_at(i); i++) {
        const char *known = qc_gguf_arch_at(i)->name;
        if (qc_gguf_text_is(name, known)) {
            *ret = qc_gguf_arch_at(i);
            return QC_OK;
        }
        if (!strstr(list, known))
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", *list ? ", " : "", known);
    }
    return qc_fail(err, QC_E_UNSUPPORTED, "%s: architecture \"%.*s\" is not supported; expected one of %s",
                   file->path, (int)qc_min_i64((int64_t)name.n_bytes, 100), name.p, list);
}

int qc_gguf_read_shape(const qc_gguf_file *file, qc_gguf_shape *ret, qc_err *err)
{
    qc_gguf_shape s = {0};
    int64_t hidden, value_length, rotated;
    QC_TRY(find_arch(file, &s.arch, err));
    QC_TRY(check_keys(file, &s, err));
    QC_TRY(get_count(file, &s, "embedding_length", -1, &hidden, err));
    QC_TRY(get_count(file, &s, "attention.head_count", -1, &s.n_heads, err));
    QC_TRY(get_count(file, &s, "attention.head_count_kv", s.n_heads, &s.n_kv_heads, err));
    QC_TRY(get_count(file, &s, "attention.key_length", qc_max_i64(1, hidden / s.n_heads), &s.head_dim, err));
    QC_TRY(get_count(file, &s, "attention.value_length", s.head_dim, &value_length, err));
    QC_TRY(get_count(file, &s, "rope.dimension_count", s.head_dim, &rotated, err));
    if (value_length != s.head_dim || rotated != s.head_dim || s.head_dim % 2)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: heads of %lld keys, %lld values and %lld rotating dimensions, expected the same "
                       "even number of each",
                       file->path, (long long)s.head_dim, (long long)value_length, (long long)rotated);
    *ret = s;
    return QC_OK;
}

/* ---- rotary embedding ---- */

double qc_gguf_llama3_divisor(double wavelength, double factor, double low, double high, double original)
{
    double s = (original / wavelength - low) / (high - low);
    s = s < 0 ? 0 : s > 1 ? 1 : s;
    return 1 / ((1 - s) / factor + s);
}

/* A file holds the divisors, config.json the four numbers. s is linear in 1 / wavelength, so a line through
 * the divisors between the ends gives them, up to a common factor of low, high and original: low = 1 is
 * taken. All divisors must then come out again. */
static int find_llama3(const qc_gguf_file *file, const qc_gguf_shape *shape, const qc_gguf_tensor *t,
                       double theta, cJSON *rope, qc_err *err)
{
    int64_t n = shape->head_dim / 2;
    if (t->type->id != QC_BLOCK_F32 || t->n_dims != 1 || t->ne[0] != n)
        return qc_fail(err, QC_E_INPUT, "%s: tensor \"%s\" is not of %lld float32", file->path, t->name,
                       (long long)n);
    double factor = 1, sx = 0, sy = 0, sxx = 0, sxy = 0, count = 0;
    float divisor;
    const uint8_t *data = file->data + t->offset;
    for (int64_t i = 0; i < n; i++) {
        memcpy(&divisor, data + 4 * i, sizeof divisor);
        factor = (double)divisor > factor ? (double)divisor : factor;
    }
    for (int64_t i = 0; i < n; i++) {
        memcpy(&divisor, data + 4 * i, sizeof divisor);
        double s = (1 / (double)divisor - 1 / factor) / (1 - 1 / factor);
        double x = pow(theta, -2.0 * (double)i / (double)shape->head_dim) / (2 * M_PI);
        if (!(s > 1e-6 && s < 1 - 1e-6))
            continue;
        count++, sx += x, sy += s, sxx += x * x, sxy += x * s;
    }
    double slope = (count * sxy - sx * sy) / (count * sxx - sx * sx), offset = (slope * sx - sy) / count;
    double low = 1, high = 1 + round(1 / offset * 1e3) / 1e3, original = round(slope * (high - low));
    double worst = count >= 2 && isfinite(original) && original >= 1 ? 0 : INFINITY;
    for (int64_t i = 0; i < n && worst < INFINITY; i++) {
        memcpy(&divisor, data + 4 * i, sizeof divisor);
        double wavelength = 2 * M_PI * pow(theta, 2.0 * (double)i / (double)shape->head_dim);
        worst =
            fmax(worst,
                 fabs(qc_gguf_llama3_divisor(wavelength, factor, low, high, original) / (double)divisor - 1));
    }
    if (!(worst < 1e-5))
        return qc_fail(
            err, QC_E_UNSUPPORTED,
            "%s: the frequencies of \"%s\" do not follow Llama 3's rule, which is the only one read",
            file->path, t->name);
    cJSON_AddStringToObject(rope, "rope_type", "llama3");
    cJSON_AddNumberToObject(rope, "factor", factor);
    cJSON_AddNumberToObject(rope, "low_freq_factor", low);
    cJSON_AddNumberToObject(rope, "high_freq_factor", high);
    cJSON_AddNumberToObject(rope, "original_max_position_embeddings", original);
    return QC_OK;
}

static int put_scaling(const qc_gguf_file *file, const qc_gguf_shape *shape, double theta, cJSON *doc,
                       qc_err *err)
{
    char key[128];
    qc_gguf_text type;
    double factor;
    int64_t original;
    const qc_gguf_tensor *freqs = qc_gguf_tensor_find(file, QC_GGUF_ROPE_FREQS);
    QC_TRY(qc_gguf_get_text(file, arch_key(shape, "rope.scaling.type", key), &type, err));
    bool none = !type.p || qc_gguf_text_is(type, "none");
    if (none && !freqs)
        return QC_OK;
    cJSON *rope = cJSON_AddObjectToObject(doc, "rope_scaling");
    if (freqs && none)
        return find_llama3(file, shape, freqs, theta, rope, err);
    bool yarn = qc_gguf_text_is(type, "yarn");
    if (freqs || !(yarn || qc_gguf_text_is(type, "linear")))
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: key \"%s\" is \"%.*s\"%s, expected none, linear or yarn",
                       file->path, key, (int)qc_min_i64((int64_t)type.n_bytes, 100), type.p,
                       freqs ? " beside rope_freqs.weight" : "");
    cJSON_AddStringToObject(rope, "rope_type", yarn ? "yarn" : "linear");
    QC_TRY(qc_gguf_get_number(file, arch_key(shape, "rope.scaling.factor", key), -1, &factor, err));
    if (factor <= 0)
        return qc_fail(err, QC_E_INPUT, "%s: key \"%s\" is missing or not above 0", file->path, key);
    cJSON_AddNumberToObject(rope, "factor", factor);
    if (!yarn)
        return QC_OK;
    QC_TRY(get_count(file, shape, "rope.scaling.original_context_length", -1, &original, err));
    cJSON_AddNumberToObject(rope, "original_max_position_embeddings", (double)original);
    return QC_OK;
}

/* ---- config.json ---- */

/* float32 as the shortest decimal number that gives it back, so that 1e-5 stays 1e-5. */
static double tidy(double x)
{
    char text[32];
    for (int digits = 1; digits < 10; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, x);
        cJSON *number = cJSON_Parse(text);
        double y = number ? number->valuedouble : x;
        cJSON_Delete(number);
        if ((float)y == (float)x)
            return y;
    }
    return x;
}

static int put_counts(const qc_gguf_file *file, const qc_gguf_shape *shape, cJSON *doc, qc_err *err)
{
    static const char *const counts[][2] = {{"embedding_length", "hidden_size"},
                                            {"block_count", "num_hidden_layers"},
                                            {"feed_forward_length", "intermediate_size"},
                                            {"context_length", "max_position_embeddings"}};
    int64_t n;
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        QC_TRY(get_count(file, shape, counts[i][0], -1, &n, err));
        cJSON_AddNumberToObject(doc, counts[i][1], (double)n);
    }
    cJSON_AddNumberToObject(doc, "num_attention_heads", (double)shape->n_heads);
    cJSON_AddNumberToObject(doc, "num_key_value_heads", (double)shape->n_kv_heads);
    cJSON_AddNumberToObject(doc, "head_dim", (double)shape->head_dim);
    const qc_gguf_tensor *table = qc_gguf_tensor_find(file, "token_embd.weight");
    if (table && table->n_dims == 2)
        cJSON_AddNumberToObject(doc, "vocab_size", (double)table->ne[1]);
    return QC_OK;
}

static int put_ids(const qc_gguf_file *file, cJSON *doc, qc_err *err)
{
    static const char *const ids[][2] = {{"tokenizer.ggml.bos_token_id", "bos_token_id"},
                                         {"tokenizer.ggml.eos_token_id", "eos_token_id"},
                                         {"tokenizer.ggml.padding_token_id", "pad_token_id"}};
    int64_t id;
    for (size_t i = 0; i < sizeof ids / sizeof ids[0]; i++) {
        QC_TRY(qc_gguf_get_int(file, ids[i][0], -1, -1, UINT32_MAX, &id, err));
        if (id >= 0 && id < UINT32_MAX)
            cJSON_AddNumberToObject(doc, ids[i][1], (double)id);
    }
    return QC_OK;
}

static int put_config(const qc_gguf_file *file, const qc_gguf_shape *shape, cJSON *doc, qc_err *err)
{
    char key[128];
    double eps, theta;
    cJSON *classes = cJSON_AddArrayToObject(doc, "architectures");
    qc_json_add_item(classes, cJSON_CreateString(shape->arch->class_name));
    cJSON_AddStringToObject(doc, "model_type", shape->arch->model_type);
    cJSON_AddStringToObject(doc, "hidden_act", "silu");
    QC_TRY(put_counts(file, shape, doc, err));
    QC_TRY(qc_gguf_get_number(file, arch_key(shape, "attention.layer_norm_rms_epsilon", key), -1, &eps, err));
    if (eps < 0)
        return qc_fail(err, QC_E_INPUT, "%s: key \"%s\" is missing or negative", file->path, key);
    QC_TRY(qc_gguf_get_number(file, arch_key(shape, "rope.freq_base", key), 10000, &theta, err));
    cJSON_AddNumberToObject(doc, "rms_norm_eps", tidy(eps));
    cJSON_AddNumberToObject(doc, "rope_theta", tidy(theta));
    QC_TRY(put_scaling(file, shape, theta, doc, err));
    cJSON_AddBoolToObject(doc, "tie_word_embeddings", !qc_gguf_tensor_find(file, "output.weight"));
    if (strcmp(shape->arch->model_type, "qwen2") != 0) { /* which always has them */
        cJSON_AddBoolToObject(doc, "attention_bias", qc_gguf_tensor_find(file, "blk.0.attn_q.bias") != NULL);
        cJSON_AddBoolToObject(doc, "mlp_bias", qc_gguf_tensor_find(file, "blk.0.ffn_up.bias") != NULL);
    } else {
        cJSON_AddBoolToObject(doc, "use_sliding_window", false);
    }
    return put_ids(file, doc, err);
}

static int print_doc(cJSON *doc, int rc, const char *name, char **ret, qc_err *err)
{
    doc = qc_json_watched(doc);
    if (rc == QC_OK && (!doc || !(*ret = qc_json_print(doc))))
        rc = qc_fail_nomem(err, name, 1024);
    cJSON_Delete(doc);
    return rc;
}

int qc_gguf_make_config(const qc_gguf_file *file, const qc_gguf_shape *shape, char **ret, qc_err *err)
{
    qc_json_watch();
    cJSON *doc = cJSON_CreateObject();
    return print_doc(doc, put_config(file, shape, doc, err), "config.json", ret, err);
}

int qc_gguf_make_generation_config(const qc_gguf_file *file, char **ret, qc_err *err)
{
    qc_json_watch();
    cJSON *doc = cJSON_CreateObject();
    return print_doc(doc, put_ids(file, doc, err), "generation_config.json", ret, err);
}
