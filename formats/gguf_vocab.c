/* Keys of the tokenizer in a GGUF file, from tokenizer.json and tokenizer_config.json. llama.cpp knows
 * pre-tokenizers by name; one that is none of those known here is refused, since it would answer with other
 * ids. */
#include "gguf_internal.h"
#include "gguf_write.h"
#include "qc_alloc.h"
#include "qc_json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Values of tokenizer.ggml.token_type. */
enum { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5, BYTE = 6 };

typedef struct token {
    const char *text; /* inside the document; NULL: no token has this id */
    int type;
    double rank; /* of the first merge that makes it; INFINITY: none does */
} token;

typedef struct vocab {
    const cJSON *doc, *config; /* config NULL: there is none */
    bool sentencepiece;
    const qc_gguf_pre *pre; /* of byte-level vocabularies */
    bool space_prefix;      /* of SentencePiece ones */
    token *tokens;          /* [n] */
    int64_t n;
    qc_map *ids; /* of texts */
} vocab;

static int refuse(const char *what, qc_err *err)
{
    return qc_fail(err, QC_E_UNSUPPORTED,
                   "tokenizer.json: %s: llama.cpp has no such tokenizer under a name known here", what);
}

static const char *text_of(const cJSON *object, const char *key)
{
    const cJSON *item = qc_json_get(object, key);
    return cJSON_IsString(item) ? item->valuestring : "";
}

static bool is_true(const cJSON *object, const char *key, bool absent)
{
    const cJSON *item = qc_json_get(object, key);
    return item ? cJSON_IsTrue(item) : absent;
}

/* Part i of a pre-tokenizer, normalizer or post-processor that may be a sequence; NULL behind the last. */
static const cJSON *part(const cJSON *item, const char *list, int i)
{
    if (item && strcmp(text_of(item, "type"), "Sequence") == 0)
        return cJSON_GetArrayItem(qc_json_get(item, list), i);
    return i == 0 ? item : NULL;
}

static bool has_type(const cJSON *item, const char *type)
{
    return item && strcmp(text_of(item, "type"), type) == 0;
}

/* ---- kind ---- */

static bool same_json(const cJSON *item, const char *json)
{
    cJSON *want = *json ? cJSON_Parse(json) : NULL;
    bool same = want ? cJSON_Compare(item, want, true) : item == NULL;
    cJSON_Delete(want);
    return same;
}

static int find_byte_level(vocab *v, const cJSON *pre, qc_err *err)
{
    const cJSON *first = part(pre, "pretokenizers", 0), *second = part(pre, "pretokenizers", 1);
    const cJSON *split = second ? first : NULL, *level = second ? second : first;
    bool ignore = is_true(qc_json_get(v->doc, "model"), "ignore_merges", false);
    bool regex = is_true(level, "use_regex", true);
    if (part(pre, "pretokenizers", 2) || !has_type(level, "ByteLevel") ||
        is_true(level, "add_prefix_space", true))
        return refuse("this pre_tokenizer", err);
    for (int i = 0; qc_gguf_pre_at(i) && !v->pre; i++) {
        const qc_gguf_pre *p = qc_gguf_pre_at(i);
        if (p->use_regex == regex && p->ignore_merges == ignore && same_json(split, p->splits))
            v->pre = p;
    }
    if (!v->pre)
        return refuse("this pre_tokenizer", err);
    const cJSON *norm = part(qc_json_get(v->doc, "normalizer"), "normalizers", 0);
    if (norm && (!has_type(norm, "NFC") || part(qc_json_get(v->doc, "normalizer"), "normalizers", 1)))
        return refuse("this normalizer", err);
    return QC_OK;
}

/* SentencePiece's BPE: blanks become U+2581, one in front (as a normalizer or a Metaspace part), bytes for
 * what is not in the vocabulary. */
static int find_sentencepiece(vocab *v, const cJSON *pre, qc_err *err)
{
    const cJSON *norm = qc_json_get(v->doc, "normalizer");
    bool prepends = false, replaces = false;
    const cJSON *p;
    for (int i = 0; (p = part(norm, "normalizers", i)); i++) {
        prepends = prepends || (has_type(p, "Prepend") && strcmp(text_of(p, "prepend"), "\u2581") == 0);
        bool replace = has_type(p, "Replace") && strcmp(text_of(p, "content"), "\u2581") == 0 &&
                       strcmp(text_of(qc_json_get(p, "pattern"), "String"), " ") == 0;
        replaces = replaces || replace;
        if (!replace && !has_type(p, "Prepend"))
            return refuse("this normalizer", err);
    }
    if (has_type(pre, "Metaspace") && !norm) {
        replaces = strcmp(text_of(pre, "replacement"), "\u2581") == 0 && !is_true(pre, "split", true);
        prepends = strcmp(text_of(pre, "prepend_scheme"), "never") != 0;
    } else if (pre) {
        return refuse("this pre_tokenizer", err);
    }
    if (!replaces)
        return refuse("this normalizer", err);
    v->space_prefix = prepends;
    return QC_OK;
}

static int find_kind(vocab *v, qc_err *err)
{
    const cJSON *model = qc_json_get(v->doc, "model"), *pre = qc_json_get(v->doc, "pre_tokenizer");
    if (!cJSON_IsObject(qc_json_get(model, "vocab")) || !cJSON_IsArray(qc_json_get(model, "merges")))
        return refuse("no BPE model", err);
    v->sentencepiece = is_true(model, "byte_fallback", false);
    return v->sentencepiece ? find_sentencepiece(v, pre, err) : find_byte_level(v, pre, err);
}

/* ---- tokens ---- */

static int set_token(vocab *v, const char *text, const cJSON *id_item, int type, qc_err *err)
{
    int64_t id;
    if (!qc_json_int(id_item, &id) || id < 0 || id >= v->n)
        return qc_fail(err, QC_E_INPUT,
                       "tokenizer.json: token \"%.100s\" has the id %lld, the embedding has %lld rows", text,
                       (long long)(qc_json_int(id_item, &id) ? id : -1), (long long)v->n);
    v->tokens[id] = (token){text, type, INFINITY};
    return qc_map_add(v->ids, text, strlen(text), id) < 0 ? qc_fail_nomem(err, "vocabulary", 64) : QC_OK;
}

static bool is_byte(const char *text)
{
    return strlen(text) == 6 && strncmp(text, "<0x", 3) == 0 && text[5] == '>';
}

/* llama.cpp takes what looks like <|this|> for a token of the chat format, whatever its flag says. */
static bool looks_special(const char *text)
{
    size_t n = strlen(text);
    return n > 4 && strncmp(text, "<|", 2) == 0 && strcmp(text + n - 2, "|>") == 0;
}

static int collect(vocab *v, qc_err *err)
{
    const cJSON *model = qc_json_get(v->doc, "model");
    const char *unknown = text_of(model, "unk_token");
    for (const cJSON *c = qc_json_get(model, "vocab")->child; c; c = c->next) {
        int type = v->sentencepiece && is_byte(c->string)        ? BYTE
                   : *unknown && strcmp(c->string, unknown) == 0 ? UNKNOWN
                                                                 : NORMAL;
        QC_TRY(set_token(v, c->string, c, type, err));
    }
    const cJSON *added = qc_json_get(v->doc, "added_tokens");
    for (const cJSON *c = added ? added->child : NULL; c; c = c->next) {
        const char *text = text_of(c, "content");
        int type = is_true(c, "special", false) || looks_special(text) ? CONTROL : USER_DEFINED;
        if (*unknown && strcmp(text, unknown) == 0)
            type = UNKNOWN;
        QC_TRY(set_token(v, text, qc_json_get(c, "id"), type, err));
    }
    return QC_OK;
}

/* A merge as its two pieces, in buffers of the caller. */
static int merge_pieces(const cJSON *item, const char **left, size_t *left_bytes, const char **right,
                        qc_err *err)
{
    const cJSON *second = cJSON_IsArray(item) && item->child ? item->child->next : NULL;
    const char *blank = cJSON_IsString(item) ? strchr(item->valuestring, ' ') : NULL;
    if (second && cJSON_IsString(item->child) && cJSON_IsString(second)) {
        *left = item->child->valuestring;
        *left_bytes = strlen(*left);
        *right = second->valuestring;
    } else if (blank) {
        *left = item->valuestring;
        *left_bytes = (size_t)(blank - *left);
        *right = blank + 1;
    } else {
        return qc_fail(err, QC_E_INPUT, "tokenizer.json: a merge is no pair of pieces");
    }
    if (memchr(*left, ' ', *left_bytes) || strchr(*right, ' '))
        return refuse("a merge of a piece with a blank", err);
    return QC_OK;
}

static int put_merges(qc_gguf_head *head, const vocab *v, qc_err *err)
{
    qc_buf packed = {0}, text = {0};
    uint64_t n = 0;
    int rc = QC_OK;
    for (const cJSON *c = qc_json_get(qc_json_get(v->doc, "model"), "merges")->child; c && rc == QC_OK;
         c = c->next, n++) {
        const char *left, *right;
        size_t left_bytes;
        text.n_bytes = 0;
        rc = merge_pieces(c, &left, &left_bytes, &right, err);
        if (rc == QC_OK)
            rc = qc_buf_printf(&text, err, "%.*s %s", (int)left_bytes, left, right);
        if (rc == QC_OK)
            rc = qc_gguf_append_text(&packed, text.data, text.n_bytes, err);
    }
    if (rc == QC_OK)
        rc = qc_gguf_put_array(head, "tokenizer.ggml.merges", QC_GGUF_STRING, n, &packed, err);
    qc_buf_clear(&packed);
    qc_buf_clear(&text);
    return rc;
}

/* llama.cpp joins the neighbours whose joined text has the highest score: minus the rank of the first merge
 * that makes it gives the order of the merges. */
static int rank_tokens(vocab *v, qc_err *err)
{
    qc_buf text = {0};
    double rank = 0;
    int rc = QC_OK;
    for (const cJSON *c = qc_json_get(qc_json_get(v->doc, "model"), "merges")->child; c && rc == QC_OK;
         c = c->next, rank++) {
        const char *left, *right;
        size_t left_bytes;
        text.n_bytes = 0;
        rc = merge_pieces(c, &left, &left_bytes, &right, err);
        if (rc == QC_OK)
            rc = qc_buf_printf(&text, err, "%.*s%s", (int)left_bytes, left, right);
        int64_t id = rc == QC_OK ? qc_map_get(v->ids, text.data, text.n_bytes, -1) : -1;
        if (id >= 0 && rank < v->tokens[id].rank)
            v->tokens[id].rank = rank;
    }
    qc_buf_clear(&text);
    return rc;
}

static int put_scores(qc_gguf_head *head, vocab *v, qc_err *err)
{
    qc_buf packed = {0};
    int rc = rank_tokens(v, err);
    for (int64_t i = 0; i < v->n && rc == QC_OK; i++) {
        const token *t = &v->tokens[i];
        float score = t->rank < INFINITY ? -(float)t->rank : t->type == NORMAL ? -1e9f : 0;
        rc = qc_buf_append(&packed, &score, sizeof score, err);
    }
    if (rc == QC_OK)
        rc = qc_gguf_put_array(head, "tokenizer.ggml.scores", QC_GGUF_F32, (uint64_t)v->n, &packed, err);
    qc_buf_clear(&packed);
    return rc;
}

/* Text of a token as it is stored: user-defined ones of SentencePiece have blanks again. */
static int append_token(qc_buf *buf, const vocab *v, int64_t id, qc_err *err)
{
    const token *t = &v->tokens[id];
    char name[32];
    if (!t->text) {
        snprintf(name, sizeof name, "[PAD%lld]", (long long)id);
        return qc_gguf_append_text(buf, name, strlen(name), err);
    }
    if (!v->sentencepiece || t->type != USER_DEFINED || !strstr(t->text, "\u2581"))
        return qc_gguf_append_text(buf, t->text, strlen(t->text), err);
    char *copy = qc_strdup(t->text), *to = copy;
    if (!copy)
        return qc_fail_nomem(err, "vocabulary", strlen(t->text));
    for (const char *from = t->text; *from;) {
        bool mark = strncmp(from, "\u2581", 3) == 0;
        *to++ = mark ? ' ' : *from;
        from += mark ? 3 : 1;
    }
    int rc = qc_gguf_append_text(buf, copy, (size_t)(to - copy), err);
    qc_free(copy);
    return rc;
}

static int put_tokens(qc_gguf_head *head, const vocab *v, qc_err *err)
{
    qc_buf texts = {0}, types = {0};
    int rc = QC_OK;
    for (int64_t i = 0; i < v->n && rc == QC_OK; i++) {
        int32_t type = v->tokens[i].text ? v->tokens[i].type : UNUSED;
        rc = append_token(&texts, v, i, err);
        if (rc == QC_OK)
            rc = qc_buf_append(&types, &type, sizeof type, err);
    }
    if (rc == QC_OK)
        rc = qc_gguf_put_array(head, "tokenizer.ggml.tokens", QC_GGUF_STRING, (uint64_t)v->n, &texts, err);
    if (rc == QC_OK)
        rc = qc_gguf_put_array(head, "tokenizer.ggml.token_type", QC_GGUF_I32, (uint64_t)v->n, &types, err);
    qc_buf_clear(&texts);
    qc_buf_clear(&types);
    return rc;
}

/* ---- special tokens ---- */

/* Id of a token that tokenizer_config.json names, -1 if it names none. */
static int64_t named_id(const vocab *v, const char *key)
{
    const cJSON *item = v->config ? qc_json_get(v->config, key) : NULL;
    const char *text = cJSON_IsObject(item) ? text_of(item, "content")
                       : v->config          ? text_of(v->config, key)
                                            : "";
    return *text ? qc_map_get(v->ids, text, strlen(text), -1) : -1;
}

/* Id of a special token that a template of the post-processor puts in front of (or behind) a text. */
static int template_id(const vocab *v, bool front, int64_t *ret, qc_err *err)
{
    const cJSON *post = qc_json_get(v->doc, "post_processor"), *p;
    int n = 0;
    for (int i = 0; (p = part(post, "processors", i)); i++) {
        const cJSON *single = has_type(p, "TemplateProcessing") ? qc_json_get(p, "single") : NULL;
        bool before = true;
        for (const cJSON *c = single ? single->child : NULL; c; c = c->next) {
            const cJSON *special = qc_json_get(c, "SpecialToken");
            before = before && !qc_json_get(c, "Sequence");
            if (!special || before != front)
                continue;
            const char *name = text_of(special, "id");
            const cJSON *ids = qc_json_get(qc_json_get(qc_json_get(p, "special_tokens"), name), "ids");
            n += cJSON_GetArraySize(ids);
            if (n != 1 || !qc_json_int(ids->child, ret))
                return refuse("a post_processor that adds several tokens", err);
        }
    }
    return QC_OK;
}

/* What encoding puts in front of (or behind) a text, -1 for nothing: an explicit flag of
 * tokenizer_config.json wins over the template, as in qc_tokenizer_apply_config. */
static int added_id(const vocab *v, bool front, int64_t *ret, qc_err *err)
{
    const char *flag = front ? "add_bos_token" : "add_eos_token";
    int64_t id = named_id(v, front ? "bos_token" : "eos_token");
    *ret = -1;
    QC_TRY(template_id(v, front, ret, err));
    if (v->config && qc_json_get(v->config, flag) && id >= 0)
        *ret = is_true(v->config, flag, false) ? id : -1;
    return QC_OK;
}

static int put_id(qc_gguf_head *head, const char *key, int64_t id, qc_err *err)
{
    return id < 0 ? QC_OK : qc_gguf_put_int(head, key, QC_GGUF_U32, id, err);
}

static int64_t first_eos(const qc_metas *metas)
{
    for (int i = 0; i < metas->n; i++)
        if (strcmp(metas->list[i].key, "model.eos") == 0 && metas->list[i].n_elems > 0)
            return (int64_t)metas->list[i].array[0];
    return -1;
}

static int put_special(qc_gguf_head *head, const vocab *v, const qc_metas *metas, qc_err *err)
{
    const char *unknown = text_of(qc_json_get(v->doc, "model"), "unk_token");
    int64_t unk = *unknown ? qc_map_get(v->ids, unknown, strlen(unknown), -1) : named_id(v, "unk_token");
    int64_t bos = qc_metas_int(metas, "model.bos", -1), eos = first_eos(metas), front, back;
    QC_TRY(added_id(v, true, &front, err));
    QC_TRY(added_id(v, false, &back, err));
    bos = front >= 0 ? front : bos >= 0 ? bos : named_id(v, "bos_token");
    eos = back >= 0 ? back : eos >= 0 ? eos : named_id(v, "eos_token");
    QC_TRY(put_id(head, "tokenizer.ggml.bos_token_id", bos, err));
    QC_TRY(put_id(head, "tokenizer.ggml.eos_token_id", eos, err));
    QC_TRY(put_id(head, "tokenizer.ggml.unknown_token_id", unk, err));
    QC_TRY(put_id(head, "tokenizer.ggml.padding_token_id", named_id(v, "pad_token"), err));
    QC_TRY(qc_gguf_put_int(head, "tokenizer.ggml.add_bos_token", QC_GGUF_BOOL, front >= 0, err));
    return qc_gguf_put_int(head, "tokenizer.ggml.add_eos_token", QC_GGUF_BOOL, back >= 0, err);
}

/* chat_template.jinja wins over the key of tokenizer_config.json, as in transformers; of several named ones
 * the default is taken. */
static int put_chat(qc_gguf_head *head, const qc_gguf_side *side, const cJSON *config, qc_err *err)
{
    const cJSON *item = config ? qc_json_get(config, "chat_template") : NULL;
    const char *text = side->chat_template;
    if (!text && cJSON_IsString(item))
        text = item->valuestring;
    for (const cJSON *c = !text && cJSON_IsArray(item) ? item->child : NULL; c; c = c->next)
        if (strcmp(text_of(c, "name"), "default") == 0)
            text = text_of(c, "template");
    return text && *text ? qc_gguf_put_text(head, "tokenizer.chat_template", text, err) : QC_OK;
}

static int put_all(qc_gguf_head *head, vocab *v, const qc_metas *metas, qc_err *err)
{
    QC_TRY(find_kind(v, err));
    v->tokens = qc_calloc((size_t)v->n, sizeof *v->tokens);
    v->ids = qc_map_new((size_t)v->n);
    if (!v->tokens || !v->ids)
        return qc_fail_nomem(err, "vocabulary", (unsigned long long)v->n * sizeof *v->tokens);
    QC_TRY(collect(v, err));
    QC_TRY(qc_gguf_put_text(head, "tokenizer.ggml.model", v->sentencepiece ? "llama" : "gpt2", err));
    QC_TRY(qc_gguf_put_text(head, "tokenizer.ggml.pre", v->sentencepiece ? "default" : v->pre->name, err));
    QC_TRY(put_tokens(head, v, err));
    if (v->sentencepiece) {
        QC_TRY(put_scores(head, v, err));
        QC_TRY(qc_gguf_put_int(head, "tokenizer.ggml.add_space_prefix", QC_GGUF_BOOL, v->space_prefix, err));
    } else {
        QC_TRY(put_merges(head, v, err));
    }
    return put_special(head, v, metas, err);
}

int qc_gguf_put_vocab(qc_gguf_head *head, const qc_gguf_side *side, const qc_metas *metas, int64_t n,
                      qc_err *err)
{
    cJSON *doc = NULL, *config = NULL;
    if (!side->tokenizer)
        return QC_OK;
    int rc = qc_json_parse(side->tokenizer, strlen(side->tokenizer), "tokenizer.json", false, &doc, err);
    if (rc == QC_OK && side->tokenizer_config)
        rc = qc_json_parse(side->tokenizer_config, strlen(side->tokenizer_config), "tokenizer_config.json",
                           false, &config, err);
    vocab v = {.doc = doc, .config = config, .n = n};
    if (rc == QC_OK)
        rc = put_all(head, &v, metas, err);
    if (rc == QC_OK)
        rc = put_chat(head, side, config, err);
    qc_free(v.tokens);
    qc_map_free(v.ids);
    cJSON_Delete(doc);
    cJSON_Delete(config);
    return rc;
}
