#include "src/core/cuda_runtime.h"

#include <cuda_runtime.h>

#include <mutex>
#include <vector>

#include "src/core/check.h"
#include "src/core/cuda/error.cuh"
#include "src/core/stream_id.h"

namespace fovea::internal::cuda {
namespace {

// Kernels are built for compute_80 and up.
constexpr int kMinComputeMajor = 8;

struct Machine {
  std::string reason;
  std::vector<DeviceFacts> devices;
};

DeviceFacts read_facts(int ordinal) {
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, name, ordinal), "cudaDeviceGetAttribute");
    return value;
  };
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  DeviceFacts facts;
  facts.name = properties.name;
  facts.compute_major = properties.major;
  facts.compute_minor = properties.minor;
  facts.num_sms = attribute(cudaDevAttrMultiProcessorCount);
  facts.max_shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  facts.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  facts.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  return facts;
}

Machine look_at_machine() {
  Machine machine;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    cudaGetLastError();
    machine.reason = "this machine has no usable GPU";
    if (status != cudaSuccess && status != cudaErrorNoDevice) {
      machine.reason += std::string(" (") + cudaGetErrorString(status) + ")";
    }
    return machine;
  }
  for (int i = 0; i < count; ++i) machine.devices.push_back(read_facts(i));
  if (machine.devices[0].compute_major < kMinComputeMajor) {
    machine.reason = machine.devices[0].name + " has compute capability " +
                     std::to_string(machine.devices[0].compute_major) + "." +
                     std::to_string(machine.devices[0].compute_minor) + ", kernels need 8.0";
    machine.devices.clear();
  }
  return machine;
}

const Machine& machine() {
  static const Machine found = look_at_machine();
  return found;
}

// What a capture in any thread forbids otherwise and what disturbs none, as it submits nothing.
class AllowedInCapture {
 public:
  AllowedInCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AllowedInCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AllowedInCapture(const AllowedInCapture&) = delete;
  AllowedInCapture& operator=(const AllowedInCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// A pool of our own, which keeps freed memory for the next allocation; the device's default pool
// belongs to the application.
cudaMemPool_t memory_pool(int ordinal) {
  static std::mutex mutex;
  static std::vector<cudaMemPool_t> pools;
  const std::lock_guard<std::mutex> lock(mutex);
  if (pools.size() <= static_cast<size_t>(ordinal)) pools.resize(static_cast<size_t>(ordinal) + 1);
  cudaMemPool_t& pool = pools[static_cast<size_t>(ordinal)];
  if (pool == nullptr) {
    const AllowedInCapture allowed;  // the first call of a process may be captured
    cudaMemPoolProps props{};
    props.allocType = cudaMemAllocationTypePinned;
    props.location.type = cudaMemLocationTypeDevice;
    props.location.id = ordinal;
    check(cudaMemPoolCreate(&pool, &props), "cudaMemPoolCreate");
    uint64_t keep = UINT64_MAX;
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep),
          "cudaMemPoolSetAttribute");
  }
  return pool;
}

}  // namespace

const std::string& unavailable_reason() { return machine().reason; }
int device_count() { return static_cast<int>(machine().devices.size()); }

const DeviceFacts& device_facts(int ordinal) {
  if (ordinal < 0 || ordinal >= device_count()) {
    unsupported("device", "cuda:" + std::to_string(ordinal) + ": " +
                              (unavailable_reason().empty()
                                   ? "this machine has " + std::to_string(device_count()) + " GPUs"
                                   : unavailable_reason()));
  }
  return machine().devices[static_cast<size_t>(ordinal)];
}

DeviceScope::DeviceScope(int ordinal) {
  int current = 0;
  check(cudaGetDevice(&current), "cudaGetDevice");
  if (current == ordinal) return;
  check(cudaSetDevice(ordinal), "cudaSetDevice");
  previous_ = current;
}

DeviceScope::~DeviceScope() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

void* allocate(int ordinal, size_t bytes, Stream stream) noexcept {
  // A pool refuses a piece of nothing, which below would wait and give back what the pool keeps.
  if (bytes == 0) return nullptr;
  try {
    const DeviceScope scope(ordinal);
    void* data = nullptr;
    if (cudaMallocFromPoolAsync(&data, bytes, memory_pool(ordinal), native(stream)) ==
        cudaSuccess) {
      return data;
    }
    cudaGetLastError();
    // What the pool keeps may be in the way of a larger piece.
    cudaStreamSynchronize(native(stream));
    cudaMemPoolTrimTo(memory_pool(ordinal), 0);
    if (cudaMallocFromPoolAsync(&data, bytes, memory_pool(ordinal), native(stream)) ==
        cudaSuccess) {
      return data;
    }
    cudaGetLastError();
  } catch (const Error&) {
  }
  return nullptr;
}

void release(int ordinal, void* data, Stream stream) noexcept {
  int current = 0;
  cudaGetDevice(&current);
  if (current != ordinal) cudaSetDevice(ordinal);
  // The stream may have been destroyed before its memory: then the default stream orders it.
  if (cudaFreeAsync(data, native(stream)) != cudaSuccess) {
    cudaGetLastError();
    cudaFreeAsync(data, nullptr);
  }
  if (current != ordinal) cudaSetDevice(current);
}

void memory_info(int ordinal, size_t* free_bytes, size_t* total_bytes) {
  const DeviceScope scope(ordinal);
  check(cudaMemGetInfo(free_bytes, total_bytes), "cudaMemGetInfo");
  // What the pool holds without need is free for us.
  uint64_t reserved = 0, used = 0;
  check(cudaMemPoolGetAttribute(memory_pool(ordinal), cudaMemPoolAttrReservedMemCurrent, &reserved),
        "cudaMemPoolGetAttribute");
  check(cudaMemPoolGetAttribute(memory_pool(ordinal), cudaMemPoolAttrUsedMemCurrent, &used),
        "cudaMemPoolGetAttribute");
  *free_bytes += reserved - used;
}

void copy(void* to, const void* from, size_t bytes, Stream stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, native(stream)), "cudaMemcpyAsync");
}

void fill(void* data, uint8_t value, size_t bytes, Stream stream) {
  check(cudaMemsetAsync(data, value, bytes, native(stream)), "cudaMemsetAsync");
}

Stream create_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return Stream{stream};
}
void destroy_stream(Stream stream) noexcept { cudaStreamDestroy(native(stream)); }
void synchronize_stream(Stream stream) {
  check(cudaStreamSynchronize(native(stream)), "cudaStreamSynchronize");
}

void* create_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreate(&event), "cudaEventCreate");
  return event;
}
void destroy_event(void* event) noexcept { cudaEventDestroy(static_cast<cudaEvent_t>(event)); }
void record_event(void* event, Stream stream) {
  check(cudaEventRecord(static_cast<cudaEvent_t>(event), native(stream)), "cudaEventRecord");
}
void wait_event(void* event, Stream stream) {
  check(cudaStreamWaitEvent(native(stream), static_cast<cudaEvent_t>(event)),
        "cudaStreamWaitEvent");
}
void synchronize_event(void* event) {
  check(cudaEventSynchronize(static_cast<cudaEvent_t>(event)), "cudaEventSynchronize");
}
bool is_event_done(void* event) {
  const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event));
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check(status, "cudaEventQuery");
  return true;
}
double elapsed_ms(void* begin, void* end) {
  synchronize_event(end);
  float ms = 0;
  check(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(begin), static_cast<cudaEvent_t>(end)),
        "cudaEventElapsedTime");
  return ms;
}

void begin_capture(Stream stream) {
  // Thread-local: another thread may allocate meanwhile.
  check(cudaStreamBeginCapture(native(stream), cudaStreamCaptureModeThreadLocal),
        "cudaStreamBeginCapture");
}

bool is_capturing(Stream stream) {
  if (stream.handle == nullptr) return false;  // the default stream cannot be captured
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(native(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

uint64_t stream_id(Stream stream) {
  unsigned long long id = 0;
  check(cudaStreamGetId(native(stream), &id), "cudaStreamGetId");
  return id;
}

void* end_capture(Stream stream, bool discard, int64_t* num_nodes) {
  cudaGraph_t graph = nullptr;
  const cudaError_t status = cudaStreamEndCapture(native(stream), &graph);
  if (discard) {
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();
    return nullptr;
  }
  check(status, "cudaStreamEndCapture");
  size_t nodes = 0;
  cudaGraphExec_t executable = nullptr;
  cudaError_t made = cudaGraphGetNodes(graph, nullptr, &nodes);
  if (made == cudaSuccess) made = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  check(made, "cudaGraphInstantiate");
  *num_nodes = static_cast<int64_t>(nodes);
  return executable;
}

void destroy_graph(void* graph) noexcept {
  cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
}
void launch_graph(void* graph, Stream stream) {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), native(stream)), "cudaGraphLaunch");
}

bool register_host(void* data, size_t bytes) {
  if (device_count() == 0) return false;
  if (cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped) ==
      cudaSuccess) {
    return true;
  }
  cudaGetLastError();
  return false;
}
void unregister_host(void* data) noexcept { cudaHostUnregister(data); }

}  // namespace fovea::internal::cuda
