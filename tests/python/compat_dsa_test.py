"""fovea.compat under the calls of an engine's sparse attention backend: arguments, keywords, shapes and order of every
call site, against formulas in fp64. One test for each name that docs/compat/sglang-dsa.md lists as used there.
"""

import pathlib
import re
import types
import unittest

import numpy as np

import fovea
import fovea.compat
from support import Case, attend

try:
    import torch
except ImportError:
    torch = None

HEADS, TOPK, PAGE, PAGES, WIDTH, LATENT, ROPE = 4, 64, 64, 6, 128, 512, 64
DIM = LATENT + ROPE
SCALE = 0.04
DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "compat"


def values(tensor):
    return tensor.double().numpy()


def i32(*entries):
    return torch.tensor(entries, dtype=torch.int32)


class Server:
    """What the engine holds: a pool of latent rows, a map of requests to slots, and the lengths of three requests."""

    def __init__(self, seed=5):
        self.rng = np.random.default_rng(seed)
        self.pool = self.random(PAGES * PAGE, 1, DIM)
        pages = torch.from_numpy(self.rng.permutation(PAGES).astype(np.int32))
        self.req_to_token = (pages[:, None] * PAGE + torch.arange(PAGE, dtype=torch.int32)).reshape(3, WIDTH)
        self.seq_lens = i32(100, 64, 7)

    def random(self, *shape, scale=1.0):
        return torch.from_numpy((self.rng.standard_normal(shape) * scale).astype(np.float32)).to(torch.bfloat16)

    def selection(self):
        """page_table_1 of a selection [3, TOPK]: slots of distinct positions, then -1."""
        table = torch.full((3, TOPK), -1, dtype=torch.int32)
        for row, length in enumerate(self.seq_lens.tolist()):
            count = min(length, TOPK)
            positions = np.sort(self.rng.permutation(length)[:count])
            table[row, :count] = self.req_to_token[row, positions]
        return table

    def query(self, rows=3):
        return self.random(rows, HEADS, LATENT), self.random(rows, HEADS, ROPE)

    def expected(self, q, lists, rows=None, scale=SCALE, cap=0.0):
        """out [T, H, 512] and lse [T, H] of queries [T, H, 576] over the slots >= 0 of each list."""
        q, rows = values(q), values(self.pool[:, 0]) if rows is None else rows
        out, lse = np.zeros((*q.shape[:2], LATENT)), np.full(q.shape[:2], -np.inf)
        for t, slots in enumerate(lists):
            keys = rows[[slot for slot in slots if 0 <= slot < len(rows)]]
            for head in range(q.shape[1]):
                scores = keys @ q[t, head] * scale
                scores = cap * np.tanh(scores / cap) if cap else scores
                out[t, head], lse[t, head] = attend(scores, keys[:, :LATENT])
        return out, lse


@unittest.skipIf(torch is None, "torch is not installed")
class DsaCallsTest(Case):
    def setUp(self):
        self.server = Server()
        self.compat = fovea.compat

    def joined(self, q_nope, q_rope):
        return torch.cat([q_nope, q_rope], dim=-1)

    # Batches.

    def test_compute_cu_seqlens(self):
        self.assertEqual(self.compat.compute_cu_seqlens(self.server.seq_lens).tolist(), [0, 100, 164, 171])
        self.assertEqual(self.compat.compute_cu_seqlens(i32()).tolist(), [0])
        self.assertEqual(self.compat.compute_cu_seqlens(self.server.seq_lens).dtype, torch.int32)

    def test_compute_nsa_seqlens(self):
        found = self.compat.compute_nsa_seqlens(original_seq_lens=self.server.seq_lens, nsa_index_topk=TOPK)
        self.assertEqual(found.tolist(), [64, 64, 7])

    def test_pad_nsa_cache_seqlens(self):
        lengths = i32(3, 4, 5)
        batch = types.SimpleNamespace(global_num_tokens_cpu=None, extend_seq_lens_cpu=[2, 1])
        self.assertIs(self.compat.pad_nsa_cache_seqlens(batch, lengths), lengths)
        batch.global_num_tokens_cpu = [3, 5]
        self.assertEqual(self.compat.pad_nsa_cache_seqlens(batch, lengths).tolist(), [3, 4, 5, 0, 0])
        batch = types.SimpleNamespace(global_num_tokens_cpu=None, extend_seq_lens_cpu=[4, 5])
        self.split(4, 3)
        self.assertEqual(self.compat.pad_nsa_cache_seqlens(batch, i32(9, 9)).tolist(), [9, 9, 0])

    def split(self, size, rank):
        self.compat.set_context_parallel(size, rank)
        self.addCleanup(self.compat.set_context_parallel, None)

    def test_is_nsa_enable_prefill_cp(self):
        self.assertFalse(self.compat.is_nsa_enable_prefill_cp())
        self.split(2, 0)
        self.assertTrue(self.compat.is_nsa_enable_prefill_cp())
        with self.assertRaisesRegex(fovea.InvalidArgument, "rank = 2, expected 0 .. 1"):
            self.compat.set_context_parallel(2, 2)

    def test_can_nsa_prefill_cp_round_robin_split(self):
        mode = types.SimpleNamespace(is_context_parallel_extend=lambda: True)
        batch = types.SimpleNamespace(forward_mode=mode, extend_seq_lens_cpu=[3])
        self.assertFalse(self.compat.can_nsa_prefill_cp_round_robin_split(batch))
        self.split(2, 1)
        self.assertTrue(self.compat.can_nsa_prefill_cp_round_robin_split(batch))
        batch.extend_seq_lens_cpu = [0, 0]
        self.assertFalse(self.compat.can_nsa_prefill_cp_round_robin_split(batch))

    def test_nsa_cp_round_robin_split_data(self):
        for rank in range(3):
            self.split(3, rank)
            data = torch.arange(14).view(7, 2)
            self.assertEqual(self.compat.nsa_cp_round_robin_split_data(data).tolist(), data[rank::3].tolist())
            self.assertEqual(self.compat.nsa_cp_round_robin_split_data([4, 5, 6, 7]), [4, 5, 6, 7][rank::3])

    def test_nsa_cp_round_robin_split_q_seqs(self):
        lengths = [3, 1, 0, 6]
        owner = [request for request, length in enumerate(lengths) for _ in range(length)]
        for size in (1, 2, 4):
            for rank in range(size):
                self.split(size, rank)
                mine = owner[rank::size]
                chosen = sorted(set(mine))
                counts, as_tensor, requests, as_indices = self.compat.nsa_cp_round_robin_split_q_seqs(
                    lengths, torch.tensor(lengths)
                )
                self.assertEqual((counts, requests), ([mine.count(request) for request in chosen], chosen))
                self.assertEqual((as_tensor.tolist(), as_indices.tolist()), (counts, requests))
                self.assertEqual((as_tensor.dtype, as_indices.dtype), (torch.int64, torch.int32))

    def step(self, rows, table_rows, columns, splits):
        """Arrays of a step whose contents are their own positions."""
        count = iter(range(1, 1 << 30))

        def array(*shape):
            first = next(count) * 1000
            return (torch.arange(int(np.prod(shape)), dtype=torch.int32) + first).view(*shape)

        return {
            "cache_seqlens": array(3), "cu_seqlens_k": array(4), "table": array(table_rows, columns),
            "nsa_cache_seqlens": array(rows), "seqlens_expanded": array(rows), "nsa_cu_seqlens_k": array(rows + 1),
            "real_page_table": array(table_rows, 2), "num_splits": array(rows + 1) if splits else None,
            "metadata": array(5, 8) if splits else None,
        }  # fmt: skip

    def targets(self, rows, columns):
        full = {name: torch.full((size,), -7, dtype=torch.int32) for name, size in
                (("cache_seqlens", 3), ("cu_seqlens_k", 4), ("nsa_cache_seqlens", rows), ("seqlens_expanded", rows),
                 ("nsa_cu_seqlens_k", rows + 1), ("num_splits", rows + 1))}  # fmt: skip
        tables = torch.full((rows, 2 * columns), -7, dtype=torch.int32)  # rows with a stride of their own
        return full | {"table": tables[:, :columns], "real_page_table": torch.full((rows, 4), -7, dtype=torch.int32),
                       "metadata": torch.full((5, 8), -7, dtype=torch.int32)}  # fmt: skip

    ORDER = ("cache_seqlens", "cu_seqlens_k", "table", "nsa_cache_seqlens", "seqlens_expanded", "nsa_cu_seqlens_k",
             "real_page_table", "num_splits", "metadata")  # fmt: skip

    def check_copy(self, source, target, rows, columns, expanded):
        self.assertEqual(target["cache_seqlens"].tolist(), source["cache_seqlens"].tolist())
        self.assertEqual(target["cu_seqlens_k"].tolist(), [-7] + source["cu_seqlens_k"].tolist()[1:])
        table_rows = source["table"].shape[0]
        self.assertTrue(torch.equal(target["table"][:table_rows, :columns], source["table"][:, :columns]))
        self.assertTrue((target["table"][:table_rows, columns:] == -7).all())
        self.assertTrue(torch.equal(target["real_page_table"][:table_rows, :2], source["real_page_table"]))
        tail = target["nsa_cache_seqlens"].shape[0] - rows
        self.assertEqual(target["nsa_cache_seqlens"].tolist(), source["nsa_cache_seqlens"].tolist() + [0] * tail)
        last = source["nsa_cu_seqlens_k"].tolist()
        self.assertEqual(target["nsa_cu_seqlens_k"].tolist(), [-7] + last[1:] + last[-1:] * tail)
        self.assertEqual((target["seqlens_expanded"] == -7).all().item(), not expanded)
        if source["metadata"] is not None:
            self.assertTrue(torch.equal(target["metadata"], source["metadata"]))
            self.assertEqual(target["num_splits"][: rows + 1].tolist(), source["num_splits"].tolist())

    def test_fused_metadata_copy_cuda(self):
        for mode, rows, table_rows in ((0, 3, 3), (1, 6, 6), (2, 4, 4)):
            for splits in (False, True):
                with self.subTest(mode=mode, splits=splits):
                    source, target = self.step(rows, table_rows, 9, splits), self.targets(8, 16)
                    if not splits:
                        target.update(num_splits=None, metadata=None)
                    arrays = [[step[name] for name in self.ORDER] for step in (source, target)]
                    columns = 7 if mode == 0 else 9
                    self.compat.fused_metadata_copy_cuda(*arrays[0], *arrays[1], mode, 3, 7, 9, rows)
                    self.check_copy(source, target, rows, columns, expanded=mode != 0)
        for change, text in (({"metadata": None}, "flashmla_metadata_dst is missing"),
                             ({"cache_seqlens": i32(1)}, r"cache_seqlens_dst has shape \[1\], expected at least \[3\]"),
                             ({"table": torch.zeros(8, 16)}, "page_table_1_dst is of type torch.float32")):  # fmt: skip
            source, target = self.step(3, 3, 9, True), self.targets(8, 16)
            untouched = target["nsa_cache_seqlens"].clone()
            arrays = [[step[name] for name in self.ORDER] for step in (source, target | change)]
            with self.assertRaisesRegex(fovea.InvalidArgument, f"fused_metadata_copy_cuda: {text}"):
                self.compat.fused_metadata_copy_cuda(*arrays[0], *arrays[1], 0, 3, 7, 9, 3)
            self.assertTrue(torch.equal(target["nsa_cache_seqlens"], untouched))

    def test_fused_metadata_copy_multi_cuda(self):
        order = [name for name in self.ORDER if name != "seqlens_expanded"]
        source, targets = self.step(3, 3, 9, True), [self.targets(rows, 16) for rows in (3, 8, 5)]
        arrays = [step[name] for step in (source, *targets) for name in order]
        self.compat.fused_metadata_copy_multi_cuda(*arrays, 3, 7, 3)
        for target in targets:
            self.check_copy(source, target, 3, 7, expanded=False)

    # The indexer.

    def topk(self, scores, lengths, starts=None):
        lists = []
        for row, length in enumerate(lengths):
            first = 0 if starts is None else int(starts[row])
            window = values(scores[row])[first : first + int(length)]
            best = sorted(np.argsort(-window, kind="stable")[:TOPK].tolist())
            lists.append(best + [-1] * (TOPK - len(best)))
        return lists

    def scores(self, rows):
        return torch.from_numpy(self.server.rng.standard_normal((rows, WIDTH)).astype(np.float32))

    def test_fast_topk_v2(self):
        scores, lengths, starts = self.scores(3), i32(100, 64, 0), i32(5, 0, 9)
        found = self.compat.fast_topk_v2(scores, lengths, TOPK, row_starts=None)
        self.assertEqual(found.tolist(), self.topk(scores, lengths))
        found = self.compat.fast_topk_v2(scores, lengths, TOPK, row_starts=starts)
        self.assertEqual(found.tolist(), self.topk(scores, lengths, starts))
        with self.assertRaisesRegex(fovea.InvalidArgument, r"fast_topk_v2: lengths has shape \[2\], expected \[3\]"):
            self.compat.fast_topk_v2(scores, lengths[:2], TOPK)

    def test_fast_topk_transform_fused(self):
        # Rows of requests 0, 1, 1, 2, and one row of none.
        scores, lengths = self.scores(5), i32(100, 63, 64, 7, 7)
        table = torch.cat([self.server.req_to_token, self.server.req_to_token[:1]])  # of more requests than there are
        found = self.compat.fast_topk_transform_fused(
            score=scores, lengths=lengths, page_table_size_1=table, cu_seqlens_q=i32(0, 1, 3, 4), topk=TOPK,
            row_starts=None,
        )  # fmt: skip
        expected = [[-1 if position < 0 else int(self.server.req_to_token[request, position]) for position in positions]
                    for request, positions in zip((0, 1, 1, 2), self.topk(scores, lengths))]  # fmt: skip
        self.assertEqual(found.tolist(), expected + [[-1] * TOPK])

    def test_fast_topk_transform_ragged_fused(self):
        scores, lengths, offsets, starts = self.scores(3), i32(100, 64, 7), i32(0, 100, 164), i32(0, 3, 90)
        found = self.compat.fast_topk_transform_ragged_fused(
            score=scores, lengths=lengths, topk_indices_offset=offsets, topk=TOPK, row_starts=starts
        )
        expected = [[-1 if position < 0 else position + int(offset) for position in positions]
                    for offset, positions in zip(offsets, self.topk(scores, lengths, starts))]  # fmt: skip
        self.assertEqual(found.tolist(), expected)

    def test_get_num_sms(self):
        self.assertGreaterEqual(self.compat.get_num_sms(), 1)

    def test_get_paged_mqa_logits_metadata(self):
        found = self.compat.get_paged_mqa_logits_metadata(i32(1000, 300, 700), 64, 4)
        self.assertEqual(found.tolist(), [[0, 0], [0, 2], [1, 0], [2, 0], [3, 0]])
        pairs = torch.tensor([[999, 1000], [299, 300], [699, 700]], dtype=torch.int32)
        self.assertTrue(torch.equal(self.compat.get_paged_mqa_logits_metadata(pairs, 64, 4), found))

    def index_inputs(self, rows, keys, width=16):
        random = self.server.random
        q, k = (random(*shape).float().to(torch.float8_e4m3fn) for shape in ((rows, 2, width), (keys, width)))
        scale = torch.rand(keys) + 0.5
        weights = torch.randn(rows, 2)
        dots = np.einsum("thd,sd->ths", values(q), values(k))
        logits = np.einsum("th,ths->ts", values(weights), np.maximum(dots, 0)) * values(scale)
        return q, k, scale, weights, logits

    def test_fp8_mqa_logits(self):
        q, k, scale, weights, logits = self.index_inputs(5, 20)
        start, end = i32(0, 0, 8, 8, 8), i32(5, 8, 17, 20, 8)
        expected = np.full((5, 20), -np.inf)
        for row in range(5):
            expected[row, start[row] : end[row]] = logits[row, start[row] : end[row]]
        found = self.compat.fp8_mqa_logits(q, (k, scale), weights, start, end, clean_logits=True)
        self.assert_close(found, expected, 1e-5)
        compressed = self.compat.fp8_mqa_logits(q, (k, scale), weights, start, end, clean_logits=False, max_seqlen_k=9)
        for row in range(5):
            window = expected[row, start[row] : end[row]][:9]
            self.assert_close(compressed[row, : len(window)], window, 1e-5)
        with self.assertRaisesRegex(fovea.InvalidArgument, "fp8_mqa_logits: kv is of type Tensor"):
            self.compat.fp8_mqa_logits(q, k, weights, start, end)

    def test_fp8_mqa_logits_in_parts(self):
        from fovea.compat import _index

        q, k, scale, weights, _ = self.index_inputs(7, 20)
        start, end = torch.zeros(7, dtype=torch.int32), torch.arange(14, 21, dtype=torch.int32)
        whole = self.compat.fp8_mqa_logits(q, (k, scale), weights, start, end)
        before, _index._MOVED_AT_ONCE = _index._MOVED_AT_ONCE, 40
        try:
            self.assertTrue(torch.equal(self.compat.fp8_mqa_logits(q, (k, scale), weights, start, end), whole))
        finally:
            _index._MOVED_AT_ONCE = before

    def test_fp8_paged_mqa_logits(self):
        page, width, per_request = 8, 16, 2
        q, k, scale, weights, logits = self.index_inputs(3 * per_request, 48)
        whole = torch.zeros(6, 2, page * (width + 4), dtype=torch.uint8)  # every other page belongs to somebody else
        cache = whole[:, 0].view(6, page, 1, width + 4)
        pool = whole[:, 0]
        pool[:, : page * width] = k.view(torch.uint8).view(6, page * width)
        pool[:, page * width :] = scale.view(6, page).view(torch.uint8)
        tables = torch.tensor([[5, 2], [0, 9], [3, 1]], dtype=torch.int32)
        lengths = i32(16, 7, 1)
        schedule = self.compat.get_paged_mqa_logits_metadata(lengths, page, self.compat.get_num_sms())
        arguments = (q.view(3, per_request, 2, width), cache, weights)
        found = self.compat.fp8_paged_mqa_logits(*arguments, lengths, tables, schedule, 20, clean_logits=True)
        self.assertEqual(list(found.shape), [6, 20])
        expected = np.full((6, 20), -np.inf)
        for row in range(6):
            request = row // per_request
            for position in range(int(lengths[request]) - 1 + row % per_request):
                slot = int(tables[request, position // page]) * page + position % page
                expected[row, position] = logits[row, slot]
        self.assert_close(found, expected, 1e-5)
        each = torch.tensor([[15, 16], [6, 7], [0, 1]], dtype=torch.int32)
        same = self.compat.fp8_paged_mqa_logits(*arguments, each, tables, None, 20, clean_logits=True)
        self.assertTrue(torch.equal(same, found))

    def test_transform_index_page_table_decode(self):
        table, positions = self.server.req_to_token, torch.tensor([[0, 99, -1], [WIDTH, 5, 2], [7, -1, -1], [1, 2, 3]])
        found = self.compat.transform_index_page_table_decode(
            page_table=table, topk_indices=positions.to(torch.int32), page_size=1
        )
        expected = [[int(table[0, 0]), int(table[0, 99]), -1], [-1, int(table[1, 5]), int(table[1, 2])],
                    [int(table[2, 7]), -1, -1], [-1, -1, -1]]  # fmt: skip
        self.assertEqual(found.tolist(), expected)
        with self.assertRaisesRegex(fovea.InvalidArgument, "page_table has 3 rows, expected at most the 2"):
            self.compat.transform_index_page_table_decode(page_table=table, topk_indices=positions[:2].to(torch.int32))

    def test_transform_index_page_table_prefill(self):
        table, positions = self.server.req_to_token, torch.arange(10, dtype=torch.int32).view(5, 2)
        found = self.compat.transform_index_page_table_prefill(
            page_table=table, topk_indices=positions, extend_lens_cpu=[2, 0, 2], page_size=1
        )
        expected = [[int(table[request, position]) for position in row]
                    for request, row in zip((0, 0, 2, 2), positions.tolist())]  # fmt: skip
        self.assertEqual(found.tolist(), expected + [[-1, -1]])

    # Latent attention.

    def test_concat_mla_absorb_q_general(self):
        q_nope, q_rope = self.server.query()
        found = self.compat.concat_mla_absorb_q_general(q_nope, q_rope)
        self.assertTrue(torch.equal(found, self.joined(q_nope, q_rope)))
        found = self.compat.concat_mla_absorb_q_general(q_nope[..., :3], q_rope)
        self.assertEqual(list(found.shape), [3, HEADS, 3 + ROPE])

    def test_get_mla_metadata(self):
        def plan(lengths):
            return self.compat.get_mla_metadata(
                cache_seqlens=lengths, num_q_tokens_per_head_k=HEADS, num_heads_k=1, num_heads_q=HEADS,
                is_fp8_kvcache=True, topk=TOPK,
            )  # fmt: skip

        # As the engine keeps it: made for the most rows, then a whole table and leading counts of fewer copied in.
        table, num_splits = plan(torch.ones(9, dtype=torch.int32))
        live_table, live_splits = plan(i32(64, 3, 0))
        self.assertEqual(live_table.shape, table.shape)
        self.assertEqual((list(num_splits.shape), list(live_splits.shape)), ([10], [4]))
        table.copy_(live_table)
        num_splits[:4].copy_(live_splits)
        self.assertEqual(int(live_splits[0]), 0)
        self.assertTrue((live_splits.diff() >= 1).all())
        q_nope, q_rope = self.server.query()
        arguments = self.kv_arguments(q_nope, q_rope, self.server.selection())
        copied = self.compat.flash_mla_with_kvcache(tile_scheduler_metadata=table, num_splits=num_splits[:4], **arguments)
        fresh = self.compat.flash_mla_with_kvcache(tile_scheduler_metadata=live_table, num_splits=live_splits, **arguments)
        self.assertTrue(torch.equal(copied[0], fresh[0]))
        with self.assertRaisesRegex(fovea.InvalidArgument, r"num_splits has shape \[10\], expected \[4\]"):
            self.compat.flash_mla_with_kvcache(tile_scheduler_metadata=table, num_splits=num_splits, **arguments)

    def kv_arguments(self, q_nope, q_rope, page_table_1):
        q_all = self.joined(q_nope, q_rope).view(-1, 1, HEADS, DIM)
        kv_cache = self.compat.quantize_k_cache(self.server.pool.view(-1, PAGE, 1, DIM))
        lengths = self.compat.compute_nsa_seqlens(self.server.seq_lens, TOPK)
        return {
            "q": q_all, "k_cache": kv_cache, "cache_seqlens": lengths, "head_dim_v": LATENT, "softmax_scale": SCALE,
            "indices": page_table_1.unsqueeze(1), "is_fp8_kvcache": True,
            "block_table": torch.empty((q_all.shape[0], 0), dtype=torch.int32, device=q_all.device),
        }  # fmt: skip

    def test_flash_mla_with_kvcache(self):
        (q_nope, q_rope), lists = self.server.query(), self.server.selection()
        lists[2] = -1
        arguments = self.kv_arguments(q_nope, q_rope, lists)
        metadata, num_splits = self.compat.get_mla_metadata(arguments["cache_seqlens"], HEADS, 1, HEADS, True, TOPK)
        out, lse = self.compat.flash_mla_with_kvcache(
            tile_scheduler_metadata=metadata, num_splits=num_splits, **arguments
        )
        rows = self.compat.dequantize_k_cache_paged(arguments["k_cache"], torch.arange(PAGES * PAGE, dtype=torch.int32))
        expected, expected_lse = self.server.expected(arguments["q"][:, 0], lists, values(rows[:, 0]))
        expected_lse[2] = np.inf
        self.assertEqual((list(out.shape), list(lse.shape)), ([3, 1, HEADS, LATENT], [3, HEADS, 1]))
        self.assert_close(out[:, 0].float(), expected, 2e-2)
        self.assert_close(lse[:, :, 0], expected_lse, 1e-3)
        with self.assertRaisesRegex(fovea.InvalidArgument, "causal = True with indices"):
            self.compat.flash_mla_with_kvcache(
                tile_scheduler_metadata=metadata, num_splits=num_splits, causal=True, **arguments
            )
        bf16 = arguments | {"k_cache": self.server.pool.view(-1, PAGE, 1, DIM), "is_fp8_kvcache": False}
        out, _ = self.compat.flash_mla_with_kvcache(tile_scheduler_metadata=None, num_splits=None, **bf16)
        self.assert_close(out[:, 0].float(), self.server.expected(arguments["q"][:, 0], lists)[0], 2e-2)

    def test_caches_are_read_where_they_are(self):
        lists = self.server.selection()
        arguments = self.kv_arguments(*self.server.query(), lists)
        arguments.update(tile_scheduler_metadata=None, num_splits=None)
        expected, _ = self.compat.flash_mla_with_kvcache(**arguments)
        packed = arguments["k_cache"]
        wide = torch.full((PAGES, PAGE * 656 + 80), 127, dtype=torch.uint8)  # bytes of nobody behind every page
        distant = wide[:, : PAGE * 656].view(PAGES, PAGE, 1, 656)
        distant.copy_(packed.view(torch.uint8))
        for cache in (distant, distant.view(torch.float8_e4m3fn)):
            out, _ = self.compat.flash_mla_with_kvcache(**(arguments | {"k_cache": cache}))
            self.assertTrue(torch.equal(out, expected))
        with self.assertRaisesRegex(fovea.InvalidArgument, "k_cache has shape .* which is no view"):
            self.compat.flash_mla_with_kvcache(**(arguments | {"k_cache": packed.transpose(0, 1)}))
        with self.assertRaisesRegex(fovea.InvalidArgument, "a token of the cache has 600 bytes"):
            self.compat.flash_mla_with_kvcache(**(arguments | {"k_cache": packed[..., :600]}))
        with self.assertRaisesRegex(fovea.InvalidArgument, "is_fp8_kvcache = False, but k_cache is of type"):
            self.compat.flash_mla_with_kvcache(**(arguments | {"is_fp8_kvcache": False}))

    def test_flash_mla_with_kvcache_dense(self):
        q = self.server.random(3, 2, HEADS, DIM)
        cache, tables = self.server.pool.view(-1, PAGE, 1, DIM), self.server.req_to_token[:, ::PAGE] // PAGE
        lengths = i32(100, 1, 0)
        out, lse = self.compat.flash_mla_with_kvcache(
            q, cache, tables, lengths, LATENT, *self.compat.get_mla_metadata(lengths, 2 * HEADS, 1),
            softmax_scale=SCALE, causal=True,
        )  # fmt: skip
        lists = [self.server.req_to_token[b, : max(int(lengths[b]) - 1 + s, 0)].tolist() for b in range(3) for s in range(2)]
        expected, expected_lse = self.server.expected(q.view(6, HEADS, DIM), lists)
        expected_lse[np.isinf(expected_lse)] = np.inf
        self.assert_close(out.view(6, HEADS, LATENT).float(), expected, 2e-2)
        self.assert_close(lse.transpose(1, 2).reshape(6, HEADS), expected_lse, 1e-3)

    def test_flash_mla_sparse_fwd(self):
        (q_nope, q_rope), lists = self.server.query(), self.server.selection()
        lists[1] = PAGES * PAGE  # beyond the keys
        q_all = self.joined(q_nope, q_rope)
        padded = q_all.new_zeros((3, 64, DIM))  # as an engine pads heads
        padded[:, :HEADS] = q_all
        for q in (padded, q_all):
            out, max_logits, lse = self.compat.flash_mla_sparse_fwd(
                q=q, kv=self.server.pool, indices=lists.unsqueeze(1), sm_scale=SCALE, d_v=LATENT
            )
            expected, expected_lse = self.server.expected(q_all, lists)
            self.assert_close(out[:, :HEADS].float(), expected, 2e-2)
            self.assert_close(lse[:, :HEADS], expected_lse / np.log(2), 2e-3)
            top = [(values(self.server.pool[row[row >= 0], 0]) @ values(q_all[t]).T).max(0) * SCALE / np.log(2)
                   for t, row in ((0, lists[0]), (2, lists[2]))]  # fmt: skip
            self.assert_close(max_logits[[0, 2], :HEADS], np.array(top), 2e-3)
            self.assertTrue((max_logits[1] == -torch.inf).all())

    def test_tilelang_sparse_fwd(self):
        (q_nope, q_rope), lists = self.server.query(), self.server.selection()
        q_all = self.joined(q_nope, q_rope)
        arguments = {"q": q_all, "kv": self.server.pool, "indices": lists.unsqueeze(1), "sm_scale": SCALE, "d_v": LATENT}
        out = self.compat.tilelang_sparse_fwd(**arguments)
        self.assertEqual(list(out.shape), [1, 3, HEADS, LATENT])
        self.assertTrue(torch.equal(out[0], self.compat.flash_mla_sparse_fwd(**arguments)[0]))

    def test_flash_attn_with_kvcache(self):
        (q_nope, q_rope), lists = self.server.query(), self.server.selection()
        lists[0, 5] = -1
        kv_cache = self.server.pool
        lengths = self.compat.compute_nsa_seqlens(self.server.seq_lens, TOPK)
        lists[2, int(lengths[2]) :] = 3  # nothing behind a length is read
        arguments = {
            "q": q_rope, "k_cache": kv_cache[:, :, LATENT:].view(-1, 1, 1, ROPE),
            "v_cache": kv_cache[:, :, :LATENT].view(-1, 1, 1, LATENT), "qv": q_nope, "page_table": lists,
            "cache_seqlens": lengths, "cu_seqlens_q": torch.arange(4, dtype=torch.int32),
            "cu_seqlens_k_new": self.compat.compute_cu_seqlens(lengths), "max_seqlen_q": 1, "softmax_scale": SCALE,
            "causal": True,
        }  # fmt: skip
        seen = [row[:length] for row, length in zip(lists.tolist(), lengths.tolist())]
        q_all = self.joined(q_nope, q_rope)
        for cap, splits in ((0.0, 0), (0.0, 1), (2.0, 1)):
            out = self.compat.flash_attn_with_kvcache(softcap=cap, return_softmax_lse=False, num_splits=splits, **arguments)
            self.assert_close(out.float(), self.server.expected(q_all, seen, cap=cap)[0], 2e-2)
        _, lse = self.compat.flash_attn_with_kvcache(return_softmax_lse=True, **arguments)
        self.assert_close(lse, self.server.expected(q_all, seen)[1].T, 1e-3)
        for change, text in (({"window_size": (5, 0)}, r"window_size = \(5, 0\) is not offered"),
                             ({"qv": None}, "qv is missing"), ({"k": q_rope}, "k = a tensor")):  # fmt: skip
            with self.assertRaisesRegex(fovea.Unsupported, f"flash_attn_with_kvcache: {text}"):
                self.compat.flash_attn_with_kvcache(**(arguments | change))
        copy = arguments["k_cache"].clone()
        with self.assertRaisesRegex(fovea.Unsupported, "are not the last 64 and first 512 channels of the same rows"):
            self.compat.flash_attn_with_kvcache(**(arguments | {"k_cache": copy}))

    def test_flash_attn_with_kvcache_pages(self):
        q_nope, q_rope = self.server.random(5, HEADS, LATENT), self.server.random(5, HEADS, ROPE)
        cache = self.server.pool.view(-1, PAGE, 1, DIM)
        lengths, indptr = i32(100, 0, 7), i32(0, 3, 4, 5)
        out, lse = self.compat.flash_attn_with_kvcache(
            q_rope, cache[..., LATENT:], cache[..., :LATENT], qv=q_nope, cache_seqlens=lengths,
            page_table=self.server.req_to_token[:, ::PAGE] // PAGE, cu_seqlens_q=indptr, max_seqlen_q=3,
            softmax_scale=SCALE, causal=True, return_softmax_lse=True,
        )  # fmt: skip
        seen = [(0, 98), (0, 99), (0, 100), (1, 0), (2, 7)]
        lists = [self.server.req_to_token[request, :count].tolist() for request, count in seen]
        expected, expected_lse = self.server.expected(self.joined(q_nope, q_rope), lists)
        self.assert_close(out.float(), expected, 2e-2)
        self.assert_close(lse, expected_lse.T, 1e-3)

    def dense_inputs(self):
        random = self.server.random
        q, k, v = random(6, HEADS, 192), random(9, HEADS, 192), random(9, HEADS, 128)
        indptr_q, indptr_k = i32(0, 2, 6), i32(0, 5, 9)
        out, lse = np.zeros((6, HEADS, 128)), np.zeros((6, HEADS))
        for request in range(2):
            rows, keys = (slice(int(p[request]), int(p[request + 1])) for p in (indptr_q, indptr_k))
            count, total = rows.stop - rows.start, keys.stop - keys.start
            for i in range(count):
                visible = slice(keys.start, keys.start + total - count + i + 1)
                for head in range(HEADS):
                    scores = values(k[visible, head]) @ values(q[rows.start + i, head]) * SCALE
                    at = (rows.start + i, head)
                    out[at], lse[at] = attend(scores, values(v[visible, head]))
        return (q, k, v), (indptr_q, indptr_k), out, lse

    def test_flash_attn_varlen_func(self):
        (q, k, v), (indptr_q, indptr_k), expected, expected_lse = self.dense_inputs()
        arguments = {"cu_seqlens_q": indptr_q, "cu_seqlens_k": indptr_k, "max_seqlen_q": 4, "max_seqlen_k": 5,
                     "softmax_scale": SCALE, "causal": True, "ver": 3}  # fmt: skip
        self.assert_close(self.compat.flash_attn_varlen_func(q=q, k=k, v=v, **arguments).float(), expected, 2e-2)
        _, lse = self.compat.flash_attn_varlen_func(q=q, k=k, v=v, return_softmax_lse=True, **arguments)
        self.assert_close(lse, expected_lse.T, 1e-3)
        with self.assertRaisesRegex(fovea.Unsupported, "k has 2 heads and q 4"):
            self.compat.flash_attn_varlen_func(q=q, k=k[:, :2], v=v[:, :2], **arguments)

    def test_trtllm_ragged_attention_deepseek(self):
        (q, k, v), (indptr_q, indptr_k), expected, expected_lse = self.dense_inputs()
        arguments = {
            "query": q, "key": k, "value": v, "workspace_buffer": torch.empty(8, dtype=torch.uint8),
            "seq_lens": indptr_k.diff(), "max_q_len": 4, "max_kv_len": 5, "bmm1_scale": SCALE, "bmm2_scale": 1.0,
            "o_sf_scale": 1.0, "batch_size": 2, "window_left": -1, "cum_seq_lens_q": indptr_q,
            "cum_seq_lens_kv": indptr_k, "enable_pdl": False, "is_causal": True,
        }  # fmt: skip
        out = self.compat.trtllm_ragged_attention_deepseek(return_lse=False, **arguments)
        self.assert_close(out.float(), expected, 2e-2)
        given = torch.zeros_like(out)
        out, lse = self.compat.trtllm_ragged_attention_deepseek(return_lse=True, out=given, **arguments)
        self.assertIs(out, given)
        self.assert_close(lse, expected_lse, 1e-3)
        with self.assertRaisesRegex(fovea.Unsupported, "window_left = 7 is not offered"):
            self.compat.trtllm_ragged_attention_deepseek(return_lse=False, **(arguments | {"window_left": 7}))

    def trtllm(self, query, cache, tables, lengths, **options):
        return self.compat.trtllm_batch_decode_with_kv_cache_mla(
            query=query, kv_cache=cache, workspace_buffer=torch.empty(8, dtype=torch.uint8), qk_nope_head_dim=128,
            kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, block_tables=tables, seq_lens=lengths, max_seq_len=WIDTH,
            backend="trtllm-gen", **options,
        )  # fmt: skip

    def test_trtllm_batch_decode_with_kv_cache_mla(self):
        (q_nope, q_rope), lists = self.server.query(), self.server.selection()
        query, cache = self.joined(q_nope, q_rope).view(3, 1, HEADS, DIM), self.server.pool.view(-1, 1, PAGE, DIM)
        expected = self.server.expected(query[:, 0], lists)[0]
        sparse = {"sparse_mla_top_k": TOPK, "bmm1_scale": SCALE}
        out = self.trtllm(query, cache, lists.unsqueeze(1), self.server.seq_lens, **sparse)
        self.assertEqual(list(out.shape), [3, 1, HEADS, LATENT])
        self.assert_close(out.squeeze(1).float(), expected, 2e-2)
        # Codes with one scale for the cache: on the logits and on the values.
        codes = [(tensor.float() * factor).to(torch.float8_e4m3fn) for tensor, factor in ((query, 1.0), (cache, 4.0))]
        rows = values(codes[1].view(-1, DIM)) / 4
        expected = self.server.expected(codes[0][:, 0].float(), lists, rows)[0]
        scales = sparse | {"bmm1_scale": SCALE / 4, "bmm2_scale": 0.25}
        out = self.trtllm(*codes, lists.unsqueeze(1), self.server.seq_lens, **scales)
        self.assert_close(out.squeeze(1).float(), expected, 2e-2)
        # Every key of a request, through pages.
        pages = self.server.req_to_token[:, ::PAGE] // PAGE
        lists = [self.server.req_to_token[b, :length].tolist() for b, length in enumerate(self.server.seq_lens.tolist())]
        out = self.trtllm(query, cache, pages, self.server.seq_lens, bmm1_scale=SCALE)
        self.assert_close(out.squeeze(1).float(), self.server.expected(query[:, 0], lists)[0], 2e-2)
        with self.assertRaisesRegex(fovea.Unsupported, "bmm2_scale = 2.0 is not offered"):
            self.trtllm(query, cache, pages, self.server.seq_lens, bmm2_scale=2.0)

    def test_mla_decode_fwd(self):
        (q_nope, q_rope), page_table_1 = self.server.query(), self.server.selection()
        page_table_1[1] = -1
        q_all = self.joined(q_nope, q_rope)
        q = q_all.reshape(-1, HEADS * DIM)
        o = q.new_empty((3, HEADS * LATENT))
        kv_indptr = torch.zeros(9, dtype=torch.int32)  # of the engine's largest batch
        kv_indptr[1:4] = torch.cumsum((page_table_1 != -1).sum(dim=1), dim=0)
        iota = torch.arange(4, dtype=torch.int32)
        _, lse = self.compat.mla_decode_fwd(
            q.view(-1, HEADS, DIM), self.server.pool.view(-1, 1, 1, DIM), o.view(-1, HEADS, LATENT), iota, kv_indptr,
            page_table_1[page_table_1 != -1], iota, 1, SCALE, 0.0,
        )  # fmt: skip
        expected, expected_lse = self.server.expected(q_all, page_table_1)
        self.assert_close(o.view(-1, HEADS, LATENT).float(), expected, 2e-2)
        self.assert_close(lse, expected_lse, 1e-3)

    # Rows of the cache.

    def test_quantize_k_cache(self):
        cache = self.server.pool.view(-1, PAGE, 1, DIM).clone()
        cache[0, 0, 0, :LATENT] = 0
        found = self.compat.quantize_k_cache(cache)
        self.assertEqual((list(found.shape), found.dtype), ([PAGES, PAGE, 1, 656], torch.float8_e4m3fn))
        rows = found.view(torch.uint8).view(-1, 656)
        scales = rows[:, LATENT : LATENT + 16].contiguous().view(torch.float32)
        tiles = cache.view(-1, DIM)[:, :LATENT].float().view(-1, 4, 128)
        expected = tiles.abs().amax(-1) / 448
        expected[0] = 1
        self.assertTrue(torch.equal(scales, expected))
        self.assertTrue(torch.equal(rows[:, LATENT + 16 :].contiguous().view(torch.bfloat16), cache.view(-1, DIM)[:, LATENT:]))
        codes = (tiles / scales[..., None]).to(torch.float8_e4m3fn)
        self.assertTrue(torch.equal(rows[:, :LATENT], codes.view(torch.uint8).view(-1, LATENT)))
        flat = self.compat.quantize_k_cache(cache.view(-1, 1, DIM))
        self.assertTrue(torch.equal(flat.view(torch.uint8).view(-1, 656), rows))

    def test_dequantize_k_cache_paged(self):
        cache = self.compat.quantize_k_cache(self.server.pool)
        slots = i32(5, 0, 5, PAGES * PAGE, -1)
        found = self.compat.dequantize_k_cache_paged(cache, slots)
        self.assertEqual((list(found.shape), found.dtype), ([5, 1, DIM], torch.bfloat16))
        self.assert_close(found[:3].float(), values(self.server.pool[[5, 0, 5]]), 0.1)
        self.assertTrue((found[3:] == 0).all())
        paged = self.compat.dequantize_k_cache_paged(cache.view(-1, PAGE, 1, 656), slots)
        self.assertTrue(torch.equal(paged, found))

    def test_mla_quantize_and_rope_for_fp8(self):
        (q_nope, q_rope), k_nope, k_rope = self.server.query(), self.server.random(3, LATENT), self.server.random(3, ROPE)
        positions, angles = torch.tensor([0, 3, 7]), torch.rand(8, ROPE // 2) * 6
        table = torch.cat([angles.cos(), angles.sin()], dim=-1)
        for is_neox in (False, True):
            q, k, rope = self.compat.mla_quantize_and_rope_for_fp8(
                q_nope, q_rope, k_nope, k_rope, positions, table, is_neox, LATENT, ROPE
            )
            cos, sin = (values(part)[positions] for part in (angles.cos(), angles.sin()))
            first, second = (slice(0, 32), slice(32, 64)) if is_neox else (slice(0, 64, 2), slice(1, 64, 2))
            for found, given, turn in ((q[..., LATENT:], q_rope, (cos[:, None], sin[:, None])), (rope, k_rope, (cos, sin))):
                a, b = values(given)[..., first], values(given)[..., second]
                expected = np.zeros(given.shape)
                expected[..., first] = a * turn[0] - b * turn[1]
                expected[..., second] = b * turn[0] + a * turn[1]
                self.assert_close(found.float(), expected, 0.07)
            self.assertTrue(torch.equal(q[..., :LATENT].float(), q_nope.float().to(torch.float8_e4m3fn).float()))
            self.assertEqual((list(k.shape), k.dtype, list(rope.shape)), ([3, LATENT], torch.float8_e4m3fn, [3, ROPE]))

    @unittest.skipUnless(DOCS.is_dir(), "the documentation is not beside the tests")
    def test_there_is_one_test_for_every_name_of_the_page(self):
        page = (DOCS / "sglang-dsa.md").read_text()
        table = page.split("## Functions of other files that it uses", 1)[1].split("\n## ", 1)[0]
        rows = [line for line in table.splitlines() if line.startswith("| `")]
        names = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
        left_out = set(re.findall(r"`(\w+)`", (DOCS / "README.md").read_text().split("## Not offered", 1)[1]))
        self.assertGreater(len(names), 30)
        for name in names - left_out:
            self.assertTrue(hasattr(fovea.compat, name), name)
            self.assertTrue(hasattr(self, f"test_{name}"), name)
        self.assertEqual({name for name in names & left_out if hasattr(fovea.compat, name)}, set())


if __name__ == "__main__":
    unittest.main()
