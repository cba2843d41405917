#!/usr/bin/env python3
"""Writes tests/golden/*.safetensors: inputs, parameters and expected outputs of every operator.

Independent of the library: numpy and the formulas of the operator pages in docs/, in float64. Needs numpy; the files are
committed, so that nobody else does. `fovea verify` compares every implementation with them.

tools/make_golden.py [folder]
"""

import json
import pathlib
import struct
import sys

import numpy as np

INF = np.inf


# ---- number formats -------------------------------------------------------------------------------------------------
def bf16_bits(values):
    """Nearest bf16, ties to even; NaN becomes 0x7FC0."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def bf16_values(bits):
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def round_bf16(values):
    return bf16_values(bf16_bits(np.asarray(values, np.float32))).astype(np.float64)


def e4m3_table():
    """Values of the codes 0..126: bias 7, 3 mantissa bits, subnormals in units of 2^-9."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = e4m3_table()


def e4m3_codes(values):
    """Nearest code, ties to the even one, saturating; NaN becomes 0x7F."""
    values = np.asarray(values, np.float64)
    size = np.minimum(np.abs(np.nan_to_num(values, posinf=448, neginf=448)), 448)
    upper = np.clip(np.searchsorted(E4M3, size), 1, 126)
    below, above = size - E4M3[upper - 1], E4M3[upper] - size
    code = np.where((above < below) | ((above == below) & (upper % 2 == 0)), upper, upper - 1)
    code = np.where(np.signbit(values), code | 0x80, code)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def e4m3_values(codes):
    codes = np.asarray(codes, np.uint8)
    size = np.append(E4M3, np.nan)[codes & 0x7F]
    return np.where(codes & 0x80, -size, size)


def tile_scale(tile, mode, floor, zero):
    """fp32 scale of a tile of bf16 values; `floor` bounds amax / 448 (None: unbounded), `zero` is the scale of amax 0."""
    finite = np.abs(tile[np.isfinite(tile)])
    amax = np.float32(finite.max() if finite.size else 0)
    if amax == 0 and zero is not None:
        return np.float32(zero)
    ratio = np.float32(amax / np.float32(448))
    if floor is not None:
        ratio = max(ratio, np.float32(floor))
    if mode == "fp32":
        return ratio
    mantissa, exponent = np.frexp(ratio)  # ratio = mantissa * 2^exponent, mantissa in [0.5, 1)
    return np.float32(2.0 ** (exponent - 1 if mantissa == 0.5 else exponent))


def quantise(tile, scale):
    with np.errstate(invalid="ignore"):
        return e4m3_codes(tile.astype(np.float32) / scale)


# ---- files ----------------------------------------------------------------------------------------------------------
class Bf16:
    """Values to be stored as bf16; they are rounded once, here."""

    def __init__(self, values):
        self.bits = bf16_bits(values)
        self.values = bf16_values(self.bits).astype(np.float64)

    @staticmethod
    def of_bits(bits):
        tensor = Bf16.__new__(Bf16)
        tensor.bits, tensor.values = bits, bf16_values(bits).astype(np.float64)
        return tensor


NAMES = {np.dtype(np.uint8): "U8", np.dtype(np.int32): "I32", np.dtype(np.float32): "F32", np.dtype(np.int64): "I64"}


def write(folder, op, case, params, inputs, expected):
    header = {"__metadata__": {"operator": op, "params": json.dumps(params)}}
    data = b""
    for name, tensor in list(inputs.items()) + [("expected." + name, tensor) for name, tensor in expected.items()]:
        dtype, array = ("BF16", tensor.bits) if isinstance(tensor, Bf16) else (NAMES[tensor.dtype], tensor)
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(blob)]}
        data += blob
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / f"{op}-{case}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def i32(values):
    return np.asarray(values, np.int32)


# ---- cache ----------------------------------------------------------------------------------------------------------
def pack_row(fmt, row, mode, k_scale):
    """Bytes of one row: (bytes at the row's place, bytes of its scale at the end of the page)."""
    if fmt == "bf16":
        return bf16_bits(row).tobytes(), b""
    if fmt == "f576":
        return quantise(row, np.float32(k_scale)).tobytes(), b""
    if fmt == "i132":
        scale = tile_scale(row, mode, 1e-4 / 448, None)
        return quantise(row, scale).tobytes(), np.float32(scale).tobytes()
    codes, scales = b"", b""
    for tile in row[:512].reshape(4, 128):
        scale = tile_scale(tile, mode, None if mode == "fp32" else 1e-4, 1.0 if mode == "fp32" else 2.0**-13)
        codes += quantise(tile, scale).tobytes()
        scales += np.float32(scale).tobytes()
    return codes + scales + bf16_bits(row[512:]).tobytes(), b""


def place(fmt, width, page_size, offset):
    """Byte positions in a page of a row's main part and of its scale."""
    if fmt == "i132":
        return offset * width, page_size * width + 4 * offset
    return offset * {"bf16": 2 * width, "v32": 656, "f576": 576}[fmt], None


def pack_rows(fmt, src, slots, pool, page_size, mode, k_scale=None):
    out = pool.copy()
    for row, slot in zip(src, slots):
        if not 0 <= slot < len(pool) * page_size:
            continue
        page = out[slot // page_size]
        main, scale = pack_row(fmt, row, mode, k_scale)
        begin, scale_begin = place(fmt, len(row), page_size, slot % page_size)
        page[begin : begin + len(main)] = np.frombuffer(main, np.uint8)
        if scale:
            page[scale_begin : scale_begin + 4] = np.frombuffer(scale, np.uint8)
    return out


def move_rows(fmt, width, src_slots, dst_slots, pool, page_size):
    """Tokens byte for byte, all of them read from the pool as it was."""
    out = pool.copy()
    sizes = {"bf16": (2 * width, 0), "v32": (656, 0), "f576": (576, 0), "i132": (width, 4)}[fmt]
    for src, dst in zip(src_slots, dst_slots):
        if not all(0 <= slot < len(pool) * page_size for slot in (src, dst)):
            continue
        places = zip(sizes, place(fmt, width, page_size, src % page_size), place(fmt, width, page_size, dst % page_size))
        for size, begin, to in places:
            if size:
                out[dst // page_size, to : to + size] = pool[src // page_size, begin : begin + size]
    return out


def unpack_row(fmt, width, pool, page_size, slot, k_scale=None):
    """Values of a stored row as bf16, float64; the product code * scale in fp32, rounded once."""
    page = pool[slot // page_size]
    begin, scale_begin = place(fmt, width, page_size, slot % page_size)
    if fmt == "bf16":
        return bf16_values(page[begin : begin + 2 * width].copy().view(np.uint16)).astype(np.float64)
    if fmt == "i132":
        scale = page[scale_begin : scale_begin + 4].copy().view(np.float32)[0]
        return round_bf16(e4m3_values(page[begin : begin + width]).astype(np.float32) * scale)
    if fmt == "f576":
        return round_bf16(e4m3_values(page[begin : begin + 576]).astype(np.float32) * np.float32(k_scale))
    row = page[begin : begin + 656].copy()
    scales = np.repeat(row[512:528].view(np.float32), 128)
    latent = round_bf16(e4m3_values(row[:512]).astype(np.float32) * scales)
    return np.concatenate([latent, bf16_values(row[528:].view(np.uint16)).astype(np.float64)])


def cache_cases(folder, rng):
    kinds = [("bf16", 40, 80, ("fp32",)), ("v32", 576, 656, ("fp32", "pow2")), ("i132", 128, 132, ("fp32", "pow2"))]
    for fmt, width, row_bytes, modes in kinds:
        for mode in modes:
            cache_case(folder, rng, f"{fmt}-{mode}", fmt, width, row_bytes, {"scale_mode": mode})

    for k_scale in (0.5, 0.37):
        cache_case(folder, rng, f"f576-{k_scale}", "f576", 576, 576, {"k_scale": k_scale})
    for fmt, width, row_bytes in (("bf16", 40, 80), ("v32", 576, 656), ("i132", 128, 132), ("f576", 576, 576)):
        # A swap over a page boundary, a chain, one source twice, pairs outside the pool.
        src_slots, dst_slots = i32([2, 3, 5, 6, 7, 7, -1, 0, 9]), i32([3, 2, 4, 5, 6, 8, 1, 9, 0])
        pool = rng.integers(0, 256, size=(3, 3 * row_bytes + 5)).astype(np.uint8)
        inputs = {"pool": pool, "src_slots": src_slots, "dst_slots": dst_slots}
        moved = move_rows(fmt, width, src_slots, dst_slots, pool, 3)
        write(folder, "move_rows", fmt, {"row_format": fmt, "page_size": 3, "width": width}, inputs, {"pool": moved})
    for fmt, row_bytes, params in (("bf16", 1152, {}), ("v32", 656, {}), ("f576", 576, {"k_scale": 0.37})):
        src = Bf16(rng.normal(size=(2, 576)))
        slots, pool = i32([3, 0]), rng.integers(0, 256, size=(2, 2 * row_bytes)).astype(np.uint8)
        parts = {"src": Bf16.of_bits(src.bits[:, :512]), "rope": Bf16.of_bits(src.bits[:, 512:]), "slots": slots, "pool": pool}
        packed = pack_rows(fmt, src.values, slots, pool, 2, "fp32", params.get("k_scale"))
        write(folder, "pack_rows", f"{fmt}-rope", {"row_format": fmt, "page_size": 2} | params, parts, {"pool": packed})


def cache_case(folder, rng, name, fmt, width, row_bytes, fmt_params):
    mode, k_scale = fmt_params.get("scale_mode"), fmt_params.get("k_scale")
    values = rng.normal(size=(6, width)) * np.exp2(rng.integers(-12, 12, size=(6, 1)))
    values[1] = 0
    values[2, 0] = 900
    values[3, :3] = [np.nan, INF, -INF]
    values[4] *= 1e-30
    src = Bf16(values)
    slots = i32([7, 0, 5, 3, 2, 100])
    pool = rng.integers(0, 256, size=(3, 3 * row_bytes + 5)).astype(np.uint8)
    params = {"row_format": fmt, "page_size": 3} | fmt_params
    packed = pack_rows(fmt, src.values, slots, pool, 3, mode, k_scale)
    write(folder, "pack_rows", name, params, {"src": src, "slots": slots, "pool": pool}, {"pool": packed})
    slots = i32([5, -1, 7, 5, 9, 0, 2])
    rows = [unpack_row(fmt, width, packed, 3, s, k_scale) if 0 <= s < 9 else np.zeros(width) for s in slots]
    params = {"row_format": fmt, "page_size": 3, "width": width}
    if k_scale is not None:
        params["k_scale"] = k_scale
    write(folder, "unpack_rows", name, params, {"pool": packed, "slots": slots}, {"out": Bf16(np.array(rows))})


# ---- batch ----------------------------------------------------------------------------------------------------------
def schedule_of(lengths, workers):
    segments = [(row, s) for row, length in enumerate(lengths) for s in range((max(length, 0) + 255) // 256)]
    quotient, rest = divmod(len(segments), workers)
    starts = [i * quotient + max(0, i - (workers - rest)) for i in range(workers)]
    return i32([segments[s] if segments else (0, 0) for s in starts] + [(len(lengths), 0)])


def split_of(lengths, parts):
    """A list of (part, row, begin, end) pieces, and what a part and a row have of it."""
    blocks = [max(1, -(-max(length, 0) // 64)) for length in lengths]
    cap = -(-(sum(blocks) + 5 * len(blocks)) // parts) + 5
    pieces, part, budget = [], 0, cap
    for row, count in enumerate(blocks):
        begin = 0
        while begin < count:
            rest = count - begin
            taken = rest if budget >= rest + 5 else max(budget - 5, 0)
            budget = budget - rest - 5 if taken == rest else 0
            pieces += [(part, row, begin, begin + taken)] if taken else []
            begin += taken
            if begin < count:
                part, budget = part + 1, cap
    of_row = [[p for p in pieces if p[1] == row] for row in range(len(blocks))]
    table = np.tile(i32([len(blocks), len(blocks) - 1, 0, 0, 0, 0, 0, 0]), (parts, 1))
    for part in range(parts):
        own = [p for p in pieces if p[0] == part]
        if own:
            first, last = own[0], own[-1]
            split = of_row[first[1]].index(first)
            table[part] = [first[1], last[1], first[2], last[3], split, len(of_row[first[1]]) > 1, len(of_row[last[1]]) > 1, 0]
    return {"split_schedule": table, "split_indptr": cumulative([len(p) for p in of_row])}


def cumulative(values):
    return i32(np.concatenate([[0], np.cumsum(values)]))


def metadata(mode, seq_len, ext, pool_row, table, page_size, topk, rows_per_request, padded, transform, workers):
    """Section by section as the definitions read; ext: rows of each request."""
    lengths = [length + (rows_per_request if mode == "target_verify" else 0) for length in seq_len]
    rows = [(r, lengths[r] - ext[r] + 1 + i) for r in range(len(ext)) for i in range(ext[r])]
    width = max([0] + [-(-length // page_size) for length in lengths])
    page_table = np.zeros((len(ext), width), np.int32)
    for r, length in enumerate(lengths):
        for j in range(-(-length // page_size)):
            page_table[r, j] = table[pool_row[r], j * page_size] // page_size
    total = max(padded, len(rows))
    topk_length = [min(max(length, 0), topk) for _, length in rows] + [0] * (total - len(rows))
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
    extend = mode in ("extend", "mixed")
    fields = {
        "kv_len": i32(lengths), "kv_indptr": cumulative(lengths), "max_kv_len": i32([max(lengths, default=0)]),
        "q_indptr": cumulative(ext), "max_q_len": i32([max(ext, default=1 if extend else 0)]), "page_table": page_table,
        "row_to_request": i32([r for r, _ in rows] + [-1] * (total - len(rows))), "row_len": i32([n for _, n in rows]),
        "topk_length": i32(topk_length), "topk_indptr": cumulative(topk_length), "ext_len": i32(ext),
    }  # fmt: skip
    if extend:
        fields["k_start"] = i32([starts[r] for r, _ in rows])
        fields["k_end"] = i32([starts[r] + n for r, n in rows])
        if transform == "ragged":
            fields["row_offset"] = fields["k_start"]
    else:
        fields["schedule"] = schedule_of([n for _, n in rows], workers)
    return fields


def batch_cases(folder, rng):
    page_size, width, requests = 4, 48, 5
    pages = rng.permutation(200)[: 7 * width // page_size].reshape(7, -1)
    table = i32((pages[:, :, None] * page_size + np.arange(page_size)).reshape(7, width))
    for mode in ("extend", "mixed", "decode", "idle", "target_verify", "draft_extend", "draft_extend_v2"):
        seq_len = rng.integers(5, width - 4, size=requests)
        pool_row = rng.permutation(7)[:requests]
        fixed = {"decode": 1, "idle": 1, "target_verify": 3, "draft_extend_v2": 3}.get(mode)
        ext = [fixed] * requests if fixed else [int(n) for n in rng.integers(0, 5, size=requests)]
        transform = "ragged" if mode == "extend" else "paged"
        padded = sum(ext) + 3
        params = {"mode": mode, "topk": 12, "page_size": page_size, "padded_rows": padded, "transform": transform, "workers": 6, "split_parts": 3}
        inputs = {"seq_len": i32(seq_len), "pool_row": i32(pool_row), "req_to_token": table}
        if mode in ("target_verify", "draft_extend_v2"):
            params["rows_per_request"] = 3
        if fixed is None:
            inputs["ext_len"] = i32(ext)
        expected = metadata(mode, [int(n) for n in seq_len], ext, pool_row, table, page_size, 12, 3, padded, transform, 6)
        expected |= split_of(expected["topk_length"].tolist(), 3)
        write(folder, "metadata_refresh", mode, params, inputs, expected)
    for case, lengths, workers in (("example", [1000, 300, 700], 4), ("mixed", [0, 5000, -3, 1, 256, 257, 0], 5), ("empty", [0, 0], 3)):
        expected = {"schedule": schedule_of(lengths, workers)}
        write(folder, "paged_schedule", case, {"workers": workers}, {"row_len": i32(lengths)}, expected)
    check_cases(folder, table, page_size)
    split_cases(folder)


def check_report(seq_len, ext, pool_row, table, page_size, stores, indices, capacity, max_rows):
    """Every fault of an extend batch as (fault, request, position, value, limit); the smallest wins."""
    faults, end, first_row = [], 0, 0
    for r, (length, rows) in enumerate(zip(seq_len, ext)):
        live, used = max(rows, 0), min(max(length, 0), table.shape[1])
        end += live
        faults += [(1, r, 0, length, 0)] * (length < 0) + [(2, r, 0, live, length)] * (live > length)
        faults += [(3, r, 0, length, table.shape[1])] * (length > table.shape[1]) + [(4, r, 0, rows, 0)] * (rows < 0)
        faults += [(5, r, 0, end, max_rows)] * (live > 0 and end > max_rows)
        if 0 <= pool_row[r] < len(table):
            for p in range(used):
                slot, start = int(table[pool_row[r], p]), int(table[pool_row[r], p - p % page_size])
                expected = start - start % page_size + p % page_size
                if not 0 <= slot < capacity:
                    faults.append((7, r, p, slot, capacity))
                elif slot != expected and not (pool_row[r] == 0 and start < page_size and slot < page_size):
                    faults.append((8, r, p, slot, expected))
        elif used > 0:
            faults.append((6, r, 0, pool_row[r], len(table)))
        for i in range(live):
            for c, index in enumerate(indices[first_row + i][: max(used - live + 1 + i, 0)]):
                faults += [(10, first_row + i, c, int(index), capacity)] * (not -1 <= index < capacity)
        first_row += live
    faults += [(9, t, 0, slot, capacity) for t, slot in enumerate(stores) if not -1 <= slot < capacity]
    if not faults:
        return i32([0] * 8)
    return i32([*min(faults), sum(fault[0] == min(faults)[0] for fault in faults), 0, 0])


def check_cases(folder, table, page_size):
    capacity, topk, rows = 200 * page_size, 6, 9
    for number, case in enumerate(("good", "length", "rows", "width", "negative", "count", "pool", "range", "layout", "store", "index", "padding")):
        seq_len, ext, pool_row, used = [20, 5, 33, 9], [2, 0, 4, 1], [3, 0, 6, 1], table.copy()
        stores, indices = list(range(8)) + [-1], np.full((rows, topk), -999)
        row = 0
        for length, count in zip(seq_len, ext):
            for i in range(count):
                indices[row, : length - count + 1 + i] = np.arange(topk)[: length - count + 1 + i] - 1
                row += 1
        max_rows = 6 if case == "count" else 9
        if case == "length":
            seq_len[1], seq_len[3] = -4, -5
        elif case == "rows":
            seq_len[2] = 3
        elif case == "width":
            seq_len[0] = 2147483647
        elif case == "negative":
            ext[1] = -2
        elif case == "pool":
            pool_row[3] = 7
        elif case == "range":
            used[6, 32], used[1, 4] = capacity, -1
        elif case == "layout":
            used[3, 5] += 1
        elif case == "store":
            stores[8] = -2
        elif case == "index":
            indices[6, 2:4] = capacity
        elif case == "padding":
            used[0] = 0
        inputs = {"seq_len": i32(seq_len), "ext_len": i32(ext), "pool_row": i32(pool_row), "req_to_token": used,
                  "out_cache_loc": i32(stores), "topk_indices": i32(indices)}  # fmt: skip
        params = {"mode": "extend", "page_size": page_size, "capacity": capacity, "max_rows": max_rows}
        word = check_report(seq_len, ext, pool_row, used, page_size, stores, indices, capacity, max_rows)
        assert word[0] == (0 if case == "padding" else number)
        write(folder, "metadata_check", case, params, inputs, {"error_word": word})


def split_round_robin(seq_len, ext, ranks, rank, source):
    rows = [(r, seq_len[r] - ext[r] + i) for r in range(len(ext)) for i in range(ext[r])]
    mine = [(g, r, position) for g, (r, position) in enumerate(rows) if g % ranks == rank]
    selected = sorted({r for _, r, _ in mine})
    lengths, counts = [seq_len[r] for r in selected], [sum(r == s for _, r, _ in mine) for s in selected]
    starts, all_starts = cumulative(lengths), cumulative(seq_len)
    k_start = i32([starts[selected.index(r)] for _, r, _ in mine])
    return {
        "rank_rows": i32([g for g, _, _ in mine]), "row_len": i32([position + 1 for _, _, position in mine]),
        "selected": i32(selected), "ext_len": i32(counts), "kv_len": i32(lengths), "kv_indptr": starts,
        "q_indptr": cumulative(counts), "k_start": k_start, "k_end": i32([k + p + 1 for k, (_, _, p) in zip(k_start, mine)]),
        "row_to_request": i32([selected.index(r) for _, r, _ in mine]),
        "row_offset": i32([all_starts[r] for _, r, _ in mine]) if source == "fresh" else k_start,
    }  # fmt: skip


def split_zigzag(seq_len, ext, ranks, rank):
    blocks = np.array_split(np.arange(ext), 2 * ranks)
    mine = (blocks[rank], blocks[2 * ranks - 1 - rank])
    rows, prefix = np.concatenate(mine), seq_len - ext
    return {
        "rank_rows": i32(rows), "row_len": i32(prefix + rows + 1), "block_len": i32([len(block) for block in blocks]),
        "kv_len": i32([prefix + block[-1] + 1 for block in mine]),
    }  # fmt: skip


def split_cases(folder):
    prefix, ext = [7, 0, 90, 3, 0], [3, 1, 6, 0, 7]
    seq_len = [p + n for p, n in zip(prefix, ext)]
    inputs = {"seq_len": i32(seq_len), "ext_len": i32(ext), "prefix_len": i32(prefix)}
    for source, rank in (("cache", 0), ("cache", 3), ("fresh", 2)):
        params = {"ranks": 4, "rank": rank, "scheme": "round_robin", "extend_kv_source": source}
        expected = split_round_robin(seq_len, ext, 4, rank, source)
        write(folder, "context_split", f"round_robin-{source}-{rank}", params, inputs, expected)
    for rank in (0, 2):
        params = {"ranks": 3, "rank": rank, "scheme": "zigzag"}
        inputs = {"seq_len": i32([120]), "ext_len": i32([20])}
        write(folder, "context_split", f"zigzag-{rank}", params, inputs, split_zigzag(120, 20, 3, rank))
    mixed = [0, 2048, -3, 1, 64, 65, 2048, 300, 0, 1999]
    for case, lengths, parts in (("example", [1000, 300, 700], 4), ("mixed", mixed, 7), ("idle_parts", [0, 5], 4), ("empty", [], 2)):
        write(folder, "split_schedule", case, {"parts": parts}, {"topk_length": i32(lengths)}, split_of(lengths, parts))


# ---- index ----------------------------------------------------------------------------------------------------------
def rope(rows, cos_sin, style):
    """First channels of [..., Di] rotated by the angle row of the same token; fp64, rounded to bf16."""
    half = cos_sin.shape[-1] // 2
    cosine, sine = cos_sin[..., :half].astype(np.float64), cos_sin[..., half:].astype(np.float64)
    first = slice(0, half) if style == "half_split" else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if style == "half_split" else slice(1, 2 * half, 2)
    out = rows.copy()
    out[..., first] = round_bf16(rows[..., first] * cosine - rows[..., second] * sine)
    out[..., second] = round_bf16(rows[..., second] * cosine + rows[..., first] * sine)
    return out


def hadamard(dim):
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(dim)


def quantise_index_rows(rows, mode):
    scales = np.array([tile_scale(row, mode, 1e-4 / 448, None) for row in rows.reshape(-1, rows.shape[-1])], np.float32)
    codes = np.array([quantise(row, scale) for row, scale in zip(rows.reshape(-1, rows.shape[-1]), scales)])
    return codes.reshape(rows.shape), scales.reshape(rows.shape[:-1])


def quantize_case(folder, rng, case, style, mode, rotate):
    rows, heads, dim, rope_dim, max_pos = 4, 6, 128, 64, 30
    q, k = Bf16(rng.normal(size=(rows, heads, dim))), Bf16(rng.normal(size=(rows, dim)) + 0.5)
    weight, bias = rng.normal(size=dim).astype(np.float32), rng.normal(size=dim).astype(np.float32)
    gate = rng.normal(size=(rows, heads)).astype(np.float32)
    positions = i32([0, 17, 29, 3])
    angles = np.arange(max_pos)[:, None] * 10000.0 ** (-np.arange(rope_dim // 2) / (rope_dim // 2))
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    centred = k.values - k.values.mean(axis=1, keepdims=True)
    variance = (centred**2).mean(axis=1, keepdims=True)
    normed = round_bf16(centred / np.sqrt(variance + 1e-6) * weight.astype(np.float64) + bias.astype(np.float64))
    angle = cos_sin[positions]
    new_q, new_k = rope(q.values, angle[:, None, :], style), rope(normed, angle, style)
    if rotate:
        new_q, new_k = round_bf16(new_q @ hadamard(dim)), round_bf16(new_k @ hadamard(dim))
    q_fp8, q_scale = quantise_index_rows(new_q, mode)
    k_fp8, k_scale = quantise_index_rows(new_k, mode)
    head_weight = (gate.astype(np.float64) / np.sqrt(heads * dim) * q_scale).astype(np.float32)
    inputs = {"q": q, "k": k, "norm_weight": weight, "norm_bias": bias, "head_gate": gate, "positions": positions, "cos_sin": cos_sin}
    expected = {"q_fp8": q_fp8, "q_scale": q_scale, "k_fp8": k_fp8, "k_scale": k_scale, "head_weight": head_weight}
    write(folder, "index_quantize", case, {"rope_style": style, "scale_mode": mode, "hadamard": rotate}, inputs, expected)


def logits_row(q_codes, weights, k_codes, k_scales):
    scores = e4m3_values(q_codes) @ e4m3_values(k_codes).T
    return k_scales.astype(np.float64) * (weights.astype(np.float64) @ np.maximum(scores, 0))


def index_codes(rng, shape, exact):
    """Exact: small integers, so that no sum rounds in fp32 and selections have one right answer."""
    return e4m3_codes(rng.integers(-2, 3, size=shape) if exact else rng.normal(size=shape))


def index_scales(rng, shape, exact):
    return np.exp2(rng.integers(-2, 3, size=shape)).astype(np.float32) if exact else rng.uniform(0.1, 2, shape).astype(np.float32)


def topk_row(logits, length, start, topk):
    """Ascending positions of the largest logits; -0 equals +0, NaN below -inf, ties to the smaller position."""
    start = max(start, 0)
    window = logits[start : start + max(length, 0)].astype(np.float64)
    if len(window) > topk:
        nan = np.isnan(window)
        order = np.lexsort((np.arange(len(window)), -np.where(nan, -INF, window), nan))
        positions = np.sort(order[:topk])
    else:
        positions = np.arange(len(window))
    return np.concatenate([positions, np.full(topk - len(positions), -1)]).astype(np.int64)


def transformed(positions, transform, table, request, page_size, offset):
    if transform == "local":
        return positions
    if transform == "ragged":
        return np.where(positions < 0, -1, positions + offset)
    if not 0 <= request < len(table):
        return np.full(len(positions), -1)
    out = np.full(len(positions), -1)
    for i, p in enumerate(positions):
        if 0 <= p < table.shape[1] * page_size and table[request, p // page_size] >= 0:
            out[i] = table[request, p // page_size] * page_size + p % page_size
    return out


def paged_inputs(rng, rows, heads, dim, page_size, exact):
    pages, requests, max_pages = 20, 3, 7
    pool = rng.integers(0, 256, size=(pages, page_size * (dim + 4) + 12)).astype(np.uint8)
    for page in pool:
        page[: page_size * dim] = index_codes(rng, page_size * dim, exact)
        page[page_size * dim : page_size * (dim + 4)] = index_scales(rng, page_size, exact).view(np.uint8)
    table = i32(rng.integers(0, pages, size=(requests, max_pages)))
    table[1, 2], table[2, 0] = -1, pages
    weights = index_scales(rng, (rows, heads), exact) * np.where(rng.random((rows, heads)) < 0.3, -1, 1).astype(np.float32)
    return {
        "q_fp8": index_codes(rng, (rows, heads, dim), exact), "head_weight": weights, "index_pool": pool, "page_table": table,
        "row_to_request": i32(rng.integers(0, requests, size=rows)),
        "row_len": i32(rng.integers(0, max_pages * page_size + 1, size=rows)),
    }  # fmt: skip


def paged_logits(inputs, t, page_size, dim):
    pool, table = inputs["index_pool"], inputs["page_table"]
    request, length = inputs["row_to_request"][t], max(inputs["row_len"][t], 0)
    row = np.full(length, -INF)
    for p in range(length):
        page = table[request, p // page_size]
        if 0 <= page < len(pool):
            j = p % page_size
            codes = pool[page, j * dim : (j + 1) * dim]
            scale = pool[page, page_size * dim + 4 * j : page_size * dim + 4 * j + 4].copy().view(np.float32)
            row[p] = logits_row(inputs["q_fp8"][t], inputs["head_weight"][t], codes[None], scale)[0]
    return row


def padded(rows):
    width = max([0] + [len(row) for row in rows])
    out = np.zeros((len(rows), width), np.float32)
    for t, row in enumerate(rows):
        out[t, : len(row)] = row
    return out


def ragged_inputs(rng, rows, heads, dim, exact):
    keys = 90
    weights = index_scales(rng, (rows, heads), exact) * np.where(rng.random((rows, heads)) < 0.3, -1, 1).astype(np.float32)
    return {
        "q_fp8": index_codes(rng, (rows, heads, dim), exact), "head_weight": weights,
        "k_fp8": index_codes(rng, (keys, dim), exact), "k_scale": index_scales(rng, keys, exact),
        "k_start": i32(rng.integers(-5, 40, size=rows)), "k_end": i32(rng.integers(30, keys + 20, size=rows)),
    }  # fmt: skip


def ragged_logits(inputs, t):
    keys = len(inputs["k_fp8"])
    begin, end = (int(np.clip(inputs[name][t], 0, keys)) for name in ("k_start", "k_end"))
    return logits_row(inputs["q_fp8"][t], inputs["head_weight"][t], inputs["k_fp8"][begin:end], inputs["k_scale"][begin:end])


def logits_cases(folder, rng):
    for exact in (True, False):
        suffix = "exact" if exact else "random"
        inputs = ragged_inputs(rng, 5, 8, 64, exact)
        expected = {"logits": padded([ragged_logits(inputs, t) for t in range(5)])}
        write(folder, "index_logits", f"ragged-{suffix}", {"layout": "ragged"}, inputs, expected)
        inputs = paged_inputs(rng, 6, 8, 64, 5, exact)
        expected = {"logits": padded([paged_logits(inputs, t, 5, 64) for t in range(6)])}
        write(folder, "index_logits", f"paged-{suffix}", {"layout": "paged", "page_size": 5}, inputs, expected)


def select_cases(folder, rng):
    inputs = ragged_inputs(rng, 6, 8, 64, True) | {"row_offset": i32(rng.integers(0, 1000, size=6))}
    params = {"layout": "ragged", "topk": 20, "transform": "ragged"}
    rows = [ragged_logits(inputs, t).astype(np.float32) for t in range(6)]
    indices = [transformed(topk_row(row, len(row), 0, 20), "ragged", None, 0, 0, inputs["row_offset"][t]) for t, row in enumerate(rows)]
    write(folder, "index_select", "ragged", params, inputs, {"indices": i32(indices)})
    for transform in ("local", "paged"):
        inputs = paged_inputs(rng, 7, 8, 64, 5, True)
        params = {"layout": "paged", "page_size": 5, "topk": 9, "transform": transform}
        rows = [paged_logits(inputs, t, 5, 64).astype(np.float32) for t in range(7)]
        indices = [
            transformed(topk_row(row, len(row), 0, 9), transform, inputs["page_table"], inputs["row_to_request"][t], 5, 0)
            for t, row in enumerate(rows)
        ]
        write(folder, "index_select", f"paged-{transform}", params, inputs, {"indices": i32(indices)})


def topk_cases(folder, rng):
    # Few winners above a plateau of zeros of both signs: the boundary lies inside the plateau.
    plateau = np.zeros((1, 8320), np.float32)
    plateau[0, ::2] = -0.0
    plateau[0, np.arange(100) * 83] = 1 + np.arange(100)
    cases = [("plateau", plateau, [8320], [0], 2048)]
    special = rng.choice([INF, -INF, np.nan, 0.0, -0.0, 1e38, -3.5, 2.5], size=(6, 300)).astype(np.float32)
    cases.append(("special", special, [300, 40, 0, -5, 500, 64], [0, 7, 0, 0, 250, -3], 64))
    cases.append(("random", rng.normal(size=(4, 700)).astype(np.float32), [700, 699, 128, 1], [0, 1, 0, 699], 128))
    for case, logits, lengths, starts, topk in cases:
        indices = i32([topk_row(logits[t], lengths[t], starts[t], topk) for t in range(len(lengths))])
        inputs = {"logits": logits, "row_len": i32(lengths), "row_start": i32(starts)}
        write(folder, "topk_select", case, {"topk": topk}, inputs, {"indices": indices})
    logits = rng.normal(size=(5, 100)).astype(np.float32)
    lengths, table = [100, 60, 10, 33, 90], i32(rng.integers(0, 50, size=(3, 12)))
    table[1, 3] = -1
    requests, offsets = i32([0, 1, 2, 5, -1]), i32(rng.integers(0, 1000, size=5))
    for transform in ("paged", "ragged"):
        rows = [topk_row(logits[t], lengths[t], 0, 16) for t in range(5)]
        indices = [transformed(rows[t], transform, table, requests[t], 8, offsets[t]) for t in range(5)]
        inputs = {"logits": logits, "row_len": i32(lengths)}
        inputs |= {"page_table": table, "row_to_request": requests} if transform == "paged" else {"row_offset": offsets}
        params = {"topk": 16, "transform": transform} | ({"page_size": 8} if transform == "paged" else {})
        write(folder, "topk_select", transform, params, inputs, {"indices": i32(indices)})


def index_cases(folder, rng):
    quantize_case(folder, rng, "half_split-fp32", "half_split", "fp32", False)
    quantize_case(folder, rng, "interleaved-pow2", "interleaved", "pow2", False)
    quantize_case(folder, rng, "hadamard-pow2", "half_split", "pow2", True)
    logits_cases(folder, rng)
    select_cases(folder, rng)
    topk_cases(folder, rng)


# ---- mla ------------------------------------------------------------------------------------------------------------
def sink_factor(sink, lse):
    with np.errstate(over="ignore", invalid="ignore"):  # -inf minus -inf: an empty row, masked by the caller
        return 1 / (1 + np.exp(sink - lse))


def attend(q, keys, values, scale, cap, sink, empty):
    """One row and head over a list of visible keys: out, lse, max_logits."""
    if len(keys) == 0:
        return np.zeros(values.shape[1]), empty, -INF
    s = np.float64(np.float32(scale)) * (keys @ q)
    if cap > 0:
        s = cap * np.tanh(s / cap)
    top = s.max()
    lse = top + np.log(np.exp(s - top).sum())
    out = np.exp(s - lse) @ values
    return out * (1 if sink is None else sink_factor(np.float64(sink), lse)), lse, top


def visible(indices, length, rows):
    width = len(indices) if length is None else int(np.clip(length, 0, len(indices)))
    listed = [rows[i] for i in indices[:width] if 0 <= i < len(rows)]
    return np.array(listed).reshape(len(listed), rows.shape[1])


def sparse(q, segments, scale, cap=0.0, sink=None, empty=-INF):
    """segments: (indices [T, K], lengths or None, decoded rows [S, Dqk])."""
    tokens, heads, _ = q.shape
    out, lse, top = np.zeros((tokens, heads, 512)), np.zeros((tokens, heads)), np.zeros((tokens, heads))
    for t in range(tokens):
        keys = np.concatenate([visible(i[t], None if n is None else n[t], rows) for i, n, rows in segments])
        for h in range(heads):
            head_sink = None if sink is None else sink[h]
            out[t, h], lse[t, h], top[t, h] = attend(q[t, h], keys, keys[:, :512], scale, cap, head_sink, empty)
    return {"out": Bf16(out), "lse": lse.astype(np.float32), "max_logits": top.astype(np.float32)}


def v32_pool(rng, pages, page_size):
    rows = rng.normal(size=(pages * page_size, 576)) * 0.5
    pool = np.full((pages, page_size * 656 + 16), 0x7F, np.uint8)
    pool = pack_rows("v32", Bf16(rows).values, range(len(rows)), pool, page_size, "fp32")
    return pool, np.array([unpack_row("v32", 576, pool, page_size, s) for s in range(len(rows))])


def sparse_cases(folder, rng):
    q, kv = Bf16(rng.normal(size=(4, 3, 576)) * 0.5), Bf16(rng.normal(size=(40, 576)) * 0.5)
    indices = i32(rng.integers(0, 40, size=(4, 70)))
    indices[0, ::3], indices[1, :], indices[2, 5] = -1, [-1, 40, 2147483647, -2147483648] * 17 + [41, -5], 1 << 30
    indices[3, 1] = indices[3, 0]
    inputs = {"q": q, "kv": kv, "indices": indices}
    scale = 0.1352338
    expected = sparse(q.values, [(indices, None, kv.values)], scale)
    write(folder, "sparse_mla", "bf16", {"softmax_scale": scale}, inputs, expected)
    expected = sparse(q.values, [(indices, None, kv.values)], scale, cap=1.5, empty=INF)
    params = {"softmax_scale": scale, "logit_cap": 1.5, "empty_lse": "pos_inf", "fixed_splits": 2}
    write(folder, "sparse_mla", "cap", params, inputs, expected)
    pool, rows = v32_pool(rng, 3, 7)
    extra, extra_rows = v32_pool(rng, 4, 2)
    q = Bf16(rng.normal(size=(4, 5, 576)) * 0.5)
    indices, lengths = i32(rng.integers(-2, 23, size=(4, 66))), i32([66, 10, 0, -4])
    extra_indices, extra_lengths = i32(rng.integers(-1, 9, size=(4, 5))), i32([5, 100, 2, 0])
    sink = np.array([0.5, INF, -INF, 1e38, -3], np.float32)
    inputs = {"q": q, "kv": pool, "indices": indices, "topk_length": lengths, "sink": sink, "extra_kv": extra,
              "extra_indices": extra_indices, "extra_topk_length": extra_lengths}  # fmt: skip
    params = {"softmax_scale": scale, "row_format": "v32", "page_size": 7, "extra_page_size": 2}
    expected = sparse(q.values, [(indices, lengths, rows), (extra_indices, extra_lengths, extra_rows)], scale, sink=sink)
    write(folder, "sparse_mla", "v32-two-segments", params, inputs, expected)
    # Width 512, a bf16 pool of bytes, one token per page.
    q, kv = Bf16(rng.normal(size=(2, 2, 512)) * 0.5), Bf16(rng.normal(size=(20, 512)) * 0.5)
    indices = i32(rng.integers(0, 20, size=(2, 9)))
    inputs = {"q": q, "kv": kv.bits.view(np.uint8).reshape(20, 1024), "indices": indices}
    expected = sparse(q.values, [(indices, None, kv.values)], scale)
    write(folder, "sparse_mla", "pool-512", {"softmax_scale": scale, "page_size": 1}, inputs, expected)
    # Codes of queries and keys with a scale each.
    q = e4m3_codes(rng.normal(size=(3, 2, 576)))
    pool = np.full((3, 5 * 576 + 7), 0x7F, np.uint8)
    codes = e4m3_codes(rng.normal(size=(15, 576)))
    for slot in range(15):
        pool[slot // 5, slot % 5 * 576 :][:576] = codes[slot]
    indices = i32(rng.integers(-2, 17, size=(3, 70)))
    inputs = {"q": q, "kv": pool, "indices": indices}
    params = {"softmax_scale": scale, "row_format": "f576", "page_size": 5, "q_scale": 0.5, "k_scale": 2.0}
    expected = sparse(e4m3_values(q) * 0.5, [(indices, None, e4m3_values(codes) * 2.0)], scale)
    write(folder, "sparse_mla", "f576", params, inputs, expected)


def dense_mla_cases(folder, rng):
    # Pages of one token: a key, a page outside the pool, a key; the rest of the table is beyond the length.
    q, pool = e4m3_codes(rng.normal(size=(1, 1, 576))), e4m3_codes(rng.normal(size=(3, 576)))
    inputs = {"q": q, "kv": pool, "page_table": i32([[2, 3, 0, 1]]), "kv_len": i32([3]), "q_indptr": i32([0, 1])}
    params = {"softmax_scale": 0.1352338, "row_format": "f576", "page_size": 1, "q_scale": 0.5, "k_scale": 2.0}
    keys = e4m3_values(pool)[[2, 0]] * 2.0
    out, lse, _ = attend(e4m3_values(q)[0, 0] * 0.5, keys, keys[:, :512], 0.1352338, 0, None, -INF)
    expected = {"out": Bf16(out.reshape(1, 1, 512)), "lse": np.array([[lse]], np.float32)}
    write(folder, "dense_mla", "f576", params, inputs, expected)


def mha_cases(folder, rng):
    q_indptr, kv_indptr = i32([0, 5, 5, 8]), i32([0, 3, 9, 21])
    q, k, v = (Bf16(rng.normal(size=shape)) for shape in ((9, 2, 192), (21, 2, 192), (21, 2, 128)))
    for causal in (True, False):
        out, lse = np.zeros((9, 2, 128)), np.zeros((9, 2))
        for r in range(3):
            rows, keys = range(q_indptr[r], q_indptr[r + 1]), range(kv_indptr[r], kv_indptr[r + 1])
            for i, t in enumerate(rows):
                seen = max(0, len(keys) - len(rows) + i + 1) if causal else len(keys)
                part = slice(kv_indptr[r], kv_indptr[r] + seen)
                for h in range(2):
                    out[t, h], lse[t, h], _ = attend(q.values[t, h], k.values[part, h], v.values[part, h], 0.0721687836, 0, None, -INF)
        inputs = {"q": q, "k": k, "v": v, "q_indptr": q_indptr, "kv_indptr": kv_indptr}
        params = {"softmax_scale": 0.0721687836, "causal": causal}
        write(folder, "mha_varlen", "causal" if causal else "dense", params, inputs, {"out": Bf16(out), "lse": lse.astype(np.float32)})


def merge_cases(folder, rng):
    parts, rows, heads, width = 3, 4, 2, 24
    lse_parts = (rng.normal(size=(parts, rows, heads)) * 5).astype(np.float32)
    lse_parts[0, 0], lse_parts[:, 1], lse_parts[1, 2], lse_parts[2, 3] = -INF, -INF, INF, np.nan
    sink = np.array([1.0, -INF], np.float32)
    for dtype in ("f32", "bf16"):
        values = rng.normal(size=(parts, rows, heads, width)).astype(np.float32)
        values[~np.isfinite(lse_parts)] = np.nan
        out_parts = Bf16(values) if dtype == "bf16" else values
        known = out_parts.values if dtype == "bf16" else values.astype(np.float64)
        weights = np.where(np.isfinite(lse_parts), lse_parts.astype(np.float64), -INF)
        top = weights.max(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            sums = np.exp(weights - np.where(np.isfinite(top), top, 0)).sum(axis=0)
            lse = np.where(np.isfinite(top), top + np.log(sums), -INF)
            share = np.where(np.isfinite(weights), np.exp(weights - lse), 0)
        out = (share[..., None] * np.where(share[..., None] > 0, known, 0)).sum(axis=0)
        out *= np.where(np.isfinite(lse), sink_factor(sink.astype(np.float64), lse), 0)[..., None]
        inputs = {"out_parts": out_parts, "lse_parts": lse_parts, "sink": sink}
        expected = {"out": Bf16(out) if dtype == "bf16" else out.astype(np.float32), "lse": lse.astype(np.float32)}
        write(folder, "merge_lse", dtype, {}, inputs, expected)


def mla_input_cases(folder, rng):
    inputs = {"q_nope": Bf16(rng.normal(size=(2, 2, 512))), "q_rope": Bf16(rng.normal(size=(2, 2, 64)))}
    joined = np.concatenate([inputs["q_nope"].bits, inputs["q_rope"].bits], axis=-1)
    write(folder, "concat_absorbed_q", "parts", {}, inputs, {"q": Bf16.of_bits(joined)})
    angle = np.arange(8)[:, None] * 1e4 ** (-np.arange(32) / 32)
    cos_sin = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    positions = i32([7, 5, 100, -3])
    table = cos_sin[np.clip(positions, 0, 7)]
    cosine, sine = table[:, :32], table[:, 32:]
    for style, q_scale, k_scale in (("half_split", 0.5, 2.0), ("interleaved", 2.0, 0.5)):
        first, second = (slice(0, 32), slice(32, 64)) if style == "half_split" else (slice(0, 64, 2), slice(1, 64, 2))
        inputs = {"q_nope": Bf16(rng.normal(size=(4, 2, 512)) * 9), "q_rope": Bf16(rng.normal(size=(4, 2, 64)) * 9),
                  "k_nope": Bf16(rng.normal(size=(4, 512)) * 9), "k_rope": Bf16(rng.normal(size=(4, 64)) * 9)}  # fmt: skip
        inputs["k_nope"] = Bf16(np.where(inputs["k_nope"].values > 20, 1e30, inputs["k_nope"].values))
        expected = {}
        for name, scale in (("q", q_scale), ("k", k_scale)):
            rope_part = inputs[name + "_rope"].values.astype(np.float32)
            shape = (4, 1, 32) if name == "q" else (4, 32)
            c, s = cosine.reshape(shape), sine.reshape(shape)
            a, b = rope_part[..., first], rope_part[..., second]
            turned = np.empty_like(rope_part)  # float32: each product, sum and quotient is rounded
            turned[..., first], turned[..., second] = a * c - b * s, b * c + a * s
            row = np.concatenate([inputs[name + "_nope"].values.astype(np.float32), turned], axis=-1)
            expected[name + "_fp8"] = e4m3_codes(row / np.float32(scale))
        params = {"rope_style": style, "q_scale": q_scale, "k_scale": k_scale}
        write(folder, "mla_rope_quantize", style, params, inputs | {"positions": positions, "cos_sin": cos_sin}, expected)


# ---- kda ------------------------------------------------------------------------------------------------------------
def log_decay(kind, g, a_log, dt_bias, bound):
    """Natural log decay [T, HV, K]."""
    if kind == "given":
        return np.asarray(g, np.float64)
    a = (np.asarray(g, np.float32) + dt_bias).astype(np.float64)
    rate = np.exp(a_log.astype(np.float64))[:, None]
    return -rate * np.logaddexp(0, a) if kind == "softplus" else bound / (1 + np.exp(-rate * a))


def delta_rule(q, k, v, decay, beta, state, scale):
    """One value head: q, k, decay [T, K], v [T, V], beta [T], state [K, V]; outputs [T, V] and the states after every token."""
    outputs, states = [], []
    for q_t, k_t, v_t, decay_t, beta_t in zip(q, k, v, decay, beta):
        state = np.diag(np.exp(decay_t)) @ state
        state = state + np.outer(k_t, beta_t * (v_t - k_t @ state))
        outputs.append(scale * (q_t @ state))
        states.append(state)
    return np.array(outputs), states


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def kda_rows(rng, rows, heads, value_heads, dim_k, dim_v):
    return {
        "q": Bf16(rng.normal(size=(rows, heads, dim_k))),
        "k": Bf16(rng.normal(size=(rows, heads, dim_k))),
        "v": Bf16(rng.normal(size=(rows, value_heads, dim_v))),
        "g": Bf16(rng.normal(size=(rows, value_heads, dim_k))),
        "beta": rng.normal(size=(rows, value_heads)).astype(np.float32),
        "a_log": rng.uniform(-2, 1, value_heads).astype(np.float32),
        "dt_bias": rng.normal(size=(value_heads, dim_k)).astype(np.float32),
    }


def kda_head(inputs, kind, bound, h, first, last, state):
    """Rows first..last-1 of value head h with normalised q and k and logits as beta; state [V, K] as stored."""
    group = inputs["v"].values.shape[1] // inputs["q"].values.shape[1]
    decay = log_decay(kind, inputs["g"].values, inputs["a_log"], inputs["dt_bias"], bound)
    beta = 1 / (1 + np.exp(-inputs["beta"].astype(np.float64)))
    q, k = unit(inputs["q"].values[first:last, h // group]), unit(inputs["k"].values[first:last, h // group])
    v = inputs["v"].values[first:last, h]
    out, states = delta_rule(q, k, v, decay[first:last, h], beta[first:last, h], state.T, q.shape[1] ** -0.5)
    return out, [state] + [s.T for s in states]


def kda_gate_cases(folder, rng):
    for kind in ("softplus", "lower_bound"):
        inputs = kda_rows(rng, 3, 1, 2, 6, 1)
        inputs = {name: inputs[name] for name in ("g", "a_log", "dt_bias")}
        params = {"gate": kind} | ({"lower_bound": -3.0} if kind == "lower_bound" else {})
        expected = log_decay(kind, inputs["g"].values, inputs["a_log"], inputs["dt_bias"], -3.0)
        write(folder, "kda_gate", kind, params, inputs, {"log_decay": expected.astype(np.float32)})


def kda_prefill_case(folder, rng):
    """A fork from slot 0, an empty sequence that copies slot 1, a fresh sequence without an out slot; snapshots of the first."""
    heads, dim_k, dim_v = 2, 5, 3
    inputs = kda_rows(rng, 20, 1, heads, dim_k, dim_v)
    pool = rng.normal(size=(6, heads, dim_v, dim_k)).astype(np.float32)
    starts, in_slot, out_slot = [0, 17, 17, 19], [0, 1, -1], [2, 3, -1]
    positions, targets = [16, 17, 5], [4, 5, 1]  # chunk 16: 5 writes nothing
    out, after = np.zeros((20, heads, dim_v)), pool.copy()
    for n in range(3):
        for h in range(heads):
            state = pool[in_slot[n], h].astype(np.float64) if in_slot[n] >= 0 else np.zeros((dim_v, dim_k))
            rows, states = kda_head(inputs, "lower_bound", -5.0, h, starts[n], starts[n + 1], state)
            if len(rows):
                out[starts[n] : starts[n + 1], h] = rows
            if out_slot[n] >= 0:
                after[out_slot[n], h] = states[-1]
            if n == 0:
                after[4, h], after[5, h] = states[16], states[17]
    params = {"gate": "lower_bound", "beta_kind": "logit", "normalise": True, "chunk": 16, "commit": "staged"}
    lists = {"q_indptr": starts, "in_slot": in_slot, "out_slot": out_slot}
    lists |= {"snapshot_seq": [0, 0, 0], "snapshot_pos": positions, "snapshot_slot": targets}
    inputs |= {"state": pool} | {name: i32(values) for name, values in lists.items()}
    write(folder, "kda_prefill", "pool", params, inputs, {"out": Bf16(out), "state": after})


def kda_decode_case(folder, rng):
    heads, dim_k, dim_v = 4, 4, 3
    inputs = kda_rows(rng, 3, 2, heads, dim_k, dim_v)
    pool = rng.normal(size=(4, heads, dim_v, dim_k)).astype(np.float32)
    slots, fresh = [3, -1, 0], [1, 1, 0]
    out, after = np.zeros((3, heads, dim_v)), pool.copy()
    for t, slot in enumerate(slots):
        for h in range(heads):
            if slot >= 0:
                state = pool[slot, h].astype(np.float64) if fresh[t] else np.zeros((dim_v, dim_k))
                rows, states = kda_head(inputs, "softplus", 0, h, t, t + 1, state)
                out[t, h], after[slot, h] = rows[0], states[-1]
    pool[0] = np.nan  # not a start: has_initial_state is 0
    packed = [inputs.pop(name).bits.reshape(3, -1) for name in ("q", "k", "v")]
    inputs |= {"qkv": Bf16.of_bits(np.concatenate(packed, axis=1)), "state": pool}
    inputs |= {"slot": i32(slots), "has_initial_state": np.asarray(fresh, np.uint8)}
    params = {"gate": "softplus", "beta_kind": "logit", "normalise": True}
    write(folder, "kda_decode", "packed_row", params, inputs, {"out": Bf16(out), "state": after})


def path_to(parent, node):
    """The draft rows from the committed state to a node; an illegal parent is the committed state."""
    path = [node]
    while 0 <= parent[path[-1]] < path[-1]:
        path.append(parent[path[-1]])
    return path[::-1]


def kda_verify_case(folder, rng):
    """A tree of four rows for two requests, one of them padding; records."""
    heads, dim_k, dim_v, drafts = 2, 4, 3, 4
    inputs = kda_rows(rng, 2 * drafts, 1, heads, dim_k, dim_v)
    pool = rng.normal(size=(3, heads, dim_v, dim_k)).astype(np.float32)
    parent = [-1, 0, 0, 3]  # row 3 names itself
    out, records = np.zeros((2 * drafts, heads, dim_v)), np.zeros((2, drafts, heads, 2 * dim_k + dim_v))
    decay = log_decay("lower_bound", inputs["g"].values, inputs["a_log"], inputs["dt_bias"], -5.0)
    beta = 1 / (1 + np.exp(-inputs["beta"].astype(np.float64)))
    q, k, v = unit(inputs["q"].values), unit(inputs["k"].values), inputs["v"].values
    for t in range(drafts):
        path = [drafts + row for row in path_to(parent, t)]
        for h in range(heads):
            start = pool[2, h].astype(np.float64).T
            args = q[path, 0], k[path, 0], v[path, h], decay[path, h], beta[path, h]
            rows, states = delta_rule(*args, start, dim_k**-0.5)
            out[path[-1], h] = rows[-1]
            before = np.diag(np.exp(decay[path[-1], h])) @ (states[-2] if len(path) > 1 else start)
            u = beta[path[-1], h] * (v[path[-1], h] - k[path[-1], 0] @ before)
            records[1, t, h] = np.concatenate([k[path[-1], 0], decay[path[-1], h], u])
    inputs |= {"state": pool, "slot": i32([-1, 2]), "parent": i32(parent)}
    params = {"gate": "lower_bound", "beta_kind": "logit", "normalise": True, "mode": "records", "rows_per_request": drafts}
    write(folder, "kda_verify", "records_tree", params, inputs, {"out": Bf16(out), "scratch": records.astype(np.float32)})


def kda_commit_case(folder, rng):
    """Records of a tree; counts 3 (node 2 after node 0), 0 and 5; a track slot; windows."""
    heads, dim_k, dim_v, drafts, channels = 1, 4, 3, 4, 5
    records = rng.normal(size=(3, drafts, heads, 2 * dim_k + dim_v)).astype(np.float32)
    records[..., dim_k : 2 * dim_k] = -np.abs(records[..., dim_k : 2 * dim_k])
    pool = rng.normal(size=(5, heads, dim_v, dim_k)).astype(np.float32)
    windows = Bf16(rng.normal(size=(3, drafts, 3, channels)))
    window_pool = Bf16(rng.normal(size=(5, channels, 3)))
    parent, accepted, slot = [-1, 0, 0, 2], [3, 0, 5], [4, 1, 2]
    track_slot, track_accepted = [3, -1, 9], [4, 1, 1]
    after, window_bits = pool.copy(), window_pool.bits.copy()
    for counts, slots in ((accepted, slot), (track_accepted, track_slot)):
        for r in range(3):
            if not (1 <= counts[r] <= drafts and 0 <= slots[r] < 5):
                continue
            state = pool[slot[r], 0].astype(np.float64)
            for node in path_to(parent, counts[r] - 1):
                k, g, u = np.split(records[r, node, 0].astype(np.float64), [dim_k, 2 * dim_k])
                state = state * np.exp(g) + np.outer(u, k)
            after[slots[r], 0] = state
            window_bits[slots[r]] = windows.bits[r, counts[r] - 1].T
    lists = {"accepted": accepted, "slot": slot, "parent": parent, "track_slot": track_slot, "track_accepted": track_accepted}
    inputs = {"scratch": records, "state": pool, "window_scratch": windows, "window_state": window_pool}
    inputs |= {name: i32(values) for name, values in lists.items()}
    expected = {"state": after, "window_state": Bf16.of_bits(window_bits)}
    write(folder, "kda_commit", "records_tree", {"mode": "records", "window_layout": "dw"}, inputs, expected)


def causal_conv1d_case(folder, rng):
    """Lengths 1, 0 (a copy) and 5 (fresh, from a slot of NaN); snapshots at 0 and 2 of the last."""
    channels, starts = 6, [0, 1, 1, 6]
    x, weight = Bf16(rng.normal(size=(6, channels))), Bf16(rng.normal(size=(channels, 4)))
    bias = rng.normal(size=channels).astype(np.float32)
    pool = Bf16(rng.normal(size=(6, channels, 3)))
    pool.bits[2] = 0x7FC0
    in_slot, out_slot, fresh = [1, 3, 2], [1, 0, 2], [1, 1, 0]
    out, after = np.zeros((6, channels)), pool.bits.copy()
    for n in range(3):
        window = pool.bits[in_slot[n]].T if fresh[n] else np.zeros((3, channels), np.uint16)
        line = np.concatenate([window, x.bits[starts[n] : starts[n + 1]]])
        values = bf16_values(line).astype(np.float64)
        for t in range(starts[n + 1] - starts[n]):
            y = bias + (weight.values * values[t : t + 4].T).sum(axis=1)
            out[starts[n] + t] = y / (1 + np.exp(-y))
        after[out_slot[n]] = line[len(line) - 3 :].T
        if n == 2:
            after[4], after[5] = line[:3].T, line[2:5].T
    lists = {"q_indptr": starts, "in_slot": in_slot, "out_slot": out_slot}
    lists |= {"snapshot_seq": [2, 2], "snapshot_pos": [0, 2], "snapshot_slot": [4, 5]}
    inputs = {"x": x, "weight": weight, "bias": bias, "window_state": pool}
    inputs |= {name: i32(values) for name, values in lists.items()} | {"has_initial_state": np.asarray(fresh, np.uint8)}
    expected = {"out": Bf16(out), "window_state": Bf16.of_bits(after)}
    write(folder, "causal_conv1d", "prefill_dw", {"mode": "prefill", "window_layout": "dw"}, inputs, expected)


def kda_cases(folder, rng):
    kda_gate_cases(folder, rng)
    kda_prefill_case(folder, rng)
    kda_decode_case(folder, rng)
    kda_verify_case(folder, rng)
    kda_commit_case(folder, rng)
    causal_conv1d_case(folder, rng)


# ---- msa ------------------------------------------------------------------------------------------------------------
def msa_rows(kv_len, q_indptr, rows, max_pages, block):
    """(request, position, length, own block) of every row; None for rows that see nothing."""
    result = [None] * rows
    for r, length in enumerate(kv_len):
        length = min(int(length), max_pages * block)
        for t in range(q_indptr[r], q_indptr[r + 1]):
            position = length - (q_indptr[r + 1] - q_indptr[r]) + t - q_indptr[r]
            if length > 0 and position >= 0:
                result[t] = (r, position, length, min(position // block, max_pages - 1))
    return result


def msa_visible(row, table, n, block, pages):
    """Slots of the visible tokens of block n."""
    request, position, length, _ = row
    page = table[request, n]
    if not 0 <= page < pages:
        return np.zeros(0, np.int64)
    tokens = np.arange(n * block, (n + 1) * block)
    return page * block + tokens[(tokens <= position) & (tokens < length)] - n * block


def msa_choose(scores, own, topk, init, local):
    order = lambda n: (not (n < init or n > own - local), np.isnan(scores[n]), -scores[n] if not np.isnan(scores[n]) else 0, n)
    return sorted(sorted(range(own + 1), key=order)[:topk])


def padded_list(blocks, width):
    return list(blocks) + [-1] * (width - len(blocks))


def swa_cases(folder, rng):
    # Window 3 over pages of 2 tokens. Request 0: positions 3 and 4, one page missing; request 1: position 1; then padding.
    inputs = {"q_indptr": i32([0, 2, 3]), "kv_len": i32([5, 2]), "page_table": i32([[7, -1, 2], [4, 0, 0]])}
    indices = i32([[15, -1, -1, -1], [-1, -1, 4, -1], [8, 9, -1, -1]])
    write(folder, "build_swa_indices", "paged", {"window": 3, "width": 4, "page_size": 2}, inputs,
          {"indices": indices, "row_len": i32([3, 3, 2])})


def swa_decode_cases(folder, rng):
    # r512 pages of two rows, bf16 scales; a hole inside a length, a window shorter than a length, lists of 64 bits.
    scales = Bf16(0.003 * np.exp(0.3 * rng.normal(size=(6, 1))))
    codes = e4m3_codes(0.3 * rng.normal(size=(6, 512)) / scales.values)
    rows = round_bf16((e4m3_values(codes) * scales.values).astype(np.float32))
    q, sink = Bf16(rng.normal(size=(2, 1, 512))), np.float32([0.5])
    indices, lens = np.int64([[3, -1, 5, 0, 2], [1, 4, 1, 2, 0]]), np.int64([4, 5])
    scale = 0.05
    seen = np.minimum(lens, 3)
    expected = sparse(q.values.astype(np.float64), [(indices, seen, rows)], scale, sink=sink)
    expected.pop("max_logits")
    params = {"softmax_scale": scale, "window": 3, "row_format": "r512", "page_size": 2}
    inputs = {"q": q, "kv": codes.reshape(3, 1024), "inv_scale": scales, "swa_indices": indices, "swa_lens": lens, "sink": sink}
    write(folder, "swa_decode", "r512", params, inputs, expected)


def msa_cases(folder, rng):
    slots = [[2, 3, -1, -1, 8, 9], [20, 21, 4, 5, 6, 7]]
    inputs = {"req_to_token": i32(slots), "pool_row": i32([1, 0, 2, 0]), "kv_len": i32([4, 5, 3, 0])}
    expected = i32([[10, 2, 3], [1, -1, 4], [0, 0, 0], [0, 0, 0]])
    write(folder, "build_page_table", "slack", {"page_size": 2, "delta": 1}, inputs, {"page_table": expected})

    block, max_pages, pages, rows = 4, 5, 8, 9
    kv_len, q_indptr = i32([18, 0, 7, 3]), i32([0, 3, 4, 6, 8])
    table = rng.permutation(pages)[:4].astype(np.int32)
    table = i32([[table[0], table[1], -1, table[2], table[3]], [0] * 5, [5, 50, 0, 0, 0], [3, 0, 0, 0, 0]])
    where = msa_rows(kv_len, q_indptr, rows, max_pages, block)
    batch = {"page_table": table, "kv_len": kv_len, "q_indptr": q_indptr}

    iq, index_k = Bf16(rng.integers(-3, 4, (rows, 2, 8))), Bf16(rng.integers(-3, 4, (pages * block, 1, 8)))
    scores = {}
    for kind in ("max", "lse"):
        scores[kind] = np.full((2, rows, max_pages), -INF)
        for h, t, n in np.ndindex(scores[kind].shape):
            seen = msa_visible(where[t], table, n, block, pages) if where[t] else []
            if len(seen):
                products = 0.5 * index_k.values[seen, 0] @ iq.values[t, h]
                scores[kind][h, t, n] = products.max() if kind == "max" else np.log(np.exp(products).sum())
    params = {"block_size": block, "score": "lse", "index_scale": 0.5}
    write(folder, "msa_block_scores", "lse", params, {"iq": iq, "index_k": index_k} | batch, {"scores": scores["lse"].astype(np.float32)})

    lists = np.full((2, rows, 3), -1, np.int32)
    for h, t in np.ndindex(2, rows):
        if where[t]:
            lists[h, t] = padded_list(msa_choose(scores["max"][h, t], where[t][3], 3, 1, 1), 3)
    params = {"block_size": block, "index_scale": 0.5, "topk": 3, "init_blocks": 1}
    write(folder, "msa_score_select", "integers", params, {"iq": iq, "index_k": index_k} | batch, {"blocks": lists})

    ranked = rng.integers(-2, 3, (4, rows, max_pages)).astype(np.float32)
    ranked[rng.random(ranked.shape) < 0.2] = np.nan
    ranked[rng.random(ranked.shape) < 0.1] = INF
    merged = np.full((rows, 2, 4), -1, np.int32)
    for t, g in np.ndindex(rows, 2):
        if where[t]:
            parts = [msa_choose(ranked[h, t], where[t][3], 2, 0, 1) for h in (2 * g, 2 * g + 1)]
            merged[t, g] = padded_list(sorted(set(parts[0] + parts[1])), 4)
    params = {"block_size": block, "topk": 2, "num_kv_heads": 2, "index_reduce": "union", "blocks_layout": "row_major"}
    inputs = {"scores": ranked, "kv_len": kv_len, "q_indptr": q_indptr}
    write(folder, "msa_select_blocks", "union", params, inputs, {"blocks": merged})

    q, k, v = (Bf16(rng.normal(size=shape)) for shape in ((rows, 4, 16), (pages * block, 2, 16), (pages * block, 2, 16)))
    blocks, sink = rng.integers(-1, 7, (2, rows, 4)).astype(np.int32), rng.normal(size=4).astype(np.float32)
    out, lse = np.zeros((rows, 4, 16)), np.full((rows, 4), -INF)
    for t, h in np.ndindex(rows, 4):
        wanted = sorted({n for n in blocks[h // 2, t] if where[t] and 0 <= n <= where[t][3]})
        seen = [msa_visible(where[t], table, n, block, pages) for n in wanted]
        seen = np.concatenate(seen) if seen else np.zeros(0, np.int64)
        if len(seen):
            out[t, h], lse[t, h], _ = attend(q.values[t, h], k.values[seen, h // 2], v.values[seen, h // 2], 0.25, 0, sink[h], -INF)
    inputs = {"q": q, "k_pool": k, "v_pool": v, "blocks": blocks, "sink": sink} | batch
    write(folder, "msa_attend", "bf16", {"block_size": block}, inputs, {"out": Bf16(out), "lse": lse.astype(np.float32)})


def main():
    root = pathlib.Path(__file__).resolve().parents[1]
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else root / "tests" / "golden"
    folder.mkdir(parents=True, exist_ok=True)
    makers = (cache_cases, batch_cases, index_cases, sparse_cases, mha_cases, merge_cases, mla_input_cases, kda_cases,
              dense_mla_cases, msa_cases, swa_cases, swa_decode_cases)
    for number, make in enumerate(makers):
        make(folder, np.random.default_rng(number))
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    print(f"{len(sizes)} files, {sum(sizes)} bytes in {folder}")


if __name__ == "__main__":
    main()
