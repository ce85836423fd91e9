/* Small tokenizers against the ids and texts that the reference library gave
 * (scripts/make_tokenizer_vectors.py). One argument: another file of such cases. */
#include "tok_files.h"

#include "qc_json.h"

static const char *cases_file;

static void check_case(const cJSON *line)
{
    const char *name = qc_json_get(line, "name")->valuestring;
    char *json = cJSON_PrintUnformatted(qc_json_get(line, "tokenizer"));
    qc_tokenizer *tok = NULL;
    qc_err err = {0};
    ck_assert_msg(qc_tokenizer_new(json, strlen(json), name, &tok, &err) == QC_OK, "%s", err.msg);
    const qc_encode_options options = {.add_special = true};
    const cJSON *ids = qc_json_get(line, "ids")->child;
    const cJSON *decoded = qc_json_get(line, "decoded") ? qc_json_get(line, "decoded")->child : NULL;
    for (const cJSON *text = qc_json_get(line, "texts")->child; text; text = text->next, ids = ids->next) {
        int32_t *got = NULL;
        int64_t n = 0, i = 0;
        ck_assert_msg(qc_tokenizer_encode(tok, text->valuestring, strlen(text->valuestring), &options, &got,
                                          &n, &err) == QC_OK,
                      "%s: %s", name, err.msg);
        for (const cJSON *id = ids->child; id; id = id->next, i++)
            ck_assert_msg(i < n && got[i] == (int32_t)id->valuedouble,
                          "%s: text \"%s\" id %lld: %d, expected %d", name, text->valuestring, (long long)i,
                          i < n ? got[i] : -1, (int)id->valuedouble);
        ck_assert_msg(i == n, "%s: text \"%s\": %lld ids, expected %lld", name, text->valuestring,
                      (long long)n, (long long)i);
        if (decoded) {
            char *back = NULL;
            size_t back_bytes = 0;
            ck_assert_int_eq(qc_tokenizer_decode(tok, got, n, false, &back, &back_bytes, &err), QC_OK);
            ck_assert_msg(strcmp(back, decoded->valuestring) == 0, "%s: decoded \"%s\", expected \"%s\"",
                          name, back, decoded->valuestring);
            qc_free(back);
            decoded = decoded->next;
        }
        qc_free(got);
    }
    qc_tokenizer_free(tok);
    free(json);
}

START_TEST(reference_cases)
{
    size_t n_bytes;
    char *lines = tok_file(cases_file ? "." : test_data("tokenizers"),
                           cases_file ? cases_file : "cases.jsonl", &n_bytes);
    ck_assert(lines != NULL);
    int n = 0;
    for (char *line = lines, *end; *line; line = end + 1, n++) {
        end = strchr(line, '\n');
        ck_assert(end != NULL);
        cJSON *doc = cJSON_ParseWithLength(line, (size_t)(end - line));
        ck_assert(doc != NULL);
        check_case(doc);
        cJSON_Delete(doc);
    }
    ck_assert_int_ge(n, 50);
    free(lines);
}
END_TEST

int main(int argc, char **argv)
{
    const test_case cases[] = {{"reference_cases", reference_cases}, {NULL, NULL}};
    cases_file = argc > 1 ? argv[1] : NULL;
    return run_tests("tokenizer cases", cases);
}
