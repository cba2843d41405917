#!/usr/bin/env python3
"""Enforces the direction of includes: a room may include rooms below its floor, never beside or above it.

Also enforces which files may name which third-party headers. Prints every violation and exits 1 when there is one.
"""

import pathlib
import re
import subprocess
import sys

# The floor of each room; rooms of one floor do not include one another. io serves replay and the command line.
FLOOR = {
    "core": 0,
    "cache": 1, "batch": 1, "io": 1, "comm": 1,
    "index": 2, "mla": 2, "compress": 2, "msa": 2, "kda": 2,
    "serving": 3, "binding": 3,
    "replay": 4, "python": 4,
    "bench": 5, "cli": 6,
}  # fmt: skip

# The room that owns each public header; a header that is not listed belongs to core.
HEADER_ROOM = {
    "row_codec.h": "cache", "move_rows.h": "cache", "page_allocator.h": "cache", "request_table.h": "cache", "kv_pool.h": "cache",
    "state_pool.h": "cache", "window_pages.h": "cache",
    "metadata.h": "batch", "metadata_check.h": "batch", "context_split.h": "batch",
    "compat_metadata.h": "batch",
    "safetensors.h": "io", "json.h": "io", "ceilings_file.h": "io",
    "index_quantize.h": "index", "index_cache.h": "index", "index_logits.h": "index", "topk_select.h": "index",
    "index_select.h": "index",
    "sparse_mla.h": "mla", "dense_mla.h": "mla", "mha_varlen.h": "mla", "merge_lse.h": "mla",
    "mla_inputs.h": "mla", "swa_decode.h": "mla", "swa_indices.h": "mla",
    "v4_compress.h": "compress",
    "kda.h": "kda", "kda_gate.h": "kda", "kda_prefill.h": "kda", "kda_decode.h": "kda", "kda_verify.h": "kda",
    "kda_commit.h": "kda", "kda_stages.h": "kda", "causal_conv1d.h": "kda",
    "build_page_table.h": "msa", "msa_block_scores.h": "msa", "msa_select_blocks.h": "msa", "msa_score_select.h": "msa",
    "msa_attend.h": "msa",
    "dsa_backend.h": "serving", "kda_backend.h": "serving", "kda_compat.h": "serving",
    "msa_backend.h": "serving", "v4_backend.h": "serving",
    "call_operator.h": "binding",
    "trace.h": "replay", "replay.h": "replay",
    "fovea.h": "cli",  # the umbrella: for users, never included inside
}  # fmt: skip

# Third-party headers and the files that may include them.
THIRD_PARTY = [
    (r"hwy/", r"_cpu[^/]*\.(cc|h)$|^src/core/simd[^/]*\.h$|^src/core/cpu_isa\.cc$"),
    (r"(imm|x86|arm_neon|amx)[a-z]*intrin\.h|arm_neon\.h", r"_cpu[^/]*\.(cc|h)$|^src/core/simd[^/]*\.h$"),
    (r"tbb/", r"^src/core/parallel\.cc$"),
    (r"CLI/", r"^cli/main\.cc$"),
    (r"nlohmann/", r"^src/(io|replay)/|^tests/"),
    (r"Random123/", r"^src/core/tensor_generator"),
    (r"fmt/", r"^(cli|tests|bench)/"),
    (r"(cuda|cute|cutlass|cub|nv)[/_a-z]*", r"/cuda/"),
    (r"(Python\.h|nanobind/)", r"^python/"),
    (r"benchmark/", r"^bench/"),
]

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.MULTILINE)


def room_of(path: str) -> str | None:
    parts = path.split("/")
    if parts[0] == "src":
        return parts[1]
    if parts[0] == "include":
        return HEADER_ROOM.get(parts[-1], "core")
    return parts[0] if parts[0] in FLOOR else None


def main() -> int:
    files = subprocess.run(
        ["git", "ls-files", "*.h", "*.cc", "*.cu", "*.cuh"], capture_output=True, text=True, check=True
    ).stdout.split()
    violations = []
    for path in files:
        room = room_of(path)
        text = pathlib.Path(path).read_text()
        for kind, target in INCLUDE.findall(text):
            if kind == "<":
                for pattern, allowed in THIRD_PARTY:
                    if re.match(pattern, target) and not re.search(allowed, path):
                        violations.append(f"{path}: <{target}> belongs in files that match {allowed}")
                continue
            if room is None:  # tests and examples may look everywhere
                continue
            full = "include/" + target if target.startswith("fovea/") else target
            target_room = room_of(full)
            if target_room is None:
                violations.append(f"{path}: \"{target}\" is not a path from the top of the tree")
                continue
            if path.startswith("include/") and not target.startswith("fovea/"):
                violations.append(f"{path}: a public header includes \"{target}\"")
            if room in ("cli", "bench") and target.startswith("src/"):
                violations.append(f"{path}: {room} uses public headers only, not \"{target}\"")
            if target_room not in FLOOR:
                violations.append(f"{path}: room '{target_room}' has no floor in tools/check_includes.py")
            elif room != target_room and FLOOR[target_room] >= FLOOR[room]:
                if path != "include/fovea/fovea.h":
                    violations.append(f"{path}: {room} includes \"{target}\" of {target_room}, which is not below it")
    for violation in violations:
        print(violation)
    print(f"check_includes: {len(files)} files, {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
