"""What the end-to-end tests share: running the programs, a folder of one's own, the demo and tiny models, comparisons.

The programs are black boxes here: exit code, stdout, stderr and files are all that is looked at."""
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import traceback

SOURCE_ROOT = os.environ["QC_SOURCE_ROOT"]
BUILD_ROOT = os.environ["QC_BUILD_ROOT"]
MODELS = os.path.join(SOURCE_ROOT, "tests", "data", "models")
DEMO = os.path.join(MODELS, "demo-qwen3")
TINY = os.path.join(MODELS, "tiny", "qwen3")
QCONVERT = os.path.join(BUILD_ROOT, "src", "cli", "qconvert")


def run(*args, program=QCONVERT, **options):
    """Run to the end; the result has returncode, stdout, stderr (text)."""
    return subprocess.run([program, *map(str, args)], capture_output=True, text=True, stdin=subprocess.DEVNULL,
                          **{"timeout": 120, **options})


def plan_of(*args):
    """The plan of a run."""
    return json.loads(succeeds(*args, "--dry-run", "--json").stdout)


def least_plan(*args):
    """The plan with the smallest cap that is kept: all streams spill."""
    return plan_of(*args, "--memory", plan_of(*args)["peak_rss_bytes"] - 1)


def check(condition, message):
    if not condition:
        raise AssertionError(message)


def same(value, want, what):
    check(value == want, f"{what}: {value!r}, not {want!r}")


def succeeds(*args, **options):
    r = run(*args, **options)
    same(r.returncode, 0, f"exit code of {' '.join(map(str, args))} ({r.stderr.strip()})")
    return r


def fails(code, words, *args, **options):
    """The run ends with this code and one error line on stderr that holds all the words; nothing on stdout."""
    r = run(*args, **options)
    what = " ".join(map(str, args))
    errors = [x for x in r.stderr.splitlines() if ": error: " in x]
    same(r.returncode, code, f"exit code of {what} ({r.stderr.strip()})")
    same(len(errors), 1, f"error lines of {what} ({r.stderr!r})")
    for word in words:
        check(word in errors[0], f"{what}: {errors[0]!r} lacks {word!r}")
    return r


def sha256(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def load(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def copy_model(source, target, **config):
    """Copy of a model folder that may be changed; keyword arguments replace keys of config.json (None removes one)."""
    shutil.copytree(source, target)
    os.chmod(target, 0o755)
    for name in os.listdir(target):
        os.chmod(os.path.join(target, name), 0o644)
        if name.startswith("golden"):
            os.remove(os.path.join(target, name))
    if config:
        path = os.path.join(target, "config.json")
        values = load(path)
        values.update(config)
        with open(path, "w", encoding="utf-8") as f:
            json.dump({k: v for k, v in values.items() if v is not None}, f)
    return target


def tensor_places(path):
    """Where in a safetensors file each tensor begins."""
    with open(path, "rb") as f:
        size = struct.unpack("<Q", f.read(8))[0]
        return {k: v["data_offsets"][0] + 8 + size for k, v in json.loads(f.read(size)).items() if k != "__metadata__"}


def poke(model, tensor, data):
    """Overwrite the first bytes of a tensor of a model folder."""
    with open(f"{model}/model.safetensors", "r+b") as f:
        f.seek(tensor_places(f"{model}/model.safetensors")[tensor])
        f.write(data)


def main(namespace):
    """Run every function case_* of the caller in a fresh folder; say which failed."""
    failed = 0
    cases = [(n, f) for n, f in namespace.items() if n.startswith("case_")]
    for name, case in cases:
        with tempfile.TemporaryDirectory(prefix="qc-e2e-") as folder:
            os.chdir(folder)
            try:
                case()
                print(f"ok   {name}")
            except Exception as e:  # every other case still runs
                failed += 1
                print(f"FAIL {name}: {e}")
                if not isinstance(e, AssertionError):
                    traceback.print_exc(file=sys.stdout)
            os.chdir("/")
            for where, folders, _ in os.walk(folder):  # read-only folders can be removed again
                for f in folders:
                    if not os.path.islink(os.path.join(where, f)):
                        os.chmod(os.path.join(where, f), 0o755)
    print(f"{len(cases)} cases, {failed} failed")
    sys.exit(1 if failed or not cases else 0)
