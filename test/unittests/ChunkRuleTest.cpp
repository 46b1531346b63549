//===- ChunkRuleTest.cpp - Tests of entropy to chunk ----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/ChunkRule.h"

#include "corey/Scheduler/Policy.h"

#include "nlohmann/json.hpp"
#include "gtest/gtest.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>

using namespace corey;
using namespace corey::scheduler;

#ifndef COREY_TEST_INPUTS
#define COREY_TEST_INPUTS nullptr
#endif

namespace {
constexpr double Inf = std::numeric_limits<double>::infinity();
constexpr double NotANumber = std::numeric_limits<double>::quiet_NaN();

/// The file of published choices, in the folder Inputs beside this one's.
const nlohmann::json &cases() {
  static const nlohmann::json document = [] {
    const char *given = COREY_TEST_INPUTS;
    std::string here = __FILE__;
    std::string folder =
        given ? given
              : here.substr(0, here.find_last_of('/') + 1) + "../Inputs";
    std::ifstream file(folder + "/chunk_rule_cases.json");
    std::stringstream text;
    text << file.rdbuf();
    return nlohmann::json::parse(text.str(), nullptr, false);
  }();
  return document;
}

std::vector<nlohmann::json> list(const char *name) {
  std::vector<nlohmann::json> result;
  if (cases().is_object() && cases().contains(name))
    for (const nlohmann::json &each : cases()[name])
      result.push_back(each);
  return result;
}

ChunkRule named(std::string_view name) {
  Expected<ChunkRule> rule = ChunkRule::named(name);
  EXPECT_TRUE(rule) << rule.status().toString();
  return *rule;
}

int64_t chunkOf(const ChunkRule &rule, double nats, int64_t bins = 256) {
  std::optional<int64_t> chunk = rule.chunk(Nats(nats), bins);
  EXPECT_TRUE(chunk.has_value());
  return chunk.value_or(-1);
}
} // namespace

//===----------------------------------------------------------------------===//
// Published choices
//===----------------------------------------------------------------------===//

TEST(ChunkRuleTest, ThereAreCases) {
  ASSERT_TRUE(cases().is_object());
  EXPECT_EQ(56u, list("cases").size());
  EXPECT_EQ(6u, list("tile_cases").size());
  EXPECT_EQ(5u, list("guard_cases").size());
}

class PublishedChunkTest : public testing::TestWithParam<nlohmann::json> {};

TEST_P(PublishedChunkTest, IsReproduced) {
  const nlohmann::json &c = GetParam();
  SCOPED_TRACE(c.dump());
  auto name = c["rule"].get<std::string>();
  Expected<ChunkRule> made =
      name == "explicit" ? ChunkRule::powerOfTwo(c["c_min"].get<int64_t>(),
                                                 c["c_max"].get<int64_t>(),
                                                 c["h_ref"].get<double>())
                         : ChunkRule::named(name);
  ASSERT_TRUE(made) << made.status().toString();
  const ChunkRule &rule = *made;
  auto entropy = c["entropy"].get<double>();
  Nats nats = c["unit"] == "bits" ? Nats(Bits(entropy)) : Nats(entropy);
  std::optional<int64_t> chunk = rule.chunk(nats, c["bins"].get<int64_t>());
  ASSERT_TRUE(chunk.has_value());
  EXPECT_EQ(c["chunk"].get<int64_t>(), *chunk);
  // The same by the constants that the file has.
  if (name != "explicit") {
    const nlohmann::json &constants = cases()["rules"][name];
    EXPECT_EQ(constants["c_min"].get<int64_t>(), rule.minimum());
    EXPECT_EQ(constants["c_max"].get<int64_t>(), rule.maximum());
    EXPECT_EQ(constants["h_ref"].is_string() ? 0
                                             : constants["h_ref"].get<double>(),
              rule.reference());
  }
}
INSTANTIATE_TEST_SUITE_P(Tables, PublishedChunkTest,
                         testing::ValuesIn(list("cases")));

class PublishedTileTest : public testing::TestWithParam<nlohmann::json> {};

TEST_P(PublishedTileTest, IsReproduced) {
  const nlohmann::json &c = GetParam();
  SCOPED_TRACE(c.dump());
  ASSERT_EQ("bits", c["unit"].get<std::string>());
  Bits bits(c["entropy"].get<double>());
  EXPECT_EQ(c["tile"].get<int64_t>(), tile32(bits));
  EXPECT_EQ(c["tile"].get<int64_t>(), named("tile32").chunk(Nats(bits), 256));
}
INSTANTIATE_TEST_SUITE_P(Tables, PublishedTileTest,
                         testing::ValuesIn(list("tile_cases")));

class PublishedGuardTest : public testing::TestWithParam<nlohmann::json> {};

TEST_P(PublishedGuardTest, IsReproduced) {
  const nlohmann::json &c = GetParam();
  SCOPED_TRACE(c.dump());
  std::string spec =
      "guarded:inner=[static:" + std::to_string(c["selected"].get<int64_t>()) +
      "],fallback=" + std::to_string(c["fallback"].get<int64_t>()) +
      ",delta=" + std::to_string(c["delta"].get<int64_t>());
  auto policy = parsePolicy(spec);
  ASSERT_TRUE(policy) << policy.status().toString();
  Query query;
  Variant variant;
  Device device;
  query.variants = &variant;
  query.numVariants = 1;
  query.device = &device;
  query.problem.length = 4096;
  EXPECT_EQ(c["chunk"].get<int64_t>(), (*policy)->decide(query).chunk);
}
INSTANTIATE_TEST_SUITE_P(Tables, PublishedGuardTest,
                         testing::ValuesIn(list("guard_cases")));

//===----------------------------------------------------------------------===//
// Powers of two
//===----------------------------------------------------------------------===//

/// Boundaries lie where raw = 2^(k + 1/2); the literals are the table of the
/// specification, to three digits, in nats at 256 bins.
TEST(ChunkRuleTest, Boundaries) {
  struct Rule {
    const char *name;
    int64_t least, most;
    double reference;
    std::vector<double> boundaries;
  };
  const double ceiling = 5.545177444479562;
  const Rule rules[] = {
      {"legacy", 32, 512, 8, {.221, .975, 2.484, 5.501}},
      {"calibrated", 32, 512, ceiling, {.153, .676, 1.722, 3.813}},
      {"routed", 128, 512, ceiling, {.766, 3.380}},
      {"confirm", 128, 1024, ceiling, {.328, 1.448, 3.689}},
      {"unified", 128, 2048, ceiling, {.153, .676, 1.722, 3.813}}};
  for (const Rule &r : rules) {
    SCOPED_TRACE(r.name);
    ChunkRule rule = named(r.name);
    EXPECT_EQ(ChunkRule::Kind::PowerOfTwo, rule.kind());
    EXPECT_EQ(r.least, rule.minimum());
    EXPECT_EQ(r.most, rule.maximum());
    int64_t chunk = r.least;
    size_t k = 0;
    for (; chunk < r.most; chunk *= 2, ++k) {
      ASSERT_LT(k, r.boundaries.size());
      double raw = static_cast<double>(chunk) * std::sqrt(2),
             exact = (raw - static_cast<double>(r.least)) /
                     static_cast<double>(r.most - r.least) * r.reference;
      EXPECT_NEAR(r.boundaries[k], exact, 6e-4);
      EXPECT_EQ(chunk, chunkOf(rule, r.boundaries[k] - 1e-3));
      EXPECT_EQ(2 * chunk, chunkOf(rule, r.boundaries[k] + 1e-3));
      EXPECT_EQ(chunk, chunkOf(rule, exact - 1e-9));
      EXPECT_EQ(2 * chunk, chunkOf(rule, exact + 1e-9));
    }
    EXPECT_EQ(r.boundaries.size(), k);
    // The ends, and beyond them.
    EXPECT_EQ(r.least, chunkOf(rule, 0));
    EXPECT_EQ(r.least, chunkOf(rule, -0.0));
    EXPECT_EQ(r.least, chunkOf(rule, -1e-12));
    EXPECT_EQ(r.least, chunkOf(rule, -3));
    EXPECT_EQ(r.least, chunkOf(rule, -1e300));
    EXPECT_EQ(r.most, chunkOf(rule, r.reference));
    EXPECT_EQ(r.most, chunkOf(rule, 100));
    EXPECT_EQ(r.most, chunkOf(rule, 1e300));
  }
}

TEST(ChunkRuleTest, MatchesTheFormula) {
  for (const char *name :
       {"legacy", "calibrated", "routed", "confirm", "unified"})
    for (int64_t bins : {2, 3, 16, 64, 256, 2048, 65536}) {
      ChunkRule rule = named(name);
      double reference = rule.reference() > 0
                             ? rule.reference()
                             : std::log(static_cast<double>(bins)),
             last = 0;
      for (double h = -0.5; h < 12; h += 0.013) {
        double r = std::min(h / reference, 1.0),
               raw = static_cast<double>(rule.minimum()) +
                     r * static_cast<double>(rule.maximum() - rule.minimum());
        int64_t expected = rule.minimum();
        // Count how many boundaries raw has passed.
        while (expected < rule.maximum() && raw > 0 &&
               raw * raw > 2 * static_cast<double>(expected * expected))
          expected *= 2;
        ASSERT_EQ(expected, chunkOf(rule, h, bins)) << name << " " << h;
        ASSERT_LE(last, static_cast<double>(expected));
        last = static_cast<double>(expected);
      }
    }
}

TEST(ChunkRuleTest, ChunkDependsOnTheBinsOnlyByTheReference) {
  EXPECT_EQ(chunkOf(named("legacy"), 4, 2), chunkOf(named("legacy"), 4, 65536));
  EXPECT_EQ(512, chunkOf(named("calibrated"), std::log(2), 2));
  EXPECT_EQ(64, chunkOf(named("calibrated"), std::log(2), 65536));
  // A single bin has an entropy of 0 at most.
  EXPECT_EQ(32, chunkOf(named("calibrated"), 0, 1));
  EXPECT_EQ(32, chunkOf(named("calibrated"), 0, 0));
  EXPECT_EQ(128, chunkOf(named("unified"), 3, 1));
}

TEST(ChunkRuleTest, NothingForWhatIsNotFinite) {
  for (const std::string &name : ChunkRule::names())
    for (double bad : {NotANumber, -NotANumber, Inf, -Inf})
      EXPECT_FALSE(named(name).chunk(Nats(bad), 256).has_value()) << name;
  Expected<ChunkRule> rule = ChunkRule::powerOfTwo(1, 64);
  ASSERT_TRUE(rule);
  EXPECT_FALSE(rule->chunk(Nats(NotANumber), 256).has_value());
}

TEST(ChunkRuleTest, MidpointOfTheUnifiedRule) {
  // raw = 1088.
  EXPECT_EQ(1024, chunkOf(named("unified"), 0.5 * std::log(256)));
}

TEST(ChunkRuleTest, BoundsThatAreNoPowersOfTwo) {
  Expected<ChunkRule> rule = ChunkRule::powerOfTwo(100, 3000, 1);
  ASSERT_TRUE(rule) << rule.status().toString();
  EXPECT_EQ(100, chunkOf(*rule, -1));
  // log2 100 = 6.64 rounds to 7.
  EXPECT_EQ(128, chunkOf(*rule, 0));
  EXPECT_EQ(128, chunkOf(*rule, (181 - 100) / 2900.0));
  EXPECT_EQ(256, chunkOf(*rule, (182 - 100) / 2900.0));
  EXPECT_EQ(2048, chunkOf(*rule, (2890 - 100) / 2900.0));
  // 4096 is cut to the largest.
  EXPECT_EQ(3000, chunkOf(*rule, (2900 - 100) / 2900.0));
  EXPECT_EQ(3000, chunkOf(*rule, 1));
  // 64 is raised to the least.
  rule = ChunkRule::powerOfTwo(80, 90, 1);
  ASSERT_TRUE(rule);
  EXPECT_EQ(80, chunkOf(*rule, 0));
  EXPECT_EQ(80, chunkOf(*rule, 0.9));
  // 90 is just below 64 sqrt 2.
  EXPECT_EQ(80, chunkOf(*rule, 1));
  rule = ChunkRule::powerOfTwo(91, 100, 1);
  ASSERT_TRUE(rule);
  EXPECT_EQ(100, chunkOf(*rule, 0));
  rule = ChunkRule::powerOfTwo(7, 7);
  ASSERT_TRUE(rule);
  EXPECT_EQ(7, chunkOf(*rule, 2));
  rule = ChunkRule::powerOfTwo(1, int64_t(1) << 40, 1);
  ASSERT_TRUE(rule);
  EXPECT_EQ(1, chunkOf(*rule, -100));
  EXPECT_EQ(1, chunkOf(*rule, 0));
  EXPECT_EQ(int64_t(1) << 40, chunkOf(*rule, 1));
  EXPECT_EQ(int64_t(1) << 39, chunkOf(*rule, 0.5));
  EXPECT_EQ("explicit", rule->name());
}

TEST(ChunkRuleTest, RulesThatMakeNoSense) {
  struct Case {
    int64_t least, most;
    double reference;
    const char *message;
  };
  const Case bad[] = {
      {0, 64, 0,
       "expected the least chunk of a rule to be from 1 to 2^40, got 0"},
      {-5, 64, 0,
       "expected the least chunk of a rule to be from 1 to 2^40, got -5"},
      {(int64_t(1) << 40) + 1, INT64_MAX, 0,
       "expected the least chunk of a rule to be from 1 to 2^40, got "
       "1099511627777"},
      {64, 63, 0,
       "expected the largest chunk of a rule to be from 64 to 2^40, got 63"},
      {64, (int64_t(1) << 40) + 1, 0,
       "expected the largest chunk of a rule to be from 64 to 2^40, got "
       "1099511627777"},
      {32, 64, -1,
       "expected the reference entropy of a rule to be finite and at least 0, "
       "got -1.000000"},
      {32, 64, NotANumber,
       "expected the reference entropy of a rule to be finite and at least 0, "
       "got nan"},
      {32, 64, Inf,
       "expected the reference entropy of a rule to be finite and at least 0, "
       "got inf"}};
  for (const Case &c : bad) {
    Expected<ChunkRule> rule =
        ChunkRule::powerOfTwo(c.least, c.most, c.reference);
    ASSERT_FALSE(rule);
    EXPECT_EQ(StatusCode::InvalidArgument, rule.status().code());
    EXPECT_EQ(c.message, rule.status().message());
  }
  Expected<ChunkRule> rule = ChunkRule::named("Legacy");
  ASSERT_FALSE(rule);
  EXPECT_EQ(StatusCode::NotFound, rule.status().code());
  EXPECT_EQ("expected a chunk rule of legacy, calibrated, routed, confirm, "
            "unified, tile32, coarse, profile, got 'Legacy'",
            rule.status().message());
  EXPECT_FALSE(ChunkRule::named(""));
  EXPECT_FALSE(ChunkRule::named("explicit"));
  EXPECT_EQ(8u, ChunkRule::names().size());
  for (const std::string &name : ChunkRule::names())
    EXPECT_EQ(name, named(name).name());
}

//===----------------------------------------------------------------------===//
// The other rules
//===----------------------------------------------------------------------===//

TEST(ChunkRuleTest, TilesAreOfBits) {
  // The same number of nats is 1.44 times as many bits.
  EXPECT_EQ(288, tile32(Bits(4.02)));
  EXPECT_EQ(288, tile32(Bits(4.18)));
  EXPECT_EQ(352, tile32(Bits(5.17)));
  EXPECT_EQ(384, tile32(Bits(5.519)));
  EXPECT_EQ(384, tile32(Nats(4.02)));
  EXPECT_EQ(288, tile32(Nats(4.02 * std::log(2))));
  EXPECT_EQ(288, chunkOf(named("tile32"), 4.02 * std::log(2)));
  EXPECT_EQ(384, chunkOf(named("tile32"), 4.02));
  // 288 between 3.714 and 4.286 bits, 352 between 4.857 and 5.429.
  EXPECT_EQ(256, tile32(Bits(26.0 / 7 - 1e-9)));
  EXPECT_EQ(288, tile32(Bits(26.0 / 7 + 1e-9)));
  EXPECT_EQ(288, tile32(Bits(30.0 / 7 - 1e-9)));
  EXPECT_EQ(320, tile32(Bits(30.0 / 7 + 1e-9)));
  EXPECT_EQ(320, tile32(Bits(34.0 / 7 - 1e-9)));
  EXPECT_EQ(352, tile32(Bits(34.0 / 7 + 1e-9)));
  EXPECT_EQ(352, tile32(Bits(38.0 / 7 - 1e-9)));
  EXPECT_EQ(384, tile32(Bits(38.0 / 7 + 1e-9)));
  EXPECT_EQ(64, tile32(Bits(0)));
  EXPECT_EQ(64, tile32(Bits(-10)));
  EXPECT_EQ(512, tile32(Bits(8)));
  EXPECT_EQ(512, tile32(Bits(1000)));
}

TEST(ChunkRuleTest, TilesAtHalves) {
  // (64 + 448 k / 28) / 32 = 2 + k / 2, a tie for odd k: to the even number.
  for (int k = 0; k <= 28; ++k) {
    double ratio = k / 28.0, units = (64 + 448 * ratio) / 32;
    if (units != 2 + 0.5 * k)
      continue;
    int64_t whole = 2 + k / 2;
    int64_t expected = k % 2 == 0 ? whole : whole % 2 == 0 ? whole : whole + 1;
    EXPECT_EQ(32 * expected, tile32FromNormalized(ratio)) << k;
  }
  EXPECT_EQ(64, tile32FromNormalized(1 / 28.0));
  EXPECT_EQ(128, tile32FromNormalized(3 / 28.0));
  EXPECT_EQ(64, tile32FromNormalized(-1));
  EXPECT_EQ(512, tile32FromNormalized(2));
  EXPECT_EQ(288, tile32FromNormalized(0.5));
}

TEST(ChunkRuleTest, CoarseBuckets) {
  ChunkRule rule = named("coarse");
  for (double bits = -1; bits < 9; bits += 0.003) {
    int64_t tile = tile32(Bits(bits)), best = 0;
    for (int64_t bucket : {512, 256, 128, 64, 32}) {
      int64_t distance = std::abs(tile - bucket);
      // From above: ties go down.
      if (best == 0 || distance <= std::abs(tile - best))
        best = bucket;
    }
    ASSERT_EQ(best, chunkOf(rule, bits * std::log(2))) << bits;
  }
  EXPECT_EQ(256, chunkOf(rule, 4.02 * std::log(2)));
  // 96 lies between 64 and 128, 192 between 128 and 256, 384 between 256 and
  // 512. A tile of t has 8 (t - 64) / 448 bits.
  EXPECT_EQ(64, chunkOf(rule, 8 * 32 / 448.0 * std::log(2)));
  EXPECT_EQ(128, chunkOf(rule, 8 * 128 / 448.0 * std::log(2)));
  EXPECT_EQ(256, chunkOf(rule, 8 * 320 / 448.0 * std::log(2)));
  EXPECT_EQ(512, chunkOf(rule, 8 * 352 / 448.0 * std::log(2)));
}

TEST(ChunkRuleTest, Profile) {
  ChunkRule rule = named("profile");
  for (int64_t bins : {64, 256})
    for (double h = -0.1; h < 1.1; h += 0.0007) {
      double entropy = h * std::log(static_cast<double>(bins)),
             clamped = std::min(
                 std::max(entropy / std::log(static_cast<double>(bins)), 0.0),
                 1.0);
      int64_t c = 32;
      // 32 + trunc(480 h) by counting.
      while (c < 512 && static_cast<double>(c + 1 - 32) <= 480 * clamped)
        ++c;
      ASSERT_EQ((c + 15) / 32 * 32, chunkOf(rule, entropy, bins)) << h;
    }
  EXPECT_EQ(32, chunkOf(rule, 0, 64));
  EXPECT_EQ(512, chunkOf(rule, std::log(64), 64));
  EXPECT_EQ(512, chunkOf(rule, 50, 64));
  EXPECT_EQ(32, chunkOf(rule, -2, 64));
  // c = 48 is still 32; 49 is 64.
  EXPECT_EQ(32, chunkOf(rule, 16.5 / 480 * std::log(64), 64));
  EXPECT_EQ(64, chunkOf(rule, 17.5 / 480 * std::log(64), 64));
  EXPECT_EQ(32, chunkOf(rule, 0, 1));
}
