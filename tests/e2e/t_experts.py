"""Models with experts: every method from checkpoint to packed file and back, the same bytes however the run goes, and what
is done and said about experts that the text does not reach."""
import array
import json
import math
import os
import random
import shutil
import signal
import struct
import subprocess
import time

from e2e import BUILD_ROOT, QCONVERT, check, copy_model, fails, least_plan, load, main, plan_of, run, same, sha256, succeeds
from tinies import METHODS, nll, quantize, read_tensors, tiny, write_ids, write_tensors

QCALIB = os.path.join(BUILD_ROOT, "src", "cli", "qcalib")
MODELS = {"mixtral": ("block_sparse_moe.gate.weight", ".w2.weight"), "qwen3_moe": ("mlp.gate.weight", ".down_proj.weight")}


def experts_of(report, layer=None):
    return [t for t in report["tensors"] if ".experts." in t["name"] and layer in (None, t["layer"])]


def number(tensor):
    return int(tensor["name"].split(".experts.")[1].split(".")[0])


def spread(model, name, router, seeds=12):
    """Root mean square of what noise in the weights, about as large as rounding to 8 bits in groups of 16, does to the summed NLL
    of a sequence: each weight is moved by one unit in the last place of BF16, up, down, or not at all."""
    copy_model(model, "noisy")
    stored, want, squares = read_tensors(model), nll(model, name), []
    for seed in range(seeds):
        rng, tensors = random.Random(seed), {}
        for tensor, (dtype, shape, data) in stored.items():
            if len(shape) == 2 and not tensor.endswith(router):
                bits = array.array("H", data)
                data = array.array("H", (b + d if b & 0x7FFF else b for b, d in zip(bits, rng.choices((-1, 0, 1), k=len(bits))))).tobytes()
            tensors[tensor] = (dtype, shape, data)
        write_tensors("noisy/model.safetensors", tensors)
        squares += [(got - true) ** 2 for got, true in zip(nll("noisy", name), want)]
    shutil.rmtree("noisy")
    return math.sqrt(sum(squares) / len(squares))


def case_every_method():
    """The models answer noise in the weights by other routes for some tokens, which moves a sum by more than the noise itself does:
    qwen3_moe by 1.4, where every token goes to all experts by .5. Four times that is allowed; a matrix in the wrong place
    moves it by tens."""
    for name, (router, _) in MODELS.items():
        stored = read_tensors(tiny(name))
        limit = 4 * spread(tiny(name), name, router)
        golden = load(os.path.join(tiny(name), "golden.json"))["nll_sum"]
        for method in METHODS:
            what = f"{name}, {method}"
            report = quantize(tiny(name), "a.qpk", method)
            same(sorted(t["name"] for t in report["tensors"]), sorted(stored), f"account of {what}")
            for t in report["tensors"]:
                matrix = len(stored[t["name"]][1]) == 2 and not t["name"].endswith(router)
                same(t["action"], "quantized" if matrix else "copied", f"{t['name']}, {what}")
                if method != "rtn" and matrix and t["layer"] >= 0:
                    same(t["method"], "gptq" if "gptq" in method else "rtn", f"method of {t['name']}, {what}")
            rules = {t["rule"] for t in report["tensors"] if t["name"].endswith(router)}
            check(rules <= ({"router"} if method in ("rtn", "gptq") else {"router", "scales folded in"}), f"rules of routers, {what}: {rules}")
            check(not [e for e in report["events"] if e["level"] == "fallback"], f"events of {what}: {report['events']}")
            for got, true in zip(nll("a.qpk", name), golden):
                check(abs(got - true) < limit, f"{what}: nll {got}, of the model {true}, expected within {limit}")


def case_without_routes():
    """Where every token goes to all experts no route can change, and what is left is the rounding."""
    for name, (router, _) in MODELS.items():
        model = copy_model(tiny(name), name, num_experts_per_tok={"mixtral": 4, "qwen3_moe": 8}[name])
        want, limit = nll(model, name), 4 * spread(model, name, router)
        check(limit < 2.5, f"{name}: limit {limit}")
        for method in METHODS:
            quantize(model, "a.qpk", method)
            for got, true in zip(nll("a.qpk", name), want):
                check(abs(got - true) < limit, f"{name}, {method}: nll {got}, of the model {true}, expected within {limit}")


def case_scales_are_shared():
    """A fold changes nothing but the rounding: with scales in norm and router, and 8 bits, no logit goes astray."""
    for name in MODELS:
        report = quantize(tiny(name), "a.qpk", "awq", "--set", "quantize.awq.sites=norms")
        routers = [t for t in report["tensors"] if t["name"].endswith(MODELS[name][0])]
        check(any(t["rule"] == "scales folded in" and t["bits"] == 32 for t in routers), f"routers of {name}: {routers}")


def case_tokens_are_those_of_the_router():
    """Per layer the experts' tokens add up to all tokens times the experts per token; with all experts each has them all."""
    for name, per_token in (("mixtral", 2), ("qwen3_moe", 2)):
        report = quantize(tiny(name), "a.qpk", "gptq")
        for layer in {t["layer"] for t in experts_of(report)}:
            downs = [t for t in experts_of(report, layer) if t["name"].endswith(MODELS[name][1])]
            same(sum(t["tokens"] for t in downs), 512 * per_token, f"tokens of layer {layer} of {name}")
            check(len({t["tokens"] for t in downs}) > 1, f"tokens of layer {layer}: {downs}")
        routed = sha256("a.qpk")
        report = quantize(tiny(name), "a.qpk", "gptq", "--calibrate-all-experts")
        same({t["tokens"] for t in experts_of(report)}, {512}, f"tokens with all experts, {name}")
        check(not [e for e in report["events"] if "expert" in e["kind"]], f"events with all experts: {report['events']}")
        check(sha256("a.qpk") != routed, "all experts make no difference")


def starved(name):
    """Expert 3 is like expert 0 to the router, and the first of equals is taken: it never gets a token."""
    model = copy_model(tiny("mixtral"), name, num_experts_per_tok=1)
    tensors = read_tensors(tiny("mixtral"))
    for layer in range(3):
        router = f"model.layers.{layer}.block_sparse_moe.gate.weight"
        dtype, shape, data = tensors[router]
        tensors[router] = (dtype, shape, data[:3 * 128] + data[:128])
    write_tensors(f"{name}/model.safetensors", tensors)
    return model


def case_few_tokens():  # K-1
    model = starved("m")
    calib = ("--calib", write_ids(model), "--calib-windows", "2", "--calib-length", "40", "--set", "calibration.perplexity_limit=1e9")
    flags = (model, "-o", "a.qpk", "-g", "16", "--no-verify", "--report", "r.json", "--force", *calib)
    for method in ("gptq", "rtn"):
        r = run(*flags, "--method", method)
        same((r.returncode, "3 fallbacks of the kind expert_without_tokens" in r.stderr), (6, True), f"a run with fallbacks ({r.stderr})")
        check(os.path.exists("a.qpk"), "the output of a run with fallbacks")
        succeeds(*flags, "--method", method, "--set", "allow.expert_without_tokens=3")
        report = load("r.json")
        without = [e for e in report["events"] if e["kind"] == "expert_without_tokens"]
        same([(e["subject"], e["count"], e["level"]) for e in without], [(f"layer {i}", 1, "fallback") for i in range(3)], "experts without tokens")
        check(all("3 (0 tokens)" in e["detail"] for e in without), f"what is told: {without}")
        few = [e for e in report["events"] if e["kind"] == "expert_few_tokens"]
        for layer in range(3):
            tokens = {number(t): t["tokens"] for t in experts_of(report, layer)}
            same((tokens[3], sum(tokens.values())), (0, 80), f"tokens of layer {layer}")
            short = [f"{e} ({n} tokens)" for e, n in sorted(tokens.items()) if 0 < n < 80]
            told = [e for e in few if e["subject"] == f"layer {layer}"]
            same((len(told), told[0]["count"], told[0]["level"]), (1, len(short), "note"), f"few tokens of layer {layer}: {few}")
            check(all(s in told[0]["detail"] for s in short), f"{told} lacks one of {short}")
            for t in experts_of(report, layer):
                same(t["method"], method if number(t) != 3 else "rtn", t["name"])


def case_threads_and_memory():
    for name in MODELS:
        model, ids = tiny(name), write_ids(tiny(name), n=48 * 256)
        flags = (model, "-o", "a.qpk", "-g", "16", "--method", "awq+gptq", "--calib", ids, "--calib-windows", "48", "--calib-length", "256",
                 "--set", "calibration.perplexity_limit=1e9", "--no-verify", "--force")
        digests = set()
        for threads in ("1", "2", "7"):
            succeeds(*flags, "-t", threads)
            digests.add(sha256("a.qpk"))
        same(len(digests), 1, f"files of {name} by number of threads")
        plan, tight = plan_of(*flags), least_plan(*flags)
        check(tight["disk_bytes"] > plan["disk_bytes"], f"plans {plan}, {tight}")
        succeeds(*flags, "--memory", tight["peak_rss_bytes"])
        same({sha256("a.qpk")}, digests, f"bytes of {name} when streams spill")


def case_resumed():
    for name in MODELS:
        model, ids = tiny(name), write_ids(tiny(name), n=64 * 256)
        flags = (model, "-o", "a.qpk", "-g", "16", "--method", "awq+gptq", "--calib", ids, "--calib-windows", "64", "--calib-length", "256",
                 "--set", "calibration.perplexity_limit=1e9", "--no-verify")
        succeeds(*flags)
        want = sha256("a.qpk")
        os.remove("a.qpk")
        for _ in range(5):
            p = subprocess.Popen([QCONVERT, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while p.poll() is None and not (os.path.exists("a.qpk.journal") and os.path.getsize("a.qpk.journal") > 100_000):
                time.sleep(0.002)
            p.send_signal(signal.SIGINT)
            if p.wait(60) != 0:
                break
            os.remove("a.qpk")  # it was faster than we
        else:
            raise AssertionError("the run was never interrupted")
        succeeds(*flags, "--resume")
        same(sha256("a.qpk"), want, f"bytes of {name} after a resume")
        os.remove("a.qpk")


# ---- other ways to store them ----

def fuse(name):
    """The tensors of a tiny model with the experts of a layer in one, as transformers 5 stores them."""
    tensors, stacks = {}, {}
    for tensor, (dtype, shape, data) in read_tensors(tiny(name)).items():
        if ".experts." not in tensor:
            tensors[tensor.replace("block_sparse_moe", "mlp")] = (dtype, shape, data)
            continue
        prefix, rest = tensor.replace("block_sparse_moe", "mlp").split(".experts.")
        expert, part = rest.split(".")[:2]
        part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(part, part)
        stacks.setdefault(prefix, {})[int(expert), part] = (dtype, shape, data)
    for prefix, parts in stacks.items():
        n = 1 + max(e for e, _ in parts)
        dtype, (ffn, hidden), _ = parts[0, "gate_proj"]
        tensors[f"{prefix}.experts.gate_up_proj"] = (dtype, [n, 2 * ffn, hidden], b"".join(parts[e, p][2] for e in range(n) for p in ("gate_proj", "up_proj")))
        tensors[f"{prefix}.experts.down_proj"] = (dtype, [n, hidden, ffn], b"".join(parts[e, "down_proj"][2] for e in range(n)))
    return tensors


def case_fused():
    for name in MODELS:
        model = copy_model(tiny(name), name)
        tensors = fuse(name)
        write_tensors(f"{name}/model.safetensors", tensors)
        same(nll(model, name), nll(tiny(name), name), f"nll of {name} with fused experts")
        for method in ("rtn", "gptq"):
            report = quantize(model, "a.qpk", method, bits="4")
            fused = {t["name"].replace("block_sparse_moe", "mlp"): (t["action"], t["bytes_in"], t["bytes_out"]) for t in report["tensors"]}
            score = nll("a.qpk", name)
            report = quantize(tiny(name), "a.qpk", method, bits="4")
            same(score, nll("a.qpk", name), f"nll by {method}")
            names = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj.", "block_sparse_moe": "mlp"}
            for t in report["tensors"]:
                for old, new in names.items():
                    t["name"] = t["name"].replace(old, new)
            same(fused, {t["name"]: (t["action"], t["bytes_in"], t["bytes_out"]) for t in report["tensors"]}, f"account by {method}")
        broken = dict(tensors)
        whole = next(n for n in broken if n.endswith("gate_up_proj"))
        dtype, shape, data = broken[whole]
        for bad, code, words in (([shape[0] * shape[1], shape[2]], 3, "expected [experts, 2 ffn, hidden]"), ([shape[0] // 2, 2 * shape[1], shape[2]], 3, "by config.json")):
            broken[whole] = (dtype, bad, data)
            write_tensors(f"{name}/model.safetensors", broken)
            fails(code, [words], model, "-o", "b.qpk", "-g", "16")


def to_f8(data):
    """BF16 values as E4M3 codes of the nearest lower magnitude that a scale of 2^-6 allows, and what they stand for."""
    codes, values = bytearray(), bytearray()
    for (bits,) in struct.iter_unpack("<H", data):
        exponent = (bits >> 7 & 0xFF) - 127 + 6  # of value / 2^-6
        code = 0 if exponent < -6 else min(exponent + 7, 15) << 3 | (bits >> 4 & 7 if exponent <= 8 else 6)
        code = 0x7E if code == 0x7F else code
        value = 0 if code == 0 else ((code >> 3) - 7 - 6 + 127) << 7 | (code & 7) << 4
        codes.append(code | bits >> 8 & 0x80)
        values += struct.pack("<H", value | bits & 0x8000)
    return bytes(codes), bytes(values)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def case_fp8():
    """A checkpoint in FP8 is the one with the same values in BF16."""
    eights, sixteens = {}, {}
    for name, (dtype, shape, data) in read_tensors(tiny("qwen3_moe")).items():
        eights[name] = sixteens[name] = (dtype, shape, data)
        if name.endswith("_proj.weight"):
            codes, values = to_f8(data)
            eights[name], sixteens[name] = ("F8_E4M3", shape, codes), ("BF16", shape, values)
            eights[name + "_scale_inv"] = ("F32", [-(-n // 128) for n in shape], struct.pack("<f", 2 ** -6))
    eight, sixteen = copy_model(tiny("qwen3_moe"), "eight", quantization_config=FP8), copy_model(tiny("qwen3_moe"), "sixteen")
    write_tensors("eight/model.safetensors", eights)
    write_tensors("sixteen/model.safetensors", sixteens)
    want = nll(sixteen, "qwen3_moe")
    same(nll(eight, "qwen3_moe"), want, "nll")
    for method in ("rtn", "gptq"):
        quantize(sixteen, "b.qpk", method, bits="4")
        quantize(eight, "a.qpk", method, bits="4")
        same(nll("a.qpk", "qwen3_moe"), nll("b.qpk", "qwen3_moe"), f"nll by {method}")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    for what, change, code, words in (
            ("zero", {name + "_scale_inv": ("F32", [1, 1], struct.pack("<f", 0))}, 3, ["scale of block 0, 0 is 0, expected a positive number"]),
            ("negative", {name + "_scale_inv": ("F32", [1, 1], struct.pack("<f", -1))}, 3, ["is -1"]),
            ("NaN", {name + "_scale_inv": ("F32", [1, 1], struct.pack("<I", 0x7FC00000))}, 3, ["is nan"]),
            ("infinite", {name + "_scale_inv": ("F32", [1, 1], struct.pack("<I", 0x7F800000))}, 3, ["is inf"]),
            ("shape", {name + "_scale_inv": ("F32", [1, 2], bytes(8))}, 3, ["F32 [1, 2], expected F32, F16 or BF16 [1, 1]"]),
            ("type", {name + "_scale_inv": ("U8", [1, 1], b"1")}, 3, ["is U8 [1, 1]"]),
            ("missing", {name + "_scale_inv": None}, 3, [name, "expected a matrix with scales called"]),
            ("without weight", {name: ("BF16", [32, 64], bytes(4096))}, 3, [name + "_scale_inv", "there is no F8_E4M3 weight for it"]),
            ("code that is no number", {name: ("F8_E4M3", [32, 64], b"\x7f" + bytes(2047))}, 3, [name, "row 0, column 0 is NaN"])):
        broken = {n: t for n, t in (eights | change).items() if t}
        write_tensors("eight/model.safetensors", broken)
        fails(code, words, eight, "-o", "c.qpk", "-g", "16", "--no-verify")
        check(not os.path.exists("c.qpk"), f"output in spite of a scale that is {what}")
    write_tensors("eight/model.safetensors", eights)
    for config, words in ((dict(FP8, weight_block_size=None), "expected fmt e4m3 and weight_block_size"), (dict(FP8, weight_block_size=[128, 0]), "weight_block_size"),
                          (dict(FP8, fmt="e5m2"), "expected fmt e4m3"), (None, "does not say how it is scaled")):
        fails(4, [words], copy_model("eight", f"m{words[:3]}{id(config)}", quantization_config=config), "-o", "c.qpk", "-g", "16")


def statistics(model, path, ids, *flags):
    r = run("make", model, "--text", ids, "--no-perplexity", "-o", path, *flags, program=QCALIB)
    same(r.returncode, 0, f"exit code of qcalib ({r.stderr})")


def case_given_statistics():
    """The bytes of a run on the text whose statistics are of the 16-bit model as well, whole and from shards."""
    model, flags = tiny("qwen3_moe"), ("-g", "16", "--no-verify", "--force")
    ids = write_ids(model, n=12 * 256)  # a block of 2,048 tokens and half of one
    windows = ("--windows", "8", "--length", "256")
    text = ("--calib", ids, "--calib-windows", "8", "--calib-length", "256", "--set", "quantize.gptq.inputs=original", "--set", "calibration.perplexity_limit=1e9")
    statistics(model, "s.qcs", ids, *windows)
    for method in ("gptq", "rtn"):
        succeeds(model, "-o", "t.qpk", *flags, "--method", method, *text)
        succeeds(model, "-o", "s.qpk", *flags, "--method", method, "--statistics", "s.qcs", "--report", "r.json")
        same(sha256("s.qpk"), sha256("t.qpk"), f"bytes of {method}")
    tokens = [t["tokens"] for t in experts_of(load("r.json"), 1) if t["name"].endswith("down_proj.weight")]
    same((len(tokens), sum(tokens)), (8, 2 * 8 * 256), "tokens of the experts of layer 1")
    r = run("show", "s.qcs", "--json", program=QCALIB)
    rows = [x for x in json.loads(r.stdout)["inputs"] if (x["layer"], x["stage"]) == (1, "expert_down")]
    same([(x["expert"], x["tokens"]) for x in rows], list(enumerate(tokens)), "tokens that are shown")
    statistics(model, "all.qcs", ids, "--windows", "12", "--length", "256")
    for i in (1, 2):
        statistics(model, f"{i}.qcs", ids, "--windows", "12", "--length", "256", "--shard", f"{i}/2")
    same(run("merge", "2.qcs", "1.qcs", "-o", "m.qcs", program=QCALIB).returncode, 0, "exit code of the merge")
    same(sha256("m.qcs"), sha256("all.qcs"), "bytes of the merged shards")
    fails(3, ["s.qcs", "layers"], tiny("mixtral"), "-o", "x.qpk", *flags, "--method", "gptq", "--statistics", "s.qcs")
    same(run("imatrix", "s.qcs", "-o", "s.gguf", program=QCALIB).returncode, 0, "exit code of qcalib imatrix")
    succeeds(model, "-o", "i.qpk", *flags, "--statistics", "s.gguf", "--report", "i.json")
    same([t["tokens"] for t in experts_of(load("i.json"), 1) if t["name"].endswith("down_proj.weight")], tokens, "tokens of the importance matrix")


def case_given_statistics_of_few_tokens():
    model = starved("m")
    ids = write_ids(model)
    statistics(model, "s.qcs", ids, "--windows", "2", "--length", "40")
    same(run("imatrix", "s.qcs", "-o", "s.gguf", program=QCALIB).returncode, 0, "exit code of qcalib imatrix")
    for method, path in (("gptq", "s.qcs"), ("rtn", "s.qcs"), ("rtn", "s.gguf")):
        flags = (model, "-o", "a.qpk", "-g", "16", "--no-verify", "--force", "--report", "r.json", "--method", method, "--statistics", path)
        same(run(*flags).returncode, 6, "exit code of a run with fallbacks")
        succeeds(*flags, "--set", "allow.expert_without_tokens=3")
        events = load("r.json")["events"]
        without = [(e["subject"], e["count"]) for e in events if e["kind"] == "expert_without_tokens" and "3 (0 tokens)" in e["detail"]]
        same(without, [(f"layer {i}", 1) for i in range(3)], f"experts without tokens: {events}")
        same(len([e for e in events if e["kind"] == "expert_few_tokens" and e["level"] == "note"]), 3, "notes of few tokens")
        for t in experts_of(load("r.json")):
            same(t["method"], method if number(t) != 3 else "rtn", t["name"])


def case_refused():
    model = tiny("qwen3_moe")
    calib = ("--calib", write_ids(model), "--calib-windows", "2", "--calib-length", "64", "--set", "calibration.perplexity_limit=1e9")
    fails(4, ["quantize.budget is not supported for layers with experts"], model, "-o", "a.qpk", "-g", "16", "--size", "300KB", "--method", "gptq", *calib)


main(globals())
