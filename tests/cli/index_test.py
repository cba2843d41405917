"""fovea run: the indexer on inputs whose results are known by hand."""

import math
import struct

from support import CommandLineTest, Tensor

INF, NAN = float("inf"), float("nan")
ONE, TWO, MINUS_ONE, LARGEST = 0x38, 0x40, 0xB8, 0x7E  # e4m3 codes of 1, 2, -1, 448


class QuantizeTest(CommandLineTest):
    PARAMS = {"rope_style": "half_split", "scale_mode": "fp32"}

    def inputs(self, q, k):
        """One row, one head of four channels, rope over the first two: a quarter turn at position 1."""
        return {
            "q": Tensor("BF16", [1, 1, 4], q),
            "k": Tensor("BF16", [1, 4], k),
            "norm_weight": Tensor("F32", [4], [1.0] * 4),
            "norm_bias": Tensor("F32", [4], [0.0] * 4),
            "head_gate": Tensor("F32", [1, 1], [8.0]),
            "positions": Tensor("I32", [1], [1]),
            "cos_sin": Tensor("F32", [2, 2], [1.0, 0.0, 0.0, 1.0]),
        }

    def quantize(self, inputs, params):
        result, out = self.run_operator("index_quantize", inputs, params)
        self.expect(result, 0)
        self.assertEqual(set(out), {"q_fp8", "q_scale", "k_fp8", "k_scale", "head_weight"})
        return {name: list(tensor.values) for name, tensor in out.items()}

    def test_rope_norm_and_scales(self):
        got = self.quantize(self.inputs([448.0, 1.0, 2.0, 4.0], [3.0, 1.0, 3.0, 1.0]), self.PARAMS)
        self.assertEqual(got["q_fp8"], [MINUS_ONE, LARGEST, TWO, 0x48])  # (a, b) turned to (-b, a)
        self.assertEqual(got["q_scale"], [1.0])
        self.assertEqual(got["head_weight"], [4.0])  # 8 * 1^-1/2 * 4^-1/2 * 1
        self.assertEqual(got["k_fp8"], [LARGEST, LARGEST, LARGEST, 0xFE])  # (1, -1, 1, -1) turned to (1, 1, 1, -1)
        self.assertAlmostEqual(got["k_scale"][0] * 448, 1.0, places=2)

    def test_powers_of_two_and_hadamard(self):
        params = self.PARAMS | {"scale_mode": "pow2", "hadamard": True}
        inputs = self.inputs([4.0, 4.0, 4.0, 4.0], [3.0, 1.0, 3.0, 1.0]) | {"positions": Tensor("I32", [1], [-7])}
        got = self.quantize(inputs, params)  # position clamped to 0: no turn; the rotation gives (8, 0, 0, 0)
        self.assertEqual(got["q_scale"], [2.0**-5])
        self.assertEqual(got["q_fp8"][0], 0x78)  # 256
        self.assertEqual({code & 0x7F for code in got["q_fp8"][1:]}, {0})

    def test_zero_rows_are_finite(self):
        got = self.quantize(self.inputs([0.0] * 4, [5.0] * 4), self.PARAMS)
        self.assertEqual({code & 0x7F for code in got["q_fp8"] + got["k_fp8"]}, {0})
        self.assertTrue(all(math.isfinite(value) for value in got["q_scale"] + got["k_scale"] + got["head_weight"]))

    def test_what_is_refused(self):
        good = self.inputs([1.0] * 4, [1.0] * 4)
        self.expect_refused("index_quantize", good, {"rope_style": "half_split"}, "scale_mode is missing")
        self.expect_refused("index_quantize", good, {"scale_mode": "fp32"}, "rope_style is missing")
        self.expect_refused("index_quantize", good, self.PARAMS | {"rope_style": "neox"}, "rope_style", "interleaved")
        self.expect_refused("index_quantize", good, self.PARAMS | {"hadamard": "yes"}, "params.hadamard")
        odd = good | {"cos_sin": Tensor("F32", [2, 3])}
        self.expect_refused("index_quantize", odd, self.PARAMS, "rope_dim = 3")
        wide = good | {"cos_sin": Tensor("F32", [2, 6])}
        self.expect_refused("index_quantize", wide, self.PARAMS, "rope_dim = 6")
        self.expect_refused("index_quantize", good | {"k": Tensor("BF16", [1, 5])}, self.PARAMS, "k = bf16", "Di = 4")


class IndexerTest(CommandLineTest):
    def ragged(self, k_start, k_end):
        """Two heads of two channels; key j has the codes (1, j < 2 ? 1 : 2) and the scale j + 1."""
        rows = len(k_start)
        return {
            "q_fp8": Tensor("U8", [rows, 2, 2], [ONE, ONE, MINUS_ONE, ONE] * rows),
            "head_weight": Tensor("F32", [rows, 2], [1.0, -10.0] * rows),
            "k_fp8": Tensor("U8", [4, 2], [ONE, ONE, ONE, ONE, ONE, TWO, ONE, TWO]),
            "k_scale": Tensor("F32", [4], [1.0, 2.0, 3.0, 4.0]),
            "k_start": Tensor("I32", [rows], k_start),
            "k_end": Tensor("I32", [rows], k_end),
        }

    LOGITS = [2.0, 4.0, -21.0, -28.0]  # scale * (1 * (a + b) - 10 * max(0, b - a))

    def paged(self, table, requests, lengths, **more):
        """Two pages of two keys: keys 0, 1 on page 1 and keys 2, 3 on page 0."""
        keys = self.ragged([0], [0])
        pages = b""
        for first in (2, 0):
            pages += bytes(keys["k_fp8"].values[2 * first : 2 * first + 4])
            pages += struct.pack("<2f", *keys["k_scale"].values[first : first + 2]) + b"\xff" * 3
        rows = len(lengths)
        return {
            "q_fp8": Tensor("U8", [rows, 2, 2], [ONE, ONE, MINUS_ONE, ONE] * rows),
            "head_weight": Tensor("F32", [rows, 2], [1.0, -10.0] * rows),
            "index_pool": Tensor("U8", [2, 15], pages),
            "page_table": table,
            "row_to_request": Tensor("I32", [rows], requests),
            "row_len": Tensor("I32", [rows], lengths),
        } | more

    PAGED = {"layout": "paged", "page_size": 2}


class LogitsTest(IndexerTest):
    def score(self, tensors, params):
        result, out = self.run_operator("index_logits", tensors, params)
        self.expect(result, 0)
        logits = out["logits"]
        width = logits.shape[1]
        return [list(logits.values[t * width : (t + 1) * width]) for t in range(logits.shape[0])]

    def test_ragged_columns_start_at_the_row(self):
        got = self.score(self.ragged([0, 1, 3, 2], [4, 3, 2, 2]), {"layout": "ragged"})
        self.assertEqual(got[0], self.LOGITS)
        self.assertEqual(got[1][:2], self.LOGITS[1:3])

    def test_ragged_bounds_are_cut_to_the_keys(self):
        got = self.score(self.ragged([-5, 2147483647], [2147483647, -1]), {"layout": "ragged"})
        self.assertEqual(got[0], self.LOGITS)

    def test_float8_tensors_are_codes(self):
        tensors = self.ragged([0], [4])
        tensors["k_fp8"].dtype = "F8_E4M3"
        self.assertEqual(self.score(tensors, {"layout": "ragged"})[0], self.LOGITS)

    def test_paged_columns_are_positions(self):
        table = Tensor("I32", [2, 2], [1, 0, 0, -1])
        got = self.score(self.paged(table, [0, 1, 0, 0], [4, 3, 1, -3]), self.PAGED)
        self.assertEqual(got[0], self.LOGITS)
        self.assertEqual(got[1][:3], self.LOGITS[2:] + [-INF])
        self.assertEqual(got[2][:1], self.LOGITS[:1])

    def test_positions_past_the_table_are_minus_infinity(self):
        got = self.score(self.paged(Tensor("I32", [1, 1], [1]), [0], [5]), self.PAGED)
        self.assertEqual(got[0], self.LOGITS[:2] + [-INF] * 3)

    def test_rows_of_no_request_do_not_count(self):
        got = self.score(self.paged(Tensor("I32", [1, 2], [1, 0]), [0, 7, -1], [2, 2147483647, 9]), self.PAGED)
        self.assertEqual(got[0], self.LOGITS[:2])

    def test_a_schedule_changes_nothing(self):
        schedule = Tensor("I32", [3, 2], [0, 0, 0, 0, 1, 0])
        tensors = self.paged(Tensor("I32", [1, 2], [1, 0]), [0], [4], schedule=schedule)
        self.assertEqual(self.score(tensors, self.PAGED)[0], self.LOGITS)

    def test_lengths_out_of_proportion_are_cut(self):
        got = self.score(self.paged(Tensor("I32", [1, 2], [1, 0]), [0] * 3, [2147483647, 5, 2]), self.PAGED)
        self.assertEqual(got[0], self.LOGITS + [-INF] * 4096)
        self.assertEqual(got[1][:5], self.LOGITS + [-INF])

    def test_what_is_refused(self):
        good = self.ragged([0], [4])
        self.expect_refused("index_logits", good, {}, "layout is missing")
        self.expect_refused("index_logits", good, {"layout": "flat"}, "layout", "ragged, paged")
        self.expect_refused("index_logits", good, self.PAGED, "index_pool is missing")
        paged = self.paged(Tensor("I32", [1, 2], [1, 0]), [0], [4])
        self.expect_refused("index_logits", paged, {"layout": "paged"}, "page_size is missing")
        self.expect_refused("index_logits", paged, self.PAGED | {"page_size": 0}, "page_size")
        self.expect_refused("index_logits", paged, self.PAGED | {"page_size": 3}, "index_pool")
        self.expect_refused("index_logits", paged | {"schedule": Tensor("I32", [3])}, self.PAGED, "schedule")
        self.expect_refused("index_logits", good | {"k_scale": Tensor("F32", [3])}, {"layout": "ragged"}, "k_scale", "S = 4")


class SelectTest(IndexerTest):
    """The logits of LogitsTest, from the best: 4 and 2 at positions 1 and 0, then -21 and -28."""

    def select(self, tensors, params):
        result, out = self.run_operator("index_select", tensors, params)
        self.expect(result, 0)
        self.assertEqual(set(out), {"indices"})
        k = params["topk"]
        values = list(out["indices"].values)
        return [values[t * k : (t + 1) * k] for t in range(len(values) // k)]

    def test_ragged_layout(self):
        tensors = self.ragged([0, 1, 2], [4, 4, 2])
        got = self.select(tensors, {"layout": "ragged", "topk": 2})
        self.assertEqual(got, [[0, 1], [0, 1], [-1, -1]])
        got = self.select(tensors, {"layout": "ragged", "topk": 1})
        self.assertEqual(got, [[1], [0], [-1]])
        tensors["row_offset"] = Tensor("I32", [3], [100, 200, 300])
        got = self.select(tensors, {"layout": "ragged", "topk": 1, "transform": "ragged"})
        self.assertEqual(got, [[101], [200], [-1]])

    def test_ragged_layout_with_paged_transform(self):
        tensors = self.ragged([0], [4]) | {"page_table": Tensor("I32", [1, 2], [8, 9]), "row_to_request": Tensor("I32", [1], [0])}
        params = {"layout": "ragged", "topk": 3, "transform": "paged", "page_size": 2}
        self.assertEqual(self.select(tensors, params), [[16, 17, 18]])

    def test_paged_layout(self):
        tensors = self.paged(Tensor("I32", [1, 2], [1, 0]), [0, 0, 5], [4, 1, 4])
        self.assertEqual(self.select(tensors, self.PAGED | {"topk": 3}), [[0, 1, 2], [0, -1, -1], [-1] * 3])
        got = self.select(tensors, self.PAGED | {"topk": 3, "transform": "paged"})
        self.assertEqual(got, [[2, 3, 0], [2, -1, -1], [-1] * 3])
        tensors["token_table"] = Tensor("I32", [1, 4], [70, 60, 50, 40])
        got = self.select(tensors, self.PAGED | {"topk": 3, "transform": "paged"})
        self.assertEqual(got, [[70, 60, 50], [70, -1, -1], [-1] * 3])

    def test_lengths_beyond_the_table(self):
        tensors = self.paged(Tensor("I32", [1, 1], [1]), [0], [2147483647])
        self.assertEqual(self.select(tensors, self.PAGED | {"topk": 4}), [[0, 1, 2, 3]])
        self.assertEqual(self.select(tensors, self.PAGED | {"topk": 1}), [[1]])
        result, _ = self.run_operator("index_select", tensors, self.PAGED | {"topk": 1})
        self.assertEqual(result.stderr, "")

    def test_selection_is_refused_like_its_parts(self):
        good = self.ragged([0], [4])
        self.expect_refused("index_select", good, {"layout": "ragged"}, "topk is missing")
        self.expect_refused("index_select", good, {"topk": 1}, "layout is missing")
        self.expect_refused("index_select", good, {"layout": "ragged", "topk": -3}, "topk")
        self.expect_refused("index_select", good | {"row": Tensor("I32", [1])}, {"layout": "ragged", "topk": 1}, "'row'")


class TopkTest(CommandLineTest):
    def select(self, logits, lengths, params, **tensors):
        width = len(logits[0])
        inputs = {
            "logits": Tensor("F32", [len(logits), width], [value for row in logits for value in row]),
            "row_len": Tensor("I32", [len(lengths)], lengths),
        } | tensors
        result, out = self.run_operator("topk_select", inputs, params)
        self.expect(result, 0)
        k = params["topk"]
        values = list(out["indices"].values)
        return [values[t * k : (t + 1) * k] for t in range(len(lengths))]

    def test_ties_go_to_the_smaller_position_and_the_order_ascends(self):
        logits = [[0.0, -0.0, 5.0, 0.0, 7.0, 0.0]]
        self.assertEqual(self.select(logits, [6], {"topk": 4}), [[0, 1, 2, 4]])

    def test_short_and_empty_rows(self):
        logits = [[1e30] * 4] * 4
        self.assertEqual(
            self.select(logits, [3, 0, -7, 2147483647], {"topk": 4}), [[0, 1, 2, -1], [-1] * 4, [-1] * 4, [0, 1, 2, 3]]
        )

    def test_nan_ranks_below_minus_infinity(self):
        self.assertEqual(self.select([[NAN, -INF, NAN, INF]], [4], {"topk": 2}), [[1, 3]])

    def test_windows_are_relative_to_their_start(self):
        start = Tensor("I32", [2], [2, -9])
        self.assertEqual(self.select([[9, 9, 1, 2, 3]] * 2, [3, 5], {"topk": 2}, row_start=start), [[1, 2], [0, 1]])

    def test_paged_transform(self):
        got = self.select(
            [[1, 2, 3, 4, 5]] * 3,
            [5, 5, 5],
            {"topk": 4, "transform": "paged", "page_size": 2},
            page_table=Tensor("I32", [1, 2], [7, -1]),
            row_to_request=Tensor("I32", [3], [0, 1, -1]),
        )
        self.assertEqual(got, [[15, -1, -1, -1], [-1] * 4, [-1] * 4])

    def test_token_table(self):
        table = Tensor("I32", [1, 5], [50, 40, 30, 20, 10])
        got = self.select([[1, 2, 3, 4, 5]], [5], {"topk": 2, "transform": "paged"}, token_table=table)
        self.assertEqual(got, [[20, 10]])

    def test_ragged_transform(self):
        offset = Tensor("I32", [1], [1000])
        self.assertEqual(self.select([[3, 1, 2]], [3], {"topk": 2, "transform": "ragged"}, row_offset=offset), [[1000, 1002]])

    def test_names_that_the_transform_does_not_use_change_nothing(self):
        inputs = {"logits": Tensor("F32", [1, 2]), "row_len": Tensor("I32", [1], [2]), "row_offset": Tensor("I32", [1])}
        result, out = self.run_operator("topk_select", inputs, {"topk": 2, "page_size": 4})
        self.expect(result, 0)
        self.assertIn("row_offset is not used", result.stderr)
        self.assertEqual(list(out["indices"].values), [0, 1])

    def test_what_is_refused(self):
        good = {"logits": Tensor("F32", [1, 2]), "row_len": Tensor("I32", [1], [2])}
        self.expect_refused("topk_select", good, {}, "topk is missing")
        self.expect_refused("topk_select", good, {"topk": -1}, "topk")
        self.expect_refused("topk_select", good, {"topk": 1 << 40}, "topk")
        self.expect_refused("topk_select", good | {"typo": Tensor("U8", [1])}, {"topk": 2147483647}, "unknown tensor 'typo'")
        self.expect_refused("topk_select", good, {"topk": 2, "transform": "global"}, "transform", "ragged")
        self.expect_refused("topk_select", good, {"topk": 2, "transform": "paged", "page_size": 2}, "page_table is missing")
        self.expect_refused("topk_select", good, {"topk": 2, "transform": "ragged"}, "row_offset is missing")
        self.expect_refused("topk_select", good | {"row_len": Tensor("I32", [2])}, {"topk": 2}, "row_len", "T = 1")
        self.expect_refused("topk_select", good | {"logits": Tensor("BF16", [1, 2])}, {"topk": 2}, "logits = bf16")
        tables = {"page_table": Tensor("I32", [1, 1]), "token_table": Tensor("I32", [1, 1])}
        self.expect_refused("topk_select", good | tables, {"topk": 2, "transform": "paged"}, "both given")
