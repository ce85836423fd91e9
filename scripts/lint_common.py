"""What the check_* scripts share: the files of the tree, C text without comments and strings, the way to fail."""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CODE_DIRS = ("src", "quant", "formats", "calib", "tests")


def files(*extensions, under=CODE_DIRS):
    """Paths relative to the root, sorted, of files with one of the extensions; build folders and data left out."""
    found = []
    for top in under:
        for folder, folders, names in os.walk(os.path.join(ROOT, top)):
            folders[:] = sorted(d for d in folders if not d.startswith((".", "build", "__pycache__")) and d != "data")
            for name in sorted(names):
                if name.endswith(extensions):
                    found.append(os.path.relpath(os.path.join(folder, name), ROOT))
    return sorted(found)


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


_TOKENS = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


def blank_out(text, keep_strings=False):
    """C text with comments (and the inside of strings) turned to blanks; line numbers stay right."""
    def gone(m):
        s = m.group(0)
        if s[0] in "\"'":
            return s if keep_strings else s[0] + " " * (len(s) - 2) + s[0]
        return re.sub(r"[^\n]", " ", s)
    return _TOKENS.sub(gone, text)


class Report:
    """Collects "file:line: message" lines; done() prints them and gives the exit code."""

    def __init__(self):
        self.lines = []

    def add(self, path, line, message):
        self.lines.append(f"{path}:{line}: {message}")

    def done(self, n_checked, what):
        for line in self.lines:
            print(line)
        if n_checked == 0:
            print(f"nothing checked: no {what} found")
            return 1
        print(f"{n_checked} {what} checked, {len(self.lines)} faults")
        return 1 if self.lines else 0


def main(run):
    sys.exit(run(sys.argv[1:]))
