"""Calls that are not planned again: they give what a call that is planned gives, and nothing else is taken for equal."""

import unittest
import warnings

import numpy as np

import fovea
from calls import i32, legal_calls
from fovea import _native
from support import Case, bf16, run_threads


def results_of(call, arguments):
    """Results and everything that may have been updated."""
    results = call(**arguments)
    if isinstance(results, dict):
        results = tuple(results[name] for name in sorted(results))
    results = results if isinstance(results, tuple) else (results,)
    return [entry for entry in (*results, *arguments.values()) if isinstance(entry, np.ndarray)]


class RepeatedCallTest(Case):
    def setUp(self):
        fovea.clear_caches()

    def hits(self, call):
        before = _native.cache_info()
        call()
        return _native.cache_info()[0] - before[0]

    def test_a_repeated_call_gives_what_a_planned_one_gives(self):
        contents = [legal_calls(seed) for seed in (0, 1, 1)]
        sized_by_contents = {"metadata_refresh", "context_split", "build_swa_indices", "index_gather"}
        for op in contents[0]:
            with self.subTest(op):
                call = getattr(fovea, op)
                first, again, fresh = (arguments[op] for arguments in contents)
                call(**first)
                hits = self.hits(lambda: call(**{name: value.copy() if isinstance(value, np.ndarray) else value
                                                 for name, value in again.items()}))  # fmt: skip
                self.assertEqual(hits, int(op not in sized_by_contents))
                repeated = results_of(call, again)
                fovea.clear_caches()
                planned = results_of(call, fresh)
                self.assertEqual(len(repeated), len(planned))
                for mine, other in zip(repeated, planned):
                    self.assert_same(mine, other)

    def test_results_that_are_written_whole_take_memory_as_it_is(self):
        # New memory of these is not cleared: whatever it held, the same bits come, empty rows and padding included.
        for op in ("sparse_mla", "topk_select", "index_select", "msa_attend", "kda_decode"):
            with self.subTest(op):
                call, arguments = getattr(fovea, op), legal_calls(2)[op]
                copies = [{name: value.copy() if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
                          for _ in range(2)]  # fmt: skip
                expected = call(**copies[0])
                expected = expected if isinstance(expected, tuple) else (expected,)
                out = tuple(np.full(one.nbytes, 0x5A, np.uint8).view(one.dtype).reshape(one.shape) for one in expected)
                call(**copies[1], out=out)
                for mine, other in zip(out, expected):
                    self.assert_same(mine, other)

    def test_what_decides_a_plan_is_told_apart(self):
        rng = np.random.default_rng(3)
        q, kv, indices = bf16(rng, 3, 2, 576), bf16(rng, 16, 576), rng.integers(0, 16, (3, 8)).astype(np.int32)
        wide = np.zeros((3, 2, 600), kv.dtype)
        wide[..., :576] = q
        base = {"q": q, "kv": kv, "indices": indices, "softmax_scale": 0.1}
        changes = [{"softmax_scale": 0.2}, {"softmax_scale": 1}, {"softmax_scale": True},
                   {"q": wide[..., :576]}, {"q": q[:2], "indices": indices[:2]},
                   {"topk_length": i32([8, 3, 0])}, {"sink": np.zeros(2, np.float32)},
                   {"empty_lse": "pos_inf"}, {"impl": "ref"}, {"return_max_logits": True}, {"fixed_splits": 1}, {"logit_cap": 5.0}, {"q_scale": 1}]  # fmt: skip

        def answer(change):
            try:
                return fovea.sparse_mla(**(base | change))
            except fovea.Error as error:
                return str(error)

        expected = []
        for change in changes:
            fovea.clear_caches()
            expected.append(answer(change))
        fovea.clear_caches()
        fovea.sparse_mla(**base)
        for change, result in zip(changes, expected):
            with self.subTest(change):
                for _ in range(2):
                    actual = answer(change)
                    if isinstance(result, str):
                        self.assertEqual(actual, result)
                        continue
                    for mine, other in zip(actual, result):
                        self.assert_same(mine, other)

    def test_refusals_are_those_of_a_planned_call(self):
        good = {"logits": np.zeros((2, 4), np.float32), "row_len": i32([4, 3]), "topk": 2}
        fovea.topk_select(**good)
        frozen = np.zeros((2, 2), np.int32)
        fovea.topk_select(**good, out=frozen)
        frozen.flags.writeable = False
        for _ in range(2):
            with self.assertRaisesRegex(fovea.InvalidArgument, "indices is read-only"):
                fovea.topk_select(**good, out=frozen)
            with self.assertRaisesRegex(fovea.InvalidArgument, "topk"):
                fovea.topk_select(**{**good, "topk": -2})
            with self.assertRaisesRegex(fovea.InvalidArgument, "impl is of type int"):
                fovea.topk_select(**good, impl=3)
        twice = np.lib.stride_tricks.as_strided(np.zeros(2, np.int32), (2, 2), (0, 4))
        for _ in range(2):
            with self.assertRaisesRegex(fovea.InvalidArgument, "share memory"):
                fovea.topk_select(**good, out=twice)

    def test_a_tensor_that_is_not_used_is_a_warning_every_time(self):
        arguments = {"logits": np.zeros((1, 4), np.float32), "row_len": i32([4]), "topk": 2, "row_offset": i32([0])}
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fovea.topk_select(**arguments)
            self.assertEqual(len(caught), 1)
            self.assertIn("row_offset is not used", str(caught[0].message))
            self.assertEqual(caught[0].filename, __file__)
        with warnings.catch_warnings(), self.assertRaises(UserWarning):
            warnings.simplefilter("error")
            fovea.topk_select(**arguments)

    def test_the_oldest_plans_are_forgotten(self):
        row_len = i32([4])
        for width in range(4, 700):
            fovea.topk_select(np.zeros((1, width), np.float32), row_len, 2)
        self.assertLessEqual(_native.cache_info()[2], 512)
        self.assertEqual(self.hits(lambda: fovea.topk_select(np.zeros((1, 699), np.float32), row_len, 2)), 1)
        self.assertEqual(self.hits(lambda: fovea.topk_select(np.zeros((1, 4), np.float32), row_len, 2)), 0)
        fovea.clear_caches()
        self.assertEqual(_native.cache_info()[2], 0)

    def test_threads_share_the_plans(self):
        calls = [(legal_calls(seed)["sparse_mla"]) for seed in range(4)]
        expected = [fovea.sparse_mla(**call) for call in calls]
        wrong = []

        def work(number):
            for turn in range(100):
                if turn % 10 == number:
                    fovea.clear_caches()
                for mine, other in zip(fovea.sparse_mla(**calls[number]), expected[number]):
                    if not np.array_equal(mine, other):
                        wrong.append(number)

        run_threads(4, work)
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
