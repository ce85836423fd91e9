#!/usr/bin/env python3
"""Run a transcript: shell commands with what they must print.

$ COMMAND     run by sh -e in an empty folder; $DATA is tests/data, the programs are on PATH
> TEXT        next line of stdout; * stands for any text; "..." alone for any number of lines
! TEXT        next line of stderr, the same
? CODE        exit code

Silence on both streams and exit code 0 are what is expected where nothing is said. Commands of one file share the folder.
usage: t_transcript.py FILE; with QC_REFRESH=1 it prints the transcript as it would have to be."""
import os
import re
import subprocess
import sys
import tempfile


def parse(path):
    steps = []
    for number, line in enumerate(open(path, encoding="utf-8"), 1):
        line = line.rstrip("\n")
        mark, text = line[:1], line[2:]
        if mark == "$":
            steps.append({"line": number, "command": text, "out": [], "err": [], "code": 0})
        elif mark in (">", "!"):
            steps[-1]["out" if mark == ">" else "err"].append(text)
        elif mark == "?":
            steps[-1]["code"] = int(text)
        elif line and mark != "#":
            sys.exit(f"{path}:{number}: a line begins with $ > ! ? or #")
    return steps


def matches(want, got):
    """Lines of `want` against lines of `got`."""
    pattern = ""
    for line in want:
        if line == "...":
            pattern += r"(?:[^\n]*\n)*"
        else:
            pattern += "[^\n]*".join(re.escape(part) for part in line.split("*")) + r"\n"
    return re.fullmatch(pattern, got) is not None


def run(command, folder, env):
    done = subprocess.run(["sh", "-e", "-c", command], cwd=folder, env=env, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=100)
    return done.returncode, done.stdout.decode("utf-8", "backslashreplace"), done.stderr.decode("utf-8", "backslashreplace")


def end_line(text):
    return text if not text or text.endswith("\n") else text + "\n"


def show(mark, text):
    return "".join(f"{mark} {line}\n" for line in text.splitlines())


def main():
    path = sys.argv[1]
    build = os.environ["QC_BUILD_ROOT"]
    env = dict(os.environ, PATH=f"{build}/src/cli:{os.environ['PATH']}", DATA=os.environ["QC_TEST_DATA"], LC_ALL="C")
    steps, failed = parse(path), 0
    with tempfile.TemporaryDirectory(prefix="qc-transcript-") as folder:
        for step in steps:
            code, out, err = run(step["command"], folder, env)
            out, err = end_line(out), end_line(err)
            if os.environ.get("QC_REFRESH"):
                sys.stdout.write(f"$ {step['command']}\n{show('>', out)}{show('!', err)}" + (f"? {code}\n" if code else ""))
                continue
            if code != step["code"] or not matches(step["out"], out) or not matches(step["err"], err):
                failed += 1
                print(f"{path}:{step['line']}: $ {step['command']}\n"
                      f"--- wanted\n{show('>', chr(10).join(step['out']))}{show('!', chr(10).join(step['err']))}? {step['code']}\n"
                      f"--- got\n{show('>', out)}{show('!', err)}? {code}")
    print(f"{len(steps)} commands, {failed} differ")
    sys.exit(1 if failed else 0)


main()
