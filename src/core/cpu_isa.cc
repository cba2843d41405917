#include <hwy/highway.h>
#include <hwy/targets.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "fovea/device.h"
#include "src/core/check.h"

namespace fovea {
namespace {

CpuIsa detect() noexcept {
#if HWY_ARCH_X86
  const int64_t targets = hwy::SupportedTargets();
  if ((targets & HWY_AVX3) != 0) {
    return __builtin_cpu_supports("avx512bf16") ? CpuIsa::kAvx512Bf16 : CpuIsa::kAvx3;
  }
  if ((targets & HWY_AVX2) != 0) return CpuIsa::kAvx2;
#endif
  return CpuIsa::kBaseline;
}

void limit_highway(CpuIsa isa) {
#if HWY_ARCH_X86
  // Highway numbers better targets with lower bits.
  int64_t mask = hwy::SupportedTargets();
  if (isa < CpuIsa::kAvx3) mask &= ~((HWY_AVX3 << 1) - 1);
  if (isa < CpuIsa::kAvx2) mask &= ~((HWY_AVX2 << 1) - 1);
  hwy::SetSupportedTargetsForTest(mask);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
#else
  (void)isa;
#endif
}

std::atomic<CpuIsa>& limit() {
  static std::atomic<CpuIsa> value = [] {
    const CpuIsa best = best_cpu_isa();
    const char* text = std::getenv("FOVEA_CPU_ISA");
    if (text == nullptr || *text == '\0') return best;
    for (const CpuIsa isa :
         {CpuIsa::kBaseline, CpuIsa::kAvx2, CpuIsa::kAvx3, CpuIsa::kAvx512Bf16}) {
      if (to_string(isa) != text) continue;
      if (isa > best)
        internal::unsupported("FOVEA_CPU_ISA", std::string(text) + " is not on this CPU");
      limit_highway(isa);
      return isa;
    }
    internal::invalid("FOVEA_CPU_ISA",
                      "'" + std::string(text) + "', expected baseline, avx2, avx3 or avx512bf16");
  }();
  return value;
}

}  // namespace

std::string_view to_string(CpuIsa isa) noexcept {
  switch (isa) {
    case CpuIsa::kBaseline:
      return "baseline";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx3:
      return "avx3";
    case CpuIsa::kAvx512Bf16:
      return "avx512bf16";
  }
  return "?";
}

CpuIsa best_cpu_isa() noexcept {
  static const CpuIsa best = detect();
  return best;
}

CpuIsa current_cpu_isa() { return limit().load(); }

void limit_cpu_isa(CpuIsa isa) {
  if (isa > best_cpu_isa()) {
    internal::unsupported("limit_cpu_isa", std::string(to_string(isa)) +
                                               " is not on this CPU, which has " +
                                               std::string(to_string(best_cpu_isa())));
  }
  limit() = isa;
#if HWY_ARCH_X86
  hwy::SetSupportedTargetsForTest(0);
#endif
  limit_highway(isa);
}

}  // namespace fovea
