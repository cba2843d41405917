#!/usr/bin/env python3
"""Runs every *_test.py of a folder and writes the totals where ctest's are collected.

run_unittests.py <folder> <totals.json> [--full | unittest name ...]

Classes whose name starts with Full are left out, and with --full run alone.
"""

import collections
import json
import pathlib
import sys
import unittest


def cases_of(suite):
    for entry in suite:
        if isinstance(entry, unittest.TestSuite):
            yield from cases_of(entry)
        else:
            yield entry


def main():
    folder, totals, names = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]), sys.argv[3:]
    full = names == ["--full"]
    sys.path.insert(0, str(folder))
    loader = unittest.TestLoader()
    if names and not full:
        suite = loader.loadTestsFromNames(names)
    else:
        every = cases_of(loader.discover(str(folder), "*_test.py"))
        suite = unittest.TestSuite(case for case in every if type(case).__name__.startswith("Full") == full)
    result = unittest.TextTestRunner(verbosity=1).run(suite)
    failures = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    reasons = collections.Counter(reason for _, reason in result.skipped)
    totals.parent.mkdir(parents=True, exist_ok=True)
    totals.write_text(
        json.dumps({"tests": result.testsRun, "failures": failures, "skipped": len(result.skipped), "reasons": reasons})
    )
    print(f"{result.testsRun - failures - len(result.skipped)} passed, {failures} failed, {len(result.skipped)} skipped")
    return 0 if failures == 0 and result.testsRun > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
