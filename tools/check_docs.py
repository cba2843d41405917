#!/usr/bin/env python3
"""Checks that every relative link of the Markdown files leads to a file, and that every operator has its page."""

import pathlib
import re
import subprocess
import sys

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def main() -> int:
    files = subprocess.run(["git", "ls-files", "*.md"], capture_output=True, text=True, check=True).stdout.split()
    problems = []
    for name in files:
        path = pathlib.Path(name)
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for target in LINK.findall(text):
            if "://" in target or target.startswith("mailto:"):
                continue
            if not (path.parent / target).exists():
                problems.append(f"{name}: link to {target} leads nowhere")
    registered = re.compile(r'constexpr char kOp\w*\[\] = "(\w+)"')
    for source in pathlib.Path("src").glob("*/*.cc"):
        for op in registered.findall(source.read_text()):
            if not any(op in path.read_text() for path in pathlib.Path("docs").glob("*.md") if path.stem == op or "# " + op in path.read_text()):
                problems.append(f"{source}: operator {op} has no page in docs/")
    for problem in problems:
        print(problem)
    print(f"check_docs: {len(files)} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
