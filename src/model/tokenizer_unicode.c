#include "tokenizer_unicode.h"

#include "qc_alloc.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

typedef struct range {
    int32_t first, last;
} range;

typedef struct category_range {
    int32_t first, last;
    uint8_t category; /* utf8proc_category_t, or HAN: a letter of the Han script */
} category_range;

enum {
    LU = UTF8PROC_CATEGORY_LU,
    LL = UTF8PROC_CATEGORY_LL,
    LM = UTF8PROC_CATEGORY_LM,
    LO = UTF8PROC_CATEGORY_LO,
    MN = UTF8PROC_CATEGORY_MN,
    MC = UTF8PROC_CATEGORY_MC,
    ND = UTF8PROC_CATEGORY_ND,
    NO = UTF8PROC_CATEGORY_NO,
    PD = UTF8PROC_CATEGORY_PD,
    PO = UTF8PROC_CATEGORY_PO,
    SM = UTF8PROC_CATEGORY_SM,
    SO = UTF8PROC_CATEGORY_SO,
    CF = UTF8PROC_CATEGORY_CF,
    HAN = 64
};

/* Code points that Unicode 15, 15.1 and 16 added. */
static const category_range newer[] = {
    {0x897, 0x897, MN},      {0xCF3, 0xCF3, MC},      {0xECE, 0xECE, MN},     {0x1B4E, 0x1B4F, PO},
    {0x1B7F, 0x1B7F, PO},    {0x1C89, 0x1C89, LU},    {0x1C8A, 0x1C8A, LL},   {0x2427, 0x2429, SO},
    {0x2FFC, 0x2FFF, SO},    {0x31E4, 0x31E5, SO},    {0x31EF, 0x31EF, SO},   {0xA7CB, 0xA7CC, LU},
    {0xA7CD, 0xA7CD, LL},    {0xA7DA, 0xA7DA, LU},    {0xA7DB, 0xA7DB, LL},   {0xA7DC, 0xA7DC, LU},
    {0x105C0, 0x105F3, LO},  {0x10D40, 0x10D49, ND},  {0x10D4A, 0x10D4D, LO}, {0x10D4E, 0x10D4E, LM},
    {0x10D4F, 0x10D4F, LO},  {0x10D50, 0x10D65, LU},  {0x10D69, 0x10D6D, MN}, {0x10D6E, 0x10D6E, PD},
    {0x10D6F, 0x10D6F, LM},  {0x10D70, 0x10D85, LL},  {0x10D8E, 0x10D8F, SM}, {0x10EC2, 0x10EC4, LO},
    {0x10EFC, 0x10EFF, MN},  {0x1123F, 0x11240, LO},  {0x11241, 0x11241, MN}, {0x11380, 0x11389, LO},
    {0x1138B, 0x1138B, LO},  {0x1138E, 0x1138E, LO},  {0x11390, 0x113B5, LO}, {0x113B7, 0x113B7, LO},
    {0x113B8, 0x113BA, MC},  {0x113BB, 0x113C0, MN},  {0x113C2, 0x113C2, MC}, {0x113C5, 0x113C5, MC},
    {0x113C7, 0x113CA, MC},  {0x113CC, 0x113CD, MC},  {0x113CE, 0x113CE, MN}, {0x113CF, 0x113CF, MC},
    {0x113D0, 0x113D0, MN},  {0x113D1, 0x113D1, LO},  {0x113D2, 0x113D2, MN}, {0x113D3, 0x113D3, LO},
    {0x113D4, 0x113D5, PO},  {0x113D7, 0x113D8, PO},  {0x113E1, 0x113E2, MN}, {0x116D0, 0x116E3, ND},
    {0x11B00, 0x11B09, PO},  {0x11BC0, 0x11BE0, LO},  {0x11BE1, 0x11BE1, PO}, {0x11BF0, 0x11BF9, ND},
    {0x11F00, 0x11F01, MN},  {0x11F02, 0x11F02, LO},  {0x11F03, 0x11F03, MC}, {0x11F04, 0x11F10, LO},
    {0x11F12, 0x11F33, LO},  {0x11F34, 0x11F35, MC},  {0x11F36, 0x11F3A, MN}, {0x11F3E, 0x11F3F, MC},
    {0x11F40, 0x11F40, MN},  {0x11F41, 0x11F41, MC},  {0x11F42, 0x11F42, MN}, {0x11F43, 0x11F4F, PO},
    {0x11F50, 0x11F59, ND},  {0x11F5A, 0x11F5A, MN},  {0x1342F, 0x1342F, LO}, {0x13439, 0x1343F, CF},
    {0x13440, 0x13440, MN},  {0x13441, 0x13446, LO},  {0x13447, 0x13455, MN}, {0x13460, 0x143FA, LO},
    {0x16100, 0x1611D, LO},  {0x1611E, 0x16129, MN},  {0x1612A, 0x1612C, MC}, {0x1612D, 0x1612F, MN},
    {0x16130, 0x16139, ND},  {0x16D40, 0x16D42, LM},  {0x16D43, 0x16D6A, LO}, {0x16D6B, 0x16D6C, LM},
    {0x16D6D, 0x16D6F, PO},  {0x16D70, 0x16D79, ND},  {0x18CFF, 0x18CFF, LO}, {0x1B132, 0x1B132, LO},
    {0x1B155, 0x1B155, LO},  {0x1CC00, 0x1CCEF, SO},  {0x1CCF0, 0x1CCF9, ND}, {0x1CD00, 0x1CEB3, SO},
    {0x1D2C0, 0x1D2D3, NO},  {0x1DF25, 0x1DF2A, LL},  {0x1E030, 0x1E06D, LM}, {0x1E08F, 0x1E08F, MN},
    {0x1E4D0, 0x1E4EA, LO},  {0x1E4EB, 0x1E4EB, LM},  {0x1E4EC, 0x1E4EF, MN}, {0x1E4F0, 0x1E4F9, ND},
    {0x1E5D0, 0x1E5ED, LO},  {0x1E5EE, 0x1E5EF, MN},  {0x1E5F0, 0x1E5F0, LO}, {0x1E5F1, 0x1E5FA, ND},
    {0x1E5FF, 0x1E5FF, PO},  {0x1F6DC, 0x1F6DC, SO},  {0x1F774, 0x1F776, SO}, {0x1F77B, 0x1F77F, SO},
    {0x1F7D9, 0x1F7D9, SO},  {0x1F8B2, 0x1F8BB, SO},  {0x1F8C0, 0x1F8C1, SO}, {0x1FA75, 0x1FA77, SO},
    {0x1FA87, 0x1FA89, SO},  {0x1FA8F, 0x1FA8F, SO},  {0x1FAAD, 0x1FAAF, SO}, {0x1FABB, 0x1FABF, SO},
    {0x1FAC6, 0x1FAC6, SO},  {0x1FACE, 0x1FACF, SO},  {0x1FADA, 0x1FADC, SO}, {0x1FADF, 0x1FADF, SO},
    {0x1FAE8, 0x1FAE9, SO},  {0x1FAF7, 0x1FAF8, SO},  {0x1FBCB, 0x1FBEF, SO}, {0x2B739, 0x2B739, HAN},
    {0x2EBF0, 0x2EE5D, HAN}, {0x31350, 0x323AF, HAN},
};

/* Code points whose decomposition, combining class or composition is younger than Unicode 9: the normal forms
 * pass them through. */
static const range inert[] = {
    {0x7FD, 0x7FD},     {0x898, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},     {0xC3C, 0xC3C},
    {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0x1715, 0x1715},   {0x1ABF, 0x1ACE},   {0x1DF6, 0x1DFA},
    {0x32FF, 0x32FF},   {0xA7F2, 0xA7F4},   {0xA82C, 0xA82C},   {0xAB69, 0xAB69},   {0x10781, 0x10785},
    {0x10787, 0x107B0}, {0x107B2, 0x107BA}, {0x10D24, 0x10D27}, {0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF},
    {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x1145E, 0x1145E},
    {0x11839, 0x1183A}, {0x11930, 0x11930}, {0x11938, 0x11938}, {0x1193D, 0x1193E}, {0x11943, 0x11943},
    {0x119E0, 0x119E0}, {0x11A34, 0x11A34}, {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D42},
    {0x11D44, 0x11D45}, {0x11D97, 0x11D97}, {0x11F41, 0x11F42}, {0x16FF0, 0x16FF1}, {0x1E030, 0x1E06D},
    {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF},
    {0x1F16C, 0x1F16C}, {0x1FBF0, 0x1FBF9},
};

static int compare_range(const void *key, const void *elem)
{
    int32_t cp = *(const int32_t *)key;
    const range *r = elem;
    return cp < r->first ? -1 : cp > r->last;
}

static int compare_category(const void *key, const void *elem)
{
    int32_t cp = *(const int32_t *)key;
    const category_range *r = elem;
    return cp < r->first ? -1 : cp > r->last;
}

/* Category of a code point younger than Unicode 14, -1 for all others. */
static int newer_category(int32_t cp)
{
    const category_range *r =
        bsearch(&cp, newer, sizeof newer / sizeof *newer, sizeof *newer, compare_category);
    return r ? r->category : -1;
}

static int category_of(int32_t cp)
{
    int category = utf8proc_category(cp);
    if (category == UTF8PROC_CATEGORY_CN) {
        int recent = newer_category(cp);
        return recent == HAN ? LO : recent >= 0 ? recent : category;
    }
    return category;
}

bool tok_is_space(int32_t cp)
{
    if (cp < 0x80)
        return cp == ' ' || (cp >= 9 && cp <= 13);
    return cp == 0x85 || cp == 0xA0 || cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 ||
           cp == 0x2029 || cp == 0x202F || cp == 0x205F || cp == 0x3000;
}

bool tok_is_word(int32_t cp)
{
    int category = category_of(cp);
    if (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_NL)
        return true; /* letters, marks, Nd, Nl */
    return category == UTF8PROC_CATEGORY_PC || cp == 0x200C || cp == 0x200D ||
           /* Other_Alphabetic outside letters and marks: circled and squared letters */
           (cp >= 0x24B6 && cp <= 0x24E9) || (cp >= 0x1F130 && cp <= 0x1F149) ||
           (cp >= 0x1F150 && cp <= 0x1F169) || (cp >= 0x1F170 && cp <= 0x1F189);
}

bool tok_is_numeric(int32_t cp)
{
    int category = category_of(cp);
    if (category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO)
        return true;
    return (cp >= 0x11DE0 && cp <= 0x11DE9) || (cp >= 0x16FF4 && cp <= 0x16FF6);
}

int tok_lower(int32_t cp, int32_t ret[2])
{
    ret[0] = utf8proc_tolower(cp);
    ret[1] = 0;
    if (cp == 0x130) {
        ret[0] = 'i';
        ret[1] = 0x307;
        return 2;
    }
    if (cp < 0x1C89 || ret[0] != cp)
        return 1;
    if (cp == 0x1C89 || cp == 0xA7CC || cp == 0xA7CE || cp == 0xA7D2 || cp == 0xA7D4 || cp == 0xA7DA)
        ret[0] = cp + 1;
    else if (cp == 0xA7CB)
        ret[0] = 0x264;
    else if (cp == 0xA7DC)
        ret[0] = 0x19B;
    else if (cp >= 0x10D50 && cp <= 0x10D65)
        ret[0] = cp + 0x20;
    else if (cp >= 0x16EA0 && cp <= 0x16EB8)
        ret[0] = cp + 0x1B;
    return 1;
}

int32_t tok_stand_in(int32_t cp)
{
    if (cp < 0x800)
        return cp;
    if (cp == 0x180E) /* a format character; PCRE2 counts it as horizontal space */
        return 0x2060;
    int category = newer_category(cp);
    if (category < 0)
        return cp;
    bool three = cp < 0x10000; /* bytes of UTF-8; else four */
    switch (category) {
    case HAN:
        return 0x20000;
    case LU:
        return three ? 0x10A0 : 0x10400;
    case LL:
        return three ? 0x1D02 : 0x10428;
    case LM:
        return three ? 0x1D2C : 0x16B40;
    case LO:
        return three ? 0x1401 : 0x10280;
    case MN:
        return three ? 0x20D0 : 0x11001;
    case MC:
        return three ? 0x0903 : 0x11000;
    case ND:
        return three ? 0x0966 : 0x104A0;
    case NO:
        return three ? 0x2150 : 0x10107;
    case PD:
        return three ? 0x2E17 : 0x10EAD;
    case PO:
        return three ? 0x2E19 : 0x10100;
    case SM:
        return three ? 0x2A00 : 0x1D6C1;
    case SO:
        return three ? 0x2800 : 0x1F030;
    default:
        return three ? 0x2060 : 0xE0001; /* CF */
    }
}

/* ---- normal forms ---- */

/* Code points of one stretch of text, grown as needed. */
typedef struct cp_list {
    int32_t *cps;
    size_t n, cap;
} cp_list;

/* Does no normal form change cp, reorder it or join it with a neighbour? False may be said of such a one too.
 */
static bool is_plain(int32_t cp)
{
    if ((cp >= 0x1100 && cp < 0x1200) || (cp >= 0xAC00 && cp < 0xD7A4)) /* Hangul: composed by rule */
        return false;
    const utf8proc_property_t *p = utf8proc_get_property(cp);
    return p->combining_class == 0 && p->decomp_seqindex == UINT16_MAX && p->comb_index == UINT16_MAX;
}

static bool is_inert(int32_t cp)
{
    return bsearch(&cp, inert, sizeof inert / sizeof *inert, sizeof *inert, compare_range) ||
           newer_category(cp) >= 0;
}

static int reserve(cp_list *list, size_t n_more, qc_err *err)
{
    if (list->n + n_more <= list->cap)
        return QC_OK;
    size_t cap = (list->n + n_more) * 2;
    int32_t *fresh = qc_realloc(list->cps, list->n * sizeof *fresh, cap * sizeof *fresh);
    if (!fresh)
        return qc_fail_nomem(err, "text normalisation", cap * sizeof *fresh);
    list->cps = fresh;
    list->cap = cap;
    return QC_OK;
}

static int combining_class(int32_t cp)
{
    return utf8proc_get_property(cp)->combining_class;
}

/* Stable sort of marks [0, n) by combining class: counting sort, as a run of marks may be the whole text. */
static void sort_marks(int32_t *cps, size_t n, int32_t *scratch)
{
    size_t start[257] = {0};
    for (size_t i = 0; i < n; i++)
        start[combining_class(cps[i]) + 1]++;
    for (int c = 0; c < 256; c++)
        start[c + 1] += start[c];
    for (size_t i = 0; i < n; i++)
        scratch[start[combining_class(cps[i])]++] = cps[i];
    memcpy(cps, scratch, n * sizeof *cps);
}

/* Canonical order of the first list->n code points. */
static int order_marks(cp_list *list, qc_err *err)
{
    size_t n = list->n;
    for (size_t i = 0; i < n;) {
        size_t j = i;
        bool sorted = true;
        int last = 0;
        for (int c; j < n && (c = combining_class(list->cps[j])) != 0; j++) {
            sorted = sorted && c >= last;
            last = c;
        }
        if (!sorted) {
            QC_TRY(reserve(list, j - i, err));
            sort_marks(list->cps + i, j - i, list->cps + n);
        }
        i = j + 1;
    }
    return QC_OK;
}

static int normalise_stretch(tok_form form, const char *text, size_t n_bytes, cp_list *list, qc_buf *out,
                             qc_err *err)
{
    int options =
        UTF8PROC_STABLE | (form == TOK_NFC || form == TOK_NFKC ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE);
    if (form == TOK_NFKC || form == TOK_NFKD)
        options |= UTF8PROC_COMPAT;
    list->n = 0;
    for (size_t i = 0; i < n_bytes;) {
        int n;
        int32_t cp = tok_decode_char(text + i, &n);
        QC_TRY(reserve(list, 32, err)); /* the longest decomposition has 18 code points */
        utf8proc_ssize_t made = utf8proc_decompose_char(cp, list->cps + list->n, 32, options, NULL);
        if (made < 0 || made > 32)
            return qc_fail(err, QC_E_UNSUPPORTED, "character U+%04X can not be normalised", (unsigned)cp);
        list->n += (size_t)made;
        i += (size_t)n;
    }
    QC_TRY(order_marks(list, err));
    utf8proc_ssize_t n_cps = utf8proc_normalize_utf32(list->cps, (utf8proc_ssize_t)list->n, options);
    for (utf8proc_ssize_t i = 0; i < n_cps; i++) {
        char utf8[4];
        QC_TRY(qc_buf_append(out, utf8, (size_t)tok_encode_char(list->cps[i], utf8), err));
    }
    return QC_OK;
}

/* End of the stretch of non-ASCII, not inert characters from i on; *ret_plain: no normal form changes it. */
static size_t stretch_end(const char *text, size_t i, size_t n_bytes, bool *ret_plain)
{
    *ret_plain = true;
    while (i < n_bytes && (unsigned char)text[i] >= 0x80) {
        int n;
        int32_t cp = tok_decode_char(text + i, &n);
        if (!is_plain(cp)) {
            if (is_inert(cp))
                break;
            *ret_plain = false;
        }
        i += (size_t)n;
    }
    return i;
}

/* ASCII characters never change, never combine with what stands before them, and can only be the base of what
 * follows: so a stretch is one ASCII character and the others behind it, up to the next ASCII or inert one.
 */
static int normal_form(tok_form form, const char *text, size_t n_bytes, cp_list *list, qc_buf *out,
                       qc_err *err)
{
    size_t copied = 0; /* text before it is in out */
    for (size_t i = 0; i < n_bytes;) {
        if ((unsigned char)text[i] < 0x80) {
            i++;
            continue;
        }
        bool plain;
        size_t end = stretch_end(text, i, n_bytes, &plain);
        if (!plain) {
            size_t start = i > copied && (unsigned char)text[i - 1] < 0x80 ? i - 1 : i;
            QC_TRY(qc_buf_append(out, text + copied, start - copied, err));
            QC_TRY(normalise_stretch(form, text + start, end - start, list, out, err));
            copied = end;
        }
        i = end;
        if (i < n_bytes && (unsigned char)text[i] >= 0x80) { /* inert: copied, and nothing joins it */
            i += (size_t)tok_char_bytes((unsigned char)text[i]);
            QC_TRY(qc_buf_append(out, text + copied, i - copied, err));
            copied = i;
        }
    }
    return qc_buf_append(out, text + copied, n_bytes - copied, err);
}

int tok_normal_form(tok_form form, const char *text, size_t n_bytes, qc_buf *out, qc_err *err)
{
    cp_list list = {0};
    int rc = normal_form(form, text, n_bytes, &list, out, err);
    qc_free(list.cps);
    return rc;
}
