"""Serving backends: steps equal the operators one by one; a refused or failed step leaves pools as they were."""

import gc
import unittest

import numpy as np

import fovea
from calls import cos_sin, i32
from support import BF16, Case, bf16, f64, run_threads


class Batch:
    """Requests whose tokens live in pages of random order: the arguments of begin_step."""

    def __init__(self, rng, requests, pages, page_size):
        self.page_size = page_size
        order = 1 + rng.permutation(requests * pages).astype(np.int32)  # page 0 is the dummy
        slots = (order[:, None] * page_size + np.arange(page_size)).reshape(requests, -1)
        self.req_to_token = np.concatenate([np.zeros((1, slots.shape[1])), slots]).astype(np.int32)
        self.pool_row = np.arange(1, requests + 1, dtype=np.int32)
        self.num_pages = requests * pages + 1

    def step(self, mode, lengths, rows, includes_rows=True):
        """Lengths before the rows of this step, and how many rows each request has."""
        positions = np.concatenate([np.arange(length, length + n) for length, n in zip(lengths, rows)]).astype(np.int32)
        request = np.repeat(np.arange(len(rows)), rows)
        step = {
            "mode": mode,
            "seq_len": i32(np.add(lengths, rows) if includes_rows else lengths),
            "pool_row": self.pool_row,
            "req_to_token": self.req_to_token,
            "positions": positions,
            "out_cache_loc": self.req_to_token[self.pool_row[request], positions],
        }
        if mode in ("extend", "mixed"):
            step.update(ext_len=i32(rows), host_seq_len=step["seq_len"], host_ext_len=i32(rows))
        return step

    def row_to_request(self, rows):
        return np.repeat(np.arange(len(rows)), rows).astype(np.int32)

    def page_table(self):
        return np.ascontiguousarray(self.req_to_token[1:, :: self.page_size] // self.page_size)


def pick(rows, chosen):
    return {name: value[chosen] for name, value in rows.items()}


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


class KdaTest(Case):
    HEADS, K, V, LAYERS, PAGE = 2, 16, 8, 2, 4

    def setUp(self):
        self.rng = np.random.default_rng(2)
        self.batch = Batch(self.rng, 2, 4, self.PAGE)
        self.channels = self.HEADS * (2 * self.K + self.V)
        self.backend = fovea.KdaBackend(
            num_heads=self.HEADS, num_value_heads=self.HEADS, head_dim_k=self.K, head_dim_v=self.V, gate_dtype="f32",
            num_layers=self.LAYERS, num_mla_heads=1, page_size=self.PAGE, table_width=16, max_requests=2, max_rows=16,
            rows_per_request=3, max_snapshots=2, normalise=True, conv_weight_dtype="f32", check=True,
        )  # fmt: skip
        self.pool = fovea.StatePool(num_slots=6, num_value_heads=self.HEADS, head_dim_k=self.K, head_dim_v=self.V,
                                    num_layers=self.LAYERS, window_shape=(3, self.channels))  # fmt: skip
        self.weights = {
            "a_log": self.rng.standard_normal(self.HEADS).astype(np.float32),
            "conv_weight": self.rng.standard_normal((self.channels, 4)).astype(np.float32) / 2,
        }

    def rows(self, count):
        return {
            "qkv": bf16(self.rng, count, self.channels),
            "g": self.rng.standard_normal((count, self.HEADS, self.K)).astype(np.float32),
            "beta": self.rng.random((count, self.HEADS)).astype(np.float32),
        }

    def forward(self, layer, rows, **keywords):
        return self.backend.forward_kda(
            layer, **rows, state=self.pool.state(layer), window=self.pool.window(layer), **self.weights, **keywords
        )

    def composed(self, rows, counts, state, window, in_slot, out_slot, fresh):
        """causal_conv1d and kda_prefill one by one on pools of numpy."""
        slots = {"in_slot": in_slot, "out_slot": out_slot, "has_initial_state": np.array([not fresh] * len(counts))}
        q_indptr = i32(np.concatenate([[0], np.cumsum(counts)]))
        qkv = fovea.causal_conv1d(rows["qkv"], self.weights["conv_weight"], window_state=window, q_indptr=q_indptr, **slots)
        q, k, v = np.split(qkv, [self.HEADS * self.K, 2 * self.HEADS * self.K], axis=1)
        q, k, v = (np.ascontiguousarray(part).reshape(len(part), self.HEADS, -1) for part in (q, k, v))
        return fovea.kda_prefill(
            q, k, v, rows["g"], rows["beta"], q_indptr, "softplus", "prob", a_log=self.weights["a_log"], normalise=True,
            state=state, **slots,
        )  # fmt: skip

    def test_prefill_decode_verify_and_commit_equal_the_operators(self):
        slots, plan = i32([4, 1]), self.backend.make_step_plan("target_verify", 2, 3)
        expected = [(np.zeros_like(self.pool.state(i).numpy()), np.zeros_like(self.pool.window(i).numpy())) for i in range(2)]

        def compare(layer, out, rows, counts, fresh=False):
            state, window = expected[layer]
            self.assert_close(out, self.composed(rows, counts, state, window, slots, slots, fresh), 2e-2)
            self.assert_close(self.pool.state(layer).numpy()[slots], state[slots], 1e-3)
            self.assert_same(self.pool.window(layer).numpy()[slots], window[slots])

        self.backend.begin_step(**self.batch.step("extend", [0, 0], [5, 6]), in_slot=slots, has_initial_state=np.zeros(2, bool))
        for layer in range(2):
            rows = self.rows(11)
            compare(layer, self.forward(layer, rows), rows, [5, 6], fresh=True)
        self.backend.begin_step(**self.batch.step("decode", [5, 6], [1, 1]), in_slot=slots)
        for layer in range(2):
            rows = self.rows(2)
            compare(layer, self.forward(layer, rows), rows, [1, 1])
        # Three drafted rows a request; two stay of the first, one of the second.
        self.backend.begin_step(**self.batch.step("target_verify", [6, 7], [3, 3], False), in_slot=slots, plan=plan)
        before = [self.pool.states().numpy().copy(), self.pool.windows().numpy().copy()]
        drafted = [self.rows(6) for _ in range(2)]
        outs = [self.forward(layer, drafted[layer], plan=plan) for layer in range(2)]
        for pool, unchanged in zip((self.pool.states(), self.pool.windows()), before):
            self.assert_same(pool.numpy(), unchanged)
        self.backend.commit(plan, i32([2, 1]), self.pool.states(), window=self.pool.windows())
        kept = [0, 1, 3]
        for layer in range(2):
            compare(layer, outs[layer][kept], pick(drafted[layer], kept), [2, 1])
        routes = self.backend.routes()
        self.assertEqual((routes["packed"], routes["verified"], routes["speculative"], routes["commits"]), (2, 2, 2, 1))

    def test_a_snapshot_is_the_state_of_a_prefix(self):
        rows, slots = self.rows(11), i32([0, 1])
        snapshots = {"snapshot_seq": i32([1]), "snapshot_pos": i32([6]), "snapshot_slot": i32([5])}
        step = self.batch.step("extend", [0, 0], [5, 6])
        self.backend.begin_step(**step, in_slot=i32([-1, -1]), out_slot=slots, **snapshots)
        self.forward(0, rows)
        state, window = self.pool.state(0).numpy(), self.pool.window(0).numpy()
        self.assert_same(state[5], state[1])
        self.assert_same(window[5], window[1])
        self.assertTrue(state[5].any())

    def test_full_attention_is_dense_mla(self):
        pool = fovea.KvPool(num_pages=self.batch.num_pages, page_size=self.PAGE)
        q, k = bf16(self.rng, 11, 1, 576), bf16(self.rng, 11, 576)
        step = self.batch.step("extend", [0, 0], [5, 6])
        self.backend.begin_step(**step, in_slot=i32([0, 1]))
        out, lse = self.backend.forward_mla(q, pool.layer(), 0.1, k=k)
        kv = pool.layer().numpy().view(BF16).reshape(-1, 576)
        self.assert_same(kv[step["out_cache_loc"]], k)
        expected = fovea.dense_mla(q, kv, self.batch.page_table(), i32([5, 6]), i32([0, 5, 11]), 0.1, page_size=self.PAGE)
        self.assert_close(out, expected[0], 1e-2)
        self.assert_close(lse, expected[1], 1e-3)

    def test_a_failed_step_leaves_the_pools(self):
        slots = i32([0, 1])
        self.backend.begin_step(**self.batch.step("extend", [0, 0], [5, 6]), in_slot=slots)
        self.forward(0, self.rows(11))
        before = self.pool.states().numpy().copy(), self.pool.windows().numpy().copy()
        rows = self.rows(2)
        # With `check` a slot out of range is found in the contents, after begin_step.
        self.backend.begin_step(**self.batch.step("decode", [5, 6], [1, 1]), in_slot=i32([0, 77]))
        with self.assertRaises(fovea.Error):
            self.forward(0, rows)
        plan = self.backend.make_step_plan("target_verify", 2, 3)
        with self.assertRaisesRegex(fovea.InvalidArgument, "verif"):
            self.backend.commit(plan, i32([1, 1]), self.pool.states(), window=self.pool.windows())
        self.backend.begin_step(**self.batch.step("decode", [5, 6], [1, 1]), in_slot=slots)
        with self.assertRaises(fovea.InvalidArgument):
            self.forward(0, {**rows, "g": rows["g"][:, :1]})
        with self.assertRaises(fovea.InvalidArgument):
            self.backend.forward_kda(7, **rows, state=self.pool.state(0), window=self.pool.window(0), **self.weights)
        for pool, unchanged in zip((self.pool.states(), self.pool.windows()), before):
            self.assert_same(pool.numpy(), unchanged)


class MsaTest(Case):
    HEADS, KV_HEADS, DIM, BLOCK, TOPK = 4, 2, 32, 16, 2

    def setUp(self):
        self.rng = np.random.default_rng(3)
        self.batch = Batch(self.rng, 2, 4, self.BLOCK)
        self.config = {"num_heads": self.HEADS, "num_kv_heads": self.KV_HEADS, "head_dim": self.DIM, "index_dim": self.DIM,
                       "block_size": self.BLOCK, "topk": self.TOPK, "max_requests": 2, "max_rows": 64, "table_width": 64,
                       "dense_layers": True, "rows_per_request": 2}  # fmt: skip
        self.backend = fovea.MsaBackend(**self.config)
        slots = self.batch.num_pages * self.BLOCK
        self.pools = {"k_pool": np.zeros((slots, self.KV_HEADS, self.DIM), BF16),
                      "v_pool": np.zeros((slots, self.KV_HEADS, self.DIM), BF16),
                      "index_pool": np.zeros((slots, 1, self.DIM), BF16)}  # fmt: skip

    def rows(self, count):
        shapes = {"q": (self.HEADS,), "k": (self.KV_HEADS,), "v": (self.KV_HEADS,), "index_q": (self.KV_HEADS,), "index_k": ()}
        return {name: bf16(self.rng, count, *heads, self.DIM) for name, heads in shapes.items()}

    def composed(self, step, rows, counts, pools, dense=False):
        """Stores by numpy, then msa_score_select and msa_attend."""
        slots, q_indptr = step["out_cache_loc"], i32(np.concatenate([[0], np.cumsum(counts)]))
        pools["k_pool"][slots], pools["v_pool"][slots] = rows["k"], rows["v"]
        kv_len = i32([step["positions"][q_indptr[r + 1] - 1] + 1 for r in range(len(counts))])
        lengths = {"page_table": self.batch.page_table(), "kv_len": kv_len, "q_indptr": q_indptr, "block_size": self.BLOCK}
        if dense:
            blocks = np.broadcast_to(np.arange(4, dtype=np.int32), (self.KV_HEADS, len(slots), 4)).copy()
        else:
            pools["index_pool"][slots, 0] = rows["index_k"]
            blocks = fovea.msa_score_select(rows["index_q"], pools["index_pool"], **lengths, topk=self.TOPK)
        out, lse = fovea.msa_attend(rows["q"], pools["k_pool"], pools["v_pool"], **lengths, blocks=blocks)
        return out, lse, blocks

    def test_prefill_decode_and_verify_equal_the_operators(self):
        pools = {name: pool.copy() for name, pool in self.pools.items()}
        plan = self.backend.make_step_plan("target_verify", 2, 2)
        steps = [("extend", [0, 0], [40, 17], None), ("decode", [40, 17], [1, 1], None),
                 ("target_verify", [41, 18], [2, 2], plan), ("mixed", [42, 19], [3, 1], None)]  # fmt: skip
        for mode, lengths, counts, in_plan in steps:
            with self.subTest(mode):
                step, rows = self.batch.step(mode, lengths, counts, mode != "target_verify"), self.rows(sum(counts))
                self.backend.begin_step(**step, plan=in_plan)
                actual = self.backend.forward(**rows, **self.pools, plan=in_plan, return_blocks=True)
                expected = self.composed(step, rows, counts, pools)
                self.assert_same(actual[2], expected[2])
                self.assert_close(actual[0], expected[0], 1e-2)
                self.assert_close(actual[1], expected[1], 1e-3)
                for name, pool in pools.items():
                    self.assert_same(self.pools[name], pool)
                given = self.backend.forward(
                    rows["q"], self.pools["k_pool"], self.pools["v_pool"], topk_blocks=actual[2], plan=in_plan
                )
                self.assert_same(given[0], actual[0])
                arguments = {name: value for name, value in {**rows, **self.pools}.items() if "index" not in name}
                dense = self.backend.forward_dense(**arguments, plan=in_plan)
                self.assert_close(dense[0], self.composed(step, rows, counts, pools, dense=True)[0], 1e-2)
        self.assertEqual(self.backend.routes()["dense"], 4)
        self.assertEqual(self.backend.list_width(), self.TOPK)

    def test_a_refused_forward_writes_nothing(self):
        self.backend.begin_step(**self.batch.step("extend", [0, 0], [20, 3]))
        rows = self.rows(23)
        for name, value in (("q", rows["q"][..., :16]), ("index_k", None), ("v", rows["v"].astype(np.float32))):
            with self.assertRaises(fovea.InvalidArgument):
                self.backend.forward(**{**rows, name: value}, **self.pools)
        with self.assertRaises(fovea.InvalidArgument):
            self.backend.forward(**rows, **{**self.pools, "index_pool": None})
        for pool in self.pools.values():
            self.assertFalse(f64(pool).any())
        sparse = fovea.MsaBackend(**{**self.config, "dense_layers": False})
        sparse.begin_step(**self.batch.step("extend", [0, 0], [20, 3]))
        with self.assertRaisesRegex(fovea.Error, "dense"):
            sparse.forward_dense(rows["q"], self.pools["k_pool"], self.pools["v_pool"])


class V4Test(Case):
    HEADS, PAGE, TOPK, INDEX_HEADS = 2, 8, 3, 2

    def setUp(self):
        self.rng = np.random.default_rng(4)
        self.batch = Batch(self.rng, 2, 4, self.PAGE)
        self.config = {"num_heads": self.HEADS, "window": 6, "hca": False, "index_heads": self.INDEX_HEADS, "topk": self.TOPK,
                       "page_size": self.PAGE, "table_width": 32, "max_requests": 2, "max_rows": 32,
                       "rows_per_request": 2}  # fmt: skip
        self.backend = fovea.V4Backend(**self.config, csa_state_tokens=8)
        pages = self.batch.num_pages
        self.window_pool = fovea.KvPool(num_pages=pages, page_size=self.PAGE, row_format="v4", width=512)
        self.pools = {
            "compressor_pool": fovea.KvPool(num_pages=pages, page_size=2, row_format="v4", width=512).layer(),
            "indexer_pool": fovea.KvPool(num_pages=pages, page_size=2, row_format="i132", width=128).layer(),
            "compressor_state": np.full((4, 8, 2, 1024), np.nan, np.float32),
            "indexer_state": np.full((4, 8, 2, 256), np.nan, np.float32),
        }
        self.weights = {"cos_sin": cos_sin(64, 64), "sink": np.zeros(self.HEADS, np.float32)}
        for name, d in (("compressor", 512), ("indexer", 128)):
            self.weights[f"{name}_ape"] = self.rng.standard_normal((4, 2 * d)).astype(np.float32)
            self.weights[f"{name}_norm_weight"] = np.ones(d, np.float32)

    def rows(self, count):
        return {
            "q": bf16(self.rng, count, self.HEADS, 512),
            "kv": bf16(self.rng, count, 512),
            "compressor_kv_gate": self.rng.standard_normal((count, 2048)).astype(np.float32),
            "indexer_kv_gate": self.rng.standard_normal((count, 512)).astype(np.float32),
            "index_q": bf16(self.rng, count, self.INDEX_HEADS, 128),
            "head_gate": self.rng.standard_normal((count, self.INDEX_HEADS)).astype(np.float32),
        }

    def forward(self, ratio, rows, **keywords):
        if ratio == 0:
            rows = {name: rows[name] for name in ("q", "kv")}
            extra = {name: self.weights[name] for name in ("cos_sin", "sink")}
            return self.backend.forward(0, window_pool=self.window_pool.layer(), **rows, **extra, **keywords)
        return self.backend.forward(
            ratio, window_pool=self.window_pool.layer(), **rows, **self.pools, **self.weights, **keywords
        )

    def begin(self, mode, lengths, counts, **keywords):
        step = self.batch.step(mode, lengths, counts, mode != "target_verify")
        self.backend.begin_step(**step, in_slot=i32([2, 0]), **keywords)
        return step

    def test_a_window_layer_equals_the_operators(self):
        rows, counts = self.rows(17), [9, 8]
        step = self.begin("extend", [0, 0], counts)
        out, lse = self.forward(0, rows)
        pool = np.zeros_like(self.window_pool.layer().numpy())
        fovea.pack_rows(rows["kv"], step["out_cache_loc"], pool, "v4", page_size=self.PAGE)
        self.assert_same(self.window_pool.layer().numpy(), pool)
        indices, row_len = fovea.build_swa_indices(i32([0, 9, 17]), i32(counts), self.batch.page_table(), 6, self.PAGE)
        expected = fovea.sparse_mla(
            rows["q"], pool, indices, 512**-0.5, topk_length=row_len, sink=self.weights["sink"], row_format="v4",
            page_size=self.PAGE, inverse_rope=self.weights["cos_sin"], positions=step["positions"],
        )  # fmt: skip
        self.assert_close(out, expected[0], 1e-2)
        self.assert_close(lse, expected[1], 1e-3)

    def test_a_compressed_layer_equals_the_operators(self):
        rows, counts = self.rows(25), [15, 10]
        step = self.begin("extend", [0, 0], counts)
        out, lse, indices = self.forward(4, rows, return_indices=True)
        requests, table = self.batch.row_to_request(counts), self.batch.page_table()
        pool = np.zeros_like(self.pools["compressor_pool"].numpy())
        index_pool = np.zeros_like(self.pools["indexer_pool"].numpy())
        places = {"positions": step["positions"], "row_to_request": requests, "cos_sin": self.weights["cos_sin"],
                  "state_slot": i32([2, 0]), "page_table": table, "ratio": 4, "page_size": 2}  # fmt: skip
        states = {name: np.zeros((4, 8, 2, 2 * d), np.float32) for name, d in (("compressor", 512), ("indexer", 128))}
        emitted = [
            fovea.v4_compress(rows[f"{name}_kv_gate"], self.weights[f"{name}_ape"], self.weights[f"{name}_norm_weight"],
                              state=states[name], pool=target, row_format=row_format, scale_mode=scale, **places)
            for name, target, row_format, scale in (("compressor", pool, "v4", None), ("indexer", index_pool, "i132", "fp32"))
        ]  # fmt: skip
        self.assert_same(emitted[0], emitted[1])
        self.assert_same(self.pools["compressor_pool"].numpy(), pool)
        self.assert_same(self.pools["indexer_pool"].numpy(), index_pool)
        visible = (step["positions"] + 1) // 4
        self.assertEqual((indices >= 0).sum(1).tolist(), np.minimum(visible, self.TOPK).tolist())
        swa, swa_len = fovea.build_swa_indices(i32([0, 15, 25]), i32(counts), table, 6, self.PAGE)
        expected = fovea.sparse_mla(
            rows["q"], self.window_pool.layer(), swa, 512**-0.5, topk_length=swa_len, sink=self.weights["sink"],
            row_format="v4", page_size=self.PAGE, extra_kv=pool, extra_indices=indices, extra_page_size=2,
            inverse_rope=self.weights["cos_sin"], positions=step["positions"],
        )  # fmt: skip
        self.assert_close(out, expected[0], 1e-2)
        self.assert_close(lse, expected[1], 1e-3)

    def test_drafts_and_decode_equal_one_prefill(self):
        rows = self.rows(22)  # 11 tokens a request
        self.begin("extend", [0, 0], [11, 11])
        whole, _ = self.forward(4, rows)
        for pool in (*self.pools.values(), self.window_pool.layer()):
            np.asarray(pool)[:] = 0
        own = [list(range(r * 11, r * 11 + 11)) for r in range(2)]
        plan = self.backend.make_step_plan("target_verify", 2, 2)
        at = [0, 0]

        def step(mode, counts, kept, in_plan=None):
            chosen = [t for r in range(2) for t in own[r][at[r] : at[r] + counts[r]]]
            self.begin(mode, list(at), counts, plan=in_plan)
            part = pick(rows, chosen)
            results = self.forward(4, part, plan=in_plan)
            self.assert_close(results[0], whole[chosen], 1e-2)
            if in_plan is not None:
                tensors = {**part, **self.pools, **self.weights, "window_pool": self.window_pool.layer()}
                self.backend.commit(in_plan, 4, i32(kept), results, **tensors)
            at[:] = np.add(at, kept).tolist()

        step("extend", [6, 3], [6, 3])
        step("target_verify", [2, 2], [1, 2], plan)  # one draft of the first request is taken back
        step("decode", [1, 1], [1, 1])
        step("target_verify", [2, 2], [2, 1], plan)
        self.assertEqual(self.backend.routes()["commits"], 2)

    def test_a_ring_and_pages_of_the_window_give_the_same(self):
        rows, counts = self.rows(12), [7, 5]
        step = self.batch.step("extend", [0, 0], counts)
        self.backend.begin_step(**step)
        expected = self.forward(0, rows)
        own = {name: rows[name] for name in ("q", "kv")} | {name: self.weights[name] for name in ("cos_sin", "sink")}
        storages = (("ring", 16, i32([[2], [1]])), ("paged", 8, i32([[1, -1, -1, -1], [2, -1, -1, -1]])))
        for storage, rows_of_page, table in storages:
            with self.subTest(storage):
                backend = fovea.V4Backend(**self.config, window_storage=storage, window_page_size=rows_of_page,
                                          max_request_rows=8)  # fmt: skip
                pool = fovea.KvPool(num_pages=3, page_size=rows_of_page, row_format="v4", width=512).layer()
                backend.begin_step(**step, window_table=table)
                actual = backend.forward(0, window_pool=pool, **own)
                for mine, other in zip(actual, expected):
                    self.assert_same(mine, other)

    def test_a_snapshot_is_the_state_of_a_prefix(self):
        rows = self.rows(16)  # eight tokens a request, the same for both
        for value in rows.values():
            value[8:] = value[:8]
        snapshot = {"snapshot_seq": i32([0]), "snapshot_pos": i32([5]), "snapshot_slot": i32([3])}
        self.begin("extend", [0, 0], [8, 5], **snapshot)
        whole, _ = self.forward(4, pick(rows, list(range(13))))
        # The second request goes on from the snapshot of the first: its own rows up to there are the same.
        step = self.batch.step("extend", [8, 5], [0, 3])
        self.backend.begin_step(**step, in_slot=i32([2, 3]), out_slot=i32([2, 1]))
        out, _ = self.forward(4, pick(rows, [5, 6, 7]))
        self.assert_close(out, whole[5:8], 1e-2)
        self.assertEqual(self.backend.routes()["snapshot"], 1)

    def test_a_refused_forward_writes_nothing(self):
        rows = self.rows(17)
        self.begin("extend", [0, 0], [9, 8])
        before = {name: np.asarray(pool).copy() for name, pool in self.pools.items()}
        for name, value in (("q", rows["q"][:, :1]), ("index_q", None), ("indexer_kv_gate", rows["indexer_kv_gate"][:3])):
            with self.assertRaises(fovea.InvalidArgument):
                self.forward(4, {**rows, name: value})
        for ratio in (128, 5, -1):
            with self.assertRaises(fovea.Error):
                self.forward(ratio, rows)
        for name, pool in self.pools.items():
            np.testing.assert_array_equal(np.asarray(pool), before[name])
        self.assertFalse(self.window_pool.layer().numpy().any())
        with self.assertRaisesRegex(fovea.InvalidArgument, "unknown tensor 'gates'"):
            self.backend.commit(self.backend.make_step_plan("target_verify", 2, 2), 4, i32([1, 1]), (None, None), gates=rows["q"])


class PoolTest(Case):
    def test_views_share_memory_and_outlive_the_pool(self):
        pool = fovea.KvPool(num_pages=5, page_size=4, row_format="v32", num_layers=2)
        view = pool.layer(1)
        self.assertEqual((view.shape, view.dtype, view.device), ((5, 4 * 656), "u8", "cpu"))
        self.assertGreaterEqual(pool.bytes, 2 * 5 * 4 * 656)
        array, other = view.numpy(), np.from_dlpack(view)
        array[1, 3] = 7
        self.assertEqual(other[1, 3], 7)
        self.assertFalse(pool.layer(0).numpy().any())
        del pool, view
        gc.collect()
        array[2] = 1
        self.assertEqual(int(other.sum()), 7 + 4 * 656)

    def test_slots_are_copied_and_cleared_in_every_layer(self):
        pool = fovea.StatePool(num_slots=3, num_value_heads=1, head_dim_k=4, head_dim_v=2, num_layers=2, window_shape=(3, 5))
        pool.states().numpy()[:, 1], pool.windows().numpy()[:, 1] = 2, 3
        pool.copy(1, 2)
        pool.clear(1)
        self.assertEqual(pool.states().numpy().sum(axis=(0, 2, 3, 4)).tolist(), [0, 0, 32])
        self.assertEqual(f64(pool.window(1).numpy()).sum(axis=(1, 2)).tolist(), [0, 0, 45])
        self.assertEqual(pool.window(0).numpy().dtype, BF16)
        self.assertEqual(np.asarray(pool.window(0)).dtype, np.uint16)
        self.assertIsNone(fovea.StatePool(num_slots=1, num_value_heads=1).windows())

    def test_refusals(self):
        for arguments in ({"num_pages": -1}, {"num_pages": 2**62}, {"page_size": 0}, {"row_format": "v99"}, {"width": "wide"},
                          {"num_layers": [1]}, {"num_pages": 1.5}):  # fmt: skip
            with self.subTest(arguments), self.assertRaises(fovea.Error):
                fovea.KvPool(**{"num_pages": 2, "page_size": 4, **arguments})
        with self.assertRaisesRegex(fovea.InvalidArgument, "tpu"):
            fovea.KvPool(num_pages=1, page_size=1, device="tpu")
        pool = fovea.StatePool(num_slots=2, num_value_heads=1)
        for call in (lambda: pool.copy(0, 2), lambda: pool.clear(-1), lambda: pool.state(1)):
            self.assertRaises(fovea.InvalidArgument, call)
        with self.assertRaisesRegex(fovea.InvalidArgument, "window_shape"):
            fovea.StatePool(num_slots=2, num_value_heads=1, window_shape=(1, 2, 3))


if __name__ == "__main__":
    unittest.main()
