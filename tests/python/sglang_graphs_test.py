"""fovea.DsaBackend in the place of an engine's backend: captured steps and chains of drafts. Every test names the rows of
docs/compat/sglang-dsa.md that it sees. Nothing is captured on a CPU: a replay is begin_step and forward in the same plan.
"""

import unittest

import numpy as np

import fovea
from calls import i32
from engine import Engine, rows
from sglang_steps_test import CAPTURED, CONSTRUCTION, MULTI, StepCase, arrays

LENGTHS = {"decode": [9, 4, 12], "target_verify": [9, 5, 12], "draft_extend": [9, 4, 12], "draft_extend_v2": [9, 5, 12]}


def addresses(metadata):
    return {name: view.__array_interface__["data"][0] for name, view in metadata.items()}


def grown(lengths, by):
    return [length + step for length, step in zip(lengths, by)]


class GraphCase(StepCase):
    def captured(self, modes=LENGTHS, bs=3, **options):
        engine = Engine(**options)
        engine.fill()
        engine.init_cuda_graph_state(max_bs=3, max_num_tokens=9)
        for mode in modes:
            engine.init_forward_metadata_capture_cuda_graph(bs, mode)
        return engine

    def replay(self, engine, batch):
        """Begins the batch in its plan and compares arrays and results with the formulas and an eager step."""
        plan = engine.init_forward_metadata_replay_cuda_graph(batch)
        tail = engine.unused_rows(batch)
        self.assert_metadata(arrays(plan.metadata()), engine.metadata(batch, tail, bound=True, parts=engine.parts))
        result = engine.forward(batch, plan, padded=tail, return_indices=True)
        self.assert_attention(engine, batch, result)
        engine.init_forward_metadata(batch)
        for actual, expected in zip(result, engine.forward(batch, return_indices=True)):
            live = len(batch.row_len)
            self.assert_same(actual[:live], expected)
            self.assertTrue(np.isin(actual[live:].astype(np.float64), (0, -1, -np.inf)).all())
        return result


class CapturedTest(GraphCase):
    @rows(CAPTURED, "init_cuda_graph_state", "init_forward_metadata_capture_cuda_graph",
          "init_forward_metadata_replay_cuda_graph", "branch: DECODE", "branch: DECODE; query offsets constant",
          "branch: TARGET_VERIFY", "branch: verify and drafts: N added to the lengths of drafts too",
          "its encoder_lens, num_tokens")  # fmt: skip
    def test_replays_with_changing_lengths(self):
        engine = self.captured()
        for shift in ([0, 0, 0], [1, 3, 2], [5, 9, 0], [0, 1, 0]):  # longer, then shorter again
            for mode, lengths in LENGTHS.items():
                with self.subTest(mode, shift=shift):
                    counts = {"draft_extend": [2, 1, 3]}.get(mode)
                    self.replay(engine, engine.batch(mode, grown(lengths, shift), counts))

    @rows(CAPTURED, "branch: DRAFT_EXTEND with accept_length; spec_info")
    def test_accepted_lengths_of_a_draft_extend(self):
        engine = self.captured(["draft_extend"])
        for accepted in ([3, 3, 3], [1, 1, 1], [2, 0, 3], [0, 0, 0]):  # nothing of the first one stays
            with self.subTest(accepted=accepted):
                self.replay(engine, engine.batch("draft_extend", LENGTHS["draft_extend"], accepted))

    @rows(CAPTURED, "decode_cuda_graph_metadata, keyed by batch size alone")
    def test_plans_of_equal_size_share_no_memory(self):
        engine = self.captured()
        batches = {mode: engine.batch(mode, lengths, {"draft_extend": [2, 1, 3]}.get(mode)) for mode, lengths in LENGTHS.items()}
        spans = []
        for mode, batch in batches.items():
            plan = engine.init_forward_metadata_replay_cuda_graph(batch)
            for view in plan.metadata().values():
                start = view.__array_interface__["data"][0]
                spans.append((mode, start, start + view.numpy().nbytes))
        for mode, start, end in spans:
            self.assertTrue(all(end <= other[1] or start >= other[2] for other in spans if other[0] != mode))
        for mode, batch in batches.items():  # all of them are still there
            found = arrays(engine.plans[mode, 3].metadata())
            self.assert_metadata(found, engine.metadata(batch, engine.unused_rows(batch), bound=True))

    @rows(CAPTURED, "its cache_seqlens, cu_seqlens_q, cu_seqlens_k, page_table, flashmla_metadata", "get_cuda_graph_seq_len_fill_value")
    def test_a_new_plan_holds_padded_requests_and_stores_nothing(self):
        engine = self.captured()
        before = engine.kv_pool.copy()
        for (mode, bs), plan in engine.plans.items():
            with self.subTest(mode):
                found = arrays(plan.metadata())
                count = 3 if mode == "target_verify" else 0
                self.assertEqual(found["kv_len"].tolist(), [1 + count] * bs)
                self.assertTrue((found["page_table"][:, 0] == 0).all())
                live = engine.batch("decode", [1] * bs) if mode == "decode" else engine.batch("draft_extend_v2", [3] * bs)
                engine.forward(live, plan)
                self.assert_same(engine.kv_pool, before)

    @rows(CAPTURED, "slices to the batch size")
    def test_a_smaller_batch_is_filled_up_with_padded_requests(self):
        engine = self.captured(["decode"])
        pair = engine.batch("decode", [9, 4])
        alone = engine.step(pair)
        before = engine.kv_pool.copy()
        filled = engine.arguments(pair, host=False)
        for name, value in (("seq_len", 1), ("pool_row", 0), ("positions", 0), ("out_cache_loc", -1)):
            filled[name] = np.append(filled[name], np.int32(value))
        plan = engine.plans["decode", 3]
        engine.backend.begin_step(**filled, plan=plan)
        inputs = {name: np.concatenate([values, values[:1]]) for name, values in engine.inputs(pair).items()}
        for actual, expected in zip(engine.forward(pair, plan, return_indices=True, **inputs), alone):
            self.assert_same(actual[:2], expected)
        self.assert_same(engine.kv_pool, before)
        with self.assertRaisesRegex(fovea.InvalidArgument, r"seq_len.shape\[0\] = 2, expected num_requests = 3"):
            engine.backend.begin_step(**engine.arguments(pair), plan=plan)

    @rows("Module", "_USE_FUSED_METADATA_COPY")
    @rows("NSAFlashMLAMetadata", "copy_")
    @rows("Environment switches", "SGLANG_USE_FUSED_METADATA_COPY")
    @rows(CAPTURED, "branch: split plan", "optional parts present in one side only")
    def test_every_array_stays_where_it_is(self):
        engine = self.captured(split_parts=3, deterministic=False)
        for mode, lengths in LENGTHS.items():
            plan, counts = engine.plans[mode, 3], {"draft_extend": [2, 1, 3]}.get(mode)
            start = addresses(plan.metadata())
            for shift in ([1, 3, 2], [0, 1, 0]):
                self.replay(engine, engine.batch(mode, grown(lengths, shift), counts))
                self.assertEqual(addresses(plan.metadata()), start, mode)
            self.assertEqual("split_schedule" in start, engine.parts > 0)
            self.assertIn("schedule", start)

    @rows(CAPTURED, "assertion: page sizes agree; branch on 1, where both tables must be one")
    def test_pages_of_one_token(self):
        for page_size, pages in ((1, 20), (5, 4), (64, 1)):
            engine = self.captured(page_size=page_size, pages=pages)
            for mode, lengths in LENGTHS.items():
                self.replay(engine, engine.batch(mode, lengths, {"draft_extend": [2, 1, 3]}.get(mode)))

    @rows(CAPTURED, "seq_lens_sum, out_cache_loc of the replay")
    def test_out_cache_loc_says_where_a_replay_stores(self):
        engine = self.captured(["decode"])
        batch = engine.batch("decode", [14, 14, 14])  # positions that hold nothing yet
        self.assertTrue((engine.cache()[batch.out_cache_loc] == 0).all())
        self.replay(engine, batch)
        self.assert_close(engine.cache()[batch.out_cache_loc], engine.inputs(batch)["k"], 0.1)
        self.assertEqual(engine.kv_pool.reshape(-1, 656).any(-1).sum(), 3 * (13 + 1))

    @rows("Module", "_VERIFY_FUSED_METADATA_COPY")
    @rows("Environment switches", "SGLANG_VERIFY_FUSED_METADATA_COPY")
    @rows(CAPTURED, "branch: verification after the copy", "handlers: import error, any error: print and copy singly")
    @rows(MULTI, "branch: verification of the multi copy; handlers: print and loop")
    def test_a_wrong_refresh_is_an_error_and_nothing_else(self):
        engine = self.captured(verify_metadata=True)
        for mode, lengths in LENGTHS.items():
            self.replay(engine, engine.batch(mode, lengths, {"draft_extend": [2, 1, 3]}.get(mode)))
        batch, plan = engine.batch("target_verify", LENGTHS["target_verify"]), engine.plans["target_verify", 3]
        engine.init_forward_metadata_replay_cuda_graph(batch)
        # Lengths that are the array of the plan: the refresh adds N to its own input.
        with self.assertRaisesRegex(fovea.Mismatch, r"metadata_refresh: step 0: kv_len\[0\] = 12, expected 15"):
            engine.init_forward_metadata_replay_cuda_graph(batch, seq_len=plan.metadata()["kv_len"])
        self.assertEqual(fovea.Mismatch.code, "mismatch")
        self.replay(engine, batch)


class DraftsTest(GraphCase):
    """A draft model in a chain: step j drafts the token after position seq_len + j."""

    COMMITTED = [7, 3, 10]

    def chain(self, engine, steps, committed=COMMITTED, deltas=None, plans=None):
        """One batch per step, and the DraftSteps."""
        batches = [engine.batch("decode", grown(committed, [1 + j] * 3)) for j in range(steps)]
        plans = plans or [engine.backend.make_step_plan("decode", 3) for _ in range(steps)]
        deltas = deltas or [None] * steps
        return batches, [fovea.DraftStep(plan, batch.positions, batch.out_cache_loc, delta)
                         for plan, batch, delta in zip(plans, batches, deltas)]  # fmt: skip

    def begin(self, engine, chain, committed=COMMITTED):
        engine.backend.begin_draft_steps(i32(committed), i32([1, 2, 3]), engine.req_to_token, chain)

    @rows(MULTI, "class NativeSparseAttnMultiStepBackend", "__init__", "init_forward_metadata", "init_cuda_graph_state",
          "init_forward_metadata_capture_cuda_graph, rows = bs · topk", "init_forward_metadata_replay_cuda_graph",
          "branch: SGLANG_NSA_ENABLE_MTP_PRECOMPUTE_METADATA; else each step alone",
          "branch: more than three steps: copy into exactly three at once, then singly")  # fmt: skip
    @rows(CAPTURED, "init_forward_metadata_replay_cuda_graph_from_precomputed",
          "branch: fused copy; mode numbers 0, 1, 2; error for another mode", "branch: single copies by mode")  # fmt: skip
    @rows("Environment switches", "SGLANG_NSA_ENABLE_MTP_PRECOMPUTE_METADATA")
    def test_all_steps_of_a_chain_are_those_of_single_steps(self):
        for speculative_num_steps in (1, 2, 3, 4, 5, 9):  # S - 1 plans
            with self.subTest(speculative_num_steps):
                engine = Engine(split_parts=2, deterministic=False)
                engine.fill()
                batches, chain = self.chain(engine, speculative_num_steps - 1)
                for committed in (self.COMMITTED, grown(self.COMMITTED, [2, 1, 0])):
                    batches, chain = self.chain(engine, len(chain), committed, plans=[step.plan for step in chain])
                    self.begin(engine, chain, committed)
                    for step, batch in zip(chain, batches):
                        self.assert_metadata(arrays(step.plan.metadata()), engine.metadata(batch, parts=engine.parts))
                    results = [engine.forward(batch, step.plan, return_indices=True) for step, batch in zip(chain, batches)]
                    for batch, result in zip(batches, results):
                        self.assert_attention(engine, batch, result)
        with self.assertRaisesRegex(fovea.InvalidArgument, "draft steps = 9, expected 0..8"):
            self.begin(engine, self.chain(engine, 9)[1])

    @rows(MULTI, "one length for every step")
    def test_lengths_of_the_steps(self):
        engine = Engine()
        for deltas, expected in (([None] * 3, [1, 2, 3]), ([0, 0, 0], [0, 0, 0]), ([2, None, 5], [2, 2, 5])):
            _, chain = self.chain(engine, 3, deltas=deltas)
            self.begin(engine, chain)
            for step, delta in zip(chain, expected):
                found = arrays(step.plan.metadata())["kv_len"].tolist()
                self.assertEqual(found, grown(self.COMMITTED, [delta] * 3))

    @rows(MULTI, "attn_backends, model_runner, topk, speculative_num_steps")
    @rows(CONSTRUCTION, "attribute topk")
    def test_a_chain_needs_plans_of_its_own_and_is_no_tree(self):
        engine = Engine()
        _, chain = self.chain(engine, 2)
        with self.assertRaisesRegex(fovea.InvalidArgument, "draft steps 0 and 1 name one plan"):
            self.begin(engine, [chain[0], chain[0]])
        with self.assertRaisesRegex(fovea.InvalidArgument, "belongs to another backend"):
            kda = fovea.KdaBackend(num_heads=1, num_value_heads=1, max_requests=3, max_rows=3)
            self.begin(engine, [chain[0]._replace(plan=kda.make_step_plan("decode", 3))])
        with self.assertRaisesRegex(fovea.InvalidArgument, "mode = decode, expected that of the plan's bucket, draft_extend_v2"):
            self.begin(engine, [chain[0]._replace(plan=engine.backend.make_step_plan("draft_extend_v2", 3, 3))])
        with self.assertRaisesRegex(fovea.Unsupported, "draft_topk = 4, expected 1"):
            Engine(draft_topk=4)


if __name__ == "__main__":
    unittest.main()
