"""GGUF files: as sources evaluated, listed and tokenized as they are, bad ones refused in one line; as outputs the same model."""
import json
import os
import random
import struct
import subprocess

from e2e import BUILD_ROOT, MODELS, DEMO, SOURCE_ROOT, TINY, check, copy_model, fails, load, main, run, same, sha256, succeeds

QEVAL = os.path.join(BUILD_ROOT, "src", "cli", "qeval")
QINSPECT = os.path.join(BUILD_ROOT, "src", "cli", "qinspect")
GGUF = os.path.join(SOURCE_ROOT, "tests", "data", "gguf", "tiny-llama.gguf")
LLAMA = os.path.join(MODELS, "tiny", "llama")
CALIB = os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-calib.txt")
TEXT = os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-heldout.txt")


def evaluate(*args):
    r = run(*args, "--text", TEXT, "--windows", "2", "--length", "128", "--json", program=QEVAL)
    same(r.returncode, 0, f"exit code ({r.stderr})")
    return json.loads(r.stdout)


def case_evaluated():
    """Half of the layers are 16 bit, the rest 8 and 4: near the checkpoint, and the same ids."""
    ours, theirs = evaluate(GGUF, "--reference", LLAMA), evaluate(LLAMA)
    same(ours["ids_sha256"], theirs["ids_sha256"], "ids")
    check(0 < ours["kld_mean"] < 0.02, f"KL divergence {ours['kld_mean']}")
    check(abs(ours["ppl_reference"] - theirs["ppl"]) < 1e-6 * theirs["ppl"], "reference")


def case_listed():
    r = run(GGUF, "--json", program=QINSPECT)
    same(r.returncode, 0, "exit code")
    doc = json.loads(r.stdout)
    same((doc["format"], len(doc["tensors"])), ("gguf", 21), "list")
    same(run(GGUF, "--check", program=QINSPECT).returncode, 0, "exit code of --check")


def case_bad_files():
    with open(GGUF, "rb") as f:
        good = f.read()

    def refused(code, words, data):
        with open("bad.gguf", "wb") as f:
            f.write(data)
        fails(code, ["bad.gguf", *words], "bad.gguf", program=QINSPECT)

    refused(3, ["cut off"], good[:-40000])
    refused(3, ["beyond the end"], good[:1000])
    refused(4, ["version 9"], good[:4] + struct.pack("<I", 9) + good[8:])
    refused(4, ["mamba"], good.replace(b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
                                       b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0mamba", 1))
    with open("none.gguf", "wb") as f:
        f.write(b"hello")
    fails(4, ["none.gguf", "GGUF"], "none.gguf", program=QINSPECT)


def case_random_damage():
    """Whatever byte of the head is changed: an answer or one error line, never a crash."""
    with open(GGUF, "rb") as f:
        good = f.read()
    rng = random.Random(5)
    for _ in range(60):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(13000)] = rng.randrange(256)
        with open("bad.gguf", "wb") as f:
            f.write(data)
        r = run("bad.gguf", "--text", TEXT, "--windows", "1", "--length", "8", program=QEVAL)
        check(r.returncode in (0, 2, 3, 4), f"exit code {r.returncode} ({r.stderr})")
        same(len([x for x in r.stderr.splitlines() if ": error: " in x]), int(r.returncode != 0), f"errors ({r.stderr})")


# ---- written ----

def tiny(name):
    return os.path.join(MODELS, "tiny", name)


def kld(path, model, length):
    r = run(path, "--reference", model, "--text", TEXT, "--windows", "2", "--length", str(length), "--json", program=QEVAL)
    same(r.returncode, 0, f"exit code for {model} ({r.stderr})")
    doc = json.loads(r.stdout)
    return doc["kld_mean"], doc["kld_max"]


def ids(path, text, *args):
    r = subprocess.run([QINSPECT, "tokenize", path, *args], input=text, capture_output=True, text=True, timeout=60)
    same(r.returncode, 0, f"exit code of tokenize {path} ({r.stderr})")
    return r.stdout


def case_every_family_is_the_same_model():
    """As F32 not a bit is lost: rows of q and k, biases, norms, rotary frequencies, ties and metadata. A sliding window is the
    context that is left."""
    for name, length in (("llama", 256), ("mistral", 16), ("qwen2", 16), ("qwen3", 256), ("qwen3-untied", 256), ("llama3-rope", 256)):
        succeeds(tiny(name), "-o", "a.gguf", "--type", "f32", "--force", "--no-verify")
        same(kld("a.gguf", tiny(name), length), (0, 0), f"KL divergence of {name}")
        text = "It was 12345678 o'clock,\n\n  and  they'll <|endoftext|> sleep."
        same(ids("a.gguf", text), ids(tiny(name), text), f"ids of {name}")


def case_biases_and_yarn():
    """Checkpoints without a tokenizer get one of the same vocabulary."""
    for name in ("llama-bias", "qwen3-yarn"):
        model = copy_model(tiny(name), name)
        with open(os.path.join(tiny("llama"), "tokenizer.json"), encoding="utf-8") as f:
            tokenizer = json.load(f)
        n = load(os.path.join(model, "config.json"))["vocab_size"]
        vocab = {t: i for t, i in tokenizer["model"]["vocab"].items() if i < n}
        tokenizer["model"]["vocab"] = vocab
        tokenizer["model"]["merges"] = [m for m in tokenizer["model"]["merges"]
                                        if "".join(m if isinstance(m, list) else m.split(" ")) in vocab]
        tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["id"] < n]
        with open(os.path.join(model, "tokenizer.json"), "w", encoding="utf-8") as f:
            json.dump(tokenizer, f)
        succeeds(model, "-o", f"{name}.gguf", "--type", "f32", "--no-verify")
        same(kld(f"{name}.gguf", model, 64), (0, 0), f"KL divergence of {name}")


def case_types():
    """Each type by default and by bits; the size that was planned is the size that comes."""
    limits = {"q8_0": 1e-3, "q6_k": 0.01, "q5_1": 0.02, "q5_k": 0.02, "q5_0": 0.05, "q4_1": 0.1, "q4_k": 0.1, "q4_k_m": 0.1, "q4_0": 0.2, "bf16": 1e-4}
    for type_, limit in limits.items():
        succeeds(DEMO, "-o", f"{type_}.gguf", "--type", type_, "--windows", "2", "--length", "64", "--report", "r.json", "--force")
        e = load("r.json")["evaluation"]
        check(0 <= e["kld_mean"] < limit, f"{type_}: KL divergence {e['kld_mean']}")
        same(load("r.json")["artifacts"][0]["bytes"], os.path.getsize(f"{type_}.gguf"), "size")
    check(os.path.getsize("q4_0.gguf") < os.path.getsize("q5_0.gguf") < os.path.getsize("q8_0.gguf"), "sizes")
    succeeds(TINY, "-o", "b4.gguf", "-b", "4", "--no-verify")
    types = {t["name"]: t.get("grid", {}) for t in json.loads(run("b4.gguf", "--json", program=QINSPECT).stdout)["tensors"]}
    same(types["model.layers.0.mlp.up_proj.weight"]["bits"], 4, "bits")
    same(types["model.embed_tokens.weight"]["bits"], 8, "bits of the embedding")
    fails(4, ["7 bits"], TINY, "-o", "b7.gguf", "-b", "7", "--no-verify")
    fails(2, ["q9_9"], TINY, "-o", "x.gguf", "--type", "q9_9")
    fails(4, ["activations"], TINY, "-o", "x.gguf", "-b", "8", "--set", "quantize.activations.bits=8", "--no-verify")
    same(sorted(f for f in os.listdir() if "x.gguf" in f), [], "files of refused runs")


def case_refused_families():
    for name in ("gemma2", "phi3", "olmo2"):
        fails(4, ["GGUF"], tiny(name), "-o", "x.gguf", "--type", "f16", "--no-verify")
    model = copy_model(tiny("llama"), "odd")
    path = os.path.join(model, "tokenizer.json")
    doc = load(path)
    doc["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}
    with open(path, "w", encoding="utf-8") as f:
        json.dump(doc, f)
    fails(4, ["tokenizer.json", "pre_tokenizer"], model, "-o", "x.gguf", "--type", "f16", "--no-verify")


def case_bos():  # T-13
    """add_bos_token of the file is what encoding with the source's files does."""
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
                                                        {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [510], "tokens": ["<|im_start|>"]}}}
    k = 0
    for flag in (True, False, None):
        for post in (template, None):
            k += 1
            model = copy_model(tiny("llama"), f"m{k}", bos_token_id=510)
            doc = load(os.path.join(model, "tokenizer.json"))
            doc["post_processor"] = post
            config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
            if flag is not None:
                config["add_bos_token"] = flag
            for name, value in (("tokenizer.json", doc), ("tokenizer_config.json", config)):
                with open(os.path.join(model, name), "w", encoding="utf-8") as f:
                    json.dump(value, f)
            succeeds(model, "-o", f"{k}.gguf", "--type", "f16", "--no-verify")
            same(ids(f"{k}.gguf", "so be it", "--special"), ids(model, "so be it", "--special"), f"ids {flag} {post is None}")


def case_calibrated():
    """GPTQ onto grids with super-blocks and minima: the same size, nearer to the model; interrupted and resumed the same bytes."""
    for type_ in ("q4_k_m", "q4_1"):
        figures = []
        for extra in ((), ("--method", "gptq", "--calib", CALIB, "--calib-windows", "4", "--calib-length", "256")):
            succeeds(DEMO, "-o", "a.gguf", "--type", type_, *extra, "--windows", "2", "--length", "128", "--report", "r.json", "--force")
            figures.append((os.path.getsize("a.gguf"), load("r.json")["evaluation"]["kld_mean"]))
        check(abs(figures[0][0] - figures[1][0]) < 20000, f"sizes {figures}")  # the manifests differ
        check(figures[1][1] < 0.7 * figures[0][1], f"KL divergence {figures}")


def case_widths():
    """Widths that no block divides: the next type that fits is taken and listed, 16 bit at the end."""
    r = succeeds(TINY, "-o", "a.gguf", "--type", "q4_k", "--no-verify", "--report", "r.json")
    kinds = {e["kind"] for e in load("r.json")["events"]}
    check("type_fallback" in kinds, f"events {kinds} ({r.stderr})")
    model = copy_model(tiny("qwen2"), "m")
    succeeds(model, "-o", "b.gguf", "--type", "q4_k", "--no-verify", "--report", "s.json")
    tensors = json.loads(run("b.gguf", "--json", program=QINSPECT).stdout)["tensors"]
    widths = {(t["shape"][-1], t["dtype"]) for t in tensors if len(t["shape"]) == 2}
    check(all((w % 32 == 0) == (d == "GRID") for w, d in widths), f"types by width {widths}")


def case_same_bytes():
    for threads in (1, 2, 7):
        succeeds(TINY, "-o", "a.gguf", "--type", "q4_0", "--force", "--no-verify", "--threads", str(threads))
        first = sha256("a.gguf") if threads == 1 else first
        same(sha256("a.gguf"), first, f"file with {threads} threads")


def case_several_outputs():
    with open("r.yaml", "w", encoding="utf-8") as f:
        f.write(f"model: {TINY}\nquantize: {{weights: {{bits: 8}}}}\nverify: {{text: '{TEXT}', windows: 1, length: 32}}\nemit:\n"
                "  - {path: a.gguf}\n  - {path: b.gguf, type: q5_0}\n  - {path: c.gguf, type: f16}\nreport: {json: r.json}\n")
    succeeds("r.yaml")
    same([a["path"] for a in load("r.json")["artifacts"]], ["a.gguf", "b.gguf", "c.gguf"], "artifacts")
    check(os.path.getsize("b.gguf") < os.path.getsize("a.gguf") < os.path.getsize("c.gguf"), "sizes")


main(globals())
