/* Stored references: no input may crash the reader; what is accepted holds ids of the vocabulary, survives
 * packing, and has no divergence from itself. Sums of header and windows are made right in a second run of
 * every input, so that mutations get past them; a third takes the input as one unpacked window. */
#include "fuzz.h"
#include "qc_math.h"
#include "reference_internal.h"

#include <string.h>
#include <zlib.h>

enum { FIXED = 20, BLOCK = 12 }; /* docs/formats/reference.md */

/* The windows that the files of the corpus are of: 3 and 2 scored positions. */
static int64_t lengths[2] = {4, 3};
static int32_t ids[7];
static const qc_windows windows = {.ids = ids,
                                   .lengths = lengths,
                                   .n_windows = 2,
                                   .length = 4,
                                   .ids_sha256 =
                                       "0000000000000000000000000000000000000000000000000000000000000000"};

static void check_error(int rc, const qc_err *err, const char *name)
{
    FUZZ_CHECK(rc == QC_E_INPUT || rc == QC_E_UNSUPPORTED);
    FUZZ_CHECK(err->code == rc && strncmp(err->msg, name, strlen(name)) == 0 && !strchr(err->msg, '\n'));
}

static void check_kept(const qc_kept *kept, int64_t vocab)
{
    int64_t width = kept->keep + kept->drawn;
    qc_buf packed = {0};
    qc_kept again;
    for (int64_t i = 0; i < kept->n; i++) {
        const int32_t *levels = kept->levels + i * width;
        FUZZ_CHECK(kept->top[i] >= 0 && kept->top[i] < kept->keep && kept->nll[i] >= 0);
        for (int64_t k = 0; k < width; k++)
            FUZZ_CHECK(kept->ids[i * width + k] >= 0 && kept->ids[i * width + k] < vocab && levels[k] >= 0 &&
                       levels[k] <= QC_MAX_LEVEL);
        FUZZ_CHECK(qc_kept_kld(levels, levels, kept->keep, kept->drawn) == 0);
    }
    FUZZ_CHECK(qc_kept_alloc(kept->n, kept->keep, kept->drawn, &again, NULL) == QC_OK);
    FUZZ_CHECK(qc_kept_pack(kept, 0, kept->n, &packed, NULL) == QC_OK);
    FUZZ_CHECK(packed.n_bytes <= qc_kept_most_bytes(kept->keep, kept->drawn, kept->n));
    FUZZ_CHECK(qc_kept_unpack((const uint8_t *)packed.data, packed.n_bytes, vocab, &again, 0, kept->n));
    FUZZ_CHECK(memcmp(again.ids, kept->ids, (size_t)(kept->n * width) * sizeof *kept->ids) == 0 &&
               memcmp(again.levels, kept->levels, (size_t)(kept->n * width) * sizeof *kept->levels) == 0 &&
               memcmp(again.nll, kept->nll, (size_t)kept->n * sizeof *kept->nll) == 0);
    qc_kept_clear(&again);
    qc_buf_clear(&packed);
}

/* As qeval does: open, look what it is of, take the windows. */
static void read_file(const uint8_t *data, size_t n_bytes)
{
    const char *path = fuzz_file(".klr", data, n_bytes);
    qc_reference *ref;
    qc_cut_rule rule;
    qc_kept kept = {0};
    qc_err err = {0};
    enum { VOCAB = 40 };
    int rc = qc_reference_open(path, &ref, &err);
    if (rc < 0) {
        check_error(rc, &err, path);
        return;
    }
    qc_reference_rule(ref, &rule);
    FUZZ_CHECK(rule.length >= 2 && rule.n_windows >= 1 && qc_reference_origin_of(ref)->model != NULL);
    rc = qc_reference_fits(ref, &windows, VOCAB, "", &err);
    if (rc == QC_OK)
        rc = qc_reference_get(ref, &windows, 0, windows.n_windows, &kept, &err);
    if (rc == QC_OK)
        check_kept(&kept, VOCAB);
    else
        check_error(rc, &err, path);
    qc_kept_clear(&kept);
    qc_reference_close(ref);
}

static void put_sum(uint8_t *at, const uint8_t *data, size_t n_bytes)
{
    qc_put_le(at, crc32_z(0, data, n_bytes), 4);
}

static void repair(uint8_t *file, size_t n_bytes)
{
    if (n_bytes < FIXED || qc_get_le(file + 12, 4) > n_bytes - FIXED)
        return;
    size_t at = FIXED + (size_t)qc_get_le(file + 12, 4);
    put_sum(file + 16, file + FIXED, at - FIXED);
    while (n_bytes - at >= BLOCK && qc_get_le(file + at, 4) <= n_bytes - at - BLOCK) {
        size_t n = (size_t)qc_get_le(file + at, 4);
        put_sum(file + at + 8, file + at + BLOCK, n);
        at += BLOCK + n;
    }
}

/* The first bytes say how many positions and ids of which vocabulary. */
static void read_window(const uint8_t *data, size_t n_bytes)
{
    qc_kept kept;
    if (n_bytes < 4)
        return;
    int64_t n = 1 + data[0] % 4, keep = 1 + data[1] % 16, drawn = data[2] % 8, vocab = keep + data[3];
    FUZZ_CHECK(qc_kept_alloc(n, keep, drawn, &kept, NULL) == QC_OK);
    if (qc_kept_unpack(data + 4, n_bytes - 4, vocab, &kept, 0, n))
        check_kept(&kept, vocab);
    qc_kept_clear(&kept);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    fuzz_repaired(data, n_bytes, read_file, repair);
    read_window(data, n_bytes);
    return 0;
}
