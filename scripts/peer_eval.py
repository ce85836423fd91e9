#!/usr/bin/env python3
"""Independent measurement of quantized models with PyTorch: no line of qconvert, no library of quantization.

  peer_eval.py windows MODEL --text FILE --windows N --length L --out IDS.npy [--out-text FILE]
  peer_eval.py score MODEL --text FILE --windows N --length L [--json FILE] ARTIFACT...
  peer_eval.py labels MODEL --text AG_NEWS.csv RESULT.json

windows: N windows of L tokens, window i from token floor(i * (n - L) / max(1, N - 1)) of the n tokens of FILE (one call of
the tokenizer, no special tokens added), as an int32 array; --out-text writes the text of the windows one after the other.
score: every weight of each ARTIFACT is computed here in float32 from its stored codes and put into the transformers model
of MODEL, which runs the first N windows of FILE (0: all), each from position 0. Printed are perplexity, KL(16-bit ||
artifact) in nats (mean and 99th percentile over the L - 1 targets of a window), and the share of positions whose most
likely token is that of the 16-bit model. 8-bit activations are rounded where the artifact says so.
labels: what `qeval MODEL --task ag_news --data AG_NEWS.csv --items N --json` wrote to RESULT.json, against the prompts and the
log-likelihoods of transformers in float32, each item by itself. The exit code is 1 if an answer is another or a
log-likelihood is off by more than 1e-4.
ARTIFACT: a folder of GPTQ, AWQ (gemm) or compressed-tensors, a .gguf file, a .qpk file; NAME=PATH gives it a name.
"""
import argparse
import collections
import csv
import glob
import json
import math
import os
import re
import struct
import sys
import time
import zlib

import numpy as np
import torch

# of an input: bits, columns that share a scale (0: all of a token), steps of the largest magnitude (compressed-tensors has
# half a step more than the largest code)
Scheme = collections.namedtuple("Scheme", "bits group levels")

# ---- integers packed in words ----


def fields(words, bits, count):
    """Unsigned fields of BITS bits, lowest first, of 32-bit words along the last axis; they may straddle words."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    flags = np.unpackbits(octets, axis=-1, bitorder="little")[..., :count * bits]
    weights = (1 << np.arange(bits)).astype(np.int32)
    return torch.from_numpy((flags.reshape(*flags.shape[:-1], count, bits) * weights).sum(-1, dtype=np.int32))


def by_column(values, index):
    """[rows, groups] -> [rows, columns]"""
    return values.float()[:, index]


# ---- folders of safetensors ----


def read_tensors(folder):
    from safetensors.torch import load_file
    tensors = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        tensors.update(load_file(path))
    if not tensors:
        raise SystemExit(f"{folder}: no safetensors file")
    return tensors


def from_gptq(tensors, name, config):
    """W[o, i] = scale[g(i), o] * (code[i, o] - zero[g(i), o]); version 1 stores zero - 1."""
    scales, bits = tensors[name + ".scales"], config["bits"]
    n_out = scales.shape[1]
    index = tensors[name + ".g_idx"].long()
    codes = fields(tensors[name + ".qweight"].T.contiguous().numpy(), bits, len(index))
    zeros = fields(tensors[name + ".qzeros"].numpy(), bits, n_out)
    if "v2" not in str(config.get("checkpoint_format")):
        zeros = zeros + 1 & (1 << bits) - 1
    return by_column(scales.T, index) * (codes - by_column(zeros.T, index))


def from_awq(tensors, name, config):
    """As GPTQ, but the eight codes of a word belong to eight outputs, in the order 0 2 4 6 1 3 5 7."""
    scales, weight = tensors[name + ".scales"], tensors[name + ".qweight"]
    n_in, n_out = weight.shape[0], scales.shape[1]
    place = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    codes, zeros = (fields(t.numpy(), 4, n_out).reshape(t.shape[0], -1, 8)[:, :, place].reshape(-1, n_out)
                    for t in (weight, tensors[name + ".qzeros"]))
    index = torch.arange(n_in) // (n_in // scales.shape[0])
    return (scales.float()[index] * (codes - zeros[index])).T.contiguous()


def from_compressed(tensors, name, scheme):
    """Signed codes, packed with an offset of half the range or one byte each; groups may be of any columns (g_idx)."""
    bits = scheme["weights"]["num_bits"]
    if name + ".weight_packed" in tensors:
        n_in = int(tensors[name + ".weight_shape"][1])
        codes = fields(tensors[name + ".weight_packed"].numpy(), bits, n_in) - (1 << bits - 1)
    else:
        codes = tensors[name + ".weight"]
    scales = tensors[name + ".weight_scale"].float().reshape(codes.shape[0], -1)
    index = tensors.get(name + ".weight_g_idx")
    if index is None or int(index.min()) < 0:
        index = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    zeros = tensors.get(name + ".weight_zero_point")
    if zeros is None:
        return by_column(scales, index.long()) * codes.float()
    if zeros.dtype == torch.int32:  # packed along the outputs
        zeros = fields(zeros.T.contiguous().numpy(), bits, codes.shape[0]).T - (1 << bits - 1)
    return by_column(scales, index.long()) * (codes.float() - by_column(zeros.reshape(scales.shape), index.long()))


def scheme_of(config, name):
    groups = [g for g in config["config_groups"].values()
              if any(t == "Linear" or t == name or t.startswith("re:") and re.match(t[3:], name) for t in g["targets"])]
    if len(groups) != 1:
        raise SystemExit(f"{name}: {len(groups)} schemes apply, 1 expected")
    return groups[0]


def read_folder(folder):
    """Float32 weights by name, and by module how its input is rounded (Scheme)."""
    tensors = read_tensors(folder)
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        config = json.load(f).get("quantization_config")
    method = config["quant_method"] if config else None
    if method not in (None, "gptq", "awq", "compressed-tensors"):
        raise SystemExit(f"{folder}: method {method} is not known")
    weights, rounded = {}, {}
    for key, tensor in tensors.items():
        name = key.rpartition(".")[0]
        if key.endswith(".qweight"):
            weights[name + ".weight"] = (from_awq if method == "awq" else from_gptq)(tensors, name, config)
        elif method == "compressed-tensors" and name + ".weight_scale" in tensors:
            scheme = scheme_of(config, name)
            if key in (name + ".weight", name + ".weight_packed"):
                weights[name + ".weight"] = from_compressed(tensors, name, scheme)
            inputs = scheme.get("input_activations")
            if inputs and not (inputs["num_bits"] == 8 and inputs["strategy"] == "token" and inputs["dynamic"] and inputs["symmetric"]):
                raise SystemExit(f"{name}: inputs rounded by {inputs}, only 8 bits per token are known")
            if inputs:
                rounded[name] = Scheme(8, 0, 127.5)
        elif tensor.is_floating_point() and not key.endswith(".scales"):
            weights[key] = tensor.float()
    return weights, rounded


# ---- GGUF ----

GGUF_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def read_gguf(path, model):
    import gguf
    reader, weights = gguf.GGUFReader(path), {}
    field = reader.get_field("general.architecture")
    interleaved = bytes(field.parts[field.data[0]]) == b"llama"
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for t in reader.tensors:
        *block, what, kind = t.name.split(".")
        w = torch.from_numpy(np.array(gguf.quants.dequantize(t.data, t.tensor_type), dtype=np.float32))
        if interleaved and what in heads:  # of a head the rows (0, half, 1, half + 1, ...): back to halves
            w = w.view(heads[what], -1, 2, w.shape[-1]).transpose(1, 2).reshape(w.shape)
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{GGUF_NAMES[what]}.{kind}"] = w
    return weights, {}


# ---- qpk, from docs/formats/qpk.md ----

QPK_FLOATS = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16}


def qpk_codes(tiles, bits, cols):
    """[tiles, blocks of 32 columns, 64 * bits] bytes -> [tiles * 16, cols]: planes of 8, 4, 2 and 1 bits, lowest first."""
    n, blocks, _ = tiles.shape
    codes, low = torch.zeros(n, blocks, 8, 16, 4, dtype=torch.int32), 0  # step, row, column within a step
    for w in (w for w in (8, 4, 2, 1) if bits & w):
        for step in range(8):
            at = 64 * (low + step // (8 // w))
            part = tiles[:, :, at:at + 64].view(n, blocks, 16, 4).to(torch.int32) >> w * (step % (8 // w)) & (1 << w) - 1
            codes[:, :, step] |= part << low
        low += w
    return codes.permute(0, 3, 1, 2, 4).reshape(n * 16, blocks * 32)[:, :cols]


def qpk_matrix(raw, at, data, shape):
    _, bits, _, flags, stype, _, group, tile_bytes, scales_at, zeros_at = struct.unpack_from("<BBBBHHQQQQ", data, at + 64)
    rows, cols = math.prod(shape[:-1]), shape[-1]
    tiles, groups, blocks = raw.view(-1, tile_bytes), -(-cols // group), -(-cols // 32)
    codes = qpk_codes(tiles[:, :64 * bits * blocks].reshape(-1, blocks, 64 * bits), bits, cols)

    def per_group(offset, dtype):
        part = tiles[:, offset:offset + groups * 16 * dtype.itemsize].contiguous().view(dtype)
        return part.view(-1, groups, 16).transpose(1, 2).reshape(-1, groups)

    index = torch.arange(cols) // group
    zeros = by_column(per_group(zeros_at, torch.uint8), index) if flags else float(1 << bits - 1)
    return (by_column(per_group(scales_at, QPK_FLOATS[stype]), index) * (codes - zeros))[:rows].view(*shape)


def read_qpk(path):
    with open(path, "rb") as f:
        data = f.read()
    if struct.unpack_from("<Q", data, 16)[0] & ~1:
        raise SystemExit(f"{path}: needs a feature that this reader lacks")
    strings, metas, _, _, tensors, aliases = [struct.unpack_from("<QQ", data, 48 + 24 * i) for i in range(2, 8)]

    def string(at):
        start, n_bytes = struct.unpack_from("<II", data, at)
        return data[strings[0] + start:strings[0] + start + n_bytes].decode()

    weights, rounded, places = {}, {}, []
    for at in range(tensors[0], sum(tensors), 192):
        dtype, n_dims, _, crc, *shape, offset, n_bytes = struct.unpack_from("<HBBI4QQQ", data, at + 8)
        stored = data[offset:offset + n_bytes]
        if zlib.crc32(stored) != crc:
            raise SystemExit(f"{path}: {string(at)}: checksum")
        raw, shape = torch.frombuffer(bytearray(stored), dtype=torch.uint8), shape[:n_dims]
        places.append(string(at))
        weights[places[-1]] = qpk_matrix(raw, at, data, shape) if dtype == 64 else raw.view(QPK_FLOATS[dtype]).float().view(*shape)
        act_scheme, act_bits, _, act_group = struct.unpack_from("<BBHI", data, at + 112)
        if act_scheme not in (0, 2):
            raise SystemExit(f"{path}: {string(at)}: activation scheme {act_scheme} is not known")
        if act_scheme:
            rounded[string(at).rpartition(".")[0]] = Scheme(act_bits, act_group, (1 << act_bits - 1) - 1)
    for at in range(aliases[0], sum(aliases), 16):
        weights[string(at)] = weights[places[struct.unpack_from("<I", data, at + 8)[0]]]
    return weights, rounded


# ---- measurement ----


def token_ids(model, text):
    from tokenizers import Tokenizer
    with open(text, encoding="utf-8", newline="") as f:
        return Tokenizer.from_file(os.path.join(model, "tokenizer.json")).encode(f.read(), add_special_tokens=False).ids


def write_windows(args):
    from tokenizers import Tokenizer
    ids = token_ids(args.model, args.text)
    if len(ids) < args.length:
        raise SystemExit(f"{args.text}: {len(ids)} tokens, a window needs {args.length}")
    starts = [i * (len(ids) - args.length) // max(1, args.windows - 1) for i in range(args.windows)]
    windows = [ids[s:s + args.length] for s in starts]
    np.save(args.out, np.array(windows, dtype=np.int32))
    if args.out_text:
        tok = Tokenizer.from_file(os.path.join(args.model, "tokenizer.json"))
        with open(args.out_text, "w", encoding="utf-8", newline="") as f:
            f.write("".join(tok.decode(w, skip_special_tokens=False) for w in windows))


def round_inputs(scheme):
    """Hook of a module: its input on a symmetric grid, per token or per token and group of columns."""
    def hook(_, inputs):
        parts = []
        for x in inputs[0].split(scheme.group or inputs[0].shape[-1], -1):
            scale = (x.abs().amax(-1, keepdim=True) / scheme.levels).clamp(min=torch.finfo(torch.float32).tiny)
            parts.append(scale * (x / scale).round().clamp(-(1 << scheme.bits - 1), (1 << scheme.bits - 1) - 1))
        return (torch.cat(parts, -1), *inputs[1:])
    return hook


class Scorer:
    def __init__(self, args):
        from transformers import AutoModelForCausalLM
        ids = token_ids(args.model, args.text)
        n = min(args.windows or len(ids), len(ids) // args.length)
        self.windows = torch.tensor(ids[:n * args.length]).view(n, args.length)
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
        self.head = self.model.get_output_embeddings().weight.detach().clone()
        self.hidden = self.run()

    def run(self):
        """What the head sees, [windows][length, hidden]."""
        return [self.model.model(input_ids=w[None], use_cache=False).last_hidden_state[0] for w in self.windows]

    def load(self, weights):
        if self.model.config.tie_word_embeddings:
            weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        own = self.model.state_dict()
        if set(own) - set(weights):
            raise SystemExit(f"weights missing: {sorted(set(own) - set(weights))[:4]}")
        for name, tensor in own.items():
            tensor.copy_(weights[name])

    def score(self, weights, rounded):
        self.load(weights)
        hooks = [self.model.get_submodule(name).register_forward_pre_hook(round_inputs(scheme)) for name, scheme in rounded.items()]
        hidden = self.run()
        for hook in hooks:
            hook.remove()
        head = weights["lm_head.weight"].float()
        kld, nll, reference_nll, same = [], [], [], []
        for w, ref, own in zip(self.windows, self.hidden, hidden):
            for at in range(0, len(w) - 1, 256):
                to = min(at + 256, len(w) - 1)
                p, q = torch.log_softmax(ref[at:to] @ self.head.T, -1), torch.log_softmax(own[at:to] @ head.T, -1)
                same.append(p.argmax(-1) == q.argmax(-1))
                target = w[at + 1:to + 1, None]
                nll.append(-q.gather(1, target)[:, 0])
                reference_nll.append(-p.gather(1, target)[:, 0])
                kld.append((p.exp() * (p - q)).sum(-1))
        kld, nll, reference_nll, same = (torch.cat(v).double().numpy() for v in (kld, nll, reference_nll, same))
        return {"reference_ppl": math.exp(reference_nll.mean()), "ppl": math.exp(nll.mean()), "kld": kld.mean(),
                "kld_p99": float(np.percentile(kld, 99)), "top1": same.mean(), "scored": len(kld)}


def size_of(path):
    paths = glob.glob(os.path.join(path, "*.safetensors")) if os.path.isdir(path) else [path]
    return sum(os.path.getsize(p) for p in paths)


@torch.inference_mode()
def score(args):
    torch.set_num_threads(args.threads)
    scorer, results = Scorer(args), []
    for artifact in args.artifacts:
        name, _, path = artifact.rpartition("=")
        start = time.perf_counter()
        if os.path.isdir(path):
            weights, rounded = read_folder(path)
        else:
            weights, rounded = read_gguf(path, scorer.model) if path.endswith(".gguf") else read_qpk(path)
        row = {"name": name or path, **scorer.score(weights, rounded), "bytes": size_of(path), "rounded_inputs": len(rounded)}
        row["seconds"] = time.perf_counter() - start
        results.append(row)
        print(json.dumps(row), flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(results, f, indent=1)


NEWS = "Classify the news articles into the categories of World, Sports, Business, and Technology.\n\nArticle: {} {}\nAnswer:"
CLASSES = [" World", " Sports", " Business", " Technology"]


def macro_f1(answers, labels):
    f1 = []
    for c in range(len(CLASSES)):
        both = sum(a == b == c for a, b in zip(answers, labels))
        f1.append(2 * both / max(1, answers.count(c) + labels.count(c)))
    return sum(f1) / len(f1)


@torch.inference_mode()
def labels(args):
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tok = Tokenizer.from_file(os.path.join(args.model, "tokenizer.json"))
    with open(args.artifacts[0], encoding="utf-8") as f:
        result = json.load(f)
    with open(args.text, encoding="utf-8", newline="") as f:
        rows = list(csv.reader(f))
    answers, truth, apart = [], [], []
    for number, theirs in zip(result.get("row_numbers", range(1, len(rows) + 1)), result["log_likelihoods"], strict=True):
        label, title, description = rows[number - 1]
        prompt = NEWS.format(title, description)
        head, ours, seen = len(tok.encode(prompt).ids), [], {}
        for choice in CLASSES:
            ids = tok.encode(prompt + choice).ids
            inputs = tuple(ids[:-1])  # the prompt alone where choices are single tokens: one pass for all of them
            if inputs not in seen:
                seen[inputs] = model(torch.tensor([inputs])).logits[0, head - 1:].log_softmax(-1)
            ours.append(seen[inputs].gather(1, torch.tensor(ids[head:])[:, None]).double().sum().item())
        answers.append(max(range(len(CLASSES)), key=ours.__getitem__))
        truth.append(int(label) - 1)
        apart.append(max(abs(a - b) for a, b in zip(ours, theirs, strict=True)))
    other = sum(a != b for a, b in zip(answers, result["answers"], strict=True))
    accuracy = sum(a == b for a, b in zip(answers, truth)) / len(truth)
    print(f"{len(truth)} items: {other} other answers, log-likelihoods apart at most {max(apart):.1e}; accuracy {accuracy:.6f}, "
          f"macro F1 {macro_f1(answers, truth):.6f}; qeval {result['model']['accuracy']:.6f}, {result['model']['macro_f1']:.6f}")
    return other > 0 or max(apart) > 1e-4


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["windows", "score", "labels"])
    p.add_argument("model")
    p.add_argument("artifacts", nargs="*", metavar="ARTIFACT")
    p.add_argument("--text", required=True)
    p.add_argument("--windows", type=int, default=16)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--out")
    p.add_argument("--out-text")
    p.add_argument("--json")
    args = p.parse_intermixed_args()
    return {"windows": write_windows, "score": score, "labels": labels}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
