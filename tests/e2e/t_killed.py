"""A calibrated run that is killed at any moment goes on to the same bytes."""
import os
import random
import subprocess
import time

from e2e import DEMO, QCONVERT, SOURCE_ROOT, check, main, same, sha256, succeeds

TEXT = os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-calib.txt")
GPTQ = ("--method", "gptq", "--calib", TEXT, "--calib-windows", "2", "--calib-length", "64", "--no-verify")
JOURNAL = "a.qpk.journal"


def files():
    return sorted(os.listdir("."))


def case_killed():  # O-1, O-3, O-5
    """SIGKILL at 20 random instants: nothing but the journal is there, and the end is the same."""
    rng, kills, seconds = random.Random(4), 0, time.monotonic()
    succeeds(DEMO, "-o", "a.qpk", *GPTQ)
    seconds = time.monotonic() - seconds
    want = sha256("a.qpk")
    os.remove("a.qpk")
    while kills < 20:
        p = subprocess.Popen([QCONVERT, DEMO, "-o", "a.qpk", *GPTQ, "--resume"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
    succeeds(DEMO, "-o", "a.qpk", *GPTQ, "--resume")
    same(sha256("a.qpk"), want, "bytes after all kills")
    same(files(), ["a.qpk"], "files")


main(globals())
