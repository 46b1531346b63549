//===- SimulatorTest.cpp - Tests of policies over traces ------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Scheduler/Simulator.h"

#include "gtest/gtest.h"

#include <cmath>
#include <map>
#include <set>

using namespace corey;
using namespace corey::scheduler;

namespace {
TraceOptions quick(int perRegime = 2, int longCalls = 0) {
  TraceOptions options;
  options.perRegime = perRegime;
  options.longCalls = longCalls;
  options.longLength = 4096;
  return options;
}

std::shared_ptr<const Policy> policy(const std::string &spec) {
  auto parsed = parsePolicy(spec);
  EXPECT_TRUE(parsed) << parsed.status().toString();
  return *parsed;
}

SiteInfo smallSite() {
  SiteInfo info;
  info.name = "scan";
  info.problem.channels = 4;
  info.problem.states = 4;
  return info;
}

/// A prompt of `length` different tokens.
TracePrompt prompt(const std::string &regime, size_t length) {
  TracePrompt result{regime, {}};
  for (size_t i = 0; i < length; ++i)
    result.tokens.push_back(static_cast<uint32_t>(i * 2654435761u));
  return result;
}

/// Best at a chunk of 64: |log2(chunk / 64)| + 1 milliseconds.
double valley(const Problem &problem, const Candidate &candidate) {
  auto chunk =
      static_cast<double>(candidate.chunk ? candidate.chunk : problem.length);
  return 1 + std::fabs(std::log2(chunk / 64));
}

SimulatorOptions fast() {
  SimulatorOptions options;
  options.rounds = 5;
  return options;
}
} // namespace

TEST(TraceTest, RegimesAndLengths) {
  TraceOptions options = quick(20, 3);
  std::vector<TracePrompt> trace = makeTrace(options);
  std::map<std::string, std::vector<size_t>> lengths;
  for (const TracePrompt &p : trace)
    lengths[p.regime].push_back(p.tokens.size());
  ASSERT_EQ(9u, lengths.size());
  EXPECT_EQ(3u, lengths["long"].size());
  for (size_t length : lengths["long"])
    EXPECT_EQ(4096u, length);
  for (const auto &[regime, list] : lengths) {
    if (regime != "long")
      EXPECT_EQ(20u, list.size()) << regime;
    for (size_t length : list) {
      EXPECT_GE(length, regime == "short_chat" ? 15u : 500u) << regime;
      EXPECT_LE(length, regime == "short_chat" ? 40u : 6000u) << regime;
      if (regime == "long_doc_qa") {
        EXPECT_GE(length, 900u);
        EXPECT_LE(length, 2000u);
      }
    }
  }
  double mean = 0;
  for (size_t length : lengths["short_chat"])
    mean += static_cast<double>(length) / 20;
  EXPECT_NEAR(25, mean, 6);
  // In a random order: neighbours differ most of the time.
  int changes = 0;
  for (size_t i = 1; i < trace.size(); ++i)
    changes += trace[i].regime != trace[i - 1].regime;
  EXPECT_GT(changes, 100);
}

TEST(TraceTest, Deterministic) {
  auto same = [](const std::vector<TracePrompt> &a,
                 const std::vector<TracePrompt> &b) {
    if (a.size() != b.size())
      return false;
    for (size_t i = 0; i < a.size(); ++i)
      if (a[i].regime != b[i].regime || a[i].tokens != b[i].tokens)
        return false;
    return true;
  };
  TraceOptions options = quick(2, 1), other = options;
  other.seed = 99;
  EXPECT_TRUE(same(makeTrace(options), makeTrace(options)));
  EXPECT_FALSE(same(makeTrace(options), makeTrace(other)));
  EXPECT_EQ(17u, makeTrace(options).size());
  // Prompts of a regime differ from each other.
  std::set<std::vector<uint32_t>> texts;
  for (const TracePrompt &p : makeTrace(options))
    texts.insert(p.tokens);
  EXPECT_GE(texts.size(), 16u);
  TraceOptions none = quick(0, 5);
  none.longLength = 0;
  EXPECT_TRUE(makeTrace(none).empty());
}

TEST(TraceTest, VarietyOfTokens) {
  // Logs of random digits have many different tokens, one sentence over and
  // over has few.
  std::map<std::string, double> share;
  for (const TracePrompt &p : makeTrace(quick())) {
    std::set<uint32_t> distinct(p.tokens.begin(), p.tokens.end());
    share[p.regime] = static_cast<double>(distinct.size()) /
                      static_cast<double>(p.tokens.size());
  }
  EXPECT_LT(share["repetition_policy"], 0.05);
  EXPECT_GT(share["logs_uuid"], 0.15);
}

TEST(TraceTest, Activations) {
  std::vector<TracePrompt> trace = makeTrace(quick(1));
  for (const TracePrompt &p : trace) {
    std::vector<float> x = traceActivation(p, 3), y = traceActivation(p, 3),
                       z = traceActivation(p, 3, 8);
    ASSERT_EQ(3 * p.tokens.size(), x.size());
    EXPECT_EQ(x, y);
    EXPECT_NE(x, z);
    for (float v : x) {
      ASSERT_TRUE(std::isfinite(v));
      // SiLU's minimum.
      ASSERT_GE(v, -0.2785f);
    }
  }
  // Causal, of width 4: what comes later changes nothing, and equal windows
  // give equal rows.
  TracePrompt a = prompt("x", 20), b = a;
  b.tokens[10] = 12345;
  std::vector<float> x = traceActivation(a, 5), y = traceActivation(b, 5);
  for (size_t t = 0; t < 20; ++t) {
    bool equal = true;
    for (size_t d = 0; d < 5; ++d)
      equal &= x[t * 5 + d] == y[t * 5 + d];
    EXPECT_EQ(t < 10 || t > 13, equal) << t;
  }
  EXPECT_TRUE(traceActivation(TracePrompt(), 5).empty());
}

TEST(SimulatorTest, GapsByHand) {
  // Two shapes: 100 tokens (whole: 1 + log2(100 / 64)) and 1024.
  std::vector<TracePrompt> trace = {prompt("a", 100), prompt("b", 1024),
                                    prompt("b", 1024), prompt("a", 100)};
  auto report = simulate(
      smallSite(), trace,
      {policy("static:64"), policy("static:256"), policy("unsplit")},
      [](const Problem &p, const Candidate &c) -> Expected<double> {
        EXPECT_EQ(1, p.batch);
        EXPECT_EQ(4, p.channels);
        EXPECT_TRUE(p.length == 100 || p.length == 1024);
        EXPECT_LT(c.chunk, p.length);
        EXPECT_EQ(0, c.variant);
        return valley(p, c);
      },
      fast());
  ASSERT_TRUE(report) << report.status().toString();
  EXPECT_EQ(4, report->calls);
  EXPECT_EQ(2, report->shapes);
  EXPECT_DOUBLE_EQ(1, report->oracleMeanMs);
  ASSERT_EQ(3u, report->policies.size());
  const PolicyReport &best = report->policies[0];
  EXPECT_EQ("static:64", best.policy);
  EXPECT_DOUBLE_EQ(1, best.meanMs);
  EXPECT_NEAR(0, best.gapToOracle, 1e-12);
  EXPECT_EQ(0, best.switches);
  EXPECT_EQ(0, best.usedData);
  EXPECT_EQ(0, best.statisticsMs);
  EXPECT_GT(best.decisionNs, 0);
  // 256 of 100 tokens is the whole.
  double whole = 1 + std::log2(100 / 64.0);
  const PolicyReport &fixed = report->policies[1];
  EXPECT_DOUBLE_EQ((whole + 3) / 2, fixed.meanMs);
  EXPECT_DOUBLE_EQ((whole + 3) / 2 - 1, fixed.gapToOracle);
  // Whole (100), 256, 256, whole.
  EXPECT_EQ(2, fixed.switches);
  ASSERT_EQ(2u, fixed.regimes.size());
  EXPECT_EQ("a", fixed.regimes[0].regime);
  EXPECT_EQ(2, fixed.regimes[0].calls);
  EXPECT_DOUBLE_EQ(whole, fixed.regimes[0].meanMs);
  EXPECT_DOUBLE_EQ(whole - 1, fixed.regimes[0].gapToOracle);
  EXPECT_EQ("b", fixed.regimes[1].regime);
  EXPECT_DOUBLE_EQ(3, fixed.regimes[1].meanMs);
  EXPECT_DOUBLE_EQ(2, fixed.regimes[1].gapToOracle);
  EXPECT_DOUBLE_EQ((whole + 5) / 2, report->policies[2].meanMs);
}

TEST(SimulatorTest, NobodyBeatsTheOracle) {
  std::vector<TracePrompt> trace = makeTrace(quick(2, 1));
  // Times of a hash of shape and chunk: no rule knows them.
  auto measure = [](const Problem &p, const Candidate &c) -> Expected<double> {
    uint64_t z = static_cast<uint64_t>(p.length) * 0x9e3779b97f4a7c15 +
                 static_cast<uint64_t>(c.chunk) * 0xd1342543de82ef95;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z ^= z >> 27;
    return 1 + static_cast<double>(z % 1000) / 1000;
  };
  std::vector<std::shared_ptr<const Policy>> policies;
  for (const char *spec :
       {"unsplit", "static:64", "static:100", "entropy", "sampled", "token",
        "midpoint", "random", "cheap", "variance", "kurtosis", "guarded",
        "table", "cost-model", "measured"})
    policies.push_back(policy(spec));
  auto report = simulate(smallSite(), trace, policies, measure, fast());
  ASSERT_TRUE(report) << report.status().toString();
  EXPECT_EQ(17, report->calls);
  for (const PolicyReport &p : report->policies) {
    EXPECT_GE(p.gapToOracle, -1e-12) << p.policy;
    EXPECT_NEAR(p.meanMs / report->oracleMeanMs - 1, p.gapToOracle, 1e-12);
    EXPECT_EQ(9u, p.regimes.size());
    int64_t calls = 0;
    double sum = 0;
    for (const RegimeReport &regime : p.regimes) {
      calls += regime.calls;
      sum += regime.meanMs * static_cast<double>(regime.calls);
      EXPECT_GE(regime.gapToOracle, -1e-12);
    }
    EXPECT_EQ(17, calls);
    EXPECT_NEAR(p.meanMs, sum / 17, 1e-12);
    bool wantsData = policy(p.policy)->statistics().has_value();
    EXPECT_EQ(wantsData, p.statisticsMs > 0) << p.policy;
    if (!wantsData)
      EXPECT_EQ(0, p.usedData) << p.policy;
    // All calls but the first, and none that is too short.
    EXPECT_LE(p.usedData, 16) << p.policy;
    if (p.policy == "entropy")
      EXPECT_EQ(16, p.usedData);
  }
}

/// The oracle gains nothing from noise: it chooses by half of the rounds.
TEST(SimulatorTest, NoiseIsNobodysGain) {
  uint64_t state = 3;
  auto measure = [&](const Problem &, const Candidate &) -> Expected<double> {
    state = state * 6364136223846793005 + 1442695040888963407;
    return 1 + 0.5 * static_cast<double>(state >> 40) / (1 << 24);
  };
  SimulatorOptions options;
  options.rounds = 5;
  std::vector<TracePrompt> trace;
  for (size_t length = 100; length < 400; length += 5)
    trace.push_back(prompt("a", length));
  auto report =
      simulate(smallSite(), trace, {policy("static:32")}, measure, options);
  ASSERT_TRUE(report);
  // The same distribution for all chunks: the gap is around zero. An oracle of
  // the rounds that are reported would gain some 10 %.
  EXPECT_NEAR(0, report->policies[0].gapToOracle, 0.04);
  EXPECT_NEAR(1.25, report->oracleMeanMs, 0.05);
}

TEST(SimulatorTest, StatisticsOfACallAreForTheNext) {
  // One token over and over has an entropy far below that of many.
  TracePrompt dull{"dull", std::vector<uint32_t>(3000, 7)},
      rich = prompt("rich", 3000);
  SiteInfo info = smallSite();
  info.problem.channels = 16;
  auto entropyOf = [&](const TracePrompt &p) {
    Expected<Estimator> estimator = Estimator::create();
    std::vector<float> x = traceActivation(p, 16);
    return estimator
        ->estimate(
            TensorView::contiguous(x.data(), ElementType::F32, {1, 3000, 16}))
        ->entropy.value();
  };
  double low = entropyOf(dull), high = entropyOf(rich);
  ASSERT_LT(low + 0.5, high);
  // 2048 for the rich, 16 for the dull: the reference lies between.
  std::string spec =
      "entropy:c_min=16,c_max=2048,h_ref=" + std::to_string(high);
  int64_t chunks[2];
  for (int i = 0; i < 2; ++i) {
    Site site(info, policy(spec));
    Statistics s;
    s.validity = Validity::Ok;
    s.entropy = Nats(i ? high : low);
    site.publish(s, 0);
    chunks[i] = site.decide(1, 3000).chunk;
  }
  ASSERT_NE(chunks[0], chunks[1]);
  // Times tell the chunks apart: whole 1, the dull one 10, the rich one 100.
  auto measure = [&](const Problem &, const Candidate &c) -> Expected<double> {
    return c.chunk == 0           ? 1.0
           : c.chunk == chunks[0] ? 10.0
           : c.chunk == chunks[1] ? 100.0
                                  : 1000.0;
  };
  auto report =
      simulate(info, {dull, rich, rich, dull}, {policy(spec)}, measure, fast());
  ASSERT_TRUE(report) << report.status().toString();
  const PolicyReport &p = report->policies[0];
  // None, of the dull, of the rich, of the rich.
  EXPECT_DOUBLE_EQ((1 + 10 + 100 + 100) / 4.0, p.meanMs);
  EXPECT_DOUBLE_EQ(1, report->oracleMeanMs);
  EXPECT_EQ(3, p.usedData);
  EXPECT_EQ(2, p.switches);
  ASSERT_EQ(2u, p.regimes.size());
  EXPECT_DOUBLE_EQ((1 + 100) / 2.0, p.regimes[0].meanMs);
  EXPECT_DOUBLE_EQ((10 + 100) / 2.0, p.regimes[1].meanMs);
}

TEST(SimulatorTest, VariantsAreTheOraclesToo) {
  SiteInfo info = smallSite();
  info.variants = {Variant(), Variant()};
  info.variants[1].name = "wide";
  info.variants[1].granularity = 48;
  std::set<std::pair<int, int64_t>> seen;
  auto report = simulate(
      info, {prompt("a", 500)}, {policy("static:50")},
      [&](const Problem &, const Candidate &c) -> Expected<double> {
        seen.insert({c.variant, c.chunk});
        if (c.variant == 1)
          EXPECT_EQ(0, c.chunk % 48);
        return c.variant == 1 && c.chunk == 96 ? 1 : 2;
      },
      fast());
  ASSERT_TRUE(report) << report.status().toString();
  EXPECT_EQ(1u, seen.count({0, 50}));
  EXPECT_EQ(1u, seen.count({1, 0}));
  if (seen.count({1, 96})) {
    EXPECT_EQ(1, report->oracleMeanMs);
    EXPECT_EQ(1, report->policies[0].gapToOracle);
  }
}

TEST(SimulatorTest, Errors) {
  auto one = [](const Problem &, const Candidate &) -> Expected<double> {
    return 1.0;
  };
  std::vector<TracePrompt> trace = {prompt("a", 50)};
  auto message = [](Expected<SimulationReport> report,
                    StatusCode code = StatusCode::InvalidArgument) {
    EXPECT_FALSE(report);
    EXPECT_EQ(code, report.status().code());
    return report.status().message();
  };
  EXPECT_EQ("expected a trace of calls, got none",
            message(simulate(smallSite(), {}, {policy("unsplit")}, one)));
  EXPECT_EQ("expected policies, got none",
            message(simulate(smallSite(), trace, {}, one)));
  SimulatorOptions options;
  options.rounds = 3;
  EXPECT_EQ(
      "expected at least 4 rounds, got 3",
      message(simulate(smallSite(), trace, {policy("unsplit")}, one, options)));
  int runs = 0;
  EXPECT_EQ("out of luck",
            message(simulate(smallSite(), trace, {policy("unsplit")},
                             [&](const Problem &,
                                 const Candidate &) -> Expected<double> {
                               if (++runs == 5)
                                 return Status::unsupported("out of luck");
                               return 1.0;
                             }),
                    StatusCode::Unsupported));
  EXPECT_EQ(5, runs);
  for (double bad : {0.0, -1.0, double(NAN), double(INFINITY)})
    EXPECT_NE(std::string::npos,
              message(simulate(smallSite(), trace, {policy("unsplit")},
                               [&](const Problem &, const Candidate &)
                                   -> Expected<double> { return bad; }))
                  .find("expected a measured time above 0, got "));
  // Data cannot be made up for channels that are not known.
  SiteInfo unknown = smallSite();
  unknown.problem.channels = -1;
  EXPECT_EQ("expected the channels of the site to be known, got -1",
            message(simulate(unknown, trace, {policy("entropy")}, one)));
  EXPECT_TRUE(simulate(unknown, trace, {policy("static:3")}, one, fast()));
}

TEST(SimulatorTest, BudgetEndsTheRounds) {
  SimulatorOptions options;
  options.rounds = 1000000;
  options.minRounds = 4;
  options.budgetMsPerShape = 0;
  int runs = 0;
  auto report = simulate(
      smallSite(), {prompt("a", 20)}, {policy("static:3")},
      [&](const Problem &, const Candidate &) -> Expected<double> {
        ++runs;
        return 1.0;
      },
      options);
  ASSERT_TRUE(report);
  // One that warms up and four of 3, 8, 16 and the whole.
  EXPECT_EQ(5 * 4, runs);
}
