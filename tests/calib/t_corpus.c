/* Windows of a corpus: places by the formula of corpus.h, all kinds of files, notes, hostile files. The
 * tokenizer is that of the demo model. */
#include "corpus.h"
#include "open.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_test.h"
#include "tokenizer.h"

#include <unistd.h>

#define TEXT "text/austen-heldout.txt"

typedef struct fixture {
    qc_source *src;
    qc_event_list events;
    qc_corpus corpus;
    char folder[64];
    char path[128];
} fixture;

static void setup(fixture *f)
{
    qc_err err = {0};
    *f = (fixture){0};
    ck_assert_msg(qc_source_open(test_data("models/demo-qwen3"), &f->src, &err) == QC_OK, "%s", err.msg);
    strcpy(f->folder, "/tmp/qc-corpus-XXXXXX");
    ck_assert(mkdtemp(f->folder) != NULL);
}

static void teardown(fixture *f)
{
    qc_corpus_clear(&f->corpus);
    qc_event_list_clear(&f->events);
    qc_source_close(f->src);
    unlink(f->path);
    rmdir(f->folder);
}

static const char *put(fixture *f, const char *name, const void *data, size_t n_bytes)
{
    qc_err err = {0};
    unlink(f->path);
    snprintf(f->path, sizeof f->path, "%s/%s", f->folder, name);
    ck_assert_int_eq(qc_file_write(f->path, true, data, n_bytes, &err), QC_OK);
    return f->path;
}

static qc_corpus_options options_of(int64_t windows, int64_t length)
{
    return (qc_corpus_options){.windows = windows, .length = length, .max_positions = 4096};
}

static void load(fixture *f, const char *path, const qc_corpus_options *o)
{
    qc_err err = {0};
    qc_corpus_clear(&f->corpus);
    qc_event_list_clear(&f->events);
    ck_assert_msg(qc_corpus_load(f->src, path, o, 100000, &f->events, &f->corpus, &err) == QC_OK, "%s",
                  err.msg);
}

static void refused(fixture *f, const char *path, const qc_corpus_options *o, int code, const char *fragment)
{
    qc_err err = {0};
    qc_corpus c = {0};
    ck_assert_int_eq(qc_corpus_load(f->src, path, o, 3000, &f->events, &c, &err), code);
    ck_assert_msg(strstr(err.msg, fragment), "%s", err.msg);
    ck_assert(c.ids == NULL);
}

/* Ids of the whole text by the tokenizer itself. */
static int32_t *all_ids(const fixture *f, int64_t *ret_n)
{
    qc_err err = {0};
    qc_tokenizer *tok;
    char *text;
    size_t n_bytes;
    int32_t *ids;
    ck_assert_int_eq(qc_tokenizer_from_source(f->src, &tok, &err), QC_OK);
    ck_assert_int_eq(qc_file_read(test_data(TEXT), 1 << 20, &text, &n_bytes, &err), QC_OK);
    ck_assert_int_eq(qc_tokenizer_encode(tok, text, n_bytes, NULL, &ids, ret_n, &err), QC_OK);
    ck_assert_int_eq(qc_tokenizer_bos(tok), -1);
    qc_free(text);
    qc_tokenizer_free(tok);
    return ids;
}

START_TEST(places)
{
    fixture f;
    setup(&f);
    int64_t n_ids;
    int32_t *ids = all_ids(&f, &n_ids);
    enum { N = 7, LEN = 300 };
    qc_corpus_options o = options_of(N, LEN);
    load(&f, test_data(TEXT), &o);
    ck_assert(f.corpus.n_windows == N && f.corpus.length == LEN && f.corpus.n_text_ids == n_ids);
    ck_assert_int_eq(f.corpus.n_documents, 1);
    for (int64_t i = 0; i < N; i++)
        ck_assert(memcmp(f.corpus.ids + i * LEN, ids + i * (n_ids - LEN) / (N - 1), LEN * sizeof *ids) == 0);
    ck_assert_int_eq(f.events.n_events, 0);

    /* random: a window inside each seventh, the same for the same seed */
    o.sample = QC_SAMPLE_RANDOM;
    o.seed = 5;
    load(&f, test_data(TEXT), &o);
    char first[65];
    strcpy(first, f.corpus.ids_sha256);
    for (int64_t i = 0; i < N; i++) {
        bool found = false;
        for (int64_t at = i * n_ids / N; at + LEN <= (i + 1) * n_ids / N && !found; at++)
            found = memcmp(f.corpus.ids + i * LEN, ids + at, LEN * sizeof *ids) == 0;
        ck_assert_msg(found, "window %d", (int)i);
    }
    load(&f, test_data(TEXT), &o);
    ck_assert_str_eq(first, f.corpus.ids_sha256);
    o.seed = 6;
    load(&f, test_data(TEXT), &o);
    ck_assert_str_ne(first, f.corpus.ids_sha256);

    /* one window: the start */
    o = options_of(1, 0);
    load(&f, test_data(TEXT), &o);
    ck_assert(f.corpus.n_windows == 1 && f.corpus.length == 2048);
    ck_assert(memcmp(f.corpus.ids, ids, 2048 * sizeof *ids) == 0);
    qc_free(ids);
    teardown(&f);
}
END_TEST

/* K-2, K-3 of the trouble cases: default length, fewer windows, none, more than the model takes. */
START_TEST(few_tokens)
{
    fixture f;
    setup(&f);
    char text[6000];
    for (size_t i = 0; i + 6 <= sizeof text; i += 6)
        memcpy(text + i, i % 12 ? "house " : "green ", 6);
    const char *path = put(&f, "t.txt", text, sizeof text);
    qc_corpus_options o = options_of(128, 256);
    load(&f, path, &o);
    int64_t there = f.corpus.n_text_ids / 256;
    ck_assert(there >= 2 && there < 128 && f.corpus.n_windows == there);
    ck_assert_int_eq(qc_event_count(&f.events, "corpus"), 1);
    ck_assert(strstr(f.events.events[0].detail, "instead of 128"));
    o.length = 4096;
    refused(&f, path, &o, QC_E_INPUT, "a calibration window has 4096");
    o.length = 4097;
    refused(&f, path, &o, QC_E_USAGE, "takes 2 .. 4096");
    o.length = 1;
    refused(&f, path, &o, QC_E_USAGE, "windows of 1 tokens");
    o = options_of(0, 16);
    refused(&f, path, &o, QC_E_USAGE, "at least 1");
    o = options_of(4, 0);
    o.max_positions = 64;
    load(&f, path, &o);
    ck_assert_int_eq(f.corpus.length, 64);
    o.memory_bytes = 1000;
    refused(&f, path, &o, QC_E_RESOURCE, "memory cap");
    teardown(&f);
}
END_TEST

START_TEST(notes_on_rank)
{
    fixture f;
    setup(&f);
    qc_err err = {0};
    qc_model model;
    ck_assert_int_eq(qc_model_open(f.src, &model, &err), QC_OK);
    qc_corpus_options o = options_of(4, 512);
    load(&f, test_data(TEXT), &o);
    model.config.ffn = 1024;
    ck_assert_int_eq(qc_corpus_check(&f.corpus, &model.config, "t", &f.events, &err), QC_OK);
    ck_assert_int_eq(qc_event_count(&f.events, "calibration_rank"), 0);
    model.config.ffn = 1025;
    ck_assert_int_eq(qc_corpus_check(&f.corpus, &model.config, "t", &f.events, &err), QC_OK);
    ck_assert_int_eq(qc_event_count(&f.events, "calibration_rank"), 1);
    ck_assert_int_eq(f.events.events[0].level, QC_EVENT_NOTE);
    for (int i = 0; i < 4 * 512; i++)
        f.corpus.ids[i] = 9;
    ck_assert_int_eq(qc_corpus_check(&f.corpus, &model.config, "t", &f.events, &err), QC_OK);
    qc_model_close(&model);
    ck_assert(f.events.n_events == 2 && strstr(f.events.events[1].detail, "the same (id 9)"));
    int64_t windows, length;
    ck_assert(qc_corpus_preset("standard", &windows, &length) && windows == 128 && length == 2048);
    ck_assert(!qc_corpus_preset("Standard", &windows, &length));
    teardown(&f);
}
END_TEST

/* Text of the ids of the whole corpus, as far as it is one window. */
static char *text_of(const fixture *f)
{
    qc_err err = {0};
    qc_tokenizer *tok;
    char *text;
    size_t n_bytes;
    ck_assert_int_eq(qc_tokenizer_from_source(f->src, &tok, &err), QC_OK);
    ck_assert_int_eq(qc_tokenizer_decode(tok, f->corpus.ids, f->corpus.length, false, &text, &n_bytes, &err),
                     QC_OK);
    qc_tokenizer_free(tok);
    return text;
}

static void whole_text(fixture *f, const char *path, qc_corpus_options o, int64_t documents, const char *want)
{
    o.length = 2; /* first how many tokens there are, then all of them */
    load(f, path, &o);
    ck_assert_int_eq(f->corpus.n_documents, documents);
    o.length = f->corpus.n_text_ids;
    load(f, path, &o);
    char *text = text_of(f);
    ck_assert_str_eq(text, want);
    qc_free(text);
}

START_TEST(documents)
{
    fixture f;
    setup(&f);
    static const char paragraphs[] = "\n \nfirst line\nsecond line\n\n\nthird\r\n \t \nfourth";
    qc_corpus_options o = options_of(1, 0);
    const char *path = put(&f, "p.txt", paragraphs, strlen(paragraphs));
    whole_text(&f, path, o, 1, paragraphs);
    o.documents = QC_DOCUMENTS_BLANK_LINE;
    whole_text(&f, path, o, 3, "first line\nsecond line\nthird\r\nfourth");

    static const char lines[] =
        "{\"text\": \"one \\u00e9\"}\r\n\n   \n{\"messages\": [{\"role\": \"user\", \"content\": "
        "\"Hi\"}, {\"role\": \"assistant\", \"content\": \"Ho\"}], \"text\": 3}\n{\"messages\": "
        "[{\"role\": \"tool\", \"content\": \"x\"}]}\n{\"id\": 1, \"text\": \"two\"}";
    path = put(&f, "d.jsonl", lines, strlen(lines));
    whole_text(&f, path, options_of(1, 0), 3,
               "one \xC3\xA9<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\ntwo");
    ck_assert_int_eq(qc_event_count(&f.events, "corpus"), 1);
    ck_assert(strstr(f.events.events[0].detail, "left out") &&
              strstr(f.events.events[0].detail, "d.jsonl:5"));
    teardown(&f);
}
END_TEST

/* T-15 of the trouble cases: one option decides what the spelling of a special token is. */
START_TEST(special_tokens)
{
    fixture f;
    setup(&f);
    static const char text[] = "a<|im_start|>b and some more words to fill the window";
    const char *path = put(&f, "s.txt", text, strlen(text));
    qc_corpus_options o = options_of(1, 2);
    load(&f, path, &o);
    int64_t n = f.corpus.n_text_ids;
    o.plain_special = true;
    load(&f, path, &o);
    ck_assert_int_gt(f.corpus.n_text_ids, n);
    teardown(&f);
}
END_TEST

START_TEST(bad_texts)
{
    fixture f;
    setup(&f);
    qc_corpus_options o = options_of(1, 2);
    refused(&f, "/nonexistent.txt", &o, QC_E_INPUT, "nonexistent");
    refused(&f, put(&f, "e.txt", "", 0), &o, QC_E_INPUT, "empty");
    refused(&f, put(&f, "b.txt", "good \xC0\x80", 7), &o, QC_E_INPUT, "invalid UTF-8 at byte 5");
    static const struct {
        const char *text, *fragment;
    } bad[] = {{"{\"text\": \"a b c d\"}\n{\"text\": \"x\"\n", ":2"},
               {"[1, 2]\n", "`text` or `messages`"},
               {"{\"text\": 3}\n", "`text` or `messages`"},
               {"{\"prompt\": \"x\"}\n", "`text` or `messages`"},
               {"{\"messages\": []}\n", "not a list"},
               {"{\"messages\": {\"role\": \"user\"}}\n", "not a list"},
               {"just text\n", ":1"},
               {"\n\n", "0 tokens"}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        refused(&f, put(&f, "b.jsonl", bad[i].text, strlen(bad[i].text)), &o, QC_E_INPUT, bad[i].fragment);
    teardown(&f);
}
END_TEST

/* ---- .npy ---- */

static size_t npy(char *buf, int version, const char *descr, const char *order, const char *shape,
                  const void *data, size_t n_bytes)
{
    size_t start = version == 1 ? 10 : 12;
    int n = sprintf(buf + start, "{'descr': '%s', 'fortran_order': %s, 'shape': %s, }", descr, order, shape);
    while ((start + (size_t)n + 1) % 64)
        buf[start + (size_t)n++] = ' ';
    buf[start + (size_t)n++] = '\n';
    memcpy(buf, "\x93NUMPY", 6);
    buf[6] = (char)version;
    buf[7] = 0;
    buf[8] = (char)n;
    buf[9] = (char)(n >> 8);
    if (version > 1)
        buf[10] = buf[11] = 0;
    memcpy(buf + start + n, data, n_bytes);
    return start + (size_t)n + n_bytes;
}

START_TEST(token_files)
{
    fixture f;
    setup(&f);
    char buf[1024];
    int32_t i4[12];
    int64_t i8[12];
    uint16_t u2[12];
    for (int i = 0; i < 12; i++)
        i8[i] = i4[i] = u2[i] = (uint16_t)(100 + 7 * i);
    const struct {
        const char *descr;
        const void *data;
        size_t n_bytes;
    } kinds[] = {
        {"<i4", i4, sizeof i4}, {"<i8", i8, sizeof i8}, {"<u2", u2, sizeof u2}, {"<u4", i4, sizeof i4}};
    for (int version = 1; version <= 2; version++)
        for (int k = 0; k < 4; k++) {
            size_t n = npy(buf, version, kinds[k].descr, "False", "(12,)", kinds[k].data, kinds[k].n_bytes);
            qc_corpus_options o = options_of(2, 5);
            load(&f, put(&f, "t.npy", buf, n), &o);
            ck_assert(f.corpus.n_windows == 2 && f.corpus.length == 5 && f.corpus.n_text_ids == 12);
            ck_assert(memcmp(f.corpus.ids, i4, 5 * sizeof *i4) == 0);
            ck_assert(memcmp(f.corpus.ids + 5, i4 + 7, 5 * sizeof *i4) == 0);

            n = npy(buf, version, kinds[k].descr, "False", "(3, 4)", kinds[k].data, kinds[k].n_bytes);
            o = options_of(2, 0); /* rows 0 and 2 */
            load(&f, put(&f, "t.npy", buf, n), &o);
            ck_assert(f.corpus.n_windows == 2 && f.corpus.length == 4 && f.corpus.n_documents == 3);
            ck_assert(memcmp(f.corpus.ids, i4, 4 * sizeof *i4) == 0);
            ck_assert(memcmp(f.corpus.ids + 4, i4 + 8, 4 * sizeof *i4) == 0);
            o.length = 3;
            refused(&f, f.path, &o, QC_E_USAGE, "windows of 4 tokens");
        }
    teardown(&f);
}
END_TEST

START_TEST(bad_token_files)
{
    fixture f;
    setup(&f);
    char buf[1024];
    const int32_t ids[4] = {1, 2, 3, 4}, high[4] = {1, 2, 3, 3000}, negative[4] = {1, 2, -3, 4};
    const int64_t huge[2] = {5, (1ll << 32) + 5};
    qc_corpus_options o = options_of(1, 2);
    const struct {
        const char *descr, *order, *shape, *fragment;
        const void *data;
        int code;
    } bad[] = {
        {"<f4", "False", "(4,)", "elements of type", ids, QC_E_UNSUPPORTED},
        {">i4", "False", "(4,)", "elements of type", ids, QC_E_UNSUPPORTED},
        {"<i4", "True", "(2, 2)", "C order", ids, QC_E_UNSUPPORTED},
        {"<i4", "False", "(5,)", "do not fit the shape", ids, QC_E_INPUT},
        {"<i4", "False", "(3,)", "do not fit the shape", ids, QC_E_INPUT},
        {"<i4", "False", "()", "single number", ids, QC_E_INPUT},
        {"<i4", "False", "(2, 2, 1)", "two dimensions", ids, QC_E_INPUT},
        {"<i4", "False", "(0,)", "dimension", ids, QC_E_INPUT},
        {"<i4", "False", "(-4,)", "no shape", ids, QC_E_INPUT},
        {"<i4", "False", "(99999999999999999999,)", "dimension", ids, QC_E_INPUT},
        {"<i4", "False", "(1000000000000, 1000000000000)", "do not fit", ids, QC_E_INPUT},
        {"<i4", "False", "4", "no shape", ids, QC_E_INPUT},
        {"<i4", "False", "(4", "no shape", ids, QC_E_INPUT},
        {"<i4", "False", "(4,)", "id of token 3 is none", high, QC_E_INPUT},
        {"<i4", "False", "(4,)", "id of token 2 is none", negative, QC_E_INPUT},
        {"<i8", "False", "(2,)", "id of token 1 is none", huge, QC_E_INPUT},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        size_t n = npy(buf, 1, bad[i].descr, bad[i].order, bad[i].shape, bad[i].data, 16);
        refused(&f, put(&f, "b.npy", buf, n), &o, bad[i].code, bad[i].fragment);
    }
    size_t whole = npy(buf, 1, "<i4", "False", "(4,)", ids, 16);
    for (size_t n = 0; n < whole; n++) /* cut anywhere */
        refused(&f, put(&f, "b.npy", buf, n), &o, QC_E_INPUT, "b.npy");
    buf[6] = 4;
    refused(&f, put(&f, "b.npy", buf, whole), &o, QC_E_UNSUPPORTED, "version 4");
    buf[6] = 1;
    buf[9] = 127; /* header length */
    refused(&f, put(&f, "b.npy", buf, whole), &o, QC_E_INPUT, "longer than the file");
    refused(&f, put(&f, "b.npy", "plain text, no array", 20), &o, QC_E_INPUT, "NUMPY");
    teardown(&f);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"places", places},           {"few_tokens", few_tokens},           {"notes_on_rank", notes_on_rank},
        {"documents", documents},     {"special_tokens", special_tokens},   {"bad_texts", bad_texts},
        {"token_files", token_files}, {"bad_token_files", bad_token_files}, {NULL, NULL}};
    return run_tests("corpus", cases);
}
