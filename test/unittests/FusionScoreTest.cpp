//===- FusionScoreTest.cpp - Scores and partitions of chains --------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Analysis/FusionScore.h"
#include <algorithm>
#include <fstream>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

using namespace corey;
using Partition = std::vector<FusionRegion>;

namespace {

//===----------------------------------------------------------------------===//
// The same, written down once more
//===----------------------------------------------------------------------===//

double naiveScale(const std::vector<double> &singles, double value) {
  if (singles.empty())
    return 0.5;
  double low = *std::min_element(singles.begin(), singles.end());
  double high = *std::max_element(singles.begin(), singles.end());
  if (high <= low)
    return 0.5;
  return std::min(1.0, std::max(0.0, (value - low) / (high - low)));
}

double naiveScore(const std::vector<FusionFeatures> &chain,
                  const FusionWeights &w, FusionRegion region) {
  std::vector<double> h, ai, m;
  for (const FusionFeatures &op : chain) {
    if (!std::isnan(op.entropy))
      h.push_back(op.entropy);
    ai.push_back(op.intensity);
    m.push_back(op.memory);
  }
  double sumH = 0, known = 0, sumAI = 0, sumM = 0;
  for (size_t i = region.begin; i < region.end; ++i) {
    if (!std::isnan(chain[i].entropy)) {
      sumH += chain[i].entropy;
      known += 1;
    }
    sumAI += chain[i].intensity;
    sumM += chain[i].memory;
  }
  double n = double(region.size());
  double termH = known ? naiveScale(h, sumH / known) : 0.5;
  return w.alpha * termH + w.beta * naiveScale(ai, sumAI / std::sqrt(n)) -
         w.gamma * naiveScale(m, sumM / std::pow(n, 1.15)) +
         (w.depthBonus ? std::min(0.18 * (n - 1), 0.36) : 0);
}

bool naiveFeasible(const std::vector<FusionFeatures> &chain,
                   const FusionLimits &limits, FusionRegion region) {
  double registers = 0, shared = 0, occupancy = INFINITY;
  for (size_t i = region.begin; i < region.end; ++i) {
    registers += chain[i].registers;
    shared += chain[i].shared;
    occupancy = std::min(occupancy, chain[i].occupancy);
  }
  return registers <= limits.registers && shared <= limits.shared &&
         occupancy >= limits.minOccupancy;
}

/// Calls `visit` with every partition of n operators.
template <typename Visit> void forEveryPartition(size_t n, Visit visit) {
  for (uint64_t cuts = 0; cuts < uint64_t(1) << (n - 1); ++cuts) {
    Partition partition;
    size_t begin = 0;
    for (size_t i = 1; i <= n; ++i)
      if (i == n || (cuts >> (i - 1) & 1)) {
        partition.push_back({begin, i});
        begin = i;
      }
    visit(partition);
  }
}

std::vector<FusionFeatures> randomChain(size_t n, uint64_t seed,
                                        double unknown = 0) {
  std::mt19937_64 engine(seed);
  std::uniform_real_distribution<double> u(0, 1);
  std::vector<FusionFeatures> chain(n);
  for (FusionFeatures &op : chain) {
    op.entropy = u(engine) < unknown ? NAN : 5 * u(engine);
    op.intensity = 10 * u(engine);
    op.memory = 80 * u(engine);
    op.registers = double(engine() % 60);
    op.shared = double(engine() % 30);
    op.occupancy = 0.7 + 0.3 * u(engine);
  }
  return chain;
}

std::vector<size_t> sizes(const Partition &partition) {
  std::vector<size_t> list;
  for (FusionRegion region : partition)
    list.push_back(region.size());
  return list;
}

void expectCovers(const Partition &partition, size_t n) {
  size_t at = 0;
  for (FusionRegion region : partition) {
    EXPECT_EQ(region.begin, at);
    EXPECT_GT(region.end, region.begin);
    at = region.end;
  }
  EXPECT_EQ(at, n);
}

constexpr FusionStrategy kAll[] = {FusionStrategy::None, FusionStrategy::Static,
                                   FusionStrategy::Arithmetic,
                                   FusionStrategy::Entropy, FusionStrategy::Dp};

//===----------------------------------------------------------------------===//
// Scores
//===----------------------------------------------------------------------===//

TEST(FusionScore, TermsAgreeWithTheFormula) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    std::vector<FusionFeatures> chain =
        randomChain(1 + seed % 12, seed, seed % 4 * 0.3);
    FusionWeights weights;
    weights.depthBonus = seed % 2;
    FusionScorer scorer(chain, weights, {120, 60, 0.75});
    for (size_t begin = 0; begin < chain.size(); ++begin)
      for (size_t end = begin + 1; end <= chain.size(); ++end) {
        FusionTerms terms = scorer.terms({begin, end});
        EXPECT_NEAR(terms.score, naiveScore(chain, weights, {begin, end}),
                    1e-14);
        EXPECT_NEAR(terms.score,
                    0.45 * terms.entropy + 0.35 * terms.intensity -
                        0.20 * terms.memory + terms.bonus,
                    1e-14);
        EXPECT_EQ(scorer.feasible(terms),
                  naiveFeasible(chain, scorer.limits(), {begin, end}));
      }
  }
}

TEST(FusionScore, EqualOperatorsAreHalfway) {
  FusionFeatures op;
  op.entropy = 3;
  op.intensity = 2;
  op.memory = 7;
  FusionScorer scorer({op, op, op, op});
  FusionTerms one = scorer.terms({0, 1}), all = scorer.terms({0, 4});
  EXPECT_EQ(one.entropy, 0.5);
  EXPECT_EQ(one.intensity, 0.5);
  EXPECT_EQ(one.memory, 0.5);
  EXPECT_DOUBLE_EQ(one.score, 0.3);
  EXPECT_DOUBLE_EQ(all.score, 0.66);
  EXPECT_DOUBLE_EQ(scorer.terms({1, 3}).bonus, 0.18);
}

TEST(FusionScore, UnknownEntropiesAreLeftOut) {
  std::vector<FusionFeatures> chain(4);
  for (size_t i = 0; i < 4; ++i)
    chain[i].intensity = double(i);
  // Known to no operator.
  EXPECT_EQ(FusionScorer(chain).terms({0, 4}).entropy, 0.5);
  chain[0].entropy = 1;
  chain[3].entropy = 5;
  FusionScorer scorer(chain);
  EXPECT_EQ(scorer.terms({0, 2}).entropy, 0);
  EXPECT_EQ(scorer.terms({1, 3}).entropy, 0.5);
  EXPECT_EQ(scorer.terms({2, 4}).entropy, 1);
  EXPECT_EQ(scorer.terms({0, 4}).entropy, 0.5);
  // Infinities are no entropies either.
  chain[1].entropy = INFINITY;
  chain[2].entropy = -INFINITY;
  EXPECT_EQ(FusionScorer(chain).terms({1, 4}).entropy, 1);
}

TEST(FusionScore, EmptyRegionsScoreNothing) {
  FusionScorer scorer(randomChain(3, 1));
  EXPECT_EQ(scorer.terms({1, 1}).score, 0);
  EXPECT_EQ(scorer.terms({2, 1}).score, 0);
  EXPECT_EQ(scorer.terms({2, 4}).score, 0);
}

TEST(FusionScore, Names) {
  for (FusionStrategy strategy : kAll) {
    FusionStrategy parsed = FusionStrategy::None;
    EXPECT_TRUE(parseFusionStrategy(fusionStrategyName(strategy), parsed));
    EXPECT_EQ(parsed, strategy);
  }
  FusionStrategy untouched = FusionStrategy::Dp;
  EXPECT_FALSE(parseFusionStrategy("greedy", untouched));
  EXPECT_FALSE(parseFusionStrategy("", untouched));
  EXPECT_EQ(untouched, FusionStrategy::Dp);
}

//===----------------------------------------------------------------------===//
// Partitions
//===----------------------------------------------------------------------===//

TEST(FusionPartition, EmptyAndSingle) {
  for (FusionStrategy strategy : kAll) {
    std::vector<FusionCandidate> considered;
    FusionScorer none({});
    EXPECT_TRUE(none.partition(strategy, nullptr, &considered).empty());
    // Alone, an operator needs neither a score nor room.
    FusionFeatures large;
    large.registers = 1000;
    FusionScorer one({large}, {}, {1, 1, 0.5});
    EXPECT_EQ(one.partition(strategy, nullptr, &considered),
              (Partition{{0, 1}}));
    EXPECT_TRUE(considered.empty());
  }
  auto cost = [](FusionRegion) { return 1.0; };
  EXPECT_TRUE(FusionScorer({}).cheapest(cost).empty());
  EXPECT_EQ(FusionScorer(randomChain(1, 1)).cheapest(cost),
            (Partition{{0, 1}}));
}

TEST(FusionPartition, StaticIsTrimmedAtTheTail) {
  std::vector<FusionFeatures> chain(8);
  for (FusionFeatures &op : chain)
    op.shared = 1;
  EXPECT_EQ(
      sizes(
          FusionScorer(chain, {}, {1, 3, 0}).partition(FusionStrategy::Static)),
      (std::vector<size_t>{3, 3, 2}));
  chain[2].shared = 2;
  chain[3].shared = 9;
  EXPECT_EQ(
      sizes(
          FusionScorer(chain, {}, {1, 3, 0}).partition(FusionStrategy::Static)),
      (std::vector<size_t>{2, 1, 1, 3, 1}));
  std::vector<FusionCandidate> considered;
  FusionScorer(chain, {}, {1, 3, 0})
      .partition(
          FusionStrategy::Static,
          [](FusionRegion region) { return region.size() < 3; }, &considered);
  ASSERT_FALSE(considered.empty());
  EXPECT_EQ(considered[0].region, (FusionRegion{0, 3}));
  EXPECT_FALSE(considered[0].legal);
  EXPECT_FALSE(considered[0].feasible);
  EXPECT_FALSE(considered[0].accepted);
  EXPECT_EQ(considered[1].region, (FusionRegion{0, 2}));
  EXPECT_TRUE(considered[1].accepted);
}

TEST(FusionPartition, GreedyAgreesWithItsDescription) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::vector<FusionFeatures> chain =
        randomChain(1 + seed % 20, seed, seed % 3 * 0.3);
    FusionWeights weights;
    weights.tau = 0.3 + 0.02 * double(seed % 20);
    FusionLimits limits{150, 80, seed % 2 ? 0.72 : 0};
    FusionScorer scorer(chain, weights, limits);
    auto legal = [&](FusionRegion region) {
      return seed % 5 || (region.begin * 7 + region.end * 3) % 4;
    };
    for (bool entropy : {true, false}) {
      FusionWeights used = weights;
      if (!entropy)
        used.alpha = 0;
      Partition expected;
      FusionRegion current{0, 1};
      std::vector<FusionCandidate> considered;
      for (size_t i = 1; i < chain.size(); ++i) {
        FusionRegion grown{current.begin, i + 1};
        if (naiveScore(chain, used, grown) > used.tau &&
            naiveFeasible(chain, limits, grown) && legal(grown)) {
          current = grown;
          continue;
        }
        expected.push_back(current);
        current = {i, i + 1};
      }
      expected.push_back(current);
      EXPECT_EQ(scorer.partition(entropy ? FusionStrategy::Entropy
                                         : FusionStrategy::Arithmetic,
                                 legal, &considered),
                expected);
      ASSERT_EQ(considered.size(), chain.size() - 1);
      for (const FusionCandidate &candidate : considered) {
        EXPECT_NEAR(candidate.terms.score,
                    naiveScore(chain, used, candidate.region), 1e-14);
        EXPECT_EQ(candidate.legal, bool(legal(candidate.region)));
        EXPECT_EQ(candidate.accepted, candidate.legal && candidate.feasible &&
                                          candidate.terms.score > used.tau);
      }
    }
  }
}

TEST(FusionPartition, AScoreOfTauIsNotEnough) {
  FusionFeatures op;
  op.entropy = 1;
  FusionWeights weights;
  weights.tau = FusionScorer({op, op}).terms({0, 2}).score;
  EXPECT_EQ(FusionScorer({op, op}, weights).partition(FusionStrategy::Entropy),
            (Partition{{0, 1}, {1, 2}}));
  EXPECT_EQ(FusionScorer({op, op}, weights).partition(FusionStrategy::Dp),
            (Partition{{0, 1}, {1, 2}}));
  weights.tau = std::nextafter(weights.tau, 0);
  EXPECT_EQ(FusionScorer({op, op}, weights).partition(FusionStrategy::Entropy),
            (Partition{{0, 2}}));
  EXPECT_EQ(FusionScorer({op, op}, weights).partition(FusionStrategy::Dp),
            (Partition{{0, 2}}));
}

TEST(FusionPartition, LimitsMetExactly) {
  // 0.1 + 0.1 + 0.1 is more than 0.3, whoever sums; the limit is that sum.
  FusionFeatures op;
  op.shared = 0.1;
  FusionWeights weights;
  weights.tau = 0.3;
  std::vector<FusionFeatures> chain(9, op);
  FusionScorer scorer(chain, weights, {INFINITY, 0.1 + 0.1 + 0.1, 0});
  EXPECT_EQ(sizes(scorer.partition(FusionStrategy::Entropy)),
            (std::vector<size_t>{3, 3, 3}));
  EXPECT_EQ(sizes(scorer.partition(FusionStrategy::Dp)),
            (std::vector<size_t>{3, 3, 3}));
}

TEST(FusionPartition, DpIsTheBestOfAll) {
  for (uint64_t seed = 0; seed < 80; ++seed) {
    size_t n = 1 + seed % 12;
    std::vector<FusionFeatures> chain = randomChain(n, seed, seed % 3 * 0.3);
    FusionWeights weights;
    weights.tau = 0.25 + 0.02 * double(seed % 20);
    FusionLimits limits{150, 80, seed % 2 ? 0.72 : 0};
    FusionScorer scorer(chain, weights, limits);
    auto legal = [&](FusionRegion region) {
      return seed % 5 || (region.begin * 7 + region.end * 3) % 4;
    };
    auto value = [&](const Partition &partition) {
      double sum = 0;
      for (FusionRegion region : partition)
        sum += double(region.size()) * naiveScore(chain, weights, region);
      return sum;
    };
    auto allowed = [&](const Partition &partition) {
      return std::all_of(
          partition.begin(), partition.end(), [&](FusionRegion region) {
            return region.size() == 1 ||
                   (naiveFeasible(chain, limits, region) && legal(region) &&
                    naiveScore(chain, weights, region) > weights.tau);
          });
    };
    double best = -INFINITY;
    forEveryPartition(n, [&](const Partition &partition) {
      if (allowed(partition))
        best = std::max(best, value(partition));
    });
    std::vector<FusionCandidate> considered;
    Partition found = scorer.partition(FusionStrategy::Dp, legal, &considered);
    expectCovers(found, n);
    EXPECT_TRUE(allowed(found));
    EXPECT_NEAR(value(found), best, 1e-12);
    // What was chosen was considered.
    size_t accepted = 0, fused = 0;
    for (const FusionCandidate &candidate : considered) {
      EXPECT_GT(candidate.terms.score, weights.tau);
      accepted += candidate.accepted;
    }
    for (FusionRegion region : found)
      fused += region.size() > 1;
    EXPECT_EQ(accepted, fused);
  }
}

TEST(FusionPartition, CheapestIsTheBestOfAll) {
  for (uint64_t seed = 0; seed < 80; ++seed) {
    size_t n = 1 + seed % 12;
    std::vector<FusionFeatures> chain = randomChain(n, seed);
    FusionLimits limits{150, 80, 0};
    FusionScorer scorer(chain, {}, limits);
    // Few values, so that there are ties.
    auto cost = [&](FusionRegion region) {
      std::mt19937_64 engine(seed * 1000 + region.begin * 20 + region.end);
      uint64_t draw = engine();
      if (draw % 11 == 0)
        return double(INFINITY);
      return double(draw % (seed % 2 ? 5 : 1000)) * double(region.size());
    };
    auto legal = [&](FusionRegion region) {
      return seed % 3 == 0 || region.size() < 5;
    };
    auto key = [&](const Partition &partition) {
      double unaffordable = 0, sum = 0;
      for (FusionRegion region : partition) {
        double amount = cost(region);
        std::isfinite(amount) ? sum += amount : unaffordable += 1;
      }
      return std::tuple(unaffordable, sum, partition.size());
    };
    auto best = std::tuple(double(INFINITY), 0.0, size_t(0));
    forEveryPartition(n, [&](const Partition &partition) {
      for (FusionRegion region : partition)
        if (region.size() > 1 &&
            (!naiveFeasible(chain, limits, region) || !legal(region) ||
             !std::isfinite(cost(region))))
          return;
      best = std::min(best, key(partition));
    });
    for (bool monotone : {false, true}) {
      Partition found = scorer.cheapest(cost, legal, monotone);
      expectCovers(found, n);
      EXPECT_EQ(key(found), best);
    }
  }
}

TEST(FusionPartition, TiesHaveFewerRegions) {
  FusionScorer scorer(randomChain(6, 1));
  auto cost = [](FusionRegion region) { return double(region.size()); };
  EXPECT_EQ(scorer.cheapest(cost), (Partition{{0, 6}}));
  Partition halves = scorer.cheapest(
      cost, [](FusionRegion region) { return region.size() <= 4; });
  EXPECT_EQ(halves.size(), 2u);
}

TEST(FusionPartition, GrowthStopsEarly) {
  constexpr size_t kOps = 1500, kMost = 6;
  FusionScorer scorer(randomChain(kOps, 3));
  size_t calls = 0, costs = 0;
  Partition found = scorer.cheapest(
      [&](FusionRegion) {
        ++costs;
        return 1.0;
      },
      [&](FusionRegion region) {
        ++calls;
        return region.size() <= kMost;
      },
      /*monotone=*/true);
  EXPECT_EQ(found.size(), kOps / kMost);
  EXPECT_LE(calls, kOps * kMost);
  EXPECT_LE(costs, kOps * kMost);
  // Neither is the other path quadratic where regions are short.
  FusionScorer tight(randomChain(kOps, 3), {}, {200, 100, 0});
  calls = 0;
  tight.cheapest([](FusionRegion) { return 1.0; },
                 [&](FusionRegion) { return ++calls > 0; });
  EXPECT_LE(calls, kOps * 40);
  for (FusionStrategy strategy : kAll)
    expectCovers(scorer.partition(strategy), kOps);
}

TEST(FusionPartition, NegativeResourcesDoNotStopGrowth) {
  // An operator that gives room back: [0, 3) fits although [0, 2) does not.
  std::vector<FusionFeatures> chain(3);
  chain[0].shared = 3;
  chain[1].shared = 3;
  chain[2].shared = -3;
  FusionWeights weights;
  weights.tau = 0.5;
  FusionScorer scorer(chain, weights, {INFINITY, 4, 0});
  EXPECT_EQ(scorer.partition(FusionStrategy::Dp), (Partition{{0, 3}}));
  EXPECT_EQ(scorer.cheapest([](FusionRegion) { return 1.0; }),
            (Partition{{0, 3}}));
}

TEST(FusionDepth, Bound) {
  EXPECT_EQ(fusionDepthBound(96, 28), 3u);
  EXPECT_EQ(fusionDepthBound(84, 28), 3u);
  EXPECT_EQ(fusionDepthBound(83.9, 28), 2u);
  EXPECT_EQ(fusionDepthBound(0, 28), 0u);
  EXPECT_EQ(fusionDepthBound(-1, 28), 0u);
  EXPECT_EQ(fusionDepthBound(NAN, 28), 0u);
  EXPECT_EQ(fusionDepthBound(96, NAN), 0u);
  constexpr size_t kMost = std::numeric_limits<size_t>::max();
  EXPECT_EQ(fusionDepthBound(96, 0), kMost);
  EXPECT_EQ(fusionDepthBound(INFINITY, 28), kMost);
  EXPECT_EQ(fusionDepthBound(1e300, 1e-300), kMost);
  for (double each : {0.1, 0.3, 1.0 / 3, 7.0, 1e-9})
    for (double capacity : {0.3, 0.7, 1.0, 3.0, 49.0}) {
      double count = double(fusionDepthBound(capacity, each));
      EXPECT_LE(count * each, capacity);
      EXPECT_GT((count + 1) * each, capacity);
    }
  // No partition goes beyond it.
  for (double room : {20.0, 64.0, 96.0, 512.0}) {
    FusionFeatures op;
    op.shared = 28;
    FusionScorer scorer(std::vector<FusionFeatures>(64, op), {},
                        {INFINITY, room, 0});
    for (FusionStrategy strategy :
         {FusionStrategy::Entropy, FusionStrategy::Dp})
      for (FusionRegion region : scorer.partition(strategy))
        EXPECT_LE(region.size(),
                  std::max<size_t>(1, fusionDepthBound(room, 28)));
  }
}

//===----------------------------------------------------------------------===//
// Reference cases
//===----------------------------------------------------------------------===//

TEST(FusionReference, GroupsAndScores) {
  std::ifstream file(COREY_TIER1_DATA);
  ASSERT_TRUE(file) << COREY_TIER1_DATA;
  nlohmann::json data = nlohmann::json::parse(file);
  const double registers[] = {20, 36, 72, 54, 48, 24, 18};
  const double shared[] = {8, 12, 28, 22, 18, 8, 6};
  const double occupancy[] = {.94, .91, .79, .83, .87, .96, .97};
  const std::map<std::string, std::pair<FusionStrategy, double>> policies = {
      {"no_fusion", {FusionStrategy::None, 0.52}},
      {"static_fusion_3", {FusionStrategy::Static, 0.52}},
      {"entropy_guided_tau0.52", {FusionStrategy::Entropy, 0.52}},
      {"entropy_guided_tau0.45", {FusionStrategy::Entropy, 0.45}},
      {"entropy_guided_tau0.60", {FusionStrategy::Entropy, 0.60}},
      {"arithmetic_only_alpha0", {FusionStrategy::Arithmetic, 0.52}},
      {"arithmetic_only_matched", {FusionStrategy::Arithmetic, NAN}}};
  size_t compared = 0;
  for (const nlohmann::json &each : data["cases"]) {
    std::vector<FusionFeatures> chain(7);
    for (size_t i = 0; i < 7; ++i)
      chain[i] = {each["operator_entropy"][i],
                  each["operator_arithmetic"][i],
                  each["operator_memory"][i],
                  registers[i],
                  shared[i],
                  occupancy[i]};
    FusionLimits limits{each["max_registers"], each["max_shared_memory"],
                        each["min_occupancy"]};
    for (const auto &[name, policy] : policies) {
      const nlohmann::json &expected = each["policies"][name];
      FusionWeights weights;
      weights.tau =
          std::isnan(policy.second) ? double(expected["tau"]) : policy.second;
      FusionScorer scorer(chain, weights, limits);
      Partition found = scorer.partition(policy.first);
      EXPECT_EQ(sizes(found), expected["depths"].get<std::vector<size_t>>())
          << name << " of " << each["sequence_length"];
      if (policy.first == FusionStrategy::Arithmetic)
        weights.alpha = 0;
      FusionScorer scored(chain, weights, limits);
      for (size_t i = 0; expected.contains("scores") && i < found.size(); ++i)
        EXPECT_NEAR(scored.terms(found[i]).score, expected["scores"][i], 1e-9);
      ++compared;
    }
  }
  EXPECT_EQ(compared, 245u);
}
} // namespace
