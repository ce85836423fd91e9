#include "tokenizer_internal.h"

#include "qc_alloc.h"
#include "qc_json.h"
#include "qc_log.h"

#include <string.h>

/* ---- typed members ---- */

int tok_get_bool(const cJSON *object, const char *key, bool absent, const char *where, bool *ret, qc_err *err)
{
    const cJSON *item = qc_json_get(object, key);
    if (item && !cJSON_IsBool(item))
        return qc_fail(err, QC_E_INPUT, "%s: \"%s\" is not true or false", where, key);
    *ret = item ? cJSON_IsTrue(item) : absent;
    return QC_OK;
}

int tok_get_string(const cJSON *object, const char *key, const char *where, const char **ret, qc_err *err)
{
    const cJSON *item = qc_json_get(object, key);
    if (!cJSON_IsString(item))
        return qc_fail(err, QC_E_INPUT, "%s: \"%s\" is %s, a string was expected", where, key,
                       item ? "of another type" : "missing");
    *ret = item->valuestring;
    return QC_OK;
}

static int get_id(const cJSON *item, const char *name, const char *what, const char *piece, int32_t *ret,
                  qc_err *err)
{
    int64_t id;
    if (!qc_json_int(item, &id))
        return qc_fail(err, QC_E_INPUT, "%s: %s \"%s\": the id is not an integer", name, what, piece);
    if (id < 0 || id > TOK_MAX_ID)
        return qc_fail(err, QC_E_INPUT, "%s: %s \"%s\": id %lld is outside 0 .. %d", name, what, piece,
                       (long long)id, TOK_MAX_ID);
    *ret = (int32_t)id;
    return QC_OK;
}

/* ---- pieces ---- */

/* Largest id and bytes of all texts of the vocabulary object and the array of added tokens, whose types are
 * checked. */
static int measure(const qc_tokenizer *tok, const cJSON *pieces, const cJSON *added, size_t *ret_pool_bytes,
                   int32_t *ret_n_ids, qc_err *err)
{
    size_t pool_bytes = 0;
    int32_t id = 0, max_id = -1;
    for (const cJSON *c = pieces->child; c; c = c->next) {
        QC_TRY(get_id(c, tok->name, "vocabulary piece", c->string, &id, err));
        max_id = id > max_id ? id : max_id;
        pool_bytes += strlen(c->string) + 1;
    }
    for (const cJSON *c = added ? added->child : NULL; c; c = c->next) {
        const char *content = "";
        if (!cJSON_IsObject(c))
            return qc_fail(err, QC_E_INPUT, "%s: an entry of added_tokens is not an object", tok->name);
        QC_TRY(tok_get_string(c, "content", tok->name, &content, err));
        QC_TRY(get_id(qc_json_get(c, "id"), tok->name, "added token", content, &id, err));
        if (!*content)
            return qc_fail(err, QC_E_INPUT, "%s: added token %d has no text", tok->name, id);
        if (strlen(content) > TOK_MAX_ADDED_BYTES)
            return qc_fail(err, QC_E_UNSUPPORTED, "%s: added token %d is longer than %d bytes", tok->name, id,
                           TOK_MAX_ADDED_BYTES);
        max_id = id > max_id ? id : max_id;
        pool_bytes += strlen(content) + 1;
    }
    if (max_id < 0)
        return qc_fail(err, QC_E_INPUT, "%s: the vocabulary is empty", tok->name);
    if (pool_bytes >= TOK_HOLE)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: more than 4 GiB of vocabulary", tok->name);
    *ret_pool_bytes = pool_bytes;
    *ret_n_ids = max_id + 1;
    return QC_OK;
}

static int make_tables(tok_vocab *vocab, size_t pool_bytes, int32_t n_ids, size_t n_pieces, size_t n_added,
                       qc_err *err)
{
    vocab->n_ids = n_ids;
    vocab->pool = qc_alloc(pool_bytes, 1);
    vocab->offset = qc_alloc((size_t)n_ids, sizeof *vocab->offset);
    vocab->flags = qc_calloc((size_t)n_ids, 1);
    vocab->model = qc_map_new(n_pieces);
    vocab->added = qc_map_new(n_added);
    if (!vocab->pool || !vocab->offset || !vocab->flags || !vocab->model || !vocab->added)
        return qc_fail_nomem(err, "vocabulary", pool_bytes + (size_t)n_ids * 5);
    for (int32_t i = 0; i < n_ids; i++)
        vocab->offset[i] = TOK_HOLE;
    return QC_OK;
}

/* Copy a piece into the pool and give it its id, which must be free. Returns the copy in *ret. */
static int place(qc_tokenizer *tok, const char *piece, int32_t id, size_t *used_bytes, const char **ret,
                 qc_err *err)
{
    tok_vocab *vocab = &tok->vocab;
    if (vocab->offset[id] != TOK_HOLE)
        return qc_fail(err, QC_E_INPUT, "%s: \"%s\" and \"%s\" both have the id %d", tok->name,
                       tok_piece(vocab, id), piece, id);
    size_t n_bytes = strlen(piece) + 1;
    memcpy(vocab->pool + *used_bytes, piece, n_bytes);
    vocab->offset[id] = (uint32_t)*used_bytes;
    *ret = vocab->pool + *used_bytes;
    *used_bytes += n_bytes;
    return QC_OK;
}

static int add_to_map(qc_tokenizer *tok, qc_map *map, const char *piece, int32_t id, qc_err *err)
{
    int rc = qc_map_add(map, piece, strlen(piece), id);
    if (rc < 0)
        return qc_fail_nomem(err, "vocabulary", 0);
    return rc ? QC_OK : qc_fail(err, QC_E_INPUT, "%s: \"%s\" is listed twice", tok->name, piece);
}

static int place_added(qc_tokenizer *tok, const cJSON *item, size_t *used_bytes, qc_err *err)
{
    tok_vocab *vocab = &tok->vocab;
    const char *content = qc_json_get(item, "content")->valuestring;
    int32_t id = (int32_t)qc_json_get(item, "id")->valuedouble;
    int64_t known = qc_map_get(vocab->model, content, strlen(content), -1);
    if (known >= 0 && known != id)
        return qc_fail(err, QC_E_INPUT, "%s: added token \"%s\" has id %d, the vocabulary gives it %d",
                       tok->name, content, id, (int)known);
    const char *piece = known >= 0 ? tok_piece(vocab, id) : NULL;
    if (!piece)
        QC_TRY(place(tok, content, id, used_bytes, &piece, err));
    QC_TRY(add_to_map(tok, vocab->added, piece, id, err));
    bool special = false;
    QC_TRY(tok_get_bool(item, "special", false, tok->name, &special, err));
    vocab->flags[id] = (uint8_t)(TOK_ADDED | (special ? TOK_SPECIAL : 0));
    return QC_OK;
}

static int load_vocab(qc_tokenizer *tok, const cJSON *pieces, const cJSON *added, qc_err *err)
{
    size_t pool_bytes = 0, used_bytes = 0;
    int32_t n_ids = 0;
    size_t n_pieces = (size_t)cJSON_GetArraySize(pieces);
    QC_TRY(measure(tok, pieces, added, &pool_bytes, &n_ids, err));
    QC_TRY(make_tables(&tok->vocab, pool_bytes, n_ids, n_pieces, (size_t)cJSON_GetArraySize(added), err));
    for (const cJSON *c = pieces->child; c; c = c->next) {
        const char *piece = "";
        QC_TRY(place(tok, c->string, (int32_t)c->valuedouble, &used_bytes, &piece, err));
        QC_TRY(add_to_map(tok, tok->vocab.model, piece, (int32_t)c->valuedouble, err));
    }
    for (const cJSON *c = added ? added->child : NULL; c; c = c->next)
        QC_TRY(place_added(tok, c, &used_bytes, err));
    int32_t n_holes = 0;
    for (int32_t i = 0; i < n_ids; i++)
        n_holes += tok->vocab.offset[i] == TOK_HOLE;
    if (n_holes)
        qc_log(QC_LOG_INFO, "%s: %d ids below %d have no piece; ids are kept as stored", tok->name, n_holes,
               n_ids);
    return QC_OK;
}

/* ---- model ---- */

static int load_model(qc_tokenizer *tok, const cJSON *model, const cJSON *added, qc_err *err)
{
    tok_bpe *bpe = &tok->bpe;
    const cJSON *type = qc_json_get(model, "type"), *merges = qc_json_get(model, "merges");
    const cJSON *pieces = qc_json_get(model, "vocab"), *dropout = qc_json_get(model, "dropout");
    if (type && (!cJSON_IsString(type) || strcmp(type->valuestring, "BPE") != 0))
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: model type \"%s\", only \"BPE\" is supported", tok->name,
                       cJSON_IsString(type) ? type->valuestring : "?");
    if (!cJSON_IsObject(pieces) || !cJSON_IsArray(merges))
        return qc_fail(err, QC_E_INPUT, "%s: model.%s", tok->name,
                       cJSON_IsArray(merges) ? "vocab is no object" : "merges is no array");
    if (dropout && !(cJSON_IsNumber(dropout) && dropout->valuedouble == 0))
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: model.dropout", tok->name);
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++) {
        const cJSON *affix = qc_json_get(model, affixes[i]);
        if (affix && !(cJSON_IsString(affix) && !*affix->valuestring))
            return qc_fail(err, QC_E_UNSUPPORTED, "%s: model.%s", tok->name, affixes[i]);
    }
    QC_TRY(tok_get_bool(model, "fuse_unk", false, tok->name, &bpe->fuse_unk, err));
    QC_TRY(tok_get_bool(model, "byte_fallback", false, tok->name, &bpe->byte_fallback, err));
    QC_TRY(tok_get_bool(model, "ignore_merges", false, tok->name, &bpe->ignore_merges, err));
    QC_TRY(load_vocab(tok, pieces, added, err));
    bpe->unk_id = TOK_UNK_NONE;
    if (qc_json_get(model, "unk_token")) {
        const char *unk = "";
        QC_TRY(tok_get_string(model, "unk_token", tok->name, &unk, err));
        bpe->unk_id = (int32_t)qc_map_get(tok->vocab.model, unk, strlen(unk), TOK_UNK_MISSING);
    }
    return tok_bpe_load(bpe, &tok->vocab, merges, tok->name, err);
}

/* ---- added tokens ---- */

static int make_added(qc_tokenizer *tok, const cJSON *item, tok_run *run, tok_added *ret,
                      bool *ret_normalised, qc_err *err)
{
    const char *text = qc_json_get(item, "content")->valuestring;
    size_t n_bytes = strlen(text);
    tok_added token = {.id = (int32_t)qc_json_get(item, "id")->valuedouble};
    QC_TRY(tok_get_bool(item, "single_word", false, tok->name, &token.single_word, err));
    QC_TRY(tok_get_bool(item, "lstrip", false, tok->name, &token.lstrip, err));
    QC_TRY(tok_get_bool(item, "rstrip", false, tok->name, &token.rstrip, err));
    QC_TRY(tok_get_bool(item, "special", false, tok->name, &token.special, err));
    QC_TRY(tok_get_bool(item, "normalized", !token.special, tok->name, ret_normalised, err));
    if (*ret_normalised)
        QC_TRY(tok_normalise(run, text, n_bytes, &text, &n_bytes));
    if (n_bytes == 0)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: nothing is left of added token %d after normalisation",
                       tok->name, token.id);
    token.n_bytes = n_bytes;
    token.text = qc_strndup(text, n_bytes);
    if (!token.text)
        return qc_fail_nomem(err, "added token", n_bytes);
    *ret = token;
    return QC_OK;
}

/* Which of two tokens with the same text after normalisation is meant, the file does not say. */
static int check_distinct(const qc_tokenizer *tok, const tok_matcher *matcher, qc_err *err)
{
    for (size_t i = 1; i < matcher->n_tokens; i++) {
        const tok_added *a = &matcher->tokens[i - 1], *b = &matcher->tokens[i];
        if (a->n_bytes == b->n_bytes && memcmp(a->text, b->text, a->n_bytes) == 0)
            return qc_fail(err, QC_E_UNSUPPORTED,
                           "%s: added tokens %d and %d are the same after normalisation", tok->name, a->id,
                           b->id);
    }
    return QC_OK;
}

static int load_matchers(qc_tokenizer *tok, const cJSON *added, qc_err *err)
{
    size_t n = (size_t)cJSON_GetArraySize(added);
    tok->raw.tokens = qc_calloc(n, sizeof *tok->raw.tokens);
    tok->normalised.tokens = qc_calloc(n, sizeof *tok->normalised.tokens);
    if (!tok->raw.tokens || !tok->normalised.tokens)
        return qc_fail_nomem(err, "added tokens", n * sizeof *tok->raw.tokens);
    tok_run run;
    QC_TRY(tok_run_begin(&run, tok, 0, err));
    int rc = QC_OK;
    for (const cJSON *c = added ? added->child : NULL; c && rc == QC_OK; c = c->next) {
        tok_added token = {0};
        bool normalised = false;
        rc = make_added(tok, c, &run, &token, &normalised, err);
        tok_matcher *matcher = normalised ? &tok->normalised : &tok->raw;
        if (rc == QC_OK)
            matcher->tokens[matcher->n_tokens++] = token;
    }
    tok_run_end(&run);
    if (rc == QC_OK) {
        tok_matcher_build(&tok->raw);
        tok_matcher_build(&tok->normalised);
        rc = check_distinct(tok, &tok->normalised, err);
    }
    return rc;
}

/* Ids that the post-processor adds must exist. */
static int check_template(const qc_tokenizer *tok, const tok_ids *list, qc_err *err)
{
    for (int64_t i = 0; i < list->n; i++)
        if (!tok_piece(&tok->vocab, list->ids[i]))
            return qc_fail(err, QC_E_INPUT, "%s: post_processor: id %d has no piece, ids end at %d",
                           tok->name, list->ids[i], tok->vocab.n_ids - 1);
    return QC_OK;
}

int tok_load(qc_tokenizer *tok, const cJSON *doc, qc_err *err)
{
    const cJSON *model = qc_json_get(doc, "model"), *added = qc_json_get(doc, "added_tokens");
    if (!cJSON_IsObject(model))
        return qc_fail(err, QC_E_INPUT, "%s: no \"model\" object", tok->name);
    if (added && !cJSON_IsArray(added))
        return qc_fail(err, QC_E_INPUT, "%s: added_tokens is no array", tok->name);
    /* truncation and padding are defaults of one training script; who encodes a text wants all of it. */
    QC_TRY(tok_load_normalizer(tok, qc_json_get(doc, "normalizer"), err));
    QC_TRY(tok_load_pre_tokenizer(tok, qc_json_get(doc, "pre_tokenizer"), err));
    QC_TRY(tok_load_post_processor(tok, qc_json_get(doc, "post_processor"), err));
    QC_TRY(tok_load_decoder(tok, qc_json_get(doc, "decoder"), err));
    QC_TRY(load_model(tok, model, added, err));
    QC_TRY(check_template(tok, &tok->prefix, err));
    QC_TRY(check_template(tok, &tok->suffix, err));
    return load_matchers(tok, added, err);
}
