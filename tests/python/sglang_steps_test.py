"""fovea.DsaBackend in the place of an engine's backend: construction, the arrays of steps, captured steps, chains of drafts.
Every test names the rows of docs/compat/sglang-dsa.md that it sees; sglang_forward_test.py has those of forwards.
"""

import unittest

import numpy as np

import fovea
from calls import i32
from engine import DIM, Engine, rows
from support import Case

# Mode, KV lengths, rows of each request: with and without a prefix, one row, none.
BATCHES = {
    "extend": ("extend", [9, 4, 12], [3, 4, 1]),
    "extend_without_prefix": ("extend", [5, 1, 7], [5, 1, 7]),
    "mixed": ("mixed", [9, 4, 12], [1, 4, 1]),
    "decode": ("decode", [9, 1, 12]),
    "idle": ("idle", []),
    "target_verify": ("target_verify", [9, 7, 12]),
    "draft_extend": ("draft_extend", [9, 7, 12], [2, 1, 3]),
    "draft_extend_v2": ("draft_extend_v2", [9, 7, 12]),
}
PREFILLS = ("extend", "extend_without_prefix", "mixed")
DEVICE = "cpu"  # where the backend is
CONSTRUCTION, BUILDING = "NativeSparseAttnBackend: construction", "Building a step"
CAPTURED, MULTI = "Captured steps", "NativeSparseAttnMultiStepBackend"


def arrays(metadata):
    return {name: view.numpy() for name, view in metadata.items()}


class StepCase(Case):
    def assert_metadata(self, found, expected, names=None):
        self.assertEqual(set(found), set(expected))
        for name, values in expected.items():
            if names is not None and name not in names:
                continue
            if name == "page_table":  # later columns belong to nobody
                self.assertEqual(len(found[name]), len(values))
                for line, pages in zip(found[name], values):
                    self.assertEqual(line[: len(pages)].tolist(), pages.tolist(), name)
            else:
                self.assertEqual(found[name].tolist(), values.tolist(), name)


    def assert_attention(self, engine, batch, result, **options):
        """out, lse, indices of the live rows: the best keys by the indexer's formula, and attention over them."""
        live = len(batch.row_len)
        out, lse, indices = (array[:live] for array in result)
        for row, slots in enumerate(indices):
            table = engine.req_to_token[batch.req_pool_indices[batch.owner[row]], : batch.row_len[row]].tolist()
            count = min(batch.row_len[row], engine.topk)
            positions = [table.index(slot) for slot in slots[:count]]
            self.assertEqual(positions, sorted(set(positions)))
            self.assertTrue((slots[count:] == -1).all())
            scores = engine.index_scores(batch, row)
            worst = np.sort(scores)[-count] - 0.05 * np.abs(scores).max()  # two fp8 roundings of each product
            self.assertGreaterEqual(scores[positions].min(), worst)
        expected = engine.attention(engine.inputs(batch)["q"], indices, **options)
        self.assert_close(out, expected[0], 2e-2)
        self.assert_close(lse, expected[1], 1e-2)


class ConstructionTest(StepCase):
    def refused(self, error, text, **options):
        with self.assertRaisesRegex(error, text):
            fovea.DsaBackend(**{**Engine().config, **options})

    @rows("Module", "_is_hip, import of aiter, print when it is absent")
    @rows(CONSTRUCTION, "device, device_capability, device_sm_major")
    def test_what_cannot_run_says_why(self):
        self.assertEqual(fovea.available("DsaBackend", "cpu"), (True, ""))
        for op in ("sparse_mla", "mha_varlen", "index_select"):
            for entry in fovea.implementations(op):
                self.assertEqual(entry.available, entry.reason == "")
        self.refused(fovea.InvalidArgument, "device: 'hip', expected cpu or cuda:N", device="hip")

    @rows("Module", "global_workspace_buffer")
    @rows(CONSTRUCTION, "branch: newest devices or trtllm: workspace_buffer", "speculative_step_id, speculative_num_steps")
    @rows("Environment switches", "SGLANG_FLASHINFER_WORKSPACE_SIZE")
    def test_backends_share_no_memory(self):
        alone, pair = [], [Engine(seed=seed) for seed in (1, 2)]
        batches = [("extend", [9, 4, 12], [9, 4, 12]), ("decode", [10, 5, 13])]
        for engine in [Engine(seed=seed) for seed in (1, 2)]:
            alone.append([engine.step(engine.batch(*batch)) for batch in batches])
        for turn, batch in enumerate(batches):
            made = [engine.batch(*batch) for engine in pair]
            for engine, one in zip(pair, made):
                engine.init_forward_metadata(one)
            for number in (1, 0):  # between one's begin_step and its forward the other one runs
                result = pair[number].forward(made[number], return_indices=True)
                for actual, expected in zip(result, alone[number][turn]):
                    self.assert_same(actual, expected)

    @rows("Module", "_NSA_IMPL_T")
    @rows(CONSTRUCTION, "nsa_prefill_impl, nsa_decode_impl", "enable_auto_select_prefill_impl")
    @rows("Forward", "error: unsupported implementation")
    @rows("Kernels", "branch: bf16 cache quantised whole, per call")
    def test_names_of_implementations(self):
        # Formats that a name reads in prefill and in decode.
        everywhere = {"bf16", "v32", "f576"}
        names = {
            "auto": (everywhere, everywhere), "cache_direct": (everywhere, everywhere),
            "flashmla_auto": (everywhere, everywhere), "flashmla_kv": ({"v32"}, {"v32"}),
            "flashmla_sparse": ({"bf16", "v32"}, {"bf16"}), "fa3": ({"bf16"}, {"bf16"}), "tilelang": ({"bf16"}, {"bf16"}),
            "trtllm": ({"bf16", "f576"}, {"bf16", "f576"}), "aiter": ({"bf16"}, {"bf16"}),
            "contiguous_bf16": ({"bf16", "v32"}, set()),
        }  # fmt: skip
        for name, formats in names.items():
            for field, reads in zip(("prefill_implementation", "decode_implementation"), formats):
                for row_format in everywhere:
                    config = {**Engine(row_format=row_format).config, "deterministic": False, field: name}
                    if row_format in reads:
                        fovea.DsaBackend(**config)
                        continue
                    with self.assertRaisesRegex(fovea.Error, f"{field} = '?{name}", msg=row_format):
                        fovea.DsaBackend(**config)
        self.refused(fovea.InvalidArgument, "prefill_implementation = 'fa4', expected auto", prefill_implementation="fa4")

    @rows(CONSTRUCTION, "class NativeSparseAttnBackend, its mixin and base", "__init__", "nsa_index_topk", "max_context_len",
          "num_q_heads", "speculative_num_draft_tokens", "attribute topk")  # fmt: skip
    @rows(CONSTRUCTION, "assertion: page_size is an int; real_page_size", "nsa_kv_cache_store_fp8, kv_cache_dtype, kv_cache_dim")
    @rows(CAPTURED, "max_bs, max_num_tokens")
    def test_numbers_of_the_model_runner(self):
        self.refused(fovea.InvalidArgument, 'page_size = "64", expected an integer', page_size="64")
        self.refused(fovea.InvalidArgument, "page_size = 257, expected 1..256", page_size=257)
        self.refused(fovea.InvalidArgument, "row_format = v4, expected bf16, v32 or f576", row_format="v4")
        self.refused(fovea.Unsupported, "draft_topk = 2, expected 1", draft_topk=2)
        for field in ("topk", "num_heads", "rows_per_request", "max_requests", "max_rows", "table_width"):
            self.refused(fovea.InvalidArgument, f"{field} = -1", **{field: -1})
        engine = Engine(max_requests=2, max_rows=8)
        for batch, text in ((("decode", [9, 4, 12]), r"seq_len.shape\[0\] = 3, expected 0..2"),
                            (("extend", [9, 4], [9, 4]), "num_rows = 13, expected 0..8")):  # fmt: skip
            with self.assertRaisesRegex(fovea.InvalidArgument, text):
                engine.init_forward_metadata(engine.batch(*batch))
        wider = Engine(pages=4, table_width=20)  # a verify near the limit of the context
        with self.assertRaisesRegex(fovea.InvalidArgument, r"req_to_token = i32 \[4, 16\], expected i32 \[any, 20\]"):
            wider.init_forward_metadata(wider.batch("decode", [3, 3, 3]))

    @rows(CONSTRUCTION, "qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim")
    def test_widths_are_refused_by_shape(self):
        engine = Engine()
        batch = engine.batch("decode", [9, 4, 12])
        engine.init_forward_metadata(batch)
        for name, width in (("q", 512), ("k", 640)):
            tensor = engine.inputs(batch)[name]
            wrong = np.zeros((*tensor.shape[:-1], width), tensor.dtype)
            with self.assertRaisesRegex(fovea.InvalidArgument, rf"{name} = bf16 \[.*{width}\].*expected.* {DIM}"):
                engine.forward(batch, **{name: wrong})

    @rows(CONSTRUCTION, "assertion: req_to_token_pool is there; req_to_token")
    def test_the_request_table_comes_with_the_step(self):
        engine = Engine()
        batch = engine.batch("decode", [9, 4, 12])
        with self.assertRaisesRegex(fovea.InvalidArgument, "req_to_token is missing"):
            engine.init_forward_metadata(batch, req_to_token=None)

    @rows(CONSTRUCTION, "num_splits (1 when deterministic, else 0)")
    def test_deterministic_rows_depend_on_their_request_alone(self):
        whole, cut = Engine(), Engine()
        lengths = [17, 11, 14]
        expected = whole.step(whole.batch("extend", lengths, lengths))
        ends = np.concatenate([[0], np.cumsum(lengths)])
        for request, length in enumerate(lengths):  # alone and in chunks of 4
            for start in range(0, length, 4):
                count = min(4, length - start)
                result = cut.step(cut.batch("extend", [start + count], [count], requests=[request]))
                for actual, reference in zip(result, expected):
                    self.assert_same(actual, reference[ends[request] + start : ends[request] + start + count])
        self.refused(fovea.Unsupported, "split_parts with deterministic", split_parts=4, deterministic=True)

    @rows(CONSTRUCTION, "forward_metadata")
    def test_the_step_of_the_last_begin_or_a_plan(self):
        engine = Engine()
        engine.fill()
        plan = engine.init_forward_metadata_capture_cuda_graph(3, "decode")
        first, second = engine.batch("decode", [9, 4, 12]), engine.batch("decode", [10, 5, 11])
        engine.init_forward_metadata_replay_cuda_graph(first)
        engine.init_forward_metadata(second)
        for batch, given in ((first, plan), (second, None)):
            self.assertEqual(arrays((given or engine.backend).metadata())["kv_len"].tolist(), batch.kv_len)
            out, lse, indices = engine.forward(batch, given, return_indices=True)
            self.assert_attention(engine, batch, (out, lse, indices))


class FieldsTest(StepCase):
    """The arrays of every mode, eager and in a plan, with rows of padding and without."""

    @classmethod
    def setUpClass(cls):
        cls.steps = []
        for parts in (0, 3):
            engine = Engine(split_parts=parts, deterministic=parts == 0)
            for name, entry in BATCHES.items():
                batch = engine.batch(*entry)
                for padded in (0, 2):
                    engine.init_forward_metadata(batch, padded=padded)
                    cls.add(name, engine.backend.metadata(), engine.metadata(batch, padded, parts=engine.parts))
                if name not in PREFILLS and batch.kv_len:
                    engine.init_forward_metadata_capture_cuda_graph(len(batch.kv_len), entry[0])
                    plan = engine.init_forward_metadata_replay_cuda_graph(batch)
                    expected = engine.metadata(batch, engine.unused_rows(batch), bound=True, parts=engine.parts)
                    cls.add(name, plan.metadata(), expected)

    @classmethod
    def add(cls, name, found, expected):
        cls.steps.append((name, {key: view.numpy().copy() for key, view in found.items()}, expected))

    def field(self, *names, modes=None):
        seen = 0
        for mode, found, expected in self.steps:
            if modes is not None and mode not in modes:
                continue
            with self.subTest(mode):
                self.assert_metadata(found, expected, names)
                seen += all(name in found for name in names)
        self.assertGreater(seen, 0)

    @rows("NSAMetadata", "class NSAMetadata")
    @rows(BUILDING, "init_forward_metadata", "get_device_int32_arange")
    @rows(CONSTRUCTION, "_arange_buf")
    def test_every_array_of_every_mode(self):
        self.field()

    @rows("NSAMetadata", "cache_seqlens_int32")
    @rows("NSAIndexerMetadata", "get_seqlens_int32")
    def test_kv_len(self):
        self.field("kv_len")

    @rows("NSAMetadata", "max_seq_len_q", "max_seq_len_k")
    def test_longest(self):
        self.field("max_q_len", "max_kv_len")

    @rows("NSAMetadata", "cu_seqlens_q")
    @rows(BUILDING, "branch: any prefix, DRAFT_EXTEND or CP: own query offsets; else those of the keys")
    def test_q_indptr_counts_rows_with_and_without_a_prefix(self):
        self.field("q_indptr")

    @rows("NSAMetadata", "cu_seqlens_k", "seq_lens_sum")
    @rows("NSAIndexerMetadata", "get_cu_seqlens_k")
    def test_kv_indptr_ends_with_the_sum(self):
        self.field("kv_indptr")

    @rows("NSAMetadata", "real_page_table", "page_size")
    @rows("NSAIndexerMetadata", "get_page_table_64")
    @rows(BUILDING, "_transform_table_1_to_real", "branch: V2 repeats by a scalar, v1 by lengths")
    def test_one_page_table_row_for_a_request_in_every_mode(self):
        self.field("page_table")

    @rows("NSAMetadata", "nsa_cache_seqlens_int32")
    @rows(BUILDING, "call of pad_nsa_cache_seqlens")
    @rows(CAPTURED, "assertion: clipped lengths and offsets are there")
    def test_topk_length(self):
        self.field("topk_length")

    @rows("NSAMetadata", "nsa_cu_seqlens_k")
    def test_topk_indptr(self):
        self.field("topk_indptr")

    @rows("NSAMetadata", "nsa_cu_seqlens_q", "nsa_max_seqlen_q")
    def test_every_row_is_a_query_of_its_own(self):
        for mode, found, _ in self.steps:
            row_axis = len(found["row_to_request"])
            self.assertEqual(found["topk_indptr"].shape, (row_axis + 1,), mode)

    @rows("NSAMetadata", "nsa_extend_seq_lens_list")
    @rows("NSAIndexerMetadata", "get_nsa_extend_len_cpu")
    @rows(CAPTURED, "rows listed as ones at capture")
    def test_ext_len(self):
        self.field("ext_len")

    @rows("NSAMetadata", "nsa_seqlens_expanded")
    @rows("NSAIndexerMetadata", "get_seqlens_expanded")
    def test_row_len(self):
        self.field("row_len")

    @rows("NSAMetadata", "token_to_batch_idx")
    @rows("NSAIndexerMetadata", "get_token_to_batch_idx")
    def test_row_to_request(self):
        self.field("row_to_request")

    @rows("NSAMetadata", "paged_mqa_schedule_metadata")
    @rows("NSAIndexerMetadata", "paged_mqa_schedule_metadata")
    @rows(BUILDING, "branch: schedule in decode, verify, v1 drafts; silently none without the package")
    @rows(CAPTURED, "branch: V2 by the same rule", "schedule assigned when absent", "schedule of the logits")
    def test_schedule_in_every_mode_but_prefills(self):
        self.field("schedule", modes=set(BATCHES) - set(PREFILLS))
        self.assertTrue(all("schedule" not in found for mode, found, _ in self.steps if mode in PREFILLS))

    @rows("NSAMetadata", "indexer_k_start_end")
    @rows("NSAIndexerMetadata", "get_indexer_kvcache_range")
    @rows(BUILDING, "_cal_indexer_k_start_end", "branch: not plain EXTEND: none")
    def test_k_start_and_k_end_of_prefills_alone(self):
        self.field("k_start", "k_end", modes=PREFILLS)
        self.assertTrue(all("k_start" not in found for mode, found, _ in self.steps if mode not in PREFILLS))

    @rows("NSAMetadata", "flashmla_metadata")
    @rows("NSAFlashMLAMetadata", "class NSAFlashMLAMetadata", "flashmla_metadata", "num_splits", "slice")
    @rows(BUILDING, "branch: split plan with flashmla_kv")
    @rows(CAPTURED, "branch: split plan")
    @rows("Dispatch", "_compute_flashmla_metadata")
    def test_split_plan_with_split_parts(self):
        with_plan = [step for step in self.steps if "split_schedule" in step[1]]
        self.assertEqual({step[0] for step in with_plan}, set(BATCHES) if DEVICE == "cpu" else set())
        for mode, found, expected in with_plan:
            with self.subTest(mode):
                self.assert_metadata(found, expected, ("split_schedule", "split_indptr"))
                self.assertEqual(found["split_schedule"].shape, (3, 8))


class BuildingTest(StepCase):
    def begin(self, engine, name, **options):
        batch = engine.batch(*BATCHES[name])
        engine.init_forward_metadata(batch, **options)
        return batch

    @rows(BUILDING, "branch: verify adds N to the lengths", "branch: TARGET_VERIFY", "branch: verify inside it")
    def test_verify_alone_adds_its_rows_and_leaves_the_batch_alone(self):
        engine = Engine()
        batch = engine.batch("target_verify", [9, 7, 12])
        arguments = engine.arguments(batch)
        before = {name: np.array(value) for name, value in arguments.items() if value is not None}
        engine.backend.begin_step(**arguments)
        self.assertEqual(arrays(engine.backend.metadata())["kv_len"].tolist(), (batch.seq_lens + 3).tolist())
        for name, value in before.items():
            self.assert_same(np.array(arguments[name]), value)
        for mode in ("draft_extend", "draft_extend_v2"):
            batch = self.begin(engine, mode)
            self.assertEqual(arrays(engine.backend.metadata())["kv_len"].tolist(), batch.seq_lens.tolist())

    @rows(BUILDING, "assertion: seq_lens_cpu is there", "assertions: both host lists, each length an int")
    @rows(CAPTURED, "assertion: seq_lens_cpu")
    @rows("NSAMetadata", "indexer_seq_lens_cpu")
    @rows("NSAIndexerMetadata", "get_indexer_seq_len_cpu")
    def test_host_lengths_are_optional_and_change_no_array(self):
        engine = Engine()
        for name in BATCHES:
            batch = self.begin(engine, name, host=False)
            self.assert_metadata(arrays(engine.backend.metadata()), engine.metadata(batch))

    @rows(BUILDING, "branch: EXTEND, assertion of three host lists", "branch: DRAFT_EXTEND and V2, assertion of three host lists")
    def test_lengths_that_a_mode_needs(self):
        engine = Engine()
        for name in ("extend", "mixed", "draft_extend"):
            with self.assertRaisesRegex(fovea.InvalidArgument, r"ext_len is missing, expected i32 \[3\]"):
                self.begin(engine, name, ext_len=None)
            with self.assertRaisesRegex(fovea.InvalidArgument, "host_ext_len has 0 entries, expected 3"):  # both or none
                self.begin(engine, name, host_ext_len=None)
        self.begin(engine, "draft_extend_v2", ext_len=None)
        for changes, text in (({"host_seq_len": [9, 2, 12]}, "request 1: host_seq_len = 2, expected at least its 4"),
                              ({"host_ext_len": [3, 4, 2]}, "host_ext_len sums to 9, expected num_rows = 8"),
                              ({"host_seq_len": [9, 4, 99]}, "request 2: host_seq_len = 99, expected at most"),
                              ({"host_seq_len": [9, 4]}, "host_seq_len has 2 entries, expected 3")):  # fmt: skip
            with self.assertRaisesRegex(fovea.InvalidArgument, text):
                self.begin(engine, "extend", **changes)

    @rows(BUILDING, "maximum over the host lengths", "branch: empty batch or empty selection")
    def test_no_requests(self):
        engine = Engine()
        for mode in ("idle", "decode", "extend", "target_verify", "draft_extend_v2"):
            batch = engine.batch(mode, [], [])
            out, lse, indices = engine.step(batch)
            self.assertEqual((out.shape, lse.shape, indices.shape), ((0, 2, 512), (0, 2), (0, 6)))
            for name in ("kv_indptr", "q_indptr", "topk_indptr"):
                self.assertEqual(arrays(engine.backend.metadata())[name].tolist(), [0])
        padded = engine.batch("idle", [], [])
        engine.init_forward_metadata(padded, padded=2)
        out, lse = engine.forward(padded, padded=2)
        self.assertTrue((out == 0).all() and (lse == -np.inf).all())

    @rows(BUILDING, "table columns up to the longest request for every row",
          "branch and assertion: largest slot below the capacity when Σ L exceeds it")  # fmt: skip
    def test_a_table_is_read_up_to_each_length_and_faults_are_reported(self):
        engine = Engine(check=True, cache_slots=64)
        engine.fill()
        batch = engine.batch("decode", [9, 4, 12])
        expected = engine.step(batch)
        for row, length in zip(batch.req_pool_indices, batch.kv_len):
            engine.req_to_token[row, length:] = 10**9
        for actual, reference in zip(engine.step(batch), expected):
            self.assert_same(actual, reference)
        self.assertEqual(engine.backend.report(), "")
        engine.req_to_token[2, 2] = 10**6
        engine.init_forward_metadata(batch)
        for word in ("request 1", "position 2", "1000000", "64"):
            self.assertIn(word, engine.backend.report())

    @rows(BUILDING, "branch: DECODE or IDLE")
    def test_row_len_of_decode_is_kv_len(self):
        engine = Engine()
        self.begin(engine, "decode")
        found = engine.backend.metadata()
        addresses = [found[name].__array_interface__["data"][0] for name in ("row_len", "kv_len")]
        self.assertEqual(*addresses)

    @rows(BUILDING, "branch: RAGGED: offsets", "branch: prefix sharing and RAGGED or dense: flattened table",
          "assertion: its length is Σ L")  # fmt: skip
    @rows("NSAMetadata", "topk_indices_offset")
    def test_offsets_of_a_ragged_step(self):
        engine = Engine(prefill_implementation="contiguous_bf16", deterministic=False, mha_chunk_capacity=25)
        for name in ("extend", "mixed", "extend_without_prefix"):
            batch = self.begin(engine, name)
            self.assert_metadata(arrays(engine.backend.metadata()), engine.metadata(batch, transform="ragged"))
            self.assertEqual(len(arrays(engine.backend.metadata())["row_offset"]), len(batch.row_len))
        engine.init_forward_metadata(engine.batch("extend", [9, 5, 12], [3, 4, 1]))  # 26 tokens: one more than fit
        self.assertEqual(engine.backend.dispatch()["transform"], "paged")
        self.assertNotIn("row_offset", engine.backend.metadata())

    @rows(BUILDING, "assertion: unknown mode")
    @rows(CAPTURED, "other modes: names without a value")
    def test_modes_are_named_in_errors(self):
        engine = Engine()
        with self.assertRaisesRegex(fovea.InvalidArgument, 'mode = "prefill", expected one of extend, decode'):
            self.begin(engine, "decode", mode="prefill")
        for mode in ("extend", "mixed"):
            with self.assertRaisesRegex(fovea.InvalidArgument, f"bucket.mode = {mode}, expected a decode, verify or draft"):
                engine.backend.make_step_plan(mode, 2)

    @rows(BUILDING, "block size 64 in the schedule")
    def test_segments_of_256_tokens(self):
        engine = Engine(requests=2, pages=10, page_size=64)
        batch = engine.batch("decode", [600, 200])  # three segments and one
        engine.init_forward_metadata(batch)
        schedule = arrays(engine.backend.metadata())["schedule"].tolist()
        self.assertEqual(schedule[-5:], [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0]])

    @rows(BUILDING, "branch: round-robin context parallelism", "branch: no selected request",
          "branch: offsets advance over selected requests only", "number of an unselected request left in the map",
          "assertion: a split was legal")  # fmt: skip
    def test_ranks_of_a_context_split(self):
        lengths, counts, ranks = [9, 4, 12], [2, 1, 1], 5
        whole = Engine()
        whole.step(whole.batch("extend", [7, 3, 11], [7, 3, 11]))
        batch = whole.batch("extend", lengths, counts)
        start = whole.kv_pool.copy(), whole.index_pool.copy()
        expected = whole.step(batch)
        engine = Engine(context_parallel=True)
        inputs, everything = engine.inputs(batch), ("k", "index_k")
        for rank in range(ranks):
            engine.kv_pool[:], engine.index_pool[:] = start
            mine = np.arange(len(batch.row_len))[rank::ranks]
            options = {"positions": batch.positions[mine], "num_rows": len(mine), "store_positions": batch.positions}
            engine.init_forward_metadata(batch, context_split=fovea.ContextSplit(ranks, rank), **options)
            result = engine.forward(batch, return_indices=True, **{
                name: values if name in everything else values[mine] for name, values in inputs.items()})  # fmt: skip
            for actual, reference in zip(result, expected):
                self.assert_same(actual, reference[mine])
            self.assert_same(engine.kv_pool, whole.kv_pool)
            # The arrays are those of the requests with a row on the rank, numbered within them.
            selected = sorted(set(batch.owner[mine]))
            ends = np.concatenate([[0], np.cumsum([lengths[request] for request in selected])])
            found = arrays(engine.backend.metadata())
            self.assertEqual(found["kv_indptr"].tolist(), ends.tolist())
            numbers = [selected.index(request) for request in batch.owner[mine]]
            self.assertEqual(found["row_to_request"].tolist(), numbers)
            self.assertEqual(found["k_start"].tolist(), ends[numbers].tolist() if numbers else [])
            self.assertEqual(found["k_end"].tolist(), (ends[numbers] + batch.row_len[mine]).tolist() if numbers else [])
        for split, text in (((2, 2), "rank = 2, expected 0..1"), ((0, 0), "ranks = 0"), ((2, 0, "striped"), 'scheme = "striped"')):
            with self.assertRaisesRegex(fovea.InvalidArgument, text):
                engine.init_forward_metadata(batch, context_split=fovea.ContextSplit(*split))
        with self.assertRaisesRegex(fovea.Unsupported, "context_split in mode decode"):
            decode = engine.batch("decode", lengths)
            options = {"store_positions": decode.positions, "host_ext_len": [1, 1, 1]}
            engine.init_forward_metadata(decode, context_split=fovea.ContextSplit(2, 0), **options)

    @rows("NSAMetadata", "page_table_1")
    @rows("NSAIndexerMetadata", "get_page_table_1")
    def test_a_table_of_slots_on_request(self):
        engine = Engine()
        batch = engine.batch("target_verify", [9, 7, 12])
        arguments = engine.req_to_token, batch.req_pool_indices, i32(batch.kv_len), 1
        for table, counts in ((fovea.build_page_table(*arguments), [1, 1, 1]),
                              (fovea.build_page_table(arguments[0], np.repeat(arguments[1], 3), np.repeat(arguments[2], 3), 1),
                               batch.counts)):  # fmt: skip
            requests = np.repeat(np.arange(3), counts)
            for line, request in zip(table, requests):
                length = batch.kv_len[request]
                self.assertEqual(line[:length].tolist(), engine.req_to_token[1 + request, :length].tolist())
