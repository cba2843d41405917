#include "cli/verify_cases.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "fovea/numeric.h"

namespace fovea::cli {

uint64_t CaseRandom::next() {
  uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

int64_t CaseRandom::integer(int64_t lowest, int64_t highest) {
  return lowest + static_cast<int64_t>(next() % static_cast<uint64_t>(highest - lowest + 1));
}

double CaseRandom::uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

double CaseRandom::normal() {
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(6.283185307179586 * uniform());
}

CaseBuilder::CaseBuilder(std::string name, uint64_t seed) : random_(seed) {
  // The name is part of the seed: cases of one seed differ from one another.
  for (const char c : name) random_ = CaseRandom(random_.next() ^ static_cast<uint8_t>(c));
  case_.name = std::move(name);
}

CaseBuilder& CaseBuilder::normals(const std::string& name, DType dtype, Shape shape, double scale) {
  const TensorView view = case_.inputs.add(name, dtype, shape);
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    const auto value = static_cast<float>(scale * random_.normal());
    if (dtype == DType::kF32) {
      at<float>(name, i) = value;
    } else {
      at<bf16_t>(name, i) = bf16_from_float(value);
    }
  }
  return *this;
}

CaseBuilder& CaseBuilder::integers(const std::string& name, Shape shape, int64_t lowest,
                                   int64_t highest) {
  const TensorView view = case_.inputs.add(name, DType::kI32, shape);
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    at<int32_t>(name, i) = static_cast<int32_t>(random_.integer(lowest, highest));
  }
  return *this;
}

CaseBuilder& CaseBuilder::list(const std::string& name, const std::vector<int32_t>& values) {
  const TensorView view =
      case_.inputs.add(name, DType::kI32, {static_cast<int64_t>(values.size())});
  if (!values.empty()) std::memcpy(view.data, values.data(), values.size() * sizeof(int32_t));
  return *this;
}

CaseBuilder& CaseBuilder::floats(const std::string& name, Shape shape,
                                 const std::vector<float>& values) {
  const TensorView view = case_.inputs.add(name, DType::kF32, shape);
  std::memcpy(view.data, values.data(), values.size() * sizeof(float));
  return *this;
}

CaseBuilder& CaseBuilder::bytes(const std::string& name, Shape shape) {
  const TensorView view = case_.inputs.add(name, DType::kU8, shape);
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    at<uint8_t>(name, i) = static_cast<uint8_t>(random_.next());
  }
  return *this;
}

CaseBuilder& CaseBuilder::codes(const std::string& name, Shape shape) {
  bytes(name, shape);
  for (int64_t i = 0; i < tensor(name).num_elements(); ++i) {
    uint8_t& code = at<uint8_t>(name, i);
    if ((code & 0x7F) == 0x7F) code = 0;
  }
  return *this;
}

CaseBuilder& CaseBuilder::param(const std::string& name, Json value) {
  case_.params.set(name, std::move(value));
  return *this;
}

int32_t hostile_index(CaseRandom& random) {
  constexpr int32_t kValues[] = {
      std::numeric_limits<int32_t>::min(), -123456, -1, 114514, 2147480000,
      std::numeric_limits<int32_t>::max()};
  return kValues[random.integer(0, 5)];
}

void make_hostile(CaseBuilder& builder, const std::string& name, double share) {
  const int64_t count = builder.tensor(name).num_elements();
  for (int64_t i = 0; i < count; ++i) {
    if (builder.random().chance(share)) {
      builder.at<int32_t>(name, i) = hostile_index(builder.random());
    }
  }
}

std::vector<VerifyOperator> verify_operators() {
  std::vector<VerifyOperator> list;
  add_verify_cache(list);
  add_verify_batch(list);
  add_verify_index(list);
  add_verify_mla(list);
  add_verify_kda(list);
  add_verify_msa(list);
  return list;
}

}  // namespace fovea::cli
