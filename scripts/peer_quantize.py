#!/usr/bin/env python3
"""Quantize MODEL with another tool, with that tool's defaults but for bits, groups and calibration tokens.

  peer_quantize.py TOOL MODEL OUT --ids IDS.npy --bits 4 --group 64 [--threads 2]

TOOL: gptqmodel, gptqmodel-act (columns in order of activation), llmcompressor-gptq, llmcompressor-w8a8 (SmoothQuant and
GPTQ, one scale per channel, activations rounded per token while running), llmcompressor-awq. IDS: int32 [windows, length].
Run by the Python of that tool's environment (scripts/bench_peers --make-venv).
"""
import argparse
import os
import sys

import numpy as np


def gptqmodel(args, ids, act_order):
    from gptqmodel import GPTQModel, QuantizeConfig
    config = QuantizeConfig(bits=args.bits, group_size=args.group, sym=True, desc_act=act_order)
    model = GPTQModel.load(args.model, config, device="cpu")
    model.quantize([{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in ids], batch_size=1)
    model.save(args.out)


def recipe(args):
    """llm-compressor's modifiers."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    weights = {"num_bits": args.bits, "type": "int", "symmetric": args.tool != "llmcompressor-awq", "strategy": "group",
               "group_size": args.group}
    grid = {"config_groups": {"all": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}
    if args.tool == "llmcompressor-w8a8":
        from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
        return [SmoothQuantModifier(smoothing_strength=0.8), GPTQModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])]
    if args.tool == "llmcompressor-awq":
        from llmcompressor.modifiers.transform.awq import AWQModifier
        from llmcompressor.pipelines.cache import IntermediatesCache
        IntermediatesCache.pin_memory = lambda *_: None  # called always, fails on a machine without a GPU
        return [AWQModifier(), QuantizationModifier(**grid)]
    return [GPTQModifier(**grid)]


def llmcompressor(args, ids):
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()})
    oneshot(model=model, dataset=rows, recipe=recipe(args), max_seq_length=ids.shape[1], num_calibration_samples=len(ids))
    model.save_pretrained(args.out, save_compressed=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("tool", choices=["gptqmodel", "gptqmodel-act", "llmcompressor-gptq", "llmcompressor-w8a8", "llmcompressor-awq"])
    p.add_argument("model")
    p.add_argument("out")
    p.add_argument("--ids", required=True)
    p.add_argument("--bits", type=int, default=4)
    p.add_argument("--group", type=int, default=64)
    p.add_argument("--threads", type=int, default=2)
    args = p.parse_args()
    # before torch is read; GPTQModel counts processors itself and wants at least two workers
    os.environ.update(OMP_NUM_THREADS=str(args.threads), GPTQMODEL_CPU_WORKERS=str(max(2, args.threads)), HF_HUB_OFFLINE="1",
                      TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
    ids = np.load(args.ids)
    if args.tool.startswith("gptqmodel"):
        gptqmodel(args, ids, args.tool == "gptqmodel-act")
    else:
        llmcompressor(args, ids)


if __name__ == "__main__":
    sys.exit(main())
