"""Statistics made earlier in place of a text: the bytes of a run on the text itself, what the report and the journal say,
importance matrices, and files that are refused."""
import json
import os
import resource
import shutil
import struct
import zlib

from e2e import BUILD_ROOT, DEMO, SOURCE_ROOT, TINY, check, copy_model, fails, load, main, poke, run, same, sha256, succeeds

QCALIB = os.path.join(BUILD_ROOT, "src", "cli", "qcalib")
TEXT = os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-calib.txt")
LAYERS = 6


def make(name, *flags, windows=4, length=512, model=DEMO):
    """Statistics of a model over windows of the text."""
    r = run("make", model, "--text", TEXT, "--windows", windows, "--length", length, "--no-perplexity", "-o", name, *flags, program=QCALIB)
    same(r.returncode, 0, f"exit code of qcalib ({r.stderr})")


def given(name, *flags, model=DEMO):
    return (model, "-o", "s.qpk", "--no-verify", "--force", "--statistics", name, *flags)


def digest(*args):
    succeeds(*args)
    return sha256(args[2])


def on_text(*flags, windows=4):
    return digest(DEMO, "-o", "t.qpk", "--no-verify", "--force", "--calib", TEXT, "--calib-windows", windows, "--calib-length", 512,
                  "--set", "quantize.gptq.inputs=original", *flags)


# ---- the same result ----

def case_the_bytes_of_a_run_on_the_text():
    make("c.qcs")
    for flags in (["--method", "gptq"], ["--method", "gptq", "--asymmetric", "-b", "3", "--set", "quantize.gptq.order=min-pivot", "--set", "quantize.gptq.shrink=0"],
                  ["--method", "rtn", "-g", "64"]):
        same(digest(*given("c.qcs", *flags)), on_text(*flags), f"bytes of {flags}")
    same(digest(*given("c.qcs", *flags, "-t", "3")), digest(*given("c.qcs", *flags, "-t", "1")), "bytes with 3 threads and 1")
    same(sorted(os.listdir(".")), ["c.qcs", "s.qpk", "t.qpk"], "files")


def case_shards():
    """Three blocks of 2048 tokens, the last not full, one on each of three machines."""
    make("all.qcs", windows=9)
    for i in (1, 2, 3):
        make(f"{i}.qcs", "--shard", f"{i}/3", windows=9)
    fails(3, ["2.qcs", "4 of 9 windows", "merge"], *given("2.qcs", "--method", "gptq"))
    r = run("merge", "3.qcs", "1.qcs", "2.qcs", "-o", "m.qcs", program=QCALIB)
    same(r.returncode, 0, f"exit code of the merge ({r.stderr})")
    want = digest(*given("all.qcs", "--method", "gptq"))
    same(digest(*given("m.qcs", "--method", "gptq")), want, "bytes from merged shards")
    same(on_text("--method", "gptq", windows=9), want, "bytes from the text")


def case_report_and_plan():
    make("c.qcs")
    flags = ("--method", "gptq", "--report", "s.json")
    on_text("--method", "gptq", "--report", "t.json")
    r = succeeds(*given("c.qcs", *flags))
    check("calibration     c.qcs, 4 windows of 512 tokens of austen-calib.txt" in r.stdout, f"summary {r.stdout}")
    got, want = load("s.json"), load("t.json")
    c = got["calibration"]
    same((c["statistics"], c["statistics_sha256"], c["compute"]), ("c.qcs", sha256("c.qcs"), "f32"), "statistics")
    same((c["text"], c["windows"], c["length"], c["tokens"], c["ids_sha256"]), ("austen-calib.txt", 4, 512, 2048, want["calibration"]["ids_sha256"]), "text")
    same([c[k] for k in ("tokens_text", "documents", "sample", "seed", "plain_special", "ppl", "ppl_windows")], [None] * 7, "what is not known")
    same([want["calibration"][k] for k in ("statistics", "statistics_sha256", "compute")], [None] * 3, "statistics of a run on a text")
    same(got["recipe"]["quantize"]["gptq"]["inputs"], "original", "inputs in the recipe")
    for a, b in zip(got["tensors"], want["tensors"]):
        same({k: v for k, v in a.items() if k != "seconds"}, {k: v for k, v in b.items() if k != "seconds"}, f"account of {b['name']}")
    check(all(layer["seconds"]["forward"] == 0 for layer in got["layers"]), "a forward pass")
    same(got["plan"]["disk_bytes"], want["plan"]["disk_bytes"], "disk of the plan")
    check(got["peak_rss_bytes"] <= got["plan"]["peak_rss_bytes"], f"memory {got['peak_rss_bytes']}, plan {got['plan']['peak_rss_bytes']}")
    cap = got["plan"]["peak_rss_bytes"] - 1
    fails(5, ["memory"], *given("c.qcs", *flags, "--memory", cap))


def case_journal():
    make("c.qcs")
    make("d.qcs", windows=5)
    want = digest(*given("c.qcs", "--method", "gptq"))
    os.remove("s.qpk")
    fails(5, ["s.qpk.journal", "write failed"], *given("c.qcs", "--method", "gptq"), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_200_000, 1_200_000)))
    fails(3, ["s.qpk.journal", "SHA-256 of the statistics"], *given("d.qcs", "--method", "gptq", "--resume"))
    r = succeeds(*given("c.qcs", "--method", "gptq", "--resume", "-v"))
    check(f"2 of {LAYERS} layers are done" in r.stderr, f"what is told: {r.stderr}")
    same(sha256("s.qpk"), want, "bytes after a resume")


# ---- importance matrices ----

def case_importance_matrix():
    make("c.qcs")
    same(run("imatrix", "c.qcs", "-o", "c.gguf", program=QCALIB).returncode, 0, "exit code of qcalib imatrix")
    succeeds(*given("c.gguf", "-g", "64", "--report", "i.json"))
    weighted = sha256("s.qpk")
    succeeds(*given("c.qcs", "-g", "64", "--report", "s.json"))
    succeeds(DEMO, "-o", "p.qpk", "--no-verify", "-g", "64")
    check(weighted != sha256("p.qpk"), "the importance matrix has no effect")
    solved = [(a, b) for a, b in zip(load("i.json")["tensors"], load("s.json")["tensors"]) if "error" in b]
    same(len(solved), 7 * LAYERS, "calibrated matrices")
    for a, b in solved:  # the same weights; the errors differ, since the matrix knows nothing beside the diagonal
        same((a["method"], a["tokens"]), ("rtn", 2048), a["name"])
        check(abs(a["relative_error"] / b["relative_error"] - 1) < 1e-3, f"errors of {a}, {b}")
    c = load("i.json")["calibration"]
    same((c["statistics"], c["text"], c["windows"], c["ids_sha256"]), ("c.gguf", None, None, None), "calibration")
    fails(2, ["c.gguf", "importance matrix", "gptq", "rtn"], *given("c.gguf", "--method", "gptq"))
    with open("c.gguf", "rb") as f:
        data = f.read()
    with open("part.gguf", "wb") as f:
        f.write(data.replace(b"blk.0.attn_q.weight", b"blk.9.attn_q.weight"))
    r = run(*given("part.gguf", "-g", "64", "--report", "r.json"))
    same(r.returncode, 6, f"exit code without a matrix ({r.stderr})")
    lacking = [(e["kind"], e["subject"]) for e in load("r.json")["events"] if e["level"] == "fallback"]
    same(lacking, [("no_statistics", "model.layers.0.self_attn.q_proj.weight")], "events")
    succeeds(*given("part.gguf", "-g", "64", "--set", "allow.no_statistics=1"))
    with open("cut.gguf", "wb") as f:
        f.write(data[:len(data) // 2])
    fails(3, ["cut.gguf", "damaged importance matrix"], *given("cut.gguf"))
    fails(3, ["c.gguf", "attn_q", "256"], *given("c.gguf", model=TINY))


# ---- mistakes ----

def case_another_model():
    make("c.qcs")
    model = copy_model(DEMO, "m")
    poke(model, "model.layers.2.mlp.up_proj.weight", b"\x00\x3f")
    for flags in ([], ["-n"]):
        fails(3, ["c.qcs", "another model", "SHA-256"], *given("c.qcs", "--method", "gptq", *flags, model=model))
    fails(3, ["c.qcs", "6 layers"], *given("c.qcs", "--method", "gptq", model=TINY))
    make("tiny.qcs", windows=2, length=64, model=TINY)
    fails(3, ["tiny.qcs", "layers"], *given("tiny.qcs", "--method", "gptq"))


def case_mistakes():  # K-5
    make("c.qcs")
    with open("c.qcs", "rb") as f:
        data = f.read()
    none = json.loads(data[32:32 + struct.unpack_from("<Q", data, 16)[0]])  # a whole file that holds nothing
    none["model"]["layers"] = 0
    none = json.dumps(none).encode()
    head = data[:16] + struct.pack("<QI", len(none), zlib.crc32(none))
    for name, content in (("empty.qcs", b""), ("magic.qcs", data[:8] + bytes(24)), ("none.qcs", head + struct.pack("<I", zlib.crc32(head)) + none), ("cut.qcs", data[:-1000]), ("flip.qcs", data[:-500] + bytes([data[-500] ^ 8]) + data[-499:]), ("text.qcs", b"Not statistics.\n")):
        with open(name, "wb") as f:
            f.write(content)
    before = sorted(os.listdir("."))
    cases = [
        (3, ["empty.qcs", "no statistics file"], "empty.qcs", []),
        (3, ["magic.qcs", "damaged", "header"], "magic.qcs", []),
        (3, ["none.qcs", "damaged", "description is not complete"], "none.qcs", []),
        (3, ["cut.qcs", "damaged", "cut"], "cut.qcs", ["--method", "gptq"]),
        (3, ["flip.qcs", "damaged", "checksum"], "flip.qcs", ["--method", "gptq"]),
        (3, ["text.qcs", "no statistics file"], "text.qcs", []),
        (3, ["nowhere.qcs"], "nowhere.qcs", []),
        (2, ["text", "statistics"], "c.qcs", ["--method", "gptq", "--calib", TEXT]),
        (2, ["text", "statistics"], "c.qcs", ["--calib", TEXT]),
        (2, ["minmax", "calibration.statistics"], "c.qcs", ["--search", "minmax"]),
        (2, ["calibration.text", "scale channels"], "c.qcs", ["--method", "awq"]),
        (2, ["calibration.text", "budget"], "c.qcs", ["--method", "gptq", "--bits-average", "5"]),
    ]
    for code, words, name, flags in cases:
        fails(code, words, *given(name, *flags))
        if name == "flip.qcs":
            os.remove("s.qpk.journal")  # the layers before the damage are done
        same(sorted(os.listdir(".")), before, f"files after {name} {flags}")
    shutil.copy("c.qcs", "c.qpk")
    fails(2, ["c.qpk", "statistics"], DEMO, "-o", "c.qpk", "--force", "--statistics", "c.qpk")


main(globals())
