"""Memory that the caller gives."""

import unittest

import numpy as np

import fovea
from calls import legal_calls
from support import Case


class MemoryResourceTest(Case):
    def setUp(self):
        self.pieces, self.asked, self.least = {}, 0, 2**62
        self.addCleanup(fovea.set_memory_resource, "cpu", None, None)

    def allocate(self, size, stream):
        self.asked += 1
        self.assertEqual(stream, 0)
        if size >= self.least:
            raise MemoryError("that is too much")
        memory = np.empty(size + 64, np.uint8)
        address = (memory.ctypes.data + 63) // 64 * 64
        self.pieces[address] = memory, size
        return address

    def release(self, address, size, stream):
        memory, asked = self.pieces.pop(address)
        self.assertEqual((size, stream), (asked, 0))

    def test_workspaces_come_from_it_and_go_back(self):
        arguments = {**legal_calls()["sparse_mla"], "impl": "cpu"}
        expected = fovea.sparse_mla(**arguments)
        fovea.set_memory_resource("cpu", self.allocate, self.release)
        for mine, other in zip(fovea.sparse_mla(**arguments), expected):
            self.assert_same(mine, other)
        self.assertEqual((len(self.pieces), self.asked), (1, 1))  # kept for the next call
        fovea.sparse_mla(**arguments)
        self.assertEqual(self.asked, 1)
        fovea.clear_caches()
        self.assertEqual(self.pieces, {})
        fovea.sparse_mla(**arguments)
        fovea.set_memory_resource("cpu", None, None)
        self.assertEqual((len(self.pieces), self.asked), (0, 2))
        fovea.sparse_mla(**arguments)
        self.assertEqual(self.asked, 2)

    def test_too_little_is_out_of_memory(self):
        arguments = {**legal_calls()["sparse_mla"], "impl": "cpu"}
        fovea.set_memory_resource("cpu", self.allocate, self.release)
        self.least = 0
        with self.assertRaisesRegex(fovea.OutOfMemory, "bytes asked"):
            fovea.sparse_mla(**arguments)
        fovea.set_memory_resource("cpu", lambda size, stream: "no address", self.release)
        with self.assertRaisesRegex(fovea.OutOfMemory, "bytes asked"):
            fovea.sparse_mla(**arguments)
        # What needs no workspace goes on.
        self.assertEqual(fovea.concat_absorbed_q(**legal_calls()["concat_absorbed_q"]).shape, (3, 2, 576))

    def test_refusals(self):
        for functions in ((self.allocate, None), (None, self.release), (3, self.release), (self.allocate, "release")):
            with self.subTest(functions), self.assertRaises(fovea.InvalidArgument):
                fovea.set_memory_resource("cpu", *functions)
        with self.assertRaises(fovea.InvalidArgument):
            fovea.set_memory_resource("tpu", self.allocate, self.release)


if __name__ == "__main__":
    unittest.main()
