/* How the formats for engines store a matrix on a grid: as several tensors of a checkpoint ("parts"), all of
 * them described here both ways. The layouts are those of docs/formats/engines.md. Parts are held as whole
 * arrays (an engine's layout runs along the other axis than our rows do); these functions only move bits. */
#ifndef QC_PACKING_H
#define QC_PACKING_H

#include "qc_tensor.h"

enum { QC_MAX_PARTS = 4 };

typedef struct qc_part {
    const char *suffix; /* the tensor is called MODULE.suffix, where the matrix is MODULE.weight */
    qc_dtype dtype;
    int n_dims;
    int64_t shape[2];
} qc_part;

/* Bytes of a part. */
size_t qc_part_bytes(const qc_part *part);

typedef struct qc_packing {
    bool by_rows; /* row r of every part is of row r of the matrix: a range of rows can be packed as a matrix
                   */
    /* Parts of a matrix on the grid of *info, which the layout can hold; returns how many. */
    int (*parts)(const qc_tensor_info *info, qc_part parts[QC_MAX_PARTS]);
    /* Store rows row0 .. of the matrix, a multiple of QC_WRITER_ROWS except at its end, in parts that were
     * all zero before the first call. QC_E_INPUT: a scale is not finite or not exact in the part's type, a
     * code or zero point does not fit. */
    int (*pack)(const qc_tensor_info *info, int64_t row0, const qc_code_rows *rows,
                void *const data[QC_MAX_PARTS], qc_err *err);
    /* The other way: rows row0 .. row0 + n_rows. rows->zeros may be NULL if the grid is symmetric. */
    void (*unpack)(const qc_tensor_info *info, int64_t row0, int64_t n_rows,
                   const void *const data[QC_MAX_PARTS], qc_code_rows *rows);
} qc_packing;

/* qweight, qzeros, scales, g_idx; zero points stored one too small (v1) or as they are (v2). 4 and 8 bits,
 * both dimensions multiples of 32, groups that divide the width. */
extern const qc_packing qc_packing_gptq_v1, qc_packing_gptq_v2;

/* qweight, qzeros, scales in the GEMM order; 4 bits, rows a multiple of 8. A symmetric grid has zero points 8
 * stored. */
extern const qc_packing qc_packing_awq;

/* weight_packed, weight_scale, weight_shape and, if the grid is not symmetric, weight_zero_point; 4 and 8
 * bits, width a multiple of 32 / bits, rows as well if there are zero points. */
extern const qc_packing qc_packing_ct_packed;

/* weight_packed and weight_zero_point as bytes, both along the inputs, low bits first; weight_scale. 4 and 8
 * bits, groups of an even number of columns that divide the width. By rows. */
extern const qc_packing qc_packing_onnx;

/* weight as signed bytes and weight_scale, 8 bits, symmetric, one scale per row. */
extern const qc_packing qc_packing_ct_int;

#endif
