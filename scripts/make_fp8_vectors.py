#!/usr/bin/env python3
"""Write tests/data/fp8: weights in FP8 with a scale per block, as Qwen3 and DeepSeek publish them, and their values by torch.

  make_fp8_vectors.py OUTDIR

The first matrix holds every code that is a number. Values are the codes in float32 times the scale of their block, rounded
to BF16. Needs torch and safetensors.
"""
import json
import os
import sys

import torch
from safetensors.torch import save_file

BLOCK = 128


def blocks(scale, shape):
    return scale.float().repeat_interleave(BLOCK, 0)[:shape[0]].repeat_interleave(BLOCK, 1)[:, :shape[1]]


def main():
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    rng = torch.Generator().manual_seed(8)
    codes = [c for c in range(256) if c & 0x7F != 0x7F]
    tensors, values = {}, {}
    for name, shape, dtype in (("a", (140, 300), torch.float32), ("b", (128, 128), torch.bfloat16), ("c", (1, 129), torch.float16)):
        weight = (torch.randn(shape, generator=rng) * 50).to(torch.float8_e4m3fn)
        if name == "a":
            weight.view(torch.uint8).view(-1)[:len(codes)] = torch.tensor(codes, dtype=torch.uint8)
        grid = [-(-n // BLOCK) for n in shape]
        scale = torch.exp(torch.randn(grid, generator=rng) * 2 - 7).to(dtype)
        tensors |= {f"{name}.weight": weight, f"{name}.weight_scale_inv": scale}
        values[f"{name}.weight"] = (weight.float() * blocks(scale, shape)).to(torch.bfloat16)
    tensors["d.weight"] = values["d.weight"] = torch.randn((3, 5), generator=rng).to(torch.bfloat16)
    save_file(tensors, os.path.join(folder, "model.safetensors"))
    save_file(values, os.path.join(folder, "values.safetensors"))
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump({"model_type": "qwen3", "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                                                  "weight_block_size": [BLOCK, BLOCK]}}, f, indent=2)
        f.write("\n")


main()
