"""fovea run: sparse_mla, dense_mla, mha_varlen and merge_lse on inputs whose results are known by hand."""

import math

from support import CommandLineTest, Tensor

INF = float("inf")


def rows(values, width):
    """bf16 rows: row j holds values[j] in every channel."""
    return Tensor("BF16", [len(values), width], [value for value in values for _ in range(width)])


def sparse_inputs(indices, keys=8, heads=2, width=576):
    """q = 0 makes the softmax uniform: the output is the mean of the visible rows, and row j holds j."""
    count = len(indices)
    return {
        "q": Tensor("BF16", [count, heads, width]),
        "kv": rows(range(keys), width),
        "indices": Tensor("I32", [count, len(indices[0])], [i for row in indices for i in row]),
    }


PARAMS = {"softmax_scale": 0.5}


class SparseMlaTest(CommandLineTest):
    def attend(self, tensors, params=PARAMS):
        result, out = self.run_operator("sparse_mla", tensors, params)
        self.expect(result, 0)
        self.assertEqual(set(out), {"out", "lse", "max_logits"})
        return out

    def test_the_mean_of_the_listed_rows(self):
        out = self.attend(sparse_inputs([[1, 3, 5, 7], [2, 2, -1, 100]]))
        self.assertEqual(out["out"].shape, [2, 2, 512])
        self.assertEqual(set(out["out"].values[:1024]), {4.0})
        self.assertEqual(set(out["out"].values[1024:]), {2.0})
        for lse, expected in zip(out["lse"].values, [math.log(4)] * 2 + [math.log(2)] * 2):
            self.assertAlmostEqual(lse, expected, places=6)
        self.assertEqual(list(out["max_logits"].values), [0.0] * 4)

    def test_rows_without_a_valid_slot_are_zero(self):
        tensors = sparse_inputs([[-1, 8, 2147483647, -2147483648]])
        tensors["kv"].values = [float("nan")] * len(tensors["kv"].values)
        tensors["kv"].to_bytes = lambda: b"\xff\x7f" * (8 * 576)
        out = self.attend(tensors)
        self.assertEqual(set(out["out"].values), {0.0})
        self.assertEqual(set(out["lse"].values), {-INF})
        self.assertEqual(set(out["max_logits"].values), {-INF})
        out = self.attend(tensors, PARAMS | {"empty_lse": "pos_inf"})
        self.assertEqual(set(out["lse"].values), {INF})

    def test_an_empty_list_gives_empty_rows(self):
        out = self.attend(sparse_inputs([[]]))
        self.assertEqual(set(out["out"].values), {0.0})

    def test_topk_length_is_clamped(self):
        tensors = sparse_inputs([[1, 3, 5, 7]] * 3) | {"topk_length": Tensor("I32", [3], [2, -5, 1000])}
        out = self.attend(tensors)["out"].values
        self.assertEqual([out[0], out[1024], out[2048]], [2.0, 0.0, 4.0])

    def test_the_sink_scales_the_output_only(self):
        tensors = sparse_inputs([[4]], heads=3) | {"sink": Tensor("F32", [3], [0.0, INF, -INF])}
        out = self.attend(tensors)
        self.assertEqual([out["out"].values[h * 512] for h in range(3)], [2.0, 0.0, 4.0])
        self.assertEqual(list(out["lse"].values), [0.0] * 3)

    def test_two_segments(self):
        tensors = sparse_inputs([[0, 2]]) | {
            "extra_kv": rows([10, 20], 576),
            "extra_indices": Tensor("I32", [1, 3], [1, 1, -1]),
            "extra_topk_length": Tensor("I32", [1], [3]),
        }
        self.assertEqual(self.attend(tensors)["out"].values[0], 10.5)

    def test_a_bf16_pool(self):
        tensors = sparse_inputs([[0, 1, 2, 3, 4]], keys=4)
        row_bytes = tensors["kv"].to_bytes()
        pages = b"".join(row_bytes[page * 2304 : (page + 1) * 2304] + b"\xff" * 10 for page in range(2))
        tensors["kv"] = Tensor("U8", [2, 2314], pages)
        self.assertEqual(self.attend(tensors, PARAMS | {"page_size": 2})["out"].values[0], 1.5)

    def test_an_f576_pool_and_queries_of_codes(self):
        # Keys of code 0x38 (1.0) and 0x40 (2.0), queries of 1.0: the logits are 576 and 1152 times the scales.
        tensors = {
            "q": Tensor("U8", [1, 1, 576], b"\x38" * 576),
            "kv": Tensor("U8", [1, 2 * 576], b"\x38" * 576 + b"\x40" * 576),
            "indices": Tensor("I32", [1, 1], [1]),
        }
        params = {"softmax_scale": 0.125, "row_format": "f576", "page_size": 2, "q_scale": 0.5, "k_scale": 2}
        out = self.attend(tensors, params)
        self.assertEqual(list(out["lse"].values), [144.0])
        self.assertEqual(set(out["out"].values), {4.0})
        tensors["q"] = Tensor("BF16", [1, 1, 576])
        self.expect_refused("sparse_mla", tensors, params, "q = bf16 with q_scale")
        out = self.attend(tensors, params | {"q_scale": 1})
        self.assertEqual(list(out["lse"].values), [0.0])

    def test_what_is_refused(self):
        good = sparse_inputs([[1, 2]])
        no_index = {name: tensor for name, tensor in good.items() if name != "indices"}
        self.expect_refused("sparse_mla", no_index, PARAMS, "indices is missing", "i32 [T, K]")
        self.expect_refused("sparse_mla", good, {}, "softmax_scale is missing")
        for scale in (0, -1, 1e39, 1e-300):
            self.expect_refused("sparse_mla", good, {"softmax_scale": scale}, "softmax_scale")
        for text in ('{"softmax_scale": NaN}', '{"softmax_scale": 1e999}', '{"softmax_scale": "1"}', '{"softmax_scale": true}'):
            self.expect_refused("sparse_mla", good, text, "params")
        self.expect_refused("sparse_mla", good, PARAMS | {"logit_cap": -1}, "logit_cap")
        self.expect_refused("sparse_mla", good, PARAMS | {"fixed_splits": -1}, "fixed_splits")
        self.attend(good, PARAMS | {"fixed_splits": 1000})
        self.expect_refused("sparse_mla", good, PARAMS | {"empty_lse": "zero"}, "empty_lse", "neg_inf, pos_inf")
        self.expect_refused("sparse_mla", good, PARAMS | {"row_format": "v33"}, "row_format", "v32")
        self.expect_refused("sparse_mla", good, PARAMS | {"row_format": "v32"}, "kv = bf16", "u8")
        self.expect_refused("sparse_mla", good | {"kv": Tensor("U8", [2, 2304])}, PARAMS, "page_size is missing")
        self.expect_refused("sparse_mla", good | {"kv": Tensor("U8", [2, 2303])}, PARAMS | {"page_size": 2}, "kv", "2304")
        self.expect_refused("sparse_mla", good | {"kv": rows([1], 512)}, PARAMS, "kv", "Dqk = 576 from q")
        self.expect_refused("sparse_mla", sparse_inputs([[1]], width=100), PARAMS, "head_dim_qk = 100")
        self.expect_refused("sparse_mla", good | {"sink": Tensor("F32", [3])}, PARAMS, "sink", "H = 2")
        self.expect_refused("sparse_mla", good | {"extra_kv": rows([1], 576)}, PARAMS, "extra_indices is missing")
        lengths = {"extra_topk_length": Tensor("I32", [1])}
        self.expect_refused("sparse_mla", good | lengths, PARAMS, "extra_topk_length is given without")

    def test_fields_that_need_others(self):
        good = sparse_inputs([[1, 2]])
        for row_format in ("v4", "r512"):
            self.expect_refused("sparse_mla", good, PARAMS | {"row_format": row_format}, "kv = bf16", "u8")
        for name in ("inv_scale", "extra_inv_scale", "extra_len", "row_to_request", "positions"):
            self.expect_refused("sparse_mla", good | {name: Tensor("F32", [1])}, PARAMS, name)
        self.expect_refused("sparse_mla", good | {"schedule": Tensor("F32", [1])}, PARAMS, "unsupported", "schedule")
        self.expect_refused("sparse_mla", good, PARAMS | {"q_scale": 2}, "q_scale = 2", "expected 1")
        self.expect_refused("sparse_mla", good, PARAMS | {"k_scale": 2}, "k_scale = 2", "expected 1")
        self.attend(good, PARAMS | {"q_scale": 1, "k_scale": 1.0})


V4_SCALES = [127] * 7 + [0xFF]  # 2^0; the last byte is never read


def v4_page(*codes):
    """A page of rows whose 448 codes are equal and whose rope part is zero."""
    rows = [value for code in codes for value in [code] * 448 + [0] * 128]
    return Tensor("U8", [1, len(codes) * 584], rows + V4_SCALES * len(codes))


class V4Test(CommandLineTest):
    """Rows of DeepSeek-V4: 0x38 is 1, 0x40 is 2, 0x48 is 4."""

    def attend(self, op, tensors, params):
        result, out = self.run_operator(op, tensors, params)
        self.expect(result, 0)
        return out

    def test_window_and_compressed_entries_under_one_softmax(self):
        tensors = {
            "q": Tensor("BF16", [2, 1, 512], [0.0] * 1024),
            "kv": v4_page(0x38, 0x40),
            "indices": Tensor("I32", [2, 2], [0, 1, -1, 1]),
            "extra_kv": Tensor("U8", [2, 512], [0x48] * 512 + [0x40] * 512),
            "extra_inv_scale": Tensor("F32", [2, 1], [2.0, 3.0]),
            "extra_page_table": Tensor("I32", [2, 2], [1, 0, 7, 0]),
            "extra_len": Tensor("I32", [2], [1, 5]),
            "row_to_request": Tensor("I32", [2], [0, 1]),
        }
        params = {"softmax_scale": 1, "row_format": "v4", "page_size": 2, "extra_row_format": "r512", "extra_page_size": 1}
        out = self.attend("sparse_mla", tensors, params)
        values = list(out["out"].values)
        self.assertEqual((values[0], values[511]), (3.0, 2.0))  # (1 + 2 + 6) / 3, rope (0 + 0 + 6) / 3
        self.assertEqual((values[512], values[1023]), (5.0, 4.0))  # (2 + 8) / 2
        self.assertAlmostEqual(out["lse"].values[0], math.log(3), places=6)
        # A quarter turn back: (x, y) becomes (y, -x).
        turn = {"inverse_rope": Tensor("F32", [3, 2], [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]), "positions": Tensor("I32", [2], [1, 0])}
        values = list(self.attend("sparse_mla", tensors | turn, params)["out"].values)
        self.assertEqual(values[509:512], [2.0, 2.0, -2.0])
        self.assertEqual(values[1022:], [4.0, 4.0])
        self.expect_refused("sparse_mla", tensors | {"extra_len": Tensor("I32", [1])}, params, "extra_len", "T = 2")

    def test_swa_decode_looks_at_the_leading_columns(self):
        tensors = {
            "q": Tensor("BF16", [3, 1, 512], [0.0] * 1536),
            "kv": Tensor("U8", [2, 1024], [0x38] * 512 + [0x40] * 512 + [0x48] * 512 + [0x7F] * 512),
            "inv_scale": Tensor("BF16", [4, 1], [1.0, 1.0, 1.0, 1.0]),
            "swa_indices": Tensor("I64", [4, 4], [0, 2, 3, 3, 1, -1, 2, 3, 0, 1, 2, 3, 9, 9, 9, 9]),
            "swa_lens": Tensor("I64", [4], [2, 3, -5, 99]),
        }
        params = {"softmax_scale": 1, "window": 3, "row_format": "r512", "page_size": 2}
        for shape in ([4, 4], [1, 4, 4], [4, 1, 4]):
            lists = Tensor("I64", shape, list(tensors["swa_indices"].values))
            out = self.attend("swa_decode", tensors | {"swa_indices": lists}, params)
            self.assertEqual([list(out["out"].values)[i * 512] for i in range(3)], [2.5, 3.0, 0.0])
        self.assertEqual(out["lse"].values[2], -math.inf)
        for name in ("swa_lens", "swa_indices"):
            self.expect_refused("swa_decode", tensors | {name: Tensor("F32", [4, 4])}, params, name)
        self.expect_refused("swa_decode", tensors, params | {"window": 0}, "window = 0")
        self.expect_refused("swa_decode", tensors | {"inv_scale": Tensor("F32", [3, 1])}, params, "inv_scale")


class MlaInputsTest(CommandLineTest):
    def test_the_parts_of_a_query_are_joined(self):
        tensors = {
            "q_nope": Tensor("BF16", [1, 2, 512], [1.0] * 512 + [2.0] * 512),
            "q_rope": Tensor("BF16", [1, 2, 64], [3.0] * 64 + [4.0] * 64),
        }
        result, out = self.run_operator("concat_absorbed_q", tensors, {})
        self.expect(result, 0)
        self.assertEqual(out["q"].shape, [1, 2, 576])
        self.assertEqual(list(out["q"].values), [1.0] * 512 + [3.0] * 64 + [2.0] * 512 + [4.0] * 64)
        self.expect_refused("concat_absorbed_q", {"q_nope": tensors["q_nope"]}, {}, "q_rope is missing")

    def test_rope_and_codes(self):
        # cos 0, sin 1 turns (a, b) into (-b, a); 1 / 0.5 = 2 is code 0x40, 1 / 2 = 0.5 is code 0x30.
        keys = {
            "k_nope": Tensor("BF16", [1, 512], [1.0] * 512),
            "k_rope": Tensor("BF16", [1, 64], [1.0] * 64),
            "positions": Tensor("I32", [1], [9]),
            "cos_sin": Tensor("F32", [1, 64], [0.0] * 32 + [1.0] * 32),
        }
        params = {"rope_style": "interleaved", "k_scale": 0.5, "q_scale": 2}
        result, out = self.run_operator("mla_rope_quantize", keys, params)
        self.expect(result, 0)
        self.assertEqual(set(out), {"k_fp8"})
        self.assertEqual(bytes(out["k_fp8"].values), b"\x40" * 512 + b"\xc0\x40" * 32)
        queries = {"q_nope": Tensor("BF16", [1, 1, 512], [1.0] * 512), "q_rope": Tensor("BF16", [1, 1, 64], [1.0] * 64)}
        result, out = self.run_operator("mla_rope_quantize", keys | queries, params | {"rope_style": "half_split"})
        self.expect(result, 0)
        self.assertEqual(bytes(out["q_fp8"].values), b"\x30" * 512 + b"\xb0" * 32 + b"\x30" * 32)
        self.expect_refused("mla_rope_quantize", keys, {}, "rope_style is missing")
        self.expect_refused("mla_rope_quantize", keys, params | {"k_scale": 0}, "k_scale = 0")


class DenseMlaTest(CommandLineTest):
    def tensors(self):
        # Pages of two tokens; token j of a page p holds 2 p + j in every channel.
        values = [float(j) for j in range(6) for _ in range(576)]
        return {
            "q": Tensor("BF16", [4, 1, 576]),
            "kv": Tensor("BF16", [3, 2, 1, 576], values),
            "page_table": Tensor("I32", [1, 3], [2, 0, 99]),
            "kv_len": Tensor("I32", [1], [3]),
            "q_indptr": Tensor("I32", [2], [0, 3]),
        }

    def test_causal_rows_are_right_aligned(self):
        result, out = self.run_operator("dense_mla", self.tensors(), PARAMS)
        self.expect(result, 0)  # keys 4, 5, 0; row 3 belongs to no request: zero bytes
        self.assertEqual([out["out"].values[t * 512] for t in range(4)], [4.0, 4.5, 3.0, 0.0])
        self.assertAlmostEqual(out["lse"].values[2], math.log(3), 6)
        self.assertEqual(out["lse"].values[3], 0.0)
        result, out = self.run_operator("dense_mla", self.tensors(), PARAMS | {"causal": False, "page_size": 2})
        self.expect(result, 0)
        self.assertEqual([out["out"].values[t * 512] for t in range(3)], [3.0] * 3)

    def test_refusals(self):
        tensors = self.tensors()
        self.expect_refused("dense_mla", tensors, PARAMS | {"page_size": 4}, "page_size", "4")
        self.expect_refused("dense_mla", tensors, {}, "softmax_scale")
        self.expect_refused("dense_mla", tensors, PARAMS | {"row_format": "v32"}, "kv has 4 axes")
        self.expect_refused("dense_mla", tensors, PARAMS | {"row_format": "v4"}, "v4")
        self.expect_refused("dense_mla", tensors, PARAMS | {"k_scale": 2}, "k_scale")
        self.expect_refused("dense_mla", tensors | {"kv_len": Tensor("I32", [2])}, PARAMS, "kv_len")
        self.expect_refused("dense_mla", tensors | {"indices": Tensor("I32", [2])}, PARAMS, "indices")


class MhaTest(CommandLineTest):
    def test_causal_rows_are_right_aligned(self):
        values = [float(j) for j in range(3) for _ in range(128)]
        tensors = {
            "q": Tensor("BF16", [6, 1, 192]),
            "k": Tensor("BF16", [3, 1, 192]),
            "v": Tensor("BF16", [3, 1, 128], values),
            "q_indptr": Tensor("I32", [2], [0, 5]),
            "kv_indptr": Tensor("I32", [2], [0, 3]),
        }
        result, out = self.run_operator("mha_varlen", tensors, PARAMS)
        self.expect(result, 0)
        self.assertEqual([out["out"].values[t * 128] for t in range(6)], [0.0, 0.0, 0.0, 0.5, 1.0, 0.0])
        lse = out["lse"].values
        self.assertEqual(list(lse[:3]) + [lse[5]], [-INF, -INF, 0.0, 0.0])  # row 5 belongs to no request: zero bytes
        result, out = self.run_operator("mha_varlen", tensors, PARAMS | {"causal": False})
        self.assertEqual([out["out"].values[t * 128] for t in range(5)], [1.0] * 5)
        self.expect_refused("mha_varlen", tensors, PARAMS | {"causal": 1}, "params.causal", "true or false")
        self.expect_refused("mha_varlen", tensors | {"kv_indptr": Tensor("I32", [3])}, PARAMS, "kv_indptr")
        self.expect_refused("mha_varlen", tensors | {"kv_indptr": Tensor("I32", [0])}, PARAMS, "kv_indptr")


class MergeTest(CommandLineTest):
    def test_empty_parts_and_the_type_of_the_parts(self):
        tensors = {
            "out_parts": Tensor("BF16", [2, 1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
            "lse_parts": Tensor("F32", [2, 1, 2], [-INF, 1.0, 2.0, INF]),
        }
        result, out = self.run_operator("merge_lse", tensors, {})
        self.expect(result, 0)
        self.assertEqual(out["out"].dtype, "BF16")
        self.assertEqual(list(out["out"].values), [7.0, 8.0, 9.0, 4.0, 5.0, 6.0])
        self.assertEqual(list(out["lse"].values), [2.0, 1.0])
