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
    pages = [path.read_text() for path in pathlib.Path("docs").glob("*.md")]
    for source in pathlib.Path("src").glob("*/*.cc"):
        text = source.read_text()
        if "OperatorRegistration k" not in text:
            continue
        for op in re.findall(r'constexpr char k\w*\[\] = "(\w+)"', text):
            if not any(re.search(rf"^# .*\b{op}\b", page, re.MULTILINE) for page in pages):
                problems.append(f"{source}: operator {op} has no page in docs/")
    for problem in problems:
        print(problem)
    print(f"check_docs: {len(files)} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
