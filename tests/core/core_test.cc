#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <set>
#include <stdexcept>
#include <thread>

#include "fovea/device.h"
#include "fovea/error.h"
#include "fovea/tensor.h"
#include "src/core/access.h"
#include "src/core/check.h"
#include "src/core/parallel.h"
#include "src/core/workspace.h"
#include "tests/support/compare.h"
#include "tests/support/memory.h"

namespace fovea {
namespace {

using testing::HasSubstr;

std::string check_text(const ConstTensorView& tensor, DType dtype,
                       std::initializer_list<int64_t> shape) {
  try {
    internal::check_tensor("op", "x", tensor, dtype, shape);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(TensorView, PackedStridesAndSlices) {
  int32_t data[24] = {};
  const TensorView view = make_tensor(static_cast<void*>(data), DType::kI32, {2, 3, 4});
  EXPECT_EQ(view.stride[0], 12);
  EXPECT_EQ(view.stride[2], 1);
  EXPECT_EQ(slice_rows(view, 1, 2).data, data + 12);
  EXPECT_EQ(slice_rows(view, 1, 1).shape[0], 0);
  EXPECT_THROW(slice_rows(view, 1, 3), Error);
  EXPECT_THROW(slice_rows(view, 2, 1), Error);
  EXPECT_THROW(make_tensor(static_cast<void*>(data), DType::kI32, {1, 1, 1, 1, 1, 1}), Error);
  EXPECT_THROW(make_tensor(static_cast<void*>(data), DType::kI32, {-1}), Error);
}

TEST(TensorView, ChecksNameArgumentFoundAndExpected) {
  float data[64] = {};
  const ConstTensorView good = make_tensor(static_cast<const void*>(data), DType::kF32, {4, 8});
  EXPECT_EQ(check_text(good, DType::kF32, {4, 8}), "");
  EXPECT_EQ(check_text(good, DType::kF32, {internal::kAnyExtent, 8}), "");
  EXPECT_THAT(check_text(good, DType::kF32, {4, 9}),
              HasSubstr("op: x = f32 [4, 8], expected f32 [4, 9]"));
  EXPECT_THAT(check_text(good, DType::kI32, {4, 8}), HasSubstr("expected i32 [4, 8]"));
  EXPECT_THAT(check_text(good, DType::kF32, {32}), HasSubstr("expected f32 [32]"));
  EXPECT_THAT(check_text({}, DType::kF32, {4, 8}), HasSubstr("x is missing"));
  ConstTensorView strided = good;
  strided.stride[1] = 2;
  EXPECT_THAT(check_text(strided, DType::kF32, {4, 8}), HasSubstr("contiguous last axis"));
  ConstTensorView backwards = good;
  backwards.stride[0] = -8;
  EXPECT_THAT(check_text(backwards, DType::kF32, {4, 8}), HasSubstr("strides >= 0"));
  ConstTensorView null = good;
  null.data = nullptr;
  EXPECT_THAT(check_text(null, DType::kF32, {4, 8}), HasSubstr("null"));
  const ConstTensorView empty = make_tensor(static_cast<const void*>(nullptr), DType::kF32, {0, 8});
  EXPECT_EQ(check_text(empty, DType::kF32, {0, 8}), "");
}

TEST(TensorView, AccessHonoursStridesBeyond32Bits) {
  ConstTensorView view = make_tensor(static_cast<const void*>(nullptr), DType::kF32, {3, 2});
  view.stride[0] = int64_t{1} << 33;
  view.data = reinterpret_cast<const void*>(uintptr_t{4096});
  const auto x = internal::access<const float, 2>(view);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(&x(2, 1)), 4096u + 4 * ((uintptr_t{2} << 33) + 1));
}

TEST(CheckedCast, RefusesWhatDoesNotFit) {
  EXPECT_EQ(internal::checked_cast<int32_t>(int64_t{-7}), -7);
  EXPECT_THROW(internal::checked_cast<int32_t>(int64_t{1} << 31), Error);
  EXPECT_THROW(internal::checked_cast<uint8_t>(int64_t{-1}), Error);
  EXPECT_THROW(internal::checked_cast<uint64_t>(int64_t{-1}), Error);
}

TEST(Workspace, MeasuringAndCuttingAgree) {
  const auto cut = [](Workspace workspace) {
    internal::WorkspaceCutter cutter(workspace);
    char* first = cutter.take<char>(5);
    double* second = cutter.take<double>(3);
    if (workspace.data != nullptr) {
      EXPECT_EQ(reinterpret_cast<char*>(second) - first, 64);
    }
    return cutter.used_bytes();
  };
  const size_t bytes = cut({});
  EXPECT_EQ(bytes, 128u);
  HostBuffer buffer(bytes);
  EXPECT_EQ(cut(buffer.workspace()), bytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
}

TEST(Device, ParsesItsOwnNames) {
  EXPECT_EQ(parse_device("cpu", 3).num_threads, 3);
  EXPECT_GE(parse_device("cpu").num_threads, 1);
  for (const char* text : {"", "gpu", "cuda:x", "cuda:-1", "cuda:1x", "cpu:0"}) {
    EXPECT_THROW(parse_device(text), Error) << text;
  }
  EXPECT_THROW(Device::cpu(-1), Error);
}

TEST(CpuIsa, LimitsUpToTheBestOfThisCpu) {
  limit_cpu_isa(CpuIsa::kBaseline);
  EXPECT_EQ(current_cpu_isa(), CpuIsa::kBaseline);
  limit_cpu_isa(best_cpu_isa());
  EXPECT_EQ(current_cpu_isa(), best_cpu_isa());
  if (best_cpu_isa() < CpuIsa::kAvx512Bf16) {
    EXPECT_THROW(limit_cpu_isa(CpuIsa::kAvx512Bf16), Error);
  }
}

TEST(ParallelFor, CoversTheRangeOnceInPiecesOfTheGrain) {
  for (const int threads : {1, 2, 3, 8}) {
    for (const int64_t count : {0, 1, 7, 64, 1000}) {
      const internal::ThreadScope scope(threads);
      std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
      std::atomic<bool> good{true};
      internal::ParallelFor(count, 7, [&](int64_t begin, int64_t end, int worker) {
        if (begin % 7 != 0 || end != std::min<int64_t>(count, begin + 7) || worker < 0 ||
            worker >= threads)
          good = false;
        for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
      });
      EXPECT_TRUE(good);
      for (const auto& times : seen) EXPECT_EQ(times, 1);
    }
  }
}

TEST(ParallelFor, NoTwoPiecesShareAWorkerAtOneTime) {
  const internal::ThreadScope scope(4);
  std::atomic<int> busy[4] = {};
  std::atomic<bool> clash{false};
  internal::ParallelFor(400, 1, [&](int64_t, int64_t, int worker) {
    if (busy[worker]++ != 0) clash = true;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    --busy[worker];
  });
  EXPECT_FALSE(clash);
}

// Every piece waits until all have begun.
TEST(ParallelFor, TheThreadsRunAtTheSameTimeAwakeOrAsleep) {
  const internal::ThreadScope scope(3);
  for (const int pause_ms : {0, 0, 3, 0, 3}) {
    std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
    std::atomic<int> begun{0};
    std::atomic<bool> together{true};
    internal::ParallelFor(3, 1, [&](int64_t, int64_t, int) {
      ++begun;
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (begun < 3 && together) {
        if (std::chrono::steady_clock::now() > end) together = false;
        std::this_thread::yield();
      }
    });
    EXPECT_TRUE(together);
  }
}

TEST(ParallelFor, CallersDoNotDisturbEachOther) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  callers.reserve(4);
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&wrong, caller] {
      const internal::ThreadScope scope(2 + caller % 2);
      for (int64_t count = 1; count < 300; ++count) {
        std::atomic<int64_t> sum{0};
        internal::ParallelFor(count, 2, [&](int64_t begin, int64_t end, int) {
          for (int64_t i = begin; i < end; ++i) sum += i;
        });
        if (sum != count * (count - 1) / 2) ++wrong;
      }
    });
  }
  for (std::thread& thread : callers) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ParallelFor, RethrowsAnExceptionOfTheBody) {
  for (const int threads : {1, 3}) {
    const internal::ThreadScope scope(threads);
    EXPECT_THROW(internal::ParallelFor(100, 1,
                                       [](int64_t begin, int64_t, int) {
                                         if (begin == 42) throw std::runtime_error("42");
                                       }),
                 std::runtime_error);
  }
}

TEST(ParallelFor, AllocatesNothingAfterTheFirstUse) {
  const internal::ThreadScope scope(2);
  std::atomic<int64_t> sum{0};
  const auto loop = [&] {
    internal::ParallelFor(100, 1, [&](int64_t begin, int64_t, int) { sum += begin; });
  };
  loop();
  const test::AllocationCounter counter;
  loop();
  EXPECT_EQ(counter.count(), 0);
  EXPECT_EQ(sum, 2 * 4950);
}

// The tools of the tests themselves must be able to fail.
TEST(ExpectCloseTool, SeesEachKindOfDifference) {
  const double nan = std::nan("");
  const double inf = std::numeric_limits<double>::infinity();
  const Tolerance tolerance{.absolute = 1e-3, .relative = 1e-2, .cosine = 1e-5};
  const auto close = [&](std::vector<double> a, std::vector<double> r) {
    return static_cast<bool>(test::ExpectClose(a, r, tolerance));
  };
  EXPECT_TRUE(close({1.0, nan, inf, -inf}, {1.0, nan, inf, -inf}));
  EXPECT_FALSE(close({1.0}, {1.02}));
  EXPECT_TRUE(close({1.0}, {1.001}));
  EXPECT_FALSE(close({inf}, {-inf}));
  EXPECT_FALSE(close({0.0}, {nan}));
  EXPECT_FALSE(close({nan}, {0.0}));
  EXPECT_FALSE(close({1.0, 2.0}, {1.0}));
  // Every element within its relative bound, the whole off in direction.
  std::vector<double> a, r;
  for (int i = 0; i < 100; ++i) {
    r.push_back(1);
    a.push_back(i % 2 == 0 ? 1.0095 : 0.9905);
  }
  EXPECT_FALSE(close(a, r));
}

TEST(AllocationCounterTool, CountsNew) {
  const test::AllocationCounter counter;
  std::vector<int> values(100);
  std::iota(values.begin(), values.end(), 0);
  EXPECT_EQ(counter.count(), 1);
}

TEST(GuardedMemoryToolDeathTest, DiesOnTheByteAfter) {
  test::GuardedMemory memory(100);
  auto* bytes = static_cast<volatile char*>(memory.data());
  bytes[99] = 1;
  EXPECT_DEATH(bytes[100] = 1, "");
}

}  // namespace
}  // namespace fovea
