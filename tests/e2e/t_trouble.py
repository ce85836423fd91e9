"""Bad input, bad places, gates, signals and kills: the right exit code, one clear line, nothing half-written."""
import json
import os
import random
import resource
import signal
import struct
import subprocess
import time

from e2e import DEMO, QCONVERT, TINY, check, copy_model, fails, load, main, run, same, sha256, succeeds

FAST = ("-g", "16", "--no-verify")
VERIFY = ("-g", "16", "--windows", "2", "--length", "64")


def files(folder="."):
    return sorted(os.listdir(folder))


# ---- outputs and gates ----

def case_existing_output():
    succeeds(TINY, "-o", "a.qpk", *FAST)
    before = sha256("a.qpk")
    fails(2, ["a.qpk", "exists"], TINY, "-o", "a.qpk", "-b", "8", *FAST)
    same(sha256("a.qpk"), before, "the old output")
    succeeds(TINY, "-o", "a.qpk", "-b", "8", "--force", *FAST)
    check(sha256("a.qpk") != before, "--force did not replace")
    same(files(), ["a.qpk"], "files")


def case_gates():
    r = run(TINY, "-o", "a.qpk", *VERIFY, "--gate", "kld_mean=1e-12", "--report", "r.json")
    same(r.returncode, 1, f"exit code ({r.stderr})")
    same(files(), ["a.qpk.rejected", "r.json"], "files")
    gate = load("r.json")["gates"][0]
    check(gate["name"] == "kld_mean" and gate["pass"] is False and gate["value"] > 1e-12, f"gate {gate}")
    succeeds(TINY, "-o", "b.qpk", *VERIFY, "--gate", "ppl_ratio=2", "--gate", "top1=0.01", "--gate", "fallbacks=0")
    r = run(TINY, "-o", "c.qpk", *VERIFY, "--gate", "kld_mean=1e-12", "--keep-failed")
    check(r.returncode == 1 and "c.qpk" in files(), "--keep-failed")
    fails(2, ["kld_meen", "kld_mean"], TINY, "-o", "d.qpk", *VERIFY, "--gate", "kld_meen=1")


def case_a_failed_gate_leaves_the_old_output():
    succeeds(TINY, "-o", "a.qpk", *FAST)
    before = sha256("a.qpk")
    same(run(TINY, "-o", "a.qpk", "-f", *VERIFY, "--gate", "ppl_ratio=0.01").returncode, 1, "exit code")
    same(sha256("a.qpk"), before, "the earlier artifact")


def case_output_is_input():  # O-2
    model = copy_model(TINY, "model")
    weights = "model/model.safetensors"
    before = {n: sha256(f"model/{n}") for n in files("model")}
    os.symlink("model/model.safetensors", "soft.qpk")
    os.link(weights, "hard.qpk")
    os.symlink("model", "soft-model")
    for path in (weights, "./model/../" + weights, "soft.qpk", "hard.qpk", "model", "model/new.qpk", "soft-model/new.qpk"):
        r = run(model, "-o", path, "--force", *FAST)
        same(r.returncode, 2, f"exit code for {path} ({r.stderr})")
    same({n: sha256(f"model/{n}") for n in files("model")}, before, "the input")
    succeeds(model, "-o", "ok.qpk", *FAST)
    before = sha256("ok.qpk")
    fails(2, ["ok.qpk"], "ok.qpk", "-o", "./ok.qpk", "--force", "--no-verify")
    same(sha256("ok.qpk"), before, "the packed file")


def case_places():  # O-8, O-9
    fails(2, ["output"], TINY, *FAST)
    fails(2, ["model"], "-o", "a.qpk", *FAST)
    fails(5, ["no/such"], TINY, "-o", "no/such/a.qpk", *FAST)
    fails(2, ["."], TINY, "-o", ".", *FAST)
    fails(2, ["folder"], TINY, "-o", ".", "--format", "qpk", *FAST)
    model = copy_model(TINY, "model")
    before = files(model)
    os.chmod(model, 0o555)
    succeeds(model, "-o", "a.qpk", *FAST)
    same(files(model), before, "files beside the source")
    os.mkdir("locked", 0o555)
    if os.geteuid() != 0:
        fails(5, ["locked"], TINY, "-o", "locked/a.qpk", *FAST)


def case_disk_full():
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    fails(5, ["a.qpk"], TINY, "-o", "a.qpk", *FAST, preexec_fn=limit)
    same(files(), [], "files")


# ---- signals and kills ----

def start(*args):
    return subprocess.Popen([QCONVERT, *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def case_signals():  # O-3
    succeeds(DEMO, "-o", "a.qpk", "--no-verify")
    before = sha256("a.qpk")
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        p = start(DEMO, "-o", "a.qpk", "-b", "8", "--force", "--windows", "all", "--length", "512")
        time.sleep(0.7)
        p.send_signal(number)
        _, err = p.communicate(timeout=60)
        same(p.returncode, code, f"exit code after signal {number} ({err})")
        same(files(), ["a.qpk"], "files")
        same(sha256("a.qpk"), before, "the earlier artifact")


def case_kills():  # O-1, O-5
    succeeds(DEMO, "-o", "want.qpk", "--no-verify")
    want = sha256("want.qpk")
    os.mkdir("out")
    chance = random.Random(7)
    left = 0
    for _ in range(20):
        p = start(DEMO, "-o", "out/a.qpk", "--no-verify", "--force")
        time.sleep(chance.uniform(0.005, 0.35))
        p.kill()
        p.communicate()
        left += any(n != "a.qpk" for n in files("out"))
        if os.path.exists("out/a.qpk"):
            same(sha256("out/a.qpk"), want, "a file under the final name")
    succeeds(DEMO, "-o", "out/a.qpk", "--no-verify", "--force")
    same(sha256("out/a.qpk"), want, "the file of a whole run")
    same(files("out"), ["a.qpk"], f"files after {left} kills left something")


# ---- models ----

def case_bad_models():
    fails(3, ["absent"], "absent", "-o", "a.qpk", *FAST)
    fails(3, [], "/dev/null", "-o", "a.qpk", *FAST)
    model = copy_model(TINY, "cut")
    with open("cut/model.safetensors", "r+b") as f:
        f.truncate(os.path.getsize("cut/model.safetensors") - 1)
    fails(3, ["model.safetensors"], model, "-o", "a.qpk", *FAST)
    model = copy_model(TINY, "long-header")
    with open("long-header/model.safetensors", "r+b") as f:
        f.write(struct.pack("<Q", 1 << 62))
    fails(3, ["model.safetensors"], model, "-o", "a.qpk", *FAST)
    fails(4, ["model_type"], copy_model(TINY, "family", model_type="nobody"), "-o", "a.qpk", *FAST)
    fails(3, ["embed_tokens", "config.json"], copy_model(TINY, "shape", hidden_size=96, head_dim=16), "-o", "a.qpk", *FAST)
    fails(3, ["gptq"], copy_model(TINY, "prequant", quantization_config={"quant_method": "gptq", "bits": 4}), "-o", "a.qpk", *FAST)  # O-7
    model = copy_model(TINY, "no-config")
    os.remove("no-config/config.json")
    fails(3, ["config.json"], model, "-o", "a.qpk", *FAST)
    same([n for n in files() if n.endswith("qpk") or n.startswith(".")], [], "files written")


def case_nonfinite_weights():  # N-2
    model = copy_model(TINY, "nan")
    with open("nan/model.safetensors", "r+b") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        header = json.loads(f.read(n))
        name = next(k for k in header if k.endswith("down_proj.weight"))
        f.seek(8 + n + header[name]["data_offsets"][0])
        f.write(b"\xff\xff\xff\xff")
    fails(3, [name], model, "-o", "a.qpk", *FAST)
    same(files(), ["nan"], "files")


def case_grids():  # O-6, Q-3
    fails(4, ["proj"], TINY, "-o", "a.qpk", "-g", "1024", "--no-verify")
    r = run(TINY, "-o", "a.qpk", "-g", "1024", "--group-fallback", "channel", "--no-verify", "--report", "r.json")
    same(r.returncode, 6, f"exit code of fallbacks that nobody allowed ({r.stderr})")
    fallbacks = [e for e in load("r.json")["events"] if e["level"] == "fallback"]
    check(fallbacks and "fallback" in r.stdout, "the change of groups is reported")
    same(run(TINY, "-o", "b.qpk", "-g", "1024", "--group-fallback", "channel", *VERIFY[2:], "--gate", "fallbacks=0").returncode, 1,
         "exit code of gate fallbacks=0")
    for bits in range(2, 9):
        succeeds(TINY, "-o", f"{bits}.qpk", "-b", bits, *FAST)
    fails(2, ["9"], TINY, "-o", "c.qpk", "-b", "9", *FAST)


def case_recipe_keys():
    with open("r.yaml", "w", encoding="utf-8") as f:
        f.write(f"model: {TINY}\nquantize:\n  method: gptq\nemit:\n  - {{path: a.qpk}}\n")
    fails(2, ["quantize.method", "calibration.text"], "r.yaml")
    with open("r.yaml", "w", encoding="utf-8") as f:
        f.write(f"model: {TINY}\nemit:\n  - {{path: a.tflite}}\n")
    fails(2, ["a.tflite", "names no format"], "r.yaml")
    with open("r.yaml", "w", encoding="utf-8") as f:
        f.write(f"model: {TINY}\nquantise: {{bits: 4}}\nemit:\n  - {{path: a.qpk}}\n")
    fails(3, ["r.yaml:2", "quantise"], "r.yaml")
    with open("r.yaml", "w", encoding="utf-8") as f:
        f.write(f"model: {TINY}\nquantize: {{weights: {{bits: 4, group: 16}}}}\nverify: {{windows: 2, length: 64}}\n"
                "emit:\n  - {path: a.qpk}\nreport: {json: r.json}\n")
    succeeds("r.yaml")
    same(files(), ["a.qpk", "r.json", "r.yaml"], "files")
    r = succeeds("r.yaml", "--force", "--dry-run")
    check("a.qpk" in r.stdout, "the plan names the output")


# ---- texts ----

def case_texts():
    for name, content, words in (("empty.txt", b"", []), ("short.txt", b"Too short.", []), ("latin1.txt", b"caf\xe9 " * 500, ["UTF-8"])):
        with open(name, "wb") as f:
            f.write(content)
        fails(3, [name, *words], TINY, "-o", "a.qpk", *VERIFY, "--text", name)
    fails(3, ["absent.txt"], TINY, "-o", "a.qpk", *VERIFY, "--text", "absent.txt")
    same([n for n in files() if "qpk" in n], [], "files written")


def case_memory():  # O-4
    fails(5, ["memory"], DEMO, "-o", "a.qpk", "--memory", "1MB", "--no-verify")
    succeeds(DEMO, "-o", "a.qpk", "--memory", "80MB", "--no-verify", "--report", "r.json")
    check(load("r.json")["peak_rss_bytes"] <= 80e6, f"peak {load('r.json')['peak_rss_bytes']}")


main(globals())
