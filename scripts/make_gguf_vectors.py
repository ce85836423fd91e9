#!/usr/bin/env python3
"""What llama.cpp's own GGUF library (gguf, numpy) makes of blocks and of a small model.

usage: make_gguf_vectors.py blocks tests/data/gguf/blocks.bin
       make_gguf_vectors.py model tests/data/models/tiny/llama tests/data/gguf/tiny-llama.gguf

blocks: for each type random blocks, scales of every kind (zero, subnormal, the largest, infinities, NaN) among them, with
the values that the library decodes, and random rows with the blocks that it encodes. Records: kind (0 decoded, 1 encoded),
id of the type, blocks, values in a block, bytes of a block, as u32; the blocks; the values as float32.

model: the checkpoint as a GGUF file: rows of q and k as pairs, F16 and F32, layer 1 partly Q8_0 and Q4_0, and a byte-level
tokenizer rebuilt from its tokenizer.json."""
import json
import os
import struct
import sys

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as T

SPECIAL_HALVES = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01)
# bytes where float16 numbers stand in a block
HALVES = {T.Q4_0: (0,), T.Q4_1: (0, 2), T.Q5_0: (0,), T.Q5_1: (0, 2), T.Q8_0: (0,), T.Q4_K: (0, 2), T.Q5_K: (0, 2),
          T.Q6_K: (208,)}
ENCODED = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0)


def record(out, kind, type_, blocks, values):
    n_elems, n_bytes = GGML_QUANT_SIZES[type_]
    out.write(struct.pack("<5I", kind, type_, blocks.size // n_bytes, n_elems, n_bytes))
    out.write(blocks.tobytes())
    out.write(np.ascontiguousarray(values, "<f4").tobytes())


def random_blocks(rng, type_):
    n_elems, n_bytes = GGML_QUANT_SIZES[type_]
    n = 2 * len(SPECIAL_HALVES)
    blocks = rng.integers(0, 256, (n, n_bytes), dtype=np.uint8)
    for i, at in enumerate(HALVES[type_]):
        for k in range(n):
            half = SPECIAL_HALVES[(k + 5 * i) % len(SPECIAL_HALVES)] if k % 2 else int(rng.integers(0, 0x7C00))
            blocks[k, at:at + 2] = [half & 255, half >> 8]
    return blocks


def rows_to_encode(rng, n_elems):
    rows = rng.normal(0, 0.05, (24, n_elems))
    rows[3] = 0
    rows[4] = 1e-30
    rows[5, 1:] = 0
    rows[6] *= 1e-6
    rows[7] *= 1e5
    rows[8] = np.abs(rows[8])
    rows[9] = -np.abs(rows[9])
    rows[10] = 0.25
    rows[11] = np.arange(n_elems) - n_elems // 2 + 0.5
    rows[12, ::2] = 1
    rows[12, 1::2] = -1
    rows[13] = np.arange(n_elems) % 16 / 8
    return rows.astype(np.float32)


def blocks(path):
    rng = np.random.default_rng(7)
    with open(path, "wb") as out, np.errstate(all="ignore"):
        for type_ in HALVES:
            data = random_blocks(rng, type_)
            record(out, 0, type_, data, gguf.quants.dequantize(data.reshape(1, -1), type_))
        for type_ in ENCODED:
            rows = rows_to_encode(rng, GGML_QUANT_SIZES[type_][0])
            record(out, 1, type_, gguf.quants.quantize(rows, type_), rows)


# ---- model ----

STEMS = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "lm_head.weight": "output.weight"}


def read_safetensors(path):
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    for name, t in header.items():
        if name == "__metadata__" or name.endswith("inv_freq"):
            continue
        begin, end = t["data_offsets"]
        dtype = {"F16": "<f2", "F32": "<f4"}[t["dtype"]]
        yield name, np.frombuffer(data[begin:end], dtype).reshape(t["shape"])


def gguf_name(name):
    if name in OUTSIDE:
        return OUTSIDE[name]
    layer, stem = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{STEMS[stem]}.weight"


def as_pairs(rows, n_heads):
    return rows.reshape(n_heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def add_tokenizer(writer, path, config):
    with open(path, encoding="utf-8") as f:
        doc = json.load(f)
    n = config["vocab_size"]
    tokens, types = [f"[PAD{i}]" for i in range(n)], [gguf.TokenType.UNUSED] * n
    for text, i in doc["model"]["vocab"].items():
        tokens[i], types[i] = text, gguf.TokenType.NORMAL
    for t in doc["added_tokens"]:
        tokens[t["id"]], types[t["id"]] = t["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in doc["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")


def model(folder, path):
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("model")
    writer.add_name("tiny llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(1)
    add_tokenizer(writer, os.path.join(folder, "tokenizer.json"), config)
    for name, rows in sorted(read_safetensors(os.path.join(folder, "model.safetensors"))):
        if "q_proj" in name or "k_proj" in name:
            rows = as_pairs(rows, heads if "q_proj" in name else kv_heads)
        if rows.ndim == 1:
            writer.add_tensor(gguf_name(name), rows.astype(np.float32))
        elif ".layers.1." in name and ("mlp" in name or "q_proj" in name):
            type_ = T.Q8_0 if "mlp" in name else T.Q4_0
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(rows.astype(np.float32), type_), raw_dtype=type_)
        else:
            writer.add_tensor(gguf_name(name), rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if sys.argv[1] == "blocks":
    blocks(*sys.argv[2:])
else:
    model(*sys.argv[2:])
