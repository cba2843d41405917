"""Verbs, options, environment variables and their exit codes."""

import json
import pathlib

from support import CommandLineTest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class UsageTest(CommandLineTest):
    def test_without_a_verb_it_is_a_usage_error(self):
        self.expect(self.fovea(), 2, "--help")

    def test_an_unknown_verb_is_a_usage_error(self):
        self.expect(self.fovea("frobnicate"), 2, "frobnicate")

    def test_help_and_version_succeed_on_stdout(self):
        self.expect(self.fovea("--help"), 0, "info", "run", "Example: fovea info", "Exit codes")
        self.expect(self.fovea("--version"), 0, ".")

    def test_every_verb_has_help_with_an_example(self):
        for verb in ("info", "run", "verify", "bench", "replay", "gen-trace"):
            self.expect(self.fovea(verb, "--help"), 0, f"Example: fovea {verb}")

    def test_unknown_options_are_usage_errors(self):
        self.expect(self.fovea("info", "--frobnicate"), 2, "--frobnicate")
        self.expect(self.fovea("run", "merge_lse", "a", "b", "c"), 2, "c")

    def test_missing_positionals_are_usage_errors(self):
        self.expect(self.fovea("run"), 2, "operator")
        self.expect(self.fovea("run", "merge_lse", "in"), 2, "output")

    def test_threads_must_be_a_positive_number(self):
        for value in ("0", "-1", "two", "1.5", "99999999999999999999", ""):
            self.expect(self.fovea("run", "merge_lse", "a", "b", "--threads", value), 2, "--threads")

    def test_unknown_devices_are_usage_errors(self):
        self.expect(self.fovea("run", "merge_lse", "a", "b", "--device", "tpu"), 2, "tpu", "cpu")
        self.expect(self.fovea("run", "merge_lse", "a", "b", "--device", "cuda:99"), 3, "cuda:99")


class EnvironmentTest(CommandLineTest):
    def test_wrong_values_are_usage_errors_that_list_what_exists(self):
        self.expect(self.fovea("info", FOVEA_CPU_ISA="sse9"), 2, "FOVEA_CPU_ISA", "sse9", "avx2")
        self.expect(self.fovea("info", FOVEA_FORCE_IMPL="fast"), 2, "'fast'", "merge_lse")
        self.expect(self.fovea("info", FOVEA_FORCE_IMPL="nothing=ref"), 2, "'nothing=ref'")
        self.expect(self.fovea("info", FOVEA_FORCE_IMPL="merge_lse=fast"), 2, "'merge_lse=fast'")

    def test_the_instruction_set_can_be_limited(self):
        self.expect(self.fovea("info", FOVEA_CPU_ISA="baseline"), 0, "in use baseline")

    def test_empty_values_mean_unset(self):
        self.expect(self.fovea("info", FOVEA_CPU_ISA="", FOVEA_FORCE_IMPL=""), 0, "merge_lse")


class InfoTest(CommandLineTest):
    def test_json_lists_operators_and_their_implementations(self):
        self.expect(self.fovea("info"), 0, "replay models: deepseek-v3.2")
        result = self.fovea("info", "--json")
        self.expect(result, 0)
        facts = json.loads(result.stdout)
        self.assertEqual(facts["devices"][0]["name"], "cpu")
        self.assertIn("baseline", facts["devices"][0]["instruction_sets"])
        for op in facts["operators"]:
            names = [entry["name"] for entry in op["implementations"]]
            self.assertEqual(names[-1], "ref", op)
            for entry in op["implementations"]:
                self.assertEqual(entry["available"], "reason" not in entry)
        self.assertIn("merge_lse", [op["name"] for op in facts["operators"]])

    def test_markdown_is_a_table_of_all_operators(self):
        result = self.fovea("info", "--markdown")
        self.expect(result, 0, "| `merge_lse` | mla |")
        widths = {line.count("|") for line in result.stdout.strip().splitlines()}
        self.assertEqual(len(widths), 1)

    def test_the_readme_has_the_table_that_markdown_prints(self):
        table = self.fovea("info", "--markdown").stdout.strip()
        self.assertIn(table, (ROOT / "README.md").read_text())

    def test_markdown_and_json_exclude_each_other(self):
        self.expect(self.fovea("info", "--markdown", "--json"), 2, "--markdown")

    def test_explain_shows_the_dispatch_and_its_reasons(self):
        facts = ("--mode", "extend", "--max-kv-len", 1500, "--mha-inputs", "--no-deterministic")
        self.expect(self.fovea("info", "--explain", *facts), 0, "one_shot_mha", "because:")
        result = json.loads(self.fovea("info", "--explain", *facts, "--json").stdout)
        self.assertEqual((result["kernel"], result["skip_selection"]), ("one_shot_mha", True))
        result = json.loads(self.fovea("info", "--explain", *facts, "--topk", 512, "--json").stdout)
        self.assertEqual((result["kernel"], result["skip_selection"]), ("cache_direct", False))
        self.assertIn("one-shot is off: a request is longer than topk", result["reasons"])
        contiguous = ("--prefill-implementation", "contiguous_bf16", "--extend-kv-source", "fresh", "--sum-kv-len", 9000)
        result = json.loads(self.fovea("info", "--explain", *facts[:4], *facts[5:], *contiguous, "--json").stdout)
        self.assertEqual((result["kernel"], result["transform"], result["fresh_kv"]), ("contiguous_bf16", "ragged", True))

    def explain(self, *facts):
        return json.loads(self.fovea("info", "--explain", *facts, "--json").stdout)

    def test_explain_takes_every_fact_of_the_dispatch(self):
        loose = ("--max-kv-len", 100, "--sum-kv-len", 1000, "--no-deterministic")
        ratio = (*loose, "--contiguous-kv-ratio", 4, "--num-rows")
        self.assertEqual(self.explain(*ratio, 251)["kernel"], "contiguous_bf16")
        self.assertEqual(self.explain(*ratio, 250)["kernel"], "cache_direct")
        self.assertEqual(self.explain(*ratio, 251, "--mha-chunk-capacity", 999)["kernel"], "cache_direct")
        self.assertEqual(self.explain(*ratio, 251, "--mode", "mixed")["kernel"], "cache_direct")
        dense = (*loose, "--mha-inputs")
        self.assertEqual(self.explain(*dense)["kernel"], "one_shot_mha")
        split = self.explain(*dense, "--context-parallel")
        self.assertEqual((split["kernel"], split["skip_selection"]), ("cache_direct", False))
        self.assertIn("one-shot is off: context parallelism is on", split["reasons"])
        long = (*dense, "--topk", 64, "--row-format", "f576", "--prefill-implementation")
        self.assertEqual(self.explain(*long, "trtllm")["kernel"], "one_shot_mha")
        self.assertEqual(self.explain(*long, "auto")["kernel"], "cache_direct")

    def test_explain_has_every_mode(self):
        for mode in ("extend", "mixed", "decode", "idle", "target_verify", "draft_extend", "draft_extend_v2"):
            result = self.explain("--mode", mode)
            self.assertEqual((result["kernel"], result["transform"]), ("cache_direct", "paged"), mode)

    def test_explain_names_the_implementations_that_would_do(self):
        refused = ("info", "--explain", "--decode-implementation", "flashmla_sparse")
        self.expect(self.fovea(*refused), 2, "flashmla_sparse", "row_format = v32", "flashmla_kv")
        self.expect(self.fovea(*refused, "--row-format", "bf16"), 0)
        self.expect(self.fovea("info", "--explain", "--contiguous-kv-ratio", 2), 2, "deterministic")
        verify = ("info", "--explain", "--mode", "target_verify", "--context-parallel")
        self.expect(self.fovea(*verify), 2, "target_verify", "context split")
        self.expect(self.fovea("info", "--explain", "--prefill-implementation", "dense"), 2, "dense", "cache_direct")

    def test_the_page_lists_the_implementations_as_explain_does(self):
        page = (ROOT / "docs" / "dsa_backend.md").read_text()
        words = {"cache_direct": "direct", "contiguous_bf16": "unpacked", None: "–"}
        implementations = self.explain()["implementations"]
        self.assertEqual(len(implementations), 10)
        for entry in implementations:
            cells = [words[entry[phase][form]] for phase in ("prefill", "decode") for form in ("bf16", "v32", "f576")]
            self.assertIn(f"| `{entry['name']}` | {' | '.join(cells)} |", page)

    def test_explain_refuses_what_does_not_exist(self):
        self.expect(self.fovea("info", "--explain", "--mode", "encode"), 2, "encode")
        self.expect(self.fovea("info", "--explain", "--row-format", "i132"), 2, "i132")
        self.expect(self.fovea("info", "--explain", "--max-kv-len", "-1"), 2, "--max-kv-len")
        self.expect(self.fovea("info", "--mode", "decode"), 2, "--explain")
        self.expect(self.fovea("info", "--num-rows", 3), 2, "--explain")

    def test_verbose_says_on_stderr_which_implementation_runs(self):
        self.expect(self.fovea("info", "-v"), 0)
