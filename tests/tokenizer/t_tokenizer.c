/* Interface, bad files, tokenizer_config, holes, work per byte, threads, failing allocations. */
#include "tok_files.h"

#include "qc_json.h"
#include "qc_rng.h"
#include "qc_sha256.h"
#include "tokenizer_internal.h"

#include <pthread.h>

#define MODEL                                                                                                \
    "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"ab\":3,\"abc\":4},\"merges\":[\"a "    \
    "b\",\"ab c\"]}"

static int load(const char *json, qc_tokenizer **ret, qc_err *err)
{
    *err = (qc_err){0};
    *ret = NULL;
    return qc_tokenizer_new(json, strlen(json), "t.json", ret, err);
}

static qc_tokenizer *must_load(const char *json)
{
    qc_tokenizer *tok;
    qc_err err;
    ck_assert_msg(load(json, &tok, &err) == QC_OK, "%s", err.msg);
    return tok;
}

/* Ids as "1 2 3", in static storage. */
static const char *ids_of(const qc_tokenizer *tok, const char *text, const qc_encode_options *options)
{
    static char line[4096];
    int32_t *ids = NULL;
    int64_t n = 0;
    qc_err err = {0};
    ck_assert_msg(qc_tokenizer_encode(tok, text, strlen(text), options, &ids, &n, &err) == QC_OK, "%s",
                  err.msg);
    size_t at = 0;
    line[0] = 0;
    for (int64_t i = 0; i < n && at < sizeof line - 16; i++)
        at += (size_t)sprintf(line + at, "%s%d", i ? " " : "", ids[i]);
    qc_free(ids);
    return line;
}

/* ---- files that must be refused ---- */

static void refused(int code, const char *part_of_message, const char *json)
{
    qc_tokenizer *tok;
    qc_err err;
    int rc = load(json, &tok, &err);
    ck_assert_msg(rc == code, "code %d instead of %d (%s) for %s", rc, code, err.msg, json);
    ck_assert_msg(strstr(err.msg, part_of_message) && strstr(err.msg, "t.json"), "\"%s\" lacks \"%s\"",
                  err.msg, part_of_message);
    ck_assert_ptr_null(tok);
}

START_TEST(broken_files)
{
    refused(QC_E_INPUT, "empty", "");
    refused(QC_E_INPUT, "syntax", "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0");
    refused(QC_E_INPUT, "model", "{}");
    refused(QC_E_INPUT, "model", "[]");
    refused(QC_E_INPUT, "vocab", "{\"model\":{\"vocab\":[],\"merges\":[]}}");
    refused(QC_E_INPUT, "merges", "{\"model\":{\"vocab\":{\"a\":0}}}");
    refused(QC_E_INPUT, "empty", "{\"model\":{\"vocab\":{},\"merges\":[]}}");
    refused(QC_E_INPUT, "\"a\"", "{\"model\":{\"vocab\":{\"a\":\"0\"},\"merges\":[]}}");
    refused(QC_E_INPUT, "not an integer", "{\"model\":{\"vocab\":{\"a\":0.5},\"merges\":[]}}");
    refused(QC_E_INPUT, "outside 0 ..", "{\"model\":{\"vocab\":{\"a\":-1},\"merges\":[]}}");
    refused(QC_E_INPUT, "4294967295", "{\"model\":{\"vocab\":{\"a\":4294967295},\"merges\":[]}}");
    refused(QC_E_INPUT, "both have the id 0", "{\"model\":{\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}}");
    refused(QC_E_INPUT, "duplicate", "{\"model\":{\"vocab\":{\"a\":0,\"a\":1},\"merges\":[]}}");
    refused(QC_E_INPUT, "merges[0]", "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"aa\"]}}");
    refused(QC_E_INPUT, "merges[0]", "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a a a\"]}}");
    refused(QC_E_INPUT, "merges[0]", "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[[\"a\"]]}}");
    refused(QC_E_INPUT, "merges[0]", "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[7]}}");
    refused(QC_E_INPUT, "\"x\" is not in the vocabulary",
            "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a x\"]}}");
    refused(QC_E_INPUT, "\"aa\" is not in the vocabulary",
            "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a a\"]}}");
    refused(QC_E_INPUT, "fuse_unk", "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"fuse_unk\":1}}");
    refused(QC_E_INPUT, "added_tokens", "{" MODEL ",\"added_tokens\":{}}");
    refused(QC_E_INPUT, "content", "{" MODEL ",\"added_tokens\":[{\"id\":9}]}");
    refused(QC_E_INPUT, "id", "{" MODEL ",\"added_tokens\":[{\"content\":\"x\"}]}");
    refused(QC_E_INPUT, "no text", "{" MODEL ",\"added_tokens\":[{\"id\":9,\"content\":\"\"}]}");
    refused(QC_E_INPUT, "both have the id 1", "{" MODEL ",\"added_tokens\":[{\"id\":1,\"content\":\"x\"}]}");
    refused(QC_E_INPUT, "gives it 1", "{" MODEL ",\"added_tokens\":[{\"id\":9,\"content\":\"b\"}]}");
    refused(QC_E_INPUT, "twice",
            "{" MODEL ",\"added_tokens\":[{\"id\":1,\"content\":\"b\"},{\"id\":1,\"content\":\"b\"}]}");
    refused(
        QC_E_INPUT, "id 77 has no piece",
        "{" MODEL
        ",\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"s\"}},"
        "{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":{\"s\":{\"ids\":[77]}}}}");
    refused(
        QC_E_INPUT, "no ids",
        "{" MODEL
        ",\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"s\"}},"
        "{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":{}}}");
    refused(QC_E_INPUT, "pre_tokenizer", "{" MODEL ",\"pre_tokenizer\":3}");
    refused(QC_E_INPUT, "type", "{" MODEL ",\"normalizer\":{}}");
    refused(QC_E_INPUT, "pattern", "{" MODEL ",\"normalizer\":{\"type\":\"Replace\",\"content\":\"\"}}");
    refused(QC_E_INPUT, "no object",
            "{" MODEL ",\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[null]}}");
    refused(QC_E_INPUT, "UTF-8", "{\"model\":{\"vocab\":{\"\xFF\":0},\"merges\":[]}}");
}
END_TEST

START_TEST(unknown_parts)
{
    static const char *const normalizers[] = {"BertNormalizer", "Nmt",       "Precompiled",
                                              "StripAccents",   "ByteLevel", "Qwertz"};
    static const char *const splits[] = {"Whitespace", "WhitespaceSplit", "Punctuation", "BertPreTokenizer",
                                         "UnicodeScripts"};
    char json[512];
    for (size_t i = 0; i < sizeof normalizers / sizeof *normalizers; i++) {
        snprintf(json, sizeof json,
                 "{" MODEL ",\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"%s\"}]}}",
                 normalizers[i]);
        refused(QC_E_UNSUPPORTED, normalizers[i], json);
    }
    for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
        snprintf(json, sizeof json, "{" MODEL ",\"pre_tokenizer\":{\"type\":\"%s\"}}", splits[i]);
        refused(QC_E_UNSUPPORTED, splits[i], json);
    }
    refused(QC_E_UNSUPPORTED, "RobertaProcessing",
            "{" MODEL ",\"post_processor\":{\"type\":\"RobertaProcessing\"}}");
    refused(QC_E_UNSUPPORTED, "CTC", "{" MODEL ",\"decoder\":{\"type\":\"CTC\"}}");
    refused(QC_E_UNSUPPORTED, "WordPiece", "{\"model\":{\"type\":\"WordPiece\",\"vocab\":{\"a\":0}}}");
    refused(QC_E_UNSUPPORTED, "dropout", "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"dropout\":0.1}}");
    refused(QC_E_UNSUPPORTED, "end_of_word_suffix",
            "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"end_of_word_suffix\":\"</w>\"}}");
    refused(QC_E_UNSUPPORTED, "NUL", "{\"model\":{\"vocab\":{\"a\\u0000b\":0},\"merges\":[]}}");
    refused(
        QC_E_UNSUPPORTED, "Sometimes",
        "{" MODEL
        ",\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\"a\"},\"behavior\":\"Sometimes\"}}");
    refused(QC_E_UNSUPPORTED, "not the last",
            "{" MODEL ",\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"},"
                      "{\"type\":\"Digits\"}]}}");
}
END_TEST

START_TEST(patterns_of_another_meaning)
{
    static const char *const patterns[] = {"\\\\w+",   "\\\\bx",  "\\\\h",    "\\\\v",   "[a&&b]",
                                           "[a[b]]",   "x{1,3}+", "(?P<n>a)", "(?i)a",   "(a",
                                           "a*",       "\\\\R",   "\\\\X",    "x{,3}",   "a|",
                                           "\\\\1(a)", "\\\\Ka",  "(*UTF)a",  "(?<n>a)", "\\\\u0041"};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        char json[512];
        snprintf(json, sizeof json,
                 "{" MODEL ",\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":{"
                           "\"Regex\":\"%s\"}}}",
                 patterns[i]);
        refused(QC_E_UNSUPPORTED, "pattern", json);
    }
}
END_TEST

/* ---- interface ---- */

START_TEST(invalid_text)
{
    qc_tokenizer *tok = must_load("{" MODEL "}");
    static const struct {
        const char *text;
        const char *offset;
    } bad[] = {{"a\xE6\xAD", "offset 1"},   {"ab\xE2\x80", "offset 2"},    {"\xFF", "offset 0"},
               {"abc\xC0\x80", "offset 3"}, {"a\xED\xA0\x80", "offset 1"}, {"ab\xF0\x9F\x91", "offset 2"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        qc_err err = {0};
        int32_t *ids = NULL;
        int64_t n = 0;
        ck_assert_int_eq(qc_tokenizer_encode(tok, bad[i].text, strlen(bad[i].text), NULL, &ids, &n, &err),
                         QC_E_INPUT);
        ck_assert_msg(strstr(err.msg, bad[i].offset) != NULL, "%s", err.msg);
        ck_assert_ptr_null(ids);
    }
    ck_assert_str_eq(ids_of(tok, "abc", NULL), "4");
    qc_tokenizer_free(tok);
}
END_TEST

START_TEST(stored_ids_and_holes)
{
    qc_tokenizer *tok =
        must_load("{" MODEL ",\"added_tokens\":[{\"id\":120,\"content\":\"<x>\",\"special\":true},"
                  "{\"id\":150,\"content\":\"<y>\",\"special\":false}]}");
    ck_assert_int_eq(qc_tokenizer_vocab_size(tok), 151);
    ck_assert_str_eq(ids_of(tok, "<x>ab<y>", NULL), "120 3 150");
    ck_assert_str_eq(qc_tokenizer_piece(tok, 150), "<y>");
    ck_assert_ptr_null(qc_tokenizer_piece(tok, 119));
    ck_assert_ptr_null(qc_tokenizer_piece(tok, 151));
    ck_assert_ptr_null(qc_tokenizer_piece(tok, -1));
    ck_assert_int_eq(qc_tokenizer_token_id(tok, "<x>"), 120);
    ck_assert_int_eq(qc_tokenizer_token_id(tok, "abc"), 4);
    ck_assert_int_eq(qc_tokenizer_token_id(tok, "zz"), -1);
    ck_assert(qc_tokenizer_is_special(tok, 120));
    ck_assert(!qc_tokenizer_is_special(tok, 150) && !qc_tokenizer_is_special(tok, 0) &&
              !qc_tokenizer_is_special(tok, 9999));
    const int32_t ids[] = {120, 3, 119, 150}, outside[] = {151}, negative[] = {-1};
    char *text = NULL;
    size_t n_bytes = 0;
    qc_err err = {0};
    ck_assert_int_eq(qc_tokenizer_decode(tok, ids, 4, true, &text, &n_bytes, &err), QC_OK);
    ck_assert_str_eq(text, "ab <y>");
    ck_assert_uint_eq(n_bytes, 6);
    qc_free(text);
    ck_assert_int_eq(qc_tokenizer_decode(tok, outside, 1, false, &text, &n_bytes, &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "151") && strstr(err.msg, "150"), "%s", err.msg);
    ck_assert_int_eq(qc_tokenizer_decode(tok, negative, 1, false, &text, &n_bytes, &err), QC_E_INPUT);
    ck_assert_int_eq(qc_tokenizer_decode(tok, NULL, 0, false, &text, &n_bytes, &err), QC_OK);
    ck_assert_str_eq(text, "");
    qc_free(text);
    qc_tokenizer_free(tok);
}
END_TEST

START_TEST(special_text_option)
{
    qc_tokenizer *tok =
        must_load("{" MODEL ",\"added_tokens\":[{\"id\":5,\"content\":\"<a>\",\"special\":true},"
                  "{\"id\":6,\"content\":\"(a)\",\"special\":false}]}");
    ck_assert_str_eq(ids_of(tok, "b<a>(a)", NULL), "1 5 6");
    ck_assert_str_eq(ids_of(tok, "b<a>(a)", &(qc_encode_options){.plain_special = true}), "1 0 6");
    ck_assert_str_eq(ids_of(tok, "", &(qc_encode_options){.add_special = true}), "");
    qc_tokenizer_free(tok);
}
END_TEST

START_TEST(unknown_character)
{
    qc_tokenizer *tok = must_load("{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"unk_token\":\"<unk>\"}}");
    int32_t *ids = NULL;
    int64_t n = 0;
    qc_err err = {0};
    ck_assert_str_eq(ids_of(tok, "aa", NULL), "0 0");
    ck_assert_int_eq(qc_tokenizer_encode(tok, "az", 2, NULL, &ids, &n, &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "U+007A") != NULL, "%s", err.msg);
    qc_tokenizer_free(tok);
}
END_TEST

/* ---- tokenizer_config.json ---- */

#define SPECIALS                                                                                             \
    ",\"added_tokens\":[{\"id\":5,\"content\":\"<s>\",\"special\":true},{\"id\":6,\"content\":\"</"          \
    "s>\",\"special\":true}]"
#define TEMPLATE                                                                                             \
    ",\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},"  \
    "{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":{\"<s>\":{\"ids\":[5]}}}"

static void with_config(const char *json, const char *config, const char *expected_ids, int bos, int eos)
{
    qc_tokenizer *tok = must_load(json);
    qc_err err = {0};
    ck_assert_msg(qc_tokenizer_apply_config(tok, config, strlen(config), "c.json", &err) == QC_OK, "%s",
                  err.msg);
    ck_assert_str_eq(ids_of(tok, "ab", &(qc_encode_options){.add_special = true}), expected_ids);
    ck_assert_str_eq(ids_of(tok, "ab", NULL), "3");
    ck_assert_int_eq(qc_tokenizer_bos(tok), bos);
    ck_assert_int_eq(qc_tokenizer_eos(tok), eos);
    qc_tokenizer_free(tok);
}

static void bad_config(const char *config, const char *part_of_message)
{
    qc_tokenizer *tok = must_load("{" MODEL SPECIALS "}");
    qc_err err = {0};
    ck_assert_int_eq(qc_tokenizer_apply_config(tok, config, strlen(config), "c.json", &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, part_of_message) && strstr(err.msg, "c.json"), "%s", err.msg);
    qc_tokenizer_free(tok);
}

START_TEST(config_flags)
{
    const char *plain = "{" MODEL SPECIALS "}", *with_bos = "{" MODEL SPECIALS TEMPLATE "}";
    const char *yes = "{\"add_bos_token\":true,\"bos_token\":\"<s>\"}";
    const char *no = "{\"add_bos_token\":false,\"bos_token\":{\"content\":\"<s>\"}}";
    with_config(plain, "{}", "3", -1, -1);
    with_config(plain, yes, "5 3", 5, -1);
    with_config(plain, no, "3", -1, -1);
    with_config(with_bos, "{\"bos_token\":\"<s>\"}", "5 3", 5, -1);
    with_config(with_bos, yes, "5 3", 5, -1);
    with_config(with_bos, no, "3", -1, -1);
    with_config(with_bos, "{\"add_bos_token\":null,\"add_eos_token\":true,\"eos_token\":\"</s>\"}", "5 3 6",
                5, 6);
    with_config(plain, "{\"add_bos_token\":false,\"bos_token\":null}", "3", -1, -1);
    with_config(plain, "{\"model_max_length\":1000000000000000019884624838656,\"add_bos_token\":false}", "3",
                -1, -1);
    with_config(plain, "{\"model_max_length\":1e30}", "3", -1, -1);
    bad_config("{\"add_bos_token\":true}", "bos_token");
    bad_config("{\"add_bos_token\":true,\"bos_token\":\"<zz>\"}", "<zz>");
    bad_config("{\"add_bos_token\":\"yes\"}", "add_bos_token");
    bad_config("{\"add_eos_token\":true,\"eos_token\":7}", "eos_token");
    bad_config("[]", "object");
    bad_config("{", "syntax");
}
END_TEST

static int side_file(const qc_source *src, const char *name, char **ret, size_t *ret_bytes, qc_err *err)
{
    (void)err;
    const char *text = strcmp(name, "tokenizer.json") == 0 && src->n_tensors ? "{" MODEL SPECIALS "}"
                       : strcmp(name, "tokenizer_config.json") == 0
                           ? "{\"add_bos_token\":true,\"bos_token\":\"<s>\"}"
                           : NULL;
    *ret = text ? qc_strdup(text) : NULL;
    *ret_bytes = text ? strlen(text) : 0;
    return QC_OK;
}

START_TEST(from_a_source)
{
    qc_source src = {.path = "model", .n_tensors = 1, .side_file = side_file};
    qc_tokenizer *tok = NULL;
    qc_err err = {0};
    ck_assert_int_eq(qc_tokenizer_from_source(&src, &tok, &err), QC_OK);
    ck_assert_int_eq(qc_tokenizer_bos(tok), 5);
    qc_tokenizer_free(tok);
    src.n_tensors = 0;
    ck_assert_int_eq(qc_tokenizer_from_source(&src, &tok, &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "model") && strstr(err.msg, "tokenizer.json"), "%s", err.msg);
}
END_TEST

/* ---- the demo model's tokenizer on its held-out text ---- */

START_TEST(demo_model)
{
    size_t golden_bytes, text_bytes;
    char *golden = tok_file(test_data("golden/demo-qwen3"), "golden.json", &golden_bytes);
    char *text = tok_file(test_data("text"), "austen-heldout.txt", &text_bytes);
    ck_assert(golden && text);
    cJSON *doc = cJSON_Parse(golden);
    const cJSON *heldout = qc_json_get(doc, "heldout");
    qc_tokenizer *tok = tok_open(test_data("models/demo-qwen3"));
    int32_t *ids = NULL;
    int64_t n = 0;
    qc_err err = {0};
    char hex[QC_SHA256_HEX_BYTES];
    ck_assert_int_eq(qc_tokenizer_encode(tok, text, text_bytes, NULL, &ids, &n, &err), QC_OK);
    ck_assert_int_eq(n, (int64_t)qc_json_get(heldout, "tokens")->valuedouble);
    ck_assert_int_eq(qc_sha256_buffer(ids, (size_t)n * sizeof *ids, hex, &err), QC_OK);
    ck_assert_str_eq(hex, qc_json_get(heldout, "ids_sha256")->valuestring);
    char *back = NULL;
    size_t back_bytes = 0;
    ck_assert_int_eq(qc_tokenizer_decode(tok, ids, n, false, &back, &back_bytes, &err), QC_OK);
    ck_assert_uint_eq(back_bytes, text_bytes);
    ck_assert_int_eq(memcmp(back, text, text_bytes), 0);
    qc_free(back);
    qc_free(ids);
    qc_tokenizer_free(tok);
    cJSON_Delete(doc);
    free(text);
    free(golden);
}
END_TEST

/* ---- work ---- */

/* Merges tried and symbols made for a text. */
static uint64_t steps_of(const qc_tokenizer *tok, const char *text, size_t n_bytes)
{
    tok_run run;
    qc_err err = {0};
    ck_assert_int_eq(tok_run_begin(&run, tok, n_bytes, &err), QC_OK);
    ck_assert_int_eq(tok_run_text(&run, text, n_bytes, false), QC_OK);
    uint64_t steps = run.n_steps;
    tok_run_end(&run);
    return steps;
}

static void check_linear(const qc_tokenizer *tok, const char *unit, size_t n_bytes)
{
    size_t n = strlen(unit);
    n_bytes -= n_bytes % n;
    char *text = malloc(n_bytes + 1);
    for (size_t i = 0; i < n_bytes; i++)
        text[i] = unit[i % n];
    uint64_t steps = steps_of(tok, text, n_bytes);
    ck_assert_msg(steps <= 4 * (uint64_t)n_bytes + 64, "%llu steps for %zu bytes of \"%s\"",
                  (unsigned long long)steps, n_bytes, unit);
    free(text);
}

START_TEST(linear_work)
{
    static const char *const folders[] = {"qwen3", "deepseek_v3", "llama2"};
    for (int i = 0; i < 3; i++) {
        const char *folder = tok_folder(folders[i]);
        if (!folder)
            continue;
        qc_tokenizer *tok = tok_open(folder);
        check_linear(tok, "a", 500000);
        check_linear(tok, "_", 500000);
        check_linear(tok, " ", 500000);
        check_linear(tok, "honorificabilitudinitatibus", 1000000);
        check_linear(tok, "\xE4\xB8\xAD\xE6\x96\x87\xE5\xAD\x97", 300000);
        check_linear(tok, "\xCC\x81\xCC\xA7", 300000);
        check_linear(tok, "\xE2\x96\x81x\xE2\x96\x81\xE2\x96\x81", 300000);
        qc_tokenizer_free(tok);
    }
}
END_TEST

/* Plain quadratic BPE by pieces, without heap, cache or cuts. */
static int64_t plain_bpe(const qc_tokenizer *tok, const int32_t *symbols, int64_t n, int32_t *ids)
{
    memcpy(ids, symbols, (size_t)n * sizeof *ids);
    for (;;) {
        uint32_t best_rank = UINT32_MAX;
        int64_t best = -1;
        int32_t id = -1;
        for (int64_t i = 0; i + 1 < n; i++) {
            uint64_t pair = (uint64_t)(uint32_t)ids[i] << 32 | (uint32_t)ids[i + 1];
            for (uint32_t s = 0; s < tok->bpe.n_slots; s++) {
                const tok_merge *m = &tok->bpe.merges[s];
                if (m->pair == pair && m->rank < best_rank) {
                    best_rank = m->rank;
                    best = i;
                    id = m->id;
                }
            }
        }
        if (best < 0)
            return n;
        ids[best] = id;
        memmove(ids + best + 1, ids + best + 2, (size_t)(n - best - 2) * sizeof *ids);
        n--;
    }
}

START_TEST(equals_plain_bpe)
{
    /* Every string of a and b up to four characters is a piece; merges in a shuffled order. */
    char json[8192], pieces[64][8];
    int n_pieces = 0;
    for (int len = 1; len <= 4; len++)
        for (int bits = 0; bits < 1 << len; bits++, n_pieces++)
            for (int i = 0; i <= len; i++)
                pieces[n_pieces][i] = i == len ? 0 : bits >> i & 1 ? 'b' : 'a';
    for (uint64_t seed = 1; seed <= 20; seed++) {
        qc_rng rng;
        qc_rng_seed(&rng, seed);
        size_t at = (size_t)sprintf(json, "{\"model\":{\"vocab\":{");
        for (int i = 0; i < n_pieces; i++)
            at += (size_t)sprintf(json + at, "%s\"%s\":%d", i ? "," : "", pieces[i], i);
        at += (size_t)sprintf(json + at, "},\"merges\":[");
        bool taken[30][30] = {{false}};
        for (int k = 0, n = 0; k < 400; k++) {
            int a = (int)qc_rng_below(&rng, (uint64_t)n_pieces),
                b = (int)qc_rng_below(&rng, (uint64_t)n_pieces);
            if (strlen(pieces[a]) + strlen(pieces[b]) > 4 || taken[a][b])
                continue;
            taken[a][b] = true;
            at += (size_t)sprintf(json + at, "%s\"%s %s\"", n++ ? "," : "", pieces[a], pieces[b]);
        }
        sprintf(json + at, "]}}");
        qc_tokenizer *tok = must_load(json);
        char text[401];
        int32_t symbols[400], expected[400], *ids = NULL;
        for (int i = 0; i < 400; i++) {
            text[i] = qc_rng_below(&rng, 3) ? 'a' : 'b';
            symbols[i] = text[i] == 'b';
        }
        int64_t n_expected = plain_bpe(tok, symbols, 400, expected), n = 0;
        qc_err err = {0};
        ck_assert_int_eq(qc_tokenizer_encode(tok, text, 400, NULL, &ids, &n, &err), QC_OK);
        ck_assert_int_eq(n, n_expected);
        ck_assert_int_eq(memcmp(ids, expected, (size_t)n * sizeof *ids), 0);
        qc_free(ids);
        qc_tokenizer_free(tok);
    }
}
END_TEST

/* ---- threads and memory ---- */

typedef struct job {
    const qc_tokenizer *tok;
    const char *text;
    size_t n_bytes;
    int32_t *ids;
    int64_t n_ids;
    int rc;
} job;

static void *encode_job(void *arg)
{
    job *j = arg;
    qc_err err = {0};
    j->rc = qc_tokenizer_encode(j->tok, j->text, j->n_bytes, NULL, &j->ids, &j->n_ids, &err);
    return NULL;
}

START_TEST(threads_agree)
{
    size_t n_bytes;
    char *text = tok_file(test_data("text"), "austen-heldout.txt", &n_bytes);
    qc_tokenizer *tok = tok_open(test_data("models/demo-qwen3"));
    job jobs[4];
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        jobs[i] = (job){.tok = tok, .text = text, .n_bytes = n_bytes};
        ck_assert_int_eq(pthread_create(&threads[i], NULL, encode_job, &jobs[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        ck_assert_int_eq(jobs[i].rc, QC_OK);
        ck_assert_int_eq(jobs[i].n_ids, jobs[0].n_ids);
        ck_assert_int_eq(memcmp(jobs[i].ids, jobs[0].ids, (size_t)jobs[0].n_ids * sizeof(int32_t)), 0);
    }
    for (int i = 0; i < 4; i++)
        qc_free(jobs[i].ids);
    qc_tokenizer_free(tok);
    free(text);
}
END_TEST

static const char every_part[] =
    "{" MODEL SPECIALS TEMPLATE
    ",\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":\"Lowercase\"},"
    "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"x+\"},\"content\":\"b\"},{\"type\":\"Prepend\","
    "\"prepend\":\"a\"}]},"
    "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":"
    "\"\\\\s+\"},"
    "\"behavior\":\"Isolated\"},{\"type\":\"Metaspace\",\"replacement\":\"_\"},{\"type\":\"ByteLevel\"}]},"
    "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},"
    "\"content\":\"b\"},"
    "{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},{\"type\":\"Strip\",\"content\":\" "
    "\",\"start\":1,\"stop\":0},"
    "{\"type\":\"ByteLevel\"}]}}";

/* Load, encode and decode once; every resource is given back whatever fails. */
static int whole_life(void)
{
    static const char text[] = "ab xx <s> A\xCC\x81\xCC\xA7 abcabc";
    static const char config[] = "{\"add_eos_token\":true,\"eos_token\":\"</s>\"}";
    qc_tokenizer *tok = NULL;
    qc_err err = {0};
    int32_t *ids = NULL;
    int64_t n = 0;
    char *back = NULL;
    size_t back_bytes = 0;
    int rc = qc_tokenizer_new(every_part, sizeof every_part - 1, "t.json", &tok, &err);
    if (rc == QC_OK)
        rc = qc_tokenizer_apply_config(tok, config, sizeof config - 1, "c.json", &err);
    if (rc == QC_OK)
        rc = qc_tokenizer_encode(tok, text, sizeof text - 1, &(qc_encode_options){.add_special = true}, &ids,
                                 &n, &err);
    if (rc == QC_OK)
        rc = qc_tokenizer_decode(tok, ids, n, false, &back, &back_bytes, &err);
    qc_free(back);
    qc_free(ids);
    qc_tokenizer_free(tok);
    return rc;
}

START_TEST(failing_allocations)
{
    qc_alloc_fail_at(0);
    ck_assert_int_eq(whole_life(), QC_OK);
    long n = qc_alloc_fail_at(0);
    ck_assert_int_gt(n, 20);
    for (long i = 1; i <= n; i++) {
        qc_alloc_fail_at(i);
        int rc = whole_life();
        qc_alloc_fail_at(0);
        ck_assert_msg(rc == QC_E_RESOURCE, "allocation %ld of %ld: code %d", i, n, rc);
    }
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"broken_files", broken_files},
                               {"unknown_parts", unknown_parts},
                               {"patterns_of_another_meaning", patterns_of_another_meaning},
                               {"invalid_text", invalid_text},
                               {"stored_ids_and_holes", stored_ids_and_holes},
                               {"special_text_option", special_text_option},
                               {"unknown_character", unknown_character},
                               {"config_flags", config_flags},
                               {"from_a_source", from_a_source},
                               {"demo_model", demo_model},
                               {"linear_work", linear_work},
                               {"equals_plain_bpe", equals_plain_bpe},
                               {"threads_agree", threads_agree},
                               {"failing_allocations", failing_allocations},
                               {NULL, NULL}};
    return run_tests("tokenizer", cases);
}
