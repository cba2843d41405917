#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "fovea/device.h"

/// The CUDA runtime as the rest of core sees it: no CUDA types, the same entry points in a build
/// without CUDA (no_cuda.cc), where all that can fail says so.
namespace fovea::internal::cuda {

/// Empty when this build and machine can run CUDA kernels, otherwise why not. Looked up once.
const std::string& unavailable_reason();

/// GPUs that kernels of this build run on; 0 when unavailable.
int device_count();

/// What kernels are tuned by.
struct DeviceFacts {
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int num_sms = 0;
  int64_t max_shared_bytes = 0;  ///< Of one block, after opting in.
  int64_t l2_bytes = 0;
  int64_t memory_bytes = 0;
};
/// Throws Error(kUnsupported) for an ordinal that is not there.
const DeviceFacts& device_facts(int ordinal);

/// Makes the device current in this thread for the life of the scope. Everything below needs one.
class DeviceScope {
 public:
  explicit DeviceScope(int ordinal);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = -1;
};

/// Stream-ordered; null when there is not enough memory.
void* allocate(int ordinal, size_t bytes, Stream stream) noexcept;
void release(int ordinal, void* data, Stream stream) noexcept;
void memory_info(int ordinal, size_t* free_bytes, size_t* total_bytes);

/// Direction from the addresses.
void copy(void* to, const void* from, size_t bytes, Stream stream);
void fill(void* data, uint8_t value, size_t bytes, Stream stream);

Stream create_stream();
void destroy_stream(Stream stream) noexcept;
void synchronize_stream(Stream stream);

void* create_event();
void destroy_event(void* event) noexcept;
void record_event(void* event, Stream stream);
void wait_event(void* event, Stream stream);
void synchronize_event(void* event);
bool is_event_done(void* event);
double elapsed_ms(void* begin, void* end);

void begin_capture(Stream stream);
bool is_capturing(Stream stream);
/// An executable graph. With `discard` it is dropped and the result is null.
void* end_capture(Stream stream, bool discard, int64_t* num_nodes);
void destroy_graph(void* graph) noexcept;
void launch_graph(void* graph, Stream stream);

/// Lets kernels read and write host memory at its own address, over the bus: tests run operators on
/// the device without copies. False when the system refuses.
bool register_host(void* data, size_t bytes);
void unregister_host(void* data) noexcept;

}  // namespace fovea::internal::cuda
