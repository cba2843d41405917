#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "cli/compare.h"
#include "fovea/json.h"
#include "fovea/safetensors.h"

/// The problems of `fovea verify`: small, seeded, built to break.
namespace fovea::cli {

struct VerifyCase {
  std::string name;
  TensorMap inputs;
  Json params = Json::object();
};

/// How one output is compared, the first rule that fits; outputs without a rule are compared
/// exactly.
struct OutputRule {
  std::string output;
  Tolerance tolerance;
  std::string implementation = {};  ///< Of this one only; empty: of all.
};

/// One operator of `fovea verify`.
struct VerifyOperator {
  std::string op;
  std::vector<VerifyCase> (*make_cases)(uint64_t seed);
  std::vector<OutputRule> rules;
  /// Brings any implementation's outputs into comparable form: elements that the operator leaves
  /// unspecified become zero, codes become the values that they stand for. Null: they are.
  void (*normalise)(const TensorMap& inputs, const Json& params, TensorMap& outputs);
  /// The expected outputs of a host function, which has no implementation "ref". Null: it has.
  TensorMap (*reference)(const VerifyCase& verify_case) = nullptr;
};

/// Every operator, in the order of the rooms.
std::vector<VerifyOperator> verify_operators();
void add_verify_cache(std::vector<VerifyOperator>& list);
void add_verify_batch(std::vector<VerifyOperator>& list);
void add_verify_index(std::vector<VerifyOperator>& list);
void add_verify_mla(std::vector<VerifyOperator>& list);
void add_verify_compress(std::vector<VerifyOperator>& list);
void add_verify_kda(std::vector<VerifyOperator>& list);
void add_verify_msa(std::vector<VerifyOperator>& list);

/// SplitMix64: the same problems on every platform.
class CaseRandom {
 public:
  explicit CaseRandom(uint64_t seed) : state_(seed) {}
  uint64_t next();
  int64_t integer(int64_t lowest, int64_t highest);  ///< Inclusive.
  double uniform();                                  ///< [0, 1)
  double normal();
  bool chance(double probability) { return uniform() < probability; }

 private:
  uint64_t state_;
};

/// Builds the tensors of one case.
class CaseBuilder {
 public:
  using Shape = std::initializer_list<int64_t>;

  CaseBuilder(std::string name, uint64_t seed);

  /// Standard normals times `scale`, f32 or bf16.
  CaseBuilder& normals(const std::string& name, DType dtype, Shape shape, double scale = 1);
  /// Uniform integers, i32.
  CaseBuilder& integers(const std::string& name, Shape shape, int64_t lowest, int64_t highest);
  CaseBuilder& list(const std::string& name, const std::vector<int32_t>& values);
  CaseBuilder& floats(const std::string& name, Shape shape, const std::vector<float>& values);
  /// Uniform bytes.
  CaseBuilder& bytes(const std::string& name, Shape shape);
  /// Uniform e4m3 codes without NaN.
  CaseBuilder& codes(const std::string& name, Shape shape);
  CaseBuilder& param(const std::string& name, Json value);

  /// An i32 or f32 or bf16 element that already exists, by flat index.
  template <class T>
  T& at(const std::string& name, int64_t flat) {
    return static_cast<T*>(case_.inputs.find(name).data)[flat];
  }
  TensorView tensor(const std::string& name) { return case_.inputs.find(name); }
  CaseRandom& random() { return random_; }
  VerifyCase take() { return std::move(case_); }

 private:
  VerifyCase case_;
  CaseRandom random_;
};

/// Index values that lie outside every cache.
int32_t hostile_index(CaseRandom& random);

/// Replaces a share of an i32 tensor by hostile values.
void make_hostile(CaseBuilder& builder, const std::string& name, double share);

}  // namespace fovea::cli
