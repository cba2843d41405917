#include "fovea/ceilings_file.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "fovea/error.h"
#include "fovea/version.h"

namespace fovea {
namespace {

// Points the cache directory at an empty folder for the life of the test.
class CeilingsFile : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(testing::TempDir()) / "fovea-ceilings-test";
    std::filesystem::remove_all(folder_);
    const char* old = std::getenv("XDG_CACHE_HOME");
    old_ = old != nullptr ? old : "";
    setenv("XDG_CACHE_HOME", folder_.c_str(), 1);
  }
  void TearDown() override {
    std::filesystem::remove_all(folder_);
    if (old_.empty())
      unsetenv("XDG_CACHE_HOME");
    else
      setenv("XDG_CACHE_HOME", old_.c_str(), 1);
  }

  static MachineCeilings made_up(int num_threads, double fma) {
    MachineCeilings ceilings;
    ceilings.cpu = cpu_facts().model;
    ceilings.isa = current_cpu_isa();
    ceilings.version = std::string(version());
    ceilings.all_threads = {num_threads, fma, std::nullopt, 200, 100.0, 40, 50, 30, 20};
    ceilings.one_thread = {1, fma / num_threads, 77.0, 100, std::nullopt, 20, 25, 15, 10};
    return ceilings;
  }
  static void write_file(const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(ceilings_path()).parent_path());
    std::ofstream(ceilings_path()) << text;
  }

  std::filesystem::path folder_;
  std::string old_;
};

TEST_F(CeilingsFile, NothingIsKeptBeforeTheFirstMeasurement) {
  EXPECT_FALSE(load_ceilings(Device::cpu(2)));
}

TEST_F(CeilingsFile, ComesBackAsStoredUnderItsThreadCount) {
  store_ceilings(made_up(2, 300));
  store_ceilings(made_up(3, 400));
  const std::optional<MachineCeilings> two = load_ceilings(Device::cpu(2));
  ASSERT_TRUE(two);
  EXPECT_EQ(two->all_threads.num_threads, 2);
  EXPECT_EQ(two->all_threads.fp32_fma_gflops, 300);
  EXPECT_FALSE(two->all_threads.bf16_dot_gflops);
  EXPECT_EQ(two->all_threads.l3_read_gb_per_s, 100.0);
  EXPECT_EQ(two->all_threads.gather_656_gb_per_s, 20);
  EXPECT_EQ(two->one_thread.bf16_dot_gflops, 77.0);
  EXPECT_FALSE(two->one_thread.l3_read_gb_per_s);
  EXPECT_EQ(load_ceilings(Device::cpu(3))->all_threads.fp32_fma_gflops, 400);
  EXPECT_FALSE(load_ceilings(Device::cpu(4)));
}

TEST_F(CeilingsFile, ANewMeasurementReplacesTheOldOne) {
  store_ceilings(made_up(2, 300));
  store_ceilings(made_up(2, 350));
  EXPECT_EQ(load_ceilings(Device::cpu(2))->all_threads.fp32_fma_gflops, 350);
  std::ifstream file(ceilings_path());
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_EQ(text.str().find("\"one_thread\""), text.str().rfind("\"one_thread\""));
}

TEST_F(CeilingsFile, AnotherMachineOrVersionIsNotUsed) {
  MachineCeilings other = made_up(2, 300);
  other.cpu = "another CPU";
  store_ceilings(other);
  other = made_up(2, 300);
  other.version = "0.0.0";
  store_ceilings(other);
  EXPECT_FALSE(load_ceilings(Device::cpu(2)));
}

TEST_F(CeilingsFile, AMalformedFileCountsAsAbsentAndIsReplaced) {
  for (const char* text :
       {"", "{", "[]", "{\"format\": 2, \"entries\": []}", "{\"format\": 1, \"entries\": 7}",
        "{\"format\": 1, \"entries\": [7]}", "{\"format\": 1, \"entries\": [{\"cpu\": \"x\"}]}"}) {
    write_file(text);
    EXPECT_FALSE(load_ceilings(Device::cpu(2))) << text;
    store_ceilings(made_up(2, 300));
    EXPECT_TRUE(load_ceilings(Device::cpu(2))) << text;
  }
}

TEST_F(CeilingsFile, AnUnwritablePlaceIsAnError) {
  std::filesystem::create_directories(folder_);
  std::ofstream(folder_ / "fovea") << "a file where the folder belongs";
  EXPECT_THROW(store_ceilings(made_up(2, 300)), Error);
}

}  // namespace
}  // namespace fovea
