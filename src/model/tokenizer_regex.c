#include "tokenizer_internal.h"

#include <string.h>

/* The files are written for Oniguruma in its Ruby syntax. What PCRE2 reads in the same way is let through,
 * the rest is refused. state: offset in the pattern, and whether it is inside a bracket. */
typedef struct pattern_state {
    const char *pattern;
    size_t at;
    bool in_class;
} pattern_state;

/* Escapes of the same meaning (\s \S \d \D \p \P and the stand-ins of tok_stand_in); punctuation stands for
 * itself. */
static const char *check_escape(pattern_state *st)
{
    unsigned char c = (unsigned char)st->pattern[st->at + 1];
    bool alnum = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
    if (c == 0)
        return "a backslash at the end";
    if (c >= 0x80 || (alnum && !strchr("sSdDpPrntfxAz", c)) || (st->in_class && (c == 'A' || c == 'z')))
        return "an escape of another meaning in PCRE2";
    st->at += 2;
    if (strchr("pPx", c) && st->pattern[st->at] == '{') { /* \p{L}: these braces are no repeat */
        const char *end = strchr(st->pattern + st->at, '}');
        if (!end)
            return "an open brace";
        st->at = (size_t)(end + 1 - st->pattern);
    }
    return NULL;
}

/* Groups: (...) (?:...) (?i:...) and the four lookarounds. */
static const char *check_group(pattern_state *st)
{
    const char *p = st->pattern + st->at + 1;
    static const char *const known[] = {"?:", "?i:", "?=", "?!", "?<=", "?<!", "?>"};
    st->at++;
    if (*p == '*')
        return "a verb";
    if (*p != '?')
        return NULL;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strncmp(p, known[i], strlen(known[i])) == 0) {
            st->at += strlen(known[i]);
            return NULL;
        }
    }
    return "a group of another kind than (?: (?i: (?= (?! (?<= (?<! (?>";
}

static const char *check_class_char(pattern_state *st)
{
    const char *p = st->pattern + st->at;
    if (*p == '[')
        return "a bracket inside brackets";
    if (p[0] == '&' && p[1] == '&')
        return "&& inside brackets";
    if (*p == ']')
        st->in_class = false;
    st->at++;
    return NULL;
}

static const char *check_plain_char(pattern_state *st)
{
    const char *p = st->pattern + st->at;
    if (*p == '[') {
        st->in_class = true;
        st->at += p[1] == '^' ? 2 : 1;
        return st->pattern[st->at] == ']' ? "an empty bracket" : NULL;
    }
    if (*p == '(')
        return check_group(st);
    if (p[0] == '}' && p[1] == '+')
        return "}+ (a repeated repeat there, a possessive one in PCRE2)";
    if (p[0] == '{' && p[1] == ',')
        return "{,n}";
    st->at++;
    return NULL;
}

/* NULL, or what is not the same in both languages. */
static const char *check_pattern(const char *pattern)
{
    pattern_state st = {.pattern = pattern};
    while (pattern[st.at]) {
        const char *bad = pattern[st.at] == '\\' ? check_escape(&st)
                          : st.in_class          ? check_class_char(&st)
                                                 : check_plain_char(&st);
        if (bad)
            return bad;
    }
    return NULL;
}

int tok_regex_new(const char *pattern, bool literal, const char *name, pcre2_code **ret, qc_err *err)
{
    const char *bad = literal ? NULL : check_pattern(pattern);
    if (bad)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: pattern \"%s\" holds %s", name, pattern, bad);
    int code;
    PCRE2_SIZE at;
    uint32_t options = literal ? PCRE2_UTF | PCRE2_LITERAL
                               : PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!context)
        return qc_fail_nomem(err, "pattern", 0);
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    pcre2_code *re = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, options, &code, &at, context);
    pcre2_compile_context_free(context);
    if (!re) {
        char text[160];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof text);
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: pattern \"%s\": %s at offset %zu", name, pattern, text,
                       (size_t)at);
    }
    uint32_t empty = 0;
    pcre2_pattern_info(re, PCRE2_INFO_MATCHEMPTY, &empty);
    if (empty) { /* where such matches count differs from place to place in the reference */
        pcre2_code_free(re);
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: pattern \"%s\" matches the empty text", name, pattern);
    }
    pcre2_jit_compile(re, PCRE2_JIT_COMPLETE); /* without it, matching is slower and the same */
    *ret = re;
    return QC_OK;
}

int tok_regex_find(tok_run *run, const pcre2_code *code, const char *subject, size_t n_bytes, size_t from,
                   size_t *ret_start, size_t *ret_end)
{
    PCRE2_SPTR text = (PCRE2_SPTR)subject;
    int rc = pcre2_match(code, text, n_bytes, from, PCRE2_NO_UTF_CHECK, run->match, run->match_context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter keeps its state on the heap */
        rc = pcre2_match(code, text, n_bytes, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, run->match,
                         run->match_context);
    if (rc == PCRE2_ERROR_NOMATCH)
        return 0;
    if (rc < 0)
        return qc_fail(run->err, QC_E_RESOURCE,
                       "%s: a pattern gives up at byte %zu of a text (PCRE2 error %d)", run->tok->name, from,
                       rc);
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(run->match);
    *ret_start = range[0];
    *ret_end = range[1];
    return 1;
}

int tok_regex_subject(const char *text, size_t n_bytes, qc_buf *copy, const char **ret, qc_err *err)
{
    bool copied = false;
    *ret = text;
    for (size_t i = 0; i < n_bytes;) {
        unsigned char lead = (unsigned char)text[i];
        if (lead < 0xE0) {
            i += lead < 0x80 ? 1 : 2;
            continue;
        }
        int n;
        int32_t cp = tok_decode_char(text + i, &n), other = tok_stand_in(cp);
        if (other != cp) {
            if (!copied) {
                copy->n_bytes = 0;
                QC_TRY(qc_buf_append(copy, text, n_bytes, err));
                copied = true;
            }
            tok_encode_char(other, copy->data + i);
        }
        i += (size_t)n;
    }
    if (copied)
        *ret = copy->data;
    return QC_OK;
}
