#include <sched.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "fovea/ceilings.h"

namespace fovea {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string read_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    const size_t end = line.find_last_not_of(" \t");
    if (begin != std::string::npos) return line.substr(begin, end - begin + 1);
  }
  return "unknown";
}

// "512K", "32M" or plain bytes; 0 for anything else.
int64_t parse_bytes(const std::string& text) {
  int64_t value = 0;
  size_t i = 0;
  for (; i < text.size() && std::isdigit(static_cast<unsigned char>(text[i])) != 0; ++i) {
    if (value > (int64_t{1} << 40)) return 0;
    value = value * 10 + (text[i] - '0');
  }
  if (i < text.size() && text[i] == 'K') value <<= 10;
  if (i < text.size() && text[i] == 'M') value <<= 20;
  return value;
}

constexpr int kMaxCpus = 4096;

// Whether this process may run on a CPU; true when the system does not say.
bool may_use(int cpu) {
  static const auto mask = [] {
    std::array<cpu_set_t, kMaxCpus / CPU_SETSIZE> set{};
    if (sched_getaffinity(0, sizeof(set), set.data()) != 0)
      std::memset(set.data(), 0xFF, sizeof(set));
    return set;
  }();
  return CPU_ISSET_S(cpu, sizeof(mask), mask.data());
}

// Walks the caches of every CPU that the process may use; caches shared by several are counted
// once.
void read_caches(CpuFacts* facts) {
  std::set<std::pair<std::string, std::string>> seen;  // (level, CPUs that share it)
  for (int cpu = 0; cpu < kMaxCpus; ++cpu) {
    if (!may_use(cpu)) continue;
    const std::string base = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index";
    if (first_line(base + "0/level").empty()) continue;
    for (int index = 0; index < 8; ++index) {
      const std::string directory = base + std::to_string(index);
      const std::string level = first_line(directory + "/level");
      if (level.empty()) break;
      if (first_line(directory + "/type") == "Instruction") continue;
      if (!seen.emplace(level, first_line(directory + "/shared_cpu_list")).second) continue;
      const int64_t bytes = parse_bytes(first_line(directory + "/size"));
      if (level == "2") facts->l2_bytes_per_core = std::max(facts->l2_bytes_per_core, bytes);
      if (level == "3") facts->l3_bytes_total += bytes;
    }
  }
}

}  // namespace

const CpuFacts& cpu_facts() {
  static const CpuFacts facts = [] {
    CpuFacts result;
    result.model = read_model();
    result.num_threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    read_caches(&result);
    return result;
  }();
  return facts;
}

}  // namespace fovea
