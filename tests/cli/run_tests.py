#!/usr/bin/env python3
"""Runs every *_test.py of this folder against one binary and writes the totals where ctest's are collected.

run_tests.py <fovea binary> <totals.json> [unittest name ...]
"""

import json
import os
import pathlib
import sys
import unittest


def main():
    binary, totals, names = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
    os.environ["FOVEA_BINARY"] = str(pathlib.Path(binary).resolve())
    folder = pathlib.Path(__file__).resolve().parent
    sys.path.insert(0, str(folder))
    loader = unittest.TestLoader()
    suite = loader.loadTestsFromNames(names) if names else loader.discover(str(folder), "*_test.py")
    result = unittest.TextTestRunner(verbosity=1).run(suite)
    failures = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    totals.parent.mkdir(parents=True, exist_ok=True)
    totals.write_text(json.dumps({"tests": result.testsRun, "failures": failures, "skipped": len(result.skipped)}))
    print(f"{result.testsRun - failures - len(result.skipped)} passed, {failures} failed, {len(result.skipped)} skipped")
    return 0 if failures == 0 and result.testsRun > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
