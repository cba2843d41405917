#include "tests/mla/dense_mla_case.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "fovea/numeric.h"
#include "tests/support/targets.h"

namespace fovea::test {
namespace {

constexpr int64_t kSparePages = 3;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

std::vector<uint32_t> DenseMlaOutputs::row(int64_t t) const {
  std::vector<uint32_t> bits(lse_bits.begin() + t * heads, lse_bits.begin() + (t + 1) * heads);
  bits.insert(bits.end(), out_bits.begin() + t * heads * 512,
              out_bits.begin() + (t + 1) * heads * 512);
  return bits;
}

testing::AssertionResult SameBits(const DenseMlaOutputs& a, const DenseMlaOutputs& b) {
  if (a.out_bits != b.out_bits) return testing::AssertionFailure() << "out differs";
  if (a.lse_bits != b.lse_bits) return testing::AssertionFailure() << "lse differs";
  return testing::AssertionSuccess();
}

DenseMlaCase::DenseMlaCase(const DenseMlaSpec& spec) : spec_(spec) {
  Rng rng(spec.seed);
  const auto requests = static_cast<int64_t>(spec.rows.size());
  num_rows_ = std::accumulate(spec.rows.begin(), spec.rows.end(), int64_t{0});
  int64_t pages = kSparePages;
  table_width_ = spec.max_pages;
  for (const int32_t length : spec.kv_len) {
    const int64_t used = ceil_div(std::max(length, 0), spec.page_size);
    if (spec.max_pages == 0) table_width_ = std::max(table_width_, used + 1);
    pages += spec.max_pages > 0 ? std::min(used, spec.max_pages) : used;
  }
  q = StridedTensor(spec.q_code_scale > 0 ? DType::kU8 : DType::kBf16,
                    {num_rows_, spec.heads, spec.head_dim_qk}, {0, 1, 128}, 0xFF);
  for (int64_t t = 0; t < num_rows_; ++t) {
    for (int64_t h = 0; h < spec.heads; ++h) {
      for (int64_t d = 0; d < spec.head_dim_qk; ++d)
        set_q(t, h, d, std::clamp(rng.normal(), -1.0f, 1.0f));
    }
  }
  q_indptr = StridedTensor(DType::kI32, {requests + 1}, {0}, 0);
  kv_len = StridedTensor(DType::kI32, {requests}, {0}, 0);
  page_table = StridedTensor(DType::kI32, {requests, table_width_}, {0, 5}, 0x7F);
  const bool u8 = spec.packed || spec.format != RowFormat::kBf16;
  kv = u8 ? StridedTensor(DType::kU8,
                          {pages, spec.page_size * latent_row_bytes(spec.format, spec.head_dim_qk)},
                          {0, 19}, 0xFF)
          : StridedTensor(DType::kBf16, {pages, spec.page_size, spec.heads_kv, spec.head_dim_qk},
                          {0, 1, 1, 64}, 0xFF);
  std::vector<int32_t> order(static_cast<size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1],
              order[static_cast<size_t>(rng.integer(0, static_cast<int64_t>(i) - 1))]);
  size_t next = 0;
  const auto end = static_cast<int32_t>(pages);
  const int32_t bad[] = {INT_MIN, -1, -123456, end, end + 7, 2147480000, INT_MAX};
  for (int64_t r = 0; r < requests; ++r) {
    q_indptr.at<int32_t>({r + 1}) = q_indptr.at<int32_t>({r}) + spec.rows[static_cast<size_t>(r)];
    kv_len.at<int32_t>({r}) = spec.kv_len[static_cast<size_t>(r)];
    const int64_t count = num_keys(r);
    for (int64_t column = 0; column < table_width_; ++column) {
      int32_t& page = page_table.at<int32_t>({r, column});
      const bool used = column * spec.page_size < count;
      page = used && rng.uniform() >= spec.invalid_share ? order[next++] : bad[rng.integer(0, 6)];
    }
    keys_.emplace_back(static_cast<size_t>(spec.heads_kv * count * spec.head_dim_qk), std::nan(""));
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t g = 0; g < spec.heads_kv && key_exists(r, j); ++g) {
        write_latent_row(spec.format, spec.head_dim_qk, spec.k_scale, rng, row_at(r, g, j),
                         &key(r, g, j, 0));
      }
    }
  }
}

int64_t DenseMlaCase::first_row(int64_t r) const { return q_indptr.at<int32_t>({r}); }

int64_t DenseMlaCase::num_keys(int64_t r) const {
  return std::clamp<int64_t>(spec_.kv_len[static_cast<size_t>(r)], 0,
                             table_width_ * spec_.page_size);
}

bool DenseMlaCase::key_exists(int64_t r, int64_t j) const {
  const int32_t page = page_table.at<int32_t>({r, j / spec_.page_size});
  return page >= 0 && page < kv.view().shape[0];
}

double& DenseMlaCase::key(int64_t r, int64_t kv_head, int64_t j, int64_t d) {
  return keys_[static_cast<size_t>(r)]
              [static_cast<size_t>((kv_head * num_keys(r) + j) * spec_.head_dim_qk + d)];
}

uint8_t* DenseMlaCase::row_at(int64_t r, int64_t kv_head, int64_t j) const {
  const TensorView view = kv.view();
  const int64_t page = page_table.at<int32_t>({r, j / spec_.page_size});
  const int64_t offset = j % spec_.page_size;
  if (view.rank == 4) {
    return reinterpret_cast<uint8_t*>(static_cast<bf16_t*>(view.data) + page * view.stride[0] +
                                      offset * view.stride[1] + kv_head * view.stride[2]);
  }
  return static_cast<uint8_t*>(view.data) + page * view.stride[0] +
         offset * latent_row_bytes(spec_.format, spec_.head_dim_qk);
}

void DenseMlaCase::set_key(int64_t r, int64_t kv_head, int64_t j, int64_t d, float value) {
  const bf16_t rounded = bf16_from_float(value);
  std::memcpy(row_at(r, kv_head, j) + 2 * d, &rounded, 2);
  key(r, kv_head, j, d) = bf16_to_float(rounded);
}

void DenseMlaCase::set_q(int64_t t, int64_t h, int64_t d, float value) {
  if (spec_.q_code_scale > 0)
    q.at<uint8_t>({t, h, d}) = e4m3_from_float(value / spec_.q_code_scale);
  else
    q.at<bf16_t>({t, h, d}) = bf16_from_float(value);
}

double DenseMlaCase::query(int64_t t, int64_t h, int64_t d) const {
  if (spec_.q_code_scale == 0) return bf16_to_float(q.at<bf16_t>({t, h, d}));
  return static_cast<double>(spec_.q_code_scale) * e4m3_to_float(q.at<uint8_t>({t, h, d}));
}

DenseMlaProblem DenseMlaCase::problem() const {
  DenseMlaProblem problem;
  problem.max_rows = num_rows_;
  problem.max_requests = static_cast<int64_t>(spec_.rows.size());
  problem.max_pages = table_width_;
  problem.num_heads = spec_.heads;
  problem.num_heads_kv = spec_.heads_kv;
  problem.head_dim_qk = spec_.head_dim_qk;
  problem.page_size = spec_.page_size;
  problem.row_format = spec_.format;
  problem.softmax_scale = static_cast<float>(std::pow(spec_.head_dim_qk, -0.55));
  problem.causal = spec_.causal;
  if (spec_.q_code_scale > 0) problem.q_scale = spec_.q_code_scale;
  problem.k_scale = spec_.k_scale;
  problem.split_keys = spec_.split_keys;
  return problem;
}

DenseMlaTensors DenseMlaCase::tensors() const {
  DenseMlaTensors tensors;
  tensors.q = q.view();
  tensors.kv = kv.view();
  tensors.page_table = page_table.view();
  tensors.kv_len = kv_len.view();
  tensors.q_indptr = q_indptr.view();
  return tensors;
}

DenseMlaOutputs DenseMlaCase::run(const Options& options, int threads) {
  return run(problem(), tensors(), options, threads);
}

DenseMlaOutputs DenseMlaCase::run(const DenseMlaProblem& problem, const DenseMlaTensors& inputs,
                                  const Options& options, int threads) {
  const int64_t rows = inputs.q.shape[0];
  const StridedTensor out(DType::kBf16, {rows, problem.num_heads, 512}, {0, 1, 128}, 0xAB);
  const StridedTensor lse(DType::kF32, {rows, problem.num_heads}, {0, 3}, 0xAB);
  DenseMlaTensors tensors = inputs;
  tensors.out = out.view();
  tensors.lse = lse.view();
  const DenseMla plan = DenseMla::plan(problem, test::device_of(options, threads), options);
  // Whole lines of 64 bytes, so that the workspace is aligned and ends at a guard page.
  const size_t bytes = plan.workspace_bytes();
  EXPECT_EQ(bytes % 64, 0u);
  GuardedMemory scratch(bytes);
  if (bytes > 0) std::memset(scratch.data(), 0xFF, bytes);
  plan.run(tensors, Workspace{scratch.data(), bytes});
  EXPECT_TRUE(out.gaps_untouched() && lse.gaps_untouched()) << "wrote between rows of an output";
  DenseMlaOutputs outputs;
  outputs.heads = problem.num_heads;
  outputs.rounds_weights = rounds_weights(plan.implementation().name);
  outputs.out = to_doubles(tensors.out);
  outputs.lse = to_doubles(tensors.lse);
  for (const double value : outputs.out)
    outputs.out_bits.push_back(bf16_from_float(static_cast<float>(value)).bits);
  for (const double value : outputs.lse)
    outputs.lse_bits.push_back(std::bit_cast<uint32_t>(static_cast<float>(value)));
  return outputs;
}

DenseMlaOutputs DenseMlaCase::expected() { return expected(problem()); }

DenseMlaOutputs DenseMlaCase::expected(const DenseMlaProblem& problem) {
  DenseMlaOutputs outputs;
  outputs.heads = spec_.heads;
  for (size_t r = 0; r < spec_.rows.size(); ++r) {
    const auto request = static_cast<int64_t>(r);
    for (int64_t i = 0; i < spec_.rows[r]; ++i) {
      const int64_t last = spec_.causal ? num_keys(request) - spec_.rows[r] + i + 1 : INT_MAX;
      for (int64_t h = 0; h < spec_.heads; ++h) {
        const int64_t g = h / (spec_.heads / spec_.heads_kv);
        long double sum = 0;
        std::vector<long double> value(512, 0), magnitude(512, 0);
        for (int64_t j = 0; j < std::min(last, num_keys(request)); ++j) {
          if (!key_exists(request, j)) continue;
          double dot[4] = {};  // four chains of additions, for speed
          for (int64_t d = 0; d < spec_.head_dim_qk; ++d)
            dot[d % 4] += query(first_row(request) + i, h, d) * key(request, g, j, d);
          const long double weight =
              std::exp(static_cast<long double>(problem.softmax_scale) *
                       (static_cast<long double>(dot[0]) + dot[1] + dot[2] + dot[3]));
          sum += weight;
          for (size_t d = 0; d < 512; ++d) {
            const double channel = key(request, g, j, static_cast<int64_t>(d));
            value[d] += weight * channel;
            magnitude[d] += weight * std::fabs(channel);
          }
        }
        outputs.lse.push_back(static_cast<double>(std::log(sum)));
        for (size_t d = 0; d < 512; ++d) {
          outputs.out.push_back(sum == 0 ? 0.0 : static_cast<double>(value[d] / sum));
          outputs.magnitude.push_back(sum == 0 ? 0.0 : static_cast<double>(magnitude[d] / sum));
        }
      }
    }
  }
  return outputs;
}

testing::AssertionResult DenseMlaCase::matches(const DenseMlaOutputs& actual) {
  // The limits of the specification (6.1) for dense decode, and for packed fp8 rows.
  constexpr Tolerance kOut{.absolute = 8e-4, .relative = 2.01 / 128, .cosine = 5e-6};
  const DenseMlaOutputs reference = expected();
  const auto out =
      ExpectCloseOutputs(actual.out, reference.out, reference.magnitude, actual.num_rounded(),
                         spec_.format == RowFormat::kBf16 ? kOut : kSparseFp8Out);
  if (!out) return testing::AssertionFailure() << "out: " << out.message();
  const auto lse = ExpectClose(actual.lse, reference.lse, kSparseFp8Lse);
  if (!lse) return testing::AssertionFailure() << "lse: " << lse.message();
  return testing::AssertionSuccess();
}

}  // namespace fovea::test
