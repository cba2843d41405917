#include "fovea/implementation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fovea/error.h"
#include "fovea/log.h"
#include "src/core/implementation_list.h"

namespace fovea {
namespace {

using testing::HasSubstr;

struct ToyProblem {
  int width = 0;
};
struct ToyTensors {
  int* result = nullptr;
};

void run_fast(const ToyProblem&, const Device&, const ToyTensors& tensors, Workspace) {
  *tensors.result = 1;
}
void run_slow(const ToyProblem&, const Device&, const ToyTensors& tensors, Workspace) {
  *tensors.result = 2;
}
void accept_all(const ToyProblem&, const ToyTensors&) {}

constexpr internal::Implementation<ToyProblem, ToyTensors> kToyList[] = {
    {"toy_absent", DeviceKind::kCpu, [] { return internal::Refusal("this build lacks it"); },
     nullptr, nullptr, run_fast},
    {"toy_fast", DeviceKind::kCpu, nullptr,
     [](const ToyProblem& problem) {
       return problem.width % 8 == 0 ? internal::Refusal()
                                     : internal::Refusal("needs a width that is a multiple of 8");
     },
     [](const ToyProblem&, const Device&) { return size_t{128}; }, run_fast},
    {"toy_ref", DeviceKind::kCpu, nullptr, nullptr, nullptr, run_slow},
};
const internal::OperatorRegistration kToyRegistration("core", "toy", [] {
  return internal::list_implementations(kToyList);
});

class ToyPlan : public OperatorPlan<ToyProblem, ToyTensors> {
 public:
  static ToyPlan plan(int width, const Options& options = {}) {
    return ToyPlan(internal::make_plan("toy", kToyList, ToyProblem{width}, Device::cpu(1), options,
                                       accept_all));
  }

 private:
  using OperatorPlan::OperatorPlan;
};

std::string error_of(const std::function<void()>& action, ErrorCode code) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

class ImplementationList : public testing::Test {
 protected:
  void TearDown() override {
    force_implementations("");
    set_log_sink({});
  }
};

TEST_F(ImplementationList, TakesTheBestThatSupportsTheProblemAndKeepsTheRefusals) {
  EXPECT_EQ(ToyPlan::plan(16).implementation().name, "toy_fast");
  const ImplementationChoice choice = ToyPlan::plan(17).implementation();
  EXPECT_EQ(choice.name, "toy_ref");
  ASSERT_EQ(choice.refused.size(), 2u);
  EXPECT_EQ(choice.refused[0].second, "this build lacks it");
  EXPECT_EQ(choice.refused[1].second, "needs a width that is a multiple of 8");
}

TEST_F(ImplementationList, APreferredEntryGoesBeforeABetterRankedOneThatIsNot) {
  constexpr internal::Implementation<ToyProblem, ToyTensors> kList[] = {
      {"toy_wide", DeviceKind::kCpu, nullptr,
       [](const ToyProblem& problem) {
         return problem.width > 4 ? internal::Refusal()
                                  : internal::Refusal("needs a width above 4");
       },
       nullptr, run_fast, nullptr,
       [](const ToyProblem& problem) {
         return problem.width >= 64 ? internal::Refusal() : internal::Refusal("pays from 64 on");
       }},
      {"toy_narrow", DeviceKind::kCpu, nullptr,
       [](const ToyProblem& problem) {
         return problem.width < 32 ? internal::Refusal() : internal::Refusal("takes less than 32");
       },
       nullptr, run_slow},
  };
  const auto choose = [&](int width, const Options& options = {}) {
    return internal::make_plan("toy_preference", kList, ToyProblem{width}, Device::cpu(1), options,
                               accept_all)
        ->choice;
  };
  EXPECT_EQ(choose(64).name, "toy_wide");
  EXPECT_EQ(choose(4).name, "toy_narrow");
  EXPECT_EQ(choose(16).name, "toy_narrow");
  EXPECT_EQ(choose(16).refused,
            (std::vector<std::pair<std::string, std::string>>{{"toy_wide", "pays from 64 on"}}));
  EXPECT_EQ(choose(40).name, "toy_wide") << "nothing else supports it";
  EXPECT_EQ(choose(16, {"toy_wide"}).name, "toy_wide") << "forced";
  EXPECT_THAT(error_of([&] { choose(4, {"toy_wide"}); }, ErrorCode::kUnsupported),
              HasSubstr("needs a width above 4"));
}

TEST_F(ImplementationList, RunsWhatItChose) {
  int result = 0;
  HostBuffer buffer(128);
  ToyPlan::plan(16).run({&result}, buffer.workspace());
  EXPECT_EQ(result, 1);
  ToyPlan::plan(17).run({&result}, {});
  EXPECT_EQ(result, 2);
}

TEST_F(ImplementationList, AForcedNameThatRefusesIsAnErrorWithTheWholeList) {
  const std::string text =
      error_of([] { ToyPlan::plan(17, {"toy_fast"}); }, ErrorCode::kUnsupported);
  EXPECT_THAT(text, HasSubstr("toy_fast (needs a width that is a multiple of 8)"));
  EXPECT_THAT(text, HasSubstr("toy_ref (supports the problem)"));
  EXPECT_THAT(error_of([] { ToyPlan::plan(16, {"nothing"}); }, ErrorCode::kInvalidArgument),
              HasSubstr("toy_absent"));
}

TEST_F(ImplementationList, ForcingWorksByOperatorAndByBareName) {
  force_implementations("toy=toy_ref");
  EXPECT_EQ(ToyPlan::plan(16).implementation().name, "toy_ref");
  force_implementations("toy_ref");
  EXPECT_EQ(ToyPlan::plan(16).implementation().name, "toy_ref");
  force_implementations("toy_ref,toy=toy_fast");  // the operator's own entry wins over a bare name
  EXPECT_EQ(ToyPlan::plan(16).implementation().name, "toy_fast");
  EXPECT_EQ(ToyPlan::plan(16, {"toy_ref"}).implementation().name,
            "toy_ref");  // and the option over both
  force_implementations("");
  EXPECT_EQ(ToyPlan::plan(16).implementation().name, "toy_fast");
}

TEST_F(ImplementationList, ForcingWhatNobodyHasIsAnErrorAndChangesNothing) {
  force_implementations("toy=toy_ref");
  for (const char* wrong : {"nonsense", "toy=nonsense", "nonsense=toy_ref", "toy_ref,nonsense"}) {
    const std::string text =
        error_of([&] { force_implementations(wrong); }, ErrorCode::kInvalidArgument);
    EXPECT_THAT(text, HasSubstr("toy: toy_absent toy_fast toy_ref")) << wrong;
  }
  EXPECT_EQ(ToyPlan::plan(16).implementation().name, "toy_ref");
}

TEST_F(ImplementationList, TheCheckOfTheWorkspaceComesBeforeTheRun) {
  int result = 0;
  const ToyPlan plan = ToyPlan::plan(16);
  EXPECT_THROW(plan.run({&result}, {}), Error);
  HostBuffer buffer(192);
  EXPECT_THROW(plan.run({&result}, {buffer.data(), 127}), Error);
  EXPECT_THROW(plan.run({&result}, {static_cast<char*>(buffer.data()) + 1, 190}), Error);
  EXPECT_EQ(result, 0);
}

TEST_F(ImplementationList, EachChoiceAndRefusalIsLoggedOnce) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel level, std::string_view message) {
    EXPECT_EQ(level, LogLevel::kDispatch);
    lines.emplace_back(message);
  });
  for (int i = 0; i < 3; ++i) ToyPlan::plan(17);
  EXPECT_THAT(lines,
              testing::ElementsAre("toy: toy_absent refuses: this build lacks it",
                                   "toy: toy_fast refuses: needs a width that is a multiple of 8",
                                   "toy: runs toy_ref"));
}

TEST_F(ImplementationList, OperatorsListsWhatIsRegistered) {
  bool found = false;
  for (const OperatorInfo& info : operators()) {
    if (info.name != "toy") continue;
    found = true;
    ASSERT_EQ(info.implementations.size(), 3u);
    EXPECT_FALSE(info.implementations[0].available);
    EXPECT_EQ(info.implementations[0].reason, "this build lacks it");
    EXPECT_TRUE(info.implementations[2].available);
  }
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace fovea
