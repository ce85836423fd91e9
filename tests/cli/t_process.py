#!/usr/bin/env python3
"""Programs as processes: terminals, pipes, signals. Each check is a function; the name of the failing one is printed."""
import array
import fcntl
import json
import os
import pty
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time

BUILD = os.environ["QC_BUILD_ROOT"]
MODEL = os.path.join(os.environ["QC_TEST_DATA"], "models", "demo-qwen3")


def program(name):
    return os.path.join(BUILD, "src", "cli", name)


def run(args, **kwargs):
    return subprocess.run(args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=100, **kwargs)


def read_all(fd, process):
    """What a process writes to a terminal until it ends."""
    data = b""
    while True:
        ready, _, _ = select.select([fd], [], [], 0.1)
        if ready:
            try:
                block = os.read(fd, 65536)
            except OSError:  # the other side is closed
                break
            if not block:
                break
            data += block
        elif process.poll() is not None:
            break
    return data


def on_terminal(args, foreground=True):
    """stderr of a program whose stderr is a terminal, as its session's leader or not."""
    master, slave = pty.openpty()

    def take_terminal():
        os.setsid()
        if foreground:
            fcntl.ioctl(2, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=slave, preexec_fn=take_terminal)
    os.close(slave)
    data = read_all(master, process)
    os.close(master)
    return process.wait(), data


def long_run():
    """A command that works for more than a second of processor time on this machine, so that progress has to show: the
    scalar kernels if all windows of the text are not enough."""
    for windows, mask in (("24", ""), ("174", ""), ("16", "all"), ("174", "all")):
        args = [program("qeval"), MODEL, "--windows", windows, "--length", "512", "--threads", "1", "--cpu-mask", mask]
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        assert run(args).returncode == 0
        if resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before > 1.3:
            break
    return args


LONG_RUN = long_run()


def progress_only_on_a_terminal_in_the_foreground(_):
    code, shown = on_terminal(LONG_RUN)
    assert code == 0, code
    assert b"evaluate:" in shown and b" %" in shown, shown[-300:]
    assert shown.endswith(b"\r\x1b[K"), shown[-100:]  # wiped at the end
    code, shown = on_terminal(LONG_RUN, foreground=False)
    assert code == 0 and b"evaluate:" not in shown, shown[-300:]
    code, shown = on_terminal(LONG_RUN + ["--quiet"])
    assert code == 0 and shown == b"", shown[-300:]


def progress_is_late_and_rare(_):
    start = time.monotonic()
    process = subprocess.Popen(LONG_RUN + ["--progress"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    first, n_lines = None, 0
    while block := os.read(process.stderr.fileno(), 65536):
        if b"evaluate:" in block:
            first = first or time.monotonic() - start
            n_lines += block.count(b"evaluate:")
    seconds = time.monotonic() - start
    assert process.wait() == 0
    assert first and first >= 1.0, first
    assert n_lines <= 6 * seconds + 1, (n_lines, seconds)


def no_progress_in_a_pipe(_):
    done = run(LONG_RUN)
    assert done.returncode == 0 and b"evaluate:" not in done.stderr, done.stderr


def closed_pipe_is_an_error(_):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([program("qinspect"), "--quiet", MODEL], stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode == 5 and done.stderr == b"qinspect: error: stdout: Broken pipe\n", done


def wait_until(condition):
    """Poll; a busy machine may take a while for anything."""
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("waited 30 s for a state that did not come")


def handles(process, number):
    """Has the process installed a handler for the signal?"""
    with open(f"/proc/{process.pid}/status", encoding="ascii") as status:
        caught = next(line for line in status if line.startswith("SigCgt:"))
    return int(caught.split()[1], 16) >> (number - 1) & 1


def start_and_signal(args, folder, number, seconds):
    """Start, wait, signal; exit code as a shell shows it, and stderr."""
    process = subprocess.Popen(args, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if number != signal.SIGKILL:
        wait_until(lambda: handles(process, number))
    time.sleep(seconds)
    process.send_signal(number)
    message = process.stderr.read()
    code = process.wait()
    return (128 - code if code < 0 else code), message


def signals_end_a_conversion(folder):
    convert = [program("qconvert"), "--quiet", MODEL, "-o", "x.qpk", "--bits", "8", "--windows", "all", "--length", "512", "--threads", "1",
               "--report", "r.json"]
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        got, message = start_and_signal(convert, folder, number, 0.7)
        assert got == code, (number, got, message)
        assert message.startswith(b"qconvert: error: ") and message.count(b"\n") == 1, message
        assert os.listdir(folder) == [], os.listdir(folder)


def a_kill_leaves_the_earlier_artifact(folder):
    convert = [program("qconvert"), "--quiet", MODEL, "-o", "x.qpk", "--bits", "8", "--windows", "1", "--length", "64", "--threads", "1", "--force"]
    assert run(convert, cwd=folder).returncode == 0
    before = open(os.path.join(folder, "x.qpk"), "rb").read()
    for i in range(8):
        start_and_signal(convert, folder, signal.SIGKILL, 0.01 + 0.03 * i)
        assert open(os.path.join(folder, "x.qpk"), "rb").read() == before
    assert run(convert, cwd=folder).returncode == 0
    assert os.listdir(folder) == ["x.qpk"], os.listdir(folder)  # what the kills left behind is gone
    assert open(os.path.join(folder, "x.qpk"), "rb").read() == before


def tokenizing_a_pipe_can_be_stopped(_):
    process = subprocess.Popen([program("qinspect"), "tokenize", MODEL, "--jsonl"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.stdin.write(b'"x"\n')
    process.stdin.flush()
    unread = array.array("i", [1])
    wait_until(lambda: fcntl.ioctl(process.stdin, termios.FIONREAD, unread) == 0 and unread[0] == 0)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    code = process.wait(timeout=20)
    process.stdin.close()
    assert code == 130, code
    assert process.stdout.read().startswith(b"["), "the line before the signal is answered"


def standard_streams_may_be_closed(folder):
    """An output must not land in a file that took the number of a closed stream."""
    convert = f'"{program("qconvert")}" -q "{MODEL}" --no-verify -o'
    script = f"{convert} a.qpk <&- >&- 2>&-; {convert} b.qpk; cmp a.qpk b.qpk"
    done = run(["sh", "-c", script], cwd=folder)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)


def locale_and_time_zone_do_not_matter(folder):
    outputs = []
    for env in ({"LC_ALL": "C", "TZ": "UTC"}, {"LC_ALL": "de_DE.UTF-8", "LANG": "tr_TR.UTF-8", "TZ": "Asia/Tokyo"}):
        out = os.path.join(folder, "x.qpk")
        assert run([program("qconvert"), "-q", MODEL, "-o", out, "--no-verify", "--force"], env=dict(os.environ, **env)).returncode == 0
        outputs.append(open(out, "rb").read())
    assert outputs[0] == outputs[1]


def json_reports_parse(_):
    done = run([program("qeval"), "-q", MODEL, "--windows", "1", "--length", "16", "--json"])
    assert done.returncode == 0 and json.loads(done.stdout)["tokens_scored"] == 15, done


def main():
    failed = 0
    checks = [f for name, f in globals().items() if callable(f) and getattr(f, "__code__", None) and f.__code__.co_argcount == 1
              and f.__code__.co_varnames[0] in ("_", "folder")]
    for check in checks:
        folder = tempfile.mkdtemp(prefix="qc-process-")
        try:
            check(folder)
        except AssertionError as why:
            failed += 1
            print(f"{check.__name__}: {why}")
        finally:
            shutil.rmtree(folder)
    print(f"{len(checks)} checks, {failed} failed")
    sys.exit(1 if failed else 0)


main()
