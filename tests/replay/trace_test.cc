#include "fovea/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <set>

#include "fovea/error.h"

namespace fovea {
namespace {

using testing::HasSubstr;

constexpr char kFirst[] =
    R"({"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]})"
    "\n";

// The message of the kIo error that parsing `text` must give.
std::string error_of(const std::string& text, TraceFormat format = TraceFormat::kAuto) {
  try {
    parse_trace(text, "some.jsonl", format);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    return error.what();
  }
  ADD_FAILURE() << "accepted: " << text;
  return "";
}

std::string line_with(const std::string& input_length, const std::string& output_length,
                      const std::string& hash_ids) {
  return R"({"timestamp": 0, "input_length": )" + input_length + R"(, "output_length": )" +
         output_length + R"(, "hash_ids": )" + hash_ids + "}\n";
}

TEST(TraceReader, ReadsMooncakeLinesAndIgnoresUnknownKeys) {
  const Trace trace = parse_trace(
      std::string(kFirst) +
          "\r\n  \n"
          R"({"hash_ids": [7], "output_length": 0, "x": {"y": [1]}, "input_length": 512, "timestamp": 2.5})",
      "t.jsonl");
  EXPECT_EQ(trace.source, "t.jsonl");
  EXPECT_EQ(trace.block_tokens, 512);
  EXPECT_TRUE(trace.has_hashes);
  ASSERT_EQ(trace.requests.size(), 2u);
  EXPECT_EQ(trace.requests[0].hash_ids, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(trace.requests[1].timestamp_ms, 2.5);
  EXPECT_EQ(trace.requests[1].input_length, 512);
  EXPECT_EQ(trace.requests[1].output_length, 0);
}

TEST(TraceReader, FindsTheBlockSizeFromTheIdCounts) {
  // 16 tokens have one id in either form: only the second line decides.
  const std::string text = line_with("16", "1", "[1]") + line_with("40", "1", "[1, 2, 3]");
  EXPECT_EQ(parse_trace(text, "t").block_tokens, 16);
  EXPECT_EQ(parse_trace(text, "t", TraceFormat::kBlocks16).block_tokens, 16);
  EXPECT_EQ(parse_trace(line_with("16", "1", "[1]"), "t").block_tokens, 512);
  EXPECT_EQ(parse_trace(line_with("16", "1", "[1]"), "t", TraceFormat::kBlocks16).block_tokens, 16);
  EXPECT_THAT(error_of(text, TraceFormat::kMooncake), HasSubstr("some.jsonl: line 2: hash_ids"));
}

TEST(TraceReader, NamesFileLineAndKeyOfBadInput) {
  const std::string first = kFirst;
  const std::string truncated = std::string(kFirst).substr(0, 50);
  EXPECT_THAT(error_of(first + truncated), HasSubstr("some.jsonl: line 2: not valid JSON"));
  EXPECT_THAT(error_of(first + "\n\n[1]"), HasSubstr("line 4: a array, expected an object"));
  for (const char* key : {"timestamp", "input_length", "output_length", "hash_ids"}) {
    std::string line = kFirst;
    line.replace(line.find(key), 1, "z");
    EXPECT_THAT(error_of(first + line), HasSubstr("line 2: key '" + std::string(key) + "'"));
  }
  EXPECT_THAT(error_of(line_with("-5", "1", "[]")), HasSubstr("line 1: input_length = -5"));
  EXPECT_THAT(error_of(line_with("0", "1", "[]")), HasSubstr("input_length = 0"));
  EXPECT_THAT(error_of(line_with("5", "-1", "[1]")), HasSubstr("output_length = -1"));
  EXPECT_THAT(error_of(line_with("5", "99999999999", "[1]")), HasSubstr("output_length = 9999"));
  EXPECT_THAT(error_of(line_with("18446744073709551615", "1", "[1]")), HasSubstr("input_length"));
  EXPECT_THAT(error_of(line_with("5.5", "1", "[1]")), HasSubstr("expected an integer"));
  EXPECT_THAT(error_of(line_with("\"5\"", "1", "[1]")), HasSubstr("input_length is a string"));
  EXPECT_THAT(error_of(line_with("5", "1", "7")), HasSubstr("hash_ids is a number"));
  EXPECT_THAT(error_of(line_with("5", "1", "[null]")), HasSubstr("hash_ids[] is a null"));
  EXPECT_THAT(error_of(first + line_with("1000", "1", "[1, 2, 3]")),
              HasSubstr("line 2: hash_ids has 3 ids, but input_length = 1000 needs 2"));
  EXPECT_THAT(error_of("{\"timestamp\": \"0\", \"input_length\": 1}"),
              HasSubstr("timestamp is a string"));
  EXPECT_THAT(error_of("{\"timestamp\": -3, \"input_length\": 5, \"output_length\": 1}"),
              HasSubstr("timestamp = -3"));
}

TEST(TraceReader, RefusesEmptyAndMissingFiles) {
  EXPECT_THAT(error_of(""), HasSubstr("some.jsonl: holds no request"));
  EXPECT_THAT(error_of("\n \n"), HasSubstr("holds no request"));
  EXPECT_THAT(error_of("timestamp_ms,input_length,output_length\n", TraceFormat::kCsv),
              HasSubstr("holds no request"));
  for (const std::string& path :
       {std::string("/nonexistent/trace.jsonl"), std::filesystem::temp_directory_path().string()}) {
    try {
      read_trace(path);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kIo);
      EXPECT_THAT(error.what(), HasSubstr(path));
    }
  }
}

TEST(TraceReader, ReadsCsvOfArrivals) {
  const Trace trace = parse_trace(
      "timestamp_ms,input_length,output_length\r\n0,100,5\r\n 12.5 , 7,\t1\n", "arrivals.csv");
  EXPECT_FALSE(trace.has_hashes);
  ASSERT_EQ(trace.requests.size(), 2u);
  EXPECT_EQ(trace.requests[1].timestamp_ms, 12.5);
  EXPECT_EQ(trace.requests[1].input_length, 7);
  EXPECT_EQ(trace.requests[1].output_length, 1);
  EXPECT_TRUE(trace.requests[1].hash_ids.empty());
  const auto csv_error = [](const char* text) { return error_of(text, TraceFormat::kCsv); };
  EXPECT_THAT(csv_error("0,1\n"), HasSubstr("line 1: 2 fields, expected 3"));
  EXPECT_THAT(csv_error("0,1,2\n0,1,2,3\n"), HasSubstr("line 2: 4 fields"));
  EXPECT_THAT(csv_error("0,1x,2\n"), HasSubstr("input_length = '1x'"));
  EXPECT_THAT(csv_error("0,,2\n"), HasSubstr("input_length = ''"));
  EXPECT_THAT(csv_error("nan,1,2\n"), HasSubstr("timestamp"));
  EXPECT_THAT(csv_error("0,-1,2\n"), HasSubstr("input_length = -1"));
}

TEST(TraceGenerator, WritesWhatTheReaderReadsBack) {
  for (const TraceStyle style : {TraceStyle::kConversation, TraceStyle::kAgent}) {
    for (const int64_t block : {512, 16}) {
      TraceGeneratorOptions options;
      options.style = style;
      options.block_tokens = block;
      options.mean_input_length = 3000;
      const Trace made = generate_trace(options);
      const std::string path =
          (std::filesystem::temp_directory_path() / "fovea_trace_test.jsonl").string();
      write_trace(made, path);
      const Trace read = read_trace(path);
      std::remove(path.c_str());
      EXPECT_EQ(read.block_tokens, block);
      EXPECT_EQ(trace_to_jsonl(read), trace_to_jsonl(made));
      EXPECT_EQ(trace_to_jsonl(generate_trace(options)), trace_to_jsonl(made));
      options.seed = 2;
      EXPECT_NE(trace_to_jsonl(generate_trace(options)), trace_to_jsonl(made));
    }
  }
}

TEST(TraceGenerator, SharesPrefixesAndNeverRepeatsAnIdInARow) {
  for (const TraceStyle style : {TraceStyle::kConversation, TraceStyle::kAgent}) {
    TraceGeneratorOptions options;
    options.style = style;
    options.num_requests = 100;
    const Trace trace = generate_trace(options);
    ASSERT_EQ(trace.requests.size(), 100u);
    std::set<int64_t> seen;
    size_t shared = 0, total = 0;
    for (size_t i = 0; i < trace.requests.size(); ++i) {
      const std::vector<int64_t>& ids = trace.requests[i].hash_ids;
      EXPECT_EQ(std::set<int64_t>(ids.begin(), ids.end()).size(), ids.size());
      if (i > 0) {
        EXPECT_LE(trace.requests[i - 1].timestamp_ms, trace.requests[i].timestamp_ms);
      }
      for (const int64_t id : ids) shared += seen.count(id);
      total += ids.size();
      seen.insert(ids.begin(), ids.end());
    }
    EXPECT_GT(shared, total / 4) << to_string(style);
    EXPECT_LT(shared, total) << to_string(style);
  }
}

TEST(TraceGenerator, RefusesOptionsOutsideTheirRange) {
  const auto refuses = [](auto change) {
    TraceGeneratorOptions options;
    change(options);
    EXPECT_THROW(generate_trace(options), Error);
  };
  refuses([](auto& o) { o.num_requests = 0; });
  refuses([](auto& o) { o.mean_input_length = 0; });
  refuses([](auto& o) { o.mean_output_length = -1; });
  refuses([](auto& o) { o.block_tokens = 64; });
  refuses([](auto& o) { o.duration_ms = -1; });
  EXPECT_THROW(write_trace(generate_trace({}), "/nonexistent/x.jsonl"), Error);
}

TEST(TraceWords, AreParsedAndRefusedWithTheList) {
  EXPECT_EQ(parse_trace_format("blocks16"), TraceFormat::kBlocks16);
  EXPECT_EQ(parse_trace_style("agent"), TraceStyle::kAgent);
  try {
    parse_trace_format("parquet");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("auto, mooncake, blocks16, csv"));
  }
}

}  // namespace
}  // namespace fovea
