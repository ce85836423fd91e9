#!/usr/bin/env python3
"""Tiny models of families and their golden values, by transformers in float32.

  make_family_vectors.py TESTS_DATA [NAME ...]

TESTS_DATA is tests/data. Writes models/tiny/NAME (config.json, model.safetensors, golden.safetensors, golden.json; fields
and protocol in models/tiny/README.md) for the names of MODELS, and golden/variants.{json,safetensors}: what tiny models that
exist give with other settings. Needs torch, transformers, safetensors, numpy.
"""
import json
import os
import sys
import tempfile
import zlib

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from transformers import AutoConfig, AutoModelForCausalLM

N_TOKENS = 48
COMMON = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
          "vocab_size": 256, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
          "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
          "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512, "rope_scaling": None}

# name -> note, config.json beyond COMMON, ablations: name -> patch of config.json
MODELS = {
    "granite": (
        "Multipliers of embeddings, attention scores, residuals and logits, each far from 1. Tied head.",
        {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
         "tie_word_embeddings": True, "embedding_multiplier": 12.0, "attention_multiplier": 0.0625, "residual_multiplier": 0.22,
         "logits_scaling": 4.0},
        {"embedding_multiplier 1": {"embedding_multiplier": 1.0}, "residual_multiplier 1": {"residual_multiplier": 1.0},
         "logits_scaling 1": {"logits_scaling": 1.0}, "scale by head_dim": {"attention_multiplier": 0.25}}),
    "smollm3": (
        "Layer 1 of three has no rotary embedding. sliding_window is set but use_sliding_window is false. Tied head although "
        "config.json has no tie_word_embeddings key.",
        {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "rms_norm_eps": 1e-6, "rope_theta": 5000000.0,
         "layer_types": ["full_attention"] * 3, "max_window_layers": 28, "no_rope_layer_interval": 4, "no_rope_layers": [1, 0, 1],
         "pretraining_tp": 2, "sliding_window": 16, "use_sliding_window": False},
        {"every layer rotates": {"no_rope_layers": [1, 1, 1]}, "no layer rotates": {"no_rope_layers": [0, 0, 0]},
         "the layer without rope slides": {"use_sliding_window": True, "layer_types": None}}),
    "seed_oss": (
        "Biases of q, k and v, which attention_bias asks for, and of o, for which attention_out_bias is there. Untied head.",
        {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "rms_norm_eps": 1e-6, "rope_theta": 10000000.0,
         "head_dim": 32, "attention_bias": True, "attention_out_bias": True, "residual_dropout": 0.1, "tie_word_embeddings": False},
        {"biases left out": {"attention_bias": False, "attention_out_bias": False},
         "o bias left out": {"attention_out_bias": False}}),
}

LONG = {"short_factor": [1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0], "long_factor": [1.0, 1.1, 1.3, 1.8, 2.5, 4.0, 6.0, 9.0]}

# name -> tiny model, patch of config.json
VARIANTS = {
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    # with the key behind it, the plain rotary embedding for sequences of up to 32 tokens: the golden ones have 48
    "llama-dynamic": ("llama", {"max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    "llama-dynamic-short": ("llama", {"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    "phi3-long": ("phi3", {"original_max_position_embeddings": 32, "rope_scaling": {"type": "longrope", **LONG}}),
    "phi3-short": ("phi3", {"original_max_position_embeddings": 64, "rope_scaling": {"type": "longrope", **LONG}}),
    "phi3-part": ("phi3", {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 32,
                           "rope_scaling": {"type": "longrope", "short_factor": LONG["short_factor"][:4],
                                            "long_factor": LONG["long_factor"][:4]}}),
    "gemma3-scaled": ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "smollm3-window": ("smollm3", {"use_sliding_window": True, "layer_types": None, "no_rope_layers": None,
                                   "no_rope_layer_interval": 2}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
}


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=1)
        f.write("\n")


def read_json(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def random_weights(name, config):
    """Linear layers N(0, 1 / inputs), embeddings N(0, 0.16^2), norms 1 + N(0, 0.2^2) with two outlier channels."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    weights = {}
    for key, value in shapes.items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        shape = tuple(value.shape)
        x = rng.standard_normal(shape)
        if len(shape) == 1:
            x = 0.2 * x + (not key.endswith(".bias"))
            if shape[0] == config.hidden_size:
                x[[5, 37]] *= 4
        elif "embed_tokens" in key or key == "lm_head.weight":
            x *= 0.16
        else:
            x /= np.sqrt(shape[1])
        weights[key] = torch.tensor(x, dtype=torch.float32).to(torch.bfloat16)
    return weights


def with_config(source, patch):
    """A temporary folder with the weights of another one and a patched config.json."""
    folder = tempfile.TemporaryDirectory()
    config = {k: v for k, v in {**read_json(f"{source}/config.json"), **patch}.items()}
    write_json(f"{folder.name}/config.json", config)
    os.symlink(os.path.abspath(f"{source}/model.safetensors"), f"{folder.name}/model.safetensors")
    return folder


def forward(folder, ids, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        out = model(torch.tensor(ids), output_hidden_states=True)
    return out.logits.numpy(), np.stack([h.numpy() for h in out.hidden_states])


def nll_sums(logits, ids):
    x = logits[:, :-1].astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return [-float(np.take_along_axis(log_p[s], np.array(ids)[s, 1:, None], -1).sum()) for s in range(len(ids))]


def make_model(folder, name):
    note, own, ablations = MODELS[name]
    os.makedirs(folder, exist_ok=True)
    write_json(f"{folder}/config.json", dict(sorted({**COMMON, **own}.items())))
    save_torch(random_weights(name, AutoConfig.from_pretrained(folder)), f"{folder}/model.safetensors", {"format": "pt"})
    rng = np.random.default_rng(zlib.crc32(name.encode()) + 1)
    ids = rng.integers(3, COMMON["vocab_size"], (2, N_TOKENS)).astype(np.int32)
    ids[1, N_TOKENS // 2:] = ids[1, :N_TOKENS // 2]
    logits, hidden = forward(folder, ids.astype(np.int64))
    double, _ = forward(folder, ids.astype(np.int64), torch.float64)
    single = np.concatenate([forward(folder, ids[s:s + 1].astype(np.int64))[0] for s in range(2)])
    save_file({"input_ids": ids, "logits": logits, "hidden": hidden}, f"{folder}/golden.safetensors")
    sums = nll_sums(logits, ids)
    effects = {}
    for what, patch in ablations.items():
        with with_config(folder, patch) as other:
            changed, _ = forward(other, ids.astype(np.int64))
        effects[what] = {"max_abs_logit_change": float(f"{np.abs(changed - logits).max():.4g}"),
                         "nll_sum_total": round(sum(nll_sums(changed, ids)), 4)}
    noise = max(float(np.abs(double - logits).max()), float(np.abs(single - logits).max()))
    write_json(f"{folder}/golden.json", {
        "name": name, "model_type": own["model_type"], "note": note, "stored_dtype": "BF16",
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0],
                      "attn_implementation": "eager", "compute": "float32"},
        "input_ids": ids.tolist(), "nll_sum": sums, "targets_per_sequence": N_TOKENS - 1,
        "perplexity": float(np.exp(sum(sums) / (2 * (N_TOKENS - 1)))), "logits_std": float(f"{logits.std():.5g}"),
        "logits_absmax": float(f"{np.abs(logits).max():.5g}"), "float32_noise_max_abs": float(f"{noise:.3g}"),
        "ablations": effects})


def make_variants(data):
    """Logits of the last four positions of both golden sequences, and how far they are from the plain model's."""
    tensors, values = {}, {}
    for name, (model, patch) in VARIANTS.items():
        folder = f"{data}/models/tiny/{model}"
        ids = np.array(read_json(f"{folder}/golden.json")["input_ids"])
        plain, _ = forward(folder, ids)
        with with_config(folder, patch) as other:
            logits, _ = forward(other, ids)
        tensors[name] = np.ascontiguousarray(logits[:, -4:])
        values[name] = {"model": model, "patch": patch, "nll_sum": nll_sums(logits, ids),
                        "max_abs_logit_change": float(f"{np.abs(logits - plain).max():.4g}")}
    save_file(tensors, f"{data}/golden/variants.safetensors")
    write_json(f"{data}/golden/variants.json", values)


def check_wrappers():
    """Without images the classes of several parts compute what their text model does alone, to the last bit."""
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "intermediate_size": 96, "vocab_size": 256}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
              "patch_size": 14}
    pixtral, intern = {**vision, "head_dim": 16}, {**vision, "image_size": [28, 28], "patch_size": [14, 14]}
    ids = torch.randint(0, 250, (1, N_TOKENS), generator=torch.Generator().manual_seed(1))
    for name, inner, image in (("Gemma3", "Gemma3Text", vision), ("Llava", "Llama", {**vision, "model_type": "clip_vision_model"}),
                               ("LlavaNext", "Mistral", {**vision, "model_type": "clip_vision_model"}),
                               ("Mistral3", "Mistral", {**pixtral, "model_type": "pixtral"}), ("Idefics3", "Llama", vision),
                               ("SmolVLM", "Llama", vision), ("InternVL", "Qwen2", {**intern, "model_type": "internvl_vision"})):
        text_config = getattr(transformers, inner + "Config")(**text)
        config = getattr(transformers, name + "Config")(text_config=text_config, vision_config=image)
        whole = getattr(transformers, name + "ForConditionalGeneration")(config).eval()
        alone = AutoModelForCausalLM.from_config(text_config).eval()
        part = whole.model.language_model if hasattr(whole.model, "language_model") else whole.model.text_model
        alone.model.load_state_dict(part.state_dict())
        alone.lm_head.weight = whole.lm_head.weight
        with torch.no_grad():
            assert torch.equal(whole(input_ids=ids).logits, alone(ids).logits), name


def main():
    data, names = sys.argv[1], sys.argv[2:] or list(MODELS)
    for name in names:
        make_model(f"{data}/models/tiny/{name}", name)
    make_variants(data)
    check_wrappers()


main()
