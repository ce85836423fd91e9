/* Headers of safetensors files: no input may crash, and what is accepted must lie inside the file without
 * overlap. */
#include "fuzz.h"
#include "safetensors.h"

#include <string.h>

static void check_accepted(const qc_st_file *file, size_t n_bytes)
{
    for (int64_t i = 0; i < file->n_tensors; i++) {
        const qc_st_tensor *t = &file->tensors[i];
        const qc_st_tensor *next = i + 1 < file->n_tensors ? t + 1 : NULL;
        FUZZ_CHECK(t->offset + t->info.n_bytes == (next ? next->offset : n_bytes));
        FUZZ_CHECK(t->info.n_dims >= 0 && t->info.n_dims <= QC_MAX_DIMS);
        FUZZ_CHECK((uint64_t)qc_tensor_n_elems(&t->info) * (uint64_t)qc_dtype_bits(t->info.dtype) ==
                   8 * t->info.n_bytes);
        FUZZ_CHECK(qc_tensor_rows(&t->info) * qc_tensor_cols(&t->info) == qc_tensor_n_elems(&t->info));
    }
}

static void parse(const uint8_t *data, size_t n_bytes)
{
    qc_st_file file = {0};
    qc_err err = {0};
    int rc = qc_st_parse(data, n_bytes, "fuzz", &file, &err);
    if (rc == QC_OK) {
        check_accepted(&file, n_bytes);
        qc_st_close(&file);
    } else {
        FUZZ_CHECK(rc == QC_E_INPUT || rc == QC_E_UNSUPPORTED);
        FUZZ_CHECK(err.code == rc && strncmp(err.msg, "fuzz: ", 6) == 0 && !strchr(err.msg, '\n'));
        FUZZ_CHECK(file.tensors == NULL && file.names == NULL);
    }
}

/* Once as it is, once with the length put right for a header that ends at the last brace, so that changes of
 * the header's size do not all end at the length check. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    parse(data, n_bytes);
    const uint8_t *brace = n_bytes > 8 ? memrchr(data + 8, '}', n_bytes - 8) : NULL;
    if (!brace)
        return 0;
    uint64_t n_header = (uint64_t)(brace + 1 - (data + 8));
    uint8_t *copy = malloc(n_bytes);
    memcpy(copy, data, n_bytes);
    for (int i = 0; i < 8; i++)
        copy[i] = (uint8_t)(n_header >> (8 * i));
    parse(copy, n_bytes);
    free(copy);
    return 0;
}
