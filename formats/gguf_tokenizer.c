/* tokenizer.json and tokenizer_config.json from the metadata of a GGUF file. */
#include "gguf_internal.h"
#include "qc_alloc.h"
#include "qc_json.h"
#include "qc_math.h"

#include <string.h>

#define SPLIT(regex)                                                                                         \
    "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"" regex                                                \
    "\"}, \"behavior\": \"Isolated\", \"invert\": false}"
/* Contractions, words, then `digits`, punctuation, blanks. */
#define LLAMA3_LIKE(digits)                                                                                  \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|" digits                           \
    "| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"

static const qc_gguf_pre pres[] = {
    {"qwen2", "{\"type\": \"NFC\"}", SPLIT(LLAMA3_LIKE("\\\\p{N}")), false, false},
    {"llama-bpe", "null", SPLIT(LLAMA3_LIKE("\\\\p{N}{1,3}")), false, true},
    {"smollm", "null", "{\"type\": \"Digits\", \"individual_digits\": true}", true, false},
    {"gpt-2", "null", "", true, false},
};

const qc_gguf_pre *qc_gguf_pre_at(int i)
{
    return i >= 0 && i < (int)(sizeof pres / sizeof pres[0]) ? &pres[i] : NULL;
}

/* Values of tokenizer.ggml.token_type. */
enum { NORMAL = 1, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5 };

typedef struct tokens {
    const qc_gguf_value *texts;
    const qc_gguf_value *types;  /* NULL: all normal */
    const qc_gguf_value *merges; /* NULL: none */
} tokens;

static int32_t type_of(const tokens *t, uint64_t id)
{
    return t->types ? (int32_t)qc_get_le(t->types->data + 4 * id, 4) : NORMAL;
}

static int read_tokens(const qc_gguf_file *file, tokens *ret, qc_err *err)
{
    QC_TRY(qc_gguf_get_array(file, "tokenizer.ggml.tokens", QC_GGUF_STRING, &ret->texts, err));
    QC_TRY(qc_gguf_get_array(file, "tokenizer.ggml.token_type", QC_GGUF_I32, &ret->types, err));
    QC_TRY(qc_gguf_get_array(file, "tokenizer.ggml.merges", QC_GGUF_STRING, &ret->merges, err));
    if (!ret->texts)
        return qc_fail(err, QC_E_INPUT, "%s: key \"tokenizer.ggml.tokens\" is missing", file->path);
    if (ret->types && ret->types->n_elems != ret->texts->n_elems)
        return qc_fail(err, QC_E_INPUT, "%s: tokenizer.ggml.token_type has %llu entries for %llu tokens",
                       file->path, (unsigned long long)ret->types->n_elems,
                       (unsigned long long)ret->texts->n_elems);
    return QC_OK;
}

/* ---- JSON text ---- */

static int put(qc_buf *buf, const char *text, qc_err *err)
{
    return qc_buf_append(buf, text, strlen(text), err);
}

static int put_string(qc_buf *buf, const char *file, const char *what, qc_gguf_text text, qc_err *err)
{
    if (memchr(text.p, 0, text.n_bytes) || !qc_utf8_valid(text.p, text.n_bytes, NULL))
        return qc_fail(err, QC_E_INPUT, "%s: %s is not well-formed UTF-8 without NUL", file, what);
    QC_TRY(put(buf, "\"", err));
    size_t from = 0;
    for (size_t i = 0; i < text.n_bytes; i++) {
        unsigned char c = (unsigned char)text.p[i];
        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        QC_TRY(qc_buf_append(buf, text.p + from, i - from, err));
        QC_TRY(qc_buf_printf(buf, err, "\\u%04x", c));
        from = i + 1;
    }
    QC_TRY(qc_buf_append(buf, text.p + from, text.n_bytes - from, err));
    return put(buf, "\"", err);
}

static int put_added(const qc_gguf_file *file, const tokens *t, qc_buf *buf, qc_err *err)
{
    const uint8_t *at = t->texts->data;
    bool first = true;
    QC_TRY(put(buf, " \"added_tokens\": [", err));
    for (uint64_t id = 0; id < t->texts->n_elems; id++) {
        qc_gguf_text text = qc_gguf_next_text(&at);
        int32_t type = type_of(t, id);
        if (type != CONTROL && type != USER_DEFINED)
            continue;
        QC_TRY(qc_buf_printf(buf, err, "%s\n  {\"id\": %llu, \"content\": ", first ? "" : ",",
                             (unsigned long long)id));
        QC_TRY(put_string(buf, file->path, "a token", text, err));
        QC_TRY(qc_buf_printf(buf, err,
                             ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
                             "\"normalized\": false, \"special\": %s}",
                             type == CONTROL ? "true" : "false"));
        first = false;
    }
    return put(buf, "\n ],\n", err);
}

static int put_vocab(const qc_gguf_file *file, const tokens *t, qc_buf *buf, qc_err *err)
{
    const uint8_t *at = t->texts->data;
    bool first = true;
    QC_TRY(put(buf, "\"vocab\": {", err));
    for (uint64_t id = 0; id < t->texts->n_elems; id++) {
        qc_gguf_text text = qc_gguf_next_text(&at);
        int32_t type = type_of(t, id);
        if (type == CONTROL || type == USER_DEFINED || type == UNUSED)
            continue;
        QC_TRY(put(buf, first ? "\n   " : ",\n   ", err));
        QC_TRY(put_string(buf, file->path, "a token", text, err));
        QC_TRY(qc_buf_printf(buf, err, ": %llu", (unsigned long long)id));
        first = false;
    }
    QC_TRY(put(buf, "\n  },\n  \"merges\": [", err));
    at = t->merges ? t->merges->data : NULL;
    for (uint64_t i = 0; t->merges && i < t->merges->n_elems; i++) {
        QC_TRY(put(buf, i ? ",\n   " : "\n   ", err));
        QC_TRY(put_string(buf, file->path, "a merge", qc_gguf_next_text(&at), err));
    }
    return put(buf, "\n  ]", err);
}

/* BOS and EOS that encoding adds; llama.cpp's "llama-bpe" adds a BOS unless told not to. */
static int added_id(const qc_gguf_file *file, const char *key, const char *id_key, bool absent, int64_t n_ids,
                    int64_t *ret, qc_err *err)
{
    bool add;
    QC_TRY(qc_gguf_get_bool(file, key, absent, &add, err));
    *ret = -1;
    return add ? qc_gguf_get_int(file, id_key, -1, -1, n_ids - 1, ret, err) : QC_OK;
}

static qc_gguf_text text_of_id(const tokens *t, int64_t id)
{
    const uint8_t *at = t->texts->data;
    qc_gguf_text text = {NULL, 0};
    for (int64_t i = 0; i <= id; i++)
        text = qc_gguf_next_text(&at);
    return text;
}

static int put_special(const qc_gguf_file *file, const tokens *t, int64_t id, bool table, qc_buf *buf,
                       qc_err *err)
{
    qc_gguf_text text = text_of_id(t, id);
    if (!table) {
        QC_TRY(put(buf, "{\"SpecialToken\": {\"id\": ", err));
        QC_TRY(put_string(buf, file->path, "a token", text, err));
        return put(buf, ", \"type_id\": 0}}", err);
    }
    QC_TRY(put_string(buf, file->path, "a token", text, err));
    QC_TRY(put(buf, ": {\"id\": ", err));
    QC_TRY(put_string(buf, file->path, "a token", text, err));
    QC_TRY(qc_buf_printf(buf, err, ", \"ids\": [%lld], \"tokens\": [", (long long)id));
    QC_TRY(put_string(buf, file->path, "a token", text, err));
    return put(buf, "]}", err);
}

static int put_post(const qc_gguf_file *file, const tokens *t, bool bos_absent, qc_buf *buf, qc_err *err)
{
    int64_t bos, eos, n = (int64_t)t->texts->n_elems;
    QC_TRY(added_id(file, "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id", bos_absent, n, &bos,
                    err));
    QC_TRY(
        added_id(file, "tokenizer.ggml.add_eos_token", "tokenizer.ggml.eos_token_id", false, n, &eos, err));
    if (bos < 0 && eos < 0)
        return put(buf, " \"post_processor\": null,\n", err);
    QC_TRY(put(buf, " \"post_processor\": {\"type\": \"TemplateProcessing\", \"single\": [", err));
    if (bos >= 0)
        QC_TRY(put_special(file, t, bos, false, buf, err));
    QC_TRY(qc_buf_printf(buf, err, "%s{\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}%s",
                         bos >= 0 ? ", " : "", eos >= 0 ? ", " : ""));
    if (eos >= 0)
        QC_TRY(put_special(file, t, eos, false, buf, err));
    QC_TRY(put(buf,
               "], \"pair\": [{\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}, {\"Sequence\": {\"id\": "
               "\"B\", \"type_id\": 1}}], \"special_tokens\": {",
               err));
    if (bos >= 0)
        QC_TRY(put_special(file, t, bos, true, buf, err));
    if (eos >= 0 && eos != bos) {
        QC_TRY(put(buf, bos >= 0 ? ", " : "", err));
        QC_TRY(put_special(file, t, eos, true, buf, err));
    }
    return put(buf, "}},\n", err);
}

static int put_tokenizer(const qc_gguf_file *file, const qc_gguf_pre *pre, qc_buf *buf, qc_err *err)
{
    static const char byte_level[] =
        "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": false, \"use_regex\": %s}";
    const char *regex = pre->use_regex ? "true" : "false";
    tokens t;
    QC_TRY(read_tokens(file, &t, err));
    QC_TRY(put(buf, "{\n \"version\": \"1.0\",\n \"truncation\": null,\n \"padding\": null,\n", err));
    QC_TRY(put_added(file, &t, buf, err));
    QC_TRY(qc_buf_printf(buf, err, " \"normalizer\": %s,\n \"pre_tokenizer\": ", pre->normalizer));
    if (*pre->splits)
        QC_TRY(qc_buf_printf(buf, err, "{\"type\": \"Sequence\", \"pretokenizers\": [%s, ", pre->splits));
    QC_TRY(qc_buf_printf(buf, err, byte_level, regex));
    QC_TRY(put(buf, *pre->splits ? "]},\n" : ",\n", err));
    QC_TRY(put_post(file, &t, pre->ignore_merges, buf, err));
    QC_TRY(put(buf, " \"decoder\": ", err));
    QC_TRY(qc_buf_printf(buf, err, byte_level, regex));
    QC_TRY(qc_buf_printf(buf, err,
                         ",\n \"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, "
                         "\"continuing_subword_prefix\": null, \"end_of_word_suffix\": null, \"fuse_unk\": "
                         "false, \"byte_fallback\": false, \"ignore_merges\": %s,\n  ",
                         pre->ignore_merges ? "true" : "false"));
    QC_TRY(put_vocab(file, &t, buf, err));
    return put(buf, "}\n}\n", err);
}

int qc_gguf_make_tokenizer(const qc_gguf_file *file, char **ret, qc_err *err)
{
    qc_gguf_text model, name;
    const qc_gguf_pre *pre = NULL;
    QC_TRY(qc_gguf_get_text(file, "tokenizer.ggml.model", &model, err));
    QC_TRY(qc_gguf_get_text(file, "tokenizer.ggml.pre", &name, err));
    if (!model.p || qc_gguf_text_is(model, "none"))
        return QC_OK;
    if (!qc_gguf_text_is(model, "gpt2"))
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: a tokenizer of kind \"%.*s\" can not be rebuilt from the file; expected gpt2, or "
                       "a tokenizer.json beside the file",
                       file->path, (int)qc_min_i64((int64_t)model.n_bytes, 100), model.p);
    for (int i = 0; !pre && qc_gguf_pre_at(i); i++)
        pre = qc_gguf_text_is(name, pres[i].name) ? &pres[i] : NULL;
    if (!pre)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: the pre-tokenizer \"%.*s\" (tokenizer.ggml.pre) is not known; expected qwen2, "
                       "llama-bpe, smollm or gpt-2",
                       file->path, (int)qc_min_i64((int64_t)name.n_bytes, 100), name.p ? name.p : "");
    qc_buf buf = {0};
    int rc = put_tokenizer(file, pre, &buf, err);
    if (rc < 0)
        qc_buf_clear(&buf);
    else
        *ret = buf.data;
    return rc;
}

/* ---- tokenizer_config.json ---- */

static int put_token(const qc_gguf_file *file, const tokens *t, const char *key, const char *name, cJSON *doc,
                     qc_err *err)
{
    int64_t id;
    QC_TRY(qc_gguf_get_int(file, key, -1, -1, (int64_t)t->texts->n_elems - 1, &id, err));
    if (id < 0)
        return QC_OK;
    qc_gguf_text text = text_of_id(t, id);
    char *copy = qc_strndup(text.p, text.n_bytes);
    if (!copy)
        return qc_fail_nomem(err, name, text.n_bytes);
    cJSON_AddStringToObject(doc, name, copy);
    qc_free(copy);
    return QC_OK;
}

static int put_config(const qc_gguf_file *file, cJSON *doc, qc_err *err)
{
    tokens t;
    qc_gguf_text chat;
    bool add;
    QC_TRY(read_tokens(file, &t, err));
    static const char *const flags[][2] = {{"tokenizer.ggml.add_bos_token", "add_bos_token"},
                                           {"tokenizer.ggml.add_eos_token", "add_eos_token"}};
    for (int i = 0; i < 2; i++)
        if (qc_gguf_find(file, flags[i][0])) {
            QC_TRY(qc_gguf_get_bool(file, flags[i][0], false, &add, err));
            cJSON_AddBoolToObject(doc, flags[i][1], add);
        }
    static const char *const names[][2] = {{"tokenizer.ggml.bos_token_id", "bos_token"},
                                           {"tokenizer.ggml.eos_token_id", "eos_token"},
                                           {"tokenizer.ggml.padding_token_id", "pad_token"},
                                           {"tokenizer.ggml.unknown_token_id", "unk_token"}};
    for (int i = 0; i < 4; i++)
        QC_TRY(put_token(file, &t, names[i][0], names[i][1], doc, err));
    QC_TRY(qc_gguf_get_text(file, "tokenizer.chat_template", &chat, err));
    if (chat.p) {
        char *copy = qc_strndup(chat.p, chat.n_bytes);
        if (!copy)
            return qc_fail_nomem(err, "chat_template", chat.n_bytes);
        cJSON_AddStringToObject(doc, "chat_template", copy);
        qc_free(copy);
    }
    return QC_OK;
}

int qc_gguf_make_tokenizer_config(const qc_gguf_file *file, char **ret, qc_err *err)
{
    if (!qc_gguf_find(file, "tokenizer.ggml.tokens"))
        return QC_OK;
    qc_json_watch();
    cJSON *doc = cJSON_CreateObject();
    int rc = put_config(file, doc, err);
    doc = qc_json_watched(doc);
    if (rc == QC_OK && (!doc || !(*ret = qc_json_print(doc))))
        rc = qc_fail_nomem(err, "tokenizer_config.json", 1024);
    cJSON_Delete(doc);
    return rc;
}
