#!/usr/bin/env python3
"""Adds up the test cases of a folder of result files and prints `N passed, N failed, N skipped` last.

Reads GoogleTest's XML output (its JSON of 1.12 leaves the reasons of skips out) and JSON files of the form
{"tests": N, "failures": N, "skipped": N, "reasons": {"text": N}}. Lists each skip reason with its count. Exits 1 when something failed or when
no test ran.
"""

import collections
import json
import pathlib
import sys
import xml.etree.ElementTree


class Totals:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0
        self.reasons = collections.Counter()

    def add_json(self, data):
        self.passed += data["tests"] - data["failures"] - data["skipped"]
        self.failed += data["failures"]
        self.skipped += data["skipped"]
        self.reasons.update(data.get("reasons", {}))

    def add_xml(self, root):
        for case in root.iter("testcase"):
            if case.find("failure") is not None:
                self.failed += 1
            elif case.get("result") == "skipped":
                self.skipped += 1
                # The first line is where the test skipped, the others why.
                place, _, reason = case.find("skipped").get("message", "").partition("\n")
                self.reasons[reason.strip() or f"no reason given, at {place}"] += 1
            elif case.get("result") == "completed":
                self.passed += 1


def main() -> int:
    totals = Totals()
    for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
        try:
            if path.suffix == ".json":
                totals.add_json(json.loads(path.read_text()))
            elif path.suffix == ".xml":
                totals.add_xml(xml.etree.ElementTree.parse(path).getroot())
        except (ValueError, xml.etree.ElementTree.ParseError):
            print(f"{path.name}: not readable, counted as a failure")
            totals.failed += 1
    for reason, count in sorted(totals.reasons.items()):
        print(f"skipped {count}: {reason}")
    print(f"{totals.passed} passed, {totals.failed} failed, {totals.skipped} skipped")
    return 1 if totals.failed or totals.passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
