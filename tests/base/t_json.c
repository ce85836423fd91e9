/* JSON: what is refused and where, duplicate keys, exact integers, and text that reads back as the same
 * document. */
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_json.h"

#include "qc_test.h"

#include <math.h>
#include <unistd.h>

static cJSON *parse(const char *text, size_t n_bytes, bool unique, qc_err *err)
{
    /* exactly as long as the text: a read beyond it is seen by the sanitizer */
    char *copy = malloc(n_bytes ? n_bytes : 1);
    memcpy(copy, text, n_bytes);
    cJSON *doc = NULL;
    int rc = qc_json_parse(copy, n_bytes, "f.json", unique, &doc, err);
    ck_assert_int_eq(rc, doc ? QC_OK : QC_E_INPUT);
    free(copy);
    return doc;
}

static void refused(const char *text, size_t n_bytes, const char *want)
{
    qc_err err = {0};
    cJSON *doc = parse(text, n_bytes, true, &err);
    ck_assert_msg(doc == NULL, "accepted: %s", text);
    ck_assert_msg(strstr(err.msg, want) != NULL, "'%s' lacks '%s'", err.msg, want);
}
#define REFUSED(text, want) refused(text, sizeof(text) - 1, want)

START_TEST(refuses_with_the_place)
{
    REFUSED("", "f.json:1:1: empty file");
    REFUSED("{", "f.json:1:");
    REFUSED("{\"a\": 1,\n \"b\": }", "f.json:2:7: json syntax error");
    REFUSED("{\"a\": 1} x", "f.json:1:10: json syntax error");
    REFUSED("[1, 2", "json syntax error");
    REFUSED("{\"1\":1,", "json syntax error");
    REFUSED("\"abc", "json syntax error");
    REFUSED("\"abc\\", "json syntax error");
    REFUSED("\"\\u12\"", "json syntax error");
    REFUSED("\"\\ud800\"", "json syntax error");
    REFUSED("tru", "json syntax error");
    REFUSED("-", "json syntax error");
    REFUSED("{\"a\xff\": 1}", "invalid UTF-8 at byte 3");
    REFUSED("{}\0", "f.json:1:3: NUL byte");
    REFUSED("{\"a\\u0000b\": 1}", "f.json:1:4: NUL character");
    REFUSED("[\"a\nb\"]", "f.json:1:4: control character");
    REFUSED("{\"a\": 1, \"\\u0061\": 2}", "duplicate name \"a\"");
    REFUSED("{\"x\": [{\"k\": 1, \"j\": 2, \"k\": 3}]}", "duplicate name \"k\"");
}
END_TEST

START_TEST(depth_is_limited)
{
    char deep[402] = {0};
    memset(deep, '[', 201);
    memset(deep + 201, ']', 200);
    qc_err err;
    refused(deep, 201, "nested too deeply");
    deep[200] = ']';
    cJSON *doc = parse(deep, 400, true, &err);
    ck_assert_ptr_nonnull(doc);
    cJSON_Delete(doc);
    size_t n = 10 * 1000 * 1000;
    char *huge = malloc(n);
    memset(huge, '[', n);
    refused(huge, n, "nested too deeply");
    free(huge);
    const char in_string[] = "\"[[[[\\\"[[[[\"";
    doc = parse(in_string, strlen(in_string), true, &err);
    ck_assert_str_eq(doc->valuestring, "[[[[\"[[[[");
    cJSON_Delete(doc);
}
END_TEST

START_TEST(escapes_that_only_look_like_nul)
{
    qc_err err;
    const char text[] = "{\"\\\\u0000\": \"\\u00e9\\ud83d\\ude00\"}";
    cJSON *doc = parse(text, strlen(text), true, &err);
    ck_assert_str_eq(doc->child->string, "\\u0000");
    ck_assert_str_eq(doc->child->valuestring, "\xc3\xa9\xf0\x9f\x98\x80");
    cJSON_Delete(doc);
}
END_TEST

START_TEST(getters_are_exact)
{
    qc_err err;
    const char text[] =
        "{\"a\": 3, \"A\": 4, \"n\": null, \"f\": 3.5, \"big\": 9007199254740993, \"ok\": 9007199254740991, "
        "\"s\": \"3\", \"inf\": 1e400, \"neg\": -9007199254740991}";
    cJSON *doc = parse(text, strlen(text), true, &err);
    int64_t x = 99;
    ck_assert(qc_json_int(qc_json_get(doc, "a"), &x) && x == 3);
    ck_assert(qc_json_int(qc_json_get(doc, "A"), &x) && x == 4);
    ck_assert(qc_json_int(qc_json_get(doc, "ok"), &x) && x == 9007199254740991);
    ck_assert(qc_json_int(qc_json_get(doc, "neg"), &x) && x == -9007199254740991);
    ck_assert_ptr_null(qc_json_get(doc, "n"));
    ck_assert_ptr_null(qc_json_get(doc, "absent"));
    x = 99;
    const char *no_int[] = {"f", "big", "s", "inf", "n", "absent"};
    for (size_t i = 0; i < sizeof no_int / sizeof no_int[0]; i++)
        ck_assert_msg(!qc_json_int(qc_json_get(doc, no_int[i]), &x) && x == 99, "%s", no_int[i]);
    cJSON_Delete(doc);
}
END_TEST

START_TEST(print_reads_back)
{
    const double numbers[] = {
        0, -1, 0.1, 1.0 / 3, 1e-300, 1.7976931348623157e308, 5e-324, 123456789012345678.0, 1e15, 33.208};
    cJSON *doc = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(doc, "numbers");
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        cJSON_AddItemToArray(list, cJSON_CreateNumber(numbers[i]));
    cJSON_AddNumberToObject(doc, "nan", NAN);
    cJSON_AddNumberToObject(doc, "infinite", -INFINITY);
    cJSON_AddStringToObject(doc, "text", "quote \" backslash \\ newline \n bell \a euro \xe2\x82\xac");
    cJSON_AddStringToObject(doc, "broken", "x\xffy\xc3");
    cJSON_AddItemToObject(doc, "empty", cJSON_CreateArray());
    cJSON_AddItemToObject(cJSON_AddObjectToObject(doc, "o"), "p", cJSON_CreateObject());
    char *text = qc_json_print(doc);
    ck_assert_ptr_nonnull(text);
    ck_assert_int_eq(text[strlen(text) - 1], '\n');
    qc_err err;
    cJSON *back = parse(text, strlen(text), true, &err);
    ck_assert_ptr_nonnull(back);
    const cJSON *item = qc_json_get(back, "numbers")->child;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++, item = item->next)
        ck_assert_msg(item->valuedouble == numbers[i], "%.17g", numbers[i]);
    ck_assert_ptr_null(qc_json_get(back, "nan"));
    ck_assert_ptr_null(qc_json_get(back, "infinite"));
    ck_assert_str_eq(qc_json_get(back, "text")->valuestring, qc_json_get(doc, "text")->valuestring);
    ck_assert_str_eq(qc_json_get(back, "broken")->valuestring, "x\xef\xbf\xbdy\xef\xbf\xbd");
    char *again = qc_json_print(back);
    qc_free(text);
    qc_free(again);
    cJSON_Delete(doc);
    cJSON_Delete(back);
}
END_TEST

/* A reader that tells 3.0 from 3 (Python's) sees what stood in the text; strings and integers are no numbers
 * to keep. */
START_TEST(floats_stay_floats)
{
    const char text[] =
        "{\"a\": 3.0, \"b \\\" 7.5\": [1, -2, 1e3, 1E-05, {\"0.5\": \"-9.0\\\\\", \"c\": -0.0}], "
        "\"d\": 10000000.000, \"e\": true, \"f\": 0.1}";
    const char want[] =
        "{\n  \"a\": 3.0,\n  \"b \\\" 7.5\": [\n    1,\n    -2,\n    1e3,\n    1E-05,\n    {\n"
        "      \"0.5\": \"-9.0\\\\\",\n      \"c\": -0.0\n    }\n  ],\n  \"d\": 10000000.000,\n"
        "  \"e\": true,\n  \"f\": 0.1\n}\n";
    cJSON *doc;
    qc_err err;
    ck_assert_int_eq(qc_json_parse(text, sizeof text - 1, "t", true, &doc, &err), QC_OK);
    ck_assert_int_eq(qc_json_keep_floats(doc, text, sizeof text - 1, &err), QC_OK);
    char *out = qc_json_print(doc);
    ck_assert_str_eq(out, want);
    ck_assert_double_eq(cJSON_GetObjectItem(doc, "d")->valuedouble, 1e7);
    qc_free(out);
    cJSON_Delete(doc);
    for (int n = 1; n <= 7; n++) { /* six floats: six copies */
        ck_assert_int_eq(qc_json_parse(text, sizeof text - 1, "t", true, &doc, &err), QC_OK);
        qc_alloc_fail_at(n);
        ck_assert_int_eq(qc_json_keep_floats(doc, text, sizeof text - 1, &err),
                         n <= 6 ? QC_E_RESOURCE : QC_OK);
        qc_alloc_fail_at(0);
        cJSON_Delete(doc);
    }
}
END_TEST

START_TEST(utf8_rules)
{
    /* the well-formed ranges of the Unicode standard, table 3-7, checked over all code points and over all
     * pairs */
    for (unsigned c = 1; c < 0x110000; c++) {
        char u[5] = {0};
        size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
        if (n == 1)
            u[0] = (char)c;
        else
            u[0] = (char)((0xF00 >> n & 0xFF) | c >> 6 * (n - 1));
        for (size_t k = 1; k < n; k++)
            u[k] = (char)(0x80 | (c >> 6 * (n - 1 - k) & 0x3F));
        bool surrogate = c >= 0xD800 && c < 0xE000;
        ck_assert_msg(qc_utf8_valid(u, n, NULL) == !surrogate, "U+%04X", c);
        ck_assert_uint_eq(qc_utf8_char_bytes(u), surrogate ? 0 : n);
    }
    const char *bad[] = {"\x80",
                         "\xC0\x80",
                         "\xC1\xBF",
                         "\xE0\x9F\xBF",
                         "\xF0\x8F\xBF\xBF",
                         "\xF4\x90\x80\x80",
                         "\xF5\x80\x80\x80",
                         "\xE6\xAD",
                         "\xE2\x80",
                         "\xFF",
                         "\xF0\x9F\x98"};
    size_t at;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char text[32];
        snprintf(text, sizeof text, "0123456789%s", bad[i]);
        ck_assert(!qc_utf8_valid(text, strlen(text), &at));
        ck_assert_uint_eq(at, 10);
    }
}
END_TEST

START_TEST(out_of_memory_is_clean)
{
    qc_err err;
    const char text[] = "{\"a\": [1, 2, {\"b\": null}], \"c\": \"text\"}";
    cJSON *doc = parse(text, strlen(text), true, &err);
    for (long nth = 1;; nth++) {
        qc_alloc_fail_at(nth);
        char *out = qc_json_print(doc);
        qc_alloc_fail_at(0);
        qc_free(out);
        if (out)
            break;
    }
    qc_alloc_fail_at(1);
    cJSON *again = NULL;
    ck_assert_int_eq(qc_json_parse(text, strlen(text), "f", true, &again, &err), QC_E_RESOURCE);
    qc_alloc_fail_at(0);
    ck_assert_ptr_null(again);
    cJSON_Delete(doc);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"refuses_with_the_place", refuses_with_the_place},
        {"depth_is_limited", depth_is_limited},
        {"escapes_that_only_look_like_nul", escapes_that_only_look_like_nul},
        {"getters_are_exact", getters_are_exact},
        {"print_reads_back", print_reads_back},
        {"floats_stay_floats", floats_stay_floats},
        {"utf8_rules", utf8_rules},
        {"out_of_memory_is_clean", out_of_memory_is_clean},
        {0},
    };
    return run_tests("json", cases);
}
