"""fovea run: the operators of block-sparse attention on inputs whose results are known by hand."""

import math

from support import CommandLineTest, Tensor

INF = float("inf")


def i32(values):
    return Tensor("I32", [len(values)], values)


def one_request(length, rows, blocks):
    return {"page_table": Tensor("I32", [1, blocks], range(blocks)), "kv_len": i32([length]), "q_indptr": i32([0, rows])}


def attend_inputs(length=300, position=None, lists=((0, 2),), block=128):
    """q = 0 makes the softmax uniform; the value of token j is its block."""
    blocks = (length + block - 1) // block
    slots = blocks * block
    tensors = one_request(length, 1, blocks) | {
        "q": Tensor("BF16", [1, 2, 16]),
        "k_pool": Tensor("BF16", [slots, 1, 16]),
        "v_pool": Tensor("BF16", [slots, 1, 16], [slot // block for slot in range(slots) for _ in range(16)]),
        "blocks": Tensor("I32", [1, 1, len(lists[0])], lists[0]),
    }
    if position is not None:
        tensors["q_offset"] = i32([position])
    return tensors


class PageTableTest(CommandLineTest):
    def test_worked_case(self):
        pages = [[2, 7, 4, 9], [6, 8, 11, 0], [5, 1, 10, 3]]
        slots = [page * 4 + offset for row in pages for page in row for offset in range(4)]
        tensors = {"req_to_token": Tensor("I32", [3, 16], slots), "pool_row": i32([2, 0]), "kv_len": i32([5, 9])}
        result, out = self.run_operator("build_page_table", tensors, {"page_size": 4, "delta": 3})
        self.expect(result, 0)
        self.assertEqual(list(out["page_table"].values), [5, 1, 0, 0, 2, 7, 4, 0])
        result, out = self.run_operator("build_page_table", tensors, {"page_size": 4, "max_pages": 1})
        self.assertEqual(list(out["page_table"].values), [5, 2])
        self.expect_refused("build_page_table", tensors, {"page_size": 0}, "page_size")


class IndexBranchTest(CommandLineTest):
    def score_inputs(self, length):
        keys = [[0.0] * 16 for _ in range(256)]
        for j, row in enumerate(keys):
            row[0] = 2.0 if j == 5 else 3.0 if j == 130 else -1.0
        return one_request(length, 1, 2) | {
            "iq": Tensor("BF16", [1, 1, 16], [1.0] + [0.0] * 15),
            "index_k": Tensor("BF16", [256, 1, 16], [value for row in keys for value in row]),
        }

    def test_scores(self):
        for length, expected in ((130, [2, -1]), (131, [2, 3]), (128, [2, -INF])):
            result, out = self.run_operator("msa_block_scores", self.score_inputs(length), {"block_size": 128})
            self.expect(result, 0)
            self.assertEqual(list(out["scores"].values), expected)

    def test_selection(self):
        scores = [1.0 if n == 5 else -1.0 for n in range(20)]
        tensors = {"scores": Tensor("F32", [1, 1, 20], scores), "kv_len": i32([80]), "q_indptr": i32([0, 1])}
        params = {"block_size": 4, "topk": 4, "init_blocks": 1, "local_blocks": 2}
        result, out = self.run_operator("msa_select_blocks", tensors, params)
        self.expect(result, 0)
        self.assertEqual(list(out["blocks"].values), [0, 5, 18, 19])
        union = params | {"index_reduce": "union", "num_kv_heads": 1, "blocks_layout": "row_major"}
        result, out = self.run_operator("msa_select_blocks", tensors, union)
        self.assertEqual(out["blocks"].shape, [1, 1, 4])
        self.expect_refused("msa_select_blocks", tensors, params | {"topk": 2}, "init_blocks + local_blocks")
        self.expect_refused("msa_select_blocks", tensors, params | {"page_size": 64}, "page_size")

    def test_both(self):
        result, out = self.run_operator("msa_score_select", self.score_inputs(131), {"block_size": 128, "topk": 1, "local_blocks": 0})
        self.expect(result, 0)
        self.assertEqual(list(out["blocks"].values), [1])


class AttendTest(CommandLineTest):
    def test_means_of_the_listed_blocks(self):
        for position, value, count in ((None, 88 / 172, 172), (260, 10 / 133, 133)):
            result, out = self.run_operator("msa_attend", attend_inputs(position=position), {"block_size": 128})
            self.expect(result, 0)
            self.assertAlmostEqual(out["out"].values[0], value, delta=2e-3)
            self.assertAlmostEqual(out["lse"].values[1], math.log(count), places=5)
            for lists in ((2, 0), (0, 0, 2), (0, 2, -1), (-1, 2, 0), (0, 2, 5)):
                other = self.run_operator("msa_attend", attend_inputs(position=position, lists=(lists,)), {"block_size": 128})[1]
                self.assertEqual(other["out"].values, out["out"].values)

    def test_refusals(self):
        tensors = attend_inputs()
        self.expect_refused("msa_attend", tensors, {"block_size": 128, "page_size": 64}, "page_size")
        self.expect_refused("msa_attend", tensors, {"block_size": 128, "topk": 3}, "blocks")
        self.expect_refused("msa_attend", tensors, {"block_size": 256}, "multiple of block_size")
        self.expect_refused("msa_attend", tensors, {"block_size": 128, "kv_mode": "kv8"}, "k_pool")
        self.expect_refused("msa_attend", tensors, {"block_size": 128, "softmax_scale": 0}, "softmax_scale")
        self.expect_refused("msa_attend", tensors | {"k_scale": Tensor("F32", [1])}, {"block_size": 128}, "k_scale")
