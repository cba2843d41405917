"""fovea.DsaBackend in the place of an engine's backend: the decision of what runs, and that every row of
docs/compat/sglang-dsa.md is seen by a test of sglang_*_test.py or says why it is not.
"""

import pathlib
import sys
import unittest

import fovea
import sglang_forward_test
import sglang_graphs_test
import sglang_steps_test
from engine import SEEN, Engine, rows
from sglang_steps_test import BUILDING, CONSTRUCTION, StepCase, arrays

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "compat" / "sglang-dsa.md"
TESTS = (sglang_forward_test, sglang_graphs_test, sglang_steps_test)

# Rows that no test sees: (section, row) -> why.
UNSEEN = {
    (BUILDING, "the same test for DRAFT_EXTEND inside the EXTEND branch"): "a condition that never holds there",
}
# Its rows are names of fovea.compat, one test each in compat_dsa_test.py, which reads the section, too.
ELSEWHERE = "Functions of other files that it uses"


class DispatchTest(StepCase):
    """What runs is a function of the configuration and the batch."""

    def dispatch(self, lengths=(9, 4, 12), counts=(3, 4, 1), mode="extend", host=True, mha_inputs=True, **options):
        self.engine = Engine(**{"topk": 12, "deterministic": False, **options})
        self.engine.init_forward_metadata(self.engine.batch(mode, lengths, counts), host=host, mha_inputs=mha_inputs)
        return self.engine.backend.dispatch()

    def assert_kernel(self, kernel, **options):
        with self.subTest(**options):
            found = self.dispatch(**options)
            self.assertEqual((found["kernel"], found["one_shot"]), (kernel, kernel == "one_shot_mha"))
            self.assertEqual(found["transform"], "ragged" if kernel == "contiguous_bf16" else "paged")
            self.assertTrue(found["reasons"] and all(isinstance(reason, str) for reason in found["reasons"]))
            self.assertEqual("row_offset" in self.engine.backend.metadata(), kernel == "contiguous_bf16")

    @rows("Dispatch", "set_nsa_prefill_impl", "branch: plain EXTEND, assertion on host lengths", "–",
          "condition: longest request within the limit", "condition: Σ L within the chunk", "condition: device generation")  # fmt: skip
    def test_dense_attention_when_every_condition_holds(self):
        self.assertEqual(fovea.available("mha_varlen", "cpu"), (True, ""))
        for mode in ("extend", "mixed"):
            self.assert_kernel("one_shot_mha", mode=mode)
        self.assert_kernel("one_shot_mha", mha_chunk_capacity=25)
        for change in ({"host": False}, {"mha_inputs": False}, {"topk": 11}, {"mha_chunk_capacity": 24}, {"deterministic": True}):
            self.assert_kernel("cache_direct", **change)

    @rows("Dispatch", "branch: trtllm: limit = chunk capacity")
    def test_trtllm_takes_longer_requests(self):
        for capacity, kernel in ((25, "one_shot_mha"), (24, "cache_direct")):
            self.assert_kernel(kernel, topk=4, row_format="bf16", prefill_implementation="trtllm", mha_chunk_capacity=capacity)
        self.assert_kernel("cache_direct", topk=4, row_format="bf16", mha_chunk_capacity=25)

    @rows("Dispatch", "condition: cache type bf16 or fp8")
    def test_dense_attention_beside_every_cache(self):
        for row_format in ("bf16", "v32", "f576"):
            self.assert_kernel("one_shot_mha", row_format=row_format)

    @rows("Dispatch", "condition: CP off")
    def test_context_parallelism_is_absorbed(self):
        self.assert_kernel("cache_direct", context_parallel=True)

    @rows("Dispatch", "branch: SGLANG_NSA_FORCE_MLA")
    @rows(CONSTRUCTION, "_force_attn_forward_mla")
    @rows("Environment switches", "SGLANG_NSA_FORCE_MLA")
    def test_forced_absorption(self):
        self.assert_kernel("cache_direct", force_absorbed=True)

    @rows("Dispatch", "branch: other modes, capture and replay (no batch): absorbed")
    def test_other_modes_are_absorbed(self):
        for mode, counts in (("decode", None), ("target_verify", None), ("draft_extend", [2, 1, 3]), ("draft_extend_v2", None)):
            self.assert_kernel("cache_direct", mode=mode, lengths=(9, 4, 12), counts=counts)
            engine = Engine(topk=12, deterministic=False)
            plan = engine.init_forward_metadata_capture_cuda_graph(3, mode)
            self.assertEqual(engine.backend.dispatch(plan)["kernel"], "cache_direct")

    @rows("Dispatch", "branch: auto and fp8, newest devices, plain EXTEND, Σ L < 512·E: unpack")
    def test_unpacking_by_keys_for_a_row(self):
        few = {"topk": 4, "contiguous_kv_ratio": 3.2}  # 25 keys for 8 rows: 3.125
        self.assert_kernel("contiguous_bf16", **few)
        for change in ({"contiguous_kv_ratio": 3.125}, {"contiguous_kv_ratio": 0.0}, {"mode": "mixed"}, {"host": False},
                       {"row_format": "bf16"}, {"mha_chunk_capacity": 24}, {"mode": "decode", "counts": None}):  # fmt: skip
            self.assert_kernel("cache_direct", **{**few, **change})
        with self.assertRaisesRegex(fovea.Unsupported, "contiguous_kv_ratio = 3.200000 with deterministic"):
            self.dispatch(**few, deterministic=True)

    @rows("Dispatch", "branch: auto and fp8 else", "branch: auto and bf16")
    def test_auto_reads_the_cache(self):
        for row_format in ("bf16", "v32", "f576"):
            for name in ("auto", "flashmla_auto"):
                self.assert_kernel("cache_direct", topk=4, row_format=row_format, prefill_implementation=name)

    @rows("Dispatch", "get_topk_transform_method")
    def test_ragged_exactly_with_the_contiguous_kernel(self):
        for name in ("contiguous_bf16", "flashmla_sparse"):
            for mode, counts in (("extend", [3, 4, 1]), ("mixed", [1, 4, 1])):
                self.assert_kernel("contiguous_bf16", topk=4, prefill_implementation=name, mode=mode, counts=counts)
            for mode, counts in (("decode", None), ("target_verify", None), ("draft_extend", [2, 1, 3])):
                self.assert_kernel("cache_direct", topk=4, prefill_implementation=name, mode=mode, counts=counts)
            self.assert_kernel("cache_direct", topk=4, prefill_implementation=name, row_format="bf16")

    @rows("Dispatch", "auto skipped under dense")
    @rows(CONSTRUCTION, "use_mha")
    def test_no_batch_decides_for_the_next_one(self):
        options = {"topk": 12, "deterministic": False, "contiguous_kv_ratio": 3.2}
        batches = [("extend", [9, 4, 12], [3, 4, 1]), ("extend", [9, 4, 13], [3, 4, 2]), ("decode", [9, 4, 12], None),
                   ("extend", [19, 18, 19], [1, 1, 1])]  # fmt: skip
        alone = [self.dispatch(*batch[1:], mode=batch[0], **options) for batch in batches]
        self.assertEqual([found["kernel"] for found in alone], ["one_shot_mha", "contiguous_bf16", "cache_direct", "cache_direct"])
        for order in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 3, 0, 2, 1]):
            engine = Engine(**options)
            for number in order:
                engine.init_forward_metadata(engine.batch(*batches[number]), mha_inputs=True)
                self.assertEqual(engine.backend.dispatch(), alone[number])

    @rows(BUILDING, "call of set_nsa_prefill_impl before the arrays")
    def test_a_refused_step_leaves_the_one_before(self):
        before = self.dispatch(mha_inputs=False, topk=4)
        fields = {name: values.copy() for name, values in arrays(self.engine.backend.metadata()).items()}
        batch = self.engine.batch("extend", [5, 1, 7], [5, 1, 7])
        expected = self.engine.forward(self.engine.batch("extend", [9, 4, 12], [3, 4, 1]))
        for changes in ({"host_seq_len": [5, 1, 99]}, {"ext_len": None}, {"positions": batch.positions[1:]}, {"mode": "decode"}):
            with self.assertRaises(fovea.InvalidArgument):
                self.engine.init_forward_metadata(batch, **changes)
            self.assertEqual(self.engine.backend.dispatch(), before)
            for name, values in arrays(self.engine.backend.metadata()).items():
                self.assert_same(values, fields[name])
        again = self.engine.forward(self.engine.batch("extend", [9, 4, 12], [3, 4, 1]))
        self.assert_same(again[0], expected[0])


class RowsTest(unittest.TestCase):
    @unittest.skipUnless(PAGE.is_file(), "the documentation is not beside the tests")
    def test_every_row_of_the_page_is_seen_or_says_why_not(self):
        listed, section = [], None
        for line in PAGE.read_text().splitlines():
            if line.startswith("## "):
                section, head = line[3:].strip(), True
            elif line.startswith("| ") and section != ELSEWHERE:
                if head:  # the names of the columns
                    head = False
                else:
                    listed.append((section, line.split("|")[1].strip().replace("`", "")))
        self.assertGreater(len(listed), 200)
        self.assertEqual(len(set(listed)), len(listed))
        self.assertEqual([entry for entry in listed if entry not in SEEN and entry not in UNSEEN], [], "seen by no test")
        self.assertEqual((set(SEEN) | set(UNSEEN)) - set(listed), set(), "not on the page")
        self.assertEqual(set(SEEN) & set(UNSEEN), set())
        found = {name for module in (*TESTS, sys.modules[__name__]) for kind in vars(module).values() if isinstance(kind, type)
                 for name in dir(kind) if name.startswith("test_")}  # fmt: skip
        self.assertEqual({name for tests in SEEN.values() for name in tests} - found, set())


if __name__ == "__main__":
    unittest.main()
