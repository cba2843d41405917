"""Functions, their documentation and the stub of the native module agree."""

import ast
import inspect
import pathlib
import re
import unittest

import fovea
from fovea import _native
from support import Case

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMON = {"impl", "out", "stream"}


def table_rows():
    """Operator -> names of its tensors and parameters in docs/run.md."""
    rows = {}
    for line in (ROOT / "docs/run.md").read_text().splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        op = re.fullmatch(r" `(\w+)` ", cells[1]) if len(cells) == 6 else None
        if op:
            rows[op[1]] = set(re.findall(r"`(\w+)`", cells[2] + cells[4]))
    return rows


class NamesTest(Case):
    def test_arguments_are_those_of_the_operator_table(self):
        rows = table_rows()
        rows["index_select"] = (rows["index_logits"] | rows["topk_select"]) - {"logits", "row_start"}
        shared = {"gate", "lower_bound", "beta_kind", "allow_neg_eigval", "normalise", "scale", "check"}
        layer = {"q", "k", "v", "g", "beta", "a_log", "dt_bias", "state", "slot", "has_initial_state", "qkv"}
        rows["kda_prefill"] |= shared
        rows["kda_decode"] = layer | shared
        rows["kda_verify"] = layer | shared | {"parent", "mode", "rows_per_request"}
        selection = rows["msa_select_blocks"] - {"scores"}
        rows["msa_score_select"] = rows["msa_block_scores"] | selection
        rows["msa_select_blocks"] |= {"kv_len"}
        rows["kda_stage_gate"] |= {"gate", "lower_bound"}
        scales = {"q_scale", "k_scale", "v_scale", "k_global_scale", "v_global_scale"}
        rows["msa_attend"] |= scales
        compared = 0
        for op in sorted(set(rows) & set(fovea.__all__)):
            with self.subTest(op):
                arguments = set(inspect.signature(getattr(fovea, op)).parameters)
                self.assertEqual(arguments - COMMON - {"return_max_logits"}, rows[op])
                compared += 1
        self.assertEqual(compared, len(fovea.operators()))

    def test_every_argument_is_documented(self):
        for name in fovea.__all__:
            function = getattr(fovea, name)
            if not inspect.isfunction(function):
                continue
            with self.subTest(name):
                text = inspect.getdoc(function)
                self.assertTrue(text)
                if name == "index_select":  # says that its arguments are those of two others
                    continue
                for argument in set(inspect.signature(function).parameters) - COMMON:
                    self.assertRegex(text, rf"\b{argument}\b")
                for annotation in function.__annotations__.values():
                    self.assertTrue(annotation)

    def test_required_arguments_are_positional_and_others_are_not(self):
        for op in set(fovea.operators()) & set(fovea.__all__):
            for argument in inspect.signature(getattr(fovea, op)).parameters.values():
                positional = argument.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
                if argument.default is inspect.Parameter.empty:
                    self.assertTrue(positional, (op, argument.name))
                elif argument.name not in ("workers", "parts"):
                    self.assertFalse(positional, (op, argument.name))

    def test_the_stub_names_what_the_module_has(self):
        stub = ast.parse((ROOT / "python/fovea/_native.pyi").read_text())
        functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
        public = {name for name in dir(_native) if not name.startswith("_")}
        self.assertEqual(set(functions), public)
        for name, node in functions.items():
            signature = getattr(_native, name).__doc__.splitlines()[0]
            names = [argument.arg for argument in node.args.args]
            self.assertEqual(re.findall(r"(\w+): ", signature), names, name)

    def test_the_package_says_that_it_is_typed(self):
        self.assertTrue((pathlib.Path(fovea.__file__).parent / "py.typed").exists())


if __name__ == "__main__":
    unittest.main()
