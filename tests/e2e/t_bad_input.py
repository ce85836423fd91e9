"""Broken and unsuitable inputs through the programs: one line that names the culprit, the right code, nothing written."""
import json
import os
import shutil
import struct

from e2e import BUILD_ROOT, DEMO, MODELS, TINY, check, copy_model, fails, load, main, run, same, succeeds

QEVAL = os.path.join(BUILD_ROOT, "src", "cli", "qeval")
QINSPECT = os.path.join(BUILD_ROOT, "src", "cli", "qinspect")
SHARDED = os.path.join(MODELS, "tiny", "qwen3-untied")
SHORT = ("--windows", 2, "--length", 64)
CONVERT = ("-o", "a.qpk", "-g", 16, *SHORT)


def model(**config):
    shutil.rmtree("m", ignore_errors=True)
    return copy_model(TINY, "m", **config)


def refused(code, words, *flags):
    fails(code, words, "m", *CONVERT, *flags)
    same([n for n in os.listdir(".") if "qpk" in n], [], f"files written ({words})")


def poke(path, tensor, element, value):
    """Overwrite one 16-bit element of a tensor."""
    with open(path, "r+b") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        f.seek(8 + n + json.loads(f.read(n))[tensor]["data_offsets"][0] + 2 * element)
        f.write(struct.pack("<H", value))


def write(name, data):
    with open(name, "wb") as f:
        f.write(data if isinstance(data, bytes) else data.encode())


# ---- weights ----

def case_values_that_are_not_finite():  # N-2
    for tensor, element, value in (("model.layers.1.mlp.down_proj.weight", 256 * 3 + 5, 0x7FC0), ("model.layers.0.self_attn.k_norm.weight", 5, 0x7F80),
                                   ("model.norm.weight", 127, 0xFF80), ("model.embed_tokens.weight", 7, 0x7FC0)):
        weights = model() + "/model.safetensors"
        poke(weights, tensor, element, value)
        if "embed" in tensor:
            poke(weights, "lm_head.weight", element, value)  # tied: both hold the same
        refused(3, [tensor, "row", "column"])
        refused(3, [tensor], "--no-verify")
        fails(3, ["NaN" if value == 0x7FC0 else "infinity", "row", "column"], "--check", "m", program=QINSPECT)
        r = run("m", *CONVERT[:4], "--no-verify", "--allow-nonfinite", "--report", "r.json")
        same(r.returncode, 6, f"exit code with {tensor} allowed ({r.stderr})")
        events = [e for e in load("r.json")["events"] if e["kind"] == "nonfinite"]
        same([(e["subject"], e["level"], e["count"]) for e in events], [(tensor, "fallback", 1)], "events")
        check({t["name"]: t for t in load("r.json")["tensors"]}[tensor]["action"] in ("kept16", "copied"), f"{tensor} was quantized")
        os.remove("a.qpk")
        r = run("m", *CONVERT[:4], "--no-verify", "--allow-nonfinite", "--set", "allow.nonfinite=1")
        same(r.returncode, 0, "exit code with an allowance")
        os.remove("a.qpk")
        os.remove("r.json")


def case_cut_weights():
    with open(TINY + "/model.safetensors", "rb") as f:
        whole = f.read()
    header = struct.unpack("<Q", whole[:8])[0]
    model()
    for size in (0, 1, 7, 8, 9, 8 + header - 1, 8 + header, len(whole) // 2, len(whole) - 1):
        write("m/model.safetensors", whole[:size])
        refused(3, ["m/model.safetensors"])
        fails(3, ["m/model.safetensors"], "m", program=QINSPECT)
    write("m/model.safetensors", whole + b"\0")
    refused(3, ["m/model.safetensors"])


def case_shards():
    shutil.copytree(SHARDED, "m")
    os.chmod("m", 0o755)
    os.rename("m/model-00002-of-00003.safetensors", "kept")
    refused(3, ["model-00002-of-00003.safetensors"])
    write("m/model-00002-of-00003.safetensors", b"")
    refused(3, ["model-00002-of-00003.safetensors"])
    shutil.copy("m/model-00001-of-00003.safetensors", "m/model-00002-of-00003.safetensors")
    refused(3, ["m"])
    os.replace("kept", "m/model-00002-of-00003.safetensors")
    os.chmod("m/model.safetensors.index.json", 0o644)
    index = load("m/model.safetensors.index.json")
    name = sorted(index["weight_map"])[-1]
    for change in ({}, {"weight_map": {}}, {"weight_map": {**index["weight_map"], name: "../kept"}}, {"weight_map": {**index["weight_map"], "other": "model-00001-of-00003.safetensors"}}):
        write("m/model.safetensors.index.json", json.dumps(change))
        refused(3, ["m"])


# ---- configuration ----

def case_config_fields():
    cases = [
        (3, ["embed_tokens", "shape"], {"hidden_size": 100}), (3, ["layers.2."], {"num_hidden_layers": 3}), (3, ["layers.1."], {"num_hidden_layers": 1}),
        (3, ["num_hidden_layers"], {"num_hidden_layers": 0}), (3, ["num_hidden_layers"], {"num_hidden_layers": 10**9}), (3, ["q_proj"], {"head_dim": 32}),
        (3, ["num_key_value_heads"], {"num_attention_heads": 3}), (3, ["rms_norm_eps"], {"rms_norm_eps": "x"}), (3, ["rms_norm_eps"], {"rms_norm_eps": -1}),
        (3, ["rope_theta"], {"rope_theta": 0}), (4, ["unknown_field"], {"unknown_field": 3}), (4, ["logit_scale"], {"logit_scale": 0.5}),
        (3, ["model_type"], {"model_type": 5}), (4, ["nope", "qwen3"], {"model_type": "nope"}), (3, ["awq"], {"quantization_config": {"quant_method": "awq"}}),
        (3, ["bias"], {"attention_bias": True}), (3, ["max_position_embeddings"], {"max_position_embeddings": 0}),
        (4, ["LlamaForCausalLM"], {"architectures": ["LlamaForCausalLM"]}), (4, ["rope"], {"rope_scaling": {"type": "no-such", "factor": 2}}),
    ]
    for code, words, config in cases:
        model(**config)
        refused(code, words)
    for text in ("", "[]", "{", "{}"):
        model()
        write("m/config.json", text)
        refused(3, ["m/config.json"])
    model(max_position_embeddings=32)
    refused(2, ["64", "32"])
    succeeds(model(vocab_size=300), *CONVERT)  # a warning: the rows that are there count


def case_tokenizers():
    for code, words, change in ((4, ["pre_tokenizer"], {"pre_tokenizer": {"type": "Telepathy"}}), (4, ["normalizer"], {"normalizer": {"type": "Telepathy"}}),
                                (4, ["model"], {"model": {"type": "Unigram", "vocab": []}}), (3, ["tokenizer.json"], {"model": None})):
        model()
        tokenizer = load("m/tokenizer.json")
        tokenizer.update(change)
        write("m/tokenizer.json", json.dumps(tokenizer))
        refused(code, ["tokenizer.json", *words])
        fails(code, words, "m", *SHORT, program=QEVAL)
    write("m/tokenizer.json", "{")
    refused(3, ["m/tokenizer.json"])
    os.remove("m/tokenizer.json")
    refused(3, ["tokenizer.json"])


# ---- what is measured ----

def case_id_lists():
    good = {"[[1, 2, 3]]": 2, "[[1]]": 0, "[[511, 0]]": 1, "[[1, 2], [3], [4, 5, 6, 7]]": 1}
    for text, first in good.items():
        write("i.json", text)
        answer = json.loads(succeeds(TINY, "--ids", "i.json", "--json", program=QEVAL).stdout)["sequences"]
        same((len(answer), answer[0]["tokens"]), (len(json.loads(text)), first), f"answer to {text}")
        for sequence in answer:
            check((sequence["nll_sum"] > 0) == (sequence["tokens"] > 0), f"sum of {text}: {answer}")
    for text in ("", "5", "{}", "[]", "[[]]", "[1, 2]", "[[1, 2.5]]", "[[1, -1]]", "[[1, 512]]", '[["a"]]', "[[1e400, 2]]", "[[1, 2],", "[[1, 2]] x", "[[null]]",
                 "[[99999999999999999999]]", str([[1] * 513]), b"[[1, 2]]\xff"):
        write("i.json", text)
        fails(3, ["i.json"], TINY, "--ids", "i.json", program=QEVAL)
    fails(3, ["absent.json"], TINY, "--ids", "absent.json", program=QEVAL)
    fails(2, ["--ids"], TINY, "--ids", "i.json", "--reference", TINY, program=QEVAL)


def case_values_that_are_not_finite():  # E-6: where it was seen, and the weight that did it
    write("i.json", "[[1, 2, 3], [4, 5, 0, 6]]")
    model = copy_model(TINY, "row")  # of id 0
    poke(model + "/model.safetensors", "model.embed_tokens.weight", 5, 0x7FC0)
    fails(3, ["model row", "embedding", "window 1, token 2", "model.embed_tokens.weight", "row 0, column 5"], model, "--ids", "i.json",
          program=QEVAL)
    model = copy_model(TINY, "matrix")
    poke(model + "/model.safetensors", "model.layers.1.self_attn.v_proj.weight", 0, 0x7F80)
    fails(3, ["model matrix", "layer 1", "window 0, token 0", "model.layers.1.self_attn.v_proj.weight"], model, "--ids", "i.json",
          program=QEVAL)


def case_windows():
    fails(3, ["short.txt"], TINY, "--text", write("short.txt", "short") or "short.txt", *SHORT, program=QEVAL)
    for flags in (("--length", 1), ("--windows", 0), ("--length", 100000), ("--threads", 5000), ("--memory", "1XB"), ("--cpu-mask", "mmx")):
        fails(2, [], TINY, *flags, program=QEVAL)
    with open(os.path.join(MODELS, os.pardir, "text", "austen-heldout.txt"), "rb") as f:
        write("some.txt", f.read(3000))
    answer = json.loads(succeeds(TINY, "--text", "some.txt", "--windows", 10000, "--length", 64, "--json", program=QEVAL).stdout)
    check(1 <= answer["windows"] < 10000 and answer["tokens_scored"] == answer["windows"] * 63, f"as many windows as there are: {answer}")


# ---- what is listed ----

def case_qinspect():
    succeeds(TINY, "-o", "good", "--format", "qpk", "-g", 16, "--no-verify")
    with open("good", "rb") as f:
        whole = f.read()
    for size in (0, 1, 8, 64, 255, 256, 1000, 4096, len(whole) // 2, len(whole) - 1):
        write("cut", whole[:size])
        fails(3, ["cut"], "cut", program=QINSPECT)
        fails(3, ["cut"], "tokenize", "cut", program=QINSPECT)
    for at in range(0, 256, 5):  # the header has a sum of its own
        broken = bytearray(whole)
        broken[at] ^= 0x10
        write("flipped", bytes(broken))
        check(run("flipped", program=QINSPECT).returncode in (3, 4), f"byte {at} of the header changed")
    os.mkdir("empty")
    for code, words, path in ((3, ["absent"], "absent"), (3, ["empty"], "empty"), (3, ["/dev/null"], "/dev/null"), (4, ["config.json"], DEMO + "/config.json"),
                              (4, ["safetensors"], DEMO + "/model.safetensors")):
        fails(code, words, path, program=QINSPECT)
    fails(3, ["absent"], "hash", "absent", program=QINSPECT)


main(globals())
