#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "fovea/v4_backend.h"
#include "fovea/window_pages.h"
#include "tests/support/memory.h"

/// A small DeepSeek-V4 model for tests of its backend: one layer of each ratio, requests whose
/// tokens are named by ids, and what their rows must be, in fp64 from the whole history.
namespace fovea::test {

inline constexpr int64_t kV4Layers = 3;
inline constexpr std::array<int64_t, kV4Layers> kV4Ratios = {0, 4, 128};
inline constexpr int64_t kV4Heads = 2, kV4IndexHeads = 4, kV4Width = 512, kV4Requests = 4;

/// Ids of the tokens of a request, by position.
using V4History = std::vector<uint64_t>;
/// `count` ids, other ones for every seed.
V4History v4_history(uint64_t seed, int64_t count);

/// Tensors of one token in one layer; the same for the same id.
struct V4Token {
  std::vector<bf16_t> q, kv, index_q;
  std::vector<float> gate, index_gate, head_gate;
};
const V4Token& v4_token(int64_t layer, uint64_t id);

/// Weights and the rotary table of a layer.
struct V4Layer {
  explicit V4Layer(int64_t layer);

  Tensor sink, cos_sin, ape, norm_weight, index_ape, index_norm_weight;
};

const V4Layer& v4_layer(int64_t layer);

V4BackendConfig v4_config();

/// Rows [begin, begin + ids.size()) of a request.
struct V4Rows {
  int64_t request = 0;
  int64_t begin = 0;
  V4History ids = {};
};

/// What one row gave in one layer.
struct V4Row {
  std::vector<bf16_t> out;
  std::vector<float> lse;
  std::vector<int64_t> entries;  ///< Ratio 4: the selection.

  bool operator==(const V4Row&) const = default;
};
/// By layer, request and position: the row as it was last computed.
using V4Results = std::map<std::array<int64_t, 3>, V4Row>;

struct V4Snapshot {
  int64_t request = 0;
  int64_t position = 0;  ///< Tokens before it are in the snapshot.
  int32_t slot = 0;
};

struct V4StepOptions {
  V4StepPlan* plan = nullptr;
  int64_t padded_rows = 0;
  bool host_lengths = false;
  bool in_place = false;  ///< States stay in their slot; otherwise they go to the request's other.
  std::vector<V4Snapshot> snapshots = {};
  std::map<int64_t, int32_t> resume_from = {};  ///< Slots that states are read from, by request.
};

class V4Rig {
 public:
  explicit V4Rig(const V4BackendConfig& config, const Device& device);

  /// A step of all layers. A verify is not committed.
  void run(ForwardMode mode, const std::vector<V4Rows>& rows, const V4StepOptions& options = {});
  /// A prefill of a whole history, `chunk` tokens at a time.
  void prefill(int64_t request, const V4History& history, int64_t chunk, int64_t begin = 0);
  /// Of the last run.
  void commit(const std::vector<int32_t>& accepted);

  /// The two parts of run().
  void stage(ForwardMode mode, const std::vector<V4Rows>& rows, const V4StepOptions& options);
  void submit(const V4StepOptions& options, Stream stream = {});
  void collect();

  V4ForwardTensors tensors(int64_t layer);
  V4Batch batch() const { return batch_; }
  const V4Row& row(int64_t layer, int64_t request, int64_t position) const {
    return results.at({layer, request, position});
  }
  /// Every byte of every pool and state.
  std::vector<uint8_t> pool_bytes() const;

  V4BackendConfig config;
  Device device;
  V4Backend backend;
  V4Results results;
  std::optional<WindowPages> window_pages;

  struct Pools {
    Tensor window, compressed, index, state, index_state;
  };
  std::array<Pools, kV4Layers> pools;

 private:
  int32_t state_slot(int64_t request, bool other) const;
  void make_table();
  void fill_inputs(const std::vector<V4Rows>& rows, int64_t padded);

  std::vector<uint8_t> parity_;
  Tensor table_;                        // [requests + 1, width]
  std::vector<int64_t> index_of_page_;  // page -> its place in its request
  Tensor seq_len_, pool_row_, ext_len_, positions_, cache_loc_, window_table_;
  Tensor in_slot_, out_slot_, snapshot_seq_, snapshot_pos_, snapshot_slot_;
  std::vector<int32_t> host_seq_len_, host_ext_len_;
  struct Inputs {
    Tensor q, kv, gate, index_gate, index_q, head_gate, indices, out, lse;
  };
  std::array<Inputs, kV4Layers> inputs_;
  std::vector<V4Rows> rows_;
  V4Batch batch_;
  V4StepOptions options_;
  int64_t padded_ = 0;
};

/// Whether the row of the last token of `history` in `layer` is what the definition says, computed
/// from all tokens of the history; an empty text, or what is wrong.
std::string v4_difference(const V4BackendConfig& config, int64_t layer, const V4History& history,
                          const V4Row& row);

}  // namespace fovea::test
