#!/usr/bin/env python3
"""A small importance matrix as llama.cpp's own GGUF library writes it (gguf and numpy).

usage: make_imatrix_vectors.py tests/data/models/tiny/llama/config.json tests/data/quant/imatrix.gguf

Element i of the sums of the k-th matrix (layers in order; q, k, v, output, gate, up, down) is (k + 1) (i + 1) / 8, the
count 16 (k + 1); the last matrix has no tokens, and the file holds the head as well."""
import json
import sys

import gguf
import numpy as np

NAMES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def main():
    with open(sys.argv[1], encoding="utf-8") as f:
        config = json.load(f)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    widths = dict.fromkeys(NAMES, hidden)
    widths["attn_output"] = heads * config.get("head_dim", hidden // heads)
    widths["ffn_down"] = config["intermediate_size"]
    writer = gguf.GGUFWriter(sys.argv[2], "")
    writer.kv_data[0].clear()  # llama-imatrix writes no general.architecture
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["a.txt", "b.txt"])
    writer.add_uint32("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 512)
    k, last = 0, config["num_hidden_layers"] * len(NAMES) - 1
    for layer in range(config["num_hidden_layers"]):
        for name in NAMES:
            full = f"blk.{layer}.{name}.weight"
            sums = np.float32(k + 1) * np.arange(1, widths[name] + 1, dtype=np.float32) / np.float32(8)
            writer.add_tensor(full + ".in_sum2", sums.reshape(1, -1))
            writer.add_tensor(full + ".counts", np.array([[0 if k == last else 16 * (k + 1)]], dtype=np.float32))
            k += 1
    writer.add_tensor("output.weight.in_sum2", np.ones((1, hidden), np.float32))
    writer.add_tensor("output.weight.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
