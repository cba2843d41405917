"""fovea verify: passes here, and finds what is wrong."""

import json
import pathlib

from support import CommandLineTest

# A file of v4_compress would hold a whole state twice, 40 KB of the 1 MB that all files share. Rows of the index cache have
# files under pack_rows and unpack_rows, and the stages together are kda_prefill.
STAGES = {"kda_stage_gate", "kda_stage_intra", "kda_stage_inter", "kda_stage_output"}
WITHOUT_GOLDEN = {"v4_compress", "index_store", "index_gather"} | STAGES
GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"


class VerifyTest(CommandLineTest):
    def test_one_operator_as_a_table(self):
        result = self.fovea("verify", "merge_lse")
        self.expect(result, 0, "merge_lse", "ref", "baseline", "ok")
        self.assertNotIn("topk_select", result.stdout)

    def operators_of_run(self):
        listed = self.fovea("run", "no_such_op", "a", "b").stderr.split("this build has: ")[1].splitlines()[0]
        return set(listed.split(", "))

    def test_every_operator_has_problems(self):
        result = self.fovea("verify", "--json")
        self.expect(result, 0)
        results = json.loads(result.stdout)["results"]
        self.assertEqual({row["operator"] for row in results}, self.operators_of_run())
        for row in results:
            self.assertEqual(row["mismatches"], [])
            self.assertEqual(row["available"], row["generated"] > 0, row)
            if row["operator"] not in WITHOUT_GOLDEN:
                self.assertEqual(row["available"], row["golden"] > 0, row)

    def test_without_a_gpu_its_entries_are_skipped_with_the_reason(self):
        if "device cuda:0" in self.fovea("info", "--devices").stdout:
            self.skipTest("this machine has a GPU")
        result = self.fovea("verify", "merge_lse", "--json")
        self.expect(result, 0)
        rows = [row for row in json.loads(result.stdout)["results"] if row["implementation"].startswith("cuda")]
        self.assertTrue(rows)
        for row in rows:
            self.assertEqual((row["available"], row["generated"], row["golden"]), (False, 0, 0))
            self.assertTrue(row["reason"])
        self.expect(self.fovea("verify", "merge_lse"), 0, "cuda_portable", "skipped: ")
        self.expect(self.fovea("verify", "--device", "cuda:0"), 3, "cuda:0")

    def test_one_device_alone(self):
        result = self.fovea("verify", "merge_lse", "--device", "cpu")
        self.expect(result, 0, "merge_lse", "ok")
        self.assertNotIn("cuda", result.stdout)
        self.expect(self.fovea("verify", "--device", "tpu"), 2, "tpu")

    def test_every_registered_operator_runs_from_files(self):
        """context_split is a host function."""
        registered = {op["name"] for op in json.loads(self.fovea("info", "--json").stdout)["operators"]}
        self.assertEqual(registered | {"context_split"}, self.operators_of_run())

    def test_unknown_operators_are_usage_errors(self):
        self.expect(self.fovea("verify", "no_such_op"), 2, "unknown operator 'no_such_op'")

    def test_unknown_golden_folders_are_usage_errors(self):
        self.expect(self.fovea("verify", "--golden", "no/such/folder"), 2, "no/such/folder")

    def test_another_seed_gives_other_problems(self):
        first = self.fovea("verify", "merge_lse", "--json", "--seed", 1).stdout
        other = self.fovea("verify", "merge_lse", "--json", "--seed", 2).stdout
        self.assertNotEqual(first, other)

    def tampered(self, name, position_from_end):
        """A folder with one golden file in which one byte of an expected output is another."""
        blob = bytearray((GOLDEN / name).read_bytes())
        blob[-position_from_end] ^= 0x10
        folder = self.folder / "golden"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(blob)
        return folder

    def test_a_wrong_result_is_a_mismatch_with_its_place(self):
        folder = self.tampered("topk_select-random.safetensors", 4)
        result = self.fovea("verify", "topk_select", "--golden", folder)
        self.expect(result, 1, "MISMATCH", "topk_select-random", "indices 1 of 512 elements differ", "[3, 127]")
        result = self.fovea("verify", "topk_select", "--golden", folder, "--json")
        self.expect(result, 1)
        self.assertFalse(json.loads(result.stdout)["ok"])

    def test_a_wrong_byte_of_a_pool_is_a_mismatch(self):
        folder = self.tampered("pack_rows-v32-fp32.safetensors", 300)
        self.expect(self.fovea("verify", "pack_rows", "--golden", folder), 1, "MISMATCH", "pool 1 of")

    def test_unreadable_golden_files_are_failures(self):
        folder = self.folder / "golden"
        folder.mkdir()
        (folder / "merge_lse-x.safetensors").write_bytes(b"nonsense")
        self.expect(self.fovea("verify", "merge_lse", "--golden", folder), 3, "merge_lse-x.safetensors")

    def test_golden_files_stay_small(self):
        self.assertLess(sum(path.stat().st_size for path in GOLDEN.iterdir()), 1_000_000)
