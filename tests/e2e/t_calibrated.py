"""Calibrated runs: the same bytes with any threads, memory cap or interruption; journals that are continued or refused;
what the report says of them."""
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import time

from e2e import BUILD_ROOT, DEMO, QCONVERT, SOURCE_ROOT, TINY, check, copy_model, fails, least_plan, load, main, plan_of, poke, run, same, sha256, succeeds

QCALIB = os.path.join(BUILD_ROOT, "src", "cli", "qcalib")
QEVAL = os.path.join(BUILD_ROOT, "src", "cli", "qeval")
TEXT = os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-calib.txt")
SMALL = ("--calib", TEXT, "--calib-windows", "2", "--calib-length", "64", "--no-verify")
GPTQ = ("--method", "gptq", *SMALL)
LAYERS = 6
JOURNAL = "a.qpk.journal"


def files():
    return sorted(os.listdir("."))


def whole(*flags, name="whole.qpk", model=DEMO):
    """SHA-256 of the file that an uninterrupted run makes."""
    succeeds(model, "-o", name, "--force", *GPTQ, *flags)
    digest = sha256(name)
    os.remove(name)
    return digest


def start(*flags, model=DEMO, name="a.qpk"):
    return subprocess.Popen([QCONVERT, model, "-o", name, *GPTQ, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def interrupted(*flags, number=signal.SIGINT, journal=JOURNAL, n_bytes=600_000, **options):
    """A run that gets a signal once its journal has a layer or more. Returns exit code and stderr."""
    for _ in range(5):
        p = start(*flags, **options)
        while p.poll() is None and not (os.path.exists(journal) and os.path.getsize(journal) > n_bytes):
            time.sleep(0.002)
        p.send_signal(number)
        err = p.communicate(timeout=60)[1]
        if p.returncode != 0:
            return p.returncode, err
        os.remove(options.get("name", "a.qpk"))  # it was faster than we
    raise AssertionError("the run was never interrupted")


def layers_of(err):
    """Number of layers that the message of a stopped run says are done."""
    line = next(x for x in err.splitlines() if "--resume goes on from there" in x)
    return int(line.split(" holds ")[1].split(" of ")[0])


# ---- result ----

def case_better_than_rounding():
    errors, kld = {}, {}
    for name, flags in {"rtn": ("--method", "rtn"), "gptq": ("--method", "gptq", "--calib", TEXT, "--calib-windows", "4", "--calib-length", "256")}.items():
        succeeds(DEMO, "-o", f"{name}.qpk", "--asymmetric", *flags, "--windows", "4", "--length", "256", "--report", f"{name}.json")
        kld[name] = load(f"{name}.json")["evaluation"]["kld_mean"]
    check(kld["gptq"] < 0.7 * kld["rtn"], f"KL divergence {kld}")
    report = load("gptq.json")
    solved = [t for t in report["tensors"] if t["action"] == "quantized" and t["layer"] >= 0]
    same(len(solved), 7 * LAYERS, "calibrated matrices")
    for t in solved:
        same((t["method"], t["order"], t["damp"], t["tokens"]), ("gptq", "static", 0.01, 1024), t["name"])
        check(0 < t["error"] <= t["error_rtn"] * (1 + 1e-9) < t["error_norm"], f"errors of {t}")
        check(t["seconds"] > 0 and 0 <= t["clipped_fraction"] < 0.2, f"account of {t}")
        errors[t["name"]] = t["error"]
    embedding = next(t for t in report["tensors"] if t["rule"] == "embedding")
    check(embedding["method"] == "rtn" and "order" not in embedding, f"account of {embedding}")
    for layer in report["layers"]:
        seconds = layer["seconds"]
        same(sorted(seconds), sorted(["fold", "forward", "hessian", "factor", "solve", "pack", "io"]), "kinds of work")
        check(all(s >= 0 for s in seconds.values()) and seconds["solve"] > 0, f"times {seconds}")
    split = sum(sum(layer["seconds"].values()) for layer in report["layers"])
    check(0.5 * split <= report["timings"]["calibrate"] <= report["timings"]["total"], f"times {split}, {report['timings']}")
    c = report["calibration"]
    same((c["text"], c["windows"], c["length"], c["tokens"], c["sample"], c["seed"]), (TEXT, 4, 256, 1024, "even", 0), "calibration")
    check(len(c["ids_sha256"]) == 64 and 10 < c["ppl"] < 60 and c["ppl_windows"] == 4, f"calibration {c}")
    same(load("rtn.json")["calibration"], None, "calibration of a run without")
    same(files(), ["gptq.json", "gptq.qpk", "rtn.json", "rtn.qpk"], "files")


def case_the_perplexity_is_that_of_the_model():
    """The figure on the calibration windows against qeval on the same ids."""
    text = open(TEXT, encoding="utf-8").read()[:6000]
    with open("c.txt", "w", encoding="utf-8") as f:
        f.write(text)
    succeeds(DEMO, "-o", "a.qpk", "--method", "gptq", "--calib", "c.txt", "--calib-windows", 1, "--calib-length", 128, "--no-verify", "--report", "r.json")
    r = run(DEMO, "--text", "c.txt", "--windows", 1, "--length", 128, "--json", program=QEVAL)
    same(r.returncode, 0, f"exit code of qeval ({r.stderr})")
    check(abs(json.loads(r.stdout)["ppl"] / load("r.json")["calibration"]["ppl"] - 1) < 1e-6, "perplexity")


def case_settings_change_the_bytes():
    """Every option of the method arrives at the solver."""
    tiny = ("-g", "16", "--set", "calibration.perplexity_limit=1e9")
    seen = {whole(*tiny, model=TINY): "the defaults"}
    for flags in (["quantize.gptq.order=none"], ["quantize.gptq.order=min-pivot"], ["quantize.gptq.damp=0.1"], ["quantize.gptq.refit=false"],
                  ["quantize.gptq.sweeps=0"], ["quantize.gptq.inputs=original"], ["quantize.gptq.correct=0"], ["quantize.gptq.shrink=0"],
                  ["calibration.sample=random"], ["calibration.sample=random", "calibration.seed=7"], ["calibration.windows=3"]):
        digest = whole(*tiny, *(x for f in flags for x in ("--set", f)), model=TINY)
        check(digest not in seen, f"{flags} gives the bytes of {seen.get(digest)}")
        seen[digest] = flags
    check(whole(*tiny, "--set", "calibration.seed=7", model=TINY) in seen, "a seed counts without a random sample")


# ---- the same bytes ----

def case_threads_and_memory():
    first = whole("-t", "1")
    for threads in ("2", "7"):
        same(whole("-t", threads), first, f"bytes with {threads} threads")
    for correct in ("0", "0.5"):
        flags = ("--calib-windows", "48", "--set", f"quantize.gptq.correct={correct}")
        plan, tight = plan_of(DEMO, "-o", "p.qpk", *GPTQ, *flags), least_plan(DEMO, "-o", "p.qpk", *GPTQ, *flags)
        cap = tight["peak_rss_bytes"]
        check(cap < plan["peak_rss_bytes"] and tight["disk_bytes"] > plan["disk_bytes"], f"plans {plan}, {tight}")
        same(whole(*flags, "--memory", cap), whole(*flags), f"bytes when streams spill, {flags}")
        same(files(), [], "files")


def case_signals():  # O-3
    want = whole()
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        got, err = interrupted(number=number)
        same(got, code, f"exit code ({err})")
        check(1 <= layers_of(err) < LAYERS, f"layers that are done: {err}")
        same(files(), [JOURNAL], "files after a signal")
        fails(2, [JOURNAL, "--resume", "--force"], DEMO, "-o", "a.qpk", *GPTQ)
        r = succeeds(DEMO, "-o", "a.qpk", *GPTQ, "--resume", "-v")
        check(f"{JOURNAL}: {layers_of(err)} of {LAYERS} layers are done" in r.stderr, f"what is told: {r.stderr}")
        same(sha256("a.qpk"), want, "bytes after a resume")
        same(files(), ["a.qpk"], "files")
        os.remove("a.qpk")
    succeeds(DEMO, "-o", "a.qpk", *GPTQ, "--resume")  # nothing to resume
    same(sha256("a.qpk"), want, "bytes without a journal")
    fails(2, ["a.qpk", "exists"], DEMO, "-o", "a.qpk", *GPTQ, "--resume")


def case_nothing_done_leaves_nothing():
    p = start("--calib-windows", "500")
    while p.poll() is None and not os.path.exists(JOURNAL):
        time.sleep(0.002)
    p.send_signal(signal.SIGINT)
    err = p.communicate(timeout=60)[1]
    check(p.returncode == 130 and "--resume" not in err, f"exit code {p.returncode}, {err}")
    same(files(), [], "files of a run without a whole layer")


def case_a_resumed_report_is_the_same():
    """Figures and events of layers that were done before are those of an uninterrupted run."""
    flags = ("--calib-windows", "1", "--calib-length", "5", "--set", "quantize.gptq.damp=0", "--set",
             "quantize.gptq.shrink=0", "--set", "allow.damping=1000", "--set", "allow.rtn_fallback=1000")
    succeeds(DEMO, "-o", "a.qpk", *GPTQ, *flags, "--report", "r.json")
    want = load("r.json")
    check(any(e["kind"] == "damping" for e in want["events"]), f"no damping with 5 tokens: {want['events']}")
    os.remove("a.qpk")
    code, err = interrupted(*flags)
    same(code, 130, f"exit code ({err})")
    succeeds(DEMO, "-o", "a.qpk", *GPTQ, *flags, "--resume", "--report", "s.json")
    got = load("s.json")
    same(got["events"], want["events"], "events")
    for a, b in zip(got["tensors"], want["tensors"]):
        same({k: v for k, v in a.items() if k != "seconds"}, {k: v for k, v in b.items() if k != "seconds"}, f"account of {b['name']}")
    same(got["artifacts"][0]["sha256"], want["artifacts"][0]["sha256"], "bytes")


# ---- journals that are refused, damaged, in use ----

def case_something_changed():
    model = copy_model(DEMO, "m")
    want = whole(model=model)
    interrupted(model=model)
    before = sha256(JOURNAL)
    changes = [(["quantize.weights.bits", "was 4 and is 3"], ["-b", "3"]), (["quantize.gptq.damp", "0.02"], ["--set", "quantize.gptq.damp=0.02"]),
               (["quantize.method", "gptq", "rtn"], ["--method", "rtn"]), (["calibration ids"], ["--calib-windows", "3"]),
               (["quantize.skip[0]"], ["--skip", "*.0.mlp.up_proj"]), (["run.compute", "bf16"], ["--compute", "bf16"]),
               (["kernels"], ["--cpu-mask", "all"])]
    for words, flags in changes:
        fails(3, [JOURNAL, *words], model, "-o", "a.qpk", *GPTQ, *flags, "--resume")
    for name, change in (("model.safetensors", lambda b: b[:-1] + bytes([b[-1] ^ 1])), ("config.json", lambda b: b + b"\n")):
        with open(f"m/{name}", "rb") as f:
            data = f.read()
        with open(f"m/{name}", "wb") as f:
            f.write(change(data))
        fails(3, [JOURNAL, f"SHA-256 of {name}"], model, "-o", "a.qpk", *GPTQ, "--resume")
        with open(f"m/{name}", "wb") as f:
            f.write(data)
    same(sha256(JOURNAL), before, "the journal after refusals")
    succeeds(model, "-o", "a.qpk", *GPTQ, "--resume", "-t", "3", "--memory", "1GB")  # what does not change bytes may change
    same(sha256("a.qpk"), want, "bytes")
    os.remove("a.qpk")
    interrupted(model=model)
    succeeds(model, "-o", "a.qpk", *GPTQ, "-b", "3", "--force")
    same(sha256("a.qpk"), whole("-b", "3", model=model), "bytes of a run that began anew")
    check(JOURNAL not in files(), "the journal is left")


def case_damaged_journal():  # O-1
    want = whole()
    interrupted(n_bytes=1_200_000)
    with open(JOURNAL, "rb") as f:
        good = f.read()
    rng = random.Random(2)
    flips = [rng.randrange(64, len(good)) for _ in range(2)]
    damaged = [good[:-1], good[:len(good) // 2], good[:20], good + b"\0" * 5000, *(good[:i] + bytes([good[i] ^ 16]) + good[i + 1:] for i in flips)]
    for data in damaged:
        with open(JOURNAL, "wb") as f:
            f.write(data)
        succeeds(DEMO, "-o", "a.qpk", *GPTQ, "--resume")
        same(sha256("a.qpk"), want, f"bytes with a journal of {len(data)} bytes")
        same(files(), ["a.qpk"], "files")
        os.remove("a.qpk")
    with open(JOURNAL, "w", encoding="utf-8") as f:
        f.write("Dear diary\n")
    for flag in ("--resume", "--force"):
        fails(2, [JOURNAL, "not a journal"], DEMO, "-o", "a.qpk", *GPTQ, flag)
    same(open(JOURNAL, encoding="utf-8").read(), "Dear diary\n", "somebody else's file")


def case_two_writers():
    p = start("--calib-windows", "400")
    while p.poll() is None and not (os.path.exists(JOURNAL) and os.path.getsize(JOURNAL) > 1000):
        time.sleep(0.002)
    for flag in ("--resume", "--force"):
        fails(5, [JOURNAL, "another process"], DEMO, "-o", "a.qpk", *GPTQ, flag)
    check(p.poll() is None, "the first run has ended too early to test anything")
    p.send_signal(signal.SIGTERM)
    p.communicate(timeout=60)


def case_full_disk():
    want = whole()

    def limit(n_bytes):
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))
    r = fails(5, [JOURNAL, "write failed"], DEMO, "-o", "a.qpk", *GPTQ, preexec_fn=limit(1_200_000))
    same(layers_of(r.stderr), 2, "layers before the disk was full")
    same(files(), [JOURNAL], "files")
    r = fails(5, ["a.qpk", "write failed"], DEMO, "-o", "a.qpk", *GPTQ, "--resume", preexec_fn=limit(3_400_000))  # the journal fits, the file does not
    same(layers_of(r.stderr), LAYERS, "layers before the disk was full")
    same(files(), [JOURNAL], "files")
    succeeds(DEMO, "-o", "a.qpk", *GPTQ, "--resume")
    same(sha256("a.qpk"), want, "bytes when there is room again")
    same(files(), ["a.qpk"], "files")


# ---- several outputs ----

def recipe(**parts):
    doc = {"model": DEMO, "calibration": {"text": TEXT, "windows": 2, "length": 64}, "quantize": {"method": "gptq"}, "verify": {"enabled": False},
           "emit": [{"path": "a.qpk"}], "report": {"json": "r.json"}}
    doc.update(parts)
    with open("r.yaml", "w", encoding="utf-8") as f:  # JSON is YAML
        json.dump({k: v for k, v in doc.items() if v is not None}, f, indent=1)
    return "r.yaml"


def case_several_outputs():
    want4, want3 = whole(), whole("-b", "3")
    outputs = [{"path": "a.qpk"}, {"path": "b.qpk", "quantize": {"method": "gptq", "weights": {"bits": 3}}}, {"path": "c.qpk"}]
    plan = json.loads(succeeds(recipe(emit=outputs), "-n", "--json").stdout)
    same([s.get("journal") for s in plan["steps"]], ["a.qpk.journal", "b.qpk.journal", None], "journals of the plan")
    same(files(), ["r.yaml"], "files after a plan")
    succeeds("r.yaml")
    same([sha256(n) for n in ("a.qpk", "b.qpk", "c.qpk")], [want4, want3, want4], "bytes")
    same(files(), ["a.qpk", "b.qpk", "c.qpk", "r.json", "r.yaml"], "files")
    for name in ("a.qpk", "b.qpk", "c.qpk"):
        os.remove(name)
    p = subprocess.Popen([QCONVERT, "r.yaml", "--force"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while p.poll() is None and not os.path.exists("b.qpk.journal"):
        time.sleep(0.002)
    p.kill()
    p.communicate(timeout=60)
    if p.returncode != 0:
        check("a.qpk.journal" in files(), f"files in the second run: {files()}")
    succeeds("r.yaml", "--resume", "--force")
    same([sha256(n) for n in ("a.qpk", "b.qpk", "c.qpk")], [want4, want3, want4], "bytes after a resume")
    same(files(), ["a.qpk", "b.qpk", "c.qpk", "r.json", "r.yaml"], "files")


# ---- plan and mistakes ----

def case_plan():
    flags = ("--calib", TEXT, "--calib-windows", "8", "--calib-length", "256", "--method", "gptq", "--windows", "2", "--length", "128")
    plan = json.loads(succeeds(DEMO, "-o", "a.qpk", *flags, "-n", "--json").stdout)
    same(files(), [], "files after a plan")
    same((plan["calibration_windows"], plan["calibration_length"], plan["steps"][0]["journal"]), (8, 256, JOURNAL), "plan")
    succeeds(DEMO, "-o", "a.qpk", *flags, "--report", "r.json")
    report = load("r.json")
    plan.pop("seconds")  # what a dry run alone forecasts
    same(report["plan"], plan, "the plan in the report")
    check(report["peak_rss_bytes"] <= plan["peak_rss_bytes"], f"{plan['peak_rss_bytes']} bytes of memory planned, {report['peak_rss_bytes']} used")
    os.remove("a.qpk")
    interrupted(*flags[2:], n_bytes=2_700_000)
    with open(JOURNAL, "rb") as f:
        f.seek(0, 2)
        check(f.tell() <= plan["steps"][0]["journal_bytes"] * 1.1, "size of the journal")


def case_mistakes():
    fails(2, ["shrink 0.9", "correct 0.5"], TINY, "-o", "a.qpk", *GPTQ, "-g", "16", "--set", "quantize.gptq.shrink=0.9")
    with open("short.txt", "w", encoding="utf-8") as f:
        f.write("Too short.\n")
    with open("latin.txt", "wb") as f:
        f.write(b"caf\xe9 " * 1000)
    cases = [
        (2, ["calibration.text", "--calib"], ["--method", "gptq"]),
        (3, ["nowhere.txt"], ["--method", "gptq", "--calib", "nowhere.txt"]),
        (3, ["short.txt"], ["--method", "gptq", "--calib", "short.txt"]),
        (3, ["latin.txt", "UTF-8"], ["--method", "gptq", "--calib", "latin.txt"]),
        (2, ["calibration.length", "positions"], ["--method", "gptq", "--calib", TEXT, "--calib-length", "100000"]),
        (2, ["minmax"], ["--calib", TEXT, "--search", "minmax"]),
        (5, ["memory"], ["--method", "gptq", "--calib", TEXT, "--memory", "60MB"]),
        (4, ["48"], ["--method", "gptq", "--calib", TEXT, "-g", "48"]),
    ]
    for code, words, flags in cases:
        fails(code, words, DEMO, "-o", "a.qpk", "--no-verify", *flags)
        same(files(), ["latin.txt", "short.txt"], f"files after {flags}")
    shutil.copy(TEXT, "c.qpk")
    fails(2, ["c.qpk", "calibrate"], DEMO, "-o", "c.qpk", "--force", "--method", "gptq", "--calib", "c.qpk")
    os.mkdir("a.qpk.journal")
    fails(2, [JOURNAL], DEMO, "-o", "a.qpk", *GPTQ, "--force")


def case_statistics_replace_no_input():
    model = copy_model(TINY, "m")
    shutil.copy(TEXT, "t.txt")
    make = ("--text", "t.txt", "--windows", "2", "--length", "64", "--no-perplexity")
    succeeds("make", model, "-o", "s.qcs", *make, program=QCALIB)
    before = {n: sha256(n) for n in ("m/model.safetensors", "t.txt", "s.qcs")}
    for words, args in ((["m/model.safetensors", "model m"], ("make", model, "-o", "m/model.safetensors", *make)),
                        (["m/new.qcs", "model m"], ("make", model, "-o", "m/new.qcs", *make)),
                        (["./t.txt", "text"], ("make", model, "-o", "./t.txt", *make)),
                        (["s.qcs", "input"], ("merge", "s.qcs", "-o", "s.qcs")),
                        (["s.qcs", "input"], ("imatrix", "s.qcs", "-o", "./s.qcs"))):
        fails(2, words, *args, "--force", program=QCALIB)
    same({n: sha256(n) for n in before}, before, "inputs")


def case_broken_model():  # N-2, K-6
    model = copy_model(DEMO, "nan")
    poke(model, "model.layers.2.mlp.up_proj.weight", b"\xc0\x7f")
    fails(3, ["nan", "layer 2", "model.layers.2.mlp.up_proj.weight", "row 0, column 0"], model, "-o", "a.qpk", *GPTQ)
    model = copy_model(DEMO, "norm")
    poke(model, "model.layers.1.input_layernorm.weight", b"\xc0\x7f")
    fails(3, ["norm", "layer 1", "model.layers.1.input_layernorm.weight"], model, "-o", "a.qpk", *GPTQ)
    model = copy_model(DEMO, "last")
    poke(model, "model.norm.weight", b"\x80\x7f")
    fails(3, ["last", "logits", "model.norm.weight"], model, "-o", "a.qpk", *GPTQ)
    model = copy_model(DEMO, "huge")  # no NaN in the file, but an overflow on the way
    poke(model, "model.layers.3.mlp.down_proj.weight", b"\x7f\x7f" * 768)
    fails(3, ["huge", "layer 3", "weights are finite"], model, "-o", "a.qpk", *GPTQ)
    same(files(), ["huge", "last", "nan", "norm"], "files")
    model = copy_model(TINY, "rare")  # a token that the first 2,048 do not have: seen while statistics are taken
    poke(model, "model.embed_tokens.weight", b"\xc0\x7f")
    with open("rare.npy", "wb") as f:
        ids = [1] * 512 * 4 + [0] * 512
        head = b"{'descr': '<u2', 'fortran_order': False, 'shape': (5, 512), }\n"
        f.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + struct.pack(f"<{len(ids)}H", *ids))
    fails(3, ["rare", "layer 0", "model.embed_tokens.weight", "row 0"], model, "-o", "a.qpk", "--method", "gptq", "-g", "16", "--calib", "rare.npy",
          "--no-verify", "--set", "calibration.perplexity_limit=1e12")
    wrong = copy_model(DEMO, "wrong", rope_theta=3.0)
    r = succeeds(wrong, "-o", "a.qpk", *GPTQ, "--set", "calibration.perplexity_limit=30", "--report", "r.json")
    check("perplexity_limit" in r.stderr, f"no warning about the model: {r.stderr}")
    check(any(e["kind"] == "calibration_perplexity" for e in load("r.json")["events"]), "no event about the model")
    r = succeeds(DEMO, "-o", "b.qpk", *GPTQ)
    check("perplexity_limit" not in r.stderr, f"warned about a sound model: {r.stderr}")


def case_few_tokens_are_reported():  # N-1
    flags = ("--calib-windows", "1", "--calib-length", "5", "--set", "quantize.gptq.damp=0", "--set", "quantize.gptq.shrink=0")
    r = run(DEMO, "-o", "a.qpk", *GPTQ, *flags, "--report", "r.json")
    same(r.returncode, 6, f"exit code ({r.stderr})")
    events = [e for e in load("r.json")["events"] if e["level"] == "fallback"]
    check(events and {e["kind"] for e in events} <= {"damping", "rtn_fallback"}, f"events {events}")
    for t in load("r.json")["tensors"]:
        if t.get("order"):
            check(t["error"] <= t["error_rtn"] * (1 + 1e-9), f"worse than rounding to nearest: {t}")


def case_rounding_with_statistics():
    """Method rtn makes use of a calibration text where there is one."""
    plain = (TINY, "-o", "p.qpk", "-g", "16", "--no-verify")
    succeeds(*plain, "--report", "p.json")
    succeeds(TINY, "-o", "a.qpk", "-g", "16", "--method", "rtn", *SMALL, "--set", "calibration.perplexity_limit=1e9", "--report", "r.json")
    weighted = [t for t in load("r.json")["tensors"] if "tokens" in t]
    check(weighted and all(t["method"] == "rtn" and t["order"] is None for t in weighted), f"accounts {weighted}")
    check(sha256("a.qpk") != sha256("p.qpk"), "the text has no effect")


main(globals())
