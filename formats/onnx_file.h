/* Numbers and names of ONNX files (onnx.proto, IR version 10) and of our layout of them
 * (docs/formats/onnx.md). */
#ifndef QC_ONNX_FILE_H
#define QC_ONNX_FILE_H

#include "qc_dtype.h"

#define QC_ONNX_GRAPH_FILE "model.onnx"
#define QC_ONNX_DATA_FILE  "model.onnx.data"

#define QC_ONNX_IR_VERSION    10
#define QC_ONNX_OPSET         21 /* of the domain "" */
#define QC_ONNX_CONTRIB       "com.microsoft"
#define QC_ONNX_CONTRIB_OPSET 1

/* metadata_props entry that says that names and nodes are as our writer makes them. */
#define QC_ONNX_LAYOUT_KEY "qconvert.layout"
#define QC_ONNX_LAYOUT     "1"

/* Names of initializers that are none of the model's tensors begin so. */
#define QC_ONNX_ROTARY "rotary."
#define QC_ONNX_CONST  "const."

/* Field numbers, by message. */
enum {
    QC_MODEL_IR_VERSION = 1,
    QC_MODEL_PRODUCER = 2,
    QC_MODEL_GRAPH = 7,
    QC_MODEL_OPSET = 8,
    QC_MODEL_METADATA = 14,

    QC_OPSET_DOMAIN = 1,
    QC_OPSET_VERSION = 2,

    QC_ENTRY_KEY = 1,
    QC_ENTRY_VALUE = 2,

    QC_GRAPH_NODE = 1,
    QC_GRAPH_NAME = 2,
    QC_GRAPH_INITIALIZER = 5,
    QC_GRAPH_INPUT = 11,
    QC_GRAPH_OUTPUT = 12,

    QC_NODE_INPUT = 1,
    QC_NODE_OUTPUT = 2,
    QC_NODE_NAME = 3,
    QC_NODE_OP = 4,
    QC_NODE_ATTRIBUTE = 5,
    QC_NODE_DOMAIN = 7,

    QC_ATTRIBUTE_NAME = 1,
    QC_ATTRIBUTE_F = 2,
    QC_ATTRIBUTE_I = 3,
    QC_ATTRIBUTE_TYPE = 20,

    QC_TENSOR_DIM = 1,
    QC_TENSOR_TYPE = 2,
    QC_TENSOR_NAME = 8,
    QC_TENSOR_RAW = 9,
    QC_TENSOR_EXTERNAL = 13,
    QC_TENSOR_LOCATION = 14,

    QC_VALUE_NAME = 1,
    QC_VALUE_TYPE = 2,
    QC_TYPE_TENSOR = 1,
    QC_TENSOR_TYPE_ELEM = 1,
    QC_TENSOR_TYPE_SHAPE = 2,
    QC_SHAPE_DIM = 1,
    QC_DIM_VALUE = 1,
    QC_DIM_PARAM = 2
};

enum { QC_ATTRIBUTE_IS_FLOAT = 1, QC_ATTRIBUTE_IS_INT = 2 };

enum { QC_ONNX_EXTERNAL = 1 }; /* data_location */

/* Types of elements. */
enum {
    QC_ONNX_FLOAT = 1,
    QC_ONNX_UINT8 = 2,
    QC_ONNX_INT32 = 6,
    QC_ONNX_INT64 = 7,
    QC_ONNX_FLOAT16 = 10,
    QC_ONNX_BFLOAT16 = 16
};

#endif
