"""fovea.compat for block-sparse attention: the API itself, and an engine's module over it, unchanged (peers.py)."""

import unittest

import numpy as np

import fovea
import fovea.compat
import peers
from support import GPU, Case, attend, f64

try:
    import torch
except ImportError:
    torch = None

PAGE, HEADS, KV_HEADS, DIM, TOPK, TABLE_ROWS, WIDTH = 16, 8, 2, 32, 4, 9, 256


class Server:
    """Pools and a map of tokens to slots, with pages in random order."""

    def __init__(self, seed, device="cpu"):
        self.rng, self.device = np.random.default_rng(seed), device
        pages = TABLE_ROWS * WIDTH // PAGE
        order = torch.from_numpy(self.rng.permutation(pages).astype(np.int32))
        slots = order[:, None] * PAGE + torch.arange(PAGE, dtype=torch.int32)
        self.req_to_token = slots.reshape(TABLE_ROWS, WIDTH).to(device)
        self.k_cache, self.v_cache = (self.random(pages * PAGE, KV_HEADS, DIM) for _ in range(2))

    def random(self, *shape):
        return torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32)).to(self.device, torch.bfloat16)

    def slots(self, batch):
        return self.i32(self.rng.permutation(TABLE_ROWS)[:batch].tolist())

    def i32(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def lists(self, rows, blocks):
        """[KV_HEADS, rows, TOPK]: distinct blocks in any order, now and then -1 or past the length."""
        lists = np.stack([[self.rng.permutation(max(blocks, TOPK))[:TOPK] for _ in range(rows)] for _ in range(KV_HEADS)])
        lists[self.rng.random(lists.shape) < 0.2] = -1
        return torch.from_numpy(lists.astype(np.int32)).to(self.device)

    def expected(self, q, lists, request_of_row, position, slot_ids, seq_lens):
        out = np.zeros((len(q), HEADS, DIM))
        keys, values, q, table = f64(self.k_cache.float()), f64(self.v_cache.float()), f64(q.float()), self.req_to_token.cpu()
        for t, (request, last) in enumerate(zip(request_of_row, position)):
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                seen = [j for block in lists[group, t].tolist() if block >= 0
                        for j in range(block * PAGE, block * PAGE + PAGE)
                        if j < int(seq_lens[request]) and j <= last]  # fmt: skip
                slots = table[int(slot_ids[request])].numpy()[seen]
                scores = keys[slots, group] @ q[t, head] * DIM**-0.5
                out[t, head] = attend(scores, values[slots, group])[0]
        return out


@unittest.skipIf(torch is None, "torch is not installed")
class FmhaTest(Case):
    def plan(self, rows, tokens, **settings):
        settings = {"num_kv_heads": KV_HEADS, "page_size": PAGE, "kv_block_num": TOPK, **settings}
        return fovea.compat.fmha_sm100_plan(rows, tokens, HEADS, **settings)

    def test_a_plan_holds_lengths_as_tensors(self):
        plan = self.plan(torch.tensor([1, 1]), torch.tensor([33, 16]), causal=False, qo_offset=torch.tensor([32, 15]))
        self.assertIsInstance(plan, tuple)
        self.assertGreater(len(plan), 3)
        expected = {"kv_segment_lens": [33, 16], "kv_segment_offsets": [0, 33, 49], "kv_page_indptr": [0, 3, 4],
                    "qo_offset": [32, 15]}  # fmt: skip
        for name, values in expected.items():
            self.assertEqual(plan[3][name].tolist(), values)
            self.assertEqual(plan[3][name].dtype, torch.int32)

    def test_a_plan_keeps_nothing_of_its_arguments(self):
        tokens = torch.tensor([33], dtype=torch.int32)
        plan = self.plan(torch.ones(1, dtype=torch.int32), tokens)
        plan[3]["kv_segment_lens"].fill_(0)
        self.assertEqual(tokens.tolist(), [33])

    def test_refusals(self):
        with self.assertRaisesRegex(fovea.InvalidArgument, "kv_segment_lens has shape"):
            self.plan(torch.ones(2), torch.ones(3))
        with self.assertRaisesRegex(fovea.InvalidArgument, "page_size = 0"):
            self.plan(torch.ones(2), torch.ones(2), page_size=0)
        server = Server(1)
        plan = self.plan(torch.ones(1), torch.tensor([16]))
        pools = [pool.view(-1, PAGE, KV_HEADS, DIM).permute(0, 2, 1, 3) for pool in (server.k_cache, server.v_cache)]
        lists = torch.zeros(1, KV_HEADS, TOPK, dtype=torch.int32)
        arguments = {"kv_indices": torch.zeros(1, dtype=torch.int32), "kv_block_indexes": lists}
        with self.assertRaisesRegex(fovea.InvalidArgument, "q has shape"):
            fovea.compat.fmha_sm100(server.random(1, HEADS + 1, DIM), *pools, plan, **arguments)
        with self.assertRaisesRegex(fovea.InvalidArgument, "blocks = "):
            arguments["kv_block_indexes"] = lists[..., :2].contiguous()
            fovea.compat.fmha_sm100(server.random(1, HEADS, DIM), *pools, plan, **arguments)

    def test_a_list_of_pages_may_be_longer_than_the_table(self):
        server = Server(2)
        q, lists = server.random(2, HEADS, DIM), server.lists(2, 3).permute(1, 0, 2).contiguous()
        pools = [pool.view(-1, PAGE, KV_HEADS, DIM).permute(0, 2, 1, 3) for pool in (server.k_cache, server.v_cache)]
        plan = self.plan(torch.ones(2), torch.tensor([40, 17]), causal=False)
        pages = torch.tensor([3, 1, 2, 7, 9], dtype=torch.int32)
        longer = torch.cat([pages, torch.full((50,), 10**6, dtype=torch.int32)])
        first, second = (fovea.compat.fmha_sm100(q, *pools, plan, kv_indices=indices, kv_block_indexes=lists)
                         for indices in (pages, longer))  # fmt: skip
        for one, other in zip(first, second):
            self.assertTrue(torch.equal(one, other))


@unittest.skipIf(torch is None, "torch is not installed")
@peers.needs("004")
class EngineTest(Case):
    device = "cpu"

    def setUp(self):
        fovea.compat.install()
        self.addCleanup(fovea.compat.uninstall)
        self.engine = peers.execute("004")
        self.server = Server(3, self.device)

    def test_prefill_with_and_without_prefixes(self):
        for prefix in ([0, 0, 0], [37, 0, 100]):
            with self.subTest(prefix=prefix):
                rows = [5, 40, 17]
                seq_lens = self.server.i32([a + b for a, b in zip(prefix, rows)])
                slot_ids, total = self.server.slots(3), sum(rows)
                q = self.server.random(total, HEADS, DIM)
                lists = self.server.lists(total, int(seq_lens.max()) // PAGE + 1)
                out = self.engine["msa_sparse_prefill_main"](
                    q, self.server.k_cache, self.server.v_cache, lists, self.server.req_to_token, slot_ids,
                    self.server.i32([0, 5, 45, 62]), seq_lens, self.server.i32(prefix), PAGE,
                )  # fmt: skip
                request = [r for r, count in enumerate(rows) for _ in range(count)]
                position = [prefix[r] + i for r, count in enumerate(rows) for i in range(count)]
                self.assert_close(out.float(), self.server.expected(q, lists, request, position, slot_ids, seq_lens), 2e-2)

    def decode(self, q, lists, slot_ids, seq_lens, **cached):
        return self.engine["msa_sparse_decode_main"](
            q, self.server.k_cache, self.server.v_cache, lists, self.server.req_to_token, slot_ids, seq_lens, PAGE, **cached
        )

    def test_decode(self):
        seq_lens = self.server.i32([1, 100, 256, 33])
        slot_ids, q, lists = self.server.slots(4), self.server.random(4, HEADS, DIM), self.server.lists(4, 16)
        out = self.decode(q, lists, slot_ids, seq_lens)
        expected = self.server.expected(q, lists, range(4), (seq_lens - 1).tolist(), slot_ids, seq_lens)
        self.assert_close(out.float(), expected, 2e-2)

    def test_a_plan_that_is_refreshed_in_place_equals_fresh_ones(self):
        batch = 4
        plan = self.engine["build_msa_decode_cg_plan"](HEADS, KV_HEADS, PAGE, TOPK, batch, self.device)
        pages = self.server.i32([10**6] * (batch * WIDTH // PAGE))
        q = self.server.random(batch, HEADS, DIM)
        for lengths in ([5, 20, 100, 256], [6, 21, 101, 200], [256, 1, 0, 16], [0, 0, 0, 0], [17, 64, 0, 255]):
            with self.subTest(lengths=lengths):
                seq_lens, slot_ids = self.server.i32(lengths), self.server.slots(batch)
                lists = self.server.lists(batch, 16)
                self.engine["update_msa_decode_cg_meta"](
                    plan, pages, self.server.req_to_token, slot_ids, seq_lens, PAGE, TOPK, HEADS, KV_HEADS
                )
                out = self.decode(q, lists, slot_ids, seq_lens, kv_indices=pages, plan=plan)
                self.assertTrue(torch.equal(out, self.decode(q, lists, slot_ids, seq_lens)))
                expected = self.server.expected(q, lists, range(batch), (seq_lens - 1).tolist(), slot_ids, seq_lens)
                self.assert_close(out.float(), expected, 2e-2)

    def test_errors_of_the_engine_are_its_own(self):
        with self.assertRaises(ValueError):
            self.engine["build_msa_decode_meta"](
                self.server.k_cache[:-1], self.server.req_to_token, self.server.slots(1),
                self.server.i32([1]), HEADS, PAGE, TOPK,
            )  # fmt: skip
        with self.assertRaises(self.engine["MSAUnavailableError"]):
            self.engine["_run_fmha_sm100_plan"](torch.ones(1), torch.ones(2), HEADS, num_kv_heads=KV_HEADS, page_size=PAGE, kv_block_num=TOPK)


@peers.needs_gpu
class GpuEngineTest(EngineTest):
    device = GPU


if __name__ == "__main__":
    unittest.main()
