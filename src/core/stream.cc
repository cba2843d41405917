#include "fovea/stream.h"

#include <chrono>
#include <utility>

#include "src/core/check.h"
#include "src/core/cuda_runtime.h"
#include "src/core/stream_id.h"

namespace fovea {
namespace {

using Clock = std::chrono::steady_clock;

// Drivers count from 0.
constexpr uint64_t kDefaultStreamId = UINT64_MAX;

bool is_cuda(const Device& device) { return device.kind == DeviceKind::kCuda; }

}  // namespace

void synchronize(const Device& device, Stream stream) {
  if (!is_cuda(device)) return;
  const internal::cuda::DeviceScope scope(device.ordinal);
  internal::cuda::synchronize_stream(stream);
}

bool is_capturing(const Device& device, Stream stream) {
  if (!is_cuda(device)) return false;
  const internal::cuda::DeviceScope scope(device.ordinal);
  return internal::cuda::is_capturing(stream);
}

uint64_t stream_id(const Device& device, Stream stream) {
  if (!is_cuda(device)) return 0;
  if (stream.handle == nullptr) return kDefaultStreamId;
  const internal::cuda::DeviceScope scope(device.ordinal);
  return internal::cuda::stream_id(stream);
}

OwnedStream::OwnedStream(const Device& device) : device_(device) {
  if (!is_cuda(device)) return;
  const internal::cuda::DeviceScope scope(device.ordinal);
  stream_ = internal::cuda::create_stream();
}

OwnedStream::~OwnedStream() {
  if (stream_.handle != nullptr) internal::cuda::destroy_stream(stream_);
}

OwnedStream::OwnedStream(OwnedStream&& other) noexcept
    : device_(other.device_), stream_(std::exchange(other.stream_, {})) {}

OwnedStream& OwnedStream::operator=(OwnedStream&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(stream_, other.stream_);
  return *this;
}

struct Event::State {
  Device device;
  void* event = nullptr;
  Clock::time_point time;

  explicit State(const Device& on) : device(on) {
    if (!is_cuda(device)) return;
    const internal::cuda::DeviceScope scope(device.ordinal);
    event = internal::cuda::create_event();
  }
  ~State() {
    if (event != nullptr) internal::cuda::destroy_event(event);
  }
};

Event::Event(const Device& device) : state_(std::make_unique<State>(device)) {}
Event::~Event() = default;
Event::Event(Event&&) noexcept = default;
Event& Event::operator=(Event&&) noexcept = default;

void Event::record(Stream stream) {
  if (!is_cuda(state_->device)) {
    state_->time = Clock::now();
    return;
  }
  const internal::cuda::DeviceScope scope(state_->device.ordinal);
  internal::cuda::record_event(state_->event, stream);
}

void Event::wait(Stream stream) const {
  if (!is_cuda(state_->device)) return;
  const internal::cuda::DeviceScope scope(state_->device.ordinal);
  internal::cuda::wait_event(state_->event, stream);
}

void Event::synchronize() const {
  if (is_cuda(state_->device)) internal::cuda::synchronize_event(state_->event);
}

bool Event::is_done() const {
  return !is_cuda(state_->device) || internal::cuda::is_event_done(state_->event);
}

double Event::elapsed_ms(const Event& begin, const Event& end) {
  if (is_cuda(begin.state_->device)) {
    return internal::cuda::elapsed_ms(begin.state_->event, end.state_->event);
  }
  return std::chrono::duration<double, std::milli>(end.state_->time - begin.state_->time).count();
}

struct Graph::State {
  Device device;
  std::function<void(Stream)> work;  // CPU
  void* graph = nullptr;             // CUDA
  int64_t num_nodes = 0;

  ~State() {
    if (graph != nullptr) internal::cuda::destroy_graph(graph);
  }
};

Graph::Graph(std::unique_ptr<State> state) : state_(std::move(state)) {}
Graph::~Graph() = default;
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;

Graph Graph::capture(const Device& device, Stream stream, const std::function<void(Stream)>& work) {
  auto state = std::make_unique<State>();
  state->device = device;
  if (!is_cuda(device)) {
    state->work = work;
    return Graph(std::move(state));
  }
  if (stream.handle == nullptr) {
    internal::invalid("Graph::capture",
                      "stream is the default stream, expected an OwnedStream: the default one "
                      "cannot be captured");
  }
  const internal::cuda::DeviceScope scope(device.ordinal);
  internal::cuda::begin_capture(stream);
  try {
    work(stream);
  } catch (...) {
    internal::cuda::end_capture(stream, /*discard=*/true, nullptr);
    throw;
  }
  state->graph = internal::cuda::end_capture(stream, /*discard=*/false, &state->num_nodes);
  return Graph(std::move(state));
}

void Graph::launch(Stream stream) const {
  if (!is_cuda(state_->device)) {
    state_->work(stream);
    return;
  }
  const internal::cuda::DeviceScope scope(state_->device.ordinal);
  internal::cuda::launch_graph(state_->graph, stream);
}

int64_t Graph::num_nodes() const noexcept { return state_->num_nodes; }

}  // namespace fovea
