/* Graph files of ONNX folders: no input may crash; what is accepted lies inside the data file, whose size is
 * that of the vectors. */
#include "fuzz.h"
#include "onnx_read.h"

#include <string.h>

enum { DATA_BYTES = 3456 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    qc_onnx_graph graph;
    qc_err err = {0};
    int rc = qc_onnx_parse(data, n_bytes, DATA_BYTES, "fuzz", &graph, &err);
    if (rc < 0) {
        FUZZ_CHECK(rc == QC_E_INPUT || rc == QC_E_UNSUPPORTED);
        FUZZ_CHECK(err.code == rc && strncmp(err.msg, "fuzz: ", 6) == 0 && !strchr(err.msg, '\n'));
        return 0;
    }
    for (int64_t i = 0; i < graph.n_tensors; i++) {
        const qc_onnx_tensor *t = &graph.tensors[i];
        FUZZ_CHECK(t->offset <= DATA_BYTES && t->info.n_bytes <= DATA_BYTES - t->offset);
    }
    for (int64_t i = 0; i < graph.n_matrices; i++) {
        const qc_onnx_matrix *m = &graph.matrices[i];
        FUZZ_CHECK(m->packed >= 0 && m->scale >= 0 && m->info.grid.group_elems >= 16);
        FUZZ_CHECK((m->zero < 0) == m->info.grid.symmetric);
    }
    qc_onnx_clear(&graph);
    return 0;
}
