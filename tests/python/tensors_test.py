"""What counts as a tensor, where results go, and that nothing is copied or reinterpreted."""

import threading
import unittest
import warnings

import numpy as np

import fovea
from support import BF16, E4M3, Case, Elsewhere, bf16, run_threads


def i32(values):
    return np.array(values, np.int32)


LOGITS = np.array([[3, 1, 5, 4], [0, 9, 8, 7]], np.float32)
ROW_LEN = np.array([4, 3], np.int32)
BEST = [[2, 3], [1, 2]]


class InputTest(Case):
    def test_numpy_arrays_and_other_buffers(self):
        self.assertEqual(fovea.topk_select(LOGITS, ROW_LEN, 2).tolist(), BEST)
        self.assertEqual(fovea.topk_select(memoryview(LOGITS), memoryview(ROW_LEN), 2).tolist(), BEST)

    def test_dlpack_of_the_cpu(self):
        logits, row_len = Elsewhere(LOGITS, device=(1, 0)), Elsewhere(ROW_LEN, device=(1, 0))
        self.assertEqual(fovea.topk_select(logits, row_len, 2).tolist(), BEST)

    def test_read_only_inputs(self):
        logits = LOGITS.copy()
        logits.flags.writeable = False
        self.assertEqual(fovea.topk_select(logits, ROW_LEN, 2).tolist(), BEST)

    def test_strides_are_honoured(self):
        wide = np.full((6, 9), 100, np.float32)
        wide[::3, 2:6] = LOGITS
        self.assertEqual(fovea.topk_select(wide[::3, 2:6], ROW_LEN, 2).tolist(), BEST)

    def test_an_axis_of_one_element_may_have_any_stride(self):
        logits = np.lib.stride_tricks.as_strided(LOGITS, (1, 4), (-12345, 4))
        self.assertEqual(fovea.topk_select(logits, ROW_LEN[:1], 2).tolist(), BEST[:1])

    def test_a_row_that_is_shown_twice(self):
        logits = np.broadcast_to(LOGITS[0], (2, 4))
        self.assertEqual(fovea.topk_select(logits, i32([4, 4]), 2).tolist(), [BEST[0]] * 2)

    def test_bits_of_bfloat16(self):
        rng = np.random.default_rng(1)
        parts = bf16(rng, 2, 3, 1, 8)
        lse = np.zeros((2, 3, 1), np.float32)
        expected, _ = fovea.merge_lse(parts, lse)
        self.assertEqual(expected.dtype, BF16)
        actual, _ = fovea.merge_lse(parts.view(np.uint16), lse)
        self.assert_same(actual, expected)

    def test_codes_of_e4m3_and_flags(self):
        codes = np.array([[[0, 1, 2, 3]]], np.float32).astype(E4M3)
        keys = np.array([[1, 1, 1, 1]], np.float32).astype(E4M3)
        weight, scale = np.ones((1, 1), np.float32), np.ones(1, np.float32)
        logits = fovea.index_logits(
            codes, weight, "ragged", k_fp8=keys, k_scale=scale, k_start=i32([0]), k_end=i32([1])
        )
        self.assertEqual(logits.tolist(), [[6]])
        arguments = i32([0, 2]), i32([2]), i32([[0]]), 2, 4
        _, row_len = fovea.build_swa_indices(*arguments, row_valid=np.array([False, True]))
        self.assertEqual(row_len.tolist(), [0, 2])

    def test_no_elements(self):
        out = fovea.topk_select(np.zeros((0, 4), np.float32), i32([]), 3)
        self.assertEqual(out.shape, (0, 3))
        out = fovea.topk_select(np.zeros((2, 0), np.float32), i32([0, 0]), 3)
        self.assertEqual(out.tolist(), [[-1] * 3] * 2)

    def test_numbers_of_numpy_are_parameters(self):
        self.assertEqual(fovea.topk_select(LOGITS, ROW_LEN, np.int64(2)).tolist(), BEST)
        rng = np.random.default_rng(2)
        arguments = bf16(rng, 1, 1, 576), bf16(rng, 2, 576), i32([[0, 1]])
        self.assert_same(
            fovea.sparse_mla(*arguments, np.float32(0.5))[0], fovea.sparse_mla(*arguments, 0.5)[0]
        )

    def test_a_tensor_that_is_not_used_is_told(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fovea.topk_select(LOGITS, ROW_LEN, 2, row_offset=i32([0, 0]))
        self.assertEqual(len(caught), 1)
        self.assertIn("row_offset is not used", str(caught[0].message))
        self.assertEqual(caught[0].filename, __file__)


class OutputTest(Case):
    def test_out_is_written_and_returned(self):
        out = np.full((2, 2), 7, np.int32)
        self.assertIs(fovea.topk_select(LOGITS, ROW_LEN, 2, out=out), out)
        self.assertEqual(out.tolist(), BEST)

    def test_a_strided_out_keeps_what_lies_between(self):
        wide = np.full((4, 5), 7, np.int32)
        fovea.topk_select(LOGITS, ROW_LEN, 2, out=wide[::2, 1:3])
        self.assertEqual(wide[::2, 1:3].tolist(), BEST)
        wide[::2, 1:3] = 7
        self.assertTrue((wide == 7).all())

    def test_some_results_by_place_or_name(self):
        rng = np.random.default_rng(3)
        parts, lse_parts = rng.standard_normal((2, 3, 1, 8)).astype(np.float32), np.zeros((2, 3, 1), np.float32)
        expected = fovea.merge_lse(parts, lse_parts)
        mine = np.zeros((3, 1), np.float32)
        for out in ((None, mine), {"lse": mine}):
            mine[:] = -1
            results = fovea.merge_lse(parts, lse_parts, out=out)
            self.assertIs(results[1], mine)
            self.assert_same(results[0], expected[0])
            self.assert_same(results[1], expected[1])

    def test_logits_of_another_width(self):
        codes = np.ones((1, 1, 4), np.uint8)
        out = np.full((1, 3), 7, np.float32)
        arguments = {"k_fp8": np.ones((2, 4), np.uint8), "k_scale": np.ones(2, np.float32)}
        rows = {"k_start": i32([0]), "k_end": i32([2])}
        fovea.index_logits(codes, np.ones((1, 1), np.float32), "ragged", **arguments, **rows, out=out)
        self.assertEqual(out[0, 2], 7)
        self.assertNotEqual(out[0, 1], 7)


class RefusalTest(Case):
    def refused(self, text, call, *arguments, kind=fovea.InvalidArgument, **keywords):
        with self.assertRaises(kind) as caught:
            call(*arguments, **keywords)
        self.assertIn(text, str(caught.exception))
        self.assertIs(type(caught.exception), kind)

    def test_classes_are_those_that_python_code_expects(self):
        self.assertTrue(issubclass(fovea.Error, RuntimeError))
        self.assertTrue(issubclass(fovea.InvalidArgument, ValueError))
        self.assertTrue(issubclass(fovea.Unsupported, NotImplementedError))
        self.assertTrue(issubclass(fovea.OutOfMemory, MemoryError))
        for kind in (fovea.InvalidArgument, fovea.Unsupported, fovea.OutOfMemory, fovea.DeviceError):
            self.assertTrue(issubclass(kind, fovea.Error))
        self.assertEqual(fovea.InvalidArgument.code, "invalid_argument")

    def test_what_is_no_tensor(self):
        self.refused("topk_select: logits is of type list", fovea.topk_select, [[1.0]], ROW_LEN, 2)
        self.refused("the tensor logits is missing", fovea.topk_select, None, ROW_LEN, 2)

    def test_types_and_shapes(self):
        self.refused("logits has elements of type float64", fovea.topk_select, LOGITS.astype(float), ROW_LEN, 2)
        self.refused("logits has elements of type float16", fovea.topk_select, LOGITS.astype("f2"), ROW_LEN, 2)
        self.refused("row_len = i64 [2], expected i32 [T]", fovea.topk_select, LOGITS, ROW_LEN.astype(int), 2)
        self.refused("row_len = i32 [1], expected i32 [T] with T = 2", fovea.topk_select, LOGITS, ROW_LEN[:1], 2)
        self.refused("6 axes", fovea.topk_select, np.zeros([1] * 6, np.float32), ROW_LEN, 2)
        self.refused("elements of type", fovea.topk_select, LOGITS.astype(">f4"), ROW_LEN, 2)

    def test_layouts_that_would_be_reinterpreted(self):
        wide = np.zeros((2, 8), np.float32)
        self.refused("contiguous last axis", fovea.topk_select, wide[:, ::2], ROW_LEN, 2)
        self.refused("strides >= 0", fovea.topk_select, LOGITS[::-1], ROW_LEN, 2)
        unaligned = np.zeros(33, np.uint8)[1:].view(np.float32).reshape(2, 4)
        self.refused("not aligned", fovea.topk_select, unaligned, ROW_LEN, 2)
        uneven = np.ndarray((2, 4), np.float32, np.zeros(64, np.uint8), strides=(18, 4))
        self.refused("stride of 18 bytes", fovea.topk_select, uneven, ROW_LEN, 2)

    def test_parameters(self):
        self.refused("topk", fovea.topk_select, LOGITS, ROW_LEN, -1)
        self.refused("topk", fovea.topk_select, LOGITS, ROW_LEN, "two")
        self.refused("topk is of type list", fovea.topk_select, LOGITS, ROW_LEN, [2])
        self.refused("topk is beyond 64 bits", fovea.topk_select, LOGITS, ROW_LEN, 2**80)
        self.refused("topk is missing", fovea.topk_select, LOGITS, ROW_LEN, None)
        self.refused("params.transform = 'global'", fovea.topk_select, LOGITS, ROW_LEN, 2, transform="global")
        self.refused("'fast' does not exist", fovea.topk_select, LOGITS, ROW_LEN, 2, impl="fast")
        with self.assertRaises(TypeError):
            fovea.topk_select(LOGITS, ROW_LEN, 2, row_begin=ROW_LEN)

    def test_results(self):
        frozen = np.zeros((2, 2), np.int32)
        frozen.flags.writeable = False
        self.refused("read-only", fovea.topk_select, LOGITS, ROW_LEN, 2, out=frozen)
        self.refused("indices = i32 [2, 3]", fovea.topk_select, LOGITS, ROW_LEN, 2, out=np.zeros((2, 3), np.int32))
        twice = np.lib.stride_tricks.as_strided(np.zeros(2, np.int32), (2, 2), (0, 4))
        self.refused("share memory", fovea.topk_select, LOGITS, ROW_LEN, 2, out=twice)
        self.refused("unknown output 'index'", fovea.topk_select, LOGITS, ROW_LEN, 2, out={"index": ROW_LEN})
        parts = np.zeros((1, 2, 1, 4), np.float32), np.zeros((1, 2, 1), np.float32)
        self.refused("expected a tuple of out, lse", fovea.merge_lse, *parts, out=parts[0])
        self.refused("out has 1 entries", fovea.merge_lse, *parts, out=(None,))
        pool = np.zeros((1, 132), np.uint8)
        pool.flags.writeable = False
        source = np.zeros((1, 128), BF16), i32([0])
        self.refused("pool is read-only", fovea.pack_rows, *source, pool, "i132", page_size=1, scale_mode="fp32")

    def test_a_refused_call_writes_nothing(self):
        out = np.full((2, 2), 7, np.int32)
        self.refused("", fovea.topk_select, LOGITS, ROW_LEN[:1], 2, out=out)
        self.assertTrue((out == 7).all())

    def test_results_larger_than_the_memory(self):
        logits, row_len = np.zeros((1 << 14, 1), np.float32), np.zeros(1 << 14, np.int32)
        self.refused("this machine has", fovea.topk_select, logits, row_len, 2**31 - 1, kind=fovea.OutOfMemory)

    def test_devices(self):
        cuda, other = Elsewhere(LOGITS), Elsewhere(ROW_LEN, device=(2, 1))
        self.refused("row_len is on cpu and logits on cuda:0", fovea.topk_select, cuda, ROW_LEN, 2)
        self.refused("row_len is on cuda:1 and logits on cuda:0", fovea.topk_select, cuda, other, 2)
        self.refused("DLPack type 7", fovea.topk_select, Elsewhere(LOGITS, device=(7, 0)), ROW_LEN, 2)

    @unittest.skipIf(fovea.available("topk_select", "cuda")[0], "this machine has a GPU")
    def test_a_gpu_that_this_machine_lacks(self):
        where = Elsewhere(LOGITS), Elsewhere(ROW_LEN)
        self.refused("cuda:0", fovea.topk_select, *where, 2, kind=fovea.Unsupported)

    def test_exporters_that_break_the_protocol(self):
        class Raising:
            def __dlpack_device__(self):
                raise OSError("gone")

            def __dlpack__(self, **_):
                raise OSError("gone")

        class Odd(Raising):
            def __dlpack_device__(self):
                return "there"

        class NoCapsule(Raising):
            def __dlpack_device__(self):
                return 1, 0

            def __dlpack__(self, **_):
                return 5

        for exporter, text in ((Raising(), "gone"), (Odd(), "logits gives no DLPack"), (NoCapsule(), "no DLPack capsule")):
            self.refused(text, fovea.topk_select, exporter, ROW_LEN, 2)
        self.refused("no DLPack capsule", fovea.topk_select, Elsewhere(LOGITS, (1, 0), name=b"other"), ROW_LEN, 2)
        self.refused("elements of type", fovea.topk_select, Elsewhere(LOGITS, (1, 0), lanes=2), ROW_LEN, 2)


class ThreadTest(Case):
    def test_the_interpreter_runs_while_an_operator_does(self):
        q, done = np.zeros((64, 16, 576), BF16), threading.Event()
        arguments = q, np.zeros((512, 576), BF16), np.zeros((64, 512), np.int32), 1.0

        def work():
            fovea.sparse_mla(*arguments, impl="ref")
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        turns = 0
        while not done.wait(0.001):
            turns += 1
        thread.join()
        self.assertGreater(turns, 20)  # with the GIL held: none after the call has begun

    def test_calls_in_several_threads_give_the_same(self):
        rows = np.random.default_rng(1).standard_normal((64, 1 << 14)).astype(np.float32)
        lengths = np.full(64, 1 << 14, np.int32)
        expected = fovea.topk_select(rows, lengths, 512)
        results = [None] * 4

        def select(i):
            for _ in range(5):
                results[i] = fovea.topk_select(rows, lengths, 512)

        run_threads(4, select)
        for result in results:
            self.assert_same(result, expected)


class AvailableTest(Case):
    def test_answers_and_never_raises(self):
        self.assertEqual(fovea.available("topk_select"), (True, ""))
        self.assertEqual(fovea.available("context_split"), (True, ""))
        for backend in ("DsaBackend", "KdaBackend", "MsaBackend", "V4Backend"):
            self.assertEqual(fovea.available(backend), (True, ""))
            self.assertEqual(fovea.available(backend, "cuda")[0], fovea.available("sparse_mla", "cuda")[0])
        for op, device in (("nothing", "cpu"), ("topk_select", "tpu"), (None, None), (3, object()), ("a" * 10000, "cuda:x")):
            answer, reason = fovea.available(op, device)
            self.assertFalse(answer)
            self.assertTrue(reason)

        class Hostile:
            def __str__(self):
                raise RuntimeError("no text")

        self.assertEqual(fovea.available(Hostile()), (False, "no text"))

    def test_version_and_lists(self):
        self.assertRegex(fovea.__version__, r"^\d+\.\d+\.\d+$")
        self.assertIn("sparse_mla", fovea.operators())
        names = [entry.name for entry in fovea.implementations("sparse_mla")]
        self.assertEqual(names[-1], "ref")
        self.assertEqual(fovea.implementations("nothing"), [])


if __name__ == "__main__":
    unittest.main()
