"""fovea run: the selection operators on rows whose winners are known by hand."""

from support import CommandLineTest, Tensor

INF, NAN = float("inf"), float("nan")


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
        self.expect_refused("topk_select", good, {"topk": 2, "transform": "global"}, "transform", "ragged")
        self.expect_refused("topk_select", good, {"topk": 2, "transform": "paged", "page_size": 2}, "page_table is missing")
        self.expect_refused("topk_select", good, {"topk": 2, "transform": "ragged"}, "row_offset is missing")
        self.expect_refused("topk_select", good | {"row_len": Tensor("I32", [2])}, {"topk": 2}, "row_len", "T = 1")
        self.expect_refused("topk_select", good | {"logits": Tensor("BF16", [1, 2])}, {"topk": 2}, "logits = bf16")
        tables = {"page_table": Tensor("I32", [1, 1]), "token_table": Tensor("I32", [1, 1])}
        self.expect_refused("topk_select", good | tables, {"topk": 2, "transform": "paged"}, "both given")
