#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fovea/device_memory.h"
#include "fovea/dsa_backend.h"
#include "fovea/error.h"
#include "fovea/stream.h"
#include "src/core/fault_injection.h"
#include "src/core/kernel_fault.h"
#include "tests/support/devices.h"
#include "tests/support/limited_memory.h"
#include "tests/support/rng.h"
#include "tests/support/spinner.h"

/// Whole steps submitted to a stream, by themselves and from graphs, for every backend. Device
/// memory is the device's own here. A `Model` has
///
///   using Backend, Kind, Step;
///   static Backend backend(Kind kind, const Device& device, bool strict = false);
///
/// and a Step, which an engine would call the buffers of a bucket: its inputs are fixed; lengths,
/// slots and counts are what a replay changes.
///
///   Step(Backend& backend, Kind kind, uint64_t seed);
///   static constexpr int64_t kRequests, kRowsPerRequest, kWidth;
///   void set(const std::vector<int32_t>& lengths, int turn);   // committed tokens; 0: no request
///   void run(Stream stream);
///   std::vector<uint8_t> results(const Device& device) const;  // what it writes
///   std::vector<uint8_t> pools() const;
///   void forget_results();
namespace fovea::test {

template <class Step>
std::vector<int32_t> lengths_of(int turn, Rng& rng) {
  if (turn % 10 == 9) return std::vector<int32_t>(static_cast<size_t>(Step::kRequests), 0);
  std::vector<int32_t> lengths;
  for (int64_t r = 0; r < Step::kRequests; ++r) {
    lengths.push_back(
        static_cast<int32_t>(rng.integer(0, Step::kWidth - Step::kRowsPerRequest - 1)));
  }
  if (turn % 4 == 1) std::sort(lengths.begin(), lengths.end());  // and shrinking afterwards
  return lengths;
}

/// Captured at its first call, replayed with other contents.
template <class Model>
void expect_replays_equal_eager_steps(typename Model::Kind kind, const Device& device, int turns) {
  using Step = typename Model::Step;
  auto captured_backend = Model::backend(kind, device),
       eager_backend = Model::backend(kind, device);
  Step captured(captured_backend, kind, 7), eager(eager_backend, kind, 7);
  const OwnedStream stream(device);
  captured.set(std::vector<int32_t>(static_cast<size_t>(Step::kRequests), 1), 0);
  const Graph graph = Graph::capture(device, stream, [&](Stream on) { captured.run(on); });
  Rng rng(3);
  int turns_that_store = 0;
  for (int turn = 0; turn < turns; ++turn) {
    const std::vector<int32_t> lengths = lengths_of<Step>(turn, rng);
    for (Step* const step : {&captured, &eager}) {
      step->set(lengths, turn);
      step->forget_results();
    }
    const std::vector<uint8_t> before = captured.pools();
    graph.launch(stream);
    stream.synchronize();
    eager.run(stream);
    stream.synchronize();
    ASSERT_TRUE(captured.results(device) == eager.results(device))
        << "kind " << static_cast<int>(kind) << ", turn " << turn;
    const bool stored = captured.pools() != before;
    ASSERT_FALSE(stored && turn % 10 == 9) << "turn " << turn << ": a step without requests";
    if (stored) ++turns_that_store;
  }
  // Not all: what a slot gets again is the same.
  EXPECT_GT(turns_that_store, turns / 4);
}

/// Two steps of one backend, one after the other.
template <class Model>
void expect_captured_steps_in_turn(typename Model::Kind one, typename Model::Kind two,
                                   const Device& device) {
  using Step = typename Model::Step;
  auto backend = Model::backend(two, device), other = Model::backend(two, device);
  Step first(backend, one, 1), second(backend, two, 2);
  Step first_alone(other, one, 1), second_alone(other, two, 2);
  const OwnedStream stream(device);
  const Graph graphs[] = {Graph::capture(device, stream, [&](Stream on) { first.run(on); }),
                          Graph::capture(device, stream, [&](Stream on) { second.run(on); })};
  Rng rng(4);
  for (int round = 0; round < 10; ++round) {
    const std::vector<int32_t> lengths = lengths_of<Step>(2 * round, rng);
    const std::vector<int32_t> others = lengths_of<Step>(2 * round + 1, rng);
    for (Step* const step : {&first, &first_alone}) step->set(lengths, round);
    for (Step* const step : {&second, &second_alone}) step->set(others, round);
    graphs[0].launch(stream);
    graphs[1].launch(stream);
    stream.synchronize();
    second_alone.run({});
    first_alone.run({});
    synchronize(device);
    ASSERT_TRUE(first.results(device) == first_alone.results(device)) << round;
    ASSERT_TRUE(second.results(device) == second_alone.results(device)) << round;
  }
}

/// Two backends, each with a stream, captured and eager.
template <class Model>
void expect_steps_on_two_streams(typename Model::Kind one, typename Model::Kind two,
                                 const Device& device) {
  using Step = typename Model::Step;
  typename Model::Backend backends[2] = {Model::backend(one, device), Model::backend(two, device)};
  auto other = Model::backend(two, device);
  Step steps[2] = {{backends[0], one, 5}, {backends[1], two, 6}};
  Step alone[2] = {{other, one, 5}, {other, two, 6}};
  const OwnedStream streams[2] = {OwnedStream(device), OwnedStream(device)};
  const auto capture = [&](int i) {
    return Graph::capture(device, streams[i], [&steps, i](Stream on) { steps[i].run(on); });
  };
  const Graph graphs[2] = {capture(0), capture(1)};
  Rng rng(5);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 2; ++i) {
      const std::vector<int32_t> lengths = lengths_of<Step>(2 * round + i, rng);
      steps[i].set(lengths, round);
      alone[i].set(lengths, round);
    }
    for (int i = 0; i < 2; ++i) {
      if (round % 2 == 0) graphs[i].launch(streams[i]);
      if (round % 2 == 1) steps[i].run(streams[i]);
    }
    for (int i = 0; i < 2; ++i) {
      streams[i].synchronize();
      alone[i].run({});
      synchronize(device);
      ASSERT_TRUE(steps[i].results(device) == alone[i].results(device))
          << "round " << round << ", step " << i;
    }
  }
}

/// A kernel that does not end is in front of everything; plans of steps and whole steps come back
/// all the same. `num_calls`: operator calls of a step.
template <class Model>
void expect_no_wait(typename Model::Kind kind, const std::vector<int32_t>& lengths,
                    size_t num_calls, const Device& device) {
  using Step = typename Model::Step;
  if (device.kind == DeviceKind::kCuda && launches_block()) {
    EXPECT_TRUE(passes_without_blocking());
    return;
  }
  auto backend = Model::backend(kind, device), other = Model::backend(kind, device);
  Step step(backend, kind, 8), alone(other, kind, 8);
  for (Step* const each : {&step, &alone}) each->set(lengths, 1);
  // A kernel is loaded at its first launch, which may wait for those that run.
  const StepBucket verify{ForwardMode::kTargetVerify, Step::kRequests, Step::kRowsPerRequest};
  other.make_step_plan(verify);
  alone.run({});
  synchronize(device);
  const OwnedStream stream(device);
  std::vector<OperatorCall> calls;
  backend.set_profile(&calls);
  {
    Spinner spinner(device, stream);
    step.run(stream);
    const auto more = backend.make_step_plan(verify);
    EXPECT_EQ(more.bucket().mode, ForwardMode::kTargetVerify);
    EXPECT_FALSE(spinner.has_ended()) << "something waited until the time was up";
    EXPECT_EQ(calls.empty(), device.kind == DeviceKind::kCuda);
  }
  stream.synchronize();
  EXPECT_TRUE(step.results(device) == alone.results(device));
  backend.set_profile(nullptr);
  ASSERT_EQ(calls.size(), num_calls);
  for (const OperatorCall& call : calls) EXPECT_GE(call.elapsed_ms, 0) << call.name;
}

/// Every launch of a step fails once: the step that is run again is right. Nothing is stored before
/// the first launch. `least`: launches that can fail.
template <class Model, class Fault>
void expect_repeatable(typename Model::Kind kind, const std::vector<int32_t>& lengths, int least,
                       const Device& device) {
  using Step = typename Model::Step;
  auto backend = Model::backend(kind, device, true), other = Model::backend(kind, device, true);
  Step step(backend, kind, 9), alone(other, kind, 9);
  for (Step* const each : {&step, &alone}) each->set(lengths, 1);
  const std::vector<uint8_t> before = alone.pools();
  alone.run({});
  synchronize(device);
  int failures = 0;
  for (int64_t nth = 1;; ++nth) {
    const Fault fault(nth);
    try {
      step.run({});
      synchronize(device);
      break;
    } catch (const Error& error) {
      synchronize(device);
      ++failures;
      EXPECT_TRUE(fault.fired());
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      EXPECT_THAT(error.what(), testing::HasSubstr("failed"));
      if (nth == 1) {
        EXPECT_TRUE(step.pools() == before) << error.what();
      }
    }
  }
  EXPECT_GE(failures, least);
  EXPECT_TRUE(step.results(device) == alone.results(device)) << static_cast<int>(kind);
}

/// Operators and, on a GPU, kernels.
template <class Model>
void expect_repeatable_steps(typename Model::Kind kind, const std::vector<int32_t>& lengths,
                             int least, const Device& device) {
  expect_repeatable<Model, internal::LaunchFault>(kind, lengths, least, device);
  if (device.kind == DeviceKind::kCpu) return;
  expect_repeatable<Model, internal::KernelFault>(kind, lengths, least, device);
}

/// Base of suites over memory that ends.
class LimitedDeviceSuite : public DeviceSuite {
 protected:
  void TearDown() override { set_memory_resource(device_, nullptr); }

  /// A backend and a step plan that do not fit say so, naming `op`, and leak nothing.
  template <class Model>
  void expect_out_of_memory(const char* op, typename Model::Kind kind) {
    using Step = typename Model::Step;
    constexpr size_t kPlenty = size_t{1} << 30;
    const auto memory = std::make_shared<LimitedMemory>(device_, kPlenty);
    set_memory_resource(device_, memory);
    const StepBucket bucket{ForwardMode::kTargetVerify, Step::kRequests, Step::kRowsPerRequest};
    size_t needed = 0;
    {
      auto backend = Model::backend(kind, device_);
      const auto make_plan = [&] { const auto plan = backend.make_step_plan(bucket); };
      make_plan();  // a workspace for it may stay
      const size_t before = memory->left;
      size_t plan_bytes = 0;
      {
        const auto plan = backend.make_step_plan(bucket);
        plan_bytes = before - memory->left;
      }
      EXPECT_EQ(memory->left, before);
      expect_refusals(memory.get(), op, plan_bytes, make_plan);
      memory->left = before;
    }
    EXPECT_EQ(memory->left, kPlenty);
    {
      const auto backend = Model::backend(kind, device_);
      needed = kPlenty - memory->left;
    }
    expect_refusals(memory.get(), op, needed,
                    [&] { const auto made = Model::backend(kind, device_); });
  }

 private:
  // Tries `make` with 16 limits below what it needs.
  void expect_refusals(LimitedMemory* memory, const char* op, size_t needed,
                       const std::function<void()>& make) {
    ASSERT_GT(needed, 0u);
    for (size_t bytes = 0; bytes < needed; bytes += needed / 16 + 1) {
      memory->left = bytes;
      try {
        make();
        ADD_FAILURE() << bytes << " of " << needed;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory) << error.what();
        EXPECT_THAT(error.what(), testing::HasSubstr(std::string(op) + ": "));
        EXPECT_THAT(error.what(), testing::HasSubstr("bytes asked"));
        if (device_.kind == DeviceKind::kCuda) {
          EXPECT_THAT(error.what(), testing::HasSubstr("free"));
        }
      }
      EXPECT_EQ(memory->left, bytes);
    }
    memory->left = needed;
    make();
    EXPECT_EQ(memory->left, needed);
  }
};

}  // namespace fovea::test
