"""Folders that engines load: written, read back, converted into each other with the same codes; refusals; publication."""
import json
import os
import re
import shutil
import struct

from e2e import BUILD_ROOT, DEMO, TINY, check, fails, load, main, poke, run, same, sha256, succeeds

QEVAL = os.path.join(BUILD_ROOT, "src", "cli", "qeval")
QINSPECT = os.path.join(BUILD_ROOT, "src", "cli", "qinspect")
SHORT = ["--windows", "1", "--length", "128"]


def convert(model, out, *options, report="r.json"):
    """Convert and return the report."""
    succeeds(model, "-o", out, "--force", "--report", report, *SHORT, *options)
    return load(report)


def tensors(folder):
    """Name -> (dtype, shape, bytes) of all tensors of a folder."""
    ret = {}
    for name in sorted(n for n in os.listdir(folder) if n.endswith(".safetensors")):
        with open(f"{folder}/{name}", "rb") as f:
            size = struct.unpack("<Q", f.read(8))[0]
            header, data = json.loads(f.read(size)), f.read()
        ret.update({k: (v["dtype"], v["shape"], data[slice(*v["data_offsets"])]) for k, v in header.items()
                    if k != "__metadata__"})
    return ret


def grids(path):
    listing = json.loads(succeeds(path, "--json", program=QINSPECT).stdout)
    return listing["format"], {t["name"]: t.get("grid") for t in listing["tensors"]}


# ---- each format ----

def case_formats_as_written():
    q = "model.layers.0.self_attn.q_proj."
    parts = {"gptq": ["g_idx", "qweight", "qzeros", "scales"], "awq": ["qweight", "qzeros", "scales"],
             "compressed-tensors": ["weight_packed", "weight_scale", "weight_shape"], "hf": ["weight"]}
    for name, suffixes in parts.items():
        report = convert(DEMO, name, "--format", name, "--bits", "4", "--group", "128")
        found = tensors(name)
        same(sorted(k[len(q):] for k in found if k.startswith(q)), suffixes, f"parts of {name}")
        config = load(f"{name}/config.json")
        same(config.get("quantization_config", {}).get("quant_method", "hf"), name, "method")
        same(config["tie_word_embeddings"], True, "tied")
        for side in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            same(sha256(f"{name}/{side}"), sha256(f"{DEMO}/{side}"), f"{side} of {name}")
        check("SHA-256" in open(f"{name}/README.md", encoding="utf-8").read(), "the model card names no source")
        text = succeeds(name, *SHORT, "--json", program=QEVAL).stdout
        same(json.loads(text)["ppl"], report["evaluation"]["ppl"], f"perplexity of {name} read again")
        same(report["artifacts"][0]["bytes"], sum(os.path.getsize(f"{name}/{f}") for f in os.listdir(name)), "bytes")
        kinds = {t["name"]: t["action"] for t in report["tensors"]}
        same(kinds["model.embed_tokens.weight"], "quantized" if name == "hf" else "kept16", "the embedding")
    kept = [e for e in load("r.json")["events"] if e["kind"] == "kept16"]
    same(kept, [], "hf keeps nothing")
    check(load("gptq/config.json")["quantization_config"] == load("gptq/quantize_config.json"), "the two descriptions differ")


def case_config_keeps_its_numbers():
    """3.0 stays 3.0: transformers tells floats from integers. Also where the source is such a folder itself."""
    def numbers(path):
        with open(path, encoding="utf-8") as f:
            return {k: v for k, v in json.load(f, parse_float=lambda x: f"float {x}").items() if "quant" not in k and "dtype" not in k}

    gemma = os.path.join(os.path.dirname(TINY), "gemma2")
    convert(gemma, "g", "--format", "compressed-tensors", "--bits", "8", "--group", "16")
    convert("g", "h", "--format", "hf")
    check("float 3.0" in numbers(f"{gemma}/config.json").values(), "no such number in the source")
    for name in ("g", "h"):
        same({**numbers(f"{gemma}/config.json"), "tie_word_embeddings": True}, {**numbers(f"{name}/config.json")}, f"numbers of {name}")


def case_w8a8():
    report = convert(DEMO, "w8a8", "--format", "compressed-tensors", "--bits", "8", "--group", "channel", "--set",
                     "quantize.activations.bits=8")
    config = load("w8a8/config.json")["quantization_config"]
    same(config["format"], "int-quantized", "format")
    same(config["config_groups"]["group_0"]["input_activations"]["strategy"], "token", "activations")
    same(tensors("w8a8")["model.layers.0.mlp.down_proj.weight"][0], "I8", "type of weights")
    convert(DEMO, "a.qpk", "--bits", "8", "--group", "channel", "--set", "quantize.activations.bits=8", "--set",
            "quantize.weights.scale=bf16", "--set", "quantize.embedding.bits=16")
    same(load("r.json")["evaluation"]["kld_mean"], report["evaluation"]["kld_mean"], "KLD of the packed file with the same grid")


def case_shapes_that_do_not_pack():
    succeeds(TINY, "--format", "gptq", "--bits", "4", "--group", "16", "-o", "t", "--report", "r.json", "--windows", "1",
             "--length", "64")
    kept = {e["subject"] for e in load("r.json")["events"] if e["kind"] == "kept16"}
    dynamic = load("t/config.json")["quantization_config"].get("dynamic", {})
    listed = {k[3:-1].replace("\\.", ".") + ".weight" for k in dynamic if k.startswith("-:^")}
    same(kept - {"model.embed_tokens.weight"}, listed, "matrices left in 16 bit and those that config.json names")


def case_shards():
    """emit[].shard_size: files of that many bytes of tensors at most, or of one tensor; the tensors are those of one file."""
    convert(DEMO, "one", "--format", "gptq", "--bits", "4", "--group", "128")
    same([n for n in os.listdir("one") if n.endswith(".safetensors")], ["model.safetensors"], "files by default")
    convert(DEMO, "many", "--format", "gptq", "--bits", "4", "--group", "128", "--set", "emit.0.shard_size=300kB")
    names = sorted(n for n in os.listdir("many") if n.endswith(".safetensors"))
    same(names, [f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))], "names")
    found = {}
    for name in names:
        os.makedirs("part", exist_ok=True)
        shutil.copy(f"many/{name}", "part/model.safetensors")
        part = tensors("part")
        check(len(part) == 1 or sum(len(data) for _, _, data in part.values()) <= 300000, f"{name} holds {len(part)} tensors")
        found.update({key: name for key in part})
    check(len(names) > 10, f"{len(names)} files")
    index = load("many/model.safetensors.index.json")
    same(index["weight_map"], found, "the index")
    check(tensors("many") == tensors("one"), "other tensors than in one file")
    fails(2, ["shard_size", "0 bytes"], DEMO, "-o", "x", "--format", "hf", "--set", "emit.0.shard_size=0")


def case_manifest_of_folders():
    convert(DEMO, "g", "--format", "gptq", "--bits", "4", "--group", "128", "--manifest", "m.json", "--set", "emit.0.shard_size=3MB")
    output, = load("m.json")["outputs"]
    want = [{"file": n, "bytes": os.path.getsize(f"g/{n}"), "sha256": sha256(f"g/{n}")} for n in sorted(os.listdir("g"))]
    check(sum(f["file"].endswith(".safetensors") for f in want) > 1, "one file")
    same((output["file"], output["sha256"], output["files"]), ("g", None, want), "sums of the folder")


# ---- one into the other ----

def case_chain_keeps_the_codes():
    for symmetric, first in (("true", "v1"), ("false", "v2")):
        convert(DEMO, "g0", "--format", "gptq", "--bits", "4", "--group", "64", "--set", f"quantize.weights.symmetric={symmetric}")
        same(load("g0/config.json")["quantization_config"]["checkpoint_format"], "gptq" if first == "v1" else "gptq_v2", "version")
        for source, name, fmt in (("g0", "a", "awq"), ("a", "q.qpk", "qpk"), ("q.qpk", "g1", "gptq")):
            report = convert(source, name, "--format", fmt)
            same(report["evaluation"]["kld_max"], 0, f"{fmt} beside {source}")
            same({t["method"] for t in report["tensors"] if t["action"] == "quantized"}, {"carried"}, f"methods in {fmt}")
        a, b = tensors("g0"), tensors("g1")
        same(sorted(a), sorted(b), "names after three conversions")
        for key, value in a.items():
            check(value == b[key], f"{key} changed on its way")


def case_same_grid_other_scales():
    """compressed-tensors stores the scales of a BF16 model as BF16, GPTQ the same numbers as F16: said, not hidden."""
    convert(DEMO, "c", "--format", "compressed-tensors", "--bits", "8", "--group", "128")
    same(grids("c")[1]["model.layers.0.mlp.up_proj.weight"]["scale"], "BF16", "scales")
    report = convert("c", "g", "--format", "gptq")
    same(report["evaluation"]["kld_max"], 0, "the same values")
    same(grids("g")[1]["model.layers.0.mlp.up_proj.weight"]["scale"], "F16", "scales")


def case_requantized_is_said():
    convert(DEMO, "g", "--format", "gptq", "--bits", "8", "--group", "128")
    r = run("g", "-o", "a", "--format", "awq", "--bits", "4", "--group", "64", "--report", "r.json", "--force", *SHORT)
    same(r.returncode, 6, "exit code")
    check("requantized" in r.stderr, r.stderr)
    same(sum(e["count"] for e in load("r.json")["events"] if e["kind"] == "requantized"), 42, "matrices counted")
    fails(4, ["g", "awq", "INT8"], "g", "-o", "b", "--format", "awq", *SHORT)
    fails(4, ["g", "quantized already"], "g", "-o", "b.qpk", "--method", "gptq", "--calib", f"{DEMO}/README.md")


# ---- several outputs of one run ----

def case_one_calibration():
    recipe = {"model": DEMO, "calibration": {"text": f"{DEMO}/../../text/austen-calib.txt", "windows": 8, "length": 256},
              "quantize": {"method": "gptq", "weights": {"bits": 4, "group": 128}, "embedding": {"bits": 16}},
              "verify": {"windows": 1, "length": 128}, "report": {"json": "r.json"},
              "emit": [{"path": "a.qpk"}, {"format": "gptq", "path": "g"}, {"format": "awq", "path": "a"},
                       {"format": "compressed-tensors", "path": "c"}]}
    with open("r.yaml", "w", encoding="utf-8") as f:
        json.dump(recipe, f)
    succeeds("r.yaml")
    report = load("r.json")
    figures = [a.get("evaluation", report["evaluation"])["kld_mean"] for a in report["artifacts"]]
    same(figures, figures[:1] * 4, "figures of four outputs with the same codes")
    recipe["emit"] = [{"path": "b.qpk"}, {"format": "hf", "path": "h"},
                      {"format": "gptq", "path": "g8", "quantize": {"method": "rtn", "weights": {"bits": 3}}}]
    with open("r.yaml", "w", encoding="utf-8") as f:
        json.dump(recipe, f)
    fails(4, ["gptq", "INT3"], "r.yaml")
    check(not os.path.exists("b.qpk") and not os.path.exists("h"), "something was written before the refusal")


def case_rules_of_fused_matrices():
    """GPTQ's rules are regular expressions over modules: vllm looks for the one that matches qkv_proj or gate_up_proj."""
    thirty_two = ", ".join(f"{{match: '*.{name}_proj', group: 32}}" for name in ("q", "k", "v", "gate", "up"))
    convert(DEMO, "g", "--format", "gptq", "--bits", "4", "--group", "128", "--set", f"quantize.overrides=[{thirty_two}]")
    config = load("g/config.json")["quantization_config"]
    rules = {**config["dynamic"]}
    usual, other = (config["group_size"], 128 + 32 - config["group_size"])
    same({rule["group_size"] for rule in rules.values()}, {other}, "groups of the rules")
    for module in ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down"):
        path = f"model.layers.3.{'mlp' if module in ('gate', 'up', 'gate_up', 'down') else 'self_attn'}.{module}_proj"
        hits = [key for key in rules if re.match(key.removeprefix("+:"), path)]
        want = 128 if module in ("o", "down") else 32
        same([rules[key]["group_size"] for key in hits] or [usual], [want], f"rules of {path}")
        check(not any(re.match(key.removeprefix("+:"), path.replace("layers.3", "layers.33")) for key in rules), "a rule too wide")


# ---- refusals and publication ----

def case_refused_at_plan_time():
    cases = [
        (["--format", "gptq", "--bits", "3"], ["down_proj", "gptq", "4 or 8 bits"]),
        (["--format", "awq", "--bits", "8"], ["awq", "4 bits"]),
        (["--format", "gptq", "--set", "emit.0.type=v1", "--set", "quantize.weights.symmetric=false"], ["v2"]),
        (["--format", "gptq", "--bits", "8", "--set", "quantize.activations.bits=8"], ["activations"]),
        (["--format", "compressed-tensors", "--bits", "4", "--set", "quantize.activations.bits=8"], ["activations", "INT8"]),
        (["--format", "awq", "--set", "quantize.overrides=[{match: '*.down_proj', group: 64}]"], ["down_proj", "group 64"]),
    ]
    for options, words in cases:
        fails(4, words, DEMO, "-o", "x", "--group", "128", *options)
    fails(2, ["v3", "gptq"], DEMO, "-o", "x", "--format", "gptq", "--type", "v3")
    same(os.listdir("."), [], "files")


def case_folders_are_published_whole():
    convert(DEMO, "m", "--format", "gptq", "--bits", "8", "--group", "128")
    before = sha256("m/model.safetensors")
    fails(2, ["m", "exists already"], DEMO, "-o", "m", "--format", "gptq")
    r = run(DEMO, "-o", "m", "--format", "gptq", "--bits", "4", "--group", "128", "--gate", "ppl_ratio=1.0000001", "--force", *SHORT)
    same(r.returncode, 1, "exit code of a failed gate")
    same(sha256("m/model.safetensors"), before, "what was there")
    check(os.path.exists("m.rejected/config.json"), "the rejected folder is missing")
    os.mkdir("mine")
    open("mine/notes.txt", "w", encoding="utf-8").close()
    fails(2, ["mine"], DEMO, "-o", "mine", "--format", "gptq", "--force")
    fails(2, ["model"], DEMO, "-o", DEMO, "--format", "gptq", "--force")
    same(sorted(os.listdir(".")), ["m", "m.rejected", "mine", "r.json"], "files")


def case_same_bytes_for_any_threads():
    for n in ("1", "2"):
        convert(DEMO, f"m{n}/x" if os.path.isdir(f"m{n}") else f"m{n}", "--format", "gptq", "--bits", "4", "--group", "128",
                "--threads", n)
    same(sha256("m1/model.safetensors"), sha256("m2/model.safetensors"), "one and two threads")


# ---- broken folders ----

def case_broken_folders():
    convert(DEMO, "g", "--format", "gptq", "--bits", "4", "--group", "128")

    def broken(words, code=3, config=None, rename=None, word=None):
        shutil.rmtree("b", ignore_errors=True)
        shutil.copytree("g", "b")
        if config:
            doc = load("b/config.json")
            doc["quantization_config"].update(config)
            json.dump(doc, open("b/config.json", "w", encoding="utf-8"))
        data = bytearray(open("b/model.safetensors", "rb").read())
        if rename:
            data = bytearray(bytes(data).replace(*rename))
        if word:
            size = struct.unpack("<Q", data[:8])[0]
            begin = json.loads(data[8:8 + size])[word[0]]["data_offsets"][0] + 8 + size
            data[begin:begin + 4] = struct.pack("<i", word[1])
        open("b/model.safetensors", "wb").write(data)
        fails(code, words, "b", program=QINSPECT)

    q = b"model.layers.0.self_attn.q_proj."
    broken(["q_proj.scales", "missing"], rename=(q + b"scales", q + b"scalez"))
    broken(["q_proj.qweight", "without"], rename=(q + b"qweight", q + b"qwaight"))
    broken(["q_proj.g_idx", "group 77"], word=("model.layers.0.self_attn.q_proj.g_idx", 77))
    broken(["q_proj.g_idx", "group -1"], word=("model.layers.0.self_attn.q_proj.g_idx", -1))
    broken(["marlin"], code=4, config={"checkpoint_format": "marlin"})
    broken(["bitsandbytes"], code=4, config={"quant_method": "bitsandbytes"})
    broken(["I32"], code=4, config={"quant_method": "compressed-tensors", "format": "pack-quantized"})
    broken(["qweight"], config={"quant_method": "awq"})


def case_broken_vectors():
    """The same for AWQ and compressed-tensors, on folders that the libraries made."""
    vectors = f"{DEMO}/../../engines"

    def broken(name, words, code=3, config=None, rename=None):
        shutil.rmtree("b", ignore_errors=True)
        shutil.copytree(f"{vectors}/{name}", "b")
        os.remove("b/values.st")
        doc = load("b/config.json")
        doc["quantization_config"].update(config or {})
        with open("b/config.json", "w", encoding="utf-8") as f:
            json.dump(doc, f)
        with open("b/model.safetensors", "r+b") as f:
            data = f.read()
            check(not rename or rename[0] in data, f"{rename} of {name}")
            f.seek(0)
            f.write(data.replace(*rename) if rename else data)
        fails(code, words, "b", program=QINSPECT)

    awq, ct, asym, w8a8 = "awq-4-asym", "ct-4", "ct-4-asym", "ct-w8a8"
    broken(awq, ["m.qweight", "missing"], rename=(b"m.qzeros", b"m.qzerox"))
    broken(awq, ["m.qwwight", "I32"], code=4, rename=(b"m.qweight", b"m.qwwight"))
    broken(awq, ["gemv"], code=4, config={"version": "gemv"})
    broken(awq, ["expected in F16"], code=4, rename=(b'"F16"', b'"I16"'))
    broken(awq, ["shapes"], rename=(b'"shape":[96,4]', b'"shape":[48,8]'))
    broken(awq, ["m.qzeros", "expected"], rename=(b'"shape":[3,4]', b'"shape":[4,3]'))
    broken(ct, ["m.weight_shapx", "I64"], code=4, rename=(b"m.weight_shape", b"m.weight_shapx"))
    broken(ct, ["m.weight_packed", "missing"], rename=(b"m.weight_scale", b"m.weight_scalx"))
    broken(ct, ["weight_shape"], rename=(b'"shape":[32,12]', b'"shape":[12,32]'))
    broken(ct, ["marlin-24"], code=4, config={"format": "marlin-24"})
    broken(ct, ["kv_cache_scheme"], code=4, config={"kv_cache_scheme": {"num_bits": 8}})
    broken(ct, ["sparsity_config"], code=4, config={"sparsity_config": {"format": "sparse-24-bitmask"}})
    broken(ct, ["no group"], config={"config_groups": {}})
    broken(asym, ["weight_zero_point", "expected"], rename=(b'"shape":[4,3]', b'"shape":[3,4]'))
    broken(w8a8, ["m.weight", "weight_scale"], rename=(b"m.weight_scale", b"m.weight_scalx"))
    groups = load(f"{vectors}/{w8a8}/config.json")["quantization_config"]["config_groups"]
    groups["group_0"]["input_activations"]["dynamic"] = False
    broken(w8a8, ["input_activations"], code=4, config={"config_groups": groups})
    broken("gptq-v2-4", ["shapes"], rename=(b'"shape":[12,32]', b'"shape":[32,12]'))
    broken("gptq-v2-4", ["m.qzeros", "expected"], rename=(b'"dtype":"F16","shape":[3,32]', b'"dtype":"F16","shape":[32,3]'))
    # the label is obeyed, and a symmetric file whose zeros fit the other version only is told of
    shutil.rmtree("b")
    shutil.copytree(f"{vectors}/gptq-v1-4", "b")
    doc = load("b/config.json")
    doc["quantization_config"]["checkpoint_format"] = "gptq_v2"
    with open("b/config.json", "w", encoding="utf-8") as f:
        json.dump(doc, f)
    check("fit gptq only" in succeeds("b", program=QINSPECT).stderr, "no warning of zero points that fit the other version")


# ---- engines ----

def case_engine_lint():
    convert(DEMO, "g", "--format", "gptq", "--bits", "4", "--group", "128")
    out = succeeds("g", "--engine", "vllm", program=QINSPECT).stdout
    check("tensor_parallel" not in out and "over up to" in out, out)
    convert(DEMO, "a", "--format", "gptq", "--bits", "4", "--group", "128", "--set", "quantize.weights.symmetric=false")
    check(any(e["kind"] == "engine" and "vllm" in e["detail"] for e in load("r.json")["events"]), "vllm is not mentioned")
    fails_after = run("a", "--engine", "vllm", "--json", program=QINSPECT)
    same(fails_after.returncode, 4, "exit code")
    doc = json.loads(fails_after.stdout)
    same((doc["loads"], doc["engine"], doc["findings"][0]["rule"]), (False, "vllm", "grid"), "findings")
    succeeds("a", "--engine", "transformers", program=QINSPECT)
    fails(4, ["vllm", "symmetric"], DEMO, "-o", "x", "--format", "gptq", "--set", "emit.0.engine=vllm", "--set",
          "quantize.weights.symmetric=false")
    # as vllm 0.32 did on a CPU (docs/engines.md): v2 is no matter where there are no zero points, groups are
    convert(DEMO, "v2", "--format", "gptq", "--type", "v2", "--bits", "4", "--group", "128")
    succeeds("v2", "--engine", "vllm", program=QINSPECT)
    fails(4, ["_proj", "groups of 32, 64, 128", "16"], DEMO, "-o", "x", "--format", "gptq", "--group", "16", "--engine", "vllm")
    for name in ("awq", "compressed-tensors"):
        convert(DEMO, "s", "--format", name, "--bits", "4", "--group", "16", "--engine", "vllm")
    shutil.copytree(f"{DEMO}/../../engines/gptq-v2-4-order", "order")
    os.remove("order/values.st")
    r = run("order", "--engine", "vllm", program=QINSPECT)
    check(r.returncode == 4 and "desc_act" in r.stdout, f"columns out of order: {r.returncode} {r.stdout}")
    mixed = ["--format", "compressed-tensors", "--group", "128", "--set", "quantize.overrides=[{match: '*.k_proj', bits: 8}]"]
    fails(4, ["k_proj", "q_proj", "vllm"], DEMO, "-o", "x", "--set", "emit.0.engine=vllm", *mixed)
    fails(4, ["onnxruntime", "gptq"], DEMO, "-o", "x", "--format", "gptq", "--engine", "onnxruntime")
    fails(2, ["nope", "vllm|transformers"], "g", "--engine", "nope", program=QINSPECT)
    r = run(DEMO, "--engine", "llama.cpp", program=QINSPECT)
    same(r.returncode, 4, "llama.cpp and a checkpoint folder")
    # AWQ runs in float16: a value beyond its range is found
    convert(DEMO, "w", "--format", "awq", "--bits", "4", "--group", "128")
    succeeds("w", "--engine", "transformers", program=QINSPECT)
    poke("w", "model.embed_tokens.weight", struct.pack("<H", 0x4780))  # 65536 as BF16
    same(run("w", "--engine", "transformers", program=QINSPECT).returncode, 4, "a value that float16 can not hold")


main(globals())
