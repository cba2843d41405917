#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "fovea/device.h"
#include "fovea/replay.h"

/// The verbs of the command line: one options struct and one function each, filled and called by
/// main.cc. Results go to stdout, talk to stderr.
namespace fovea::cli {

enum ExitCode : int {
  kExitOk = 0,
  kExitMismatch = 1,  ///< Something was compared and differs.
  kExitUsage = 2,     ///< Options, verbs, operators, models.
  kExitFailure = 3,   ///< Files and run time.
};

/// Ends the program with kExitUsage and this message.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Options of every verb that runs operators.
struct RunSettings {
  std::string device = "cpu";
  int threads = 0;             ///< 0: every hardware thread.
  std::string implementation;  ///< Empty: the best that supports the problem.

  /// Throws UsageError for a device that this build lacks.
  Device parsed_device() const;
};

/// Facts and configuration that `info --explain` feeds to the dispatch of the DSA backend. Words
/// are those of the library's enums.
struct ExplainOptions {
  std::string mode = "extend";
  int64_t max_kv_len = -1;  ///< -1: the engine has no host lengths.
  int64_t sum_kv_len = -1;  ///< -1: max_kv_len, one request.
  int64_t num_rows = 1;
  bool has_prefix = false;
  bool mha_inputs = false;
  bool context_parallel = false;  ///< Of the engine and of the batch.
  int64_t topk = 2048;
  std::string row_format = "v32";
  std::string prefill_implementation = "auto";
  std::string decode_implementation = "auto";
  double contiguous_kv_ratio = 0;
  int64_t mha_chunk_capacity = 131072;
  std::string extend_kv_source = "cache";
  bool deterministic = true;
  bool force_absorbed = false;
};

struct InfoOptions {
  bool json = false;
  bool markdown = false;
  bool devices = false;  ///< Only the devices.
  bool explain = false;
  ExplainOptions facts;
};
int info(const InfoOptions& options);

struct RunOptions {
  RunSettings settings;
  std::string op;
  std::string input_path;
  std::string output_path;
  bool json = false;
};
int run(const RunOptions& options);

/// Throws UsageError ("unknown operator ...") listing what exists.
void check_operator(const std::string& op);

struct ReplayVerbOptions {
  RunSettings settings;
  ReplayOptions replay;  ///< device, implementation, arrivals and seed come from the fields here.
  std::string trace_path;
  std::string format = "auto";
  std::string arrivals = "asap";
  int64_t seed = 0;
  std::optional<double> accept;
  std::optional<std::string> draft_mode;
  std::string json_path;
  std::string report_path;
};
int replay(const ReplayVerbOptions& options);

/// Mirrors TraceGeneratorOptions.
struct GenTraceOptions {
  std::string output_path;
  std::string style = "conversation";
  int64_t num_requests = 24;
  int64_t seed = 1;
  double duration_ms = 60000;
  int64_t mean_input_length = 8192;
  int64_t mean_output_length = 256;
  int64_t block_tokens = 512;
  bool json = false;
};
int gen_trace(const GenTraceOptions& options);

struct VerifyOptions {
  std::string op;      ///< Empty: every operator.
  std::string device;  ///< Empty: the CPU and every GPU.
  std::string golden;  ///< Folder of golden files; empty: the installed ones.
  int64_t seed = 1;    ///< Of the generated problems.
  bool json = false;
};
int verify(const VerifyOptions& options);

/// share/fovea/golden beside the bin folder of this program; empty when it is not there.
std::string installed_golden_folder();

}  // namespace fovea::cli
