//===- FusionScore.cpp - Which neighbours to fuse -------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Analysis/FusionScore.h"
#include <algorithm>
#include <limits>

using namespace corey;

static constexpr const char *kStrategyNames[] = {"none", "static", "arithmetic",
                                                 "entropy", "dp"};
/// Operators per region of FusionStrategy::Static.
static constexpr size_t kStaticSize = 3;
static constexpr double kBonusPerOperator = 0.18, kMaxBonus = 0.36;

const char *corey::fusionStrategyName(FusionStrategy strategy) {
  return kStrategyNames[static_cast<int>(strategy)];
}

bool corey::parseFusionStrategy(std::string_view name,
                                FusionStrategy &strategy) {
  for (FusionStrategy each : {FusionStrategy::None, FusionStrategy::Static,
                              FusionStrategy::Arithmetic,
                              FusionStrategy::Entropy, FusionStrategy::Dp})
    if (name == fusionStrategyName(each)) {
      strategy = each;
      return true;
    }
  return false;
}

//===----------------------------------------------------------------------===//
// Scores
//===----------------------------------------------------------------------===//

void FusionScorer::Range::add(double value) {
  low = std::min(low, value);
  high = std::max(high, value);
}

double FusionScorer::Range::scale(double value) const {
  if (!(high > low))
    return 0.5;
  return std::clamp((value - low) / (high - low), 0.0, 1.0);
}

// Regions are summed from left to right and never as differences of prefix
// sums: a limit that a region meets exactly would be missed by a rounding
// error, and limits may be infinite.
struct FusionScorer::Region {
  FusionRegion at;
  double entropy = 0, intensity = 0, memory = 0;
  /// Operators whose entropy is known.
  size_t known = 0;
  double registers = 0, shared = 0, occupancy = INFINITY;

  explicit Region(size_t begin) : at{begin, begin} {}
  void add(const FusionFeatures &op) {
    ++at.end;
    if (std::isfinite(op.entropy)) {
      entropy += op.entropy;
      ++known;
    }
    intensity += op.intensity;
    memory += op.memory;
    registers += op.registers;
    shared += op.shared;
    occupancy = std::min(occupancy, op.occupancy);
  }
};

FusionScorer::FusionScorer(std::vector<FusionFeatures> chain,
                           FusionWeights weights, FusionLimits limits)
    : features(std::move(chain)), w(weights), bounds(limits) {
  for (const FusionFeatures &op : features) {
    if (std::isfinite(op.entropy))
      entropies.add(op.entropy);
    intensities.add(op.intensity);
    memories.add(op.memory);
    resourcesGrow &= op.registers >= 0 && op.shared >= 0;
  }
  roots.resize(features.size() + 1);
  powers.resize(features.size() + 1);
  for (size_t n = 1; n <= features.size(); ++n) {
    roots[n] = std::sqrt(static_cast<double>(n));
    powers[n] = std::pow(static_cast<double>(n), 1.15);
  }
}

FusionTerms FusionScorer::score(const Region &region, double alpha) const {
  size_t n = region.at.size();
  FusionTerms terms;
  terms.entropy = region.known
                      ? entropies.scale(region.entropy / double(region.known))
                      : 0.5;
  terms.intensity = intensities.scale(region.intensity / roots[n]);
  terms.memory = memories.scale(region.memory / powers[n]);
  if (w.depthBonus)
    terms.bonus = std::min(kBonusPerOperator * double(n - 1), kMaxBonus);
  terms.score = alpha * terms.entropy + w.beta * terms.intensity -
                w.gamma * terms.memory + terms.bonus;
  terms.registers = region.registers;
  terms.shared = region.shared;
  terms.occupancy = region.occupancy;
  return terms;
}

FusionTerms FusionScorer::terms(FusionRegion region) const {
  if (region.begin >= region.end || region.end > features.size())
    return {};
  Region sums(region.begin);
  while (sums.at.end < region.end)
    sums.add(features[sums.at.end]);
  return score(sums, w.alpha);
}

bool FusionScorer::feasible(const FusionTerms &terms) const {
  return terms.registers <= bounds.registers && terms.shared <= bounds.shared &&
         terms.occupancy >= bounds.minOccupancy;
}

//===----------------------------------------------------------------------===//
// Partitions
//===----------------------------------------------------------------------===//

/// Regions from where the last one of every prefix begins.
static std::vector<FusionRegion>
regionsOf(const std::vector<size_t> &lastBegin) {
  std::vector<FusionRegion> regions;
  for (size_t end = lastBegin.size() - 1; end > 0; end = lastBegin[end])
    regions.push_back({lastBegin[end], end});
  std::reverse(regions.begin(), regions.end());
  return regions;
}

std::vector<FusionRegion>
FusionScorer::partition(FusionStrategy strategy,
                        const std::function<bool(FusionRegion)> &legal,
                        std::vector<FusionCandidate> *considered) const {
  size_t n = features.size();
  double alpha = strategy == FusionStrategy::Arithmetic ? 0 : w.alpha;
  auto evaluate = [&](const Region &region) {
    FusionCandidate candidate;
    candidate.region = region.at;
    candidate.terms = score(region, alpha);
    candidate.feasible = feasible(candidate.terms);
    return candidate;
  };
  auto note = [&](const FusionCandidate &candidate) {
    if (considered)
      considered->push_back(candidate);
  };
  std::vector<FusionRegion> regions;

  switch (strategy) {
  case FusionStrategy::None:
    for (size_t i = 0; i < n; ++i)
      regions.push_back({i, i + 1});
    return regions;

  case FusionStrategy::Static:
    for (size_t begin = 0; begin < n; begin = regions.back().end) {
      size_t size = std::min(kStaticSize, n - begin);
      for (; size > 1; --size) {
        Region region(begin);
        for (size_t i = 0; i < size; ++i)
          region.add(features[begin + i]);
        FusionCandidate candidate = evaluate(region);
        candidate.legal = !legal || legal(region.at);
        candidate.accepted = candidate.feasible && candidate.legal;
        note(candidate);
        if (candidate.accepted)
          break;
      }
      regions.push_back({begin, begin + size});
    }
    return regions;

  case FusionStrategy::Arithmetic:
  case FusionStrategy::Entropy: {
    if (n == 0)
      return regions;
    Region current(0);
    current.add(features[0]);
    for (size_t i = 1; i < n; ++i) {
      Region grown = current;
      grown.add(features[i]);
      FusionCandidate candidate = evaluate(grown);
      candidate.legal = !legal || legal(grown.at);
      candidate.accepted = candidate.legal && candidate.feasible &&
                           candidate.terms.score > w.tau;
      note(candidate);
      if (candidate.accepted) {
        current = grown;
        continue;
      }
      regions.push_back(current.at);
      current = Region(i);
      current.add(features[i]);
    }
    regions.push_back(current.at);
    return regions;
  }

  case FusionStrategy::Dp: {
    std::vector<double> best(n + 1, -INFINITY);
    std::vector<size_t> count(n + 1, 0), lastBegin(n + 1, 0);
    best[0] = 0;
    size_t firstNoted = considered ? considered->size() : 0;
    for (size_t begin = 0; begin < n; ++begin) {
      Region region(begin);
      while (region.at.end < n) {
        region.add(features[region.at.end]);
        FusionCandidate candidate = evaluate(region);
        size_t end = region.at.end, size = region.at.size();
        if (size > 1) {
          bool above = candidate.terms.score > w.tau;
          if (!candidate.feasible) {
            if (above && resourcesGrow)
              note(candidate);
            if (resourcesGrow)
              break;
            continue;
          }
          if (!above)
            continue;
          candidate.legal = !legal || legal(region.at);
          note(candidate);
          if (!candidate.legal)
            continue;
        }
        double total = best[begin] + double(size) * candidate.terms.score;
        size_t regionsUsed = count[begin] + 1;
        if (count[end] == 0 || total > best[end] ||
            (total == best[end] && regionsUsed < count[end])) {
          best[end] = total;
          count[end] = regionsUsed;
          lastBegin[end] = begin;
        }
      }
    }
    regions = regionsOf(lastBegin);
    if (considered) {
      std::vector<size_t> endOf(n, 0);
      for (FusionRegion region : regions)
        endOf[region.begin] = region.end;
      for (size_t i = firstNoted; i < considered->size(); ++i) {
        FusionCandidate &candidate = (*considered)[i];
        candidate.accepted =
            endOf[candidate.region.begin] == candidate.region.end;
      }
    }
    return regions;
  }
  }
  return regions;
}

std::vector<FusionRegion>
FusionScorer::cheapest(const std::function<double(FusionRegion)> &cost,
                       const std::function<bool(FusionRegion)> &legal,
                       bool monotone) const {
  /// The best partition of a prefix. Operators that cannot be avoided although
  /// their cost is not finite are counted apart from the sum, which would
  /// otherwise no longer tell the rest.
  struct Prefix {
    size_t unaffordable = 0, regions = 0;
    double cost = 0;
    bool set = false;
  };
  size_t n = features.size();
  std::vector<Prefix> best(n + 1);
  std::vector<size_t> lastBegin(n + 1, 0);
  best[0].set = true;
  for (size_t begin = 0; begin < n; ++begin) {
    Region region(begin);
    while (region.at.end < n) {
      region.add(features[region.at.end]);
      bool single = region.at.size() == 1;
      if (!single) {
        if (!feasible(score(region, w.alpha))) {
          if (resourcesGrow)
            break;
          continue;
        }
        if (legal && !legal(region.at)) {
          if (monotone)
            break;
          continue;
        }
      }
      double amount = cost(region.at);
      bool affordable = std::isfinite(amount);
      if (!affordable && !single)
        continue;
      Prefix next = best[begin];
      ++next.regions;
      next.unaffordable += !affordable;
      next.cost += affordable ? amount : 0;
      Prefix &old = best[region.at.end];
      bool better = !old.set;
      if (old.set && next.unaffordable != old.unaffordable)
        better = next.unaffordable < old.unaffordable;
      else if (old.set)
        better = next.cost < old.cost ||
                 (next.cost == old.cost && next.regions < old.regions);
      if (better) {
        old = next;
        lastBegin[region.at.end] = begin;
      }
    }
  }
  return regionsOf(lastBegin);
}

size_t corey::fusionDepthBound(double capacity, double perOperator) {
  constexpr size_t kMost = std::numeric_limits<size_t>::max();
  if (!(capacity >= 0) || std::isnan(perOperator))
    return 0;
  if (perOperator <= 0 || std::isinf(capacity))
    return kMost;
  double count = std::floor(capacity / perOperator);
  // 2^53: beyond that a double is no count.
  if (count >= 9007199254740992.0)
    return kMost;
  // The quotient may be rounded across an integer.
  if ((count + 1) * perOperator <= capacity)
    ++count;
  else if (count * perOperator > capacity)
    --count;
  return static_cast<size_t>(count);
}
