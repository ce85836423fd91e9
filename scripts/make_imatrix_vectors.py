#!/usr/bin/env python3
"""Small importance matrices as llama.cpp's own GGUF library writes them (gguf and numpy).

usage: make_imatrix_vectors.py tests/data/models/tiny tests/data/quant

imatrix.gguf is of the model llama, imatrix-experts.gguf of qwen3_moe. Element i of the sums of the k-th matrix (layers in
order; q, k, v, output, gate, up, down) is (k + 1) (i + 1) / 8, the count 16 (k + 1); the sums of expert e are (e + 1) times that.
The last matrix has no tokens, of experts the last of them, and the files hold the head as well."""
import json
import os
import sys

import gguf
import numpy as np

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
MLP = ("ffn_gate", "ffn_up", "ffn_down")


def has_experts(config, layer):
    return "num_experts" in config and layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0


def write(config, path):
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    matrices = []  # name, width, number of experts or 1
    for layer in range(layers):
        experts = has_experts(config, layer)
        for name in ATTENTION + MLP:
            width = hidden
            if name == "attn_output":
                width = heads * config.get("head_dim", hidden // heads)
            elif name == "ffn_down":
                width = config["moe_intermediate_size" if experts else "intermediate_size"]
            sparse = experts and name in MLP
            matrices.append((f"blk.{layer}.{name}{'_exps' if sparse else ''}.weight", width, config["num_experts"] if sparse else 1))
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].clear()  # llama-imatrix writes no general.architecture
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["a.txt", "b.txt"])
    writer.add_uint32("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 512)
    for k, (name, width, n) in enumerate(matrices):
        sums = np.float32(k + 1) * np.arange(1, width + 1, dtype=np.float32) / np.float32(8)
        counts = np.full((n, 1), 16 * (k + 1), dtype=np.float32)
        if k == len(matrices) - 1:
            counts[-1] = 0
        writer.add_tensor(name + ".in_sum2", np.arange(1, n + 1, dtype=np.float32)[:, None] * sums)
        writer.add_tensor(name + ".counts", counts)
    writer.add_tensor("output.weight.in_sum2", np.ones((1, hidden), np.float32))
    writer.add_tensor("output.weight.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    for model, name in (("llama", "imatrix.gguf"), ("qwen3_moe", "imatrix-experts.gguf")):
        with open(os.path.join(sys.argv[1], model, "config.json"), encoding="utf-8") as f:
            write(json.load(f), os.path.join(sys.argv[2], name))


main()
