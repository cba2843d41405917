#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "fovea/device.h"
#include "fovea/export.h"

namespace fovea {

/// Waits until everything submitted to `stream` is done. Throws Error(kDevice) for what failed on
/// the device since the last wait. The CPU has nothing to wait for.
FOVEA_API void synchronize(const Device& device, Stream stream = {});

/// Whether `stream` records a Graph now instead of executing; never on the CPU. Throws
/// Error(kDevice).
FOVEA_API bool is_capturing(const Device& device, Stream stream);

/// A number that no other stream of the process has or had, while a handle may be given out again;
/// 0 on the CPU. Throws Error(kDevice).
FOVEA_API uint64_t stream_id(const Device& device, Stream stream);

/// A queue of its own: not ordered against the default stream. On the CPU the calling thread.
class FOVEA_API OwnedStream {
 public:
  /// Throws Error(kDevice).
  explicit OwnedStream(const Device& device);
  ~OwnedStream();
  OwnedStream(OwnedStream&& other) noexcept;
  OwnedStream& operator=(OwnedStream&& other) noexcept;

  operator Stream() const noexcept { return stream_; }  // NOLINT: it is one
  void synchronize() const { fovea::synchronize(device_, stream_); }

 private:
  Device device_;
  Stream stream_;
};

/// A mark in a stream. On the CPU it keeps the time of record().
class FOVEA_API Event {
 public:
  /// Throws Error(kDevice).
  explicit Event(const Device& device);
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;

  void record(Stream stream = {});
  /// Later work of `stream` waits for the recorded mark.
  void wait(Stream stream) const;
  void synchronize() const;
  /// Whether the work before the recorded mark is done. Does not wait.
  bool is_done() const;
  /// Milliseconds between two recorded marks; waits for the later one.
  static double elapsed_ms(const Event& begin, const Event& end);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Work that was captured once and is launched many times on the same addresses.
class FOVEA_API Graph {
 public:
  /// Runs `work` while `stream` (an OwnedStream) records instead of executing. On the CPU `work` is
  /// kept, and launch() calls it. Throws what `work` throws, and Error(kDevice) when it did what
  /// cannot be captured; the stream is usable afterwards.
  static Graph capture(const Device& device, Stream stream,
                       const std::function<void(Stream)>& work);
  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;

  void launch(Stream stream) const;
  /// Kernels, copies and fills that it holds; 0 on the CPU.
  int64_t num_nodes() const noexcept;

 private:
  struct State;
  explicit Graph(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace fovea
