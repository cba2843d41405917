"""fovea run: malformed files, tensors and parameters. merge_lse stands for every operator."""

import json
import pathlib

from support import CommandLineTest, Tensor, pack, write_file


def merge_inputs():
    return {
        "out_parts": Tensor("F32", [2, 1, 1, 1], [10.0, 0.0]),
        "lse_parts": Tensor("F32", [2, 1, 1], [0.6931471805599453, 2.0794415416798357]),
    }


class RunTest(CommandLineTest):
    def test_outputs_are_written_and_named(self):
        result, out = self.run_operator("merge_lse", merge_inputs(), {})
        self.expect(result, 0, "merge_lse", "out.safetensors", "f32 [1, 1, 1]")
        self.assertEqual(set(out), {"out", "lse"})
        self.assertAlmostEqual(out["out"].values[0], 2.0, places=6)
        self.assertAlmostEqual(out["lse"].values[0], 2.302585, places=6)

    def test_params_may_be_absent(self):
        self.expect(self.run_operator("merge_lse", merge_inputs(), None)[0], 0)

    def test_json_says_what_ran(self):
        result, _ = self.run_operator("merge_lse", merge_inputs(), {}, ["--json", "--impl", "ref"])
        facts = json.loads(result.stdout)
        self.assertEqual((facts["operator"], facts["implementation"]), ("merge_lse", "ref"))
        self.assertEqual(facts["tensors"]["lse"], "f32 [1, 1]")

    def test_the_environment_forces_implementations(self):
        result, _ = self.run_operator("merge_lse", merge_inputs(), {}, FOVEA_FORCE_IMPL="merge_lse=ref")
        self.expect(result, 0, "implementation ref")

    def test_verbose_says_on_stderr_what_runs(self):
        result, _ = self.run_operator("merge_lse", merge_inputs(), {}, ["-v"])
        self.assertIn("dispatch: merge_lse: runs", result.stderr)

    def test_the_output_may_replace_the_input(self):
        path = self.folder / "same.safetensors"
        write_file(path, merge_inputs())
        self.expect(self.fovea("run", "merge_lse", path, path), 0)

    def test_unknown_operators_are_usage_errors(self):
        result, _ = self.run_operator("no_such_op", merge_inputs(), {})
        self.expect(result, 2, "unknown operator 'no_such_op'", "merge_lse")

    def test_unknown_implementations_are_usage_errors(self):
        result, _ = self.run_operator("merge_lse", merge_inputs(), {}, ["--impl", "fast"])
        self.expect(result, 2, "no implementation 'fast'", "ref")

    def test_unknown_tensors_are_refused_by_name(self):
        tensors = merge_inputs() | {"snik": Tensor("F32", [1])}
        self.expect_refused("merge_lse", tensors, {}, "unknown tensor 'snik'", "sink")

    def test_unknown_params_are_refused_by_name(self):
        self.expect_refused("merge_lse", merge_inputs(), {"scale": 1}, "unknown parameter 'scale'")

    def test_missing_tensors_are_refused_with_their_shape(self):
        tensors = merge_inputs()
        del tensors["lse_parts"]
        self.expect_refused("merge_lse", tensors, {}, "lse_parts is missing", "f32 [P, T, H]")

    def test_wrong_types_and_shapes_are_refused(self):
        wrong = {
            "a type": Tensor("BF16", [2, 1, 1]),
            "a rank": Tensor("F32", [2, 1]),
            "another extent": Tensor("F32", [3, 1, 1]),
        }
        for tensor in wrong.values():
            self.expect_refused("merge_lse", merge_inputs() | {"lse_parts": tensor}, {}, "lse_parts", "f32 [P, T, H]")

    def test_params_must_be_a_json_object(self):
        for params in ("[]", "3", "null", '"text"'):
            self.expect_refused("merge_lse", merge_inputs(), params, "expected a JSON object")

    def test_malformed_and_non_finite_params_are_refused(self):
        for params in ("{", '{"a": NaN}', '{"a": Infinity}', '{"a": 1e999}', "{'a': 1}", "", '{"a": 1, "a": 2}'):
            self.expect_refused("merge_lse", merge_inputs(), params, "params")


class MalformedFileTest(CommandLineTest):
    def expect_bytes_refused(self, blob, *fragments):
        source, target = self.folder / "bad.safetensors", self.folder / "out.safetensors"
        source.write_bytes(blob)
        result = self.fovea("run", "merge_lse", source, target)
        self.expect(result, 3, "bad.safetensors", *fragments)
        self.assertFalse(target.exists())

    def entry(self, begin, end, dtype="U8", shape=None):
        return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}

    def test_missing_files(self):
        self.expect(self.fovea("run", "merge_lse", "missing.safetensors", "out"), 3, "missing.safetensors", "no such file")

    def test_folders(self):
        self.expect(self.fovea("run", "merge_lse", self.folder, "out"), 3, "not a regular file")

    def test_short_files(self):
        for blob in (b"", b"1234567", b"\x10\0\0\0\0\0\0\0{}"):
            self.expect_bytes_refused(blob)

    def test_text_files(self):
        self.expect_bytes_refused(b"just some text that is long enough", "header claims")

    def test_huge_headers(self):
        self.expect_bytes_refused((100_000_001).to_bytes(8, "little") + b"{}", "100000001", "at most 100000000")
        self.expect_bytes_refused(b"\xff" * 8 + b"{}", "at most 100000000")

    def test_overlapping_offsets(self):
        header = {"out_parts": self.entry(0, 8), "lse_parts": self.entry(4, 12)}
        self.expect_bytes_refused(pack(header, bytes(12)), "'out_parts' and 'lse_parts' overlap")

    def test_gaps_and_leftovers(self):
        self.expect_bytes_refused(pack({"a": self.entry(4, 8)}, bytes(8)), "belong to no tensor")
        self.expect_bytes_refused(pack({"a": self.entry(0, 4)}, bytes(8)), "belong to no tensor")

    def test_offsets_outside_the_file(self):
        self.expect_bytes_refused(pack({"a": self.entry(0, 9)}, bytes(8)), "end after the data")

    def test_wrong_dtypes(self):
        self.expect_bytes_refused(pack({"q": self.entry(0, 2, "F16", [1])}, bytes(2)), "'q'", "F16", "BF16")

    def test_bytes_that_do_not_fit_the_shape(self):
        self.expect_bytes_refused(pack({"q": self.entry(0, 4, "F32", [2])}, bytes(4)), "'q'", "need 8")
        self.expect_bytes_refused(pack({"q": self.entry(0, 0, "U8", [1 << 62, 4])}), "'q'", "2^63")

    def test_repeated_names(self):
        entry = json.dumps(self.entry(0, 0))
        self.expect_bytes_refused(pack(f'{{"q": {entry}, "q": {entry}}}'.encode()), "'q' occurs twice")

    def test_malformed_headers(self):
        for header in (b"[]", b"{", b'{"a": 1}', b'{"a": {"dtype": 1}}', b'{"__metadata__": {"params": {}}}'):
            self.expect_bytes_refused(pack(header))

    def test_unwritable_outputs(self):
        write_file(self.folder / "in.safetensors", merge_inputs())
        result = self.fovea("run", "merge_lse", "in.safetensors", "no/such/folder/out.safetensors")
        self.expect(result, 3, "no/such/folder/out.safetensors")
        if pathlib.Path("/dev/full").exists():
            self.expect(self.fovea("run", "merge_lse", "in.safetensors", "/dev/full"), 3, "/dev/full")
