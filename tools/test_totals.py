#!/usr/bin/env python3
"""Adds up the test cases of a folder of result files and prints `N passed, N failed, N skipped` last.

Reads GoogleTest's JSON output and any other file of the form {"tests": N, "failures": N, "skipped": N}. Lists each skip
reason with its count. Exits 1 when something failed or when no test ran.
"""

import collections
import json
import pathlib
import sys


def main() -> int:
    passed = failed = skipped = 0
    reasons = collections.Counter()
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
        try:
            data = json.loads(path.read_text())
        except ValueError:
            print(f"{path.name}: not readable, counted as a failure")
            failed += 1
            continue
        if "testsuites" not in data:
            passed += data["tests"] - data["failures"] - data["skipped"]
            failed += data["failures"]
            skipped += data["skipped"]
            continue
        for suite in data["testsuites"]:
            for case in suite["testsuite"]:
                if case.get("failures"):
                    failed += 1
                elif case.get("result") == "SKIPPED":
                    skipped += 1
                    message = (case.get("skipped") or [{}])[0].get("message", "")
                    lines = [line for line in message.strip().splitlines() if line and ".h:" not in line and ".cc:" not in line]
                    reasons[lines[-1] if lines else "no reason given"] += 1
                elif case.get("result") == "COMPLETED":
                    passed += 1
    for reason, count in sorted(reasons.items()):
        print(f"skipped {count}: {reason}")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
