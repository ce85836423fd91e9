#!/usr/bin/env python3
"""Count the tests of Meson runs: usage: testlog.py BUILD_DIR...

Reads BUILD_DIR/meson-logs/testlog.json (one JSON record per test), prints each skipped test with its reason and each
failed test, then the line "N passed, N failed, N skipped" over all folders. Exit code 1 if a test failed, a log is
missing or nothing ran: a test run that ran nothing is no success."""
import json
import os
import sys

PASSED = {"OK", "EXPECTEDFAIL"}
SKIPPED = {"SKIP"}


def skip_reason(record):
    for line in (record.get("stdout") or "").splitlines():
        if line.startswith("SKIP:"):
            return line[len("SKIP:"):].strip()
    return "no reason given"


def main(folders):
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for folder in folders:
        log = os.path.join(folder, "meson-logs", "testlog.json")
        try:
            with open(log, encoding="utf-8") as f:
                records = [json.loads(line) for line in f if line.strip()]
        except OSError as e:
            print(f"{folder}: no test log: {e.strerror}")
            counts["failed"] += 1
            continue
        for record in records:
            if record["result"] in PASSED:
                counts["passed"] += 1
            elif record["result"] in SKIPPED:
                counts["skipped"] += 1
                print(f"skipped ({folder}): {record['name']}: {skip_reason(record)}")
            else:
                counts["failed"] += 1
                print(f"FAILED ({folder}): {record['name']}: {record['result'].lower()}")
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**counts))
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
