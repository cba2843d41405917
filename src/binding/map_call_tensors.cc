#include "fovea/call_operator.h"
#include "fovea/device_memory.h"

namespace fovea {

ConstTensorView MapCallTensors::input(const std::string& name) {
  return there_.input(inputs_.find(name));
}

const int32_t* MapCallTensors::values(const std::string& name) {
  return static_cast<const int32_t*>(inputs_.find(name).data);
}

TensorView MapCallTensors::output(const std::string& name, DType dtype,
                                  const std::vector<int64_t>& shape) {
  return there_.output(outputs_.add(name, dtype, shape));
}

TensorView MapCallTensors::host_output(const std::string& name, DType dtype,
                                       const std::vector<int64_t>& shape) {
  return outputs_.add(name, dtype, shape);
}

TensorView MapCallTensors::update(const std::string& name) {
  return there_.output(outputs_.add_copy(name, inputs_.find(name)));
}

void MapCallTensors::run(size_t workspace_bytes,
                         const std::function<void(Workspace, Stream)>& work) {
  DeviceBuffer workspace(there_.device(), workspace_bytes);
  work(workspace.workspace(), Stream{});
  there_.fetch();
}

}  // namespace fovea
