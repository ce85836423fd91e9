"""GGUF files as sources: evaluated, listed and tokenized as they are; bad ones are refused in one line."""
import json
import os
import random
import struct

from e2e import BUILD_ROOT, MODELS, SOURCE_ROOT, check, fails, main, run, same

QEVAL = os.path.join(BUILD_ROOT, "src", "cli", "qeval")
QINSPECT = os.path.join(BUILD_ROOT, "src", "cli", "qinspect")
GGUF = os.path.join(SOURCE_ROOT, "tests", "data", "gguf", "tiny-llama.gguf")
LLAMA = os.path.join(MODELS, "tiny", "llama")
TEXT = os.path.join(SOURCE_ROOT, "tests", "data", "text", "austen-heldout.txt")


def evaluate(*args):
    r = run(*args, "--text", TEXT, "--windows", "2", "--length", "128", "--json", program=QEVAL)
    same(r.returncode, 0, f"exit code ({r.stderr})")
    return json.loads(r.stdout)


def case_evaluated():
    """Half of the layers are 16 bit, the rest 8 and 4: near the checkpoint, and the same ids."""
    ours, theirs = evaluate(GGUF, "--reference", LLAMA), evaluate(LLAMA)
    same(ours["ids_sha256"], theirs["ids_sha256"], "ids")
    check(0 < ours["kld_mean"] < 0.02, f"KL divergence {ours['kld_mean']}")
    check(abs(ours["ppl_reference"] - theirs["ppl"]) < 1e-6 * theirs["ppl"], "reference")


def case_listed():
    r = run(GGUF, "--json", program=QINSPECT)
    same(r.returncode, 0, "exit code")
    doc = json.loads(r.stdout)
    same((doc["format"], len(doc["tensors"])), ("gguf", 21), "list")
    same(run(GGUF, "--check", program=QINSPECT).returncode, 0, "exit code of --check")


def case_bad_files():
    with open(GGUF, "rb") as f:
        good = f.read()

    def refused(code, words, data):
        with open("bad.gguf", "wb") as f:
            f.write(data)
        fails(code, ["bad.gguf", *words], "bad.gguf", program=QINSPECT)

    refused(3, ["cut off"], good[:-40000])
    refused(3, ["beyond the end"], good[:1000])
    refused(4, ["version 9"], good[:4] + struct.pack("<I", 9) + good[8:])
    refused(4, ["mamba"], good.replace(b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
                                       b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0mamba", 1))
    with open("none.gguf", "wb") as f:
        f.write(b"hello")
    fails(4, ["none.gguf", "GGUF"], "none.gguf", program=QINSPECT)


def case_random_damage():
    """Whatever byte of the head is changed: an answer or one error line, never a crash."""
    with open(GGUF, "rb") as f:
        good = f.read()
    rng = random.Random(5)
    for _ in range(60):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(13000)] = rng.randrange(256)
        with open("bad.gguf", "wb") as f:
            f.write(data)
        r = run("bad.gguf", "--text", TEXT, "--windows", "1", "--length", "8", program=QEVAL)
        check(r.returncode in (0, 2, 3, 4), f"exit code {r.returncode} ({r.stderr})")
        same(len([x for x in r.stderr.splitlines() if ": error: " in x]), int(r.returncode != 0), f"errors ({r.stderr})")


main(globals())
