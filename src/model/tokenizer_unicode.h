/* Character properties as the reference tokenizer library sees them, whatever Unicode version the installed
 * PCRE2 and utf8proc have: its regular expressions know Unicode 16, its character tests Unicode 17, its
 * normal forms Unicode 9. All functions take code points that came from valid UTF-8. */
#ifndef QC_TOKENIZER_UNICODE_H
#define QC_TOKENIZER_UNICODE_H

#include "qc_buf.h"
#include "qc_err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

bool tok_is_space(int32_t cp);   /* White_Space */
bool tok_is_word(int32_t cp);    /* \w: what single_word tokens may not touch */
bool tok_is_numeric(int32_t cp); /* Nd, Nl, No: the Digits pre-tokenizer */

/* Full lower case of one character: 1 or 2 code points. */
int tok_lower(int32_t cp, int32_t ret[2]);

/* A code point of the same UTF-8 length that PCRE2 of any version puts into the class that cp should have; cp
 * itself for nearly all. Matching a text with the stand-ins in place gives the matches of the reference. */
int32_t tok_stand_in(int32_t cp);

typedef enum tok_form { TOK_NFC, TOK_NFD, TOK_NFKC, TOK_NFKD } tok_form;

/* Append the normal form of n_bytes of valid UTF-8. Linear-logarithmic even for hostile runs of marks. */
int tok_normal_form(tok_form form, const char *text, size_t n_bytes, qc_buf *out, qc_err *err) QC_WARN_UNUSED;

/* Bytes of the UTF-8 character that starts with this byte. */
static inline int tok_char_bytes(unsigned char lead)
{
    return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

/* Code point at p (valid UTF-8), its length in *ret_bytes. */
static inline int32_t tok_decode_char(const char *p, int *ret_bytes)
{
    const unsigned char *s = (const unsigned char *)p;
    int n = tok_char_bytes(s[0]);
    *ret_bytes = n;
    if (n == 1)
        return s[0];
    if (n == 2)
        return (s[0] & 0x1F) << 6 | (s[1] & 0x3F);
    if (n == 3)
        return (s[0] & 0x0F) << 12 | (s[1] & 0x3F) << 6 | (s[2] & 0x3F);
    return (s[0] & 0x07) << 18 | (s[1] & 0x3F) << 12 | (s[2] & 0x3F) << 6 | (s[3] & 0x3F);
}

/* UTF-8 of cp into dst (room for 4), returns its length. */
static inline int tok_encode_char(int32_t cp, char *dst)
{
    if (cp < 0x80) {
        dst[0] = (char)cp;
        return 1;
    }
    int n = cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--) {
        dst[i] = (char)(0x80 | (cp & 0x3F));
        cp >>= 6;
    }
    dst[0] = (char)((0xF00 >> n) | cp);
    return n;
}

/* Start of the character that ends just before `end` (> 0). */
static inline size_t tok_previous_char(const char *text, size_t end)
{
    do
        end--;
    while (end > 0 && ((unsigned char)text[end] & 0xC0) == 0x80);
    return end;
}

#endif
