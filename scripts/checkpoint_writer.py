"""Writes checkpoint folders for the scripts beside it: safetensors tensor by tensor, JSON files. Needs numpy."""
import json
import math
import os
import struct
import sys

import numpy as np

BF16_BYTES = 2


def bf16(x):
    """Bits of float32 values rounded to bfloat16, ties to even. The values must be finite."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype("<u2")


class Bf16File:
    """A safetensors file of BF16 tensors. All names and shapes are declared first, then rows are appended in that
    order, so that memory holds no more than what is appended at once."""

    def __init__(self, path, shapes):
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name, shape in shapes.items():
            begin, end = end, end + BF16_BYTES * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.n_bytes = 8 + len(text) + end
        self.file = open(path, "xb")
        self.file.write(struct.pack("<Q", len(text)) + text)

    def append(self, rows):
        self.file.write(bf16(rows).tobytes())

    def close(self, hollow=False):
        """hollow: what was not appended becomes a hole."""
        if hollow:
            self.file.seek(self.file.truncate(self.n_bytes))
        if self.file.tell() != self.n_bytes:
            raise ValueError(f"{self.file.name}: {self.file.tell()} bytes written, {self.n_bytes} declared")
        self.file.close()


def write_json(path, value):
    with open(path, "x", encoding="utf-8", newline="\n") as f:
        json.dump(value, f, indent=2, ensure_ascii=False)
        f.write("\n")


def make_folder(path):
    """A new or empty folder, so that nothing old mixes with what is written."""
    os.makedirs(path, exist_ok=True)
    if os.listdir(path):
        sys.exit(f"{path}: is not empty")
