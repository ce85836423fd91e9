/* Element types of stored tensors: the names of the safetensors format, plus codes on a quantization grid. */
#ifndef QC_DTYPE_H
#define QC_DTYPE_H

#include <stdint.h>

/* Ids are written to qpk files: never reuse or renumber. */
typedef enum {
    QC_DT_INVALID = 0,
    QC_DT_F32 = 1,
    QC_DT_F16 = 2,
    QC_DT_BF16 = 3,
    QC_DT_F64 = 4,
    QC_DT_I8 = 5,
    QC_DT_U8 = 6,
    QC_DT_I16 = 7,
    QC_DT_U16 = 8,
    QC_DT_I32 = 9,
    QC_DT_U32 = 10,
    QC_DT_I64 = 11,
    QC_DT_U64 = 12,
    QC_DT_BOOL = 13,
    QC_DT_F8_E4M3 = 14,
    QC_DT_F8_E5M2 = 15,
    QC_DT_F8_E8M0 = 16,
    QC_DT_F8_E4M3FNUZ = 17,
    QC_DT_F8_E5M2FNUZ = 18,
    QC_DT_F4 = 19,
    QC_DT_F6_E2M3 = 20,
    QC_DT_F6_E3M2 = 21,
    QC_DT_C64 = 22,
    QC_DT_GRID = 64 /* integer codes with scales, described by a qc_grid */
} qc_dtype;

/* safetensors spelling ("BF16"); "GRID" for QC_DT_GRID, "?" for anything unknown. */
const char *qc_dtype_name(qc_dtype dtype);

/* QC_DT_INVALID if the name is none of the format's. */
qc_dtype qc_dtype_from_name(const char *name);

/* Bits per element (4, 6, 8 ...); 0 for QC_DT_GRID and QC_DT_INVALID. */
int qc_dtype_bits(qc_dtype dtype);

#endif
