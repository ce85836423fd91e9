"""Bit budgets: sizes kept to the byte, the printed recipe makes the same file, partners share a grid, bad budgets."""
import json
import os
import re

from e2e import DEMO, SOURCE_ROOT, TINY, check, fails, load, main, run, same, sha256, succeeds

CALIB = os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-calib.txt")
TINY_RUN = [TINY, "--method", "gptq", "--calib", CALIB, "--calib-windows", 4, "--calib-length", 64, "-g", 32, "--no-verify"]
DEMO_RUN = [DEMO, "--method", "gptq", "--calib", CALIB, "--calib-windows", 4, "--calib-length", 256, "--no-verify"]


def budget_of(report):
    return load(report)["plan"]["steps"][0]["budget"]


def matrix_bits(report):
    matrices = [t for t in load(report)["tensors"] if t["action"] in ("quantized", "kept16")]
    return 8 * sum(t["bytes_out"] for t in matrices) / sum(t["rows"] * t["cols"] for t in matrices)


def case_average():
    last = None
    for bits in (3.2, 4.5, 10):
        succeeds(*DEMO_RUN, "--bits-average", bits, "-o", "a.qpk", "--report", "r.json", "--force")
        b = budget_of("r.json")
        same(b["asked"], {"bits_average": bits}, "what was asked")
        grain = 0.05 if bits < 8 else 0.3  # above 8 bits the next step is 16
        check(bits - grain < b["bits_average"] <= bits, f"{bits} bits asked, {b['bits_average']} chosen")
        check(abs(b["bits_average"] - matrix_bits("r.json")) < 1e-9, "average of the plan and of the tensors")
        same(b["size"], os.path.getsize("a.qpk"), "expected and real size")
        check(last is None or b["expected_kld"] < last, "more bits do more damage")
        check(b["least_kld"] <= b["expected_kld"] <= 1.05 * b["least_kld"], "distance from the bound")
        last = b["expected_kld"]
        for u in b["units"]:
            check(u["measured_kld"] > 0, f"nothing measured for {u['tensors']}")


def case_size():
    for mb in (2.9, 9.5):
        succeeds(*DEMO_RUN, "--size", f"{mb}MB", "-o", "a.qpk", "--report", "r.json", "--force")
        size = os.path.getsize("a.qpk")
        same(budget_of("r.json")["size"], size, "expected and real size")
        check(0.99 * mb * 1e6 < size <= mb * 1e6, f"{mb} MB asked, {size} bytes written")


def case_size_of_every_method():
    """Norms that scales are folded into are float32 in the file: they count, whether each site is scaled in the end or not."""
    for method in ("awq", "smoothquant", "awq+gptq"):
        succeeds(*DEMO_RUN, "--method", method, "--size", "2.9MB", "-o", "a.qpk", "--report", "r.json", "--force")
        size, expected = os.path.getsize("a.qpk"), budget_of("r.json")["size"]
        check(0.99 * 2.9e6 < size <= 2.9e6, f"{method}: 2900000 bytes asked, {size} written")
        norms = [t for t in load("r.json")["tensors"] if t["rule"] == "norm" and "layernorm" in t["name"]]
        unscaled = sum(2 * t["rows"] * t["cols"] for t in norms)
        check(len(norms) < 12, f"{method}: no norm was scaled")
        check(size <= expected <= size + unscaled + 4096, f"{method}: {expected} bytes expected, {size} written, norms {unscaled}")


def case_the_printed_recipe_makes_the_same_file():
    ask = ["--bits-average", 5, "--override", "*.layers.1.mlp.down_proj:bits=3,group=16", "--skip", "*.layers.0.*.o_proj",
           "--override", "*.up_proj:group=64"]
    succeeds(*TINY_RUN, *ask, "-o", "a.qpk", "--report", "r.json")
    plan = succeeds(*TINY_RUN, *ask, "-o", "b.qpk", "-n").stdout
    check(not os.path.exists("b.qpk"), "a dry run wrote something")
    text = plan[plan.index("quantize:\n"):plan.index("memory ")]
    with open("r.yaml", "w", encoding="utf-8") as f:
        json.dump({"model": TINY, "calibration": {"text": CALIB, "windows": 4, "length": 64}, "emit": [{"path": "b.qpk"}]}, f)
    with open("r.yaml", encoding="utf-8") as f:
        rest = f.read()
    with open("r.yaml", "w", encoding="utf-8") as f:
        f.write("\n".join(f"{k}: {json.dumps(v)}" for k, v in json.loads(rest).items()) + "\n" + text +
                "  method: gptq\n  weights: {group: 32}\n  skip: ['*.layers.0.*.o_proj']\nverify: {enabled: false}\n")
    succeeds("r.yaml")
    same(sha256("b.qpk"), sha256("a.qpk"), "file of the pasted recipe")
    grids = {t["name"]: (t["action"], t["bits"], t.get("group")) for t in load("r.json")["tensors"]}
    same(grids["model.layers.1.mlp.down_proj.weight"], ("quantized", 3, 16), "a user's override")
    same(grids["model.layers.0.self_attn.o_proj.weight"][0], "kept16", "a user's skip")
    for name, (action, _, group) in grids.items():
        if "up_proj" in name and action == "quantized":
            same(group, 64, f"group that a user settled for {name}")


def case_partners_share_a_grid():
    r = succeeds(*DEMO_RUN, "--bits-average", 4.3, "-o", "a.qpk", "--report", "r.json")
    check("4.3 bits per weight asked" in r.stdout, "the summary does not name the budget")
    grids = {t["name"]: (t["bits"], t.get("group"), t.get("symmetric")) for t in load("r.json")["tensors"]}
    layers = {m.group(0) for m in (re.match(r"model\.layers\.\d+\.", n) for n in grids) if m}
    check(len(set(grids.values())) > 3, "one grid for all")
    for layer in layers:
        same(len({grids[f"{layer}self_attn.{x}_proj.weight"] for x in "qkv"}), 1, f"grids of q, k, v in {layer}")
        same(len({grids[f"{layer}mlp.{x}_proj.weight"] for x in ("gate", "up")}), 1, f"grids of gate, up in {layer}")


def case_threads():
    sums = set()
    for threads in (1, 2, 7):
        succeeds(*TINY_RUN, "--bits-average", 4.2, "-t", threads, "-o", "a.qpk", "--report", f"{threads}.json", "--force")
        sums.add(sha256("a.qpk"))
        same(budget_of(f"{threads}.json"), budget_of("1.json"), f"choice with {threads} threads")
    same(len(sums), 1, "files of 1, 2 and 7 threads")


def case_two_outputs():
    with open("r.yaml", "w", encoding="utf-8") as f:
        json.dump({"model": TINY, "calibration": {"text": CALIB, "windows": 4, "length": 64}, "verify": {"enabled": False},
                   "quantize": {"method": "gptq", "weights": {"group": 32}, "budget": {"bits_average": 4.5}}, "report": {"json": "r.json"},
                   "emit": [{"path": "a.qpk"}, {"path": "b.qpk"}, {"path": "c.qpk", "quantize": {"method": "gptq",
                            "weights": {"group": 32}, "budget": {"bits_average": 6}}}]}, f)
    succeeds("r.yaml")
    same(sha256("a.qpk"), sha256("b.qpk"), "outputs with one budget")
    check(os.path.getsize("c.qpk") > os.path.getsize("a.qpk"), "the output with the larger budget is not larger")


def case_impossible():
    fails(2, ["quantize.budget.bits_average 2.01 can not be reached", " to 16.000 can"], *TINY_RUN, "--bits-average", 2.01, "-o", "a.qpk")
    fails(2, ["quantize.budget.size: 0.00 MB can not be reached, about "], *TINY_RUN, "--size", "1kB", "-o", "a.qpk")
    fails(2, ["quantize.budget.size: 1.00 MB can not be reached, about "], *TINY_RUN, "--size", "1MB", "-o", "a.qpk")
    fails(2, ["give one"], *TINY_RUN, "--size", "1MB", "--bits-average", 4, "-o", "a.qpk")
    fails(2, ["calibration.text"], TINY, "--bits-average", 4, "-o", "a.qpk")
    fails(2, ["bits_average"], *TINY_RUN, "--bits-average", 17, "-o", "a.qpk")
    same(os.listdir("."), [], "files")
    r = run(*TINY_RUN, "--bits-average", 16, "-o", "a.qpk")
    same(r.returncode, 0, "everything in 16 bit")


main(globals())
