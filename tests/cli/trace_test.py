"""fovea gen-trace."""

import json

from support import CommandLineTest


class GenTraceTest(CommandLineTest):
    def generate(self, *arguments, name="trace.jsonl"):
        result = self.fovea("gen-trace", name, *arguments)
        self.expect(result, 0)
        return result.stdout, (self.folder / name).read_text()

    def test_lines_are_requests_with_fitting_hashes(self):
        for style, block in (("conversation", 512), ("agent", 16)):
            stdout, text = self.generate("--requests", 20, "--style", style, "--block-tokens", block)
            self.assertIn("20 requests", stdout)
            lines = [json.loads(line) for line in text.splitlines()]
            self.assertEqual(len(lines), 20)
            for line in lines:
                self.assertEqual(len(line["hash_ids"]), -(-line["input_length"] // block))
            shared = {line["hash_ids"][0] for line in lines}
            self.assertLess(len(shared), 20)

    def test_equal_seeds_give_equal_traces(self):
        first = self.generate("--seed", 3)[1]
        self.assertEqual(first, self.generate("--seed", 3, name="again.jsonl")[1])
        self.assertNotEqual(first, self.generate("--seed", 4)[1])

    def test_json_summary(self):
        stdout, text = self.generate("--requests", 5, "--json")
        facts = json.loads(stdout)
        self.assertEqual(facts["requests"], 5)
        self.assertEqual(facts["input_tokens"], sum(json.loads(line)["input_length"] for line in text.splitlines()))

    def test_zero_and_negative_options_are_usage_errors(self):
        for option in ("--requests", "--mean-input", "--mean-output", "--duration-ms", "--block-tokens"):
            for value in ("0", "-1", "x", "nan"):
                self.expect(self.fovea("gen-trace", "t", option, value), 2, option if value != "nan" else "")
        self.expect(self.fovea("gen-trace", "t", "--seed", "-1"), 2, "--seed")

    def test_unknown_styles_are_usage_errors(self):
        self.expect(self.fovea("gen-trace", "t", "--style", "batch"), 2, "batch", "conversation")

    def test_unwritable_files_are_failures(self):
        self.expect(self.fovea("gen-trace", "no/such/folder/t.jsonl"), 3, "no/such/folder/t.jsonl")
