/* Work journals: no input may crash; what is left of a file are whole layers, and what they hold can be read
 * or is refused. */
#include "fuzz.h"
#include "journal.h"
#include "qc_alloc.h"
#include "qc_math.h"

#include <string.h>
#include <zlib.h>

/* Of docs/formats/journal.md. */
enum { HEADER = 32, RECORD = 32, CRC = 4 };

/* What the files of the corpus hold: codes of 5 rows and 37 columns in groups of 8 under "codes", "scaled"
 * (with zero points), "minima" and "supers" (64 columns, super-blocks of 32), 9 values under "norm", a text
 * "layer.0". */
enum { ROWS = 5, COLS = 64, GROUPS = 8 };

static const qc_journal_key keys[] = {{"tool", "1"}, {"recipe", "4"}};

static void check_failure(int rc, const qc_err *err)
{
    FUZZ_CHECK(rc == QC_E_INPUT || rc == QC_E_USAGE || rc == QC_E_RESOURCE);
    FUZZ_CHECK(err->code == rc && err->msg[0] && !strchr(err->msg, '\n'));
}

static void read_codes(const qc_journal *j, const char *name, const qc_grid *grid, int64_t n_cols)
{
    qc_err err = {0};
    qc_code_rows rows;
    FUZZ_CHECK(qc_code_rows_alloc(grid, ROWS, n_cols, &rows, &err) == QC_OK);
    int rc = qc_journal_read_codes(j, name, grid, n_cols, 0, ROWS, &rows, &err);
    if (rc < 0)
        check_failure(rc, &err);
    for (int64_t i = 0; i < ROWS * n_cols && rc == QC_OK; i++)
        FUZZ_CHECK(rows.codes[i] < 1 << grid->bits);
    qc_code_rows_free(&rows);
}

static void read_all(const qc_journal *j)
{
    static const qc_grid codes = {
        .kind = QC_GRID_AFFINE, .bits = 3, .symmetric = true, .group_elems = 8, .scale_dtype = QC_DT_F16};
    qc_grid scaled = codes, minima = codes, supers = codes;
    scaled.symmetric = false;
    minima.kind = QC_GRID_MIN;
    supers.kind = QC_GRID_SUPER;
    supers.super_elems = 32;
    supers.sub_bits = 6;
    read_codes(j, "codes", &codes, 37);
    read_codes(j, "scaled", &scaled, 37);
    read_codes(j, "minima", &minima, 64);
    read_codes(j, "supers", &supers, 64);
    float values[9];
    char *text = NULL;
    qc_err err = {0};
    int rc = qc_journal_read_dense(j, "norm", values, 9, &err);
    if (rc < 0)
        check_failure(rc, &err);
    rc = qc_journal_read_text(j, "layer.0", &text, &err);
    if (rc < 0)
        check_failure(rc, &err);
    else
        FUZZ_CHECK(qc_journal_has(j, "layer.0"));
    qc_free(text);
}

static void parse(const uint8_t *data, size_t n_bytes)
{
    qc_journal *j = NULL, *again = NULL;
    qc_err err = {0};
    const char *path = fuzz_file(".journal", data, n_bytes);
    int rc = qc_journal_open(path, keys, 2, true, false, &j, &err);
    if (rc < 0) {
        check_failure(rc, &err);
        return;
    }
    int64_t n_layers = qc_journal_n_layers(j);
    read_all(j);
    qc_journal_close(j);
    /* What was cut off once is no more: the same layers are there the next time. */
    FUZZ_CHECK(qc_journal_open(path, keys, 2, true, false, &again, &err) == QC_OK);
    FUZZ_CHECK(qc_journal_n_layers(again) == n_layers);
    qc_journal_close(again);
}

static void put_crc(uint8_t *at, const uint8_t *data, uint64_t n_bytes)
{
    qc_put_le(at, crc32_z(0, data, n_bytes), CRC);
}

/* All checksums put right, so that changes of what they cover come through. */
static void repair(uint8_t *data, size_t n_bytes)
{
    if (n_bytes < HEADER)
        return;
    uint64_t n_keys = qc_get_le(data + 16, 8), at = HEADER + n_keys;
    if (n_keys > n_bytes - HEADER)
        return;
    put_crc(data + 24, data + HEADER, n_keys);
    put_crc(data + 28, data, 28);
    while (n_bytes - at >= RECORD + CRC) {
        uint64_t room = n_bytes - at - RECORD - CRC, n_name = qc_get_le(data + at + 4, 4),
                 n_payload = qc_get_le(data + at + 8, 8);
        if (n_name > room || n_payload > room - n_name)
            return;
        uint64_t n = RECORD + n_name + n_payload;
        put_crc(data + at + n, data + at, n);
        at += n + CRC;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    fuzz_repaired(data, n_bytes, parse, repair);
    return 0;
}
