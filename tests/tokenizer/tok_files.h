/* Files of the tokenizer tests: plain or gzip-compressed, in tests/data/tokenizers or QC_DATA/tokenizers. */
#ifndef TOK_FILES_H
#define TOK_FILES_H

#include "qc_alloc.h"
#include "qc_test.h"
#include "tokenizer.h"

#include <stdbool.h>
#include <zlib.h>

#define TOK_FILE_MAX (64u << 20)

/* Whole file name or name.gz in a folder, NUL-terminated, owned (free); NULL if it does not exist. */
static inline char *tok_file(const char *folder, const char *name, size_t *ret_bytes)
{
    char path[8192];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    gzFile f = gzopen(path, "rb"); /* reads plain files too */
    if (!f) {
        snprintf(path, sizeof path, "%s/%s.gz", folder, name);
        f = gzopen(path, "rb");
    }
    if (!f)
        return NULL;
    size_t n = 0, cap = 1 << 16;
    char *text = malloc(cap);
    for (int got; text && (got = gzread(f, text + n, (unsigned)(cap - n - 1))) > 0;) {
        n += (size_t)got;
        if (cap - n < 2 && cap < TOK_FILE_MAX) {
            cap *= 2;
            text = realloc(text, cap);
        }
    }
    gzclose(f);
    if (text)
        text[n] = 0;
    *ret_bytes = n;
    return text;
}

/* Folder of a tokenizer in the tree or in QC_DATA, NULL if it is in neither. */
static inline const char *tok_folder(const char *name)
{
    static char path[4096 + 64];
    size_t n_bytes;
    const char *data = getenv("QC_DATA");
    for (int i = 0; i < 2; i++) {
        if (i == 0)
            snprintf(path, sizeof path, "%s/%s", test_data("tokenizers"), name);
        else if (data)
            snprintf(path, sizeof path, "%s/tokenizers/%s", data, name);
        char *json = tok_file(path, "tokenizer.json", &n_bytes);
        free(json);
        if (json)
            return path;
    }
    return NULL;
}

/* Tokenizer of a folder, without its tokenizer_config.json. */
static inline qc_tokenizer *tok_open(const char *folder)
{
    size_t n_bytes;
    char *json = tok_file(folder, "tokenizer.json", &n_bytes);
    ck_assert_msg(json != NULL, "no tokenizer.json in %s", folder);
    qc_tokenizer *tok = NULL;
    qc_err err = {0};
    int rc = qc_tokenizer_new(json, n_bytes, folder, &tok, &err);
    free(json);
    ck_assert_msg(rc == QC_OK, "%s", err.msg);
    return tok;
}

#endif
