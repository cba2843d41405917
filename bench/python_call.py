"""What a call from Python costs the CPU: microseconds of a call in a loop.

    PYTHONPATH=build/release/python python bench/python_call.py [--device cuda:0] [--calls 20000]

On a GPU the loop submits and does not wait; the time is that of the submitting thread. Queues of a device are finite, so
the loop pauses for it now and then, outside the time.
"""

import argparse
import importlib
import statistics
import time

import numpy as np

import fovea

try:
    import torch
except ImportError:
    torch = None


def time_of(call, calls, wait, rounds=9):
    """Median and least of rounds, in microseconds a call."""
    batch = max(1, min(100, calls // rounds))
    warm = time.thread_time() + 0.2  # until clocks have risen
    while time.thread_time() < warm:
        for _ in range(batch):
            call()
        wait()
    results = []
    for _ in range(rounds):
        spent = 0.0
        for _ in range(max(1, calls // rounds // batch)):
            begin = time.thread_time()
            for _ in range(batch):
                call()
            spent += time.thread_time() - begin
            wait()
        results.append(spent / (max(1, calls // rounds // batch) * batch) * 1e6)
    return statistics.median(results), min(results)


def problems(make, rows, heads, slots, topk):
    """Name -> call."""
    q, kv = make((rows, heads, 576), "bf16"), make((slots, 576), "bf16")
    indices = make((rows, topk), "i32")
    out, lse = make((rows, heads, 512), "bf16"), make((rows, heads), "f32")
    logits, row_len, chosen = make((rows, 64), "f32"), make((rows,), "i32"), make((rows, 4), "i32")
    pool, codes = make((4, 4 * 656), "u8"), make((rows, 576), "bf16")
    return {
        "sparse_mla, out=": lambda: fovea.sparse_mla(q, kv, indices, 0.1, out=(out, lse)),
        "sparse_mla": lambda: fovea.sparse_mla(q, kv, indices, 0.1),
        "topk_select, out=": lambda: fovea.topk_select(logits, row_len, 4, out=chosen),
        "pack_rows": lambda: fovea.pack_rows(codes, row_len, pool, "v32", page_size=4),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--numpy", action="store_true", help="arrays of numpy, on the CPU")
    options = parser.parse_args()
    kinds = {"bf16": "bfloat16", "f32": "float32", "i32": "int32", "u8": "uint8"}

    def make(shape, kind):
        if options.numpy:
            import ml_dtypes

            types = {"bf16": ml_dtypes.bfloat16, "f32": np.float32, "i32": np.int32, "u8": np.uint8}
            return np.zeros(shape, types[kind])
        return torch.zeros(shape, dtype=getattr(torch, kinds[kind]), device=options.device)

    on_gpu = options.device.startswith("cuda")
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    if not on_gpu:
        fovea.set_num_threads(1)
    shape = (128, 16, 65536, 2048) if on_gpu else (1, 1, 16, 1)
    calls = problems(make, *shape)
    if torch is not None and not options.numpy:
        a, b, c = (make((8,), "f32") for _ in range(3))
        calls["torch.add, out="] = lambda: torch.add(a, b, out=c)
        calls["torch.empty"] = lambda: torch.empty(8, device=options.device)
        importlib.import_module("fovea.torch_ops")

        q, kv, indices = make((shape[0], shape[1], 576), "bf16"), make((shape[2], 576), "bf16"), make((shape[0], shape[3]), "i32")
        calls["torch.ops sparse_mla"] = lambda: torch.ops.fovea.sparse_mla(q, kv, indices, 0.1)
    print(f"{'call':24} {'median us':>10} {'least us':>10}")
    for name, call in calls.items():
        median, least = time_of(call, options.calls, wait)
        print(f"{name:24} {median:10.2f} {least:10.2f}")


if __name__ == "__main__":
    main()
