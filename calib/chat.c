#include "chat.h"

#include "qc_alloc.h"

#include <ctype.h>
#include <stdbool.h>
#include <string.h>

typedef enum { LAYOUT_CHATML, LAYOUT_LLAMA3, LAYOUT_MISTRAL, LAYOUT_GEMMA, LAYOUT_PHI3 } layout;

struct qc_chat {
    layout layout;
    bool starts_with_bos;
    bool trim;           /* contents are trimmed */
    bool always_prompts; /* ends with the header of an answer, whether one is wanted or not */
    bool ends_with_eos;
    bool thinks;             /* ChatML: Qwen 3's think block before the answers behind the last question */
    bool system_first;       /* Gemma: the system text goes before the first question; Phi 3: has a turn */
    bool system_last;        /* Mistral: before the last message, if that is a question; else dropped */
    bool skips_empty;        /* Phi 3.5: no turn for an empty system text */
    bool no_system;          /* a system text is refused */
    const char *inst_open;   /* Mistral: around a question ... */
    const char *inst_close;  /* ... */
    const char *answer_open; /* ... and before an answer */
    char *system;            /* ChatML: system text where the messages have none; Llama 3: date; owned */
    char *bos, *eos;         /* owned */
};

typedef struct message {
    const char *role, *content, *reasoning; /* reasoning: NULL if there is none */
} message;

/* ---- recognising a template ---- */

static bool has(const char *text, const char *part)
{
    return strstr(text, part) != NULL;
}

/* Does the text spell a token <|name|> that is not in the list (ended by NULL)? Names are letters, digits and
 * '_'. */
static bool has_other_tokens(const char *text, const char *const *known)
{
    for (const char *p = text; (p = strstr(p, "<|")) != NULL; p += 2) {
        size_t n = 2;
        while (isalnum((unsigned char)p[n]) || p[n] == '_')
            n++;
        if (n == 2 || strncmp(p + n, "|>", 2) != 0)
            continue;
        bool found = false;
        for (int i = 0; known[i] && !found; i++)
            found = strlen(known[i]) == n + 2 && strncmp(known[i], p, n + 2) == 0;
        if (!found)
            return true;
    }
    return false;
}

/* Copy the text of a template's literal: real line feeds and \n are both one. *ret = NULL if it holds another
 * escape. */
static int copy_literal(const char *text, size_t n_bytes, char **ret, qc_err *err)
{
    char *copy = qc_strndup(text, n_bytes), *to = copy;
    if (!copy)
        return qc_fail_nomem(err, "chat template", n_bytes);
    for (size_t i = 0; i < n_bytes; i++) {
        if (text[i] != '\\') {
            *to++ = text[i];
        } else if (i + 1 < n_bytes && text[i + 1] == 'n') {
            *to++ = '\n';
            i++;
        } else {
            qc_free(copy);
            *ret = NULL;
            return QC_OK;
        }
    }
    *to = '\0';
    *ret = copy;
    return QC_OK;
}

/* A literal that is a whole system turn: the system text for messages without one. *ok = false where there
 * are several or one that can not be read. */
static int find_default_system(const char *text, char **ret, bool *ok, qc_err *err)
{
    static const char open[] = "<|im_start|>system", close[] = "<|im_end|>";
    for (const char *p = text; (p = strstr(p, open)) != NULL; p += sizeof open - 1) {
        const char *start = p + sizeof open - 1, *end = strstr(start, close);
        char quote = p > text ? p[-1] : '\0';
        if ((quote != '\'' && quote != '"') || !end || memchr(start, quote, (size_t)(end - start)))
            continue;
        char *literal = NULL;
        QC_TRY(copy_literal(start, (size_t)(end - start), &literal, err));
        if (!literal || literal[0] != '\n' || (*ret && strcmp(*ret, literal + 1) != 0))
            *ok = false;
        else if (!*ret)
            memmove(*ret = literal, literal + 1, strlen(literal));
        if (literal != *ret)
            qc_free(literal);
    }
    return QC_OK;
}

static int recognise_chatml(qc_chat *c, const char *t, bool *ok, qc_err *err)
{
    static const char *const tokens[] = {"<|im_start|>", "<|im_end|>", "<|endoftext|>", NULL};
    c->layout = LAYOUT_CHATML;
    c->thinks = has(t, "</think>");
    *ok = has(t, "<|im_end|>") && has(t, "add_generation_prompt") && !has_other_tokens(t, tokens) &&
          !has(t, "strip()") && !has(t, "trim") && !has(t, "bos_token") && !has(t, "eos_token") &&
          (!c->thinks ||
           (has(t, "last_query_index") && has(t, "if loop.last or (not loop.last and reasoning_content)")));
    return *ok ? find_default_system(t, &c->system, ok, err) : QC_OK;
}

static int recognise_llama3(qc_chat *c, const char *t, bool *ok, qc_err *err)
{
    static const char *const tokens[] = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
                                         "<|eom_id|>",          "<|python_tag|>",    NULL};
    c->layout = LAYOUT_LLAMA3;
    c->starts_with_bos = has(t, "bos_token");
    c->trim = true;
    c->always_prompts = !has(t, "add_generation_prompt");
    *ok = has(t, "<|eot_id|>") && !has_other_tokens(t, tokens) &&
          (has(t, "message['content'] | trim") || has(t, "message['content']|trim"));
    if (!*ok || !has(t, "Knowledge Date"))
        return QC_OK;
    const char *date = strstr(t, "date_string = \""), *end;
    if (!has(t, "\"Cutting Knowledge Date: December 2023\\n\"") ||
        !has(t, "\"Today Date: \" + date_string") || !date || !(end = strchr(date += 15, '"'))) {
        *ok = false;
        return QC_OK;
    }
    return copy_literal(date, (size_t)(end - date), &c->system, err);
}

/* The four formats of mistral-common. */
static void recognise_mistral(qc_chat *c, const char *t, bool *ok)
{
    bool v1 = has(t, "' [INST] '"), v0 = !v1 && has(t, "' [/INST]'") && has(t, "'[INST] '"),
         v3 = has(t, "\"[INST] \"") && has(t, "\"[/INST]\""),
         tekken = has(t, "\"[INST]\"") && has(t, "\"[/INST]\"");
    c->layout = LAYOUT_MISTRAL;
    c->starts_with_bos = true;
    c->no_system = v0;
    c->system_last = v3 || tekken;
    c->inst_open = v1 ? " [INST] " : tekken ? "[INST]" : "[INST] ";
    c->inst_close = v1 || v0 ? " [/INST]" : "[/INST]";
    c->answer_open = v1 || v3 ? " " : "";
    c->trim = v3; /* of answers only */
    *ok =
        v0 + v1 + v3 + tekken == 1 && has(t, "bos_token") && has(t, "eos_token") && !has(t, "<<SYS>>") &&
        !has(t, "[SYSTEM_PROMPT]") && has(t, "raise_exception") &&
        (!v0 || has(t, "message['content'] + eos_token}}") || has(t, "message['content'] + eos_token }}")) &&
        (!(v3 || tekken) || has(t, "if loop.last and system_message is defined")) &&
        (!v3 || has(t, "message[\"content\"]|trim + eos_token")) &&
        (!v1 || has(t, "loop.first and system_message is defined"));
}

static void recognise_gemma(qc_chat *c, const char *t, bool *ok)
{
    c->layout = LAYOUT_GEMMA;
    c->starts_with_bos = has(t, "bos_token");
    c->trim = true;
    c->system_first = has(t, "first_user_prefix = messages[0]['content'] + '\n\n'") ||
                      has(t, "first_user_prefix = messages[0]['content'] + '\\n\\n'");
    c->no_system = !has(t, "first_user_prefix");
    *ok = has(t, "<end_of_turn>") && c->no_system != c->system_first && has(t, "loop.index0 % 2") &&
          has(t, "'model'") + has(t, "\"model\"") > 0 && has(t, "message['content'] | trim") &&
          has(t, "raise_exception") && has(t, "add_generation_prompt");
}

static void recognise_phi3(qc_chat *c, const char *t, bool *ok)
{
    static const char *const tokens[] = {"<|user|>", "<|assistant|>", "<|system|>", "<|end|>", NULL};
    c->layout = LAYOUT_PHI3;
    c->starts_with_bos = has(t, "bos_token");
    c->ends_with_eos = has(t, "{% else %}{{ eos_token }}{% endif %}");
    c->system_first = has(t, "'<|' + message['role'] + '|>'") || has(t, "<|system|>");
    c->skips_empty = has(t, "message['role'] == 'system' and message['content']");
    c->always_prompts = !has(t, "add_generation_prompt"); /* behind each question */
    *ok = has(t, "<|end|>") && !has_other_tokens(t, tokens) && !has(t, "trim") && !has(t, "strip") &&
          !has(t, "+ message['content'] + '<|end|>' }}") && c->system_first != c->always_prompts;
}

static int recognise(qc_chat *c, const char *t, bool *ok, qc_err *err)
{
    if (has(t, "<|im_start|>"))
        return recognise_chatml(c, t, ok, err);
    if (has(t, "<|start_header_id|>"))
        return recognise_llama3(c, t, ok, err);
    if (has(t, "[INST]"))
        recognise_mistral(c, t, ok);
    else if (has(t, "<start_of_turn>"))
        recognise_gemma(c, t, ok);
    else if (has(t, "<|end|>"))
        recognise_phi3(c, t, ok);
    return QC_OK;
}

int qc_chat_new(const char *template_text, const char *bos, const char *eos, const char *name, qc_chat **ret,
                qc_err *err)
{
    qc_chat *c = qc_calloc(1, sizeof *c);
    if (!c)
        return qc_fail_nomem(err, name, sizeof *c);
    bool ok = false;
    int rc = recognise(c, template_text, &ok, err);
    if (rc == QC_OK && !ok)
        rc = qc_fail(
            err, QC_E_UNSUPPORTED,
            "%s: this chat template is not known (ChatML, Llama 3, Mistral, Gemma and Phi 3 are): use "
            "texts instead of messages",
            name);
    c->bos = qc_strdup(bos);
    c->eos = qc_strdup(eos);
    if (rc == QC_OK && (!c->bos || !c->eos))
        rc = qc_fail_nomem(err, name, strlen(bos) + strlen(eos));
    if (rc < 0)
        qc_chat_free(c);
    else
        *ret = c;
    return rc;
}

void qc_chat_free(qc_chat *chat)
{
    if (!chat)
        return;
    qc_free(chat->system);
    qc_free(chat->bos);
    qc_free(chat->eos);
    qc_free(chat);
}

const char *qc_chat_name(const qc_chat *chat)
{
    static const char *const names[] = {"ChatML", "Llama 3", "Mistral", "Gemma", "Phi 3"};
    return names[chat->layout];
}

/* ---- the template of a model ---- */

/* A token of tokenizer_config.json: a text or an object with `content`. */
static const char *token_text(const cJSON *config, const char *key)
{
    const cJSON *item = qc_json_get(config, key);
    if (cJSON_IsObject(item))
        item = qc_json_get(item, "content");
    return cJSON_IsString(item) ? item->valuestring : "";
}

/* The template in tokenizer_config.json: a text, or a list of named ones of which "default" is taken. */
static const char *config_template(const cJSON *config)
{
    const cJSON *item = qc_json_get(config, "chat_template"), *entry;
    if (cJSON_IsArray(item))
        cJSON_ArrayForEach(entry, item)
        {
            const cJSON *name = qc_json_get(entry, "name");
            if (cJSON_IsString(name) && strcmp(name->valuestring, "default") == 0) {
                item = qc_json_get(entry, "template");
                break;
            }
        }
    return cJSON_IsString(item) ? item->valuestring : NULL;
}

int qc_chat_from_source(const qc_source *src, qc_chat **ret, qc_err *err)
{
    char *jinja = NULL, *text = NULL;
    size_t n_jinja, n_text;
    cJSON *config = NULL;
    QC_TRY(src->side_file(src, "chat_template.jinja", &jinja, &n_jinja, err));
    int rc = src->side_file(src, "tokenizer_config.json", &text, &n_text, err);
    if (rc == QC_OK && text)
        rc = qc_json_parse(text, n_text, "tokenizer_config.json", false, &config, err);
    const char *template_text = jinja ? jinja : config_template(config);
    if (rc == QC_OK && !template_text)
        rc = qc_fail(err, QC_E_UNSUPPORTED,
                     "%s: the model has no chat template: use texts instead of messages", src->path);
    if (rc == QC_OK)
        rc = qc_chat_new(template_text, token_text(config, "bos_token"), token_text(config, "eos_token"),
                         src->path, ret, err);
    cJSON_Delete(config);
    qc_free(text);
    qc_free(jinja);
    return rc;
}

/* ---- rendering ---- */

static bool is(const message *m, const char *role)
{
    return strcmp(m->role, role) == 0;
}

/* Bytes of the white space (as Python sees it) that a UTF-8 text of n bytes starts or ends with; 0 if none.
 */
static size_t blank_bytes(const char *p, size_t n, bool at_end)
{
    static const char *const wide[] = {"\xC2\x85",     "\xC2\xA0",     "\xE1\x9A\x80", "\xE2\x80\xA8",
                                       "\xE2\x80\xA9", "\xE2\x80\xAF", "\xE2\x81\x9F", "\xE3\x80\x80"};
    if (n == 0)
        return 0;
    unsigned char c = (unsigned char)(at_end ? p[n - 1] : p[0]);
    if (c == ' ' || (c >= 9 && c <= 13) || (c >= 28 && c <= 31))
        return 1;
    for (size_t i = 0; i < sizeof wide / sizeof wide[0]; i++) {
        size_t m = strlen(wide[i]);
        if (n >= m && memcmp(at_end ? p + n - m : p, wide[i], m) == 0)
            return m;
    }
    const char *q = at_end && n >= 3 ? p + n - 3 : p; /* U+2000 .. U+200A */
    return n >= 3 && memcmp(q, "\xE2\x80", 2) == 0 && (unsigned char)q[2] >= 0x80 &&
                   (unsigned char)q[2] <= 0x8A
               ? 3
               : 0;
}

/* A part of a text, as strip and its relatives leave it. */
typedef struct piece {
    const char *p;
    size_t n;
} piece;

static piece whole(const char *text)
{
    return (piece){text, strlen(text)};
}

static piece strip(piece s)
{
    for (size_t m; (m = blank_bytes(s.p, s.n, false)) > 0; s.n -= m)
        s.p += m;
    for (size_t m; (m = blank_bytes(s.p, s.n, true)) > 0;)
        s.n -= m;
    return s;
}

/* lstrip('\n') / rstrip('\n') */
static piece lstrip_lf(piece s)
{
    for (; s.n && *s.p == '\n'; s.n--)
        s.p++;
    return s;
}

static piece rstrip_lf(piece s)
{
    while (s.n && s.p[s.n - 1] == '\n')
        s.n--;
    return s;
}

static int put(qc_buf *buf, const char *text, qc_err *err)
{
    return qc_buf_append(buf, text, strlen(text), err);
}

static int put_content(qc_buf *buf, const char *content, bool trim, qc_err *err)
{
    piece s = trim ? strip(whole(content)) : whole(content);
    return qc_buf_append(buf, s.p, s.n, err);
}

/* Qwen 3: the thoughts inside an answer, or beside it, and the answer itself. */
static void split_thoughts(const message *m, piece *ret_thoughts, piece *ret_answer)
{
    static const char open[] = "<think>", close[] = "</think>";
    *ret_answer = whole(m->content);
    *ret_thoughts = whole(m->reasoning ? m->reasoning : "");
    const char *first = strstr(m->content, close);
    if (m->reasoning || !first)
        return;
    const char *last = first, *start = m->content;
    for (const char *p = first; (p = strstr(p, close)) != NULL; p += sizeof close - 1)
        last = p;
    for (const char *p = start; (p = strstr(p, open)) != NULL && p < first; p += sizeof open - 1)
        start = p + sizeof open - 1;
    *ret_answer = lstrip_lf(whole(last + sizeof close - 1));
    *ret_thoughts = lstrip_lf(rstrip_lf((piece){start, (size_t)(first - start)}));
}

/* Index of the last question that is no tool's answer; the last message if there is none. */
static int last_question(const message *m, int n)
{
    static const char open[] = "<tool_response>", close[] = "</tool_response>";
    for (int i = n - 1; i >= 0; i--) {
        size_t bytes = strlen(m[i].content), tail = sizeof close - 1;
        bool tool = strncmp(m[i].content, open, sizeof open - 1) == 0 && bytes >= tail &&
                    strcmp(m[i].content + bytes - tail, close) == 0;
        if (is(&m[i], "user") && !tool)
            return i;
    }
    return n - 1;
}

static int render_chatml(const qc_chat *c, const message *m, int n, qc_buf *buf, qc_err *err)
{
    int last = last_question(m, n);
    if (c->system && !is(&m[0], "system"))
        QC_TRY(qc_buf_printf(buf, err, "<|im_start|>system\n%s<|im_end|>\n", c->system));
    for (int i = 0; i < n; i++) {
        QC_TRY(qc_buf_printf(buf, err, "<|im_start|>%s\n", m[i].role));
        piece thoughts = {0}, answer = whole(m[i].content);
        if (c->thinks && is(&m[i], "assistant")) {
            split_thoughts(&m[i], &thoughts, &answer);
            if (i > last && (i == n - 1 || thoughts.n)) {
                thoughts = lstrip_lf(rstrip_lf(thoughts));
                answer = lstrip_lf(answer);
                QC_TRY(put(buf, "<think>\n", err));
                QC_TRY(qc_buf_append(buf, thoughts.p, thoughts.n, err));
                QC_TRY(put(buf, "\n</think>\n\n", err));
            }
        }
        QC_TRY(qc_buf_append(buf, answer.p, answer.n, err));
        QC_TRY(put(buf, "<|im_end|>\n", err));
    }
    return QC_OK;
}

static int render_llama3(const qc_chat *c, const message *m, int n, qc_buf *buf, qc_err *err)
{
    static const char header[] = "<|start_header_id|>%s<|end_header_id|>\n\n";
    int first = 0;
    if (c->system) { /* 3.1: a system turn in any case, with dates */
        QC_TRY(qc_buf_printf(buf, err, header, "system"));
        QC_TRY(
            qc_buf_printf(buf, err, "Cutting Knowledge Date: December 2023\nToday Date: %s\n\n", c->system));
        if (is(&m[0], "system"))
            QC_TRY(put_content(buf, m[first++].content, true, err));
        QC_TRY(put(buf, "<|eot_id|>", err));
    }
    for (int i = first; i < n; i++) {
        QC_TRY(qc_buf_printf(buf, err, header, m[i].role));
        QC_TRY(put_content(buf, m[i].content, true, err));
        QC_TRY(put(buf, "<|eot_id|>", err));
    }
    return c->always_prompts ? qc_buf_printf(buf, err, header, "assistant") : QC_OK;
}

static int render_mistral(const qc_chat *c, const message *m, int n, qc_buf *buf, qc_err *err)
{
    const char *system = is(&m[0], "system") ? m[0].content : NULL;
    int first = system != NULL;
    for (int i = first; i < n; i++) {
        if (is(&m[i], "user")) {
            QC_TRY(put(buf, c->inst_open, err));
            if (system && i == (c->system_last ? n - 1 : first))
                QC_TRY(qc_buf_printf(buf, err, "%s\n\n", system));
            QC_TRY(put(buf, m[i].content, err));
            QC_TRY(put(buf, c->inst_close, err));
        } else {
            QC_TRY(put(buf, c->answer_open, err));
            QC_TRY(put_content(buf, m[i].content, c->trim, err));
            QC_TRY(put(buf, c->eos, err));
        }
    }
    return QC_OK;
}

static int render_gemma(const message *m, int n, qc_buf *buf, qc_err *err)
{
    int first = is(&m[0], "system");
    for (int i = first; i < n; i++) {
        QC_TRY(qc_buf_printf(buf, err, "<start_of_turn>%s\n", is(&m[i], "user") ? "user" : "model"));
        if (i == first && first)
            QC_TRY(qc_buf_printf(buf, err, "%s\n\n", m[0].content));
        QC_TRY(put_content(buf, m[i].content, true, err));
        QC_TRY(put(buf, "<end_of_turn>\n", err));
    }
    return QC_OK;
}

static int render_phi3(const qc_chat *c, const message *m, int n, qc_buf *buf, qc_err *err)
{
    for (int i = 0; i < n; i++) {
        bool question = is(&m[i], "user");
        if (is(&m[i], "system") && (!c->system_first || (c->skips_empty && !*m[i].content)))
            continue; /* the template leaves it out */
        if (c->system_first || question)
            QC_TRY(qc_buf_printf(buf, err, "<|%s|>\n", m[i].role));
        QC_TRY(put(buf, m[i].content, err));
        QC_TRY(put(buf, "<|end|>\n", err));
        if (c->always_prompts && question)
            QC_TRY(put(buf, "<|assistant|>\n", err));
    }
    return c->ends_with_eos ? put(buf, c->eos, err) : QC_OK;
}

/* ---- messages ---- */

static int read_message(const cJSON *item, const char *name, int index, message *ret, qc_err *err)
{
    const cJSON *role = qc_json_get(item, "role"), *content = qc_json_get(item, "content"),
                *reasoning = qc_json_get(item, "reasoning_content");
    if (!cJSON_IsObject(item) || !cJSON_IsString(role))
        return qc_fail(err, QC_E_INPUT, "%s: message %d is no object with a role", name, index);
    *ret = (message){.role = role->valuestring};
    if (qc_json_get(item, "tool_calls") || (!is(ret, "system") && !is(ret, "user") && !is(ret, "assistant")))
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: message %d: only plain messages of system, user and assistant are rendered", name,
                       index);
    if (is(ret, "system") && index > 0)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: message %d: a system message that is not the first", name,
                       index);
    if (!cJSON_IsString(content))
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: message %d: only a text as content is rendered", name,
                       index);
    ret->content = content->valuestring;
    ret->reasoning = cJSON_IsString(reasoning) ? reasoning->valuestring : NULL;
    return QC_OK;
}

/* Mistral and Gemma raise an exception unless questions and answers alternate. */
static int check_order(const qc_chat *c, const message *m, int n, const char *name, qc_err *err)
{
    int first = is(&m[0], "system");
    if (first && c->no_system)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: the chat template knows no system message", name);
    if (n == first)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: a system message alone", name);
    if (c->layout == LAYOUT_MISTRAL || c->layout == LAYOUT_GEMMA)
        for (int i = first; i < n; i++)
            if (is(&m[i], "user") != ((i - first) % 2 == 0))
                return qc_fail(err, QC_E_UNSUPPORTED,
                               "%s: message %d: the chat template wants user and assistant in turn", name, i);
    return QC_OK;
}

static int render(const qc_chat *c, const message *m, int n, const char *name, qc_buf *buf, qc_err *err)
{
    QC_TRY(check_order(c, m, n, name, err));
    if (c->starts_with_bos)
        QC_TRY(put(buf, c->bos, err));
    switch (c->layout) {
    case LAYOUT_CHATML:
        return render_chatml(c, m, n, buf, err);
    case LAYOUT_LLAMA3:
        return render_llama3(c, m, n, buf, err);
    case LAYOUT_MISTRAL:
        return render_mistral(c, m, n, buf, err);
    case LAYOUT_GEMMA:
        return render_gemma(m, n, buf, err);
    case LAYOUT_PHI3:
        break;
    }
    return render_phi3(c, m, n, buf, err);
}

int qc_chat_render(const qc_chat *chat, const cJSON *messages, const char *name, qc_buf *buf, qc_err *err)
{
    int n = cJSON_GetArraySize(messages), i = 0, rc = QC_OK;
    if (!cJSON_IsArray(messages) || n == 0)
        return qc_fail(err, QC_E_INPUT, "%s: messages is not a list of messages", name);
    message *m = qc_alloc((size_t)n, sizeof *m);
    if (!m)
        return qc_fail_nomem(err, name, (unsigned long long)n * sizeof *m);
    const cJSON *item;
    cJSON_ArrayForEach(item, messages)
    {
        if (rc == QC_OK)
            rc = read_message(item, name, i, &m[i], err);
        i++;
    }
    if (rc == QC_OK)
        rc = render(chat, m, n, name, buf, err);
    qc_free(m);
    return rc;
}
