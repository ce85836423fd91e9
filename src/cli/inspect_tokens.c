#include "gguf.h"
#include "inspect.h"
#include "json_text.h"
#include "open.h"
#include "qc_alloc.h"
#include "qc_buf.h"
#include "qc_file.h"
#include "qc_json.h"
#include "qpk.h"
#include "tokenizer.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define MAX_JSON_BYTES ((size_t)1 << 30)
#define MAX_TEXT_BYTES ((size_t)1 << 32)

/* ---- the tokenizer of a path ---- */

static int load_json(const char *path, qc_tokenizer **ret, qc_err *err)
{
    char *text;
    size_t n_bytes;
    QC_TRY(qc_file_read(path, MAX_JSON_BYTES, &text, &n_bytes, err));
    int rc = qc_tokenizer_new(text, n_bytes, path, ret, err);
    qc_free(text);
    return rc;
}

static int apply_config(qc_tokenizer *tok, const char *path, qc_err *err)
{
    char *text;
    size_t n_bytes;
    if (!qc_path_exists(path))
        return QC_OK;
    QC_TRY(qc_file_read(path, MAX_JSON_BYTES, &text, &n_bytes, err));
    int rc = qc_tokenizer_apply_config(tok, text, n_bytes, path, err);
    qc_free(text);
    return rc;
}

/* Weights are not looked at: a folder may hold the tokenizer alone. */
static int load_folder(const char *path, qc_tokenizer **ret, qc_err *err)
{
    char *json = qc_path_join(path, "tokenizer.json"), *config = qc_path_join(path, "tokenizer_config.json");
    qc_tokenizer *tok = NULL;
    int rc = json && config ? load_json(json, &tok, err) : qc_fail_nomem(err, "path", strlen(path));
    if (rc == QC_OK)
        rc = apply_config(tok, config, err);
    qc_free(json);
    qc_free(config);
    if (rc == QC_OK)
        *ret = tok;
    else
        qc_tokenizer_free(tok);
    return rc;
}

static int load_tokenizer(const char *path, qc_tokenizer **ret, qc_err *err)
{
    if (qc_path_is_dir(path))
        return load_folder(path, ret, err);
    if (!qc_qpk_probe(path) && !qc_gguf_probe_path(path))
        return load_json(path, ret, err);
    qc_source *src;
    QC_TRY(qc_source_open(path, &src, err));
    int rc = qc_tokenizer_from_source(src, ret, err);
    qc_source_close(src);
    return rc;
}

/* ---- stdin ---- */

static int read_stdin(qc_buf *ret, qc_err *err)
{
    char block[65536];
    size_t n;
    ret->max_bytes = MAX_TEXT_BYTES;
    QC_TRY(qc_buf_append(ret, "", 0, err));
    while ((n = fread(block, 1, sizeof block, stdin)) > 0) {
        QC_TRY(qc_check_interrupt(err));
        QC_TRY(qc_buf_append(ret, block, n, err));
    }
    if (ferror(stdin))
        return qc_check_interrupt(err) < 0 ? QC_E_INTERRUPTED
                                           : qc_fail(err, QC_E_INPUT, "stdin: %s", strerror(errno));
    return QC_OK;
}

/* One line of stdin to one line of stdout (without the newline), appended to *out. */
typedef int (*line_fn)(const qc_tokenizer *tok, const char *line, size_t n_bytes,
                       const qc_encode_options *options, qc_buf *out, qc_err *err);

/* Lines that could not be answered. */
typedef struct bad_lines {
    long n, first;
    qc_err why; /* of the first */
} bad_lines;

/* Next line of stdin without its newline, QC_OK and *ret_end at the end. */
static int read_line(qc_buf *line, bool *ret_end, qc_err *err)
{
    char block[4096];
    size_t n = 0;
    int c;
    line->n_bytes = 0;
    QC_TRY(qc_check_interrupt(err));
    while ((c = getc_unlocked(stdin)) != EOF && c != '\n') {
        block[n++] = (char)c;
        if (n == sizeof block) {
            QC_TRY(qc_buf_append(line, block, n, err));
            n = 0;
        }
    }
    if (ferror(stdin))
        return qc_check_interrupt(err) < 0 ? QC_E_INTERRUPTED
                                           : qc_fail(err, QC_E_INPUT, "stdin: %s", strerror(errno));
    QC_TRY(qc_buf_append(line, block, n, err));
    *ret_end = c == EOF && line->n_bytes == 0;
    return QC_OK;
}

/* A line that can not be answered gives "null", so that lines stay in step and later ones are answered. */
static int answer_line(const qc_tokenizer *tok, const qc_encode_options *options, line_fn fn,
                       const qc_buf *line, long line_no, bad_lines *bad, qc_err *err)
{
    qc_buf out = {0};
    int rc = fn(tok, line->data, line->n_bytes, options, &out, err);
    if (rc == QC_OK) {
        fwrite(out.data, 1, out.n_bytes, stdout);
        putchar('\n');
    } else if (rc == QC_E_INPUT) {
        fputs("null\n", stdout);
        if (bad->n++ == 0) {
            bad->first = line_no;
            bad->why = *err;
        }
        rc = QC_OK;
    }
    qc_buf_clear(&out);
    return rc;
}

/* The first line that could not be answered is the error of the run. */
static int each_line(const qc_tokenizer *tok, const qc_encode_options *options, line_fn fn, qc_err *err)
{
    qc_buf line = {.max_bytes = MAX_TEXT_BYTES};
    bad_lines bad = {0};
    bool end = false;
    int rc = QC_OK;
    for (long line_no = 1; rc == QC_OK; line_no++) {
        rc = read_line(&line, &end, err);
        if (rc < 0 || end)
            break;
        rc = answer_line(tok, options, fn, &line, line_no, &bad, err);
    }
    qc_buf_clear(&line);
    if (rc == QC_OK && bad.n > 1)
        return qc_fail(err, QC_E_INPUT, "stdin line %ld: %s (and %ld more lines)", bad.first, bad.why.msg,
                       bad.n - 1);
    if (rc == QC_OK && bad.n > 0)
        return qc_fail(err, QC_E_INPUT, "stdin line %ld: %s", bad.first, bad.why.msg);
    return rc;
}

/* ---- text to ids ---- */

static int text_to_ids(const qc_tokenizer *tok, const char *text, size_t n_bytes,
                       const qc_encode_options *options, qc_buf *out, qc_err *err)
{
    int32_t *ids;
    int64_t n_ids;
    QC_TRY(qc_tokenizer_encode(tok, text, n_bytes, options, &ids, &n_ids, err));
    int rc = qc_buf_append(out, "[", 1, err);
    for (int64_t i = 0; rc == QC_OK && i < n_ids; i++)
        rc = qc_buf_printf(out, err, "%s%d", i ? "," : "", ids[i]);
    qc_free(ids);
    return rc < 0 ? rc : qc_buf_append(out, "]", 1, err);
}

static int tokenize_line(const qc_tokenizer *tok, const char *line, size_t n_bytes,
                         const qc_encode_options *options, qc_buf *out, qc_err *err)
{
    qc_buf text = {0};
    int rc = qc_buf_append(&text, "", 0, err);
    if (rc == QC_OK)
        rc = qc_json_text_parse(line, n_bytes, &text, err);
    if (rc == QC_OK)
        rc = text_to_ids(tok, text.data, text.n_bytes, options, out, err);
    qc_buf_clear(&text);
    return rc;
}

/* All of stdin through fn as one line, the answer to stdout. */
static int whole_stdin(const qc_tokenizer *tok, const qc_encode_options *options, line_fn fn, const char *end,
                       qc_err *err)
{
    qc_buf text = {0}, out = {0};
    int rc = read_stdin(&text, err);
    if (rc == QC_OK && (rc = fn(tok, text.data, text.n_bytes, options, &out, err)) == QC_E_INPUT)
        qc_err_prefix(err, "stdin");
    if (rc == QC_OK) {
        fwrite(out.data, 1, out.n_bytes, stdout);
        fputs(end, stdout);
    }
    qc_buf_clear(&text);
    qc_buf_clear(&out);
    return rc;
}

int qc_inspect_tokenize(const char *path, const qc_encode_options *options, bool jsonl, qc_err *err)
{
    qc_tokenizer *tok;
    QC_TRY(load_tokenizer(path, &tok, err));
    int rc = jsonl ? each_line(tok, options, tokenize_line, err)
                   : whole_stdin(tok, options, text_to_ids, "\n", err);
    qc_tokenizer_free(tok);
    return rc;
}

/* ---- ids to text ---- */

static int parse_ids(const char *json, size_t n_bytes, int32_t **ret, int64_t *ret_n, qc_err *err)
{
    cJSON *doc;
    QC_TRY(qc_json_parse(json, n_bytes, "ids", false, &doc, err));
    int64_t n = cJSON_IsArray(doc) ? cJSON_GetArraySize(doc) : -1, i = 0, id;
    int32_t *ids = n < 0 ? NULL : qc_alloc((size_t)n, sizeof *ids);
    int rc = n < 0 ? qc_fail(err, QC_E_INPUT, "not an array of ids")
             : ids ? QC_OK
                   : qc_fail_nomem(err, "ids", (size_t)n * 4);
    for (const cJSON *item = doc->child; rc == QC_OK && item; item = item->next) {
        if (!qc_json_int(item, &id) || id < 0 || id > INT32_MAX)
            rc = qc_fail(err, QC_E_INPUT, "element %lld is no id", (long long)i);
        else
            ids[i++] = (int32_t)id;
    }
    cJSON_Delete(doc);
    if (rc < 0) {
        qc_free(ids);
        return rc;
    }
    *ret = ids;
    *ret_n = n;
    return QC_OK;
}

static int ids_to_text(const qc_tokenizer *tok, const char *json, size_t n_bytes,
                       const qc_encode_options *options, qc_buf *out, qc_err *err)
{
    int32_t *ids;
    int64_t n_ids;
    char *text;
    size_t n_text;
    (void)options;
    QC_TRY(parse_ids(json, n_bytes, &ids, &n_ids, err));
    int rc = qc_tokenizer_decode(tok, ids, n_ids, false, &text, &n_text, err);
    qc_free(ids);
    if (rc < 0)
        return rc;
    rc = qc_buf_append(out, text, n_text, err);
    qc_free(text);
    return rc;
}

static int detokenize_line(const qc_tokenizer *tok, const char *line, size_t n_bytes,
                           const qc_encode_options *options, qc_buf *out, qc_err *err)
{
    qc_buf text = {0};
    int rc = ids_to_text(tok, line, n_bytes, options, &text, err);
    if (rc == QC_OK)
        rc = qc_json_text_print(text.data, text.n_bytes, out, err);
    qc_buf_clear(&text);
    return rc;
}

int qc_inspect_detokenize(const char *path, bool jsonl, qc_err *err)
{
    qc_tokenizer *tok;
    QC_TRY(load_tokenizer(path, &tok, err));
    int rc =
        jsonl ? each_line(tok, false, detokenize_line, err) : whole_stdin(tok, false, ids_to_text, "", err);
    qc_tokenizer_free(tok);
    return rc;
}
