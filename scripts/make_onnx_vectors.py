#!/usr/bin/env python3
"""Make tests/data/onnx: a folder of the layout in docs/formats/onnx.md, put together by the package onnx, with the values that
ONNX Runtime itself decodes from it.

usage: scripts/make_onnx_vectors.py FOLDER      (with onnx 1.23.2, onnxruntime 1.32.0, numpy)

Matrices of 8 x 64 with seeded codes, scales of either sign and zero points: 4 and 8 bits, blocks of 16 and 32, with and without
zero points, and a table that is gathered from and multiplied by. `values` of a matrix are what GatherBlockQuantized makes of it;
MatMulNBits sums in another order, so its product with the unit matrix is compared by tolerance only. values.st is a
safetensors file: m0.codes, m0.scales, m0.zeros, m0.values and so on."""
import json
import os
import struct
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

ROWS, COLS = 8, 64
CASES = [("m0", 4, 16, False, False), ("m1", 4, 32, True, False), ("m2", 8, 32, False, False), ("m3", 8, 16, True, False),
         ("table", 4, 64, True, True)]  # name, bits, block, zero points, also gathered from


def pack(codes, bits):
    if bits == 8:
        return codes.astype(np.uint8)
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


class Data:
    def __init__(self):
        self.bytes, self.initializers, self.at = bytearray(), [], {}

    def add(self, name, array, dims=None, same_as=None):
        t = TensorProto(name=name, dims=dims or array.shape, data_location=TensorProto.EXTERNAL,
                        data_type={"uint8": TensorProto.UINT8, "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}[str(array.dtype)])
        if same_as is None:
            self.at[name] = len(self.bytes)
            self.bytes += array.tobytes() + bytes(-array.nbytes % 64)
        for key, value in (("location", "model.onnx.data"), ("offset", str(self.at[same_as or name])), ("length", str(array.nbytes))):
            t.external_data.add(key=key, value=value)
        self.initializers.append(t)


def model(nodes, outputs, data):
    graph = helper.make_graph(nodes, "vectors", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, COLS]),
                                                 helper.make_tensor_value_info("ids", TensorProto.INT64, [None])],
                              [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs], data.initializers)
    ret = helper.make_model(graph, ir_version=10, producer_name="onnx",
                            opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)])
    helper.set_model_props(ret, {"qconvert.layout": "1"})
    return ret


def rows(values, name, bits, block, asymmetric):
    """All rows of a matrix by GatherBlockQuantized, which decodes and does nothing else."""
    inputs = {"packed": pack(values[f"{name}.codes"], bits), "ids": np.arange(ROWS), "scale": values[f"{name}.scales"]}
    if asymmetric:
        inputs["zero"] = pack(values[f"{name}.zeros"], bits)
    node = helper.make_node("GatherBlockQuantized", list(inputs), ["rows"], bits=bits, block_size=block, gather_axis=0, quantize_axis=1,
                            domain="com.microsoft")
    graph = helper.make_graph([node], "rows", [helper.make_tensor_value_info("ids", TensorProto.INT64, [None])],
                              [helper.make_tensor_value_info("rows", TensorProto.FLOAT, None)],
                              [onnx.numpy_helper.from_array(a, n) for n, a in inputs.items() if n != "ids"])
    m = helper.make_model(graph, ir_version=10,
                          opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)])
    session = onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"ids": inputs["ids"]})[0]


def write_safetensors(path, arrays):
    names = {"uint8": "U8", "float32": "F32"}
    header, at = {}, 0
    for name, a in arrays.items():
        header[name] = {"dtype": names[str(a.dtype)], "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in arrays.values()))


def main(folder):
    rng, data, nodes, outputs, values = np.random.default_rng(7), Data(), [], [], {}
    for name, bits, block, asymmetric, gathered in CASES:
        groups = COLS // block
        codes = rng.integers(0, 1 << bits, (ROWS, COLS)).astype(np.uint8)
        scales = rng.normal(0, 0.1, (ROWS, groups)).astype(np.float32)
        zeros = rng.integers(0, 1 << bits, (ROWS, groups)).astype(np.uint8)
        packed = pack(codes, bits)
        inputs = [f"{name}.weight_packed", f"{name}.weight_scale"]
        data.add(inputs[0], packed, None if gathered else [ROWS, groups, block * bits // 8])
        data.add(inputs[1], scales)
        if asymmetric:
            inputs.append(f"{name}.weight_zero_point")
            data.add(inputs[2], pack(zeros, bits))
        attributes = {"bits": bits, "block_size": block, "domain": "com.microsoft"}
        if gathered:
            data.add("tied_head.weight_packed", packed, [ROWS, groups, block * bits // 8], inputs[0])
            nodes.append(helper.make_node("GatherBlockQuantized", [inputs[0], "ids", *inputs[1:]], [f"{name}.rows"],
                                          gather_axis=0, quantize_axis=1, **attributes))
            outputs.append(f"{name}.rows")
            inputs[0] = "tied_head.weight_packed"
        nodes.append(helper.make_node("MatMulNBits", ["x", *inputs], [f"{name}.product"], K=COLS, N=ROWS, **attributes))
        outputs.append(f"{name}.product")
        values.update({f"{name}.codes": codes, f"{name}.scales": scales})
        if asymmetric:
            values[f"{name}.zeros"] = zeros
    dense = rng.normal(0, 1, (ROWS, COLS)).astype(np.float16)
    data.add("dense.weight", dense)
    nodes += [helper.make_node("Cast", ["dense.weight"], ["dense.f32"], to=TensorProto.FLOAT),
              helper.make_node("FusedMatMul", ["x", "dense.f32"], ["dense.product"], transB=1, domain="com.microsoft")]
    outputs.append("dense.product")
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/model.onnx", "wb") as f:
        f.write(model(nodes, outputs, data).SerializeToString())
    with open(f"{folder}/model.onnx.data", "wb") as f:
        f.write(data.bytes)
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx", providers=["CPUExecutionProvider"])
    got = dict(zip(outputs, session.run(outputs, {"x": np.eye(COLS, dtype=np.float32), "ids": np.arange(ROWS)})))
    for name, bits, block, asymmetric, _ in CASES:
        values[f"{name}.values"] = rows(values, name, bits, block, asymmetric)
        assert np.allclose(got[f"{name}.product"].T, values[f"{name}.values"], atol=1e-6)
    assert (got["table.rows"] == values["table.values"]).all() and (got["dense.product"].T == dense).all()
    values["dense.values"] = dense.astype(np.float32)
    write_safetensors(f"{folder}/values.st", values)
    print(f"onnx {onnx.__version__}, onnxruntime {onnxruntime.__version__}")


main(sys.argv[1])
