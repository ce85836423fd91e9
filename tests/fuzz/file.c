/* What harnesses share: inputs as files, inputs whose checksums are right, models to read them for. */
#include "fuzz.h"

#include <string.h>
#include <unistd.h>

static char path[64];

static void remove_file(void)
{
    if (path[0])
        unlink(path);
}

const char *fuzz_file(const char *ending, const uint8_t *data, size_t n_bytes)
{
    static int asked;
    const char *folder = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp"; /* in memory if possible */
    if (!asked++)
        atexit(remove_file);
    remove_file();
    snprintf(path, sizeof path, "%s/qc-fuzz-%ld%s", folder, (long)getpid(), ending);
    FILE *f = fopen(path, "wb");
    FUZZ_CHECK(f && fwrite(data, 1, n_bytes, f) == n_bytes && fclose(f) == 0);
    return path;
}

void fuzz_repaired(const uint8_t *data, size_t n_bytes, void (*parse)(const uint8_t *data, size_t n_bytes),
                   void (*repair)(uint8_t *data, size_t n_bytes))
{
    parse(data, n_bytes);
    uint8_t *copy = malloc(n_bytes + 1);
    FUZZ_CHECK(copy != NULL);
    memcpy(copy, data, n_bytes);
    repair(copy, n_bytes);
    parse(copy, n_bytes);
    free(copy);
}

const char *fuzz_tiny_model(const char *name)
{
    static char model[4096];
    const char *folder = getenv("QC_TEST_DATA");
    FUZZ_CHECK(folder != NULL);
    snprintf(model, sizeof model, "%s/models/tiny/%s", folder, name);
    return model;
}
