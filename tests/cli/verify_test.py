"""fovea verify: passes here, and finds what is wrong."""

import json

from support import CommandLineTest



class VerifyTest(CommandLineTest):
    def test_one_operator_as_a_table(self):
        result = self.fovea("verify", "merge_lse")
        self.expect(result, 0, "merge_lse", "ref", "baseline", "ok")
        self.assertNotIn("topk_select", result.stdout)

    def test_every_operator_has_problems(self):
        result = self.fovea("verify", "--json")
        self.expect(result, 0)
        results = json.loads(result.stdout)["results"]
        for row in results:
            self.assertEqual(row["mismatches"], [])
            self.assertEqual(row["available"], row["generated"] > 0, row)

    def test_unknown_operators_are_usage_errors(self):
        self.expect(self.fovea("verify", "no_such_op"), 2, "unknown operator 'no_such_op'")

    def test_unknown_golden_folders_are_usage_errors(self):
        self.expect(self.fovea("verify", "--golden", "no/such/folder"), 2, "no/such/folder")

    def test_another_seed_gives_other_problems(self):
        first = self.fovea("verify", "merge_lse", "--json", "--seed", 1).stdout
        other = self.fovea("verify", "merge_lse", "--json", "--seed", 2).stdout
        self.assertNotEqual(first, other)
