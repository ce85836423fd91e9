/* The graph file of an ONNX folder of our layout (docs/formats/onnx.md): its initializers, and which of them
 * are matrices on a grid. What was parsed is checked against itself and the size of the data file. */
#ifndef QC_ONNX_READ_H
#define QC_ONNX_READ_H

#include "qc_map.h"
#include "qc_tensor.h"

/* A tensor in the data file. */
typedef struct qc_onnx_tensor {
    qc_tensor_info info; /* name owned */
    uint64_t offset;     /* of info.n_bytes in the data file */
    bool claimed;        /* part of a matrix on a grid */
} qc_onnx_tensor;

/* A matrix on a grid. */
typedef struct qc_onnx_matrix {
    qc_tensor_info info;         /* name owned: MODULE.weight */
    int64_t packed, scale, zero; /* tensors; zero -1 if symmetric */
} qc_onnx_matrix;

typedef struct qc_onnx_graph {
    qc_onnx_tensor *tensors; /* [n_tensors] */
    int64_t n_tensors, cap_tensors;
    qc_onnx_matrix *matrices; /* [n_matrices] */
    int64_t n_matrices, cap_matrices;
    qc_map *by_name; /* tensors */
    qc_map *matrix_of;
} qc_onnx_graph;

/* Parse a whole file; `path` is for messages, data_bytes the size of the data file. QC_E_INPUT: broken;
 * QC_E_UNSUPPORTED: not of our layout. Nothing to clear on failure. */
int qc_onnx_parse(const void *data, size_t n_bytes, uint64_t data_bytes, const char *path, qc_onnx_graph *ret,
                  qc_err *err) QC_WARN_UNUSED;
/* NULL is fine. */
void qc_onnx_clear(qc_onnx_graph *graph);

#endif
