/* Documents from text and .jsonl files. */
#include "chat.h"
#include "corpus_internal.h"
#include "eval.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "tokenizer.h"

#include <string.h>

static int stream_add(qc_id_stream *st, const int32_t *ids, size_t n_ids, qc_err *err)
{
    size_t need = st->n_ids + n_ids;
    if (n_ids == 0)
        return QC_OK;
    if (need > st->cap_ids) {
        size_t cap = st->cap_ids ? need + st->cap_ids / 2 : need;
        int32_t *grown = qc_realloc(st->ids, st->cap_ids * sizeof *grown, cap * sizeof *grown);
        if (!grown)
            return qc_fail_nomem(err, "token ids", cap * sizeof *grown);
        st->ids = grown;
        st->cap_ids = cap;
    }
    memcpy(st->ids + st->n_ids, ids, n_ids * sizeof *ids);
    st->n_ids = need;
    return QC_OK;
}

typedef struct reader {
    qc_id_stream *st;
    const qc_source *src;
    const qc_tokenizer *tok;
    const qc_corpus_options *options;
    qc_chat *chat; /* NULL until the first conversation; owned */
    int64_t n_left_out;
    char first_left_out[256];
} reader;

/* One document: the BOS id if the tokenizer adds one, then its text. */
static int add_document(reader *r, const char *text, size_t n_bytes, qc_err *err)
{
    qc_encode_options options = {.plain_special = r->options->plain_special};
    qc_id_stream *st = r->st;
    int32_t *ids = NULL, bos = qc_tokenizer_bos(r->tok);
    int64_t n_ids;
    QC_TRY(qc_tokenizer_encode(r->tok, text, n_bytes, &options, &ids, &n_ids, err));
    int rc = bos >= 0 ? stream_add(st, &bos, 1, err) : QC_OK;
    if (rc == QC_OK)
        rc = stream_add(st, ids, (size_t)n_ids, err);
    qc_free(ids);
    st->n_documents++;
    return rc;
}

static bool is_blank(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n'))
        p++;
    return p == end;
}

/* Paragraphs: runs of lines that are not blank. */
static int add_paragraphs(reader *r, const char *text, size_t n_bytes, qc_err *err)
{
    const char *end = text + n_bytes, *start = NULL;
    for (const char *line = text, *next; line < end; line = next) {
        const char *nl = memchr(line, '\n', (size_t)(end - line));
        next = nl ? nl + 1 : end;
        bool blank = is_blank(line, next);
        if (!blank && !start)
            start = line;
        if (start && (blank || next == end)) {
            QC_TRY(add_document(r, start, (size_t)((blank ? line : next) - start), err));
            start = NULL;
        }
    }
    return QC_OK;
}

static int add_text_file(reader *r, const char *text, size_t n_bytes, qc_err *err)
{
    if (r->options->documents == QC_DOCUMENTS_BLANK_LINE)
        return add_paragraphs(r, text, n_bytes, err);
    return add_document(r, text, n_bytes, err);
}

/* ---- .jsonl ---- */

/* Messages with the template of the model, whose special tokens become tokens in any case. What the template
 * has no form for is left out and counted. */
static int add_messages(reader *r, const cJSON *messages, const char *name, qc_err *err)
{
    if (!r->chat)
        QC_TRY(qc_chat_from_source(r->src, &r->chat, err));
    qc_buf buf = {0};
    int32_t *ids = NULL;
    int64_t n_ids = 0;
    int rc = qc_chat_render(r->chat, messages, name, &buf, err);
    if (rc == QC_E_UNSUPPORTED) {
        if (r->n_left_out++ == 0)
            qc_one_line(r->first_left_out, sizeof r->first_left_out, err->msg);
        *err = (qc_err){0};
        rc = QC_OK;
    } else if (rc == QC_OK) {
        rc = qc_tokenizer_encode(r->tok, buf.data, buf.n_bytes, NULL, &ids, &n_ids, err);
        if (rc == QC_OK)
            rc = stream_add(r->st, ids, (size_t)n_ids, err);
        r->st->n_documents++;
    }
    qc_free(ids);
    qc_buf_clear(&buf);
    return rc;
}

static int add_line(reader *r, const char *path, const char *line, size_t n_bytes, int64_t number,
                    qc_err *err)
{
    char *name = qc_asprintf("%s:%lld", path, (long long)number);
    if (!name)
        return qc_fail_nomem(err, path, n_bytes);
    cJSON *doc = NULL;
    int rc = qc_json_parse(line, n_bytes, name, false, &doc, err);
    const cJSON *text = qc_json_get(doc, "text"), *messages = qc_json_get(doc, "messages");
    if (rc == QC_OK && messages)
        rc = add_messages(r, messages, name, err);
    else if (rc == QC_OK && cJSON_IsString(text))
        rc = add_document(r, text->valuestring, strlen(text->valuestring), err);
    else if (rc == QC_OK)
        rc = qc_fail(err, QC_E_INPUT, "%s: an object with `text` or `messages` was expected", name);
    cJSON_Delete(doc);
    qc_free(name);
    return rc;
}

static int add_lines(reader *r, const char *path, const char *text, size_t n_bytes, qc_event_list *events,
                     qc_err *err)
{
    const char *end = text + n_bytes;
    int64_t number = 0;
    for (const char *line = text, *next; line < end; line = next) {
        const char *nl = memchr(line, '\n', (size_t)(end - line));
        next = nl ? nl + 1 : end;
        number++;
        if (!is_blank(line, next))
            QC_TRY(add_line(r, path, line, (size_t)((nl ? nl : end) - line), number, err));
        QC_TRY(qc_check_interrupt(err));
    }
    if (r->n_left_out == 0)
        return QC_OK;
    return qc_event_add(events, QC_EVENT_NOTE, "corpus", path, r->n_left_out, err,
                        "conversations left out; the first: %s", r->first_left_out);
}

/* ---- */

static int read_file(reader *r, const char *path, qc_event_list *events, qc_err *err)
{
    char *text = NULL;
    size_t n_bytes, path_bytes = strlen(path);
    QC_TRY(qc_text_read(path, &text, &n_bytes, err));
    int rc = path_bytes > 6 && strcmp(path + path_bytes - 6, ".jsonl") == 0
                 ? add_lines(r, path, text, n_bytes, events, err)
                 : add_text_file(r, text, n_bytes, err);
    qc_free(text);
    return rc;
}

int qc_corpus_read_text(qc_id_stream *st, const qc_source *src, const char *path,
                        const qc_corpus_options *options, qc_event_list *events, qc_err *err)
{
    uint64_t needed;
    QC_TRY(qc_text_plan(src, path, options->memory_bytes, &needed, err));
    qc_tokenizer *tok;
    QC_TRY(qc_tokenizer_from_source(src, &tok, err));
    reader r = {.st = st, .src = src, .tok = tok, .options = options};
    int rc = read_file(&r, path, events, err);
    qc_chat_free(r.chat);
    qc_tokenizer_free(tok); /* its tables are large and not needed again */
    return rc;
}
