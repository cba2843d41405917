"""What a call from Python costs the CPU: microseconds of a call in a loop.

    PYTHONPATH=build/release/python python bench/python_call.py [--device cuda:0] [--calls 20000] [--rows 0,1,8,128]

On a GPU the loop submits and does not wait; the time is that of the submitting thread. Queues of a device are finite, so
the loop pauses for it after --batch calls, outside the time. With no rows nothing is launched: what such a call costs is
the part of Python, of the tensors and of the plan that is repeated; the rest of another call is that of its launches.
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


def time_of(call, calls, batch, wait, rounds=9):
    """Median and least of rounds, in microseconds a call."""
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


class Tensors:
    """Zeros of numpy or of torch."""

    KINDS = {"bf16": "bfloat16", "f32": "float32", "i32": "int32", "u8": "uint8"}

    def __init__(self, device):
        self.device = device

    def __call__(self, kind, *shape):
        if self.device is not None:
            return torch.zeros(shape, dtype=getattr(torch, self.KINDS[kind]), device=self.device)
        ml_dtypes = importlib.import_module("ml_dtypes")
        return np.zeros(shape, ml_dtypes.bfloat16 if kind == "bf16" else self.KINDS[kind])


def sparse_mla(make, rows, heads, slots, topk):
    """Name -> call, for a sparse decode of so many rows."""
    q, kv, indices = make("bf16", rows, heads, 576), make("bf16", slots, 576), make("i32", rows, topk)
    out, lse = make("bf16", rows, heads, 512), make("f32", rows, heads)
    calls = {
        f"sparse_mla, {rows} rows, out=": lambda: fovea.sparse_mla(q, kv, indices, 0.1, out=(out, lse)),
        f"sparse_mla, {rows} rows": lambda: fovea.sparse_mla(q, kv, indices, 0.1),
    }
    if make.device is not None:
        importlib.import_module("fovea.torch_ops")
        calls[f"torch.ops sparse_mla, {rows} rows"] = lambda: torch.ops.fovea.sparse_mla(q, kv, indices, 0.1)
    return calls


def decode_step(make, requests, topk):
    """Name -> call, for the parts of a decode step of a backend."""
    page, pages, heads = 64, 65, 16
    device = make.device or "cpu"
    pools = [make("u8", pages, page * width) for width in (656, 132)]
    backend = fovea.DsaBackend(num_heads=heads, max_requests=requests, max_rows=requests, topk=topk, page_size=page,
                               table_width=page * (pages - 1), device=device)  # fmt: skip
    lengths, rows = make("i32", requests), make("i32", requests)
    step = {
        "seq_len": lengths + 1, "pool_row": rows, "req_to_token": make("i32", requests, page * (pages - 1)),
        "positions": rows, "out_cache_loc": rows + page,
    }  # fmt: skip
    given = {
        "q": make("bf16", requests, heads, 576), "k": make("bf16", requests, 576), "topk_indices": make("i32", requests, topk) + page,
        "out": (make("bf16", requests, heads, 512), make("f32", requests, heads)),
    }  # fmt: skip
    begin = lambda: backend.begin_step("decode", **step)
    begin()
    return {
        f"DsaBackend begin_step, {requests} requests": begin,
        f"DsaBackend forward, {requests} requests": lambda: backend.forward(*pools, 0.1, **given),
    }


def others(make):
    """Name -> call, for calls that launch little."""
    logits, row_len, chosen = make("f32", 128, 64), make("i32", 128), make("i32", 128, 4)
    pool, rows = make("u8", 32, 4 * 656), make("bf16", 128, 576)
    calls = {
        "topk_select, out=": lambda: fovea.topk_select(logits, row_len, 4, out=chosen),
        "pack_rows": lambda: fovea.pack_rows(rows, row_len, pool, "v32", page_size=4),
    }
    if make.device is not None:
        a, b, c = (make("f32", 8) for _ in range(3))
        calls["torch.add, out="] = lambda: torch.add(a, b, out=c)
        calls["torch.empty"] = lambda: torch.empty(8, device=make.device)
    return calls


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--batch", type=int, default=50, help="calls between two pauses")
    parser.add_argument("--rows", help="0,1,8,128 on a GPU, 0,1 else")
    parser.add_argument("--numpy", action="store_true", help="arrays of numpy, on the CPU")
    options = parser.parse_args()
    make = Tensors(None if options.numpy or torch is None else options.device)
    on_gpu = options.device.startswith("cuda")
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    heads, slots, topk = (16, 65536, 2048) if on_gpu else (1, 16, 1)
    if not on_gpu:
        fovea.set_num_threads(1)
    calls = {}
    for rows in (options.rows or ("0,1,8,128" if on_gpu else "0,1")).split(","):
        calls.update(sparse_mla(make, int(rows), heads, slots, topk))
    calls.update(decode_step(make, 8, topk if on_gpu else 4))
    calls.update(others(make))
    print(f"{'call':34} {'median us':>10} {'least us':>10}")
    for name, call in calls.items():
        median, least = time_of(call, options.calls, options.batch, wait)
        print(f"{name:34} {median:10.2f} {least:10.2f}", flush=True)


if __name__ == "__main__":
    main()
