"""Reports as files: what runs write fits the published schema, and what they render is what qreport renders."""
import json
import os
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

from e2e import BUILD_ROOT, DEMO, SOURCE_ROOT, TINY, check, load, main, run, same, succeeds

QREPORT = os.path.join(BUILD_ROOT, "src", "cli", "qreport")
CALIB = os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-calib.txt")
SCHEMA = load(os.path.join(SOURCE_ROOT, "docs", "report.schema.json"))
TYPES = {"string": str, "number": (int, float), "integer": int, "boolean": bool, "object": dict, "array": list,
         "null": type(None)}
VOID = {"meta", "br", "hr", "img", "input", "link"}


def faults(value, schema, path="report"):
    """Where a value is not what a JSON Schema of the keywords that ours uses says."""
    unknown = set(schema) - {"$schema", "title", "description", "type", "minimum", "required", "properties", "items",
                             "additionalProperties"}
    if unknown:
        yield f"{path}: schema with {unknown}"
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(isinstance(value, TYPES[t]) and (t == "boolean" or not isinstance(value, bool)) for t in types):
        yield f"{path}: {value!r} is no {types}"
        return
    if isinstance(value, dict):
        for key in schema.get("required", []):
            if key not in value:
                yield f"{path}: lacks {key}"
        for key, item in value.items():
            sub = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if sub is not None:
                yield from faults(item, sub, f"{path}.{key}")
            elif "properties" in schema:
                yield f"{path}: {key} is not in the schema"
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from faults(item, schema.get("items", {}), f"{path}[{i}]")
    elif not isinstance(value, (str, type(None))) and value < schema.get("minimum", value):
        yield f"{path}: {value} is too small"


def fits(report):
    found = list(faults(report, SCHEMA))
    check(not found, f"{len(found)} faults, first {found[:3]}")


class Balance(HTMLParser):
    """Every element that is opened is closed, and no script or outside file is asked for."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        for name, value in attrs:
            check(name not in ("src", "href") and not name.startswith("on"), f"{tag} has {name}={value}")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        same(self.open.pop() if self.open else None, tag, "closed element")


def whole(page):
    parser = Balance()
    parser.feed(page)
    same(parser.open, [], "open elements")
    check("script" not in parser.seen and "svg" in parser.seen, f"elements {parser.seen}")
    check(not re.search(r'="[^"]*(nan|inf)', page), "a number that is none")
    return parser.seen


def qreport(*args):
    r = run(*args, program=QREPORT)
    same((r.returncode, r.stderr), (0, ""), f"qreport {args}")
    return r.stdout


def case_schema_is_the_programs():
    same(json.loads(qreport("schema")), SCHEMA, "docs/report.schema.json (made by `qreport schema`)")


def case_reports_fit_the_schema():
    options = ["--group", 32, "--windows", 2, "--length", 64, "-q"]
    calib = ["--calib", CALIB, "--calib-windows", 2, "--calib-length", 64]
    runs = {"rtn": [], "gptq": ["--method", "gptq", *calib], "awq": ["--method", "awq", *calib], "unverified": ["--no-verify"],
            "budget": ["--bits-average", 5, *calib],
            "events": ["--group", 48, "--group-fallback", "smaller", "--set", "allow.group_fallback=1000"]}
    for name, extra in runs.items():
        succeeds(TINY, *options, *extra, "-o", f"{name}.qpk", "--report", f"{name}.json", "--gate", "size_bytes=1GB")
        fits(load(f"{name}.json"))
    with open("two.yaml", "w", encoding="utf-8") as f:
        f.write(f"model: {TINY}\nquantize: {{weights: {{group: 32}}}}\nverify: {{windows: 1, length: 32, gates: {{top1: 0}}}}\n"
                "emit: [{path: a.qpk}, {path: b.qpk, quantize: {weights: {bits: 8, group: 32}}}]\nreport: {json: two.json}\n")
    succeeds("two.yaml", "-q")
    fits(load("two.json"))
    check("tensors" in load("two.json")["artifacts"][1], "account of the second output")
    whole(qreport("render", "two.json", "--format", "html"))
    text = qreport("render", *(f"{n}.json" for n in runs), "two.json")
    same(len(re.findall(r"^\S+\.qpk$", text, re.M)), len(runs) + 2, "outputs in the text")
    # the check of the test can fail
    broken = load("gptq.json")
    broken["tensors"][0]["rows"] = "4"
    check(list(faults(broken, SCHEMA)), "a broken report fits")


def case_figures_of_the_kl_divergence():
    succeeds(DEMO, "-q", "--windows", 2, "--length", 256, "-o", "a.qpk", "--report", "a.json")
    e = load("a.json")["evaluation"]
    p, h = e["kld_percentiles"], e["kld_histogram"]
    values = list(p.values())
    same(values, sorted(values), "percentiles in order")
    same((p["p99"], p["p100"]), (e["kld_p99"], e["kld_max"]), "percentiles and figures")
    same(sum(h["counts"]), e["tokens_scored"], "positions of the histogram")
    below = 0
    for i, n in enumerate(h["counts"]):  # the median lies in the bin where the counts pass one half
        if below < e["tokens_scored"] / 2 <= below + n:
            lo = 10 ** (h["log10_from"] + i * h["log10_step"])
            check(lo <= p["p50"] <= lo * 10 ** h["log10_step"], f"median {p['p50']}, bin from {lo}")
        below += n
    check(0 < e["kld_mean_se"] < e["kld_mean"], f"standard error {e['kld_mean_se']}")


def case_files_of_a_run_are_the_renderings():
    r = run(DEMO, "-q", "--windows", 2, "--length", 64, "-o", "a.qpk", "--report", "a.json", "--html", "a.html", "--markdown", "a.md",
            "--junit", "a.xml", "--gate", "kld_mean=0.2", "--gate", "size_bytes=10")
    same(r.returncode, 1, f"exit code ({r.stderr})")
    for name, format_ in (("a.html", "html"), ("a.md", "markdown"), ("a.xml", "junit")):
        with open(name, encoding="utf-8") as f:
            same(f.read(), qreport("render", "a.json", "--format", format_), name)
    seen = whole(open("a.html", encoding="utf-8").read())
    check({"polyline", "rect", "table", "details"} <= seen, f"elements {seen}")
    suite = ET.parse("a.xml").getroot().find("testsuite")
    cases = {c.get("name"): c.find("failure") for c in suite.iter("testcase")}
    same([k for k, v in cases.items() if v is not None], ["size_bytes"], "failed cases")
    check("limit 10" in cases["size_bytes"].get("message"), "message of the failure")
    same((suite.get("tests"), suite.get("failures"), suite.get("errors")), ("2", "1", "0"), "counts of the suite")
    r = run(DEMO, "-q", "-o", "b.qpk", "--html", "a.html")
    same(r.returncode, 2, f"exit code where the page exists ({r.stderr})")
    check(not os.path.exists("b.qpk"), "something was written")


def case_hostile_names():
    succeeds(TINY, "-q", "--group", 32, "--windows", 1, "--length", 32, "-o", "a.qpk", "--report", "a.json")
    report = load("a.json")
    evil = "</script><img src=x onerror=alert(1)>\"'&]]>\u202e\x1b[2J\n\ufffe|`*"
    report["model"]["path"] = report["artifacts"][0]["path"] = report["tensors"][0]["name"] = evil
    report["events"].append({"kind": evil, "level": "fallback", "subject": evil, "detail": evil, "count": 1})
    report["gates"].append({"name": evil, "limit": 1, "value": 2, "pass": False})
    report["recipe"][evil] = evil
    with open("evil.json", "w", encoding="utf-8") as f:
        json.dump(report, f)
    seen = whole(qreport("render", "evil.json", "a.json", "--format", "html"))
    check("img" not in seen, "markup from a name")
    ET.fromstring(qreport("render", "evil.json", "--format", "junit"))
    text = qreport("render", "evil.json", "--format", "markdown")
    check("<img" not in text and "\x1b" not in text, text)


main(globals())
