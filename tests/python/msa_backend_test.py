"""fovea.MsaBackend: steps equal the operators one by one; a refused or failed step leaves pools as they were."""

import unittest

import numpy as np

import fovea
from support import BF16, Batch, Case, bf16, f64, i32


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


if __name__ == "__main__":
    unittest.main()
