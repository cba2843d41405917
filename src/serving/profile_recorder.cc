#include "src/serving/profile_recorder.h"

#include <utility>

namespace fovea::internal {

void ProfileRecorder::set_target(std::vector<OperatorCall>* calls) {
  while (!pending_.empty()) deliver_first();
  target_ = calls;
}

void ProfileRecorder::enter(Stream stream) {
  stream_ = stream;
  is_capturing_ = fovea::is_capturing(device_, stream);
  if (is_capturing_) return;
  while (!pending_.empty() && pending_.front().end.is_done()) deliver_first();
}

void ProfileRecorder::timed(const char* name, FunctionRef<std::string_view()> run,
                            FunctionRef<OperatorWork()> work) {
  if (target_ == nullptr || is_capturing_) {
    run();
    return;
  }
  Measurement measurement = take_measurement();
  measurement.begin.record(stream_);
  const std::string_view implementation = run();
  measurement.end.record(stream_);
  const OperatorWork done = work();
  measurement.call = {name, std::string(implementation), 0, done.flops, done.bytes};
  pending_.push_back(std::move(measurement));
  if (device_.kind == DeviceKind::kCpu) deliver_first();
}

ProfileRecorder::Measurement ProfileRecorder::take_measurement() {
  if (unused_.empty()) return {Event(device_), Event(device_), {}};
  Measurement measurement = std::move(unused_.back());
  unused_.pop_back();
  return measurement;
}

void ProfileRecorder::deliver_first() {
  Measurement measurement = std::move(pending_.front());
  pending_.pop_front();
  measurement.call.elapsed_ms = Event::elapsed_ms(measurement.begin, measurement.end);
  target_->push_back(std::move(measurement.call));
  unused_.push_back(std::move(measurement));
}

}  // namespace fovea::internal
