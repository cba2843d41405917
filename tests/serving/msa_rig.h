#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "fovea/msa_backend.h"
#include "fovea/numeric.h"
#include "fovea/stream.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"

/// A small model served by an MsaBackend, and the same rows recomputed in fp64.
namespace fovea::test {

inline constexpr int64_t kMsaRequests = 4, kMsaDrafts = 3, kMsaWidth = 64, kMsaMaxRows = 96;

inline MsaBackendConfig small_msa_config() {
  MsaBackendConfig config;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 16;
  config.index_dim = 16;
  config.block_size = 4;
  config.topk = 4;
  config.init_blocks = 1;
  config.dense_layers = true;
  config.table_width = kMsaWidth;
  config.max_requests = kMsaRequests;
  config.max_rows = kMsaMaxRows;
  config.rows_per_request = kMsaDrafts;
  return config;
}

/// Rows [begin, begin + rows) of a request.
struct MsaRows {
  int64_t request = 0;
  int64_t begin = 0;
  int64_t rows = 0;
};

/// How the pools hold K and V.
enum class PoolForm { kSlots, kHeads, kInterleaved };

/// Tokens, pools and batches of one layer of each kind. Token p of a request always has the same
/// tensors, as long as its version does: a draft that is rejected is another version.
class MsaRig {
 public:
  explicit MsaRig(const Device& device, const MsaBackendConfig& config_in = small_msa_config(),
                  PoolForm form = PoolForm::kSlots)
      : device_(device), backend(config_in, device), config(backend.config()), form_(form) {
    const int64_t pages = kMsaRequests * kMsaWidth / config.block_size + 1;
    slots_ = pages * config.block_size;
    const int64_t width = config.num_kv_heads * config.head_dim;
    kv_memory_ = Tensor(DType::kBf16, {2, 2, slots_, width});
    index_memory_ = Tensor(DType::kBf16, {slots_, 1, config.index_dim});
    // What nobody has stored is never used.
    kv_memory_.fill_bytes(0xFF);
    index_memory_.fill_bytes(0xFF);
    std::vector<int32_t> order(static_cast<size_t>(pages - 1));
    std::iota(order.begin(), order.end(), 1);
    Rng rng(11);
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1],
                order[static_cast<size_t>(rng.integer(0, static_cast<int64_t>(i) - 1))]);
    }
    table_ = Tensor(DType::kI32, {kMsaRequests + 1, kMsaWidth});
    for (int64_t r = 0; r < kMsaRequests; ++r) {
      for (int64_t p = 0; p < kMsaWidth; ++p) {
        const int64_t page = order[static_cast<size_t>((p / config.block_size) * kMsaRequests + r)];
        table_.data<int32_t>()[(r + 1) * kMsaWidth + p] =
            static_cast<int32_t>(page * config.block_size + p % config.block_size);
      }
    }
    version_.assign(static_cast<size_t>(kMsaRequests * kMsaWidth), 0);
  }

  /// Makes tokens of other content at these positions.
  void redraft(int64_t request, int64_t begin, int64_t end, int version) {
    for (int64_t p = begin; p < end; ++p) {
      version_[static_cast<size_t>(request * kMsaWidth + p)] = version;
    }
  }

  int32_t slot(int64_t request, int64_t p) const {
    return table_.data<int32_t>()[(request + 1) * kMsaWidth + p];
  }

  /// Uploads a batch; `padded`: rows of padding behind it.
  MsaBatch batch(ForwardMode mode, const std::vector<MsaRows>& entries, int64_t padded = 0,
                 int32_t kv_len_delta = 0) {
    entries_ = entries;
    const auto requests = static_cast<int64_t>(entries.size());
    int64_t rows = 0;
    for (const MsaRows& entry : entries) rows += entry.rows;
    num_rows_ = rows;
    total_ = rows + padded;
    seq_len_ = Tensor(DType::kI32, {requests});
    pool_row_ = Tensor(DType::kI32, {requests});
    ext_len_ = Tensor(DType::kI32, {requests});
    positions_ = Tensor(DType::kI32, {total_});
    cache_loc_ = Tensor(DType::kI32, {total_});
    cache_loc_.fill_bytes(0xFF);
    int64_t row = 0;
    for (int64_t r = 0; r < requests; ++r) {
      const MsaRows& entry = entries[static_cast<size_t>(r)];
      const int64_t end = entry.begin + entry.rows;
      const int64_t given = mode == ForwardMode::kTargetVerify ? entry.begin : end - kv_len_delta;
      seq_len_.data<int32_t>()[r] = static_cast<int32_t>(given);
      pool_row_.data<int32_t>()[r] = static_cast<int32_t>(entry.request + 1);
      ext_len_.data<int32_t>()[r] = static_cast<int32_t>(entry.rows);
      for (int64_t p = entry.begin; p < end; ++p, ++row) {
        positions_.data<int32_t>()[row] = static_cast<int32_t>(p);
        cache_loc_.data<int32_t>()[row] = slot(entry.request, p);
      }
    }
    fill_inputs();
    MsaBatch result;
    result.kv_len_delta = kv_len_delta;
    ForwardBatch& forward = result.forward;
    forward.mode = mode;
    forward.seq_len = seq_len_;
    forward.pool_row = pool_row_;
    if (mode == ForwardMode::kExtend || mode == ForwardMode::kMixed ||
        mode == ForwardMode::kDraftExtend) {
      forward.ext_len = ext_len_;
    }
    forward.req_to_token = table_;
    forward.positions = positions_;
    forward.out_cache_loc = cache_loc_;
    forward.num_rows = rows;
    forward.padded_rows = padded > 0 ? total_ : 0;
    return result;
  }

  MsaForwardTensors tensors(bool dense) {
    MsaForwardTensors result;
    result.q = q_;
    result.k = k_;
    result.v = v_;
    result.k_pool = pool(dense, 0);
    result.v_pool = pool(dense, 1);
    result.out = out_;
    result.lse = lse_;
    if (dense) return result;
    result.index_q = index_q_;
    result.index_k = index_k_;
    result.index_pool = index_memory_;
    result.blocks = blocks_;
    return result;
  }

  /// Runs both layers of a batch. `plan`: null for none.
  void step(ForwardMode mode, const std::vector<MsaRows>& entries, int64_t padded = 0,
            MsaStepPlan* plan = nullptr, int32_t kv_len_delta = 0) {
    const MsaBatch next = batch(mode, entries, padded, kv_len_delta);
    plan != nullptr ? backend.begin_step(next, plan) : backend.begin_step(next);
    run_layers(plan);
  }

  void run_layers(MsaStepPlan* plan = nullptr) {
    forget_results();
    plan != nullptr ? backend.forward_dense(*plan, tensors(true))
                    : backend.forward_dense(tensors(true));
    synchronize(device_);
    dense_out = out_.bytes();
    dense_lse = lse_.bytes();
    forget_results();
    plan != nullptr ? backend.forward(*plan, tensors(false)) : backend.forward(tensors(false));
    synchronize(device_);
  }

  void forget_results() {
    out_.fill_bytes(0x55);
    lse_.fill_bytes(0x55);
    blocks_.fill_bytes(0x55);
  }

  /// Bits of both layers' results of row t: outputs, lse, lists.
  std::vector<uint8_t> row_bits(int64_t t) const {
    std::vector<uint8_t> bits;
    const auto add = [&](const std::vector<uint8_t>& from, int64_t row_bytes, int64_t row) {
      bits.insert(bits.end(), from.begin() + row * row_bytes, from.begin() + (row + 1) * row_bytes);
    };
    const int64_t out_bytes = config.num_heads * config.head_dim * 2;
    add(dense_out, out_bytes, t);
    add(dense_lse, config.num_heads * 4, t);
    add(out_.bytes(), out_bytes, t);
    add(lse_.bytes(), config.num_heads * 4, t);
    for (int64_t g = 0; g < config.num_kv_heads; ++g) {
      add(blocks_.bytes(), backend.list_width() * 4, g * total_ + t);
    }
    return bits;
  }

  /// All bytes of the pools.
  std::vector<uint8_t> pools() const {
    synchronize(device_);
    std::vector<uint8_t> all = kv_memory_.bytes();
    all.insert(all.end(), index_memory_.bytes().begin(), index_memory_.bytes().end());
    return all;
  }

  /// The pools with the slots of these rows blanked: what a step must leave alone.
  std::vector<uint8_t> pools_without(const std::vector<MsaRows>& entries) {
    synchronize(device_);
    const Tensor kv = kv_memory_, index = index_memory_;
    for (const MsaRows& entry : entries) {
      for (int64_t p = entry.begin; p < entry.begin + entry.rows; ++p) blank(entry.request, p);
    }
    std::vector<uint8_t> rest = pools();
    kv_memory_ = kv;
    index_memory_ = index;
    return rest;
  }

  /// Compares every row of the last step with fp64, and rows of padding with nothing.
  void expect_recomputed() const {
    int64_t t = 0;
    for (const MsaRows& entry : entries_) {
      for (int64_t i = 0; i < entry.rows; ++i, ++t) {
        SCOPED_TRACE("request " + std::to_string(entry.request) + ", position " +
                     std::to_string(entry.begin + i));
        expect_row(t, entry.request, entry.begin + i);
      }
    }
    for (; t < total_; ++t) expect_padding(t);
  }

  int64_t num_rows() const { return num_rows_; }
  int64_t total_rows() const { return total_; }
  const Tensor& blocks() const { return blocks_; }
  Tensor& cache_loc() { return cache_loc_; }
  Tensor& seq_len() { return seq_len_; }
  Tensor& req_to_token() { return table_; }

 private:
  enum class Kind : uint64_t { kQ, kK, kV, kIndexQ, kIndexK };

  // Channels of a token: normals, or integers whose products are exact in fp32.
  std::vector<float> channels(int64_t request, int64_t p, Kind kind, int64_t count) const {
    const auto version =
        static_cast<uint64_t>(version_[static_cast<size_t>(request * kMsaWidth + p)]);
    Rng rng((static_cast<uint64_t>(request * kMsaWidth + p) * 8 + static_cast<uint64_t>(kind)) *
                16 +
            version);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
      value = kind == Kind::kIndexQ || kind == Kind::kIndexK
                  ? static_cast<float>(rng.integer(-3, 3))
                  : bf16_to_float(bf16_from_float(rng.normal()));
    }
    return values;
  }

  void fill(Tensor& tensor, int64_t count, Kind kind) {
    int64_t t = 0;
    for (const MsaRows& entry : entries_) {
      for (int64_t p = entry.begin; p < entry.begin + entry.rows; ++p, ++t) {
        const std::vector<float> values = channels(entry.request, p, kind, count);
        std::transform(values.begin(), values.end(), tensor.data<bf16_t>() + t * count,
                       bf16_from_float);
      }
    }
  }

  void fill_inputs() {
    const int64_t heads = config.num_heads, kv_heads = config.num_kv_heads, dim = config.head_dim;
    q_ = Tensor(DType::kBf16, {total_, heads, dim});
    k_ = Tensor(DType::kBf16, {total_, kv_heads, dim});
    v_ = Tensor(DType::kBf16, {total_, kv_heads, dim});
    index_q_ = Tensor(DType::kBf16, {total_, config.index_heads, config.index_dim});
    index_k_ = Tensor(DType::kBf16, {total_, config.index_dim});
    for (Tensor* tensor : {&q_, &k_, &v_, &index_q_, &index_k_}) tensor->fill_bytes(0xFF);
    fill(q_, heads * dim, Kind::kQ);
    fill(k_, kv_heads * dim, Kind::kK);
    fill(v_, kv_heads * dim, Kind::kV);
    fill(index_q_, config.index_heads * config.index_dim, Kind::kIndexQ);
    fill(index_k_, config.index_dim, Kind::kIndexK);
    out_ = Tensor(DType::kBf16, {total_, heads, dim});
    lse_ = Tensor(DType::kF32, {total_, heads});
    blocks_ = Tensor(DType::kI32, {kv_heads, total_, backend.list_width()});
  }

  // K (0) or V (1) of a layer.
  TensorView pool(bool dense, int64_t which) {
    const int64_t heads = config.num_kv_heads, dim = config.head_dim, width = heads * dim;
    bf16_t* const layer = kv_memory_.data<bf16_t>() + (dense ? 2 * slots_ * width : 0);
    TensorView view = make_tensor(static_cast<void*>(layer + which * slots_ * width), DType::kBf16,
                                  {slots_, heads, dim});
    if (form_ == PoolForm::kHeads) view.stride = {dim, slots_ * dim, 1};
    if (form_ == PoolForm::kInterleaved) {
      view.data = layer + which * dim;
      view.stride = {2 * width, 2 * dim, 1};
    }
    return view;
  }

  void blank(int64_t request, int64_t p) {
    const int64_t at = slot(request, p);
    for (const bool dense : {false, true}) {
      for (const int64_t which : {0, 1}) {
        const TensorView view = pool(dense, which);
        for (int64_t h = 0; h < config.num_kv_heads; ++h) {
          std::memset(static_cast<bf16_t*>(view.data) + at * view.stride[0] + h * view.stride[1], 0,
                      static_cast<size_t>(config.head_dim) * 2);
        }
      }
    }
    std::memset(index_memory_.data<bf16_t>() + at * config.index_dim, 0,
                static_cast<size_t>(config.index_dim) * 2);
  }

  // Index score of block n for head h of the row, over the tokens up to it.
  double block_score(int64_t request, int64_t position, int64_t h, int64_t n) const {
    const std::vector<float> query =
        channels(request, position, Kind::kIndexQ, config.index_heads * config.index_dim);
    double largest = -HUGE_VAL, sum = 0;
    std::vector<double> products;
    const int64_t end = std::min((n + 1) * config.block_size, position + 1);
    for (int64_t j = n * config.block_size; j < end; ++j) {
      const std::vector<float> key = channels(request, j, Kind::kIndexK, config.index_dim);
      double dot = 0;
      for (int64_t c = 0; c < config.index_dim; ++c) {
        dot += static_cast<double>(query[static_cast<size_t>(h * config.index_dim + c)]) *
               key[static_cast<size_t>(c)];
      }
      products.push_back(dot * static_cast<double>(config.index_scale));
      largest = std::max(largest, products.back());
    }
    if (config.score == BlockScore::kMax) return largest;
    for (const double product : products) sum += std::exp(product - largest);
    return largest + std::log(sum);
  }

  std::vector<double> block_scores(int64_t request, int64_t position, int64_t h) const {
    std::vector<double> scores;
    for (int64_t n = 0; n <= position / config.block_size; ++n) {
      scores.push_back(block_score(request, position, h, n));
    }
    return scores;
  }

  std::vector<int32_t> choose(const std::vector<double>& scores) const {
    const auto own = static_cast<int64_t>(scores.size()) - 1;
    std::vector<int32_t> ids(scores.size());
    std::iota(ids.begin(), ids.end(), 0);
    const auto forced = [&](int64_t n) {
      return n < config.init_blocks || n > own - config.local_blocks;
    };
    std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
      if (forced(a) != forced(b)) return forced(a);
      return !forced(a) && scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
    });
    ids.resize(std::min(ids.size(), static_cast<size_t>(config.topk)));
    std::sort(ids.begin(), ids.end());
    return ids;
  }

  // The list of KV head g.
  std::vector<int32_t> expected_list(int64_t request, int64_t position, int64_t g) const {
    if (config.index_reduce == IndexReduce::kPerGroup) {
      return choose(block_scores(request, position, g));
    }
    if (config.index_reduce == IndexReduce::kMaxAll) {
      std::vector<double> most = block_scores(request, position, 0);
      for (int64_t h = 1; h < config.index_heads; ++h) {
        const std::vector<double> other = block_scores(request, position, h);
        for (size_t n = 0; n < most.size(); ++n) most[n] = std::max(most[n], other[n]);
      }
      return choose(most);
    }
    const int64_t ratio = config.index_heads / config.num_kv_heads;
    std::set<int32_t> merged;
    for (int64_t h = g * ratio; h < (g + 1) * ratio; ++h) {
      for (const int32_t id : choose(block_scores(request, position, h))) merged.insert(id);
    }
    return {merged.begin(), merged.end()};
  }

  // One head over the tokens whose block is listed; `list` null: over all.
  void expect_head(int64_t request, int64_t position, int64_t h, const std::vector<int32_t>* list,
                   const bf16_t* out, float lse) const {
    const int64_t dim = config.head_dim, g = h / (config.num_heads / config.num_kv_heads);
    const std::vector<float> query = channels(request, position, Kind::kQ, config.num_heads * dim);
    const double scale = config.softmax_scale != 0 ? static_cast<double>(config.softmax_scale)
                                                   : 1 / std::sqrt(static_cast<double>(dim));
    std::vector<double> logits;
    std::vector<int64_t> tokens;
    for (int64_t j = 0; j <= position; ++j) {
      const auto block = static_cast<int32_t>(j / config.block_size);
      if (list != nullptr && std::find(list->begin(), list->end(), block) == list->end()) continue;
      const std::vector<float> key = channels(request, j, Kind::kK, config.num_kv_heads * dim);
      double dot = 0;
      for (int64_t c = 0; c < dim; ++c) {
        dot += static_cast<double>(query[static_cast<size_t>(h * dim + c)]) *
               key[static_cast<size_t>(g * dim + c)];
      }
      logits.push_back(scale * dot);
      tokens.push_back(j);
    }
    const double largest = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    std::vector<double> expected(static_cast<size_t>(dim), 0.0);
    std::vector<double> magnitude(static_cast<size_t>(dim), 0.0);
    for (size_t i = 0; i < logits.size(); ++i) {
      const double weight = std::exp(logits[i] - largest);
      sum += weight;
      const std::vector<float> value =
          channels(request, tokens[i], Kind::kV, config.num_kv_heads * dim);
      for (int64_t c = 0; c < dim; ++c) {
        const auto channel = static_cast<double>(value[static_cast<size_t>(g * dim + c)]);
        expected[static_cast<size_t>(c)] += weight * channel;
        magnitude[static_cast<size_t>(c)] += weight * std::fabs(channel);
      }
    }
    EXPECT_NEAR(lse, largest + std::log(sum), 1e-3) << "head " << h;
    for (int64_t c = 0; c < dim; ++c) {
      const double want = expected[static_cast<size_t>(c)] / sum;
      // Roundings to bf16: of the output, and of weights (tests/support/compare.h).
      const double most = std::max(1.0, magnitude[static_cast<size_t>(c)] / sum);
      ASSERT_NEAR(bf16_to_float(out[c]), want, 4e-3 * (most + std::fabs(want)))
          << "head " << h << ", channel " << c;
    }
  }

  void expect_row(int64_t t, int64_t request, int64_t position) const {
    const int64_t heads = config.num_heads, width = backend.list_width();
    for (int64_t g = 0; g < config.num_kv_heads; ++g) {
      std::vector<int32_t> list = expected_list(request, position, g);
      const int32_t* const found = blocks_.data<int32_t>() + (g * total_ + t) * width;
      std::vector<int32_t> padded = list;
      padded.resize(static_cast<size_t>(width), -1);
      ASSERT_EQ(std::vector<int32_t>(found, found + width), padded) << "KV head " << g;
      const int64_t group = heads / config.num_kv_heads;
      for (int64_t h = g * group; h < (g + 1) * group; ++h) {
        expect_head(request, position, h, &list,
                    out_.data<bf16_t>() + (t * heads + h) * config.head_dim,
                    lse_.data<float>()[t * heads + h]);
        bf16_t dense[1024];
        std::memcpy(dense, dense_out.data() + (t * heads + h) * config.head_dim * 2,
                    static_cast<size_t>(config.head_dim) * 2);
        float lse = 0;
        std::memcpy(&lse, dense_lse.data() + (t * heads + h) * 4, 4);
        expect_head(request, position, h, nullptr, dense, lse);
      }
    }
  }

  void expect_padding(int64_t t) const {
    std::vector<uint8_t> expected;
    const int64_t heads = config.num_heads;
    for (int layer = 0; layer < 2; ++layer) {
      expected.insert(expected.end(), static_cast<size_t>(heads * config.head_dim * 2), 0);
      for (int64_t h = 0; h < heads; ++h) {
        const float empty = -std::numeric_limits<float>::infinity();
        const auto* const bytes = reinterpret_cast<const uint8_t*>(&empty);
        expected.insert(expected.end(), bytes, bytes + 4);
      }
    }
    expected.insert(expected.end(),
                    static_cast<size_t>(config.num_kv_heads * backend.list_width() * 4), 0xFF);
    EXPECT_EQ(row_bits(t), expected) << "row " << t << " of padding";
  }

  Device device_;

 public:
  MsaBackend backend;
  const MsaBackendConfig config;  ///< The backend's own: zeros resolved.
  std::vector<uint8_t> dense_out, dense_lse;

 private:
  PoolForm form_;
  int64_t slots_ = 0, num_rows_ = 0, total_ = 0;
  std::vector<int> version_;  // per request and position
  std::vector<MsaRows> entries_;
  Tensor kv_memory_, index_memory_, table_;
  Tensor seq_len_, pool_row_, ext_len_, positions_, cache_loc_;
  Tensor q_, k_, v_, index_q_, index_k_, out_, lse_, blocks_;
};

}  // namespace fovea::test
