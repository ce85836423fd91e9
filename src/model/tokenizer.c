#include "tokenizer_internal.h"

#include "qc_alloc.h"
#include "qc_json.h"
#include "qc_log.h"

#include <string.h>

#define JIT_STACK_START 32768
#define JIT_STACK_MAX   (64u << 20) /* reserved address space; used up only by patterns that nest repeats */
#define MAX_CACHED      32768       /* words: 2 MiB */

/* ---- one encode call ---- */

int tok_run_push(tok_run *run, const int32_t *ids, int64_t n)
{
    if (run->n_ids + n > run->cap_ids) {
        int64_t cap = (run->n_ids + n) * 2 + 64;
        int32_t *fresh =
            qc_realloc(run->ids, (size_t)run->n_ids * sizeof *fresh, (size_t)cap * sizeof *fresh);
        if (!fresh)
            return qc_fail_nomem(run->err, "token ids", (size_t)cap * sizeof *fresh);
        run->ids = fresh;
        run->cap_ids = cap;
    }
    for (int64_t i = 0; i < n; i++)
        run->ids[run->n_ids + i] = ids[i];
    run->n_ids += n;
    return QC_OK;
}

static bool uses_regex(const qc_tokenizer *tok)
{
    for (size_t i = 0; i < tok->n_splits; i++)
        if (tok->splits[i].regex)
            return true;
    for (size_t i = 0; i < tok->n_norms; i++)
        if (tok->norms[i].regex)
            return true;
    return false;
}

static int begin_regex(tok_run *run, size_t n_bytes)
{
    run->match = pcre2_match_data_create(1, NULL);
    run->match_context = pcre2_match_context_create(NULL);
    run->jit_stack = pcre2_jit_stack_create(JIT_STACK_START, JIT_STACK_MAX, NULL);
    if (!run->match || !run->match_context || !run->jit_stack)
        return qc_fail_nomem(run->err, "pattern matching", JIT_STACK_START);
    pcre2_jit_stack_assign(run->match_context, NULL, run->jit_stack);
    /* Backtracking that grows faster than the text ends in an error, not in a hang. */
    uint64_t limit = 10000000 + (uint64_t)n_bytes * 100;
    pcre2_set_match_limit(run->match_context, limit < UINT32_MAX ? (uint32_t)limit : UINT32_MAX);
    return QC_OK;
}

int tok_run_begin(tok_run *run, const qc_tokenizer *tok, size_t n_bytes, qc_err *err)
{
    *run = (tok_run){.tok = tok, .err = err};
    run->pieces = qc_calloc(tok->n_splits, sizeof *run->pieces);
    uint32_t n_cached = 64;
    while (n_cached < MAX_CACHED && n_cached < n_bytes / 8)
        n_cached *= 2;
    run->cache = qc_calloc(n_cached, sizeof *run->cache);
    run->n_cached = n_cached;
    int rc =
        run->pieces && run->cache ? QC_OK : qc_fail_nomem(err, "tokenizer", n_cached * sizeof *run->cache);
    if (rc == QC_OK && uses_regex(tok))
        rc = begin_regex(run, n_bytes);
    if (rc < 0)
        tok_run_end(run);
    return rc;
}

void tok_run_end(tok_run *run)
{
    for (size_t i = 0; run->pieces && i < run->tok->n_splits; i++)
        qc_buf_clear(&run->pieces[i]);
    qc_free(run->pieces);
    qc_buf_clear(&run->norm[0]);
    qc_buf_clear(&run->norm[1]);
    qc_buf_clear(&run->subject);
    qc_buf_clear(&run->mapped);
    qc_free(run->ids);
    qc_free(run->symbols);
    qc_free(run->heap);
    qc_free(run->cache);
    pcre2_match_data_free(run->match);
    pcre2_match_context_free(run->match_context);
    pcre2_jit_stack_free(run->jit_stack);
    *run = (tok_run){0};
}

typedef int text_sink(tok_run *run, const char *text, size_t n_bytes, bool first, bool plain_special);

/* Cut the added tokens of one matcher out; what lies between goes on to sink. first: see tok_split_piece. */
static int cut_added(tok_run *run, const tok_matcher *matcher, const char *text, size_t n_bytes, bool first,
                     bool plain_special, text_sink *sink)
{
    size_t done = 0, from = 0, start, end;
    const tok_added *token;
    while ((token = tok_matcher_next(matcher, text, n_bytes, plain_special, done, &from, &start, &end)) !=
           NULL) {
        if (done < start)
            QC_TRY(sink(run, text + done, start - done, first && done == 0, plain_special));
        if (start < end)
            QC_TRY(tok_run_push(run, &token->id, 1));
        done = end;
    }
    return done < n_bytes ? sink(run, text + done, n_bytes - done, first && done == 0, plain_special) : QC_OK;
}

static int split_sink(tok_run *run, const char *text, size_t n_bytes, bool first, bool plain_special)
{
    (void)plain_special;
    return tok_split_piece(run, text, n_bytes, first);
}

static int normalise_sink(tok_run *run, const char *text, size_t n_bytes, bool first, bool plain_special)
{
    const char *normal;
    size_t normal_bytes;
    QC_TRY(tok_normalise(run, text, n_bytes, &normal, &normal_bytes));
    return cut_added(run, &run->tok->normalised, normal, normal_bytes, first, plain_special, split_sink);
}

int tok_run_text(tok_run *run, const char *text, size_t n_bytes, bool plain_special)
{
    return cut_added(run, &run->tok->raw, text, n_bytes, true, plain_special, normalise_sink);
}

int qc_tokenizer_encode(const qc_tokenizer *tok, const char *text, size_t n_bytes,
                        const qc_encode_options *options, int32_t **ret_ids, int64_t *ret_n_ids, qc_err *err)
{
    qc_encode_options o = options ? *options : (qc_encode_options){0};
    size_t bad;
    if (n_bytes >= INT32_MAX / 4) /* a normaliser may make it several times as long */
        return qc_fail(err, QC_E_INPUT, "text of %zu bytes, the tokenizer takes less than 512 MiB at a time",
                       n_bytes);
    if (!qc_utf8_valid(text, n_bytes, &bad))
        return qc_fail(err, QC_E_INPUT, "text is not UTF-8: invalid byte at offset %zu", bad);
    tok_run run;
    QC_TRY(tok_run_begin(&run, tok, n_bytes, err));
    int rc = o.add_special ? tok_run_push(&run, tok->prefix.ids, tok->prefix.n) : QC_OK;
    if (rc == QC_OK)
        rc = tok_run_text(&run, text, n_bytes, o.plain_special);
    if (rc == QC_OK && o.add_special)
        rc = tok_run_push(&run, tok->suffix.ids, tok->suffix.n);
    if (rc == QC_OK && !run.ids && !(run.ids = qc_alloc(0, sizeof *run.ids)))
        rc = qc_fail_nomem(err, "token ids", 0);
    if (rc == QC_OK) {
        *ret_ids = run.ids;
        *ret_n_ids = run.n_ids;
        run.ids = NULL;
    }
    tok_run_end(&run);
    return rc;
}

/* ---- life of a tokenizer ---- */

/* cJSON ends a string at an escaped NUL, which would silently change a piece. */
static bool has_escaped_nul(const char *json, size_t n_bytes)
{
    const char *end = json + n_bytes, *p = json;
    while ((p = memmem(p, (size_t)(end - p), "\\u0000", 6)) != NULL) {
        size_t n_before = 0;
        while (p - n_before > json && p[-1 - (ptrdiff_t)n_before] == '\\')
            n_before++;
        if (n_before % 2 == 0)
            return true;
        p++;
    }
    return false;
}

int qc_tokenizer_new(const char *json, size_t n_bytes, const char *name, qc_tokenizer **ret, qc_err *err)
{
    cJSON *doc;
    if (has_escaped_nul(json, n_bytes))
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: a string with a NUL character", name);
    QC_TRY(qc_json_parse(json, n_bytes, name, true, &doc, err));
    qc_tokenizer *tok = qc_calloc(1, sizeof *tok);
    int rc = tok && (tok->name = qc_strdup(name)) ? tok_load(tok, doc, err)
                                                  : qc_fail_nomem(err, "tokenizer", sizeof *tok);
    cJSON_Delete(doc);
    if (rc < 0)
        qc_tokenizer_free(tok);
    else
        *ret = tok;
    return rc;
}

void qc_tokenizer_free(qc_tokenizer *tok)
{
    if (!tok)
        return;
    for (size_t i = 0; i < tok->n_norms; i++) {
        qc_free(tok->norms[i].content);
        qc_free(tok->norms[i].pattern);
        pcre2_code_free(tok->norms[i].regex);
    }
    for (size_t i = 0; i < tok->n_splits; i++)
        pcre2_code_free(tok->splits[i].regex);
    for (size_t i = 0; i < tok->n_decoders; i++) {
        qc_free(tok->decoders[i].pattern);
        qc_free(tok->decoders[i].content);
    }
    qc_free(tok->norms);
    qc_free(tok->splits);
    qc_free(tok->decoders);
    tok_matcher_clear(&tok->raw);
    tok_matcher_clear(&tok->normalised);
    tok_bpe_clear(&tok->bpe);
    qc_free(tok->vocab.pool);
    qc_free(tok->vocab.offset);
    qc_free(tok->vocab.flags);
    qc_map_free(tok->vocab.model);
    qc_map_free(tok->vocab.added);
    qc_free(tok->prefix.ids);
    qc_free(tok->suffix.ids);
    qc_free(tok->name);
    qc_free(tok);
}

/* ---- tokenizer_config.json ---- */

/* Id of the token that a config names as a string or as an object with "content"; -1 if it names none. */
static int config_token(const qc_tokenizer *tok, const cJSON *config, const char *key, const char *name,
                        int32_t *ret, qc_err *err)
{
    const cJSON *item = qc_json_get(config, key);
    *ret = -1;
    if (!item)
        return QC_OK;
    const cJSON *content = cJSON_IsObject(item) ? qc_json_get(item, "content") : item;
    if (!cJSON_IsString(content))
        return qc_fail(err, QC_E_INPUT, "%s: %s is neither a string nor an object with \"content\"", name,
                       key);
    *ret = qc_tokenizer_token_id(tok, content->valuestring);
    if (*ret < 0)
        return qc_fail(err, QC_E_INPUT, "%s: %s \"%s\" is not in the vocabulary", name, key,
                       content->valuestring);
    return QC_OK;
}

/* Make the end of a list (front: its first id, else its last) agree with an add_..._token flag. An explicit
 * flag wins over the post-processor, as where the files are used with the library that writes them. */
static int apply_flag(const qc_tokenizer *tok, const cJSON *config, const char *flag, const char *token,
                      bool front, tok_ids *list, const char *name, qc_err *err)
{
    bool add;
    int32_t id;
    if (!qc_json_get(config, flag))
        return QC_OK;
    QC_TRY(tok_get_bool(config, flag, false, name, &add, err));
    QC_TRY(config_token(tok, config, token, name, &id, err));
    if (add && id < 0)
        return qc_fail(err, QC_E_INPUT, "%s: %s is true, but there is no %s", name, flag, token);
    int64_t at = front ? 0 : list->n - 1;
    bool has = id >= 0 && list->n > 0 && list->ids[at] == id;
    if (add == has || id < 0)
        return QC_OK;
    if (add)
        return tok_ids_insert(list, front ? 0 : list->n, &id, 1, err);
    qc_log(QC_LOG_WARN, "%s: %s is false, the post_processor of %s would add \"%s\": not added", name, flag,
           tok->name, tok_piece(&tok->vocab, id));
    list->n--;
    memmove(list->ids + at, list->ids + at + 1, (size_t)(list->n - at) * sizeof *list->ids);
    return QC_OK;
}

int qc_tokenizer_apply_config(qc_tokenizer *tok, const char *json, size_t n_bytes, const char *name,
                              qc_err *err)
{
    cJSON *config;
    QC_TRY(qc_json_parse(json, n_bytes, name, true, &config, err));
    int rc = cJSON_IsObject(config) ? QC_OK : qc_fail(err, QC_E_INPUT, "%s: not a json object", name);
    if (rc == QC_OK)
        rc = apply_flag(tok, config, "add_bos_token", "bos_token", true, &tok->prefix, name, err);
    if (rc == QC_OK)
        rc = apply_flag(tok, config, "add_eos_token", "eos_token", false, &tok->suffix, name, err);
    cJSON_Delete(config);
    return rc;
}

int qc_tokenizer_from_source(const qc_source *src, qc_tokenizer **ret, qc_err *err)
{
    char *json, *config = NULL;
    size_t json_bytes, config_bytes = 0;
    QC_TRY(src->side_file(src, "tokenizer.json", &json, &json_bytes, err));
    if (!json)
        return qc_fail(err, QC_E_INPUT, "%s: no tokenizer.json", src->path);
    qc_tokenizer *tok = NULL;
    char *name = qc_asprintf("%s/tokenizer.json", src->path);
    int rc = name ? qc_tokenizer_new(json, json_bytes, name, &tok, err) : qc_fail_nomem(err, "file name", 0);
    qc_free(name);
    qc_free(json);
    if (rc == QC_OK)
        rc = src->side_file(src, "tokenizer_config.json", &config, &config_bytes, err);
    if (rc == QC_OK && config) {
        name = qc_asprintf("%s/tokenizer_config.json", src->path);
        rc = name ? qc_tokenizer_apply_config(tok, config, config_bytes, name, err)
                  : qc_fail_nomem(err, "file name", 0);
        qc_free(name);
    }
    qc_free(config);
    if (rc < 0)
        qc_tokenizer_free(tok);
    else
        *ret = tok;
    return rc;
}

/* ---- questions ---- */

const char *tok_piece(const tok_vocab *vocab, int32_t id)
{
    return id < 0 || id >= vocab->n_ids || vocab->offset[id] == TOK_HOLE ? NULL
                                                                         : vocab->pool + vocab->offset[id];
}

int64_t qc_tokenizer_vocab_size(const qc_tokenizer *tok)
{
    return tok->vocab.n_ids;
}

const char *qc_tokenizer_piece(const qc_tokenizer *tok, int32_t id)
{
    return tok_piece(&tok->vocab, id);
}

int32_t qc_tokenizer_token_id(const qc_tokenizer *tok, const char *piece)
{
    int64_t id = qc_map_get(tok->vocab.added, piece, strlen(piece), -1);
    return (int32_t)(id >= 0 ? id : qc_map_get(tok->vocab.model, piece, strlen(piece), -1));
}

bool qc_tokenizer_is_special(const qc_tokenizer *tok, int32_t id)
{
    return id >= 0 && id < tok->vocab.n_ids && (tok->vocab.flags[id] & TOK_SPECIAL);
}

int32_t qc_tokenizer_bos(const qc_tokenizer *tok)
{
    return tok->prefix.n ? tok->prefix.ids[0] : -1;
}

int32_t qc_tokenizer_eos(const qc_tokenizer *tok)
{
    return tok->suffix.n ? tok->suffix.ids[tok->suffix.n - 1] : -1;
}
