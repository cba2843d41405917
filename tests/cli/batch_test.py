"""fovea run: metadata_refresh, paged_schedule and split_schedule on the worked examples of the specification."""

from support import CommandLineTest, Tensor

W = 12


def i32(*values):
    return Tensor("I32", [len(values)], values)


def table():
    """Request A owns pages 2, 5, 7 and request B pages 3, 9 of four tokens; row 0 belongs to nobody."""
    rows = [0] * W
    for pages in ([2, 5, 7], [3, 9, 0]):
        rows += [page * 4 + i for page in pages for i in range(4)]
    return Tensor("I32", [3, W], rows)


class MetadataTest(CommandLineTest):
    def refresh(self, mode, seq_len, ext_len=None, params=None, **tensors):
        inputs = {"seq_len": i32(*seq_len), "pool_row": i32(*range(1, 1 + len(seq_len))), "req_to_token": table()}
        if ext_len is not None:
            inputs["ext_len"] = i32(*ext_len)
        inputs |= tensors
        values = {"mode": mode, "topk": 6, "page_size": 4} | (params or {})
        result, out = self.run_operator("metadata_refresh", inputs, values)
        self.expect(result, 0)
        return {name: list(tensor.values) for name, tensor in out.items()}, out

    def expect_fields(self, fields, **expected):
        for name, values in expected.items():
            self.assertEqual(fields[name], values, name)

    def test_extend_with_prefix(self):
        fields, out = self.refresh("extend", [10, 4], [3, 2], {"transform": "ragged"}, prefix_len=i32(7, 2))
        self.expect_fields(
            fields, kv_len=[10, 4], kv_indptr=[0, 10, 14], q_indptr=[0, 3, 5], max_q_len=[3], max_kv_len=[10],
            row_len=[8, 9, 10, 3, 4], topk_length=[6, 6, 6, 3, 4], topk_indptr=[0, 6, 12, 18, 21, 25],
            k_start=[0, 0, 0, 10, 10], k_end=[8, 9, 10, 13, 14], row_to_request=[0, 0, 0, 1, 1],
            row_offset=[0, 0, 0, 10, 10], ext_len=[3, 2])  # fmt: skip
        self.assertEqual(out["page_table"].shape, [2, 3])
        self.assertEqual(fields["page_table"][:4], [2, 5, 7, 3])
        self.assertNotIn("schedule", fields)

    def test_extend_without_prefix(self):
        fields, _ = self.refresh("extend", [5, 3], [5, 3])
        self.expect_fields(
            fields, kv_indptr=[0, 5, 8], q_indptr=[0, 5, 8], max_q_len=[5], max_kv_len=[5],
            row_len=[1, 2, 3, 4, 5, 1, 2, 3], topk_length=[1, 2, 3, 4, 5, 1, 2, 3],
            topk_indptr=[0, 1, 3, 6, 10, 15, 16, 18, 21], k_start=[0] * 5 + [5] * 3, k_end=[1, 2, 3, 4, 5, 6, 7, 8],
            row_to_request=[0] * 5 + [1] * 3)  # fmt: skip
        self.assertNotIn("row_offset", fields)

    def test_mixed(self):
        fields, _ = self.refresh("mixed", [10, 4], [1, 2])
        self.expect_fields(fields, q_indptr=[0, 1, 3], row_len=[10, 3, 4], topk_length=[6, 3, 4], k_start=[0, 10, 10],
                           k_end=[10, 13, 14], row_to_request=[0, 1, 1])  # fmt: skip

    def test_decode(self):
        fields, out = self.refresh("decode", [10, 4])
        self.expect_fields(fields, kv_len=[10, 4], row_len=[10, 4], q_indptr=[0, 1, 2], kv_indptr=[0, 10, 14],
                           max_q_len=[1], max_kv_len=[10], topk_length=[6, 4], topk_indptr=[0, 6, 10], ext_len=[1, 1])  # fmt: skip
        self.assertEqual(out["schedule"].shape, [65, 2])
        self.assertNotIn("k_start", fields)

    def test_padded_decode(self):
        fields, _ = self.refresh("decode", [10, 4], params={"padded_rows": 4})
        self.expect_fields(fields, topk_length=[6, 4, 0, 0], topk_indptr=[0, 6, 10, 10, 10], row_to_request=[0, 1, -1, -1],
                           row_len=[10, 4])  # fmt: skip

    def test_decode_of_a_later_draft_step(self):
        fields, _ = self.refresh("decode", [9, 3], params={"kv_len_delta": 1})
        self.expect_fields(fields, kv_len=[10, 4], row_len=[10, 4])

    def test_idle_without_requests(self):
        fields, _ = self.refresh("idle", [], params={"padded_rows": 2})
        self.expect_fields(fields, kv_len=[], kv_indptr=[0], q_indptr=[0], max_kv_len=[0], topk_length=[0, 0],
                           topk_indptr=[0, 0, 0], row_to_request=[-1, -1])  # fmt: skip

    def test_target_verify(self):
        fields, _ = self.refresh("target_verify", [7, 2], params={"rows_per_request": 3})
        self.expect_fields(fields, kv_len=[10, 5], kv_indptr=[0, 10, 15], q_indptr=[0, 3, 6], max_q_len=[3],
                           max_kv_len=[10], row_to_request=[0, 0, 0, 1, 1, 1], row_len=[8, 9, 10, 3, 4, 5],
                           topk_length=[6, 6, 6, 3, 4, 5], topk_indptr=[0, 6, 12, 18, 21, 25, 30], ext_len=[3, 3])  # fmt: skip

    def test_draft_extend(self):
        fields, _ = self.refresh("draft_extend", [10, 4], [3, 1])
        self.expect_fields(fields, kv_len=[10, 4], q_indptr=[0, 3, 4], row_to_request=[0, 0, 0, 1], row_len=[8, 9, 10, 4],
                           topk_length=[6, 6, 6, 4], topk_indptr=[0, 6, 12, 18, 22])  # fmt: skip
        fields, _ = self.refresh("draft_extend_v2", [10, 5], params={"rows_per_request": 3})
        self.expect_fields(fields, kv_len=[10, 5], row_len=[8, 9, 10, 3, 4, 5])

    def test_split_parts_ask_for_the_split_plan(self):
        fields, _ = self.refresh("decode", [10, 4])
        self.assertNotIn("split_schedule", fields)
        # Four rows of one block, two of them padding: cost 24, two parts of 12 + 5 hold two rows each.
        fields, out = self.refresh("decode", [10, 4], params={"padded_rows": 4, "split_parts": 2})
        self.assertEqual(out["split_schedule"].shape, [2, 8])
        self.expect_fields(fields, split_schedule=[0, 1, 0, 1, 0, 0, 0, 0, 2, 3, 0, 1, 0, 0, 0, 0],
                           split_indptr=[0, 1, 2, 3, 4])  # fmt: skip

    def test_lengths_are_device_contents(self):
        fields, _ = self.refresh("decode", [2147483647, -5])
        self.expect_fields(fields, kv_len=[W, 0], topk_length=[6, 0])

    def test_what_is_refused(self):
        inputs = {"seq_len": i32(4), "pool_row": i32(1), "req_to_token": table()}
        good = {"mode": "decode", "topk": 6, "page_size": 4}
        cases = [
            ({"mode": "encode"}, "params.mode = 'encode'"),
            ({"topk": 0}, "topk"),
            ({"page_size": 0}, "page_size"),
            ({"page_size": 257}, "page_size"),
            ({"page_size": -4}, "page_size"),
            ({"workers": -1}, "workers"),
            ({"split_parts": -1}, "split_parts"),
            ({"mode": "target_verify"}, "rows_per_request is missing"),
            ({"mode": "target_verify", "rows_per_request": 0}, "rows_per_request"),
            ({"mode": "target_verify", "rows_per_request": -3}, "rows"),
            ({"mode": "extend"}, "ext_len is missing"),
            ({"padded_rows": -1}, "padded_rows"),
            ({"kv_len_delta": 1 << 40}, "kv_len_delta"),
            ({"mode": "target_verify", "rows_per_request": 2, "kv_len_delta": 1}, "kv_len_delta"),
        ]
        for change, fragment in cases:
            self.expect_refused("metadata_refresh", inputs, good | change, fragment)
        self.expect_refused("metadata_refresh", inputs | {"seq_len": i32(4, 4, 4)}, good | {"padded_rows": 2}, "R")
        self.expect_refused("metadata_refresh", inputs | {"seq_len": Tensor("I64", [1])}, good, "seq_len = i64 [1]")


class ScheduleTest(CommandLineTest):
    def schedule(self, lengths, params):
        result, out = self.run_operator("paged_schedule", {"row_len": i32(*lengths)}, params)
        self.expect(result, 0)
        values = out["schedule"].values
        return list(zip(values[::2], values[1::2]))

    def test_the_example(self):
        self.assertEqual(self.schedule([1000, 300, 700], {"workers": 4}), [(0, 0), (0, 2), (1, 0), (2, 0), (3, 0)])

    def test_the_default_is_64_workers(self):
        self.assertEqual(len(self.schedule([5], {})), 65)

    def test_groups_take_their_last_row(self):
        self.assertEqual(
            self.schedule([1, 1000, 1, 300], {"workers": 3, "rows_per_group": 2}), self.schedule([1000, 300], {"workers": 3})
        )

    def test_without_work_every_start_is_the_first_row(self):
        self.assertEqual(self.schedule([0, -7], {"workers": 2}), [(0, 0), (0, 0), (2, 0)])
        self.assertEqual(self.schedule([], {"workers": 1}), [(0, 0), (0, 0)])

    def test_what_is_refused(self):
        lengths = {"row_len": i32(1, 2, 3)}
        self.expect_refused("paged_schedule", lengths, {"workers": 0}, "workers")
        self.expect_refused("paged_schedule", lengths, {"workers": "64"}, "params.workers", "string")
        self.expect_refused("paged_schedule", lengths, {"workers": 1.5}, "params.workers", "1.5")
        self.expect_refused("paged_schedule", lengths, {"rows_per_group": 2}, "rows_per_group")
        self.expect_refused("paged_schedule", {}, {}, "row_len is missing")

    def test_an_output_out_of_proportion_is_refused(self):
        self.expect_refused("paged_schedule", {"row_len": i32(1)}, {"workers": 1 << 46}, "workers")


class ContextSplitTest(CommandLineTest):
    ROUND_ROBIN = ["rank_rows", "row_len", "selected", "ext_len", "kv_len", "kv_indptr", "q_indptr", "k_start", "k_end",
                   "row_to_request", "row_offset"]  # fmt: skip

    def split(self, seq_len, ext_len, params, **tensors):
        inputs = {"seq_len": i32(*seq_len), "ext_len": i32(*ext_len)} | tensors
        result, out = self.run_operator("context_split", inputs, params)
        self.expect(result, 0, "context_split: implementation host")
        return {name: list(tensor.values) for name, tensor in out.items()}

    def round_robin(self, ext_len, ranks, rank, **params):
        return self.split(ext_len, ext_len, {"ranks": ranks, "rank": rank, "scheme": "round_robin"} | params)

    def test_the_example_of_two_ranks(self):
        out = self.round_robin([5, 3], 2, 1)
        self.assertEqual(out, {
            "rank_rows": [1, 3, 5, 7], "row_len": [2, 4, 1, 3], "selected": [0, 1], "ext_len": [2, 2], "kv_len": [5, 3],
            "kv_indptr": [0, 5, 8], "q_indptr": [0, 2, 4], "k_start": [0, 0, 5, 5], "k_end": [2, 4, 6, 8],
            "row_to_request": [0, 0, 1, 1], "row_offset": [0, 0, 5, 5]})  # fmt: skip

    def test_fresh_keys_are_those_of_all_requests(self):
        self.assertEqual(self.round_robin([1, 1, 3], 4, 0)["row_offset"], [0, 1])
        self.assertEqual(self.round_robin([1, 1, 3], 4, 0, extend_kv_source="fresh")["row_offset"], [0, 2])

    def test_a_rank_without_rows(self):
        out = self.round_robin([1], 4, 2)
        self.assertEqual(out, {name: [0] if name in ("kv_indptr", "q_indptr") else [] for name in self.ROUND_ROBIN})

    def test_zigzag(self):
        out = self.split([10], [10], {"ranks": 2, "rank": 0, "scheme": "zigzag"})
        self.assertEqual(out, {"rank_rows": [0, 1, 2, 8, 9], "row_len": [1, 2, 3, 9, 10], "block_len": [3, 3, 2, 2],
                               "kv_len": [3, 10]})  # fmt: skip

    def test_the_prefix_may_be_given_and_must_agree(self):
        params = {"ranks": 2, "rank": 0, "scheme": "round_robin"}
        self.assertEqual(self.split([9], [2], params, prefix_len=i32(7))["row_len"], [8])
        inputs = {"seq_len": i32(4, 9), "ext_len": i32(4, 2), "prefix_len": i32(0, 6)}
        self.expect_refused("context_split", inputs, params, "request 1: prefix_len = 6, expected seq_len - ext_len = 7")

    def test_what_is_refused(self):
        inputs = {"seq_len": i32(9), "ext_len": i32(2)}
        good = {"ranks": 2, "rank": 0, "scheme": "round_robin"}
        cases = [
            ({"ranks": 0}, "ranks = 0"),
            ({"ranks": 1 << 33}, "params.ranks"),
            ({"rank": 2}, "rank = 2, expected 0..1"),
            ({"scheme": "stripes"}, "params.scheme"),
            ({"scheme": "zigzag"}, "zigzag over 2 ranks with 2 rows"),
            ({"extend_kv_source": "disk"}, "params.extend_kv_source"),
            ({"topk": 4}, "unknown parameter 'topk'"),
        ]
        for change, fragment in cases:
            self.expect_refused("context_split", inputs, good | change, fragment)
        self.expect_refused("context_split", {"seq_len": i32(9), "ext_len": i32(10)}, good, "request 0: seq_len = 9")
        self.expect_refused("context_split", inputs | {"pool_row": i32(0)}, good, "unknown tensor 'pool_row'")
        result, _ = self.run_operator("context_split", inputs, good, ["--impl", "ref"])
        self.expect(result, 2, "without implementations to choose from")


class SplitScheduleTest(CommandLineTest):
    def schedule(self, lengths, params):
        result, out = self.run_operator("split_schedule", {"topk_length": i32(*lengths)}, params)
        self.expect(result, 0)
        values = out["split_schedule"].values
        return [tuple(values[i : i + 8]) for i in range(0, len(values), 8)], list(out["split_indptr"].values)

    def test_the_example(self):
        parts, indptr = self.schedule([1000, 300, 700], {"parts": 4})
        self.assertEqual(parts, [(0, 0, 0, 12, 0, 1, 1, 0), (0, 1, 12, 3, 1, 1, 1, 0), (1, 2, 3, 5, 1, 1, 1, 0),
                                 (2, 2, 5, 11, 1, 1, 1, 0)])  # fmt: skip
        self.assertEqual(indptr, [0, 2, 4, 6])

    def test_the_default_is_64_parts(self):
        self.assertEqual(len(self.schedule([5], {})[0]), 64)

    def test_empty_rows_keep_a_block_and_no_rows_no_part(self):
        self.assertEqual(self.schedule([0, -7], {"parts": 1}), ([(0, 1, 0, 1, 0, 0, 0, 0)], [0, 1, 2]))
        self.assertEqual(self.schedule([], {"parts": 1}), ([(0, -1, 0, 0, 0, 0, 0, 0)], [0]))

    def test_what_is_refused(self):
        lengths = {"topk_length": i32(1, 2, 3)}
        self.expect_refused("split_schedule", lengths, {"parts": 0}, "parts")
        self.expect_refused("split_schedule", lengths, {"parts": 1.5}, "params.parts", "1.5")
        self.expect_refused("split_schedule", lengths, {"workers": 4}, "workers")
        self.expect_refused("split_schedule", {}, {}, "topk_length is missing")
        self.expect_refused("split_schedule", lengths, {"parts": 1 << 46}, "parts")


class MetadataCheckTest(CommandLineTest):
    GOOD = {"mode": "decode", "page_size": 4, "capacity": 64}

    def inputs(self, **tensors):
        return {"seq_len": i32(10, 4), "pool_row": i32(1, 2), "req_to_token": table()} | tensors

    def check(self, inputs, params=None):
        result, out = self.run_operator("metadata_check", inputs, self.GOOD | (params or {}))
        self.expect(result, 0)
        self.assertEqual(list(out), ["error_word"])
        return list(out["error_word"].values)

    def test_a_good_batch(self):
        indices = Tensor("I32", [2, 3], [8, 9, 31, 12, -1, 13])
        inputs = self.inputs(out_cache_loc=i32(29, 15), topk_indices=indices)
        self.assertEqual(self.check(inputs), [0] * 8)

    def test_the_smallest_fault_wins(self):
        faults = self.inputs(out_cache_loc=i32(64, -1))
        self.assertEqual(self.check(faults), [9, 0, 0, 64, 64, 1, 0, 0])
        self.assertEqual(self.check(faults, {"capacity": 29}), [7, 0, 9, 29, 29, 1, 0, 0])
        self.assertEqual(self.check(faults | {"pool_row": i32(1, 3)}), [6, 1, 0, 3, 3, 1, 0, 0])
        self.assertEqual(self.check(faults | {"seq_len": i32(-1, -2)}), [1, 0, 0, -1, 0, 2, 0, 0])

    def test_modes_give_rows(self):
        extend = {"mode": "extend", "max_rows": 5}
        self.assertEqual(self.check(self.inputs(ext_len=i32(3, 2)), extend), [0] * 8)
        self.assertEqual(self.check(self.inputs(ext_len=i32(3, 3)), extend), [5, 1, 0, 6, 5, 1, 0, 0])
        self.assertEqual(self.check(self.inputs(ext_len=i32(3, 5)), extend), [2, 1, 0, 5, 4, 1, 0, 0])
        verify = {"mode": "target_verify", "rows_per_request": 3}
        self.assertEqual(self.check(self.inputs(), verify), [3, 0, 0, 13, 12, 1, 0, 0])
        self.assertEqual(self.check(self.inputs(), {"kv_len_delta": 2}), [0] * 8)

    def test_what_is_refused(self):
        cases = [
            ({"mode": "encode"}, "params.mode = 'encode'"),
            ({"page_size": 0}, "page_size"),
            ({"capacity": -1}, "capacity = -1"),
            ({"capacity": 1 << 31}, "capacity"),
            ({"mode": "target_verify"}, "rows_per_request is missing"),
            ({"mode": "extend"}, "ext_len is missing"),
            ({"max_rows": 1}, "rows"),
            ({"mode": "target_verify", "rows_per_request": 2, "kv_len_delta": 1}, "kv_len_delta"),
            ({"topk": 6}, "unknown parameter 'topk'"),
        ]
        for change, fragment in cases:
            self.expect_refused("metadata_check", self.inputs(), self.GOOD | change, fragment)
        self.expect_refused("metadata_check", self.inputs(out_cache_loc=i32(1)), self.GOOD, "out_cache_loc = i32 [1]")
