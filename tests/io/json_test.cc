#include "fovea/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "fovea/error.h"

namespace fovea {
namespace {

std::string refusal(std::string_view text) {
  try {
    Json::parse(text, "params");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "accepted";
}

TEST(Json, ParsesEveryKindAndKeepsTheOrderOfKeys) {
  const Json value =
      Json::parse(R"({"z": [1, -2.5, true, null, "a\nb"], "a": {"deep": {}}})", "text");
  EXPECT_EQ(value.members()[0].first, "z");
  const Json::Array& items = value.find("z")->items();
  EXPECT_EQ(items[0].as_integer(), 1);
  EXPECT_EQ(items[0].as_number(), 1.0);
  EXPECT_EQ(items[1].as_number(), -2.5);
  EXPECT_TRUE(items[2].as_bool());
  EXPECT_EQ(items[3].kind(), Json::Kind::kNull);
  EXPECT_EQ(items[4].as_string(), "a\nb");
  EXPECT_TRUE(value.find("a")->find("deep")->members().empty());
  EXPECT_EQ(value.find("b"), nullptr);
  EXPECT_EQ(items[0].find("b"), nullptr);
}

TEST(Json, DumpParsesBackToTheSameValue) {
  Json value = Json::object();
  value.set("integer", std::numeric_limits<int64_t>::min())
      .set("third", 1.0 / 3)
      .set("tiny", 5e-324)
      .set("text", "quote \" and \x01 and \xC3\xA9")
      .set("list", Json::array({1, "two", false, Json()}))
      .set("empty", Json::object());
  EXPECT_EQ(Json::parse(value.dump(), "text"), value);
  EXPECT_EQ(Json::parse(value.dump(2), "text"), value);
  value.set("third", 4);
  EXPECT_EQ(value.find("third")->as_integer(), 4);
  EXPECT_EQ(value.members().size(), 6u);
}

TEST(Json, BytesThatAreNotUtf8AreReplacedWhenWritten) {
  EXPECT_EQ(Json::parse(Json("a\xFFz").dump(), "text").as_string(), "a\xEF\xBF\xBDz");
}

TEST(Json, NonFiniteNumbersAreRefused) {
  for (const char* text : {"NaN", "[Infinity]", "{\"a\": -Infinity}", "1e999", "[-1e400]", "nan"}) {
    EXPECT_NE(refusal(text).find("params"), std::string::npos) << refusal(text);
  }
  EXPECT_NE(refusal("{\"softmax_scale\": 1e999}").find("not finite"), std::string::npos);
  EXPECT_THROW(Json(std::nan("")), Error);
  EXPECT_THROW(Json(-std::numeric_limits<double>::infinity()), Error);
}

TEST(Json, MalformedTextIsRefusedWithItsPosition) {
  for (const char* text : {"", " ", "{", "[1,]", "{\"a\" 1}", "{'a': 1}", "tru", "1 2", "\"\xFF\"",
                           "[1] x", "\"open", "{\"a\":1,}", "01"}) {
    EXPECT_NE(refusal(text).find("at byte"), std::string::npos) << text << ": " << refusal(text);
  }
}

TEST(Json, RepeatedKeysAreRefusedByName) {
  EXPECT_NE(refusal(R"({"topk": 1, "topk": 2})").find("'topk' occurs twice"), std::string::npos);
  EXPECT_EQ(refusal(R"([{"a": 1}, {"a": 1}])"), "accepted");
}

TEST(Json, DeepNestingIsRefusedInsteadOfExhaustingTheStack) {
  const auto nested = [](int depth) {
    return std::string(static_cast<size_t>(depth), '[') +
           std::string(static_cast<size_t>(depth), ']');
  };
  EXPECT_EQ(refusal(nested(Json::kMaxDepth)), "accepted");
  EXPECT_NE(refusal(nested(Json::kMaxDepth + 1)).find("nesting"), std::string::npos);
  EXPECT_NE(refusal(std::string(1'000'000, '[')).find("nesting"), std::string::npos);
}

TEST(Json, IntegersKeepTheirBitsAndOverflowIsRefused) {
  EXPECT_EQ(Json::parse("9223372036854775807", "text").as_integer(),
            std::numeric_limits<int64_t>::max());
  EXPECT_NE(refusal("9223372036854775808").find("does not fit"), std::string::npos);
  EXPECT_THROW(Json(std::numeric_limits<uint64_t>::max()), Error);
  EXPECT_EQ(Json::parse("64.0", "text").as_integer(), 64);
  EXPECT_THROW(Json(64.5).as_integer(), Error);
  EXPECT_THROW(Json(1e300).as_integer(), Error);
}

TEST(Json, WrongKindsAreNamed) {
  try {
    Json("word").as_integer();
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "invalid_argument: json: found a value of type string, expected an integer");
  }
  EXPECT_THROW(Json(1).as_bool(), Error);
  EXPECT_THROW(Json(true).as_integer(), Error);
  EXPECT_THROW(Json(true).as_number(), Error);
  EXPECT_THROW(Json::object().items(), Error);
  EXPECT_THROW(Json::array().members(), Error);
  EXPECT_THROW(Json(1).push(2), Error);
  EXPECT_THROW(Json::array().set("a", 1), Error);
}

}  // namespace
}  // namespace fovea
