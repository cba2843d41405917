"""fovea run: kda_gate, kda_prefill and kda_decode on inputs whose results are known by hand."""

import math

from support import CommandLineTest, Tensor

HALF = -math.log(2.0)
PARAMS = {"gate": "given", "beta_kind": "prob", "scale": 1}


def token_rows(rows):
    """One head, K = 2, V = 1: k = (1, 0), q = (1, 1), v = 3, every channel halves, beta = 1/2."""
    return {
        "q": Tensor("BF16", [rows, 1, 2], [1, 1] * rows),
        "k": Tensor("BF16", [rows, 1, 2], [1, 0] * rows),
        "v": Tensor("BF16", [rows, 1, 1], [3] * rows),
        "g": Tensor("F32", [rows, 1, 2], [HALF, HALF] * rows),
        "beta": Tensor("F32", [rows, 1], [0.5] * rows),
    }


# (2, 4) halves to (1, 2), which recalls 1; u = (3 - 1) / 2 = 1; the state becomes (2, 2), the output 4. Then (1, 1), u = 1,
# (2, 1), output 3. From zero: u = 1.5, state (1.5, 0), output 1.5.
STATE, AFTER, OUT = [2, 4], [2, 2], 4


class KdaTest(CommandLineTest):
    def close(self, tensor, expected):
        self.assertEqual(len(tensor.values), len(expected))
        for found, value in zip(tensor.values, expected):
            self.assertAlmostEqual(found, value, places=4)

    def call(self, op, tensors, params=PARAMS):
        result, out = self.run_operator(op, tensors, params)
        self.expect(result, 0)
        return out

    def test_the_gate(self):
        g = {"g": Tensor("F32", [2, 1, 1], [0, -1000])}
        out = self.call("kda_gate", g | {"a_log": Tensor("F32", [1], [-6])}, {"gate": "lower_bound"})
        self.close(out["log_decay"], [-2.5, -5 / (1 + math.exp(1000 * math.exp(-6)))])
        out = self.call("kda_gate", g | {"a_log": Tensor("F32", [1], [0])}, {"gate": "softplus"})
        self.close(out["log_decay"], [-math.log(2), 0])
        self.close(self.call("kda_gate", g, {"gate": "given"})["log_decay"], [0, -1000])
        self.expect_refused("kda_gate", g, {}, "gate is missing")
        self.expect_refused("kda_gate", g, {"gate": "softplus"}, "a_log is missing")
        self.expect_refused("kda_gate", g, {"gate": "lower_bound", "lower_bound": -6}, "lower_bound = -6", "[-5, 0)")

    def test_one_step(self):
        tensors = token_rows(2) | {
            "state": Tensor("F32", [3, 1, 1, 2], [9, 9] + STATE + [7, 7]),
            "slot": Tensor("I32", [2], [1, -1]),
        }
        out = self.call("kda_decode", tensors)
        self.assertEqual(set(out), {"out", "state"})
        self.close(out["out"], [OUT, 0])
        self.close(out["state"], [9, 9] + AFTER + [7, 7])
        tensors["has_initial_state"] = Tensor("U8", [2], [0, 0])
        self.close(self.call("kda_decode", tensors)["out"], [1.5, 0])
        tensors["beta"] = Tensor("F32", [2, 1], [0, 0])
        self.close(self.call("kda_decode", tensors, PARAMS | {"beta_kind": "logit"})["out"], [1.5, 0])
        doubled = PARAMS | {"beta_kind": "logit", "allow_neg_eigval": True}
        self.close(self.call("kda_decode", tensors, doubled)["out"], [3, 0])

    def test_the_packed_row(self):
        tensors = token_rows(1) | {"state": Tensor("F32", [1, 1, 1, 2], STATE)}
        for name in ("q", "k", "v"):
            del tensors[name]
        tensors["qkv"] = Tensor("BF16", [1, 5], [1, 1, 1, 0, 3])
        self.close(self.call("kda_decode", tensors)["state"], AFTER)
        tensors["qkv"] = Tensor("BF16", [1, 4])
        self.expect_refused("kda_decode", tensors, PARAMS, "qkv", "2*H*K + HV*V")

    def test_two_tokens(self):
        tensors = token_rows(2) | {"q_indptr": Tensor("I32", [2], [0, 2])}
        out = self.call("kda_prefill", tensors)
        self.assertEqual(set(out), {"out"})
        self.assertEqual(out["out"].values[0], 1.5)
        tensors["state"] = Tensor("F32", [1, 1, 1, 2], STATE)
        out = self.call("kda_prefill", tensors)
        self.close(out["out"], [OUT, 3])
        self.close(out["state"], [2, 1])
        tensors["state"] = Tensor("F32", [1, 1, 2, 1], STATE)
        tensors["q_indptr"] = Tensor("I64", [2], [0, 2])
        self.close(self.call("kda_prefill", tensors, PARAMS | {"state_layout": "kv"})["state"], [2, 1])

    def test_slots_and_snapshots(self):
        tensors = token_rows(3) | {
            "q_indptr": Tensor("I32", [3], [0, 2, 3]),
            "state": Tensor("F32", [4, 1, 1, 2], STATE + [0, 0, 5, 5, 6, 6]),
            "in_slot": Tensor("I32", [2], [0, -1]),
            "out_slot": Tensor("I32", [2], [1, 77]),
            "snapshot_seq": Tensor("I32", [2], [0, 0]),
            "snapshot_pos": Tensor("I32", [2], [2, 1]),
            "snapshot_slot": Tensor("I32", [2], [2, 3]),
        }
        for commit in ("direct", "staged"):
            out = self.call("kda_prefill", tensors, PARAMS | {"commit": commit})
            self.close(out["state"], STATE + [2, 1, 2, 1, 6, 6])
            self.close(out["out"], [OUT, 3, 1.5])
        self.expect_refused("kda_prefill", tensors, PARAMS | {"check": True}, "out slot[1]", "out_slot")
        tensors["out_slot"] = Tensor("I32", [2], [1, -1])
        self.expect_refused("kda_prefill", tensors, PARAMS | {"check": True}, "snapshot_pos[1]")

    def test_what_is_refused(self):
        good = token_rows(1) | {"q_indptr": Tensor("I32", [2], [0, 1])}
        self.expect_refused("kda_prefill", good, {"gate": "given"}, "beta_kind is missing")
        self.expect_refused("kda_prefill", good, PARAMS | {"scale": 0}, "scale = 0")
        self.expect_refused("kda_prefill", good, PARAMS | {"chunk": 48}, "chunk = 48")
        self.expect_refused("kda_prefill", good, PARAMS | {"state_layout": "hv"}, "state_layout")
        self.expect_refused("kda_prefill", good | {"in_slot": Tensor("I32", [1])}, PARAMS, "state is missing")
        self.expect_refused("kda_prefill", good | {"snapshot_seq": Tensor("I32", [1])}, PARAMS, "snapshot_pos is missing")
        self.expect_refused("kda_prefill", good | {"a_log": Tensor("F32", [1])}, PARAMS, "a_log")
        self.expect_refused("kda_decode", token_rows(1), PARAMS, "state is missing")
