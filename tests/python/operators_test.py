"""Operators through numpy arrays, against formulas in fp64 and against the reference implementation."""

import unittest

import numpy as np

import fovea
from calls import legal_calls
from support import BF16, Case, attend, bf16, e4m3_values, f64


def i32(values):
    return np.array(values, np.int32)


class CacheTest(Case):
    def test_packing_and_reading_v32_rows_keeps_them_within_an_fp8_step(self):
        rng = np.random.default_rng(1)
        src, pool = bf16(rng, 5, 576), np.zeros((3, 4 * 656), np.uint8)
        slots = i32([7, 0, -1, 11, 3])
        fovea.pack_rows(src, slots, pool, "v32", page_size=4)
        out = fovea.unpack_rows(pool, slots, "v32", page_size=4)
        expected = f64(src)
        expected[2] = 0  # slot -1
        self.assertEqual(out.dtype, BF16)
        self.assert_same(out[:, 512:][[0, 1, 3, 4]], src[:, 512:][[0, 1, 3, 4]])
        tile = np.abs(expected[:, :512]).reshape(5, 4, 128).max(-1).repeat(128, -1)
        self.assertTrue((np.abs(f64(out)[:, :512] - expected[:, :512]) <= tile / 448 * 32).all())

    def test_bytes_equal_those_of_the_reference(self):
        rng = np.random.default_rng(2)
        src, slots = bf16(rng, 6, 128, scale=3), i32([0, 1, 2, 3, 6, 7])
        pools = [np.zeros((2, 4 * 132), np.uint8) for _ in range(2)]
        for pool, impl in zip(pools, (None, "ref")):
            fovea.pack_rows(src, slots, pool, "i132", page_size=4, scale_mode="pow2", impl=impl)
        self.assert_same(*pools)

    def test_rows_move_within_a_pool(self):
        pool = np.arange(4).astype(BF16).reshape(4, 1)
        self.assertIsNone(fovea.move_rows(i32([1, 2, 3]), i32([0, 1, 2]), pool, "bf16"))
        self.assertEqual(f64(pool).ravel().tolist(), [1, 2, 3, 3])


class BatchTest(Case):
    def test_the_example_of_the_documentation(self):
        req_to_token = np.zeros((2, 12), np.int32)
        for request, pages in enumerate([[2, 5, 7], [3, 0, 0]]):
            req_to_token[request] = (np.array(pages)[:, None] * 4 + np.arange(4)).ravel()
        fields = fovea.metadata_refresh(
            i32([10, 4]), i32([0, 1]), req_to_token, "extend", 6, 4, ext_len=i32([3, 2])
        )
        self.assertEqual(fields["kv_indptr"].tolist(), [0, 10, 14])
        self.assertEqual(fields["page_table"][0].tolist(), [2, 5, 7])
        self.assertEqual(fields["page_table"][1, 0], 3)
        self.assertEqual(fields["row_len"].tolist(), [8, 9, 10, 3, 4])
        self.assertEqual(fields["topk_length"].tolist(), [6, 6, 6, 3, 4])
        self.assertEqual(fields["k_start"].tolist(), [0, 0, 0, 10, 10])
        self.assertEqual(fields["k_end"].tolist(), [8, 9, 10, 13, 14])
        self.assertNotIn("schedule", fields)

    def test_a_slot_outside_the_pools_is_reported(self):
        arguments = i32([3]), i32([0]), i32([[0, 1, 90, 0]]), "decode", 1, 8
        word = fovea.metadata_check(*arguments)
        self.assertEqual(word.tolist()[:6], [7, 0, 2, 90, 8, 1])

    def test_schedules(self):
        schedule = fovea.paged_schedule(i32([1000, 300, 700]), 4)
        self.assertEqual(schedule.tolist(), [[0, 0], [0, 2], [1, 0], [2, 0], [3, 0]])
        plan, indptr = fovea.split_schedule(i32([2048, 0, 64]), 4)
        reference = fovea.split_schedule(i32([2048, 0, 64]), 4, impl="ref")
        self.assert_same(plan, reference[0])
        self.assert_same(indptr, reference[1])
        self.assertEqual(plan.shape, (4, 8))

    def test_rows_of_a_rank(self):
        part = fovea.context_split(i32([1, 1, 3]), i32([1, 1, 3]), 4, 0, "round_robin")
        expected = {"rank_rows": [0, 4], "selected": [0, 2], "k_start": [0, 1], "k_end": [1, 4], "kv_indptr": [0, 1, 4]}
        for name, values in expected.items():
            self.assertEqual(part[name].tolist(), values, name)
        zigzag = fovea.context_split(i32([10]), i32([10]), 2, 0, "zigzag")
        self.assertEqual(zigzag["block_len"].tolist(), [3, 3, 2, 2])
        self.assertEqual(zigzag["kv_len"].tolist(), [3, 10])


class IndexTest(Case):
    def test_topk_is_ascending_and_ties_go_to_the_smaller_position(self):
        rng = np.random.default_rng(3)
        logits = rng.integers(-3, 4, (9, 50)).astype(np.float32)
        logits[4, 7] = np.nan
        row_len = i32([50, 49, 0, 5, 50, 50, 3, 10, 50])
        indices = fovea.topk_select(logits, row_len, 6)
        for row, length in enumerate(row_len):
            keys = np.where(np.isnan(logits[row, :length]), -np.inf, logits[row, :length])
            best = sorted(sorted(range(length), key=lambda j: (-keys[j], j))[:6])
            self.assertEqual(indices[row].tolist(), best + [-1] * (6 - len(best)), row)

    def test_row_start_and_transforms(self):
        logits = np.array([[9, 1, 5, 4, 7, 0]], np.float32)
        window = {"row_start": i32([1])}
        self.assertEqual(fovea.topk_select(logits, i32([4]), 2, **window).tolist(), [[1, 3]])
        ragged = fovea.topk_select(logits, i32([4]), 2, **window, transform="ragged", row_offset=i32([100]))
        self.assertEqual(ragged.tolist(), [[101, 103]])
        paged = fovea.topk_select(
            logits, i32([6]), 2, transform="paged", page_table=i32([[5, 3]]), row_to_request=i32([0]), page_size=4
        )
        self.assertEqual(paged.tolist(), [[20, 12]])

    def test_keys_go_to_the_cache_and_come_back(self):
        rng = np.random.default_rng(17)
        codes, scales = rng.integers(0, 256, (6, 128)).astype(np.uint8), rng.standard_normal(6).astype(np.float32)
        for slot_type in (np.int32, np.int64):
            pool = np.full((3, 4 * 132 + 5), 9, np.uint8)
            slots = np.array([8, 9, 10, -1, 4, 99], slot_type)
            self.assertIsNone(fovea.index_store(codes, scales, slots, pool, 4))
            self.assertTrue((pool[0] == 9).all() and (pool[:, 4 * 132 :] == 9).all())
            self.assert_same(pool[2, :384].reshape(3, 128), codes[:3])
            self.assert_same(pool[2, 512:524].view(np.float32), scales[:3])
            k_fp8, k_scale = fovea.index_gather(pool, i32([[2, 0], [1, 77]]), i32([0, 3, 8]), 4)
            self.assert_same(k_fp8[:3], codes[:3])
            self.assert_same(k_scale[:4], np.append(scales[:3], scales[4]))
            self.assertEqual(k_fp8[7:].any() or k_scale[7:].any(), False)  # a page outside the pool
            wide = np.full((10, 128), 7, np.uint8)
            k_fp8, _ = fovea.index_gather(
                pool, i32([[2, 0], [1, 77]]), i32([0, 3, 8]), 4, out={"k_fp8": wide, "k_scale": np.zeros(10, np.float32)}
            )
            self.assertTrue((wide[8:] == 7).all())

    def quantised(self, rows=7, keys=40, heads=4, dim=128):
        rng = np.random.default_rng(4)
        cos_sin = np.concatenate([np.ones((64, 32)), np.zeros((64, 32))], 1).astype(np.float32)  # no rotation

        def quantize(count):
            return fovea.index_quantize(
                bf16(rng, count, heads, dim), bf16(rng, count, dim), np.ones(dim, np.float32),
                np.zeros(dim, np.float32), np.ones((count, heads), np.float32), np.arange(count, dtype=np.int32),
                cos_sin, "half_split", "fp32",
            )  # fmt: skip

        return quantize(rows), quantize(keys)

    def test_logits_follow_the_formula(self):
        query, key = self.quantised()
        arguments = {"k_fp8": key.k_fp8, "k_scale": key.k_scale, "k_start": i32([0] * 7), "k_end": i32([40] * 7)}
        logits = fovea.index_logits(query.q_fp8, query.head_weight, "ragged", **arguments)
        products = np.einsum("thd,jd->thj", e4m3_values(query.q_fp8), e4m3_values(key.k_fp8))
        expected = np.einsum("th,thj->tj", f64(query.head_weight), np.maximum(products, 0)) * f64(key.k_scale)
        self.assertEqual(logits.shape, (7, 40))
        self.assert_close(logits / np.abs(expected).max(), expected / np.abs(expected).max(), 1e-5)
        selection = fovea.index_select(query.q_fp8, query.head_weight, "ragged", 5, **arguments)
        self.assert_same(selection, fovea.topk_select(logits, i32([40] * 7), 5))

    def test_quantisation_of_a_query(self):
        query, _ = self.quantised()
        amax = (e4m3_values(query.q_fp8) * f64(query.q_scale)[..., None]).max()
        self.assertGreater(amax, 1)  # values of a normal distribution
        self.assertEqual(np.abs(e4m3_values(query.q_fp8)).max(-1).min(), 448)
        self.assert_close(query.head_weight, f64(query.q_scale) * 4**-0.5 * 128**-0.5, 1e-6)

    def test_paged_logits_reach_as_far_as_the_table(self):
        query, key = self.quantised()
        pool = np.zeros((12, 4 * 132), np.uint8)
        table = i32([list(range(1, 11)), [11] + [0] * 9])
        for token in range(40):
            page, offset = table[0, token // 4], token % 4
            pool[page, offset * 128 : offset * 128 + 128] = key.k_fp8[token]
            pool[page, 512 + offset * 4 : 516 + offset * 4] = key.k_scale[token : token + 1].view(np.uint8)
        rows = {"page_table": table, "row_to_request": i32([0] * 7), "row_len": i32([40, 39, 1, 0, 17, 40, 8])}
        logits = fovea.index_logits(query.q_fp8, query.head_weight, "paged", index_pool=pool, page_size=4, **rows)
        self.assertEqual(logits.shape, (7, 40))
        ragged = fovea.index_logits(
            query.q_fp8, query.head_weight, "ragged", k_fp8=key.k_fp8, k_scale=key.k_scale,
            k_start=i32([0] * 7), k_end=rows["row_len"],
        )  # fmt: skip
        for row, length in enumerate(rows["row_len"]):
            self.assert_same(logits[row, :length], ragged[row, :length])


class MlaTest(Case):
    def test_sparse_attention_follows_the_formula(self):
        rng = np.random.default_rng(5)
        q, kv, sink = bf16(rng, 4, 3, 576), bf16(rng, 30, 576), rng.standard_normal(3).astype(np.float32)
        indices = rng.integers(-2, 34, (4, 11)).astype(np.int32)
        indices[2] = -1
        lengths = i32([11, 6, 11, 0])
        out, lse, top = fovea.sparse_mla(
            q, kv, indices, 0.05, topk_length=lengths, sink=sink, return_max_logits=True
        )
        for t in range(4):
            slots = [j for j in indices[t, : lengths[t]] if 0 <= j < 30]
            for h in range(3):
                scores = 0.05 * f64(kv)[slots] @ f64(q)[t, h]
                expected, expected_lse = attend(scores, f64(kv)[slots, :512])
                gate = 1 / (1 + np.exp(sink[h] - expected_lse)) if slots else 0
                self.assert_close(out[t, h], expected * gate, 1e-2)
                self.assert_close(lse[t, h], expected_lse, 1e-5)
                self.assert_close(top[t, h], scores.max(initial=-np.inf), 1e-5)

    def test_two_results_unless_asked_for_three(self):
        rng = np.random.default_rng(6)
        arguments = bf16(rng, 2, 1, 576), bf16(rng, 4, 576), i32([[0, 1], [2, 3]]), 0.1
        self.assertEqual(len(fovea.sparse_mla(*arguments)), 2)
        self.assertEqual(len(fovea.sparse_mla(*arguments, return_max_logits=True)), 3)

    def test_dense_attention_follows_the_formula(self):
        rng = np.random.default_rng(7)
        q, kv, table = bf16(rng, 3, 2, 576), bf16(rng, 5, 4, 1, 576), i32([[3, 1], [0, 4]])
        out, lse = fovea.dense_mla(q, kv, table, i32([6, 3]), i32([0, 2, 3]), 0.05)
        for t, (request, seen) in enumerate([(0, 5), (0, 6), (1, 3)]):
            keys = f64(kv)[table[request], :, 0].reshape(8, 576)[:seen]
            for h in range(2):
                expected, expected_lse = attend(0.05 * keys @ f64(q)[t, h], keys[:, :512])
                self.assert_close(out[t, h], expected, 1e-2)
                self.assert_close(lse[t, h], expected_lse, 1e-5)

    def test_attention_per_head_follows_the_formula(self):
        rng = np.random.default_rng(8)
        q, k, v = bf16(rng, 4, 2, 192), bf16(rng, 6, 2, 192), bf16(rng, 6, 2, 128)
        out, lse = fovea.mha_varlen(q, k, v, i32([0, 2, 4]), i32([0, 2, 6]), 0.1)
        for t, keys in enumerate([(0, 1), (0, 2), (2, 5), (2, 6)]):
            for h in range(2):
                rows = slice(*keys)
                expected, expected_lse = attend(0.1 * f64(k)[rows, h] @ f64(q)[t, h], f64(v)[rows, h])
                self.assert_close(out[t, h], expected, 1e-2)
                self.assert_close(lse[t, h], expected_lse, 1e-5)

    def test_parts_merge_into_the_whole(self):
        rng = np.random.default_rng(9)
        parts, lse_parts = rng.standard_normal((2, 3, 2, 8)).astype(np.float32), np.zeros((2, 3, 2), np.float32)
        lse_parts[1, 0] = -np.inf
        lse_parts[0, 1] = 1
        out, lse = fovea.merge_lse(parts, lse_parts)
        weights = np.exp(f64(lse_parts))
        self.assert_close(lse, np.log(weights.sum(0)), 1e-6)
        self.assert_close(out, (weights[..., None] * f64(parts)).sum(0) / weights.sum(0)[..., None], 1e-6)

    def test_parts_of_a_query(self):
        rng = np.random.default_rng(10)
        nope, rope = bf16(rng, 3, 2, 512), bf16(rng, 3, 2, 64)
        self.assert_same(fovea.concat_absorbed_q(nope, rope), np.concatenate([nope, rope], -1))
        cos_sin = np.concatenate([np.ones((9, 32)), np.zeros((9, 32))], 1).astype(np.float32)  # no rotation
        q_fp8, k_fp8 = fovea.mla_rope_quantize(
            i32([0, 3, 8]), cos_sin, "interleaved", q_nope=nope, q_rope=rope, q_scale=0.5
        )
        self.assertIsNone(k_fp8)
        expected = np.concatenate([f64(nope), f64(rope)], -1)
        self.assertTrue((np.abs(e4m3_values(q_fp8) * 0.5 - expected) <= np.abs(expected) / 16 + 1e-3).all())

    def test_windows(self):
        indices, row_len = fovea.build_swa_indices(i32([0, 2, 3]), i32([5, 1]), i32([[4, 2], [7, 0]]), 3, 4)
        self.assertEqual(indices.tolist(), [[17, 18, 19], [18, 19, 8], [28, -1, -1]])
        self.assertEqual(row_len.tolist(), [3, 3, 1])
        rng = np.random.default_rng(11)
        q, kv = bf16(rng, 3, 2, 512), bf16(rng, 32, 512)
        out, lse = fovea.swa_decode(q, kv, indices, row_len, 0.05, 3)
        for t in range(3):
            keys = f64(kv)[indices[t, : row_len[t]]]
            for h in range(2):
                expected, expected_lse = attend(0.05 * keys @ f64(q)[t, h], keys)
                self.assert_close(out[t, h], expected, 1e-2)
                self.assert_close(lse[t, h], expected_lse, 1e-5)


class KdaTest(Case):
    def test_prefill_and_decode_follow_the_recurrence(self):
        rng = np.random.default_rng(14)
        rows, heads, keys, values = 6, 2, 16, 8
        q, k, v = bf16(rng, rows, heads, keys), bf16(rng, rows, heads, keys), bf16(rng, rows, heads, values)
        g = -np.abs(rng.standard_normal((rows, heads, keys))).astype(np.float32) / 4
        beta = rng.random((rows, heads)).astype(np.float32)
        state = rng.standard_normal((3, heads, values, keys)).astype(np.float32)
        expected, expected_state = np.zeros((rows, heads, values)), f64(state)[1].transpose(0, 2, 1)
        k = (f64(k) / np.linalg.norm(f64(k), axis=-1, keepdims=True)).astype(BF16)
        for t in range(rows):
            for h in range(heads):
                s = np.exp(f64(g)[t, h])[:, None] * expected_state[h]
                u = f64(beta)[t, h] * (f64(v)[t, h] - s.T @ f64(k)[t, h])
                expected_state[h] = s + np.outer(f64(k)[t, h], u)
                expected[t, h] = keys**-0.5 * expected_state[h].T @ f64(q)[t, h]
        layer = {"gate": "given", "beta_kind": "prob"}
        out = fovea.kda_prefill(
            q[:4], k[:4], v[:4], g[:4], beta[:4], i32([0, 4]), **layer, state=state, in_slot=i32([1]), out_slot=i32([2])
        )
        self.assert_close(out, expected[:4], 1e-2)
        for t in (4, 5):
            one = slice(t, t + 1)
            out = fovea.kda_decode(g[one], beta[one], state, **layer, q=q[one], k=k[one], v=v[one], slot=i32([2]))
            self.assert_close(out, expected[one], 1e-2)
        self.assert_close(state[2].transpose(0, 2, 1), expected_state, 1e-4)

    def test_the_stages_together_are_a_prefill(self):
        arguments = legal_calls(16)["kda_prefill"]
        state, q_indptr = arguments["state"][arguments["in_slot"]].copy(), arguments["q_indptr"]
        gate = {name: arguments[name] for name in ("gate", "a_log", "dt_bias")}
        first = fovea.kda_stage_gate(
            arguments["q"], arguments["k"], arguments["g"], q_indptr, **gate, chunk=16, normalise=True
        )
        own = fovea.kda_stage_intra(
            first.q_hat, first.k_hat, first.g_sum, arguments["v"], arguments["beta"], q_indptr, "logit", chunk=16
        )
        chain = fovea.kda_stage_inter(own.w, own.kr, own.u0, first.g_sum, q_indptr, initial_state=state, chunk=16)
        out = fovea.kda_stage_output(first.q_hat, first.g_sum, own.p, chain.u, chain.chunk_states, q_indptr)
        self.assert_close(out, fovea.kda_prefill(**arguments), 1e-2)
        self.assert_close(chain.final_state, arguments["state"][arguments["out_slot"]], 1e-4)
        self.assertEqual(chain.chunk_states.shape, (2, 2, 8, 16))
        self.assert_same(chain.chunk_states[0], state[0])

    def test_prefill_gives_the_states_before_its_chunks(self):
        rng = np.random.default_rng(16)
        layer = {"gate": "given", "beta_kind": "prob", "chunk": 16}
        g, beta = -rng.random((40, 1, 16)).astype(np.float32), rng.random((40, 1)).astype(np.float32)
        q, k, v = bf16(rng, 40, 1, 16), bf16(rng, 40, 1, 16, scale=0.2), bf16(rng, 40, 1, 8)
        start = rng.standard_normal((1, 1, 8, 16)).astype(np.float32)
        given = {"chunk_states": np.full((4, 1, 8, 16), 7, np.float32)}
        out = fovea.kda_prefill(q, k, v, g, beta, i32([0, 40]), **layer, state=start.copy(), out=given)
        self.assertEqual(out.shape, (40, 1, 8))
        self.assert_same(given["chunk_states"][0], start[0])
        self.assertTrue((given["chunk_states"][3] == 7).all())
        for entry in (1, 2):
            state, part = start.copy(), slice(0, 16 * entry)
            fovea.kda_prefill(q[part], k[part], v[part], g[part], beta[part], i32([0, 16 * entry]), **layer, state=state)
            self.assert_close(given["chunk_states"][entry], state[0], 1e-6)
        wrong = {"chunk_states": np.zeros((3, 1, 16, 8), np.float32)}
        with self.assertRaisesRegex(fovea.InvalidArgument, "kda_prefill: chunk_states"):
            fovea.kda_prefill(q, k, v, g, beta, i32([0, 40]), **layer, state=start.copy(), out=wrong)

    def test_a_draft_is_verified_and_committed(self):
        rng = np.random.default_rng(15)
        layer = {"gate": "given", "beta_kind": "prob"}
        g, beta = -rng.random((3, 1, 16)).astype(np.float32), rng.random((3, 1)).astype(np.float32)
        parts = {"q": bf16(rng, 3, 1, 16), "k": bf16(rng, 3, 1, 16, scale=0.2), "v": bf16(rng, 3, 1, 8)}
        state = rng.standard_normal((2, 1, 8, 16)).astype(np.float32)
        walked, before = state.copy(), state.copy()
        out, scratch = fovea.kda_verify(g, beta, state, **layer, mode="records", rows_per_request=3, **parts, slot=i32([1]))
        self.assert_same(state, before)
        for t in range(2):
            one = slice(t, t + 1)
            row = {name: part[one] for name, part in parts.items()}
            step = fovea.kda_decode(g[one], beta[one], walked, **layer, **row, slot=i32([1]))
            self.assert_close(out[one], step, 1e-2)
        self.assertIsNone(fovea.kda_commit(scratch, i32([2]), i32([1]), state, "records"))
        self.assert_close(state, walked, 1e-4)
        self.assert_same(state[0], before[0])

    def test_the_example_of_the_convolution(self):
        window = np.array([-3, 0, 7]).astype(BF16).reshape(1, 3, 1)
        out = fovea.causal_conv1d(
            np.array([[1], [2], [4]]).astype(BF16), np.array([[1000, 100, 10, 1]], np.float32),
            bias=np.array([0.5], np.float32), q_indptr=i32([0, 3]), window_state=window, activation="none",
        )  # fmt: skip
        self.assertEqual(f64(out).ravel().tolist(), [-2928, 712, 7136])
        self.assertEqual(f64(window).ravel().tolist(), [1, 2, 4])

    def test_a_gate(self):
        g = np.array([[[0.5, -2]]], np.float32)
        decay = fovea.kda_gate(g, "softplus", a_log=np.zeros(1, np.float32))
        self.assert_close(decay, -np.log1p(np.exp(f64(g))), 1e-6)


class MsaTest(Case):
    def test_the_example_of_the_documentation(self):
        keys, values = np.zeros((384, 1, 16), BF16), np.zeros((384, 1, 16), BF16)
        values[:] = (np.arange(384) // 128)[:, None, None]
        table = i32([[0, 1, 2]])
        for place, blocks in (("slots", [0, 2]), ("slots", [2, 0]), ("pages", [0, 2])):
            pools = keys, values
            if place == "pages":
                pools = [pool.reshape(3, 128, 1, 16).transpose(0, 2, 1, 3) for pool in pools]
            out, lse = fovea.msa_attend(
                np.zeros((1, 1, 16), BF16), *pools, table, i32([300]), i32([0, 1]), i32([[blocks]]), 128
            )
            self.assert_close(out, np.full((1, 1, 16), 88 / 172), 1e-2)
            self.assert_close(lse, [[np.log(172)]], 1e-6)

    def test_scores_select_blocks(self):
        rng = np.random.default_rng(16)
        iq, index_k = bf16(rng, 2, 1, 32), bf16(rng, 64, 1, 32)
        batch = i32([[2, 0, 3]]), i32([40]), i32([0, 2])
        scores = fovea.msa_block_scores(iq, index_k, *batch, 16, index_scale=0.5)
        logits = 0.5 * np.einsum("td,jd->tj", f64(iq)[:, 0], f64(index_k)[:, 0].reshape(4, 16, 32)[[2, 0, 3]].reshape(48, 32))
        for t, seen in enumerate((39, 40)):
            logits[t, seen:] = -np.inf
        self.assert_close(scores[0], logits.reshape(2, 3, 16).max(-1), 1e-5)
        blocks = fovea.msa_select_blocks(scores, *batch[1:], 16, 2)
        best = np.where(scores[0, :, 0] >= scores[0, :, 1], 0, 1)
        self.assertEqual(blocks.tolist(), [[[best[0], 2], [best[1], 2]]])
        self.assert_same(fovea.msa_score_select(iq, index_k, *batch, 16, 2, index_scale=0.5), blocks)

    def test_tables_of_pages(self):
        table = fovea.build_page_table(i32([range(8), range(16, 24)]), i32([1, 0]), i32([5, 4]), 4)
        self.assertEqual(table.tolist(), [[4, 5], [0, 0]])


class ImplementationTest(Case):
    def test_every_operator_agrees_with_its_reference(self):
        for op in legal_calls():
            if op == "context_split":  # a function of host values
                continue
            with self.subTest(op):
                results = []
                for impl in (None, "ref"):
                    arguments = legal_calls()[op]
                    found = getattr(fovea, op)(**arguments, impl=impl)
                    found = list(found.values()) if isinstance(found, dict) else found
                    found = list(found) if isinstance(found, (tuple, list)) else [found]
                    updated = [arguments[name] for name in ("pool", "state", "window_state") if name in arguments]
                    results.append([tensor for tensor in found + updated if tensor is not None])
                for mine, other in zip(*results):
                    if mine.dtype in (np.int32, np.uint8):
                        self.assert_same(mine, other)
                    elif op != "index_logits":  # columns outside a row are unspecified
                        self.assert_close(mine, other, 2e-2)

    def test_every_implementation_of_the_cpu_agrees_with_the_reference(self):
        rng = np.random.default_rng(12)
        q, kv = bf16(rng, 5, 4, 576), bf16(rng, 64, 576)
        indices = rng.integers(-1, 64, (5, 32)).astype(np.int32)
        reference = fovea.sparse_mla(q, kv, indices, 0.06, impl="ref")
        compared = 0
        for entry in fovea.implementations("sparse_mla"):
            if entry.device != "cpu" or not entry.available:
                continue
            out, lse = fovea.sparse_mla(q, kv, indices, 0.06, impl=entry.name)
            self.assert_close(out, reference[0], 1e-2)
            self.assert_close(lse, reference[1], 1e-3)
            compared += 1
        self.assertGreaterEqual(compared, 2)

    def test_threads_change_no_bit(self):
        rng = np.random.default_rng(13)
        arguments = bf16(rng, 5, 4, 576), bf16(rng, 64, 576), rng.integers(0, 64, (5, 32)).astype(np.int32), 0.06
        try:
            fovea.set_num_threads(1)
            one = fovea.sparse_mla(*arguments)
            fovea.set_num_threads(2)
            self.assertEqual(fovea.get_num_threads(), 2)
            two = fovea.sparse_mla(*arguments)
        finally:
            fovea.set_num_threads(0)
        self.assert_same(one[0], two[0])
        self.assert_same(one[1], two[1])


if __name__ == "__main__":
    unittest.main()
