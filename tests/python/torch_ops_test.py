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


def listed(results):
    """Results of an operator of torch.ops, however many."""
    return list(results) if isinstance(results, (list, tuple)) else results_of(results)


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
                                 [(word, shape) for _, word, shape, _ in expected])  # fmt: skip
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
                actual = listed(getattr(torch.ops.fovea, op)(**tensors))
                more = {"return_max_logits": True} if op == "sparse_mla" else {}
                expected = results_of(getattr(fovea, op)(**arguments, **more))
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

    def test_sizes_stay_symbolic(self):
        """One graph serves every number of rows, of pages and of requests."""
        graphs = []

        def count(graph, inputs):
            graphs.append(graph)
            return graph

        def select(logits, row_len, q, kv):
            lists = torch.ops.fovea.topk_select(logits, row_len, 4)
            out, lse, _ = torch.ops.fovea.sparse_mla(q, kv, lists, 0.1)
            starts = torch.ops.fovea.split_schedule(row_len, parts=3)[1]
            return lists, out, lse, starts

        compiled = torch.compile(select, fullgraph=True, dynamic=True, backend=count)
        for rows, keys in ((3, 8), (5, 8), (2, 16), (17, 40)):
            tensors = torch.rand(rows, keys), torch.full((rows,), keys, dtype=torch.int32)
            latent = torch.rand(rows, 2, 576).bfloat16(), torch.rand(keys, 576).bfloat16()
            actual, expected = compiled(*tensors, *latent), select(*tensors, *latent)
            for mine, other in zip(actual, expected):
                self.assertEqual(mine.shape, other.shape)
                self.assertTrue(torch.equal(mine, other))
        self.assertEqual(len(graphs), 1)

    def test_every_fake_follows_its_origins(self):
        """Under a trace with symbolic sizes every operator's results have the sizes that the operator gives."""
        from torch._dynamo.source import ConstantSource
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

        for op, arguments in self.operators().items():
            tensors = self.tensors(arguments)
            expected = listed(getattr(torch.ops.fovea, op)(**self.tensors(arguments)))
            with self.subTest(op), FakeTensorMode(shape_env=ShapeEnv()) as mode:
                fakes = {
                    name: mode.from_tensor(
                        value, source=ConstantSource(name),
                        symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * value.dim()),
                    ) if isinstance(value, torch.Tensor) else value
                    for name, value in tensors.items()
                }  # fmt: skip
                actual = listed(getattr(torch.ops.fovea, op)(**fakes))
                fixed = [n for one in actual for n in one.shape if isinstance(n, int) or not n.node.expr.free_symbols]
                is_fixed = len(fixed) == sum(one.dim() for one in actual)
                self.assertEqual(is_fixed, not actual or op in ("metadata_check", "paged_schedule"))
                self.assertEqual([[int(n) for n in one.shape] for one in actual], [list(one.shape) for one in expected])

    def test_wrong_calls_are_named_errors_under_fakes_too(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(), self.assertRaisesRegex(fovea.InvalidArgument, "topk_select: row_len"):
            torch.ops.fovea.topk_select(torch.zeros(2, 4), torch.zeros(3, dtype=torch.int32), 2)


if __name__ == "__main__":
    unittest.main()
