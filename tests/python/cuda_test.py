"""The package on a GPU: the suites of operators, backends and compat again, and what only a GPU has."""

import gc
import importlib.util
import pathlib
import subprocess
import sys
import textwrap
import unittest

import numpy as np

import dsa_backend_test
import fovea
import hostile_test
from calls import legal_calls
from support import BF16, GPU, Case, Elsewhere, reason_without_gpu, run_threads

try:
    import torch
except ImportError:
    torch = None
else:
    import away
    import fovea.torch_ops
    from torch_test import results_of

HERE = pathlib.Path(__file__).parent
SUITES = (
    "operators_test", "pools_test", "dsa_backend_test", "kda_backend_test", "msa_backend_test", "v4_backend_test",
    "compat_dsa_test", "compat_kda_test", "compat_msa_test", "compat_swa_test", "sglang_steps_test", "sglang_forward_test",
    "sglang_graphs_test",
)  # fmt: skip
# What suites share: loaded anew for each, because its calls go to the device, too.
SHARED = ("engine", "sglang_steps_test")


READ_ONLY = "test_a_read_only_pool_is_refused"
DEVICE, SKIPPED = GPU, reason_without_gpu()


def suite_on(device, name):
    """The classes of a suite, their calls on the device; those that know devices themselves are left out."""
    before = {shared: sys.modules.pop(shared, None) for shared in SHARED}
    spec = importlib.util.spec_from_file_location(f"cuda_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for loaded in [module, *(sys.modules.pop(shared) for shared in SHARED if shared in sys.modules)]:
        loaded.fovea, loaded.DEVICE = away.Package(device), device
    sys.modules.update({shared: kept for shared, kept in before.items() if kept is not None})
    kinds = {key: kind for key, kind in vars(module).items()
             if isinstance(kind, type) and issubclass(kind, Case) and kind is not Case and not hasattr(kind, "device")}  # fmt: skip
    for kind in kinds.values():
        if hasattr(kind, READ_ONLY):
            setattr(kind, READ_ONLY, unittest.skip("torch has no read-only memory")(getattr(kind, READ_ONLY)))
    return kinds


# Their results are as large as contents say, which no call reads from a GPU.
SIZED_BY_CONTENTS = {"metadata_refresh", "context_split", "build_swa_indices", "index_gather"}
UPDATED = ("pool", "state", "window_state", "index_pool", "inv_scale")


def on_device(value, device=DEVICE):
    """The same tensors there; everything else as it is."""
    if isinstance(value, dict):
        return {name: on_device(entry, device) for name, entry in value.items()}
    return away.Copies(device).put(value)


def device_calls():
    return {op: arguments for op, arguments in legal_calls().items() if op not in SIZED_BY_CONTENTS}


def equal(one, other):
    """Bit by bit, NaN included."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )  # fmt: skip


@unittest.skipIf(SKIPPED, SKIPPED)
class GpuTest(Case):
    def setUp(self):
        self.addCleanup(torch.cuda.synchronize)

    def test_every_operator_gives_what_the_cpu_gives(self):
        for op, arguments in device_calls().items():
            with self.subTest(op):
                tensors = on_device(arguments)
                actual = results_of(getattr(fovea, op)(**tensors))
                expected = results_of(getattr(fovea, op)(**arguments))
                self.assertEqual(len(actual), len(expected))
                for mine, other in zip(actual, expected):
                    self.assertEqual(str(mine.device), DEVICE)
                    self.assertEqual(tuple(mine.shape), other.shape)
                    if op != "index_logits":  # columns outside a row are unspecified
                        self.assert_close(away.to_numpy(mine.cpu()), other, 2e-2)
                for name in UPDATED:
                    if name in tensors:
                        self.assert_close(away.to_numpy(tensors[name].cpu()), arguments[name], 2e-2)

    def test_results_in_memory_of_the_caller_with_strides(self):
        for op, arguments in device_calls().items():
            with self.subTest(op):
                expected = results_of(getattr(fovea, op)(**on_device(arguments)))
                if op in fovea.torch_ops.LISTS or not expected:
                    continue
                # Every axis but the last has a gap behind it.
                wide = [torch.full([2 * extent + 1 for extent in result.shape[:-1]] + [result.shape[-1] + 8], 77,
                                   device=DEVICE).to(result.dtype) for result in expected]  # fmt: skip
                views = [whole[tuple(slice(0, 2 * extent, 2) for extent in result.shape[:-1]) + (slice(0, result.shape[-1]),)]
                         for whole, result in zip(wide, expected)]  # fmt: skip
                try:
                    actual = results_of(getattr(fovea, op)(**on_device(arguments), out=tuple(views)))
                except fovea.InvalidArgument as error:  # strides that an operator says it does not take
                    self.assertRegex(str(error), "stride|contiguous|packed")
                    continue
                for mine, view, whole, result in zip(actual, views, wide, expected):
                    self.assertIs(mine, view)
                    if op != "index_logits":
                        self.assertTrue(equal(mine, result))
                    mine.fill_(77)
                    self.assertTrue(bool((whole == torch.full((), 77).to(whole)).all()), "the gaps are written")

    def test_inputs_are_used_where_they_are(self):
        q, kv = (torch.randn(*shape, device=DEVICE).bfloat16() for shape in ((3, 2, 1200), (16, 640)))
        indices = torch.randint(0, 16, (3, 9), device=DEVICE, dtype=torch.int32)
        views = q[:, :, 8:584], kv[:, :576], indices[:, :8]
        packed = [view.contiguous() for view in views]
        for mine, other in zip(fovea.sparse_mla(*views, 0.1), fovea.sparse_mla(*packed, 0.1)):
            self.assertTrue(equal(mine, other))
        gc.collect()  # what earlier cases left must not go in between
        before = torch.cuda.memory_allocated()
        out, lse = torch.empty(3, 2, 512, device=DEVICE).bfloat16(), torch.empty(3, 2, device=DEVICE)
        kept = torch.cuda.memory_allocated()
        fovea.sparse_mla(*views, 0.1, out=(out, lse))
        self.assertEqual(torch.cuda.memory_allocated(), kept)
        self.assertGreater(kept, before)

    def test_a_call_follows_the_current_stream_and_is_not_waited_for(self):
        logits, row_len = torch.zeros(4, 4096, device=DEVICE), torch.full((4,), 4096, dtype=torch.int32, device=DEVICE)
        out = torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
        fovea.topk_select(logits, row_len, 2, out=out)
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        for way in ("current", "argument"):
            with self.subTest(way):
                logits.zero_()
                torch.cuda.synchronize()
                with torch.cuda.stream(side):
                    torch.cuda._sleep(200_000_000)
                    logits[:, 7] = 2
                    logits[:, 4000] = 1
                    if way == "current":
                        result = fovea.topk_select(logits, row_len, 2)
                with torch.cuda.stream(other):
                    if way == "argument":
                        result = fovea.topk_select(logits, row_len, 2, stream=side.cuda_stream)
                self.assertFalse(side.query(), "the call waited for the stream")
                side.synchronize()
                self.assertEqual(result.tolist(), [[7, 4000]] * 4)

    def test_streams_of_threads_do_not_disturb_one_another(self):
        q, kv = torch.randn(8, 16, 576, device=DEVICE).bfloat16(), torch.randn(4096, 576, device=DEVICE).bfloat16()
        lists = [torch.randint(0, 4096, (8, 2048), device=DEVICE, dtype=torch.int32) for _ in range(4)]
        expected = [fovea.sparse_mla(q, kv, indices, 0.1) for indices in lists]
        torch.cuda.synchronize()
        wrong = []

        def work(number):
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    results = fovea.sparse_mla(q, kv, lists[number], 0.1)
                    if not all(equal(mine, other) for mine, other in zip(results, expected[number])):
                        wrong.append(number)

        run_threads(4, work)
        self.assertEqual(wrong, [])

    def test_tensors_on_two_devices_are_refused(self):
        arguments = legal_calls()["sparse_mla"]
        tensors = on_device(arguments)
        for name in ("q", "kv", "indices", "sink"):
            mixed = {**tensors, name: arguments[name]}
            with self.subTest(name), self.assertRaisesRegex(fovea.InvalidArgument, "is on cpu.*on cuda:0|is on cuda:0.*on cpu"):
                fovea.sparse_mla(**mixed)
        with self.assertRaisesRegex(fovea.InvalidArgument, "out is on cpu"):
            fovea.sparse_mla(**tensors, out=(np.zeros((3, 2, 512), BF16), None))
        with self.assertRaisesRegex(fovea.Unsupported, "q_indptr is on cuda:0.*pass it on the CPU"):
            fovea.build_swa_indices(**on_device(legal_calls()["build_swa_indices"]))

    def test_results_that_do_not_fit_are_out_of_memory(self):
        rows = 2**27
        logits = torch.zeros(1, 512, device=DEVICE).expand(rows, 512)
        row_len = torch.ones(rows, dtype=torch.int32, device=DEVICE)
        with self.assertRaisesRegex(fovea.OutOfMemory, "topk_select: "):
            fovea.topk_select(logits, row_len, 512)

    def test_what_a_gpu_lacks_is_named(self):
        with self.assertRaisesRegex(fovea.Unsupported, "ref"):
            fovea.sparse_mla(**on_device(legal_calls()["sparse_mla"]), impl="ref")
        self.assertEqual(fovea.available("sparse_mla", DEVICE), (True, ""))
        self.assertFalse(fovea.available("sparse_mla", "cuda:99")[0])
        for name in ("DsaBackend", "KdaBackend", "MsaBackend", "V4Backend"):
            self.assertEqual(fovea.available(name, DEVICE), (True, ""))

    def test_pools_of_a_gpu(self):
        pool = fovea.KvPool(num_pages=3, page_size=4, row_format="v32", device=DEVICE)
        view = pool.layer()
        self.assertEqual((view.device, view.shape), (DEVICE, (3, 4 * 656)))
        seen = torch.from_dlpack(view)
        src, slots = torch.randn(5, 576, device=DEVICE).bfloat16(), torch.arange(5, device=DEVICE, dtype=torch.int32)
        fovea.pack_rows(src, slots, view, "v32", page_size=4)
        rows = fovea.unpack_rows(view, slots, "v32", page_size=4)
        self.assertTrue(equal(rows[:, 512:], src[:, 512:]))
        self.assertTrue(bool(seen.any()))
        with self.assertRaises(BufferError):
            view.numpy()
        del pool, view
        gc.collect()
        self.assertEqual(int(seen[2].sum()), 0)
        states = fovea.StatePool(num_slots=2, num_value_heads=1, head_dim_k=4, head_dim_v=2, device=DEVICE)
        torch.from_dlpack(states.states()).fill_(3)
        states.clear(1)
        self.assertEqual(torch.from_dlpack(states.states()).sum().item(), 3 * 8)


    def test_torch_serves_the_memory(self):
        self.addCleanup(fovea.set_memory_resource, DEVICE, None, None)
        q, kv = torch.randn(4, 16, 576, device=DEVICE).bfloat16(), torch.randn(4096, 576, device=DEVICE).bfloat16()
        indices = torch.randint(0, 4096, (4, 2048), device=DEVICE, dtype=torch.int32)
        expected = fovea.sparse_mla(q, kv, indices, 0.1)
        fovea.use_torch_memory(DEVICE)
        before = torch.cuda.memory_allocated()
        pool = fovea.KvPool(num_pages=1000, page_size=64, row_format="v32", device=DEVICE)
        self.assertGreaterEqual(torch.cuda.memory_allocated() - before, 1000 * 64 * 656)
        del pool
        gc.collect()
        self.assertEqual(torch.cuda.memory_allocated(), before)
        out = torch.empty_like(expected[0]), torch.empty_like(expected[1])
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            for mine, other in zip(fovea.sparse_mla(q, kv, indices, 0.1, out=out), expected):
                self.assertTrue(equal(mine, other))
        self.assertGreater(torch.cuda.memory_allocated(), before)  # the workspace, kept
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fovea.sparse_mla(q, kv, indices, 0.1, out=out)
        for result in out:
            result.zero_()
        graph.replay()
        for mine, other in zip(out, expected):
            self.assertTrue(equal(mine, other))
        del graph
        fovea.set_memory_resource(DEVICE, None, None)
        gc.collect()
        torch.cuda.synchronize()
        self.assertEqual(torch.cuda.memory_allocated(), before)


@unittest.skipIf(SKIPPED, SKIPPED)
class GraphTest(Case):
    """Calls inside torch.cuda.graph: the first of a problem as well as later ones."""

    def capture(self, call):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            results = call()
        return graph, results

    def test_every_operator_of_torch_is_captured_and_replayed(self):
        for op, arguments in device_calls().items():
            with self.subTest(op):
                tensors, again = on_device(arguments), on_device(arguments)
                call = getattr(torch.ops.fovea, op)
                graph, results = self.capture(lambda: call(**tensors))
                results = list(results) if isinstance(results, (tuple, list)) else [] if results is None else [results]
                for name in UPDATED:  # nothing ran yet
                    if name in tensors:
                        self.assertTrue(equal(tensors[name], again[name]), name)
                for result in results:
                    result.fill_(1)
                graph.replay()
                torch.cuda.synchronize()
                expected = call(**again)
                expected = list(expected) if isinstance(expected, (tuple, list)) else [] if expected is None else [expected]
                for mine, other in zip(results, expected):
                    if op != "index_logits":
                        self.assertTrue(equal(mine, other))
                for name in UPDATED:
                    if name in tensors:
                        self.assertTrue(equal(tensors[name], again[name]), name)

    def test_the_first_call_of_a_process_may_be_captured(self):
        first = textwrap.dedent(
            """
            import torch, fovea
            q, kv = torch.randn(4, 16, 576, device="cuda").bfloat16(), torch.randn(4096, 576, device="cuda").bfloat16()
            indices = torch.randint(0, 4096, (4, 2048), device="cuda", dtype=torch.int32)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = fovea.sparse_mla(q, kv, indices, 0.1)
            graph.replay()
            for mine, other in zip(captured, fovea.sparse_mla(q, kv, indices, 0.1)):
                assert torch.equal(mine, other)
            """
        )
        done = subprocess.run([sys.executable, "-c", first], capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_graph_keeps_its_workspace(self):
        # Long lists are cut into parts, which go through a workspace.
        q, kv = torch.randn(4, 16, 576, device=DEVICE).bfloat16(), torch.randn(4096, 576, device=DEVICE).bfloat16()
        indices = torch.randint(0, 4096, (4, 2048), device=DEVICE, dtype=torch.int32)
        out = torch.empty(4, 16, 512, device=DEVICE).bfloat16(), torch.empty(4, 16, device=DEVICE)
        expected = fovea.sparse_mla(q, kv, indices, 0.1)
        graph, _ = self.capture(lambda: fovea.sparse_mla(q, kv, indices, 0.1, out=out))
        side = torch.cuda.Stream()
        for _ in range(20):
            with torch.cuda.stream(side):
                graph.replay()
            others = fovea.sparse_mla(q.flip(0), kv, indices.flip(0), 0.1)  # at the same time
            torch.cuda.synchronize()
            for mine, other, whole in zip(out, expected, others):
                self.assertTrue(equal(mine, other))
                self.assertTrue(equal(whole.flip(0).contiguous(), other))
        # The same buffers with other contents.
        indices.copy_(torch.randint(0, 4096, indices.shape, device=DEVICE, dtype=torch.int32))
        graph.replay()
        for mine, other in zip(out, fovea.sparse_mla(q, kv, indices, 0.1)):
            self.assertTrue(equal(mine, other))

    def test_a_step_of_a_backend_is_one_graph(self):
        case = dsa_backend_test.DsaTest()
        case.setUp()
        backend = fovea.DsaBackend(num_heads=2, index_heads=2, topk=4, page_size=4, max_requests=2, max_rows=16,
                                   table_width=16, device=DEVICE)  # fmt: skip
        pools = [torch.zeros(case.batch.num_pages, 4 * size, dtype=torch.uint8, device=DEVICE) for size in (656, 132)]
        layer = on_device(case.layer)

        def forward(rows, pools, plan=None, **more):
            return backend.forward(*pools, 0.1, **rows, **layer, plan=plan, return_indices=True, **more)

        backend.begin_step(**on_device(case.batch.step("extend", [0, 0], [5, 6])))
        forward(on_device(case.rows(11)), pools)
        plan = backend.make_step_plan("decode", 2)
        step, rows = on_device(case.batch.step("decode", [5, 6], [1, 1])), on_device(case.rows(2))

        def whole():
            backend.begin_step(**step, plan=plan)
            return forward(rows, pools, plan)

        graph, results = self.capture(whole)
        for lengths in ([5, 6], [6, 7], [7, 8]):
            step_now, rows_now = case.batch.step("decode", lengths, [1, 1]), case.rows(2)
            for buffers, values in ((step, step_now), (rows, rows_now)):
                for name, value in values.items():
                    if isinstance(value, np.ndarray):
                        buffers[name].copy_(on_device(value))
            copies = [pool.clone() for pool in pools]
            graph.replay()
            backend.begin_step(**on_device(step_now))
            for mine, other in zip(results, forward(on_device(rows_now), copies)):
                self.assertTrue(equal(mine, other), lengths)
            for pool, copy in zip(pools, copies):
                self.assertTrue(equal(pool, copy), lengths)


def scattered(rng, arguments):
    """Arguments of a wrong call with most of its tensors on the GPU, some elsewhere."""
    moved = {}
    for name, value in arguments.items():
        if isinstance(value, Elsewhere) and value.device[0] == 2:
            value = value.array  # the claim would be believed: a kernel would read memory of the host
        try:
            chance = rng.random()
            moved[name] = on_device(value) if chance < 0.9 else on_device(value, "cpu") if chance < 0.95 else value
        except (RuntimeError, TypeError, ValueError):
            moved[name] = value
    return moved


class HostileCase(hostile_test.HostileTest):
    """The hostile calls, on tensors of the GPU."""

    def call(self, op, arguments):
        self.count = getattr(self, "count", 0) + 1
        parts = getattr(arguments.get("out_parts"), "shape", ())
        if op == "merge_lse" and parts and parts[0] > 2**20:
            return "done"  # a right call: so many parts would be merged for days
        return super().call(op, scattered(np.random.default_rng(self.count), arguments))

    test_legal_calls_run = None

    def test_ten_thousand_wrong_calls(self):
        outcomes = self.run_calls(10000, seed=5)
        torch.cuda.synchronize()  # what a kernel did wrong shows here at the latest
        self.assertGreater(outcomes["done"], 300, outcomes)
        self.assertGreater(outcomes["refused"], 3000, outcomes)


@unittest.skipIf(SKIPPED, SKIPPED)
class GpuHostileTest(HostileCase):
    pass


del HostileCase


@unittest.skipIf(SKIPPED, SKIPPED)
class GpuMemoryTest(Case):
    def test_a_hundred_thousand_calls_keep_the_memory_flat(self):
        calls = [(getattr(fovea, op), on_device(arguments), on_device({**arguments, "impl": "none"}))
                 for op, arguments in device_calls().items()]  # fmt: skip

        def run(count):
            while count > 0:
                for function, legal, wrong in calls:
                    function(**legal)
                    try:
                        function(**wrong)
                    except fovea.InvalidArgument:
                        pass
                    count -= 2
            torch.cuda.synchronize()
            gc.collect()

        run(5000)
        heap, resident, device = hostile_test.heap_kib(), hostile_test.resident_kib(), torch.cuda.mem_get_info()[0]
        run(100000)
        self.assertLess(hostile_test.heap_kib() - heap, 256)
        self.assertLess(hostile_test.resident_kib() - resident, 8192)
        self.assertLessEqual(device - torch.cuda.mem_get_info()[0], 2 << 20)


if SKIPPED:

    @unittest.skip(SKIPPED)
    class CudaTest(Case):
        def test_every_suite_on_a_gpu(self):
            pass

else:
    for suite in SUITES:
        for key, kind in suite_on(DEVICE, suite).items():
            # Suites have classes of the same name.
            kind.__name__ = kind.__qualname__ = f"{'Full' if key.startswith('Full') else ''}Cuda_{suite.removesuffix('_test')}_{key}"
            kind.__module__ = __name__
            globals()[kind.__name__] = kind


if __name__ == "__main__":
    unittest.main()
