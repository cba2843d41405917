// The bf16 kernel of sparse_mla on a CPU that need not have its instructions.
#include "tests/mla/avx512bf16_model.h"

#if defined(__x86_64__)

#include <gtest/gtest.h>
#include <immintrin.h>

#include <cstring>

#include "fovea/device.h"
#include "src/mla/sparse_mla_driver.h"
#include "src/mla/sparse_mla_impl.h"
#include "tests/mla/sparse_mla_case.h"
#include "tests/support/memory.h"

// The kernel's source with names of its own for what the library has already, and the model's words
// for instructions.
// NOLINTBEGIN: reserved names
#define sparse_mla_cpu_avx512bf16_kernel sparse_mla_modelled_kernel
#define sparse_mla_cpu_avx512bf16_available sparse_mla_modelled_available
#define sparse_mla_cpu_avx512bf16_workspace sparse_mla_modelled_workspace
#define sparse_mla_cpu_avx512bf16 sparse_mla_modelled
#define FOVEA_AVX512_BF16
#define __m512 ::fovea::test::avx512::Zmm
#define __m512i ::fovea::test::avx512::Zmm
#define __m512bh ::fovea::test::avx512::Zmm
#define __m256 ::fovea::test::avx512::Ymm
#define __m256i ::fovea::test::avx512::Ymm
#define __m256bh ::fovea::test::avx512::Ymm
#define __mmask16 ::fovea::test::avx512::Mask
#undef _CMP_NLE_UQ
#undef _CMP_NEQ_UQ
#undef _mm512_cmp_ps_mask
#undef _mm512_maskz_slli_epi32
#define _CMP_NLE_UQ ::fovea::test::avx512::Compare::kNotLessEqual
#define _CMP_NEQ_UQ ::fovea::test::avx512::Compare::kNotEqual
#define _mm512_loadu_ps ::fovea::test::avx512::load<__m512>
#define _mm512_storeu_ps ::fovea::test::avx512::store
#define _mm512_load_si512 ::fovea::test::avx512::load<__m512>
#define _mm512_loadu_si512 ::fovea::test::avx512::load<__m512>
#define _mm512_storeu_si512 ::fovea::test::avx512::store
#define _mm256_loadu_ps ::fovea::test::avx512::load<__m256>
#define _mm256_storeu_ps ::fovea::test::avx512::store
#define _mm256_loadu_si256 ::fovea::test::avx512::load<__m256>
#define _mm256_storeu_si256 ::fovea::test::avx512::store
#define _mm512_set1_epi32 ::fovea::test::avx512::broadcast<__m512, int>
#define _mm256_set1_epi32 ::fovea::test::avx512::broadcast<__m256, int>
#define _mm512_set1_ps ::fovea::test::avx512::broadcast<__m512, float>
#define _mm512_setzero_ps() ::fovea::test::avx512::broadcast<__m512, float>(0.0f)
#define _mm512_setzero_si512() ::fovea::test::avx512::broadcast<__m512, int>(0)
#define _mm256_setzero_ps() ::fovea::test::avx512::broadcast<__m256, float>(0.0f)
#define _mm512_dpbf16_ps ::fovea::test::avx512::dpbf16<__m512>
#define _mm256_dpbf16_ps ::fovea::test::avx512::dpbf16<__m256>
#define _mm512_cvtneps_pbh ::fovea::test::avx512::cvtneps
#define _mm512_permutex2var_epi16 ::fovea::test::avx512::permutex2var_epi16
#define _mm256_permutexvar_epi16 ::fovea::test::avx512::permutexvar_epi16
#define _mm256_setr_epi16 ::fovea::test::avx512::setr_epi16
#define _mm512_mul_ps ::fovea::test::avx512::mul_ps
#define _mm512_sub_ps ::fovea::test::avx512::sub_ps
#define _mm512_castsi512_ps(a) (a)
#define _mm512_cmp_ps_mask ::fovea::test::avx512::cmp_ps_mask
#define _mm512_maskz_cvtepu16_epi32 ::fovea::test::avx512::maskz_cvtepu16_epi32
#define _mm512_maskz_slli_epi32 ::fovea::test::avx512::maskz_slli_epi32
#define _mm512_maskz_mov_ps ::fovea::test::avx512::maskz_mov_ps
#include "src/mla/sparse_mla_cpu_avx512bf16.cc"
// NOLINTEND

namespace fovea {
namespace {

using test::CaseSpec;
using test::SparseMlaCase;

void run_model(SparseMlaProblem problem, const SparseMlaTensors& tensors) {
  if (!problem.extra_row_format) problem.extra_row_format = problem.row_format;
  if (!problem.extra_page_size) problem.extra_page_size = problem.page_size;
  const Device device = Device::cpu(1);
  const internal::SparseMlaKernel kernel = internal::sparse_mla_modelled_kernel();
  HostBuffer memory(internal::sparse_mla_workspace(kernel, problem, device));
  std::memset(memory.data(), 0xFF, memory.bytes());
  internal::run_sparse_mla(kernel, problem, device, tensors, memory.workspace());
}

void expect_formula(const CaseSpec& spec) {
  SparseMlaCase test_case(spec);
  EXPECT_TRUE(test_case.matches(test_case.run_by(run_model, "cpu_avx512bf16")))
      << "heads " << spec.heads << ", topk " << spec.primary.topk << ", seed " << spec.seed;
}

TEST(SparseMlaAvx512Bf16Model, FollowsTheFormula) {
  for (const int64_t heads : {1, 8, 20, 33}) {
    for (const int64_t topk : {1, 4, 63, 130}) {
      expect_formula({.rows = 2, .heads = heads, .primary = {RowFormat::kBf16, 0, 90, topk}});
    }
  }
  expect_formula({.rows = 2,
                  .heads = 9,
                  .head_dim_qk = 512,
                  .primary = {RowFormat::kBf16, 16, 96, 70},
                  .extra = {RowFormat::kV4, 64, 128, 65},
                  .sink = true});
}

TEST(SparseMlaAvx512Bf16Model, FollowsTheFormulaWhereFewKeysShareTheWeight) {
  for (const CaseSpec& spec : test::few_keys_share_the_weight()) expect_formula(spec);
}

// All heads together, then each by itself.
void run_heads(SparseMlaProblem problem, const SparseMlaTensors& tensors) {
  run_model(problem, tensors);
  const int64_t rows = problem.max_rows, heads = problem.num_heads;
  problem.num_heads = 1;
  test::Tensor out(DType::kBf16, {rows, 1, 512}), lse(DType::kF32, {rows, 1});
  for (int64_t head = 0; head < heads; ++head) {
    SparseMlaTensors alone = tensors;
    alone.q.shape[1] = 1;
    alone.q.data = static_cast<const bf16_t*>(tensors.q.data) + head * tensors.q.stride[1];
    alone.out = out.view();
    alone.lse = lse.view();
    alone.max_logits = {};
    run_model(problem, alone);
    for (int64_t t = 0; t < rows; ++t) {
      const auto* together = static_cast<const bf16_t*>(tensors.out.data) +
                             t * tensors.out.stride[0] + head * tensors.out.stride[1];
      EXPECT_EQ(std::memcmp(out.data<bf16_t>() + t * 512, together, 512 * sizeof(bf16_t)), 0)
          << "row " << t << ", head " << head;
    }
  }
}

TEST(SparseMlaAvx512Bf16Model, EveryHeadEqualsItsOwnRun) {
  // The heads of a group split the weights of different keys.
  SparseMlaCase test_case(
      {.rows = 2, .heads = 11, .primary = {RowFormat::kBf16, 0, 90, 150}, .q_scale = 3});
  EXPECT_TRUE(test_case.matches(test_case.run_by(run_heads, "cpu_avx512bf16")));
}

}  // namespace
}  // namespace fovea

#endif
