#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/device.h"
#include "fovea/export.h"

namespace fovea {

/// Options of every plan().
struct Options {
  /// Forces one implementation by name ("ref", "cpu", "cpu_avx512bf16", ...); empty: the best one
  /// that supports the problem.
  std::string implementation;
};

/// What plan() chose and why the better-ranked ones were passed over.
struct ImplementationChoice {
  std::string name;
  std::vector<std::pair<std::string, std::string>> refused;  ///< (name, reason), best first
};

/// One entry of an operator's implementation list.
struct ImplementationInfo {
  std::string name;
  DeviceKind device = DeviceKind::kCpu;
  bool available = false;  ///< This build and machine can run it.
  std::string reason;      ///< Why not, when unavailable.
};

/// One operator and its implementations, best first, reference last.
struct OperatorInfo {
  std::string name;
  std::string room;
  std::vector<ImplementationInfo> implementations;
};

/// Every operator that this build has, sorted by room and name.
FOVEA_API std::vector<OperatorInfo> operators();

/// Forces implementations for all later plans of the process, as FOVEA_FORCE_IMPL does:
/// "sparse_mla=ref,topk_select=cpu"; a bare name applies to every operator that has it; an empty
/// text lifts it. Options::implementation wins over it. Throws Error(kInvalidArgument), listing
/// what exists, for an operator or name that does not exist.
FOVEA_API void force_implementations(std::string_view text);

}  // namespace fovea
