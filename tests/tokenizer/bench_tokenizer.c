/* Load time and speed of encoding on one thread: bench_tokenizer [FOLDER [TEXT]]. Prints the median processor
 * time of five runs, which other load on the machine disturbs less than the clock on the wall. */
#include "tok_files.h"

#include <time.h>

#define N_RUNS 5

static double cpu_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int compare_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void bench_text(const qc_tokenizer *tok, const char *what, const char *text, size_t n_bytes)
{
    double s[N_RUNS];
    int64_t n_ids = 0;
    for (int i = 0; i < N_RUNS; i++) {
        int32_t *ids = NULL;
        qc_err err = {0};
        double start = cpu_s();
        if (qc_tokenizer_encode(tok, text, n_bytes, NULL, &ids, &n_ids, &err) < 0) {
            fprintf(stderr, "%s: %s\n", what, err.msg);
            exit(1);
        }
        s[i] = cpu_s() - start;
        qc_free(ids);
    }
    qsort(s, N_RUNS, sizeof *s, compare_double);
    printf("%-24s %9zu bytes %8lld ids %8.1f ms %7.1f MB/s\n", what, n_bytes, (long long)n_ids,
           s[N_RUNS / 2] * 1e3, (double)n_bytes * 1e-6 / s[N_RUNS / 2]);
}

static char *repeat(const char *unit, size_t n_bytes)
{
    char *text = malloc(n_bytes + 1);
    size_t n = strlen(unit);
    for (size_t i = 0; i < n_bytes; i++)
        text[i] = unit[i % n];
    text[n_bytes] = 0;
    return text;
}

int main(int argc, char **argv)
{
    const char *folder = argc > 1 ? argv[1] : tok_folder("qwen3");
    const char *data = getenv("QC_DATA");
    char dir[4096];
    size_t n_json, n_bytes;
    char *json = folder ? tok_file(folder, "tokenizer.json", &n_json) : NULL;
    if (!json)
        TEST_SKIP("no tokenizer.json");
    double s[N_RUNS];
    qc_tokenizer *tok = NULL;
    for (int i = 0; i < N_RUNS; i++) {
        qc_err err = {0};
        qc_tokenizer_free(tok);
        double start = cpu_s();
        if (qc_tokenizer_new(json, n_json, folder, &tok, &err) < 0) {
            fprintf(stderr, "%s\n", err.msg);
            return 1;
        }
        s[i] = cpu_s() - start;
    }
    free(json);
    qsort(s, N_RUNS, sizeof *s, compare_double);
    printf("%-24s %9zu bytes %8lld ids %8.1f ms\n", "load", n_json, (long long)qc_tokenizer_vocab_size(tok),
           s[N_RUNS / 2] * 1e3);
    snprintf(dir, sizeof dir, "%s/text", data ? data : ".");
    char *text = argc > 2 ? tok_file(argv[2][0] == '/' ? "" : ".", argv[2], &n_bytes)
                 : data   ? tok_file(dir, "wikitext-2-raw.test.txt", &n_bytes)
                          : NULL;
    if (!text)
        text = tok_file(test_data("text"), "austen-heldout.txt", &n_bytes);
    if (text)
        bench_text(tok, "text", text, n_bytes);
    free(text);
    static const struct {
        const char *what, *unit;
        size_t n_bytes;
    } runs[] = {
        {"one letter", "a", 500000},
        {"underscores", "_", 500000},
        {"blanks", " ", 1000000},
        {"one word", "honorificabilitudinitatibus", 1000000},
        {"CJK without blanks",
         "\xE4\xB8\xAD\xE6\x96\x87\xE5\xAD\x97\xE7\xAC\xA6\xE4\xB8\xB2\xE6\xB2\xA1\xE6\x9C\x89", 300000},
        {"marks out of order", "\xCC\x81\xCC\xA7", 1000000},
        {"U+2581", "\xE2\x96\x81", 300000},
        {"not assigned", "\xF3\xA0\x88\x80", 1000000},
    };
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        text = repeat(runs[i].unit, runs[i].n_bytes);
        bench_text(tok, runs[i].what, text, runs[i].n_bytes);
        free(text);
    }
    qc_tokenizer_free(tok);
    return 0;
}
