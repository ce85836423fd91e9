/* Ids against the files that the reference library wrote (golden/README.md). One argument: name of the
 * tokenizer. */
#include "tok_files.h"

#include "qc_json.h"
#include "qc_sha256.h"

static const char *tokenizer_name;

static char *unhex(const char *hex, size_t *ret_bytes)
{
    size_t n = strlen(hex) / 2;
    char *text = malloc(n + 1);
    for (size_t i = 0; i < n; i++) {
        unsigned byte;
        sscanf(hex + 2 * i, "%2x", &byte);
        text[i] = (char)byte;
    }
    text[n] = 0;
    *ret_bytes = n;
    return text;
}

static void check_ids(const qc_tokenizer *tok, const char *text, size_t n_bytes, bool special,
                      const cJSON *expected, int line)
{
    qc_encode_options options = {.add_special = special};
    int32_t *ids = NULL;
    int64_t n_ids = 0;
    qc_err err = {0};
    int rc = qc_tokenizer_encode(tok, text, n_bytes, &options, &ids, &n_ids, &err);
    ck_assert_msg(rc == QC_OK, "line %d: %s", line, err.msg);
    ck_assert_msg(cJSON_IsArray(expected), "line %d: no ids", line);
    int64_t i = 0;
    for (const cJSON *c = expected->child; c; c = c->next, i++)
        ck_assert_msg(i < n_ids && ids[i] == (int32_t)c->valuedouble, "%s line %d id %lld: %d, expected %d",
                      tokenizer_name, line, (long long)i, i < n_ids ? ids[i] : -1, (int)c->valuedouble);
    ck_assert_msg(i == n_ids, "line %d: %lld ids, expected %lld", line, (long long)n_ids, (long long)i);
    qc_free(ids);
}

START_TEST(golden_ids)
{
    const char *folder = tok_folder(tokenizer_name);
    qc_tokenizer *tok = tok_open(folder);
    char name[64];
    size_t n_bytes;
    snprintf(name, sizeof name, "%s.jsonl", tokenizer_name);
    char dir[4096 + 128];
    snprintf(dir, sizeof dir, "%s/../golden", folder);
    char *lines = tok_file(dir, name, &n_bytes);
    ck_assert_msg(lines != NULL, "no golden/%s", name);
    int n = 0;
    for (char *line = lines, *end; *line; line = end + 1) {
        end = strchr(line, '\n');
        ck_assert(end != NULL);
        cJSON *doc = cJSON_ParseWithLength(line, (size_t)(end - line));
        n++;
        ck_assert_msg(doc != NULL, "line %d is no json", n);
        const cJSON *hex = qc_json_get(doc, "text_hex"), *plain = qc_json_get(doc, "text");
        size_t text_bytes = hex ? 0 : strlen(plain->valuestring);
        char *text = hex ? unhex(hex->valuestring, &text_bytes) : plain->valuestring;
        check_ids(tok, text, text_bytes, false, qc_json_get(doc, "ids"), n);
        check_ids(tok, text, text_bytes, true, qc_json_get(doc, "ids_special"), n);
        if (hex)
            free(text);
        cJSON_Delete(doc);
    }
    ck_assert_int_gt(n, 300);
    free(lines);
    qc_tokenizer_free(tok);
}
END_TEST

START_TEST(whole_wikitext2)
{
    const char *data = getenv("QC_DATA");
    char dir[4096 + 128];
    size_t golden_bytes, text_bytes;
    if (!data)
        return;
    snprintf(dir, sizeof dir, "%s/tokenizers/golden", data);
    char *golden = tok_file(dir, "wikitext2.json", &golden_bytes);
    cJSON *doc = cJSON_Parse(golden);
    const cJSON *entry = qc_json_get(qc_json_get(doc, "tokenizers"), tokenizer_name);
    ck_assert(entry != NULL);
    snprintf(dir, sizeof dir, "%s/text", data);
    char *text = tok_file(dir, qc_json_get(doc, "text")->valuestring, &text_bytes);
    ck_assert(text != NULL);
    qc_tokenizer *tok = tok_open(tok_folder(tokenizer_name));
    int32_t *ids = NULL;
    int64_t n_ids = 0;
    qc_err err = {0};
    ck_assert_msg(qc_tokenizer_encode(tok, text, text_bytes, NULL, &ids, &n_ids, &err) == QC_OK, "%s",
                  err.msg);
    ck_assert_int_eq(n_ids, (int64_t)qc_json_get(entry, "count")->valuedouble);
    char hex[QC_SHA256_HEX_BYTES];
    ck_assert_int_eq(qc_sha256_buffer(ids, (size_t)n_ids * sizeof *ids, hex, &err), QC_OK);
    ck_assert_str_eq(hex, qc_json_get(entry, "sha256")->valuestring);
    qc_free(ids);
    qc_tokenizer_free(tok);
    free(text);
    free(golden);
    cJSON_Delete(doc);
}
END_TEST

int main(int argc, char **argv)
{
    const test_case cases[] = {
        {"golden_ids", golden_ids}, {"whole_wikitext2", whole_wikitext2}, {NULL, NULL}};
    tokenizer_name = argc > 1 ? argv[1] : "qwen3";
    if (!tok_folder(tokenizer_name))
        TEST_SKIP("QC_DATA is not set: this tokenizer may not be in the tree");
    return run_tests("tokenizer golden", cases);
}
