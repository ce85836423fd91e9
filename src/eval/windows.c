#include "eval.h"

#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_json.h"
#include "qc_math.h"
#include "qc_sha256.h"

#include <string.h>

#define MAX_TEXT_BYTES (4ull << 30)

int qc_ids_sha256(const int32_t *ids, int64_t n_ids, char ret_hex[QC_SHA256_HEX_BYTES], qc_err *err)
{
    qc_sha256 *state = qc_sha256_new();
    if (!state)
        return qc_fail_nomem(err, "hash of token ids", 256);
    for (int64_t i = 0; i < n_ids; i++) {
        uint32_t id = (uint32_t)ids[i];
        unsigned char le[4] = {(unsigned char)id, (unsigned char)(id >> 8), (unsigned char)(id >> 16),
                               (unsigned char)(id >> 24)};
        qc_sha256_update(state, le, sizeof le);
    }
    qc_sha256_final(state, ret_hex);
    return QC_OK;
}

/* Put the BOS id in front of *ids, dropping nothing. */
static int prepend(int32_t **ids, int64_t *n_ids, int32_t bos, qc_err *err)
{
    int32_t *longer = qc_alloc((size_t)*n_ids + 1, sizeof *longer);
    if (!longer)
        return qc_fail_nomem(err, "token ids", (unsigned long long)*n_ids * 4);
    longer[0] = bos;
    memcpy(longer + 1, *ids, (size_t)*n_ids * sizeof **ids);
    qc_free(*ids);
    *ids = longer;
    (*n_ids)++;
    return QC_OK;
}

int qc_text_read(const char *path, char **ret_text, size_t *ret_bytes, qc_err *err)
{
    char *text = NULL;
    size_t n_bytes, bad;
    QC_TRY(qc_file_read(path, MAX_TEXT_BYTES, &text, &n_bytes, err));
    int rc = QC_OK;
    if (n_bytes == 0)
        rc = qc_fail(err, QC_E_INPUT, "%s: empty file, text was expected", path);
    else if (!qc_utf8_valid(text, n_bytes, &bad))
        rc = qc_fail(err, QC_E_INPUT, "%s: invalid UTF-8 at byte %zu", path, bad);
    if (rc < 0) {
        qc_free(text);
        return rc;
    }
    *ret_text = text;
    *ret_bytes = n_bytes;
    return QC_OK;
}

/* The ids of a text, behind a BOS if there is one. */
static int tokenize(const qc_tokenizer *tok, const char *path, qc_windows *w, qc_err *err)
{
    char *text = NULL;
    size_t n_bytes;
    QC_TRY(qc_text_read(path, &text, &n_bytes, err));
    if (w->protocol == QC_PROTOCOL_LLAMA && text[n_bytes - 1] == '\n')
        n_bytes--;
    qc_encode_options options = {.plain_special = w->plain_special};
    int rc = qc_tokenizer_encode(tok, text, n_bytes, &options, &w->ids, &w->n_text_ids, err);
    qc_free(text);
    for (int64_t i = 0; rc == QC_OK && i < w->n_text_ids; i++)
        w->n_special += qc_tokenizer_is_special(tok, w->ids[i]);
    if (rc == QC_OK && w->bos)
        rc = prepend(&w->ids, &w->n_text_ids, w->bos_id, err);
    return rc;
}

static int too_short(const qc_windows *w, const char *path, qc_err *err)
{
    return qc_fail(err, QC_E_INPUT,
                   "%s: %lld tokens, a window has %lld: use a longer text or a smaller --length", path,
                   (long long)w->n_text_ids, (long long)w->length);
}

static int alloc_windows(qc_windows *w, int64_t there, int64_t wanted, qc_err *err)
{
    w->n_windows = wanted > 0 && wanted < there ? wanted : there;
    w->lengths = qc_alloc((size_t)w->n_windows, sizeof *w->lengths);
    w->first = qc_alloc((size_t)w->n_windows, sizeof *w->first);
    if (!w->lengths || !w->first)
        return qc_fail_nomem(err, "windows", (unsigned long long)w->n_windows * 16);
    return QC_OK;
}

/* Side by side from the start: the ids stay where they are. */
static int cut_side_by_side(qc_windows *w, const char *path, int64_t n_windows, qc_err *err)
{
    if (w->n_text_ids < w->length)
        return too_short(w, path, err);
    QC_TRY(alloc_windows(w, w->n_text_ids / w->length, n_windows, err));
    for (int64_t i = 0; i < w->n_windows; i++) {
        w->lengths[i] = w->length;
        w->first[i] = w->protocol == QC_PROTOCOL_LLAMA ? w->length / 2 + 1 : 1;
        if (w->protocol == QC_PROTOCOL_LLAMA && w->bos)
            w->ids[i * w->length] = w->ids[0];
    }
    size_t kept = (size_t)(w->n_windows * w->length) * sizeof *w->ids;
    int32_t *ids = qc_realloc(w->ids, kept, kept);
    if (!ids)
        return qc_fail_nomem(err, "token ids", kept);
    w->ids = ids;
    return QC_OK;
}

/* Every `stride` ids of the text, each behind a BOS if there is one; a window scores what the one before it
 * did not hold. */
static int cut_full(qc_windows *w, const char *path, int64_t n_windows, qc_err *err)
{
    int64_t bos = w->bos, n = w->n_text_ids - bos, content = w->length - bos;
    if (n < 2)
        return too_short(w, path, err);
    int64_t there = n <= content ? 1 : qc_ceil_div(n - content, w->stride) + 1;
    QC_TRY(alloc_windows(w, there, n_windows, err));
    int32_t *ids = qc_alloc((size_t)(w->n_windows * w->length), sizeof *ids);
    if (!ids)
        return qc_fail_nomem(err, "token ids", (unsigned long long)(w->n_windows * w->length) * sizeof *ids);
    int64_t at = 0, seen = 1; /* ids of the text that were scored, or need not be */
    for (int64_t i = 0; i < w->n_windows; i++) {
        int64_t start = i * w->stride, m = qc_min_i64(content, n - start);
        w->lengths[i] = bos + m;
        w->first[i] = bos + seen - start;
        if (bos)
            ids[at] = w->ids[0];
        memcpy(ids + at + bos, w->ids + bos + start, (size_t)m * sizeof *ids);
        at += bos + m;
        seen = start + m;
    }
    qc_free(w->ids);
    w->ids = ids;
    return QC_OK;
}

static int check_rule(const qc_cut_rule *rule, qc_err *err)
{
    int64_t least = rule->protocol == QC_PROTOCOL_LLAMA ? 4 : 2;
    if (rule->length < least)
        return qc_fail(err, QC_E_USAGE, "window length %lld: at least %lld is needed to score a token",
                       (long long)rule->length, (long long)least);
    if (rule->stride && rule->protocol != QC_PROTOCOL_FULL)
        return qc_fail(err, QC_E_USAGE, "stride %lld: only protocol full has one", (long long)rule->stride);
    return QC_OK;
}

static int check_stride(const qc_windows *w, qc_err *err)
{
    int64_t most = w->length - 1 - w->bos;
    if (w->stride >= 1 && w->stride <= most)
        return QC_OK;
    return qc_fail(err, QC_E_USAGE, "stride %lld: windows of %lld tokens%s must overlap, so 1 to %lld",
                   (long long)w->stride, (long long)w->length, w->bos ? " with a BOS" : "", (long long)most);
}

static int choose_bos(const qc_tokenizer *tok, const qc_cut_rule *rule, qc_windows *w, qc_err *err)
{
    int64_t n_ids = qc_tokenizer_vocab_size(tok);
    w->bos_id = rule->bos == QC_BOS_TOKENIZER ? qc_tokenizer_bos(tok) : rule->bos_id;
    w->bos = rule->bos != QC_BOS_NONE && (rule->bos == QC_BOS_ID || w->bos_id >= 0);
    if (!w->bos || (w->bos_id >= 0 && w->bos_id < n_ids))
        return QC_OK;
    return qc_fail(err, QC_E_USAGE, "BOS %d: the tokenizer has ids from 0 to %lld", w->bos_id,
                   (long long)n_ids - 1);
}

int qc_windows_from_text(const qc_tokenizer *tok, const char *path, const qc_cut_rule *rule, qc_windows *ret,
                         qc_err *err)
{
    QC_TRY(check_rule(rule, err));
    bool full = rule->protocol == QC_PROTOCOL_FULL;
    qc_windows w = {.protocol = rule->protocol,
                    .length = rule->length,
                    .stride = !full          ? rule->length
                              : rule->stride ? rule->stride
                                             : rule->length / 2,
                    .plain_special = rule->plain_special || rule->protocol == QC_PROTOCOL_LLAMA};
    QC_TRY(choose_bos(tok, rule, &w, err));
    int rc = tokenize(tok, path, &w, err);
    if (rc == QC_OK && full)
        rc = check_stride(&w, err);
    if (rc == QC_OK)
        rc = full ? cut_full(&w, path, rule->n_windows, err)
                  : cut_side_by_side(&w, path, rule->n_windows, err);
    if (rc == QC_OK)
        rc = qc_ids_sha256(w.ids, qc_windows_ids(&w, w.n_windows), w.ids_sha256, err);
    if (rc == QC_OK)
        *ret = w;
    else
        qc_windows_clear(&w);
    return rc;
}

int64_t qc_windows_scored(const qc_windows *windows, int64_t n_windows)
{
    int64_t n = 0;
    for (int64_t i = 0; i < n_windows; i++)
        n += windows->lengths[i] - (windows->first ? windows->first[i] : 1);
    return n;
}

int64_t qc_windows_ids(const qc_windows *windows, int64_t n_windows)
{
    int64_t n = 0;
    for (int64_t i = 0; i < n_windows; i++)
        n += windows->lengths[i];
    return n;
}

const char *qc_protocol_name(qc_protocol protocol)
{
    static const char *const names[] = {
        [QC_PROTOCOL_GPTQ] = "gptq", [QC_PROTOCOL_LLAMA] = "llama", [QC_PROTOCOL_FULL] = "full"};
    return names[protocol];
}

int qc_text_plan(const qc_source *src, const char *path, uint64_t memory_bytes, uint64_t *ret, qc_err *err)
{
    char *json = NULL;
    size_t json_bytes = 0;
    qc_mapped text = {0};
    QC_TRY(src->side_file(src, "tokenizer.json", &json, &json_bytes, err));
    qc_free(json);
    QC_TRY(qc_file_map(path, &text, err));
    uint64_t needed = (uint64_t)json_bytes * 8 + (uint64_t)text.n_bytes * 9;
    qc_file_unmap(&text);
    if (memory_bytes && needed > memory_bytes)
        return qc_fail(
            err, QC_E_RESOURCE,
            "the tokenizer of %s and the text need %llu MB of memory, the memory cap leaves %llu MB",
            src->path, (unsigned long long)(needed / 1000000 + 1),
            (unsigned long long)(memory_bytes / 1000000));
    *ret = needed;
    return QC_OK;
}

int qc_windows_of_model(const qc_source *src, const char *path, const qc_cut_rule *rule,
                        uint64_t memory_bytes, qc_windows *ret, qc_err *err)
{
    uint64_t needed = 0;
    QC_TRY(qc_text_plan(src, path, memory_bytes, &needed, err));
    qc_tokenizer *tok;
    QC_TRY(qc_tokenizer_from_source(src, &tok, err));
    int rc = qc_windows_from_text(tok, path, rule, ret, err);
    qc_tokenizer_free(tok); /* its tables are large and not needed again */
    qc_alloc_trim();
    if (rc == QC_OK)
        ret->plan_bytes = needed;
    return rc;
}

void qc_windows_clear(qc_windows *windows)
{
    qc_free(windows->ids);
    qc_free(windows->lengths);
    qc_free(windows->first);
    *windows = (qc_windows){0};
}
