/* The rules of the safetensors format, one hand-made file each (formats: an 8-byte length, a JSON header,
 * data). */
#include "qc_alloc.h"
#include "qc_test.h"
#include "safetensors.h"

#include <stdint.h>
#include <time.h>
#include <unistd.h>

#define T(name, dtype, shape, offsets)                                                                       \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define AUTO UINT64_MAX

typedef struct st_case {
    const char *what;
    const char *header;
    size_t n_data_bytes;
    uint64_t length; /* of the header as the file says it; AUTO: the true one */
    int code;
    const char *message; /* has to occur in the error line */
} st_case;

/* Whole file in memory; free with free(). */
static uint8_t *build(const char *header, size_t n_header, uint64_t length, size_t n_data_bytes,
                      size_t *ret_bytes)
{
    size_t n_bytes = 8 + n_header + n_data_bytes;
    uint8_t *file = malloc(n_bytes);
    for (int i = 0; i < 8; i++)
        file[i] = (uint8_t)(length >> (8 * i));
    memcpy(file + 8, header, n_header);
    for (size_t i = 0; i < n_data_bytes; i++)
        file[8 + n_header + i] = (uint8_t)(i * 7 + 1);
    *ret_bytes = n_bytes;
    return file;
}

static int parse(const char *header, size_t n_data_bytes, uint64_t length, qc_st_file *ret, qc_err *err)
{
    size_t n_bytes;
    uint8_t *file =
        build(header, strlen(header), length == AUTO ? strlen(header) : length, n_data_bytes, &n_bytes);
    int rc = qc_st_parse(file, n_bytes, "x.safetensors", ret, err);
    free(file);
    return rc;
}

#define NEEDS_INTEGER "an integer from 0 to 2^53 expected"

static const st_case bad[] = {
    {"length over the limit", "{}", 10, 100000001, QC_E_INPUT,
     "header length 100000001 is over the limit of 100000000 (file has 20"},
    {"length 2^63", "{}", 0, UINT64_C(1) << 63, QC_E_INPUT, "9223372036854775808 is over the limit"},
    {"length all ones", "{}", 0, UINT64_MAX - 1, QC_E_INPUT, "is over the limit"},
    {"length over the file", "{}", 0, 3, QC_E_INPUT, "header of 3 bytes does not fit into the file of 10"},
    {"length zero", "{}", 0, 0, QC_E_INPUT, "does not begin with '{'"},
    {"length cuts the header", "{\"a\":1}", 0, 3, QC_E_INPUT, "string without end"},
    {"array", "[]", 0, AUTO, QC_E_INPUT, "does not begin with '{'"},
    {"leading blank", " {}", 0, AUTO, QC_E_INPUT, "does not begin with '{'"},
    {"byte order mark", "\xEF\xBB\xBF{}", 0, AUTO, QC_E_INPUT, "does not begin with '{'"},
    {"unclosed", "{", 0, AUTO, QC_E_INPUT, "'\"' expected"},
    {"comma at the end", "{" T("a", "U8", "[1]", "[0,1]") ",}", 1, AUTO, QC_E_INPUT, "'\"' expected"},
    {"no comma", "{" T("a", "U8", "[1]", "[0,1]") " " T("b", "U8", "[1]", "[1,2]") "}", 2, AUTO, QC_E_INPUT,
     "'}' expected"},
    {"second object", "{}{}", 0, AUTO, QC_E_INPUT, "text behind the end of the header"},
    {"tensor is a number", "{\"a\":1}", 0, AUTO, QC_E_INPUT, "'{' expected"},
    {"tensor is null", "{\"a\":null}", 0, AUTO, QC_E_INPUT, "'{' expected"},
    {"invalid utf-8", "{\"\xFF\":1}", 0, AUTO, QC_E_INPUT, "header, byte 2: invalid UTF-8"},
    {"control character", "{\"a\nb\":1}", 0, AUTO, QC_E_INPUT, "control character in a string"},
    {"unknown escape", "{\"a\\x\":1}", 0, AUTO, QC_E_INPUT, "unknown escape"},
    {"short unicode escape", "{\"\\u00g0\":1}", 0, AUTO, QC_E_INPUT, "four hexadecimal digits"},
    {"cut unicode escape", "{\"\\u00", 0, AUTO, QC_E_INPUT, "four hexadecimal digits"},
    {"NUL in a name", "{\"a\\u0000b\":1}", 0, AUTO, QC_E_INPUT, "NUL character in a string"},
    {"high surrogate alone", "{\"\\ud800x\":1}", 0, AUTO, QC_E_INPUT, "unpaired surrogate"},
    {"two high surrogates", "{\"\\ud800\\ud800\":1}", 0, AUTO, QC_E_INPUT, "unpaired surrogate"},
    {"low surrogate alone", "{\"\\udc00\":1}", 0, AUTO, QC_E_INPUT, "unpaired surrogate"},

    {"no dtype", "{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, AUTO, QC_E_INPUT,
     "tensor \"a\" has no dtype"},
    {"no shape", "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, AUTO, QC_E_INPUT,
     "tensor \"a\" has no shape"},
    {"no offsets", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, AUTO, QC_E_INPUT,
     "tensor \"a\" has no data_offsets"},
    {"empty entry", "{\"a\":{}}", 0, AUTO, QC_E_INPUT, "tensor \"a\" has no dtype"},
    {"unknown member", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"strides\":[1],\"data_offsets\":[0,1]}}", 1,
     AUTO, QC_E_INPUT, "unknown member \"strides\""},
    {"member twice", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,1]}}", 1, AUTO,
     QC_E_INPUT, "duplicate member \"shape\""},
    {"unknown dtype", "{" T("a", "F12", "[1]", "[0,1]") "}", 1, AUTO, QC_E_INPUT,
     "tensor \"a\": unknown dtype \"F12\""},
    {"dtype in small letters", "{" T("a", "f32", "[1]", "[0,4]") "}", 4, AUTO, QC_E_INPUT,
     "unknown dtype \"f32\""},
    {"dtype is no string", "{\"a\":{\"dtype\":7}}", 0, AUTO, QC_E_INPUT, "'\"' expected"},
    {"shape is no array", "{" T("a", "U8", "1", "[0,1]") "}", 1, AUTO, QC_E_INPUT, "'[' expected"},
    {"negative dimension", "{" T("a", "U8", "[-1]", "[0,1]") "}", 1, AUTO, QC_E_INPUT, NEEDS_INTEGER},
    {"fraction", "{" T("a", "U8", "[1.5]", "[0,1]") "}", 1, AUTO, QC_E_INPUT, NEEDS_INTEGER},
    {"whole number with a point", "{" T("a", "U8", "[1.0]", "[0,1]") "}", 1, AUTO, QC_E_INPUT, NEEDS_INTEGER},
    {"exponent", "{" T("a", "U8", "[1]", "[0,1e0]") "}", 1, AUTO, QC_E_INPUT, NEEDS_INTEGER},
    {"leading zero", "{" T("a", "U8", "[01]", "[0,1]") "}", 1, AUTO, QC_E_INPUT, NEEDS_INTEGER},
    {"dimension over 2^53", "{" T("a", "U8", "[0,9007199254740993]", "[0,0]") "}", 0, AUTO, QC_E_INPUT,
     NEEDS_INTEGER},
    {"dimension over 2^64", "{" T("a", "U8", "[18446744073709551617]", "[0,1]") "}", 1, AUTO, QC_E_INPUT,
     NEEDS_INTEGER},
    {"string as dimension", "{" T("a", "U8", "[\"1\"]", "[0,1]") "}", 1, AUTO, QC_E_INPUT, NEEDS_INTEGER},
    {"nested shape", "{" T("a", "U8", "[[1]]", "[0,1]") "}", 1, AUTO, QC_E_INPUT, NEEDS_INTEGER},
    {"comma in shape", "{" T("a", "U8", "[1,]", "[0,1]") "}", 1, AUTO, QC_E_INPUT, NEEDS_INTEGER},
    {"five dimensions", "{" T("a", "U8", "[1,1,1,1,1]", "[0,1]") "}", 1, AUTO, QC_E_UNSUPPORTED,
     "tensor \"a\" has 5 dimensions, at most 4"},
    {"one offset", "{" T("a", "U8", "[1]", "[0]") "}", 1, AUTO, QC_E_INPUT,
     "tensor \"a\": data_offsets are not [begin, end]"},
    {"three offsets", "{" T("a", "U8", "[1]", "[0,1,2]") "}", 1, AUTO, QC_E_INPUT,
     "data_offsets are not [begin, end]"},
    {"end before begin", "{" T("a", "U8", "[1]", "[1,0]") "}", 1, AUTO, QC_E_INPUT,
     "data_offsets are not [begin, end]"},
    {"too few bytes", "{" T("a", "F32", "[2,3]", "[0,20]") "}", 20, AUTO, QC_E_INPUT,
     "tensor \"a\": shape and dtype F32 take 24 bytes, data_offsets span 20"},
    {"one element, no bytes", "{" T("a", "U8", "[1]", "[0,0]") "}", 0, AUTO, QC_E_INPUT,
     "take 1 bytes, data_offsets span 0"},
    {"no element, one byte", "{" T("a", "U8", "[0]", "[0,1]") "}", 1, AUTO, QC_E_INPUT,
     "take 0 bytes, data_offsets span 1"},
    {"product overflows", "{" T("a", "U8", "[4294967296,4294967296]", "[0,1]") "}", 1, AUTO, QC_E_INPUT,
     "overflows"},
    {"bits overflow", "{" T("a", "F64", "[4503599627370496,1024]", "[0,1]") "}", 1, AUTO, QC_E_INPUT,
     "overflows"},
    {"overflow behind a zero", "{" T("a", "U8", "[0,4294967296,4294967296]", "[0,0]") "}", 0, AUTO,
     QC_E_INPUT, "overflows"},
    {"half a byte", "{" T("a", "F4", "[3]", "[0,2]") "}", 2, AUTO, QC_E_INPUT, "no whole number of bytes"},
    {"six bits", "{" T("a", "F6_E2M3", "[2]", "[0,2]") "}", 2, AUTO, QC_E_INPUT, "no whole number of bytes"},

    {"overlap", "{" T("a", "U8", "[4]", "[0,4]") "," T("b", "U8", "[4]", "[3,7]") "}", 7, AUTO, QC_E_INPUT,
     "tensors \"a\" and \"b\" overlap"},
    {"same range", "{" T("a", "U8", "[4]", "[0,4]") "," T("b", "U8", "[4]", "[0,4]") "}", 4, AUTO, QC_E_INPUT,
     "tensors \"a\" and \"b\" overlap"},
    {"hole", "{" T("a", "U8", "[4]", "[0,4]") "," T("b", "U8", "[4]", "[5,9]") "}", 9, AUTO, QC_E_INPUT,
     "hole of 1 bytes before tensor \"b\""},
    {"hole in front", "{" T("a", "U8", "[4]", "[8,12]") "}", 12, AUTO, QC_E_INPUT,
     "hole of 8 bytes before tensor \"a\""},
    {"empty tensor beyond", "{" T("a", "U8", "[0]", "[1,1]") "}", 0, AUTO, QC_E_INPUT,
     "hole of 1 bytes before tensor \"a\""},
    {"truncated", "{" T("a", "U8", "[4]", "[0,4]") "}", 3, AUTO, QC_E_INPUT,
     "file is truncated: 65 bytes expected, 64 found"},
    {"trailing byte", "{" T("a", "U8", "[4]", "[0,4]") "}", 5, AUTO, QC_E_INPUT,
     "1 bytes behind the last tensor"},
    {"data without tensors", "{}", 1, AUTO, QC_E_INPUT, "1 bytes behind the last tensor"},

    {"name twice, other range", "{" T("a", "U8", "[4]", "[0,4]") "," T("a", "U8", "[4]", "[4,8]") "}", 8,
     AUTO, QC_E_INPUT, "duplicate name \"a\""},
    {"name twice, same range", "{" T("a", "U8", "[4]", "[0,4]") "," T("a", "U8", "[4]", "[0,4]") "}", 4, AUTO,
     QC_E_INPUT, "duplicate name \"a\""},
    {"name twice after unescaping",
     "{" T("ab/", "U8", "[4]", "[0,4]") "," T("\\u0061b\\/", "U8", "[4]", "[4,8]") "}", 8, AUTO, QC_E_INPUT,
     "duplicate name \"ab/\""},
    {"metadata twice", "{\"__metadata__\":{},\"__metadata__\":{}}", 0, AUTO, QC_E_INPUT,
     "duplicate name \"__metadata__\""},
    {"metadata key twice", "{\"__metadata__\":{\"a\":\"1\",\"a\":\"1\"}}", 0, AUTO, QC_E_INPUT,
     "__metadata__: duplicate name \"a\""},
    {"metadata number", "{\"__metadata__\":{\"k\":1}}", 0, AUTO, QC_E_INPUT,
     "__metadata__: value of \"k\" is no string"},
    {"metadata object", "{\"__metadata__\":{\"k\":{}}}", 0, AUTO, QC_E_INPUT,
     "__metadata__: value of \"k\" is no string"},
    {"metadata value null", "{\"__metadata__\":{\"k\":null}}", 0, AUTO, QC_E_INPUT,
     "__metadata__: value of \"k\" is no string"},
    {"metadata array", "{\"__metadata__\":[]}", 0, AUTO, QC_E_INPUT, "'{' expected"},
    {"metadata unclosed", "{\"__metadata__\":{\"k\":\"v\"", 0, AUTO, QC_E_INPUT, "'}' expected"},
};

START_TEST(bad_files)
{
    const st_case *c = &bad[_i];
    qc_st_file file = {0};
    qc_err err = {0};
    int rc = parse(c->header, c->n_data_bytes, c->length, &file, &err);
    ck_assert_msg(rc == c->code, "%s: code %d, %s", c->what, rc, err.msg);
    ck_assert_msg(strstr(err.msg, c->message) != NULL, "%s: %s", c->what, err.msg);
    ck_assert_msg(strncmp(err.msg, "x.safetensors: ", 15) == 0, "%s: %s", c->what, err.msg);
    ck_assert_ptr_null(file.tensors);
}
END_TEST

static const st_case good[] = {
    {"nothing at all", "{}", 0, AUTO, 0, NULL},
    {"blanks at the end", "{}   \n", 0, AUTO, 0, NULL},
    {"metadata only", "{\"__metadata__\":{\"format\":\"pt\"}}", 0, AUTO, 0, NULL},
    {"metadata null", "{\"__metadata__\":null," T("a", "U8", "[1]", "[0,1]") "}", 1, AUTO, 1, NULL},
    {"metadata empty", "{" T("a", "U8", "[1]", "[0,1]") ",\"__metadata__\":{}}", 1, AUTO, 1, NULL},
    {"metadata without format",
     "{\"__metadata__\":{\"x\":\"y\",\"z\":\"\"}," T("a", "U8", "[1]", "[0,1]") "}", 1, AUTO, 1, NULL},
    {"rank 0", "{" T("a", "F32", "[]", "[0,4]") "}", 4, AUTO, 1, NULL},
    {"empty tensors first, middle, last",
     "{" T("z", "F32", "[3,0]", "[8,8]") "," T("y", "U8", "[0]", "[0,0]") "," T(
         "b", "F32", "[1]", "[0,4]") "," T("c", "F32", "[0]", "[4,4]") "," T("d", "F32", "[1]", "[4,8]") "}",
     8, AUTO, 5, NULL},
    {"header order is not data order", "{" T("b", "U8", "[2]", "[2,4]") "," T("a", "U8", "[2]", "[0,2]") "}",
     4, AUTO, 2, NULL},
    {"four dimensions", "{" T("a", "F16", "[1,2,3,4]", "[0,48]") "}", 48, AUTO, 1, NULL},
    {"sub-byte", "{" T("a", "F4", "[2,3]", "[0,3]") "," T("b", "F6_E3M2", "[4]", "[3,6]") "}", 6, AUTO, 2,
     NULL},
    {"members in another order", "{\"a\":{\"data_offsets\":[0,1],\"shape\":[1],\"dtype\":\"U8\"}}", 1, AUTO,
     1, NULL},
    {"blanks everywhere",
     "{ \"a\" :\t{ \"dtype\" : \"U8\" , \"shape\" : [ 1 , 1 ] ,\r\n\"data_offsets\" : [ 0 , 1 ] } }", 1, AUTO,
     1, NULL},
    {"empty name", "{" T("", "U8", "[1]", "[0,1]") "}", 1, AUTO, 1, NULL},
};

START_TEST(good_files)
{
    const st_case *c = &good[_i];
    qc_st_file file = {0};
    qc_err err = {0};
    ck_assert_msg(parse(c->header, c->n_data_bytes, c->length, &file, &err) == QC_OK, "%s: %s", c->what,
                  err.msg);
    ck_assert_int_eq(file.n_tensors, c->code);
    uint64_t end = 8 + strlen(c->header);
    for (int64_t i = 0; i < file.n_tensors; i++) {
        ck_assert_uint_eq(file.tensors[i].offset, end);
        end += file.tensors[i].info.n_bytes;
    }
    ck_assert_uint_eq(end, 8 + strlen(c->header) + c->n_data_bytes);
    qc_st_close(&file);
}
END_TEST

START_TEST(padded_with_nul)
{
    static const char header[] = "{}\0\0\0\0\0";
    size_t n_bytes;
    uint8_t *data = build(header, sizeof header, sizeof header, 0, &n_bytes);
    qc_st_file file = {0};
    qc_err err = {0};
    ck_assert_int_eq(qc_st_parse(data, n_bytes, "x", &file, &err), QC_E_INPUT);
    ck_assert_ptr_nonnull(strstr(err.msg, "byte 2: padded with NUL bytes"));
    free(data);
}
END_TEST

START_TEST(short_files)
{
    uint8_t data[8] = {0};
    for (size_t n = 0; n < 8; n++) {
        qc_st_file file = {0};
        qc_err err = {0};
        ck_assert_int_eq(qc_st_parse(data, n, "x", &file, &err), QC_E_INPUT);
        ck_assert_ptr_nonnull(strstr(err.msg, "no safetensors file"));
    }
}
END_TEST

START_TEST(escaped_names)
{
    static const char header[] = "{" T("q\\\"b\\\\s\\/f\\b\\f\\n\\r\\t", "U8", "[1]", "[0,1]") "," T(
        "\\u00e9\\u20AC\\ud83d\\ude00", "U8", "[1]", "[1,2]") "}";
    qc_st_file file = {0};
    qc_err err = {0};
    ck_assert_msg(parse(header, 2, AUTO, &file, &err) == QC_OK, "%s", err.msg);
    ck_assert_str_eq(file.tensors[0].info.name, "q\"b\\s/f\b\f\n\r\t");
    ck_assert_str_eq(file.tensors[1].info.name, "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
    qc_st_close(&file);
}
END_TEST

/* Cutting a good file anywhere must be seen: there is no byte that does not matter. */
START_TEST(every_cut)
{
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\"}," T(
        "a", "F16", "[2,3]", "[0,12]") "," T("b", "U8", "[]", "[12,13]") "}  ";
    size_t n_bytes;
    uint8_t *data = build(header, strlen(header), strlen(header), 13, &n_bytes);
    for (size_t n = 0; n <= n_bytes; n++) {
        qc_st_file file = {0};
        qc_err err = {0};
        uint8_t *cut = malloc(n + 1); /* exact size, so that a sanitizer sees reads behind the end */
        memcpy(cut, data, n);
        cut = realloc(cut, n ? n : 1);
        int rc = qc_st_parse(cut, n, "x", &file, &err);
        ck_assert_msg(rc == (n == n_bytes ? QC_OK : QC_E_INPUT), "%zu bytes: %d %s", n, rc, err.msg);
        qc_st_close(&file);
        free(cut);
    }
    free(data);
}
END_TEST

START_TEST(long_name)
{
    size_t n = 200000;
    char *header = malloc(n + 200);
    memset(header, 'x', n);
    memcpy(header, "{\"", 2);
    strcpy(header + n, "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,2]}}");
    qc_st_file file = {0};
    qc_err err = {0};
    ck_assert_int_eq(parse(header, 2, AUTO, &file, &err), QC_E_INPUT);
    ck_assert_ptr_nonnull(strstr(err.msg, "take 1 bytes, data_offsets span 2"));
    free(header);
}
END_TEST

/* Peak of resident memory since the last reset. */
static void reset_peak(void)
{
    FILE *f = fopen("/proc/self/clear_refs", "w");
    ck_assert_ptr_nonnull(f);
    fputs("5", f);
    fclose(f);
}

static long peak_kb(void)
{
    char line[256];
    long kb = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "VmHWM: %ld", &kb) == 1)
            break;
    if (f)
        fclose(f);
    return kb;
}

/* S-4: 250,000 tensors, a header of 25 MB. */
START_TEST(many_tensors)
{
    enum { N = 250000, ENTRY = 128 };
    char *header = malloc((size_t)N * ENTRY + 2);
    size_t used = 0;
    for (int i = 0; i < N; i++)
        used += (size_t)snprintf(header + used, ENTRY,
                                 "%c\"model.layers.%d.mlp.experts.%d.weight_%06d\":{\"dtype\":\"U8\","
                                 "\"shape\":[1,1],\"data_offsets\":[%d,%d]}",
                                 i ? ',' : '{', i % 100, i % 7, i, N - 1 - i, N - i);
    header[used++] = '}';
    size_t n_bytes;
    uint8_t *data = build(header, used, used, N, &n_bytes);
    free(header);
    qc_st_file file = {0};
    qc_err err = {0};
    reset_peak();
    long before_kb = peak_kb();
    clock_t start = clock();
    ck_assert_msg(qc_st_parse(data, n_bytes, "x", &file, &err) == QC_OK, "%s", err.msg);
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    ck_assert_int_eq(file.n_tensors, N);
    ck_assert_ptr_nonnull(strstr(file.tensors[0].info.name, "_249999"));
    ck_assert_msg(seconds < 5, "%g s", seconds);
    printf("250,000 tensors: header %.1f MB, %.2f s, %ld MB more at the peak\n", (double)used / 1e6, seconds,
           (peak_kb() - before_kb) / 1024);
    ck_assert_int_lt(peak_kb() - before_kb, 160 * 1024);
    qc_st_close(&file);
    free(data);
}
END_TEST

/* A header of 90 MB of zeros inside one shape must not be stored. */
START_TEST(long_shape)
{
    size_t n = 90u << 20, used = 0;
    char *header = malloc(n + 64);
    used += (size_t)sprintf(header, "{\"a\":{\"shape\":[0");
    while (used < n) {
        header[used++] = ',';
        header[used++] = '0';
    }
    strcpy(header + used, "],\"dtype\":\"U8\",\"data_offsets\":[0,0]}}");
    used += strlen(header + used);
    size_t n_bytes;
    uint8_t *data = build(header, used, used, 0, &n_bytes);
    free(header);
    qc_st_file file = {0};
    qc_err err = {0};
    reset_peak();
    long before_kb = peak_kb();
    ck_assert_int_eq(qc_st_parse(data, n_bytes, "x", &file, &err), QC_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.msg, "47185913 dimensions"));
    ck_assert_int_lt(peak_kb() - before_kb, 32 * 1024);
    free(data);
}
END_TEST

START_TEST(failing_allocations)
{
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\"}," T("a", "U8", "[2]", "[0,2]") "}";
    qc_st_file file = {0};
    for (long nth = 1;; nth++) {
        qc_err err = {0};
        qc_alloc_fail_at(nth);
        int rc = parse(header, 2, AUTO, &file, &err);
        long n_allocs = qc_alloc_fail_at(0);
        if (rc == QC_OK) {
            ck_assert_int_lt(n_allocs, nth);
            ck_assert_int_gt(nth, 4);
            break;
        }
        ck_assert_int_eq(rc, QC_E_RESOURCE);
        ck_assert_ptr_nonnull(strstr(err.msg, "memory"));
    }
    qc_st_close(&file);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("safetensors");
    TCase *tc = tcase_create("rules");
    tcase_set_timeout(tc, 120);
    suite_add_tcase(s, tc);
    tcase_add_loop_test(tc, bad_files, 0, (int)(sizeof bad / sizeof bad[0]));
    tcase_add_loop_test(tc, good_files, 0, (int)(sizeof good / sizeof good[0]));
    tcase_add_test(tc, padded_with_nul);
    tcase_add_test(tc, short_files);
    tcase_add_test(tc, escaped_names);
    tcase_add_test(tc, every_cut);
    tcase_add_test(tc, long_name);
    tcase_add_test(tc, many_tensors);
    tcase_add_test(tc, long_shape);
    tcase_add_test(tc, failing_allocations);
    SRunner *sr = srunner_create(s);
    srunner_run_all(sr, CK_ENV);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed ? 1 : 0;
}
