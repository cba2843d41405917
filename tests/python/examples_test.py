"""The examples run, and check their own results."""

import importlib.util
import pathlib
import re
import subprocess
import sys
import unittest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples/python"


class ExamplesTest(unittest.TestCase):
    def test_every_example(self):
        files = sorted(EXAMPLES.glob("*.py"))
        self.assertGreaterEqual(len(files), 2)
        for file in files:
            with self.subTest(file.name):
                for package in re.findall(r"^import (torch|transformers)$", file.read_text(), re.MULTILINE):
                    if importlib.util.find_spec(package) is None:
                        self.skipTest(f"{package} is not installed")
                done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=300)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("differs by", done.stdout)


if __name__ == "__main__":
    unittest.main()
