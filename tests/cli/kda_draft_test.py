"""fovea run: kda_verify, kda_commit and causal_conv1d on inputs whose results are known by hand."""

import math

from support import CommandLineTest, Tensor

HALF = -math.log(2.0)
PARAMS = {"gate": "given", "beta_kind": "prob", "scale": 1, "rows_per_request": 2}

# One head, K = 2, V = 1: k = (1, 0), q = (1, 1), v = 3, every channel halves, beta = 1/2. (2, 4) becomes (2, 2) with u = 1 and
# output 4, then (2, 1) with u = 1 and output 3; after row 0 again it would be the same.
ROWS = {
    "q": Tensor("BF16", [4, 1, 2], [1, 1] * 4),
    "k": Tensor("BF16", [4, 1, 2], [1, 0] * 4),
    "v": Tensor("BF16", [4, 1, 1], [3] * 4),
    "g": Tensor("F32", [4, 1, 2], [HALF] * 8),
    "beta": Tensor("F32", [4, 1], [0.5] * 4),
    "state": Tensor("F32", [2, 1, 1, 2], [9, 9, 2, 4]),
    "slot": Tensor("I32", [2], [1, -1]),
}


class KdaDraftTest(CommandLineTest):
    def close(self, tensor, expected):
        self.assertEqual(len(tensor.values), len(expected))
        for found, value in zip(tensor.values, expected):
            self.assertAlmostEqual(found, value, places=4)

    def call(self, op, tensors, params):
        result, out = self.run_operator(op, tensors, params)
        self.expect(result, 0)
        return out

    def test_verify(self):
        out = self.call("kda_verify", ROWS, PARAMS | {"mode": "states"})
        self.assertEqual(set(out), {"out", "scratch"})
        self.close(out["out"], [4, 3, 0, 0])
        self.close(out["scratch"], [2, 2, 2, 1, 0, 0, 0, 0])
        out = self.call("kda_verify", ROWS, PARAMS | {"mode": "records"})
        self.close(out["scratch"], [1, 0, HALF, HALF, 1] * 2 + [0] * 10)
        # Both rows come from the committed state; 7 is no row before row 1.
        out = self.call("kda_verify", ROWS | {"parent": Tensor("I32", [2], [-1, 7])}, PARAMS | {"mode": "states"})
        self.close(out["scratch"], [2, 2, 2, 2, 0, 0, 0, 0])
        self.expect_refused("kda_verify", ROWS, PARAMS, "mode is missing")
        self.expect_refused("kda_verify", ROWS, PARAMS | {"mode": "states", "rows_per_request": 3}, "rows_per_request = 3")

    def test_commit(self):
        records = {
            "scratch": Tensor("F32", [2, 2, 1, 5], [1, 0, HALF, HALF, 1] * 2 + [0] * 10),
            "state": Tensor("F32", [3, 1, 1, 2], [9, 9, 2, 4, 7, 7]),
            "accepted": Tensor("I32", [2], [2, 1]),
            "slot": Tensor("I32", [2], [1, -1]),
            "track_slot": Tensor("I32", [2], [2, -1]),
            "track_accepted": Tensor("I32", [2], [1, 0]),
        }
        out = self.call("kda_commit", records, {"mode": "records"})
        self.assertEqual(set(out), {"state"})
        self.close(out["state"], [9, 9, 2, 1, 2, 2])
        states = records | {
            "scratch": Tensor("F32", [2, 2, 1, 1, 2], [2, 2, 2, 1, 0, 0, 0, 0]),
            "window_scratch": Tensor("BF16", [2, 2, 3, 1], [1, 2, 3, 4, 5, 6] + [0] * 6),
            "window_state": Tensor("BF16", [3, 1, 3], [-1] * 9),
        }
        out = self.call("kda_commit", states, {"mode": "states", "window_layout": "dw"})
        self.close(out["state"], [9, 9, 2, 1, 2, 2])
        self.close(out["window_state"], [-1, -1, -1, 4, 5, 6, 1, 2, 3])
        states["accepted"] = Tensor("I32", [2], [3, 1])
        out = self.call("kda_commit", states, {"mode": "states", "window_layout": "dw"})
        self.close(out["state"], [9, 9, 2, 4, 2, 2])
        check = {"mode": "states", "window_layout": "dw", "check": True}
        self.expect_refused("kda_commit", states, check, "accepted[0]")
        self.expect_refused("kda_commit", records, {}, "mode is missing")

    def test_convolution(self):
        tensors = {
            "x": Tensor("BF16", [3, 1], [1, 2, 4]),
            "weight": Tensor("BF16", [1, 4], [1000, 100, 10, 1]),
            "bias": Tensor("F32", [1], [0.5]),
            "window_state": Tensor("BF16", [1, 3, 1], [-3, 0, 7]),
        }
        prefill = tensors | {"q_indptr": Tensor("I32", [2], [0, 3])}
        out = self.call("causal_conv1d", prefill, {"activation": "none"})
        self.assertEqual(set(out), {"out", "window_state"})
        self.close(out["out"], [-2928, 712, 7136])
        self.close(out["window_state"], [1, 2, 4])
        draft = {"activation": "none", "mode": "verify", "rows_per_request": 3}
        out = self.call("causal_conv1d", tensors, draft)
        self.assertEqual(set(out), {"out", "window_scratch"})
        self.close(out["out"], [-2928, 712, 7136])
        self.close(out["window_scratch"], [0, 7, 1, 7, 1, 2, 1, 2, 4])
        update = tensors | {"slot": Tensor("I32", [3], [-1, 0, 1])}
        out = self.call("causal_conv1d", update, {"activation": "none", "mode": "update"})
        self.close(out["out"], [0, -2928, 0])
        self.close(out["window_state"], [0, 7, 2])
        self.expect_refused("causal_conv1d", tensors, {}, "q_indptr is missing")
        self.expect_refused("causal_conv1d", update, {"mode": "prefil"}, "prefil")
