#include "tests/serving/dsa_rig.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "fovea/row_codec.h"
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

Token make_token(const DsaConfig& config, int request, int64_t position) {
  Rng rng(static_cast<uint64_t>(request) * 1000003u + static_cast<uint64_t>(position) + 17u);
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

DsaRig::DsaRig(const DsaConfig& config, int threads, uint64_t page_seed)
    : config_(config),
      backend_(config, Device::cpu(threads)),
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
    if (p % config_.page_size == 0) {
      request.pages.push_back(free_pages_.back());
      free_pages_.pop_back();
    }
    slots[p] = request.pages.back() * static_cast<int32_t>(config_.page_size) +
               static_cast<int32_t>(p % config_.page_size);
  }
  request.len = len;
}

void DsaRig::step(ForwardMode mode, const std::vector<std::pair<int, int>>& work,
                  const StepOptions& options) {
  const bool extend = mode == ForwardMode::kExtend || mode == ForwardMode::kMixed;
  std::vector<int32_t> seq_len, ext_len, pool_row;
  int64_t rows = 0;
  for (const auto& [id, count] : work) {
    Request& owner = request(id);
    grow(owner, owner.len + count);
    seq_len.push_back(static_cast<int32_t>(owner.len));
    ext_len.push_back(count);
    pool_row.push_back(owner.row);
    rows += count;
  }
  const auto requests = static_cast<int64_t>(work.size());
  const int64_t padded = std::max(rows, options.padded_rows);
  Tensor q = nan_tensor(DType::kBf16, {padded, config_.num_heads, 576});
  Tensor k = nan_tensor(DType::kBf16, {padded, 576});
  Tensor index_q = nan_tensor(DType::kBf16, {padded, config_.index_heads, config_.index_dim});
  Tensor index_k = nan_tensor(DType::kBf16, {padded, config_.index_dim});
  Tensor gate = nan_tensor(DType::kF32, {padded, config_.index_heads});
  Tensor positions = nan_tensor(DType::kI32, {padded}), loc = nan_tensor(DType::kI32, {padded});
  int64_t row = 0;
  for (const auto& [id, count] : work) {
    const Request& owner = requests_.at(id);
    for (int64_t p = owner.len - count; p < owner.len; ++p, ++row) {
      const Token token = make_token(config_, id, p);
      put(q, row, token.q);
      put(k, row, token.k);
      put(index_q, row, token.index_q);
      put(index_k, row, token.index_k);
      put(gate, row, token.gate);
      positions.data<int32_t>()[row] = static_cast<int32_t>(p);
      loc.data<int32_t>()[row] = req_to_token_.data<int32_t>()[owner.row * config_.table_width + p];
    }
  }
  const Tensor seq = Tensor::i32({requests}, seq_len), ext = Tensor::i32({requests}, ext_len),
               rows_of_pool = Tensor::i32({requests}, pool_row);
  ForwardBatch batch;
  batch.mode = mode;
  batch.seq_len = seq;
  batch.pool_row = rows_of_pool;
  if (extend) batch.ext_len = ext;
  batch.req_to_token = req_to_token_;
  batch.positions = positions;
  batch.out_cache_loc = loc;
  batch.num_rows = rows;
  batch.padded_rows = options.padded_rows;
  if (options.host_lengths) {
    batch.host_seq_len = seq_len;
    if (extend) batch.host_ext_len = ext_len;
  }
  out = nan_tensor(DType::kBf16, {padded, config_.num_heads, 512});
  lse = nan_tensor(DType::kF32, {padded, config_.num_heads});
  indices = Tensor(DType::kI32, {padded, config_.topk});
  std::fill_n(indices.data<int32_t>(), indices.view().num_elements(), 123456789);
  DsaForwardTensors tensors;
  tensors.q = q;
  tensors.k = k;
  tensors.index_q = index_q;
  tensors.index_k = index_k;
  tensors.norm_weight = norm_weight_;
  tensors.norm_bias = norm_bias_;
  tensors.head_gate = gate;
  tensors.cos_sin = cos_sin_;
  tensors.kv_pool = kv_pool_;
  tensors.index_pool = index_pool_;
  if (options.give_indices) tensors.indices = indices;
  tensors.out = out;
  tensors.lse = lse;
  if (options.adjust) options.adjust(batch, tensors);
  backend_.begin_step(batch);
  backend_.forward({0, kSoftmaxScale}, tensors);
  if (!options.adjust && options.give_indices) collect(work);
}

int64_t DsaRig::position_of(const Request& request, int32_t slot) const {
  const int32_t* const slots = req_to_token_.data<int32_t>() + request.row * config_.table_width;
  const int32_t* const found = std::find(slots, slots + request.len, slot);
  if (found == slots + request.len) throw std::logic_error("a row selected a foreign slot");
  return found - slots;
}

void DsaRig::collect(const std::vector<std::pair<int, int>>& work) {
  const IndexTransform form =
      config_.fuse_transform ? backend_.dispatch().transform : IndexTransform::kLocal;
  const int64_t heads = config_.num_heads;
  int64_t row = 0;
  int64_t first_key = 0;
  for (const auto& [id, count] : work) {
    const Request& owner = requests_.at(id);
    for (int64_t p = owner.len - count; p < owner.len; ++p, ++row) {
      RowResult result;
      for (int64_t i = 0; i < config_.topk; ++i) {
        int64_t index = indices.data<int32_t>()[row * config_.topk + i];
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
      results_[{id, p}] = result;
    }
    first_key += owner.len;
  }
}

}  // namespace fovea::test
