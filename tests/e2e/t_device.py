"""The emulated device from outside: what it makes is as good as what the CPU makes, and what fails on it ends in one line."""
import functools
import os

import e2e
from e2e import BUILD_ROOT, DEMO, MODELS, SOURCE_ROOT, check, fails, load, main, run, same, sha256

QEVAL = os.path.join(BUILD_ROOT, "src", "cli", "qeval")
QCALIB = os.path.join(BUILD_ROOT, "src", "cli", "qcalib")
TEXT = os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-calib.txt")
TINY_TEXT = ("--windows", "1", "--length", "48")
CALIB = ("--calib", TEXT, "--calib-windows", "1", "--calib-length", "48")
DEVICES = ("cpu", "emulated")
# Fibers are slow; on the demo model some matrices of each kind of input must do.
PART = [x for layer in range(1, 6) for x in ("--skip", f"*.layers.{layer}.*")] + ["--skip", "*.gate_proj.*", "--skip", "*.up_proj.*"]
succeeds = functools.partial(e2e.succeeds, timeout=400)


def tiny(family):
    return os.path.join(MODELS, "tiny", family)


def emulated(*settings):
    """The environment of a run whose device is to fail."""
    return {**os.environ, "QC_EMULATION": ",".join(settings)}


def relative(a, b):
    return abs(a / b - 1)


# ---- evaluation ----

def case_same_perplexity():
    """float32 on both sides: sums in another order."""
    for family in ("qwen3", "gemma2", "gemma3_text"):
        if not os.path.exists(os.path.join(tiny(family), "tokenizer.json")):
            continue
        for device in DEVICES:
            r = succeeds(tiny(family), "--text", TEXT, *TINY_TEXT, "--device", device, "--json", program=QEVAL)
            with open(f"{device}.json", "w", encoding="utf-8") as f:
                f.write(r.stdout)
        ppl = [load(f"{d}.json")["ppl"] for d in DEVICES]
        check(relative(*ppl) < 1e-4, f"perplexity of {family}: {ppl}")


# ---- conversion ----

def case_rounding_gives_the_same_file():
    """Rounding to nearest, the search included, is the same arithmetic to the last bit."""
    for name, flags in {"q4": ("--bits", "4"), "q3": ("--bits", "3", "--asymmetric")}.items():
        for device in DEVICES:
            succeeds(tiny("qwen3"), "-o", f"{device}.qpk", "--force", "--no-verify", "--group", "64", "--device", device, *flags)
        same(sha256("emulated.qpk"), sha256("cpu.qpk"), f"{name} of the emulated device")


def case_gptq_of_the_demo():
    """Errors of each matrix within 2 %, KL divergence within 3 %: a code near a tie may fall to the other side, and what
    follows with it."""
    reports = {}
    for device in DEVICES:
        succeeds(DEMO, "-o", f"{device}.qpk", "--method", "gptq", *CALIB, "--windows", "1", "--length", "128", "--device", device,
                 "--report", f"{device}.json", *PART)
        reports[device] = load(f"{device}.json")
    cpu, device = (reports[d] for d in DEVICES)
    same(cpu["tool"]["device"], "cpu", "device of the report")
    same(device["tool"]["device"], "emulated:0", "device of the report")
    same(device["tool"]["kernels"], "emulated device sm_90", "kernels of the report")
    check(device["peak_device_bytes"] > 1_000_000 and "peak_device_bytes" not in cpu, "peak of the device's memory")
    kld = [r["evaluation"]["kld_mean"] for r in (device, cpu)]
    check(relative(*kld) < 0.03, f"KL divergence {kld}")
    errors = [{t["name"]: t["error"] for t in r["tensors"] if t.get("method") == "gptq"} for r in (device, cpu)]
    check(len(errors[0]) == 5 and errors[0].keys() == errors[1].keys(), f"{len(errors[0])} matrices")
    for name, error in errors[0].items():
        check(relative(error, errors[1][name]) < 0.02, f"{name}: error {error}, on the CPU {errors[1][name]}")


def case_every_method():
    """Each method runs through on the device, at about the CPU's error; statistics made on either serve both."""
    methods = {"awq": (), "smoothquant": ("--bits", "8", "--set", "quantize.activations.bits=8")}
    for method, flags in methods.items():
        kld = []
        for device in DEVICES:
            succeeds(tiny("qwen3"), "-o", "a.qpk", "--force", "--method", method, "--group", "64", *CALIB, "--text", TEXT,
                     *TINY_TEXT, "--device", device, "--report", "a.json", *flags)
            kld.append(load("a.json")["evaluation"]["kld_mean"])
        check(relative(*kld) < 0.03, f"KL divergence by {method}: {kld}")
    for device in DEVICES:
        succeeds("make", tiny("qwen3"), "--text", TEXT, "--windows", "1", "--length", "48", "--device", device, "-o", f"{device}.qcs",
                 program=QCALIB)
        succeeds(tiny("qwen3"), "-o", f"{device}.qpk", "--method", "gptq", "--group", "64", "--no-verify", "--device", "emulated",
                 "--set", f"calibration.statistics={device}.qcs", "--set", "quantize.gptq.order=min-pivot")


def case_bfloat16():
    for device in DEVICES:
        r = succeeds(tiny("qwen3"), "--text", TEXT, *TINY_TEXT, "--device", device, "--compute", "bf16", "--json", program=QEVAL)
        with open(f"{device}.json", "w", encoding="utf-8") as f:
            f.write(r.stdout)
    ppl = [load(f"{d}.json")["ppl"] for d in DEVICES]
    check(relative(*ppl) < 1e-3, f"perplexity in bfloat16: {ppl}")


# ---- failures ----

def case_device_lost():
    for at in (1, 40, 400):
        fails(5, ["emulated:0: the device is lost", "700"], tiny("qwen3"), "-o", "a.qpk", "--method", "gptq", "--group", "64", *CALIB,
              "--no-verify", "--device", "emulated", env=emulated(f"cuLaunchKernel:{at}:700"))
        check(not any(x.endswith(".qpk") or ".tmp-" in x for x in os.listdir(".")), f"files left: {os.listdir('.')}")


def case_out_of_device_memory():
    fails(5, ["emulated:0: out of device memory"], DEMO, "-o", "a.qpk", "--method", "gptq", *CALIB, "--no-verify", "--device",
          "emulated", env=emulated("memory:3000000"))
    check(not any(x.endswith(".qpk") or ".tmp-" in x for x in os.listdir(".")), f"files left: {os.listdir('.')}")


def case_no_device():
    fails(4, ["kernels were not built for this device", "7.5"], tiny("qwen3"), "-o", "a.qpk", "--device", "emulated", "--no-verify",
          env=emulated("architecture:75", "cuModuleLoadData:1:209"))
    fails(4, ["no CUDA device"], tiny("qwen3"), "-o", "a.qpk", "--device", "emulated", "--no-verify", env=emulated("devices:0"))
    env = {k: v for k, v in os.environ.items() if k != "QC_CUDA_EMULATOR"}
    fails(4, ["QC_CUDA_EMULATOR"], tiny("qwen3"), "-o", "a.qpk", "--device", "emulated", "--no-verify", env=env)
    fails(4, ["run.device: "], tiny("qwen3"), "-o", "a.qpk", "--device", "cuda:7", "--no-verify")


def case_auto_is_the_cpu():
    r = run(tiny("qwen3"), "-o", "a.qpk", "--group", "64", "--no-verify", "-v", "--report", "a.json")
    same(r.returncode, 0, f"exit code ({r.stderr})")
    same(load("a.json")["tool"]["device"], "cpu", "device")


os.environ["QC_EMULATION"] = "unordered"  # the tests of operations look at that
if "QC_CUDA_EMULATOR" not in os.environ:
    print("SKIP: no emulator: this build has no C++ compiler")
    raise SystemExit(77)
main(globals())
