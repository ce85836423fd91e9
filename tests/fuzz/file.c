/* Inputs of parsers that read files by their path. */
#include "fuzz.h"

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
