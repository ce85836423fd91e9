/* A fuzz harness is a function over bytes, with the name and meaning that libFuzzer gives it: it never fails
 * by its return value; a broken promise aborts. replay.c drives it over a corpus and seeded mutations of it;
 * with -Dfuzzing=true (clang) libFuzzer does. */
#ifndef QC_FUZZ_H
#define QC_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

#define FUZZ_CHECK(condition)                                                                                \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: broken promise: %s\n", __FILE__, __LINE__, #condition);                  \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

/* The bytes as a file whose name has this ending; the path is valid, and the file there, until the next call.
 */
const char *fuzz_file(const char *ending, const uint8_t *data, size_t n_bytes);

/* parse the bytes as they are, then a copy that `repair` has put right (checksums), so that changes of what
 * they cover come through. */
void fuzz_repaired(const uint8_t *data, size_t n_bytes, void (*parse)(const uint8_t *data, size_t n_bytes),
                   void (*repair)(uint8_t *data, size_t n_bytes));

/* Path of a tiny model of the test data (QC_TEST_DATA), valid until the next call. */
const char *fuzz_tiny_model(const char *name);

#endif
