"""Small models with random weights for scripts/interop: make_families.py TINY OUT [NAME...], by a Python with torch and transformers.

The tiny models of the tests (folder TINY) are narrower than some engines take: kernels want widths that are multiples of 32 or 64,
attention heads of at least 32. OUT/NAME has the configuration of TINY/NAME with such widths."""
import json
import os
import shutil
import sys
import zlib

import torch
from transformers import AutoConfig, AutoModelForCausalLM

WIDTHS = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
IF_THERE = {"head_dim": 32, "moe_intermediate_size": 64, "query_pre_attn_scalar": 32}


def fill(name, tensor, generator):
    """Linear layers N(0, 1 / inputs), embeddings N(0, 0.16^2), norms N(1, 0.2^2), biases N(0, 0.2^2)."""
    tensor.normal_(generator=generator)
    if tensor.dim() == 1:
        tensor.mul_(0.2).add_(not name.endswith("bias"))
    else:
        tensor.mul_(0.16 if "embed" in name or "lm_head" in name else tensor.shape[-1] ** -0.5)


def make(source, out):
    with open(f"{source}/config.json", encoding="utf-8") as f:
        config = json.load(f)
    config.update(WIDTHS, torch_dtype="bfloat16", **{k: v for k, v in IF_THERE.items() if k in config})
    os.makedirs(out)
    path = f"{out}/config.json"
    with open(path, "w", encoding="utf-8") as f:
        json.dump(config, f, indent=1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out), dtype=torch.float32)
    generator = torch.Generator().manual_seed(zlib.crc32(os.path.basename(out).encode()))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            fill(name, tensor, generator)
    model.to(torch.bfloat16).save_pretrained(out)
    with open(path, "w", encoding="utf-8") as f:  # as it was, in place of what this version makes of it
        json.dump(config, f, indent=1)
    for side in ("tokenizer.json", "tokenizer_config.json"):
        if os.path.exists(f"{source}/{side}"):
            shutil.copy(f"{source}/{side}", out)


def main():
    tiny, out = sys.argv[1:3]
    for name in sys.argv[3:] or sorted(n for n in os.listdir(tiny) if os.path.isdir(f"{tiny}/{n}")):
        make(f"{tiny}/{name}", f"{out}/{name}")


main()
