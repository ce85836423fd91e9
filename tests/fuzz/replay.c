/* usage: fuzz_NAME CORPUS_FOLDER [FIRST_SEED [LAST_SEED]]
 *
 * Run the harness on every file of the corpus, then on one mutation of each per seed. The same seeds give the
 * same inputs everywhere; a failure is found again by narrowing the range. */
#include "fuzz.h"

#include <dirent.h>
#include <string.h>

#define MAX_FILES       256
#define MAX_INPUT_BYTES (1u << 20)

static struct {
    uint8_t *data;
    size_t n_bytes;
} corpus[MAX_FILES];
static size_t n_corpus;

static uint64_t rng_state;

/* splitmix64 */
static uint64_t next_random(void)
{
    uint64_t z = rng_state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static size_t below(size_t n)
{
    return n ? (size_t)(next_random() % n) : 0;
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int is_visible(const struct dirent *e)
{
    return e->d_name[0] != '.';
}

static void load_corpus(const char *folder)
{
    struct dirent **names;
    int n = scandir(folder, &names, is_visible, by_name);
    for (int i = 0; i < n && n_corpus < MAX_FILES; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, names[i]->d_name);
        FILE *f = fopen(path, "rb");
        FUZZ_CHECK(f != NULL);
        uint8_t *data = malloc(MAX_INPUT_BYTES);
        corpus[n_corpus].n_bytes = fread(data, 1, MAX_INPUT_BYTES, f);
        corpus[n_corpus++].data = data;
        fclose(f);
        free(names[i]);
    }
    if (n >= 0)
        free(names);
}

/* Replace n_old bytes at `at` by n_new bytes of `from`; too long results are left alone. */
static size_t splice(uint8_t *data, size_t n_bytes, size_t at, size_t n_old, const uint8_t *from,
                     size_t n_new)
{
    if (n_bytes - n_old + n_new > MAX_INPUT_BYTES)
        return n_bytes;
    memmove(data + at + n_new, data + at + n_old, n_bytes - at - n_old);
    memmove(data + at, from, n_new);
    return n_bytes - n_old + n_new;
}

/* Text that parsers of numbers, strings and nesting care about. */
static const char *const tokens[] = {"0",
                                     "-1",
                                     "1.5",
                                     "1e9",
                                     "9007199254740993",
                                     "18446744073709551616",
                                     "4294967296",
                                     "null",
                                     "true",
                                     "\"",
                                     "\\",
                                     "\\u0000",
                                     "\\ud800",
                                     "\\u0041",
                                     "{",
                                     "}",
                                     "[",
                                     "]",
                                     ",",
                                     ":",
                                     "{}",
                                     "[]",
                                     "\"\"",
                                     " ",
                                     "\n",
                                     "\xFF",
                                     "\xC3",
                                     "\xE2\x82\xAC",
                                     "e",
                                     ".",
                                     "[[[[[[[[[[[[[[[["};

/* Values on the edges of fields of binary formats. */
static const uint64_t numbers[] = {0,
                                   1,
                                   2,
                                   63,
                                   64,
                                   255,
                                   256,
                                   4096,
                                   INT32_MAX,
                                   1ull << 31,
                                   UINT32_MAX,
                                   1ull << 32,
                                   1ull << 47,
                                   1ull << 62,
                                   INT64_MAX,
                                   1ull << 63,
                                   UINT64_MAX - 7,
                                   UINT64_MAX};

/* Write a number over a little-endian field, which lies at a multiple of its width. */
static void put_number(uint8_t *data, size_t n_bytes)
{
    uint64_t number = numbers[below(sizeof numbers / sizeof numbers[0])];
    size_t width = (size_t)1 << below(4), at = below(n_bytes) / width * width;
    for (size_t i = 0; i < width && at + i < n_bytes; i++)
        data[at + i] = (uint8_t)(number >> (8 * i));
}

static size_t mutate_once(uint8_t *data, size_t n_bytes)
{
    size_t at = below(n_bytes + 1), n = below(n_bytes - at < 64 ? n_bytes - at + 1 : 64);
    uint8_t byte = (uint8_t)next_random();
    switch (below(8)) {
    case 0: /* one bit */
        if (at < n_bytes)
            data[at] ^= (uint8_t)(1u << below(8));
        return n_bytes;
    case 1: /* one byte */
        return at < n_bytes ? splice(data, n_bytes, at, 1, &byte, 1) : n_bytes;
    case 2: /* remove some */
        return splice(data, n_bytes, at, n, data, 0);
    case 3: { /* repeat some elsewhere */
        uint8_t piece[64];
        memcpy(piece, data + at, n);
        return splice(data, n_bytes, below(n_bytes + 1), 0, piece, n);
    }
    case 4: { /* put in or write over with a token */
        const char *token = tokens[below(sizeof tokens / sizeof tokens[0])];
        return splice(data, n_bytes, at, below(2) ? n : 0, (const uint8_t *)token, strlen(token));
    }
    case 5: { /* a piece of another file */
        size_t other = below(n_corpus), from = below(corpus[other].n_bytes),
               left = corpus[other].n_bytes - from;
        return splice(data, n_bytes, at, n, corpus[other].data + from, left < 64 ? left : below(64));
    }
    case 6:
        put_number(data, n_bytes);
        return n_bytes;
    default: /* cut the end off */
        return below(8) ? n_bytes : at;
    }
}

/* A copy of exactly the right size, so that sanitizers see a read behind the end. */
static void run(const uint8_t *data, size_t n_bytes)
{
    uint8_t *copy = malloc(n_bytes ? n_bytes : 1);
    memcpy(copy, data, n_bytes);
    LLVMFuzzerTestOneInput(copy, n_bytes);
    free(copy);
}

int main(int argc, char **argv)
{
    FUZZ_CHECK(argc >= 2);
    load_corpus(argv[1]);
    FUZZ_CHECK(n_corpus > 0);
    uint64_t first = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    uint64_t last = argc > 3 ? strtoull(argv[3], NULL, 10) : argc > 2 ? first : 2000;
    uint8_t *data = malloc(2 * MAX_INPUT_BYTES);
    for (size_t i = 0; i < n_corpus; i++)
        run(corpus[i].data, corpus[i].n_bytes);
    for (uint64_t seed = first; seed <= last; seed++) {
        for (size_t i = 0; i < n_corpus; i++) {
            rng_state = seed * 0x100000001B3u + i;
            size_t n_bytes = corpus[i].n_bytes;
            memcpy(data, corpus[i].data, n_bytes);
            for (size_t k = 1 + below(6); k > 0; k--)
                n_bytes = mutate_once(data, n_bytes);
            run(data, n_bytes);
        }
    }
    printf("%zu files, seeds %llu to %llu\n", n_corpus, (unsigned long long)first, (unsigned long long)last);
    free(data);
    for (size_t i = 0; i < n_corpus; i++)
        free(corpus[i].data);
    return 0;
}
