"""fovea.V4Backend: steps equal the operators one by one; a refused or failed step leaves pools as they were."""

import unittest

import numpy as np

import fovea
from calls import cos_sin
from support import Batch, Case, bf16, i32, pick


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


if __name__ == "__main__":
    unittest.main()
