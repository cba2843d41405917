#include "fovea/call_operator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "fovea/error.h"

namespace fovea {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Inputs of a merge of two parts, one row, one head, two channels, with equal weights.
TensorMap merge_inputs() {
  TensorMap map;
  const TensorView out_parts = map.add("out_parts", DType::kF32, {2, 1, 1, 2});
  const std::vector<float> values = {1, 2, 3, 6};
  std::copy(values.begin(), values.end(), static_cast<float*>(out_parts.data));
  map.add("lse_parts", DType::kF32, {2, 1, 1});
  return map;
}

// A caller that brings the memory of results.
class CallerOutputs : public CallTensors {
 public:
  explicit CallerOutputs(const TensorMap& inputs) : inner_(inputs, Device::cpu(1)) {}

  std::vector<std::string> names() const override { return inner_.names(); }
  ConstTensorView find(const std::string& name) const override { return inner_.find(name); }
  ConstTensorView input(const std::string& name) override { return inner_.input(name); }
  const int32_t* values(const std::string& name) override { return inner_.values(name); }
  bool sized_by_contents() const override { return false; }
  std::vector<std::string> given_outputs() const override {
    std::vector<std::string> names;
    for (const auto& [name, view] : given) names.push_back(name);
    return names;
  }
  TensorView given_output(const std::string& name) const override {
    const auto found = given.find(name);
    return found == given.end() ? TensorView{} : found->second;
  }
  bool wants(const std::string& name) const override { return name != unwanted; }
  TensorView output(const std::string& name, DType dtype,
                    const std::vector<int64_t>& shape) override {
    provided.push_back(name);
    return inner_.output(name, dtype, shape);
  }
  TensorView host_output(const std::string& name, DType dtype,
                         const std::vector<int64_t>& shape) override {
    return inner_.host_output(name, dtype, shape);
  }
  TensorView update(const std::string& name) override { return inner_.update(name); }
  void run(size_t bytes, const std::function<void(Workspace, Stream)>& work) override {
    inner_.run(bytes, work);
    ++runs;
  }

  std::map<std::string, TensorView> given;
  std::string unwanted;
  std::vector<std::string> provided;
  int runs = 0;

 private:
  MapCallTensors inner_;
};

TEST(CallOperatorTest, NamesAreSortedAndKnown) {
  const std::vector<std::string> names = callable_operators();
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
  EXPECT_THAT(names, Contains("sparse_mla"));
}

TEST(CallOperatorTest, ResultsOfAMap) {
  const TensorMap inputs = merge_inputs();
  MapCallTensors tensors(inputs, Device::cpu(1));
  const CallOutcome outcome =
      call_operator("merge_lse", tensors, Json::object(), Device::cpu(1), Options{"ref"});
  EXPECT_EQ(outcome.implementation.name, "ref");
  const TensorMap results = tensors.take_outputs();
  EXPECT_THAT(results.names(), ElementsAre("lse", "out"));
  const auto* out = static_cast<const float*>(results.find("out").data);
  EXPECT_FLOAT_EQ(out[0], 2);
  EXPECT_FLOAT_EQ(out[1], 4);
}

TEST(CallOperatorTest, ResultsInTheMemoryOfTheCaller) {
  const TensorMap inputs = merge_inputs();
  CallerOutputs tensors(inputs);
  std::vector<float> out(2, -1);
  tensors.given["out"] = make_tensor(out.data(), DType::kF32, {1, 1, 2});
  call_operator("merge_lse", tensors, Json::object(), Device::cpu(1));
  EXPECT_THAT(out, ElementsAre(2, 4));
  EXPECT_THAT(tensors.provided, ElementsAre("lse"));
}

TEST(CallOperatorTest, ARecordedCallIsRepeatedOnOtherContents) {
  const TensorMap inputs = merge_inputs();
  CallerOutputs first(inputs);
  std::vector<float> unused(2);
  first.given["out"] = make_tensor(unused.data(), DType::kF32, {1, 1, 2});
  CallRecord record;
  EXPECT_FALSE(record.is_repeatable());
  call_operator("merge_lse", first, Json::object(), Device::cpu(1), Options{"ref"}, &record);
  ASSERT_TRUE(record.is_repeatable());

  TensorMap others;
  const std::vector<float> values = {9, 2, 3, 6};
  std::copy(values.begin(), values.end(),
            static_cast<float*>(others.add("out_parts", DType::kF32, {2, 1, 1, 2}).data));
  others.add("lse_parts", DType::kF32, {2, 1, 1});
  CallerOutputs second(others);
  std::vector<float> out(2, -1);
  second.given["out"] = make_tensor(out.data(), DType::kF32, {1, 1, 2});
  EXPECT_EQ(record.repeat(second).implementation.name, "ref");
  EXPECT_EQ(second.runs, 1);
  EXPECT_THAT(out, ElementsAre(6, 4));
  EXPECT_THAT(second.provided, ElementsAre("lse"));
}

TEST(CallOperatorTest, ACallThatIsRefusedLeavesNoRecord) {
  const TensorMap inputs = merge_inputs();
  CallerOutputs tensors(inputs);
  std::vector<float> out(3, -1);
  tensors.given["out"] = make_tensor(out.data(), DType::kF32, {1, 1, 3});
  CallRecord record;
  EXPECT_THROW(call_operator("merge_lse", tensors, Json::object(), Device::cpu(1), {}, &record),
               Error);
  EXPECT_FALSE(record.is_repeatable());
}

TEST(CallOperatorTest, ACallOfAHostFunctionIsNotRepeatable) {
  TensorMap inputs;
  for (const char* name : {"seq_len", "ext_len"}) {
    *static_cast<int32_t*>(inputs.add(name, DType::kI32, {1}).data) = 3;
  }
  MapCallTensors tensors(inputs, Device::cpu(1));
  Json params = Json::object();
  params.set("ranks", 2).set("rank", 0).set("scheme", "round_robin");
  CallRecord record;
  call_operator("context_split", tensors, params, Device::cpu(1), {}, &record);
  EXPECT_FALSE(record.is_repeatable());
}

void expect_refused(CallerOutputs& tensors, const std::string& text) {
  try {
    call_operator("merge_lse", tensors, Json::object(), Device::cpu(1));
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr(text));
  }
  EXPECT_EQ(tensors.runs, 0);
}

TEST(CallOperatorTest, RefusesAnOutputOfAnotherShape) {
  const TensorMap inputs = merge_inputs();
  CallerOutputs tensors(inputs);
  std::vector<float> out(3, -1);
  tensors.given["out"] = make_tensor(out.data(), DType::kF32, {1, 1, 3});
  expect_refused(tensors, "merge_lse: out = f32 [1, 1, 3]");
  EXPECT_THAT(out, ElementsAre(-1, -1, -1));
}

TEST(CallOperatorTest, RefusesAnOutputThatDoesNotExist) {
  const TensorMap inputs = merge_inputs();
  CallerOutputs tensors(inputs);
  std::vector<float> out(2, -1);
  tensors.given["output"] = make_tensor(out.data(), DType::kF32, {1, 1, 2});
  expect_refused(tensors, "unknown output 'output'");
}

TEST(CallOperatorTest, RefusesAnOperatorThatDoesNotExist) {
  const TensorMap inputs;
  MapCallTensors tensors(inputs, Device::cpu(1));
  try {
    call_operator("merge", tensors, Json::object(), Device::cpu(1));
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("no operator 'merge'"));
  }
}

// The bits of an attention over two slots, with and without the optional third result.
TEST(CallOperatorTest, LeavesOutWhatIsNotWanted) {
  TensorMap inputs;
  inputs.add("q", DType::kBf16, {1, 2, 576});
  inputs.add("kv", DType::kBf16, {4, 576});
  inputs.add("indices", DType::kI32, {1, 2});
  const Json params = Json::object({{"softmax_scale", 1.0}});
  CallerOutputs tensors(inputs);
  tensors.unwanted = "max_logits";
  call_operator("sparse_mla", tensors, params, Device::cpu(1));
  EXPECT_THAT(tensors.provided, ElementsAre("out", "lse"));
}

// Without a look at the lengths, logits reach as far as the keys do.
TEST(CallOperatorTest, LogitsAreSizedByTheirBound) {
  TensorMap inputs;
  inputs.add("q_fp8", DType::kU8, {1, 1, 16});
  inputs.add("head_weight", DType::kF32, {1, 1});
  inputs.add("k_fp8", DType::kU8, {7, 16});
  inputs.add("k_scale", DType::kF32, {7});
  inputs.add("k_start", DType::kI32, {1});
  const TensorView k_end = inputs.add("k_end", DType::kI32, {1});
  *static_cast<int32_t*>(k_end.data) = 3;
  const Json params = Json::object({{"layout", "ragged"}});
  MapCallTensors by_contents(inputs, Device::cpu(1));
  call_operator("index_logits", by_contents, params, Device::cpu(1));
  EXPECT_EQ(by_contents.take_outputs().find("logits").shape[1], 3);
  CallerOutputs by_bound(inputs);
  std::vector<float> logits(7, -1);
  by_bound.given["logits"] = make_tensor(logits.data(), DType::kF32, {1, 7});
  call_operator("index_logits", by_bound, params, Device::cpu(1));
  EXPECT_THAT(logits, ElementsAre(0, 0, 0, -1, -1, -1, -1));
}

}  // namespace
}  // namespace fovea
