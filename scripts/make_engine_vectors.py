#!/usr/bin/env python3
"""What the engines' own libraries make of matrices on grids.

usage: make_engine_vectors.py gptqmodel OUT        GPTQ v1 and v2, act order, AWQ (needs the package gptqmodel)
       make_engine_vectors.py compressed-tensors OUT      (needs the package compressed-tensors)

Each case is a folder that the library packed: config.json and model.safetensors with one matrix m.weight [32, 96], and
values.st with its codes (U8), scales (F32), zeros (U8) and the values that the library's own code decodes (F32)."""
import json
import os
import sys

import torch
from safetensors.torch import save_file

OUT, IN = 32, 96


def random_grid(seed, bits, group, symmetric, scale_dtype):
    """Codes with every value among them, scales of many sizes and both signs, zeros with both ends."""
    g = torch.Generator().manual_seed(seed)
    top, n_groups = 2**bits - 1, IN // group
    codes = torch.randint(0, top + 1, (OUT, IN), generator=g)
    scales = (torch.rand(OUT, n_groups, generator=g) + 0.1) * 2.0 ** torch.randint(-9, 3, (OUT, n_groups), generator=g)
    zeros = torch.full((OUT, n_groups), 2 ** (bits - 1)) if symmetric else torch.randint(0, top + 1, (OUT, n_groups), generator=g)
    if not symmetric:
        zeros[0, 0], zeros[1, 0], zeros[9, 0] = 0, top, 0
    return codes, scales.to(scale_dtype).float(), zeros


def save(folder, config, parts, codes, scales, zeros, values):
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/config.json", "w", encoding="utf-8") as f:
        json.dump({"quantization_config": config}, f, indent=1)
        f.write("\n")
    save_file({f"m.{k}": v.contiguous() for k, v in parts.items()}, f"{folder}/model.safetensors", metadata={"format": "pt"})
    save_file({"codes": codes.to(torch.uint8), "scales": scales, "zeros": zeros.to(torch.uint8),
               "values": values.float().contiguous()}, f"{folder}/values.st")


def linear_of(weight):
    linear = torch.nn.Linear(IN, OUT, bias=False)
    linear.weight.data = weight
    return linear


def gptqmodel_cases(out):
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    cases = [("gptq-v1-4", 4, 32, True, "gptq", False), ("gptq-v2-4", 4, 32, True, "gptq_v2", False),
             ("gptq-v1-4-asym", 4, 32, False, "gptq", False), ("gptq-v2-4-asym", 4, 32, False, "gptq_v2", False),
             ("gptq-v1-8-channel", 8, IN, True, "gptq", False), ("gptq-v2-8-asym", 8, 32, False, "gptq_v2", False),
             ("gptq-v2-4-order", 4, 32, False, "gptq_v2", True)]
    for seed, (name, bits, group, symmetric, fmt, order) in enumerate(cases):
        codes, scales, zeros = random_grid(seed, bits, group, symmetric, torch.float16)
        g_idx = torch.arange(IN) // group
        if order:
            g_idx = g_idx[torch.randperm(IN, generator=torch.Generator().manual_seed(7))]
        weight = scales[:, g_idx] * (codes - zeros[:, g_idx])
        m = TorchLinear(bits=bits, group_size=group, sym=symmetric, desc_act=order, in_features=IN, out_features=OUT, bias=False,
                        pack_dtype=torch.int32, register_buffers=True)
        m.pack_original(linear_of(weight), scales, zeros.float(), g_idx.to(torch.int32))
        m.post_init()
        m.eval()
        m.scales = m.scales.float()
        values = m.dequantize_weight().T  # [out, in]
        m.scales = m.scales.half()
        if fmt == "gptq":
            class Config:
                pass
            Config.bits, Config.pack_dtype = bits, torch.int32
            convert_gptq_v2_to_v1_format_module(m, Config)
        config = {"quant_method": "gptq", "checkpoint_format": fmt, "bits": bits, "group_size": group if group < IN else -1,
                  "sym": symmetric, "desc_act": order}
        save(f"{out}/{name}", config, {k: getattr(m, k) for k in ("qweight", "qzeros", "scales", "g_idx")}, codes, scales, zeros, values)
    for seed, (name, symmetric) in enumerate([("awq-4-asym", False), ("awq-4-sym", True)]):
        codes, scales, zeros = random_grid(100 + seed, 4, 32, symmetric, torch.float16)
        g_idx = torch.arange(IN) // 32
        weight = scales[:, g_idx] * (codes - zeros[:, g_idx])
        m = AwqTorchLinear(bits=4, group_size=32, sym=symmetric, desc_act=False, in_features=IN, out_features=OUT, bias=False,
                           pack_dtype=torch.int32, register_buffers=True)
        m.pack(linear_of(weight), scales, zeros.float())
        from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
        values = dequantize_gemm(m.qweight, m.qzeros, m.scales.float(), 4, 32).T
        config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
        save(f"{out}/{name}", config, {"qweight": m.qweight, "qzeros": m.qzeros, "scales": m.scales.half()}, codes, scales, zeros, values)


def compressed_tensors_cases(out):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    cases = [("ct-4", "pack-quantized", 4, 32, True, torch.bfloat16), ("ct-4-asym", "pack-quantized", 4, 32, False, torch.bfloat16),
             ("ct-8-channel", "pack-quantized", 8, IN, True, torch.float16), ("ct-8-asym", "pack-quantized", 8, 32, False, torch.bfloat16),
             ("ct-w8a8", "int-quantized", 8, IN, True, torch.float32)]
    for seed, (name, fmt, bits, group, symmetric, dtype) in enumerate(cases):
        codes, scales, zeros = random_grid(200 + seed, bits, group, symmetric, dtype)
        g_idx, middle = torch.arange(IN) // group, 2 ** (bits - 1)
        weight = scales[:, g_idx] * (codes - zeros[:, g_idx])
        strategy = {"strategy": "group", "group_size": group} if group < IN else {"strategy": "channel"}
        args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **strategy)
        acts = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True, observer=None)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=acts if fmt == "int-quantized" else None,
                                    format=fmt)
        compressor = BaseCompressor.get_value_from_registry(fmt)
        state = {"weight": weight, "weight_scale": scales.to(dtype)}
        if not symmetric:
            state["weight_zero_point"] = (zeros - middle).to(torch.int8)
        packed = compressor.compress(dict(state), scheme)
        wide = {k: v.float() if k == "weight_scale" else v for k, v in packed.items()}
        values = compressor.decompress(wide, scheme)["weight"]
        group_json = json.loads(scheme.model_dump_json())
        config = {"quant_method": "compressed-tensors", "format": fmt, "quantization_status": "compressed", "ignore": [],
                  "config_groups": {"group_0": group_json}}
        save(f"{out}/{name}", config, packed, codes, scales, zeros, values)


if __name__ == "__main__":
    {"gptqmodel": gptqmodel_cases, "compressed-tensors": compressed_tensors_cases}[sys.argv[1]](sys.argv[2])
