#include "src/replay/v4_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

#include "fovea/numeric.h"
#include "fovea/stream.h"
#include "fovea/v4_compress.h"
#include "src/core/parallel.h"
#include "src/core/v4_row.h"
#include "src/replay/fp64_rows.h"
#include "src/replay/staged_tensor.h"
#include "src/serving/operator_options.h"

namespace fovea::internal {
namespace {

size_t as_size(int64_t value) { return static_cast<size_t>(value); }

// A row of v4 as the cache gives it back.
std::vector<double> cached_row(const std::vector<bf16_t>& row) {
  std::array<uint8_t, kV4DataBytes> data;
  std::array<uint8_t, kV4ScaleBytes> scales;
  pack_v4_row(row.data(), data.data(), scales.data());
  std::vector<double> values(row.size());
  for (int64_t i = 0; i < kV4LatentDim; ++i) {
    const float scale = ue8m0_to_float(scales[as_size(i / kV4TileDim)]);
    values[as_size(i)] = bf16_to_float(bf16_from_float(e4m3_to_float(data[as_size(i)]) * scale));
  }
  for (int64_t i = kV4LatentDim; i < kV4Width; ++i) {
    values[as_size(i)] = bf16_to_float(row[as_size(i)]);
  }
  return values;
}

// Pairs of the last channels, by the angle or, with `back`, by minus the angle.
void turn(const float* row, bool back, double* channels) {
  for (int64_t pair = 0; pair < kV4RopeDim / 2; ++pair) {
    const double cosine = row[pair];
    const double sine = back ? -row[kV4RopeDim / 2 + pair] : row[kV4RopeDim / 2 + pair];
    double* const x = channels + 2 * pair;
    const double turned = x[0] * cosine - x[1] * sine;
    x[1] = x[1] * cosine + x[0] * sine;
    x[0] = turned;
  }
}

// How far a selection is from the best entries.
struct Misplacement {
  int64_t entry = 0;
  double score = 0;
  double boundary = 0;
  double slack = 0;  // distance of the worst entry from the boundary / max |score|
};
Misplacement misplacement(const std::vector<bool>& selected, const std::vector<double>& scores,
                          int64_t topk) {
  std::vector<double> sorted = scores;
  std::nth_element(sorted.begin(), sorted.begin() + (topk - 1), sorted.end(), std::greater<>());
  Misplacement worst;
  worst.boundary = sorted[as_size(topk - 1)];
  double largest = 0, distance = 0;
  for (size_t g = 0; g < scores.size(); ++g) {
    largest = std::max(largest, std::fabs(scores[g]));
    const double outside = selected[g] ? worst.boundary - scores[g] : scores[g] - worst.boundary;
    if (outside <= distance) continue;
    distance = outside;
    worst.entry = static_cast<int64_t>(g);
    worst.score = scores[g];
  }
  worst.slack = largest > 0 ? distance / largest : 0;
  return worst;
}

// Appends codes and scale of a row in i132.
void quantise(const bf16_t* row, std::vector<uint8_t>* codes, std::vector<float>* scales) {
  codes->resize(codes->size() + as_size(kV4IndexDim));
  scales->push_back(quantize_tile(row, kV4IndexDim, index_tile_scale, ScaleMode::kFp32,
                                  codes->data() + codes->size() - as_size(kV4IndexDim)));
}

IndexKeys quantised(const std::vector<std::vector<bf16_t>>& rows) {
  IndexKeys keys;
  for (const std::vector<bf16_t>& row : rows) quantise(row.data(), &keys.codes, &keys.scales);
  return keys;
}

// The next bf16 value at most, and what cancels when a pair is turned.
bool same_up_to_rounding(const std::vector<bf16_t>& a, const std::vector<bf16_t>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = bf16_to_float(a[i]), y = bf16_to_float(b[i]);
    if (!(std::fabs(x - y) <= 0x1p-7 * std::fabs(x) + 1e-5)) return false;
  }
  return true;
}

}  // namespace

// Samples of one request and layer.
struct V4Checker::Group {
  int64_t request = 0;
  int64_t layer = 0;  // model layer id
  std::vector<size_t> members;
};

V4Checker::V4Checker(const V4Inputs& inputs, std::vector<int64_t> layers, int64_t topk,
                     const CodecChoice& run)
    : inputs_(inputs),
      layers_(std::move(layers)),
      topk_(topk),
      run_(run),
      selection_tolerance_(selection_tolerance(inputs.shape().index_heads, kV4IndexDim, run)) {
  if (run_.device.kind == DeviceKind::kCpu) run_.device = Device::cpu(1);
  for (const int64_t layer : layers_) {
    Weights& made = weights_[layer];
    const int64_t ratio = inputs.ratio(layer);
    made.sink.resize(as_size(inputs.num_heads()));
    made.ape.resize(as_size(ratio * compressor_channels(ratio, kV4Width)));
    made.norm.resize(as_size(kV4Width));
    made.index_ape.resize(as_size(ratio * compressor_channels(ratio, kV4IndexDim)));
    made.index_norm.resize(as_size(kV4IndexDim));
    inputs.weights(layer, {made.sink, made.ape, made.norm, made.index_ape, made.index_norm});
  }
  const int64_t positions = inputs.workload().max_rows();
  for (const bool compresses : {false, true}) {
    std::vector<float>& table = compresses ? entry_cos_sin_ : swa_cos_sin_;
    table.resize(as_size(positions * kV4RopeDim));
    V4Inputs::cos_sin(compresses, positions, table.data());
  }
}

void V4Checker::fail(const V4Sample& sample, const char* op, const char* kind, std::string detail,
                     CheckVerdict* verdict) const {
  CheckFailure failure;
  failure.request = inputs_.workload().request(sample.row.request).trace_row;
  failure.position = sample.row.position;
  failure.layer = layer_id(sample);
  failure.layer_kind = inputs_.model().layer_kind(failure.layer);
  failure.op = op;
  failure.kind = kind;
  failure.detail = std::move(detail);
  verdict->failures.push_back(std::move(failure));
}

// Softmax per channel over the tokens of the group and, for ratio 4, over the first halves of those
// of the group before it.
std::vector<bf16_t> V4Checker::compressed(const EntryRange& range, int64_t entry) const {
  const auto& [layer, request, first_entry, end_entry, index] = range;
  const int64_t ratio = inputs_.ratio(layer), width = index ? kV4IndexDim : kV4Width;
  const int64_t channels = compressor_channels(ratio, width);
  const Weights& weights = weights_.at(layer);
  const std::vector<float>& ape = index ? weights.index_ape : weights.ape;
  const std::vector<float>& norm = index ? weights.index_norm : weights.norm;
  const int64_t begin = entry * ratio, end = begin + ratio;
  const int64_t first = ratio == kCsaRatio ? std::max<int64_t>(0, begin - ratio) : begin;
  std::vector<float> gates(as_size((end - first) * 2 * channels));
  for (int64_t t = first; t < end; ++t) {
    const std::span gate =
        std::span(gates).subspan(as_size((t - first) * 2 * channels), as_size(2 * channels));
    const uint64_t token = inputs_.workload().token_id(request, t);
    index ? inputs_.index_gate(layer, token, gate) : inputs_.gate(layer, token, gate);
  }
  std::vector<double> row(as_size(width)), logits(as_size(end - first));
  double squares = 0;
  for (int64_t i = 0; i < width; ++i) {
    double largest = -HUGE_VAL, sum = 0, value = 0;
    const auto channel = [&](int64_t t) {
      return ratio == kCsaRatio && t >= begin ? width + i : i;
    };
    for (int64_t t = first; t < end; ++t) {
      const int64_t c = channel(t);
      double& logit = logits[as_size(t - first)];
      logit = static_cast<double>(gates[as_size((t - first) * 2 * channels + channels + c)]) +
              ape[as_size(t % ratio * channels + c)];
      largest = std::max(largest, logit);
    }
    for (int64_t t = first; t < end; ++t) {
      const double weight = std::exp(logits[as_size(t - first)] - largest);
      sum += weight;
      value += weight * gates[as_size((t - first) * 2 * channels + channel(t))];
    }
    row[as_size(i)] = value / sum;
    squares += row[as_size(i)] * row[as_size(i)];
  }
  const double factor = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-6);
  for (int64_t i = 0; i < width; ++i) row[as_size(i)] *= factor * norm[as_size(i)];
  turn(entry_cos_sin_.data() + begin * kV4RopeDim, false, row.data() + width - kV4RopeDim);
  std::vector<bf16_t> rounded(as_size(width));
  std::transform(row.begin(), row.end(), rounded.begin(),
                 [](double x) { return bf16_from_float(static_cast<float>(x)); });
  return rounded;
}

// What the implementation makes of the tokens of these entries, from no state.
V4Checker::Rows V4Checker::run_compressed(const EntryRange& range) const {
  const int64_t ratio = inputs_.ratio(range.layer), width = range.index ? kV4IndexDim : kV4Width;
  const int64_t channels = compressor_channels(ratio, width);
  const int64_t begin = ratio == kCsaRatio ? std::max<int64_t>(0, range.begin - 1) : range.begin;
  const int64_t first = begin * ratio, count = range.end - begin;
  const int64_t rows = count * ratio, positions_end = range.end * ratio;
  constexpr int64_t kPageRows = 64;
  const int64_t first_page = begin / kPageRows, columns = (range.end - 1) / kPageRows + 1;
  const int64_t pages = columns - first_page, span = ratio == kCsaRatio ? 2 * ratio : ratio;
  const Device& device = run_.device;
  StagedTensor gate(device, DType::kF32, {rows, 2 * channels});
  StagedTensor ape(device, DType::kF32, {ratio, channels}), norm(device, DType::kF32, {1, width});
  StagedTensor positions(device, DType::kI32, {rows}), requests(device, DType::kI32, {rows});
  StagedTensor emitted(device, DType::kI32, {rows}), slot(device, DType::kI32, {1});
  StagedTensor cos_sin(device, DType::kF32, {positions_end, kV4RopeDim});
  StagedTensor state(device, DType::kF32, {1, span, 2, channels});
  StagedTensor table(device, DType::kI32, {1, columns});
  StagedTensor pool(device, DType::kU8, {pages, kPageRows * 2 * width});
  for (int64_t t = 0; t < rows; ++t) {
    const uint64_t token = inputs_.workload().token_id(range.request, first + t);
    range.index ? inputs_.index_gate(range.layer, token, gate.row<float>(t))
                : inputs_.gate(range.layer, token, gate.row<float>(t));
    positions.row<int32_t>(t)[0] = static_cast<int32_t>(first + t);
    requests.row<int32_t>(t)[0] = 0;
  }
  slot.row<int32_t>(0)[0] = 0;
  const Weights& weights = weights_.at(range.layer);
  const std::vector<float>& logits = range.index ? weights.index_ape : weights.ape;
  const std::vector<float>& factors = range.index ? weights.index_norm : weights.norm;
  std::copy(logits.begin(), logits.end(), ape.row<float>(0).data());
  std::copy(factors.begin(), factors.end(), norm.row<float>(0).data());
  std::copy_n(entry_cos_sin_.begin(), positions_end * kV4RopeDim, cos_sin.row<float>(0).data());
  for (int64_t c = 0; c < columns; ++c) {
    table.row<int32_t>(0)[as_size(c)] = static_cast<int32_t>(std::max<int64_t>(-1, c - first_page));
  }
  for (StagedTensor* tensor : {&gate, &positions, &requests}) tensor->upload(0, rows, {});
  for (StagedTensor* tensor : {&slot, &norm, &table}) tensor->upload(0, 1, {});
  ape.upload(0, ratio, {});
  cos_sin.upload(0, positions_end, {});
  V4CompressProblem problem;
  problem.max_rows = rows;
  problem.max_requests = 1;
  problem.ratio = ratio;
  problem.head_dim = width;
  problem.page_size = kPageRows;
  const OperatorOptions options("replay", run_.implementation);
  const V4Compress plan = V4Compress::plan(problem, device, options("v4_compress"));
  DeviceBuffer workspace(device, plan.workspace_bytes());
  plan.run(
      {gate.on_device(rows), ape.on_device(ratio), norm.row_on_device(0), positions.on_device(rows),
       requests.on_device(rows), cos_sin.on_device(positions_end), state.on_device(1),
       slot.on_device(1), table.on_device(1), pool.on_device(pages), emitted.on_device(rows)},
      workspace.workspace());
  pool.download(0, pages, {});
  synchronize(device);
  const PagedRows<const uint8_t> made =
      paged_rows<const uint8_t>(ConstTensorView(pool.host(pages)), kPageRows);
  Rows result;
  for (int64_t g = range.begin; g < range.end; ++g) {
    const auto row = static_cast<int32_t>(g - first_page * kPageRows);
    std::vector<bf16_t>& values = result.emplace_back(as_size(width));
    std::memcpy(values.data(), made.record(row, 2 * width), as_size(2 * width));
  }
  return result;
}

IndexQuery V4Checker::index_query(const V4Sample& sample) const {
  const int64_t heads = inputs_.shape().index_heads, layer = layer_id(sample);
  const CheckRow& row = sample.row;
  const uint64_t token = inputs_.workload().token_id(row.request, row.position);
  std::vector<bf16_t> raw(as_size(heads * kV4IndexDim));
  std::vector<float> gate(as_size(heads));
  inputs_.index_query(layer, {row.request, row.position, token}, raw);
  inputs_.head_gate(layer, token, gate);
  IndexQuery query;
  const double constants = 1 / std::sqrt(static_cast<double>(heads * kV4IndexDim));
  for (int64_t h = 0; h < heads; ++h) {
    quantise(raw.data() + h * kV4IndexDim, &query.codes, &query.scales);
    query.head_weight.push_back(static_cast<float>(static_cast<double>(gate[as_size(h)]) *
                                                   constants * query.scales.back()));
  }
  return query;
}

void V4Checker::check_selection(const V4Sample& sample, const Rows& keys,
                                CheckVerdict* verdict) const {
  const int64_t count = num_entries(sample);
  verdict->selecting = count > topk_;
  const auto selection_fails = [&](std::string detail) {
    fail(sample, "index_select", "selection", std::move(detail), verdict);
  };
  std::vector<bool> selected(as_size(count), false);
  for (const int32_t entry : sample.entries) {
    if (entry < 0 || entry >= count) {
      return selection_fails("a selected slot holds no visible entry of the request");
    }
    if (selected[as_size(entry)]) {
      return selection_fails("entry " + std::to_string(entry) + " is selected twice");
    }
    selected[as_size(entry)] = true;
  }
  const int64_t wanted = std::min(count, topk_);
  if (static_cast<int64_t>(sample.entries.size()) != wanted) {
    return selection_fails(std::to_string(sample.entries.size()) +
                           " entries are selected, expected " + std::to_string(wanted));
  }
  // Not selecting: the right number of distinct entries is all of them.
  if (!verdict->selecting) return;
  const IndexQuery query = index_query(sample);
  const Misplacement worst =
      misplacement(selected, fp64_logits(query, quantised(keys), count), topk_);
  verdict->selection_slack = worst.slack;
  if (worst.slack <= selection_tolerance_) return;
  const EntryRange range{layer_id(sample), sample.row.request, 0, count, true};
  const Rows run_keys = run_compressed(range);
  for (int64_t g = 0; g < count; ++g) {
    if (same_up_to_rounding(keys[as_size(g)], run_keys[as_size(g)])) continue;
    fail(sample, "v4_compress", "selection",
         "the index key of entry " + std::to_string(g) +
             " differs from the reference by more than a rounding",
         verdict);
    return;
  }
  const Misplacement run_worst =
      misplacement(selected, fp64_logits(query, quantised(run_keys), count), topk_);
  if (run_worst.slack <= selection_tolerance_) {
    verdict->selection_slack = run_worst.slack;
    verdict->requantised = true;
    return;
  }
  selection_fails("entry " + std::to_string(worst.entry) + " with score " +
                  error_text(worst.score) + " is " +
                  (selected[as_size(worst.entry)] ? "selected" : "left out") +
                  ", the boundary is " + error_text(worst.boundary));
}

std::vector<int64_t> V4Checker::seen_entries(const V4Sample& sample) const {
  const int64_t count = num_entries(sample);
  std::vector<int64_t> seen;
  seen.reserve(as_size(count));
  if (inputs_.ratio(layer_id(sample)) == kHcaRatio) {
    for (int64_t g = 0; g < count; ++g) seen.push_back(g);
  }
  for (const int32_t g : sample.entries) {
    if (g >= 0 && g < count) seen.push_back(g);
  }
  return seen;
}

V4Checker::HeadErrors V4Checker::attend(const V4Sample& sample, const Entries& entries) const {
  const int64_t layer = layer_id(sample), heads = inputs_.num_heads();
  const int64_t p = sample.row.position, request = sample.row.request;
  const Workload& workload = inputs_.workload();
  std::vector<const double*> keys;
  std::vector<std::vector<double>> window;
  std::vector<bf16_t> row(as_size(kV4Width));
  for (int64_t t = std::max<int64_t>(0, p - inputs_.shape().window + 1); t <= p; ++t) {
    inputs_.window_key(layer, workload.token_id(request, t), row);
    window.push_back(cached_row(row));
  }
  keys.reserve(window.size() + as_size(num_entries(sample)));
  for (const std::vector<double>& key : window) keys.push_back(key.data());
  for (const int64_t g : seen_entries(sample)) keys.push_back(entries.at(g).data());
  std::vector<bf16_t> query(as_size(heads * kV4Width));
  inputs_.query(layer, {request, p, workload.token_id(request, p)}, query);
  const bool compresses = inputs_.ratio(layer) > 0;
  const float* const angles = (compresses ? entry_cos_sin_ : swa_cos_sin_).data() + p * kV4RopeDim;
  std::vector<double> head(as_size(kV4Width)), out(as_size(kV4Width)), weights(keys.size());
  HeadErrors worst;
  for (int64_t h = 0; h < heads; ++h) {
    std::transform(query.begin() + h * kV4Width, query.begin() + (h + 1) * kV4Width, head.begin(),
                   bf16_to_float);
    double largest = -HUGE_VAL, sum = 0;
    for (size_t k = 0; k < keys.size(); ++k) {
      weights[k] =
          static_cast<double>(inputs_.shape().softmax_scale) * dot(head.data(), keys[k], kV4Width);
      largest = std::max(largest, weights[k]);
    }
    for (double& weight : weights) sum += (weight = std::exp(weight - largest));
    const double all = sum + std::exp(weights_.at(layer).sink[as_size(h)] - largest);
    std::fill(out.begin(), out.end(), 0.0);
    for (size_t k = 0; k < keys.size(); ++k) {
      const double weight = weights[k] / all;
      for (int64_t c = 0; c < kV4Width; ++c) out[as_size(c)] += weight * keys[k][c];
    }
    turn(angles, true, out.data() + kV4Width - kV4RopeDim);
    double error = 0, norm = 0;
    for (int64_t c = 0; c < kV4Width; ++c) {
      const double found = bf16_to_float(sample.output[as_size(h * kV4Width + c)]);
      error += (found - out[as_size(c)]) * (found - out[as_size(c)]);
      norm += out[as_size(c)] * out[as_size(c)];
    }
    const double rms = std::sqrt(error / norm);
    const double off = std::fabs(sample.lse[as_size(h)] - (largest + std::log(sum)));
    if (is_worse(rms, worst.rms)) worst.rms = rms, worst.rms_head = h;
    if (is_worse(off, worst.lse)) worst.lse = off, worst.lse_head = h;
  }
  return worst;
}

void V4Checker::check_attention(const V4Sample& sample,
                                const std::map<int64_t, std::vector<bf16_t>>& entries,
                                CheckVerdict* verdict) const {
  Entries cached;
  for (const auto& [g, row] : entries) cached[g] = cached_row(row);
  HeadErrors errors = attend(sample, cached);
  const std::vector<int64_t> seen = seen_entries(sample);
  if (!errors.within() && !seen.empty()) {
    Entries run_cached;
    for (const int64_t g : seen) {
      const std::vector<bf16_t> row =
          run_compressed({layer_id(sample), sample.row.request, g, g + 1, false}).front();
      if (!same_up_to_rounding(entries.at(g), row)) {
        fail(sample, "v4_compress", "output",
             "entry " + std::to_string(g) + " differs from the reference by more than a rounding",
             verdict);
        return;
      }
      run_cached[g] = cached_row(row);
    }
    const HeadErrors run_errors = attend(sample, run_cached);
    if (run_errors.within()) {
      errors = run_errors;
      verdict->requantised = true;
    }
  }
  verdict->worst_rms = errors.rms;
  verdict->worst_lse = errors.lse;
  const auto judge = [&](const char* kind, int64_t head, double error, double allowed) {
    if (error <= allowed) return;
    fail(sample, "sparse_mla", kind,
         "head " + std::to_string(head) + " is off by " + error_text(error) + ", allowed " +
             error_text(allowed),
         verdict);
  };
  judge("output", errors.rms_head, errors.rms, kOutputTolerance);
  judge("lse", errors.lse_head, errors.lse, kLseTolerance);
}

void V4Checker::check_group(std::span<const V4Sample> samples, const Group& group,
                            std::vector<CheckVerdict>* verdicts) const {
  int64_t scored = 0;
  std::map<int64_t, std::vector<bf16_t>> all;
  const EntryRange range{group.layer, group.request, 0, 0, false};
  for (const size_t i : group.members) {
    const int64_t count = num_entries(samples[i]);
    if (count > topk_) scored = std::max(scored, count);
    for (const int64_t g : seen_entries(samples[i])) {
      if (!all.contains(g)) all[g] = compressed(range, g);
    }
  }
  const bool selects = inputs_.ratio(group.layer) == kCsaRatio;
  Rows keys;
  EntryRange index_range = range;
  index_range.index = true;
  for (int64_t g = 0; selects && g < scored; ++g) keys.push_back(compressed(index_range, g));
  for (const size_t i : group.members) {
    if (selects) check_selection(samples[i], keys, &(*verdicts)[i]);
    check_attention(samples[i], all, &(*verdicts)[i]);
  }
}

std::vector<CheckVerdict> V4Checker::check(std::span<const V4Sample> samples) const {
  std::map<std::pair<int64_t, int64_t>, std::vector<size_t>> members;
  for (size_t i = 0; i < samples.size(); ++i) {
    members[{samples[i].row.request, layer_id(samples[i])}].push_back(i);
  }
  std::vector<Group> groups;
  groups.reserve(members.size());
  for (auto& [name, list] : members) groups.push_back({name.first, name.second, std::move(list)});
  std::vector<CheckVerdict> verdicts(samples.size());
  ParallelFor(static_cast<int64_t>(groups.size()), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t g = begin; g < end; ++g) {
      check_group(samples, groups[as_size(g)], &verdicts);
    }
  });
  return verdicts;
}

}  // namespace fovea::internal
