/* Fuzz harness of the packed-file reader: open, walk everything, decode. The checksums of header and tables
 * are made right in a second run of every input, so that mutations get past them. */
#include "fuzz.h"

#include "runtime/qpk.h"
#include "runtime/qpk_format.h"

#include <string.h>
#include <zlib.h>

static uint32_t sink; /* keeps reads from being optimised away */

static void repair(uint8_t *file, size_t n_bytes)
{
    if (n_bytes < QPK_HEADER_BYTES)
        return;
    uint64_t file_bytes = n_bytes;
    memcpy(file + QPK_H_FILE_BYTES, &file_bytes, sizeof file_bytes);
    for (int s = QPK_SEC_STRINGS; s < QPK_N_SECTIONS; s++) {
        uint8_t *entry = file + QPK_H_SECTIONS + s * QPK_SECTION_BYTES;
        uint64_t offset, size;
        memcpy(&offset, entry + QPK_S_OFFSET, 8);
        memcpy(&size, entry + QPK_S_BYTES, 8);
        if (offset <= n_bytes && size <= n_bytes - offset) {
            uint32_t crc = (uint32_t)crc32_z(0, file + offset, size);
            memcpy(entry + QPK_S_CRC, &crc, sizeof crc);
        }
    }
    uint32_t crc = (uint32_t)crc32_z(0, file, QPK_H_CRC);
    memcpy(file + QPK_H_CRC, &crc, sizeof crc);
}

static void read_tensor(const qpk_file *f, int64_t index)
{
    const qpk_tensor *t = qpk_tensor_at(f, index);
    FUZZ_CHECK(qpk_find(f, t->name) == index);
    if (t->rows == 0 || t->cols > 1 << 20)
        return;
    size_t cols = (size_t)t->cols, n_groups = (size_t)t->layout.n_groups;
    int64_t n_rows = t->rows < 3 ? t->rows : 3;
    float *y = malloc(3 * cols * sizeof *y), *scales = malloc(3 * n_groups * sizeof *scales + 1);
    uint8_t *codes = malloc(3 * cols), *zeros = malloc(3 * n_groups + 1);
    if (y && scales && codes && zeros) {
        (void)qpk_dequantize_rows(f, index, t->rows - n_rows, n_rows, y, NULL, 0);
        (void)qpk_unpack_rows(f, index, t->rows - n_rows, n_rows, codes, scales, zeros, NULL, 0);
        FUZZ_CHECK(qpk_dequantize_rows(f, index, t->rows, 1, y, NULL, 0) == QPK_E_USAGE);
    }
    free(y);
    free(scales);
    free(codes);
    free(zeros);
}

static void read_meta(const qpk_meta *m)
{
    if (m->type == QPK_META_STRING)
        sink += (uint32_t)strlen(m->value.string);
    else if (m->type > QPK_META_STRING)
        for (uint32_t i = 0; i < m->n_elems; i++)
            sink += (uint32_t)m->value.u64_array[i];
}

static void read_all(const void *data, size_t n_bytes)
{
    char err[64];
    qpk_file *f = NULL;
    if (qpk_open_memory(data, n_bytes, "fuzz", &f, err, sizeof err) < 0)
        return;
    (void)qpk_check(f, err, sizeof err);
    for (int64_t i = 0; i < qpk_n_tensors(f); i++)
        read_tensor(f, i);
    for (int64_t i = 0; i < qpk_n_meta(f); i++)
        read_meta(qpk_meta_at(f, i));
    for (int64_t i = 0; i < qpk_n_files(f); i++) {
        uint64_t raw_bytes = qpk_file_at(f, i)->raw_bytes;
        void *raw = raw_bytes < 1 << 24 ? malloc(raw_bytes + 1) : NULL;
        if (raw)
            (void)qpk_file_read(f, i, raw, err, sizeof err);
        free(raw);
    }
    for (int64_t i = 0; i < qpk_n_aliases(f); i++)
        FUZZ_CHECK(qpk_find(f, qpk_alias_name(f, i)) == qpk_alias_target(f, i));
    qpk_close(f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    void *copy; /* of the exact size, and aligned as a map is */
    if (posix_memalign(&copy, 64, n_bytes ? n_bytes : 1) != 0)
        return 0;
    memcpy(copy, data, n_bytes);
    read_all(copy, n_bytes);
    repair(copy, n_bytes);
    read_all(copy, n_bytes);
    free(copy);
    return 0;
}
