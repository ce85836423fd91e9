/* Chat messages to text, as the chat template of a model does it. Templates are programs (Jinja); those of a
 * few families are recognised and rendered by code of our own, any other is refused by name: never a text
 * that is only similar. */
#ifndef QC_CHAT_H
#define QC_CHAT_H

#include "qc_buf.h"
#include "qc_json.h"
#include "qc_source.h"

typedef struct qc_chat qc_chat;

/* From the text of a template and the tokens it may name ("" if the tokenizer has none). `name` is for
 * messages. QC_E_UNSUPPORTED: a template that is not known. Free with qc_chat_free. */
int qc_chat_new(const char *template_text, const char *bos, const char *eos, const char *name, qc_chat **ret,
                qc_err *err) QC_WARN_UNUSED;

/* The template of a model: chat_template.jinja, else chat_template of tokenizer_config.json (the order of
 * transformers). QC_E_UNSUPPORTED also if it has none. */
int qc_chat_from_source(const qc_source *src, qc_chat **ret, qc_err *err) QC_WARN_UNUSED;

/* NULL is fine. */
void qc_chat_free(qc_chat *chat);

/* "ChatML", "Llama 3", "Mistral", "Gemma", "Phi 3"; static. */
const char *qc_chat_name(const qc_chat *chat);

/* Append the text of one conversation, [{"role": ..., "content": ...}, ...], without a prompt for a further
 * answer; special tokens are spelled out, the BOS included. QC_E_INPUT: not such an array; QC_E_UNSUPPORTED:
 * what the template refuses or this code does not render (tools, parts, order of roles). `name` is for
 * messages. */
int qc_chat_render(const qc_chat *chat, const cJSON *messages, const char *name, qc_buf *buf,
                   qc_err *err) QC_WARN_UNUSED;

#endif
