#!/usr/bin/env python3
"""Write tests/formats/checkpoints.txt: what the safetensors library sees in the test models.

  make_checkpoint_vectors.py MODELS_FOLDER > tests/formats/checkpoints.txt

MODELS_FOLDER is tests/data/models. One line per tensor: folder, name, dtype, shape (commas, "-" for rank 0), CRC-32 of
the values as little-endian float32, first and last value as float32 bit patterns. Needs numpy, safetensors, ml_dtypes.
"""
import os
import sys
import zlib

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 from it)
import numpy as np
from safetensors import safe_open


def main():
    root = sys.argv[1]
    folders = ["demo-qwen3"] + sorted("tiny/" + d for d in os.listdir(root + "/tiny") if os.path.isdir(f"{root}/tiny/{d}"))
    for folder in folders:
        path = os.path.join(root, folder)
        lines = []
        for file in os.listdir(path):
            if not file.startswith("model") or not file.endswith(".safetensors"):
                continue
            with safe_open(os.path.join(path, file), "np") as f:
                for name in f.keys():
                    dtype = f.get_slice(name).get_dtype()
                    x = f.get_tensor(name)
                    bits = np.ascontiguousarray(x.astype(np.float32)).reshape(-1).view(np.uint32)
                    shape = ",".join(map(str, x.shape)) or "-"
                    lines.append(f"{folder} {name} {dtype} {shape} {zlib.crc32(bits.tobytes()):08x} {bits[0]:08x} {bits[-1]:08x}")
        print("\n".join(sorted(lines)))


main()
