#include "eval.h"

#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_json.h"
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

static int cut(qc_windows *w, const char *path, int64_t n_windows, qc_err *err)
{
    int64_t there = w->n_text_ids / w->length;
    if (there == 0)
        return qc_fail(err, QC_E_INPUT,
                       "%s: %lld tokens, a window has %lld: use a longer text or a smaller --length", path,
                       (long long)w->n_text_ids, (long long)w->length);
    w->n_windows = n_windows > 0 && n_windows < there ? n_windows : there;
    w->lengths = qc_alloc((size_t)w->n_windows, sizeof *w->lengths);
    if (!w->lengths)
        return qc_fail_nomem(err, "windows", (unsigned long long)w->n_windows * 8);
    for (int64_t i = 0; i < w->n_windows; i++)
        w->lengths[i] = w->length;
    size_t kept = (size_t)(w->n_windows * w->length) * sizeof *w->ids;
    int32_t *ids = qc_realloc(w->ids, kept, kept);
    if (!ids)
        return qc_fail_nomem(err, "token ids", kept);
    w->ids = ids;
    return qc_ids_sha256(w->ids, w->n_windows * w->length, w->ids_sha256, err);
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

int qc_windows_from_text(const qc_tokenizer *tok, const char *path, int64_t length, int64_t n_windows,
                         bool plain_special, qc_windows *ret, qc_err *err)
{
    if (length < 2)
        return qc_fail(err, QC_E_USAGE, "window length %lld: at least 2 is needed to score a token",
                       (long long)length);
    char *text = NULL;
    size_t n_bytes;
    QC_TRY(qc_text_read(path, &text, &n_bytes, err));
    qc_windows w = {.length = length, .plain_special = plain_special};
    qc_encode_options options = {.plain_special = plain_special};
    int rc = qc_tokenizer_encode(tok, text, n_bytes, &options, &w.ids, &w.n_text_ids, err);
    qc_free(text);
    for (int64_t i = 0; rc == QC_OK && i < w.n_text_ids; i++)
        w.n_special += qc_tokenizer_is_special(tok, w.ids[i]);
    if (rc == QC_OK && qc_tokenizer_bos(tok) >= 0) {
        w.bos = true;
        rc = prepend(&w.ids, &w.n_text_ids, qc_tokenizer_bos(tok), err);
    }
    if (rc == QC_OK)
        rc = cut(&w, path, n_windows, err);
    if (rc == QC_OK)
        *ret = w;
    else
        qc_windows_clear(&w);
    return rc;
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

int qc_windows_of_model(const qc_source *src, const char *path, int64_t length, int64_t n_windows,
                        bool plain_special, uint64_t memory_bytes, qc_windows *ret, qc_err *err)
{
    uint64_t needed = 0;
    QC_TRY(qc_text_plan(src, path, memory_bytes, &needed, err));
    qc_tokenizer *tok;
    QC_TRY(qc_tokenizer_from_source(src, &tok, err));
    int rc = qc_windows_from_text(tok, path, length, n_windows, plain_special, ret, err);
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
    *windows = (qc_windows){0};
}
