/* One safetensors file: header parsed and checked, data mapped. Every rule of the format is enforced, so that
 * whoever holds a qc_st_file may trust names, shapes and offsets without a further check. */
#ifndef QC_SAFETENSORS_H
#define QC_SAFETENSORS_H

#include "qc_file.h"
#include "qc_tensor.h"

/* Largest header that the format allows. */
#define QC_ST_MAX_HEADER_BYTES 100000000u

typedef struct qc_st_tensor {
    qc_tensor_info info; /* name is owned by the file; grid is QC_GRID_NONE */
    uint64_t offset;     /* of the first byte, from the beginning of the file */
} qc_st_tensor;

typedef struct qc_st_file {
    qc_mapped map;
    int64_t n_tensors;
    qc_st_tensor *tensors; /* in the order of their data, without overlap or hole */
    char *names;           /* storage of the names */
} qc_st_file;

/* Map a file and read its header. QC_E_INPUT: any rule of the format broken; QC_E_UNSUPPORTED: more than
 * QC_MAX_DIMS dimensions. */
int qc_st_open(const char *path, qc_st_file *ret, qc_err *err) QC_WARN_UNUSED;

/* The same for the bytes of a whole file that the caller keeps mapped or allocated (`ret->map` stays empty);
 * `name` is for messages. */
int qc_st_parse(const void *data, size_t n_bytes, const char *name, qc_st_file *ret,
                qc_err *err) QC_WARN_UNUSED;

/* Unmap and free; the struct is empty afterwards. */
void qc_st_close(qc_st_file *file);

#endif
