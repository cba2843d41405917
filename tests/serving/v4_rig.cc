#include "tests/serving/v4_rig.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fovea/numeric.h"
#include "fovea/row_codec.h"
#include "fovea/stream.h"
#include "src/core/fp8_tile.h"
#include "src/core/v4_row.h"
#include "tests/support/rng.h"

namespace fovea::test {
namespace {

constexpr int64_t kDim = 512, kIndexDim = 128, kRope = 64, kPositions = 600;

int64_t channels_of(int64_t ratio, int64_t dim) { return (ratio == 4 ? 2 : 1) * dim; }
size_t as_size(int64_t value) { return static_cast<size_t>(value); }

// The row as a cache of v4 gives it back.
std::vector<double> cached_row(const std::vector<bf16_t>& row, RowFormat format) {
  std::vector<double> values(row.size());
  if (format == RowFormat::kBf16) {
    std::transform(row.begin(), row.end(), values.begin(), bf16_to_float);
    return values;
  }
  std::array<uint8_t, 576> data;
  std::array<uint8_t, 8> scales;
  internal::pack_v4_row(row.data(), data.data(), scales.data());
  for (size_t i = 0; i < 448; ++i) {
    values[i] =
        bf16_to_float(bf16_from_float(e4m3_to_float(data[i]) * ue8m0_to_float(scales[i / 64])));
  }
  for (size_t i = 448; i < row.size(); ++i) values[i] = bf16_to_float(row[i]);
  return values;
}

struct Codes {
  std::vector<double> values;
};

Codes quantised(const bf16_t* x, ScaleMode mode) {
  std::array<uint8_t, kIndexDim> codes;
  const float scale =
      internal::quantize_tile(x, kIndexDim, internal::index_tile_scale, mode, codes.data());
  Codes result;
  for (const uint8_t code : codes) {
    result.values.push_back(static_cast<double>(e4m3_to_float(code)) * scale);
  }
  return result;
}

// Entry g of a compressor over the history, before its quantiser.
std::vector<bf16_t> entry(const V4BackendConfig& config, int64_t layer, const V4History& history,
                          int64_t g, bool index) {
  const V4Layer& weights = v4_layer(layer);
  const int64_t ratio = kV4Ratios[as_size(layer)], dim = index ? kIndexDim : kDim;
  const int64_t channels = channels_of(ratio, dim);
  const float* const ape = (index ? weights.index_ape : weights.ape).data<float>();
  const float* const norm = (index ? weights.index_norm_weight : weights.norm_weight).data<float>();
  std::vector<double> e(as_size(dim));
  const int64_t first = ratio == 4 ? std::max<int64_t>(0, (g - 1) * ratio) : g * ratio;
  for (int64_t i = 0; i < dim; ++i) {
    double largest = -HUGE_VAL, sum = 0, value = 0;
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t t = first; t < (g + 1) * ratio; ++t) {
        const V4Token& token = v4_token(layer, history[as_size(t)]);
        const float* const gate = (index ? token.index_gate : token.gate).data();
        const int64_t c = i + (ratio == 4 && t >= g * ratio ? dim : 0);
        const double u = static_cast<double>(gate[channels + c]) + ape[(t % ratio) * channels + c];
        if (pass == 0) {
          largest = std::max(largest, u);
        } else {
          sum += std::exp(u - largest);
          value += std::exp(u - largest) * gate[c];
        }
      }
    }
    e[as_size(i)] = value / sum;
  }
  const double mean =
      std::inner_product(e.begin(), e.end(), e.begin(), 0.0) / static_cast<double>(dim);
  for (int64_t i = 0; i < dim; ++i) {
    e[as_size(i)] *= norm[i] / std::sqrt(mean + static_cast<double>(config.eps));
  }
  const float* const table = weights.cos_sin.data<float>() + g * ratio * kRope;
  for (int64_t pair = 0; pair < kRope / 2; ++pair) {
    double* const x = e.data() + dim - kRope + 2 * pair;
    const double cosine = table[pair], sine = table[kRope / 2 + pair];
    const double turned = x[0] * cosine - x[1] * sine;
    x[1] = x[1] * cosine + x[0] * sine;
    x[0] = turned;
  }
  std::vector<bf16_t> rounded(as_size(dim));
  std::transform(e.begin(), e.end(), rounded.begin(),
                 [](double x) { return bf16_from_float(static_cast<float>(x)); });
  return rounded;
}

// Scores of every entry for the last token's row.
std::vector<double> scores(const V4BackendConfig& config, int64_t layer, const V4History& history) {
  const V4Token& token = v4_token(layer, history.back());
  const auto count = static_cast<int64_t>(history.size()) / 4;
  std::vector<double> result(as_size(count), 0.0);
  for (int64_t g = 0; g < count; ++g) {
    const std::vector<bf16_t> key = entry(config, layer, history, g, true);
    const Codes k = quantised(key.data(), config.index_scale_mode);
    for (int64_t h = 0; h < kV4IndexHeads; ++h) {
      const Codes q = quantised(token.index_q.data() + h * kIndexDim, config.index_scale_mode);
      const double dot =
          std::inner_product(q.values.begin(), q.values.end(), k.values.begin(), 0.0);
      result[as_size(g)] += static_cast<double>(token.head_gate[as_size(h)]) * std::max(dot, 0.0) /
                            std::sqrt(static_cast<double>(kV4IndexHeads * kIndexDim));
    }
  }
  return result;
}

// Empty, or why the selection of a row is none of the best ones. Keys are made in fp32 and in fp64:
// a rounding between them may move a score by a step of one code.
std::string selection_fault(const V4BackendConfig& config, int64_t layer, const V4History& history,
                            const std::vector<int64_t>& entries) {
  const auto count = static_cast<int64_t>(history.size()) / 4;
  const int64_t wanted = std::min(count, config.topk);
  if (static_cast<int64_t>(entries.size()) != wanted) {
    return std::to_string(entries.size()) + " entries, expected " + std::to_string(wanted);
  }
  std::vector<bool> chosen(as_size(count), false);
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i] < 0 || entries[i] >= count) return "an entry that does not exist";
    if (i > 0 && entries[i] <= entries[i - 1]) return "entries that do not ascend";
    chosen[as_size(entries[i])] = true;
  }
  if (count <= config.topk) return "";
  const std::vector<double> score = scores(config, layer, history);
  double lowest = HUGE_VAL, highest = -HUGE_VAL, largest = 0;
  for (int64_t g = 0; g < count; ++g) {
    double& bound = chosen[as_size(g)] ? lowest : highest;
    bound = chosen[as_size(g)] ? std::min(bound, score[as_size(g)])
                               : std::max(bound, score[as_size(g)]);
    largest = std::max(largest, std::fabs(score[as_size(g)]));
  }
  return lowest >= highest - 2e-3 * largest ? "" : "a better entry is left out";
}

}  // namespace

V4History v4_history(uint64_t seed, int64_t count) {
  Rng rng(seed);
  V4History ids(as_size(count));
  for (uint64_t& id : ids) id = rng.next();
  return ids;
}

const V4Token& v4_token(int64_t layer, uint64_t id) {
  static std::map<std::pair<int64_t, uint64_t>, V4Token> tokens;
  const auto [found, fresh] = tokens.try_emplace({layer, id});
  V4Token& token = found->second;
  if (!fresh) return token;
  Rng rng(id + static_cast<uint64_t>(layer) * 77);
  const int64_t ratio = kV4Ratios[as_size(layer)];
  token.q = rng.bf16_normals(kV4Heads * kDim, 2.0f);
  token.kv = rng.bf16_normals(kDim);
  if (ratio == 0) return token;
  token.gate = rng.normals(2 * channels_of(ratio, kDim));
  if (ratio != 4) return token;
  token.index_gate = rng.normals(2 * channels_of(ratio, kIndexDim));
  token.index_q = rng.bf16_normals(kV4IndexHeads * kIndexDim);
  token.head_gate = rng.normals(kV4IndexHeads);  // negative weights too
  return token;
}

const V4Layer& v4_layer(int64_t layer) {
  static const std::array<V4Layer, kV4Layers> layers = {V4Layer(0), V4Layer(1), V4Layer(2)};
  return layers[as_size(layer)];
}

V4Layer::V4Layer(int64_t layer) {
  const int64_t ratio = kV4Ratios[as_size(layer)];
  Rng rng(static_cast<uint64_t>(layer) + 5);
  sink = Tensor::f32({kV4Heads}, rng.normals(kV4Heads));
  const auto weights = [&](int64_t dim, Tensor* table, Tensor* norm) {
    const int64_t channels = channels_of(ratio, dim);
    *table = Tensor::f32({std::max<int64_t>(ratio, 1), channels},
                         rng.normals(std::max<int64_t>(ratio, 1) * channels));
    std::vector<float> factors = rng.normals(dim, 0.2f);
    for (float& factor : factors) factor += 1.0f;
    *norm = Tensor::f32({dim}, factors);
  };
  weights(kDim, &ape, &norm_weight);
  weights(kIndexDim, &index_ape, &index_norm_weight);
  std::vector<float> angles;
  for (int64_t p = 0; p < kPositions; ++p) {
    for (int64_t part = 0; part < 2; ++part) {
      for (int64_t i = 0; i < kRope / 2; ++i) {
        const double base = ratio == 0 ? 10000 : 160000;
        const double angle =
            static_cast<double>(p) * std::pow(base, -static_cast<double>(i) / (kRope / 2.0));
        angles.push_back(static_cast<float>(part == 0 ? std::cos(angle) : std::sin(angle)));
      }
    }
  }
  cos_sin = Tensor::f32({kPositions, kRope}, angles);
}

V4BackendConfig v4_config() {
  V4BackendConfig config;
  config.num_heads = kV4Heads;
  config.softmax_scale = 0.05f;
  config.window = 20;
  config.index_heads = kV4IndexHeads;
  config.topk = 6;
  config.page_size = 128;
  config.table_width = kV4Width;
  config.max_requests = kV4Requests;
  config.max_rows = 330;
  return config;
}

V4Rig::V4Rig(const V4BackendConfig& config_in, const Device& device_in)
    : config(config_in),
      device(device_in),
      backend(config_in, device_in),
      parity_(kV4Requests, 0),
      index_of_page_() {
  make_table();
  int64_t window_count = 1 + kV4Requests * kV4Width / config.page_size;
  int64_t window_size = config.page_size;
  if (config.window_storage == V4WindowStorage::kRing) window_count = kV4Requests + 1;
  if (config.window_storage == V4WindowStorage::kPaged) {
    window_count = 1 + kV4Requests * (kV4Width / config.window_page_size + 2);
    window_pages.emplace(WindowPagesConfig{kV4Requests, kV4Width, window_count,
                                           config.window_page_size, config.window,
                                           config.rows_per_request - 1});
  }
  if (config.window_storage != V4WindowStorage::kTokenPages) window_size = config.window_page_size;
  const int64_t pages = 1 + kV4Requests * kV4Width / config.page_size;
  const int64_t states = 2 * kV4Requests + 4;
  for (int64_t layer = 0; layer < kV4Layers; ++layer) {
    Pools& pool = pools[as_size(layer)];
    const int64_t ratio = kV4Ratios[as_size(layer)];
    // What is not written is noise and NaN: nothing reads it.
    const auto paged = [&](int64_t count, RowFormat format, int64_t rows, int64_t width) {
      Tensor tensor(DType::kU8, {count, page_bytes(format, rows, width)});
      tensor.fill_bytes(0xFF);
      return tensor;
    };
    pool.window = paged(window_count, config.window_format, window_size, kDim);
    if (ratio == 0) continue;
    pool.compressed = paged(pages, config.compressed_format, config.page_size / ratio, kDim);
    const int64_t tokens = ratio == 4 ? config.csa_state_tokens : config.hca_state_tokens;
    const bool online = ratio == 128 && config.hca_form == CompressorForm::kOnline;
    pool.state = online ? Tensor(DType::kF32, {states, 3, kDim})
                        : Tensor(DType::kF32, {states, tokens, 2, channels_of(ratio, kDim)});
    pool.state.fill_bytes(0xFF);
    if (ratio != 4) continue;
    pool.index = paged(pages, RowFormat::kI132, config.page_size / 4, kIndexDim);
    pool.index_state = Tensor(DType::kF32, {states, tokens, 2, channels_of(ratio, kIndexDim)});
    pool.index_state.fill_bytes(0xFF);
  }
}

// Pages of the requests interleave; page 0 is the dummy.
void V4Rig::make_table() {
  const int64_t pages = kV4Width / config.page_size;
  table_ = Tensor(DType::kI32, {kV4Requests + 1, kV4Width});
  index_of_page_.assign(as_size(1 + kV4Requests * pages), 0);
  for (int64_t r = 0; r < kV4Requests; ++r) {
    for (int64_t p = 0; p < kV4Width; ++p) {
      const int64_t column = p / config.page_size;
      const int64_t page = 1 + (pages - 1 - column) * kV4Requests + r;
      index_of_page_[as_size(page)] = column;
      table_.data<int32_t>()[(r + 1) * kV4Width + p] =
          static_cast<int32_t>(page * config.page_size + p % config.page_size);
    }
  }
}

int32_t V4Rig::state_slot(int64_t request, bool other) const {
  const bool second = (parity_[as_size(request)] != 0) != other;
  return static_cast<int32_t>(2 * request + (second ? 1 : 0));
}

void V4Rig::fill_inputs(const std::vector<V4Rows>& rows, int64_t padded) {
  for (int64_t layer = 0; layer < kV4Layers; ++layer) {
    Inputs& in = inputs_[as_size(layer)];
    const int64_t ratio = kV4Ratios[as_size(layer)];
    in.q = Tensor(DType::kBf16, {padded, kV4Heads, kDim});
    in.kv = Tensor(DType::kBf16, {padded, kDim});
    in.out = Tensor(DType::kBf16, {padded, kV4Heads, kDim});
    in.lse = Tensor(DType::kF32, {padded, kV4Heads});
    if (ratio > 0) in.gate = Tensor(DType::kF32, {padded, 2 * channels_of(ratio, kDim)});
    if (ratio == 4) {
      in.index_gate = Tensor(DType::kF32, {padded, 2 * channels_of(ratio, kIndexDim)});
      in.index_q = Tensor(DType::kBf16, {padded, kV4IndexHeads, kIndexDim});
      in.head_gate = Tensor(DType::kF32, {padded, kV4IndexHeads});
      in.indices = Tensor(DType::kI32, {padded, config.topk});
    }
    for (Tensor* tensor : {&in.q, &in.kv, &in.gate, &in.index_gate, &in.index_q, &in.head_gate,
                           &in.out, &in.lse, &in.indices}) {
      tensor->fill_bytes(0xFF);
    }
    int64_t t = 0;
    for (const V4Rows& part : rows) {
      for (const uint64_t id : part.ids) {
        const V4Token& token = v4_token(layer, id);
        const auto put = [&](const auto& values, Tensor* tensor) {
          using Value = typename std::decay_t<decltype(values)>::value_type;
          std::copy(values.begin(), values.end(),
                    tensor->data<Value>() + t * static_cast<int64_t>(values.size()));
        };
        put(token.q, &in.q);
        put(token.kv, &in.kv);
        if (ratio > 0) put(token.gate, &in.gate);
        if (ratio == 4) {
          put(token.index_gate, &in.index_gate);
          put(token.index_q, &in.index_q);
          put(token.head_gate, &in.head_gate);
        }
        ++t;
      }
    }
  }
}

void V4Rig::stage(ForwardMode mode, const std::vector<V4Rows>& rows, const V4StepOptions& options) {
  rows_ = rows;
  options_ = options;
  std::vector<int32_t> seq_len, pool_row, ext_len, positions, loc, in, out;
  for (const V4Rows& part : rows) {
    const auto count = static_cast<int32_t>(part.ids.size());
    const auto end = static_cast<int32_t>(part.begin) + count;
    seq_len.push_back(mode == ForwardMode::kTargetVerify ? end - count : end);
    pool_row.push_back(static_cast<int32_t>(part.request) + 1);
    ext_len.push_back(count);
    for (int64_t p = part.begin; p < end; ++p) {
      positions.push_back(static_cast<int32_t>(p));
      loc.push_back(table_.data<int32_t>()[(part.request + 1) * kV4Width + p]);
    }
    const auto resumes = options.resume_from.find(part.request);
    in.push_back(resumes != options.resume_from.end() ? resumes->second
                                                      : state_slot(part.request, false));
    out.push_back(state_slot(part.request, !options.in_place));
  }
  const auto requests = static_cast<int64_t>(rows.size());
  const auto count = static_cast<int64_t>(positions.size());
  padded_ = std::max(count, options.padded_rows);
  positions.resize(as_size(padded_), 0);
  loc.resize(as_size(padded_), -1);
  seq_len_ = Tensor::i32({requests}, seq_len);
  pool_row_ = Tensor::i32({requests}, pool_row);
  ext_len_ = Tensor::i32({requests}, ext_len);
  positions_ = Tensor::i32({padded_}, positions);
  cache_loc_ = Tensor::i32({padded_}, loc);
  in_slot_ = Tensor::i32({requests}, in);
  out_slot_ = Tensor::i32({requests}, out);
  host_seq_len_ = seq_len;
  host_ext_len_ = ext_len;
  batch_ = {};
  batch_.forward.mode = mode;
  batch_.forward.seq_len = seq_len_;
  batch_.forward.pool_row = pool_row_;
  const bool extends = mode == ForwardMode::kExtend || mode == ForwardMode::kMixed;
  if (extends || mode == ForwardMode::kDraftExtend) batch_.forward.ext_len = ext_len_;
  batch_.forward.req_to_token = table_;
  batch_.forward.positions = positions_;
  batch_.forward.out_cache_loc = cache_loc_;
  batch_.forward.num_rows = count;
  batch_.forward.padded_rows = options.padded_rows;
  if (options.host_lengths) {
    batch_.forward.host_seq_len = host_seq_len_;
    if (batch_.forward.ext_len.defined()) batch_.forward.host_ext_len = host_ext_len_;
  }
  batch_.in_slot = in_slot_;
  if (!options.in_place) batch_.out_slot = out_slot_;
  if (config.window_storage == V4WindowStorage::kRing) {
    std::vector<int32_t> rings;
    rings.reserve(rows.size());
    for (const V4Rows& part : rows) rings.push_back(static_cast<int32_t>(part.request) + 1);
    window_table_ = Tensor::i32({requests, 1}, rings);
    batch_.window_table = window_table_;
  } else if (window_pages) {
    std::vector<int32_t> table;
    int64_t columns = 0;
    for (const V4Rows& part : rows) {
      window_pages->extend(part.request, part.begin,
                           part.begin + static_cast<int64_t>(part.ids.size()));
      const ConstTensorView view = window_pages->table();
      columns = view.shape[1];
      const auto* const row = static_cast<const int32_t*>(view.data) + part.request * columns;
      table.insert(table.end(), row, row + columns);
    }
    window_table_ = Tensor::i32({requests, columns}, table);
    batch_.window_table = window_table_;
  }
  std::vector<int32_t> seq, pos, to;
  for (const V4Snapshot& snapshot : options.snapshots) {
    for (size_t r = 0; r < rows.size(); ++r) {
      if (rows[r].request != snapshot.request) continue;
      seq.push_back(static_cast<int32_t>(r));
      pos.push_back(static_cast<int32_t>(snapshot.position - rows[r].begin));
      to.push_back(snapshot.slot);
    }
  }
  const auto snapshots = static_cast<int64_t>(seq.size());
  snapshot_seq_ = Tensor::i32({snapshots}, seq);
  snapshot_pos_ = Tensor::i32({snapshots}, pos);
  snapshot_slot_ = Tensor::i32({snapshots}, to);
  if (snapshots > 0) {
    batch_.snapshot_seq = snapshot_seq_;
    batch_.snapshot_pos = snapshot_pos_;
    batch_.snapshot_slot = snapshot_slot_;
  }
  fill_inputs(rows, padded_);
}

V4ForwardTensors V4Rig::tensors(int64_t layer) {
  Inputs& in = inputs_[as_size(layer)];
  Pools& pool = pools[as_size(layer)];
  const V4Layer& weights = v4_layer(layer);
  V4ForwardTensors t;
  t.q = in.q;
  t.kv = in.kv;
  t.sink = weights.sink;
  t.cos_sin = weights.cos_sin;
  t.window_pool = pool.window;
  t.out = in.out;
  t.lse = in.lse;
  const int64_t ratio = kV4Ratios[as_size(layer)];
  if (ratio == 0) return t;
  t.compressor = {in.gate, weights.ape, weights.norm_weight, pool.state, pool.compressed};
  if (ratio != 4) return t;
  t.indexer = {in.index_gate, weights.index_ape, weights.index_norm_weight, pool.index_state,
               pool.index};
  t.index_q = in.index_q;
  t.head_gate = in.head_gate;
  t.indices = in.indices;
  return t;
}

void V4Rig::submit(const V4StepOptions& options, Stream stream) {
  const bool extends = batch_.forward.mode == ForwardMode::kDraftExtend ||
                       batch_.forward.mode == ForwardMode::kDraftExtendV2;
  if (options.plan != nullptr) {
    backend.begin_step(batch_, options.plan, stream);
  } else {
    backend.begin_step(batch_, stream);
  }
  for (int64_t layer = 0; layer < kV4Layers; ++layer) {
    const int64_t ratio = kV4Ratios[as_size(layer)];
    if (ratio > 0 && extends) continue;
    if (options.plan != nullptr) {
      backend.forward(*options.plan, ratio, tensors(layer), stream);
    } else {
      backend.forward(ratio, tensors(layer), stream);
    }
  }
}

void V4Rig::collect() {
  synchronize(device);
  for (int64_t layer = 0; layer < kV4Layers; ++layer) {
    Inputs& in = inputs_[as_size(layer)];
    int64_t t = 0;
    for (const V4Rows& part : rows_) {
      for (size_t i = 0; i < part.ids.size(); ++i, ++t) {
        V4Row row;
        const auto* const out = in.out.data<bf16_t>() + t * kV4Heads * kDim;
        row.out.assign(out, out + kV4Heads * kDim);
        const auto* const lse = in.lse.data<float>() + t * kV4Heads;
        row.lse.assign(lse, lse + kV4Heads);
        if (kV4Ratios[as_size(layer)] == 4) {
          const int64_t rows_of_page = config.page_size / 4;
          const auto* const slots = in.indices.data<int32_t>() + t * config.topk;
          for (int64_t k = 0; k < config.topk && slots[k] >= 0; ++k) {
            row.entries.push_back(index_of_page_[as_size(slots[k] / rows_of_page)] * rows_of_page +
                                  slots[k] % rows_of_page);
          }
        }
        results[{layer, part.request, part.begin + static_cast<int64_t>(i)}] = std::move(row);
      }
    }
  }
  for (const V4Rows& part : rows_) {
    if (!options_.in_place) parity_[as_size(part.request)] ^= 1;
    if (!window_pages || batch_.forward.mode == ForwardMode::kTargetVerify) continue;
    window_pages->free_behind(part.request, part.begin + static_cast<int64_t>(part.ids.size()));
  }
}

void V4Rig::run(ForwardMode mode, const std::vector<V4Rows>& rows, const V4StepOptions& options) {
  stage(mode, rows, options);
  submit(options);
  collect();
}

void V4Rig::prefill(int64_t request, const V4History& history, int64_t chunk, int64_t begin) {
  const auto count = static_cast<int64_t>(history.size());
  for (; begin < count; begin += chunk) {
    const int64_t end = std::min(count, begin + chunk);
    run(ForwardMode::kExtend, {{request, begin, {history.begin() + begin, history.begin() + end}}});
  }
}

void V4Rig::commit(const std::vector<int32_t>& accepted) {
  const Tensor counts = Tensor::i32({static_cast<int64_t>(accepted.size())}, accepted);
  for (int64_t layer = 0; layer < kV4Layers; ++layer) {
    backend.commit(*options_.plan, kV4Ratios[as_size(layer)], tensors(layer), counts);
  }
  synchronize(device);
}

std::vector<uint8_t> V4Rig::pool_bytes() const {
  synchronize(device);
  std::vector<uint8_t> all;
  for (const Pools& pool : pools) {
    for (const Tensor* tensor :
         {&pool.window, &pool.compressed, &pool.index, &pool.state, &pool.index_state}) {
      all.insert(all.end(), tensor->bytes().begin(), tensor->bytes().end());
    }
  }
  return all;
}

std::string v4_difference(const V4BackendConfig& config, int64_t layer, const V4History& history,
                          const V4Row& row) {
  const int64_t ratio = kV4Ratios[as_size(layer)];
  const auto length = static_cast<int64_t>(history.size());
  const V4Token& token = v4_token(layer, history.back());
  const V4Layer& weights = v4_layer(layer);
  std::vector<std::vector<double>> keys;
  for (int64_t p = std::max<int64_t>(0, length - config.window); p < length; ++p) {
    keys.push_back(cached_row(v4_token(layer, history[as_size(p)]).kv, config.window_format));
  }
  if (ratio == 4) {
    std::string fault = selection_fault(config, layer, history, row.entries);
    if (!fault.empty()) return fault;
  }
  for (int64_t g = 0; ratio > 0 && g < length / ratio; ++g) {
    if (ratio == 4 && std::find(row.entries.begin(), row.entries.end(), g) == row.entries.end()) {
      continue;
    }
    keys.push_back(cached_row(entry(config, layer, history, g, false), config.compressed_format));
  }
  for (int64_t h = 0; h < kV4Heads; ++h) {
    std::vector<double> logit;
    double largest = -HUGE_VAL;
    for (const std::vector<double>& key : keys) {
      double dot = 0;
      for (size_t i = 0; i < key.size(); ++i) {
        dot += static_cast<double>(bf16_to_float(token.q[as_size(h * kDim) + i])) * key[i];
      }
      logit.push_back(static_cast<double>(config.softmax_scale) * dot);
      largest = std::max(largest, logit.back());
    }
    double sum = 0;
    std::vector<double> out(as_size(kDim), 0.0);
    for (size_t k = 0; k < keys.size(); ++k) {
      const double weight = std::exp(logit[k] - largest);
      sum += weight;
      for (size_t i = 0; i < out.size(); ++i) out[i] += weight * keys[k][i];
    }
    const double sink = weights.sink.data<float>()[h];
    for (double& x : out) x /= sum + std::exp(sink - largest);
    const float* const table = weights.cos_sin.data<float>() + (length - 1) * kRope;
    for (int64_t pair = 0; pair < kRope / 2; ++pair) {
      double* const x = out.data() + kDim - kRope + 2 * pair;
      const double cosine = table[pair], sine = table[kRope / 2 + pair];
      const double turned = x[0] * cosine + x[1] * sine;
      x[1] = x[1] * cosine - x[0] * sine;
      x[0] = turned;
    }
    double error = 0, norm = 0;
    for (int64_t i = 0; i < kDim; ++i) {
      const double found = bf16_to_float(row.out[as_size(h * kDim + i)]);
      error += (found - out[as_size(i)]) * (found - out[as_size(i)]);
      norm += out[as_size(i)] * out[as_size(i)];
    }
    const double rms = std::sqrt(error / norm);
    const double lse = std::fabs(row.lse[as_size(h)] - (largest + std::log(sum)));
    if (!(rms <= 5e-3)) return "head " + std::to_string(h) + " is off by " + std::to_string(rms);
    if (!(lse <= 1e-3)) return "lse of head " + std::to_string(h) + " by " + std::to_string(lse);
  }
  return "";
}

}  // namespace fovea::test
