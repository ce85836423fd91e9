"""The demo as an installed user sees it, and what the project promises of its numbers."""
import os
import subprocess

from e2e import BUILD_ROOT, check, load, main, run, same, sha256

TOP = ["schema", "tool", "model", "recipe", "plan", "calibration", "tensors", "layers", "events", "evaluation", "artifacts",
       "gates", "timings", "peak_rss_bytes"]
EVALUATION = ["protocol", "windows", "length", "tokens_scored", "ids_sha256", "ppl", "ppl_reference", "ppl_ratio",
              "delta_nll", "delta_nll_se", "kld_mean", "kld_p99", "kld_max", "top1"]


def install():
    subprocess.run(["meson", "install", "-C", BUILD_ROOT, "--no-rebuild", "--quiet", "--destdir", os.path.abspath("root")],
                   check=True, capture_output=True, timeout=60)
    for folder, _, names in os.walk("root"):
        if "qconvert" in names and os.path.basename(folder) == "bin":
            return os.path.abspath(os.path.join(folder, "qconvert"))
    raise AssertionError("qconvert was not installed")


def check_report(report, artifact):
    for key in TOP:
        check(key in report, f"report lacks {key}")
    for key in EVALUATION:
        check(report["evaluation"].get(key) is not None, f"evaluation lacks {key}")
    same(report["artifacts"][0]["sha256"], sha256(artifact), "hash of the artifact")
    same(report["artifacts"][0]["bytes"], os.path.getsize(artifact), "size of the artifact")
    stored = sum(t["bytes_out"] for t in report["tensors"])
    check(0.9 * os.path.getsize(artifact) < stored <= os.path.getsize(artifact),
          f"tensors take {stored} of {os.path.getsize(artifact)} bytes")
    for t in report["tensors"]:
        check(t["action"] in ("quantized", "copied", "kept16", "tied", "folded", "dropped"), f"action of {t}")
    e = report["evaluation"]
    check(abs(e["ppl"] / e["ppl_reference"] - e["ppl_ratio"]) < 1e-9 * e["ppl_ratio"], "ratio of the perplexities")
    check(0 < e["kld_mean"] < e["kld_p99"] < e["kld_max"], "order of the KL divergences")


def case_installed_demo():
    program = install()
    r = run("--demo", program=program, env={"PATH": "/usr/bin:/bin"})
    same(r.returncode, 0, f"exit code ({r.stderr})")
    reports = {name: load(f"qconvert-demo/{name}.json") for name in ("demo-int8", "demo-int4-minmax", "demo-int4", "demo-int4-gptq")}
    for name, report in reports.items():
        check_report(report, f"qconvert-demo/{name}.qpk")
    model = reports["demo-int8"]["model"]["path"]
    check(model.startswith(os.path.abspath("root")), f"the demo model is {model}, not the installed one")
    int8, minmax, int4 = (reports[n]["evaluation"] for n in ("demo-int8", "demo-int4-minmax", "demo-int4"))
    check(int8["ppl_ratio"] <= 1.003, f"INT8 perplexity ratio {int8['ppl_ratio']}")
    check(int4["kld_mean"] < minmax["kld_mean"], f"search {int4['kld_mean']}, min-max {minmax['kld_mean']}")
    gptq = reports["demo-int4-gptq"]["evaluation"]
    check(gptq["kld_mean"] < 0.5 * int4["kld_mean"], f"GPTQ {gptq['kld_mean']}, rounding {int4['kld_mean']}")
    same(int8["ids_sha256"], int4["ids_sha256"], "scored tokens")
    same(int8["ppl_reference"], int4["ppl_reference"], "the reference")
    same(sorted(os.listdir("qconvert-demo")), sorted(f"{n}.{x}" for n in reports for x in ("json", "qpk")), "files")


def case_version_and_help():
    for program in ("qconvert", "qeval", "qinspect"):
        path = os.path.join(BUILD_ROOT, "src", "cli", program)
        r = run("--version", program=path)
        check(r.returncode == 0 and r.stdout.startswith(program + " ") and "(" in r.stdout, f"{program} --version: {r.stdout}")
        r = run("--help", program=path)
        check(r.returncode == 0 and "Exit codes" in r.stdout and not r.stderr, f"{program} --help")
        check(max(map(len, r.stdout.splitlines())) <= 80, f"{program} --help is wider than 80 columns")
        r = run("--no-such-option", program=path)
        check(r.returncode == 2 and not r.stdout and "no-such-option" in r.stderr, f"{program} with an unknown option")


main(globals())
