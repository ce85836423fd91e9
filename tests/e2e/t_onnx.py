"""ONNX folders: every family written, read back and the same model; grids, conversions, refusals, damage."""
import json
import os
import random
import shutil

from e2e import BUILD_ROOT, DEMO, MODELS, SOURCE_ROOT, TINY, check, copy_model, fails, load, main, run, same, sha256, succeeds

QEVAL = os.path.join(BUILD_ROOT, "src", "cli", "qeval")
QINSPECT = os.path.join(BUILD_ROOT, "src", "cli", "qinspect")
TEXT = os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-heldout.txt")
SHORT = ["--windows", "1", "--length", "64"]
PLAIN = ["--set", "quantize.skip=['*']", "--set", "quantize.embedding.bits=16"]


def tiny(name):
    return os.path.join(MODELS, "tiny", name)


def convert(model, out, *options):
    succeeds(model, "-o", out, "--force", "--report", "r.json", *SHORT, *options)
    return load("r.json")


def listing(path):
    doc = json.loads(succeeds(path, "--json", program=QINSPECT).stdout)
    return doc["format"], {t["name"]: t for t in doc["tensors"]}


def score(path, vocab=250):
    """Summed NLL of fixed ids, digit for digit."""
    ids = random.Random(3).choices(range(vocab), k=48)
    with open("ids.json", "w", encoding="utf-8") as f:
        json.dump([ids], f)
    return json.loads(succeeds(path, "--ids", "ids.json", "--json", program=QEVAL).stdout)["sequences"][0]["nll_sum"]


def case_every_family_is_the_same_model():
    """Without a grid not a bit is lost: the values of the source come back."""
    for name in ("llama", "mistral", "qwen2", "qwen3", "qwen3-untied", "llama3-rope", "llama-bias", "qwen3-yarn"):
        succeeds(tiny(name), "-o", "m", "--format", "onnx", "--force", "--no-verify", *PLAIN)
        same(score("m"), score(tiny(name)), f"NLL of {name}")


def case_the_folder():
    report = convert(DEMO, "d", "--format", "onnx", "--bits", "4", "--group", "128")
    same(sorted(os.listdir("d")), ["README.md", "config.json", "genai_config.json", "generation_config.json", "manifest.json",
                                   "model.onnx", "model.onnx.data", "tokenizer.json", "tokenizer_config.json"], "files")
    same(report["artifacts"][0]["bytes"], sum(os.path.getsize(f"d/{f}") for f in os.listdir("d")), "bytes")
    for side in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        same(sha256(f"d/{side}"), sha256(f"{DEMO}/{side}"), side)
    source, genai = load(f"{DEMO}/config.json"), load("d/genai_config.json")
    same((genai["model"]["type"], genai["model"]["vocab_size"], genai["model"]["decoder"]["num_hidden_layers"]),
         ("qwen3", source["vocab_size"], source["num_hidden_layers"]), "genai_config.json")
    same(genai["model"]["context_length"], source["max_position_embeddings"], "context")
    fmt, tensors = listing("d")
    same(fmt, "onnx", "format")
    same(tensors["model.layers.0.self_attn.q_proj.weight"]["grid"],
         {"bits": 4, "symmetric": True, "group": 128, "scale": "F32"}, "grid of a matrix")
    same(tensors["model.embed_tokens.weight"]["grid"]["bits"], 8, "bits of the embedding")
    card = open("d/README.md", encoding="utf-8").read()
    check("library_name: onnxruntime-genai" in card and "SHA-256" in card, "model card")
    text = succeeds("d", *SHORT, "--json", program=QEVAL).stdout
    same(json.loads(text)["ppl"], report["evaluation"]["ppl"], "perplexity read again")
    succeeds("d", "--engine", "onnxruntime", program=QINSPECT)
    fails(4, ["d", "vllm"], "d", "--engine", "vllm", program=QINSPECT)


def case_grids():
    for bits, group, symmetric in ((4, 16, "true"), (4, 64, "false"), (8, 32, "true"), (8, 128, "false")):
        q = ["--bits", bits, "--group", group, "--set", f"quantize.weights.symmetric={symmetric}", "--set", "quantize.embedding.bits=16"]
        ours = convert(DEMO, "o", "--format", "onnx", *q)["evaluation"]
        same(ours, convert(DEMO, "q.qpk", *q)["evaluation"], f"figures of INT{bits} group {group} as qpk")
    for table in (4, 8):
        convert(DEMO, "o", "--format", "onnx", "--bits", "4", "--group", "128", "--set", f"quantize.embedding.bits={table}", "--set",
                "quantize.embedding.symmetric=false")
        same(listing("o")[1]["model.embed_tokens.weight"]["grid"]["symmetric"], False, "zero points of the table")
    convert(tiny("qwen3-untied"), "u", "--format", "onnx", "--bits", "4", "--group", "32")
    check({"lm_head.weight", "model.embed_tokens.weight"} <= set(listing("u")[1]), "head and table of an untied model")


def case_blocks_of_tables():
    """A scale per row, which tables have by default, becomes one per block; that is said."""
    succeeds(tiny("llama-bias"), "-o", "t", "--report", "r.json", "--no-verify", "--format", "onnx", "--bits", "4", "--group", "32")
    report = load("r.json")
    events = [e["subject"] for e in report["events"] if e["kind"] == "type_fallback"]
    check("model.embed_tokens.weight" in events, f"events {events}")
    same(listing("t")[1]["model.embed_tokens.weight"]["grid"]["group"], 32, "the largest block that divides 96")


def case_codes_are_carried():
    convert(DEMO, "g", "--format", "gptq", "--bits", "4", "--group", "64")
    report = convert("g", "o", "--format", "onnx")
    same(report["evaluation"]["kld_max"], 0, "KL divergence")
    same({t["method"] for t in report["tensors"] if t["action"] == "quantized"}, {"carried"}, "methods")
    same(convert("o", "c", "--format", "compressed-tensors")["evaluation"]["kld_max"], 0, "KL divergence back")


def case_refused():
    onnx = ["--format", "onnx", "-o", "x", "--no-verify"]
    fails(4, ["INT3", "4 or 8 bits"], TINY, *onnx, "--bits", "3", "--group", "32")
    fails(4, ["INT4", "256"], DEMO, *onnx, "--bits", "4", "--group", "channel")
    fails(4, ["activations"], TINY, *onnx, "--bits", "8", "--group", "128", "--set", "quantize.activations.bits=8")
    for family in ("gemma2", "phi3", "olmo2", "granite", "mixtral"):
        fails(4, ["ONNX", family], tiny(family), *onnx, *PLAIN)
    model = copy_model(TINY, "m", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    fails(4, ["ONNX", "length of the text"], model, *onnx, *PLAIN)
    same([f for f in os.listdir() if "x" in f.split(".")], [], "files of refused runs")
    fails(2, ["type"], TINY, *onnx, "--type", "f16")


def case_bad_folders():
    convert(TINY, "o", "--format", "onnx", "--bits", "4", "--group", "32")

    def refused(code, words, change):
        shutil.rmtree("bad", ignore_errors=True)
        shutil.copytree("o", "bad")
        change()
        fails(code, ["bad", *words], "bad", "--ids", "ids.json", program=QEVAL)

    score("o")
    refused(3, ["model.onnx.data"], lambda: os.remove("bad/model.onnx.data"))
    refused(3, ["do not fit"], lambda: os.truncate("bad/model.onnx.data", 100000))
    refused(3, ["model.onnx"], lambda: os.truncate("bad/model.onnx", 2000))
    refused(3, ["config.json"], lambda: os.remove("bad/config.json"))
    rng = random.Random(11)
    with open("o/model.onnx", "rb") as f:
        good = f.read()
    for _ in range(60):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with open("bad/model.onnx", "wb") as f:
            f.write(data)
        shutil.copy("o/config.json", "bad/config.json")
        r = run("bad", "--ids", "ids.json", program=QEVAL)
        check(r.returncode in (0, 3, 4), f"exit code {r.returncode} ({r.stderr})")
        same(len([x for x in r.stderr.splitlines() if ": error: " in x]), int(r.returncode != 0), f"errors ({r.stderr})")


def case_same_bytes():
    digests = set()
    for threads in (1, 3):
        succeeds(TINY, "-o", "o", "--format", "onnx", "--bits", "4", "--group", "32", "--force", "--no-verify", "--threads", threads)
        digests.add(tuple(sha256(f"o/{f}") for f in sorted(os.listdir("o"))))
    same(len(digests), 1, "different folders with another number of threads")


def case_one_calibration():
    recipe = {"model": DEMO, "calibration": {"text": os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-calib.txt"),
                                             "windows": 4, "length": 128},
              "quantize": {"method": "gptq", "weights": {"bits": 4, "group": 64}, "embedding": {"bits": 16}},
              "verify": {"windows": 1, "length": 64}, "report": {"json": "r.json"},
              "emit": [{"format": "onnx", "path": "o", "engine": "onnxruntime"}, {"format": "compressed-tensors", "path": "c"}]}
    with open("r.yaml", "w", encoding="utf-8") as f:
        json.dump(recipe, f)
    succeeds("r.yaml")
    report = load("r.json")
    figures = [a.get("evaluation", report["evaluation"])["kld_mean"] for a in report["artifacts"]]
    same(figures[0], figures[1], "figures of two outputs with the same codes")


main(globals())
