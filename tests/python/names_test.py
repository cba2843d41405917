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


def fields_of(header, struct):
    """Field -> default, None where there is none, of a struct of a public header."""
    text = (ROOT / "include/fovea" / header).read_text()
    body = re.search(rf"struct {struct} {{\n(.*?)\n}};", text, re.DOTALL)[1]
    lines = [line.split("//")[0] for line in body.splitlines()]
    fields = {}
    for statement in " ".join(lines).split(";"):
        match = re.fullmatch(r"\s*(?:const )?[\w:]+\*? (\w+(?:, \w+)*)(?: = (.*))?\s*", statement)
        for name in match[1].split(", ") if match else ():
            fields[name] = match[2] and match[2].strip()
    return fields


def python_value(text):
    """What a default of C++ is in Python."""
    word = re.fullmatch(r"\w+::k(\w+)", text)
    if word:
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word[1]).lower()
    if text in ("true", "false"):
        return text == "true"
    if text.startswith('"'):
        return text.strip('"')
    return eval(re.sub(r"int64_t{(\d+)}", r"\1", text).removesuffix("f"))


CONFIGS = {
    "DsaBackend": ("dsa_backend.h", "DsaConfig"),
    "KdaBackend": ("kda_backend.h", "KdaBackendConfig"),
    "MsaBackend": ("msa_backend.h", "MsaBackendConfig"),
    "V4Backend": ("v4_backend.h", "V4BackendConfig"),
}
RESULTS = {"out", "lse", "indices", "blocks", "out_mha"}
CALL = {"self", "plan", "out", "stream"}


class BackendNamesTest(Case):
    """The classes of backends have the fields of the library's structs, under the same names."""

    def arguments(self, function):
        return inspect.signature(function).parameters

    def test_configurations(self):
        for name, where in CONFIGS.items():
            with self.subTest(name):
                fields = fields_of(*where)
                if name == "KdaBackend":
                    layer = fields_of("kda.h", "KdaLayer")
                    gate = fields_of("kda.h", "KdaGate")
                    gate = {"gate": gate["kind"], "lower_bound": gate["lower_bound"], "gate_dtype": gate["dtype"]}
                    del layer["gate"], fields["layer"]
                    fields = {**fields, **layer, **gate}
                arguments = dict(self.arguments(getattr(fovea, name).__init__))
                self.assertEqual(arguments.pop("device").default, "cpu")
                self.assertEqual(set(arguments) - {"self"}, set(fields))
                for field, default in fields.items():
                    if arguments[field].default is not inspect.Parameter.empty:
                        expected = "" if default is None else python_value(default)
                        self.assertAlmostEqual(arguments[field].default, expected, msg=field)

    def test_batches(self):
        batch = set(fields_of("dsa_backend.h", "ForwardBatch")) | {"host_seq_len", "host_ext_len", "context_split"}
        others = {"mha_inputs", "context_split", "store_positions"}
        self.assertEqual(set(self.arguments(fovea.DsaBackend.begin_step)) - CALL, batch)
        for name, where in CONFIGS.items():
            if name == "DsaBackend":
                continue
            own = set(fields_of(where[0], name.replace("Backend", "Batch"))) - {"forward"}
            self.assertEqual(set(self.arguments(getattr(fovea, name).begin_step)) - CALL, batch - others | own)

    def test_tensors_of_a_layer(self):
        compressor = set(fields_of("v4_backend.h", "V4Compressor"))
        compressors = {f"{kind}_{field}" for kind in ("compressor", "indexer") for field in compressor}
        layer = set(fields_of("dsa_backend.h", "DsaLayer")) - {"id"} | {"layer"}
        forwards = {
            fovea.DsaBackend.forward: set(fields_of("dsa_backend.h", "DsaForwardTensors")) | layer,
            fovea.KdaBackend.forward_kda: set(fields_of("kda_backend.h", "KdaForwardTensors")) | {"layer"},
            fovea.KdaBackend.forward_mla: set(fields_of("kda_backend.h", "KdaMlaTensors")),
            fovea.KdaBackend.commit: set(fields_of("kda_backend.h", "KdaCommitInputs")),
            fovea.MsaBackend.forward: set(fields_of("msa_backend.h", "MsaForwardTensors")),
            fovea.V4Backend.forward: set(fields_of("v4_backend.h", "V4ForwardTensors")) - {"compressor", "indexer"}
            | compressors | {"ratio"},
        }  # fmt: skip
        for function, fields in forwards.items():
            arguments = {name for name in self.arguments(function) if not name.startswith("return_")}
            self.assertEqual(arguments - CALL, fields - RESULTS, function.__qualname__)


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

    def documented(self, function, text=""):
        text += inspect.getdoc(function) or ""
        self.assertTrue(text)
        for argument in set(inspect.signature(function).parameters) - COMMON - {"self"}:
            self.assertRegex(text, rf"\b{argument}\b")
        for annotation in function.__annotations__.values():
            self.assertTrue(annotation)
        self.assertIn("return", function.__annotations__)

    def test_every_argument_is_documented(self):
        for name in fovea.__all__:
            entry = getattr(fovea, name)
            with self.subTest(name):
                # index_select says that its arguments are those of two others.
                if inspect.isfunction(entry) and name != "index_select":
                    self.documented(entry)
                if not inspect.isclass(entry) or entry.__module__ == "fovea._native":
                    continue
                self.assertTrue(entry.__doc__)
                for member, function in vars(entry).items():
                    if inspect.isfunction(function) and (not member.startswith("_") or member == "__init__"):
                        self.documented(function)

    def test_required_arguments_are_positional_and_others_are_not(self):
        for op in set(fovea.operators()) & set(fovea.__all__):
            for argument in inspect.signature(getattr(fovea, op)).parameters.values():
                positional = argument.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
                if argument.default is inspect.Parameter.empty:
                    self.assertTrue(positional, (op, argument.name))
                elif argument.name not in ("workers", "parts"):
                    self.assertFalse(positional, (op, argument.name))

    def compare_with_stub(self, nodes, owner, actual):
        functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        self.assertEqual(set(functions), actual, owner)
        for name, node in functions.items():
            member = inspect.getattr_static(owner, name)
            if "property" in type(member).__name__:
                self.assertIn("property", [decorator.id for decorator in node.decorator_list], name)
                continue
            signature = getattr(owner, name).__doc__.splitlines()[0]
            names = [argument.arg for argument in node.args.args + node.args.kwonlyargs if argument.arg != "self"]
            self.assertEqual(re.findall(r"(\w+): ", signature), names, name)

    def test_the_stub_names_what_the_module_has(self):
        stub = ast.parse((ROOT / "python/fovea/_native.pyi").read_text())
        classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
        public = {name for name in dir(_native) if not name.startswith("_")}
        self.assertEqual({name for name in public if inspect.isclass(getattr(_native, name))}, set(classes))
        self.compare_with_stub(stub.body, _native, public - set(classes))
        protocols = {"__init__", "__dlpack__", "__dlpack_device__", "__array_interface__"}
        for name, node in classes.items():
            owner = getattr(_native, name)
            inherited = set() if "__init__" in {getattr(entry, "name", "") for entry in node.body} else {"__init__"}
            actual = {member for member in vars(owner) if not member.startswith("_") or member in protocols - inherited}
            self.compare_with_stub(node.body, owner, actual)

    def test_the_package_says_that_it_is_typed(self):
        self.assertTrue((pathlib.Path(fovea.__file__).parent / "py.typed").exists())


if __name__ == "__main__":
    unittest.main()
