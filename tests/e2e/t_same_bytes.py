"""The same bytes: any number of threads, any run, folder, locale and time zone (trouble case O-10)."""
import os

from e2e import DEMO, TINY, load, main, same, sha256, succeeds


def convert(name, *flags, env=None, model=DEMO):
    succeeds(model, "-o", name, "--no-verify", *flags, env=env)
    return sha256(name)


def case_threads():
    for flags in (["-b", "4", "--asymmetric"], ["-b", "8"], ["-b", "4", "--symmetric", "--search", "minmax"]):
        first = convert("a.qpk", "-t", "1", "-f", *flags)
        for threads in ("2", "7"):
            same(convert("a.qpk", "-t", threads, "-f", *flags), first, f"bytes with {threads} threads, {flags}")


def case_kernels():
    for flags in (["-b", "4", "--asymmetric"], ["-b", "8"], ["-b", "3", "--search", "minmax"]):
        first = convert("a.qpk", "-f", *flags)
        for mask in ("all", "avx512", "avx512vnni,amx"):
            same(convert("a.qpk", "-f", "--cpu-mask", mask, *flags), first, f"bytes without {mask}, {flags}")


def case_surroundings():
    first = convert("a.qpk")
    same(convert("b.qpk"), first, "second run")
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "LANG": "de_DE.UTF-8", "LC_NUMERIC": "de_DE.UTF-8", "TZ": "Asia/Tokyo"}
    same(convert("c.qpk", env=env), first, "other locale and time zone")
    os.mkdir("deep")
    os.chdir("deep")
    same(convert("other name.qpk"), first, "other folder and name")
    same(convert("capped.qpk", "--memory", "200MB"), first, "with a memory cap")
    os.symlink(DEMO, "linked-model")
    same(convert("linked.qpk", model="linked-model"), first, "model through a link")


def case_numbers_do_not_depend_on_threads():
    evaluations = []
    for threads in ("1", "7"):
        succeeds(TINY, "-g", "16", "-o", "a.qpk", "-f", "-t", threads, "--windows", "4", "--length", "64", "--report", "r.json")
        evaluations.append(load("r.json")["evaluation"])
    same(evaluations[0], evaluations[1], "evaluation with 1 and 7 threads")


main(globals())
