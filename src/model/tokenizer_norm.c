#include "tokenizer_internal.h"

#include <string.h>

static int lowercase(const char *text, size_t n_bytes, qc_buf *out, qc_err *err)
{
    for (size_t i = 0; i < n_bytes;) {
        int n;
        int32_t lower[2];
        int n_lower = tok_lower(tok_decode_char(text + i, &n), lower);
        for (int k = 0; k < n_lower; k++) {
            char utf8[4];
            QC_TRY(qc_buf_append(out, utf8, (size_t)tok_encode_char(lower[k], utf8), err));
        }
        i += (size_t)n;
    }
    return QC_OK;
}

static int strip(const tok_norm *norm, const char *text, size_t n_bytes, qc_buf *out, qc_err *err)
{
    size_t start = 0;
    int n;
    while (norm->left && start < n_bytes && tok_is_space(tok_decode_char(text + start, &n)))
        start += (size_t)n;
    while (norm->right && n_bytes > start) {
        size_t p = tok_previous_char(text, n_bytes);
        if (!tok_is_space(tok_decode_char(text + p, &n)))
            break;
        n_bytes = p;
    }
    return qc_buf_append(out, text + start, n_bytes - start, err);
}

static int replace_literal(const tok_norm *norm, const char *text, size_t n_bytes, qc_buf *out, qc_err *err)
{
    size_t pattern_bytes = strlen(norm->pattern), content_bytes = strlen(norm->content);
    const char *end = text + n_bytes, *hit;
    while ((hit = memmem(text, (size_t)(end - text), norm->pattern, pattern_bytes)) != NULL) {
        QC_TRY(qc_buf_append(out, text, (size_t)(hit - text), err));
        QC_TRY(qc_buf_append(out, norm->content, content_bytes, err));
        text = hit + pattern_bytes;
    }
    return qc_buf_append(out, text, (size_t)(end - text), err);
}

static int replace_regex(tok_run *run, const tok_norm *norm, const char *text, size_t n_bytes, qc_buf *out)
{
    const char *subject;
    QC_TRY(tok_regex_subject(text, n_bytes, &run->subject, &subject, run->err));
    size_t done = 0, start = 0, end = 0;
    int rc;
    while ((rc = tok_regex_find(run, norm->regex, subject, n_bytes, done, &start, &end)) > 0) {
        QC_TRY(qc_buf_append(out, text + done, start - done, run->err));
        QC_TRY(qc_buf_append(out, norm->content, strlen(norm->content), run->err));
        done = end;
    }
    return rc < 0 ? rc : qc_buf_append(out, text + done, n_bytes - done, run->err);
}

static int apply(tok_run *run, const tok_norm *norm, const char *text, size_t n_bytes, qc_buf *out)
{
    switch (norm->kind) {
    case TOK_NORM_NFC:
    case TOK_NORM_NFD:
    case TOK_NORM_NFKC:
    case TOK_NORM_NFKD:
        return tok_normal_form((tok_form)norm->kind, text, n_bytes, out, run->err);
    case TOK_NORM_LOWERCASE:
        return lowercase(text, n_bytes, out, run->err);
    case TOK_NORM_STRIP:
        return strip(norm, text, n_bytes, out, run->err);
    case TOK_NORM_PREPEND:
        if (n_bytes > 0)
            QC_TRY(qc_buf_append(out, norm->content, strlen(norm->content), run->err));
        return qc_buf_append(out, text, n_bytes, run->err);
    case TOK_NORM_REPLACE:
        return norm->pattern ? replace_literal(norm, text, n_bytes, out, run->err)
                             : replace_regex(run, norm, text, n_bytes, out);
    }
    return QC_OK;
}

int tok_normalise(tok_run *run, const char *text, size_t n_bytes, const char **ret, size_t *ret_bytes)
{
    for (size_t i = 0; i < run->tok->n_norms; i++) {
        qc_buf *out = &run->norm[i & 1];
        out->n_bytes = 0;
        QC_TRY(apply(run, &run->tok->norms[i], text, n_bytes, out));
        text = out->data;
        n_bytes = out->n_bytes;
    }
    *ret = text;
    *ret_bytes = n_bytes;
    return QC_OK;
}
