"""Checkpoints of any size without a library for arrays: Qwen3 folders with seeded BF16 weights that know nothing."""
import json
import math
import os
import random
import shutil
import struct

# Upper bytes of BF16 values of about 0.01 to 0.06, both signs.
UPPER = bytes((0x3C, 0x3D, 0xBC, 0xBD)[i & 3] for i in range(256))


def weights(rng, n_bytes):
    data = bytearray(rng.randbytes(n_bytes))
    data[1::2] = data[1::2].translate(UPPER)
    return data


def shapes(hidden, ffn, heads, kv_heads, head_dim, vocab, layers):
    q, kv = heads * head_dim, kv_heads * head_dim
    block = {"input_layernorm": [hidden], "post_attention_layernorm": [hidden], "mlp.down_proj": [hidden, ffn],
             "mlp.gate_proj": [ffn, hidden], "mlp.up_proj": [ffn, hidden], "self_attn.k_norm": [head_dim],
             "self_attn.q_norm": [head_dim], "self_attn.k_proj": [kv, hidden], "self_attn.v_proj": [kv, hidden],
             "self_attn.q_proj": [q, hidden], "self_attn.o_proj": [hidden, q]}
    result = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        result.update({f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()})
    return result


def write_tensors(path, tensors):
    """A safetensors file of BF16 tensors; `tensors` is name -> shape. Norms are ones."""
    rng = random.Random(1)
    header, end = {}, 0
    for name, shape in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + 2 * math.prod(shape)]}
        end += 2 * math.prod(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for shape in tensors.values():
            n_bytes = 2 * math.prod(shape)
            f.write(b"\x80\x3f" * shape[0] if len(shape) == 1 else weights(rng, n_bytes))


def make(folder, tokenizer_of, layers, hidden=512, ffn=1536, heads=8, kv_heads=4, head_dim=64, vocab=4096, positions=2048):
    """The tokenizer's ids must be below vocab."""
    os.mkdir(folder)
    write_tensors(os.path.join(folder, "model.safetensors"), shapes(hidden, ffn, heads, kv_heads, head_dim, vocab, layers))
    shutil.copy(os.path.join(tokenizer_of, "tokenizer.json"), folder)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": ffn,
              "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
              "vocab_size": vocab, "max_position_embeddings": positions, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
              "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    return folder
