"""torch.ops.fovea: results of the functions, fake kernels, mutations; what the fakes rest on works without torch."""

import unittest

import numpy as np

import fovea
from calls import legal_calls
from fovea import _native
from fovea._call import keywords
from support import BF16, Case

try:
    import torch
except ImportError:
    torch = None
else:
    import fovea.torch_ops
    from torch_test import results_of, to_numpy, to_torch

WORDS = {np.dtype(np.float32): "f32", np.dtype(np.int32): "i32", np.dtype(np.int64): "i64", np.dtype(np.uint8): "u8",
         np.dtype(BF16): "bf16"}  # fmt: skip
SIZED_BY_CONTENTS = {"metadata_refresh", "context_split", "build_swa_indices", "index_gather"}


def shapes_of(op, arguments):
    every = {name: None for name in fovea_arguments(op)} | arguments
    tensors, params = keywords(getattr(fovea, op), every)
    described = {name: tensor if tensor is None else (WORDS[tensor.dtype], tensor.shape) for name, tensor in tensors.items()}
    return _native.result_shapes(op, described, params, ())


def fovea_arguments(op):
    return getattr(fovea, op).__annotations__


class ShapesTest(Case):
    def test_shapes_are_those_of_the_results(self):
        for op, arguments in legal_calls().items():
            with self.subTest(op):
                if op in SIZED_BY_CONTENTS:
                    with self.assertRaises(fovea.Unsupported):
                        shapes_of(op, arguments)
                    continue
                expected, _ = shapes_of(op, arguments)
                before = {name: value.copy() for name, value in arguments.items() if isinstance(value, np.ndarray)}
                more = {"return_max_logits": True} if op == "sparse_mla" else {}
                results = getattr(fovea, op)(**arguments, **more)
                results = [] if results is None else list(results) if isinstance(results, tuple) else [results]
                self.assertEqual([(WORDS[result.dtype], result.shape) for result in results],
                                 [(word, shape) for _, word, shape in expected])  # fmt: skip
                changed = {name for name, value in before.items() if (value != arguments[name]).any()}
                self.assertLessEqual(changed, set(shapes_of(op, before | arguments)[1]))

    def test_refusals(self):
        good = {"logits": ("f32", (2, 4)), "row_len": ("i32", (2,))}
        for wrong in ({"row_len": ("i32", (3,))}, {"logits": ("f16", (2, 4))}, {"logits": ("f32", (2, -4))},
                      {"logits": ("f32", (1,) * 6)}, {"logits": ("f32", (2**40, 2**40))}, {"row_len": None}):  # fmt: skip
            with self.subTest(wrong), self.assertRaisesRegex(fovea.InvalidArgument, "topk_select: "):
                _native.result_shapes("topk_select", good | wrong, {"topk": 2}, ())


@unittest.skipIf(torch is None, "torch is not installed")
class TorchOpsTest(Case):
    def tensors(self, arguments):
        return {name: to_torch(value.copy() if isinstance(value, np.ndarray) else value) for name, value in arguments.items()}

    def operators(self):
        return {op: arguments for op, arguments in legal_calls().items() if op not in SIZED_BY_CONTENTS}

    def test_results_are_those_of_the_functions(self):
        self.assertEqual(set(fovea.torch_ops.WITHOUT), SIZED_BY_CONTENTS)
        for op, arguments in self.operators().items():
            with self.subTest(op):
                tensors = self.tensors(arguments)
                actual = getattr(torch.ops.fovea, op)(**tensors)
                more = {"return_max_logits": True} if op == "sparse_mla" else {}
                expected = results_of(getattr(fovea, op)(**arguments, **more))
                actual = results_of(tuple(actual) if isinstance(actual, list) else actual)
                self.assertEqual(len(actual), len(expected))
                for mine, other in zip(actual, expected):
                    self.assert_same(to_numpy(mine), other)
                for name in fovea.torch_ops.MUTATED.get(op, ()):
                    if name in arguments:
                        self.assert_same(to_numpy(tensors[name]), arguments[name])

    def test_mutations_are_declared(self):
        for op, arguments in self.operators().items():
            updated = set(shapes_of(op, arguments)[1])
            self.assertLessEqual(updated, set(fovea.torch_ops.MUTATED.get(op, ())), op)

    def test_schemas_and_fakes_agree_with_the_kernels(self):
        for op, arguments in self.operators().items():
            with self.subTest(op):
                overload = getattr(torch.ops.fovea, op).default
                torch.library.opcheck(overload, (), self.tensors(arguments), test_utils=("test_schema", "test_faketensor"))

    def test_a_compiled_function_is_one_graph(self):
        def step(src, slots, pool, q, indices):
            torch.ops.fovea.pack_rows(src, slots, pool, "v32", page_size=4)
            out, lse, _ = torch.ops.fovea.sparse_mla(q, pool, indices, 0.1, row_format="v32", page_size=4)
            return out.float() * 2, lse

        calls = legal_calls()
        tensors = self.tensors({**{name: calls["pack_rows"][name] for name in ("src", "slots", "pool")},
                                **{name: calls["sparse_mla"][name] for name in ("q", "indices")}})  # fmt: skip
        other = {name: value.clone() for name, value in tensors.items()}
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for mine, expected in zip(compiled(**tensors), step(**other)):
            self.assertTrue(torch.equal(mine, expected))
        self.assertTrue(torch.equal(tensors["pool"], other["pool"]))

    def test_wrong_calls_are_named_errors_under_fakes_too(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(), self.assertRaisesRegex(fovea.InvalidArgument, "topk_select: row_len"):
            torch.ops.fovea.topk_select(torch.zeros(2, 4), torch.zeros(3, dtype=torch.int32), 2)


if __name__ == "__main__":
    unittest.main()
