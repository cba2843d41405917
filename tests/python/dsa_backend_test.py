"""fovea.DsaBackend: steps equal the operators one by one; a refused or failed step leaves pools as they were."""

import gc
import unittest

import numpy as np

import fovea
from calls import cos_sin
from support import BF16, Batch, Case, bf16, i32, run_threads


class DsaTest(Case):
    HEADS, INDEX_HEADS, TOPK, PAGE, ROPE = 2, 2, 4, 4, 64

    def setUp(self):
        self.rng = np.random.default_rng(1)
        self.batch = Batch(self.rng, 2, 4, self.PAGE)
        self.backend = fovea.DsaBackend(
            num_heads=self.HEADS, index_heads=self.INDEX_HEADS, topk=self.TOPK, page_size=self.PAGE, max_requests=2,
            max_rows=16, table_width=16, rows_per_request=2,
        )  # fmt: skip
        self.pools = [fovea.KvPool(num_pages=self.batch.num_pages, page_size=self.PAGE, row_format=row_format, width=width)
                      for row_format, width in (("v32", 576), ("i132", 128))]  # fmt: skip
        self.kv_pool, self.index_pool = (pool.layer() for pool in self.pools)
        self.layer = {
            "norm_weight": np.ones(128, np.float32),
            "norm_bias": np.zeros(128, np.float32),
            "cos_sin": cos_sin(self.ROPE, 32),
        }

    def rows(self, count):
        return {
            "q": bf16(self.rng, count, self.HEADS, 576),
            "k": bf16(self.rng, count, 576),
            "index_q": bf16(self.rng, count, self.INDEX_HEADS, 128),
            "index_k": bf16(self.rng, count, 128),
            "head_gate": self.rng.standard_normal((count, self.INDEX_HEADS)).astype(np.float32),
        }

    def forward(self, rows, **keywords):
        return self.backend.forward(self.kv_pool, self.index_pool, 0.1, **rows, **self.layer, **keywords)

    def composed(self, step, rows, counts, kv_pool, index_pool):
        """The operators one by one on pools of numpy."""
        quantised = fovea.index_quantize(
            rows["index_q"], rows["index_k"], self.layer["norm_weight"], self.layer["norm_bias"], rows["head_gate"],
            step["positions"], self.layer["cos_sin"], "half_split", "fp32", hadamard=True,
        )  # fmt: skip
        fovea.pack_rows(rows["k"], step["out_cache_loc"], kv_pool, "v32", page_size=self.PAGE)
        fovea.index_store(quantised.k_fp8, quantised.k_scale, step["out_cache_loc"], index_pool, self.PAGE)
        indices = fovea.index_select(
            quantised.q_fp8, quantised.head_weight, "paged", self.TOPK, index_pool=index_pool, transform="paged",
            page_table=self.batch.page_table(), row_to_request=self.batch.row_to_request(counts),
            row_len=step["positions"] + 1, page_size=self.PAGE,
        )  # fmt: skip
        out, lse = fovea.sparse_mla(rows["q"], kv_pool, indices, 0.1, row_format="v32", page_size=self.PAGE)
        return out, lse, indices

    def test_prefill_decode_and_verify_equal_the_operators(self):
        kv_pool, index_pool = np.zeros_like(self.kv_pool.numpy()), np.zeros_like(self.index_pool.numpy())
        plan = self.backend.make_step_plan("target_verify", 2, 2)
        steps = [("extend", [0, 0], [5, 6], None), ("extend", [5, 6], [3, 1], None), ("decode", [8, 7], [1, 1], None),
                 ("target_verify", [9, 8], [2, 2], plan), ("decode", [10, 9], [1, 1], None)]  # fmt: skip
        for mode, lengths, counts, in_plan in steps:
            with self.subTest(mode=mode, lengths=lengths):
                step = self.batch.step(mode, lengths, counts, includes_rows=mode != "target_verify")
                rows = self.rows(sum(counts))
                self.backend.begin_step(**step, plan=in_plan)
                actual = self.forward(rows, plan=in_plan, return_indices=True)
                expected = self.composed(step, rows, counts, kv_pool, index_pool)
                self.assert_same(actual[2], expected[2])
                self.assert_close(actual[0], expected[0], 1e-2)
                self.assert_close(actual[1], expected[1], 1e-3)
                self.assert_same(self.kv_pool.numpy(), kv_pool)
                self.assert_same(self.index_pool.numpy(), index_pool)
        self.assertEqual(plan.metadata()["kv_len"].numpy().tolist(), [11, 10])
        self.assertEqual(self.backend.metadata()["kv_len"].numpy().tolist(), [11, 10])

    def test_parts_given_selections_and_rows_that_are_there(self):
        rows, step = self.rows(11), self.batch.step("extend", [0, 0], [5, 6])
        self.backend.begin_step(**step)
        out, lse, indices = self.forward(rows, return_indices=True)
        parts = {name: value for name, value in rows.items() if name not in ("q", "k")}
        parts["q_nope"], parts["q_rope"] = rows["q"][..., :512], rows["q"][..., 512:]
        parts["k_latent"], parts["k_rope"] = rows["k"][:, :512], rows["k"][:, 512:]
        for pool in (self.kv_pool, self.index_pool):
            pool.numpy()[:] = 0
        self.assert_same(self.forward(parts)[0], out)
        before = self.kv_pool.numpy().copy()
        given = self.backend.forward(self.kv_pool, self.index_pool, 0.1, q=rows["q"], topk_indices=indices)
        self.assert_same(given[0], out)
        self.assert_same(given[1], lse)
        self.forward({**rows, "k": -rows["k"], "index_k": -rows["index_k"]}, save_kv=False)
        self.assert_same(self.kv_pool.numpy(), before)
        positions = fovea.DsaBackend(num_heads=self.HEADS, index_heads=self.INDEX_HEADS, topk=self.TOPK, page_size=self.PAGE,
                                     max_requests=2, max_rows=16, table_width=16, fuse_transform=False)  # fmt: skip
        positions.begin_step(**step)
        local = positions.forward(self.kv_pool, self.index_pool, 0.1, **rows, **self.layer, return_indices=True)
        self.assert_same(local[0], out)
        table = self.batch.req_to_token[1 + self.batch.row_to_request([5, 6])]
        slots = np.where(local[2] < 0, -1, np.take_along_axis(table, np.maximum(local[2], 0), 1))
        self.assert_same(slots.astype(np.int32), indices)

    def test_rope_of_an_f576_cache_is_that_of_the_operator(self):
        backend = fovea.DsaBackend(num_heads=1, index_heads=2, topk=16, page_size=4, max_requests=1, max_rows=8,
                                   table_width=16, row_format="f576", fuse_rope=True, rope_style="half_split")  # fmt: skip
        batch, table = Batch(self.rng, 1, 4, 4), cos_sin(64, 32)
        step = batch.step("extend", [0], [5])
        backend.begin_step(**step)
        shapes = {"q_nope": (5, 1, 512), "q_rope": (5, 1, 64), "k_nope": (5, 512), "k_rope": (5, 64)}
        parts = {name: bf16(self.rng, *shape) for name, shape in shapes.items()}
        pools = np.zeros((batch.num_pages, 4 * 576), np.uint8), np.zeros((batch.num_pages, 4 * 132), np.uint8)
        inputs = {"q_nope": parts["q_nope"], "q_rope": parts["q_rope"], "k_latent": parts["k_nope"], "k_rope": parts["k_rope"]}
        index = {"index_q": bf16(self.rng, 5, 2, 128), "index_k": bf16(self.rng, 5, 128),
                 "head_gate": np.ones((5, 2), np.float32)}  # fmt: skip
        out, _ = backend.forward(*pools, 0.1, **inputs, **index, **self.layer, mla_cos_sin=table, q_scale=0.5, k_scale=0.25)
        q, k = fovea.mla_rope_quantize(step["positions"], table, "half_split", **parts, q_scale=0.5, k_scale=0.25)
        stored = pools[0].reshape(-1, 576)[step["out_cache_loc"]]
        self.assert_same(stored, k)
        expected = fovea.dense_mla(
            q, pools[0], batch.page_table(), i32([5]), i32([0, 5]), 0.1, row_format="f576", page_size=4, q_scale=0.5,
            k_scale=0.25,
        )  # fmt: skip
        self.assert_close(out, expected[0], 1e-2)

    def test_a_chain_of_drafts(self):
        rows = self.rows(8)
        self.backend.begin_step(**self.batch.step("extend", [0, 0], [3, 5], True))
        self.forward(rows)
        plans = [self.backend.make_step_plan("decode", 2) for _ in range(2)]
        steps = [self.batch.step("decode", [3 + j, 5 + j], [1, 1]) for j in range(2)]
        chain = [fovea.DraftStep(plan, step["positions"], step["out_cache_loc"]) for plan, step in zip(plans, steps)]
        self.backend.begin_draft_steps(i32([3, 5]), self.batch.pool_row, self.batch.req_to_token, chain)
        drafted = [self.rows(2) for _ in chain]
        results = [self.forward(part, plan=plan) for part, plan in zip(drafted, plans)]
        before = self.kv_pool.numpy().copy()
        for step, part, result in zip(steps, drafted, results):
            self.backend.begin_step(**step)
            for actual, expected in zip(self.forward(part), result):
                self.assert_same(actual, expected)
        self.assert_same(self.kv_pool.numpy(), before)
        with self.assertRaisesRegex(fovea.InvalidArgument, "plan"):
            self.backend.begin_draft_steps(i32([3, 5]), self.batch.pool_row, self.batch.req_to_token, [chain[0]] * 2)

    def test_one_shot_and_dispatch(self):
        backend = fovea.DsaBackend(num_heads=1, max_requests=1, max_rows=4, table_width=16, page_size=4, deterministic=False,
                                   topk=8)  # fmt: skip
        batch = Batch(self.rng, 1, 4, 4)
        backend.begin_step(**batch.step("extend", [0], [3]), mha_inputs=True)
        self.assertEqual(backend.dispatch()["kernel"], "one_shot_mha")
        self.assertTrue(all(isinstance(reason, str) for reason in backend.dispatch()["reasons"]))
        q, k, v = (bf16(self.rng, 3, 1, width) for width in (192, 192, 128))
        layer = {**self.layer, "index_k": bf16(self.rng, 3, 128), "k": bf16(self.rng, 3, 576)}
        pools = np.zeros((5, 4 * 656), np.uint8), np.zeros((5, 4 * 132), np.uint8)
        out, lse = backend.forward(*pools, 0.1, q_mha=q, k_mha=k, v_mha=v, **layer)
        expected = fovea.mha_varlen(q, k, v, i32([0, 3]), i32([0, 3]), 0.1)
        self.assert_close(out, expected[0], 1e-2)
        self.assert_close(lse, expected[1], 1e-3)

    def test_two_ranks_of_context_parallelism_are_the_whole(self):
        config = {"num_heads": 1, "index_heads": 2, "max_requests": 2, "max_rows": 16, "table_width": 16, "page_size": 4,
                  "topk": 4}  # fmt: skip
        batch = Batch(self.rng, 2, 4, 4)
        step, rows = batch.step("extend", [0, 0], [5, 4]), self.rows(9)
        rows["q"] = rows["q"][:, :1]

        def run(backend, chosen, **begin):
            pools = [np.zeros((batch.num_pages, 4 * size), np.uint8) for size in (656, 132)]
            backend.begin_step(**{**step, "positions": step["positions"][chosen], **begin})
            own = {name: np.ascontiguousarray(value[chosen]) for name, value in rows.items() if name in ("q", "index_q", "head_gate")}
            every = {name: rows[name] for name in ("k", "index_k")}
            return backend.forward(*pools, 0.1, **own, **every, **self.layer)[0], pools

        whole, pools = run(fovea.DsaBackend(**config), slice(None))
        backend = fovea.DsaBackend(**config, context_parallel=True)
        for rank in range(2):
            chosen = fovea.context_split(step["seq_len"], step["ext_len"], 2, rank, "round_robin")["rank_rows"]
            split = fovea.ContextSplit(2, rank)
            out, own_pools = run(backend, chosen, context_split=split, store_positions=step["positions"], num_rows=len(chosen))
            self.assert_same(out, whole[chosen])
            self.assert_same(own_pools[0], pools[0])

    def test_a_refused_call_changes_nothing(self):
        rows = self.rows(2)
        step = self.batch.step("decode", [4, 4], [1, 1])
        with self.assertRaisesRegex(fovea.InvalidArgument, "without begin_step"):
            self.forward(rows)
        self.backend.begin_step(**step)
        self.forward(rows)
        before = [view.numpy().copy() for view in (self.kv_pool, self.index_pool)]
        good, _ = self.forward(rows)
        with self.assertRaisesRegex(fovea.InvalidArgument, "seq_len"):
            self.backend.begin_step(**{**step, "seq_len": step["seq_len"].astype(np.int64)})
        with self.assertRaisesRegex(fovea.InvalidArgument, "host_seq_len"):
            self.backend.begin_step(**{**step, "host_seq_len": ["x", 2]})
        for name, value in (("q", rows["q"][:1]), ("k", rows["k"].astype(np.float32)), ("index_k", None)):
            with self.assertRaisesRegex(fovea.InvalidArgument, f"DsaBackend|dsa_backend|{name}"):
                self.forward({**rows, name: value})
        with self.assertRaisesRegex(fovea.InvalidArgument, "out"):
            self.forward(rows, out=(np.zeros((2, 2, 511), BF16), None))
        with self.assertRaisesRegex(fovea.InvalidArgument, "unknown output 'result'"):
            self.forward(rows, out={"result": good})
        for view, expected in zip((self.kv_pool, self.index_pool), before):
            self.assert_same(view.numpy(), expected)
        self.assert_same(self.forward(rows)[0], good)  # the step is still current

    def test_a_read_only_pool_is_refused(self):
        self.backend.begin_step(**self.batch.step("decode", [4, 4], [1, 1]))
        frozen = self.kv_pool.numpy().copy()
        frozen.flags.writeable = False
        with self.assertRaisesRegex(fovea.InvalidArgument, "kv_pool is read-only"):
            self.backend.forward(frozen, self.index_pool, 0.1, **self.rows(2), **self.layer)

    def test_out_is_written_and_a_profile_lists_the_calls(self):
        self.backend.begin_step(**self.batch.step("decode", [4, 4], [1, 1]))
        rows, out = self.rows(2), np.full((2, self.HEADS, 512), 9, BF16)
        self.backend.start_profile()
        result = self.forward(rows, out=(out, None))
        self.assertIs(result[0], out)
        calls = self.backend.stop_profile()
        self.assertIn("sparse_mla", [call.name for call in calls])
        self.assertTrue(all(call.elapsed_ms >= 0 for call in calls))
        self.forward(rows)
        self.assertEqual(self.backend.stop_profile(), [])

    def test_plans_belong_to_their_backend_and_keep_it(self):
        other = fovea.DsaBackend(num_heads=2, max_requests=2, max_rows=16, table_width=16, page_size=4, topk=4, index_heads=2)
        plan = other.make_step_plan("decode", 2)
        step = self.batch.step("decode", [4, 4], [1, 1])
        with self.assertRaisesRegex(fovea.InvalidArgument, "belongs to another backend"):
            self.backend.begin_step(**step, plan=plan)
        kda = fovea.KdaBackend(num_heads=1, num_value_heads=1, max_requests=1, max_rows=1)
        with self.assertRaisesRegex(fovea.InvalidArgument, "belongs to another backend"):
            self.backend.begin_step(**step, plan=kda.make_step_plan("decode", 1))
        with self.assertRaisesRegex(fovea.InvalidArgument, "plan is of type"):
            self.backend.begin_step(**step, plan=3)
        del other
        gc.collect()
        self.assertEqual(plan.metadata()["kv_len"].numpy().tolist(), [1, 1])  # padded requests

    def test_contents_out_of_range_are_reported_on_request(self):
        backend = fovea.DsaBackend(num_heads=2, index_heads=2, topk=4, page_size=4, max_requests=2, max_rows=4,
                                   table_width=16, check=True, cache_slots=4 * self.batch.num_pages)  # fmt: skip
        step = self.batch.step("decode", [4, 4], [1, 1])
        backend.begin_step(**step)
        self.assertEqual(backend.report(), "")
        backend.begin_step(**{**step, "out_cache_loc": i32([5, 10**6])})
        self.assertIn("1000000", backend.report())

    def test_calls_from_two_threads_are_refused_or_run(self):
        self.backend.begin_step(**self.batch.step("extend", [0, 0], [8, 8]))
        rows, outcomes = self.rows(16), []

        def work(_):
            for _ in range(20):
                try:
                    self.forward(rows)
                    outcomes.append("done")
                except fovea.InvalidArgument as error:
                    outcomes.append("another thread" if "another thread" in str(error) else str(error))

        run_threads(3, work)
        self.assertLessEqual(set(outcomes), {"done", "another thread"})
        self.assertIn("done", outcomes)


if __name__ == "__main__":
    unittest.main()
