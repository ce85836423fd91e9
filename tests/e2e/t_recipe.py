"""Recipes from the file to the release decision: several outputs, gates, allowances, report, manifest, plan."""
import json
import os
import shutil

from e2e import BUILD_ROOT, DEMO, TINY, check, fails, load, main, run, same, sha256, succeeds

QEVAL = os.path.join(BUILD_ROOT, "src", "cli", "qeval")
TOP = ["schema", "tool", "model", "recipe", "plan", "tensors", "layers", "events", "evaluation", "artifacts", "gates",
       "timings", "peak_rss_bytes"]
FIGURES = ["protocol", "windows", "length", "tokens_scored", "ids_sha256", "ppl", "ppl_reference", "ppl_ratio", "delta_nll",
           "delta_nll_se", "kld_mean", "kld_p99", "kld_max", "top1"]


def recipe(name="r.yaml", **parts):
    """A recipe of the tiny model; keyword arguments replace its parts, None leaves one out."""
    doc = {"model": TINY, "quantize": {"weights": {"bits": 4, "group": 16}}, "verify": {"windows": 2, "length": 64},
           "emit": [{"path": "a.qpk"}], "report": {"json": "r.json"}}
    doc.update(parts)
    with open(name, "w", encoding="utf-8") as f:  # JSON is YAML
        json.dump({k: v for k, v in doc.items() if v is not None}, f, indent=1)
    return name


def files():
    return sorted(n for n in os.listdir(".") if n != "r.yaml")


# ---- several outputs ----

def case_two_outputs():
    os.mkdir("out")
    succeeds(recipe(emit=[{"path": "a.qpk"}, {"format": "qpk", "path": "out/b"}], report={"json": "r.json", "manifest": "m.json"}))
    same(sha256("a.qpk"), sha256("out/b"), "the same grids")
    report, manifest = load("r.json"), load("m.json")
    for key in TOP:
        check(key in report, f"report lacks {key}")
    for key in FIGURES:
        check(report["evaluation"].get(key) is not None, f"evaluation lacks {key}")
    same([(a["path"], a["sha256"], a["bytes"], a["rejected"]) for a in report["artifacts"]],
         [(p, sha256(p), os.path.getsize(p), False) for p in ("a.qpk", "out/b")], "artifacts")
    same(report["artifacts"][1]["evaluation"], report["evaluation"], "figures of equal artifacts")
    same({f["file"]: f["sha256"] for f in manifest["inputs"]},
         {os.path.basename(f["file"]): sha256(f["file"]) for f in report["model"]["files"]}, "hashes of the inputs")
    same([(o["file"], o["sha256"]) for o in manifest["outputs"]], [("a.qpk", sha256("a.qpk")), ("b", sha256("out/b"))],
         "hashes of the outputs")


def case_own_grid_of_an_output():
    own = {"weights": {"bits": 8, "group": 32}}
    succeeds(recipe(emit=[{"path": "a.qpk"}, {"path": "b.qpk", "quantize": own}]))
    report = load("r.json")
    first, second = report["tensors"], report["artifacts"][1]["tensors"]
    same({t["bits"] for t in first if t["rule"] == "linear"}, {4}, "bits of the first output")
    same({(t["bits"], t["group"]) for t in second if t["rule"] == "linear"}, {(8, 32)}, "grid of the second output")
    check(report["artifacts"][1]["evaluation"]["kld_mean"] < report["evaluation"]["kld_mean"], "8 bits are not better than 4")
    succeeds(recipe(quantize=own, emit=[{"path": "alone.qpk"}]), "--force")
    same(sha256("b.qpk"), sha256("alone.qpk"), "an own grid and the same grid for all")


def case_a_fallback_counts_once():
    grids = {"weights": {"group": 512, "group_fallback": "keep"}}
    outputs = [{"path": "a.qpk"}, {"path": "b.qpk"}]
    same(run(recipe(quantize=grids, emit=outputs)).returncode, 6, "fallbacks that nobody allowed")
    events = [e for e in load("r.json")["events"] if e["level"] == "fallback"]
    kept = [t for t in load("r.json")["tensors"] if t["action"] == "kept16"]
    same(sorted(e["subject"] for e in events), sorted(t["name"] for t in kept), "fallbacks and tensors in 16 bit")
    same({e["count"] for e in events}, {1}, "counts")
    succeeds(recipe(quantize=grids, emit=outputs, allow={"group_fallback": len(kept)}), "--force")
    same(run(recipe(quantize=grids, emit=outputs, allow={"group_fallback": len(kept) - 1}), "--force").returncode, 6, "one too many")


def case_names_collide():
    two = [{"path": "a.qpk"}, {"path": "./a.qpk"}]
    os.mkdir("d")
    fails(2, ["./a.qpk"], recipe(emit=two))
    fails(2, ["d/../a.qpk"], recipe(report={"json": "d/../a.qpk"}))
    fails(2, ["./m"], recipe(report={"json": "m", "manifest": "./m"}))
    fails(2, ["a.qpk.rejected"], recipe(report={"json": "a.qpk.rejected"}), "--gate", "kld_mean=1")
    fails(2, ["recipe"], recipe(report={"json": "r.yaml"}), "--force")
    os.mkdir("a.qpk.rejected")
    fails(2, ["a.qpk.rejected", "folder"], recipe(), "--gate", "kld_mean=1")
    os.mkfifo("pipe")
    fails(2, ["pipe"], recipe(), "--report", "pipe", "--force")
    os.symlink("/dev/zero", "device.qpk")
    fails(2, ["device.qpk", "device"], recipe(), "-o", "device.qpk", "--force")
    same(files(), ["a.qpk.rejected", "d", "device.qpk", "pipe"], "files")
    check(os.path.islink("device.qpk"), "the link was replaced")


# ---- gates ----

def case_gates_from_the_file():
    loose = {"ppl_ratio": 2, "kld_mean": 1, "top1": 0.01, "fallbacks": 0, "size_bytes": "1MB", "seconds": 1000, "peak_rss_bytes": "2GB"}
    succeeds(recipe(verify={"windows": 2, "length": 64, "gates": loose}))
    gates = load("r.json")["gates"]
    same({g["name"] for g in gates if g["pass"]}, set(loose), "gates passed")
    same(next(g["value"] for g in gates if g["name"] == "size_bytes"), os.path.getsize("a.qpk"), "measured size")
    os.remove("a.qpk")
    same(run(recipe(), "--force", "--gate", "size_bytes=1kB").returncode, 1, "too large")
    same(files(), ["a.qpk.rejected", "r.json"], "files")
    same(load("r.json")["artifacts"][0]["path"], "a.qpk.rejected", "path in the report")
    check(load("r.json")["artifacts"][0]["rejected"], "the report does not say that it was rejected")
    same(run(recipe(), "--force", "--gate", "size_bytes=1kB", "--keep-failed").returncode, 1, "too large")
    check("a.qpk" in files(), "--keep-failed")


def case_gates_of_what_is_not_measured():
    fails(2, ["kld_mean", "verification"], recipe(), "--no-verify", "--gate", "kld_mean=1")
    succeeds(recipe(), "--no-verify", "--gate", "size_bytes=1MB")
    same(load("r.json")["evaluation"], None, "evaluation")


def case_one_of_two_outputs_is_enough_to_fail():
    r = run(recipe(emit=[{"path": "a.qpk"}, {"path": "b.qpk"}]), "--gate", "ppl_ratio=0.01")
    same(r.returncode, 1, "exit code")
    same(files(), ["a.qpk.rejected", "b.qpk.rejected", "r.json"], "files")


# ---- numbers ----

def case_the_report_agrees_with_qeval():
    succeeds(recipe())
    report = load("r.json")["evaluation"]
    again = json.loads(succeeds("a.qpk", "--reference", TINY, "--windows", 2, "--length", 64, "--json", program=QEVAL).stdout)
    for key in FIGURES:
        same(again[key], report[key], key)


def case_every_tensor_is_in_the_account():
    for model in (TINY, os.path.join(os.path.dirname(TINY), "llama"), os.path.join(os.path.dirname(TINY), "qwen3-untied")):
        succeeds(recipe(model=model), "--force")
        names = set()
        for name in os.listdir(model):
            if name.startswith("model") and name.endswith(".safetensors"):
                with open(os.path.join(model, name), "rb") as f:
                    names |= set(json.loads(f.read(int.from_bytes(f.read(8), "little"))))
        tensors = load("r.json")["tensors"]
        same(sorted(t["name"] for t in tensors), sorted(names - {"__metadata__"}), f"names of {model}")
        for t in tensors:
            same(t["bytes_out"] == 0, t["action"] in ("tied", "dropped"), f"bytes of {t['name']}")
        check(sum(t["bytes_out"] for t in tensors) < os.path.getsize("a.qpk"), "the tensors are larger than the file")


# ---- plan ----

def case_dry_run():
    for flags in ([], ["--no-verify"], ["-b", "8"]):
        r = succeeds(recipe(model=DEMO, quantize=None, report={"json": "r.json", "manifest": "m.json"}), "--dry-run", "--json", *flags)
        plan = json.loads(r.stdout)
        same(files(), [], "files after a dry run")
        succeeds("r.yaml", *flags)
        report = load("r.json")
        size = os.path.getsize("a.qpk")
        check(abs(plan["disk_bytes"] - size) <= 0.1 * size, f"{plan['disk_bytes']} bytes planned, {size} written")
        check(report["peak_rss_bytes"] <= plan["peak_rss_bytes"], f"{plan['peak_rss_bytes']} bytes of memory planned, "
              f"{report['peak_rss_bytes']} used")
        plan.pop("seconds")  # what a dry run alone forecasts
        same(report["plan"], plan, "the plan in the report")
        for name in files():
            os.remove(name)

    succeeds("--demo", "--dry-run")
    same(files(), [], "files after a dry run of the demo")


# ---- mistakes ----

def case_mistakes():
    same_place = {"path": "a.qpk"}
    cases = [
        (3, ["emit", "list"], {"emit": same_place}),
        (3, ["path"], {"emit": [{"format": "qpk"}]}),
        (2, ["no output"], {"emit": None}),
        (2, ["no model"], {"model": None}),
        (2, ["a.onnx", "names no format"], {"emit": [{"path": "a.onnx"}]}),
        (3, ["bits", "4.5"], {"quantize": {"weights": {"bits": 4.5}}}),
        (3, ["group", "17"], {"quantize": {"weights": {"group": 17}}}),
        (4, ["down_proj", "48"], {"quantize": {"weights": {"group": 48}}}),
        (2, ["*.nope"], {"quantize": {"weights": {"group": 16}, "overrides": [{"match": "*.nope", "bits": 8}]}}),
        (2, ["zz*"], {"quantize": {"weights": {"group": 16}, "skip": ["zz*"]}}),
        (3, ["match"], {"quantize": {"overrides": [{"bits": 8}]}}),
        (3, ["kld"], {"verify": {"gates": {"kld": 1}}}),
        (3, ["nope"], {"allow": {"nope": 1}}),
        (3, ["12XB"], {"run": {"memory": "12XB"}}),
        (5, ["memory"], {"run": {"memory": "5kB"}}),
        (4, ["tensor"], {"quantize": {"activations": {"bits": 8, "dynamic": "tensor"}}}),
        (5, ["no/such"], {"report": {"junit": "no/such/x.xml"}}),
        (2, ["both"], {"report": {"json": "same", "html": "./same"}}),
        (3, ["absent"], {"model": "absent"}),
        (5, ["no/such"], {"emit": [{"path": "no/such/a.qpk"}]}),
        (5, ["no/such"], {"report": {"json": "no/such/r.json"}}),
    ]
    for code, words, parts in cases:
        fails(code, words, recipe(**parts))
        same(files(), [], f"files after {parts}")
    for text, words in (("", ["empty"]), ("- a\n", ["mapping"]), ("model: m\nmodel: n\n", ["r.yaml:2", "model"]), ("model: [\n", ["r.yaml:"]),
                        ("\tmodel: m\n", ["r.yaml:1"])):
        with open("r.yaml", "w", encoding="utf-8") as f:
            f.write(text)
        fails(3, words, "r.yaml")


def case_quantized_already():
    succeeds(recipe())
    shutil.move("a.qpk", "b.qpk")
    r = run(recipe(model="b.qpk"), "--force")  # the grid of the recipe is the one that it has
    same(r.returncode, 0, f"the same grid ({r.stderr})")
    r = run(recipe(model="b.qpk", quantize={"weights": {"bits": 3, "group": 64}}), "--force")
    same(r.returncode, 6, f"another grid ({r.stderr})")
    check("requantized" in r.stderr, f"the warning ({r.stderr})")


main(globals())
