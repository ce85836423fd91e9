#include "tokenizer_internal.h"

#include "qc_alloc.h"

#include <string.h>

/* Texts of tokens, one behind the other. */
typedef struct texts {
    qc_buf bytes;
    size_t *ends; /* end of text i in bytes; cap fixed at the number of tokens */
    int64_t n;
} texts;

static size_t start_of(const texts *t, int64_t i)
{
    return i ? t->ends[i - 1] : 0;
}

/* Bytes of the well-formed character at s, or minus the bytes (>= 1) of its well-formed beginning, which one
 * U+FFFD replaces. */
static int check_char(const char *p, size_t n_bytes)
{
    const unsigned char *s = (const unsigned char *)p;
    unsigned c = s[0];
    if (c < 0x80)
        return 1;
    int n = c >= 0xC2 && c < 0xE0 ? 2 : c >= 0xE0 && c < 0xF0 ? 3 : c >= 0xF0 && c < 0xF5 ? 4 : 0;
    if (n == 0)
        return -1;
    unsigned lo = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;
    unsigned hi = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
    for (int i = 1; i < n; i++) {
        if ((size_t)i >= n_bytes || s[i] < lo || s[i] > hi)
            return -i;
        lo = 0x80;
        hi = 0xBF;
    }
    return n;
}

static int append_lossy(qc_buf *out, const char *s, size_t n_bytes, qc_err *err)
{
    while (n_bytes > 0) {
        int n = check_char(s, n_bytes);
        QC_TRY(n > 0 ? qc_buf_append(out, s, (size_t)n, err) : qc_buf_append(out, "\xEF\xBF\xBD", 3, err));
        size_t step = (size_t)(n > 0 ? n : -n);
        s += step;
        n_bytes -= step;
    }
    return QC_OK;
}

/* Bytes of one piece of the byte-level alphabet; a piece with any other character stands for itself. */
static int append_unmapped(qc_buf *out, const char *s, size_t n_bytes, qc_err *err)
{
    size_t mark = out->n_bytes;
    for (size_t i = 0; i < n_bytes;) {
        int n;
        int byte = tok_char_to_byte(tok_decode_char(s + i, &n));
        if (byte < 0) {
            out->n_bytes = mark;
            return qc_buf_append(out, s, n_bytes, err);
        }
        char c = (char)byte;
        QC_TRY(qc_buf_append(out, &c, 1, err));
        i += (size_t)n;
    }
    return QC_OK;
}

static int byte_level(const texts *in, texts *out, qc_err *err)
{
    qc_buf raw = {0};
    int rc = QC_OK;
    for (int64_t i = 0; i < in->n && rc == QC_OK; i++)
        rc = append_unmapped(&raw, in->bytes.data + start_of(in, i), in->ends[i] - start_of(in, i), err);
    if (rc == QC_OK)
        rc = append_lossy(&out->bytes, raw.data, raw.n_bytes, err);
    qc_buf_clear(&raw);
    out->ends[0] = out->bytes.n_bytes;
    out->n = in->n ? 1 : 0;
    return rc;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
}

/* Value of a byte piece <0xXX>, -1 for all others. */
static int byte_piece(const char *s, size_t n_bytes)
{
    if (n_bytes != 6 || memcmp(s, "<0x", 3) != 0 || s[5] != '>' || hex_digit(s[3]) < 0 || hex_digit(s[4]) < 0)
        return -1;
    return hex_digit(s[3]) * 16 + hex_digit(s[4]);
}

/* A run of byte pieces becomes one text if it is UTF-8, else one U+FFFD for each byte. */
static int flush_bytes(qc_buf *run, texts *out, qc_err *err)
{
    if (run->n_bytes == 0)
        return QC_OK;
    size_t i = 0;
    for (int n = 1; i < run->n_bytes && n > 0; i += n > 0 ? (size_t)n : 0)
        n = check_char(run->data + i, run->n_bytes - i);
    if (i == run->n_bytes)
        QC_TRY(qc_buf_append(&out->bytes, run->data, run->n_bytes, err));
    else
        for (size_t k = 0; k < run->n_bytes; k++)
            QC_TRY(qc_buf_append(&out->bytes, "\xEF\xBF\xBD", 3, err));
    out->ends[out->n++] = out->bytes.n_bytes;
    run->n_bytes = 0;
    return QC_OK;
}

static int byte_fallback_into(const texts *in, texts *out, qc_buf *run, qc_err *err)
{
    for (int64_t i = 0; i < in->n; i++) {
        const char *s = in->bytes.data + start_of(in, i);
        size_t n_bytes = in->ends[i] - start_of(in, i);
        int byte = byte_piece(s, n_bytes);
        if (byte >= 0) {
            char c = (char)byte;
            QC_TRY(qc_buf_append(run, &c, 1, err));
            continue;
        }
        QC_TRY(flush_bytes(run, out, err));
        QC_TRY(qc_buf_append(&out->bytes, s, n_bytes, err));
        out->ends[out->n++] = out->bytes.n_bytes;
    }
    return flush_bytes(run, out, err);
}

static int byte_fallback(const texts *in, texts *out, qc_err *err)
{
    qc_buf run = {0};
    int rc = byte_fallback_into(in, out, &run, err);
    qc_buf_clear(&run);
    return rc;
}

static int replace(const tok_decoder *dec, const char *s, size_t n_bytes, qc_buf *out, qc_err *err)
{
    size_t pattern_bytes = strlen(dec->pattern);
    const char *end = s + n_bytes, *hit;
    while ((hit = memmem(s, (size_t)(end - s), dec->pattern, pattern_bytes)) != NULL) {
        QC_TRY(qc_buf_append(out, s, (size_t)(hit - s), err));
        QC_TRY(qc_buf_append(out, dec->content, strlen(dec->content), err));
        s = hit + pattern_bytes;
    }
    return qc_buf_append(out, s, (size_t)(end - s), err);
}

static int strip(const tok_decoder *dec, const char *s, size_t n_bytes, qc_buf *out, qc_err *err)
{
    size_t n = strlen(dec->pattern);
    for (int32_t i = 0; n && i < dec->start && n_bytes >= n && memcmp(s, dec->pattern, n) == 0; i++) {
        s += n;
        n_bytes -= n;
    }
    for (int32_t i = 0; n && i < dec->stop && n_bytes >= n && memcmp(s + n_bytes - n, dec->pattern, n) == 0;
         i++)
        n_bytes -= n;
    return qc_buf_append(out, s, n_bytes, err);
}

/* Marks become blanks; those of the first token are the pre-tokenizer's own and vanish. */
static int metaspace(const tok_decoder *dec, bool first, const char *s, size_t n_bytes, qc_buf *out,
                     qc_err *err)
{
    size_t n = strlen(dec->pattern);
    for (size_t i = 0; i < n_bytes;) {
        bool mark = n && n_bytes - i >= n && memcmp(s + i, dec->pattern, n) == 0;
        if (!mark)
            QC_TRY(qc_buf_append(out, s + i, 1, err));
        else if (!(first && dec->prepend))
            QC_TRY(qc_buf_append(out, " ", 1, err));
        i += mark ? n : 1;
    }
    return QC_OK;
}

static int each_text(const tok_decoder *dec, const texts *in, texts *out, qc_err *err)
{
    for (int64_t i = 0; i < in->n; i++) {
        const char *s = in->bytes.data + start_of(in, i);
        size_t n_bytes = in->ends[i] - start_of(in, i);
        if (dec->kind == TOK_DEC_REPLACE)
            QC_TRY(replace(dec, s, n_bytes, &out->bytes, err));
        else if (dec->kind == TOK_DEC_STRIP)
            QC_TRY(strip(dec, s, n_bytes, &out->bytes, err));
        else
            QC_TRY(metaspace(dec, i == 0, s, n_bytes, &out->bytes, err));
        out->ends[out->n++] = out->bytes.n_bytes;
    }
    return QC_OK;
}

static int decode_step(const tok_decoder *dec, texts *in, texts *out, qc_err *err)
{
    out->bytes.n_bytes = 0;
    out->n = 0;
    switch (dec->kind) {
    case TOK_DEC_BYTE_LEVEL:
        return byte_level(in, out, err);
    case TOK_DEC_BYTE_FALLBACK:
        return byte_fallback(in, out, err);
    case TOK_DEC_FUSE:
        QC_TRY(qc_buf_append(&out->bytes, in->bytes.data, in->bytes.n_bytes, err));
        out->ends[0] = out->bytes.n_bytes;
        out->n = in->n ? 1 : 0;
        return QC_OK;
    default:
        return each_text(dec, in, out, err);
    }
}

/* Pieces of the ids; without a decoder there is a blank between them. */
static int collect(const qc_tokenizer *tok, const int32_t *ids, int64_t n_ids, bool skip_special, texts *t,
                   qc_err *err)
{
    QC_TRY(qc_buf_append(&t->bytes, "", 0, err));
    for (int64_t i = 0; i < n_ids; i++) {
        if (ids[i] < 0 || ids[i] >= tok->vocab.n_ids)
            return qc_fail(err, QC_E_INPUT, "%s: id %d is outside 0 .. %d", tok->name, ids[i],
                           tok->vocab.n_ids - 1);
        const char *piece = tok_piece(&tok->vocab, ids[i]);
        if (!piece || (skip_special && qc_tokenizer_is_special(tok, ids[i])))
            continue;
        if (t->n && tok->n_decoders == 0)
            QC_TRY(qc_buf_append(&t->bytes, " ", 1, err));
        QC_TRY(qc_buf_append(&t->bytes, piece, strlen(piece), err));
        t->ends[t->n++] = t->bytes.n_bytes;
    }
    return QC_OK;
}

int qc_tokenizer_decode(const qc_tokenizer *tok, const int32_t *ids, int64_t n_ids, bool skip_special,
                        char **ret_text, size_t *ret_bytes, qc_err *err)
{
    texts t[2] = {{.ends = qc_alloc((size_t)n_ids + 1, sizeof(size_t))},
                  {.ends = qc_alloc((size_t)n_ids + 1, sizeof(size_t))}};
    int rc = t[0].ends && t[1].ends ? collect(tok, ids, n_ids, skip_special, &t[0], err)
                                    : qc_fail_nomem(err, "decoding", (size_t)n_ids * sizeof(size_t));
    int last = 0;
    for (size_t i = 0; i < tok->n_decoders && rc == QC_OK; i++) {
        rc = qc_buf_append(&t[1 - last].bytes, "", 0, err);
        if (rc == QC_OK)
            rc = decode_step(&tok->decoders[i], &t[last], &t[1 - last], err);
        last = 1 - last;
    }
    if (rc == QC_OK) {
        *ret_text = t[last].bytes.data;
        *ret_bytes = t[last].bytes.n_bytes;
        t[last].bytes.data = NULL;
    }
    for (int i = 0; i < 2; i++) {
        qc_buf_clear(&t[i].bytes);
        qc_free(t[i].ends);
    }
    return rc;
}
