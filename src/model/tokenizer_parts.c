#include "tokenizer_internal.h"

#include "qc_alloc.h"
#include "qc_json.h"

#include <stdio.h>
#include <string.h>

#define MAX_STEPS 64 /* of one kind, Sequences flattened */

/* The split of the ByteLevel pre-tokenizer, which its files do not spell out. */
static const char gpt2_pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* Hand a part, or the parts of a Sequence one after the other, to load. */
typedef int part_loader(qc_tokenizer *tok, const cJSON *item, const char *type, const char *where,
                        qc_err *err);

static int each_part(qc_tokenizer *tok, const cJSON *item, const char *list_key, const char *what,
                     part_loader *load, qc_err *err)
{
    char where[256];
    const char *type = "";
    if (!item)
        return QC_OK;
    snprintf(where, sizeof where, "%.200s: %s", tok->name, what);
    if (!cJSON_IsObject(item))
        return qc_fail(err, QC_E_INPUT, "%s is no object", where);
    QC_TRY(tok_get_string(item, "type", where, &type, err));
    if (strcmp(type, "Sequence") != 0)
        return load(tok, item, type, where, err);
    const cJSON *parts = qc_json_get(item, list_key);
    if (!cJSON_IsArray(parts))
        return qc_fail(err, QC_E_INPUT, "%s: Sequence without \"%s\" array", where, list_key);
    for (const cJSON *c = parts->child; c; c = c->next)
        QC_TRY(each_part(tok, cJSON_IsNull(c) ? parts : c, list_key, what, load,
                         err)); /* null: "is no object" */
    return QC_OK;
}

static int unknown(const char *where, const char *type, qc_err *err)
{
    return qc_fail(err, QC_E_UNSUPPORTED, "%s: type \"%s\" is not supported", where, type);
}

/* A zeroed element behind the others of a growing array. */
static int append(void **array, size_t *n, size_t elem_bytes, void **ret, const char *where, qc_err *err)
{
    if (*n == MAX_STEPS)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: more than %d parts", where, MAX_STEPS);
    if (!*array)
        *array = qc_calloc(MAX_STEPS, elem_bytes);
    if (!*array)
        return qc_fail_nomem(err, where, MAX_STEPS * elem_bytes);
    *ret = (char *)*array + (*n)++ * elem_bytes;
    return QC_OK;
}

static int copy_string(const cJSON *object, const char *key, const char *where, char **ret, qc_err *err)
{
    const char *text = "";
    QC_TRY(tok_get_string(object, key, where, &text, err));
    *ret = qc_strdup(text);
    return *ret ? QC_OK : qc_fail_nomem(err, where, strlen(text));
}

/* {"String": "..."} or {"Regex": "..."} */
static int get_pattern(const cJSON *item, const char *where, const char **ret, bool *ret_literal, qc_err *err)
{
    const cJSON *pattern = qc_json_get(item, "pattern");
    const cJSON *literal = qc_json_get(pattern, "String"), *regex = qc_json_get(pattern, "Regex");
    const cJSON *given = literal ? literal : regex;
    if (!cJSON_IsString(given))
        return qc_fail(err, QC_E_INPUT, "%s: \"pattern\" holds neither a \"String\" nor a \"Regex\"", where);
    if (!*given->valuestring)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: an empty pattern", where);
    *ret = given->valuestring;
    *ret_literal = literal != NULL;
    return QC_OK;
}

/* ---- normalizer ---- */

static int load_replace(tok_norm *norm, const cJSON *item, const char *where, qc_err *err)
{
    const char *pattern = "";
    bool literal = false;
    QC_TRY(get_pattern(item, where, &pattern, &literal, err));
    QC_TRY(copy_string(item, "content", where, &norm->content, err));
    if (!literal)
        return tok_regex_new(pattern, false, where, &norm->regex, err);
    norm->pattern = qc_strdup(pattern);
    return norm->pattern ? QC_OK : qc_fail_nomem(err, where, strlen(pattern));
}

static int load_norm(qc_tokenizer *tok, const cJSON *item, const char *type, const char *where, qc_err *err)
{
    static const char *const names[] = {"NFC",       "NFD",   "NFKC",    "NFKD",
                                        "Lowercase", "Strip", "Prepend", "Replace"};
    size_t kind = 0;
    while (kind < sizeof names / sizeof *names && strcmp(type, names[kind]) != 0)
        kind++;
    if (kind == sizeof names / sizeof *names)
        return unknown(where, type, err);
    tok_norm *norm = NULL;
    QC_TRY(append((void **)&tok->norms, &tok->n_norms, sizeof *norm, (void **)&norm, where, err));
    norm->kind = (tok_norm_kind)kind;
    if (norm->kind == TOK_NORM_STRIP) {
        QC_TRY(tok_get_bool(item, "strip_left", true, where, &norm->left, err));
        return tok_get_bool(item, "strip_right", true, where, &norm->right, err);
    }
    if (norm->kind == TOK_NORM_PREPEND)
        return copy_string(item, "prepend", where, &norm->content, err);
    return norm->kind == TOK_NORM_REPLACE ? load_replace(norm, item, where, err) : QC_OK;
}

int tok_load_normalizer(qc_tokenizer *tok, const cJSON *item, qc_err *err)
{
    return each_part(tok, item, "normalizers", "normalizer", load_norm, err);
}

/* ---- pre-tokenizer ---- */

static int new_split(qc_tokenizer *tok, tok_split_kind kind, const char *where, tok_split **ret, qc_err *err)
{
    if (tok->bpe.byte_level)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: ByteLevel is not the last part", where);
    QC_TRY(append((void **)&tok->splits, &tok->n_splits, sizeof **ret, (void **)ret, where, err));
    (*ret)->kind = kind;
    return QC_OK;
}

static int load_regex_split(qc_tokenizer *tok, const cJSON *item, const char *where, qc_err *err)
{
    static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext",
                                        "Contiguous"};
    const char *behavior = "", *pattern = "";
    bool literal = false;
    tok_split *split = NULL;
    QC_TRY(new_split(tok, TOK_SPLIT_REGEX, where, &split, err));
    QC_TRY(tok_get_string(item, "behavior", where, &behavior, err));
    QC_TRY(tok_get_bool(item, "invert", false, where, &split->invert, err));
    size_t i = 0;
    while (i < sizeof names / sizeof *names && strcmp(behavior, names[i]) != 0)
        i++;
    if (i == sizeof names / sizeof *names)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: behavior \"%s\" is not supported", where, behavior);
    split->behavior = (tok_behavior)i;
    QC_TRY(get_pattern(item, where, &pattern, &literal, err));
    return tok_regex_new(pattern, literal, where, &split->regex, err);
}

static int load_byte_level(qc_tokenizer *tok, const cJSON *item, const char *where, qc_err *err)
{
    bool prefix = true, use_regex = true;
    tok_split *split = NULL;
    QC_TRY(tok_get_bool(item, "add_prefix_space", true, where, &prefix, err));
    QC_TRY(tok_get_bool(item, "use_regex", true, where, &use_regex, err));
    if (prefix)
        QC_TRY(new_split(tok, TOK_SPLIT_PREFIX_SPACE, where, &split, err));
    if (use_regex) {
        QC_TRY(new_split(tok, TOK_SPLIT_REGEX, where, &split, err));
        split->behavior = TOK_ISOLATED;
        QC_TRY(tok_regex_new(gpt2_pattern, false, where, &split->regex, err));
    }
    if (tok->bpe.byte_level)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: ByteLevel twice", where);
    tok->bpe.byte_level = true;
    return QC_OK;
}

/* prepend_scheme "first" asks where a piece lies in the original text: no part before it may move text. */
static bool moves_text(const qc_tokenizer *tok)
{
    for (size_t i = 0; i < tok->n_norms; i++) {
        const tok_norm *norm = &tok->norms[i];
        if (norm->kind == TOK_NORM_STRIP || norm->kind == TOK_NORM_PREPEND ||
            (norm->kind == TOK_NORM_REPLACE && (norm->regex || !*norm->content)))
            return true;
    }
    return tok->n_splits > 1;
}

static int load_metaspace(qc_tokenizer *tok, const cJSON *item, const char *where, qc_err *err)
{
    static const char *const names[] = {"always", "first", "never"};
    const char *mark = "", *scheme = "always";
    bool prefix = true;
    tok_split *split = NULL;
    QC_TRY(new_split(tok, TOK_SPLIT_METASPACE, where, &split, err));
    split->behavior = TOK_MERGED_WITH_NEXT;
    QC_TRY(tok_get_string(item, "replacement", where, &mark, err));
    if (!*mark || strlen(mark) != (size_t)tok_char_bytes((unsigned char)*mark))
        return qc_fail(err, QC_E_INPUT, "%s: replacement \"%s\" is not one character", where, mark);
    memcpy(split->replacement, mark, strlen(mark));
    QC_TRY(tok_get_bool(item, "split", true, where, &split->split, err));
    QC_TRY(tok_get_bool(item, "add_prefix_space", true, where, &prefix, err));
    if (qc_json_get(item, "prepend_scheme"))
        QC_TRY(tok_get_string(item, "prepend_scheme", where, &scheme, err));
    else if (!prefix)
        scheme = "never";
    size_t i = 0;
    while (i < 3 && strcmp(scheme, names[i]) != 0)
        i++;
    if (i == 3)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: prepend_scheme \"%s\" is not supported", where, scheme);
    split->prepend = (tok_prepend)i;
    if (!prefix && split->prepend != TOK_PREPEND_NEVER)
        return qc_fail(err, QC_E_INPUT, "%s: add_prefix_space false contradicts prepend_scheme \"%s\"", where,
                       scheme);
    if (split->prepend == TOK_PREPEND_FIRST && moves_text(tok))
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: prepend_scheme \"first\" behind a part that moves text",
                       where);
    return QC_OK;
}

static int load_split(qc_tokenizer *tok, const cJSON *item, const char *type, const char *where, qc_err *err)
{
    if (strcmp(type, "Split") == 0)
        return load_regex_split(tok, item, where, err);
    if (strcmp(type, "ByteLevel") == 0)
        return load_byte_level(tok, item, where, err);
    if (strcmp(type, "Metaspace") == 0)
        return load_metaspace(tok, item, where, err);
    if (strcmp(type, "Digits") != 0)
        return unknown(where, type, err);
    tok_split *split = NULL;
    bool individual = false;
    QC_TRY(new_split(tok, TOK_SPLIT_DIGITS, where, &split, err));
    QC_TRY(tok_get_bool(item, "individual_digits", false, where, &individual, err));
    split->behavior = individual ? TOK_ISOLATED : TOK_CONTIGUOUS;
    return QC_OK;
}

int tok_load_pre_tokenizer(qc_tokenizer *tok, const cJSON *item, qc_err *err)
{
    return each_part(tok, item, "pretokenizers", "pre_tokenizer", load_split, err);
}

/* ---- post-processor ---- */

int tok_ids_insert(tok_ids *list, int64_t at, const int32_t *ids, int64_t n, qc_err *err)
{
    int32_t *fresh = qc_alloc((size_t)(list->n + n), sizeof *fresh);
    if (!fresh)
        return qc_fail_nomem(err, "special tokens", 0);
    for (int64_t i = 0; i < list->n + n; i++)
        fresh[i] = i < at ? list->ids[i] : i < at + n ? ids[i - at] : list->ids[i - n];
    qc_free(list->ids);
    list->ids = fresh;
    list->n += n;
    return QC_OK;
}

/* Ids of a special token of a template, appended to list. */
static int template_token(const cJSON *item, const cJSON *special, const char *where, tok_ids *list,
                          qc_err *err)
{
    const char *id_name = "";
    QC_TRY(tok_get_string(special, "id", where, &id_name, err));
    const cJSON *ids = qc_json_get(qc_json_get(qc_json_get(item, "special_tokens"), id_name), "ids");
    if (!cJSON_IsArray(ids))
        return qc_fail(err, QC_E_INPUT, "%s: \"%s\" has no ids in special_tokens", where, id_name);
    for (const cJSON *c = ids->child; c; c = c->next) {
        int64_t id;
        if (!qc_json_int(c, &id) || id < 0 || id > TOK_MAX_ID)
            return qc_fail(err, QC_E_INPUT, "%s: an id of \"%s\" is not an integer in 0 .. %d", where,
                           id_name, TOK_MAX_ID);
        int32_t id32 = (int32_t)id;
        QC_TRY(tok_ids_insert(list, list->n, &id32, 1, err));
    }
    return QC_OK;
}

/* The part of a template before ("A" not yet seen) or behind the text. */
static int template_side(const cJSON *item, bool before, const char *where, tok_ids *list, int *ret_n_texts,
                         qc_err *err)
{
    const cJSON *single = qc_json_get(item, "single");
    if (!cJSON_IsArray(single))
        return qc_fail(err, QC_E_INPUT, "%s: TemplateProcessing without \"single\" array", where);
    int n_texts = 0;
    for (const cJSON *c = single->child; c; c = c->next) {
        const cJSON *special = qc_json_get(c, "SpecialToken"), *text = qc_json_get(c, "Sequence");
        if (text)
            n_texts++;
        else if (!special)
            return qc_fail(err, QC_E_INPUT, "%s: an item of \"single\" is neither SpecialToken nor Sequence",
                           where);
        else if (before == (n_texts == 0))
            QC_TRY(template_token(item, special, where, list, err));
    }
    *ret_n_texts = n_texts;
    return QC_OK;
}

static int load_post(qc_tokenizer *tok, const cJSON *item, const char *type, const char *where, qc_err *err)
{
    if (strcmp(type, "ByteLevel") == 0) /* trims offsets, which we do not have */
        return QC_OK;
    if (strcmp(type, "TemplateProcessing") != 0)
        return unknown(where, type, err);
    tok_ids before = {0};
    int n_texts = 0;
    int rc = template_side(item, true, where, &before, &n_texts, err);
    if (rc == QC_OK && n_texts != 1)
        rc = qc_fail(err, QC_E_UNSUPPORTED, "%s: a template with %d texts, one was expected", where, n_texts);
    if (rc == QC_OK && before.n > 0) /* a later template wraps the earlier one */
        rc = tok_ids_insert(&tok->prefix, 0, before.ids, before.n, err);
    qc_free(before.ids);
    return rc == QC_OK ? template_side(item, false, where, &tok->suffix, &n_texts, err) : rc;
}

int tok_load_post_processor(qc_tokenizer *tok, const cJSON *item, qc_err *err)
{
    return each_part(tok, item, "processors", "post_processor", load_post, err);
}

/* ---- decoder ---- */

static int get_count(const cJSON *item, const char *key, const char *where, int32_t *ret, qc_err *err)
{
    int64_t n;
    if (!qc_json_int(qc_json_get(item, key), &n) || n < 0 || n > INT32_MAX)
        return qc_fail(err, QC_E_INPUT, "%s: \"%s\" is no count", where, key);
    *ret = (int32_t)n;
    return QC_OK;
}

static int load_decoder(qc_tokenizer *tok, const cJSON *item, const char *type, const char *where,
                        qc_err *err)
{
    static const char *const names[] = {"ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip", "Metaspace"};
    size_t kind = 0;
    while (kind < sizeof names / sizeof *names && strcmp(type, names[kind]) != 0)
        kind++;
    if (kind == sizeof names / sizeof *names)
        return unknown(where, type, err);
    tok_decoder *dec = NULL;
    QC_TRY(append((void **)&tok->decoders, &tok->n_decoders, sizeof *dec, (void **)&dec, where, err));
    dec->kind = (tok_decoder_kind)kind;
    if (dec->kind == TOK_DEC_REPLACE) {
        const char *pattern = "";
        bool literal = false;
        QC_TRY(get_pattern(item, where, &pattern, &literal, err));
        if (!literal)
            return qc_fail(err, QC_E_UNSUPPORTED, "%s: Replace with a Regex", where);
        dec->pattern = qc_strdup(pattern);
        if (!dec->pattern)
            return qc_fail_nomem(err, where, strlen(pattern));
        return copy_string(item, "content", where, &dec->content, err);
    }
    if (dec->kind == TOK_DEC_STRIP) {
        QC_TRY(copy_string(item, "content", where, &dec->pattern, err));
        QC_TRY(get_count(item, "start", where, &dec->start, err));
        return get_count(item, "stop", where, &dec->stop, err);
    }
    if (dec->kind == TOK_DEC_METASPACE) {
        const cJSON *scheme = qc_json_get(item, "prepend_scheme"),
                    *prefix = qc_json_get(item, "add_prefix_space");
        dec->prepend =
            !(cJSON_IsString(scheme) && strcmp(scheme->valuestring, "never") == 0) && !cJSON_IsFalse(prefix);
        return copy_string(item, "replacement", where, &dec->pattern, err);
    }
    return QC_OK;
}

int tok_load_decoder(qc_tokenizer *tok, const cJSON *item, qc_err *err)
{
    return each_part(tok, item, "decoders", "decoder", load_decoder, err);
}
