#include "src/core/cuda_runtime.h"

#include "src/core/check.h"
#include "src/core/cuda_probe.h"
#include "src/core/stream_id.h"

// The build without CUDA. Nobody reaches the device functions: Device::cuda refuses first.
namespace fovea::internal::cuda {
namespace {

[[noreturn]] void refuse() { unsupported("cuda", unavailable_reason()); }

}  // namespace

const std::string& unavailable_reason() {
  static const std::string reason = "this build has no CUDA";
  return reason;
}
int device_count() { return 0; }
const DeviceFacts& device_facts(int ordinal) {
  unsupported("device",
              "cuda:" + std::to_string(ordinal) + ": " + unavailable_reason() + "; use cpu");
}

DeviceScope::DeviceScope(int) { refuse(); }
DeviceScope::~DeviceScope() = default;

void* allocate(int, size_t, Stream) noexcept { return nullptr; }
void release(int, void*, Stream) noexcept {}
void memory_info(int, size_t*, size_t*) { refuse(); }
void copy(void*, const void*, size_t, Stream) { refuse(); }
void fill(void*, uint8_t, size_t, Stream) { refuse(); }
Stream create_stream() { refuse(); }
void destroy_stream(Stream) noexcept {}
void synchronize_stream(Stream) { refuse(); }
void* create_event() { refuse(); }
void destroy_event(void*) noexcept {}
void record_event(void*, Stream) { refuse(); }
void wait_event(void*, Stream) { refuse(); }
void synchronize_event(void*) { refuse(); }
bool is_event_done(void*) { refuse(); }
double elapsed_ms(void*, void*) { refuse(); }
void begin_capture(Stream) { refuse(); }
bool is_capturing(Stream) { refuse(); }
uint64_t stream_id(Stream) { refuse(); }
void* end_capture(Stream, bool, int64_t*) { refuse(); }
void destroy_graph(void*) noexcept {}
void launch_graph(void*, Stream) { refuse(); }
bool register_host(void*, size_t) { return false; }
void unregister_host(void*) noexcept {}

CodeFacts code_facts(int) { refuse(); }
double submit_fma_chains(int, float*, Stream) { refuse(); }
double submit_mma_chains(int, float*, Stream) { refuse(); }
double submit_read(int, const void*, int64_t, int, float*, Stream) { refuse(); }
double submit_copy(int, const void*, void*, int64_t, Stream) { refuse(); }
double submit_gather(int, const void*, int64_t, const int32_t*, int64_t, float*, Stream) {
  refuse();
}

}  // namespace fovea::internal::cuda
