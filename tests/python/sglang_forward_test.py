"""fovea.DsaBackend in the place of an engine's backend: a served conversation, forwards of every form, the selection.
Every test names the rows of docs/compat/sglang-dsa.md that it sees.
"""

import inspect
import unittest

import numpy as np

import fovea
from calls import i32
from engine import DIM, LATENT, Engine, rows
from sglang_steps_test import CONSTRUCTION, StepCase, arrays
from support import attend, bf16, e4m3_values, f64

ALIASES = {
    "fa3": ("bf16",), "tilelang": ("bf16",), "aiter": ("bf16",), "flashmla_sparse": ("bf16",), "flashmla_kv": ("v32",),
    "trtllm": ("bf16", "f576"), "flashmla_auto": ("bf16", "v32", "f576"),
}  # fmt: skip
SELECTOR = ("index_q", "index_k", "head_gate")


class ForwardCase(StepCase):
    def given(self, engine, batch, plan=None, local=False, **options):
        """A forward over a selection made elsewhere: checks out and lse, returns them with the slots."""
        positions = engine.selection(batch)
        slots = engine.slots(batch, positions)
        result = engine.forward(batch, plan, topk_indices=positions if local else slots, without=SELECTOR, **options)
        formula = {name: options[name] for name in ("scale",) if name in options} | {"cap": options.get("logit_cap", 0.0)}
        expected = engine.attention(engine.inputs(batch)["q"], slots, **formula)
        self.assert_close(result[0], expected[0], 2e-2)
        self.assert_close(result[1], expected[1], 1e-2)
        return result, slots

    def started(self, name="decode", lengths=(9, 4, 12), counts=None, **options):
        engine = Engine(**options)
        engine.fill()
        batch = engine.batch(name, lengths, counts)
        engine.init_forward_metadata(batch)
        return engine, batch

    def refused(self, engine, batch, text, without=(), **changes):
        with self.assertRaisesRegex(fovea.InvalidArgument, text):
            engine.forward(batch, without=without, **changes)


class ServerTest(ForwardCase):
    @rows("Forward", "forward_extend", "forward_decode", "return value")
    @rows("Kernels", "branch: widths of q and v equal or not")
    def test_a_conversation_from_construction_to_idle(self):
        for options in ({}, {"row_format": "bf16"}, {"fuse_transform": False}, {"page_size": 1, "pages": 20}):
            with self.subTest(**options):
                self.serve(Engine(**options), local=options.get("fuse_transform") is False)

    def serve(self, engine, local):
        engine.init_cuda_graph_state(max_bs=3, max_num_tokens=9)
        for bs in (3, 2, 1):  # the engine captures the largest bucket first
            for mode in ("decode", "target_verify", "draft_extend"):
                engine.init_forward_metadata_capture_cuda_graph(bs, mode)
        steps = [
            ("extend", [5, 1, 7], [5, 1, 7]),  # no prefix
            ("extend", [9, 4, 8], [4, 3, 1]),  # every request has one
            ("mixed", [10, 9, 9], [1, 5, 1]),
            ("decode", [11, 10, 10], None),
            ("target_verify", [14, 13, 13], None),  # of three rows 2, 1 and 3 are accepted
            ("draft_extend", [13, 11, 13], [2, 1, 3]),
            ("decode", [14, 12, 14], None),
            ("decode", [15, 13], None),  # the third request is done
            ("target_verify", [18, 16], None),
            ("draft_extend_v2", [18, 16], None),
            ("idle", [], []),
        ]
        for mode, lengths, counts in steps:
            with self.subTest(mode=mode, lengths=lengths):
                batch, plan, tail = engine.batch(mode, lengths, counts), None, 0
                if (mode, len(lengths)) in engine.plans:
                    plan, tail = engine.init_forward_metadata_replay_cuda_graph(batch), engine.unused_rows(batch)
                else:
                    engine.init_forward_metadata(batch)
                out, lse, indices = engine.forward(batch, plan, padded=tail, return_indices=True)
                self.assertEqual((out.shape[1:], lse.shape[1:], len(out)), ((2, LATENT), (2,), len(lse)))
                indices = engine.slots(batch, indices[: len(batch.row_len)]) if local else indices
                self.assert_attention(engine, batch, (out, lse, indices))

    @rows("Forward", "assertion: causal; is_cross_attention, encoder_out_cache_loc", "llama_4_scaling")
    @rows(CONSTRUCTION, "use_nsa and its assertion", "skip_prefill, topk")
    @rows("Module", "_compiled_cat")
    def test_what_has_no_counterpart_is_no_argument(self):
        gone = {"causal", "is_cross_attention", "llama_4_scaling", "skip_prefill", "speculative_step_id", "use_nsa", "is_neox"}
        for function in (fovea.DsaBackend.__init__, fovea.DsaBackend.begin_step, fovea.DsaBackend.forward):
            self.assertEqual(set(inspect.signature(function).parameters) & gone, set())
        # A row sees row_len keys whatever comes after them.
        engine, batch = self.started("extend", [9, 4, 12], [3, 4, 1])
        expected = engine.forward(batch, return_indices=True)
        for row, length in zip(batch.req_pool_indices, batch.kv_len):
            engine.spoil(engine.req_to_token[row, length:])
        for actual, reference in zip(engine.forward(batch, return_indices=True), expected):
            self.assert_same(actual, reference)

    @rows("Forward", "branch: decode implementation for verify and drafts in forward_extend")
    def test_verify_and_drafts_take_the_decode_implementation(self):
        engine = Engine(prefill_implementation="contiguous_bf16", decode_implementation="flashmla_kv", deterministic=False)
        engine.fill()
        kernels = {}
        for mode, counts in (("extend", [1, 1, 1]), ("mixed", [1, 1, 1]), ("target_verify", None), ("decode", None),
                             ("draft_extend", [1, 1, 1]), ("draft_extend_v2", None)):  # fmt: skip
            batch = engine.batch(mode, [9, 7, 12], counts)
            engine.init_forward_metadata(batch)
            kernels[mode] = engine.backend.dispatch()["kernel"]
            if kernels[mode] == "cache_direct":
                self.given(engine, batch)
        prefills = {mode for mode, kernel in kernels.items() if kernel == "contiguous_bf16"}
        self.assertEqual((prefills, len(kernels)), ({"extend", "mixed"}, 6))

    @rows("Forward", "branch: trtllm and not dense", "branches: tilelang, flashmla_sparse, flashmla_kv, fa3, aiter (decode only there)")
    @rows("Kernels", "_forward_flashmla_sparse", "_forward_flashmla_kv", "_forward_tilelang", "_forward_aiter", "_forward_trtllm",
          "branch by device family")  # fmt: skip
    def test_every_name_of_a_kernel_in_prefill_and_decode(self):
        for name, formats in ALIASES.items():
            for row_format in formats:
                with self.subTest(name, row_format=row_format):
                    engine = Engine(row_format=row_format, prefill_implementation=name, decode_implementation=name)
                    engine.fill()
                    for mode, lengths, counts in (("extend", [9, 4, 12], [3, 4, 1]), ("target_verify", [9, 7, 12], None),
                                                  ("draft_extend", [9, 7, 12], [2, 1, 3]), ("decode", [9, 4, 12], None)):  # fmt: skip
                        batch = engine.batch(mode, lengths, counts)
                        engine.init_forward_metadata(batch)
                        self.assertEqual(engine.backend.dispatch()["kernel"], "cache_direct")
                        self.given(engine, batch)


class TensorsTest(ForwardCase):
    @rows("Module", "_cat")
    @rows("Forward", "branch: q of 512 and q_rope, or q of 576",
          "assertion: q_rope in the absorbed form; the branch without it cannot run there")  # fmt: skip
    @rows("Kernels", "branch: merge q and q_rope")
    def test_q_and_k_whole_or_in_parts(self):
        for mode, lengths, counts in (("extend", [9, 4, 12], [3, 4, 1]), ("decode", [9, 4, 12], None), ("target_verify", [9, 7, 12], None)):
            engine, batch = self.started(mode, lengths, counts)
            inputs = engine.inputs(batch)
            expected = engine.forward(batch)
            pool = engine.kv_pool.copy()
            for whole, parts in (("q", ("q_nope", "q_rope")), ("k", ("k_latent", "k_rope"))):
                engine.kv_pool.reshape(-1, 656)[batch.out_cache_loc] = 0
                split = {parts[0]: inputs[whole][..., :LATENT], parts[1]: inputs[whole][..., LATENT:]}
                for actual, reference in zip(engine.forward(batch, without=(whole,), **split), expected):
                    self.assert_same(actual, reference)
                self.assert_same(engine.kv_pool, pool)

    @rows("Module", "assertion in _cat: two tensors of three axes")
    def test_parts_are_checked_and_named(self):
        engine, batch = self.started()
        q = engine.inputs(batch)["q"]
        self.refused(engine, batch, "q is missing; give it, or q_nope and q_rope", without=("q",))
        self.refused(engine, batch, "q_rope is missing", without=("q",), q_nope=q[..., :LATENT])
        self.refused(engine, batch, r"q_rope = bf16 \[3, 64\]", without=("q",), q_nope=q[..., :LATENT], q_rope=q[:, 0, LATENT:])
        self.refused(engine, batch, "k is given beside k_latent and k_rope", k_rope=engine.inputs(batch)["k"][:, LATENT:])

    @rows("Forward", "branch: save_kv_cache", "set_mla_kv_buffer")
    @rows("Kernels", "branch: save: assertion on k and k_rope")
    def test_stores_before_it_scores_unless_told_not_to(self):
        engine = Engine()
        batch = engine.batch("decode", [1, 1, 1])  # a row that sees its own key alone
        engine.init_forward_metadata(batch)
        for options in ({"save_kv": False}, {"without": ("k", "index_k")}):
            out, _ = engine.forward(batch, **options)
            self.assertFalse(engine.kv_pool.any() or engine.index_pool.any() or out.astype(np.float64).any())
        out, _ = engine.forward(batch)
        stored = engine.cache()[batch.out_cache_loc]
        self.assert_close(stored, engine.inputs(batch)["k"], 0.1)
        self.assert_close(out, np.repeat(stored[:, None, :LATENT], 2, 1), 1e-2)
        self.refused(engine, batch, "k_rope is missing", without=("k",), k_latent=engine.inputs(batch)["k"][:, :LATENT])

    @rows("Forward", "branch: topk_indices given: padded to the rows of q")
    @rows("Kernels", "_pad_topk_indices, assertion: not more rows than q", "assertion: width of the indices = topk")
    def test_rows_of_padding(self):
        engine, batch = self.started()
        (expected, expected_lse), slots = self.given(engine, batch)
        pool = engine.kv_pool.copy()
        engine.init_forward_metadata(batch, padded=2)
        padded = np.concatenate([slots, slots[:2]])  # legal slots, and q is NaN there
        out, lse = engine.forward(batch, padded=2, topk_indices=padded, without=SELECTOR)
        self.assert_same(out[:3], expected)
        self.assert_same(lse[:3], expected_lse)
        self.assertTrue((out[3:] == 0).all() and (lse[3:] == -np.inf).all())
        own = engine.forward(batch, padded=2, return_indices=True)
        self.assertTrue((own[0][3:] == 0).all() and (own[2][3:] == -1).all())
        self.assert_attention(engine, batch, own)
        self.assert_same(engine.kv_pool, pool)
        for wrong in (slots, padded[:, :4].copy(), np.concatenate([padded, slots])):
            with self.assertRaisesRegex(fovea.InvalidArgument, r"topk_indices = i32 \[\d, \d\], expected i32 \[5, 6\]"):
                engine.forward(batch, padded=2, topk_indices=wrong, without=SELECTOR)

    @rows("Forward", "branch: fused transform", "branch: unfused PAGED: assertion on the host lists")
    @rows("Kernels", "branch: unfused: decode mapping even for extend rows")
    @rows("NSAIndexerMetadata", "branch: SGLANG_NSA_FUSE_TOPK off")
    @rows("Environment switches", "SGLANG_NSA_FUSE_TOPK")
    def test_selections_as_slots_or_as_positions(self):
        for mode, lengths, counts in (("extend", [9, 4, 12], [3, 4, 1]), ("decode", [9, 4, 12], None),
                                      ("target_verify", [9, 7, 12], None), ("draft_extend", [9, 7, 12], [2, 1, 3])):  # fmt: skip
            for host in (True, False):
                results = []
                for fuse in (True, False):
                    engine, batch = self.started(mode, lengths, counts, fuse_transform=fuse)
                    engine.init_forward_metadata(batch, host=host)
                    own = engine.forward(batch, return_indices=True)
                    indices = own[2] if fuse else engine.slots(batch, own[2])
                    self.assert_attention(engine, batch, (own[0], own[1], indices))
                    results.append((own[0], own[1], indices, *self.given(engine, batch, local=not fuse)[0]))
                for fused, unfused in zip(*results):
                    self.assert_same(fused, unfused)

    @rows("Forward", "branch: RAGGED with a prefix: keys unpacked, assertion on the slots",
          "branch: unfused RAGGED: assertion on the offsets, −1 kept", "unfused RAGGED with a kernel that wants slots")  # fmt: skip
    @rows("NSAMetadata", "page_table_1_flattened")
    @rows("Module", "TopkTransformMethod PAGED, RAGGED")
    def test_selections_as_rows_of_the_keys(self):
        options = {"prefill_implementation": "flashmla_sparse", "deterministic": False}
        for fuse in (True, False):
            engine, batch = self.started("extend", [9, 4, 12], [3, 4, 1], fuse_transform=fuse, **options)
            self.assertEqual(engine.backend.dispatch()["transform"], "ragged")
            offset = arrays(engine.backend.metadata())["row_offset"][:, None]
            positions = engine.selection(batch)
            positions[0, 2] = -1  # in the middle
            out, lse = engine.forward(
                batch, topk_indices=np.where(positions < 0, -1, positions + offset) if fuse else positions, without=SELECTOR)
            expected = engine.attention(engine.inputs(batch)["q"], engine.slots(batch, positions))
            self.assert_close(out, expected[0], 2e-2)
            self.assert_close(lse, expected[1], 1e-2)
            found = engine.forward(batch, return_indices=True)
            local = found[2] if not fuse else np.where(found[2] < 0, -1, found[2] - offset)
            self.assert_attention(engine, batch, (*found[:2], engine.slots(batch, local)))

    @rows("Forward", "branch: RAGGED without a prefix: this call's k")
    def test_keys_of_this_call_or_of_the_cache(self):
        options = {"prefill_implementation": "contiguous_bf16", "deterministic": False, "topk": 16}
        for source, fresh in (("cache", False), ("fresh", True)):
            engine = Engine(extend_kv_source=source, **options)
            batch = engine.batch("extend", [5, 1, 7], [5, 1, 7])
            engine.init_forward_metadata(batch)
            self.assertEqual(engine.backend.dispatch()["fresh_kv"], fresh)
            out, _ = engine.forward(batch)
            k, q = f64(engine.inputs(batch)["k"]), f64(engine.inputs(batch)["q"])
            start = np.cumsum([0, *batch.counts])[batch.owner]
            keys = k if fresh else engine.cache()[batch.out_cache_loc]
            for t, (first, length) in enumerate(zip(start, batch.row_len)):
                seen = keys[first : first + length]
                for head in range(2):
                    self.assert_close(out[t, head], attend(seen @ q[t, head] * 0.1, seen[:, :LATENT])[0], 1.5e-2)
            engine.init_forward_metadata(engine.batch("extend", [6, 2, 7], [1, 1, 7]))  # some request has a prefix
            self.assertFalse(engine.backend.dispatch()["fresh_kv"])


class DenseTest(ForwardCase):
    """One-shot: expanded heads, every key visible."""

    def begun(self, lengths=(9, 4, 12), counts=(3, 4, 1), heads=2, **options):
        engine = Engine(heads=heads, topk=16, deterministic=False, **options)
        engine.fill()
        batch = engine.batch("extend", lengths, counts)
        engine.init_forward_metadata(batch, mha_inputs=True)
        rng, total = np.random.default_rng(4), sum(lengths)
        return engine, batch, {"q_mha": bf16(rng, len(batch.row_len), heads, 192), "k_mha": bf16(rng, total, heads, 192),
                               "v_mha": bf16(rng, total, heads, 128)}  # fmt: skip

    @rows("Kernels", "_forward_standard_mha", "assertion: equal batch sizes of both offset arrays")
    @rows("Forward", "assertion: k heads = q heads > 1")
    @rows(CONSTRUCTION, "use_mha")
    def test_dense_attention_over_prefix_and_new_keys(self):
        for heads in (1, 2, 3):
            for row_format in ("v32", "bf16", "f576"):
                for lengths, counts in (((9, 4, 12), (3, 4, 1)), ((5, 1, 7), (5, 1, 7))):
                    engine, batch, dense = self.begun(lengths, counts, heads, row_format=row_format)
                    self.assertTrue(engine.backend.dispatch()["one_shot"])
                    out, lse = engine.forward(batch, without=("q", "index_q", "head_gate"), **dense)
                    q, k, v = (f64(tensor) for tensor in dense.values())
                    start = np.concatenate([[0], np.cumsum(lengths)])[batch.owner]
                    for t, (first, length) in enumerate(zip(start, batch.row_len)):
                        for head in range(heads):
                            expected = attend(k[first : first + length, head] @ q[t, head] * 0.1, v[first : first + length, head])
                            self.assert_close(out[t, head], expected[0], 1e-2)
                            self.assert_close(lse[t, head], expected[1], 1e-3)
                    stored = engine.cache()[batch.out_cache_loc]  # the cache is filled all the same
                    self.assert_close(stored, engine.inputs(batch)["k"], 0.2)

    @rows("Forward", "branch: k given: assertion on v", "branch: dense: assertions on k and v, no q_rope")
    def test_what_is_missing_is_named(self):
        engine, batch, dense = self.begun()
        before = engine.kv_pool.copy(), engine.index_pool.copy()
        for name in dense:
            parts = {key: value for key, value in dense.items() if key != name}
            self.refused(engine, batch, f"{name} is missing, expected bf16", without=("q",), **parts)
        self.refused(engine, batch, r"k_mha = bf16 \[25, 1, 192\]", without=("q",), **{**dense, "k_mha": dense["k_mha"][:, :1]})
        self.refused(engine, batch, r"v_mha = bf16 \[24, 2, 128\]", without=("q",), **{**dense, "v_mha": dense["v_mha"][1:]})
        self.refused(engine, batch, "logit_cap = 2.*force_absorbed", without=("q",), logit_cap=2.0, **dense)
        for pool, expected in zip((engine.kv_pool, engine.index_pool), before):
            self.assert_same(pool, expected)

    @rows("Building a step", "mha_dequantize_needed, using_mha_one_shot_fp8_dequant")
    def test_prefix_rows_are_unpacked_by_the_caller(self):
        engine, batch, _ = self.begun()
        slots = np.concatenate([engine.req_to_token[row, :length] for row, length in zip((1, 2, 3), batch.kv_len)])
        found = fovea.unpack_rows(engine.kv_pool, slots, "v32", page_size=engine.page_size)
        self.assertEqual(found.shape, (25, DIM))
        self.assert_close(found, engine.cache()[slots], 2**-8)


class KernelsTest(ForwardCase):
    @rows("Kernels", "_forward_fa3")
    @rows(CONSTRUCTION, "branch on HIP: kv_indptr")
    def test_a_soft_cap_and_entries_skipped_where_they_stand(self):
        engine, batch = self.started(row_format="bf16", decode_implementation="fa3")
        for cap in (0.0, 2.0):
            self.given(engine, batch, logit_cap=cap)
            slots = engine.slots(batch, engine.selection(batch))
            slots[0, 2], slots[1, 0], slots[2, 5] = -1, -1, 10**6
            out, lse = engine.forward(batch, topk_indices=slots, without=SELECTOR, logit_cap=cap)
            expected = engine.attention(engine.inputs(batch)["q"], slots, cap=cap)
            self.assert_close(out, expected[0], 2e-2)
            self.assert_close(lse, expected[1], 2e-3)

    @rows("Kernels", "branch and assertion: heads padded to 64 or 128, which they must divide", "assertion: page size 64")
    def test_any_head_count_and_page_size(self):
        for heads, page_size, pages in ((1, 1, 20), (3, 61, 1), (48, 4, 5), (65, 64, 1)):
            engine, batch = self.started(heads=heads, page_size=page_size, pages=pages, decode_implementation="flashmla_kv")
            self.given(engine, batch)

    @rows("Kernels", "lengths: clipped in extend-like modes, full in decode")
    def test_nothing_behind_a_length_is_read(self):
        for mode, lengths in (("decode", [3, 1, 12]), ("target_verify", [4, 3, 12])):
            engine, batch = self.started(mode, lengths)
            (expected, _), slots = self.given(engine, batch)
            found = arrays(engine.backend.metadata())["topk_length"]
            self.assertEqual(found.tolist(), np.minimum(batch.row_len, 6).tolist())
            behind = np.where(slots < 0, slots[:, :1], slots)
            out, _ = engine.forward(batch, topk_indices=behind, without=SELECTOR)
            self.assert_same(out, expected)

    @rows("Kernels", "branch: fp8: assertions on q_rope, k_rope, cos_sin_cache; rope and quantisation",
          "q_scale 1, k_scale of the layer, on the scores only")  # fmt: skip
    @rows("Forward", "is_neox, cos_sin_cache")
    def test_rope_and_quantisation_of_an_fp8_cache(self):
        for style, first, second in (("half_split", slice(0, 32), slice(32, 64)), ("interleaved", slice(0, 64, 2), slice(1, 64, 2))):
            engine = Engine(row_format="f576", fuse_rope=True, rope_style=style, decode_implementation="trtllm")
            batch, table = engine.batch("decode", [1, 1, 1]), engine.weights["cos_sin"]
            for position in range(9):
                batch = engine.batch("decode", [position + 1] * 3)
                engine.init_forward_metadata(batch)
                inputs = engine.inputs(batch)
                parts = {"q_nope": inputs["q"][..., :LATENT], "q_rope": inputs["q"][..., LATENT:],
                         "k_latent": inputs["k"][:, :LATENT], "k_rope": inputs["k"][:, LATENT:]}  # fmt: skip
                scales = {"q_scale": 0.5, "k_scale": 0.25}
                out, lse, indices = engine.forward(
                    batch, without=("q", "k"), mla_cos_sin=table, return_indices=True, **parts, **scales)

                def codes(values, scale, at=position):
                    cos, sin = f64(table[at, :32]), f64(table[at, 32:])
                    values = f64(values)
                    a, b = values[..., LATENT:][..., first], values[..., LATENT:][..., second]
                    roped = values.copy()
                    roped[..., LATENT:][..., first], roped[..., LATENT:][..., second] = a * cos - b * sin, b * cos + a * sin
                    return roped / scale

                q, k = codes(inputs["q"], 0.5), codes(inputs["k"], 0.25)
                stored = engine.cache()[batch.out_cache_loc]
                self.assertLessEqual((np.abs(stored - k) - np.abs(k) / 16).max(), 2**-9)  # half a step of e4m3
                q_codes = fovea.mla_rope_quantize(batch.positions, table, style, q_nope=parts["q_nope"], q_rope=parts["q_rope"],
                                                  k_nope=parts["k_latent"], k_rope=parts["k_rope"], **scales)[0]  # fmt: skip
                q_codes = e4m3_values(q_codes)
                self.assertLessEqual((np.abs(q_codes - q) - np.abs(q) / 16).max(), 2**-9)
                # k_scale is on the scores and on the values.
                for t, slots in enumerate(indices):
                    keys = engine.cache()[slots[slots >= 0]] * scales["k_scale"]
                    for head in range(2):
                        expected = attend(keys @ (q_codes[t, head] * scales["q_scale"]) * 0.1, keys[:, :LATENT])
                        self.assert_close(out[t, head], expected[0], 2e-2)
                        self.assert_close(lse[t, head], expected[1], 1e-2)
            for name in ("q_rope", "k_rope", "mla_cos_sin"):
                given = {"mla_cos_sin": table, **parts}
                del given[name]
                self.refused(engine, batch, f"{name} is missing", without=("q", "k"), **given)


class SelectionTest(ForwardCase):
    """What the engine's indexer asks of its metadata, with operators of their own."""

    def scored(self):
        engine, batch = self.started("extend", [9, 4, 12], [3, 4, 1])
        logits = np.random.default_rng(6).integers(-4, 5, (8, 32)).astype(np.float32)
        return engine, batch, logits, arrays(engine.backend.metadata())

    def best(self, logits, length, first=0, topk=6):
        keys = sorted(sorted(range(length), key=lambda j: (-logits[first + j], j))[:topk])
        return np.array(keys + [-1] * (topk - len(keys)))

    @rows("NSAIndexerMetadata", "class NSAIndexerMetadata; attn_metadata", "topk_transform", "its logits, topk", "its ks",
          "its ke_offset")  # fmt: skip
    @rows("Dispatch", "get_indexer_metadata")
    def test_selection_with_a_start_and_a_length_of_each_row(self):
        _, _, logits, found = self.scored()
        for topk in (1, 6, 40):
            indices = fovea.topk_select(logits, found["row_len"], topk)
            for row, length in enumerate(found["row_len"]):
                self.assertEqual(indices[row].tolist(), self.best(logits[row], length, topk=topk).tolist())
        starts = i32([0, 3, 20, 1, 0, 31, 2, 5])
        lengths = i32([9, 0, 12, 4, 32, 1, 6, 7])
        indices = fovea.topk_select(logits, lengths, 6, row_start=starts)
        for row in range(8):
            self.assertEqual(indices[row].tolist(), self.best(logits[row], lengths[row], starts[row]).tolist())

    @rows("NSAIndexerMetadata", "topk_transform_method", "branches: PAGED, RAGGED", "its cu_seqlens_q",
          "its topk_indices_offset_override", "its batch_idx_list", "assertion: other transform")  # fmt: skip
    def test_transforms_of_a_selection(self):
        engine, batch, logits, found = self.scored()
        self.assertEqual(engine.backend.dispatch()["transform"], "paged")
        local = np.array([self.best(logits[row], length) for row, length in enumerate(batch.row_len)])
        paged = {"page_table": found["page_table"], "page_size": engine.page_size}
        indices = fovea.topk_select(logits, found["row_len"], 6, transform="paged", row_to_request=found["row_to_request"], **paged)
        self.assert_same(indices, engine.slots(batch, local))
        chosen = i32([2, 2, 0, 0, 1, 1, 1, 0])  # any rows of the whole table, in any order
        other = engine.batch("draft_extend", [9, 4, 12], batch.counts)
        other.owner = chosen
        indices = fovea.topk_select(logits, found["row_len"], 6, transform="paged", row_to_request=chosen, **paged)
        within = np.where(local < np.array(batch.kv_len)[chosen, None], local, -1)
        expected = engine.slots(other, local)
        self.assert_same(np.where(within < 0, -1, indices), np.where(within < 0, -1, expected).astype(np.int32))
        for offset in (found["k_start"], i32(range(8))):
            indices = fovea.topk_select(logits, found["row_len"], 6, transform="ragged", row_offset=offset)
            self.assertEqual(indices.tolist(), np.where(local < 0, -1, local + offset[:, None]).tolist())
        with self.assertRaisesRegex(fovea.InvalidArgument, "transform = 'flat', expected one of local, paged, ragged"):
            fovea.topk_select(logits, found["row_len"], 6, transform="flat")


if __name__ == "__main__":
    unittest.main()
