"""fovea replay: options, trace files, exit codes, and small runs that are checked."""

import json
import pathlib

from support import CommandLineTest

SCALE = ("--token-scale", 64, "--topk", 16, "--tp", 16)


def line(**changes):
    request = {"timestamp": 0, "input_length": 600, "output_length": 100, "hash_ids": [0, 1]} | changes
    return json.dumps({key: value for key, value in request.items() if value is not None}) + "\n"


class ReplayTest(CommandLineTest):
    def trace(self, text=None):
        path = self.folder / "trace.jsonl"
        if text is not None:
            path.write_text(text)
        else:
            self.expect(self.fovea("gen-trace", path, "--requests", 6, "--mean-input", 2500), 0)
        return path


class UsageTest(ReplayTest):
    def refuse(self, code, fragment, *options):
        self.expect(self.fovea("replay", self.folder / "trace.jsonl", *SCALE[:4], *options), code, fragment)

    def setUp(self):
        super().setUp()
        self.trace(line())

    def test_the_model_must_exist(self):
        self.refuse(2, "unknown model 'gpt-2'", "--model", "gpt-2")
        self.refuse(2, "deepseek-v3.2", "--model", "minimax-m2")

    def test_tensor_parallelism_must_divide_the_heads(self):
        self.refuse(2, "does not divide the 128 heads", "--tp", 3)

    def test_counts_must_be_positive(self):
        options = ("--tp", "--max-requests", "--topk", "--page", "--chunk", "--max-batch", "--cache-tokens", "--threads")
        for option in options:
            for value in ("0", "-1", "x", "1.5"):
                result = self.fovea("replay", self.folder / "trace.jsonl", option, value)
                self.expect(result, 2, option)
        for option in ("--skip", "--check", "--seed"):
            self.refuse(2, option, option, "-1")

    def test_the_scale_must_divide_a_block(self):
        for scale in ("0", "-2", "3", "1024"):
            result = self.fovea("replay", self.folder / "trace.jsonl", "--token-scale", scale)
            self.expect(result, 2, "scale")

    def test_words_must_be_known(self):
        self.refuse(2, "arrivals", "--arrivals", "random")
        self.refuse(2, "format", "--format", "xml")
        self.refuse(2, "layers", "--layers", "some")
        self.refuse(2, "inject", "--inject", "nothing")
        self.refuse(2, "'fastest'", "--impl", "fastest")
        self.refuse(2, "expected cpu or cuda:N", "--device", "tpu")
        self.refuse(2, "expected cpu or cuda:N", "--device", "cuda:first")

    def test_a_skip_that_leaves_nothing(self):
        self.refuse(2, "skip = 1", "--skip", 1)

    def test_a_device_that_is_not_there(self):
        self.refuse(3, "cuda:99", "--device", "cuda:99")
        self.refuse(3, "unsupported", "--device", "cuda:99", "--graph")

    def test_draft_options_are_checked(self):
        for value in ("0", "-1", "8", "x", "1.5"):
            self.refuse(2, "--draft-tokens", "--draft-tokens", value)
        for value in ("-0.1", "1.1", "nan", "x"):
            self.refuse(2, "accept", "--draft-tokens", 3, "--accept", value)
        self.refuse(2, "expected v1, v2", "--draft-tokens", 3, "--draft-mode", "v3")
        self.refuse(2, "--accept needs --draft-tokens", "--accept", 0.5)
        self.refuse(2, "--draft-mode needs --draft-tokens", "--draft-mode", "v2")
        self.expect(self.fovea("replay", "--help"), 0, "--draft-tokens", "--accept", "--draft-mode")

    def test_fault_injection_is_hidden_from_help(self):
        result = self.fovea("replay", "--help")
        self.expect(result, 0, "--check", "Example: fovea replay")
        self.assertNotIn("--inject", result.stdout)

    def test_unwritable_results_are_found_before_the_run(self):
        for option in ("--json", "--report"):
            self.refuse(3, "no/such/folder/out", option, "no/such/folder/out")
            self.refuse(3, "directory", option, self.folder)
        # A path that can be written leaves no file behind when the run is refused.
        self.refuse(2, "heads", "--tp", 3, "--json", self.folder / "new.json")
        self.assertFalse((self.folder / "new.json").exists())


class TraceFileTest(ReplayTest):
    def refuse(self, text, *fragments):
        self.expect(self.fovea("replay", self.trace(text), *SCALE), 3, "trace.jsonl", *fragments)

    def test_missing_and_empty_files(self):
        self.expect(self.fovea("replay", "missing.jsonl", *SCALE), 3, "missing.jsonl")
        self.expect(self.fovea("replay", self.folder, *SCALE), 3)
        self.refuse("")
        self.refuse("\n\n")

    def test_broken_lines_are_named_by_number(self):
        self.refuse(line() + line()[:40] + "\n", "line 2")
        self.refuse(line() + "not json\n", "line 2")
        self.refuse(line() + "[]\n", "line 2")
        self.refuse(line(output_length=None), "line 1", "output_length")
        self.refuse(line(input_length="600"), "line 1", "input_length")

    def test_absurd_lengths(self):
        self.refuse(line(input_length=-5), "line 1", "input_length")
        self.refuse(line(output_length=-1), "line 1", "output_length")
        self.refuse(line(input_length=10**12), "line 1", "input_length")
        self.refuse(line(input_length=1e300), "line 1")

    def test_the_hash_count_must_fit_the_length(self):
        self.refuse(line() + line(hash_ids=[1, 2, 3]), "line 2", "hash_ids")


class RunTest(ReplayTest):
    def replay(self, *options, code=0):
        path = self.folder / "out.json"
        result = self.fovea("replay", self.folder / "trace.jsonl", *SCALE, "--json", path, *options)
        self.expect(result, code)
        return json.loads(path.read_text()), result

    def setUp(self):
        super().setUp()
        self.trace()

    def test_a_checked_run_writes_json_and_report(self):
        facts, result = self.replay("--check", 30, "--report", self.folder / "out.html")
        self.assertEqual(facts["requests"]["completed"], 6)
        self.assertEqual(facts["check"]["mismatches"], 0)
        self.assertGreater(facts["check"]["rows_selecting"], 10)
        self.assertLessEqual(facts["cache"]["hit_tokens"], facts["trace"]["reusable_tokens"])
        self.assertGreater(facts["cache"]["hit_tokens"], 0)
        for fragment in ("1 replayed token = 64 trace tokens", "30 rows recomputed", "0 mismatches", "sparse_mla"):
            self.assertIn(fragment, result.stdout)
        self.assertIn("<html", (self.folder / "out.html").read_text())
        self.assertEqual(result.stderr, "")  # no progress bar without a terminal

    def test_digests_do_not_depend_on_the_schedule(self):
        digests = set()
        for options in (("--threads", 1), ("--threads", 3, "--chunk", 16, "--max-batch", 2, "--no-prefix-sharing", "--page", 1)):
            facts, _ = self.replay(*options)
            digests.add((facts["digest"]["selection"], facts["digest"]["output"]))
        self.assertEqual(len(digests), 1)

    def test_drafts_change_no_digest_and_are_reported(self):
        plain, _ = self.replay()
        self.assertIsNone(plain["drafts"])
        for options in (("--accept", 0.7), ("--draft-mode", "v2", "--accept", 0), ("--mixed", "--draft-mode", "v2", "--accept", 1)):
            facts, result = self.replay("--draft-tokens", 3, "--check", 30, *options)
            self.assertEqual(facts["digest"], plain["digest"])
            self.assertEqual(facts["check"]["mismatches"], 0)
            self.assertEqual([layer["kind"] for layer in facts["layers"]], ["dsa", "draft"])
            self.assertEqual(sum(facts["drafts"]["accepted_lengths"]), facts["drafts"]["verifications"])
            self.assertIn("target_verify", [mode["mode"] for mode in facts["modes"]])
            for fragment in ("3 a round", "rows rolled back", "target_verify", "draft_extend"):
                self.assertIn(fragment, result.stdout)
        self.assertEqual(facts["drafts"]["rate"], 1)

    def test_graphs_change_no_digest_and_are_reported(self):
        for options in ((), ("--draft-tokens", 3, "--draft-mode", "v2", "--layers", 2)):
            plain, _ = self.replay(*options)
            facts, result = self.replay("--graph", "--check", 20, "--report", self.folder / "out.html", *options)
            self.assertEqual(facts["digest"], plain["digest"])
            self.assertEqual(facts["check"]["mismatches"], 0)
            self.assertIsNone(plain["graphs"])
            self.assertGreaterEqual(facts["graphs"]["replays"], facts["graphs"]["captures"])
            self.assertRegex(result.stdout, r"graphs +\d+ captured, \d+ replayed")
            self.assertRegex(result.stdout, r"(decode|verify) +\d+ +\d+( +[\d.]+){4}")
            self.assertIn("captured", (self.folder / "out.html").read_text())

    def test_a_wrong_page_is_found_and_named(self):
        _, result = self.replay("--check", 30, "--inject", "page", code=1)
        self.assertRegex(result.stdout, r"MISMATCH +request \d+, position \d+, layer \d+ \(dsa\), \w+: (selection|output)")
        self.assertIn("checked rows are wrong", result.stderr)
        self.replay("--check", 30, "--inject", "page", "--draft-tokens", 2, code=1)

    def test_kimi_linear_shares_states_and_finds_a_wrong_snapshot(self):
        path = self.folder / "out.json"
        shape = ("--model", "kimi-linear", "--token-scale", 8, "--tp", 32, "--check", 12, "--layers", "0,3", "--max-batch", 2, "--json", path)

        def replay(*options, code=0):
            result = self.fovea("replay", self.folder / "trace.jsonl", *shape, *options)
            self.expect(result, code)
            return json.loads(path.read_text()), result.stdout

        digests = set()
        for options in ((), ("--draft-tokens", 2)):
            facts, text = replay(*options)
            self.assertEqual(facts["check"]["mismatches"], 0)
            self.assertGreater(facts["cache"]["hit_tokens"], 0)
            digests.add(facts["digest"]["output"])
            for fragment in ("kda_prefill", "kda_commit", "dense_mla"):
                self.assertIn(fragment, text)
        self.assertEqual(len(digests), 1)
        _, text = replay("--inject", "snapshot", code=1)
        self.assertRegex(text, r"MISMATCH +request \d+, position \d+, layer 0 \(kda\), kda_prefill: output")

    def test_minimax_m3_selects_blocks_and_finds_a_wrong_page(self):
        path = self.folder / "out.json"
        shape = ("--model", "minimax-m3", "--token-scale", 16, "--topk", 2, "--tp", 16, "--check", 20, "--max-batch", 2, "--json", path)

        def replay(*options, code=0):
            result = self.fovea("replay", self.folder / "trace.jsonl", *shape, *options)
            self.expect(result, code)
            return json.loads(path.read_text()), result.stdout

        digests = set()
        for options in ((), ("--draft-tokens", 2, "--chunk", 50), ("--graph",)):
            facts, text = replay(*options)
            self.assertEqual(facts["check"]["mismatches"], 0)
            self.assertGreater(facts["cache"]["hit_tokens"], 0)
            digests.add((facts["digest"]["selection"], facts["digest"]["output"]))
            for fragment in ("msa_score_select", "msa_attend"):
                self.assertIn(fragment, text)
        self.assertEqual(len(digests), 1)
        _, text = replay("--inject", "page", code=1)
        self.assertRegex(text, r"MISMATCH +request \d+, position \d+, layer \d+ \((sparse|dense)\), msa_")

    def test_deepseek_v4_shares_windows_and_finds_a_stale_one(self):
        path = self.folder / "out.json"
        shape = ("--model", "deepseek-v4-flash", "--token-scale", 4, "--page", 128, "--topk", 8, "--tp", 64, "--check", 20, "--max-batch", 2, "--json", path)
        digests = set()
        for options in ((), ("--draft-tokens", 2)):
            result = self.fovea("replay", self.folder / "trace.jsonl", *shape, *options)
            self.expect(result, 0)
            facts = json.loads(path.read_text())
            self.assertEqual(facts["check"]["mismatches"], 0)
            self.assertGreater(facts["cache"]["hit_tokens"], 0)
            digests.add((facts["digest"]["selection"], facts["digest"]["output"]))
            for fragment in ("v4_compress", "index_select", "swa", "csa", "hca"):
                self.assertIn(fragment, result.stdout)
        self.assertEqual(len(digests), 1)
        result = self.fovea("replay", self.folder / "trace.jsonl", *shape, "--inject", "window")
        self.expect(result, 1)
        self.assertRegex(result.stdout, r"MISMATCH +request \d+, position \d+, layer 0 \(swa\), sparse_mla: output")

    def test_a_request_larger_than_the_cache_is_rejected(self):
        facts, result = self.replay("--cache-tokens", 24)
        self.assertEqual(facts["requests"]["completed"] + facts["requests"]["rejected"], 6)
        self.assertGreater(facts["requests"]["rejected"], 0)
        self.assertIn("is rejected: needs", result.stderr)
