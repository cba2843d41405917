"""fovea bench: names, files and one short run."""

import json

from support import CommandLineTest


class BenchTest(CommandLineTest):
    def bench(self, *arguments):
        """Ceilings are kept in the test's own folder: nothing of the machine's is read or replaced."""
        return self.fovea("bench", *arguments, timeout=300, XDG_CACHE_HOME=str(self.folder))

    def test_names_must_exist(self):
        self.expect(self.bench("no_such_op"), 2, "no_such_op", "merge_lse")
        self.expect(self.bench("--case", "no_such_case"), 2, "no_such_case")
        self.expect(self.bench("merge_lse", "--impl", "fastest"), 2, "fastest")
        self.expect(self.bench("--impl", "ref", "no_such_op"), 2, "no_such_op")
        self.expect(self.bench("--isa", "sse9"), 2, "sse9")
        for threads in ("0", "-1"):
            self.expect(self.bench("--threads", threads), 2, "--threads")

    def test_devices_must_exist(self):
        self.expect(self.bench("--device", "tpu"), 2, "tpu")
        self.expect(self.bench("--device", "cuda:99"), 3, "cuda:99")
        self.expect(self.bench("--graph"), 2, "--graph")
        self.expect(self.bench("--suite", "speed"), 2, "speed")
        self.expect(self.bench("--suite", "perf", "--case", "no such row"), 2, "no such row")

    def test_rows_of_the_suite(self):
        """On the CPU a row costs what it costs; the smallest one shows the form."""
        out = self.folder / "perf.json"
        self.expect(self.bench("--suite", "perf", "--case", "fp32 rows/1 x 16K", "--quick", "--json", out), 0, "1 x 16K", "ok")
        result = json.loads(out.read_text())
        self.assertEqual(list(result), ["device", "commit", "date", "rows"])
        (row,) = result["rows"]
        self.assertEqual(
            list(row),
            "name section value unit target peer ratio_to_peer floor floor_share met check".split(),
        )
        self.assertEqual((row["target"], row["peer"], row["unit"], row["check"]), (9, 16.6, "us", "ok"))
        self.assertAlmostEqual(row["ratio_to_peer"], 16.6 / row["value"])
        for section in ("V4 rows", "R512 rows"):
            case = f"{section}/H128, window only, batch 1"
            self.expect(self.bench("--suite", "perf", "--case", case, "--quick", "--json", out), 0, "H128, window only, batch 128")
            rows = json.loads(out.read_text())["rows"]
            self.assertEqual([row["target"] for row in rows], [7, 17])
            self.assertTrue(all(row["value"] > 0 and row["check"] == "ok" for row in rows))

    def test_unwritable_results_are_found_before_the_run(self):
        self.expect(self.bench("--json", "no/such/folder/out.json"), 3, "no/such/folder/out.json")

    def test_a_short_run_of_two_implementations(self):
        out = self.folder / "out.json"
        result = self.bench("merge_lse", "--case", "rows1", "--quick", "--impl", "cpu,ref", "--json", out)
        self.expect(result, 0, "merge_lse/", "cpu", "ref", "ceilings")
        self.assertIn("merge_lse", json.dumps(json.loads(out.read_text())))
