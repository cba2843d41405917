#!/usr/bin/env python3
"""Checks that every relative link of the Markdown files leads to a file, that every operator has its page, and that
every option of the DSA backend has its row in docs/environment.md, and that what docs/compat names exists."""

import pathlib
import re
import subprocess
import sys

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


OPTION_STRUCTS = ("DsaConfig", "DsaLayer", "ForwardBatch", "DsaForwardTensors", "StepBucket", "DraftStep")


def fields_of(header: str, name: str) -> list[str]:
    body = re.search(rf"^struct {name} {{$(.*?)^}};$", header, re.MULTILINE | re.DOTALL).group(1)
    code = " ".join(line.split("//")[0] for line in body.splitlines())
    fields = []
    for statement in re.sub(r"<[^<>]*>", "", code).split(";"):
        names = statement.split("=")[0].split(",")
        fields += [part.split()[-1] for part in names if part.split()]
    return fields


def missing_options() -> list[str]:
    header = pathlib.Path("include/fovea/dsa_backend.h").read_text()
    page = pathlib.Path("docs/environment.md").read_text()
    problems = []
    for name in OPTION_STRUCTS:
        match = re.search(rf"^### {name}$(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
        section = match.group(1) if match else ""
        cells = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
        listed = set(re.findall(r"`(\w+)`", cells))
        fields = set(fields_of(header, name))
        problems += [f"docs/environment.md: {name}::{field} has no row" for field in sorted(fields - listed)]
        problems += [f"docs/environment.md: {name} has no field {field}" for field in sorted(listed - fields)]
    return problems


def missing_names() -> list[str]:
    headers = " ".join(path.read_text() for path in pathlib.Path("include/fovea").glob("*.h"))
    words = set(re.findall(r"\w+", headers))
    problems = []
    for page in pathlib.Path("docs/compat").glob("*.md"):
        text = page.read_text()
        for owner, member in re.findall(r"`(\w+)::(\w+)`", text):
            if owner not in words or member not in words:
                problems.append(f"{page}: {owner}::{member} is in no public header")
        for path in re.findall(r"`((?:src|tests|include)/[\w./]+)`", text):
            if not pathlib.Path(path).exists():
                problems.append(f"{page}: {path} does not exist")
    return problems


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
    problems += missing_options() + missing_names()
    for problem in problems:
        print(problem)
    print(f"check_docs: {len(files)} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
