/* ONNX folders that our writer made (docs/formats/onnx.md) as sources: model.onnx, model.onnx.data and the
 * side files of a checkpoint. */
#ifndef QC_ONNX_H
#define QC_ONNX_H

#include "qc_source.h"

/* Is it a folder with model.onnx and no safetensors files of that name? */
bool qc_onnx_probe_path(const char *path);

/* QC_E_INPUT: broken; QC_E_UNSUPPORTED: a graph that is not of our layout. */
int qc_onnx_open(const char *path, qc_source **ret, qc_err *err) QC_WARN_UNUSED;

#endif
