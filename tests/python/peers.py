"""Texts of engines' files, for tests that execute them over fovea.compat, with tensors of the CPU and of a GPU.

FOVEA_PEER_SOURCES names a folder with them: NUMBER_*.txt, the file's path on the first line, then the source.
"""

import os
import pathlib
import unittest

from support import reason_without_gpu

SOURCES = os.environ.get("FOVEA_PEER_SOURCES", "")


def find(number):
    return next(iter(sorted(pathlib.Path(SOURCES).glob(f"{number}_*.txt"))), None) if SOURCES else None


def needs(number):
    return unittest.skipUnless(find(number), f"FOVEA_PEER_SOURCES names no folder with {number}_*.txt")


def needs_gpu(kind):
    reason = reason_without_gpu()
    return unittest.skipIf(reason, reason)(kind)


def execute(number):
    """The names of the file, unchanged but for its first line."""
    path = find(number)
    names = {"__name__": f"engine_{number}"}
    exec(compile(path.read_text().split("\n", 1)[1], str(path), "exec"), names)
    return names
