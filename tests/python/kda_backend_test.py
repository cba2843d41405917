"""fovea.KdaBackend: steps equal the operators one by one; a refused or failed step leaves pools as they were."""

import unittest

import numpy as np

import fovea
from support import BF16, Batch, Case, bf16, i32, pick

DEVICE = "cpu"  # where the backend is


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
        if DEVICE == "cpu":  # no call waits to look at the contents of a GPU
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


if __name__ == "__main__":
    unittest.main()
