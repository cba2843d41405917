#include "fovea/safetensors.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "fovea/error.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"

namespace fovea {
namespace {

// A file from a header text and `data_bytes` bytes 0, 1, 2, ...
std::string file_bytes(const std::string& header, size_t data_bytes) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> (8 * i) & 0xFF);
  bytes += header;
  for (size_t i = 0; i < data_bytes; ++i) bytes += static_cast<char>(i);
  return bytes;
}

std::string refusal_of_bytes(const std::string& bytes) {
  try {
    parse_safetensors(bytes, "x.safetensors");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo) << error.what();
    EXPECT_EQ(std::string(error.what()).find("io: x.safetensors: "), 0u) << error.what();
    return error.what();
  }
  return "accepted";
}

std::string refusal(const std::string& header, size_t data_bytes) {
  return refusal_of_bytes(file_bytes(header, data_bytes));
}

void expect_refused(const std::string& header, size_t data_bytes, const std::string& fragment) {
  const std::string text = refusal(header, data_bytes);
  EXPECT_NE(text.find(fragment), std::string::npos) << header << "\n" << text;
}

TensorFile sample_file() {
  TensorFile file;
  file.metadata["params"] = R"({"softmax_scale": 0.5})";
  test::Rng rng(1);
  for (const DType dtype : {DType::kU8, DType::kI32, DType::kI64, DType::kF32, DType::kBf16}) {
    const TensorView view = file.tensors.add(to_string(dtype), dtype, {3, 5});
    auto* bytes = static_cast<uint8_t*>(view.data);
    for (size_t i = 0; i < 15 * size_of(dtype); ++i) bytes[i] = static_cast<uint8_t>(rng.next());
  }
  file.tensors.add("empty", DType::kF32, {0, 7});
  file.tensors.add("scalar", DType::kI32, std::span<const int64_t>());
  file.tensors.add("deep", DType::kU8, {1, 2, 1, 2, 1});
  return file;
}

void expect_equal(const TensorFile& a, const TensorFile& b) {
  EXPECT_EQ(a.metadata, b.metadata);
  EXPECT_EQ(a.tensors.names(), b.tensors.names());
  for (const std::string& name : a.tensors.names()) {
    const ConstTensorView x = a.tensors.find(name), y = b.tensors.find(name);
    EXPECT_EQ(to_string(x), to_string(y)) << name;
    EXPECT_EQ(std::memcmp(x.data, y.data, static_cast<size_t>(x.num_elements()) * size_of(x.dtype)),
              0)
        << name;
  }
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = testing::TempDir() + "fovea-io-XXXXXX";
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = pattern;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  size_t count() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::string path_;
};

TEST(Safetensors, WhatIsWrittenReadsBackEqualFromMemoryAndFromDisk) {
  const TensorFile file = sample_file();
  expect_equal(parse_safetensors(format_safetensors(file), "memory"), file);
  const TemporaryFolder folder;
  const std::string path = folder.file("a.safetensors");
  write_safetensors(path, file);
  expect_equal(read_safetensors(path), file);
  // The same path again: the old file is replaced, and no other file is left.
  write_safetensors(path, TensorFile());
  EXPECT_EQ(read_safetensors(path).tensors.count(), 0u);
  EXPECT_EQ(folder.count(), 1u);
}

TEST(Safetensors, DataStartsAlignedAndTensorsTileIt) {
  const std::string bytes = format_safetensors(sample_file());
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), 8);
  EXPECT_EQ(header_bytes % 8, 0u);
  EXPECT_EQ(bytes.size(), 8 + header_bytes + 15 * (1 + 4 + 8 + 4 + 2) + 4 + 4);
}

TEST(Safetensors, TensorsMayStandInAnyOrderOfTheHeader) {
  const TensorFile file =
      parse_safetensors(file_bytes(R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},)"
                                   R"("a":{"data_offsets":[0,1],"shape":[1],"dtype":"U8"},)"
                                   R"("z":{"dtype":"F32","shape":[0],"data_offsets":[3,3]}}   )",
                                   3),
                        "memory");
  EXPECT_EQ(static_cast<const uint8_t*>(file.tensors.find("a").data)[0], 0);
  EXPECT_EQ(static_cast<const uint8_t*>(file.tensors.find("b").data)[1], 2);
  EXPECT_EQ(file.tensors.find("z").num_elements(), 0);
}

TEST(Safetensors, Float8CodesAreReadAsBytes) {
  const TensorFile file = parse_safetensors(
      file_bytes(R"({"q":{"dtype":"F8_E4M3","shape":[2,2],"data_offsets":[0,4]}})", 4), "memory");
  EXPECT_EQ(to_string(file.tensors.find("q")), "u8 [2, 2]");
}

TEST(Safetensors, HeaderLengthsOutsideTheFileAreRefused) {
  EXPECT_NE(refusal_of_bytes("").find("at least 8"), std::string::npos);
  EXPECT_NE(refusal_of_bytes("1234567").find("at least 8"), std::string::npos);
  EXPECT_NE(refusal_of_bytes(std::string(8, '\0')).find("not a safetensors file"),
            std::string::npos);
  EXPECT_NE(refusal_of_bytes(std::string("\x05\0\0\0\0\0\0\0{}  ", 12)).find("only 4 follow"),
            std::string::npos);
  EXPECT_NE(refusal_of_bytes(std::string(16, '\xFF')).find("at most 100000000"), std::string::npos);
  std::string huge("\x01\xE1\xF5\x05\0\0\0\0{}", 10);  // 100 000 001
  EXPECT_NE(refusal_of_bytes(huge).find("claims 100000001 bytes"), std::string::npos);
}

TEST(Safetensors, RangesThatOverlapLeaveGapsOrLeaveTheDataAreRefused) {
  const auto two = [](int a, int b, int c, int d) {
    const auto entry = [](const char* name, int begin, int end) {
      return std::string("\"") + name + R"(":{"dtype":"U8","shape":[)" +
             std::to_string(end - begin) + R"(],"data_offsets":[)" + std::to_string(begin) + "," +
             std::to_string(end) + "]}";
    };
    return "{" + entry("a", a, b) + "," + entry("b", c, d) + "}";
  };
  EXPECT_EQ(refusal(two(0, 4, 4, 8), 8), "accepted");
  expect_refused(two(0, 4, 3, 8), 8, "'a' and 'b' overlap at byte 3");
  expect_refused(two(0, 8, 2, 4), 8, "overlap");
  expect_refused(two(0, 4, 0, 4), 4, "overlap");
  expect_refused(two(0, 4, 5, 8), 8, "tensor 'b': bytes [4, 5) before it belong to no tensor");
  expect_refused(two(1, 4, 4, 8), 8, "bytes [0, 1)");
  expect_refused(two(0, 4, 4, 8), 9, "last 1 bytes");
  expect_refused(two(0, 4, 4, 9), 8, "tensor 'b': data_offsets [4, 9) end after the data");
  expect_refused(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[4,2]}})", 4, "reversed");
  expect_refused("{}", 1, "last 1 bytes");
}

TEST(Safetensors, BytesMustMatchDtypeAndShapeWithoutOverflow) {
  expect_refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4,
                 "tensor 'a': data_offsets [0, 4) hold 4 bytes, dtype and shape need 8");
  // 2^62 * 4 elements wrap to 0 in 64 bits.
  expect_refused(R"({"a":{"dtype":"U8","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", 0,
                 "more than 2^63");
  expect_refused(R"({"a":{"dtype":"I64","shape":[2305843009213693952,1],"data_offsets":[0,0]}})", 0,
                 "more than 2^63");
  expect_refused(R"({"a":{"dtype":"U8","shape":[0,9223372036854775807,2],"data_offsets":[0,0]}})",
                 0, "more than 2^63");
}

TEST(Safetensors, FieldsAreStrict) {
  const auto entry = [](const std::string& fields) { return R"({"a":{)" + fields + "}}"; };
  const std::string dtype = R"("dtype":"U8")", shape = R"("shape":[1])",
                    offsets = R"("data_offsets":[0,1])";
  EXPECT_EQ(refusal(entry(dtype + "," + shape + "," + offsets), 1), "accepted");
  expect_refused(entry(shape + "," + offsets), 1, "tensor 'a': dtype is missing");
  expect_refused(entry(dtype + "," + offsets), 1, "tensor 'a': shape is missing");
  expect_refused(entry(dtype + "," + shape), 1, "tensor 'a': data_offsets is missing");
  expect_refused(entry(R"("dtype":"F16",)" + shape + "," + offsets), 1,
                 "tensor 'a': dtype 'F16', expected BF16");
  expect_refused(entry(R"("dtype":7,)" + shape + "," + offsets), 1, "unexpected the number 7");
  expect_refused(entry(dtype + R"(,"shape":[-1],)" + offsets), 1, "-1");
  expect_refused(entry(dtype + R"(,"shape":[1.5],)" + offsets), 1, "1.5");
  expect_refused(entry(dtype + R"(,"shape":[true],)" + offsets), 1, "a bool");
  expect_refused(entry(dtype + R"(,"shape":[[1]],)" + offsets), 1, "an array");
  expect_refused(entry(dtype + R"(,"shape":1,)" + offsets), 1, "the number 1");
  expect_refused(entry(dtype + R"(,"shape":null,)" + offsets), 1, "null");
  expect_refused(entry(dtype + R"(,"shape":[18446744073709551615],)" + offsets), 1,
                 "18446744073709551615");
  expect_refused(entry(dtype + R"(,"shape":[1,1,1,1,1,1],)" + offsets), 1, "more than 5 numbers");
  expect_refused(entry(dtype + "," + shape + R"(,"data_offsets":[0])"), 1, "has 1 numbers");
  expect_refused(entry(dtype + "," + shape + R"(,"data_offsets":[0,1,1])"), 1,
                 "more than 2 numbers");
  expect_refused(entry(dtype + "," + shape + "," + offsets + R"(,"extra":1)"), 1,
                 "unknown field 'extra'");
  expect_refused(entry(dtype + "," + dtype + "," + shape + "," + offsets), 1,
                 "the field 'dtype' occurs twice");
  expect_refused(R"({"a":[]})", 0, "an array");
  expect_refused(R"({"a":"text"})", 0, "the string 'text'");
}

TEST(Safetensors, NamesAreUniqueAndNotEmpty) {
  const std::string one = R"(:{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  expect_refused(R"({"a")" + one + R"(,"a")" + one + "}", 0, "the name 'a' occurs twice");
  expect_refused(R"({"")" + one + "}", 0, "empty name");
  // Control characters of a name do not reach the terminal.
  expect_refused(R"({"\u001b[2J")" + one + R"(,"\u001b[2J")" + one + "}", 0, "'?[2J'");
}

TEST(Safetensors, MetadataIsAMapOfStrings) {
  const TensorFile file =
      parse_safetensors(file_bytes(R"({"__metadata__":{"params":"{}","x":""}})", 0), "memory");
  EXPECT_EQ(file.metadata.at("params"), "{}");
  EXPECT_EQ(file.metadata.at("x"), "");
  expect_refused(R"({"__metadata__":{"a":1}})", 0, "the number 1");
  expect_refused(R"({"__metadata__":{"a":{}}})", 0, "an object");
  expect_refused(R"({"__metadata__":"a"})", 0, "the string 'a'");
  expect_refused(R"({"__metadata__":{"a":"1","a":"2"}})", 0, "occurs twice");
  expect_refused(R"({"__metadata__":{},"__metadata__":{}})", 0, "occurs twice");
}

TEST(Safetensors, MalformedJsonIsRefusedWithItsPosition) {
  for (const char* header : {"{", "{}x", "{\"a\":", "{\"a\":{\"dtype\":\"U8\"", "{\"\xFF\":1}"}) {
    expect_refused(header, 0, "malformed JSON at byte");
  }
  expect_refused("[]", 0, "does not start with '{'");
  expect_refused(" {}", 0, "does not start with '{'");
  expect_refused("{\"a\":" + std::string(100000, '['), 0, "unexpected an array");
}

TEST(Safetensors, FilesThatCannotBeReadOrWrittenAreNamed) {
  const TemporaryFolder folder;
  const auto message = [](auto&& action) -> std::string {
    try {
      action();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kIo);
      return error.what();
    }
    return "accepted";
  };
  const std::string missing = folder.file("missing");
  EXPECT_EQ(message([&] { read_safetensors(missing); }), "io: " + missing + ": no such file");
  EXPECT_NE(message([&] { read_safetensors(folder.file(".")); }).find("not a regular file"),
            std::string::npos);
  const std::string pipe = folder.file("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_NE(message([&] { read_safetensors(pipe); }).find("not a regular file"), std::string::npos);
  const std::string nowhere = folder.file("no/such/folder.safetensors");
  EXPECT_NE(message([&] { write_safetensors(nowhere, TensorFile()); }).find(nowhere + ": cannot"),
            std::string::npos);
  EXPECT_NE(message([] { write_safetensors("/dev/full", sample_file()); }).find("cannot be"),
            std::string::npos);
}

TEST(Safetensors, AFailedWriteLeavesTheOldFile) {
  const TemporaryFolder folder;
  const std::string path = folder.file("a.safetensors");
  write_safetensors(path, sample_file());
  TensorFile bad;
  bad.tensors.add("__metadata__", DType::kU8, {1});
  EXPECT_THROW(write_safetensors(path, bad), Error);
  expect_equal(read_safetensors(path), sample_file());
  EXPECT_EQ(folder.count(), 1u);
}

TEST(Safetensors, EveryTruncationOfAFileIsRefused) {
  const std::string bytes = format_safetensors(sample_file());
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_NE(refusal_of_bytes(bytes.substr(0, length)), "accepted") << length;
  }
}

TEST(TensorMap, RefusesTakenNamesAndShapesWithoutMemory) {
  TensorMap map;
  map.add("a", DType::kF32, {2});
  EXPECT_THROW(map.add("a", DType::kF32, {2}), Error);
  EXPECT_THROW(map.add("", DType::kF32, {2}), Error);
  EXPECT_THROW(map.add("b", DType::kF32, {-1}), Error);
  EXPECT_THROW(map.add("b", DType::kF32, {1, 1, 1, 1, 1, 1}), Error);
  try {
    map.add("b", DType::kF32, {int64_t{1} << 40, int64_t{1} << 40});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
  }
  EXPECT_EQ(map.count(), 1u);
  EXPECT_FALSE(map.find("b").defined());
  EXPECT_TRUE(map.remove("a"));
  EXPECT_FALSE(map.remove("a"));
}

TEST(TensorMap, CopiesHonourStrides) {
  const test::Tensor wide = test::Tensor::i32({2, 3, 4}, [] {
    std::vector<int32_t> values(24);
    for (int i = 0; i < 24; ++i) values[static_cast<size_t>(i)] = i;
    return values;
  }());
  TensorView view = make_tensor(const_cast<int32_t*>(wide.data<int32_t>()), DType::kI32, {2, 2});
  view.stride[0] = 12;
  TensorMap map;
  const TensorView copy = map.add_copy("copy", view);
  EXPECT_EQ(to_string(copy), "i32 [2, 2]");
  const auto* values = static_cast<const int32_t*>(copy.data);
  EXPECT_EQ(std::vector<int32_t>(values, values + 4), (std::vector<int32_t>{0, 1, 12, 13}));
}

}  // namespace
}  // namespace fovea
