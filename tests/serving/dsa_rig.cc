#include "tests/serving/dsa_rig.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include <gtest/gtest.h>

#include "fovea/row_codec.h"
#include "fovea/stream.h"
#include "tests/support/rng.h"

namespace fovea::test {
namespace {

constexpr int64_t kMaxRequests = 8;

template <class T>
void put(Tensor& tensor, int64_t row, const std::vector<T>& values) {
  std::memcpy(tensor.data<T>() + row * static_cast<int64_t>(values.size()), values.data(),
              values.size() * sizeof(T));
}

Tensor nan_tensor(DType dtype, std::initializer_list<int64_t> shape) {
  Tensor tensor(dtype, shape);
  tensor.fill_bytes(0xFF);
  return tensor;
}

}  // namespace

Token make_token(const DsaConfig& config, int request, int64_t position, int guess) {
  Rng rng(static_cast<uint64_t>(request) * 1000003u + static_cast<uint64_t>(position) + 17u +
          static_cast<uint64_t>(guess) * 7919000033u);
  Token token;
  token.q = rng.bf16_normals(config.num_heads * 576);
  token.k = rng.bf16_normals(576);
  token.index_q = rng.bf16_normals(config.index_heads * config.index_dim);
  token.index_k = rng.bf16_normals(config.index_dim);
  token.gate = rng.normals(config.index_heads);
  return token;
}

Tensor make_cos_sin(int64_t positions, int64_t rope_dim) {
  Tensor tensor(DType::kF32, {positions, rope_dim});
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t i = 0; i < rope_dim / 2; ++i) {
      const double angle =
          static_cast<double>(p) *
          std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(rope_dim));
      tensor.data<float>()[p * rope_dim + i] = static_cast<float>(std::cos(angle));
      tensor.data<float>()[p * rope_dim + rope_dim / 2 + i] = static_cast<float>(std::sin(angle));
    }
  }
  return tensor;
}

Tensor make_norm_weight(int64_t width) {
  Rng rng(91);
  std::vector<float> values(static_cast<size_t>(width));
  for (float& value : values) value = rng.uniform(0.5f, 1.5f);
  return Tensor::f32({width}, values);
}

Tensor make_norm_bias(int64_t width) {
  Rng rng(92);
  return Tensor::f32({width}, rng.normals(width, 0.1f));
}

DsaConfig DsaRig::small_config(int64_t page_size, RowFormat row_format) {
  DsaConfig config;
  config.num_heads = 4;
  config.index_heads = 4;
  config.topk = 8;
  config.page_size = page_size;
  config.row_format = row_format;
  config.max_requests = kMaxRequests;
  config.max_rows = 160;
  config.table_width = 128;
  return config;
}

namespace {
std::string rig_device = "cpu";
}  // namespace

void RigDevice::use(const std::string& device) { rig_device = device; }
Device RigDevice::get(int threads) { return parse_device(rig_device, threads); }

DsaRig::DsaRig(const DsaConfig& config, int threads, uint64_t page_seed)
    : config_(config),
      device_(RigDevice::get(threads)),
      backend_(config, device_),
      req_to_token_(DType::kI32, {kMaxRequests + 1, config.table_width}),
      cos_sin_(make_cos_sin(config.table_width, config.rope_dim)),
      norm_weight_(make_norm_weight(config.index_dim)),
      norm_bias_(make_norm_bias(config.index_dim)) {
  const int64_t pages = 4 * config.table_width / config.page_size + kMaxRequests + 1;
  kv_pool_ =
      nan_tensor(DType::kU8, {pages, page_bytes(config.row_format, config.page_size, 576) + 16});
  index_pool_ = nan_tensor(DType::kU8, {pages, config.page_size * (config.index_dim + 4) + 8});
  for (int32_t page = 1; page < pages; ++page) free_pages_.push_back(page);
  Rng rng(page_seed);
  for (size_t i = free_pages_.size() - 1; i > 0; --i) {
    std::swap(free_pages_[i],
              free_pages_[static_cast<size_t>(rng.integer(0, static_cast<int64_t>(i)))]);
  }
  for (int32_t row = kMaxRequests; row >= 1; --row) free_rows_.push_back(row);
  // Row 0 is that of padded requests: every position in slot 0 of the dummy page.
  std::fill_n(req_to_token_.data<int32_t>(), config.table_width, 0);
}

DsaRig::Request& DsaRig::request(int id) {
  const auto found = requests_.find(id);
  if (found != requests_.end()) return found->second;
  Request fresh;
  fresh.row = free_rows_.back();
  free_rows_.pop_back();
  return requests_.emplace(id, fresh).first->second;
}

void DsaRig::release(int id) {
  Request& gone = requests_.at(id);
  free_rows_.push_back(gone.row);
  free_pages_.insert(free_pages_.end(), gone.pages.begin(), gone.pages.end());
  requests_.erase(id);
}

void DsaRig::grow(Request& request, int64_t len) {
  int32_t* const slots = req_to_token_.data<int32_t>() + request.row * config_.table_width;
  for (int64_t p = request.len; p < len; ++p) {
    const auto page = static_cast<size_t>(p / config_.page_size);
    if (page == request.pages.size()) {
      request.pages.push_back(free_pages_.back());
      free_pages_.pop_back();
    }
    slots[p] = request.pages[page] * static_cast<int32_t>(config_.page_size) +
               static_cast<int32_t>(p % config_.page_size);
  }
  request.len = len;
}

int64_t DsaRig::rows_of(ForwardMode mode, int count) const {
  const bool fixed = mode == ForwardMode::kTargetVerify || mode == ForwardMode::kDraftExtendV2;
  return fixed ? config_.rows_per_request : count;
}

// The inputs of a step's rows. Padding holds NaN and the slot of a live token.
struct DsaRig::Rows {
  Tensor q, k, index_q, index_k, gate, positions, loc;
};

DsaRig::Rows DsaRig::make_rows(const std::vector<Work>& work, int64_t dummy_rows, int64_t extent) {
  Rows rows;
  rows.q = nan_tensor(DType::kBf16, {extent, config_.num_heads, 576});
  rows.k = nan_tensor(DType::kBf16, {extent, 576});
  rows.index_q = nan_tensor(DType::kBf16, {extent, config_.index_heads, config_.index_dim});
  rows.index_k = nan_tensor(DType::kBf16, {extent, config_.index_dim});
  rows.gate = nan_tensor(DType::kF32, {extent, config_.index_heads});
  rows.positions = Tensor(DType::kI32, {extent});
  rows.loc = nan_tensor(DType::kI32, {extent});
  int32_t* const positions = rows.positions.data<int32_t>();
  int32_t* const loc = rows.loc.data<int32_t>();
  int64_t row = 0;
  for (const Work& item : work) {
    const int32_t* const slots =
        req_to_token_.data<int32_t>() + requests_.at(item.id).row * config_.table_width;
    for (int64_t i = 0; i < item.rows; ++i, ++row) {
      const Token token =
          make_token(config_, item.id, item.first + i, i < item.count ? 0 : ++guesses_);
      put(rows.q, row, token.q);
      put(rows.k, row, token.k);
      put(rows.index_q, row, token.index_q);
      put(rows.index_k, row, token.index_k);
      put(rows.gate, row, token.gate);
      positions[row] = static_cast<int32_t>(item.first + i);
      loc[row] = slots[item.first + i];
    }
  }
  const int64_t live = row;
  for (; row < live + dummy_rows; ++row) {
    loc[row] = static_cast<int32_t>((row - live) % config_.page_size);
  }
  for (; row > 0 && row < extent; ++row) loc[row] = loc[0];
  return rows;
}

// A batch with the tensors that it views.
struct DsaRig::Inputs {
  std::vector<int32_t> host_seq_len, host_ext_len;
  Tensor seq_len, ext_len, pool_row;
  Rows rows;
  ForwardBatch batch;
  int64_t extent = 0;
};

DsaRig::Inputs DsaRig::make_inputs(ForwardMode mode, const std::vector<Work>& work,
                                   const StepOptions& options) {
  const bool gives_ext_len = mode == ForwardMode::kExtend || mode == ForwardMode::kMixed ||
                             mode == ForwardMode::kDraftExtend;
  Inputs in;
  std::vector<int32_t> pool_row;
  int64_t num_rows = 0, dummy_rows = 0;
  for (const Work& item : work) {
    const int64_t new_rows = mode == ForwardMode::kTargetVerify ? 0 : item.rows;
    in.host_seq_len.push_back(static_cast<int32_t>(item.first + new_rows));
    in.host_ext_len.push_back(static_cast<int32_t>(item.rows));
    pool_row.push_back(requests_.at(item.id).row);
    num_rows += item.rows;
  }
  while (options.plan != nullptr &&
         static_cast<int64_t>(pool_row.size()) < options.plan->bucket().num_requests) {
    const int64_t rows = rows_of(mode, 1);
    in.host_seq_len.push_back(kPaddedSeqLen);
    in.host_ext_len.push_back(static_cast<int32_t>(rows));
    pool_row.push_back(0);
    dummy_rows += rows;
  }
  num_rows += dummy_rows;
  in.extent = std::max({num_rows, options.rows_bound, options.padded_rows});
  in.rows = make_rows(work, dummy_rows, in.extent);
  const auto requests = static_cast<int64_t>(pool_row.size());
  in.seq_len = Tensor::i32({requests}, in.host_seq_len);
  in.ext_len = Tensor::i32({requests}, in.host_ext_len);
  in.pool_row = Tensor::i32({requests}, pool_row);
  in.batch.mode = mode;
  in.batch.seq_len = in.seq_len;
  in.batch.pool_row = in.pool_row;
  if (gives_ext_len) in.batch.ext_len = in.ext_len;
  in.batch.req_to_token = req_to_token_;
  in.batch.positions = in.rows.positions;
  in.batch.out_cache_loc = in.rows.loc;
  in.batch.num_rows = std::max(num_rows, options.rows_bound);
  in.batch.padded_rows = options.padded_rows;
  if (options.host_lengths) {
    in.batch.host_seq_len = in.host_seq_len;
    if (gives_ext_len) in.batch.host_ext_len = in.host_ext_len;
  }
  return in;
}

void DsaRig::step(ForwardMode mode, const std::vector<std::pair<int, int>>& requests,
                  const StepOptions& options) {
  std::vector<Work> work;
  for (const auto& [id, count] : requests) {
    Request& owner = request(id);
    const int64_t first = owner.len, rows = rows_of(mode, count);
    work.push_back({id, count, first, rows});
    grow(owner, first + rows);
  }
  Inputs in = make_inputs(mode, work, options);
  DsaForwardTensors tensors = forward_tensors(in.rows, in.extent);
  if (options.give_indices) tensors.indices = indices;
  if (options.adjust) options.adjust(in.batch, tensors);
  if (options.context_ranks > 0) {
    for (int rank = 0; rank < options.context_ranks; ++rank) {
      const ContextSplitProblem problem{options.context_ranks, rank, options.context_scheme,
                                        config_.extend_kv_source};
      run_rank(in, context_split(problem, in.host_seq_len, in.host_ext_len), rank, options);
    }
  } else if (options.plan == nullptr) {
    backend_.begin_step(in.batch);
    backend_.forward(layer, tensors);
  } else {
    backend_.begin_step(in.batch, options.plan);
    backend_.forward(*options.plan, layer, tensors);
  }
  synchronize(device_);
  if (!options.adjust && options.give_indices) {
    collect(work, options.plan != nullptr ? options.plan->dispatch() : backend_.dispatch());
  }
  for (const Work& item : work) requests_.at(item.id).len = item.first + item.count;
}

// Rows `from` of a tensor, packed.
Tensor take_rows(const Tensor& tensor, const std::vector<int32_t>& from) {
  const ConstTensorView view = tensor;
  const auto count = static_cast<int64_t>(from.size());
  const int64_t row_bytes = view.stride[0] * static_cast<int64_t>(size_of(view.dtype));
  Tensor taken;
  if (view.rank == 1) taken = Tensor(view.dtype, {count});
  if (view.rank == 2) taken = Tensor(view.dtype, {count, view.shape[1]});
  if (view.rank == 3) taken = Tensor(view.dtype, {count, view.shape[1], view.shape[2]});
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(taken.data<uint8_t>() + i * row_bytes,
                tensor.data<uint8_t>() + from[static_cast<size_t>(i)] * row_bytes,
                static_cast<size_t>(row_bytes));
  }
  return taken;
}

void put_rows(const Tensor& rows, const std::vector<int32_t>& to, Tensor& tensor) {
  const ConstTensorView view = tensor;
  const int64_t row_bytes = view.stride[0] * static_cast<int64_t>(size_of(view.dtype));
  for (size_t i = 0; i < to.size(); ++i) {
    std::memcpy(tensor.data<uint8_t>() + to[i] * row_bytes,
                rows.data<uint8_t>() + static_cast<int64_t>(i) * row_bytes,
                static_cast<size_t>(row_bytes));
  }
}

// One rank of a context split: its own queries, everybody's keys.
void DsaRig::run_rank(Inputs& in, const ContextSplit& split, int rank, const StepOptions& options) {
  const Tensor q = take_rows(in.rows.q, split.rank_rows),
               index_q = take_rows(in.rows.index_q, split.rank_rows),
               gate = take_rows(in.rows.gate, split.rank_rows),
               positions = take_rows(in.rows.positions, split.rank_rows);
  EXPECT_EQ(positions.values<int32_t>(), split.positions);
  Tensor whole_out = out, whole_lse = lse, whole_indices = indices;
  ForwardBatch batch = in.batch;
  batch.context_split = &split;
  batch.num_rows = static_cast<int64_t>(split.rank_rows.size());
  batch.positions = positions;
  batch.store_positions = in.batch.positions;
  DsaForwardTensors tensors = forward_tensors(in.rows, batch.num_rows);
  tensors.q = q;
  tensors.index_q = index_q;
  tensors.head_gate = gate;
  if (options.give_indices) tensors.indices = indices;
  if (options.adjust_rank) options.adjust_rank(rank, batch, tensors);
  backend_.begin_step(batch);
  backend_.forward(layer, tensors);
  synchronize(device_);
  for (const auto& [rows, whole] :
       {std::pair{&out, &whole_out}, {&lse, &whole_lse}, {&indices, &whole_indices}}) {
    put_rows(*rows, split.rank_rows, *whole);
    std::swap(*rows, *whole);
  }
}

void DsaRig::draft_chain(const std::vector<int>& requests, const std::vector<DsaStepPlan*>& plans,
                         bool host_lengths) {
  const auto count = static_cast<int64_t>(plans.size());
  std::vector<std::vector<Work>> work(plans.size());
  for (const int id : requests) {
    Request& owner = request(id);
    for (int64_t j = 0; j < count; ++j) {
      work[static_cast<size_t>(j)].push_back({id, 1, owner.len + j, 1});
    }
    grow(owner, owner.len + count);
  }
  std::vector<Inputs> inputs;
  std::vector<DraftStep> steps;
  for (size_t j = 0; j < plans.size(); ++j) {
    inputs.push_back(make_inputs(ForwardMode::kDecode, work[j],
                                 {.host_lengths = host_lengths, .plan = plans[j]}));
    steps.push_back({plans[j], inputs[j].rows.positions, inputs[j].rows.loc});
  }
  // Committed lengths: what the first step's requests have without its new token.
  std::vector<int32_t> committed = inputs[0].host_seq_len;
  for (size_t r = 0; r < requests.size(); ++r) committed[r] -= 1;
  const Tensor seq_len = Tensor::i32({static_cast<int64_t>(committed.size())}, committed);
  ForwardBatch batch = inputs[0].batch;
  batch.seq_len = seq_len;
  if (host_lengths) batch.host_seq_len = committed;
  batch.positions = batch.out_cache_loc = {};
  backend_.begin_draft_steps(batch, steps);
  for (size_t j = 0; j < plans.size(); ++j) {
    DsaForwardTensors tensors = forward_tensors(inputs[j].rows, inputs[j].extent);
    tensors.indices = indices;
    backend_.forward(*plans[j], layer, tensors);
    synchronize(device_);
    collect(work[j], plans[j]->dispatch());
  }
}

DsaForwardTensors DsaRig::forward_tensors(Rows& rows, int64_t extent) {
  out = nan_tensor(DType::kBf16, {extent, config_.num_heads, 512});
  lse = nan_tensor(DType::kF32, {extent, config_.num_heads});
  indices = Tensor(DType::kI32, {extent, config_.topk});
  std::fill_n(indices.data<int32_t>(), indices.view().num_elements(), 123456789);
  DsaForwardTensors tensors;
  tensors.q = rows.q;
  tensors.k = rows.k;
  tensors.index_q = rows.index_q;
  tensors.index_k = rows.index_k;
  tensors.norm_weight = norm_weight_;
  tensors.norm_bias = norm_bias_;
  tensors.head_gate = rows.gate;
  tensors.cos_sin = cos_sin_;
  tensors.kv_pool = kv_pool_;
  tensors.index_pool = index_pool_;
  tensors.out = out;
  tensors.lse = lse;
  return tensors;
}

int64_t DsaRig::position_of(const Request& request, int32_t slot) const {
  const int32_t* const slots = req_to_token_.data<int32_t>() + request.row * config_.table_width;
  const int32_t* const found = std::find(slots, slots + request.len, slot);
  if (found == slots + request.len) throw std::logic_error("a row selected a foreign slot");
  return found - slots;
}

void DsaRig::collect(const std::vector<Work>& work, const DsaDispatch& dispatch) {
  const IndexTransform form = config_.fuse_transform ? dispatch.transform : IndexTransform::kLocal;
  const int64_t heads = config_.num_heads;
  int64_t first_row = 0;
  int64_t first_key = 0;
  for (const Work& item : work) {
    const Request& owner = requests_.at(item.id);
    for (int64_t i = 0; i < item.count; ++i) {
      const int64_t row = first_row + i;
      RowResult result;
      for (int64_t slot = 0; slot < config_.topk; ++slot) {
        int64_t index = indices.data<int32_t>()[row * config_.topk + slot];
        if (index >= 0 && form == IndexTransform::kPaged) {
          index = position_of(owner, static_cast<int32_t>(index));
        } else if (index >= 0 && form == IndexTransform::kRagged) {
          index -= first_key;
        }
        result.positions.push_back(static_cast<int32_t>(index));
      }
      const auto* const bits = reinterpret_cast<const uint16_t*>(out.data<bf16_t>());
      result.out.assign(bits + row * heads * 512, bits + (row + 1) * heads * 512);
      result.lse.assign(lse.data<float>() + row * heads, lse.data<float>() + (row + 1) * heads);
      results_[{item.id, item.first + i}] = result;
    }
    first_row += item.rows;
    first_key += owner.len;
  }
}

}  // namespace fovea::test
