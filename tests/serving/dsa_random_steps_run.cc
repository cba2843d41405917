#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "fovea/error.h"
#include "fovea/numeric.h"
#include "tests/serving/dsa_random_steps.h"

// One forward: its tensors, and what is compared after it.
namespace fovea::test {
namespace {

constexpr size_t kLogLines = 24;

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9E3779B97F4A7C15u + (hash << 6) + (hash >> 2);
  hash *= 0xFF51AFD7ED558CCDu;
  return hash ^ (hash >> 33);
}

uint64_t mix_bytes(uint64_t hash, const void* data, size_t bytes) {
  const auto* const from = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i + sizeof(uint64_t) <= bytes; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, from + i, sizeof(word));
    hash = mix(hash, word);
  }
  return hash;
}

Tensor nan_tensor(DType dtype, std::initializer_list<int64_t> shape) {
  Tensor tensor(dtype, shape);
  tensor.fill_bytes(0xFF);
  return tensor;
}

template <class T>
void put(Tensor& tensor, int64_t row, const std::vector<T>& values) {
  std::copy(values.begin(), values.end(),
            tensor.data<T>() + row * static_cast<int64_t>(values.size()));
}

bool has_ext_len(ForwardMode mode) {
  return mode == ForwardMode::kExtend || mode == ForwardMode::kMixed ||
         mode == ForwardMode::kDraftExtend;
}

}  // namespace

int32_t RandomSteps::slot_of(const ModelWork& work, int64_t position) const {
  const int64_t page = work.pages.at(static_cast<size_t>(position / config_.page_size));
  return static_cast<int32_t>(page * config_.page_size + position % config_.page_size);
}

// The integer tensors of a step.
void RandomSteps::lay_out(Launch& launch) {
  ModelStep& step = launch.step;
  step.has_plan = launch.plan != nullptr;
  step.num_rows = std::max(step.num_rows, step.live_rows());
  const int64_t rows = std::max(step.num_rows, step.padded_rows);
  const auto requests = static_cast<int64_t>(step.work.size());
  launch.positions = nan_tensor(DType::kI32, {rows});
  launch.out_cache_loc = nan_tensor(DType::kI32, {rows});
  launch.host_seq_len.clear();
  launch.host_ext_len.clear();
  std::vector<int32_t> pool_row;
  // Padded rows write to the dummy page, or nowhere. Two threads must not write one slot.
  const bool dummy = setup_.threads == 1 && rng_.integer(0, 1) == 0;
  int64_t row = 0;
  for (const ModelWork& work : step.work) {
    launch.host_seq_len.push_back(static_cast<int32_t>(work.seq_len));
    launch.host_ext_len.push_back(static_cast<int32_t>(work.rows));
    pool_row.push_back(work.pool_row);
    for (int64_t i = 0; i < work.rows; ++i, ++row) {
      const int64_t position = work.first_position + i;
      int32_t slot = dummy ? static_cast<int32_t>(row % config_.page_size) : -1;
      if (work.request >= 0) slot = slot_of(work, position);
      launch.positions.data<int32_t>()[row] = static_cast<int32_t>(position);
      launch.out_cache_loc.data<int32_t>()[row] = slot;
    }
  }
  // Where num_rows is a bound, the rows behind the last request hold whatever was there before.
  for (; row < step.num_rows; ++row) {
    launch.positions.data<int32_t>()[row] = static_cast<int32_t>(rng_.integer(0, kMaxContext));
    launch.out_cache_loc.data<int32_t>()[row] = static_cast<int32_t>(
        rng_.integer(config_.page_size, allocator_.num_pages() * config_.page_size - 1));
  }
  launch.seq_len = Tensor::i32({requests}, launch.host_seq_len);
  launch.ext_len = Tensor::i32({requests}, launch.host_ext_len);
  launch.pool_row = Tensor::i32({requests}, pool_row);
}

ForwardBatch RandomSteps::batch_of(const Launch& launch) const {
  ForwardBatch batch;
  batch.mode = launch.step.mode;
  batch.seq_len = launch.seq_len;
  batch.pool_row = launch.pool_row;
  if (has_ext_len(batch.mode)) batch.ext_len = launch.ext_len;
  batch.req_to_token = table_.view();
  batch.positions = launch.positions;
  batch.out_cache_loc = launch.out_cache_loc;
  batch.num_rows = launch.step.num_rows;
  batch.padded_rows = launch.step.padded_rows;
  if (launch.host_lengths) {
    batch.host_seq_len = launch.host_seq_len;
    if (has_ext_len(batch.mode)) batch.host_ext_len = launch.host_ext_len;
  }
  return batch;
}

void RandomSteps::run(Launch& launch) {
  lay_out(launch);
  note(launch);
  const ForwardBatch batch = batch_of(launch);
  if (launch.plan != nullptr) {
    backend_.begin_step(batch, launch.plan);
    ++counts_.plan_steps;
  } else {
    backend_.begin_step(batch);
  }
  ++counts_.steps[launch.step.mode];
  const DsaDispatch& dispatch =
      launch.plan != nullptr ? launch.plan->dispatch() : backend_.dispatch();
  check_metadata(config_, launch.step,
                 launch.plan != nullptr ? launch.plan->metadata() : backend_.metadata(),
                 dispatch.transform == IndexTransform::kRagged);
  check_report(launch);
  for (const int layer : launch.layers) forward(launch, layer);
  check_pools();
  check_pages();
}

// Every step is legal.
void RandomSteps::check_report(const Launch& launch) const {
  if (!config_.check) return;
  const MetadataReport report = launch.plan != nullptr ? launch.plan->report() : backend_.report();
  if (report.fault == MetadataFault::kNone) return;
  throw StepFailure("a legal step is reported: " + to_string(report));
}

void RandomSteps::fill_inputs(const Launch& launch, int layer, Inputs& inputs) {
  const int64_t rows = launch.positions.view().shape[0];
  inputs.q = nan_tensor(DType::kBf16, {rows, config_.num_heads, 576});
  inputs.k = nan_tensor(DType::kBf16, {rows, 576});
  inputs.index_q = nan_tensor(DType::kBf16, {rows, config_.index_heads, config_.index_dim});
  inputs.index_k = nan_tensor(DType::kBf16, {rows, config_.index_dim});
  inputs.gate = nan_tensor(DType::kF32, {rows, config_.index_heads});
  inputs.out = nan_tensor(DType::kBf16, {rows, config_.num_heads, 512});
  inputs.lse = nan_tensor(DType::kF32, {rows, config_.num_heads});
  inputs.indices = Tensor(DType::kI32, {rows, config_.topk});
  std::fill_n(inputs.indices.data<int32_t>(), rows * config_.topk, 123456789);
  int64_t row = 0;
  for (const ModelWork& work : launch.step.work) {
    for (int64_t i = 0; i < work.rows; ++i, ++row) {
      if (work.request < 0) continue;
      const int64_t position = work.first_position + i;
      const TokenImage& image =
          images_.at(layer, work.history.at(static_cast<size_t>(position)), position);
      put(inputs.q, row, image.q);
      put(inputs.k, row, image.k);
      put(inputs.index_q, row, image.index_q);
      put(inputs.index_k, row, image.index_k);
      put(inputs.gate, row, image.gate);
      write_shadow(layer, slot_of(work, position), image);
    }
  }
}

void RandomSteps::write_shadow(int layer, int32_t slot, const TokenImage& image) {
  const auto at = static_cast<size_t>(layer);
  const auto page_size = static_cast<size_t>(config_.page_size), dim = image.index_codes.size();
  const size_t page = static_cast<size_t>(slot) / page_size,
               offset = static_cast<size_t>(slot) % page_size;
  std::memcpy(kv_shadow_[at].data() + static_cast<size_t>(slot) * image.row.size(),
              image.row.data(), image.row.size());
  uint8_t* const index_page = index_shadow_[at].data() + page * page_size * (dim + 4);
  std::memcpy(index_page + offset * dim, image.index_codes.data(), dim);
  std::memcpy(index_page + page_size * dim + offset * 4, &image.index_scale, 4);
}

void RandomSteps::forward(const Launch& launch, int layer) {
  Inputs inputs;
  fill_inputs(launch, layer, inputs);
  DsaForwardTensors tensors;
  tensors.q = inputs.q;
  tensors.k = inputs.k;
  tensors.index_q = inputs.index_q;
  tensors.index_k = inputs.index_k;
  tensors.norm_weight = images_.norm_weight();
  tensors.norm_bias = images_.norm_bias();
  tensors.head_gate = inputs.gate;
  tensors.cos_sin = images_.cos_sin();
  tensors.kv_pool = kv_pool_.layer(layer);
  tensors.index_pool = index_pool_.layer(layer);
  tensors.indices = inputs.indices;
  tensors.out = inputs.out;
  tensors.lse = inputs.lse;
  DsaLayer model_layer{layer, kSoftmaxScale};
  if (config_.row_format == RowFormat::kF576) model_layer.k_scale = kF576Scale;
  if (launch.plan != nullptr) {
    backend_.forward(*launch.plan, model_layer, tensors);
  } else {
    backend_.forward(model_layer, tensors);
  }
  check_outputs(launch, layer, inputs);
}

void RandomSteps::check_outputs(const Launch& launch, int layer, const Inputs& inputs) {
  int64_t row = 0;
  for (size_t r = 0; r < launch.step.work.size(); ++r) {
    for (int64_t i = 0; i < launch.step.work[r].rows; ++i, ++row) {
      if (launch.step.work[r].request < 0) continue;
      try {
        check_row(launch, layer, r, i, row, inputs);
      } catch (const StepFailure& failure) {
        throw StepFailure("layer " + std::to_string(layer) + " row " + std::to_string(row) +
                          " (request " + std::to_string(launch.step.work[r].request) +
                          " position " + std::to_string(launch.step.work[r].first_position + i) +
                          "): " + failure.what());
      }
    }
  }
  for (; row < inputs.lse.view().shape[0]; ++row) {
    for (int64_t i = 0; i < config_.topk; ++i) {
      expect_equal(inputs.indices.data<int32_t>()[row * config_.topk + i], -1, "indices of padding",
                   row);
    }
    for (int64_t h = 0; h < config_.num_heads; ++h) {
      const float lse = inputs.lse.data<float>()[row * config_.num_heads + h];
      expect_equal(lse == -std::numeric_limits<float>::infinity(), 1, "lse of padding is -inf",
                   row);
    }
    for (int64_t i = 0; i < config_.num_heads * 512; ++i) {
      expect_equal(inputs.out.data<bf16_t>()[row * config_.num_heads * 512 + i].bits, 0,
                   "out of padding", row);
    }
  }
}

void RandomSteps::check_row(const Launch& launch, int layer, size_t owner, int64_t i, int64_t row,
                            const Inputs& inputs) {
  const ModelWork& work = launch.step.work[owner];
  const int64_t position = work.first_position + i;
  const TokenImage& query =
      images_.at(layer, work.history[static_cast<size_t>(position)], position);
  std::vector<const TokenImage*> keys;
  for (int64_t j = 0; j < work.row_len(i); ++j) {
    keys.push_back(&images_.at(layer, work.history[static_cast<size_t>(j)], j));
  }
  const DsaDispatch& dispatch =
      launch.plan != nullptr ? launch.plan->dispatch() : backend_.dispatch();
  int64_t first_key = 0;
  for (size_t r = 0; r < owner; ++r) first_key += launch.step.work[r].kv_len;
  const auto index_of = [&](int64_t j) -> int64_t {
    if (!config_.fuse_transform) return j;
    return dispatch.transform == IndexTransform::kRagged ? first_key + j : slot_of(work, j);
  };
  // The selection as positions, whatever its form.
  std::vector<int32_t> actual;
  for (int64_t c = 0; c < config_.topk; ++c) {
    const int32_t index = inputs.indices.data<int32_t>()[row * config_.topk + c];
    int32_t found = -1;
    for (int32_t j = 0; j < static_cast<int32_t>(keys.size()) && index >= 0; ++j) {
      if (index_of(j) == index) found = j;
    }
    if (index != -1 && found < 0) {
      throw StepFailure("indices[" + std::to_string(c) + "] = " + std::to_string(index) +
                        ", which is no key of the row");
    }
    actual.push_back(found);
  }
  const ModelSelection expected = select_positions(config_, query, keys);
  ++counts_.rows;
  if (actual != expected.positions) {
    if (!is_legal_selection(expected, actual)) {
      for (size_t c = 0; c < actual.size(); ++c) {
        expect_equal(actual[c], expected.positions[c], "selected position",
                     static_cast<int64_t>(c));
      }
    }
    ++counts_.unclear_rows;
  }
  const bf16_t* const out = inputs.out.data<bf16_t>() + row * config_.num_heads * 512;
  const float* const lse = inputs.lse.data<float>() + row * config_.num_heads;
  if (rng_.integer(0, 3) == 0) {
    check_attention(config_, double{kSoftmaxScale}, query, keys, actual, out, lse);
  }
  uint64_t digest = mix_bytes(7, out, static_cast<size_t>(config_.num_heads) * 1024);
  digest = mix_bytes(digest, lse, static_cast<size_t>(config_.num_heads) * 4);
  for (const int32_t j : actual) digest = mix(digest, static_cast<uint64_t>(j));
  check_repeat(layer, work, i, digest);
}

// A row depends on the tokens before it, not on how they came into the cache.
void RandomSteps::check_repeat(int layer, const ModelWork& work, int64_t i, uint64_t digest) {
  if (!setup_.bit_equal) return;
  const auto position = static_cast<size_t>(work.first_position + i);
  uint64_t key = mix(static_cast<uint64_t>(layer), static_cast<uint64_t>(work.row_len(i)));
  for (size_t p = 0; p <= position; ++p) key = mix(key, static_cast<uint64_t>(work.history[p]));
  const auto [found, fresh] = digests_.emplace(key, digest);
  if (fresh) return;
  ++counts_.repeated_rows;
  if (found->second != digest) {
    throw StepFailure("the row has other bits than when it was computed before");
  }
}

void RandomSteps::check_pools() {
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto at = static_cast<size_t>(layer);
    const auto compare = [&](const char* name, const TensorView& pool,
                             const std::vector<uint8_t>& shadow) {
      // Page 0 is the dummy page: whatever padded rows wrote.
      const auto page_bytes = static_cast<size_t>(pool.shape[1]);
      const auto* const bytes = static_cast<const uint8_t*>(pool.data);
      if (std::memcmp(bytes + page_bytes, shadow.data() + page_bytes, shadow.size() - page_bytes) ==
          0) {
        return;
      }
      for (size_t i = page_bytes; i < shadow.size(); ++i) {
        if (bytes[i] == shadow[i]) continue;
        throw StepFailure(std::string(name) + " of layer " + std::to_string(layer) + ", page " +
                          std::to_string(i / page_bytes) + " byte " +
                          std::to_string(i % page_bytes) + " is " + std::to_string(bytes[i]) +
                          ", expected " + std::to_string(shadow[i]));
      }
    };
    compare("kv_pool", kv_pool_.layer(layer), kv_shadow_[at]);
    compare("index_pool", index_pool_.layer(layer), index_shadow_[at]);
    check_live_rows(layer);
  }
}

// The rows of every live position, through the page lists of the requests.
void RandomSteps::check_live_rows(int layer) {
  const auto at = static_cast<size_t>(layer);
  const auto page_size = static_cast<size_t>(config_.page_size),
             dim = static_cast<size_t>(config_.index_dim);
  const auto* const kv = static_cast<const uint8_t*>(kv_pool_.layer(layer).data);
  const auto* const index = static_cast<const uint8_t*>(index_pool_.layer(layer).data);
  for (const auto& [id, request] : live_) {
    for (int64_t p = 0; p < request.stored[at]; ++p) {
      const TokenImage& image = images_.at(layer, request.tokens[static_cast<size_t>(p)], p);
      const auto page = static_cast<size_t>(request.pages[static_cast<size_t>(p) / page_size]),
                 offset = static_cast<size_t>(p) % page_size;
      const uint8_t* const index_page = index + page * page_size * (dim + 4);
      const bool equal =
          std::memcmp(kv + (page * page_size + offset) * image.row.size(), image.row.data(),
                      image.row.size()) == 0 &&
          std::memcmp(index_page + offset * dim, image.index_codes.data(), dim) == 0 &&
          std::memcmp(index_page + page_size * dim + offset * 4, &image.index_scale, 4) == 0;
      if (!equal) {
        throw StepFailure("layer " + std::to_string(layer) + ": the pools do not hold position " +
                          std::to_string(p) + " of request " + std::to_string(id));
      }
    }
  }
}

// Every page is free, cached or held, and held ones are those of the live requests.
void RandomSteps::check_pages() const {
  const PageCounts counts = allocator_.counts();
  expect_equal(counts.free + counts.referenced + counts.cached, counts.total, "pages in all", 0);
  expect_equal(counts.total, allocator_.num_pages() - 1, "pages", 0);
  std::set<int32_t> held;
  for (const auto& [id, request] : live_) held.insert(request.pages.begin(), request.pages.end());
  expect_equal(counts.referenced, static_cast<int64_t>(held.size()), "referenced pages", 0);
  expect_equal(table_.num_free(), config_.max_requests - static_cast<int64_t>(live_.size()),
               "free rows of the request table", 0);
}

// "extend host T=9: 3[0,5) 4[2,4)": request[first position, end) of each.
void RandomSteps::note(const Launch& launch) {
  const ModelStep& step = launch.step;
  std::string line(to_string(step.mode));
  if (launch.plan != nullptr) {
    line += " plan " + std::to_string(launch.plan->bucket().num_requests);
  }
  if (launch.host_lengths) line += " host";
  if (step.padded_rows > 0) line += " T=" + std::to_string(step.padded_rows);
  line += ":";
  for (const ModelWork& work : step.work) {
    if (work.request < 0) {
      line += " pad";
      continue;
    }
    line += " " + std::to_string(work.request) + "[" + std::to_string(work.first_position) + "," +
            std::to_string(work.first_position + work.rows) + ")";
  }
  log_.push_back(std::move(line));
  if (log_.size() > kLogLines) log_.pop_front();
}

}  // namespace fovea::test
