/* ONNX folders for ONNX Runtime and onnxruntime-genai (docs/formats/onnx.md): parts of the format that
 * onnx_format.c puts behind the tables of writer.h and engine_format.h. */
#ifndef QC_ONNX_WRITE_H
#define QC_ONNX_WRITE_H

#include "engine_format.h"
#include "qc_rope.h"

/* The model as far as the graph and genai_config.json need it. */
typedef struct qc_onnx_model {
    const char *family; /* llama, mistral, qwen2 or qwen3, which is also what genai calls it */
    int64_t hidden, n_layers, n_heads, n_kv_heads, head_dim, vocab, n_positions;
    int64_t window;         /* positions that a sliding layer attends to, its own included; 0 = none slides */
    const uint64_t *slides; /* [n_layers] of the configuration; NULL if none slides */
    bool qk_norm;           /* RMSNorm of each query and key head */
    double eps, attention_scale;
    qc_rope_config rope;
} qc_onnx_model;

/* QC_E_UNSUPPORTED: something that the graph does not compute. */
int qc_onnx_model_read(const qc_metas *metas, qc_onnx_model *ret, qc_err *err) QC_WARN_UNUSED;

/* model.onnx into *ret (empty). QC_E_INPUT: a tensor is missing. */
int qc_onnx_graph_make(const qc_onnx_model *model, const qc_engine_contents *contents, qc_buf *ret,
                       qc_err *err) QC_WARN_UNUSED;

#endif
