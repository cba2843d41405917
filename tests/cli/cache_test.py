"""fovea run: pack_rows, unpack_rows and move_rows, byte by byte."""

import struct

from support import CommandLineTest, Tensor, bf16_from_float


def i32(*values):
    return Tensor("I32", [len(values)], values)


def floats(data):
    return list(struct.unpack(f"<{len(data) // 4}f", bytes(data)))


def source(*rows):
    return Tensor("BF16", [len(rows), len(rows[0])], [value for row in rows for value in row])


FILL = 0xAB


def pool(pages, page_bytes):
    return Tensor("U8", [pages, page_bytes], [FILL] * (pages * page_bytes))


V32 = {"row_format": "v32", "page_size": 2}
I132_READ = {"row_format": "i132", "page_size": 2}  # readers need no scale mode
F576 = {"row_format": "f576", "page_size": 1}
I132 = {"row_format": "i132", "page_size": 2, "scale_mode": "fp32"}


class PackTest(CommandLineTest):
    def pack(self, src, slots, into, params):
        result, out = self.run_operator("pack_rows", {"src": src, "slots": i32(*slots), "pool": into}, params)
        self.expect(result, 0)
        self.assertEqual(set(out), {"pool"})
        self.assertEqual((out["pool"].dtype, out["pool"].shape), (into.dtype, into.shape))
        return list(out["pool"].values)

    # Tile maxima 896, 900, 0 and 448; the rope part counts up.
    V32_ROW = [896.0] + [0.0] * 127 + [900.0] + [448.0] * 127 + [0.0] * 128 + [448.0, 1.0] * 64 + [float(i) for i in range(64)]

    def check_v32(self, scale_mode, scales, second_code):
        got = self.pack(source(self.V32_ROW), [3], pool(2, 1320), V32 | scale_mode)
        row = got[1320 + 656 : 1320 + 1312]
        self.assertEqual(row[0], 0x7E if scales[0] == 2 else None)  # 448
        self.assertEqual(row[128], second_code)
        self.assertEqual(row[256:384], [0] * 128)
        self.assertEqual(row[384:386], [0x7E, 0x38])  # 448 and 1
        for found, expected in zip(floats(row[512:528]), scales):
            self.assertAlmostEqual(found, expected, places=6)
        self.assertEqual(bytes(row[528:]), struct.pack("<64H", *(bf16_from_float(float(i)) for i in range(64))))
        untouched = got[: 1320 + 656] + got[1320 + 1312 :]
        self.assertEqual(set(untouched), {FILL})

    def test_v32_with_fp32_scales(self):
        self.check_v32({}, [2, 900 / 448, 1, 1], 0x7E)

    def test_v32_with_powers_of_two(self):
        self.check_v32({"scale_mode": "pow2"}, [2, 4, 2**-13, 1], 0x76)  # 900 / 4 = 225 rounds to 224

    def test_i132_keeps_values_first_and_scales_last(self):
        got = self.pack(source([448.0] * 128, [-896.0] + [1.0] * 127), [1, 0], pool(1, 300), I132)
        self.assertEqual(got[128:256], [0x7E] * 128)
        self.assertEqual((got[0], got[1]), (0xFE, 0x30))  # -448, 0.5
        self.assertEqual(floats(got[256:264]), [2.0, 1.0])
        self.assertEqual(set(got[264:]), {FILL})

    def test_bf16_rows_in_bytes_and_as_values(self):
        src = source([1.5, -2.0], [3.0, 4.0], [5.0, 6.0])
        got = self.pack(src, [2, -1, 0], pool(2, 9), {"row_format": "bf16", "page_size": 2})
        self.assertEqual(struct.unpack("<2H", bytes(got[9:13])), (bf16_from_float(1.5), bf16_from_float(-2.0)))
        self.assertEqual(struct.unpack("<2H", bytes(got[0:4])), (bf16_from_float(5.0), bf16_from_float(6.0)))
        values = Tensor("BF16", [3, 2], [0.5] * 6)
        self.assertEqual(self.pack(src, [2, -1, 3], values, {"row_format": "bf16"}), [0.5, 0.5, 0.5, 0.5, 1.5, -2.0])

    def test_f576_divides_by_the_scale_of_the_cache(self):
        row = [1.0, -0.5, 300.0, 1e4, -1e4, 0.0] + [2.0] * 570
        for k_scale, codes in ((1, [0x38, 0xB0, 0x79, 0x7E, 0xFE, 0, 0x40]), (0.5, [0x40, 0xB8, 0x7E, 0x7E, 0xFE, 0, 0x48])):
            got = self.pack(source(row), [3], pool(2, 2 * 576 + 1), F576 | {"page_size": 2, "k_scale": k_scale})
            begin = 2 * 576 + 1 + 576
            self.assertEqual(got[begin : begin + 7], codes)
            self.assertEqual(set(got[begin + 7 : begin + 576]), {codes[-1]})
            self.assertEqual(set(got[:begin] + got[begin + 576 :]), {FILL})

    def test_r512_divides_by_the_stored_scale(self):
        row = [448.0, 3.0, -448.0] + [0.0] * 509  # bf16(450 / 448) = 1.0078125
        for kind, first, scale in (("F32", 448.0, 1.0), ("BF16", 450.0, 1.0078125)):
            tensors = {"src": source([first] + row[1:]), "slots": i32(2), "pool": pool(2, 1024)}
            tensors["inv_scale"] = Tensor(kind, [4, 1], [7.0] * 4)
            result, out = self.run_operator("pack_rows", tensors, {"row_format": "r512", "page_size": 2})
            self.expect(result, 0)
            self.assertEqual(list(out["inv_scale"].values), [7.0, 7.0, scale, 7.0])
            self.assertEqual(list(out["pool"].values[1024:1027]), [0x7E, 0x44, 0xFE])
            self.assertEqual(set(out["pool"].values[:1024]), {FILL})
            again = {"pool": out["pool"], "slots": i32(2, -1), "inv_scale": out["inv_scale"]}
            result, out = self.run_operator("unpack_rows", again, {"row_format": "r512", "page_size": 2})
            self.expect(result, 0)
            back = list(out["out"].values)
            self.assertEqual(back[512:], [0.0] * 512)
            if kind == "F32":
                self.assertEqual(back[:512], row)
        self.expect_refused("pack_rows", tensors | {"inv_scale": Tensor("F32", [3, 1])}, {"row_format": "r512", "page_size": 2}, "inv_scale")

    def test_rope_in_a_tensor_of_its_own(self):
        latent, rope = [float(i % 7) for i in range(512)], [float(i) for i in range(64)]
        for row_format, row_bytes in (("bf16", 1152), ("v32", 656), ("f576", 576)):
            params = {"row_format": row_format, "page_size": 1}
            whole = self.pack(source(latent + rope), [1], pool(2, row_bytes), params)
            tensors = {"src": source(latent), "rope": source(rope), "slots": i32(1), "pool": pool(2, row_bytes)}
            result, out = self.run_operator("pack_rows", tensors, params)
            self.expect(result, 0)
            self.assertEqual(list(out["pool"].values), whole)
            self.expect_refused("pack_rows", tensors | {"rope": source([1.0] * 63)}, params, "rope", "64")
            self.expect_refused("pack_rows", tensors | {"rope": source(rope, rope)}, params, "rope", "N = 1")
            self.expect_refused("pack_rows", tensors | {"src": source(latent + rope)}, params, "576")
        tensors = {"src": source([1.0] * 128), "rope": source(rope), "slots": i32(0), "pool": pool(1, 264)}
        self.expect_refused("pack_rows", tensors, I132, "rope", "i132")

    def test_slots_outside_the_pool_write_nothing(self):
        got = self.pack(source([1.0] * 128), [2147483647], pool(2, 264), I132)
        self.assertEqual(set(got), {FILL})

    def test_no_rows(self):
        self.assertEqual(set(self.pack(Tensor("BF16", [0, 128]), [], pool(1, 264), I132)), {FILL})

    def test_what_is_refused(self):
        good = {"src": source([1.0] * 128), "slots": i32(0), "pool": pool(1, 264)}
        self.expect_refused("pack_rows", good, {}, "row_format is missing")
        self.expect_refused("pack_rows", good, {"row_format": "i132", "page_size": 2}, "scale_mode is missing")
        self.expect_refused("pack_rows", good, I132 | {"scale_mode": "fp16"}, "scale_mode", "pow2")
        self.expect_refused("pack_rows", good, {"row_format": "i132", "scale_mode": "fp32"}, "page_size is missing")
        for page_size in (0, -1, 257, 1 << 62):
            self.expect_refused("pack_rows", good, I132 | {"page_size": page_size}, "page_size")
        self.expect_refused("pack_rows", good, I132 | {"page_size": 3}, "pool", "396")
        self.expect_refused("pack_rows", good, V32, "width", "576")
        self.expect_refused("pack_rows", good | {"slots": i32(0, 1)}, I132, "slots", "N = 1")
        self.expect_refused("pack_rows", good | {"src": Tensor("F32", [1, 128])}, I132, "src = f32")
        self.expect_refused("pack_rows", good | {"inv_scale": Tensor("F32", [2, 1])}, I132, "inv_scale")
        rows = {"src": source([1.0] * 576), "slots": i32(0), "pool": pool(1, 576)}
        for k_scale in (0, -1, "1"):
            self.expect_refused("pack_rows", rows, F576 | {"k_scale": k_scale}, "k_scale")
        self.expect_refused("pack_rows", good, F576, "width", "576")


class MoveTest(CommandLineTest):
    def move(self, in_pool, src_slots, dst_slots, params):
        tensors = {"pool": in_pool, "src_slots": i32(*src_slots), "dst_slots": i32(*dst_slots)}
        result, out = self.run_operator("move_rows", tensors, params)
        self.expect(result, 0)
        self.assertEqual(set(out), {"pool"})
        return list(out["pool"].values)

    def test_codes_and_scales_of_i132_move_separately(self):
        pages = Tensor("U8", [2, 265], [i % 251 for i in range(530)])
        got = self.move(pages, [0, 3], [3, 0], I132_READ)
        expected = list(pages.values)
        for first, second, size in ((0, 265 + 128, 128), (256, 265 + 256 + 4, 4)):
            for i in range(size):
                expected[first + i], expected[second + i] = pages.values[second + i], pages.values[first + i]
        self.assertEqual(got, expected)

    def test_chains_and_slots_outside_the_pool(self):
        values = Tensor("BF16", [4, 2], [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5])
        params = {"row_format": "bf16"}
        self.assertEqual(self.move(values, [1, 2, 3], [0, 1, 2], params), [1, 1.5, 2, 2.5, 3, 3.5, 3, 3.5])
        self.assertEqual(self.move(values, [-1, 1, 4, 0], [0, 9, 1, 3], params), [0, 0.5, 1, 1.5, 2, 2.5, 0, 0.5])
        self.assertEqual(self.move(values, [], [], params), list(values.values))
        packed = Tensor("U8", [2, 8], values.to_bytes())
        got = self.move(packed, [3], [0], params | {"page_size": 2, "width": 2})
        self.assertEqual(got, list(packed.values[12:16]) + list(packed.values[4:]))

    def test_what_is_refused(self):
        good = {"pool": pool(1, 1312), "src_slots": i32(0), "dst_slots": i32(1)}
        self.expect_refused("move_rows", good | {"dst_slots": i32(0, 1)}, V32, "dst_slots", "N = 1")
        self.expect_refused("move_rows", good, {"row_format": "v32"}, "page_size is missing")
        self.expect_refused("move_rows", good, {"row_format": "bf16", "page_size": 2}, "width is missing")
        self.expect_refused("move_rows", good, V32 | {"page_size": 3}, "pool", "1968")
        self.expect_refused("move_rows", good, V32 | {"width": 512}, "width", "576")
        self.expect_refused("move_rows", good | {"slots": i32(0)}, V32, "unknown tensor 'slots'")


class UnpackTest(CommandLineTest):
    def unpack(self, from_pool, slots, params):
        result, out = self.run_operator("unpack_rows", {"pool": from_pool, "slots": i32(*slots)}, params)
        self.expect(result, 0)
        self.assertEqual(set(out), {"out"})
        width = out["out"].shape[1]
        values = list(out["out"].values)
        return [values[i * width : (i + 1) * width] for i in range(len(slots))]

    def test_i132(self):
        page = [0x38] * 128 + [0xB8] * 128 + list(struct.pack("<2f", 3.0, 0.5)) + [FILL]
        rows = self.unpack(Tensor("U8", [1, 265], page), [1, 0, -1, 2, 1], I132)
        self.assertEqual([set(row) for row in rows], [{-0.5}, {3.0}, {0.0}, {0.0}, {-0.5}])
        params = {"row_format": "i132", "page_size": 2}  # readers need no scale mode
        self.assertEqual(set(self.unpack(Tensor("U8", [1, 265], page), [0], params)[0]), {3.0})

    def test_f576(self):
        page = Tensor("U8", [1, 576], [0x38] * 575 + [0xB0])
        for k_scale in (1.0, 0.5, 2.0):
            row = self.unpack(page, [0, 1], F576 | {"k_scale": k_scale})
            self.assertEqual((set(row[0][:575]), row[0][575], set(row[1])), ({k_scale}, -0.5 * k_scale, {0.0}))

    def test_bf16(self):
        values = Tensor("BF16", [2, 3], [1, 2, 3, 4, 5, 6])
        self.assertEqual(self.unpack(values, [1, 7, 0], {"row_format": "bf16"}), [[4, 5, 6], [0, 0, 0], [1, 2, 3]])
        packed = Tensor("U8", [1, 12], values.to_bytes())
        params = {"row_format": "bf16", "page_size": 2, "width": 3}
        self.assertEqual(self.unpack(packed, [1], params), [[4, 5, 6]])

    def test_what_is_refused(self):
        good = {"pool": pool(1, 1312), "slots": i32(0)}
        self.expect_refused("unpack_rows", good, {"row_format": "bf16", "page_size": 2}, "width is missing")
        self.expect_refused("unpack_rows", good, V32 | {"width": 512}, "width", "576")
        self.expect_refused("unpack_rows", good, V32 | {"width": -1}, "width")
        self.expect_refused("unpack_rows", good, V32 | {"page_size": 3}, "pool", "1968")
        self.expect_refused("unpack_rows", good | {"src": Tensor("U8", [1])}, V32, "unknown tensor 'src'")
