#!/usr/bin/env python3
"""Prints the Markdown of docs/perf from a result of `fovea bench --json`: python3 tools/bench_table.py FILE [OPERATOR ...]"""

import json
import sys

LIMITS = [
    ("fp32_fma_gflops", "fp32 FMA, GFLOP/s"),
    ("bf16_dot_gflops", "bf16 dot, GFLOP/s"),
    ("l2_read_gb_per_s", "L2 read, GB/s"),
    ("l3_read_gb_per_s", "L3 read, GB/s"),
    ("dram_read_gb_per_s", "DRAM read, GB/s"),
    ("copy_gb_per_s", "copy, GB/s"),
    ("gather_1152_gb_per_s", "gather of 1152-byte rows, GB/s"),
    ("gather_656_gb_per_s", "gather of 656-byte rows, GB/s"),
]


def duration(milliseconds):
    if milliseconds is None:
        return "–"
    if milliseconds < 1:
        return f"{milliseconds * 1000:.3g} µs"
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.3g} s"


def number(value):
    return "–" if value is None else f"{value:.1f}"


def print_ceilings(ceilings):
    threads = ceilings["threads"]
    print(f"| ceiling | {threads} threads | 1 thread |\n|---|---|---|")
    for key, name in LIMITS:
        print(f"| {name} | {number(ceilings['all_threads'][key])} | {number(ceilings['one_thread'][key])} |")


def print_results(results):
    print("| case | implementation | threads | cache | median | min | spread | GFLOP/s | GB/s | limit | share | target | min / target |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for r in results:
        general = "" if r["target_kind"] == "published" else "*"
        ratio = "–" if r["min_over_target"] is None else f"{r['min_over_target']:.2f}{general}"
        disturbed = (r["others_share"] or 0) > 0.05 or (r["stolen_share"] or 0) > 0.02
        cells = [
            f"{r['op']} {r['case']}" + (" (disturbed)" if disturbed else ""), r["implementation"], str(r["threads"]), r["cache"],
            duration(r["median_ms"]), duration(r["min_ms"]), f"{100 * r['spread']:.1f} %", number(r["gflops"]), number(r["gb_per_s"]),
            r["limit"], f"{100 * r['roofline_share']:.0f} %", duration(r["target_ms"]), ratio,
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |")


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    with open(sys.argv[1], encoding="utf-8") as file:
        run = json.load(file)
    wanted = sys.argv[2:]
    clock = "" if run["clock_mhz"] is None else f", {run['clock_mhz']:.0f} MHz"
    print(f"`{run['command']}`, commit {run['commit']}, {run['cpu']}{clock}, {run['ceilings']['isa']}, {run['date_utc']}\n")
    if not wanted:
        print_ceilings(run["ceilings"])
        print()
    print_results([r for r in run["results"] if not wanted or r["op"] in wanted])
    return 0


if __name__ == "__main__":
    sys.exit(main())
