"""The engine's side of a DSA backend: what a model runner holds, the batches that it makes, the calls of its attention
backend under their own names, and what must come back, by formulas in fp64.
"""

import dataclasses
from typing import Optional

import numpy as np

import fovea
from calls import cos_sin, i32
from support import attend, bf16, e4m3_values, f64

DEVICE = "cpu"  # where the backend is
WIDTHS = {"bf16": 1152, "v32": 656, "f576": 576}
LATENT, DIM, INDEX_DIM = 512, 576, 128

# Section of docs/compat/sglang-dsa.md -> row -> tests that see it.
SEEN = {}


def rows(section, *names):
    """Says which rows of the page a test sees, by their first cell without the backticks."""

    def note(test):
        for name in names:
            SEEN.setdefault((section, name), []).append(test.__name__)
        return test

    return note


@dataclasses.dataclass
class ForwardBatch:
    """One batch in the engine's terms: seq_lens are without the new tokens in target_verify alone."""

    forward_mode: str
    req_pool_indices: np.ndarray
    seq_lens: np.ndarray
    extend_seq_lens: Optional[np.ndarray]
    positions: np.ndarray
    out_cache_loc: np.ndarray
    kv_len: list  # L of each request
    counts: list  # rows of each request
    owner: np.ndarray  # request of each row, in the numbers of the batch
    row_len: np.ndarray  # keys that each row may see


class Engine:
    """Requests whose tokens are known for every position, so that a token is the same row in whatever mode it comes."""

    def __init__(self, requests=3, pages=5, page_size=4, topk=6, drafts=3, heads=2, row_format="v32", seed=1, **options):
        rng = np.random.default_rng(seed)
        self.page_size, self.topk, self.drafts, self.heads, self.row_format = page_size, topk, drafts, heads, row_format
        width = pages * page_size
        order = 1 + rng.permutation(requests * pages)  # page 0 is the dummy
        slots = (order[:, None] * page_size + np.arange(page_size)).reshape(requests, width)
        self.req_to_token = np.concatenate([np.zeros((1, width)), slots]).astype(np.int32)
        self.num_slots = (1 + requests * pages) * page_size
        self.tokens = {
            "q": bf16(rng, requests, width, heads, DIM),
            "k": bf16(rng, requests, width, DIM),
            "index_q": bf16(rng, requests, width, 2, INDEX_DIM),
            "index_k": bf16(rng, requests, width, INDEX_DIM),
            "head_gate": rng.standard_normal((requests, width, 2)).astype(np.float32),
        }
        self.weights = {
            "norm_weight": rng.standard_normal(INDEX_DIM).astype(np.float32),
            "norm_bias": rng.standard_normal(INDEX_DIM).astype(np.float32),
            "cos_sin": cos_sin(64, width),
        }
        self.config = {
            "num_heads": heads, "index_heads": 2, "topk": topk, "page_size": page_size, "row_format": row_format,
            "max_requests": requests, "max_rows": 64, "table_width": width, "rows_per_request": drafts,
        } | options  # fmt: skip
        self.backend = fovea.DsaBackend(**self.config)
        self.plans, self.parts = {}, options.get("split_parts", 0) if DEVICE == "cpu" else 0  # no GPU reads such a plan
        self.clear()

    def clear(self):
        pages = self.num_slots // self.page_size
        self.kv_pool = np.zeros((pages, self.page_size * WIDTHS[self.row_format]), np.uint8)
        self.index_pool = np.zeros((pages, self.page_size * (INDEX_DIM + 4)), np.uint8)

    # The engine's batches.

    def batch(self, mode, kv_len, counts=None, requests=None):
        """kv_len: L of each request, its new tokens included; counts: how many of them are rows of this batch."""
        fixed = {"decode": 1, "idle": 1, "target_verify": self.drafts, "draft_extend_v2": self.drafts}
        counts = [fixed[mode]] * len(kv_len) if counts is None else list(counts)
        numbers = np.arange(len(kv_len)) if requests is None else np.array(requests)
        pool_row = (1 + numbers).astype(np.int32)
        owner = np.repeat(np.arange(len(counts)), counts)
        row_len = i32([length - n + 1 + i for length, n in zip(kv_len, counts) for i in range(n)])
        return ForwardBatch(
            mode, pool_row, i32(np.array(kv_len) - (self.drafts if mode == "target_verify" else 0)),
            i32(counts) if mode in ("extend", "mixed", "draft_extend") else None, row_len - 1,
            self.req_to_token[pool_row[owner], row_len - 1], list(kv_len), counts, owner, row_len,
        )  # fmt: skip

    def arguments(self, batch, host=True, padded=0, bound=False):
        """begin_step's arguments of a batch; with rows of padding its row tensors are longer. bound: how many rows are
        live is in device memory alone.
        """
        tail = np.full(padded, -1, np.int32)
        named = {
            "mode": batch.forward_mode, "seq_len": batch.seq_lens, "pool_row": batch.req_pool_indices,
            "req_to_token": self.req_to_token, "positions": np.concatenate([batch.positions, tail]),
            "out_cache_loc": np.concatenate([batch.out_cache_loc, tail]),
        }  # fmt: skip
        if padded and not bound:
            named.update(num_rows=len(batch.row_len), padded_rows=len(batch.row_len) + padded)
        if batch.extend_seq_lens is not None:
            named["ext_len"] = batch.extend_seq_lens
        if host:
            named["host_seq_len"] = batch.seq_lens.tolist()
            named["host_ext_len"] = batch.extend_seq_lens if batch.extend_seq_lens is not None else None
        return named

    # The calls of the engine's attention backend.

    def init_forward_metadata(self, batch, host=True, padded=0, **options):
        self.backend.begin_step(**{**self.arguments(batch, host, padded), **options})

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        """One set of buffers there, one plan for each bucket here: bounds are those of the configuration."""
        assert max_bs <= self.config["max_requests"] and max_num_tokens <= self.config["max_rows"]
        self.plans.clear()

    def init_forward_metadata_capture_cuda_graph(self, bs, forward_mode):
        rows_per_request = 1 if forward_mode in ("decode", "idle") else self.drafts
        plan = self.plans[forward_mode, bs] = self.backend.make_step_plan(forward_mode, bs, rows_per_request)
        return plan

    def init_forward_metadata_replay_cuda_graph(self, batch, **options):
        """From device lengths alone; accepted lengths of a draft extend leave rows of the bucket over."""
        plan = self.plans[batch.forward_mode, len(batch.kv_len)]
        arguments = self.arguments(batch, host=False, padded=self.unused_rows(batch), bound=True)
        self.backend.begin_step(**{**arguments, **options}, plan=plan)
        return plan

    def unused_rows(self, batch):
        return self.drafts * len(batch.kv_len) - len(batch.row_len) if batch.forward_mode == "draft_extend" else 0

    def inputs(self, batch, padded=0):
        """The row tensors of a batch; rows of padding are NaN."""
        request = batch.req_pool_indices[batch.owner] - 1
        chosen = {name: values[request, batch.positions] for name, values in self.tokens.items()}
        tails = {name: np.full((padded, *values.shape[1:]), np.nan, values.dtype) for name, values in chosen.items()}
        return {name: np.concatenate([values, tails[name]]) for name, values in chosen.items()}

    def forward(self, batch, plan=None, padded=0, scale=0.1, without=(), **changes):
        named = {**self.inputs(batch, padded), **self.weights, **changes}
        named = {name: value for name, value in named.items() if name not in without}
        return self.backend.forward(self.kv_pool, self.index_pool, scale, **named, plan=plan)

    def step(self, batch, plan=None, **options):
        """Begins the step of a batch and runs one layer: out, lse, indices."""
        self.init_forward_metadata(batch, plan=plan)
        return self.forward(batch, plan, return_indices=True, **options)

    def fill(self, kv_len=None):
        """The first tokens of every request, 13 by default, in the pools."""
        kv_len = [13] * self.config["max_requests"] if kv_len is None else kv_len
        self.step(self.batch("extend", kv_len, kv_len))

    def spoil(self, slots):
        """Writes NaN codes into the rows of a v32 pool and the index keys of these slots."""
        self.kv_pool.reshape(-1, WIDTHS["v32"])[slots] = 0x7F
        for page, offset in zip(*np.divmod(slots, self.page_size)):
            self.index_pool[page, offset * INDEX_DIM : (offset + 1) * INDEX_DIM] = 0x7F

    # What must come back.

    def cache(self):
        """Rows [slots, 576] of the latent pool."""
        if self.row_format == "bf16":
            return f64(self.kv_pool.view(self.tokens["k"].dtype)).reshape(-1, DIM)
        if self.row_format == "f576":
            return e4m3_values(self.kv_pool).reshape(-1, DIM)
        records = self.kv_pool.reshape(-1, 656)
        scales = records[:, LATENT : LATENT + 16].copy().view(np.float32).astype(np.float64)
        rope = f64(records[:, LATENT + 16 :].copy().view(self.tokens["k"].dtype))
        return np.concatenate([e4m3_values(records[:, :LATENT].copy()) * scales.repeat(128, -1), rope], 1)

    def attention(self, q, lists, scale=0.1, cap=0.0):
        """out [T, H, 512] and lse [T, H] of queries over the slots of each list that are in the pool."""
        q, cache = f64(q), self.cache()
        out, lse = np.zeros((*q.shape[:2], LATENT)), np.full(q.shape[:2], -np.inf)
        for t, slots in enumerate(lists):
            keys = cache[[slot for slot in slots if 0 <= slot < len(cache)]]
            for head in range(q.shape[1]):
                scores = keys @ q[t, head] * scale
                out[t, head], lse[t, head] = attend(cap * np.tanh(scores / cap) if cap else scores, keys[:, :LATENT])
        return out, lse

    def slots(self, batch, positions):
        """Positions [T, n] of each row's request as slots; -1 stays."""
        table = self.req_to_token[batch.req_pool_indices[batch.owner]]
        return np.where(positions < 0, -1, np.take_along_axis(table, np.maximum(positions, 0), 1)).astype(np.int32)

    def selection(self, batch, seed=0):
        """A selection made elsewhere, positions i32 [T, topk]: distinct, ascending, then -1."""
        rng, result = np.random.default_rng(seed), np.full((len(batch.row_len), self.topk), -1, np.int32)
        for row, length in zip(result, batch.row_len):
            count = min(length, self.topk)
            row[:count] = np.sort(rng.permutation(length)[:count])
        return result

    def index_scores(self, batch, row):
        """Indexer scores of the keys that a row may see."""
        request, length = batch.req_pool_indices[batch.owner[row]] - 1, batch.row_len[row]
        keys = f64(self.tokens["index_k"][request, :length])
        keys = (keys - keys.mean(-1, keepdims=True)) / np.sqrt(keys.var(-1, keepdims=True) + 1e-6)
        keys = keys * f64(self.weights["norm_weight"]) + f64(self.weights["norm_bias"])
        query = self.rotated(f64(self.tokens["index_q"][request, length - 1]), np.full(2, length - 1))
        keys = self.rotated(keys, np.arange(length))
        gate = f64(self.tokens["head_gate"][request, length - 1]) * 2**-0.5 * INDEX_DIM**-0.5
        return np.maximum(keys @ query.T, 0) @ gate

    def rotated(self, values, positions):
        """Half-split rope on the first 64 channels. The Hadamard rotation of both sides changes no product."""
        table = f64(self.weights["cos_sin"])[positions]
        a, b, cos, sin = values[:, :32], values[:, 32:64], table[:, :32], table[:, 32:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, values[:, 64:]], 1)

    def metadata(self, batch, padded=0, bound=False, transform="paged", workers=64, parts=0):
        """The arrays of docs/metadata.md of a batch; of the page table the columns that a request has."""
        row_len = batch.row_len.tolist() + [0] * (padded if bound else 0)
        rows_of = np.array(batch.counts, np.int64)
        ends = np.concatenate([[0], np.cumsum(batch.kv_len)])
        topk_length = np.minimum(batch.row_len, self.topk).tolist() + [0] * padded
        fields = {
            "kv_len": batch.kv_len,
            "kv_indptr": ends,
            "max_kv_len": [max(batch.kv_len, default=0)],
            "q_indptr": np.concatenate([[0], np.cumsum(rows_of)]),
            "max_q_len": [max(batch.counts, default=0)],
            "row_to_request": batch.owner.tolist() + [-1] * padded,
            "row_len": row_len,
            "topk_length": topk_length,
            "topk_indptr": np.concatenate([[0], np.cumsum(topk_length)]),
            "ext_len": batch.counts,
        }
        if batch.forward_mode in ("extend", "mixed"):
            fields["k_start"] = ends[batch.owner]
            fields["k_end"] = ends[batch.owner] + batch.row_len
            if transform == "ragged":
                fields["row_offset"] = ends[batch.owner]
        else:
            fields["schedule"] = paged_schedule(batch.row_len, workers)
        if parts:
            fields["split_schedule"], fields["split_indptr"] = split_schedule(topk_length, parts)
        return {name: np.array(values, np.int32).reshape(np.shape(values)) for name, values in fields.items()} | {
            "page_table": [self.req_to_token[row, : length : self.page_size] // self.page_size
                           for row, length in zip(batch.req_pool_indices, batch.kv_len)]}  # fmt: skip


def paged_schedule(row_len, workers):
    """docs/paged_schedule.md: (row, segment of 256 tokens) where each worker starts."""
    segments = [(row, part) for row, length in enumerate(row_len) for part in range(-(-length // 256))]
    share, more = divmod(len(segments), workers)
    starts = [i * share + max(0, i - (workers - more)) for i in range(workers)]
    return [segments[start] if segments else (0, 0) for start in starts] + [(len(row_len), 0)]


def split_schedule(topk_length, parts, fixed=5):
    """docs/split_schedule.md: what each part walks, and the pieces of each row."""
    blocks = [max(1, -(-length // 64)) for length in topk_length]
    cap = -(-sum(n + fixed for n in blocks) // parts) + fixed
    pieces, row, done = [[] for _ in blocks], 0, 0
    walks = []
    for part in range(parts):
        budget, walk = cap, []
        while row < len(blocks) and budget > fixed:
            taken = min(blocks[row] - done, budget - fixed)
            walk.append((row, done, done + taken, len(pieces[row])))
            pieces[row].append(part)
            budget -= taken + fixed
            done += taken
            if done == blocks[row]:
                row, done = row + 1, 0
            else:
                break
        walks.append(walk)
    lines = []
    for walk in walks:
        if not walk:
            lines.append([len(blocks), len(blocks) - 1, 0, 0, 0, 0, 0, 0])
            continue
        first, last = walk[0], walk[-1]
        split = [int(len(pieces[end[0]]) > 1) for end in (first, last)]
        lines.append([first[0], last[0], first[1], last[2], first[3], *split, 0])
    return np.array(lines), np.concatenate([[0], np.cumsum([len(entry) for entry in pieces])])
