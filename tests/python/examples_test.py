"""The examples run, and check their own results."""

import importlib.util
import pathlib
import re
import subprocess
import sys
import unittest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples/python"


class ExamplesTest(unittest.TestCase):
    """A test for each file of the folder, by its name."""

    def run_example(self, file):
        for package in re.findall(r"^import (torch|transformers)$", file.read_text(), re.MULTILINE):
            if importlib.util.find_spec(package) is None:
                self.skipTest(f"{package} is not installed")
        done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("differs by", done.stdout)

    def test_the_folder_has_examples(self):
        self.assertGreaterEqual(len(list(EXAMPLES.glob("*.py"))), 6)


for example in EXAMPLES.glob("*.py"):
    setattr(ExamplesTest, f"test_{example.stem}", lambda self, file=example: self.run_example(file))


if __name__ == "__main__":
    unittest.main()
