"""Memory, disk and streams: caps are kept, peaks do not grow with the number of layers, lost output is an error."""
import gzip
import json
import os
import resource
import shutil
import subprocess

import models
from e2e import (BUILD_ROOT, DEMO, QCONVERT, SOURCE_ROOT, TINY, check, copy_model, fails, least_plan, load, main, plan_of, run, same, sha256,
                 succeeds)

QEVAL = os.path.join(BUILD_ROOT, "src", "cli", "qeval")
QINSPECT = os.path.join(BUILD_ROOT, "src", "cli", "qinspect")
MB = 1000000


def peak(*args, program=QCONVERT, code=0):
    """Peak resident bytes of a run, as the system counts them."""
    p = subprocess.Popen([program, *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    message = p.stderr.read().decode()
    _, status, usage = os.wait4(p.pid, 0)
    p.returncode = os.waitstatus_to_exitcode(status)
    p.stderr.close()
    same(p.returncode, code, f"exit code of {args} ({message.strip()})")
    return usage.ru_maxrss * 1024


def case_peak_does_not_grow_with_layers():  # O-4
    peaks = {}
    for layers in (4, 20):
        model = models.make(f"m{layers}", DEMO, layers, hidden=384, ffn=1152)
        peaks[layers] = peak(model, "-o", f"{layers}.qpk", "--windows", 2, "--length", 128, "-t", 2, "--report", "r.json", "--force")
        report = load("r.json")
        check(abs(report["peak_rss_bytes"] - peaks[layers]) < 4 * MB, f"peak reported {report['peak_rss_bytes']}, was {peaks[layers]}")
        check(peaks[layers] <= report["plan"]["peak_rss_bytes"], f"peak planned {report['plan']['peak_rss_bytes']}, was {peaks[layers]}")
        shutil.rmtree(model)
    check(peaks[20] < peaks[4] + 6 * MB, f"peaks {peaks}")
    check(peaks[20] < 80 * MB, f"peaks {peaks}")


def case_caps_are_kept():
    model = models.make("m", DEMO, 2, hidden=256, ffn=512)
    flags = ["-o", "a.qpk", "--force", "--windows", 24, "--length", 1024, "-t", 2, "--report", "r.json"]
    peak(model, *flags)
    report, size = load("r.json"), sha256("a.qpk")
    full = report["plan"]["peak_rss_bytes"]
    least = least_plan(model, *flags)["peak_rss_bytes"]
    check(least < full - 20 * MB, f"plans {full}, {least}")
    for cap in (full, least):  # the second makes the residual streams spill
        plan = plan_of(model, *flags, "--memory", cap)
        check(plan["peak_rss_bytes"] <= cap, f"cap {cap}, planned {plan}")
        same(plan["disk_bytes"] > report["plan"]["disk_bytes"], cap < full, "disk for the streams is planned")
        used = peak(model, *flags, "--memory", cap)
        check(used <= cap, f"cap {cap}, used {used}")
        same(load("r.json")["evaluation"], report["evaluation"], f"figures under a cap of {cap}")
        same(sha256("a.qpk"), size, f"bytes under a cap of {cap}")
    for cap in ("1MB", least - 1):
        fails(5, ["memory"], model, *flags, "--memory", cap)
    fails(5, ["memory"], model, "--windows", 24, "--length", 1024, "--memory", "1MB", program=QEVAL)
    fails(5, ["memory"], model, "--windows", 24, "--length", 1024, "-t", 2, "--memory", least // 2, program=QEVAL)


def case_caps_of_calibrated_runs_are_kept():
    """With streams in memory and spilled, with few threads and with more than there is work for."""
    text = os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-calib.txt")
    for method, threads in (("gptq", 1), ("awq+gptq", 7), ("gptq", 64)):
        flags = (DEMO, "-o", "a.qpk", "--force", "--method", method, "--calib", text, "--calib-windows", 24, "--calib-length", 128, "--no-verify", "-t", threads)
        least = least_plan(*flags)["peak_rss_bytes"]
        for cap in (plan_of(*flags)["peak_rss_bytes"], least):
            used = peak(*flags, "--memory", cap)
            check(used <= cap, f"{method}, {threads} threads: cap {cap}, used {used}")
        fails(5, ["memory"], *flags, "--memory", least - 1)


def case_a_large_tokenizer_counts():
    folder = os.path.join(SOURCE_ROOT, "tests", "data", "tokenizers", "qwen3")
    os.mkdir("t")
    with gzip.open(os.path.join(folder, "tokenizer.json.gz")) as f, open("t/tokenizer.json", "wb") as out:
        shutil.copyfileobj(f, out)
    model = models.make("m", "t", 1, hidden=64, ffn=64, heads=2, kv_heads=1, head_dim=32, vocab=151936)
    flags = ["-o", "a.qpk", "-g", 64, "--windows", 2, "--length", 64]
    fails(5, ["tokenizer"], model, *flags, "--memory", "100MB")
    fails(5, ["tokenizer"], model, "--memory", "100MB", program=QEVAL)
    same(os.path.exists("a.qpk"), False, "an output")
    plan = json.loads(succeeds(model, *flags, "--dry-run", "--json").stdout)
    used = peak(model, *flags, "--memory", plan["peak_rss_bytes"])
    check(used <= plan["peak_rss_bytes"], f"planned {plan['peak_rss_bytes']}, used {used}")


# ---- disk and streams ----

def case_no_room():
    """A limit on the size of files at every place of the run: one line, code 5, nothing left, the old file untouched."""
    succeeds(TINY, "-o", "a.qpk", "-g", 16, "--no-verify")
    before, size = sha256("a.qpk"), os.path.getsize("a.qpk")
    for limit in (0, 1, 4096, size // 2, size - 1):
        def small():
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        fails(5, ["a.qpk"], TINY, "-o", "a.qpk", "-g", 16, "--no-verify", "--force", preexec_fn=small)
        same(os.listdir("."), ["a.qpk"], f"files after a limit of {limit}")
        same(sha256("a.qpk"), before, f"the earlier file after a limit of {limit}")


def case_no_room_on_the_disk():
    """What does not fit is refused before the work, counted on the file system that it goes to."""
    os.mkdir("disk")
    model = models.make("m", DEMO, 1, hidden=256, ffn=512)
    flags = ("--windows", 24, "--length", 1024, "--memory", "100MB")  # spills some 50 MB
    fails(5, ["/no/such"], model, "-o", "a.qpk", *flags, "--set", "run.scratch=/no/such")
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "none", "disk"], capture_output=True).returncode != 0:
        print("     (no file system could be mounted)")
        return
    try:
        fails(5, ["disk", "free"], model, "-o", "a.qpk", *flags, "--set", "run.scratch=disk")
        fails(5, ["disk", "free"], model, "-o", "a.qpk", "--no-verify", "--skip", "*", "--set", "emit.1.path=b.qpk", *(
            x for i in range(2, 9) for x in ("--set", f"emit.{i}.path=disk/{i}.qpk")))
        same(os.listdir("disk"), [], "files")
        succeeds(model, "-o", "disk/a.qpk", *flags)
    finally:
        subprocess.run(["umount", "disk"], check=True)


def case_a_folder_that_takes_no_files():
    os.mkdir("locked")
    if os.geteuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", "locked"], capture_output=True).returncode == 0:
        try:
            fails(5, ["locked/a.qpk"], TINY, "-o", "locked/a.qpk", "-g", 16, "--no-verify")
        finally:
            subprocess.run(["umount", "locked"], check=True)
    fails(5, [TINY + "/config.json/a.qpk"], TINY, "-o", TINY + "/config.json/a.qpk", "-g", 16, "--no-verify")


def case_lost_output():
    lines = [(QCONVERT, TINY, "-o", "a.qpk", "-g", "16", "--no-verify", "--force"), (QCONVERT, TINY, "-o", "b.qpk", "-g", "16", "--dry-run"),
             (QCONVERT, "--help"), (QEVAL, TINY, "--windows", "1", "--length", "8"), (QINSPECT, TINY), (QINSPECT, "hash", TINY)]
    for line in lines:
        with open("/dev/full", "w", encoding="utf-8") as full:
            r = subprocess.run(line, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        same(r.returncode, 5, f"exit code of {line} into a full device")
        same(r.stderr.count("error: stdout"), 1, f"error lines of {line} ({r.stderr!r})")
        r = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *line], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60)
        same(r.returncode, 5, f"exit code of {line} with stdout closed ({r.stderr!r})")
    succeeds(TINY, "-o", "c.qpk", "-g", 16, "--no-verify", "--quiet")


def case_damaged_after_writing():
    """A packed file that changed after it was written is never measured."""
    succeeds(TINY, "-o", "a.qpk", "-g", 16, "--no-verify")
    with open("a.qpk", "rb") as f:
        whole = f.read()
    for name, data in (("bit.qpk", bytearray(whole)), ("short.qpk", whole[:-1]), ("long.qpk", whole + b"x"), ("head.qpk", whole[:100])):
        if name == "bit.qpk":
            data[len(data) // 2] ^= 4
        with open(name, "wb") as f:
            f.write(data)
        fails(3, [name], "--check", name, program=QINSPECT)
        fails(3, [name], name, "--windows", 1, "--length", 8, program=QEVAL)
        fails(3, [name], TINY, "--reference", name, "--windows", 1, "--length", 8, program=QEVAL)


def case_different_vocabularies():
    fails(3, ["token ids"], TINY, "--reference", DEMO, "--windows", 1, "--length", 8, program=QEVAL)
    bare = copy_model(TINY, "bare")
    os.remove("bare/tokenizer.json")
    fails(3, ["bare", "tokenizer.json"], bare, "--windows", 1, "--length", 8, program=QEVAL)
    fails(3, ["bare", "tokenizer.json"], bare, "-o", "a.qpk", "-g", 16)
    same(run(bare, "-o", "a.qpk", "-g", 16, "--no-verify").returncode, 0, "without measuring")


main(globals())
