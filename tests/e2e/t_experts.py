"""Models with experts: every method from checkpoint to packed file and back, the same bytes however the run goes, and what
is done and said about experts that the text does not reach."""
import json
import os
import signal
import struct
import subprocess
import time

from e2e import QCONVERT, check, copy_model, fails, load, main, run, same, sha256, succeeds
from tinies import METHODS, nll, quantize, read_tensors, tiny, write_ids, write_tensors

MODELS = {"mixtral": ("block_sparse_moe.gate.weight", ".w2.weight"), "qwen3_moe": ("mlp.gate.weight", ".down_proj.weight")}


def experts_of(report, layer=None):
    return [t for t in report["tensors"] if ".experts." in t["name"] and layer in (None, t["layer"])]


def number(tensor):
    return int(tensor["name"].split(".experts.")[1].split(".")[0])


def case_every_method():
    for name, (router, _) in MODELS.items():
        stored = read_tensors(tiny(name))
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
            # rounding sends a few of the 96 tokens to other experts, which moves their targets by up to one each; a matrix in
            # the wrong place moves the sum of 47 by tens
            for got, true in zip(nll("a.qpk", name), golden):
                check(abs(got - true) < 6, f"{what}: nll {got}, of the model {true}")


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


def case_few_tokens():  # K-1
    """Expert 3 is like expert 0 to the router, and the first of equals is taken: it never gets a token. The others get few."""
    model = copy_model(tiny("mixtral"), "m", num_experts_per_tok=1)
    tensors = read_tensors(tiny("mixtral"))
    for layer in range(3):
        name = f"model.layers.{layer}.block_sparse_moe.gate.weight"
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, data[:3 * 128] + data[:128])
    write_tensors("m/model.safetensors", tensors)
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
        plan = json.loads(succeeds(*flags, "-n", "--json").stdout)["peak_rss_bytes"]
        succeeds(*flags, "--memory", plan - 6_000_000)
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


def case_refused():
    model = tiny("qwen3_moe")
    calib = ("--calib", write_ids(model), "--calib-windows", "2", "--calib-length", "64", "--set", "calibration.perplexity_limit=1e9")
    fails(4, ["quantize.budget is not supported for layers with experts"], model, "-o", "a.qpk", "-g", "16", "--size", "300KB", "--method", "gptq", *calib)
    with open("s.qcs", "wb") as f:
        f.write(struct.pack("<8s", b"x"))
    fails(4, ["given statistics are not supported for layers with experts"], model, "-o", "a.qpk", "-g", "16", "--method", "gptq", "--statistics", "s.qcs")


main(globals())
