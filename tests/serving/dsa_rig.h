#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fovea/dsa_backend.h"
#include "tests/support/devices.h"
#include "tests/support/memory.h"

namespace fovea::test {

/// The tensors of one token of one request: a pure function of (request, position, guess).
struct Token {
  std::vector<bf16_t> q;        ///< [H * 576]
  std::vector<bf16_t> k;        ///< [576]
  std::vector<bf16_t> index_q;  ///< [Hi * Di]
  std::vector<bf16_t> index_k;  ///< [Di]
  std::vector<float> gate;      ///< [Hi]
};

/// `guess` > 0: a token that a draft proposed there instead of the request's own.
Token make_token(const DsaConfig& config, int request, int64_t position, int guess = 0);

/// f32 [positions, rope_dim].
Tensor make_cos_sin(int64_t positions, int64_t rope_dim);
Tensor make_norm_weight(int64_t width);
Tensor make_norm_bias(int64_t width);

/// What a row came to; compared bit for bit between runs.
struct RowResult {
  std::vector<int32_t> positions;  ///< The selection as positions of the request, then -1.
  std::vector<uint16_t> out;       ///< bf16 bits [H * 512]
  std::vector<float> lse;          ///< [H]
  bool operator==(const RowResult&) const = default;
};

/// Results by (request, position).
using RowResults = std::map<std::pair<int, int64_t>, RowResult>;

struct StepOptions {
  int64_t padded_rows = 0;
  int64_t rows_bound = 0;  ///< Given as num_rows where it is larger; kDraftExtend.
  bool host_lengths = true;
  bool give_indices = true;  ///< Ask for the selection.
  /// The step's buffers. Padded requests fill up its bucket; their rows hold NaN.
  DsaStepPlan* plan = nullptr;
  /// kExtend: the rows are dealt to this many ranks, which run one after the other on one pool.
  int context_ranks = 0;
  ContextScheme context_scheme = ContextScheme::kRoundRobin;
  /// Changes what a rank gets.
  std::function<void(int rank, ForwardBatch&, DsaForwardTensors&)> adjust_rank = {};
  /// Changes what the backend gets; the rows are not collected then.
  std::function<void(ForwardBatch&, DsaForwardTensors&)> adjust = {};
};

/// Where the rigs of a test run.
class RigDevice {
 public:
  /// Until the next one; every backend of the tests reads its own memory.
  static void use(const std::string& device);
  static Device get(int threads);
};

/// Base of suites that run a rig on every device, with every format of a list.
class RigTest : public testing::TestWithParam<std::tuple<const char*, RowFormat>> {
 protected:
  void SetUp() override {
    const std::string device = std::get<0>(GetParam());
    if (const std::string reason = why_skipped(device); !reason.empty()) GTEST_SKIP() << reason;
    RigDevice::use(device);
    readable_.emplace(RigDevice::get(1));
  }
  void TearDown() override { RigDevice::use("cpu"); }
  static RowFormat format() { return std::get<1>(GetParam()); }

 private:
  std::optional<ReadableDeviceMemory> readable_;
};
inline std::string rig_test_name(const testing::TestParamInfo<RigTest::ParamType>& info) {
  const std::string format(to_string(std::get<1>(info.param)));
  return std::get<0>(info.param) == std::string("cpu") ? format : format + "_cuda";
}

/// A small engine around one layer: owns pools and the request table, and hands out pages in a
/// shuffled order. Whatever was never written holds NaN bytes.
class DsaRig {
 public:
  static DsaConfig small_config(int64_t page_size, RowFormat row_format);

  DsaRig(const DsaConfig& config, int threads, uint64_t page_seed = 1);

  /// Appends `count` tokens to each request of `work`, in its order, in one step. In kTargetVerify
  /// and kDraftExtendV2 wrong guesses follow them up to N rows; they are rolled back after the
  /// step, which leaves their rows in the pool.
  void step(ForwardMode mode, const std::vector<std::pair<int, int>>& work,
            const StepOptions& options = {});

  /// Appends plans.size() tokens to each request, one draft step each, all begun in one call.
  void draft_chain(const std::vector<int>& requests, const std::vector<DsaStepPlan*>& plans,
                   bool host_lengths = true);

  /// Frees the request's pages and table row.
  void release(int request);

  DsaBackend& backend() { return backend_; }
  const RowResults& results() const { return results_; }
  const DsaConfig& config() const { return config_; }

  static constexpr float kSoftmaxScale = 0.0721688f;  // 192^-0.5

  DsaLayer layer{0, kSoftmaxScale};

  /// Outputs of the last step, [T, ...].
  Tensor out, lse, indices;

 private:
  struct Request {
    int32_t row = 0;
    int64_t len = 0;
    std::vector<int32_t> pages;  // may reach past len after a rollback
  };
  Request& request(int id);
  struct Work {
    int id;
    int count;
    int64_t first;  // position of the first row
    int64_t rows;
  };
  struct Rows;
  struct Inputs;
  void grow(Request& request, int64_t len);
  Inputs make_inputs(ForwardMode mode, const std::vector<Work>& work, const StepOptions& options);
  Rows make_rows(const std::vector<Work>& work, int64_t dummy_rows, int64_t extent);
  DsaForwardTensors forward_tensors(Rows& rows, int64_t extent);
  void run_rank(Inputs& in, const ContextSplit& split, int rank, const StepOptions& options);
  void collect(const std::vector<Work>& work, const DsaDispatch& dispatch);
  int64_t rows_of(ForwardMode mode, int count) const;
  int64_t position_of(const Request& request, int32_t slot) const;

  DsaConfig config_;
  Device device_;
  DsaBackend backend_;
  Tensor kv_pool_, index_pool_, req_to_token_;
  Tensor cos_sin_, norm_weight_, norm_bias_;
  std::vector<int32_t> free_pages_, free_rows_;
  std::map<int, Request> requests_;
  RowResults results_;
  int guesses_ = 0;
};

}  // namespace fovea::test
