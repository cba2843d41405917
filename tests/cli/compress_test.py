"""fovea run: v4_compress on inputs whose results are known by hand."""

from support import CommandLineTest, Tensor

NAN = float("nan")


class CompressTest(CommandLineTest):
    PARAMS = {"ratio": 4, "row_format": "bf16", "page_size": 2}

    def tensors(self):
        # 64 channels, ratio 4: a token has 128 values and 128 logits. Logits are 0 and ape is t mod 4, so that the
        # values 2 everywhere weigh what they will: e = 2, norm 1, weight 3, no turn.
        return {
            "kv_gate": Tensor("F32", [4, 256], ([2.0] * 128 + [0.0] * 128) * 4),
            "ape": Tensor("F32", [4, 128], [float(t) for t in range(4) for _ in range(128)]),
            "norm_weight": Tensor("F32", [64], [3.0] * 64),
            "positions": Tensor("I32", [4], [0, 1, 2, 3]),
            "row_to_request": Tensor("I32", [4], [0, 0, 0, 0]),
            "cos_sin": Tensor("F32", [1, 64], [1.0] * 32 + [0.0] * 32),
            "state": Tensor("F32", [1, 8, 2, 128], [NAN] * 2048),
            "state_slot": Tensor("I32", [1], [0]),
            "page_table": Tensor("I32", [1, 1], [1]),
            "pool": Tensor("U8", [2, 256], [7] * 512),
        }

    def test_a_first_group(self):
        result, out = self.run_operator("v4_compress", self.tensors(), self.PARAMS)
        self.expect(result, 0)
        self.assertEqual(set(out), {"pool", "state", "emitted"})
        self.assertEqual(list(out["emitted"].values), [-1, -1, -1, 2])
        # 3.0 is 0x4040; page 1, row 0.
        self.assertEqual(bytes(out["pool"].values), b"\x07" * 256 + b"\x40\x40" * 64 + b"\x07" * 128)
        state = out["state"].values
        for t in range(4):
            self.assertEqual(list(state[t * 256 : t * 256 + 256]), [2.0] * 128 + [float(t)] * 128)
        self.assertTrue(all(value != value for value in state[4 * 256 :]))

    def test_refusals(self):
        tensors = self.tensors()
        self.expect_refused("v4_compress", tensors, self.PARAMS | {"ratio": 8}, "ratio = 8")
        self.expect_refused("v4_compress", tensors, self.PARAMS | {"row_format": "v4"}, "v4")
        self.expect_refused("v4_compress", tensors, self.PARAMS | {"row_format": "i132"}, "scale_mode")
        self.expect_refused("v4_compress", tensors, self.PARAMS | {"rows_per_request": 3}, "state.shape[1] = 8", "9")
        self.expect_refused("v4_compress", tensors, self.PARAMS | {"form": "online"}, "state")
        self.expect_refused("v4_compress", tensors | {"ape": Tensor("F32", [3, 128], [0.0] * 384)}, self.PARAMS, "ape")
