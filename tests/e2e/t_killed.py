"""A calibrated run that is killed at any moment goes on to the same bytes."""
import os
import random
import subprocess
import time

from e2e import DEMO, QCONVERT, SOURCE_ROOT, check, main, same, sha256, succeeds

TEXT = os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-calib.txt")
CALIB = ("--calib", TEXT, "--calib-windows", "2", "--calib-length", "64", "--no-verify")
JOURNAL = "a.qpk.journal"


def files():
    return sorted(os.listdir("."))


def killed(method, n_kills):
    """SIGKILL at random instants: nothing but the journal is there, and the end is the same."""
    flags = ("--method", method, *CALIB)
    rng, kills, seconds = random.Random(4), 0, time.monotonic()
    succeeds(DEMO, "-o", "a.qpk", *flags)
    seconds = time.monotonic() - seconds
    want = sha256("a.qpk")
    os.remove("a.qpk")
    while kills < n_kills:
        p = subprocess.Popen([QCONVERT, DEMO, "-o", "a.qpk", *flags, "--resume"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0, 0.6 * seconds))
        p.kill()
        p.wait(timeout=60)
        if p.returncode == 0:
            same(sha256("a.qpk"), want, f"bytes after {kills} kills")
            os.remove("a.qpk")
            continue
        kills += 1
        if os.path.exists("a.qpk"):  # killed behind the rename
            same(sha256("a.qpk"), want, "bytes of a file that is there")
            os.remove("a.qpk")
        check(all(n == JOURNAL or n.startswith(".a.qpk.tmp-") for n in files()), f"files after a kill: {files()}")
    succeeds(DEMO, "-o", "a.qpk", *flags, "--resume")
    same(sha256("a.qpk"), want, "bytes after all kills")
    same(files(), ["a.qpk"], "files")
    os.remove("a.qpk")


def case_killed():  # O-1, O-3, O-5
    killed("gptq", 20)


def case_killed_with_folded_norms():
    for method in ("awq+gptq", "smoothquant", "smoothquant+gptq"):
        killed(method, 4)


main(globals())
