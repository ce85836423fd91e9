"""scripts/qconvert.mk: what is made, what is made again and what is not, with parallel jobs."""
import os
import shutil
import xml.etree.ElementTree as ET

from e2e import BUILD_ROOT, DEMO, SOURCE_ROOT, TINY, check, copy_model, load, main, run, same

PROGRAMS = os.path.join(BUILD_ROOT, "src", "cli")
DOCS = os.path.join(SOURCE_ROOT, "docs")
CALIB = os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-calib.txt")
TEXT = os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-heldout.txt")
ALL = ["m.int8.qpk", "m.int4.qpk", "report-m.int8", "report-m.int4"]


def begin(model=TINY, options="-q --windows 2 --length 32 --threads 1"):
    copy_model(model, "m")
    for name in ("qconvert", "qreport"):
        shutil.copy(os.path.join(PROGRAMS, name), name)
    shutil.copy(CALIB, "calib.txt")
    with open("gates-int8.yaml", "w", encoding="utf-8") as f:
        f.write("limits: {kld_mean: 0.01, account_error: 0.001, fallbacks: 0}\n")
    with open("Makefile", "w", encoding="utf-8") as f:
        f.write(f"QCONVERT := ./qconvert\nQREPORT := ./qreport\nQC_OPTIONS := {options}\nQC_CALIB := calib.txt\nQC_TEXT := {TEXT}\n"
                f"QC_INT4_OPTIONS = --bits 4 --group 32\nQC_INT4_GPTQ_OPTIONS = --bits 4 --group 32 --method gptq --calib-windows 2 --calib-length 64\n"
                f"QC_GATES_INT8 := gates-int8.yaml\nQC_GATES_INT4 := {DOCS}/gates-int4.yaml\n"
                f"include {SOURCE_ROOT}/scripts/qconvert.mk\n")


def make(*args, code=0):
    """Commands that were run: the output that each of qconvert made, and how often qreport ran."""
    r = run("-j4", *args, program="make", env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"})
    same(r.returncode, code, f"make {args} ({r.stderr} {r.stdout})")
    lines = r.stdout.splitlines()
    made = sorted(line.split(" -o ")[1].split()[0] for line in lines if line.startswith("./qconvert"))
    return made, sum(line.startswith("./qreport") for line in lines)


def newer(path):
    """Touch; age() came before, so it is newer than all that was made."""
    os.utime(path)


def age():
    """Everything is some seconds old, in the order in which it was made."""
    for where, _, names in os.walk("."):
        for name in names:
            path = os.path.join(where, name)
            if os.path.exists(path):
                s = os.stat(path)
                os.utime(path, ns=(s.st_atime_ns - 10**10, s.st_mtime_ns - 10**10))


def case_made_once_and_again_where_something_changed():
    begin()
    same(make(*ALL), (["m.int4.qpk", "m.int8.qpk"], 4), "first run")
    check(os.path.exists("m.int8.html") and os.path.exists("m.int4.md"), "reports")
    same(make(*ALL), ([], 0), "nothing changed")
    for path in ("m/config.json", "m/model.safetensors", "m/tokenizer.json", "qconvert"):
        age()
        newer(path)
        same(make(*ALL), (["m.int4.qpk", "m.int8.qpk"], 4), f"{path} is newer")
        age()
        same(make(*ALL), ([], 0), f"after {path}")
    age()
    newer("calib.txt")
    same(make(*ALL), ([], 0), "a text that is not used")
    same(make(*ALL, "QC_INT4_OPTIONS=--bits 3 --group 32"), (["m.int4.qpk"], 2), "options of one kind")
    same(make(*ALL, "QC_INT4_OPTIONS=--bits 3 --group 32"), ([], 0), "the same options")
    same(make(*ALL), (["m.int4.qpk"], 2), "the old ones")
    os.remove("m.int8.qpk")
    same(make("m.int8.qpk"), (["m.int8.qpk"], 0), "an output is gone")


def case_folders_and_calibration():
    begin()
    same(make("m.int4-gptq"), (["m.int4-gptq"], 0), "folder for engines")
    check(os.path.exists("m.int4-gptq/config.json"), "config of the folder")
    same(make("m.int4-gptq"), ([], 0), "nothing changed")
    age()
    newer("calib.txt")
    same(make("m.int4-gptq"), (["m.int4-gptq"], 0), "the text is newer")
    os.mkdir("models")
    os.rename("m", "models/m")
    same(make("models/m.int8.qpk", "models/report-m.int8"), (["models/m.int8.qpk"], 2), "a model in a folder")
    same(make("models/m.int8.qpk", "models/report-m.int8"), ([], 0), "nothing changed there")


def case_gguf():
    begin(DEMO)
    same(make("m.q4_k_m.gguf", "report-m.q4_k_m"), (["m.q4_k_m.gguf"], 2), "a GGUF file")
    same(make("m.q4_k_m.gguf", "report-m.q4_k_m"), ([], 0), "nothing changed")
    same(load("m.q4_k_m.json")["artifacts"][0]["account_error"], 0, "its account")


def case_gates_and_baselines():
    begin()
    same(make("gate-m.int8"), (["m.int8.qpk"], 2), "limits need no baseline")
    same(make("gate-m.int4", code=2)[0], ["m.int4.qpk"], "gates against a baseline that is not there")
    same(make("baseline-m.int4"), ([], 0), "baseline from the report that is there")
    same(load("baselines/m.int4.json"), load("m.int4.json"), "the baseline")
    same(make("gate-m.int4"), ([], 2), "the same as the baseline")
    suite = ET.parse("m.int4.xml").getroot().find("testsuite")
    same((suite.get("failures"), len(suite.findall("testcase"))), ("0", 8), "gates in the JUnit file")
    same(make("gate-m.int4", "QC_INT4_OPTIONS=--bits 3 --group 32", code=2)[0], ["m.int4.qpk"], "3 bit against 4 bit")
    suite = ET.parse("m.int4.xml").getroot().find("testsuite")
    check(int(suite.get("failures")) > 0, "no failure in the JUnit file")


def case_what_can_not_be_made():
    begin()
    r = run("nowhere.int8.qpk", program="make", env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"})
    check(r.returncode == 2 and "nowhere" in r.stderr, r.stderr)
    same(make("m.int8.qpk", "QC_OPTIONS=-q --windows 0", code=2)[0], ["m.int8.qpk"], "bad options")
    check(not os.path.exists("m.int8.qpk"), "an output of a run that failed")


main(globals())
